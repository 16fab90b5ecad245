//! The node for a whole process, before it starts.
//!
//! For each node with CPUs, imagine the process there: its memory is taken from the nearest node that has some free,
//! then from the next. The node with the least mean distance to all of that memory wins. Looking at free memory alone would choose a
//! node that is full of CPUs and far from its memory; looking at distance alone, a node that is full. Among equals:
//!
//! 1. a node with plenty: a quarter of its memory stays free;
//! 2. of those with plenty, the one of which recent starts were promised the least, so that small guests spread over CPUs;
//! 3. the one that keeps the most free memory;
//! 4. the one that is promised least beyond what it has;
//! 5. the lowest number.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sys::mempolicy::{self, Mode};

use super::{PlacementError, kernel, mask_of};
use crate::topology::{CpuNaming, UNREACHABLE};
use crate::{MemoryReport, NodeId, Topology};

/// A node has plenty while at least this part of its memory stays free.
const PLENTY: u64 = 4;

/// What processes were promised that started lately, in bytes by node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Starts {
    /// All of it.
    pub promised: BTreeMap<NodeId, u64>,
    /// What of it they have not taken yet: memory that is free, and not for others.
    pub untaken: BTreeMap<NodeId, u64>,
}

impl Starts {
    /// Adds a start that has taken nothing yet.
    pub fn add(&mut self, claims: &[(NodeId, u64)]) {
        for map in [&mut self.promised, &mut self.untaken] {
            add(map, claims);
        }
    }

    /// Adds one that will still take `untaken` of what it was promised.
    pub fn add_running(&mut self, promised: &[(NodeId, u64)], untaken: &[(NodeId, u64)]) {
        add(&mut self.promised, promised);
        add(&mut self.untaken, untaken);
    }
}

fn add(map: &mut BTreeMap<NodeId, u64>, claims: &[(NodeId, u64)]) {
    for &(node, bytes) in claims {
        let sum = map.entry(node).or_default();
        *sum = sum.saturating_add(bytes);
    }
}

/// How hard the chosen nodes bind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Strictness {
    /// Other nodes help out when the chosen ones are full.
    #[default]
    Preferred,
    /// Allocation fails instead.
    Bind,
}

/// What `--node` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeRequest {
    /// `auto`: by free memory and distance.
    Auto,
    /// This one.
    Node(NodeId),
}

impl FromStr for NodeRequest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text
                .parse()
                .map(Self::Node)
                .map_err(|_| format!("'{text}' is neither 'auto' nor a node's number")),
        }
    }
}

impl NodeRequest {
    /// Chooses on this topology as it is filled now, for a process that needs `need_bytes` (0: little), beside others that
    /// have started.
    ///
    /// # Errors
    /// As [`Choice::auto`] and [`Choice::at`].
    pub fn choose(
        self,
        topology: &Topology,
        memory: &MemoryReport,
        starts: &Starts,
        need_bytes: u64,
    ) -> Result<Choice, PlacementError> {
        let free_bytes = memory.free_bytes();
        match self {
            Self::Auto => Choice::beside(topology, &free_bytes, starts, need_bytes),
            Self::Node(node) => Choice::at(topology, node, &free_bytes, need_bytes),
        }
    }
}

/// A node for the CPUs of a process, and nodes for its memory.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Choice {
    /// Where it runs.
    pub node: NodeId,
    /// Its CPUs, by the kernel's numbers.
    pub cpus: Vec<u32>,
    /// What it takes from which node, in bytes, nearest first.
    pub memory: Vec<(NodeId, u64)>,
    /// The mean distance from its CPUs to its memory.
    pub mean_distance: f64,
    /// What it needs and no node has.
    pub missing_bytes: u64,
}

impl Choice {
    /// Chooses among all nodes with CPUs, for a process that needs `need_bytes`; `free_bytes` says what each node has.
    ///
    /// # Errors
    /// No node has CPUs, or none of them reaches any memory.
    pub fn auto(
        topology: &Topology,
        free_bytes: &BTreeMap<NodeId, u64>,
        need_bytes: u64,
    ) -> Result<Self, PlacementError> {
        Self::beside(topology, free_bytes, &Starts::default(), need_bytes)
    }

    /// The same, where others have started lately; their promises may go beyond the memory that there is.
    ///
    /// # Errors
    /// As [`Self::auto`].
    pub fn beside(
        topology: &Topology,
        free_bytes: &BTreeMap<NodeId, u64>,
        starts: &Starts,
        need_bytes: u64,
    ) -> Result<Self, PlacementError> {
        let of = |map: &BTreeMap<NodeId, u64>, node| map.get(&node).copied().unwrap_or(0);
        let untaken = |node| of(&starts.untaken, node);
        let left: BTreeMap<_, _> = free_bytes
            .iter()
            .map(|(&node, free)| (node, free.saturating_sub(untaken(node))))
            .collect();
        let choices = topology
            .cpu_nodes()
            .filter_map(|node| Self::at(topology, node.id, &left, need_bytes).ok());
        let rank = |choice: &Self| {
            let node = choice.node;
            let taken = choice.memory.iter().find(|(id, _)| *id == node);
            let kept = of(&left, node).saturating_sub(taken.map_or(0, |&(_, bytes)| bytes));
            let memory = topology.node(node).map_or(0, |node| node.memory_bytes);
            let has_plenty = memory > 0 && kept >= memory / PLENTY;
            let promised = has_plenty.then(|| of(&starts.promised, node));
            let beyond = untaken(node).saturating_sub(of(free_bytes, node));
            (!has_plenty, promised, Reverse(kept), beyond, node)
        };
        let better = |one: &Self, two: &Self| -> Ordering {
            one.missing_bytes
                .cmp(&two.missing_bytes)
                .then(one.mean_distance.total_cmp(&two.mean_distance))
                .then_with(|| rank(one).cmp(&rank(two)))
        };
        choices.min_by(better).ok_or(PlacementError::NoNodes)
    }

