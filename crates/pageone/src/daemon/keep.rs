//! The keeper: a parent that keeps the daemon's descriptors and starts it again, where systemd does not.
//!
//! ```text
//!            ┌─ notes: FDSTORE, FDSTOREREMOVE, READY ──┐
//!  keeper ◀──┘                                         │
//!    │  holds: listener, stores, notes, ties           │
//!    └──── starts, with all of them ─────────────▶ daemon ── died ──▶ (started again)
//! ```
//!
//! It speaks the protocol of systemd's descriptor store, so the daemon does not know which of the two it
//! has. It has one thread, maps none of the memory it holds, reads none of it, and serves no client:
//! there is next to nothing in it that could end it. Should it be killed all the same, the daemon ends
//! too, guests keep their memory, and the next daemon starts afresh.
//!
//! The daemon is started again however it ends, after a pause that doubles while it does not last.
//! Two ends are different: one before it ever served is a wrong configuration, and ends the keeper.
//! Several in a row before it served may be the doing of its inheritance, which is then dropped.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::keeper::{Inbox, Kept, Note};
use sys::process::{self, End};
use sys::signals::{SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals};

use super::folder::Folder;
use super::listener;
use crate::human;

/// Descriptors kept at most: those of some 680 domains on one node. The names of more would not fit
/// one variable of the next daemon's environment.
const MAX_KEPT: usize = 2048;
/// A daemon that ended sooner is given a pause before the next.
const LASTING: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// After so many ends in a row before it served, the next daemon inherits nothing.
const MAX_FALSE_STARTS: u32 = 4;
/// How long the daemon may take to end when it is told to.
const FAREWELL: Duration = Duration::from_secs(20);

/// Takes this process out of the kernel's choice when memory runs out, where it may; gives the
/// score that the daemon is to have.
fn spare_me() -> Option<i32> {
    let before = process::oom_score().ok()?;
    process::set_oom_score(-1000).ok().map(|()| before)
}

/// The process that has it keeps the daemon of this command line.
pub(super) struct Keeper {
    program: PathBuf,
    /// Of the socket; it goes with this.
    _folder: Folder,
    address: PathBuf,
    inbox: Inbox,
    signals: Signals,
    kept: Vec<Kept>,
    oom_score: Option<i32>,
    /// Whether the present daemon serves.
    ready: bool,
}

/// Why waiting is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP.
    Restart,
    /// The daemon may have ended.
    Child,
    /// The time is up.
    Time,
}

impl Keeper {
    /// One that holds nothing yet.
    ///
    /// # Errors
    /// There is no folder for its socket, and the like.
    pub(super) fn new() -> Result<Self> {
        let wanted = [SIGTERM, SIGINT, SIGHUP, SIGCHLD];
        let folder = Folder::make(&std::env::temp_dir(), "pageone-keep-");
        let folder = folder.context("cannot make a folder for the keeper's socket")?;
        let address = folder.path().join(Folder::NOTIFY);
        let inbox = Inbox::bind(&address);
        let inbox = inbox.with_context(|| format!("cannot receive at {}", address.display()))?;
        Ok(Self {
            // Its path, not the file: after an upgrade another one is there.
            program: std::env::current_exe().context("cannot find this program's file")?,
            _folder: folder,
            address,
            inbox,
            signals: Signals::block(&wanted).context("cannot wait for signals")?,
            kept: Vec::new(),
            oom_score: None,
            ready: false,
        })
    }

    /// Keeps the daemon until SIGTERM or SIGINT. SIGHUP restarts it, if `check` finds no mistake in its files: one that cannot start
    /// would lose what is kept.
    pub(super) fn main(mut self, check: &dyn Fn() -> Result<()>) -> Result<()> {
        if let Err(error) = process::raise_descriptor_limit() {
            tracing::warn!("cannot raise the limit of descriptors: {error}");
        }
        self.oom_score = spare_me();
        let result = self.run(check);
        self.leave();
        result
    }

    fn run(&mut self, check: &dyn Fn() -> Result<()>) -> Result<()> {
        let (mut served, mut short, mut false_starts) = (false, 0, 0);
        loop {
            let begun = Instant::now();
            let Some(end) = self.serve(check)? else {
                return Ok(());
            };
            served |= self.ready;
            if !served {
                bail!("the daemon ended before it served: {end}");
            }
            false_starts = if self.ready { 0 } else { false_starts + 1 };
            if false_starts == MAX_FALSE_STARTS {
                tracing::error!("no daemon serves with what the last one left: it is dropped");
                self.kept.clear();
            }
            short = if begun.elapsed() < LASTING {
                short + 1
            } else {
                0
            };
            let pause = pause(short);
            tracing::warn!(%end, ?pause, "the daemon ended and is started again");
            if self.rest(pause)? {
                return Ok(());
            }
        }
    }

