//! Contents with more pages than one copy takes, in real guests; and how long writes wait.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use common::{PATIENCE, Place, Running, alone, count, daemon, json, output, pageone};
use serde_json::Value;
use support::Guest;

fn start(place: &Place, config: &str, period: &str) -> Running {
    let config = place.file("pageone.toml", config);
    let flags = [
        "--config",
        config.to_str().unwrap(),
        "--merge-period",
        period,
    ];
    daemon(place, &flags)
}

fn merged(status: &Value) -> u64 {
    count(status, "pages_shared") + count(status, "pages_sharing")
}

fn status_when(place: &Place, what: &str, done: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = json(place);
        if done(&status) {
            return status;
        }
        assert!(Instant::now() < deadline, "waited for {what}: {status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Guests whose pages are all equal.
fn equal(place: &Place, guests: usize, pages: usize) -> Vec<Guest> {
    let mut all: Vec<Guest> = (0..guests).map(|_| Guest::start(&place.socket())).collect();
    for guest in &mut all {
        guest.map(pages);
        guest.run(&format!("same 0 {pages} 77"));
    }
    for guest in &mut all {
        guest.run(&format!("advise 0 {pages} 12"));
    }
    all
}

/// Merges equal pages of two guests; asserts that no copy has too many sharers, nor are there many
/// more copies than that takes (rows, and workers at once, leave some half empty); breaks them all.
fn merge_and_break(pages: usize, limit: u64) {
    let place = Place::new();
    let _daemon = start(&place, &format!("max_page_sharing = {limit}"), "100ms");
    let mut guests = equal(&place, 2, pages);
    let all = 2 * pages as u64;
    let status = status_when(&place, "nearly all to be merged", |s| merged(s) + 64 >= all);
    let copies = count(&status, "pages_shared");
    assert!(copies >= merged(&status) / limit, "{status}");
    let fewest = all / limit;
    assert!(copies <= fewest + fewest / 16 + 64, "{status}");
    assert!(count(&status, "stable_node_chains") > 0, "{status}");
    assert!(
        count(&status, "stable_node_dups") <= copies + 64,
        "{status}"
    );
    assert_eq!(count(&status, "max_page_sharing"), limit);
    let vmas = status["guests"].as_array().unwrap().iter();
    let most = vmas.map(|guest| count(guest, "vmas")).max();
    assert!(most < Some(pages as u64 / 8 + 1500), "{most:?} mappings");
    let mut stop = pageone();
    stop.args(["set", "run=0", "--socket"]).arg(place.socket());
    assert!(output(&mut stop).status.success());
    for guest in &mut guests {
        guest.run("check");
        guest.run("probe 0 0");
        guest.run("check");
    }
    status_when(&place, "no copy to be left", |s| {
        count(s, "pages_shared") + count(s, "stable_node_chains") == 0
    });
}

#[test]
fn a_hundred_thousand_equal_pages_share_some_hundred_copies() {
    let _alone = alone();
    merge_and_break(60_000, 256);
}

#[test]
fn two_pages_to_a_copy() {
    let _alone = alone();
    merge_and_break(8192, 2);
}

/// `make bench-waits`: a million equal pages in four guests.
#[test]
#[ignore = "takes 8 GiB and a minute; prints figures"]
fn how_long_writes_wait() {
    let pages = std::env::var("WAITS_PAGES").map_or(250_000, |text| text.parse().unwrap());
    let _alone = alone();
    let place = Place::new();
    let _daemon = start(&place, "", "1s");
    let mut guests = equal(&place, 4, pages);
    let begin = Instant::now();
    guests
        .iter_mut()
        .for_each(|guest| guest.tell("probe 20000 2000"));
    let wanted = 4 * pages as u64 * 9 / 10;
    let status = status_when(&place, "most to be merged", |s| merged(s) >= wanted);
    println!(
        "nine of ten merged after {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    print(&status);
    show(
        "while they are merged",
        guests.iter_mut().map(|guest| guest.answer()),
    );
    let status = status_when(&place, "the written ones", |s| merged(s) >= wanted);
    print(&status);
    guests.iter_mut().for_each(|guest| guest.tell("probe 0 0"));
    show(
        "while all are broken",
        guests.iter_mut().map(|guest| guest.answer()),
    );
    print(&json(&place));
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
}

fn print(status: &Value) {
    let names = [
        "pages_shared",
        "pages_sharing",
        "stable_node_chains",
        "stable_node_dups",
        "pages_broken",
        "window_max_us",
    ];
    let figures = names.map(|name| format!("{name} {}", count(status, name)));
    println!("{}", figures.join(", "));
}

fn show(when: &str, answers: impl Iterator<Item = Result<String, String>>) {
    for answer in answers {
        let figures: Vec<u64> = answer
            .unwrap()
            .split(' ')
            .map(|n| n.parse().unwrap())
            .collect();
        let us = |at: usize| figures[at] as f64 / 1000.0;
        println!(
            "{when}: {} writes, p50 {:.1} µs, p99 {:.1} µs, p99.9 {:.1} µs, max {:.1} µs",
            figures[0],
            us(1),
            us(2),
            us(3),
            us(4)
        );
    }
}
