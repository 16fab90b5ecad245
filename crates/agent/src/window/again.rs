//! Merging a page again: one that lies in a mapping of a store, private since the guest wrote it.
//!
//! MOVE takes pages out of anonymous memory only, so these are compared where they are:
//!
//! 1. The run is taken from the userfaultfd that tracks and given to the one that freezes. From
//!    here a thread that writes a page of it sleeps, and a thread that reads it goes on.
//! 2. Each page is compared with its canonical page, all 4096 bytes. No thread can change either (I1).
//! 3. Equal runs are replaced by a mapping of the store in one step; zeros by anonymous memory.
//! 4. The others thaw, everything is tracked again, and the sleepers wake.
//!
//! The dangers, and the answer to each, beyond those of [`window`](super):
//! - a write in flight in another thread or vCPU: write-protecting ends with a flush of their
//!   translations, so it came before, or faults;
//! - I/O into the page, which needs no translation. MOVE refuses pinned pages; here nothing would.
//!   A pin to write with is taken by a write fault, and a write fault shows in the page map. So a
//!   page written since the engine last looked stays as it is. And the engine asks only for pages not
//!   written for two periods, of guests without anything that holds pins that long (see
//!   `sys::pins`). There remains I/O that a process of this kind begins on a settled page in
//!   the microseconds between that look and the freeze.

use wire::PageBits;

use super::{Access, BATCH_PAGES, Errno, Guard, Item, Job, PAGE_BYTES, Source, Window};
use super::{Categories, PageOutcome, PageRun, Target, Watch};
use super::{adjacent, equal_run, left, mapping, now, page_at, set};
use crate::mappings::stores::is_store;

/// Pages frozen at a time. One of them that was written since leaves all as they are.
const MOST: usize = 64;
const _: () = assert!(MOST <= BATCH_PAGES);

impl Window {
    /// Merges stored pages, neighbours together.
    pub(super) fn merge_again(&mut self, guard: &mut Guard, job: &mut Job<'_>, items: &[Item]) {
        let mut at = 0;
        let odd = guard.table().get(job.chunk).is_none_or(|chunk| chunk.odd);
        while let Some(&(page, _)) = items.get(at) {
            let start = job.chunk + page * PAGE_BYTES;
            let mut run = 1;
            // What has attributes of its own would lose them.
            match self.stored_at(start).filter(|_| !odd) {
                None => set(job.outcomes, page, PageOutcome::Unsupported),
                Some((end, access)) => {
                    run = adjacent(items, at)
                        .min((end - start) / PAGE_BYTES)
                        .min(MOST);
                    job.access = access;
                    let items = items.get(at..at + run).unwrap_or_default();
                    self.merge_run(guard, job, items, start);
                }
            }
            at += run;
        }
    }

    /// Where the mapping of a store at `start` ends, and what it allows.
    fn stored_at(&self, start: usize) -> Option<(usize, Access)> {
        let vma = self.maps.find(start).ok().flatten()?;
        let access = if vma.write {
            Access::ReadWrite
        } else {
            Access::Read
        };
        let plain = is_store(&vma) && vma.read && !vma.execute;
        (plain && vma.start <= start).then_some((vma.end, access))
    }

