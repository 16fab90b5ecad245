//! Nodes, the words that point at them, and every change that a word can go through.
//!
//! ```text
//!  edge word   63        48 47                    3   2     1      0
//!             │   tag      │  address of the node   │EMPTY│FROZEN│LEAF│
//!
//!  leaf        key, value                  never changes
//!  branch      [edge 0, edge 1], bit, lead only its two edges change
//! ```
//!
//! Everything that happens to the tree happens to one edge word by one compare-and-swap, in one of these ways; nothing else
//! writes an edge:
//!
//! | change | word before → after | meaning |
//! |---|---|---|
//! | [`Edge::fill`] | empty → leaf | a pair enters an unused directory slot |
//! | [`Edge::split`] | leaf or branch *w* → new branch over *w* and a new leaf | a pair enters |
//! | [`Edge::replace`] | leaf → leaf of the same key | a value changes |
//! | [`Edge::take`] | leaf → empty (slot), or empty and frozen (branch) | a pair leaves; this marks the branch |
//! | [`Edge::freeze`] | word → the same word, frozen | no thread changes this edge ever again |
//! | [`Edge::splice`] | branch → its other child | a marked branch is unlinked |
//! | [`Edge::adopt`] | unset → word of the old directory | a slot of a grown directory comes to life |
//!
//! # Invariants
//!
//! - N1 A frozen word never changes. Every change expects a word that is not frozen.
//! - N2 An edge of a branch is never empty without being frozen: a branch that lost a child only waits to be unlinked.
//! - N3 A branch is unlinked only when both its edges are frozen, so nothing can be attached to a branch that is gone.
//! - N4 Exactly one edge that is not frozen, of a linked owner, points at a linked node; frozen ones may besides. (The owner is
//!   a directory slot or a linked branch.) A node that was unlinked is never linked again.
//! - N5 All keys that were ever below a branch share the bits before `bit`, and lie at the edge that their `bit` names.
//!
//! N3 and N4 are why the CAS on an edge that turns a node out is also the proof that it is unreachable for new searches. It may
//! be retired at once, by the one thread whose CAS succeeded. N4 also disarms ABA. A word that is compared is one that this
//! thread loaded under its guard, its node cannot have been freed and allocated anew since, and it cannot have been unlinked and
//! linked again. A branch or leaf may leave an edge and come back to it (a branch put above it, and unlinked again); then
//! everything that was true of the word is true again.
//!
//! # Orderings
//!
//! Every load of an edge is an acquire and every CAS that links a node a release: they are partners, the content of a node is
//! written before the word that leads to it. Marks need no more: a thread that sees a frozen word sees (through the same pair)
//! all that its freezer saw, in particular the grown directory on account of which a slot was frozen.

use crate::canary::{Canary, Mortal};
use crate::garbage::Garbage;
use crate::key::{Bits, Stored};
use crate::pool::Owned;
use crate::reclaim::Guard;
use crate::sync::{AcqRel, Acquire, AtomicPtr, prefetch};
use std::marker::PhantomData;
use std::ptr;

const LEAF: usize = 1;
const FROZEN: usize = 2;
const EMPTY: usize = 4;
const TAG_SHIFT: u32 = 48;
const ADDRESS: usize = (1 << TAG_SHIFT) - 8;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("edge words carry 16 bits of tag above a 48-bit address");

/// A pair. Immutable: a new value is a new leaf.
pub(crate) struct Leaf<K, V> {
    key: K,
    value: V,
    canary: Canary,
}

/// An inner node: keys whose bit `bit` is 0 lie below edge 0, the others below edge 1.
pub(crate) struct Branch<K, V> {
    edges: [Edge<K, V>; 2],
    bit: u32,
    /// The first 32 bits of some key below; those before `bit` are common to all of them.
    lead: u32,
    canary: Canary,
}

/// A word that points at a node. See the module's head for all that can happen to it.
pub(crate) struct Edge<K, V> {
    word: AtomicPtr<()>,
    kind: PhantomData<*const (K, V)>,
}

// SAFETY: an edge owns nodes that hold `K` and `V`. It hands out `&K` and `&V` to all threads that share it, and lets any of them
// retire (drop, on some thread) the node it points at. All that needs `K` and `V` to be both `Send` and `Sync`. The word itself
// is atomic.
unsafe impl<K: Send + Sync, V: Send + Sync> Send for Edge<K, V> {}
// SAFETY: as above.
unsafe impl<K: Send + Sync, V: Send + Sync> Sync for Edge<K, V> {}

/// A word that was read from an edge while the guard of lifetime `'g` was held.
pub(crate) struct Word<'g, K, V> {
    raw: *mut (),
    kind: PhantomData<(&'g Guard, *const (K, V))>,
}

