//! The engine of a command's own, in a process beside `run`.
//!
//! ```text
//!   run ──fork─▶ engine      "ready", and its socket
//!    ├──spawn──▶ CMD ◀─────▶ engine merges
//!    │           CMD ends
//!    └──"stop"─▶ engine      says what it saved, and ends
//! ```
//!
//! `run` alone waits for the command, and passes its signals and its end on. An engine may end before: by a limit of memory or CPU time,
//! a kernel short of memory, a mistake of ours. That costs the command its merging, and no more, as the end of a daemon does.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use sys::signals::{SIGCONT, SIGSTOP};
use sys::twin::Twin;
use wire::KnobValues;

use super::tally::Tally;
use crate::daemon::folder::Folder;
use crate::daemon::host::{Door, Host};
use crate::daemon::listener::Listener;
use crate::output::say;

/// The time between two looks at the saving.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);
/// The longest wait for the engine's first word.
const START: Duration = Duration::from_secs(10);
/// The longest wait for its end, in which it has little to do.
const END: Duration = Duration::from_secs(3);
/// Its first word: it is ready. Any other is the reason why it is not, or serves no longer.
const READY: &str = "ready";

/// The engine, as `run` sees it.
pub(super) struct Own {
    twin: Twin,
    /// Is at its end when the engine is. The engine's process has a copy of this end, too: so it is shut down, not closed.
    line: OwnedFd,
    socket: PathBuf,
    _folder: Folder,
    is_lost: bool,
}

impl Own {
    /// Starts one. For while this process has one thread.
    ///
    /// # Errors
    /// There is no process for it, or it cannot start.
    pub(super) fn start(knobs: KnobValues, any: bool) -> Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let (line, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .context("cannot make a socket for the engine")?;
        let Door {
            folder,
            socket,
            mut listener,
        } = Door::as_of_daemon()?;
        // It goes with the folder.
        listener.set_kept();
        let at = socket.clone();
        let twin = Twin::start(move || {
            let done = serve(knobs, any, at, listener, far.as_fd());
            if let Err(error) = &done {
                let _ = tell(far.as_fd(), &format!("{error:#}"));
            }
            // The line ends with the process: then its status is final.
            std::mem::forget(far);
            i32::from(done.is_err())
        });
        let mut own = Self {
            twin: twin.context("cannot start a process for the engine")?,
            line,
            socket,
            _folder: folder,
            is_lost: false,
        };
        match own.word(START)? {
            word if word == READY => Ok(own),
            word => bail!("{word}"),
        }
    }

    /// Its next word, or how it ended without.
    fn word(&mut self, patience: Duration) -> Result<String> {
        if !is_readable(self.line.as_fd(), patience)? {
            bail!("the engine says nothing for {} s", patience.as_secs());
        }
        let mut word = [0; 4096];
        let len = rustix::io::read(&self.line, &mut word)?;
        Ok(match word.get(..len) {
            Some(word) if len > 0 => String::from_utf8_lossy(word).into_owned(),
            _ => match self.twin.end() {
                Some(status) => format!("the engine has ended ({status})"),
                None => "the engine has ended".to_owned(),
            },
        })
    }

    /// Where guests connect.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Is readable when the engine has ended before it was told to.
    pub(super) fn end(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_lost).then(|| self.line.as_fd())
    }

    /// Says that it has ended.
    pub(super) fn note_loss(&mut self) {
        self.is_lost = true;
        let word = self.word(END);
        let word = word.unwrap_or_else(|error| format!("{error:#}"));
        say(&format!(
            "pageone: {word}: the command runs on, but its memory is no longer merged"
        ));
    }

    /// Stops it, while the command is stopped.
    pub(super) fn halt(&self) {
        self.twin.signal(SIGSTOP);
    }

    /// Has it go on.
    pub(super) fn go_on(&self) {
        self.twin.signal(SIGCONT);
    }

    /// Has it say what it saved, and end.
    pub(super) fn stop(self) {
        let _ = shutdown(&self.line, Shutdown::Write);
        if !is_readable(self.line.as_fd(), END).is_ok_and(|ends| ends) {
            say("pageone: the engine does not end, and is killed");
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // Before its folder goes, as a rule.
        self.twin.end();
    }
}

/// In the engine's process: serves until it is told to end. The signals that `run` passes on are blocked here as there.
fn serve(
    knobs: KnobValues,
    any: bool,
    socket: PathBuf,
    listener: Listener,
    line: BorrowedFd<'_>,
) -> Result<()> {
    sys::thread::set_name(c"pageone-engine");
    // What is written here goes to standard error.
    let _ = sys::twin::leave_input_and_output();
    // It would lie in the command's folder.
    sys::process::leave_no_core();
    let options = engine::Options {
        knobs,
        ..engine::Options::default()
    };
    let host = Host::start(options, socket, listener)?;
    tell(line, READY)?;
    let mut tally = Tally::default();
    while !is_readable(line, BETWEEN_LOOKS)? {
        tally.add(&host.status());
    }
    let status = host.status();
    tally.add(&status);
    let told = tally.told(status.cpu_seconds, any);
    say(&format!("pageone: {told}"));
    host.stop()
}

fn tell(line: BorrowedFd<'_>, word: &str) -> Result<()> {
    rustix::io::write(line, word.as_bytes())?;
    Ok(())
}

/// Whether something is to be read, the end included; waits for it, if it does not come.
fn is_readable(line: BorrowedFd<'_>, time: Duration) -> Result<bool> {
    let mut ready = [PollFd::from_borrowed_fd(line, PollFlags::IN)];
    match poll(&mut ready, Some(&Timespec::try_from(time)?)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
