//! The model test: a program's memory calls have the same effect under PageONE and without it
//! (`make model MINUTES=n SEED=s`).
//!
//! ```text
//!   list.rs    a random list of calls ──▶ tests/model/ ── without PageONE ─▶ trace ┐
//!                                    └──▶ tests/model/ ── under PageONE ───▶ trace ┴▶ equal, line by line?
//!   trial.rs   runs and compares;  shrink.rs   takes lines away while the traces still differ
//!   named.rs   short lists for easy mistakes, each a test of its own
//! ```
//!
//! The trace of a line is the result of its call; some lines write down all bytes, all files and the mappings
//! with their permissions, flags, sizes and policies. The program (`tests/model/view.c`) leaves out all that may differ, with
//! the reasons. Several kinds of memory lie in one chunk, and equal pages are so many that most of what is offered
//! is merged.
//!
//! A seed gives the same list again; when the engine merges is new in each run, so a seed is tried several
//! times. `LIST=file` runs a list of one's own. Seeds begin at the time of day, or at `FIRST=n`; a run prints where it began. `ALL=1` goes on after
//! a difference, and prints one line for each. One list in eight has all compared behind each of its lines.
//! With `ANY=1` all memory of the program is offered, not only what its list offers. With `HOW=attach` the program begins without the
//! agent: `pageone attach` puts it in at some line of the list, and `pageone detach` may take it out at a later one.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../common/mod.rs"]
mod common;
mod list;
mod named;
mod shrink;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod trial;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use list::Line;
use trial::{Difference, HugePages, Stage};

/// Programs at a time: they sleep most of the time, waiting until their pages are merged.
const JOBS: usize = 4;
/// One of so many lists may not be the same twice without PageONE either: a busy machine has its ways.
const MOST_UNSTEADY: usize = 50;
/// How often the list of a given seed is tried.
const TRIES: usize = 20;

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let value = text.parse().ok();
    assert!(value.is_some(), "{name}={text} is not understood");
    value
}

/// The list of a seed, as HOW wants it.
fn draw(seed: u64) -> Vec<Line> {
    match variable::<String>("HOW").as_deref() {
        None => list::draw(seed),
        Some("attach") => list::draw_attached(seed),
        Some(how) => panic!("HOW={how} is not understood: attach"),
    }
}

/// Tries one list until it shows a difference.
fn try_often(stage: &Stage, lines: &[Line], tries: usize) -> Option<Difference> {
    (0..tries).find_map(|_| stage.difference(lines, &mut 0))
}

fn report(stage: &Stage, name: &str, lines: &[Line], found: &Difference) -> String {
    println!("model: {name} shows a difference; it is made shorter");
    let few = shrink::shrink(lines, Duration::from_secs(120), |few| {
        try_often(stage, few, 3).is_some()
    });
    let shown = try_often(stage, &few, 5);
    let file = stage.keep(name, &few);
    format!(
        "{name}: again with LIST={} make model\n{}\n{}",
        file.display(),
        list::text(&few),
        shown.as_ref().unwrap_or(found)
    )
}

/// Tries lists of many seeds until the time is over; gives the first difference.
fn try_many(stage: &Stage, first: u64, time: Duration) -> Option<(u64, Difference)> {
    let go_on = variable::<String>("ALL").is_some();
    let (end, next) = (Instant::now() + time, AtomicU64::new(first));
    let (merged, tried) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let found = Mutex::new(None);
    let is_over = || {
        let found = found.lock().unwrap_or_else(PoisonError::into_inner);
        Instant::now() > end || (!go_on && Option::is_some(&found))
    };
    let work = || {
        while !is_over() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let mut stored = 0;
            if let Some(difference) = stage.difference(&draw(seed), &mut stored) {
                println!("model: seed {seed}: {}", difference.in_short());
                let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                found.get_or_insert((seed, difference));
            }
            merged.fetch_add(stored, Ordering::Relaxed);
            tried.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| (0..JOBS).for_each(|_| drop(scope.spawn(work))));
    let (merged, tried) = (merged.into_inner(), tried.into_inner());
    println!("model: {tried} lists from seed {first} on, {merged} pages seen in a store");
    assert!(merged > 0, "nothing was merged: nothing was tested");
    let unsteady = stage.unsteady();
    assert!(
        unsteady <= 1 + tried / MOST_UNSTEADY,
        "the model itself is not steady: {unsteady} lists of {tried}"
    );
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

#[test]
#[ignore = "a minute and more: make model"]
fn a_program_sees_what_the_kernel_alone_would_show_it() {
    let _huge = HugePages::reserve();
    let stage = Stage::new();
    let minutes: f64 = variable("MINUTES").unwrap_or(1.0);
    let failed = if let Some(path) = variable::<String>("LIST") {
        let lines = list::read(&std::fs::read_to_string(path).unwrap());
        try_often(&stage, &lines, TRIES).map(|found| report(&stage, "list", &lines, &found))
    } else if let Some(seed) = variable::<u64>("SEED") {
        let lines = draw(seed);
        let found = try_often(&stage, &lines, TRIES);
        found.map(|found| report(&stage, &format!("seed-{seed}"), &lines, &found))
    } else {
        let clock = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis();
        let first = variable("FIRST").unwrap_or(u64::try_from(clock).unwrap());
        // What ends the run from outside leaves the line by which it is made again.
        println!("model: FIRST={first}");
        let found = try_many(&stage, first, Duration::from_secs_f64(minutes * 60.0));
        found.map(|(seed, found)| {
            let name = format!("seed-{seed}");
            report(&stage, &name, &draw(seed), &found)
        })
    };
    if let Some(failed) = failed {
        panic!("{failed}");
    }
}
