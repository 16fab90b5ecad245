//! Fork: the lock is held across it, so a child starts with whole memory and a free lock.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use rustix::io::Errno;
use sys::thread::SignalMask;

use super::guard;
use crate::api::fail;
use crate::lock::Guard;
use crate::table::ADDRESS_LIMIT;

/// Registers the handlers that libc's fork runs.
pub(super) fn begin() {
    // SAFETY: the handlers keep to what fork handlers may do.
    unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
    // SAFETY: the name is terminated; the result is only called with its own signature.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"_Fork".as_ptr()) };
    LIBC_FORK.store(next, Ordering::Relaxed);
}

static LIBC_FORK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The forking thread's signal mask, kept from `before` to the handler after. It and the next
/// are written under the lock, which is held in between.
static MASK: AtomicU64 = AtomicU64::new(0);
/// Whether `before` took the lock: it leaves processes alone that never offered anything.
static HELD: AtomicBool = AtomicBool::new(false);

extern "C" fn before() {
    if let Some(guard) = guard(0, ADDRESS_LIMIT) {
        HELD.store(true, Ordering::Relaxed);
        MASK.store(guard.suspend().bits(), Ordering::Relaxed);
    }
}

fn suspended() -> Option<SignalMask> {
    let mask = SignalMask::from_bits(MASK.load(Ordering::Relaxed));
    HELD.swap(false, Ordering::Relaxed).then_some(mask)
}

extern "C" fn after() {
    // SAFETY: `before` took the lock and suspended it in this thread.
    drop(suspended().and_then(|mask| unsafe { Guard::resume(mask) }));
}

extern "C" fn in_child() {
    // The lock's page is wiped in a child: it is free already, and no agent runs.
    if let Some(mask) = suspended() {
        sys::thread::restore_signals(mask);
    }
}

/// _Fork(3): forks without the handlers, so it takes the lock here. libc's own fork does not come
/// this way.
#[unsafe(no_mangle)]
extern "C" fn _Fork() -> libc::pid_t {
    let next = LIBC_FORK.load(Ordering::Relaxed);
    if next.is_null() {
        return fail(Errno::NOSYS);
    }
    // SAFETY: the address is that of libc's _Fork, which has this signature.
    let next: extern "C" fn() -> libc::pid_t = unsafe { std::mem::transmute(next) };
    before();
    let child = next();
    if child == 0 {
        in_child();
    } else {
        after();
    }
    child
}
