//! The directory grows by its hook's memory, and stays as it is where the hook refuses.
#![cfg(not(loom))]

use sdtree::{Builder, DirectoryMemory, Error, GlobalMemory, SdTree, check};
use std::alloc::Layout;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Counts the bytes that are out, and refuses what would be over its limit.
struct Limited {
    used: AtomicUsize,
    limit: usize,
}

// SAFETY: passes on to the global allocator, or returns null.
unsafe impl DirectoryMemory for Limited {
    fn allocate_zeroed(&self, layout: Layout) -> *mut u8 {
        if self.used.load(SeqCst) + layout.size() > self.limit {
            return ptr::null_mut();
        }
        self.used.fetch_add(layout.size(), SeqCst);
        GlobalMemory.allocate_zeroed(layout)
    }

    unsafe fn deallocate(&self, memory: *mut u8, layout: Layout) {
        self.used.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller's promise.
        unsafe { GlobalMemory.deallocate(memory, layout) }
    }
}

fn limited(limit: usize) -> Arc<Limited> {
    let used = AtomicUsize::new(0);
    Arc::new(Limited { used, limit })
}

fn fill(tree: &SdTree<u64>, keys: u64) {
    for index in 0..keys {
        let key = u128::from(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)) << 64;
        tree.get_or_insert(key, index);
        assert_eq!(tree.get(key), Some(index));
    }
    assert_eq!(check(tree), Ok(()));
}

#[test]
fn a_tree_goes_on_when_the_hook_refuses_to_let_it_grow() {
    let memory = limited(8 * 1024);
    let tree = Builder::new()
        .memory(memory.clone())
        .build::<u64>()
        .expect("8 bytes");
    fill(&tree, 20_000);
    let stats = tree.stats();
    assert!(stats.growths > 5 && stats.growths_refused > 0, "{stats:?}");
    assert!(stats.directory_slots * 8 <= 8 * 1024);
    assert!(memory.used.load(SeqCst) > 0);
}

#[test]
fn no_memory_at_all_is_an_error() {
    let tree = Builder::new()
        .capacity(1_000)
        .memory(limited(8 * 1024))
        .build::<u64>();
    assert_eq!(tree.err(), Some(Error::NoDirectoryMemory { slots: 2_048 }));
}

#[test]
fn a_dropped_tree_gives_its_directory_back() {
    let memory = limited(usize::MAX);
    let tree = Builder::new()
        .capacity(5_000)
        .memory(memory.clone())
        .build::<u64>()
        .expect("a directory");
    fill(&tree, 1_000);
    assert_eq!(memory.used.load(SeqCst), 8_192 * 8);
    drop(tree);
    assert_eq!(memory.used.load(SeqCst), 0);
}

#[test]
fn keys_with_uniform_leading_bits_hang_near_their_slots() {
    let tree = SdTree::<u64>::new();
    fill(&tree, 50_000);
    let stats = tree.stats();
    assert_eq!(stats.keys, 50_000);
    assert_eq!(stats.branches, stats.keys - stats.directory_slots_used);
    assert!(stats.mean_depth() < 1.0, "{stats:?}");
    assert!(stats.memory_bytes < 64 * stats.keys, "{stats:?}");
}
