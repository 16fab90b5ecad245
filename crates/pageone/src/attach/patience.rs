//! The commands do not wait for a process that lies.
//!
//! A change to a process must not be left in the middle, and may take as long as the process likes. `attach` reads its libc, which may
//! lie on a file system that never answers. `detach` has a thread end the agent, and what that runs the process may have changed. So a child
//! does the work, and goes on for as long as that takes. The command waits for the child while there is progress:
//!
//! ```text
//!   command ── starts ──▶ child ── holds a thread ──▶ process
//!      │ attach: has the child worked?                 │
//!      │ detach: has the process more memory of its own? (/proc/PID/statm takes no lock)
//!      ▼ [`PATIENCE`] without
//!   an error that names both
//! ```
//!
//! An honest process takes long to detach where much is merged, for all of that is copied. To seem to go on, another one has to take memory
//! as fast. A child that attaches ends by itself, unless it sleeps in the kernel.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::asked::said;

/// The longest wait without progress.
const PATIENCE: Duration = Duration::from_secs(20);
/// What counts as progress of an agent that ends, in pages: 16 MiB.
const PAGES: u64 = 4096;
/// What counts as progress of a child that attaches, in milliseconds of a processor: a clock tick. Also where it waits for threads it looks
/// again and again.
const TICK: u64 = 10;
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Has a child take the agent out of a process, or look whether it could, and gives what it says: nothing where a process that is known by
/// when it began has none.
///
/// # Errors
/// What it says; it makes no progress.
pub(super) fn detach(pid: u32, began: Option<u64>, dry_run: bool) -> Result<String> {
    let began = began.map(|began| format!("--began={began}"));
    let dry_run = dry_run.then(|| "--dry-run".to_owned());
    let words = began.into_iter().chain(dry_run).chain([pid.to_string()]);
    let mut child = alone("detach", words.map(OsString::from))?;
    match wait(&mut child, PATIENCE, PAGES, || own_pages(pid))? {
        true => heard(child),
        false => bail!(
            "its agent does not end, and nothing has changed for {PATIENCE:?}: a thread of the process does not come back, or it hangs. Process \
             {} goes on waiting for it, for ten minutes at most, and must not be killed alone; `kill -KILL {pid}` ends both",
            child.id()
        ),
    }
}

/// Has a child attach process `pid`, by these words of the command line, and gives what it says.
///
/// # Errors
/// What it says; it makes no progress.
pub(super) fn attach(pid: u32, words: impl IntoIterator<Item = OsString>) -> Result<String> {
    let mut child = alone("attach", words)?;
    let number = child.id();
    match wait(&mut child, PATIENCE, TICK, || processor_ms(number))? {
        true => heard(child),
        false => bail!(
            "nothing has changed for {PATIENCE:?}: one of its files lies on a file system that does not answer. Process {number} goes on waiting \
             for it, and must not be killed alone, for it may hold a thread; `kill -KILL {pid}` ends both"
        ),
    }
}

/// What a child says of what it did; its warnings are passed on.
fn heard(child: Child) -> Result<String> {
    let (told, warned) = said(child)?;
    // The caller may have gone: then no process reads it.
    let _ = write!(std::io::stderr(), "{warned}");
    Ok(told.trim_end().to_owned())
}

/// A child that does one thing to one process.
fn alone(verb: &str, words: impl IntoIterator<Item = OsString>) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.args([verb, "--alone"]).args(words);
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // What is typed at the terminal is for the command alone.
    let child = command.process_group(0).spawn();
    child.with_context(|| format!("cannot start another `pageone {verb}`"))
}

/// Waits for the end of a child: false when it has not come, and `seen` did not grow by `step` for so long.
fn wait(
    child: &mut Child,
    patience: Duration,
    step: u64,
    seen: impl Fn() -> Option<u64>,
) -> Result<bool> {
    let (mut most, mut since) = (seen().unwrap_or(0), Instant::now());
    while child.try_wait().context("cannot wait for it")?.is_none() {
        // In this order: this process may have been stopped itself.
        if let Some(more) = seen().filter(|&more| more >= most + step) {
            (most, since) = (more, Instant::now());
        } else if since.elapsed() > patience {
            return Ok(false);
        }
        thread::sleep(PAUSE);
    }
    Ok(true)
}

/// How long a process has had a processor.
fn processor_ms(pid: u32) -> Option<u64> {
    let time = sys::usage::cpu_time(pid).ok()?;
    u64::try_from(time.as_millis()).ok()
}

/// How many pages of its own a process has.
fn own_pages(pid: u32) -> Option<u64> {
    let text = sys::text::read(format!("/proc/{pid}/statm")).ok()?;
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
            pages.set(pages.get() + PAGES);
            Some(pages.get())
        };
        assert!(wait(&mut child, SHORT, PAGES, grows).unwrap());
    }

    #[test]
    fn and_no_longer_when_it_does_not_or_by_little_or_to_and_fro() {
        let pages = Cell::new(PAGES);
        let little = || {
            pages.set(pages.get() + 1);
            Some(pages.get())
        };
        let to_and_fro = || {
            pages.set(PAGES * 3 - pages.get());
            Some(pages.get())
        };
        for pages in [&little as &dyn Fn() -> Option<u64>, &to_and_fro, &|| None] {
            let mut child = sleeper();
            let begun = Instant::now();
            assert!(!wait(&mut child, SHORT, PAGES, pages).unwrap());
            assert!(begun.elapsed() < Duration::from_secs(3));
            child.wait().unwrap();
        }
        assert!(own_pages(std::process::id()).unwrap() > 0);
    }
}
