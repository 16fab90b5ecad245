//! A guest as the engine sees it: memory to look at, an agent to ask, and what is counted.
//!
//! The agent is asked one question at a time ([`Talk`]). When it does not answer in time the
//! question stays `pending` and the guest is *late*: it gets no jobs, its pages keep their refs, and
//! each round begins with a look whether the answer has come. Whatever an agent says or does costs
//! the engine that guest, nothing else (I8): a malformed or contradictory answer condemns it, slow
//! answers make it rest.

pub(crate) mod idle;
pub(crate) mod kin;
pub(crate) mod parting;
pub(crate) mod process;
pub(crate) mod refusals;
pub(crate) mod regions;
pub(crate) mod rescue;
pub(crate) mod socket;
pub(crate) mod users;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use sys::foreign::ForeignName;
use sys::pagemap::PageRun;
use sys::process::Remote;
use wire::{Answer, Changes, PageBits, Question, Ready};

use crate::domain::chunk::Chunk;
use crate::domain::lifelines::{Ledger, Lifeline};
use crate::domain::pages::Pages;
use crate::domain::store::PageBytes;
use crate::domain::{Effects, Realm};
use crate::error::Refusal;
use crate::guest::idle::Calm;
use crate::guest::kin::Kin;
use crate::guest::regions::{AtLimit, Offers};
use crate::guest::users::User;
use crate::page::{CLASSES, Class, StoreId};
use crate::run::post::{self, Watched};
use crate::scan::claim::{self, Mapped};
use crate::sync::lock;

/// A guest's address space.
///
/// Nothing but [`Self::has_exited`], [`Self::has_left`] and [`Self::name`] may be asked before it is admitted (I10).
pub(crate) trait Memory: Send + Sync {
    /// Admits the address space in which the agent that is `ready` lives, once.
    ///
    /// # Errors
    /// Why it may not be a guest.
    fn admit(&self, ready: Ready) -> Result<(), Refusal>;

    /// Whether the process is still one that may be in its domain.
    ///
    /// # Errors
    /// Why not.
    fn compare(&self) -> Result<(), Refusal>;

    /// Looks at the pages of `range` and arms the written ones again, as
    /// [`sys::pagemap::Pagemap::scan`].
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)>;

    /// Looks at the pages of `range` without arming them, and tells which are a file's, as
    /// [`sys::pagemap::Pagemap::peek`].
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    fn peek(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)>;

    /// Reads ranges one after another into `pages`; returns how many pages it could read.
    ///
    /// # Errors
    /// When the guest is gone.
    fn read(&self, ranges: &[Remote], pages: &mut [&mut PageBytes]) -> std::io::Result<usize>;

    /// The store of the node that each of these pages of one chunk lies on, given by address in
    /// ascending order; `None` where the page is gone, or on a node without store.
    fn stores(&self, pages: &[usize]) -> Vec<Option<StoreId>>;

    /// What may hold pages of the process pinned for long, in words; `None` when nothing does. Looks at `most`
    /// descriptors.
    fn pins(&self, most: u32) -> Option<String>;

    /// Calls `each` with every part of the address space that maps one of the stores with these
    /// numbers privately. False when other stores are mapped too.
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    fn mapped(&self, stores: &[u64], each: &mut dyn FnMut(Mapped)) -> std::io::Result<bool>;

    /// How many mappings the process has.
    fn mappings(&self) -> Option<u64>;

    /// Brings back the pages that a dead agent has left out of reach, and lets go of the guest's userfaultfd. Not
    /// while the agent's thread still ends, but the `last` time in any case.
    fn rescue(&self, last: bool);

    /// Whether it holds the guest's userfaultfd. Never blocks.
    fn is_guarded(&self) -> bool;

    /// Whether the process has ended, or runs another program.
    fn has_exited(&self) -> bool;

    /// The same, or its agent has closed the connection.
    fn has_left(&self) -> bool;

    /// The command name.
    fn name(&self) -> ForeignName;

    /// The number of the process that it is a child of.
    fn parent(&self) -> Option<u32> {
        None
    }
}

/// The connection to a guest's agent.
pub(crate) trait Link: Send {
    /// Makes the lifeline that the next [`Question::Sync`] takes along.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    fn lifeline(&mut self) -> std::io::Result<Box<dyn Lifeline>>;

