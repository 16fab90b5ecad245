//! What stands before libc's calls.
//!
//! Each hook enters the kernel itself, so it needs no lookup of the function it replaces and can
//! run before libc is ready. Calls that do not touch known chunks go straight through. The others
//! take the lock, so that no merge window works on the range meanwhile, and then keep the table
//! in step with what the kernel did.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use rustix::io::{Errno, Result};
use sys::thread::SignalMask;
use wire::PAGE_BYTES;

use crate::api::{c_result, fail};
use crate::discard;
use crate::lock::{Guard, lock};
use crate::offer::{self, Then};
use crate::remap::{self, Remap};
use crate::report;
use crate::serve;
use crate::table::{ADDRESS_LIMIT, touches};

/// Runs before the program's `main`.
extern "C" fn begin() {
    // SAFETY: the loader runs this while the process has one thread.
    unsafe { serve::configure() };
    // SAFETY: the handlers keep to what fork handlers may do.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    // SAFETY: the name is terminated; the result is only called with its own signature.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"_Fork".as_ptr()) };
    LIBC_FORK.store(next, Ordering::Relaxed);
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

static LIBC_FORK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The forking thread's signal mask, kept from `before_fork` to the handler after. It and the next
/// are written under the lock, which is held in between.
static MASK: AtomicU64 = AtomicU64::new(0);
/// Whether `before_fork` took the lock: it leaves processes alone that never offered anything.
static HELD: AtomicBool = AtomicBool::new(false);

extern "C" fn before_fork() {
    if let Some(guard) = guard(0, ADDRESS_LIMIT) {
        HELD.store(true, Ordering::Relaxed);
        MASK.store(guard.suspend().bits(), Ordering::Relaxed);
    }
}

fn suspended() -> Option<SignalMask> {
    let mask = SignalMask::from_bits(MASK.load(Ordering::Relaxed));
    HELD.swap(false, Ordering::Relaxed).then_some(mask)
}

extern "C" fn after_fork() {
    // SAFETY: `before_fork` took the lock and suspended it in this thread.
    drop(suspended().and_then(|mask| unsafe { Guard::resume(mask) }));
}

extern "C" fn in_child() {
    // The lock's page is wiped in a child: it is free already, and no agent runs.
    if let Some(mask) = suspended() {
        sys::thread::restore_signals(mask);
    }
}

/// Takes the lock when the range touches known chunks.
fn guard(start: usize, len: usize) -> Option<Guard> {
    touches(start, len).then(lock).flatten()
}

fn call(number: i64, args: [usize; 6]) -> Result<usize> {
    // SAFETY: the guest's own call, as it came.
    unsafe { sys::raw::call(number, args) }
}

fn c_pointer(result: Result<usize>) -> *mut c_void {
    match result {
        Ok(address) => std::ptr::with_exposed_provenance_mut(address),
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

fn number(value: c_int) -> usize {
    value.cast_unsigned() as usize
}

fn advise(start: usize, len: usize, advice: c_int) -> Result<()> {
    match advice {
        libc::MADV_MERGEABLE => match offer::offer(start, len, true) {
            Ok(Then::Done) => Ok(()),
            // Not ours to judge: the kernel says what it says without us.
            Ok(Then::PassOn) | Err(_) => pass_advice(start, len, advice),
        },
        libc::MADV_UNMERGEABLE => {
            let passed = pass_advice(start, len, advice);
            if touches(start, len) {
                offer::withdraw(start, len)
            } else {
                passed
            }
        }
        _ => match guard(start, len) {
            Some(mut guard) => discard::madvise(&mut guard, start, len, advice),
            None => pass_advice(start, len, advice),
        },
    }
}

fn pass_advice(start: usize, len: usize, advice: c_int) -> Result<()> {
    call(libc::SYS_madvise, [start, len, number(advice), 0, 0, 0]).map(drop)
}

/// madvise(2).
#[unsafe(no_mangle)]
extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    c_result(advise(addr.addr(), len, advice))
}

/// posix_madvise(3): gives the error number, and its DONTNEED discards nothing.
#[unsafe(no_mangle)]
extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    let result = pass_advice(addr.addr(), len, advice);
    result.map_or_else(Errno::raw_os_error, |()| 0)
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

/// Makes a call that puts something else, or nothing, where the range was.
fn replacing(start: usize, len: usize, name: i64, args: [usize; 6]) -> Result<usize> {
    guarded(start, len, name, args, |guard| {
        discard::forget(guard, start, len.next_multiple_of(PAGE_BYTES));
    })
}

/// munmap(2).
#[unsafe(no_mangle)]
extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    let start = addr.addr();
    let args = [start, len, 0, 0, 0, 0];
    c_result(replacing(start, len, libc::SYS_munmap, args).map(drop))
}

/// mmap(2).
#[unsafe(no_mangle)]
extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let start = addr.addr();
    // An offset is a number of bytes; the kernel takes its bits as they are.
    #[allow(clippy::cast_possible_truncation)]
    let offset = offset.cast_unsigned() as usize;
    // A descriptor of -1 must reach the kernel as -1.
    #[allow(clippy::cast_possible_truncation)]
    let fd = i64::from(fd).cast_unsigned() as usize;
    let args = [start, len, number(prot), number(flags), fd, offset];
    if flags & libc::MAP_FIXED == 0 {
        return c_pointer(call(libc::SYS_mmap, args));
    }
    c_pointer(replacing(start, len, libc::SYS_mmap, args))
}

