//! The agent against an engine played by hand: every question, and every way a guest can use its
//! memory meanwhile. The guest compares each byte with a shadow copy.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::ops::Range;

use common::{Engine, count, is_free, merges_beside_pins, new_lifeline, ready, scan};
use support::Guest;
use wire::{Answer, Change, Merge, PageBits, PageOutcome, Question, Unmerge};

#[test]
fn equal_pages_share_the_store_and_others_stay() {
    let (engine, mut guest) = ready(5);
    guest.run("fill 7 1 99");
    guest.run("advise 40 3 4");
    guest.run("advise 50 1 4");
    guest.run("byte 50 0");
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(
        count(&merged, PageOutcome::Differs),
        2,
        "the rewritten and the re-read page"
    );
    assert_eq!(count(&merged, PageOutcome::Gone), 3, "the discarded pages");
    assert_eq!(count(&merged, PageOutcome::Merged), 507);
    assert!(merged.window_ns > 0 && merged.cpu_ns > 0);
    guest.run("check");
    let mut stored = PageBits::FULL;
    [7, 40, 41, 42, 50]
        .iter()
        .for_each(|&page| stored.remove(page));
    // Another sharer of the same slots.
    let mut other = engine.guest();
    other.offer(512, 5);
    let mut second = Engine {
        link: None,
        ..engine
    };
    second.accept();
    second.sync();
    let merged = second.merge(other.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    other.run("check");
    for page in [0, 6, 8, 300, 511] {
        guest.run(&format!("byte {page} 0"));
        assert_eq!(
            guest.frame(page).unwrap(),
            other.frame(page).unwrap(),
            "page {page}"
        );
    }
    assert_ne!(guest.frame(7), other.frame(7));
    // Writing breaks the sharing on one side only.
    guest.run("fill 300 1 4242");
    assert_ne!(guest.frame(300), other.frame(300));
    guest.run("check");
    other.run("check");
}

#[test]
fn zero_pages_become_the_kernels() {
    let (engine, mut guest) = ready(5);
    guest.run("advise 0 8 4");
    for page in 0..8 {
        guest.run(&format!("fill {page} 1 3"));
    }
    guest.run("mapover 0 8");
    guest.run("advise 0 8 12");
    engine.sync();
    for page in 0..8 {
        guest.run(&format!("byte {page} 3"));
    }
    // Pages read but never written already are the zero page; write zeros for real ones.
    let merged = engine.merge(guest.memory, 0, 9, None);
    assert_eq!(
        count(&merged, PageOutcome::Zeroed) + count(&merged, PageOutcome::Unsupported),
        8
    );
    assert_eq!(merged.outcomes[8], PageOutcome::Differs);
    guest.run("check");
    guest.run("fill 2 2 8");
    guest.run("check");
}

#[test]
fn every_call_over_merged_pages_keeps_its_meaning() {
    let (engine, mut guest) = ready(9);
    assert_eq!(
        count(
            &engine.merge(guest.memory, 0, 512, Some(1000)),
            PageOutcome::Merged
        ),
        512
    );
    engine.sync();
    guest.run("advise 0 10 4");
    guest.run("check");
    guest.run("advise 20 10 8");
    guest.run("check");
    assert!(
        guest.ask("advise 30 2 9").is_err(),
        "MADV_REMOVE is for shared files"
    );
    guest.run("mapover 40 4");
    guest.run("unmap 50 6");
    guest.run("protect 60 4 1");
    guest.run("check");
    guest.run("advise 62 1 4");
    guest.run("check");
    guest.run("protect 60 4 3");
    guest.run("fill 60 4 3");
    guest.run("check");
    let changes = engine.sync();
    let mut stored = PageBits::FULL;
    (0..10)
        .chain(20..30)
        .chain(40..44)
        .chain(50..56)
        .chain([62])
        .for_each(|p| stored.remove(p));
    let mut offered = PageBits::FULL;
    (40..44).chain(50..56).for_each(|page| offered.remove(page));
    assert_eq!(
        changes,
        [Change::Chunk {
            chunk: guest.memory as u64,
            offered,
            stored
        }]
    );
    // Mapped over, offered again, and merged again.
    guest.run("mapover 0 64");
    guest.run("fill 0 64 9");
    guest.run("advise 0 64 12");
    engine.sync();
    assert_eq!(
        count(
            &engine.merge(guest.memory, 0, 64, Some(1000)),
            PageOutcome::Merged
        ),
        64
    );
    guest.run("check");
}

#[test]
fn remapping_moves_grows_and_shrinks_merged_memory() {
    const MAYMOVE: i32 = 1;
    let (engine, mut guest) = ready(2);
    guest.run("fill 100 3 77");
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 509);
    guest.run("remap 400 0");
    guest.run("check");
    guest.memory = guest.run(&format!("remap 700 {MAYMOVE}")).parse().unwrap();
    guest.run("check");
    let changes = engine.sync();
    let offered: usize = changes
        .iter()
        .map(|change| match change {
            Change::Chunk { offered, .. } => offered.len(),
            Change::Whole { chunks, .. } => *chunks as usize * 512,
            Change::Recycled { .. } => 0,
        })
        .sum();
    assert_eq!(offered, 700, "the offer moved along, and grew: {changes:?}");
    guest.run("fill 0 700 2");
    guest.memory = guest
        .run(&format!("remap 700 {}", MAYMOVE | 2))
        .parse()
        .unwrap();
    guest.run("check");
}

