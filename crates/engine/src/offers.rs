//! What a guest offers, by chunk: whole ranges cost nothing until something is seen in them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use sys::pagemap::PageRun;
use wire::{CHUNK_BYTES, CHUNK_PAGES, Change, PAGE_BYTES, PageBits};

use crate::chunk::Chunk;
use crate::guest::{Fault, Guest};
use crate::realm::Effects;
use crate::track::{self, Seen};

const CHUNK: u64 = CHUNK_BYTES as u64;
const PAGE: u64 = PAGE_BYTES as u64;
/// The most chunks a guest may offer: 2 TiB. Beyond it a hostile guest could exhaust our memory.
const MAX_CHUNKS: u64 = 1 << 20;

/// Disjoint ranges of addresses.
#[derive(Debug, Default)]
struct Spans(BTreeMap<u64, u64>);

impl Spans {
    fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if let Some((&before, &its_end)) = self.0.range(..=start).next_back()
            && its_end >= start
        {
            (start, end) = (before, end.max(its_end));
        }
        while let Some((&next, &its_end)) = self.0.range(start..=end).next() {
            end = end.max(its_end);
            self.0.remove(&next);
        }
        self.0.insert(start, end);
    }

    fn remove(&mut self, range: Range<u64>) {
        let Range { start, end } = range;
        let before = self
            .0
            .range(..start)
            .next_back()
            .map(|(&at, &end)| (at, end));
        if let Some((at, its_end)) = before
            && its_end > start
        {
            self.0.insert(at, start);
            if its_end > end {
                self.0.insert(end, its_end);
            }
        }
        while let Some((&at, &its_end)) = self.0.range(start..end).next() {
            self.0.remove(&at);
            if its_end > end {
                self.0.insert(end, its_end);
            }
        }
    }

    fn find(&self, address: u64) -> Option<u64> {
        let (&start, &end) = self.0.range(..=address).next_back()?;
        (address < end).then_some(start)
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

/// The chunks of a guest.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    /// Every chunk of which something is watched.
    spans: Spans,
    /// Chunks with something to know: partly offered, or with pages present. The other chunks of
    /// the spans are offered whole, and empty.
    pub(crate) chunks: BTreeMap<u64, Arc<Chunk>>,
    /// The ranges to scan, in ascending order.
    scans: Vec<Range<u64>>,
    stale: bool,
}

impl Offers {
    /// Takes over a change the agent reports.
    ///
    /// # Errors
    /// When the guest offers more than it may.
    pub(crate) fn change(
        &mut self,
        guest: &Arc<Guest>,
        change: &Change,
        effects: &mut Effects,
    ) -> Result<(), Fault> {
        match *change {
            Change::Chunk {
                chunk,
                offered,
                stored,
            } if offered.is_empty() && stored.is_empty() => {
                self.withdraw(guest, chunk, effects);
            }
            Change::Chunk {
                chunk,
                offered,
                stored,
            } => {
                self.watch(chunk..chunk + CHUNK)?;
                if let Some(chunk) = self.open(guest, chunk) {
                    self.set_bits(guest, &chunk, offered, stored, effects);
                }
            }
            Change::Whole { chunk, chunks } => {
                let range = chunk..chunk + u64::from(chunks) * CHUNK;
                self.watch(range.clone())?;
                let known: Vec<_> = self
                    .chunks
                    .range(range)
                    .map(|(_, chunk)| Arc::clone(chunk))
                    .collect();
                for chunk in known {
                    self.set_bits(guest, &chunk, PageBits::FULL, PageBits::EMPTY, effects);
                }
            }
        }
        Ok(())
    }

    fn watch(&mut self, range: Range<u64>) -> Result<(), Fault> {
        if range.start >= range.end {
            return Ok(());
        }
        self.spans.insert(range);
        self.stale = true;
        match self.spans.bytes() / CHUNK {
            ..=MAX_CHUNKS => Ok(()),
            _ => Err(Fault::TooMuch(MAX_CHUNKS)),
        }
    }

    fn set_bits(
        &mut self,
        guest: &Guest,
        chunk: &Chunk,
        offered: PageBits,
        stored: PageBits,
        effects: &mut Effects,
    ) {
        // A chunk that a stuck worker holds belongs to a guest that is being dropped.
        if let Some(mut pages) = chunk.try_lock() {
            track::set_bits(chunk, &mut pages, offered, stored, effects);
            guest.counters.take_over(&mut pages);
        }
    }

    /// The chunk at `address`, made if need be, as offered whole.
    fn open(&mut self, guest: &Arc<Guest>, address: u64) -> Option<Arc<Chunk>> {
        if let Some(chunk) = self.chunks.get(&address) {
            return Some(Arc::clone(chunk));
        }
        let start = self.spans.find(address).unwrap_or(address);
        let place = (address - start) / CHUNK;
        let chunk = guest.realm.chunks.create(guest, address, place)?;
        chunk.lock().offered = PageBits::FULL;
        self.chunks.insert(address, Arc::clone(&chunk));
        Some(chunk)
    }

