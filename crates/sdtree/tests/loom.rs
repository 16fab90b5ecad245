//! Models: loom runs these small programs through all interleavings (up to `LOOM_MAX_PREEMPTIONS` forced switches), and through
//! all values that the memory orderings allow a load to see. `make loom` runs them.
//!
//! The tree is the real one, over loom's atomics. The collector is the strict one of `reclaim.rs`: a node is dead at the first
//! moment without a guard after it was retired, and any later touch of it fails the model.
#![cfg(loom)]

use loom::thread;
use sdtree::{Builder, Insert, SdTree, check};
use std::sync::Arc;

/// Keys with bits 0, 1 and 2 (from the top) in this pattern.
const fn key(bits: u128) -> u128 {
    bits << 125
}

/// One slot, so that all keys meet in one trie.
fn one_slot(keys: &[u128]) -> Arc<SdTree<u64>> {
    let tree = Builder::new()
        .max_directory_bits(0)
        .build()
        .expect("one slot");
    for &key in keys {
        tree.get_or_insert(key, 0);
    }
    Arc::new(tree)
}

/// Runs the two closures against each other on a tree of `keys`, and `then` when both are done; checks the structure.
fn model<const KEYS: usize, A, B>(
    keys: [u128; KEYS],
    left: impl Fn(&SdTree<u64>) -> A + Copy + Send + Sync + 'static,
    right: impl Fn(&SdTree<u64>) -> B + Copy + Send + Sync + 'static,
    then: impl Fn(&SdTree<u64>, A, B) + Send + Sync + 'static,
) where
    A: Send + 'static,
    B: Send + 'static,
{
    loom::model(move || {
        let tree = one_slot(&keys);
        let shared = Arc::clone(&tree);
        let other = thread::spawn(move || right(&shared));
        let mine = left(&tree);
        let theirs = other.join().expect("the other thread");
        then(&tree, mine, theirs);
        assert_eq!(check(&*tree), Ok(()));
    });
}

fn keys(tree: &SdTree<u64>) -> Vec<u128> {
    tree.iter().map(|(key, _)| key).collect()
}

#[test]
fn two_inserts_at_one_edge() {
    model(
        [key(0)],
        |tree| tree.get_or_insert(key(4), 1),
        |tree| tree.get_or_insert(key(6), 2),
        |tree, left, right| {
            assert_eq!((left, right), (Insert::Inserted, Insert::Inserted));
            assert_eq!(keys(tree), [key(0), key(4), key(6)]);
        },
    );
}

#[test]
fn two_inserts_of_one_key() {
    model(
        [key(0)],
        |tree| tree.get_or_insert(key(4), 1),
        |tree| tree.get_or_insert(key(4), 2),
        |tree, left, right| {
            let value = tree.get(key(4)).expect("inserted");
            assert_eq!(
                left,
                if value == 1 {
                    Insert::Inserted
                } else {
                    Insert::Existing(2)
                }
            );
            assert_eq!(
                right,
                if value == 2 {
                    Insert::Inserted
                } else {
                    Insert::Existing(1)
                }
            );
        },
    );
}

#[test]
fn an_insert_against_a_remove_of_its_neighbour() {
    model(
        [key(0), key(4)],
        |tree| tree.get_or_insert(key(6), 1),
        |tree| tree.remove(key(4)),
        |tree, left, right| {
            assert_eq!((left, right), (Insert::Inserted, Some(0)));
            assert_eq!(keys(tree), [key(0), key(6)]);
        },
    );
}

#[test]
fn an_insert_above_a_branch_that_is_being_unlinked() {
    model(
        [key(4), key(6), key(7)],
        |tree| tree.get_or_insert(key(0), 1),
        |tree| tree.remove(key(7)),
        |tree, left, right| {
            assert_eq!((left, right), (Insert::Inserted, Some(0)));
            assert_eq!(keys(tree), [key(0), key(4), key(6)]);
        },
    );
}

#[test]
fn a_remove_against_a_remove_of_its_sibling() {
    model(
        [key(0), key(4), key(6)],
        |tree| tree.remove(key(4)),
        |tree| tree.remove(key(6)),
        |tree, left, right| {
            assert_eq!((left, right), (Some(0), Some(0)));
            assert_eq!(keys(tree), [key(0)]);
        },
    );
}

#[test]
fn a_remove_against_a_remove_above_it() {
    model(
        [key(0), key(4), key(6)],
        |tree| tree.remove(key(0)),
        |tree| tree.remove(key(6)),
        |tree, left, right| {
            assert_eq!((left, right), (Some(0), Some(0)));
            assert_eq!(keys(tree), [key(4)]);
        },
    );
}

#[test]
fn two_removes_of_one_key() {
    model(
        [key(0), key(4)],
        |tree| tree.remove(key(4)),
        |tree| tree.remove(key(4)),
        |tree, left, right| {
            assert!(left.is_some() != right.is_some(), "one of them removed it");
            assert_eq!(keys(tree), [key(0)]);
        },
    );
}

#[test]
fn a_remove_if_against_a_new_value() {
    model(
        [key(0), key(4)],
        |tree| tree.remove_if(key(4), 0),
        |tree| tree.compare_exchange(key(4), 0, 9),
        |tree, left, right| match (left, right) {
            (Ok(0), Err(None)) => assert_eq!(tree.get(key(4)), None),
            (Err(Some(9)), Ok(0)) => assert_eq!(tree.get(key(4)), Some(9)),
            other => panic!("both or none took effect: {other:?}"),
        },
    );
}