#[test]
fn discarding_needs_no_mapping_more_than_the_guest_has() {
    let (engine, mut guest) = ready(7);
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("crowd 0");
    guest.run("advise 100 1 4"); // MADV_DONTNEED
    guest.run("advise 300 3 8"); // MADV_FREE
    guest.run("check");
    guest.run("fill 300 1 11");
    guest.run("advise 299 3 4");
    guest.run("check");
}

/// What a page allows, as the kernel's list of mappings tells.
fn allowed(guest: &Guest, page: usize) -> String {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    let address = guest.memory + page * 4096;
    let holds = |line: &&str| {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        (start..end).contains(&address)
    };
    let line = maps.lines().find(holds).expect("the page is mapped");
    line.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn protected_pages_stay_protected_when_discarded_withdrawn_or_moved() {
    const MAYMOVE_FIXED: i32 = 3;
    let (engine, mut guest) = ready(6);
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    let kinds = [(10, 0, "---p"), (20, 1, "r--p"), (30, 5, "r-xp")];
    for (first, protection, _) in kinds {
        guest.run(&format!("protect {first} 4 {protection}"));
        guest.run(&format!("advise {first} 1 4")); // MADV_DONTNEED
        guest.run(&format!("advise {} 1 13", first + 1)); // MADV_UNMERGEABLE
    }
    let check = |guest: &mut Guest| {
        for (first, _, expected) in kinds {
            (first..first + 4)
                .for_each(|page| assert_eq!(allowed(guest, page), expected, "{page}"));
            assert_eq!(allowed(guest, first + 4), "rw-p");
        }
    };
    check(&mut guest);
    // Memory of several kinds moves since Linux 6.17; before, it stays where it is, as a guest's of which nothing is offered.
    let mut other = engine.guest();
    other.map(512);
    other.run("protect 10 4 1");
    let ask = format!("remap 512 {MAYMOVE_FIXED}");
    match (guest.ask(&ask), other.ask(&ask)) {
        (Ok(place), Ok(_)) => guest.memory = place.parse().unwrap(),
        (Err(why), Err(wanted)) => assert_eq!(why, wanted),
        other => panic!("{other:?}"),
    }
    check(&mut guest);
    guest.run("protect 10 4 3");
    guest.run("check");
}

/// What the agent offers and what is stored of the one chunk that it tells of.
fn only_chunk(engine: &Engine) -> (PageBits, PageBits) {
    let changes = engine.sync();
    let [
        Change::Chunk {
            offered, stored, ..
        },
    ] = changes[..]
    else {
        panic!("{changes:?}")
    };
    (offered, stored)
}

#[test]
fn withdrawn_pages_are_private_again() {
    let (engine, mut guest) = ready(3);
    engine.merge(guest.memory, 0, 512, Some(1000));
    let shared = guest.frame(5);
    guest.run("advise 0 100 13");
    guest.run("check");
    assert_ne!(guest.frame(5), shared);
    let (offered, stored) = only_chunk(&engine);
    assert_eq!((offered.len(), stored.len()), (412, 412));
    // The engine's own wish.
    let mut pages = PageBits::EMPTY;
    (200..300).for_each(|page| pages.insert(page));
    let chunk = guest.memory as u64;
    engine.send(&Question::Unmerge(Unmerge { chunk, pages }), None);
    let Answer::Unmerged { pages: private, .. } = engine.receive() else {
        panic!()
    };
    assert_eq!(private, pages);
    // It is anonymous memory again, and no mapping of the store.
    let (offered, stored) = only_chunk(&engine);
    assert_eq!((offered.len(), stored.len()), (412, 312));
    assert_eq!(stored & pages, PageBits::EMPTY);
    guest.run("check");
}

#[test]
fn writers_lose_nothing_while_windows_open_all_the_time() {
    let (engine, mut guest) = ready(4);
    // The writers put one of seven patterns into whole pages, and words into others.
    for seed in 0..7 {
        engine.write(2000 + 10 * seed, 1, seed);
    }
    guest.run("writers 6 1");
    let mut merged_pages = 0;
    for round in 0..100u64 {
        let slot = 2000 + 10 * (round % 7);
        let mut question = Merge::new(guest.memory as u64, 0);
        (0..512).for_each(|page| assert!(question.push(page, Some(slot))));
        let merged = engine.ask_merge(question);
        merged_pages += count(&merged, PageOutcome::Merged);
        engine.merge(guest.memory, 0, 512, None);
        engine.sync();
    }
    println!("{}", guest.run("stop"));
    guest.run("check");
    assert!(merged_pages > 50, "windows did merge: {merged_pages}");
}

#[test]
fn a_writer_loses_nothing_while_pages_beside_read_only_ones_are_withdrawn() {
    let (engine, mut guest) = ready(4);
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("protect 510 1 1");
    // One that writes to every second page.
    guest.run("writers 2 0 1");
    for _ in 0..200 {
        guest.run("advise 0 512 13");
        guest.run("advise 0 512 12");
    }
    println!("{}", guest.run("stop"));
    assert_eq!(allowed(&guest, 510), "r--p");
    guest.run("check");
}

#[test]
fn broken_pages_are_merged_again() {
    let (engine, mut guest) = ready(6);
    engine.merge(guest.memory, 0, 512, Some(1000));
    engine.write(3000, 100, 70);
    guest.run("fill 100 100 70");
    guest.run("zero 300 10");
    engine.sync();
    let merged = engine.merge_unarmed(guest.memory, 100, 100, 3000);
    assert_eq!(count(&merged, PageOutcome::Differs), 100, "never armed");
    scan(&guest);
    guest.run("fill 150 1 71");
    guest.run("fill 150 1 120"); // as it was, but it may be pinned since
    let merged = engine.merge_unarmed(guest.memory, 100, 100, 3000);
    assert_eq!(merged.outcomes[150], PageOutcome::Differs);
    assert_eq!(count(&merged, PageOutcome::Again), 63, "of its run");
    assert_eq!(count(&merged, PageOutcome::Merged), 36);
    scan(&guest);
    let merged = engine.merge_unarmed(guest.memory, 100, 100, 3000);
    assert_eq!(count(&merged, PageOutcome::Merged), 100);
    let merged = engine.merge(guest.memory, 300, 11, None);
    assert_eq!(count(&merged, PageOutcome::Zeroed), 10);
    assert_eq!(merged.outcomes[310], PageOutcome::Differs);
    guest.run("check");
    let [Change::Chunk { stored, .. }] = engine.sync()[..] else {
        panic!("not a chunk")
    };
    assert_eq!(stored.len(), 502, "zeros are anonymous");
    // What was let go is tracked still, and another content stays.
    scan(&guest);
    guest.run("fill 100 20 500");
    scan(&guest);
    let merged = engine.merge_unarmed(guest.memory, 100, 20, 3000);
    assert_eq!(count(&merged, PageOutcome::Differs), 20);
    guest.run("fill 100 20 70");
    scan(&guest);
    let merged = engine.merge_unarmed(guest.memory, 100, 20, 3000);
    assert_eq!(count(&merged, PageOutcome::Merged), 20);
    guest.run("check");
}

#[test]
fn writers_lose_nothing_while_pages_are_merged_again() {
    let (engine, mut guest) = ready(4);
    for seed in 0..7 {
        engine.write(2000 + 10 * seed, 1, seed);
    }
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("writers 6 1");
    let mut merged_again = 0;
    for round in 0..300u64 {
        engine.sync();
        scan(&guest);
        let mut question = Merge::new(guest.memory as u64, 0);
        let slot = 2000 + 10 * (round % 7);
        (0..512).for_each(|page| assert!(question.push(page, Some(slot))));
        engine.send(&Question::Merge(question), None);
        let Answer::Merged(merged) = engine.receive() else {
            panic!("not merged")
        };
        merged_again += count(&merged, PageOutcome::Merged);
    }
    println!("{}", guest.run("stop"));
    guest.run("check");
    assert!(merged_again > 10, "windows did merge: {merged_again}");
}

#[test]
fn fork_children_keep_what_was_merged() {
    let (engine, mut guest) = ready(6);
    engine.merge(guest.memory, 0, 300, Some(1000));
    guest.run("fork");
    guest.run("childcheck");
    // Shared by fork: the kernel does not move these pages.
    let merged = engine.merge(guest.memory, 300, 212, Some(1300));
    assert_eq!(count(&merged, PageOutcome::Pinned), 212);
    guest.run("fill 0 100 12345");
    guest.run("childcheck");
    guest.run("childwrite");
    guest.run("childdiscard");
    guest.run("check");
    let second = new_lifeline();
    engine.sync_with(Some(&second));
    assert!(
        !is_free(&engine.lifeline),
        "the child holds the first lifeline"
    );
    guest.run("childexit");
    assert!(is_free(&engine.lifeline), "the first lifeline is free");
    assert!(!is_free(&second), "the guest holds the second");
    drop(guest);
    assert!(is_free(&second));
}

/// The table knows nothing of it. The engine gives slots back once the line is gone.
#[test]
fn merged_memory_that_was_moved_past_libc_is_the_programs_own_before_a_line_goes() {
    for anew in [0, 1] {
        let (engine, mut guest) = ready(2);
        let merged = engine.merge(guest.memory, 0, 512, Some(1000));
        assert_eq!(count(&merged, PageOutcome::Merged), 512);
        guest.memory = guest.run(&format!("stray {anew}")).parse().unwrap();
        engine.sync();
        assert!(!is_free(&engine.lifeline));
        let second = new_lifeline();
        engine.sync_with(Some(&second));
        assert!(is_free(&engine.lifeline), "it has the second line");
        // What the slots hold from here on is no concern of the guest's.
        engine.write(1000, 512, 77);
        guest.run("check");
        guest.run("advise 0 512 13"); // MADV_UNMERGEABLE
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
        assert!(!maps.contains("/memfd:store"), "it is known: {maps}");
        guest.run("check");
    }
}

#[test]
fn what_was_moved_past_libc_is_found_where_another_was_found_before() {
    let (engine, mut guest) = ready(2);
    engine.write(2000, 512, 3);
    let mut line = &engine.lifeline;
    let (second, third) = (new_lifeline(), new_lifeline());
    for (seed, slot, next) in [(2, 1000, &second), (3, 2000, &third)] {
        if slot == 2000 {
            guest.map(512);
            guest.run(&format!("fill 0 512 {seed}"));
            guest.run("advise 0 512 12"); // MERGEABLE
            engine.sync();
        }
        let merged = engine.merge(guest.memory, 0, 512, Some(slot));
        assert_eq!(count(&merged, PageOutcome::Merged), 512);
        guest.memory = guest.run("stray 0").parse().unwrap();
        engine.sync_with(Some(next));
        assert!(is_free(line), "it has the next line");
        engine.write(slot, 512, 77);
        guest.run("check");
        line = next;
    }
}

#[test]
fn forks_never_fall_into_a_window() {
    let (engine, mut guest) = ready(8);
    for round in 0..40 {
        guest.tell("fork");
        for _ in 0..5 {
            engine.merge(guest.memory, 0, 512, Some(1000));
        }
        guest.answer().unwrap();
        guest.run("childcheck");
        guest.run("childexit");
        guest.run(&format!("fill {} 1 {round}", round * 7));
        guest.run("check");
    }
}

#[test]
fn pinned_pages_stay_and_the_data_arrives() {
    let (engine, mut guest) = ready(7);
    let file = engine.folder.path().join("data");
    std::fs::write(&file, vec![0xa5; 16 * 4096]).unwrap();
    guest.run("pin 32 16");
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    let others = match merges_beside_pins() {
        true => PageOutcome::Merged,
        false => PageOutcome::Pinned,
    };
    assert_eq!(merged.outcomes[32..48], [PageOutcome::Pinned; 16]);
    assert_eq!(merged.outcomes[48..], [others; 464]);
    assert_eq!(
        guest.run(&format!("readfixed 32 16 {}", file.display())),
        "65536"
    );
    assert_eq!(guest.run("byte 33 7"), 0xa5.to_string());
    guest.run("check");
    guest.run("unpin");
}

/// The kernel splits a huge page before it moves one of its pages, and cannot while one of them is pinned.
#[test]
fn pinned_pages_of_a_huge_page_stay() {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    engine.write(1000, 512, 7);
    guest.map(512);
    guest.run("advise 0 512 14"); // HUGEPAGE
    guest.run("fill 0 512 7");
    guest.run("advise 0 512 12");
    engine.accept();
    engine.sync();
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    if !smaps.contains("AnonHugePages:      2048 kB") {
        return eprintln!("skipped: there is no huge page to be had");
    }
    guest.run("pin 32 16");
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(merged.outcomes[32..48], [PageOutcome::Pinned; 16]);
    guest.run("check");
    guest.run("unpin");
    guest.run("check");
}

#[test]
fn direct_io_into_the_region_arrives_while_windows_open() {
    let (engine, mut guest) = ready(7);
    let file = support::built().join(format!("direct-{}", std::process::id()));
    for seed in 0..3 {
        engine.write(5000 + seed, 1, seed);
    }
    guest.run(&format!("direct 64 64 {}", file.display()));
    for round in 0..200 {
        // Armed once, before anything is merged: a page that lies in a store is asked for by an engine only when it has
        // settled, and here reads are always under way. So only MOVE sees what pins a page.
        if round == 0 {
            scan(&guest);
        }
        for page in 64..128 {
            engine.merge_unarmed(guest.memory, page, 1, 5000 + round % 3);
        }
        engine.sync();
    }
    println!("{}", guest.run("stop"));
    guest.run("check");
    std::fs::remove_file(file).unwrap();
}

/// How many of a process's pages are in its page table.
fn pages_in(pid: u32, start: u64, pages: usize) -> usize {
    use std::os::unix::fs::FileExt;
    let map = std::fs::File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let mut entries = vec![0; 8 * pages];
    map.read_exact_at(&mut entries, start / 4096 * 8).unwrap();
    // The highest bit says that the page is there.
    let there = |entry: &&[u8]| entry[7] & 0x80 != 0;
    entries.chunks_exact(8).filter(there).count()
}

#[test]
fn locked_and_huge_regions_keep_what_they_are() {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    engine.write(1000, 512, 11);
    guest.map(512);
    guest.run("advise 0 512 14"); // MADV_HUGEPAGE
    guest.run("fill 0 512 11");
    guest.run("lock 0 256");
    guest.run("advise 0 512 12");
    guest.run("advise 0 512 10"); // MADV_DONTFORK
    guest.run("advise 0 512 16"); // MADV_DONTDUMP
    engine.accept();
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(
        count(&merged, PageOutcome::Merged),
        256,
        "of two kinds of mappings in a chunk, one is left alone"
    );
    guest.run("check");
    guest.run("unlock 0 512");
    guest.run("lock 0 512");
    guest.run("advise 0 512 12");
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    let pages = pages_in(guest.pid, guest.memory as u64, 512);
    assert_eq!(pages, 512, "what is locked is there without an access");
    guest.run("check");
    let flags = vm_flags(&guest);
    for flag in [" lo", " dc", " dd"] {
        assert!(flags.contains(flag), "{flag} in {flags}");
    }
    guest.run("advise 0 512 24"); // MADV_DONTNEED_LOCKED
    guest.run("check");
}

#[test]
fn an_agent_outlives_its_engine_and_serves_the_next() {
    let (mut engine, mut guest) = ready(1);
    engine.merge(guest.memory, 0, 256, Some(1000));
    drop(engine.link.take());
    guest.run("check");
    guest.run("fill 3 2 55");
    engine.accept();
    let changes = engine.sync();
    let [
        Change::Chunk {
            offered, stored, ..
        },
    ] = changes[..]
    else {
        panic!("{changes:?}")
    };
    assert_eq!((offered.len(), stored.len()), (512, 256));
    let merged = engine.merge(guest.memory, 256, 256, Some(1256));
    assert_eq!(count(&merged, PageOutcome::Merged), 256);
    guest.run("check");
}

/// The kernel's flags of the mapping at the start of the guest's memory.
fn vm_flags(guest: &Guest) -> String {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    let head = format!("{:x}-", guest.memory);
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&head));
    let flags = lines.find(|line| line.starts_with("VmFlags")).unwrap();
    flags.to_owned()
}

