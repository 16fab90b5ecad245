//! The tree of 16-byte keys.

use crate::build::Builder;
use crate::counters::Counter;
use crate::error::Error;
use crate::iter::CHUNK;
use crate::key::Key16;
use crate::reclaim::Guard;
use crate::tree::{Insert, Tree};
use std::collections::VecDeque;

/// A lock-free ordered map from 16-byte keys to small values.
///
/// All methods take `&self`; share the tree by reference or in an `Arc`. None of them waits for another thread. Each call pins
/// the collector for its duration; a loop of calls can pin once, by [`SdTree::pin`].
///
/// Keys are numbers: `u128::from_be_bytes` of 16 bytes keeps the order of the bytes. The first bits choose the directory slot,
/// so keys whose leading bits are uniform (fingerprints) are found in one or two steps; others take a step for each branch.
///
/// # Examples
///
/// ```
/// use sdtree::{Insert, SdTree};
///
/// let tree = SdTree::<u64>::new();
/// assert_eq!(tree.get_or_insert(1, 10), Insert::Inserted);
/// assert_eq!(tree.get_or_insert(1, 99), Insert::Existing(10));
/// assert_eq!(tree.compare_exchange(1, 10, 11), Ok(10));
/// assert_eq!(tree.remove_if(1, 10), Err(Some(11)));
/// assert_eq!(tree.remove(1), Some(11));
/// ```
///
/// A tree cannot be dropped while anything of it is in use:
///
/// ```compile_fail,E0505
/// let tree = sdtree::SdTree::<u64>::new();
/// let pinned = tree.pin();
/// drop(tree);
/// pinned.get(1);
/// ```
pub struct SdTree<V: Copy + Send + Sync + 'static> {
    pub(crate) tree: Tree<Key16, V>,
}

impl Builder {
    /// Makes a tree of 16-byte keys.
    ///
    /// # Errors
    ///
    /// [`Error::NoDirectoryMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::Builder::new().capacity(1_000).build::<u64>()?;
    /// assert!(tree.is_empty());
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn build<V: Copy + Send + Sync + 'static>(self) -> Result<SdTree<V>, Error> {
        self.tree().map(SdTree::over)
    }
}

impl<V: Copy + Send + Sync + 'static> Default for SdTree<V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<V: Copy + Send + Sync + 'static> SdTree<V> {
    /// An empty tree with a small directory that grows.
    ///
    /// # Panics
    ///
    /// If there is no memory for a few bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert!(tree.is_empty());
    /// ```
    pub fn new() -> Self {
        Self::with_capacity(0)
    }

    /// An empty tree with a directory for `keys` keys; it grows when it turns out too small. See [`Builder`] for more.
    ///
    /// # Panics
    ///
    /// If there is no memory for the directory, 12 to 23 bytes a key; [`Builder::build`] tells that as an error.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::with_capacity(1_000);
    /// assert_eq!(tree.stats().directory_slots, 2_048);
    /// ```
    pub fn with_capacity(keys: usize) -> Self {
        match Builder::new().capacity(keys).build() {
            Ok(tree) => tree,
            Err(error) => panic!("{error}"),
        }
    }

    /// Publishes a directory of twice the slots, as an insertion does that finds the present one full; for models.
    #[cfg(loom)]
    pub fn start_growth(&self) {
        self.tree.start_growth();
    }

    pub(crate) fn over(tree: Tree<Key16, V>) -> Self {
        Self { tree }
    }

