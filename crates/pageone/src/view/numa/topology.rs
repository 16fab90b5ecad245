//! `pageone numa topology`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use numa::acpi::{AcpiError, Hmat, Quirk, Reading, Slit, Srat};
use numa::topology::{Performance, UNREACHABLE};
use numa::{FakeSpec, NodeId, Topology, format_list};

use super::{draw, print_json, table};
use crate::head::Headed;
use crate::output::{print, say};

/// How to print a topology.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Table,
    /// For programs
    Json,
    /// A graph for Graphviz
    Dot,
    /// A drawing
    Svg,
}

/// Shows the nodes of this machine, of firmware tables, or emulated over either
#[derive(Args)]
pub(crate) struct TopologyView {
    /// Read this SRAT instead of the live machine
    #[arg(long, value_name = "FILE")]
    srat: Option<PathBuf>,
    /// Distances for the SRAT
    #[arg(long, value_name = "FILE", requires = "srat")]
    slit: Option<PathBuf>,
    /// Latencies and bandwidths for the SRAT
    #[arg(long, value_name = "FILE", requires = "srat")]
    hmat: Option<PathBuf>,
    /// Take only what the ACPI specification allows
    #[arg(long, requires = "srat")]
    strict: bool,
    /// Read this copy of /sys/devices/system/node instead of the live one
    #[arg(long, value_name = "DIR", conflicts_with = "srat")]
    sysfs: Option<PathBuf>,
    /// Emulate nodes: N, NU (N of each node) or a size such as 64M; then optionally ':' and distances, row by row
    #[arg(long, value_name = "SPEC")]
    fake: Option<FakeSpec>,
    /// How to print it
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// The same as --format json
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

impl TopologyView {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let topology = self.read()?;
        match if self.json { Format::Json } else { self.format } {
            Format::Json => print_json(&Headed::first(topology)),
            Format::Table => print(&render(&topology)),
            Format::Dot => print(&draw::dot(&topology)),
            Format::Svg => print(&draw::svg(&topology)),
        }
    }

    fn read(&self) -> anyhow::Result<Topology> {
        let topology = match (&self.srat, &self.sysfs) {
            (Some(srat), _) => self.firmware(srat)?,
            (None, Some(root)) => Topology::from_sysfs(root)?,
            (None, None) => Topology::live()?,
        };
        Ok(match &self.fake {
            Some(spec) => topology.emulate(spec)?,
            None => topology,
        })
    }

    fn firmware(&self, srat: &Path) -> anyhow::Result<Topology> {
        let reading = if self.strict {
            Reading::Strict
        } else {
            Reading::Field
        };
        let srat = read_table(
            srat,
            |bytes| Srat::parse(bytes, reading),
            |table| &table.quirks,
        )?;
        let slit = self.slit.as_deref();
        let slit = slit.map(|path| {
            read_table(
                path,
                |bytes| Slit::parse(bytes, reading),
                |table| &table.quirks,
            )
        });
        let hmat = self.hmat.as_deref();
        let hmat = hmat.map(|path| {
            read_table(
                path,
                |bytes| Hmat::parse(bytes, reading),
                |table| &table.quirks,
            )
        });
        Ok(Topology::from_acpi(
            &srat,
            slit.transpose()?.as_ref(),
            hmat.transpose()?.as_ref(),
        )?)
    }
}

fn read_table<T>(
    path: &Path,
    parse: impl Fn(&[u8]) -> Result<T, AcpiError>,
    quirks: impl Fn(&T) -> &Vec<Quirk>,
) -> anyhow::Result<T> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let table = parse(&bytes).with_context(|| path.display().to_string())?;
    for quirk in quirks(&table) {
        say(&format!("note: {}: {quirk:?}", path.display()));
    }
    Ok(table)
}

/// The topology as tables.
pub(super) fn render(topology: &Topology) -> String {
    let mut text = nodes(topology);
    text += "\nDistances (rows: from, columns: to)\n";
    let ids: Vec<String> = topology
        .nodes
        .iter()
        .map(|node| node.id.to_string())
        .collect();
    let rows = topology.distances.iter().map(|row| {
        row.iter()
            .map(|&distance| {
                if distance == UNREACHABLE {
                    "-".into()
                } else {
                    distance.to_string()
                }
            })
            .collect()
    });
    text += &matrix(&ids, &ids, &rows.collect::<Vec<Vec<String>>>());
    for performance in &topology.performance {
        text += &performance_table(performance);
    }
    text += &access(topology);
    if !topology.offline.is_empty() {
        let offline: Vec<u32> = topology.offline.iter().map(|id| id.0).collect();
        let _ = writeln!(text, "\nOffline nodes: {}", format_list(&offline));
    }
    text
}

