//! The daemon's log on standard error: bounded, and never waited for.
//!
//! A process that may connect can make the daemon say something, as often as it likes. A log that is read
//! slowly, or not at all, must not stop the poll loop for that (I8). A line that does not fit at once is
//! left out, and so are one that cannot be written (the reader is gone, the disk is full) and lines beyond [`MOST`] in ten seconds. How many were left out is said before
//! the next line that goes out. A line is at most [`LONGEST`] bytes, for which a pipe that is ready has room.
//!
//! Strangers choose names that are logged. Where such a name is formatted it is wrapped in
//! [`sys::foreign::Foreign`]. Should a place forget it, the line is escaped here once more, as a whole: one call of
//! [`Line`] is one line, whatever is in it. For the same reason the log has no colours.
//!
//! For systemd's journal a line begins with its priority ([`crate::journal`]). It stands before all that is escaped, so that no name
//! can choose another one.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::foreign::Foreign;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use crate::journal;

/// Lines in a window.
const MOST: u32 = 100;
const WINDOW: Duration = Duration::from_secs(10);
/// Bytes in a line, behind its priority: less than the page that a ready pipe has free.
const LONGEST: usize = 4000;

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

/// The log, as one that subscribes to events writes it.
#[derive(Clone, Copy)]
pub(crate) struct Log {
    journal: bool,
}

impl Log {
    /// That on standard error.
    pub(crate) fn here() -> Self {
        let journal = journal::is_stderr();
        Self { journal }
    }

    /// Whether the journal takes it.
    pub(crate) fn is_journal(self) -> bool {
        self.journal
    }

    /// A line of this level.
    fn line(self, level: Level) -> Line {
        let head = |level| match self.journal {
            true => journal::priority(level),
            false => "",
        };
        Line {
            head: head(level),
            head_of_gap: head(Level::WARN),
        }
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Line;

    fn make_writer(&self) -> Line {
        self.line(Level::INFO)
    }

    fn make_writer_for(&self, of: &Metadata<'_>) -> Line {
        self.line(*of.level())
    }
}

/// Writes one line.
pub(crate) struct Line {
    head: &'static str,
    head_of_gap: &'static str,
}

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        // The lock is held while writing: two lines together could be more than fits.
        let mut budget = sys::priority::lock(&BUDGET);
        let mut stderr = io::stderr().lock();
        let is_out = budget.take(Instant::now())
            && ready(&stderr)
            && self.put(&mut stderr, &mut budget.left_out, text).is_ok();
        budget.left_out += u64::from(!is_out);
        // An error would be told on standard error, by a call that panics there.
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Line {
    /// Writes a line, and before it how many were left out.
    fn put(&self, to: &mut impl Write, left_out: &mut u64, text: &[u8]) -> io::Result<()> {
        if *left_out > 0 {
            let head = self.head_of_gap;
            to.write_all(format!("{head}pageone: {left_out} lines left out here\n").as_bytes())?;
            *left_out = 0;
        }
        to.write_all(one_line(self.head, text).as_bytes())
    }
}

/// `head`, and `text` as one line that is no longer than [`LONGEST`], in which nothing acts on the reader's terminal.
fn one_line(head: &str, text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let mut line = Foreign(text.trim_end_matches('\n')).to_string();
    if line.len() >= LONGEST {
        let fits = (0..=LONGEST - 4)
            .rev()
            .find(|&end| line.is_char_boundary(end));
        line.truncate(fits.unwrap_or(0));
        line.push('…');
    }
    format!("{head}{line}\n")
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
    fn whatever_is_said_is_one_line() {
        let line = |text: &str| one_line("", text.as_bytes());
        assert_eq!(line("plain\n"), "plain\n");
        assert_eq!(
            line("a\nWARN b\r\x1b[1m\u{2028}\n"),
            "a\\nWARN b\\r\\u{1b}[1m\\u{2028}\n"
        );
        assert_eq!(one_line("", b"\xff\n"), "\u{fffd}\n");
        for text in ["x", "ä", "\n", "\u{1f600}"] {
            let line = line(&(text.repeat(5000) + "y"));
            assert!(
                line.len() <= LONGEST && line.ends_with("…\n"),
                "{}",
                line.len()
            );
            assert_eq!(line.matches('\n').count(), 1);
        }
    }

    #[test]
    fn a_line_for_the_journal_begins_with_its_priority() {
        let said = |journal, level| {
            let line = Log { journal }.line(level);
            one_line(line.head, b"<0>a\n<1>b\n")
        };
        for (level, head) in [
            (Level::ERROR, "<3>"),
            (Level::WARN, "<4>"),
            (Level::INFO, "<6>"),
            (Level::DEBUG, "<7>"),
            (Level::TRACE, "<7>"),
        ] {
            assert_eq!(said(true, level), format!("{head}<0>a\\n<1>b\n"));
            assert_eq!(said(false, level), "<0>a\\n<1>b\n");
        }
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
