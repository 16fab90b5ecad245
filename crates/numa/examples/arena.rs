//! An arena of records on nodes: the heap decides which record is taken, and the tables of records lie on the nodes.
//!
//! ```text
//!  numbers   0 … 1023 │ 1024 … 2047 │ …        a table a node, placed before its first use
//!            node 0     node 1
//!  zone "records": for all; zone "reserve": the last eighth of each table, for requests that find no other
//! ```
//!
//! A thread asks for a record of its node. If the node is full, it gets one of the nearest node: the zone goes before the node. The reserve
//! comes last. The heap's counters say how often. Run it: `cargo run -p numa --example arena`.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    unreachable_pub,
    missing_docs
)] // an example

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use numa::heap::{Block, Heap, HeapError, HeapView, Request, ZoneId};
use numa::placement::{Existing, Policy, place};
use numa::{NodeId, Topology};
use sys::zeroed::ZeroedSlice;

/// Records of a node.
pub const RECORDS: u64 = 4096;
const RESERVE: u64 = RECORDS / 8;
const ZONES: [&str; 2] = ["records", "reserve"];
const FOR_ALL: ZoneId = ZoneId(0);
const LAST: ZoneId = ZoneId(1);

/// Records of eight words.
type Table = ZeroedSlice<[AtomicU64; 8]>;

/// Tables of records, one on each node with memory.
pub struct Arena {
    heap: Heap,
    /// By the number of the table's first record.
    tables: BTreeMap<u64, Table>,
}

impl Arena {
    pub fn new(topology: &Topology) -> Self {
        let heap = Heap::new(topology, ZONES);
        let mut tables = BTreeMap::new();
        for (node, first) in topology.memory_nodes().zip((0..).step_by(RECORDS as usize)) {
            let table = Table::new(RECORDS as usize).unwrap();
            let start = table.as_ptr() as usize;
            let range = start..start + table.len_bytes();
            if topology.nodes.len() > 1 {
                place(
                    topology,
                    range,
                    &Policy::Preferred(vec![node.id]),
                    Existing::Stay,
                )
                .unwrap();
            }
            let reserve = first + RECORDS - RESERVE;
            heap.grow(node.id, FOR_ALL, first..reserve).unwrap();
            heap.grow(node.id, LAST, reserve..first + RECORDS).unwrap();
            tables.insert(first, table);
        }
        Self { heap, tables }
    }

    /// Takes a record, of this node if it has one.
    pub fn take(&self, node: NodeId) -> Result<Block, HeapError> {
        self.heap
            .alloc(Request::new(node, FOR_ALL).running_on(node))
    }

    pub fn record(&self, block: Block) -> &[AtomicU64; 8] {
        let (first, table) = self.tables.range(..=block.slot).next_back().unwrap();
        &table[(block.slot - first) as usize]
    }

    pub fn give_back(&self, block: Block) -> Result<(), HeapError> {
        self.heap.free(block)
    }

    pub fn view(&self) -> HeapView {
        self.heap.check().unwrap();
        self.heap.view()
    }
}

pub fn main() {
    let topology = Topology::live()
        .unwrap()
        .emulate(&"fake=2".parse().unwrap())
        .unwrap();
    let arena = Arena::new(&topology);
    let home = topology.nodes[0].id;
    // More than the node has: the rest comes from the other node, and from the reserves at last.
    let all: Vec<_> = std::iter::from_fn(|| arena.take(home).ok()).collect();
    for block in &all {
        arena.record(*block)[0].fetch_add(block.slot + 1, Ordering::Relaxed);
    }
    for (node, zone, hit, miss) in counts(&arena.view()) {
        println!(
            "node {node}, {}: {hit} as asked, {miss} for others",
            ZONES[usize::from(zone.0)]
        );
    }
    for block in all {
        assert_eq!(
            arena.record(block)[0].load(Ordering::Relaxed),
            block.slot + 1
        );
        arena.give_back(block).unwrap();
    }
}

/// Of each bucket: records taken as intended, and records taken by requests for another bucket.
pub fn counts(view: &HeapView) -> Vec<(NodeId, ZoneId, u64, u64)> {
    let counts = view.buckets.iter();
    counts
        .map(|bucket| {
            (
                bucket.node,
                bucket.zone,
                bucket.stats.hit,
                bucket.stats.miss,
            )
        })
        .collect()
}
