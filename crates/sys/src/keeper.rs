//! Descriptors that outlive the process that made them: systemd's descriptor store, both ends.
//!
//! A service hands descriptors to its keeper over a datagram socket ([`Keeper`]), each with a name;
//! the keeper starts the service's next process with them as its descriptors 3, 4, … ([`spawn`],
//! [`inherited`]). The keeper is systemd, or a parent that speaks the same protocol ([`Inbox`]).
//!
//! A message is in the keeper's queue, descriptors and all, as soon as it was sent: it arrives also
//! when the sender is killed the moment after. But nothing tells the sender whether the keeper took
//! it (there may be too many): a program that relies on kept descriptors has to find out afterwards.
//!
//! Both ends are here because a crate for the first is a third of this file and has no second.
//!
//! Source: sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3), systemd.exec(5).

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::socket;

/// The longest name of a descriptor.
pub const MAX_NAME: usize = 255;
/// The longest message.
const MAX_MESSAGE: usize = 4096;
/// How long a full queue is waited for.
const PATIENCE: Duration = Duration::from_secs(2);
/// The first descriptor a process inherits beside its standard ones.
const FIRST: RawFd = 3;

/// A descriptor and its name.
#[derive(Debug)]
pub struct Kept {
    /// Printable ASCII without a colon, at most [`MAX_NAME`] bytes.
    pub name: String,
    /// The descriptor.
    pub descriptor: OwnedFd,
}

/// Whether a keeper takes `name`.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let plain = |byte: u8| (b' '..=b'~').contains(&byte) && byte != b':';
    !name.is_empty() && name.len() <= MAX_NAME && name.bytes().all(plain)
}

/// The descriptors that a keeper gave to this process (`LISTEN_FDS`). The first call takes them;
/// later ones get none. To be called before other descriptors are opened.
#[must_use]
pub fn inherited() -> Vec<Kept> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    let ours = number("LISTEN_PID") == Some(std::process::id());
    if !ours || TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").and_then(|count| RawFd::try_from(count).ok());
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').chain(std::iter::repeat("unknown"));
    let mut kept = Vec::new();
    for (raw, name) in (FIRST..FIRST.saturating_add(count.unwrap_or(0))).zip(names) {
        // SAFETY: the call reads and sets a flag; a number that is no descriptor gives an error.
        if unsafe { libc::fcntl(raw, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
            break;
        }
        kept.push(Kept {
            name: name.to_owned(),
            // SAFETY: open, as just seen; the process that started this one left it to us, by our own
            // process id, and the flag above lets no call take it a second time.
            descriptor: unsafe { OwnedFd::from_raw_fd(raw) },
        });
    }
    kept
}

/// The way to this process's keeper.
#[derive(Debug)]
pub struct Keeper(OwnedFd);

impl Keeper {
    /// The keeper that `NOTIFY_SOCKET` names; `None` when there is none.
    ///
    /// # Errors
    /// Whatever socket(2) and connect(2) give; `AFNOSUPPORT` for an address that is not Unix's.
    pub fn from_env() -> io::Result<Option<Self>> {
        let address = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty());
        address.map(|address| Self::at(&address)).transpose()
    }

    /// The keeper at an address: a path, or a name after `@`.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn at(address: &OsStr) -> io::Result<Self> {
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
            [b'/', ..] => SocketAddrUnix::new(address)?,
            _ => return Err(Errno::AFNOSUPPORT.into()),
        };
        let socket = datagram()?;
        net::connect(&socket, &address)?;
        // A keeper that takes nothing must not hold up a process that tells it something.
        net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Send, Some(PATIENCE))?;
        Ok(Self(socket))
    }

    /// Hands a descriptor over, to be given to the next process.
    ///
    /// # Errors
    /// `INVAL` for something that is no name; whatever sendmsg(2) gives.
    pub fn keep(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        named(name)?;
        let message = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}\n");
        Ok(socket::send(&self.0, message.as_bytes(), &[descriptor])?)
    }

    /// Takes all descriptors of this name back.
    ///
    /// # Errors
    /// As [`keep`](Self::keep).
    pub fn forget(&self, name: &str) -> io::Result<()> {
        named(name)?;
        let message = format!("FDSTOREREMOVE=1\nFDNAME={name}\n");
        Ok(socket::send(&self.0, message.as_bytes(), &[])?)
    }

    /// Tells that this process serves.
    ///
    /// # Errors
    /// Whatever sendmsg(2) gives.
    pub fn ready(&self) -> io::Result<()> {
        Ok(socket::send(&self.0, b"READY=1\n", &[])?)
    }
}