impl<K, V> Clone for Word<'_, K, V> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K, V> Copy for Word<'_, K, V> {}

impl<K, V> PartialEq for Word<'_, K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

/// What a word points at.
pub(crate) enum Target<'g, K, V> {
    Empty,
    Leaf(&'g Leaf<K, V>),
    Branch(&'g Branch<K, V>),
}

/// Whose edge it is: an emptied slot can be used again, an emptied edge of a branch cannot (N2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    Slot,
    Branch,
}

impl Owner {
    /// The word that an edge of this owner holds once its child is gone.
    fn vacant(self) -> *mut () {
        ptr::without_provenance_mut(match self {
            Self::Slot => EMPTY,
            Self::Branch => EMPTY | FROZEN,
        })
    }
}

/// What became of an attempt to unlink a branch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Splice {
    /// It is unlinked, by this thread.
    Done,
    /// It is unlinked, by this thread, and has left no child: the branch above must go too.
    DoneAndVacant,
    /// The edge that led to it has changed: look again.
    Lost,
    /// Both children live; its edges are frozen because the directory grows.
    Migrating,
}

impl<'g, K: Stored, V: Copy + Send + Sync + 'static> Word<'g, K, V> {
    fn new(raw: *mut ()) -> Self {
        Self {
            raw,
            kind: PhantomData,
        }
    }

    /// The word of a slot that is not in use.
    pub(crate) fn empty() -> Self {
        Self::new(Owner::Slot.vacant())
    }

    /// True if it was never written: zero.
    #[inline]
    pub(crate) fn is_unset(self) -> bool {
        self.raw.addr() == 0
    }

    /// True if the edge it came from will never change.
    #[inline]
    pub(crate) fn is_frozen(self) -> bool {
        self.raw.addr() & FROZEN != 0
    }

    /// True if it points at no node.
    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.raw.addr() & !(FROZEN | EMPTY) == 0
    }

    /// True unless it is a leaf whose key certainly has another tag.
    #[inline]
    pub(crate) fn may_hold(self, tag: u16) -> bool {
        self.raw.addr() >> TAG_SHIFT == usize::from(tag)
    }

    /// This word as an edge holds it that can change.
    pub(crate) fn thawed(self) -> Self {
        Self::new(self.raw.map_addr(|addr| addr & !FROZEN))
    }

    fn frozen(self) -> Self {
        Self::new(self.raw.map_addr(|addr| addr | FROZEN))
    }

    fn node<T>(self) -> *mut T {
        self.raw.map_addr(|addr| addr & ADDRESS).cast()
    }

    /// Has the processor fetch the node it points at, if there is one.
    #[inline]
    pub(crate) fn prefetch(self) {
        if !self.is_empty() {
            prefetch(self.node::<()>());
        }
    }

    /// The node it points at.
    #[inline]
    pub(crate) fn target(self) -> Target<'g, K, V> {
        if self.is_empty() {
            return Target::Empty;
        }
        // SAFETY: a word other than empty holds the address of a live node of the kind that LEAF tells. `leaf_word` and `split`
        // are the only makers of such words, from nodes they have just given away. The node is not freed while 'g lasts. It was
        // linked at some time after the guard was made (the edge was reachable for this thread), so it is retired after that,
        // and `Guard::defer` waits for this guard. Nodes are only ever shared, except for their atomic edges.
        unsafe {
            if self.raw.addr() & LEAF == 0 {
                Target::Branch(&*self.node::<Branch<K, V>>())
            } else {
                Target::Leaf(&*self.node::<Leaf<K, V>>())
            }
        }
    }
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Leaf<K, V> {
    pub(crate) fn new(key: K, value: V) -> Owned<Self> {
        Owned::new(Self {
            key,
            value,
            canary: Canary::new(),
        })
    }

    /// The key, as it is stored.
    #[inline]
    pub(crate) fn stored(&self) -> &K {
        self.canary.touch();
        &self.key
    }

    #[inline]
    pub(crate) fn key(&self) -> K::Query<'_> {
        self.stored().query()
    }

    #[inline]
    pub(crate) fn value(&self) -> V {
        self.canary.touch();
        self.value
    }
}

/// Branches, and leaves of numbers, fit the pool's blocks.
#[cfg(not(loom))]
const _: () = {
    type Key = crate::key::Key16;
    assert!(size_of::<Leaf<Key, u64>>() == 24 && size_of::<Branch<Key, u64>>() == 24);
};

impl<K, V> Mortal for Leaf<K, V> {
    fn canary(&self) -> &Canary {
        &self.canary
    }
}

impl<K, V> Mortal for Branch<K, V> {
    fn canary(&self) -> &Canary {
        &self.canary
    }
}

