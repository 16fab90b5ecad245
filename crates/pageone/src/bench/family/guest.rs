//! A guest of the family: fills memory, then works on it and follows orders, all in one thread.
//!
//! Its main thread does all its work, and the agent has a thread of its own. So the CPU time of the two is told apart from outside.
//! It writes the bytes that were there: each byte can be verified at any time, and a perfect engine saves the same at any time.
//!
//! ```text
//!  parent ── collapse | offer | verify | break | lap | work JOB ──▶ guest ── {"lap": …} a line ──▶ parent
//! ```

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use sys::clock;

use super::fill::Fill;
use super::job::Job;
use super::memory::{Memory, nanoseconds};
use crate::bench::content::Content;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    number: u64,
    #[arg(long)]
    pages: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long, default_value_t = 0.0)]
    dup: f64,
    #[arg(long, default_value_t = 1)]
    run_pages: u64,
    #[arg(long, default_value_t = 0.0)]
    zero_prefix: f64,
    #[arg(long)]
    shuffle: bool,
    #[arg(long)]
    equal: bool,
    #[arg(long)]
    children: bool,
}

impl Args {
    pub(crate) fn main(&self) -> Result<()> {
        let (seed, pages) = (self.seed, self.pages);
        let fill = match (self.equal, self.children) {
            (true, _) => Fill::Equal { seed, pages },
            (false, true) => Fill::Children { seed, pages },
            (false, false) => Fill::Runs(Content {
                seed,
                dup: self.dup,
                run_pages: self.run_pages.max(1),
                zero_prefix: self.zero_prefix,
                pages,
                shuffle: self.shuffle,
            }),
        };
        let mut memory = Memory::new(fill, self.number)?;
        let mut job = Job::idle();
        let mut orders = Orders::open()?;
        reply(&mut memory)?;
        while let Some(order) = orders.next(&mut memory, &mut job)? {
            follow(&order, &mut memory, &mut job)?;
            reply(&mut memory)?;
        }
        Ok(())
    }
}

fn follow(order: &str, memory: &mut Memory, job: &mut Job) -> Result<()> {
    match order {
        "offer" => {
            memory.bytes.offer().context("cannot offer memory")?;
            memory.ballast.offered(&mut memory.bytes);
        }
        "collapse" => memory.bytes.collapse().context("no huge pages")?,
        "verify" => memory.verify(),
        "break" => {
            let begin = clock::of_thread();
            (0..memory.pages()).for_each(|index| memory.write(index));
            memory.lap.cpu_ns += nanoseconds(clock::of_thread().saturating_sub(begin));
        }
        "lap" => {}
        other => match other.strip_prefix("work ") {
            Some(words) => *job = Job::parse(words).with_context(|| format!("no job: {words}"))?,
            None => bail!("unknown order {other:?}"),
        },
    }
    Ok(())
}

fn reply(memory: &mut Memory) -> Result<()> {
    let lap = std::mem::take(&mut memory.lap);
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(&lap)?)?;
    Ok(out.flush()?)
}

/// Orders from standard input. Between them the guest does its job.
struct Orders {
    input: File,
    read: Vec<u8>,
}

impl Orders {
    /// The standard library keeps bytes of its own, of which a poll knows nothing: so the descriptor is read.
    fn open() -> Result<Self> {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        Ok(Self {
            input: input.into(),
            read: Vec::new(),
        })
    }

    /// The next order; none when the parent has gone.
    fn next(&mut self, memory: &mut Memory, job: &mut Job) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.read.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            let pause = memory
                .ballast
                .tick()
                .map_or(job.pause(), |left| left.min(job.pause()));
            if sys::process::wait_readable(&self.input, pause)? {
                let mut some = [0; 256];
                match self.input.read(&mut some)? {
                    0 => return Ok(None),
                    len => self.read.extend_from_slice(&some[..len]),
                }
                continue;
            }
            let begin = clock::of_thread();
            job.burst(memory);
            memory.lap.cpu_ns += nanoseconds(clock::of_thread().saturating_sub(begin));
        }
    }
}
