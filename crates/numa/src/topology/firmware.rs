//! The topology that firmware tables describe.
//!
//! Node numbers are those that Linux gives on x86 (`acpi_numa_init` in drivers/acpi/numa/srat.c). Each enabled entry
//! takes the next free number for a domain not seen before, CPUs and generic initiators first, in the table's order,
//! then memory. So the topology of a machine's own tables equals that of its sysfs.

use std::collections::BTreeMap;

use super::{
    Access, CpuNaming, MAX_NODES, MemoryRange, Node, Performance, SideCache, Source, Topology,
    TopologyError, default_distances,
};
use crate::NodeId;
use crate::acpi::{
    Affinity, DataType, Hmat, ProximityDomain, Slit, Srat, SystemLocality, memory_flags,
};

impl Topology {
    /// The topology that the tables describe. Without a SLIT, and for domains outside of it, all nodes are 20 apart.
    ///
    /// # Errors
    /// The SRAT has no enabled entry, or too many domains.
    pub fn from_acpi(
        srat: &Srat,
        slit: Option<&Slit>,
        hmat: Option<&Hmat>,
    ) -> Result<Self, TopologyError> {
        let domains = number_domains(srat);
        if domains.is_empty() {
            return Err(TopologyError::NoNodes);
        }
        if domains.len() > MAX_NODES {
            return Err(TopologyError::TooManyNodes {
                nodes: domains.len(),
                limit: MAX_NODES,
            });
        }
        let mut nodes = empty_nodes(&domains);
        let cpu_naming = fill(&mut nodes, &domains, srat);
        for node in &mut nodes {
            node.cpus.sort_unstable();
            node.cpus.dedup();
            node.ranges = merged(std::mem::take(&mut node.ranges));
            node.memory_bytes = node.ranges.iter().map(|range| range.len_bytes).sum();
        }
        let distances = slit.map_or_else(
            || default_distances(nodes.len()),
            |slit| distances(&nodes, slit),
        );
        let mut topology = Self {
            source: Source::Acpi,
            cpu_naming,
            nodes,
            distances,
            offline: Vec::new(),
            performance: Vec::new(),
        };
        if let Some(hmat) = hmat {
            add_hmat(&mut topology, &domains, hmat);
        }
        topology.check()?;
        Ok(topology)
    }
}

type Domains = BTreeMap<ProximityDomain, NodeId>;

fn number_domains(srat: &Srat) -> Domains {
    let mut domains = Domains::new();
    let is_memory = |entry: &&Affinity| matches!(entry, Affinity::Memory { .. });
    let makes_node = |entry: &&Affinity| {
        entry.is_enabled() && !matches!(entry, Affinity::Its { .. } | Affinity::GenericPort { .. })
    };
    let enabled = || srat.entries.iter().filter(makes_node);
    let in_order = enabled()
        .filter(|entry| !is_memory(entry))
        .chain(enabled().filter(is_memory));
    for domain in in_order.filter_map(Affinity::domain) {
        // At most as many as entries, which a 32-bit length bounds.
        let next = NodeId(u32::try_from(domains.len()).unwrap_or(u32::MAX));
        domains.entry(domain).or_insert(next);
    }
    domains
}

