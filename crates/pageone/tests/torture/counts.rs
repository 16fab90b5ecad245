//! The counts of guests in files that outlive them, and the sum of a run.

use std::fmt;
use std::path::Path;

/// As `struct counts` in tests/torture/guest.h.
const FIELDS: usize = 11;

/// The sum of guests' counters, in their order. Pages, unless named.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts([u64; FIELDS]);

impl Counts {
    /// The counters of a guest and its children; none before its first step.
    pub(crate) fn read(file: &Path) -> Self {
        let mut counts = Self::default();
        let bytes = std::fs::read(file).unwrap_or_default();
        for (count, word) in counts.0.iter_mut().zip(bytes.chunks_exact(8)) {
            *count = u64::from_ne_bytes(word.try_into().unwrap());
        }
        counts
    }

    pub(crate) fn add(&mut self, other: Self) {
        for (sum, more) in self.0.iter_mut().zip(other.0) {
            *sum += more;
        }
    }

    /// Steps begun.
    pub(crate) fn steps(self) -> u64 {
        self.0[0]
    }

    /// Pages written, compared, discarded, moved, protected and transferred.
    fn page_operations(self) -> u64 {
        self.0[1..7].iter().sum()
    }

    fn forks(self) -> u64 {
        self.0[7]
    }

    /// Processes that found a wrong byte.
    pub(crate) fn mismatches(self) -> u64 {
        self.0[9]
    }

    /// Calls that failed, children that crashed.
    pub(crate) fn failures(self) -> u64 {
        self.0[10]
    }
}

/// The outcome of a run.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) counts: Counts,
    /// Pages that became shared or zero pages, as seen from status to status: at least so many.
    pub(crate) merged: u64,
    /// Merged pages that were written, seen likewise.
    pub(crate) broken: u64,
    /// Pages merged that had been merged and written before.
    pub(crate) merged_again: u64,
    /// Daemons killed.
    pub(crate) daemons_killed: u64,
    /// Guests killed.
    pub(crate) guests_killed: u64,
    /// Knobs turned.
    pub(crate) knobs: u64,
    /// Times memory was compacted.
    pub(crate) compactions: u64,
    /// What went wrong beside the guests' own findings.
    pub(crate) complaints: Vec<String>,
}

impl Summary {
    /// Fails unless the run was a success, and tested something.
    pub(crate) fn judge(&self) {
        let counts = self.counts;
        assert_eq!(counts.mismatches(), 0, "wrong bytes, see above");
        assert_eq!(counts.failures(), 0, "calls failed, see above");
        assert!(self.complaints.is_empty(), "{:#?}", self.complaints);
        assert!(self.merged > 0, "nothing was merged, so nothing was tested");
        assert!(counts.page_operations() > 0, "no guest did anything");
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} page operations, {} pages merged, {} broken, {} merged again, {} daemons killed, {} guests killed, \
             {} knobs turned, {} compactions, {} forks, {} mismatches",
            self.counts.page_operations(),
            self.merged,
            self.broken,
            self.merged_again,
            self.daemons_killed,
            self.guests_killed,
            self.knobs,
            self.compactions,
            self.counts.forks(),
            self.counts.mismatches()
        )
    }
}
