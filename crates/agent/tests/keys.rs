//! Protection keys: memory that has one is as the kernel alone would have it, and a thread with such a stack is served. A
//! processor without keys tries nothing here; `make test-kernels` has a guest with keys.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use common::{Engine, count, ready};
use support::Guest;
use wire::PageOutcome;

const DONTNEED: i32 = 4;
const DONTFORK: i32 = 10;
const DOFORK: i32 = 11;
const READ: u32 = 0;
const WRITE: u32 = 1;
/// What `touch` says.
const MAY: &str = "0";
const NO_RIGHT: &str = "2";
const KEY_CLOSED: &str = "4";
/// What `close` closes.
const NOTHING: u32 = 0;
const ACCESS: u32 = 1;
const WRITES: u32 = 2;

/// A guest with one chunk of offered memory, and a key; none where there are no keys.
fn keyed(seed: u64) -> Option<(Engine, Guest)> {
    let (engine, mut guest) = ready(seed);
    if let Err(why) = guest.ask("close 0") {
        let known = [
            "No space left",
            "Function not implemented",
            "Invalid argument",
        ];
        assert!(known.iter().any(|known| why.contains(known)), "{why}");
        println!("skipped: this processor, or its kernel, has no protection keys");
        return None;
    }
    Some((engine, guest))
}

/// The same, all of it merged.
fn merged(seed: u64) -> Option<(Engine, Guest)> {
    let (engine, guest) = keyed(seed)?;
    merge(&engine, &guest, [PageOutcome::Merged; 512]);
    Some((engine, guest))
}

/// Asks for all pages, of which this becomes.
#[track_caller]
fn merge(engine: &Engine, guest: &Guest, wanted: [PageOutcome; 512]) {
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    for (page, (is, wanted)) in merged.outcomes.iter().zip(wanted).enumerate() {
        assert_eq!(*is, wanted, "page {page}");
    }
}

/// What `smaps` says of the mapping of a page: its line in `maps`, and its key.
fn told(guest: &Guest, page: usize) -> (String, u32) {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    let address = guest.memory + page * 4096;
    let mut head = String::new();
    for line in smaps.lines() {
        if let Some((range, _)) = line.split_once(' ').filter(|pair| pair.0.contains('-')) {
            let (start, end) = range.split_once('-').unwrap();
            let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
            head = if (start..end).contains(&address) {
                line.to_owned()
            } else {
                String::new()
            };
        }
        if let Some(key) = line.strip_prefix("ProtectionKey:")
            && !head.is_empty()
        {
            return (head, key.trim().parse().unwrap());
        }
    }
    panic!("page {page} is not mapped, or has no key")
}

fn is_stored(guest: &Guest, page: usize) -> bool {
    told(guest, page).0.contains("memfd:store")
}

/// What a read and a write of a page meet.
fn touches(guest: &mut Guest, page: usize) -> [String; 2] {
    [READ, WRITE].map(|how| guest.run(&format!("touch {page} {how}")))
}

/// A key is given to merged memory, to offered memory and to both at once: it is there, and closes what it closes.
#[test]
fn memory_gets_a_key_and_keeps_its_bytes() {
    let Some((engine, mut guest)) = keyed(5) else {
        return;
    };
    // Merged, offered, and both.
    let answer = engine.merge(guest.memory, 0, 256, Some(1000));
    assert_eq!(count(&answer, PageOutcome::Merged), 256);
    for (first, pages) in [(0, 16), (300, 16), (240, 32)] {
        guest.run(&format!("key {first} {pages} 1"));
        for page in [first, first + pages - 1] {
            assert!(told(&guest, page).1 > 0 && !is_stored(&guest, page));
            assert_eq!(touches(&mut guest, page), [MAY; 2]);
        }
        guest.run("check");
    }
    assert!(is_stored(&guest, 16) && is_stored(&guest, 239));
    assert_eq!(told(&guest, 16).1, 0);
    for (closed, wanted) in [
        (ACCESS, [KEY_CLOSED; 2]),
        (WRITES, [MAY, KEY_CLOSED]),
        (NOTHING, [MAY; 2]),
    ] {
        guest.run(&format!("close {closed}"));
        for page in [0, 310, 250, 260] {
            assert_eq!(touches(&mut guest, page), wanted, "page {page}, {closed}");
        }
        assert_eq!(touches(&mut guest, 100), [MAY; 2]);
    }
    // Memory with a key is left alone, and all else is merged.
    engine.sync();
    let answer = engine.merge(guest.memory, 0, 512, Some(1000));
    for range in [0..16, 300..316, 240..272] {
        for page in range {
            assert_ne!(answer.outcomes[page], PageOutcome::Merged, "page {page}");
            assert!(!is_stored(&guest, page));
        }
    }
    for page in [0, 250, 310] {
        assert!(told(&guest, page).1 > 0);
    }
    guest.run("check");
    // Without the key it is memory as any other.
    guest.run("key 0 512 0");
    guest.run("check");
    merge(&engine, &guest, [PageOutcome::Merged; 512]);
    guest.run("check");
}

