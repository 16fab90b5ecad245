//! The static part: an array of slots, indexed by the leading bits of the key, each the root of a trie.
//!
//! ```text
//!   key  0110 1…            directory of 2⁴ slots              grown: 2⁵ slots
//!        └──┘                  …  │ 0110 │  …                … │ 01100 │ 01101 │ …
//!        slot                       │                             │        │
//!                               branch, bit 4          ───▶    edge 0    edge 1   of that branch
//!                                ╱       ╲
//! ```
//!
//! # Growing
//!
//! A directory that is too small is replaced by one of twice the slots, slot by slot, and no thread waits. The new one is
//! published first, unset (memory of zeros); a thread that meets an unset slot brings it to life, together with its twin, from
//! the slot of the older directory that covered both:
//!
//! 1. freeze the old slot, and if a branch on the very bit hangs there, both its edges: from now on all helpers see the same;
//! 2. put the two halves into the two new slots, each by a CAS that expects "unset";
//! 3. the one thread whose CAS set the second of the two counts the slot as moved, and retires that branch. The count's last
//!    thread unhooks and retires the older directory.
//!
//! - D1 A slot of the older directory is the truth until it is frozen. After that its halves are, in the new slots, and an
//!   operation that still stands in the old one starts again when it wants to change something. (A search need not: its
//!   result was true when the slot was frozen, which was after the search began.)
//! - D2 Helpers never touch freed memory, however late they come. One that finds a twin unset looks into the old slot. The
//!   nodes there may have gone on to live, be removed and retired below the twin that is set. But then the thread that set
//!   that one is still between the two steps, under a guard older than the retirement, and while it lasts nothing of that is
//!   freed.
//! - D3 A slot that was set is never unset again; a directory without an older one has no unset slots, except the first, where
//!   unset means empty.
//! - D4 A directory grows only when the last growth is complete, so there are two at most.
//!
//! Growing splits the trie's top branch away and copies nothing. The tempting alternative, a lock around a rebuilt table, would
//! stop every thread for the time of a pass over the whole table.

use crate::canary::{Canary, Mortal};
use crate::counters::{Counter, Counters};
use crate::garbage::Garbage;
use crate::key::{Bits, Stored};
use crate::node::{Edge, Target, Word};
use crate::pool::Owned;
use crate::reclaim::Guard;
use crate::sync::{AcqRel, Acquire, AtomicPtr, AtomicUsize, Relaxed, prefetch};
use std::alloc::Layout;
use std::ptr;
#[cfg(not(loom))]
use std::ptr::NonNull;
use std::sync::Arc;

/// The most bits that a directory can have: 2³⁰ slots, 8 GiB.
///
/// # Examples
///
/// ```
/// let builder = sdtree::Builder::new().max_directory_bits(sdtree::MAX_DIRECTORY_BITS);
/// assert!(builder.build::<u64>().is_ok());
/// ```
pub const MAX_DIRECTORY_BITS: u32 = 30;

/// Where the directory's memory comes from; a hook, so that it can be spread over NUMA nodes or use huge pages.
///
/// # Safety
///
/// Implementations keep the contract of [`std::alloc::GlobalAlloc`] for the two methods, and the memory that
/// `allocate_zeroed` returns is zero.
///
/// # Examples
///
/// ```
/// use sdtree::{DirectoryMemory, GlobalMemory};
/// use std::alloc::Layout;
/// use std::sync::Arc;
///
/// /// Refuses a directory over 1 MiB: the tree keeps the one it has, and grows in depth.
/// struct AtMost1MiB;
///
/// // SAFETY: the global allocator's memory, or none.
/// unsafe impl DirectoryMemory for AtMost1MiB {
///     fn allocate_zeroed(&self, layout: Layout) -> *mut u8 {
///         if layout.size() > 1 << 20 {
///             return std::ptr::null_mut();
///         }
///         GlobalMemory.allocate_zeroed(layout)
///     }
///
///     unsafe fn deallocate(&self, memory: *mut u8, layout: Layout) {
///         // SAFETY: it came from there, by the caller's promise.
///         unsafe { GlobalMemory.deallocate(memory, layout) }
///     }
/// }
///
/// let builder = sdtree::Builder::new().memory(Arc::new(AtMost1MiB));
/// assert!(builder.clone().capacity(1_000).build::<u64>().is_ok());
/// assert!(builder.capacity(1_000_000).build::<u64>().is_err());
/// ```
pub unsafe trait DirectoryMemory: Send + Sync {
    /// Returns zeroed memory of this size and alignment, or null if there is none. It must not unwind.
    fn allocate_zeroed(&self, layout: Layout) -> *mut u8;

