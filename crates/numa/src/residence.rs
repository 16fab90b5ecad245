//! On which nodes a process has its pages, and how far they are from where it runs.
//!
//! Pages that are present are found with PAGEMAP_SCAN, which passes holes in no time, and asked after with move_pages
//! in batches. The kernel's page of zeros is on no node that counts.

use std::collections::BTreeMap;
use std::io;

use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use sys::ksm::Member;
use sys::pagemap::{Categories, PageRun, Pagemap};
use sys::residence::{FrameFlags, Mapping};
use sys::{mempolicy, residence};

use crate::{NodeId, Topology};

const PAGE: u64 = 4096;
/// Pages that one query asks after.
const BATCH: usize = 4096;
/// Runs of pages taken from one look at the page map.
const RUNS: usize = 1024;
/// How /proc/PID/maps shows mappings of PageONE's stores.
pub const STORE_PREFIX: &str = "/memfd:pageone-store";

/// What a page is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Kind {
    Anonymous,
    File,
    Merged,
}

/// The pages of a process on one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NodePages {
    /// Private memory, pages broken out of a merge included.
    pub anonymous: u64,
    /// Files and shared memory.
    pub file: u64,
    /// Shared by merging: PageONE's stores, and the kernel's own merging where root asks.
    pub merged: u64,
}

impl NodePages {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.anonymous + self.file + self.merged
    }
}

/// One process at one moment; it runs on meanwhile.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProcessReport {
    /// Its number.
    pub pid: i32,
    /// Its name.
    pub name: String,
    /// Its pages by node, for every online node.
    pub nodes: BTreeMap<NodeId, NodePages>,
    /// Present pages without a node: zeros, and those that left while we looked.
    pub elsewhere: u64,
    /// On which node how many of its threads ran last.
    pub threads: BTreeMap<NodeId, u64>,
    /// The share of pages that are on the node of a thread, on average over all threads: 1 when it has no page.
    pub local_share: f64,
    /// The mean distance between a thread and a page.
    pub mean_distance: f64,
}

impl ProcessReport {
    /// Looks at a process.
    ///
    /// # Errors
    /// It is gone, or not ours to look at; PAGEMAP_SCAN needs Linux 6.7.
    pub fn read(topology: &Topology, pid: Pid) -> io::Result<Self> {
        let mut census = Census::new(pid)?;
        residence::each_mapping(pid, |mapping| match mapping.name.as_str() {
            "[vsyscall]" => Ok(()),
            _ => census.add(mapping),
        })?;
        census.ask()?;
        let mut nodes: BTreeMap<_, _> = topology
            .nodes
            .iter()
            .map(|node| (node.id, NodePages::default()))
            .collect();
        nodes.extend(census.counts);
        let mut threads = BTreeMap::new();
        for (_, cpu) in residence::thread_cpus(pid)? {
            if let Some(node) = topology.node_of_cpu(cpu) {
                *threads.entry(node).or_insert(0) += 1;
            }
        }
        let (local_share, mean_distance) = nearness(topology, &nodes, &threads);
        let (name, elsewhere) = (residence::name_of(pid), census.elsewhere);
        let pid = pid.as_raw_nonzero().get();
        Ok(Self {
            pid,
            name,
            nodes,
            elsewhere,
            threads,
            local_share,
            mean_distance,
        })
    }
}

/// Means over all pairs of a thread and a page.
fn nearness(
    topology: &Topology,
    nodes: &BTreeMap<NodeId, NodePages>,
    threads: &BTreeMap<NodeId, u64>,
) -> (f64, f64) {
    let (mut pairs, mut local, mut distance) = (0_u128, 0_u128, 0_u128);
    for (&thread_node, &count) in threads {
        for (&page_node, pages) in nodes {
            let weight = u128::from(count) * u128::from(pages.total());
            pairs += weight;
            local += if thread_node == page_node { weight } else { 0 };
            distance += weight * u128::from(topology.distance(thread_node, page_node).unwrap_or(0));
        }
    }
    if pairs == 0 {
        return (1.0, f64::from(crate::topology::LOCAL_DISTANCE));
    }
    #[allow(clippy::cast_precision_loss, reason = "shares, not accounts")]
    let share = |part: u128| part as f64 / pairs as f64;
    (share(local), share(distance))
}

/// Counts the pages of one process.
struct Census {
    pid: Pid,
    pagemap: Pagemap,
    runs: Vec<PageRun>,
    /// Tells pages that the kernel merged, if the process has any and we may know. Linux 6.12 says it of all
    /// anonymous frames: so only those count that other page tables have too, as merged ones do.
    ksm: Option<FrameFlags>,
    pages: Vec<usize>,
    kinds: Vec<Kind>,
    answers: Vec<i32>,
    counts: BTreeMap<NodeId, NodePages>,
    elsewhere: u64,
}