    /// The choice that the caller has made: `node`. Where it has no CPUs, those of the nearest node that has.
    ///
    /// # Errors
    /// The node is not online, or no CPUs or no memory can be reached from there.
    pub fn at(
        topology: &Topology,
        node: NodeId,
        free_bytes: &BTreeMap<NodeId, u64>,
        need_bytes: u64,
    ) -> Result<Self, PlacementError> {
        topology.node(node).ok_or(PlacementError::NoNode { node })?;
        let nearest = topology.by_distance(node);
        let with_cpus = nearest
            .iter()
            .filter_map(|&id| topology.node(id))
            .find(|near| !near.cpus.is_empty());
        let runs_on = with_cpus.ok_or(PlacementError::NoCpus { node })?;
        let (mut memory, mut left, mut weighted) = (Vec::new(), need_bytes, 0.0);
        for &id in nearest
            .iter()
            .filter(|&&id| topology.node(id).is_some_and(|near| near.memory_bytes > 0))
        {
            // Without a need, the nearest memory is enough.
            let bytes = free_bytes.get(&id).copied().unwrap_or(0).min(left);
            if bytes > 0 || (need_bytes == 0 && memory.is_empty()) {
                memory.push((id, bytes));
                weighted += f64::from(topology.distance(runs_on.id, id).unwrap_or(UNREACHABLE))
                    * as_f64(bytes);
                left -= bytes;
            }
        }
        if memory.is_empty() {
            let has_memory = |id: &NodeId| topology.node(*id).is_some_and(|n| n.memory_bytes > 0);
            let near = nearest.iter().copied().find(has_memory);
            let first = near.or_else(|| topology.memory_nodes().next().map(|first| first.id));
            memory.push((first.ok_or(PlacementError::NoNodes)?, 0));
        }
        let placed = need_bytes - left;
        let to_first = || {
            topology
                .distance(runs_on.id, memory[0].0)
                .unwrap_or(UNREACHABLE)
        };
        let mean_distance = if placed == 0 {
            f64::from(to_first())
        } else {
            weighted / as_f64(placed)
        };
        Ok(Self {
            node: runs_on.id,
            cpus: runs_on.cpus.clone(),
            mean_distance,
            memory,
            missing_bytes: left,
        })
    }

    /// What a process that goes there takes of each node in the end; what no node has, of the nearest.
    #[must_use]
    pub fn claims(&self) -> Vec<(NodeId, u64)> {
        let mut claims = self.memory.clone();
        if let Some((_, bytes)) = claims.first_mut() {
            *bytes += self.missing_bytes;
        }
        claims
    }

    /// Applies the choice to this thread: its CPUs, and the policy of its memory. Whatever it executes, and its
    /// children, inherit both.
    ///
    /// # Errors
    /// The topology's CPU numbers are not the kernel's, or the kernel refuses: [`PlacementError::NotAllowed`] where a cpuset leaves the
    /// node out, or all its CPUs are offline.
    pub fn apply(&self, topology: &Topology, strictness: Strictness) -> Result<(), PlacementError> {
        if topology.cpu_naming != CpuNaming::Logical {
            return Err(PlacementError::CpuNaming);
        }
        // The kernel takes from a mask what the cpuset leaves out, and refuses an empty one.
        let refused = |call, node, what, knob| {
            move |error: io::Error| match error.kind() {
                io::ErrorKind::InvalidInput => PlacementError::NotAllowed { node, what, knob },
                _ => kernel(call)(error),
            }
        };
        let no_cpus = refused("sched_setaffinity", self.node, "CPU", "cpuset.cpus");
        mempolicy::run_on_cpus(&self.cpus).map_err(no_cpus)?;
        let nodes: Vec<NodeId> = self.memory.iter().map(|&(id, _)| id).collect();
        let mask = mask_of(topology, &nodes)?;
        let one_node = mask.iter().nth(1).is_none();
        let mode = match strictness {
            Strictness::Bind => Mode::Bind,
            Strictness::Preferred if one_node => Mode::Preferred,
            Strictness::Preferred => Mode::PreferredMany,
        };
        let nearest = nodes.first().copied().unwrap_or(self.node);
        let no_memory = refused("set_mempolicy", nearest, "memory", "cpuset.mems");
        mempolicy::set_mempolicy(mode, &mask).map_err(no_memory)
    }
}

#[allow(
    clippy::cast_precision_loss,
    reason = "a mean of bytes, not an account of them"
)]
fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}
