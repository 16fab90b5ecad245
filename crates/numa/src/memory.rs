//! How full each node is, and the kernel's counters of where allocations went.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sys::node as read;

use crate::NodeId;

/// The kernel's counters of one node, in pages since boot. hit + miss = local_node + other_node; the sum of miss over
/// all nodes = the sum of foreign.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Numastat {
    /// Allocated here, as intended.
    pub numa_hit: u64,
    /// Allocated here, though intended for another node.
    pub numa_miss: u64,
    /// Intended for here, but allocated on another node.
    pub numa_foreign: u64,
    /// Interleaved pages allocated here, as intended.
    pub interleave_hit: u64,
    /// Allocated here by a thread that ran here.
    pub local_node: u64,
    /// Allocated here by a thread that ran on another node.
    pub other_node: u64,
}

/// One node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeMemory {
    /// The node.
    pub node: NodeId,
    /// Memory the kernel manages, in KiB: total = free + used.
    pub total_kib: u64,
    /// Of it, free.
    pub free_kib: u64,
    /// Of it, in use.
    pub used_kib: u64,
    /// The counters, where the kernel has them.
    pub numastat: Option<Numastat>,
}

/// All online nodes at one moment. Displayed, it is the table that the mail on boot hash distribution had in 2004.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryReport {
    /// By ascending number.
    pub nodes: Vec<NodeMemory>,
}

impl MemoryReport {
    /// Reads `root`, a directory like /sys/devices/system/node.
    ///
    /// # Errors
    /// A file cannot be read or understood; the error names it.
    pub fn read(root: &Path) -> io::Result<Self> {
        let Some(online) = read::read_list(&root.join("online"))? else {
            let memory = read::machine_meminfo()?;
            return Ok(Self {
                nodes: vec![node_memory(0, memory, None)],
            });
        };
        let nodes = online.into_iter().map(|id| {
            let path = read::dir_of(root, id).join("numastat");
            let numastat = if path.exists() {
                Some(numastat(&read::counters(&path)?))
            } else {
                None
            };
            Ok(node_memory(id, read::meminfo(root, id)?, numastat))
        });
        Ok(Self {
            nodes: nodes.collect::<io::Result<_>>()?,
        })
    }

    /// Reads this machine.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn live() -> io::Result<Self> {
        Self::read(Path::new(read::NODE_DIR))
    }

    /// Total, free and used memory of all nodes, in KiB.
    pub fn totals_kib(&self) -> (u64, u64, u64) {
        self.nodes
            .iter()
            .fold((0, 0, 0), |(total, free, used), node| {
                (
                    total + node.total_kib,
                    free + node.free_kib,
                    used + node.used_kib,
                )
            })
    }

    /// Free memory by node, in bytes: what [`Choice`](crate::placement::Choice) asks for.
    pub fn free_bytes(&self) -> BTreeMap<NodeId, u64> {
        self.nodes
            .iter()
            .map(|node| (node.node, node.free_kib * 1024))
            .collect()
    }
}

fn node_memory(id: u32, memory: read::Meminfo, numastat: Option<Numastat>) -> NodeMemory {
    let read::Meminfo {
        total_kib,
        free_kib,
        used_kib,
    } = memory;
    NodeMemory {
        node: NodeId(id),
        total_kib,
        free_kib,
        used_kib,
        numastat,
    }
}

fn numastat(counters: &BTreeMap<String, u64>) -> Numastat {
    let counter = |name: &str| counters.get(name).copied().unwrap_or(0);
    Numastat {
        numa_hit: counter("numa_hit"),
        numa_miss: counter("numa_miss"),
        numa_foreign: counter("numa_foreign"),
        interleave_hit: counter("interleave_hit"),
        local_node: counter("local_node"),
        other_node: counter("other_node"),
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            " {:>3} {:>12} {:>12} {:>12}  (in kB)",
            "Nid", "MemTotal", "MemFree", "MemUsed"
        )?;
        for node in &self.nodes {
            writeln!(
                f,
                " {:>3} {:>12} {:>12} {:>12}",
                node.node, node.total_kib, node.free_kib, node.used_kib
            )?;
        }
        let (total, free, used) = self.totals_kib();
        writeln!(f, " {:>3} {total:>12} {free:>12} {used:>12}", "ToT")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_2004() {
        let node = |id, total_kib, free_kib| NodeMemory {
            node: NodeId(id),
            total_kib,
            free_kib,
            used_kib: total_kib - free_kib,
            numastat: None,
        };
        let report = MemoryReport {
            nodes: vec![
                node(0, 3_870_656, 3_697_696),
                node(15, 3_864_768, 3_848_256),
            ],
        };
        let text = report.to_string();
        let words: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            words[0],
            ["Nid", "MemTotal", "MemFree", "MemUsed", "(in", "kB)"]
        );
        assert_eq!(words[1], ["0", "3870656", "3697696", "172960"]);
        assert_eq!(words[3], ["ToT", "7735424", "7545952", "189472"]);
    }

    #[test]
    fn the_live_machine() {
        let report = MemoryReport::live().unwrap();
        assert!(report.totals_kib().0 > 0 && report.free_bytes().len() == report.nodes.len());
        let again: MemoryReport =
            serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(again, report);
    }
}
