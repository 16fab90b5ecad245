//! Strays: mappings of a store where the table knows of none.
//!
//! A call that no hook sees may move merged memory, or put other memory in its place and move it away. The table goes by the place. So
//! some day it says that a page was written, or is gone, though a mapping of its slot lives on elsewhere. The engine then
//! waits for this process's lifeline only, and gives the slot back: where the page lies by now the program would read zeros.
//!
//! **Invariant**: when a line goes, each page in a mapping of a store has been merged where it lies, so that a ref is counted for it, or has a
//! frame of its own. So before that all mappings of files are looked through ([`bring_home`]). A page that has strayed gets its
//! frame where it lies, and is known from then on.
//!
//! It does not become anonymous memory at once. The code that moved it makes calls that wait for no lock, and may unmap it
//! meanwhile. Then a write fault that the kernel is asked for fails, and a copy would end the program.
//!
//! The look is not at one moment. A page that is moved away while it goes on was known until then, and its slot is not given up
//! yet: it is found before the next line goes. Before the last one goes there is a second look ([`own_all`](super::private::own_all)).
//!
//! **The limits**: a page that has strayed before, and is moved a second time just then, from a place that the look comes to
//! later to one that it has passed. And one that was moved to where the table knows another page of a store.
//!
//! The tempting alternative, to hear of moves from the kernel (`UFFD_FEATURE_EVENT_REMAP`), has each of them wait for the agent, and
//! those that hooks make as well.

use std::ops::Range;

use rustix::io::{Errno, Result};
use sys::pagemap::Pagemap;
use sys::vma::{Maps, Row, Vma};
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use super::frames::make_pages_private;
use super::look::Look;
use super::stores::is_store;
use super::whole::private_in;
use crate::lock::{Guard, lock};
use crate::table::pages_of;

/// Gives all pages frames of their own that lie in mappings of a store of which the table does not know.
///
/// # Errors
/// What reading /proc gives; `NOMEM` where the frames do not fit; `FAULT` and `DEADLK` as of [`note_all`]. Then there may be strays still.
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
    let all = PageBits::of(pages_of(chunk, part.start, part.end));
    // What was noted before may be gone, and another page may lie there.
    let merged = guard
        .table()
        .get(chunk)
        .map(|known| known.stored & !known.noted);
    let unknown = all & !merged.unwrap_or(PageBits::EMPTY);
    unknown.runs().try_for_each(|(first, count)| {
        let start = chunk + first * PAGE_BYTES;
        note_all(&mut guard, start, count * PAGE_BYTES)
    })
}

/// Notes what of a range lies in mappings of a store, with attributes that only the kernel knows there. No ref is counted for it, so each page
/// gets a frame of its own first.
///
/// # Errors
/// What looking gives; `NOMEM` where frames do not fit, or the table has no room; `FAULT` behind the store's end and where a guard lies;
/// `DEADLK` where the program watches the memory. Then some are not noted.
pub(crate) fn note_all(guard: &mut Guard, start: usize, len: usize) -> Result<()> {
    let look = Look::open(guard)?;
    let (mut at, end) = (start, start + len);
    while let Some(vma) = look.find(guard, at)?.filter(|vma| vma.start < end) {
        let part = vma.start.max(at)..vma.end.min(end);
        at = vma.end;
        if !is_store(&vma) {
            continue;
        }
        match give_frames(guard, part.clone()) {
            Ok(()) => part
                .step_by(PAGE_BYTES)
                .try_for_each(|page| note(guard, page))?,
            // A call past libc may have unmapped all of it meanwhile.
            Err(errno) if has_store(guard, &look, part)? => return Err(errno),
            Err(_) => {}
        }
    }
    Ok(())
}

/// Whether any of a range lies in a store's mapping now.
fn has_store(guard: &mut Guard, look: &Look, part: Range<usize>) -> Result<bool> {
    let mut at = part.start;
    while let Some(vma) = look.find(guard, at)?.filter(|vma| vma.start < part.end) {
        if is_store(&vma) {
            return Ok(true);
        }
        at = vma.end;
    }
    Ok(false)
}

/// Gives each page of a store's mapping a frame of its own that has none.
fn give_frames(guard: &mut Guard, part: Range<usize>) -> Result<()> {
    let mut watched = None;
    let first = part.start & !(CHUNK_BYTES - 1);
    for chunk in (first..part.end).step_by(CHUNK_BYTES) {
        let (start, end) = (chunk.max(part.start), (chunk + CHUNK_BYTES).min(part.end));
        let private = guard.at_desk(|_| private_in(&Pagemap::own()?, start, end - start));
        let pages = PageBits::of(pages_of(chunk, start, end));
        let lacking = pages & !private.unwrap_or(PageBits::EMPTY);
        if lacking.is_empty() {
            continue;
        }
        // A fault would sleep until the program's own thread lets the page be written, and that may wait for the lock.
        let asks = || guard.at_desk(|_| is_watched(start, end));
        if *watched.get_or_insert_with(asks) {
            return Err(Errno::DEADLK);
        }
        make_pages_private(guard, chunk, lacking)?;
    }
    Ok(())
}

/// Whether the program has registered a userfaultfd of its own for the mapping of a range, at which faults sleep, or that cannot be
/// told. At the one that tracks they do not.
fn is_watched(start: usize, end: usize) -> bool {
    // A mapping has one userfaultfd at most. To read of it takes long: the kernel walks all page tables below.
    let is_tracked = || Pagemap::own()?.is_tracked(start as u64..end as u64);
    if is_tracked() == Ok(true) {
        return false;
    }
    let mut row = [Row::default()];
    let told = sys::vma::rows(start, end, |_| false, &mut row);
    told.is_err() || row[0].registered
}

/// Notes that a page lies in a mapping of a store, with attributes that only the kernel knows there.
///
/// # Errors
/// `NOMEM` where the table has no room.
pub(crate) fn note(guard: &mut Guard, at: usize) -> Result<()> {
    let (chunk, page) = (at & !(CHUNK_BYTES - 1), at % CHUNK_BYTES / PAGE_BYTES);
    let mut table = guard.table();
    let known = table.make(chunk).ok_or(Errno::NOMEM)?;
    let is_new = !known.noted.contains(page);
    known.note(page);
    if is_new {
        table.mark_dirty(chunk);
    }
    Ok(())
}