    /// Sends a question, without waiting.
    ///
    /// # Errors
    /// When the connection is broken.
    fn send(&mut self, question: &Question) -> Result<(), Fault>;

    /// What tells that an answer has come, to wait for many at once.
    fn bell(&self) -> Option<BorrowedFd<'_>>;

    /// Takes an answer, after waiting at most `wait` for it.
    ///
    /// # Errors
    /// When the connection is broken or the answer malformed.
    fn receive(&mut self, wait: Duration) -> Result<Option<Answer>, Fault>;
}

/// Why a guest is not served any longer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// The connection ended.
    #[error("the connection ended")]
    Closed,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(#[from] std::io::Error),
    /// A packet that is no answer.
    #[error("malformed answer: {0}")]
    Malformed(#[from] wire::DecodeError),
    /// An answer to something that was not asked.
    #[error("contradictory answer: {0}")]
    Contradiction(&'static str),
    /// The agent cannot work.
    #[error("{}", crate::guest::parting::words(*step, *errno))]
    Failed {
        /// The agent's step.
        step: u8,
        /// The operating system's error number.
        errno: u16,
    },
    /// The agent did not finish the handshake.
    #[error("no handshake within {0:?}")]
    Silent(Duration),
    /// Its memory cannot be looked at.
    #[error("its memory cannot be looked at: {0}")]
    Unreadable(std::io::Error),
    /// It may not be a guest.
    #[error(transparent)]
    Unfit(#[from] Refusal),
    /// It may no longer be in its domain.
    #[error("it has left its domain: {0}")]
    Left(String),
    /// Reading its memory does not return.
    #[error("reading its memory does not return")]
    Stuck,
}

/// Where a guest stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Standing {
    /// Served, unless it is late or rests.
    Served = 0,
    /// To be retired by the next look.
    Condemned = 1,
    /// Retired; its refs wait for its lifelines.
    Ghost = 2,
}

/// What an agent still owes an answer to.
#[derive(Debug)]
pub(crate) enum Pending {
    /// The welcome, sent at this moment.
    Ready(Instant),
    /// A sync; of the part that was taken last, this is left.
    Changes(Option<Box<Rest>>),
    /// A merge of this chunk: its asked pages, and these, which may be enclosed between them.
    Merged(Arc<Chunk>, PageBits),
    /// An unmerge of these pages.
    Unmerged(Arc<Chunk>, PageBits),
}

/// A part of the answer to a sync that is taken.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) changes: Changes,
    /// Entries taken.
    pub(crate) taken: usize,
}

/// The conversation with the agent: at most one question is open.
pub(crate) struct Talk {
    /// `None` when the guest is retired.
    pub(crate) link: Option<Box<dyn Link>>,
    pub(crate) pending: Option<Pending>,
    /// The round of the last sync.
    pub(crate) synced: Option<u64>,
    /// Time that its answers took in this round.
    pub(crate) spent: Duration,
}

/// What is counted of a guest, readable at any time.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    classes: [AtomicI64; CLASSES],
    stored: AtomicI64,
    huge_kept: AtomicI64,
    /// CPU time of the agent, in nanoseconds.
    pub(crate) cpu_ns: AtomicU64,
    /// Time the engine has waited for the agent's answers, in nanoseconds.
    talk_ns: AtomicU64,
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
    /// Contiguous ranges offered.
    pub(crate) regions: AtomicU64,
    /// Bytes of the engine's memory spent on this guest.
    pub(crate) table_bytes: AtomicU64,
}

/// A guest's pages by class, at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Census([u64; CLASSES]);

impl Census {
    /// Pages of `class`.
    pub(crate) fn pages(&self, class: Class) -> u64 {
        self.0.get(class as usize).copied().unwrap_or(0)
    }

