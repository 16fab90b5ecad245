//! Calls that map, unmap, move and describe memory, as the kernel sees them.

use std::sync::atomic::Ordering;

use rustix::io::{Errno, Result};
use wire::PAGE_BYTES;

use super::call::{call, guard, is_readable, over};
use crate::config::config;
use crate::life;
use crate::lock::{Guard, existing, lock};
use crate::mappings::discard;
use crate::mappings::look::Look;
use crate::mappings::remap::{self, Remap};
use crate::mappings::stores::is_store;
use crate::mappings::whole::whole;
use crate::offer::{self, Then};
use crate::passing;
use crate::table::{ADDRESS_LIMIT, touches};
use crate::thread;

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
            let withdrawn = if touches(start, len) || config().any.is_some() {
                offer::withdraw(start, len)
            } else {
                passed
            };
            // A hole in the range is an error, whatever became of the rest.
            if passed == Err(Errno::NOMEM) {
                passed
            } else {
                withdrawn
            }
        }
        _ if discard::is_passed_on(advice) => {
            life::bring_back();
            pass_advice(start, len, advice)
        }
        _ if discard::discards(advice) => discard(start, len, advice),
        _ => over(start, len, |held| match held {
            Some(guard) => discard::madvise(guard, start, len, advice),
            None => pass_advice(start, len, advice),
        }),
    };
    done.map(|()| 0)
}

/// Discards memory: where nothing is offered or stored the kernel does, without the lock ([`passing`]).
fn discard(start: usize, len: usize, advice: i32) -> Result<()> {
    let used = || {
        let mut held = guard(start, len)?;
        let used = held.table().is_used(start, len, false);
        used.then_some(held)
    };
    let mut noted = None;
    let held = used().or_else(|| {
        noted = Some(passing::note(start, len));
        used()
    });
    match held {
        Some(mut held) => discard::madvise(&mut held, start, len, advice),
        None => pass_advice(start, len, advice),
    }
}

fn pass_advice(start: usize, len: usize, advice: i32) -> Result<()> {
    let advice = advice.cast_unsigned() as usize;
    call(libc::SYS_madvise, [start, len, advice, 0, 0, 0]).map(drop)
}

/// Discards the whole pages `[start, start + len)`, of which the guest says that their content no longer matters, and
/// notes how many for the engine.
///
/// # Errors
/// `INVAL` for a range that is not made of whole pages; else the kernel's own, as for `MADV_DONTNEED`.
pub(crate) fn recycle(start: usize, len: usize) -> Result<()> {
    // Rounded up, it would take bytes of which nothing was said.
    if offer::whole_pages(start, len)? != len {
        return Err(Errno::INVAL);
    }
    madvise(start, len, libc::MADV_DONTNEED)?;
    if let Some(process) = existing() {
        let pages = (len / PAGE_BYTES) as u64;
        // Relaxed: a count.
        process.told.fetch_add(pages, Ordering::Relaxed);
    }
    Ok(())
}

/// posix_madvise(3), whose DONTNEED discards nothing.
pub(crate) fn posix_madvise(start: usize, len: usize, advice: i32) -> Result<()> {
    match advice {
        libc::POSIX_MADV_DONTNEED => Ok(()),
        _ => madvise(start, len, advice).map(drop),
    }
}

/// Whether the program has taken all of a range back, or never offered it: no window will work there. The kernel may wait there for
/// a thread of the program that reads the events of a userfaultfd. What the agent may offer by itself counts as offered.
fn is_taken_back(guard: &mut Guard, start: usize, len: usize) -> bool {
    !guard.table().is_used(start, len, config().any.is_some())
}

/// Makes a call that puts something else, or nothing, where the range was. Also one that fails may have unmapped it:
/// then what the table has of it is wrong, and costs a look.
fn replacing(start: usize, len: usize, name: i64, args: [usize; 6]) -> Result<usize> {
    over(start, len, |held| {
        let taken_back = |held: &mut Guard| is_taken_back(held, start, len);
        if held.as_mut().is_some_and(taken_back) {
            *held = None;
            let result = call(name, args);
            // What is unmapped stays kept back until something new is mapped there. What was offered there since is news.
            if name == libc::SYS_mmap
                && result.is_ok()
                && let Some(mut held) = guard(start, len)
            {
                discard::forget_kept(&mut held, start, len);
            }
            return result;
        }
        let result = call(name, args);
        if let (Some(held), Ok(_)) = (held, result) {
            discard::forget(held, start, len.next_multiple_of(PAGE_BYTES));
        }
        result
    })
}

/// munmap(2).
pub(crate) fn munmap(start: usize, len: usize) -> Result<usize> {
    replacing(start, len, libc::SYS_munmap, [start, len, 0, 0, 0, 0])
}

