//! libc's own calls: `free` of a large block, arena trims, realloc's mremap, thread stacks and their cache.
//!
//! libc calls the bodies of its functions directly, past the functions that stand before them. So at the start of the process the
//! bodies that libc itself uses are made to jump to the hooks (see `sys::entry`). The hooks enter the kernel
//! themselves, and need none of the bytes that were overwritten.
//!
//! **When not**: while the process has other threads, which may be executing the bytes. The agent was loaded late, or a constructor before
//! its own made them. Nor where /proc is not mounted or not to be written. Nor where a body begins in a way that is not known; in a libc
//! that is not glibc; in a static program. Then only calls that come by name are seen, and [`SEEN`] says so. Either all bodies are taken
//! over or none: they are looked at before one is written.
//!
//! **The price**: the pages of libc's code that hold the bodies are private to the process: 12 KiB with glibc 2.36.
//!
//! Calls that go past this, beside system calls outside libc: the loader's own copies of mmap, munmap and
//! mprotect, by which it maps and unmaps libraries.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use rustix::io::{Errno, Result};
use sys::entry::{Entry, Springboard};
use sys::mapping::OwnMemory;

use super::entry::Hook;
use super::memory;
use crate::errno::fail;
use crate::mappings::remap::Remap;

/// Whether libc's own calls are seen.
static SEEN: AtomicBool = AtomicBool::new(false);

/// libc's notion of the end of the heap, which its brk sets.
static END: AtomicPtr<*mut c_void> = AtomicPtr::new(std::ptr::null_mut());

/// A body, the system call it makes, and the hook in its place.
struct Body {
    name: &'static CStr,
    number: u32,
    hook: *const c_void,
}

const BODIES: usize = 6;

fn bodies() -> [Body; BODIES] {
    // Not the exported functions: another library's may stand before these.
    let body = |name, number, hook| Body { name, number, hook };
    [
        body(c"munmap", 11, munmap as *const c_void),
        body(c"madvise", 28, madvise as *const c_void),
        body(c"mprotect", 10, mprotect as *const c_void),
        body(c"mmap", 9, mmap as *const c_void),
        body(c"mremap", 25, mremap as *const c_void),
        body(c"brk", 12, brk as *const c_void),
    ]
}

/// Whether libc's own calls are seen.
pub(crate) fn sees_libc() -> bool {
    SEEN.load(Ordering::Relaxed)
}

/// Notes that they were taken over from outside.
pub(crate) fn note_seen() {
    SEEN.store(true, Ordering::Relaxed);
}

/// The bodies, for who takes them over from outside.
pub(crate) const ATTACHED: &[Hook] = &[
    Hook::alone(c"munmap", munmap as *const c_void),
    Hook::alone(c"madvise", madvise as *const c_void),
    Hook::alone(c"mprotect", mprotect as *const c_void),
    Hook::alone(c"mmap", mmap as *const c_void),
    Hook::alone(c"mremap", mremap as *const c_void),
    Hook::alone(c"brk", brk as *const c_void),
    Hook::variable(c"__curbrk", &END),
];

/// Takes the bodies over, if that is safe.
///
/// # Safety
/// To be called from the library's constructor.
pub(crate) unsafe fn begin() {
    let mask = sys::thread::block_signals();
    // SAFETY: signals are blocked; the caller's promise.
    let taken = unsafe { take_over() };
    SEEN.store(taken.is_ok(), Ordering::Relaxed);
    sys::thread::restore_signals(mask);
}

/// # Safety
/// As [`begin`], with all signals blocked.
unsafe fn take_over() -> Result<()> {
    if sys::task::threads()? != 1 {
        return Err(Errno::BUSY);
    }
    let bodies = bodies();
    let mut entries: [Option<(Entry, usize)>; BODIES] = [None; BODIES];
    for (entry, body) in entries.iter_mut().zip(&bodies) {
        let address = in_libc(body.name).ok_or(Errno::NOENT)?;
        // SAFETY: the function is one of libc's, whose code does not end with it.
        let found = unsafe { Entry::of(address.expose_provenance(), body.number) };
        *entry = Some((found.ok_or(Errno::NOEXEC)?, body.hook.expose_provenance()));
    }
    let end = in_libc(c"__curbrk").ok_or(Errno::NOENT)?;
    END.store(end.cast(), Ordering::Relaxed);
    stay();
    let memory = OwnMemory::open()?;
    if !entries
        .iter()
        .flatten()
        .all(|(entry, hook)| entry.reaches(*hook))
    {
        // Linked into a program, this library lies far from libc.
        let mut board = Springboard::new()?;
        for (_, hook) in entries.iter_mut().flatten() {
            *hook = board.to(*hook)?;
        }
        board.finish()?;
    }
    for (entry, hook) in entries.iter().flatten() {
        // SAFETY: no other thread runs and signals are blocked; the hook does what the function does, and
        // this library stays.
        unsafe { entry.jump_to(&memory, *hook) }?;
    }
    Ok(())
}

/// The address of a name in glibc itself, whatever stands before it.
fn in_libc(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the names are terminated; nothing is loaded that is not loaded already.
    let found = unsafe {
        let libc = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if libc.is_null() {
            return None;
        }
        let found = libc::dlsym(libc, name.as_ptr());
        libc::dlclose(libc);
        found
    };
    (!found.is_null()).then_some(found)
}

/// Keeps this library loaded, whatever is closed.
fn stay() {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address lies in this library; the structure is filled when the result is not 0, and its name
    // is terminated then.
    unsafe {
        if libc::dladdr(munmap as *const c_void, info.as_mut_ptr()) != 0 {
            let how = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
            libc::dlopen(info.assume_init().dli_fname, how);
        }
    }
}

/// What a C function gives for what the kernel gave: -1 and `errno` for an error.
fn c_result(result: Result<usize>) -> isize {
    match result {
        Ok(value) => value.cast_signed(),
        Err(errno) => fail(errno) as isize,
    }
}

/// The low half of a register, which is all of it that an int argument fills.
#[allow(clippy::cast_possible_truncation)]
fn int(register: usize) -> c_int {
    (register as u32).cast_signed()
}

extern "C" fn munmap(start: usize, len: usize) -> isize {
    c_result(memory::munmap(start, len))
}

extern "C" fn madvise(start: usize, len: usize, advice: usize) -> isize {
    c_result(memory::madvise(start, len, int(advice)))
}

extern "C" fn mprotect(start: usize, len: usize, prot: usize) -> isize {
    c_result(memory::mprotect(start, len, prot))
}

extern "C" fn mmap(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    c_result(memory::mmap([a, b, c, d, e, f]))
}

extern "C" fn mremap(old: usize, old_len: usize, new_len: usize, flags: usize, to: usize) -> isize {
    let old = (old, old_len);
    c_result(memory::mremap(Remap::by_libc(old, new_len, int(flags), to)))
}

extern "C" fn brk(end: usize) -> c_int {
    let Ok(now) = memory::brk(end) else {
        return fail(Errno::NOMEM);
    };
    let now = std::ptr::with_exposed_provenance_mut::<c_void>(now);
    // SAFETY: the address is that of libc's variable, which its brk sets without a lock as well.
    unsafe { *END.load(Ordering::Relaxed) = now };
    match now.addr() < end {
        true => fail(Errno::NOMEM),
        false => 0,
    }
}
