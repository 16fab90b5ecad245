//! A look at one guest, the first half of a round: late answers, news from the agent, the scan.

use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use std::vec;

use sys::pagemap::{Categories, PageRun};
use wire::{Answer, CHUNK_BYTES, CHUNK_PAGES, Question, RunMode};

use crate::domain::chunk::Chunk;
use crate::domain::effects::Effects;
use crate::domain::pages::Pages;
use crate::guest::agent::{Fault, Link, Pending, Rest, Talk};
use crate::guest::idle::{self, Glance};
use crate::guest::regions::Scan;
use crate::guest::{Guest, Standing, rescue};
use crate::options::Rules;
use crate::page::Class;
use crate::scan::offers::{News, Sweep, place};
use crate::scan::relocation::{Patrol, strays};
use crate::scan::track::{self, Again, Round, Seen};
use crate::scan::{claim, outcomes};
use crate::sync::lock;

/// How long an agent may take for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a worker takes parts of a sync's answer, and how long it scans, before others have their turn.
const SYNC_TIME: Duration = Duration::from_millis(20);
const SCAN_TIME: Duration = Duration::from_millis(20);
/// Rounds after which the mappings of a quiet guest are counted again.
const RECOUNT: u64 = 16;
/// The bound on a guest's mappings counts as loose when this part of it is a guess. It matters when it is
/// over this part of what the guest may have.
const QUARTER: u64 = 4;

/// What a look is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// To hear the agent, and to retire a guest that has ended; of its memory only merged pages to unmerge are found.
    Hear,
    /// The look of a round: all memory is scanned.
    Round,
    /// The look of a pass: the memory between these addresses is scanned. What is not seen `until` then is left to the rounds.
    Pass {
        start: u64,
        end: u64,
        until: Instant,
        /// Somebody wants it merged now: it settles at once.
        at_once: bool,
    },
}

impl Aim {
    /// To merge now what overlaps `range`. What is known is known of whole chunks.
    pub(crate) fn now(range: &Range<u64>, until: Instant) -> Self {
        const CHUNK: u64 = CHUNK_BYTES as u64;
        Self::Pass {
            start: range.start / CHUNK * CHUNK,
            end: range
                .end
                .checked_next_multiple_of(CHUNK)
                .unwrap_or(u64::MAX),
            until,
            at_once: true,
        }
    }

    /// An early look at a young guest.
    pub(crate) fn early(until: Instant) -> Self {
        Self::Pass {
            start: 0,
            end: u64::MAX,
            until,
            at_once: false,
        }
    }

    /// Whether no time is left for looks.
    fn is_over(self) -> bool {
        matches!(self, Self::Pass { until, .. } if until <= Instant::now())
    }

    fn is_now(self) -> bool {
        matches!(self, Self::Pass { at_once: true, .. })
    }

    /// Whether it is a look of a pass, which comes between two rounds.
    fn is_pass(self) -> bool {
        matches!(self, Self::Pass { .. })
    }

    /// Until when a worker scans now.
    fn deadline(self) -> Instant {
        let turn = Instant::now() + SCAN_TIME;
        match self {
            Self::Pass { until, .. } => turn.min(until),
            Self::Hear | Self::Round => turn,
        }
    }

    /// Where the next scan of `guest` goes on. A pass has a place of its own: or with wishes enough no round would ever
    /// come to the end.
    fn progress(self, guest: &Guest) -> &AtomicU64 {
        match self.is_pass() {
            true => &guest.pass_progress,
            false => &guest.progress,
        }
    }

    /// The addresses that are scanned.
    fn reach(self) -> Range<u64> {
        match self {
            Self::Pass { start, end, .. } => start..end,
            Self::Hear | Self::Round => 0..u64::MAX,
        }
    }
}

