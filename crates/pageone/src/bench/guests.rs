//! Guests: child processes that fill memory, offer it, and answer for every byte of it.
//!
//! Parent and guest talk in lines over the guest's standard input and output. The guest ends when
//! its input ends, so none outlives its parent.
//!
//! ```text
//!  parent ── offer ──▶ guest     parent ◀── filled (once, unasked) ── guest
//!         ── verify ─▶                  ◀── done BYTES ERRORS ───────
//! ```

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::memory::Anonymous;

use super::content::Content;
use super::error::BenchError;

const PAGE_BYTES: usize = 4096;

/// What a guest replies: how many bytes it verified since it began, and how many were wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Bytes compared with what they should be.
    pub verified_bytes: u64,
    /// Pages that were not what they should be.
    pub errors: u64,
    /// Pages written since it began.
    pub written_pages: u64,
}

/// A guest, as its parent holds it. Dropping it ends the process.
#[derive(Debug)]
pub struct Guest {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Guest {
    /// Starts `command` as a guest.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(command: &mut Command) -> Result<Self, BenchError> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = sys::signals::prepare_child(command, true)
            .spawn()
            .map_err(BenchError::system("cannot start a guest"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = output.ok_or(io::ErrorKind::BrokenPipe.into());
        let output = output.map_err(BenchError::system("cannot talk to a guest"))?;
        Ok(Self {
            child,
            input,
            output: BufReader::new(output),
        })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends `order`, without waiting for the answer.
    ///
    /// # Errors
    /// The guest has gone.
    pub fn tell(&mut self, order: &str) -> Result<(), BenchError> {
        let sent = match &mut self.input {
            Some(input) => writeln!(input, "{order}").and_then(|()| input.flush()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        sent.map_err(|_| self.gone())
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// The guest has gone, does not answer within `patience`, or says something else.
    pub fn answer(&mut self, patience: Duration) -> Result<Answer, BenchError> {
        let line = self.line(patience)?;
        parse_answer(&line).ok_or_else(|| self.failed(format!("answered {line:?}")))
    }

    pub(crate) fn line(&mut self, patience: Duration) -> Result<String, BenchError> {
        let deadline = Instant::now() + patience;
        let mut line = String::new();
        while self.output.buffer().is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.failed(format!("did not answer within {patience:?}")));
            }
            let mut ready = [PollFd::from_borrowed_fd(
                self.output.get_ref().as_fd(),
                PollFlags::IN,
            )];
            let wait = Timespec::try_from(left).ok();
            if poll(&mut ready, wait.as_ref()).is_ok_and(|ready| ready > 0) {
                break;
            }
        }
        match self.output.read_line(&mut line) {
            Ok(1..) => Ok(line.trim_end().to_owned()),
            _ => Err(self.gone()),
        }
    }

    fn gone(&mut self) -> BenchError {
        self.input = None;
        let what = match self.child.wait() {
            Ok(status) => format!("ended early ({status})"),
            Err(error) => format!("ended early ({error})"),
        };
        self.failed(what)
    }

    pub(crate) fn failed(&self, what: String) -> BenchError {
        let pid = self.pid();
        BenchError::Guest { pid, what }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse_answer(line: &str) -> Option<Answer> {
    let mut words = line.strip_prefix("done ")?.split(' ').map(str::parse);
    let mut number = || words.next()?.ok();
    let answer = Answer {
        verified_bytes: number()?,
        errors: number()?,
        written_pages: number()?,
    };
    words.next().is_none().then_some(answer)
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            verified_bytes,
            errors,
            written_pages,
        } = self;
        write!(f, "done {verified_bytes} {errors} {written_pages}")
    }
}

/// The life of a guest: fills its memory as guest `number` of `content`, then follows orders from
/// standard input until that ends.
///
/// # Errors
/// No memory, or the parent's pipes fail.
pub(super) fn serve_guest(content: &Content, number: u64) -> io::Result<()> {
    let pages = usize::try_from(content.pages).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut memory = Anonymous::new(pages * PAGE_BYTES)?;
    for (index, page) in (0..).zip(memory.chunks_exact_mut(PAGE_BYTES)) {
        content.fill(number, index, page);
    }
    let mut answer = Answer {
        written_pages: content.pages,
        ..Answer::default()
    };
    writeln!(io::stdout(), "{answer}")?;
    for order in io::stdin().lines() {
        match order?.as_str() {
            "offer" => memory.offer()?,
            "verify" => verify(content, number, &memory, &mut answer),
            other => return Err(io::Error::other(format!("unknown order {other:?}"))),
        }
        writeln!(io::stdout(), "{answer}")?;
    }
    Ok(())
}

fn verify(content: &Content, number: u64, memory: &[u8], answer: &mut Answer) {
    let mut scratch = [0; PAGE_BYTES];
    for (index, page) in (0..).zip(memory.chunks_exact(PAGE_BYTES)) {
        answer.verified_bytes += PAGE_BYTES as u64;
        answer.errors += u64::from(!content.matches(number, index, page, &mut scratch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content() -> Content {
        Content {
            seed: 1,
            dup: 0.5,
            run_pages: 4,
            zero_prefix: 10.0,
            pages: 64,
            shuffle: false,
        }
    }

    #[test]
    fn one_flipped_bit_is_one_error() {
        let content = content();
        let mut memory = vec![0; 64 * PAGE_BYTES];
        for (index, page) in (0..).zip(memory.chunks_exact_mut(PAGE_BYTES)) {
            content.fill(3, index, page);
        }
        let mut answer = Answer::default();
        verify(&content, 3, &memory, &mut answer);
        assert_eq!((answer.verified_bytes, answer.errors), (64 * 4096, 0));
        memory[17 * PAGE_BYTES + 99] ^= 4;
        verify(&content, 3, &memory, &mut answer);
        assert_eq!(answer.errors, 1);
    }

    #[test]
    fn answers_survive_the_pipe() {
        let answer = Answer {
            verified_bytes: 7,
            errors: 1,
            written_pages: 3,
        };
        assert_eq!(parse_answer(&answer.to_string()), Some(answer));
        for bad in [
            "",
            "done",
            "done 1 2",
            "done 1 2 3 4",
            "done 1 2 x",
            "filled 1 2 3",
        ] {
            assert_eq!(parse_answer(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_guest_that_dies_or_stalls_is_named_with_its_end() {
        let mut dead = Guest::start(Command::new("sh").args(["-c", "exit 3"])).unwrap();
        let error = dead
            .answer(Duration::from_secs(10))
            .unwrap_err()
            .to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        let mut mute = Guest::start(&mut Command::new("cat")).unwrap();
        let error = mute
            .answer(Duration::from_millis(50))
            .unwrap_err()
            .to_string();
        assert!(error.contains("did not answer"), "{error}");
        mute.tell("nonsense").unwrap();
        let error = mute
            .answer(Duration::from_secs(10))
            .unwrap_err()
            .to_string();
        assert!(error.contains("nonsense"), "{error}");
    }
}