    fn withdraw(&mut self, guest: &Guest, address: u64, effects: &mut Effects) {
        self.spans.remove(address..address + CHUNK);
        self.stale = true;
        if self
            .chunks
            .get(&address)
            .is_some_and(|chunk| chunk.try_lock().is_none())
        {
            return; // a worker is stuck with it: the guest will be dropped
        }
        if let Some(chunk) = self.chunks.remove(&address) {
            self.set_bits(guest, &chunk, PageBits::EMPTY, PageBits::EMPTY, effects);
            guest.realm.apply(guest, effects);
            guest.realm.chunks.remove(&chunk);
        }
    }

    /// Withdraws everything; chunks that a stuck worker holds stay for the next time.
    pub(crate) fn withdraw_all(&mut self, guest: &Guest, effects: &mut Effects) {
        let all: Vec<_> = self.chunks.keys().copied().collect();
        for address in all {
            self.withdraw(guest, address, effects);
        }
        self.spans.0.clear();
        self.scans = Vec::new();
    }

    /// The ranges to scan: what is offered or stored, nothing beside it. Pages that the guest did
    /// not offer may be write-protected for a purpose of its own.
    pub(crate) fn scans(&mut self) -> &[Range<u64>] {
        if std::mem::take(&mut self.stale) {
            self.scans.clear();
            for (&start, &end) in &self.spans.0 {
                let mut whole = start;
                for (&at, chunk) in self.chunks.range(start..end) {
                    let watched = chunk
                        .try_lock()
                        .map_or(PageBits::FULL, |pages| pages.watched());
                    if watched != PageBits::FULL {
                        push_range(&mut self.scans, whole..at);
                        for (first, count) in watched.runs() {
                            let first = at + first as u64 * PAGE;
                            push_range(&mut self.scans, first..first + count as u64 * PAGE);
                        }
                        whole = at + CHUNK;
                    }
                }
                push_range(&mut self.scans, whole..end);
            }
        }
        &self.scans
    }

    /// Bytes of memory the chunks hold.
    pub(crate) fn memory_bytes(&self) -> usize {
        let chunks = self
            .chunks
            .values()
            .filter_map(|chunk| chunk.try_lock().map(|pages| pages.memory_bytes() + 24));
        chunks.sum::<usize>() + self.scans.capacity() * 16
    }
}

fn push_range(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// Turns the runs of a scan, in ascending order, into a look at each chunk.
pub(crate) struct Sweep<'a, F> {
    guest: &'a Arc<Guest>,
    offers: &'a mut Offers,
    /// The chunk that `seen` belongs to.
    current: u64,
    seen: Seen,
    any: bool,
    /// Chunks below have been looked at.
    next: u64,
    look: F,
}

impl<'a, F: FnMut(&Arc<Chunk>, &Seen)> Sweep<'a, F> {
    pub(crate) fn new(guest: &'a Arc<Guest>, offers: &'a mut Offers, look: F) -> Self {
        Self {
            guest,
            offers,
            current: 0,
            seen: Seen::default(),
            any: false,
            next: 0,
            look,
        }
    }

    /// Adds a run of pages.
    pub(crate) fn add(&mut self, run: &PageRun) {
        debug_assert!(
            run.start >= self.next,
            "a scan went back to {:x}",
            run.start
        );
        let mut at = run.start;
        while at < run.end {
            let chunk = at / CHUNK * CHUNK;
            if chunk != self.current {
                self.flush();
                self.current = chunk;
            }
            let end = run.end.min(chunk + CHUNK);
            let page = |at: u64| usize::try_from((at - chunk) / PAGE).unwrap_or(CHUNK_PAGES);
            self.seen.add(page(at), page(end), run.categories);
            self.any = true;
            at = end;
        }
    }

    /// Leaves `range` out; what is known of its chunks stays.
    pub(crate) fn leave_out(&mut self, range: &Range<u64>) {
        self.flush();
        self.look_at_empty(range.start / CHUNK * CHUNK);
        self.next = self.next.max(range.end.next_multiple_of(CHUNK));
    }

    fn flush(&mut self) {
        if !std::mem::take(&mut self.any) {
            return;
        }
        self.look_at_empty(self.current);
        if let Some(chunk) = self.offers.open(self.guest, self.current) {
            (self.look)(&chunk, &self.seen);
        }
        self.next = self.current + CHUNK;
        self.seen = Seen::default();
    }

    fn look_at_empty(&mut self, end: u64) {
        for (_, chunk) in self.offers.chunks.range(self.next..end.max(self.next)) {
            (self.look)(chunk, &Seen::default());
        }
    }

    /// Looks at the chunks behind the last run.
    pub(crate) fn finish(mut self) {
        self.flush();
        self.look_at_empty(u64::MAX);
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
                prop_assert_eq!(spans.bytes(), oracle.iter().filter(|&&there| there).count() as u64);
                let ends: Vec<_> = spans.0.values().collect();
                prop_assert!(ends.iter().zip(spans.0.keys().skip(1)).all(|(end, start)| *end < start));
            }
        }
    }
}
