//! Pages that are planned unread, in a fake world: groups between probes, and chunks that follow a pattern.

use crate::page::{Entry, Slot, StoreId};
use crate::testing::fake::{Lab, bytes};
use crate::testing::trials::{fill, slot};

/// Two guests that share a whole chunk, pages 512 to 1023, and a third one that has just come. Of its pages 512 to 1023
/// there is a pattern, of those before there is none.
fn crowd(lab: &Lab) -> [usize; 3] {
    let [a, b] = [0; 2].map(|_| lab.guest("d", 2));
    for guest in [a, b] {
        fill(lab, guest, 512..1024, |page| page);
    }
    lab.rounds(4);
    assert_eq!(lab.status().pages_shared, 512);
    [a, b, lab.guest("d", 2)]
}

fn reads(lab: &Lab, guest: usize) -> u64 {
    lab.world(|world| world.processes[guest].reads)
}

#[test]
fn a_run_that_others_share_is_hardly_read() {
    let lab = Lab::new();
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 0..512, |page| 512 + page);
    lab.rounds(3);
    assert_eq!(lab.status().pages_sharing, 2 * 512);
    assert_eq!(reads(&lab, c), 32 + 1, "each group's start, the last end");
}

#[test]
fn a_chunk_that_is_like_one_at_its_place_is_hardly_read() {
    let lab = Lab::new();
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 512..1024, |page| page);
    lab.rounds(3);
    assert_eq!(lab.status().pages_sharing, 2 * 512);
    assert_eq!(reads(&lab, c), 4, "samples");
}

#[test]
fn short_runs_at_their_places_are_hardly_read() {
    let lab = Lab::new();
    let content = |guest: u64| {
        move |page: u64| {
            if page.is_multiple_of(3) {
                10_000 * guest + page
            } else {
                page
            }
        }
    };
    for guest in 1..=2 {
        let of = lab.guest("d", 1);
        fill(&lab, of, 0..512, content(guest));
    }
    lab.rounds(4);
    let c = lab.guest("d", 1);
    fill(&lab, c, 0..512, content(3));
    lab.rounds(3);
    assert_eq!(lab.status().pages_sharing, 2 * 341);
    lab.rounds(4);
    let status = lab.status();
    assert_eq!((status.pages_unshared, status.pages_volatile), (3 * 171, 0));
    assert_eq!(reads(&lab, c), 4 + 171, "samples, and once what is private");
}

#[test]
fn where_a_chunk_is_not_like_the_pattern_nothing_is_lost() {
    let lab = Lab::new();
    let [_, _, c] = crowd(&lab);
    // The samples are 170 pages apart.
    let odd = 600..620;
    fill(&lab, c, 512..1024, |page| {
        if odd.contains(&page) {
            7000 + page
        } else {
            page
        }
    });
    lab.rounds(3);
    let status = lab.status();
    assert_eq!(
        (status.pages_sharing, status.pages_volatile),
        (512 + 492, 20)
    );
    lab.rounds(3);
    let status = lab.status();
    assert_eq!((status.pages_unshared, status.pages_volatile), (20, 0));
    assert_eq!(reads(&lab, c), 4 + 20);
}

#[test]
fn another_order_at_the_same_place_costs_the_samples() {
    let lab = Lab::new();
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 512..1024, |page| 512 + (page + 16) % 512);
    lab.rounds(3);
    assert_eq!(lab.status().pages_sharing, 2 * 512);
    let groups = 32 + 2; // their starts, the end before the turn and the last one
    assert_eq!(reads(&lab, c), 4 + groups);
}

#[test]
fn what_the_pattern_does_not_have_comes_later() {
    let lab = Lab::new();
    let [a, b] = [0; 2].map(|_| lab.guest("d", 1));
    for guest in [a, b] {
        fill(&lab, guest, 0..256, |page| 100 + page);
    }
    lab.rounds(4);
    let c = lab.guest("d", 1);
    fill(&lab, c, 0..300, |page| 100 + page);
    lab.rounds(3);
    let status = lab.status();
    assert_eq!((status.pages_sharing, status.pages_unshared), (512, 44));
    assert_eq!(reads(&lab, c), 4 + 44);
    // A pattern of slots that are gone is followed by no guest.
    for guest in [a, b, c] {
        fill(&lab, guest, 0..300, |page| {
            5000 + 1000 * guest as u64 + page
        });
    }
    lab.rounds(6);
    let d = lab.guest("d", 1);
    fill(&lab, d, 0..256, |page| 100 + page);
    lab.rounds(3);
    assert_eq!((lab.status().pages_shared, slot(&lab, d, 5)), (0, None));
}

#[test]
fn a_run_that_ends_in_a_group_is_read_there() {
    let lab = Lab::new();
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 0..512, |page| match page {
        28..488 => 512 + page,
        _ => 10_000 + page,
    });
    lab.rounds(3);
    let status = lab.status();
    assert_eq!(
        (status.pages_sharing, status.pages_unshared),
        (512 + 460, 52)
    );
    let first = slot(&lab, c, 28).unwrap();
    assert_eq!(slot(&lab, c, 487), Some(first + 459));
}

#[test]
fn groups_of_a_shared_chunk_that_nobody_has_are_put_off_and_read() {
    for (shared, reads_once_more) in [(20, 2 * 12), (16, 2 * 16), (15, 0)] {
        let lab = Lab::new();
        let [_, _, c] = crowd(&lab);
        let end = 16 * shared;
        fill(&lab, c, 0..512, |page| match page < end {
            true => 512 + page,
            false => 10_000 + page,
        });
        lab.rounds(3);
        let status = lab.status();
        assert_eq!(status.pages_sharing, 512 + 16 * shared);
        assert_eq!(status.pages_unshared, 512 - 16 * shared);
        assert_eq!(status.pages_volatile, 0);
        // Each group's start and the last shared one's end, and of what is put off two pages of each group.
        let private = 512 - 16 * shared;
        assert_eq!(reads(&lab, c), 32 + 1 + reads_once_more + private);
    }
}

