//! Merged pages with private ones strewn between them: they share, in few mappings.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use common::{Place, alone, classed_and_present, count, daemon, json, wait_for};
use serde_json::Value;
use support::Guest;

/// Pages of a guest: 8 MiB.
const PAGES: usize = 2048;

/// Whether a page is the guest's own. The runs between are of a page or two.
fn is_own(page: usize) -> bool {
    matches!(page % 8, 1 | 4 | 6)
}

fn own() -> impl Iterator<Item = usize> {
    (0..PAGES).filter(|&page| is_own(page))
}

fn guest(place: &Place, number: usize) -> Guest {
    let mut guest = Guest::start(&place.socket());
    guest.map(PAGES);
    guest.run(&format!("fill 0 {PAGES} 1"));
    for page in own() {
        guest.run(&format!("fill {page} 1 {}", 100_000 * (number + 1) + page));
    }
    guest.run(&format!("advise 0 {PAGES} 12"));
    guest
}

fn wait_for_shared(place: &Place, pages: usize) -> Value {
    let wanted = [pages as u64, pages as u64];
    wait_for("all equal pages to be shared", || {
        let status = json(place);
        let shared = ["pages_shared", "pages_sharing"].map(|name| count(&status, name));
        (shared == wanted).then_some(status)
    })
}

fn mappings(status: &Value) -> u64 {
    let guests = status["guests"].as_array().unwrap().iter();
    guests.map(|guest| count(guest, "vmas")).max().unwrap()
}

#[test]
fn runs_of_a_page_or_two_share_in_few_mappings() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms"]);
    let mut guests = [0, 1].map(|number| guest(&place, number));
    let private = own().count();
    let equal = PAGES - private;
    wait_for_shared(&place, equal);
    let status = wait_for(
        "the mappings to be counted, and private pages to settle",
        || {
            let status = json(&place);
            (count(&status, "pages_unshared") == 2 * private as u64).then_some(status)
        },
    );
    let most = mappings(&status);
    println!("{equal} of {PAGES} pages shared, {most} mappings");
    // One run of a page or two is 3 of 8 pages: as runs they would take 1500 mappings.
    assert!(most < 150, "{most} mappings: {status}");
    assert_eq!(count(&status, "pages_skipped"), 0, "{status}");
    let (classed, present) = classed_and_present(&status);
    assert_eq!(classed, present);
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    // Merged pages break, private ones become equal, all are merged where they lie.
    for guest in &mut guests {
        guest.run("fill 100 400 50000");
    }
    let more = (100..500).filter(|&page| is_own(page)).count();
    let status = wait_for_shared(&place, equal + more);
    assert!(
        count(&status, "pages_merged_again") >= 2 * more as u64,
        "{status}"
    );
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    // One goes on alone.
    let [mut one, two] = guests;
    drop(two);
    wait_for("the other to be gone", || {
        (count(&json(&place), "pages_sharing") == 0).then_some(())
    });
    one.run(&format!("fill 0 {PAGES} 99"));
    one.run("check");
}
