//! Live merging, end to end: real guests, a real daemon, frames compared by number. Each guest
//! keeps a shadow copy of its memory and compares every byte (`tests/guest/guest.c`).
//!
//! These tests need root (page frame numbers) and a kernel with userfaultfd's WP_ASYNC and MOVE.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use common::{
    PATIENCE, Place, Running, alone, classed_and_present, count, daemon, json, output, pageone,
    paired, wait_for,
};
use serde_json::Value;
use support::Guest;

/// Pages of a guest in most tests: 8 MiB.
const PAGES: usize = 2048;

fn fast(place: &Place) -> Running {
    daemon(place, &["--merge-period", "100ms"])
}

/// The counters, once they say `done`; every status on the way keeps the equation (I9).
fn status_when(place: &Place, what: &str, done: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = json(place);
        let (sum, present) = classed_and_present(&status);
        assert_eq!(sum, present, "I9: {status}");
        if done(&status) {
            return status;
        }
        assert!(
            Instant::now() < deadline,
            "waited {PATIENCE:?} for {what}: {status}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn guests(status: &Value) -> &[Value] {
    status["guests"].as_array().unwrap()
}

fn merged(status: &Value) -> u64 {
    count(status, "pages_shared") + count(status, "pages_sharing")
}

/// Two guests with the same `PAGES` pages, merged by a daemon.
fn pair() -> (Place, Running, Guest, Guest) {
    let place = Place::new();
    let running = fast(&place);
    let mut one = Guest::start(&place.socket());
    let mut two = Guest::start(&place.socket());
    one.offer(PAGES, 100);
    two.offer(PAGES, 100);
    status_when(&place, "two equal guests to be merged", |status| {
        paired(status, PAGES)
    });
    (place, running, one, two)
}

#[test]
fn equal_guests_share_frames_and_memory_comes_back() {
    let _alone = alone();
    let (place, _daemon, mut one, mut two) = pair();
    one.run("check");
    two.run("check");
    for page in [0, 1, 511, 512, PAGES - 1] {
        assert!(one.frame(page).is_some());
        assert_eq!(one.frame(page), two.frame(page), "page {page}");
    }
    let status = json(&place);
    assert_eq!(count(&status, "pages_shared"), PAGES as u64);
    assert_eq!(count(&status, "saved_bytes"), PAGES as u64 * 4096);
    assert!(status["net_saved_bytes"].as_i64().unwrap() > 0, "{status}");
    // What the kernel counts for the guests: each half of the shared frames, plus a shadow. With the next
    // round agents give back what they compared with.
    let unshared = 2 * 2 * PAGES * 4;
    wait_for("most of one guest's memory to be saved", || {
        let pss = [&one, &two].map(|guest| proportional_kib(guest.pid));
        let pss: usize = pss.iter().sum();
        (pss < unshared - PAGES * 4 * 8 / 10).then_some(())
    });
    // A write on one side is private to it.
    one.run("fill 700 3 42");
    assert_ne!(one.frame(700), two.frame(700));
    assert_eq!(one.frame(703), two.frame(703));
    status_when(
        &place,
        "three pages that have no page to share with",
        |status| count(status, "pages_unshared") == 3,
    );
    one.run("check");
    two.run("check");
}

/// What a process takes of memory, its part of stores included; less its programs and libraries, of which its part rests on
/// who else runs.
fn proportional_kib(pid: u32) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let kib = |name| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        let kib = line.split_whitespace().nth(1).unwrap();
        kib.parse::<usize>().unwrap()
    };
    kib("Pss_Anon:") + kib("Pss_Shmem:")
}

#[test]
fn one_guest_shares_with_itself() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let mut guest = Guest::start(&place.socket());
    guest.map(1024);
    guest.run("fill 0 512 5");
    guest.run("fill 512 512 5");
    guest.run("advise 0 1024 12");
    status_when(&place, "the halves to be merged", |s| paired(s, 512));
    assert_eq!(guest.frame(7), guest.frame(519));
    guest.run("check");
}

