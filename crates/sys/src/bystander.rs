//! A process beside this one that tells signals of a whole group from those of this process alone.
//!
//! A process that stands for its child passes signals on to it. But kill(2) with a group, and a service manager with a cgroup, signal
//! the child as well, and siginfo(7) tells the sender only. The bystander is in the same group and the same cgroup:
//!
//! ```text
//!  kill PID      ─▶ this process                             it alone: the child has to be told
//!  kill -GROUP   ─▶ this process, the bystander, the child   all of them: the child knows
//! ```
//!
//! It has the signals blocked, and reports each. It has no descriptor but its pipe, and ends with this process.
//!
//! The tempting alternatives: a group of its own for the child takes it out of the terminal's group and out of the reach of SIGKILL for
//! the group. To look at what waits for the child (`/proc/PID/status`) tells nothing of signals that it has taken already.
//!
//! **The limit**: a sender that signals one process after another, and takes longer than `SPREAD` from this one to the bystander. Then
//! the signal counts as this process's alone.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use crate::clock;
use crate::signals::{Arrived, SIGCONT, set_of};
use crate::twin::Twin;

/// So long after this process the bystander may get the same signal.
const SPREAD: Duration = Duration::from_millis(20);
/// So long a report is waited for while the signal waits in the bystander: it needs a processor.
const PATIENCE: Duration = Duration::from_secs(1);
/// A report: when the signal came, its number and its sender's.
const REPORT: usize = 16;

/// A process that gets the signals of this one's group.
#[derive(Debug)]
pub struct Bystander {
    twin: Twin,
    reports: OwnedFd,
    /// Reports that were read, and belong to no signal so far, with their time.
    spare: Vec<(Arrived, Duration)>,
}

impl Bystander {
    /// Starts one for these signals, which the calling thread must have blocked.
    ///
    /// # Errors
    /// `Deadlock` when this process has other threads; what pipe(2) and fork(2) give.
    pub fn start(signals: &[i32]) -> io::Result<Self> {
        let (reports, end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let set = set_of(signals);
        let twin = Twin::start(|| {
            let _ = stand_by(&end, &set);
            0
        })?;
        let spare = Vec::new();
        Ok(Self {
            twin,
            reports,
            spare,
        })
    }

    /// Has it go on, where it was stopped with the group, and this process alone was told to.
    pub fn go_on(&self) {
        self.twin.signal(SIGCONT);
    }

    /// Whether the bystander got the signal as well. Waits for `SPREAD` at least, if it did not.
    pub fn has_got(&mut self, arrived: Arrived) -> bool {
        let begin = Instant::now();
        // When it still had to report the signal.
        let mut waited = begin;
        loop {
            let waits = self.has_waiting(arrived.signal);
            if waits {
                waited = Instant::now();
            }
            // After that look: what was reported meanwhile is there.
            let is_open = self.read();
            if let Some(at) = self.spare.iter().position(|report| report.0 == arrived) {
                self.spare.remove(at);
                return true;
            }
            let is_late = waited.elapsed() >= SPREAD || begin.elapsed() >= PATIENCE;
            if is_late || !is_open {
                return false;
            }
            // Whether a signal waits there is asked again soon.
            self.wait(SPREAD / 4);
        }
    }

    /// Takes the reports that are there. False where there will be none any more.
    fn read(&mut self) -> bool {
        let mut report = [0; REPORT];
        let is_open = loop {
            match rustix::io::read(&self.reports, &mut report) {
                Ok(REPORT) => self.spare.extend(decode(&report)),
                Err(Errno::INTR) => {}
                other => break other.is_err(),
            }
        };
        // Of two signals at once this process may get one: the other report is not for one that comes later.
        let now = clock::monotonic();
        let is_young = |at: Duration| now.saturating_sub(at) < PATIENCE;
        self.spare.retain(|report| is_young(report.1));
        is_open
    }

    fn has_waiting(&self, signal: i32) -> bool {
        let status = format!("/proc/{}/status", self.twin.pid().as_raw_nonzero());
        let status = crate::text::read(status).unwrap_or_default();
        let waiting = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
        let waiting = waiting.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
        waiting
            .is_some_and(|set| set.checked_shr((signal - 1).cast_unsigned()).unwrap_or(0) & 1 == 1)
    }

    fn wait(&self, time: Duration) {
        let mut ready = [PollFd::new(&self.reports, PollFlags::IN)];
        let _ = poll(&mut ready, Timespec::try_from(time).ok().as_ref());
    }
}

fn encode(signal: i32, sender: u32) -> [u8; REPORT] {
    let now = clock::monotonic().as_nanos();
    (now << 64 | u128::from(signal.cast_unsigned()) << 32 | u128::from(sender)).to_ne_bytes()
}

fn decode(report: &[u8; REPORT]) -> Option<(Arrived, Duration)> {
    let all = u128::from_ne_bytes(*report);
    let half = |shift: u32| u32::try_from(all >> shift & u128::from(u32::MAX)).ok();
    let arrived = Arrived {
        signal: half(32)?.cast_signed(),
        sender: half(0)?,
        from_kernel: false,
    };
    let at = Duration::from_nanos(u64::try_from(all >> 64).ok()?);
    Some((arrived, at))
}

/// In the bystander: reports signals until the pipe is gone.
fn stand_by(pipe: &OwnedFd, set: &libc::sigset_t) -> io::Result<()> {
    crate::thread::set_name(c"pageone-signals");
    let pipe = keep_only(pipe)?;
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: both are this function's own; a `siginfo_t` is valid as zeros, too.
        let (signal, info) = unsafe {
            let signal = libc::sigwaitinfo(set, info.as_mut_ptr());
            (signal, info.assume_init())
        };
        if signal > 0 && info.si_code != libc::SI_KERNEL {
            // SAFETY: a signal that a process sent has its number.
            let sender = unsafe { info.si_pid() }.cast_unsigned();
            match rustix::io::write(&pipe, &encode(signal, sender)) {
                // Its parent is stopped, and has enough to read.
                Ok(_) | Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Closes all descriptors of this process, a child just forked, but `pipe`, which becomes the first.
fn keep_only(pipe: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: nothing in this copy of the parent uses its descriptors any more, but through what is given back.
    unsafe {
        if libc::dup2(pipe.as_raw_fd(), 0) < 0 || libc::close_range(1, libc::c_uint::MAX, 0) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_who_sent_a_signal_and_when() {
        let before = clock::monotonic();
        let (arrived, at) = decode(&encode(15, u32::MAX)).unwrap();
        assert_eq!((arrived.signal, arrived.sender), (15, u32::MAX));
        assert!(at >= before && at <= clock::monotonic());
    }
}
