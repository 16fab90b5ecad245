//! Objects, their handles, and the life of a reference count.
//!
//! ```text
//!   put: 1 ──▶ 2 ──▶ … ──▶ 1 ──▶ 0, for ever; then out of the index, by the releasing thread or by one that puts the same bytes
//! ```
//!
//! - S1 A count that is zero never rises: handles are added only by a CAS from a count above zero.
//! - S2 At most one object with given bytes has a count above zero. The index holds at most one object for given bytes, and an
//!   object is taken out of it only at zero, by its own identity. It is not taken out by the bytes, which may be those of its successor.
//! - S3 The bytes live as long as any handle does, whatever the index holds.

use crate::stats::{Counters, Stats};
use sdtree::{ByteTree, Insert, Violation};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Relaxed},
};

/// The longest object, in bytes: 1 MiB.
///
/// # Examples
///
/// ```
/// let store = one::Store::new();
/// let longest = vec![1; one::MAX_OBJECT_BYTES];
/// assert!(store.put(&longest).is_ok());
/// ```
pub const MAX_OBJECT_BYTES: usize = sdtree::MAX_KEY_BYTES;

/// What a store refuses.
///
/// # Examples
///
/// ```
/// let store = one::Store::new();
/// let len = one::MAX_OBJECT_BYTES + 1;
/// assert_eq!(store.put(&vec![1; len]), Err(one::Error::TooLong { len }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The object is too long; cut it into blocks.
    #[error("an object of {len} bytes is over the limit of {MAX_OBJECT_BYTES} bytes")]
    TooLong {
        /// Its length, in bytes.
        len: usize,
    },
}

/// Something that is stored once.
struct Object {
    /// Tells it from an earlier object of the same bytes.
    id: u64,
    references: AtomicU64,
    bytes: Box<[u8]>,
}

impl Object {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// One handle more, unless the last one has gone (S1).
    fn try_reference(&self) -> bool {
        self.references
            .fetch_update(Relaxed, Relaxed, |count| (count > 0).then_some(count + 1))
            .is_ok()
    }
}

/// The index's hold on an object.
#[derive(Clone)]
struct Indexed(Arc<Object>);

impl AsRef<[u8]> for Indexed {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// What the store and all its handles share.
struct Shared {
    index: ByteTree<Indexed, u64>,
    next_id: AtomicU64,
    counters: Counters,
}

/// A set of byte strings, each held once. Clones are the same store.
///
/// # Examples
///
/// ```
/// let store = one::Store::new();
/// let twin = store.clone();
/// let handle = store.put(b"bytes")?;
/// assert_eq!(twin.get(b"bytes"), Some(handle));
/// # Ok::<(), one::Error>(())
/// ```
#[derive(Clone)]
pub struct Store(Arc<Shared>);

impl Default for Store {
    fn default() -> Self {
        Self::new()
    }
}

impl Store {
    /// An empty store.
    ///
    /// # Examples
    ///
    /// ```
    /// assert_eq!(one::Store::new().stats(), one::Stats::default());
    /// ```
    pub fn new() -> Self {
        Self(Arc::new(Shared {
            index: ByteTree::new(),
            next_id: AtomicU64::new(0),
            counters: Counters::default(),
        }))
    }

    /// A handle to the object of these bytes: the one that is there, or a new one with a copy of them. Equal bytes get equal
    /// handles, as long as one of them lives.
    ///
    /// # Errors
    ///
    /// [`Error::TooLong`].
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let (first, second) = (store.put(b"bytes")?, store.put(b"bytes")?);
    /// assert_eq!(first, second);
    /// assert_ne!(first, store.put(b"other bytes")?);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn put(&self, bytes: &[u8]) -> Result<Handle, Error> {
        let mut fresh: Option<Arc<Object>> = None;
        loop {
            if let Some(handle) = self.get(bytes) {
                return Ok(handle);
            }
            let object = fresh.take().unwrap_or_else(|| self.new_object(bytes));
            let inserted = self
                .0
                .index
                .get_or_insert(Indexed(Arc::clone(&object)), object.id);
            match inserted {
                Ok(Insert::Inserted) => {
                    self.0.counters.object_added(object.len());
                    return Ok(self.handle(object));
                }
                // Another thread was faster; or the object found is at zero, and the next round removes it.
                Ok(Insert::Existing(_)) => fresh = Some(object),
                Err(_) => return Err(Error::TooLong { len: bytes.len() }),
            }
        }
    }

