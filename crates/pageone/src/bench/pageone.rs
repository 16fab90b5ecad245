//! PageONE as a contender.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use sys::signals;
use wire::{GuestStatus, Reply, Request, Setting, WhyNotCode};

use super::error::BenchError;
use super::measure::Contender;
use crate::launch::Launch;
use crate::view::status;
use crate::{client, paths};

/// The period at which the steady state is measured: the default of daily life.
const DAILY_PERIOD_MS: u64 = 20_000;
/// Time for a daemon to start, answer or end.
const PATIENCE: Duration = Duration::from_secs(20);

/// PageONE as a contender: a daemon process of its own, as in daily life.
pub(super) struct PageOne {
    daemon: Child,
    threads: u16,
    agent: PathBuf,
    folder: tempfile::TempDir,
}

impl PageOne {
    /// Starts a daemon with `threads` workers and these flags besides, and waits until it serves.
    ///
    /// # Errors
    /// It does not start, or not in time.
    pub(super) fn start(
        exe: &std::path::Path,
        threads: u16,
        period: Duration,
        knobs: &[&str],
    ) -> Result<Self> {
        let agent = paths::agent()?;
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(exe);
        command
            .args(["daemon", "--no-keep", "--socket"])
            .arg(folder.path().join("socket"))
            .args(["--threads", &threads.to_string()])
            .args([
                "--merge-period",
                &humantime::format_duration(period).to_string(),
            ])
            .args(knobs)
            .env("PAGEONE_LOG", "warn")
            // The machine's configuration and policy would change the figures.
            .env("CONFIGURATION_DIRECTORY", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let daemon = signals::prepare_child(&mut command, true).spawn();
        let daemon = daemon.context("cannot start the daemon")?;
        let mut this = Self {
            daemon,
            threads,
            agent,
            folder,
        };
        this.wait_until_it_serves()?;
        Ok(this)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn wait_until_it_serves(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while status::ask(&self.socket()).is_err() {
            if let Some(end) = self.daemon.try_wait()? {
                bail!("the daemon ended early ({end})");
            }
            if Instant::now() > deadline {
                bail!("the daemon does not answer");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn failed(error: anyhow::Error) -> BenchError {
        BenchError::Contender {
            name: "pageone",
            why: format!("{error:#}"),
        }
    }
}

/// Whether `guests` have so many mappings of those that they may have (`limit`) that runs are left alone; in words.
fn scarce(guests: &[GuestStatus], limit: u64) -> Option<String> {
    // From half of the budget on, short runs are not worth theirs.
    let near = engine::mapping_budget(limit) / 2;
    let waits = |guest: &GuestStatus| {
        let reasons = guest.reasons.iter();
        let put_off = reasons.filter(|why| why.code == WhyNotCode::PutOff);
        put_off.map(|why| why.pages).sum::<u64>()
    };
    let scarce = guests.iter().filter(|guest| guest.vmas >= near);
    let pages: u64 = scarce.map(waits).sum();
    (pages > 0).then(|| {
        format!(
            "stopped for want of mappings: {pages} pages wait at vm.max_map_count {limit}; see --max-map-count and `pageone doctor`"
        )
    })
}

impl Contender for PageOne {
    fn name(&self) -> &'static str {
        "pageone"
    }

    fn threads(&self) -> u16 {
        self.threads
    }

    fn equip(&self, guest: &mut Command) {
        Launch::new(&self.agent, &self.socket()).equip(guest);
    }

    fn launcher(&self) -> Vec<OsString> {
        let socket = self.socket().into_os_string();
        let mut words = ["run", "--any", "--any-after", "1s", "--socket"]
            .map(OsString::from)
            .to_vec();
        words.extend([socket, OsString::from("--")]);
        words
    }

    fn allow(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    fn has_begun(&mut self) -> Result<bool, BenchError> {
        // What is settled is read, and what was read is in one of these classes.
        let now = status::ask(&self.socket()).map_err(Self::failed)?;
        Ok(now.pages_shared + now.pages_unshared + now.zero_pages > 0)
    }

    fn is_done(&mut self) -> Result<bool, BenchError> {
        // What is private lies among what is shared and settles after that is merged.
        let now = status::ask(&self.socket()).map_err(Self::failed)?;
        Ok(now.pages_volatile == 0)
    }

    fn hindrance(&mut self) -> Result<Option<String>, BenchError> {
        let now = status::ask(&self.socket()).map_err(Self::failed)?;
        let limit = super::mappings::now().unwrap_or(u64::MAX);
        Ok(scarce(&now.guests, limit))
    }

    fn process(&self) -> Option<u32> {
        Some(self.daemon.id())
    }

    fn relax(&mut self) -> Result<(), BenchError> {
        let request = Request::Set(vec![Setting::MergePeriodMs(DAILY_PERIOD_MS)]);
        match client::ask(&self.socket(), &request, PATIENCE) {
            Ok(Reply::Done) => Ok(()),
            Ok(other) => Err(Self::failed(anyhow::anyhow!("{other:?}"))),
            Err(error) => Err(Self::failed(error)),
        }
    }
}

impl Drop for PageOne {
    fn drop(&mut self) {
        let pid = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
        let deadline = Instant::now() + PATIENCE;
        while matches!(self.daemon.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[cfg(test)]
mod tests {
    use wire::WhyNot;

    use super::*;

    #[test]
    fn mappings_are_wanting_where_guests_have_many_and_pages_wait() {
        let guest = |vmas, pages| GuestStatus {
            vmas,
            reasons: vec![WhyNot {
                code: WhyNotCode::PutOff,
                pages,
                why: String::new(),
            }],
            ..GuestStatus::default()
        };
        let said = |guests: &[GuestStatus]| scarce(guests, 65530);
        assert_eq!(said(&[guest(100, 5), guest(40_000, 0)]), None);
        let why = said(&[guest(100, 5), guest(24_574, 7), guest(49_000, 2)]).unwrap();
        assert!(
            why.contains(": 9 pages wait at vm.max_map_count 65530"),
            "{why}"
        );
        assert_eq!(scarce(&[guest(49_000, 2)], 1 << 20), None);
    }
}