impl<K, V> Branch<K, V> {
    #[inline]
    pub(crate) fn bit(&self) -> u32 {
        self.canary.touch();
        self.bit
    }

    #[inline]
    pub(crate) fn lead(&self) -> u32 {
        self.lead
    }

    #[inline]
    pub(crate) fn edge(&self, side: usize) -> &Edge<K, V> {
        self.canary.touch();
        &self.edges[side & 1]
    }
}

/// Where a new leaf goes: the bit in which its key differs from all keys below the edge, and the key's value of it.
#[derive(Clone, Copy)]
pub(crate) struct Fork {
    pub(crate) bit: u32,
    pub(crate) side: usize,
    pub(crate) lead: u32,
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Edge<K, V> {
    fn new(raw: *mut ()) -> Self {
        Self {
            word: AtomicPtr::new(raw),
            kind: PhantomData,
        }
    }

    /// An edge that was never written. Memory of zeros is one, too.
    #[cfg(loom)]
    pub(crate) fn unset() -> Self {
        Self::new(ptr::null_mut())
    }

    /// Reads the word. Acquire: partner of the release in `exchange`; the node's content is seen.
    #[inline]
    pub(crate) fn load<'g>(&self, _guard: &'g Guard) -> Word<'g, K, V> {
        Word::new(self.word.load(Acquire))
    }

    /// The one place in which edges change. Release: partner of the acquire in `load`. Acquire, on failure as well: what it finds
    /// there is followed.
    #[inline]
    fn exchange<'g>(&self, old: Word<'g, K, V>, new: *mut ()) -> Result<(), Word<'g, K, V>> {
        self.word
            .compare_exchange(old.raw, new, AcqRel, Acquire)
            .map(drop)
            .map_err(Word::new)
    }

    /// Puts `leaf` where nothing is. `Err` gives the leaf back: the edge has changed.
    pub(crate) fn fill(
        &self,
        vacant: Word<'_, K, V>,
        leaf: Owned<Leaf<K, V>>,
    ) -> Result<(), Owned<Leaf<K, V>>> {
        debug_assert!(vacant.is_empty() && !vacant.is_frozen());
        let new = leaf_word(leaf);
        self.exchange(vacant, new).map_err(|_| unlinked_leaf(new))
    }

    /// Puts a branch over `below` and `leaf`. `Err` gives the leaf back: the edge has changed.
    pub(crate) fn split(
        &self,
        below: Word<'_, K, V>,
        fork: Fork,
        leaf: Owned<Leaf<K, V>>,
    ) -> Result<(), Owned<Leaf<K, V>>> {
        debug_assert!(!below.is_empty() && !below.is_frozen());
        let new = leaf_word(leaf);
        let words = if fork.side == 0 {
            [new, below.raw]
        } else {
            [below.raw, new]
        };
        let branch = Owned::into_raw(Owned::new(Branch {
            edges: words.map(Self::new),
            bit: fork.bit,
            lead: fork.lead,
            canary: Canary::new(),
        }));
        assert_fits(branch.addr());
        self.exchange(below, branch.cast()).map_err(|_| {
            // SAFETY: `branch` was leaked above, and the failed CAS published it to no thread. Edges own nothing: the subtree
            // below stays as it is, and the leaf goes back to the caller.
            drop(unsafe { Owned::from_raw(branch) });
            unlinked_leaf(new)
        })
    }

    /// Puts `leaf`, of the same key, in the place of the leaf `old`, and retires `old`.
    pub(crate) fn replace(
        &self,
        old: Word<'_, K, V>,
        leaf: Owned<Leaf<K, V>>,
        guard: &Guard,
    ) -> Result<(), Owned<Leaf<K, V>>> {
        debug_assert!(!old.is_frozen());
        let new = leaf_word(leaf);
        match self.exchange(old, new) {
            Ok(()) => {
                guard.defer(Garbage::leaf(old));
                Ok(())
            }
            Err(_) => Err(unlinked_leaf(new)),
        }
    }

    /// Takes the leaf `old` away and retires it. Under a branch this marks the branch: it has lost a child for good.
    pub(crate) fn take(&self, old: Word<'_, K, V>, owner: Owner, guard: &Guard) -> bool {
        debug_assert!(!old.is_frozen());
        let taken = self.exchange(old, owner.vacant()).is_ok();
        if taken {
            guard.defer(Garbage::leaf(old));
        }
        taken
    }

    /// Makes sure that this edge never changes again, and returns what it holds for ever. A round is lost only to another
    /// thread's success, and the first freezer's word stays.
    pub(crate) fn freeze<'g>(&self, guard: &'g Guard) -> Word<'g, K, V> {
        let mut word = self.load(guard);
        while !word.is_frozen() {
            match self.exchange(word, word.frozen().raw) {
                Ok(()) => word = word.frozen(),
                Err(found) => word = found,
            }
        }
        word
    }

    /// Unlinks the branch that `word` points at, if it is marked: freezes its other edge, and puts that child in its place.
    /// The set of pairs does not change. Any thread may do it, for any other.
    pub(crate) fn splice<'g>(
        &self,
        word: Word<'g, K, V>,
        owner: Owner,
        guard: &'g Guard,
    ) -> Splice {
        let Target::Branch(branch) = word.target() else {
            return Splice::Lost;
        };
        let gone = |side| {
            let word = branch.edge(side).load(guard);
            word.is_empty() && word.is_frozen()
        };
        let Some(dead) = [0, 1].into_iter().find(|&side| gone(side)) else {
            return Splice::Migrating;
        };
        if word.is_frozen() {
            return Splice::Lost;
        }
        let survivor = branch.edge(1 - dead).freeze(guard);
        let (new, done) = if survivor.is_empty() {
            (owner.vacant(), Splice::DoneAndVacant)
        } else {
            (survivor.thawed().raw, Splice::Done)
        };
        match self.exchange(word, new) {
            Ok(()) => {
                guard.defer(Garbage::branch(word));
                done
            }
            Err(_) => Splice::Lost,
        }
    }

    /// Brings an unset slot of a grown directory to life. True for the one thread that did it.
    pub(crate) fn adopt(&self, word: Word<'_, K, V>) -> bool {
        let word = if word.is_empty() {
            Word::empty()
        } else {
            word.thawed()
        };
        self.exchange(Word::new(ptr::null_mut()), word.raw).is_ok()
    }

    /// Frees all nodes below. For a tree that is not shared any more: `&mut` proves that no other thread can follow the edge.
    pub(crate) fn drop_subtree(&mut self) {
        let mut pending = vec![take_word(self)];
        while let Some(word) = pending.pop() {
            let word = Word::<K, V>::new(word);
            if word.is_empty() {
                continue;
            }
            // SAFETY: the caller owns the tree alone, so each linked node is owned by the one edge that leads to it (N4), and each
            // edge is visited once. Nodes that were unlinked have been retired, and no edge of a linked node leads to them.
            unsafe {
                if word.raw.addr() & LEAF == 0 {
                    let mut branch = Owned::from_raw(word.node::<Branch<K, V>>());
                    pending.extend(branch.edges.iter_mut().map(take_word));
                } else {
                    drop(Owned::from_raw(word.node::<Leaf<K, V>>()));
                }
            }
        }
    }
}

