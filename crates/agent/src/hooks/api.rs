//! The C API: `include/pageone.h`.

use crate::errno::{c_result, fail};
use crate::hooks::memory;
use crate::lock::SERVED;
use crate::now;
use crate::offer::{self, Then};

/// Offers `[addr, addr + len)` for merging; see `pageone.h`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn pageone_register(addr: *mut libc::c_void, len: usize) -> i32 {
    // Unlike madvise this never reaches KSM: who calls it asks for PageONE.
    c_result(offer::offer(addr.addr(), len, false).map(|_: Then| ()))
}

/// Takes `[addr, addr + len)` back; see `pageone.h`.
#[unsafe(no_mangle)]
extern "C" fn pageone_unregister(addr: *mut libc::c_void, len: usize) -> i32 {
    c_result(offer::withdraw(addr.addr(), len))
}

/// The content of `[addr, addr + len)` no longer matters; see `pageone.h`.
#[unsafe(no_mangle)]
extern "C" fn pageone_recycle(addr: *mut libc::c_void, len: usize) -> i32 {
    c_result(memory::recycle(addr.addr(), len))
}

/// Has `[addr, addr + len)` merged now; see `pageone.h`.
#[unsafe(no_mangle)]
extern "C" fn pageone_merge(addr: *mut libc::c_void, len: usize) -> i64 {
    match now::merge(addr.addr(), len) {
        Ok(pages) => i64::try_from(pages).unwrap_or(i64::MAX),
        Err(errno) => fail(errno).into(),
    }
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
    i32::from(super::takeover::sees_libc())
}
