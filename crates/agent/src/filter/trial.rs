//! Whether filters that were there before the agent let it work. They cannot be read, so a child tries.
//!
//! A container's or a service's filter comes with exec. The kernel shows it to none but root's debuggers. So a child
//! makes each call of the table, with arguments that the kernel refuses before it does anything. The answers tell: a
//! filter answers with an error that the kernel would not give, or the child does not live to the end of the table.
//!
//! ```text
//!   the loader ─▶ constructor: are there filters? (openat, read, close: the loader made them too)
//!                   │ yes                                      │ no
//!                   ▼                                          ▼
//!                 a child tries the table ── all allowed ──▶ the agent as ever
//!                   │ one is not
//!                   ▼
//!                 no agent: no hook makes a call that the program did not ask for
//! ```
//!
//! It comes before everything else in the constructor: each call of the agent's may be the one that kills, and libc
//! takes some answers for impossible ones. Filters that came later, past libc, are tried before the thread starts.
//!
//! The child shares the memory, so that it costs nothing however large the program is, but not the descriptors. The program
//! never sees it: it sends no signal when it ends, and waits that do not ask for such children pass it by. It
//! leaves no core.
//!
//! **The limit**: a filter that kills for clone itself cannot be found out in this way.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use sys::filter::calls::{Arg, CALLS, Call};
use sys::filter::nodes::{NUMBERS, is_for_nodes};
use sys::thread;

/// How many calls of the table were made and allowed.
static PASSED: AtomicUsize = AtomicUsize::new(0);

/// The child's stack: memory for it would take a call.
#[repr(align(16))]
struct Stack(UnsafeCell<[u8; STACK_BYTES]>);
const STACK_BYTES: usize = 32 * 1024;

// SAFETY: one child at a time uses it: in the constructor there is one thread, and later the lock is held.
unsafe impl Sync for Stack {}

static STACK: Stack = Stack(UnsafeCell::new([0; STACK_BYTES]));

/// The number of the first call that the calling thread's filters refuse.
///
/// # Safety
/// To be called in the constructor, or with the lock held: one child at a time.
pub(crate) unsafe fn first_refused() -> Option<i64> {
    PASSED.store(0, Ordering::Relaxed);
    let stack = STACK.0.get().expose_provenance() + STACK_BYTES;
    // SAFETY: the stack is free by the caller's promise, and `child` needs no thread-local storage.
    let made = unsafe { thread::wait_for_child(stack, child) };
    let passed = PASSED.load(Ordering::Relaxed);
    let Ok(child) = made else {
        return Some(libc::SYS_clone);
    };
    let refused = CALLS.get(passed).map(|call| call.number);
    // Only if that may be called.
    if refused.is_none() {
        thread::take_away(child);
    }
    refused
}

extern "C" fn child() -> ! {
    // Signals to the whole process group reach it too, and handlers are the program's.
    let _ = thread::block_signals();
    thread::leave_no_core();
    for call in CALLS {
        if !is_allowed(call) {
            break;
        }
        PASSED.fetch_add(1, Ordering::Relaxed);
    }
    thread::leave_whatever(|| {
        let is_exit = |call: &Call| call.number == libc::SYS_exit;
        let exit = CALLS.iter().position(is_exit).unwrap_or_default();
        PASSED.fetch_min(exit, Ordering::Relaxed);
    })
}

fn is_allowed(call: &Call) -> bool {
    match call.number {
        // This child was made by the one, ends by the other, and should send nothing to others.
        libc::SYS_clone | libc::SYS_exit | libc::SYS_kill => return true,
        _ => {}
    }
    let args = call.args.map(|arg| match arg {
        // No address, no descriptor, no length.
        Arg::Any => usize::MAX,
        Arg::In(values) => values.first().map_or(usize::MAX, |&value| {
            usize::try_from(value).unwrap_or(usize::MAX)
        }),
    });
    // SAFETY: the kernel refuses these arguments, or does something to this child alone.
    let result = unsafe { sys::raw::call(call.number, args) };
    match result {
        Err(_) if call.is_spared() => true,
        _ if !is_refusal(result) => true,
        _ => is_for_nodes(call) && NUMBERS.iter().all(|&number| is_refused(number)),
    }
}

/// Whether the program cannot make a call. Where it can make neither of those for memory's nodes (Docker's own filter), no range of its has
/// nodes of its own, and the agent needs neither. **The limit**: a filter that comes past libc, after ranges were given nodes: these
/// are lost with a merge.
fn is_refused(number: i64) -> bool {
    // SAFETY: the kernel refuses these arguments.
    is_refusal(unsafe { sys::raw::call(number, [usize::MAX; 6]) })
}

/// Whether it is an answer of a filter's, that the kernel would not give to these arguments.
fn is_refusal(result: rustix::io::Result<usize>) -> bool {
    matches!(result, Err(Errno::PERM | Errno::NOSYS | Errno::ACCESS))
}
