//! The daemon's socket, mounted in a container that lacks it.
//!
//! The agent connects by the socket's path, now and after each restart of the daemon. So the path has to lead there in the mounts of its
//! process, too. With `--mount` this command sees to that: it mounts the socket's folder, read-only, if nothing else lies in it. Else it
//! mounts the socket alone, which is the old one after a restart of the daemon.
//!
//! By this each process of a container may connect to the daemon, as each process of the host may. The mount stays until
//! the container ends.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use sys::bind::{Owner, Place};

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
    /// It has the host's mounts, or those of a user namespace.
    pub(super) fn of(target: &Target, socket: &'a Path) -> Result<Self> {
        let place = Place::of(target.pid).map_err(no_right)?;
        // The number was this process's until here.
        target.memory_while_held()?;
        match place.owner(target.pid)? {
            Owner::Own => {}
            Owner::Host => bail!(
                "it has another root in the host's mounts (chroot): mount the daemon's socket below it by hand"
            ),
            Owner::Others => bail!(
                "its container belongs to a user namespace, in whose mounts nothing is made: give it the socket's folder when it is started"
            ),
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
                    ", for its root cannot be written: make the socket's folder in the image"
                }
                Err(Errno::LOOP | Errno::NOTDIR | Errno::ISDIR) => {
                    ": a link, a file or a folder lies in the place of something else"
                }
                Err(Errno::NOSYS) => ": it takes Linux 5.12",
                Err(Errno::INVAL) => {
                    ": it takes a plain path, and a root that is one of its mounts"
                }
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

/// Whether a folder holds the daemon's socket alone, and what lies beside it: its lock, and the notes of starts.
fn is_sockets_own(folder: &Path, socket: &Path) -> bool {
    let mut lock = socket.as_os_str().to_owned();
    lock.push(".lock");
    let known = [
        socket.into(),
        PathBuf::from(lock),
        socket.with_extension("starts"),
    ];
    let is_daemons = |entry: std::io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| known.contains(&folder.join(entry.file_name())))
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
        for name in ["pageone.sock", "pageone.sock.lock", "pageone.starts"] {
            fs::write(place.path().join(name), "").unwrap();
        }
        assert!(is_sockets_own(place.path(), &socket));
        for name in ["other", "pageone.sock.bak", "pageone-attach.sock"] {
            let other = place.path().join(name);
            fs::write(&other, "").unwrap();
            assert!(!is_sockets_own(place.path(), &socket), "{name}");
            fs::remove_file(other).unwrap();
        }
    }
}
