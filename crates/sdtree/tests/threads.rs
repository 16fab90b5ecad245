//! Many threads at one tree: nothing is lost, nothing is there twice, and the structure holds afterwards.

mod support;

use sdtree::{Builder, Insert, SdTree, check};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use support::{key, mix};

#[test]
fn of_all_inserters_of_a_key_one_wins_while_the_directory_grows() {
    const THREADS: u64 = 4;
    const KEYS: u64 = 100_000;
    let tree = SdTree::<u64>::new();
    let wins = AtomicU64::new(0);
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (tree, wins) = (&tree, &wins);
            scope.spawn(move || {
                for index in 0..KEYS {
                    match tree.get_or_insert(key(index), me) {
                        Insert::Inserted => drop(wins.fetch_add(1, Relaxed)),
                        Insert::Existing(other) => assert!(other < THREADS),
                    }
                    assert!(
                        tree.get(key(index)).is_some(),
                        "an inserted key is found at once"
                    );
                }
            });
        }
    });
    assert_eq!(wins.load(Relaxed), KEYS);
    assert_eq!(tree.len() as u64, KEYS);
    let stats = tree.stats();
    assert!(stats.growths > 10, "{stats:?}");
    assert_eq!(check(&tree), Ok(()));
    assert_eq!(tree.iter().count() as u64, KEYS);
}

/// Each key carries a count that only its owner thread changes; a common pool of keys is inserted and removed by all.
fn churn(tree: &SdTree<u64>, keys: impl Fn(u64) -> u128 + Sync, rounds: u64) {
    const THREADS: u64 = 4;
    const POOL: u64 = 64;
    let balance: Vec<AtomicU64> = (0..POOL).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (balance, keys) = (&balance, &keys);
            scope.spawn(move || {
                for round in 0..rounds {
                    let index = mix(me << 32 | round) % POOL;
                    let count = &balance[usize::try_from(index).expect("a small index")];
                    match mix(round << 8 | me) % 4 {
                        0 => {
                            if tree.get_or_insert(keys(index), me) == Insert::Inserted {
                                count.fetch_add(1, Relaxed);
                            }
                        }
                        1 => {
                            if tree.remove(keys(index)).is_some() {
                                count.fetch_sub(1, Relaxed);
                            }
                        }
                        2 => {
                            if tree.remove_if(keys(index), me).is_ok() {
                                count.fetch_sub(1, Relaxed);
                            }
                        }
                        _ => {
                            let _ = tree.compare_exchange(keys(index), me, (me + 1) % THREADS);
                        }
                    }
                    let own = POOL + me * POOL + round % POOL;
                    assert_eq!(tree.get_or_insert(keys(own), round), Insert::Inserted);
                    assert_eq!(tree.get(keys(own)), Some(round));
                    assert_eq!(
                        tree.compare_exchange(keys(own), round, round + 1),
                        Ok(round)
                    );
                    assert_eq!(tree.remove(keys(own)), Some(round + 1));
                }
            });
        }
    });
    for (index, count) in (0..).zip(&balance) {
        let there = u64::from(tree.get(keys(index)).is_some());
        assert_eq!(
            count.load(Relaxed),
            there,
            "insertions less removals of key {index}"
        );
    }
    assert_eq!(check(tree), Ok(()));
}

#[test]
fn churn_balances_on_random_keys() {
    churn(&SdTree::new(), key, 40_000);
}

#[test]
fn churn_balances_in_one_deep_trie() {
    let tree = Builder::new()
        .max_directory_bits(0)
        .build()
        .expect("one slot");
    churn(&tree, u128::from, 40_000);
}

#[test]
fn churn_balances_where_keys_differ_in_one_bit() {
    let tree = SdTree::new();
    churn(
        &tree,
        |index| 1 << (8 + index % 120) | u128::from(index / 120),
        40_000,
    );
}

#[test]
fn a_walk_sees_what_stays_and_nothing_twice() {
    let tree = SdTree::<u64>::new();
    let stay: Vec<u128> = (0..3_000).map(|index| key(index) | 1).collect();
    for &key in &stay {
        tree.get_or_insert(key, 0);
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (tree, stop) = (&tree, &stop);
        scope.spawn(move || {
            for index in 0.. {
                if stop.load(Relaxed) {
                    break;
                }
                tree.get_or_insert(key(index) & !1, 1);
                if index > 5_000 {
                    tree.remove(key(index - 5_000) & !1);
                }
            }
        });
        for _ in 0..100 {
            let seen: Vec<(u128, u64)> = tree.iter().collect();
            assert!(
                seen.windows(2).all(|pair| pair[0].0 < pair[1].0),
                "keys ascend"
            );
            assert_eq!(
                seen.iter().filter(|(_, value)| *value == 0).count(),
                stay.len()
            );
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(check(&tree), Ok(()));
}
