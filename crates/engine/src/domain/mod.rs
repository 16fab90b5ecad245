//! A domain: the stores and tables that its guests share. Pages of two domains never meet (I6).

pub(crate) mod chunk;
pub(crate) mod copies;
pub(crate) mod frames;
pub(crate) mod handover;
pub(crate) mod index;
pub(crate) mod lifelines;
pub(crate) mod pages;
pub(crate) mod patterns;
pub(crate) mod placement;
pub(crate) mod refs;
pub(crate) mod slots;
pub(crate) mod sparse;
pub(crate) mod store;
pub(crate) mod worn;

use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use sys::process::thread_time;

use crate::domain::chunk::Chunks;
use crate::domain::frames::Frames;
use crate::domain::handover::Handover;
use crate::domain::index::Index;
use crate::domain::lifelines::Epoch;
use crate::domain::patterns::Patterns;
use crate::domain::placement::Placement;
use crate::domain::slots::Slots;
use crate::domain::store::Store;
use crate::page::{Entry, Slot, StoreId};
use crate::sync::{FORMER, Ordered, lock};
use crate::users::User;
use crate::users::lines::Troubles;

/// A run takes microseconds to punch, and the kernel looks at each mapping of the store for it. When it took a CPU so
/// long, a guest has mapped the store some ten thousand times, and the next run would take as long: others do not wait for that.
const SLOW_PUNCH: Duration = Duration::from_millis(5);