impl Census {
    fn new(pid: Pid) -> io::Result<Self> {
        let number = pid.as_raw_nonzero().get().unsigned_abs();
        let shares = Member::of(number).is_ok_and(|member| member.merging > 0);
        let ksm = shares.then(FrameFlags::open).and_then(Result::ok);
        Ok(Self {
            pid,
            pagemap: Pagemap::open(number)?,
            runs: vec![PageRun::default(); RUNS],
            ksm,
            pages: Vec::with_capacity(BATCH),
            kinds: Vec::with_capacity(BATCH),
            answers: vec![0; BATCH],
            counts: BTreeMap::new(),
            elsewhere: 0,
        })
    }

    fn add(&mut self, mapping: &Mapping) -> io::Result<()> {
        let store = mapping.name.starts_with(STORE_PREFIX);
        let mut at = mapping.range.start;
        while at < mapping.range.end {
            let mut runs = std::mem::take(&mut self.runs);
            let (found, next) = self.pagemap.peek(at..mapping.range.end, &mut runs)?;
            for run in runs.iter().take(found) {
                self.add_run(run, store)?;
            }
            (self.runs, at) = (runs, next);
        }
        Ok(())
    }

    fn add_run(&mut self, run: &PageRun, store: bool) -> io::Result<()> {
        let kind = match (run.categories.has(Categories::FILE), store) {
            (true, true) => Kind::Merged,
            (true, false) => Kind::File,
            (false, _) => Kind::Anonymous,
        };
        if !run.categories.has(Categories::PRESENT) {
            return Ok(());
        }
        if run.categories.has(Categories::ZERO) {
            self.elsewhere += (run.end - run.start) / PAGE;
            return Ok(());
        }
        let frames = match &self.ksm {
            Some(_) if kind == Kind::Anonymous => self.pagemap.shared_frames(run.start..run.end)?,
            _ => Vec::new(),
        };
        for (index, page) in (run.start..run.end).step_by(4096).enumerate() {
            let frame = frames.get(index).copied().flatten();
            let by_kernel = frame
                .zip(self.ksm.as_ref())
                .is_some_and(|(frame, ksm)| ksm.is_ksm(frame).unwrap_or(false));
            // An address of a 64-bit process; a 32-bit build of this looks at 32-bit processes.
            self.pages.push(usize::try_from(page).unwrap_or(usize::MAX));
            self.kinds.push(if by_kernel { Kind::Merged } else { kind });
            if self.pages.len() == BATCH {
                self.ask()?;
            }
        }
        Ok(())
    }

    /// Asks after the pages gathered so far.
    fn ask(&mut self) -> io::Result<()> {
        let answers = &mut self.answers[..self.pages.len()];
        mempolicy::pages_to_nodes(Some(self.pid), &self.pages, answers)?;
        // Neighbours are mostly alike: look a node up once for each run of them.
        let mut rest = answers
            .iter()
            .copied()
            .zip(self.kinds.iter().copied())
            .peekable();
        while let Some(first) = rest.next() {
            let mut count = 1;
            while rest.next_if_eq(&first).is_some() {
                count += 1;
            }
            let (Ok(node), kind) = (u32::try_from(first.0), first.1) else {
                self.elsewhere += count;
                continue;
            };
            let pages = self.counts.entry(NodeId(node)).or_default();
            *match kind {
                Kind::Anonymous => &mut pages.anonymous,
                Kind::File => &mut pages.file,
                Kind::Merged => &mut pages.merged,
            } += count;
        }
        self.pages.clear();
        self.kinds.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single() -> Topology {
        Topology {
            source: crate::topology::Source::Sysfs,
            cpu_naming: crate::topology::CpuNaming::Logical,
            nodes: Vec::new(),
            distances: vec![vec![10]],
            offline: Vec::new(),
            performance: Vec::new(),
        }
    }

    #[test]
    fn nearness_is_a_mean_over_pairs() {
        let machine = Topology {
            nodes: vec![crate::Node {
                memory_bytes: 1 << 30,
                ..Default::default()
            }],
            ..single()
        };
        let topology = machine.emulate(&"2:10,30,30,10".parse().unwrap()).unwrap();
        let pages = |count| NodePages {
            anonymous: count,
            ..NodePages::default()
        };
        let nodes = BTreeMap::from([(NodeId(0), pages(300)), (NodeId(1), pages(100))]);
        let (share, distance) = nearness(&topology, &nodes, &BTreeMap::from([(NodeId(0), 1)]));
        assert!((share - 0.75).abs() < 1e-9 && (distance - 15.0).abs() < 1e-9);
        let (share, distance) = nearness(
            &topology,
            &nodes,
            &BTreeMap::from([(NodeId(0), 1), (NodeId(1), 1)]),
        );
        assert!((share - 0.5).abs() < 1e-9 && (distance - 20.0).abs() < 1e-9);
        assert_eq!(nearness(&topology, &nodes, &BTreeMap::new()), (1.0, 10.0));
    }
}
