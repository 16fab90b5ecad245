//! Walk: a scan of the memory of a guest.
//!
//! ```text
//!   ranges ──▶ parts of blocks ──▶ runs of pages ──▶ chunks ──▶ work
//!         idle::blocks         Walk::scan      Walk::add  Observer::observe
//! ```
//!
//! Two kinds of memory are left out on the way: idle blocks ([`idle`]) and chunks that rest ([`worn`](crate::domain::worn)).

use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;
use std::vec;

use sys::pagemap::{Categories, PageRun};
use wire::RunMode;

use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::guest::idle::{self, Look};
use crate::guest::regions::{Offers, Scan};
use crate::page::{CHUNK, Class};
use crate::scan::offers::{peek, place};
use crate::scan::relocation::{Patrol, strays};
use crate::scan::terms::Terms;
use crate::scan::track::{self, Ages, Seen};
use crate::sync::lock;

/// Scans what is watched, for one turn at most; true when there is more of it.
pub(super) fn scan(
    guest: &Arc<Guest>,
    terms: Terms,
    runs: &mut [PageRun],
    found: &mut Vec<Arc<Chunk>>,
) -> std::io::Result<bool> {
    let (aim, deadline) = (terms.aim, terms.aim.deadline());
    let progress = aim.progress(guest);
    let from = progress.load(Relaxed);
    let begins = from == 0;
    if begins && aim.is_pass() && !guest.check_borrows() {
        return Ok(false);
    }
    let ages = terms.ages(guest, begins);
    guest.set_merges_again(ages.allowed);
    let mut observer = Observer {
        guest,
        terms,
        ages,
        patrol: Patrol::new(guest, terms.knobs.merge_across_nodes, begins),
        found,
        stirred: Vec::new(),
        unseen: Ok(()),
    };
    let next = observer.walk(from, deadline, runs)?;
    if !aim.is_pass() {
        observer.patrol.end(next.is_none());
    }
    observer.unseen?;
    progress.store(next.unwrap_or(0), Relaxed);
    if next.is_none() {
        guest.note_scan();
        if !aim.is_now() {
            guest.counters.end_scan();
        }
    }
    Ok(next.is_some())
}

/// Takes over what a scan shows of each chunk.
struct Observer<'a> {
    guest: &'a Guest,
    terms: Terms,
    ages: Ages,
    patrol: Patrol<'a>,
    /// The chunks with work.
    found: &'a mut Vec<Arc<Chunk>>,
    /// The addresses of chunks that are not as they were, or may not stay so.
    stirred: Vec<u64>,
    /// Whether a second look failed.
    unseen: std::io::Result<()>,
}

impl Observer<'_> {
    /// Scans from address `from` on, until the `deadline`; gives where the next scan goes on, if there is more.
    fn walk(
        &mut self,
        from: u64,
        deadline: Instant,
        runs: &mut [PageRun],
    ) -> std::io::Result<Option<u64>> {
        let (guest, mode, aim) = (self.guest, self.terms.knobs.run, self.terms.aim);
        let reach = aim.reach();
        let mut offers = lock(&guest.offers);
        let Scan { ranges, rest } = offers.scans(from);
        let regions = offers.regions() as u64;
        guest.counters.regions.store(regions, Relaxed);
        let worn = match mode {
            RunMode::Run if !aim.is_pass() => offers.worn(from),
            _ => Vec::new(),
        };
        let mut idle = lock(&guest.idle_blocks);
        let all = aim.is_now() || mode == RunMode::Unmerge;
        let mut walk = Walk {
            observer: self,
            offers: &mut offers,
            runs,
            look: idle.begin(all && from == 0),
            worn: worn.into_iter().peekable(),
            rested: 0,
            current: None,
            next: from.max(reach.start) / CHUNK * CHUNK,
        };
        let ranges = ranges
            .into_iter()
            .map(|range| range.start.max(reach.start)..range.end.min(reach.end));
        let next = walk.go(ranges.flat_map(idle::blocks), deadline)?.or(rest);
        let next = next.filter(|&next| next < reach.end);
        walk.finish(next.unwrap_or(reach.end));
        let Walk { observer, look, .. } = walk;
        look.end(&observer.stirred, from, next);
        Ok(next)
    }

    /// Takes over what was `seen` of a chunk, and notes the chunk if it has work.
    fn observe(&mut self, chunk: &Arc<Chunk>, mut seen: Seen) {
        let (guest, terms) = (self.guest, self.terms);
        let Some(mut change) = guest.change(chunk) else {
            return; // a worker is stuck with it
        };
        if track::needs_second_look(&change, &seen)
            && let Err(error) = peek(guest, chunk, |pages, told| {
                if told.has(Categories::FILE) {
                    seen.add_file(pages);
                }
            })
        {
            self.unseen = Err(error);
            return;
        }
        let worn = seen.worn(&change);
        let observed = track::observe(&mut change, &seen, self.ages);
        let mut waits = observed.waits;
        if terms.knobs.run == RunMode::Run && !terms.aim.is_pass() {
            waits |= self.patrol.check(&mut change);
            waits |= !strays(&change, terms.knobs.merge_across_nodes).is_empty();
        }
        let wanted = has_work(terms.knobs.run, chunk, &change, waits);
        if wanted && chunk.enqueue(false) {
            self.found.push(Arc::clone(chunk));
        }
        change.unread = seen.unread(&change);
        if !terms.aim.is_pass() {
            let merged = change.count(Class::Merged);
            chunk.worn.note(seen.count_present(), worn, merged);
        }
        if wanted || observed.stirs {
            self.stirred.push(chunk.address);
        }
    }
}

