//! Where memory goes: policies for ranges, and the choice of a node for a whole process.
//!
//! Nodes are those of a [`Topology`]. An emulated node stands for its backing node here, so that all code that
//! places by node runs on emulated ones too.

mod choice;
mod index;
mod table;

pub use choice::{Choice, NodeRequest, Starts, Strictness};
pub use index::IndexMemory;
pub use table::{Hashdist, InterleavedTable};

use std::io;
use std::ops::Range;

use sys::mempolicy::{self, Mode, NodeMask};

pub use sys::mempolicy::Existing;

use crate::{NodeId, Topology};

/// What is to become of the pages of a range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Policy {
    /// The thread's policy applies.
    Default,
    /// The node of the CPU that touches a page first.
    Local,
    /// Only these nodes. The first is home: from there the kernel measures what is near.
    Bind(Vec<NodeId>),
    /// These nodes first, the others when they are full. The first is home.
    Preferred(Vec<NodeId>),
    /// Page by page in turn.
    Interleave(Vec<NodeId>),
    /// In turn, by the weights in /sys/kernel/mm/mempolicy/weighted_interleave; a kernel before 6.9 interleaves evenly.
    WeightedInterleave(Vec<NodeId>),
}

/// What the kernel was told in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Applied {
    /// The mode; `Interleave` where weights are not there, `Preferred` where several preferred nodes are not.
    pub mode: Mode,
    /// Whether a home node was set.
    pub home: bool,
}

