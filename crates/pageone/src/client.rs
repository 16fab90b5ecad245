//! The command line's side of a control connection.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use humantime::format_duration;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use sys::foreign::Foreign;
use wire::{DomainOf, Hello, MAX_MESSAGE, Name, Reply, ReplyReader, Request, Role};

use crate::output::say;
use crate::paths;

/// What is said of a reply that is none to the question.
pub(crate) const UNEXPECTED: &str =
    "the daemon sent an unexpected reply; it may be of another version: restart it";

/// What is said where a process number of this command means another process to the daemon.
pub(crate) const OTHER_NUMBERS: &str = "the daemon is in another PID namespace (a container's, or the host's), and knows processes by \
    other numbers: ask where it runs, by the numbers there";

/// A daemon may be silent for so long before the user is told.
const SILENCE: Duration = Duration::from_secs(2);

/// The longest wait for the daemon's word on a domain.
const RULING: Duration = Duration::from_secs(5);

/// Asks the daemon at `socket`, and waits for its reply for `patience` at most. After some two seconds of silence it says on
/// standard error for what it waits.
///
/// # Errors
/// No daemon, no reply in time, or not one of this protocol.
pub(crate) fn ask(socket: &Path, request: &Request, patience: Duration) -> Result<Reply> {
    talk(socket, request, patience, |daemon| {
        let longest = format_duration(patience);
        say(&format!(
            "pageone: {daemon} does not answer; waiting up to {longest}…"
        ));
    })
}

/// As [`ask`], but says nothing meanwhile: for work that may take long, and for views with a place of their own for such words.
///
/// # Errors
/// As [`ask`].
pub(crate) fn ask_quietly(socket: &Path, request: &Request, patience: Duration) -> Result<Reply> {
    talk(socket, request, patience, |_| ())
}

/// Asks which domain another process would have as a guest that asks for `name` (empty: for none), if it began then.
///
/// # Errors
/// As [`ask`].
pub(crate) fn domain_of(socket: &Path, pid: u32, began: u64, name: &str) -> Result<Reply> {
    let name = name.to_owned();
    let request = Request::DomainOf(DomainOf { pid, began, name });
    ask_quietly(socket, &request, RULING)
}

/// Whether the daemon at `socket` knows processes by the numbers that this one sees. Where it cannot be told, or none serves, it does.
pub(crate) fn shares_numbers(socket: &Path) -> bool {
    let connection = sys::socket::connect(socket).ok();
    let peer = connection.and_then(|connection| sys::socket::peer(&connection).ok());
    let shares = peer.and_then(|peer| sys::process::shares_numbers(peer.pid));
    shares.unwrap_or(true)
}

fn talk(
    socket: &Path,
    request: &Request,
    patience: Duration,
    tell: impl FnOnce(&Daemon<'_>),
) -> Result<Reply> {
    let mut daemon = Daemon { socket, pid: None };
    let mut wait = Wait::new(patience, tell);
    let connection = connect(&mut daemon, &mut wait)?;
    set_socket_timeout(&connection, Timeout::Send, Some(patience))?;
    let hello = Hello {
        role: Role::Control,
        domain: Name::default(),
    };
    let mut packet = [0; MAX_MESSAGE];
    let len = hello.encode(&mut packet);
    let mut exchange = || -> Result<Option<Reply>> {
        sys::socket::send(&connection, &packet[..len], &[])?;
        sys::socket::send(&connection, &serde_json::to_vec(request)?, &[])?;
        let reply = receive(&connection, &daemon, &mut wait)?;
        Ok(reply
            .map(|json| serde_json::from_slice(&json))
            .transpose()?)
    };
    let answer = exchange().with_context(|| format!("no reply from {daemon}"))?;
    // A reason may quote names that others chose.
    match answer {
        None => Err(silent(&daemon, patience)),
        Some(Reply::Refused(why)) => Ok(Reply::Refused(Foreign(&why).to_string())),
        Some(Reply::Crowded(why)) => Ok(Reply::Crowded(Foreign(&why).to_string())),
        Some(Reply::Turned(why)) => Ok(Reply::Turned(Foreign(&why).to_string())),
        Some(reply) => Ok(reply),
    }
}

/// Connects as soon as the daemon's queue of callers has a place.
fn connect<T: FnOnce(&Daemon<'_>)>(daemon: &mut Daemon<'_>, wait: &mut Wait<T>) -> Result<OwnedFd> {
    let connection = loop {
        let Some(left) = wait.next(daemon) else {
            return Err(silent(daemon, wait.patience));
        };
        match sys::socket::connect_within(daemon.socket, left) {
            Ok(connection) => break connection,
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(absent(daemon.socket, error)),
        }
    };
    // One of another PID namespace has no number here.
    let peer = sys::socket::peer(&connection);
    daemon.pid = peer.ok().map(|peer| peer.pid).filter(|&pid| pid > 0);
    Ok(connection)
}

/// The reply; none when the time is up.
fn receive<T: FnOnce(&Daemon<'_>)>(
    connection: &OwnedFd,
    daemon: &Daemon<'_>,
    wait: &mut Wait<T>,
) -> Result<Option<Vec<u8>>> {
    let mut reader = ReplyReader::default();
    let mut packet = vec![0; MAX_MESSAGE];
    while let Some(left) = wait.next(daemon) {
        if !sys::process::wait_readable(connection, left)? {
            continue;
        }
        let got = sys::socket::recv(connection, &mut packet)?.len;
        if let Some(reply) = reader.push(&packet[..got])? {
            return Ok(Some(reply));
        }
    }
    Ok(None)
}

/// A wait for a daemon: until when, and by whom its silence is told, once.
struct Wait<T> {
    begun: Instant,
    patience: Duration,
    tell: Option<T>,
}

impl<T: FnOnce(&Daemon<'_>)> Wait<T> {
    fn new(patience: Duration, tell: T) -> Self {
        Self {
            begun: Instant::now(),
            patience,
            tell: Some(tell),
        }
    }

    /// How long to wait before this is asked again; none when the time is up.
    fn next(&mut self, daemon: &Daemon<'_>) -> Option<Duration> {
        let waited = self.begun.elapsed();
        if waited >= SILENCE
            && let Some(tell) = self.tell.take()
        {
            tell(daemon);
        }
        let until = match self.tell {
            Some(_) => SILENCE.min(self.patience),
            None => self.patience,
        };
        let left = until.saturating_sub(waited);
        (waited < self.patience).then_some(left.max(Duration::from_millis(1)))
    }
}

/// A daemon, as its users know it.
struct Daemon<'a> {
    socket: &'a Path,
    /// Its process, once there is a connection.
    pid: Option<u32>,
}

