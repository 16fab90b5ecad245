//! Searching and changing: the lock-free algorithm over words and slots.
//!
//! A search goes from the directory slot of its key down the branches, and looks at one bit of the key at each. It compares
//! the whole key once, at the leaf. Paths are compressed (as in Morrison's PATRICIA), so a branch tests only a bit in which two keys
//! below it differ, and no bit is tested twice.
//!
//! An insertion that ends at a leaf with another key puts a branch on the first bit in which the two differ. The branch goes over the first edge
//! on its path whose keys agree beyond that bit. A removal takes the leaf off its edge, which marks the branch above. Then it,
//! or another operation that comes by, unlinks the branch: freezes its other edge and puts that child in its place. (The idea to
//! freeze edges, and not nodes, is that of Natarajan and Mittal, PPoPP 2014.)
//!
//! # Why it is linearizable
//!
//! The set of pairs changes in four of the edge changes of `node.rs` and in none of the others, so a change takes effect at its
//! CAS. A value read counts from a moment between the load of the edge above its leaf and the moment at which that edge was
//! frozen, if it was. A search that meets nodes already unlinked reads frozen edges, and each of them was part of the tree until
//! after the search began: it had found the node linked. A miss counts from the last moment at which the path was part of the
//! tree, for by N5 the key can be on no other path then. `docs/sdtree.md` goes through the cases.
//!
//! # Why no thread waits
//!
//! A search follows at most one branch per bit of its key, and ends. A change starts again only if its edge was changed by
//! another operation that succeeded, or if it has itself unlinked a marked branch or moved a slot. Each of these happens once
//! per removal or slot.

use crate::counters::{Counter, Counters};
use crate::directory::{Current, Directory, DirectoryMemory, Growth};
use crate::key::{Bits, Stored};
use crate::node::{Branch, Edge, Fork, Leaf, Owner, Splice, Target, Word};
use crate::pool::Owned;
use crate::reclaim::{Collector, Guard};
use std::sync::Arc;

/// The directory grows when there are more than 7 pairs to 10 slots: 11 to 23 bytes of directory a pair.
const FULL_PAIRS: u64 = 7;
const FULL_SLOTS: u64 = 10;

/// A thread looks whether the directory is full once in so many insertions.
const LOOK_EVERY: i64 = 64;

/// So many slots does each insertion move while the directory grows: it has grown long before it is full again.
const SLOTS_PER_INSERTION: usize = 8;

/// What an insertion did.
///
/// # Examples
///
/// ```
/// use sdtree::Insert;
///
/// let tree = sdtree::SdTree::<u64>::new();
/// match tree.get_or_insert(1, 10) {
///     Insert::Inserted => {}
///     Insert::Existing(value) => panic!("an empty tree had {value}"),
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insert<V> {
    /// The key was absent; now it has the value given.
    Inserted,
    /// The key was there, with this value; nothing has changed.
    Existing(V),
}

impl<V> Insert<V> {
    /// The value that was there before, if any.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.get_or_insert(1, 10).existing(), None);
    /// assert_eq!(tree.get_or_insert(1, 20).existing(), Some(10));
    /// ```
    pub fn existing(self) -> Option<V> {
        match self {
            Self::Inserted => None,
            Self::Existing(value) => Some(value),
        }
    }
}

/// The tree for any kind of key.
pub(crate) struct Tree<K: Stored, V: Copy + Send + Sync + 'static> {
    current: Current<K, V>,
    counters: Arc<Counters>,
    max_bits: u32,
    memory: Arc<dyn DirectoryMemory>,
    collector: Collector,
}

/// An edge that leads to a branch, and what kind of edge it is.
struct Above<'g, K, V> {
    edge: &'g Edge<K, V>,
    word: Word<'g, K, V>,
    owner: Owner,
}

/// The end of a path, where a change takes hold.
struct Place<'g, K, V> {
    /// The last edge: it leads to a leaf, or it is an empty slot.
    edge: &'g Edge<K, V>,
    word: Word<'g, K, V>,
    /// The edge above the branch that `edge` belongs to; none if `edge` is a slot.
    above: Option<Above<'g, K, V>>,
    /// The bit of that branch.
    last_bit: Option<u32>,
    /// The first edge of the path whose keys all agree beyond the bit that was asked for.
    split: (&'g Edge<K, V>, Word<'g, K, V>),
}

