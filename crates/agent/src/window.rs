//! The merge window: why no byte is ever lost (I1).
//!
//! For one chunk, in batches of at most [`BATCH_PAGES`]:
//!
//! ```text
//!   chunk (guest)          staging (agent)         store
//!   ┌──────────────┐ MOVE  ┌──────────────┐
//!   │ A  B  C  D   │──────▶│ A  B  C  D   │ compare  A  B  x  D
//!   │ .  .  .  .   │       └──────────────┘
//!   │ A' B' .  D'  │◀─────────────────────── mmap    equal: A B D
//!   │       C      │◀── MOVE ── C                    different: C goes back
//!   └──────────────┘ wake
//! ```
//!
//! 1. The runs to be merged are registered so that touching an absent page sleeps. Nothing else is.
//!    So no access to another page ever waits, and no fault is ever answered one by one.
//! 2. MOVE takes the pages out in one step each. From here no thread, vCPU or system call can see
//!    or write them. Pages that the kernel will not move (pinned, shared by fork) stay as they are; those that it moved
//!    without saying so are moved back.
//! 3. Each page is compared with its canonical page, all 4096 bytes. Neither can change: the page is
//!    only here, and the canonical page is never written again (I2, I3). So a copy of it serves as well
//!    ([`copies`]).
//! 4. Equal runs are mapped from the store, zero pages become the kernel's, others move back.
//! 5. Pages that are not mapped from the store are registered for tracking alone again. The kernel only adds
//!    to a registration, so this takes unregistering, and these pages look written at the next
//!    scan; all of them are new to the engine anyway. The sleepers wake, the staging area is emptied.
//!
//! The dangers, and the answer to each:
//! - the guest's own munmap, mmap, mremap, madvise, mprotect over the chunk: wait for the lock, or are noted before ([`passing`]);
//! - fork: no window begins while libc forks, and a fork waits for the one under way (see
//!   [`lock`](crate::lock)); a child made past libc would miss the pages that are out: a documented limit;
//! - the engine's death: nothing here asks it anything;
//! - a system call that slips past the hooks and unmaps the chunk: MOVE and registration fail, and
//!   a failed page is given back or dropped with the mapping it belonged to.
//!
//! **Before Linux 6.18** MOVE may never return where a page is pinned that is a part of a huge page
//! ([`move_waits_for_pins`](sys::uffd::move_waits_for_pins)). Then a window would not end, and threads that touch its pages would
//! sleep. So there no page is moved while the kernel counts memory of the process as pinned for long. Other references end by
//! themselves, as direct I/O does. **The limits**: a buffer that is registered in the microseconds between that look and MOVE,
//! and a pipe that refers to the page (vmsplice) and is not read.
//!
//! Pages that lie in a store's mapping already are merged another way: see [`again`]. Pages that are to stay
//! private between others go through the same steps, but for the comparison: see [`span`].
//!
//! Code here touches only its own stack, the staging area, the table and the store: if a host
//! offers memory that libc's heap lies in, the window does not need that heap.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use sys::mapping::{self, Access, Attributes, Source};
use sys::pagemap::{Categories, PageRun, Pagemap};
use sys::pins::Count;
use sys::uffd::{Freezer, Uffd, Watch};
use sys::vma::{Maps, Vma};
use wire::{CHUNK_BYTES, CHUNK_PAGES, Merge, MergeOp, PAGE_BYTES, PageOutcome, Target};

mod again;
mod copies;
mod held;
mod items;
mod span;
pub(crate) mod staging;

use self::copies::Copies;
use self::held::Held;
use self::items::{BATCH_PAGES, Batch, Item, Items, adjacent, each_run, equal_run, pages};
use self::span::Aside;
use self::staging::Staging;
use crate::lock::Guard;
use crate::mappings::frames::read_in;
use crate::mappings::whole::Lent;
use crate::passing;

/// How often an operation that the kernel asks to repeat is repeated before the page is left.
const PATIENCE: usize = 16;

/// The outcome of each page of a chunk.
pub(crate) type Outcomes = [PageOutcome; CHUNK_PAGES];

