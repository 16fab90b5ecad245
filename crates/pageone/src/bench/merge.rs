//! `pageone bench merge`: the same guests merged by PageONE and by KSM.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use sys::ksm::{Ksm, Tuning};

use super::content::Content;
use super::guest::BenchGuest;
use super::ksm::{self, KsmContender};
use super::mappings;
use super::measure::{self, Plan};
use super::pageone::PageOne;
use super::report::{Machine, Report, Row};
use crate::daemon::host::able;
use crate::head;
use crate::human;
use crate::ksm::guard::KsmGuard;
use crate::output::{print, say};

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
    /// Memory of each guest: MiB, or with a unit, as 2G
    #[arg(long, value_name = "SIZE", default_value_t = 1024, value_parser = human::mib::<{ 1 << 24 }>)]
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
    /// Raise vm.max_map_count to N for the time of the runs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=mappings::MOST))]
    max_map_count: Option<u64>,
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
    let interrupted = measure::interrupted()?;
    let exe = std::env::current_exe().context("cannot find out where this program is")?;
    // Daemons and guests read it when they begin, and it goes back when all have ended.
    let most = args.max_map_count;
    let _raised = most.map_or(Ok(None), |most| mappings::raise(&exe, most))?;
    let rows = compare(args, &exe, &interrupted)?;
    let errors: u64 = rows.iter().map(|row| row.errors).sum();
    let report = Report {
        machine: Machine::here(),
        options: args,
        rows,
    };
    match args.json {
        true => print(&head::line(&report)?)?,
        false => print(&report.to_string())?,
    }
    if errors > 0 {
        bail!("{errors} pages were not what they should be");
    }
    Ok(())
}

fn compare(args: &Args, exe: &Path, interrupted: &dyn Fn() -> bool) -> Result<Vec<Row>> {
    if args.engines.contains(&Engine::Pageone) {
        able()?;
    }
    let content = Content {
        seed: args.seed,
        dup: args.dup,
        run_pages: args.run_pages,
        zero_prefix: args.zero_prefix,
        pages: args.guest_mib * 256,
        shuffle: args.shuffle,
    };
    let guest = |number| {
        let mut command = Command::new(exe);
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
        progress: &say,
    };
    plan.check_memory()?;
    let guard = ksm::guard(args.engines.contains(&Engine::Ksm), exe)?;
    let mut rows = Vec::new();
    for engine in &args.engines {
        match engine {
            Engine::Ksm => {
                let mut ksm = KsmContender::new(Ksm::default(), "ksm", Tuning::Fast)?;
                rows.push(measure::measure(&plan, &mut ksm)?);
            }
            Engine::Pageone => {
                guard.as_ref().map_or(Ok(()), KsmGuard::pause)?;
                for &threads in &args.threads {
                    let mut pageone = PageOne::start(exe, threads, args.merge_period, &[])?;
                    rows.push(measure::measure(&plan, &mut pageone)?);
                }
            }
        }
    }
    Ok(rows)
}

/// A time in the options, the way it is written on the command line.
pub(super) fn as_text<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
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
