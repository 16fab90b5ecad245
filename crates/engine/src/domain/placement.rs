//! Where a domain's stores and indexes are: one of each on each node with memory.
//!
//! A store's pages come from its node. Of an index the directory is placed: it is one big array. While merging crosses nodes, all
//! workers use one index, and its directory is spread over the nodes (`hashdist`). Otherwise each node's own lies on the node. The rest
//! of an index, branches and leaves, is memory of the node where the worker ran that made it. So while merging stays inside nodes, a
//! worker looks pages up, enters them and plans on the node that they are on: [`Placement::work_near`]. For a node without CPUs, such as
//! memory behind CXL, that is the nearest node with CPUs: its memory is the faster one for those that walk the tree.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use numa::heap::{Heap, MAX_ORDER, Request, ZoneId};
use numa::placement::IndexMemory;
use numa::topology::Source;
use numa::{NodeId, Topology};
use sdtree::SdTree;
use wire::KnobValues;

use crate::page::{PAGE, StoreId};
use crate::sync::lock;

/// The heap's only zone.
pub(super) const STORE: ZoneId = ZoneId(0);
const ZONES: [&str; 1] = ["store"];

/// Where a domain's stores are.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// The machine's nodes.
    pub(crate) topology: Arc<Topology>,
    /// The node of each store, ascending; at least one.
    pub(crate) nodes: Arc<[NodeId]>,
    /// Slots with frames, of all domains.
    pub(super) live: Arc<AtomicU64>,
    tables: Arc<Mutex<Tables>>,
    cpus: Arc<Cpus>,
}

/// CPUs that this process may use: those near each store, and all.
#[derive(Debug, Default)]
struct Cpus {
    near: Vec<Vec<u32>>,
    all: Vec<u32>,
}

impl Cpus {
    fn new(topology: &Topology, nodes: &[NodeId]) -> Self {
        // Of a kernel that does not tell, workers stay where they are.
        let all = sys::mempolicy::allowed_cpus().unwrap_or_default();
        let allowed = |node: NodeId| -> Vec<u32> {
            let its = topology.node(node).map(|node| node.cpus.iter().copied());
            its.into_iter()
                .flatten()
                .filter(|cpu| all.contains(cpu))
                .collect()
        };
        let near = |&node: &NodeId| {
            let mut nodes = topology.by_distance(node).into_iter().map(allowed);
            nodes.find(|cpus| !cpus.is_empty()).unwrap_or_default()
        };
        let near = nodes.iter().map(near).collect();
        Self { near, all }
    }
}

/// The directories of all indexes.
#[derive(Debug, Default)]
struct Tables {
    across_nodes: bool,
    hashdist: bool,
    memories: Vec<(StoreId, IndexMemory)>,
}

impl Placement {
    /// A store on each node with memory, as many as an agent takes; `None` when no node has any.
    pub(crate) fn new(topology: Topology) -> Option<Self> {
        let nodes = topology.memory_nodes().map(|node| node.id);
        let nodes: Arc<[NodeId]> = nodes.take(wire::MAX_STORES).collect();
        let topology = Arc::new(topology);
        let live = Arc::default();
        let cpus = Arc::new(Cpus::new(&topology, &nodes));
        (!nodes.is_empty()).then_some(Self {
            topology,
            nodes,
            live,
            tables: Arc::default(),
            cpus,
        })
    }

    /// Has this thread run on the CPUs near a store's node, and take memory for the node's index there; with `None` everywhere again.
    pub(crate) fn work_near(&self, store: Option<StoreId>) {
        let cpus = match store {
            Some(store) => self.cpus.near.get(store.index()),
            None => Some(&self.cpus.all),
        };
        // CPUs may have gone offline, or out of the process's cpuset: then it runs where it may.
        if let Some(cpus) = cpus.filter(|cpus| !cpus.is_empty())
            && let Err(error) = sys::mempolicy::run_on_cpus(cpus)
        {
            tracing::debug!(%error, "a worker stays where it is");
        }
        sdtree::set_home(store.map_or(0, |store| store.index() + 1));
    }

    /// An empty index for the pages of a store's node.
    pub(crate) fn index(&self, store: StoreId) -> SdTree<u64> {
        if self.nodes.len() == 1 {
            return SdTree::new();
        }
        let mut tables = lock(&self.tables);
        let memory = IndexMemory::new(Arc::clone(&self.topology), self.index_nodes(&tables, store));
        // The first directory is a single slot, for which there is memory.
        let index = sdtree::Builder::new().memory(memory.hook()).build();
        tables.memories.retain(|(_, memory)| memory.is_used());
        tables.memories.push((store, memory));
        index.expect("memory for one slot")
    }

    /// Where the directory of a store's index goes. No nodes: where the thread runs that makes it.
    fn index_nodes(&self, tables: &Tables, store: StoreId) -> Vec<NodeId> {
        match (tables.across_nodes, tables.hashdist) {
            (true, true) => self.nodes.to_vec(),
            (true, false) => Vec::new(),
            (false, _) => vec![self.node(store)],
        }
    }

