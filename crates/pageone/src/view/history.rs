//! `pageone status --since TIME`: how the counters were, as a table, as a plot of characters, or as JSON.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use ratatui::buffer::{Buffer, Cell};
use ratatui::layout::Rect;
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Widget};
use serde::Serialize;
use wire::{Reply, Request, Sample};

use crate::{client, head, human};

const PATIENCE: Duration = Duration::from_secs(30);
/// Rows of the table, points of the plot, samples of the JSON.
const ROWS: u32 = 24;
const POINTS: u32 = 144;
const SAMPLES: u32 = 15_000;
/// Columns and lines of the plot.
const WIDTH: u16 = 80;
const HEIGHT: u16 = 18;

/// The history of the daemon at `socket`, as a text.
///
/// # Errors
/// No daemon, or it refuses.
pub(crate) fn text(socket: &Path, since: Duration, plot: bool, json: bool) -> Result<String> {
    let most = match (json, plot) {
        (true, _) => SAMPLES,
        (_, true) => POINTS,
        _ => ROWS,
    };
    let seconds = since.as_secs().max(1);
    let samples = match client::ask(socket, &Request::History { seconds, most }, PATIENCE)? {
        Reply::History(samples) => samples,
        Reply::Refused(why) => bail!("no history: {why}"),
        _ => bail!(client::UNEXPECTED),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    Ok(match (json, plot) {
        (true, _) => as_json(&samples)?,
        (_, true) => plotted(&samples, now),
        _ => table(&samples, now),
    })
}

/// The samples as a line of JSON.
///
/// # Errors
/// A figure that JSON has no form for.
pub(crate) fn as_json(samples: &[Sample]) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Past<'a> {
        samples: &'a [Sample],
    }
    head::line(&Past { samples })
}

fn ago(at: u64, now: u64) -> String {
    lasting(now.saturating_sub(at))
}

