//! The heap: whose slots a request gets, the counters, a plain oracle, and threads.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use std::collections::BTreeMap;

use common::{cpu, memory, slit, srat};
use numa::heap::{Block, Heap, HeapError, MAX_ORDER, Request, ZoneId};
use numa::{NodeId, Topology};
use proptest::prelude::*;

const LOW: ZoneId = ZoneId(0);
const HIGH: ZoneId = ZoneId(1);

/// Three nodes in a row: 0 and 1 are near, 2 is near 1 and far from 0.
fn three_nodes() -> Topology {
    let entries = (0..3).flat_map(|node| {
        let number = u8::try_from(node).unwrap();
        [
            cpu(node, number),
            memory(node, u64::from(node) << 30, 1 << 30),
        ]
    });
    let distances = slit(3, &[10, 15, 30, 15, 10, 15, 30, 15, 10]);
    Topology::from_acpi(&srat(3, entries.collect()), Some(&distances), None).unwrap()
}

/// 64 slots in each bucket.
fn small_heap() -> Heap {
    let heap = Heap::new(&three_nodes(), ["low", "high"]);
    for (index, (zone, node)) in [
        (LOW, 0),
        (LOW, 1),
        (LOW, 2),
        (HIGH, 0),
        (HIGH, 1),
        (HIGH, 2),
    ]
    .iter()
    .enumerate()
    {
        let start = index as u64 * 64;
        heap.grow(NodeId(*node), *zone, start..start + 64).unwrap();
    }
    heap
}

fn stats(heap: &Heap, node: u32, zone: ZoneId) -> numa::heap::BucketStats {
    let view = heap.view();
    view.buckets
        .iter()
        .find(|bucket| bucket.node == NodeId(node) && bucket.zone == zone)
        .unwrap()
        .stats
}

#[test]
fn the_zone_goes_before_the_node_and_near_nodes_before_far_ones() {
    let heap = small_heap();
    let request = Request::new(NodeId(0), HIGH).order(6);
    let mut order = Vec::new();
    while let Ok(block) = heap.alloc(request) {
        order.push((block.zone.0, block.node.0));
    }
    assert_eq!(order, [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]);
    assert_eq!(heap.alloc(request), Err(HeapError::Exhausted(request)));
    assert_eq!(heap.view().failed, 2);
    heap.check().unwrap();
    // From the far end, and from the low zone up.
    let heap = small_heap();
    let request = Request::new(NodeId(2), LOW).order(6);
    let order: Vec<_> = std::iter::from_fn(|| heap.alloc(request).ok())
        .map(|block| (block.zone.0, block.node.0))
        .collect();
    assert_eq!(order, [(0, 2), (0, 1), (0, 0), (1, 2), (1, 1), (1, 0)]);
}

#[test]
fn exactness_fails_instead() {
    let heap = small_heap();
    let here = Request::new(NodeId(1), LOW).order(6).exact_node();
    assert_eq!(heap.alloc(here).unwrap().zone, LOW);
    assert_eq!(heap.alloc(here).unwrap().zone, HIGH); // exact about the node only
    assert!(matches!(heap.alloc(here), Err(HeapError::Exhausted(_))));
    let zone = Request::new(NodeId(1), LOW).order(6).exact_zone();
    assert_eq!(heap.alloc(zone).unwrap().node, NodeId(0));
    assert_eq!(heap.alloc(zone).unwrap().node, NodeId(2));
    assert!(heap.alloc(zone).is_err());
    assert!(matches!(
        heap.alloc(Request::new(NodeId(9), LOW)),
        Err(HeapError::NoBucket { .. })
    ));
    assert!(matches!(
        heap.alloc(Request::new(NodeId(0), ZoneId(2))),
        Err(HeapError::NoBucket { .. })
    ));
    assert_eq!(
        heap.alloc(here.order(MAX_ORDER + 1)),
        Err(HeapError::Order { order: 10 })
    );
    heap.check().unwrap();
}

