//! `cargo bench -p sdtree --features peers --bench maps`: 4 M random 16-byte keys, against other concurrent maps.
//!
//! Each map and number of threads runs in a process of its own. It has four steps: insert all keys, look all of them up in another order, look up
//! as many absent ones, remove all in a third order. Rounds go over all maps before the next begins, so that a noisy minute
//! hits all alike; the table shows medians. Heap bytes are the growth of the resident set over the insertions.
//!
//! Not criterion: it samples one short step many times over, and these phases use up the data that they work on.
//!
//! `SDTREE_KEYS`, `SDTREE_ROUNDS`, `SDTREE_THREADS` and `SDTREE_MAPS` (lists) change the size of it. `SDTREE_CLOCK=cpu` is for machines that
//! are busy with other work: it takes the time that the threads were on a processor, and tells the rate that this is on two idle
//! ones. Waiting for locks is not in it, which favours the maps that have some.

#![allow(clippy::cast_possible_truncation, missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::env;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use sdtree::measure::{Map, Meters, STEPS, Step, steps};
use support::on_processor_ns;

const OURS: [&str; 3] = ["sdtree", "sdtree, grown from empty", "Mutex<BTreeMap>"];
#[cfg(not(feature = "peers"))]
const PEERS: [&str; 0] = [];
#[cfg(feature = "peers")]
const PEERS: [&str; 7] = [
    "scc HashMap",
    "scc HashIndex",
    "papaya",
    "dashmap",
    "congee (u64 keys)",
    "scc TreeIndex",
    "crossbeam SkipMap",
];

fn main() {
    let arguments: Vec<String> = env::args().collect();
    if let [_, flag, map, keys, threads] = arguments.as_slice()
        && flag == "--child"
    {
        child(
            map,
            keys.parse().expect("keys"),
            threads.parse().expect("threads"),
        );
        return;
    }
    let keys = setting("SDTREE_KEYS", "4000000");
    let rounds: usize = setting("SDTREE_ROUNDS", "3")
        .parse()
        .expect("SDTREE_ROUNDS is a number");
    let threads = setting("SDTREE_THREADS", "1,2,8");
    let threads: Vec<&str> = threads.split(',').collect();
    let mut results: BTreeMap<(usize, usize), Vec<Vec<f64>>> = BTreeMap::new();
    let only = setting("SDTREE_MAPS", "");
    let wanted = |map: &&str| only.is_empty() || only.split(',').any(|name| name == *map);
    let maps: Vec<&str> = OURS.into_iter().chain(PEERS).filter(wanted).collect();
    for round in 1..=rounds {
        for (map_index, map) in maps.iter().enumerate() {
            for (threads_index, threads) in threads.iter().enumerate() {
                let run = run_child(map, &keys, threads);
                eprintln!("round {round}: {map}, {threads} threads: {run:.2?}");
                results
                    .entry((map_index, threads_index))
                    .or_default()
                    .push(run);
            }
        }
    }
    println!(
        "{keys} keys, M operations/s with {} threads, medians of {rounds} rounds\n",
        threads.join(" / ")
    );
    println!(
        "| | {} | heap bytes per key |\n|---|---|---|---|---|---|",
        STEPS.join(" | ")
    );
    for (map_index, map) in maps.iter().enumerate() {
        let median = |threads_index, column| median(&results[&(map_index, threads_index)], column);
        let cell = |column| {
            let figures: Vec<String> = (0..threads.len())
                .map(|index| format!("{:.2}", median(index, column)))
                .collect();
            figures.join(" / ")
        };
        let cells: Vec<String> = (0..STEPS.len()).map(cell).collect();
        println!(
            "| {map} | {} | {:.1} |",
            cells.join(" | "),
            median(0, STEPS.len())
        );
    }
    if PEERS.is_empty() {
        println!("\nOther maps are measured beside it with `--features peers`.");
    }
}

fn setting(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.into())
}

