//! Stories of pages on several nodes.

use wire::RunMode;

use crate::options::Rules;
use crate::page::{Slot, StoreId};
use crate::testing::fake::{Lab, Manners};
use crate::testing::trials::{fill, slot};

const ACROSS: Rules = Rules {
    across_nodes: true,
    max_sharing: 256,
};
const WITHIN: Rules = Rules {
    across_nodes: false,
    max_sharing: 256,
};

fn place(lab: &Lab, guest: usize, pages: std::ops::Range<u64>, node: u8) {
    lab.world(|world| pages.for_each(|page| world.migrate(guest, page, node)));
}

/// Two guests with 16 equal pages each, the first's on node 0, the second's as `nodes` has it.
fn pair(lab: &Lab, node: impl Fn(u64) -> u8) -> [usize; 2] {
    let guests = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in guests {
        fill(lab, guest, 0..16, |page| page + 1);
    }
    (0..16).for_each(|page| place(lab, guests[1], page..page + 1, node(page)));
    guests
}

fn shared(lab: &Lab) -> (u64, u64) {
    let status = lab.status();
    (status.pages_shared, status.pages_sharing)
}

/// The store that a page's slot is in.
fn store(lab: &Lab, guest: usize, page: u64) -> Option<u8> {
    slot(lab, guest, page).map(|slot| Slot(slot).store().0)
}

#[test]
fn nothing_is_shared_across_nodes_that_must_not_be() {
    let lab = Lab::on_nodes(2, false, 256);
    let [a, b] = pair(&lab, |_| 1);
    lab.rounds(5);
    assert_eq!((shared(&lab), lab.status().pages_unshared), ((0, 0), 32));
    // The same pages on the same node meet, each in its node's store.
    let c = lab.guest("d", 1);
    fill(&lab, c, 0..16, |page| page + 1);
    place(&lab, c, 8..16, 1);
    lab.rounds(5);
    assert_eq!((shared(&lab), lab.status().pages_unshared), ((16, 16), 16));
    for page in 0..16 {
        let node = u8::from(page >= 8);
        assert_eq!(store(&lab, c, page), Some(node), "page {page}");
        let other = if node == 0 { a } else { b };
        assert_eq!(slot(&lab, other, page), slot(&lab, c, page));
    }
}

#[test]
fn across_nodes_the_copy_lies_where_it_was_read() {
    let lab = Lab::on_nodes(3, true, 256);
    // Every third page on another node.
    let [a, b] = pair(&lab, |page| u8::try_from(page % 3).unwrap());
    lab.rounds(5);
    assert_eq!(shared(&lab), (16, 16));
    let stores: Vec<_> = (0..16).map(|page| store(&lab, b, page).unwrap()).collect();
    let expected: Vec<_> = (0..16)
        .map(|page| u8::try_from(page % 3).unwrap())
        .collect();
    assert_eq!(stores, expected);
    for page in 0..16 {
        assert_eq!(slot(&lab, a, page), slot(&lab, b, page));
    }
    assert_eq!(lab.world(|world| world.frames("d")), 16);
}

#[test]
fn one_node_is_asked_for_nothing() {
    let lab = Lab::new();
    let _ = pair(&lab, |_| 0);
    lab.rounds(6);
    assert_eq!(shared(&lab), (16, 16));
    assert_eq!(lab.world(|world| world.queries), 0);
}

#[test]
fn a_candidate_that_moves_is_found_on_its_new_node() {
    let lab = Lab::on_nodes(2, false, 256);
    let [a, b] = pair(&lab, |_| 1);
    lab.rounds(4);
    assert_eq!((shared(&lab), lab.status().pages_unshared), ((0, 0), 32));
    place(&lab, b, 0..16, 0);
    lab.round();
    assert_eq!(shared(&lab), (16, 16), "within one period");
    assert!((0..16).all(|page| store(&lab, a, page) == Some(0)));
    let domain = lab.core.domain("d").unwrap();
    let entries = [0, 1].map(|home| domain.index(StoreId(home)).len());
    assert_eq!(entries, [16, 0], "the old entries are gone");
}

