//! A lab: an engine core in a fake world, and the steps of the tests with both.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use wire::RunMode;

use super::agent::{FakeLink, Mail};
use super::memory::FakeMemory;
use super::store::FakeStore;
use super::{FakeLine, Process, Shared, World};
use crate::domain::handover::Handover;
use crate::domain::index::Index;
use crate::domain::lifelines::{Epoch, Lifeline};
use crate::domain::placement::Placement;
use crate::domain::{Domain, PerNode};
use crate::guest::{Guest, Newcomer};
use crate::merge::read::Hasher;
use crate::options::Rules;
use crate::page::Slot;
use crate::run::core::Crew;
use crate::run::core::{Core, Scratch};
use crate::run::knobs::Knobs;
use crate::run::wishes::Wish;
use crate::run::workers::Alone;
use crate::sync::lock;

/// Tells what came of a wish.
type Told = Receiver<Result<wire::MergedNow, crate::error::EngineError>>;

/// A core in a fake world, its rounds driven by hand.
pub(crate) struct Lab {
    pub(crate) world: Shared,
    pub(crate) core: Arc<Core>,
    options: crate::options::Options,
    alone: Alone,
}

fn placement(options: &crate::options::Options) -> Placement {
    let topology = options.topology.clone();
    Placement::new(topology.unwrap_or_else(|| numa::Topology::live().unwrap())).unwrap()
}

fn new_core(world: &Shared, options: &crate::options::Options) -> Core {
    let (world, placement) = (Arc::clone(world), placement(options));
    let begin = move |domain: &str| {
        // A domain that ended leaves nothing behind; a new one has a new store.
        let mut old = lock(&world);
        old.shelves.remove(domain);
        old.ties.remove(domain);
        old.new_tie(domain);
        drop(old);
        new_domain(&world, &placement, domain)
    };
    let knobs = Knobs::new(options, 65530);
    Core::new(
        knobs,
        options.limits,
        Hasher::new().unwrap(),
        Box::new(begin),
    )
}

fn new_domain(world: &Shared, placement: &Placement, domain: &str) -> std::io::Result<Domain> {
    let handover = Handover::new(domain, &[], None)?;
    Ok(Domain::new(domain, placement.clone(), handover, |id| {
        let store = FakeStore {
            world: Arc::clone(world),
            domain: domain.to_owned(),
            id,
        };
        PerNode {
            index: Index::default(),
            store: Box::new(store),
        }
    }))
}

impl Lab {
    pub(crate) fn new() -> Self {
        Self::with(crate::options::Options {
            knobs: wire::KnobValues {
                threads: 1,
                ..wire::KnobValues::default()
            },
            patience: Duration::ZERO,
            ..crate::options::Options::default()
        })
    }

    /// A lab on a machine with this many nodes, and this many pages to a copy.
    pub(crate) fn on_nodes(nodes: usize, across: bool, limit: u32) -> Self {
        let spec = format!("fake={nodes}").parse().unwrap();
        let topology = numa::Topology::live().unwrap().emulate(&spec).unwrap();
        Self::with(crate::options::Options {
            knobs: wire::KnobValues {
                threads: 1,
                merge_across_nodes: across,
                max_page_sharing: limit,
                ..wire::KnobValues::default()
            },
            patience: Duration::ZERO,
            topology: Some(topology),
            ..crate::options::Options::default()
        })
    }

    pub(crate) fn with(options: crate::options::Options) -> Self {
        let world = Shared::default();
        lock(&world).bound = !options.knobs.merge_across_nodes;
        Self {
            core: Arc::new(new_core(&world, &options)),
            world,
            options,
            alone: Alone(Mutex::new(Scratch::new())),
        }
    }

