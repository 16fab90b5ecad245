//! A world of fake guests, agents, stores and lifelines. Its guests write, discard, fork, stall, lie
//! and die at the test's word; it knows who really maps what, and panics when the engine breaks
//! a promise: writes a slot twice, punches one that is mapped, mixes domains or (when it must not)
//! nodes, or gives a page a slot of other content.
//!
//! A page's content is a number, 0 for zeros, spread over its bytes.

mod agent;
mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use sdtree::SdTree;
use wire::{CHUNK_BYTES, PAGE_BYTES, RunMode};

use crate::account::{Home, Lifeline};
use crate::guest::Guest;
use crate::nodes::Rules;
use crate::page::{Slot, StoreId};
use crate::read::Hasher;
use crate::realm::{Floor, Realm, lock};
use crate::schedule::{Core, Knobs, Scratch};
use crate::store::{PageBytes, Store};
use crate::workers::{Alone, Crew};

pub(crate) use agent::{FakeLink, Manners};
pub(crate) use memory::FakeMemory;

/// Where a fake guest's region begins.
pub(crate) const BASE: u64 = 64 * CHUNK_BYTES as u64;

/// The address of a page of the region.
pub(crate) fn address(page: u64) -> u64 {
    BASE + page * PAGE_BYTES as u64
}

/// Whether a merged page shows in the page map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Never,
    /// Not armed yet, so it shows as written.
    Lately,
    Before,
}

/// What lies at a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A private frame; `stored` when it lies in a mapping of the store (broken).
    Frame {
        content: u64,
        written: bool,
        stored: bool,
    },
    /// A canonical page: untouched, touched since the last scan, or touched before.
    Slot { slot: u64, touch: Touch },
    /// The kernel's zero page.
    Zero,
}

/// A forked child: it only holds what it inherited.
#[derive(Debug, Default)]
pub(crate) struct Child {
    slots: Vec<(u64, u64)>,
    lines: Vec<usize>,
}

/// A process.
#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) domain: String,
    pub(crate) pages: BTreeMap<u64, Place>,
    /// The node of each page that is not on the first.
    pub(crate) nodes: BTreeMap<u64, u8>,
    /// What each page must read as.
    pub(crate) shadow: BTreeMap<u64, u64>,
    pub(crate) offered: BTreeSet<u64>,
    pub(crate) changed: BTreeSet<u64>,
    pub(crate) pinned: BTreeSet<u64>,
    /// Chunks that are one huge page.
    pub(crate) huge: BTreeSet<u64>,
    pub(crate) dead: bool,
    /// The number of the open connection; 0 for none.
    pub(crate) connection: u64,
    connections: u64,
    pub(crate) vmas: u64,
    /// It lied: what it maps is its own affair.
    pub(crate) tainted: bool,
    pub(crate) manners: Manners,
    pub(crate) mail: agent::Mail,
    /// The lifeline of this connection.
    pub(crate) lines: Vec<usize>,
    /// It maps stores of other domains too.
    pub(crate) elsewhere: bool,
    /// The tie of this connection.
    tie: Option<usize>,
    /// Lifelines and ties of former connections: pages merged then may still be there.
    pub(crate) kept: Vec<usize>,
    /// The slot of the mapping beneath a page, also of one that was written since.
    beneath: BTreeMap<u64, u64>,
    pub(crate) children: Vec<Child>,
    pub(crate) reads: u64,
    pub(crate) scans: u64,
    /// Whoever reads its memory sleeps.
    pub(crate) hangs: Option<Arc<(Mutex<bool>, Condvar)>>,
}

/// A store as the world sees it.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    /// Content of each slot ever written.
    written: BTreeMap<u64, u64>,
    punched: BTreeSet<u64>,
}

