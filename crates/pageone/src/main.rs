//! The `pageone` command: one binary, a file a verb.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage; `run` passes on its command's code, and has 125 for
//! a failure of its own, 126 for a command that is not executable, 127 for one that is not found.
#![forbid(unsafe_code)]

mod bench;
mod client;
mod daemon;
mod demo;
mod demo_guest;
mod guest;
mod host;
mod keep;
mod lane;
mod launch;
mod listener;
mod log;
mod numa;
mod paths;
mod program;
mod run;
mod server;
mod set;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pageone::{config, human, policy};

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
    Status(status::Args),
    /// Turns knobs: run, merge_period, threads, use_zero_pages, cpu_limit, pace
    Set(set::Args),
    /// Merges the memory of live guests on this machine and shows what came back
    Demo(demo::Args),
    /// Shows nodes, their memory, and what is on them
    #[command(subcommand)]
    Numa(numa::NumaCommand),
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

fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Daemon(args) => daemon::main(&args),
        Verb::Run(args) => return run::main(&args),
        Verb::Status(args) => status::main(&args),
        Verb::Set(args) => set::main(&args),
        Verb::Demo(args) => demo::main(&args),
        Verb::Numa(command) => command.run(),
        Verb::Bench(command) => command.run(),
        Verb::Guest(kind) => guest::main(kind),
        Verb::KsmWatchdog { knobs } => guest::watch_ksm(&knobs),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pageone: {error:#}");
            ExitCode::FAILURE
        }
    }
}
