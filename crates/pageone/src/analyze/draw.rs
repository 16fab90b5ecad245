//! The answer as bars: the saving of each engine, the kinds of memory, the processes.

use anyhow::Result;

use super::print::PAGE;
use super::sums::{Report, Row};
use crate::plot::{self, Bars, color};

/// Bars of processes that are drawn.
const ROWS: usize = 20;

#[expect(clippy::cast_precision_loss, reason = "a drawing")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}

/// The drawing.
///
/// # Errors
/// It cannot be drawn.
pub(super) fn svg(report: &Report) -> Result<String> {
    let engines: Vec<_> = (report.engines.iter())
        .map(|engine| (engine.name.clone(), vec![mib(engine.bytes)]))
        .collect();
    let kinds: Vec<_> = (report.kinds.iter())
        .map(|(kind, sum)| {
            let parts = [sum.zeros, sum.within, sum.between].map(mib);
            (kind.name().to_owned(), parts.to_vec())
        })
        .collect();
    let mut rows: Vec<&Row> = report.processes.iter().collect();
    rows.sort_by_key(|row| (std::cmp::Reverse(row.shareable), row.target.pid));
    let processes: Vec<_> = rows.into_iter().take(ROWS).map(process).collect();
    let unit = "MiB";
    plot::bars(&[
        Bars {
            title: "What each engine would save",
            unit,
            parts: &[("saved", color("pageone-2"))],
            bars: &engines,
        },
        Bars {
            title: "Savable, by kind of memory",
            unit,
            parts: &[
                ("zeros", color("none")),
                ("within a process", color("pageone-1")),
                ("between processes", color("pageone-2")),
            ],
            bars: &kinds,
        },
        Bars {
            title: "Memory of processes",
            unit,
            parts: &[("shareable", color("pageone-2")), ("other", color("none"))],
            bars: &processes,
        },
    ])
}

fn process(row: &Row) -> (String, Vec<f64>) {
    let present = row.looked.pages * PAGE;
    let parts = [row.shareable, present.saturating_sub(row.shareable)].map(mib);
    let name = format!("{} {}", row.target.pid, row.target.shown());
    (name, parts.to_vec())
}
