//! A thread that its process does not know of.
//!
//! The agent must be able to start inside any call of its host: under malloc's lock, between fork
//! and exec, in a process that counts its threads. The usual call, pthread_create, allocates and takes locks. It also
//! makes the process wait for a thread that never ends when its last own thread leaves. So the
//! agent's thread comes from clone(2) itself:
//!
//! - its clone has the very flags that libc's has, for there are filters that allow no others. So it shares
//!   the descriptor table until its first call, [`leave_descriptors`], gives it **a table of its own**. A host
//!   that closes all descriptors closes none of the agent's, never sees them, and hands none to a child;
//! - it has a thread-control block of its own, all zeros: code on it must not use thread-local
//!   storage beyond what a zeroed block serves (libc's `errno` is fine, Rust's `thread_local!`
//!   and panics are not);
//! - all its signals are blocked. One of them, sent to it alone, wakes it: see [`Bell`];
//! - when it ends, the kernel clears a word. From then on nothing runs in its [`Room`], though the kernel
//!   may count it as a thread of the process for a moment longer: see [`is_gone`].
//!
//! Source: clone(2), and the x86-64 ABI supplement on thread-local storage.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use rustix::io::{Errno, Result};

use crate::mapping;

const STACK_BYTES: usize = 256 * 1024;
/// Room for the static thread-local storage of the host's libraries, below the control block.
const TLS_BYTES: usize = 64 * 1024;
const CONTROL_BYTES: usize = 4096;

/// Memory for a thread: its stack, thread-local storage and control block. One thread at a time may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room(usize);

impl Room {
    /// A new room.
    ///
    /// # Errors
    /// `NOMEM` when memory is exhausted.
    pub fn new() -> Result<Self> {
        let base = mapping::area(STACK_BYTES + TLS_BYTES + CONTROL_BYTES)?;
        // The lowest page of the stack catches an overflow.
        let args = [base, 4096, 0, 0, 0, 0];
        // SAFETY: the page lies in the area just made and nothing uses it.
        let _ = unsafe { crate::raw::call(libc::SYS_mprotect, args) };
        Ok(Self(base))
    }

    /// Its address, from which [`Room::at`] makes it again.
    #[must_use]
    pub fn address(self) -> usize {
        self.0
    }

    /// The room at an address.
    ///
    /// # Safety
    /// The address must be that of a room, made in this process or in one it was forked from.
    #[must_use]
    pub unsafe fn at(address: usize) -> Self {
        Self(address)
    }

    /// Unmaps it.
    ///
    /// # Safety
    /// No thread runs in it, nor will any.
    pub unsafe fn unmap(self) {
        // SAFETY: `new` made it; no thread uses it, as the caller vouches.
        let _ = unsafe { mapping::unmap(self.0, STACK_BYTES + TLS_BYTES + CONTROL_BYTES) };
    }

    /// Where the stack ends.
    fn stack(self) -> usize {
        self.0 + STACK_BYTES
    }

    /// A control block of zeros but for two words.
    fn control(self) -> usize {
        let control = self.0 + STACK_BYTES + TLS_BYTES;
        let block = std::ptr::with_exposed_provenance_mut::<usize>(control);
        // SAFETY: the block lies in the room, which no thread uses. The ABI wants its first word to point
        // to itself; libc keeps a second such pointer two words on.
        unsafe {
            std::ptr::write_bytes(block, 0, CONTROL_BYTES / size_of::<usize>());
            *block = control;
            *block.add(2) = control;
        }
        control
    }
}

/// Starts `entry` on a thread of its own and gives its number, which `number` holds until the thread has ended.
/// `entry` must not return, and must begin with [`leave_descriptors`].
///
/// # Errors
/// `AGAIN` when the number of threads is exhausted; what else clone(2) gives.
///
/// # Safety
/// `entry` must keep to what the module's head says of code on such a thread, and nothing else may use the
/// room until `number` is 0.
#[cfg(target_arch = "x86_64")]
pub unsafe fn spawn(
    room: Room,
    number: &'static AtomicU32,
    entry: extern "C" fn() -> !,
) -> Result<u32> {
    let (stack, control) = (room.stack(), room.control());
    let old = block_signals();
    // SAFETY: the stack and the control block are this thread's alone until it has ended.
    let started = unsafe { clone(CLONE_FLAGS, stack, control, number.as_ptr(), entry) };
    restore_signals(old);
    started
}

