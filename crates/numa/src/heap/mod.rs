//! Slots by node and zone: a buddy allocator with a bucket for each zone on each node.
//!
//! ```text
//!                 zone 0             zone 1
//!   node 0   ┌─ order 0 … 9 ─┐  ┌─ order 0 … 9 ─┐     a bucket: its own lock, its own counters
//!   node 1   └───────────────┘  └───────────────┘
//! ```
//!
//! A request names a node, a zone and an order. It is served from the first bucket that has a block:
//!
//! 1. the asked zone on the asked node;
//! 2. the asked zone on the other nodes, nearest first: the zone goes before the node;
//! 3. the other zones, each in the same order of nodes: lower zones first, from the nearest down, then higher ones.
//!
//! `exact_node` stops after the asked node, `exact_zone` after the asked zone.
//!
//! There is no lock over the whole: a request holds one bucket's lock at a time, and an empty bucket is passed
//! without one. Only [`Heap::grow`], [`Heap::locate`] and the checks know all buckets at once. A request that runs
//! while another gives its block back may miss it; that is a lost race, not an error of the heap.
//!
//! Invariants, asserted by [`Heap::check`]:
//!
//! - H1 Every slot of a bucket is in exactly one block, and each block is free, allocated or retired. A range whose
//!   slots are all retired is no more than its length.
//! - H2 No two buddies are free and apart, but for single slots that came back last (see `bucket`).
//! - H3 The counts of blocks, free and retired slots are those that a walk finds.
//! - H4 hit + miss = local + other = allocated + retired + freed, in slots; interleave_hit ≤ hit.
//! - H5 The sum of miss over all buckets is the sum of foreign.
//! - H6 No slot is in two buckets.
//!
//! Source: Xen's `heap[node][zone][order]` (xen/common/page_alloc.c, 2006); the counters are those of Linux's
//! numastat.

mod bits;
mod bucket;
mod error;
mod request;
mod view;

pub use error::{Broken, HeapError};
pub use request::{Block, Request, ZoneId};
pub use view::{BucketStats, BucketView, HeapView};

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{NodeId, Topology};
use bucket::Buddies;

/// The largest block is 2^9 = 512 slots: a chunk. Nothing asks for longer runs, and fewer orders split faster.
pub const MAX_ORDER: u8 = 9;
/// The number of orders.
pub const ORDERS: usize = MAX_ORDER as usize + 1;

/// One bucket, on cache lines of its own so that nodes do not disturb each other.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Bucket {
    buddies: Mutex<Buddies>,
    /// `Buddies::free` as of the last change, for a request that wants to pass an empty bucket without its lock.
    /// Relaxed: it publishes nothing, and a value that is out of date costs a lock or a lost race.
    free_hint: AtomicU64,
    /// Slots meant for here and taken elsewhere. It changes under the lock of the bucket that served, so that with
    /// all locks held H5 is exact. Relaxed: the lock orders it.
    foreign: AtomicU64,
}

impl Bucket {
    fn lock(&self) -> MutexGuard<'_, Buddies> {
        // A panic inside a bucket would have aborted, or come from a check that changes nothing.
        self.buddies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The heap. See the module's head.
#[derive(Debug)]
pub struct Heap {
    nodes: Vec<NodeId>,
    zones: Vec<String>,
    /// For each node: itself, then the others that it can reach, nearest first; as indices.
    by_distance: Vec<Vec<usize>>,
    /// For each zone: itself, then the zones that stand in for it.
    by_zone: Vec<Vec<usize>>,
    /// Zone by zone, and node by node inside.
    buckets: Vec<Bucket>,
    /// The first slot of each range that was added: its end and its bucket.
    directory: Mutex<BTreeMap<u64, (u64, usize)>>,
    failed: AtomicU64,
}

impl Heap {
    /// An empty heap for the nodes of `topology` and as many zones as there are names.
    pub fn new(topology: &Topology, zones: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let nodes: Vec<NodeId> = topology.nodes.iter().map(|node| node.id).collect();
        let index = |id: &NodeId| topology.index(*id);
        let by_distance = nodes
            .iter()
            .map(|&id| topology.by_distance(id).iter().filter_map(index).collect())
            .collect();
        let zones: Vec<String> = zones.into_iter().map(Into::into).collect();
        let by_zone = (0..zones.len())
            .map(|zone| (0..=zone).rev().chain(zone + 1..zones.len()).collect())
            .collect();
        let buckets = (0..nodes.len() * zones.len())
            .map(|_| Bucket::default())
            .collect();
        let (directory, failed) = Default::default();
        Self {
            nodes,
            zones,
            by_distance,
            by_zone,
            buckets,
            directory,
            failed,
        }
    }