impl<K, V> Place<'_, K, V> {
    fn owner(&self) -> Owner {
        if self.above.is_some() {
            Owner::Branch
        } else {
            Owner::Slot
        }
    }
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Tree<K, V> {
    /// `None` if the hook has no memory for the first directory.
    pub(crate) fn new(bits: u32, max_bits: u32, memory: Arc<dyn DirectoryMemory>) -> Option<Self> {
        let counters = Arc::new(Counters::default());
        Some(Self {
            current: Current::new(Directory::new(bits.min(max_bits), &memory, &counters)?),
            counters,
            max_bits,
            memory,
            collector: Collector::new(),
        })
    }

    #[inline]
    pub(crate) fn pin(&self) -> Guard {
        self.collector.pin()
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    #[inline]
    pub(crate) fn directory<'g>(&'g self, guard: &'g Guard) -> &'g Directory<K, V> {
        self.current.load(guard)
    }

    /// Has the processor fetch what operations on `keys` read first: all the slots, then the nodes that they lead to.
    pub(crate) fn prefetch<'k>(
        &self,
        keys: impl Iterator<Item = K::Query<'k>> + Clone,
        guard: &Guard,
    ) {
        let directory = self.directory(guard);
        let slots = keys.map(|key| directory.index(key.lead()));
        slots.clone().for_each(|slot| directory.prefetch(slot));
        slots.for_each(|slot| directory.prefetch_node(slot, guard));
    }

    /// Calls `found` with the leaf of `key`, if there is one.
    #[inline]
    pub(crate) fn find<'g, R>(
        &'g self,
        key: K::Query<'_>,
        guard: &'g Guard,
        found: impl FnOnce(&'g Leaf<K, V>) -> R,
    ) -> Option<R> {
        let directory = self.directory(guard);
        let (_, mut word) = directory.slot(directory.index(key.lead()), guard);
        let mut marked = false;
        let leaf = loop {
            match word.target() {
                Target::Empty => break None,
                Target::Leaf(leaf) => {
                    break (word.may_hold(key.tag()) && leaf.stored().same(key)).then_some(leaf);
                }
                Target::Branch(branch) => {
                    word = branch.edge(key.bit(branch.bit())).load(guard);
                    marked |= word.is_frozen();
                }
            }
        };
        if marked {
            self.tidy(key, guard);
        }
        leaf.map(found)
    }

    /// Unlinks the first marked branch on the path of `key`; what a search does that has met one. One attempt, so that searches
    /// stay bounded.
    #[cold]
    fn tidy(&self, key: K::Query<'_>, guard: &Guard) {
        let directory = self.directory(guard);
        let (mut edge, mut word) = directory.slot(directory.index(key.lead()), guard);
        let mut owner = Owner::Slot;
        while let Target::Branch(branch) = word.target() {
            let (next, below) = self.step(branch, key, guard);
            if below.is_frozen() {
                self.counters.add(Counter::Helps, 1);
                self.unlink(edge, word, owner, guard);
                return;
            }
            (edge, word, owner) = (next, below, Owner::Branch);
        }
    }

    #[inline]
    fn step<'g>(
        &self,
        branch: &'g Branch<K, V>,
        key: K::Query<'_>,
        guard: &'g Guard,
    ) -> (&'g Edge<K, V>, Word<'g, K, V>) {
        let edge = branch.edge(key.bit(branch.bit()));
        (edge, edge.load(guard))
    }

    /// Unlinks a marked branch, and counts it if it was this thread that did.
    fn unlink<'g>(
        &self,
        edge: &Edge<K, V>,
        word: Word<'g, K, V>,
        owner: Owner,
        guard: &'g Guard,
    ) -> Splice {
        let splice = edge.splice(word, owner, guard);
        if matches!(splice, Splice::Done | Splice::DoneAndVacant) {
            self.counters.add(Counter::Branches, -1);
        }
        splice
    }

    /// Goes down the path of `key` to its end; unlinks every marked branch on it, and moves its slot if the directory grows. So
    /// no edge of the path it returns was frozen when it was read.
    #[inline]
    fn descend<'g>(
        &'g self,
        key: K::Query<'_>,
        split_bit: u32,
        guard: &'g Guard,
    ) -> Place<'g, K, V> {
        'again: loop {
            let directory = self.directory(guard);
            let (edge, word) = directory.slot(directory.index(key.lead()), guard);
            if word.is_frozen() {
                // A grown directory was published before the slot was frozen: the next round finds it.
                continue;
            }
            let mut place = Place {
                edge,
                word,
                above: None,
                last_bit: None,
                split: (edge, word),
            };
            let mut above_split = true;
            while let Target::Branch(branch) = place.word.target() {
                let (next, below) = self.step(branch, key, guard);
                if below.is_frozen() {
                    self.counters.add(Counter::Helps, 1);
                    self.unlink(place.edge, place.word, place.owner(), guard);
                    continue 'again;
                }
                place.above = Some(Above {
                    edge: place.edge,
                    word: place.word,
                    owner: place.owner(),
                });
                (place.edge, place.word) = (next, below);
                place.last_bit = Some(branch.bit());
                above_split &= branch.bit() < split_bit;
                if above_split {
                    place.split = (next, below);
                }
            }
            return place;
        }
    }

    /// Gets the value of a key, or gives it one.
    pub(crate) fn get_or_insert(&self, key: K, value: V, guard: &Guard) -> Insert<V> {
        let mut fresh = Fresh::Key(key);
        let mut split_bit = u32::MAX;
        loop {
            let key = fresh.key();
            let place = self.descend(key, split_bit, guard);
            let fork = match place.word.target() {
                Target::Leaf(leaf) => match leaf.stored().first_difference(key) {
                    None => return Insert::Existing(leaf.value()),
                    // The path ends at the leaf's edge if no branch lies beyond the bit. Otherwise the edge above the first of
                    // those is the one, and the path must be walked with the bit in mind. It is the same path, if it leads to a leaf
                    // that differs in the same bit, so that all keys below `split` are known to differ there.
                    Some(bit) if place.last_bit.is_none_or(|last| last < bit) => {
                        Some((place.edge, place.word, Fork::at(bit, key)))
                    }
                    Some(bit) if bit == split_bit => {
                        Some((place.split.0, place.split.1, Fork::at(bit, key)))
                    }
                    Some(bit) => {
                        split_bit = bit;
                        continue;
                    }
                },
                _ => None,
            };
            let leaf = fresh.into_leaf(value);
            let linked = match fork {
                None => place.edge.fill(place.word, leaf),
                Some((edge, below, fork)) => edge.split(below, fork, leaf),
            };
            fresh = match linked {
                Ok(()) => {
                    self.count_insertion(fork.is_some(), guard);
                    return Insert::Inserted;
                }
                Err(leaf) => Fresh::Leaf(leaf),
            };
            self.counters.add(Counter::CasFailures, 1);
        }
    }

    /// Gives a key a new value if `wanted` accepts its present one, and returns the present one. `Err` tells the value that was
    /// not accepted, or that there is none. `make` gives the key for the new leaf.
    pub(crate) fn update(
        &self,
        key: K::Query<'_>,
        make: impl Fn(&K) -> K,
        wanted: impl Fn(&V) -> bool,
        value: V,
        guard: &Guard,
    ) -> Result<V, Option<V>> {
        loop {
            let place = self.descend(key, u32::MAX, guard);
            let old = Self::match_leaf(&place, key, &wanted)?;
            let leaf = Leaf::new(make(old.stored()), value);
            match place.edge.replace(place.word, leaf, guard) {
                Ok(()) => return Ok(old.value()),
                Err(_) => self.counters.add(Counter::CasFailures, 1),
            };
        }
    }

    /// Removes a key if `wanted` accepts its value, and returns what `taken` makes of the leaf. `Err` tells the value that was
    /// not accepted, or that there is none.
    pub(crate) fn remove<R>(
        &self,
        key: K::Query<'_>,
        wanted: impl Fn(&V) -> bool,
        taken: impl FnOnce(&Leaf<K, V>) -> R,
        guard: &Guard,
    ) -> Result<R, Option<V>> {
        loop {
            let place = self.descend(key, u32::MAX, guard);
            let leaf = Self::match_leaf(&place, key, &wanted)?;
            if !place.edge.take(place.word, place.owner(), guard) {
                self.counters.add(Counter::CasFailures, 1);
                continue;
            }
            self.counters.add(Counter::Pairs, -1);
            if let Some(Above { edge, word, owner }) = place.above
                && self.unlink(edge, word, owner, guard) != Splice::Done
            {
                // Another thread unlinked it, or changed the edge above it, or the branch above must go as well: the path is
                // walked until nothing on it is marked.
                self.descend(key, u32::MAX, guard);
            }
            return Ok(taken(leaf));
        }
    }

    /// The leaf at the end of the path, if it is the one of `key` and its value is accepted.
    fn match_leaf<'g>(
        place: &Place<'g, K, V>,
        key: K::Query<'_>,
        wanted: impl Fn(&V) -> bool,
    ) -> Result<&'g Leaf<K, V>, Option<V>> {
        match place.word.target() {
            Target::Leaf(leaf) if place.word.may_hold(key.tag()) && leaf.stored().same(key) => {
                let value = leaf.value();
                if wanted(&value) {
                    Ok(leaf)
                } else {
                    Err(Some(value))
                }
            }
            _ => Err(None),
        }
    }

    /// What an insertion does for the directory: counts itself, moves slots, and starts a growth.
    fn count_insertion(&self, with_branch: bool, guard: &Guard) {
        let pairs = self.counters.add(Counter::Pairs, 1);
        if with_branch {
            self.counters.add(Counter::Branches, 1);
        }
        let directory = self.directory(guard);
        if !directory.help_migration(SLOTS_PER_INSERTION, guard) && pairs % LOOK_EVERY == 0 {
            self.grow_if_full(directory);
        }
    }

    #[cold]
    fn grow_if_full(&self, directory: &Directory<K, V>) {
        if self.counters.sum(Counter::Pairs) * FULL_SLOTS > directory.len() as u64 * FULL_PAIRS {
            self.grow(directory);
        }
    }

    #[cfg(loom)]
    pub(crate) fn start_growth(&self) {
        let guard = self.pin();
        self.grow(self.directory(&guard));
    }

    fn grow(&self, directory: &Directory<K, V>) {
        if directory.bits() < self.max_bits {
            match self.current.grow(directory, &self.memory) {
                Growth::Done => self.counters.add(Counter::Growths, 1),
                Growth::Refused => self.counters.add(Counter::GrowthsRefused, 1),
                Growth::Lost => 0,
            };
        }
    }
}

