//! Lifelines: they tell when a ref of a slot may go. The refs are counted in [`refs`](super::refs).
//!
//! A ref stands for one guest page that may map the slot (I4). It is taken before the agent is
//! asked. Its end depends on the fate of the page:
//!
//! ```text
//!  planned, never asked                  ─▶ dropped at once: no mapping ever existed
//!  asked, and the agent refused          ─▶ dropped at once: likewise
//!  broken, discarded, asked in vain,     ─▶ release list of the guest's current lifeline epoch:
//!  guest or connection gone                 a fork child may have inherited the mapping
//! ```
//!
//! A lifeline is a page that the guest maps shared as long as its epoch lasts. Fork children
//! inherit it together with everything else that is mapped then. With the next sync after a release
//! the guest gets a new lifeline and unmaps the old one. As soon as no process maps the old one
//! (and all before it), no process is left that could have inherited a mapping whose ref was
//! released in its time. A connection that is merely lost is no evidence: the refs wait for the
//! lifelines.
//!
//! The tempting alternative, to follow fork with an agent in each child, fails. Some exec at
//! once, are made by clone without hooks, or lose their agent.

use std::collections::VecDeque;

use crate::page::Slot;

/// Tells whether a process is left that holds it.
pub(crate) trait Lifeline: Send {
    /// Whether no process holds it. Once free, free for good.
    fn is_free(&self) -> bool;

    /// What its holders have counted there: see [`wire::Tally`].
    fn discards(&self) -> u64;
}

/// How many lifelines a guest has at most: each is a descriptor. When long-lived children keep
/// old ones, releases gather in the current epoch instead.
const MAX_EPOCHS: usize = 8;

/// A line, and its number if a keeper holds it.
pub(crate) type Line = (Option<u64>, Box<dyn Lifeline>);

/// Refs that wait until no process holds any of some lines. For a guest that is one line at a time. What former engines
/// left in a domain is an epoch too: a ref of each slot, until all their ties are free.
#[derive(Default)]
pub(crate) struct Epoch {
    lines: Vec<Line>,
    released: Vec<Slot>,
}

impl Epoch {
    /// The refs of `released` end when all `lines` are free.
    pub(crate) fn new(lines: Vec<Line>, released: Vec<Slot>) -> Self {
        Self { lines, released }
    }

    fn begin(line: Box<dyn Lifeline>) -> Self {
        Self::new(vec![(None, line)], Vec::new())
    }

    /// Lets go of the lines that are free by now; gives the numbers of those that a keeper holds.
    pub(crate) fn take_free(&mut self) -> Vec<u64> {
        let free = self.lines.extract_if(.., |(_, line)| line.is_free());
        free.filter_map(|(number, _)| number).collect()
    }

    /// The slots whose refs may end now: all, or none while a line is held.
    pub(crate) fn settle(&mut self) -> Vec<Slot> {
        match self.lines.is_empty() {
            true => std::mem::take(&mut self.released),
            false => Vec::new(),
        }
    }

    /// The slots that wait.
    pub(crate) fn waiting(&self) -> &[Slot] {
        &self.released
    }

    /// Bytes of memory the epoch holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.released.capacity() * size_of::<Slot>() + self.lines.capacity() * size_of::<Line>()
    }
}

/// Lifeline epochs of a guest, oldest first. The last one is current.
pub(crate) struct Ledger {
    epochs: VecDeque<Epoch>,
    /// What the current line counted when the agent was asked last.
    heard: u64,
    /// The same of the line before it, on which a guest may count until it has the new one.
    heard_before: u64,
    /// The guest has counted there, and the line is gone.
    late: bool,
    /// The question under way, or the last one, was about discards.
    gives_back: bool,
}

impl Ledger {
    /// A ledger whose first epoch has the lifeline of the handshake.
    pub(crate) fn new(line: Box<dyn Lifeline>) -> Self {
        Self {
            epochs: VecDeque::from([Epoch::begin(line)]),
            heard: 0,
            heard_before: 0,
            late: false,
            gives_back: false,
        }
    }

