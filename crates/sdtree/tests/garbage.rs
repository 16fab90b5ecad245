//! Unlinked nodes are freed: soon, and once.
//!
//! One test function: the collector, and so the figures, are the whole process's.

use sdtree::{ByteTree, SdTree};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::thread;

static LIVE: AtomicI64 = AtomicI64::new(0);

/// A key that is counted.
#[derive(Debug)]
struct Counted(Box<[u8]>);

impl Counted {
    fn new(bytes: &[u8]) -> Self {
        LIVE.fetch_add(1, SeqCst);
        Self(bytes.into())
    }
}

impl Clone for Counted {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, SeqCst);
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Each thread inserts, changes and removes the same few keys for ever; returns the most garbage nodes ever seen.
fn steady_load(threads: u64, rounds: u64) -> u64 {
    let tree = SdTree::<u64>::new();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|me| {
                let tree = &tree;
                scope.spawn(move || {
                    let mut most = 0;
                    for round in 0..rounds {
                        let key = u128::from(me * 1_000 + round % 100) << 64;
                        tree.get_or_insert(key, round);
                        tree.compare_exchange(key, round, round + 1)
                            .expect("our own key");
                        tree.remove(key).expect("our own key");
                        if round % 1_000 == 0 {
                            most = most.max(tree.stats().garbage_nodes);
                        }
                    }
                    most
                })
            })
            .collect();
        workers
            .into_iter()
            .filter_map(|worker| worker.join().ok())
            .max()
            .unwrap_or(0)
    })
}

/// The keys of a dropped tree, and of what it had removed, are dropped exactly once.
fn every_key_is_dropped_once() {
    let tree = ByteTree::<Counted, u64>::new();
    for index in 0..5_000_u32 {
        tree.get_or_insert(Counted::new(&index.to_be_bytes()), 1)
            .expect("a short key");
        tree.get_or_insert(Counted::new(&index.to_be_bytes()), 2)
            .expect("a short key");
        if index % 3 == 0 {
            tree.compare_exchange(&index.to_be_bytes(), 1, 5)
                .expect("present");
        }
        if index % 2 == 0 {
            tree.remove(&index.to_be_bytes()).expect("present");
        }
    }
    let held = i64::try_from(tree.len()).expect("small");
    assert_eq!(held, 2_500);
    assert!(LIVE.load(SeqCst) >= held);
    drop(tree);
    // What was removed is dropped when its epoch has passed. The collector moves on with every so many operations of the process.
    let other = SdTree::<u64>::new();
    for round in 0.. {
        if LIVE.load(SeqCst) == 0 {
            break;
        }
        assert!(
            round < 10_000_000,
            "{} keys were never dropped",
            LIVE.load(SeqCst)
        );
        other.get_or_insert(1, 1);
        other.remove(1);
    }
    assert_eq!(LIVE.load(SeqCst), 0);
}

/// A key whose destructor uses the tree that held it.
struct Reentrant(std::sync::Weak<ByteTree<Reentrant, u64>>, [u8; 1]);

impl AsRef<[u8]> for Reentrant {
    fn as_ref(&self) -> &[u8] {
        &self.1
    }
}

impl Drop for Reentrant {
    fn drop(&mut self) {
        if let Some(tree) = self.0.upgrade() {
            tree.get(&[0]);
        }
    }
}

fn a_destructor_may_use_the_tree() {
    let tree = Arc::new(ByteTree::<Reentrant, u64>::new());
    for round in 0..20_000_u32 {
        let byte = round.to_be_bytes()[3];
        tree.get_or_insert(Reentrant(Arc::downgrade(&tree), [byte]), 1)
            .expect("a short key");
        tree.remove(&[byte]);
    }
}

/// Threads come and go, and each leaves its blocks to the next. Without that it would be 10 MB in the end, and 96 MB if no
/// block were ever used again.
fn blocks_are_used_again() {
    let tree = SdTree::<u64>::new();
    let before = tree.stats().pool_bytes;
    for _ in 0..2_000 {
        thread::scope(|scope| {
            scope.spawn(|| {
                let keys = || (0..1_000_u128).map(|key| key << 118);
                keys().for_each(|key| assert_eq!(tree.get_or_insert(key, 1).existing(), None));
                keys().for_each(|key| assert_eq!(tree.remove(key), Some(1)));
            });
        });
    }
    let grown = tree.stats().pool_bytes - before;
    assert!(grown < 4_000_000, "the pool has grown by {grown} bytes");
}

#[test]
fn garbage_is_bounded_and_freed_once() {
    every_key_is_dropped_once();
    a_destructor_may_use_the_tree();
    blocks_are_used_again();
    // Each round retires three nodes. A worker that the scheduler takes away in mid-operation holds up the freeing for its
    // time slice, so the most ever seen is some 10 000 nodes now and then. Without freeing it would be all 600 000.
    let most = steady_load(2, 100_000);
    assert!(most < 300_000, "most garbage seen: {most} nodes");
    let other = SdTree::<u64>::new();
    let settled = (0..10_000_000).any(|_| {
        other.get_or_insert(1, 1);
        other.remove(1);
        other.stats().garbage_nodes < 1_000
    });
    assert!(
        settled,
        "{} nodes wait though no thread is pinned",
        other.stats().garbage_nodes
    );
}
