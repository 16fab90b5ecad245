//! The saving over time, and the figures read off it.

use std::time::Duration;

/// One look at the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    /// Since merging could start.
    pub at: Duration,
    /// Memory gained since before the guests offered theirs, in bytes; may be negative at first.
    pub saved: i64,
    /// CPU time of the merger since then.
    pub cpu: Duration,
}

/// The samples of one run, in the order of time.
#[derive(Clone, Debug, Default)]
pub(super) struct Curve {
    samples: Vec<Sample>,
}

impl Curve {
    /// Adds the next sample.
    pub(super) fn push(&mut self, sample: Sample) {
        self.samples.push(sample);
    }

    /// The first sample that shows `percent` of `ideal` bytes saved.
    #[must_use]
    pub(super) fn reached(&self, ideal: u64, percent: u8) -> Option<&Sample> {
        let goal = i128::from(ideal) * i128::from(percent);
        let enough = |sample: &&Sample| i128::from(sample.saved) * 100 >= goal;
        self.samples.iter().find(enough)
    }

    /// Whether the saving has stopped growing: over the last `window`, it gained less than 0.1 %
    /// of `ideal`.
    #[must_use]
    pub(super) fn is_flat(&self, ideal: u64, window: Duration) -> bool {
        let Some(last) = self.samples.last() else {
            return false;
        };
        let Some(since) = last.at.checked_sub(window) else {
            return false;
        };
        let best = |wanted: &dyn Fn(&Sample) -> bool| {
            let part = self.samples.iter().filter(|s| wanted(s));
            part.map(|s| i128::from(s.saved)).max()
        };
        match (best(&|s| s.at <= since), best(&|s| s.at > since)) {
            (Some(before), Some(after)) => (after - before) * 1000 < i128::from(ideal),
            _ => false,
        }
    }

    /// The median saving over the last `window`: what a single disturbed sample does not shift.
    #[must_use]
    pub(super) fn settled(&self, window: Duration) -> i64 {
        let end = self.samples.last().map_or(Duration::ZERO, |last| last.at);
        let late = self.samples.iter().filter(|s| s.at + window >= end);
        let mut saved: Vec<i64> = late.map(|s| s.saved).collect();
        saved.sort_unstable();
        saved.get(saved.len() / 2).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample each 100 ms; CPU time runs at half the clock.
    fn curve(saved: &[i64]) -> Curve {
        let mut curve = Curve::default();
        for (at, &saved) in (0_u64..).zip(saved) {
            curve.push(Sample {
                at: Duration::from_millis(at * 100),
                saved,
                cpu: Duration::from_millis(at * 50),
            });
        }
        curve
    }

    #[test]
    fn t50_and_t95_are_the_first_samples_there() {
        let curve = curve(&[-5, 0, 499, 500, 949, 950, 940, 1000]);
        let half = curve.reached(1000, 50).unwrap();
        assert_eq!((half.at.as_millis(), half.cpu.as_millis()), (300, 150));
        assert_eq!(curve.reached(1000, 95).unwrap().at.as_millis(), 500);
        assert_eq!(curve.reached(1100, 95), None);
    }

    #[test]
    fn huge_savings_do_not_overflow() {
        let curve = curve(&[0, i64::MAX]);
        assert_eq!(
            curve.reached(i64::MAX as u64, 95).unwrap().at.as_millis(),
            100
        );
        assert_eq!(curve.reached(u64::MAX, 95), None);
    }

    #[test]
    fn it_is_flat_only_after_a_whole_window_without_growth() {
        let window = Duration::from_millis(300);
        assert!(!Curve::default().is_flat(1000, window));
        assert!(!curve(&[500, 500]).is_flat(1000, window), "too short");
        assert!(!curve(&[0, 100, 500, 501, 502]).is_flat(1000, window));
        assert!(curve(&[0, 500, 500, 500, 500]).is_flat(1000, window));
        assert!(
            curve(&[0, 500, 490, 480, 500]).is_flat(1000, window),
            "noise"
        );
    }

    #[test]
    fn the_settled_saving_is_a_median_of_the_end() {
        let window = Duration::from_millis(200);
        assert_eq!(curve(&[0, 0, 0, 900, 100, 910]).settled(window), 900);
        assert_eq!(Curve::default().settled(window), 0);
    }
}
