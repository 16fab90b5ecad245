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
//! agents answer late, and for users whose looks take longer than all others': nobody waits for these.
//!
//! What is most likely shared comes first: a first visit of a chunk may leave pages for a whole visit, which
//! comes when all first ones are done.
//!
//! A round that outlasts the period is cut: what is left is found again by the next looks. Where looks take
//! long for the period it is cut later, by [`LOOK_SHARE`]: while there is work, little time goes to them.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI8, AtomicU8, AtomicU16, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sys::pagemap::PageRun;
use sys::socket::Peer;
use wire::{CHUNK_PAGES, Pace, RunMode, Thp};

use crate::domain::chunk::Chunk;
use crate::domain::lifelines::Lifeline;
use crate::domain::{Effects, Realm};
use crate::guest::rescue;
use crate::guest::users::Users;
use crate::guest::{Guest, Link, Memory, Standing};
use crate::handover::manifest::Bequest;
use crate::merge::plan::{self, Context, Desk, Plan, Promotions};
use crate::merge::read::Hasher;
use crate::merge::request::{self, Asked, Manner};
use crate::options::Limits;
use crate::run::cpu_limit::Governor;
use crate::run::order::Order;
use crate::run::pace::{self, Supply};
use crate::run::post::Post;
use crate::run::queue::{Job, Queue, Visit};
use crate::run::waiting::{Looks, Waiting};
use crate::run::workers::Crew;
use crate::scan::claim::{self, Tie};
use crate::scan::look::{self, Looked, Terms};
use crate::scan::relocation::Rules;
use crate::scan::track::Round;
use crate::sync::lock;

/// Runs of pages taken from one scan: 48 KiB.
const SCAN_RUNS: usize = 2048;

/// While there is work, a round lasts at least so many times as long as its looks.
const LOOK_SHARE: u32 = 64;
/// And at most so many periods.
const MOST_PERIODS: u32 = 4;

/// The knobs.
#[derive(Debug)]
pub(crate) struct Knobs {
    run: AtomicU8,
    pub(crate) use_zero_pages: AtomicBool,
    pub(crate) merge_again: AtomicBool,
    pub(crate) period_ms: AtomicU64,
    pub(crate) threads: AtomicU16,
    /// Percent of a core; 0 for no limit.
    pub(crate) cpu_limit: AtomicU32,
    auto_pace: AtomicBool,
    /// How often the period is doubled at present; halved, if negative.
    pace_step: AtomicI8,
    across_nodes: AtomicBool,
    max_sharing: AtomicU32,
    thp: AtomicU8,
    /// 0 for no limit.
    pub(crate) store_limit_mib: AtomicU64,
    /// Whether the host was short of memory when the round began.
    short: AtomicBool,
    broken_rest: Duration,
    pub(crate) patience: Duration,
    pub(crate) max_mappings: u64,
}

impl Knobs {
    /// The knobs as `options` wants them.
    pub(crate) fn new(options: &crate::options::Options, max_mappings: u64) -> Self {
        let period = u64::try_from(options.merge_period.as_millis());
        Self {
            run: AtomicU8::new(options.run.into()),
            use_zero_pages: AtomicBool::new(options.use_zero_pages),
            merge_again: AtomicBool::new(options.merge_again),
            period_ms: AtomicU64::new(period.unwrap_or(u64::MAX)),
            threads: AtomicU16::new(options.threads),
            cpu_limit: AtomicU32::new(options.cpu_limit),
            auto_pace: AtomicBool::new(options.pace == Pace::Auto),
            pace_step: AtomicI8::new(0),
            across_nodes: AtomicBool::new(options.merge_across_nodes),
            max_sharing: AtomicU32::new(options.max_page_sharing),
            thp: AtomicU8::new(options.thp as u8),
            store_limit_mib: AtomicU64::new(options.store_limit_mib),
            short: AtomicBool::new(false),
            broken_rest: options.broken_rest,
            patience: options.patience,
            max_mappings,
        }
    }

    /// Whether to merge.
    pub(crate) fn mode(&self) -> RunMode {
        RunMode::try_from(self.run.load(Acquire)).unwrap_or_default()
    }

    /// Changes whether to merge. A job that read the old mode holds its chunk's lock until it is
    /// done, so whoever locks the chunk after this call sees what it did.
    pub(crate) fn set_mode(&self, mode: RunMode) {
        self.run.store(mode.into(), Release);
    }

