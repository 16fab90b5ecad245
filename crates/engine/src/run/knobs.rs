//! The knobs, as the running engine has them.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI8};
use std::time::Duration;

use wire::{CHUNK_PAGES, KnobValues, Setting, Thp};

use crate::options::{Options, Rules};
use crate::run::pace::{self, Supply};
use crate::sync::{Ordered, VALUES, lock};

/// The knobs, and what the engine derives from them and from the machine.
#[derive(Debug)]
pub(crate) struct Knobs {
    values: Ordered<KnobValues, VALUES>,
    /// How often the period is doubled at present; halved, if negative.
    pace_step: AtomicI8,
    /// Whether the host was short of memory when the round began.
    short: AtomicBool,
    broken_rest: Duration,
    pub(crate) patience: Duration,
    pub(crate) max_mappings: u64,
}

impl Knobs {
    /// The knobs as `options` wants them.
    pub(crate) fn new(options: &Options, max_mappings: u64) -> Self {
        Self {
            values: Ordered::new(options.knobs),
            pace_step: AtomicI8::new(0),
            short: AtomicBool::new(false),
            broken_rest: options.broken_rest,
            patience: options.patience,
            max_mappings,
        }
    }

    /// All values at this moment. A job reads them once, when it has its chunk's lock: so a thread that turns a knob, and
    /// has that lock afterwards, sees all that was done by the old value.
    pub(crate) fn values(&self) -> KnobValues {
        *lock(&self.values)
    }

    /// Turns knobs. Those of [`Rules`] turn while nothing is shared only: see [`crate::run::switch`].
    pub(crate) fn turn(&self, settings: impl IntoIterator<Item = Setting>) {
        let mut values = lock(&self.values);
        settings
            .into_iter()
            .for_each(|setting| values.turn(setting));
    }

    /// What may be shared with what.
    pub(crate) fn rules(&self) -> Rules {
        Rules::of(&self.values())
    }

    /// Rounds after which a broken page is older by one.
    pub(crate) fn broken_rounds(&self) -> u64 {
        let period = u64::try_from(self.period().as_millis()).unwrap_or(u64::MAX);
        let rest = u64::try_from(self.broken_rest.as_millis()).unwrap_or(u64::MAX);
        rest.div_ceil(period.max(1))
    }

    /// The time between two looks at present.
    pub(crate) fn period(&self) -> Duration {
        let knob = Duration::from_millis(self.values().merge_period_ms);
        pace::at_step(knob, self.pace_step.load(Relaxed))
    }

    /// How many pages of a huge page must be saved for it to be split.
    pub(crate) fn worth_splitting(&self, thp: Thp) -> usize {
        match thp {
            Thp::Keep => usize::MAX,
            Thp::Auto if !self.short.load(Relaxed) => CHUNK_PAGES / 2,
            Thp::Auto | Thp::Split => 0,
        }
    }

    /// Whether the host was short of memory when the round began.
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Relaxed)
    }

    /// Looks whether the host is short of memory, where something depends on it.
    pub(crate) fn look_at_supply(&self) {
        let values = self.values();
        if values.thp == Thp::Auto || !values.merge_across_nodes {
            // A host that cannot tell is not short.
            let short = Supply::read().is_ok_and(Supply::is_short);
            self.short.store(short, Relaxed);
        }
    }

    /// Sets how often the period is doubled.
    pub(crate) fn set_step(&self, step: i8) {
        if self.pace_step.swap(step, Relaxed) != step {
            tracing::info!(period = ?self.period(), "the pace changes");
        }
    }
}