#[test]
fn ksm_gets_an_offer_only_where_no_engine_is() {
    let (engine, guest) = ready(1);
    assert!(!vm_flags(&guest).contains(" mg"));
    drop(guest);
    let nobody = engine.folder.path().join("nobody");
    let mut guest = Guest::start(&nobody);
    guest.offer(512, 1);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !vm_flags(&guest).contains(" mg") {
        assert!(std::time::Instant::now() < deadline, "not passed on to KSM");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    guest.run("check");
}

#[test]
fn lines_of_former_sessions_go_when_their_pages_are_adopted() {
    let (mut engine, mut guest) = ready(1);
    engine.merge(guest.memory, 0, 256, Some(1000));
    drop(engine.link.take());
    let old = [&mut engine.lifeline, &mut engine.tie];
    let old = old.map(|line| std::mem::replace(line, new_lifeline()));
    engine.accept();
    guest.run("fork");
    engine.sync();
    assert!(
        !old.iter().any(is_free),
        "pages merged then are there still"
    );
    engine.sync_as(None, true);
    assert!(!old.iter().any(is_free), "the child holds them");
    guest.run("childcheck");
    guest.run("childexit");
    assert!(old.iter().all(is_free));
    assert!(!is_free(&engine.lifeline) && !is_free(&engine.tie));
    // A session that ends when nothing is merged leaves nothing behind.
    guest.run("advise 0 512 4"); // MADV_DONTNEED
    drop(engine.link.take());
    let old = [&mut engine.lifeline, &mut engine.tie];
    let old = old.map(|line| std::mem::replace(line, new_lifeline()));
    engine.accept();
    assert!(old.iter().all(is_free));
    guest.run("check");
}

#[test]
fn a_program_linked_with_the_agent_uses_the_header() {
    let mut engine = Engine::new();
    let mut guest = Guest::start_as(&engine.folder.path().join("socket"), true, None);
    engine.write(1000, 512, 21);
    guest.map(512);
    guest.run("fill 0 512 21");
    guest.run("register 0 512");
    engine.accept();
    engine.sync();
    assert_eq!(guest.run("served"), "1");
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("unregister 0 512");
    guest.run("check");
    let changes = engine.sync();
    let [Change::Chunk { offered, .. }] = changes[..] else {
        panic!("{changes:?}")
    };
    assert!(offered.is_empty());
}

/// The memory of the agent in a process: its variables, in front of which the library (or the program it is linked
/// into) is mapped, and what it mapped itself.
fn own_memory(pid: u32, image: &str) -> (Range<u64>, Vec<Range<u64>>) {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut mapping, mut image_end, mut variables, mut mapped) = (0..0, 0, None, Vec::new());
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap();
        if let Some((start, end)) = first.split_once('-') {
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            mapping = number(start)..number(end);
            let path = words.nth(4);
            if path.is_some_and(|path| path.contains(image)) {
                image_end = mapping.end;
            } else if mapping.start == image_end && path != Some("[heap]") {
                variables = Some(mapping.clone());
            }
        } else if first == "VmFlags:" && words.any(|flag| flag == "rr") {
            mapped.push(mapping.clone());
        }
    }
    (variables.unwrap(), mapped)
}

