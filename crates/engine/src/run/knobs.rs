//! The knobs, as the running engine has them.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI8, AtomicU8, AtomicU16, AtomicU32, AtomicU64};
use std::time::Duration;

use wire::{CHUNK_PAGES, Pace, RunMode, Thp};

use crate::options::{Options, Rules};
use crate::run::pace::{self, Supply};

/// The knobs.
#[derive(Debug)]
pub(crate) struct Knobs {
    run: AtomicU8,
    pub(crate) use_zero_pages: AtomicBool,
    pub(crate) merge_again: AtomicBool,
    pub(crate) period_ms: AtomicU64,
    pub(crate) threads: AtomicU16,
    /// Percent of a core; 0 for no limit.
    pub(crate) cpu_limit: AtomicU32,
    auto_pace: AtomicBool,
    /// How often the period is doubled at present; halved, if negative.
    pace_step: AtomicI8,
    across_nodes: AtomicBool,
    max_sharing: AtomicU32,
    thp: AtomicU8,
    /// 0 for no limit.
    pub(crate) store_limit_mib: AtomicU64,
    /// Whether the host was short of memory when the round began.
    short: AtomicBool,
    broken_rest: Duration,
    pub(crate) patience: Duration,
    pub(crate) max_mappings: u64,
}

impl Knobs {
    /// The knobs as `options` wants them.
    pub(crate) fn new(options: &Options, max_mappings: u64) -> Self {
        let period = u64::try_from(options.merge_period.as_millis());
        Self {
            run: AtomicU8::new(options.run.into()),
            use_zero_pages: AtomicBool::new(options.use_zero_pages),
            merge_again: AtomicBool::new(options.merge_again),
            period_ms: AtomicU64::new(period.unwrap_or(u64::MAX)),
            threads: AtomicU16::new(options.threads),
            cpu_limit: AtomicU32::new(options.cpu_limit),
            auto_pace: AtomicBool::new(options.pace == Pace::Auto),
            pace_step: AtomicI8::new(0),
            across_nodes: AtomicBool::new(options.merge_across_nodes),
            max_sharing: AtomicU32::new(options.max_page_sharing),
            thp: AtomicU8::new(options.thp as u8),
            store_limit_mib: AtomicU64::new(options.store_limit_mib),
            short: AtomicBool::new(false),
            broken_rest: options.broken_rest,
            patience: options.patience,
            max_mappings,
        }
    }

    /// Whether to merge.
    pub(crate) fn mode(&self) -> RunMode {
        RunMode::try_from(self.run.load(Acquire)).unwrap_or_default()
    }

    /// Changes whether to merge. A job that read the old mode holds its chunk's lock until it is
    /// done, so whoever locks the chunk after this call sees what it did.
    pub(crate) fn set_mode(&self, mode: RunMode) {
        self.run.store(mode.into(), Release);
    }

    /// What may be shared with what.
    pub(crate) fn rules(&self) -> Rules {
        Rules {
            across_nodes: self.across_nodes.load(Acquire),
            max_sharing: self.max_sharing.load(Acquire),
        }
    }

    /// Changes what may be shared with what; nothing must be shared (see [`crate::run::switch`]).
    pub(crate) fn set_rules(&self, rules: Rules) {
        self.across_nodes.store(rules.across_nodes, Release);
        self.max_sharing.store(rules.max_sharing, Release);
    }

    /// Slots that all stores together may have.
    pub(crate) fn store_limit(&self) -> u64 {
        const MIB_PAGES: u64 = (1 << 20) / wire::PAGE_BYTES as u64;
        match self.store_limit_mib.load(Relaxed) {
            0 => u64::MAX,
            mib => mib.saturating_mul(MIB_PAGES),
        }
    }

    /// Rounds after which a broken page is older by one.
    pub(crate) fn broken_rounds(&self) -> u64 {
        let period = u64::try_from(self.period().as_millis()).unwrap_or(u64::MAX);
        let rest = u64::try_from(self.broken_rest.as_millis()).unwrap_or(u64::MAX);
        rest.div_ceil(period.max(1))
    }

    /// The time between two looks at present.
    pub(crate) fn period(&self) -> Duration {
        let knob = Duration::from_millis(self.period_ms.load(Relaxed));
        pace::at_step(knob, self.pace_step.load(Relaxed))
    }

    /// How the period is chosen.
    pub(crate) fn pace(&self) -> Pace {
        match self.auto_pace.load(Relaxed) {
            true => Pace::Auto,
            false => Pace::Fixed,
        }
    }

    /// What is done with chunks that are one huge page.
    pub(crate) fn thp(&self) -> Thp {
        match self.thp.load(Relaxed) {
            0 => Thp::Keep,
            1 => Thp::Split,
            _ => Thp::Auto,
        }
    }

    /// Changes what is done with chunks that are one huge page.
    pub(crate) fn set_thp(&self, thp: Thp) {
        self.thp.store(thp as u8, Relaxed);
    }

    /// How many pages of a huge page must be saved for it to be split.
    pub(crate) fn worth_splitting(&self) -> usize {
        match self.thp() {
            Thp::Keep => usize::MAX,
            Thp::Auto if !self.short.load(Relaxed) => CHUNK_PAGES / 2,
            Thp::Auto | Thp::Split => 0,
        }
    }

    /// Looks whether the host is short of memory, where something depends on it.
    pub(crate) fn look_at_supply(&self) {
        if self.thp() == Thp::Auto {
            // Who cannot tell is not in need.
            let short = Supply::read().is_ok_and(Supply::is_short);
            self.short.store(short, Relaxed);
        }
    }

    /// Changes how the period is chosen.
    pub(crate) fn set_pace(&self, pace: Pace) {
        self.auto_pace.store(pace == Pace::Auto, Relaxed);
    }

    /// Sets how often the period is doubled.
    pub(crate) fn set_step(&self, step: i8) {
        if self.pace_step.swap(step, Relaxed) != step {
            tracing::info!(period = ?self.period(), "the pace changes");
        }
    }
}
