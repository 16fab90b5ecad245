//! The topology of a live machine, or of a copy of its /sys/devices/system/node.
//!
//! Node numbers may have gaps; a node may lack CPUs (memory only: CXL, persistent memory) or memory. A node that is
//! possible but not online has no directory, and **no column in the distance files either**: their columns belong
//! to the online nodes in ascending order. A kernel without NUMA shows nothing at all: the machine is one node.

use std::io;
use std::path::{Path, PathBuf};

use sys::node as read;

use super::{
    Access, CpuNaming, LOCAL_DISTANCE, MemoryRange, Node, SideCache, Source, Topology,
    TopologyError, default_distances,
};
use crate::NodeId;
use crate::acpi::{Hmat, Reading, Srat};

/// Where a live machine shows its firmware's tables, to root.
const FIRMWARE_DIR: &str = "/sys/firmware/acpi/tables";

impl Topology {
    /// The topology of this machine. Root also gets what HMAT says of latency and bandwidth.
    ///
    /// # Errors
    /// A file under /sys cannot be read or understood.
    pub fn live() -> Result<Self, TopologyError> {
        let root = Path::new(read::NODE_DIR);
        if !root.join("online").exists() {
            return single_node();
        }
        let mut topology = Self::from_sysfs(root)?;
        topology.add_firmware_performance(Path::new(FIRMWARE_DIR));
        Ok(topology)
    }

    /// The topology in `root`, a directory like /sys/devices/system/node.
    ///
    /// # Errors
    /// It is no such directory; a file cannot be read or understood. The error names it.
    pub fn from_sysfs(root: &Path) -> Result<Self, TopologyError> {
        let no_copy = || TopologyError::NoCopy(root.to_owned());
        let online = read::read_list(&root.join("online"))?.ok_or_else(no_copy)?;
        let nodes: Vec<Node> = online
            .iter()
            .map(|&id| read_node(root, id))
            .collect::<Result<_, _>>()?;
        let distances = read_distances(root, &online)?;
        let possible = read::read_list(&root.join("possible"))?.unwrap_or_default();
        let offline = possible
            .into_iter()
            .filter(|id| !online.contains(id))
            .map(NodeId)
            .collect();
        let topology = Self {
            source: Source::Sysfs,
            cpu_naming: CpuNaming::Logical,
            nodes,
            distances,
            offline,
            performance: Vec::new(),
        };
        topology.check()?;
        Ok(topology)
    }

    /// Adds the matrices of the firmware's HMAT, and the domains of its SRAT, where both can be read and fit the
    /// nodes that the kernel shows. They are an extra: a table that is absent, locked or odd is left out.
    fn add_firmware_performance(&mut self, dir: &Path) {
        let table = |name: &str| std::fs::read(dir.join(name)).ok();
        let Some(srat) = table("SRAT").and_then(|bytes| Srat::parse(&bytes, Reading::Field).ok())
        else {
            return;
        };
        let hmat = table("HMAT").and_then(|bytes| Hmat::parse(&bytes, Reading::Field).ok());
        let Ok(firmware) = Self::from_acpi(&srat, None, hmat.as_ref()) else {
            return;
        };
        let same_nodes = firmware.nodes.len() == self.nodes.len()
            && firmware
                .nodes
                .iter()
                .zip(&self.nodes)
                .all(|(one, two)| one.id == two.id);
        if !same_nodes {
            return; // the kernel emulates nodes, or some are offline
        }
        for (node, from) in self.nodes.iter_mut().zip(firmware.nodes) {
            node.domain = from.domain;
        }
        self.performance = firmware.performance;
    }
}

fn read_node(root: &Path, id: u32) -> io::Result<Node> {
    let dir = read::dir_of(root, id);
    let cpus = read::read_list(&dir.join("cpulist"))?.unwrap_or_default();
    let memory_bytes = read::meminfo(root, id)?.total_kib * 1024;
    let ranges = read::memory_ranges(root, id)?
        .into_iter()
        .map(|(start, end)| MemoryRange {
            base: start,
            len_bytes: end - start,
        })
        .collect();
    let initiators = read::read_list(&root.join("has_generic_initiator"))?.unwrap_or_default();
    Ok(Node {
        id: NodeId(id),
        cpus,
        memory_bytes,
        ranges,
        generic_initiators: u32::from(initiators.contains(&id)),
        access: read_access(&dir.join("access0/initiators"))?,
        side_caches: read_caches(&dir.join("memory_side_cache"))?,
        ..Node::default()
    })
}

fn read_distances(root: &Path, online: &[u32]) -> Result<Vec<Vec<u8>>, TopologyError> {
    if !read::dir_of(root, online.first().copied().unwrap_or(0))
        .join("distance")
        .exists()
    {
        return Ok(default_distances(online.len()));
    }
    let mut distances = Vec::with_capacity(online.len());
    for &from in online {
        let row = read::distances(root, from)?;
        if row.len() != online.len() {
            return Err(TopologyError::DistanceCount {
                expected: online.len(),
                found: row.len(),
            });
        }
        let narrow = |(&distance, &to): (&u32, &u32)| {
            u8::try_from(distance).map_err(|_| TopologyError::Distance {
                from: NodeId(from),
                to: NodeId(to),
                distance,
            })
        };
        distances.push(
            row.iter()
                .zip(online)
                .map(narrow)
                .collect::<Result<_, _>>()?,
        );
    }
    Ok(distances)
}

fn read_number(path: PathBuf) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The numbers of the entries of `dir` that are called `prefix` and a number.
fn numbered(dir: &Path, prefix: &str) -> io::Result<Vec<u32>> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
        numbers.extend(number.and_then(|number| number.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

fn read_access(dir: &Path) -> io::Result<Option<Access>> {
    if !dir.is_dir() {
        return Ok(None);
    }
    let number = |name: &str| read_number(dir.join(name));
    Ok(Some(Access {
        initiators: numbered(dir, "node")?.into_iter().map(NodeId).collect(),
        read_latency_ns: number("read_latency"),
        write_latency_ns: number("write_latency"),
        read_bandwidth_mbs: number("read_bandwidth"),
        write_bandwidth_mbs: number("write_bandwidth"),
    }))
}

fn read_caches(dir: &Path) -> io::Result<Vec<SideCache>> {
    let levels = numbered(dir, "index")?.into_iter();
    Ok(levels
        .map(|level| {
            let number =
                |name: &str| read_number(dir.join(format!("index{level}/{name}"))).unwrap_or(0);
            let line_bytes = u32::try_from(number("line_size")).unwrap_or(u32::MAX);
            SideCache {
                level,
                size_bytes: number("size"),
                line_bytes,
            }
        })
        .collect())
}

/// The whole machine as node 0.
fn single_node() -> Result<Topology, TopologyError> {
    let cpus =
        read::read_list(Path::new("/sys/devices/system/cpu/online"))?.unwrap_or_else(|| vec![0]);
    let memory_bytes = read::machine_meminfo()?.total_kib * 1024;
    Ok(Topology {
        source: Source::Sysfs,
        cpu_naming: CpuNaming::Logical,
        nodes: vec![Node {
            cpus,
            memory_bytes,
            ..Node::default()
        }],
        distances: vec![vec![LOCAL_DISTANCE]],
        offline: Vec::new(),
        performance: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_nodes_is_one_node() {
        let single = single_node().unwrap();
        single.check().unwrap();
        assert_eq!(single.distances, [[10]]);
        let node = &single.nodes[0];
        assert!(single.nodes.len() == 1 && node.memory_bytes > 0 && !node.cpus.is_empty());
    }
}