#[test]
fn a_candidate_is_asked_for_its_node_again_when_its_twin_is_found() {
    let lab = Lab::on_nodes(2, false, 256);
    let a = lab.guest("d", 1);
    fill(&lab, a, 0..16, |page| page + 1);
    lab.rounds(3);
    let b = lab.guest("d", 1);
    fill(&lab, b, 0..16, |page| page + 1);
    lab.rounds(2);
    // The look that finds the twins settled comes before the candidates move: the agent of the
    // first guest is late, so it is not looked at in this round.
    lab.world(|world| world.processes[a].manners = Manners::Stalls);
    lab.round();
    place(&lab, a, 0..16, 1);
    lab.world(|world| world.processes[a].manners = Manners::Honest);
    lab.rounds(3);
    // The world would have said so, had a page been asked to map the other node's slot.
    assert_eq!(lab.status().pages_sharing, 0);
    assert!((0..16).all(|page| store(&lab, a, page).is_none()));
}

#[test]
fn the_rules_change_only_under_nothing_shared() {
    let lab = Lab::on_nodes(2, true, 256);
    let [a, b] = pair(&lab, |page| u8::from(page >= 4));
    lab.rounds(4);
    assert_eq!((shared(&lab), lab.switch(WITHIN)), ((16, 16), 32));
    lab.unmerge();
    assert_eq!((shared(&lab), lab.switch(WITHIN)), ((0, 0), 0));
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    // What was merged is broken; new pages with the old content meet stale slots.
    for guest in [a, b] {
        lab.world(|world| (0..16).for_each(|page| world.discard(guest, page)));
        fill(&lab, guest, 0..16, |page| page + 1);
    }
    lab.rounds(5);
    assert_eq!((shared(&lab), lab.status().pages_unshared), ((4, 4), 24));
    assert!((0..4).all(|page| store(&lab, b, page) == Some(0)));
}

#[test]
fn stale_slots_of_a_fork_child_are_nobodys() {
    let lab = Lab::on_nodes(2, true, 256);
    // All canonical pages on node 1, and a child that keeps them there for good.
    let [a, b] = pair(&lab, |_| 1);
    lab.rounds(4);
    assert!((0..16).all(|page| store(&lab, a, page) == Some(1)));
    lab.world(|world| world.fork(a));
    lab.unmerge();
    assert_eq!(lab.switch(WITHIN), 0);
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    let domain = lab.core.domain("d").unwrap();
    assert_eq!(
        domain.index(StoreId(0)).len(),
        16,
        "stale entries of living slots"
    );
    // Equal pages on node 0 find them in their index, and must not take them.
    let [c, d] = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in [c, d] {
        fill(&lab, guest, 0..16, |page| page + 1);
    }
    lab.rounds(5);
    // With the parent's own pages, which are on node 0 and merge again.
    assert_eq!(shared(&lab), (16, 32));
    assert!((0..16).all(|page| store(&lab, c, page) == Some(0)));
    lab.world(|world| world.end_child(a));
    lab.rounds(3);
    assert_eq!(lab.world(|world| world.frames("d")), 16);
    let _ = b;
}

#[test]
fn candidates_follow_a_change_of_the_rules_both_ways() {
    let lab = Lab::on_nodes(2, true, 256);
    let a = lab.guest("d", 1);
    fill(&lab, a, 0..16, |page| page + 1);
    place(&lab, a, 0..16, 1);
    lab.rounds(4);
    let domain = lab.core.domain("d").unwrap();
    let entries = || [0, 1].map(|home| domain.index(StoreId(home)).len());
    assert_eq!(entries(), [16, 0]);
    assert_eq!(lab.switch(WITHIN), 0);
    lab.round();
    assert_eq!(entries(), [0, 16]);
    assert_eq!(lab.switch(ACROSS), 0);
    lab.round();
    assert_eq!(entries(), [16, 0]);
    assert_eq!(lab.status().pages_unshared, 16);
}

