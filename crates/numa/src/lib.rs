//! NUMA topology, emulation, placement, node-by-zone heap and interleaved tables.
//!
//! | module | answers |
//! |---|---|
//! | [`topology`] | which nodes are there, what is in them, how far are they apart |
//! | [`acpi`] | what do the firmware's tables say |
//! | [`heap`] | which slot, from which node and zone |
//! | [`placement`] | where should this memory, this process, this table go |
//! | [`memory`] | how full is each node |
//! | [`residence`] | where are the pages of a process |
//!
//! Without the feature `std` only [`acpi`] is there, on `core` and `alloc`.
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod acpi;

#[cfg(feature = "std")]
pub mod heap;
#[cfg(feature = "std")]
mod ids;
#[cfg(feature = "std")]
pub mod memory;
#[cfg(feature = "std")]
pub mod placement;
#[cfg(feature = "std")]
pub mod residence;
#[cfg(feature = "std")]
pub mod topology;

#[cfg(feature = "std")]
pub use crate::{
    heap::{Heap, HeapView},
    ids::{NodeId, format_list},
    memory::MemoryReport,
    placement::{Choice, Hashdist, InterleavedTable},
    residence::ProcessReport,
    topology::{FakeSpec, Node, Topology, TopologyError},
};