fn pages_of(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// The index and the store of a node.
pub(crate) struct PerNode {
    /// Of the pages of the node; of all pages, in the first, while merging crosses nodes.
    pub(crate) index: Index,
    pub(crate) store: Box<dyn Store>,
}

/// Indexes, stores and tables that the guests of one domain share.
pub(crate) struct Domain {
    pub(crate) name: String,
    /// The user whose guest was the first here.
    owner: OnceLock<Arc<User>>,
    /// By store.
    pub(crate) nodes: Vec<PerNode>,
    pub(crate) slots: Slots,
    pub(crate) chunks: Chunks,
    pub(crate) patterns: Patterns,
    /// Where canonical pages really are.
    pub(crate) frames: Frames,
    /// What former engines left here.
    pub(crate) former: Ordered<Epoch, FORMER>,
    /// Whether pages were ever claimed. They are as they were merged: the rules may have changed while their guest was
    /// away, and others may have come to share their slots.
    pub(crate) has_claims: AtomicBool,
    /// Dead slots whose frames the kernel did not take back yet.
    unpunched: Mutex<Vec<Range<u64>>>,
    /// What fails here for want of memory.
    pub(crate) troubles: Troubles,
    /// What this engine leaves to the next.
    pub(crate) handover: Handover,
}

impl Domain {
    /// An empty domain with the stores of `placement`, each of which `make` gives.
    pub(crate) fn new(
        name: &str,
        placement: Placement,
        handover: Handover,
        mut make: impl FnMut(StoreId) -> PerNode,
    ) -> Self {
        let nodes = placement.stores().map(|(store, _)| make(store));
        Self {
            name: name.to_owned(),
            owner: OnceLock::new(),
            nodes: nodes.collect(),
            slots: Slots::new(placement),
            chunks: Chunks::default(),
            patterns: Patterns::default(),
            frames: Frames::default(),
            former: Ordered::default(),
            has_claims: AtomicBool::new(false),
            unpunched: Mutex::default(),
            troubles: Troubles::default(),
            handover,
        }
    }

    /// Notes that a guest of this user is there; the first one began the domain.
    pub(crate) fn note_guest_of(&self, user: &Arc<User>) {
        if self.own(user) {
            user.say(|| tracing::info!(domain = self.name, "a domain begins"));
            self.handover.own(user.uid);
        }
    }

    /// From now on it is this user's, and its slots count as his; false where it has an owner.
    pub(crate) fn own(&self, user: &Arc<User>) -> bool {
        let is_first = self.owner.set(Arc::clone(user)).is_ok();
        if is_first {
            self.slots.charge(&user.holdings);
            self.patterns.charge(&user.holdings);
        }
        is_first
    }

    /// Whether it is user `uid`'s.
    pub(crate) fn is_of(&self, uid: u32) -> bool {
        self.owner.get().is_some_and(|user| user.uid == uid)
    }

    /// How many more slots it may have while `free` are free for all domains.
    pub(crate) fn room(&self, free: u64) -> u64 {
        let his = self.owner.get().map_or(u64::MAX, |user| user.room(free));
        free.min(his)
    }

    fn node(&self, store: StoreId) -> &PerNode {
        let node = self.nodes.get(store.index());
        node.unwrap_or_else(|| panic!("domain {} has no store {}", self.name, store.0))
    }

    /// The index of the pages of a store's node.
    pub(crate) fn index(&self, store: StoreId) -> &Index {
        &self.node(store).index
    }

    /// A store.
    pub(crate) fn store(&self, store: StoreId) -> &dyn Store {
        &*self.node(store).store
    }

    /// Whether there is more than one node.
    pub(crate) fn has_nodes(&self) -> bool {
        self.nodes.len() > 1
    }

    /// The numbers of all stores.
    pub(crate) fn stores(&self) -> impl Iterator<Item = StoreId> {
        (0..).map(StoreId).take(self.nodes.len())
    }

    /// Ends the refs of former engines when all their ties are free.
    pub(crate) fn settle_former(&self) {
        let mut former = lock(&self.former);
        for number in former.take_free() {
            self.handover.untie(number);
        }
        let mut settled = former.settle();
        if !settled.is_empty() {
            tracing::info!(
                domain = self.name,
                slots = settled.len(),
                "all guests of former engines are adopted or gone"
            );
        }
        // Not before they are dropped: `check` and `waits` look at both.
        self.drop_refs(&mut settled);
    }

    /// Whether refs of former engines keep a domain without guests.
    pub(crate) fn waits(&self) -> bool {
        !lock(&self.former).waiting().is_empty()
    }

    /// Drops a ref for each of `slots`; a slot without refs leaves the index and gives
    /// its frame back.
    pub(crate) fn drop_refs(&self, slots: &mut Vec<Slot>) {
        if slots.is_empty() {
            return;
        }
        let view = self.slots.view();
        let mut dead = Vec::new();
        slots.retain(|&slot| match view.unref(slot) {
            None => false,
            Some(key) => {
                dead.push((key, slot));
                // The rules may have changed since it was entered: see `switch`.
                for home in [slot.store(), StoreId::default()] {
                    if self.index(home).remove_if(key, Entry::Canonical(slot)) {
                        break;
                    }
                }
                true
            }
        });
        drop(view);
        if !dead.is_empty() {
            self.slots.chains.bury(dead.into_iter());
        }
        self.punch(slots);
        slots.clear();
    }

    /// Gives the frames of slots without refs back, and notes that their numbers are spent.
    pub(crate) fn punch(&self, dead: &mut [Slot]) {
        dead.sort_unstable();
        let runs = dead.chunk_by(|a, b| a.0 + 1 == b.0).filter_map(|run| {
            let &Slot(first) = run.first()?;
            Some(first..first + run.len() as u64)
        });
        let (left, error) = self.punch_runs(runs);
        if let Some(error) = error {
            self.troubles
                .say(|| tracing::warn!(%error, "the frames of dead slots are given back later"));
        }
        self.slots.hold(pages_of(&left));
        lock(&self.unpunched).extend(left);
        self.slots.bury(dead);
    }

    /// Tries again to give frames back.
    pub(crate) fn punch_again(&self) {
        let runs = std::mem::take(&mut *lock(&self.unpunched));
        let before = pages_of(&runs);
        let (left, error) = self.punch_runs(runs.into_iter());
        self.slots.let_go(before - pages_of(&left));
        if let Some(error) = error {
            let runs = left.len();
            tracing::debug!(%error, runs, "frames of dead slots are still held");
        }
        lock(&self.unpunched).extend(left);
    }

    /// Punches runs of neighbours up to the first that is slow. Gives what is left of them and what failed, for
    /// [`Self::punch_again`], and an error of these.
    fn punch_runs(
        &self,
        mut runs: impl Iterator<Item = Range<u64>>,
    ) -> (Vec<Range<u64>>, Option<std::io::Error>) {
        let (mut left, mut failed) = (Vec::new(), None);
        let mut begin = thread_time();
        for run in runs.by_ref() {
            let first = Slot(run.start);
            if let Err(error) = self.store(first.store()).punch(first, run.end - run.start) {
                failed = Some(error);
                left.push(run);
            }
            let end = thread_time();
            if end.saturating_sub(begin) > SLOW_PUNCH {
                break;
            }
            begin = end;
        }
        left.extend(runs);
        (left, failed)
    }

    /// Whether the frame of a dead slot waits to be given back.
    #[cfg(test)]
    pub(crate) fn is_unpunched(&self, slot: Slot) -> bool {
        lock(&self.unpunched)
            .iter()
            .any(|run| run.contains(&slot.0))
    }

    /// Bytes of memory the domain's tables hold, chunks aside.
    pub(crate) fn memory_bytes(&self) -> usize {
        let indexes = self.nodes.iter().map(|node| node.index.memory_bytes());
        let former = lock(&self.former).memory_bytes();
        let unpunched = lock(&self.unpunched).capacity() * size_of::<Range<u64>>();
        let tables = self.slots.memory_bytes() + self.chunks.memory_bytes() + unpunched;
        indexes.sum::<usize>() + tables + former + self.patterns.memory_bytes()
    }
}
