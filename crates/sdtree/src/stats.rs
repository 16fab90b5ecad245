//! Looking at a tree: its memory, its shape, the cost of its searches, and the effects of contention.

use crate::bytes::ByteTree;
use crate::counters::{Counter, garbage};
use crate::directory::Directory;
use crate::fixed::SdTree;
use crate::key::Stored;
use crate::node::{Branch, Edge, Leaf, Target};
use crate::pool::pool_bytes;
use crate::tree::Tree;

/// A view of a tree, taken by a walk over all of it. Exact when no thread changes the tree.
///
/// # Examples
///
/// ```
/// let tree = sdtree::SdTree::<u64>::new();
/// tree.get_or_insert(1, 10);
/// tree.get_or_insert(2, 20);
/// let stats = tree.stats();
/// assert_eq!(stats.keys, 2);
/// assert_eq!(stats.branches, stats.keys - stats.directory_slots_used);
/// assert_eq!(stats.depth.iter().sum::<u64>(), stats.keys);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Keys.
    pub keys: u64,
    /// Branches; `keys − directory slots in use`, if no removal is under way.
    pub branches: u64,
    /// Slots of the directory.
    pub directory_slots: u64,
    /// Slots of the directory with at least one key.
    pub directory_slots_used: u64,
    /// How many keys lie below so many branches: `depth[0]` hang in their slot directly. Sums to `keys`.
    pub depth: Vec<u64>,
    /// Bits of a key that the search for a present key looks at before its final comparison, on average: those that index the
    /// directory, and one for each branch on its path. The final comparison reads the whole key once.
    pub bits_tested_per_search: f64,
    /// Changes that lost a race for their edge and were tried again.
    pub cas_failures: u64,
    /// Marked branches that operations met on their way and tried to unlink.
    pub helps: u64,
    /// Times the directory grew.
    pub growths: u64,
    /// Times the directory was full and the hook refused the memory to grow.
    pub growths_refused: u64,
    /// Bytes in use, as `memory_bytes` tells.
    pub memory_bytes: u64,
    /// Nodes of all trees of the process that are unlinked and not yet freed (the collector is shared).
    pub garbage_nodes: u64,
    /// Bytes of those nodes.
    pub garbage_bytes: u64,
    /// Bytes of all blocks for nodes that the process has, in use and free. It grows only: blocks are used again.
    pub pool_bytes: u64,
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Tree<K, V> {
    pub(crate) fn memory_bytes(&self) -> usize {
        let guard = self.pin();
        let directory = self.directory(&guard);
        let older = directory.older(&guard).map_or(0, Directory::len);
        let part = |counter, size| {
            usize::try_from(self.counters().sum(counter)).unwrap_or(usize::MAX) * size
        };
        size_of::<Self>()
            + (directory.len() + older) * size_of::<Edge<K, V>>()
            + part(Counter::Pairs, size_of::<Leaf<K, V>>())
            + part(Counter::Branches, size_of::<Branch<K, V>>())
    }

    pub(crate) fn stats(&self) -> Stats {
        let guard = self.pin();
        let directory = self.directory(&guard);
        let (garbage_nodes, garbage_bytes) = garbage::pending();
        let mut stats = Stats {
            directory_slots: directory.len() as u64,
            cas_failures: self.counters().sum(Counter::CasFailures),
            helps: self.counters().sum(Counter::Helps),
            growths: self.counters().sum(Counter::Growths),
            growths_refused: self.counters().sum(Counter::GrowthsRefused),
            memory_bytes: self.memory_bytes() as u64,
            garbage_nodes,
            garbage_bytes,
            pool_bytes: pool_bytes(),
            ..Stats::default()
        };
        for index in 0..directory.len() {
            let (_, root) = directory.slot(index, &guard);
            stats.directory_slots_used += u64::from(!root.is_empty());
            let mut pending = vec![(root, 0_usize)];
            while let Some((word, depth)) = pending.pop() {
                match word.target() {
                    Target::Empty => {}
                    Target::Leaf(_) => stats.count_key(depth),
                    Target::Branch(branch) => {
                        stats.branches += 1;
                        pending
                            .extend([0, 1].map(|side| (branch.edge(side).load(&guard), depth + 1)));
                    }
                }
            }
        }
        stats.bits_tested_per_search = f64::from(directory.bits()) + stats.mean_depth();
        stats
    }
}

impl Stats {
    fn count_key(&mut self, depth: usize) {
        self.keys += 1;
        if self.depth.len() <= depth {
            self.depth.resize(depth + 1, 0);
        }
        self.depth[depth] += 1;
    }

    /// Branches on the path of a key, on average.
    ///
    /// # Examples
    ///
    /// ```
    /// let trie = sdtree::Builder::new().max_directory_bits(0).build::<u64>()?;
    /// trie.get_or_insert(1, 10);
    /// trie.get_or_insert(2, 20);
    /// assert_eq!(trie.stats().mean_depth(), 1.0, "one branch above both");
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn mean_depth(&self) -> f64 {
        let steps: u64 = (0..)
            .zip(&self.depth)
            .map(|(depth, keys)| depth * keys)
            .sum();
        steps as f64 / self.keys.max(1) as f64
    }
}

impl<V: Copy + Send + Sync + 'static> SdTree<V> {
    /// Walks over the tree and tells what it looks like.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.stats().keys, 0);
    /// ```
    pub fn stats(&self) -> Stats {
        self.tree.stats()
    }
}

impl<K, V> ByteTree<K, V>
where
    K: AsRef<[u8]> + Send + Sync + 'static,
    V: Copy + Send + Sync + 'static,
{
    /// Walks over the tree and tells what it looks like.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"page", 1)?;
    /// assert_eq!(tree.stats().keys, 1);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn stats(&self) -> Stats {
        self.tree.stats()
    }
}
