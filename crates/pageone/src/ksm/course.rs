//! From a goal to knobs.
//!
//! ksmd looks at `pages_to_scan` pages, sleeps for `sleep_millisecs`, and so on. With n pages at a time, c seconds of CPU time for a page,
//! and a sleep of s, it looks at r = n / (n·c + s) pages a second. A goal asks for a rate:
//!
//! - A time to saving T: new memory is shared within two scans, so all M pages have to be looked at in T/2: r = 2·M/T.
//! - A CPU share p: r = p/c.
//!
//! The rest is measured: a clock tick makes sleeps longer, other programs take the CPU. So a gain, learned from what came
//! of the last course, multiplies the rate.

use std::time::Duration;

/// What is to be kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Goal {
    /// New memory is shared after at most this time.
    Saving(Duration),
    /// ksmd takes this part of one CPU.
    Share(f64),
}

/// What the course is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    /// Pages that KSM may share.
    pub(super) pages: u64,
    /// CPU seconds for a page.
    pub(super) cost: f64,
}

/// Knobs, and what they should bring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Course {
    pub(super) pages_to_scan: u64,
    pub(super) sleep_millisecs: u64,
    /// Whether even a whole CPU does not reach the goal.
    pub(super) out_of_reach: bool,
}

/// The kernel's own sleep.
const SLEEP: f64 = 0.020;
/// As many at a time: a write to `run` waits for the end of a batch, which this keeps to a fraction of a second.
const MOST: f64 = 100_000.0;
/// Fewer are not worth waking up for.
const LEAST: f64 = 16.0;
/// A goal in time is reached a little earlier.
const EARLY: f64 = 0.85;
/// CPU time for a page until it is measured.
pub(super) const USUAL_COST: f64 = 2e-6;

impl Goal {
    /// Pages a second that reach the goal.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn rate(self, load: Load) -> f64 {
        match self {
            Self::Saving(time) => load.pages as f64 / (EARLY * time.as_secs_f64() / 2.0),
            Self::Share(share) => share / load.cost,
        }
    }

    /// The knobs for a goal: nothing to do without pages.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the values are within bounds"
    )]
    pub(super) fn course(self, load: Load, gain: f64) -> Option<Course> {
        if load.pages == 0 {
            return None;
        }
        // Seconds between two pages, less those of the CPU: the part of a sleep that falls to a page.
        let rest = 1.0 / (gain * self.rate(load)) - load.cost;
        let most = MOST.min(load.pages as f64).max(LEAST);
        let pages = (SLEEP / rest.max(1e-12)).clamp(LEAST, most);
        let sleep = (pages * rest * 1000.0).max(0.0);
        // A share below one has to sleep.
        let sleep = match self {
            Self::Share(share) if share < 1.0 => sleep.max(1.0),
            _ => sleep,
        };
        let wanted = self.rate(load) * load.cost;
        Some(Course {
            pages_to_scan: pages.round() as u64,
            sleep_millisecs: sleep.round().min(60_000.0) as u64,
            out_of_reach: matches!(self, Self::Saving(_)) && wanted > 1.0,
        })
    }

    /// The gain after a course that brought `seen`: the CPU share, or pages a second.
    pub(super) fn learn(self, gain: f64, load: Load, seen: f64) -> f64 {
        let (wanted, bounds) = match self {
            // KSM is never slower than the goal asks for: a scan may be shorter than the memory is large, as it skips pages.
            Self::Saving(_) => (self.rate(load), (1.0, 8.0)),
            Self::Share(share) => (share, (0.05, 20.0)),
        };
        let change = (wanted / seen.max(1e-4)).clamp(0.7, 1.4);
        (gain * change).clamp(bounds.0, bounds.1)
    }
}

/// The seconds of a whole scan of `pages`, as the knobs are.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
pub(super) fn scan_seconds(
    pages: u64,
    pages_to_scan: u64,
    sleep_millisecs: u64,
    cost: f64,
) -> Option<f64> {
    if pages_to_scan == 0 {
        return None;
    }
    // A batch ends where a scan does.
    let batches = (pages as f64 / pages_to_scan as f64).max(1.0);
    Some(batches * sleep_millisecs as f64 / 1000.0 + pages as f64 * cost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 18;

    fn reached(course: Course, load: Load) -> f64 {
        scan_seconds(
            load.pages,
            course.pages_to_scan,
            course.sleep_millisecs,
            load.cost,
        )
        .unwrap()
    }

    #[test]
    fn a_time_gives_a_scan_of_half_of_it() {
        let load = Load {
            pages: 10 * GIB,
            cost: 2e-6,
        };
        let course = Goal::Saving(Duration::from_secs(60))
            .course(load, 1.0)
            .unwrap();
        let seconds = reached(course, load);
        assert!((24.0..30.0).contains(&seconds), "{course:?}: {seconds}");
        assert!(!course.out_of_reach);
    }

    #[test]
    fn more_memory_than_a_cpu_can_look_at_is_out_of_reach_and_tried() {
        let load = Load {
            pages: 1000 * GIB,
            cost: 2e-6,
        };
        let course = Goal::Saving(Duration::from_secs(60))
            .course(load, 1.0)
            .unwrap();
        assert!(
            course.out_of_reach && course.sleep_millisecs == 0,
            "{course:?}"
        );
        assert_eq!(course.pages_to_scan, 100_000);
    }

    #[test]
    fn a_share_sleeps_for_the_rest() {
        let load = Load {
            pages: 10 * GIB,
            cost: 2e-6,
        };
        let course = Goal::Share(0.1).course(load, 1.0).unwrap();
        // 1111 pages take 2.2 ms, a tenth of the time with a sleep of 20 ms.
        assert_eq!(
            (course.pages_to_scan, course.sleep_millisecs),
            (1111, 20),
            "{course:?}"
        );
        assert_eq!(
            Goal::Share(0.1).course(Load { pages: 0, ..load }, 1.0),
            None
        );
    }

    #[test]
    fn the_gain_follows_what_was_seen() {
        let load = Load {
            pages: 100_000,
            cost: 2e-6,
        };
        let share = Goal::Share(0.2);
        assert!(share.learn(1.0, load, 0.1) > 1.0 && share.learn(1.0, load, 0.4) < 1.0);
        // 100000 pages in 8.5 s.
        let time = Goal::Saving(Duration::from_secs(20));
        assert!(time.learn(1.0, load, 9000.0) > 1.0);
        assert!((time.learn(1.0, load, 20_000.0) - 1.0).abs() < 1e-9);
        assert!(time.learn(4.0, load, 20_000.0) < 4.0);
    }

    proptest! {
        #[test]
        fn a_course_is_one_that_the_kernel_takes(
            pages in 1_u64..1 << 40, cost in 1e-8..1e-3_f64, gain in 0.05..20.0_f64,
            seconds in 1_u64..100_000, share in 0.001..1.0_f64,
        ) {
            let load = Load { pages, cost };
            for goal in [Goal::Saving(Duration::from_secs(seconds)), Goal::Share(share)] {
                let course = goal.course(load, gain).unwrap();
                prop_assert!((16..=100_000).contains(&course.pages_to_scan), "{course:?}");
                prop_assert!(course.sleep_millisecs <= 60_000, "{course:?}");
            }
        }
    }
}
