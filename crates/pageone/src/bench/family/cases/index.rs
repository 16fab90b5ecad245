//! The index alone, beside an ordered map behind a lock: the cost of a key against their number and that of threads.
//!
//! Each map, size and number of threads has a process of its own, for its memory is measured. `make bench-sdtree` compares with more maps.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Context;
use sdtree::SdTree;
use sdtree::measure::{Meters, STEPS, Steps, steps};

use super::{Case, Means, Scale, Variant};
use crate::bench::error::BenchError;
use crate::bench::family::growth::Growth;
use crate::bench::family::session::{Outcome, steps as float};
use crate::output::print;

const TREE: &str = "sdtree";
const LOCKED: &str = "Mutex<BTreeMap>";
/// Pages of 4 TiB and of 16 TiB, as keys.
const FAR: [f64; 3] = [1e8, 1e9, 4e9];
/// Threads on machines that are not here.
const CROWDS: [f64; 3] = [8.0, 16.0, 64.0];

pub(super) const CASE: Case = Case {
    name: "index",
    question: "The index alone, with random keys: what do a key and an operation cost against the number of keys and of threads?",
    variants: &[Variant::parts("", &[TREE, LOCKED], run)],
};

/// One measurement, in a process of its own.
#[derive(clap::Args)]
pub(crate) struct Args {
    map: String,
    keys: u64,
    threads: u64,
}

impl Args {
    pub(crate) fn main(&self) -> anyhow::Result<()> {
        let meters = Meters {
            on_processor: sys::clock::of_thread,
            resident: || sys::usage::resident_bytes(std::process::id()).unwrap_or(0),
        };
        let capacity = usize::try_from(self.keys).context("too many keys")?;
        let took = match self.map.as_str() {
            TREE => {
                let tree = SdTree::<u64>::with_capacity(capacity);
                steps(&tree, self.keys, self.threads, meters)
            }
            LOCKED => {
                let map = Mutex::new(BTreeMap::new());
                steps(&map, self.keys, self.threads, meters)
            }
            other => anyhow::bail!("no map is called {other}"),
        };
        let nanos = |time: Duration| time.as_nanos();
        let steps = took.steps.into_iter();
        let steps = steps.map(|step| format!("{} {} ", nanos(step.wall), nanos(step.on_processor)));
        print(&format!("{}{}\n", steps.collect::<String>(), took.bytes))
    }
}

fn run(map: &str, means: &Means<'_>) -> Result<Outcome, BenchError> {
    let sizes: &[u32] = match means.scale {
        Scale::Short => &[10, 12, 14],
        Scale::Normal => &[14, 16, 18, 20],
        Scale::Full => &[16, 18, 20, 22, 24],
    };
    let sizes: Vec<u64> = sizes.iter().map(|bits| 1 << bits).collect();
    let mut outcome = Outcome::default();
    let mut by_size = Vec::new();
    for &keys in &sizes {
        by_size.push((keys, measure(means, map, keys, 1)?));
    }
    let Some(&(most, largest)) = by_size.last() else {
        return Ok(outcome);
    };
    let per_key = |keys, time: Duration| 1e9 * time.as_secs_f64() / float(keys);
    for (at, name) in STEPS.into_iter().enumerate() {
        let point = |(keys, took): &(u64, Steps)| {
            (float(*keys), per_key(*keys, took.steps[at].on_processor))
        };
        let points = by_size.iter().map(point).collect();
        let growth = Growth::new(name, "keys", "ns", points);
        outcome.growth.push(growth.extrapolated(&FAR));
        let figure = ["insert_ns", "hit_ns", "miss_ns", "remove_ns"][at];
        let cost = per_key(most, largest.steps[at].on_processor);
        outcome.figures.insert(figure.to_owned(), cost);
    }
    let bytes = float(largest.bytes) / float(most);
    outcome.figures.insert("key_bytes".to_owned(), bytes);
    let mut by_threads = vec![(1, largest)];
    for threads in [2, 4, 8].into_iter().filter(|&more| more <= means.cpus()) {
        by_threads.push((threads, measure(means, map, most, threads)?));
    }
    for (at, name) in STEPS.into_iter().enumerate() {
        let rate = |took: &Steps| 1e3 / per_key(most, took.steps[at].wall).max(1e-9);
        let point = |(threads, took): &(u64, Steps)| (float(*threads), rate(took));
        let points = by_threads.iter().map(point).collect();
        let growth = Growth::new(name, "threads", "M/s", points);
        outcome.growth.push(growth.extrapolated(&CROWDS));
    }
    Ok(outcome)
}

fn measure(means: &Means<'_>, map: &str, keys: u64, threads: u64) -> Result<Steps, BenchError> {
    means.go_on()?;
    let failed = |why: String| BenchError::Contender { name: "index", why };
    let mut command = Command::new(means.exe);
    command.args([
        "guest",
        "index",
        map,
        &keys.to_string(),
        &threads.to_string(),
    ]);
    let output = sys::signals::prepare_child(&mut command, true)
        .stderr(Stdio::inherit())
        .output()
        .map_err(BenchError::system("cannot start a measurement"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let words = text.split_whitespace().map(str::parse);
    let numbers: Vec<u64> = words.collect::<Result<_, _>>().unwrap_or_default();
    let ([.., bytes], 9) = (&numbers[..], numbers.len()) else {
        return Err(failed(format!("{map}: {}, said {text:?}", output.status)));
    };
    let mut took = Steps {
        bytes: *bytes,
        ..Steps::default()
    };
    for (step, pair) in took.steps.iter_mut().zip(numbers.chunks_exact(2)) {
        step.wall = Duration::from_nanos(pair[0]);
        step.on_processor = Duration::from_nanos(pair[1]);
    }
    Ok(took)
}
