//! Copies of the same content: the slots beside the one that the index names.
//!
//! A slot takes at most `max_page_sharing` pages. So when the kernel takes a frame from under all its
//! sharers, or a sharer breaks away, nothing has to walk a million of them. A worker that finds a
//! slot full publishes another one and has the index name that. The full one lives on until its refs end:
//!
//! ```text
//!   index ──▶ copy 3 (named)     a page joins the named copy only
//!             copy 2 (full)      from full to half: roomy, and named again when copy 3 is full
//!             copy 1 (full)      no refs any more: punched as ever
//! ```
//!
//! A chain is two or more copies. It knows only living ones: a copy enters while it has refs, under
//! the lock, and the thread that drops the last ref takes it out, under the lock and afterwards.
//! The tempting alternative, to link slots by number, would have to be right while slots die.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::page::{Fingerprint, Slot, StoreId};
use crate::sync::lock;

/// The index a content is in, and its fingerprint.
type Key = (StoreId, Fingerprint);

/// The copies of one content.
#[derive(Debug, Default)]
struct Chain {
    members: HashSet<Slot>,
    /// Members that have lost half of their sharers since they were full. The first is taken first:
    /// so those of a row, which are neighbours, are taken together.
    roomy: BTreeSet<Slot>,
}

/// The chains of a domain.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    chains: Mutex<HashMap<Key, Chain>>,
    /// How many there are, and members of all of them, for readers without the lock. They change with the lock held.
    count: AtomicU64,
    copies: AtomicU64,
}

impl Chains {
    /// Dissolves a chain of one.
    fn trim(&self, chains: &mut HashMap<Key, Chain>, key: Key) {
        let short = |chain: &Chain| chain.members.len() < 2;
        if chains.get(&key).is_some_and(short)
            && let Some(chain) = chains.remove(&key)
        {
            self.forget(chain.members.len());
        }
        self.count.store(chains.len() as u64, Relaxed);
    }

    /// Counts so many copies less.
    fn forget(&self, copies: usize) {
        let before = self.copies.fetch_sub(copies as u64, Relaxed);
        assert!(before >= copies as u64, "a copy of a chain is counted");
    }

    /// Notes that `new` was named in place of `full`. `alive` tells whether a slot has refs.
    pub(crate) fn add(&self, key: Key, full: Slot, new: Slot, alive: impl Fn(Slot) -> bool) {
        let mut chains = lock(&self.chains);
        let chain = chains.entry(key).or_default();
        let living = [full, new].into_iter().filter(|&slot| alive(slot));
        let added = living.filter(|&slot| chain.members.insert(slot)).count();
        self.copies.fetch_add(added as u64, Relaxed);
        self.trim(&mut chains, key);
    }

    /// A member that has room again, to be named instead of `full`.
    pub(crate) fn take_roomy(&self, key: Key, full: Slot) -> Option<Slot> {
        let mut chains = lock(&self.chains);
        let roomy = &mut chains.get_mut(&key)?.roomy;
        roomy.remove(&full);
        roomy.pop_first()
    }

    /// Whether a member has room again.
    pub(crate) fn has_room(&self, key: Key) -> bool {
        let chains = lock(&self.chains);
        let chain = chains.get(&key);
        chain.is_some_and(|chain| !chain.roomy.is_empty())
    }

    /// Notes that a slot has lost half of its sharers.
    pub(crate) fn note_room(&self, key: Fingerprint, slot: Slot) {
        let mut chains = lock(&self.chains);
        for home in [slot.store(), StoreId::default()] {
            let chain = chains.get_mut(&(home, key));
            if let Some(chain) = chain.filter(|chain| chain.members.contains(&slot)) {
                chain.roomy.insert(slot);
                return;
            }
        }
    }

    /// Takes slots out that have no refs any more.
    pub(crate) fn bury(&self, dead: impl Iterator<Item = (Fingerprint, Slot)>) {
        let mut chains = lock(&self.chains);
        if chains.is_empty() {
            return;
        }
        for (key, slot) in dead {
            for home in [slot.store(), StoreId::default()] {
                let Some(chain) = chains.get_mut(&(home, key)) else {
                    continue;
                };
                chain.roomy.remove(&slot);
                if chain.members.remove(&slot) {
                    self.forget(1);
                    self.trim(&mut chains, (home, key));
                }
            }
        }
    }

    /// Whether there are several copies of this content.
    pub(crate) fn is_hot(&self, key: Key) -> bool {
        self.count.load(Relaxed) > 0 && lock(&self.chains).contains_key(&key)
    }

    /// How many contents have several copies.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// How many copies they have.
    pub(crate) fn copies(&self) -> u64 {
        self.copies.load(Relaxed)
    }

    /// Bytes of memory the chains hold, about.
    pub(crate) fn memory_bytes(&self) -> usize {
        let entry = size_of::<(Key, Chain)>() + 1;
        let bytes = self.count() * entry as u64 * 2 + self.copies() * 18;
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Asserts that chains have two members or more, all alive.
    ///
    /// # Panics
    /// When one does not hold.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn check(&self, alive: impl Fn(Slot) -> bool) {
        let chains = lock(&self.chains);
        let members = chains.values().map(|chain| chain.members.len());
        assert_eq!(
            members.sum::<usize>() as u64,
            self.copies(),
            "copies in chains"
        );
        for chain in chains.values() {
            assert!(chain.members.len() > 1, "a chain of one");
            assert!(chain.members.iter().all(|&slot| alive(slot)), "a dead copy");
            assert!(
                chain.roomy.iter().all(|slot| chain.members.contains(slot)),
                "room that is gone"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_begins_with_the_second_copy_and_ends_with_the_last_but_one() {
        let chains = Chains::default();
        let key = (StoreId(0), Fingerprint(9));
        let counts = || (chains.count(), chains.copies());
        chains.add(key, Slot(1), Slot(2), |slot| slot != Slot(1));
        assert_eq!(
            (counts(), chains.is_hot(key)),
            ((0, 0), false),
            "the full one died"
        );
        chains.add(key, Slot(2), Slot(3), |_| true);
        chains.add(key, Slot(3), Slot(4), |_| true);
        assert_eq!((counts(), chains.is_hot(key)), ((1, 3), true));
        chains.note_room(key.1, Slot(2));
        chains.note_room(key.1, Slot(4));
        chains.note_room(key.1, Slot(77)); // in no chain
        assert_eq!(
            chains.take_roomy(key, Slot(4)),
            Some(Slot(2)),
            "never itself"
        );
        assert_eq!(chains.take_roomy(key, Slot(4)), None);
        chains.bury([(key.1, Slot(2)), (key.1, Slot(77))].into_iter());
        assert_eq!(counts(), (1, 2));
        chains.check(|slot| slot != Slot(2));
        chains.bury([(key.1, Slot(4))].into_iter());
        assert_eq!((counts(), chains.is_hot(key)), ((0, 0), false));
    }
}
