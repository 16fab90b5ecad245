//! Big tables that all nodes use, spread over the nodes with memory.
//!
//! A table on one node takes that node's memory from the threads that run there and puts the traffic of all threads on
//! its link. Linux spread its boot-time hash tables for that reason (2004), and called the knob `hashdist`; so does this.
//!
//! The policy is set before anything touches the table, and the kernel deals out pages in turn. With huge pages it
//! deals out 2 MiB at a time: a table gets them only when each node has so many of those that one more or less
//! stays under 2 %.

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::str::FromStr;

use sys::mempolicy;
use sys::zeroed::ZeroedSlice;
use zerocopy::FromZeros;

use super::{Existing, PlacementError, Policy, place};
use crate::{NodeId, Topology};

const HUGE_BYTES: usize = 2 << 20;
/// One huge page more on a node that has 64 is 1.6 %.
const HUGE_PAGES_EACH: usize = 64;
/// Pages of one query.
const QUERY_PAGES: usize = 4096;

/// Whether big tables are spread: the knob `hashdist`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Hashdist {
    /// Over all nodes with memory (1).
    #[default]
    Spread,
    /// On one node (0): that of the thread that makes the table, or the nearest with memory.
    OneNode,
}

impl FromStr for Hashdist {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("hashdist=").unwrap_or(text) {
            "0" | "off" => Ok(Self::OneNode),
            "1" | "on" => Ok(Self::Spread),
            _ => Err(format!("'{text}': hashdist is 0 or 1")),
        }
    }
}

/// A zeroed table of fixed length whose pages are spread over nodes.
///
/// # Examples
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use numa::{Topology, placement::{Hashdist, InterleavedTable}};
/// let topology = Topology::live().unwrap();
/// let table = InterleavedTable::<AtomicU64>::new(100_000, &topology, Hashdist::Spread).unwrap();
/// table[7].store(1, Ordering::Relaxed);
/// assert_eq!(table[8].load(Ordering::Relaxed), 0);
/// ```
#[derive(Debug)]
pub struct InterleavedTable<T> {
    slice: ZeroedSlice<T>,
    nodes: Vec<NodeId>,
}

impl<T: FromZeros> InterleavedTable<T> {
    /// Maps `len` zeroed elements and tells the kernel where their pages go; no page is there yet.
    ///
    /// # Errors
    /// No address space, or the kernel refuses the policy.
    pub fn new(
        len: usize,
        topology: &Topology,
        hashdist: Hashdist,
    ) -> Result<Self, PlacementError> {
        let slice = ZeroedSlice::new(len).map_err(|source| Self::error(len, source))?;
        let nodes = match hashdist {
            Hashdist::Spread => topology.memory_nodes().map(|node| node.id).collect(),
            Hashdist::OneNode => vec![home_node(topology).ok_or(PlacementError::NoNodes)?],
        };
        lay_out(&slice, topology, &nodes, Existing::Stay)?;
        Ok(Self { slice, nodes })
    }

    /// Makes all pages present, where the policy wants them.
    ///
    /// # Errors
    /// The machine has too little memory.
    pub fn populate(&self) -> Result<(), PlacementError> {
        self.slice
            .populate()
            .map_err(|source| Self::error(self.slice.len(), source))
    }

    fn error(len: usize, source: io::Error) -> PlacementError {
        PlacementError::Table {
            len,
            element_bytes: size_of::<T>(),
            source,
        }
    }
}

/// Tells the kernel where the pages of a table go: to these nodes in turn, or to the only one; and whether they may be huge.
///
/// # Errors
/// As [`place`].
pub(super) fn lay_out<T: FromZeros>(
    slice: &ZeroedSlice<T>,
    topology: &Topology,
    nodes: &[NodeId],
    existing: Existing,
) -> Result<(), PlacementError> {
    let huge_pages = slice.len_bytes() / HUGE_BYTES;
    slice.allow_huge_pages(nodes.len() <= 1 || huge_pages / nodes.len() >= HUGE_PAGES_EACH);
    // A machine with one node needs no policy, and a kernel without NUMA has none.
    if topology.nodes.len() < 2 {
        return Ok(());
    }
    let policy = match nodes.len() {
        1 => Policy::Preferred(nodes.to_vec()),
        _ => Policy::Interleave(nodes.to_vec()),
    };
    place(topology, range_of(slice), &policy, existing).map(drop)
}

pub(super) fn range_of<T>(slice: &ZeroedSlice<T>) -> Range<usize> {
    let start = slice.as_ptr() as usize;
    start..start + slice.len_bytes()
}

/// How many pages of a range of this process, of those that are present, are on which of the kernel's nodes.
///
/// # Errors
/// The kernel has no move_pages(2).
pub(super) fn pages_by_node(range: Range<usize>) -> io::Result<BTreeMap<NodeId, u64>> {
    let pages: Vec<usize> = range.step_by(4096).collect();
    let mut nodes = vec![0; QUERY_PAGES];
    let mut counts = BTreeMap::new();
    for pages in pages.chunks(QUERY_PAGES) {
        let nodes = &mut nodes[..pages.len()];
        mempolicy::pages_to_nodes(None, pages, nodes)?;
        for node in nodes.iter().filter_map(|&node| u32::try_from(node).ok()) {
            *counts.entry(NodeId(node)).or_insert(0) += 1;
        }
    }
    Ok(counts)
}

/// The node this thread runs on, or the nearest one with memory.
pub(super) fn home_node(topology: &Topology) -> Option<NodeId> {
    let (cpu, _) = mempolicy::current_cpu_and_node();
    let here = topology
        .node_of_cpu(cpu)
        .or_else(|| topology.nodes.first().map(|node| node.id))?;
    let has_memory = |id: &NodeId| topology.node(*id).is_some_and(|node| node.memory_bytes > 0);
    topology.by_distance(here).into_iter().find(has_memory)
}

impl<T> InterleavedTable<T> {
    /// The nodes that its pages were meant for.
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// The size in bytes, in whole pages.
    pub fn len_bytes(&self) -> usize {
        self.slice.len_bytes()
    }

    /// How many of its pages, of those that are present, are on which of the kernel's nodes.
    ///
    /// # Errors
    /// The kernel has no move_pages(2).
    pub fn pages_by_node(&self) -> io::Result<BTreeMap<NodeId, u64>> {
        pages_by_node(range_of(&self.slice))
    }
}

impl<T> Deref for InterleavedTable<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.slice
    }
}

impl<T> DerefMut for InterleavedTable<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.slice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel was told of the mapping at this address, as smaps abbreviates it.
    fn advice(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let first = format!("{address:x}-");
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&first));
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:"));
        flags.unwrap().to_owned()
    }

    #[test]
    fn a_table_on_one_node_may_have_huge_pages_on_every_machine() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return eprintln!("skipped: this kernel has no huge pages");
        }
        let live = Topology::live().unwrap();
        let real = live.memory_nodes().count();
        for nodes in [real, 2 * real] {
            let spec = format!("fake={nodes}").parse().unwrap();
            let machine = live.emulate(&spec).unwrap();
            let new = |spread| InterleavedTable::<u64>::new(1 << 20, &machine, spread).unwrap();
            let table = new(Hashdist::OneNode);
            let flags = advice(table.as_ptr() as usize);
            assert!(flags.contains(" hg"), "{nodes} nodes: {flags}");
            // 8 MiB are four huge pages.
            let table = new(Hashdist::Spread);
            let flags = advice(table.as_ptr() as usize);
            assert_eq!(flags.contains(" hg"), nodes == 1, "{nodes} nodes: {flags}");
        }
    }
}
