//! The daemon's socket in the file system: one daemon a path, and none left behind.
//!
//! A daemon that was killed leaves its socket file. No process listens at it, so connecting is refused:
//! that file is stale and is replaced. Looking and replacing happen under a lock, so
//! of two daemons that start together one wins and the other sees it.
//!
//! The lock is that of a file beside the socket, `SOCKET.lock`, which only the daemon's user can open. The folder
//! itself would do, were it not that any user who may read it can lock it (flock(2) asks for no right to
//! write). He could keep the daemon from starting for as long. The file stays when the daemon ends: of two that wait for the lock of a
//! file that a third removes, each would have a lock of its own.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::flock;

/// So long a lock is waited for, which daemons hold for a moment.
const PATIENCE: Duration = Duration::from_secs(10);
/// The name under which a keeper holds the socket.
pub(crate) const NAME: &str = "listener";

/// Why there is no listening at a path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// A live process listens there.
    #[error("{path} is in use: {by} serves it", path = path.display())]
    Occupied { path: PathBuf, by: String },
    /// Something that is no socket of ours is there, and is left alone.
    #[error("{path} {what}: it is left alone; name another place by --socket", path = path.display())]
    Foreign { path: PathBuf, what: String },
    /// No socket can have such a path.
    #[error("{path} is too long for a socket, whose path has at most 107 bytes", path = path.display())]
    Long { path: PathBuf },
    /// The lock's file may be locked by others too.
    #[error("{path} is not a lock of this daemon's own: {why}; remove it, or name a socket in a \
             folder where other users cannot make files", path = path.display())]
    Lock { path: PathBuf, why: String },
    /// The system refuses.
    #[error("cannot listen at {path}{more}", path = path.display())]
    System {
        path: PathBuf,
        /// A word on its folder, as it was then: that of an engine of `run`'s own is gone when this is shown.
        more: &'static str,
        source: io::Error,
    },
}

impl ListenError {
    fn system(path: &Path, source: io::Error) -> Self {
        Self::System {
            path: path.to_owned(),
            more: wrong_folder(path),
            source,
        }
    }
}

/// A word on a path whose folder is not there, or takes no socket.
fn wrong_folder(path: &Path) -> &'static str {
    let missing = |folder: &Path| !folder.as_os_str().is_empty() && !folder.exists();
    let closed = |folder: &Path| rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_err();
    match path.parent() {
        Some(folder) if missing(folder) => " (its folder is not there)",
        Some(folder) if !folder.as_os_str().is_empty() && closed(folder) => {
            " (this user may not make files in its folder: name another place by --socket)"
        }
        _ => "",
    }
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
        let system = |source| ListenError::system(path, source);
        // Before the lock, too: a path that is refused gets no file beside it.
        look(path)?;
        let _lock = lock(path)?;
        clear(path, "replacing the stale socket")?;
        let bind = || {
            let socket = sys::socket::listen(path)?;
            rustix::io::ioctl_fionbio(&socket, true)?;
            set_mode(path, mode)?;
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
        rustix::io::ioctl_fionbio(&socket, true).ok()?;
        Some(Self {
            socket,
            path: path.to_owned(),
            file: identity(path).ok()?,
            kept: true,
        })
    }

    /// Has those who connect see that this process listens, though another one opened the socket.
    pub(crate) fn take_over(&self) -> io::Result<()> {
        Ok(sys::socket::take_over(&self.socket)?)
    }

    /// Leaves the file to those who come after this process.
    pub(crate) fn set_kept(&mut self) {
        self.kept = true;
    }
}

/// Removes a stale socket of a daemon that is gone.
///
/// # Errors
/// Another program's file or a live daemon's socket is there, and stays.
pub(crate) fn sweep(path: &Path) -> Result<(), ListenError> {
    let _lock = lock(path)?;
    clear(path, "removing the socket")
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another daemon's socket may be there by now, if ours was removed.
        if !self.kept && identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

/// Gives the socket at `path` its mode, and no other file: a user who may write to the folder may put a link there meanwhile.
fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let meta = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if !meta.file_type().is_socket() || meta.uid() != own || meta.nlink() != 1 {
        return Err(io::Error::other("another file came to this path"));
    }
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::set_permissions(itself, Permissions::from_mode(mode))
}

/// Waits for the lock of `socket`, which only processes of this user and root can hold.
fn lock(socket: &Path) -> Result<File, ListenError> {
    let mut name = OsString::from(socket);
    name.push(".lock");
    let path = PathBuf::from(name);
    let system = |source| ListenError::system(socket, source);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600);
    // Not through a link of another user's, and no wait at another user's pipe.
    let options = options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    let file = match options.open(&path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            return Err(foreign_lock(&path, "it is a symbolic link".to_owned()));
        }
        opened => opened.map_err(system)?,
    };
    let meta = file.metadata().map_err(system)?;
    let own = rustix::process::geteuid().as_raw();
    let why = match meta {
        _ if !meta.is_file() => "it is no regular file".to_owned(),
        _ if meta.uid() != own => format!("it belongs to user {}", meta.uid()),
        _ if meta.mode() & 0o077 != 0 => "other users can open it".to_owned(),
        _ if meta.nlink() != 1 => "it has a second name".to_owned(),
        _ => {
            // A umask may have taken the right to it from its own user, and the next daemon's.
            let own = fs::Permissions::from_mode(0o600);
            file.set_permissions(own).map_err(system)?;
            let held = "another process holds it (`lslocks` shows which)";
            match flock::within(&file, PATIENCE) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK) => held.to_owned(),
                Err(error) => return Err(system(error.into())),
            }
        }
    };
    Err(foreign_lock(&path, why))
}

