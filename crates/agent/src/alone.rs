//! Waiting for the engine, without keeping a process alive that has ended.
//!
//! A process ends when its last thread does, and the agent's thread is one. Where the last of the host's own threads
//! leaves by exit(2) alone, past libc, the agent's would stay for ever. So every second it looks whether it is
//! the only one left. Then it leaves in the same way. The process ends with the code of the thread that ends last,
//! so this one takes the code of the last that left through libc's syscall(2), else the first thread's.
//!
//! The kernel tells nobody of this moment: a pidfd of the first thread is readable when all others have
//! ended too (`PIDFD_THREAD` before Linux 6.15 was another matter).

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};
use sys::task::Leader;

use crate::lock::PerProcess;

const SECOND: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// What the agent's thread knows of the process's end.
pub(crate) struct Alone(Option<Leader>);

impl Alone {
    /// For the calling thread, the agent's.
    pub(crate) fn new() -> Self {
        Self(Leader::of_this_process().ok())
    }

    /// Waits for a packet, at most so long; whether there is one, or the other end is gone.
    ///
    /// # Errors
    /// What poll(2) gives.
    pub(crate) fn wait(&self, socket: &OwnedFd, most: Option<Timespec>) -> Result<bool> {
        let wait = most.unwrap_or(SECOND);
        loop {
            let mut ready = [PollFd::new(socket, PollFlags::IN)];
            match poll(&mut ready, Some(&wait)) {
                Ok(0) => self.leave_if_last(),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            if most.is_some() {
                return Ok(false);
            }
        }
    }

    /// Ends the calling thread when it is the only one left of its process.
    pub(crate) fn leave_if_last(&self) {
        if let Some(code) = self.0.as_ref().and_then(Leader::left_one) {
            let left = crate::lock::per_process().and_then(PerProcess::last_exit);
            sys::thread::leave(left.unwrap_or(code));
        }
    }
}
