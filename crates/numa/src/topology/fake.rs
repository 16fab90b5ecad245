//! Emulation: nodes made up over those that there are, as the kernel's `numa=fake=` does.
//!
//! | specification | emulated nodes |
//! |---|---|
//! | `fake=4` | four in all, spread over the nodes with memory in turn |
//! | `fake=2U` | two of each node with memory |
//! | `fake=64M` | as many as fit, of 64 MiB each; the last of a node takes its rest |
//! | `fake=2:10,21,21,10` | two, with these distances, row by row |
//!
//! Without distances, parts of one node are as near to each other as the node is to itself, and otherwise as far as
//! their nodes are, as in the kernel. Two things differ from it on purpose. CPUs are dealt out to the parts in turn,
//! so that each has one node; the kernel shows every CPU in all parts of its node. Nodes without memory stay
//! as they are, behind the emulated ones. The placement of an emulated node goes to its backing node, so everything
//! node-aware runs on a machine with one node.

use std::fmt;
use std::str::FromStr;

use super::{MAX_NODES, MemoryRange, Node, Source, Topology, TopologyError};
use crate::NodeId;

/// Emulated memory begins and ends at multiples of this, as far as it can.
const GRAIN: u64 = 2 << 20;

/// How memory is split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// So many nodes in all.
    Count(usize),
    /// So many of each node with memory.
    PerNode(usize),
    /// Nodes of so many bytes.
    Bytes(u64),
}

/// What to emulate.
///
/// # Examples
/// ```
/// let spec: numa::FakeSpec = "fake=2:10,21,21,10".parse().unwrap();
/// assert_eq!(spec.distances, Some(vec![10, 21, 21, 10]));
/// assert_eq!(spec.to_string(), "fake=2:10,21,21,10");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FakeSpec {
    /// How memory is split.
    pub split: Split,
    /// A whole matrix, row by row.
    pub distances: Option<Vec<u8>>,
}

impl FromStr for FakeSpec {
    type Err = TopologyError;

    fn from_str(spec: &str) -> Result<Self, TopologyError> {
        let bad = || TopologyError::FakeSyntax {
            spec: spec.to_owned(),
        };
        let (split, distances) = match spec.strip_prefix("fake=").unwrap_or(spec).split_once(':') {
            Some((split, distances)) => (split, Some(distances)),
            None => (spec.strip_prefix("fake=").unwrap_or(spec), None),
        };
        let distances = distances
            .map(|list| {
                list.trim_end_matches(',')
                    .split(',')
                    .map(str::parse)
                    .collect::<Result<Vec<u8>, _>>()
            })
            .transpose()
            .map_err(|_| bad())?;
        Ok(Self {
            split: parse_split(split).ok_or_else(bad)?,
            distances,
        })
    }
}

fn parse_split(text: &str) -> Option<Split> {
    let digits = text.trim_end_matches(|last: char| last.is_ascii_alphabetic());
    let unit = &text[digits.len()..];
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok().filter(|&number| number > 0)?;
    match unit.to_ascii_uppercase().as_str() {
        "U" => usize::try_from(number).ok().map(Split::PerNode),
        "K" => number.checked_mul(1 << 10).map(Split::Bytes),
        "M" => number.checked_mul(1 << 20).map(Split::Bytes),
        "G" => number.checked_mul(1 << 30).map(Split::Bytes),
        "T" => number.checked_mul(1 << 40).map(Split::Bytes),
        "" => usize::try_from(number).ok().map(Split::Count),
        _ => None,
    }
}

impl fmt::Display for FakeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.split {
            Split::Count(count) => write!(f, "fake={count}")?,
            Split::PerNode(parts) => write!(f, "fake={parts}U")?,
            Split::Bytes(bytes) if bytes % (1 << 20) == 0 => write!(f, "fake={}M", bytes >> 20)?,
            Split::Bytes(bytes) => write!(f, "fake={}K", bytes >> 10)?,
        }
        let distances = self.distances.iter().flatten().enumerate();
        distances.into_iter().try_for_each(|(index, distance)| {
            write!(f, "{}{distance}", if index == 0 { ':' } else { ',' })
        })
    }
}

