//! Guesses between probes, in a fake world.

use crate::fake::Lab;
use crate::trials::{fill, slot};

/// Two guests that share a whole chunk, pages 512 to 1023, and a third one that has just come.
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
    fill(&lab, c, 512..1024, |page| page);
    lab.rounds(3);
    assert_eq!(lab.status().pages_sharing, 2 * 512);
    assert_eq!(reads(&lab, c), 32 + 1, "each group's start, the last end");
}

#[test]
fn a_run_that_ends_in_a_group_is_read_there() {
    let lab = Lab::new();
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 512..1024, |page| match page {
        540..1000 => page,
        _ => 10_000 + page,
    });
    lab.rounds(3);
    let status = lab.status();
    assert_eq!(
        (status.pages_sharing, status.pages_unshared),
        (512 + 460, 52)
    );
    let first = slot(&lab, c, 540).unwrap();
    assert_eq!(slot(&lab, c, 999), Some(first + 459));
}

#[test]
fn groups_of_a_shared_chunk_that_nobody_has_are_put_off_and_read() {
    for (shared, reads_once_more) in [(20, 2 * 12), (16, 2 * 16), (15, 0)] {
        let lab = Lab::new();
        let [_, _, c] = crowd(&lab);
        let end = 512 + 16 * shared;
        fill(&lab, c, 512..1024, |page| match page < end {
            true => page,
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
    assert_eq!(reads(&lab, c), 32 + 1 + 512, "the copies had to be written");
    assert_ne!(slot(&lab, a, 700), slot(&lab, c, 700));
}

#[test]
fn pages_that_are_bound_to_nodes_are_all_read() {
    let lab = Lab::on_nodes(2, false, 256);
    let [_, _, c] = crowd(&lab);
    fill(&lab, c, 512..1024, |page| page);
    lab.world(|world| (512..1024).for_each(|page| world.migrate(c, page, 1)));
    lab.rounds(4);
    assert_eq!((reads(&lab, c), slot(&lab, c, 600)), (512, None));
}
