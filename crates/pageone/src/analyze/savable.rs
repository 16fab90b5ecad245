//! Savable bytes, in all and by NUMA node.

use std::collections::BTreeMap;

use serde::Serialize;

use super::nodes::NOWHERE;
use super::print::{PAGE, ZEROS};

/// Savable bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Savable {
    /// All of it.
    pub(crate) bytes: u64,
    /// Pages of zeros.
    pub(crate) zeros: u64,
    /// Copies within one process.
    pub(crate) within: u64,
    /// Copies of what another process has too.
    pub(crate) between: u64,
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

#[cfg(test)]
mod tests {
    use super::*;

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
