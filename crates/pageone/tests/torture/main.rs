//! Torture: guests that compare every byte with a shadow copy while everything happens to them at
//! random, and to the daemon too (`make torture MINUTES=n SEED=s`).
//!
//! ```text
//!   driver (here) ── knobs, kill -9, restart ──▶ daemon        compacts memory
//!      │ starts, stops, continues, kills            │ merges        │
//!      ▼                                            ▼               ▼
//!   guests (tests/torture/) ── forks, threads, I/O, discards, moves: compare, compare, compare
//! ```
//!
//! The guests' operations follow from the seed alone: guest, step and seed give the draws of a step.
//! So a seed replays the same operations of each guest, and the same sequence of the driver's
//! acts. Coincidences in time, and the engine's work in between, are new in each run.
//!
//! The run fails on one wrong byte, and on a guest or a daemon that ends unasked. It fails on counters that
//! do not add up (I9), and when nothing was merged. Then nothing was tested.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../common/mod.rs"]
mod common;
mod counts;
mod driver;
mod guests;
mod knobs;
#[path = "../../../../tests/support/mod.rs"]
mod support;

use std::time::{Duration, SystemTime};

use driver::Driver;

/// Small, seeded, and good enough to choose: splitmix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((word ^ (word >> 31)) >> 1).unwrap() % bound
    }
}

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let value = text.parse().ok();
    assert!(value.is_some(), "{name}={text} is not a number");
    value
}

#[test]
#[ignore = "a minute and more: make torture"]
fn torture() {
    let minutes: f64 = variable("MINUTES").unwrap_or(1.0);
    let clock = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis();
    let seed = variable("SEED").unwrap_or(u64::try_from(clock).unwrap());
    println!(
        "torture: seed {seed}, {minutes} minutes; again with: make torture SEED={seed} MINUTES={minutes}"
    );
    let mut driver = Driver::new(seed);
    driver.run(Duration::from_secs_f64(minutes * 60.0));
    let summary = driver.finish();
    println!("torture: {minutes} minutes, seed {seed}: {summary}");
    summary.judge();
}
