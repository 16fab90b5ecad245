//! `pageone ksm tune`: a goal is kept by turning KSM's knobs, which go back at the end.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sys::ksm::Ksm;

use super::course::{Course, Goal, Load, USUAL_COST, scan_seconds};
use super::facts::{Counters, Offered, PAGE, Reader};
use super::guard::{GuardError, KsmGuard, watchdog};
use super::watch::{Look, Step, signals};
use crate::human::{self, bytes, size, time};
use crate::output::say;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    goal: GoalArgs,
    #[command(flatten)]
    look: Look,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct GoalArgs {
    /// New memory is shared after at most this time: two whole scans
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    time_to_saving: Option<Duration>,
    /// ksmd takes this part of one CPU, like 10%
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    cpu_share: Option<f64>,
}

/// `10%` or `10`: a tenth.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    let percent = number.parse().ok();
    let within = percent.filter(|percent: &f64| (0.1..=100.0).contains(percent));
    let share = within.map(|percent| percent / 100.0);
    share.ok_or_else(|| format!("`{text}` is no part of a CPU: write it like 10%, from 0.1 to 100"))
}

impl GoalArgs {
    fn goal(&self) -> Result<Goal> {
        match (self.time_to_saving, self.cpu_share) {
            (Some(time), _) => {
                ensure!(
                    time >= Duration::from_secs(1),
                    "--time-to-saving is at least 1s"
                );
                Ok(Goal::Saving(time))
            }
            (_, Some(share)) => Ok(Goal::Share(share)),
            _ => bail!("a goal is needed: --time-to-saving or --cpu-share"),
        }
    }
}

pub(super) fn main(args: &Args) -> Result<()> {
    let goal = args.goal.goal()?;
    args.look.try_plot()?;
    let reader = Reader::new(super::here()?)?;
    let before = reader.knobs()?;
    ensure!(
        before.run != 2,
        "KSM is to unmerge all memory (run=2): write 0 or 1 to /sys/kernel/mm/ksm/run first"
    );
    // Before the watchdog starts: a signal in between must not end this process without it.
    let signals = signals()?;
    let guard = guard(&reader.ksm)?;
    let begin = reader.counters()?;
    let mut hand = Hand::new(goal, &reader.ksm, &begin);
    hand.steer()?;
    if before.run == 0 {
        reader.ksm.write("run", "1")?;
    }
    let followed = args.look.follow(&reader, &signals, |step| hand.step(step));
    let end = reader.counters()?;
    drop(guard);
    say(&summary(&begin, &end));
    say("pageone: KSM's knobs are as they were; what is shared stays shared");
    followed
}

fn guard(ksm: &Ksm) -> Result<KsmGuard> {
    let exe = std::env::current_exe().context("cannot find this program's file")?;
    match KsmGuard::take(ksm.clone(), watchdog(&exe)) {
        Err(GuardError::Ksm(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            bail!("turning KSM's knobs takes root: {error}")
        }
        guard => Ok(guard?),
    }
}

fn summary(begin: &Counters, end: &Counters) -> String {
    let span = end.at.duration_since(begin.at).as_secs_f64();
    format!(
        "pageone: in {} the net saving went from {} to {}; ksmd took {:.1} % of a CPU, for {} whole scans",
        time(span),
        bytes(begin.net_saved_bytes),
        bytes(end.net_saved_bytes),
        100.0 * end.share_since(begin),
        end.full_scans - begin.full_scans
    )
}

/// Steps over which a CPU share is measured: the kernel counts CPU time in ticks.
const STEPS: u32 = 5;
/// Steps over which pages a second are.
const FEW_STEPS: u32 = 2;

/// Turns the knobs.
struct Hand<'a> {
    goal: Goal,
    ksm: &'a Ksm,
    offered: Offered,
    cost: f64,
    gain: f64,
    /// The last course, and the load that it was for.
    course: Option<Course>,
    load: Option<Load>,
    /// Where the measure of the last course begins, and the steps since.
    since: Counters,
    steps: u32,
    /// Whether it was said that the goal is out of reach.
    told: bool,
}

impl<'a> Hand<'a> {
    fn new(goal: Goal, ksm: &'a Ksm, now: &Counters) -> Self {
        Self {
            goal,
            ksm,
            offered: Offered::default(),
            cost: now.seconds_a_page().unwrap_or(USUAL_COST),
            gain: 1.0,
            course: None,
            load: None,
            since: *now,
            steps: 0,
            told: false,
        }
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        self.measure(step);
        self.steer()
    }

    /// Learns the cost of a page, and what the last course brought.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn measure(&mut self, step: &Step) {
        let (before, now) = (&step.before, &step.now);
        let pages = now.pages_scanned.saturating_sub(before.pages_scanned);
        let cpu = now.cpu_seconds - before.cpu_seconds;
        if pages > 1000 && cpu > 0.0 {
            self.cost += 0.3 * (cpu / pages as f64 - self.cost);
        }
        self.steps += 1;
        let steps = match self.goal {
            Goal::Share(_) => STEPS,
            Goal::Saving(_) => FEW_STEPS,
        };
        if self.steps < steps {
            return;
        }
        let pages = now.pages_scanned.saturating_sub(self.since.pages_scanned);
        let time = now.at.duration_since(self.since.at).as_secs_f64();
        let seen = match self.goal {
            Goal::Share(_) => Some(now.share_since(&self.since)),
            // The batch in which a scan ends is a short one.
            Goal::Saving(_) => {
                (now.full_scans == self.since.full_scans).then(|| pages as f64 / time.max(1e-3))
            }
        };
        if let (Some(load), Some(seen)) = (self.load, seen.filter(|_| pages > 0)) {
            self.gain = self.goal.learn(self.gain, load, seen);
        }
        (self.since, self.steps) = (*now, 0);
    }

    /// Writes the knobs, if they differ by more than noise.
    fn steer(&mut self) -> Result<()> {
        let load = Load {
            pages: self.offered.pages()?,
            cost: self.cost,
        };
        self.load = Some(load).filter(|load| load.pages > 0);
        let Some(course) = self.goal.course(load, self.gain) else {
            return Ok(());
        };
        let near = |a: u64, b: u64| a.abs_diff(b) * 20 <= b;
        let same = |old: &Course| {
            near(course.pages_to_scan, old.pages_to_scan)
                && near(course.sleep_millisecs, old.sleep_millisecs)
        };
        if !self.course.as_ref().is_some_and(same) {
            self.ksm
                .pace(course.pages_to_scan, course.sleep_millisecs)
                .context("cannot turn KSM's knobs")?;
            self.course = Some(course);
        }
        if course.out_of_reach && !self.told {
            self.told = true;
            let whole = scan_seconds(load.pages, course.pages_to_scan, 0, load.cost);
            say(&format!(
                "pageone: out of reach: ksmd has one thread, which needs {} for two scans of {}",
                time(2.0 * whole.unwrap_or_default()),
                size(load.pages * PAGE)
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_written_with_or_without_its_sign() {
        assert_eq!(
            ["10%", "10", "0.5 %"].map(percent),
            [Ok(0.1), Ok(0.1), Ok(0.005)]
        );
        for bad in ["", "0", "101%", "-3", "x", "nan", "1/2"] {
            assert!(percent(bad).is_err_and(|why| why.contains("10%")), "{bad}");
        }
    }
}
