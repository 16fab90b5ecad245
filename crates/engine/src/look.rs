//! A look at one guest, the first half of a round: late answers, news from the agent, the scan.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use sys::pagemap::{Categories, PageRun};
use wire::{Answer, CHUNK_BYTES, CHUNK_PAGES, Changes, PAGE_BYTES, Question, RunMode};

use crate::ask;
use crate::calm;
use crate::chunk::Chunk;
use crate::guest::{Fault, Guest, Link, Pending, Standing, Talk};
use crate::nodes::{Patrol, Rules};
use crate::offers::Sweep;
use crate::page::Class;
use crate::realm::{Effects, lock};
use crate::track::{self, Again, Round, Seen};

/// How long an agent may take for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Parts of one sync's answer that are taken in one round.
const MAX_PARTS: usize = 1 << 14;
/// Rounds after which the mappings of a quiet guest are counted again.
const RECOUNT: u64 = 16;
/// The bound on a guest's mappings counts as loose when this part of it is a guess, and matters when it is
/// over this part of what the guest may have.
const QUARTER: u64 = 4;

/// What a look needs besides the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) round: Round,
    pub(crate) mode: RunMode,
    pub(crate) patience: Duration,
    /// Whether to scan; without, only merged pages to unmerge are found.
    pub(crate) scan: bool,
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
                scan: false,
                ..self
            },
        }
    }

    /// How the broken pages of `guest` are treated. Asks the guest's descriptors what they are.
    fn again(&self, guest: &Guest) -> Again {
        let pins = || guest.memory.pins();
        Again {
            allowed: self.merge_again && guest.note_pins(pins()),
            ages: self.round.0.is_multiple_of(self.broken_rounds.max(1)),
        }
    }
}

/// Looks at `guest`; `found` gets the chunks with work.
pub(crate) fn look(
    guest: &Arc<Guest>,
    terms: Terms,
    effects: &mut Effects,
    runs: &mut [PageRun],
    found: &mut Vec<Arc<Chunk>>,
) {
    guest.begin_round();
    if guest.standing() == Standing::Served && guest.memory.has_exited() {
        guest.condemn(&Fault::Closed);
    }
    let served = guest.standing() == Standing::Served;
    if served && catch_up(guest, terms, effects) {
        let terms = terms.of(guest);
        guest.settle();
        if let Err(error) = guest.claim(effects) {
            guest.condemn(&Fault::Unreadable(error));
        }
        if terms.scan {
            let scanned = scan(guest, terms, effects, runs, found);
            guest.realm.apply(guest, effects);
            if let Err(error) = scanned {
                guest.condemn(&Fault::Unreadable(error));
            }
            recount(guest, terms);
        } else if terms.mode == RunMode::Unmerge {
            find_merged(guest, found);
        }
        guest.part();
    }
    if guest.standing() != Standing::Served {
        retire(guest, effects);
    }
    let tables = lock(&guest.offers).memory_bytes() + lock(&guest.ledger).memory_bytes();
    guest.note_tables(tables as u64);
}

/// Takes answers that are owed, then asks what changed. False when the agent still owes one.
fn catch_up(guest: &Arc<Guest>, terms: Terms, effects: &mut Effects) -> bool {
    let Ok(mut talk) = guest.talk.try_lock() else {
        return false; // a worker is stuck
    };
    let caught_up = take_pending(guest, &mut talk, terms.patience, effects)
        .and_then(|free| Ok(free && sync(guest, &mut talk, terms.patience, effects)?));
    let caught_up = caught_up.unwrap_or_else(|fault| {
        guest.condemn(&fault);
        false
    });
    guest.set_late(talk.pending.is_some());
    caught_up && guest.standing() == Standing::Served
}

fn take_pending(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    patience: Duration,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    let Some(pending) = talk.pending.take() else {
        return Ok(true);
    };
    if let Pending::Changes = pending {
        return take_changes(guest, talk, Duration::ZERO, effects);
    }
    let link = talk.link.as_mut().ok_or(Fault::Closed)?;
    let wait = match pending {
        Pending::Ready(_) => patience, // it is on its way
        _ => Duration::ZERO,
    };
    let Some(answer) = link.receive(wait)? else {
        if let Pending::Ready(since) = pending
            && since.elapsed() > HANDSHAKE
        {
            return Err(Fault::Silent(HANDSHAKE));
        }
        talk.pending = Some(pending);
        return Ok(false);
    };
    take_late(guest, &pending, &answer, effects)?;
    guest.realm.apply(guest, effects);
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
            tracing::info!(
                pid = guest.pid,
                domain = guest.realm.domain,
                "a guest joins"
            );
            Ok(())
        }
        (Pending::Ready(_), &Answer::Failed { errno, step }) => Err(Fault::Failed { step, errno }),
        (Pending::Merged(chunk, enclosed), Answer::Merged(merged)) => {
            let mut pages = chunk.try_lock().ok_or(Fault::Stuck)?;
            let taken = ask::take_merged(guest, chunk, &mut pages, (merged, *enclosed), effects);
            guest.counters.take_over(&mut pages);
            taken
        }
        (
            Pending::Unmerged(chunk, asked),
            &Answer::Unmerged {
                cpu_ns,
                pages: private,
            },
        ) => {
            let mut pages = chunk.try_lock().ok_or(Fault::Stuck)?;
            let parts = (*asked, private, cpu_ns);
            let taken = ask::take_unmerged(guest, chunk, &mut pages, parts, effects);
            guest.counters.take_over(&mut pages);
            taken
        }
        _ => Err(Fault::Contradiction("an answer to another question")),
    }
}

