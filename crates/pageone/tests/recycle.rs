//! Page recycling: frames of memory that guests gave up come back to the host, and status says by which way.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use common::{Place, Running, alone, busy, count, daemon, json, wait_for, wait_for_sharing};
use serde_json::Value;
use support::Guest;

/// Pages of a guest: 16 MiB.
const PAGES: usize = 4096;
const DONTNEED: i32 = 4;

/// Pages recycled so far, in all or of one guest: discarded, zeroed, told of.
fn recycled(counts: &Value) -> [u64; 3] {
    let recycled = &counts["pages_recycled"];
    ["discarded", "zeroed", "told"].map(|way| count(recycled, way))
}

#[test]
fn what_guests_give_up_comes_back_and_is_counted_by_its_way() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mut guests = [(); 2].map(|()| Guest::start(&place.socket()));
    for guest in &mut guests {
        guest.offer(PAGES, 5);
    }
    let before = wait_for_sharing(&place, PAGES, 0);
    assert_eq!(recycled(&before), [0; 3]);

    for guest in &mut guests {
        // As allocators do. Private pages the kernel would free later, and what lies ahead of discards is made private.
        guest.run("freemerged 1536 512");
        guest.run(&format!("advise 1024 512 {DONTNEED}"));
        for page in 0..512 {
            guest.run(&format!("advise {} 1 {DONTNEED}", page * 2)); // as a balloon does
        }
        guest.run("recycle 2048 1024");
        guest.run("zero 3072 512");
    }
    let by_way = [512 + 1024, 512, 1024];
    let left = (PAGES as u64 - by_way.iter().sum::<u64>()) * 4096;
    let after = wait_for("all that was given up to come back", || {
        let status = json(&place);
        let is_back = count(&status, "store_bytes") == left;
        (is_back && recycled(&status) == by_way.map(|pages| 2 * pages)).then_some(status)
    });
    for guest in after["guests"].as_array().unwrap() {
        assert_eq!(recycled(guest), by_way);
    }
    for guest in &mut guests {
        guest.run("check");
        guest.run(&format!("fill 0 {PAGES} 6"));
    }
    wait_for_sharing(&place, PAGES, 0);
    for guest in &mut guests {
        guest.run("check");
    }
}

/// Frames that the stores of a daemon take, by the kernel's word.
fn store_frames(daemon: &Running) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let folder = format!("/proc/{}/fd", daemon.0.id());
    let files = std::fs::read_dir(folder).unwrap().flatten();
    let is_store = |file: &std::fs::DirEntry| {
        let target = std::fs::read_link(file.path()).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:pageone-store")
    };
    let blocks = files.filter(is_store).map(|file| {
        let its = std::fs::metadata(file.path());
        its.map_or(0, |its| its.blocks())
    });
    blocks.sum::<u64>() / 8
}

/// A second, and longer on a busy machine.
fn assert_soon(begin: Instant, what: &str) {
    let (took, busy) = (begin.elapsed(), busy());
    println!(
        "{what}: all frames were back after {took:?}, on a machine {busy} times as busy as it can be"
    );
    assert!(took < SECOND * busy, "{what}: {took:?}");
}

const SECOND: Duration = Duration::from_secs(1);

/// No round comes in this time: what comes back does so because of the discards.
#[test]
fn frames_of_discarded_pages_come_back_within_a_second_whatever_the_period() {
    let _alone = alone();
    let place = Place::new();
    let daemon = daemon(&place, &["--merge-period", "1h"]);
    let mut guests = [(); 2].map(|()| Guest::start(&place.socket()));
    for guest in &mut guests {
        guest.offer(PAGES, 5);
    }
    let merge = |guests: &[Guest; 2], sharing: u64| {
        wait_for("all to be merged", || {
            let mut command = common::pageone();
            command.arg("merge").arg("--socket").arg(place.socket());
            command.args(guests.each_ref().map(|guest| guest.pid.to_string()));
            // They may not be served yet.
            let merged = common::output(&mut command).status.success();
            (merged && count(&json(&place), "pages_sharing") == sharing).then_some(())
        });
    };
    merge(&guests, PAGES as u64);
    let scans = count(&json(&place), "full_scans");
    assert_eq!(store_frames(&daemon), PAGES as u64);

    let [first, second] = &mut guests;
    first.run(&format!("advise 0 {PAGES} {DONTNEED}"));
    std::thread::sleep(SECOND); // in which they would come back
    assert_eq!(
        store_frames(&daemon),
        PAGES as u64,
        "the other guest has them"
    );
    second.run("check");
    // A half at once, the other page by page as a balloon does.
    second.run(&format!("advise 0 {} {DONTNEED}", PAGES / 2));
    for page in PAGES / 2..PAGES {
        second.run(&format!("advise {page} 1 {DONTNEED}"));
    }
    let begin = Instant::now();
    wait_for("the frames", || (store_frames(&daemon) == 0).then_some(()));
    assert_soon(begin, "whole and page by page");
    let status = json(&place);
    assert_eq!(count(&status, "full_scans"), scans, "without a round");
    assert_eq!(count(&status, "pages_shared"), 0);
    for guest in &mut guests {
        guest.run("check");
        // Every fourth page is the guest's own: merged with its neighbours by one mapping.
        guest.run(&format!("fill 0 {PAGES} 6"));
        let own = guest.pid % 100_000 * 10_000;
        for page in (0..PAGES).step_by(4) {
            guest.run(&format!("fill {page} 1 {}", own as usize + page));
        }
    }
    merge(&guests, PAGES as u64 / 4 * 3);
    for guest in &mut guests {
        // Broken: written since, in the store's mapping.
        for page in (1..PAGES).step_by(8) {
            guest.run(&format!("fill {page} 1 9"));
        }
        guest.run(&format!("advise 0 {PAGES} {DONTNEED}"));
    }
    let begin = Instant::now();
    wait_for("the frames", || (store_frames(&daemon) == 0).then_some(()));
    assert_soon(begin, "strewn and broken pages");
    for guest in &mut guests {
        guest.run("check");
    }
}

#[test]
fn a_guest_that_reads_none_of_its_merged_pages_and_discards_none_gets_a_hint() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mut guests = [(); 2].map(|()| Guest::start(&place.socket()));
    for guest in &mut guests {
        guest.offer(2 * PAGES, 5);
    }
    wait_for_sharing(&place, 2 * PAGES, 0);
    let of = |pid: u32| {
        let status = json(&place);
        let all = status["guests"].as_array().unwrap();
        let its = |guest: &&Value| count(guest, "pid") == u64::from(pid);
        all.iter().find(its).unwrap().clone()
    };
    let [reads, gives] = &mut guests;
    for guest in [&*reads, &*gives] {
        let hint = wait_for("a hint", || {
            of(guest.pid)["hint"].as_str().map(str::to_owned)
        });
        assert!(hint.contains(" merged pages were not read"), "{hint}");
    }
    reads.run("check");
    wait_for("all to be read", || {
        let its = of(reads.pid);
        (count(&its, "pages_unread") == 0 && its["hint"].is_null()).then_some(())
    });
    assert!(
        !of(gives.pid)["hint"].is_null(),
        "what others read is not read by it"
    );
    gives.run(&format!("advise 0 1 {DONTNEED}"));
    wait_for("its discard to be seen", || {
        of(gives.pid)["hint"].is_null().then_some(())
    });
    assert!(
        count(&of(gives.pid), "pages_unread") >= PAGES as u64,
        "it reads no more than before"
    );
}
