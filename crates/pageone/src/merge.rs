//! `pageone merge PID…`: has the memory of guests merged now, and tells what that saved.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use wire::{GuestStatus, Knob, MergeNow, MergedNow, Reply, Request, Setting};

use crate::head::Headed;
use crate::output::{print, say};
use crate::view::status;
use crate::{client, human, paths};

/// The engine may be in a round, which takes some periods at most; then it takes one.
const PATIENCE: Duration = Duration::from_secs(600);

/// The longest wait for a first answer.
const ANSWER: Duration = Duration::from_secs(30);

/// Requests in a row that bring nothing.
const MOST_VAIN: u32 = 10;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// Ask again until nothing is left for want of time
    #[arg(long)]
    wait: bool,
    /// Work in bursts with pauses between them, so that daemon and agents take this part of one core; the daemon's own limit holds as well
    #[arg(long, value_name = "PERCENT|none", default_value = "none", value_parser = limit)]
    cpu_limit: u32,
    /// One JSON object
    #[arg(long)]
    json: bool,
    /// Guests of this daemon, by process number
    #[arg(required = true, value_name = "PID", value_parser = human::process)]
    pids: Vec<u32>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let socket = paths::served(args.socket.as_deref())?;
    // Merging takes long. Whether the daemon answers at all shows by a question that does not.
    client::ask(&socket, &Request::Domain(String::new()), ANSWER)?;
    let (mut sum, mut vain) = (ask(&socket, args)?, 0);
    let mut rest = pause(args.cpu_limit, &sum);
    let waits = args.wait || args.cpu_limit > 0;
    // What brings nothing again and again is written all the time, or its agent does not answer.
    while waits && !sum.finished && vain < MOST_VAIN {
        std::thread::sleep(rest);
        let next = ask(&socket, args)?;
        rest = pause(args.cpu_limit, &next);
        vain = if next.pages == 0 { vain + 1 } else { 0 };
        sum = MergedNow {
            pages: sum.pages + next.pages,
            saved_bytes: sum.saved_bytes + next.saved_bytes,
            took_us: sum.took_us + next.took_us,
            used_us: sum.used_us + next.used_us,
            ..next
        };
    }
    match args.json {
        true => print(&(serde_json::to_string(&Headed::first(&sum))? + "\n"))?,
        false => {
            tell(&sum)?;
            if sum.pages == 0 && sum.finished {
                tell_reasons(&socket, args, &sum);
            }
        }
    }
    match sum.left_alone.len() == args.pids.len() && sum.pages == 0 {
        true => bail!("nothing was merged"),
        false => Ok(()),
    }
}

/// How long after such a burst the next may begin, so that both times together keep to the limit, in percent; 0: none.
fn pause(limit: u32, burst: &MergedNow) -> Duration {
    let share = (burst.used_us * 100).checked_div(limit.into());
    Duration::from_micros(share.unwrap_or(0).saturating_sub(burst.took_us))
}

/// A limit, written as the knob's.
fn limit(text: &str) -> Result<u32, String> {
    match Knob::setting("cpu_limit", text) {
        Some(Ok(Setting::CpuLimit(percent))) => Ok(percent),
        Some(Err(why)) => Err(why),
        _ => unreachable!("cpu_limit is a knob"),
    }
}

fn ask(socket: &Path, args: &Args) -> Result<MergedNow> {
    let request = Request::Merge(MergeNow {
        pids: args.pids.clone(),
        start: 0,
        end: u64::MAX,
        brief: args.cpu_limit > 0,
    });
    match client::ask_quietly(socket, &request, PATIENCE)? {
        Reply::Merged(merged) => Ok(merged),
        Reply::Refused(why) | Reply::Crowded(why) => bail!("not merged: {why}"),
        _ => bail!("the daemon replied with something else"),
    }
}

fn tell(merged: &MergedNow) -> Result<()> {
    print(&format!(
        "{} merged, {} saved, in {:.3} s\n",
        human::count(merged.pages, "page"),
        human::size(merged.saved_bytes),
        Duration::from_micros(merged.took_us).as_secs_f64()
    ))?;
    for alone in &merged.left_alone {
        say(&format!(
            "pageone: the memory of process {} is left alone: {}",
            alone.pid,
            sys::foreign::Foreign(&alone.why)
        ));
    }
    if !merged.finished {
        say(
            "pageone: not all of it: the rest is merged in the next rounds, or by `pageone merge --wait`",
        );
    }
    Ok(())
}

/// Why nothing was merged of guests that were not left alone, as the daemon's status has it.
fn tell_reasons(socket: &Path, args: &Args, merged: &MergedNow) {
    // The command has done its work: who may not see a status is told nothing more.
    let Ok(status) = status::ask_quietly(socket) else {
        return;
    };
    let is_left_alone = |pid| merged.left_alone.iter().any(|alone| alone.pid == pid);
    let named = |guest: &&GuestStatus| args.pids.contains(&guest.pid) && !is_left_alone(guest.pid);
    for guest in status.guests.iter().filter(named) {
        let tell = |why: &str| say(&format!("pageone: process {}: {why}", guest.pid));
        for reason in &guest.reasons {
            tell(&sys::foreign::Foreign(&reason.why).to_string());
        }
        match guest.pages_sharing + guest.zero_pages {
            _ if guest.regions == 0 => {}
            0 => tell("of the other pages none equals another one of its domain"),
            _ => tell("nothing more of it equals other pages of its domain"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_and_pauses_together_keep_to_the_limit() {
        let burst = |used_us, took_us| MergedNow {
            used_us,
            took_us,
            ..MergedNow::default()
        };
        for (limit, used, took, expected) in [
            (0, 2_000_000, 1_000_000, 0),
            (10, 200_000, 500_000, 1_500_000),
            (100, 200_000, 500_000, 0),
            (150, 3_000_000, 1_500_000, 500_000),
        ] {
            let paused = pause(limit, &burst(used, took));
            assert_eq!(paused, Duration::from_micros(expected), "{limit} %");
        }
    }
}