/// Everything.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) processes: Vec<Process>,
    pub(crate) shelves: BTreeMap<String, Shelf>,
    /// Contents that ever were in a domain.
    seen: BTreeMap<String, BTreeSet<u64>>,
    /// Holders of each lifeline and tie.
    holders: Vec<u32>,
    /// The ties of each domain since its store is there; guests get the last.
    ties: BTreeMap<String, Vec<usize>>,
    /// Whether a page must not be asked to map a slot of another node.
    pub(crate) bound: bool,
    /// Pages whose node was asked for.
    pub(crate) queries: u64,
}

impl World {
    fn new_line(&mut self) -> usize {
        self.holders.push(0);
        self.holders.len() - 1
    }

    fn new_tie(&mut self, domain: &str) {
        let tie = self.new_line();
        self.ties.entry(domain.to_owned()).or_default().push(tie);
    }

    fn hold(&mut self, line: usize) {
        self.holders[line] += 1;
    }

    fn let_go(&mut self, lines: &[usize]) {
        lines.iter().for_each(|&line| self.holders[line] -= 1);
    }

    /// Pages that map a slot: of processes, and of their children.
    fn mapped(&self, domain: &str, slot: u64) -> (usize, usize) {
        let own = self
            .processes
            .iter()
            .filter(|p| p.domain == domain && !p.tainted);
        let counts = own.map(|p| {
            let here = |place: &&Place| matches!(place, Place::Slot { slot: s, .. } if *s == slot);
            let living = p.pages.values().filter(|_| !p.dead);
            let inherited = p.children.iter().flat_map(|child| &child.slots);
            (
                living.filter(here).count(),
                inherited.filter(|(s, _)| *s == slot).count(),
            )
        });
        counts.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    }

    /// Pages that map a slot, of processes whose pages the present engine accounts for one by one:
    /// those that hold nothing of former ones.
    fn accounted(&self, domain: &str, slot: u64) -> usize {
        let tie = self.ties.get(domain).and_then(|ties| ties.last());
        let own = |p: &&Process| p.domain == domain && p.tie.as_ref() == tie && p.kept.is_empty();
        let living = self.processes.iter().filter(own);
        let living = living.filter(|p| !p.tainted && !p.dead);
        let here = |place: &&Place| matches!(place, Place::Slot { slot: s, .. } if *s == slot);
        living.map(|p| p.pages.values().filter(here).count()).sum()
    }

    fn content(&self, domain: &str, slot: u64) -> u64 {
        self.shelves[domain].written[&slot]
    }

    /// Frames in use in the store of `domain`.
    pub(crate) fn frames(&self, domain: &str) -> usize {
        let shelf = self.shelves.get(domain);
        shelf.map_or(0, |shelf| shelf.written.len() - shelf.punched.len())
    }

    /// Writes `content` to a page.
    pub(crate) fn write(&mut self, process: usize, page: u64, content: u64) {
        let process = &mut self.processes[process];
        let stored = match process.pages.get(&page) {
            Some(Place::Slot { .. }) => true,
            Some(Place::Frame { stored, .. }) => *stored,
            _ => false,
        };
        let frame = Place::Frame {
            content,
            written: true,
            stored,
        };
        process.pages.insert(page, frame);
        process.shadow.insert(page, content);
        let seen = self.seen.entry(process.domain.clone()).or_default();
        seen.insert(content);
    }

    /// Moves a page to another node; the kernel tells nobody.
    pub(crate) fn migrate(&mut self, process: usize, page: u64, node: u8) {
        self.processes[process].nodes.insert(page, node);
    }

    /// Pins a page to write to it, as direct I/O does: a write fault comes first.
    pub(crate) fn pin(&mut self, process: usize, page: u64) {
        let process = &mut self.processes[process];
        process.pinned.insert(page);
        let content = process.shadow.get(&page).copied();
        match process.pages.get_mut(&page) {
            Some(Place::Frame { written, .. }) => *written = true,
            Some(place @ Place::Slot { .. }) => {
                *place = Place::Frame {
                    content: content.unwrap_or(0),
                    written: true,
                    stored: true,
                };
            }
            _ => {}
        }
    }

