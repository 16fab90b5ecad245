//! Calls that lock memory, as the kernel sees them. A locked mapping is another one, so they find it whole. Where that does not fit,
//! next to RLIMIT_MEMLOCK say, it stays merged: the call over a store's mapping means the same, and gives frames to what it brings in.
//!
//! **Two steps.** To lock memory is to mark mappings, and then to bring all their pages in. The second may take seconds, or wait for
//! a thread of the program that serves a userfaultfd. That thread may want the agent's lock, so the lock is not held over it:
//!
//! ```text
//!   with the lock      whole, marked with MLOCK_ONFAULT, which brings nothing in, to be read anew
//!   without the lock   the call as it came: the marks become those it asks for, the pages come
//! ```
//!
//! `mlockall` reaches the agent's own memory, too, so no window is under way in its second step: see [`without_windows`].
//! Between the two a window finds mappings that are locked, and keeps them so. A page that it merged there is broken by the
//! second step, as by a write of the guest's.

use rustix::io::Result;
use wire::PAGE_BYTES;

use super::call::{call, guard, over};
use crate::lock::without_windows;
use crate::mappings::discard::unread;
use crate::mappings::whole::whole;
use crate::passing;
use crate::table::{ADDRESS_LIMIT, touches};
use crate::thread::is_barred;
use crate::window::staging::note_all_locked;

/// How often the two steps are taken. The first may fail where the second does not: other threads map memory and set limits.
const TRIES: usize = 2;

/// Makes a call that brings pages in, without the lock; `mark` is the same call, but for that.
fn fill(
    (start, len): (usize, usize),
    mark: impl Fn() -> Result<usize>,
    call: impl Fn() -> Result<usize>,
) -> Result<usize> {
    let _noted = passing::note_if_any(start, len);
    for last in (0..TRIES).rev() {
        let Some(mut held) = guard(start, len) else {
            break;
        };
        let _ = whole(&mut held, start, len);
        // Where no agent may run there are no windows, and a filter may refuse the mark.
        let marked = is_barred() || mark().is_ok();
        unread(&mut held, start, len);
        drop(held);
        let result = call();
        if let Some(mut held) = guard(start, len) {
            unread(&mut held, start, len);
        }
        if marked || result.is_err() || last == 0 {
            return result;
        }
    }
    call()
}

/// The pages around a range: mlock takes any address and works on these.
fn around(start: usize, len: usize) -> (usize, usize) {
    let first = start & !(PAGE_BYTES - 1);
    (first, start.saturating_add(len).saturating_sub(first))
}

fn fill_locked(start: usize, len: usize, name: i64) -> Result<usize> {
    const ONFAULT: usize = libc::MLOCK_ONFAULT as usize;
    let mark = || call(libc::SYS_mlock2, [start, len, ONFAULT, 0, 0, 0]);
    fill(around(start, len), mark, || {
        call(name, [start, len, 0, 0, 0, 0])
    })
}

fn set_locked(start: usize, len: usize, name: i64, flags: usize) -> Result<usize> {
    let (first, span) = around(start, len);
    let args = [start, len, flags, 0, 0, 0];
    over(first, span, |held| {
        let Some(guard) = held else {
            return call(name, args);
        };
        let _ = whole(guard, first, span);
        let result = call(name, args);
        unread(guard, first, span);
        result
    })
}

/// mlock(2).
pub(crate) fn mlock(start: usize, len: usize) -> Result<usize> {
    fill_locked(start, len, libc::SYS_mlock)
}

/// mlock2(2).
pub(crate) fn mlock2(start: usize, len: usize, flags: usize) -> Result<usize> {
    match flags {
        0 => fill_locked(start, len, libc::SYS_mlock2),
        // This brings nothing in.
        _ => set_locked(start, len, libc::SYS_mlock2, flags),
    }
}

/// munlock(2).
pub(crate) fn munlock(start: usize, len: usize) -> Result<usize> {
    set_locked(start, len, libc::SYS_munlock, 0)
}

/// A call of which all memory is told; `future` says whether memory is locked that comes later.
fn tell_of_all(name: i64, flags: usize, future: bool) -> Result<usize> {
    let result = call(name, [flags, 0, 0, 0, 0, 0])?;
    sys::mapping::set_locks_future(future);
    note_all_locked();
    Ok(result)
}

fn set_all_locked(name: i64, flags: usize, current: bool, future: bool) -> Result<usize> {
    over(0, ADDRESS_LIMIT, |held| {
        let mut held = held.as_mut().filter(|_| current);
        if let Some(guard) = &mut held {
            let _ = whole(guard, 0, ADDRESS_LIMIT);
        }
        let result = tell_of_all(name, flags, future);
        if let Some(guard) = held {
            unread(guard, 0, ADDRESS_LIMIT);
        }
        result
    })
}

/// mlockall(2).
pub(crate) fn mlockall(flags: usize) -> Result<usize> {
    let has = |flag: i32| flags & flag.cast_unsigned() as usize != 0;
    let (current, future) = (has(libc::MCL_CURRENT), has(libc::MCL_FUTURE));
    // Where nothing is known there are no windows.
    if !current || has(libc::MCL_ONFAULT) || !touches(0, ADDRESS_LIMIT) {
        return set_all_locked(libc::SYS_mlockall, flags, current, future);
    }
    let told = |flags: usize| tell_of_all(libc::SYS_mlockall, flags, future);
    let mark = || told(flags | libc::MCL_ONFAULT.unsigned_abs() as usize);
    fill((0, ADDRESS_LIMIT), mark, || without_windows(|| told(flags)))
}

/// munlockall(2).
pub(crate) fn munlockall() -> Result<usize> {
    // Most programs that call it at their end have locked nothing.
    let held = guard(0, ADDRESS_LIMIT);
    let current = held.is_some_and(|mut held| held.at_desk(|_| sys::own::has_locked_memory()));
    set_all_locked(libc::SYS_munlockall, 0, current, false)
}
