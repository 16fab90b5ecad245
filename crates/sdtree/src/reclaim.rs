//! When unlinked memory is freed.
//!
//! A [`Guard`] keeps all memory alive that was reachable when it was made. [`Guard::defer`] frees a node once every guard of
//! that time is gone. crossbeam-epoch does this. On the machine of `docs/sdtree.md` a pin costs 4–7 ns against seize's 6–9 ns,
//! and retiring a node at two threads half of what seize's membarrier makes of it. Its registration is also free of locks,
//! seize's is not.
//!
//! Under `cfg(loom)` the collector is replaced by a strict one: it declares a node dead at the first moment at which
//! no guard exists, and every later touch of that node fails the model.

use crate::garbage::Garbage;

#[cfg(not(loom))]
mod epoch {
    use super::Garbage;

    /// The process-wide collector of crossbeam-epoch.
    pub(crate) struct Collector;

    /// Keeps alive what was reachable when it was made.
    pub(crate) struct Guard(crossbeam_epoch::Guard);

    impl Collector {
        pub(crate) fn new() -> Self {
            Self
        }

        #[inline]
        pub(crate) fn pin(&self) -> Guard {
            Guard(crossbeam_epoch::pin())
        }
    }

    impl Guard {
        /// Frees `garbage`, which no new guard can reach, when the present guards are gone.
        #[inline]
        pub(crate) fn defer(&self, garbage: Garbage) {
            self.0.defer(move || garbage.free());
        }

        /// Hands this thread's garbage to all threads, and frees what is ripe.
        pub(crate) fn flush(&self) {
            self.0.flush();
        }
    }
}

#[cfg(not(loom))]
pub(crate) use epoch::{Collector, Guard};

#[cfg(loom)]
mod model {
    use super::Garbage;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    /// A collector for models. Its lock is one that loom does not see, so it orders nothing.
    ///
    /// What a real collector orders, `ended` does: a node is freed only after all guards that could lead to it have ended, and
    /// a guard made after that sees the node unlinked. (It does a little more: any guard that has ended comes before any that
    /// is made later. Operations that overlap are not ordered by it, and those are what the models are about.)
    pub(crate) struct Collector(Arc<Shared>);

    struct Shared {
        state: Mutex<State>,
        ended: AtomicUsize,
    }

    #[derive(Default)]
    struct State {
        guards: usize,
        waiting: Vec<Garbage>,
        dead: Vec<Garbage>,
    }

    pub(crate) struct Guard(Arc<Shared>);

    impl Shared {
        fn state(&self) -> MutexGuard<'_, State> {
            self.state.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl Collector {
        pub(crate) fn new() -> Self {
            Self(Arc::new(Shared {
                state: Mutex::default(),
                ended: AtomicUsize::new(0),
            }))
        }

        pub(crate) fn pin(&self) -> Guard {
            self.0.state().guards += 1;
            self.0.ended.fetch_add(0, Ordering::Acquire);
            Guard(Arc::clone(&self.0))
        }
    }

    impl Guard {
        pub(crate) fn defer(&self, garbage: Garbage) {
            self.0.state().waiting.push(garbage);
        }

        pub(crate) fn flush(&self) {}
    }

    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.ended.fetch_add(1, Ordering::AcqRel);
            let mut state = self.0.state();
            state.guards -= 1;
            if state.guards == 0 {
                let ripe = std::mem::take(&mut state.waiting);
                ripe.iter().for_each(Garbage::declare_dead);
                state.dead.extend(ripe);
            }
        }
    }

    impl Drop for Collector {
        /// Models join their threads before they drop the tree: nothing can touch the dead any more.
        fn drop(&mut self) {
            let mut state = self.0.state();
            let rest = std::mem::take(&mut state.waiting);
            let dead = std::mem::take(&mut state.dead);
            drop(state);
            rest.into_iter().chain(dead).for_each(Garbage::free);
        }
    }
}

#[cfg(loom)]
pub(crate) use model::{Collector, Guard};
