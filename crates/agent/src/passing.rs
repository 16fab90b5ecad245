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
//! A thread that unmaps its own stack and ends does not come back to take its note. The note has its number, and ends with it.
//!
//! One of both sees the other's mark, for a fence stands between mark and look. A note may be left behind: a handler jumped out of the
//! call, or a child made by a bare clone(2) copied it. It keeps windows from its range, or from all memory if that was between two of
//! its stores. It costs no byte.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};

use rustix::event::Timespec;
use rustix::thread::futex;
use sys::process::thread_id;
use sys::task::is_unknown;

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
    /// The thread with which it ends, or 0.
    leaving: AtomicU32,
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
                leaving: AtomicU32::new(0),
            }
        }; PLACES];
        let all = AtomicUsize::new(0);
        Self { places, all }
    }

    /// A place for a note of a range, if there is one: it is free again with the thread `leaving`, unless that is 0.
    fn place(&self, start: usize, len: usize, leaving: u32) -> Option<&Note> {
        let order = (Ordering::Relaxed, Ordering::Relaxed);
        let free = |note: &&Note| {
            let took = note.start.compare_exchange(0, TAKEN, order.0, order.1);
            took.is_ok()
        };
        let note = self.places.iter().find(free)?;
        note.end.store(start.saturating_add(len), Ordering::Relaxed);
        note.leaving.store(leaving, Ordering::Relaxed);
        // Release: who sees the start sees the rest.
        note.start.store(start.max(1), Ordering::Release);
        Some(note)
    }

    /// Notes a range until the thread `leaving` is gone. Tells whether there was a place.
    fn note_of_leaving(&self, start: usize, len: usize, leaving: u32) -> bool {
        let noted = self.place(start, len, leaving).is_some();
        fence(Ordering::SeqCst);
        noted
    }

    fn note(&self, start: usize, len: usize) -> Passing<'_> {
        let noted = match self.place(start, len, 0) {
            Some(note) => Passing::In(note, start.max(1)),
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
            first if note.has_left(first) => false,
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

impl Note {
    /// Whether the thread of this note, which begins at `first`, has left. Then its place is free.
    fn has_left(&self, first: usize) -> bool {
        let thread = self.leaving.load(Ordering::Relaxed);
        let left = thread != 0 && is_unknown(thread);
        if left {
            // If another note is there by now, it stays.
            let order = (Ordering::Relaxed, Ordering::Relaxed);
            let _ = self.start.compare_exchange(first, 0, order.0, order.1);
        }
        left
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

/// Whether all places stayed taken the last time: notes were left behind.
static CROWDED: AtomicBool = AtomicBool::new(false);

/// Notes that the calling thread unmaps a range, in which its stack lies, and ends. Where all places stay taken no note is made: **a
/// limit**. The thread holds a lock of libc's, so it waits for a moment only, and not where that was in vain before.
pub(crate) fn note_of_leaving(start: usize, len: usize) {
    const MOMENT: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let most = match CROWDED.load(Ordering::Relaxed) {
        true => 1,
        false => 20,
    };
    let nothing = AtomicU32::new(0);
    for left in (0..most).rev() {
        let noted = NOTES.note_of_leaving(start, len, thread_id());
        if noted || left == 0 {
            return CROWDED.store(!noted, Ordering::Relaxed);
        }
        // Frees the places of those that have left.
        NOTES.touch(start, start.saturating_add(len));
        let _ = futex::wait(&nothing, futex::Flags::PRIVATE, 0, Some(&MOMENT));
    }
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
    fn a_note_of_a_thread_that_leaves_ends_with_it() {
        static NOTES: Notes<1> = Notes::none();
        fn leave() {
            assert!(NOTES.note_of_leaving(0x1000, 0x1000, thread_id()));
        }
        for _ in 0..2 {
            std::thread::spawn(|| {
                leave();
                assert!(NOTES.touch(0x1000, 0x2000));
                assert!(!NOTES.note_of_leaving(0x9000, 1, thread_id()), "one place");
            })
            .join()
            .unwrap();
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while NOTES.touch(0x1000, 0x2000) {
                assert!(std::time::Instant::now() < deadline, "its thread is gone");
            }
        }
        // One without a thread stays until it is dropped.
        let noted = NOTES.note(0x1000, 0x1000);
        assert!(NOTES.touch(0x1000, 0x2000));
        drop(noted);
        assert!(!NOTES.touch(0, usize::MAX));
    }

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
