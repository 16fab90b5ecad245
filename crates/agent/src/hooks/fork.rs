//! Fork, in all its forms: a child gets whole memory, and no order of handlers and locks hangs.
//!
//! A child must not miss the pages that a window has taken out: they are absent in the parent at
//! that moment, and the staging area is not inherited. So no window is under way while the kernel
//! forks ([`begin_fork`]). Three ways lead here, the calls that libc makes for itself included:
//!
//! | call | how |
//! |---|---|
//! | fork, forkpty, daemon | libc runs our handlers |
//! | _Fork, clone | the functions below stand before libc's |
//! | syscall(2) with clone, clone3 or fork | likewise: see [`by_number`](super::by_number) |
//! | vfork, posix_spawn, system, popen | nothing to do: the child uses the parent's memory, and sleeps on absent pages as a thread does |
//!
//! **The tempting alternative**, to hold the agent's lock from the first handler to the last, hangs: libc
//! takes malloc's locks after all handlers, and a library's handler may take its own after ours. A thread that
//! has one of these may be in a hook and want the agent's lock.
//!
//! **A hook of another thread may be half-way** when the kernel forks. It works on memory that its own thread is
//! unmapping, discarding or moving. The kernel orders neither that call nor this fork before the other, so
//! the child must expect the one as well as the other, page by page for discards. It does not have the thread that
//! made the call, so none of its code knows how the call ended. Two things would be seen all the same, and are not.
//! Every page that is not part of the call is as it was, because each step of a hook is a system call over the
//! call's own range. And the table, which may be half changed, is mistrusted (see [`lock`](crate::lock)).
//!
//! **The limit**: a child made by a system call instruction outside libc, such as a Go program's own.
//! It may fall into a window, and then reads zeros where the pages were. `UFFD_FEATURE_EVENT_FORK` would
//! tell of it, but takes CAP_SYS_PTRACE, and every fork of every guest would wait for its agent.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Errno;

#[cfg(target_arch = "x86_64")]
use super::entry::Hook;
use crate::any;
use crate::errno::fail;
use crate::life;
use crate::lock::{begin_fork, beyond, end_fork};
use crate::thread::note_clone;

extern "C" fn before() {
    begin_fork();
}

extern "C" fn after() {
    end_fork();
}

extern "C" fn child() {
    life::begin_in_child();
}

/// Registers the handlers that libc's fork runs.
pub(super) fn begin() {
    // SAFETY: the handlers keep to what fork handlers may do.
    unsafe { libc::pthread_atfork(Some(before), Some(after), Some(child)) };
    LIBC_FORK.find();
    LIBC_CLONE.find();
}

/// A function of libc that a hook stands before.
struct Next {
    name: &'static std::ffi::CStr,
    address: AtomicPtr<c_void>,
}

static LIBC_FORK: Next = Next::new(c"_Fork");
static LIBC_CLONE: Next = Next::new(c"clone");

/// libc's fork calls the body of `_Fork`, so nothing else is needed where these stand at the entries.
#[cfg(target_arch = "x86_64")]
pub(crate) const ATTACHED: &[Hook] = &[
    Hook::before(c"_Fork", _Fork as *const c_void, &LIBC_FORK.address),
    Hook::before(c"clone", clone as *const c_void, &LIBC_CLONE.address),
];

impl Next {
    const fn new(name: &'static std::ffi::CStr) -> Self {
        let address = AtomicPtr::new(std::ptr::null_mut());
        Self { name, address }
    }

    /// Its address; `None` in a libc that lacks it.
    fn find(&self) -> Option<*mut c_void> {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return Some(known);
        }
        // SAFETY: the name is terminated.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        (!found.is_null()).then_some(found)
    }
}

/// Makes a child by `fork`, which gives 0 in the child and what libc gives in the parent.
fn forking<T: PartialEq + From<bool>>(fork: impl FnOnce() -> T) -> T {
    begin_fork();
    let child = beyond(fork, |child| *child == T::from(false));
    // In the child the count is zero already.
    match child == T::from(false) {
        true => life::begin_in_child(),
        false => end_fork(),
    }
    child
}

/// _Fork(3): forks without the handlers. libc's own fork does not come this way.
#[unsafe(no_mangle)]
extern "C" fn _Fork() -> libc::pid_t {
    let Some(next) = LIBC_FORK.find() else {
        return fail(Errno::NOSYS);
    };
    // SAFETY: the address is that of libc's _Fork, which has this signature.
    let next: extern "C" fn() -> libc::pid_t = unsafe { std::mem::transmute(next) };
    forking(|| next())
}

type Clone = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

/// clone(2), as libc has it: the child runs `entry` and never returns here. C declares the last three
/// arguments as variable ones; they arrive where declared ones do.
#[unsafe(no_mangle)]
unsafe extern "C" fn clone(
    entry: *mut c_void,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    let Some(next) = LIBC_CLONE.find() else {
        return fail(Errno::NOSYS);
    };
    // SAFETY: the address is that of libc's clone, which has this signature.
    let next: Clone = unsafe { std::mem::transmute(next) };
    // SAFETY: the guest's own call, as it came.
    let make = || unsafe { next(entry, stack, flags, argument, parent_tid, tls, child_tid) };
    match flags & libc::CLONE_VM {
        0 => forking(make),
        // The child begins at `entry`, and never comes back here.
        _ => {
            note_clone(flags.cast_unsigned());
            if flags & libc::CLONE_CHILD_CLEARTID != 0 {
                any::keep_word_of_clone(child_tid.addr());
            }
            beyond(make, |_| false)
        }
    }
}

/// A fork by number: gives 0 in the child.
pub(super) fn by_number(number: c_long, args: [usize; 6]) -> rustix::io::Result<usize> {
    begin_fork();
    // SAFETY: the guest's own call, as it came; the child goes on on a copy of this very stack.
    let child = unsafe { sys::raw::call(number, args) };
    match child == Ok(0) {
        true => life::begin_in_child(),
        false => end_fork(),
    }
    child
}
