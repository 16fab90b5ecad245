//! Track: from a scan of the page map to the state of each page.
//!
//! ```text
//!              first seen          quiet          quiet          read
//!   Absent ───────────────▶ Written ───▶ Resting ───▶ Settled ─────────▶ Candidate, Planned, …
//!      ▲                      ▲  └──────────┴────────────┴──── written ──────┘
//!      └── no frame any more ─┴── from every state; what the page held is given up
//! ```
//!
//! A broken page goes the same way again, where the guest holds nothing that could pin it
//! ([`Ages`]); else it stays broken.
//!
//! Where a user asked for it, an anonymous page is settled in the first look that finds it armed and not written
//! ([`Aging::AtOnce`]). For these the two periods are thrift: the window compares. A page in a mapping of a store
//! never settles so. MOVE does not see that it is pinned. The two periods do.
//!
//! One scan tells it, for anonymous and for merged pages alike:
//!
//! | page is | the scan shows | so it |
//! |---|---|---|
//! | merged | nothing, or a frame that is not written | is still merged |
//! | merged | a frame that is written | is broken, or touched for the first time: a second look |
//! | merged | in the second look, the file's frame | is still merged |
//! | merged | in the second look, another frame, or swap | is broken: the guest wrote it |
//! | broken | written, and in the second look the file's frame | was discarded past the agent |
//! | anonymous | written | was written during the last period, or was never armed |
//! | anonymous | the zero page | takes no frame |
//!
//! The second look is at single chunks, because telling a file's frame from an anonymous one costs
//! the kernel a cache miss a page. It misses no broken page: breaking one writes it, and a
//! write disarms its page. (A merged page may also show as swapped without being written:
//! reclaim leaves such a marker where an armed page of a file was.)
//!
//! A quiet chunk costs a few operations on words of 64 pages and touches no tag.

use wire::{CHUNK_PAGES, PageBits};

use sys::pagemap::Categories;

use crate::domain::chunk::WORDS;
use crate::domain::pages::Pages;
use crate::guest::change::Change;
use crate::page::{Class, NEVER, Tag};

/// What a scan showed of a chunk.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    present: PageBits,
    written: PageBits,
    file: PageBits,
    zero: PageBits,
    swapped: PageBits,
    huge: bool,
}

impl Seen {
    /// How many pages are there.
    pub(crate) fn count_present(&self) -> usize {
        self.present.len()
    }

    /// How many merged pages have no place in the page tables: their guest has not read them since they were merged, or since
    /// the kernel reclaimed them. For a window maps a page without touching it.
    pub(crate) fn unread(&self, pages: &Pages) -> u16 {
        let unread = pages.merged & !(self.present & !self.swapped);
        u16::try_from(unread.len()).expect("at most 512 pages")
    }

    /// How many pages were armed, and written since.
    pub(crate) fn worn(&self, pages: &Pages) -> usize {
        (self.present & self.written & (pages.busy | pages.still)).len()
    }

    /// Adds pages that a second look found to be a file's.
    pub(crate) fn add_file(&mut self, pages: std::ops::Range<usize>) {
        self.file = self.file | PageBits::of(pages);
    }

    /// Adds the pages from `first` up to `end`.
    pub(crate) fn add(&mut self, first: usize, end: usize, categories: Categories) {
        let pages = PageBits::of(first..end);
        let mut fill = |set: fn(&mut Self) -> &mut PageBits, wanted: Categories| {
            if categories.has(wanted) {
                *set(self) = *set(self) | pages;
            }
        };
        fill(|seen| &mut seen.present, Categories::EMPTY);
        fill(|seen| &mut seen.written, Categories::WRITTEN);
        fill(|seen| &mut seen.zero, Categories::ZERO);
        fill(|seen| &mut seen.swapped, Categories::SWAPPED);
        self.huge |= categories.has(Categories::HUGE);
    }
}

/// Whether only a second look tells what became of stored pages that were seen: those written since
/// the last scan.
pub(crate) fn needs_second_look(pages: &Pages, seen: &Seen) -> bool {
    let stored = pages.stored | pages.merged;
    !(stored & seen.present & seen.written).is_empty()
}

/// How pages of a guest grow older in this look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ages {
    /// The present round, which decides whose back-off ends.
    pub(crate) round: u64,
    /// Broken ones may be merged again: nothing of the guest can have pinned them.
    pub(crate) allowed: bool,
    pub(crate) aging: Aging,
}

