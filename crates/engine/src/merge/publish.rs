//! Publish: twins get slots.
//!
//! New slots are taken in the order of the pages, from one run of numbers, and written with one call a
//! batch *before* the index names them. So neighbours get neighbouring slots, and the same run of pages
//! in the next guest maps with one call. Where private pages are strewn between, numbers are left out
//! for them: see [`span`](crate::merge::span). Several workers may find the same candidate. The
//! exchange decides: the loser gives its slot up (the number is spent) and takes the winner's.

use std::sync::atomic::Ordering::Relaxed;

use numa::heap::HeapError;
use wire::KnobValues;

use crate::merge::plan::{Plan, Read, Twin};
use crate::merge::read::Batch;
use crate::page::{Entry, PAGE, Site, Slot, StoreId, Tag};

impl Plan<'_> {
    /// Gives twins slots, as many neighbours at once as the run of numbers allows.
    pub(super) fn publish(&mut self, batch: &Batch, twins: &[Twin]) {
        if !self.publishes {
            return self.put_down(twins);
        }
        for part in twins.chunk_by(|one, next| one.store == next.store) {
            let mut rest = part;
            while let Some(twin) = rest.first() {
                let room = self.room();
                self.change.guest.set_short_of_slots(room == 0);
                if room == 0 {
                    self.context
                        .over_limit
                        .fetch_add(rest.len() as u64, Relaxed);
                    self.skip(rest);
                    break;
                }
                let wanted = rest.get(..room).unwrap_or(rest);
                let slots = match self.take_slots(twin.store, wanted) {
                    Ok(slots) => slots,
                    Err(error) => {
                        let tell = || tracing::warn!(%error, "no slots for canonical pages");
                        self.domain().troubles.say(tell);
                        self.skip(rest);
                        break;
                    }
                };
                for run in slots.chunk_by(|one, next| one.0 + 1 == next.0) {
                    let (now, later) = rest.split_at(run.len());
                    if let Some(&first) = run.first() {
                        self.publish_run(batch, now, first);
                    }
                    rest = later;
                }
            }
        }
    }

    /// Notes twins that get no slot now, and the candidates of this chunk that they equal.
    fn put_down(&mut self, twins: &[Twin]) {
        for twin in twins {
            self.unpublished.insert(twin.read.page);
            if let Entry::Candidate(site) = twin.current
                && site.chunk == self.change.chunk.id
            {
                self.partners.insert(site.page.into());
            }
        }
    }

    /// How many more slots stores may have, and the domain's user.
    fn room(&self) -> usize {
        let taken = self.domain().slots.live_anywhere();
        let free = store_limit(&self.context.knobs).saturating_sub(taken);
        usize::try_from(self.domain().room(free)).unwrap_or(usize::MAX)
    }

    /// Takes slots of a store for twins, as many as the run of numbers has; those left out are spent.
    fn take_slots(&mut self, store: StoreId, twins: &[Twin]) -> Result<Vec<Slot>, HeapError> {
        let at = store.index();
        if self.runs.len() <= at {
            self.runs.resize(at + 1, 0..0);
        }
        let mut run = std::mem::take(&mut self.runs[at]);
        if run.is_empty() {
            run = self.domain().slots.take_run(store)?;
        }
        let before = run.start;
        let wanted = twins.iter().map(|twin| twin.read.page);
        let slots = self.layout.take(&self.change, wanted, &mut run);
        let mut taken = slots.iter().peekable();
        let left_out = |slot: &Slot| taken.next_if_eq(&slot).is_none();
        let spent: Vec<_> = (before..run.start).map(Slot).filter(left_out).collect();
        if !spent.is_empty() {
            self.domain().slots.bury(&spent);
        }
        self.runs[at] = run;
        Ok(slots)
    }

    fn publish_run(&mut self, batch: &Batch, twins: &[Twin], first: Slot) {
        let slots = || (first.0..).map(Slot);
        let bytes: Vec<_> = twins.iter().map(|twin| batch.page(twin.read.at)).collect();
        if let Err(error) = self.domain().store(first.store()).write(first, &bytes) {
            let tell = || tracing::warn!(%error, "the store cannot take canonical pages");
            self.domain().troubles.say(tell);
            // A part of them may be written.
            let mut spent: Vec<_> = slots().take(twins.len()).collect();
            self.domain().punch(&mut spent);
            return self.skip(twins);
        }
        let domain = self.domain();
        let view = domain.slots.view();
        for (twin, slot) in twins.iter().zip(slots()) {
            let Read {
                page, key, home, ..
            } = twin.read;
            view.publish(slot, key);
            let canonical = Entry::Canonical(slot);
            let index = domain.index(home);
            if index
                .compare_exchange(key, twin.current, canonical)
                .is_err()
            {
                self.change.effects.unref.push(slot);
                self.enter(&view, twin.read);
                continue;
            }
            view.set_named(slot);
            self.change.set_planned(page, slot);
            match twin.current {
                Entry::Candidate(site) => self.promote(site),
                Entry::Canonical(full) => {
                    let alive = |slot| view.is_alive(slot);
                    domain.slots.chains.add((home, key), full, slot, alive);
                }
            }
        }
    }

    /// Leaves twins that got no slot alone for a while.
    fn skip(&mut self, twins: &[Twin]) {
        let pages = twins.iter().map(|twin| twin.read.page);
        pages.for_each(|page| self.change.back_off(page, Tag::Skipped));
    }

    fn promote(&self, candidate: Site) {
        if candidate.chunk == self.change.chunk.id {
            self.change.chunk.promote(candidate.page); // looked up again at the end of this job
        // Where there is none any more it was withdrawn after its entry was found.
        } else if let Some(chunk) = self.domain().chunks.get(candidate.chunk) {
            chunk.promote(candidate.page);
            if chunk.enqueue(false) {
                (self.context.promote)(chunk);
            }
        }
    }
}

/// Slots that all stores together may have, by the knob. Workers look at it a batch each, so it may be exceeded by a batch a worker.
fn store_limit(knobs: &KnobValues) -> u64 {
    const MIB_PAGES: u64 = (1 << 20) / PAGE;
    match knobs.store_limit_mib {
        0 => u64::MAX,
        mib => mib.saturating_mul(MIB_PAGES),
    }
}
