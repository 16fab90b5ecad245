//! A watchdog that puts settings of the machine back whatever happens.
//!
//! Such settings must go back even when the process is killed that turned them. So it starts a watchdog first: a child in a
//! process group of its own (the terminal's Ctrl-C does not reach it) that waits for its standard input to end. An ordinary end says
//! `done`; any other end, SIGKILL included, makes the watchdog write the saved values.
//!
//! Two that turn the same settings at a time would each take the other's for the machine's own. So a process that turns some has their
//! lock (flock(2)). It is the watchdog's too, as its standard output: the next process that gets it finds the settings as they belong.
//!
//! The lock is that of a file which only its user can open. The file of the settings itself would do, were it not that all users may
//! read it, and so lock it: flock(2) asks for no right to write. One of them could keep root from turning them for as long as he likes. The
//! file stays, as the one beside the daemon's socket does.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The word of an ordinary end.
const DONE: &[u8] = b"done";

/// A child that puts settings back if this process is killed.
#[derive(Debug)]
pub(crate) struct Watchdog(Child);

impl Watchdog {
    /// Starts `command` with `words` behind its own; it must act by [`is_relieved`]. The lock of the settings is its too.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(
        mut command: Command,
        words: impl Iterator<Item = String>,
        lock: File,
    ) -> io::Result<Self> {
        command
            .args(words)
            .stdin(Stdio::piped())
            .stdout(lock)
            .process_group(0);
        let child = sys::signals::prepare_child(&mut command, false).spawn();
        child.map(Self)
    }

    /// Ends it. Only a complete restore relieves it: it tries once more otherwise.
    pub(crate) fn end(&mut self, restored: bool) {
        if let Some(mut input) = self.0.stdin.take()
            && restored
        {
            let _ = input.write_all(DONE);
        }
        let _ = self.0.wait();
    }
}

/// A watchdog that the command itself is, from its file, by its hidden `verb`.
pub(crate) fn command(exe: &Path, verb: &str) -> Command {
    let mut command = Command::new(exe);
    command.arg(verb);
    command
}

/// Takes the lock of the settings in `file`; none if another process has turned them.
///
/// # Errors
/// What open(2) and flock(2) give besides.
pub(crate) fn try_lock(file: &Path) -> io::Result<Option<File>> {
    let mut options = File::options();
    options.write(true).create(true).truncate(false).mode(0o600);
    let lock = options.open(place_of_lock(file))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(None),
        locked => locked.map(|()| Some(lock)).map_err(Into::into),
    }
}

/// Where the lock of the settings in `file` lies: beside it. Among the kernel's files no other can be made: theirs lies where only root can
/// make one.
fn place_of_lock(file: &Path) -> PathBuf {
    let is_kernels = ["/proc", "/sys"].iter().any(|root| file.starts_with(root));
    match is_kernels {
        true => {
            let name = file.display().to_string().replace('/', "-");
            PathBuf::from(format!("/run/pageone{name}.lock"))
        }
        false => file.with_extension("lock"),
    }
}

/// In a watchdog: waits for its standard input to end. Whether it was told that nothing is left to do.
pub(crate) fn is_relieved(mut input: impl Read) -> bool {
    let mut said = Vec::new();
    let _ = input.read_to_end(&mut said);
    said == DONE
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// In the place of a watchdog: waits as one, and puts nothing back.
    pub(crate) fn cat() -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "cat > /dev/null"]);
        command
    }

    #[test]
    fn a_lock_of_a_reader_on_the_settings_keeps_nobody_off() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run");
        std::fs::write(&file, "0").unwrap();
        let reader = File::open(&file).unwrap();
        flock(&reader, FlockOperation::LockExclusive).unwrap();
        let lock = try_lock(&file).unwrap().expect("it is free");
        assert_eq!(lock.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(try_lock(&file).unwrap().is_none());
        drop(lock);
        assert!(try_lock(&file).unwrap().is_some());
    }

    #[test]
    fn locks_of_the_kernels_settings_lie_where_only_root_can_make_files() {
        for (file, lock) in [
            (
                "/sys/kernel/mm/ksm/run",
                "/run/pageone-sys-kernel-mm-ksm-run.lock",
            ),
            (
                "/proc/sys/vm/max_map_count",
                "/run/pageone-proc-sys-vm-max_map_count.lock",
            ),
        ] {
            assert_eq!(place_of_lock(Path::new(file)), Path::new(lock));
        }
    }
}
