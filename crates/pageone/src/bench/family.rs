//! The bench family: engines side by side at the same tasks, measured from outside by one rule.
//!
//! ```text
//!  a case ──▶ session: guests, engine, meter ──▶ record ──▶ folder (a line of JSON a run)
//!  a question   offer, work, break, verify        figures      │
//!  a file each  samples every 50 ms               of a table   └──▶ tables, report, comparison
//! ```
//!
//! Repetitions are interleaved: each engine has its turn before any has the next, and each turn begins with another engine. So the
//! machine's other work hits all. The engine `none` merges nothing: its rows tell what the machine and the guests do alone.

mod cases;
mod compare;
mod engine;
mod fake;
mod figures;
mod fill;
mod growth;
mod guest;
mod histogram;
mod job;
mod machine;
mod memory;
mod meter;
mod page;
mod record;
mod session;
mod summary;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::builder::PossibleValuesParser;

pub(crate) use cases::index::Args as IndexPart;
pub(crate) use compare::{Args as CompareArgs, main as compare};
pub(crate) use fake::Engine as FakeProcess;
pub(crate) use guest::Args as WorkGuest;
pub(crate) use page::{Args as ReportArgs, main as report};

use super::error::BenchError;
use super::ksm;
use super::mappings::{self, LimitError, Raised};
use super::measure;
use super::report::Machine;
use crate::daemon::host::able;
use crate::human;
use crate::ksm::guard::KsmGuard;
use crate::output::{print, say};
use cases::{CASES, Case, Means, Scale, Task, Variant};
use engine::Engine;
use machine::VmFiles;
use record::{Folder, Record, Setting};
use session::{Outcome, Session};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cases [default: all]
    #[arg(value_name = "CASE", value_parser = PossibleValuesParser::new(CASES.iter().map(|case| case.name)))]
    cases: Vec<String>,
    /// How much to measure; the flags below override it
    #[arg(long, value_enum, default_value = "normal")]
    scale: Scale,
    /// What to measure [default: by the scale]
    #[arg(long, value_delimiter = ',')]
    engines: Option<Vec<Engine>>,
    /// Runs of each engine at each task [default: by the scale]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: Option<u32>,
    /// Number of guests [default: by the scale]
    #[arg(long, value_parser = clap::value_parser!(u64).range(2..=10_000))]
    guests: Option<u64>,
    /// Memory of each guest: MiB, or with a unit, as 2G [default: by the scale]
    #[arg(long, value_name = "SIZE", value_parser = human::mib::<{ 1 << 24 }>)]
    guest_mib: Option<u64>,
    /// PageONE's period [default: by the scale]
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    merge_period: Option<Duration>,
    /// The longest time from the offer to a settled saving [default: by the scale]
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    limit: Option<Duration>,
    /// How long a phase of work lasts [default: by the scale]
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    phase: Option<Duration>,
    /// The number from which all content is made
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Raise vm.max_map_count to N for the time of each run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=mappings::MOST))]
    max_map_count: Option<u64>,
    #[command(flatten)]
    vm: VmFiles,
    /// Keep each run in this folder; runs that it has already are not made again
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// A word that each run is kept with, say a commit
    #[arg(long, value_name = "TEXT", default_value = "")]
    note: String,
}

impl Args {
    fn engines(&self) -> Vec<Engine> {
        self.engines.clone().unwrap_or_else(|| match self.scale {
            Scale::Full => Engine::ALL.to_vec(),
            Scale::Short | Scale::Normal => Engine::NORMAL.to_vec(),
        })
    }

    fn repeats(&self) -> u32 {
        self.repeats.unwrap_or(match self.scale {
            Scale::Short => 1,
            Scale::Normal => 3,
            Scale::Full => 5,
        })
    }

    fn setting(&self) -> Result<Setting> {
        let (guests, guest_mib, period, limit, phase) = match self.scale {
            Scale::Short => (2, 16, 100, 1500, 200),
            Scale::Normal => (4, 64, 500, 4000, 1000),
            Scale::Full => (4, 1024, 1000, 120_000, 10_000),
        };
        let ms = |time: Option<Duration>, default| {
            time.map_or(Ok(default), |time| u64::try_from(time.as_millis()))
        };
        Ok(Setting {
            guests: self.guests.unwrap_or(guests),
            guest_mib: self.guest_mib.unwrap_or(guest_mib),
            merge_period_ms: ms(self.merge_period, period)?,
            limit_ms: ms(self.limit, limit)?,
            phase_ms: ms(self.phase, phase)?,
            seed: self.seed,
            max_map_count: self.max_map_count,
        })
    }

