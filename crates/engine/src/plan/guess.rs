//! Guesses: pages that are planned unread, because both ends of their group say what they are.
//!
//! ```text
//!   page   0                15  16               31  32
//!          ●  ?  ?  ?  ?  ?  ●   ●  ?  ?  ?  ?  ?  ●   ○      ● probed, in a slot   ○ not in a slot
//!   slot   70               85  86              101
//! ```
//!
//! Neighbours have neighbouring slots. So where the first and the last page of a group of [`GROUP`]
//! equal slots that are as far apart as they are, the pages between most likely equal the slots
//! between, and the agent, who compares every byte before it merges (I1), is the one who finds
//! out. Of a run that some guest shares already this saves reading, hashing and looking up seven
//! pages of eight.
//!
//! A guess takes its ref before the agent is asked, as every plan does (I4). A wrong one costs what
//! any page costs that was written between the reading and the merge; from then on the page has a back-off
//! level, and such pages are read, not guessed.

use wire::CHUNK_PAGES;

use super::{Desk, Plan};
use crate::account::Taken;
use crate::page::{Entry, Slot, StoreId, Tag};

/// Pages that are guessed together.
const GROUP: usize = 16;

/// The slots that pages of a chunk are known to equal, by page.
type Known = [Option<Slot>; CHUNK_PAGES];

/// Whether two pages equal slots that are as far apart as they are.
fn fit(known: &Known, first: usize, last: usize) -> bool {
    let slot = |page: usize| known.get(page).copied().flatten();
    let (first_slot, last_slot) = (slot(first), slot(last));
    first_slot.is_some_and(|slot| last_slot == Some(slot.plus(last - first)))
}

impl Plan<'_> {
    /// Plans the groups whose ends fit; leaves in `settled` what is to be read.
    ///
    /// # Errors
    /// When the guest's memory cannot be read.
    pub(super) fn guess(&mut self, desk: &mut Desk, settled: &mut Vec<u16>) -> std::io::Result<()> {
        // Pages that are bound to their nodes would have to be asked for these one by one.
        if self.is_bound() || self.realm().slots.live() < GROUP as u64 {
            return Ok(());
        }
        let is_fresh = |page: usize| self.is_settled(page) && self.pages.level(page) == 0;
        let groups: Vec<usize> = (0..CHUNK_PAGES)
            .step_by(GROUP)
            .filter(|&first| (first..first + GROUP).all(is_fresh))
            .collect();
        let mut known = [None; CHUNK_PAGES];
        self.probe(desk, groups.iter().copied(), &mut known)?;
        // The start of the next group tells as much as the end of this one.
        let open = groups.iter().filter(|&&first| {
            known.get(first).is_some_and(Option::is_some) && !fit(&known, first, first + GROUP)
        });
        let ends: Vec<usize> = open.map(|first| first + GROUP - 1).collect();
        self.probe(desk, ends.into_iter(), &mut known)?;
        for first in groups {
            if fit(&known, first, first + GROUP - 1) || fit(&known, first, first + GROUP) {
                self.take_group(first, &known);
            }
        }
        settled.retain(|&page| self.pages.tag(page.into()) == Tag::Settled);
        Ok(())
    }

    /// Reads `pages`, ascending and at most a batch, and notes those that equal a slot.
    fn probe(
        &self,
        desk: &mut Desk,
        pages: impl Iterator<Item = usize>,
        known: &mut Known,
    ) -> std::io::Result<()> {
        let pages: Vec<u16> = pages.filter_map(|page| page.try_into().ok()).collect();
        if pages.is_empty() {
            return Ok(());
        }
        let memory = &*self.guest.memory;
        let read = desk.batch.fill(memory, self.chunk.address, &pages)?;
        let index = self.realm().index(StoreId::default());
        for (at, &page) in pages.iter().enumerate().take(read) {
            let key = desk.batch.page(at).and_then(|page| self.key(page));
            if let Some(Entry::Canonical(slot)) = key.and_then(|key| index.get(key))
                && let Some(known) = known.get_mut(usize::from(page))
            {
                *known = Some(slot);
            }
        }
        Ok(())
    }

    /// Plans a group for the slots from its first page's on; what has no room there is to be read.
    fn take_group(&mut self, first: usize, known: &Known) {
        let Some(slot) = known.get(first).copied().flatten() else {
            return;
        };
        let view = self.realm().slots.view();
        for place in 0..GROUP {
            let slot = slot.plus(place);
            if view.try_ref(slot) == Taken::Won {
                self.pages.set_planned(first + place, slot);
            }
        }
    }
}