/// What a look needs besides the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) round: Round,
    /// The number of the agent's next sync. It is not the round's: pages of a round grow older with time.
    pub(crate) sync: u64,
    pub(crate) mode: RunMode,
    pub(crate) patience: Duration,
    pub(crate) aim: Aim,
    pub(crate) rules: Rules,
    /// Whether broken pages are merged again where that is safe.
    pub(crate) merge_again: bool,
    /// Mappings a guest may have, by `vm.max_map_count`.
    pub(crate) max_mappings: u64,
    /// Rounds after which a broken page is older by one.
    pub(crate) broken_rounds: u64,
}

impl Terms {
    /// For a guest that leaves its domain nothing is left but to be unmerged.
    fn of(self, guest: &Guest) -> Self {
        match guest.leaves() {
            false => self,
            true => Self {
                mode: RunMode::Unmerge,
                aim: Aim::Hear,
                ..self
            },
        }
    }

    /// How pages of `guest` grow older in this look. When a round's look `begins`, the guest's descriptors are asked what
    /// they are, as often as broken pages grow older. A page is written when it is pinned, so it settles only after two such looks.
    fn again(&self, guest: &Guest, begins: bool) -> Again {
        let in_pass = self.aim.is_pass();
        // In a pass too little time has passed.
        let ages = !in_pass && self.round.0.is_multiple_of(self.broken_rounds.max(1));
        let is_clean = || match ages || guest.wants_pins() {
            true => guest.note_pins(guest.memory.pins(guest.user.limits.descriptors_per_process)),
            false => guest.is_clean(),
        };
        Again {
            allowed: match begins && !in_pass {
                true => self.merge_again && is_clean(),
                false => guest.merges_again(),
            },
            at_once: self.aim.is_now(),
            in_pass,
            ages,
        }
    }
}

/// How far a look came.
pub(crate) enum Looked {
    /// Done, as far as there was something to look at.
    Done,
    /// It goes on when the agent has answered.
    Waits,
    /// It goes on when others had their turn.
    GoesOn,
}

/// Looks at `guest`; `found` gets the chunks with work.
pub(crate) fn look(
    guest: &Arc<Guest>,
    terms: Terms,
    effects: &mut Effects,
    runs: &mut [PageRun],
    found: &mut Vec<Arc<Chunk>>,
) -> Looked {
    if guest.standing() == Standing::Served && guest.memory.has_exited() {
        let talk = guest.talk.try_lock();
        guest.condemn(&talk.map_or(Fault::Closed, |mut talk| {
            last_word(&mut talk, Fault::Closed)
        }));
    }
    let served = guest.standing() == Standing::Served;
    if served && (guest.is_stuck() || guest.user.is_stuck()) {
        return Looked::Done; // and not ready: its chunks wait, too
    }
    if served && terms.aim.is_over() {
        guest.cut_look_short();
        return Looked::Done; // likewise
    }
    if served {
        match catch_up(guest, terms, effects) {
            Caught::Up => {}
            Caught::Waits => return Looked::Waits,
            Caught::Never => {
                guest.set_late(true);
                guest.set_awaited(false);
                return Looked::Done;
            }
        }
        guest.part();
    }
    let mut goes_on = false;
    if guest.standing() == Standing::Served {
        goes_on = look_at_memory(guest, terms.of(guest), effects, runs, found);
        guest.part();
    }
    if goes_on && terms.aim.is_over() {
        guest.cut_look_short();
        goes_on = false; // and what it found is worked
    }
    if guest.standing() != Standing::Served {
        retire(guest, effects);
    } else if goes_on {
        return Looked::GoesOn;
    } else if !guest.is_stuck() {
        guest.set_awaited(true);
        guest.end_look();
    }
    if !guest.is_stuck() {
        let offers = lock(&guest.offers);
        let tables = offers.memory_bytes() + lock(&guest.ledger).memory_bytes();
        guest.note_refusal(offers.refusal());
        guest.note_tables(tables as u64);
    }
    Looked::Done
}