    /// Kills the engine at once; another one takes over its stores and ties. Agents deal with what
    /// they were asked last, or find the connection closed.
    pub(crate) fn succeed(&mut self, deal: bool) {
        self.world(|world| {
            for process in 0..world.processes.len() {
                if deal && !world.processes[process].dead {
                    world.deal(process);
                }
                world.processes[process].connection = 0;
            }
        });
        let rules = self.core.knobs.rules();
        self.options.knobs.merge_across_nodes = rules.across_nodes;
        self.options.knobs.max_page_sharing = rules.max_sharing;
        self.core = Arc::new(new_core(&self.world, &self.options));
        let domains = self.world(|world| world.ties.clone());
        for (name, ties) in domains {
            let domain = new_domain(&self.world, &placement(&self.options), &name).unwrap();
            let line = |line| -> Box<dyn Lifeline> {
                let world = Arc::clone(&self.world);
                Box::new(FakeLine { world, line })
            };
            let ties = ties.into_iter().map(|tie| (Some(tie as u64), line(tie)));
            crate::handover::restore::resume(&self.core, domain, ties.collect()).unwrap();
            self.world(|world| world.new_tie(&name));
        }
        self.check();
    }

    /// Has refs of these slots held as if a former engine had left them to guests that do not come back.
    pub(crate) fn hold_former(&self, domain: &str, slots: Vec<Slot>) {
        let line = self.world(World::new_line);
        self.world(|world| world.hold(line));
        let world = Arc::clone(&self.world);
        let tie: Box<dyn Lifeline> = Box::new(FakeLine { world, line });
        let domain = self.core.domain(domain).unwrap();
        *lock(&domain.former) = Epoch::new(vec![(None, tie)], slots);
    }

    /// A lab with a guest of one chunk.
    pub(crate) fn with_guest() -> (Self, Arc<Guest>) {
        let lab = Self::new();
        lab.guest("d", 1);
        let guest = Arc::clone(&lock(&lab.core.guests)[0]);
        (lab, guest)
    }

    /// A guest that offers `chunks` chunks whole; gives its number.
    pub(crate) fn guest(&self, domain: &str, chunks: u64) -> usize {
        self.guest_of(domain, chunks, 0)
    }

    /// The same, of this user.
    pub(crate) fn guest_of(&self, domain: &str, chunks: u64, uid: u32) -> usize {
        let process = {
            let mut world = lock(&self.world);
            world.processes.push(Process {
                domain: domain.to_owned(),
                uid,
                offered: (0..chunks).collect(),
                ..Process::default()
            });
            world.processes.len() - 1
        };
        self.connect(process);
        process
    }

    /// Connects a process's agent (again).
    pub(crate) fn connect(&self, process: usize) {
        let name = self.world(|world| world.processes[process].domain.clone());
        let domain = self.core.domain(&name).unwrap();
        let uid = self.world(|world| world.processes[process].uid);
        domain.note_guest_of(&self.core.users.get(uid));
        let mut world = lock(&self.world);
        let line = world.new_line();
        let tie = *world.ties[&name].last().unwrap();
        world.hold(line);
        world.hold(tie);
        let its = &mut world.processes[process];
        its.kept.append(&mut its.lines);
        its.kept.extend(its.tie.replace(tie));
        its.lines.push(line);
        its.connections += 1;
        its.connection = its.connections;
        its.changed = its.offered.clone();
        its.mail = Mail::greeting();
        drop(world);
        let memory = Box::new(FakeMemory::new(&self.world, process));
        let link = Box::new(FakeLink::new(&self.world, process));
        let line = Box::new(FakeLine {
            world: Arc::clone(&self.world),
            line,
        });
        let peer = self.world(|world| world.processes[process].peer(process));
        let newcomer = Newcomer {
            peer,
            domain,
            memory,
            link,
            line,
        };
        self.core.admit(peer.uid, newcomer);
    }

    /// Does something to the world.
    pub(crate) fn world<T>(&self, act: impl FnOnce(&mut World) -> T) -> T {
        act(&mut lock(&self.world))
    }

    /// A round on this thread, then all assertions.
    pub(crate) fn round(&self) {
        self.round_by(&self.alone);
    }

