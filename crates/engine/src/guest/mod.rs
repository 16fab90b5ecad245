//! A guest as the engine sees it: memory to look at, an agent to ask, and counters.
//!
//! The agent is asked one question at a time ([`Talk`]). When it does not answer in time the
//! question stays `pending` and the guest is *late*. It gets no jobs, its pages keep their refs, and
//! each round begins with a look whether the answer has come. Whatever an agent says or does costs
//! the engine that guest, nothing else (I8). A malformed or contradictory answer condemns it, slow
//! answers make it rest.

pub(crate) mod agent;
pub(crate) mod change;
pub(crate) mod counters;
pub(crate) mod idle;
pub(crate) mod kin;
pub(crate) mod memory;
pub(crate) mod parting;
pub(crate) mod passes;
mod pins;
pub(crate) mod process;
pub(crate) mod regions;
pub(crate) mod rescue;
pub(crate) mod socket;

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use sys::foreign::ForeignName;
use sys::socket::Peer;
use wire::Ready;

use crate::domain::Domain;
use crate::domain::lifelines::{Ledger, Lifeline};
use crate::error::Refusal;
use crate::guest::agent::{Fault, Link, Pending, Talk};
use crate::guest::counters::Counters;
use crate::guest::idle::IdleBlocks;
use crate::guest::kin::Kin;
use crate::guest::memory::{Memory, is_given_up};
use crate::guest::passes::Passes;
use crate::guest::pins::Pins;
use crate::guest::regions::{AtLimit, Offers};
use crate::page::Class;
use crate::sync::{CLAIMS, Guard, IDLE, LEDGER, OFFERS, Ordered, TALK, lock};
use crate::users::User;

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

/// A process whose memory is deduplicated.
pub(crate) struct Guest {
    pub(crate) number: u64,
    /// When it was welcomed.
    pub(crate) came: Instant,
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    /// Who answers for it: its own user, or one who has made the namespace that it is in.
    pub(crate) user: Arc<User>,
    pub(crate) domain: Arc<Domain>,
    pub(crate) memory: Box<dyn Memory>,
    pub(crate) talk: Ordered<Talk, TALK>,
    pub(crate) ledger: Ordered<Ledger, LEDGER>,
    pub(crate) offers: Ordered<Offers, OFFERS>,
    pub(crate) idle_blocks: Ordered<IdleBlocks, IDLE>,
    pub(crate) counters: Counters,
    standing: AtomicU8,
    late: AtomicBool,
    /// Its agent says that it came into a process that ran already.
    attached: AtomicBool,
    /// It has been looked at in this round.
    looked_at: AtomicBool,
    /// All its memory has been looked at once.
    scanned: AtomicBool,
    /// Work waits for its answer.
    awaited: AtomicBool,
    /// Where its next look goes on, if the last was not finished.
    pub(crate) progress: AtomicU64,
    pub(crate) passes: Passes,
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
    at_limit: Mutex<Option<AtLimit>>,
    /// The last of its pages that were to get slots got none, for want of room.
    short_of_slots: AtomicBool,
    pub(crate) claims: Ordered<Claims, CLAIMS>,
    pub(crate) kin: Kin,
    /// Why it may no longer be in its domain, and since when that is known.
    leaving: OnceLock<(String, Instant)>,
    /// The command name that it had when it was taken in.
    joined_as: OnceLock<ForeignName>,
}

/// How long a guest may take to give the pages it shared with its former domain private copies.
const PARTING: Duration = Duration::from_secs(10);

/// How long a guest that has just come may take to offer memory.
const OFFERING: Duration = Duration::from_secs(3);

/// How long the agent of a guest that has just come may answer late: it has all its memory to tell of.
const SETTLING: Duration = Duration::from_secs(10);

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

/// A process that has been welcomed, and the ways to it.
pub(crate) struct Newcomer {
    pub(crate) peer: Peer,
    pub(crate) domain: Arc<Domain>,
    pub(crate) memory: Box<dyn Memory>,
    pub(crate) link: Box<dyn Link>,
    pub(crate) line: Box<dyn Lifeline>,
}