/// mmap(2): address, length, protection, flags, descriptor, offset.
pub(crate) fn mmap(args: [usize; 6]) -> Result<usize> {
    let [start, len, _, flags, ..] = args;
    if flags & libc::MAP_FIXED.cast_unsigned() as usize != 0 {
        return replacing(start, len, libc::SYS_mmap, args);
    }
    let made = call(libc::SYS_mmap, args)?;
    // Nothing was mapped there: what is known of the place is of a mapping that went unseen.
    if let Some(mut guard) = guard(made, len) {
        discard::forget(&mut guard, made, len.next_multiple_of(PAGE_BYTES));
    }
    Ok(made)
}

/// mremap(2).
pub(crate) fn mremap(remap: Remap) -> Result<usize> {
    let fixed = remap.flags & libc::MREMAP_FIXED != 0;
    let target = || passing::note_if_any(remap.to, remap.new_len);
    let _noted = (
        passing::note_if_any(remap.old, remap.old_len),
        fixed.then(target),
    );
    let known = touches(remap.old, remap.old_len) || (fixed && touches(remap.to, remap.new_len));
    if let Some(mut guard) = known.then(lock).flatten() {
        let mut free = |at, len| !touches(at, len) || is_taken_back(&mut guard, at, len);
        let passes = free(remap.old, remap.old_len) && (!fixed || free(remap.to, remap.new_len));
        // What the program withdrew may be tracked still, which the kernel does not move as it is.
        if !passes || remap::is_tracked(&mut guard, remap) {
            return remap::remap(&mut guard, remap);
        }
    }
    let new = match remap::pass(remap) {
        // Windows that are long forgotten may have cut the range.
        Err(Errno::FAULT) if existing().is_some() => {
            let mut guard = lock().ok_or(Errno::FAULT)?;
            return remap::remap(&mut guard, remap);
        }
        passed => passed?,
    };
    // What has come to a place that was free. Of a target that the program named another thread may have offered something since.
    let rounded = |len: usize| len.checked_next_multiple_of(PAGE_BYTES).unwrap_or(0);
    let (old_len, new_len) = (rounded(remap.old_len), rounded(remap.new_len));
    let stayed = if new == remap.old {
        old_len.min(new_len)
    } else {
        0
    };
    // Before Linux 6.17 memory may "stay" at lengths that none has.
    let (start, len) = (new.saturating_add(stayed), new_len - stayed);
    if let Some(mut guard) = guard(start, len) {
        match fixed {
            true => discard::forget_kept(&mut guard, start, len),
            false => discard::forget(&mut guard, start, len),
        }
    }
    Ok(new)
}

/// brk(2), as the kernel has it: gives the end of the heap.
pub(crate) fn brk(end: usize) -> Result<usize> {
    let args = |end| [end, 0, 0, 0, 0, 0];
    let old = call(libc::SYS_brk, args(0))?;
    if end == 0 {
        return Ok(old);
    }
    let (low, high) = (end.min(old), end.max(old));
    over(low, high - low, |held| {
        let new = call(libc::SYS_brk, args(end))?;
        if let Some(guard) = held {
            // What was behind the lower end is gone, or has come just now.
            let from = old.min(new).next_multiple_of(PAGE_BYTES);
            let to = old.max(new).next_multiple_of(PAGE_BYTES);
            discard::forget(guard, from, to - from);
        }
        Ok(new)
    })
}

/// mprotect(2).
pub(crate) fn mprotect(start: usize, len: usize, prot: usize) -> Result<usize> {
    let args = [start, len, prot, 0, 0, 0];
    over(start, len, |_| call(libc::SYS_mprotect, args))
}

/// pkey_mprotect(2).
pub(crate) fn pkey_mprotect(start: usize, len: usize, prot: usize, key: usize) -> Result<usize> {
    let args = [start, len, prot, key, 0, 0];
    changing(start, len, libc::SYS_pkey_mprotect, args)
}

/// mseal(2).
pub(crate) fn mseal(start: usize, len: usize, flags: usize) -> Result<usize> {
    changing(start, len, SYS_MSEAL, [start, len, flags, 0, 0, 0])
}

/// mbind(2).
pub(crate) fn mbind(args: [usize; 6]) -> Result<usize> {
    changing(args[0], args[1], libc::SYS_mbind, args)
}

/// set_mempolicy_home_node(2).
pub(crate) fn set_mempolicy_home_node(args: [usize; 6]) -> Result<usize> {
    changing(args[0], args[1], SYS_HOME_NODE, args)
}

/// What prctl(2) tells of a mapping: its name. The name of a mapping of a file is refused.
pub(super) const SET_VMA: usize = 0x5356_4d41;

/// prctl(2) with [`SET_VMA`]: option, attribute, address, length, name.
pub(super) fn set_vma(args: [usize; 6]) -> Result<usize> {
    changing(args[2], args[3], libc::SYS_prctl, args)
}

