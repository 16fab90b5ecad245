//! The cost of calls under the agent, beside the kernel's own: over merged memory, and over memory that was never
//! offered. Both are measured in turns, so that other work of the machine hits both.
//!
//! `make bench-calls` runs this for long, with an optimized agent. The bounds here are five to ten times the values of a machine
//! at rest (docs/memory-calls.md), for machines that do other things. That of lone discards is three times their time where an
//! idle virtual CPU has to be woken, and one of three tries must keep it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::process::Command;

use common::{Engine, merged_chunks};
use support::{Guest, guest_program};

/// How much is measured: 1 in tests.
fn scale() -> usize {
    let scale = std::env::var("CALLS_SCALE").ok();
    scale.map_or(1, |text| text.parse().expect("CALLS_SCALE is a number"))
}

fn numbers(answer: &str) -> Vec<f64> {
    let words = answer.split_whitespace();
    words.map(|word| word.parse().unwrap()).collect()
}

/// Discards pages one by one, and gives how many times the kernel's own a call takes.
fn discards(guest: &mut Guest, name: &str, first: usize, step: usize, pages: usize) -> f64 {
    let took = numbers(&guest.run(&format!("discards {first} {step} {pages}")));
    let times = took[0] / took[1];
    println!(
        "{name:<40} {:>6.0} ns, the kernel's own {:>5.0} ns: {times:.1} times",
        took[0], took[1]
    );
    guest.run("check");
    times
}

/// How many times the kernel's own a lone discard may take.
const LONE_MOST: f64 = 35.0;
/// How often that is tried.
const LONE_TRIES: usize = 3;

/// The median of three rows of discards far from each other; each try has pages of its own. They are few: something else on the
/// machine may hit all of one row.
fn lone_discards(guest: &mut Guest, at: usize, pages: usize) -> f64 {
    const APART: usize = 37;
    let name = "merged, far from each other";
    let mut rows =
        [0, 12, 24].map(|first| discards(guest, name, first + 4 * at, APART, pages / APART));
    median(&mut rows)
}

#[test]
fn discards_of_merged_pages() {
    let chunks = 8 * scale();
    let quarter = 512 * chunks / 4;
    let (_engine, mut guest) = merged_chunks(chunks);
    let far = (0..LONE_TRIES)
        .map(|at| lone_discards(&mut guest, at, quarter))
        .find(|times| *times < LONE_MOST)
        .unwrap_or(f64::INFINITY);
    let all = discards(&mut guest, "merged, page by page", quarter, 1, quarter);
    let second = discards(
        &mut guest,
        "merged, every second page",
        2 * quarter,
        2,
        quarter,
    );
    assert!(far < LONE_MOST && all < 8.0 && second < 8.0);
}

#[test]
fn calls_over_memory_never_offered() {
    const CALLS: [&str; 5] = ["madvise", "mprotect", "mremap", "mmap", "munmap"];
    let mut engine = Engine::new();
    let mut with = engine.guest();
    let mut without = Guest::from(&mut Command::new(guest_program(false)));
    // The first call offers what lies around.
    with.run("calls 1");
    without.run("calls 1");
    engine.accept();
    engine.sync();
    let mut over: [Vec<f64>; 5] = Default::default();
    let mut plain: [Vec<f64>; 5] = Default::default();
    for _ in 0..10 * scale() + 1 {
        let [a, b] = [&mut with, &mut without].map(|guest| numbers(&guest.run("calls 300")));
        for (call, over) in over.iter_mut().enumerate() {
            over.push(a[call] - b[call]);
            plain[call].push(b[call]);
        }
    }
    for (name, (over, plain)) in CALLS.iter().zip(over.iter_mut().zip(&mut plain)) {
        let (over, plain) = (median(over), median(plain));
        println!("never offered, {name:<9} {over:>+5.0} ns of {plain:.0}");
        assert!(over < 400.0, "{name}: {over} ns more");
    }
}

fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

#[test]
fn first_reads_of_merged_pages() {
    let chunks = 8 * scale();
    let (_engine, mut guest) = merged_chunks(chunks);
    let pages = 512 * chunks;
    let read = numbers(&guest.run(&format!("reads 0 {pages}")))[0];
    let again = numbers(&guest.run(&format!("reads 0 {pages}")))[0];
    println!("merged, first read in order           {read:>7.0} ns, then {again:.0} ns");
    assert!(read < 20_000.0, "{read} ns");
}
