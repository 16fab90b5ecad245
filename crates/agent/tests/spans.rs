//! Spans: private pages inside a mapping of the store, while the guest uses all of it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::os::unix::fs::MetadataExt;

use common::{Engine, count, is_private, merges_beside_pins, ready, scan};
use support::Guest;
use wire::{Change, PageOutcome};

const PRIVATE: usize = 171;
const MERGED: usize = 341;

/// A guest of one chunk, every third page of which equals no slot.
fn strewn(seed: u64) -> (Engine, Guest) {
    let (engine, mut guest) = ready(seed);
    for page in (0..512).filter(|&page| is_private(page)) {
        guest.run(&format!("fill {page} 1 {}", 9000 + u64::from(page)));
    }
    (engine, guest)
}

/// The mappings of the store in the guest's memory, and all mappings there.
fn mappings(guest: &Guest, pages: usize) -> (usize, usize) {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    let memory = guest.memory..guest.memory + pages * 4096;
    let inside = |line: &&str| {
        let (start, _) = line.split_once('-').unwrap();
        memory.contains(&usize::from_str_radix(start, 16).unwrap())
    };
    let lines: Vec<_> = maps.lines().filter(inside).collect();
    let stores = lines.iter().filter(|line| line.contains("memfd:store"));
    (stores.count(), lines.len())
}

fn stored(engine: &Engine) -> usize {
    match engine.sync()[..] {
        [Change::Chunk { stored, .. }] => stored.len(),
        ref other => panic!("not one chunk: {other:?}"),
    }
}

#[test]
fn a_strewn_chunk_takes_one_mapping() {
    let (engine, mut guest) = strewn(5);
    let blocks = || engine.store.metadata().unwrap().blocks();
    // What is between the slots of a span was never written.
    for page in (0..512).filter(|&page| is_private(page)).map(u64::from) {
        let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&engine.store, hole, (1000 + page) * 4096, 4096).unwrap();
    }
    let before = blocks();
    let merged = engine.merge_span(guest.memory, 0, 512, 1000);
    assert_eq!(count(&merged, PageOutcome::Merged), MERGED);
    assert_eq!(count(&merged, PageOutcome::Enclosed), PRIVATE);
    guest.run("check");
    assert_eq!(
        blocks(),
        before,
        "reading all pages made no page of the store"
    );
    assert_eq!(mappings(&guest, 512), (1, 1));
    // Private pages are written, discarded, merged where they lie; merged ones break.
    guest.run("fill 0 60 31");
    guest.run("advise 100 9 4");
    guest.run("check");
    engine.write(1001, 1, 6);
    engine.write(1004, 1, 9);
    guest.run("fill 0 6 5");
    scan(&guest);
    let again = engine.merge(guest.memory, 0, 6, Some(1000));
    assert_eq!(count(&again, PageOutcome::Merged), 6);
    guest.run("check");
    assert_eq!(stored(&engine), 512 - 9);
}

#[test]
fn enclosed_pages_are_tracked() {
    let (engine, mut guest) = strewn(5);
    engine.merge_span(guest.memory, 0, 512, 1000);
    engine.write(3000, 512, 9000);
    // Not armed since it was enclosed: whatever happened to it in the window shows as written.
    let ask = |page: u16| engine.merge_unarmed(guest.memory, page, 1, 3000 + u64::from(page));
    assert_eq!(ask(4).outcomes[4], PageOutcome::Differs);
    scan(&guest);
    assert_eq!(ask(4).outcomes[4], PageOutcome::Merged);
    guest.run("fill 7 1 9007");
    let ask = |page: u16| engine.merge_unarmed(guest.memory, page, 1, 3000 + u64::from(page));
    assert_eq!(
        ask(7).outcomes[7],
        PageOutcome::Differs,
        "written since the scan"
    );
    guest.run("check");
}

