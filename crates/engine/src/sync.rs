//! Locks, and the order in which a thread may take them.
//!
//! A thread that holds a lock takes only locks that stand further down in the table below.
//!
//! Debug builds assert this at each lock. A lock that is only tried may be tried at any time, for a thread that
//! gets nothing does not wait. A lock that the thread takes afterwards must still stand below it. That is how a look
//! reaches the pages of a chunk with OFFERS held, while a job waits for TALK with its chunk held.
//!
//! SEGMENTS and CHUNKS are read-write locks. To read one twice at a time is a fault as well: a writer that came between
//! would wait for the first, and the second for the writer.
//!
//! All other locks are plain mutexes: a thread that holds one waits for no lock of this list but QUEUE, VALUES and, in the walk over frames and
//! where the table of slots grows, SEGMENTS.
//!
//! Workers run on idle CPUs only, and all users of the host can keep the CPUs busy. So any other thread that waits long for a
//! lock has the workers run ([`priority::wait`]); for TALK it does not, as its holder may wait for an agent.
//!
//! [`census`] counts them all while [`scale`](crate::scale) measures.

pub(crate) mod census;

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, LockResult, Mutex, MutexGuard};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockResult};
use std::time::Duration;

use sys::priority::{self, free, unpoisoned};

/// Gives each lock its place, and its name to the [`census`].
macro_rules! order {
    ($($lock:ident: $what:literal;)*) => {
        #[allow(clippy::upper_case_acronyms)]
        enum Place { $($lock),* }
        $(
            #[doc = $what]
            pub(crate) const $lock: u8 = Place::$lock as u8;
        )*
        /// By place.
        const NAMES: &[&str] = &[$(stringify!($lock)),*];
    };
}

order! {
    KNOBS:    "The knobs turned by hand: held while they are turned.";
    BUDGET:   "The CPU time.";
    GUESTS:   "The list of guests.";
    DOMAINS:  "The table of domains.";
    CHUNK:    "The pages of a chunk: only tried. A job or a look has it, or comes again.";
    TALK:     "The connection to an agent: a job that insists waits for it, with its chunk.";
    CLAIMS:   "Pages of former sessions.";
    OFFERS:   "The regions of a guest.";
    IDLE:     "Its idle blocks.";
    LEDGER:   "Its refs that wait for lifelines.";
    FORMER:   "The refs of former engines.";
    HANDOVER: "The manifest of a domain.";
    SEGMENTS: "The refs of slots: read for a batch of operations.";
    CHUNKS:   "The table of chunks.";
    QUEUE:    "The jobs: nothing is taken under it. A worker waits for jobs with it.";
    VALUES:   "The knobs' values: held to copy them.";
}

/// A mutex with a place in the order.
#[derive(Debug, Default)]
pub(crate) struct Ordered<T, const PLACE: u8>(Mutex<T>);

impl<T, const PLACE: u8> Ordered<T, PLACE> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Takes the lock, unless another thread has it.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let inner = free(self.0.try_lock())?;
        let note = census::had(census::ordered(PLACE, self));
        Some(InOrder {
            inner,
            note,
            _held: Some(Held::note(PLACE)),
        })
    }
}

/// A read-write lock with a place in the order.
#[derive(Debug, Default)]
pub(crate) struct OrderedRw<T, const PLACE: u8>(RwLock<T>);

impl<T, const PLACE: u8> OrderedRw<T, PLACE> {
    /// Locks it to read; as [`lock`].
    pub(crate) fn read(&self) -> InOrder<RwLockReadGuard<'_, T>> {
        let which = (census::ordered(PLACE, self), Way::Beside);
        InOrder::take(Some(PLACE), which, || self.0.try_read(), || self.0.read())
    }

    /// Locks it to write; as [`lock`].
    pub(crate) fn write(&self) -> InOrder<RwLockWriteGuard<'_, T>> {
        let which = (census::ordered(PLACE, self), Way::Alone);
        InOrder::take(Some(PLACE), which, || self.0.try_write(), || self.0.write())
    }
}

/// A lock that is held.
pub(crate) struct InOrder<G> {
    inner: G,
    /// Behind the lock: what counts is not in the time for which it is held.
    note: Option<Note>,
    /// None of a lock without a place.
    _held: Option<Held>,
}

impl<G> InOrder<G> {
    /// Takes a lock that is only tried by `tried`, and waited for by `wait`.
    ///
    /// A thread that waits for one of a worker's, which runs on idle CPUs only, has it run: see [`priority::wait`].
    fn take(
        place: Option<u8>,
        which: (Which, Way),
        tried: impl Fn() -> TryLockResult<G>,
        wait: impl Fn() -> LockResult<G>,
    ) -> Self {
        place.into_iter().for_each(held::assert_above);
        let tried = || free(tried());
        let wait = || unpoisoned(wait());
        let (inner, note) = match place {
            // A job holds it while it waits for an agent, which could make the whole daemon hurry.
            Some(TALK) => census::take(which, tried, wait),
            _ => census::take(which, tried, || priority::wait(tried, wait)),
        };
        Self {
            inner,
            note,
            _held: place.map(Held::note),
        }
    }
}

