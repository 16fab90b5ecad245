//! Choosing a node, without placing anything: pure arithmetic on made-up machines.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use std::collections::BTreeMap;

use common::{cpu, memory, slit, srat};
use numa::placement::{
    Choice, Existing, Interleaver, NodeRequest, PlacementError, Policy, Starts, Strictness, place,
};
use numa::{Hashdist, InterleavedTable, NodeId, Topology};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

/// Nodes 0 and 1 have CPUs and memory; 2 has memory only, near node 1.
fn machine() -> Topology {
    let entries = vec![
        cpu(0, 0),
        cpu(1, 1),
        memory(0, 0, GIB),
        memory(1, GIB, GIB),
        memory(2, 2 * GIB, 8 * GIB),
    ];
    let distances = slit(3, &[10, 20, 40, 20, 10, 15, 40, 15, 10]);
    let names = BTreeMap::from([(0, 0), (1, 1)]);
    Topology::from_acpi(&srat(3, entries), Some(&distances), None)
        .unwrap()
        .with_logical_cpus(&names)
}

fn free(bytes: [u64; 3]) -> BTreeMap<NodeId, u64> {
    (0..3).map(NodeId).zip(bytes).collect()
}

fn auto(bytes: [u64; 3], need: u64) -> Choice {
    Choice::auto(&machine(), &free(bytes), need).unwrap()
}

#[test]
fn all_of_it_near_beats_more_free_memory() {
    assert_eq!(auto([GIB, GIB / 2, 0], GIB / 2).node, NodeId(0)); // both fit: the one that keeps more
    assert_eq!(auto([GIB / 2, GIB, 0], GIB / 2).node, NodeId(1));
    assert_eq!(auto([GIB, GIB, 0], GIB / 2).node, NodeId(0)); // the lower number
    assert_eq!(auto([GIB, GIB / 4, 8 * GIB], GIB / 2).node, NodeId(0)); // whole on 0
}

#[test]
fn what_does_not_fit_goes_to_the_nearest() {
    let choice = auto([GIB, GIB / 2, 8 * GIB], 2 * GIB);
    // From 1: ½ at 10 and 1½ at 15; from 0: 1 at 10, ½ at 20, ½ at 40.
    assert_eq!(
        (choice.node, choice.memory),
        (
            NodeId(1),
            vec![(NodeId(1), GIB / 2), (NodeId(2), 3 * GIB / 2)]
        )
    );
    assert!((choice.mean_distance - 13.75).abs() < 1e-9);
    let short = auto([GIB, 0, 0], 3 * GIB);
    assert_eq!((short.node, short.missing_bytes), (NodeId(0), 2 * GIB));
}

#[test]
fn a_node_without_cpus_is_served_from_its_neighbour() {
    let choice = Choice::at(&machine(), NodeId(2), &free([GIB; 3]), GIB / 2).unwrap();
    assert_eq!((choice.node, &choice.cpus[..]), (NodeId(1), &[1][..]));
    assert_eq!(choice.memory, [(NodeId(2), GIB / 2)]);
    let nothing = Choice::at(&machine(), NodeId(0), &free([0; 3]), 0).unwrap();
    assert_eq!(nothing.memory, [(NodeId(0), 0)]);
    assert!(matches!(
        Choice::at(&machine(), NodeId(7), &free([0; 3]), 0),
        Err(PlacementError::NoNode { node: NodeId(7) })
    ));
}

#[test]
fn requests_and_knobs_parse() {
    assert_eq!("auto".parse(), Ok(NodeRequest::Auto));
    assert_eq!("3".parse(), Ok(NodeRequest::Node(NodeId(3))));
    assert!("all".parse::<NodeRequest>().is_err() && "-1".parse::<NodeRequest>().is_err());
    assert_eq!("hashdist=0".parse(), Ok(Hashdist::OneNode));
    assert_eq!("1".parse(), Ok(Hashdist::Spread));
    assert!("2".parse::<Hashdist>().is_err());
    assert_eq!(Interleaver::new([(NodeId(0), 0)]).next(), None);
}

#[test]
fn firmware_names_of_cpus_are_refused() {
    let entries = vec![cpu(0, 0), memory(0, 0, GIB)];
    let topology = Topology::from_acpi(&srat(3, entries), None, None).unwrap();
    let choice = Choice::auto(&topology, &BTreeMap::from([(NodeId(0), GIB)]), 1).unwrap();
    assert!(matches!(
        choice.apply(&topology, Strictness::Preferred),
        Err(PlacementError::CpuNaming)
    ));
}

#[test]
fn impossible_tables_are_refused() {
    let topology = Topology::live().unwrap();
    let table = InterleavedTable::<u64>::new(usize::MAX / 2, &topology, Hashdist::Spread);
    assert!(matches!(
        table,
        Err(PlacementError::Table {
            element_bytes: 8,
            ..
        })
    ));
}

/// A machine of `nodes` nodes with a CPU and a GiB each.
fn even(nodes: u32) -> Topology {
    let both = |node: u32| {
        [
            cpu(node, node.try_into().unwrap()),
            memory(node, u64::from(node) * GIB, GIB),
        ]
    };
    let distance = |at: u32| if at / nodes == at % nodes { 10 } else { 21 };
    let distances: Vec<u8> = (0..nodes * nodes).map(distance).collect();
    let names = (0..nodes).map(|number| (number, number)).collect();
    let table = srat(3, (0..nodes).flat_map(both).collect());
    let distances = slit(nodes as usize, &distances);
    Topology::from_acpi(&table, Some(&distances), None)
        .unwrap()
        .with_logical_cpus(&names)
}

