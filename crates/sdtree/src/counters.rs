//! Counters that do not slow the threads which count.
//!
//! Each counter is spread over [`SHARDS`] cache lines; a thread adds to the one it was dealt at its first use, and a reader sums
//! them all. Every addition is relaxed: sums are exact when no thread changes the tree, and off by the operations in
//! flight otherwise. No decision that must be right depends on them.
//!
//! Equations, when no thread changes the tree:
//!
//! ```text
//!   Pairs    = leaves linked in the tree
//!   Branches = branches linked in the tree = Pairs − directory slots in use
//! ```

use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};

const SHARDS: usize = 16;
const COUNTERS: usize = 6;

/// What is counted in each tree.
#[derive(Clone, Copy)]
pub(crate) enum Counter {
    /// Leaves linked.
    Pairs,
    /// Branches linked.
    Branches,
    /// Changes that found their edge changed by another thread, and were tried again.
    CasFailures,
    /// Branches unlinked, or attempted to, on behalf of another thread's removal.
    Helps,
    /// Times the directory grew.
    Growths,
    /// Times the directory should have grown, and its memory was refused.
    GrowthsRefused,
}

/// Two lines: processors fetch lines in pairs.
#[repr(align(128))]
#[derive(Default)]
struct Shard([AtomicI64; COUNTERS]);

/// One tree's counters.
#[derive(Default)]
pub(crate) struct Counters {
    shards: Box<[Shard; SHARDS]>,
}

impl Counters {
    /// Adds `amount`, and returns the new value of this thread's part.
    #[inline]
    pub(crate) fn add(&self, counter: Counter, amount: i64) -> i64 {
        self.shards[shard()].0[counter as usize].fetch_add(amount, Relaxed) + amount
    }

    /// The sum over all threads; not below zero.
    pub(crate) fn sum(&self, counter: Counter) -> u64 {
        let parts = self
            .shards
            .iter()
            .map(|shard| shard.0[counter as usize].load(Relaxed));
        u64::try_from(parts.sum::<i64>()).unwrap_or(0)
    }
}

/// The shard of the calling thread.
#[inline]
fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    MINE.with(|mine| {
        if mine.get() == usize::MAX {
            mine.set(NEXT.fetch_add(1, Relaxed) % SHARDS);
        }
        mine.get()
    })
}

/// Memory that was unlinked and waits for its readers; of all trees of the process, for they share one collector.
pub(crate) mod garbage {
    use super::{Relaxed, SHARDS, shard};
    use std::sync::atomic::AtomicI64;

    #[repr(align(128))]
    struct Pending {
        nodes: AtomicI64,
        bytes: AtomicI64,
    }

    static PENDING: [Pending; SHARDS] = [const {
        Pending {
            nodes: AtomicI64::new(0),
            bytes: AtomicI64::new(0),
        }
    }; SHARDS];

    /// Counts one node in.
    pub(crate) fn retired(bytes: usize) {
        change(1, bytes);
    }

    /// Counts one node out.
    pub(crate) fn freed(bytes: usize) {
        change(-1, bytes);
    }

    fn change(sign: i64, bytes: usize) {
        let pending = &PENDING[shard()];
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        pending.nodes.fetch_add(sign, Relaxed);
        pending.bytes.fetch_add(sign * bytes, Relaxed);
    }

    /// Nodes and bytes that wait now.
    pub(crate) fn pending() -> (u64, u64) {
        let sum = |part: fn(&Pending) -> &AtomicI64| {
            let sum = PENDING
                .iter()
                .map(|pending| part(pending).load(Relaxed))
                .sum::<i64>();
            u64::try_from(sum).unwrap_or(0)
        };
        (sum(|pending| &pending.nodes), sum(|pending| &pending.bytes))
    }
}
