//! The functions that stand before libc's calls.
//!
//! ```text
//!   exports   the C functions that replace libc's: errno, pointers
//!      ▼
//!   memory, locks   each call as the kernel sees it: numbers in, `Result<usize>` out
//!      ▼
//!   discard, remap, offer   the meaning of a call over merged memory
//! ```
//!
//! Each hook enters the kernel itself, so it needs no lookup of the function it replaces and can
//! run before libc is ready. Calls that do not touch known chunks go straight through. The others
//! take the lock, so that no merge window works on the range meanwhile, and then keep the table
//! in step with what the kernel did.

mod api;
#[cfg(target_arch = "x86_64")]
pub(crate) mod by_number;
mod call;
mod enter;
#[cfg(target_arch = "x86_64")]
mod entered;
#[cfg(target_arch = "x86_64")]
pub(crate) mod entry;
pub(crate) mod exports;
pub(crate) mod fork;
mod ioctl;
mod locks;
mod memory;
pub(crate) mod rights;
#[cfg(target_arch = "x86_64")]
pub(crate) mod takeover;

use std::ffi::{CStr, c_char};

use crate::config;
use crate::life;
use crate::thread::{Why, bar, is_barred};

/// Whether a library is loaded beside which the agent's thread cannot be. libpsx (of libcap) stops all threads by signals, and would
/// wait for ever. LeakSanitizer's runtime stops them, too, and would miss what only the agent's memory leads to. Valgrind imitates the
/// processor, and does not know the agent's system calls. Each is known by a symbol.
fn bears_no_agent() -> bool {
    // SAFETY: the name is terminated; the result is used with its own signature alone.
    let find = |name: &CStr| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    let names = [
        c"psx_set_sensitivity",
        c"__lsan_do_leak_check",
        c"_vgnU_freeres",
    ];
    let mut names = names.into_iter();
    let found = names.any(|name| !find(name).is_null());
    // A name that is not found is no error of the program's. The agent that is attached has no dlerror, so it is looked up.
    let forget = find(c"dlerror");
    if !forget.is_null() {
        // SAFETY: this is dlerror(3), and no code of the program has the text that an earlier call gave.
        let forget: extern "C" fn() -> *const c_char = unsafe { std::mem::transmute(forget) };
        forget();
    }
    found
}

/// Runs before the program's `main`.
extern "C" fn begin() {
    // SAFETY: this is the constructor.
    unsafe { life::look_at_first_filters() };
    rights::begin();
    if bears_no_agent() {
        bar(Why::SIGNALS);
    }
    if is_barred() {
        return;
    }
    // SAFETY: the loader runs this while the process has one thread.
    unsafe { config::configure() };
    crate::own::find();
    // The processor is asked before the program can forbid that.
    let _ = sys::keys::exist();
    // Made before any thread forks, it is there when a fork begins.
    let _ = crate::lock::per_process();
    fork::begin();
    // SAFETY: this is the constructor.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        takeover::begin();
    };
    // `free` gives memory of malloc's back by a call of libc's own: memory that a window may have.
    if config::config().any.is_some() && !takeover::sees_libc() {
        return bar(Why::UNSEEN);
    }
    life::begin_for_all_memory();
}

#[used]
#[unsafe(link_section = ".init_array")]
pub(crate) static BEGIN: extern "C" fn() = begin;

/// As for the hooks: programs may have but weak references to the C functions, for which the linker takes nothing.
#[used]
static API: extern "C" fn(*mut libc::c_void, usize) -> i32 = api::pageone_register;
