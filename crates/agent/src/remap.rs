//! mremap(2) over chunks that are known, with the lock held.
//!
//! What is stored is made whole first ([`whole`](crate::whole)), so all attributes are the kernel's to carry. What is
//! left is that windows cut one mapping into several, and the kernel remaps several only to a place of the same
//! length, only since 6.17, and none that are tracked. So a range of several mappings of anonymous memory that are alike is
//! remapped mapping by mapping. The last of them is what grows, as the one mapping would.

use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};
use sys::mapping;
use sys::vma::Maps;
use wire::{CHUNK_BYTES, PAGE_BYTES};

use crate::discard::{forget, unread};
use crate::lock::Guard;
use crate::table::{ADDRESS_LIMIT, Chunk};
use crate::whole::whole;

const MAYMOVE: i32 = libc::MREMAP_MAYMOVE;
const FIXED: i32 = libc::MREMAP_FIXED;
const DONTUNMAP: i32 = libc::MREMAP_DONTUNMAP;

/// A guest's call.
#[derive(Clone, Copy)]
pub(crate) struct Remap {
    pub(crate) old: usize,
    pub(crate) old_len: usize,
    pub(crate) new_len: usize,
    pub(crate) flags: i32,
    pub(crate) to: usize,
}

/// Carries the call out and gives the new address.
///
/// # Errors
/// As mremap(2).
pub(crate) fn remap(guard: &mut Guard, call: Remap) -> Result<usize> {
    let bad = !call.old.is_multiple_of(PAGE_BYTES) || call.new_len == 0 || call.old_len == 0;
    let old_len = call.old_len.checked_next_multiple_of(PAGE_BYTES);
    let new_len = call.new_len.checked_next_multiple_of(PAGE_BYTES);
    let (Some(old_len), Some(new_len), false) = (old_len, new_len, bad) else {
        return pass(call);
    };
    let rounded = Remap {
        old_len,
        new_len,
        ..call
    };
    if is_refused(rounded) {
        return pass(call);
    }
    whole(guard, call.old, old_len).map_err(|_| Errno::NOMEM)?;
    // Asked first: a move of several mappings that the kernel refuses half-way stays half done.
    let result = match is_sound(rounded) && is_cut(guard, rounded) {
        true => piece_by_piece(guard, rounded),
        false => pass(call),
    };
    // The target is unmapped first, whatever comes of the move.
    if call.flags & FIXED != 0 && result != Err(Errno::INVAL) {
        forget(guard, call.to, new_len);
    }
    if let Ok(new) = result {
        follow(guard, rounded, new);
    }
    result
}

/// Whether the kernel refuses the call for its form alone, before it looks at any mapping.
fn is_refused(call: Remap) -> bool {
    let Remap { flags, to, .. } = call;
    let unknown = flags & !(MAYMOVE | FIXED | DONTUNMAP) != 0;
    if flags & (FIXED | DONTUNMAP) == 0 || unknown {
        return unknown;
    }
    let (end, target) = (
        call.old.saturating_add(call.old_len),
        to.saturating_add(call.new_len),
    );
    let resized = flags & DONTUNMAP != 0 && call.old_len != call.new_len;
    let overlaps = end > to && target > call.old;
    let misplaced = !to.is_multiple_of(PAGE_BYTES) || target > ADDRESS_LIMIT;
    flags & MAYMOVE == 0 || resized || overlaps || misplaced
}

/// The call as it came.
pub(crate) fn pass(call: Remap) -> Result<usize> {
    let flags = call.flags.cast_unsigned() as usize;
    let args = [call.old, call.old_len, call.new_len, flags, call.to, 0];
    // SAFETY: the guest's own call.
    unsafe { sys::raw::call(libc::SYS_mremap, args) }
}

/// Whether the kernel would find no fault with the arguments as such. A call with others is passed on, for its answer.
fn is_sound(call: Remap) -> bool {
    let has = |flag| call.flags & flag != 0;
    let known = call.flags & !(MAYMOVE | FIXED | DONTUNMAP) == 0;
    let moves = !has(FIXED) && !has(DONTUNMAP) || has(MAYMOVE);
    let fits = !has(DONTUNMAP) || call.old_len == call.new_len;
    let behind = |a: usize, len: usize, b: usize| a.checked_add(len).is_some_and(|end| end <= b);
    let apart = behind(call.to, call.new_len, call.old) || behind(call.old, call.old_len, call.to);
    let lies = call.to.is_multiple_of(PAGE_BYTES) && behind(call.to, call.new_len, ADDRESS_LIMIT);
    known && moves && fits && (!has(FIXED) || lies && apart)
}

/// Whether the old range is several mappings that may have been one.
fn is_cut(guard: &mut Guard, call: Remap) -> bool {
    let Ok(maps) = Maps::open() else { return false };
    alike(guard, &maps, call).is_ok_and(|last| last > call.old)
}

/// Remaps a range that windows may have cut.
fn piece_by_piece(guard: &mut Guard, call: Remap) -> Result<usize> {
    let maps = Maps::open()?;
    let last = alike(guard, &maps, call)?;
    let moves = call.flags & (FIXED | DONTUNMAP) != 0;
    if !moves && call.new_len <= call.old_len {
        let (start, len) = (call.old + call.new_len, call.old_len - call.new_len);
        if len > 0 {
            // SAFETY: the guest gives the tail back.
            unsafe { mapping::unmap(start, len) }?;
        }
        return Ok(call.old);
    }
    let end = call.old + call.old_len;
    let grown = Remap {
        old: last,
        old_len: end - last,
        new_len: end - last + call.new_len.saturating_sub(call.old_len),
        flags: 0,
        to: 0,
    };
    if !moves && pass(grown).is_ok() {
        return Ok(call.old);
    }
    if call.flags & MAYMOVE == 0 {
        return Err(Errno::NOMEM);
    }
    relocate(&maps, call)
}