/// A program may offer every mapping it finds. Were a page of the agent's frozen by the agent, it would wait for itself.
fn the_agents_own_memory_cannot_be_offered(linked: bool, image: &str) {
    let mut engine = Engine::new();
    let mut guest = Guest::start_as(&engine.socket(), linked, None);
    guest.map(512);
    guest.run("fill 0 512 7");
    guest.run("offerall");
    engine.accept();
    let mut told = PageSet::default();
    for _ in 0..3 {
        for change in engine.sync() {
            told.note(change);
        }
        // With what the agent has mapped meanwhile.
        guest.run("offerall");
    }
    assert!(
        told.has(guest.memory as u64),
        "the guest's own pages are offered"
    );
    let (variables, mapped) = own_memory(guest.pid, image);
    assert!(
        mapped.len() >= 4,
        "the table, the stack, the journal, the copies: {mapped:x?}"
    );
    for own in mapped.iter().chain([&variables]) {
        for page in own.clone().step_by(4096) {
            assert!(!told.has(page), "{page:x} of {own:x?} is the agent's");
        }
    }
    guest.run("check");
}

#[test]
fn the_agents_own_memory_cannot_be_offered_when_it_is_preloaded() {
    the_agents_own_memory_cannot_be_offered(false, "libpageone_agent.so");
}

