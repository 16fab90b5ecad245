//! Spans: many short runs of merged pages mapped with one call, and the private pages between them.
//!
//! A run costs the guest two mappings and a call, however short it is. Where private pages are strewn between
//! merged ones, the engine gives slots at the distance of their pages, so one mapping of the store fits all of
//! them. The numbers between belong to no slot, and the private pages go into the mapping there:
//!
//! ```text
//!   guest     a  P  b  c  Q  d        P, Q are private, the others equal the slots
//!   store     A  -  B  C  -  D        - was never written
//!
//!   staging   a  P  b  c  Q  d        MOVE took all of them out
//!   aside     A  P  B  C  Q  D        the store, privately; P and Q copied in; no other thread knows the place
//!   guest     A  P  B  C  Q  D        mremap replaced what was there in one step
//! ```
//!
//! Why no byte is lost, beyond the reasons of [`window`](super):
//! - a private page was taken out like the others, so it is not pinned, and no thread writes it while
//!   it is copied;
//! - no thread ever finds a place of the store that was never written. Whatever has no page, would not move, or
//!   differs ends the span, and the mapping comes into place with all its private pages;
//! - whatever fails before it is in place leaves all pages in the staging area, from where they go back.
//!
//! From then on a private page is as one that was merged and written since: tracked, and merged where it lies
//! ([`again`](super::again)). It looks written at the next scan, so nothing that happened to it here is missed.
//!
//! The tempting alternative, to map the store in place and fill in the private pages, is wrong. A thread that
//! does not sleep yet would find a page missing, and the kernel would make it of zeros.
//!
//! All spans of a chunk are cut from one mapping made aside. So the kernel knows their private pages as of one
//! kind (one `anon_vma`), and joins the spans to one mapping again, whatever the batch.

use rustix::io::Result;
use wire::{CHUNK_PAGES, PageBits};

use super::{Access, BATCH_PAGES, Guard, Item, Job, PAGE_BYTES, PageOutcome, Source};
use super::{Target, Watch, Window, mapping, retry, set};

/// The rest of a chunk as a view of a store, at a place that no other thread knows.
pub(super) struct Aside {
    /// Where page 0 of the chunk would be.
    origin: usize,
    /// The slot at the first page.
    slot: u64,
    first: usize,
    access: Access,
    /// The pages that are still there.
    left: PageBits,
}

impl Aside {
    /// Whether it has the pages from `page` on, as views of the slots from `slot` on.
    fn has(&self, page: usize, slot: u64, access: Access) -> bool {
        let at = page.checked_sub(self.first);
        let fits = at.is_some_and(|at| self.slot + at as u64 == slot);
        fits && self.access == access && self.left.contains(page)
    }
}

/// A span: neighbours that a single mapping fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    len: usize,
    /// The number at its first page.
    slot: u64,
}

/// The span that begins at `at`, if there is one with a page to enclose. Private pages at its ends belong to it only where
/// the batch ends, and the span goes on in the next.
pub(super) fn find(
    items: &[Item],
    out: &[bool; BATCH_PAGES],
    equal: &[bool; BATCH_PAGES],
    at: usize,
) -> Option<Span> {
    let rest = items.get(at..)?;
    let &(first, target) = rest.first()?;
    if target == Target::Enclosed && at > 0 {
        return None;
    }
    let (mut len, mut end, mut slot) = (0, 0, None);
    for (n, &(page, target)) in rest.iter().enumerate() {
        let (out, equal) = (out.get(at + n), equal.get(at + n));
        if out != Some(&true) || page != first + n {
            break;
        }
        match target {
            Target::Enclosed => {}
            Target::Slot(here) if equal == Some(&true) => {
                let begins = here.checked_sub(n as u64);
                if begins.is_none() || slot.is_some() && slot != begins {
                    break;
                }
                (slot, end) = (begins, n + 1);
            }
            _ => break,
        }
        len = n + 1;
    }
    let len = if at + len == items.len() { len } else { end };
    let mut within = rest.iter().take(len);
    let slot = slot.filter(|_| within.any(|item| item.1 == Target::Enclosed))?;
    Some(Span { len, slot })
}

/// Unmaps what is left aside.
pub(super) fn close(job: &mut Job<'_>) {
    if let Some(aside) = job.aside.take() {
        for (first, pages) in aside.left.runs() {
            let start = aside.origin + first * PAGE_BYTES;
            // SAFETY: this part of the mapping made aside was not moved away, and no thread uses it.
            let _ = unsafe { mapping::unmap(start, pages * PAGE_BYTES) };
        }
    }
}

impl Window {
    /// Maps the store over a span of staged pages, with the private ones inside.
    pub(super) fn put_span(
        &mut self,
        guard: &mut Guard,
        job: &mut Job<'_>,
        items: &[Item],
        at: usize,
        span: Span,
    ) -> usize {
        let items = items.get(at..at + span.len).unwrap_or_default();
        let Some(&(first, _)) = items.first() else {
            return 1;
        };
        if self.place_span(job, items, at, span).is_ok() {
            if let Some(chunk) = guard.table().get(job.chunk) {
                items.iter().for_each(|item| chunk.store(item.0));
            }
            for &(page, target) in items {
                let outcome = match target {
                    Target::Enclosed => PageOutcome::Enclosed,
                    _ => PageOutcome::Merged,
                };
                set(job.outcomes, page, outcome);
            }
            return span.len;
        }
        close(job);
        let (start, len) = (job.chunk + first * PAGE_BYTES, span.len * PAGE_BYTES);
        self.mend(job, start, len);
        for (n, &(page, _)) in items.iter().enumerate() {
            set(job.outcomes, page, PageOutcome::NoRoom);
            self.put_back(job, at + n, page);
        }
        span.len
    }

