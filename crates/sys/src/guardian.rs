//! A guest's userfaultfd in the hands of another process: it gives pages back when the guest's agent dies.
//!
//! While pages are out of reach, a thread that touches one sleeps for as long as the userfaultfd is open anywhere.
//! The agent has it, and dies with its process. But another process can share the memory (`CLONE_VM` without
//! `CLONE_THREAD`), live on, and read zeros where the pages were. So the engine holds the userfaultfd too. It can
//! fill an absent page from outside; moving pages it cannot (`UFFDIO_MOVE` wants the caller's own memory).
//!
//! The descriptor is fetched (`pidfd_getfd`) from the table of the agent's thread. A guest is never asked to send one: closing a
//! stranger's descriptor can take as long as the stranger likes, and a process that does so cannot be killed meanwhile. So the link of the number
//! that it names is read before, which asks no file system. **The limit**: a stranger who exchanges the descriptor between the two. That copy
//! is not closed before this process ends. There are few of them, of each user and in all. A user who has used his up gets no
//! guardian for his next guests. `PIDFD_THREAD` is Linux 6.9.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};

use rustix::io::{Errno, Result};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::PAGE;
use crate::{priority, process, uffd};

/// The link of a userfaultfd in /proc. A file's begins with a slash.
const KIND: &[u8] = b"anon_inode:[userfaultfd]";

/// Copies that were no userfaultfds any more, and stay open, by user.
static GIVEN_UP: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());
/// Beyond so many no descriptor is fetched, so that strangers do not use up those of this process.
const MOST_GIVEN_UP: usize = 256;
/// Beyond so many of one user none of his: he alone has a use for exchanging them.
const MOST_OF_USER: usize = 4;

fn given_up() -> MutexGuard<'static, BTreeMap<u32, usize>> {
    priority::lock(&GIVEN_UP)
}

fn may_fetch(user: u32) -> bool {
    let all = given_up();
    let his = all.get(&user).copied().unwrap_or(0);
    his < MOST_OF_USER && all.values().sum::<usize>() < MOST_GIVEN_UP
}

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
    /// Takes a copy of descriptor `number` of thread `tid`, for which `user` answers.
    ///
    /// # Errors
    /// `INVAL` before Linux 6.9, or if the descriptor is no userfaultfd; `SRCH` or `BADF` when thread or descriptor do
    /// not exist, `PERM` without the right to trace the process; `NFILE` after too many exchanged descriptors.
    pub fn fetch(user: u32, tid: u32, number: u32) -> Result<Self> {
        let thread = i32::try_from(tid).ok().and_then(Pid::from_raw);
        // The flag has the bit of O_EXCL.
        let of_thread = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
        let thread = rustix::process::pidfd_open(thread.ok_or(Errno::SRCH)?, of_thread)?;
        let number = i32::try_from(number).map_err(|_| Errno::BADF)?;
        if !may_fetch(user) {
            return Err(Errno::NFILE);
        }
        if !is_userfaultfd(&format!("/proc/{tid}/fd/{number}"))? {
            return Err(Errno::INVAL);
        }
        let uffd = rustix::process::pidfd_getfd(&thread, number, PidfdGetfdFlags::empty())?;
        if !is_userfaultfd(&format!("/proc/self/fd/{}", uffd.as_raw_fd()))? {
            std::mem::forget(uffd);
            *given_up().entry(user).or_default() += 1;
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
    /// `EXIST` where a page is, `NOENT` where nothing is registered, `SRCH` when no process has the memory any more;
    /// `AGAIN` while mappings change.
    pub fn fill(&self, home: u64, page: &[u8; PAGE]) -> Result<()> {
        uffd::fill(self.uffd.as_fd(), home, page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_exchanges_descriptors_takes_the_place_of_nobody_else() {
        // Users that no other test has.
        let users = 4_100_000_000..;
        let exchanges = |user: u32| *given_up().entry(user).or_default() += 1;
        (0..MOST_OF_USER).for_each(|_| {
            assert!(may_fetch(4_100_000_000));
            exchanges(4_100_000_000);
        });
        assert!(!may_fetch(4_100_000_000));
        assert!(may_fetch(4_100_000_001));
        for user in users.skip(1).take(MOST_GIVEN_UP / MOST_OF_USER) {
            (0..MOST_OF_USER).for_each(|_| exchanges(user));
        }
        assert!(!may_fetch(4_200_000_000), "there is an end in all");
        given_up().clear();
    }
}
