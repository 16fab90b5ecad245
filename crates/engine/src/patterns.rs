//! Patterns: which slots the pages of a chunk were merged with last, by the chunk's place in its region.
//!
//! Equal guests have equal things at equal places, so the next guest's chunk at the same place is most likely merged
//! in the same way: see [`follow`](crate::plan). A pattern holds no refs, and its slots may be dead or full by then:
//! whoever uses it wins a ref of each or reads the page.
//!
//! There is one for each place, so they take less than a thousandth of the memory of the largest guest.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::bodies::Slots;
use crate::realm::lock;

/// The fewest merged pages that make a pattern worth following.
pub(crate) const LEAST: usize = 64;

/// The patterns of a realm.
#[derive(Debug, Default)]
pub(crate) struct Patterns(Mutex<HashMap<u64, Arc<Slots>>>);

impl Patterns {
    /// That of `place`.
    pub(crate) fn get(&self, place: u64) -> Option<Arc<Slots>> {
        lock(&self.0).get(&place).cloned()
    }

    /// Notes how the chunk at `place` is merged now.
    pub(crate) fn note(&self, place: u64, slots: &Slots) {
        let mut patterns = lock(&self.0);
        if patterns.get(&place).is_none_or(|known| **known != *slots) {
            patterns.insert(place, Arc::new(slots.clone()));
        }
    }

    /// Bytes of memory on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        let patterns = lock(&self.0);
        let each = |slots: &Arc<Slots>| size_of::<Slots>() + slots.memory_bytes();
        let table = patterns.capacity() * size_of::<(u64, Arc<Slots>)>();
        table + patterns.values().map(each).sum::<usize>()
    }
}