/// The reader meets the mark and helps; the inserter wants the place.
#[test]
fn help_against_an_insert() {
    model(
        [key(0), key(4), key(6)],
        |tree| (tree.get(key(6)), tree.get_or_insert(key(7), 1)),
        |tree| tree.remove(key(6)),
        |tree, (_, left), right| {
            assert_eq!((left, right), (Insert::Inserted, Some(0)));
            assert_eq!(keys(tree), [key(0), key(4), key(7)]);
        },
    );
}

/// A search must see a key that stays, whatever is unlinked around it, and must not touch what was freed.
#[test]
fn reclamation_against_a_reader() {
    model(
        [key(0), key(4), key(6)],
        |tree| {
            assert_eq!(tree.get(key(4)), Some(0), "this key stays");
            assert_eq!(tree.get(key(0)), Some(0), "this key stays");
        },
        |tree| {
            tree.remove(key(6));
            tree.get_or_insert(key(6), 1);
        },
        |tree, (), ()| assert_eq!(keys(tree), [key(0), key(4), key(6)]),
    );
}

/// Once a search has seen a new value, no later search sees an older one.
#[test]
fn reads_of_one_key_do_not_go_back() {
    model(
        [key(0), key(4)],
        |tree| (tree.get(key(4)), tree.get(key(4))),
        |tree| tree.compare_exchange(key(4), 0, 9),
        |_, left, right| {
            assert_eq!(right, Ok(0));
            assert_ne!(left, (Some(9), Some(0)), "the second read went back");
        },
    );
}

/// One slot, which can grow.
fn growable(keys: &[u128]) -> Arc<SdTree<u64>> {
    let tree = SdTree::<u64>::new();
    for &key in keys {
        tree.get_or_insert(key, 0);
    }
    Arc::new(tree)
}

/// Two operations that both meet unset slots of a directory that has just grown, and move the same old slot.
#[test]
fn two_operations_move_one_slot() {
    loom::model(|| {
        let tree = growable(&[key(0), key(4), key(6)]);
        tree.start_growth();
        let shared = Arc::clone(&tree);
        let other = thread::spawn(move || shared.remove(key(4)));
        assert_eq!(tree.get(key(6)), Some(0));
        assert_eq!(tree.get_or_insert(key(2), 1), Insert::Inserted);
        assert_eq!(other.join().expect("the other thread"), Some(0));
        assert_eq!(keys(&tree), [key(0), key(2), key(6)]);
        assert_eq!(check(&*tree), Ok(()));
    });
}

/// One thread starts the growth while the other changes the slot that is about to be frozen.
#[test]
fn a_growth_against_a_remove() {
    loom::model(|| {
        let tree = growable(&[key(0), key(4), key(6)]);
        let shared = Arc::clone(&tree);
        let other = thread::spawn(move || shared.remove(key(4)));
        tree.start_growth();
        assert_eq!(tree.get(key(0)), Some(0));
        assert_eq!(other.join().expect("the other thread"), Some(0));
        assert_eq!(keys(&tree), [key(0), key(6)]);
        assert_eq!(check(&*tree), Ok(()));
    });
}

/// One thread moves a slot while the other, which may have come before the growth, changes the slot itself.
#[test]
fn a_growth_against_a_change_of_the_slot() {
    loom::model(|| {
        let tree = growable(&[key(0)]);
        let shared = Arc::clone(&tree);
        let other = thread::spawn(move || (shared.remove(key(0)), shared.get_or_insert(key(6), 1)));
        tree.start_growth();
        assert_eq!(tree.get_or_insert(key(4), 1), Insert::Inserted);
        assert_eq!(
            other.join().expect("the other thread"),
            (Some(0), Insert::Inserted)
        );
        assert_eq!(keys(&tree), [key(4), key(6)]);
        assert_eq!(check(&*tree), Ok(()));
    });
}

/// The last of several slots ends the older directory, and not one before.
#[test]
fn the_older_directory_lasts_until_all_slots_have_moved() {
    loom::model(|| {
        let tree = SdTree::<u64>::with_capacity(2);
        assert_eq!(tree.stats().directory_slots, 2);
        for key in [key(0), key(4)] {
            tree.get_or_insert(key, 0);
        }
        let tree = Arc::new(tree);
        tree.start_growth();
        let shared = Arc::clone(&tree);
        let other = thread::spawn(move || shared.get(key(0)));
        assert_eq!(tree.get(key(4)), Some(0));
        assert_eq!(other.join().expect("the other thread"), Some(0));
        assert_eq!(keys(&tree), [key(0), key(4)]);
        assert_eq!(check(&*tree), Ok(()));
    });
}

/// Between the two walks of an insertion the leaf that it compared with goes, and another comes that parts elsewhere.
#[test]
fn an_insert_whose_neighbour_is_exchanged() {
    model(
        [key(4), key(6)],
        |tree| tree.get_or_insert(key(0) | 1, 1),
        |tree| {
            tree.remove(key(4));
            tree.remove(key(6));
            (
                tree.get_or_insert(key(0), 2),
                tree.get_or_insert(key(0) | 3, 2),
            )
        },
        |tree, left, right| {
            assert_eq!(
                (left, right),
                (Insert::Inserted, (Insert::Inserted, Insert::Inserted))
            );
            assert_eq!(keys(tree), [key(0), key(0) | 1, key(0) | 3]);
        },
    );
}
