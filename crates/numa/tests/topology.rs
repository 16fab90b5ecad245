//! Topologies from a directory like /sys/devices/system/node, from firmware tables, and emulated.
#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{cpu, memory, real_tables, slit, srat};
use numa::acpi::{Affinity, DeviceHandle, ProximityDomain, Reading, Slit, Srat};
use numa::topology::{CpuNaming, MAX_NODES, Source};
use numa::{FakeSpec, NodeId, Topology, TopologyError};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn write_node(root: &Path, id: u32, cpus: &str, total_kib: u64, distances: &str) {
    let dir = root.join(format!("node{id}"));
    write(&dir.join("cpulist"), &format!("{cpus}\n"));
    let meminfo = format!(
        "Node {id} MemTotal: {total_kib} kB\nNode {id} MemFree: {} kB\n",
        total_kib / 2
    );
    write(&dir.join("meminfo"), &meminfo);
    write(&dir.join("distance"), &format!("{distances}\n"));
}

/// Nodes 0, 2 and 5 are online, 1 and 3 are not; 2 has no memory, 5 no CPUs.
fn sparse_machine(root: &Path) {
    write(&root.join("online"), "0,2,5\n");
    write(&root.join("possible"), "0-3,5\n");
    write_node(root, 0, "0-3", 4 << 20, "10 21 17");
    write_node(root, 2, "4-7", 0, "21 10 28");
    write_node(root, 5, "", 8 << 20, "17 28 10");
    write(&root.join("has_generic_initiator"), "2\n");
    write(&root.join("node5/access0/initiators/read_latency"), "250\n");
    write(&root.join("node5/access0/initiators/node0/x"), "");
    write(
        &root.join("node5/memory_side_cache/index1/size"),
        "1048576\n",
    );
}

#[test]
fn sparse_offline_cpu_less_and_memory_less_nodes() {
    let dir = tempfile::tempdir().unwrap();
    sparse_machine(dir.path());
    let topology = Topology::from_sysfs(dir.path()).unwrap();
    assert_eq!(
        topology
            .nodes
            .iter()
            .map(|node| node.id.0)
            .collect::<Vec<_>>(),
        [0, 2, 5]
    );
    assert_eq!(topology.offline, [NodeId(1), NodeId(3)]);
    // The third column belongs to node 5, not to node 2.
    assert_eq!(topology.distance(NodeId(0), NodeId(5)), Some(17));
    assert_eq!(topology.distance(NodeId(2), NodeId(5)), Some(28));
    assert_eq!(topology.distance(NodeId(0), NodeId(1)), None);
    assert_eq!(
        topology.by_distance(NodeId(5)),
        [NodeId(5), NodeId(0), NodeId(2)]
    );
    assert_eq!(
        topology
            .memory_nodes()
            .map(|node| node.id.0)
            .collect::<Vec<_>>(),
        [0, 5]
    );
    assert_eq!(
        topology
            .cpu_nodes()
            .map(|node| node.id.0)
            .collect::<Vec<_>>(),
        [0, 2]
    );
    assert_eq!(topology.node_of_cpu(6), Some(NodeId(2)));
    assert_eq!(topology.node(NodeId(2)).unwrap().generic_initiators, 1);
    let access = topology.node(NodeId(5)).unwrap().access.clone().unwrap();
    assert_eq!(
        (access.initiators, access.read_latency_ns),
        (vec![NodeId(0)], Some(250))
    );
    assert_eq!(
        topology.node(NodeId(5)).unwrap().side_caches[0].size_bytes,
        1 << 20
    );
    let again: Topology = serde_json::from_str(&serde_json::to_string(&topology).unwrap()).unwrap();
    assert_eq!(again, topology);
}

