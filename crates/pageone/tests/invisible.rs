//! Programs that do what programs seldom do, with merged memory: forks under locks, ends that libc does not see,
//! sandboxes, offers twice over, discards page by page. `model` compares single calls.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{NO_FOLDER, Place, Running, alone, count, json, output, pageone, status, wait_for};
use support::{Guest, agent, root};

/// A daemon in a session of its own: its threads are of idle priority, and the kernel shares the processors
/// out by sessions.
fn daemon(place: &Place) -> Running {
    let mut command = Command::new("setsid");
    command
        .arg(pageone().get_program())
        .args(["daemon", "--no-keep"]);
    command.args(["--merge-period", "30ms", "--broken-rest", "30ms"]);
    command.arg("--socket").arg(place.socket());
    let running = Running::start(
        command
            .stdin(Stdio::null())
            .env_remove("LD_PRELOAD")
            .env("CONFIGURATION_DIRECTORY", NO_FOLDER),
    );
    wait_for("the daemon", || {
        status(place).status.success().then_some(())
    });
    running
}

/// Compiles `tests/guest/odd.c`, as a program or as the library that is loaded early.
fn odd(place: &Place, early: bool) -> PathBuf {
    let file = place.path().join(if early { "early.so" } else { "odd" });
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-g", "-Wall", "-Wextra", "-pthread", "-o"]);
    cc.arg(&file).arg(root().join("tests/guest/odd.c"));
    if early {
        cc.args(["-DEARLY", "-shared", "-fPIC"]);
    }
    assert!(cc.status().expect("a C compiler is installed").success());
    file
}

fn in_mode(place: &Place, mode: &str) -> Command {
    let early = odd(place, true);
    let mut command = Command::new(odd(place, false));
    // The loader runs the constructors of the last library first.
    let preload = format!("{} {}", agent().display(), early.display());
    command.arg(mode).env("LD_PRELOAD", preload);
    command.env("PAGEONE_SOCKET", place.socket());
    command
}

/// Runs the odd program to its end, which must be a good one.
#[track_caller]
fn ends_well(mode: &str) {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place);
    let mut program = Running::start(&mut in_mode(&place, mode));
    assert_eq!(program.end(), 0, "{mode}");
}

#[test]
fn fork_does_not_hang_on_the_handlers_of_a_library() {
    ends_well("fork-handlers");
}

#[test]
fn the_last_thread_ends_the_process() {
    ends_well("raw-exit");
}

#[test]
fn the_agents_own_memory_cannot_be_offered() {
    ends_well("offer-all");
}

#[test]
fn a_sandbox_that_allows_threads_allows_merging() {
    ends_well("sandbox");
}

#[test]
fn memory_outlives_the_process_that_has_the_agent() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place);
    for round in 0..8 {
        let output = output(&mut in_mode(&place, "sibling"));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(said, "survived\n", "round {round}: {complaint}");
    }
}

fn sharing(place: &Place) -> u64 {
    count(&json(place), "pages_sharing")
}

#[test]
fn memory_offered_again_and_again_is_merged_all_the_same() {
    const PAGES: usize = 8192;
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place);
    let mut guests = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    guests.iter_mut().for_each(|guest| guest.offer(PAGES, 7));
    let enough = PAGES as u64 * 95 / 100;
    let began = Instant::now();
    // All of it, and its halves, while it is being merged.
    while sharing(&place) < enough && began.elapsed() < Duration::from_secs(10) {
        for guest in &mut guests {
            guest.run(&format!("advise 0 {PAGES} 12"));
            guest.run(&format!("advise {} {} 12", PAGES / 2, PAGES / 2));
        }
    }
    wait_for("all pages to be merged", || {
        (sharing(&place) >= enough).then_some(())
    });
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
}

/// Two guests that share their `pages` pages.
fn merged_pair(place: &Place, pages: usize) -> [Guest; 2] {
    let mut guests = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    guests.iter_mut().for_each(|guest| guest.offer(pages, 7));
    wait_for("all pages to be merged", || {
        (sharing(place) >= nearly_all(pages)).then_some(())
    });
    guests
}

/// So many of `pages` pages count as all.
fn nearly_all(pages: usize) -> u64 {
    pages as u64 * 95 / 100
}

fn mappings(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().count()
}

#[test]
fn discards_page_by_page_leave_the_guest_its_mappings() {
    const PAGES: usize = 80_000;
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place);
    let mut guests = merged_pair(&place, PAGES);
    let [guest, _] = &mut guests;
    let most: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    for page in (0..PAGES).step_by(2) {
        guest.run(&format!("advise {page} 1 4"));
    }
    let left = most.saturating_sub(mappings(guest.pid));
    assert!(left > 4096, "{left} mappings are left of {most}");
    guest.run("check");
    // Threads and large blocks of the guest's own.
    guest.run("writers 4 0");
    guest.run("stop");
    guest.run("check");
}

#[test]
fn what_fork_shares_already_is_not_counted_as_saved() {
    const PAGES: usize = 4096;
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place);
    let mut guests = merged_pair(&place, PAGES);
    let [one, _] = &mut guests;
    one.run("fork 0");
    one.run("childoffer");
    wait_for("the child to be a guest, and adopted", || {
        let status = json(&place);
        let guests = status["guests"].as_array().unwrap();
        let stored = |guest: &serde_json::Value| count(guest, "pages_stored") >= nearly_all(PAGES);
        (guests.len() == 3 && guests.iter().all(stored)).then_some(())
    });
    // Without merging two copies would be there: the guests', one of which a child shares by fork.
    let saved = json(&place)["saved_bytes"].as_i64().unwrap();
    let all = i64::try_from(PAGES * 4096).unwrap();
    assert!(
        saved <= all * 11 / 10,
        "{saved} bytes saved of two times {all}"
    );
    one.run("childexit");
}
