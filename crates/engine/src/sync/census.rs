//! How often each lock is taken, in which way, and for how long: counted while [`scale`](crate::scale) measures.
//!
//! At other times a lock costs one load of a word that no thread writes. While it is on, each thread counts locally, and hands its
//! counts in at the end. A shared counter would itself be contended.
//!
//! A lock class may have many locks, a chunk's in each chunk. A crowd meets at one of them. So locks are counted by their address.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

static ON: AtomicBool = AtomicBool::new(false);
static ALL: Mutex<Option<Uses>> = Mutex::new(None);

thread_local! {
    static OWN: RefCell<Uses> = RefCell::default();
}

/// How a lock was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Use {
    /// Times it was taken.
    pub(crate) taken: u64,
    /// Those of them that found it taken.
    pub(crate) busy: u64,
    /// How long it was held alone.
    pub(crate) held: Duration,
}

impl Use {
    pub(crate) fn add(&mut self, other: Self) {
        self.taken += other.taken;
        self.busy += other.busy;
        self.held += other.held;
    }
}

/// A lock: the name of its class, and where it is.
pub(crate) type Which = (&'static str, usize);

/// What is known of each lock.
pub(crate) type Uses = HashMap<Which, Use>;

/// A lock with a place in the order.
pub(super) fn ordered<L>(place: u8, lock: &L) -> Which {
    (
        super::NAMES[usize::from(place)],
        std::ptr::from_ref(lock).addr(),
    )
}

/// A plain mutex, by what it is of.
pub(super) fn plain<T>(lock: &Mutex<T>) -> Which {
    let name = std::any::type_name::<T>();
    (name, std::ptr::from_ref(lock).addr())
}

/// Counts from now on.
pub(crate) fn begin() {
    ON.store(true, Relaxed);
}

/// Counts no more.
pub(crate) fn end() {
    ON.store(false, Relaxed);
}

/// Adds what this thread has counted to the counts of all.
pub(crate) fn hand_in() {
    let mine = OWN.take().into_iter();
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    mine.for_each(|(which, its)| all.entry(which).or_default().add(its));
}

/// Takes all that this thread, and threads that have handed in, have counted.
pub(crate) fn collect() -> Uses {
    hand_in();
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.take().unwrap_or_default()
}

/// Who may hold a lock at a time.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// Beside other readers.
    Beside,
    /// One.
    Alone,
}

/// A lock that is held, and counted when it is dropped.
pub(super) struct Note {
    pub(super) which: Which,
    way: Way,
    busy: bool,
    since: Instant,
}

impl Note {
    pub(super) fn begin(which: Which, way: Way, busy: bool) -> Self {
        Self {
            which,
            way,
            busy,
            since: Instant::now(),
        }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let used = Use {
            taken: 1,
            busy: u64::from(self.busy),
            held: match self.way {
                Way::Alone => self.since.elapsed(),
                Way::Beside => Duration::ZERO,
            },
        };
        // A thread that ends has none any more.
        let add = |own: &RefCell<Uses>| own.borrow_mut().entry(self.which).or_default().add(used);
        let _ = OWN.try_with(add);
    }
}

/// Takes a lock: `free` gives it if no other thread has it, `wait` waits for it.
pub(super) fn take<G>(
    (which, way): (Which, Way),
    free: impl FnOnce() -> Option<G>,
    wait: impl FnOnce() -> G,
) -> (G, Option<Note>) {
    let on = ON.load(Relaxed);
    let (inner, busy) = match free() {
        Some(inner) => (inner, false),
        None => (wait(), true),
    };
    (inner, on.then(|| Note::begin(which, way, busy)))
}

/// The same of a lock that was only tried, and is had. It counts as one beside others: most of these are of chunks, for which no
/// thread waits.
pub(super) fn had(which: Which) -> Option<Note> {
    ON.load(Relaxed)
        .then(|| Note::begin(which, Way::Beside, false))
}
