//! `pageone detach` does not wait for a process that lies.
//!
//! A thread of the process ends the agent, and what it runs there the process may have changed. An honest one may take long, too: all that is
//! merged is copied. It must not be left in the middle, for the thread would never come back. So a child holds the thread, and goes on for
//! as long as that takes. The command waits for the child while there is progress:
//!
//! ```text
//!   command ── starts ──▶ child ── holds a thread ──▶ process
//!      │ looks: more memory of its own?  ◀── /proc/PID/statm, for which no lock is taken
//!      ▼ [`PATIENCE`] without
//!   an error that names both
//! ```
//!
//! To seem to go on, a process has to take memory as fast as an honest one at its slowest.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The longest wait without progress.
const PATIENCE: Duration = Duration::from_secs(20);
/// What counts as progress, in pages: 16 MiB.
const PROGRESS: u64 = 4096;
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Has a child take the agent out of a process, and gives what it says.
///
/// # Errors
/// What it says; it makes no progress.
pub(super) fn detach(pid: u32) -> Result<String> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["detach", "--alone"]).arg(pid.to_string());
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // What is typed at the terminal is for the command alone.
    let child = command.process_group(0).spawn();
    let mut child = child.context("cannot start another `pageone detach`")?;
    match wait(&mut child, PATIENCE, || own_pages(pid))? {
        true => super::asked::said(child).map(|told| told.trim_end().to_owned()),
        false => bail!(
            "its agent does not end, and nothing has changed for {PATIENCE:?}: a thread of the process does not come back, or it hangs. Process \
             {} goes on waiting for it, for ten minutes at most, and must not be killed alone; `kill -KILL {pid}` ends both",
            child.id()
        ),
    }
}

/// Waits for the end of a child: false when it has not come, and `pages` were not more for so long.
fn wait(child: &mut Child, patience: Duration, pages: impl Fn() -> Option<u64>) -> Result<bool> {
    let (mut most, mut since) = (pages().unwrap_or(0), Instant::now());
    while child.try_wait().context("cannot wait for it")?.is_none() {
        // In this order: this process may have been stopped itself.
        if let Some(more) = pages().filter(|&more| more >= most + PROGRESS) {
            (most, since) = (more, Instant::now());
        } else if since.elapsed() > patience {
            return Ok(false);
        }
        thread::sleep(PAUSE);
    }
    Ok(true)
}

/// How many pages of its own a process has.
fn own_pages(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut numbers = text.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    let (resident, shared) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    resident.checked_sub(shared)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const SHORT: Duration = Duration::from_millis(200);

    fn sleeper() -> Child {
        Command::new("sleep").arg("3").spawn().unwrap()
    }

    #[test]
    fn a_child_is_waited_for_while_memory_grows() {
        let (mut child, pages) = (sleeper(), Cell::new(0));
        let grows = || {
            pages.set(pages.get() + PROGRESS);
            Some(pages.get())
        };
        assert!(wait(&mut child, SHORT, grows).unwrap());
    }

    #[test]
    fn and_no_longer_when_it_does_not_or_by_little_or_to_and_fro() {
        let pages = Cell::new(PROGRESS);
        let little = || {
            pages.set(pages.get() + 1);
            Some(pages.get())
        };
        let to_and_fro = || {
            pages.set(PROGRESS * 3 - pages.get());
            Some(pages.get())
        };
        for pages in [&little as &dyn Fn() -> Option<u64>, &to_and_fro, &|| None] {
            let mut child = sleeper();
            let begun = Instant::now();
            assert!(!wait(&mut child, SHORT, pages).unwrap());
            assert!(begun.elapsed() < Duration::from_secs(3));
            child.wait().unwrap();
        }
        assert!(own_pages(std::process::id()).unwrap() > 0);
    }
}
