//! The limit of CPU time: a budget that fills with time and is spent by work.
//!
//! ```text
//!   limit × time ──▶ ┌────────┐ ◀── at most BURST of it is saved up
//!                    │ credit │
//!   CPU time used ◀─ └────────┘     below zero: workers pause before their next job, until it is zero
//! ```
//!
//! A job is never interrupted: it may hold a chunk's lock and a guest's attention. So a job may
//! overdraw the budget, and the pause after it is as long as the debt takes to fill. Over a longer time
//! the use is the limit. All CPU time counts that the host pays for merging: that of the workers and the driver ([`Meter`]), and
//! the agents' part (see [`Counters::charged_ns`](crate::guest::counters::Counters::charged_ns)).
//! The tempting alternative, the time of the whole process, has the threads that answer requests in it: a stranger who asks without pause
//! would leave no time for merging (I8).
//! Unmerging is not limited: a caller waits for it.

use std::cell::Cell;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::sync::{BUDGET, Ordered, lock};

/// Time whose share may be saved up while there is nothing to do.
const BURST: Duration = Duration::from_millis(200);
/// Time whose share may be owed: no pause is longer, whatever one job has used.
const DEBT: Duration = Duration::from_secs(5);
/// The use is looked at no more often than this.
const GRAIN: Duration = Duration::from_millis(1);

/// The arithmetic, without a clock. Times are since any fixed moment.
#[derive(Clone, Copy, Debug)]
struct Budget {
    percent: u32,
    /// When the credit was counted, and what had been used by then.
    at: Duration,
    used: Duration,
    /// Nanoseconds of CPU time; negative: a debt.
    credit: i64,
}

impl Budget {
    fn new(percent: u32, now: Duration, used: Duration) -> Self {
        Self {
            percent,
            at: now,
            used,
            credit: 0,
        }
    }

    /// The limit's part of `time`, in nanoseconds.
    fn share(&self, time: Duration) -> i64 {
        let share = time.as_nanos() * u128::from(self.percent) / 100;
        i64::try_from(share).unwrap_or(i64::MAX)
    }

    /// Counts what time has brought and work has taken.
    fn count(&mut self, now: Duration, used: Duration) {
        let earned = self.share(now.saturating_sub(self.at));
        let spent = used.saturating_sub(self.used).as_nanos();
        let spent = i64::try_from(spent).unwrap_or(i64::MAX);
        let credit = self.credit.saturating_add(earned).saturating_sub(spent);
        self.credit = credit.clamp(-self.share(DEBT), self.share(BURST));
        (self.at, self.used) = (now, used);
    }

    /// How long until the debt is paid; zero without one.
    fn pause(&self) -> Duration {
        let debt = u64::try_from(self.credit.saturating_neg()).unwrap_or(0);
        let wait = u128::from(debt) * 100 / u128::from(self.percent.max(1));
        Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }
}

thread_local! {
    /// The CPU time of this thread that a meter has.
    static COUNTED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// CPU time of the threads that merge, in nanoseconds. Each adds its own: no other thread of the process counts.
#[derive(Default)]
pub(crate) struct Meter(AtomicU64);

impl Meter {
    /// Adds what the calling thread has used since it did so the last time.
    pub(crate) fn count(&self) {
        let now = sys::process::thread_time();
        let more = now.saturating_sub(COUNTED.replace(now)).as_nanos();
        self.0
            .fetch_add(u64::try_from(more).unwrap_or(u64::MAX), Relaxed);
    }

    /// What all have used.
    pub(crate) fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }
}

/// The budget of an engine's workers.
pub(crate) struct Governor {
    begin: Instant,
    budget: Ordered<Option<Budget>, BUDGET>,
}

impl Governor {
    pub(crate) fn new() -> Self {
        Self {
            begin: Instant::now(),
            budget: Ordered::default(),
        }
    }