    /// Pages present.
    pub(crate) fn present(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl Counters {
    /// Pages of `class`.
    pub(crate) fn pages(&self, class: Class) -> u64 {
        let count = self.classes.get(class as usize);
        count.map_or(0, |count| u64::try_from(count.load(Relaxed)).unwrap_or(0))
    }

    /// Pages that lie in mappings of a store, merged or written since.
    pub(crate) fn stored(&self) -> u64 {
        u64::try_from(self.stored.load(Relaxed)).unwrap_or(0)
    }

    /// Chunks left alone because they are one huge page.
    pub(crate) fn huge_kept(&self) -> u64 {
        u64::try_from(self.huge_kept.load(Relaxed)).unwrap_or(0)
    }

    /// All classes, each read once: what is derived from one census adds up (I9), also while
    /// workers move pages from class to class.
    pub(crate) fn census(&self) -> Census {
        let mut census = [0; CLASSES];
        for (seen, count) in census.iter_mut().zip(&self.classes) {
            *seen = u64::try_from(count.load(Relaxed)).unwrap_or(0);
        }
        Census(census)
    }

    /// Adds what changed in a chunk.
    pub(crate) fn take_over(&self, pages: &mut Pages) {
        for (count, change) in self.classes.iter().zip(pages.take_changes()) {
            if change != 0 {
                count.fetch_add(change, Relaxed);
            }
        }
        let stored = pages.take_stored_change();
        if stored != 0 {
            self.stored.fetch_add(stored, Relaxed);
        }
        let kept = pages.take_kept_change();
        if kept != 0 {
            self.huge_kept.fetch_add(kept, Relaxed);
        }
    }
}

/// A process whose memory is deduplicated.
pub(crate) struct Guest {
    pub(crate) number: u64,
    pub(crate) pid: u32,
    pub(crate) user: Arc<User>,
    pub(crate) realm: Arc<Realm>,
    pub(crate) memory: Box<dyn Memory>,
    pub(crate) talk: Mutex<Talk>,
    pub(crate) ledger: Mutex<Ledger>,
    pub(crate) offers: Mutex<Offers>,
    pub(crate) calm: Mutex<Calm>,
    pub(crate) counters: Counters,
    standing: AtomicU8,
    late: AtomicBool,
    /// It has been looked at in this round.
    ready: AtomicBool,
    /// Work waits for its answer.
    awaited: AtomicBool,
    /// Where its next look goes on, if the last was not finished.
    pub(crate) progress: AtomicU64,
    /// Threads that sleep in a look at its memory.
    stuck: AtomicU32,
    overtime_ns: AtomicU64,
    /// Chunks below this address are asked for their nodes when all others have been.
    pub(crate) patrolled: AtomicU64,
    /// Pages of them that may still be asked for in this round.
    pub(crate) patrol_left: AtomicUsize,
    /// Broken pages may be merged again, as the last look found.
    merges_again: AtomicBool,
    pins: Mutex<Pins>,
    refusal: Mutex<Option<AtLimit>>,
    claims: Mutex<Claims>,
    pub(crate) kin: Kin,
    /// Why it may no longer be in its domain, and since when that is known.
    leaving: OnceLock<(String, Instant)>,
}

/// What is known of what may hold a guest's pages pinned.
#[derive(Debug, Default)]
struct Pins {
    held: Option<String>,
    /// Looks in a row that found nothing.
    clean: u32,
}

/// How long a guest may take to give the pages it shared with its former domain private copies.
const PARTING: Duration = Duration::from_secs(10);

/// Looks in a row that must find nothing before broken pages are merged again: what was closed
/// before the first may still be at work then, and is done before the second.
const CLEAN_LOOKS: u32 = 2;

/// How far the pages are accounted for that were merged before this session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claims {
    /// Looked for so often in vain.
    Open(u32),
    /// All are, and the agent is to be told.
    Done,
    /// And the agent was told.
    Told,
}

impl Guest {
    /// A guest that has been welcomed.
    pub(crate) fn new(
        number: u64,
        pid: u32,
        user: Arc<User>,
        realm: Arc<Realm>,
        memory: Box<dyn Memory>,
        link: Box<dyn Link>,
        line: Box<dyn Lifeline>,
    ) -> Self {
        let pending = Some(Pending::Ready(Instant::now()));
        Self {
            number,
            pid,
            user,
            realm,
            memory: Box::new(Watched(memory)),
            talk: Mutex::new(Talk {
                link: Some(link),
                pending,
                synced: None,
                spent: Duration::ZERO,
            }),
            ledger: Mutex::new(Ledger::new(line)),
            offers: Mutex::default(),
            calm: Mutex::default(),
            counters: Counters::default(),
            standing: AtomicU8::new(Standing::Served as u8),
            late: AtomicBool::new(true),
            ready: AtomicBool::new(false),
            awaited: AtomicBool::new(true),
            progress: AtomicU64::new(0),
            stuck: AtomicU32::new(0),
            overtime_ns: AtomicU64::new(0),
            patrolled: AtomicU64::new(0),
            patrol_left: AtomicUsize::new(0),
            merges_again: AtomicBool::new(false),
            pins: Mutex::default(),
            refusal: Mutex::default(),
            claims: Mutex::new(Claims::Open(0)),
            kin: Kin::default(),
            leaving: OnceLock::new(),
        }
    }

