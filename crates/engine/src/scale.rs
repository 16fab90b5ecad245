//! How cost grows: an engine with up to 10 000 guests and 100 million pages on 16 nodes, states only; and with up to 64 workers.
//!
//! Guests, agents, page maps and stores are simulated and hold nothing, so that only the engine is
//! measured: its tables, its index, its rounds, its locks. The time of the kernel and of the agents is not in it. A
//! scan is answered at once, a page that is read has its number in it, and an agent merges all that it
//! is asked for. Fingerprints are real. Each round stands for a period; no clock is asked by the
//! engine. Seven of ten runs of 16 pages are the same in all guests of a node.
//!
//! It is no crate of its own: it would need some thirty items of the engine that no other crate is to touch, from the core's rounds to
//! the locks.
//!
//! [`grow`] takes the cost of a size. [`crowd`] counts the locks that many workers meet at: no machine of many processors is needed to
//! see which lock is taken how often for a page, and for how long. The figure for 64 processors comes from a model: see
//! `pageone bench run scale`.

mod world;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use wire::CHUNK_PAGES;

use crate::domain::handover::Handover;
use crate::domain::index::Index;
use crate::domain::placement::Placement;
use crate::domain::{Domain, PerNode};
use crate::guest::Newcomer;
use crate::merge::read::Hasher;
use crate::options::Options;
use crate::run::core::{Core, Crew};
use crate::run::knobs::Knobs;
use crate::run::waiting::Timing;
use crate::run::workers::Alone;
use crate::sync::census;
use world::{Agent, Held, Nowhere, Simulated};

/// The time in which a cache line that another processor wrote comes over: an assumption, of processors in one socket.
pub const LINE: Duration = Duration::from_nanos(100);
/// Rounds after which memory is settled.
const SETTLING: u32 = 2;
/// Later rounds that are measured.
const QUIET: u32 = 4;
/// The mappings that a guest may have.
const MAPPINGS: u64 = 65530;

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Guests.
    pub guests: u64,
    /// Chunks of 512 pages in each.
    pub chunks: u32,
    /// Nodes, at most 16; nothing is shared between two.
    pub nodes: u8,
}

/// What it cost on one thread, in CPU time.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// The round in which all pages are settled: read, fingerprinted, looked up, planned, asked, accounted.
    pub merge: Duration,
    /// Messages to agents in that round: one a chunk, and a sync a guest.
    pub merge_questions: u64,
    /// A later round in which nothing is written, on the average: every other one leaves out what is calm.
    pub quiet: Duration,
    /// Messages in each: the sync of each guest.
    pub quiet_questions: u64,
    /// The engine's tables, indexes and slots.
    pub metadata_bytes: u64,
}

/// What workers met at while they merged all pages once.
#[derive(Clone, Debug)]
pub struct Crowd {
    /// Time of the clock.
    pub wall: Duration,
    /// CPU time of this process.
    pub cpu: Duration,
    /// By class, those first that serve the fewest workers.
    pub locks: Vec<LockUse>,
}

/// How a class of locks was used.
#[derive(Clone, Copy, Debug)]
pub struct LockUse {
    /// Its name in the order of locks, or what a plain mutex is of.
    pub name: &'static str,
    /// Times that one of the class was taken.
    pub taken: u64,
    /// Of these, times at which another thread had it.
    pub busy: u64,
    /// For how long the busiest of the class kept others off, were each worker on a processor of its own. That is while it was held
    /// alone, and while its cache line came over, twice each time it was taken.
    pub demand: Duration,
}

impl Size {
    /// Pages of all guests.
    #[must_use]
    pub fn pages(self) -> u64 {
        self.guests * u64::from(self.chunks) * CHUNK_PAGES as u64
    }
}

/// Merges what `size` says on this thread, and lets it rest.
///
/// # Errors
/// No random numbers, or the machine does not tell its nodes.
///
/// # Panics
/// When a page is not settled, or too few are merged: then the figures are of something else.
pub fn grow(size: Size) -> io::Result<Cost> {
    let plant = Plant::new(size, 1)?;
    let alone = Alone::new();
    plant.rounds(&alone, sys::process::thread_time, SETTLING);
    let (merge, merge_questions) = plant.rounds(&alone, sys::process::thread_time, 1);
    plant.rounds(&alone, sys::process::thread_time, 2); // until idle blocks are left out every other time
    let (quiet, quiet_questions) = plant.rounds(&alone, sys::process::thread_time, QUIET);
    Ok(Cost {
        merge,
        merge_questions,
        quiet,
        quiet_questions,
        metadata_bytes: plant.check(size),
    })
}

/// Merges what `size` says with so many workers at work at a time, however many processors there are. One at a time: the counts are the
/// process's.
///
/// # Errors
/// As [`grow`].
///
/// # Panics
/// As [`grow`].
pub fn crowd(size: Size, workers: u16) -> io::Result<Crowd> {
    let plant = Plant::new(size, workers)?;
    let crew = Many((0..workers.max(1)).map(|_| Alone::new()).collect());
    plant.rounds(&crew, sys::clock::monotonic, SETTLING);
    let before = sys::process::cpu_time();
    census::begin();
    let (wall, _) = plant.rounds(&crew, sys::clock::monotonic, 1);
    census::end();
    let cpu = sys::process::cpu_time().saturating_sub(before);
    plant.check(size);
    Ok(Crowd {
        wall,
        cpu,
        locks: by_class(&census::collect()),
    })
}

