//! The regions that a guest offers, by chunk: whole ranges cost nothing until something is seen in them.
//!
//! A guest may offer what it likes, and as often. So the cost of an answer is linear in its bytes (see
//! [`offers`](crate::scan::offers)), and tables end at limits ([`AtLimit`]): a guest keeps what it has there, and the rest of
//! its memory is left alone.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use wire::PageBits;

use crate::domain::chunk::Chunk;
use crate::guest::idle;
use crate::options::Limits;
use crate::page::{CHUNK, Class, PAGE};
use crate::users::GREED;

/// Bytes that a span costs, about.
const SPAN_BYTES: usize = 32;
/// Ranges after which a scan ends at the next block.
const MOST_RANGES: usize = 8192;

/// Disjoint ranges of addresses.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    /// The ends, by start.
    pub(crate) ends: BTreeMap<u64, u64>,
    pub(crate) bytes: u64,
}

impl Spans {
    fn put(&mut self, start: u64, end: u64) {
        self.bytes += end - start;
        if let Some(old) = self.ends.insert(start, end) {
            self.bytes -= old - start;
        }
    }

    fn take(&mut self, start: u64) {
        if let Some(end) = self.ends.remove(&start) {
            self.bytes -= end - start;
        }
    }

    pub(crate) fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if let Some((&before, &its_end)) = self.ends.range(..=start).next_back()
            && its_end >= start
        {
            (start, end) = (before, end.max(its_end));
        }
        while let Some((&next, &its_end)) = self.ends.range(start..=end).next() {
            end = end.max(its_end);
            self.take(next);
        }
        self.put(start, end);
    }

    pub(crate) fn remove(&mut self, range: Range<u64>) {
        let Range { start, end } = range;
        let before = self.ends.range(..start).next_back();
        if let Some((&at, &its_end)) = before
            && its_end > start
        {
            self.put(at, start);
            if its_end > end {
                self.put(end, its_end);
            }
        }
        while let Some((&at, &its_end)) = self.ends.range(start..end).next() {
            self.take(at);
            if its_end > end {
                self.put(end, its_end);
            }
        }
    }

    pub(crate) fn find(&self, address: u64) -> Option<u64> {
        let (&start, &end) = self.ends.range(..=address).next_back()?;
        (address < end).then_some(start)
    }

    pub(crate) fn covers(&self, range: &Range<u64>) -> bool {
        let last = self.ends.range(..=range.start).next_back();
        last.is_some_and(|(_, &end)| range.end <= end)
    }

    /// Whether `range` makes none more.
    pub(crate) fn adjoins(&self, range: &Range<u64>) -> bool {
        let last = self.ends.range(..=range.end).next_back();
        last.is_some_and(|(_, &end)| end >= range.start)
    }
}

/// Why some of a guest's memory is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtLimit {
    /// `regions_per_process`
    Regions,
    /// `chunks_per_process`
    Chunks,
    /// `table_mib_per_process`
    ProcessTables,
    /// `table_mib_per_user`
    UserTables,
    /// `store_limit`
    Store,
}

impl AtLimit {
    /// What it says in the status.
    pub(crate) fn describe(self, limits: &Limits) -> String {
        let (most, knob) = match self {
            Self::Regions => (limits.regions_per_process, "regions_per_process"),
            Self::Chunks => (limits.chunks_per_process, "chunks_per_process"),
            Self::ProcessTables => (limits.table_mib_per_process, "table_mib_per_process"),
            Self::UserTables => (limits.table_mib_per_user, "table_mib_per_user"),
            Self::Store => {
                return format!(
                    "a part of its memory is left alone (store_limit: no room, or its user has {GREED} times \
                     what is free)"
                );
            }
        };
        format!("a part of its memory is left alone (limits: {knob} = {most})")
    }
}

/// What one scan looks at.
pub(crate) struct Scan {
    /// In ascending order, disjoint.
    pub(crate) ranges: Vec<Range<u64>>,
    /// Where the next one goes on, at the beginning of a block.
    pub(crate) rest: Option<u64>,
}

/// The pages of a chunk that are looked at; those of one that a stuck worker holds belong to a guest that is being dropped.
pub(crate) fn watched(chunk: &Chunk) -> PageBits {
    let pages = chunk.try_lock();
    pages.map_or(PageBits::FULL, |pages| pages.watched())
}

/// Whether pages of a chunk may map slots.
pub(crate) fn maps_slots(chunk: &Chunk) -> bool {
    let pages = chunk.try_lock();
    pages.is_none_or(|pages| !pages.stored.is_empty() || pages.count(Class::Merged) > 0)
}

