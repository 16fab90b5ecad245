//! The `pageone` command.
#![forbid(unsafe_code)]

mod bench;
mod numa;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "pageone", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows nodes, their memory, and what is on them
    #[command(subcommand)]
    Numa(numa::NumaCommand),
    /// Measures and compares
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Numa(command) => command.run(),
        Command::Bench(command) => command.run(),
    }
}