/// process_madvise(2): pidfd, ranges, how many, advice, flags.
pub(crate) fn process_madvise(args: [usize; 6]) -> Result<usize> {
    let [pidfd, ranges, count, advice, flags, _] = args;
    // It may discard, in any range.
    let is_news = !touches(0, ADDRESS_LIMIT);
    let _noted = is_news.then(|| passing::note(0, ADDRESS_LIMIT));
    // Most of a process's calls go to others, or come before anything is known.
    if !touches(0, ADDRESS_LIMIT) || flags != 0 || count > 1024 || !is_self(pidfd) {
        return call(libc::SYS_process_madvise, args);
    }
    // Without ranges the kernel tells only whether it takes such a descriptor, and such advice through it. Before Linux 6.13 it takes no
    // advice that discards, of a process to itself either.
    if call(libc::SYS_process_madvise, [pidfd, 0, 0, advice, 0, 0]).is_err() {
        return call(libc::SYS_process_madvise, args);
    }
    // The low half of the register is the number.
    #[allow(clippy::cast_possible_truncation)]
    let advice = advice as i32;
    // As the kernel, which looks at all ranges before it gives the first advice.
    let mut sound = Ok(());
    each_range(ranges, count, |start, len| {
        if isize::try_from(len).is_err() {
            return Err(Errno::INVAL);
        }
        let end = start.checked_add(len);
        if end.is_none_or(|end| end > ADDRESS_LIMIT - PAGE_BYTES) {
            sound = Err(Errno::FAULT);
        }
        Ok(())
    })?;
    sound?;
    let mut told = 0;
    let result = each_range(ranges, count, |start, len| {
        let len = len.min(MOST_AT_ONCE - told);
        madvise(start, len, advice)?;
        told += len;
        Ok(())
    });
    match told {
        0 => result.map(|()| 0),
        told => Ok(told),
    }
}

/// What a call with ranges does at most; the rest of them counts as empty (`MAX_RW_COUNT`).
const MOST_AT_ONCE: usize = 0x7fff_f000;

/// Calls `each` with every range of a list of the program's, until one fails.
fn each_range(
    ranges: usize,
    count: usize,
    mut each: impl FnMut(usize, usize) -> Result<()>,
) -> Result<()> {
    const AT_ONCE: usize = 16;
    for first in (0..count).step_by(AT_ONCE) {
        let mut some = [[0usize; 2]; AT_ONCE];
        let n = AT_ONCE.min(count - first);
        let at = ranges.checked_add(first * 16).ok_or(Errno::FAULT)?;
        read_own(at, some.as_flattened_mut(), n * 16)?;
        for &[start, len] in some.iter().take(n) {
            each(start, len)?;
        }
    }
    Ok(())
}

/// Reads words of this process, `bytes` bytes of them, which may not be there.
pub(super) fn read_own(at: usize, to: &mut [usize], bytes: usize) -> Result<()> {
    if !is_readable(at, bytes) {
        return Err(Errno::FAULT);
    }
    for (word, at) in to.iter_mut().zip((at..at + bytes).step_by(8)) {
        // SAFETY: the kernel has just read it for the program, whose call gives it to be read.
        *word = unsafe { std::ptr::with_exposed_provenance::<usize>(at).read_unaligned() };
    }
    Ok(())
}

/// Whether a pidfd is this process's, or one of its threads'.
fn is_self(pidfd: usize) -> bool {
    // PIDFD_SELF_THREAD and PIDFD_SELF_THREAD_GROUP (Linux 6.14), and their first numbers.
    #[allow(clippy::cast_possible_truncation)] // a descriptor is the low half of the register
    let pidfd = pidfd as i32;
    if matches!(pidfd, -10_000 | -10_001 | -20_000) {
        return true;
    }
    let Ok(pidfd) = u32::try_from(pidfd) else {
        return false;
    };
    // In whose table it is: where the first thread has ended, /proc/self has none.
    let thread = sys::process::thread_id();
    match lock() {
        Some(mut guard) => guard.at_desk(|_| sys::own::is_own(thread, pidfd)),
        None => sys::own::is_own(thread, pidfd),
    }
}

/// Makes a call after which a mapping is not what it was: it finds it whole.
fn changing(start: usize, len: usize, name: i64, args: [usize; 6]) -> Result<usize> {
    over(start, len, |held| {
        let Some(guard) = held else {
            return call(name, args);
        };
        whole(guard, start, len).map_err(|_| Errno::NOMEM)?;
        // The policy of a store's mapping is the store's, and not this process's to set.
        let of_store = matches!(name, libc::SYS_mbind | SYS_HOME_NODE);
        let of_store = of_store && thread::may_look();
        if of_store && guard.table().may_be_stored(start, len) && is_any_stored(guard, start, len)?
        {
            return Err(Errno::NOMEM);
        }
        let result = call(name, args);
        discard::unread(guard, start, len);
        result
    })
}

/// Whether a mapping of the range is a store's: what may be pinned was left as it lies.
fn is_any_stored(guard: &mut Guard, start: usize, len: usize) -> Result<bool> {
    let look = Look::open(guard)?;
    let (mut at, end) = (start, start.saturating_add(len));
    while let Some(vma) = look.find(guard, at)?.filter(|vma| vma.start < end) {
        if is_store(&vma) {
            return Ok(true);
        }
        at = vma.end;
    }
    Ok(false)
}

pub(super) const SYS_MSEAL: i64 = 462;
pub(super) const SYS_HOME_NODE: i64 = 450;
