//! A change of the pages of a chunk. Its effects are carried out and counted when it ends, on each way out.
//!
//! Refs that go, entries that leave an index and counters are all of one act. A page whose tag says that it maps
//! nothing, while its ref is still held, would break I4 for the next reader of the tables.

use std::ops::Deref;

use crate::domain::chunk::Chunk;
use crate::domain::effects::Effects;
use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::sync::Guard;

/// The pages of a chunk, locked to be changed.
pub(crate) struct Change<'a> {
    guest: &'a Guest,
    pages: Guard<'a, Pages>,
    effects: Effects,
}

impl Guest {
    /// Begins a change of one of its chunks, unless another thread is at work with it.
    pub(crate) fn change<'a>(&'a self, chunk: &'a Chunk) -> Option<Change<'a>> {
        Some(Change {
            guest: self,
            pages: chunk.try_lock()?,
            effects: Effects::default(),
        })
    }
}

impl Change<'_> {
    /// The pages, and where what follows is collected.
    pub(crate) fn parts(&mut self) -> (&mut Pages, &mut Effects) {
        (&mut self.pages, &mut self.effects)
    }
}

impl Deref for Change<'_> {
    type Target = Pages;

    fn deref(&self) -> &Pages {
        &self.pages
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.guest
            .domain
            .apply(&self.guest.ledger, &mut self.effects);
        self.guest.counters.count(&mut self.pages);
    }
}
