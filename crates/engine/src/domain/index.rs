//! From fingerprint to candidate or slot: what the engine asks of an index.
//!
//! No entry is trusted. A slot needs a new ref, a candidate needs the exchange, and the agent compares all bytes at
//! the end. So an index only has to keep each single operation atomic.

use sdtree::SdTree;

use crate::page::{Entry, Fingerprint};

/// A concurrent map from fingerprints to entries.
pub(crate) trait Index: Send + Sync {
    /// Notes that `keys` will be asked for next, so that memory they are in can be fetched.
    fn expect(&self, keys: &[Fingerprint]);

    /// The entry of `key`.
    fn get(&self, key: Fingerprint) -> Option<Entry>;

    /// Enters `new` unless `key` has an entry, which it then gives.
    fn get_or_insert(&self, key: Fingerprint, new: Entry) -> Option<Entry>;

    /// Replaces `current` by `new`.
    ///
    /// # Errors
    /// The entry found instead; an ordinary outcome.
    fn compare_exchange(
        &self,
        key: Fingerprint,
        current: Entry,
        new: Entry,
    ) -> Result<(), Option<Entry>>;

    /// Removes the entry if it is `current`.
    fn remove_if(&self, key: Fingerprint, current: Entry) -> bool;

    /// How many entries there are.
    #[cfg_attr(not(test), allow(dead_code))]
    fn len(&self) -> usize;

    /// Bytes of memory the index holds.
    fn memory_bytes(&self) -> usize;

    /// Shows every entry; those that come or go meanwhile may be missed.
    fn for_each(&self, each: &mut dyn FnMut(Fingerprint, Entry));
}

/// The index as it is: a lock-free tree, so that no worker ever waits for another.
impl Index for SdTree<u64> {
    fn expect(&self, keys: &[Fingerprint]) {
        self.prefetch(keys.iter().map(|key| key.0));
    }

    fn get(&self, key: Fingerprint) -> Option<Entry> {
        self.get(key.0).map(Entry::unpack)
    }

    fn get_or_insert(&self, key: Fingerprint, new: Entry) -> Option<Entry> {
        let inserted = self.get_or_insert(key.0, new.pack());
        inserted.existing().map(Entry::unpack)
    }

    fn compare_exchange(
        &self,
        key: Fingerprint,
        current: Entry,
        new: Entry,
    ) -> Result<(), Option<Entry>> {
        let exchanged = self.compare_exchange(key.0, current.pack(), new.pack());
        exchanged
            .map(drop)
            .map_err(|found| found.map(Entry::unpack))
    }

    fn remove_if(&self, key: Fingerprint, current: Entry) -> bool {
        self.remove_if(key.0, current.pack()).is_ok()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn memory_bytes(&self) -> usize {
        self.memory_bytes()
    }

    fn for_each(&self, each: &mut dyn FnMut(Fingerprint, Entry)) {
        for (key, value) in self {
            each(Fingerprint(key), Entry::unpack(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Site, Slot};

    #[test]
    fn an_entry_goes_from_candidate_to_slot_to_nothing() {
        let tree = SdTree::<u64>::new();
        let index: &dyn Index = &tree;
        let key = Fingerprint(u128::MAX - 5);
        let site = |page| Entry::Candidate(Site { chunk: 3, page });
        let slot = Entry::Canonical(Slot(9));
        assert_eq!(index.get_or_insert(key, site(1)), None);
        assert_eq!(index.get_or_insert(key, site(2)), Some(site(1)));
        assert_eq!(
            index.compare_exchange(key, site(2), slot),
            Err(Some(site(1)))
        );
        assert_eq!(index.compare_exchange(key, site(1), slot), Ok(()));
        assert!(!index.remove_if(key, site(1)));
        let mut all = Vec::new();
        index.for_each(&mut |key, entry| all.push((key, entry)));
        assert_eq!((all, index.len()), (vec![(key, slot)], 1));
        assert!(index.remove_if(key, slot));
        assert_eq!((index.get(key), index.len()), (None, 0));
        assert_eq!(index.compare_exchange(key, slot, site(1)), Err(None));
    }
}
