//! The small words of the engine: fingerprints, slots, sites, and the states of a page.

use std::fmt;

/// Bytes in a chunk and in a page, as addresses count them.
pub(crate) const CHUNK: u64 = wire::CHUNK_BYTES as u64;
pub(crate) const PAGE: u64 = wire::PAGE_BYTES as u64;

/// 128 keyed bits that stand for a page's content. Equal fingerprints make pages worth comparing,
/// never equal (I1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Fingerprint(pub(crate) u128);

impl Fingerprint {
    /// The key of a page that is the `place`th of a row of equal pages.
    pub(crate) fn at_place(self, place: usize) -> Self {
        const SPREAD: u128 = 0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835; // odd
        Self(self.0 ^ SPREAD.wrapping_mul(place as u128 + 1))
    }
}

/// Which of a domain's stores, one a node; below 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StoreId(pub(crate) u8);

impl StoreId {
    /// The store's number as an index.
    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    /// The store's first slot.
    pub(crate) fn first_slot(self) -> Slot {
        Slot(u64::from(self.0) << NUMBER_BITS)
    }

    /// The slot with this number, if it and the `pages - 1` after it can be slots of the store. A guest may map its store's file
    /// far behind its end: such places are no slots, least of all of the next store.
    pub(crate) fn slots(self, number: u64, pages: u64) -> Option<Slot> {
        let end = number.checked_add(pages)?;
        (end <= 1 << NUMBER_BITS).then(|| Slot(self.first_slot().0 + number))
    }
}

/// Slots a store can have: their byte offsets fit a file.
const NUMBER_BITS: u32 = 48;
/// Bits of a slot's number and its store's.
pub(crate) const SLOT_BITS: u32 = NUMBER_BITS + 6;

/// A page in one of a domain's stores: the store in bits 48 to 53, below it the page's number there.
/// So neighbours in a store are neighbours as numbers, and slots of two stores never are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u64);

impl Slot {
    /// The store it is in.
    #[allow(clippy::cast_possible_truncation)] // six bits
    pub(crate) fn store(self) -> StoreId {
        StoreId((self.0 >> NUMBER_BITS) as u8)
    }

    /// The slot `pages` after this one.
    pub(crate) fn plus(self, pages: usize) -> Self {
        Self(self.0 + pages as u64)
    }

    /// Its number in the store.
    pub(crate) fn number(self) -> u64 {
        self.0 & ((1 << NUMBER_BITS) - 1)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {} of store {}", self.number(), self.store().0)
    }
}

/// A page of a guest: its chunk's number in the domain, and the page's place in the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Site {
    pub(crate) chunk: u32,
    pub(crate) page: u16,
}

/// What an index entry refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A settled page seen once.
    Candidate(Site),
    /// A canonical page.
    Canonical(Slot),
}

const CANONICAL: u64 = 1 << 63;
const PAGE_BITS: u32 = 9;

impl Entry {
    /// The entry as the index holds it: bit 63 tells slots from sites.
    pub(crate) fn pack(self) -> u64 {
        match self {
            Self::Canonical(slot) => slot.0 | CANONICAL,
            Self::Candidate(site) => u64::from(site.chunk) << PAGE_BITS | u64::from(site.page),
        }
    }

    /// The entry behind a value that [`Self::pack`] made.
    #[allow(clippy::cast_possible_truncation)] // packed from these very widths
    pub(crate) fn unpack(value: u64) -> Self {
        if value & CANONICAL != 0 {
            return Self::Canonical(Slot(value & !CANONICAL));
        }
        Self::Candidate(Site {
            chunk: (value >> PAGE_BITS) as u32,
            page: (value & ((1 << PAGE_BITS) - 1)) as u16,
        })
    }
}

/// The level of a page that is not tried again before it is written.
pub(crate) const NEVER: u8 = 15;

/// What the engine knows of a page. Four bits; the other four of its byte hold the back-off level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Tag {
    /// No frame, or not offered.
    #[default]
    Absent = 0,
    /// Written during the last period, or first seen.
    Written = 1,
    /// Not written for one period.
    Resting = 2,
    /// Not written for two periods; not read yet.
    Settled = 3,
    /// In the index, without slot. Body: the fingerprint.
    Candidate = 4,
    /// To be merged with a slot it holds a ref of. Body: the slot.
    Planned = 5,
    /// All zeros, to be given back.
    PlannedZero = 6,
    /// As [`Self::Planned`], and the agent has been asked.
    Asked = 7,
    /// As [`Self::PlannedZero`], and the agent has been asked.
    AskedZero = 8,
    /// Maps its slot. Body: the slot.
    Merged = 9,
    /// Lies in a mapping of a store, the guest wrote it since, and it is not to be merged again.
    Broken = 10,
    /// Maps the kernel's zero page by the guest's own doing.
    Zero = 11,
    /// Maps the kernel's zero page by ours.
    Zeroed = 12,
    /// Lies in a mapping of a file, or of a store that this engine knows nothing of.
    Foreign = 13,
    /// The kernel would not move it, or others have its frame, too.
    Pinned = 14,
    /// Left alone for another reason.
    Skipped = 15,
}