    /// One more handle to the object of these bytes, if there is one.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// assert_eq!(store.get(b"bytes"), None);
    /// let handle = store.put(b"bytes")?;
    /// assert_eq!(store.get(b"bytes").as_ref(), Some(&handle));
    /// drop(handle);
    /// assert_eq!(store.get(b"bytes"), None);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn get(&self, bytes: &[u8]) -> Option<Handle> {
        let object = self
            .0
            .index
            .get_with(bytes, |indexed, _| Arc::clone(&indexed.0))?;
        if object.try_reference() {
            return Some(self.handle(object));
        }
        self.0.unindex(&object);
        None
    }

    /// Gives a handle back, as dropping it does, and tells how many others there were.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let (first, second) = (store.put(b"bytes")?, store.put(b"bytes")?);
    /// assert_eq!(store.release(first), 1);
    /// assert_eq!(store.release(second), 0);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn release(&self, handle: Handle) -> u64 {
        handle.references() - 1
    }

    /// What deduplication has brought so far.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let _handle = store.put(b"bytes")?;
    /// assert_eq!(store.stats().objects, 1);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn stats(&self) -> Stats {
        self.0.counters.view()
    }

    /// The bytes that the index takes, beside the objects.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let empty = store.index_bytes();
    /// let _handle = store.put(b"bytes")?;
    /// assert!(store.index_bytes() > empty);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn index_bytes(&self) -> usize {
        self.0.index.memory_bytes()
    }

    /// Checks the index and the counters; for a store that no thread changes meanwhile.
    ///
    /// # Errors
    ///
    /// The first invariant found broken.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let _handle = store.put(b"bytes")?;
    /// assert!(store.check().is_ok());
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn check(&self) -> Result<(), Violation> {
        sdtree::check(&self.0.index)?;
        let (mut found, mut references) = (0, 0);
        for (indexed, _) in self.0.index.iter() {
            found += 1;
            references += indexed.0.references.load(Relaxed);
        }
        let stats = self.stats();
        let counts = [
            ("objects", stats.objects, found),
            ("references", stats.references, references),
        ];
        match counts
            .into_iter()
            .find(|(_, counted, found)| counted != found)
        {
            Some((what, counted, found)) => Err(Violation::Count {
                what,
                counted,
                found,
            }),
            None => Ok(()),
        }
    }

    fn new_object(&self, bytes: &[u8]) -> Arc<Object> {
        Arc::new(Object {
            id: self.0.next_id.fetch_add(1, Relaxed),
            references: AtomicU64::new(1),
            bytes: bytes.into(),
        })
    }

    /// The handle for a reference that has been counted.
    fn handle(&self, object: Arc<Object>) -> Handle {
        self.0.counters.reference_added(object.len());
        Handle {
            object,
            store: Arc::clone(&self.0),
        }
    }
}

impl Shared {
    /// Takes an object whose count is zero out of the index, if no other thread has yet (S2).
    fn unindex(&self, object: &Object) {
        if self.index.remove_if(&object.bytes, object.id).is_ok() {
            self.counters.object_gone(object.len());
        }
    }
}

/// A reference to an object of a store. Equal handles are to the same object. Dropping it gives it back.
///
/// # Examples
///
/// ```
/// let store = one::Store::new();
/// let handle = store.put(b"bytes")?;
/// drop(store);
/// assert_eq!(handle.bytes(), b"bytes");
/// # Ok::<(), one::Error>(())
/// ```
pub struct Handle {
    object: Arc<Object>,
    store: Arc<Shared>,
}

impl Handle {
    /// The object's bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// let handle = one::Store::new().put(b"bytes")?;
    /// assert_eq!(handle.bytes(), b"bytes");
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn bytes(&self) -> &[u8] {
        &self.object.bytes
    }

    /// A number that no other object of this store ever has.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let before = store.put(b"bytes")?.id();
    /// assert_ne!(store.put(b"bytes")?.id(), before, "the first object had gone");
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn id(&self) -> u64 {
        self.object.id
    }

    /// How many handles there are to the object, this one included.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let handle = store.put(b"bytes")?;
    /// let other = handle.clone();
    /// assert_eq!(other.references(), 2);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn references(&self) -> u64 {
        self.object.references.load(Relaxed)
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        // Not from zero: `self` is a reference.
        self.object.references.fetch_add(1, Relaxed);
        self.store.counters.reference_added(self.object.len());
        Self {
            object: Arc::clone(&self.object),
            store: Arc::clone(&self.store),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.store.counters.reference_gone(self.object.len());
        // AcqRel: partners are the other drops of handles to the object; what their owners did comes before its removal.
        if self.object.references.fetch_sub(1, AcqRel) == 1 {
            self.store.unindex(&self.object);
        }
    }
}

impl AsRef<[u8]> for Handle {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl PartialEq for Handle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.object, &other.object)
    }
}

impl Eq for Handle {}

impl Hash for Handle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.object.id.hash(state);
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Handle")
            .field("id", &self.id())
            .field("len", &self.bytes().len())
            .field("references", &self.references())
            .finish()
    }
}
