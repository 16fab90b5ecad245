//! The daemon's socket, mounted in a container that lacks it.
//!
//! The agent connects by the socket's path, now and after each restart of the daemon. So the path has to lead there in the mounts of its
//! process, too. With `--mount` this command sees to that: it mounts the socket's folder, read-only, if nothing else lies in it. Else it
//! mounts the socket alone, which is the old one after a restart of the daemon.
//!
//! What a container gets by this: each of its processes may connect to the daemon, as each process of the host may. The mount stays until the
//! container ends.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use sys::bind::Place;

use super::target::{Target, no_right};

/// What is to be mounted for a process.
pub(super) struct Missing<'a> {
    place: Place,
    what: &'a Path,
}

impl<'a> Missing<'a> {
    /// What the process lacks, to reach the daemon at `socket`.
    ///
    /// # Errors
    /// It has the host's mounts.
    pub(super) fn of(target: &Target, socket: &'a Path) -> Result<Self> {
        let place = Place::of(target.pid).map_err(|errno| no_right(errno.into()))?;
        // The number was this process's until here.
        target.memory_while_held()?;
        if place.is_own()? {
            bail!(
                "it has another root in this command's own mounts (chroot): mount the daemon's socket below it by hand"
            );
        }
        let what = match socket.parent() {
            Some(folder) if is_sockets_own(folder, socket) => folder,
            _ => socket,
        };
        Ok(Self { place, what })
    }

    /// Mounts it.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn mount(&self) -> Result<()> {
        let mounted = self.place.mount(self.what);
        let why = || {
            let remedy = match mounted {
                Err(Errno::ROFS) => {
                    ", for its root cannot be written: make its parent folder in the image"
                }
                Err(Errno::LOOP | Errno::NOTDIR) => ": a link or a file is on the way",
                Err(Errno::OVERFLOW) => ", in a user namespace: have its root make the folder",
                Err(Errno::NOSYS | Errno::INVAL) => ": it takes Linux 5.12, and a plain path",
                _ => "",
            };
            format!("cannot mount {} there{remedy}", self.what.display())
        };
        mounted.with_context(why)
    }

    /// What is to be said of it.
    pub(super) fn told(&self, done: bool) -> String {
        let word = if done { "is" } else { "would be" };
        format!("; {} {word} mounted in its container", self.what.display())
    }
}

/// Whether a folder holds the daemon's socket and its lock alone.
fn is_sockets_own(folder: &Path, socket: &Path) -> bool {
    let Some(name) = socket.file_name() else {
        return false;
    };
    let is_daemons = |entry: std::io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.file_name().as_bytes().starts_with(name.as_bytes()))
    };
    fs::read_dir(folder).is_ok_and(|mut entries| entries.all(is_daemons))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_other_things_is_not_mounted() {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("pageone.sock");
        for name in ["pageone.sock", "pageone.sock.lock"] {
            fs::write(place.path().join(name), "").unwrap();
        }
        assert!(is_sockets_own(place.path(), &socket));
        fs::write(place.path().join("other"), "").unwrap();
        assert!(!is_sockets_own(place.path(), &socket));
    }
}
