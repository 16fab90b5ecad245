//! Patterns: which slots the pages of a chunk were merged with last, by the chunk's place in its region.
//!
//! Equal guests have equal things at equal places, so the next guest's chunk at the same place is most likely merged
//! in the same way: see [`predict`](crate::merge::predict). A pattern holds no refs, and its slots may be dead or full by then:
//! whoever uses it wins a ref of each or reads the page.
//!
//! There is one for each place, so they take less than a thousandth of the memory of the largest guest. A guest may claim places
//! as it likes, so together they take no more than a user's tables may.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::domain::sparse::PageSlots;
use crate::sync::lock;

/// The fewest merged pages that make a pattern worth following.
pub(crate) const LEAST: usize = 64;

/// The patterns of a domain.
#[derive(Debug, Default)]
pub(crate) struct Patterns(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    by_place: HashMap<u64, Arc<PageSlots>>,
    /// What they take, about.
    bytes: usize,
}

/// What a pattern takes, about.
fn cost(slots: &PageSlots) -> usize {
    2 * size_of::<(u64, Arc<PageSlots>)>() + size_of::<PageSlots>() + slots.memory_bytes()
}

impl Patterns {
    /// That of `place`.
    pub(crate) fn get(&self, place: u64) -> Option<Arc<PageSlots>> {
        lock(&self.0).by_place.get(&place).cloned()
    }

    /// Notes how the chunk at `place` is merged now, unless all patterns would take more than `most` bytes.
    pub(crate) fn note(&self, place: u64, slots: &PageSlots, most: usize) {
        let mut table = lock(&self.0);
        let known = table.by_place.get(&place);
        if known.is_some_and(|known| **known == *slots) {
            return;
        }
        let others = table.bytes - known.map_or(0, |known| cost(known));
        let copy = slots.clone(); // takes no more room than it needs
        let bytes = others + cost(&copy);
        if bytes <= most {
            table.by_place.insert(place, Arc::new(copy));
            table.bytes = bytes;
        }
    }

    /// Bytes of memory on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        lock(&self.0).bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Slot;

    #[test]
    fn places_without_end_take_no_more_than_they_may() {
        let patterns = Patterns::default();
        let mut slots = PageSlots::default();
        slots.set(3, Slot(7));
        let most = 10 * cost(&slots.clone());
        (0..100).for_each(|place| patterns.note(place, &slots, most));
        assert!(patterns.get(9).is_some() && patterns.get(10).is_none());
        assert!(patterns.memory_bytes() <= most);
        slots.set(4, Slot(9));
        slots.remove(3);
        patterns.note(2, &slots, most);
        assert_eq!(
            patterns.get(2).as_deref(),
            Some(&slots),
            "a known one is renewed"
        );
    }
}
