//! Offering memory, taking it back, and starting the agent's thread at the first offer.

use std::ops::Range;
use std::sync::atomic::Ordering;

use rustix::io::{Errno, Result};
use sys::pagemap::{PageRun, Pagemap};
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use crate::any;
use crate::config::config;
use crate::life;
use crate::lock::{ALONE, Guard, SERVED, lock};
use crate::mappings::frames::make_private;
use crate::mappings::private::give_back;
use crate::mappings::whole::whole;
use crate::table::{ADDRESS_LIMIT, pages_of};
use crate::thread::is_barred;

/// What the kernel has to hear of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Nothing: an engine serves this process, or one is looked for; if none is found, the agent's
    /// thread passes the offer on.
    Done,
    /// The call as it came: no engine serves, or KSM is wanted beside.
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
    if is_barred() {
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
    let pass_on = to_ksm && (alone || config().also_ksm);
    note(
        &mut guard,
        start,
        len,
        Ksm {
            may: to_ksm,
            has: pass_on,
        },
    )?;
    let begun = life::begin(&mut guard);
    if is_barred() {
        give_back(&mut guard);
    }
    drop(guard);
    let pass_on = pass_on || to_ksm && begun.is_err();
    Ok(if pass_on { Then::PassOn } else { Then::Done })
}

/// Takes over what the program offered to the kernel before there was an agent.
///
/// # Errors
/// As [`offer`], and what starting the agent's thread gives.
#[cfg(target_arch = "x86_64")]
pub(crate) fn take_over(start: usize, len: usize) -> Result<()> {
    let len = whole_pages(start, len)?;
    let mut guard = lock().ok_or(Errno::NOMEM)?;
    let ksm = Ksm {
        may: true,
        has: true,
    };
    note(&mut guard, start, len, ksm)?;
    life::begin(&mut guard)
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
        let range = pages_of(address, start, end);
        let pages = PageBits::of(range.clone());
        let mut new = pages & !chunk.offered;
        let known = pages & chunk.offered & !chunk.fresh;
        if served && !known.is_empty() {
            pagemap = pagemap.or_else(|| Pagemap::own().ok());
            note_untracked(pagemap.as_ref(), address, range, &mut new);
        }
        chunk.offer(new);
        let changes = !new.is_empty() || ksm.has && !chunk.in_ksm;
        chunk.any = false;
        chunk.kept = chunk.kept & !pages;
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
    any::keep(&mut guard, start, len);
    // What may be pinned stays where it lies, and is private.
    if whole(&mut guard, start, len).is_ok() {
        return Ok(());
    }
    // Nothing keeps others from writing: all pages get frames of their own where they lie.
    let (mut result, mut at, end) = (Ok(()), start & !(CHUNK_BYTES - 1), start + len);
    while let Some(address) = guard.table().next(at, false).filter(|&next| next < end) {
        let known = guard.table().get(address).map(|chunk| chunk.stored);
        let known = known.unwrap_or(PageBits::EMPTY);
        let pages = PageBits::of(pages_of(address, start, end)) & known;
        for (first, count) in pages.runs() {
            let start = address + first * PAGE_BYTES;
            result = result.and(make_private(&mut guard, start, count * PAGE_BYTES));
        }
        at = address + CHUNK_BYTES;
    }
    // A guard that came unseen: a page that cannot be read has no copy.
    result.map_err(|errno| match errno {
        Errno::FAULT => Errno::NOMEM,
        errno => errno,
    })
}
