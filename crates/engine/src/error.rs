//! What can go wrong when an engine starts, or a knob is turned.

/// Why the engine cannot start or a knob cannot turn.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel or the machine's policy lacks something the engine needs.
    #[error("{what} is missing: {needs}")]
    Missing {
        /// The facility.
        what: &'static str,
        /// What would provide it.
        needs: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A setting lies outside its range.
    #[error("{knob} cannot be {value}: it takes {range}")]
    Range {
        /// The knob's name.
        knob: &'static str,
        /// The value asked for.
        value: u64,
        /// What it takes.
        range: &'static str,
    },
    /// Private copies of all merged pages would not fit memory.
    #[error("unmerging needs {needed} bytes of memory, {available} are available")]
    NoMemory {
        /// Bytes that private copies take.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// What may be shared with what cannot change under shared pages.
    #[error(
        "{pages} pages are shared, and {knob} cannot change under them: unmerge them first \
         (pageone set --unmerge {knob}=…)"
    )]
    Shared {
        /// The knob's name.
        knob: &'static str,
        /// Pages that share a copy, or are about to.
        pages: u64,
    },
    /// The engine ends.
    #[error("the engine ends")]
    Ends,
    /// Some guests did not give their merged pages private copies in time.
    #[error("{left} pages are still merged: their guests do not answer")]
    Unmerging {
        /// Pages still merged.
        left: u64,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}