    /// Discards a page; the agent puts anonymous memory there.
    pub(crate) fn discard(&mut self, process: usize, page: u64) {
        let process = &mut self.processes[process];
        process.pages.remove(&page);
        process.shadow.remove(&page);
        process.changed.insert(page / 512);
    }

    /// Touches a merged page, so that it shows in the page map.
    pub(crate) fn touch(&mut self, process: usize, page: u64) {
        if let Some(Place::Slot { touch, .. }) = self.processes[process].pages.get_mut(&page)
            && *touch == Touch::Never
        {
            *touch = Touch::Lately;
        }
    }

    /// Forks a child that lives until [`Self::end_child`].
    pub(crate) fn fork(&mut self, process: usize) {
        let parent = &mut self.processes[process];
        let slots = parent.pages.iter().filter_map(|(page, place)| match place {
            Place::Slot { slot, .. } => Some((*slot, parent.shadow[page])),
            _ => None,
        });
        let child = Child {
            slots: slots.collect(),
            lines: [&parent.lines[..], &parent.kept, parent.tie.as_slice()].concat(),
        };
        for &line in &child.lines {
            self.holders[line] += 1;
        }
        parent.children.push(child);
    }

    /// Ends the oldest child.
    pub(crate) fn end_child(&mut self, process: usize) {
        let children = &mut self.processes[process].children;
        if !children.is_empty() {
            let child = children.remove(0);
            self.let_go(&child.lines);
        }
    }

    /// Ends a process; its children live on.
    pub(crate) fn kill(&mut self, process: usize) {
        let process = &mut self.processes[process];
        process.dead = true;
        process.connection = 0;
        let mut lines = std::mem::take(&mut process.lines);
        lines.append(&mut process.kept);
        lines.extend(process.tie.take());
        self.let_go(&lines);
    }

    /// Offers or withdraws the pages of a chunk; withdrawn pages are given private frames.
    pub(crate) fn offer(&mut self, process: usize, chunk: u64, on: bool) {
        let process = &mut self.processes[process];
        process.changed.insert(chunk);
        if on {
            process.offered.insert(chunk);
            return;
        }
        process.offered.remove(&chunk);
        for (&page, place) in process.pages.range_mut(chunk * 512..(chunk + 1) * 512) {
            if let Place::Slot { .. } | Place::Frame { stored: true, .. } = place {
                *place = Place::Frame {
                    content: process.shadow[&page],
                    written: true,
                    stored: false,
                };
            }
        }
    }

    /// Asserts that every page of every honest process reads as it must, children included.
    pub(crate) fn assert_contents(&self) {
        for process in self.processes.iter().filter(|p| !p.tainted) {
            let slots = process
                .pages
                .iter()
                .filter_map(|(page, place)| match place {
                    Place::Slot { slot, .. } => Some((*slot, process.shadow[page])),
                    Place::Frame { content, .. } => {
                        assert_eq!(*content, process.shadow[page]);
                        None
                    }
                    Place::Zero => {
                        assert_eq!(process.shadow[page], 0);
                        None
                    }
                });
            let own = slots.filter(|_| !process.dead);
            let inherited = process
                .children
                .iter()
                .flat_map(|child| child.slots.iter().copied());
            for (slot, content) in own.chain(inherited) {
                assert_eq!(
                    self.content(&process.domain, slot),
                    content,
                    "I3: slot {slot} changed"
                );
                let punched = self.shelves[&process.domain].punched.contains(&slot);
                assert!(!punched, "I5: slot {slot} was punched while mapped");
            }
        }
    }
}

/// The world behind its lock.
pub(crate) type Shared = Arc<Mutex<World>>;

struct FakeStore {
    world: Shared,
    domain: String,
    id: StoreId,
}