#[test]
fn what_cannot_be_enclosed_ends_a_span() {
    let (engine, mut guest) = strewn(5);
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&engine.store, hole, 1100 * 4096, 4096).unwrap();
    guest.run("advise 100 1 4"); // private, and gone
    guest.run("fill 200 1 77"); // differs
    let pins = merges_beside_pins();
    if pins {
        guest.run("pin 301 1"); // private, and pinned
    }
    guest.run("protect 400 3 1");
    guest.run("advise 450 1 4"); // gone
    let blocks = || engine.store.metadata().unwrap().blocks();
    let before = blocks();
    let merged = engine.merge_span(guest.memory, 0, 512, 1000);
    assert_eq!(merged.outcomes[200], PageOutcome::Differs);
    assert_eq!(merged.outcomes[450], PageOutcome::Gone);
    for &page in &[100, 301][..if pins { 2 } else { 1 }] {
        assert_eq!(merged.outcomes[page], PageOutcome::NotAsked);
    }
    // Neighbours of what ended the span are merged nevertheless.
    for page in [99u16, 101, 201, 300, 302, 449, 452] {
        let wanted = match is_private(page) {
            true => PageOutcome::Enclosed,
            false => PageOutcome::Merged,
        };
        assert_eq!(merged.outcomes[usize::from(page)], wanted, "page {page}");
    }
    for page in 400..403 {
        let unlike = matches!(
            merged.outcomes[page],
            PageOutcome::Unsupported | PageOutcome::NotAsked
        );
        assert!(unlike, "read-only page {page}: {:?}", merged.outcomes[page]);
    }
    guest.run("check");
    assert_eq!(blocks(), before, "no page of the store was made");
    guest.run("unpin");
    guest.run("protect 400 3 3");
    guest.run("fill 0 512 6");
    guest.run("check");
}

#[test]
fn every_call_over_a_span_keeps_its_meaning() {
    let (engine, mut guest) = strewn(9);
    engine.merge_span(guest.memory, 0, 512, 1000);
    guest.run("advise 0 10 4");
    guest.run("advise 20 10 8");
    guest.run("check");
    guest.run("mapover 40 4");
    guest.run("unmap 50 6");
    guest.run("protect 60 4 1");
    guest.run("check");
    guest.run("advise 61 1 4");
    guest.run("protect 60 4 3");
    guest.run("fill 60 4 3");
    guest.run("fork");
    guest.run("fill 90 30 8");
    guest.run("childcheck");
    guest.run("childwrite");
    guest.run("childdiscard");
    guest.run("check");
    guest.run("childexit");
    guest.run("remap 256 1");
    guest.run("check");
    // There is a hole: the kernel remaps no such range.
    assert!(guest.ask("remap 512 1").is_err());
    guest.run("mapover 50 6");
    guest.run("remap 512 1");
    guest.run("check");
    engine.sync();
}

#[test]
fn locked_memory_is_enclosed_too() {
    let (engine, mut guest) = strewn(5);
    guest.run("lock 0 512");
    engine.sync();
    let merged = engine.merge_span(guest.memory, 0, 512, 1000);
    assert_eq!(count(&merged, PageOutcome::Merged), MERGED);
    assert_eq!(count(&merged, PageOutcome::Enclosed), PRIVATE);
    guest.run("check");
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    let begin = smaps.find(&format!("{:x}-", guest.memory)).unwrap();
    let flags = smaps[begin..]
        .lines()
        .find(|line| line.starts_with("VmFlags"));
    assert!(flags.unwrap().contains(" lo "), "{flags:?}");
    let private = |line: &&str| line.starts_with("Anonymous:");
    let anonymous = smaps[begin..].lines().find(private).unwrap();
    assert!(
        anonymous.contains(&format!(" {} kB", PRIVATE * 4)),
        "{anonymous}"
    );
    guest.run("unlock 0 512");
    guest.run("check");
}

/// A thread writes private pages all the time, and with `discards` discards some, while one chunk after the other is
/// merged around it.
fn write_between(discards: u32) {
    const CHUNKS: usize = 24;
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    engine.write(1000, 512 * CHUNKS as u64, 5);
    guest.offer(512 * CHUNKS, 5);
    engine.accept();
    engine.sync();
    // Every third page of the region, which 512 is no multiple of: the first pages of chunks differ.
    guest.run(&format!("writers 3 {discards} 1"));
    let (mut merged, mut enclosed, mut longest) = (0, 0, 0);
    for chunk in 0..CHUNKS {
        let mut question = wire::Merge::new((guest.memory + chunk * 2 * 1024 * 1024) as u64, 0);
        for page in 0..512u16 {
            let whole = chunk * 512 + usize::from(page);
            let target = match whole % 3 {
                1 => wire::Target::Enclosed,
                _ => wire::Target::Slot(1000 + whole as u64),
            };
            assert!(question.push_as(page, target));
        }
        let answer = engine.ask_merge(question);
        merged += count(&answer, PageOutcome::Merged);
        enclosed += count(&answer, PageOutcome::Enclosed);
        longest = longest.max(answer.window_ns);
    }
    println!("{} longest window {longest} ns", guest.run("stop"));
    guest.run("check");
    let all = 512 * CHUNKS;
    assert!(merged > all / 2, "{merged} of {all} pages merged");
    assert!(enclosed > all / 4, "{enclosed} of {all} pages enclosed");
}

#[test]
fn a_writer_between_merged_pages_loses_nothing() {
    write_between(0);
}

#[test]
fn nor_does_one_that_discards() {
    write_between(1);
}
