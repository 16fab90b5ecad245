//! The errors of a topology.

use std::io;
use std::path::PathBuf;

use crate::NodeId;
use crate::acpi::AcpiError;

/// Why there is no topology.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A file of the kernel cannot be read or understood; the error names it.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// A directory that does not show nodes as the kernel does.
    #[error("{path} has no file `online`: it is no copy of /sys/devices/system/node", path = _0.display())]
    NoCopy(PathBuf),
    /// A firmware table cannot be understood.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// Nothing is online.
    #[error("no node is online")]
    NoNodes,
    /// More nodes than Linux can have.
    #[error("{nodes} nodes, at most {limit} are possible")]
    TooManyNodes {
        /// The nodes asked for.
        nodes: usize,
        /// [`MAX_NODES`](super::MAX_NODES).
        limit: usize,
    },
    /// Node numbers do not ascend.
    #[error("node {node} is out of order")]
    NodeOrder {
        /// The node.
        node: NodeId,
    },
    /// A distance row or matrix of the wrong size.
    #[error("{found} distances where {expected} should be")]
    DistanceCount {
        /// The number of online nodes, or its square.
        expected: usize,
        /// The number of distances.
        found: usize,
    },
    /// A distance that cannot be.
    #[error("distance {distance} from node {from} to node {to}")]
    Distance {
        /// The row.
        from: NodeId,
        /// The column.
        to: NodeId,
        /// The distance found.
        distance: u32,
    },
    /// Two nodes claim one CPU.
    #[error("CPU {cpu} is in node {one} and in node {other}")]
    SharedCpu {
        /// The CPU.
        cpu: u32,
        /// The node that claims it first.
        one: NodeId,
        /// The node that claims it too.
        other: NodeId,
    },
    /// An emulated node without a backing node, or a real one with one.
    #[error("node {node} and its backing do not fit the topology's source")]
    Backing {
        /// The node.
        node: NodeId,
    },
    /// A `fake=` specification that says nothing.
    #[error(
        "'{spec}' is no emulation: expected N, NU or a size such as 64M, then optionally ':' and distances"
    )]
    FakeSyntax {
        /// What was given.
        spec: String,
    },
    /// Fewer emulated nodes than real ones.
    #[error("{asked} emulated nodes cannot split {real} nodes with memory")]
    FakeTooFew {
        /// The emulated nodes asked for.
        asked: usize,
        /// The nodes with memory that there are.
        real: usize,
    },
    /// Too little memory for so many nodes.
    #[error("node {node} has {memory_bytes} bytes, too little for {parts} emulated nodes")]
    FakeTooSmall {
        /// The real node.
        node: NodeId,
        /// Its memory.
        memory_bytes: u64,
        /// The parts asked for.
        parts: usize,
    },
}
