//! What is told to the engine at a Sync, and what must be done before it is told.
//!
//! Before a chunk is reported its attributes are read, its pages are registered for tracking, and
//! KSM is made to let go of it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Result;
use sys::uffd::{Uffd, Watch};
use wire::{CHUNK_BYTES, Change, Changes, PAGE_BYTES, PageBits};

use crate::lock::{Guard, lock};
use crate::serve::config;
use crate::table::{ADDRESS_LIMIT, Chunk, Reading, pages_of};

/// Whether the process locks all future mappings (`MCL_FUTURE`).
static LOCKS_FUTURE: AtomicBool = AtomicBool::new(false);

/// Notes whether the process locks all future mappings.
pub(crate) fn set_locks_future(on: bool) {
    LOCKS_FUTURE.store(on, Ordering::Relaxed);
}

/// Whether the process locks all future mappings.
pub(crate) fn locks_future() -> bool {
    LOCKS_FUTURE.load(Ordering::Relaxed)
}

/// To a new engine everything is news.
pub(crate) fn everything(guard: &mut Guard) {
    guard.table().each_known(0, ADDRESS_LIMIT, |_, _, chunk| {
        if !chunk.offered.is_empty() {
            chunk.reading = Reading::Wanted;
        }
    });
}

/// Whether any page lies in a mapping of a store.
pub(crate) fn anything_stored(guard: &mut Guard) -> bool {
    let mut table = guard.table();
    let mut at = 0;
    while let Some(address) = table.next(at, false) {
        if table
            .get(address)
            .is_some_and(|chunk| !chunk.stored.is_empty())
        {
            return true;
        }
        at = address + CHUNK_BYTES;
    }
    false
}

fn each_dirty(guard: &mut Guard, each: impl FnMut(usize, &mut Chunk)) {
    each_dirty_in(guard, 0..ADDRESS_LIMIT, each);
}

fn each_dirty_in(guard: &mut Guard, span: Range<usize>, mut each: impl FnMut(usize, &mut Chunk)) {
    let mut table = guard.table();
    let mut at = span.start & !(CHUNK_BYTES - 1);
    while let Some(address) = table.next(at, true).filter(|&address| address < span.end) {
        if let Some(chunk) = table.get(address) {
            each(address, chunk);
        }
        at = address + CHUNK_BYTES;
    }
}

/// Reads the attributes of chunks that want it, taking the lock for moments only.
pub(crate) fn read_attributes() {
    let (mut from, mut to) = (usize::MAX, 0);
    let Some(mut guard) = lock() else { return };
    each_dirty(&mut guard, |address, chunk| {
        if chunk.reading == Reading::Wanted {
            chunk.reading = Reading::Begun;
            chunk.mixed = false;
            from = from.min(address);
            to = to.max(address + CHUNK_BYTES);
        }
    });
    drop(guard);
    if from >= to {
        return;
    }
    let read = sys::vma::attributes(from, to, |vma, attributes| {
        // A store's mapping lacks what only means something to anonymous memory.
        let Some(mut guard) = lock().filter(|_| !vma.file) else {
            return;
        };
        each_dirty_in(&mut guard, vma.start..vma.end, |address, chunk| {
            let (start, end) = (vma.start.max(address), vma.end.min(address + CHUNK_BYTES));
            let mut pages = pages_of(address, start, end.max(start));
            if start < end && pages.any(|page| chunk.offered.contains(page)) {
                chunk.learn(attributes);
            }
        });
    });
    let Some(mut guard) = lock() else { return };
    each_dirty(&mut guard, |_, chunk| {
        chunk.reading = match (chunk.reading, read) {
            (Reading::Begun | Reading::Seen, Ok(())) => Reading::Done,
            (Reading::Begun | Reading::Seen, Err(_)) => Reading::Wanted,
            (other, _) => other,
        }
    });
}

