//! Rounds and workers.
//!
//! ```text
//!  driver    ──▶ look, look, look … ──▶ sort ──▶ chunk, chunk, chunk … ──▶ tidy, count, check
//!                 a job a guest                   a job a chunk, in order: see [`Order`]
//!  workers       ════════════════════            ══════════════════════
//! ```
//!
//! Both halves of a round are jobs in one queue, so 10 000 guests keep all workers busy. No chunk of a guest is worked
//! before its look of the round is done, so a look has its guest to itself. The halves overlap for guests whose
//! agents answer late, and for users whose looks take longer than all others': no other guest waits for these.
//!
//! Pages that are most likely shared come first: a first visit of a chunk may leave pages for a whole visit, which
//! comes when all first ones are done.
//!
//! Between two rounds a *pass* does the same for some guests: those that a user wants merged now ([`now`](crate::run::now)), and
//! those that have just come ([`early`](crate::run::early)).
//!
//! A round that outlasts the period is cut: the next looks find the rest again. Where looks take
//! long for the period it is cut later ([`Timing`]): while there is work, little time goes to them. But one user's looks
//! lengthen no round of others: once only he has jobs left, and had more than they, the period is all he gets.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sys::pagemap::PageRun;
use wire::{PageBits, RunMode};

use crate::domain::Domain;
use crate::domain::chunk::Chunk;
use crate::guest::counters::Gone;
use crate::guest::rescue;
use crate::guest::{Guest, Newcomer, Standing};
use crate::merge::plan::{Buffers, Context, Plan};
use crate::merge::read::Hasher;
use crate::merge::request;
use crate::options::Limits;
use crate::run::cpu_limit::{Governor, Meter};
use crate::run::glances::Glances;
use crate::run::knobs::Knobs;
use crate::run::order::Order;
use crate::run::post::{Post, Watched};
use crate::run::queue::{Job, Queue, Visit};
use crate::run::waiting::{Timing, Waiting};
use crate::run::wishes::{Pass, Wishes};
use crate::scan::look::{self, Looked};
use crate::scan::relocation;
use crate::scan::terms::{Aim, Terms};
use crate::sync::{DOMAINS, GUESTS, Ordered, lock};
use crate::users::Users;

/// Runs of pages taken from one scan: 48 KiB.
const SCAN_RUNS: usize = 2048;

/// A round lasts at most so many periods, where its looks take long.
const MOST_PERIODS: u32 = 4;
/// The part of a period for which canonical pages are asked where they are.
const WALK_PART: u32 = 100;
/// The same for domains whose pages the kernel may have moved lately.
const DOUBT_PART: u32 = 10;
/// The longest walk of a round, whatever the period: the driver does nothing else meanwhile.
const LONGEST_WALK: Duration = Duration::from_millis(500);

/// Buffers of a worker.
pub(crate) struct Scratch {
    buffers: Buffers,
    runs: Vec<PageRun>,
    found: Vec<Arc<Chunk>>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self {
            buffers: Buffers::new(),
            runs: vec![PageRun::default(); SCAN_RUNS],
            found: Vec::new(),
        }
    }
}

/// Makes a domain of this name.
pub(crate) type NewDomain = Box<dyn Fn(&str) -> std::io::Result<Domain> + Send + Sync>;

/// Who runs the jobs of a round.
pub(crate) trait Crew {
    /// Returns when all looks are done that work waits for: see [`Waiting`]. Where one thread does all jobs, that is all of them.
    fn look(&self, core: &Core, timing: &Timing) {
        self.work(core, timing);
    }

    /// Returns when the queue is idle, and no answer can come any more; at the latest when `timing` says (jobs begun are
    /// finished).
    fn work(&self, core: &Core, timing: &Timing);
}

