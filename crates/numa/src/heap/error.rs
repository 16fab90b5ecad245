//! The refusals of a heap, and the findings of its check.

use std::ops::Range;

use super::{BucketStats, MAX_ORDER, Request, ZoneId};
use crate::NodeId;

/// Why a heap refuses.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeapError {
    /// No bucket that the request allows has such a block.
    #[error("no block of order {} for node {} and zone {}{}", .0.order, .0.node, .0.zone.0,
        if .0.exact_node { ", exactly there" } else { "" })]
    Exhausted(Request),
    /// The heap has no such node or zone.
    #[error("no bucket for node {node} and zone {}", .zone.0)]
    NoBucket {
        /// The node.
        node: NodeId,
        /// The zone.
        zone: ZoneId,
    },
    /// An order beyond [`MAX_ORDER`].
    #[error("order {order} is more than {MAX_ORDER}")]
    Order {
        /// The order.
        order: u8,
    },
    /// The block is not allocated: given back twice, retired, or never taken.
    #[error("slot {slot} begins no allocated block of order {order}")]
    NotAllocated {
        /// The first slot.
        slot: u64,
        /// The order.
        order: u8,
    },
    /// Slots that a bucket has already, or a range that ends before it begins.
    #[error("slots {}..{} cannot be added", .range.start, .range.end)]
    Range {
        /// The range.
        range: Range<u64>,
    },
}

/// Which invariant does not hold, and where.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum Broken {
    /// H1.
    #[error("H1: slot {slot} begins free blocks of orders {free_orders:?} and has head {head}")]
    Cover {
        slot: u64,
        free_orders: Vec<usize>,
        head: u8,
    },
    /// H2.
    #[error("H2: slots {slot} and {buddy} are free buddies of order {order}")]
    Apart { slot: u64, buddy: u64, order: usize },
    /// H3.
    #[error("H3: free blocks by order {walked:?}, {kept:?} kept")]
    Blocks { walked: Vec<u64>, kept: Vec<u64> },
    /// H3.
    #[error("H3: (free, retired, all) slots {counted:?}, {kept:?} kept")]
    Totals {
        counted: (u64, u64, u64),
        kept: (u64, u64, u64),
    },
    /// H4.
    #[error("H4: {stats:?} with {allocated} slots allocated or retired")]
    Counters {
        stats: Box<BucketStats>,
        allocated: u64,
    },
    /// H5.
    #[error("H5: {miss} misses, {foreign} foreign")]
    MissForeign { miss: u64, foreign: u64 },
    /// H6.
    #[error("H6: the directory has {directory} slots, the buckets {buckets}")]
    Directory { directory: u64, buckets: u64 },
}
