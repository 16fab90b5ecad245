//! The structural invariants, checked by walking over everything.
//!
//! Written for a tree that no thread is changing: then no mark may be left, for every removal sees its path clean before it
//! returns. While others change the tree, a report of marks, or of counts that are off, means nothing.

use crate::bytes::ByteTree;
use crate::counters::Counter;
use crate::directory::Directory;
use crate::fixed::SdTree;
use crate::key::{Bits, Stored};
use crate::node::{Leaf, Target, Word};
use crate::reclaim::Guard;
use crate::tree::Tree;

/// An invariant that does not hold.
///
/// # Examples
///
/// ```
/// let violation = sdtree::Violation::Count { what: "keys", counted: 2, found: 1 };
/// assert_eq!(violation.to_string(), "keys: counted 2, found 1");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An edge below this slot is frozen or empty though no operation is under way.
    #[error("slot {slot}: an edge below it is marked")]
    Marked {
        /// The slot.
        slot: usize,
    },
    /// Bits do not ascend on a path.
    #[error("slot {slot}: a branch on bit {below} lies below one on bit {above}")]
    BitOrder {
        /// The slot.
        slot: usize,
        /// The upper branch's bit.
        above: u32,
        /// The lower branch's bit.
        below: u32,
    },
    /// A branch tests a bit that the directory has used, or a key lies in the wrong slot.
    #[error("slot {slot}: a key or branch that belongs to slot {expected}")]
    WrongSlot {
        /// The slot.
        slot: usize,
        /// Where it belongs.
        expected: usize,
    },
    /// Two neighbouring keys do not ascend, or are not told apart by the bit of the branch over both.
    #[error(
        "slot {slot}: two neighbouring keys part at bit {found:?}, their branch tests bit {expected}"
    )]
    WrongFork {
        /// The slot.
        slot: usize,
        /// The first bit in which they differ; none if they are equal.
        found: Option<u32>,
        /// The bit of the branch.
        expected: u32,
    },
    /// A counter differs from what the walk found.
    #[error("{what}: counted {counted}, found {found}")]
    Count {
        /// Which.
        what: &'static str,
        /// The counter.
        counted: u64,
        /// The walk.
        found: u64,
    },
}

/// What a walk over one slot carries along.
struct SlotWalk<'g, K, V> {
    slot: usize,
    directory_bits: u32,
    /// The leaf before this one in the slot, and the bit of the branch under which the next one parts from it.
    previous: Option<(&'g Leaf<K, V>, u32)>,
    leaves: u64,
    branches: u64,
}

impl<K: Stored, V: Copy + Send + Sync + 'static> Tree<K, V> {
    pub(crate) fn check(&self) -> Result<(), Violation> {
        let guard = self.pin();
        let directory = self.directory(&guard);
        let (mut leaves, mut branches) = (0, 0);
        for slot in 0..directory.len() {
            let (_, root) = directory.slot(slot, &guard);
            let mut walk = SlotWalk {
                slot,
                directory_bits: directory.bits(),
                previous: None,
                leaves: 0,
                branches: 0,
            };
            walk.run(root, directory, &guard)?;
            leaves += walk.leaves;
            branches += walk.branches;
        }
        self.check_count("keys", Counter::Pairs, leaves)?;
        self.check_count("branches", Counter::Branches, branches)
    }

    fn check_count(
        &self,
        what: &'static str,
        counter: Counter,
        found: u64,
    ) -> Result<(), Violation> {
        let counted = self.counters().sum(counter);
        if counted == found {
            return Ok(());
        }
        Err(Violation::Count {
            what,
            counted,
            found,
        })
    }
}

