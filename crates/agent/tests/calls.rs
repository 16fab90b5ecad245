//! Calls over merged memory that the kernel must answer as it does without PageONE: by the mappings there, and
//! not by the word of a table.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::os::unix::fs::FileExt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use common::{Engine, count, maps_store, merged_chunks, merged_chunks_of, ready, scan};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use support::Guest;
use wire::{Answer, Change, PageBits, PageOutcome, Question, Unmerge};

const DONTNEED: i32 = 4;
const FREE: i32 = 8;
const REMOVE: i32 = 9;
const DONTFORK: i32 = 10;
const DOFORK: i32 = 11;
const MERGEABLE: i32 = 12;
const UNMERGEABLE: i32 = 13;
const DONTDUMP: i32 = 16;
const WIPEONFORK: i32 = 18;
const KEEPONFORK: i32 = 19;
const COLLAPSE: i32 = 25;
const GUARD_INSTALL: i32 = 102;
const GUARD_REMOVE: i32 = 103;

/// Mappings that 64 discards in a row take at most, as docs/recycle.md says.
const ROW: usize = 6;

fn merged(seed: u64) -> (Engine, Guest) {
    let (engine, guest) = ready(seed);
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    (engine, guest)
}

/// The flags of the mapping that holds a page.
fn flags(guest: &Guest, page: usize) -> String {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    let address = guest.memory + page * 4096;
    let mut inside = false;
    for line in smaps.lines() {
        if let Some((range, _)) = line.split_once(' ').filter(|pair| pair.0.contains('-')) {
            let (start, end) = range.split_once('-').unwrap();
            let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
            inside = (start..end).contains(&address);
        }
        if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
            return format!("{flags} ");
        }
    }
    panic!("page {page} is not mapped")
}

/// Pages offered and stored, by the last word of the agent.
fn told(engine: &Engine) -> (usize, usize) {
    let changes = engine.sync();
    let last = changes.last().map(|change| match change {
        Change::Chunk {
            offered, stored, ..
        } => (offered.len(), stored.len()),
        Change::Whole { chunks, .. } => (*chunks as usize * 512, 0),
        Change::Recycled { .. } => panic!("it is told first: {changes:?}"),
    });
    last.expect("something changed")
}

#[test]
fn to_unlock_nothing_leaves_memory_merged() {
    let (_engine, mut guest) = merged(4);
    guest.run("unlockall");
    assert!(maps_store(&guest));
    guest.run("lock 0 1");
    guest.run("unlockall");
    assert!(!maps_store(&guest));
    guest.run("check");
}

#[test]
fn memory_is_merged_after_all_was_locked_or_unlocked() {
    let (engine, mut guest) = ready(5);
    let memory = guest.memory;
    let merge = |first: u16, count: u16| {
        engine.sync();
        let merged = engine.merge(memory, first, count, Some(1000 + u64::from(first)));
        merged.outcomes[usize::from(first)..usize::from(first + count)].to_vec()
    };
    let steps = [
        // The staging area is locked with the rest, and what merges then is not.
        (&["lockcurrent", "unlock 0 512"][..], 0),
        // The other way round.
        (&["lock 0 512"], 32),
        (&["unlockall", "lock 0 512"], 64),
    ];
    for (commands, first) in steps {
        commands.iter().for_each(|command| drop(guest.run(command)));
        assert_eq!(
            merge(first, 32),
            [PageOutcome::Merged; 32],
            "after {commands:?}"
        );
    }
    guest.run("check");
}

#[test]
fn locks_count_where_they_are() {
    let (_engine, mut guest) = merged(3);
    guest.run("lock 300 8");
    guest.run("check");
    guest.run(&format!("advise 0 10 {DONTNEED}"));
    assert!(guest.ask(&format!("advise 295 10 {DONTNEED}")).is_err());
    assert!(guest.ask(&format!("advise 302 1 {FREE}")).is_err());
    // As the kernel goes: what comes before the lock is gone, nothing else.
    (295..300).for_each(|page| assert_eq!(guest.run(&format!("byte {page} 9")), "0"));
    guest.run("zero 295 5");
    guest.run("check");
    guest.run("unlock 300 8");
    guest.run(&format!("advise 302 1 {DONTNEED}"));
    guest.run("check");
}

/// As `merged`, with memory that is locked plainly.
fn locked(seed: u64) -> (Engine, Guest) {
    let (engine, mut guest) = ready(seed);
    guest.run("lock 0 512");
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    (engine, guest)
}

#[test]
fn what_was_locked_plainly_is_so_when_it_is_whole_again() {
    let (_engine, mut guest) = locked(3);
    assert!(flags(&guest, 9).contains(" lo lf "), "it is merged");
    guest.run(&format!("advise 8 4 {DONTFORK}"));
    let flags = flags(&guest, 9);
    assert!(flags.contains(" lo ") && !flags.contains(" lf "), "{flags}");
    guest.run("check");
}

#[test]
fn a_child_has_none_of_its_parents_locks() {
    let (_engine, mut guest) = locked(3);
    guest.run("fork");
    // The kernel discards nothing that is locked.
    guest.run("childdiscard");
    guest.run("childdiscard");
    guest.run("check");
    assert!(guest.ask(&format!("advise 0 1 {DONTNEED}")).is_err());
}

/// A copy that finds a page which cannot be read says so. The memory stays as it is.
#[test]
fn a_guard_that_came_unseen_ends_no_program() {
    let (_engine, mut guest) = merged(5);
    if guest
        .ask(&format!("uadvise 300 1 {GUARD_INSTALL}"))
        .is_err()
    {
        return eprintln!("skipped: this kernel has no guards");
    }
    assert!(guest.ask("lock 0 512").is_err(), "no room for a copy of it");
    guest.run(&format!("uadvise 300 1 {GUARD_REMOVE}"));
    guest.run("check");
    guest.run("lock 0 512");
    guest.run("check");
}

