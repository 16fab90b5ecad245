//! Blocks of three words for nodes, which the process's trees share.
//!
//! ```text
//!   thread A   hot ▢▢▢▢        spare ▢▢▢▢▢▢▢▢        a node comes from `hot` and goes back to it
//!   thread B   hot ▢▢▢▢▢▢      spare
//!                                                    a full chain goes to the depot, a thread
//!   depot      ▢▢▢▢▢▢▢▢  ▢▢▢▢▢▢▢▢  …                 that has none left takes one from there
//! ```
//!
//! A node of 24 bytes would take 32 of malloc's, and a lock whenever threads meet there. Here a thread that makes nodes and frees
//! them goes to its own two chains, and once in 128 times to the depot. It does not wait there: a thread that finds the depot busy
//! makes new blocks, or keeps those it has until it comes again. (Only threads that end wait.) Two chains, so that a thread which
//! swings between making and freeing asks no depot.
//!
//! - M1 A block is in one place: in a node's hands, or once in one chain; a chain is one thread's or the depot's.
//! - M2 Blocks do not go back to the allocator. Blocks that one tree has freed serve the next, and there are as many as were ever
//!   needed at a time, garbage included.
//! - M3 Each home has a depot. A thread goes to that of its home, and leaves its chains there, unless another thread is there, when
//!   it gets another home. So blocks stay with their home, but for those that a thread frees for another: they become its own
//!   home's.

use super::{Layout, NonNull, global};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::HOMES;

/// Memory for a node. In a free one the first word leads to the next of its chain.
#[repr(C)]
struct Block {
    next: Option<NonNull<Block>>,
    _rest: [usize; 2],
}

/// The blocks of a full chain: 3 KiB.
const CHAIN: usize = 128;

/// Free blocks.
#[derive(Default)]
struct Chain {
    first: Option<NonNull<Block>>,
    len: usize,
}

// SAFETY: a chain owns its blocks (M1).
unsafe impl Send for Chain {}

impl Chain {
    /// So many new blocks as a chain has.
    #[cold]
    fn fresh() -> Self {
        let layout = Layout::new::<[Block; CHAIN]>();
        let first = global::allocate(layout).cast::<Block>();
        BYTES.fetch_add(layout.size() as u64, Relaxed);
        let mut chain = Self::default();
        // From the last on, so that neighbours are given out in ascending order.
        for at in (0..CHAIN).rev() {
            // SAFETY: `allocate` returned memory for so many blocks, which nothing else knows.
            unsafe { chain.push(first.add(at)) };
        }
        chain
    }

    fn is_full(&self) -> bool {
        self.len >= CHAIN
    }

