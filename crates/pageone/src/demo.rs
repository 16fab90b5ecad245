//! `pageone demo`: live guests of this machine, merged before one's eyes.

pub(crate) mod guest;

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use sys::meminfo::MemInfo;
use wire::{KnobValues, Status};

use crate::bench::{Answer, Guest};
use crate::daemon::host::Host;
use crate::knobs::KnobFlags;
use crate::launch::Launch;
use crate::output::print;
use crate::tidy::Tidy;
use crate::{human, paths};
use guest::{Layout, available_file_pages};

const MIB: u64 = 1 << 20;
/// Memory that the demo leaves to everything else: so much, or a tenth of all there is.
const RESERVE: u64 = 1024 * MIB;
/// The size of a guest where none is asked for and the memory is there.
const USUAL_MIB: u64 = 256;
/// The smallest guest that shows anything.
const LEAST_MIB: u64 = 16;
/// And the greatest.
const MOST_MIB: u64 = 1 << 20;
/// The longest time for merging.
const LIMIT: Duration = Duration::from_secs(40);
/// Time for a guest to fill its memory, or to verify all of it.
const PATIENCE: Duration = Duration::from_secs(120);

/// The time between two looks: short, so that the demo is.
const PERIOD_MS: u64 = 1000;

#[derive(clap::Args)]
#[command(mut_arg("merge_period", |knob| knob.help(format!("The time between two looks at what was written [default: {}]", humantime::format_duration(Duration::from_millis(PERIOD_MS))))))]
pub(crate) struct Args {
    /// Number of guests
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(2..=1000))]
    guests: u64,
    /// Memory of each guest: MiB, or with a unit, as 2G [default: 256, or what fits]
    #[arg(long, value_name = "SIZE", value_parser = mib)]
    mib: Option<u64>,
    #[command(flatten)]
    knobs: KnobFlags,
}

/// Whole MiB from a person, of 16 MiB to 1 TiB.
fn mib(text: &str) -> Result<u64, String> {
    let mib = human::mib::<MOST_MIB>(text).ok();
    mib.filter(|&mib| mib >= LEAST_MIB)
        .ok_or_else(|| format!("`{text}` is no size of 16 MiB to 1 TiB"))
}

/// What the demo found.
struct Outcome {
    before: u64,
    after: u64,
    took: Duration,
    status: Status,
    answers: Answer,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let memory = MemInfo::read().context("cannot read memory")?;
    let mib = fit(args.guests, args.mib, memory)?;
    let pages = usize::try_from(mib * 256)?;
    let layout = Layout::new(pages, available_file_pages(pages));
    let knobs = args.knobs.over(KnobValues {
        merge_period_ms: PERIOD_MS,
        ..KnobValues::default()
    });
    let options = engine::Options {
        knobs,
        ..engine::Options::default()
    };
    print(&format!(
        "{} guests of {mib} MiB: {} % files of this machine, {} % zeros, the rest private; a look \
         every {} (daily life: every 20s)\n",
        args.guests,
        layout.files * 100 / pages,
        layout.zeros * 100 / pages,
        humantime::format_duration(Duration::from_millis(knobs.merge_period_ms)),
    ))?;
    let tidy = Tidy::begin()?;
    let host = Host::start_able(options)?;
    tidy.remove_folder_of(host.socket())?;
    let outcome = show(args, layout, &host);
    host.stop()?;
    let outcome = outcome?;
    print(&text(&outcome))?;
    verdict(&outcome)
}

/// The size of guests: the one asked for, else the usual one or what fits the memory.
///
/// # Errors
/// It does not fit.
fn fit(guests: u64, asked: Option<u64>, memory: MemInfo) -> Result<u64> {
    let reserve = RESERVE.max(memory.total / 10);
    // 5 % for page tables and what merging keeps per page.
    let room = memory.available.saturating_sub(reserve) * 20 / 21 / guests / MIB;
    let least = asked.unwrap_or(LEAST_MIB);
    if room < least {
        bail!(
            "{guests} guests of {least} MiB need {} MiB of memory, {} MiB for everything else included, \
             and {} MiB are available: ask for fewer or smaller guests",
            (guests * least * 21 / 20) + reserve / MIB,
            reserve / MIB,
            memory.available / MIB
        );
    }
    Ok(asked.unwrap_or(room.min(USUAL_MIB)))
}

fn show(args: &Args, layout: Layout, host: &Host) -> Result<Outcome> {
    let mut guests = start_guests(args, layout, host)?;
    let before = proportional(&guests)?;
    let took = merge(layout, host, &mut guests)?;
    let answers = verify(&mut guests)?;
    let status = host.status();
    Ok(Outcome {
        before,
        after: proportional(&guests)? + status.metadata_bytes,
        took,
        status,
        answers,
    })
}