    /// Takes the guest in: its agent is `ready`.
    ///
    /// # Errors
    /// Why it may not be one.
    pub(crate) fn enter(&self, ready: Ready) -> Result<(), Refusal> {
        let begin = thread_time();
        let admitted = self.memory.admit(ready);
        self.user
            .note_admission(thread_time().saturating_sub(begin));
        admitted?;
        self.user.refusals.forget_process(self.user.uid, self.pid);
        let vmas = self.memory.mappings().unwrap_or(0);
        self.counters.vmas.store(vmas, Relaxed);
        self.counters.vmas_before.store(vmas, Relaxed);
        Ok(())
    }

    /// Looks whether the guest may still be in its domain; false when that cannot be told now, and so nothing may be
    /// done with it. One that may not be is unmerged first, while its agent answers.
    ///
    /// # Errors
    /// It is no guest at all any longer.
    pub(crate) fn compare(&self) -> Result<bool, Fault> {
        match self.memory.compare() {
            Ok(()) => Ok(true),
            Err(Refusal::Gone { .. }) => Err(Fault::Closed),
            Err(Refusal::System(error)) => {
                tracing::warn!(pid = self.pid, %error, "whose a guest is cannot be told now");
                Ok(false)
            }
            Err(why) => {
                let since = (why.to_string(), Instant::now());
                if self.leaving.set(since).is_ok() {
                    tracing::info!(pid = self.pid, "a guest leaves its domain: {why}");
                }
                Ok(true)
            }
        }
    }

    /// Whether the guest leaves its domain: nothing more of it is merged.
    pub(crate) fn leaves(&self) -> bool {
        self.leaving.get().is_some()
    }

    /// Ends the service of a guest that leaves when all its pages are private, or it took too long.
    pub(crate) fn part(&self) {
        if let Some((why, since)) = self.leaving.get()
            && (self.counters.pages(Class::Merged) == 0 || since.elapsed() > PARTING)
        {
            self.condemn(&Fault::Left(why.clone()));
        }
    }

    /// Where the guest stands.
    pub(crate) fn standing(&self) -> Standing {
        match self.standing.load(Acquire) {
            0 => Standing::Served,
            1 => Standing::Condemned,
            _ => Standing::Ghost,
        }
    }

    /// Ends the service: the next look retires the guest. Only the first reason is told.
    pub(crate) fn condemn(&self, fault: &Fault) {
        let (served, condemned) = (Standing::Served as u8, Standing::Condemned as u8);
        let first = self
            .standing
            .compare_exchange(served, condemned, AcqRel, Acquire);
        match (first, fault) {
            (Err(_), _) => {}
            (Ok(_), Fault::Closed) => tracing::debug!(pid = self.pid, "the guest left"),
            (Ok(_), Fault::Failed { step, .. }) if *step == wire::STEP_RIGHTS => {
                tracing::debug!(pid = self.pid, %fault, "the guest left");
            }
            (Ok(_), Fault::Failed { step, .. }) if *step == wire::STEP_ELSEWHERE => {
                tracing::info!(pid = self.pid, %fault, "the guest left");
            }
            (Ok(_), Fault::Unfit(why)) => self.tell(&why.to_string()),
            (Ok(_), _) => self.tell(&format!("process {} is dropped: {fault}", self.pid)),
        }
    }

    /// Says why it is not served any longer.
    fn tell(&self, why: &str) {
        self.user.refusals.tell(self.user.uid, self.pid, why);
    }

    /// Why it may no longer be in its domain.
    pub(crate) fn why_it_leaves(&self) -> Option<String> {
        self.leaving.get().map(|(why, _)| why.clone())
    }

    /// Notes that the guest is retired.
    pub(crate) fn bury(&self) {
        self.standing.store(Standing::Ghost as u8, Release);
    }

    /// Whether the agent answers in time.
    pub(crate) fn is_responsive(&self) -> bool {
        self.standing() == Standing::Served && !self.late.load(Acquire)
    }

