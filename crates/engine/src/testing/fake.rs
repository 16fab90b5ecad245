//! A world of fake guests, agents, stores and lifelines. Its guests write, discard, fork, stall, lie
//! and die at the test's word. It knows all true mappings, and panics when the engine breaks
//! a promise. That is when it writes a slot twice, punches one that is mapped, mixes domains or (when it must not)
//! nodes, or gives a page a slot of other content.
//!
//! A page's content is a number, 0 for zeros, spread over its bytes. The [`lab`] runs an engine in this
//! world.

mod agent;
mod lab;
mod memory;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::domain::lifelines::Lifeline;
use crate::page::{CHUNK, PAGE};
use crate::sync::lock;

pub(crate) use agent::Manners;
pub(crate) use lab::Lab;
pub(crate) use store::bytes;

/// Where a fake guest's region begins.
pub(crate) const BASE: u64 = 64 * CHUNK;

/// The address of a page of the region.
pub(crate) fn address(page: u64) -> u64 {
    BASE + page * PAGE
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
    pub(crate) uid: u32,
    pub(crate) pages: BTreeMap<u64, Place>,
    /// The node of each page that is not on the first.
    pub(crate) nodes: BTreeMap<u64, u8>,
    /// What each page must read as.
    pub(crate) shadow: BTreeMap<u64, u64>,
    pub(crate) offered: BTreeSet<u64>,
    pub(crate) changed: BTreeSet<u64>,
    pub(crate) pinned: BTreeSet<u64>,
    /// What may write to its pages unseen.
    pub(crate) borrows: Option<String>,
    /// Pages of which it told that their content no longer matters, since the last sync.
    pub(crate) told: u64,
    /// Chunks that are one huge page.
    pub(crate) huge: BTreeSet<u64>,
    /// Pages that a child shares by fork: a read parts them.
    pub(crate) forked: BTreeSet<u64>,
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
    /// How often its agent was asked what changed.
    pub(crate) syncs: u64,
    /// How long each scan takes.
    pub(crate) scan_takes: std::time::Duration,
    /// A thread that reads its memory sleeps.
    pub(crate) hangs: Option<Arc<(Mutex<bool>, Condvar)>>,
}

impl Process {
    /// What the kernel says of the process with this number.
    fn peer(&self, number: usize) -> sys::socket::Peer {
        sys::socket::Peer {
            pid: u32::try_from(number).unwrap(),
            uid: self.uid,
            gid: self.uid,
        }
    }
}

/// A store as the world sees it.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    /// Content of each slot ever written.
    written: BTreeMap<u64, u64>,
    punched: BTreeSet<u64>,
    /// The node of each frame that is not on its store's.
    moved: BTreeMap<u64, u8>,
}

impl Shelf {
    /// The node that the frame of a slot is on.
    fn node(&self, slot: u64) -> u8 {
        let moved = self.moved.get(&slot).copied();
        moved.unwrap_or(crate::page::Slot(slot).store().0)
    }
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
    /// What guests counted in their lines.
    tallies: BTreeMap<usize, u64>,
    /// The ties of each domain since its store is there; guests get the last.
    ties: BTreeMap<String, Vec<usize>>,
    /// Whether a page must not be asked to map a slot of another node.
    pub(crate) bound: bool,
    /// CPU time of a punch.
    pub(crate) punches_take: Duration,
    /// Pages whose node was asked for.
    pub(crate) queries: u64,
    /// Slots whose node was asked for.
    pub(crate) frame_queries: u64,
    /// CPU time of such a question.
    pub(crate) frame_queries_take: Duration,
    /// Frames of slots that were moved so far.
    pub(crate) frames_moved: u64,
    /// A node that has no memory left, and the one that new frames of its store come from.
    pub(crate) full: Option<(u8, u8)>,
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

    /// Slots that were ever written in the stores of `domain`.
    pub(crate) fn slots_ever(&self, domain: &str) -> usize {
        self.shelves
            .get(domain)
            .map_or(0, |shelf| shelf.written.len())
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

    /// Moves a page to another node; the kernel does not tell.
    pub(crate) fn migrate(&mut self, process: usize, page: u64, node: u8) {
        self.processes[process].nodes.insert(page, node);
    }

    /// Moves the frames of the slots that pages of a process map, for all that map them; the kernel does not tell.
    pub(crate) fn migrate_slots(&mut self, process: usize, pages: std::ops::Range<u64>, node: u8) {
        let process = &self.processes[process];
        let Some(shelf) = self.shelves.get_mut(&process.domain) else {
            return;
        };
        for place in process.pages.range(pages).map(|(_, place)| place) {
            if let Place::Slot { slot, .. } = place {
                shelf.moved.insert(*slot, node);
                self.frames_moved += 1;
            }
        }
    }

    /// The nodes of the frames that pages of a process map.
    pub(crate) fn slot_nodes(&self, process: usize) -> BTreeSet<u8> {
        let process = &self.processes[process];
        let shelf = &self.shelves[&process.domain];
        let places = process.pages.values();
        let slots = places.filter_map(|place| match place {
            Place::Slot { slot, .. } => Some(shelf.node(*slot)),
            _ => None,
        });
        slots.collect()
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
        let number = process;
        let process = &mut self.processes[number];
        let was = process.pages.remove(&page);
        process.shadow.remove(&page);
        process.changed.insert(page / 512);
        if let Some(Place::Slot { .. }) = was {
            self.note_discard(number);
        }
    }

    /// Counts a discard of merged pages in the process's line, as its agent does.
    pub(crate) fn note_discard(&mut self, process: usize) {
        if let Some(&line) = self.processes[process].lines.last() {
            *self.tallies.entry(line).or_default() += 1;
        }
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

struct FakeLine {
    world: Shared,
    line: usize,
}

impl Lifeline for FakeLine {
    fn is_free(&self) -> bool {
        lock(&self.world).holders[self.line] == 0
    }

    fn discards(&self) -> u64 {
        let world = lock(&self.world);
        world.tallies.get(&self.line).copied().unwrap_or(0)
    }
}
