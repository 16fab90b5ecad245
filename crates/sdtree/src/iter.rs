//! Walking over the pairs, in the order of their keys.
//!
//! A walk takes up to [`CHUNK`] pairs at a time under a guard of its own, and finds its way back by the last key. A slow reader
//! holds up neither the others nor the freeing of memory. Its sequence is ascending, has no key twice, contains every pair
//! that was there all the time, and nothing that was not there at some moment of the walk.

use crate::key::{Bits, Stored};
use crate::node::{Leaf, Target, Word};
use crate::reclaim::Guard;
use crate::tree::Tree;
use std::cmp::Ordering;

/// Pairs taken at a time.
pub(crate) const CHUNK: usize = 256;

impl<K: Stored, V: Copy + Send + Sync + 'static> Tree<K, V> {
    /// Calls `visit` with the leaves whose keys are greater than `after`, ascending, until it returns false.
    pub(crate) fn walk<'g>(
        &'g self,
        after: Option<K::Query<'_>>,
        guard: &'g Guard,
        mut visit: impl FnMut(&'g Leaf<K, V>) -> bool,
    ) {
        let directory = self.directory(guard);
        let mut pending: Vec<Word<'g, K, V>> = Vec::new();
        let first = after.map_or(0, |key| directory.index(key.lead()));
        for index in first..directory.len() {
            let (_, root) = directory.slot(index, guard);
            let mut bound = after.filter(|_| index == first);
            if bound.is_none_or(|key| !greater(root, key, guard, &mut pending)) {
                pending.push(root);
            } else {
                bound = None;
            }
            while let Some(word) = pending.pop() {
                match word.target() {
                    Target::Empty => {}
                    Target::Leaf(leaf) => {
                        let skip = bound.is_some_and(|key| order(leaf, key) != Ordering::Greater);
                        if !skip && !visit(leaf) {
                            return;
                        }
                    }
                    Target::Branch(branch) => {
                        pending.extend([1, 0].map(|side| branch.edge(side).load(guard)))
                    }
                }
            }
        }
    }
}

/// Compares the key of a leaf with another, by their bits.
fn order<K: Stored, V: Copy + Send + Sync + 'static>(
    leaf: &Leaf<K, V>,
    key: K::Query<'_>,
) -> Ordering {
    leaf.stored()
        .first_difference(key)
        .map_or(Ordering::Equal, |bit| {
            leaf.key().bit(bit).cmp(&key.bit(bit))
        })
}

/// Pushes the subtrees of `root` whose keys are all greater than `key`, the greatest first; no others have such a key. False,
/// and nothing pushed, if the path of `key` ends where a leaf was just removed: then there is nothing to compare `key` with.
fn greater<'g, K: Stored, V: Copy + Send + Sync + 'static>(
    root: Word<'g, K, V>,
    key: K::Query<'_>,
    guard: &'g Guard,
    pending: &mut Vec<Word<'g, K, V>>,
) -> bool {
    // The branches of the key's own path, each with its bit, its word, and the word of its edge 1 if the path took edge 0.
    let mut path = Vec::new();
    let mut word = root;
    while let Target::Branch(branch) = word.target() {
        let side = key.bit(branch.bit());
        let below = branch.edge(side).load(guard);
        let right = (side == 0).then(|| branch.edge(1).load(guard));
        path.push((branch.bit(), word, right));
        word = below;
    }
    let Target::Leaf(leaf) = word.target() else {
        return false;
    };
    let difference = leaf.stored().first_difference(key);
    let split = difference.map_or(path.len(), |bit| {
        path.partition_point(|(tested, _, _)| *tested < bit)
    });
    pending.extend(path[..split].iter().filter_map(|(_, _, right)| *right));
    if order(leaf, key) == Ordering::Greater {
        // Below the split all keys compare with `key` as the leaf does.
        pending.push(path.get(split).map_or(word, |(_, word, _)| *word));
    }
    true
}
