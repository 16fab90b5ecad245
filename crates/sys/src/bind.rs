//! A file or folder of this process's mounts, mounted in those of another process: a container's.
//!
//! ```text
//!   open_tree(2)    a copy of the mount that lies in no namespace, made read-only
//!   setns(2)        a thread apart goes into the other's namespace
//!   move_mount(2)   there the copy comes to its place below the other's root
//! ```
//!
//! The other process may have made anything of its root. So each part of the path is opened by itself: no symbolic link is followed, and
//! nothing leads out of that root.
//!
//! Source: open_tree(2), mount_setattr(2), setns(2), `do_move_mount()` in fs/namespace.c.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat};
use rustix::io::{Errno, Result};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::namespace::{self, Namespace};

/// Where another process has its mounts.
#[derive(Debug)]
pub struct Place {
    namespace: OwnedFd,
    root: OwnedFd,
}

/// Whose mounts a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This process's own, or those of the first process. With another root there it may stand anywhere in them.
    Host,
    /// A namespace made by a root as this one is, for a process without a user namespace: as containers are made.
    Own,
    /// The process, or the namespace, belongs to another user namespace. Any user may make such a one, and have there what folders of the host he
    /// likes. What root makes there, it makes for him.
    Others,
}

impl Place {
    /// The mounts and the root of a process. The caller makes sure, after this, that the number was still that process's.
    ///
    /// # Errors
    /// It is gone, or this user may not look.
    pub fn of(pid: u32) -> Result<Self> {
        let open = |name: &str, flags| {
            let path = format!("/proc/{pid}/{name}");
            openat(CWD, path, flags | OFlags::CLOEXEC, Mode::empty())
        };
        Ok(Self {
            namespace: open("ns/mnt", OFlags::RDONLY)?,
            root: open("root", OFlags::PATH | OFlags::DIRECTORY)?,
        })
    }

    /// Whose mounts these are, wherever the root is. Process `pid` is the one that they were opened of, and has not ended since.
    ///
    /// # Errors
    /// As stat(2) and ioctl(2).
    pub fn owner(&self, pid: u32) -> Result<Owner> {
        if Namespace::of_file(&self.namespace)?.has_hosts_mounts()? {
            return Ok(Owner::Host);
        }
        let users = match namespace::users_of(&self.namespace) {
            // What may not be seen is none below this one.
            Err(Errno::PERM) => return Ok(Owner::Others),
            users => users?,
        };
        let own = Namespace::of("self", "user")?;
        // One goes into a deeper namespace only: it was in this one when the root was opened.
        let is_own =
            Namespace::of_file(users)? == own && Namespace::of(&pid.to_string(), "user")? == own;
        Ok(if is_own { Owner::Own } else { Owner::Others })
    }

    /// Mounts `from`, a file or a folder, at the same path below the other's root, read-only. Folders that are missing on the way are
    /// made, and so is an empty file for a file.
    ///
    /// # Errors
    /// `LOOP`, `NOTDIR` and `ISDIR` where a symbolic link, a file or a folder lies in the place of something else; `INVAL` for a path that is not absolute and plain. `ROFS` where
    /// nothing can be made; `PERM` without the right to mount; `OVERFLOW` in a file system where this user has no number.
    pub fn mount(&self, from: &Path) -> Result<()> {
        let copy = copy_of(from)?;
        let is_folder = from.is_dir();
        let enter = || {
            // SAFETY: nothing but this thread's root, working directory and mask for new files become its own.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            rustix::process::umask(Mode::from_raw_mode(0o022));
            let kind = Some(LinkNameSpaceType::Mount);
            move_into_link_name_space(self.namespace.as_fd(), kind)?;
            let to = self.place(from, is_folder)?;
            let both =
                MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            move_mount(&copy, "", &to, "", both)
        };
        // The thread has been elsewhere: it does nothing else, and ends.
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, enter);
            let thread = thread.map_err(|_| Errno::AGAIN)?;
            thread.join().unwrap_or(Err(Errno::IO))
        })
    }

    /// Opens the place for a mount, and makes it where it is missing.
    fn place(&self, path: &Path, is_folder: bool) -> Result<OwnedFd> {
        let mut parts = path.components().peekable();
        let mut at = folder(&self.root, OsStr::new("."))?;
        if parts.next() != Some(Component::RootDir) {
            return Err(Errno::INVAL);
        }
        while let Some(part) = parts.next() {
            let Component::Normal(name) = part else {
                return Err(Errno::INVAL);
            };
            at = match is_folder || parts.peek().is_some() {
                true => folder(&at, name)?,
                false => file(&at, name)?,
            };
        }
        Ok(at)
    }
}