/// What the window works with.
pub(crate) struct Window {
    uffd: Uffd,
    /// For pages that are merged again; without it they are not.
    freezer: Option<Freezer>,
    maps: Maps,
    pagemap: Pagemap,
    staging: Staging,
    copies: Copies,
    /// What is asked before pages move, where MOVE may wait for pins: nothing if that could not be opened.
    pinned: Option<Option<Count>>,
    /// Longest time pages were out, in nanoseconds.
    pub(crate) longest_ns: u64,
    /// What still makes others sleep, because it could not be let go.
    held: Held,
}

/// What the pages of one question have in common.
struct Job<'a> {
    chunk: usize,
    access: Access,
    attributes: Attributes,
    lock_future: bool,
    store: BorrowedFd<'a>,
    outcomes: &'a mut Outcomes,
    /// The mapping that spans are cut from.
    aside: Option<Aside>,
}

/// What is locked stays in memory, also when it is a store's now.
fn keep_resident(start: usize, len: usize, attributes: Attributes) {
    if attributes.locked {
        // Without memory for it the next access brings it in.
        let _ = read_in(start, len);
    }
}

/// Refuses pages over which a call is under way without the lock.
fn refuse_passing(job: &mut Job<'_>, items: &[Item]) {
    if passing::touch(job.chunk, job.chunk + CHUNK_BYTES) {
        for &(page, _) in items {
            let home = job.chunk + page * PAGE_BYTES;
            if passing::touch(home, home + PAGE_BYTES) {
                set(job.outcomes, page, PageOutcome::Again);
            }
        }
    }
}

impl Window {
    /// # Errors
    /// What userfaultfd, /proc and mmap give.
    pub(crate) fn new(uffd: Uffd, freezer: Option<Freezer>) -> rustix::io::Result<Self> {
        let (maps, pagemap) = (Maps::open()?, Pagemap::own()?);
        let staging = Staging::new(&uffd)?;
        Ok(Self {
            uffd,
            freezer,
            maps,
            pagemap,
            staging,
            copies: Copies::new()?,
            pinned: sys::uffd::move_waits_for_pins().then(|| Count::open().ok()),
            longest_ns: 0,
            held: Held::default(),
        })
    }

    /// The descriptor that tracks this process.
    pub(crate) fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// The list of this process's mappings.
    pub(crate) fn maps(&self) -> &Maps {
        &self.maps
    }

