//! Slots of a domain's stores: numbers given out once, segments freed when all their slots are dead.
//!
//! ```text
//!  number:  0 …… 511 │ 512 …… 1023 │ 1024 …
//!           segment 0│ segment 1   │          a worker takes a whole segment and gives its
//!           refs sites key                    numbers to neighbouring pages, one after another
//! ```
//!
//! Each store is on a node and has numbers of its own. Its slots carry the store's number in their
//! high bits (see [`Slot`]), so one table holds them all, and the heap has a bucket a node.
//!
//! A segment is a block of the domain's heap: free there, then allocated while its segment is in
//! the table, then retired when its last slot is dead. The heap never gets a block back, so it
//! never hands out a number twice (I3), and it grows by new numbers only.
//!
//! The tempting alternative, one heap for all domains, would let a guest tell from the gaps between
//! its slots how much the guests of other domains merge (I6).
//!
//! [`refs`](super::refs) has the refs, and with them the life of a slot.

use std::ops::{Deref, Range};
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::{Arc, Mutex};

use numa::heap::{Block, Heap, HeapError, HeapView};

use crate::domain::placement::{Placement, STORE};
use crate::domain::refs::{Refs, SEGMENT, Segment};
use crate::page::{Fingerprint, Slot, StoreId};
use crate::sync::lock;

/// Slots a bucket grows by: 128 MiB of a store, and 40 KiB of the heap's tables while one of them lives.
const GROWTH: u64 = 64 * SEGMENT;

/// Numbers a worker may give out.
pub(crate) type Run = Range<u64>;

/// Numbers the heap was given for a store, all below `end`, and those it still has.
#[derive(Debug, Default)]
struct Growth {
    end: u64,
    left: u64,
}

/// The numbers of one store.
#[derive(Debug, Default)]
struct Supply {
    growth: Mutex<Growth>,
    spare: Mutex<Vec<Run>>,
}

/// The slots of a domain's stores.
#[derive(Debug)]
pub(crate) struct Slots {
    refs: Refs,
    pub(crate) placement: Placement,
    heap: Heap,
    /// By store.
    supplies: Vec<Supply>,
}

impl Deref for Slots {
    type Target = Refs;

    fn deref(&self) -> &Refs {
        &self.refs
    }
}

impl Slots {
    /// The slots of new stores.
    pub(crate) fn new(placement: Placement) -> Self {
        Self {
            refs: Refs::new(Arc::clone(&placement.live)),
            heap: placement.heap(),
            supplies: placement.nodes.iter().map(|_| Supply::default()).collect(),
            placement,
        }
    }

    fn supply(&self, store: StoreId) -> &Supply {
        let supply = self.supplies.get(store.index());
        supply.unwrap_or_else(|| panic!("there is no store {}", store.0))
    }

    /// Slots of a store to give out, neighbours together.
    ///
    /// # Errors
    /// The heap does not know the store's node.
    pub(crate) fn take_run(&self, store: StoreId) -> Result<Run, HeapError> {
        if let Some(spare) = lock(&self.supply(store).spare).pop() {
            return Ok(spare);
        }
        let mut segments = self.refs.segments.write();
        let block = self.take_block(store)?;
        let segment = Segment::new(block);
        self.refs
            .add_segment(&mut segments, block.slot / SEGMENT, segment);
        Ok(block.slots())
    }

    fn take_block(&self, store: StoreId) -> Result<Block, HeapError> {
        let node = self.placement.node(store);
        let mut growth = lock(&self.supply(store).growth);
        if growth.left == 0 {
            let (first, end) = (store.first_slot().0, growth.end + GROWTH);
            self.heap
                .grow(node, STORE, first + growth.end..first + end)?;
            *growth = Growth { end, left: GROWTH };
        }
        let block = self.heap.alloc(self.placement.request(store))?;
        growth.left -= SEGMENT;
        Ok(block)
    }

    /// Restores the slots of a store that another engine filled up to number `end`: each of `live`, in
    /// ascending order, gets a ref. Numbers below `end` are not given out any more, nor those of a
    /// segment that it begins (I3).
    ///
    /// # Errors
    /// The heap does not know the store's node, or has its numbers already.
    pub(crate) fn restore(
        &self,
        store: StoreId,
        end: u64,
        live: &[(Slot, Fingerprint)],
    ) -> Result<(), HeapError> {
        let node = self.placement.node(store);
        let mut growth = lock(&self.supply(store).growth);
        for part in live.chunk_by(|(a, _), (b, _)| a.0 / SEGMENT == b.0 / SEGMENT) {
            let Some(&(first, _)) = part.first() else {
                continue;
            };
            let start = first.0 / SEGMENT * SEGMENT;
            self.heap.grow(node, STORE, start..start + SEGMENT)?;
            // Nothing else of this bucket is free.
            let block = self.heap.alloc(self.placement.request(store))?;
            assert_eq!(
                block.slots(),
                start..start + SEGMENT,
                "a block of another segment"
            );
            let segment = Segment::new(block);
            let dead = SEGMENT - part.len() as u64;
            segment
                .dead
                .store(u32::try_from(dead).expect("at most a segment"), Relaxed);
            let mut segments = self.refs.segments.write();
            self.refs
                .add_segment(&mut segments, start / SEGMENT, segment);
            drop(segments);
            let view = self.refs.view();
            for &(slot, key) in part {
                view.publish(slot, key);
                // As its index or a copy beside the one that this names: nothing is merged before.
                view.set_named(slot);
            }
        }
        growth.end = end.next_multiple_of(SEGMENT);
        Ok(())
    }

