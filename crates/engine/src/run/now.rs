//! Merging now: memory that a user wants merged is merged at once, and he is told the gains.
//!
//! ```text
//!   rounds   ═══════┄┄┄┄┄┄┄┄┄┄┄┄┄═══════┄┄┄┄┄┄┄┄┄┄┄┄┄═══════
//!   wishes          a ▼     b b' ▼     │  ▼ c
//!   passes            ═══        ════  └─────▶ ═══             between two rounds
//! ```
//!
//! A wish names guests and addresses. A *pass* grants all wishes of one user that are due together. It is a round of their guests alone
//! ([`Core::look_and_work`]), in which nothing is left out for being idle or worn. It looks twice at least: the first look arms
//! the pages, and pages that the second finds unwritten are settled ([`Aging::AtOnce`](crate::scan::track::Aging::AtOnce)).
//!
//! **Safe.** The two periods in which a page must not be written are thrift, where the window sees all writers to it:
//!
//! | a writer to a page | is stopped by |
//! |---|---|
//! | a thread, a vCPU, a system call | the window, as ever: the page is absent |
//! | I/O into a pinned page | MOVE, which refuses it |
//! | I/O into a page that is referenced, not pinned | such a guest's memory is not settled: [`Guest::check_borrows`] |
//! | I/O into a page in a mapping of a store | these pages never settle at once |
//!
//! The order matters for the third row. Each look asks first whether the guest has a descriptor of that kind, and settles only
//! pages that an *earlier* look has armed. So a reference to such a page is older than the question: then its descriptor is
//! found. Or it is younger than the arming: then it shows as a write.
//!
//! The third kind is direct I/O of some file systems (NFS, 9P), and vhost-scsi. MOVE would take the page, and the I/O would go to
//! a frame that is no page's. In a round two periods without a write keep such pages out.
//!
//! **Fair.** A pass is a round: the CPU limit holds, workers run on idle CPUs only. It lasts a period at most: its looks end
//! after half of the time that is left, however much memory there is, and their findings are worked in the other half. If another
//! user waits for a pass or has a young guest, a pass ends after [`SHARED`], also one under way. Root's are exempt. Where a round
//! or an early look is due there is one pass before it and not two, so with any number of wishes the rounds take twice the time.
//! A user whose pass took a while gets the next one after as long. A brief pass lasts no longer than [`BRIEF`]: a caller that is
//! to take little CPU time makes brief wishes, and pauses in between. A pass has its own place in a guest's memory. Otherwise
//! repeated requests would keep the rounds at the beginning.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wire::{Cause, LeftAlone, MergedNow, Viewer};

use crate::error::EngineError;
use crate::guest::passes::{self, Gains};
use crate::guest::{Guest, Standing};
use crate::page::{Class, PAGE};
use crate::run::core::{Core, Crew};
use crate::run::early;
use crate::run::waiting::Timing;
use crate::run::wishes::{Pass, Wish};
use crate::scan::terms::Aim;
use crate::sync::lock;
use crate::users::is_master;

/// Times that a pass looks at its guests.
const MOST_LOOKS: usize = 4;
/// Patiences for which agents are waited for that answer late: one that has just joined has all its memory to tell of.
const LATE: u32 = 40;
/// For so long an agent that was attached may not have told of all memory: under `--any` it reads the mappings twice, with pauses.
const SETTLING: Duration = Duration::from_secs(2);
/// The pause between two looks at such a guest.
const PAUSE: Duration = Duration::from_millis(50);
/// A brief pass takes no longer.
const BRIEF: Duration = Duration::from_millis(250);
/// A pass takes no longer where other users wait: as long as the looks at young guests.
const SHARED: Duration = early::MOST;
/// The part of what is left of a pass in which its guests are looked at.
const LOOKS: u32 = 2;

/// Pages of a guest that have no frame of their own.
fn shared(guest: &Guest) -> u64 {
    let pages = |class| guest.counters.pages(class);
    match guest.standing() {
        Standing::Served => pages(Class::Merged) + pages(Class::Zeroed),
        Standing::Condemned | Standing::Ghost => 0,
    }
}

