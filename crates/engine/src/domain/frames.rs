//! Frames: the nodes that a domain's canonical pages really are on.
//!
//! A store tells the kernel its node. If that node is full, the kernel takes the frame from another one. It may move frames at
//! any time, without notice: migrate_pages(2), cpusets, NUMA balancing and memory that goes offline do so. So the kernel is asked:
//!
//! ```text
//!   before an agent is asked to map slots   of those slots, while merging stays inside nodes
//!   after each round                        of all slots in turn, for a hundredth of the period; for a tenth, until all were asked for, when
//!                                           the kernel's count of moved pages has grown and merging stays inside nodes
//! ```
//!
//! A slot whose frame is off its node is *astray* from then on, and stays so: while merging stays inside nodes no page wins a ref of it
//! any more ([`View::try_ref`](super::refs::View::try_ref)). A worker that looks its content up finds the entry dead, and its
//! twin publishes the content anew. Pages that map it get private copies, settle, and are merged where they are by then (I6).
//!
//! The tempting alternative is KSM's: to enter the slot in the index of the node where it is now. But that slot is in a store that
//! brings it back from swap to the old node, and its sharers on that node would go on sharing across nodes.
//!
//! The kernel tells the node of mapped pages only, and to map a hole fills it. So only a caller that has a ref of a slot asks
//! for it, and the slot is not punched meanwhile (I5). The next walk finds the frames that the kernel moves between question
//! and merge.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use sys::process::thread_time;

use crate::domain::Domain;
use crate::domain::refs::SEGMENT;
#[cfg(any(test, debug_assertions))]
use crate::domain::refs::View;
use crate::page::Slot;
use crate::sync::lock;

/// Frames of canonical pages that a walk found on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) pages: u64,
    /// Those of them that belong to the store of another node.
    pub(crate) astray: u64,
}

type ByNode = BTreeMap<u32, Found>;

/// A walk over all slots, in parts.
#[derive(Debug, Default)]
struct Walk {
    /// Segments that are left, the next one last.
    rest: Vec<u64>,
    found: ByNode,
    /// The kernel did not tell of all.
    failed: bool,
    /// Ends of walks until all slots were asked for since the kernel moved pages.
    owed: u8,
}

/// What is known of the frames of a domain.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    walk: Mutex<Walk>,
    /// As the last whole walk found it.
    shown: Mutex<ByNode>,
    /// Slots that a check found off their nodes and not known as astray, with the walks completed by then.
    #[cfg(any(test, debug_assertions))]
    suspects: Mutex<(u64, BTreeMap<Slot, u64>)>,
}

impl Frames {
    /// Frames by the kernel's nodes, as the last whole walk found them.
    pub(crate) fn by_node(&self) -> BTreeMap<u32, Found> {
        lock(&self.shown).clone()
    }

    /// The kernel has moved pages: a walk under way may have passed them, so it takes another one.
    pub(crate) fn note_moves(&self) {
        let mut walk = lock(&self.walk);
        walk.owed = if walk.rest.is_empty() { 1 } else { 2 };
    }

    /// Whether pages were moved since the slots were asked for.
    pub(crate) fn is_in_doubt(&self) -> bool {
        lock(&self.walk).owed > 0
    }
}

impl Domain {
    /// Asks for the nodes of slots, ascending, that the caller has refs of; calls `each` with those that have a frame, its node, and
    /// that of the store.
    ///
    /// # Errors
    /// What the kernel gives.
    fn ask_frames(
        &self,
        slots: &[Slot],
        mut each: impl FnMut(Slot, u32, u32),
    ) -> std::io::Result<()> {
        for part in slots.chunk_by(|a, b| a.store() == b.store()) {
            let Some(store) = part.first().map(|slot| self.store(slot.store())) else {
                continue;
            };
            let Some(own) = store.node() else { continue };
            for (&slot, node) in part.iter().zip(store.nodes(part)?) {
                if let Some(node) = node {
                    each(slot, node, own);
                }
            }
        }
        Ok(())
    }