/// The chunks of a guest.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    /// Every chunk of which something is watched.
    pub(crate) spans: Spans,
    /// Chunks with something to know: partly offered, or with pages present. The other chunks of
    /// the spans are offered whole, and empty.
    pub(crate) chunks: BTreeMap<u64, Arc<Chunk>>,
    /// What is to be scanned, in ascending order: each chunk that is watched in pieces, and what lies between these.
    scans: Vec<Range<u64>>,
    /// The number of ranges from which `scans` was made.
    regions: usize,
    pub(crate) stale: bool,
    /// Why the last part of the memory was refused that the agent told of; it tells of each once.
    pub(crate) refused: Option<AtLimit>,
    /// Why chunks with pages got no table in the last look.
    pub(crate) short: Option<AtLimit>,
}

impl Offers {
    /// Why some of the guest's memory is left alone.
    pub(crate) fn at_limit(&self) -> Option<AtLimit> {
        self.short.or(self.refused)
    }

    /// How many ranges are scanned.
    pub(crate) fn regions(&self) -> usize {
        self.regions
    }

    /// The ranges to scan from address `from` on: what is offered or stored, nothing beside it. Pages that the guest did
    /// not offer may be write-protected for a purpose of its own.
    pub(crate) fn scans(&mut self, from: u64) -> Scan {
        if from == 0 {
            self.short = None;
        }
        self.renew_scans();
        let first = self.scans.partition_point(|part| part.end <= from);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for part in self.scans.get(first..).unwrap_or_default() {
            let start = part.start.max(from);
            let apart = |last: &Range<u64>| idle::are_apart(last.end - 1, start);
            if ranges.len() >= MOST_RANGES && ranges.last().is_some_and(apart) {
                let rest = Some(start);
                return Scan { ranges, rest };
            }
            self.each_piece(part, |piece| {
                push_range(&mut ranges, piece.start.max(from)..piece.end);
            });
        }
        Scan { ranges, rest: None }
    }

    /// Calls `each` with what is watched of a part. Of a chunk that is watched in pieces its table says that. The tempting alternative, a
    /// list of all pieces, makes a guest that offers every second page cost more than four times what its tables do.
    fn each_piece(&self, part: &Range<u64>, mut each: impl FnMut(Range<u64>)) {
        let table = self.chunks.get(&part.start);
        let Some(table) = table.filter(|_| part.end - part.start == CHUNK) else {
            return each(part.clone());
        };
        for (first, count) in watched(table).runs() {
            let start = part.start + first as u64 * PAGE;
            each(start..start + count as u64 * PAGE);
        }
    }

    fn renew_scans(&mut self) {
        if std::mem::take(&mut self.stale) {
            let mut scans = Vec::new();
            for (&start, &end) in &self.spans.ends {
                let mut whole = start;
                for (&at, chunk) in self.chunks.range(start..end) {
                    if watched(chunk) != PageBits::FULL {
                        scans.extend((whole < at).then_some(whole..at));
                        scans.push(at..at + CHUNK);
                        whole = at + CHUNK;
                    }
                }
                scans.extend((whole < end).then_some(whole..end));
            }
            let (mut regions, mut last) = (0, None);
            for part in &scans {
                self.each_piece(part, |piece| {
                    regions += usize::from(last != Some(piece.start));
                    last = Some(piece.end);
                });
            }
            (self.scans, self.regions) = (scans, regions);
        }
    }

    /// Forgets what was watched; the chunks are gone.
    pub(crate) fn forget_spans(&mut self) {
        self.spans = Spans::default();
        (self.scans, self.regions) = (Vec::new(), 0);
    }

    /// Bytes of memory the chunks hold.
    pub(crate) fn memory_bytes(&self) -> usize {
        let chunks = self.chunks.values().filter_map(|chunk| {
            chunk
                .try_lock()
                .map(|pages| pages.memory_bytes() + size_of::<Chunk>() + 24)
        });
        chunks.sum::<usize>()
            + self.scans.capacity() * size_of::<Range<u64>>()
            + self.spans.ends.len() * SPAN_BYTES
    }
}

fn push_range(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn spans_are_a_set(ops in proptest::collection::vec((any::<bool>(), 0u64..64, 1u64..24), 1..40)) {
            let (mut spans, mut oracle) = (Spans::default(), [false; 96]);
            for (add, start, len) in ops {
                let range = start..start + len;
                for at in range.clone() {
                    oracle[usize::try_from(at).unwrap()] = add;
                }
                if add { spans.insert(range) } else { spans.remove(range) }
                for (at, &there) in (0..).zip(&oracle) {
                    prop_assert_eq!(spans.find(at).is_some(), there);
                }
                prop_assert_eq!(spans.bytes, oracle.iter().filter(|&&there| there).count() as u64);
                let ends: Vec<_> = spans.ends.values().collect();
                prop_assert!(ends.iter().zip(spans.ends.keys().skip(1)).all(|(end, start)| *end < start));
            }
        }
    }
}
