//! The data of candidates and merged pages besides their tags, in as little memory as it takes.
//!
//! ```text
//!  pages          C  ·  M  M  M  C  M  M  ·      C candidate, M planned, asked or merged
//!  fingerprints   [a]            [b]             the candidates', in their order
//!  steps          2 → slot 70    6 → slot 9      from here on a page's slot is its neighbour's plus one
//! ```
//!
//! A candidate costs 16 bytes, a run of merged pages 8, any other page nothing. The lists hold no page
//! numbers. A candidate's place in the fingerprints is the number of candidates before it, and a step
//! says nothing of pages that hold no slot. So a page that loses its slot leaves the steps as they are,
//! unless it was the last of its run.
//!
//! A page changes a few times in its life, and a plan goes through a chunk in order, so entering in the
//! middle of a short list is cheap: 8 KiB are moved at most.

use wire::{CHUNK_PAGES, PageBits};

use crate::page::{Fingerprint, SLOT_BITS, Slot};

/// Room is made for so many bytes at a time: a list that doubled would be half empty.
const ROOM_BYTES: usize = 256;

/// Makes room for one more.
fn make_room<T>(list: &mut Vec<T>) {
    if list.len() == list.capacity() {
        list.reserve_exact(ROOM_BYTES / size_of::<T>());
    }
}

/// Gives room back that was left over twice.
fn give_room_back<T>(list: &mut Vec<T>) {
    let room = ROOM_BYTES / size_of::<T>();
    if list.capacity() - list.len() >= 2 * room || list.is_empty() {
        list.shrink_to_fit();
    }
}

/// The fingerprints of a chunk's candidates.
#[derive(Debug, Default)]
pub(crate) struct Fingerprints {
    /// Whose they are.
    candidates: PageBits,
    /// In the order of their pages.
    list: Vec<Fingerprint>,
}

impl Fingerprints {
    /// The candidates.
    pub(crate) fn candidates(&self) -> PageBits {
        self.candidates
    }

    fn place(&self, page: usize) -> usize {
        let (word, bit) = (page / 64, page % 64);
        let before = self.candidates.0.iter().take(word).copied();
        let own = self.candidates.0[word] & !(u64::MAX << bit);
        let words = before.chain([own]);
        words.map(|word| word.count_ones() as usize).sum()
    }

    /// That of a candidate.
    pub(crate) fn get(&self, page: usize) -> Option<Fingerprint> {
        let its = || self.list[self.place(page)];
        self.candidates.contains(page).then(its)
    }

    /// Makes `page` a candidate, or gives it another fingerprint.
    pub(crate) fn set(&mut self, page: usize, fingerprint: Fingerprint) {
        let place = self.place(page);
        if self.candidates.contains(page) {
            self.list[place] = fingerprint;
        } else {
            assert!(page < CHUNK_PAGES, "page {page} of a chunk");
            make_room(&mut self.list);
            self.list.insert(place, fingerprint);
            self.candidates.insert(page);
        }
    }

    /// Notes that `page` is no candidate any more.
    pub(crate) fn remove(&mut self, page: usize) {
        if self.candidates.contains(page) {
            self.list.remove(self.place(page));
            self.candidates.remove(page);
            give_room_back(&mut self.list);
        }
    }

    /// Bytes of memory on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.list.capacity() * size_of::<Fingerprint>()
    }
}

/// A page, and the slot it has if it has one: nine bits and 54.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step(u64);

impl Step {
    fn new(page: usize, slot: Slot) -> Self {
        assert!(slot.0 >> SLOT_BITS == 0, "{slot} is none of any store");
        Self((page as u64) << SLOT_BITS | slot.0)
    }

    #[allow(clippy::cast_possible_truncation)] // ten bits
    fn page(self) -> usize {
        (self.0 >> SLOT_BITS) as usize
    }

    /// The slot of a page from here on.
    fn slot(self, page: usize) -> Slot {
        let first = self.0 & ((1 << SLOT_BITS) - 1);
        Slot(first + (page - self.page()) as u64)
    }
}

/// The slots of a chunk's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageSlots {
    /// The pages that have one.
    holders: PageBits,
    /// In the order of the pages. Each has a holder before the next, and goes on otherwise than the last.
    steps: Vec<Step>,
}

impl PageSlots {
    /// How many steps there are up to `page`: the last of them says what slot it has.
    fn count_to(&self, page: usize) -> usize {
        self.steps.partition_point(|step| step.page() <= page)
    }

    fn last_of(&self, count: usize) -> Option<Step> {
        self.steps.get(count.checked_sub(1)?).copied()
    }

    /// The first holder from `page` on, if the last of `count` steps speaks of it.
    fn holder(&self, page: usize, count: usize) -> Option<usize> {
        let end = self
            .steps
            .get(count)
            .map_or(CHUNK_PAGES, |next| next.page());
        self.holders.next(page).filter(|&holder| holder < end)
    }

    /// That of `page`.
    pub(crate) fn get(&self, page: usize) -> Option<Slot> {
        let step = || self.last_of(self.count_to(page));
        let its = || step().expect("a holder has a step").slot(page);
        self.holders.contains(page).then(its)
    }

