//! Both trees against a `BTreeMap`, on whatever operations the fuzzer makes up.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use sdtree::{Builder, Insert, check};
use std::collections::BTreeMap;

#[derive(Arbitrary, Debug)]
struct Input {
    directory_bits: u8,
    capacity: u8,
    steps: Vec<(Key, Step)>,
}

/// Keys that share much: few bytes spread over 16, or a byte string of few symbols.
#[derive(Arbitrary, Debug)]
struct Key {
    bytes: Vec<u8>,
    shift: u8,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Step {
    Get,
    Insert(u8),
    Exchange(u8, u8),
    Remove,
    RemoveIf(u8),
    Iterate,
}

impl Key {
    fn number(&self) -> u128 {
        let mut first = [0; 4];
        let len = self.bytes.len().min(4);
        first[..len].copy_from_slice(&self.bytes[..len]);
        u128::from(u32::from_be_bytes(first)).rotate_left(u32::from(self.shift))
    }

    fn string(&self) -> Vec<u8> {
        self.bytes.iter().map(|byte| byte & 1).collect()
    }
}

fn exchange<K: Ord>(
    map: &mut BTreeMap<K, u8>,
    key: &K,
    old: u8,
    new: u8,
) -> Result<u8, Option<u8>> {
    match map.get_mut(key) {
        Some(value) if *value == old => Ok(std::mem::replace(value, new)),
        other => Err(other.copied()),
    }
}

fn remove_if<K: Ord>(map: &mut BTreeMap<K, u8>, key: &K, old: u8) -> Result<u8, Option<u8>> {
    match map.get(key).copied() {
        Some(value) if value == old => map.remove(key).ok_or(None),
        other => Err(other),
    }
}

fn insert<K: Ord>(map: &mut BTreeMap<K, u8>, key: K, value: u8) -> Insert<u8> {
    if let Some(existing) = map.get(&key) {
        return Insert::Existing(*existing);
    }
    map.insert(key, value);
    Insert::Inserted
}

fuzz_target!(|input: Input| {
    let builder = Builder::new()
        .max_directory_bits(u32::from(input.directory_bits % 12))
        .capacity(usize::from(input.capacity));
    let fixed = builder.clone().build::<u8>().expect("a small directory");
    let strings = builder
        .build_bytes::<Vec<u8>, u8>()
        .expect("a small directory");
    let (mut numbers, mut texts) = (BTreeMap::new(), BTreeMap::new());
    for (key, step) in input.steps {
        let (number, text) = (key.number(), key.string());
        match step {
            Step::Get => {
                assert_eq!(fixed.get(number), numbers.get(&number).copied());
                assert_eq!(strings.get(&text), texts.get(&text).copied());
            }
            Step::Insert(value) => {
                assert_eq!(
                    fixed.get_or_insert(number, value),
                    insert(&mut numbers, number, value)
                );
                assert_eq!(
                    strings.get_or_insert(text.clone(), value),
                    Ok(insert(&mut texts, text, value))
                );
            }
            Step::Exchange(old, new) => {
                assert_eq!(
                    fixed.compare_exchange(number, old, new),
                    exchange(&mut numbers, &number, old, new)
                );
                assert_eq!(
                    strings.compare_exchange(&text, old, new),
                    exchange(&mut texts, &text, old, new)
                );
            }
            Step::Remove => {
                assert_eq!(fixed.remove(number), numbers.remove(&number));
                assert_eq!(strings.remove(&text), texts.remove(&text));
            }
            Step::RemoveIf(value) => {
                assert_eq!(
                    fixed.remove_if(number, value),
                    remove_if(&mut numbers, &number, value)
                );
                assert_eq!(
                    strings.remove_if(&text, value),
                    remove_if(&mut texts, &text, value)
                );
            }
            Step::Iterate => {
                assert!(
                    fixed
                        .iter()
                        .eq(numbers.iter().map(|(key, value)| (*key, *value)))
                );
                let mut listed: Vec<_> = strings.iter().collect();
                listed.sort();
                assert!(listed.into_iter().eq(texts.clone()));
            }
        }
    }
    assert_eq!((fixed.len(), strings.len()), (numbers.len(), texts.len()));
    assert_eq!((check(&fixed), check(&strings)), (Ok(()), Ok(())));
});
