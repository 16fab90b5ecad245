//! A change of the pages of a chunk. Its effects are carried out and counted when it ends, on each way out.
//!
//! Refs that go, entries that leave an index and counters are all of one act. A page whose tag says that it maps
//! nothing, while its ref is still held, would break I4 for the next reader of the tables.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::page::{Entry, Fingerprint, Site, Slot, StoreId, Tag};
use crate::sync::{Guard, lock};

/// The pages of a chunk, locked to be changed.
pub(crate) struct Change<'a> {
    pub(crate) guest: &'a Guest,
    pub(crate) chunk: &'a Arc<Chunk>,
    pages: Guard<'a, Pages>,
    pub(crate) effects: Effects,
}

/// The effects of a change, beyond the pages themselves.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    /// Candidates to remove from the index they are in.
    pub(crate) forget: Vec<(StoreId, Fingerprint, Site)>,
    /// Refs of slots that were never mapped: dropped at once.
    pub(crate) unref: Vec<Slot>,
    /// Merged pages that no longer map their slot: the ref waits for the lifeline.
    pub(crate) leave: Vec<Slot>,
    /// Asked pages whose fate is unknown: likewise.
    pub(crate) keep: Vec<Slot>,
}

impl Guest {
    /// Begins a change of one of its chunks, unless another thread is at work with it.
    pub(crate) fn change<'a>(&'a self, chunk: &'a Arc<Chunk>) -> Option<Change<'a>> {
        Some(Change {
            guest: self,
            chunk,
            pages: chunk.try_lock()?,
            effects: Effects::default(),
        })
    }
}

impl Change<'_> {
    /// Gives up what `page` holds; the caller sets its new state.
    pub(crate) fn discard(&mut self, page: usize) {
        let (pages, effects) = (&self.pages, &mut self.effects);
        match pages.tag(page) {
            Tag::Candidate => {
                let entered = (pages.home(page), pages.fingerprint(page), pages.site(page));
                effects.forget.push(entered);
            }
            Tag::Planned => effects.unref.push(pages.slot(page)),
            Tag::Asked => effects.keep.push(pages.slot(page)),
            Tag::Merged => effects.leave.push(pages.slot(page)),
            _ => {}
        }
    }

    /// Gives up what `page` holds: it is `tag` from now on.
    pub(crate) fn turn(&mut self, page: usize, tag: Tag) {
        self.discard(page);
        self.pages.set(page, tag);
    }

    /// Takes back the plans for some pages that no agent was asked for; `then` says what these are now.
    pub(crate) fn withdraw(
        &mut self,
        some: impl IntoIterator<Item = usize>,
        then: impl Fn(&mut Pages, usize),
    ) {
        for page in some {
            if self.pages.tag(page).is_planned() {
                self.discard(page);
                then(&mut self.pages, page);
            }
        }
    }

    /// Takes back all such plans: their pages are settled again.
    pub(crate) fn withdraw_all(&mut self) {
        let busy = self.pages.busy;
        self.withdraw(busy.pages(), |pages, page| pages.set(page, Tag::Settled));
    }
}

impl Deref for Change<'_> {
    type Target = Pages;

    fn deref(&self) -> &Pages {
        &self.pages
    }
}

impl DerefMut for Change<'_> {
    fn deref_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let (guest, effects) = (self.guest, &mut self.effects);
        let domain = &guest.domain;
        for (home, key, site) in effects.forget.drain(..) {
            domain.index(home).remove_if(key, Entry::Candidate(site));
        }
        if !effects.leave.is_empty() {
            let view = domain.slots.view();
            effects.leave.iter().for_each(|&slot| view.leave(slot));
            effects.keep.append(&mut effects.leave);
        }
        if !effects.keep.is_empty() {
            lock(&guest.ledger).release(&mut effects.keep);
        }
        domain.drop_refs(&mut effects.unref);
        guest.counters.count(&mut self.pages);
    }
}
