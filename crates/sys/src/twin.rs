//! A copy of this process that works beside it (fork(2)).
//!
//! The tempting alternative is a thread. But a limit of memory, the kernel's choice of a process to kill, or a mistake of ours ends a
//! process with all its threads. What ends the copy ends nothing else.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::process::fork;
use crate::signals::{SIGKILL, tie_to_parent};

/// The longest wait for the end of one that was killed, and between two looks.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(1);

/// The copy. It is killed when this is dropped, and when the thread ends that made it.
#[derive(Debug)]
pub struct Twin {
    pid: Pid,
    /// Whether its end was told: then its number may be another process's.
    has_ended: bool,
}

impl Twin {
    /// Starts a copy, which does `act` and ends with the code that this gives.
    ///
    /// # Errors
    /// `Deadlock` when this process has other threads; what fork(2) gives.
    pub fn start(act: impl FnOnce() -> i32) -> io::Result<Self> {
        let parent = std::process::id();
        let pid = fork(|| match tie_to_parent(parent, SIGKILL) {
            Ok(()) => act(),
            // The parent has gone, or cannot be known.
            Err(_) => 1,
        })?;
        let has_ended = false;
        Ok(Self { pid, has_ended })
    }

    /// Its number.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        if !self.has_ended
            && let Some(signal) = Signal::from_named_raw(signal)
        {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Kills it, unless it has ended by itself; tells how it ended, the first time. One that the kernel does not end (it may be in a call
    /// that is not killed, as a read of memory on another user's FUSE mount) is left to end later.
    pub fn end(&mut self) -> Option<ExitStatus> {
        if std::mem::replace(&mut self.has_ended, true) {
            return None;
        }
        let _ = kill_process(self.pid, Signal::KILL);
        let begin = Instant::now();
        loop {
            match waitpid(Some(self.pid), WaitOptions::NOHANG) {
                Err(Errno::INTR) => {}
                Ok(None) if begin.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
                ended => {
                    let (_, status) = ended.ok().flatten()?;
                    return Some(ExitStatus::from_raw(status.as_raw()));
                }
            }
        }
    }
}

/// Has this process, a twin, let go of standard input and output: a reader of its parent's output does not wait for its end, too.
///
/// # Errors
/// What opening `/dev/null` and dup2(2) give.
pub fn leave_input_and_output() -> io::Result<()> {
    let none = File::options().read(true).write(true).open("/dev/null")?;
    for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: both are open in any process of Rust's, and are used by their numbers alone.
        if unsafe { libc::dup2(none.as_raw_fd(), stream) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

impl Drop for Twin {
    fn drop(&mut self) {
        self.end();
    }
}