/// Everything the workers share.
pub(crate) struct Core {
    pub(crate) started: Instant,
    /// When the last round over all regions or early look began.
    pub(crate) last_look: Mutex<Option<Instant>>,
    pub(crate) knobs: Knobs,
    governor: Governor,
    /// Of the workers and the driver.
    pub(crate) meter: Meter,
    pub(crate) queue: Queue,
    pub(crate) guests: Ordered<Vec<Arc<Guest>>, GUESTS>,
    pub(crate) users: Arc<Users>,
    pub(crate) domains: Ordered<BTreeMap<String, Arc<Domain>>, DOMAINS>,
    pub(crate) hasher: Hasher,
    new_domain: NewDomain,
    /// Chunks with work that looks found; none while what is found is worked as it comes.
    found: Mutex<Option<Vec<Arc<Chunk>>>>,
    pub(crate) waiting: Waiting,
    next_guest: AtomicU64,
    /// Rounds begun, short ones included.
    rounds: AtomicU64,
    /// The number of the last sync: one a guest in each round, and in each pass.
    syncs: AtomicU64,
    pub(crate) wishes: Wishes,
    pub(crate) pass: Mutex<Option<Pass>>,
    pub(crate) glances: Glances,
    /// Rounds completed over all regions.
    pub(crate) full_scans: AtomicU64,
    /// Pages that the kernel had moved before this round.
    pages_moved: AtomicU64,
    /// Pages that got no slot because of the stores' limit.
    pub(crate) pages_over_limit: AtomicU64,
    pub(crate) gone: Mutex<Gone>,
}

impl Core {
    /// A core without guests.
    pub(crate) fn new(knobs: Knobs, limits: Limits, hasher: Hasher, new_domain: NewDomain) -> Self {
        Self {
            started: Instant::now(),
            last_look: Mutex::default(),
            users: Users::new(limits),
            knobs,
            governor: Governor::new(),
            meter: Meter::default(),
            queue: Queue::default(),
            guests: Ordered::default(),
            domains: Ordered::default(),
            hasher,
            new_domain,
            found: Mutex::new(Some(Vec::new())),
            waiting: Waiting::default(),
            next_guest: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            syncs: AtomicU64::new(0),
            wishes: Wishes::default(),
            pass: Mutex::default(),
            glances: Glances::default(),
            full_scans: AtomicU64::new(0),
            pages_moved: AtomicU64::new(0),
            pages_over_limit: AtomicU64::new(0),
            gone: Mutex::default(),
        }
    }

    /// The domain of this `name`, made if need be.
    ///
    /// # Errors
    /// When its store cannot be made.
    pub(crate) fn domain(&self, name: &str) -> std::io::Result<Arc<Domain>> {
        let mut domains = lock(&self.domains);
        if let Some(domain) = domains.get(name) {
            return Ok(Arc::clone(domain));
        }
        let domain = Arc::new((self.new_domain)(name)?);
        domain.slots.set_limit(self.knobs.rules().max_sharing);
        domains.insert(name.to_owned(), Arc::clone(&domain));
        Ok(domain)
    }

    /// Has the last session of process `pid`, which lives, let go of the process's userfaultfd, for a mapping takes one at a time.
    /// False while that session goes on.
    pub(crate) fn end_last_session(&self, pid: u32) -> bool {
        let its = self.guests_that(|guest| guest.pid == pid);
        let lives =
            |guest: &Arc<Guest>| guest.standing() == Standing::Served && !guest.memory.has_left();
        its.iter()
            .all(|guest| !lives(guest) && rescue::let_go(guest))
    }

    /// The guests of which this holds.
    pub(crate) fn guests_that(&self, holds: impl Fn(&Guest) -> bool) -> Vec<Arc<Guest>> {
        let guests = lock(&self.guests);
        guests
            .iter()
            .filter(|guest| holds(guest))
            .cloned()
            .collect()
    }

    /// The guest with this number, unless it is gone.
    pub(crate) fn guest(&self, number: u64) -> Option<Arc<Guest>> {
        let guests = lock(&self.guests);
        // They come and stay in the order of their numbers.
        let at = guests.partition_point(|guest| guest.number < number);
        guests
            .get(at)
            .filter(|guest| guest.number == number)
            .cloned()
    }

