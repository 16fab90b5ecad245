//! The regions that a guest offers, as its agent tells them and as scans find pages in them.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use sys::pagemap::{Categories, PageRun};
use wire::{CHUNK_PAGES, Change, PageBits};

use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::guest::regions::{AtLimit, Offers, maps_slots, watched};
use crate::page::{CHUNK, PAGE};
use crate::scan::track;

/// Bytes that a chunk costs at least, in the engine's tables.
const TABLE_BYTES: usize = size_of::<Chunk>() + 32;

/// What is known of the chunks while an answer is taken.
///
/// An agent may say "everything" of 20 000 chunks as often as it likes, in 13 bytes. So only chunks of which it said something
/// else before are gone through: each cost an entry of its own.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// The chunks that are not offered whole with nothing stored; found when they are first needed.
    odd: Option<BTreeSet<u64>>,
}

impl Offers {
    /// Takes over a change the agent reports. Where the guest is at a limit it keeps what it has.
    pub(crate) fn change(&mut self, guest: &Guest, change: &Change, news: &mut News) {
        match *change {
            Change::Chunk {
                chunk,
                offered,
                stored,
            } if offered.is_empty() && stored.is_empty() => {
                self.close(guest, chunk);
                self.cut(guest, chunk..chunk + CHUNK);
                if let Some(odd) = &mut news.odd {
                    odd.remove(&chunk);
                }
            }
            Change::Chunk {
                chunk,
                offered,
                stored,
            } => {
                let range = chunk..chunk + CHUNK;
                let refused = self.watch(guest, range.clone());
                let table = match refused.is_empty() {
                    true => self.open(guest, chunk),
                    false => None,
                };
                match table {
                    Some(table) => {
                        let before = watched(&table);
                        self.set_bits(guest, &table, offered, stored);
                        self.stale |= before != watched(&table);
                        if let Some(odd) = &mut news.odd {
                            odd.insert(chunk);
                        }
                    }
                    // Without a table it would be scanned whole, and not all of it may be.
                    None => self.cut(guest, range),
                }
            }
            Change::Whole { chunk, chunks } => {
                let range = chunk..chunk + u64::from(chunks) * CHUNK;
                self.watch(guest, range.clone());
                self.make_whole(guest, range, news);
            }
            Change::Recycled { pages } => guest.counters.tell(pages),
        }
    }

    /// All chunks of a range are offered whole.
    fn make_whole(&mut self, guest: &Guest, range: Range<u64>, news: &mut News) {
        let chunks = &self.chunks;
        let odd = news.odd.get_or_insert_with(|| {
            let whole = |pages: &Pages| pages.offered == PageBits::FULL && pages.stored.is_empty();
            let is_odd = |chunk: &Chunk| chunk.try_lock().is_none_or(|pages| !whole(&pages));
            let odd = chunks.iter().filter(|(_, chunk)| is_odd(chunk));
            odd.map(|(&address, _)| address).collect()
        });
        let here: Vec<_> = odd.range(range).copied().collect();
        for address in here {
            odd.remove(&address);
            if let Some(chunk) = self.chunks.get(&address) {
                self.stale |= watched(chunk) != PageBits::FULL;
                self.set_bits(guest, chunk, PageBits::FULL, PageBits::EMPTY);
            }
        }
    }

    /// Watches a range from now on, as far as the limits go; gives what is not watched of it.
    fn watch(&mut self, guest: &Guest, range: Range<u64>) -> Range<u64> {
        if range.is_empty() || self.spans.covers(&range) {
            return range.end..range.end;
        }
        let limits = &guest.user.common.limits;
        let Range { start, end } = range;
        let room = limits.chunks_per_process.saturating_mul(CHUNK);
        let fits = end.min(start.saturating_add(room.saturating_sub(self.spans.bytes)));
        let refusal = match () {
            () if self.spans.ends.len() as u64 >= limits.regions_per_process
                && !self.spans.adjoins(&range) =>
            {
                Some((AtLimit::Regions, start))
            }
            () => (fits < end).then_some((AtLimit::Chunks, fits)),
        };
        let end_watched = refusal.map_or(end, |(_, at)| at);
        if start < end_watched {
            self.spans.insert(start..end_watched);
            self.stale = true;
        }
        if let Some((why, _)) = refusal {
            self.refused = Some(why);
        }
        end_watched..end
    }