/// The part of a look for which the agent is not needed; true when there is more to see.
fn look_at_memory(
    guest: &Arc<Guest>,
    terms: Terms,
    effects: &mut Effects,
    runs: &mut [PageRun],
    found: &mut Vec<Arc<Chunk>>,
) -> bool {
    guest.settle();
    if let Err(error) = claim::claim(guest, effects) {
        guest.fail(error);
    }
    let mut goes_on = false;
    if terms.aim != Aim::Hear {
        let scanned = scan(guest, terms, effects, runs, found);
        match scanned {
            Ok(more) => goes_on = more,
            Err(error) => guest.fail(error),
        }
        if !goes_on {
            recount(guest, terms);
        }
    } else if terms.mode == RunMode::Unmerge {
        find_merged(guest, found);
    }
    goes_on
}

/// Whether the agent has told all it has to.
enum Caught {
    Up,
    Waits,
    /// Not in this round.
    Never,
}

/// Takes answers that are owed, then asks what changed.
fn catch_up(guest: &Arc<Guest>, terms: Terms, effects: &mut Effects) -> Caught {
    let Some(mut talk) = guest.talk.try_lock() else {
        return Caught::Never; // a worker is stuck
    };
    let most = terms.patience * 4;
    match hear(guest, &mut talk, terms.sync, effects) {
        Ok(true) => Caught::Up,
        Ok(false) if talk.pending.is_none() || talk.spent > most => Caught::Never,
        Ok(false) => Caught::Waits,
        Err(fault) => {
            guest.condemn(&last_word(&mut talk, fault));
            Caught::Up
        }
    }
}

/// The reason that the agent gave before it left, if it gave one.
fn last_word(talk: &mut Talk, fault: Fault) -> Fault {
    let closed = matches!(fault, Fault::Closed);
    let link = talk.link.as_mut().filter(|_| closed);
    match link.map(|link| link.receive(Duration::ZERO)) {
        Some(Err(why @ Fault::Failed { .. })) => why,
        _ => fault,
    }
}

/// Takes what has come, and asks once for each number; false when the agent owes an answer.
fn hear(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    number: u64,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    loop {
        if talk.pending.is_some() {
            if !take_pending(guest, talk, effects)? {
                return Ok(false);
            }
        } else if talk.synced == Some(number) {
            return Ok(true);
        } else if sync(guest, talk)? {
            talk.synced = Some(number);
        } else {
            return Ok(false); // and nothing was asked
        }
    }
}

fn take_pending(guest: &Arc<Guest>, talk: &mut Talk, effects: &mut Effects) -> Result<bool, Fault> {
    let Some(pending) = talk.pending.take() else {
        return Ok(true);
    };
    if let Pending::Changes(rest) = pending {
        return take_changes(guest, talk, rest, effects);
    }
    let link = talk.link.as_mut().ok_or(Fault::Closed)?;
    let Some(answer) = link.receive(Duration::ZERO)? else {
        if let Pending::Ready(since) = pending
            && since.elapsed() > HANDSHAKE
        {
            return Err(Fault::Silent(HANDSHAKE));
        }
        talk.pending = Some(pending);
        return Ok(false);
    };
    take_late(guest, &pending, &answer, effects)?;
    Ok(true)
}

fn take_late(
    guest: &Guest,
    pending: &Pending,
    answer: &Answer,
    effects: &mut Effects,
) -> Result<(), Fault> {
    match (pending, answer) {
        (Pending::Ready(_), &Answer::Ready(ready)) => {
            // A stranger's execve may hold up who opens its memory: a guest that has left is not waited for.
            if guest.memory.has_left() {
                return Err(Fault::Closed);
            }
            guest.enter(ready)?;
            let domain = &guest.domain.name;
            let joins = || tracing::info!(pid = guest.pid, domain, "a guest joins");
            guest.user.say(joins);
            Ok(())
        }
        (Pending::Ready(_), &Answer::Failed { errno, step }) => Err(Fault::Failed { step, errno }),
        (Pending::Merged(chunk, enclosed), Answer::Merged(merged)) => {
            let mut change = guest.change(chunk, effects).ok_or(Fault::Stuck)?;
            let (pages, effects) = change.parts();
            outcomes::take_merged(guest, chunk, pages, (merged, *enclosed), effects)
        }
        (
            Pending::Unmerged(chunk, asked),
            &Answer::Unmerged {
                cpu_ns,
                pages: private,
            },
        ) => {
            let mut change = guest.change(chunk, effects).ok_or(Fault::Stuck)?;
            let (pages, effects) = change.parts();
            outcomes::take_unmerged(guest, chunk, pages, (*asked, private, cpu_ns), effects)
        }
        _ => Err(Fault::Contradiction("an answer to another question")),
    }
}