impl Guest {
    /// The guest that a newcomer becomes; `user` answers for it.
    pub(crate) fn new(number: u64, user: Arc<User>, newcomer: Newcomer) -> Self {
        let pending = Some(Pending::Ready(Instant::now()));
        Self {
            number,
            came: Instant::now(),
            pid: newcomer.peer.pid,
            uid: newcomer.peer.uid,
            user,
            domain: newcomer.domain,
            memory: newcomer.memory,
            talk: Ordered::new(Talk {
                link: Some(newcomer.link),
                pending,
                synced: None,
                spent: Duration::ZERO,
            }),
            ledger: Ordered::new(Ledger::new(newcomer.line)),
            offers: Ordered::default(),
            idle_blocks: Ordered::default(),
            counters: Counters::default(),
            standing: AtomicU8::new(Standing::Served as u8),
            late: AtomicBool::new(true),
            attached: AtomicBool::new(false),
            looked_at: AtomicBool::new(false),
            scanned: AtomicBool::new(false),
            awaited: AtomicBool::new(true),
            progress: AtomicU64::new(0),
            passes: Passes::default(),
            stuck: AtomicU32::new(0),
            overtime_ns: AtomicU64::new(0),
            patrolled: AtomicU64::new(0),
            patrol_left: AtomicUsize::new(0),
            merges_again: AtomicBool::new(false),
            pins: Mutex::default(),
            at_limit: Mutex::default(),
            short_of_slots: AtomicBool::new(false),
            claims: Ordered::new(Claims::Open(0)),
            kin: Kin::default(),
            leaving: OnceLock::new(),
            joined_as: OnceLock::new(),
        }
    }

    /// The command name that it had when it was taken in.
    pub(crate) fn joined_as(&self) -> ForeignName {
        self.joined_as.get().cloned().unwrap_or_default()
    }

    /// Takes the guest in: its agent is `ready`.
    ///
    /// # Errors
    /// Why it may not be one.
    pub(crate) fn enter(&self, ready: Ready) -> Result<(), Refusal> {
        let begin = sys::process::thread_time();
        let admitted = self.memory.admit(ready);
        // To count sixty thousand takes as long as to look at thousands of threads.
        let vmas = admitted.as_ref().map_or(None, |()| self.memory.mappings());
        let took = sys::process::thread_time().saturating_sub(begin);
        self.user.common.note_admission(self.user.uid, took);
        admitted?;
        self.attached.store(ready.attached, Relaxed);
        self.joined_as.get_or_init(|| self.memory.name());
        self.user.common.refusals.forget_process(self.uid, self.pid);
        let vmas = vmas.unwrap_or(0);
        self.counters.vmas.store(vmas, Relaxed);
        self.counters.vmas_before.store(vmas, Relaxed);
        Ok(())
    }

    /// Whether its agent says that it was put into a process that ran.
    pub(crate) fn is_attached(&self) -> bool {
        self.attached.load(Relaxed)
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
                let unknown = || {
                    tracing::warn!(pid = self.pid, %error, "whose a guest is cannot be told now");
                };
                self.user.say(unknown);
                Ok(false)
            }
            Err(why) => {
                let since = (why.to_string(), Instant::now());
                if self.leaving.set(since).is_ok() {
                    let leaves =
                        || tracing::info!(pid = self.pid, "a guest leaves its domain: {why}");
                    self.user.say(leaves);
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
            (Ok(_), Fault::Failed { step, .. })
                if matches!(*step, wire::STEP_RIGHTS | wire::STEP_DETACHED) =>
            {
                tracing::debug!(pid = self.pid, %fault, "the guest left");
            }
            (Ok(_), Fault::Failed { step, .. }) if *step == wire::STEP_ELSEWHERE => {
                let left = || tracing::info!(pid = self.pid, %fault, "the guest left");
                self.user.say(left);
            }
            (Ok(_), Fault::Unfit(why)) => self.tell(&why.to_string()),
            (Ok(_), _) => self.tell(&format!("process {} is dropped: {fault}", self.pid)),
        }
    }

