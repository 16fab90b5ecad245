//! The counters as the command line shows them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use wire::{GuestStatus, PAGE_BYTES, Status};

use crate::domain::Domain;
use crate::guest::counters::Census;
use crate::guest::kin::{Relative, shared_by_fork};
use crate::guest::{Guest, Standing};
use crate::page::Class;
use crate::run::core::Core;
use crate::sync::lock;

const PAGE: u64 = PAGE_BYTES as u64;
/// Kernel memory of one mapping: 2 around a merged run were measured at 520 to 600 bytes.
const MAPPING_BYTES: u64 = 280;

/// All counters at this moment. Nothing is locked that a worker holds for long.
pub(crate) fn status(core: &Core) -> Status {
    let domains: Vec<_> = lock(&core.domains).values().cloned().collect();
    let guests: Vec<_> = lock(&core.guests).clone();
    let mut status = Status {
        knobs: core.knobs.values(),
        pages_over_limit: core.pages_over_limit.load(Relaxed),
        pages_merged_again: core.gone_merged_again.load(Relaxed),
        effective_period_ms: u64::try_from(core.knobs.period().as_millis()).unwrap_or(u64::MAX),
        full_scans: core.full_scans.load(Relaxed),
        window_max_us: core.gone_window_ns.load(Relaxed) / 1000,
        unserved: core.users.refusals.list(),
        ..Status::default()
    };
    let mut cpu_ns = core.gone_cpu_ns.load(Relaxed);
    let mut slab = 0u64;
    for domain in &domains {
        let own = |guest: &&Arc<Guest>| Arc::ptr_eq(&guest.domain, domain);
        add_domain(&mut status, domain, guests.iter().filter(own));
    }
    for guest in &guests {
        let counters = &guest.counters;
        cpu_ns = cpu_ns.saturating_add(counters.cpu_ns.load(Relaxed));
        status.window_max_us = status
            .window_max_us
            .max(counters.window_ns.load(Relaxed) / 1000);
        status.huge_pages_kept += counters.huge_kept();
        status.pages_merged_again += counters.merged_again.load(Relaxed);
        status.metadata_bytes = status
            .metadata_bytes
            .saturating_add(counters.table_bytes.load(Relaxed))
            .saturating_add(counters.agent_bytes.load(Relaxed));
        let (now, before) = (&counters.vmas, &counters.vmas_before);
        slab += now.load(Relaxed).saturating_sub(before.load(Relaxed)) * MAPPING_BYTES;
    }
    status.metadata_bytes = status.metadata_bytes.saturating_add(slab);
    let of_guests = guests.iter().map(|guest| guest.counters.recycled());
    status.pages_recycled = of_guests.chain([*lock(&core.gone_recycled)]).sum();
    let net = i128::from(status.saved_bytes) - i128::from(status.metadata_bytes);
    status.net_saved_bytes = i64::try_from(net).unwrap_or(i64::MIN);
    status.cpu_seconds = sys::process::cpu_time().as_secs_f64() + seconds(cpu_ns);
    status
}

#[allow(clippy::cast_precision_loss)] // a figure to look at
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

fn add_domain<'a>(
    status: &mut Status,
    domain: &Domain,
    guests: impl Iterator<Item = &'a Arc<Guest>>,
) {
    status.metadata_bytes += domain.memory_bytes() as u64;
    status.store_bytes += (domain.slots.live() + domain.slots.held()) * PAGE;
    status.stable_node_chains += domain.slots.chains.count();
    status.stable_node_dups += domain.slots.chains.copies();
    let first = status.guests.len();
    let mut merged = 0;
    let mut relatives = Vec::new();
    for guest in guests.filter(|guest| guest.standing() != Standing::Ghost) {
        let census = guest.counters.census();
        let pages = |class| census.pages(class);
        status.pages_unshared += pages(Class::Unshared);
        status.pages_volatile += pages(Class::Volatile);
        status.zero_pages += pages(Class::Zero) + pages(Class::Zeroed);
        status.pages_broken += pages(Class::Broken);
        status.pages_pinned += pages(Class::Pinned);
        status.pages_skipped += pages(Class::Broken) + pages(Class::Pinned) + pages(Class::Skipped);
        merged += pages(Class::Merged);
        relatives.push(Relative {
            pid: guest.pid,
            kin: &guest.kin,
            merged: pages(Class::Merged),
        });
        status.guests.push(describe(guest, &census));
    }
    // While workers are at it, a page may count as merged a moment before or after its slot does.
    let shared = domain.slots.shared().min(merged);
    status.pages_shared += shared;
    status.pages_sharing += merged - shared;
    let by_fork = shared_by_fork(&relatives);
    let saved = (merged - shared).saturating_sub(by_fork.iter().sum());
    let new = status.guests.get_mut(first..).unwrap_or_default();
    status.saved_bytes += divide_saving(new, &by_fork, saved);
}