fn foreign_lock(path: &Path, why: String) -> ListenError {
    ListenError::Lock {
        path: path.to_owned(),
        why,
    }
}

/// Removes a stale socket at `path`, with a word of the log on what is done.
fn clear(path: &Path, word: &str) -> Result<(), ListenError> {
    if !look(path)? {
        return Ok(());
    }
    tracing::info!("{word} {}", path.display());
    fs::remove_file(path).map_err(|source| ListenError::system(path, source))
}

/// Whether a stale socket is at `path`; what else is there is refused.
fn look(path: &Path) -> Result<bool, ListenError> {
    let foreign = |what: &str| ListenError::Foreign {
        path: path.to_owned(),
        what: what.to_owned(),
    };
    if SocketAddrUnix::new(path) == Err(Errno::NAMETOOLONG) {
        let path = path.to_owned();
        return Err(ListenError::Long { path });
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(ListenError::system(path, source)),
        Ok(meta) if !meta.file_type().is_socket() => return Err(foreign("is no socket")),
        _ => {}
    }
    // A daemon that was killed and cannot end has its socket still, and accepts nothing.
    match sys::socket::connect_at_once(path) {
        Ok(connection) => {
            let pid = sys::socket::peer(&connection).map_or(0, |peer| peer.pid);
            let by = match pid {
                0 => "a process outside this PID namespace".to_owned(),
                _ => format!("process {pid} ({})", sys::process::comm(pid)),
            };
            let path = path.to_owned();
            Err(ListenError::Occupied { path, by })
        }
        Err(Errno::CONNREFUSED) => Ok(true),
        Err(Errno::AGAIN) => Err(foreign("is in use, and its queue is full")),
        Err(Errno::PROTOTYPE) => Err(foreign("is another program's socket")),
        Err(error) => Err(foreign(&format!(
            "cannot be looked at ({})",
            io::Error::from(error)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FlockOperation, flock};

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
    fn the_mode_goes_to_no_file_that_came_to_the_sockets_path() {
        let folder = tempfile::tempdir().unwrap();
        let [secret, link, socket] =
            ["secret", "link", "socket"].map(|name| folder.path().join(name));
        fs::write(&secret, "").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        for path in [&secret, &link] {
            set_mode(path, 0o666).unwrap_err();
            assert_eq!(mode(&secret), 0o600);
        }
        let _socket = sys::socket::listen(&socket).unwrap();
        set_mode(&socket, 0o606).unwrap();
        assert_eq!(mode(&socket), 0o606);
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        set_mode(&link, 0o666).unwrap_err();
        assert_eq!(mode(&socket), 0o606);
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
        assert_eq!(error.matches("no socket").count(), 1, "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"precious");

        let stream = folder.path().join("stream");
        let _other = std::os::unix::net::UnixListener::bind(&stream).unwrap();
        let error = Listener::bind(&stream, 0o600).unwrap_err();
        assert!(matches!(error, ListenError::Foreign { .. }), "{error}");

        let nowhere = folder.path().join("no/such/folder");
        let error = Listener::bind(&nowhere, 0o600).unwrap_err();
        assert!(
            error.to_string().contains("its folder is not there"),
            "{error}"
        );
        let gone = tempfile::tempdir().unwrap();
        let error = ListenError::system(&gone.path().join("s"), io::ErrorKind::Other.into());
        drop(gone);
        assert!(!error.to_string().contains("folder"), "{error}");

        let long = folder.path().join("x".repeat(200));
        let error = Listener::bind(&long, 0o600).unwrap_err();
        assert!(matches!(error, ListenError::Long { .. }), "{error}");

        let names = fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["file", "stream"], "a refused path gets no lock");
    }

    #[test]
    fn a_lock_that_others_could_hold_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let lock = folder.path().join("s.lock");
        let refused = || match Listener::bind(&path, 0o600) {
            Err(ListenError::Lock { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        std::os::unix::fs::symlink(folder.path().join("t"), &lock).unwrap();
        assert!(refused().contains("symbolic link"));
        assert!(!folder.path().join("t").exists(), "followed");
        fs::remove_file(&lock).unwrap();
        fs::write(&lock, "").unwrap();
        fs::set_permissions(&lock, Permissions::from_mode(0o640)).unwrap();
        assert!(refused().contains("other users can open"));
        fs::set_permissions(&lock, Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&lock, folder.path().join("u")).unwrap();
        assert!(refused().contains("second name"));
        fs::remove_file(folder.path().join("u")).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&lock, Some(61_001), None).unwrap();
            assert!(refused().contains("user 61001"));
            std::os::unix::fs::chown(&lock, Some(0), None).unwrap();
        }
        drop(Listener::bind(&path, 0o600).unwrap());
        assert_eq!(fs::metadata(&lock).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_locked_folder_is_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let held = File::open(folder.path()).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        drop(Listener::bind(&folder.path().join("s"), 0o600).unwrap());
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