/// A copy of the mount at a path, with just what is needed to reach it and what lies in it.
fn copy_of(from: &Path) -> Result<OwnedFd> {
    /// `struct mount_attr`.
    #[repr(C)]
    struct Attributes {
        set: u64,
        clear: u64,
        propagation: u64,
        namespace: u64,
    }
    /// MOUNT_ATTR_RDONLY, _NOSUID, _NODEV and _NOEXEC.
    const LEAST: u64 = 1 | 2 | 4 | 8;
    const MS_PRIVATE: u64 = 1 << 18;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let copy = open_tree(CWD, from, clone)?;
    let attributes = Attributes {
        set: LEAST,
        clear: 0,
        propagation: MS_PRIVATE,
        namespace: 0,
    };
    let args = [
        copy.as_raw_fd().cast_unsigned() as usize,
        c"".as_ptr().expose_provenance(),
        AtFlags::EMPTY_PATH.bits() as usize,
        (&raw const attributes).expose_provenance(),
        size_of::<Attributes>(),
        0,
    ];
    // SAFETY: the kernel reads an empty text and `attributes`.
    unsafe { crate::raw::call(libc::SYS_mount_setattr, args) }?;
    Ok(copy)
}

/// No link is followed: what is opened is what has the name.
const NAMED: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn folder(at: &OwnedFd, name: &OsStr) -> Result<OwnedFd> {
    let open = || openat(at, name, NAMED | OFlags::DIRECTORY, Mode::empty());
    match open() {
        Err(Errno::NOENT) => {
            mkdirat(at, name, Mode::from_raw_mode(0o755))?;
            open()
        }
        opened => opened,
    }
}

fn file(at: &OwnedFd, name: &OsStr) -> Result<OwnedFd> {
    let open = || openat(at, name, NAMED, Mode::empty());
    let opened = match open() {
        Err(Errno::NOENT) => {
            let new = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            openat(at, name, new, Mode::from_raw_mode(0o444))?;
            open()?
        }
        opened => opened?,
    };
    match rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode) {
        rustix::fs::FileType::Symlink => Err(Errno::LOOP),
        rustix::fs::FileType::Directory => Err(Errno::ISDIR),
        _ => Ok(opened),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_made_below_the_root_and_no_link_is_followed() {
        let root = tempfile::tempdir().unwrap();
        let place = Place {
            namespace: openat(CWD, "/proc/self/ns/mnt", OFlags::RDONLY, Mode::empty()).unwrap(),
            root: openat(CWD, root.path(), OFlags::PATH, Mode::empty()).unwrap(),
        };
        assert_eq!(place.owner(std::process::id()), Ok(Owner::Host));
        place.place(Path::new("/run/own/socket"), false).unwrap();
        place.place(Path::new("/run/own/socket"), false).unwrap();
        place.place(Path::new("/run/folder"), true).unwrap();
        let made = root.path().join("run");
        assert!(made.join("own/socket").is_file() && made.join("folder").is_dir());
        std::os::unix::fs::symlink("/tmp", made.join("link")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", made.join("file")).unwrap();
        for (path, is_folder) in [
            ("/run/link/x", false),
            ("/run/link", true),
            ("/run/file", false),
            ("/run/own/socket/x", false),
            ("/run/folder", false),
            ("/run/../x", false),
            ("run/x", false),
        ] {
            let refused = place.place(Path::new(path), is_folder).map(drop);
            let expected = [Errno::LOOP, Errno::NOTDIR, Errno::ISDIR, Errno::INVAL];
            assert!(
                refused.is_err_and(|errno| expected.contains(&errno)),
                "{path}: {refused:?}"
            );
        }
    }
}
