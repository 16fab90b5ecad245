//! Spans: merged pages with private ones between them that map with one call.
//!
//! A run of merged pages costs its guest two mappings and a call, however short it is. Where private pages are
//! strewn between merged ones, new slots get numbers at the distance of their pages ([`Layout`]). So a single
//! mapping of the store fits all of them, in each guest that has these contents at such places. The
//! numbers between are spent (I3). The private pages go inside the mapping, as pages that were merged and
//! written since: the agent's window makes sure that no thread finds a place that has no page.
//!
//! A page that is enclosed cannot be moved any more, so merging it later takes a guest without pins (see
//! `sys::pins`). Where that cannot be, and where its new frame might be on another node, nothing is enclosed.

use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::page::{Slot, Tag};

/// The most private pages in a row that are enclosed: copying them, reading them once more, and the
/// numbers spent for them (24 bytes each) have to be cheaper than two mappings.
const MOST: usize = 8;

/// Whether pages of `guest` may be enclosed in this round.
pub(crate) fn encloses(guest: &Guest) -> bool {
    guest.merges_again() && !guest.domain.has_nodes()
}

/// Whether all pages from `first` up to `end`, at most [`MOST`], can lie inside a mapping that their neighbours get.
pub(crate) fn can_enclose(pages: &Pages, first: usize, end: usize) -> bool {
    let private = |page| {
        let there = matches!(
            pages.tag(page),
            Tag::Written | Tag::Resting | Tag::Settled | Tag::Candidate | Tag::Skipped
        );
        there && pages.offered.contains(page) && !pages.stored.contains(page)
    };
    first <= end && end - first <= MOST && (first..end).all(private)
}

/// Where the slots of a chunk's new canonical pages go in a run of numbers.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Whether numbers are left out.
    spreads: bool,
    /// The last page that got a slot, and the slot.
    last: Option<(usize, Slot)>,
}

impl Layout {
    /// The layout of a chunk of `guest`.
    pub(crate) fn new(guest: &Guest) -> Self {
        Self {
            spreads: encloses(guest),
            last: None,
        }
    }

    /// How many numbers to leave out before the slot of `page`, when `next` is the next one.
    fn gap(&self, pages: &Pages, page: usize, next: u64) -> u64 {
        let last = self.last.filter(|(_, slot)| slot.0 + 1 == next);
        match last {
            Some((last, _)) if self.spreads && can_enclose(pages, last + 1, page) => {
                (page - last - 1) as u64
            }
            _ => 0,
        }
    }

    /// Gives slots of `run` to pages, as many as it has; all numbers before the last of these are taken from it.
    pub(crate) fn take(
        &mut self,
        pages: &Pages,
        wanted: impl Iterator<Item = usize>,
        run: &mut std::ops::Range<u64>,
    ) -> Vec<Slot> {
        let mut slots = Vec::new();
        for page in wanted {
            let slot = Slot(run.start + self.gap(pages, page, run.start));
            if slot.0 >= run.end {
                run.start = run.end;
                break;
            }
            run.start = slot.0 + 1;
            slots.push(slot);
            // Of equal pages in a batch the later ones come last: the next batch goes on after the highest.
            if self.last.is_none_or(|(last, _)| last < page) {
                self.last = Some((page, slot));
            }
        }
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Fingerprint, StoreId};
    use wire::PageBits;

    fn pages(kinds: &str) -> Pages {
        let mut pages = Pages::new(0, PageBits::EMPTY);
        pages.offered = PageBits::FULL;
        for (page, kind) in kinds.chars().enumerate() {
            match kind {
                '.' => pages.set_candidate(page, Fingerprint(7), StoreId(0)),
                'z' => pages.set(page, Tag::Zero),
                's' => {
                    pages.set(page, Tag::Written);
                    pages.stored.insert(page);
                }
                '-' => {}
                _ => pages.set(page, Tag::Settled),
            }
        }
        pages
    }

    fn slots(kinds: &str, spreads: bool, run: &mut std::ops::Range<u64>) -> Vec<u64> {
        let pages = pages(kinds);
        let wanted = kinds.chars().enumerate().filter(|(_, kind)| *kind == 'a');
        let mut layout = Layout {
            spreads,
            last: None,
        };
        let slots = layout.take(&pages, wanted.map(|(page, _)| page), run);
        slots.into_iter().map(|slot| slot.0).collect()
    }

    #[test]
    fn slots_lie_at_the_distance_of_their_pages() {
        assert_eq!(slots("..a.aa..a", true, &mut (10..50)), [10, 12, 13, 16]);
        assert_eq!(slots("..a.aa..a", false, &mut (10..50)), [10, 11, 12, 13]);
        for between in ["z", "-", "s", "........."] {
            let kinds = format!("a{between}aa");
            assert_eq!(slots(&kinds, true, &mut (10..50)), [10, 11, 12], "{kinds}");
        }
    }

    #[test]
    fn a_run_that_ends_is_used_up() {
        let mut run = 10..14;
        assert_eq!(slots("a.aa.a", true, &mut run), [10, 12, 13]);
        assert!(run.is_empty());
        let mut run = 10..12;
        assert_eq!(slots("a..a", true, &mut run), [10], "the rest is spent");
        assert!(run.is_empty());
        let mut run = 10..20;
        slots("a.a", true, &mut run);
        assert_eq!(run, 13..20);
    }

    #[test]
    fn the_next_batch_goes_on_where_this_one_ended() {
        let pages = pages("a.a.a.a");
        let mut layout = Layout {
            spreads: true,
            last: None,
        };
        let mut run = 10..50;
        layout.take(&pages, [0, 4, 2].into_iter(), &mut run);
        assert_eq!(layout.last.map(|(page, _)| page), Some(4));
        let mut run = 10..50;
        layout.last = Some((2, Slot(9)));
        assert_eq!(layout.take(&pages, [4].into_iter(), &mut run), [Slot(11)]);
        layout.last = Some((2, Slot(5)));
        assert_eq!(layout.take(&pages, [6].into_iter(), &mut run), [Slot(12)]);
    }
}
