//! `pageone bench timing`: what the time of an access tells a guest about its page.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use wire::{KnobValues, Request, Setting, Status};

use super::guests::Guest;
use super::probe::Timing;
use super::report::Machine;
use crate::daemon::host::Host;
use crate::launch::Launch;
use crate::output::print;
use crate::tidy::Tidy;
use crate::{client, head, human, paths};

/// The longest wait for a guest to fill its memory, for the engine to merge it, or for a reply.
const PATIENCE: Duration = Duration::from_secs(120);
/// The engine's period while the accesses are timed: it then does nothing.
const QUIET_MS: u64 = 3_600_000;
/// How long the engine may still be at the round in which the last page was merged.
const SETTLING: Duration = Duration::from_millis(500);

#[derive(clap::Args, serde::Serialize)]
pub(crate) struct Args {
    /// Pages of each kind
    #[arg(long, default_value_t = 16384, value_parser = clap::value_parser!(u32).range(32..=1 << 20))]
    pages: u32,
    /// The number from which all content is made: the same number makes the same content
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// PageONE's period until all is merged
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = human::period)]
    #[serde(skip)]
    merge_period: Duration,
    /// One JSON object
    #[arg(long)]
    #[serde(skip)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Report<'a> {
    machine: Machine,
    options: &'a Args,
    #[serde(flatten)]
    timing: Timing,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let timing = measure(args)?;
    if args.json {
        let report = Report {
            machine: Machine::here(),
            options: args,
            timing,
        };
        return print(&head::line(&report)?);
    }
    print(&timing.to_string())
}

fn measure(args: &Args) -> Result<Timing> {
    let tidy = Tidy::begin()?;
    let host = Host::start_able(engine::Options {
        knobs: KnobValues {
            merge_period_ms: u64::try_from(args.merge_period.as_millis())?,
            ..KnobValues::default()
        },
        ..engine::Options::default()
    })?;
    tidy.remove_folder_of(host.socket())?;
    let agent = paths::agent()?;
    let launch = Launch::new(&agent, host.socket());
    let mut owner = start(args, launch, "owner")?;
    let mut prober = start(args, launch, "prober")?;
    for guest in [&mut owner, &mut prober] {
        guest.answer(PATIENCE)?;
        guest.tell("offer")?;
        guest.answer(PATIENCE)?;
    }
    wait_until_merged(&host, args.pages.into())?;
    let quiet = Request::Set(vec![Setting::MergePeriodMs(QUIET_MS)]);
    client::ask(host.socket(), &quiet, PATIENCE)?;
    std::thread::sleep(SETTLING);
    let timing = prober.probe(PATIENCE)?;
    drop((owner, prober));
    host.stop()?;
    Ok(timing)
}

fn start(args: &Args, launch: Launch<'_>, role: &str) -> Result<Guest> {
    let exe = std::env::current_exe().context("cannot find out where this program is")?;
    let mut command = Command::new(exe);
    command.args(["guest", "timing", role]);
    command.arg(format!("--pages={}", args.pages));
    command.arg(format!("--seed={}", args.seed));
    launch.equip(&mut command);
    Ok(Guest::start(&mut command)?)
}

/// Waits until each page that has an equal one is merged, and each that has none was read.
fn wait_until_merged(host: &Host, pages: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let done = |now: &Status| {
        let counters = [
            now.pages_shared,
            now.pages_sharing,
            now.pages_unshared,
            now.zero_pages,
        ];
        counters == [pages; 4]
    };
    while !done(&host.status()) {
        if Instant::now() > deadline {
            bail!("the pages are not merged after {PATIENCE:?}: is the machine busy?");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
