//! `vm.max_map_count` for the time of a run: raised, and put back whatever happens.
//!
//! Merged pages that lie between others take mappings, of which the kernel lets each process have so many. KSM takes none. So single
//! pages at random places are compared with the limit that a machine has, and with one that a host for PageONE would have.
//!
//! The limit is every program's. Raised it harms none; lowered it would make mmap fail in programs that have more, so that is refused.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::watchdog::{self, Watchdog};

/// Where the kernel has it.
const FILE: &str = "/proc/sys/vm/max_map_count";
/// The most that it takes.
pub(super) const MOST: u64 = i32::MAX as u64;
/// Enough for merged pages of a gibibyte, each between two others: what `pageone doctor` advises.
pub(super) const PLENTY: u64 = 1 << 20;

/// Why the limit stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// It would be lower.
    #[error("vm.max_map_count is {0} now, and a lower one would be every program's: give more")]
    Lower(u64),
    /// Another process holds the lock.
    #[error("vm.max_map_count: another bench has raised it: wait for its end")]
    Taken,
    /// This user, or a process of this container, may not.
    #[error("to raise vm.max_map_count takes root: {0}")]
    NoRight(io::Error),
    /// It could not be read or raised.
    #[error("vm.max_map_count: {0}")]
    System(#[from] io::Error),
    /// The process that puts it back did not start.
    #[error("cannot start the watchdog of vm.max_map_count: {0}")]
    Watchdog(io::Error),
}

/// The limit, raised. It goes back on drop, or by the watchdog if this process is killed.
#[derive(Debug)]
pub(super) struct Raised {
    file: PathBuf,
    before: u64,
    watchdog: Watchdog,
}

/// The limit now.
pub(super) fn now() -> Option<u64> {
    read(Path::new(FILE)).ok()
}

/// Raises it to `most` for as long as the answer lives; none where it is so already.
///
/// # Errors
/// It would be lower, this user may not, or another bench has raised it.
pub(super) fn raise(exe: &Path, most: u64) -> Result<Option<Raised>, LimitError> {
    let watchdog = watchdog::command(exe, "mappings-watchdog");
    Raised::take(Path::new(FILE), most, watchdog)
}

impl Raised {
    fn take(file: &Path, most: u64, watchdog: Command) -> Result<Option<Self>, LimitError> {
        match read(file)? {
            now if now == most => return Ok(None),
            now if now > most => return Err(LimitError::Lower(now)),
            _ => {}
        }
        let may = File::options().write(true).open(file);
        may.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                LimitError::NoRight(error)
            }
            _ => LimitError::System(error),
        })?;
        let lock = watchdog::try_lock(file)?.ok_or(LimitError::Taken)?;
        // Under the lock: another bench may have come and gone meanwhile.
        let before = read(file)?;
        let words = std::iter::once(before.to_string());
        let watchdog = Watchdog::start(watchdog, words, lock).map_err(LimitError::Watchdog)?;
        let raised = Self {
            file: file.to_owned(),
            before,
            watchdog,
        };
        write(file, most)?;
        Ok(Some(raised))
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        let restored = write(&self.file, self.before).is_ok();
        self.watchdog.end(restored);
    }
}

/// The life of the watchdog.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn watchdog(before: u64) -> anyhow::Result<()> {
    match watchdog::is_relieved(io::stdin()) {
        true => Ok(()),
        false => write(Path::new(FILE), before).context("vm.max_map_count is not back"),
    }
}

fn read(file: &Path) -> io::Result<u64> {
    let bad = |_| io::Error::from(io::ErrorKind::InvalidData);
    fs::read_to_string(file)?.trim().parse().map_err(bad)
}

fn write(file: &Path, value: u64) -> io::Result<()> {
    fs::write(file, value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watchdog::tests::cat;

    #[test]
    fn the_limit_is_raised_by_one_at_a_time_and_goes_back() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("max_map_count");
        write(&file, 65530).unwrap();
        assert!(Raised::take(&file, 65530, cat()).unwrap().is_none());
        let lower = Raised::take(&file, 65529, cat()).unwrap_err().to_string();
        assert!(lower.contains("is 65530 now"), "{lower}");
        let raised = Raised::take(&file, PLENTY, cat()).unwrap();
        assert_eq!(read(&file).unwrap(), PLENTY);
        let taken = Raised::take(&file, PLENTY + 1, cat()).unwrap_err();
        assert!(matches!(taken, LimitError::Taken), "{taken}");
        drop(raised);
        assert_eq!(read(&file).unwrap(), 65530);
        assert!(Raised::take(&file, PLENTY, cat()).unwrap().is_some());
    }
}