    /// Pins once for many operations: cheaper for a loop, but memory that others unlink is not freed before the pin is
    /// dropped. Hold it for as long as a batch takes, no longer.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// let pinned = tree.pin();
    /// for key in 0..100 {
    ///     pinned.get_or_insert(key, 0);
    /// }
    /// assert_eq!(tree.len(), 100);
    /// ```
    pub fn pin(&self) -> Pinned<'_, V> {
        Pinned {
            tree: &self.tree,
            guard: self.tree.pin(),
        }
    }

    /// Has the processor fetch what operations on `keys` read first. Each of them would wait for its own lines; of some
    /// dozens of keys known beforehand the lines are fetched side by side. A hint: it changes nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// let keys = [3 << 100, 5 << 100];
    /// tree.prefetch(keys.iter().copied());
    /// assert!(keys.iter().all(|&key| tree.get(key).is_none()));
    /// ```
    pub fn prefetch(&self, keys: impl Iterator<Item = u128> + Clone) {
        let guard = self.tree.pin();
        self.tree.prefetch(keys.map(Key16::new), &guard);
    }

    /// The value of `key`.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// tree.get_or_insert(1, 10);
    /// assert_eq!((tree.get(1), tree.get(2)), (Some(10), None));
    /// ```
    #[inline]
    pub fn get(&self, key: u128) -> Option<V> {
        self.pin().get(key)
    }

    /// The value that `key` has, or else gives it `value`.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdtree::Insert;
    ///
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.get_or_insert(1, 10), Insert::Inserted);
    /// assert_eq!(tree.get_or_insert(1, 20), Insert::Existing(10));
    /// ```
    #[inline]
    pub fn get_or_insert(&self, key: u128, value: V) -> Insert<V> {
        self.pin().get_or_insert(key, value)
    }

    /// Gives `key` the value `new` if it has the value `old`, and returns `old`.
    ///
    /// # Errors
    ///
    /// The value that it has instead, or `None` if the key is absent.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// tree.get_or_insert(1, 10);
    /// assert_eq!(tree.compare_exchange(1, 10, 11), Ok(10));
    /// assert_eq!(tree.compare_exchange(1, 10, 12), Err(Some(11)));
    /// assert_eq!(tree.compare_exchange(2, 10, 12), Err(None));
    /// ```
    #[inline]
    pub fn compare_exchange(&self, key: u128, old: V, new: V) -> Result<V, Option<V>>
    where
        V: PartialEq,
    {
        self.pin().compare_exchange(key, old, new)
    }

    /// Removes `key`, and returns the value that it had.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// tree.get_or_insert(1, 10);
    /// assert_eq!((tree.remove(1), tree.remove(1)), (Some(10), None));
    /// ```
    #[inline]
    pub fn remove(&self, key: u128) -> Option<V> {
        self.pin().remove(key)
    }

    /// Removes `key` if it has the value `expected`, in one step, and returns the value.
    ///
    /// # Errors
    ///
    /// The value that it has instead, or `None` if the key is absent.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// tree.get_or_insert(1, 10);
    /// assert_eq!(tree.remove_if(1, 11), Err(Some(10)));
    /// assert_eq!(tree.remove_if(1, 10), Ok(10));
    /// ```
    #[inline]
    pub fn remove_if(&self, key: u128, expected: V) -> Result<V, Option<V>>
    where
        V: PartialEq,
    {
        self.pin().remove_if(key, expected)
    }

    /// The number of keys; exact when no thread changes the tree.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// tree.get_or_insert(1, 10);
    /// assert_eq!(tree.len(), 1);
    /// ```
    pub fn len(&self) -> usize {
        usize::try_from(self.tree.counters().sum(Counter::Pairs)).unwrap_or(usize::MAX)
    }

    /// True if there are no keys.
    ///
    /// # Examples
    ///
    /// ```
    /// assert!(sdtree::SdTree::<u64>::new().is_empty());
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pairs, in the order of the keys. The iterator pins for 256 pairs at a time: it may be held as long as you like. It
    /// yields every pair that is there all the time, none twice, and none that was not there at some moment of the walk.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// for key in [3, 1, 2] {
    ///     tree.get_or_insert(key, 0);
    /// }
    /// let keys: Vec<u128> = tree.iter().map(|(key, _)| key).collect();
    /// assert_eq!(keys, [1, 2, 3]);
    /// ```
    pub fn iter(&self) -> Iter<'_, V> {
        Iter {
            tree: self,
            last: None,
            chunk: VecDeque::new(),
            done: false,
        }
    }

    /// Removes every key that is there all the time; keys inserted meanwhile may stay. The directory keeps its size.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// tree.get_or_insert(1, 10);
    /// tree.clear();
    /// assert!(tree.is_empty());
    /// ```
    pub fn clear(&self) {
        for (key, _) in self {
            self.remove(key);
        }
    }

    /// The bytes that the tree has asked of the allocator and the hook for: directory, branches and leaves. Not in it: what
    /// waits to be freed (see [`Stats`](crate::Stats)), and the allocator's own overhead.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// let empty = tree.memory_bytes();
    /// tree.get_or_insert(1, 10);
    /// assert!(tree.memory_bytes() > empty);
    /// ```
    pub fn memory_bytes(&self) -> usize {
        self.tree.memory_bytes()
    }
}

