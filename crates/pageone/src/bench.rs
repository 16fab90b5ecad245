//! `pageone bench`: measures and compares.

mod hashdist;
mod merge;

use clap::Subcommand;

/// The measurements.
#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// The same guests merged by PageONE and by KSM: saving, time, CPU, overhead
    Merge(merge::Args),
    /// A big table on one node and spread over all: memory by node, lookups per second
    Hashdist(hashdist::Hashdist),
}

impl BenchCommand {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Merge(args) => merge::main(&args),
            Self::Hashdist(command) => command.run(),
        }
    }
}
