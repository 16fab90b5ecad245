//! The counters as the command line shows them.

mod hint;
mod reasons;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

use wire::{GuestStatus, RunMode, Status, StoreNode};

use reasons::Early;

use crate::domain::Domain;
use crate::guest::kin::shared_by_fork;
use crate::guest::{Guest, Standing};
use crate::page::{Class, PAGE};
use crate::run::core::Core;
use crate::run::early::{distance, is_young};
use crate::sync::lock;

/// Kernel memory of one mapping: 2 around a merged run were measured at 520 to 600 bytes.
const MAPPING_BYTES: u64 = 280;

/// All counters at this moment. Nothing is locked that a worker holds for long.
pub(crate) fn status(core: &Core) -> Status {
    let domains: Vec<_> = lock(&core.domains).values().cloned().collect();
    // Together: none is with those that are gone as well.
    let (guests, mut all) = {
        let guests = lock(&core.guests);
        (guests.clone(), *lock(&core.gone))
    };
    guests.iter().for_each(|guest| all.add(&guest.counters));
    let mut status = Status {
        knobs: core.knobs.values(),
        pages_over_limit: core.pages_over_limit.load(Relaxed),
        pages_merged_again: all.merged_again,
        pages_recycled: all.recycled,
        effective_period_ms: u64::try_from(core.knobs.period().as_millis()).unwrap_or(u64::MAX),
        full_scans: core.full_scans.load(Relaxed),
        schema: wire::SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: sys::host::name(),
        time: since_1970(),
        uptime_seconds: core.started.elapsed().as_secs(),
        window_max_us: all.window_ns / 1000,
        unserved: core.users.refusals.list(),
        ..Status::default()
    };
    for domain in &domains {
        let own = |guest: &&Arc<Guest>| Arc::ptr_eq(&guest.domain, domain);
        add_domain(&mut status, domain, guests.iter().filter(own));
    }
    for guest in &guests {
        status.huge_pages_kept += guest.counters.huge_kept();
        status.metadata_bytes = status.metadata_bytes.saturating_add(own_cost(guest));
    }
    status.net_saved_bytes = net(status.saved_bytes, status.metadata_bytes);
    status.cpu_seconds = sys::process::cpu_time().as_secs_f64() + seconds(all.charged_ns);
    status.first_merges_ms = until_first_merges(core, &status, &guests);
    let early = guests.iter().filter_map(|guest| {
        let early = match guest.is_new() {
            true => Early::New,
            false => Early::Observed {
                left: until_merged(core, guest).or_else(|| until_at_rest(core, guest))?,
                answers: guest.is_responsive() || guest.settles(),
            },
        };
        Some((guest.pid, early))
    });
    let early: BTreeMap<_, _> = early.collect();
    reasons::give(&mut status.guests, &early, &status.knobs);
    status
}

fn net(saved: u64, cost: u64) -> i64 {
    i64::try_from(i128::from(saved) - i128::from(cost)).unwrap_or(i64::MIN)
}

fn since_1970() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Looks that a page takes until it is merged: it is seen, rests, and has settled.
const LOOKS: u32 = 3;

/// How long until the first pages are merged, in milliseconds: as long as none are, and some may be.
fn until_first_merges(core: &Core, status: &Status, guests: &[Arc<Guest>]) -> Option<u64> {
    let merged = status.pages_shared + status.pages_sharing + status.saved_bytes > 0;
    if merged || status.knobs.run != RunMode::Run {
        return None;
    }
    let until = guests.iter().filter_map(|guest| until_merged(core, guest));
    u64::try_from(until.min()?.as_millis()).ok()
}

/// How long until the first pages of a guest can be merged: as long as it was looked at too seldom.
fn until_merged(core: &Core, guest: &Guest) -> Option<Duration> {
    if guest.counters.regions.load(Relaxed) == 0 {
        return None;
    }
    let period = core.knobs.period();
    let since = lock(&core.last_look).map_or(period, |last| last.elapsed());
    let looks = u32::try_from(guest.counters.looks.load(Relaxed)).ok()?;
    // Those that were looked at more often have nothing that equals anything.
    let more = (LOOKS - 1).checked_sub(looks)?;
    let left = |distance: Duration| distance.saturating_sub(since) + distance * more;
    let early = left(distance(period));
    let is_early =
        is_young(guest.came.elapsed() + early, period) && !guest.passes.borrowed.load(Relaxed);
    Some(if is_early { early } else { left(period) })
}

