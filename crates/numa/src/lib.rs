//! NUMA topology, emulation, placement, node-by-zone heap and interleaved tables.
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod acpi;