fn sync(guest: &Guest, talk: &mut Talk) -> Result<bool, Fault> {
    if !guest.compare()? {
        return Ok(false);
    }
    let link = talk.link.as_mut().ok_or(Fault::Closed)?;
    let wants_renewal = {
        let mut ledger = lock(&guest.ledger);
        ledger.begin_sync();
        ledger.wants_renewal()
    };
    let renew = wants_renewal && give_line(guest, link.as_mut());
    let adopted = guest.take_adopted();
    link.send(&Question::Sync {
        lifeline: renew,
        adopted,
    })?;
    talk.pending = Some(Pending::Changes(None));
    Ok(true)
}

/// Gives the guest a new lifeline with the next sync. Without one its refs wait: a daemon that has no
/// descriptors left still serves those it serves.
fn give_line(guest: &Guest, link: &mut dyn Link) -> bool {
    match link.lifeline() {
        Ok(line) => lock(&guest.ledger).renew(line),
        Err(error) => {
            tracing::warn!(pid = guest.pid, %error, "no new lifeline for a guest");
            return false;
        }
    }
    true
}

/// Takes the parts of an answer to a sync that have come, the `rest` of the last one first; false when some are still
/// to come or to take.
fn take_changes(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    rest: Option<Box<Rest>>,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    let begin = Instant::now();
    let taken = take_parts(guest, talk, rest, begin + SYNC_TIME, effects);
    let took = begin.elapsed();
    talk.spent += took;
    guest.note_talk(took);
    taken
}

fn take_parts(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    mut rest: Option<Box<Rest>>,
    deadline: Instant,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    let mut news = News::default();
    loop {
        let link = talk.link.as_mut().ok_or(Fault::Closed)?;
        let part = match rest.take() {
            Some(rest) => Some(rest),
            None => next_part(link.as_mut())?,
        };
        let Some(mut part) = part else {
            talk.pending = Some(Pending::Changes(None));
            return Ok(false);
        };
        if !take_part(guest, &mut part, &mut news, deadline, effects)? {
            talk.pending = Some(Pending::Changes(Some(part)));
            return Ok(false);
        }
        if !part.changes.more {
            return Ok(true);
        }
    }
}

fn next_part(link: &mut dyn Link) -> Result<Option<Box<Rest>>, Fault> {
    match link.receive(Duration::ZERO)? {
        Some(Answer::Changes(changes)) => Ok(Some(Box::new(Rest { changes, taken: 0 }))),
        Some(_) => Err(Fault::Contradiction("not the answer to a sync")),
        None => Ok(None),
    }
}

/// Takes a part of an answer; false when there was no time for all of it.
fn take_part(
    guest: &Arc<Guest>,
    part: &mut Rest,
    news: &mut News,
    deadline: Instant,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    let counters = &guest.counters;
    counters.cpu_ns.fetch_max(part.changes.cpu_ns, Relaxed);
    counters
        .agent_bytes
        .store(part.changes.memory_bytes, Relaxed);
    let mut offers = lock(&guest.offers);
    let entries = part.changes.entries().iter().skip(part.taken);
    let mut taken = 0;
    for change in entries {
        offers.change(guest, change, news, effects);
        taken += 1;
        if Instant::now() > deadline {
            break;
        }
    }
    part.taken += taken;
    Ok(part.taken == part.changes.entries().len())
}

