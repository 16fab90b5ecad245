//! The daemon's socket in the file system: one daemon a path, and none left behind.
//!
//! A daemon that was killed leaves its socket file. Nobody listens at it, so connecting is refused:
//! that file is stale and is replaced. Looking and replacing happen under a lock of the folder, so
//! of two daemons that start together one wins and the other sees it.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The name under which a keeper holds the socket.
pub(crate) const NAME: &str = "listener";

/// Why there is no listening at a path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// A live process listens there.
    #[error("{path} is in use: process {pid} ({comm}) serves it", path = path.display())]
    Occupied {
        path: PathBuf,
        pid: u32,
        comm: String,
    },
    /// Something that is no socket of ours is there, and is left alone.
    #[error("{path} exists and is not a stale socket of pageone: remove it, or name another \
             socket ({why})", path = path.display())]
    Foreign { path: PathBuf, why: String },
    /// The system refuses.
    #[error("cannot listen at {path}: {source}", path = path.display())]
    System { path: PathBuf, source: io::Error },
}

/// A listening socket; its file is removed on drop, unless a keeper holds the socket.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    file: (u64, u64),
    kept: bool,
}

impl Listener {
    /// Listens at `path`, for those whom `mode` lets write to it.
    pub(crate) fn bind(path: &Path, mode: u32) -> Result<Self, ListenError> {
        let system = |source| ListenError::System {
            path: path.to_owned(),
            source,
        };
        let _lock = lock_folder(path).map_err(system)?;
        clear(path)?;
        let bind = || {
            let socket = sys::socket::listen(path)?;
            fs::set_permissions(path, Permissions::from_mode(mode))?;
            Ok((socket, identity(path)?))
        };
        let (socket, file) = bind().map_err(system)?;
        let path = path.to_owned();
        Ok(Self {
            socket,
            path,
            file,
            kept: false,
        })
    }

    /// The socket that a former daemon listened with, if it is the one at `path`.
    pub(crate) fn adopt(socket: OwnedFd, path: &Path) -> Option<Self> {
        let there = fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
        let its_own = sys::socket::listening_path(&socket).ok()?;
        if !there || its_own != path {
            return None;
        }
        sys::socket::take_over(&socket).ok()?;
        Some(Self {
            socket,
            path: path.to_owned(),
            file: identity(path).ok()?,
            kept: true,
        })
    }

    /// Leaves the file to those who come after this process.
    pub(crate) fn set_kept(&mut self) {
        self.kept = true;
    }
}

/// Removes a stale socket of a daemon that is gone.
///
/// # Errors
/// Somebody else's file or a live daemon's socket is there, and stays.
pub(crate) fn sweep(path: &Path) -> Result<(), ListenError> {
    let _lock = lock_folder(path).map_err(|source| ListenError::System {
        path: path.to_owned(),
        source,
    })?;
    clear(path)
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another daemon's socket may be there by now, if somebody removed ours.
        if !self.kept && identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

fn lock_folder(path: &Path) -> io::Result<File> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or(Path::new(".")))?;
    flock(&folder, FlockOperation::LockExclusive)?;
    Ok(folder)
}

/// Removes a stale socket at `path`.
fn clear(path: &Path) -> Result<(), ListenError> {
    let foreign = |why: &str| ListenError::Foreign {
        path: path.to_owned(),
        why: why.to_owned(),
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(meta) if !meta.file_type().is_socket() => return Err(foreign("it is no socket")),
        _ => {}
    }
    match sys::socket::connect(path) {
        Ok(connection) => {
            let pid = sys::socket::peer(&connection).map_or(0, |peer| peer.pid);
            Err(ListenError::Occupied {
                path: path.to_owned(),
                pid,
                comm: sys::process::comm(pid),
            })
        }
        Err(Errno::CONNREFUSED) => {
            tracing::info!("replacing the stale socket {}", path.display());
            fs::remove_file(path).map_err(|source| ListenError::System {
                path: path.to_owned(),
                source,
            })
        }
        Err(error) => Err(foreign(&io::Error::from(error).to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_occupied_socket_is_refused_and_a_stale_one_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = Listener::bind(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let error = Listener::bind(&path, 0o600).unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()), "{error}");
        drop(first);
        assert!(!path.exists(), "left behind");
        drop(sys::socket::listen(&path).unwrap());
        assert!(path.exists(), "a stale socket");
        let second = Listener::bind(&path, 0o666).unwrap();
        sys::socket::connect(&path).unwrap();
        drop(second);
    }

    #[test]
    fn a_kept_socket_is_taken_over_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let mut first = Listener::bind(&path, 0o600).unwrap();
        first.set_kept();
        let copy = || first.socket.try_clone().unwrap();
        assert!(Listener::adopt(copy(), &folder.path().join("t")).is_none());
        let (end, _) = sys::socket::pair().unwrap();
        assert!(Listener::adopt(end, &path).is_none());
        let second = Listener::adopt(copy(), &path).unwrap();
        let waiting = sys::socket::connect(&path).unwrap();
        drop(first);
        assert!(path.exists());
        let caller = sys::socket::accept(&second).unwrap();
        assert_eq!(sys::socket::peer(&waiting).unwrap().pid, std::process::id());
        assert!(sweep(&path).is_err(), "it is in use");
        drop((second, caller));
        sweep(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn what_is_not_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "precious").unwrap();
        let error = Listener::bind(&file, 0o600).unwrap_err().to_string();
        assert!(error.contains("no socket"), "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"precious");

        let stream = folder.path().join("stream");
        let _other = std::os::unix::net::UnixListener::bind(&stream).unwrap();
        let error = Listener::bind(&stream, 0o600).unwrap_err();
        assert!(matches!(error, ListenError::Foreign { .. }), "{error}");

        let nowhere = folder.path().join("no/such/folder");
        let error = Listener::bind(&nowhere, 0o600).unwrap_err();
        assert!(matches!(error, ListenError::System { .. }), "{error}");
    }

    #[test]
    fn a_successors_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = Listener::bind(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        let second = Listener::bind(&path, 0o600).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
    }
}