#[test]
fn plans_under_way_do_not_outlive_the_rules() {
    let lab = Lab::on_nodes(2, true, 256);
    let [a, b] = pair(&lab, |_| 1);
    lab.rounds(2);
    // Asked, and no answer: that is in the way.
    lab.world(|world| world.processes[b].manners = Manners::Stalls);
    lab.world(|world| world.processes[a].manners = Manners::Stalls);
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Stop)]);
    lab.round();
    assert_eq!(lab.switch(WITHIN), 0, "nothing was asked for yet");
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    for guest in [a, b] {
        lab.world(|world| world.processes[guest].manners = Manners::Honest);
    }
    lab.rounds(5);
    assert_eq!((shared(&lab), lab.status().pages_unshared), ((0, 0), 32));
}

#[test]
fn many_candidates_are_checked_in_turn() {
    let lab = Lab::on_nodes(2, false, 256);
    // More than a round may ask for: 130 chunks, the last two beyond the budget.
    let a = lab.guest("d", 130);
    fill(&lab, a, 0..130 * 512, |page| page + 1);
    lab.rounds(4);
    assert_eq!(lab.status().pages_unshared, 130 * 512);
    place(&lab, a, 129 * 512..130 * 512, 1);
    place(&lab, a, 0..512, 1);
    lab.world(|world| world.queries = 0);
    lab.round();
    let asked = lab.world(|world| world.queries);
    assert!(asked <= (1 << 16) + 2 * 512, "{asked} pages in one round");
    lab.rounds(2);
    let domain = lab.core.domain("d").unwrap();
    assert_eq!(domain.index(StoreId(1)).len(), 1024);
}

/// Guests of node 0 that share 16 copies there, and a lab that keeps pages of two nodes apart.
fn merged_on_one_node() -> (Lab, [usize; 2]) {
    let lab = Lab::on_nodes(2, false, 256);
    let guests = pair(&lab, |_| 0);
    lab.rounds(4);
    assert_eq!(shared(&lab), (16, 16));
    (lab, guests)
}

fn astray(lab: &Lab) -> u64 {
    lab.core.domain("d").unwrap().slots.astray()
}

#[test]
fn a_copy_that_moved_off_its_node_gets_no_new_sharer_and_loses_its_old_ones() {
    let (lab, [a, b]) = merged_on_one_node();
    lab.world(|world| world.migrate_slots(a, 0..16, 1));
    let c = lab.guest("d", 1);
    fill(&lab, c, 0..16, |page| page + 1);
    // The world says so when a page is asked to map a frame of another node.
    lab.round();
    assert_eq!(astray(&lab), 16, "found within one round");
    lab.rounds(8);
    assert_eq!((shared(&lab), astray(&lab)), ((16, 32), 0));
    for guest in [a, b, c] {
        assert_eq!(lab.world(|world| world.slot_nodes(guest)), [0].into());
    }
    assert_eq!(
        lab.world(|world| world.frames("d")),
        16,
        "the old copies are gone"
    );
}

#[test]
fn a_guest_that_moved_with_its_copies_leaves_those_who_stayed() {
    let (lab, [a, b]) = merged_on_one_node();
    let c = lab.guest("d", 1);
    fill(&lab, c, 0..16, |page| page + 1);
    lab.rounds(4);
    assert_eq!(shared(&lab), (16, 32));
    lab.world(|world| world.migrate_slots(a, 0..16, 1));
    place(&lab, a, 0..16, 1);
    lab.rounds(8);
    assert_eq!((shared(&lab), lab.status().pages_unshared), ((16, 16), 16));
    assert!((0..16).all(|page| slot(&lab, a, page).is_none()));
    assert_eq!(lab.world(|world| world.slot_nodes(b)), [0].into());
}

#[test]
fn copies_that_move_between_look_and_question_are_not_named() {
    let (lab, [a, _]) = merged_on_one_node();
    let c = lab.guest("d", 1);
    fill(&lab, c, 0..16, |page| page + 1);
    lab.rounds(2);
    // The walk of the last round is over: only the question before the merge can tell.
    lab.world(|world| world.migrate_slots(a, 0..8, 1));
    lab.round();
    let named = (0..16).filter(|&page| slot(&lab, c, page).is_some());
    assert_eq!(named.collect::<Vec<_>>(), (8..16).collect::<Vec<_>>());
    lab.rounds(10);
    assert_eq!(shared(&lab), (16, 32));
}