    /// Runs a daemon; gives how it ended, or none when this process was told to end.
    fn serve(&mut self, check: &dyn Fn() -> Result<()>) -> Result<Option<End>> {
        self.ready = false;
        let child = self.start().context("cannot start the daemon")?;
        let mut deadline = None;
        let (mut told, mut killed) = (false, false);
        loop {
            match self.wait(deadline)? {
                Event::Stop if !told => {
                    told = true;
                    process::signal_child(child, SIGTERM)?;
                    deadline = Some(Instant::now() + FAREWELL);
                }
                Event::Restart if !told => match check() {
                    Ok(()) => process::signal_child(child, SIGTERM)?,
                    Err(error) => {
                        let why = human::in_a_line(&format!("{error:#}"));
                        tracing::error!("SIGHUP: the daemon stays as it is: {why}");
                    }
                },
                Event::Stop | Event::Restart | Event::Child => {}
                Event::Time if killed => {
                    bail!(
                        "the daemon, process {child}, was killed and has not ended: the kernel waits in one of its threads"
                    );
                }
                Event::Time => {
                    killed = true;
                    process::signal_child(child, SIGKILL)?;
                    deadline = Some(Instant::now() + FAREWELL);
                }
            }
            if let Some(end) = process::end_of_child(child)? {
                // What it sent before it died is in the queue.
                self.read()?;
                // Where this is a container's init, an earlier daemon's heir ended here.
                process::take_orphans_away();
                return Ok((!told).then_some(end));
            }
        }
    }

    fn start(&self) -> std::io::Result<u32> {
        let mut command = Command::new(&self.program);
        command.args(arguments(std::env::args_os().skip(1)));
        command.env("NOTIFY_SOCKET", &self.address);
        // A backtrace that is made for want of memory takes memory itself, and may wait for ever.
        command.env("RUST_BACKTRACE", "0");
        let score = self.oom_score;
        let prepare = || score.map_or(Ok(()), process::set_oom_score);
        sys::keeper::spawn(command, &self.kept, prepare)
    }

    /// Whether this process was told to end within `pause`.
    fn rest(&mut self, pause: Duration) -> Result<bool> {
        let until = Instant::now() + pause;
        loop {
            match self.wait(Some(until))? {
                Event::Stop => return Ok(true),
                Event::Time | Event::Restart => return Ok(false),
                Event::Child => {}
            }
        }
    }

    /// Takes notes until something else happens.
    fn wait(&mut self, until: Option<Instant>) -> Result<Event> {
        loop {
            self.read()?;
            if let Some(arrived) = self.signals.next()? {
                return Ok(match arrived.signal {
                    SIGCHLD => Event::Child,
                    SIGHUP => Event::Restart,
                    _ => Event::Stop,
                });
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Event::Time);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut ready = [
                PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.inbox.as_fd(), PollFlags::IN),
            ];
            match poll(&mut ready, left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait"),
            }
        }
    }

    fn read(&mut self) -> Result<()> {
        while let Some(note) = self.inbox.next().context("cannot read notes")? {
            match note {
                Note::Keep(name, descriptors) => self.keep(&name, descriptors),
                Note::Forget(name) => self.kept.retain(|kept| kept.name != name),
                Note::Ready => self.set_ready(),
                Note::Other => {}
            }
        }
        Ok(())
    }

    fn set_ready(&mut self) {
        self.ready = true;
        // Should this process have a keeper itself, that one waits to hear it.
        let told = sys::keeper::Keeper::from_env();
        if let Err(error) = told.and_then(|above| above.map_or(Ok(()), |above| above.ready())) {
            tracing::warn!("cannot tell that the daemon serves: {error}");
        }
    }

    fn keep(&mut self, name: &str, descriptors: Vec<std::os::fd::OwnedFd>) {
        for descriptor in descriptors {
            if self.kept.len() == MAX_KEPT {
                tracing::warn!("more than {MAX_KEPT} descriptors: {name} is not kept");
                return;
            }
            let name = name.to_owned();
            self.kept.push(Kept { name, descriptor });
        }
    }

    /// Lets go of everything, and of the daemon's socket file.
    fn leave(&mut self) {
        let listeners = self.kept.iter().filter(|kept| kept.name == listener::NAME);
        let paths = listeners.filter_map(|kept| sys::socket::listening_path(&kept.descriptor).ok());
        let paths: Vec<_> = paths.collect();
        self.kept.clear();
        for path in paths {
            if let Err(error) = listener::sweep(&path) {
                tracing::warn!("the socket's file stays: {error}");
            }
        }
    }
}

fn pause(short: u32) -> Duration {
    match short.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => LONGEST_PAUSE.min(FIRST_PAUSE * (1 << doublings.min(16))),
    }
}

/// The arguments of the daemon: this process's own, without the flag. It finds its keeper by NOTIFY_SOCKET.
fn arguments(own: impl Iterator<Item = OsString>) -> Vec<OsString> {
    own.filter(|argument| argument != "--keep").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_are_bounded() {
        let pauses = [0, 1, 2, 3, 7, 8, 1000].map(|short| pause(short).as_millis());
        assert_eq!(pauses, [0, 100, 200, 400, 6400, 10_000, 10_000]);
    }

    #[test]
    fn the_daemon_gets_the_other_arguments() {
        let own = ["daemon", "--keep", "--threads", "2"].map(OsString::from);
        assert_eq!(
            arguments(own.into_iter()),
            ["daemon", "--threads", "2"].map(OsString::from)
        );
    }
}