    fn merge_run(&mut self, guard: &mut Guard, job: &mut Job<'_>, items: &[Item], start: usize) {
        let len = items.len() * PAGE_BYTES;
        let all = |job: &mut Job<'_>, outcome| {
            items
                .iter()
                .for_each(|item| set(job.outcomes, item.0, outcome));
        };
        let have = self.copies.fill(job.store, items);
        if self.note_written(job, items, start) || self.uffd.unregister(start, len).is_err() {
            return; // those not written are tried again
        }
        let began = now();
        match self
            .freezer
            .as_ref()
            .map(|freezer| freezer.freeze(start, len))
        {
            Some(Ok(())) => {
                self.replace_equal(guard, job, items, &have);
                self.thaw(job, items, start);
            }
            Some(Err(errno)) => {
                all(job, left(errno));
                self.thaw(job, items, start);
            }
            None => all(job, PageOutcome::Unsupported),
        }
        let _ = self.uffd.register(start, len, Watch::Track);
        if let Some(freezer) = &self.freezer {
            let _ = freezer.wake(start, len);
        }
        self.longest_ns = self.longest_ns.max(now().saturating_sub(began));
        self.show_zeros(job, items);
    }

    /// Whether a page of the run was written since the engine looked. Then none is merged now.
    fn note_written(&self, job: &mut Job<'_>, items: &[Item], start: usize) -> bool {
        let mut runs = [PageRun::default(); BATCH_PAGES];
        let range = start as u64..(start + items.len() * PAGE_BYTES) as u64;
        let seen = self.pagemap.glance(range, &mut runs).map(|seen| seen.0);
        let written = |at: usize| {
            let address = (start + at * PAGE_BYTES) as u64;
            let run = runs.iter().take(seen.unwrap_or(0));
            let mut run = run.filter(|run| run.start <= address && address < run.end);
            run.any(|run| run.categories.has(Categories::WRITTEN))
        };
        let any = seen.is_err() || (0..items.len()).any(written);
        for (at, item) in items.iter().enumerate().filter(|_| any) {
            let outcome = if written(at) {
                PageOutcome::Differs
            } else {
                PageOutcome::Again
            };
            set(job.outcomes, item.0, outcome);
        }
        any
    }

    fn replace_equal(
        &self,
        guard: &mut Guard,
        job: &mut Job<'_>,
        items: &[Item],
        have: &[bool; BATCH_PAGES],
    ) {
        let mut equal = [false; BATCH_PAGES];
        for (at, (equal, item)) in equal.iter_mut().zip(items).enumerate() {
            // SAFETY: the page is mapped from a store and frozen: no thread writes it.
            let page = unsafe { page_at(job.chunk + item.0 * PAGE_BYTES) };
            *equal = have.get(at) == Some(&true) && self.copies.equal(page, at, item.1);
        }
        let mut at = 0;
        while let Some(&(page, target)) = items.get(at) {
            if equal.get(at) != Some(&true) {
                set(job.outcomes, page, PageOutcome::Differs);
                at += 1;
                continue;
            }
            let run = equal_run(items, &equal, at);
            let outcome = replace(guard, job, (page, target), run);
            (page..page + run).for_each(|page| set(job.outcomes, page, outcome));
            at += run;
        }
    }

    /// Lets the pages that were not replaced be written again.
    fn thaw(&mut self, job: &Job<'_>, items: &[Item], start: usize) {
        let Some(freezer) = &self.freezer else {
            return;
        };
        let stays = |at: usize| {
            let page = items.get(at).map_or(0, |item| item.0);
            let outcome = job.outcomes.get(page);
            !matches!(outcome, Some(PageOutcome::Merged | PageOutcome::Zeroed))
        };
        let mut at = 0;
        while at < items.len() {
            let end = (at..items.len()).find(|&next| stays(next) != stays(at));
            let end = end.unwrap_or(items.len());
            if stays(at) {
                let (start, len) = (start + at * PAGE_BYTES, (end - at) * PAGE_BYTES);
                if freezer.thaw(start, len).is_err() {
                    self.held.remember(start, len, true);
                }
            }
            at = end;
        }
    }

    /// Zeros are anonymous and absent now; they are made to show as the kernel's zero page.
    fn show_zeros(&self, job: &Job<'_>, items: &[Item]) {
        for &(page, _) in items {
            if job.outcomes.get(page) == Some(&PageOutcome::Zeroed) {
                // SAFETY: the page is empty and reads as zeros; a guest that was faster has its own.
                let _ = unsafe { self.uffd.zero(job.chunk + page * PAGE_BYTES, PAGE_BYTES) };
            }
        }
    }
}

/// Replaces `run` frozen pages from `first` on, which are equal to what comes.
fn replace(guard: &mut Guard, job: &mut Job<'_>, first: Item, run: usize) -> PageOutcome {
    let (page, target) = first;
    let (source, outcome) = match target {
        Target::Slot(slot) => {
            let offset = slot * PAGE_BYTES as u64;
            (Source::Store(job.store, offset), PageOutcome::Merged)
        }
        _ => (Source::Anonymous, PageOutcome::Zeroed),
    };
    let (start, len) = (job.chunk + page * PAGE_BYTES, run * PAGE_BYTES);
    let (access, attributes) = (job.access, job.attributes);
    // SAFETY: the range is offered, frozen, and equal to what is mapped now; the lock keeps the
    // guest's calls out.
    let placed =
        unsafe { mapping::replace(start, len, source, access, attributes, job.lock_future) };
    if let Err((errno, false)) = placed {
        return match errno {
            Errno::NOMEM => PageOutcome::NoRoom,
            _ => PageOutcome::Again,
        };
    }
    super::keep_resident(start, len, attributes);
    if let Some(chunk) = guard
        .table()
        .get(job.chunk)
        .filter(|_| outcome == PageOutcome::Zeroed)
    {
        chunk.unstore(PageBits::of(page..page + run));
        guard.table().mark_dirty(job.chunk);
    }
    outcome
}