/// Whether the old range is anonymous memory that may have been one mapping; gives where its last mapping begins.
fn alike(guard: &mut Guard, maps: &Maps, call: Remap) -> Result<usize> {
    let end = call.old.checked_add(call.old_len).ok_or(Errno::FAULT)?;
    let mut known = |at: usize| guard.table().get(at & !(CHUNK_BYTES - 1)).is_some();
    let first = maps.find(call.old)?.ok_or(Errno::FAULT)?;
    let mut vma = first;
    loop {
        let like = vma.is_anonymous() && vma.access() == first.access();
        if !like || vma.start > call.old && vma.start >= end {
            return Err(Errno::FAULT);
        }
        if vma.end >= end {
            return Ok(vma.start.max(call.old));
        }
        let next = maps.find(vma.end)?.ok_or(Errno::FAULT)?;
        // Offers and windows cut inside a known chunk, or at its ends.
        if next.start != vma.end || !known(vma.end) && !known(vma.end - 1) {
            return Err(Errno::FAULT);
        }
        vma = next;
    }
}

/// Moves the mappings of the old range one by one to a place that is kept for them.
fn relocate(maps: &Maps, call: Remap) -> Result<usize> {
    let fixed = call.flags & FIXED != 0;
    let (at, how) = match fixed {
        true => (call.to, MapFlags::FIXED),
        false => (0, MapFlags::empty()),
    };
    let (at, flags) = (
        std::ptr::with_exposed_provenance_mut(at),
        MapFlags::PRIVATE | MapFlags::NORESERVE | how,
    );
    // SAFETY: a place of the kernel's choice, or the guest's target, which it gives up.
    let made = unsafe { rustix::mm::mmap_anonymous(at, call.new_len, ProtFlags::empty(), flags) }?;
    let new = made.expose_provenance();
    let kept = call.old_len.min(call.new_len);
    let mut done = 0;
    while done < kept {
        let step = maps.find(call.old + done).ok().flatten();
        let end = step.map_or(call.old + kept, |vma| vma.end.min(call.old + kept));
        let len = end - (call.old + done);
        let last = done + len == kept;
        let moved = pass(Remap {
            old: call.old + done,
            old_len: len,
            new_len: if last { call.new_len - done } else { len },
            flags: MAYMOVE | FIXED | call.flags & DONTUNMAP,
            to: new + done,
        });
        if let Err(errno) = moved {
            carry_back(maps, call.old, new, done);
            // SAFETY: the range was made here.
            let _ = unsafe { mapping::unmap(new, call.new_len) };
            return Err(errno);
        }
        done += len;
    }
    if call.old_len > kept {
        // SAFETY: the guest gives the tail back.
        unsafe { mapping::unmap(call.old + kept, call.old_len - kept) }?;
    }
    Ok(new)
}

/// Returns the first `done` bytes, which were moved from `old` to `new`.
fn carry_back(maps: &Maps, old: usize, new: usize, done: usize) {
    let mut at = 0;
    while at < done {
        let step = maps.find(new + at).ok().flatten();
        let len = step.map_or(done, |vma| vma.end - new).min(done) - at;
        let (old_len, new_len) = (len, len);
        let (flags, to) = (MAYMOVE | FIXED, old + at);
        let back = Remap {
            old: new + at,
            old_len,
            new_len,
            flags,
            to,
        };
        let _ = pass(back);
        at += len.max(PAGE_BYTES);
    }
}

/// Moves the offer along, as KSM's flag moves with a mapping.
fn follow(guard: &mut Guard, call: Remap, new: usize) {
    let (old, kept) = (call.old, call.old_len.min(call.new_len));
    let last = is_offered(guard, old + call.old_len - PAGE_BYTES);
    if new != old {
        for at in (0..kept).step_by(PAGE_BYTES) {
            let offered = is_offered(guard, old + at);
            put(guard, new + at, offered);
        }
        if call.flags & DONTUNMAP == 0 {
            forget(guard, old, call.old_len);
        } else {
            unread(guard, old, call.old_len);
        }
    } else if call.old_len > kept {
        forget(guard, old + kept, call.old_len - kept);
    }
    for at in (kept..call.new_len).step_by(PAGE_BYTES) {
        put(guard, new + at, last);
    }
}

fn is_offered(guard: &mut Guard, at: usize) -> bool {
    let (chunk, page) = (at & !(CHUNK_BYTES - 1), at % CHUNK_BYTES / PAGE_BYTES);
    let mut table = guard.table();
    table
        .get(chunk)
        .is_some_and(|chunk| chunk.offered.contains(page))
}

/// A new mapping has come to a page.
fn put(guard: &mut Guard, at: usize, offered: bool) {
    let (chunk, page) = (at & !(CHUNK_BYTES - 1), at % CHUNK_BYTES / PAGE_BYTES);
    let mut table = guard.table();
    let known = match offered {
        true => table.make(chunk),
        false => table.get(chunk),
    };
    if let Some(known) = known {
        Chunk::forget(known, page);
        if offered {
            known.offer(page);
        }
        table.mark_dirty(chunk);
    }
}
