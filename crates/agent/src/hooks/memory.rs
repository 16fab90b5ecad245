//! Calls that map, unmap, move and describe memory, as the kernel sees them.

use rustix::io::Result;
use wire::PAGE_BYTES;

use super::{call, guard, guarded};
use crate::discard;
use crate::lock::lock;
use crate::offer::{self, Then};
use crate::remap::{self, Remap};
use crate::table::touches;

/// madvise(2).
pub(crate) fn madvise(start: usize, len: usize, advice: i32) -> Result<usize> {
    let done = match advice {
        libc::MADV_MERGEABLE => match offer::offer(start, len, true) {
            Ok(Then::Done) => Ok(()),
            // Not ours to judge: the kernel says what it says without us.
            Ok(Then::PassOn) | Err(_) => pass_advice(start, len, advice),
        },
        libc::MADV_UNMERGEABLE => {
            let passed = pass_advice(start, len, advice);
            if touches(start, len) {
                offer::withdraw(start, len)
            } else {
                passed
            }
        }
        _ => match guard(start, len) {
            Some(mut guard) => discard::madvise(&mut guard, start, len, advice),
            None => pass_advice(start, len, advice),
        },
    };
    done.map(|()| 0)
}

fn pass_advice(start: usize, len: usize, advice: i32) -> Result<()> {
    let advice = advice.cast_unsigned() as usize;
    call(libc::SYS_madvise, [start, len, advice, 0, 0, 0]).map(drop)
}

/// posix_madvise(3), whose DONTNEED discards nothing.
pub(crate) fn posix_madvise(start: usize, len: usize, advice: i32) -> Result<()> {
    match advice {
        libc::POSIX_MADV_DONTNEED => Ok(()),
        _ => pass_advice(start, len, advice),
    }
}

/// Makes a call that puts something else, or nothing, where the range was.
fn replacing(start: usize, len: usize, name: i64, args: [usize; 6]) -> Result<usize> {
    guarded(start, len, name, args, |guard| {
        discard::forget(guard, start, len.next_multiple_of(PAGE_BYTES));
    })
}

/// munmap(2).
pub(crate) fn munmap(start: usize, len: usize) -> Result<usize> {
    replacing(start, len, libc::SYS_munmap, [start, len, 0, 0, 0, 0])
}

/// mmap(2): address, length, protection, flags, descriptor, offset.
pub(crate) fn mmap(args: [usize; 6]) -> Result<usize> {
    let [start, len, _, flags, ..] = args;
    if flags & libc::MAP_FIXED.cast_unsigned() as usize == 0 {
        return call(libc::SYS_mmap, args);
    }
    replacing(start, len, libc::SYS_mmap, args)
}

/// mremap(2).
pub(crate) fn mremap(remap: Remap) -> Result<usize> {
    let fixed = remap.flags & libc::MREMAP_FIXED != 0;
    let known = touches(remap.old, remap.old_len) || (fixed && touches(remap.to, remap.new_len));
    match known.then(lock).flatten() {
        Some(mut guard) => remap::remap(&mut guard, remap),
        None => remap::pass(remap),
    }
}

/// brk(2), as the kernel has it: gives the end of the heap.
pub(crate) fn brk(end: usize) -> Result<usize> {
    let args = |end| [end, 0, 0, 0, 0, 0];
    let old = call(libc::SYS_brk, args(0))?;
    let (from, to) = (end.min(old), end.max(old));
    let mut held = guard(from, to - from).filter(|_| end != 0);
    let new = call(libc::SYS_brk, args(end))?;
    if let Some(guard) = &mut held {
        // What was behind the lower end is gone, or has come just now.
        let from = old.min(new).next_multiple_of(PAGE_BYTES);
        let to = old.max(new).next_multiple_of(PAGE_BYTES);
        discard::forget(guard, from, to - from);
    }
    Ok(new)
}

/// mprotect(2).
pub(crate) fn mprotect(start: usize, len: usize, prot: usize) -> Result<usize> {
    let args = [start, len, prot, 0, 0, 0];
    guarded(start, len, libc::SYS_mprotect, args, |_| ())
}

/// pkey_mprotect(2).
pub(crate) fn pkey_mprotect(start: usize, len: usize, prot: usize, key: usize) -> Result<usize> {
    let args = [start, len, prot, key, 0, 0];
    guarded(start, len, libc::SYS_pkey_mprotect, args, |_| ())
}
