//! The guard that puts KSM's knobs back whatever happens, by a [watchdog](crate::watchdog) that holds the lock for KSM's `run`.

use std::io::{self, Read};
use std::path::Path;
use std::process::Command;

use sys::ksm::{Knobs, Ksm};

use crate::watchdog::{self, Watchdog};

/// Why the knobs cannot be turned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GuardError {
    /// KSM could not be read or turned.
    #[error("KSM: {0}")]
    Ksm(#[from] io::Error),
    /// Another process holds the lock of the knobs.
    #[error("KSM: another bench or `pageone ksm tune` turns it: wait for its end")]
    Taken,
    /// The process that puts the knobs back did not start.
    #[error("cannot start KSM's watchdog: {0}")]
    Watchdog(io::Error),
}

/// KSM's knobs as they were, put back on drop, or by the watchdog if this process is killed.
#[derive(Debug)]
pub(crate) struct KsmGuard {
    ksm: Ksm,
    saved: Knobs,
    watchdog: Watchdog,
}

impl KsmGuard {
    /// Saves the knobs and starts `watchdog`, which must call [`watch`] with the words that
    /// are added to its arguments.
    ///
    /// # Errors
    /// KSM cannot be read or written, another process turns it, or the watchdog cannot be started.
    pub(crate) fn take(ksm: Ksm, watchdog: Command) -> Result<Self, GuardError> {
        ksm.may_turn()?;
        let lock = watchdog::try_lock(&ksm.run_file())?.ok_or(GuardError::Taken)?;
        let saved = ksm.save()?;
        let run = saved.get("run").unwrap_or("0").to_owned();
        ksm.write("run", &run)?;
        let watchdog = Watchdog::start(watchdog, saved.words(), lock);
        Ok(Self {
            ksm,
            watchdog: watchdog.map_err(GuardError::Watchdog)?,
            saved,
        })
    }

    /// Stops KSM: what it has merged stays merged.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn pause(&self) -> Result<(), GuardError> {
        Ok(self.ksm.write("run", "0")?)
    }
}

impl Drop for KsmGuard {
    fn drop(&mut self) {
        let restored = self.ksm.restore(&self.saved).is_ok();
        self.watchdog.end(restored);
    }
}

/// The watchdog that the command itself is, from its file.
pub(crate) fn watchdog(exe: &Path) -> Command {
    watchdog::command(exe, "ksm-watchdog")
}

/// The watchdog's life: waits for standard input to end, and restores the knobs that `words` tell
/// unless it was told that this is done.
///
/// # Errors
/// A word names no knob, or the kernel refuses a value.
pub(crate) fn watch(ksm: &Ksm, words: &[String], input: impl Read) -> io::Result<()> {
    let knobs = Knobs::from_words(words.iter().map(String::as_str));
    let knobs = knobs.ok_or_else(|| io::Error::other(format!("no KSM knobs: {words:?}")))?;
    match watchdog::is_relieved(input) {
        true => Ok(()),
        false => ksm.restore(&knobs),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::watchdog::tests::cat;
    use std::fs;
    use sys::ksm::Tuning;

    /// KSM's folder as the kernel has it, with the knobs that are turned.
    pub(crate) fn fake() -> (tempfile::TempDir, Ksm) {
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
        ksm.tune(Tuning::Fast).unwrap();
        assert_eq!(ksm.number("run").unwrap(), 0);
        drop(guard);
        assert_eq!(ksm.number("run").unwrap(), 1);
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 100);
        assert_eq!(fs::read(note).unwrap(), b"done");
    }

    #[test]
    fn a_second_guard_is_refused_until_the_watchdog_of_the_first_has_ended() {
        let (_folder, ksm) = fake();
        let first = KsmGuard::take(ksm.clone(), cat()).unwrap();
        let refused = KsmGuard::take(ksm.clone(), cat()).unwrap_err();
        assert!(refused.to_string().contains("another bench"), "{refused}");
        drop(first);
        KsmGuard::take(ksm, cat()).unwrap();
    }

    #[test]
    fn the_watchdog_acts_only_when_nobody_said_done() {
        let (_folder, ksm) = fake();
        let words: Vec<String> = ksm.save().unwrap().words().collect();
        ksm.tune(Tuning::Fast).unwrap();
        watch(&ksm, &words, &b"done"[..]).unwrap();
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 1_000_000);
        watch(&ksm, &words, &b""[..]).unwrap();
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 100);
        assert!(watch(&ksm, &["x=1".to_owned()], &b""[..]).is_err());
    }
}
