//! `pageone ksm status`.

use std::fmt::{self, Write as _};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use sys::foreign::plain_json;

use super::facts::{Counters, Knobs, PAGE, Reader, Row, members};
use super::why::{Reason, reasons, scan_time};
use crate::head::Head;
use crate::human::{self, bytes, count, size, time, wrapped};
use crate::output::print;

/// Rows of processes that are shown.
const ROWS: usize = 20;
/// Characters of a line.
const WIDTH: usize = 80;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long ksmd's CPU time is measured
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = human::period)]
    sample: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The answer.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    head: Head,
    knobs: Knobs,
    counters: Counters,
    /// ksmd's share of one CPU, in percent.
    cpu_percent: f64,
    /// Memory that is there and that KSM may share.
    offered_bytes: u64,
    /// Whether some processes could not be looked at.
    hidden: bool,
    /// The time of a whole scan, as the knobs are.
    scan_seconds: Option<f64>,
    reasons: Vec<Reason>,
    processes: Vec<Row>,
}

pub(super) fn main(args: &Args) -> Result<()> {
    let reader = Reader::new(super::here()?)?;
    let report = Report::new(&reader, args.sample).context("cannot read KSM's state")?;
    match args.json {
        true => print(&(plain_json(&serde_json::to_string(&report)?) + "\n")),
        false => print(&table(&report)?),
    }
}

impl Report {
    fn new(reader: &Reader, sample: Duration) -> Result<Self> {
        let before = reader.counters()?;
        std::thread::sleep(sample);
        let counters = reader.counters()?;
        let knobs = reader.knobs()?;
        let (processes, hidden) = members()?;
        let offered_bytes = processes.iter().map(|row| row.offered_bytes).sum();
        let pages = offered_bytes / PAGE;
        Ok(Self {
            head: Head::now(1),
            cpu_percent: 100.0 * counters.share_since(&before),
            offered_bytes,
            hidden,
            scan_seconds: scan_time(&knobs, &counters, pages).filter(|_| knobs.run == 1),
            reasons: reasons(&knobs, &counters, pages),
            knobs,
            counters,
            processes,
        })
    }
}

fn table(report: &Report) -> Result<String, fmt::Error> {
    let (now, knobs) = (&report.counters, &report.knobs);
    let mut text = String::new();
    let state = match knobs.run {
        0 => "stopped",
        1 => "runs",
        _ => "stopped, unmerged",
    };
    let tables = now.saved_bytes.cast_signed() - now.net_saved_bytes;
    writeln!(
        text,
        "KSM {state}: saves {} net ({}, less {} of its tables); ksmd takes {:.1} % of a CPU",
        bytes(now.net_saved_bytes),
        size(now.saved_bytes),
        bytes(tables),
        report.cpu_percent
    )?;
    let offered = size(report.offered_bytes);
    let hidden = match report.hidden {
        true => ", and others that only root may look at",
        false => "",
    };
    let by = count(report.processes.len(), "process");
    writeln!(text, "offered: {offered} by {by}{hidden}")?;
    writeln!(
        text,
        "pages: {} shared, {} sharing them, {} unshared, {} volatile, {} zeros",
        now.pages_shared, now.pages_sharing, now.pages_unshared, now.pages_volatile, now.zero_pages
    )?;
    scan(report, &mut text)?;
    for reason in &report.reasons {
        writeln!(text, "\n{}", reason.reason)?;
        for line in wrapped(&reason.what, WIDTH - 2) {
            writeln!(text, "  {line}")?;
        }
        if let Some(fix) = &reason.fix {
            writeln!(text, "  → {fix}")?;
        }
    }
    processes(&report.processes, &mut text)?;
    Ok(text)
}

fn scan(report: &Report, text: &mut String) -> fmt::Result {
    let (now, knobs) = (&report.counters, &report.knobs);
    write!(
        text,
        "scan: {}, then a sleep of {} ms; {} so far",
        count(knobs.pages_to_scan, "page"),
        knobs.sleep_millisecs,
        count(now.full_scans, "whole scan")
    )?;
    if let Some(seconds) = report.scan_seconds.filter(|_| report.offered_bytes > 0) {
        let (one, two) = (time(seconds), time(2.0 * seconds));
        write!(
            text,
            "\n      one takes at most {one}; new memory is shared within two, {two}"
        )?;
    }
    let smart = match knobs.smart_scan {
        Some(1) => format!("on, {} left out", count(now.pages_skipped, "look")),
        Some(_) => "off".to_owned(),
        None => "not in this kernel".to_owned(),
    };
    let advisor = match &knobs.advisor {
        Some(advisor) => format!(
            "{}, a scan in {} s, at most {} % of a CPU and {} pages",
            advisor.mode,
            advisor.target_scan_seconds,
            advisor.max_cpu_percent,
            advisor.max_pages_to_scan
        ),
        None => "off".to_owned(),
    };
    writeln!(text, "\nsmart scan: {smart}; advisor: {advisor}")
}

fn processes(rows: &[Row], text: &mut String) -> fmt::Result {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "\n{:>8} {:16} {:>10} {:>10} {:>10} {:>10}  NAME",
        "PID", "COMMAND", "OFFERED", "SEEN", "SHARING", "NET"
    )?;
    for row in rows.iter().take(ROWS) {
        let name = row.name.as_ref().map_or(String::new(), |n| format!("{n}"));
        let line = format!(
            "{:>8} {:16} {:>10} {:>10} {:>10} {:>10}  {name}",
            row.pid,
            row.command,
            size(row.offered_bytes),
            size(row.tracked_pages * PAGE),
            size((row.merging_pages + row.zero_pages) * PAGE),
            bytes(row.net_saved_bytes)
        );
        writeln!(text, "{}", line.trim_end())?;
    }
    if let Some(more) = rows.len().checked_sub(ROWS + 1) {
        writeln!(text, "{:>8} and {} more: see --json", "", more + 1)?;
    }
    Ok(())
}
