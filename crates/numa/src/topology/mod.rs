//! The machine's nodes, from wherever they are known: one type for all three sources.
//!
//! ```text
//!  /sys/devices/system/node ──▶ Topology::from_sysfs ─┐
//!  SRAT, SLIT, HMAT ──────────▶ Topology::from_acpi ──┼──▶ Topology ──▶ placement, heap, views
//!  a Topology and `fake=…` ───▶ Topology::emulate ────┘
//! ```
//!
//! Invariants, asserted by [`Topology::check`]:
//!
//! - T1 There is at least one node; node numbers ascend and may have gaps.
//! - T2 The distance matrix has a row and a column for each *online* node, in the nodes' order.
//! - T3 A distance is at least 10, and 10 from a node to itself; 255 means no way.
//! - T4 A CPU is in one node only, except on a kernel that emulates nodes, and in an emulation over such nodes. There
//!   each emulated node shows all CPUs of the node it is made of.
//! - T5 An emulated node has a backing node of the topology that it was made from.

mod error;
mod fake;
mod firmware;
mod sysfs;

pub use error::TopologyError;
pub use fake::{FakeSpec, Split};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::NodeId;
use crate::acpi::DataType;

/// A node's distance to itself.
pub const LOCAL_DISTANCE: u8 = crate::acpi::LOCAL;
/// What is assumed between two nodes when no source says.
pub const REMOTE_DISTANCE: u8 = 20;
/// There is no way from one node to the other.
pub const UNREACHABLE: u8 = crate::acpi::UNREACHABLE;
/// The most nodes a topology may have, as in Linux.
pub const MAX_NODES: usize = 1024;

/// Where a topology was learnt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The running kernel.
    Sysfs,
    /// Firmware tables.
    Acpi,
    /// Made up over another topology.
    Emulated,
}

/// What the numbers in [`Node::cpus`] are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuNaming {
    /// The kernel's CPU numbers.
    Logical,
    /// APIC ids, as x86 firmware has them.
    ApicId,
    /// ACPI processor UIDs, as Arm and RISC-V firmware have them.
    ProcessorUid,
}

/// A range of physical addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct MemoryRange {
    /// The first address.
    pub base: u64,
    /// The length in bytes.
    pub len_bytes: u64,
}

/// A cache between a node's memory and all its users.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SideCache {
    /// 1 is the nearest to the memory's users.
    pub level: u32,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The line size in bytes.
    pub line_bytes: u32,
}

/// How fast the best initiators reach a node's memory. `None` where no source says.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Access {
    /// The nodes with the best access to this memory.
    pub initiators: Vec<NodeId>,
    /// In nanoseconds.
    pub read_latency_ns: Option<u64>,
    /// In nanoseconds.
    pub write_latency_ns: Option<u64>,
    /// In MB/s.
    pub read_bandwidth_mbs: Option<u64>,
    /// In MB/s.
    pub write_bandwidth_mbs: Option<u64>,
}

/// One node.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Its proximity domain, where firmware tables were read.
    pub domain: Option<u32>,
    /// The real node that an emulated one is part of.
    pub backing: Option<NodeId>,
    /// Its CPUs, ascending, in the topology's [`CpuNaming`]; none in a CPU-less node.
    pub cpus: Vec<u32>,
    /// Its memory in bytes; 0 in a memory-less node. From firmware: what is enabled, volatile and not hot-pluggable.
    pub memory_bytes: u64,
    /// Memory that may come later, in bytes.
    pub hotplug_bytes: u64,
    /// Memory that keeps its content without power, in bytes.
    pub non_volatile_bytes: u64,
    /// Where the memory is, as far as known: ascending and apart.
    pub ranges: Vec<MemoryRange>,
    /// Devices that access memory and have no node of their own.
    pub generic_initiators: u32,
    /// Access to its memory by its best initiators.
    pub access: Option<Access>,
    /// Caches in front of its memory.
    pub side_caches: Vec<SideCache>,
}

/// A matrix of latencies or bandwidths, in ns or MB/s.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Performance {
    /// What the values are.
    pub data_type: DataType,
    /// 0 for memory, 1 to 3 for a memory-side cache of that level.
    pub hierarchy: u8,
    /// The rows.
    pub initiators: Vec<NodeId>,
    /// The columns.
    pub targets: Vec<NodeId>,
    /// Row by row; `None` where the table has none or there is no way.
    pub values: Vec<Vec<Option<u64>>>,
}

/// The nodes of a machine and how far they are apart.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Topology {
    /// Where this was learnt.
    pub source: Source,
    /// What the CPU numbers are.
    pub cpu_naming: CpuNaming,
    /// The online nodes, by ascending number.
    pub nodes: Vec<Node>,
    /// Row by row, from each node to each node, in the order of `nodes`.
    pub distances: Vec<Vec<u8>>,
    /// Nodes that could come online, by ascending number.
    pub offline: Vec<NodeId>,
    /// Latency and bandwidth matrices.
    pub performance: Vec<Performance>,
}