#[test]
fn a_wrong_guess_is_read_and_not_guessed_again() {
    let lab = Lab::new();
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 512..544, |page| match page {
        520 => 77,
        _ => page,
    });
    lab.rounds(3);
    let status = lab.status();
    assert_eq!((status.pages_sharing, status.pages_volatile), (512 + 31, 1));
    lab.rounds(3);
    let status = lab.status();
    assert_eq!((status.pages_unshared, status.pages_volatile), (1, 0));
    assert_eq!(
        reads(&lab, c),
        2 + 1 + 1,
        "starts, the last end, the odd one"
    );
    // It is a candidate like any other.
    fill(&lab, c, 900..901, |_| 77);
    lab.rounds(4);
    assert_eq!(slot(&lab, c, 520), slot(&lab, c, 900));
    assert!(slot(&lab, c, 520).is_some());
}

#[test]
fn a_full_slot_is_not_guessed() {
    let lab = Lab::on_nodes(1, true, 2);
    let [a, _, c] = crowd(&lab);
    fill(&lab, c, 512..1024, |page| page);
    lab.rounds(6);
    let status = lab.status();
    assert_eq!(status.pages_shared + status.pages_sharing, 2 * 512 + 512);
    assert_eq!(reads(&lab, c), 4 + 512, "the copies had to be written");
    assert_ne!(slot(&lab, a, 700), slot(&lab, c, 700));
    fill(&lab, c, 0..512, |page| 512 + page);
    lab.rounds(6);
    let status = lab.status();
    assert_eq!(status.pages_shared + status.pages_sharing, 3 * 512 + 512);
}

/// Of two workers that publish the same content one loses the exchange, and its slot has a ref until its job ends. It may lie between
/// slots that won.
#[test]
fn a_slot_that_lost_the_exchange_is_not_guessed() {
    let lab = Lab::new();
    let c = lab.guest("d", 1);
    let content = |page| 1 + page;
    fill(&lab, c, 0..32, content);
    let domain = lab.core.domain("d").unwrap();
    let mut run = domain.slots.take_run(StoreId(0)).unwrap();
    let first = run.start;
    run.start += 33;
    domain.slots.give_back(run);
    // The last one won page 8.
    let pages: Vec<_> = (0..32)
        .chain([8])
        .map(|page| bytes(content(page)))
        .collect();
    let store = domain.store(StoreId(0));
    store
        .write(Slot(first), &pages.iter().collect::<Vec<_>>())
        .unwrap();
    let view = domain.slots.view();
    for (slot, page) in (first..).map(Slot).zip(&pages) {
        let key = lab.core.hasher.fingerprint(page).unwrap();
        view.publish(slot, key);
        if slot.0 != first + 8 {
            let index = domain.index(StoreId(0));
            assert_eq!(index.get_or_insert(key, Entry::Canonical(slot)), None);
            view.set_named(slot);
        }
    }
    drop(view);
    lab.hold_former("d", (first..first + 33).map(Slot).collect());
    lab.rounds(3);
    let slots: Vec<_> = (6..10)
        .map(|page| slot(&lab, c, page).unwrap() - first)
        .collect();
    assert_eq!(slots, [6, 7, 32, 9]);
    assert!(reads(&lab, c) < 20, "the others were guessed");
}

#[test]
fn pages_that_are_bound_to_nodes_are_all_read() {
    let lab = Lab::on_nodes(2, false, 256);
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 512..1024, |page| page);
    lab.world(|world| (512..1024).for_each(|page| world.migrate(c, page, 1)));
    lab.rounds(4);
    assert_eq!((reads(&lab, c), slot(&lab, c, 600)), (512 + 8, None));
}

#[test]
fn zeros_in_long_runs_are_hardly_read() {
    let lab = Lab::new();
    let a = lab.guest("d", 2);
    fill(&lab, a, 0..1024, |page| if page < 1000 { 0 } else { page });
    lab.rounds(3);
    let status = lab.status();
    assert_eq!((status.zero_pages, status.pages_unshared), (1000, 24));
    // Each group's start; middles and ends where the run ends. Two groups are not all zeros, and read.
    assert!(reads(&lab, a) <= 64 + 6 + 32, "{}", reads(&lab, a));
    // The same where slots are proposed, too.
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 0..512, |_| 0);
    lab.rounds(3);
    assert_eq!(lab.status().zero_pages, 1512);
    assert_eq!(reads(&lab, c), 32 + 2);
}

#[test]
fn a_page_between_zeros_is_no_zeros_and_shared_all_the_same() {
    let lab = Lab::new();
    let guests = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in guests {
        fill(&lab, guest, 0..512, |page| u64::from(page % 16 == 5) * page);
    }
    lab.rounds(12);
    let status = lab.status();
    assert_eq!((status.zero_pages, status.pages_sharing), (2 * 480, 32));
}

#[test]
fn memory_without_zeros_is_read_once_but_for_some_groups() {
    let lab = Lab::new();
    let a = lab.guest("d", 1);
    fill(&lab, a, 0..512, |page| 1 + page);
    lab.rounds(4);
    assert_eq!(reads(&lab, a), 512 + 8);
}
