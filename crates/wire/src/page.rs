//! The units of the protocol: pages, chunks, and what became of a page in a merge window.

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

    /// The maximal runs of pages in the set, as `(first, count)`, in ascending order.
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut at = 0;
        core::iter::from_fn(move || {
            while at < CHUNK_PAGES && !self.contains(at) {
                at += 1;
            }
            let first = at;
            while at < CHUNK_PAGES && self.contains(at) {
                at += 1;
            }
            (at > first).then_some((first, at - first))
        })
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
}

impl PageOutcome {
    /// Every outcome, by its number on the wire.
    pub const ALL: [Self; 9] = [
        Self::NotAsked,
        Self::Merged,
        Self::Zeroed,
        Self::Differs,
        Self::Pinned,
        Self::Gone,
        Self::NoRoom,
        Self::Unsupported,
        Self::Again,
    ];

    /// The outcome with this number on the wire.
    #[must_use]
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}
