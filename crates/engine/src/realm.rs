//! A realm: what the guests of one domain share. Pages of two realms never meet (I6).

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::account::{Home, Slots};
use crate::chunk::{Chunks, Pages};
use crate::guest::Guest;
use crate::index::Index;
use crate::page::{Entry, Fingerprint, Site, Slot, Tag};
use crate::store::Store;

/// Index, store and tables of one domain.
pub(crate) struct Realm {
    pub(crate) domain: String,
    pub(crate) index: Box<dyn Index>,
    pub(crate) store: Box<dyn Store>,
    pub(crate) slots: Slots,
    pub(crate) chunks: Chunks,
}

impl Realm {
    /// An empty realm whose store is at `home`.
    pub(crate) fn new(
        domain: &str,
        home: Home,
        index: Box<dyn Index>,
        store: Box<dyn Store>,
    ) -> Self {
        Self {
            domain: domain.to_owned(),
            index,
            store,
            slots: Slots::new(home),
            chunks: Chunks::default(),
        }
    }

    /// Carries out what a change of page states entails, and empties `effects`.
    pub(crate) fn apply(&self, guest: &Guest, effects: &mut Effects) {
        for (key, site) in effects.forget.drain(..) {
            self.index.remove_if(key, Entry::Candidate(site));
        }
        if !effects.leave.is_empty() {
            let view = self.slots.view();
            effects.leave.iter().for_each(|&slot| view.leave(slot));
            effects.keep.append(&mut effects.leave);
        }
        if !effects.keep.is_empty() {
            lock(&guest.ledger).release(&mut effects.keep);
        }
        self.drop_refs(&mut effects.unref);
    }

    /// Drops a ref for each of `slots`; what nobody refers to any more leaves the index and gives
    /// its frame back.
    pub(crate) fn drop_refs(&self, slots: &mut Vec<Slot>) {
        if slots.is_empty() {
            return;
        }
        let view = self.slots.view();
        slots.retain(|&slot| match view.unref(slot) {
            None => false,
            Some(key) => {
                self.index.remove_if(key, Entry::Canonical(slot));
                true
            }
        });
        drop(view);
        self.punch(slots);
        slots.clear();
    }

    fn punch(&self, dead: &mut [Slot]) {
        dead.sort_unstable();
        for run in dead.chunk_by(|a, b| a.0 + 1 == b.0) {
            if let Some(&first) = run.first()
                && let Err(error) = self.store.punch(first, run.len() as u64)
            {
                tracing::warn!(%error, "cannot give the frames of dead slots back");
            }
        }
        self.slots.bury(dead);
    }

    /// Bytes of memory the realm's tables hold, chunks aside.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.index.memory_bytes() + self.slots.memory_bytes() + self.chunks.memory_bytes()
    }
}

impl std::fmt::Debug for Realm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Realm")
            .field("domain", &self.domain)
            .finish_non_exhaustive()
    }
}

/// Locks; a thread that panicked while it held the lock has ended the whole process.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What follows from changes of page states. Collected while a chunk is locked, carried out by
/// [`Realm::apply`].
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Candidates to remove from the index.
    pub(crate) forget: Vec<(Fingerprint, Site)>,
    /// Refs of slots that were never mapped: dropped at once.
    pub(crate) unref: Vec<Slot>,
    /// Merged pages that no longer map their slot: the ref waits for the lifeline.
    pub(crate) leave: Vec<Slot>,
    /// Asked pages whose fate is unknown: likewise.
    pub(crate) keep: Vec<Slot>,
}

impl Effects {
    /// Gives up what `page` holds; the caller sets its new state.
    pub(crate) fn discard(&mut self, pages: &Pages, page: usize, site: Site) {
        match pages.tag(page) {
            Tag::Candidate => self.forget.push((pages.fingerprint(page), site)),
            Tag::Planned => self.unref.push(pages.slot(page)),
            Tag::Asked => self.keep.push(pages.slot(page)),
            Tag::Merged => self.leave.push(pages.slot(page)),
            _ => {}
        }
    }
}
