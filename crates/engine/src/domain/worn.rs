//! Worn chunks: memory that is written faster than it can be merged gets fewer and fewer looks.
//!
//! A look costs its guest: each page that a look finds written is armed again, and its next write is a fault
//! (0.8 µs). In memory that is written all the time these faults are the whole yield. So some chunks rest: those in which more pages
//! were written between two looks than are merged in them, and more than a sixteenth. Such a chunk rests for one look, then
//! for three, seven, fifteen. As soon as a look finds it otherwise it rests no more:
//!
//! ```text
//!   look       1   2   3   4   5   6   7   8   9  10
//!   written    w   w   -   w   -   -   -   .   .   .      - not looked at, and not armed
//! ```
//!
//! The same holds here as for a page that settles later: see [`idle`](crate::guest::idle). The faults of a chunk that is
//! written without a pause are a sixteenth of what they were, and no page that could be merged waits longer than sixteen looks.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

/// The longest rest is one look less than 2 to this power.
const MOST: u8 = 4;
/// This part of what is present may be written from look to look.
const PART: usize = 16;

/// How worn a chunk is. Only the worker that looks at its guest changes it.
#[derive(Debug, Default)]
pub(crate) struct Worn {
    level: AtomicU8,
    /// Looks that are still left out.
    rest: AtomicU8,
}

impl Worn {
    /// Whether the next look leaves the chunk out.
    pub(crate) fn rests(&self) -> bool {
        self.rest.load(Relaxed) > 0
    }

    /// A look left it out.
    pub(crate) fn leave_out(&self) {
        self.rest
            .store(self.rest.load(Relaxed).saturating_sub(1), Relaxed);
    }

    /// A look found so many of the `present` pages armed and written, and so many merged.
    pub(crate) fn note(&self, present: usize, written: usize, merged: usize) {
        let level = match written > merged.max(present / PART) {
            true => (self.level.load(Relaxed) + 1).min(MOST),
            false => 0,
        };
        self.level.store(level, Relaxed);
        self.rest.store((1 << level) - 1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the next looks leave it out, one after the other.
    fn rest(worn: &Worn) -> u32 {
        let mut looks = 0;
        while worn.rests() {
            worn.leave_out();
            looks += 1;
        }
        looks
    }

    #[test]
    fn what_is_written_all_the_time_rests_longer_and_longer() {
        let worn = Worn::default();
        let rests: Vec<_> = (0..6)
            .map(|_| {
                worn.note(512, 400, 0);
                rest(&worn)
            })
            .collect();
        assert_eq!(rests, [1, 3, 7, 15, 15, 15]);
        worn.note(512, 32, 0);
        assert_eq!(rest(&worn), 0);
        worn.note(512, 33, 0);
        assert_eq!(rest(&worn), 1, "it begins anew");
    }

    #[test]
    fn what_is_worth_its_price_does_not_rest() {
        let worn = Worn::default();
        worn.note(512, 100, 100);
        assert_eq!(rest(&worn), 0);
        worn.note(0, 0, 0);
        assert_eq!(rest(&worn), 0);
    }
}
