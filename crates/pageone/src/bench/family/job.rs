//! The work of a guest between two orders.

use std::time::{Duration, Instant};

use super::memory::Memory;

/// Pages that a batch passes over before it looks for an order.
const STRETCH: u64 = 256;
/// A batch writes one page of so many; they lie at the front.
const BATCH_WRITES: usize = 16;
/// Accesses write to one page of so many; they lie at the front.
const ACCESS_WRITES: usize = 8;
/// Steps of a walk before it looks for an order.
const WALK: usize = 1 << 14;
/// Time between two bursts of rewriting.
const CHURN_TICK: Duration = Duration::from_millis(2);
/// The longest that one burst of rewriting may fall behind the clock.
const CHURN_BURST: u64 = 4096;

/// What is done, and how far it is.
#[derive(Clone, Debug)]
pub(super) struct Job {
    kind: Kind,
    random: u64,
    begun: Instant,
    done: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Nothing.
    Idle,
    /// Reads anywhere and writes at the front, each timed, with a pause between bursts.
    Access {
        reads: u64,
        writes: u64,
        every: Duration,
    },
    /// Percent of all pages rewritten a period, at random.
    Churn { percent: u64, period: Duration },
    /// Passes over all memory, again and again.
    Batch,
    /// Reads anywhere, each time where the byte before has led.
    Walk,
}

impl Job {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            random: 0x2545_f491_4f6c_dd1d,
            begun: Instant::now(),
            done: 0,
        }
    }

    pub(super) fn idle() -> Self {
        Self::new(Kind::Idle)
    }

    /// From the words of an order; none where they name no job.
    pub(super) fn parse(words: &str) -> Option<Self> {
        let mut words = words.split(' ');
        let name = words.next()?;
        let numbers: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        let kind = match (name, &numbers[..]) {
            ("idle", []) => Kind::Idle,
            ("batch", []) => Kind::Batch,
            ("walk", []) => Kind::Walk,
            ("access", &[reads, writes, micros]) => Kind::Access {
                reads,
                writes,
                every: Duration::from_micros(micros),
            },
            ("churn", &[percent, millis]) if millis > 0 => Kind::Churn {
                percent,
                period: Duration::from_millis(millis),
            },
            _ => return None,
        };
        Some(Self::new(kind))
    }

    /// How long to wait for an order before the next burst.
    pub(super) fn pause(&self) -> Duration {
        match self.kind {
            Kind::Idle => Duration::from_secs(3600),
            Kind::Access { every, .. } => every,
            Kind::Churn { .. } => CHURN_TICK,
            Kind::Batch | Kind::Walk => Duration::ZERO,
        }
    }

    /// Does what is due.
    pub(super) fn burst(&mut self, memory: &mut Memory) {
        let pages = memory.pages();
        match self.kind {
            Kind::Idle => {}
            Kind::Access { reads, writes, .. } => {
                (0..reads).for_each(|_| memory.read(self.below(pages)));
                let front = (pages / ACCESS_WRITES).max(1);
                (0..writes).for_each(|_| memory.write(self.below(front)));
            }
            Kind::Churn { percent, period } => {
                let due = due(pages as u64, percent, period, self.begun.elapsed());
                for _ in 0..due.saturating_sub(self.done).min(CHURN_BURST) {
                    memory.rewrite(self.below(pages));
                    self.done += 1;
                }
            }
            Kind::Batch => {
                for _ in 0..STRETCH {
                    let index = usize::try_from(self.done).unwrap_or(0) % pages;
                    memory.pass(index, index < pages / BATCH_WRITES);
                    self.done += 1;
                }
            }
            Kind::Walk => {
                for _ in 0..WALK {
                    let byte = memory.step(self.below(pages));
                    self.random ^= u64::from(byte);
                }
            }
        }
    }

    /// A number below `end`, by xorshift.
    fn below(&mut self, end: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let product = u128::from(self.random) * end as u128;
        usize::try_from(product >> 64).unwrap_or(0)
    }
}

/// Pages that are to be rewritten by now.
fn due(pages: u64, percent: u64, period: Duration, passed: Duration) -> u64 {
    let whole = u128::from(pages) * u128::from(percent) * passed.as_nanos();
    u64::try_from(whole / 100 / period.as_nanos().max(1)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_make_a_job_or_none() {
        let kind = |words| Job::parse(words).map(|job| job.kind);
        assert_eq!(kind("batch"), Some(Kind::Batch));
        assert_eq!(kind("walk"), Some(Kind::Walk));
        let every = Duration::from_micros(500);
        assert_eq!(
            kind("access 10 1 500"),
            Some(Kind::Access {
                reads: 10,
                writes: 1,
                every
            })
        );
        for bad in ["", "churn 5", "churn 5 0", "access 1 1", "batch 1", "dance"] {
            assert_eq!(kind(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_fifth_of_the_pages_is_due_a_period() {
        let (second, half) = (Duration::from_secs(1), Duration::from_millis(500));
        assert_eq!(due(1000, 20, second, second), 200);
        assert_eq!(due(1000, 20, second, half), 100);
        assert_eq!(due(1000, 20, half, second), 400);
    }

    #[test]
    fn pages_at_random_are_of_the_memory_and_of_all_its_parts() {
        let mut job = Job::idle();
        let mut seen = [0; 8];
        (0..800).for_each(|_| seen[job.below(8)] += 1);
        assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
    }
}
