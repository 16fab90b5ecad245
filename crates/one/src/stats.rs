//! The gains of deduplication.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A store's counters. Exact when no thread changes the store.
///
/// `references ≥ objects`, and `logical_bytes = stored_bytes + saved_bytes()`.
///
/// # Examples
///
/// ```
/// let store = one::Store::new();
/// let handles = [store.put(b"page")?, store.put(b"page")?, store.put(b"else")?];
/// let stats = store.stats();
/// assert_eq!((stats.objects, stats.references), (2, 3));
/// assert_eq!((stats.stored_bytes, stats.logical_bytes), (8, 12));
/// # drop(handles);
/// # Ok::<(), one::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Different objects.
    pub objects: u64,
    /// Handles to them.
    pub references: u64,
    /// Bytes of the objects, each counted once.
    pub stored_bytes: u64,
    /// Bytes of the objects, each counted once per handle: what there would be without the store.
    pub logical_bytes: u64,
}

impl Stats {
    /// Bytes that need no memory because another object has them.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// let _handles = [store.put(b"page")?, store.put(b"page")?];
    /// assert_eq!(store.stats().saved_bytes(), 4);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn saved_bytes(&self) -> u64 {
        self.logical_bytes.saturating_sub(self.stored_bytes)
    }

    /// The part of all bytes that is duplicate, 0 to 1.
    ///
    /// # Examples
    ///
    /// ```
    /// let store = one::Store::new();
    /// assert_eq!(store.stats().duplicate_share(), 0.0);
    /// let _handles = [store.put(b"page")?, store.put(b"page")?];
    /// assert_eq!(store.stats().duplicate_share(), 0.5);
    /// # Ok::<(), one::Error>(())
    /// ```
    pub fn duplicate_share(&self) -> f64 {
        self.saved_bytes() as f64 / self.logical_bytes.max(1) as f64
    }
}

/// The counters themselves. Relaxed: nothing depends on their order.
#[derive(Default)]
pub(crate) struct Counters {
    objects: AtomicU64,
    references: AtomicU64,
    stored_bytes: AtomicU64,
    logical_bytes: AtomicU64,
}

impl Counters {
    pub(crate) fn object_added(&self, len: u64) {
        self.objects.fetch_add(1, Relaxed);
        self.stored_bytes.fetch_add(len, Relaxed);
    }

    pub(crate) fn object_gone(&self, len: u64) {
        self.objects.fetch_sub(1, Relaxed);
        self.stored_bytes.fetch_sub(len, Relaxed);
    }

    pub(crate) fn reference_added(&self, len: u64) {
        self.references.fetch_add(1, Relaxed);
        self.logical_bytes.fetch_add(len, Relaxed);
    }

    pub(crate) fn reference_gone(&self, len: u64) {
        self.references.fetch_sub(1, Relaxed);
        self.logical_bytes.fetch_sub(len, Relaxed);
    }

    pub(crate) fn view(&self) -> Stats {
        Stats {
            objects: self.objects.load(Relaxed),
            references: self.references.load(Relaxed),
            stored_bytes: self.stored_bytes.load(Relaxed),
            logical_bytes: self.logical_bytes.load(Relaxed),
        }
    }
}
