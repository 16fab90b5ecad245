//! Memory that is merged already: the pages of PageONE's stores that are mapped, and KSM's own count.
//!
//! A private mapping of a store shows the store's page wherever the process has not written. So the mapping tells the merged pages,
//! less its pages that are no longer of a file. How many pages of the stores stand behind that is told by file and offset, for
//! which the caller need not be root. The daemon's own mappings are shared ones, and do not count.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use numa::residence::STORE_PREFIX;
use procfs::process::{MMPermissions, MMapPath, MemoryMap};
use serde::Serialize;
use sys::pagemap::{Categories, PageRun, Pagemap};

use super::print::PAGE;

/// Bytes that processes have merged already. They are no part of what is savable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Merged {
    /// In PageONE's stores, once for each process and place that has a page.
    pub(crate) pageone: u64,
    /// The pages of the stores behind that, each once.
    pub(crate) pageone_copies: u64,
    /// What PageONE saves with that: the difference.
    pub(crate) pageone_saved: u64,
    /// In KSM, once for each place, its zeros too. Without the right to look it is 0.
    pub(crate) ksm: u64,
}

/// A file, by its device and inode.
type File = (i32, i32, u64);

/// The parts of stores that processes map, in bytes of the file.
#[derive(Debug, Default)]
pub(crate) struct Stores(BTreeMap<File, Vec<Range<u64>>>);

impl Stores {
    /// Notes what a mapping of a store shows of it; gives the pages of that.
    pub(super) fn note(&mut self, mapping: &MemoryMap, map: &Pagemap) -> io::Result<u64> {
        let (start, end) = mapping.address;
        let mut runs = vec![PageRun::default(); 512];
        let (mut at, mut own) = (start, Vec::new());
        while at < end {
            let (filled, stopped) = map.peek(at..end, &mut runs)?;
            let is_own = |run: &&PageRun| {
                let is = |category| run.categories.has(category);
                is(Categories::PRESENT) && !is(Categories::FILE)
            };
            own.extend(
                (runs[..filled].iter().filter(is_own))
                    .map(|run| run.start - start..run.end - start),
            );
            at = stopped;
        }
        let file = (mapping.dev.0, mapping.dev.1, mapping.inode);
        let shown = between(&own, end - start);
        let at = |range: Range<u64>| {
            let place = |at: u64| mapping.offset.saturating_add(at);
            place(range.start)..place(range.end)
        };
        let pages = length(&shown) / PAGE;
        self.0
            .entry(file)
            .or_default()
            .extend(shown.into_iter().map(at));
        Ok(pages)
    }

    /// The pages of the stores that some process shows.
    pub(super) fn copies(self) -> u64 {
        let files = self.0.into_values().map(once);
        files.map(|ranges| length(&ranges)).sum::<u64>() / PAGE
    }
}

/// Whether a mapping shows pages of a store in the place of the process's own.
pub(super) fn is_store(mapping: &MemoryMap) -> bool {
    let of_store = matches!(&mapping.pathname, MMapPath::Path(path)
        if path.to_string_lossy().starts_with(STORE_PREFIX));
    of_store && mapping.perms.contains(MMPermissions::PRIVATE)
}

fn length(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// What of `0..len` lies in none of the ranges, which are in ascending order.
fn between(ranges: &[Range<u64>], len: u64) -> Vec<Range<u64>> {
    let starts = std::iter::once(0).chain(ranges.iter().map(|range| range.end));
    let ends = ranges.iter().map(|range| range.start).chain([len]);
    let gaps = starts.zip(ends).map(|(start, end)| start..end);
    gaps.filter(|gap| !gap.is_empty()).collect()
}

/// The same bytes, each in one range.
fn once(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_and_joined() {
        assert_eq!(length(&between(&[], 9)), 9);
        assert_eq!(between(&[0..2, 4..6, 6..7], 9), [2..4, 7..9]);
        let ranges = vec![5..9, 0..2, 1..3, 3..4, 6..7];
        assert_eq!(once(ranges), [0..4, 5..9]);
        assert_eq!(length(&[0..4, 5..9]), 8);
    }
}