    /// Which of these slots, of which the caller has refs, are off their nodes; they are astray from now on.
    ///
    /// # Errors
    /// What the kernel gives.
    pub(crate) fn find_astray(&self, slots: &mut Vec<Slot>) -> std::io::Result<Vec<Slot>> {
        slots.sort_unstable();
        slots.dedup();
        let mut off = Vec::new();
        self.ask_frames(slots, |slot, node, own| {
            if node != own {
                off.push(slot);
            }
        })?;
        let view = self.slots.view();
        off.iter().for_each(|&slot| view.set_astray(slot));
        Ok(off)
    }

    /// Goes on with the walk over all slots, for about `time` of this thread's; at least one segment. While merging is `bound` to
    /// nodes, slots that are off theirs are astray from now on. True when it came to the end.
    pub(crate) fn walk_frames(&self, bound: bool, time: Duration) -> bool {
        if !self.has_nodes() {
            return true;
        }
        let begin = thread_time();
        let mut walk = lock(&self.frames.walk);
        if walk.rest.is_empty() {
            let mut rest: Vec<_> = self.slots.segments.read().keys().copied().collect();
            rest.sort_unstable_by(|a, b| b.cmp(a));
            walk.rest = rest;
        }
        while let Some(number) = walk.rest.pop() {
            if let Err(error) = self.walk_segment(number, bound, &mut walk.found) {
                walk.failed = true;
                tracing::debug!(%error, domain = self.name, "canonical pages cannot be asked for their nodes");
            }
            if thread_time().saturating_sub(begin) > time {
                break;
            }
        }
        let ends = walk.rest.is_empty();
        if ends {
            let owed = walk.owed.saturating_sub(1);
            let next = Walk {
                owed,
                ..Walk::default()
            };
            let Walk { found, failed, .. } = std::mem::replace(&mut *walk, next);
            drop(walk);
            if !failed {
                *lock(&self.frames.shown) = found;
                #[cfg(any(test, debug_assertions))]
                {
                    lock(&self.frames.suspects).0 += 1;
                }
            }
        }
        ends
    }

    fn walk_segment(
        &self,
        number: u64,
        bound: bool,
        found: &mut BTreeMap<u32, Found>,
    ) -> std::io::Result<()> {
        let slots = (number * SEGMENT..(number + 1) * SEGMENT).map(Slot);
        let view = self.slots.view();
        let mut held: Vec<_> = slots.filter(|&slot| view.claim(slot)).collect();
        drop(view);
        let mut off = Vec::new();
        let asked = self.ask_frames(&held, |slot, node, own| {
            let here = found.entry(node).or_default();
            here.pages += 1;
            if node != own {
                here.astray += 1;
                off.push(slot);
            }
        });
        if bound {
            let view = self.slots.view();
            off.iter().for_each(|&slot| view.set_astray(slot));
        }
        self.drop_refs(&mut held);
        asked
    }

    /// I6 on real frames: a slot that pages map, and whose frame is off its node, is known as astray once three walks have
    /// passed. The caller holds off all workers, and each of `slots` has a ref.
    ///
    /// # Panics
    /// When it is not.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn check_frames(&self, view: &View<'_>, slots: &mut [Slot]) {
        slots.sort_unstable();
        let mut off = Vec::new();
        let asked = self.ask_frames(slots, |slot, node, own| {
            if node != own {
                off.push((slot, node));
            }
        });
        if asked.is_err() {
            return; // a call that is made to fail tells nothing
        }
        let mut suspects = lock(&self.frames.suspects);
        let (walks, before) = (suspects.0, std::mem::take(&mut suspects.1));
        for (slot, node) in off.into_iter().filter(|&(slot, _)| !view.is_astray(slot)) {
            let since = before.get(&slot).copied().unwrap_or(walks);
            assert!(
                walks < since + 3,
                "I6: {slot} is on node {node}, and three walks did not see it"
            );
            suspects.1.insert(slot, since);
        }
    }
}
