//! Namespaces of processes: which one it is, and what the kernel tells of one by its file.
//!
//! Source: namespaces(7), ioctl_nsfs(2).

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{Stat, fstat, stat};
use rustix::io::{Errno, Result};

/// Which namespace it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Namespace {
    device: u64,
    inode: u64,
}

impl Namespace {
    fn by(its: &Stat) -> Self {
        Self {
            device: its.st_dev,
            inode: its.st_ino,
        }
    }

    /// The one of a kind (`mnt`, `user`) that a process is in: a number, or `self`. The name is asked, so that no file is opened.
    ///
    /// # Errors
    /// The process is gone, or may not be looked at.
    pub(crate) fn of(process: &str, kind: &str) -> Result<Self> {
        stat(format!("/proc/{process}/ns/{kind}")).map(|its| Self::by(&its))
    }

    /// The one that a file is of.
    ///
    /// # Errors
    /// As fstat(2).
    pub(crate) fn of_file(file: impl AsFd) -> Result<Self> {
        fstat(file).map(|its| Self::by(&its))
    }

    /// Whether it has this process's own mounts, or the first one's, which may be out of sight.
    ///
    /// # Errors
    /// As [`Self::of`], for this process.
    pub(crate) fn has_hosts_mounts(self) -> Result<bool> {
        Ok(self == Self::of("self", "mnt")? || Self::of("1", "mnt") == Ok(self))
    }
}

/// The user namespace whose root rules over a namespace (`NS_GET_USERNS`).
///
/// # Errors
/// `PERM` where this process cannot see it.
pub(crate) fn users_of(space: impl AsFd) -> Result<OwnedFd> {
    ask(space, 0xb701)
}

/// The namespace that a user namespace was made in (`NS_GET_PARENT`).
///
/// # Errors
/// As [`users_of`].
pub(crate) fn parent_of(space: impl AsFd) -> Result<OwnedFd> {
    ask(space, 0xb702)
}

fn ask(space: impl AsFd, what: usize) -> Result<OwnedFd> {
    let space = space.as_fd().as_raw_fd().unsigned_abs() as usize;
    // SAFETY: the call takes no memory.
    let number = unsafe { crate::raw::call(libc::SYS_ioctl, [space, what, 0, 0, 0, 0]) }?;
    let number = i32::try_from(number).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel has just made the descriptor for this caller.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
