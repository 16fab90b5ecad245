//! Where a domain's stores are: one on each node with memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use numa::heap::{Heap, MAX_ORDER, Request, ZoneId};
use numa::topology::Source;
use numa::{NodeId, Topology};
use wire::PAGE_BYTES;

use crate::page::StoreId;

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
}

impl Placement {
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

/// How the kernel's word is understood.
#[derive(Debug)]
pub(crate) enum Atlas {
    /// One store: nothing to ask.
    One,
    /// The store of each of the kernel's nodes.
    Nodes(Vec<Option<StoreId>>),
    /// The store of each range of physical addresses, in ascending order.
    Ranges(Vec<(Range<u64>, StoreId)>),
}

impl Atlas {
    /// The atlas of the stores of `placement`; `None` for emulated nodes of which nobody says where in
    /// memory they are.
    pub(crate) fn new(placement: &Placement) -> Option<Self> {
        if placement.nodes.len() == 1 {
            return Some(Self::One);
        }
        match placement.topology.source {
            Source::Emulated => ranges(&placement.topology, placement).map(Self::Ranges),
            _ => Some(Self::Nodes(by_number(placement))),
        }
    }

    /// The store of a node by the kernel's answer, which may be an error number.
    pub(crate) fn of_node(&self, answer: i32) -> Option<StoreId> {
        match self {
            Self::Nodes(stores) => stores.get(usize::try_from(answer).ok()?).copied()?,
            _ => None,
        }
    }

    /// The store of a frame.
    pub(crate) fn of_frame(&self, frame: u64) -> Option<StoreId> {
        let Self::Ranges(ranges) = self else {
            return None;
        };
        let address = frame.checked_mul(PAGE_BYTES as u64)?;
        let behind = ranges.partition_point(|(range, _)| range.start <= address);
        let (range, store) = ranges.get(behind.checked_sub(1)?)?;
        (frame != 0 && range.contains(&address)).then_some(*store)
    }
}

fn by_number(placement: &Placement) -> Vec<Option<StoreId>> {
    let mut stores = Vec::new();
    for (store, node) in placement.stores() {
        let at = usize::try_from(node.0).expect("a node's number");
        stores.resize(at + 1, None);
        if let Some(place) = stores.get_mut(at) {
            *place = Some(store);
        }
    }
    stores
}

fn ranges(topology: &Topology, placement: &Placement) -> Option<Vec<(Range<u64>, StoreId)>> {
    let mut all = Vec::new();
    for (store, node) in placement.stores() {
        let ranges = &topology.node(node)?.ranges;
        if ranges.is_empty() {
            return None;
        }
        let own = ranges.iter().map(|r| (r.base..r.base + r.len_bytes, store));
        all.extend(own);
    }
    all.sort_unstable_by_key(|(range, _)| range.start);
    Some(all)
}