fn sync(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    patience: Duration,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    if !guest.compare()? {
        return Ok(false);
    }
    let link = talk.link.as_mut().ok_or(Fault::Closed)?;
    let renew = lock(&guest.ledger).wants_renewal() && give_line(guest, link.as_mut());
    let adopted = guest.take_adopted();
    link.send(&Question::Sync {
        lifeline: renew,
        adopted,
    })?;
    take_changes(guest, talk, patience, effects)
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

/// Takes the parts of an answer to a sync; false when some are still to come.
fn take_changes(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    patience: Duration,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    let begin = Instant::now();
    let taken = take_parts(guest, talk, patience, effects);
    guest.note_talk(begin.elapsed());
    taken
}

fn take_parts(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    patience: Duration,
    effects: &mut Effects,
) -> Result<bool, Fault> {
    let link = talk.link.as_mut().ok_or(Fault::Closed)?;
    let deadline = Instant::now() + patience * 4;
    for _ in 0..MAX_PARTS {
        match link.receive(patience)? {
            Some(Answer::Changes(changes)) => {
                take_part(guest, &changes, effects)?;
                if !changes.more {
                    return Ok(true);
                }
            }
            Some(_) => return Err(Fault::Contradiction("not the answer to a sync")),
            None => break,
        }
        if Instant::now() > deadline && !patience.is_zero() {
            break;
        }
    }
    talk.pending = Some(Pending::Changes);
    Ok(false)
}

fn take_part(guest: &Arc<Guest>, changes: &Changes, effects: &mut Effects) -> Result<(), Fault> {
    let counters = &guest.counters;
    counters.cpu_ns.fetch_max(changes.cpu_ns, Relaxed);
    counters.agent_bytes.store(changes.memory_bytes, Relaxed);
    let mut offers = lock(&guest.offers);
    for change in changes.entries() {
        offers.change(guest, change, effects)?;
    }
    guest.realm.apply(guest, effects);
    Ok(())
}

fn scan(
    guest: &Arc<Guest>,
    terms: Terms,
    effects: &mut Effects,
    runs: &mut [PageRun],
    found: &mut Vec<Arc<Chunk>>,
) -> std::io::Result<()> {
    let again = terms.again(guest);
    guest.set_merges_again(again.allowed);
    let mut offers = lock(&guest.offers);
    let ranges = offers.scans().to_vec();
    guest.counters.regions.store(ranges.len() as u64, Relaxed);
    let mut unseen = Ok(());
    let mut patrol = Patrol::new(guest, terms.rules);
    let mut calm = lock(&guest.calm);
    let mut glance = calm.begin(terms.mode == RunMode::Unmerge);
    let mut stirred = Vec::new();
    let mut sweep = Sweep::new(guest, &mut offers, |chunk: &Arc<Chunk>, seen: &Seen| {
        let Some(mut pages) = chunk.try_lock() else {
            return; // a worker is stuck with it
        };
        let mut seen = *seen;
        if track::needs_second_look(&pages, &seen)
            && let Err(error) = look_again(guest, chunk, &mut seen)
        {
            unseen = Err(error);
            return;
        }
        let now = (terms.round, again);
        let observed = track::observe(chunk, &mut pages, &seen, now, effects);
        let mut waiting = observed.waits;
        if terms.mode == RunMode::Run {
            waiting |= patrol.check(chunk, &mut pages, effects);
        }
        guest.counters.take_over(&mut pages);
        let wanted = match terms.mode {
            RunMode::Run => waiting || chunk.has_promoted(),
            RunMode::Stop => waiting && has_plans(&pages),
            RunMode::Unmerge => waiting && has_plans(&pages) || pages.count(Class::Merged) > 0,
        };
        if wanted && chunk.enqueue() {
            found.push(Arc::clone(chunk));
        }
        if wanted || observed.stirs {
            stirred.push(chunk.address);
        }
    });
    for range in ranges.into_iter().flat_map(calm::blocks) {
        if glance.leaves_out(range.start) {
            sweep.leave_out(&range);
            continue;
        }
        let mut at = range.start;
        while at < range.end {
            let (filled, next) = guest.memory.scan(at..range.end, runs)?;
            runs.iter().take(filled).for_each(|run| sweep.add(run));
            if next <= at {
                break;
            }
            at = next;
        }
    }
    sweep.finish();
    glance.end(&stirred);
    patrol.end();
    unseen
}

/// Adds to `seen` which pages of the chunk are a file's.
fn look_again(guest: &Guest, chunk: &Chunk, seen: &mut Seen) -> std::io::Result<()> {
    let mut runs = [PageRun::default(); CHUNK_PAGES];
    let range = chunk.address..chunk.address + CHUNK_BYTES as u64;
    let (filled, _) = guest.memory.peek(range, &mut runs)?;
    let page = |at: u64| usize::try_from((at - chunk.address) / PAGE_BYTES as u64).unwrap_or(0);
    for run in runs.iter().take(filled) {
        if run.categories.has(Categories::FILE) {
            seen.add_file(page(run.start), page(run.end));
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

fn has_plans(pages: &crate::pages::Pages) -> bool {
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
    if (due || (terms.round.0 + guest.number).is_multiple_of(RECOUNT))
        && let Some(vmas) = guest.memory.mappings()
    {
        counters.vmas.store(vmas, Relaxed);
        counters.vmas_added.store(0, Relaxed);
    }
}

/// Ends the connection and moves all refs to the lifelines' ledger; frees what is free already.
fn retire(guest: &Guest, effects: &mut Effects) {
    if let Ok(mut talk) = guest.talk.try_lock() {
        talk.link = None;
        talk.pending = None;
    }
    guest.bury();
    guest.memory.rescue(false);
    lock(&guest.offers).withdraw_all(guest, effects);
    guest.realm.apply(guest, effects);
    guest.settle();
}
