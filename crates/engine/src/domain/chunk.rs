//! A chunk: 512 pages of a guest, with their states behind a lock: see [`pages`](crate::domain::pages).
//!
//! ```text
//!  Chunk
//!  ┌─────────────────────────┐
//!  │ id, address             │
//!  │ promoted  512 bits ◀────┼── any worker, no lock
//!  │ queued                  │
//!  │ pages     the lock ◀────┼── the worker whose job the chunk is
//!  └─────────────────────────┘
//! ```
//!
//! A worker that finds a twin of a candidate must tell the candidate's chunk, but may hold only its
//! own chunk's lock. So it sets a bit in `promoted` and queues the chunk. `queued` keeps a chunk
//! from standing in the queue twice: [`Chunk::start`] clears it *before* it takes the bits, and
//! [`Chunk::promote`] sets the bit *before* it looks at the flag. A bit set too late to be taken
//! therefore finds the flag down and queues the chunk again.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use wire::{CHUNK_PAGES, PAGE_BYTES, PageBits};

use crate::domain::pages::Pages;
use crate::domain::worn::Worn;
use crate::sync::{CHUNK, CHUNKS, Guard, Ordered, OrderedRw};

/// Words of a page set.
pub(crate) const WORDS: usize = CHUNK_PAGES / 64;

/// 2 MiB of a guest's address space.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Its number in the domain; given to another chunk only after this one left the index.
    pub(crate) id: u32,
    /// Address in the guest.
    pub(crate) address: u64,
    /// Its place in the region: see [`order`](crate::run::order).
    pub(crate) place: u64,
    /// The number of the guest whose memory it is.
    pub(crate) guest: u64,
    /// The guest's user.
    pub(crate) uid: u32,
    /// Whether looks leave it out.
    pub(crate) worn: Worn,
    promoted: [AtomicU64; WORDS],
    /// Whether it stands in the queue, and whether for a whole visit.
    queued: [AtomicBool; 2],
    pages: Ordered<Pages, CHUNK>,
}

impl Chunk {
    /// The pages, unless another thread is at work with them.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, Pages>> {
        self.pages.try_lock()
    }

    /// The pages, for a test in which nothing else is at work.
    #[cfg(test)]
    pub(crate) fn lock(&self) -> Guard<'_, Pages> {
        self.try_lock().expect("nothing else is at work")
    }

    /// The addresses of some pages, as questions to the kernel take them.
    pub(crate) fn addresses(&self, pages: impl Iterator<Item = usize>) -> Vec<usize> {
        let base = usize::try_from(self.address).expect("an address of this machine");
        pages.map(|page| base + page * PAGE_BYTES).collect()
    }

    /// Notes that the candidate at `page` has a slot now.
    pub(crate) fn promote(&self, page: u16) {
        self.promoted[usize::from(page) / 64].fetch_or(1 << (page % 64), AcqRel);
    }

    /// Takes the candidates promoted since the last time.
    pub(crate) fn take_promoted(&self) -> PageBits {
        let mut bits = PageBits::EMPTY;
        for (taken, word) in bits.0.iter_mut().zip(&self.promoted) {
            *taken = word.swap(0, AcqRel);
        }
        bits
    }

    /// Whether candidates wait to hear of their slots.
    pub(crate) fn has_promoted(&self) -> bool {
        self.promoted.iter().any(|word| word.load(Acquire) != 0)
    }

    /// Marks the chunk as queued, for a `whole` visit or another; false when it stands in the queue for that already.
    pub(crate) fn enqueue(&self, whole: bool) -> bool {
        !self.queued[usize::from(whole)].swap(true, AcqRel)
    }

    /// Marks the chunk as taken from the queue, for a `whole` visit or another; before its promotions are taken.
    pub(crate) fn start(&self, whole: bool) {
        self.queued[usize::from(whole)].store(false, Release);
    }
}

/// All chunks of a domain by number.
#[derive(Debug, Default)]
pub(crate) struct Chunks {
    table: OrderedRw<Table, CHUNKS>,
}

#[derive(Debug, Default)]
struct Table {
    places: Vec<Option<Arc<Chunk>>>,
    free: Vec<u32>,
}

impl Chunks {
    /// A new chunk of which these pages are offered; `None` when the numbers are exhausted.
    pub(crate) fn create(
        &self,
        (guest, uid): (u64, u32),
        address: u64,
        place: u64,
        offered: PageBits,
    ) -> Option<Arc<Chunk>> {
        let mut table = self.table.write();
        let id = match table.free.pop() {
            Some(id) => id,
            None => u32::try_from(table.places.len()).ok()?,
        };
        let chunk = Arc::new(Chunk {
            id,
            address,
            place,
            guest,
            uid,
            worn: Worn::default(),
            promoted: [const { AtomicU64::new(0) }; WORDS],
            queued: Default::default(),
            pages: Ordered::new(Pages::new(id, offered)),
        });
        let at = id as usize;
        if at == table.places.len() {
            table.places.push(None);
        }
        let before = table.places[at].replace(Arc::clone(&chunk));
        assert!(before.is_none(), "two chunks with the number {id}");
        Some(chunk)
    }

    /// Frees the number of a chunk none of whose pages is in the index any more.
    pub(crate) fn remove(&self, chunk: &Chunk) {
        let mut table = self.table.write();
        let removed = table.places[chunk.id as usize].take();
        assert!(
            removed.is_some_and(|its| std::ptr::eq(&*its, chunk)),
            "chunk {} is removed by another",
            chunk.id
        );
        table.free.push(chunk.id);
    }

    /// The chunk with this number.
    pub(crate) fn get(&self, id: u32) -> Option<Arc<Chunk>> {
        let table = self.table.read();
        table.places.get(id as usize).cloned().flatten()
    }

    /// Bytes of memory the table itself holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        let table = self.table.read();
        table.places.capacity() * 8 + table.free.capacity() * 4
    }
}
