//! Huge pages: split only where the saving is worth it.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use common::{Place, daemon, json, output, pageone, wait_for};
use support::Guest;

/// KiB of huge pages at the guest's memory of `pages` pages.
fn huge_kib(guest: &Guest, pages: usize) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in text.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let start = usize::from_str_radix(start, 16).unwrap();
            let end = usize::from_str_radix(end, 16).unwrap();
            inside = start < guest.memory + pages * 4096 && end > guest.memory;
        } else if inside && first == "AnonHugePages:" {
            sum += line
                .split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<u64>()
                .unwrap();
        }
    }
    sum
}

#[test]
fn huge_pages_with_little_to_save_stay_whole() {
    let place = Place::new();
    let config = place.file("config.toml", "merge_period = '100ms'\nthp = 'auto'\n");
    let _daemon = daemon(&place, &["--config", config.to_str().unwrap()]);
    let mut guests = [(); 2].map(|()| Guest::start(&place.socket()));
    for (number, guest) in (1..).zip(&mut guests) {
        guest.map(1024);
        guest.run("advise 0 1024 14"); // MADV_HUGEPAGE
        guest.run(&format!("fill 0 512 {number}00000"));
        guest.run("fill 512 512 7000"); // the same in both
        guest.run("fill 100 16 9000"); // the same, too
    }
    if guests.iter().any(|guest| huge_kib(guest, 1024) < 4096) {
        println!("skipped: the kernel gives no huge pages here");
        return;
    }
    for guest in &mut guests {
        guest.run("advise 0 1024 12");
    }
    let counts = |status: &serde_json::Value| {
        ["pages_sharing", "huge_pages_kept"].map(|name| status[name].as_u64().unwrap())
    };
    wait_for("half of it to be merged, and the rest kept", || {
        (counts(&json(&place)) == [512, 2]).then_some(())
    });
    assert!(guests.iter().all(|guest| huge_kib(guest, 512) == 2048));
    let mut set = pageone();
    set.args(["set", "thp=split", "--socket"])
        .arg(place.socket());
    assert!(output(&mut set).status.success());
    wait_for("the rest to be split", || {
        (counts(&json(&place)) == [528, 0]).then_some(())
    });
    assert!(guests.iter().all(|guest| huge_kib(guest, 512) == 0));
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
}