fn named(name: &str) -> io::Result<()> {
    match is_name(name) {
        true => Ok(()),
        false => Err(Errno::INVAL.into()),
    }
}

fn datagram() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
}

/// What a process tells its keeper.
#[derive(Debug)]
pub enum Note {
    /// Keep these descriptors under a name.
    Keep(String, Vec<OwnedFd>),
    /// Keep the descriptors of this name no longer.
    Forget(String),
    /// The process serves.
    Ready,
    /// Something that this keeper takes no interest in.
    Other,
}

impl Note {
    fn new(text: &str, descriptors: Vec<OwnedFd>) -> Self {
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
        let name = value("FDNAME=").filter(|name| is_name(name));
        match name {
            Some(name) if value("FDSTORE=") == Some("1") => Self::Keep(name.into(), descriptors),
            Some(name) if value("FDSTOREREMOVE=") == Some("1") => Self::Forget(name.into()),
            _ if value("READY=") == Some("1") => Self::Ready,
            // Descriptors of `BARRIER=1` are closed here, which is its answer.
            _ => Self::Other,
        }
    }
}

/// Where a keeper receives.
#[derive(Debug)]
pub struct Inbox(OwnedFd);

impl Inbox {
    /// Receives at `path`, which must not exist yet. Each process that may write to it is trusted: put it
    /// into a folder of one's own.
    ///
    /// # Errors
    /// Whatever socket(2) and bind(2) give.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let socket = datagram()?;
        net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self(socket))
    }

    /// The next note; `None` when none waits.
    ///
    /// # Errors
    /// Whatever recvmsg(2) gives. A message too long is an [`Note::Other`].
    pub fn next(&self) -> io::Result<Option<Note>> {
        let mut buffer = [0; MAX_MESSAGE];
        let mut received = match socket::recv(&self.0, &mut buffer) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::MSGSIZE) => return Ok(Some(Note::Other)),
            Err(error) => return Err(error.into()),
        };
        let descriptors = received.descriptors.iter_mut().filter_map(Option::take);
        let descriptors = descriptors.collect();
        let text = buffer.get(..received.len).unwrap_or_default();
        let text = String::from_utf8_lossy(text);
        Ok(Some(Note::new(&text, descriptors)))
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Starts `command` with `kept` as its descriptors 3, 4, … and the environment that names them; no
/// signal is blocked in it, and it gets `SIGTERM` when this process ends; `prepare` runs in it
/// before. Gives its process id.
///
/// # Errors
/// `Deadlock` when this process has other threads: only one without may prepare its child in the
/// child. Whatever fork(2) gives; a command that cannot be executed ends with 127.
pub fn spawn(
    mut command: Command,
    kept: &[Kept],
    prepare: impl FnOnce() -> io::Result<()>,
) -> io::Result<u32> {
    let parent = std::process::id();
    let child = crate::process::fork(|| {
        let error = crate::signals::begin_child(parent)
            .and_then(|()| prepare())
            .and_then(|()| place(kept))
            .map_or_else(|error| error, |()| execute(&mut command, kept));
        let program = command.get_program();
        let text = format!("pageone: cannot start {program:?}: {error}\n");
        let _ = io::stderr().write_all(text.as_bytes());
        127
    })?;
    Ok(child.as_raw_nonzero().get().unsigned_abs())
}