    /// What may be shared with what.
    pub(crate) fn rules(&self) -> Rules {
        Rules {
            across_nodes: self.across_nodes.load(Acquire),
            max_sharing: self.max_sharing.load(Acquire),
        }
    }

    /// Changes what may be shared with what; nothing must be shared (see [`crate::run::switch`]).
    pub(crate) fn set_rules(&self, rules: Rules) {
        self.across_nodes.store(rules.across_nodes, Release);
        self.max_sharing.store(rules.max_sharing, Release);
    }

    /// Slots that all stores together may have.
    fn store_limit(&self) -> u64 {
        const MIB_PAGES: u64 = (1 << 20) / wire::PAGE_BYTES as u64;
        match self.store_limit_mib.load(Relaxed) {
            0 => u64::MAX,
            mib => mib.saturating_mul(MIB_PAGES),
        }
    }

    /// Rounds after which a broken page is older by one.
    fn broken_rounds(&self) -> u64 {
        let period = u64::try_from(self.period().as_millis()).unwrap_or(u64::MAX);
        let rest = u64::try_from(self.broken_rest.as_millis()).unwrap_or(u64::MAX);
        rest.div_ceil(period.max(1))
    }

    /// The time between two looks at present.
    pub(crate) fn period(&self) -> Duration {
        let knob = Duration::from_millis(self.period_ms.load(Relaxed));
        pace::at_step(knob, self.pace_step.load(Relaxed))
    }

    /// How the period is chosen.
    pub(crate) fn pace(&self) -> Pace {
        match self.auto_pace.load(Relaxed) {
            true => Pace::Auto,
            false => Pace::Fixed,
        }
    }

    /// What is done with chunks that are one huge page.
    pub(crate) fn thp(&self) -> Thp {
        match self.thp.load(Relaxed) {
            0 => Thp::Keep,
            1 => Thp::Split,
            _ => Thp::Auto,
        }
    }

    /// Changes what is done with chunks that are one huge page.
    pub(crate) fn set_thp(&self, thp: Thp) {
        self.thp.store(thp as u8, Relaxed);
    }

    /// How many pages of a huge page must be saved for it to be split.
    fn worth_splitting(&self) -> usize {
        match self.thp() {
            Thp::Keep => usize::MAX,
            Thp::Auto if !self.short.load(Relaxed) => CHUNK_PAGES / 2,
            Thp::Auto | Thp::Split => 0,
        }
    }

    /// Looks whether the host is short of memory, where something depends on it.
    pub(crate) fn look_at_supply(&self) {
        if self.thp() == Thp::Auto {
            // Who cannot tell is not in need.
            let short = Supply::read().is_ok_and(Supply::is_short);
            self.short.store(short, Relaxed);
        }
    }

    /// Changes how the period is chosen.
    pub(crate) fn set_pace(&self, pace: Pace) {
        self.auto_pace.store(pace == Pace::Auto, Relaxed);
    }

    /// Sets how often the period is doubled.
    pub(crate) fn set_step(&self, step: i8) {
        if self.pace_step.swap(step, Relaxed) != step {
            tracing::info!(period = ?self.period(), "the pace changes");
        }
    }
}

/// Buffers of a worker.
pub(crate) struct Scratch {
    desk: Desk,
    effects: Effects,
    runs: Vec<PageRun>,
    found: Vec<Arc<Chunk>>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self {
            desk: Desk::new(),
            effects: Effects::default(),
            runs: vec![PageRun::default(); SCAN_RUNS],
            found: Vec::new(),
        }
    }
}

/// Chunks with work that looks found.
#[derive(Default)]
struct Finds {
    /// The order is made: what is found from here on is worked as it comes.
    at_work: bool,
    chunks: Vec<Arc<Chunk>>,
}

/// Makes a realm for a domain.
pub(crate) type NewRealm = Box<dyn Fn(&str) -> std::io::Result<Realm> + Send + Sync>;