fn start_guests(args: &Args, layout: Layout, host: &Host) -> Result<Vec<Guest>> {
    let exe = std::env::current_exe().context("cannot find out where this program is")?;
    let agent = paths::agent()?;
    let launch = Launch::new(&agent, host.socket());
    let mut guests = Vec::new();
    for number in 0..args.guests {
        let mut command = Command::new(&exe);
        command.args(["guest", "demo"]);
        command.arg(format!("--number={number}"));
        command.arg(format!("--pages={}", layout.pages));
        command.arg(format!("--file-pages={}", layout.files));
        launch.equip(&mut command);
        guests.push(Guest::start(&mut command)?);
    }
    let bar = bar(args.guests, "filling   {bar:30} {pos} of {len} guests");
    for guest in &mut guests {
        guest.answer(PATIENCE)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(guests)
}

fn bar(len: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(len).with_style(style)
}

/// Offers the memory and follows the merging until nothing more is gained for a while; gives the
/// time from the offer to the last gain.
fn merge(layout: Layout, host: &Host, guests: &mut [Guest]) -> Result<Duration> {
    let begin = Instant::now();
    collect(guests, "offer", PATIENCE)?;
    let ideal = layout.ideal_saved_bytes(guests.len());
    let bar = bar(
        ideal,
        "merging   {bar:30} {bytes} of {total_bytes} saved, {elapsed}{msg}",
    );
    let period = Duration::from_millis(host.status().knobs.merge_period_ms);
    let patience = (period * 3).max(Duration::from_secs(3));
    let (mut best, mut grown) = (0, Instant::now());
    while begin.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(250));
        let saved = host.status().saved_bytes;
        if saved > best + ideal / 200 {
            (best, grown) = (saved, Instant::now());
        }
        let answers = collect(guests, "report", PATIENCE)?;
        bar.set_position(saved.min(ideal));
        bar.set_message(format!(
            "; {} verified, {} errors",
            human::size(answers.verified_bytes),
            answers.errors
        ));
        if best > 0 && grown.elapsed() > patience || answers.errors > 0 {
            break;
        }
    }
    bar.finish();
    Ok(grown - begin)
}

fn verify(guests: &mut [Guest]) -> Result<Answer> {
    for guest in guests.iter_mut() {
        guest.tell("verify")?;
    }
    sum(guests, PATIENCE)
}

fn collect(guests: &mut [Guest], order: &str, patience: Duration) -> Result<Answer> {
    for guest in guests.iter_mut() {
        guest.tell(order)?;
    }
    sum(guests, patience)
}

fn sum(guests: &mut [Guest], patience: Duration) -> Result<Answer> {
    let mut sum = Answer::default();
    for guest in guests {
        let answer = guest.answer(patience)?;
        sum.verified_bytes += answer.verified_bytes;
        sum.errors += answer.errors;
        sum.written_pages += answer.written_pages;
    }
    Ok(sum)
}

/// The memory of all guests; a frame that several share counts once.
fn proportional(guests: &[Guest]) -> Result<u64> {
    let each = guests
        .iter()
        .map(|guest| sys::usage::proportional_bytes(guest.pid()));
    Ok(each.sum::<std::io::Result<u64>>()?)
}

fn text(outcome: &Outcome) -> String {
    let Outcome {
        before,
        after,
        status,
        answers,
        ..
    } = outcome;
    let saved = i64::try_from(i128::from(*before) - i128::from(*after)).unwrap_or(0);
    let percent = saved.saturating_mul(100) / i64::try_from(*before).unwrap_or(1).max(1);
    let mut text = String::from("\n");
    let mut line = |name: &str, value: String, note: &str| {
        text += &format!("{name:<12} {value:>12}  {note}\n");
    };
    line("before", human::size(*before), "memory of the guests");
    line(
        "after",
        human::size(*after),
        "the same, and all that PageONE keeps for it",
    );
    line("saved", human::bytes(saved), &format!("{percent} %"));
    line(
        "time",
        format!("{:.1} s", outcome.took.as_secs_f64()),
        "from the offer to the last gain, two periods of observing included",
    );
    line(
        "CPU",
        format!("{:.2} s", status.cpu_seconds),
        "engine and agents",
    );
    line(
        "rewritten",
        answers.written_pages.to_string(),
        "pages, while merged or waiting for it",
    );
    line(
        "broken",
        status.pages_broken.to_string(),
        "merged pages that were rewritten",
    );
    line(
        "verified",
        human::size(answers.verified_bytes),
        "compared with checksums, while merged",
    );
    line("errors", answers.errors.to_string(), "");
    text
}

fn verdict(outcome: &Outcome) -> Result<()> {
    if outcome.answers.errors > 0 {
        bail!(
            "{} pages were not what they should be",
            outcome.answers.errors
        );
    }
    if outcome.status.guests.is_empty() {
        bail!("no guest reached the engine");
    }
    if outcome.status.saved_bytes == 0 {
        bail!("nothing was merged");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gigabyte_or_a_tenth_is_kept_back_and_what_does_not_fit_is_refused() {
        let memory = |total, available| MemInfo {
            total: total * MIB,
            available: available * MIB,
            slab_unreclaimable: 0,
            page_tables: 0,
        };
        let fits = |guests, asked, memory| fit(guests, asked, memory).ok();
        assert_eq!(fits(6, None, memory(8192, 8000)), Some(256));
        assert_eq!(fits(6, None, memory(2048, 1654)), Some(100), "it shrinks");
        assert_eq!(
            fits(6, Some(101), memory(2048, 1654)),
            None,
            "it was asked for"
        );
        assert_eq!(fits(6, Some(100), memory(2048, 1654)), Some(100));
        assert_eq!(fits(6, None, memory(2048, 1100)), None);
        assert_eq!(
            fits(2, Some(1024), memory(40_960, 6144)),
            None,
            "a tenth is 4 GiB"
        );
        let said = fit(1000, Some(100_000), memory(8192, 8000))
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("105001024 MiB") && said.contains("8000 MiB are available"),
            "{said}"
        );
    }
}