fn execute(command: &mut Command, kept: &[Kept]) -> io::Error {
    let names: Vec<_> = kept.iter().map(|kept| kept.name.as_str()).collect();
    command
        .env("LISTEN_PID", std::process::id().to_string())
        .env("LISTEN_FDS", kept.len().to_string())
        .env("LISTEN_FDNAMES", names.join(":"))
        .exec()
}

/// Puts `kept` at descriptors 3, 4, …, to stay open over an exec, in a child just forked.
fn place(kept: &[Kept]) -> io::Result<()> {
    let end = RawFd::try_from(kept.len()).map_or(RawFd::MAX, |count| FIRST.saturating_add(count));
    // First out of the way of their own places.
    let mut aside = Vec::with_capacity(kept.len());
    for kept in kept {
        aside.push(rustix::io::fcntl_dupfd_cloexec(&kept.descriptor, end)?);
    }
    for (at, descriptor) in (FIRST..).zip(&aside) {
        // SAFETY: what was open at `at` belongs to this child's copy of its parent's descriptors,
        // of which nothing is used any more but `aside`, which lies above.
        if unsafe { libc::dup2(descriptor.as_raw_fd(), at) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd::Lifeline;

    fn pair() -> (Keeper, Inbox, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let inbox = Inbox::bind(&path).unwrap();
        (Keeper::at(path.as_os_str()).unwrap(), inbox, folder)
    }

    #[test]
    fn descriptors_are_handed_over_and_taken_back_by_name() {
        let (keeper, inbox, _folder) = pair();
        let (line, _held) = Lifeline::new().unwrap();
        keeper.keep("a name, with %20", line.as_fd()).unwrap();
        keeper.forget("another").unwrap();
        keeper.ready().unwrap();
        drop(keeper);
        let note = inbox.next().unwrap().unwrap();
        let Note::Keep(name, descriptors) = note else {
            panic!("{note:?}");
        };
        assert_eq!((name.as_str(), descriptors.len()), ("a name, with %20", 1));
        let number = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        assert_eq!(number(descriptors[0].as_fd()), number(line.as_fd()));
        let note = inbox.next().unwrap().unwrap();
        assert!(
            matches!(&note, Note::Forget(name) if name == "another"),
            "{note:?}"
        );
        assert!(matches!(inbox.next().unwrap(), Some(Note::Ready)));
        assert!(inbox.next().unwrap().is_none());
    }

    #[test]
    fn what_is_no_name_is_refused_at_both_ends() {
        let (keeper, inbox, _folder) = pair();
        let (line, _held) = Lifeline::new().unwrap();
        for name in ["", "a:b", "a\nb", "ä", &"x".repeat(256)] {
            assert!(keeper.keep(name, line.as_fd()).is_err(), "{name:?}");
            assert!(keeper.forget(name).is_err(), "{name:?}");
            let forged = format!("FDSTORE=1\nFDNAME={name}");
            socket::send(&keeper.0, forged.as_bytes(), &[line.as_fd()]).unwrap();
            match inbox.next().unwrap().unwrap() {
                Note::Other => {}
                Note::Keep(taken, _) => assert_eq!((name, taken.as_str()), ("a\nb", "a")),
                note => panic!("{note:?}"),
            }
        }
        assert!(is_name(&"x".repeat(255)));
        let long = [b'x'; 5000];
        socket::send(&keeper.0, &long, &[]).unwrap();
        assert!(matches!(inbox.next().unwrap(), Some(Note::Other)));
    }

    #[test]
    fn an_address_that_is_not_unixs_is_refused() {
        for address in ["vsock:2:1234", "relative"] {
            let error = Keeper::at(OsStr::new(address)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EAFNOSUPPORT));
        }
    }
}