/// Everything the workers share.
pub(crate) struct Core {
    pub(crate) knobs: Knobs,
    governor: Governor,
    pub(crate) queue: Queue,
    pub(crate) guests: Mutex<Vec<Arc<Guest>>>,
    pub(crate) users: Users,
    pub(crate) realms: Mutex<BTreeMap<String, Arc<Realm>>>,
    hasher: Hasher,
    new_realm: NewRealm,
    found: Mutex<Finds>,
    pub(crate) waiting: Waiting,
    next_guest: AtomicU64,
    /// Rounds begun, short ones included.
    rounds: AtomicU64,
    /// Rounds completed over all regions.
    pub(crate) full_scans: AtomicU64,
    /// Pages that got no slot because of the stores' limit.
    pub(crate) pages_over_limit: AtomicU64,
    /// CPU time of agents that are gone, in nanoseconds.
    pub(crate) gone_cpu_ns: AtomicU64,
    /// The part of it that counts against the limit.
    gone_charged_ns: AtomicU64,
    /// The longest window of guests that are gone, in nanoseconds.
    pub(crate) gone_window_ns: AtomicU64,
    /// Pages that guests that are gone had merged again.
    pub(crate) gone_merged_again: AtomicU64,
}

impl Core {
    /// A core without guests.
    pub(crate) fn new(knobs: Knobs, limits: Limits, hasher: Hasher, new_realm: NewRealm) -> Self {
        Self {
            users: Users::new(limits),
            knobs,
            governor: Governor::new(),
            queue: Queue::default(),
            guests: Mutex::default(),
            realms: Mutex::default(),
            hasher,
            new_realm,
            found: Mutex::default(),
            waiting: Waiting::default(),
            next_guest: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            full_scans: AtomicU64::new(0),
            pages_over_limit: AtomicU64::new(0),
            gone_cpu_ns: AtomicU64::new(0),
            gone_charged_ns: AtomicU64::new(0),
            gone_window_ns: AtomicU64::new(0),
            gone_merged_again: AtomicU64::new(0),
        }
    }

    /// The realm of `domain`, made if need be.
    ///
    /// # Errors
    /// When its store cannot be made.
    pub(crate) fn realm(&self, domain: &str) -> std::io::Result<Arc<Realm>> {
        let mut realms = lock(&self.realms);
        if let Some(realm) = realms.get(domain) {
            return Ok(Arc::clone(realm));
        }
        let realm = Arc::new((self.new_realm)(domain)?);
        realm.slots.set_limit(self.knobs.rules().max_sharing);
        realms.insert(domain.to_owned(), Arc::clone(&realm));
        Ok(realm)
    }

    /// Whether a process has a session: the number belongs to one that lives. One that it had lets go of the
    /// process's userfaultfd, for a mapping takes one at a time.
    pub(crate) fn has_session(&self, pid: u32) -> bool {
        let guests = lock(&self.guests);
        let its = guests.iter().filter(|guest| guest.pid == pid).cloned();
        let its: Vec<_> = its.collect();
        drop(guests);
        let lives =
            |guest: &Arc<Guest>| guest.standing() == Standing::Served && !guest.memory.has_left();
        its.iter()
            .any(|guest| lives(guest) || !rescue::let_go(guest))
    }

    /// Takes a guest in that has been welcomed.
    pub(crate) fn admit(
        &self,
        peer: Peer,
        realm: Arc<Realm>,
        memory: Box<dyn Memory>,
        link: Box<dyn Link>,
        line: Box<dyn Lifeline>,
    ) {
        let number = self.next_guest.fetch_add(1, Relaxed);
        let user = self.users.get(peer.uid);
        let guest = Guest::new(number, peer.pid, user, realm, memory, link, line);
        lock(&self.guests).push(Arc::new(guest));
    }

    /// A round. With `scan` unset, only late answers are taken and merged pages unmerged.
    pub(crate) fn round(&self, crew: &dyn Crew, scan: bool) {
        let begin = Instant::now();
        self.knobs.look_at_supply();
        self.rounds.fetch_add(1, Relaxed);
        let mut guests = lock(&self.guests).clone();
        let order = Order::new(&guests, self.knobs.threads.load(Relaxed));
        // Those first that a cut left out the last time.
        guests.sort_by_key(|guest| guest.is_ready());
        guests.iter().for_each(|guest| guest.begin_round());
        self.queue.begin_round();
        self.queue
            .add(guests.into_iter().map(|guest| Job::Look(guest, scan)));
        let (period, patience) = (self.knobs.period(), self.knobs.patience);
        let looks = Looks::new(begin, patience, period);
        crew.look(self, &looks);
        self.waiting.note_late();
        let looked = begin.elapsed();
        let mut found = self.take_found();
        order.sort(&mut found);
        let work = found.len();
        self.queue.add(found.into_iter().map(first_visit));
        // Whoever waits for unmerging asks after each round whether enough moves.
        let least = match scan {
            true => period.max(patience),
            false => patience,
        };
        let lasts = (looked * LOOK_SHARE).clamp(least, least * MOST_PERIODS);
        crew.work(self, looks.end(), begin + lasts);
        self.waiting.give_up();
        lock(&self.found).at_work = false;
        self.settle_inherited();
        self.tidy();
        if scan {
            self.full_scans.fetch_add(1, Relaxed);
        }
        tracing::debug!(chunks = work, took = ?begin.elapsed(), "a round is done");
    }

