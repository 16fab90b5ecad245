//! `pageone numa process`.

use std::io;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use numa::{NodeId, ProcessReport, Topology};
use rustix::process::Pid;
use serde::Serialize;
use sys::foreign::Foreign;

use super::{print_json, table};
use crate::head::Headed;
use crate::output::print;
use crate::selector;
use crate::within::{LISTING, within};

/// Shows on which nodes a process has its pages, and how near they are to its threads
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Which {
    /// The process
    #[arg(value_name = "PID", value_parser = crate::human::process)]
    pid: Option<u32>,
    /// All processes of this name
    #[arg(long, value_name = "NAME")]
    comm: Option<String>,
}

/// Shows on which nodes a process has its pages, and how near they are to its threads
#[derive(Args)]
pub(crate) struct ProcessView {
    #[command(flatten)]
    which: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Processes {
    processes: Vec<ProcessReport>,
}

impl ProcessView {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let topology = Topology::live()?;
        let reports = self.which.reports(&topology)?;
        if self.json {
            return print_json(&Headed::first(Processes { processes: reports }));
        }
        let tables: Vec<_> = reports.iter().map(render).collect();
        print(&tables.join("\n"))
    }
}

/// Looks at processes, each of which may take its time, or for ever.
pub(super) struct Looks<'a> {
    topology: &'a Topology,
    end: Instant,
}

impl<'a> Looks<'a> {
    pub(super) fn new(topology: &'a Topology) -> Self {
        let end = Instant::now() + LISTING;
        Self { topology, end }
    }

    /// Looks at one, for half of the time that is left.
    ///
    /// # Errors
    /// As [`ProcessReport::read`]; `TimedOut`.
    pub(super) fn read(&self, pid: Pid) -> io::Result<ProcessReport> {
        let topology = self.topology.clone();
        let patience = self.end.saturating_duration_since(Instant::now()) / 2;
        within(patience, move || ProcessReport::read(&topology, pid))?
    }
}

impl Which {
    fn reports(&self, topology: &Topology) -> anyhow::Result<Vec<ProcessReport>> {
        let looks = Looks::new(topology);
        if let Some(number) = self.pid {
            let pid = Pid::from_raw(number.cast_signed())
                .filter(|_| number > 0)
                .with_context(|| format!("{number} is no process"))?;
            // Before the look, whose errors say less.
            selector::check(number)?;
            let report = looks.read(pid);
            return Ok(vec![
                report
                    .map_err(may_root)
                    .with_context(|| format!("cannot look at process {number}"))?,
            ]);
        }
        let name = self.comm.as_deref().unwrap_or_default();
        let pids = sys::residence::processes_named(name)?;
        // One that ends meanwhile is no error as long as there are others.
        let (mut reports, mut last_error) = (Vec::new(), None);
        for pid in pids {
            match looks.read(pid) {
                Ok(report) => reports.push(report),
                Err(error) => last_error = Some((pid.as_raw_nonzero(), error)),
            }
        }
        match last_error {
            Some((pid, error)) if reports.is_empty() => {
                Err(may_root(error)).with_context(|| format!("cannot look at process {pid}"))
            }
            None if reports.is_empty() => bail!("no process is called '{name}'"),
            _ => Ok(reports),
        }
    }
}

/// The same error; where a right is missing it tells that root has it.
fn may_root(error: io::Error) -> anyhow::Error {
    let is_root = rustix::process::geteuid().is_root();
    match error.kind() {
        io::ErrorKind::PermissionDenied if !is_root => anyhow::anyhow!("{error}: root may"),
        _ => error.into(),
    }
}

fn render(report: &ProcessReport) -> String {
    let threads = |node: &NodeId| report.threads.get(node).copied().unwrap_or(0);
    let row = |name: String, cells: [u64; 5]| {
        [vec![name], cells.map(|cell| cell.to_string()).to_vec()].concat()
    };
    let mut total = [0; 5];
    let mut rows = Vec::new();
    for (node, pages) in &report.nodes {
        let cells = [
            pages.anonymous,
            pages.file,
            pages.merged,
            pages.total(),
            threads(node),
        ];
        total
            .iter_mut()
            .zip(cells)
            .for_each(|(sum, cell)| *sum += cell);
        rows.push(row(node.to_string(), cells));
    }
    rows.push(row("ToT".into(), total));
    let head = ["Nid", "Anonymous", "File", "Merged", "Pages", "Threads"];
    let (local, distance) = (report.local_share * 100.0, report.mean_distance);
    format!(
        "{} ({}), pages of 4 KiB\n",
        Foreign(&report.name),
        report.pid
    ) + &table::render(&head, &rows, &[])
        + &format!(
            " local {local:.1} %, remote {:.1} %, mean distance {distance:.1}; {} pages on no node (zeros)\n",
            100.0 - local,
            report.elsewhere
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_process() {
        let topology = Topology::live().unwrap();
        let report = ProcessReport::read(&topology, rustix::process::getpid()).unwrap();
        let pages: u64 = report
            .nodes
            .values()
            .map(numa::residence::NodePages::total)
            .sum();
        assert!(pages > 100);
        let text = render(&report);
        assert!(
            text.lines()
                .any(|line| line.starts_with(" ToT") && line.contains(&pages.to_string())),
            "{text}"
        );
    }
}