    /// Whose memory a job is about; none when that guest is gone.
    fn guest_of(&self, job: &Job) -> Option<Arc<Guest>> {
        match job {
            Job::Look(guest, _) => Some(Arc::clone(guest)),
            Job::Chunk(chunk, _) => self.guest(chunk.guest),
        }
    }

    /// Waits at most `wait` for answers; the guests that gave one are looked at again.
    pub(crate) fn take_answers(&self, wait: Duration) {
        self.queue.add(self.waiting.take_answers(wait));
    }

    /// Takes a newcomer in; user `principal` answers for it.
    pub(crate) fn admit(&self, principal: u32, newcomer: Newcomer) {
        let user = self.users.get(principal);
        let memory = Box::new(Watched(newcomer.memory));
        let newcomer = Newcomer { memory, ..newcomer };
        // Under the lock, for `guest` looks for it by its number.
        let mut guests = lock(&self.guests);
        let number = self.next_guest.fetch_add(1, Relaxed);
        let guest = Guest::new(number, user, newcomer);
        guests.push(Arc::new(guest));
    }

    /// A round. With `scan` unset guests are only heard, and merged pages are unmerged where they are to be.
    pub(crate) fn round(&self, crew: &dyn Crew, scan: bool) {
        if scan {
            self.note_look();
        }
        self.rounds.fetch_add(1, Relaxed);
        let aim = if scan { Aim::Round } else { Aim::Hear };
        let guests = lock(&self.guests).clone();
        let looks = guests.into_iter().map(|guest| (guest, aim)).collect();
        let (period, patience) = (self.knobs.period(), self.knobs.patience);
        // The caller that waits for unmerging asks after each round whether enough moves.
        let least = match scan {
            true => period.max(patience),
            false => patience,
        };
        let timing = Timing::new(patience, period, least, least * MOST_PERIODS);
        self.look_and_work(crew, looks, timing);
        if scan {
            self.walk_frames();
            self.full_scans.fetch_add(1, Relaxed);
        }
    }

    /// Notes that guests are looked at now; gives the moment.
    pub(crate) fn note_look(&self) -> Instant {
        *lock(&self.last_look).insert(Instant::now())
    }

    /// Looks at guests, and does what follows, as long as `timing` says.
    pub(crate) fn look_and_work(
        &self,
        crew: &dyn Crew,
        mut looks: Vec<(Arc<Guest>, Aim)>,
        mut timing: Timing,
    ) {
        self.knobs.look_at_supply();
        self.syncs.fetch_add(1, Relaxed);
        let guests: Vec<_> = looks.iter().map(|(guest, _)| Arc::clone(guest)).collect();
        let order = Order::new(&guests, self.knobs.values().threads);
        // Those first that a cut left out the last time.
        looks.sort_by_key(|(guest, _)| guest.is_looked_at());
        guests.iter().for_each(|guest| guest.begin_round());
        drop(guests); // one that ends in this round is to go with it
        self.queue.begin_round();
        let looks = looks.into_iter();
        self.queue
            .add(looks.map(|(guest, aim)| Job::Look(guest, aim)));
        crew.look(self, &timing);
        self.waiting.note_late();
        timing.end_looks();
        let mut found = lock(&self.found).take().unwrap_or_default();
        order.sort(&mut found);
        let work = found.len();
        self.queue.add(found.into_iter().map(first_visit));
        crew.work(self, &timing);
        self.waiting.give_up();
        *lock(&self.found) = Some(Vec::new());
        self.settle_former();
        self.tidy();
        tracing::debug!(chunks = work, took = ?timing.elapsed(), "a round is done");
    }

    fn note_found(&self, chunks: &mut Vec<Arc<Chunk>>) {
        match &mut *lock(&self.found) {
            Some(found) => found.append(chunks),
            None => self.queue.add(chunks.drain(..).map(first_visit)),
        }
    }

