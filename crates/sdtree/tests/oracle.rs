//! Sequences of operations, against a `BTreeMap` as the oracle.

use proptest::collection::vec;
use proptest::prelude::*;
use sdtree::{Builder, ByteTree, Error, Insert, MAX_KEY_BYTES, SdTree, check};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Debug)]
enum Op<K> {
    Get(K),
    Insert(K, u64),
    Exchange(K, u64, u64),
    Remove(K),
    RemoveIf(K, u64),
    Iterate,
    Clear,
}

fn ops<K: Clone + std::fmt::Debug + 'static>(
    key: BoxedStrategy<K>,
) -> impl Strategy<Value = Vec<Op<K>>> {
    let value = 0..4_u64;
    let op = prop_oneof![
        2 => key.clone().prop_map(Op::Get),
        8 => (key.clone(), value.clone()).prop_map(|(key, value)| Op::Insert(key, value)),
        2 => (key.clone(), value.clone(), value.clone()).prop_map(|(key, old, new)| Op::Exchange(key, old, new)),
        5 => key.clone().prop_map(Op::Remove),
        2 => (key, value).prop_map(|(key, value)| Op::RemoveIf(key, value)),
        1 => Just(Op::Iterate),
    ];
    prop_oneof![30 => vec(op.clone(), 0..200), 1 => vec(prop_oneof![40 => op, 1 => Just(Op::Clear)], 0..400)]
}

/// 16-byte keys: random, few, with long common prefixes, and different in one bit.
fn fixed_key() -> BoxedStrategy<u128> {
    prop_oneof![
        any::<u128>(),
        0..32_u128,
        (0..16_u128).prop_map(|key| key << 124 | key),
        (0..128_u32).prop_map(|bit| 1 << bit),
        (0..128_u32).prop_map(|bit| !(1 << bit)),
    ]
    .boxed()
}

/// Byte strings: random, prefixes of each other, and with long common prefixes.
fn byte_key() -> BoxedStrategy<Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..6),
        (0..40_usize).prop_map(|len| vec![0; len]),
        (0..40_usize).prop_map(|len| vec![0xff; len]),
        (0..200_usize, any::<u8>()).prop_map(|(len, last)| [vec![7; len], vec![last]].concat()),
        (0..300_usize, 0..8).prop_map(|(len, bit)| {
            let mut key = vec![0; 300];
            key[len] = 1_u8 << bit;
            key
        }),
    ]
    .boxed()
}

/// What the oracle says to the same questions.
fn expected_exchange<K: Ord>(
    map: &mut BTreeMap<K, u64>,
    key: &K,
    old: u64,
    new: u64,
) -> Result<u64, Option<u64>> {
    match map.get_mut(key) {
        None => Err(None),
        Some(value) if *value != old => Err(Some(*value)),
        Some(value) => Ok(std::mem::replace(value, new)),
    }
}

fn expected_remove_if<K: Ord>(
    map: &mut BTreeMap<K, u64>,
    key: &K,
    value: u64,
) -> Result<u64, Option<u64>> {
    match map.get(key) {
        None => Err(None),
        Some(other) if *other != value => Err(Some(*other)),
        Some(_) => map.remove(key).ok_or(None),
    }
}

fn expected_insert<K: Ord>(map: &mut BTreeMap<K, u64>, key: K, value: u64) -> Insert<u64> {
    match map.get(&key) {
        Some(existing) => Insert::Existing(*existing),
        None => {
            map.insert(key, value);
            Insert::Inserted
        }
    }
}

fn fixed_agrees(tree: &SdTree<u64>, ops: Vec<Op<u128>>) -> Result<(), TestCaseError> {
    let mut map = BTreeMap::new();
    for op in ops {
        match op {
            Op::Get(key) => prop_assert_eq!(tree.get(key), map.get(&key).copied()),
            Op::Insert(key, value) => {
                prop_assert_eq!(
                    tree.get_or_insert(key, value),
                    expected_insert(&mut map, key, value)
                );
            }
            Op::Exchange(key, old, new) => {
                prop_assert_eq!(
                    tree.compare_exchange(key, old, new),
                    expected_exchange(&mut map, &key, old, new)
                );
            }
            Op::Remove(key) => prop_assert_eq!(tree.remove(key), map.remove(&key)),
            Op::RemoveIf(key, value) => {
                prop_assert_eq!(
                    tree.remove_if(key, value),
                    expected_remove_if(&mut map, &key, value)
                );
            }
            Op::Iterate => prop_assert!(
                tree.iter()
                    .eq(map.iter().map(|(key, value)| (*key, *value)))
            ),
            Op::Clear => {
                tree.clear();
                map.clear();
            }
        }
        prop_assert_eq!(tree.len(), map.len());
    }
    prop_assert!(
        tree.iter()
            .eq(map.iter().map(|(key, value)| (*key, *value)))
    );
    prop_assert_eq!(check(tree), Ok(()));
    Ok(())
}