    /// Takes the memory back.
    ///
    /// # Safety
    ///
    /// `memory` came from `allocate_zeroed` of this very object, for the same layout, and is not used any more.
    unsafe fn deallocate(&self, memory: *mut u8, layout: Layout);
}

/// The global allocator.
///
/// # Examples
///
/// ```
/// use sdtree::DirectoryMemory;
/// use std::alloc::Layout;
///
/// let layout = Layout::new::<[u64; 8]>();
/// let memory = sdtree::GlobalMemory.allocate_zeroed(layout);
/// assert!(!memory.is_null());
/// // SAFETY: it came from the same object for the same layout.
/// unsafe { sdtree::GlobalMemory.deallocate(memory, layout) };
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalMemory;

// SAFETY: both methods pass their arguments on to the global allocator. Directories are never of size zero.
unsafe impl DirectoryMemory for GlobalMemory {
    fn allocate_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the only caller, `Slots::new`, asks for one slot at least.
        unsafe { std::alloc::alloc_zeroed(layout) }
    }

    unsafe fn deallocate(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { std::alloc::dealloc(memory, layout) }
    }
}

/// The array of slots, in memory of the hook's.
struct Slots<K, V> {
    #[cfg(not(loom))]
    first: NonNull<Edge<K, V>>,
    #[cfg(loom)]
    edges: Box<[Edge<K, V>]>,
    #[cfg(not(loom))]
    len: usize,
    #[cfg(not(loom))]
    memory: Arc<dyn DirectoryMemory>,
}

// SAFETY: `Slots` is an owned array of edges; `Edge` is `Send` under these bounds, and the hook is `Send + Sync`.
unsafe impl<K: Send + Sync, V: Send + Sync> Send for Slots<K, V> {}
// SAFETY: shared access hands out `&Edge` only, and `Edge` is `Sync` under these bounds.
unsafe impl<K: Send + Sync, V: Send + Sync> Sync for Slots<K, V> {}

#[cfg(not(loom))]
impl<K, V> Slots<K, V> {
    fn new(len: usize, memory: &Arc<dyn DirectoryMemory>) -> Option<Self> {
        let first = memory.allocate_zeroed(Self::layout(len)?);
        Some(Self {
            first: NonNull::new(first.cast())?,
            len,
            memory: Arc::clone(memory),
        })
    }

    /// Twins, 16 bytes, share a cache line.
    fn layout(len: usize) -> Option<Layout> {
        Layout::array::<Edge<K, V>>(len).ok()?.align_to(16).ok()
    }

    #[inline]
    fn edges(&self) -> &[Edge<K, V>] {
        // SAFETY: `new` got memory for `len` edges, zeroed, and a zeroed edge is a valid (unset) one: it is an atomic pointer
        // and zero-sized fields. The memory lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }

    fn edges_mut(&mut self) -> &mut [Edge<K, V>] {
        // SAFETY: as in `edges`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }
}

#[cfg(not(loom))]
impl<K, V> Drop for Slots<K, V> {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: `new` got this memory from this hook for this layout. Edges need no drop: they own nothing.
            unsafe { self.memory.deallocate(self.first.as_ptr().cast(), layout) }
        }
    }
}

#[cfg(loom)]
impl<K: Stored, V: Copy + Send + Sync + 'static> Slots<K, V> {
    fn new(len: usize, _memory: &Arc<dyn DirectoryMemory>) -> Option<Self> {
        let edges = (0..len).map(|_| Edge::unset()).collect();
        Some(Self { edges })
    }

    fn edges(&self) -> &[Edge<K, V>] {
        &self.edges
    }

    fn edges_mut(&mut self) -> &mut [Edge<K, V>] {
        &mut self.edges
    }
}

/// One array of slots, and where its unset slots come from.
pub(crate) struct Directory<K, V> {
    slots: Slots<K, V>,
    bits: u32,
    canary: Canary,
    counters: Arc<Counters>,
    /// The directory this one grew out of; null once all its slots have moved.
    older: AtomicPtr<Directory<K, V>>,
    /// Slots of the older one that have moved.
    moved: AtomicUsize,
    /// The next slot of the older one that a helper moves; it runs round, so that slots which a stopped thread took up are
    /// moved by others.
    cursor: std::sync::atomic::AtomicUsize,
}

