//! Patterns: the slots with which the pages of a chunk were merged last, by the chunk's place in its region.
//!
//! Equal guests have equal things at equal places, so the next guest's chunk at the same place is most likely merged
//! in the same way: see [`predict`](crate::merge::predict). A pattern holds no refs, and its slots may be dead or full by then:
//! the worker that uses it wins a ref of each or reads the page.
//!
//! There is one for each place, so they take less than a thousandth of the memory of the largest guest. A guest may claim places
//! as it likes, so together those of a user's domains take no more than his tables may.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};

use crate::domain::sparse::PageSlots;
use crate::sync::lock;
use crate::users::Holdings;

/// The fewest merged pages that make a pattern worth following.
pub(crate) const LEAST: usize = 64;

/// The patterns of a domain.
#[derive(Debug, Default)]
pub(crate) struct Patterns {
    table: Mutex<Table>,
    /// What the user has to whom the domain belongs.
    his: OnceLock<Arc<Holdings>>,
}

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
        lock(&self.table).by_place.get(&place).cloned()
    }

    /// Counts them in `his`, too; before the first is noted.
    pub(crate) fn charge(&self, his: &Arc<Holdings>) {
        // The first one keeps them.
        let _ = self.his.set(Arc::clone(his));
    }

    /// Notes how the chunk at `place` is merged now, unless all patterns of the user would take more than `most` bytes.
    pub(crate) fn note(&self, place: u64, slots: &PageSlots, most: usize) {
        let mut table = lock(&self.table);
        let known = table.by_place.get(&place);
        if known.is_some_and(|known| **known == *slots) {
            return;
        }
        let before = known.map_or(0, |known| cost(known));
        let copy = slots.clone(); // takes no more room than it needs
        let now = cost(&copy);
        let his = &self.his.get_or_init(Arc::default).patterns;
        // Counted before it is compared: other domains of his may grow at the same time.
        let all = his.fetch_add(now as u64, Relaxed) + now as u64 - before as u64;
        let fits = all <= most as u64;
        his.fetch_sub(if fits { before } else { now } as u64, Relaxed);
        if fits {
            table.by_place.insert(place, Arc::new(copy));
            table.bytes += now;
            table.bytes -= before;
        }
    }

    /// Bytes of memory on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        lock(&self.table).bytes
    }
}

impl Drop for Patterns {
    fn drop(&mut self) {
        if let Some(his) = self.his.get() {
            his.patterns.fetch_sub(self.memory_bytes() as u64, Relaxed);
        }
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
        let his = Arc::clone(patterns.his.get().expect("it was counted"));
        let another = Patterns::default();
        another.charge(&his);
        another.note(100, &slots, most);
        assert!(another.get(100).is_none(), "a domain more is no room more");
        another.note(100, &slots, most + cost(&slots.clone()));
        assert!(another.get(100).is_some());
        drop(another);
        assert_eq!(his.patterns.load(Relaxed), patterns.memory_bytes() as u64);
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