/// A pair on its way into the tree.
enum Fresh<K, V> {
    Key(K),
    /// An insertion lost a race after it had made its leaf.
    Leaf(Owned<Leaf<K, V>>),
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Fresh<K, V> {
    fn key(&self) -> K::Query<'_> {
        match self {
            Self::Key(key) => key.query(),
            Self::Leaf(leaf) => leaf.key(),
        }
    }

    fn into_leaf(self, value: V) -> Owned<Leaf<K, V>> {
        match self {
            Self::Key(key) => Leaf::new(key, value),
            Self::Leaf(leaf) => leaf,
        }
    }
}

impl Fork {
    fn at<B: Bits>(bit: u32, key: B) -> Self {
        Self {
            bit,
            side: key.bit(bit),
            lead: key.lead(),
        }
    }
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Drop for Tree<K, V> {
    fn drop(&mut self) {
        let guard = self.collector.pin();
        self.current.drop_all(&guard);
        guard.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::GlobalMemory;
    use crate::key::Lent;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Byte strings that share long prefixes, are prefixes of each other, or differ in one bit.
    fn key() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            (0..70_usize).prop_map(|len| vec![0; len]),
            (0..70_usize, 0..8).prop_map(|(at, bit)| {
                let mut key = vec![0; 70];
                key[at] = 1_u8 << bit;
                key
            }),
            vec(0..3_u8, 0..5),
        ]
    }

