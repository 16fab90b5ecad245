//! `pageone numa`: what nodes there are, how full they are, and what is on them.
//!
//! Each view reads a model of the `numa` crate and prints it, as a table or with `--json` as the model itself.

mod draw;
mod guests;
mod heap;
mod memory;
mod process;
mod table;
mod topology;

use clap::Subcommand;
use serde::Serialize;
use sys::foreign::plain_json;

use crate::output::print;

/// The views.
#[derive(Subcommand)]
pub(crate) enum NumaCommand {
    /// Nodes, CPUs, memory and distances, of this machine, of firmware tables, or emulated
    Topology(topology::TopologyView),
    /// How full each node is, and where allocations went
    Memory(memory::MemoryView),
    /// On which nodes a process has its pages
    Process(process::ProcessView),
    /// All guests by node, and their canonical pages by domain and node
    Guests(guests::GuestsView),
    /// The heap of slots by node and zone, and its counters
    Heap(heap::HeapViewer),
}

impl NumaCommand {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Topology(view) => view.run(),
            Self::Memory(view) => view.run(),
            Self::Process(view) => view.run(),
            Self::Guests(view) => view.run(),
            Self::Heap(view) => view.run(),
        }
    }
}

fn print_json(model: &impl Serialize) -> anyhow::Result<()> {
    print(&(plain_json(&serde_json::to_string_pretty(model)?) + "\n"))
}