/// Scans what is watched, for [`SCAN_TIME`] at most; true when there is more of it.
fn scan(
    guest: &Arc<Guest>,
    terms: Terms,
    effects: &mut Effects,
    runs: &mut [PageRun],
    found: &mut Vec<Arc<Chunk>>,
) -> std::io::Result<bool> {
    let (aim, deadline) = (terms.aim, terms.aim.deadline());
    let progress = aim.progress(guest);
    let from = progress.load(Relaxed);
    let begins = from == 0;
    if begins && aim.is_pass() && !guest.may_settle_at_once() {
        return Ok(false);
    }
    let again = terms.again(guest, begins);
    guest.set_merges_again(again.allowed);
    let mut observer = Observer {
        guest,
        terms,
        again,
        patrol: Patrol::new(guest, terms.rules, begins),
        effects,
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
    if next.is_none() && !aim.is_now() {
        guest.counters.end_scan();
    }
    Ok(next.is_some())
}

/// Takes over what a scan shows of each chunk.
struct Observer<'a> {
    guest: &'a Guest,
    terms: Terms,
    again: Again,
    patrol: Patrol<'a>,
    effects: &'a mut Effects,
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
        let (guest, mode, aim) = (self.guest, self.terms.mode, self.terms.aim);
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
        let first = from.max(reach.start);
        let mut walk = Walk {
            guest,
            runs,
            glance: idle.begin(all && from == 0),
            worn: worn.into_iter().peekable(),
            rested: 0,
            sweep: Sweep::new(guest, &mut offers, first, |chunk: &_, seen: &_| {
                self.observe(chunk, *seen);
            }),
        };
        let ranges = ranges
            .into_iter()
            .map(|range| range.start.max(reach.start)..range.end.min(reach.end));
        let next = walk.go(ranges.flat_map(idle::blocks), deadline)?.or(rest);
        let next = next.filter(|&next| next < reach.end);
        walk.sweep.finish(next.unwrap_or(reach.end));
        walk.glance.end(&self.stirred, from, next);
        Ok(next)
    }

    /// Takes over what was `seen` of a chunk, and notes the chunk if it has work.
    fn observe(&mut self, chunk: &Arc<Chunk>, mut seen: Seen) {
        let (guest, terms) = (self.guest, self.terms);
        let Some(mut change) = guest.change(chunk, self.effects) else {
            return; // a worker is stuck with it
        };
        let (pages, effects) = change.parts();
        if track::needs_second_look(pages, &seen)
            && let Err(error) = look_again(guest, chunk, &mut seen)
        {
            self.unseen = Err(error);
            return;
        }
        let worn = seen.worn(pages);
        let now = (terms.round, self.again);
        let observed = track::observe(chunk, pages, &seen, now, effects);
        let mut waits = observed.waits;
        if terms.mode == RunMode::Run && !terms.aim.is_pass() {
            waits |= self.patrol.check(chunk, pages, effects);
            waits |= !strays(guest, pages, terms.rules).is_empty();
        }
        let wanted = has_work(terms.mode, chunk, pages, waits);
        if wanted && chunk.enqueue() {
            self.found.push(Arc::clone(chunk));
        }
        pages.unread = seen.unread(pages);
        let merged = u32::try_from(pages.count(Class::Merged)).unwrap_or(u32::MAX);
        if !terms.aim.is_pass() {
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

/// The way of a scan through the memory, which leaves out idle blocks and chunks that rest.
struct Walk<'a, F> {
    guest: &'a Guest,
    runs: &'a mut [PageRun],
    glance: Glance<'a>,
    /// The chunks that rest, in ascending order.
    worn: Peekable<vec::IntoIter<Arc<Chunk>>>,
    /// Where the last of them that was left out ends.
    rested: u64,
    sweep: Sweep<'a, F>,
}

impl<F: FnMut(&Arc<Chunk>, &Seen)> Walk<'_, F> {
    /// Scans these parts of blocks; gives where it stopped for the `deadline`, which it does between blocks only.
    fn go(
        &mut self,
        parts: impl Iterator<Item = Range<u64>>,
        deadline: Instant,
    ) -> std::io::Result<Option<u64>> {
        for part in parts {
            if Instant::now() > deadline && self.glance.begins_block(part.start) {
                return Ok(Some(part.start));
            }
            match self.glance.leaves_out(part.start) {
                true => self.sweep.leave_out(&part),
                false => self.pass_worn(&part)?,
            }
        }
        Ok(None)
    }

    /// Scans a range, except for chunks that rest. It may be a part of a chunk only.
    fn pass_worn(&mut self, range: &Range<u64>) -> std::io::Result<()> {
        let mut from = range.start.max(self.rested);
        while let Some(chunk) = self.worn.next_if(|chunk| chunk.address < range.end) {
            let end = chunk.address + CHUNK_BYTES as u64;
            // Its block may have been left out.
            if end > from {
                self.scan(from..chunk.address)?;
                self.sweep.leave_out(&(chunk.address..end));
                chunk.worn.leave_out();
                (from, self.rested) = (end, end);
            }
        }
        self.scan(from..range.end)
    }

    fn scan(&mut self, range: Range<u64>) -> std::io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let (filled, next) = self.guest.memory.scan(at..range.end, self.runs)?;
            let found = self.runs.iter().take(filled);
            found.for_each(|run| self.sweep.add(run));
            if next <= at {
                break;
            }
            at = next;
        }
        Ok(())
    }
}