/// The same of a guest most of whose pages were not at rest in early looks: two periods after it came they are known.
fn until_at_rest(core: &Core, guest: &Guest) -> Option<Duration> {
    let classes = guest.counters.classes();
    let pages = |class: Class| classes[class as usize];
    let merged = pages(Class::Merged) + pages(Class::Zeroed);
    let in_motion = pages(Class::Volatile);
    let is_so = in_motion > 0 && merged == 0 && in_motion >= classes.iter().sum::<u64>() / 2;
    let left = (core.knobs.period() * 2).checked_sub(guest.came.elapsed());
    left.filter(|_| is_so)
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
    let nodes = domain.frames.by_node().into_iter();
    status
        .store_nodes
        .extend(nodes.map(|(node, found)| StoreNode {
            domain: domain.name.as_str().into(),
            node,
            pages: found.pages,
            astray: found.astray,
        }));
    let first = status.guests.len();
    let mut merged = 0;
    let (mut relatives, mut costs) = (Vec::new(), Vec::new());
    for guest in guests.filter(|guest| guest.standing() != Standing::Ghost) {
        let its = describe(guest);
        status.pages_unshared += its.pages_unshared;
        status.pages_volatile += its.pages_volatile;
        status.zero_pages += its.zero_pages;
        status.pages_broken += its.pages_broken;
        status.pages_pinned += its.pages_pinned;
        status.pages_foreign += its.pages_foreign;
        status.pages_unfit += its.pages_unfit;
        status.pages_skipped += its.pages_skipped;
        merged += its.pages_sharing;
        relatives.push((guest.pid, &guest.kin, its.pages_sharing));
        status.guests.push(its);
        costs.push(own_cost(guest));
    }
    // While workers are at it, a page may count as merged a moment before or after its slot does.
    let shared = domain.slots.shared().min(merged);
    status.pages_shared += shared;
    status.pages_sharing += merged - shared;
    let by_fork = shared_by_fork(&relatives);
    let saved = (merged - shared).saturating_sub(by_fork.iter().sum());
    let new = status.guests.get_mut(first..).unwrap_or_default();
    status.saved_bytes += divide_saving(new, &by_fork, saved);
    for (guest, cost) in new.iter_mut().zip(costs) {
        guest.net_saved_bytes = net(guest.saved_bytes, cost);
    }
}

/// Memory that a guest alone costs, in bytes: its tables, its agent, and the mappings it has more than before.
fn own_cost(guest: &Guest) -> u64 {
    let counters = &guest.counters;
    let (now, before) = (&counters.vmas, &counters.vmas_before);
    let slab = now.load(Relaxed).saturating_sub(before.load(Relaxed)) * MAPPING_BYTES;
    let tables = counters.table_bytes.load(Relaxed);
    let own = tables.saturating_add(counters.agent_bytes.load(Relaxed));
    own.saturating_add(slab)
}

fn describe(guest: &Guest) -> GuestStatus {
    let classes = guest.counters.classes();
    let pages = |class: Class| classes[class as usize];
    let mut status = GuestStatus {
        pid: guest.pid,
        uid: guest.uid,
        comm: guest.memory.name(),
        joined_as: guest.joined_as(),
        domain: guest.domain.name.as_str().into(),
        regions: guest.counters.regions.load(Relaxed),
        pages: classes.iter().sum(),
        pages_sharing: pages(Class::Merged),
        zero_pages: pages(Class::Zero) + pages(Class::Zeroed),
        pages_unshared: pages(Class::Unshared),
        pages_volatile: pages(Class::Volatile),
        pages_skipped: Class::LEFT_ALONE.map(pages).iter().sum(),
        pages_stored: guest.counters.stored(),
        pages_broken: pages(Class::Broken),
        pages_pinned: pages(Class::Pinned),
        pages_foreign: pages(Class::Foreign),
        pages_unfit: pages(Class::Unfit),
        pages_recycled: guest.counters.recycled(),
        pages_unread: guest.counters.unread().min(pages(Class::Merged)),
        hint: None,
        pins: guest.pins(),
        at_limit: guest.at_limit(),
        leaves: guest.why_it_leaves(),
        stuck: guest.is_held_up(),
        saved_bytes: pages(Class::Zeroed) * PAGE,
        net_saved_bytes: 0,
        cpu_seconds: seconds(guest.counters.charged_ns()),
        name: None,
        attached: guest.is_attached(),
        reasons: Vec::new(),
        vmas: guest.counters.vmas.load(Relaxed),
        responsive: guest.is_responsive(),
    };
    status.hint = hint::of(&status, guest.counters.unread_looks.load(Relaxed));
    status
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

    /// That it has used all time there is: it is shown the time that it was waited for, and no more is left when it is gone.
    #[test]
    fn the_word_of_an_agent_does_not_spoil_the_cpu_time() {
        let (lab, guest) = crate::testing::fake::Lab::with_guest();
        let honest = lab.status().cpu_seconds;
        guest.counters.cpu_ns.store(u64::MAX, Relaxed);
        guest.note_talk(Duration::from_millis(1));
        let status = lab.status();
        let most = 60.0; // of this process
        assert!(status.cpu_seconds - honest < most, "{status:?}");
        assert!(status.guests[0].cpu_seconds < 1.0, "{status:?}");
        drop(guest);
        lab.world(|world| world.kill(0));
        lab.rounds(3);
        let status = lab.status();
        assert!(status.guests.is_empty(), "{status:?}");
        assert!(status.cpu_seconds - honest < most, "{status:?}");
    }

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
