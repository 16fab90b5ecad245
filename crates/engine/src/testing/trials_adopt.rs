//! Engines that die, and those that come after them.

use crate::sync::lock;
use crate::testing::fake::{Lab, Place};

fn fill(lab: &Lab, guest: usize, pages: std::ops::Range<u64>, content: impl Fn(u64) -> u64) {
    lab.world(|world| pages.for_each(|page| world.write(guest, page, content(page))));
}

fn slots(lab: &Lab, guest: usize) -> Vec<u64> {
    let place = |page| {
        lab.world(|world| match world.processes[guest].pages.get(&page) {
            Some(Place::Slot { slot, .. }) => Some(*slot),
            _ => None,
        })
    };
    (100..116).filter_map(place).collect()
}

/// Two guests that share 16 pages, and their engine.
fn twins() -> (Lab, [usize; 2]) {
    let lab = Lab::new();
    let guests = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in guests {
        fill(&lab, guest, 100..116, |page| page);
    }
    lab.rounds(3);
    assert_eq!(shared(&lab), (16, 16));
    (lab, guests)
}

fn shared(lab: &Lab) -> (u64, u64) {
    let status = lab.status();
    (status.pages_shared, status.pages_sharing)
}

fn frames(lab: &Lab) -> usize {
    lab.world(|world| world.frames("d"))
}

fn kept(lab: &Lab, guest: usize) -> usize {
    lab.world(|world| world.processes[guest].kept.len())
}

#[test]
fn guests_that_come_back_share_as_before() {
    let (mut lab, guests) = twins();
    let (before, reads) = (
        slots(&lab, guests[0]),
        lab.world(|world| world.processes[0].reads),
    );
    lab.succeed(true);
    guests.iter().for_each(|&guest| lab.connect(guest));
    lab.round();
    assert_eq!(shared(&lab), (16, 16), "in the first look");
    assert_eq!(kept(&lab, guests[0]), 2, "the agent is not told yet");
    lab.round();
    assert_eq!(kept(&lab, guests[0]), 0, "and now it is");
    assert_eq!(slots(&lab, guests[0]), before);
    assert_eq!(lab.world(|world| world.processes[0].reads), reads);
    // The next one finds the old canonical pages.
    let third = lab.guest("d", 1);
    fill(&lab, third, 100..116, |page| page);
    lab.rounds(3);
    assert_eq!((slots(&lab, third), frames(&lab)), (before, 16));
    // Nothing of the old times holds them any more.
    for guest in [guests[0], guests[1], third] {
        lab.world(|world| world.kill(guest));
    }
    lab.round();
    assert_eq!(frames(&lab), 0);
    assert!(lock(&lab.core.domains).is_empty());
}

#[test]
fn children_of_old_times_keep_what_all_others_gave_up() {
    let (mut lab, guests) = twins();
    lab.world(|world| world.fork(guests[0]));
    fill(&lab, guests[0], 100..104, |page| page + 7000); // unseen by the old engine
    lab.succeed(true);
    guests.iter().for_each(|&guest| lab.connect(guest));
    lab.rounds(1);
    assert_eq!(lab.status().pages_broken, 4);
    for guest in guests {
        lab.world(|world| (100..116).for_each(|page| world.discard(guest, page)));
    }
    lab.rounds(4);
    assert_eq!((shared(&lab), frames(&lab)), ((0, 0), 16));
    lab.world(|world| world.end_child(guests[0]));
    lab.round();
    assert_eq!(frames(&lab), 0);
}

#[test]
fn a_guest_that_stays_away_keeps_its_pages_until_it_ends() {
    let (mut lab, [a, b]) = twins();
    lab.succeed(false);
    lab.connect(a);
    lab.world(|world| (100..116).for_each(|page| world.discard(a, page)));
    lab.rounds(4);
    assert_eq!((slots(&lab, b).len(), frames(&lab)), (16, 16));
    lab.world(|world| world.kill(b));
    lab.round();
    assert_eq!(frames(&lab), 0);
}

