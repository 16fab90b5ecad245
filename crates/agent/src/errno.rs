//! Results as C has them.

use rustix::io::{Errno, Result};

/// Sets `errno` the way C calls do: 0, or -1 with the reason there.
pub(crate) fn c_result(result: Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(errno) => fail(errno),
    }
}

/// Sets `errno`, gives -1.
pub(crate) fn fail(errno: Errno) -> i32 {
    // SAFETY: libc's errno of the calling thread, which is one of the guest's.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
    -1
}