/// A mutex that is held.
pub(crate) type Guard<'a, T> = InOrder<MutexGuard<'a, T>>;

impl<G: Deref> Deref for InOrder<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.inner
    }
}

impl<G: DerefMut> DerefMut for InOrder<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.inner
    }
}

impl<'a, T> Guard<'a, T> {
    /// Waits for `changed`, without the lock meanwhile.
    pub(crate) fn wait(self, changed: &Condvar) -> Self {
        self.aside(|inner| unpoisoned(changed.wait(inner)))
    }

    /// The same for `most` at the most.
    pub(crate) fn wait_at_most(self, changed: &Condvar, most: Duration) -> Self {
        self.aside(|inner| unpoisoned(changed.wait_timeout(inner, most)).0)
    }

    /// Waits for `changed` while it `waits`.
    pub(crate) fn wait_while(self, changed: &Condvar, waits: impl FnMut(&mut T) -> bool) -> Self {
        self.aside(|inner| unpoisoned(changed.wait_while(inner, waits)))
    }

    /// The same for `most` at the most.
    pub(crate) fn wait_at_most_while(
        self,
        changed: &Condvar,
        most: Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) -> Self {
        self.aside(|inner| unpoisoned(changed.wait_timeout_while(inner, most, waits)).0)
    }

    /// Does `wait`, which gives the lock up and takes it again.
    fn aside(mut self, wait: impl FnOnce(MutexGuard<'a, T>) -> MutexGuard<'a, T>) -> Self {
        let which = self.note.take().map(|note| note.which);
        self.inner = wait(self.inner);
        self.note = which.map(|which| Note::begin(which, Way::Alone, false));
        self
    }
}

/// Locks; a thread that panicked while it held the lock has ended the whole process.
///
/// # Panics
/// In debug builds, when the thread holds a lock that stands at the same place or below.
pub(crate) fn lock<L: Locks>(mutex: &L) -> Guard<'_, L::Inner> {
    mutex.lock_in_order()
}

/// What [`lock`] takes.
pub(crate) trait Locks {
    type Inner;
    fn lock_in_order(&self) -> Guard<'_, Self::Inner>;
}

impl<T> Locks for Mutex<T> {
    type Inner = T;

    fn lock_in_order(&self) -> Guard<'_, T> {
        let which = (census::plain(self), Way::Alone);
        InOrder::take(None, which, || self.try_lock(), || self.lock())
    }
}

impl<T, const PLACE: u8> Locks for Ordered<T, PLACE> {
    type Inner = T;

    fn lock_in_order(&self) -> Guard<'_, T> {
        let which = (census::ordered(PLACE, self), Way::Alone);
        InOrder::take(Some(PLACE), which, || self.0.try_lock(), || self.0.lock())
    }
}

impl<L: Locks> Locks for Arc<L> {
    type Inner = L::Inner;

    fn lock_in_order(&self) -> Guard<'_, L::Inner> {
        L::lock_in_order(self)
    }
}

use census::{Note, Way, Which};
use held::Held;

/// The places of the locks that a thread holds, in builds with assertions.
mod held {
    use std::cell::RefCell;

    thread_local! {
        static HELD: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn assert_above(place: u8) {
        if cfg!(debug_assertions) {
            HELD.with_borrow(|held| {
                let above = held.iter().all(|&held| held < place);
                assert!(above, "the order of locks: {place} under {held:?}");
            });
        }
    }

    /// A place, until it is dropped.
    pub(super) struct Held(u8);

    impl Held {
        pub(super) fn note(place: u8) -> Self {
            if cfg!(debug_assertions) {
                HELD.with_borrow_mut(|held| held.push(place));
            }
            Self(place)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            if cfg!(debug_assertions) {
                HELD.with_borrow_mut(|held| {
                    let at = held.iter().rposition(|&place| place == self.0);
                    held.swap_remove(at.expect("a lock that is held has its place noted"));
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_downwards() {
        let (above, below) = (Ordered::<_, TALK>::new(1), Ordered::<_, LEDGER>::new(2));
        let sum = *lock(&above) + *lock(&below);
        assert_eq!(sum, 3);
        let held = lock(&below);
        let tried = above.try_lock();
        assert!(tried.is_some(), "a try never waits");
        drop((held, tried));
        drop(lock(&above));
    }

    #[test]
    #[should_panic(expected = "the order of locks: 12 under [12]")]
    fn to_read_twice_at_a_time_is_a_fault() {
        let table = OrderedRw::<u8, SEGMENTS>::default();
        let _held = table.read();
        drop(table.read());
    }

    #[test]
    #[should_panic(expected = "the order of locks: 5 under [9]")]
    fn upwards_is_a_fault() {
        let (above, below) = (Ordered::<_, TALK>::new(1), Ordered::<_, LEDGER>::new(2));
        let _held = lock(&below);
        drop(lock(&above));
    }
}