#[test]
fn copies_that_move_are_found_soon_however_many_there_are() {
    const CHUNKS: u64 = 16;
    const PAGES: u64 = CHUNKS * 512;
    let lab = Lab::on_nodes(2, false, 256);
    let guests = [lab.guest("d", CHUNKS), lab.guest("d", CHUNKS)];
    for guest in guests {
        fill(&lab, guest, 0..PAGES, |page| page + 1);
    }
    lab.rounds(5);
    assert_eq!(shared(&lab), (PAGES, PAGES));
    // A round asks for a segment at rest, and for some ten once pages have moved.
    lab.core.knobs.turn([wire::Setting::MergePeriodMs(200)]);
    lab.world(|world| world.frame_queries_take = std::time::Duration::from_millis(2));
    for _ in 0..3 {
        lab.world(|world| world.frame_queries = 0);
        lab.round();
        let asked = lab.world(|world| world.frame_queries);
        // The check of each round asks for all.
        assert!((PAGES + 1..PAGES + PAGES / 8).contains(&asked), "{asked}");
    }
    let moved = [0, PAGES / 2, PAGES - 1];
    let before = moved.map(|page| slot(&lab, guests[0], page).unwrap());
    for page in moved {
        lab.world(|world| world.migrate_slots(guests[0], page..page + 1, 1));
    }
    let is_found = |(page, was): (u64, u64)| {
        let domain = lab.core.domain("d").unwrap();
        let known = domain.slots.view().is_astray(Slot(was));
        known || slot(&lab, guests[0], page) != Some(was)
    };
    // The rest of the walk that is under way, and all of the next one: two rounds each. At rest it would be 13 rounds.
    let rounds = (1..=6).find(|_| {
        lab.round();
        moved.into_iter().zip(before).all(is_found)
    });
    assert!(rounds.is_some(), "not all were found in six rounds");
}

#[test]
fn a_node_that_is_full_has_no_copies_elsewhere() {
    let lab = Lab::on_nodes(2, false, 256);
    lab.world(|world| world.full = Some((0, 1)));
    let _ = pair(&lab, |_| 0);
    lab.rounds(24);
    assert_eq!(
        (shared(&lab), lab.world(|world| world.frames("d"))),
        ((0, 0), 0)
    );
    let tries = lab.world(|world| world.slots_ever("d"));
    assert!(tries < 16 * 8, "{tries} copies were made in vain");
    lab.world(|world| world.full = None);
    lab.rounds(70);
    assert_eq!(shared(&lab), (16, 16));
}

#[test]
fn across_nodes_copies_are_counted_where_they_are_and_left_there() {
    let lab = Lab::on_nodes(2, true, 256);
    let [a, _] = pair(&lab, |page| u8::from(page >= 4));
    lab.rounds(4);
    let by_node = || {
        let nodes = lab.status().store_nodes;
        let row = |at: &wire::StoreNode| (at.node, at.pages, at.astray);
        nodes.iter().map(row).collect::<Vec<_>>()
    };
    assert_eq!(by_node(), [(0, 4, 0), (1, 12, 0)]);
    lab.world(|world| world.migrate_slots(a, 0..2, 1));
    lab.rounds(3);
    assert_eq!(
        (by_node(), shared(&lab)),
        (vec![(0, 2, 0), (1, 14, 2)], (16, 16))
    );
    assert_eq!(astray(&lab), 0, "nothing is wrong with them");
}

#[test]
fn one_node_is_not_asked_for_frames() {
    let lab = Lab::new();
    let _ = pair(&lab, |_| 0);
    lab.rounds(6);
    assert_eq!(lab.world(|world| world.frame_queries), 0);
    assert!(lab.status().store_nodes.is_empty());
}
