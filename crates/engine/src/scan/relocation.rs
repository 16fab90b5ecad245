//! Nodes: which store a page belongs to by where it lies, and pages that have moved.
//!
//! A domain has a store and an index for each node with memory. While merging crosses nodes, all
//! pages use the first index, and a new canonical page goes to the store of the node of the page
//! it was read from. Otherwise each page uses index and store of its own node, and meets only the
//! pages there (I6).
//!
//! The kernel is asked for the nodes of a batch of pages with one move_pages(2), after the batch was read.
//! Emulated nodes are parts of real ones, told apart by the numbers of the frames. On a machine
//! with one node nothing is asked and nothing remembered.
//!
//! The kernel may move a page whenever it likes, and does not tell. So a page's node is asked again
//! whenever something is about to follow from it: of a candidate when its twin is found, of a
//! planned page that was not asked for in its own job, and of all candidates in each round. The
//! last costs 0.2 µs a page and is bounded: at most [`BUDGET`] pages of a guest in one round, in
//! turn, so that a guest with fewer candidates has each of them where it belongs after one period.
//! What the kernel moves in the microseconds between question and window is merged where it was.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use numa::Topology;
use numa::topology::Source;
use wire::PAGE_BYTES;

use crate::domain::Effects;
use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::domain::placement::Home;
use crate::guest::Guest;
use crate::page::{StoreId, Tag};

/// Pages of a guest whose nodes are asked for again in one round: 256 MiB, about 15 ms.
const BUDGET: usize = 1 << 16;

/// What may be shared with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Whether pages of two nodes may share.
    pub(crate) across_nodes: bool,
    /// Pages that may share one copy; at least 2.
    pub(crate) max_sharing: u32,
}

/// How the kernel's word is understood.
#[derive(Debug)]
pub(crate) enum Atlas {
    /// One store: nothing to ask.
    One,
    /// The store of each of the kernel's nodes.
    Nodes(Vec<Option<StoreId>>),
    /// The store of each range of physical addresses, in ascending order.
    Ranges(Vec<(Range<u64>, StoreId)>),
}

impl Atlas {
    /// The atlas of the stores of `home`; `None` for emulated nodes of which nobody says where in
    /// memory they are.
    pub(crate) fn new(home: &Home) -> Option<Self> {
        if home.nodes.len() == 1 {
            return Some(Self::One);
        }
        match home.topology.source {
            Source::Emulated => ranges(&home.topology, home).map(Self::Ranges),
            _ => Some(Self::Nodes(by_number(home))),
        }
    }

    /// The store of a node by the kernel's answer, which may be an error number.
    pub(crate) fn of_node(&self, answer: i32) -> Option<StoreId> {
        match self {
            Self::Nodes(stores) => stores.get(usize::try_from(answer).ok()?).copied()?,
            _ => None,
        }
    }

    /// The store of a frame.
    pub(crate) fn of_frame(&self, frame: u64) -> Option<StoreId> {
        let Self::Ranges(ranges) = self else {
            return None;
        };
        let address = frame.checked_mul(PAGE_BYTES as u64)?;
        let behind = ranges.partition_point(|(range, _)| range.start <= address);
        let (range, store) = ranges.get(behind.checked_sub(1)?)?;
        (frame != 0 && range.contains(&address)).then_some(*store)
    }
}

fn by_number(home: &Home) -> Vec<Option<StoreId>> {
    let mut stores = Vec::new();
    for (store, node) in home.stores() {
        let at = usize::try_from(node.0).expect("a node's number");
        stores.resize(at + 1, None);
        if let Some(place) = stores.get_mut(at) {
            *place = Some(store);
        }
    }
    stores
}

fn ranges(topology: &Topology, home: &Home) -> Option<Vec<(Range<u64>, StoreId)>> {
    let mut all = Vec::new();
    for (store, node) in home.stores() {
        let ranges = &topology.node(node)?.ranges;
        if ranges.is_empty() {
            return None;
        }
        let own = ranges.iter().map(|r| (r.base..r.base + r.len_bytes, store));
        all.extend(own);
    }
    all.sort_unstable_by_key(|(range, _)| range.start);
    Some(all)
}

/// The addresses of pages of a chunk, as questions take them.
pub(crate) fn addresses(chunk: &Chunk, pages: impl Iterator<Item = usize>) -> Vec<usize> {
    let base = usize::try_from(chunk.address).expect("an address of this machine");
    pages.map(|page| base + page * PAGE_BYTES).collect()
}

/// Finds candidates and plans of a guest that are in the wrong place, in one round.
pub(crate) struct Patrol<'a> {
    guest: &'a Guest,
    rules: Rules,
    /// Chunks below were looked at in former rounds.
    from: u64,
    /// Pages that may still be asked for in this round.
    left: usize,
}

impl<'a> Patrol<'a> {
    /// Goes on where it stopped; with `begins` it is another round's.
    pub(crate) fn new(guest: &'a Guest, rules: Rules, begins: bool) -> Self {
        let left = guest.patrol_left.load(Relaxed);
        Self {
            guest,
            rules,
            from: guest.patrolled.load(Relaxed),
            left: if begins { BUDGET } else { left },
        }
    }

    /// Settles again what is in the wrong place: it will be read again and entered where it
    /// belongs. True when there was something.
    pub(crate) fn check(
        &mut self,
        chunk: &Chunk,
        pages: &mut Pages,
        effects: &mut Effects,
    ) -> bool {
        if !self.guest.realm.has_nodes() {
            return false;
        }
        let wrong = match self.rules.across_nodes {
            true => pages
                .candidates()
                .filter(|&page| pages.home(page) != StoreId::default())
                .collect(),
            false => self.find_moved(chunk, pages),
        };
        for &page in &wrong {
            effects.discard(pages, page, chunk.site(page));
            pages.set(page, Tag::Settled);
        }
        !wrong.is_empty()
    }

    fn find_moved(&mut self, chunk: &Chunk, pages: &Pages) -> Vec<usize> {
        let mut held: Vec<_> = pages.candidates().chain(pages.planned()).collect();
        held.sort_unstable();
        if chunk.address < self.from || held.is_empty() {
            return Vec::new();
        }
        if held.len() > self.left {
            self.left = 0;
            return Vec::new();
        }
        self.left -= held.len();
        self.from = chunk.address;
        let here = self
            .guest
            .memory
            .stores(&addresses(chunk, held.iter().copied()));
        // Of a page that is gone the scan tells.
        let moved = |&(page, here): &(usize, Option<StoreId>)| {
            let there = match pages.tag(page) {
                Tag::Planned => pages.slot(page).store(),
                _ => pages.home(page),
            };
            here.is_some_and(|here| here != there)
        };
        let all = held.into_iter().zip(here);
        all.filter(moved).map(|(page, _)| page).collect()
    }

    /// Notes where to go on; with `ends` in the next round.
    pub(crate) fn end(self, ends: bool) {
        let next = match ends {
            true if self.left > 0 => 0,
            true => self.from + 1,
            false => self.from,
        };
        self.guest.patrolled.store(next, Relaxed);
        self.guest.patrol_left.store(self.left, Relaxed);
    }
}