impl<K, V> Mortal for Directory<K, V> {
    fn canary(&self) -> &Canary {
        &self.canary
    }
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Directory<K, V> {
    /// `None` if the hook has no memory for it.
    pub(crate) fn new(
        bits: u32,
        memory: &Arc<dyn DirectoryMemory>,
        counters: &Arc<Counters>,
    ) -> Option<Owned<Self>> {
        Self::over(
            ptr::null_mut(),
            bits.min(MAX_DIRECTORY_BITS),
            memory,
            counters,
        )
    }

    /// A directory whose slots are unset if there is an `older` one, and empty otherwise.
    fn over(
        older: *mut Self,
        bits: u32,
        memory: &Arc<dyn DirectoryMemory>,
        counters: &Arc<Counters>,
    ) -> Option<Owned<Self>> {
        Some(Owned::new(Self {
            slots: Slots::new(1 << bits, memory)?,
            bits,
            canary: Canary::new(),
            counters: Arc::clone(counters),
            older: AtomicPtr::new(older),
            moved: AtomicUsize::new(0),
            cursor: std::sync::atomic::AtomicUsize::new(0),
        }))
    }

    pub(crate) fn bits(&self) -> u32 {
        self.bits
    }

    pub(crate) fn len(&self) -> usize {
        1 << self.bits
    }

    /// The slot for keys that begin with these bits.
    #[inline]
    pub(crate) fn index(&self, lead: u32) -> usize {
        (lead >> 1 >> (31 - self.bits)) as usize
    }

    /// Slot `index` and what it holds, brought to life if need be.
    #[inline]
    pub(crate) fn slot<'g>(
        &'g self,
        index: usize,
        guard: &'g Guard,
    ) -> (&'g Edge<K, V>, Word<'g, K, V>) {
        self.canary.touch();
        let edge = &self.slots.edges()[index];
        let word = edge.load(guard);
        if word.is_unset() {
            self.settle(index >> 1, guard);
            return (edge, edge.load(guard));
        }
        (edge, word)
    }

    /// Has the processor fetch slot `index`.
    #[inline]
    pub(crate) fn prefetch(&self, index: usize) {
        prefetch(&raw const self.slots.edges()[index]);
    }

    /// Has the processor fetch the node that slot `index` leads to.
    #[inline]
    pub(crate) fn prefetch_node(&self, index: usize, guard: &Guard) {
        self.slots.edges()[index].load(guard).prefetch();
    }

