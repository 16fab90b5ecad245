//! The tree of byte strings.

use crate::build::Builder;
use crate::counters::Counter;
use crate::error::Error;
use crate::iter::CHUNK;
use crate::key::{Bytes, Lent, MAX_KEY_BYTES};
use crate::tree::{Insert, Tree};
use std::collections::VecDeque;

/// A lock-free map from byte strings to small values.
///
/// The tree stores a `K` for each key and reads the bytes through it: `&'static [u8]`, `Arc<[u8]>`, or a handle to whatever
/// holds them. The bytes must not change while the tree has the key (`AsRef` must always give the same). A `K` is dropped once
/// no search can see it any more, which may be on any thread, and after the tree itself is gone.
///
/// Keys are at most [`MAX_KEY_BYTES`] long; the empty string is a key like any other. They are told apart by all their bytes; a
/// digest in front of them chooses the directory slot, so that keys which begin alike, as pages do, are found as fast as others.
/// For the same reason the order of iteration means nothing.
///
/// # Examples
///
/// ```
/// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
/// tree.get_or_insert(b"page", 1)?;
/// tree.get_or_insert(b"pages", 2)?;
/// assert_eq!(tree.get(b"page"), Some(1));
/// assert_eq!(tree.remove(b"pag"), None);
/// # Ok::<(), sdtree::Error>(())
/// ```
pub struct ByteTree<K, V>
where
    K: AsRef<[u8]> + Send + Sync + 'static,
    V: Copy + Send + Sync + 'static,
{
    pub(crate) tree: Tree<Lent<K>, V>,
}

impl Builder {
    /// Makes a tree of byte strings.
    ///
    /// # Errors
    ///
    /// [`Error::NoDirectoryMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// let builder = sdtree::Builder::new().capacity(1_000);
    /// let tree = builder.build_bytes::<&'static [u8], u32>()?;
    /// assert_eq!(tree.get(b"page"), None);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn build_bytes<K, V>(self) -> Result<ByteTree<K, V>, Error>
    where
        K: AsRef<[u8]> + Send + Sync + 'static,
        V: Copy + Send + Sync + 'static,
    {
        self.tree().map(ByteTree::over)
    }
}

impl<K, V> Default for ByteTree<K, V>
where
    K: AsRef<[u8]> + Send + Sync + 'static,
    V: Copy + Send + Sync + 'static,
{
    fn default() -> Self {
        Self::new()
    }
}

/// `Err` if the string cannot be a key.
fn check_length(key: &[u8]) -> Result<(), Error> {
    match key.len() {
        0..=MAX_KEY_BYTES => Ok(()),
        len => Err(Error::KeyTooLong {
            len,
            max: MAX_KEY_BYTES,
        }),
    }
}

