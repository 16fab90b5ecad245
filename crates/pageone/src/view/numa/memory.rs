//! `pageone numa memory`.

use std::io::{IsTerminal, stdout};
use std::time::Duration;

use clap::Args;
use numa::MemoryReport;
use numa::memory::Numastat;

use super::{print_json, table};
use crate::head::{self, Headed};
use crate::human;
use crate::output::print;

/// Shows how full each node is, and the kernel's counters of where allocations went
#[derive(Args)]
pub(crate) struct MemoryView {
    /// Show it again after this time, such as 2s or 500ms
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    watch: Option<Duration>,
    /// With --watch, stop after so many times
    #[arg(long, value_name = "N", requires = "watch")]
    count: Option<u64>,
    /// Print JSON, with --watch a line each time
    #[arg(long)]
    json: bool,
}

impl MemoryView {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let Some(interval) = self.watch else {
            let report = MemoryReport::live()?;
            if self.json {
                return print_json(&Headed::first(report));
            }
            return print(&render(&report));
        };
        for round in 0..self.count.unwrap_or(u64::MAX) {
            if round > 0 {
                std::thread::sleep(interval);
            }
            let report = MemoryReport::live()?;
            let text = if self.json {
                head::line(&report)?
            } else if stdout().is_terminal() {
                format!("\x1b[H\x1b[2J{}", render(&report))
            } else {
                render(&report) + "\n"
            };
            print(&text)?;
        }
        Ok(())
    }
}

fn render(report: &MemoryReport) -> String {
    let mut text = report.to_string();
    let stats: Vec<(String, Numastat)> = report
        .nodes
        .iter()
        .filter_map(|node| Some((format!("node{}", node.node), node.numastat?)))
        .collect();
    if stats.is_empty() {
        return text;
    }
    type Counter = (&'static str, fn(&Numastat) -> u64);
    let counters: [Counter; 6] = [
        ("numa_hit", |stat| stat.numa_hit),
        ("numa_miss", |stat| stat.numa_miss),
        ("numa_foreign", |stat| stat.numa_foreign),
        ("interleave_hit", |stat| stat.interleave_hit),
        ("local_node", |stat| stat.local_node),
        ("other_node", |stat| stat.other_node),
    ];
    let head: Vec<&str> = std::iter::once("pages")
        .chain(stats.iter().map(|(name, _)| name.as_str()))
        .collect();
    let rows: Vec<Vec<String>> = counters
        .iter()
        .map(|(name, counter)| {
            let values = stats.iter().map(|(_, stat)| counter(stat).to_string());
            std::iter::once((*name).to_owned()).chain(values).collect()
        })
        .collect();
    text.push('\n');
    text + &table::render(&head, &rows, &[0])
}
