//! The view of a heap from outside.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use super::{ORDERS, ZoneId};
use crate::NodeId;

/// The counters of one zone on one node, in slots, since the heap was made. They mean what numastat's mean:
///
/// - hit + miss = local + other = slots ever taken from this bucket
/// - the sum of miss over all buckets = the sum of foreign
/// - interleave_hit ≤ hit
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BucketStats {
    /// Taken here, as intended.
    pub hit: u64,
    /// Taken here, though intended for another node.
    pub miss: u64,
    /// Intended for here, but taken on another node.
    pub foreign: u64,
    /// Of `hit`, those that interleaving intended for here.
    pub interleave_hit: u64,
    /// Taken here by a thread that ran on this node.
    pub local: u64,
    /// Taken here by a thread that ran on another node.
    pub other: u64,
    /// Taken here though another zone was asked for; part of `hit` or `miss` as the node says.
    pub zone_fallback: u64,
    /// Given back.
    pub freed: u64,
}

impl AddAssign for BucketStats {
    fn add_assign(&mut self, other: Self) {
        self.hit += other.hit;
        self.miss += other.miss;
        self.foreign += other.foreign;
        self.interleave_hit += other.interleave_hit;
        self.local += other.local;
        self.other += other.other;
        self.zone_fallback += other.zone_fallback;
        self.freed += other.freed;
    }
}

/// One zone on one node. slots = free + allocated + retired.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BucketView {
    /// The node.
    pub node: NodeId,
    /// The zone.
    pub zone: ZoneId,
    /// All slots.
    pub slots: u64,
    /// Free slots: the sum over orders k of 2^k `free_blocks[k]`.
    pub free: u64,
    /// Slots in use.
    pub allocated: u64,
    /// Slots that were in use and are never used again.
    pub retired: u64,
    /// Free blocks of each order.
    pub free_blocks: [u64; ORDERS],
    /// The counters.
    pub stats: BucketStats,
}

/// All buckets of a heap: what a daemon's status carries and `pageone numa heap` shows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct HeapView {
    /// The zones' names, by zone number.
    pub zones: Vec<String>,
    /// Zone by zone, and node by node inside.
    pub buckets: Vec<BucketView>,
    /// Requests that nothing could meet.
    pub failed: u64,
}

impl BucketView {
    fn add(&mut self, other: &Self) {
        self.slots += other.slots;
        self.free += other.free;
        self.allocated += other.allocated;
        self.retired += other.retired;
        for (sum, more) in self.free_blocks.iter_mut().zip(other.free_blocks) {
            *sum += more;
        }
        self.stats += other.stats;
    }
}

impl HeapView {
    /// Adds the slots and counters of another heap with the same zones: all equations hold for the sum, too.
    pub fn add(&mut self, other: &Self) {
        for bucket in &other.buckets {
            let place = (bucket.node, bucket.zone);
            match self
                .buckets
                .iter_mut()
                .find(|own| (own.node, own.zone) == place)
            {
                Some(own) => own.add(bucket),
                None => self.buckets.push(bucket.clone()),
            }
        }
        self.failed += other.failed;
    }

    /// The name of a zone, or its number where it has none.
    pub fn zone_name(&self, zone: ZoneId) -> String {
        self.zones
            .get(usize::from(zone.0))
            .cloned()
            .unwrap_or_else(|| zone.0.to_string())
    }
}
