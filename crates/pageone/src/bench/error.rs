//! Why a comparison could not be made.

use std::io;
use std::path::PathBuf;

use super::mappings::LimitError;

/// Why a comparison could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The machine is too small, or too full, for the guests asked for.
    #[error(
        "{guests} guests of {guest_mib} MiB need {need_mib} MiB of memory, {have_mib} MiB are \
         available: ask for fewer or smaller guests"
    )]
    Memory {
        /// Guests asked for.
        guests: u64,
        /// Memory of each, in MiB.
        guest_mib: u64,
        /// What that takes, in MiB.
        need_mib: u64,
        /// What /proc/meminfo says is available, in MiB.
        have_mib: u64,
    },
    /// A guest ended, or did not answer in time.
    #[error("guest {pid} {what}")]
    Guest {
        /// Its process id.
        pid: u32,
        /// What happened.
        what: String,
    },
    /// A program that a case is about is not installed.
    #[error("there is no program `{0}` here")]
    NoProgram(&'static str),
    /// A variant is about a limit that cannot be raised.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A file that virtual machines are made of was not named.
    #[error("{0} FILE says what virtual machines boot from")]
    NoVm(&'static str),
    /// A file that virtual machines are made of cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    VmFile {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// KSM could not be read or turned.
    #[error("KSM: {0}")]
    Ksm(io::Error),
    /// A contender failed.
    #[error("{name}: {why}")]
    Contender {
        /// Which one.
        name: &'static str,
        /// What it said.
        why: String,
    },
    /// A process or a file of /proc failed.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The user broke it off.
    #[error("interrupted")]
    Interrupted,
}

impl BenchError {
    /// For `map_err`: an [`io::Error`] and what was attempted.
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
