//! A fake engine of known saving, time, CPU time and memory: what tries the harness.
//!
//! It merges nothing. Each guest has ballast besides its memory, and gives it back at the time that was asked for. The engine's process
//! holds memory and spends CPU time. So each figure of the harness has one right value, and a wrong sum shows.
//!
//! `PAGEONE_BENCH_FAKE` says how much: `save_mib=8,after_ms=500,own_mib=4,cpu_ms=300,wrong=0`, all of it or some. Saving and wrong pages
//! are those of each guest.

use std::io::{self, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sys::memory::Anonymous;

use crate::bench::error::BenchError;
use crate::bench::measure::Contender;

/// The variable that says what the fake engine does.
const VARIABLE: &str = "PAGEONE_BENCH_FAKE";
/// Tells a guest that its engine is the fake one.
const GUEST: &str = "PAGEONE_BENCH_FAKE_GUEST";

/// What the fake engine does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Deeds {
    save_mib: usize,
    after_ms: u64,
    own_mib: usize,
    cpu_ms: u64,
    wrong: usize,
}

impl Deeds {
    fn parse(text: &str) -> Option<Self> {
        let mut deeds = Self::default();
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=')?;
            match name {
                "save_mib" => deeds.save_mib = value.parse().ok()?,
                "after_ms" => deeds.after_ms = value.parse().ok()?,
                "own_mib" => deeds.own_mib = value.parse().ok()?,
                "cpu_ms" => deeds.cpu_ms = value.parse().ok()?,
                "wrong" => deeds.wrong = value.parse().ok()?,
                _ => return None,
            }
        }
        Some(deeds)
    }

    fn told() -> Result<Self> {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        Self::parse(&text).with_context(|| format!("{VARIABLE} is not understood: {text}"))
    }
}

fn touched(mib: usize) -> io::Result<Anonymous> {
    let mut memory = Anonymous::new(mib << 20)?;
    memory.fill(1);
    Ok(memory)
}

/// The part of the fake engine in a guest.
#[derive(Default)]
pub(super) struct Ballast {
    memory: Option<Anonymous>,
    deeds: Deeds,
    due: Option<Instant>,
}

impl Ballast {
    /// The ballast of this guest, if its engine is the fake one.
    pub(super) fn here() -> Result<Self> {
        if std::env::var_os(GUEST).is_none() {
            return Ok(Self::default());
        }
        let deeds = Deeds::told()?;
        let memory = (deeds.save_mib > 0).then(|| touched(deeds.save_mib));
        Ok(Self {
            memory: memory.transpose()?,
            deeds,
            due: None,
        })
    }

    /// Memory is offered: the time begins, and pages are spoilt.
    pub(super) fn offered(&mut self, bytes: &mut [u8]) {
        self.due = Some(Instant::now() + Duration::from_millis(self.deeds.after_ms));
        for page in bytes
            .chunks_exact_mut(wire::PAGE_BYTES)
            .take(self.deeds.wrong)
        {
            page[99] ^= 1;
        }
    }

    /// Gives the ballast back when it is time; tells how long that is.
    pub(super) fn tick(&mut self) -> Option<Duration> {
        let (_, due) = (self.memory.as_ref()?, self.due?);
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.memory = None;
            return None;
        }
        Some(left)
    }
}

/// The process of the fake engine.
#[derive(clap::Args)]
pub(crate) struct Engine {}

impl Engine {
    pub(crate) fn main(&self) -> Result<()> {
        let deeds = Deeds::told()?;
        let own = touched(deeds.own_mib.max(1))?;
        writeln!(io::stdout(), "ready")?;
        let mut input = io::stdin().lock();
        let mut go = [0];
        if input.read(&mut go)? == 1 {
            let goal = sys::clock::of_thread() + Duration::from_millis(deeds.cpu_ms);
            while sys::clock::of_thread() < goal {
                std::hint::black_box((0..1000_u64).sum::<u64>());
            }
            input.read_to_end(&mut Vec::new())?;
        }
        drop(own);
        Ok(())
    }
}

/// The fake engine, as the bench holds it.
pub(super) struct FakeEngine(Child);

impl FakeEngine {
    pub(super) fn start(exe: &std::path::Path) -> Result<Self> {
        Deeds::told()?;
        let mut command = Command::new(exe);
        command
            .args(["guest", "fake-engine"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let child = sys::signals::prepare_child(&mut command, true).spawn();
        let mut child = child.context("cannot start the fake engine")?;
        let mut ready = [0; 6];
        let told = child.stdout.as_mut().map(|out| out.read_exact(&mut ready));
        told.transpose().context("the fake engine ended early")?;
        Ok(Self(child))
    }
}

impl Contender for FakeEngine {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn threads(&self) -> u16 {
        1
    }

    fn equip(&self, guest: &mut Command) {
        guest.env(GUEST, "1");
    }

    fn allow(&mut self) -> Result<(), BenchError> {
        let told = self.0.stdin.as_mut().map(|input| input.write_all(b"g"));
        let told = told.transpose().map(|_| ());
        told.map_err(BenchError::system("cannot talk to the fake engine"))
    }

    fn has_begun(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn is_done(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn process(&self) -> Option<u32> {
        Some(self.0.id())
    }

    fn relax(&mut self) -> Result<(), BenchError> {
        Ok(())
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deeds_are_understood_or_refused() {
        let deeds = Deeds::parse("save_mib=8,cpu_ms=300").unwrap();
        assert_eq!((deeds.save_mib, deeds.cpu_ms, deeds.wrong), (8, 300, 0));
        assert_eq!(Deeds::parse(""), Some(Deeds::default()));
        assert!(
            ["save", "save_mib=x", "dance=1"]
                .iter()
                .all(|text| Deeds::parse(text).is_none())
        );
    }
}