/// How many of `starts` processes, of which none has touched anything, go to each node.
fn burst(
    topology: &Topology,
    free: &BTreeMap<NodeId, u64>,
    starts: usize,
    need: u64,
) -> Vec<usize> {
    let mut noted = Starts::default();
    let mut counts = vec![0; topology.nodes.len()];
    for _ in 0..starts {
        let choice = Choice::beside(topology, free, &noted, need).unwrap();
        counts[choice.node.0 as usize] += 1;
        noted.add(&choice.claims());
    }
    counts
}

#[test]
fn a_burst_of_starts_is_spread() {
    for nodes in [2, 4] {
        let topology = even(nodes);
        for starts in [4, 8, 12, 16] {
            // Little, as much as fits or some more, and a whole node's memory each: far more than there is.
            for need in [GIB / 64, GIB / 4, GIB] {
                let free = (0..nodes)
                    .map(|node| (NodeId(node), GIB - u64::from(node)))
                    .collect();
                let counts = burst(&topology, &free, starts, need);
                let share = starts / nodes as usize;
                let even = |&count: &usize| count == share;
                assert!(
                    counts.iter().all(even),
                    "{starts} of {need} on {nodes}: {counts:?}"
                );
            }
        }
    }
}

#[test]
fn guests_that_are_small_are_spread_by_their_number() {
    let topology = even(4);
    // What differs is more than all of them need together.
    let free = [GIB * 9 / 10, GIB / 2, GIB * 2 / 3, GIB / 3];
    let free = (0..4).map(NodeId).zip(free).collect();
    assert_eq!(burst(&topology, &free, 8, GIB / 512), [2; 4]);
    // Where little stays free, memory decides: the last node is spared.
    assert_eq!(burst(&topology, &free, 4, GIB / 8), [2, 1, 1, 0]);
}

#[test]
fn starts_that_have_taken_their_memory_count_as_starts() {
    let topology = even(2);
    let free = [(NodeId(0), GIB / 2), (NodeId(1), GIB)].into();
    let mut starts = Starts::default();
    starts.add_running(&[(NodeId(1), 100)], &[(NodeId(1), 0)]);
    let choice = Choice::beside(&topology, &free, &starts, 100).unwrap();
    assert_eq!(choice.node, NodeId(0));
}

#[test]
fn without_reservations_a_burst_goes_to_one_node() {
    let topology = even(4);
    let free = (0..4).map(|node| (NodeId(node), GIB)).collect();
    let one = || Choice::auto(&topology, &free, GIB / 16).unwrap().node;
    assert!((0..8).all(|_| one() == NodeId(0)));
}

proptest! {
    /// No node with CPUs is better than the chosen one, and bytes are neither lost nor taken twice.
    #[test]
    fn auto_is_the_best(bytes in [0_u64..4 * GIB, 0_u64..4 * GIB, 0_u64..4 * GIB], need in 0_u64..6 * GIB) {
        let (topology, free) = (machine(), free(bytes));
        let best = Choice::auto(&topology, &free, need).unwrap();
        let taken: u64 = best.memory.iter().map(|&(_, bytes)| bytes).sum();
        prop_assert_eq!(taken + best.missing_bytes, need);
        prop_assert!(best.memory.iter().all(|&(node, bytes)| bytes <= free[&node]));
        for node in topology.cpu_nodes() {
            let other = Choice::at(&topology, node.id, &free, need).unwrap();
            prop_assert!(best.mean_distance <= other.mean_distance || best.missing_bytes < other.missing_bytes);
        }
    }
}

#[test]
fn memory_is_not_placed_where_there_is_none() {
    // Node 1 has CPUs only.
    let entries = vec![cpu(0, 0), cpu(1, 1), memory(0, 0, GIB)];
    let names = BTreeMap::from([(0, 0), (1, 1)]);
    let machine = Topology::from_acpi(&srat(3, entries), None, None);
    let machine = machine.unwrap().with_logical_cpus(&names);
    let empty = vec![NodeId(1)];
    for policy in [
        Policy::Bind(empty.clone()),
        Policy::Preferred(empty.clone()),
        Policy::Interleave(vec![NodeId(0), NodeId(1)]),
        Policy::WeightedInterleave(empty.clone()),
    ] {
        let refused = place(&machine, 0..4096, &policy, Existing::Stay).unwrap_err();
        let is_named = matches!(refused, PlacementError::NoMemory { node: NodeId(1) });
        assert!(is_named, "{policy:?}: {refused}");
        let said = refused.to_string();
        assert!(
            said.contains("node 1 ") && said.contains("has_memory"),
            "{said}"
        );
    }
    // A whole process gets memory from the nearest node that has some, unless the caller has made that choice otherwise.
    let free = BTreeMap::from([(NodeId(0), GIB), (NodeId(1), 0)]);
    let mut choice = Choice::at(&machine, NodeId(1), &free, GIB / 2).unwrap();
    assert_eq!((choice.node, choice.memory[0].0), (NodeId(1), NodeId(0)));
    choice.memory = vec![(NodeId(1), 0)];
    choice.cpus = sys::mempolicy::allowed_cpus().unwrap();
    let refused = choice.apply(&machine, Strictness::Bind).unwrap_err();
    assert!(
        matches!(refused, PlacementError::NoMemory { node: NodeId(1) }),
        "{refused}"
    );
}
