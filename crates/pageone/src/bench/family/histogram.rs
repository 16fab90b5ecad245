//! Times of single accesses, counted in buckets so that those of several guests add up.
//!
//! Each power of two has 32 buckets, so that a time read back is at most 3 % off:
//!
//! ```text
//!  ns      0 … 63 exactly    64 66 68 … 126    128 132 136 … 252    256 …
//!  bucket  0 … 63            64 65 66 …  95     96  97  98 … 127    128 …
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Buckets of a power of two, as a power of two.
const FINE: u32 = 5;

/// How many accesses took how long.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Histogram {
    counts: BTreeMap<u32, u64>,
    max_ns: u64,
}

impl Histogram {
    /// Counts an access that took `ns` nanoseconds.
    pub(super) fn count(&mut self, ns: u64) {
        *self.counts.entry(bucket(ns)).or_default() += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds what `other` counted.
    pub(super) fn add(&mut self, other: &Self) {
        for (&bucket, &count) in &other.counts {
            *self.counts.entry(bucket).or_default() += count;
        }
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// How many accesses.
    pub(super) fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    /// The time in nanoseconds within which `per_million` of a million accesses ended, the end of its
    /// bucket; none without accesses.
    pub(super) fn at(&self, per_million: u64) -> Option<u64> {
        let rank = (u128::from(self.total()) * u128::from(per_million)).div_ceil(1_000_000);
        let mut seen = 0_u128;
        let found = self.counts.iter().find(|&(_, &count)| {
            seen += u128::from(count);
            seen >= rank.max(1)
        });
        found.map(|(&bucket, _)| end(bucket).min(self.max_ns))
    }
}

fn bucket(ns: u64) -> u32 {
    let power = ns.checked_ilog2().unwrap_or(0).max(FINE);
    let shift = power - FINE;
    // The upper bits of the time, less than twice the buckets of a power.
    let upper = u32::try_from(ns >> shift).unwrap_or(u32::MAX);
    (shift << FINE) + upper
}

/// The longest time of a bucket.
fn end(bucket: u32) -> u64 {
    let shift = (bucket >> FINE).saturating_sub(1);
    let upper = u64::from(bucket - (shift << FINE));
    ((upper + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_ranks_of_a_hundred_times_are_right() {
        let mut times = Histogram::default();
        assert_eq!(times.at(500_000), None);
        (1..=60).for_each(|ns| times.count(ns));
        for _ in 0..40 {
            times.count(1_000_000);
        }
        assert_eq!(times.total(), 100);
        assert_eq!(times.at(500_000), Some(50));
        assert_eq!(times.at(600_000), Some(60));
        assert_eq!(
            times.at(600_001),
            Some(1_000_000),
            "no longer than the longest"
        );
        assert_eq!(times.at(0), Some(1));
    }

    #[test]
    fn two_guests_add_up() {
        let (mut one, mut other) = (Histogram::default(), Histogram::default());
        one.count(10);
        other.count(10);
        other.count(5000);
        one.add(&other);
        assert_eq!((one.total(), one.at(1_000_000)), (3, Some(5000)));
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<Histogram>(&text).unwrap(), one);
    }

    proptest! {
        #[test]
        fn a_time_read_back_is_at_most_a_bucket_longer(ns in 0..u64::MAX / 2) {
            let read = end(bucket(ns));
            prop_assert!(read >= ns && read - ns <= ns / 32, "{ns} is read as {read}");
        }

        #[test]
        fn a_longer_time_has_no_lower_bucket(ns in 0..u64::MAX / 2, more in 0..1000_u64) {
            prop_assert!(bucket(ns) <= bucket(ns + more));
        }
    }
}
