//! The NUMA nodes that pages are on.
//!
//! The kernel is asked at the first look, once a page: 0.1 µs. A machine on which one node has memory is not asked.

use std::path::Path;

use rustix::process::Pid;
use sys::node::{NODE_DIR, read_list};

use super::print::{PAGE, Print};

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
}
