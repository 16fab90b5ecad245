//! The C functions that stand before libc's: they set `errno` and turn pointers into numbers.

use std::ffi::{c_int, c_void};
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::AtomicPtr;

use rustix::io::{Errno, Result};

#[cfg(target_arch = "x86_64")]
use super::entry::Hook;
use super::{ioctl as requests, locks, memory};
use crate::errno::{c_result, fail};
use crate::mappings::remap::Remap;

/// Of an archive that a program links, the linker takes only the parts that are used: this part uses the constructor.
#[used]
static WITH: &extern "C" fn() = &super::BEGIN;

/// Those that stand before a libc which knows nothing of them; what libc itself calls as well is in
/// [`takeover`](super::takeover).
#[cfg(target_arch = "x86_64")]
pub(crate) const ATTACHED: &[Hook] = &[
    Hook::alone(c"posix_madvise", posix_madvise as *const c_void),
    Hook::alone(c"pkey_mprotect", pkey_mprotect as *const c_void),
    Hook::alone(c"mlock", mlock as *const c_void),
    Hook::alone(c"mlock2", mlock2 as *const c_void),
    Hook::alone(c"munlock", munlock as *const c_void),
    Hook::alone(c"mlockall", mlockall as *const c_void),
    Hook::alone(c"munlockall", munlockall as *const c_void),
    Hook::alone(c"mseal", mseal as *const c_void),
    Hook::alone(c"process_madvise", process_madvise as *const c_void),
    Hook::before(c"ioctl", ioctl_or_own as *const c_void, &OWN_IOCTL),
];

fn c_int_result(result: Result<usize>) -> c_int {
    c_result(result.map(drop))
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

/// madvise(2).
#[unsafe(no_mangle)]
extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    c_int_result(memory::madvise(addr.addr(), len, advice))
}

/// posix_madvise(3): gives the error number.
#[unsafe(no_mangle)]
extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    let result = memory::posix_madvise(addr.addr(), len, advice);
    result.map_or_else(Errno::raw_os_error, |()| 0)
}

/// munmap(2).
#[unsafe(no_mangle)]
extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    c_int_result(memory::munmap(addr.addr(), len))
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
    // An offset is a number of bytes; the kernel takes its bits as they are.
    #[allow(clippy::cast_possible_truncation)]
    let offset = offset.cast_unsigned() as usize;
    // A descriptor of -1 must reach the kernel as -1.
    #[allow(clippy::cast_possible_truncation)]
    let fd = i64::from(fd).cast_unsigned() as usize;
    let args = [addr.addr(), len, number(prot), number(flags), fd, offset];
    c_pointer(memory::mmap(args))
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
    let old = (addr.addr(), old_len);
    c_pointer(memory::mremap(Remap::by_libc(
        old,
        new_len,
        flags,
        to.addr(),
    )))
}

/// mprotect(2).
#[unsafe(no_mangle)]
extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    c_int_result(memory::mprotect(addr.addr(), len, number(prot)))
}

/// pkey_mprotect(2).
#[unsafe(no_mangle)]
extern "C" fn pkey_mprotect(addr: *mut c_void, len: usize, prot: c_int, key: c_int) -> c_int {
    let (prot, key) = (number(prot), number(key));
    c_int_result(memory::pkey_mprotect(addr.addr(), len, prot, key))
}

/// mlock(2).
#[unsafe(no_mangle)]
extern "C" fn mlock(addr: *const c_void, len: usize) -> c_int {
    c_int_result(locks::mlock(addr.addr(), len))
}

/// mlock2(2).
#[unsafe(no_mangle)]
extern "C" fn mlock2(addr: *const c_void, len: usize, flags: u32) -> c_int {
    c_int_result(locks::mlock2(addr.addr(), len, flags as usize))
}

/// munlock(2).
#[unsafe(no_mangle)]
extern "C" fn munlock(addr: *const c_void, len: usize) -> c_int {
    c_int_result(locks::munlock(addr.addr(), len))
}

/// mlockall(2).
#[unsafe(no_mangle)]
extern "C" fn mlockall(flags: c_int) -> c_int {
    c_int_result(locks::mlockall(number(flags)))
}

/// munlockall(2).
#[unsafe(no_mangle)]
extern "C" fn munlockall() -> c_int {
    c_int_result(locks::munlockall())
}

/// mseal(2), which libc has since 2.40.
#[unsafe(no_mangle)]
extern "C" fn mseal(addr: *mut c_void, len: usize, flags: std::ffi::c_ulong) -> c_int {
    #[allow(clippy::cast_possible_truncation)] // as wide as a register
    let flags = flags as usize;
    c_int_result(memory::mseal(addr.addr(), len, flags))
}

/// process_madvise(2).
#[unsafe(no_mangle)]
extern "C" fn process_madvise(
    pidfd: c_int,
    ranges: *const libc::iovec,
    count: usize,
    advice: c_int,
    flags: u32,
) -> isize {
    let pidfd = number(pidfd);
    let args = [
        pidfd,
        ranges.addr(),
        count,
        number(advice),
        flags as usize,
        0,
    ];
    match memory::process_madvise(args) {
        Ok(told) => told.cast_signed(),
        Err(errno) => fail(errno) as isize,
    }
}

/// mbind(2), as libnuma has it.
#[unsafe(no_mangle)]
extern "C" fn mbind(
    addr: *mut c_void,
    len: usize,
    mode: c_int,
    nodes: *const c_void,
    most: usize,
    flags: u32,
) -> std::ffi::c_long {
    let args = [
        addr.addr(),
        len,
        number(mode),
        nodes.addr(),
        most,
        flags as usize,
    ];
    c_int_result(memory::mbind(args)).into()
}

/// libc's own ioctl(2), where a hook stands before it.
#[cfg(target_arch = "x86_64")]
static OWN_IOCTL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// ioctl(2): of all requests but three, the thread is in libc's own function, as before. It may be there for long (`KVM_RUN`), and
/// an agent in which a thread is cannot be taken out.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn ioctl_or_own() -> c_int {
    core::arch::naked_asm!(
        "endbr64",
        "cmp ${register}, %esi",
        "je {ioctl}",
        "cmp ${unregister}, %esi",
        "je {ioctl}",
        "cmp ${move_out}, %esi",
        "je {ioctl}",
        "mov {own}(%rip), %rax",
        "test %rax, %rax",
        "jz {ioctl}",
        "jmp *%rax",
        register = const requests::REGISTER,
        unregister = const requests::UNREGISTER,
        move_out = const requests::MOVE,
        ioctl = sym ioctl,
        own = sym OWN_IOCTL,
        options(att_syntax)
    )
}

/// ioctl(2). C declares the argument as a variable one; it arrives in the third register.
#[unsafe(no_mangle)]
extern "C" fn ioctl(fd: c_int, request: std::ffi::c_ulong, argument: *mut c_void) -> c_int {
    #[allow(clippy::cast_possible_truncation)] // as wide as a register
    let request = request as usize;
    let args = [number(fd), request, argument.addr(), 0, 0, 0];
    match requests::ioctl(args) {
        #[allow(clippy::cast_possible_truncation)] // C has an int there
        Ok(result) => result as c_int,
        Err(errno) => fail(errno),
    }
}