/// mmap(2), under the name that 32-bit offsets once made necessary.
#[unsafe(no_mangle)]
extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    mmap(addr, len, prot, flags, fd, offset)
}

/// mremap(2). C declares the target as a variable argument; it arrives in the fifth register.
#[unsafe(no_mangle)]
extern "C" fn mremap(
    addr: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let (old, to) = (addr.addr(), to.addr());
    let fixed = flags & libc::MREMAP_FIXED != 0;
    let known = touches(old, old_len) || (fixed && touches(to, new_len));
    c_pointer(match known.then(lock).flatten() {
        Some(mut guard) => {
            let result = remap::remap(
                &mut guard,
                Remap {
                    old,
                    old_len,
                    new_len,
                    flags,
                    to,
                },
            );
            drop(guard);
            result
        }
        None => call(
            libc::SYS_mremap,
            [old, old_len, new_len, number(flags), to, 0],
        ),
    })
}

/// Makes a call that changes how a range may be used, not what it holds.
fn changing(start: usize, len: usize, name: i64, args: [usize; 6]) -> c_int {
    c_result(guarded(start, len, name, args, |_| ()).map(drop))
}

/// mprotect(2).
#[unsafe(no_mangle)]
extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    let args = [addr.addr(), len, number(prot), 0, 0, 0];
    changing(addr.addr(), len, libc::SYS_mprotect, args)
}

/// pkey_mprotect(2).
#[unsafe(no_mangle)]
extern "C" fn pkey_mprotect(addr: *mut c_void, len: usize, prot: c_int, key: c_int) -> c_int {
    let args = [addr.addr(), len, number(prot), number(key), 0, 0];
    changing(addr.addr(), len, libc::SYS_pkey_mprotect, args)
}

fn set_locked(start: usize, len: usize, on: bool, name: i64, flags: usize) -> c_int {
    // mlock takes any address and works on the pages around the range.
    let first = start & !(PAGE_BYTES - 1);
    let span = start.saturating_add(len).saturating_sub(first);
    let args = [start, len, flags, 0, 0, 0];
    let result = guarded(first, span, name, args, |guard| {
        guard.table().each_known(first, span, |_, pages, chunk| {
            chunk.set(&pages, |attributes| attributes.locked = on);
        });
    });
    c_result(result.map(drop))
}

/// mlock(2).
#[unsafe(no_mangle)]
extern "C" fn mlock(addr: *const c_void, len: usize) -> c_int {
    set_locked(addr.addr(), len, true, libc::SYS_mlock, 0)
}

/// mlock2(2).
#[unsafe(no_mangle)]
extern "C" fn mlock2(addr: *const c_void, len: usize, flags: u32) -> c_int {
    set_locked(addr.addr(), len, true, libc::SYS_mlock2, flags as usize)
}

/// munlock(2).
#[unsafe(no_mangle)]
extern "C" fn munlock(addr: *const c_void, len: usize) -> c_int {
    set_locked(addr.addr(), len, false, libc::SYS_munlock, 0)
}

fn set_all_locked(name: i64, flags: c_int, now: Option<bool>, future: bool) -> c_int {
    let mut held = guard(0, ADDRESS_LIMIT);
    let result = call(name, [number(flags), 0, 0, 0, 0, 0]);
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
    drop(held);
    c_result(result.map(drop))
}

/// mlockall(2).
#[unsafe(no_mangle)]
extern "C" fn mlockall(flags: c_int) -> c_int {
    let now = (flags & libc::MCL_CURRENT != 0).then_some(true);
    set_all_locked(
        libc::SYS_mlockall,
        flags,
        now,
        flags & libc::MCL_FUTURE != 0,
    )
}

/// munlockall(2).
#[unsafe(no_mangle)]
extern "C" fn munlockall() -> c_int {
    set_all_locked(libc::SYS_munlockall, 0, Some(false), false)
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
    before_fork();
    let child = next();
    if child == 0 {
        in_child();
    } else {
        after_fork();
    }
    child
}
