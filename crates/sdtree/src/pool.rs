//! Where nodes live: blocks of three words, which the process's trees share.
//!
//! ```text
//!   thread A   hot ▢▢▢▢        spare ▢▢▢▢▢▢▢▢        a node comes from `hot` and goes back to it
//!   thread B   hot ▢▢▢▢▢▢      spare
//!                                                    a full chain goes to the depot, a thread
//!   depot      ▢▢▢▢▢▢▢▢  ▢▢▢▢▢▢▢▢  …                 that has none left takes one from there
//! ```
//!
//! A node of 24 bytes would take 32 of malloc's, and a lock whenever threads meet there. Here a thread that makes nodes and frees
//! them goes to its own two chains, and once in [`CHAIN`] times to the depot, a lock-free queue (crossbeam's). Only when that is
//! empty is the global allocator asked, for a whole chain: with two chains a thread that swings between them asks nobody.
//!
//! - M1 A block is in one place: in a node's hands, or once in one chain; a chain is one thread's or the depot's.
//! - M2 Blocks do not go back to the allocator. What one tree has freed serves the next.
//!
//! Whatever is larger than a block or aligned more strictly comes from the global allocator, and so does everything under
//! `cfg(loom)`.

use std::alloc::Layout;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Owns a node, as a `Box` would.
pub(crate) struct Owned<T>(NonNull<T>);

// SAFETY: it owns its node, and nothing else leads there.
unsafe impl<T: Send> Send for Owned<T> {}

impl<T> Owned<T> {
    /// Moves `value` into memory of its own.
    #[inline]
    pub(crate) fn new(value: T) -> Self {
        let memory = allocate(Layout::new::<T>()).cast::<T>();
        // SAFETY: `allocate` returned memory for a `T` that nobody else uses.
        unsafe { memory.write(value) };
        Self(memory)
    }

    /// Gives the node away: see [`Owned::from_raw`].
    #[inline]
    pub(crate) fn into_raw(self) -> *mut T {
        let node = self.0.as_ptr();
        std::mem::forget(self);
        node
    }

    /// Owns the node again.
    ///
    /// # Safety
    /// `node` came from [`Owned::into_raw`], and nobody else owns it or uses it by now.
    #[inline]
    pub(crate) unsafe fn from_raw(node: *mut T) -> Self {
        // SAFETY: `into_raw` gave it away, and never gives null.
        Self(unsafe { NonNull::new_unchecked(node) })
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the node is alive as long as `self`.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Owned<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the node is alive as long as `self`, and borrowed through nothing else.
        unsafe { self.0.as_mut() }
    }
}

impl<T> Drop for Owned<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the node is alive, and used by nobody after this.
        unsafe { self.0.drop_in_place() };
        // SAFETY: `new` allocated it for this layout.
        unsafe { deallocate(self.0.cast(), Layout::new::<T>()) };
    }
}

#[cfg(loom)]
use global::{allocate, deallocate};
#[cfg(not(loom))]
use pooled::{allocate, deallocate};

#[cfg(not(loom))]
pub(crate) use pooled::pool_bytes;

/// No blocks: models watch each node.
#[cfg(loom)]
pub(crate) fn pool_bytes() -> u64 {
    0
}

/// The global allocator.
mod global {
    use super::{Layout, NonNull};

    pub(super) fn allocate(layout: Layout) -> NonNull<u8> {
        assert!(layout.size() > 0, "nodes have a size");
        // SAFETY: the size is not zero.
        let memory = unsafe { std::alloc::alloc(layout) };
        NonNull::new(memory).unwrap_or_else(|| std::alloc::handle_alloc_error(layout))
    }

    /// # Safety
    /// `memory` came from `allocate`, for the same layout, and nobody uses it any more.
    pub(super) unsafe fn deallocate(memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { std::alloc::dealloc(memory.as_ptr(), layout) }
    }
}

