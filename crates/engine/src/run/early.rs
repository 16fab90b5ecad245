//! Early looks: guests that have just come are looked at more often than others.
//!
//! ```text
//!   rounds       R               R               R        R  a round: all guests
//!   early looks  │ e e e e e e   │ e e e e       │        e  an early look: young guests
//!   a guest      comes  ▲                    ▲
//!   its pages    armed  resting, settled: the first are merged after two early looks
//!                                            └ a period old: no longer young
//! ```
//!
//! A page settles when two looks in a row find it unwritten. The period between two looks is long, for looks cost CPU time as long as
//! a guest lives. A guest that has just come would save nothing for three periods, and a guest with a short life would never save. So for
//! its first period it is *young*, and an eighth of a period ([`PART`]) lies between two looks.
//!
//! **Safe.** Long periods keep one kind of write from pages that MOVE takes: I/O to a page that is referenced, not pinned. The
//! reasons of [`now`](crate::run::now) hold here: each early look first asks for descriptors of that kind, and a guest that has
//! one gets no early look again. A page that an early look settles was armed by an *earlier* look. So a reference to it is older
//! than the question: then its descriptor is found. Or it is younger than the arming: then it shows as a write. **The limit**: a
//! descriptor that was closed before the question, with I/O that goes on for two early looks more. Broken pages are as they were
//! after an early look.
//!
//! **Calm.** Between a look at a guest and its next early look lie three quarters of an eighth of a period at least ([`nearest`]).
//! Early looks and their work take half of the time between two of them. A guest that was merged now, as a user asked, is left out
//! for that long; the others are not, and of two passes one waits for the early look that is due. Writes that early looks see
//! count for nothing later: chunks are not worn by it, and no back-off grows.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wire::RunMode;

use crate::guest::{Guest, Standing};
use crate::run::core::{Core, Crew};
use crate::run::waiting::Timing;
use crate::scan::terms::Aim;
use crate::sync::lock;

/// The part of a period that lies between two early looks.
const PART: u32 = 8;
/// And at least so much: programs start in that time.
const LEAST: Duration = Duration::from_secs(1);

/// Early looks and their work take no longer, however long the period is: others wait meanwhile.
pub(crate) const MOST: Duration = Duration::from_secs(2);

/// The time between two looks at a young guest.
pub(crate) fn distance(period: Duration) -> Duration {
    (period / PART).max(LEAST)
}

/// Whether there is no early look between two rounds, for the period is too short.
fn is_short(period: Duration) -> bool {
    distance(period) * 2 > period
}

/// Whether a guest that came so long ago is looked at early.
pub(crate) fn is_young(age: Duration, period: Duration) -> bool {
    age < period && !is_short(period)
}

/// How long early looks and their work take at most.
pub(crate) fn longest(period: Duration) -> Duration {
    (distance(period) / 2).min(MOST)
}

/// The least distance between a look at a guest and its next early look.
fn nearest(distance: Duration) -> Duration {
    distance * 3 / 4
}

/// When young guests are looked at next, from `now` on, where the last look was at `last` and the next round is `due`. Looks are
/// late, never early: so the last of them may be a little nearer to the round.
fn next(now: Instant, last: Instant, due: Instant, period: Duration) -> Option<Instant> {
    let distance = distance(period);
    let next = now.max(last + distance);
    (next + nearest(distance) <= due).then_some(next)
}

/// Guests that are looked at early, the last first. They stand in the order in which they came.
pub(crate) fn came_lately(
    guests: &[Arc<Guest>],
    period: Duration,
) -> impl Iterator<Item = &Arc<Guest>> {
    let last = guests.iter().rev();
    last.take_while(move |guest| is_young(guest.came.elapsed(), period))
}

/// Those of them whose next look has come.
fn young(guests: &[Arc<Guest>], period: Duration) -> impl Iterator<Item = &Arc<Guest>> {
    let young = came_lately(guests, period);
    let served = young.filter(|guest| guest.standing() == Standing::Served);
    let least = nearest(distance(period));
    served.filter(move |guest| {
        let ended = *lock(&guest.passes.ended);
        !guest.passes.borrowed.load(Relaxed) && ended.is_none_or(|ended| ended.elapsed() >= least)
    })
}

impl Core {
    /// When young guests are looked at next, from `now` on, if there are any; the next round is `due`.
    pub(crate) fn next_early(&self, now: Instant, due: Instant) -> Option<Instant> {
        let period = self.knobs.period();
        let last = (*lock(&self.last_look))?;
        let next = next(now, last, due, period)?;
        let runs = self.knobs.values().run == RunMode::Run;
        let any = runs && young(&lock(&self.guests), period).next().is_some();
        any.then_some(next)
    }

    /// Looks at the young guests, and merges what has settled.
    pub(crate) fn look_early(&self, crew: &dyn Crew) {
        let period = self.knobs.period();
        let most = longest(period);
        let until = self.note_look() + most / 2;
        let guests: Vec<_> = young(&lock(&self.guests), period).cloned().collect();
        guests.iter().for_each(|guest| guest.passes.begin());
        let looks = guests.into_iter().map(|guest| (guest, Aim::early(until)));
        let timing = Timing::new(self.knobs.patience, most, most, most);
        self.look_and_work(crew, looks.collect(), timing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(20);

    #[test]
    fn looks_are_never_close_together() {
        let begin = Instant::now();
        let due = begin + PERIOD;
        let nearest = nearest(distance(PERIOD));
        // A round notes its look a little later than it was due, and who waits wakes up late.
        let late = Duration::from_millis(30);
        let came = [
            (Duration::ZERO, 7),
            (PERIOD / 3, 5),
            (PERIOD - nearest, 1),
            (PERIOD - late, 0),
        ];
        for (came, expected) in came {
            let (mut last, mut now, mut looks) = (begin + late, begin + late.max(came), 0);
            while let Some(at) = next(now, last, due, PERIOD) {
                if at > now {
                    now = at + late;
                    continue;
                }
                assert!(now - last >= nearest);
                (last, looks) = (now, looks + 1);
            }
            assert!(due - last >= nearest, "{:?}", due - last);
            assert_eq!(looks, expected, "{came:?}");
        }
    }

    #[test]
    fn short_periods_have_rounds_only() {
        for (seconds, most) in [(1, 0), (2, 1), (4, 3), (8, 7), (3600, 7)] {
            let period = Duration::from_secs(seconds);
            let begin = Instant::now();
            let early = std::iter::successors(Some(begin), |&last| {
                next(last, last, begin + period, period)
            });
            assert_eq!(early.count() - 1, most, "{period:?}");
            assert_eq!(is_young(Duration::ZERO, period), most > 0);
            assert!(!is_young(period, period));
        }
    }
}