#[test]
fn a_domain_without_guests_goes_when_the_last_tie_does() {
    let (mut lab, [a, b]) = twins();
    lab.succeed(true);
    lab.world(|world| world.kill(a));
    lab.rounds(2);
    assert_eq!((frames(&lab), lock(&lab.core.domains).len()), (16, 1));
    lab.world(|world| world.kill(b));
    lab.rounds(1);
    assert_eq!((frames(&lab), lock(&lab.core.domains).len()), (0, 0));
}

#[test]
fn engines_that_die_before_they_adopt_all_lose_nothing() {
    let (mut lab, [a, b]) = twins();
    for generation in 0..5 {
        lab.succeed(generation % 2 == 0);
        lab.connect(a);
        if generation == 3 {
            lab.connect(b);
        }
        lab.round();
        fill(&lab, a, 100 + generation..101 + generation, |_| {
            900 + generation
        });
    }
    lab.succeed(true);
    [a, b].iter().for_each(|&guest| lab.connect(guest));
    lab.rounds(2);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (16, 11));
    assert_eq!(frames(&lab), 16, "b maps them all");
    fill(&lab, b, 100..105, |page| page + 5000);
    lab.rounds(4);
    assert_eq!(frames(&lab), 11, "all ties of old times are free");
}

#[test]
fn numbers_begin_behind_what_was_written() {
    let (mut lab, [a, b]) = twins();
    for guest in [a, b] {
        lab.world(|world| (110..116).for_each(|page| world.discard(guest, page)));
    }
    lab.rounds(3);
    assert_eq!(frames(&lab), 10, "the last numbers are spent, and punched");
    let most = slots(&lab, a).into_iter().max().unwrap() + 6;
    lab.succeed(true);
    [a, b].iter().for_each(|&guest| lab.connect(guest));
    for guest in [a, b] {
        fill(&lab, guest, 110..116, |page| page + 1000);
    }
    lab.rounds(4);
    assert_eq!((shared(&lab), frames(&lab)), ((16, 16), 16));
    assert!(slots(&lab, a)[10..].iter().all(|&slot| slot > most));
}

#[test]
fn a_guest_that_lost_its_connection_is_adopted_by_the_same_engine() {
    let (lab, [a, b]) = twins();
    lab.world(|world| world.processes[b].connection = 0);
    lab.rounds(2);
    assert_eq!(shared(&lab), (16, 0), "b is no guest");
    lab.connect(b);
    lab.rounds(2);
    assert_eq!((shared(&lab), kept(&lab, b)), ((16, 16), 0));
    lab.round();
    assert_eq!(
        lock(&lab.core.guests).len(),
        2,
        "its former session is over"
    );
    for guest in [a, b] {
        lab.world(|world| world.kill(guest));
    }
    lab.rounds(2);
    assert_eq!(frames(&lab), 0);
}

#[test]
fn a_guest_that_maps_stores_of_others_keeps_its_old_lines() {
    let (mut lab, guests) = twins();
    lab.world(|world| world.processes[guests[1]].elsewhere = true);
    lab.succeed(true);
    guests.iter().for_each(|&guest| lab.connect(guest));
    lab.rounds(10);
    assert_eq!(shared(&lab), (16, 16));
    assert_eq!(guests.map(|guest| kept(&lab, guest)), [0, 2]);
    lab.world(|world| world.processes[guests[1]].elsewhere = false);
    lab.rounds(10);
    assert_eq!(kept(&lab, guests[1]), 0);
}

#[test]
fn stores_of_all_nodes_go_on() {
    let mut lab = Lab::on_nodes(3, false, 256);
    let guests = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in guests {
        for page in 100..116 {
            let node = u8::try_from(page % 3).unwrap();
            lab.world(|world| world.migrate(guest, page, node));
        }
        fill(&lab, guest, 100..116, |page| page);
    }
    lab.rounds(3);
    let before = slots(&lab, guests[0]);
    assert_eq!((shared(&lab), before.len()), ((16, 16), 16));
    lab.succeed(true);
    guests.iter().for_each(|&guest| lab.connect(guest));
    lab.rounds(2);
    assert_eq!((shared(&lab), slots(&lab, guests[1])), ((16, 16), before));
}