    /// Gives `page` a slot.
    pub(crate) fn set(&mut self, page: usize, slot: Slot) {
        assert!(page < CHUNK_PAGES, "page {page} of a chunk");
        self.remove(page);
        if self.goes_on(page, slot) {
            self.holders.insert(page); // the rule, as pages of a run come in order
            return;
        }
        self.split(page);
        if !self.goes_on(page, slot) {
            self.insert(self.count_to(page), Step::new(page, slot));
        }
        self.holders.insert(page);
        self.join(self.count_to(page));
    }

    /// The slots of all pages.
    pub(crate) fn all(&self) -> [Option<Slot>; CHUNK_PAGES] {
        let mut all = [None; CHUNK_PAGES];
        let mut ahead = self.steps.iter().peekable();
        let mut step = None;
        for page in self.holders.pages() {
            while let Some(next) = ahead.next_if(|next| next.page() <= page) {
                step = Some(next);
            }
            all[page] = Some(step.expect("a holder has a step").slot(page));
        }
        all
    }

    /// Whether the slots up to `page` make this one its slot.
    fn goes_on(&self, page: usize, slot: Slot) -> bool {
        let step = self.last_of(self.count_to(page));
        step.is_some_and(|step| step.slot(page) == slot)
    }

    /// Gives the holders behind `page`, which is none, a step of their own.
    fn split(&mut self, page: usize) {
        let count = self.count_to(page);
        if let (Some(step), Some(rest)) = (self.last_of(count), self.holder(page, count)) {
            self.insert(count, Step::new(rest, step.slot(rest)));
            if self.holder(step.page(), count).is_none() {
                self.steps.remove(count - 1); // all of its holders were behind the page
            }
        }
    }

    /// Notes that `page` has no slot any more.
    pub(crate) fn remove(&mut self, page: usize) {
        if !self.holders.contains(page) {
            return;
        }
        self.holders.remove(page);
        let count = self.count_to(page);
        if let Some(step) = self.last_of(count)
            && self.holder(step.page(), count).is_none()
        {
            self.steps.remove(count - 1);
            self.join(count - 1);
            give_room_back(&mut self.steps);
        }
    }

    fn insert(&mut self, at: usize, step: Step) {
        make_room(&mut self.steps);
        self.steps.insert(at, step);
    }

    /// Drops the step behind the first `count`, if it goes on as the last of them.
    fn join(&mut self, count: usize) {
        if let (Some(step), Some(next)) = (self.last_of(count), self.last_of(count + 1))
            && step.slot(next.page()) == next.slot(next.page())
        {
            self.steps.remove(count);
        }
    }

    /// Bytes of memory on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.steps.capacity() * size_of::<Step>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn fingerprints_agree_with_an_array(ops in vec((0..CHUNK_PAGES, 0..3u8, any::<u64>()), 0..1500)) {
            let (mut list, mut oracle) = (Fingerprints::default(), [None; CHUNK_PAGES]);
            for (page, op, value) in ops {
                oracle[page] = (op > 0).then_some(Fingerprint(value.into()));
                match oracle[page] {
                    Some(fingerprint) => list.set(page, fingerprint),
                    None => list.remove(page),
                }
                prop_assert_eq!(list.get(page), oracle[page]);
            }
            let there = (0..CHUNK_PAGES).filter(|&page| oracle[page].is_some());
            prop_assert!(list.candidates().pages().eq(there));
            for (page, &fingerprint) in oracle.iter().enumerate() {
                prop_assert_eq!(list.get(page), fingerprint);
            }
            let most = (list.candidates().len() * 16 + 2 * ROOM_BYTES) * usize::from(!list.list.is_empty());
            prop_assert!(list.memory_bytes() <= most);
        }

        /// Runs of few pages and few slots, so that they meet, cover each other and go on as others.
        #[test]
        fn slots_agree_with_an_array(ops in vec((0..40usize, 1..12usize, 0..5u8, 0..4u64), 0..200)) {
            let (mut slots, mut oracle) = (PageSlots::default(), [None; CHUNK_PAGES]);
            for (first, len, op, line) in ops {
                // From the first page up, or from the last down.
                let each = (0..len).map(|at| if op % 2 == 0 { first + at } else { first + len - 1 - at });
                for page in each {
                    let slot = Slot(1000 * line + page as u64);
                    oracle[page] = (op > 1).then_some(slot);
                    match oracle[page] {
                        Some(slot) => slots.set(page, slot),
                        None => slots.remove(page),
                    }
                    prop_assert_eq!(slots.get(page), oracle[page]);
                }
                let all = slots.all();
                for (page, &slot) in oracle.iter().enumerate() {
                    prop_assert_eq!(slots.get(page), slot, "page {}", page);
                    prop_assert_eq!(all[page], slot);
                }
                let lines: Vec<_> = (0..).zip(&oracle).filter_map(|(page, slot)| Some((*slot)?.0 - page)).collect();
                prop_assert_eq!(slots.steps.len(), lines.chunk_by(|a, b| a == b).count());
            }
        }
    }

    #[test]
    fn the_greatest_slot_on_the_last_page_fits() {
        let mut slots = PageSlots::default();
        let greatest = Slot((1 << SLOT_BITS) - 1);
        slots.set(CHUNK_PAGES - 1, greatest);
        slots.set(0, Slot(greatest.0 - 511));
        assert_eq!(slots.get(CHUNK_PAGES - 1), Some(greatest));
        assert_eq!(slots.steps.len(), 1, "a hole does not end a run");
    }
}
