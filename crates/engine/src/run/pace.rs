//! How the period follows the host's memory, with `pace = auto`.
//!
//! ```text
//!   factor   1/4 ◀──────────── 1 ───────────▶ 4
//!          short              normal           ample
//!   enter  stall ≥ 10 %, or                    free ≥ 50 % and
//!          free < 10 %                         no stall (< 1 %)
//!   leave  stall < 5 % and                     free < 40 %, or
//!          free ≥ 15 %                         stall ≥ 2 %
//! ```
//!
//! *free* is MemAvailable as a part of MemTotal, *stall* the part of the last ten seconds in which some
//! task waited for memory (/proc/pressure/memory, `some avg10`; 0 where the kernel does not tell).
//! Between entering and leaving lies a gap, and away from the shortest period it goes a doubling every
//! [`CALM`] looks at most, so the period does not swing. Towards it, it goes at once: being late costs
//! memory when there is none.

use std::time::Duration;

use sys::meminfo::{self, MemInfo};

/// The factor is 2 to the power of a step between these.
const SHORTEST: i8 = -2;
const LONGEST: i8 = 2;
/// Looks between two doublings.
const CALM: u8 = 10;

/// What the host says of its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Supply {
    /// Available memory in percent of all.
    pub(crate) free_percent: u64,
    /// Percent of the last ten seconds in which some task waited for memory.
    pub(crate) stall_percent: f64,
}

impl Supply {
    /// What this machine says now.
    ///
    /// # Errors
    /// `/proc/meminfo` cannot be read.
    pub(crate) fn read() -> std::io::Result<Self> {
        let info = MemInfo::read()?;
        Ok(Self {
            free_percent: info.available * 100 / info.total.max(1),
            stall_percent: meminfo::stall_percent().unwrap_or(0.0),
        })
    }

    /// Whether memory is short, whatever it was before.
    pub(crate) fn is_short(self) -> bool {
        next(Level::Normal, self) == Level::Short
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Level {
    Short,
    #[default]
    Normal,
    Ample,
}

/// The factor of the period, and how it came to be.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pacer {
    level: Level,
    step: i8,
    /// Looks since the last doubling.
    calm: u8,
}

impl Pacer {
    /// Takes a look; gives the step to go by.
    pub(crate) fn observe(&mut self, supply: Supply) -> i8 {
        self.level = next(self.level, supply);
        let wanted = match self.level {
            Level::Short => SHORTEST,
            Level::Normal => 0,
            Level::Ample => LONGEST,
        };
        self.calm = self.calm.saturating_add(1);
        if wanted < self.step {
            (self.step, self.calm) = (wanted, 0);
        } else if wanted > self.step && self.calm >= CALM {
            (self.step, self.calm) = (self.step + 1, 0);
        }
        self.step
    }
}

fn next(level: Level, supply: Supply) -> Level {
    let Supply {
        free_percent: free,
        stall_percent: stall,
    } = supply;
    let stays_short = level == Level::Short && (stall >= 5.0 || free < 15);
    let stays_ample = level == Level::Ample && free >= 40 && stall < 2.0;
    match () {
        () if stall >= 10.0 || free < 10 || stays_short => Level::Short,
        () if (free >= 50 && stall < 1.0) || stays_ample => Level::Ample,
        () => Level::Normal,
    }
}

/// The period at `step`: the knob, halved or doubled so often, and never out of the knob's range.
pub(crate) fn at_step(period: Duration, step: i8) -> Duration {
    let factor = 1_u32 << step.unsigned_abs().min(16);
    let scaled = match step {
        ..0 => period / factor,
        0.. => period.saturating_mul(factor),
    };
    scaled.clamp(Duration::from_millis(10), Duration::from_secs(86_400))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn supply(free_percent: u64, stall_percent: f64) -> Supply {
        Supply {
            free_percent,
            stall_percent,
        }
    }

    /// The step after `looks` looks at the same supply.
    fn after(pace: &mut Pacer, looks: usize, supply: Supply) -> i8 {
        (0..looks).map(|_| pace.observe(supply)).last().unwrap()
    }

    #[test]
    fn shortage_counts_at_once_and_ampleness_after_a_while() {
        let mut pace = Pacer::default();
        assert_eq!(after(&mut pace, 9, supply(80, 0.0)), 0);
        assert_eq!(after(&mut pace, 1, supply(80, 0.0)), 1);
        assert_eq!(after(&mut pace, 100, supply(80, 0.0)), 2);
        assert_eq!(after(&mut pace, 1, supply(9, 0.0)), -2);
        assert_eq!(after(&mut pace, 100, supply(14, 0.0)), -2, "not above 15 %");
        assert_eq!(after(&mut pace, 10, supply(20, 0.0)), -1);
        assert_eq!(after(&mut pace, 100, supply(20, 0.0)), 0);
        assert_eq!(after(&mut pace, 1, supply(80, 12.0)), -2, "a stall alone");
        assert_eq!(after(&mut pace, 50, supply(80, 6.0)), -2, "not below 5 %");
        assert_eq!(after(&mut pace, 100, supply(80, 1.5)), 0);
    }

    #[test]
    fn around_a_threshold_the_period_stays() {
        let mut pace = Pacer::default();
        after(&mut pace, 100, supply(60, 0.0));
        for look in 0..100 {
            assert_eq!(
                pace.observe(supply(if look % 2 == 0 { 49 } else { 51 }, 0.0)),
                2
            );
        }
        assert_eq!(pace.observe(supply(39, 0.0)), 0);
        for look in 0..100 {
            assert_eq!(
                pace.observe(supply(if look % 2 == 0 { 39 } else { 41 }, 0.0)),
                0
            );
        }
    }

    #[test]
    fn periods_are_scaled_within_their_range() {
        let seconds = Duration::from_secs;
        assert_eq!(at_step(seconds(20), 0), seconds(20));
        assert_eq!(at_step(seconds(20), SHORTEST), seconds(5));
        assert_eq!(at_step(seconds(20), LONGEST), seconds(80));
        assert_eq!(
            at_step(Duration::from_millis(10), SHORTEST),
            Duration::from_millis(10)
        );
        assert_eq!(at_step(seconds(86_400), LONGEST), seconds(86_400));
    }

    proptest! {
        /// Whatever the host does: the step is bounded, goes up by one in ten looks at most, and is the
        /// shortest in every shortage.
        #[test]
        fn steps_are_bounded_and_slow(looks in proptest::collection::vec((0_u64..100, 0.0..20.0), 1..300)) {
            let mut pace = Pacer::default();
            let (mut last, mut since) = (0, 0);
            for (free, stall) in looks {
                let step = pace.observe(supply(free, stall));
                since += 1;
                prop_assert!((SHORTEST..=LONGEST).contains(&step));
                if step > last {
                    prop_assert!(step == last + 1 && since >= CALM);
                }
                if free < 10 || stall >= 10.0 {
                    prop_assert_eq!(step, SHORTEST);
                }
                if step != last {
                    (last, since) = (step, 0);
                }
            }
        }
    }
}
