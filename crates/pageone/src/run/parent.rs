//! The parent of a command that has an engine of its own: it passes on what others send to it, and stops and ends as the command does.
//!
//! Both are in one process group, as a shell made it: a key of the terminal and a kill(2) of the group reach the command by themselves.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::bystander::Bystander;
use sys::process::{self, Change};
use sys::signals::{self, Arrived, Signals};

/// The time between two looks at what an engine of its own saves.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);
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

impl Parent {
    /// For before the first thread.
    pub(super) fn new() -> Result<Self> {
        let waited = [&FORWARDED[..], &[signals::SIGCHLD]].concat();
        let signals = Signals::block(&waited).context("cannot wait for signals")?;
        let bystander = Bystander::start(&FORWARDED).ok();
        Ok(Self { signals, bystander })
    }

    /// Waits for the command's end; looks at the counters in between.
    pub(super) fn wait(&mut self, child: u32, mut look: impl FnMut()) -> Result<ExitStatus> {
        let wait = Timespec::try_from(BETWEEN_LOOKS)?;
        loop {
            // First: the stop of a command that was told to go on meanwhile, as this process was, is none to follow.
            while let Some(arrived) = self.signals.next()? {
                self.heed(child, arrived);
            }
            match process::change_of_child(child)? {
                Some(Change::Ended(status)) => return Ok(status),
                Some(Change::Stopped(signal)) => signals::stop_by(signal),
                None => {}
            }
            let mut ready = [PollFd::from_borrowed_fd(
                self.signals.as_fd(),
                PollFlags::IN,
            )];
            match poll(&mut ready, Some(&wait)) {
                Ok(0) => look(),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn heed(&mut self, child: u32, arrived: Arrived) {
        // A key of the terminal reaches the command by itself, and so does the stop of a job in the background. The end of the terminal is
        // told to the leader of the session alone.
        let is_leaders = arrived.signal == signals::SIGHUP && process::leads_session();
        if arrived.signal == signals::SIGCHLD || arrived.from_kernel && !is_leaders {
            return;
        }
        let bystander = self.bystander.as_mut();
        let is_of_all =
            !arrived.from_kernel && bystander.is_some_and(|bystander| bystander.has_got(arrived));
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
