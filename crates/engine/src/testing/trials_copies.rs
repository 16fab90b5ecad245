//! Stories of contents with more pages than one copy takes.

use std::collections::BTreeMap;

use wire::RunMode;

use crate::options::Rules;
use crate::testing::fake::{Lab, Place};
use crate::testing::trials::{fill, slot};

/// How many pages map each slot.
fn sharers(lab: &Lab) -> BTreeMap<u64, usize> {
    let mut all = BTreeMap::new();
    lab.world(|world| {
        for process in &world.processes {
            for place in process.pages.values() {
                if let Place::Slot { slot, .. } = place {
                    *all.entry(*slot).or_default() += 1;
                }
            }
        }
    });
    all
}

fn chains(lab: &Lab) -> (u64, u64) {
    let status = lab.status();
    (status.stable_node_chains, status.stable_node_dups)
}

#[test]
fn a_copy_takes_as_many_pages_as_it_may() {
    for limit in 2..=4 {
        let lab = Lab::on_nodes(1, true, limit);
        let guests = [(); 4].map(|()| lab.guest("d", 1));
        // Every other page, so that no row forms.
        for guest in guests {
            lab.world(|world| {
                (0..500)
                    .step_by(2)
                    .for_each(|page| world.write(guest, page, 7))
            });
        }
        lab.rounds(8);
        let status = lab.status();
        let merged = status.pages_shared + status.pages_sharing;
        assert_eq!(merged, 1000, "limit {limit}");
        let sharers = sharers(&lab);
        let limit = limit as usize;
        assert!(sharers.values().all(|&pages| pages <= limit));
        let full = sharers.values().filter(|&&pages| pages == limit).count();
        assert!(
            sharers.len() <= full + 2,
            "{} copies, {full} full",
            sharers.len()
        );
        assert_eq!(chains(&lab), (1, sharers.len() as u64));
        lab.world(|world| guests.map(|guest| world.kill(guest)));
        lab.rounds(2);
        assert_eq!(lab.world(|world| world.frames("d")), 0);
    }
}

#[test]
fn copies_that_emptied_are_pruned_and_those_half_empty_filled_again() {
    let lab = Lab::on_nodes(1, true, 4);
    let [a, b] = [lab.guest("d", 1), lab.guest("d", 1)];
    let odd = |guest: usize, from: u64| {
        let pages = (from..from + 80).step_by(2);
        lab.world(|world| pages.for_each(|page| world.write(guest, page, 7)));
    };
    odd(a, 0);
    lab.rounds(5);
    let before = sharers(&lab);
    assert_eq!((before.len(), chains(&lab)), (10, (1, 10)));
    // From three copies three of four go, from one all.
    let take = |copy: usize, pages: usize| {
        let wanted = *before.keys().nth(copy).unwrap();
        let held = (0..80).filter(|&page| slot(&lab, a, page) == Some(wanted));
        let held: Vec<u64> = held.take(pages).collect();
        lab.world(|world| held.into_iter().for_each(|page| world.discard(a, page)));
    };
    (0..3).for_each(|copy| take(copy, 3));
    take(3, 4);
    lab.rounds(3);
    assert_eq!((sharers(&lab).len(), chains(&lab)), (9, (1, 9)));
    assert_eq!(lab.world(|world| world.frames("d")), 9);
    // Nine new pages fit the three without a new copy.
    lab.world(|world| (0..18).step_by(2).for_each(|page| world.write(b, page, 7)));
    lab.rounds(6);
    let after = sharers(&lab);
    assert_eq!((after.len(), after.values().sum::<usize>()), (9, 36));
    assert!(after.keys().all(|slot| before.contains_key(slot)));
    odd(b, 200);
    lab.rounds(6);
    assert!(sharers(&lab).values().all(|&pages| pages == 4));
    assert_eq!(chains(&lab), (1, 19));
}

#[test]
fn rows_of_a_content_with_copies_map_as_runs() {
    let lab = Lab::on_nodes(1, true, 16);
    let guests = [(); 4].map(|()| lab.guest("d", 2));
    for guest in guests {
        fill(&lab, guest, 0..1024, |_| 7);
    }
    lab.rounds(12);
    let status = lab.status();
    let merged = status.pages_shared + status.pages_sharing;
    assert!(merged + 31 >= 4096, "{merged} merged");
    assert!(sharers(&lab).values().all(|&pages| pages <= 16));
    // Runs of neighbouring slots under neighbouring pages.
    let follows =
        |guest: usize, page: u64| match (slot(&lab, guest, page), slot(&lab, guest, page + 1)) {
            (Some(one), Some(next)) => one + 1 == next,
            _ => false,
        };
    let joined: usize = guests
        .iter()
        .map(|&guest| (0..1023).filter(|&page| follows(guest, page)).count())
        .sum();
    assert!(
        joined > 3000,
        "{joined} of 4092 borders without a new mapping"
    );
    let copies = sharers(&lab).len();
    assert!(copies <= 4096 / 16 + 64, "{copies} copies");
}

#[test]
fn the_limit_changes_only_under_nothing_shared() {
    let lab = Lab::on_nodes(1, true, 256);
    let [a, b] = [lab.guest("d", 1), lab.guest("d", 1)];
    let write = || {
        for guest in [a, b] {
            lab.world(|world| {
                (0..100)
                    .step_by(2)
                    .for_each(|page| world.write(guest, page, 7))
            });
        }
    };
    write();
    lab.rounds(4);
    assert_eq!((sharers(&lab).len(), chains(&lab)), (1, (0, 0)));
    let two = Rules {
        across_nodes: true,
        max_sharing: 2,
    };
    assert_eq!(lab.switch(two), 100);
    lab.world(|world| world.fork(a)); // its copy stays, with more refs than are allowed now
    lab.unmerge();
    assert_eq!(lab.switch(two), 0);
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    for guest in [a, b] {
        lab.world(|world| (0..100).for_each(|page| world.discard(guest, page)));
    }
    write();
    lab.rounds(6);
    let sharers = sharers(&lab);
    assert_eq!((sharers.len(), sharers.values().sum::<usize>()), (50, 100));
    lab.world(|world| world.end_child(a));
    lab.rounds(3);
    assert_eq!(lab.world(|world| world.frames("d")), 50);
}
