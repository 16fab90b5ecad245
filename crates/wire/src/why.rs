//! Why memory is not merged: codes for programs, words for people.

use serde::{Deserialize, Serialize};

/// Why memory of a guest is not merged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyNot {
    /// The reason, for programs.
    pub code: WhyNotCode,
    /// The pages it holds for; 0 where it holds for the guest, or cannot be counted.
    #[serde(default)]
    pub pages: u64,
    /// The reason in words.
    pub why: String,
}

/// The reasons for which memory is not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyNotCode {
    /// The guest has just come: its first look is due.
    New,
    /// Its pages are observed: none can be merged yet.
    Observing,
    /// The knob `run` is 0 or 2.
    Run,
    /// The guest offers nothing.
    NoOffer,
    /// Its agent does not answer.
    NoAnswer,
    /// A look at its memory does not return.
    Stuck,
    /// It may no longer be in its domain.
    Leaves,
    /// It is at a limit.
    Limit,
    /// No other guest is in its domain: only its own pages can be equal.
    Alone,
    /// Half of its memory or more was written lately.
    Busy,
    /// Half of its memory or more is at rest, and equals no other page of its domain.
    Unique,
    /// Written after they were merged; it may hold pins, or merging again is switched off.
    Broken,
    /// The kernel does not move them: in use for I/O, or shared by fork or KSM.
    Pinned,
    /// In mappings of files, or stores of another engine.
    Foreign,
    /// In mappings of a kind that is not merged.
    Unfit,
    /// No room for them, or merging them failed; they are tried again.
    PutOff,
    /// A newer daemon has a reason that this program does not know.
    #[serde(other)]
    Other,
}