#[cfg(not(loom))]
mod pooled {
    use super::{Layout, NonNull, global};
    use crossbeam_queue::SegQueue;
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    /// Memory for a node. In a free one the first word leads to the next of its chain.
    #[repr(C)]
    pub(super) struct Block {
        next: Option<NonNull<Block>>,
        _rest: [usize; 2],
    }

    /// The blocks of a full chain: 3 KiB.
    pub(super) const CHAIN: usize = 128;

    /// Free blocks.
    #[derive(Default)]
    struct Chain {
        first: Option<NonNull<Block>>,
        len: usize,
    }

    // SAFETY: a chain owns its blocks (M1).
    unsafe impl Send for Chain {}

    impl Chain {
        fn is_full(&self) -> bool {
            self.len == CHAIN
        }

        #[inline]
        fn push(&mut self, block: NonNull<Block>) {
            let next = self.first.replace(block);
            // SAFETY: nobody else uses a free block, and there is room for the word.
            unsafe { (&raw mut (*block.as_ptr()).next).write(next) };
            self.len += 1;
        }

        #[inline]
        fn pop(&mut self) -> Option<NonNull<Block>> {
            let block = self.first?;
            // SAFETY: it is a block of this chain, and `push` wrote the word.
            self.first = unsafe { (&raw const (*block.as_ptr()).next).read() };
            self.len -= 1;
            Some(block)
        }
    }

    /// Chains that no thread has.
    static DEPOT: SegQueue<Chain> = SegQueue::new();
    /// Bytes of all blocks there are. Relaxed: a figure for people.
    static BYTES: AtomicU64 = AtomicU64::new(0);

    /// Bytes of all blocks, in use and free.
    pub(crate) fn pool_bytes() -> u64 {
        BYTES.load(Relaxed)
    }

    /// A chain from the depot, else of new blocks.
    #[cold]
    fn full_chain() -> Chain {
        if let Some(chain) = DEPOT.pop() {
            return chain;
        }
        let layout = Layout::new::<[Block; CHAIN]>();
        let first = global::allocate(layout).cast::<Block>();
        BYTES.fetch_add(layout.size() as u64, Relaxed);
        let mut chain = Chain::default();
        // From the last on, so that neighbours are given out in ascending order.
        for at in (0..CHAIN).rev() {
            // SAFETY: `allocate` returned memory for so many blocks.
            chain.push(unsafe { first.add(at) });
        }
        chain
    }

    /// One thread's free blocks.
    #[derive(Default)]
    struct Cache {
        hot: Cell<Chain>,
        /// Full or empty.
        spare: Cell<Chain>,
    }

    impl Cache {
        #[inline]
        fn take(&self) -> NonNull<Block> {
            let mut hot = self.hot.take();
            loop {
                if let Some(block) = hot.pop() {
                    self.hot.set(hot);
                    return block;
                }
                hot = self.spare.take();
                if hot.len == 0 {
                    hot = full_chain();
                }
            }
        }

        #[inline]
        fn give(&self, block: NonNull<Block>) {
            let mut hot = self.hot.take();
            if hot.is_full() {
                let spare = self.spare.replace(hot);
                hot = Chain::default();
                if spare.len > 0 {
                    DEPOT.push(spare);
                }
            }
            hot.push(block);
            self.hot.set(hot);
        }
    }

    impl Drop for Cache {
        fn drop(&mut self) {
            for chain in [self.hot.take(), self.spare.take()] {
                if chain.len > 0 {
                    DEPOT.push(chain);
                }
            }
        }
    }

    thread_local! {
        static CACHE: Cache = const {
            Cache {
                hot: Cell::new(Chain { first: None, len: 0 }),
                spare: Cell::new(Chain { first: None, len: 0 }),
            }
        };
    }

    /// Whether memory of this layout comes from blocks.
    const fn is_block(layout: Layout) -> bool {
        let block = Layout::new::<Block>();
        layout.size() <= block.size() && layout.align() <= block.align()
    }