fn nodes(topology: &Topology) -> String {
    let cpus = match topology.cpu_naming {
        numa::topology::CpuNaming::Logical => "CPUs",
        numa::topology::CpuNaming::ApicId => "APIC ids",
        numa::topology::CpuNaming::ProcessorUid => "CPU UIDs",
    };
    let head = [
        "Nid",
        cpus,
        "Memory",
        "Hot-plug",
        "Non-volatile",
        "Domain",
        "Part of",
        "Initiators",
    ];
    let or_none = |number: u64| {
        if number == 0 {
            "-".to_owned()
        } else {
            table::bytes(number)
        }
    };
    let rows = topology.nodes.iter().map(|node| {
        vec![
            node.id.to_string(),
            if node.cpus.is_empty() {
                "-".into()
            } else {
                format_list(&node.cpus)
            },
            or_none(node.memory_bytes),
            or_none(node.hotplug_bytes),
            or_none(node.non_volatile_bytes),
            node.domain.map_or("-".into(), |domain| domain.to_string()),
            node.backing
                .map_or("-".into(), |backing| backing.to_string()),
            node.generic_initiators.to_string(),
        ]
    });
    table::render(&head, &rows.collect::<Vec<_>>(), &[1])
}

fn matrix(row_names: &[String], column_names: &[String], rows: &[Vec<String>]) -> String {
    let head: Vec<&str> = std::iter::once("Nid")
        .chain(column_names.iter().map(String::as_str))
        .collect();
    let rows = row_names
        .iter()
        .zip(rows)
        .map(|(name, row)| [std::slice::from_ref(name), row].concat());
    table::render(&head, &rows.collect::<Vec<_>>(), &[])
}

fn performance_table(performance: &Performance) -> String {
    let name = serde_json::to_value(performance.data_type)
        .ok()
        .and_then(|name| name.as_str().map(str::to_owned));
    let unit = if performance.data_type.is_latency() {
        "ns"
    } else {
        "MB/s"
    };
    let of = match performance.hierarchy {
        0 => "memory".to_owned(),
        level => format!("level {level} memory-side cache"),
    };
    let names = |ids: &[NodeId]| ids.iter().map(NodeId::to_string).collect::<Vec<_>>();
    let cell = |value: &Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
    let rows: Vec<Vec<String>> = performance
        .values
        .iter()
        .map(|row| row.iter().map(cell).collect())
        .collect();
    let title = name.unwrap_or_default().replace('-', " ");
    format!("\nHMAT {title} of {of}, {unit} (rows: initiators, columns: memory)\n")
        + &matrix(
            &names(&performance.initiators),
            &names(&performance.targets),
            &rows,
        )
}

fn access(topology: &Topology) -> String {
    let cell = |value: Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
    let rows: Vec<Vec<String>> = topology
        .nodes
        .iter()
        .filter(|node| node.access.is_some() || !node.side_caches.is_empty())
        .map(|node| {
            let access = node.access.clone().unwrap_or_default();
            let initiators: Vec<u32> = access.initiators.iter().map(|id| id.0).collect();
            let caches: Vec<String> = node
                .side_caches
                .iter()
                .map(|cache| format!("L{} {}", cache.level, table::bytes(cache.size_bytes)))
                .collect();
            vec![
                node.id.to_string(),
                format_list(&initiators),
                cell(access.read_latency_ns),
                cell(access.write_latency_ns),
                cell(access.read_bandwidth_mbs),
                cell(access.write_bandwidth_mbs),
                if caches.is_empty() {
                    "-".into()
                } else {
                    caches.join(", ")
                },
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = [
        "Nid",
        "Best from",
        "Read ns",
        "Write ns",
        "Read MB/s",
        "Write MB/s",
        "Memory-side caches",
    ];
    "\nAccess by the best initiators\n".to_owned() + &table::render(&head, &rows, &[1, 6])
}