    fn bucket_index(&self, node: NodeId, zone: ZoneId) -> Result<(usize, usize), HeapError> {
        let index = self.nodes.binary_search(&node).ok();
        let index = index.filter(|_| usize::from(zone.0) < self.zones.len());
        index
            .map(|index| (index, usize::from(zone.0)))
            .ok_or(HeapError::NoBucket { node, zone })
    }

    fn bucket(&self, node: usize, zone: usize) -> &Bucket {
        &self.buckets[zone * self.nodes.len() + node]
    }

    /// Adds free slots to a bucket, at any time. A range that begins where another of the bucket ends joins it;
    /// blocks never span ranges that were not joined, nor a multiple of 512. A request walks the bucket's ranges, so
    /// they should be long; a range whose slots are all retired costs nothing any more.
    ///
    /// # Errors
    /// No such bucket, or some of the slots are in the heap already.
    pub fn grow(&self, node: NodeId, zone: ZoneId, range: Range<u64>) -> Result<(), HeapError> {
        let (node, zone) = self.bucket_index(node, zone)?;
        let index = zone * self.nodes.len() + node;
        let mut directory = self
            .directory
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let before = directory.range(..range.end).next_back();
        if range.is_empty() || before.is_some_and(|(_, &(end, _))| end > range.start) {
            return Err(HeapError::Range { range });
        }
        directory.insert(range.start, (range.end, index));
        let bucket = &self.buckets[index];
        let mut buddies = bucket.lock();
        buddies.grow(range);
        bucket.free_hint.store(buddies.free, Ordering::Relaxed);
        Ok(())
    }