    /// What tracks this process, what freezes, and the list of its mappings.
    pub(crate) fn tools(&self) -> Lent<'_> {
        Lent {
            uffd: Some(&self.uffd),
            freezer: self.freezer.as_ref(),
            maps: Some(&self.maps),
        }
    }

    /// What freezes, for the time after this window; unless a range of the window's stays frozen, for only its end lets go of that.
    pub(crate) fn take_freezer(&mut self) -> Option<Freezer> {
        self.let_held_go();
        let holding = self.is_holding();
        self.freezer.take_if(|_| !holding)
    }

    /// The page with the journal of the pages that are out; the staging area is behind it.
    pub(crate) fn journal(&self) -> usize {
        self.staging.journal_at()
    }

    /// Gives back the memory that only a merge needs.
    pub(crate) fn rest(&mut self) {
        self.copies.rest();
    }

    /// Runs the window for one question.
    pub(crate) fn merge(
        &mut self,
        guard: &mut Guard,
        question: &Merge,
        store: BorrowedFd<'_>,
        lock_future: bool,
        outcomes: &mut Outcomes,
    ) {
        self.merge_pages(guard, question, store, lock_future, outcomes);
        // A page that was to stay private did, wherever it lies.
        let enclosed = |op: &&MergeOp| op.target == Target::Enclosed;
        for op in question.ops().iter().filter(enclosed) {
            for page in usize::from(op.first)..usize::from(op.first + op.pages) {
                if outcomes.get(page) != Some(&PageOutcome::Enclosed) {
                    set(outcomes, page, PageOutcome::NotAsked);
                }
            }
        }
    }

    fn merge_pages(
        &mut self,
        guard: &mut Guard,
        question: &Merge,
        store: BorrowedFd<'_>,
        lock_future: bool,
        outcomes: &mut Outcomes,
    ) {
        #[allow(clippy::cast_possible_truncation)] // the decoder bounds addresses
        let chunk = question.chunk as usize;
        let (offered, stored, attributes) = match guard.table().get(chunk) {
            Some(c) => (c.mergeable(), c.stored, c.attributes),
            None => {
                let gone = |(page, _)| set(outcomes, page, PageOutcome::Gone);
                return pages(question).for_each(gone);
            }
        };
        let mut job = Job {
            chunk,
            access: Access::ReadWrite,
            attributes,
            lock_future,
            store,
            outcomes,
            aside: None,
        };
        let mut batch = Batch::new();
        let mut again = Items::<CHUNK_PAGES>::new();
        // MOVE takes pages of one mapping.
        let (mut vma, mut end): (Option<Vma>, _) = (None, 0);
        for (page, target) in pages(question) {
            if !offered.contains(page) {
                set(job.outcomes, page, PageOutcome::Gone);
                continue;
            }
            if stored.contains(page) {
                if target != Target::Enclosed {
                    again.push((page, target));
                }
                continue;
            }
            let access = match self.access(&mut vma, chunk + page * PAGE_BYTES) {
                Ok(access) => access,
                Err(why) => {
                    set(job.outcomes, page, why);
                    continue;
                }
            };
            let its_end = vma.map_or(0, |vma| vma.end);
            if access != job.access || its_end != end || !batch.push((page, target)) {
                self.batch(guard, &mut job, batch.take());
                (job.access, end) = (access, its_end);
                batch.push((page, target));
            }
        }
        self.batch(guard, &mut job, batch.take());
        span::close(&mut job);
        self.merge_again(guard, &mut job, again.take());
    }

    /// What the mapping at `at` allows, if pages of it can be merged. `vma` is the mapping of the page before.
    ///
    /// # Errors
    /// The outcome of a page there.
    fn access(&mut self, vma: &mut Option<Vma>, at: usize) -> Result<Access, PageOutcome> {
        if vma.is_none_or(|vma| vma.end <= at) {
            *vma = self.maps.find(at).ok().flatten();
        }
        let vma = vma.filter(|vma| vma.start <= at).ok_or(PageOutcome::Gone)?;
        vma.mergeable().ok_or(PageOutcome::Unsupported)
    }

    /// Takes the batch's pages out, and puts something equal in their place.
    fn batch(&mut self, guard: &mut Guard, job: &mut Job<'_>, items: &[Item]) {
        // What is not armed is not even held, for that would register it.
        self.refuse_unarmed(job, items);
        refuse_passing(job, items);
        let mut armed = Items::<BATCH_PAGES>::new();
        let asked = items.iter().filter(|item| asked(job, item.0));
        for &item in asked {
            armed.push(item);
        }
        let items = armed.take();
        if items.is_empty() {
            return;
        }
        if self.may_wait_for_pins() {
            items
                .iter()
                .for_each(|item| set(job.outcomes, item.0, PageOutcome::Pinned));
            return;
        }
        let locked = job.attributes.locked || job.lock_future;
        if self.staging.prepare(job.access, locked).is_err() {
            items
                .iter()
                .for_each(|item| set(job.outcomes, item.0, PageOutcome::Again));
            return;
        }
        // Copied first: that can fail, and must not while pages are out.
        let have = self.copies.fill(job.store, items);
        let began = now();
        let mut out = [false; BATCH_PAGES];
        let homes = items.iter().map(|item| job.chunk + item.0 * PAGE_BYTES);
        self.staging.journal().note(homes);
        self.hold(job, items);
        self.refuse_unarmed(job, items);
        self.take_out(job, items, &mut out);
        let equal = self.compare(items, &out, &have);
        self.put_all(guard, job, items, &out, &equal);
        // Each page is back or replaced: should this thread end, there is nothing to bring back.
        self.staging.journal().clear();
        self.let_go(job, items);
        self.longest_ns = self.longest_ns.max(now().saturating_sub(began));
        // SAFETY: what is still staged was replaced by something equal.
        let _ = unsafe { self.staging.empty(items.len()) };
    }

    /// Which of the staged pages equal their canonical pages, as far as there are copies of these. Of a page that stays private nothing is asked.
    fn compare(
        &self,
        items: &[Item],
        out: &[bool; BATCH_PAGES],
        have: &[bool; BATCH_PAGES],
    ) -> [bool; BATCH_PAGES] {
        let mut equal = [false; BATCH_PAGES];
        for (at, item) in items.iter().enumerate() {
            if out.get(at) == Some(&true)
                && have.get(at) == Some(&true)
                && let Some(equal) = equal.get_mut(at)
            {
                // SAFETY: the page was moved to the staging area, which no other thread knows.
                let page = unsafe { page_at(self.staging.place(at)) };
                *equal = self.copies.equal(page, at, item.1);
            }
        }
        equal
    }

    /// Puts something equal in the place of each staged page, or the page back.
    fn put_all(
        &mut self,
        guard: &mut Guard,
        job: &mut Job<'_>,
        items: &[Item],
        out: &[bool; BATCH_PAGES],
        equal: &[bool; BATCH_PAGES],
    ) {
        let mut at = 0;
        while at < items.len() {
            let step = if out.get(at) != Some(&true) {
                1
            } else if let Some(span) = span::find(items, out, equal, at) {
                self.put_span(guard, job, items, at, span)
            } else if equal.get(at) == Some(&true) {
                let run = equal_run(items, equal, at);
                self.put_run(guard, job, items, at, run);
                run
            } else {
                if let Some(&(page, _)) = items.get(at) {
                    set(job.outcomes, page, PageOutcome::Differs);
                    self.put_back(job, at, page);
                }
                1
            };
            at += step;
        }
    }

    /// Whether a page that is pinned for long could keep a window from ending.
    fn may_wait_for_pins(&self) -> bool {
        let is_some = |count: &Option<Count>| count.as_ref().is_none_or(Count::is_some);
        self.pinned.as_ref().is_some_and(is_some)
    }

    /// From here, who touches an absent page of the items sleeps.
    fn hold(&self, job: &mut Job<'_>, items: &[Item]) {
        each_run(items, |at, run| {
            let Some(&(page, _)) = items.get(at) else {
                return;
            };
            let (start, len) = (job.chunk + page * PAGE_BYTES, run * PAGE_BYTES);
            if let Err(errno) = self.uffd.register(start, len, Watch::TrackAndHold) {
                (page..page + run).for_each(|page| set(job.outcomes, page, left(errno)));
            }
        });
    }

    /// Leaves pages as they are that were written since the engine looked, or never armed. So a mapping that came to
    /// the place unseen is not merged: it was not tracked, whatever the table says, and holding it armed nothing.
    /// Also what would be enclosed: I/O may refer to such a page since it was written, without a pin.
    fn refuse_unarmed(&self, job: &mut Job<'_>, items: &[Item]) {
        let (Some(&(first, _)), Some(&(last, _))) = (items.first(), items.last()) else {
            return;
        };
        let mut runs = [PageRun::default(); CHUNK_PAGES];
        let page = |page: usize| (job.chunk + page * PAGE_BYTES) as u64;
        let seen = self.pagemap.glance(page(first)..page(last + 1), &mut runs);
        let seen = seen.map_or(&runs[..0], |(seen, _)| runs.get(..seen).unwrap_or_default());
        let mut seen = seen.iter().peekable();
        for &(at, _) in items {
            while seen.next_if(|run| run.end <= page(at)).is_some() {}
            let run = seen.peek().filter(|run| run.start <= page(at));
            let armed = run.is_some_and(|run| !run.categories.has(Categories::WRITTEN));
            if !armed && asked(job, at) {
                let why = run.map_or(PageOutcome::Gone, |_| PageOutcome::Differs);
                set(job.outcomes, at, why);
            }
        }
    }

    /// The threads that slept go on; what is still the guest's own memory is tracked as before.
    fn let_go(&mut self, job: &Job<'_>, items: &[Item]) {
        let own = |page: usize| {
            let outcome = job.outcomes.get(page);
            !matches!(outcome, Some(PageOutcome::Merged | PageOutcome::Enclosed))
        };
        each_run(items, |at, run| {
            let Some(&(first, _)) = items.get(at) else {
                return;
            };
            let (mut page, end) = (first, first + run);
            while page < end {
                let next = (page..end)
                    .find(|&next| own(next) != own(page))
                    .unwrap_or(end);
                let (start, len) = (job.chunk + page * PAGE_BYTES, (next - page) * PAGE_BYTES);
                if own(page) && self.uffd.unregister(start, len).is_err() {
                    self.held.remember(start, len, false);
                } else {
                    // The new mappings are tracked too: a write to a merged page must be seen.
                    let _ = self.uffd.register(start, len, Watch::Track);
                }
                let _ = self.uffd.wake(start, len);
                page = next;
            }
        });
    }

    /// Moves the items' pages to the staging area, page `at` to place `at`. What is not `out` afterwards is at home.
    fn take_out(&mut self, job: &mut Job<'_>, items: &[Item], out: &mut [bool; BATCH_PAGES]) {
        let (mut at, mut tries) = (0, 0);
        while let Some(&(page, _)) = items.get(at) {
            if !asked(job, page) {
                at += 1; // could not be held, or was written
                continue;
            }
            let run = adjacent(items, at);
            let run = (0..run)
                .take_while(|n| items.get(at + n).is_some_and(|i| asked(job, i.0)))
                .count();
            let (from, to) = self.ways(job, at, page);
            // SAFETY: the pages are offered, the lock keeps the guest's calls out, the staging
            // area is empty there. Whatever moves is put back or replaced by its equal.
            let moved = unsafe { self.uffd.move_pages(to, from, run * PAGE_BYTES) };
            let done = moved.bytes / PAGE_BYTES;
            out.iter_mut()
                .skip(at)
                .take(done)
                .for_each(|out| *out = true);
            at += done;
            let Some(reason) = moved.stopped else {
                continue;
            };
            tries = if done > 0 { 1 } else { tries + 1 };
            if reason == Errno::AGAIN && tries < PATIENCE {
                continue;
            }
            if let Some(&(page, _)) = items.get(at) {
                set(job.outcomes, page, left(reason));
            }
            at += 1;
        }
        // More may have come than was told: see `sys::uffd::Moved`.
        for (at, &(page, _)) in items.iter().enumerate() {
            if out.get(at) != Some(&true) {
                let _ = self.bring_back(job, at, page);
            }
        }
    }

    /// Puts something equal where `run` staged pages were.
    fn put_run(
        &mut self,
        guard: &mut Guard,
        job: &mut Job<'_>,
        items: &[Item],
        at: usize,
        run: usize,
    ) {
        let Some(&(page, target)) = items.get(at) else {
            return;
        };
        let start = job.chunk + page * PAGE_BYTES;
        let Target::Slot(slot) = target else {
            return self.put_zeros(job, at, page, run);
        };
        let source = Source::Store(job.store, slot * PAGE_BYTES as u64);
        let len = run * PAGE_BYTES;
        let (access, attributes) = (job.access, job.attributes);
        // SAFETY: the range was offered, is empty (its pages are staged and equal to what is
        // mapped now), and the lock keeps the guest's calls out.
        let placed =
            unsafe { mapping::replace(start, len, source, access, attributes, job.lock_future) };
        if let Err((_, false)) = placed {
            for offset in 0..run {
                set(job.outcomes, page + offset, PageOutcome::NoRoom);
                self.put_back(job, at + offset, page + offset);
            }
            return;
        }
        // Replaced, though perhaps an attribute did not fit: the content is right and the store
        // is mapped, which is what must be known.
        keep_resident(start, len, attributes);
        if let Some(chunk) = guard.table().get(job.chunk) {
            (page..page + run).for_each(|page| chunk.store(page));
        }
        (page..page + run).for_each(|page| set(job.outcomes, page, PageOutcome::Merged));
    }

    /// Puts the kernel's zero page where `run` staged pages of zeros were. What it cannot put there goes back.
    fn put_zeros(&mut self, job: &mut Job<'_>, at: usize, page: usize, run: usize) {
        let (mut done, mut tries) = (0, 0);
        while done < run {
            let (home, len) = (
                job.chunk + (page + done) * PAGE_BYTES,
                (run - done) * PAGE_BYTES,
            );
            // SAFETY: the pages were moved out of here, and equal the zero page.
            let (bytes, zeroed) = unsafe { self.uffd.zero(home, len) };
            let filled = bytes / PAGE_BYTES;
            (page + done..page + done + filled)
                .for_each(|page| set(job.outcomes, page, PageOutcome::Zeroed));
            done += filled;
            tries = if filled > 0 { 0 } else { tries + 1 };
            if filled == 0 && (zeroed != Err(Errno::AGAIN) || tries >= PATIENCE) {
                set(job.outcomes, page + done, PageOutcome::Again);
                self.put_back(job, at + done, page + done);
                (done, tries) = (done + 1, 0);
            }
        }
    }

    /// Moves one staged page back where it was. This must not fail while the place exists.
    fn put_back(&mut self, job: &Job<'_>, at: usize, page: usize) {
        // The place was unmapped past the hooks: the page went with it. Or it is of another kind now; then a
        // copy may still fit.
        while self.bring_back(job, at, page).is_err() {
            let (home, here) = self.ways(job, at, page);
            // SAFETY: the staged page is readable; the place is the page's own.
            match unsafe { self.uffd.copy_page(home, here) } {
                Err(Errno::AGAIN | Errno::NOMEM) => rustix::thread::sched_yield(),
                _ => return,
            }
        }
    }

    /// Moves a page back where it was if it is staged.
    ///
    /// # Errors
    /// Its place takes no page that is moved.
    fn bring_back(&self, job: &Job<'_>, at: usize, page: usize) -> rustix::io::Result<()> {
        let (home, here) = self.ways(job, at, page);
        let mut tries = 0;
        loop {
            tries += 1;
            // SAFETY: what is staged here came from there, and each thread that wants it sleeps.
            match unsafe { self.uffd.move_pages(home, here, PAGE_BYTES) }.stopped {
                // It is not here, or it is there.
                None | Some(Errno::NOENT | Errno::EXIST) => return Ok(()),
                // No memory for a page table, or the page is looked at by the kernel (migration,
                // compaction): both pass. What KSM has merged does not: a program may have it merge all memory, this included, at any time.
                Some(Errno::BUSY) if tries % PATIENCE == 0 => self.staging.unshare(),
                Some(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => rustix::thread::sched_yield(),
                Some(reason) => return Err(reason),
            }
        }
    }

    /// The home of a page, and its place in the staging area.
    fn ways(&self, job: &Job<'_>, at: usize, page: usize) -> (usize, usize) {
        (job.chunk + page * PAGE_BYTES, self.staging.place(at))
    }
}

