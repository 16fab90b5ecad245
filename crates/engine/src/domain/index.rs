//! From fingerprint to candidate or slot: the operations that the engine asks of an index.
//!
//! No entry is trusted. A slot needs a new ref, a candidate needs the exchange, and the agent compares all bytes at
//! the end. So an index only has to keep each single operation atomic.

use sdtree::SdTree;

use crate::page::{Entry, Fingerprint};

/// A concurrent map from fingerprints to entries: a lock-free tree, so that no worker ever waits for another.
#[derive(Default)]
pub(crate) struct Index(pub(crate) SdTree<u64>);

impl Index {
    /// Notes that `keys` will be asked for next, so that memory they are in can be fetched.
    pub(crate) fn expect(&self, keys: &[Fingerprint]) {
        self.0.prefetch(keys.iter().map(|key| key.0));
    }

    /// The entry of `key`.
    pub(crate) fn get(&self, key: Fingerprint) -> Option<Entry> {
        self.0.get(key.0).map(Entry::unpack)
    }

    /// Enters `new` unless `key` has an entry, which it then gives.
    pub(crate) fn get_or_insert(&self, key: Fingerprint, new: Entry) -> Option<Entry> {
        let inserted = self.0.get_or_insert(key.0, new.pack());
        inserted.existing().map(Entry::unpack)
    }

    /// Replaces `current` by `new`.
    ///
    /// # Errors
    /// The entry found instead; an ordinary outcome.
    pub(crate) fn compare_exchange(
        &self,
        key: Fingerprint,
        current: Entry,
        new: Entry,
    ) -> Result<(), Option<Entry>> {
        let exchanged = self.0.compare_exchange(key.0, current.pack(), new.pack());
        exchanged
            .map(drop)
            .map_err(|found| found.map(Entry::unpack))
    }

    /// Removes the entry if it is `current`.
    pub(crate) fn remove_if(&self, key: Fingerprint, current: Entry) -> bool {
        self.0.remove_if(key.0, current.pack()).is_ok()
    }

    /// How many entries there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Bytes of memory the index holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// Every entry; those that come or go meanwhile may be missed.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Fingerprint, Entry)> {
        let entries = self.0.iter();
        entries.map(|(key, value)| (Fingerprint(key), Entry::unpack(value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Site, Slot};

    #[test]
    fn an_entry_goes_from_candidate_to_slot_to_nothing() {
        let index = Index::default();
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
        assert!(index.entries().eq([(key, slot)]));
        assert!(index.remove_if(key, slot));
        assert_eq!((index.get(key), index.len()), (None, 0));
        assert_eq!(index.compare_exchange(key, slot, site(1)), Err(None));
    }
}
