//! Spans in a fake world: private pages between merged ones.

use wire::{PageOutcome, RunMode};

use crate::testing::fake::{Lab, Manners, Place};
use crate::testing::trials::{fill, slot};

/// Guests of which every third page is their own.
fn strewn(lab: &Lab, count: usize) -> Vec<usize> {
    let guests: Vec<_> = (0..count).map(|_| lab.guest("d", 1)).collect();
    for &guest in &guests {
        fill(lab, guest, 0..60, |page| match page % 3 {
            1 => 1000 * (guest as u64 + 1) + page,
            _ => page + 1,
        });
    }
    guests
}

/// Whether a private page lies in a mapping of the store.
fn is_enclosed(lab: &Lab, guest: usize, page: u64) -> bool {
    lab.world(|world| {
        let place = world.processes[guest].pages.get(&page);
        matches!(place, Some(Place::Frame { stored: true, .. }))
    })
}

fn private() -> impl Iterator<Item = u64> {
    (0..60).filter(|page| page % 3 == 1)
}

#[test]
fn slots_leave_room_for_the_private_pages_between() {
    let lab = Lab::new();
    let guests = strewn(&lab, 3);
    lab.rounds(4);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (40, 80));
    let first = slot(&lab, guests[0], 0).unwrap();
    for &guest in &guests {
        for page in (0..60).filter(|page| page % 3 != 1) {
            assert_eq!(slot(&lab, guest, page), Some(first + page), "page {page}");
        }
        // The last ends its mapping: nothing lies behind it.
        assert!(private().all(|page| is_enclosed(&lab, guest, page)));
    }
    lab.rounds(4);
    let status = lab.status();
    assert_eq!((status.pages_unshared, status.pages_volatile), (60, 0));
    assert_eq!(status.pages_skipped, 0, "none of them counts as broken");
    assert_eq!(lab.world(|world| world.frames("d")), 40, "nothing between");
}

#[test]
fn an_enclosed_page_is_merged_when_it_finds_its_equal() {
    let lab = Lab::new();
    let guests = strewn(&lab, 2);
    lab.rounds(4);
    assert!(is_enclosed(&lab, guests[0], 4));
    let late = lab.guest("d", 1);
    fill(&lab, late, 0..8, |page| 1000 + page);
    lab.rounds(6);
    assert!(slot(&lab, guests[0], 4).is_some());
    assert_eq!(slot(&lab, guests[0], 4), slot(&lab, late, 4));
    assert_eq!(
        slot(&lab, guests[0], 3).map(|slot| slot - 3),
        slot(&lab, guests[1], 0)
    );
    for &guest in &guests {
        lab.world(|world| world.discard(guest, 7));
        fill(&lab, guest, 10..11, |page| page + 1);
    }
    lab.rounds(6);
    assert_eq!(slot(&lab, guests[0], 10), slot(&lab, guests[1], 10));
}

#[test]
fn what_may_be_pinned_is_not_enclosed() {
    let lab = Lab::new();
    let guests = strewn(&lab, 2);
    // Anything pinned anywhere: this guest's pages could not be merged again.
    fill(&lab, guests[1], 300..301, |_| 7_000_000);
    lab.world(|world| world.pin(guests[1], 300));
    lab.rounds(5);
    assert_eq!(lab.status().pages_shared, 40);
    assert!(private().all(|page| !is_enclosed(&lab, guests[1], page)));
    let lab = Lab::with(crate::options::Options {
        knobs: wire::KnobValues {
            threads: 1,
            merge_again: false,
            ..wire::KnobValues::default()
        },
        patience: std::time::Duration::ZERO,
        ..crate::options::Options::default()
    });
    let guests = strewn(&lab, 2);
    lab.rounds(5);
    assert_eq!(lab.status().pages_shared, 40);
    assert!(private().all(|page| !is_enclosed(&lab, guests[0], page)));
}

#[test]
fn nothing_is_enclosed_where_copies_could_change_nodes() {
    let lab = Lab::on_nodes(2, true, 256);
    let guests = strewn(&lab, 2);
    lab.rounds(5);
    assert_eq!(lab.status().pages_shared, 40);
    assert!(private().all(|page| !is_enclosed(&lab, guests[0], page)));
}

#[test]
fn spans_survive_the_engine() {
    let mut lab = Lab::new();
    let guests = strewn(&lab, 2);
    lab.rounds(6);
    lab.succeed(true);
    guests.iter().for_each(|&guest| lab.connect(guest));
    lab.rounds(8);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (40, 40));
    assert_eq!(status.pages_unshared, 40, "they settled again");
    guests
        .iter()
        .for_each(|&guest| lab.world(|world| world.kill(guest)));
    lab.rounds(2);
    assert_eq!(lab.world(|world| world.frames("d")), 0);
}

#[test]
fn a_late_answer_tells_what_was_enclosed() {
    let lab = Lab::new();
    let guests = strewn(&lab, 2);
    lab.rounds(2);
    lab.world(|world| world.processes[guests[1]].manners = Manners::Stalls);
    lab.rounds(3);
    lab.world(|world| world.processes[guests[1]].manners = Manners::Honest);
    lab.rounds(6);
    assert_eq!(lab.status().pages_shared, 40);
    assert!(private().all(|page| is_enclosed(&lab, guests[1], page)));
    assert_eq!(lab.status().guests.len(), 2);
}

#[test]
fn who_encloses_unasked_is_dropped() {
    for manners in [Manners::Oversteps, Manners::Refuses(PageOutcome::Enclosed)] {
        let lab = Lab::new();
        let guests = strewn(&lab, 2);
        lab.world(|world| world.processes[guests[1]].manners = manners);
        lab.rounds(5);
        assert_eq!(lab.status().guests.len(), 1, "{manners:?}");
    }
}

#[test]
fn unmerging_leaves_private_pages_alone() {
    let lab = Lab::new();
    strewn(&lab, 2);
    lab.rounds(4);
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Unmerge)]);
    lab.rounds(2);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (0, 0));
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    lab.rounds(6);
    assert_eq!(lab.status().pages_shared, 40);
}