impl FakeStore {
    /// Every slot ever written, its content, and whether it still has it.
    fn slots(&self) -> Vec<(Slot, u64, bool)> {
        let world = lock(&self.world);
        let Some(shelf) = world.shelves.get(&self.domain) else {
            return Vec::new();
        };
        let own = shelf
            .written
            .iter()
            .map(|(&slot, &content)| (Slot(slot), content, !shelf.punched.contains(&slot)));
        own.filter(|(slot, _, _)| slot.store() == self.id).collect()
    }
}

/// The bytes of a page with this content.
pub(crate) fn bytes(content: u64) -> PageBytes {
    let mut page = [0; PAGE_BYTES];
    for (at, part) in (0u64..).zip(page.chunks_exact_mut(8)) {
        let word = if content == 0 {
            0
        } else {
            content.wrapping_mul(at * 2 + 1)
        };
        part.copy_from_slice(&word.to_le_bytes());
    }
    page
}

fn content(page: &PageBytes) -> u64 {
    let (first, _) = page.split_first_chunk().unwrap();
    let content = u64::from_le_bytes(*first);
    assert_eq!(*page, bytes(content), "a torn page reached the store");
    content
}

impl Store for FakeStore {
    fn write(&self, first: Slot, pages: &[&PageBytes]) -> std::io::Result<()> {
        let mut world = lock(&self.world);
        for (slot, page) in (first.0..).zip(pages) {
            let content = content(page);
            let known = world
                .seen
                .get(&self.domain)
                .is_some_and(|seen| seen.contains(&content));
            assert!(known, "I6: content {content} was never in {}", self.domain);
            assert_eq!(Slot(slot).store(), self.id, "a slot of another store");
            let shelf = world.shelves.entry(self.domain.clone()).or_default();
            let twice = shelf.written.insert(slot, content).is_some();
            assert!(!twice, "I3: slot {slot} is written twice");
        }
        Ok(())
    }

    fn punch(&self, first: Slot, count: u64) -> std::io::Result<()> {
        let mut world = lock(&self.world);
        for slot in first.0..first.0 + count {
            assert_eq!(
                world.mapped(&self.domain, slot),
                (0, 0),
                "I5: punching mapped slot {slot}"
            );
            let shelf = world.shelves.get_mut(&self.domain).unwrap();
            assert!(
                shelf.written.contains_key(&slot),
                "slot {slot} was never written"
            );
            assert!(shelf.punched.insert(slot), "slot {slot} is punched twice");
        }
        Ok(())
    }

    fn end(&self) -> std::io::Result<u64> {
        let last = self.slots().pop();
        Ok(last.map_or(0, |(slot, _, _)| slot.number() + 1))
    }

    fn each(&self, each: &mut dyn FnMut(Slot, &PageBytes)) -> std::io::Result<()> {
        let live = self.slots().into_iter().filter(|(_, _, live)| *live);
        live.for_each(|(slot, content, _)| each(slot, &bytes(content)));
        Ok(())
    }

    fn number(&self) -> u64 {
        u64::from(self.id.0)
    }

