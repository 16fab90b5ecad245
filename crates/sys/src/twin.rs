//! A copy of this process that works beside it (fork(2)).
//!
//! The tempting alternative is a thread. But a limit of memory, the kernel's choice of a process to kill, or a mistake of ours ends a
//! process with all its threads. What ends the copy ends nothing else.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::process::fork;
use crate::signals::{SIGKILL, tie_to_parent};

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

    /// Kills it, unless it has ended by itself; tells how it ended, the first time.
    pub fn end(&mut self) -> Option<ExitStatus> {
        if std::mem::replace(&mut self.has_ended, true) {
            return None;
        }
        let _ = kill_process(self.pid, Signal::KILL);
        loop {
            match waitpid(Some(self.pid), WaitOptions::empty()) {
                Err(Errno::INTR) => {}
                ended => {
                    let (_, status) = ended.ok().flatten()?;
                    return Some(ExitStatus::from_raw(status.as_raw()));
                }
            }
        }
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        self.end();
    }
}
