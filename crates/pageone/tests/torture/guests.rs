//! The guests of a run: built, started, stopped, continued, killed, ended.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};

use crate::common::Place;
use crate::counts::Counts;
use crate::support::{agent, root};

/// How long a guest may take to compare everything and to see its children end.
const PATIENCE: Duration = Duration::from_secs(60);

/// Compiles the guest.
pub(crate) fn build(place: &Place) -> PathBuf {
    let sources = root().join("tests/torture");
    let sources = std::fs::read_dir(sources).unwrap();
    let sources = sources.map(|entry| entry.unwrap().path());
    let program = place.path().join("torture-guest");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-g", "-Wall", "-Wextra", "-pthread", "-o"])
        .arg(&program)
        .args(sources.filter(|path| path.extension().is_some_and(|kind| kind == "c")));
    assert!(cc.status().expect("a C compiler is installed").success());
    program
}

/// A guest and, in its process group, its children.
pub(crate) struct Guest {
    process: Child,
    counts: PathBuf,
    number: u32,
    pub(crate) stopped: bool,
}

impl Guest {
    pub(crate) fn start(program: &Path, place: &Place, seed: u64, number: u32) -> Self {
        let mut command = Command::new(program);
        command
            .args([seed.to_string(), number.to_string()])
            .arg(place.path())
            .arg("0")
            .env("LD_PRELOAD", agent())
            .env("PAGEONE_SOCKET", place.socket())
            .stdin(Stdio::null())
            .process_group(0);
        Self {
            process: command.spawn().unwrap(),
            counts: place.path().join(format!("counts-{number}")),
            number,
            stopped: false,
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// What it and its children have counted.
    pub(crate) fn counts(&self) -> Counts {
        Counts::read(&self.counts)
    }

    /// Stops the guest, or lets it go on.
    pub(crate) fn stop(&mut self, on: bool) {
        let signal = if on { Signal::STOP } else { Signal::CONT };
        // An end that the test did not ask for is noticed elsewhere.
        let _ = kill_process(self.pid(), signal);
        self.stopped = on;
    }

    /// A complaint when the guest has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<String> {
        let status = self.process.try_wait().unwrap()?;
        Some(format!("guest {} ended by itself: {status}", self.number))
    }

    /// Kills the guest; its children live on until [`Guest::end`].
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Asks guest and children to compare everything and to end.
    pub(crate) fn ask_to_end(&mut self) {
        self.stop(false);
        let _ = kill_process_group(self.pid(), Signal::TERM);
    }

    /// Waits for the end that was asked for; a complaint when it does not come, or is another.
    pub(crate) fn end(mut self, was_killed: bool) -> Result<Counts, String> {
        let deadline = Instant::now() + PATIENCE;
        let mut left = true;
        while left && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
            let _ = self.process.try_wait();
            left = test_kill_process_group(self.pid()).is_ok() && self.any_alive();
        }
        let _ = kill_process_group(self.pid(), Signal::KILL);
        let status = self.process.wait().unwrap();
        if left {
            return Err(format!("guest {} does not end", self.number));
        }
        // Before its first step it does not know the signal yet.
        let early = status.signal() == Some(15) && self.counts().steps() == 0;
        if status.success() || was_killed || early {
            return Ok(self.counts());
        }
        Err(format!("guest {} ended with {status}", self.number))
    }

    /// Whether a process of the group is more than a zombie that its parent has not waited for.
    fn any_alive(&self) -> bool {
        let group = self.pid().as_raw_pid().to_string();
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes.into_iter().any(|entry| {
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let after_name = stat.rsplit(") ").next().unwrap_or_default();
            let mut fields = after_name.split(' ');
            fields.next().is_some_and(|state| state != "Z") && fields.nth(1) == Some(&group)
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.process.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = kill_process_group(self.pid(), Signal::KILL);
            let _ = self.process.wait();
        }
    }
}