/// To make it writable again must not fail where the kernel counts strictly. Elsewhere the pieces join.
#[test]
fn what_is_discarded_while_it_is_read_only_is_counted_or_joins() {
    let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    let strict = mode.trim() == "2";
    for access in [1, 0] {
        let (_engine, mut guest) = merged(5);
        guest.run(&format!("protect 0 512 {access}"));
        for page in (0..512).step_by(64) {
            guest.run(&format!("advise {page} 64 {DONTNEED}"));
        }
        let told = flags(&guest, 100);
        assert!(!told.contains(" wr "), "{told}");
        assert!(told.contains(" ac ") || !strict, "{told}");
        guest.run("protect 0 512 3");
        assert!(strict || mappings(&guest) == 1, "{}", mappings(&guest));
        guest.run("check");
    }
}

#[test]
fn attributes_stay_where_they_were_put() {
    let (engine, mut guest) = merged(4);
    guest.run(&format!("advise 10 4 {DONTFORK}"));
    guest.run(&format!("advise 12 4 {DONTDUMP}"));
    guest.run(&format!("advise 100 4 {WIPEONFORK}"));
    guest.run("check");
    for round in 0..2 {
        let has = |page, flag| flags(&guest, page).contains(flag);
        let page = [9, 10, 11, 12, 13, 14, 15, 16];
        assert_eq!(
            page.map(|page| has(page, " dc ")),
            [0, 1, 1, 1, 1, 0, 0, 0].map(|n| n > 0)
        );
        assert_eq!(
            page.map(|page| has(page, " dd ")),
            [0, 0, 0, 1, 1, 1, 1, 0].map(|n| n > 0)
        );
        assert!(has(100, " wf ") && !has(99, " wf "), "round {round}");
        // Discarded, they are what they were.
        guest.run(&format!("advise 8 12 {DONTNEED}"));
        guest.run(&format!("advise 98 12 {DONTNEED}"));
    }
    guest.run(&format!("advise 100 4 {KEEPONFORK}"));
    guest.run("fill 0 512 4");
    engine.sync();
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("check");
}

fn tells_of_recycling(engine: &Engine) -> bool {
    let changes = engine.sync();
    let is_told = |change: &Change| matches!(change, Change::Recycled { .. });
    changes.iter().any(is_told)
}

#[test]
fn recycled_pages_read_as_zeros_and_are_told_of() {
    let (engine, mut guest) = merged(6);
    guest.run("recycle 10 20");
    guest.run("check");
    assert_eq!(guest.run("byte 15 9"), "0");
    let changes = engine.sync();
    let [
        Change::Recycled { pages: 20 },
        Change::Chunk {
            offered, stored, ..
        },
    ] = changes[..]
    else {
        panic!("{changes:?}")
    };
    assert_eq!((offered.len(), stored.len()), (512, 492));
    assert!(!tells_of_recycling(&engine), "told once");
    // The kernel's own errors, and none of the pages is lost.
    guest.run("lock 100 1");
    let refused = guest.ask("recycle 100 2");
    assert!(refused.is_err(), "locked: {refused:?}");
    guest.run("unmap 500 2");
    assert!(guest.ask("recycle 500 2").is_err(), "no memory");
    guest.run("unlock 100 1");
    guest.run("check");
    assert!(!tells_of_recycling(&engine), "what fails is not told of");
}

/// How many mappings a guest has.
fn all_mappings(guest: &Guest) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    maps.lines().count()
}

/// A hole cuts a mapping in two, and is one itself. Its neighbours in a row belong to it; what lies ahead is made whole in parts.
#[test]
fn recycled_pages_take_few_mappings() {
    let (_engine, mut guest) = merged(8);
    let before = all_mappings(&guest);
    guest.run("recycle 400 1");
    assert!(
        all_mappings(&guest) <= before + 2,
        "{before} mappings before"
    );
    guest.run("check");
    let before = all_mappings(&guest);
    for page in 100..164 {
        guest.run(&format!("recycle {page} 1"));
        let now = all_mappings(&guest);
        assert!(now <= before + ROW, "page {page}: {now}, {before} before");
    }
    guest.run("check");
}

#[test]
fn a_name_is_given_as_the_kernel_alone_would_give_it() {
    let (engine, mut guest) = merged(5);
    let mut other = engine.guest();
    other.map(512);
    // Some kernels know no names.
    assert_eq!(guest.ask("name 20 4"), other.ask("name 20 4"));
    assert_eq!(told(&engine), (512, 508), "four pages are the guest's own");
    guest.run("check");
}

#[test]
fn other_memory_over_merged_pages_is_left_alone() {
    let (engine, mut guest) = merged(7);
    guest.run("segment 100 10");
    // The same content, so that comparing keeps nothing from being merged.
    for page in 100..110 {
        guest.run(&format!("fill {page} 1 {}", 7 + page));
    }
    engine.sync();
    scan(&guest);
    let merged = engine.merge(guest.memory, 100, 10, Some(1100));
    assert_eq!(count(&merged, PageOutcome::Merged), 0);
    // Shared memory is not freed.
    assert!(guest.ask(&format!("advise 102 1 {FREE}")).is_err());
    guest.run(&format!("advise 90 10 {DONTNEED}"));
    guest.run(&format!("advise 110 10 {DONTNEED}"));
    guest.run("check");
}

/// Whether the kernel knows of guards, as Linux 6.13 does: with no length it tells that alone.
fn has_guards(guest: &mut Guest) -> bool {
    guest.ask(&format!("advise 0 0 {GUARD_INSTALL}")).is_ok()
}

#[test]
fn guards_leave_zeros_behind() {
    let (_engine, mut guest) = merged(5);
    if !has_guards(&mut guest) {
        assert!(guest.ask(&format!("advise 20 4 {GUARD_INSTALL}")).is_err());
        assert_eq!(stored(&guest), 512, "what the kernel does not know");
        guest.run("check");
        return;
    }
    guest.run(&format!("advise 20 4 {GUARD_INSTALL}"));
    guest.run(&format!("advise 18 8 {GUARD_REMOVE}"));
    guest.run("check");
    assert!(guest.ask(&format!("advise 30 1 {REMOVE}")).is_err());
    guest.run("check");
}