/// Why a guest's memory was left alone in a pass.
fn left_alone(guest: &Guest) -> Option<LeftAlone> {
    let (cause, why) = match () {
        () if guest.standing() != Standing::Served => {
            (Cause::Gone, "it is no guest any more".to_owned())
        }
        () if guest.passes.is_cut_short() => return None,
        () if !guest.is_looked_at() => (Cause::Silent, "its agent does not answer".to_owned()),
        () => {
            let why = lock(&guest.passes.not_now).clone()?;
            let words = "and the kernel does not tell which pages: they are merged when at rest";
            (Cause::Unseen, format!("{why}, {words}"))
        }
    };
    let pid = guest.pid;
    Some(LeftAlone { pid, cause, why })
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Guests of a pass, by number: the addresses that are wanted, and their pages merged before.
type Reach = BTreeMap<u64, Reached>;

struct Reached {
    guest: Arc<Guest>,
    range: Range<u64>,
    before: u64,
}

fn reach(wishes: &[Wish]) -> Reach {
    let mut reach = Reach::new();
    for wish in wishes {
        for guest in &wish.guests {
            let new = || Reached {
                guest: Arc::clone(guest),
                range: wish.range.clone(),
                before: shared(guest),
            };
            let Reached { range, .. } = reach.entry(guest.number).or_insert_with(new);
            range.start = range.start.min(wish.range.start);
            range.end = range.end.max(wish.range.end);
        }
    }
    reach
}

impl Core {
    /// The served guests with these process numbers, if the one who asks sees them or may ask for `all`.
    ///
    /// # Errors
    /// [`EngineError::NoGuest`] names the first that is none, or another's.
    pub(crate) fn find_guests(
        &self,
        (viewer, all): (&Viewer, bool),
        pids: &[u32],
    ) -> Result<Vec<Arc<Guest>>, EngineError> {
        let guests = lock(&self.guests);
        let own = |guest: &&Arc<Guest>| all || viewer.sees(guest.uid, &guest.domain.name);
        let served = guests.iter().filter(own);
        let served = served.filter(|guest| guest.standing() == Standing::Served);
        let by_pid: BTreeMap<_, _> = served.map(|guest| (guest.pid, guest)).collect();
        let find = |pid: &u32| match by_pid.get(pid) {
            Some(guest) => Ok((*pid, Arc::clone(guest))),
            None => Err(EngineError::NoGuest { pid: *pid }),
        };
        let found: BTreeMap<_, _> = pids.iter().map(find).collect::<Result<_, _>>()?;
        Ok(found.into_values().collect())
    }

    /// Grants the wishes of the user whose turn it is, in one pass.
    pub(crate) fn grant(&self, crew: &dyn Crew) {
        let begin = Instant::now();
        let wishes = self.wishes.take(begin);
        let Some(first) = wishes.first() else {
            return;
        };
        let pass = first.pass(begin);
        let reach = reach(&wishes);
        for its in reach.values() {
            *lock(&its.guest.passes.gains) = Some(Gains::default());
        }
        self.meter.count();
        let before = self.used();
        *lock(&self.pass) = Some(pass);
        let finished = self.passes(crew, &reach, pass);
        *lock(&self.pass) = None;
        self.meter.count();
        let used = self.used().saturating_sub(before);
        let mut gains = Vec::new();
        for its in reach.values() {
            let found = lock(&its.guest.passes.gains).take();
            gains.push((&its.guest, found.unwrap_or_default()));
            *lock(&its.guest.passes.ended) = Some(Instant::now());
        }
        // Once a pass, however many wishes it grants.
        let frames = passes::frames(&gains);
        let frames: BTreeMap<_, _> = reach.keys().copied().zip(frames).collect();
        let took = begin.elapsed();
        self.wishes.rest(pass.user, took);
        for wish in wishes {
            let numbers = wish.guests.iter().map(|guest| guest.number);
            let (mut pages, mut saved) = (0, 0);
            for its in numbers.filter_map(|number| reach.get(&number)) {
                let more = shared(&its.guest).saturating_sub(its.before);
                let frames = frames.get(&its.guest.number);
                pages += more;
                saved += frames.copied().unwrap_or(0).min(more);
            }
            let merged = MergedNow {
                pages,
                saved_bytes: saved * PAGE,
                took_us: micros(took),
                used_us: micros(used),
                finished,
                left_alone: wish
                    .guests
                    .iter()
                    .filter_map(|guest| left_alone(guest))
                    .collect(),
            };
            (wish.tell)(Ok(merged));
        }
    }

    /// How much time a pass has left, as far as is known now: others may come to wait.
    fn left(&self, pass: Pass) -> Duration {
        let period = self.knobs.period();
        let most = match pass.brief {
            true => BRIEF,
            false if !is_master(pass.user) && self.others_wait(pass.user, Instant::now()) => SHARED,
            false => period,
        };
        let most = most.min(period).max(self.knobs.patience);
        most.saturating_sub(pass.begin.elapsed())
    }

    /// Cuts the pass under way, if its time is over.
    pub(crate) fn keep_to_time(&self) {
        let pass = *lock(&self.pass);
        if pass.is_some_and(|pass| self.left(pass).is_zero()) {
            self.queue.cut();
        }
    }

    /// Whether a user but this one waits for a pass, or has a young guest.
    fn others_wait(&self, user: u32, now: Instant) -> bool {
        let of_another = |guest: &Arc<Guest>| guest.user.uid != user;
        let period = self.knobs.period();
        self.wishes.others_wait(user, now)
            || early::came_lately(&lock(&self.guests), period).any(of_another)
    }

    /// Rounds of these guests alone, while they bring something: pages that were guessed wrong are read by the next, and pages that came
    /// to be known are settled by it. Tells whether nothing was left out for want of time.
    fn passes(&self, crew: &dyn Crew, reach: &Reach, pass: Pass) -> bool {
        let guests = || reach.values().map(|its| &its.guest);
        let known = |guest: &Arc<Guest>| guest.counters.classes().iter().sum::<u64>();
        let sums = || {
            let merged = guests().map(|guest| shared(guest)).sum::<u64>();
            (merged, guests().map(known).sum::<u64>())
        };
        let is_late = |guest: &Arc<Guest>| {
            // It has not answered, or rests because its answers took long.
            let served = guest.standing() == Standing::Served && !guest.is_held_up();
            served && !guest.takes_jobs(self.knobs.patience)
        };
        let settles = |guest: &Arc<Guest>| guest.is_attached() && guest.came.elapsed() < SETTLING;
        let late = self.knobs.patience * LATE;
        let (mut before, mut left, mut looked) = (sums(), self.left(pass), 0);
        loop {
            guests().for_each(|guest| guest.passes.begin());
            let until = Instant::now() + left / LOOKS;
            let looks = reach
                .values()
                .map(|its| (Arc::clone(&its.guest), Aim::now(&its.range, until)));
            let timing = Timing::new(self.knobs.patience, left, left, left);
            self.look_and_work(crew, looks.collect(), timing);
            let cut = self.queue.has_dropped() || guests().any(|guest| guest.passes.is_cut_short());
            let now = sums();
            left = self.left(pass);
            let settles = guests().any(settles);
            let behind = cut || settles || guests().any(is_late);
            let waits = behind && pass.begin.elapsed() < late;
            let brings = now.0 > before.0 || now.1 > before.1;
            // The first look arms: it need not bring anything.
            let is_done = looked > 0 && (cut || !brings);
            looked += usize::from(!waits);
            let (merged, known) = now;
            tracing::debug!(looked, merged, known, cut, behind, "a look of a pass");
            if left.is_zero() || !waits && is_done || looked == MOST_LOOKS {
                return !behind;
            }
            before = now;
            if settles {
                std::thread::sleep(PAUSE.min(left));
            }
        }
    }
}
