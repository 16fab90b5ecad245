//! Passes over a guest's memory: how far one came, why it left memory alone, and the gains of the guest.
//!
//! The gains are the frames saved by pages that were merged in the pass. Each page that came to a slot saves a frame, but for
//! one page of a slot that nothing else maps. So a guest's number tells of its own pages only. The sum that a whole domain
//! saves would tell a user what others merge at that time.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::guest::Guest;
use crate::page::Slot;
use crate::sync::lock;

/// Slots that are noted: of 4 GiB. From these it is inferred what more pages save.
const MOST: usize = 1 << 20;

/// The pages of a guest that were merged in a pass.
#[derive(Debug, Default)]
pub(crate) struct Gains {
    slots: Vec<Slot>,
    /// Those that are not noted.
    more: u64,
    /// Pages that the kernel's zero page took the place of.
    pub(crate) zeroed: u64,
}

impl Gains {
    /// Notes that a page came to this slot.
    pub(crate) fn add(&mut self, slot: Slot) {
        match self.slots.len() < MOST {
            true => self.slots.push(slot),
            false => self.more += 1,
        }
    }

    /// Frames saved, where those of `noted` slots are.
    fn frames(&self, noted: u64) -> u64 {
        let all = u128::from(noted) * u128::from(self.more);
        let more = all / self.slots.len().max(1) as u128;
        self.zeroed + noted + u64::try_from(more).unwrap_or(u64::MAX)
    }
}

/// Frames that each of these guests has saved. Of pages of several that share a slot with nothing else, all but the first count.
pub(crate) fn frames(all: &[(&Arc<Guest>, Gains)]) -> Vec<u64> {
    let mut noted = vec![0; all.len()];
    let mut sites: Vec<_> = all
        .iter()
        .enumerate()
        .flat_map(|(at, (guest, gains))| {
            let domain = Arc::as_ptr(&guest.domain);
            gains.slots.iter().map(move |&slot| (domain, slot, at))
        })
        .collect();
    sites.sort_unstable();
    for its in sites.chunk_by(|a, b| a.0 == b.0) {
        let view = all[its[0].2].0.domain.slots.view();
        for group in its.chunk_by(|a, b| a.1 == b.1) {
            let (_, now) = view.counts(group[0].1);
            let alone = now as usize <= group.len();
            for &(_, _, at) in group.iter().skip(usize::from(alone)) {
                noted[at] += 1;
            }
        }
    }
    let both = all.iter().zip(noted);
    both.map(|((_, gains), noted)| gains.frames(noted))
        .collect()
}

/// What is known of the passes over a guest's memory.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    /// Where the pass's next look goes on, if the last was not finished. The rounds have a place of their own.
    pub(crate) progress: AtomicU64,
    /// There was no time to look at all of the memory.
    cut_short: AtomicBool,
    /// What pages gain in the pass under way, if that is for a wish.
    pub(crate) gains: Mutex<Option<Gains>>,
    /// Why memory was not merged at once in the last one.
    pub(crate) not_now: Mutex<Option<String>>,
    /// There was such a reason in a pass: a descriptor by which the kernel may write to pages that are not pinned. It may be closed now,
    /// and its I/O go on.
    pub(crate) borrowed: AtomicBool,
    /// When the last one ended that was for a wish.
    pub(crate) ended: Mutex<Option<Instant>>,
}

impl Passes {
    /// Begins one: all memory is to be looked at.
    pub(crate) fn begin(&self) {
        self.progress.store(0, Relaxed);
        self.cut_short.store(false, Relaxed);
        *lock(&self.not_now) = None;
    }

    /// Notes that there was no time to look at all of the memory.
    pub(crate) fn cut_short(&self) {
        self.cut_short.store(true, Relaxed);
    }

    /// Whether there was no time for that.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.cut_short.load(Relaxed)
    }
}

impl Guest {
    /// Looks whether its pages may be merged that were not quiet for two periods, and notes why not. A writer to a frame past the page tables
    /// must be seen by MOVE, and MOVE sees pins only.
    pub(crate) fn check_borrows(&self) -> bool {
        let most = self.user.common.limits.descriptors_per_process;
        let found = self.memory.borrows(most);
        let may = found.is_none();
        self.passes.borrowed.fetch_or(!may, Relaxed);
        *lock(&self.passes.not_now) = found;
        may
    }
}