/// Why memory cannot be placed so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// The topology has no such node.
    #[error("node {node} is not online: `pageone numa topology` shows those that are")]
    NoNode {
        /// The node.
        node: NodeId,
    },
    /// The node has no memory to place anything in.
    #[error("node {node} has no memory: choose one that /sys/devices/system/node/has_memory lists")]
    NoMemory {
        /// The node.
        node: NodeId,
    },
    /// A policy that needs nodes was given none.
    #[error("no node to place memory on")]
    NoNodes,
    /// No node with CPUs can be reached.
    #[error("no node with CPUs can be reached from node {node}")]
    NoCpus {
        /// The node.
        node: NodeId,
    },
    /// The kernel keeps this process off the node.
    #[error(
        "this process gets no {what} of node {node}: choose a node that its cpuset allows, or change the cpuset ({knob} of its cgroup)"
    )]
    NotAllowed {
        /// The node.
        node: NodeId,
        /// CPUs or memory.
        what: &'static str,
        /// The cpuset's file that says so.
        knob: &'static str,
    },
    /// CPU numbers of firmware tables are not those of the kernel.
    #[error("the topology does not know the kernel's CPU numbers")]
    CpuNaming,
    /// A table of more elements than the address space has room for, or no memory for it.
    #[error("table of {len} elements of {element_bytes} bytes: {source}")]
    Table {
        /// The elements asked for.
        len: usize,
        /// The size of one.
        element_bytes: usize,
        /// Why not.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("{call}: {source}")]
    Kernel {
        /// The system call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

fn kernel(call: &'static str) -> impl Fn(io::Error) -> PlacementError {
    move |source| PlacementError::Kernel { call, source }
}

/// The mask of the real nodes behind `nodes`, all of which have memory.
fn mask_of(topology: &Topology, nodes: &[NodeId]) -> Result<NodeMask, PlacementError> {
    if nodes.is_empty() {
        return Err(PlacementError::NoNodes);
    }
    let mut real = Vec::with_capacity(nodes.len());
    for &id in nodes {
        let node = topology
            .node(id)
            .ok_or(PlacementError::NoNode { node: id })?;
        if node.memory_bytes == 0 {
            return Err(PlacementError::NoMemory { node: id });
        }
        real.push(node.backing.unwrap_or(id).0);
    }
    NodeMask::from_nodes(real).map_err(kernel("mbind"))
}

/// Sets the policy of a range of this process, in bytes, from page to page.
///
/// # Errors
/// A node that is not online or has no memory, a range that is not mapped whole, or a page that cannot be served.
pub fn place(
    topology: &Topology,
    range: Range<usize>,
    policy: &Policy,
    existing: Existing,
) -> Result<Applied, PlacementError> {
    let (address, len) = (range.start, range.end.saturating_sub(range.start));
    let set = |mode, mask: &NodeMask| mempolicy::mbind(address, len, mode, mask, existing);
    let (mode, nodes) = match policy {
        Policy::Default => (Mode::Default, &[][..]),
        Policy::Local => (Mode::Local, &[][..]),
        Policy::Bind(nodes) => (Mode::Bind, &nodes[..]),
        Policy::Preferred(nodes) if nodes.len() == 1 => (Mode::Preferred, &nodes[..]),
        Policy::Preferred(nodes) => (Mode::PreferredMany, &nodes[..]),
        Policy::Interleave(nodes) => (Mode::Interleave, &nodes[..]),
        Policy::WeightedInterleave(nodes) => (Mode::WeightedInterleave, &nodes[..]),
    };
    if nodes.is_empty() && matches!(mode, Mode::Default | Mode::Local) {
        set(mode, &NodeMask::EMPTY).map_err(kernel("mbind"))?;
        return Ok(Applied { mode, home: false });
    }
    let mask = mask_of(topology, nodes)?;
    let (mode, mask) = match set(mode, &mask) {
        Ok(()) => (mode, mask),
        Err(error) => {
            let (older, mask) = fallback(mode, &mask, topology, nodes, &error)
                .ok_or_else(|| kernel("mbind")(error))?;
            set(older, &mask).map_err(kernel("mbind"))?;
            (older, mask)
        }
    };
    Ok(Applied {
        mode,
        home: set_home(topology, &range, mode, &mask, nodes),
    })
}

/// What to tell a kernel that is too old for `mode`.
fn fallback(
    mode: Mode,
    mask: &NodeMask,
    topology: &Topology,
    nodes: &[NodeId],
    error: &io::Error,
) -> Option<(Mode, NodeMask)> {
    let unknown = error.kind() == io::ErrorKind::InvalidInput;
    match mode {
        Mode::WeightedInterleave if unknown => Some((Mode::Interleave, *mask)),
        Mode::PreferredMany if unknown => {
            Some((Mode::Preferred, mask_of(topology, &nodes[..1]).ok()?))
        }
        _ => None,
    }
}

/// Makes the first node home where that means something; an older kernel leaves it undone.
fn set_home(
    topology: &Topology,
    range: &Range<usize>,
    mode: Mode,
    mask: &NodeMask,
    nodes: &[NodeId],
) -> bool {
    let several = mask.iter().nth(1).is_some();
    let home = nodes.first().and_then(|&node| topology.real_node(node));
    match home {
        Some(home) if several && matches!(mode, Mode::Bind | Mode::PreferredMany) => {
            mempolicy::set_mempolicy_home_node(range.start, range.end - range.start, home.0).is_ok()
        }
        _ => false,
    }
}

/// Names nodes in turn, as often as their weights say: for callers that interleave by hand, such as users of the heap.
///
/// # Examples
/// ```
/// use numa::{NodeId, placement::Interleaver};
/// let turns: Vec<u32> = Interleaver::new([(NodeId(0), 2), (NodeId(1), 1)]).take(6).map(|node| node.0).collect();
/// assert_eq!(turns, [0, 0, 1, 0, 0, 1]);
/// ```
#[derive(Clone, Debug)]
pub struct Interleaver {
    nodes: Vec<(NodeId, u32)>,
    at: usize,
    given: u32,
}

impl Interleaver {
    /// Takes nodes and weights; a weight of 0 leaves the node out.
    pub fn new(nodes: impl IntoIterator<Item = (NodeId, u32)>) -> Self {
        let nodes = nodes
            .into_iter()
            .filter(|&(_, weight)| weight > 0)
            .collect();
        Self {
            nodes,
            at: 0,
            given: 0,
        }
    }
}

impl Iterator for Interleaver {
    type Item = NodeId;

    fn next(&mut self) -> Option<NodeId> {
        let &(node, weight) = self.nodes.get(self.at)?;
        self.given += 1;
        if self.given == weight {
            self.given = 0;
            self.at = (self.at + 1) % self.nodes.len();
        }
        Some(node)
    }
}
