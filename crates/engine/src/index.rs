//! From fingerprint to candidate or slot: what the engine asks of an index.
//!
//! An entry is never trusted: whoever finds a slot must still win a ref of it, whoever finds a
//! candidate must still win the exchange, and the agent compares all bytes at the end. So an
//! index only has to keep each single operation atomic.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Place;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::page::{Entry, Fingerprint};

/// A concurrent map from fingerprints to entries.
pub(crate) trait Index: Send + Sync {
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

const SHARDS: usize = 256;
type Shard = HashMap<Key, u64, BuildHasherDefault<Spread>>;

/// A fingerprint as two words, so that an entry takes 24 bytes and not 32. It is random already:
/// its low word is hash enough.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key([u64; 2]);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self([low, _]) = self;
        state.write_u64(*low);
    }
}

/// Hashes one word by a multiplication.
#[derive(Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word.wrapping_mul(0x9E37_79B9_7F4A_7C15); // 2^64 divided by the golden ratio
    }
}

/// Hash maps behind locks, spread by the fingerprint's leading bits.
pub(crate) struct Sharded([Mutex<Shard>; SHARDS]);

impl Sharded {
    /// An empty index.
    pub(crate) fn new() -> Self {
        Self([const { Mutex::new(HashMap::with_hasher(BuildHasherDefault::new())) }; SHARDS])
    }

    fn shard(&self, key: Fingerprint) -> MutexGuard<'_, Shard> {
        let Key([_, high]) = words(key);
        let at = usize::try_from(high >> 56).unwrap_or(0);
        #[allow(clippy::indexing_slicing)] // eight bits, 256 shards
        self.0[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[allow(clippy::cast_possible_truncation)] // the two halves, on purpose
fn words(key: Fingerprint) -> Key {
    Key([key.0 as u64, (key.0 >> 64) as u64])
}

impl Index for Sharded {
    fn get(&self, key: Fingerprint) -> Option<Entry> {
        self.shard(key)
            .get(&words(key))
            .map(|&value| Entry::unpack(value))
    }

    fn get_or_insert(&self, key: Fingerprint, new: Entry) -> Option<Entry> {
        match self.shard(key).entry(words(key)) {
            Place::Occupied(there) => Some(Entry::unpack(*there.get())),
            Place::Vacant(place) => {
                place.insert(new.pack());
                None
            }
        }
    }

    fn compare_exchange(
        &self,
        key: Fingerprint,
        current: Entry,
        new: Entry,
    ) -> Result<(), Option<Entry>> {
        match self.shard(key).get_mut(&words(key)) {
            Some(value) if *value == current.pack() => {
                *value = new.pack();
                Ok(())
            }
            other => Err(other.map(|value| Entry::unpack(*value))),
        }
    }

    fn remove_if(&self, key: Fingerprint, current: Entry) -> bool {
        let mut shard = self.shard(key);
        let matches = shard.get(&words(key)) == Some(&current.pack());
        if matches {
            shard.remove(&words(key));
            if shard.capacity() > 64 && shard.len() < shard.capacity() / 8 {
                shard.shrink_to_fit();
            }
        }
        matches
    }

    fn len(&self) -> usize {
        self.0.iter().map(|shard| lock(shard).len()).sum()
    }

    fn memory_bytes(&self) -> usize {
        // hashbrown keeps a control byte beside each bucket, and 8 buckets for each 7 entries.
        let bucket = size_of::<(Key, u64)>() + 1;
        let shards = self.0.iter().map(|shard| lock(shard).capacity());
        size_of::<Self>() + shards.map(|n| n * 8 / 7 * bucket).sum::<usize>()
    }

    fn for_each(&self, each: &mut dyn FnMut(Fingerprint, Entry)) {
        for shard in &self.0 {
            for (&Key([low, high]), &value) in lock(shard).iter() {
                let key = Fingerprint(u128::from(high) << 64 | u128::from(low));
                each(key, Entry::unpack(value));
            }
        }
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Site, Slot};

    #[test]
    fn an_entry_goes_from_candidate_to_slot_to_nothing() {
        let index = Sharded::new();
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