impl Tag {
    /// Whether the page has a plan that its agent was not asked for yet.
    pub(crate) fn is_planned(self) -> bool {
        matches!(self, Self::Planned | Self::PlannedZero)
    }

    const ALL: [Self; 16] = [
        Self::Absent,
        Self::Written,
        Self::Resting,
        Self::Settled,
        Self::Candidate,
        Self::Planned,
        Self::PlannedZero,
        Self::Asked,
        Self::AskedZero,
        Self::Merged,
        Self::Broken,
        Self::Zero,
        Self::Zeroed,
        Self::Foreign,
        Self::Pinned,
        Self::Skipped,
    ];

    /// The tag in the low half of a byte.
    pub(crate) fn of(byte: u8) -> Self {
        Self::ALL[usize::from(byte & 15)]
    }

    /// Where a page of this tag and back-off level counts; `None` when it is absent.
    pub(crate) fn class(self, level: u8) -> Option<Class> {
        Some(match self {
            Self::Absent => return None,
            Self::Written
            | Self::Resting
            | Self::Settled
            | Self::Planned
            | Self::PlannedZero
            | Self::Asked
            | Self::AskedZero => Class::Volatile,
            Self::Candidate => Class::Unshared,
            Self::Merged => Class::Merged,
            Self::Broken => Class::Broken,
            Self::Zero => Class::Zero,
            Self::Zeroed => Class::Zeroed,
            Self::Pinned => Class::Pinned,
            Self::Foreign => Class::Foreign,
            Self::Skipped if level == NEVER => Class::Unfit,
            Self::Skipped => Class::Skipped,
        })
    }

    /// Whether the page holds a ref of a slot, or did when it was asked for.
    pub(crate) fn has_slot(self) -> bool {
        matches!(self, Self::Planned | Self::Asked | Self::Merged)
    }

    /// Whether the page has been tried before and keeps its back-off level.
    pub(crate) fn keeps_level(self) -> bool {
        !matches!(
            self,
            Self::Absent | Self::Merged | Self::Zero | Self::Zeroed | Self::Foreign
        )
    }
}

/// Where a present page counts. Each page counts exactly once, which is I9.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// `pages_volatile`.
    Volatile,
    /// `pages_unshared`.
    Unshared,
    /// `pages_shared` + `pages_sharing`.
    Merged,
    /// `zero_pages`, not saved by us.
    Zero,
    /// `zero_pages`, saved by us.
    Zeroed,
    /// `pages_broken`, within `pages_skipped`.
    Broken,
    /// `pages_pinned`, within `pages_skipped`.
    Pinned,
    /// `pages_foreign`, within `pages_skipped`.
    Foreign,
    /// `pages_unfit`, within `pages_skipped`.
    Unfit,
    /// The rest of `pages_skipped`.
    Skipped,
}

impl Class {
    /// The parts of `pages_skipped`.
    pub(crate) const LEFT_ALONE: [Self; 5] = [
        Self::Broken,
        Self::Pinned,
        Self::Foreign,
        Self::Unfit,
        Self::Skipped,
    ];
}

/// How many classes there are.
pub(crate) const CLASSES: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_packing() {
        for entry in [
            Entry::Candidate(Site { chunk: 0, page: 0 }),
            Entry::Candidate(Site {
                chunk: u32::MAX,
                page: 511,
            }),
            Entry::Canonical(Slot(0)),
            Entry::Canonical(Slot((1 << 54) - 1)),
        ] {
            assert_eq!(Entry::unpack(entry.pack()), entry);
        }
    }

    #[test]
    fn a_slot_knows_its_store_and_its_number() {
        let last = (1 << NUMBER_BITS) - 1;
        assert_eq!(
            StoreId(2).slots(7, 9),
            Some(Slot(StoreId(2).first_slot().0 + 7))
        );
        assert_eq!(StoreId(2).slots(last, 1).map(Slot::store), Some(StoreId(2)));
        assert_eq!(StoreId(2).slots(last, 2), None);
        assert_eq!(StoreId(2).slots(1 << NUMBER_BITS, 1), None);
        assert_eq!(StoreId(2).slots(u64::MAX, 2), None);
        let slot = Slot(StoreId(63).first_slot().0 + 77);
        assert_eq!((slot.store(), slot.number()), (StoreId(63), 77));
        assert_eq!(slot.to_string(), "slot 77 of store 63");
        assert_eq!((Slot(5).store(), Slot(5).number()), (StoreId(0), 5));
    }

    #[test]
    fn tags_survive_their_byte() {
        for tag in Tag::ALL {
            assert_eq!(Tag::of(tag as u8 | 0x50), tag);
        }
    }
}
