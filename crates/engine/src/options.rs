//! How an engine starts, and the values that its knobs take.

use std::time::Duration;

use numa::Topology;
use wire::{KnobValues, OutOfRange};

/// How an engine starts.
#[derive(Clone, Debug)]
pub struct Options {
    /// The knobs.
    pub knobs: KnobValues,
    /// The least time in which a broken page grows older by one of its two periods: longer than any
    /// system call keeps a page pinned for itself.
    pub broken_rest: Duration,
    /// How long a worker waits for an agent's answer before it turns to other guests.
    pub patience: Duration,
    /// The machine's nodes; `None`: as the kernel shows them. An emulated topology makes the engine
    /// treat parts of memory as nodes.
    pub topology: Option<Topology>,
    /// What one process and one user may take of the engine.
    pub limits: Limits,
}

/// What may be shared with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Whether pages of two nodes may share.
    pub(crate) across_nodes: bool,
    /// Pages that may share one copy; at least 2.
    pub(crate) max_sharing: u32,
}

impl Rules {
    pub(crate) fn of(knobs: &KnobValues) -> Self {
        Self {
            across_nodes: knobs.merge_across_nodes,
            max_sharing: knobs.max_page_sharing,
        }
    }
}

/// What one process and one user may take of the engine. A guest at a limit keeps what it has; the rest of
/// its memory is left alone, and its status names the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections to the daemon that are no guests'. With more, the user who has most loses one.
    pub connections: usize,
    /// Those of one user among them.
    pub connections_per_user: usize,
    /// Processes that are guests.
    pub guests: u64,
    /// Those of one user among them.
    pub guests_per_user: u64,
    /// Domains. Each takes three descriptors of a keeper, and one more for each further node: 2048 in all.
    pub domains: u64,
    /// Those that one user's guests began.
    pub domains_per_user: u64,
    /// Descriptors that a keeper holds for the domains: what its own limit is.
    pub kept_descriptors: u64,
    /// Those for the domains that one user's guests began.
    pub kept_descriptors_per_user: u64,
    /// Descriptors of guests that are gone, which are not closed yet.
    pub unclosed_descriptors: u64,
    /// Those of one user's guests.
    pub unclosed_descriptors_per_user: u64,
    /// Files of `/proc` that were read of guests, and are not closed yet.
    pub unclosed_texts: u64,
    /// Those of one user's guests.
    pub unclosed_texts_per_user: u64,
    /// Ranges of addresses that a process may offer.
    pub regions_per_process: u64,
    /// Chunks of 2 MiB that a process may offer, whether there is memory in them or not.
    pub chunks_per_process: u64,
    /// MiB of the engine's tables for the guests of a process.
    pub table_mib_per_process: u64,
    /// MiB of the engine's tables for all guests of a user.
    pub table_mib_per_user: u64,
    /// Threads of the engine that may sleep in looks at one user's memory. At the limit none of his guests is
    /// looked at before one of the threads is back.
    pub stuck_threads_per_user: u32,
    /// The same for all users. Beyond it a guest in which a thread gets stuck is dropped at once.
    pub stuck_threads: u32,
    /// Descriptors of a process that are looked at for pins. A process with more counts as one that may hold pins.
    pub descriptors_per_process: u32,
}

/// Descriptors that a keeper holds.
const KEPT: u64 = 2048;
/// Descriptors that a guest takes: four, and some for older lifelines.
const DESCRIPTORS: u64 = 8;
const LEAST_GUESTS: u64 = 64;
const GUESTS_OF_USER: u64 = 1024;

/// One part in so many of the memory is the most that a user's tables take: the tables of memory none of whose pages
/// is shared take one part in 200.
const TABLES_OF_USER: u64 = 32;
/// The least that a user's tables may take, in MiB.
const LEAST_TABLES_MIB: u64 = 64;

impl Limits {
    /// Bytes of the engine's tables for all guests of a user.
    pub(crate) fn table_bytes_per_user(&self) -> usize {
        usize::try_from(self.table_mib_per_user.saturating_mul(1 << 20)).unwrap_or(usize::MAX)
    }
}

impl Default for Limits {
    fn default() -> Self {
        let memory = sys::meminfo::total_mib().unwrap_or(0); // of a host that does not tell: the least
        let table_mib_per_user = (memory / TABLES_OF_USER).max(LEAST_TABLES_MIB);
        Self {
            connections: 256,
            connections_per_user: 64,
            guests: (sys::process::descriptor_limit() / DESCRIPTORS).max(LEAST_GUESTS),
            guests_per_user: GUESTS_OF_USER,
            domains: KEPT / 3,
            domains_per_user: 512,
            kept_descriptors: KEPT,
            kept_descriptors_per_user: KEPT / 4 * 3,
            unclosed_descriptors: (sys::process::descriptor_limit() / 4)
                .max(LEAST_GUESTS * DESCRIPTORS),
            unclosed_descriptors_per_user: GUESTS_OF_USER * DESCRIPTORS,
            unclosed_texts: 512,
            unclosed_texts_per_user: 64,
            regions_per_process: 1 << 16,
            chunks_per_process: 1 << 20,
            table_mib_per_process: (table_mib_per_user / 2).max(LEAST_TABLES_MIB),
            table_mib_per_user,
            stuck_threads_per_user: 4,
            stuck_threads: 64,
            descriptors_per_process: 4096,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            knobs: KnobValues::default(),
            broken_rest: Duration::from_millis(500),
            patience: Duration::from_millis(50),
            topology: None,
            limits: Limits::default(),
        }
    }
}

impl Options {
    /// Whether each knob takes its value.
    pub(crate) fn check(&self) -> Result<(), OutOfRange> {
        let settings = self.knobs.settings();
        settings.iter().try_for_each(wire::Setting::check)
    }
}
