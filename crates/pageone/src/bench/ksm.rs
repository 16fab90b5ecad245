//! KSM as a contender, and the guard that puts its knobs back whatever happens.
//!
//! The knobs belong to the machine, so they must go back even when this process is killed. A guard
//! therefore starts a watchdog first: a child in a process group of its own (the terminal's Ctrl-C
//! does not reach it) that waits for its standard input to end. An ordinary end says `done`; any
//! other end, SIGKILL included, makes the watchdog write the saved values.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use sys::ksm::{Knobs, Ksm};
use sys::usage;

use super::error::BenchError;
use super::measure::Contender;

/// KSM's knobs as they were, put back on drop, or by the watchdog if this process is killed.
#[derive(Debug)]
pub(super) struct KsmGuard {
    ksm: Ksm,
    saved: Knobs,
    watchdog: Child,
}

impl KsmGuard {
    /// Saves the knobs and starts `watchdog`, which must call [`watch_ksm`] with the words that
    /// are added to its arguments.
    ///
    /// # Errors
    /// KSM cannot be read or written, or the watchdog not be started.
    pub(super) fn take(ksm: Ksm, mut watchdog: Command) -> Result<Self, BenchError> {
        let saved = ksm.save().map_err(BenchError::Ksm)?;
        let run = saved.get("run").unwrap_or("0").to_owned();
        ksm.write("run", &run).map_err(BenchError::Ksm)?;
        watchdog
            .args(saved.words())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0);
        let watchdog = sys::signals::prepare_child(&mut watchdog, false)
            .spawn()
            .map_err(BenchError::system("cannot start KSM's watchdog"))?;
        Ok(Self {
            ksm,
            saved,
            watchdog,
        })
    }

    /// Stops KSM: what it has merged stays merged.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn pause(&self) -> Result<(), BenchError> {
        self.ksm.write("run", "0").map_err(BenchError::Ksm)
    }
}

impl Drop for KsmGuard {
    fn drop(&mut self) {
        // Only a complete restore relieves the watchdog: it tries once more otherwise.
        let restored = self.ksm.restore(&self.saved).is_ok();
        if let Some(mut input) = self.watchdog.stdin.take()
            && restored
        {
            let _ = input.write_all(b"done");
        }
        let _ = self.watchdog.wait();
    }
}

/// The watchdog's life: waits for standard input to end, and restores the knobs that `words` tell
/// unless it was told that this is done.
///
/// # Errors
/// A word names no knob, or the kernel refuses a value.
pub(super) fn watch_ksm(ksm: &Ksm, words: &[String], mut input: impl Read) -> io::Result<()> {
    let knobs = Knobs::from_words(words.iter().map(String::as_str));
    let knobs = knobs.ok_or_else(|| io::Error::other(format!("no KSM knobs: {words:?}")))?;
    let mut said = Vec::new();
    let _ = input.read_to_end(&mut said);
    if said == b"done" {
        Ok(())
    } else {
        ksm.restore(&knobs)
    }
}

/// KSM, tuned to use one core fully.
#[derive(Debug)]
pub(super) struct KsmContender {
    ksm: Ksm,
    thread: u32,
}

impl KsmContender {
    /// KSM of this machine, stopped and tuned. The caller holds a [`KsmGuard`].
    ///
    /// # Errors
    /// The kernel has no KSM, or this user may not turn it.
    pub(super) fn new(ksm: Ksm) -> Result<Self, BenchError> {
        let thread = usage::kernel_thread("ksmd").map_err(BenchError::Ksm)?;
        let thread = thread.ok_or_else(|| BenchError::Ksm(io::ErrorKind::NotFound.into()))?;
        ksm.write("run", "0").map_err(BenchError::Ksm)?;
        ksm.tune().map_err(BenchError::Ksm)?;
        Ok(Self { ksm, thread })
    }
}

impl Contender for KsmContender {
    fn name(&self) -> &'static str {
        "ksm"
    }

    fn threads(&self) -> u16 {
        1
    }

    fn equip(&self, _: &mut Command) {}

    fn allow(&mut self) -> Result<(), BenchError> {
        self.ksm.write("run", "1").map_err(BenchError::Ksm)
    }

    fn has_begun(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn is_done(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn process(&self) -> u32 {
        self.thread
    }

    fn relax(&mut self) -> Result<(), BenchError> {
        Ok(())
    }
}

impl Drop for KsmContender {
    fn drop(&mut self) {
        let _ = self.ksm.write("run", "0");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn fake() -> (tempfile::TempDir, Ksm) {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in [
            ("run", "1"),
            ("sleep_millisecs", "20"),
            ("pages_to_scan", "100"),
        ] {
            fs::write(folder.path().join(name), value).unwrap();
        }
        let ksm = Ksm::at(folder.path());
        (folder, ksm)
    }

    #[test]
    fn the_guard_puts_the_knobs_back_and_relieves_its_watchdog() {
        let (folder, ksm) = fake();
        let note = folder.path().join("note");
        let mut watchdog = Command::new("sh");
        watchdog.args(["-c", &format!("cat > {}", note.display())]);
        let guard = KsmGuard::take(ksm.clone(), watchdog).unwrap();
        guard.pause().unwrap();
        ksm.tune().unwrap();
        assert_eq!(ksm.number("run").unwrap(), 0);
        drop(guard);
        assert_eq!(ksm.number("run").unwrap(), 1);
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 100);
        assert_eq!(fs::read(note).unwrap(), b"done");
    }

    #[test]
    fn the_watchdog_acts_only_when_nobody_said_done() {
        let (_folder, ksm) = fake();
        let words: Vec<String> = ksm.save().unwrap().words().collect();
        ksm.tune().unwrap();
        watch_ksm(&ksm, &words, &b"done"[..]).unwrap();
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 1_000_000);
        watch_ksm(&ksm, &words, &b""[..]).unwrap();
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 100);
        assert!(watch_ksm(&ksm, &["x=1".to_owned()], &b""[..]).is_err());
    }
}