#[test]
fn what_sysfs_cannot_say_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    sparse_machine(dir.path());
    write(&dir.path().join("node2/distance"), "21 10 28 30\n");
    assert!(matches!(
        Topology::from_sysfs(dir.path()),
        Err(TopologyError::DistanceCount {
            expected: 3,
            found: 4
        })
    ));
    write(&dir.path().join("node2/distance"), "21 11 28\n");
    assert!(matches!(
        Topology::from_sysfs(dir.path()),
        Err(TopologyError::Distance { distance: 11, .. })
    ));
    write(&dir.path().join("node2/distance"), "21 10 256\n");
    assert!(matches!(
        Topology::from_sysfs(dir.path()),
        Err(TopologyError::Distance { distance: 256, .. })
    ));
    write(&dir.path().join("online"), "\n");
    assert!(matches!(
        Topology::from_sysfs(dir.path()),
        Err(TopologyError::NoNodes)
    ));
}

#[test]
fn the_live_machine_and_folders_that_are_no_copies() {
    let topology = Topology::live().unwrap();
    topology.check().unwrap();
    assert!(
        topology
            .nodes
            .iter()
            .any(|node| !node.cpus.is_empty() && node.memory_bytes > 0)
    );
    let empty = tempfile::tempdir().unwrap();
    for path in [empty.path().to_owned(), empty.path().join("missing")] {
        let error = Topology::from_sysfs(&path).unwrap_err();
        assert!(matches!(error, TopologyError::NoCopy(_)), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()));
    }
}

#[test]
fn nodes_are_numbered_as_linux_does() {
    let disabled = Affinity::LocalApic {
        domain: ProximityDomain(9),
        apic_id: 9,
        sapic_eid: 0,
        flags: 0,
        clock_domain: 0,
    };
    let initiator = Affinity::GenericInitiator {
        domain: ProximityDomain(4),
        device: DeviceHandle::Pci { segment: 0, bdf: 8 },
        flags: 1,
    };
    let entries = vec![
        memory(2, GIB, GIB),
        disabled,
        cpu(3, 6),
        cpu(1, 1),
        initiator,
        memory(7, 0, GIB),
        cpu(3, 4),
    ];
    let table = srat(3, entries);
    let topology = Topology::from_acpi(&table, None, None).unwrap();
    // CPUs and initiators in the table's order (3, 1, 4), then memory (2, 7).
    assert_eq!(
        topology
            .nodes
            .iter()
            .map(|node| node.domain.unwrap())
            .collect::<Vec<_>>(),
        [3, 1, 4, 2, 7]
    );
    assert_eq!(topology.nodes[0].cpus, [4, 6]);
    assert_eq!(topology.nodes[2].generic_initiators, 1);
    assert_eq!(topology.nodes[3].memory_bytes, GIB);
    assert_eq!(topology.distance(NodeId(0), NodeId(4)), Some(20));
    let renamed = topology.with_logical_cpus(&BTreeMap::from([(4, 0), (6, 1)]));
    assert_eq!(
        (&renamed.nodes[0].cpus[..], &renamed.nodes[1].cpus[..]),
        (&[0, 1][..], &[][..])
    );
    assert!(matches!(
        Topology::from_acpi(&srat(3, vec![]), None, None),
        Err(TopologyError::NoNodes)
    ));
}

#[test]
fn domains_choose_rows_of_the_slit() {
    // Domains 1 and 2 of a matrix that has a row 0 too.
    let table = srat(
        3,
        vec![cpu(2, 0), cpu(1, 1), memory(1, 0, GIB), memory(2, GIB, GIB)],
    );
    let distances = slit(3, &[10, 31, 32, 33, 10, 34, 35, 36, 10]);
    let topology = Topology::from_acpi(&table, Some(&distances), None).unwrap();
    assert_eq!(topology.distances, [[10, 36], [34, 10]]);
}

#[test]
fn memory_that_is_not_there_yet_or_not_volatile() {
    let with = |base, flags| Affinity::Memory {
        domain: ProximityDomain(0),
        base,
        length: GIB,
        flags,
    };
    let table = srat(
        3,
        vec![with(0, 1), with(GIB, 3), with(2 * GIB, 5), with(3 * GIB, 0)],
    );
    let topology = Topology::from_acpi(&table, None, None).unwrap();
    let node = &topology.nodes[0];
    assert_eq!(
        (
            node.memory_bytes,
            node.hotplug_bytes,
            node.non_volatile_bytes
        ),
        (GIB, GIB, GIB)
    );
}

