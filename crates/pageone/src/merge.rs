//! `pageone merge PID…`: has the memory of guests merged now, and tells the saving.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;
use wire::{GuestStatus, MergeNow, MergedNow, Reply, Request, WhyNot, WhyNotCode};

use crate::knobs::cpu_limit;
use crate::output::{print, say};
use crate::view::status;
use crate::{client, head, human, paths};

/// The engine may be in a round, which takes some periods at most; then it takes one.
const PATIENCE: Duration = Duration::from_secs(600);

/// The longest wait for a first answer.
const ANSWER: Duration = Duration::from_secs(30);

/// Requests in a row that bring nothing.
const MOST_VAIN: u32 = 10;

/// A longer wait for the daemon is told.
const NOTABLE: Duration = Duration::from_millis(100);

/// What the command tells: all answers of the daemon together, and the rest of its time.
#[derive(Debug, Serialize)]
struct Told {
    #[serde(flatten)]
    merged: MergedNow,
    /// How long the command waited for the daemon, or paused, in microseconds.
    waited_us: u64,
    /// Why not more was merged.
    reasons: Vec<Reason>,
}

/// Why memory of a guest was not merged, as the daemon's status has it.
#[derive(Debug, Serialize)]
struct Reason {
    pid: u32,
    code: WhyNotCode,
    why: String,
}

/// `next` added to what was merged before.
fn add(sum: &mut MergedNow, next: MergedNow) {
    *sum = MergedNow {
        pages: sum.pages + next.pages,
        saved_bytes: sum.saved_bytes + next.saved_bytes,
        took_us: sum.took_us + next.took_us,
        used_us: sum.used_us + next.used_us,
        ..next
    };
}

/// The part of the command's time in which the daemon did not work for it.
fn waited_us(all: Duration, took_us: u64) -> u64 {
    let all = u64::try_from(all.as_micros()).unwrap_or(u64::MAX);
    all.saturating_sub(took_us)
}

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// Ask again until nothing is left for want of time
    #[arg(long)]
    wait: bool,
    /// Work in bursts with pauses between them, so that daemon and agents take this part of one core; the daemon's own limit holds as well
    #[arg(long, value_name = "PERCENT|none", default_value = "none", value_parser = cpu_limit)]
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
    let begun = Instant::now();
    // Merging takes long. Whether the daemon answers at all shows by a question that does not.
    client::ask(&socket, &Request::Domain(String::new()), ANSWER)?;
    let (mut merged, mut vain) = (ask(&socket, args)?, 0);
    let mut rest = pause(args.cpu_limit, &merged);
    // What brings nothing again and again is written all the time, or its agent does not answer.
    while args.asks_again() && !merged.finished && vain < MOST_VAIN {
        std::thread::sleep(rest);
        let next = ask(&socket, args)?;
        rest = pause(args.cpu_limit, &next);
        vain = if next.pages == 0 { vain + 1 } else { 0 };
        add(&mut merged, next);
    }
    let waited_us = waited_us(begun.elapsed(), merged.took_us);
    let guests = unmerged(&socket, args, &merged);
    let reasons = reasons(&guests, merged.finished && merged.pages == 0);
    let told = Told {
        merged,
        waited_us,
        reasons,
    };
    match args.json {
        true => print(&head::line(&told)?)?,
        false => tell(&told, args, &guests)?,
    }
    let merged = &told.merged;
    match merged.left_alone.len() == args.asked().len() && merged.pages == 0 {
        true => bail!("nothing was merged"),
        false => Ok(()),
    }
}

impl Args {
    /// The processes, each once.
    fn asked(&self) -> Vec<u32> {
        let pids: BTreeSet<_> = self.pids.iter().copied().collect();
        pids.into_iter().collect()
    }

    /// Whether one request is not all.
    fn asks_again(&self) -> bool {
        self.wait || self.cpu_limit > 0
    }
}

/// How long after such a burst the next may begin, so that both times together keep to the limit, in percent; 0: none.
fn pause(limit: u32, burst: &MergedNow) -> Duration {
    let share = (burst.used_us * 100).checked_div(limit.into());
    Duration::from_micros(share.unwrap_or(0).saturating_sub(burst.took_us))
}

fn ask(socket: &Path, args: &Args) -> Result<MergedNow> {
    let request = Request::Merge(MergeNow {
        pids: args.asked(),
        start: 0,
        end: u64::MAX,
        brief: args.cpu_limit > 0,
    });
    match client::ask_quietly(socket, &request, PATIENCE)? {
        Reply::Merged(merged) => Ok(merged),
        Reply::Refused(why) | Reply::Crowded(why) => bail!("not merged: {why}"),
        _ => bail!(client::UNEXPECTED),
    }
}