    /// # Errors
    /// Whatever fails: then all pages of the span are staged as before, and their places may have to be
    /// mended.
    fn place_span(&self, job: &mut Job<'_>, items: &[Item], at: usize, span: Span) -> Result<()> {
        let Some(&(first, _)) = items.first() else {
            return Ok(());
        };
        let origin = self.open(job, first, span.slot)?;
        let mut n = 0;
        while n < items.len() {
            let enclosed = |item: &&Item| item.1 == Target::Enclosed;
            let run = items.iter().skip(n).take_while(enclosed).count();
            if run > 0 {
                let to = origin + (first + n) * PAGE_BYTES;
                let from = self.staging.place(at + n);
                // SAFETY: the pages are staged, and the mapping aside is ours and empty there.
                unsafe { self.uffd.copy_pages(to, from, run * PAGE_BYTES) }?;
            }
            n += run.max(1);
        }
        let (from, start) = (origin + first * PAGE_BYTES, job.chunk + first * PAGE_BYTES);
        // SAFETY: the range was offered and is empty: its pages are staged, and equal to what comes or
        // copied into it; the lock keeps the guest's calls out.
        unsafe { mapping::place(from, start, span.len * PAGE_BYTES) }?;
        if let Some(aside) = &mut job.aside {
            (first..first + span.len).for_each(|page| aside.left.remove(page));
        }
        super::keep_resident(start, span.len * PAGE_BYTES, job.attributes);
        Ok(())
    }

    /// Makes the mapping aside that views `slot` at page `first`; gives where page 0 would be.
    fn open(&self, job: &mut Job<'_>, first: usize, slot: u64) -> Result<usize> {
        let fits = |aside: &&Aside| aside.has(first, slot, job.access);
        if let Some(aside) = job.aside.as_ref().filter(fits) {
            return Ok(aside.origin);
        }
        close(job);
        let len = (CHUNK_PAGES - first) * PAGE_BYTES;
        let source = Source::Store(job.store, slot * PAGE_BYTES as u64);
        let locks = job.attributes.locked || job.lock_future;
        let at = mapping::aside(len, source, job.access, job.attributes, locks)?;
        let origin = at.wrapping_sub(first * PAGE_BYTES);
        let mut left = PageBits::EMPTY;
        (first..CHUNK_PAGES).for_each(|page| left.insert(page));
        job.aside = Some(Aside {
            origin,
            slot,
            first,
            access: job.access,
            left,
        });
        self.uffd.register(at, len, Watch::TrackAndHold)?;
        Ok(origin)
    }

    /// Maps a range anew that a span that failed left without a mapping, so that its pages can go back.
    fn mend(&self, job: &Job<'_>, start: usize, len: usize) {
        let locks = job.attributes.locked || job.lock_future;
        let mended = mapping::mend(start, len, Source::Anonymous, job.attributes, locks);
        if mended.is_ok() {
            let _ = retry(|| self.uffd.register(start, len, Watch::TrackAndHold));
            // SAFETY: nothing was there; who comes to the pages now sleeps.
            let _ = unsafe { mapping::protect(start, len, job.access) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YES: [bool; BATCH_PAGES] = [true; BATCH_PAGES];

    fn items(first: usize, targets: &str) -> Vec<Item> {
        let target = |(n, kind)| match kind {
            'a' => Target::Slot(100 + n as u64),
            'b' => Target::Slot(700 + n as u64),
            '0' => Target::Zeros,
            _ => Target::Enclosed,
        };
        let targets = targets.chars().enumerate().map(target);
        (first..).zip(targets).collect()
    }

    fn len(targets: &str, at: usize) -> Option<usize> {
        find(&items(7, targets), &YES, &YES, at).map(|span| span.len)
    }

    #[test]
    fn a_span_has_slots_at_the_distance_of_their_pages() {
        assert_eq!(len("a.a..aa", 0), Some(7));
        assert_eq!(len("aaaa", 0), None, "nothing to enclose");
        assert_eq!(len("....", 0), None, "nothing to merge");
        assert_eq!(len("a.ab.b", 0), Some(3), "other slots");
        assert_eq!(len("a.ab.b", 3), Some(3));
        assert_eq!(
            len("a.a.b", 0),
            Some(3),
            "what lies before others stays out"
        );
        assert_eq!(len("a.a.b", 3), None);
        assert_eq!(len("a.a0a", 0), Some(3));
        assert_eq!(len("..a.", 0), Some(4), "the span goes on in other batches");
        let span = find(&items(7, "..a."), &YES, &YES, 0).unwrap();
        assert_eq!(span.slot, 100, "the number at the first page");
    }

    #[test]
    fn what_differs_or_stayed_ends_a_span() {
        let all = items(7, "a.a.aa.a");
        let but = |page: usize| {
            let mut but = YES;
            but[page] = false;
            but
        };
        let len = |out: &[bool; BATCH_PAGES], equal: &[bool; BATCH_PAGES], at| {
            find(&all, out, equal, at).map(|span| span.len)
        };
        assert_eq!(
            len(&but(4), &YES, 0),
            Some(3),
            "the last private page goes back"
        );
        assert_eq!(len(&YES, &but(4), 0), Some(3));
        assert_eq!(len(&YES, &but(4), 5), Some(3));
        assert_eq!(len(&but(1), &YES, 0), None);
        assert_eq!(
            len(&YES, &but(1), 0),
            Some(8),
            "of a private page nothing is asked"
        );
    }
}
