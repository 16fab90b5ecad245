//! The C API: `include/pageone.h`.

use rustix::io::{Errno, Result};

use crate::lock::SERVED;
use crate::offer::{self, Then};

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

/// Offers `[addr, addr + len)` for merging; see `pageone.h`.
#[unsafe(no_mangle)]
extern "C" fn pageone_register(addr: *mut libc::c_void, len: usize) -> i32 {
    // Unlike madvise this never reaches KSM: who calls it asks for PageONE.
    c_result(offer::offer(addr.addr(), len, false).map(|_: Then| ()))
}

/// Takes `[addr, addr + len)` back; see `pageone.h`.
#[unsafe(no_mangle)]
extern "C" fn pageone_unregister(addr: *mut libc::c_void, len: usize) -> i32 {
    c_result(offer::withdraw(addr.addr(), len))
}

/// Whether an engine serves this process now: 1 or 0; see `pageone.h`.
#[unsafe(no_mangle)]
extern "C" fn pageone_served() -> i32 {
    let served = crate::lock::per_process().is_some_and(|process| {
        process.serving.load(std::sync::atomic::Ordering::Relaxed) == SERVED
    });
    i32::from(served)
}

/// Whether libc's own calls are seen: 1 or 0; see `pageone.h`.
#[unsafe(no_mangle)]
extern "C" fn pageone_sees_libc() -> i32 {
    i32::from(crate::takeover::sees_libc())
}