fn bytes_agree(
    tree: &ByteTree<Arc<[u8]>, u64>,
    ops: Vec<Op<Vec<u8>>>,
) -> Result<(), TestCaseError> {
    let mut map = BTreeMap::new();
    let listed = |tree: &ByteTree<Arc<[u8]>, u64>| {
        let mut pairs: Vec<_> = tree
            .iter()
            .map(|(key, value)| (key.to_vec(), value))
            .collect();
        pairs.sort();
        pairs
    };
    for op in ops {
        match op {
            Op::Get(key) => prop_assert_eq!(tree.get(&key), map.get(&key).copied()),
            Op::Insert(key, value) => {
                let inserted = tree.get_or_insert(key.clone().into(), value);
                prop_assert_eq!(inserted, Ok(expected_insert(&mut map, key, value)));
            }
            Op::Exchange(key, old, new) => {
                prop_assert_eq!(
                    tree.compare_exchange(&key, old, new),
                    expected_exchange(&mut map, &key, old, new)
                );
            }
            Op::Remove(key) => prop_assert_eq!(tree.remove(&key), map.remove(&key)),
            Op::RemoveIf(key, value) => {
                prop_assert_eq!(
                    tree.remove_if(&key, value),
                    expected_remove_if(&mut map, &key, value)
                );
            }
            Op::Iterate => {
                prop_assert_eq!(listed(tree), map.clone().into_iter().collect::<Vec<_>>())
            }
            Op::Clear => {
                tree.clear();
                map.clear();
            }
        }
        prop_assert_eq!(tree.len(), map.len());
    }
    prop_assert_eq!(listed(tree), map.into_iter().collect::<Vec<_>>());
    prop_assert_eq!(check(tree), Ok(()));
    Ok(())
}

proptest! {
    #[test]
    fn fixed_keys_agree_with_a_btree_map(ops in ops(fixed_key()), bits in 0..9_u32, capacity in 0..64_usize) {
        let tree = Builder::new().capacity(capacity).max_directory_bits(bits).build().expect("a small directory");
        fixed_agrees(&tree, ops)?;
    }

    #[test]
    fn byte_strings_agree_with_a_btree_map(ops in ops(byte_key()), bits in 0..9_u32, capacity in 0..64_usize) {
        let tree = Builder::new().capacity(capacity).max_directory_bits(bits).build_bytes().expect("a small directory");
        bytes_agree(&tree, ops)?;
    }
}

#[test]
fn iteration_crosses_its_chunks_and_survives_removal_of_the_last_key() {
    let tree = SdTree::<u64>::new();
    let keys: Vec<u128> = (0..2_000)
        .map(|key| key * 0x1234_5678_9abc_def1_0000_0001)
        .collect();
    for &key in &keys {
        tree.get_or_insert(key, 1);
    }
    let mut seen = Vec::new();
    for (key, _) in &tree {
        seen.push(key);
        tree.remove(key);
    }
    assert_eq!(seen, keys);
    assert!(tree.is_empty());
    assert_eq!(check(&tree), Ok(()));
}

#[test]
fn an_empty_key_is_a_key_and_too_long_ones_are_not() {
    let tree = ByteTree::<Vec<u8>, u64>::new();
    let longest = vec![0; MAX_KEY_BYTES];
    let too_long = vec![0; MAX_KEY_BYTES + 1];
    let error = Error::KeyTooLong {
        len: MAX_KEY_BYTES + 1,
        max: MAX_KEY_BYTES,
    };
    assert_eq!(tree.get_or_insert(Vec::new(), 1), Ok(Insert::Inserted));
    assert_eq!(tree.get_or_insert(longest.clone(), 2), Ok(Insert::Inserted));
    assert_eq!(tree.get_or_insert(too_long.clone(), 3), Err(error));
    assert_eq!(
        (tree.get(&[]), tree.get(&longest), tree.get(&too_long)),
        (Some(1), Some(2), None)
    );
    assert_eq!(tree.compare_exchange(&too_long, 3, 4), Err(None));
    assert_eq!(tree.remove_if(&too_long, 3), Err(None));
    assert_eq!(
        (tree.remove(&too_long), tree.remove(&[]), tree.remove(&[])),
        (None, Some(1), None)
    );
    assert_eq!(
        tree.iter()
            .map(|(key, value)| (key.len(), value))
            .collect::<Vec<_>>(),
        [(MAX_KEY_BYTES, 2)]
    );
    assert_eq!(check(&tree), Ok(()));
}
