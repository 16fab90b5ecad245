//! A thread that its process does not know of.
//!
//! The agent must be able to start inside any call of its host: under malloc's lock, between fork
//! and exec, in a process that counts its threads. pthread_create allocates and takes locks, and
//! makes the process wait for a thread that never ends when its last own thread leaves. So the
//! agent's thread comes from clone(2) itself:
//!
//! - it shares memory and signal dispositions, and has **its own descriptor table**: a host that
//!   closes all descriptors closes none of the agent's, never sees them, and hands none of them
//!   to a child;
//! - it has a thread-control block of its own, all zeros: code on it must not use thread-local
//!   storage beyond what a zeroed block serves (libc's `errno` is fine, Rust's `thread_local!`
//!   and panics are not);
//! - all its signals are blocked.
//!
//! Source: clone(2), and the x86-64 ABI supplement on thread-local storage.

use rustix::io::Result;

use crate::mapping;

const STACK_BYTES: usize = 256 * 1024;
/// Room for the static thread-local storage of the host's libraries, below the control block.
const TLS_BYTES: usize = 64 * 1024;
const CONTROL_BYTES: usize = 4096;

/// Starts `entry` on a thread of its own and gives its thread id. `entry` must not return.
///
/// # Errors
/// `NOMEM` or `AGAIN` when memory or the number of threads is exhausted.
///
/// # Safety
/// `entry` must keep to what the module's head says of code on such a thread.
#[cfg(target_arch = "x86_64")]
pub unsafe fn spawn(entry: extern "C" fn() -> !) -> Result<u32> {
    let base = mapping::area(STACK_BYTES + TLS_BYTES + CONTROL_BYTES, 4096)?;
    let control = base + STACK_BYTES + TLS_BYTES;
    let block = std::ptr::with_exposed_provenance_mut::<usize>(control);
    // SAFETY: the block lies in the area just made. The ABI wants its first word to point to
    // itself; libc keeps a second such pointer two words on.
    unsafe {
        *block = control;
        *block.add(2) = control;
    }
    // The lowest page of the stack catches an overflow.
    let args = [base, 4096, 0, 0, 0, 0];
    // SAFETY: the page lies in the area just made and nothing uses it.
    let _ = unsafe { crate::raw::call(libc::SYS_mprotect, args) };
    let old = block_signals();
    // SAFETY: the stack and the control block are this thread's alone and are never freed.
    let started = unsafe { clone(base + STACK_BYTES, control, entry) };
    restore_signals(old);
    if started.is_err() {
        // SAFETY: no thread runs on the area.
        let _ = unsafe { mapping::unmap(base, STACK_BYTES + TLS_BYTES + CONTROL_BYTES) };
    }
    started
}