#[test]
fn writers_and_discards_never_see_a_wrong_byte() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "20ms"]);
    let mut all: Vec<Guest> = (0..3).map(|_| Guest::start(&place.socket())).collect();
    for guest in &mut all {
        guest.offer(PAGES, 9);
        guest.run("writers 4 1");
    }
    let began = Instant::now();
    let mut most = 0;
    while began.elapsed() < Duration::from_secs(8) {
        let status = status_when(&place, "a status", |_| true);
        most = most.max(merged(&status));
        std::thread::sleep(Duration::from_millis(50));
    }
    for guest in &mut all {
        println!("{}", guest.run("stop"));
        guest.run("check");
    }
    // Writers touch every page often; what lies still long enough is merged all the same.
    println!("at most {most} pages merged at a time");
    for guest in &mut all {
        guest.run("mapover 0 2048");
        guest.run("fill 0 2048 1");
        guest.run("advise 0 2048 12");
    }
    status_when(&place, "the still guests to be merged", |s| {
        merged(s) == 3 * PAGES as u64
    });
    all.iter_mut().for_each(|guest| drop(guest.run("check")));
}

#[test]
fn zeros_map_the_kernels_page_and_can_be_left_alone() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let mut guest = Guest::start(&place.socket());
    guest.map(512);
    guest.run("fill 0 512 3");
    guest.run("zero 0 300");
    guest.run("advise 0 512 12");
    let status = status_when(&place, "zero pages", |s| count(s, "zero_pages") == 300);
    assert_eq!(count(&status, "saved_bytes"), 300 * 4096);
    guest.run("check");
    guest.run("fill 10 5 8");
    guest.run("check");
    status_when(&place, "written zero pages to be gone", |s| {
        count(s, "zero_pages") == 295
    });
}

#[test]
fn every_page_is_private_again_after_run_2() {
    let _alone = alone();
    let (place, _daemon, mut one, mut two) = pair();
    let set = |value: &str| {
        let mut command = pageone();
        command
            .args(["set", "--socket"])
            .arg(place.socket())
            .arg(value);
        let done = output(&mut command);
        assert!(done.status.success(), "{}", common::text(&done.stderr));
    };
    set("run=2");
    let status = json(&place);
    assert_eq!(
        (merged(&status), count(&status, "saved_bytes")),
        (0, 0),
        "{status}"
    );
    for page in [0, 600, PAGES - 1] {
        assert_ne!(one.frame(page), two.frame(page));
    }
    one.run("check");
    two.run("check");
    set("run=1");
    one.run("mapover 0 512");
    two.run("mapover 0 512");
    for guest in [&mut one, &mut two] {
        guest.run("fill 0 512 77");
        guest.run("advise 0 512 12");
    }
    // What was unmerged is memory like any other.
    status_when(&place, "merging again", |status| paired(status, PAGES));
    one.run("check");
    two.run("check");
}

#[test]
fn guests_outlive_a_killed_daemon_and_meet_the_next() {
    let _alone = alone();
    let (place, mut running, mut one, mut two) = pair();
    one.run("writers 2 1");
    running.signal(9);
    running.end();
    std::thread::sleep(Duration::from_millis(300));
    println!("{}", one.run("stop"));
    one.run("check");
    two.run("check");
    let _next = fast(&place);
    // New memory is merged by the new daemon; the old pages stay right, and shared as they are.
    for guest in [&mut one, &mut two] {
        guest.run("mapover 0 1024");
        guest.run("fill 0 1024 31");
        guest.run("advise 0 1024 12");
    }
    status_when(&place, "the next daemon to merge", |s| {
        count(s, "pages_sharing") >= 1024
    });
    one.run("check");
    two.run("check");
}

