//! The changes between two folders of results, beyond noise.
//!
//! A figure has changed on two conditions. No run of the one side lies between runs of the other. And the medians are further apart than half as much
//! again as either side is wide. Of two times three runs of the same, that holds for one figure in thirty or less. Fewer than
//! three runs on a side say nothing.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Result, bail};

use super::figures::{Better, FIGURES, Figure};
use super::record::{Folder, Record};
use super::summary::{Group, Row, Spread, cell};
use crate::output::print;

/// Runs that a side must have.
const RUNS: usize = 3;
/// The medians must be further apart than a side is wide, by this factor.
const WIDTHS: f64 = 1.5;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder of results before
    before: PathBuf,
    /// The folder of results after
    after: PathBuf,
}

/// `pageone bench compare`.
pub(crate) fn main(args: &Args) -> Result<()> {
    let (before, after) = (Folder::read(&args.before)?, Folder::read(&args.after)?);
    print(&text(&before, &after)?)
}

/// What became of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    Same,
    Changed {
        better: Option<bool>,
    },
    /// A goal that each run of one side reached and none of the other.
    Reached {
        now: bool,
    },
    Unknown,
}

fn verdict(figure: &Figure, before: Side, after: Side) -> Verdict {
    if before.runs < RUNS || after.runs < RUNS {
        return Verdict::Unknown;
    }
    let (Some(old), Some(new)) = (before.spread, after.spread) else {
        return match (before.all(), after.all()) {
            (true, false) => Verdict::Reached { now: false },
            (false, true) => Verdict::Reached { now: true },
            _ => Verdict::Same,
        };
    };
    let apart = new.least > old.most || new.most < old.least;
    let width = f64::max(old.most - old.least, new.most - new.least);
    let change = new.median - old.median;
    if !apart || change.abs() <= f64::max(WIDTHS * width, figure.grain) {
        return Verdict::Same;
    }
    let better = match figure.better {
        Better::Less => Some(change < 0.0),
        Better::More => Some(change > 0.0),
        Better::Neither => None,
    };
    Verdict::Changed { better }
}

/// A figure of one engine at one task.
#[derive(Clone, Copy, Debug)]
struct Side {
    spread: Option<Spread>,
    runs: usize,
}

impl Side {
    fn of(row: &Row<'_>, figure: &Figure) -> Self {
        let spread = Spread::of_figure(&row.records, figure.name);
        Self {
            spread,
            runs: row.records.len(),
        }
    }

    /// Whether each run has the figure.
    fn all(&self) -> bool {
        self.spread.is_some_and(|spread| spread.runs == self.runs)
    }

    fn cell(&self) -> String {
        cell(self.spread, self.runs)
    }
}

fn text(before: &[Record], after: &[Record]) -> Result<String> {
    let (old, new) = (Group::all(before), Group::all(after));
    let (mut text, mut compared, mut changed, mut few) = (String::new(), 0, 0, 0);
    for group in &old {
        let Some(other) = new
            .iter()
            .find(|other| other.first().is_beside(group.first()))
        else {
            continue;
        };
        for row in &group.rows {
            let Some(now) = other.rows.iter().find(|now| now.engine == row.engine) else {
                continue;
            };
            for figure in FIGURES {
                let (from, to) = (Side::of(row, figure), Side::of(now, figure));
                if from.spread.is_none() && to.spread.is_none() {
                    continue;
                }
                compared += 1;
                let word = match verdict(figure, from, to) {
                    Verdict::Same => continue,
                    Verdict::Unknown => {
                        few += 1;
                        continue;
                    }
                    Verdict::Changed { better: Some(true) } => "better",
                    Verdict::Changed {
                        better: Some(false),
                    } => "worse",
                    Verdict::Changed { better: None } => "changed",
                    Verdict::Reached { now: true } => "reached now",
                    Verdict::Reached { now: false } => "reached no more",
                };
                changed += 1;
                let (title, engine, name) = (group.title(), row.engine, figure.name);
                let (from, to) = (from.cell(), to.cell());
                let _ = writeln!(text, "{title}, {engine}: {name} {from} → {to}, {word}");
            }
        }
    }
    if compared == 0 {
        bail!("nothing to compare: no engine did the same task with the same settings in both");
    }
    let _ = writeln!(
        text,
        "{compared} figures compared, {changed} changed beyond noise"
    );
    if few > 0 {
        let _ = writeln!(
            text,
            "{few} of them have fewer than {RUNS} runs on a side, which say nothing"
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    fn runs(values: &[f64]) -> Vec<Record> {
        let with = |(repetition, &value): (u32, &f64)| {
            let mut record = record("ksm-tuned", repetition);
            record.figures.insert("t95_s".to_owned(), value);
            record
        };
        (0..).zip(values).map(with).collect()
    }

    #[test]
    fn a_change_is_said_with_its_direction_and_noise_is_not() {
        let before = runs(&[2.0, 2.1, 2.2]);
        let said = |after: &[f64]| text(&before, &runs(after)).unwrap();
        assert!(
            said(&[1.0, 1.1, 1.05]).contains("t95_s 2.10 (2.00–2.20) → 1.05 (1.00–1.10), better")
        );
        assert!(said(&[3.0, 3.1, 3.05]).contains("worse"));
        assert!(said(&[1.9, 2.1, 2.4]).contains("1 figures compared, 0 changed"));
        assert!(
            said(&[2.21, 2.25, 2.3]).contains("0 changed"),
            "apart, and near"
        );
        assert!(said(&[1.0, 1.0]).contains("fewer than 3"));
    }

    #[test]
    fn a_goal_that_no_run_reaches_any_more_is_said() {
        let before = runs(&[2.0, 2.1, 2.2]);
        let never: Vec<_> = (0..3)
            .map(|repetition| record("ksm-tuned", repetition))
            .collect();
        assert!(text(&before, &never).unwrap().contains("reached no more"));
        assert!(text(&never, &before).unwrap().contains("reached now"));
    }

    #[test]
    fn other_settings_are_not_compared() {
        let mut after = runs(&[2.0, 2.1, 2.2]);
        after
            .iter_mut()
            .for_each(|record| record.setting.guests = 9);
        assert!(text(&runs(&[1.0, 1.0, 1.0]), &after).is_err());
    }

    #[test]
    fn three_runs_of_the_same_differ_seldom() {
        let mut state = 7_u64;
        let mut draw = || {
            // Of a bell shape, more or less: four throws together.
            let mut throw = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                f64::from(u32::try_from(state >> 40).unwrap())
            };
            throw() + throw() + throw() + throw()
        };
        let figure = super::super::figures::named("t95_s").unwrap();
        let mut side = || Side {
            spread: Spread::of((0..3).map(|_| draw()).collect()),
            runs: 3,
        };
        let differ = (0..3000)
            .filter(|_| verdict(figure, side(), side()) != Verdict::Same)
            .count();
        assert!(differ <= 100, "{differ} of 3000");
    }
}
