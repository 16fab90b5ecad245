//! Memory that is to be merged now, in the fake world.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use wire::Cause;

use crate::options::Options;
use crate::run::queue::Job;
use crate::run::wishes::Pass;
use crate::scan::terms::Aim;
use crate::sync::lock;
use crate::testing::fake::{Lab, Manners, address};
use crate::testing::trials::{fill, slot, twins};

const ALL: std::ops::Range<u64> = 0..1 << 20;

#[test]
fn pages_written_a_moment_ago_are_merged_in_one_pass() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    fill(&lab, a, 7..8, |_| 0);
    let merged = lab.merge_now(&[a, b], ALL).unwrap();
    assert_eq!((merged.pages, merged.saved_bytes), (33, 17 * 4096));
    assert!(merged.finished && merged.left_alone.is_empty());
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (16, 16));
    assert_eq!(status.full_scans, 0, "no round was needed");
    let again = lab.merge_now(&[a, b], ALL).unwrap();
    assert_eq!((again.pages, again.saved_bytes), (0, 0));
}

#[test]
fn a_clone_finds_what_the_index_has() {
    let lab = Lab::new();
    let a = lab.guest("d", 1);
    fill(&lab, a, 100..400, |page| page);
    lab.rounds(4);
    assert_eq!(lab.status().pages_unshared, 300);
    let b = lab.guest("d", 1);
    fill(&lab, b, 100..400, |page| page);
    let merged = lab.merge_now(&[b], ALL).unwrap();
    assert_eq!((merged.pages, merged.saved_bytes), (300, 300 * 4096));
    assert_eq!(slot(&lab, a, 399), slot(&lab, b, 399));
    let c = lab.guest("d", 1);
    fill(&lab, c, 100..400, |page| page);
    let merged = lab.merge_now(&[c], ALL).unwrap();
    assert_eq!((merged.pages, merged.saved_bytes), (300, 300 * 4096));
}

#[test]
fn what_lies_outside_the_range_is_as_it_was() {
    let lab = Lab::new();
    let guests = [lab.guest("d", 3), lab.guest("d", 3)];
    for guest in guests {
        (0..3).for_each(|chunk| fill(&lab, guest, chunk * 512..chunk * 512 + 20, |page| 1 + page));
    }
    lab.rounds(1);
    let merged = lab.merge_now(&guests, 600..601).unwrap();
    assert_eq!((merged.pages, merged.saved_bytes), (40, 20 * 4096));
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_volatile), (20, 80));
    lab.rounds(3);
    assert_eq!(lab.status().pages_shared, 60);
}

/// MOVE would take a page that a call refers to without a pin, and what the call writes would be lost.
#[test]
fn what_may_be_written_unseen_takes_its_two_periods() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(1);
    lab.world(|world| world.processes[a].borrows = Some("a file".to_owned()));
    let merged = lab.merge_now(&[a, b], ALL).unwrap();
    assert_eq!(merged.pages, 0);
    let [alone] = &merged.left_alone[..] else {
        panic!("{merged:?}");
    };
    assert!(
        alone.pid as usize == a && alone.why.contains("a file"),
        "{alone:?}"
    );
    lab.rounds(3);
    assert_eq!(lab.status().pages_sharing, 16);
}

#[test]
fn a_merged_page_that_was_written_settles_with_time_only() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.merge_now(&[a, b], ALL).unwrap();
    lab.rounds(3);
    fill(&lab, a, 100..116, |page| page);
    for _ in 0..10 {
        let merged = lab.merge_now(&[a, b], ALL).unwrap();
        assert_eq!(merged.pages, 0);
    }
    assert_eq!(lab.status().pages_sharing, 0);
}

#[test]
fn a_stranger_and_a_guest_that_ends_are_named() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    let refused = lab.merge_now(&[a, 77], ALL).unwrap_err().to_string();
    assert!(refused.contains("process 77 is no guest"), "{refused}");
    let pid = u32::try_from(a).unwrap();
    let viewer = |uid| wire::Viewer {
        uid,
        domain: String::new(),
    };
    assert!(lab.core.find_guests((&viewer(4), false), &[pid]).is_err());
    let own = lab.core.find_guests((&viewer(0), false), &[pid]);
    assert_eq!(own.unwrap().len(), 1);
    lab.world(|world| world.kill(b));
    let merged = lab.merge_now(&[a, b], ALL).unwrap();
    let alone = &merged.left_alone[..];
    assert!(
        alone.len() == 1 && alone[0].why.contains("no guest any more"),
        "{alone:?}"
    );
}

#[test]
fn memory_that_nobody_wants_now_rests_as_before() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    let c = lab.guest("d", 1);
    fill(&lab, c, 100..116, |page| page);
    lab.rounds(1);
    let scans = || lab.world(|world| world.processes[c].scans);
    let before = scans();
    lab.merge_now(&[a, b], ALL).unwrap();
    assert_eq!(scans(), before);
    assert_eq!(lab.status().pages_volatile, 16);
    lab.rounds(2);
    assert_eq!(lab.status().pages_sharing, 32);
}

/// A block of memory that is looked at in one go has so many chunks.
const BLOCK: u64 = 32;

/// Two guests with a chunk in each of 100 blocks, of which each takes 2 ms to look at.
fn slow_twins(lab: &Lab) -> [usize; 2] {
    [lab.guest("d", 0), lab.guest("d", 0)].map(|guest| {
        let chunks = || (0..100).map(|block| block * BLOCK);
        lab.world(|world| {
            let its = &mut world.processes[guest];
            its.offered = chunks().collect();
            its.changed = its.offered.clone();
            its.scan_takes = Duration::from_millis(2);
        });
        chunks().for_each(|chunk| fill(lab, guest, chunk * 512..chunk * 512 + 8, |page| 1 + page));
        guest
    })
}

