//! `pageone bench`: measures and compares.

mod hashdist;
mod merge;
mod timing;

use clap::Subcommand;

/// The measurements.
#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// The same guests merged by PageONE and by KSM: saving, time, CPU, overhead
    Merge(merge::Args),
    /// What the time of an access tells a guest about its page: the side channel, measured
    Timing(timing::Args),
    /// A big table on one node and spread over all: memory by node, lookups per second
    Hashdist(hashdist::Hashdist),
}

impl BenchCommand {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Merge(args) => merge::main(&args),
            Self::Timing(args) => timing::main(&args),
            Self::Hashdist(command) => command.run(),
        }
    }
}
