//! mremap(2) over chunks that are known, with the lock held.
//!
//! A region with merged pages is many mappings, and the kernel remaps one at a time. Shrinking is
//! unmapping the tail. Growing in place puts new memory behind the old. Moving gives the guest a
//! fresh range: anonymous parts are remapped there, merged parts are copied, so that nothing at
//! the new place refers to a store: the references of the old place end with it. Each part keeps
//! what it allows, closed parts included.

use rustix::io::{Errno, Result};
use rustix::mm::MapFlags;
use sys::mapping::{self, Access};
use sys::vma::{Maps, Vma};
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use crate::discard::forget;
use crate::lock::Guard;
use crate::offer::{Ksm, note};
use crate::table::pages_of;

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
    let old_len = call
        .old_len
        .checked_next_multiple_of(PAGE_BYTES)
        .filter(|_| !bad);
    let new_len = call.new_len.checked_next_multiple_of(PAGE_BYTES);
    let (Some(old_len), Some(new_len)) = (old_len, new_len) else {
        return pass(call);
    };
    let call = Remap {
        old_len,
        new_len,
        ..call
    };
    if call.flags & FIXED != 0 {
        // The target is unmapped first, whatever comes of the move.
        forget(guard, call.to, new_len);
    }
    let offered = offered_to_end(guard, call);
    if is_one_mapping(call)? {
        let new = pass(call)?;
        follow(guard, call, new, offered);
        return Ok(new);
    }
    let moves = call.flags & (FIXED | DONTUNMAP) != 0;
    if !moves && new_len <= old_len {
        // SAFETY: the guest gives the tail back.
        unsafe { mapping::unmap(call.old + new_len, old_len - new_len) }.or_else(|errno| {
            if new_len == old_len {
                Ok(())
            } else {
                Err(errno)
            }
        })?;
        forget(guard, call.old + new_len, old_len - new_len);
        return Ok(call.old);
    }
    let access = access_at(call.old)?;
    if !moves && grow_in_place(call, access).is_ok() {
        if offered {
            let _ = note(
                guard,
                call.old + call.old_len,
                call.new_len - call.old_len,
                Ksm::default(),
            );
        }
        return Ok(call.old);
    }
    if call.flags & MAYMOVE == 0 {
        return Err(Errno::NOMEM);
    }
    relocate(guard, call, access, offered)
}

/// The call as it came.
pub(crate) fn pass(call: Remap) -> Result<usize> {
    let flags = call.flags.cast_unsigned() as usize;
    let args = [call.old, call.old_len, call.new_len, flags, call.to, 0];
    // SAFETY: the guest's own call.
    unsafe { sys::raw::call(libc::SYS_mremap, args) }
}

/// Whether the old range is offered to its end.
fn offered_to_end(guard: &mut Guard, call: Remap) -> bool {
    let mut offered = false;
    guard
        .table()
        .each_known(call.old, call.old_len, |_, pages, chunk| {
            offered = pages
                .last()
                .is_some_and(|page| chunk.offered.contains(page));
        });
    offered
}

/// Whether the kernel can do it alone: the old range is one anonymous mapping. Windows leave a
/// region in several, also where nothing is merged any more.
fn is_one_mapping(call: Remap) -> Result<bool> {
    let vma = Maps::open()?.find(call.old)?;
    Ok(vma.is_none_or(|vma| !vma.file && vma.end >= call.old + call.old_len))
}

fn access_at(address: usize) -> Result<Access> {
    let vma = Maps::open()?.find(address)?.ok_or(Errno::FAULT)?;
    Ok(vma.access())
}

fn grow_in_place(call: Remap, access: Access) -> Result<()> {
    let tail = call.old + call.old_len;
    place(
        tail,
        call.new_len - call.old_len,
        access,
        MapFlags::FIXED_NOREPLACE,
    )
    .map(drop)
}

fn place(at: usize, len: usize, access: Access, how: MapFlags) -> Result<usize> {
    let at = std::ptr::with_exposed_provenance_mut(at);
    let flags = MapFlags::PRIVATE | how;
    // SAFETY: either a place of the kernel's choice, one that must be free, or the guest's target.
    let made = unsafe { rustix::mm::mmap_anonymous(at, len, access.prot(), flags) }?;
    Ok(made.expose_provenance())
}

fn relocate(guard: &mut Guard, call: Remap, access: Access, offered: bool) -> Result<usize> {
    let fixed = call.flags & FIXED != 0;
    let how = if fixed {
        MapFlags::FIXED
    } else {
        MapFlags::empty()
    };
    let new = place(
        if fixed { call.to } else { 0 },
        call.new_len,
        Access::ReadWrite,
        how,
    )?;
    let kept = call.old_len.min(call.new_len);
    let moved = carry(guard, call.old, new, kept);
    if let Err(errno) = moved {
        // What was remapped goes back piece by piece; what was copied is still in place.
        carry_back(guard, call.old, new, kept);
        // SAFETY: the range was made here.
        let _ = unsafe { mapping::unmap(new, call.new_len) };
        return Err(errno);
    }
    if call.new_len > kept {
        // SAFETY: the new range is the guest's, and what was added is to be as the old one was.
        unsafe { mapping::protect(new + kept, call.new_len - kept, access) }?;
    }
    // SAFETY: the old range ends here, as the guest asked.
    unsafe { mapping::unmap(call.old, call.old_len) }?;
    if call.flags & DONTUNMAP != 0 {
        place(call.old, call.old_len, access, MapFlags::FIXED)?;
    }
    follow(guard, call, new, offered);
    Ok(new)
}