#[test]
fn advice_by_descriptor_is_advice() {
    let (engine, mut guest) = merged(6);
    // Nothing of it is offered: the kernel's own word, which refuses such advice before Linux 6.13.
    let mut other = engine.guest();
    other.map(512);
    let ask = format!("padvise 10 5 {DONTNEED}");
    let word = other.ask(&ask);
    assert!(matches!(word.as_deref(), Ok("20480") | Err(_)), "{word:?}");
    assert_eq!(guest.ask(&ask), word);
    assert_eq!(stored(&guest), if word.is_ok() { 507 } else { 512 });
    guest.run("check");
    let ask = "padvise 20 5 20"; // COLD
    assert_eq!(guest.ask(ask), other.ask(ask));
    guest.run("check");
}

/// With all memory offered the table has a place for each page that is not to be offered again.
#[test]
fn advice_over_much_of_the_address_space_takes_no_memory() {
    const BYTES: u64 = 1 << 41;
    let mut engine = Engine::new();
    let mut guest = Guest::start_with(&engine.socket(), "PAGEONE_ANY", "100");
    engine.accept();
    guest.map(512);
    guest.run("fill 0 512 6");
    let pid = guest.pid;
    let resident = || sys::usage::resident_bytes(pid).unwrap() / 1024;
    let before = resident();
    let answer = guest.ask(&format!("adviselow {BYTES} {UNMERGEABLE}"));
    assert_eq!(answer, Err("bad Cannot allocate memory".to_owned()));
    let more = resident().saturating_sub(before);
    assert!(more < 4096, "{more} KiB more");
    guest.run("check");
}

#[test]
fn a_length_that_no_memory_has_is_refused_as_by_the_kernel() {
    let (engine, mut guest) = merged(6);
    // Nothing of it is offered.
    let mut other = engine.guest();
    other.map(512);
    other.run("fill 0 512 6");
    for page in [0, 300] {
        let ask = format!("vast {page}");
        assert_eq!(guest.run(&ask), other.run(&ask), "page {page}");
        guest.run("check");
        other.run("check");
    }
}

fn limit_descriptors(guest: &Guest, limit: Rlimit) {
    let pid = Pid::from_raw(guest.pid.cast_signed());
    prlimit(pid, Resource::Nofile, limit).unwrap();
}

/// From here the guest can open nothing; gives the limit to go back to.
fn leave_no_descriptors(guest: &Guest) -> Rlimit {
    let before = getrlimit(Resource::Nofile);
    let current = Some(0);
    limit_descriptors(guest, Rlimit { current, ..before });
    before
}

#[test]
fn a_program_without_free_descriptors_gets_its_zeros() {
    let (_engine, mut guest) = merged(6);
    let before = leave_no_descriptors(&guest);
    guest.run(&format!("advise 10 5 {DONTNEED}"));
    guest.run(&format!("advise 20 1 {DONTNEED}"));
    // Compares the discarded pages with zeros.
    guest.run("check");
    assert!(guest.ask(&format!("advise 40 4 {DONTFORK}")).is_err());
    guest.run("check");
    limit_descriptors(&guest, before);
    guest.run(&format!("advise 40 4 {DONTFORK}"));
    guest.run(&format!("advise 12 20 {DONTNEED}"));
    guest.run("check");
}

/// What the table says of a page is a hint: where a raw call has put a file's mapping, and nothing can be opened to look, its bytes stay.
#[test]
fn a_file_that_came_unseen_is_not_emptied_where_nothing_can_be_looked_at() {
    let (mut engine, mut guest) = merged(6);
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (1..=64).flat_map(|byte| [byte; 4096]).collect();
    std::fs::write(file.path(), &bytes).unwrap();
    guest.run(&format!("unseenfile 100 64 {}", file.path().display()));
    std::fs::remove_file(engine.socket()).unwrap();
    end_session(&mut engine, &mut guest);
    // The agent's thread lends its list of mappings no longer.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let before = leave_no_descriptors(&guest);
    guest.run("discardfile 100 64");
    // Beside it lies merged memory.
    guest.run(&format!("advise 96 4 {DONTNEED}"));
    guest.run("check");
    limit_descriptors(&guest, before);
    assert_eq!(std::fs::read(file.path()).unwrap(), bytes);
}

/// The agent's table is its own, so a full one of the program's is no hindrance; but the limit holds for both.
#[test]
fn calls_over_merged_memory_need_few_descriptors() {
    let calls = [
        "lock 0 10".to_owned(),
        format!("advise 20 10 {DONTFORK}"),
        format!("advise 20 10 {UNMERGEABLE}"),
        "unlock 0 10".to_owned(),
        format!("advise 20 10 {DOFORK}"),
        "remap 600 1".to_owned(),
    ];
    for (limit, done) in [(20, true), (8, false)] {
        let (_engine, mut guest) = merged(6);
        let (pid, before) = (
            Pid::from_raw(guest.pid.cast_signed()),
            getrlimit(Resource::Nofile),
        );
        // Of private pages is asked what may have pinned them.
        guest.run("fill 5 20 6");
        let few = Rlimit {
            current: Some(limit),
            ..before
        };
        prlimit(pid, Resource::Nofile, few).unwrap();
        for call in &calls {
            let said = guest.ask(call);
            let locks = call.contains("lock");
            let changes_nothing = call.contains("20 10");
            assert!(
                said.is_ok() == (done || locks) || !done && changes_nothing,
                "{call}: {said:?}"
            );
        }
        guest.run("check");
        prlimit(pid, Resource::Nofile, before).unwrap();
        guest.run("lock 0 10");
        guest.run("check");
    }
}

