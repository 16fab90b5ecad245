//! Pages of a store's mapping get frames of their own where they lie.

use rustix::io::{Errno, Result};
use sys::mapping::{self, Access};
use sys::vma::Maps;
use wire::{PAGE_BYTES, PageBits};

use crate::lock::Guard;

/// `MADV_POPULATE_WRITE` (Linux 5.14): makes pages private and writable at once.
const POPULATE_WRITE: i32 = 23;

/// `MADV_POPULATE_READ` (Linux 5.14).
const POPULATE_READ: i32 = 22;

/// Gives every page of a range of store mappings a private frame with the same content.
///
/// # Errors
/// `NOMEM` when the frames do not fit.
pub(crate) fn make_private(guard: &mut Guard, start: usize, len: usize) -> Result<()> {
    match populate(start, len) {
        Err(Errno::INVAL | Errno::FAULT) => {
            guard.at_desk_or_here(|guard| make_parts_private(guard, start, len))
        }
        result => result,
    }
}

/// The same of some pages of a chunk.
///
/// # Errors
/// As [`make_private`].
pub(crate) fn make_pages_private(guard: &mut Guard, chunk: usize, pages: PageBits) -> Result<()> {
    pages.runs().try_for_each(|(first, count)| {
        make_private(guard, chunk + first * PAGE_BYTES, count * PAGE_BYTES)
    })
}

/// Brings pages in, writable.
///
/// # Errors
/// `NOMEM` when the frames do not fit; `INVAL` or `FAULT` where the memory may not be written.
pub(crate) fn populate(start: usize, len: usize) -> Result<()> {
    // A key that a call no hook saw has given closes the memory to the kernel as well.
    let _open = sys::keys::Open::new();
    // SAFETY: populating changes no content.
    unsafe { mapping::advise(start, len, POPULATE_WRITE) }
}

/// Brings pages in, to be read.
///
/// # Errors
/// `FAULT` where a page cannot be read: a guard, the place behind a file's end; also where the mapping may not be.
pub(crate) fn read_in(start: usize, len: usize) -> Result<()> {
    // SAFETY: populating changes no content.
    unsafe { mapping::advise(start, len, POPULATE_READ) }
}

/// As [`make_private`] where the guest has taken the right to write away for now, here and there.
fn make_parts_private(guard: &Guard, start: usize, len: usize) -> Result<()> {
    let maps = Maps::open()?;
    let (mut at, end) = (start, start + len);
    while at < end {
        let vma = maps.find(at)?.filter(|vma| vma.start <= at);
        let vma = vma.ok_or(Errno::NOMEM)?;
        let stop = vma.end.min(end);
        match vma.access() {
            Access::ReadWrite | Access::All => populate(at, stop - at)?,
            access => make_read_only_private(guard, at, stop - at, access)?,
        }
        at = stop;
    }
    Ok(())
}

/// As [`make_private`] where no thread may write: of a page that a thread writes meanwhile a byte could be lost.
/// The guest may count on the signal for a write, so the right is not given back even for a moment, if
/// that can be avoided.
fn make_read_only_private(guard: &Guard, start: usize, len: usize, access: Access) -> Result<()> {
    let memory = mapping::OwnMemory::open();
    // The machine's policy may forbid it, and the kernel has one answer for that and for no memory.
    if memory
        .and_then(|memory| memory.make_private(start, len))
        .is_ok()
    {
        return Ok(());
    }
    let executes = matches!(access, Access::Execute | Access::ReadExecute | Access::All);
    if executes && guard.process().life.is_callers() {
        return Err(Errno::PERM); // it could not put that back
    }
    // SAFETY: the guest's own hooks wait for the lock; what it had allowed is put back.
    unsafe {
        mapping::protect(start, len, Access::ReadWrite)?;
        let result = populate(start, len);
        mapping::protect(start, len, access)?;
        result
    }
}
