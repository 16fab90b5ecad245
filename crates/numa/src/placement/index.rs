//! The places of the directories of an index.
//!
//! A directory is a big table as in [`table`](super::table), with one difference: an index makes larger ones as it grows. So the index
//! gets a hook, and the hook is told the place.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sys::directory::PlacedMemory;

use super::table::{home_node, lay_out, pages_by_node, range_of};
use super::{Existing, PlacementError};
use crate::{NodeId, Topology};

/// Memory for the directories of one index: over nodes in turn, or on one.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use numa::{Topology, placement::IndexMemory};
/// let topology = Arc::new(Topology::live().unwrap());
/// let memory = IndexMemory::new(Arc::clone(&topology), topology.memory_nodes().map(|node| node.id).collect());
/// let tree = sdtree::Builder::new().capacity(100_000).memory(memory.hook()).build::<u64>().unwrap();
/// tree.get_or_insert(7, 70);
/// assert!(memory.pages_by_node().unwrap().values().sum::<u64>() >= 1);
/// ```
#[derive(Clone, Debug)]
pub struct IndexMemory {
    topology: Arc<Topology>,
    nodes: Arc<Mutex<Vec<NodeId>>>,
    mappings: Arc<PlacedMemory>,
}

fn lock(nodes: &Mutex<Vec<NodeId>>) -> MutexGuard<'_, Vec<NodeId>> {
    nodes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl IndexMemory {
    /// Directories on these nodes; without any, on the node of the thread that makes one.
    #[must_use]
    pub fn new(topology: Arc<Topology>, nodes: Vec<NodeId>) -> Self {
        let nodes = Arc::new(Mutex::new(nodes));
        let mappings = {
            let (topology, nodes) = (Arc::clone(&topology), Arc::clone(&nodes));
            PlacedMemory::new(Box::new(move |words| {
                let nodes = or_home(&topology, lock(&nodes).clone());
                // What cannot be placed is where the kernel puts it: slower, and right.
                let _ = lay_out(words, &topology, &nodes, Existing::Stay);
            }))
        };
        Self {
            topology,
            nodes,
            mappings: Arc::new(mappings),
        }
    }

    /// For the builder of the index.
    #[must_use]
    pub fn hook(&self) -> Arc<PlacedMemory> {
        Arc::clone(&self.mappings)
    }

    /// Whether an index has it.
    #[must_use]
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.mappings) > 1
    }

    /// Moves the directories to these nodes, and has larger ones made there.
    ///
    /// # Errors
    /// The last directory's that stays: as [`place`](super::place).
    pub fn move_to(&self, nodes: Vec<NodeId>) -> Result<(), PlacementError> {
        lock(&self.nodes).clone_from(&nodes);
        let nodes = or_home(&self.topology, nodes);
        let mut result = Ok(());
        self.mappings.for_each(&mut |words| {
            if let Err(error) = lay_out(words, &self.topology, &nodes, Existing::Move) {
                result = Err(error);
            }
        });
        result
    }

    /// How many pages of the directories are on which of the kernel's nodes.
    ///
    /// # Errors
    /// The kernel has no move_pages(2).
    pub fn pages_by_node(&self) -> io::Result<BTreeMap<NodeId, u64>> {
        let mut all = BTreeMap::new();
        let mut result = Ok(());
        self.mappings
            .for_each(&mut |words| match pages_by_node(range_of(words)) {
                Ok(counts) => {
                    let each = counts.into_iter();
                    each.for_each(|(node, count)| *all.entry(node).or_insert(0) += count);
                }
                Err(error) => result = Err(error),
            });
        result.map(|()| all)
    }
}

fn or_home(topology: &Topology, nodes: Vec<NodeId>) -> Vec<NodeId> {
    match nodes.is_empty() {
        true => home_node(topology).into_iter().collect(),
        false => nodes,
    }
}
