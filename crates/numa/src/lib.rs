//! NUMA topology, emulation, placement, node-by-zone heap and interleaved tables.
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod acpi;
#[cfg(feature = "std")]
pub mod heap;
#[cfg(feature = "std")]
mod ids;
#[cfg(feature = "std")]
pub mod topology;

#[cfg(feature = "std")]
pub use heap::{Heap, HeapView};
#[cfg(feature = "std")]
pub use ids::{NodeId, format_list};
#[cfg(feature = "std")]
pub use topology::{FakeSpec, Node, Topology, TopologyError};