/// The outcomes of a question for which there is no window now.
pub(crate) fn put_off(question: &Merge, outcomes: &mut Outcomes) {
    let asked = pages(question).filter(|item| item.1 != Target::Enclosed);
    asked.for_each(|(page, _)| set(outcomes, page, PageOutcome::Again));
}

/// Whether nothing is known yet of what became of a page.
fn asked(job: &Job<'_>, page: usize) -> bool {
    job.outcomes.get(page) == Some(&PageOutcome::NotAsked)
}

fn set(outcomes: &mut Outcomes, page: usize, outcome: PageOutcome) {
    if let Some(place) = outcomes.get_mut(page) {
        *place = outcome;
    }
}

/// The page at an address.
///
/// # Safety
/// It is mapped, and no thread writes it while it is borrowed.
unsafe fn page_at<'a>(address: usize) -> &'a [u8; PAGE_BYTES] {
    // SAFETY: the caller's promise.
    unsafe { &*std::ptr::with_exposed_provenance(address) }
}

/// What it means that a page stayed.
fn left(reason: Errno) -> PageOutcome {
    match reason {
        Errno::BUSY => PageOutcome::Pinned,
        Errno::NOENT => PageOutcome::Gone,
        Errno::NOMEM => PageOutcome::NoRoom,
        // The staging area was empty: MOVE does not tell the truth.
        Errno::AGAIN | Errno::EXIST => PageOutcome::Again,
        _ => PageOutcome::Unsupported,
    }
}

fn retry(mut call: impl FnMut() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    let mut result = call();
    for _ in 0..PATIENCE {
        match result {
            Err(Errno::AGAIN) => result = call(),
            other => return other,
        }
    }
    result
}

fn now() -> u64 {
    u64::try_from(sys::clock::monotonic().as_nanos()).unwrap_or(u64::MAX)
}