    fn tasks(&self) -> Vec<(&'static Case, &'static Variant)> {
        let named = |name: &String| cases::named(name).expect("the command line took it");
        let mut chosen: Vec<_> = self.cases.iter().map(named).collect();
        if chosen.is_empty() {
            chosen.extend(CASES);
        }
        let all = chosen
            .into_iter()
            .flat_map(|case| case.variants.iter().map(move |variant| (case, variant)));
        all.filter(|(case, variant)| {
            let named = !self.cases.is_empty() && case.is_long();
            self.scale == Scale::Full || named || !variant.full
        })
        .collect()
    }
}

/// `pageone bench run`.
pub(crate) fn main(args: &Args) -> Result<()> {
    let interrupted = measure::interrupted()?;
    let bench = Bench {
        exe: std::env::current_exe().context("cannot find out where this program is")?,
        setting: args.setting()?,
        vm: args.vm.clone(),
        scale: args.scale,
        note: args.note.clone(),
        interrupted: &interrupted,
    };
    let records = bench.all(args)?;
    print(&summary::text(&records))?;
    let errors: u64 = records.iter().map(|record| record.errors).sum();
    if errors > 0 {
        bail!("{errors} pages were not what they should be");
    }
    Ok(())
}

impl Args {
    /// Whether a run that ended so is left out. One that the user named, and named no machine for, is a mistake.
    fn leaves_out(&self, error: &anyhow::Error) -> bool {
        let lacks_files = matches!(error.downcast_ref(), Some(BenchError::NoVm(_)));
        is_absent(error) && (self.cases.is_empty() || !lacks_files)
    }
}

/// Whether a run was not made for want of a program that it is about.
fn is_absent(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(
            BenchError::NoProgram(_)
                | BenchError::NoVm(_)
                | BenchError::Limit(LimitError::NoRight(_))
        )
    )
}

/// Who is measured.
#[derive(Clone, Copy)]
enum Who {
    Engine(Engine),
    /// A part of PageONE, or what it is compared with.
    Part(&'static str),
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Self::Engine(engine) => engine.name(),
            Self::Part(part) => part,
        }
    }
}

/// What all runs have in common.
struct Bench<'a> {
    exe: PathBuf,
    setting: Setting,
    vm: VmFiles,
    scale: Scale,
    note: String,
    interrupted: &'a dyn Fn() -> bool,
}

