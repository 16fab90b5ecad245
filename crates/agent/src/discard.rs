//! Calls that discard or replace memory, over merged pages.
//!
//! A merged page lies in a private mapping of a store. There the kernel's own `MADV_DONTNEED`
//! would bring the canonical content back where the guest expects zeros, and `MADV_FREE` and
//! `MADV_REMOVE` answer as for a file. So anonymous memory is put where a store was mapped,
//! and the call then means what its manual page says. That may take a mapping more than the guest
//! has left, which the same call over anonymous memory never does: then the pages are filled with
//! zeros where they are, and stay mappings of the store.

use rustix::io::{Errno, Result};
use sys::mapping::{self, Access, Source};
use sys::vma::Maps;
use wire::{PAGE_BYTES, PageBits};

use crate::lock::Guard;
use crate::remap::pieces;
use crate::table::Chunk;

/// Puts zero-filled anonymous memory over every stored page of `[start, start + len)`, or zeros where
/// there is no mapping left for it. Gives whether no page in the range is stored any more.
///
/// # Errors
/// `NOMEM` when the map count is exhausted and a page is not writable: some pages may be done, the
/// others are untouched.
fn make_anonymous(guard: &mut Guard, start: usize, len: usize) -> Result<bool> {
    let maps = Maps::open().ok();
    let mut result = Ok(true);
    guard
        .table()
        .each_known(start, len, |address, pages, chunk| {
            let mut stored = PageBits::EMPTY;
            pages
                .filter(|&page| chunk.stored.contains(page))
                .for_each(|page| stored.insert(page));
            for (first, count) in stored.runs() {
                if let Ok(all) = result {
                    let replaced = replace_run(maps.as_ref(), address, first, count, chunk);
                    result = replaced.map(|replaced| all && replaced);
                }
            }
        });
    result
}

fn replace_run(
    maps: Option<&Maps>,
    address: usize,
    first: usize,
    count: usize,
    chunk: &mut Chunk,
) -> Result<bool> {
    let mut all = true;
    let (mut at, end) = (
        address + first * PAGE_BYTES,
        address + (first + count) * PAGE_BYTES,
    );
    while at < end {
        let vma = maps.and_then(|maps| maps.find(at).ok().flatten());
        let stop = vma.map_or(end, |vma| vma.end.min(end));
        let access = vma.map_or(Access::ReadWrite, |vma| vma.access());
        // SAFETY: the guest asked for this range to be discarded; the lock is held, so no window
        // and no other hook works on it.
        let replaced = unsafe {
            mapping::replace(
                at,
                stop - at,
                Source::Anonymous,
                access,
                chunk.attributes,
                false,
            )
        };
        match replaced {
            Err((Errno::NOMEM, false)) if access == Access::ReadWrite => {
                let place = std::ptr::with_exposed_provenance_mut::<u8>(at);
                // SAFETY: the guest asked for this range to be discarded, and may write it.
                unsafe { place.write_bytes(0, stop - at) };
                all = false;
            }
            Err((errno, false)) => return Err(errno),
            // Replaced, though perhaps not finished (a lock that no longer fits): the content is
            // as asked.
            Ok(()) | Err((_, true)) => {
                for page in (at - address) / PAGE_BYTES..(stop - address) / PAGE_BYTES {
                    chunk.stored.remove(page);
                }
            }
        }
        at = stop;
    }
    Ok(all)
}

/// Forgets `[start, start + len)`: the guest unmapped it or mapped something else there.
pub(crate) fn forget(guard: &mut Guard, start: usize, len: usize) {
    guard.table().each_known(start, len, |_, pages, chunk| {
        for page in pages {
            chunk.offered.remove(page);
            chunk.stored.remove(page);
        }
    });
}

/// madvise(2) over a range that touches known chunks, with the lock held.
///
/// # Errors
/// The kernel's own, as for anonymous memory.
pub(crate) fn madvise(guard: &mut Guard, start: usize, len: usize, advice: i32) -> Result<()> {
    /// `MADV_DONTNEED_LOCKED` (Linux 5.18).
    const DONTNEED_LOCKED: i32 = 24;
    let pass = || {
        // SAFETY: the guest's own call.
        unsafe { mapping::advise(start, len, advice) }
    };
    let Some(rounded) = len
        .checked_next_multiple_of(PAGE_BYTES)
        .filter(|_| start.is_multiple_of(PAGE_BYTES))
    else {
        return pass(); // refused by the kernel
    };
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE | DONTNEED_LOCKED => {
            if advice != DONTNEED_LOCKED && any(guard, start, rounded, |c| c.attributes.locked) {
                return pass(); // refused by the kernel, for all of the range
            }
            if make_anonymous(guard, start, rounded)? {
                pass()
            } else {
                advise_anonymous(guard, start, rounded, advice)
            }
        }
        libc::MADV_REMOVE if any(guard, start, rounded, |c| !c.stored.is_empty()) => {
            Err(Errno::INVAL) // as for all anonymous memory
        }
        _ => {
            let result = pass();
            if result.is_ok() {
                note(guard, start, rounded, advice);
            }
            result
        }
    }
}

/// Gives the advice to all but the stored pages of a range: these hold zeros of their own by now.
fn advise_anonymous(guard: &mut Guard, start: usize, len: usize, advice: i32) -> Result<()> {
    let mut result = Ok(());
    pieces(guard, start, len, |start, len, stored| {
        if !stored && result.is_ok() {
            // SAFETY: the guest's own call.
            result = unsafe { mapping::advise(start, len, advice) };
        }
    });
    result
}

fn any(guard: &mut Guard, start: usize, len: usize, test: impl Fn(&Chunk) -> bool) -> bool {
    let mut found = false;
    guard
        .table()
        .each_known(start, len, |_, _, chunk| found |= test(chunk));
    found
}

/// Remembers what the guest told the kernel of the range.
fn note(guard: &mut Guard, start: usize, len: usize, advice: i32) {
    guard.table().each_known(start, len, |_, pages, chunk| {
        chunk.set(&pages, |attributes| match advice {
            libc::MADV_DONTFORK => attributes.dontfork = true,
            libc::MADV_DOFORK => attributes.dontfork = false,
            libc::MADV_DONTDUMP => attributes.dontdump = true,
            libc::MADV_DODUMP => attributes.dontdump = false,
            libc::MADV_HUGEPAGE => (attributes.huge, attributes.nohuge) = (true, false),
            libc::MADV_NOHUGEPAGE => (attributes.huge, attributes.nohuge) = (false, true),
            _ => {}
        });
    });
}
