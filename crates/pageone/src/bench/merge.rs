//! `pageone bench merge`: the same guests merged by PageONE and by KSM.

use std::cell::Cell;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use sys::ksm::Ksm;
use sys::signals::{self, Signals};
use wire::{Reply, Request, Setting};

use super::content::Content;
use super::error::BenchError;
use super::guest::BenchGuest;
use super::ksm::{KsmContender, KsmGuard};
use super::measure::{self, Contender, Plan};
use super::report::{Machine, Report, Row};
use crate::run::launch::Launch;
use crate::view::status;
use crate::{client, human, paths};

/// The period at which the steady state is measured: the default of daily life.
const DAILY_PERIOD_MS: u64 = 20_000;
/// Time for a daemon to start, answer or end.
const PATIENCE: Duration = Duration::from_secs(20);

/// An engine to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Engine {
    Pageone,
    Ksm,
}

#[derive(clap::Args, Serialize)]
pub(crate) struct Args {
    /// Number of guests
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    guests: u64,
    /// Memory of each guest, in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    guest_mib: u64,
    /// Probability that a run of pages is the same in all guests
    #[arg(long, default_value_t = 0.7, value_parser = probability)]
    dup: f64,
    /// Pages in a run
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    run_pages: u64,
    /// Mean number of leading zero bytes in a page
    #[arg(long, default_value_t = 0.0, value_parser = prefix)]
    zero_prefix: f64,
    /// What to measure
    #[arg(long, value_delimiter = ',', default_value = "pageone,ksm")]
    engines: Vec<Engine>,
    /// Worker threads of PageONE, a row each (KSM has one thread)
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Give each guest the runs in an order of its own
    #[arg(long)]
    shuffle: bool,
    /// The number from which all content is made: the same number makes the same content
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// PageONE's period until all is merged; afterwards it is 20 s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = human::period)]
    #[serde(serialize_with = "as_text")]
    merge_period: Duration,
    /// How long to measure the steady state
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = human::period)]
    #[serde(serialize_with = "as_text")]
    steady: Duration,
    /// Give up on a run after this time
    #[arg(long, value_name = "TIME", default_value = "5min", value_parser = human::period)]
    #[serde(serialize_with = "as_text")]
    limit: Duration,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let waited = [signals::SIGINT, signals::SIGTERM, signals::SIGHUP];
    let signals = Signals::block(&waited).context("cannot wait for signals")?;
    let broken_off = Cell::new(false);
    let interrupted = || {
        let now = signals.next().is_ok_and(|arrived| arrived.is_some());
        broken_off.set(broken_off.get() || now);
        broken_off.get()
    };
    let rows = compare(args, &interrupted)?;
    let errors: u64 = rows.iter().map(|row| row.errors).sum();
    let report = Report {
        machine: Machine::here(),
        options: args,
        rows,
    };
    match args.json {
        true => println!("{}", serde_json::to_string(&report)?),
        false => print!("{report}"),
    }
    if errors > 0 {
        bail!("{errors} pages were not what they should be");
    }
    Ok(())
}

fn compare(args: &Args, interrupted: &dyn Fn() -> bool) -> Result<Vec<Row>> {
    let exe = std::env::current_exe().context("cannot find out where this program is")?;
    let content = Content {
        seed: args.seed,
        dup: args.dup,
        run_pages: args.run_pages,
        zero_prefix: args.zero_prefix,
        pages: args.guest_mib * 256,
        shuffle: args.shuffle,
    };
    let guest = |number| {
        let mut command = Command::new(&exe);
        command.args(BenchGuest::words(&content, number));
        command
    };
    let plan = Plan {
        guests: args.guests,
        content,
        steady: args.steady,
        limit: args.limit,
        guest: &guest,
        interrupted,
        progress: &|text| eprintln!("{text}"),
    };
    plan.check_memory()?;
    let guard = guard_ksm(args, &exe)?;
    let mut rows = Vec::new();
    for engine in &args.engines {
        match engine {
            Engine::Ksm => {
                let mut ksm = KsmContender::new(Ksm::default())?;
                rows.push(measure::measure(&plan, &mut ksm)?);
            }
            Engine::Pageone => {
                guard.as_ref().map_or(Ok(()), KsmGuard::pause)?;
                for &threads in &args.threads {
                    let mut pageone = PageOne::start(&exe, threads, args.merge_period)?;
                    rows.push(measure::measure(&plan, &mut pageone)?);
                }
            }
        }
    }
    Ok(rows)
}

/// Guards KSM's knobs, if this comparison has to turn any: KSM is to be measured, or it runs and
/// would merge beside PageONE.
fn guard_ksm(args: &Args, exe: &std::path::Path) -> Result<Option<KsmGuard>> {
    let ksm = Ksm::default();
    let wanted = args.engines.contains(&Engine::Ksm);
    if !ksm.exists() {
        return match wanted {
            true => bail!("this kernel has no KSM: measure --engines pageone"),
            false => Ok(None),
        };
    }
    if !wanted && ksm.number("run")? == 0 {
        return Ok(None);
    }
    let mut watchdog = Command::new(exe);
    watchdog.arg("ksm-watchdog");
    let guard = KsmGuard::take(ksm, watchdog);
    Ok(Some(guard.context("turning KSM takes root")?))
}

/// PageONE as a contender: a daemon process of its own, as in daily life.
struct PageOne {
    daemon: Child,
    threads: u16,
    agent: PathBuf,
    folder: tempfile::TempDir,
}

impl PageOne {
    fn start(exe: &std::path::Path, threads: u16, period: Duration) -> Result<Self> {
        let agent = paths::agent()?;
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(exe);
        command
            .args(["daemon", "--socket"])
            .arg(folder.path().join("socket"))
            .args(["--threads", &threads.to_string()])
            .args([
                "--merge-period",
                &humantime::format_duration(period).to_string(),
            ])
            .env("PAGEONE_LOG", "warn")
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

impl Contender for PageOne {
    fn name(&self) -> &'static str {
        "pageone"
    }

    fn threads(&self) -> u16 {
        self.threads
    }

    fn equip(&self, guest: &mut Command) {
        let launch = Launch {
            agent: &self.agent,
            socket: &self.socket(),
            domain: None,
            also_ksm: false,
            any: None,
        };
        launch.equip(guest);
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

    fn process(&self) -> u32 {
        self.daemon.id()
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

/// A time in the options, the way it is written on the command line.
fn as_text<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&humantime::format_duration(*time))
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err(format!("`{text}` is no probability, 0 to 1")),
    }
}

fn prefix(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.0..=4096.0).contains(&value) => Ok(value),
        _ => Err(format!("`{text}` is no number of bytes, 0 to 4096")),
    }
}