    /// What the current line counts, or another one: the `age`-th before it.
    fn discards(&self, age: usize) -> Option<u64> {
        let epoch = self.epochs.iter().rev().nth(age)?;
        epoch.lines.first().map(|(_, line)| line.discards())
    }

    fn is_late(&self) -> bool {
        let count = self.discards(1);
        self.late || count.is_some_and(|count| count != self.heard_before)
    }

    /// Whether the guest has discarded merged pages, by its own word, since its agent was asked last.
    pub(crate) fn has_discards(&self) -> bool {
        self.discards(0).unwrap_or(0) != self.heard || self.is_late()
    }

    /// Whether a new lifeline would let go of what was discarded.
    pub(crate) fn gives_back(&self) -> bool {
        self.gives_back && self.wants_renewal()
    }

    /// The agent is asked what changed.
    ///
    /// Discards from here on may be told of in this answer or in the next one: they count as not heard.
    pub(crate) fn begin_sync(&mut self) {
        self.gives_back = self.has_discards();
        self.heard = self.discards(0).unwrap_or(0);
        self.heard_before = self.discards(1).unwrap_or(0);
        self.late = false;
    }

    /// Notes that the guest itself no longer maps `slots`.
    pub(crate) fn release(&mut self, slots: &mut Vec<Slot>) {
        // The last epoch stays while the guest has chunks: refs without one would never end.
        let current = self.epochs.back_mut();
        let current =
            current.unwrap_or_else(|| panic!("{} refs of a guest that is gone", slots.len()));
        current.released.append(slots);
    }

    /// Whether a new lifeline would let something go.
    pub(crate) fn wants_renewal(&self) -> bool {
        let current = self.epochs.back();
        self.epochs.len() < MAX_EPOCHS && current.is_some_and(|epoch| !epoch.released.is_empty())
    }

    /// Begins an epoch. The guest may map its lifeline from now on.
    pub(crate) fn renew(&mut self, line: Box<dyn Lifeline>) {
        self.epochs.push_back(Epoch::begin(line));
        self.heard_before = std::mem::take(&mut self.heard);
    }

    /// The slots whose refs may go: those of all ended epochs with no holder, oldest first. The
    /// current epoch ends only with its guest (`gone`): until then its lifeline may be on its way.
    pub(crate) fn settle(&mut self, gone: bool) -> Vec<Slot> {
        let keep = usize::from(!gone);
        self.late = self.is_late();
        let mut settled = Vec::new();
        if gone && self.epochs.iter().all(|epoch| epoch.released.is_empty()) {
            self.epochs.clear(); // no ref waits for a process
        }
        while self.epochs.len() > keep
            && let Some(oldest) = self.epochs.front_mut()
        {
            oldest.take_free();
            if !oldest.lines.is_empty() {
                break;
            }
            settled.append(&mut oldest.released);
            self.epochs.pop_front();
        }
        settled
    }

    /// Whether nothing waits any more.
    pub(crate) fn is_empty(&self) -> bool {
        self.epochs.is_empty()
    }