/// # Safety
/// `stack` must be the upper end of a free stack, `control` a thread-control block.
#[cfg(target_arch = "x86_64")]
unsafe fn clone(stack: usize, control: usize, entry: extern "C" fn() -> !) -> Result<u32> {
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_SETTLS;
    let ret: i64;
    // SAFETY: the child runs on a stack of its own and never comes back here: it clears the
    // frame pointer, ends the chain of frames with a zero, and calls `entry`, which does not
    // return. The parent sees an ordinary call.
    unsafe {
        core::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "push 0",
            "push 0",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone => ret,
            in("rdi") i64::from(flags),
            in("rsi") stack & !15,
            in("rdx") 0usize,
            in("r10") 0usize,
            in("r8") control,
            in("r12") entry,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    match u32::try_from(ret) {
        Ok(tid) => Ok(tid),
        Err(_) => Err(rustix::io::Errno::from_raw_os_error(
            i32::try_from(-ret).unwrap_or(0),
        )),
    }
}

/// The calling thread's set of blocked signals.
#[derive(Clone, Copy, Debug, Default)]
pub struct SignalMask(u64);

impl SignalMask {
    /// A mask from its bits, signal 1 the lowest.
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The mask's bits.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }
}

/// Blocks every signal for the calling thread; [`restore_signals`] takes the result.
#[must_use]
pub fn block_signals() -> SignalMask {
    let (all, mut old) = (u64::MAX, 0u64);
    let (set, back) = (&raw const all, &raw mut old);
    let how = libc::SIG_SETMASK as usize;
    let args = [
        how,
        set.expose_provenance(),
        back.expose_provenance(),
        8,
        0,
        0,
    ];
    // SAFETY: both sets are the 8 bytes the kernel reads and writes.
    let _ = unsafe { crate::raw::call(libc::SYS_rt_sigprocmask, args) };
    SignalMask(old)
}

/// Puts back the set of blocked signals.
pub fn restore_signals(mask: SignalMask) {
    let set = &raw const mask.0;
    let args = [
        libc::SIG_SETMASK as usize,
        set.expose_provenance(),
        0,
        8,
        0,
        0,
    ];
    // SAFETY: the set is the 8 bytes the kernel reads.
    let _ = unsafe { crate::raw::call(libc::SYS_rt_sigprocmask, args) };
}

/// Closes every descriptor of the calling thread's own table but the listed ones, which ascend.
///
/// # Safety
/// The thread's table must be its own (see [`spawn`]), and nothing may use the others.
pub unsafe fn close_all_but(keep: &[i32]) {
    let close = |from: u32, to: u32| {
        if from <= to {
            // SAFETY: the caller's promise.
            let _ = unsafe {
                crate::raw::call(
                    libc::SYS_close_range,
                    [from as usize, to as usize, 0, 0, 0, 0],
                )
            };
        }
    };
    let mut from = 0u32;
    for &kept in keep {
        let kept = kept.cast_unsigned();
        if kept > from {
            close(from, kept - 1);
        }
        from = kept + 1;
    }
    close(from, u32::MAX);
}

/// Ends the calling thread and nothing else, past libc: [`spawn`]'s threads end so.
pub fn leave(code: i32) -> ! {
    loop {
        let args = [code.cast_unsigned() as usize, 0, 0, 0, 0, 0];
        // SAFETY: a thread of `spawn` owns nothing that its end could take from others.
        let _ = unsafe { crate::raw::call(libc::SYS_exit, args) };
    }
}

/// Names the calling thread; at most 15 bytes.
pub fn set_name(name: &std::ffi::CStr) {
    let args = [
        libc::PR_SET_NAME as usize,
        name.as_ptr().expose_provenance(),
        0,
        0,
        0,
        0,
    ];
    // SAFETY: PR_SET_NAME reads a terminated string.
    let _ = unsafe { crate::raw::call(libc::SYS_prctl, args) };
}

/// Lets process `pid` read this process's memory where the Yama security module restricts that.
pub fn allow_tracer(pid: u32) {
    let args = [libc::PR_SET_PTRACER as usize, pid as usize, 0, 0, 0, 0];
    // SAFETY: PR_SET_PTRACER takes a number. Kernels without Yama refuse it; nothing depends on it there.
    let _ = unsafe { crate::raw::call(libc::SYS_prctl, args) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    static SEEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn entry() -> ! {
        set_name(c"sys-test");
        // SAFETY: this thread's table is its own.
        unsafe { close_all_but(&[1]) };
        // `errno` must be this thread's own: make a libc call fail.
        // SAFETY: closing no descriptor.
        unsafe { libc::close(-1) };
        // Relaxed is enough: the word itself is the message.
        SEEN.store(1, Ordering::Relaxed);
        rustix::thread::futex::wake(&SEEN, rustix::thread::futex::Flags::empty(), 1).ok();
        loop {
            // SAFETY: ends this thread alone.
            let _ = unsafe { crate::raw::call(libc::SYS_exit, [0; 6]) };
        }
    }

    #[test]
    fn a_thread_has_its_own_descriptors_and_errno() {
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("file")).unwrap();
        // SAFETY: libc's errno of this thread.
        unsafe { *libc::__errno_location() = 77 };
        // SAFETY: `entry` keeps to a zeroed control block.
        unsafe { spawn(entry) }.unwrap();
        for _ in 0..5000 {
            if SEEN.load(Ordering::Relaxed) == 1 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(SEEN.load(Ordering::Relaxed), 1, "the thread ran");
        file.metadata().expect("still open here");
    }
}