    /// A number behind all that were ever given out in a store.
    pub(crate) fn end(&self, store: StoreId) -> u64 {
        lock(&self.supply(store).growth).end
    }

    /// Puts unused slots of a run back.
    pub(crate) fn give_back(&self, run: Run) {
        if run.is_empty() {
            return;
        }
        let store = Slot(run.start).store();
        lock(&self.supply(store).spare).push(run);
    }

    /// Notes that the numbers of `dead` are spent; frees segments with nothing left, and retires
    /// their blocks.
    pub(crate) fn bury(&self, dead: &[Slot]) {
        let mut empty = Vec::new();
        let view = self.refs.view();
        for slot in dead {
            let number = slot.0 / SEGMENT;
            let segment = view.segments.get(&number);
            let segment = segment.unwrap_or_else(|| panic!("{slot} died and has no segment"));
            let dead = u64::from(segment.dead.fetch_add(1, AcqRel)) + 1;
            assert!(dead <= SEGMENT, "{slot} died twice, or one beside it");
            if dead == SEGMENT {
                empty.push(number);
            }
        }
        drop(view);
        if !empty.is_empty() {
            let mut segments = self.refs.segments.write();
            for number in empty {
                let segment = self.refs.take_segment(&mut segments, number);
                let retired = self.heap.retire(segment.block);
                assert!(
                    retired.is_ok(),
                    "a block that is not the heap's: {retired:?}"
                );
            }
        }
    }

    /// The heap's buckets and counters.
    pub(crate) fn heap_view(&self) -> HeapView {
        self.heap.view()
    }

