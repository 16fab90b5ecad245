//! The parent of a command that has an engine of its own: it passes on what others send to it, and stops and ends as the command does.
//!
//! Both are in one process group, as a shell made it: a key of the terminal and a kill(2) of the group reach the command by themselves.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sys::bystander::Bystander;
use sys::process::{self, Change};
use sys::signals::{self, Arrived, Signals};

use super::own::Own;

/// What is passed on to the command. Servers are told by USR1 and its neighbours how many workers they are to have, and to end in good order.
const FORWARDED: [i32; 11] = [
    signals::SIGHUP,
    signals::SIGINT,
    signals::SIGQUIT,
    signals::SIGTERM,
    signals::SIGUSR1,
    signals::SIGUSR2,
    signals::SIGWINCH,
    signals::SIGTSTP,
    signals::SIGTTIN,
    signals::SIGTTOU,
    signals::SIGCONT,
];

/// The signals of this process, and whether they were sent to it alone.
pub(super) struct Parent {
    signals: Signals,
    /// Without one each signal counts as sent to this process alone.
    bystander: Option<Bystander>,
}

/// What was waited for.
pub(super) enum Event {
    /// The command has ended.
    Ended(ExitStatus),
    /// Its engine has.
    Alone,
}

impl Parent {
    /// For before the first thread.
    pub(super) fn new() -> Result<Self> {
        let waited = [&FORWARDED[..], &[signals::SIGCHLD]].concat();
        let signals = Signals::block(&waited).context("cannot wait for signals")?;
        let bystander = Bystander::start(&FORWARDED).ok();
        Ok(Self { signals, bystander })
    }

    /// Waits for the command's end, or for that of its engine.
    pub(super) fn wait(&mut self, child: u32, own: &Own) -> Result<Event> {
        loop {
            // First: the stop of a command that was told to go on meanwhile, as this process was, is none to follow.
            while let Some(arrived) = self.signals.next()? {
                self.heed(child, own, arrived);
            }
            match process::change_of_child(child)? {
                Some(Change::Ended(status)) => return Ok(Event::Ended(status)),
                Some(Change::Stopped(signal)) => {
                    own.halt();
                    signals::stop_by(signal);
                    own.go_on();
                }
                None => {}
            }
            let signals = [self.signals.as_fd()].into_iter();
            let waited = signals.chain(own.end());
            let mut ready: Vec<_> = waited
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            match poll(&mut ready, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if ready.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
                return Ok(Event::Alone);
            }
        }
    }

    fn heed(&mut self, child: u32, own: &Own, arrived: Arrived) {
        // A key of the terminal reaches the command by itself, and so does the stop of a job in the background. The end of the terminal is
        // told to the leader of the session alone.
        let is_leaders = arrived.signal == signals::SIGHUP && process::leads_session();
        if arrived.signal == signals::SIGCHLD || arrived.from_kernel && !is_leaders {
            return;
        }
        let bystander = self.bystander.as_mut();
        let is_of_all =
            !arrived.from_kernel && bystander.is_some_and(|bystander| bystander.has_got(arrived));
        // Both may have been stopped with the group, and this process alone is told to go on.
        if arrived.signal == signals::SIGCONT {
            own.go_on();
            self.bystander.iter().for_each(Bystander::go_on);
        }
        // A signal of the group does not reach a command that has left it.
        if !is_of_all || !process::is_of_own_group(child) {
            // A command that has just ended is no error.
            let _ = process::signal_child(child, arrived.signal);
        }
    }
}

/// Ends the way the command did.
pub(super) fn pass_on(status: ExitStatus) -> ExitCode {
    if let Some(signal) = status.signal() {
        signals::die_of(signal);
        return ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX));
    }
    ExitCode::from(
        status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .unwrap_or(1),
    )
}