    /// The directory whose slots still move to this one.
    pub(crate) fn older<'g>(&self, _guard: &'g Guard) -> Option<&'g Self> {
        // Acquire: who sees null sees all slots set; partner of the release in `count_moved`.
        let older = self.older.load(Acquire);
        // SAFETY: `older` was the current directory when `self` was made. It is retired after `older` is set to null, so after
        // the guard was made, and lives as long as the guard. It is never borrowed mutably before that.
        unsafe { older.as_ref() }
    }

    #[cold]
    fn settle(&self, old_index: usize, guard: &Guard) {
        if let Some(older) = self.older(guard) {
            self.migrate(older, old_index, guard);
        }
    }

    /// Moves some slots of the older directory; each insertion does it while the directory grows. False if there is none.
    #[inline]
    pub(crate) fn help_migration(&self, slots: usize, guard: &Guard) -> bool {
        let Some(older) = self.older(guard) else {
            return false;
        };
        let first = self.cursor.fetch_add(slots, Relaxed);
        let indexes = (first..first + slots).map(|index| index & (older.len() - 1));
        // A node has to be looked at to be moved: they are fetched together, not one after the other.
        for index in indexes.clone() {
            older.prefetch_node(index, guard);
        }
        for index in indexes {
            self.migrate(older, index, guard);
        }
        true
    }

    /// Moves one slot of the older directory to its two slots here, unless that is done.
    fn migrate(&self, older: &Self, index: usize, guard: &Guard) {
        let [zero, one] = [2 * index, 2 * index + 1].map(|twin| &self.slots.edges()[twin]);
        // What is safe to look at in the old slot hangs on this test: see D2.
        if !zero.load(guard).is_unset() && !one.load(guard).is_unset() {
            return;
        }
        older.canary.touch();
        let root = older.slots.edges()[index].freeze(guard);
        let split_bit = older.bits;
        let half_of = |lead: u32| match lead >> (31 - split_bit) & 1 {
            0 => [root, Word::empty()],
            _ => [Word::empty(), root],
        };
        let mut branch = None;
        let halves = match root.target() {
            Target::Empty => [root, root],
            Target::Branch(top) if top.bit() == split_bit => {
                branch = Some(root);
                [0, 1].map(|side| top.edge(side).freeze(guard))
            }
            Target::Branch(top) => half_of(top.lead()),
            Target::Leaf(leaf) => half_of(leaf.key().lead()),
        };
        zero.adopt(halves[0]);
        if one.adopt(halves[1]) {
            if let Some(branch) = branch {
                self.counters.add(Counter::Branches, -1);
                guard.defer(Garbage::migrated_branch(branch));
            }
            self.count_moved(older, guard);
        }
    }

    /// Counts one slot of the older directory as moved; the last one ends its life.
    fn count_moved(&self, older: &Self, guard: &Guard) {
        // Release: our two slots are set before the count; acquire: the last one has seen all the others' slots set.
        if self.moved.fetch_add(1, AcqRel) + 1 < older.len() {
            return;
        }
        // Release: partner of the acquire in `older`.
        let older = self.older.swap(ptr::null_mut(), AcqRel);
        if !older.is_null() {
            // SAFETY: an owner gave it away, it is the current directory no more, and no new guard can reach it: the only way to it was
            // the pointer that this thread has just swapped out. Each slot is moved once, so only one thread gets here.
            guard.defer(Garbage::owned(unsafe { Owned::from_raw(older) }));
        }
    }

    /// Completes a growth, then frees all nodes. For a tree that is not shared any more.
    pub(crate) fn drop_nodes(&mut self, guard: &Guard) {
        if let Some(older) = self.older(guard) {
            (0..older.len()).for_each(|index| self.migrate(older, index, guard));
        }
        self.slots
            .edges_mut()
            .iter_mut()
            .for_each(Edge::drop_subtree);
    }
}

/// What became of an attempt to grow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Growth {
    /// The directory has grown; its slots now move.
    Done,
    /// Another thread was faster.
    Lost,
    /// The hook has no memory.
    Refused,
}

/// The current directory of a tree.
pub(crate) struct Current<K, V>(AtomicPtr<Directory<K, V>>);

impl<K: Stored, V: Copy + Send + Sync + 'static> Current<K, V> {
    pub(crate) fn new(first: Owned<Directory<K, V>>) -> Self {
        Self(AtomicPtr::new(Owned::into_raw(first)))
    }

    #[inline]
    pub(crate) fn load<'g>(&'g self, _guard: &'g Guard) -> &'g Directory<K, V> {
        // Acquire: partner of the release in `replace`.
        let current = self.0.load(Acquire);
        // SAFETY: an owner gave it away, and it is not freed before it has been replaced and all its slots have moved, and then only
        // when this guard is gone. A shared borrow of `self` rules out `drop_nodes`, the only mutable use.
        unsafe { &*current }
    }

    /// Publishes a directory of twice the slots of `old`, all unset, over it. The old one lives on as its `older`.
    pub(crate) fn grow(&self, old: &Directory<K, V>, memory: &Arc<dyn DirectoryMemory>) -> Growth {
        // Not `old` itself: the directory will be freed through the pointer that its owner gave away.
        let current = self.0.load(Acquire);
        if !ptr::eq(current, old) {
            return Growth::Lost;
        }
        let Some(grown) = Directory::over(current, old.bits + 1, memory, &old.counters) else {
            return Growth::Refused;
        };
        let new = Owned::into_raw(grown);
        // Release: the new directory is written before it is seen; partner of the acquire in `load`.
        if self
            .0
            .compare_exchange(current, new, AcqRel, Relaxed)
            .is_ok()
        {
            return Growth::Done;
        }
        // SAFETY: leaked above, and published to no thread.
        drop(unsafe { Owned::from_raw(new) });
        Growth::Lost
    }

    /// Frees the directory and all nodes. For a tree that is being dropped.
    pub(crate) fn drop_all(&mut self, guard: &Guard) {
        let current = self.0.swap(ptr::null_mut(), AcqRel);
        if !current.is_null() {
            // SAFETY: an owner gave it away, and `&mut self` proves that no other thread can reach it.
            unsafe { Owned::from_raw(current) }.drop_nodes(guard);
        }
    }
}
