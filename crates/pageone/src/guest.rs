//! Hidden verbs: the processes that the demo and the bench start.

use anyhow::{Context, Result};
use bench::{Content, Probe};
use sys::ksm::Ksm;

use crate::demo_guest;

#[derive(clap::Subcommand)]
pub(crate) enum Kind {
    /// Memory whose content follows from a seed
    Bench(BenchGuest),
    /// Pages of four kinds, whose accesses are timed
    Timing(TimingGuest),
    /// Files of this machine, private data and zeros, verified and rewritten all the time
    Demo(demo_guest::Args),
}

#[derive(clap::Args)]
pub(crate) struct BenchGuest {
    #[arg(long)]
    number: u64,
    #[arg(long)]
    pages: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    dup: f64,
    #[arg(long)]
    run_pages: u64,
    #[arg(long)]
    zero_prefix: f64,
    #[arg(long)]
    shuffle: bool,
}

#[derive(clap::Args)]
pub(crate) struct TimingGuest {
    role: Role,
    #[arg(long)]
    pages: u32,
    #[arg(long)]
    seed: u64,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Role {
    /// Has the pages that the other one looks for.
    Owner,
    /// Times its accesses.
    Prober,
}

impl BenchGuest {
    /// The arguments that make guest `number` of `content`.
    pub(crate) fn words(content: &Content, number: u64) -> Vec<String> {
        let mut words = vec!["guest".to_owned(), "bench".to_owned()];
        let mut flag = |name: &str, value: String| words.push(format!("--{name}={value}"));
        flag("number", number.to_string());
        flag("pages", content.pages.to_string());
        flag("seed", content.seed.to_string());
        flag("dup", content.dup.to_string());
        flag("run-pages", content.run_pages.to_string());
        flag("zero-prefix", content.zero_prefix.to_string());
        if content.shuffle {
            words.push("--shuffle".to_owned());
        }
        words
    }
}

pub(crate) fn main(kind: Kind) -> Result<()> {
    match kind {
        Kind::Bench(args) => {
            let content = Content {
                seed: args.seed,
                dup: args.dup,
                run_pages: args.run_pages.max(1),
                zero_prefix: args.zero_prefix,
                pages: args.pages,
                shuffle: args.shuffle,
            };
            bench::serve_guest(&content, args.number).context("this guest failed")
        }
        Kind::Timing(args) => {
            let pages = usize::try_from(args.pages).context("too many pages")?;
            let probe = Probe {
                pages,
                seed: args.seed,
            };
            let served = match args.role {
                Role::Owner => probe.serve_owner(),
                Role::Prober => probe.serve_prober(),
            };
            served.context("this guest failed")
        }
        Kind::Demo(args) => demo_guest::main(&args),
    }
}

/// The watchdog of KSM's knobs.
pub(crate) fn watch_ksm(knobs: &[String]) -> Result<()> {
    bench::watch_ksm(&Ksm::default(), knobs, std::io::stdin()).context("KSM's knobs are not back")
}
