//! Offering memory, taking it back, and starting the agent's thread at the first offer.

use std::ops::Range;
use std::sync::atomic::Ordering;

use rustix::io::{Errno, Result};
use sys::mapping::{self, Access};
use sys::pagemap::{PageRun, Pagemap};
use sys::vma::Maps;
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use crate::discard;
use crate::life;
use crate::lock::{ALONE, Guard, SERVED, lock};
use crate::serve;
use crate::table::{ADDRESS_LIMIT, pages_of, set_of};
use crate::whole::whole;

/// `MADV_POPULATE_WRITE` (Linux 5.14): makes pages private and writable at once.
const POPULATE_WRITE: i32 = 23;

/// What the kernel has to hear of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Nothing: an engine serves this process, or one is looked for; if none is found, the agent's
    /// thread passes the offer on.
    Done,
    /// The call as it came: nobody serves, or KSM is wanted beside.
    PassOn,
}

/// The whole pages of `[start, start + len)` as `madvise` counts them: `start` on a page, `len`
/// rounded up.
///
/// # Errors
/// `INVAL` for a start inside a page or a length that overflows.
pub(crate) fn whole_pages(start: usize, len: usize) -> Result<usize> {
    let rounded = len
        .checked_next_multiple_of(PAGE_BYTES)
        .ok_or(Errno::INVAL)?;
    let end = start.checked_add(rounded).ok_or(Errno::INVAL)?;
    if !start.is_multiple_of(PAGE_BYTES) || end > ADDRESS_LIMIT {
        return Err(Errno::INVAL);
    }
    Ok(rounded)
}

/// Offers `[start, start + len)` for merging; `to_ksm` when KSM may have it where no engine serves.
///
/// # Errors
/// `INVAL` for a range that is not made of pages, `NOMEM` when some of it is not mapped or there
/// is no memory to note it.
pub(crate) fn offer(start: usize, len: usize, to_ksm: bool) -> Result<Then> {
    if life::is_barred() {
        return Ok(if to_ksm { Then::PassOn } else { Then::Done });
    }
    let len = whole_pages(start, len)?;
    // msync with MS_ASYNC does nothing but check that everything is mapped.
    let args = [start, len, libc::MS_ASYNC as usize, 0, 0, 0];
    // SAFETY: changes nothing.
    unsafe { sys::raw::call(libc::SYS_msync, args) }?;
    let mut guard = lock().ok_or(Errno::NOMEM)?;
    let process = guard.process();
    let alone = process.serving.load(Ordering::Relaxed) == ALONE;
    let pass_on = to_ksm && (alone || serve::config().also_ksm);
    note(
        &mut guard,
        start,
        len,
        Ksm {
            may: to_ksm,
            has: pass_on,
        },
    )?;
    let begun = life::begin(&guard);
    if life::is_barred() {
        give_back(&mut guard);
    }
    drop(guard);
    let pass_on = pass_on || to_ksm && begun.is_err();
    Ok(if pass_on { Then::PassOn } else { Then::Done })
}

/// What KSM has to do with an offer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ksm {
    /// It may have it where no engine serves.
    pub(crate) may: bool,
    /// It is given it now.
    pub(crate) has: bool,
}

/// Notes an offer. Of what is offered already, and tracked, nothing changes, and the engine hears nothing: a program
/// may offer its memory as often as it likes.
pub(crate) fn note(guard: &mut Guard, start: usize, len: usize, ksm: Ksm) -> Result<()> {
    let served = guard.process().serving.load(Ordering::Relaxed) == SERVED;
    let mut table = guard.table();
    let (mut pagemap, end) = (None, start + len);
    for address in (start & !(CHUNK_BYTES - 1)..end).step_by(CHUNK_BYTES) {
        let chunk = table.make(address).ok_or(Errno::NOMEM)?;
        let pages = pages_of(address, start, end);
        let mut new = set_of(pages.clone().filter(|&page| !chunk.offered.contains(page)));
        let known = |page| chunk.offered.contains(page) && !chunk.fresh.contains(page);
        if served && pages.clone().any(known) {
            pagemap = pagemap.or_else(|| Pagemap::own().ok());
            note_untracked(pagemap.as_ref(), address, pages, &mut new);
        }
        new.pages().for_each(|page| chunk.offer(page));
        let changes = !new.is_empty() || ksm.has && !chunk.in_ksm;
        chunk.to_ksm |= ksm.may;
        chunk.in_ksm |= ksm.has;
        if changes {
            table.mark_dirty(address);
        }
    }
    Ok(())
}

/// Adds the pages that no userfaultfd tracks: another mapping has come there unseen, and this is its own offer.
fn note_untracked(
    pagemap: Option<&Pagemap>,
    chunk: usize,
    pages: Range<usize>,
    new: &mut PageBits,
) {
    let (mut at, end) = (
        chunk + pages.start * PAGE_BYTES,
        chunk + pages.end * PAGE_BYTES,
    );
    let mut runs = [PageRun::default(); 16];
    while let Some(pagemap) = pagemap
        && let Ok(filled) = pagemap.untracked(at as u64..end as u64, &mut runs)
        && let Some(found) = runs.get(..filled).filter(|found| !found.is_empty())
    {
        for run in found {
            #[allow(clippy::cast_possible_truncation)] // addresses of this process
            let (start, stop) = (run.start as usize, run.end as usize);
            pages_of(chunk, start, stop).for_each(|page| new.insert(page));
            at = stop;
        }
    }
}

