//! Memory for the directories of an index: mappings that are placed before anything touches them.
//!
//! The kernel decides where a page goes when it is touched for the first time. Memory of the global allocator may have been
//! touched before, by another thread on another node; a mapping of its own was not.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sdtree::{DirectoryMemory, GlobalMemory};

use crate::PAGE;
use crate::zeroed::ZeroedSlice;

/// A smaller directory comes from the global allocator: a few pages are not worth a mapping.
const LEAST_BYTES: usize = 16 * PAGE;

/// One directory.
pub type Words = ZeroedSlice<AtomicU64>;

type Place = Box<dyn Fn(&Words) + Send + Sync>;
type Mappings = BTreeMap<usize, Words>;

/// The memory of an index's directories.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use sys::directory::PlacedMemory;
/// let memory = Arc::new(PlacedMemory::new(Box::new(|words| words.allow_huge_pages(false))));
/// let hook = Arc::clone(&memory);
/// let tree = sdtree::Builder::new().capacity(100_000).memory(hook).build::<u64>().unwrap();
/// let mut mappings = 0;
/// memory.for_each(&mut |words| mappings += usize::from(words.len_bytes() >= 100_000 * 8));
/// assert_eq!(mappings, 1);
/// drop(tree);
/// memory.for_each(&mut |_| panic!("the directory is gone"));
/// ```
pub struct PlacedMemory {
    place: Place,
    mappings: Mutex<Mappings>,
}

impl PlacedMemory {
    /// Directories on which `place` is called before their first use. It must not panic.
    #[must_use]
    pub fn new(place: Place) -> Self {
        Self {
            place,
            mappings: Mutex::default(),
        }
    }

    /// Shows each directory that is in use; none comes or goes meanwhile.
    pub fn for_each(&self, each: &mut dyn FnMut(&Words)) {
        self.mappings().values().for_each(each);
    }

    fn mappings(&self) -> MutexGuard<'_, Mappings> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_mapped(layout: Layout) -> bool {
        layout.size() >= LEAST_BYTES && layout.align() <= PAGE
    }
}

impl fmt::Debug for PlacedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlacedMemory").finish_non_exhaustive()
    }
}

// SAFETY: what is mapped is zero, at least as large as asked and aligned to a page. It stays until `deallocate` drops it, for nothing
// else removes a mapping, and the tree that uses it owns this object. The rest is the global allocator's; the layout tells which is which.
// No code reads or writes through the slice that is kept here, and its elements are atomic.
unsafe impl DirectoryMemory for PlacedMemory {
    fn allocate_zeroed(&self, layout: Layout) -> *mut u8 {
        if !Self::is_mapped(layout) {
            return GlobalMemory.allocate_zeroed(layout);
        }
        let Ok(words) = Words::new(layout.size().div_ceil(size_of::<AtomicU64>())) else {
            return std::ptr::null_mut();
        };
        // Under the lock, so that the thread that places all anew finds this one before or after, and never in between.
        let mut mappings = self.mappings();
        (self.place)(&words);
        let start = words.as_ptr();
        mappings.insert(start.addr(), words);
        start.cast_mut().cast()
    }

    unsafe fn deallocate(&self, memory: *mut u8, layout: Layout) {
        if !Self::is_mapped(layout) {
            // SAFETY: the caller's promise; the layout says that it came from there.
            return unsafe { GlobalMemory.deallocate(memory, layout) };
        }
        let words = self.mappings().remove(&memory.addr());
        debug_assert!(words.is_some(), "a directory of another hook");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdtree::SdTree;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn each_directory_is_placed_once_while_the_tree_grows_and_unmapped_in_the_end() {
        let placed = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&placed);
        let place = move |words: &Words| {
            assert!(words.iter().all(|word| word.load(Relaxed) == 0));
            counts.fetch_add(1, Relaxed);
        };
        let memory = Arc::new(PlacedMemory::new(Box::new(place)));
        let hook: Arc<dyn DirectoryMemory> = Arc::<PlacedMemory>::clone(&memory);
        let tree: SdTree<u64> = sdtree::Builder::new().memory(hook).build().unwrap();
        const KEYS: u64 = 200_000;
        // Keys as a hash gives them.
        let key = |at: u64| u128::from(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)) << 64 | 5;
        (0..KEYS).for_each(|at| assert!(tree.get_or_insert(key(at), at).existing().is_none()));
        assert!((0..KEYS).all(|at| tree.get(key(at)) == Some(at)));
        let mut bytes = Vec::new();
        memory.for_each(&mut |words| bytes.push(words.len_bytes()));
        assert!(bytes.iter().max() >= Some(&(1 << 20)), "{bytes:?}");
        // From 64 KiB to the present size, each once.
        let sizes = bytes.iter().max().unwrap().ilog2() - LEAST_BYTES.ilog2() + 1;
        assert_eq!(placed.load(Relaxed), sizes as usize);
        drop(tree);
        let mut left = 0;
        memory.for_each(&mut |_| left += 1);
        assert!(left < bytes.len(), "the last one is gone at once");
    }
}
