//! The daemon's history: a day at 10 seconds, a month at 10 minutes, in memory of fixed size.
//!
//! ```text
//!  engine ── each 10 s ──▶ fine:    8640 samples ─┐ older than all of them
//!               each 60th ▶ coarse: 4464 samples ─┴──▶ asked since T: coarse, then fine
//!                             │
//!                             ▼
//!                          archive ──▶ keeper ──▶ the next daemon
//! ```
//!
//! A sample is a look at one moment; events between two of them show in the counters that grow (`cpu_seconds`). Both rings
//! together take less than 1 MiB, and so does the archive. Samples have numbers, which go on over a restart. Their numbers and times
//! tell how long there was no sample.

mod archive;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use archive::Shelf;
use engine::Engine;
use sys::keeper::{Keeper, Kept};
use wire::Sample;

/// The time between two samples.
const STEP: Duration = Duration::from_secs(10);
/// Each of so many is kept for long.
const COARSE: u64 = 60;
const FINE_SAMPLES: usize = 24 * 360;
const COARSE_SAMPLES: usize = 31 * 144;

/// A sample and its number.
type Numbered = (u64, Sample);

/// Both rings, oldest first.
#[derive(Debug, Default)]
struct Rings {
    taken: u64,
    /// CPU time of former daemons.
    cpu_before: f64,
    fine: VecDeque<Numbered>,
    coarse: VecDeque<Numbered>,
}

impl Rings {
    /// Takes this daemon's next sample; gives it as it is kept.
    fn push(&mut self, mut sample: Sample) -> Numbered {
        sample.cpu_seconds += self.cpu_before;
        let numbered = (self.taken, sample);
        if is_coarse(self.taken) {
            push(&mut self.coarse, COARSE_SAMPLES, numbered);
        }
        push(&mut self.fine, FINE_SAMPLES, numbered);
        self.taken += 1;
        numbered
    }

    /// The samples since `since`, at most `most` of them and spread evenly; the last one is among them.
    fn since(&self, since: u64, most: usize) -> Vec<Sample> {
        let first = self.fine.front().map_or(u64::MAX, |(number, _)| *number);
        let old = self.coarse.iter().filter(|(number, _)| *number < first);
        let mut all = Vec::new();
        let mut before = None;
        for &(number, mut sample) in old.chain(&self.fine) {
            sample.unseen_seconds = before.map_or(0, |before| unseen(before, (number, sample)));
            before = Some((number, sample));
            if sample.at >= since {
                all.push(sample);
            }
        }
        let step = all.len().div_ceil(most.max(1)).max(1);
        // Full groups at the end, so that the last sample ends one.
        let part = all.len() % step;
        let (first, rest) = all.split_at(part);
        let groups = std::iter::once(first).chain(rest.chunks(step));
        groups.filter_map(ended).collect()
    }
}

/// The last of a group, with the time that is unseen in all of it.
fn ended(group: &[Sample]) -> Option<Sample> {
    let mut last = *group.last()?;
    last.unseen_seconds = group.iter().map(|sample| sample.unseen_seconds).sum();
    Some(last)
}

/// How long there was no sample between two. One that came late by less than a step, or a tenth of the time, is no gap.
fn unseen((before, first): Numbered, (number, then): Numbered) -> u64 {
    let seen = (number - before) * STEP.as_secs();
    let more = then.at.saturating_sub(first.at).saturating_sub(seen);
    if more > STEP.as_secs().max(seen / 10) {
        more
    } else {
        0
    }
}

fn is_coarse(number: u64) -> bool {
    number.is_multiple_of(COARSE)
}

fn push(ring: &mut VecDeque<Numbered>, most: usize, sample: Numbered) {
    if ring.len() == most {
        ring.pop_front();
    }
    ring.push_back(sample);
}

/// What the daemon remembers of its counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct History(Arc<Mutex<(Rings, Option<Shelf>)>>);

impl History {
    /// What a former daemon left in `kept`, which is taken out of there; else an empty one. `keeper` gets it for the next daemon.
    pub(crate) fn load(keeper: Option<&Arc<Keeper>>, kept: &mut Vec<Kept>) -> Self {
        let its = match keeper {
            Some(keeper) => archive::load(keeper, kept),
            None => (Rings::default(), None),
        };
        Self(Arc::new(Mutex::new(its)))
    }

    /// Goes on to remember, in a thread that ends with `engine`.
    pub(crate) fn follow(&self, engine: &Arc<Engine>) {
        let (engine, its) = (Arc::downgrade(engine), self.clone());
        let thread = thread::Builder::new().name("history".to_owned());
        if let Err(error) = thread.spawn(move || its.take_samples(&engine)) {
            tracing::warn!("there will be no history: no thread for it: {error}");
        }
    }