/// The calls of the program over memory whose key is closed go on as the kernel alone has them.
#[test]
fn calls_over_memory_whose_key_is_closed_are_the_kernels() {
    let Some((engine, mut guest)) = merged(6) else {
        return;
    };
    guest.run("key 0 64 1");
    guest.run("close 1");
    guest.run(&format!("advise 0 512 {DONTFORK}"));
    guest.run(&format!("advise 0 512 {DOFORK}"));
    // To lock memory brings it in, which the key refuses.
    assert!(guest.ask("lock 0 128").is_err());
    guest.run("unlock 0 128");
    guest.run(&format!("advise 8 8 {DONTNEED}"));
    let _ = guest.ask(&format!("padvise 16 8 {DONTNEED}"));
    guest.run(&format!("advise 100 8 {DONTNEED}"));
    assert_eq!(touches(&mut guest, 8), [KEY_CLOSED; 2]);
    engine.sync();
    engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(touches(&mut guest, 8), [KEY_CLOSED; 2]);
    guest.run("close 0");
    guest.run("check");
    assert!(told(&guest, 8).1 > 0 && told(&guest, 63).1 > 0);
    assert_eq!(told(&guest, 64).1, 0);
    // A range with and without the key is two mappings, which the kernel does not let grow together. One of them moves with its key.
    assert!(guest.ask("remap 1024 1").is_err());
    guest.run("key 0 512 1");
    guest.memory = guest.run("remap 1024 1").parse().unwrap();
    assert!(told(&guest, 8).1 > 0 && told(&guest, 1023).1 > 0);
    guest.run("check");
}

/// A child has the keys of its parent's memory.
#[test]
fn a_child_has_the_keys() {
    let Some((_engine, mut guest)) = merged(7) else {
        return;
    };
    guest.run("key 100 64 1");
    guest.run("fork");
    guest.run("fill 90 20 8");
    guest.run("childcheck");
    guest.run("childwrite");
    guest.run("childdiscard");
    guest.run("check");
    guest.run("childexit");
}

/// What may be executed only has a key of the kernel's, which is closed to all threads. It is copied all the same when it is made whole,
/// and is not readable after it, nor after a discard.
#[test]
fn memory_that_may_be_executed_only_stays_so() {
    let Some((engine, mut guest)) = merged(8) else {
        return;
    };
    const EXECUTE: u32 = 4;
    const READ_WRITE: u32 = 3;
    guest.run(&format!("protect 0 8 {EXECUTE}"));
    let executed = |guest: &mut Guest| {
        let (head, key) = told(guest, 2);
        assert!(head.contains(" --xp ") && key > 0, "{head}: {key}");
        assert_eq!(touches(guest, 2), [KEY_CLOSED; 2]);
    };
    executed(&mut guest);
    assert!(is_stored(&guest, 2));
    guest.run(&format!("advise 0 512 {DONTFORK}"));
    assert!(!is_stored(&guest, 2));
    executed(&mut guest);
    guest.run(&format!("protect 0 8 {READ_WRITE}"));
    guest.run("check");
    guest.run(&format!("advise 0 512 {DOFORK}"));
    merge(&engine, &guest, [PageOutcome::Merged; 512]);
    guest.run(&format!("protect 0 8 {EXECUTE}"));
    guest.run(&format!("advise 0 4 {DONTNEED}"));
    executed(&mut guest);
    guest.run(&format!("protect 0 8 {READ_WRITE}"));
    guest.run("check");
}

/// A call that no hook saw has given merged memory a key. It is closed to the agent as to all threads but one, and no process ends.
#[test]
fn a_key_that_came_unseen_ends_nobody() {
    for call in [
        format!("advise 0 512 {DONTFORK}"),
        format!("advise 0 64 {DONTNEED}"),
        "lock 0 512".to_owned(),
        "key 0 512 1".to_owned(),
    ] {
        let Some((engine, mut guest)) = merged(9) else {
            return;
        };
        guest.run("unseenkey 0 64");
        guest.run("fill 3 2 4");
        guest.run("close 1");
        common::scan(&guest);
        engine.merge(guest.memory, 0, 64, Some(1000));
        guest.run(&call);
        engine.sync();
        engine.merge(guest.memory, 0, 512, Some(1000));
        guest.run("close 0");
        guest.run("check");
    }
}

/// Where no agent serves, the thread that calls does the work.
#[test]
fn a_thread_without_an_agent_copies_what_is_closed_to_it() {
    let Some((mut engine, mut guest)) = merged(10) else {
        return;
    };
    guest.run("unseenkey 0 64");
    guest.run("protect 100 8 4");
    guest.run("close 1");
    engine.link = None;
    let mut tries = 0..500;
    while guest.run("served") != "0" {
        assert!(tries.next().is_some(), "the session does not end");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    guest.run(&format!("advise 0 512 {DONTFORK}"));
    assert_eq!(touches(&mut guest, 100), [KEY_CLOSED; 2]);
    // The key that was given past the hooks is open again: it is gone with the mapping.
    guest.run("protect 100 8 3");
    guest.run("close 0");
    guest.run("check");
}

/// The agent's thread does the work of a hook, which lies on the stack of the thread that calls.
#[test]
fn a_thread_on_a_stack_with_a_key_is_served() {
    for how in [0, 1, 2, 3, 4] {
        let Some((engine, mut guest)) = merged(11) else {
            return;
        };
        assert_eq!(guest.ask(&format!("keyedstack {how}")), Ok("0".into()));
        guest.run("check");
        guest.run(&format!("advise 300 8 {DONTFORK}"));
        assert_eq!(guest.run("served"), "1", "call {how}");
        engine.sync();
        guest.run("check");
    }
}

/// The right to write is taken away with the key, in one call.
#[test]
fn a_key_comes_with_other_rights() {
    let Some((_engine, mut guest)) = merged(12) else {
        return;
    };
    guest.run("key 0 64 2");
    assert_eq!(touches(&mut guest, 9), [MAY, NO_RIGHT]);
    assert!(told(&guest, 9).0.contains(" r--p ") && told(&guest, 9).1 > 0);
    guest.run("check");
    guest.run("key 0 64 0");
    assert_eq!(touches(&mut guest, 9), [MAY; 2]);
}
