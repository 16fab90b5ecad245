//! Rows: neighbouring pages that are all equal.
//!
//! A slot takes `max_page_sharing` pages, then the next copy is named: see [`copies`](crate::domain::copies). Neighbouring
//! pages that are all equal would each map the same slot with a call and a mapping of its own, and a guest's mappings are
//! few. So once a content has copies anyway, [`ROW`] pages of it in a row are looked up under keys of their own, by
//! their place in the row. The rows of all guests meet as any run of different pages does, and
//! map with one call. It costs at most `ROW` copies more of a content that has more than
//! `max_page_sharing` pages.

use crate::domain::refs::View;
use crate::merge::plan::{Plan, Read};
use crate::page::Entry;

/// Equal pages in a row that are looked up by their place in it.
const ROW: usize = 32;

impl Plan<'_> {
    /// What is looked up together at the beginning of `reads`, a row or one page; and the rest.
    pub(super) fn split_row(reads: &[Read]) -> (&[Read], &[Read]) {
        let row = reads.first().is_some_and(|first| first.begins_row);
        reads.split_at(if row { ROW } else { 1 }.min(reads.len()))
    }

    /// The entries of a row of which a slot is full, unless other copies have room again. They are all replaced, so that the row has
    /// neighbouring slots again, whichever guest filled which of them first.
    pub(super) fn find_full_row(&self, view: &View<'_>, row: &[Read]) -> Option<Vec<Entry>> {
        if row.len() < ROW {
            return None;
        }
        let domain = self.domain();
        let (mut entries, mut full) = (Vec::with_capacity(ROW), false);
        for read in row {
            let entry = domain.index(read.home).get(read.key)?;
            match entry {
                Entry::Canonical(slot) if self.takes(read.home, slot) => {
                    full |= view.is_full(slot);
                }
                _ => return None,
            }
            entries.push(entry);
        }
        let first = row.first().filter(|_| full)?;
        let has_room = domain.slots.chains.has_room((first.home, first.key));
        (!has_room).then_some(entries)
    }

    /// Gives equal pages in a row keys of their own, if their content has several copies.
    pub(super) fn spread_rows(&self, reads: &mut [Read]) {
        let chains = &self.domain().slots.chains;
        let mut rest = reads;
        while rest.len() >= ROW {
            let (row, _) = rest.split_at_mut(ROW);
            let Some(&first) = row.first() else { return };
            let follows = |(at, read): (usize, &Read)| {
                read.page == first.page + at && (read.key, read.home) == (first.key, first.home)
            };
            let is_row = first.page.is_multiple_of(ROW) && row.iter().enumerate().all(follows);
            let step = if is_row { ROW } else { 1 };
            if is_row && chains.is_hot((first.home, first.key)) {
                for (place, read) in row.iter_mut().enumerate() {
                    read.key = first.key.at_place(place);
                    read.begins_row = place == 0;
                }
            }
            rest = rest.get_mut(step..).unwrap_or_default();
        }
    }
}
