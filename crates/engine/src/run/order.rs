//! The order in which the chunks of a round are visited.
//!
//! Equal guests have equal things at equal places. Chunks are visited by place, so that equal content is
//! worked close in time, while its canonical pages and index entries are still in the cache. But the second guest of
//! a domain lags behind the first, and all others behind the second:
//!
//! ```text
//!   guest 0   0  1  2  3  4  5           a lag of 2: in one column stand places
//!   guest 1         0  1  2  3  4  5     that are visited one after the other
//!   guest 2               0  1  2  3
//!   guest 3               0  1  2  3
//! ```
//!
//! Without the lag several workers visit one place of several guests at the same time. Then the third guest
//! comes before the second has found the twins of the first and has given them slots. All its pages are read
//! then, though they could have been guessed. From then on a place is visited in all guests at once: their agents
//! compare with the same canonical pages, and all but the first find them in the cache.

use std::collections::HashMap;
use std::sync::Arc;

use crate::domain::chunk::Chunk;
use crate::guest::Guest;

/// Jobs between the visits of one place in two guests, for each worker that may work at a time.
const BETWEEN: u64 = 8;
/// Guests that it takes to find out what they share.
const FINDERS: u64 = 2;

/// The order for some guests.
pub(crate) struct Order {
    /// By how many places each guest lags, by its number.
    lags: HashMap<u64, u64>,
}

impl Order {
    /// The order for `guests` in this sequence, and as many `workers` at a time.
    pub(crate) fn new(guests: &[Arc<Guest>], workers: u16) -> Self {
        let lag = (BETWEEN * u64::from(workers)).div_ceil(guests.len().max(1) as u64);
        let mut seen: HashMap<&str, u64> = HashMap::new();
        let lags = guests.iter().map(|guest| {
            let before = seen.entry(&guest.domain.name).or_default();
            let lags = (*before).min(FINDERS) * lag.max(1);
            *before += 1;
            (guest.number, lags)
        });
        Self {
            lags: lags.collect(),
        }
    }

    /// Sorts chunks of these guests.
    pub(crate) fn sort(&self, chunks: &mut [Arc<Chunk>]) {
        chunks.sort_by_cached_key(|chunk| {
            let lag = self.lags.get(&chunk.guest).copied();
            (chunk.place + lag.unwrap_or(0), chunk.id)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::lock;
    use crate::testing::fake::Lab;

    #[test]
    fn a_place_is_visited_first_in_one_guest_then_in_another_then_in_all() {
        let lab = Lab::new();
        (1..=4).for_each(|pid| {
            lab.guest("d", pid);
        });
        lab.guest("e", 5);
        let guests = lock(&lab.core.guests).clone();
        let create = |guest: &Arc<Guest>, place| {
            guest.domain.chunks.create(
                (guest.number, guest.user.uid),
                0,
                place,
                wire::PageBits::EMPTY,
            )
        };
        let all = guests
            .iter()
            .flat_map(|guest| (0..20).filter_map(move |place| create(guest, place)));
        let mut chunks: Vec<_> = all.collect();
        Order::new(&guests, 1).sort(&mut chunks);
        assert_eq!(chunks.len(), 100);
        let when = |guest: usize, place: u64| {
            let is = |chunk: &Arc<Chunk>| {
                let its = Some(chunk.guest);
                its == Some(guests[guest].number) && chunk.place == place
            };
            chunks.iter().position(is).unwrap()
        };
        for place in 0..20 {
            // Those of a domain: the second behind the first, all others behind the second.
            for (before, after) in [(0, 1), (1, 2), (1, 3)] {
                let between = when(after, place).checked_sub(when(before, place));
                assert!(
                    between >= Some(3),
                    "{before} {after} at {place}: {between:?}"
                );
            }
            assert!(when(2, place).abs_diff(when(3, place)) < guests.len());
            assert!(when(4, place).abs_diff(when(0, place)) < guests.len());
            assert!(place == 0 || when(0, place - 1) < when(0, place));
        }
        // In the middle all guests are at work.
        assert!(when(3, 2) < when(0, 9));
    }
}