/// The pieces of `[old, old + len)`: `(start, len, stored)`.
pub(crate) fn pieces(
    guard: &mut Guard,
    old: usize,
    len: usize,
    mut each: impl FnMut(usize, usize, bool),
) {
    let mut at = old;
    let end = old + len;
    while at < end {
        let chunk = at & !(CHUNK_BYTES - 1);
        let stop = (chunk + CHUNK_BYTES).min(end);
        let stored = guard
            .table()
            .get(chunk)
            .map_or(PageBits::EMPTY, |chunk| chunk.stored);
        let pages = pages_of(chunk, at, stop);
        let mut first = pages.start;
        while first < pages.end {
            let kind = stored.contains(first);
            let next = (first..pages.end).find(|&page| stored.contains(page) != kind);
            let next = next.unwrap_or(pages.end);
            each(
                chunk + first * PAGE_BYTES,
                (next - first) * PAGE_BYTES,
                kind,
            );
            first = next;
        }
        at = stop;
    }
}

fn carry(guard: &mut Guard, old: usize, new: usize, len: usize) -> Result<()> {
    let mut result = Ok(());
    pieces(guard, old, len, |start, len, stored| {
        let to = new + (start - old);
        if result.is_ok() {
            result = if stored {
                copy_piece(start, to, len)
            } else {
                remap_piece(start, to, len)
            };
        }
    });
    result
}

/// Copies a range of merged pages mapping by mapping to fresh memory, with what each allows.
fn copy_piece(from: usize, to: usize, len: usize) -> Result<()> {
    each_mapping(from, len, |vma, start, len| {
        let to = to + (start - from);
        let source = std::ptr::with_exposed_provenance::<u8>(start);
        let target = std::ptr::with_exposed_provenance_mut::<u8>(to);
        let (open, access) = (vma.read, vma.access());
        // SAFETY: both ranges are mapped and distinct, the new one is writable and the old one
        // readable, or made so here; the guest gives the old one up, so nobody may write it.
        unsafe {
            if !open {
                mapping::protect(start, len, Access::Read)?;
            }
            std::ptr::copy_nonoverlapping(source, target, len);
            if !open {
                mapping::protect(start, len, access)?;
            }
            match access {
                Access::ReadWrite => Ok(()),
                _ => mapping::protect(to, len, access),
            }
        }
    })
}

/// Calls `each` with every mapping of a range, and the start and length of its part there.
fn each_mapping(
    start: usize,
    len: usize,
    mut each: impl FnMut(Vma, usize, usize) -> Result<()>,
) -> Result<()> {
    let maps = Maps::open()?;
    let (mut at, end) = (start, start + len);
    while at < end {
        let vma = maps.find(at)?.filter(|vma| vma.start <= at);
        let vma = vma.ok_or(Errno::FAULT)?;
        let stop = vma.end.min(end);
        each(vma, at, stop - at)?;
        at = stop;
    }
    Ok(())
}

/// Returns what [`carry`] remapped before it failed: the parts of the old range that are absent.
fn carry_back(guard: &mut Guard, old: usize, new: usize, len: usize) {
    let Ok(maps) = Maps::open() else { return };
    pieces(guard, old, len, |start, len, _| {
        let (mut at, end) = (start, start + len);
        while at < end {
            let next = maps
                .find(at)
                .ok()
                .flatten()
                .map_or((end, end), |v| (v.start, v.end));
            let gap_end = next.0.min(end);
            if gap_end > at {
                let _ = remap_piece(new + (at - old), at, gap_end - at);
            }
            at = next.1.max(gap_end);
        }
    });
}

/// Remaps a range mapping by mapping, as kernels before 6.17 want it.
fn remap_piece(from: usize, to: usize, len: usize) -> Result<()> {
    each_mapping(from, len, |_, old, step| {
        let (to, flags) = (to + (old - from), MAYMOVE | FIXED);
        let (old_len, new_len) = (step, step);
        pass(Remap {
            old,
            old_len,
            new_len,
            flags,
            to,
        })
        .map(drop)
    })
}

/// Moves the offer along, as KSM's flag moves with a mapping.
fn follow(guard: &mut Guard, call: Remap, new: usize, offered: bool) {
    forget(guard, call.old, call.old_len);
    if offered {
        let _ = note(guard, new, call.new_len, Ksm::default());
    }
}
