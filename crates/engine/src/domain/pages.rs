//! The states of the pages of one chunk: one byte each, and more where it is of use.
//!
//! ```text
//!  Pages (behind the chunk's lock)
//!  ┌─────────────────────────────────────────────┐
//!  │ tags    512 × (level, tag)                  │
//!  │ fingerprints, slots     see `sparse`        │
//!  │ homes   512 × index of a candidate, if any  │
//!  │ busy / still / merged   the tags, as bits   │
//!  │ offered / stored        the agent's word    │
//!  └─────────────────────────────────────────────┘
//! ```
//!
//! Every present page is in exactly one of `busy` (looked at in every round), `still` (only when
//! something happened to it) and `merged`. That makes a quiet chunk cost a few word operations.

use wire::{CHUNK_PAGES, PageBits, Recycled};

use crate::domain::patterns::{self, Patterns};
use crate::domain::sparse::{Fingerprints, PageSlots};
use crate::page::{CLASSES, Class, Fingerprint, NEVER, Site, Slot, StoreId, Tag};

/// A page is tried again every `2^level` rounds, at most this often halved.
const MAX_LEVEL: u8 = 6;

/// Tallies of a chunk: its pages by class, and behind them those stored, those unread, and itself if it is left alone.
pub(crate) const STORED: usize = CLASSES;
pub(crate) const UNREAD: usize = CLASSES + 1;
pub(crate) const KEPT: usize = CLASSES + 2;
pub(crate) const TALLIES: usize = CLASSES + 3;

/// What is known of the pages of one chunk.
#[derive(Debug)]
pub(crate) struct Pages {
    /// The number of the chunk.
    chunk: u32,
    tags: [u8; CHUNK_PAGES],
    fingerprints: Fingerprints,
    slots: PageSlots,
    /// The index each candidate is in; `None` while all are in the first, as on a machine with one
    /// node.
    homes: Option<Box<[StoreId; CHUNK_PAGES]>>,
    /// Pages to look at in every round.
    pub(crate) busy: PageBits,
    /// Pages that need a look only when something happened to them.
    pub(crate) still: PageBits,
    /// Merged pages.
    pub(crate) merged: PageBits,
    /// Pages the guest offers.
    pub(crate) offered: PageBits,
    /// Pages that lie in a mapping of a store, as the agent last said.
    pub(crate) stored: PageBits,
    /// Pages left for a whole visit; only the settled ones count.
    pub(crate) later: PageBits,
    /// Merged pages that the guest had not read at the last look.
    pub(crate) unread: u16,
    counts: [u16; CLASSES],
    /// The tallies as they were at the last call of [`Self::take_changes`].
    shown: [u16; TALLIES],
    /// Whether the chunk is one huge page, as the last look showed it.
    pub(crate) huge: bool,
    /// Whether it is left alone for that.
    pub(crate) kept: bool,
    /// Recycled since the last count: discarded, or zeroed. Of those that the guest told of it knows nothing.
    recycled: Recycled,
}

impl Pages {
    pub(crate) fn new(chunk: u32, offered: PageBits) -> Self {
        Self {
            chunk,
            tags: [0; CHUNK_PAGES],
            fingerprints: Fingerprints::default(),
            slots: PageSlots::default(),
            homes: None,
            busy: PageBits::EMPTY,
            still: PageBits::EMPTY,
            merged: PageBits::EMPTY,
            offered,
            stored: PageBits::EMPTY,
            later: PageBits::EMPTY,
            unread: 0,
            counts: [0; CLASSES],
            shown: [0; TALLIES],
            huge: false,
            kept: false,
            recycled: Recycled::default(),
        }
    }

    /// The site of `page`.
    pub(crate) fn site(&self, page: usize) -> Site {
        Site {
            chunk: self.chunk,
            page: match u16::try_from(page) {
                Ok(page) if usize::from(page) < CHUNK_PAGES => page,
                _ => panic!("page {page} of chunk {}", self.chunk),
            },
        }
    }

    fn byte(&self, page: usize) -> u8 {
        self.tags[page]
    }

    /// What is known of `page`.
    pub(crate) fn tag(&self, page: usize) -> Tag {
        Tag::of(self.byte(page))
    }

    /// What is known of the 64 pages of a word, if that is the same for all.
    pub(crate) fn tag_of_word(&self, word: usize) -> Option<Tag> {
        let bytes = self.tags.get(word * 64..)?.first_chunk::<64>()?;
        let [first, ..] = bytes;
        let same = bytes.iter().all(|byte| byte == first);
        same.then(|| Tag::of(*first))
    }

