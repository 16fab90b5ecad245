//! A call that waits for ever is made to end: PTRACE_SEIZE waits for a thread of the process that executes a program.
//!
//! That thread may wait for a file system that does not answer. Or it waits for the end of a thread that this one holds, which hears of
//! that end only after the call. The kernel begins the call again after every signal (ERESTARTNOINTR), so a handler that returns ends
//! nothing. This one, which a timer of this thread's starts, sets the thread behind the call, as if the call had failed with EINTR.
//!
//! The interleaving to fear is a signal at another instruction:
//!
//! | the signal comes | so |
//! |---|---|
//! | before the call | the handler does nothing, and the timer fires again |
//! | at the instruction that enters the kernel, for the first time or again | nothing has happened to the other process |
//! | behind it | the handler does nothing, and the call's own result stands |
//!
//! Source: `ptrace_attach()` in `kernel/ptrace.c`; `arch_do_signal_or_restart()`; `timer_create(2)`.

use std::marker::PhantomData;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::{Errno, Result};

/// The longest that a call waits: longer than any program takes to begin whose files are at hand.
const LONGEST: Duration = Duration::from_secs(2);
/// From then on the timer fires again and again.
const AGAIN: Duration = Duration::from_millis(50);

// ptrace(request, thread, address, data): the arguments are those of a C function, but the fourth.
core::arch::global_asm!(
    ".pushsection .text.pageone_bounded_ptrace, \"ax\", @progbits",
    ".globl pageone_bounded_ptrace",
    ".hidden pageone_bounded_ptrace",
    ".globl pageone_bounded_enter",
    ".hidden pageone_bounded_enter",
    ".type pageone_bounded_ptrace, @function",
    "pageone_bounded_ptrace:",
    "mov r10, rcx",
    "mov eax, {number}",
    "pageone_bounded_enter:",
    "syscall",
    "ret",
    ".size pageone_bounded_ptrace, . - pageone_bounded_ptrace",
    ".popsection",
    number = const libc::SYS_ptrace,
);

/// Bytes of `syscall`.
const ENTER_BYTES: i64 = 2;

unsafe extern "C" {
    fn pageone_bounded_ptrace(request: usize, thread: usize, address: usize, data: usize) -> i64;
    fn pageone_bounded_enter();
}

/// The one of which no other part makes use.
fn signal() -> i32 {
    libc::SIGRTMAX() - 3
}

extern "C" fn end_the_call(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let registers = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel gives a handler that asked for it (SA_SIGINFO) the registers of the thread that it has interrupted, and takes
    // them from there when the handler returns. They are changed at one instruction only, to those that the kernel leaves after a
    // call that fails; no code needs rcx and r11 there, which it overwrites.
    unsafe {
        let registers = &mut (*registers).uc_mcontext.gregs;
        let at = &mut registers[libc::REG_RIP as usize];
        if *at == pageone_bounded_enter as *const () as i64 {
            *at += ENTER_BYTES;
            registers[libc::REG_RAX as usize] = -i64::from(libc::EINTR);
        }
    }
}

/// Puts the handler in place, once in this process.
fn handle() -> Result<()> {
    static DONE: OnceLock<Result<()>> = OnceLock::new();
    *DONE.get_or_init(|| {
        // SAFETY: zeros are an action without flags and mask; the handler makes no call and touches only what the kernel gives it.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = end_the_call as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal(), &raw const action, std::ptr::null_mut())
        };
        told(result)
    })
}

fn told(result: i32) -> Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// A timer of this thread's that ends calls of it.
#[derive(Debug)]
pub(super) struct Bounded {
    timer: libc::timer_t,
    /// The signal goes to this thread.
    here: PhantomData<*const ()>,
}

impl Bounded {
    /// # Errors
    /// Those of timer_create(2): a user has as many timers as signals may wait (`RLIMIT_SIGPENDING`).
    pub(super) fn new() -> Result<Self> {
        handle()?;
        // SAFETY: zeros are a good event to begin with; the kernel reads it and fills the timer.
        let (result, timer) = unsafe {
            let mut timer = std::mem::zeroed();
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal();
            event.sigev_notify_thread_id = crate::process::thread_id().cast_signed();
            let clock = libc::CLOCK_MONOTONIC;
            let result = libc::timer_create(clock, &raw mut event, &raw mut timer);
            (result, timer)
        };
        told(result)?;
        Ok(Self {
            timer,
            here: PhantomData,
        })
    }

    /// As ptrace(2) itself, for a request that reads and writes no memory of ours. `INTR`: it took too long.
    pub(super) fn ptrace(&self, request: usize, thread: u32, data: usize) -> Result<()> {
        self.set(LONGEST)?;
        let before = mask(libc::SIG_UNBLOCK, &only());
        // SAFETY: data is a number, not an address.
        let done = unsafe { pageone_bounded_ptrace(request, thread as usize, 0, data) };
        // Not by the whole set: libc leaves its own signals out of that, which may be blocked as well.
        if is_in(&before) {
            mask(libc::SIG_BLOCK, &only());
        }
        self.set(Duration::ZERO)?;
        match i32::try_from(done) {
            Ok(error @ -4095..=-1) => Err(Errno::from_raw_os_error(-error)),
            _ => Ok(()),
        }
    }

    /// The timer fires after this time, and then again; never after none.
    fn set(&self, first: Duration) -> Result<()> {
        let spec = |time: Duration| libc::timespec {
            tv_sec: time.as_secs().cast_signed(),
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        let times = libc::itimerspec {
            it_interval: spec(AGAIN),
            it_value: spec(first),
        };
        // SAFETY: the timer is ours and lives; the kernel reads the times.
        told(unsafe { libc::timer_settime(self.timer, 0, &raw const times, std::ptr::null_mut()) })
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        // SAFETY: it is ours, and used no more.
        unsafe { libc::timer_delete(self.timer) };
    }
}

/// The signal alone.
fn only() -> libc::sigset_t {
    // SAFETY: both write a set of ours; the signal is one.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal());
        set
    }
}

/// Whether the signal is in a set.
fn is_in(set: &libc::sigset_t) -> bool {
    // SAFETY: the set is read; the signal is one.
    unsafe { libc::sigismember(set, signal()) == 1 }
}

/// Changes which signals this thread blocks; gives those of before.
fn mask(how: i32, set: &libc::sigset_t) -> libc::sigset_t {
    // SAFETY: the sets are ours; the call fails for what is no `how` only.
    unsafe {
        let mut before = std::mem::zeroed();
        let result = libc::pthread_sigmask(how, set, &raw mut before);
        assert_eq!(result, 0, "a signal mask cannot be changed");
        before
    }
}