    /// Takes what the looks have found so far; from now on it is worked as it comes.
    fn take_found(&self) -> Vec<Arc<Chunk>> {
        let mut found = lock(&self.found);
        found.at_work = true;
        std::mem::take(&mut found.chunks)
    }

    fn note_found(&self, chunks: &mut Vec<Arc<Chunk>>) {
        let mut found = lock(&self.found);
        match found.at_work {
            true => self.queue.add(chunks.drain(..).map(first_visit)),
            false => found.chunks.append(chunks),
        }
    }

    /// Forgets guests and realms of which nothing is left.
    pub(crate) fn tidy(&self) {
        lock(&self.guests).retain(|guest| {
            let gone = guest.is_gone();
            if gone {
                let counters = &guest.counters;
                self.gone_cpu_ns
                    .fetch_add(counters.cpu_ns.load(Relaxed), Relaxed);
                self.gone_merged_again
                    .fetch_add(counters.merged_again.load(Relaxed), Relaxed);
                self.gone_charged_ns.fetch_add(guest.charged_ns(), Relaxed);
                self.gone_window_ns
                    .fetch_max(counters.window_ns.load(Relaxed), Relaxed);
            }
            !gone
        });
        lock(&self.realms).retain(|_, realm| {
            let stays = Arc::strong_count(realm) > 1 || realm.waits();
            if let Some(bequest) = realm.bequest.as_ref().filter(|_| !stays) {
                bequest.end();
            }
            stays
        });
    }

    /// Whether there is a realm of `domain`.
    pub(crate) fn has_realm(&self, domain: &str) -> bool {
        lock(&self.realms).contains_key(domain)
    }

    /// Takes over from a former engine.
    ///
    /// # Errors
    /// When its stores cannot be read.
    pub(crate) fn inherit(&self, realm: Realm, ties: Vec<Tie>) -> std::io::Result<()> {
        realm.slots.set_limit(self.knobs.rules().max_sharing);
        let slots = claim::take_over(&realm, ties, &self.hasher, self.knobs.rules());
        // The keeper has this engine's tie by now.
        let slots = slots.inspect_err(|_| realm.bequest.iter().for_each(Bequest::end))?;
        tracing::info!(domain = realm.domain, slots, "a domain goes on");
        lock(&self.realms).insert(realm.domain.clone(), Arc::new(realm));
        Ok(())
    }

    fn settle_inherited(&self) {
        let realms: Vec<_> = lock(&self.realms).values().cloned().collect();
        for realm in realms {
            realm.settle_inherited();
            realm.punch_again();
        }
    }

    /// Between rounds: retires guests that have ended, settles what they left behind. Their memory may be slow, so
    /// this is done by workers, too.
    pub(crate) fn reap(&self, crew: &dyn Crew) {
        let ended =
            |guest: &Arc<Guest>| guest.standing() == Standing::Condemned || guest.memory.has_left();
        let guests = lock(&self.guests);
        let ended: Vec<_> = guests
            .iter()
            .filter(|guest| ended(guest))
            .cloned()
            .collect();
        drop(guests);
        if !ended.is_empty() {
            let looks = ended.into_iter().map(|guest| Job::Look(guest, false));
            self.queue.add(looks);
            let begin = Instant::now();
            crew.work(self, begin, begin + self.knobs.patience);
            self.waiting.give_up();
        }
        self.settle_inherited();
        self.tidy();
    }