/// Locked memory aside, for a copy, would count twice.
#[test]
fn memory_is_unlocked_next_to_the_limit_of_locked_memory() {
    const IPC_LOCK: u32 = 14;
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    guest.run(&format!("rights m:capset {IPC_LOCK}"));
    engine.write(1000, 512, 4);
    guest.offer(512, 4);
    engine.accept();
    guest.run("lock 0 512");
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    let (pid, before) = (
        Pid::from_raw(guest.pid.cast_signed()),
        getrlimit(Resource::Memlock),
    );
    let limit = Rlimit {
        current: Some(3 << 20),
        ..before
    };
    prlimit(pid, Resource::Memlock, limit).unwrap();
    guest.run("lock 0 512");
    guest.run("unlock 0 512");
    assert!(!flags(&guest, 5).contains(" lo "));
    guest.run("check");
}

#[test]
fn advice_by_number_is_advice() {
    let (engine, mut guest) = merged(10);
    assert_eq!(guest.run(&format!("nadvise 10 5 {DONTNEED}")), "0");
    guest.run("check");
    guest.run(&format!("nadvise 20 20 {UNMERGEABLE}"));
    assert_eq!(told(&engine), (512 - 20, 512 - 5 - 20));
}

#[test]
fn an_offer_made_again_is_the_same_offer() {
    let (engine, mut guest) = ready(6);
    engine.merge(guest.memory, 0, 100, Some(1000));
    engine.sync();
    guest.run(&format!("advise 0 512 {MERGEABLE}"));
    guest.run(&format!("advise 90 20 {MERGEABLE}"));
    assert!(engine.sync().is_empty(), "nothing has changed");
    let merged = engine.merge(guest.memory, 100, 412, Some(1100));
    assert_eq!(count(&merged, PageOutcome::Merged), 412);
    guest.run("check");
}

#[test]
fn memory_that_comes_unseen_is_not_merged() {
    let (engine, mut guest) = ready(7);
    engine.merge(guest.memory, 0, 256, Some(1000));
    // The same content, so that comparing keeps nothing from being merged.
    for first in [100, 300] {
        guest.run(&format!("unseen {first} 10"));
        for page in first..first + 10 {
            guest.run(&format!("fill {page} 1 {}", 7 + page));
        }
    }
    engine.sync();
    scan(&guest);
    engine.merge(guest.memory, 0, 512, Some(1000));
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    for page in (100..110).chain(300..310) {
        assert_ne!(merged.outcomes[page], PageOutcome::Merged, "page {page}");
        assert!(
            !flags(&guest, page).contains(" uw "),
            "page {page} is tracked"
        );
    }
    // And calls over it are the kernel's alone.
    guest.run(&format!("advise 100 5 {DONTNEED}"));
    guest.run(&format!("advise 300 5 {FREE}"));
    guest.run("check");
}

#[test]
fn memory_that_came_unseen_and_is_offered_is_merged() {
    let (engine, mut guest) = ready(9);
    guest.run("unseen 100 10");
    for page in 100..110 {
        guest.run(&format!("fill {page} 1 {}", 9 + page));
    }
    guest.run(&format!("advise 0 512 {MERGEABLE}"));
    engine.sync();
    assert!(flags(&guest, 105).contains(" uw "), "it is tracked");
    scan(&guest);
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("check");
}

#[test]
fn a_program_gets_its_own_userfaultfd() {
    let (engine, mut guest) = ready(8);
    engine.merge(guest.memory, 0, 256, Some(1000));
    guest.run("watch 128 256");
    guest.run("check");
    assert_eq!(
        told(&engine),
        (256, 128),
        "the offer of these pages has ended"
    );
    let merged = engine.merge(guest.memory, 128, 256, Some(1128));
    assert_eq!(count(&merged, PageOutcome::Merged), 0);
    guest.run("check");
}

#[test]
fn a_program_unregisters_what_its_userfaultfd_does_not_have() {
    let (engine, mut guest) = ready(8);
    engine.merge(guest.memory, 0, 256, Some(1000));
    // Merged and offered: the kernel alone finds no userfaultfd there.
    guest.run("unwatch 128 256");
    guest.run("check");
    assert_eq!(
        told(&engine),
        (256, 128),
        "the offer of these pages has ended"
    );
    guest.run("unwatch 0 512");
    guest.run("check");
    assert_eq!(told(&engine), (0, 0));
}

#[test]
fn merged_and_offered_memory_is_collapsed_and_merged_again() {
    let (engine, mut guest) = ready(11);
    // What may be a huge page already is none any more.
    guest.run(&format!("advise 5 1 {DONTNEED}"));
    scan(&guest);
    // Offered and armed at first, then merged.
    for _ in 0..2 {
        guest.run(&format!("advise 0 512 {COLLAPSE}"));
        guest.run("check");
        assert_eq!(told(&engine), (512, 0));
        guest.run("fill 5 1 16");
        let merged = engine.merge(guest.memory, 0, 512, Some(1000));
        assert_eq!(count(&merged, PageOutcome::Merged), 512);
        guest.run("check");
    }
}

/// A guest whose chunk is merged in runs of 16 pages, each in a mapping of its own.
fn merged_in_pieces(seed: u64) -> (Engine, Guest) {
    let (engine, guest) = ready(seed);
    engine.write(3000, 512, seed);
    for first in (0..512).step_by(16) {
        let slot = if first % 32 == 0 { 1000 } else { 3000 };
        let merged = engine.merge(guest.memory, first, 16, Some(slot + u64::from(first)));
        assert_eq!(count(&merged, PageOutcome::Merged), 16);
    }
    assert_eq!(mappings(&guest), 32);
    (engine, guest)
}

/// How many mappings have something of the guest's first chunk.
fn mappings(guest: &Guest) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    let chunk = guest.memory..guest.memory + (2 << 20);
    let ranges = maps.lines().map(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        [start, end].map(|text| usize::from_str_radix(text, 16).unwrap())
    });
    ranges
        .filter(|&[start, end]| start < chunk.end && chunk.start < end)
        .count()
}