    fn take_samples(&self, engine: &Weak<Engine>) {
        let mut due = Instant::now();
        while let Some(engine) = engine.upgrade() {
            let status = engine.status();
            drop(engine);
            #[expect(clippy::cast_possible_truncation, reason = "two digits are shown")]
            let stalls = sys::meminfo::stall_percent()
                .ok()
                .map(|stalls| stalls as f32);
            self.push(Sample::of(&status, now(), stalls));
            due = (due + STEP).max(Instant::now());
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }

    fn push(&self, sample: Sample) {
        let (rings, shelf) = &mut *self.lock();
        let (number, sample) = rings.push(sample);
        if let Some(error) = shelf
            .as_ref()
            .and_then(|its| its.write(number, &sample).err())
        {
            tracing::warn!("the next daemon will not know this one's history: {error}");
            if let Some(shelf) = shelf.take() {
                shelf.forget();
            }
        }
    }

    /// The samples of the last `seconds`, at most `most` of them.
    pub(crate) fn last(&self, seconds: u64, most: u32) -> Vec<Sample> {
        let since = now().saturating_sub(seconds);
        self.lock().0.since(since, most as usize)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (Rings, Option<Shelf>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a sample at each of `times`.
    fn take(rings: &mut Rings, times: impl Iterator<Item = u64>) {
        for time in times {
            rings.push(at(time));
        }
    }

    fn at(at: u64) -> Sample {
        Sample {
            at,
            ..Sample::default()
        }
    }

    fn times(rings: &Rings, since: u64, most: usize) -> Vec<u64> {
        let samples = rings.since(since, most);
        samples.iter().map(|sample| sample.at).collect()
    }

    #[test]
    fn a_month_has_its_bounds_and_no_moment_is_twice() {
        let mut rings = Rings::default();
        let steps = 40 * 24 * 360;
        take(&mut rings, (0..steps).map(|step| step * 10));
        assert_eq!(
            (rings.fine.len(), rings.coarse.len()),
            (FINE_SAMPLES, COARSE_SAMPLES)
        );
        let all = times(&rings, 0, usize::MAX);
        assert!(all.is_sorted_by(|a, b| a < b));
        assert_eq!(all.last(), Some(&((steps - 1) * 10)));
        let month = all.last().unwrap() - all.first().unwrap();
        assert!((30 * 86_400..=31 * 86_400).contains(&month), "{month} s");
        let day = times(&rings, steps * 10 - 86_400, usize::MAX);
        assert_eq!(day.len(), FINE_SAMPLES);
        assert!(size_of::<Sample>() * (FINE_SAMPLES + COARSE_SAMPLES) < 1 << 20);
    }

    #[test]
    fn what_is_asked_for_is_spread_and_ends_with_the_last() {
        let mut rings = Rings::default();
        assert_eq!(times(&rings, 0, 10), [0; 0]);
        take(&mut rings, 0..10);
        assert_eq!(times(&rings, 0, 100).len(), 10);
        assert_eq!(times(&rings, 0, 3), [1, 5, 9]);
        assert_eq!(times(&rings, 0, 1), [9]);
        assert_eq!(times(&rings, 7, 100), [7, 8, 9]);
        assert_eq!(times(&rings, 0, 0), [9]);
    }

    #[test]
    fn a_time_without_samples_is_told_however_few_are_asked_for() {
        let mut rings = Rings::default();
        take(&mut rings, (0..100).map(|step| step * 10));
        // A day passes: an hour of it unseen, and once a sample late by 9 seconds.
        let begin = 990 + 10 + 3600;
        let late = |step| 9 * u64::from(step > 7);
        take(
            &mut rings,
            (0..8640).map(|step| begin + step * 10 + late(step)),
        );
        let gaps = |most| {
            let samples = rings.since(0, most);
            let unseen = samples
                .iter()
                .map(|sample| (sample.at, sample.unseen_seconds));
            unseen.filter(|(_, unseen)| *unseen > 0).collect::<Vec<_>>()
        };
        // The first 100 are of the coarse ring by now: the one before the gap is number 60, 40 samples ago.
        assert_eq!(gaps(usize::MAX), [(begin, 3600)]);
        for most in [1, 7, 24, 144] {
            let found = gaps(most);
            assert_eq!((found.len(), found[0].1), (1, 3600), "{most}: {found:?}");
            assert!((begin..begin + 90_000 / most as u64 + 10).contains(&found[0].0));
        }
        assert_eq!(rings.since(begin, usize::MAX)[0].unseen_seconds, 3600);
        assert_eq!(rings.since(begin + 10, usize::MAX)[0].unseen_seconds, 0);
    }
}
