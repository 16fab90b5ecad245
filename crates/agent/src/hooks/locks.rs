//! Calls that lock memory, as the kernel sees them.

use rustix::io::Result;
use wire::PAGE_BYTES;

use super::{call, guard, guarded};
use crate::report;
use crate::table::ADDRESS_LIMIT;

fn set_locked(start: usize, len: usize, on: bool, name: i64, flags: usize) -> Result<usize> {
    // mlock takes any address and works on the pages around the range.
    let first = start & !(PAGE_BYTES - 1);
    let span = start.saturating_add(len).saturating_sub(first);
    let args = [start, len, flags, 0, 0, 0];
    guarded(first, span, name, args, |guard| {
        guard.table().each_known(first, span, |_, pages, chunk| {
            chunk.set(&pages, |attributes| attributes.locked = on);
        });
    })
}

/// mlock(2).
pub(crate) fn mlock(start: usize, len: usize) -> Result<usize> {
    set_locked(start, len, true, libc::SYS_mlock, 0)
}

/// mlock2(2).
pub(crate) fn mlock2(start: usize, len: usize, flags: usize) -> Result<usize> {
    set_locked(start, len, true, libc::SYS_mlock2, flags)
}

/// munlock(2).
pub(crate) fn munlock(start: usize, len: usize) -> Result<usize> {
    set_locked(start, len, false, libc::SYS_munlock, 0)
}

fn set_all_locked(name: i64, flags: usize, now: Option<bool>, future: bool) -> Result<usize> {
    let mut held = guard(0, ADDRESS_LIMIT);
    let result = call(name, [flags, 0, 0, 0, 0, 0]);
    if result.is_ok() {
        report::set_locks_future(future);
    }
    if let (Some(guard), Some(on), Ok(_)) = (&mut held, now, result) {
        guard
            .table()
            .each_known(0, ADDRESS_LIMIT, |_, pages, chunk| {
                chunk.set(&pages, |attributes| attributes.locked = on);
            });
    }
    result
}

/// mlockall(2).
pub(crate) fn mlockall(flags: usize) -> Result<usize> {
    let has = |flag: i32| flags & flag.cast_unsigned() as usize != 0;
    let now = has(libc::MCL_CURRENT).then_some(true);
    set_all_locked(libc::SYS_mlockall, flags, now, has(libc::MCL_FUTURE))
}

/// munlockall(2).
pub(crate) fn munlockall() -> Result<usize> {
    set_all_locked(libc::SYS_munlockall, 0, Some(false), false)
}