/// Passes on to KSM what it may have and was not given, a chunk at a time.
pub(crate) fn pass_on_to_ksm() {
    let mut at = 0;
    while let Some(mut guard) = lock() {
        let mut table = guard.table();
        let Some(address) = table.next(at, false) else {
            return;
        };
        at = address + CHUNK_BYTES;
        let Some(chunk) = table.get(address) else {
            continue;
        };
        if chunk.to_ksm && !std::mem::replace(&mut chunk.in_ksm, true) {
            for (first, count) in chunk.offered.runs() {
                let start = address + first * PAGE_BYTES;
                // SAFETY: the guest's own advice, late.
                let _ = unsafe {
                    sys::mapping::advise(start, count * PAGE_BYTES, libc::MADV_MERGEABLE)
                };
            }
        }
    }
}

/// Registers the offered pages of chunks that changed for tracking, and takes them from KSM.
pub(crate) fn watch(guard: &mut Guard, uffd: &Uffd) {
    let mut ranges = Ranges {
        uffd,
        start: 0,
        end: 0,
        failed: false,
    };
    each_dirty(guard, |address, chunk| {
        if chunk.in_ksm && !config().also_ksm {
            for (first, count) in chunk.offered.runs() {
                let start = address + first * PAGE_BYTES;
                // SAFETY: KSM gives its pages back private; no content changes.
                let let_go = unsafe {
                    sys::mapping::advise(start, count * PAGE_BYTES, libc::MADV_UNMERGEABLE)
                };
                chunk.in_ksm = let_go.is_err();
            }
        }
        for (first, count) in chunk.offered.runs() {
            let start = address + first * PAGE_BYTES;
            ranges.add(start, start + count * PAGE_BYTES);
        }
    });
    ranges.flush();
    if ranges.failed {
        each_dirty(guard, |address, chunk| {
            let watched = chunk.offered.runs().try_for_each(|(first, count)| {
                uffd.register(
                    address + first * PAGE_BYTES,
                    count * PAGE_BYTES,
                    Watch::Track,
                )
            });
            chunk.untrackable = watched.is_err();
        });
    }
}

/// Joins neighbouring ranges, so that a large region is one call.
struct Ranges<'a> {
    uffd: &'a Uffd,
    start: usize,
    end: usize,
    failed: bool,
}

impl Ranges<'_> {
    fn add(&mut self, start: usize, end: usize) {
        if start != self.end {
            self.flush();
            self.start = start;
        }
        self.end = end;
    }

    fn flush(&mut self) {
        if self.end > self.start {
            let len = self.end - self.start;
            let done: Result<()> = self.uffd.register(self.start, len, Watch::Track);
            self.failed |= done.is_err();
        }
        self.start = self.end;
    }
}

/// Fills one part of the answer; `more` says whether another must follow.
pub(crate) fn fill(guard: &mut Guard, changes: &mut Changes) {
    let mut table = guard.table();
    let mut at = 0;
    // A run of whole chunks is told in one entry, once its end is known: its place is kept free.
    let mut whole: Option<(usize, u32)> = None;
    changes.more = false;
    while let Some(address) = table.next(at, true) {
        at = address + CHUNK_BYTES;
        let Some(chunk) = table.get(address) else {
            table.mark_clean(address);
            continue;
        };
        if chunk.reading != Reading::Done && !chunk.offered.is_empty() {
            continue; // its turn comes when its attributes are known
        }
        let offered = if chunk.untrackable {
            PageBits::EMPTY
        } else {
            chunk.offered
        };
        let stored = chunk.stored;
        let plain = offered == PageBits::FULL && stored.is_empty();
        let joins = |&(start, n): &(usize, u32)| start + n as usize * CHUNK_BYTES == address;
        if let Some((_, chunks)) = whole.as_mut().filter(|whole| plain && joins(whole)) {
            *chunks += 1;
        } else if changes.entries().len() + 2 > Changes::MAX {
            changes.more = true;
            break;
        } else {
            push_whole(changes, whole.take());
            if plain {
                whole = Some((address, 1));
            } else {
                changes.push(Change::Chunk {
                    chunk: address as u64,
                    offered,
                    stored,
                });
            }
        }
        table.mark_clean(address);
    }
    push_whole(changes, whole);
}

fn push_whole(changes: &mut Changes, whole: Option<(usize, u32)>) {
    if let Some((start, chunks)) = whole {
        changes.push(Change::Whole {
            chunk: start as u64,
            chunks,
        });
    }
}