#[test]
fn the_counters_mean_what_numastat_means() {
    let heap = small_heap();
    let request = Request::new(NodeId(0), HIGH).order(6);
    let _ = heap
        .alloc(request.interleaved().running_on(NodeId(2)))
        .unwrap();
    let _ = heap.alloc(request).unwrap(); // node 1
    let _ = heap.alloc(request.running_on(NodeId(2))).unwrap(); // node 2
    let low = heap.alloc(request).unwrap(); // the other zone, on the asked node
    let (zero, one, two) = (
        stats(&heap, 0, HIGH),
        stats(&heap, 1, HIGH),
        stats(&heap, 2, HIGH),
    );
    assert_eq!(
        (zero.hit, zero.miss, zero.foreign, zero.interleave_hit),
        (64, 0, 128, 64)
    );
    assert_eq!((zero.local, zero.other), (0, 64));
    assert_eq!((one.hit, one.miss, one.local, one.other), (0, 64, 0, 64));
    assert_eq!((two.miss, two.local, two.other), (64, 64, 0));
    let fallback = stats(&heap, 0, LOW);
    assert_eq!(
        (fallback.hit, fallback.zone_fallback, fallback.freed),
        (64, 64, 0)
    );
    heap.free(low).unwrap();
    assert_eq!(stats(&heap, 0, LOW).freed, 64);
    heap.check().unwrap();
    let view = heap.view();
    assert_eq!(view.buckets[0].free_blocks, [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(
        (view.zone_name(HIGH), view.zone_name(ZoneId(7))),
        ("high".into(), "7".into())
    );
    let again: numa::HeapView =
        serde_json::from_str(&serde_json::to_string(&view).unwrap()).unwrap();
    assert_eq!(again, view);
}

#[test]
fn blocks_come_back_once() {
    let heap = small_heap();
    let block = heap.alloc(Request::new(NodeId(0), LOW).order(2)).unwrap();
    assert_eq!(heap.locate(block.slot), Some(block));
    assert_eq!(heap.locate(block.slot + 1), None);
    let smaller = Block { order: 1, ..block };
    let refused = HeapError::NotAllocated {
        slot: block.slot,
        order: 1,
    };
    assert_eq!(heap.free(smaller), Err(refused));
    heap.free(block).unwrap();
    assert_eq!(
        heap.free(block),
        Err(HeapError::NotAllocated {
            slot: block.slot,
            order: 2
        })
    );
    assert!(
        heap.free(Block {
            slot: 10_000,
            ..block
        })
        .is_err()
    );
    assert!(
        heap.free(Block {
            order: 200,
            ..block
        })
        .is_err()
    );
    assert_eq!(heap.locate(block.slot), None);
    heap.check().unwrap();
}

#[test]
fn a_retired_slot_never_comes_again() {
    let heap = Heap::new(&three_nodes(), ["all"]);
    heap.grow(NodeId(0), LOW, 0..8).unwrap();
    let request = Request::new(NodeId(0), LOW);
    let first = heap.alloc(request).unwrap();
    heap.retire(first).unwrap();
    assert!(heap.free(first).is_err() && heap.retire(first).is_err());
    assert_eq!(heap.locate(first.slot), None);
    let mut slots: Vec<_> = std::iter::from_fn(|| heap.alloc(request).ok())
        .map(|block| block.slot)
        .collect();
    slots.sort_unstable();
    assert_eq!(slots, (1..8).collect::<Vec<_>>());
    heap.check().unwrap();
    let view = &heap.view().buckets[0];
    assert_eq!(
        (view.slots, view.free, view.allocated, view.retired),
        (8, 0, 7, 1)
    );
}

#[test]
fn growth_joins_ranges_and_refuses_overlap() {
    let heap = Heap::new(&three_nodes(), ["all"]);
    let grow = |node, range: std::ops::Range<u64>| heap.grow(NodeId(node), LOW, range);
    grow(0, 0..300).unwrap();
    assert!(matches!(grow(1, 299..400), Err(HeapError::Range { .. })));
    assert!(matches!(grow(0, 0..1), Err(HeapError::Range { .. })));
    assert!(matches!(grow(0, 400..400), Err(HeapError::Range { .. })));
    grow(0, 300..512).unwrap();
    assert_eq!(heap.view().buckets[0].free_blocks[9], 1);
    grow(1, 100_000..100_003).unwrap();
    grow(1, 5_000..5_001).unwrap();
    assert_eq!(
        heap.alloc(Request::new(NodeId(1), LOW).order(1))
            .unwrap()
            .slots(),
        100_000..100_002
    );
    heap.check().unwrap();
}

#[test]
fn unreachable_nodes_are_left_alone() {
    let entries = vec![
        cpu(0, 0),
        cpu(1, 1),
        memory(0, 0, 1 << 30),
        memory(1, 1 << 30, 1 << 30),
    ];
    let distances = slit(2, &[10, 255, 20, 10]);
    let topology = Topology::from_acpi(&srat(3, entries), Some(&distances), None).unwrap();
    let heap = Heap::new(&topology, ["all"]);
    heap.grow(NodeId(1), LOW, 0..1).unwrap();
    assert!(heap.alloc(Request::new(NodeId(0), LOW)).is_err());
    heap.grow(NodeId(0), LOW, 1..2).unwrap();
    assert_eq!(
        heap.alloc(Request::new(NodeId(1), LOW)).unwrap().node,
        NodeId(1)
    );
    assert_eq!(
        heap.alloc(Request::new(NodeId(1), LOW)).unwrap().node,
        NodeId(0)
    );
}

#[derive(Clone, Debug)]
enum Step {
    Alloc {
        node: u32,
        zone: u8,
        order: u8,
        exact_node: bool,
        exact_zone: bool,
    },
    Free(proptest::sample::Index),
    Retire(proptest::sample::Index),
    Grow {
        node: u32,
        zone: u8,
        gap: u64,
        len: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<proptest::sample::Index>;
    prop_oneof![
        8 => (0_u32..3, 0_u8..2, 0_u8..=9, any::<bool>(), any::<bool>()).prop_map(
            |(node, zone, order, exact_node, exact_zone)| Step::Alloc { node, zone, order: order.min(9 - order), exact_node, exact_zone }
        ),
        6 => index().prop_map(Step::Free),
        1 => index().prop_map(Step::Retire),
        1 => (0_u32..3, 0_u8..2, 0_u64..3, 1_u64..1500).prop_map(|(node, zone, gap, len)| Step::Grow { node, zone, gap, len }),
    ]
}

proptest! {
    /// Against a table of who owns each slot.
    #[test]
    fn slots_are_never_given_twice(steps in proptest::collection::vec(step(), 1..300)) {
        let heap = Heap::new(&three_nodes(), ["low", "high"]);
        // Slot -> its bucket and whether it is free.
        let mut oracle: BTreeMap<u64, (NodeId, ZoneId, bool)> = BTreeMap::new();
        let mut live: Vec<Block> = Vec::new();
        let mut end = 1000;
        for step in steps {
            match step {
                Step::Grow { node, zone, gap, len } => {
                    let range = end + gap..end + gap + len;
                    end = range.end;
                    heap.grow(NodeId(node), ZoneId(zone), range.clone()).unwrap();
                    oracle.extend(range.map(|slot| (slot, (NodeId(node), ZoneId(zone), true))));
                }
                Step::Alloc { node, zone, order, exact_node, exact_zone } => {
                    let mut request = Request::new(NodeId(node), ZoneId(zone)).order(order);
                    if exact_node { request = request.exact_node() }
                    if exact_zone { request = request.exact_zone() }
                    let Ok(block) = heap.alloc(request) else {
                        // One slot fails only when every bucket that may serve it is empty.
                        let could = oracle.values().any(|&(of, in_zone, free)| {
                            free && (!exact_node || of == NodeId(node)) && (!exact_zone || in_zone == ZoneId(zone))
                        });
                        prop_assert!(order > 0 || !could);
                        continue;
                    };
                    prop_assert_eq!(block.slot % (1 << order), 0);
                    prop_assert!(!exact_node || block.node == NodeId(node));
                    prop_assert!(!exact_zone || block.zone == ZoneId(zone));
                    for slot in block.slots() {
                        let owner = oracle.get_mut(&slot).expect("a slot of the heap");
                        prop_assert_eq!(*owner, (block.node, block.zone, true));
                        owner.2 = false;
                    }
                    live.push(block);
                }
                Step::Free(at) if !live.is_empty() => {
                    let block = live.swap_remove(at.index(live.len()));
                    heap.free(block).unwrap();
                    block.slots().for_each(|slot| oracle.get_mut(&slot).unwrap().2 = true);
                }
                Step::Retire(at) if !live.is_empty() => heap.retire(live.swap_remove(at.index(live.len()))).unwrap(),
                Step::Free(_) | Step::Retire(_) => {}
            }
            heap.check().unwrap();
            let free = oracle.values().filter(|&&(_, _, free)| free).count() as u64;
            prop_assert_eq!(heap.view().buckets.iter().map(|bucket| bucket.free).sum::<u64>(), free);
        }
        for block in live {
            prop_assert_eq!(heap.locate(block.slot), Some(block));
            heap.free(block).unwrap();
        }
        heap.check().unwrap();
    }
}

#[test]
fn threads_share_nothing_but_slots() {
    let heap = Heap::new(&three_nodes(), ["low", "high"]);
    for node in 0..3 {
        for zone in 0..2 {
            let start = (u64::from(node) * 2 + u64::from(zone)) * 700;
            heap.grow(NodeId(node), ZoneId(zone), start..start + 700)
                .unwrap();
        }
    }
    let owned: Vec<std::sync::atomic::AtomicBool> = (0..4200).map(|_| Default::default()).collect();
    let claim = |block: Block, from: bool, to: bool| {
        for slot in block.slots() {
            let slot = usize::try_from(slot).unwrap();
            let was = owned[slot].swap(to, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(was, from, "slot {slot}");
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let (heap, claim) = (&heap, &claim);
            scope.spawn(move || {
                let mut random = u64::from(thread) + 1;
                let mut live: Vec<Block> = Vec::new();
                for _ in 0..30_000 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let bits = u32::try_from(random >> 40).unwrap();
                    if bits % 5 < 3 || live.is_empty() {
                        let order = u8::try_from((bits >> 5).trailing_zeros().min(6)).unwrap();
                        let zone = ZoneId(u8::try_from(bits >> 20 & 1).unwrap());
                        if let Ok(block) =
                            heap.alloc(Request::new(NodeId(bits % 3), zone).order(order))
                        {
                            claim(block, false, true);
                            live.push(block);
                        }
                    } else {
                        let block = live.swap_remove(bits as usize % live.len());
                        claim(block, true, false);
                        heap.free(block).unwrap();
                    }
                }
                for block in live {
                    claim(block, true, false);
                    heap.free(block).unwrap();
                }
            });
        }
        for _ in 0..20 {
            heap.check().unwrap(); // while they run
        }
    });
    heap.check().unwrap();
    let view = heap.view();
    assert!(view.buckets.iter().all(|bucket| bucket.free == 700));
    assert!(
        view.buckets
            .iter()
            .map(|bucket| bucket.stats.miss)
            .sum::<u64>()
            > 0,
        "nothing ever fell back"
    );
}

/// An owner that never uses a number twice grows and retires for ever, in bounded memory.
#[test]
fn ranges_that_are_all_retired_cost_no_memory() {
    let heap = Heap::new(&three_nodes(), ["slots"]);
    let node = NodeId(0);
    let empty = heap.memory_bytes();
    let mut held = Vec::new();
    for round in 0..100_u64 {
        heap.grow(node, ZoneId(0), round * 2048..(round + 1) * 2048)
            .unwrap();
        for _ in 0..4 {
            let block = heap.alloc(Request::new(node, ZoneId(0)).order(9)).unwrap();
            held.push(heap.memory_bytes());
            heap.retire(block).unwrap();
            assert!(heap.retire(block).is_err() && heap.free(block).is_err());
            assert!(heap.locate(block.slot).is_none());
        }
        heap.check().unwrap();
        assert_eq!(heap.memory_bytes(), empty);
    }
    assert!(held.iter().all(|&bytes| bytes > empty && bytes == held[0]));
    let bucket = &heap.view().buckets[0];
    assert_eq!(
        (bucket.slots, bucket.free, bucket.retired),
        (204_800, 0, 204_800)
    );
    assert!(
        heap.grow(node, ZoneId(0), 512..1024).is_err(),
        "old numbers"
    );
}

#[test]
fn views_of_heaps_add_up() {
    let topology = three_nodes();
    let node = NodeId(0);
    let heaps = [1, 2].map(|blocks| {
        let heap = Heap::new(&topology, ["slots"]);
        heap.grow(node, ZoneId(0), 0..2048).unwrap();
        for _ in 0..blocks {
            let _ = heap.alloc(Request::new(node, ZoneId(0)).order(9)).unwrap();
        }
        heap.view()
    });
    let mut sum = Heap::new(&topology, ["slots"]).view();
    heaps.iter().for_each(|view| sum.add(view));
    let bucket = &sum.buckets[0];
    assert_eq!(
        (bucket.slots, bucket.free, bucket.allocated),
        (4096, 2560, 1536)
    );
    assert_eq!(
        (bucket.stats.hit, bucket.stats.local, bucket.free_blocks[9]),
        (1536, 1536, 5)
    );
    assert_eq!(sum.buckets.len(), topology.nodes.len());
}
