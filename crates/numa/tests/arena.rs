//! The example of the heap: records of the own node first, then of others, then the reserve.
#![allow(clippy::unwrap_used)] // a test

#[path = "../examples/arena.rs"]
mod arena;

use arena::{Arena, RECORDS, counts};
use numa::{NodeId, Topology};

#[test]
fn an_arena_gives_records_near_then_far_then_of_the_reserve() {
    let two = Topology::live()
        .unwrap()
        .emulate(&"fake=2".parse().unwrap())
        .unwrap();
    let arena = Arena::new(&two);
    let (usual, reserve) = (RECORDS / 8 * 7, RECORDS / 8);
    let all: Vec<_> = std::iter::from_fn(|| arena.take(NodeId(1)).ok()).collect();
    assert_eq!(all.len() as u64, 2 * RECORDS);
    let places: Vec<_> = all
        .chunk_by(|one, next| (one.node, one.zone) == (next.node, next.zone))
        .collect();
    let runs: Vec<_> = places
        .iter()
        .map(|run| (run[0].node.0, run[0].zone.0, run.len() as u64))
        .collect();
    assert_eq!(
        runs,
        [
            (1, 0, usual),
            (0, 0, usual),
            (1, 1, reserve),
            (0, 1, reserve)
        ]
    );
    let taken: Vec<_> = counts(&arena.view())
        .iter()
        .map(|&(node, zone, hit, miss)| (node.0, zone.0, hit, miss))
        .collect();
    assert_eq!(
        taken,
        [
            (0, 0, 0, usual),
            (1, 0, usual, 0),
            (0, 1, 0, reserve),
            (1, 1, reserve, 0)
        ]
    );
    let addresses: std::collections::BTreeSet<_> = all
        .iter()
        .map(|&block| arena.record(block).as_ptr() as usize)
        .collect();
    assert_eq!(addresses.len(), all.len(), "each record is another");
    all.into_iter()
        .for_each(|block| arena.give_back(block).unwrap());
    assert_eq!(arena.take(NodeId(0)).unwrap().node, NodeId(0));
}

#[test]
fn the_example_runs() {
    arena::main();
}