#[test]
fn memory_made_whole_is_one_mapping_again() {
    for serves in [true, false] {
        let (mut engine, mut guest) = merged_in_pieces(7);
        if !serves {
            end_session(&mut engine, &mut guest);
        }
        guest.run(&format!("advise 0 512 {UNMERGEABLE}"));
        assert_eq!(mappings(&guest), 1, "served {serves}");
        guest.run("check");
        // As the kernel alone does.
        guest.run(&format!("advise 0 512 {COLLAPSE}"));
        guest.run("check");
    }
    let (_engine, mut guest) = merged_in_pieces(7);
    guest.run(&format!("advise 0 512 {COLLAPSE}"));
    assert_eq!(mappings(&guest), 1);
    guest.run("check");
}

#[test]
fn to_make_memory_whole_takes_a_chunk_of_address_space() {
    const CHUNKS: usize = 8;
    let (_engine, mut guest) = merged_chunks(CHUNKS);
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", guest.pid)).unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    let limit = Rlimit {
        current: Some(pages * 4096 + (3 << 20)),
        maximum: None,
    };
    let pid = Pid::from_raw(guest.pid.cast_signed());
    prlimit(pid, Resource::As, limit).unwrap();
    guest.run(&format!("advise 0 {} {DONTFORK}", 512 * CHUNKS));
    assert_eq!(stored(&guest), 0);
    guest.run("check");
}

/// At a limit that leaves no room for any copy.
#[test]
fn merged_memory_shrinks_without_room() {
    const MAYMOVE: i32 = 1;
    let (engine, mut guest) = merged_in_pieces(7);
    let pid = Pid::from_raw(guest.pid.cast_signed());
    for (resource, flags, pages) in [
        (Resource::As, 0, 400),
        (Resource::Data, MAYMOVE, 300),
        (Resource::Data, 0, 250),
    ] {
        let none = Rlimit {
            current: Some(1 << 20),
            maximum: None,
        };
        let before = prlimit(pid, resource, none).unwrap();
        let place = guest.run(&format!("remap {pages} {flags}"));
        assert_eq!(place.parse(), Ok(guest.memory));
        guest.run("check");
        assert_eq!(stored(&guest), pages, "what stays is merged still");
        assert_eq!(told(&engine), (pages, pages));
        // To its own length it shrinks by nothing.
        guest.run(&format!("remap {pages} {flags}"));
        assert!(engine.sync().is_empty(), "nothing has changed");
        prlimit(pid, resource, before).unwrap();
    }
    guest.memory = guest
        .run(&format!("remap 200 {}", MAYMOVE | 2))
        .parse()
        .unwrap();
    guest.run("check");
    assert_eq!(stored(&guest), 0);
}

#[test]
fn parts_that_were_protected_join_when_they_are_writable_again() {
    let (_engine, mut guest) = merged_in_pieces(7);
    guest.run("protect 100 20 1");
    guest.run("protect 200 20 0");
    guest.run(&format!("advise 0 512 {UNMERGEABLE}"));
    assert_eq!(mappings(&guest), 5);
    guest.run("protect 0 512 3");
    assert_eq!(mappings(&guest), 1);
    guest.run("check");
}

#[test]
fn a_program_moves_pages_out_of_merged_memory() {
    let (engine, mut guest) = merged(10);
    guest.run("moveout 100 64");
    guest.run("check");
    // The others, and what was moved, are merged as before.
    guest.run("fill 100 64 110");
    assert!(told(&engine).0 == 512, "all is offered still");
    let again = engine.merge(guest.memory, 100, 64, Some(1100));
    assert_eq!(count(&again, PageOutcome::Merged), 64);
    guest.run("check");
}

/// The kernel makes the calls wait for a thread of the program, which makes calls over merged memory meanwhile.
#[test]
fn no_lock_is_held_over_a_call_that_waits_for_a_pager_of_the_programs() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let calls = [
        "read", "write", "lock", "lockall", "discard", "unmap", "mapover", "move",
    ];
    for call in calls {
        let (_engine, mut guest) = merged(9);
        let (pid, (done, waits)) = (guest.pid, channel::<()>());
        let watch = std::thread::spawn(move || {
            if waits.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            }
        });
        let result = guest.ask_if_it_lives(&format!("page 128 64 {call}"));
        drop(done);
        watch.join().unwrap();
        assert_eq!(result.as_deref(), Some("0"), "{call}");
        guest.run("check");
    }
}

#[test]
fn a_writer_loses_nothing_while_memory_is_made_whole() {
    let (engine, mut guest) = merged(4);
    guest.run("writers 2 0 0");
    let mut merged = 0;
    for round in 0..60 {
        let advice = if round % 2 == 0 {
            WIPEONFORK
        } else {
            UNMERGEABLE
        };
        guest.run(&format!("advise 0 512 {advice}"));
        guest.run(&format!("advise 0 512 {KEEPONFORK}"));
        guest.run(&format!("advise 0 512 {MERGEABLE}"));
        engine.sync();
        let again = engine.merge(guest.memory, 0, 512, Some(1000));
        merged += count(&again, PageOutcome::Merged);
    }
    println!("{}", guest.run("stop"));
    guest.run("check");
    println!("{merged} pages merged");
}

/// The kernel lets a thread that waits go on by a call of its own.
#[test]
fn a_program_that_was_stopped_goes_on() {
    let mut guest = Guest::start(std::path::Path::new("/nowhere/pageone.sock"));
    guest.offer(512, 12);
    let pid = rustix::process::Pid::from_raw(guest.pid.cast_signed()).unwrap();
    for _ in 0..5 {
        std::thread::sleep(std::time::Duration::from_millis(100));
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    }
    guest.run("check");
}