#[test]
fn a_daemon_killed_while_it_merges_costs_no_byte() {
    let _alone = alone();
    let place = Place::new();
    for round in 0..6 {
        let mut running = daemon(&place, &["--merge-period", "30ms"]);
        let mut all: Vec<Guest> = (0..3).map(|_| Guest::start(&place.socket())).collect();
        for guest in &mut all {
            guest.offer(PAGES, round);
        }
        // Kill at once after the first merges, in the middle of the others.
        wait_for("the first merges", || {
            (merged(&json(&place)) > 0).then_some(())
        });
        for guest in &mut all {
            guest.run("writers 2 1");
        }
        running.signal(9);
        running.end();
        for guest in &mut all {
            guest.run("stop");
            guest.run("check");
        }
    }
}

#[test]
fn a_guest_that_dies_gives_its_slots_back() {
    let _alone = alone();
    let (place, _daemon, one, mut two) = pair();
    drop(one);
    status_when(&place, "one guest to be left", |status| {
        guests(status).len() == 1 && count(status, "pages_sharing") == 0
    });
    two.run("check");
    drop(two);
    let status = status_when(&place, "no slot to be left", |s| {
        count(s, "pages_shared") == 0
    });
    assert_eq!(guests(&status).len(), 0);
}

#[test]
fn a_fork_child_keeps_its_pages_when_the_parent_is_gone() {
    let _alone = alone();
    let (place, _daemon, mut one, mut two) = pair();
    one.run("fork");
    one.run("childcheck");
    // The parent breaks all it shares, and the other guest goes: only the child maps the slots.
    one.run("fill 0 2048 5000");
    drop(two.ask("quit"));
    status_when(&place, "the other guest to be gone", |status| {
        guests(status).len() == 1
    });
    std::thread::sleep(Duration::from_millis(700));
    one.run("childcheck");
    one.run("childwrite");
    one.run("childexit");
    one.run("check");
    status_when(&place, "the slots to be given back", |s| {
        count(s, "pages_shared") == 0
    });
}

#[test]
fn children_that_are_guests_save_nothing_that_fork_does_not() {
    let _alone = alone();
    let (place, _daemon, mut one, mut two) = pair();
    let saved = count(&json(&place), "saved_bytes");
    for _ in 0..3 {
        one.run("fork");
        one.run("childoffer");
    }
    let status = status_when(&place, "the children's pages to be claimed", |status| {
        merged(status) == 5 * PAGES as u64
    });
    assert_eq!(count(&status, "saved_bytes"), saved, "{status}");
    // The children end with their parent.
    drop(one);
    let status = status_when(&place, "the family to be gone", |status| {
        guests(status).len() == 1
    });
    assert_eq!(count(&status, "saved_bytes"), 0, "{status}");
    two.run("check");
}

#[test]
fn pages_that_fork_shares_stay_so_until_the_child_ends() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let mut all = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    for guest in &mut all {
        guest.map(PAGES);
        guest.run(&format!("fill 0 {PAGES} 1"));
    }
    let [parent, _] = &mut all;
    parent.run("fork");
    let before = proportional_kib(parent.pid);
    for guest in &mut all {
        guest.run(&format!("advise 0 {PAGES} 12"));
    }
    let pid = all[0].pid;
    status_when(
        &place,
        "the pages that are shared to be left alone",
        |status| {
            let parent = guests(status)
                .iter()
                .find(|guest| count(guest, "pid") == u64::from(pid));
            parent.is_some_and(|parent| count(parent, "pages_pinned") == PAGES as u64)
        },
    );
    // Each page that is parted from the child's is two more KiB of the parent's own.
    let after = proportional_kib(pid);
    assert!(after < before + PAGES / 4, "{before} KiB, then {after}");
    all[0].run("childcheck");
    all[0].run("childexit");
    status_when(
        &place,
        "the pages of an ended child to be merged",
        |status| paired(status, PAGES),
    );
    all.iter_mut().for_each(|guest| drop(guest.run("check")));
}