fn describe(guest: &Guest, census: &Census) -> GuestStatus {
    let pages = |class| census.pages(class);
    GuestStatus {
        pid: guest.pid,
        uid: guest.user.uid,
        comm: guest.memory.name(),
        domain: guest.domain.name.as_str().into(),
        regions: guest.counters.regions.load(Relaxed),
        pages: census.present(),
        pages_sharing: pages(Class::Merged),
        zero_pages: pages(Class::Zero) + pages(Class::Zeroed),
        pages_unshared: pages(Class::Unshared),
        pages_volatile: pages(Class::Volatile),
        pages_skipped: pages(Class::Broken) + pages(Class::Pinned) + pages(Class::Skipped),
        pages_stored: guest.counters.stored(),
        pages_broken: pages(Class::Broken),
        pages_pinned: pages(Class::Pinned),
        pages_recycled: guest.counters.recycled(),
        pins: guest.pins(),
        at_limit: guest.refusal(),
        leaves: guest.why_it_leaves(),
        stuck: guest.is_stuck() || guest.user.is_stuck(),
        saved_bytes: pages(Class::Zeroed) * PAGE,
        vmas: guest.counters.vmas.load(Relaxed),
        responsive: guest.is_responsive(),
    }
}

/// Adds to each guest its part of `saved` pages, in proportion to those of its merged pages that are not
/// shared `by_fork`, such that the parts add up exactly. Gives the sum of all guests' savings.
fn divide_saving(guests: &mut [GuestStatus], by_fork: &[u64], saved: u64) -> u64 {
    let own = |guest: &GuestStatus, by_fork: &u64| guest.pages_sharing.saturating_sub(*by_fork);
    let both = guests.iter().zip(by_fork);
    let all: u64 = both.map(|(guest, by_fork)| own(guest, by_fork)).sum();
    let part = |pages: u64| {
        let exact = u128::from(saved) * u128::from(pages) / u128::from(all.max(1));
        u64::try_from(exact).unwrap_or(0)
    };
    let (mut before, mut sum) = (0, 0);
    for (guest, by_fork) in guests.iter_mut().zip(by_fork) {
        let after = before + own(guest, by_fork);
        guest.saved_bytes += (part(after) - part(before)) * PAGE;
        sum += guest.saved_bytes;
        before = after;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_saving_add_up() {
        let guest = |pages_sharing| GuestStatus {
            pages_sharing,
            ..GuestStatus::default()
        };
        let mut guests = [guest(1), guest(0), guest(7), guest(5)];
        assert_eq!(divide_saving(&mut guests, &[0; 4], 10), 10 * PAGE);
        assert_eq!(guests.iter().map(|g| g.saved_bytes).sum::<u64>(), 10 * PAGE);
        assert_eq!(guests[1].saved_bytes, 0);
        assert_eq!(divide_saving(&mut [], &[], 3), 0);
        let mut guests = [guest(7), guest(7)];
        assert_eq!(divide_saving(&mut guests, &[0, 7], 3), 3 * PAGE);
        assert_eq!(guests.map(|guest| guest.saved_bytes), [3 * PAGE, 0]);
    }
}
