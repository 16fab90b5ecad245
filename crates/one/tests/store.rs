//! The store against a plain multiset, under threads, and at its limits.

use one::{Error, Handle, MAX_OBJECT_BYTES, Stats, Store};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::thread;

#[test]
fn equal_bytes_get_equal_handles_and_different_ones_do_not() {
    let store = Store::new();
    let page = vec![1; 4096];
    let mut other = page.clone();
    other[4095] = 2;
    let [first, second, third] =
        [&page, &page, &other].map(|bytes| store.put(bytes).expect("a short object"));
    assert_eq!(first, second);
    assert_ne!(first, third);
    assert_eq!((first.references(), third.references()), (2, 1));
    assert_eq!(
        (first.bytes(), third.bytes()),
        (page.as_slice(), other.as_slice())
    );
    assert_eq!(store.stats().saved_bytes(), 4096);
    assert_eq!(store.release(second), 1);
    assert_eq!(store.stats().saved_bytes(), 0);
    assert_eq!(store.check(), Ok(()));
}

#[test]
fn empty_objects_are_objects_and_too_long_ones_are_refused() {
    let store = Store::new();
    let empty = store.put(&[]).expect("the empty object");
    assert_eq!(empty.bytes(), b"");
    let longest = store
        .put(&vec![7; MAX_OBJECT_BYTES])
        .expect("the longest object");
    let error = Error::TooLong {
        len: MAX_OBJECT_BYTES + 1,
    };
    assert_eq!(store.put(&vec![7; MAX_OBJECT_BYTES + 1]), Err(error));
    assert_eq!(store.get(&vec![7; MAX_OBJECT_BYTES + 1]), None);
    assert_eq!(store.get(&vec![7; MAX_OBJECT_BYTES]), Some(longest));
}

#[test]
fn a_released_object_is_forgotten_and_its_number_not_used_again() {
    let store = Store::new();
    let first = store.put(b"content").expect("a short object");
    let id = first.id();
    assert_eq!(store.release(first), 0);
    assert_eq!(store.get(b"content"), None);
    assert_eq!(store.stats(), Stats::default());
    assert_ne!(store.put(b"content").expect("a short object").id(), id);
}

#[test]
fn handles_outlive_the_store() {
    let handle = Store::new().put(b"content").expect("a short object");
    assert_eq!(handle.clone().bytes(), b"content");
    assert_eq!(handle.references(), 1);
}

#[test]
fn threads_share_and_release_without_loss() {
    const ROUNDS: usize = 20_000;
    let store = Store::new();
    let kept: Vec<Handle> = thread::scope(|scope| {
        let workers: Vec<_> = (0..4_usize)
            .map(|me| {
                let store = store.clone();
                scope.spawn(move || {
                    let mut last = None;
                    for round in 0..ROUNDS {
                        let content = [u8::try_from((round * (me + 1)) % 5).expect("small"); 64];
                        let handle = store.put(&content).expect("a short object");
                        assert_eq!(handle.bytes(), content);
                        assert_eq!(
                            store.put(&content).as_ref(),
                            Ok(&handle),
                            "one object while a handle lives"
                        );
                        last = Some(handle);
                    }
                    last.expect("rounds")
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("a worker"))
            .collect()
    });
    assert_eq!(store.check(), Ok(()));
    assert_eq!(store.stats().references, 4);
    drop(kept);
    assert_eq!(store.stats(), Stats::default());
    assert_eq!(store.check(), Ok(()));
}

proptest! {
    #[test]
    fn counts_agree_with_a_multiset(steps in proptest::collection::vec((0..6_u8, any::<bool>()), 0..200)) {
        let store = Store::new();
        let mut handles: BTreeMap<u8, Vec<Handle>> = BTreeMap::new();
        for (content, put) in steps {
            let bytes = vec![content; usize::from(content) * 10];
            let held = handles.entry(content).or_default();
            if put {
                held.push(store.put(&bytes).expect("a short object"));
            } else if let Some(handle) = held.pop() {
                prop_assert_eq!(store.release(handle), held.len() as u64);
            }
            prop_assert_eq!(store.get(&bytes).map(|handle| handle.references() - 1), held.last().map(|_| held.len() as u64));
            let lens = || handles.iter().map(|(content, held)| (u64::from(*content) * 10, held.len() as u64));
            let expected = Stats {
                objects: lens().filter(|(_, held)| *held > 0).count() as u64,
                references: lens().map(|(_, held)| held).sum(),
                stored_bytes: lens().filter(|(_, held)| *held > 0).map(|(len, _)| len).sum(),
                logical_bytes: lens().map(|(len, held)| len * held).sum(),
            };
            prop_assert_eq!(store.stats(), expected);
            prop_assert_eq!(store.check(), Ok(()));
        }
    }
}
