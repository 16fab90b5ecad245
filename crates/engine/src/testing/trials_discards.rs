//! Discards between two rounds, in the fake world.

use std::time::Duration;

use crate::testing::fake::{Lab, Manners};
use crate::testing::trials::{fill, slot, twins};

fn frames(lab: &Lab) -> usize {
    lab.world(|world| world.frames("d"))
}

fn discard(lab: &Lab, guest: usize, pages: std::ops::Range<u64>) {
    lab.world(|world| pages.for_each(|page| world.discard(guest, page)));
}

fn questions(lab: &Lab, guest: usize) -> u64 {
    lab.world(|world| world.processes[guest].syncs)
}

#[test]
fn frames_of_discarded_pages_come_back_without_a_round() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    assert_eq!(frames(&lab), 16);
    discard(&lab, a, 100..116);
    lab.glance();
    assert_eq!(frames(&lab), 16, "the other one has them");
    assert!(slot(&lab, b, 100).is_some());
    lab.rest();
    discard(&lab, b, 100..110);
    lab.glance();
    assert_eq!(frames(&lab), 6);
    assert_eq!(lab.status().full_scans, 3);
    let scans = lab.world(|world| world.processes[b].scans);
    assert_eq!(scans, 3, "its memory is left alone");
}

#[test]
fn what_a_round_has_heard_is_given_back_by_the_next_glance() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    [a, b]
        .into_iter()
        .for_each(|guest| discard(&lab, guest, 100..116));
    lab.round();
    assert_eq!(frames(&lab), 16, "no lifeline yet");
    lab.glance();
    assert_eq!(frames(&lab), 0);
}

#[test]
fn a_fork_child_keeps_what_its_parent_discards() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    lab.world(|world| world.fork(a));
    [a, b]
        .into_iter()
        .for_each(|guest| discard(&lab, guest, 100..116));
    (0..4).for_each(|_| {
        lab.rest();
        lab.glance();
    });
    assert_eq!(frames(&lab), 16);
    lab.world(|world| world.end_child(a));
    lab.round();
    assert_eq!(frames(&lab), 0);
}

#[test]
fn guests_at_rest_are_asked_nothing() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    let before = [a, b].map(|guest| questions(&lab, guest));
    // Pages that are written, or were never merged, are not given up.
    fill(&lab, a, 100..105, |_| 7);
    fill(&lab, a, 200..205, |page| page);
    discard(&lab, a, 200..205);
    (0..5).for_each(|_| lab.glance());
    assert_eq!([a, b].map(|guest| questions(&lab, guest)), before);
}

#[test]
fn who_counts_discards_without_a_pause_rests() {
    let lab = Lab::new();
    let a = [lab.guest_of("d", 1, 7), lab.guest_of("d", 1, 8)];
    a.into_iter()
        .for_each(|guest| fill(&lab, guest, 100..116, |page| page));
    lab.rounds(3);
    let [greedy, honest] = a;
    let before = questions(&lab, greedy);
    for _ in 0..50 {
        lab.world(|world| world.note_discard(greedy));
        lab.core.glances.note_spent(7, Duration::from_secs(9));
        lab.glance();
    }
    assert_eq!(questions(&lab, greedy), before, "its user rests");
    discard(&lab, honest, 100..116);
    discard(&lab, greedy, 100..116);
    let asked = questions(&lab, honest);
    lab.glance();
    assert_eq!(questions(&lab, honest), asked + 2, "another user does not");
}

#[test]
fn an_agent_that_answers_late_is_heard_when_its_answer_has_come() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    lab.world(|world| world.processes[a].manners = Manners::Stalls);
    [a, b]
        .into_iter()
        .for_each(|guest| discard(&lab, guest, 100..116));
    let rests = lab.rests_after_glance(0);
    assert!(rests, "its user waits as long as others waited for it");
    let asked = questions(&lab, a);
    lab.rest();
    lab.glance();
    assert_eq!(questions(&lab, a), asked);
    assert!(!lab.core.glances.rests(0), "no worker waited for it again");
    assert_eq!(frames(&lab), 16);
    lab.world(|world| world.processes[a].manners = Manners::Honest);
    lab.rest();
    lab.glance();
    assert_eq!(frames(&lab), 0, "no round came");
}