/// Whether a chunk has work in this mode, by whether pages of it wait.
fn has_work(mode: RunMode, chunk: &Chunk, pages: &Pages, waits: bool) -> bool {
    match mode {
        RunMode::Run => waits || chunk.has_promoted(),
        RunMode::Stop => waits && has_plans(pages),
        RunMode::Unmerge => waits && has_plans(pages) || pages.count(Class::Merged) > 0,
    }
}

/// The way of a scan through the memory, which leaves out idle blocks and chunks that rest. The runs of pages come in ascending order, and
/// become a look at each chunk.
struct Walk<'a, 'b> {
    observer: &'a mut Observer<'b>,
    offers: &'a mut Offers,
    runs: &'a mut [PageRun],
    look: Look<'a>,
    /// The chunks that rest, in ascending order.
    worn: Peekable<vec::IntoIter<Arc<Chunk>>>,
    /// Where the last of them that was left out ends.
    rested: u64,
    /// The chunk that the scan is at, and what it has shown of it.
    current: Option<(u64, Seen)>,
    /// Chunks below have been looked at.
    next: u64,
}

impl Walk<'_, '_> {
    /// Scans these parts of blocks; gives where it stopped for the `deadline`, which it does between blocks only.
    fn go(
        &mut self,
        parts: impl Iterator<Item = Range<u64>>,
        deadline: Instant,
    ) -> std::io::Result<Option<u64>> {
        for part in parts {
            if Instant::now() > deadline && self.look.begins_block(part.start) {
                return Ok(Some(part.start));
            }
            match self.look.leaves_out(part.start) {
                true => self.leave_out(&part),
                false => self.pass_worn(&part)?,
            }
        }
        Ok(None)
    }

    /// Scans a range, except for chunks that rest. It may be a part of a chunk only.
    fn pass_worn(&mut self, range: &Range<u64>) -> std::io::Result<()> {
        let mut from = range.start.max(self.rested);
        while let Some(chunk) = self.worn.next_if(|chunk| chunk.address < range.end) {
            let end = chunk.address + CHUNK;
            // Its block may have been left out.
            if end > from {
                self.scan(from..chunk.address)?;
                self.leave_out(&(chunk.address..end));
                chunk.worn.leave_out();
                (from, self.rested) = (end, end);
            }
        }
        self.scan(from..range.end)
    }

    fn scan(&mut self, range: Range<u64>) -> std::io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let memory = &self.observer.guest.memory;
            let (filled, next) = memory.scan(at..range.end, self.runs)?;
            for run in 0..filled {
                self.add(self.runs[run]);
            }
            if next <= at {
                break;
            }
            at = next;
        }
        Ok(())
    }

    /// Adds a run of pages.
    fn add(&mut self, run: PageRun) {
        assert!(
            run.start >= self.next,
            "a scan went back to {:x}",
            run.start
        );
        let mut at = run.start;
        while at < run.end {
            let chunk = at / CHUNK * CHUNK;
            if self.current.is_some_and(|(current, _)| current != chunk) {
                self.flush();
            }
            let end = run.end.min(chunk + CHUNK);
            let (_, seen) = self.current.get_or_insert((chunk, Seen::default()));
            seen.add(place(chunk, at), place(chunk, end), run.categories);
            at = end;
        }
    }

    /// Leaves `range` out; what is known of its chunks stays.
    fn leave_out(&mut self, range: &Range<u64>) {
        self.finish(range.start);
        self.next = self.next.max(range.end.next_multiple_of(CHUNK));
    }

    fn flush(&mut self) {
        if let Some((current, seen)) = self.current.take() {
            self.look_at_empty(current);
            if let Some(chunk) = self.offers.open(self.observer.guest, current) {
                self.observer.observe(&chunk, seen);
            }
            self.next = current + CHUNK;
        }
    }

    fn look_at_empty(&mut self, end: u64) {
        for (_, chunk) in self.offers.chunks.range(self.next..end.max(self.next)) {
            self.observer.observe(chunk, Seen::default());
        }
    }

    /// Looks at the chunks behind the last run, below address `end`.
    fn finish(&mut self, end: u64) {
        self.flush();
        self.look_at_empty(end / CHUNK * CHUNK);
    }
}

fn has_plans(pages: &Pages) -> bool {
    let mut busy = pages.busy.pages();
    busy.any(|page| pages.tag(page).is_planned())
}
