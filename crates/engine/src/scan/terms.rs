//! Terms: the aim of a look, and the values of the knobs and of the round that it goes by.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use wire::{KnobValues, RunMode};

use crate::guest::Guest;
use crate::page::CHUNK;
use crate::scan::track::{Ages, Aging};

/// How long a worker scans before others have their turn.
const SCAN_TIME: Duration = Duration::from_millis(20);

/// What a look is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// To hear the agent, and to retire a guest that has ended; of its memory only merged pages to unmerge are found.
    Hear,
    /// The look of a round: all memory is scanned.
    Round,
    /// The look of a pass: the memory between these addresses is scanned. What is not seen `until` then is left to the rounds.
    Pass {
        start: u64,
        end: u64,
        until: Instant,
        /// A user wants it merged now: it settles at once.
        at_once: bool,
    },
}

impl Aim {
    /// To merge now what overlaps `range`. What is known is known of whole chunks.
    pub(crate) fn now(range: &Range<u64>, until: Instant) -> Self {
        Self::Pass {
            start: range.start / CHUNK * CHUNK,
            end: range
                .end
                .checked_next_multiple_of(CHUNK)
                .unwrap_or(u64::MAX),
            until,
            at_once: true,
        }
    }

    /// An early look at a young guest.
    pub(crate) fn early(until: Instant) -> Self {
        Self::Pass {
            start: 0,
            end: u64::MAX,
            until,
            at_once: false,
        }
    }

    /// Whether no time is left for looks.
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Pass { until, .. } if until <= Instant::now())
    }

    /// Whether it grants a wish to merge now.
    pub(super) fn is_now(self) -> bool {
        matches!(self, Self::Pass { at_once: true, .. })
    }

    /// Whether it is a look of a pass, which comes between two rounds.
    pub(super) fn is_pass(self) -> bool {
        matches!(self, Self::Pass { .. })
    }

    /// Until when a worker scans now.
    pub(super) fn deadline(self) -> Instant {
        let turn = Instant::now() + SCAN_TIME;
        match self {
            Self::Pass { until, .. } => turn.min(until),
            Self::Hear | Self::Round => turn,
        }
    }

    /// Where the next scan of `guest` goes on. A pass has a place of its own: or with wishes enough no round would ever
    /// come to the end.
    pub(super) fn progress(self, guest: &Guest) -> &AtomicU64 {
        match self.is_pass() {
            true => &guest.passes.progress,
            false => &guest.progress,
        }
    }

    /// The addresses that are scanned.
    pub(super) fn reach(self) -> Range<u64> {
        match self {
            Self::Pass { start, end, .. } => start..end,
            Self::Hear | Self::Round => 0..u64::MAX,
        }
    }
}

/// What a look needs besides the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) round: u64,
    /// The number of the agent's next sync. It is not the round's: pages of a round grow older with time.
    pub(crate) sync: u64,
    pub(crate) knobs: KnobValues,
    pub(crate) patience: Duration,
    pub(crate) aim: Aim,
    /// Mappings a guest may have, by `vm.max_map_count`.
    pub(crate) max_mappings: u64,
    /// Rounds after which a broken page is older by one.
    pub(crate) broken_rounds: u64,
}

impl Terms {
    /// For a guest that leaves its domain nothing is left but to be unmerged.
    pub(super) fn of(self, guest: &Guest) -> Self {
        let mut terms = self;
        if guest.leaves() {
            (terms.knobs.run, terms.aim) = (RunMode::Unmerge, Aim::Hear);
        }
        terms
    }

    /// How pages of `guest` grow older in this look. When a round's look `begins`, the guest's descriptors are asked what
    /// they are, as often as broken pages grow older. A page is written when it is pinned, so it settles only after two such looks.
    pub(super) fn ages(&self, guest: &Guest, begins: bool) -> Ages {
        let aging = match self.aim {
            Aim::Pass { at_once: true, .. } => Aging::AtOnce,
            // Too little time has passed.
            Aim::Pass { .. } => Aging::Pass,
            _ if self.round.is_multiple_of(self.broken_rounds.max(1)) => Aging::All,
            _ => Aging::Anonymous,
        };
        Ages {
            round: self.round,
            allowed: match begins && !aging.is_pass() {
                true => self.knobs.merge_again && guest.is_clean(aging == Aging::All),
                false => guest.merges_again(),
            },
            aging,
        }
    }
}