/// I/O into registered buffers goes on into their frames: whatever is asked of the memory, it must arrive.
#[test]
fn pinned_pages_keep_their_frames() {
    let (_engine, mut guest) = merged(11);
    if guest.run("pin 100 8").starts_with('-') {
        return eprintln!("skipped: no io_uring here");
    }
    let arrives = |guest: &mut Guest, first: usize, call: &str| {
        guest.run(call);
        assert_eq!(guest.run(&format!("transfer {first} 8")), "0", "{call}");
        guest.run("check");
    };
    arrives(&mut guest, 100, "lock 0 512");
    arrives(&mut guest, 100, "unlock 0 512");
    for advice in [DONTFORK, DONTDUMP, UNMERGEABLE, MERGEABLE] {
        arrives(&mut guest, 100, &format!("advise 0 512 {advice}"));
    }
    arrives(&mut guest, 100, "protect 0 512 3");
    // What was asked of them in their place stays with what comes there.
    guest.run("unpin");
    guest.run(&format!("advise 0 512 {DONTNEED}"));
    for page in [50, 103, 300] {
        let flags = flags(&guest, page);
        assert!(
            flags.contains(" dc ") && flags.contains(" dd "),
            "{page}: {flags}"
        );
    }
    guest.run("check");
}

/// Neither the caller nor the agent has that file open.
#[test]
fn what_another_threads_descriptors_may_pin_keeps_its_frames() {
    let (engine, mut guest) = merged(6);
    let file = engine.folder.path().join("direct");
    std::fs::write(&file, [1; 4096]).unwrap();
    guest.run("fill 100 8 9");
    let frames = |guest: &Guest| [100, 107].map(|page| guest.frame(page).unwrap());
    let before = frames(&guest);
    let path = file.to_str().unwrap();
    if let Err(why) = guest.ask(&format!("apart {path}")) {
        return eprintln!("skipped: no direct I/O there: {why}");
    }
    guest.run("lock 0 512");
    assert_eq!(frames(&guest), before);
    guest.run("check");
}

/// A filter from then on allows no call but the one that ends it.
#[test]
fn a_program_in_strict_mode_ends_by_number() {
    let (_engine, mut guest) = merged(6);
    guest.tell("strictexit");
    let status = guest.process.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), None);
    assert_eq!(status.code(), Some(7));
}

/// Zeros in a page of the store would be a page that can be read.
#[test]
fn a_guard_without_a_mapping_to_spare_is_refused_or_a_guard() {
    let (_engine, mut guest) = merged(5);
    if !has_guards(&mut guest) {
        return eprintln!("skipped: this kernel has no guards");
    }
    guest.run("crowd 0");
    let answer = guest.ask(&format!("advise 100 1 {GUARD_INSTALL}"));
    if answer.is_ok() {
        assert_ne!(guest.run("touch 100 0"), "0", "a read of a guard");
        guest.run(&format!("advise 100 1 {GUARD_REMOVE}"));
    }
    guest.run("crowd 600");
    guest.run("check");
}

#[test]
fn what_may_not_be_written_is_discarded_without_a_mapping_to_spare() {
    let (_engine, mut guest) = merged(5);
    guest.run("protect 0 512 1");
    guest.run("crowd 0");
    guest.run(&format!("advise 100 3 {DONTNEED}"));
    (100..103).for_each(|page| assert_eq!(guest.run(&format!("byte {page} 9")), "0"));
    guest.run("check");
    assert_ne!(guest.run("touch 101 1"), "0", "a write");
}

#[test]
fn a_wish_for_a_place_beyond_the_table_loses_nothing() {
    let (engine, mut guest) = merged(5);
    // Nothing of it is offered. With four levels the kernel refuses such a wish.
    let mut other = engine.guest();
    other.map(512);
    assert_eq!(guest.ask("beyond"), other.ask("beyond"));
    guest.run("check");
    guest.run("fill 0 512 5");
    guest.run("check");
}

/// Where no limit can be read the usual one counts: more mappings are made than the agent makes uncounted.
#[test]
fn discards_are_given_back_where_proc_tells_no_limit() {
    const CHUNKS: usize = 160;
    const UNCOUNTED: usize = 4096;
    let hidden = "mount -t tmpfs none /proc/sys && LD_PRELOAD=$0 exec \"$@\"";
    let (_engine, mut guest) = merged_chunks_of(CHUNKS, |engine| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--mount", "sh", "-c", hidden]);
        command.args([&*support::agent(), support::guest_program(false)]);
        Guest::from(command.env("PAGEONE_SOCKET", engine.socket()))
    });
    let before = all_mappings(&guest);
    // Too few of a chunk to make all around them anonymous.
    discard_each(&mut guest, (17..512 * CHUNKS).step_by(34));
    guest.run("check");
    let more = all_mappings(&guest) - before;
    assert!(more > UNCOUNTED + 200, "{more} mappings more");
}

#[test]
fn scattered_discards_leave_mappings() {
    const CHUNKS: usize = 137;
    let (_engine, mut guest) = merged_chunks(CHUNKS);
    guest.run(&format!("scatter {} 1", 512 * CHUNKS));
    has_mappings_left(&mut guest);
}

/// The agent has left the guest its part of what the kernel allows.
#[track_caller]
fn has_mappings_left(guest: &mut Guest) {
    guest.run("room");
    guest.run("check");
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    // What the guest mapped since the last count comes on top.
    let mappings = maps.lines().count();
    assert!(mappings <= limit - limit / 8 + 64, "{mappings}");
}

/// Each page that may be pinned stays in a mapping of the store, and cuts what is made anonymous around it.
#[test]
fn an_unmerge_beside_strewn_pins_leaves_mappings() {
    const CHUNKS: usize = 137;
    let (engine, mut guest) = merged_chunks(CHUNKS);
    if guest.run("pin 0 1").starts_with('-') {
        return eprintln!("skipped: no io_uring here");
    }
    for page in (0..512 * CHUNKS).step_by(2) {
        guest.run(&format!("fill {page} 1 3"));
    }
    let mut pages = PageBits::EMPTY;
    (1..512).step_by(2).for_each(|page| pages.insert(page));
    for number in 0..CHUNKS {
        let chunk = (guest.memory + (number << 21)) as u64;
        engine.send(&Question::Unmerge(Unmerge { chunk, pages }), None);
        let Answer::Unmerged { pages: private, .. } = engine.receive() else {
            panic!()
        };
        assert_eq!(private, pages, "chunk {number}");
    }
    has_mappings_left(&mut guest);
}

