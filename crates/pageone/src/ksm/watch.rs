//! `pageone ksm watch`: a line a step, and a drawing of all of them. `tune` is the same with a hand at the knobs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use sys::process::wait_readable;
use sys::signals::{SIGHUP, SIGINT, SIGTERM, Signals};

use super::facts::{Counters, Knobs, Reader};
use crate::head;
use crate::human::{self, bytes};
use crate::output::print;
use crate::plot::{self, Line, Panel};

/// Points of a drawing: beyond that every other one is dropped.
const POINTS: usize = 10_000;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    look: Look,
}

/// How to look.
#[derive(clap::Args)]
pub(super) struct Look {
    /// The time from line to line
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = human::period)]
    every: Duration,
    /// End after this time; without it at Ctrl-C or SIGTERM
    #[arg(long = "for", value_name = "TIME", value_parser = human::period)]
    time: Option<Duration>,
    /// At the end, draw saving and CPU time into this file (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print a JSON object a line
    #[arg(long)]
    json: bool,
}

/// A step: the counters before it and after it, and the knobs it had.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) before: Counters,
    pub(super) now: Counters,
    knobs: Knobs,
}

/// A line.
#[derive(Serialize)]
struct Record<'a> {
    seconds: f64,
    /// ksmd's share of one CPU, in percent.
    cpu_percent: f64,
    counters: &'a Counters,
    knobs: &'a Knobs,
}

pub(super) fn main(args: &Args) -> Result<()> {
    args.look.try_plot()?;
    let reader = Reader::new(super::here()?)?;
    let signals = signals()?;
    args.look.follow(&reader, &signals, |_| Ok(()))
}

/// The signals that end a look. Children that are started later do not have them blocked (`sys::signals::prepare_child`).
pub(super) fn signals() -> Result<Signals> {
    Signals::block(&[SIGINT, SIGTERM, SIGHUP]).context("cannot wait for signals")
}

impl Look {
    /// Tries whether the drawing can be written at the end.
    ///
    /// # Errors
    /// It cannot.
    pub(super) fn try_plot(&self) -> Result<()> {
        plot::try_file(self.plot.as_deref())
    }

    /// Looks until the end that was asked for; `act` has each step.
    pub(super) fn follow(
        &self,
        reader: &Reader,
        signals: &Signals,
        mut act: impl FnMut(&Step) -> Result<()>,
    ) -> Result<()> {
        let begin = Instant::now();
        let mut drawing = Drawing::default();
        let mut before = reader.counters()?;
        if !self.json {
            print(&header())?;
        }
        loop {
            let left = self.time.map(|time| time.saturating_sub(begin.elapsed()));
            let wait = left.map_or(self.every, |left| left.min(self.every));
            let asked = wait_readable(signals, wait)? && signals.next()?.is_some();
            let over = asked || left.is_some_and(|left| left <= self.every);
            let (now, knobs) = (reader.counters()?, reader.knobs()?);
            let step = Step { before, now, knobs };
            before = now;
            let seconds = now.at.duration_since(begin).as_secs_f64();
            drawing.add(seconds, &step);
            print(&self.line(seconds, &step)?)?;
            if over {
                return drawing.write(self.plot.as_ref());
            }
            act(&step)?;
        }
    }

    fn line(&self, seconds: f64, step: &Step) -> Result<String> {
        let (now, knobs) = (&step.now, &step.knobs);
        let cpu_percent = 100.0 * now.share_since(&step.before);
        if self.json {
            let record = Record {
                seconds,
                cpu_percent,
                counters: now,
                knobs,
            };
            return Ok(head::line(&record)?);
        }
        Ok(format!(
            "{seconds:>8.1} {:>10} {:>10} {:>10} {cpu_percent:>6.1} {:>7} {:>13} {:>6}\n",
            bytes(now.net_saved_bytes),
            human::size(now.saved_bytes),
            now.pages_scanned.saturating_sub(step.before.pages_scanned),
            now.full_scans,
            knobs.pages_to_scan,
            knobs.sleep_millisecs
        ))
    }
}

fn header() -> String {
    format!(
        "{:>8} {:>10} {:>10} {:>10} {:>6} {:>7} {:>13} {:>6}\n",
        "SECONDS", "NET", "SAVED", "SCANNED", "KSMD %", "SCANS", "PAGES_TO_SCAN", "SLEEP"
    )
}

/// What is drawn at the end.
#[derive(Default)]
struct Drawing {
    net: Vec<(f64, f64)>,
    saved: Vec<(f64, f64)>,
    cpu: Vec<(f64, f64)>,
}

impl Drawing {
    #[expect(clippy::cast_precision_loss, reason = "a drawing")]
    fn add(&mut self, at: f64, step: &Step) {
        const MIB: f64 = 1_048_576.0;
        let now = &step.now;
        self.net.push((at, now.net_saved_bytes as f64 / MIB));
        self.saved.push((at, now.saved_bytes as f64 / MIB));
        self.cpu.push((at, 100.0 * now.share_since(&step.before)));
        if self.net.len() > POINTS {
            for points in [&mut self.net, &mut self.saved, &mut self.cpu] {
                let mut keep = false;
                points.retain(|_| {
                    keep = !keep;
                    keep
                });
            }
        }
    }

    fn write(self, file: Option<&PathBuf>) -> Result<()> {
        let Some(file) = file else { return Ok(()) };
        let line = |name: &str, color, points| Line {
            name: name.to_owned(),
            color: plot::color(color),
            points,
        };
        let saving = [
            line("saved", "ksm", self.saved),
            line("net of KSM's tables", "pageone-2", self.net),
        ];
        let cpu = [line("ksmd", "ksm-tuned", self.cpu)];
        let panels = [
            Panel {
                title: "Memory that KSM saves",
                unit: "MiB",
                lines: &saving,
            },
            Panel {
                title: "CPU time of ksmd",
                unit: "% of a CPU",
                lines: &cpu,
            },
        ];
        let svg = plot::stacked("the beginning", &panels)?;
        std::fs::write(file, svg).with_context(|| format!("cannot write {}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_has_bounds_and_both_its_ends() {
        let counters = |seconds: u64| Counters {
            at: Instant::now(),
            pages_shared: 0,
            pages_sharing: 0,
            pages_unshared: 0,
            pages_volatile: 0,
            pages_skipped: 0,
            zero_pages: 0,
            pages_scanned: 0,
            full_scans: 0,
            saved_bytes: seconds << 20,
            net_saved_bytes: 0,
            cpu_seconds: 0.0,
        };
        let mut drawing = Drawing::default();
        for at in 0..30_000_u32 {
            let step = Step {
                before: counters(0),
                now: counters(u64::from(at)),
                knobs: Knobs::default(),
            };
            drawing.add(f64::from(at), &step);
        }
        assert!(drawing.saved.len() <= POINTS && drawing.saved.len() > POINTS / 3);
        assert!(drawing.saved.first().unwrap().0 < 1.0);
        assert!(drawing.saved.last().unwrap().0 > 29_990.0);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.svg");
        drawing.write(Some(&file)).unwrap();
        let svg = std::fs::read_to_string(file).unwrap();
        assert!(svg.contains("CPU time of ksmd") && svg.contains("net of KSM"));
    }
}
