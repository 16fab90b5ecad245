//! `pageone bench`: comparisons of PageONE with KSM, by the same guests, the same clock, the same measure.
//!
//! ```text
//!  content ──▶ guests (processes) ──offer──▶ a contender merges ──▶ samples ──▶ rows
//!  what is in     fill, offer, verify        KSM, or PageONE        every 50 ms   t50, t95, CPU,
//!  each page                                 behind one trait       /proc/meminfo  saved, metadata
//! ```
//!
//! Whatever a contender says of itself is not used: savings come from /proc/meminfo, CPU time from
//! /proc/PID/stat, so that both are measured by the same rule. The saving is by how much the guests'
//! proportional memory shrank. The net saving, which the times are taken from, is what MemAvailable
//! gained since just before the guests offered their memory, so that every overhead is in it.

mod content;
mod curve;
mod domains;
mod error;
pub(crate) mod family;
pub(crate) mod guest;
mod guests;
mod hashdist;
mod ksm;
pub(crate) mod mappings;
mod measure;
mod merge;
mod nodes;
mod pageone;
mod probe;
mod report;
mod timing;

use clap::Subcommand;

pub use content::Content;
pub use guests::{Answer, Guest};

/// The measurements.
#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// The same guests merged by PageONE and by KSM: saving, time, CPU, overhead
    Merge(merge::Args),
    /// Engines side by side at many tasks: a family of cases
    Run(family::Args),
    /// Writes the results of runs as a page with plots, and as Markdown
    Report(family::ReportArgs),
    /// Says what changed between two folders of results, beyond noise
    Compare(family::CompareArgs),
    /// What the time of an access tells a guest about its page: the side channel, measured
    Timing(timing::Args),
    /// The directory of an index on one node and spread over all: memory by node, lookups per second
    Hashdist(hashdist::Hashdist),
    /// Guests on all nodes, merged across and inside: where their pages are, and how evenly they reach them (a model)
    Nodes(nodes::Nodes),
    /// 4 to 16 guests at once, placed on nodes and left to the kernel: where they are, and how they reach their memory (a model)
    Domains(domains::Domains),
}

impl BenchCommand {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Merge(args) => merge::main(&args),
            Self::Run(args) => family::main(&args),
            Self::Report(args) => family::report(&args),
            Self::Compare(args) => family::compare(&args),
            Self::Timing(args) => timing::main(&args),
            Self::Hashdist(command) => command.run(),
            Self::Nodes(command) => command.run(),
            Self::Domains(command) => command.run(),
        }
    }
}