impl Ages {
    /// Whether pages of chunk number `chunk` at this level are tried again: in rounds once in `2^level`.
    fn is_due(self, chunk: u32, level: u8) -> bool {
        match self.aging {
            Aging::AtOnce => true,
            Aging::Pass => false,
            Aging::Anonymous | Aging::All => {
                (self.round ^ u64::from(chunk)) & ((1 << level) - 1) == 0
            }
        }
    }
}

/// Which pages grow older, by the kind of look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aging {
    /// In a round: anonymous ones.
    Anonymous,
    /// In a round: broken ones, too. At most twice a second, so that whatever a system call pinned for itself
    /// before they were armed is long let go when they have settled.
    All,
    /// In a pass: anonymous ones. A page that is broken stays so for the rounds, and no back-off ends.
    Pass,
    /// In a pass: anonymous ones are settled as soon as a look finds them armed and unwritten. A user asked for it, and
    /// MOVE sees all that may write them past the page tables.
    AtOnce,
}

impl Aging {
    /// Whether it is a look of a pass.
    pub(super) fn is_pass(self) -> bool {
        matches!(self, Self::Pass | Self::AtOnce)
    }
}

/// What a look at a chunk came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Observed {
    /// Pages wait to be read or merged.
    pub(crate) waits: bool,
    /// Not all of it was as it had been, or may stay so.
    pub(crate) stirs: bool,
}

/// Takes over what was seen of a chunk.
pub(crate) fn observe(pages: &mut Change<'_>, seen: &Seen, ages: Ages) -> Observed {
    pages.huge = seen.huge;
    pages.kept &= seen.huge;
    let watched = pages.watched();
    let broken = if ages.allowed {
        pages.count(Class::Broken)
    } else {
        0
    };
    let waiting = [Class::Pinned, Class::Skipped, Class::Unfit, Class::Foreign];
    let waiting: usize = waiting.into_iter().map(|class| pages.count(class)).sum();
    let retries = waiting + broken > 0;
    let mut stirs = false;
    for word in 0..WORDS {
        let mut attention = attention(pages, seen, &watched, word, retries);
        stirs |= attention != 0;
        if attention == u64::MAX
            && let Some(after) = in_step(pages, seen, word, ages)
        {
            pages.set_word(word, after);
            continue;
        }
        while attention != 0 {
            let page = word * 64 + attention.trailing_zeros() as usize;
            attention &= attention - 1;
            step(pages, page, seen, ages);
        }
    }
    let waits = |tag| matches!(tag, Tag::Settled | Tag::Planned | Tag::PlannedZero);
    Observed {
        waits: pages.busy.pages().any(|page| waits(pages.tag(page))),
        stirs,
    }
}

/// What becomes of the 64 pages of a word, when it is the same for all: plain memory that is there, ages, and holds
/// nothing yet. So it is with most of a guest when it is first looked at.
fn in_step(pages: &Pages, seen: &Seen, word: usize, ages: Ages) -> Option<Tag> {
    let get = |bits: &PageBits| bits.0[word];
    let before = pages.tag_of_word(word)?;
    let grows_older = matches!(before, Tag::Absent | Tag::Written | Tag::Resting);
    let special = [&seen.file, &seen.zero, &seen.swapped, &pages.stored];
    let plain = get(&seen.present) == u64::MAX && special.iter().all(|bits| get(bits) == 0);
    let written = match get(&seen.written) {
        0 => false,
        u64::MAX => true,
        _ => return None,
    };
    let after = || at_once(ages, age(before, written, false), written);
    (grows_older && plain).then(after)
}

fn attention(pages: &Pages, seen: &Seen, watched: &PageBits, word: usize, retries: bool) -> u64 {
    let get = |bits: &PageBits| bits.0[word];
    let (busy, still, merged) = (get(&pages.busy), get(&pages.still), get(&pages.merged));
    let present = get(&seen.present) & get(watched);
    let (written, file) = (get(&seen.written), get(&seen.file));
    let broken = merged & present & written & !file;
    let moved = still & (!present | written | file | if retries { u64::MAX } else { 0 });
    let came = present & !(busy | still | merged);
    busy | broken | moved | came
}

