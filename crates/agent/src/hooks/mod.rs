//! What stands before libc's calls.
//!
//! ```text
//!   exports   the C functions that replace libc's: errno, pointers
//!      ▼
//!   memory, locks   each call as the kernel sees it: numbers in, `Result<usize>` out
//!      ▼
//!   discard, remap, offer   what a call means over merged memory
//! ```
//!
//! Each hook enters the kernel itself, so it needs no lookup of the function it replaces and can
//! run before libc is ready. Calls that do not touch known chunks go straight through. The others
//! take the lock, so that no merge window works on the range meanwhile, and then keep the table
//! in step with what the kernel did.

use rustix::io::Result;

use crate::lock::{Guard, lock};
use crate::serve;
use crate::table::touches;

#[cfg(target_arch = "x86_64")]
mod by_number;
mod exports;
mod fork;
pub(crate) mod locks;
pub(crate) mod memory;
mod rights;

/// Runs before the program's `main`.
extern "C" fn begin() {
    // SAFETY: the loader runs this while the process has one thread.
    unsafe { serve::configure() };
    // Made before anybody forks, it is there when a fork begins.
    let _ = crate::lock::per_process();
    fork::begin();
    rights::begin();
    // SAFETY: this is the constructor.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        crate::takeover::begin();
    };
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Takes the lock when the range touches known chunks.
fn guard(start: usize, len: usize) -> Option<Guard> {
    touches(start, len).then(lock).flatten()
}

fn call(number: i64, args: [usize; 6]) -> Result<usize> {
    // SAFETY: the guest's own call, as it came.
    unsafe { sys::raw::call(number, args) }
}

/// Makes a call over a range so that no window sees it half; `then` keeps the table in step with a
/// call that succeeded, before the lock is given back.
fn guarded(
    start: usize,
    len: usize,
    name: i64,
    args: [usize; 6],
    then: impl FnOnce(&mut Guard),
) -> Result<usize> {
    let mut held = guard(start, len);
    let result = call(name, args);
    if let (Some(guard), Ok(_)) = (&mut held, result) {
        then(guard);
    }
    result
}