#[test]
fn a_pass_ends_in_time_however_much_memory_there_is() {
    let lab = Lab::with(Options {
        knobs: wire::KnobValues {
            threads: 1,
            merge_period_ms: 50,
            ..wire::KnobValues::default()
        },
        patience: Duration::ZERO,
        ..Options::default()
    });
    let guests = slow_twins(&lab);
    let scans = || lab.world(|world| guests.map(|guest| world.processes[guest].scans));
    let merged = lab.merge_now(&guests, ALL).unwrap();
    let [a, b] = scans();
    assert!(
        !merged.finished && merged.left_alone.is_empty(),
        "{merged:?}"
    );
    assert!(a + b < 50, "{a} and {b} looks of 2 ms each in 50 ms");
    // The beginning is merged, again and again if need be, and the rest by the rounds.
    let mut tries = 0;
    while lab.status().pages_sharing == 0 {
        lab.merge_now(&guests, ALL).unwrap();
        tries += 1;
        assert!(tries < 1000, "no pass merges anything");
    }
    for guest in guests {
        lab.world(|world| world.processes[guest].scan_takes = Duration::ZERO);
    }
    // A busy machine cuts a round short.
    let is_whole = |_| {
        lab.rounds(1);
        lab.status().pages_sharing == 800
    };
    assert!((0..100).any(is_whole), "{:?}", lab.status());
}

#[test]
fn a_pass_under_way_gives_way_to_a_guest_that_comes() {
    let lab = Lab::new();
    let guest = lab.guest_of("d", 1, 7);
    let job = || Job::Look(Arc::clone(&lock(&lab.core.guests)[guest]), Aim::Hear);
    let is_cut = |user| {
        lab.core.queue.begin_round();
        lab.core.queue.add([job()]);
        let begin = Instant::now() - Duration::from_secs(3);
        *lock(&lab.core.pass) = Some(Pass {
            user,
            brief: false,
            begin,
        });
        lab.core.keep_to_time();
        lab.core.queue.has_dropped()
    };
    assert!(!is_cut(7), "none but he has guests");
    lab.guest_of("e", 1, 8);
    assert!(is_cut(7) && !is_cut(0), "root's goes on");
    lab.core.queue.cut();
}

#[test]
fn a_round_goes_on_where_it_was_when_a_pass_came() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(1);
    let guests = lock(&lab.core.guests).clone();
    let middle = address(200);
    guests[0].progress.store(middle, Relaxed);
    lab.merge_now(&[a, b], ALL).unwrap();
    assert_eq!(guests[0].progress.load(Relaxed), middle);
    lab.round();
    assert_eq!(
        guests[0].progress.load(Relaxed),
        0,
        "and it came to the end"
    );
}

/// What others of the domain merge at the same time is none of his business.
#[test]
fn the_saving_is_that_of_the_asked_guests() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    let others = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in others {
        fill(&lab, guest, 200..300, |page| page);
    }
    let all = [a, b, others[0], others[1]].map(|guest| lab.ask_to_merge(&[guest]));
    lab.grant();
    let [a, b, c, d] = all.map(|told| told.try_recv().unwrap().unwrap());
    assert_eq!(a.saved_bytes + b.saved_bytes, 16 * 4096);
    assert_eq!(c.saved_bytes + d.saved_bytes, 100 * 4096);
    assert_eq!((a.pages, b.pages, c.pages, d.pages), (16, 16, 100, 100));
    assert_eq!(lab.status().saved_bytes, 116 * 4096);
}

#[test]
fn a_pass_is_not_finished_where_an_agent_did_not_answer() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(1);
    lab.world(|world| world.processes[a].manners = Manners::Stalls);
    let merged = lab.merge_now(&[a, b], ALL).unwrap();
    let causes = merged
        .left_alone
        .iter()
        .map(|its| (its.pid as usize, its.cause));
    let causes: Vec<_> = causes.collect();
    assert_eq!(
        (merged.finished, &causes[..]),
        (false, &[(a, Cause::Silent)][..])
    );
    lab.world(|world| world.processes[a].manners = Manners::Honest);
    let mut tries = 0;
    while lab.status().pages_sharing < 16 {
        lab.merge_now(&[a, b], ALL).unwrap();
        tries += 1;
        assert!(tries < 100, "{:?}", lab.status());
    }
}

/// The pages that it merged before are told of.
#[test]
fn an_agent_that_falls_silent_midway_has_its_merged_pages_counted() {
    let lab = Lab::new();
    let [a, b] = [lab.guest("d", 3), lab.guest("d", 3)];
    for guest in [a, b] {
        (0..3).for_each(|chunk| fill(&lab, guest, chunk * 512..chunk * 512 + 20, |page| 1 + page));
    }
    lab.rounds(1);
    lab.world(|world| world.processes[a].manners = Manners::Tires);
    let [own, other] = [a, b].map(|guest| lab.ask_to_merge(&[guest]));
    lab.grant();
    let [own, other] = [own, other].map(|told| told.try_recv().unwrap().unwrap());
    assert_eq!(own.pages, 20);
    assert_eq!(own.left_alone.len(), 1);
    assert_eq!(own.left_alone[0].cause, Cause::Silent);
    assert!(!own.finished);
    assert!(other.left_alone.is_empty());
}