    /// How long a worker is to wait before its next job, by the limit of CPU time.
    pub(crate) fn pause(&self) -> Duration {
        let limit = match self.knobs.mode() {
            RunMode::Unmerge => 0,
            _ => self.knobs.cpu_limit.load(Relaxed),
        };
        self.governor.pause(limit, || {
            let guests = lock(&self.guests);
            let agents: u64 = guests.iter().map(|guest| guest.charged_ns()).sum();
            let gone = self.gone_charged_ns.load(Relaxed);
            sys::process::cpu_time() + Duration::from_nanos(agents.saturating_add(gone))
        })
    }

    /// Does a job, for the worker at `post`.
    pub(crate) fn do_job(&self, job: Job, scratch: &mut Scratch, post: &Post) {
        match job {
            Job::Look(guest, scan) => self.look(&guest, scan, scratch),
            Job::Chunk(chunk, visit) => self.work(&chunk, visit, scratch, post),
        }
    }

    fn look(&self, guest: &Arc<Guest>, scan: bool, scratch: &mut Scratch) {
        let terms = Terms {
            round: Round(self.rounds.load(Relaxed)),
            mode: self.knobs.mode(),
            patience: self.knobs.patience,
            scan,
            rules: self.knobs.rules(),
            merge_again: self.knobs.merge_again.load(Relaxed),
            max_mappings: self.knobs.max_mappings,
            broken_rounds: self.knobs.broken_rounds(),
        };
        let Scratch {
            effects,
            runs,
            found,
            ..
        } = scratch;
        match look::look(guest, terms, effects, runs, found) {
            Looked::Done => {}
            Looked::Waits => self.waiting.add(guest, scan),
            Looked::GoesOn => self.queue.add([Job::Look(Arc::clone(guest), scan)]),
        }
        self.note_found(found);
    }

    fn work(&self, chunk: &Arc<Chunk>, visit: Visit, scratch: &mut Scratch, post: &Post) {
        chunk.start(visit.is_whole());
        let Some(guest) = chunk.guest.upgrade() else {
            return;
        };
        if !guest.takes_jobs(self.knobs.patience) {
            return;
        }
        // Another worker is at it, and looks again at the end whether something came. Or it is stuck, and not waited for.
        let Some(mut pages) = chunk.try_lock() else {
            return;
        };
        let before = pages.memory_bytes();
        let effects = &mut scratch.effects;
        let manner = Manner {
            patience: self.knobs.patience,
            max_mappings: self.knobs.max_mappings,
            insist: visit == Visit::Insisting || self.queue.is_empty(),
            worth_splitting: self.knobs.worth_splitting(),
            step_aside: &|| post.step_aside(&self.queue),
        };
        let mode = match guest.leaves() {
            false => self.knobs.mode(),
            true => RunMode::Unmerge,
        };
        let mut waits = false;
        let asked = if mode == RunMode::Run {
            let context = Context {
                hasher: &self.hasher,
                use_zero_pages: self.knobs.use_zero_pages.load(Relaxed),
                rules: self.knobs.rules(),
                promotions: &self.queue,
                store_limit: self.knobs.store_limit(),
                over_limit: &self.pages_over_limit,
            };
            let plan = Plan::new(
                &context,
                &guest,
                chunk,
                &mut pages,
                effects,
                visit.is_whole(),
            );
            waits = plan.make(&mut scratch.desk);
            match post.is_abandoned() {
                true => Asked::Done,
                false => request::merge(&guest, chunk, &mut pages, effects, manner),
            }
        } else {
            plan::withdraw(chunk, &mut pages, effects);
            match mode {
                RunMode::Unmerge => request::unmerge(&guest, chunk, &mut pages, effects, manner),
                _ => Asked::Done,
            }
        };
        guest.realm.apply(&guest, effects);
        guest.counters.take_over(&mut pages);
        guest.change_tables(before, pages.memory_bytes());
        drop(pages);
        guest.part();
        if post.is_abandoned() {
            return; // the next look finds what is left
        }
        let came = mode == RunMode::Run && chunk.has_promoted();
        if came && asked != Asked::Busy && chunk.enqueue() {
            self.queue.push(Arc::clone(chunk));
        }
        if asked == Asked::Busy && chunk.enqueue() {
            let again = Job::Chunk(Arc::clone(chunk), Visit::Insisting);
            self.queue.add([again]);
        }
        if waits && chunk.enqueue_whole() {
            self.queue.add_later(Arc::clone(chunk));
        }
    }
}

fn first_visit(chunk: Arc<Chunk>) -> Job {
    Job::Chunk(chunk, Visit::First)
}
