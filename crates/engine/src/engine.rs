//! The engine as its owner sees it: start, admit guests, read counters, turn knobs, stop.

use std::os::fd::OwnedFd;
use std::time::Duration;

use wire::{RunMode, Setting, Status};

/// How an engine starts.
#[derive(Clone, Debug)]
pub struct Options {
    /// Worker threads; at least 1.
    pub threads: u16,
    /// The time between two looks at what was written.
    pub merge_period: Duration,
    /// Whether pages of zeros map the kernel's zero page.
    pub use_zero_pages: bool,
    /// Whether to merge from the start.
    pub run: RunMode,
    /// How long a worker waits for an agent's answer before it turns to other guests.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            threads: u16::try_from(cpus).unwrap_or(u16::MAX),
            merge_period: Duration::from_secs(20),
            use_zero_pages: true,
            run: RunMode::Run,
            patience: Duration::from_millis(50),
        }
    }
}

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

/// A running engine.
#[derive(Debug)]
pub struct Engine {}

impl Engine {
    /// Starts the workers.
    ///
    /// # Errors
    /// What the kernel lacks.
    pub fn start(_options: Options) -> Result<Self, EngineError> {
        Ok(Self {})
    }

    /// Takes a guest whose hello has been read. Never blocks.
    pub fn admit(&self, _socket: OwnedFd, _peer: sys::socket::Peer, _domain: &str) {}

    /// The counters.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::default()
    }

    /// Turns knobs, all or none.
    ///
    /// # Errors
    /// A value out of range; no memory for private copies.
    pub fn set(&self, _settings: &[Setting]) -> Result<(), EngineError> {
        Ok(())
    }

    /// Ends the workers.
    pub fn stop(self) {}
}
