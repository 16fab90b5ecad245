//! A process that has ended is not kept alive.
//!
//! A process ends when its last thread does, and the agent's thread is one. Where the last of the host's own threads
//! leaves by exit(2) alone, past libc, the agent's would stay for ever. So at each sync, and each
//! second without a question, it looks whether it is the only one left. Then it leaves in the same way. The process ends with the code of the thread that ends last,
//! so this one takes the code of the last that left through libc's syscall(2), else the first thread's.
//!
//! The kernel tells no process of this moment: a pidfd of the first thread is readable when all others
//! have ended too (`PIDFD_THREAD` before Linux 6.15 was another matter).

use sys::task::Leader;

use crate::lock::PerProcess;

/// What the agent's thread knows of the process's end.
pub(crate) struct Alone(Option<Leader>);

impl Alone {
    /// For the calling thread, the agent's.
    pub(crate) fn new() -> Self {
        Self(Leader::of_this_process().ok())
    }

    /// Ends the calling thread when it is the only one left of its process.
    pub(crate) fn leave_if_last(&self) {
        if let Some(code) = self.0.as_ref().and_then(Leader::left_one) {
            let left = crate::lock::per_process().and_then(PerProcess::last_exit);
            sys::thread::leave(left.unwrap_or(code));
        }
    }
}