    fn share(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

struct FakeLine {
    world: Shared,
    line: usize,
}

impl Lifeline for FakeLine {
    fn is_free(&self) -> bool {
        lock(&self.world).holders[self.line] == 0
    }
}

/// A core in a fake world, its rounds driven by hand.
pub(crate) struct Lab {
    pub(crate) world: Shared,
    pub(crate) core: Arc<Core>,
    options: crate::Options,
    alone: Alone,
}

fn home(options: &crate::Options) -> Home {
    let topology = options.topology.clone();
    Home::new(topology.unwrap_or_else(|| numa::Topology::live().unwrap())).unwrap()
}

fn new_core(world: &Shared, options: &crate::Options) -> Core {
    let (world, home) = (Arc::clone(world), home(options));
    let begin = move |domain: &str| {
        // A realm that ended leaves nothing behind; a new one has a new store.
        let mut old = lock(&world);
        old.shelves.remove(domain);
        old.ties.remove(domain);
        old.new_tie(domain);
        drop(old);
        new_realm(&world, &home, domain)
    };
    let knobs = Knobs::new(options, 65530);
    Core::new(knobs, Hasher::new().unwrap(), Box::new(begin))
}

fn new_realm(world: &Shared, home: &Home, domain: &str) -> std::io::Result<Realm> {
    Realm::new(domain, home.clone(), |id| {
        let store = FakeStore {
            world: Arc::clone(world),
            domain: domain.to_owned(),
            id,
        };
        Ok(Floor {
            index: Box::new(SdTree::<u64>::new()),
            store: Box::new(store),
        })
    })
}

impl Lab {
    pub(crate) fn new() -> Self {
        Self::with(crate::Options {
            threads: 1,
            patience: Duration::ZERO,
            ..crate::Options::default()
        })
    }

    /// A lab on a machine with this many nodes, and this many pages to a copy.
    pub(crate) fn on_nodes(nodes: usize, across: bool, limit: u32) -> Self {
        let spec = format!("fake={nodes}").parse().unwrap();
        let topology = numa::Topology::live().unwrap().emulate(&spec).unwrap();
        Self::with(crate::Options {
            threads: 1,
            patience: Duration::ZERO,
            merge_across_nodes: across,
            max_page_sharing: limit,
            topology: Some(topology),
            ..crate::Options::default()
        })
    }

    pub(crate) fn with(options: crate::Options) -> Self {
        let world = Shared::default();
        lock(&world).bound = !options.merge_across_nodes;
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
        self.options.merge_across_nodes = rules.across_nodes;
        self.options.max_page_sharing = rules.max_sharing;
        self.core = Arc::new(new_core(&self.world, &self.options));
        let domains = self.world(|world| world.ties.clone());
        for (domain, ties) in domains {
            let realm = new_realm(&self.world, &home(&self.options), &domain).unwrap();
            let line = |line| -> Box<dyn Lifeline> {
                let world = Arc::clone(&self.world);
                Box::new(FakeLine { world, line })
            };
            let ties = ties.into_iter().map(|tie| (tie as u64, line(tie)));
            self.core.inherit(realm, ties.collect()).unwrap();
            self.world(|world| world.new_tie(&domain));
        }
        self.check();
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
        let process = {
            let mut world = lock(&self.world);
            world.processes.push(Process {
                domain: domain.to_owned(),
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
        let domain = self.world(|world| world.processes[process].domain.clone());
        let realm = self.core.realm(&domain).unwrap();
        let mut world = lock(&self.world);
        let line = world.new_line();
        let tie = *world.ties[&domain].last().unwrap();
        world.hold(line);
        world.hold(tie);
        let its = &mut world.processes[process];
        its.kept.append(&mut its.lines);
        its.kept.extend(its.tie.replace(tie));
        its.lines.push(line);
        its.connections += 1;
        its.connection = its.connections;
        its.changed = its.offered.clone();
        its.mail = agent::Mail::greeting();
        drop(world);
        let memory = Box::new(FakeMemory::new(&self.world, process));
        let link = Box::new(FakeLink::new(&self.world, process));
        let line = Box::new(FakeLine {
            world: Arc::clone(&self.world),
            line,
        });
        let pid = u32::try_from(process).unwrap();
        self.core.admit(pid, realm, memory, link, line);
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
        self.core.round(crew, true);
        self.check();
    }

    /// Rounds without looking for work, to unmerge.
    pub(crate) fn unmerge(&self) {
        self.core.knobs.set_mode(RunMode::Unmerge);
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
            let realms = lock(&self.core.realms);
            for &slot in shelf
                .written
                .keys()
                .filter(|slot| !shelf.punched.contains(slot))
            {
                let refs = realms
                    .get(domain)
                    .map_or(0, |realm| realm.slots.view().counts(Slot(slot)).0);
                let own = world.accounted(domain, slot);
                assert!(refs as usize >= own, "I4: slot {slot}");
                assert!(refs > 0, "slot {slot} leaks a frame");
            }
        }
    }

    pub(crate) fn status(&self) -> wire::Status {
        crate::status::status(&self.core)
    }
}