/// A tree and a pin: the same operations, for loops. See [`SdTree::pin`].
///
/// # Examples
///
/// ```
/// let tree = sdtree::SdTree::<u64>::new();
/// let pinned: sdtree::Pinned<'_, u64> = tree.pin();
/// pinned.get_or_insert(1, 10);
/// assert_eq!(pinned.get(1), Some(10));
/// ```
pub struct Pinned<'t, V: Copy + Send + Sync + 'static> {
    tree: &'t Tree<Key16, V>,
    guard: Guard,
}

impl<V: Copy + Send + Sync + 'static> Pinned<'_, V> {
    /// See [`SdTree::get`].
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.pin().get(1), None);
    /// ```
    #[inline]
    pub fn get(&self, key: u128) -> Option<V> {
        self.tree
            .find(Key16::new(key), &self.guard, |leaf| leaf.value())
    }

    /// See [`SdTree::get_or_insert`].
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.pin().get_or_insert(1, 10), sdtree::Insert::Inserted);
    /// ```
    #[inline]
    pub fn get_or_insert(&self, key: u128, value: V) -> Insert<V> {
        self.tree.get_or_insert(Key16::new(key), value, &self.guard)
    }

    /// See [`SdTree::compare_exchange`].
    ///
    /// # Errors
    ///
    /// The value that the key has instead, or `None` if it is absent.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.pin().compare_exchange(1, 10, 11), Err(None));
    /// ```
    #[inline]
    pub fn compare_exchange(&self, key: u128, old: V, new: V) -> Result<V, Option<V>>
    where
        V: PartialEq,
    {
        let key = Key16::new(key);
        self.tree
            .update(key, |&key| key, |value| *value == old, new, &self.guard)
    }

    /// See [`SdTree::remove`].
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.pin().remove(1), None);
    /// ```
    #[inline]
    pub fn remove(&self, key: u128) -> Option<V> {
        let key = Key16::new(key);
        self.tree
            .remove(key, |_| true, |leaf| leaf.value(), &self.guard)
            .ok()
    }

    /// See [`SdTree::remove_if`].
    ///
    /// # Errors
    ///
    /// The value that the key has instead, or `None` if it is absent.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::SdTree::<u64>::new();
    /// assert_eq!(tree.pin().remove_if(1, 10), Err(None));
    /// ```
    #[inline]
    pub fn remove_if(&self, key: u128, expected: V) -> Result<V, Option<V>>
    where
        V: PartialEq,
    {
        let key = Key16::new(key);
        let wanted = |value: &V| *value == expected;
        self.tree
            .remove(key, wanted, |leaf| leaf.value(), &self.guard)
    }
}

/// The pairs of a tree, ascending. See [`SdTree::iter`].
///
/// # Examples
///
/// ```
/// let tree = sdtree::SdTree::<u64>::new();
/// tree.get_or_insert(1, 10);
/// let mut pairs: sdtree::Iter<'_, u64> = tree.iter();
/// assert_eq!((pairs.next(), pairs.next()), (Some((1, 10)), None));
/// ```
pub struct Iter<'t, V: Copy + Send + Sync + 'static> {
    tree: &'t SdTree<V>,
    last: Option<u128>,
    chunk: VecDeque<(u128, V)>,
    done: bool,
}

impl<V: Copy + Send + Sync + 'static> Iterator for Iter<'_, V> {
    type Item = (u128, V);

    fn next(&mut self) -> Option<Self::Item> {
        if self.chunk.is_empty() && !self.done {
            let after = self.last.map(Key16::new);
            let tree = &self.tree.tree;
            tree.walk(after, &tree.pin(), |leaf| {
                self.chunk.push_back((leaf.stored().get(), leaf.value()));
                self.chunk.len() < CHUNK
            });
            self.done = self.chunk.len() < CHUNK;
            self.last = self.chunk.back().map(|(key, _)| *key);
        }
        self.chunk.pop_front()
    }
}

impl<'t, V: Copy + Send + Sync + 'static> IntoIterator for &'t SdTree<V> {
    type Item = (u128, V);
    type IntoIter = Iter<'t, V>;

    fn into_iter(self) -> Iter<'t, V> {
        self.iter()
    }
}
