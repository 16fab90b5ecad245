//! The daemon's log on standard error: bounded, and never waited for.
//!
//! Whoever may connect can make the daemon say something, as often as it likes. A log that is read
//! slowly, or not at all, must not stop the poll loop for that (I8): a line that does not fit at once is
//! left out, and so are lines beyond [`MOST`] in ten seconds. How many were left out is said before
//! the next line that goes out.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Lines in a window.
const MOST: u32 = 100;
const WINDOW: Duration = Duration::from_secs(10);

static BUDGET: Mutex<Budget> = Mutex::new(Budget {
    began: None,
    lines: 0,
    left_out: 0,
});

/// What may still be said.
struct Budget {
    began: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Budget {
    /// Whether one more line may go out at `now`.
    fn take(&mut self, now: Instant) -> bool {
        if self.began.is_none_or(|began| now - began >= WINDOW) {
            (self.began, self.lines) = (Some(now), 0);
        }
        self.lines += 1;
        self.lines <= MOST
    }
}

/// Writes one line.
pub(crate) struct Line;

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        // The lock is held while writing: two lines together could be more than fits.
        let mut budget = BUDGET.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stderr = io::stderr().lock();
        if !budget.take(Instant::now()) || !ready(&stderr) {
            budget.left_out += 1;
            return Ok(text.len());
        }
        if budget.left_out > 0 {
            writeln!(stderr, "pageone: {} lines left out here", budget.left_out)?;
            budget.left_out = 0;
        }
        stderr.write_all(text)?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a line can be written at once: a pipe says so when a page of it is free.
fn ready(to: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(to, PollFlags::OUT)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_in_each_window() {
        let mut budget = Budget {
            began: None,
            lines: 0,
            left_out: 0,
        };
        let start = Instant::now();
        let taken = |budget: &mut Budget, at: Duration| {
            (0..500).filter(|_| budget.take(start + at)).count()
        };
        assert_eq!(taken(&mut budget, Duration::ZERO), MOST as usize);
        assert_eq!(taken(&mut budget, WINDOW / 2), 0);
        assert_eq!(taken(&mut budget, WINDOW), MOST as usize);
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_not_ready() {
        let (reader, writer) = io::pipe().unwrap();
        assert!(ready(&writer));
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while (&writer).write(&[0; 4096]).is_ok() {}
        assert!(!ready(&writer));
        drop(reader);
    }
}
