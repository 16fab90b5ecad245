//! What puts settings of the machine back whatever happens.
//!
//! Such settings must go back even when the process is killed that turned them. So it starts a watchdog first: a child in a
//! process group of its own (the terminal's Ctrl-C does not reach it) that waits for its standard input to end. An ordinary end says
//! `done`; any other end, SIGKILL included, makes the watchdog write the saved values.
//!
//! Two that turn the same settings at a time would each take the other's for the machine's own. So whoever turns some locks their
//! file (flock(2)). The lock is the watchdog's too, as its standard output: whoever gets it finds the settings as they belong.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The word of an ordinary end.
const DONE: &[u8] = b"done";

/// A child that puts settings back if this process is killed.
#[derive(Debug)]
pub(crate) struct Watchdog(Child);

impl Watchdog {
    /// Starts `command` with `words` behind its own; it must act by [`is_relieved`]. The lock of the settings' file is its too.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(
        mut command: Command,
        words: impl Iterator<Item = String>,
        lock: File,
    ) -> io::Result<Self> {
        command
            .args(words)
            .stdin(Stdio::piped())
            .stdout(lock)
            .process_group(0);
        let child = sys::signals::prepare_child(&mut command, false).spawn();
        child.map(Self)
    }

    /// Ends it. Only a complete restore relieves it: it tries once more otherwise.
    pub(crate) fn end(&mut self, restored: bool) {
        if let Some(mut input) = self.0.stdin.take()
            && restored
        {
            let _ = input.write_all(DONE);
        }
        let _ = self.0.wait();
    }
}

/// A watchdog that the command itself is, from its file, by its hidden `verb`.
pub(crate) fn command(exe: &Path, verb: &str) -> Command {
    let mut command = Command::new(exe);
    command.arg(verb);
    command
}

/// Locks the file of settings; false if another process has turned them.
///
/// # Errors
/// What flock(2) gives besides.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(false),
        locked => locked.map(|()| true).map_err(Into::into),
    }
}

/// In a watchdog: waits for its standard input to end. Whether it was told that nothing is left to do.
pub(crate) fn is_relieved(mut input: impl Read) -> bool {
    let mut said = Vec::new();
    let _ = input.read_to_end(&mut said);
    said == DONE
}

#[cfg(test)]
pub(crate) mod tests {
    use super::Command;

    /// In the place of a watchdog: waits as one, and puts nothing back.
    pub(crate) fn cat() -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "cat > /dev/null"]);
        command
    }
}
