//! Calls that lock memory, as the kernel sees them. A locked mapping is another one, so they find it whole.

use rustix::io::{Errno, Result};
use wire::PAGE_BYTES;

use super::call::{call, guard};
use crate::mappings::discard::unread;
use crate::mappings::whole::whole;
use crate::table::ADDRESS_LIMIT;

fn set_locked(start: usize, len: usize, name: i64, flags: usize) -> Result<usize> {
    // mlock takes any address and works on the pages around the range.
    let first = start & !(PAGE_BYTES - 1);
    let span = start.saturating_add(len).saturating_sub(first);
    let args = [start, len, flags, 0, 0, 0];
    let Some(mut guard) = guard(first, span) else {
        return call(name, args);
    };
    whole(&mut guard, first, span).map_err(|_| Errno::NOMEM)?;
    let result = call(name, args);
    unread(&mut guard, first, span);
    result
}

/// mlock(2).
pub(crate) fn mlock(start: usize, len: usize) -> Result<usize> {
    set_locked(start, len, libc::SYS_mlock, 0)
}

/// mlock2(2).
pub(crate) fn mlock2(start: usize, len: usize, flags: usize) -> Result<usize> {
    set_locked(start, len, libc::SYS_mlock2, flags)
}

/// munlock(2).
pub(crate) fn munlock(start: usize, len: usize) -> Result<usize> {
    set_locked(start, len, libc::SYS_munlock, 0)
}

fn set_all_locked(name: i64, flags: usize, current: bool, future: bool) -> Result<usize> {
    let mut held = guard(0, ADDRESS_LIMIT);
    if let Some(guard) = held.as_mut().filter(|_| current) {
        whole(guard, 0, ADDRESS_LIMIT).map_err(|_| Errno::NOMEM)?;
    }
    let result = call(name, [flags, 0, 0, 0, 0, 0]);
    if result.is_ok() {
        sys::mapping::set_locks_future(future);
    }
    if let Some(guard) = held.as_mut().filter(|_| current) {
        unread(guard, 0, ADDRESS_LIMIT);
    }
    result
}

/// mlockall(2).
pub(crate) fn mlockall(flags: usize) -> Result<usize> {
    let has = |flag: i32| flags & flag.cast_unsigned() as usize != 0;
    let (current, future) = (has(libc::MCL_CURRENT), has(libc::MCL_FUTURE));
    set_all_locked(libc::SYS_mlockall, flags, current, future)
}

/// munlockall(2).
pub(crate) fn munlockall() -> Result<usize> {
    // Most programs that call it at their end have locked nothing.
    let held = guard(0, ADDRESS_LIMIT);
    let current = held.is_some_and(|mut held| held.at_desk(|_| sys::own::has_locked_memory()));
    set_all_locked(libc::SYS_munlockall, 0, current, false)
}