    /// How long a worker is to wait before its next job, at a limit of `percent` of a core (0: none);
    /// `used` tells the CPU time used so far.
    pub(crate) fn pause(&self, percent: u32, used: impl FnOnce() -> Duration) -> Duration {
        let mut budget = lock(&self.budget);
        if percent == 0 {
            *budget = None;
            return Duration::ZERO;
        }
        let now = self.begin.elapsed();
        match &mut *budget {
            Some(budget) if budget.percent == percent => {
                if now.saturating_sub(budget.at) >= GRAIN {
                    budget.count(now, used());
                }
                budget.pause()
            }
            other => other.insert(Budget::new(percent, now, used())).pause(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_debt_is_paid_with_time() {
        let mut budget = Budget::new(25, Duration::ZERO, Duration::ZERO);
        assert_eq!(budget.pause(), Duration::ZERO);
        budget.count(10 * MS, 10 * MS);
        assert_eq!(budget.pause(), 30 * MS, "10 ms take 40 ms at a quarter");
        budget.count(40 * MS, 10 * MS);
        assert_eq!(budget.pause(), Duration::ZERO);
    }

    #[test]
    fn little_is_saved_up_and_debts_have_an_end() {
        let hour = Duration::from_secs(3600);
        let mut budget = Budget::new(50, Duration::ZERO, Duration::ZERO);
        budget.count(hour, Duration::ZERO);
        budget.count(hour, 100 * MS);
        assert_eq!(budget.pause(), Duration::ZERO, "half of BURST");
        budget.count(hour, 101 * MS);
        assert_eq!(budget.pause(), 2 * MS);
        budget.count(hour, hour);
        assert_eq!(budget.pause(), DEBT);
    }

    #[test]
    fn a_governor_without_a_limit_never_pauses_and_never_asks() {
        let governor = Governor::new();
        assert_eq!(governor.pause(0, || panic!("asked")), Duration::ZERO);
        assert_eq!(governor.pause(10, || Duration::ZERO), Duration::ZERO);
        // A new limit begins without the debts of the old one.
        assert_eq!(
            governor.pause(20, || Duration::from_secs(9)),
            Duration::ZERO
        );
    }

    /// Of a process that answers requests without pause, merging has only what its own threads use.
    #[test]
    fn other_threads_use_no_time_of_the_limits() {
        let burn = || {
            let begin = sys::process::thread_time();
            while sys::process::thread_time().saturating_sub(begin) < 50 * MS {}
        };
        let lab = crate::testing::fake::Lab::new();
        let before = lab.core.used();
        std::thread::scope(|scope| {
            scope.spawn(burn);
        });
        assert_eq!(lab.core.used(), before, "it merges nothing");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                burn();
                (0..2).for_each(|_| lab.core.meter.count());
            });
        });
        let used = lab.core.used() - before;
        assert!(
            (50 * MS..100 * MS).contains(&used),
            "counted once: {used:?}"
        );
    }

    #[test]
    fn what_workers_and_driver_use_is_counted() {
        let lab = crate::testing::fake::Lab::new();
        lab.guest("d", 1);
        let before = lab.core.used();
        lab.rounds(1);
        assert!(lab.core.used() > before, "a job");
        let crew = crate::run::workers::Workers::new(lab.core.clone(), MS);
        let idle = lab.core.used();
        crew.attend();
        assert!(lab.core.used() > idle, "the driver, which waits for jobs");
        crew.stop();
    }

    proptest! {
        /// Workers that do as they are told use the limit and no more, whatever their jobs cost (as long
        /// as a job is below the debt that counts).
        #[test]
        fn the_use_is_the_limit(
            percent in 2_u32..=200,
            jobs in proptest::collection::vec(1_u64..40, 1..20),
        ) {
            let (mut now, mut used) = (Duration::ZERO, Duration::ZERO);
            let mut budget = Budget::new(percent, now, used);
            let end = Duration::from_secs(20);
            let mut longest = Duration::ZERO;
            for job in jobs.iter().cycle().map(|&ms| Duration::from_millis(ms)) {
                now += budget.pause();
                budget.count(now, used);
                if now >= end {
                    break;
                }
                // Two workers begin at the same moment.
                now += job;
                used += 2 * job;
                longest = longest.max(2 * job);
                budget.count(now, used);
            }
            let share = |time: Duration| time.mul_f64(f64::from(percent) / 100.0);
            prop_assert!(used <= share(now) + share(BURST) + longest, "{:?} in {:?}", used, now);
            // Of two cores, as much as the limit grants.
            prop_assert!(used + share(BURST) + longest >= share(now).min(2 * now).mul_f64(0.99));
        }
    }
}
