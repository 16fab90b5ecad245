//! Memory that libc maps and unmaps by itself, merged: the calls that only libc makes are seen.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use common::{Engine, count};
use support::Guest;
use wire::{CHUNK_BYTES, Change, PageBits, PageOutcome};

const CHUNK: usize = 512;

/// A guest whose region of two chunks comes from `command`, offered and merged.
fn merged(command: &str) -> (Engine, Guest) {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    assert_eq!(guest.run("seeslibc"), "1");
    engine.write(1000, 2 * CHUNK as u64, 5);
    guest.memory = guest.run(command).parse().unwrap();
    guest.run("fill 0 1024 5");
    guest.run("advise 0 1024 12");
    engine.accept();
    engine.sync();
    for chunk in 0..2 {
        let (at, slot) = (guest.memory + chunk * CHUNK_BYTES, 1000 + chunk * CHUNK);
        let merged = engine.merge(at, 0, 512, Some(slot as u64));
        assert_eq!(count(&merged, PageOutcome::Merged), CHUNK);
    }
    guest.run("check");
    (engine, guest)
}

/// Nothing of the region is known to the agent any more.
#[track_caller]
fn gone(engine: &Engine, guest: &Guest) {
    for change in engine.sync() {
        let Change::Chunk {
            chunk,
            offered,
            stored,
        } = change
        else {
            panic!("{change:?}");
        };
        let region = guest.memory as u64..(guest.memory + 2 * CHUNK_BYTES) as u64;
        assert!(region.contains(&chunk));
        assert_eq!((offered, stored), (PageBits::EMPTY, PageBits::EMPTY));
    }
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Gone), CHUNK);
}

#[test]
fn a_file_where_a_freed_block_was_keeps_its_bytes() {
    let (engine, mut guest) = merged("heap 1024 0");
    guest.run("free");
    let file = engine.folder.path().join("file");
    assert_eq!(guest.run(&format!("mapfile {}", file.display())), "0");
    gone(&engine, &guest);
}

#[test]
fn memory_that_takes_the_place_of_a_freed_block_is_not_merged() {
    let (engine, mut guest) = merged("heap 1024 0");
    guest.run("free");
    assert_eq!(guest.run("fresh"), "0");
    guest.run("fill 0 1024 5");
    gone(&engine, &guest);
    guest.run("check");
    guest.run("advise 100 30 4");
    guest.run("check");
}

#[test]
fn a_block_that_grows_keeps_its_bytes() {
    let (engine, mut guest) = merged("heap 1024 0");
    let old = guest.memory;
    guest.memory = guest.run("realloc 20000").parse().unwrap();
    guest.run("check");
    if guest.memory != old {
        let merged = engine.merge(old, 0, 512, Some(1000));
        assert_eq!(count(&merged, PageOutcome::Gone), CHUNK);
    }
    guest.memory = guest.run("realloc 600").parse().unwrap();
    guest.run("check");
    guest.run("free");
}

#[test]
fn a_heap_that_shrinks_and_grows_by_brk_is_zeros() {
    let (engine, mut guest) = merged("heap 1024 1");
    guest.run("free");
    gone(&engine, &guest);
    assert_eq!(guest.run("calloc 1400"), "0");
    // Twice, so that what is merged is in the middle of the heap, too.
    guest.memory = guest.run("heap 1024 1").parse().unwrap();
    guest.run("calloc 100");
    guest.run("free");
    assert_eq!(guest.run("calloc 3000"), "0");
}

#[test]
fn a_stack_that_libc_keeps_is_discarded() {
    let (engine, mut guest) = merged("stack 1024");
    assert_eq!(guest.run("endstack"), "0");
    let changes = engine.sync();
    let stored = |change: &Change| match change {
        Change::Chunk { stored, .. } => *stored,
        Change::Whole { .. } | Change::Recycled { .. } => PageBits::EMPTY,
    };
    assert!(changes.iter().all(|change| stored(change).is_empty()));
}

#[test]
fn a_program_with_the_agent_linked_in_is_seen_too() {
    let engine = Engine::new();
    let mut guest = Guest::start_as(&engine.socket(), true, None);
    assert_eq!(guest.run("seeslibc"), "1");
    guest.run("heap 1024 0");
    guest.run("fill 0 1024 5");
    guest.run("check");
    guest.run("free");
}
