//! Strays: mappings of a store where the table knows of none.
//!
//! A call that no hook sees may move merged memory, or put other memory in its place and move it away. The table goes by the place. So
//! some day it says that a page was written, or is gone, though a mapping of its slot lives on elsewhere. The engine then
//! waits for this process's lifeline only, and gives the slot back: where the page lies by now the program would read zeros.
//!
//! **Invariant**: when a line goes, each page in a mapping of a store is known to the table, or has a frame of its own. So before that
//! all mappings of files are looked through ([`bring_home`]), and what has strayed becomes the program's own where it lies.
//!
//! The look is not at one moment. A page that is moved away while it goes on was known until then, and its slot is not given up
//! yet: it is found before the next line goes.
//!
//! **The limits**: a page that has strayed before, and is moved a second time just then, from a place that the look comes to
//! later to one that it has passed. And one that was moved to where the table knows another page of a store.
//!
//! The tempting alternative, to hear of moves from the kernel (`UFFD_FEATURE_EVENT_REMAP`), has each of them wait for the agent, and
//! those that hooks make as well.

use std::ops::Range;

use rustix::io::{Errno, Result};
use sys::vma::{Maps, Vma};
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use super::frames::make_pages_private;
use super::look::Look;
use super::stores::is_store;
use super::whole::whole_if_ample;
use crate::lock::{Guard, lock};
use crate::table::pages_of;

/// Makes all pages the program's own that lie in mappings of a store of which the table does not know.
///
/// # Errors
/// What reading /proc gives; `NOMEM` where the frames do not fit. Then there may be strays still.
pub(crate) fn bring_home(maps: &Maps) -> Result<()> {
    let mut all = Ok(());
    maps.each_file(|vma| {
        all = parts_of(&vma).try_for_each(bring_part_home);
        all.is_ok()
    })?;
    all
}

/// The parts of a store's mapping, a chunk each; none of another file's.
fn parts_of(vma: &Vma) -> impl Iterator<Item = Range<usize>> + use<> {
    let (start, end) = match is_store(vma) {
        true => (vma.start, vma.end),
        false => (0, 0),
    };
    let first = start & !(CHUNK_BYTES - 1);
    let chunks = (first..end).step_by(CHUNK_BYTES);
    chunks.map(move |chunk| chunk.max(start)..(chunk + CHUNK_BYTES).min(end))
}

fn bring_part_home(part: Range<usize>) -> Result<()> {
    let mut guard = lock().ok_or(Errno::NOMEM)?;
    let chunk = part.start & !(CHUNK_BYTES - 1);
    let asked = PageBits::of(pages_of(chunk, part.start, part.end));
    let stored = |guard: &mut Guard| {
        let mut table = guard.table();
        table
            .get(chunk)
            .map_or(PageBits::EMPTY, |known| known.stored)
            & asked
    };
    if stored(&mut guard) == asked {
        return Ok(());
    }
    // Hooks may have changed it before the lock was taken: the kernel is asked again.
    note_all(&mut guard, part.start, part.len())?;
    if whole_if_ample(&mut guard, part.start, part.len()).is_ok() {
        return Ok(());
    }
    let pages = stored(&mut guard);
    make_pages_private(&mut guard, chunk, pages)
}

/// Notes what of a range lies in mappings of a store, with attributes that only the kernel knows there.
///
/// # Errors
/// What looking gives; `NOMEM` where the table has no room.
pub(crate) fn note_all(guard: &mut Guard, start: usize, len: usize) -> Result<()> {
    let look = Look::open(guard)?;
    let (mut at, end) = (start, start + len);
    while let Some(vma) = look.find(guard, at)?.filter(|vma| vma.start < end) {
        if is_store(&vma) {
            let pages = vma.start.max(at)..vma.end.min(end);
            pages
                .step_by(PAGE_BYTES)
                .try_for_each(|page| note(guard, page))?;
        }
        at = vma.end;
    }
    Ok(())
}

/// Notes that a page lies in a mapping of a store, with attributes that only the kernel knows there.
///
/// # Errors
/// `NOMEM` where the table has no room.
pub(crate) fn note(guard: &mut Guard, at: usize) -> Result<()> {
    let (chunk, page) = (at & !(CHUNK_BYTES - 1), at % CHUNK_BYTES / PAGE_BYTES);
    let mut table = guard.table();
    let known = table.make(chunk).ok_or(Errno::NOMEM)?;
    known.stored.insert(page);
    known.odd = true;
    table.mark_dirty(chunk);
    Ok(())
}
