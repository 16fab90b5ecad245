//! Hidden verbs: the processes that the demo and the bench start.

use anyhow::Result;

use crate::bench::family::{FakeProcess, IndexPart, WorkGuest};
use crate::bench::guest::{BenchGuest, TimingGuest};
use crate::demo;

#[derive(clap::Subcommand)]
pub(crate) enum Kind {
    /// Memory whose content follows from a seed
    Bench(BenchGuest),
    /// The same, worked on by orders
    Work(WorkGuest),
    /// An engine of known saving, time and CPU time
    FakeEngine(FakeProcess),
    /// An index, or what it is compared with, alone
    Index(IndexPart),
    /// Pages of four kinds, whose accesses are timed
    Timing(TimingGuest),
    /// Files of this machine, private data and zeros, verified and rewritten all the time
    Demo(demo::guest::Args),
}

pub(crate) fn main(kind: Kind) -> Result<()> {
    match kind {
        Kind::Bench(guest) => guest.main(),
        Kind::Work(guest) => guest.main(),
        Kind::FakeEngine(engine) => engine.main(),
        Kind::Index(part) => part.main(),
        Kind::Timing(guest) => guest.main(),
        Kind::Demo(args) => demo::guest::main(&args),
    }
}