    #[inline]
    pub(super) fn allocate(layout: Layout) -> NonNull<u8> {
        if !is_block(layout) {
            return global::allocate(layout);
        }
        let block = CACHE.try_with(Cache::take);
        // A thread that ends may have no cache any more.
        block.unwrap_or_else(|_| Cache::default().take()).cast()
    }

    /// # Safety
    /// `memory` came from `allocate`, for the same layout, and nobody uses it any more.
    #[inline]
    pub(super) unsafe fn deallocate(memory: NonNull<u8>, layout: Layout) {
        if !is_block(layout) {
            // SAFETY: the caller's promise, and `allocate` took it from there.
            return unsafe { global::deallocate(memory, layout) };
        }
        let block = memory.cast();
        let given = CACHE.try_with(|cache| cache.give(block));
        given.unwrap_or_else(|_| Cache::default().give(block));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::mpsc;
    use std::thread;

    type Node = [u64; 3];

    /// Threads in a ring make nodes and free each other's, so that chains go through the depot.
    #[test]
    fn a_node_keeps_its_content_on_the_way_to_another_thread() {
        const THREADS: usize = 4;
        let (mut ends, begins): (Vec<_>, Vec<_>) = (0..THREADS)
            .map(|_| mpsc::sync_channel::<Vec<Owned<Node>>>(4))
            .unzip();
        ends.rotate_left(1);
        thread::scope(|scope| {
            for (me, (begin, end)) in begins.into_iter().zip(ends).enumerate() {
                scope.spawn(move || {
                    for round in 0..200_u64 {
                        // More than two chains, and not a multiple of them.
                        let node = |at| Owned::new([me as u64, round, at]);
                        end.send((0..300).map(node).collect())
                            .expect("the neighbour listens");
                        let nodes = begin.recv().expect("the neighbour sends as many");
                        let maker = (me + THREADS - 1) % THREADS;
                        for (at, node) in (0..).zip(nodes) {
                            assert_eq!(*node, [maker as u64, round, at]);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn blocks_of_a_thread_are_distinct_and_aligned() {
        let nodes: Vec<_> = (0..1000).map(|at| Owned::new([at; 3])).collect();
        let mut addresses: Vec<_> = nodes
            .iter()
            .map(|node| (&raw const **node).addr())
            .collect();
        addresses.sort_unstable();
        assert!(
            addresses
                .windows(2)
                .all(|two| two[1] - two[0] >= size_of::<Node>())
        );
        assert!(
            addresses
                .iter()
                .all(|address| address % align_of::<Node>() == 0)
        );
        assert!(pool_bytes() >= 24_000);
    }

    #[test]
    fn what_fits_no_block_gets_memory_all_the_same() {
        #[repr(align(64))]
        struct Strict(u8);
        let wide: Vec<_> = (0..1000_u64).map(|at| Owned::new([at; 4])).collect();
        let strict: Vec<_> = (0..100_u8).map(|at| Owned::new(Strict(at))).collect();
        for (at, node) in (0..).zip(&strict) {
            assert_eq!(((**node).0, (&raw const **node).addr() % 64), (at, 0));
        }
        for (at, node) in (0..).zip(&wide) {
            assert_eq!(**node, [at; 4]);
        }
    }

    /// A thread's cache may go before other things that its end drops, or after them.
    #[test]
    fn nodes_may_be_freed_and_made_when_a_thread_ends() {
        struct Last(Option<Owned<Node>>);
        impl Drop for Last {
            fn drop(&mut self) {
                let node = self.0.take().expect("put there below");
                let other = Owned::new([8; 3]);
                assert_eq!((*node, *other), ([7; 3], [8; 3]));
            }
        }
        thread_local! {
            static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
        }
        for cache_first in [true, false] {
            let ended = thread::spawn(move || {
                if cache_first {
                    drop(Owned::new([1; 3]));
                }
                LAST.with(|last| last.borrow_mut().replace(Last(Some(Owned::new([7; 3])))));
            });
            assert!(ended.join().is_ok());
        }
    }
}