    /// Whether the guest takes jobs in this round.
    pub(crate) fn takes_jobs(&self, patience: Duration) -> bool {
        let overtime = Duration::from_nanos(self.overtime_ns.load(Relaxed));
        let ready = self.is_ready() && !self.is_stuck() && !self.user.is_stuck();
        ready && self.is_responsive() && overtime <= patience * 4
    }

    /// Notes whether the agent owes an answer.
    pub(crate) fn set_late(&self, late: bool) {
        if self.late.swap(late, AcqRel) != late {
            tracing::debug!(pid = self.pid, late, "the agent's answers");
        }
    }

    /// Notes how long the agent took over `pages` pages. An honest one needs less than 20 µs a page;
    /// whoever piles up more than four times the patience rests until the next round.
    pub(crate) fn note_time(&self, took: Duration, pages: usize) {
        self.note_talk(took);
        let fair = Duration::from_millis(2) + Duration::from_micros(20 * pages as u64);
        let over = took.saturating_sub(fair).as_nanos();
        self.overtime_ns
            .fetch_add(u64::try_from(over).unwrap_or(u64::MAX), Relaxed);
    }

    /// Notes how long the agent took over any question.
    pub(crate) fn note_talk(&self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counters.talk_ns.fetch_add(took, Relaxed);
    }

    /// The agent's CPU time that counts against the engine's limit: what it says, but no more than the
    /// time it was waited for. A hostile agent could else stop the work for all others (I8) by its word.
    pub(crate) fn charged_ns(&self) -> u64 {
        let Counters {
            cpu_ns, talk_ns, ..
        } = &self.counters;
        cpu_ns.load(Relaxed).min(talk_ns.load(Relaxed))
    }

    /// Why no more `bytes` of tables may be had.
    pub(crate) fn lacks_room(&self, bytes: u64) -> Option<AtLimit> {
        let (limits, mib) = (&self.user.limits, 1 << 20);
        let own = self.counters.table_bytes.load(Relaxed) + bytes;
        let all = self.user.table_bytes() + bytes;
        match () {
            () if own > limits.table_mib_per_process.saturating_mul(mib) => {
                Some(AtLimit::ProcessTables)
            }
            () if all > limits.table_mib_per_user.saturating_mul(mib) => Some(AtLimit::UserTables),
            () => None,
        }
    }

    /// Notes why some of its memory is left alone.
    pub(crate) fn note_refusal(&self, refusal: Option<AtLimit>) {
        let mut noted = lock(&self.refusal);
        if let Some(why) = refusal.filter(|_| refusal != *noted) {
            let limits = &self.user.limits;
            tracing::warn!(
                pid = self.pid,
                uid = self.user.uid,
                "{}",
                why.describe(limits)
            );
        }
        *noted = refusal;
    }

    /// Why some of its memory is left alone, in words.
    pub(crate) fn refusal(&self) -> Option<String> {
        let why = *lock(&self.refusal);
        why.map(|why| why.describe(&self.user.limits))
    }

    /// Notes that a table that had `before` bytes has `now`.
    pub(crate) fn change_tables(&self, before: usize, now: usize) {
        let tables = &self.counters.table_bytes;
        let (before, now) = (before as u64, now as u64);
        match now.checked_sub(before) {
            Some(more) => tables.fetch_add(more, Relaxed),
            None => tables.fetch_sub(before - now, Relaxed),
        };
        self.user.note_tables(before, now);
    }

    /// Notes how many bytes of tables the guest takes.
    pub(crate) fn note_tables(&self, bytes: u64) {
        let before = self.counters.table_bytes.swap(bytes, Relaxed);
        self.user.note_tables(before, bytes);
    }

    /// Begins a round: nobody rests any more, and no chunk is worked before the look.
    pub(crate) fn begin_round(&self) {
        self.overtime_ns.store(0, Relaxed);
        self.ready.store(false, Release);
        if let Ok(mut talk) = self.talk.try_lock() {
            talk.spent = Duration::ZERO;
        }
    }

    /// Notes that the look of this round is done.
    pub(crate) fn end_look(&self) {
        self.set_late(false);
        self.ready.store(true, Release);
    }

    /// Whether it has been looked at in this round.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Acquire)
    }