impl<'g, K: Stored, V: Copy + Send + Sync + 'static> SlotWalk<'g, K, V> {
    /// Visits the slot depth first, edge 0 before edge 1, so that leaves come in the order of their keys. `fork` is the bit of
    /// the branch under which a subtree parts from what was visited before it; `above` that of the branch over it.
    fn run(
        &mut self,
        root: Word<'g, K, V>,
        directory: &Directory<K, V>,
        guard: &'g Guard,
    ) -> Result<(), Violation> {
        let slot = self.slot;
        let mut pending = vec![(root, None, 0)];
        while let Some((word, above, fork)) = pending.pop() {
            if word.is_frozen() || (word.is_empty() && above.is_some()) {
                return Err(Violation::Marked { slot });
            }
            match word.target() {
                Target::Empty => {}
                Target::Branch(branch) => {
                    self.branches += 1;
                    self.check_bit(branch.bit(), above)?;
                    self.check_slot(branch.lead(), directory)?;
                    let below = Some(branch.bit());
                    pending.push((branch.edge(1).load(guard), below, branch.bit()));
                    pending.push((branch.edge(0).load(guard), below, fork));
                }
                Target::Leaf(leaf) => {
                    self.leaves += 1;
                    self.check_slot(leaf.key().lead(), directory)?;
                    self.check_leaf(leaf, fork)?;
                }
            }
        }
        Ok(())
    }

    fn check_bit(&self, below: u32, above: Option<u32>) -> Result<(), Violation> {
        let slot = self.slot;
        match above {
            Some(above) if above >= below => Err(Violation::BitOrder { slot, above, below }),
            None if below < self.directory_bits => Err(Violation::BitOrder {
                slot,
                above: self.directory_bits,
                below,
            }),
            _ => Ok(()),
        }
    }

    fn check_slot(&self, lead: u32, directory: &Directory<K, V>) -> Result<(), Violation> {
        let expected = directory.index(lead);
        if expected == self.slot {
            return Ok(());
        }
        Err(Violation::WrongSlot {
            slot: self.slot,
            expected,
        })
    }

    /// Neighbours part exactly at the bit of the lowest branch over both: the left one has 0 there, the right one 1. Over all
    /// pairs of neighbours this says that keys ascend, that every branch is needed, and that each key lies on its own path.
    fn check_leaf(&mut self, leaf: &'g Leaf<K, V>, fork: u32) -> Result<(), Violation> {
        let Some((left, _)) = self.previous.replace((leaf, fork)) else {
            return Ok(());
        };
        let found = left.stored().first_difference(leaf.key());
        if found == Some(fork) && leaf.key().bit(fork) == 1 {
            return Ok(());
        }
        Err(Violation::WrongFork {
            slot: self.slot,
            found,
            expected: fork,
        })
    }
}

/// A tree whose invariants can be checked.
///
/// # Examples
///
/// ```
/// use sdtree::Check;
///
/// let tree = sdtree::SdTree::<u64>::new();
/// tree.get_or_insert(1, 10);
/// assert_eq!(tree.check(), Ok(()));
/// ```
pub trait Check {
    /// Checks every structural invariant; for a tree that no thread changes meanwhile.
    ///
    /// # Errors
    ///
    /// The first invariant found broken.
    fn check(&self) -> Result<(), Violation>;
}

impl<V: Copy + Send + Sync + 'static> Check for SdTree<V> {
    fn check(&self) -> Result<(), Violation> {
        self.tree.check()
    }
}

impl<K, V> Check for ByteTree<K, V>
where
    K: AsRef<[u8]> + Send + Sync + 'static,
    V: Copy + Send + Sync + 'static,
{
    fn check(&self) -> Result<(), Violation> {
        self.tree.check()
    }
}

/// Checks every structural invariant of a tree that no thread changes meanwhile.
///
/// # Errors
///
/// The first invariant found broken.
///
/// # Examples
///
/// ```
/// let tree = sdtree::ByteTree::<&'static [u8], u32>::new();
/// tree.get_or_insert(b"page", 1)?;
/// assert_eq!(sdtree::check(&tree), Ok(()));
/// # Ok::<(), sdtree::Error>(())
/// ```
pub fn check(tree: &impl Check) -> Result<(), Violation> {
    tree.check()
}