    /// Has all directories lie as these knobs say.
    pub(crate) fn place_indexes(&self, knobs: &KnobValues) {
        let mut tables = lock(&self.tables);
        let wanted = (knobs.merge_across_nodes, knobs.hashdist);
        if (tables.across_nodes, tables.hashdist) == wanted {
            return;
        }
        (tables.across_nodes, tables.hashdist) = wanted;
        tables.memories.retain(|(_, memory)| memory.is_used());
        for (store, memory) in &tables.memories {
            if let Err(error) = memory.move_to(self.index_nodes(&tables, *store)) {
                tracing::warn!(%error, store = store.0, "the directory of an index stays where it is");
            }
        }
    }

    /// The stores with their nodes.
    pub(crate) fn stores(&self) -> impl Iterator<Item = (StoreId, NodeId)> + '_ {
        (0..).map(StoreId).zip(self.nodes.iter().copied())
    }

    pub(super) fn node(&self, store: StoreId) -> NodeId {
        let node = self.nodes.get(store.index());
        *node.unwrap_or_else(|| panic!("there is no store {}", store.0))
    }

    /// A heap without slots.
    pub(crate) fn heap(&self) -> Heap {
        Heap::new(&self.topology, ZONES)
    }

    /// A segment's worth of the store's node, for this thread.
    pub(super) fn request(&self, store: StoreId) -> Request {
        let node = self.node(store);
        let (cpu, _) = sys::mempolicy::current_cpu_and_node();
        let here = self.topology.node_of_cpu(cpu).unwrap_or(node);
        let request = Request::new(node, STORE).order(MAX_ORDER);
        request.exact_node().exact_zone().running_on(here)
    }
}

/// How the kernel's word is understood.
#[derive(Debug)]
pub(crate) enum Atlas {
    /// One store: nothing to ask.
    One,
    /// The kernel's node of each store, ascending.
    Nodes(Arc<[NodeId]>),
    /// The store of each range of physical addresses, in ascending order.
    Ranges(Vec<(Range<u64>, StoreId)>),
}

impl Atlas {
    /// The atlas of the stores of `placement`; `None` for emulated nodes whose places in
    /// memory are not known.
    pub(crate) fn new(placement: &Placement) -> Option<Self> {
        if placement.nodes.len() == 1 {
            return Some(Self::One);
        }
        match placement.topology.source {
            Source::Emulated => ranges(placement).map(Self::Ranges),
            _ => Some(Self::Nodes(Arc::clone(&placement.nodes))),
        }
    }

    /// The store of a node by the kernel's answer, which may be an error number.
    pub(crate) fn of_node(&self, answer: i32) -> Option<StoreId> {
        let Self::Nodes(nodes) = self else {
            return None;
        };
        let node = NodeId(answer.try_into().ok()?);
        let store = nodes.binary_search(&node).ok()?;
        store.try_into().ok().map(StoreId)
    }

    /// The store of a frame.
    pub(crate) fn of_frame(&self, frame: u64) -> Option<StoreId> {
        let Self::Ranges(ranges) = self else {
            return None;
        };
        let address = frame.checked_mul(PAGE)?;
        let behind = ranges.partition_point(|(range, _)| range.start <= address);
        let (range, store) = ranges.get(behind.checked_sub(1)?)?;
        (frame != 0 && range.contains(&address)).then_some(*store)
    }
}

fn ranges(placement: &Placement) -> Option<Vec<(Range<u64>, StoreId)>> {
    let mut all = Vec::new();
    for (store, node) in placement.stores() {
        let ranges = &placement.topology.node(node)?.ranges;
        if ranges.is_empty() {
            return None;
        }
        let own = ranges.iter().map(|r| (r.base..r.base + r.len_bytes, store));
        all.extend(own);
    }
    all.sort_unstable_by_key(|(range, _)| range.start);
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: u64 = 50_000;

    /// Keys as a hash gives them.
    fn key(at: u64) -> u128 {
        u128::from(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)) << 64
    }

    #[test]
    fn an_index_goes_where_the_knobs_say_and_keeps_its_entries() {
        let topology = Topology::live().unwrap();
        let two = topology.emulate(&"fake=2".parse().unwrap()).unwrap();
        let placement = Placement::new(two).unwrap();
        let mut knobs = KnobValues::default();
        let nodes = |placement: &Placement, store| {
            let tables = lock(&placement.tables);
            let nodes = placement.index_nodes(&tables, StoreId(store));
            nodes.iter().map(|node| node.0).collect::<Vec<_>>()
        };
        placement.place_indexes(&knobs);
        assert_eq!(nodes(&placement, 1), [0, 1], "spread");
        let index = placement.index(StoreId(1));
        for at in 0..KEYS {
            index.get_or_insert(key(at), at);
        }
        for (across, hashdist, wanted) in [
            (true, false, &[][..]),
            (false, false, &[1]),
            (false, true, &[1]),
            (true, true, &[0, 1]),
        ] {
            (knobs.merge_across_nodes, knobs.hashdist) = (across, hashdist);
            placement.place_indexes(&knobs);
            assert_eq!(nodes(&placement, 1), wanted);
            assert!((0..KEYS).all(|at| index.get(key(at)) == Some(at)));
        }
        let pages = |placement: &Placement| -> u64 {
            let all = lock(&placement.tables);
            let pages = |(_, memory): &(_, IndexMemory)| memory.pages_by_node().unwrap();
            all.memories
                .iter()
                .flat_map(pages)
                .map(|(_, count)| count)
                .sum()
        };
        assert!(pages(&placement) >= 64, "{}", pages(&placement));
    }
}
