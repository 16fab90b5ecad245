//! Guesses: pages that are planned unread, because both ends of their group say what they are.
//!
//! ```text
//!   page   0                15  16               31  32
//!          ●  ?  ?  ?  ?  ?  ●   ●  ?  ?  ?  ?  ?  ●   ○      ● probed, in a slot   ○ not in a slot
//!   slot   70               85  86              101
//! ```
//!
//! Neighbours have neighbouring slots. The first and the last page of a group of [`GROUP`] may equal slots that
//! are as far apart as they are. Then the pages between most likely equal the slots between. The agent compares
//! every byte before it merges (I1), and finds out. Of a run that some guest shares already this saves reading,
//! hashing and looking up seven pages of eight.
//!
//! Where at least half of a chunk's groups are so, what is in it that others share is in slots by now. A group of
//! it of which no other guest has the ends or the middle is most likely private. It is put off until all other chunks have
//! been visited: pages that save memory come first. It has to be read all the same, then. Where shared and private pages
//! alternate in short runs, which shows in many groups with one end of each, nothing is put off: all that is
//! shared is to be mapped together.
//!
//! A guess takes its ref before the agent is asked, as every plan does (I4). A wrong one costs what
//! any page costs that was written between the reading and the merge; from then on the page has a back-off
//! level, and such pages are read, not guessed.

use wire::CHUNK_PAGES;

use crate::domain::refs::Taken;
use crate::merge::plan::{Desk, Plan};
use crate::page::{Entry, Slot, StoreId, Tag};

/// Pages that are guessed together.
const GROUP: usize = 16;
/// Nothing is put off where more than one in so many groups has a shared and a private end.
const MIXED: usize = 4;

/// What a probe found a page to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It equals this slot.
    Slot(Slot),
    /// Nobody's page is known to be like it.
    New,
    /// Zeros, or like a candidate.
    Other,
}

/// What the pages of a chunk were found to be, by page.
pub(super) struct Known([Option<Found>; CHUNK_PAGES]);

impl Known {
    pub(super) fn nothing() -> Self {
        Self([None; CHUNK_PAGES])
    }

    fn at(&self, page: usize) -> Option<Found> {
        self.0.get(page).copied().flatten()
    }

    /// The slot that a page equals.
    pub(super) fn slot(&self, page: usize) -> Option<Slot> {
        match self.at(page) {
            Some(Found::Slot(slot)) => Some(slot),
            _ => None,
        }
    }

    /// Whether two pages equal slots that are as far apart as they are.
    fn fit(&self, first: usize, last: usize) -> bool {
        let (first_slot, last_slot) = (self.slot(first), self.slot(last));
        first_slot.is_some_and(|slot| last_slot == Some(slot.plus(last - first)))
    }

    /// Whether nobody has the ends and the middle of a group.
    fn is_new(&self, first: usize) -> bool {
        let new = |page| self.at(page) == Some(Found::New);
        [0, GROUP / 2, GROUP - 1]
            .iter()
            .all(|place| new(first + place))
    }
}

impl Plan<'_> {
    /// Plans what can be planned unread; leaves in `settled` what is to be read.
    ///
    /// # Errors
    /// When the guest's memory cannot be read.
    pub(super) fn guess(&mut self, desk: &mut Desk, settled: &mut Vec<u16>) -> std::io::Result<()> {
        // Pages that are bound to their nodes would have to be asked for these one by one, and a whole visit is
        // for pages that were not guessed at the first.
        if self.whole || self.is_bound() || self.domain().slots.live() < GROUP as u64 {
            return Ok(());
        }
        if !self.follow(desk)? {
            self.guess_groups(desk)?;
        }
        let later = self.pages.later;
        settled.retain(|&page| {
            let page = usize::from(page);
            self.pages.tag(page) == Tag::Settled && !later.contains(page)
        });
        Ok(())
    }

    /// Plans the groups whose ends fit.
    fn guess_groups(&mut self, desk: &mut Desk) -> std::io::Result<()> {
        let groups: Vec<usize> = (0..CHUNK_PAGES)
            .step_by(GROUP)
            .filter(|&first| (first..first + GROUP).all(|page| self.is_fresh(page)))
            .collect();
        let mut known = Known::nothing();
        self.probe(desk, groups.iter().copied(), &mut known)?;
        let begins = groups.iter().filter(|&&first| known.slot(first).is_some());
        let is_shared = 2 * begins.count() >= groups.len();
        // The start of the next group tells as much as the end of this one.
        let more = groups.iter().flat_map(|&first| {
            let (middle, last) = (first + GROUP / 2, first + GROUP - 1);
            match known.at(first) {
                Some(Found::Slot(_)) if !known.fit(first, first + GROUP) => [None, Some(last)],
                Some(Found::New) if is_shared => [Some(middle), Some(last)],
                _ => [None; 2],
            }
        });
        let more: Vec<usize> = more.flatten().collect();
        self.probe(desk, more.into_iter(), &mut known)?;
        let fits = |first| known.fit(first, first + GROUP - 1) || known.fit(first, first + GROUP);
        let mixed = groups
            .iter()
            .filter(|&&first| !fits(first) && !known.is_new(first));
        let puts_off = is_shared && MIXED * mixed.count() <= groups.len();
        for first in groups {
            if fits(first) {
                self.take_group(first, &known);
            } else if puts_off && known.is_new(first) {
                (first..first + GROUP).for_each(|page| self.pages.later.insert(page));
            }
        }
        Ok(())
    }

    /// Reads `pages`, ascending and at most a batch, and notes what they are.
    pub(super) fn probe(
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
        let index = self.domain().index(StoreId::default());
        let key = |at| self.key(desk.batch.page(at));
        let keys: Vec<_> = (0..read).map(key).collect();
        let wanted: Vec<_> = keys.iter().copied().flatten().collect();
        index.expect(&wanted);
        for (&page, key) in pages.iter().zip(keys) {
            let found = match key.map(|key| index.get(key)) {
                Some(Some(Entry::Canonical(slot))) => Found::Slot(slot),
                Some(None) => Found::New,
                _ => Found::Other,
            };
            known.0[usize::from(page)] = Some(found);
        }
        Ok(())
    }

    /// Plans a group for the slots from its first page's on; what has no room there is to be read.
    fn take_group(&mut self, first: usize, known: &Known) {
        let Some(slot) = known.slot(first) else {
            return;
        };
        let view = self.domain().slots.view();
        for place in 0..GROUP {
            let slot = slot.plus(place);
            if view.try_ref(slot) == Taken::Won {
                self.pages.set_planned(first + place, slot);
            }
        }
    }
}