#[test]
fn the_agents_own_memory_cannot_be_offered_when_it_is_linked() {
    the_agents_own_memory_cannot_be_offered(true, "-true");
}

/// The pages that were ever told as offered.
#[derive(Default)]
struct PageSet(std::collections::HashSet<u64>);

impl PageSet {
    fn note(&mut self, change: Change) {
        match change {
            Change::Whole { chunk, chunks } => {
                let end = chunk + u64::from(chunks) * wire::CHUNK_BYTES as u64;
                self.0.extend((chunk..end).step_by(4096));
            }
            Change::Chunk { chunk, offered, .. } => {
                let pages = offered.pages().map(|page| chunk + page as u64 * 4096);
                self.0.extend(pages);
            }
            Change::Recycled { .. } => {}
        }
    }

    fn has(&self, page: u64) -> bool {
        self.0.contains(&page)
    }
}

/// The journal's address in the next session.
fn next_session(engine: &mut Engine) -> usize {
    engine.link = None;
    for _ in 0..4 {
        match engine.try_accept() {
            Some(Answer::Ready(ready)) => return usize::try_from(ready.journal).unwrap(),
            Some(other) => panic!("{other:?}"),
            None => {}
        }
    }
    panic!("no agent came back");
}

#[test]
fn sessions_leave_no_staging_areas() {
    let (mut engine, mut guest) = ready(5);
    let mappings = |guest: &Guest| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
        maps.lines().count()
    };
    next_session(&mut engine);
    engine.sync();
    let first = mappings(&guest);
    for session in 0..5 {
        next_session(&mut engine);
        engine.sync();
        let now = mappings(&guest);
        assert!(now <= first, "{now} after {session}, {first} at first");
    }
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("check");
}

