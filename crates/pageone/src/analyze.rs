//! `pageone analyze`: the saving that merging would bring, before anything is changed.
//!
//! ```text
//! targets   the processes that are meant, the trust domain of each by the rules in force; or dumps
//!    │
//! parts     present private anonymous pages, by the page map; or a dump's ranges; merged: what is merged already
//!    │
//! look      read and fingerprinted by several threads, twice: what changed between does not count
//!    │
//! sums      copies of each content: in a process, between processes, in a domain, on a node; engines: by the knobs of each
//!    │
//! show      tables for people, JSON for programs; draw: bars; advice: the commands that get it
//! ```
//!
//! Nothing of a process is changed: its page map is read without arming anything. Its memory is read by process_vm_readv(2), and by
//! /proc/PID/mem where fork or KSM shares it. Neither brings in a page that is not there. Pages in swap stay there.

mod advice;
mod draw;
mod dump;
mod engines;
mod look;
mod merged;
mod nodes;
mod pages;
mod parts;
mod print;
mod quick;
mod read;
mod rules;
mod savable;
mod show;
mod sums;
mod targets;

use std::hash::BuildHasher as _;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use sys::ksm::Ksm;

use crate::human;
use crate::knobs::cpu_limit;
use crate::plot;
use crate::program;
use advice::Here;
use engines::Engines;
use look::Looker;
use rules::Rules;
use sums::Report;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    targets: targets::Args,
    /// Time between the two looks: what changes meanwhile does not count
    #[arg(long, value_name = "TIME", default_value = "40s", value_parser = human::period)]
    look_again: Duration,
    /// Count one content of N only, chosen by content, and give the error bound
    #[arg(long, value_name = "1/N", default_value = "1/1", value_parser = part_of)]
    sample_memory: NonZero<u64>,
    /// Threads that read [default: all CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Use at most this much processor time, in percent of a core
    #[arg(long, value_name = "PERCENT|none", default_value = "none", value_parser = cpu_limit)]
    cpu_limit: u32,
    /// The policy whose domains are meant [default: the daemon's, else that of /etc/pageone as root, else a domain for each user]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Draw the answer into this file (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn processors() -> u16 {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    u16::try_from(processors).unwrap_or(1024).min(1024)
}

/// `1/16` or `16`: one content of 16.
fn part_of(text: &str) -> Result<NonZero<u64>, String> {
    let number = text.strip_prefix("1/").unwrap_or(text);
    let wrong = |_| format!("`{text}` is no part of the memory; write it like 1/16");
    number.parse().map_err(wrong)
}

pub(crate) fn main(args: &Args) -> Result<()> {
    if !args.targets.are_dumps() {
        sys::process::check_proc().context(program::NO_PROC)?;
    }
    let rules = args.policy.as_deref().map(Rules::of_file).transpose()?;
    plot::try_file(args.plot.as_deref())?;
    let found = args.targets.find(rules)?;
    let looker = Looker {
        threads: args.threads.unwrap_or_else(processors).into(),
        cpu_limit: NonZero::new(args.cpu_limit),
        one_of: args.sample_memory,
        seed: std::hash::RandomState::new().hash_one(0),
        quiet: args.json,
    };
    let (mut looked, mut parts, copies) = looker.first(&found.targets)?;
    if !args.targets.are_dumps() {
        sums::keep_copies(&mut parts);
        rest(args.look_again);
        parts = looker.second(&found.targets, &mut looked, parts)?;
    }
    let here = Here::look(args.targets.words());
    let engines = Engines::new(&here.knobs, &Ksm::default());
    let one_of = args.sample_memory;
    let report = Report::new(&found, looked, &parts, copies, one_of, &engines);
    if let Some(file) = &args.plot {
        let svg = draw::svg(&report)?;
        std::fs::write(file, svg).with_context(|| format!("cannot write {}", file.display()))?;
    }
    show::print(&report, args.json, &here)
}

/// The time between the looks, with a bar that moves where there is a terminal.
fn rest(time: Duration) {
    const STEP: Duration = Duration::from_millis(200);
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let style = indicatif::ProgressStyle::with_template("{msg} {wide_bar}");
    let style = style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar());
    let bar = indicatif::ProgressBar::new(millis(time)).with_style(style);
    let begun = Instant::now();
    loop {
        let passed = begun.elapsed();
        let left = time.saturating_sub(passed);
        if left.is_zero() {
            break;
        }
        let seconds = left.as_millis().div_ceil(1000);
        bar.set_message(format!("the second look comes in {seconds} s"));
        bar.set_position(millis(passed));
        std::thread::sleep(left.min(STEP));
    }
    bar.finish_and_clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_written_as_fractions() {
        let read = ["1/16", "16", "1/1"].map(|text| part_of(text).map(NonZero::get));
        assert_eq!(read, [Ok(16), Ok(16), Ok(1)]);
        for bad in ["", "0", "1/0", "2/3", "-4", "1/x"] {
            assert!(
                part_of(bad).is_err_and(|error| error.contains("1/16")),
                "{bad}"
            );
        }
    }
}