impl fmt::Display for Daemon<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the daemon at {}", self.socket.display())?;
        self.pid.map_or(Ok(()), |pid| write!(f, " (process {pid})"))
    }
}

/// There was no answer in time.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Silent(String);

/// Why there was no answer in time, and what to do.
fn silent(daemon: &Daemon<'_>, patience: Duration) -> anyhow::Error {
    let waited = format_duration(patience);
    let remedy = match daemon.pid.filter(|&pid| is_stopped(pid)) {
        Some(pid) => format!("it is stopped; `kill -CONT {pid}` lets it go on"),
        None if paths::has_unit() => {
            "it hangs or is busy; see `systemctl status pageone`".to_owned()
        }
        None => "it hangs or is busy; see its log".to_owned(),
    };
    Silent(format!("{daemon} did not answer within {waited}: {remedy}")).into()
}

/// Whether a signal or a debugger has stopped the process.
fn is_stopped(pid: u32) -> bool {
    let process = i32::try_from(pid).map(procfs::process::Process::new);
    let stat = process.ok().and_then(|process| process.ok()?.stat().ok());
    stat.is_some_and(|stat| matches!(stat.state, 'T' | 't'))
}

/// Why no daemon was reached at `socket`.
pub(crate) fn absent(socket: &Path, error: Errno) -> anyhow::Error {
    use std::os::unix::fs::FileTypeExt;
    let at = socket.display();
    let other = |meta: std::fs::Metadata| !meta.file_type().is_socket();
    match error {
        _ if std::fs::metadata(socket).is_ok_and(other) => anyhow::anyhow!("{at} is no socket"),
        Errno::NOENT => anyhow::anyhow!(
            "no daemon at {at}: start one with `{}`",
            paths::daemon_at(socket)
        ),
        Errno::CONNREFUSED => anyhow::anyhow!(
            "no daemon at {at}: the one that made this socket has ended; start one with `{}`",
            paths::daemon_at(socket)
        ),
        Errno::ACCESS => anyhow::anyhow!("this user may not talk to the daemon at {at}"),
        other => anyhow::Error::new(io::Error::from(other))
            .context(format!("cannot connect to the daemon at {at}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_no_socket_and_no_daemon_that_ended() {
        let folder = tempfile::tempdir().unwrap();
        let said = absent(folder.path(), Errno::CONNREFUSED).to_string();
        assert!(said.contains("is no socket"), "{said}");
        let path = folder.path().join("x");
        let said = absent(&path, Errno::NOENT).to_string();
        let start = format!(
            "start one with `pageone daemon --socket {}`",
            path.display()
        );
        assert!(
            said.contains("no daemon at") && said.ends_with(&start),
            "{said}"
        );
    }

    #[test]
    fn silence_is_told_once_and_the_error_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // Callers connect, and no daemon answers them.
        let _mute = sys::socket::listen(&path).unwrap();
        let (request, patience) = (Request::Status, Duration::from_millis(2300));
        let mut told = Vec::new();
        let begun = Instant::now();
        let error = talk(&path, &request, patience, |daemon| {
            told.push((daemon.to_string(), begun.elapsed()));
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("did not answer within 2s 300ms"), "{error}");
        assert!(error.contains("it hangs or is busy; see "), "{error}");
        let [(daemon, when)] = &told[..] else {
            panic!("told {told:?}");
        };
        assert!(daemon.contains(&std::process::id().to_string()), "{daemon}");
        assert!(*when >= SILENCE && *when < patience, "{when:?}");
        assert!(begun.elapsed() >= patience);
    }
}
