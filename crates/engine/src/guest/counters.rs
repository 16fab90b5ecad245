//! The counters of a guest.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU64};

use wire::Recycled;

use crate::domain::pages::{KEPT, Pages, STORED, TALLIES, UNREAD};
use crate::page::{CLASSES, Class};

/// What is counted of a guest, readable at any time.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// The sums over its chunks.
    tallies: [AtomicI64; TALLIES],
    /// CPU time of the agent by its own word, in nanoseconds.
    pub(crate) cpu_ns: AtomicU64,
    /// Time the engine has waited for the agent's answers, in nanoseconds.
    pub(crate) talk_ns: AtomicU64,
    /// Memory of the agent, in bytes.
    pub(crate) agent_bytes: AtomicU64,
    /// The longest window, in nanoseconds.
    pub(crate) window_ns: AtomicU64,
    /// Mappings, as last counted.
    pub(crate) vmas: AtomicU64,
    /// Mappings when the guest was admitted.
    pub(crate) vmas_before: AtomicU64,
    /// The most mappings that questions since the last count can have added.
    pub(crate) vmas_added: AtomicU64,
    /// The same at the last look.
    pub(crate) vmas_seen: AtomicU64,
    /// Pages merged that had been merged and written before.
    pub(crate) merged_again: AtomicU64,
    /// Pages recycled, by way.
    discarded: AtomicU64,
    zeroed: AtomicU64,
    told: AtomicU64,
    /// Pages of which the guest told that their content no longer matters, and that no scan has found gone yet.
    told_lately: AtomicU64,
    /// Of these, what the guest told of since the last scan ended.
    told_since: AtomicU64,
    /// Contiguous ranges offered.
    pub(crate) regions: AtomicU64,
    /// Scans of all memory while something was offered.
    pub(crate) looks: AtomicU64,
    /// Scans in a row after which most merged pages were unread.
    pub(crate) unread_looks: AtomicU64,
    /// Bytes of the engine's memory spent on this guest.
    pub(crate) table_bytes: AtomicU64,
}

/// Merged pages, below which nothing is said of those that are not read: 16 MiB.
const LEAST_UNREAD: u64 = 4096;

/// Whether most of `merged` pages are `unread`, and that is worth a word.
pub(crate) fn is_most(unread: u64, merged: u64) -> bool {
    merged >= LEAST_UNREAD && unread >= merged.div_ceil(2)
}

impl Counters {
    fn tally(&self, at: usize) -> u64 {
        u64::try_from(self.tallies[at].load(Relaxed)).unwrap_or(0)
    }

    /// Pages of `class`.
    pub(crate) fn pages(&self, class: Class) -> u64 {
        self.tally(class as usize)
    }

    /// Pages that lie in mappings of a store, merged or written since.
    pub(crate) fn stored(&self) -> u64 {
        self.tally(STORED)
    }

    /// Merged pages that the guest had not read when its memory was last looked at.
    pub(crate) fn unread(&self) -> u64 {
        self.tally(UNREAD)
    }

    /// Chunks left alone because they are one huge page.
    pub(crate) fn huge_kept(&self) -> u64 {
        self.tally(KEPT)
    }

    /// The agent's CPU time that is shown, and that counts against the engine's limit: the time it tells, but no more than the
    /// time it was waited for. A hostile agent could else stop the work for all others (I8) by its word, and spoil the sum for good.
    pub(crate) fn charged_ns(&self) -> u64 {
        self.cpu_ns.load(Relaxed).min(self.talk_ns.load(Relaxed))
    }

    /// All classes, each read once: what is derived from one reading adds up (I9), also while
    /// workers move pages from class to class.
    pub(crate) fn classes(&self) -> [u64; CLASSES] {
        std::array::from_fn(|class| self.tally(class))
    }

    /// Notes that the guest told of `pages` pages that their content no longer matters.
    pub(crate) fn tell(&self, pages: u64) {
        for told in [&self.told_lately, &self.told_since] {
            let more = |before: u64| Some(before.saturating_add(pages));
            let _ = told.fetch_update(Relaxed, Relaxed, more);
        }
    }

    /// A scan of all memory has ended. What the guest told of before the last one, and no scan found gone, had no frames.
    pub(crate) fn end_scan(&self) {
        self.looks
            .fetch_add(u64::from(self.regions.load(Relaxed) > 0), Relaxed);
        match is_most(self.unread(), self.pages(Class::Merged)) {
            true => self.unread_looks.fetch_add(1, Relaxed),
            false => self.unread_looks.swap(0, Relaxed),
        };
        let new = self.told_since.swap(0, Relaxed);
        self.told_lately.fetch_min(new, Relaxed);
    }

    /// Of the pages that are gone as many as the guest told of went for that.
    fn count_recycled(&self, recycled: Recycled) {
        if recycled == Recycled::default() {
            return;
        }
        let less = |told: u64| Some(told.saturating_sub(recycled.discarded));
        let before = self.told_lately.fetch_update(Relaxed, Relaxed, less);
        let told = before.expect("always some").min(recycled.discarded);
        self.told.fetch_add(told, Relaxed);
        self.discarded.fetch_add(recycled.discarded - told, Relaxed);
        self.zeroed.fetch_add(recycled.zeroed, Relaxed);
    }

    /// The pages recycled so far: discarded, zeroed, told of.
    pub(crate) fn recycled(&self) -> Recycled {
        Recycled {
            discarded: self.discarded.load(Relaxed),
            zeroed: self.zeroed.load(Relaxed),
            told: self.told.load(Relaxed),
        }
    }

    /// Adds what changed in a chunk.
    pub(crate) fn count(&self, pages: &mut Pages) {
        for (tally, change) in self.tallies.iter().zip(pages.take_changes()) {
            if change != 0 {
                tally.fetch_add(change, Relaxed);
            }
        }
        self.count_recycled(pages.take_recycled());
    }
}

/// Sums over guests: kept of those that are gone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gone {
    /// CPU time of their agents, in nanoseconds, as far as they were waited for.
    pub(crate) charged_ns: u64,
    /// The longest window, in nanoseconds.
    pub(crate) window_ns: u64,
    /// Pages that they had merged again.
    pub(crate) merged_again: u64,
    pub(crate) recycled: Recycled,
}

impl Gone {
    /// Adds a guest.
    pub(crate) fn add(&mut self, its: &Counters) {
        self.charged_ns = self.charged_ns.saturating_add(its.charged_ns());
        self.window_ns = self.window_ns.max(its.window_ns.load(Relaxed));
        self.merged_again += its.merged_again.load(Relaxed);
        self.recycled = [self.recycled, its.recycled()].into_iter().sum();
    }
}