    /// How often merging `page` failed lately.
    pub(crate) fn level(&self, page: usize) -> u8 {
        self.byte(page) >> 4
    }

    /// The fingerprint of a candidate.
    pub(crate) fn fingerprint(&self, page: usize) -> Fingerprint {
        let its = self.fingerprints.get(page);
        its.unwrap_or_else(|| panic!("page {page} is no candidate: {:?}", self.tag(page)))
    }

    /// The candidates, in ascending order.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = usize> + use<> {
        self.fingerprints.candidates().pages()
    }

    /// The pages planned for a slot, in ascending order.
    pub(crate) fn planned(&self) -> impl Iterator<Item = usize> + '_ {
        self.busy
            .pages()
            .filter(|&page| self.tag(page) == Tag::Planned)
    }

    /// The slot of a planned, asked or merged page.
    pub(crate) fn slot(&self, page: usize) -> Slot {
        let its = self.slots.get(page);
        its.unwrap_or_else(|| panic!("page {page} has no slot: {:?}", self.tag(page)))
    }

    /// Notes in `patterns`, which take at most so many bytes, how the chunk at `place` is merged, if enough of it is.
    pub(crate) fn show(&self, patterns: &Patterns, place: u64, most: usize) {
        if self.count(Class::Merged) >= patterns::LEAST {
            patterns.note(place, &self.slots, most);
        }
    }

    /// The slots of all planned, asked and merged pages.
    pub(crate) fn slots(&self) -> [Option<Slot>; CHUNK_PAGES] {
        self.slots.all()
    }

    /// Makes `page` a candidate, in the index `home`.
    pub(crate) fn set_candidate(&mut self, page: usize, fingerprint: Fingerprint, home: StoreId) {
        self.set(page, Tag::Candidate);
        self.fingerprints.set(page, fingerprint);
        if self.homes.is_some() || home != StoreId::default() {
            let homes = self
                .homes
                .get_or_insert_with(|| Box::new([StoreId::default(); CHUNK_PAGES]));
            homes[page] = home;
        }
    }

    /// The index that a candidate is in.
    pub(crate) fn home(&self, page: usize) -> StoreId {
        match &self.homes {
            None => StoreId::default(), // all are in the first
            Some(homes) => homes[page],
        }
    }

    /// Plans `page` for a slot that it holds a ref of.
    pub(crate) fn set_planned(&mut self, page: usize, slot: Slot) {
        self.set(page, Tag::Planned);
        self.slots.set(page, slot);
    }

    /// Notes that `page` maps a slot since before this engine knew of it; it holds a ref.
    pub(crate) fn set_merged(&mut self, page: usize, slot: Slot) {
        self.set(page, Tag::Merged);
        self.slots.set(page, slot);
    }

    /// Leaves `page` alone for twice as many rounds as last time.
    pub(crate) fn back_off(&mut self, page: usize, tag: Tag) {
        let level = self.level(page).saturating_add(1).min(MAX_LEVEL);
        self.set_with(page, tag, level);
    }

    /// Notes that `page` was not what it was planned for: when it has settled again it is read, not
    /// guessed.
    pub(crate) fn distrust(&mut self, page: usize) {
        let level = self.level(page).max(1);
        self.set_with(page, Tag::Written, level);
    }

    /// Leaves `page` alone until it is written.
    pub(crate) fn give_up(&mut self, page: usize) {
        self.set_with(page, Tag::Skipped, NEVER);
    }

    /// Changes what is known of `page`.
    pub(crate) fn set(&mut self, page: usize, tag: Tag) {
        self.set_with(page, tag, self.level_as(page, tag));
    }

    /// The level that `page` has when it becomes `tag`.
    fn level_as(&self, page: usize, tag: Tag) -> u8 {
        match tag.keeps_level() {
            true => self.level(page),
            false => 0,
        }
    }

    fn set_with(&mut self, page: usize, tag: Tag, level: u8) {
        let (before, was) = (self.tag(page), self.class(page));
        self.tags[page] = level << 4 | tag as u8;
        self.move_class(was, tag.class(level), 1);
        if before != tag {
            self.sort_bits(page / 64, 1 << (page % 64), tag);
            self.recycled.zeroed += u64::from(tag == Tag::Zeroed);
            if before == Tag::Candidate {
                self.fingerprints.remove(page);
            }
            if before.has_slot() && !tag.has_slot() {
                self.slots.remove(page);
            }
        }
    }

    /// Changes what is known of the 64 pages of a word, of which one thing was known that holds nothing.
    pub(crate) fn set_word(&mut self, word: usize, tag: Tag) {
        let (first, before) = (word * 64, self.tag(word * 64));
        let holds = before == Tag::Candidate || before.has_slot();
        assert!(!holds, "64 pages at once that are {before:?}");
        let (level, was) = (self.level_as(first, tag), self.class(first));
        self.tags[first..first + 64].fill(level << 4 | tag as u8);
        self.move_class(was, tag.class(level), 64);
        self.sort_bits(word, u64::MAX, tag);
    }

    /// Where `page` counts.
    pub(crate) fn class(&self, page: usize) -> Option<Class> {
        self.tag(page).class(self.level(page))
    }

    fn move_class(&mut self, before: Option<Class>, after: Option<Class>, pages: u16) {
        if let Some(class) = before {
            let count = &mut self.counts[class as usize];
            let less = count.checked_sub(pages);
            *count =
                less.unwrap_or_else(|| panic!("{pages} pages less of {count} that are {class:?}"));
        }
        if let Some(class) = after {
            self.counts[class as usize] += pages;
        }
    }

    fn sort_bits(&mut self, word: usize, bits: u64, tag: Tag) {
        let wanted = |on: bool| if on { bits } else { 0 };
        let merged = tag == Tag::Merged;
        let busy = matches!(
            tag,
            Tag::Written | Tag::Resting | Tag::Settled | Tag::Planned | Tag::PlannedZero
        );
        let still = !merged && !busy && tag != Tag::Absent;
        for (set, on) in [
            (&mut self.busy, busy),
            (&mut self.still, still),
            (&mut self.merged, merged),
        ] {
            let place = &mut set.0[word];
            *place = *place & !bits | wanted(on);
        }
    }

    /// How many pages count in `class`.
    pub(crate) fn count(&self, class: Class) -> usize {
        self.counts[class as usize].into()
    }

    /// What changed in each tally since the last call.
    pub(crate) fn take_changes(&mut self) -> [i64; TALLIES] {
        let mut now = [0; TALLIES];
        now[..CLASSES].copy_from_slice(&self.counts);
        now[STORED] = u16::try_from(self.stored.len()).expect("at most 512 pages");
        // Of pages that are merged no more none is unread.
        now[UNREAD] = self.unread.min(self.counts[Class::Merged as usize]);
        now[KEPT] = self.kept.into();
        let before = std::mem::replace(&mut self.shown, now);
        std::array::from_fn(|at| i64::from(now[at]) - i64::from(before[at]))
    }

    /// Notes that `page` has no frame of its own any more, nor maps one of a store's: the guest discarded it.
    pub(crate) fn set_discarded(&mut self, page: usize) {
        let had_one = !matches!(
            self.tag(page),
            Tag::Absent | Tag::Zero | Tag::Zeroed | Tag::Foreign
        );
        self.recycled.discarded += u64::from(had_one);
        self.set(page, Tag::Absent);
    }

    /// The pages recycled since the last call.
    pub(crate) fn take_recycled(&mut self) -> Recycled {
        std::mem::take(&mut self.recycled)
    }

    /// Pages offered or stored: those whose state is looked at.
    pub(crate) fn watched(&self) -> PageBits {
        self.offered | self.stored
    }

    /// Bytes of memory this chunk holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        let bodies = self.fingerprints.memory_bytes() + self.slots.memory_bytes();
        let homes = self.homes.as_ref().map_or(0, |homes| size_of_val(&**homes));
        bodies + homes
    }

    /// Frees what no page needs any more.
    pub(crate) fn shrink(&mut self) {
        if self.homes.is_some() && self.count(Class::Unshared) == 0 {
            self.homes = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_present_page_is_in_one_set_and_counts_once() {
        let mut pages = Pages::new(0, PageBits::EMPTY);
        pages.set(1, Tag::Written);
        pages.set_candidate(2, Fingerprint(7), StoreId(0));
        pages.set_planned(3, Slot(9));
        pages.set(3, Tag::Merged);
        pages.set(64, Tag::Zero);
        pages.set(64, Tag::Absent);
        assert_eq!(
            (pages.fingerprint(2), pages.slot(3)),
            (Fingerprint(7), Slot(9))
        );
        let sets = [&pages.busy, &pages.still, &pages.merged];
        assert_eq!(
            sets.map(|set| set.runs().collect::<Vec<_>>()),
            [[(1, 1)], [(2, 1)], [(3, 1)]]
        );
        assert_eq!(
            pages.take_changes(),
            [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        pages.set(1, Tag::Broken);
        assert_eq!(
            pages.take_changes(),
            [-1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(pages.count(Class::Broken), 1);
        pages.back_off(1, Tag::Skipped);
        assert_eq!(
            pages.take_changes(),
            [0, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0, 0, 0]
        );
        pages.give_up(1);
        assert_eq!(
            pages.take_changes(),
            [0, 0, 0, 0, 0, 0, 0, 0, 1, -1, 0, 0, 0]
        );
        pages.set(1, Tag::Foreign);
        assert_eq!(
            pages.take_changes(),
            [0, 0, 0, 0, 0, 0, 0, 1, -1, 0, 0, 0, 0]
        );
    }

    #[test]
    fn the_back_off_doubles_and_ends_with_success() {
        let mut pages = Pages::new(0, PageBits::EMPTY);
        for level in [1, 2, 3, 4, 5, 6, 6] {
            pages.back_off(5, Tag::Pinned);
            assert_eq!((pages.level(5), pages.tag(5)), (level, Tag::Pinned));
            pages.set(5, Tag::Settled);
        }
        pages.set(5, Tag::Merged);
        assert_eq!(pages.level(5), 0);
    }

    #[test]
    fn bodies_go_with_what_needs_them() {
        let mut pages = Pages::new(0, PageBits::EMPTY);
        let empty = pages.memory_bytes();
        pages.set_candidate(2, Fingerprint(7), StoreId(0));
        assert!(pages.memory_bytes() > empty);
        pages.set_planned(2, Slot(5));
        assert_eq!(pages.fingerprints.get(2), None);
        pages.set(2, Tag::Asked);
        pages.set(2, Tag::Merged);
        assert_eq!((pages.slot(2), pages.slots.get(3)), (Slot(5), None));
        pages.set(2, Tag::Written);
        assert_eq!((pages.slots.get(2), pages.memory_bytes()), (None, empty));
    }

    #[test]
    fn a_candidate_remembers_its_index_where_there_are_several() {
        let mut pages = Pages::new(0, PageBits::EMPTY);
        let empty = pages.memory_bytes();
        pages.set_candidate(2, Fingerprint(7), StoreId(0));
        let one = pages.memory_bytes();
        assert!(one < empty + CHUNK_PAGES, "one node costs nothing");
        pages.set_candidate(3, Fingerprint(8), StoreId(5));
        assert_eq!((pages.home(2), pages.home(3)), (StoreId(0), StoreId(5)));
        assert!(pages.memory_bytes() > one);
        pages.set_candidate(3, Fingerprint(8), StoreId(0));
        assert_eq!(pages.home(3), StoreId(0));
        [2, 3]
            .into_iter()
            .for_each(|page| pages.set(page, Tag::Written));
        pages.shrink();
        assert_eq!(pages.memory_bytes(), empty);
    }

    /// What the engine calls impossible ends it: the next one goes on with the stores, and no page with a default.
    #[test]
    fn impossible_states_are_not_answered_by_a_default() {
        use std::panic::catch_unwind;
        let planted: [(&str, fn()); 6] = [
            ("a page out of range", || {
                let _ = Pages::new(0, PageBits::EMPTY).tag(512);
            }),
            ("a slot of none", || {
                let _ = Pages::new(0, PageBits::EMPTY).slot(3);
            }),
            ("a fingerprint of none", || {
                let _ = Pages::new(0, PageBits::EMPTY).fingerprint(3);
            }),
            ("a store of none", || {
                let lab = crate::testing::fake::Lab::new();
                drop(lab.core.domain("d").unwrap().store(StoreId(9)).end());
            }),
            ("a ref of a slot without segment", || {
                let lab = crate::testing::fake::Lab::new();
                let domain = lab.core.domain("d").unwrap();
                let _ = domain.slots.view().unref(Slot(5));
            }),
            ("a ref below zero", || {
                let lab = crate::testing::fake::Lab::new();
                let domain = lab.core.domain("d").unwrap();
                let slot = Slot(domain.slots.take_run(StoreId(0)).unwrap().start);
                let _ = domain.slots.view().unref(slot);
            }),
        ];
        for (state, plant) in planted {
            assert!(catch_unwind(plant).is_err(), "{state} went on");
        }
    }
}