impl Topology {
    /// Splits the nodes with memory as `spec` says.
    ///
    /// # Errors
    /// Fewer nodes asked for than there are with memory, parts too small, more than [`MAX_NODES`], or distances that
    /// are no whole matrix.
    pub fn emulate(&self, spec: &FakeSpec) -> Result<Self, TopologyError> {
        let mut nodes: Vec<Node> = Vec::new();
        for (real, part, parts) in self.deal(spec.split)? {
            nodes.push(part_of(real, part, parts, spec.split)?);
        }
        nodes.extend(
            self.nodes
                .iter()
                .filter(|node| node.memory_bytes == 0)
                .map(|node| Node {
                    backing: Some(node.backing.unwrap_or(node.id)),
                    ..node.clone()
                }),
        );
        // What the emulated nodes were, for their distances.
        let made_of: Vec<NodeId> = nodes.iter().map(|node| node.id).collect();
        for (node, id) in nodes.iter_mut().zip(0..) {
            node.id = NodeId(id);
        }
        let distances = match &spec.distances {
            Some(list) => matrix(list, nodes.len())?,
            None => {
                let row = |&from: &NodeId| {
                    made_of
                        .iter()
                        .filter_map(|&to| self.distance(from, to))
                        .collect()
                };
                made_of.iter().map(row).collect()
            }
        };
        let topology = Self {
            source: Source::Emulated,
            cpu_naming: self.cpu_naming,
            nodes,
            distances,
            offline: Vec::new(),
            performance: Vec::new(),
        };
        topology.check()?;
        Ok(topology)
    }

    /// Which part of which node each emulated node is, and of how many: in the order of their numbers.
    fn deal(&self, split: Split) -> Result<Vec<(&Node, usize, usize)>, TopologyError> {
        let real: Vec<&Node> = self.memory_nodes().collect();
        let parts_of = |index: usize, node: &Node| match split {
            Split::Count(count) => count / real.len() + usize::from(index < count % real.len()),
            Split::PerNode(parts) => parts,
            Split::Bytes(bytes) => {
                usize::try_from((node.memory_bytes / bytes).max(1)).unwrap_or(usize::MAX)
            }
        };
        let parts: Vec<usize> = real
            .iter()
            .enumerate()
            .map(|(index, node)| parts_of(index, node))
            .collect();
        let nodes = parts
            .iter()
            .fold(self.nodes.len() - real.len(), |sum, parts| {
                sum.saturating_add(*parts)
            });
        if nodes > MAX_NODES {
            return Err(TopologyError::TooManyNodes {
                nodes,
                limit: MAX_NODES,
            });
        }
        if let Split::Count(asked) = split
            && asked < real.len()
        {
            return Err(TopologyError::FakeTooFew {
                asked,
                real: real.len(),
            });
        }
        let most = parts.iter().copied().max().unwrap_or(0);
        let rounds = (0..most).flat_map(|part| {
            real.iter()
                .zip(&parts)
                .map(move |(&node, &parts)| (node, part, parts))
        });
        let mut dealt: Vec<_> = rounds.filter(|&(_, part, parts)| part < parts).collect();
        if matches!(split, Split::PerNode(_)) {
            dealt.sort_by_key(|&(node, part, _)| (node.id, part));
        }
        Ok(dealt)
    }
}

fn part_of(real: &Node, part: usize, parts: usize, split: Split) -> Result<Node, TopologyError> {
    let total = real.memory_bytes;
    let share = match split {
        Split::Bytes(bytes) => bytes.min(total),
        Split::Count(_) | Split::PerNode(_) => total / parts as u64 / GRAIN * GRAIN,
    };
    if share == 0 {
        return Err(TopologyError::FakeTooSmall {
            node: real.id,
            memory_bytes: total,
            parts,
        });
    }
    let start = share * part as u64;
    let end = if part + 1 == parts {
        total
    } else {
        start + share
    };
    Ok(Node {
        id: real.id,
        domain: real.domain,
        backing: Some(real.backing.unwrap_or(real.id)),
        cpus: real
            .cpus
            .iter()
            .skip(part)
            .step_by(parts)
            .copied()
            .collect(),
        memory_bytes: end - start,
        ranges: slice(
            &real.ranges,
            start,
            if part + 1 == parts { u64::MAX } else { end },
        ),
        ..Node::default()
    })
}

/// The part from byte `start` to byte `end` of ranges laid end to end.
fn slice(ranges: &[MemoryRange], start: u64, end: u64) -> Vec<MemoryRange> {
    let mut at = 0_u64;
    let mut slice = Vec::new();
    for range in ranges {
        let (first, last) = (start.max(at), end.min(at + range.len_bytes));
        if first < last {
            slice.push(MemoryRange {
                base: range.base + (first - at),
                len_bytes: last - first,
            });
        }
        at += range.len_bytes;
    }
    slice
}

fn matrix(list: &[u8], nodes: usize) -> Result<Vec<Vec<u8>>, TopologyError> {
    if list.len() != nodes * nodes {
        return Err(TopologyError::DistanceCount {
            expected: nodes * nodes,
            found: list.len(),
        });
    }
    Ok(list.chunks(nodes).map(<[u8]>::to_vec).collect())
}
