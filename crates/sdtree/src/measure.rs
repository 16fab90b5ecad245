//! The cost of a map: four steps over uniformly random 16-byte keys, the same for all maps that are compared.
//!
//! Insert all keys, look all of them up in another order, look up as many absent ones, remove all in a third order. The clock of a thread
//! and the memory of the process come from the caller: no system call is made here.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Insert, SdTree};

/// A concurrent map from 16-byte keys to a word.
pub trait Map: Sync {
    /// True if the key was absent.
    fn insert(&self, key: u128, value: u64) -> bool;
    /// The value of a key.
    fn get(&self, key: u128) -> Option<u64>;
    /// True if the key was there.
    fn remove(&self, key: u128) -> bool;
}

/// What the caller can tell.
#[derive(Clone, Copy, Debug)]
pub struct Meters {
    /// How long the calling thread has been on a processor.
    pub on_processor: fn() -> Duration,
    /// Bytes of the process in memory.
    pub resident: fn() -> u64,
}

/// How long a step over all keys took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// By the clock.
    pub wall: Duration,
    /// On processors, all threads together.
    pub on_processor: Duration,
}

/// The four steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steps {
    /// Insert new, get hit, get miss, remove.
    pub steps: [Step; 4],
    /// By how much the process grew while keys were inserted.
    pub bytes: u64,
}

/// The names of the steps, in their order.
pub const STEPS: [&str; 4] = ["insert new", "get hit", "get miss", "remove"];

/// A cheap generator (splitmix64): spread, not secrecy.
#[must_use]
pub fn mix(seed: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(0x632b_e59b_d9b4_e019);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of number `index`.
#[must_use]
pub fn key(index: u64) -> u128 {
    u128::from(mix(index)) << 64 | u128::from(mix(!index))
}

/// Takes `map` through the steps, with `keys` keys dealt out among `threads`.
///
/// # Panics
/// When the map loses a key, or has one that it should not.
pub fn steps(map: &impl Map, keys: u64, threads: u64, meters: Meters) -> Steps {
    // Nodes must not be visited in the order in which they were allocated. Both factors are primes: no number of keys below is a multiple.
    let order = |index: u64, factor: u64| index * factor % keys;
    let timed = |step: &(dyn Fn(u64) + Sync)| timed(keys, threads, meters, step);
    let before = (meters.resident)();
    let insert = timed(&|index| assert!(map.insert(key(index), index)));
    let bytes = (meters.resident)().saturating_sub(before);
    let hit = timed(&|index| {
        let index = order(index, 1_234_577);
        assert_eq!(map.get(key(index)), Some(index));
    });
    let miss = timed(&|index| {
        let absent = keys + order(index, 1_234_577);
        assert_eq!(black_box(map.get(key(absent))), None);
    });
    let remove = timed(&|index| assert!(map.remove(key(order(index, 2_345_699)))));
    Steps {
        steps: [insert, hit, miss, remove],
        bytes,
    }
}

/// The time of a step when the threads share the indices out among them.
fn timed(count: u64, threads: u64, meters: Meters, step: &(dyn Fn(u64) + Sync)) -> Step {
    let threads = threads.max(1);
    let barrier = Barrier::new(usize::try_from(threads).map_or(2, |threads| threads + 1));
    let on_processor = Mutex::new(Duration::ZERO);
    let mut start = Instant::now();
    std::thread::scope(|scope| {
        for me in 0..threads {
            let (barrier, on_processor) = (&barrier, &on_processor);
            scope.spawn(move || {
                barrier.wait();
                let before = (meters.on_processor)();
                (count * me / threads..count * (me + 1) / threads).for_each(step);
                let took = (meters.on_processor)().saturating_sub(before);
                *on_processor.lock().unwrap_or_else(PoisonError::into_inner) += took;
            });
        }
        // Before the threads go: on a busy machine this one may be the last to go on.
        start = Instant::now();
        barrier.wait();
    });
    Step {
        wall: start.elapsed(),
        on_processor: on_processor
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner),
    }
}

impl Map for SdTree<u64> {
    fn insert(&self, key: u128, value: u64) -> bool {
        self.get_or_insert(key, value) == Insert::Inserted
    }

    fn get(&self, key: u128) -> Option<u64> {
        self.get(key)
    }

    fn remove(&self, key: u128) -> bool {
        self.remove(key).is_some()
    }
}

impl Map for Mutex<BTreeMap<u128, u64>> {
    fn insert(&self, key: u128, value: u64) -> bool {
        let mut map = self.lock().unwrap_or_else(PoisonError::into_inner);
        map.insert(key, value).is_none()
    }

    fn get(&self, key: u128) -> Option<u64> {
        let map = self.lock().unwrap_or_else(PoisonError::into_inner);
        map.get(&key).copied()
    }

    fn remove(&self, key: u128) -> bool {
        let mut map = self.lock().unwrap_or_else(PoisonError::into_inner);
        map.remove(&key).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_goes_through_all_steps_with_any_number_of_threads() {
        let meters = Meters {
            on_processor: || Duration::ZERO,
            resident: || 0,
        };
        for threads in [1, 3] {
            let tree = SdTree::new();
            let took = steps(&tree, 1000, threads, meters);
            assert!(took.steps.iter().all(|step| step.wall > Duration::ZERO));
            assert_eq!(tree.get(key(7)), None, "all were removed");
        }
    }
}