    /// Takes a block.
    ///
    /// # Errors
    /// [`HeapError::Exhausted`] when no bucket that the request allows has one.
    ///
    /// # Examples
    /// ```
    /// use numa::heap::{Heap, Request, ZoneId};
    /// # let topology = numa::Topology::live().unwrap();
    /// let heap = Heap::new(&topology, ["slots"]);
    /// let node = topology.nodes[0].id;
    /// heap.grow(node, ZoneId(0), 0..1024).unwrap();
    /// let block = heap.alloc(Request::new(node, ZoneId(0)).order(3)).unwrap();
    /// assert_eq!(block.slots(), 0..8);
    /// heap.free(block).unwrap();
    /// heap.check().unwrap();
    /// ```
    pub fn alloc(&self, request: Request) -> Result<Block, HeapError> {
        if request.order > MAX_ORDER {
            return Err(HeapError::Order {
                order: request.order,
            });
        }
        let (home, asked) = self.bucket_index(request.node, request.zone)?;
        let zones = if request.exact_zone {
            &self.by_zone[asked][..1]
        } else {
            &self.by_zone[asked][..]
        };
        let nodes = if request.exact_node {
            &self.by_distance[home][..1]
        } else {
            &self.by_distance[home][..]
        };
        for &zone in zones {
            for &node in nodes {
                if let Some(slot) = self.take(&request, (home, asked), (node, zone)) {
                    let zone = ZoneId(u8::try_from(zone).unwrap_or(u8::MAX));
                    return Ok(Block {
                        slot,
                        order: request.order,
                        node: self.nodes[node],
                        zone,
                    });
                }
            }
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        Err(HeapError::Exhausted(request))
    }

    /// Takes a block from one bucket and counts it.
    fn take(&self, request: &Request, asked: (usize, usize), from: (usize, usize)) -> Option<u64> {
        let bucket = self.bucket(from.0, from.1);
        let slots = 1 << request.order;
        if bucket.free_hint.load(Ordering::Relaxed) < slots {
            return None;
        }
        let mut buddies = bucket.lock();
        let slot = buddies.take(usize::from(request.order))?;
        bucket.free_hint.store(buddies.free, Ordering::Relaxed);
        let stats = &mut buddies.stats;
        if from.0 == asked.0 {
            stats.hit += slots;
            stats.interleave_hit += if request.interleaved { slots } else { 0 };
        } else {
            stats.miss += slots;
            self.bucket(asked.0, asked.1)
                .foreign
                .fetch_add(slots, Ordering::Relaxed);
        }
        if self.nodes[from.0] == request.running_on {
            stats.local += slots;
        } else {
            stats.other += slots;
        }
        stats.zone_fallback += if from.1 == asked.1 { 0 } else { slots };
        Some(slot)
    }

    /// Gives a block back, to be used again.
    ///
    /// # Errors
    /// The block is not allocated; the heap is as before.
    pub fn free(&self, block: Block) -> Result<(), HeapError> {
        let (node, zone) = self.bucket_index(block.node, block.zone)?;
        let bucket = self.bucket(node, zone);
        let mut buddies = bucket.lock();
        if block.order > MAX_ORDER || !buddies.give(block.slot, usize::from(block.order)) {
            return Err(HeapError::NotAllocated {
                slot: block.slot,
                order: block.order,
            });
        }
        buddies.stats.freed += 1 << block.order;
        bucket.free_hint.store(buddies.free, Ordering::Relaxed);
        Ok(())
    }

    /// Gives a block up for good: its slots are never handed out again. For slots whose number may still
    /// be known outside.
    ///
    /// # Errors
    /// The block is not allocated; the heap is as before.
    pub fn retire(&self, block: Block) -> Result<(), HeapError> {
        let (node, zone) = self.bucket_index(block.node, block.zone)?;
        let mut buddies = self.bucket(node, zone).lock();
        if block.order > MAX_ORDER || !buddies.retire(block.slot, usize::from(block.order)) {
            return Err(HeapError::NotAllocated {
                slot: block.slot,
                order: block.order,
            });
        }
        Ok(())
    }

    /// The allocated block that begins at `slot`, for an owner that kept only the number.
    pub fn locate(&self, slot: u64) -> Option<Block> {
        let directory = self
            .directory
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (_, &(end, index)) = directory.range(..=slot).next_back()?;
        if slot >= end {
            return None;
        }
        let order = self.buckets[index].lock().order_at(slot)?;
        let (zone, node) = (index / self.nodes.len(), index % self.nodes.len());
        Some(Block {
            slot,
            order,
            node: self.nodes[node],
            zone: ZoneId(u8::try_from(zone).unwrap_or(u8::MAX)),
        })
    }

    /// Bytes of memory the tables of the buckets hold.
    pub fn memory_bytes(&self) -> usize {
        let bytes = |bucket: &Bucket| size_of::<Bucket>() + bucket.lock().memory_bytes();
        self.buckets.iter().map(bytes).sum()
    }

    /// All buckets and counters, each bucket as of one moment.
    pub fn view(&self) -> HeapView {
        let views = self.buckets.iter().enumerate().map(|(index, bucket)| {
            let buddies = bucket.lock();
            let stats = BucketStats {
                foreign: bucket.foreign.load(Ordering::Relaxed),
                ..buddies.stats
            };
            BucketView {
                node: self.nodes[index % self.nodes.len()],
                zone: ZoneId(u8::try_from(index / self.nodes.len()).unwrap_or(u8::MAX)),
                slots: buddies.slots,
                free: buddies.free,
                allocated: buddies.slots - buddies.free - buddies.retired,
                retired: buddies.retired,
                free_blocks: buddies.blocks(),
                stats,
            }
        });
        HeapView {
            zones: self.zones.clone(),
            buckets: views.collect(),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }

    /// Asserts the invariants at the module's head, with every bucket locked: slow, and stops all requests.
    ///
    /// # Errors
    /// The first one broken.
    pub fn check(&self) -> Result<(), Broken> {
        // Same order as `grow` and `locate`: the directory, then buckets. No other call holds two.
        let directory = self
            .directory
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let all: Vec<MutexGuard<'_, Buddies>> = self.buckets.iter().map(Bucket::lock).collect();
        all.iter().try_for_each(|buddies| buddies.check())?;
        let miss = all.iter().map(|buddies| buddies.stats.miss).sum();
        let foreign = self
            .buckets
            .iter()
            .map(|bucket| bucket.foreign.load(Ordering::Relaxed))
            .sum();
        if miss != foreign {
            return Err(Broken::MissForeign { miss, foreign });
        }
        let in_directory = directory.iter().map(|(start, (end, _))| end - start).sum();
        let in_buckets = all.iter().map(|buddies| buddies.slots).sum();
        if in_directory != in_buckets {
            return Err(Broken::Directory {
                directory: in_directory,
                buckets: in_buckets,
            });
        }
        Ok(())
    }
}