    /// Asks where canonical pages really are, for a part of the period. Where there are several domains, each round begins with
    /// another one.
    fn walk_frames(&self) {
        let bound = !self.knobs.rules().across_nodes;
        let mut domains: Vec<_> = lock(&self.domains).values().cloned().collect();
        let first = self.full_scans.load(Relaxed) % (domains.len() as u64).max(1);
        domains.rotate_left(usize::try_from(first).expect("a place in a list"));
        let begin = sys::process::thread_time();
        for domain in domains {
            let part = match domain.frames.is_in_doubt() {
                true => DOUBT_PART,
                false => WALK_PART,
            };
            let spent = sys::process::thread_time().saturating_sub(begin);
            let most = (self.knobs.period() / part).min(LONGEST_WALK);
            if let Some(left) = most.checked_sub(spent) {
                domain.walk_frames(bound, left);
            }
        }
    }

    /// Takes the kernel's count of pages that it has moved so far. Once it grows, canonical pages may be off their nodes.
    pub(crate) fn note_moved(&self, pages: u64) {
        if self.pages_moved.swap(pages, Relaxed) != pages {
            let domains = lock(&self.domains);
            domains
                .values()
                .for_each(|domain| domain.frames.note_moves());
        }
    }

    /// Forgets guests and domains of which nothing is left.
    pub(crate) fn tidy(&self) {
        self.wishes.forget_gone();
        lock(&self.guests).retain(|guest| {
            let gone = guest.is_gone();
            if gone {
                lock(&self.gone).add(&guest.counters);
            }
            !gone
        });
        lock(&self.domains).retain(|_, domain| {
            let stays = Arc::strong_count(domain) > 1 || domain.waits();
            if !stays {
                domain.handover.end();
            }
            stays
        });
        if self.users.tables_have_shrunk() {
            sys::process::give_memory_back();
        }
    }

    /// Whether there is a domain of this `name`.
    pub(crate) fn has_domain(&self, name: &str) -> bool {
        lock(&self.domains).contains_key(name)
    }

    fn settle_former(&self) {
        let domains: Vec<_> = lock(&self.domains).values().cloned().collect();
        for domain in domains {
            domain.settle_former();
            domain.punch_again();
        }
    }

    /// Between rounds: retires guests that have ended, settles what they left behind. Their memory may be slow, so
    /// this is done by workers, too.
    pub(crate) fn reap(&self, crew: &dyn Crew) {
        let ended =
            |guest: &Guest| guest.standing() == Standing::Condemned || guest.memory.has_left();
        let ended = self.guests_that(ended);
        if !ended.is_empty() {
            let looks = ended.into_iter().map(|guest| Job::Look(guest, Aim::Hear));
            self.queue.begin_round();
            self.queue.add(looks);
            let patience = self.knobs.patience;
            crew.work(
                self,
                &Timing::new(patience, Duration::ZERO, patience, patience),
            );
            self.waiting.give_up();
        }
        self.settle_former();
        self.tidy();
    }

    /// How long a worker is to wait before its next job, by the limit of CPU time.
    pub(crate) fn pause(&self) -> Duration {
        let knobs = self.knobs.values();
        let limit = match knobs.run {
            RunMode::Unmerge => 0,
            _ => knobs.cpu_limit,
        };
        self.governor.pause(limit, || {
            self.meter.count();
            self.used()
        })
    }

    /// CPU time that the host has paid for merging. What answers requests in this process is none of it.
    pub(crate) fn used(&self) -> Duration {
        let guests = lock(&self.guests);
        let agents: u64 = guests.iter().map(|guest| guest.counters.charged_ns()).sum();
        let gone = lock(&self.gone).charged_ns;
        self.meter.total() + Duration::from_nanos(agents.saturating_add(gone))
    }

    /// Does a job, for the worker at `post`.
    pub(crate) fn do_job(&self, job: Job, scratch: &mut Scratch, post: &Post) {
        // Found once: all workers meet at the list of guests.
        let guest = self.guest_of(&job);
        post.begin(&job, guest.clone());
        match job {
            Job::Look(guest, aim) => self.look(&guest, aim, scratch),
            Job::Chunk(chunk, visit) => self.work(guest, &chunk, visit, scratch, post),
        }
        self.meter.count();
    }