/// Adds to `seen` which pages of the chunk are a file's.
fn look_again(guest: &Guest, chunk: &Chunk, seen: &mut Seen) -> std::io::Result<()> {
    let mut runs = [PageRun::default(); CHUNK_PAGES];
    let range = chunk.address..chunk.address + CHUNK_BYTES as u64;
    let (filled, _) = guest.memory.peek(range, &mut runs)?;
    for run in runs.iter().take(filled) {
        if run.categories.has(Categories::FILE) {
            seen.add_file(
                place(chunk.address, run.start),
                place(chunk.address, run.end),
            );
        }
    }
    Ok(())
}

fn find_merged(guest: &Guest, found: &mut Vec<Arc<Chunk>>) {
    for chunk in lock(&guest.offers).chunks.values() {
        let merged = chunk
            .try_lock()
            .is_some_and(|pages| pages.count(Class::Merged) > 0);
        if merged && chunk.enqueue() {
            found.push(Arc::clone(chunk));
        }
    }
}

fn has_plans(pages: &Pages) -> bool {
    let mut busy = pages.busy.pages();
    busy.any(|page| pages.tag(page).is_planned())
}

/// Counting mappings costs about 1 µs each. So it is done when the most that merging can have made of
/// them matters and is a loose bound, when merging has come to rest, and now and then.
fn recount(guest: &Guest, terms: Terms) {
    let counters = &guest.counters;
    let added = counters.vmas_added.load(Relaxed);
    let rests = counters.vmas_seen.swap(added, Relaxed) == added;
    let most = counters.vmas.load(Relaxed) + added;
    let loose = added > most / QUARTER && most > terms.max_mappings / QUARTER;
    let due = added > 0 && (rests || loose);
    let first = counters.vmas.load(Relaxed) == 0;
    if (due || first || (terms.round.0 + guest.number).is_multiple_of(RECOUNT))
        && let Some(vmas) = guest.memory.mappings()
    {
        counters.vmas.store(vmas, Relaxed);
        if first {
            counters.vmas_before.store(vmas, Relaxed);
        }
        counters.vmas_added.store(0, Relaxed);
    }
}

/// Ends the connection and moves all refs to the lifelines' ledger; frees what is free already.
fn retire(guest: &Guest, effects: &mut Effects) {
    if let Some(mut talk) = guest.talk.try_lock() {
        talk.link = None;
        talk.pending = None;
    }
    guest.bury();
    // A thread that sleeps in a look at its memory may hold them; there will be another look.
    if let Some(mut offers) = guest.offers.try_lock() {
        offers.withdraw_all(guest, effects);
    }
    guest.settle();
    // Last, because this may be where the thread stays.
    if !guest.is_stuck() && !guest.user.is_stuck() {
        rescue::bring_back(guest, false);
    }
}