/// Gives the program frames of its own for all merged pages, a chunk at a time; what it offers stays offered. Where a page cannot be
/// made anonymous it gets its frame where it lies.
///
/// # Errors
/// `NOMEM` when the frames do not fit, `CANCELED` when `must_end` says so.
pub(crate) fn own_all(must_end: impl Fn() -> bool) -> Result<()> {
    let mut at = 0;
    loop {
        // The program's own calls have their turn between two chunks.
        let mut guard = lock().ok_or(Errno::NOMEM)?;
        let mut table = guard.table();
        let Some(address) = table.next(at, false) else {
            return Ok(());
        };
        at = address + CHUNK_BYTES;
        let stored = table
            .get(address)
            .map_or(wire::PageBits::EMPTY, |chunk| chunk.stored);
        if stored.is_empty() {
            continue;
        }
        if must_end() {
            return Err(Errno::CANCELED);
        }
        table.mark_dirty(address);
        if whole(&mut guard, address, CHUNK_BYTES).is_ok() {
            continue;
        }
        for (first, count) in stored.runs() {
            make_private(address + first * PAGE_BYTES, count * PAGE_BYTES)?;
        }
    }
}

/// Takes everything back, and forgets it: from here the hooks pass all calls on.
pub(crate) fn give_back(guard: &mut Guard) {
    // What cannot be made anonymous becomes private where it lies.
    let _ = whole(guard, 0, ADDRESS_LIMIT);
    let mut table = guard.table();
    table.each_known(0, ADDRESS_LIMIT, |address, _, chunk| {
        chunk.offered = wire::PageBits::EMPTY;
        let stored = chunk.stored;
        for (first, count) in stored.runs() {
            // Without memory for it the pages stay merged, and are known to be.
            if make_private(address + first * PAGE_BYTES, count * PAGE_BYTES).is_ok() {
                (first..first + count).for_each(|page| chunk.stored.remove(page));
            }
        }
    });
    let mut at = 0;
    while let Some(address) = table.next(at, false) {
        table.mark_clean(address);
        at = address + CHUNK_BYTES;
    }
}

/// Takes `[start, start + len)` back and gives every merged page in it a private copy.
///
/// # Errors
/// `INVAL` for a range that is not made of pages; `NOMEM` or `AGAIN` when the copies do not fit:
/// the range is withdrawn, and what is merged in it stays so.
pub(crate) fn withdraw(start: usize, len: usize) -> Result<()> {
    let len = whole_pages(start, len)?;
    let Some(mut guard) = lock() else {
        return Ok(());
    };
    discard::withdraw(&mut guard, start, len);
    // What may be pinned stays where it lies, and is private.
    if whole(&mut guard, start, len).is_ok() {
        return Ok(());
    }
    // Nothing keeps others from writing: all pages get frames of their own where they lie.
    let mut result = Ok(());
    guard
        .table()
        .each_known(start, len, |address, pages, chunk| {
            let mut stored = wire::PageBits::EMPTY;
            pages
                .filter(|&page| chunk.stored.contains(page))
                .for_each(|page| stored.insert(page));
            for (first, count) in stored.runs() {
                let start = address + first * PAGE_BYTES;
                result = result.and(make_private(start, count * PAGE_BYTES));
            }
        });
    result
}

/// Gives every page of a range of store mappings a private frame with the same content.
///
/// # Errors
/// `NOMEM` when the frames do not fit.
pub(crate) fn make_private(start: usize, len: usize) -> Result<()> {
    match populate(start, len) {
        Err(Errno::INVAL | Errno::FAULT) => make_parts_private(start, len),
        result => result,
    }
}

fn populate(start: usize, len: usize) -> Result<()> {
    // SAFETY: populating changes no content.
    unsafe { mapping::advise(start, len, POPULATE_WRITE) }
}

/// As [`make_private`] where the guest has taken the right to write away for now, here and there.
fn make_parts_private(start: usize, len: usize) -> Result<()> {
    let maps = Maps::open()?;
    let (mut at, end) = (start, start + len);
    while at < end {
        let vma = maps.find(at)?.filter(|vma| vma.start <= at);
        let vma = vma.ok_or(Errno::NOMEM)?;
        let stop = vma.end.min(end);
        match vma.access() {
            Access::ReadWrite | Access::All => populate(at, stop - at)?,
            access => make_read_only_private(at, stop - at, access)?,
        }
        at = stop;
    }
    Ok(())
}

/// As [`make_private`] where nobody may write: to a page that somebody writes meanwhile a byte could be lost.
/// The guest may count on the signal for a write, so the right is not given back even for a moment, if
/// that can be avoided.
fn make_read_only_private(start: usize, len: usize, access: Access) -> Result<()> {
    let memory = mapping::OwnMemory::open();
    // The machine's policy may forbid it, and the kernel has one answer for that and for no memory.
    if memory
        .and_then(|memory| memory.make_private(start, len))
        .is_ok()
    {
        return Ok(());
    }
    // SAFETY: the guest's own hooks wait for the lock; what it had allowed is put back.
    unsafe {
        mapping::protect(start, len, Access::ReadWrite)?;
        let result = populate(start, len);
        mapping::protect(start, len, access)?;
        result
    }
}
