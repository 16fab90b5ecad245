//! Where a domain's stores are: one on each node with memory.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use numa::heap::{Heap, MAX_ORDER, Request, ZoneId};
use numa::{NodeId, Topology};

use crate::page::StoreId;

/// The heap's only zone.
pub(super) const STORE: ZoneId = ZoneId(0);
const ZONES: [&str; 1] = ["store"];

/// Where a domain's stores are.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    /// The machine's nodes.
    pub(crate) topology: Arc<Topology>,
    /// The node of each store, ascending; at least one.
    pub(crate) nodes: Arc<[NodeId]>,
    /// Slots with refs, of all domains.
    pub(super) live: Arc<AtomicU64>,
}

impl Home {
    /// A store on each node with memory, as many as an agent takes; `None` when no node has any.
    pub(crate) fn new(topology: Topology) -> Option<Self> {
        let nodes = topology.memory_nodes().map(|node| node.id);
        let nodes: Arc<[NodeId]> = nodes.take(wire::MAX_STORES).collect();
        let topology = Arc::new(topology);
        let live = Arc::default();
        (!nodes.is_empty()).then_some(Self {
            topology,
            nodes,
            live,
        })
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
