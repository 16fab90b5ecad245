//! Histories of real threads, checked for linearizability.
//!
//! Keys are independent of each other. So each key's history is checked on its own, as that of one cell that is empty or holds
//! a value (locality, Herlihy and Wing 1990). The check looks for an order of the operations that keeps those apart which did
//! not overlap, and explains every result (Wing and Gong 1993). It remembers the states it has been in.
//!
//! `SDTREE_STRESS_ROUNDS` sets how many histories are made; `make stress` makes many.

mod support;

use sdtree::{Builder, Insert, SdTree, check};
use std::collections::HashSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use support::mix;

const THREADS: u64 = 4;
const STEPS: u64 = 5;
const KEYS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    Get,
    Insert(u64),
    Exchange(u64, u64),
    Remove,
    RemoveIf(u64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Value(Option<u64>),
    Changed(Result<u64, Option<u64>>),
}

#[derive(Clone, Copy, Debug)]
struct Event {
    start: u64,
    end: u64,
    op: Op,
    outcome: Outcome,
}

/// What a cell does.
fn apply(cell: Option<u64>, op: Op) -> (Option<u64>, Outcome) {
    match (op, cell) {
        (Op::Get, _) => (cell, Outcome::Value(cell)),
        (Op::Insert(value), None) => (Some(value), Outcome::Value(None)),
        (Op::Insert(_), Some(_)) => (cell, Outcome::Value(cell)),
        (Op::Exchange(old, new), Some(value)) if value == old => {
            (Some(new), Outcome::Changed(Ok(old)))
        }
        (Op::RemoveIf(old), Some(value)) if value == old => (None, Outcome::Changed(Ok(old))),
        (Op::Exchange(..) | Op::RemoveIf(_), _) => (cell, Outcome::Changed(Err(cell))),
        (Op::Remove, _) => (None, Outcome::Value(cell)),
    }
}

fn perform(tree: &SdTree<u64>, key: u128, op: Op) -> Outcome {
    match op {
        Op::Get => Outcome::Value(tree.get(key)),
        Op::Insert(value) => Outcome::Value(tree.get_or_insert(key, value).existing()),
        Op::Exchange(old, new) => Outcome::Changed(tree.compare_exchange(key, old, new)),
        Op::Remove => Outcome::Value(tree.remove(key)),
        Op::RemoveIf(old) => Outcome::Changed(tree.remove_if(key, old)),
    }
}

/// True if some order of the events explains them all. `done` is a set of bits.
fn explains(
    events: &[Event],
    done: u64,
    cell: Option<u64>,
    seen: &mut HashSet<(u64, Option<u64>)>,
) -> bool {
    if done.count_ones() as usize == events.len() {
        return true;
    }
    if !seen.insert((done, cell)) {
        return false;
    }
    let open = || (0..events.len()).filter(|index| done >> index & 1 == 0);
    let first_end = open()
        .map(|index| events[index].end)
        .min()
        .unwrap_or(u64::MAX);
    open()
        .filter(|&index| events[index].start < first_end)
        .any(|index| {
            let (next, outcome) = apply(cell, events[index].op);
            outcome == events[index].outcome && explains(events, done | 1 << index, next, seen)
        })
}

fn linearizable(events: &[Event]) -> bool {
    explains(events, 0, None, &mut HashSet::new())
}

fn choose(seed: u64) -> Op {
    let value = mix(seed) % 3;
    match mix(!seed) % 8 {
        0 | 1 => Op::Get,
        2..=4 => Op::Insert(value),
        5 => Op::Exchange(value, (value + 1) % 3),
        6 => Op::Remove,
        _ => Op::RemoveIf(value),
    }
}

/// Lets the threads loose on a few keys, and returns each key's events.
fn history(tree: &SdTree<u64>, key: impl Fn(u64) -> u128 + Sync, seed: u64) -> Vec<Vec<Event>> {
    let clock = AtomicU64::new(0);
    let barrier = Barrier::new(usize::try_from(THREADS).expect("small"));
    let worker = |me: u64| {
        let mut events = Vec::new();
        barrier.wait();
        for step in 0..STEPS {
            let choice = mix(seed ^ me << 56 ^ step << 48);
            let (index, op) = (choice % KEYS, choose(choice));
            let start = clock.fetch_add(1, SeqCst);
            let outcome = perform(tree, key(index), op);
            let end = clock.fetch_add(1, SeqCst);
            events.push((
                index,
                Event {
                    start,
                    end,
                    op,
                    outcome,
                },
            ));
        }
        events
    };
    let mut by_key = vec![Vec::new(); usize::try_from(KEYS).expect("small")];
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|me| scope.spawn(move || worker(me)))
            .collect();
        for (key, event) in workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("a worker"))
        {
            by_key[usize::try_from(key).expect("small")].push(event);
        }
    });
    by_key
}

fn histories_are_linearizable(bits: u32, key: impl Fn(u64) -> u128 + Sync) {
    let rounds =
        std::env::var("SDTREE_STRESS_ROUNDS").map_or(3_000, |text| text.parse().expect("a number"));
    for round in 0..rounds {
        let tree = Builder::new()
            .max_directory_bits(bits)
            .build()
            .expect("a small directory");
        for events in history(&tree, &key, round) {
            assert!(
                linearizable(&events),
                "round {round}: no order explains {events:#?}"
            );
        }
        assert_eq!(check(&tree), Ok(()), "round {round}");
    }
}

#[test]
fn in_one_trie() {
    histories_are_linearizable(0, |index| u128::from(index) << 62);
}

#[test]
fn in_a_chain_of_branches() {
    histories_are_linearizable(0, |index| 1 << index);
}

#[test]
fn the_checker_rejects_what_no_order_explains() {
    let event = |start, end, op, outcome| Event {
        start,
        end,
        op,
        outcome,
    };
    let insert = event(0, 1, Op::Insert(7), Outcome::Value(None));
    let stale = event(2, 3, Op::Get, Outcome::Value(None));
    let overlapping = event(0, 3, Op::Get, Outcome::Value(None));
    assert!(
        !linearizable(&[insert, stale]),
        "a get after the insertion misses it"
    );
    assert!(
        linearizable(&[insert, overlapping]),
        "a get that overlaps it may"
    );
    let twice = event(4, 5, Op::Insert(8), Outcome::Value(None));
    assert!(!linearizable(&[insert, twice]), "two insertions of one key");
    let lost = event(2, 6, Op::RemoveIf(7), Outcome::Changed(Ok(7)));
    let exchanged = event(2, 6, Op::Exchange(7, 9), Outcome::Changed(Ok(7)));
    assert!(
        !linearizable(&[insert, lost, exchanged]),
        "both took the same value away"
    );
}

/// The threads of a round must overlap for the tests to mean anything. On a busy machine that takes many rounds.
#[test]
fn threads_of_a_history_do_overlap() {
    let began = Instant::now();
    let mut rounds = (0..).take_while(|_| began.elapsed() < Duration::from_secs(60));
    let overlap = rounds.any(|round| {
        let tree = SdTree::new();
        let events: Vec<Event> = history(&tree, u128::from, round).concat();
        let pairs = events
            .iter()
            .flat_map(|left| events.iter().map(move |right| (left, right)));
        pairs
            .into_iter()
            .any(|(left, right)| left.start < right.start && right.start < left.end)
    });
    assert!(overlap);
    assert_eq!(SdTree::new().get_or_insert(1, 1), Insert::Inserted);
}