#[test]
fn real_tables_make_topologies() {
    let slits: BTreeMap<_, _> = real_tables("SLIT").into_iter().collect();
    for (name, bytes) in real_tables("SRAT") {
        let table = Srat::parse(&bytes, Reading::Field).unwrap();
        let slit = slits.get(&name.replace(".SRAT.", ".SLIT."));
        let slit = slit.map(|bytes| Slit::parse(bytes, Reading::Field).unwrap());
        let topology = Topology::from_acpi(&table, slit.as_ref(), None).unwrap();
        let shape = (
            topology.nodes.len(),
            topology.memory_nodes().count(),
            topology.cpu_nodes().count(),
        );
        let cpus: usize = topology.nodes.iter().map(|node| node.cpus.len()).sum();
        println!("{name}: {shape:?}, {cpus} CPUs, {:?}", topology.distances);
        if name.contains("X10DAi") {
            assert_eq!((shape, cpus), ((2, 2, 2), 40));
        } else if name.contains("H8DGU") {
            assert_eq!(shape, (4, 2, 4));
        } else if name.contains("R820") {
            assert_eq!(shape, (4, 4, 4));
            assert_eq!(
                topology
                    .nodes
                    .iter()
                    .map(|node| node.domain.unwrap())
                    .collect::<Vec<_>>(),
                [1, 2, 3, 4]
            );
            assert_eq!(topology.distances[0], [10, 20, 30, 20]);
        } else if name.contains("DL165") {
            assert_eq!(shape.0, 4);
        } else if name.contains("5810") || name.contains("K10N78D") {
            assert_eq!(shape.0, 1);
        }
    }
}

fn two_nodes() -> Topology {
    let table = srat(
        3,
        vec![
            cpu(0, 0),
            cpu(0, 1),
            cpu(0, 2),
            cpu(1, 3),
            cpu(2, 4),
            memory(0, 0, GIB),
            memory(1, 4 * GIB, 2 * GIB),
        ],
    );
    let distances = slit(3, &[10, 21, 30, 21, 10, 30, 30, 30, 10]);
    Topology::from_acpi(&table, Some(&distances), None).unwrap()
}

fn emulate(spec: &str) -> Result<Topology, TopologyError> {
    two_nodes().emulate(&spec.parse::<FakeSpec>()?)
}

fn backing(topology: &Topology) -> Vec<u32> {
    topology
        .nodes
        .iter()
        .map(|node| node.backing.unwrap().0)
        .collect()
}

#[test]
fn emulation_by_count_by_node_and_by_size() {
    let four = emulate("fake=4").unwrap();
    // In turn over the nodes with memory; the one without stays, behind them.
    assert_eq!(backing(&four), [0, 1, 0, 1, 2]);
    assert_eq!(
        four.nodes
            .iter()
            .map(|node| node.memory_bytes / (GIB / 2))
            .collect::<Vec<_>>(),
        [1, 2, 1, 2, 0]
    );
    assert_eq!(four.nodes[0].cpus, [0, 2]);
    assert_eq!(four.nodes[2].cpus, [1]);
    assert_eq!(four.distance(NodeId(0), NodeId(2)), Some(10));
    assert_eq!(four.distance(NodeId(0), NodeId(1)), Some(21));
    assert_eq!(four.distance(NodeId(4), NodeId(2)), Some(30));
    assert_eq!(
        (four.source, four.cpu_naming),
        (Source::Emulated, CpuNaming::ApicId)
    );
    assert_eq!(four.real_node(NodeId(3)), Some(NodeId(1)));
    assert_eq!(four.nodes[3].ranges[0].base, 5 * GIB);

    let per_node = emulate("fake=2U").unwrap();
    assert_eq!(backing(&per_node), [0, 0, 1, 1, 2]);
    let sized = emulate("fake=768M").unwrap();
    assert_eq!(backing(&sized), [0, 1, 1, 2]);
    assert_eq!(sized.nodes[2].memory_bytes, 1280 << 20);
    let given = emulate("fake=2:10,15,40,16,10,40,50,50,10,").unwrap();
    assert_eq!(given.distances, [[10, 15, 40], [16, 10, 40], [50, 50, 10]]);
    // An emulation of an emulation still knows the real node.
    let twice = four.emulate(&"8".parse().unwrap()).unwrap();
    assert_eq!(backing(&twice), [0, 1, 0, 1, 0, 1, 0, 1, 2]);
}

