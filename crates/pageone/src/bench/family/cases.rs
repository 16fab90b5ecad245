//! The cases: a question each, a file each.

mod boot;
mod churn;
mod equal;
mod huge;
pub(super) mod index;
mod latency;
mod merge;
mod programs;
mod scale;
mod unique;
mod vms;

use std::path::Path;

use super::record::Sample;
use super::session::{Outcome, Session, steps};
use crate::bench::content::Content;
use crate::bench::error::BenchError;

/// How much is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Scale {
    /// Seconds: that it works at all
    Short,
    /// A few minutes
    Normal,
    /// All variants, with a gibibyte a guest
    Full,
}

/// A case in one of its variants.
pub(super) struct Variant {
    /// Its name in the records; empty where there is one only.
    pub(super) name: &'static str,
    /// Whether only the full scale has it, or who names a case that has nothing shorter.
    pub(super) full: bool,
    /// The least `vm.max_map_count` that it is about; none: the machine's.
    pub(super) mappings: Option<u64>,
    /// Flags of PageONE's daemon that it is about.
    pub(super) knobs: &'static [&'static str],
    /// What is done.
    pub(super) task: Task,
}

/// What is done in a run.
#[derive(Clone, Copy)]
pub(super) enum Task {
    /// Guests work, and an engine merges their memory.
    Guests(Run),
    /// A part of PageONE, or what it is compared with, works by itself: one of these names, in place of an engine.
    Parts(&'static [&'static str], Alone),
}

/// What guests do while an engine is at work.
pub(super) type Run = fn(&mut Session<'_>) -> Result<(), BenchError>;

/// What a part does by itself.
pub(super) type Alone = fn(&str, &Means<'_>) -> Result<Outcome, BenchError>;

/// What a part has to work with.
pub(super) struct Means<'a> {
    pub(super) scale: Scale,
    /// This program.
    pub(super) exe: &'a Path,
    pub(super) interrupted: &'a dyn Fn() -> bool,
}

impl Means<'_> {
    /// Asks the user whether to go on.
    ///
    /// # Errors
    /// No.
    fn go_on(&self) -> Result<(), BenchError> {
        match (self.interrupted)() {
            true => Err(BenchError::Interrupted),
            false => Ok(()),
        }
    }

    /// Processors that this process may use.
    #[expect(clippy::unused_self, reason = "what a part has to work with")]
    fn cpus(&self) -> u64 {
        std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64)
    }
}

impl Variant {
    /// A variant of every scale.
    const fn of(name: &'static str, run: Run) -> Self {
        Self {
            name,
            full: false,
            mappings: None,
            knobs: &[],
            task: Task::Guests(run),
        }
    }

    /// A variant of every scale in which each of these works by itself.
    const fn parts(name: &'static str, parts: &'static [&'static str], run: Alone) -> Self {
        Self {
            name,
            full: false,
            mappings: None,
            knobs: &[],
            task: Task::Parts(parts, run),
        }
    }

    /// The same of the full scale only.
    const fn full(self) -> Self {
        Self { full: true, ..self }
    }

    /// The same with these flags of PageONE's daemon.
    const fn with_knobs(self, knobs: &'static [&'static str]) -> Self {
        Self { knobs, ..self }
    }

    /// The same with so many mappings for each process.
    const fn with_mappings(self, most: u64) -> Self {
        Self {
            mappings: Some(most),
            ..self
        }
    }
}

/// A case.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// What it answers.
    pub(super) question: &'static str,
    pub(super) variants: &'static [Variant],
}

impl Case {
    /// Whether all of its variants take their time.
    pub(super) fn is_long(&self) -> bool {
        self.variants.iter().all(|variant| variant.full)
    }
}

/// All cases.
pub(super) const CASES: &[Case] = &[
    merge::CASE,
    equal::CASE,
    unique::CASE,
    churn::CASE,
    latency::CASE,
    huge::CASE,
    boot::CASE,
    programs::CASE,
    vms::CASE,
    index::CASE,
    scale::CASE,
];

/// The case called `name`.
pub(super) fn named(name: &str) -> Option<&'static Case> {
    CASES.iter().find(|case| case.name == name)
}

/// Content of which 70 % is the same in all guests, in runs of 16 pages, at the same places.
fn clones(session: &Session<'_>) -> Content {
    Content {
        seed: session.setting.seed,
        dup: 0.7,
        run_pages: 16,
        zero_prefix: 0.0,
        pages: session.pages(),
        shuffle: false,
    }
}

/// All guests do `job` at once: the CPU time of a step is the figure `name`.
fn work(session: &mut Session<'_>, job: &str, name: &str) -> Result<(), BenchError> {
    session.order(&format!("work {job}"))?;
    // Pages that come in at the first touch, or are broken then, are another question.
    std::thread::sleep(session.phase());
    session.order("lap")?;
    std::thread::sleep(session.phase());
    let lap = session.order("work idle")?;
    session.figure(name, steps(lap.cpu_ns) / steps(lap.steps));
    Ok(())
}

/// Percent of what could be saved that was saved, over the time of `samples`.
fn mean_percent(samples: &[Sample]) -> f64 {
    let (mut saved, mut ideal) = (0.0, 0.0);
    for pair in samples.windows(2) {
        let time = pair[1].at_s - pair[0].at_s;
        saved += time * (pair[0].saved_mib + pair[1].saved_mib) / 2.0;
        ideal += time * (pair[0].ideal_mib + pair[1].ideal_mib) / 2.0;
    }
    100.0 * saved / f64::max(ideal, 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: f64, ideal_mib: f64, saved_mib: f64) -> Sample {
        Sample {
            at_s,
            ideal_mib,
            saved_mib,
            ..Sample::default()
        }
    }

    #[test]
    fn the_mean_is_over_time_and_not_over_samples() {
        let samples = [
            sample(0.0, 10.0, 0.0),
            sample(1.0, 10.0, 0.0),
            sample(1.0, 10.0, 10.0),
            sample(4.0, 10.0, 10.0),
        ];
        assert!((mean_percent(&samples) - 75.0).abs() < 1e-9);
        assert!((mean_percent(&samples[..1])).abs() < 1e-9);
    }

    #[test]
    fn names_are_used_once() {
        for case in CASES {
            let same = CASES.iter().filter(|other| other.name == case.name);
            assert_eq!(same.count(), 1, "{}", case.name);
            assert!(!case.variants.is_empty(), "{} does nothing", case.name);
            assert!(case.question.ends_with('?'));
        }
    }
}