/// # Safety
/// `stack` must be the upper end of a free stack, `control` a thread-control block, `number` a word for good, if the flags ask for them.
#[cfg(target_arch = "x86_64")]
unsafe fn clone(
    flags: i32,
    stack: usize,
    control: usize,
    number: *mut u32,
    entry: extern "C" fn() -> !,
) -> Result<u32> {
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
            in("rdx") number,
            in("r10") number,
            in("r8") control,
            in("r12") entry,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    match u32::try_from(ret) {
        Ok(tid) => Ok(tid),
        Err(_) => Err(Errno::from_raw_os_error(i32::try_from(-ret).unwrap_or(0))),
    }
}

/// Runs `entry` in a child of its own that shares the memory, and waits for its end, which no other wait sees. Gives
/// its number, for [`take_away`]. Makes no call but clone(2).
///
/// # Errors
/// What clone(2) gives.
///
/// # Safety
/// `stack` must be the upper end of a stack that is free; `entry` must end its process, and keep to system calls and
/// memory that is its own. Its first should block its signals, if the caller's are not.
#[cfg(target_arch = "x86_64")]
pub unsafe fn wait_for_child(stack: usize, entry: extern "C" fn() -> !) -> Result<u32> {
    const FLAGS: i32 = libc::CLONE_VM | libc::CLONE_VFORK;
    // SAFETY: the stack is free until the child has ended, and this thread sleeps until then.
    unsafe { clone(FLAGS, stack, 0, std::ptr::null_mut(), entry) }
}

/// Takes away what is left of a child of [`wait_for_child`].
pub fn take_away(child: u32) {
    let all = libc::__WALL.unsigned_abs() as usize;
    // SAFETY: it has ended. That another thread's wait for all kinds of children has seen it is no matter.
    let _ = unsafe { crate::raw::call(libc::SYS_wait4, [child as usize, 0, all, 0, 0, 0]) };
}

/// The end of the calling process, however it comes, leaves no core file: one byte is less than any has, and asks
/// no helper to take it.
pub fn leave_no_core() {
    let limit: [u64; 2] = [1, 1];
    let new = (&raw const limit).expose_provenance();
    let core = libc::RLIMIT_CORE as usize;
    // SAFETY: the limit is the 16 bytes the kernel reads.
    let _ = unsafe { crate::raw::call(libc::SYS_prlimit64, [0, core, new, 0, 0, 0]) };
}

/// What libc's pthread_create asks clone(2) for.
pub(crate) const CLONE_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Gives the calling thread an empty descriptor table of its own. The kernel copies nothing that it would close
/// again, so no file hears of it.
///
/// # Errors
/// What close_range(2) gives: then the thread still shares its table, and must end.
pub fn leave_descriptors() -> Result<()> {
    const UNSHARE: usize = 2;
    let args = [0, u32::MAX as usize, UNSHARE, 0, 0, 0];
    // SAFETY: only the new table is emptied, which nothing uses yet.
    unsafe { crate::raw::call(libc::SYS_close_range, args) }.map(drop)
}

