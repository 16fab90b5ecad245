//! Discards one page after another: balloons, free page reporting, allocators that give memory back.
//!
//! To discard one merged page takes a look at the mapping and a new mapping. That is several times the
//! kernel's cost for a page of anonymous memory. So where discards follow each other, memory ahead of them is made whole
//! ([`whole_unwritten`]) in one go, and the discards to come are the kernel's own:
//!
//! ```text
//!   . . . . . . . . d│m m m m m m m m     discarded so far: a trail of 8 pages
//!   . . . . . . . . d│a a a a a a a a     8 pages ahead are made whole; the trail goes on through them
//! ```
//!
//! **The price**: pages that were merged have frames of their own, until they are discarded or merged anew. Never more
//! pages than the trail is long, so a guest that stops has at most given back as much as it took. That they are no longer
//! merged is to the engine as if the guest had asked for it ([`whole`](super::whole)).
//!
//! **What must hold.** The program did not ask for another frame behind these pages. So a page that may be pinned stays: one that
//! was written since it was merged, as all are that were pinned to write to; and all where the kernel counts pinned memory.
//!
//! The tempting alternative, one new mapping over more than was asked for, would lose pages that the guest did not discard.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use wire::PAGE_BYTES;

use super::scarce::scarce;
use super::whole::whole_unwritten;
use crate::lock::Guard;

/// So far from the last discard the next may be, for a trail: between two of them another page may stay.
const GAP: usize = 4 * PAGE_BYTES;
/// What discards at most so much is worth looking ahead for.
const SHORT: usize = 4 * PAGE_BYTES;
/// A trail is at least so long; a shorter one would not pay.
const LEAST: usize = 16 * PAGE_BYTES;
/// So much is made whole at once at most: a fraction of a millisecond, for which writers wait.
const MOST: usize = 256 * PAGE_BYTES;

/// The trail: from the lowest to behind the highest address that the last discards had. Under the lock.
static LOW: AtomicUsize = AtomicUsize::new(0);
static HIGH: AtomicUsize = AtomicUsize::new(0);

/// `[start, start + len)` was discarded; `stored` says that some of it was merged.
pub(crate) fn discarded(guard: &mut Guard, start: usize, len: usize, stored: bool) {
    let trail = LOW.load(Ordering::Relaxed)..HIGH.load(Ordering::Relaxed);
    let (trail, ahead) = follow(&trail, start..start + len);
    let worth = stored && len <= SHORT && ahead.end - ahead.start >= LEAST;
    let done = !worth || make_whole(guard, &ahead);
    // What failed is not tried at each page.
    let trail = if done { trail } else { 0..0 };
    LOW.store(trail.start, Ordering::Relaxed);
    HIGH.store(trail.end, Ordering::Relaxed);
}

fn make_whole(guard: &mut Guard, ahead: &Range<usize>) -> bool {
    let len = ahead.end - ahead.start;
    if !guard.table().may_be_stored(ahead.start, len) {
        return true;
    }
    // The memory made aside, what is cut from it, and what it splits.
    !scarce(guard, 4) && whole_unwritten(guard, ahead.start, len).is_ok()
}

/// The trail with one more discard, and what lies ahead: as much as the trail is long.
fn follow(trail: &Range<usize>, next: Range<usize>) -> (Range<usize>, Range<usize>) {
    let near = next.start <= trail.end.saturating_add(GAP) && trail.start <= next.end + GAP;
    if trail.is_empty() || !near {
        return (next, 0..0);
    }
    let (low, high) = (trail.start.min(next.start), trail.end.max(next.end));
    let len = (high - low).min(MOST);
    if next.end > trail.end {
        (high - len..high, high..high.saturating_add(len))
    } else if next.start < trail.start {
        (low..low + len, low.saturating_sub(len)..low)
    } else {
        (low..high, 0..0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: usize = 1 << 30;

    fn pages(range: Range<usize>) -> Range<usize> {
        BASE + range.start * PAGE_BYTES..BASE + range.end * PAGE_BYTES
    }

    #[test]
    fn a_trail_looks_ahead_as_far_as_it_is_long() {
        let mut trail = 0..0;
        for page in 10..40 {
            let ahead;
            (trail, ahead) = follow(&trail, pages(page..page + 1));
            assert_eq!(trail, pages(10..page + 1));
            let expected = if page == 10 {
                0..0
            } else {
                pages(page + 1..2 * page - 8)
            };
            assert_eq!(ahead, expected);
        }
        for page in 40..1000 {
            (trail, _) = follow(&trail, pages(page..page + 1));
        }
        assert_eq!(trail.end - trail.start, MOST);
    }

    #[test]
    fn a_trail_goes_down_too_and_over_gaps_and_ends_elsewhere() {
        let (trail, ahead) = follow(&pages(20..30), pages(18..19));
        assert_eq!((trail, ahead), (pages(18..30), pages(6..18)));
        let (trail, ahead) = follow(&pages(20..30), pages(34..35));
        assert_eq!((trail, ahead), (pages(20..35), pages(35..50)));
        let (trail, ahead) = follow(&pages(20..30), pages(35..36));
        assert_eq!((trail, ahead), (pages(35..36), 0..0));
        let (trail, ahead) = follow(&pages(20..30), pages(22..23));
        assert_eq!((trail, ahead), (pages(20..30), 0..0));
    }
}