impl Bench<'_> {
    fn check_memory(&self) -> Result<(), BenchError> {
        let Setting {
            guests, guest_mib, ..
        } = self.setting;
        // In `boot` one more guest may live than in the others.
        measure::check_memory(guests.max(5), guest_mib)
    }

    /// The engines to measure, and the guard of KSM's knobs if one is needed. Of those that the command does not name, the ones that this
    /// machine or this user does not have are left out.
    fn engines(&self, args: &Args) -> Result<(Vec<Engine>, Option<KsmGuard>)> {
        let mut engines = args.engines();
        let pageone = match engines.iter().any(|engine| engine.is_pageone()) {
            true => able(),
            false => Ok(()),
        };
        if args.engines.is_some() {
            pageone?;
            let wanted = engines.iter().any(|engine| engine.is_ksm());
            return Ok((engines, ksm::guard(wanted, &self.exe)?));
        }
        if let Err(error) = pageone {
            say(&format!("PageONE is left out: {error:#}"));
            engines.retain(|engine| !engine.is_pageone());
        }
        let (can_turn, guard) = ksm::guard_if_able(&self.exe)?;
        engines.retain(|engine| can_turn || !engine.is_ksm());
        Ok((engines, guard))
    }

    /// Makes all runs that the folder does not have; gives all that belong to this task.
    fn all(&self, args: &Args) -> Result<Vec<Record>> {
        let tasks = args.tasks();
        // A part by itself has no guests, and KSM may do what it likes.
        let with_guests = |(_, variant): &(_, &Variant)| matches!(variant.task, Task::Guests(_));
        let (engines, guard) = match tasks.iter().any(with_guests) {
            true => {
                self.check_memory()?;
                self.engines(args)?
            }
            false => (Vec::new(), None),
        };
        let folder = args.out.as_deref().map(Folder::make).transpose()?;
        let old = folder.as_ref().map_or(Ok(Vec::new()), Folder::records)?;
        if let Some(other) = old.iter().find(|record| record.note != self.note) {
            bail!(
                "the folder has runs of '{}', and these are of '{}': give another --out, or remove the folder",
                other.note,
                self.note
            );
        }
        let mut records = Vec::new();
        for (case, variant) in tasks {
            let engines: Vec<_> = match variant.task {
                Task::Guests(_) => engines.iter().copied().map(Who::Engine).collect(),
                Task::Parts(parts, _) => parts.iter().copied().map(Who::Part).collect(),
            };
            for repetition in 0..args.repeats() {
                for turn in 0..engines.len() {
                    let engine = engines[(turn + repetition as usize) % engines.len()];
                    let same = |record: &&Record| {
                        let name = (
                            record.case.as_str(),
                            record.variant.as_str(),
                            record.engine.as_str(),
                        );
                        name == (case.name, variant.name, engine.name())
                            && (record.repetition, &record.setting) == (repetition, &self.setting)
                    };
                    let run = format!(
                        "{} {}: {}, {} of {}",
                        case.name,
                        variant.name,
                        engine.name(),
                        repetition + 1,
                        args.repeats()
                    );
                    let record = match old.iter().find(same) {
                        Some(record) => {
                            say(&format!("{run}: kept, {}", record.origin()));
                            record.clone()
                        }
                        None => {
                            say(&run);
                            let record =
                                match self.one(guard.as_ref(), case, variant, engine, repetition) {
                                    Err(error) if args.leaves_out(&error) => {
                                        say(&format!("{run}: left out: {error}"));
                                        continue;
                                    }
                                    made => made?,
                                };
                            folder
                                .as_ref()
                                .map_or(Ok(()), |folder| folder.add(&record))?;
                            record
                        }
                    };
                    records.push(record);
                }
            }
        }
        Ok(records)
    }

    /// Does a task: what it came to, or how it failed.
    fn outcome(&self, variant: &Variant, who: Who) -> Result<Result<Outcome, BenchError>> {
        let (run, engine) = match (&variant.task, who) {
            (Task::Parts(_, run), _) => {
                let means = Means {
                    scale: self.scale,
                    exe: &self.exe,
                    interrupted: self.interrupted,
                };
                return Ok(run(who.name(), &means));
            }
            (Task::Guests(run), Who::Engine(engine)) => (run, engine),
            (Task::Guests(_), Who::Part(part)) => unreachable!("{part} merges no guests"),
        };
        let period = Duration::from_millis(self.setting.merge_period_ms);
        let mut contender = engine.start(&self.exe, period, variant.knobs)?;
        let program = || Command::new(&self.exe);
        let mut session = Session::new(
            &self.setting,
            &self.vm,
            contender.as_mut(),
            &program,
            self.interrupted,
        )?;
        Ok(run(&mut session).and_then(|()| session.finish()))
    }

    /// Raises the limit of mappings where the user or the variant wants it higher.
    fn raise(&self, variant: &Variant) -> Result<Option<Raised>> {
        let Some(wanted) = self.setting.max_map_count else {
            let now = mappings::now().unwrap_or(0);
            let wanted = variant.mappings.filter(|&most| most > now);
            let raised = wanted.map_or(Ok(None), |most| mappings::raise(&self.exe, most));
            return Ok(raised.map_err(BenchError::Limit)?);
        };
        let most = wanted.max(variant.mappings.unwrap_or(0));
        // What the user asked for is not left out in silence.
        mappings::raise(&self.exe, most).map_err(anyhow::Error::from)
    }

    fn one(
        &self,
        guard: Option<&KsmGuard>,
        case: &Case,
        variant: &Variant,
        who: Who,
        repetition: u32,
    ) -> Result<Record> {
        guard.map_or(Ok(()), KsmGuard::pause)?;
        // Before the engine begins, which reads it, and until its guests have ended.
        let _raised = self.raise(variant)?;
        let began = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let outcome = self.outcome(variant, who)?;
        // Broken off by Ctrl-C, the guests get the signal too: say what really happened.
        let outcome = outcome.map_err(|error| match (self.interrupted)() {
            true => BenchError::Interrupted,
            false => error,
        })?;
        if let Some(why) = &outcome.hindrance {
            say(why);
        }
        Ok(Record {
            case: case.name.to_owned(),
            variant: variant.name.to_owned(),
            engine: who.name().to_owned(),
            repetition,
            setting: self.setting.clone(),
            note: self.note.clone(),
            began: began.as_secs(),
            machine: Machine::here(),
            figures: outcome.figures,
            curves: outcome.curves,
            samples: record::thinned(&outcome.samples),
            growth: outcome.growth,
            tables: outcome.tables,
            verified_bytes: outcome.verified_bytes,
            errors: outcome.errors,
            hindrance: outcome.hindrance,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_case_that_was_named_is_not_left_out_for_want_of_a_flag() {
        use clap::Parser;
        let leaves = |words: &[&str], error: BenchError| {
            let line = Line::parse_from([&["run"], words].concat());
            line.args.leaves_out(&error.into())
        };
        assert!(leaves(&[], BenchError::NoVm("--vm-kernel")));
        assert!(!leaves(&["vms"], BenchError::NoVm("--vm-kernel")));
        assert!(leaves(&["vms"], BenchError::NoProgram("qemu")));
        assert!(!leaves(&[], BenchError::Interrupted));
    }
}
