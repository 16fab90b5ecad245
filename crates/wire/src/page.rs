//! The units of the protocol: pages, chunks, and the outcome of a page in a merge window.

use core::ops::{BitAnd, BitOr, Not, Range};

/// Bytes in a page.
pub const PAGE_BYTES: usize = 4096;
/// Pages in a chunk, the unit of work.
pub const CHUNK_PAGES: usize = 512;
/// Bytes in a chunk. Chunks are aligned to their size in the guest's address space.
pub const CHUNK_BYTES: usize = PAGE_BYTES * CHUNK_PAGES;

/// A set of pages of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageBits(pub [u64; CHUNK_PAGES / 64]);

impl PageBits {
    /// The empty set.
    pub const EMPTY: Self = Self([0; CHUNK_PAGES / 64]);
    /// All pages of the chunk.
    pub const FULL: Self = Self([u64::MAX; CHUNK_PAGES / 64]);

    /// The pages of a range; those beyond 511 are ignored.
    #[must_use]
    pub fn of(range: Range<usize>) -> Self {
        let mut set = Self::EMPTY;
        for (first, word) in (0..).step_by(64).zip(&mut set.0) {
            let inside = |page: usize| page.clamp(first, first + 64) - first;
            let (from, to) = (inside(range.start), inside(range.end));
            if from < to {
                *word = u64::MAX >> (64 - (to - from)) << from;
            }
        }
        set
    }

    /// Whether `page` (0 to 511) is in the set; pages beyond are not.
    #[must_use]
    pub fn contains(&self, page: usize) -> bool {
        self.0
            .get(page / 64)
            .is_some_and(|word| word & (1 << (page % 64)) != 0)
    }

    /// Adds `page`; pages beyond 511 are ignored.
    pub fn insert(&mut self, page: usize) {
        if let Some(word) = self.0.get_mut(page / 64) {
            *word |= 1 << (page % 64);
        }
    }

    /// Removes `page`.
    pub fn remove(&mut self, page: usize) {
        if let Some(word) = self.0.get_mut(page / 64) {
            *word &= !(1 << (page % 64));
        }
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// How many pages the set holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The pages that are in the set now, in ascending order.
    pub fn pages(&self) -> impl Iterator<Item = usize> + use<> {
        (0..).step_by(64).zip(self.0).flat_map(|(first, mut word)| {
            core::iter::from_fn(move || {
                let page = (word != 0).then(|| first + word.trailing_zeros() as usize)?;
                word &= word - 1;
                Some(page)
            })
        })
    }

    /// The maximal runs of pages in the set, as `(first, count)`, in ascending order.
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut at = 0;
        core::iter::from_fn(move || {
            let first = self.next(at)?;
            at = self.find(first, u64::MAX).unwrap_or(CHUNK_PAGES);
            Some((first, at - first))
        })
    }

    /// The first page of the set from `at` on.
    #[must_use]
    pub fn next(&self, at: usize) -> Option<usize> {
        self.find(at, 0)
    }

    /// The first page from `at` on that is in the set; with all bits of `flip` set, that is not.
    fn find(&self, at: usize, flip: u64) -> Option<usize> {
        let mut first = at / 64 * 64;
        let mut mask = u64::MAX << (at % 64);
        while let Some(word) = self.0.get(first / 64) {
            let found = (word ^ flip) & mask;
            if found != 0 {
                return Some(first + found.trailing_zeros() as usize);
            }
            (first, mask) = (first + 64, u64::MAX);
        }
        None
    }
}

impl BitAnd for PageBits {
    type Output = Self;

    /// The pages of both sets.
    fn bitand(mut self, other: Self) -> Self {
        (self.0.iter_mut().zip(other.0)).for_each(|(word, other)| *word &= other);
        self
    }
}

impl BitOr for PageBits {
    type Output = Self;

    /// The pages of either set.
    fn bitor(mut self, other: Self) -> Self {
        (self.0.iter_mut().zip(other.0)).for_each(|(word, other)| *word |= other);
        self
    }
}

impl Not for PageBits {
    type Output = Self;

    /// The pages that are not in the set.
    fn not(mut self) -> Self {
        self.0.iter_mut().for_each(|word| *word = !*word);
        self
    }
}

/// What became of one page of a [`Merge`](crate::Merge) question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum PageOutcome {
    /// The question did not name this page.
    #[default]
    NotAsked = 0,
    /// The page now maps its slot.
    Merged = 1,
    /// The page now maps the kernel's zero page.
    Zeroed = 2,
    /// The page's bytes are not those of the slot (the guest wrote it since it was read).
    Differs = 3,
    /// The kernel would not move the page: pinned for I/O, or shared with a fork child.
    Pinned = 4,
    /// There is no such page any more: discarded, unmapped or withdrawn.
    Gone = 5,
    /// The mapping was refused: the guest's map count or memory is exhausted.
    NoRoom = 6,
    /// The page lies in a mapping that cannot be merged (a file, executable, not anonymous).
    Unsupported = 7,
    /// The kernel asked to try later, or the window ran out of time.
    Again = 8,
    /// The page is private as before, and lies inside a mapping of a store.
    Enclosed = 9,
}

impl PageOutcome {
    /// Every outcome, by its number on the wire.
    pub const ALL: [Self; 10] = [
        Self::NotAsked,
        Self::Merged,
        Self::Zeroed,
        Self::Differs,
        Self::Pinned,
        Self::Gone,
        Self::NoRoom,
        Self::Unsupported,
        Self::Again,
        Self::Enclosed,
    ];

    /// The outcome with this number on the wire.
    #[must_use]
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pages: &[usize]) -> PageBits {
        let mut bits = PageBits::EMPTY;
        pages.iter().for_each(|&page| bits.insert(page));
        bits
    }

    #[test]
    fn sets_of_ranges_and_of_other_sets_are_those_of_their_pages() {
        for (start, end) in [
            (0, 0),
            (0, 1),
            (63, 65),
            (64, 128),
            (3, 500),
            (0, 512),
            (511, 600),
            (9, 3),
        ] {
            let pages: Vec<_> = (start..end.min(CHUNK_PAGES)).collect();
            assert_eq!(PageBits::of(start..end), set(&pages), "{start}..{end}");
        }
        let (some, others) = (PageBits::of(10..200), PageBits::of(100..300));
        assert_eq!(some & others, PageBits::of(100..200));
        assert_eq!(some | others, PageBits::of(10..300));
        assert_eq!(some & !others, PageBits::of(10..100));
    }

    #[test]
    fn pages_and_runs_tell_what_was_put_in() {
        let some = [0, 1, 62, 63, 64, 65, 190, 192, 255, 256, 511];
        for pages in [&[][..], &[0], &[511], &[63, 64], &some] {
            let bits = set(pages);
            assert_eq!(bits.pages().collect::<Vec<_>>(), pages);
            let runs = pages.chunk_by(|a, b| a + 1 == *b);
            let runs: Vec<_> = runs.map(|run| (run[0], run.len())).collect();
            assert_eq!(bits.runs().collect::<Vec<_>>(), runs);
        }
        let mut full = PageBits::FULL;
        assert_eq!(full.runs().collect::<Vec<_>>(), [(0, CHUNK_PAGES)]);
        assert!(full.pages().eq(0..CHUNK_PAGES));
        full.remove(200);
        let halves = [(0, 200), (201, CHUNK_PAGES - 201)];
        assert_eq!(full.runs().collect::<Vec<_>>(), halves);
    }
}
