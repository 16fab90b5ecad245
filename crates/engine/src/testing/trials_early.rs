//! Early looks at guests that have just come, in the fake world.

use std::time::Duration;

use wire::Setting;

use crate::testing::fake::Lab;
use crate::testing::trials::{fill, slot, twins};

#[test]
fn what_is_equal_is_merged_before_the_first_period_ends() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.early(2);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_volatile), (0, 32));
    let foretold = status.first_merges_ms.expect("some are to be merged");
    assert!(
        foretold <= status.effective_period_ms / 8,
        "{foretold} ms of {}",
        status.effective_period_ms
    );
    lab.early(1);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (16, 16));
    assert_eq!(status.full_scans, 0, "no round was needed");
    assert_eq!(slot(&lab, a, 100), slot(&lab, b, 100));
}

#[test]
fn a_guest_is_new_until_its_first_look() {
    let lab = Lab::new();
    twins(&lab);
    let guests = |code| {
        let guests = lab.status().guests.into_iter();
        let is_so = |guest: &wire::GuestStatus| guest.reasons.iter().any(|why| why.code == code);
        guests.filter(is_so).count()
    };
    let new = || guests(wire::WhyNotCode::New);
    assert_eq!((new(), guests(wire::WhyNotCode::NoOffer)), (2, 0));
    let observed = || guests(wire::WhyNotCode::Observing);
    assert_eq!(observed(), 0);
    lab.early(1);
    assert_eq!((new(), guests(wire::WhyNotCode::NoAnswer)), (0, 0));
    assert_eq!((observed(), guests(wire::WhyNotCode::Busy)), (2, 0));
    lab.early(2);
    assert_eq!(observed(), 0, "what is equal is merged");
}

#[test]
fn a_clone_is_merged_with_what_the_index_has() {
    let lab = Lab::new();
    let a = lab.guest("d", 1);
    fill(&lab, a, 100..400, |page| page);
    lab.rounds(4);
    assert_eq!(lab.status().pages_unshared, 300);
    let b = lab.guest("d", 1);
    fill(&lab, b, 100..400, |page| page);
    lab.early(3);
    assert_eq!(lab.status().pages_sharing, 300);
}

#[test]
fn what_is_written_between_early_looks_does_not_settle() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    for round in 0..6 {
        // The same in both, but not at rest.
        for guest in [a, b] {
            fill(&lab, guest, 100..108, |page| round * 1000 + page);
        }
        lab.early(1);
    }
    assert_eq!(lab.status().pages_sharing, 8);
}

/// MOVE would take a page that a call refers to without a pin, and what the call writes would be lost.
#[test]
fn who_may_write_unseen_gets_no_early_look_again() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    let borrows = |what: Option<&str>| {
        lab.world(|world| world.processes[a].borrows = what.map(str::to_owned));
    };
    lab.early(1);
    borrows(Some("a file"));
    lab.early(1);
    let scans = || lab.world(|world| (world.processes[a].scans, world.processes[b].scans));
    let before = scans();
    // Its file is closed, what it asked for may go on.
    borrows(None);
    lab.early(5);
    let after = scans();
    assert!(before.0 == after.0 && before.1 < after.1, "{after:?}");
    assert_eq!(lab.status().pages_sharing, 0);
    lab.rounds(2);
    assert_eq!(lab.status().pages_sharing, 16);
}

#[test]
fn a_merged_page_that_was_written_does_not_settle_in_early_looks() {
    let lab = Lab::new();
    let [a, _] = twins(&lab);
    lab.early(3);
    lab.rounds(2);
    assert_eq!(lab.status().pages_sharing, 16);
    fill(&lab, a, 100..116, |page| page);
    lab.early(10);
    assert_eq!(lab.status().pages_sharing, 0);
    lab.rounds(8);
    assert_eq!(lab.status().pages_sharing, 16);
}

#[test]
fn who_came_a_period_ago_gets_no_early_look() {
    let lab = Lab::new();
    let period = 2000;
    lab.core.knobs.turn([Setting::MergePeriodMs(period)]);
    let a = lab.guest("d", 1);
    std::thread::sleep(Duration::from_millis(period));
    let b = lab.guest("d", 1);
    lab.early(1);
    let scans = |guest: usize| lab.world(|world| world.processes[guest].scans);
    assert_eq!((scans(a), scans(b)), (0, 1));
}

/// A chunk that is worn is left out of rounds, so early looks must not wear one out.
#[test]
fn what_was_written_in_the_first_period_settles_as_soon_as_ever() {
    let lab = Lab::new();
    let guests = twins(&lab);
    for round in 0..8 {
        for guest in guests {
            fill(&lab, guest, 200..400, |page| round * 1000 + page);
        }
        lab.early(1);
    }
    assert_eq!(lab.status().pages_sharing, 16);
    lab.rounds(3);
    assert_eq!(lab.status().pages_sharing, 216);
}

#[test]
fn where_periods_are_short_and_where_merging_is_stopped_there_are_none() {
    let lab = Lab::new();
    twins(&lab);
    let now = lab.core.note_look();
    let far = now + Duration::from_secs(20);
    let is_due = |settings: &[Setting]| {
        lab.core.knobs.turn(settings.iter().copied());
        lab.core.next_early(now, far).is_some()
    };
    assert!(is_due(&[]));
    assert!(!is_due(&[Setting::Run(wire::RunMode::Stop)]));
    assert!(!is_due(&[
        Setting::Run(wire::RunMode::Run),
        Setting::MergePeriodMs(1000)
    ]));
    assert!(is_due(&[Setting::MergePeriodMs(8000)]));
    let empty = Lab::new();
    empty.core.note_look();
    assert!(empty.core.next_early(now, far).is_none(), "no guests");
}
