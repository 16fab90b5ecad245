//! The NUMA nodes that pages are on, and what is savable by node.
//!
//! The kernel is asked at the first look, once a page: 0.1 µs. A machine on which one node has memory is not asked.

use std::collections::BTreeMap;
use std::path::Path;

use rustix::process::Pid;
use serde::Serialize;
use sys::node::{NODE_DIR, read_list};

use super::parts::{PAGE, Print};
use super::read::ZEROS;
use super::sums::Savable;

/// The node of a page that is not known to be on any: a dump's, or one that left.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The nodes on which pages can be.
pub(crate) enum Nodes {
    /// The only one with memory.
    One(u32),
    /// Each page is asked after.
    Several,
}

impl Nodes {
    /// Those of this machine. A kernel that knows of none has one.
    pub(crate) fn here() -> Self {
        match read_list(&Path::new(NODE_DIR).join("has_memory")) {
            Ok(Some(nodes)) if nodes.len() > 1 => Self::Several,
            Ok(Some(nodes)) => Self::One(nodes.first().copied().unwrap_or(0)),
            Ok(None) | Err(_) => Self::One(0),
        }
    }

    /// Notes where the pages of a process are that begin at `start`.
    pub(crate) fn find(&self, pid: u32, start: u64, prints: &mut [Print]) {
        if let &Self::One(node) = self {
            prints.iter_mut().for_each(|print| print.node = node);
            return;
        }
        // An address of a 64-bit process; a 32-bit build of this looks at 32-bit processes.
        let address = |print: &Print| start + u64::from(print.place) * PAGE;
        let address = |print: &Print| usize::try_from(address(print)).unwrap_or(usize::MAX);
        let pages: Vec<_> = prints.iter().map(address).collect();
        let mut answers = vec![-1; pages.len()];
        let pid = Pid::from_raw(pid.cast_signed());
        // A process that is gone by now has no pages anywhere.
        let _ = sys::mempolicy::pages_to_nodes(pid, &pages, &mut answers);
        for (print, answer) in prints.iter_mut().zip(answers) {
            print.node = u32::try_from(answer).unwrap_or(NOWHERE);
        }
    }
}

/// What is on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct OnNode {
    /// Bytes of pages that were read.
    pub(crate) read: u64,
    /// Those that merging across nodes gives back on this node. The first copy of a content stays.
    #[serde(flatten)]
    pub(crate) savable: Savable,
    /// Bytes that merging gives back while it stays inside nodes.
    pub(crate) inside: u64,
}

/// What is on each node.
#[derive(Debug, Default)]
pub(crate) struct ByNode {
    nodes: BTreeMap<u32, OnNode>,
    /// The nodes of a content's copies.
    copies: Vec<u32>,
}

impl ByNode {
    /// What is savable on a node.
    pub(crate) fn savable(&mut self, node: u32) -> &mut Savable {
        &mut self.nodes.entry(node).or_default().savable
    }

    /// Adds what the copies of a content save while each node merges its own. Each stands for `scale` contents.
    pub(crate) fn add_inside(&mut self, print: u64, copies: impl Iterator<Item = u32>, scale: u64) {
        self.copies.clear();
        self.copies.extend(copies);
        self.copies.sort_unstable();
        for copies in self.copies.chunk_by(|a, b| a == b) {
            let all = copies.len() as u64;
            let saved = match print {
                ZEROS => all,
                _ => (all - 1) * scale,
            };
            self.nodes.entry(copies[0]).or_default().inside += saved * PAGE;
        }
    }

    /// The sums, with the pages that were read on each node.
    pub(crate) fn with_read(
        mut self,
        pages: impl Iterator<Item = (u32, u64)>,
    ) -> BTreeMap<u32, OnNode> {
        for (node, pages) in pages {
            self.nodes.entry(node).or_default().read += pages * PAGE;
        }
        self.nodes.remove(&NOWHERE);
        self.nodes
    }
}

/// Bytes that are saved while merging stays inside nodes; `None` where there is one node at most.
pub(crate) fn inside(nodes: &BTreeMap<u32, OnNode>) -> Option<u64> {
    let inside = nodes.values().map(|node| node.inside).sum();
    (nodes.len() > 1).then_some(inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_asked_after() {
        let mut memory = sys::zeroed::ZeroedSlice::<u64>::new(4 * 512).unwrap();
        let start = memory.as_ptr() as u64;
        (memory[0], memory[3 * 512]) = (1, 1);
        let mut prints = [0, 1, 3].map(|place| Print {
            place,
            node: 7,
            print: 1,
        });
        let first = sys::mempolicy::current_cpu_and_node().1;
        let known = |node: u32| Path::new(NODE_DIR).join(format!("node{node}")).exists();
        Nodes::Several.find(std::process::id(), start, &mut prints);
        let found = prints.each_ref().map(|print| print.node);
        assert!(known(found[0]) && known(found[2]), "{found:?}, not {first}");
        assert_eq!(found[1], NOWHERE, "a page that was never touched");
        Nodes::One(3).find(std::process::id(), start, &mut prints);
        assert!(prints.iter().all(|print| print.node == 3));
    }

    #[test]
    fn each_node_merges_its_own() {
        let mut sums = ByNode::default();
        sums.add_inside(5, [0, 1, 0, 1, 1, 2, NOWHERE].into_iter(), 4);
        sums.add_inside(ZEROS, [1, 2].into_iter(), 4);
        sums.savable(1).bytes = 8;
        let nodes = sums.with_read([(0, 2), (3, 1), (0, 1)].into_iter());
        let inside = |node: u32| (nodes[&node].read / PAGE, nodes[&node].inside / PAGE);
        assert_eq!([0, 1, 2, 3].map(inside), [(3, 4), (0, 9), (0, 1), (1, 0)]);
        assert_eq!((nodes.len(), nodes[&1].savable.bytes), (4, 8));
    }
}