/// Gives the calling thread the ordinary class, the ordinary nice value, and the CPUs of the first thread besides its own.
/// Others wait for it, and the thread that made it may be idle, in a real-time class, or bound to a busy CPU. What the kernel
/// refuses stays as it is: without rights nothing leaves SCHED_IDLE, or gets a lower nice value.
pub fn be_ordinary() {
    const CPUS: usize = 8192;
    let priority = 0i32;
    let param = (&raw const priority).expose_provenance();
    let ordinary = libc::SCHED_OTHER.unsigned_abs() as usize;
    let mut cpus = [0usize; CPUS / usize::BITS as usize];
    let first = rustix::process::getpid().as_raw_pid().unsigned_abs() as usize;
    // SAFETY: the kernel reads the 4 bytes of the priority.
    let _ =
        unsafe { crate::raw::call(libc::SYS_sched_setscheduler, [0, ordinary, param, 0, 0, 0]) };
    // SAFETY: numbers only.
    let _ = unsafe { crate::raw::call(libc::SYS_setpriority, [0; 6]) };
    let mut len = 0;
    for thread in [0, first] {
        let mut its = [0usize; CPUS / usize::BITS as usize];
        let args = [
            thread,
            CPUS / 8,
            (&raw mut its).expose_provenance(),
            0,
            0,
            0,
        ];
        // SAFETY: the kernel writes at most so many bytes.
        let Ok(filled) = (unsafe { crate::raw::call(libc::SYS_sched_getaffinity, args) }) else {
            return;
        };
        len = len.max(filled);
        cpus.iter_mut().zip(its).for_each(|(all, its)| *all |= its);
    }
    let args = [0, len, (&raw const cpus).expose_provenance(), 0, 0, 0];
    // SAFETY: the kernel reads so many bytes.
    let _ = unsafe { crate::raw::call(libc::SYS_sched_setaffinity, args) };
}

fn signal(number: u32, signal: i32) -> Result<()> {
    let process = rustix::process::getpid().as_raw_pid().unsigned_abs();
    let signal = signal.unsigned_abs() as usize;
    let args = [process as usize, number as usize, signal, 0, 0, 0];
    // SAFETY: the thread named is one of the caller's process, or none.
    unsafe { crate::raw::call(libc::SYS_tgkill, args) }.map(drop)
}

/// Whether the kernel counts no thread of this number in this process any more.
#[must_use]
pub fn is_gone(number: u32) -> bool {
    signal(number, 0) == Err(Errno::SRCH)
}

/// The signal of [`Bell`]: nothing sends it, and a kernel without memory still delivers it.
const RING: i32 = libc::SIGSTKFLT;