impl<K, V> ByteTree<K, V>
where
    K: AsRef<[u8]> + Send + Sync + 'static,
    V: Copy + Send + Sync + 'static,
{
    /// An empty tree with a small directory that grows. See [`Builder`] for others.
    ///
    /// # Panics
    ///
    /// If there is no memory for a few bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// assert!(tree.is_empty());
    /// ```
    pub fn new() -> Self {
        match Builder::new().build_bytes() {
            Ok(tree) => tree,
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn over(tree: Tree<Lent<K>, V>) -> Self {
        Self { tree }
    }

    /// The value of `key`. `None` for a string that is too long to be a key, as for any other absent one.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"page", 1)?;
    /// assert_eq!(tree.get(b"page"), Some(1));
    /// assert_eq!(tree.get(b"pag"), None);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn get(&self, key: &[u8]) -> Option<V> {
        self.get_with(key, |_, value| value)
    }

    /// What `found` makes of the key and the value that are stored, if `key` is there: the way to the stored `K`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// let tree = sdtree::ByteTree::<Arc<[u8]>, u32>::new();
    /// let key: Arc<[u8]> = Arc::from(&b"page"[..]);
    /// tree.get_or_insert(Arc::clone(&key), 1)?;
    /// let stored = tree.get_with(b"page", |key, _| Arc::clone(key));
    /// assert!(stored.is_some_and(|stored| Arc::ptr_eq(&stored, &key)));
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn get_with<R>(&self, key: &[u8], found: impl FnOnce(&K, V) -> R) -> Option<R> {
        check_length(key).ok()?;
        let guard = self.tree.pin();
        self.tree.find(Bytes::new(key), &guard, |leaf| {
            found(&leaf.stored().key, leaf.value())
        })
    }

    /// The value that `key` has, or else gives it `value`.
    ///
    /// # Errors
    ///
    /// [`Error::KeyTooLong`].
    ///
    /// # Examples
    ///
    /// ```
    /// use sdtree::Insert;
    ///
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// assert_eq!(tree.get_or_insert(b"page", 1)?, Insert::Inserted);
    /// assert_eq!(tree.get_or_insert(b"page", 2)?, Insert::Existing(1));
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn get_or_insert(&self, key: K, value: V) -> Result<Insert<V>, Error> {
        check_length(key.as_ref())?;
        Ok(self
            .tree
            .get_or_insert(Lent::new(key), value, &self.tree.pin()))
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
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"page", 1)?;
    /// assert_eq!(tree.compare_exchange(b"page", 1, 2), Ok(1));
    /// assert_eq!(tree.compare_exchange(b"page", 1, 3), Err(Some(2)));
    /// assert_eq!(tree.compare_exchange(b"pag", 1, 3), Err(None));
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn compare_exchange(&self, key: &[u8], old: V, new: V) -> Result<V, Option<V>>
    where
        K: Clone,
        V: PartialEq,
    {
        check_length(key).map_err(|_| None)?;
        let clone = |key: &Lent<K>| Lent::new(key.key.clone());
        let wanted = |value: &V| *value == old;
        self.tree
            .update(Bytes::new(key), clone, wanted, new, &self.tree.pin())
    }

    /// Removes `key`, and returns the value that it had.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"page", 1)?;
    /// assert_eq!(tree.remove(b"page"), Some(1));
    /// assert_eq!(tree.remove(b"page"), None);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn remove(&self, key: &[u8]) -> Option<V> {
        self.take(key, |_| true).ok()
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
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"page", 1)?;
    /// assert_eq!(tree.remove_if(b"page", 2), Err(Some(1)));
    /// assert_eq!(tree.remove_if(b"page", 1), Ok(1));
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn remove_if(&self, key: &[u8], expected: V) -> Result<V, Option<V>>
    where
        V: PartialEq,
    {
        self.take(key, |value| *value == expected)
    }

    fn take(&self, key: &[u8], wanted: impl Fn(&V) -> bool) -> Result<V, Option<V>> {
        check_length(key).map_err(|_| None)?;
        let guard = self.tree.pin();
        self.tree
            .remove(Bytes::new(key), wanted, |leaf| leaf.value(), &guard)
    }

    /// The number of keys; exact when no thread changes the tree.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"page", 1)?;
    /// assert_eq!(tree.len(), 1);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn len(&self) -> usize {
        usize::try_from(self.tree.counters().sum(Counter::Pairs)).unwrap_or(usize::MAX)
    }

    /// True if there are no keys.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"", 1)?;
    /// assert!(!tree.is_empty(), "the empty string is a key");
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pairs, in an order that means nothing; otherwise like [`SdTree::iter`](crate::SdTree::iter).
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"one", 1)?;
    /// tree.get_or_insert(b"two", 2)?;
    /// assert_eq!(tree.iter().map(|(_, value)| value).sum::<u32>(), 3);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn iter(&self) -> ByteIter<'_, K, V>
    where
        K: Clone,
    {
        ByteIter {
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
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// tree.get_or_insert(b"page", 1)?;
    /// tree.clear();
    /// assert!(tree.is_empty());
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn clear(&self)
    where
        K: Clone,
    {
        for (key, _) in self.iter() {
            self.remove(key.as_ref());
        }
    }

    /// The bytes that the tree has asked for, without those of the keys; like
    /// [`SdTree::memory_bytes`](crate::SdTree::memory_bytes).
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
    /// let empty = tree.memory_bytes();
    /// tree.get_or_insert(b"page", 1)?;
    /// assert!(tree.memory_bytes() > empty);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn memory_bytes(&self) -> usize {
        self.tree.memory_bytes()
    }
}

/// The pairs of a tree. See [`ByteTree::iter`].
///
/// # Examples
///
/// ```
/// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
/// tree.get_or_insert(b"page", 1)?;
/// let mut pairs: sdtree::ByteIter<'_, _, _> = tree.iter();
/// assert_eq!(pairs.next(), Some((&b"page"[..], 1)));
/// assert_eq!(pairs.next(), None);
/// # Ok::<(), sdtree::Error>(())
/// ```
pub struct ByteIter<'t, K, V>
where
    K: AsRef<[u8]> + Send + Sync + Clone + 'static,
    V: Copy + Send + Sync + 'static,
{
    tree: &'t ByteTree<K, V>,
    last: Option<K>,
    chunk: VecDeque<(K, V)>,
    done: bool,
}

impl<K, V> Iterator for ByteIter<'_, K, V>
where
    K: AsRef<[u8]> + Send + Sync + Clone + 'static,
    V: Copy + Send + Sync + 'static,
{
    type Item = (K, V);

    fn next(&mut self) -> Option<Self::Item> {
        if self.chunk.is_empty() && !self.done {
            let tree = &self.tree.tree;
            let after = self.last.as_ref().map(|last| Bytes::new(last.as_ref()));
            tree.walk(after, &tree.pin(), |leaf| {
                self.chunk
                    .push_back((leaf.stored().key.clone(), leaf.value()));
                self.chunk.len() < CHUNK
            });
            self.done = self.chunk.len() < CHUNK;
            self.last = self.chunk.back().map(|(key, _)| key.clone());
        }
        self.chunk.pop_front()
    }
}
