//! A look at one guest, the first half of a round: late answers, news from the agent, the scan.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use sys::pagemap::PageRun;
use wire::{Answer, Question, RunMode};

use crate::domain::chunk::Chunk;
use crate::guest::agent::{Fault, Pending, Rest, Talk};
use crate::guest::{Guest, Standing, rescue};
use crate::page::Class;
use crate::scan::offers::News;
use crate::scan::terms::{Aim, Terms};
use crate::scan::walk::scan;
use crate::scan::{claim, outcomes};
use crate::sync::lock;

/// How long an agent may take for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a worker takes parts of a sync's answer before others have their turn.
const SYNC_TIME: Duration = Duration::from_millis(20);
/// Rounds after which the mappings of a quiet guest are counted again.
const RECOUNT: u64 = 16;
/// The bound on a guest's mappings counts as loose when this part of it is a guess. It matters when it is
/// over this part of what the guest may have.
const QUARTER: u64 = 4;

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
    if served && guest.is_held_up() {
        return Looked::Done; // and not ready: its chunks wait, too
    }
    if served && terms.aim.is_over() {
        guest.passes.cut_short();
        return Looked::Done; // likewise
    }
    if served {
        if let Err(behind) = catch_up(guest, terms) {
            return behind;
        }
        guest.part();
    }
    let mut goes_on = false;
    if guest.standing() == Standing::Served {
        goes_on = look_at_memory(guest, terms.of(guest), runs, found);
        guest.part();
    }
    if goes_on && terms.aim.is_over() {
        guest.passes.cut_short();
        goes_on = false; // and what it found is worked
    }
    if guest.standing() != Standing::Served {
        retire(guest);
    } else if goes_on {
        return Looked::GoesOn;
    } else if !guest.is_stuck() {
        guest.end_look();
    }
    if !guest.is_stuck() {
        let offers = lock(&guest.offers);
        let tables = offers.memory_bytes() + lock(&guest.ledger).memory_bytes();
        guest.note_limit(offers.at_limit());
        guest.note_tables(tables as u64);
    }
    Looked::Done
}

/// The part of a look for which the agent is not needed; true when there is more to see.
fn look_at_memory(
    guest: &Arc<Guest>,
    terms: Terms,
    runs: &mut [PageRun],
    found: &mut Vec<Arc<Chunk>>,
) -> bool {
    guest.settle();
    if let Err(error) = claim::claim(guest) {
        guest.fail(error);
    }
    let mut goes_on = false;
    if terms.aim != Aim::Hear {
        let scanned = scan(guest, terms, runs, found);
        match scanned {
            Ok(more) => goes_on = more,
            Err(error) => guest.fail(error),
        }
        if !goes_on {
            recount(guest, terms);
        }
    } else if terms.knobs.run == RunMode::Unmerge {
        find_merged(guest, found);
    }
    goes_on
}

/// Takes answers that are owed, then asks what changed.
///
/// # Errors
/// Where the look is left at when the agent has not told all it has to: it may do so later in this round, or in the next one.
fn catch_up(guest: &Arc<Guest>, terms: Terms) -> Result<(), Looked> {
    if let Some(mut talk) = guest.talk.try_lock() {
        let most = terms.patience * 4;
        match hear(guest, &mut talk, terms.sync) {
            Ok(true) => return Ok(()),
            Ok(false) if talk.pending.is_some() && talk.spent <= most => return Err(Looked::Waits),
            Ok(false) => {}
            Err(fault) => {
                guest.condemn(&last_word(&mut talk, fault));
                return Ok(());
            }
        }
    } // else a worker is stuck
    guest.note_silence();
    Err(Looked::Done)
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
fn hear(guest: &Arc<Guest>, talk: &mut Talk, number: u64) -> Result<bool, Fault> {
    loop {
        if talk.pending.is_some() {
            if !take_pending(guest, talk)? {
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

fn take_pending(guest: &Arc<Guest>, talk: &mut Talk) -> Result<bool, Fault> {
    let Some(pending) = talk.pending.take() else {
        return Ok(true);
    };
    if let Pending::Changes(rest) = pending {
        return take_changes(guest, talk, rest);
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
    take_late(guest, &pending, &answer)?;
    Ok(true)
}

fn take_late(guest: &Guest, pending: &Pending, answer: &Answer) -> Result<(), Fault> {
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
        (Pending::Merged(chunk, _) | Pending::Unmerged(chunk, _), _) => {
            let mut change = guest.change(chunk).ok_or(Fault::Stuck)?;
            outcomes::take(&mut change, pending, answer)
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
    let mut renewed = false;
    if wants_renewal {
        match link.lifeline() {
            Ok(line) => {
                lock(&guest.ledger).renew(line);
                renewed = true;
            }
            // Its refs wait: a daemon that has no descriptors left still serves those it serves.
            Err(error) => tracing::warn!(pid = guest.pid, %error, "no new lifeline for a guest"),
        }
    }
    link.send(&Question::Sync {
        lifeline: renewed,
        adopted: guest.take_adopted(),
    })?;
    talk.pending = Some(Pending::Changes(None));
    Ok(true)
}

/// Takes the parts of an answer to a sync that have come, the `rest` of the last one first; false when some are still
/// to come or to take.
fn take_changes(
    guest: &Arc<Guest>,
    talk: &mut Talk,
    rest: Option<Box<Rest>>,
) -> Result<bool, Fault> {
    let begin = Instant::now();
    let taken = take_parts(guest, talk, rest, begin + SYNC_TIME);
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
) -> Result<bool, Fault> {
    let mut news = News::default();
    loop {
        let link = talk.link.as_mut().ok_or(Fault::Closed)?;
        let mut part = match rest.take() {
            Some(rest) => rest,
            None => match link.receive(Duration::ZERO)? {
                Some(Answer::Changes(changes)) => Box::new(Rest { changes, taken: 0 }),
                Some(_) => return Err(Fault::Contradiction("not the answer to a sync")),
                None => {
                    talk.pending = Some(Pending::Changes(None));
                    return Ok(false);
                }
            },
        };
        if !take_part(guest, &mut part, &mut news, deadline)? {
            talk.pending = Some(Pending::Changes(Some(part)));
            return Ok(false);
        }
        if !part.changes.more {
            return Ok(true);
        }
    }
}

/// Takes a part of an answer; false when there was no time for all of it.
fn take_part(
    guest: &Arc<Guest>,
    part: &mut Rest,
    news: &mut News,
    deadline: Instant,
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
        offers.change(guest, change, news);
        taken += 1;
        if Instant::now() > deadline {
            break;
        }
    }
    part.taken += taken;
    Ok(part.taken == part.changes.entries().len())
}

fn find_merged(guest: &Guest, found: &mut Vec<Arc<Chunk>>) {
    for chunk in lock(&guest.offers).chunks.values() {
        let merged = chunk
            .try_lock()
            .is_some_and(|pages| pages.count(Class::Merged) > 0);
        if merged && chunk.enqueue(false) {
            found.push(Arc::clone(chunk));
        }
    }
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
    if (due || first || (terms.round + guest.number).is_multiple_of(RECOUNT))
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
fn retire(guest: &Guest) {
    if let Some(mut talk) = guest.talk.try_lock() {
        talk.link = None;
        talk.pending = None;
    }
    guest.bury();
    // A thread that sleeps in a look at its memory may hold them; there will be another look.
    if let Some(mut offers) = guest.offers.try_lock() {
        offers.withdraw_all(guest);
    }
    guest.settle();
    // Last, because this may be where the thread stays.
    if !guest.is_held_up() {
        rescue::bring_back(guest, false);
    }
}
