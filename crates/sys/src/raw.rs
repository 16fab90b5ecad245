//! The bare system call: any number, any arguments, no `errno`.
//!
//! Hooks pass calls on with flags this project never heard of, and run at moments when `errno`,
//! locks and allocation are out of bounds. The typed calls of rustix do not fit there, and libc's
//! `syscall` sets `errno`.

use rustix::io::{Errno, Result};

/// Enters the kernel.
///
/// # Errors
/// The call's own.
///
/// # Safety
/// The caller must keep the contract of the call named by `number`.
#[inline]
pub unsafe fn call(number: i64, args: [usize; 6]) -> Result<usize> {
    let [a, b, c, d, e, f] = args;
    let ret: i64;
    // SAFETY: the x86-64 system call convention: number in rax, arguments in these registers,
    // the result in rax; the kernel overwrites rcx and r11. Memory is the caller's contract.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number => ret,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: the arm64 convention: number in x8, arguments in x0 to x5, the result in x0.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => ret,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    match i32::try_from(ret) {
        Ok(code @ -4095..=-1) => Err(Errno::from_raw_os_error(-code)),
        #[allow(clippy::cast_possible_truncation)] // only 64-bit targets have this convention
        _ => Ok(ret as usize),
    }
}
