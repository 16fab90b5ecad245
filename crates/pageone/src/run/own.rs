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

use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use sys::twin::Twin;
use wire::KnobValues;

use super::tally::Tally;
use crate::daemon::host::Host;
use crate::output::say;

/// The time between two looks at the saving.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);
/// The longest wait for the engine's first word.
const START: Duration = Duration::from_secs(10);
/// The longest wait for its end, in which it has little to do.
const END: Duration = Duration::from_secs(3);
/// The first byte of its first word: the socket follows, or an error.
const READY: u8 = b'+';
const FAILED: u8 = b'-';

/// The engine, as `run` sees it.
pub(super) struct Own {
    twin: Twin,
    /// The engine's end closes it.
    line: OwnedFd,
    socket: PathBuf,
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
        let twin = Twin::start(move || match serve(knobs, any, far.as_fd()) {
            Ok(()) => 0,
            Err(error) => {
                // Where its start was told already, its end is.
                let _ = tell(far.as_fd(), FAILED, format!("{error:#}").as_bytes());
                1
            }
        });
        let mut own = Self {
            twin: twin.context("cannot start a process for the engine")?,
            line,
            socket: PathBuf::new(),
            is_lost: false,
        };
        own.socket = own.ready()?;
        Ok(own)
    }

    fn ready(&mut self) -> Result<PathBuf> {
        if !is_readable(self.line.as_fd(), START)? {
            bail!("the engine is not ready after {} s", START.as_secs());
        }
        let mut word = [0; 4096];
        let len = rustix::io::read(&self.line, &mut word)?;
        match word.get(..len).and_then(<[u8]>::split_first) {
            Some((&READY, socket)) => Ok(OsString::from_vec(socket.to_vec()).into()),
            Some((_, error)) => bail!("{}", String::from_utf8_lossy(error)),
            None => bail!("the engine ended at its start ({})", self.ended()),
        }
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
        let ended = self.ended();
        say(&format!(
            "pageone: the engine has ended ({ended}): the command runs on, and its memory is merged no longer"
        ));
    }

    fn ended(&mut self) -> String {
        let status = self.twin.end();
        status.map_or_else(String::new, |status| status.to_string())
    }

    /// Has it say what it saved, and end.
    pub(super) fn stop(self) {
        // One that has ended, or does not end, is no error of the command's.
        let _ = shutdown(&self.line, Shutdown::Write);
        let _ = is_readable(self.line.as_fd(), END);
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.twin.end();
        // An engine that ended in order has removed it.
        if let Some(folder) = self.socket.parent().filter(|path| path.is_absolute()) {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// In the engine's process: serves until it is told to end.
fn serve(knobs: KnobValues, any: bool, line: BorrowedFd<'_>) -> Result<()> {
    sys::thread::set_name(c"pageone-engine");
    let host = Host::start(engine::Options {
        knobs,
        ..engine::Options::default()
    })?;
    tell(line, READY, host.socket().as_os_str().as_bytes())?;
    let mut tally = Tally::default();
    while !is_readable(line, BETWEEN_LOOKS)? {
        tally.add(&host.status());
    }
    let told = tally.told(host.status().cpu_seconds, any);
    host.stop()?;
    say(&format!("pageone: {told}"));
    Ok(())
}

fn tell(line: BorrowedFd<'_>, kind: u8, text: &[u8]) -> Result<()> {
    rustix::io::write(line, &[&[kind], text].concat())?;
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