/// Discards pages one by one, from `first` on.
fn discard_each(guest: &mut Guest, pages: impl Iterator<Item = usize>) {
    for page in pages {
        guest.run(&format!("advise {page} 1 {DONTNEED}"));
    }
}

#[test]
fn what_lies_ahead_of_discards_is_made_whole_but_for_what_was_written() {
    let (engine, mut guest) = merged(9);
    // A program that pins a page to write to it has written it.
    guest.run("fill 60 3 4");
    let frames: Vec<_> = (0..512).map(|page| guest.frame(page)).collect();
    discard_each(&mut guest, 0..50);
    guest.run("check");
    let now: Vec<_> = (0..512).map(|page| guest.frame(page)).collect();
    assert_eq!(
        now[60..63],
        frames[60..63],
        "written pages keep their frames"
    );
    assert!(frames[60..63].iter().all(Option::is_some));
    let (_, stored) = told(&engine);
    // At 16 pages 16 more, at 33 as many again, up to the written ones; three behind them are not worth it.
    let merged = 512 - 60;
    assert_eq!(stored, merged, "as much as was discarded, and no more");
    discard_each(&mut guest, (300..400).rev());
    guest.run("check");
    let (offered, stored) = told(&engine);
    assert_eq!(offered, 512);
    assert!((merged - 200..merged - 100).contains(&stored), "{stored}");
    // All of it can be merged again.
    guest.run("fill 0 512 9");
    engine.sync();
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("check");
}

#[test]
fn a_writer_loses_nothing_ahead_of_discards() {
    let (engine, mut guest) = merged(10);
    for _ in 0..12 {
        guest.run("writers 2 0 1");
        guest.run("scatter 512");
        let said = guest.run("stop");
        assert!(said.contains(" 0 mismatches"), "{said}");
        guest.run("check");
        guest.run("fill 0 512 10");
        engine.sync();
        engine.merge(guest.memory, 0, 512, Some(1000));
    }
}

/// Memory that is offered while the kernel discards it is discarded once, as by the kernel alone.
#[test]
fn a_write_behind_a_discard_stays() {
    let (_engine, mut guest) = merged(10);
    assert_eq!(guest.run("behind 5 256"), "0");
    guest.run("check");
}

/// A page that is out would miss the discard.
#[test]
fn no_window_works_where_a_discard_is_under_way() {
    const SLOT: u64 = 5000;
    let (engine, mut guest) = merged(10);
    let chunk: usize = guest.run("late").parse().unwrap();
    let content = [7; 8 * 4096];
    let store = &engine.store;
    store.write_all_at(&content, SLOT * 4096).unwrap();
    engine.sync();
    let tried = engine.merge(chunk, 0, 8, Some(SLOT));
    assert_eq!(count(&tried, PageOutcome::Again), 8, "{tried:?}");
    assert_eq!(guest.run("endlate"), "0");
    guest.run("check");
}

/// From here no engine serves, and the agent knows it.
fn end_session(engine: &mut Engine, guest: &mut Guest) {
    engine.link = None;
    let mut tries = 0..500;
    while guest.run("served") != "0" {
        assert!(tries.next().is_some(), "the session does not end");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// How many pages of the guest lie in mappings of a store.
fn stored(guest: &Guest) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    let stores = maps.lines().filter(|line| line.contains("memfd:store"));
    let pages = stores.map(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        (end - start) / 4096
    });
    pages.sum()
}

/// It is no thread, and no userfaultfd is lent: its writes are kept from being lost all the same.
#[test]
fn a_process_that_shares_memory_loses_nothing_while_it_is_made_whole() {
    const CHUNKS: usize = 8;
    let (mut engine, mut guest) = merged_chunks(CHUNKS);
    end_session(&mut engine, &mut guest);
    for chunk in 0..CHUNKS {
        let first = chunk * 512;
        guest.run(&format!("kin {first} 64"));
        guest.run(&format!("lock {first} 512"));
        guest.run(&format!("unlock {first} 512"));
        assert_eq!(guest.run("endkin"), "0", "chunk {chunk}");
    }
    assert_eq!(stored(&guest), 0);
    guest.run("check");
}

/// It is killed between the freeze and the new mapping, with no thread of the guest's.
#[cfg(debug_assertions)] // only such builds can be made to die
#[test]
fn a_process_that_is_killed_while_it_makes_memory_whole_leaves_no_writer_asleep() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("board");
    let board = sys::fault::Board::new(&path).unwrap();
    let fault = path.to_str().unwrap();
    for serves in [true, false] {
        let start = |engine: &Engine| Guest::start_with(&engine.socket(), "PAGEONE_FAULT", fault);
        let (mut engine, mut guest) = merged_chunks_of(1, start);
        if !serves {
            end_session(&mut engine, &mut guest);
        }
        assert!(board.arm(&format!("place {} 1 0", sys::fault::KILLED)));
        assert_eq!(guest.run("kinlock 0 512"), "9", "served {serves}");
        board.clear();
        guest.run("check");
        // Each write waits until the agent's thread finds that the lock's holder is gone.
        guest.run("fill 0 512 6");
        guest.run("check");
        guest.run("lock 0 512");
        assert_eq!(stored(&guest), 0, "served {serves}");
        guest.run("check");
    }
}

