//! Guests that rewrite their memory over and over, like a page cache in churn: the saving comes back
//! every time, and the mappings stay bounded.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::os::unix::fs::OpenOptionsExt;

use common::{Place, alone, count, daemon, json, wait_for, wait_for_sharing};
use serde_json::Value;
use support::Guest;

/// Pages of a guest: 8 MiB.
const PAGES: usize = 2048;
/// Generations, unless `CHURN_GENERATIONS` says another number. Each takes one to two seconds: broken
/// pages grow older twice a second at most.
const GENERATIONS: usize = 5;

fn generations() -> usize {
    let wanted = std::env::var("CHURN_GENERATIONS").ok();
    wanted.map_or(GENERATIONS, |number| number.parse().unwrap())
}

/// Rewrites the same in each guest: all of its memory, a part, or single pages here and there. Gives
/// how many pages.
fn rewrite(guests: &mut [Guest], generation: usize) -> usize {
    let ranges: Vec<_> = match generation % 3 {
        0 => vec![(0, PAGES)],
        1 => vec![(300, 900)],
        _ => (generation % 64..PAGES)
            .step_by(64)
            .map(|page| (page, 1))
            .collect(),
    };
    for guest in guests {
        for (first, pages) in &ranges {
            guest.run(&format!("fill {first} {pages} {generation}{first:05}"));
        }
    }
    ranges.iter().map(|range| range.1).sum()
}

#[test]
fn guests_in_churn_keep_their_saving_and_bounded_mappings() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms"]);
    let mut guests = [(); 2].map(|()| Guest::start(&place.socket()));
    for guest in &mut guests {
        guest.offer(PAGES, 1);
    }
    let status = wait_for_sharing(&place, PAGES, 0);
    let vmas = |status: &Value| count(&status["guests"][0], "vmas");
    let (before, mut most) = (vmas(&status), 0);
    let (all, mut rewritten) = (generations(), 0);
    for generation in 1..=all {
        rewritten += 2 * rewrite(&mut guests, generation) as u64;
        let status = wait_for_sharing(&place, PAGES, rewritten);
        most = most.max(vmas(&status));
        for guest in &mut guests {
            guest.run("check");
        }
    }
    // Each single page splits a mapping in three; whole rewrites join them again.
    let bound = before + 2 * (PAGES as u64 / 64) * 3 + 16;
    println!("{all} generations, {rewritten} pages, {before} mappings at first, {most} at most");
    assert!(most <= bound, "{most} mappings, bound {bound}");
}

#[test]
fn a_guest_that_may_pin_memory_is_not_merged_again() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms"]);
    let mut one = Guest::start(&place.socket());
    let mut two = Guest::start(&place.socket());
    one.offer(512, 1);
    two.offer(512, 1);
    wait_for_sharing(&place, 512, 0);
    let file = support::built().join(format!("churn-{}", std::process::id()));
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let mut options = std::fs::OpenOptions::new();
    let options = options.create(true).truncate(true).write(true);
    if options.custom_flags(direct).open(&file).is_err() {
        println!(
            "skipped: the file system of {} knows no O_DIRECT",
            file.display()
        );
        return;
    }
    one.run(&format!("direct 64 64 {}", file.display()));
    let reason = wait_for("the daemon to notice the direct I/O", || {
        let status = json(&place);
        let guests = status["guests"].as_array().unwrap();
        let held = guests.iter().find_map(|guest| guest["pins"].as_str());
        held.map(str::to_owned)
    });
    assert!(reason.contains("O_DIRECT"), "{reason}");
    one.run("fill 200 100 7000");
    two.run("fill 200 100 7000");
    let status = wait_for("the written pages to be left alone", || {
        let status = json(&place);
        (count(&status, "pages_broken") >= 100).then_some(status)
    });
    assert!(count(&status, "pages_sharing") < 512, "{status}");
    one.run("stop");
    wait_for("all to be shared again, without direct I/O", || {
        let status = json(&place);
        (count(&status, "pages_broken") == 0).then_some(())
    });
    one.run("check");
    two.run("check");
    std::fs::remove_file(file).unwrap();
}
