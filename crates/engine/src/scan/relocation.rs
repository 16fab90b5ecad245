//! Relocation: pages that the kernel has moved to another node.
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
//! whenever something is about to follow from it. It is asked of a candidate when its twin is found, and of
//! a planned page that was not asked for in its own job. In each round it is asked of all candidates. The
//! last costs 0.2 µs a page and is bounded. At most [`BUDGET`] pages of a guest are asked for in one round,
//! in turn. So a guest with fewer candidates has each of them where it belongs after one period.
//! A page that the kernel moves in the microseconds between question and window is merged where it was.
//!
//! Canonical pages move, too: [`frames`](crate::domain::frames) finds those that are astray. While merging stays inside nodes the
//! merged pages that map such a slot are found here. They get private copies, and settle where they are.

use std::sync::atomic::Ordering::Relaxed;

use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::guest::change::Change;
use crate::page::{StoreId, Tag};
use wire::PageBits;

/// Pages of a guest whose nodes are asked for again in one round: 256 MiB, about 15 ms.
const BUDGET: usize = 1 << 16;

/// The merged pages of a chunk that map slots which are astray, while that matters.
pub(crate) fn strays(change: &Change<'_>, across_nodes: bool) -> PageBits {
    let mut strays = PageBits::EMPTY;
    let slots = &change.guest.domain.slots;
    if !across_nodes && slots.astray() > 0 && !change.merged.is_empty() {
        let view = slots.view();
        let astray = |page: &usize| view.is_astray(change.slot(*page));
        let all = change.merged.pages().filter(astray);
        all.for_each(|page| strays.insert(page));
    }
    strays
}

/// Finds candidates and plans of a guest that are in the wrong place, in one round.
pub(crate) struct Patrol<'a> {
    guest: &'a Guest,
    across_nodes: bool,
    /// Chunks below were looked at in former rounds.
    from: u64,
    /// Pages that may still be asked for in this round.
    left: usize,
}

impl<'a> Patrol<'a> {
    /// Goes on where it stopped; with `begins` it is another round's.
    pub(crate) fn new(guest: &'a Guest, across_nodes: bool, begins: bool) -> Self {
        let left = guest.patrol_left.load(Relaxed);
        Self {
            guest,
            across_nodes,
            from: guest.patrolled.load(Relaxed),
            left: if begins { BUDGET } else { left },
        }
    }

    /// Settles again what is in the wrong place: it will be read again and entered where it
    /// belongs. True when there was something.
    pub(crate) fn check(&mut self, change: &mut Change<'_>) -> bool {
        if !self.guest.domain.has_nodes() {
            return false;
        }
        let wrong = match self.across_nodes {
            true => change
                .candidates()
                .filter(|&page| change.home(page) != StoreId::default())
                .collect(),
            false => self.find_moved(change.chunk, change),
        };
        for &page in &wrong {
            change.turn(page, Tag::Settled);
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
            .stores(&chunk.addresses(held.iter().copied()));
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
