//! `pageone merge PID…`: has the memory of guests merged now, and tells what that saved.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;
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

/// A longer wait for the daemon is told.
const NOTABLE: Duration = Duration::from_millis(100);

/// All answers of the daemon together.
#[derive(Debug, Serialize)]
struct Sum {
    #[serde(flatten)]
    merged: MergedNow,
    /// How long the command waited for the daemon to begin and to answer, in microseconds.
    waited_us: u64,
}

impl Sum {
    /// The answer to a request that was made at `asked`.
    fn of(merged: MergedNow, asked: Instant) -> Self {
        let all = u64::try_from(asked.elapsed().as_micros()).unwrap_or(u64::MAX);
        Self {
            waited_us: all.saturating_sub(merged.took_us),
            merged,
        }
    }

    fn add(&mut self, next: Self) {
        self.waited_us += next.waited_us;
        let (sum, next) = (&mut self.merged, next.merged);
        *sum = MergedNow {
            pages: sum.pages + next.pages,
            saved_bytes: sum.saved_bytes + next.saved_bytes,
            took_us: sum.took_us + next.took_us,
            used_us: sum.used_us + next.used_us,
            ..next
        };
    }
}

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
    let mut rest = pause(args.cpu_limit, &sum.merged);
    let waits = args.wait || args.cpu_limit > 0;
    // What brings nothing again and again is written all the time, or its agent does not answer.
    while waits && !sum.merged.finished && vain < MOST_VAIN {
        std::thread::sleep(rest);
        let next = ask(&socket, args)?;
        rest = pause(args.cpu_limit, &next.merged);
        vain = if next.merged.pages == 0 { vain + 1 } else { 0 };
        sum.add(next);
    }
    let merged = &sum.merged;
    match args.json {
        true => print(&(serde_json::to_string(&Headed::first(&sum))? + "\n"))?,
        false => {
            tell(&sum)?;
            if merged.pages == 0 && merged.finished {
                tell_reasons(&socket, args, merged);
            }
        }
    }
    match merged.left_alone.len() == args.pids.len() && merged.pages == 0 {
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

fn ask(socket: &Path, args: &Args) -> Result<Sum> {
    let request = Request::Merge(MergeNow {
        pids: args.pids.clone(),
        start: 0,
        end: u64::MAX,
        brief: args.cpu_limit > 0,
    });
    let asked = Instant::now();
    match client::ask_quietly(socket, &request, PATIENCE)? {
        Reply::Merged(merged) => Ok(Sum::of(merged, asked)),
        Reply::Refused(why) | Reply::Crowded(why) => bail!("not merged: {why}"),
        _ => bail!("the daemon replied with something else"),
    }
}

fn tell(sum: &Sum) -> Result<()> {
    let Sum { merged, waited_us } = sum;
    let waited = match Duration::from_micros(*waited_us) {
        short if short < NOTABLE => String::new(),
        long => format!(", after a wait of {:.1} s", long.as_secs_f64()),
    };
    print(&format!(
        "{} merged, {} saved, in {:.3} s{waited}\n",
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