#[test]
fn emulations_that_cannot_be() {
    assert!(matches!(
        emulate("fake=1"),
        Err(TopologyError::FakeTooFew { asked: 1, real: 2 })
    ));
    assert!(matches!(
        emulate("fake=1000U"),
        Err(TopologyError::TooManyNodes { .. })
    ));
    assert!(matches!(
        emulate("fake=64K"),
        Err(TopologyError::TooManyNodes { .. })
    ));
    let small = Topology::from_acpi(&srat(3, vec![memory(0, 0, 7 << 20)]), None, None).unwrap();
    let too_small = TopologyError::FakeTooSmall {
        node: NodeId(0),
        memory_bytes: 7 << 20,
        parts: 4,
    };
    let error = small.emulate(&"4".parse().unwrap()).unwrap_err();
    assert_eq!(error.to_string(), too_small.to_string());
    assert!(matches!(
        emulate("fake=2:10,20,20,10"),
        Err(TopologyError::DistanceCount {
            expected: 9,
            found: 4
        })
    ));
    assert!(matches!(
        emulate("fake=2:9,9,9,9,9,9,9,9,9"),
        Err(TopologyError::Distance { .. })
    ));
    for bad in [
        "",
        "fake=",
        "fake=U",
        "0",
        "fake=-1",
        "fake=4X",
        "fake=2:10,x",
        "fake=4MM",
        "fake=99999999999T",
    ] {
        assert!(
            matches!(
                bad.parse::<FakeSpec>(),
                Err(TopologyError::FakeSyntax { .. })
            ),
            "{bad}"
        );
    }
}

fn shares() -> impl Strategy<Value = Vec<(u64, u8)>> {
    proptest::collection::vec((1_u64..64, 0_u8..5), 1..6)
}

proptest! {
    /// Emulation loses no memory and no CPU, and its ranges stay apart.
    #[test]
    fn emulation_keeps_everything(
        shares in shares(),
        split in prop_oneof![
            (1_usize..40).prop_map(|count| format!("{count}")),
            (1_usize..9).prop_map(|parts| format!("{parts}U")),
            (1_usize..2000).prop_map(|mib| format!("{mib}M")),
        ],
    ) {
        let mut entries = Vec::new();
        let (mut base, mut apic) = (0, 0);
        for (&(blocks, cpus), domain) in shares.iter().zip(0..) {
            entries.push(memory(domain, base, blocks << 27));
            base += (blocks << 27) + GIB;
            for _ in 0..cpus {
                entries.push(cpu(domain, apic));
                apic += 1;
            }
        }
        let real = Topology::from_acpi(&srat(3, entries), None, None).unwrap();
        match real.emulate(&split.parse().unwrap()) {
            Err(TopologyError::FakeTooFew { .. } | TopologyError::FakeTooSmall { .. }) => {}
            Err(TopologyError::TooManyNodes { nodes, .. }) => prop_assert!(nodes > MAX_NODES),
            Err(error) => prop_assert!(false, "{error}"),
            Ok(fake) => {
                let bytes = |topology: &Topology| topology.nodes.iter().map(|node| node.memory_bytes).sum::<u64>();
                prop_assert_eq!(bytes(&fake), bytes(&real));
                let mut cpus: Vec<u32> = fake.nodes.iter().flat_map(|node| node.cpus.clone()).collect();
                cpus.sort_unstable();
                prop_assert_eq!(cpus, (0..u32::from(apic)).collect::<Vec<_>>());
                let mut ranges: Vec<_> = fake.nodes.iter().flat_map(|node| node.ranges.clone()).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].base + pair[0].len_bytes <= pair[1].base));
                prop_assert_eq!(ranges.iter().map(|range| range.len_bytes).sum::<u64>(), bytes(&real));
            }
        }
    }
}
