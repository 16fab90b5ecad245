//! NUMA topology, emulation, placement, node-by-zone heap and interleaved tables.
#![forbid(unsafe_code)]
