//! Signals as a descriptor to wait on (signalfd(2)), and what children have to know of them.
//!
//! A blocked signal stays blocked in every child, so a program that waits this way starts its
//! children through [`prepare_child`], or hands on what it was given ([`Inherited`](crate::inherited::Inherited)).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

pub use libc::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM, SIGTSTP, SIGTTIN,
    SIGTTOU, SIGUSR1, SIGUSR2, SIGWINCH,
};

/// A signal that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Its number.
    pub signal: i32,
    /// The process that sent it; 0 for one of another PID namespace.
    pub sender: u32,
    /// Whether the kernel sent it: for `SIGINT` and `SIGQUIT`, a key of the terminal, which the
    /// whole foreground process group gets.
    pub from_kernel: bool,
}

/// Signals that wait in a descriptor instead of interrupting.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks `signals` in this thread, and so in those it starts from now on, and collects them.
    ///
    /// Call it before the first thread is started: a thread that does not block a signal takes it.
    ///
    /// # Errors
    /// Whatever sigprocmask(2) and signalfd(2) give.
    pub fn block(signals: &[i32]) -> io::Result<Self> {
        let set = set_of(signals);
        mask(libc::SIG_BLOCK, &set)?;
        // SAFETY: `set` is an initialized signal set.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just handed out this descriptor; it has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal that waits, if any; never sleeps.
    ///
    /// # Errors
    /// Whatever read(2) gives.
    pub fn next(&self) -> io::Result<Option<Arrived>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer holds `size` bytes, and any bytes are a valid `signalfd_siginfo`.
        let (got, info) = unsafe {
            let got = libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size);
            (got, info.assume_init())
        };
        if got < 0 {
            let error = io::Error::last_os_error();
            let none = error.kind() == io::ErrorKind::WouldBlock;
            return if none { Ok(None) } else { Err(error) };
        }
        Ok(Some(Arrived {
            signal: i32::try_from(info.ssi_signo).unwrap_or(0),
            sender: info.ssi_pid,
            from_kernel: info.ssi_code == libc::SI_KERNEL,
        }))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes `command` start with no signal blocked, and get `SIGTERM` when the thread that starts it
/// ends, if `tied`.
pub fn prepare_child(command: &mut Command, tied: bool) -> &mut Command {
    let parent = std::process::id();
    let prepare = move || {
        if tied {
            tie_to_parent(parent, SIGTERM)?;
        }
        mask(libc::SIG_SETMASK, &set_of(&[]))
    };
    // SAFETY: between fork and exec only async-signal-safe calls are made (prctl, getppid,
    // sigprocmask), none of which allocates or takes a lock.
    unsafe { command.pre_exec(prepare) }
}

/// Makes this process, a child just forked by `parent`, one that gets `SIGTERM` when its parent ends,
/// and has no signal blocked.
pub(crate) fn begin_child(parent: u32) -> io::Result<()> {
    tie_to_parent(parent, SIGTERM)?;
    mask(libc::SIG_SETMASK, &set_of(&[]))
}

/// Has this process, a child of `parent`, get `signal` when the thread that made it ends.
pub(crate) fn tie_to_parent(parent: u32, signal: i32) -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // A parent that died before the call sends nothing any more.
    match u32::try_from(parent_pid()) {
        Ok(now) if now == parent => Ok(()),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    }
}

fn parent_pid() -> i32 {
    // SAFETY: the call touches no memory. rustix takes a filter's refusal for a process.
    unsafe { libc::getppid() }
}

/// Ends this process by `signal`, the way the signal would by itself, without a core file: what a
/// parent does to pass on how its child died. Returns only if the signal does not kill.
pub fn die_of(signal: i32) {
    crate::process::leave_no_core();
    // SAFETY: setting the default action and raising a signal touch no memory of ours.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        let set = set_of(&[signal]);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::raise(signal);
    }
}

/// Stops this process by `signal`, the way the signal would by itself, until another process has it go on: what a parent does to pass
/// on that its child was stopped. SIGTSTP and its kin stop no process of a group that no shell looks after.
pub fn stop_by(signal: i32) {
    let set = set_of(&[signal]);
    let mut mask = set_of(&[]);
    // SAFETY: the actions run no code of this process, and the sets are initialized. SIGSTOP has no other action: then the
    // first call fails, and the last has nothing to put back.
    unsafe {
        let action = libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, &raw mut mask);
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut());
        if action != libc::SIG_ERR {
            libc::signal(signal, action);
        }
    }
}

pub(crate) fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initializes the set; sigaddset refuses numbers that are no signals.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &signal in signals {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

pub(crate) fn mask(how: i32, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is initialized, and the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(how, set, std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In one test: the mask belongs to the thread, and a thread directed signal finds it.
    #[test]
    fn a_blocked_signal_waits_in_the_descriptor_and_not_in_children() {
        let signals = Signals::block(&[SIGUSR1]).unwrap();
        assert_eq!(signals.next().unwrap(), None);
        // SAFETY: the signal is blocked in this thread, so raising it only queues it.
        unsafe { libc::raise(SIGUSR1) };
        let arrived = signals.next().unwrap();
        let expected = Arrived {
            signal: SIGUSR1,
            sender: std::process::id(),
            from_kernel: false,
        };
        assert_eq!(arrived, Some(expected));
        let mut command = Command::new("grep");
        command.args(["SigBlk", "/proc/self/status"]);
        let output = prepare_child(&mut command, true).output().unwrap();
        assert_eq!(output.stdout, b"SigBlk:\t0000000000000000\n");
    }
}