#[test]
fn a_thread_on_a_stack_in_merged_memory_makes_it_whole() {
    // Where an agent serves, it does so for the thread. Else the thread does, on a stack apart, and leaves the pages around its control
    // block in the store's mapping.
    let kept = [1..20, 1..20, 1..20, 1..20, 1..312];
    let none = [0..1, 0..1, 0..1, 0..1, 0..312];
    let cases = [(true, none), (false, kept)];
    let cases = cases.map(|(serves, left)| left.map(|left| (serves, left)));
    for (how, (serves, left)) in cases.iter().flat_map(|cases| cases.iter().enumerate()) {
        let (mut engine, mut guest) = merged(8);
        if !serves {
            end_session(&mut engine, &mut guest);
        }
        assert_eq!(
            guest.ask(&format!("standing 256 64 {how}")),
            Ok("0".into()),
            "call {how}"
        );
        guest.run("check");
        let stored = stored(&guest);
        assert!(
            left.contains(&stored),
            "call {how}, served {serves}: {stored} pages are stored"
        );
        guest.run(&format!("advise 0 512 {MERGEABLE}"));
        guest.run("fill 0 512 8");
        guest.run("unlock 0 512");
        guest.run("check");
    }
}

/// A handler of signals may have a stack of 8 KiB, of which the kernel's frame takes up to 3.5.
#[test]
fn a_memory_call_takes_little_of_the_callers_stack() {
    for serves in [true, false] {
        for how in 0..5 {
            let (mut engine, mut guest) = merged(8);
            if !serves {
                end_session(&mut engine, &mut guest);
            }
            let depth: u32 = guest
                .ask(&format!("depth 256 {how}"))
                .unwrap()
                .parse()
                .unwrap();
            assert!(depth < 4500, "call {how}, served {serves}: {depth} bytes");
            guest.run("check");
        }
    }
}

/// The kernel ends a process for a fault that a handler would have mended, if it comes while signals are blocked.
#[test]
fn a_stack_that_grows_by_faults_grows_for_a_memory_call_too() {
    for how in 0..5 {
        let (_engine, mut guest) = merged(8);
        let told = guest.ask(&format!("lazystack 256 {how}"));
        assert_eq!(told, Ok("0".into()), "call {how}");
        guest.run("check");
    }
}

#[test]
fn a_child_of_one_thread_on_such_a_stack_does_so_too() {
    let (_engine, mut guest) = merged(8);
    for how in [0, 1, 2, 3, 4] {
        assert_eq!(
            guest.ask(&format!("childstanding 256 64 {how}")),
            Ok("0".into()),
            "call {how}"
        );
    }
    guest.run("check");
}

#[test]
fn the_programs_descriptors_are_its_own_alone() {
    let (engine, mut guest) = merged(8);
    let memory = guest.memory;
    std::thread::scope(|scope| {
        let storm = scope.spawn(|| guest.ask("storm 0 512"));
        // Hooks find the agent waiting for its engine, and for the lock.
        while !storm.is_finished() {
            engine.sync();
            engine.merge(memory, 0, 64, Some(1000));
        }
        assert_eq!(storm.join().unwrap(), Ok("0".into()), "what went wrong");
    });
    guest.run("check");
}

#[test]
fn calls_go_on_when_the_first_thread_has_ended() {
    // With an agent that serves, and without.
    for serves in [true, false] {
        let (mut engine, mut guest) = merged(8);
        guest.run("fill 300 1 9");
        guest.run("endfirst");
        if !serves {
            end_session(&mut engine, &mut guest);
        }
        guest.run(&format!("advise 0 5 {DONTNEED}"));
        let _ = guest.ask(&format!("padvise 10 5 {DONTNEED}"));
        guest.run("lock 20 5");
        guest.run("unlock 20 5");
        if has_guards(&mut guest) {
            guest.run(&format!("advise 30 5 {GUARD_INSTALL}"));
            guest.run(&format!("advise 30 5 {GUARD_REMOVE}"));
        }
        guest.run(&format!("advise 0 512 {DONTFORK}"));
        guest.run("remap 1024 1");
        guest.run("check");
    }
}

#[test]
fn an_agent_that_is_stopped_alone_holds_no_call_up_for_long() {
    let (_engine, mut guest) = merged(8);
    let threads = std::fs::read_dir(format!("/proc/{}/task", guest.pid)).unwrap();
    let mut threads = threads.map(|entry| entry.unwrap().path());
    let is_agent = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path.join("comm")).unwrap() == "pageone-agent\n"
    };
    let path = threads.find(is_agent).expect("there is an agent");
    let thread: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let trace = |request| {
        // SAFETY: neither request reads or writes memory of the tracer.
        let done = unsafe { libc::ptrace(request, thread, 0, 0) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    };
    trace(libc::PTRACE_SEIZE);
    trace(libc::PTRACE_INTERRUPT);
    // SAFETY: no status is asked for.
    let stopped = unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) };
    assert_eq!(stopped, thread);
    let begun = std::time::Instant::now();
    guest.run(&format!("advise 0 5 {DONTNEED}"));
    guest.run("lock 20 5");
    guest.run("unlock 20 5");
    guest.run(&format!("advise 40 200 {DONTFORK}"));
    assert!(begun.elapsed().as_secs() < 5, "{:?}", begun.elapsed());
    guest.run("check");
    trace(libc::PTRACE_DETACH);
    guest.run(&format!("advise 300 5 {DONTNEED}"));
    guest.run("check");
}

#[test]
fn advice_that_the_kernel_does_not_know_changes_nothing() {
    let (_engine, mut guest) = merged(8);
    for advice in [5, 99, 4711, -1] {
        assert!(guest.ask(&format!("advise 0 100 {advice}")).is_err());
    }
    assert_eq!(stored(&guest), 512);
    guest.run("check");
}

#[test]
fn merged_memory_is_in_core_until_it_is_discarded() {
    let (_engine, mut guest) = merged(8);
    assert_eq!(guest.run("incore 0 512"), "512");
    guest.run(&format!("advise 10 20 {DONTNEED}"));
    guest.run(&format!("advise 40 1 {DONTNEED}"));
    assert_eq!(guest.run("incore 0 512"), "491");
    guest.run("fill 40 1 8");
    assert_eq!(guest.run("incore 0 512"), "492");
}