#[test]
fn pinned_pages_are_counted_and_the_data_arrives() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let data = place.path().join("data");
    std::fs::write(&data, vec![0x5a; 16 * 4096]).unwrap();
    let mut all = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    for guest in &mut all {
        guest.map(512);
        guest.run("fill 0 512 1");
        guest.run("pin 32 16");
        guest.run("advise 0 512 12");
    }
    status_when(&place, "all but the pinned", |s| {
        let pinned = guests(s).iter().map(|guest| count(guest, "pages_pinned"));
        paired(s, 496) && pinned.sum::<u64>() == 32
    });
    for guest in &mut all {
        guest.run(&format!("readfixed 32 16 {}", data.display()));
        assert_eq!(guest.run("byte 40 9"), 0x5a.to_string());
        guest.run("check");
    }
}

#[test]
fn huge_locked_and_partly_touched_regions_are_merged() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let mut all = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    for guest in &mut all {
        guest.map(1536);
        guest.run("advise 0 512 14"); // MADV_HUGEPAGE
        guest.run("fill 0 512 1");
        guest.run("fill 600 100 1000"); // the second chunk is touched in part
        guest.run("fill 1024 512 2000");
        guest.run("lock 1024 512");
        guest.run("advise 0 1536 12");
    }
    status_when(&place, "all that is present", |s| {
        paired(s, 512 + 100 + 512)
    });
    for guest in &mut all {
        guest.run("check");
        assert!(guest.frame(1100).is_some(), "locked pages stay present");
    }
}

#[test]
fn domains_of_one_user_share_nothing() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let start = |domain| Guest::start_as(&place.socket(), false, Some(domain));
    let mut all = [start("red"), start("red"), start("blue")];
    all.iter_mut().for_each(|guest| guest.offer(512, 4));
    status_when(&place, "the red ones, and blue alone", |status| {
        paired(status, 512) && count(status, "pages_unshared") == 512
    });
    std::thread::sleep(Duration::from_millis(500));
    let status = json(&place);
    assert_eq!(count(&status, "pages_sharing"), 512, "{status}");
    assert_eq!(all[0].frame(5), all[1].frame(5));
    assert_ne!(all[0].frame(5), all[2].frame(5));
}

#[test]
fn a_stopped_guest_does_not_hold_up_the_others() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let mut all: Vec<Guest> = (0..3).map(|_| Guest::start(&place.socket())).collect();
    all.iter_mut().for_each(|guest| guest.map(PAGES));
    for guest in &mut all {
        guest.run("fill 0 2048 6");
        guest.run("advise 0 2048 12");
    }
    let stopped = rustix::process::Pid::from_raw(i32::try_from(all[0].pid).unwrap()).unwrap();
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).unwrap();
    status_when(&place, "the others to be merged", |s| {
        count(s, "pages_sharing") >= PAGES as u64
    });
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).unwrap();
    status_when(&place, "all three", |s| {
        count(s, "pages_sharing") == 2 * PAGES as u64 && count(s, "pages_shared") == PAGES as u64
    });
    all.iter_mut().for_each(|guest| drop(guest.run("check")));
}

#[test]
fn a_linked_program_is_merged_with_a_preloaded_one() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let mut linked = Guest::start_as(&place.socket(), true, None);
    let mut preloaded = Guest::start(&place.socket());
    linked.map(512);
    linked.run("fill 0 512 66");
    linked.run("register 0 512");
    preloaded.offer(512, 66);
    status_when(&place, "both", |status| paired(status, 512));
    assert_eq!(linked.frame(3), preloaded.frame(3));
    linked.run("unregister 0 512");
    linked.run("check");
    assert_ne!(linked.frame(3), preloaded.frame(3));
    status_when(&place, "the linked one to be out", |s| {
        count(s, "pages_sharing") == 0
    });
}