fn lasting(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

fn table(samples: &[Sample], now: u64) -> String {
    let mut text = format!(
        "{:>14} {:>10} {:>10} {:>10} {:>7} {:>7} {:>6}\n",
        "AGO", "SAVED", "NET", "STORED", "CPU %", "STALL %", "GUESTS"
    );
    for (n, sample) in samples.iter().enumerate() {
        if sample.unseen_seconds > 0 {
            let _ = writeln!(
                text,
                "{:>14} no daemon, or no time for it: {}",
                "-",
                lasting(sample.unseen_seconds)
            );
        }
        let before = n.checked_sub(1).and_then(|n| samples.get(n));
        let cpu = before.and_then(|before| cpu_percent(before, sample));
        let shown =
            |figure: Option<f64>| figure.map_or("-".to_owned(), |figure| format!("{figure:.1}"));
        let _ = writeln!(
            text,
            "{:>14} {:>10} {:>10} {:>10} {:>7} {:>7} {:>6}",
            ago(sample.at, now),
            human::size(sample.saved_bytes),
            human::bytes(sample.net_saved_bytes),
            human::size(sample.store_bytes),
            shown(cpu),
            shown(sample.stall_percent.map(f64::from)),
            sample.guests
        );
    }
    text
}

/// Percent of a core between two samples, of the time that was seen; a count that began anew in between has none.
#[expect(clippy::cast_precision_loss, reason = "seconds of a month")]
fn cpu_percent(before: &Sample, sample: &Sample) -> Option<f64> {
    let used = sample.cpu_seconds - before.cpu_seconds;
    let passed = sample.at.checked_sub(before.at)?;
    let passed = passed
        .checked_sub(sample.unseen_seconds)
        .filter(|&passed| passed > 0)?;
    (used >= 0.0).then(|| 100.0 * used / passed as f64)
}

/// The parts of the samples with no gap in them.
fn seen(samples: &[Sample]) -> impl Iterator<Item = Range<usize>> {
    let gaps = samples.iter().enumerate().skip(1);
    let gaps = gaps.filter(|(_, sample)| sample.unseen_seconds > 0);
    let starts: Vec<_> = std::iter::once(0).chain(gaps.map(|(n, _)| n)).collect();
    let ends: Vec<_> = starts
        .iter()
        .skip(1)
        .copied()
        .chain([samples.len()])
        .collect();
    starts.into_iter().zip(ends).map(|(start, end)| start..end)
}

#[expect(clippy::cast_precision_loss, reason = "a picture of 80 columns")]
fn plotted(samples: &[Sample], now: u64) -> String {
    let [first, .., last] = samples else {
        return "the history is too short for a plot: a sample is taken every 10 seconds\n"
            .to_owned();
    };
    let points: Vec<_> = samples
        .iter()
        .map(|sample| (sample.at as f64, sample.saved_bytes as f64))
        .collect();
    let top = samples.iter().map(|sample| sample.saved_bytes).max();
    let top = top.unwrap_or(0).max(1);
    let lines: Vec<_> = seen(samples)
        .map(|part| {
            let line = Dataset::default().marker(Marker::Braille);
            line.graph_type(GraphType::Line)
                .data(points.get(part).unwrap_or_default())
        })
        .collect();
    let times = [first.at as f64, last.at as f64];
    let middle = first.at.midpoint(last.at);
    let times = Axis::default()
        .bounds(times)
        .labels([first.at, middle, last.at].map(|at| format!("{} ago", ago(at, now))));
    let sizes = Axis::default().bounds([0.0, top as f64]);
    let sizes = sizes.labels([0, top / 2, top].map(human::size));
    let area = Rect::new(0, 0, WIDTH, HEIGHT);
    let mut screen = Buffer::empty(area);
    Chart::new(lines)
        .x_axis(times)
        .y_axis(sizes)
        .render(area, &mut screen);
    let mut text = "saved\n".to_owned();
    for cells in screen.content().chunks(usize::from(WIDTH)) {
        let line: String = cells.iter().map(Cell::symbol).collect();
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Sample> {
        let sample = |n: u32| Sample {
            at: 1000 + u64::from(n) * 10,
            saved_bytes: u64::from(n) << 20,
            cpu_seconds: f64::from(n % 10),
            stall_percent: None,
            ..Sample::default()
        };
        (0..20).map(sample).collect()
    }

    #[test]
    fn the_table_has_a_row_a_sample_and_no_figure_over_a_restart() {
        let text = table(&samples(), 1200);
        let rows: Vec<_> = text.lines().collect();
        assert_eq!(rows.len(), 21, "{text}");
        assert!(rows[1].contains("3m 20s"), "{text}");
        // CPU time and stalls: the first sample has none, nor has the one after a restart.
        assert_eq!(text.matches(" 10.0       - ").count(), 18, "{text}");
    }

    #[test]
    fn the_plot_fits_80_columns_and_rises() {
        let text = plotted(&samples(), 1200);
        let lines: Vec<_> = text.lines().collect();
        assert!(
            lines.iter().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        assert!(
            text.contains("19.0 MiB") && text.contains("10s ago"),
            "{text}"
        );
        let column = |line: &str| {
            line.chars()
                .position(|c| ('\u{2801}'..='\u{28ff}').contains(&c))
        };
        let drawn: Vec<_> = lines.iter().filter_map(|line| column(line)).collect();
        assert!(
            drawn.len() > 10 && drawn.is_sorted_by(|a, b| a >= b),
            "{text}"
        );
        assert!(plotted(&samples()[..1], 1200).contains("too short"));
    }

    #[test]
    fn a_time_without_samples_is_a_gap_and_no_zero() {
        let mut gone = samples();
        for sample in &mut gone[10..] {
            sample.at += 200;
            sample.cpu_seconds += 10.0;
        }
        gone[10].unseen_seconds = 200;
        let text = table(&gone, 1400);
        assert!(
            text.contains("no daemon, or no time for it: 3m 20s"),
            "{text}"
        );
        assert_eq!(
            (text.lines().count(), text.matches(" 10.0       - ").count()),
            (22, 19),
            "{text}"
        );
        // The columns of the plot: 400 seconds of which 200 have nothing.
        let drawn = |samples: &[Sample]| {
            let text = plotted(samples, 1400);
            let lines: Vec<Vec<_>> = text.lines().map(|line| line.chars().collect()).collect();
            let is_drawn = |n: &usize| {
                let at = |line: &Vec<char>| line.get(*n).copied().unwrap_or(' ');
                lines
                    .iter()
                    .any(|line| ('\u{2801}'..='\u{28ff}').contains(&at(line)))
            };
            (0..80).filter(is_drawn).count()
        };
        let (part, whole) = (drawn(&gone), drawn(&samples()));
        assert!(
            (whole / 3..whole * 2 / 3).contains(&part),
            "{part} of {whole}"
        );
    }
}
