//! `pageone ksm`: for hosts that stay with the kernel's KSM.
//!
//! ```text
//! status   why    facts and reasons, as tables or JSON; `why` says what keeps memory from being shared
//! watch    tune   a line a step; `tune` turns knobs between the steps
//! course          a goal and what was seen → pages_to_scan and sleep_millisecs
//! facts           KSM's counters, its knobs, ksmd's CPU time, and the processes whose memory it may share
//! guard           puts the knobs back, also when this process is killed
//! ```
//!
//! KSM shares a page when it has met the same content twice: so memory that is new comes back within two whole scans. How long a
//! scan takes is what the knobs decide, and the CPU time of ksmd is the price.

mod course;
mod facts;
pub(crate) mod guard;
mod status;
mod tune;
mod watch;
mod why;

use anyhow::{Context, Result};
use clap::Subcommand;
use sys::ksm::Ksm;

/// KSM: its state, and a goal for it.
#[derive(Subcommand)]
pub(crate) enum KsmCommand {
    /// Shows what KSM saves, net of its tables, what that costs, and why it is not more
    Status(status::Args),
    /// Shows KSM's figures again and again, and draws them
    Watch(watch::Args),
    /// Turns KSM's knobs towards a goal, and puts them back at the end
    Tune(tune::Args),
}

impl KsmCommand {
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Self::Status(args) => status::main(args),
            Self::Watch(args) => watch::main(args),
            Self::Tune(args) => tune::main(args),
        }
    }
}

/// The watchdog of KSM's knobs: puts them back when the process dies that turned them.
pub(crate) fn watchdog(knobs: &[String]) -> Result<()> {
    guard::watch(&Ksm::default(), knobs, std::io::stdin()).context("KSM's knobs are not back")
}

/// KSM of this machine.
///
/// # Errors
/// There is none.
fn here() -> Result<Ksm> {
    let ksm = Ksm::default();
    anyhow::ensure!(
        ksm.exists(),
        "this kernel has no KSM (CONFIG_KSM): `pageone run` shares memory without it"
    );
    Ok(ksm)
}