fn median(runs: &[Vec<f64>], column: usize) -> f64 {
    let mut figures: Vec<f64> = runs.iter().map(|run| run[column]).collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Runs one map in a process of its own; returns the figures of the phases and the heap bytes per key.
fn run_child(map: &str, keys: &str, threads: &str) -> Vec<f64> {
    let this = env::current_exe().expect("this program");
    let output = Command::new(this)
        .args(["--child", map, keys, threads])
        .output()
        .expect("a child process");
    assert!(
        output.status.success(),
        "{map}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).expect("figures");
    text.split_whitespace()
        .map(|figure| figure.parse().expect("a figure"))
        .collect()
}

fn child(map: &str, keys: u64, threads: u64) {
    match map {
        "sdtree" => phases(
            &sdtree::SdTree::<u64>::with_capacity(keys as usize),
            keys,
            threads,
        ),
        "sdtree, grown from empty" => phases(&sdtree::SdTree::<u64>::new(), keys, threads),
        "Mutex<BTreeMap>" => phases(&Mutex::new(BTreeMap::new()), keys, threads),
        other => peers::run(other, keys, threads),
    }
}

fn phases(map: &impl Map, keys: u64, threads: u64) {
    let meters = Meters {
        on_processor: || Duration::from_nanos(on_processor_ns()),
        resident: resident_bytes,
    };
    let took = steps(map, keys, threads, meters);
    let mut figures: Vec<f64> = took
        .steps
        .iter()
        .map(|step| rate(*step, keys, threads))
        .collect();
    figures.push(took.bytes as f64 / keys as f64);
    println!(
        "{}",
        figures
            .iter()
            .map(f64::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    );
}

/// M operations/s.
fn rate(step: Step, count: u64, threads: u64) -> f64 {
    const PROCESSORS: u64 = 2;
    let seconds = if env::var("SDTREE_CLOCK").is_ok_and(|clock| clock == "cpu") {
        step.on_processor.as_secs_f64() / threads.min(PROCESSORS) as f64
    } else {
        step.wall.as_secs_f64()
    };
    count as f64 / seconds / 1e6
}

/// The resident set of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("/proc/self/statm");
    let pages = statm
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("the second field") * 4096
}

#[cfg(not(feature = "peers"))]
mod peers {
    pub(super) fn run(map: &str, _keys: u64, _threads: u64) {
        panic!("{map} needs --features peers");
    }
}

#[cfg(feature = "peers")]
mod peers {
    use super::{Map, phases};
    use std::hash::{BuildHasherDefault, Hasher};

    /// The keys are random already: their low half serves as the hash.
    #[derive(Default)]
    pub(super) struct Identity(u64);

    impl Hasher for Identity {
        fn write(&mut self, _: &[u8]) {
            unreachable!("keys are u128")
        }
        fn write_u128(&mut self, key: u128) {
            self.0 = key as u64;
        }
        fn finish(&self) -> u64 {
            self.0
        }
    }

    /// A map of another crate.
    struct Peer<M>(M);

    type Hash = BuildHasherDefault<Identity>;
    type SccMap = scc::HashMap<u128, u64, Hash>;
    type SccIndex = scc::HashIndex<u128, u64, Hash>;
    type Papaya = papaya::HashMap<u128, u64, Hash>;
    type Dash = dashmap::DashMap<u128, u64, Hash>;
    type Skip = crossbeam_skiplist::SkipMap<u128, u64>;
    type SccTree = scc::TreeIndex<u128, u64>;
    type Congee = congee::Congee<usize, usize>;

    pub(super) fn run(map: &str, keys: u64, threads: u64) {
        let size = keys as usize;
        match map {
            "scc HashMap" => phases(
                &Peer(SccMap::with_capacity_and_hasher(size, Hash::default())),
                keys,
                threads,
            ),
            "scc HashIndex" => phases(
                &Peer(SccIndex::with_capacity_and_hasher(size, Hash::default())),
                keys,
                threads,
            ),
            "papaya" => phases(
                &Peer(Papaya::with_capacity_and_hasher(size, Hash::default())),
                keys,
                threads,
            ),
            "dashmap" => phases(
                &Peer(Dash::with_capacity_and_hasher(size, Hash::default())),
                keys,
                threads,
            ),
            "congee (u64 keys)" => phases(&Peer(Congee::default()), keys, threads),
            "scc TreeIndex" => phases(&Peer(SccTree::new()), keys, threads),
            "crossbeam SkipMap" => phases(&Peer(Skip::new()), keys, threads),
            other => panic!("no map is called {other}"),
        }
    }

    impl Map for Peer<SccMap> {
        fn insert(&self, key: u128, value: u64) -> bool {
            self.0.insert_sync(key, value).is_ok()
        }
        fn get(&self, key: u128) -> Option<u64> {
            self.0.read_sync(&key, |_, value| *value)
        }
        fn remove(&self, key: u128) -> bool {
            self.0.remove_sync(&key).is_some()
        }
    }

    impl Map for Peer<SccIndex> {
        fn insert(&self, key: u128, value: u64) -> bool {
            self.0.insert_sync(key, value).is_ok()
        }
        fn get(&self, key: u128) -> Option<u64> {
            self.0.peek_with(&key, |_, value| *value)
        }
        fn remove(&self, key: u128) -> bool {
            self.0.remove_sync(&key)
        }
    }

    impl Map for Peer<SccTree> {
        fn insert(&self, key: u128, value: u64) -> bool {
            self.0.insert_sync(key, value).is_ok()
        }
        fn get(&self, key: u128) -> Option<u64> {
            self.0.peek_with(&key, |_, value| *value)
        }
        fn remove(&self, key: u128) -> bool {
            self.0.remove_sync(&key)
        }
    }

    impl Map for Peer<Papaya> {
        fn insert(&self, key: u128, value: u64) -> bool {
            self.0.pin().try_insert(key, value).is_ok()
        }
        fn get(&self, key: u128) -> Option<u64> {
            self.0.pin().get(&key).copied()
        }
        fn remove(&self, key: u128) -> bool {
            self.0.pin().remove(&key).is_some()
        }
    }

    impl Map for Peer<Dash> {
        fn insert(&self, key: u128, value: u64) -> bool {
            self.0.insert(key, value).is_none()
        }
        fn get(&self, key: u128) -> Option<u64> {
            self.0.get(&key).map(|value| *value)
        }
        fn remove(&self, key: u128) -> bool {
            self.0.remove(&key).is_some()
        }
    }

    impl Map for Peer<Skip> {
        fn insert(&self, key: u128, value: u64) -> bool {
            *self.0.get_or_insert(key, value).value() == value
        }
        fn get(&self, key: u128) -> Option<u64> {
            self.0.get(&key).map(|entry| *entry.value())
        }
        fn remove(&self, key: u128) -> bool {
            self.0.remove(&key).is_some()
        }
    }

    impl Map for Peer<Congee> {
        fn insert(&self, key: u128, value: u64) -> bool {
            let guard = self.0.pin();
            matches!(
                self.0.insert(key as usize, value as usize, &guard),
                Ok(None)
            )
        }
        fn get(&self, key: u128) -> Option<u64> {
            let guard = self.0.pin();
            self.0
                .get(&(key as usize), &guard)
                .map(|value| value as u64)
        }
        fn remove(&self, key: u128) -> bool {
            let guard = self.0.pin();
            self.0.remove(&(key as usize), &guard).is_some()
        }
    }
}