/// The word of an edge that is about to go.
fn take_word<K, V>(edge: &mut Edge<K, V>) -> *mut () {
    edge.word.load(Acquire)
}

/// Words have room for 48 bits of address, which is what user space gets unless it asks for more (`mmap` with a high hint).
fn assert_fits(addr: usize) {
    assert!(
        addr & !ADDRESS == 0,
        "the allocator returned address {addr:#x}, beyond 48 bits"
    );
}

/// The word for a new leaf, which it owns.
fn leaf_word<K: Stored, V: Copy + Send + Sync + 'static>(leaf: Owned<Leaf<K, V>>) -> *mut () {
    let tag = usize::from(leaf.key().tag());
    let leaf = Owned::into_raw(leaf).cast::<()>();
    assert_fits(leaf.addr());
    leaf.map_addr(|addr| addr | tag << TAG_SHIFT | LEAF)
}

/// The leaf of a word that `leaf_word` made and no CAS has published.
fn unlinked_leaf<K: Stored, V: Copy + Send + Sync + 'static>(word: *mut ()) -> Owned<Leaf<K, V>> {
    let leaf = Word::<K, V>::new(word).node::<Leaf<K, V>>();
    // SAFETY: the callers leaked this very leaf by `leaf_word`, and their CAS failed: no other thread has seen the word.
    unsafe { Owned::from_raw(leaf) }
}

impl Garbage {
    fn leaf<K: Stored, V: Copy + Send + Sync + 'static>(word: Word<'_, K, V>) -> Self {
        Self::new::<Leaf<K, V>>(word.node())
    }

    fn branch<K: Stored, V: Copy + Send + Sync + 'static>(word: Word<'_, K, V>) -> Self {
        Self::new::<Branch<K, V>>(word.node())
    }

    /// The branch at the root of a slot that has moved to the grown directory.
    pub(crate) fn migrated_branch<K: Stored, V: Copy + Send + Sync + 'static>(
        word: Word<'_, K, V>,
    ) -> Self {
        Self::branch(word)
    }
}
