//! Discards that the kernel carries out without the lock.
//!
//! Where nothing is offered or stored a discard passes as it came. The kernel may wait there for a thread of the program
//! that reads the events of a userfaultfd, and that thread may be in a hook. Meanwhile memory of the range may be offered. A window
//! that had a page of it out would let it miss the discard, and would bring its old content back.
//!
//! To discard once more behind the call is no answer: another thread may have seen the zeros of the first, and written. So the thread
//! notes the range **before** it asks whether something is offered there, and no window works in a range that is noted:
//!
//! ```text
//!  the thread                          the agent's thread
//!  note the range                      (under the lock) the page is offered
//!  is something offered there?         …
//!    no: the kernel's call             (under the lock) is the range noted? then nothing is taken out of it
//!    yes: no note; with the lock
//!  take the note back
//! ```
//!
//! One of both sees the other's mark, for a fence stands between mark and look. A note that is never taken back (a handler
//! jumped out of the call, or a child made by a bare clone(2) copied it) keeps windows from one range, and costs no byte.

use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// So many notes there may be at a time.
const MOST: usize = 16;

static NOTES: Notes<MOST> = Notes([const { Note::free() }; MOST]);

/// A range: its first address and the one after its last. A place is taken as `[TAKEN, 0]`, and stands for all memory until it has both.
struct Note {
    start: AtomicUsize,
    end: AtomicUsize,
}

/// No address of the program's, and not 0, which is a free place.
const TAKEN: usize = usize::MAX;

impl Note {
    const fn free() -> Self {
        let (start, end) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { start, end }
    }
}

struct Notes<const PLACES: usize>([Note; PLACES]);

impl<const PLACES: usize> Notes<PLACES> {
    fn note(&self, start: usize, len: usize) -> Option<Passing<'_>> {
        let free = |note: &&Note| {
            let took = note
                .start
                .compare_exchange(0, TAKEN, Ordering::SeqCst, Ordering::Relaxed);
            took.is_ok()
        };
        let note = self.0.iter().find(free)?;
        note.end.store(start.saturating_add(len), Ordering::Relaxed);
        // Release: who sees the start sees the end.
        note.start.store(start.max(1), Ordering::Release);
        fence(Ordering::SeqCst);
        Some(Passing(note))
    }

    fn touch(&self, start: usize, end: usize) -> bool {
        fence(Ordering::SeqCst);
        self.0
            .iter()
            .any(|note| match note.start.load(Ordering::Acquire) {
                0 => false,
                TAKEN => true,
                first => first < end && start < note.end.load(Ordering::Relaxed),
            })
    }

    fn clear(&self) {
        for note in &self.0 {
            note.start.store(0, Ordering::Relaxed);
        }
    }
}

/// A note, until it is dropped.
pub(crate) struct Passing<'a>(&'a Note);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        // Release: the kernel's call comes before.
        self.0.start.store(0, Ordering::Release);
    }
}

/// Notes that a range is about to be discarded without the lock. `None` where too many are.
pub(crate) fn note(start: usize, len: usize) -> Option<Passing<'static>> {
    NOTES.note(start, len)
}

/// Whether memory of `[start, end)` is being discarded without the lock. For windows, with the lock held.
pub(crate) fn touch(start: usize, end: usize) -> bool {
    NOTES.touch(start, end)
}

/// In a fork child: its parent's other threads are not in it.
pub(crate) fn forget() {
    NOTES.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_noted_until_its_call_has_ended() {
        let notes = Notes::<2>([const { Note::free() }; 2]);
        assert!(!notes.touch(0, usize::MAX));
        let first = notes.note(0x10_0000, 0x2000);
        let second = notes.note(0, usize::MAX).expect("a place");
        assert!(notes.note(0x30_0000, 1).is_none(), "two places");
        drop(second);
        assert!(notes.touch(0x10_1000, 0x10_2000) && notes.touch(0, 0x10_0001));
        assert!(!notes.touch(0x10_2000, 0x20_0000) && !notes.touch(0, 0x10_0000));
        drop(first);
        assert!(!notes.touch(0, usize::MAX));
        // One that has no range yet may have any.
        notes.0[1].start.store(TAKEN, Ordering::SeqCst);
        assert!(notes.touch(0x1000, 0x2000));
        notes.clear();
        assert!(!notes.touch(0, usize::MAX));
    }
}