    /// Says why it is not served any longer.
    fn tell(&self, why: &str) {
        self.user.common.refusals.tell(self.uid, self.pid, why);
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

    /// Whether it has just come: nothing is known of its memory yet, and no answer is long overdue.
    pub(crate) fn is_new(&self) -> bool {
        // That none was offered says nothing in its first seconds.
        let offers = || self.counters.regions.load(Relaxed) > 0;
        let is_known = self.scanned.load(Acquire) && (offers() || self.came.elapsed() > OFFERING);
        let answers = self.is_awaited() || self.settles();
        self.standing() == Standing::Served && !is_known && answers
    }

    /// Whether it has come so lately that a late answer says nothing.
    pub(crate) fn settles(&self) -> bool {
        self.came.elapsed() < SETTLING
    }

    /// Notes that all its memory has been looked at.
    pub(crate) fn note_scan(&self) {
        self.scanned.store(true, Release);
    }

    /// Whether an answer of the agent has come that no worker has taken yet.
    pub(crate) fn has_answer(&self) -> bool {
        let talk = self.talk.try_lock(); // else a worker takes it
        let talk = talk.as_ref().filter(|talk| talk.pending.is_some());
        let link = talk.and_then(|talk| talk.link.as_ref());
        link.is_some_and(|link| link.has_answer())
    }

    /// Whether the guest takes jobs in this round.
    pub(crate) fn takes_jobs(&self, patience: Duration) -> bool {
        let overtime = Duration::from_nanos(self.overtime_ns.load(Relaxed));
        let may = self.is_looked_at() && !self.is_held_up();
        may && self.is_responsive() && overtime <= patience * 4
    }

    /// Notes whether the agent owes an answer.
    pub(crate) fn set_late(&self, late: bool) {
        if self.late.swap(late, AcqRel) != late {
            tracing::debug!(pid = self.pid, late, "the agent's answers");
        }
    }

    /// Notes how long the agent took over `pages` pages. An honest one needs less than 20 µs a page;
    /// one that piles up more than four times the patience rests until the next round.
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

    /// Why no more `bytes` of tables may be had.
    pub(crate) fn lacks_room(&self, bytes: u64) -> Option<AtLimit> {
        let (limits, mib) = (&self.user.common.limits, 1 << 20);
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
    pub(crate) fn note_limit(&self, at_limit: Option<AtLimit>) {
        let short = self.short_of_slots.load(Relaxed);
        let at_limit = at_limit.or(short.then_some(AtLimit::Store));
        let mut noted = lock(&self.at_limit);
        if let Some(why) = at_limit.filter(|_| at_limit != *noted) {
            let (pid, uid) = (self.pid, self.uid);
            let why = why.describe(&self.user.common.limits);
            self.user.say(|| tracing::warn!(pid, uid, "{why}"));
        }
        *noted = at_limit;
    }

    /// Why some of its memory is left alone, in words.
    pub(crate) fn at_limit(&self) -> Option<String> {
        let why = *lock(&self.at_limit);
        why.map(|why| why.describe(&self.user.common.limits))
    }

    /// Notes whether there was room for slots of its pages.
    pub(crate) fn set_short_of_slots(&self, short: bool) {
        self.short_of_slots.store(short, Relaxed);
    }

    /// Notes that a table that had `before` bytes has `now`.
    pub(crate) fn change_tables(&self, before: usize, now: usize) {
        let (before, now) = (before as u64, now as u64);
        let tables = &self.counters.table_bytes;
        tables.fetch_add(now.wrapping_sub(before), Relaxed);
        self.user.note_tables(before, now);
    }

    /// Notes how many bytes of tables the guest takes.
    pub(crate) fn note_tables(&self, bytes: u64) {
        let before = self.counters.table_bytes.swap(bytes, Relaxed);
        self.user.note_tables(before, bytes);
    }

    /// Begins a round: the guest rests no more, and no chunk is worked before the look.
    pub(crate) fn begin_round(&self) {
        self.overtime_ns.store(0, Relaxed);
        self.looked_at.store(false, Release);
        if let Some(mut talk) = self.talk.try_lock() {
            talk.spent = Duration::ZERO;
        }
    }

    /// Notes that the agent did not answer in this round: in the next one work does not wait for it.
    pub(crate) fn note_silence(&self) {
        self.set_late(true);
        self.awaited.store(false, Release);
    }

    /// Notes that the look of this round is done.
    pub(crate) fn end_look(&self) {
        self.set_late(false);
        self.awaited.store(true, Release);
        self.looked_at.store(true, Release);
    }

    /// Whether it has been looked at in this round.
    pub(crate) fn is_looked_at(&self) -> bool {
        self.looked_at.load(Acquire)
    }

    /// Whether work waits for its answer.
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited.load(Acquire)
    }

    /// Notes that a thread sleeps in a look at its memory. No other thread looks before it is back.
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

    /// Whether one does, or as many as may in looks at the memory of its user's guests.
    pub(crate) fn is_held_up(&self) -> bool {
        self.is_stuck() || self.user.is_stuck()
    }

    /// Ends the service because its memory cannot be looked at, unless it was the look that was given up.
    pub(crate) fn fail(&self, error: std::io::Error) {
        if !is_given_up(&error) {
            self.condemn(&Fault::Unreadable(error));
        }
    }

    /// Notes whether broken pages may be merged again in this round.
    pub(crate) fn set_merges_again(&self, on: bool) {
        self.merges_again.store(on, Relaxed);
    }

    /// Whether broken pages may be merged again in this round.
    pub(crate) fn merges_again(&self) -> bool {
        self.merges_again.load(Relaxed)
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
        self.domain.drop_refs(&mut settled);
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
        let empty = |offers: Guard<'_, Offers>| offers.chunks.is_empty();
        !self.is_stuck() && self.offers.try_lock().is_some_and(empty)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.note_tables(0);
    }
}