fn empty_nodes(domains: &Domains) -> Vec<Node> {
    let mut nodes: Vec<Node> = domains
        .iter()
        .map(|(domain, &id)| Node {
            id,
            domain: Some(domain.0),
            ..Node::default()
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

fn fill(nodes: &mut [Node], domains: &Domains, srat: &Srat) -> CpuNaming {
    let mut naming = CpuNaming::ApicId;
    for entry in srat.entries.iter().filter(|entry| entry.is_enabled()) {
        let Some(id) = entry.domain().and_then(|domain| domains.get(&domain)) else {
            continue;
        };
        let node = &mut nodes[id.0 as usize];
        match *entry {
            Affinity::LocalApic { apic_id, .. } => node.cpus.push(u32::from(apic_id)),
            Affinity::X2Apic { x2apic_id, .. } => node.cpus.push(x2apic_id),
            Affinity::Gicc { processor_uid, .. } | Affinity::Rintc { processor_uid, .. } => {
                naming = CpuNaming::ProcessorUid;
                node.cpus.push(processor_uid);
            }
            Affinity::GenericInitiator { .. } => node.generic_initiators += 1,
            Affinity::Memory {
                base,
                length,
                flags,
                ..
            } => add_memory(node, base, length, flags),
            Affinity::Its { .. } | Affinity::GenericPort { .. } | Affinity::Unknown { .. } => {}
        }
    }
    naming
}

fn add_memory(node: &mut Node, base: u64, len_bytes: u64, flags: u32) {
    if flags & memory_flags::NON_VOLATILE != 0 {
        node.non_volatile_bytes = node.non_volatile_bytes.saturating_add(len_bytes);
    } else if flags & memory_flags::HOT_PLUGGABLE != 0 {
        node.hotplug_bytes = node.hotplug_bytes.saturating_add(len_bytes);
    } else if len_bytes > 0 {
        node.ranges.push(MemoryRange { base, len_bytes });
    }
}

/// The union of ranges, ascending and apart.
fn merged(mut ranges: Vec<MemoryRange>) -> Vec<MemoryRange> {
    ranges.sort_unstable();
    let mut merged: Vec<MemoryRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        let end = range.base.saturating_add(range.len_bytes);
        match merged.last_mut() {
            Some(last) if range.base <= last.base.saturating_add(last.len_bytes) => {
                last.len_bytes = last.len_bytes.max(end - last.base);
            }
            _ => merged.push(range),
        }
    }
    merged
}

fn distances(nodes: &[Node], slit: &Slit) -> Vec<Vec<u8>> {
    let mut distances = default_distances(nodes.len());
    for (from, row) in nodes.iter().zip(&mut distances) {
        for (to, distance) in nodes.iter().zip(row) {
            let stated = from
                .domain
                .zip(to.domain)
                .and_then(|(from, to)| slit.distance(from, to));
            *distance = stated.unwrap_or(*distance);
        }
    }
    distances
}

fn add_hmat(topology: &mut Topology, domains: &Domains, hmat: &Hmat) {
    for locality in &hmat.localities {
        topology
            .performance
            .push(performance(domains, hmat, locality));
    }
    for cache in &hmat.caches {
        let Some(id) = domains.get(&cache.memory) else {
            continue;
        };
        topology.nodes[id.0 as usize].side_caches.push(SideCache {
            level: cache.attributes >> 4 & 0xf,
            size_bytes: cache.size_bytes,
            line_bytes: cache.attributes >> 16,
        });
    }
    for node in &mut topology.nodes {
        let attached = hmat
            .attributes
            .iter()
            .find(|it| domains.get(&it.memory) == Some(&node.id));
        let attached = attached
            .and_then(|it| it.initiator)
            .and_then(|domain| domains.get(&domain).copied());
        node.access = access(&topology.performance, node.id, attached);
    }
}

fn performance(domains: &Domains, hmat: &Hmat, locality: &SystemLocality) -> Performance {
    // Rows and columns of domains that are not enabled are left out.
    let known = |list: &[ProximityDomain]| -> Vec<(usize, NodeId)> {
        list.iter()
            .enumerate()
            .filter_map(|(index, domain)| Some((index, *domains.get(domain)?)))
            .collect()
    };
    let (rows, columns) = (known(&locality.initiators), known(&locality.targets));
    Performance {
        data_type: locality.data_type,
        hierarchy: locality.flags & 0xf,
        initiators: rows.iter().map(|&(_, id)| id).collect(),
        targets: columns.iter().map(|&(_, id)| id).collect(),
        values: rows
            .iter()
            .map(|&(row, _)| {
                columns
                    .iter()
                    .map(|&(column, _)| hmat.value(locality, row, column))
                    .collect()
            })
            .collect(),
    }
}

/// The best initiators of a node's memory: the one it is attached to, else those with the best value of the first
/// matrix that says anything of it.
fn access(matrices: &[Performance], target: NodeId, attached: Option<NodeId>) -> Option<Access> {
    let column = |matrix: &Performance| -> Vec<(NodeId, u64)> {
        let Some(column) = matrix.targets.iter().position(|&id| id == target) else {
            return Vec::new();
        };
        let values = matrix.initiators.iter().zip(&matrix.values);
        values
            .filter_map(|(&id, row)| Some((id, row[column]?)))
            .collect()
    };
    let memory = || matrices.iter().filter(|matrix| matrix.hierarchy == 0);
    let initiators = match attached {
        Some(id) => vec![id],
        None => memory()
            .map(|matrix| best(&column(matrix), matrix.data_type))
            .find(|best| !best.is_empty())?,
    };
    let value = |specific: DataType, general: DataType| {
        let of = |data_type| {
            let matrix = memory().find(|matrix| matrix.data_type == data_type)?;
            column(matrix)
                .into_iter()
                .find(|(id, _)| initiators.contains(id))
                .map(|(_, value)| value)
        };
        of(specific).or_else(|| of(general))
    };
    Some(Access {
        read_latency_ns: value(DataType::ReadLatency, DataType::AccessLatency),
        write_latency_ns: value(DataType::WriteLatency, DataType::AccessLatency),
        read_bandwidth_mbs: value(DataType::ReadBandwidth, DataType::AccessBandwidth),
        write_bandwidth_mbs: value(DataType::WriteBandwidth, DataType::AccessBandwidth),
        initiators,
    })
}

fn best(values: &[(NodeId, u64)], data_type: DataType) -> Vec<NodeId> {
    let all = values.iter().map(|&(_, value)| value);
    let Some(best) = (if data_type.is_latency() {
        all.min()
    } else {
        all.max()
    }) else {
        return Vec::new();
    };
    values
        .iter()
        .filter(|&&(_, value)| value == best)
        .map(|&(id, _)| id)
        .collect()
}