    fn set_bits(&self, guest: &Guest, chunk: &Arc<Chunk>, offered: PageBits, stored: PageBits) {
        // A chunk that a stuck worker holds belongs to a guest that is being dropped.
        if let Some(mut change) = guest.change(chunk) {
            track::set_bits(&mut change, offered, stored);
        }
    }

    /// The chunk at `address`, made if need be, as offered whole; `None` where there is no room for its table.
    pub(super) fn open(&mut self, guest: &Guest, address: u64) -> Option<Arc<Chunk>> {
        if let Some(chunk) = self.chunks.get(&address) {
            return Some(Arc::clone(chunk));
        }
        if let Some(why) = guest.lacks_room(TABLE_BYTES as u64) {
            self.short = Some(why);
            return None;
        }
        let start = self.spans.find(address).unwrap_or(address);
        let place = (address - start) / CHUNK;
        let chunk = guest.domain.chunks.create(
            (guest.number, guest.user.uid),
            address,
            place,
            PageBits::FULL,
        )?;
        guest.change_tables(0, TABLE_BYTES);
        self.chunks.insert(address, Arc::clone(&chunk));
        Some(chunk)
    }

    /// Watches a range no more. A hole makes two spans of one. Beyond the limit the second goes, but never a page that may
    /// be merged: while the agent does not say that it maps its slot no more, the slot must stay. Then the tables bound
    /// how many there are.
    fn cut(&mut self, guest: &Guest, range: Range<u64>) {
        let after = range.end;
        self.spans.remove(range);
        self.stale = true;
        if self.spans.ends.len() as u64 > guest.user.common.limits.regions_per_process
            && let Some((&start, &end)) = self.spans.ends.range(after..).next()
            && !self
                .chunks
                .range(start..end)
                .any(|(_, chunk)| maps_slots(chunk))
        {
            self.refused = Some(AtLimit::Regions);
            self.spans.remove(start..end);
            let all: Vec<_> = self.chunks.range(start..end).map(|(&at, _)| at).collect();
            all.into_iter().for_each(|at| self.close(guest, at));
        }
    }

    /// Forgets a chunk.
    fn close(&mut self, guest: &Guest, address: u64) {
        if self
            .chunks
            .get(&address)
            .is_some_and(|chunk| chunk.try_lock().is_none())
        {
            return; // a worker is stuck with it: the guest will be dropped
        }
        if let Some(chunk) = self.chunks.remove(&address) {
            self.set_bits(guest, &chunk, PageBits::EMPTY, PageBits::EMPTY);
            guest.domain.chunks.remove(&chunk);
            let bytes = chunk
                .try_lock()
                .map_or(0, |pages| pages.memory_bytes() + size_of::<Chunk>());
            guest.change_tables(bytes, 0);
        }
    }

    /// The chunks from address `from` on that rest.
    pub(crate) fn worn(&self, from: u64) -> Vec<Arc<Chunk>> {
        let chunks = self.chunks.range(from / CHUNK * CHUNK..);
        let worn = chunks.filter(|(_, chunk)| chunk.worn.rests());
        worn.map(|(_, chunk)| Arc::clone(chunk)).collect()
    }

    /// Withdraws everything; chunks that a stuck worker holds stay for the next time.
    pub(crate) fn withdraw_all(&mut self, guest: &Guest) {
        let all: Vec<_> = self.chunks.keys().copied().collect();
        for address in all {
            self.close(guest, address);
        }
        self.forget_spans();
    }
}

/// The place of an address in the chunk at `chunk`; that of its end is behind the last page.
pub(crate) fn place(chunk: u64, address: u64) -> usize {
    let pages = address.checked_sub(chunk).map(|bytes| bytes / PAGE);
    let place = pages.and_then(|pages| usize::try_from(pages).ok());
    let place = place.filter(|&place| place <= CHUNK_PAGES);
    place.unwrap_or_else(|| panic!("address {address:x} is outside the chunk at {chunk:x}"))
}

/// Looks at the pages of a chunk without arming them: `each` gets the places of a run, and what is told of it.
///
/// # Errors
/// When the guest cannot be looked at.
pub(super) fn peek(
    guest: &Guest,
    chunk: &Chunk,
    mut each: impl FnMut(Range<usize>, Categories),
) -> std::io::Result<()> {
    let mut runs = [PageRun::default(); CHUNK_PAGES];
    let range = chunk.address..chunk.address + CHUNK;
    let (filled, _) = guest.memory.peek(range, &mut runs)?;
    for run in runs.iter().take(filled) {
        let places = place(chunk.address, run.start)..place(chunk.address, run.end);
        each(places, run.categories);
    }
    Ok(())
}
