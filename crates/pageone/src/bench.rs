//! `pageone bench`: measures and compares.

mod hashdist;

use clap::Subcommand;

/// The measurements.
#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// A big table on one node and spread over all: memory by node, lookups per second
    Hashdist(hashdist::Hashdist),
}

impl BenchCommand {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Hashdist(command) => command.run(),
        }
    }
}