impl Topology {
    /// The node with this number, if it is online.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.index(id).map(|index| &self.nodes[index])
    }

    pub(crate) fn index(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |node| node.id).ok()
    }

    /// The distance between two online nodes.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u8> {
        Some(self.distances[self.index(from)?][self.index(to)?])
    }

    /// All nodes that can be reached from `from`, nearest first, itself first of all; by number among equals.
    pub fn by_distance(&self, from: NodeId) -> Vec<NodeId> {
        let Some(row) = self.index(from) else {
            return Vec::new();
        };
        let mut order: Vec<(u8, NodeId)> = self.distances[row]
            .iter()
            .copied()
            .zip(self.nodes.iter().map(|node| node.id))
            .collect();
        order.retain(|&(distance, _)| distance != UNREACHABLE);
        order.sort_by_key(|&(distance, id)| (id != from, distance, id));
        order.into_iter().map(|(_, id)| id).collect()
    }

    /// The nodes that have memory.
    pub fn memory_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.memory_bytes > 0)
    }

    /// The nodes that have CPUs.
    pub fn cpu_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| !node.cpus.is_empty())
    }

    /// The node of a CPU. Where a kernel's emulation shows a CPU in several, the first of them.
    pub fn node_of_cpu(&self, cpu: u32) -> Option<NodeId> {
        self.nodes
            .iter()
            .find(|node| node.cpus.binary_search(&cpu).is_ok())
            .map(|node| node.id)
    }

    /// The node that the kernel knows: an emulated node's backing, any other itself.
    pub fn real_node(&self, id: NodeId) -> Option<NodeId> {
        self.node(id).map(|node| node.backing.unwrap_or(id))
    }

    /// Renames the CPUs by `names` (from this topology's naming to the kernel's) and drops those not in it:
    /// firmware lists sockets that are empty too.
    pub fn with_logical_cpus(mut self, names: &BTreeMap<u32, u32>) -> Self {
        for node in &mut self.nodes {
            node.cpus = node
                .cpus
                .iter()
                .filter_map(|cpu| names.get(cpu).copied())
                .collect();
            node.cpus.sort_unstable();
        }
        self.cpu_naming = CpuNaming::Logical;
        self
    }

    /// Says in which ways the two differ in what both know for sure: node numbers, CPUs where both name them alike,
    /// distances, and who has memory. Empty when they agree.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let ids = |topology: &Self| {
            topology
                .nodes
                .iter()
                .map(|node| node.id)
                .collect::<Vec<_>>()
        };
        if ids(self) != ids(other) {
            return vec![format!("nodes {:?} and {:?}", ids(self), ids(other))];
        }
        let mut differences = Vec::new();
        for (one, two) in self.nodes.iter().zip(&other.nodes) {
            if self.cpu_naming == other.cpu_naming && one.cpus != two.cpus {
                differences.push(format!(
                    "node {}: CPUs {:?} and {:?}",
                    one.id, one.cpus, two.cpus
                ));
            }
            if (one.memory_bytes > 0) != (two.memory_bytes > 0) {
                let (one_bytes, two_bytes) = (one.memory_bytes, two.memory_bytes);
                differences.push(format!(
                    "node {}: {one_bytes} and {two_bytes} bytes",
                    one.id
                ));
            }
        }
        if self.distances != other.distances {
            differences.push(format!(
                "distances {:?} and {:?}",
                self.distances, other.distances
            ));
        }
        differences
    }

    /// Asserts the invariants at the module's head.
    ///
    /// # Errors
    /// The first one broken.
    pub fn check(&self) -> Result<(), TopologyError> {
        if self.nodes.is_empty() {
            return Err(TopologyError::NoNodes);
        }
        if self.nodes.len() > MAX_NODES {
            return Err(TopologyError::TooManyNodes {
                nodes: self.nodes.len(),
                limit: MAX_NODES,
            });
        }
        if let Some(pair) = self.nodes.windows(2).find(|pair| pair[0].id >= pair[1].id) {
            return Err(TopologyError::NodeOrder { node: pair[1].id });
        }
        self.check_distances()?;
        self.check_cpus()
    }

    fn check_distances(&self) -> Result<(), TopologyError> {
        let nodes = self.nodes.len();
        for row in std::iter::once(self.distances.len()).chain(self.distances.iter().map(Vec::len))
        {
            if row != nodes {
                return Err(TopologyError::DistanceCount {
                    expected: nodes,
                    found: row,
                });
            }
        }
        for (from, row) in self.nodes.iter().zip(&self.distances) {
            for (to, &distance) in self.nodes.iter().zip(row) {
                if distance < LOCAL_DISTANCE || (from.id == to.id && distance != LOCAL_DISTANCE) {
                    return Err(TopologyError::Distance {
                        from: from.id,
                        to: to.id,
                        distance: u32::from(distance),
                    });
                }
            }
        }
        Ok(())
    }

    fn check_cpus(&self) -> Result<(), TopologyError> {
        let mut owners = BTreeMap::new();
        for node in &self.nodes {
            for &cpu in &node.cpus {
                // T4: only firmware knows nothing of emulation.
                if let Some(one) = owners
                    .insert(cpu, node.id)
                    .filter(|_| self.source == Source::Acpi)
                {
                    return Err(TopologyError::SharedCpu {
                        cpu,
                        one,
                        other: node.id,
                    });
                }
            }
            if (self.source == Source::Emulated) != node.backing.is_some() {
                return Err(TopologyError::Backing { node: node.id });
            }
        }
        Ok(())
    }
}

/// A matrix with 10 on the diagonal and 20 elsewhere: what holds when no source says.
fn default_distances(nodes: usize) -> Vec<Vec<u8>> {
    (0..nodes)
        .map(|from| {
            (0..nodes)
                .map(|to| {
                    if from == to {
                        LOCAL_DISTANCE
                    } else {
                        REMOTE_DISTANCE
                    }
                })
                .collect()
        })
        .collect()
}