    /// # Safety
    /// Nothing else uses the block, and it is in no chain.
    #[inline]
    unsafe fn push(&mut self, block: NonNull<Block>) {
        let next = self.first.replace(block);
        // SAFETY: the block is the chain's from now on, and has room for the word.
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

/// Chains that no thread has, by home.
static DEPOTS: [Mutex<Depot>; HOMES] = [const { Mutex::new(Depot(Vec::new())) }; HOMES];
/// Bytes of all blocks there are. Relaxed: a figure for people.
static BYTES: AtomicU64 = AtomicU64::new(0);

/// None of its chains is empty.
struct Depot(Vec<Chain>);

impl Depot {
    /// The depot of a home, unless another thread is there.
    fn try_enter(home: usize) -> Option<MutexGuard<'static, Self>> {
        match DEPOTS.get(home)?.try_lock() {
            Ok(depot) => Some(depot),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// For threads that end.
    fn enter(home: usize) -> MutexGuard<'static, Self> {
        DEPOTS[home % HOMES]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a chain of any length in, and pours it into the last one: chains do not become ever shorter.
    fn put(&mut self, mut chain: Chain) {
        if chain.is_full() {
            return self.0.push(chain);
        }
        while let Some(block) = chain.pop() {
            match self.0.last_mut().filter(|last| !last.is_full()) {
                // SAFETY: it has just been taken out of the other chain.
                Some(last) => unsafe { last.push(block) },
                None => {
                    // SAFETY: as above.
                    unsafe { chain.push(block) };
                    return self.0.push(chain);
                }
            }
        }
    }
}

/// Bytes of all blocks, in use and free.
pub(crate) fn pool_bytes() -> u64 {
    BYTES.load(Relaxed)
}

/// One thread's free blocks.
#[derive(Default)]
struct Cache {
    hot: Cell<Chain>,
    /// Empty, or full at least.
    spare: Cell<Chain>,
    home: Cell<usize>,
}

impl Cache {
    /// Gives its chains to a depot.
    fn empty(&self, depot: &mut Depot) {
        depot.put(self.hot.take());
        depot.put(self.spare.take());
    }

    #[inline]
    fn take(&self) -> NonNull<Block> {
        let mut hot = self.hot.take();
        loop {
            if let Some(block) = hot.pop() {
                self.hot.set(hot);
                return block;
            }
            hot = self.another();
        }
    }

    /// A chain for one that is empty.
    #[cold]
    fn another(&self) -> Chain {
        let spare = self.spare.take();
        match spare.len {
            0 => {
                let depot = Depot::try_enter(self.home.get());
                let chain = depot.and_then(|mut depot| depot.0.pop());
                chain.unwrap_or_else(Chain::fresh)
            }
            _ => spare,
        }
    }

    /// # Safety
    /// Nothing else uses the block, and it is in no chain.
    #[inline]
    unsafe fn give(&self, block: NonNull<Block>) {
        let mut hot = self.hot.take();
        if hot.is_full() {
            hot = self.put_aside(hot);
        }
        // SAFETY: the caller's promise.
        unsafe { hot.push(block) };
        self.hot.set(hot);
    }

    /// Makes room for a chain that is full, if the depot is free; else it goes on growing.
    #[cold]
    fn put_aside(&self, hot: Chain) -> Chain {
        let spare = self.spare.take();
        if spare.len > 0 {
            let Some(mut depot) = Depot::try_enter(self.home.get()) else {
                self.spare.set(spare);
                return hot;
            };
            depot.put(spare);
        }
        self.spare.set(hot);
        Chain::default()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.empty(&mut Depot::enter(self.home.get()));
    }
}

thread_local! {
    static CACHE: Cache = const {
        Cache {
            hot: Cell::new(Chain { first: None, len: 0 }),
            spare: Cell::new(Chain { first: None, len: 0 }),
            home: Cell::new(0),
        }
    };
}

/// From now on this thread's blocks come from that home's depot, or are new.
pub(super) fn set_home(home: usize) {
    // A thread that ends may have no cache any more.
    let _ = CACHE.try_with(|cache| {
        let before = cache.home.replace(home);
        // No thread waits: where the depot is busy, two chains at most come along.
        if before != home
            && let Some(mut depot) = Depot::try_enter(before)
        {
            cache.empty(&mut depot);
        }
    });
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
/// `memory` came from `allocate`, for the same layout, and is not used any more.
#[inline]
pub(super) unsafe fn deallocate(memory: NonNull<u8>, layout: Layout) {
    if !is_block(layout) {
        // SAFETY: the caller's promise, and `allocate` took it from there.
        return unsafe { global::deallocate(memory, layout) };
    }
    let block = memory.cast();
    // SAFETY: the caller's promise: it is a block that a node has given up.
    let given = CACHE.try_with(|cache| unsafe { cache.give(block) });
    // SAFETY: as above, and there was no cache to take it.
    given.unwrap_or_else(|_| unsafe { Cache::default().give(block) });
}

#[cfg(test)]
mod tests {
    use super::super::Owned;
    use super::*;

    type Node = [u64; 3];

    fn make() -> Vec<Owned<Node>> {
        (0..1000).map(|at| Owned::new([at; 3])).collect()
    }

    /// Where the nodes are, in ascending order.
    fn addresses(nodes: &[Owned<Node>]) -> Vec<usize> {
        let address = |node: &Owned<Node>| (&raw const **node).addr();
        let mut addresses: Vec<_> = nodes.iter().map(address).collect();
        addresses.sort_unstable();
        addresses
    }

    #[test]
    fn blocks_of_a_thread_are_distinct_and_aligned() {
        let nodes = make();
        let addresses = addresses(&nodes);
        let apart = |two: &[usize]| two[1] - two[0] >= size_of::<Node>();
        assert!(addresses.windows(2).all(apart));
        let aligned = |address: &usize| address.is_multiple_of(align_of::<Node>());
        assert!(addresses.iter().all(aligned));
        assert!(pool_bytes() >= 24_000);
    }

    #[test]
    fn a_thread_that_finds_the_depot_busy_loses_nothing() {
        let depot = Depot::enter(0);
        let nodes = make();
        let before = addresses(&nodes);
        drop(nodes); // eight chains, of which it would have given six away
        let nodes = make();
        assert_eq!(addresses(&nodes), before);
        drop(depot);
        drop(nodes);
    }

    #[test]
    fn each_home_has_its_blocks_back_and_no_other_has_them() {
        // Homes that no other test has.
        let [one, other] = [HOMES - 1, HOMES - 2];
        set_home(one);
        let first = addresses(&make());
        set_home(other);
        let nodes = make();
        let second = addresses(&nodes);
        assert!(
            first
                .iter()
                .all(|address| second.binary_search(address).is_err())
        );
        drop(nodes);
        set_home(one);
        let again = addresses(&make());
        set_home(0);
        // Of whole chains it had a block or two of the last that it did not use.
        let back = again
            .iter()
            .filter(|address| first.binary_search(address).is_ok());
        assert!(back.count() + CHAIN >= first.len());
        assert!(
            again
                .iter()
                .all(|address| second.binary_search(address).is_err())
        );
    }

    #[test]
    fn many_short_chains_make_few() {
        let mut depot = Depot(Vec::new());
        for len in 1..=100 {
            let mut long = Chain::fresh(); // the rest of it is lost: a test may
            let mut short = Chain::default();
            for _ in 0..len {
                // SAFETY: it comes out of another chain.
                unsafe { short.push(long.pop().expect("a full chain")) };
            }
            depot.put(short);
        }
        let lens: Vec<_> = depot.0.iter().map(|chain| chain.len).collect();
        assert_eq!(lens.iter().sum::<usize>(), 5050);
        assert_eq!(lens.len(), 5050_usize.div_ceil(CHAIN));
        assert!(lens.iter().all(|&len| len > 0));
    }
}