/// By which other threads of the process wake the thread that made it: readable once it rang. Descriptors do not
/// reach this thread from others, for it has a table of its own; a signal does, and one that is blocked calls no
/// handler and waits.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// The calling thread's bell.
    ///
    /// # Errors
    /// `MFILE`, `NFILE` or `NOMEM` when descriptors or memory are exhausted.
    pub fn new() -> Result<Self> {
        let mask: u64 = 1 << (RING - 1);
        let set = (&raw const mask).expose_provenance();
        let flags = (libc::SFD_CLOEXEC | libc::SFD_NONBLOCK).unsigned_abs() as usize;
        // SAFETY: the set is the 8 bytes the kernel reads; -1 asks for a new descriptor.
        let made =
            unsafe { crate::raw::call(libc::SYS_signalfd4, [usize::MAX, set, 8, flags, 0, 0]) };
        let fd = made.and_then(|fd| i32::try_from(fd).map_err(|_| Errno::BADF))?;
        // SAFETY: the call has just made this descriptor, and no other thread knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Takes a ring off, if there is one.
    pub fn hush(&self) {
        let mut told = [0u8; size_of::<libc::signalfd_siginfo>()];
        let _ = rustix::io::read(&self.0, &mut told);
    }

    /// Rings for the thread with this number, if it is one of this process.
    ///
    /// # Errors
    /// `SRCH` when it is not.
    pub fn ring(number: u32) -> Result<()> {
        signal(number, RING)
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
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

/// Ends the calling thread and nothing else, past libc: [`spawn`]'s threads end so.
pub fn leave(code: i32) -> ! {
    loop {
        let args = [code.cast_unsigned() as usize, 0, 0, 0, 0, 0];
        // SAFETY: a thread of `spawn` owns nothing that its end could take from others.
        let _ = unsafe { crate::raw::call(libc::SYS_exit, args) };
    }
}

/// Puts the calling thread alone under a seccomp filter, and under no_new_privs, without which only a privileged
/// thread may have one.
///
/// # Errors
/// `NOSYS` or `INVAL` from a kernel without filters, `NOMEM` when there are too many; what filters that are there make of it.
pub fn narrow(filter: &'static [libc::sock_filter]) -> Result<()> {
    const FILTER: usize = libc::SECCOMP_SET_MODE_FILTER as usize;
    // The thread handles no secrets of others: no need to slow it down.
    const SPECULATE: usize = 4; // SECCOMP_FILTER_FLAG_SPEC_ALLOW
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(|_| Errno::INVAL)?,
        filter: filter.as_ptr().cast_mut(),
    };
    let program = (&raw const program).expose_provenance();
    let no_new_privs = [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0, 0];
    // SAFETY: numbers, and a program that the kernel reads; both are for this thread alone.
    unsafe {
        crate::raw::call(libc::SYS_prctl, no_new_privs)?;
        crate::raw::call(libc::SYS_seccomp, [FILTER, SPECULATE, program, 0, 0, 0])
    }
    .map(drop)
}

/// Ends the calling process, one of [`wait_for_child`], whatever filters make of it. `refused` runs where they refuse
/// exit(2), by which threads end.
pub fn leave_whatever(refused: impl Fn()) -> ! {
    // SAFETY: each of these ends the process, which owns nothing, or does nothing.
    let _ = unsafe { crate::raw::call(libc::SYS_exit, [0; 6]) };
    loop {
        refused();
        let own = rustix::process::getpid().as_raw_pid().unsigned_abs() as usize;
        let kill = [own, libc::SIGKILL.unsigned_abs() as usize, 0, 0, 0, 0];
        // SAFETY: as above; the number is this process's.
        unsafe {
            let _ = crate::raw::call(libc::SYS_exit_group, [0; 6]);
            let _ = crate::raw::call(libc::SYS_kill, kill);
            // An address that nothing is at.
            std::ptr::null_mut::<u8>().write_volatile(0);
        }
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

/// The name of the calling thread, up to its first zero. Does not allocate.
#[must_use]
pub fn name() -> [u8; 16] {
    let mut name = [0_u8; 16];
    let at = name.as_mut_ptr().expose_provenance();
    let args = [libc::PR_GET_NAME as usize, at, 0, 0, 0, 0];
    // SAFETY: PR_GET_NAME writes 16 bytes at most, which `name` has.
    let _ = unsafe { crate::raw::call(libc::SYS_prctl, args) };
    name
}

/// Lets process `pid` read this process's memory where the Yama security module restricts that.
pub fn allow_tracer(pid: u32) {
    let args = [libc::PR_SET_PTRACER as usize, pid as usize, 0, 0, 0, 0];
    // SAFETY: PR_SET_PTRACER takes a number. Kernels without Yama refuse it; nothing depends on it there.
    let _ = unsafe { crate::raw::call(libc::SYS_prctl, args) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    static NUMBER: AtomicU32 = AtomicU32::new(0);
    static RANG: AtomicU32 = AtomicU32::new(0);

    extern "C" fn entry() -> ! {
        leave_descriptors().unwrap();
        set_name(c"sys-test");
        // `errno` must be this thread's own: make a libc call fail.
        // SAFETY: closing no descriptor.
        unsafe { libc::close(-1) };
        let bell = Bell::new().unwrap();
        let mut ready = [PollFd::new(&bell, PollFlags::IN)];
        let minute = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        if poll(&mut ready, Some(&minute)) == Ok(1) {
            RANG.fetch_add(1, Ordering::Relaxed);
        }
        drop(bell);
        leave(0)
    }

    #[test]
    fn a_thread_has_its_own_descriptors_and_errno_and_ends_when_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("file")).unwrap();
        let room = Room::new().unwrap();
        for turn in 1..=3 {
            // SAFETY: libc's errno of this thread.
            unsafe { *libc::__errno_location() = 77 };
            // SAFETY: `entry` keeps to a zeroed control block; the thread before has ended.
            let number = unsafe { spawn(room, &NUMBER, entry) }.unwrap();
            // SAFETY: as above.
            assert_eq!(unsafe { *libc::__errno_location() }, 77);
            assert!(!is_gone(number));
            Bell::ring(number).unwrap();
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while NUMBER.load(Ordering::Acquire) != 0 || !is_gone(number) {
                assert!(std::time::Instant::now() < deadline, "the thread runs");
                std::thread::yield_now();
            }
            assert_eq!(RANG.load(Ordering::Relaxed), turn);
            file.metadata().expect("still open here");
        }
    }
}