    /// Whether work waits for its answer.
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited.load(Acquire)
    }

    /// Notes whether work waits for its next answer.
    pub(crate) fn set_awaited(&self, awaited: bool) {
        self.awaited.store(awaited, Release);
    }

    /// Notes that a thread sleeps in a look at its memory. Nobody looks before the thread is back.
    pub(crate) fn lose_thread(&self) {
        self.stuck.fetch_add(1, AcqRel);
        tracing::debug!(pid = self.pid, "a look at its memory takes long");
        if !self.user.lose_thread() {
            self.condemn(&Fault::Stuck);
        }
    }

    /// Notes that the thread is back.
    pub(crate) fn regain_thread(&self) {
        let before = self.stuck.fetch_sub(1, AcqRel);
        assert!(
            before > 0,
            "a thread came back that {} did not have",
            self.pid
        );
        self.user.regain_thread();
    }

    /// Whether a thread sleeps in a look at its memory.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.load(Acquire) > 0
    }

    /// Ends the service because its memory cannot be looked at, unless it was the look that was given up.
    pub(crate) fn fail(&self, error: std::io::Error) {
        if !post::is_given_up(&error) {
            self.condemn(&Fault::Unreadable(error));
        }
    }

    /// Notes what a look found that may hold pages pinned; true when it is long enough ago that
    /// anything was.
    pub(crate) fn note_pins(&self, held: Option<String>) -> bool {
        let mut pins = lock(&self.pins);
        pins.clean = if held.is_some() {
            0
        } else {
            pins.clean.saturating_add(1)
        };
        if let Some(held) = &held
            && pins.held.is_none()
        {
            tracing::info!(pid = self.pid, "written pages are not merged again: {held}");
        }
        pins.held = held;
        pins.clean >= CLEAN_LOOKS
    }

    /// Whether the next look is to tell whether it is long enough ago that something was held.
    pub(crate) fn wants_pins(&self) -> bool {
        let pins = lock(&self.pins);
        pins.held.is_none() && pins.clean < CLEAN_LOOKS
    }

    /// Whether it is long enough ago that a look found something that may hold pages pinned.
    pub(crate) fn is_clean(&self) -> bool {
        lock(&self.pins).clean >= CLEAN_LOOKS
    }

    /// What may hold pages pinned, as the last look found.
    pub(crate) fn pins(&self) -> Option<String> {
        lock(&self.pins).held.clone()
    }

    /// Notes whether broken pages may be merged again in this round.
    pub(crate) fn set_merges_again(&self, on: bool) {
        self.merges_again.store(on, Relaxed);
    }

    /// Whether broken pages may be merged again in this round.
    pub(crate) fn merges_again(&self) -> bool {
        self.merges_again.load(Relaxed)
    }

    /// Finds the pages merged before this session, until it has all of them.
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    pub(crate) fn claim(&self, effects: &mut Effects) -> std::io::Result<()> {
        let mut claims = lock(&self.claims);
        if let Claims::Open(tries) = *claims {
            // A guest that never tells of all its pages is not looked at in each round.
            let due = tries == 0 || tries.is_power_of_two();
            *claims = match due && claim::claim(self, effects)? {
                true => Claims::Done,
                false => Claims::Open(tries.saturating_add(1)),
            };
        }
        Ok(())
    }

    /// Whether the agent is to be told that its pages are adopted; once.
    pub(crate) fn take_adopted(&self) -> bool {
        let mut claims = lock(&self.claims);
        let done = *claims == Claims::Done;
        if done {
            *claims = Claims::Told;
        }
        done
    }

    /// Settles the refs whose lifelines are free.
    pub(crate) fn settle(&self) {
        let gone = self.standing() == Standing::Ghost && self.has_nothing_more();
        let mut settled = lock(&self.ledger).settle(gone);
        self.realm.drop_refs(&mut settled);
    }

    /// Whether nothing of the guest is left.
    pub(crate) fn is_gone(&self) -> bool {
        self.standing() == Standing::Ghost
            && lock(&self.ledger).is_empty()
            && self.has_nothing_more()
            && !self.memory.is_guarded()
    }

    /// Whether no more refs of it can come to the ledger: no chunk is left, and no thread that has one at hand.
    fn has_nothing_more(&self) -> bool {
        let empty = |offers: MutexGuard<'_, Offers>| offers.chunks.is_empty();
        !self.is_stuck() && self.offers.try_lock().is_ok_and(empty)
    }
}

/// CPU time of the calling thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.note_tables(0);
    }
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest")
            .field("pid", &self.pid)
            .finish_non_exhaustive()
    }
}