/// The kernel may merge all memory of a process by itself. Of a page of the staging area MOVE would say that it is busy for ever.
#[test]
fn the_staging_area_is_not_for_ksm_where_all_memory_is() {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    if guest.ask("wishksm").is_err() {
        return eprintln!("skipped: the kernel has no KSM, or not for this user");
    }
    engine.write(1000, 512, 5);
    guest.offer(512, 5);
    let journal = next_session(&mut engine);
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    let flags = |at: usize| {
        let (_, rest) = smaps.split_once(&format!("\n{at:x}-")).unwrap();
        let mut lines = rest.lines();
        lines.find(|line| line.starts_with("VmFlags:")).unwrap()
    };
    assert!(smaps.contains(" mg"), "it has the wish");
    for at in [journal, journal + 4096] {
        assert!(!flags(at).contains(" mg"), "{at:x}: {}", flags(at));
    }
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("check");
}

#[test]
fn nothing_of_the_agent_lies_where_the_program_was() {
    const CHUNKS: usize = 12;
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    engine.write(1000, 512 * CHUNKS as u64, 5);
    guest.map(512 * CHUNKS);
    guest.run(&format!("fill 0 {} 5", 512 * CHUNKS));
    // Two mebibytes and a large place: what is made aside has sizes of both kinds.
    guest.run("hole 64");
    guest.run(&format!("advise 0 {} 12", 512 * CHUNKS));
    engine.accept();
    engine.sync();
    // Table, stack, staging area, copies and lines are there.
    guest.run("tryhole");
    guest.run("usehole");
    let mut merged = 0;
    for chunk in 0..CHUNKS {
        let at = guest.memory + chunk * (2 << 20);
        let slot = 1000 + 512 * chunk as u64;
        merged += count(&engine.merge_span(at, 0, 512, slot), PageOutcome::Merged);
    }
    assert!(merged > 256 * CHUNKS, "{merged} pages merged");
    let lifeline = common::new_lifeline();
    engine.sync_with(Some(&lifeline));
    // What is merged is locked, and so made whole aside; what is merged then is mapped by way of aside as well.
    guest.run(&format!("lock 0 {}", 256 * CHUNKS));
    engine.sync();
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run(&format!("unlock 0 {}", 512 * CHUNKS));
    guest.run("endhole");
    guest.run("tryhole");
    guest.run("check");
}
