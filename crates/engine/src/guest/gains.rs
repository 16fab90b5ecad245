//! What a guest gains in a pass: the frames that its pages save which were merged in it.
//!
//! A frame is saved by each page that came to a slot, but for one where nothing else maps it. So a guest's number tells of
//! its own pages only. The sum that a whole domain saves would tell a user what others merge at that time.

use std::sync::Arc;

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
pub(crate) fn frames(all: &[(&Arc<Guest>, &Gains)]) -> Vec<u64> {
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

impl Guest {
    /// Notes from now on what its pages gain.
    pub(crate) fn begin_gains(&self) {
        *lock(&self.gains) = Some(Gains::default());
    }

    /// What they have gained.
    pub(crate) fn end_gains(&self) -> Gains {
        lock(&self.gains).take().unwrap_or_default()
    }
}
