//! Where nodes live, and the owner of one that is in no tree.
//!
//! Nodes of up to three words live in [`blocks`]. Larger values, and those aligned more strictly, come from the global
//! allocator. So does everything in models and in fuzzing, for tools that watch each node.

use std::alloc::Layout;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Owns a node or a directory, as a `Box` would.
pub(crate) struct Owned<T>(NonNull<T>);

// SAFETY: it owns its node, and nothing else leads there.
unsafe impl<T: Send> Send for Owned<T> {}

impl<T> Owned<T> {
    /// Moves `value` into memory of its own.
    #[inline]
    pub(crate) fn new(value: T) -> Self {
        let memory = allocate(Layout::new::<T>()).cast::<T>();
        // SAFETY: `allocate` returned memory for a `T` that nothing else uses.
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
    /// `node` came from [`Owned::into_raw`], and nothing else owns it or uses it by now.
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
        // SAFETY: the node is alive, and not used after this.
        unsafe { self.0.drop_in_place() };
        // SAFETY: `new` allocated it for this layout.
        unsafe { deallocate(self.0.cast(), Layout::new::<T>()) };
    }
}

/// Homes that threads can have, with 0 for none.
pub(crate) const HOMES: usize = 65;

/// Gives this thread a home: the memory of what it adds to trees, the directories aside, was freed by threads of the same
/// home, or is new. So where the threads of a home run on one NUMA node, what they add is on that node.
///
/// Homes are 1 to 64; any other number is none, with which every thread begins.
///
/// # Examples
///
/// ```
/// let tree = sdtree::SdTree::<u64>::new();
/// sdtree::set_home(1);
/// tree.get_or_insert(7, 70);
/// sdtree::set_home(0);
/// assert_eq!(tree.get(7), Some(70));
/// ```
pub fn set_home(home: usize) {
    #[cfg(not(any(loom, fuzzing)))]
    blocks::set_home(if home < HOMES { home } else { 0 });
    #[cfg(any(loom, fuzzing))]
    let _ = home < HOMES;
}

#[cfg(not(any(loom, fuzzing)))]
mod blocks;

#[cfg(not(any(loom, fuzzing)))]
use blocks::{allocate, deallocate};
#[cfg(any(loom, fuzzing))]
use global::{allocate, deallocate};

#[cfg(not(any(loom, fuzzing)))]
pub(crate) use blocks::pool_bytes;

/// No blocks.
#[cfg(any(loom, fuzzing))]
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
    /// `memory` came from `allocate`, for the same layout, and is not used any more.
    pub(super) unsafe fn deallocate(memory: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { std::alloc::dealloc(memory.as_ptr(), layout) }
    }
}

#[cfg(all(test, not(any(loom, fuzzing))))]
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
