//! Requests to a heap, and the blocks that it gives.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::NodeId;

/// A kind of slots, such as those of one store size class; lower zones stand in for higher ones first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ZoneId(pub u8);

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub(super) node: NodeId,
    pub(super) zone: ZoneId,
    pub(super) order: u8,
    pub(super) running_on: NodeId,
    pub(super) exact_node: bool,
    pub(super) exact_zone: bool,
    pub(super) interleaved: bool,
}

impl Request {
    /// One slot of `zone` on `node`, for a thread that runs there.
    pub fn new(node: NodeId, zone: ZoneId) -> Self {
        Self {
            node,
            zone,
            order: 0,
            running_on: node,
            exact_node: false,
            exact_zone: false,
            interleaved: false,
        }
    }

    /// 2^`order` slots in a row.
    #[must_use]
    pub fn order(self, order: u8) -> Self {
        Self { order, ..self }
    }

    /// Fails rather than take another node's.
    #[must_use]
    pub fn exact_node(self) -> Self {
        Self {
            exact_node: true,
            ..self
        }
    }

    /// Fails rather than take another zone's.
    #[must_use]
    pub fn exact_zone(self) -> Self {
        Self {
            exact_zone: true,
            ..self
        }
    }

    /// The node was chosen by interleaving, not by where a thread runs.
    #[must_use]
    pub fn interleaved(self) -> Self {
        Self {
            interleaved: true,
            ..self
        }
    }

    /// Where the one who asks runs.
    #[must_use]
    pub fn running_on(self, node: NodeId) -> Self {
        Self {
            running_on: node,
            ..self
        }
    }
}

/// 2^`order` slots in a row, taken from a heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[must_use = "a block that is dropped is lost to the heap"]
pub struct Block {
    /// The first slot.
    pub slot: u64,
    /// The order.
    pub order: u8,
    /// The node that it is on.
    pub node: NodeId,
    /// The zone that it is of.
    pub zone: ZoneId,
}

impl Block {
    /// Its slots.
    pub fn slots(&self) -> Range<u64> {
        self.slot..self.slot + (1 << self.order)
    }
}
