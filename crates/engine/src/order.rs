//! The order in which the chunks of a round are visited.
//!
//! Equal guests have equal things at equal places. Chunks are visited by place, so that equal content is
//! worked close in time, while its canonical pages and index entries are still in the cache; but each guest
//! lags behind the one before it:
//!
//! ```text
//!   guest 0   0  1  2  3  4  5        a lag of 2: in one column stand places
//!   guest 1         0  1  2  3        that are visited one after the other
//!   guest 2               0  1
//! ```
//!
//! Without the lag several workers visit one place of several guests at the same time. Then the third guest
//! comes before the second has found the twins of the first and has given them slots, and all its pages are
//! read that could have been guessed.

use std::collections::HashMap;
use std::sync::Arc;

use crate::chunk::Chunk;
use crate::guest::Guest;

/// Jobs between the visits of one place in two guests, for each worker that may work at a time.
const BETWEEN: usize = 8;

/// The order for some guests.
pub(crate) struct Order {
    /// By how many places each guest lags, by its number.
    lags: HashMap<u64, u64>,
}

impl Order {
    /// The order for `guests` in this sequence, and as many `workers` at a time.
    pub(crate) fn new(guests: &[Arc<Guest>], workers: u16) -> Self {
        let lag = (BETWEEN * usize::from(workers)).div_ceil(guests.len().max(1));
        let lags = (0..).step_by(lag.max(1));
        Self {
            lags: guests.iter().map(|guest| guest.number).zip(lags).collect(),
        }
    }

    /// Sorts chunks of these guests.
    pub(crate) fn sort(&self, chunks: &mut [Arc<Chunk>]) {
        chunks.sort_by_cached_key(|chunk| {
            let guest = chunk.guest.upgrade();
            let lag = guest.and_then(|guest| self.lags.get(&guest.number).copied());
            (chunk.place + lag.unwrap_or(0), chunk.id)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Lab;
    use crate::realm::lock;

    #[test]
    fn each_guest_lags_behind_the_one_before_it() {
        let lab = Lab::new();
        (1..=3).for_each(|pid| {
            lab.guest("d", pid);
        });
        let guests = lock(&lab.core.guests).clone();
        let create = |guest: &Arc<Guest>, place| guest.realm.chunks.create(guest, 0, place);
        let all = guests
            .iter()
            .flat_map(|guest| (0..20).filter_map(move |place| create(guest, place)));
        let mut chunks: Vec<_> = all.collect();
        Order::new(&guests, 1).sort(&mut chunks);
        let when = |guest: usize, place: u64| {
            chunks.iter().position(|chunk| {
                let its = chunk.guest.upgrade().map(|guest| guest.number);
                its == Some(guests[guest].number) && chunk.place == place
            })
        };
        assert_eq!(chunks.len(), 60);
        for place in 0..20 {
            for guest in 1..3 {
                let (before, after) = (when(guest - 1, place), when(guest, place));
                assert!(after >= before.map(|before| before + 3), "{guest} {place}");
            }
            assert!(place == 0 || when(0, place - 1) < when(0, place));
        }
        // In the middle all guests are at work.
        assert!(when(2, 2) < when(0, 9));
    }
}
