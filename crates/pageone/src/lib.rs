//! The `pageone` command, as a library: so its tests and the fuzz targets reach the parsers and the bench's guests.
//!
//! A folder a verb, each using only those below it:
//!
//! ```text
//! guest                       the processes that demo and bench start
//! demo                        live guests of this machine's files
//! bench                       PageONE and KSM on the same guests, and other measurements
//! view     status set numa    questions to a daemon, and tables
//! run      launch program     a command as a guest
//! daemon   server lane policy …   the engine of a machine and its socket
//! client   human  paths       a question to a daemon, words for people, where things are
//! ```
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage. `run` passes on its command's code, and has 125 for
//! a failure of its own, 126 for a command that is not executable, 127 for one that is not found.
#![forbid(unsafe_code)]

pub mod bench;
mod client;
mod daemon;
mod demo;
mod guest;
mod human;
mod knobs;
mod paths;
mod run;
mod view;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use daemon::{config, policy};

/// Memory page deduplication for Linux hosts, in user space.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Serves the guests of this machine until SIGTERM
    Daemon(daemon::Args),
    /// Runs a command as a guest: what it offers for merging is merged
    Run(run::Args),
    /// Shows the counters
    Status(view::status::Args),
    /// Turns knobs of a running daemon
    Set(view::set::Args),
    /// Merges the memory of live guests on this machine and shows what came back
    Demo(demo::Args),
    /// Shows nodes, their memory, and what is on them
    #[command(subcommand)]
    Numa(view::NumaCommand),
    /// Measures and compares
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// A guest of the demo or the bench
    #[command(hide = true, subcommand)]
    Guest(guest::Kind),
    /// Puts KSM's knobs back when the bench dies
    #[command(hide = true)]
    KsmWatchdog { knobs: Vec<String> },
}

/// Runs the verb of the command line.
#[must_use]
pub fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Daemon(args) => daemon::main(&args),
        Verb::Run(args) => return run::main(&args),
        Verb::Status(args) => view::status::main(&args),
        Verb::Set(args) => view::set::main(&args),
        Verb::Demo(args) => demo::main(&args),
        Verb::Numa(command) => command.run(),
        Verb::Bench(command) => command.run(),
        Verb::Guest(kind) => guest::main(kind),
        Verb::KsmWatchdog { knobs } => bench::guest::watch(&knobs),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pageone: {error:#}");
            ExitCode::FAILURE
        }
    }
}