    /// The slots that wait.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Slot> + '_ {
        self.epochs
            .iter()
            .flat_map(|epoch| epoch.released.iter().copied())
    }

    /// Bytes of memory the ledger holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        let epochs = self.epochs.iter().map(Epoch::memory_bytes);
        epochs.sum::<usize>() + self.epochs.capacity() * size_of::<Epoch>()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;

    #[derive(Clone, Default)]
    struct Line(Arc<AtomicBool>, Arc<AtomicU64>);

    impl Line {
        fn cut(&self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl Lifeline for Line {
        fn is_free(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }

        fn discards(&self) -> u64 {
            self.1.load(Ordering::Relaxed)
        }
    }

    fn ledger(lines: &[Line]) -> Ledger {
        let mut ledger = Ledger::new(Box::new(lines[0].clone()));
        for (at, line) in (0..).zip(&lines[1..]) {
            ledger.release(&mut vec![Slot(at)]);
            assert!(ledger.wants_renewal());
            ledger.renew(Box::new(line.clone()));
        }
        ledger
    }

    #[test]
    fn a_ref_waits_for_its_lifeline_and_for_all_before_it() {
        let lines = [(); 3].map(|()| Line::default());
        let mut ledger = ledger(&lines);
        lines[1].cut();
        assert_eq!(
            ledger.settle(false),
            [],
            "a child of the first epoch may live"
        );
        lines[0].cut();
        assert_eq!(ledger.settle(false), [Slot(0), Slot(1)]);
        assert_eq!(ledger.waiting().count(), 0);
        assert!(!ledger.is_empty());
    }

    #[test]
    fn what_former_engines_left_waits_for_all_their_ties() {
        let lines = [(); 2].map(|()| Line::default());
        let ties = (7..).zip(&lines);
        let ties = ties.map(|(number, line)| (Some(number), Box::new(line.clone()) as _));
        let mut former = Epoch::new(ties.collect(), vec![Slot(1), Slot(2)]);
        lines[1].cut();
        assert_eq!((former.take_free(), former.settle()), (vec![8], vec![]));
        lines[0].cut();
        assert_eq!(former.take_free(), [7], "each is told once");
        assert_eq!(former.settle(), [Slot(1), Slot(2)]);
        assert!(former.waiting().is_empty());
    }

    #[test]
    fn the_current_lifeline_counts_only_when_its_guest_is_gone() {
        let lines = [(); 1].map(|()| Line::default());
        let mut ledger = ledger(&lines);
        ledger.release(&mut vec![Slot(5)]);
        lines[0].cut();
        assert_eq!(
            ledger.settle(false),
            [],
            "it may still be on its way to the guest"
        );
        assert_eq!(ledger.settle(true), [Slot(5)]);
        assert!(ledger.is_empty());
    }

    #[test]
    fn discards_are_heard_once_and_then_given_back() {
        let lines = [(); 2].map(|()| Line::default());
        let mut ledger = ledger(&lines[..1]);
        assert!(!ledger.has_discards());
        lines[0].1.store(1, Ordering::Relaxed);
        assert!(ledger.has_discards());
        ledger.begin_sync();
        assert!(
            !ledger.has_discards() && !ledger.gives_back(),
            "no evidence"
        );
        ledger.release(&mut vec![Slot(3)]);
        assert!(ledger.gives_back());
        ledger.begin_sync();
        ledger.renew(Box::new(lines[1].clone()));
        assert!(!ledger.has_discards() && !ledger.gives_back());
        // What is released without a discard waits for the next round.
        ledger.release(&mut vec![Slot(4)]);
        assert!(!ledger.gives_back());
    }

    #[test]
    fn a_discard_counted_on_the_line_before_is_heard_too() {
        let lines = [(); 2].map(|()| Line::default());
        let mut ledger = ledger(&lines[..1]);
        ledger.release(&mut vec![Slot(3)]);
        ledger.begin_sync();
        ledger.renew(Box::new(lines[1].clone()));
        // Before it has the new line.
        lines[0].1.store(1, Ordering::Relaxed);
        ledger.release(&mut vec![Slot(4)]);
        lines[0].cut();
        assert_eq!(ledger.settle(false), [Slot(3)]);
        assert!(ledger.has_discards(), "the line that told is gone");
        ledger.begin_sync();
        assert!(ledger.gives_back() && !ledger.has_discards());
    }

    #[test]
    fn children_that_stay_cannot_use_up_descriptors() {
        let lines = [(); MAX_EPOCHS].map(|()| Line::default());
        let mut ledger = ledger(&lines);
        ledger.release(&mut vec![Slot(9)]);
        assert!(!ledger.wants_renewal());
    }
}
