//! The report to the engine at a Sync, and the work that comes before it.
//!
//! Before a chunk is reported its attributes are read, its pages are registered for tracking, and
//! KSM is made to let go of it.

use std::ops::Range;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use sys::uffd::{Uffd, Watch};
use sys::vma::Maps;
use wire::{CHUNK_BYTES, Change, Changes, PAGE_BYTES, PageBits};

use crate::config::config;
use crate::lock::{Guard, lock};
use crate::mappings::stores::is_store;
use crate::mappings::whole::{self, Untracked};
use crate::table::{ADDRESS_LIMIT, Chunk, Reading, pages_of};

/// To a new engine everything is news.
pub(crate) fn everything(guard: &mut Guard) {
    guard.table().each_known(0, ADDRESS_LIMIT, |_, _, chunk| {
        if !chunk.offered.is_empty() {
            // What came unseen meanwhile is registered with the rest, so all is read anew.
            chunk.reading = Reading::Wanted;
            chunk.plain = PageBits::EMPTY;
            chunk.fresh = chunk.offered;
        }
    });
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

/// Reads the attributes of chunks that want it, taking the lock for moments only. To be called when they are
/// registered: only a mapping that is tracked is the one that was offered.
pub(crate) fn read_attributes() {
    let (mut from, mut to) = (usize::MAX, 0);
    let Some(mut guard) = lock() else { return };
    each_dirty(&mut guard, |address, chunk| {
        // What could not be registered is tried again first.
        if chunk.reading == Reading::Wanted && chunk.fresh.is_empty() {
            chunk.reading = Reading::Begun;
            from = from.min(address);
            to = to.max(address + CHUNK_BYTES);
        }
    });
    drop(guard);
    if from >= to {
        return;
    }
    let read = sys::vma::attributes(from, to, |vma, told| {
        // A store's mapping has what the chunk was found to have when it was merged.
        let Some(mut guard) = lock().filter(|_| vma.is_anonymous()) else {
            return;
        };
        each_dirty_in(&mut guard, vma.start..vma.end, |address, chunk| {
            let (start, end) = (vma.start.max(address), vma.end.min(address + CHUNK_BYTES));
            if start < end {
                chunk.learn(pages_of(address, start, end), told);
            }
        });
    });
    let Some(mut guard) = lock() else { return };
    each_dirty(&mut guard, |_, chunk| {
        chunk.reading = match (chunk.reading, read) {
            (Reading::Begun, Ok(())) => Reading::Done,
            (Reading::Begun, Err(_)) => Reading::Wanted,
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

/// Registers the fresh pages of chunks that changed for tracking, and takes them from KSM. An offer ends where the
/// memory is of another kind, or another userfaultfd has it.
pub(crate) fn watch(guard: &mut Guard, uffd: &Uffd, maps: &Maps) {
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
    });
    untrack_forgotten(guard, uffd, maps);
    let (mut start, mut end) = (0, 0);
    let mut at = 0;
    while let Some((from, to)) = next_fresh(guard, at) {
        at = to;
        // Neighbours are joined, so that a large region is one call.
        if from != end {
            register(guard, uffd, maps, start, end);
            start = from;
        }
        end = to;
    }
    register(guard, uffd, maps, start, end);
}

/// Ends the tracking of chunks of which nothing is known any more: what is tracked cannot be moved with its neighbours, nor
/// be given to a userfaultfd of the program.
fn untrack_forgotten(guard: &mut Guard, uffd: &Uffd, maps: &Maps) {
    let (mut start, mut end) = (0, 0);
    let untrack = |start, end| {
        // What fails is tracked for nothing.
        let _ = whole::untrack_by(uffd, maps, start..end, Untracked::Anonymous);
    };
    each_dirty(guard, |address, chunk| {
        if !chunk.offered.is_empty() || !chunk.stored.is_empty() {
            return;
        }
        if address != end {
            untrack(start, end);
            start = address;
        }
        end = address + CHUNK_BYTES;
    });
    untrack(start, end);
}

/// The next run of pages to be registered at or above `from` in a chunk that changed: fresh ones, and under `--any` those that are
/// kept back beside them for words of the kernel's. Else these would cut their mapping for ever. No window takes these, for they are not offered. A scan
/// may arm them, as all that is tracked: a write then waits for nothing, the kernel's own in a thread that ends neither.
fn next_fresh(guard: &mut Guard, from: usize) -> Option<(usize, usize)> {
    let any = config().any.is_some();
    let mut table = guard.table();
    let mut at = from & !(CHUNK_BYTES - 1);
    while let Some(address) = table.next(at, true) {
        let first = from.saturating_sub(address) / PAGE_BYTES;
        let wanted = table.get(address).filter(|chunk| !chunk.fresh.is_empty());
        let wanted = wanted.map_or(PageBits::EMPTY, |chunk| match any {
            true => chunk.fresh | chunk.kept & chunk.words,
            false => chunk.fresh,
        });
        let mut runs = wanted.runs().filter(|&(start, len)| start + len > first);
        if let Some((start, len)) = runs.next() {
            let start = start.max(first)..start + len;
            return Some((
                address + start.start * PAGE_BYTES,
                address + start.end * PAGE_BYTES,
            ));
        }
        at = address + CHUNK_BYTES;
    }
    None
}

/// Registers what of `[start, end)` can be merged, mapping by mapping. A mapping of which nothing is fresh is left alone.
fn register(guard: &mut Guard, uffd: &Uffd, maps: &Maps, start: usize, end: usize) {
    let mut at = start;
    while at < end {
        let Ok(vma) = maps.find(at) else { return };
        let vma = vma.filter(|vma| vma.start < end);
        let (first, stop, fits) = vma.map_or((end, end, false), |vma| {
            let fits = vma.is_anonymous() || is_store(&vma);
            (vma.start.max(at), vma.end.min(end), fits)
        });
        each_fresh(guard, at, first, Chunk::forget);
        at = stop;
        let mut has_fresh = false;
        each_fresh(guard, first, stop, |_, _| has_fresh = true);
        if !has_fresh {
            continue;
        }
        let tracked = match fits {
            true => uffd.register(first, stop - first, Watch::Track),
            false => Err(Errno::INVAL),
        };
        match tracked {
            Ok(()) => each_fresh(guard, first, stop, Chunk::is_tracked),
            Err(Errno::INVAL | Errno::BUSY | Errno::PERM) => {
                each_fresh(guard, first, stop, Chunk::withdraw);
            }
            Err(_) => {} // tried again at the next sync
        }
    }
}

/// Does something with the fresh pages of `[start, end)`, chunk by chunk.
fn each_fresh(
    guard: &mut Guard,
    start: usize,
    end: usize,
    mut each: impl FnMut(&mut Chunk, PageBits),
) {
    if start < end {
        guard
            .table()
            .each_known(start, end - start, |_, pages, chunk| {
                let fresh = PageBits::of(pages) & chunk.fresh;
                if !fresh.is_empty() {
                    each(chunk, fresh);
                }
            });
    }
}

/// Tells in an empty part of the answer how many pages the program gave up.
pub(crate) fn tell_recycled(guard: &mut Guard, changes: &mut Changes) {
    // Relaxed: a count. What is told and does not arrive is not counted.
    match guard.process().told.swap(0, Ordering::Relaxed) {
        0 => {}
        pages => assert!(changes.push(Change::Recycled { pages })),
    }
}

/// Fills one part of the answer, from the chunk at `at` on; `more` says whether another must follow.
///
/// A chunk of which something is not known yet is told of as far as it is known, and again at the next sync. A page
/// that is offered anew holds its neighbours up for nothing.
pub(crate) fn fill(guard: &mut Guard, changes: &mut Changes, at: &mut usize) {
    let mut table = guard.table();
    // A run of whole chunks is told in one entry, once its end is known: its place is kept free.
    let mut whole: Option<(usize, u32)> = None;
    changes.more = false;
    while let Some(address) = table.next(*at, true) {
        let Some(chunk) = table.get(address) else {
            table.mark_clean(address);
            continue;
        };
        let known = chunk.reading == Reading::Done && chunk.fresh.is_empty();
        let again = !known && !chunk.offered.is_empty();
        let offered = chunk.mergeable();
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
        *at = address + CHUNK_BYTES;
        if !again {
            table.mark_clean(address);
        }
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
