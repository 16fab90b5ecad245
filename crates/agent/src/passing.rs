//! Calls over memory that the kernel carries out without the lock.
//!
//! Where nothing is offered or stored a call passes as it came. A discard may wait there for a thread of the program
//! that reads the events of a userfaultfd, and that thread may be in a hook. Meanwhile memory of the range may be offered: by another
//! thread, and under `--any` by the agent. A window that had a page of it out would let it miss the discard, and would bring its old content
//! back; or lose what `mremap` moves away.
//!
//! To discard once more behind the call is no answer: another thread may have seen the zeros of the first, and written. So the thread
//! notes the range **before** it asks for the last time whether something is offered there, and no window takes a page that is noted:
//!
//! ```text
//!  the thread                          the agent's thread
//!  note the range                      (under the lock) the page is offered
//!  is something offered there?         …
//!    no: the kernel's call             (under the lock) is the page noted? then it is not taken out
//!    yes: the call with the lock
//!  take the note back
//! ```
//!
//! A thread that knows that something is offered makes no note: it would keep windows away while it waits for the lock.
//!
//! One of both sees the other's mark, for a fence stands between mark and look. A note may be left behind: a handler jumped out of the
//! call, or a child made by a bare clone(2) copied it. It keeps windows from its range, or from all memory if that was between two of
//! its stores. It costs no byte.

use std::sync::atomic::{AtomicUsize, Ordering, fence};

use crate::config::config;
use crate::table::touches;

/// So many notes have a place at a time. Further ones stand for all memory.
const MOST: usize = 16;

static NOTES: Notes<MOST> = Notes::none();

/// A range: its first address and the one after its last.
pub(crate) struct Note {
    /// 0 for a free place, [`TAKEN`] until the range is there.
    start: AtomicUsize,
    end: AtomicUsize,
}

/// No address of the program's.
const TAKEN: usize = usize::MAX;

struct Notes<const PLACES: usize> {
    places: [Note; PLACES],
    /// Notes of all memory.
    all: AtomicUsize,
}

impl<const PLACES: usize> Notes<PLACES> {
    const fn none() -> Self {
        let places = [const {
            Note {
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
            }
        }; PLACES];
        let all = AtomicUsize::new(0);
        Self { places, all }
    }

    fn note(&self, start: usize, len: usize) -> Passing<'_> {
        let order = (Ordering::Relaxed, Ordering::Relaxed);
        let free = |note: &&Note| {
            let took = note.start.compare_exchange(0, TAKEN, order.0, order.1);
            took.is_ok()
        };
        let noted = match self.places.iter().find(free) {
            Some(note) => {
                note.end.store(start.saturating_add(len), Ordering::Relaxed);
                // Release: who sees the start sees the end.
                note.start.store(start.max(1), Ordering::Release);
                Passing::In(note, start.max(1))
            }
            None => {
                self.all.fetch_add(1, Ordering::Relaxed);
                Passing::Everywhere(&self.all)
            }
        };
        fence(Ordering::SeqCst);
        noted
    }

    fn touch(&self, start: usize, end: usize) -> bool {
        fence(Ordering::SeqCst);
        let touches = |note: &Note| match note.start.load(Ordering::Acquire) {
            0 => false,
            TAKEN => true,
            first => first < end && start < note.end.load(Ordering::Relaxed),
        };
        self.all.load(Ordering::Acquire) != 0 || self.places.iter().any(touches)
    }

    fn clear(&self) {
        let starts = self.places.iter().map(|note| &note.start);
        for word in starts.chain([&self.all]) {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// A note, until it is dropped.
pub(crate) enum Passing<'a> {
    /// The place, and the range's start.
    In(&'a Note, usize),
    Everywhere(&'a AtomicUsize),
}

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        // Release: the kernel's call comes before. In a child that a handler forked off, the note is gone already.
        let order = (Ordering::Release, Ordering::Relaxed);
        let _ = match self {
            Self::In(note, start) => note.start.compare_exchange(*start, 0, order.0, order.1),
            Self::Everywhere(all) => {
                all.fetch_update(order.0, order.1, |count| count.checked_sub(1))
            }
        };
    }
}

/// Notes that a range may be discarded without the lock from now on.
pub(crate) fn note(start: usize, len: usize) -> Passing<'static> {
    NOTES.note(start, len)
}

/// The same for other calls, over memory of which nothing is known. A program that offers memory itself orders its threads' calls over it;
/// the agent, which offers for it, does not.
pub(crate) fn note_if_any(start: usize, len: usize) -> Option<Passing<'static>> {
    let is_news = config().any.is_some() && !touches(start, len);
    is_news.then(|| note(start, len))
}

/// Whether there is a note of memory in `[start, end)`. For windows, with the lock held.
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
        let notes = Notes::<2>::none();
        assert!(!notes.touch(0, usize::MAX));
        let first = notes.note(0x10_0000, 0x2000);
        let second = notes.note(0, 0x1000);
        assert!(notes.touch(0x10_1000, 0x10_2000) && notes.touch(0, 0x10_0001));
        assert!(!notes.touch(0x10_2000, 0x20_0000) && !notes.touch(0x1000, 0x10_0000));
        // There are two places: a third is of all memory.
        let third = notes.note(0x30_0000, 1);
        assert!(notes.touch(0x50_0000, 0x60_0000));
        drop(third);
        assert!(!notes.touch(0x50_0000, 0x60_0000));
        drop(first);
        drop(second);
        assert!(!notes.touch(0, usize::MAX));
        // One that has no range yet may have any.
        notes.places[1].start.store(TAKEN, Ordering::SeqCst);
        assert!(notes.touch(0x1000, 0x2000));
        notes.clear();
        assert!(!notes.touch(0, usize::MAX));
        // One that was forgotten meanwhile takes no other's place.
        let forgotten = notes.note(0x1000, 0x1000);
        notes.clear();
        let other = notes.note(0x5000, 0x1000);
        drop(forgotten);
        assert!(notes.touch(0x5000, 0x6000));
        drop(other);
        assert!(!notes.touch(0, usize::MAX));
    }
}