    fn look(&self, guest: &Arc<Guest>, aim: Aim, scratch: &mut Scratch) {
        let knobs = self.knobs.values();
        let terms = Terms {
            round: self.rounds.load(Relaxed),
            sync: self.syncs.load(Relaxed),
            knobs,
            patience: self.knobs.patience,
            aim,
            max_mappings: self.knobs.max_mappings,
            broken_rounds: self.knobs.broken_rounds(),
        };
        let Scratch { runs, found, .. } = scratch;
        match look::look(guest, terms, runs, found) {
            Looked::Done => {}
            Looked::Waits => self.waiting.add(guest, aim),
            Looked::GoesOn => self.queue.add([Job::Look(Arc::clone(guest), aim)]),
        }
        self.note_found(found);
    }

    fn work(
        &self,
        guest: Option<Arc<Guest>>,
        chunk: &Arc<Chunk>,
        visit: Visit,
        scratch: &mut Scratch,
        post: &Post,
    ) {
        chunk.start(visit.is_whole());
        let Some(guest) = guest.filter(|guest| guest.takes_jobs(self.knobs.patience)) else {
            return;
        };
        // Another worker is at it, and looks again at the end whether something came. Or it is stuck, and not waited for.
        let Some(change) = guest.change(chunk) else {
            return;
        };
        let before = change.memory_bytes();
        let mut knobs = self.knobs.values();
        if guest.leaves() {
            knobs.run = RunMode::Unmerge;
        }
        let max_mappings = self.knobs.max_mappings;
        let context = Context {
            hasher: &self.hasher,
            knobs,
            promote: &|chunk| self.queue.push(chunk),
            worth_splitting: self.knobs.worth_splitting(knobs.thp),
            max_mappings,
            may_map: request::may_map(&guest, max_mappings),
            over_limit: &self.pages_over_limit,
            patience: self.knobs.patience,
            insist: visit == Visit::Insisting || self.queue.is_empty(),
            step_aside: &|| post.step_aside(&self.queue),
        };
        let mut plan = Plan::new(&context, change, visit.is_whole());
        let (mut busy, mut waits) = (false, false);
        if knobs.run == RunMode::Run {
            (busy, waits) = self.merge(&mut plan, &mut scratch.buffers, post);
        } else {
            plan.change.withdraw_all();
            if knobs.run == RunMode::Unmerge {
                busy = plan.unmerge(plan.change.merged);
            }
        }
        guest.change_tables(before, plan.change.memory_bytes());
        drop(plan);
        guest.part();
        if post.is_abandoned() {
            return; // the next look finds what is left
        }
        let came = knobs.run == RunMode::Run && chunk.has_promoted();
        self.queue_again(chunk, busy, came, waits);
    }

    /// Queues a chunk with more work: the agent talked to another worker, or candidates were promoted, or pages wait for a whole
    /// visit.
    fn queue_again(&self, chunk: &Arc<Chunk>, busy: bool, came: bool, waits: bool) {
        if (busy || came) && chunk.enqueue(false) {
            let chunk = Arc::clone(chunk);
            match busy {
                true => self.queue.add([Job::Chunk(chunk, Visit::Insisting)]),
                false => self.queue.push(chunk),
            }
        }
        if waits && chunk.enqueue(true) {
            self.queue.add_later(Arc::clone(chunk));
        }
    }

    /// Reads, plans and merges pages of a chunk; tells whether another worker talks to the guest, and whether pages wait for a whole visit.
    fn merge(&self, plan: &mut Plan<'_>, buffers: &mut Buffers, post: &Post) -> (bool, bool) {
        let strays = match self.knobs.is_short() {
            true => PageBits::EMPTY, // there is no memory for copies: later
            false => relocation::strays(&plan.change, plan.context.knobs.merge_across_nodes),
        };
        let busy = plan.unmerge(strays);
        let waits = plan.make(buffers);
        let busy = busy || !post.is_abandoned() && plan.merge();
        (busy, waits)
    }
}

fn first_visit(chunk: Arc<Chunk>) -> Job {
    Job::Chunk(chunk, Visit::First)
}