fn tell(told: &Told, args: &Args, guests: &[GuestStatus]) -> Result<()> {
    let merged = &told.merged;
    let waited = match Duration::from_micros(told.waited_us) {
        short if short < NOTABLE => String::new(),
        long if args.asks_again() => {
            format!(", and {:.1} s of waits and pauses", long.as_secs_f64())
        }
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
    let tell = |pid: u32, why: &str| say(&format!("pageone: process {pid}: {why}"));
    for reason in &told.reasons {
        let why = sys::foreign::Foreign(&reason.why).to_string();
        tell(reason.pid, &why);
    }
    let is_cut = told.reasons.iter().any(|one| one.code == WhyNotCode::Limit);
    if !merged.finished {
        say(match args.asks_again() {
            _ if is_cut => "pageone: not all of it: a limit keeps the rest from being merged",
            true => {
                "pageone: not all of it: the rest is written all the time, or its agent does not answer; the next rounds try again"
            }
            false => {
                "pageone: not all of it: the rest is merged in the next rounds, or by `pageone merge --wait`"
            }
        });
        return Ok(());
    }
    for guest in guests.iter().filter(|_| merged.pages == 0) {
        match guest.pages_sharing + guest.zero_pages {
            _ if guest.regions == 0 || waits(guest) => {}
            0 => tell(
                guest.pid,
                "of the other pages none equals another one of its domain",
            ),
            _ => tell(
                guest.pid,
                "nothing more of it equals other pages of its domain",
            ),
        }
    }
    Ok(())
}

/// Whether pages of it are equal, and have no room.
fn waits(guest: &GuestStatus) -> bool {
    let is_so = |reason: &WhyNot| matches!(reason.code, WhyNotCode::Limit | WhyNotCode::PutOff);
    guest.reasons.iter().any(is_so)
}

/// The guests that were named and not left alone. The command has done its work: a user who may not see a status is told nothing more.
fn unmerged(socket: &Path, args: &Args, merged: &MergedNow) -> Vec<GuestStatus> {
    let status = status::ask_quietly(socket);
    let guests = status.map_or_else(|_| Vec::new(), |status| status.guests);
    let is_left_alone = |pid| merged.left_alone.iter().any(|alone| alone.pid == pid);
    let named = |guest: &GuestStatus| args.pids.contains(&guest.pid) && !is_left_alone(guest.pid);
    guests.into_iter().filter(named).collect()
}

/// Their reasons. Where something was merged, or not all is finished, these are of what will stay unmerged: the others may be of pages
/// whose turn has not come.
fn reasons(guests: &[GuestStatus], all: bool) -> Vec<Reason> {
    let of = |guest: &GuestStatus| {
        let pid = guest.pid;
        let reason = move |reason: &WhyNot| Reason {
            pid,
            code: reason.code,
            why: reason.why.clone(),
        };
        guest.reasons.iter().map(reason).collect::<Vec<_>>()
    };
    let stays = |code| {
        use WhyNotCode as Code;
        matches!(
            code,
            Code::NoAnswer | Code::Stuck | Code::Limit | Code::PutOff
        )
    };
    // That looks are still to come says nothing of what this command has found, and of equal pages it tells by itself.
    let counts = |code| !matches!(code, WhyNotCode::Observing | WhyNotCode::Unique);
    let reasons = guests.iter().flat_map(of);
    let told = reasons.filter(|reason| all && counts(reason.code) || stays(reason.code));
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_the_daemons_work_is_waiting() {
        let second = Duration::from_secs(1);
        assert_eq!(waited_us(second, 300_000), 700_000);
        assert_eq!(waited_us(second, 2_000_000), 0);
    }

    #[test]
    fn where_something_was_merged_only_what_stays_is_told() {
        let reason = |code| WhyNot {
            code,
            pages: 0,
            why: "x".to_owned(),
        };
        let guest = GuestStatus {
            pid: 7,
            reasons: [
                WhyNotCode::NoAnswer,
                WhyNotCode::Alone,
                WhyNotCode::Limit,
                WhyNotCode::PutOff,
                WhyNotCode::Observing,
                WhyNotCode::Unique,
            ]
            .map(reason)
            .into(),
            ..GuestStatus::default()
        };
        let of = |all| reasons(std::slice::from_ref(&guest), all);
        assert_eq!(of(true).len(), 4);
        let told = of(false);
        assert_eq!((told.len(), told[0].pid), (3, 7));
        assert!(told.iter().all(|one| one.code != WhyNotCode::Alone));
    }

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
