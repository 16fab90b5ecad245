//! A guest's userfaultfd in the hands of another process: what gives pages back when the guest's agent dies.
//!
//! While pages are out of reach, a thread that touches one sleeps for as long as the userfaultfd is open anywhere.
//! The agent has it, and dies with its process. But another process can share the memory (`CLONE_VM` without
//! `CLONE_THREAD`), live on, and read zeros where the pages were. So the engine holds the userfaultfd too. It can
//! fill an absent page from outside; moving pages it cannot (`UFFDIO_MOVE` wants the caller's own memory).
//!
//! The descriptor is fetched (`pidfd_getfd`) from the table of the agent's thread. A guest is never asked to send one: closing a
//! stranger's descriptor can take as long as the stranger likes, and a process that does so cannot be killed meanwhile. So the link of the number
//! that it names is read before, which asks no file system. **The limit**: a stranger who exchanges the descriptor between the two. That copy
//! is not closed before this process ends, and there are [`MOST_GIVEN_UP`] of them at most. `PIDFD_THREAD` is Linux 6.9.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::{Errno, Result};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::PAGE;
use crate::{process, uffd};

/// The link of a userfaultfd in /proc. A file's begins with a slash.
const KIND: &[u8] = b"anon_inode:[userfaultfd]";

/// Copies that were no userfaultfds any more, and stay open.
static GIVEN_UP: AtomicU32 = AtomicU32::new(0);
/// Beyond so many no descriptor is fetched, so that strangers do not use up those of this process.
pub const MOST_GIVEN_UP: u32 = 256;

fn is_userfaultfd(link: &str) -> Result<bool> {
    match rustix::fs::readlink(link, Vec::new()) {
        Ok(target) => Ok(target.as_bytes() == KIND),
        Err(Errno::NOENT) => Err(Errno::BADF),
        Err(errno) => Err(errno),
    }
}

/// A userfaultfd of another process, and the thread it was fetched from.
#[derive(Debug)]
pub struct Guardian {
    uffd: OwnedFd,
    thread: OwnedFd,
}

impl Guardian {
    /// Takes a copy of descriptor `number` of thread `tid`.
    ///
    /// # Errors
    /// `INVAL` before Linux 6.9, or if the descriptor is no userfaultfd; `SRCH` or `BADF` when thread or descriptor do
    /// not exist, `PERM` without the right to trace the process; `NFILE` after [`MOST_GIVEN_UP`] exchanged descriptors.
    pub fn fetch(tid: u32, number: u32) -> Result<Self> {
        let thread = i32::try_from(tid).ok().and_then(Pid::from_raw);
        // The flag has the bit of O_EXCL.
        let of_thread = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
        let thread = rustix::process::pidfd_open(thread.ok_or(Errno::SRCH)?, of_thread)?;
        let number = i32::try_from(number).map_err(|_| Errno::BADF)?;
        if GIVEN_UP.load(Ordering::Relaxed) >= MOST_GIVEN_UP {
            return Err(Errno::NFILE);
        }
        if !is_userfaultfd(&format!("/proc/{tid}/fd/{number}"))? {
            return Err(Errno::INVAL);
        }
        let uffd = rustix::process::pidfd_getfd(&thread, number, PidfdGetfdFlags::empty())?;
        if !is_userfaultfd(&format!("/proc/self/fd/{}", uffd.as_raw_fd()))? {
            std::mem::forget(uffd);
            GIVEN_UP.fetch_add(1, Ordering::Relaxed);
            return Err(Errno::INVAL);
        }
        Ok(Self { uffd, thread })
    }

    /// Whether the thread has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        process::has_exited(&self.thread)
    }

    /// Fills the absent page at `home` with `page`, and wakes who sleeps on it.
    ///
    /// # Errors
    /// `EXIST` where a page is, `NOENT` where nothing is registered, `SRCH` when nobody has the memory any more;
    /// `AGAIN` while mappings change.
    pub fn fill(&self, home: u64, page: &[u8; PAGE]) -> Result<()> {
        uffd::fill(self.uffd.as_fd(), home, page)
    }
}