    /// A round by this crew, then all assertions.
    pub(crate) fn round_by(&self, crew: &dyn Crew) {
        self.core.note_moved(self.world(|world| world.frames_moved));
        self.core.round(crew, true);
        self.check();
    }

    /// So many early looks at all that have just come, each followed by all assertions.
    pub(crate) fn early(&self, count: usize) {
        for _ in 0..count {
            self.core.look_early(&self.alone);
            self.check();
        }
    }

    /// Has these guests merged now, as far as they lie between these pages; gives what came of it.
    pub(crate) fn merge_now(
        &self,
        processes: &[usize],
        pages: std::ops::Range<u64>,
    ) -> Result<wire::MergedNow, crate::error::EngineError> {
        let told = self.wish(processes, pages)?;
        self.grant();
        told.try_recv().unwrap()
    }

    /// Asks for all memory of these guests to be merged now; tells what comes of it.
    pub(crate) fn ask_to_merge(&self, processes: &[usize]) -> Told {
        self.wish(processes, 0..1 << 20).unwrap()
    }

    fn wish(
        &self,
        processes: &[usize],
        pages: std::ops::Range<u64>,
    ) -> Result<Told, crate::error::EngineError> {
        let pids = processes.iter().map(|&pid| u32::try_from(pid).unwrap());
        let pids: Vec<_> = pids.collect();
        let guests = self
            .core
            .find_guests((&wire::Viewer::default(), true), &pids)?;
        let (tell, told) = std::sync::mpsc::channel();
        self.core.wishes.add(Wish {
            uid: 0,
            guests,
            range: super::address(pages.start)..super::address(pages.end),
            brief: false,
            tell: Box::new(move |merged| tell.send(merged).unwrap()),
        });
        Ok(told)
    }

    /// Grants what was asked for, then all assertions.
    pub(crate) fn grant(&self) {
        self.core.grant(&self.alone);
        self.check();
    }

    /// A glance, then all assertions.
    pub(crate) fn glance(&self) {
        self.rests_after_glance(0);
    }

    /// The same; tells whether user `uid` rests right after it.
    pub(crate) fn rests_after_glance(&self, uid: u32) -> bool {
        self.core.glance(&self.alone);
        let rests = self.core.glances.rests(uid);
        self.check();
        rests
    }

    /// Enough time passes for all users to be looked at by the next glance.
    pub(crate) fn rest(&self) {
        self.core.glances.end_rests();
    }

    /// Rounds without looking for work, to unmerge.
    pub(crate) fn unmerge(&self) {
        self.core.knobs.turn([wire::Setting::Run(RunMode::Unmerge)]);
        self.core.round(&self.alone, false);
        self.check();
    }

    /// Asks for other rules; gives the pages in the way.
    pub(crate) fn switch(&self, rules: Rules) -> u64 {
        let shared = self.core.switch(rules);
        if shared == 0 {
            lock(&self.world).bound = !rules.across_nodes;
        }
        self.check();
        shared
    }

    /// Rounds until pages written before are settled and merged, and promotions done.
    pub(crate) fn rounds(&self, count: usize) {
        (0..count).for_each(|_| self.round());
    }

    fn check(&self) {
        crate::check::check(&self.core);
        let world = lock(&self.world);
        world.assert_contents();
        for (domain, shelf) in &world.shelves {
            let domains = lock(&self.core.domains);
            for &slot in shelf
                .written
                .keys()
                .filter(|slot| !shelf.punched.contains(slot))
            {
                let own = world.accounted(domain, slot);
                // A store goes with its domain.
                let Some(domain) = domains.get(domain) else {
                    assert_eq!(own, 0, "I4: slot {slot}");
                    continue;
                };
                let refs = domain.slots.view().counts(Slot(slot)).0;
                assert!(refs as usize >= own, "I4: slot {slot}");
                let kept = refs > 0 || domain.is_unpunched(Slot(slot));
                assert!(kept, "slot {slot} leaks a frame");
            }
        }
    }

    pub(crate) fn status(&self) -> wire::Status {
        crate::status::status(&self.core)
    }
}