    proptest! {
        /// Digests never collide by themselves in tests of this size; here all do, and the bytes alone tell keys apart.
        #[test]
        fn keys_with_one_digest_agree_with_a_btree_map(steps in vec((key(), 0..3_u8), 0..300), bits in 0..5_u32) {
            let tree: Tree<Lent<Vec<u8>>, u8> = Tree::new(bits, bits, Arc::new(GlobalMemory)).expect("a small directory");
            let mut map = BTreeMap::new();
            for (key, step) in steps {
                let guard = tree.pin();
                let stored = Lent::colliding(key.clone());
                match step {
                    0 => {
                        let removed = tree.remove(stored.query(), |_| true, |leaf| leaf.value(), &guard);
                        prop_assert_eq!(removed.ok(), map.remove(&key));
                    }
                    value => {
                        let found = tree.find(stored.query(), &guard, |leaf| leaf.value());
                        prop_assert_eq!(found, map.get(&key).copied());
                        let inserted = tree.get_or_insert(stored, value, &guard);
                        prop_assert_eq!(inserted.existing(), found);
                        map.entry(key).or_insert(value);
                    }
                }
            }
            let mut listed = Vec::new();
            tree.walk(None, &tree.pin(), |leaf| {
                listed.push((leaf.stored().key.clone(), leaf.value()));
                true
            });
            prop_assert_eq!(listed, map.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(tree.check(), Ok(()));
        }
    }
}
