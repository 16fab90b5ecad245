//! The bench's own processes: its guests.

use anyhow::{Context, Result};

use super::content::Content;
use super::guests::serve_guest;
use super::probe::Probe;

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
    pub(crate) fn main(&self) -> Result<()> {
        let content = Content {
            seed: self.seed,
            dup: self.dup,
            run_pages: self.run_pages.max(1),
            zero_prefix: self.zero_prefix,
            pages: self.pages,
            shuffle: self.shuffle,
        };
        serve_guest(&content, self.number).context("this guest failed")
    }

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

impl TimingGuest {
    pub(crate) fn main(&self) -> Result<()> {
        let probe = Probe {
            pages: usize::try_from(self.pages).context("too many pages")?,
            seed: self.seed,
        };
        let served = match self.role {
            Role::Owner => probe.serve_owner(),
            Role::Prober => probe.serve_prober(),
        };
        served.context("this guest failed")
    }
}