fn by_class(uses: &census::Uses) -> Vec<LockUse> {
    let mut classes: BTreeMap<&str, LockUse> = BTreeMap::new();
    // A worker's post is its own: with one worker it only looks like a lock that all meet at.
    let shared = |name: &str| !name.ends_with("post::State");
    for (&(name, _), one) in uses.iter().filter(|((name, _), _)| shared(name)) {
        let new = LockUse {
            name,
            taken: 0,
            busy: 0,
            demand: Duration::ZERO,
        };
        let class = classes.entry(name).or_insert(new);
        class.taken += one.taken;
        class.busy += one.busy;
        let lines = u32::try_from(one.taken).unwrap_or(u32::MAX);
        class.demand = class.demand.max(one.held + LINE * 2 * lines);
    }
    let mut classes: Vec<_> = classes.into_values().collect();
    classes.sort_by_key(|class| std::cmp::Reverse(class.demand));
    classes
}

/// So many workers, at the priority of this process: those of a daemon step back behind all others, and on a busy machine a round
/// would be cut.
struct Many(Vec<Alone>);

impl Crew for Many {
    fn work(&self, core: &Core, _timing: &Timing) {
        std::thread::scope(|scope| {
            for worker in &self.0 {
                scope.spawn(|| {
                    worker.run(core, || {
                        core.pause();
                    });
                    census::hand_in();
                });
            }
        });
    }
}

/// An engine and its simulated guests.
struct Plant {
    core: Core,
    questions: Arc<AtomicU64>,
}

impl Plant {
    fn new(size: Size, workers: u16) -> io::Result<Self> {
        let nodes = size.nodes.max(1);
        let spec = format!("fake={nodes}").parse();
        let topology = numa::Topology::live().map_err(io::Error::other)?;
        let topology = topology
            .emulate(&spec.map_err(io::Error::other)?)
            .map_err(io::Error::other)?;
        let placement = Placement::new(topology);
        let placement = placement.ok_or_else(|| io::Error::other("no node has memory"))?;
        let new_domain = move |domain: &str| {
            let handover = Handover::new(domain, &[], None)?;
            Ok(Domain::new(domain, placement.clone(), handover, |_| {
                PerNode {
                    index: Index::default(),
                    store: Box::new(Nowhere),
                }
            }))
        };
        let options = Options {
            patience: Duration::from_secs(1),
            knobs: wire::KnobValues {
                merge_across_nodes: false,
                threads: workers,
                ..wire::KnobValues::default()
            },
            ..Options::default()
        };
        let core = Core::new(
            Knobs::new(&options, MAPPINGS),
            options.limits,
            Hasher::new()?,
            Box::new(new_domain),
        );
        let plant = Self {
            core,
            questions: Arc::default(),
        };
        (0..size.guests).try_for_each(|number| plant.admit(number, size))?;
        Ok(plant)
    }

    fn admit(&self, number: u64, size: Size) -> io::Result<()> {
        let domain = self.core.domain("all")?;
        let memory = Simulated::new(number, size.nodes.max(1).into());
        let link = Agent::new(size.chunks, &self.questions);
        let peer = sys::socket::Peer {
            pid: u32::try_from(number).map_err(io::Error::other)?,
            uid: 0,
            gid: 0,
        };
        let newcomer = Newcomer {
            peer,
            domain,
            memory: Box::new(memory),
            link: Box::new(link),
            line: Box::new(Held),
        };
        self.core.admit(peer.uid, newcomer);
        Ok(())
    }

    /// Rounds; gives how long one took by `clock`, and how many questions it put.
    fn rounds(&self, crew: &dyn Crew, clock: fn() -> Duration, count: u32) -> (Duration, u64) {
        let (begin, before) = (clock(), self.questions.load(Relaxed));
        (0..count).for_each(|_| self.core.round(crew, true));
        let asked = self.questions.load(Relaxed) - before;
        (
            clock().saturating_sub(begin) / count,
            asked / u64::from(count),
        )
    }

    /// Checks that all was done; gives the bytes of all tables.
    fn check(&self, size: Size) -> u64 {
        let (status, pages) = (crate::status::status(&self.core), size.pages());
        let merged = status.pages_shared + status.pages_sharing;
        assert!(
            merged * 10 > pages * 6,
            "{merged} of {pages} pages are merged"
        );
        // Where two workers meet at a fingerprint again and again, a page waits for the next round.
        let settled = merged + status.pages_unshared;
        assert!(
            settled * 100 >= pages * 99,
            "{settled} of {pages} pages are settled"
        );
        status.metadata_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_plant_merges_inside_its_nodes() {
        let size = Size {
            guests: 48,
            chunks: 2,
            nodes: 16,
        };
        let cost = grow(size).unwrap();
        assert_eq!((cost.merge_questions, cost.quiet_questions), (3 * 48, 48));
    }

    #[test]
    fn the_locks_of_a_crowd_are_counted_by_class() {
        let size = Size {
            guests: 8,
            chunks: 4,
            nodes: 1,
        };
        let crowd = crowd(size, 4).unwrap();
        let of = |name| crowd.locks.iter().find(|class| class.name == name);
        let queue = of("QUEUE").expect("jobs were taken");
        assert!(
            queue.taken >= 8 * 4 && queue.demand > LINE * 64,
            "{queue:?}"
        );
        assert!(of("CHUNK").is_some_and(|chunk| chunk.demand < queue.demand + crowd.cpu));
        assert!(of("KNOBS").is_none(), "no knob was turned: {crowd:?}");
    }
}