fn step(pages: &mut Change<'_>, page: usize, seen: &Seen, ages: Ages) {
    let before = pages.tag(page);
    let (written, swapped) = (seen.written.contains(page), seen.swapped.contains(page));
    let must_wait = written || swapped;
    let after = match before {
        // Only broken ones get here; and of a question under way only its answer tells.
        Tag::Merged if ages.aging.is_pass() => Tag::Broken,
        Tag::Merged => broken(pages, page, ages),
        Tag::Asked | Tag::AskedZero => return,
        _ if !seen.present.contains(page) => Tag::Absent,
        _ if seen.file.contains(page) => Tag::Foreign,
        _ if pages.stored.contains(page) => match step_stored(pages, page, seen, ages) {
            Some(after) => after,
            None => return,
        },
        Tag::Zeroed if seen.zero.contains(page) => return,
        _ if seen.zero.contains(page) => Tag::Zero,
        Tag::Pinned | Tag::Skipped => match retry(pages, page, seen, ages) {
            Some(after) => at_once(ages, after, must_wait),
            None => return,
        },
        _ => at_once(ages, age(before, written, swapped), must_wait),
    };
    if after != before {
        pages.discard(page);
        match after {
            Tag::Absent => pages.set_discarded(page),
            _ => pages.set(page, after),
        }
    }
}

/// What a page is that the guest wrote since it was merged.
fn broken(pages: &Pages, page: usize, ages: Ages) -> Tag {
    match ages.allowed && pages.offered.contains(page) {
        true => Tag::Written,
        false => Tag::Broken,
    }
}

/// A page in a mapping of a store that does not show as the store's.
fn step_stored(pages: &mut Pages, page: usize, seen: &Seen, ages: Ages) -> Option<Tag> {
    let written = seen.written.contains(page);
    match pages.tag(page) {
        // Not written, so not looked at twice: it may be the store's own, of a former engine.
        Tag::Absent | Tag::Foreign | Tag::Zero | Tag::Zeroed if !written => Some(Tag::Foreign),
        Tag::Broken if ages.aging.is_pass() => None,
        Tag::Absent | Tag::Foreign | Tag::Zero | Tag::Zeroed | Tag::Broken => {
            Some(broken(pages, page, ages))
        }
        _ if broken(pages, page, ages) == Tag::Broken => Some(Tag::Broken),
        Tag::Pinned | Tag::Skipped => {
            let aging = match ages.aging {
                Aging::AtOnce => Aging::Pass,
                other => other,
            };
            retry(pages, page, seen, Ages { aging, ..ages })
        }
        _ if !written && ages.aging != Aging::All => None,
        before => Some(age(before, written, seen.swapped.contains(page))),
    }
}

/// A page that could not be merged: given up for good until it is written, else tried again when
/// its back-off ends.
fn retry(pages: &mut Pages, page: usize, seen: &Seen, ages: Ages) -> Option<Tag> {
    let (level, written) = (pages.level(page), seen.written.contains(page));
    if level == NEVER {
        if written {
            pages.set(page, Tag::Absent); // begins afresh, without level
        }
        return written.then_some(Tag::Written);
    }
    let after = if written { Tag::Written } else { Tag::Settled };
    ages.is_due(pages.site(page).chunk, level).then_some(after)
}

/// What an anonymous page is instead of `after`, where it need not grow older to settle. One that is written has just been armed:
/// a borrower from before that has not been looked for since. One that is swapped out is not read back in.
fn at_once(ages: Ages, after: Tag, must_wait: bool) -> Tag {
    match after {
        Tag::Written | Tag::Resting if ages.aging == Aging::AtOnce && !must_wait => Tag::Settled,
        _ => after,
    }
}

/// An anonymous page. One that is swapped out takes no frame now: it is not read back in, so it
/// does not settle.
fn age(before: Tag, written: bool, swapped: bool) -> Tag {
    match before {
        _ if written => Tag::Written,
        Tag::Written | Tag::Resting | Tag::Settled if swapped => Tag::Written,
        Tag::Written => Tag::Resting,
        Tag::Resting => Tag::Settled,
        Tag::Absent | Tag::Zero | Tag::Zeroed | Tag::Foreign => Tag::Written,
        other => other,
    }
}

/// Takes over what the agent says of a chunk: which pages it offers, which lie in a store's mapping.
/// A merged page that no longer does was discarded, unmapped or remapped: that is evidence. If it is offered still, it was
/// discarded or made private: the next scan tells.
pub(crate) fn set_bits(pages: &mut Change<'_>, offered: PageBits, stored: PageBits) {
    pages.offered = offered;
    pages.stored = stored;
    pages.kept &= !offered.is_empty();
    for page in 0..CHUNK_PAGES {
        let stays = match pages.tag(page) {
            Tag::Absent => continue,
            Tag::Merged | Tag::Broken | Tag::Foreign => stored.contains(page),
            _ => offered.contains(page),
        };
        if !stays {
            pages.turn(page, Tag::Absent); // and its level ends
            if offered.contains(page) {
                pages.set(page, Tag::Written);
            }
        }
    }
    pages.shrink();
}

#[cfg(test)]
mod tests;