    /// Asserts the heap's invariants, and that each allocated block has its segment.
    ///
    /// # Panics
    /// When one does not hold.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn check(&self) {
        let segments = self.refs.segments.read();
        if let Err(broken) = self.heap.check() {
            panic!("the heap of slots: {broken}");
        }
        for (number, segment) in &*segments {
            let block = self.heap.locate(number * SEGMENT);
            assert_eq!(block, Some(segment.block), "the block of segment {number}");
        }
        let buckets = self.heap.view().buckets;
        let allocated: u64 = buckets.iter().map(|bucket| bucket.allocated).sum();
        assert_eq!(
            allocated,
            segments.len() as u64 * SEGMENT,
            "I3: slots in use"
        );
    }

    /// Slots with frames in all domains of the same placement.
    pub(crate) fn live_anywhere(&self) -> u64 {
        self.placement.live.load(Relaxed)
    }

    /// Bytes of memory the slots hold.
    pub(crate) fn memory_bytes(&self) -> usize {
        let segments = self.refs.segments.read();
        let tables = segments.len() * size_of::<Segment>() + segments.capacity() * 18;
        tables + self.heap.memory_bytes() + self.chains.memory_bytes()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::users::Holdings;
    use numa::Topology;
    use std::collections::HashSet;

    pub(in crate::domain) const FIRST: StoreId = StoreId(0);

    pub(in crate::domain) fn slots() -> Slots {
        Slots::new(Placement::new(Topology::live().unwrap()).unwrap())
    }

    #[test]
    fn stores_have_numbers_of_their_own() {
        let spec = "fake=3".parse().unwrap();
        let topology = Topology::live().unwrap().emulate(&spec).unwrap();
        let slots = Slots::new(Placement::new(topology).unwrap());
        let runs = [0, 1, 2, 0].map(|store| slots.take_run(StoreId(store)).unwrap());
        let first = |run: &Run| (Slot(run.start).store().0, Slot(run.start).number());
        assert_eq!(
            runs.each_ref().map(first),
            [(0, 0), (1, 0), (2, 0), (0, SEGMENT)]
        );
        slots.give_back(runs[1].clone());
        assert_eq!(slots.take_run(StoreId(1)).unwrap(), runs[1]);
        let dead: Vec<_> = runs[2].clone().map(Slot).collect();
        slots.bury(&dead);
        slots.check();
        let view = slots.heap_view();
        let of = |node: usize| (view.buckets[node].allocated, view.buckets[node].retired);
        assert_eq!([0, 1, 2].map(of), [(1024, 0), (512, 0), (0, 512)]);
    }

    #[test]
    fn numbers_are_given_once_and_dead_segments_freed() {
        let (slots, his) = (slots(), Arc::new(Holdings::default()));
        let run = slots.take_run(FIRST).unwrap();
        slots.charge(&his);
        let segments = || his.segments.load(Relaxed) / size_of::<Segment>() as u64;
        slots.give_back(run.start + 2..run.end);
        assert_eq!(slots.take_run(FIRST).unwrap(), run.start + 2..run.end);
        assert_eq!(segments(), 1, "its owner came later");
        assert_eq!(slots.take_run(FIRST).unwrap().start, run.end);
        assert_eq!(segments(), 2);
        let held = slots.memory_bytes();
        let dead: Vec<_> = run.map(Slot).collect();
        slots.bury(&dead[..511]);
        assert_eq!(slots.memory_bytes(), held);
        slots.bury(&dead[511..]);
        assert!(slots.memory_bytes() < held);
        assert_eq!(slots.view().counts(dead[0]), (0, 0));
        assert_eq!(segments(), 1);
        drop(slots);
        assert_eq!(segments(), 0);
    }

    /// In use, retired and all slots of the heap.
    fn counts(slots: &Slots) -> (u64, u64, u64) {
        slots.check();
        let view = slots.heap_view();
        assert_eq!(view.failed, 0);
        let sum = |of: fn(&numa::heap::BucketView) -> u64| view.buckets.iter().map(of).sum();
        (sum(|b| b.allocated), sum(|b| b.retired), sum(|b| b.slots))
    }

    #[test]
    fn no_number_comes_twice_however_many_blocks_die() {
        let slots = slots();
        let mut seen = HashSet::new();
        // Three growths of the heap; every other block dies at once, the others at the end.
        let mut later = Vec::new();
        for round in 0..3 * GROWTH / SEGMENT {
            let run = slots.take_run(FIRST).unwrap();
            assert_eq!(run.start % SEGMENT, 0);
            let numbers: Vec<_> = run.map(Slot).collect();
            assert_eq!(numbers.len() as u64, SEGMENT);
            assert!(numbers.iter().all(|&slot| seen.insert(slot)), "{round}");
            match round % 2 {
                0 => slots.bury(&numbers),
                _ => later.extend(numbers),
            }
        }
        let half = 3 * GROWTH / 2;
        assert_eq!(counts(&slots), (half, half, 3 * GROWTH));
        slots.bury(&later);
        assert_eq!(counts(&slots), (0, 3 * GROWTH, 3 * GROWTH));
        assert!(seen.insert(Slot(slots.take_run(FIRST).unwrap().start)));
        assert_eq!(counts(&slots), (SEGMENT, 3 * GROWTH, 4 * GROWTH));
    }

    #[test]
    fn a_block_is_retired_with_its_last_slot_and_not_before() {
        let slots = slots();
        let first = slots.take_run(FIRST).unwrap();
        let second = slots.take_run(FIRST).unwrap();
        // All of the first, one of the second: a batch across the boundary.
        let dead: Vec<_> = first.clone().chain([second.start]).map(Slot).collect();
        slots.bury(&dead[1..]);
        assert_eq!(counts(&slots), (2 * SEGMENT, 0, GROWTH));
        slots.bury(&dead[..1]);
        assert_eq!(counts(&slots), (SEGMENT, SEGMENT, GROWTH));
        // What is left of the second still can be given out.
        slots.give_back(second.start + 1..second.end);
        assert_eq!(slots.take_run(FIRST).unwrap(), second.start + 1..second.end);
        assert_eq!(slots.view().counts(Slot(first.start)), (0, 0));
    }

    #[test]
    fn workers_at_once_get_numbers_of_their_own() {
        let slots = slots();
        let take = || -> Vec<u64> {
            let mut numbers = Vec::new();
            for _ in 0..100 {
                let mut run = slots.take_run(FIRST).unwrap();
                let dead: Vec<_> = run.by_ref().take(200).map(Slot).collect();
                numbers.extend(dead.iter().map(|slot| slot.0));
                slots.bury(&dead);
                slots.give_back(run);
            }
            numbers
        };
        let all: Vec<u64> = std::thread::scope(|scope| {
            let workers = [(); 4].map(|()| scope.spawn(take));
            workers
                .into_iter()
                .flat_map(|worker| worker.join().unwrap())
                .collect()
        });
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        let (used, retired, _) = counts(&slots);
        assert!(retired > 0 && used + retired >= all.len() as u64);
    }
}
