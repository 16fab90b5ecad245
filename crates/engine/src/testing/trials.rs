//! The stages together, in a fake world, one story each.

use std::sync::Mutex;
use std::time::Duration;

use wire::{PageOutcome, RunMode};

use crate::page::StoreId;
use crate::run::core::{Core, Crew, Scratch};
use crate::run::waiting::Timing;
use crate::run::workers::{Alone, Workers};
use crate::sync::lock;
use crate::testing::fake::{Lab, Manners, Place};

pub(crate) fn fill(
    lab: &Lab,
    guest: usize,
    pages: impl IntoIterator<Item = u64>,
    content: impl Fn(u64) -> u64,
) {
    lab.world(|world| {
        pages
            .into_iter()
            .for_each(|page| world.write(guest, page, content(page)))
    });
}

pub(crate) fn slot(lab: &Lab, guest: usize, page: u64) -> Option<u64> {
    lab.world(|world| match world.processes[guest].pages.get(&page) {
        Some(Place::Slot { slot, .. }) => Some(*slot),
        _ => None,
    })
}

pub(crate) fn twins(lab: &Lab) -> [usize; 2] {
    let guests = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in guests {
        fill(lab, guest, 100..116, |page| page);
    }
    guests
}

#[test]
fn equal_pages_meet_after_two_quiet_periods() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    fill(&lab, a, 7..8, |_| 1_000_001);
    lab.rounds(2);
    let status = lab.status();
    assert_eq!(
        (status.pages_volatile, status.pages_unshared),
        (33, 0),
        "not settled yet"
    );
    let foretold = status.first_merges_ms.expect("some are to be merged");
    assert!(foretold <= status.effective_period_ms, "{foretold} ms");
    lab.round();
    let status = lab.status();
    assert_eq!(status.first_merges_ms, None);
    assert_eq!((status.pages_shared, status.pages_sharing), (16, 16));
    assert_eq!((status.pages_unshared, status.pages_volatile), (1, 0));
    assert_eq!(status.saved_bytes, 16 * 4096);
    let first = slot(&lab, a, 100).unwrap();
    for guest in [a, b] {
        let slots: Vec<_> = (100..116)
            .map(|page| slot(&lab, guest, page).unwrap())
            .collect();
        assert_eq!(
            slots,
            (first..first + 16).collect::<Vec<_>>(),
            "neighbours get neighbours"
        );
    }
    assert_eq!(lab.world(|world| world.frames("d")), 16);
}

#[test]
fn a_page_is_read_once() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    fill(&lab, a, 0..5, |page| 500 + page);
    lab.rounds(8);
    let reads = lab.world(|world| [a, b].map(|guest| world.processes[guest].reads));
    assert_eq!(reads, [21, 16]);
    fill(&lab, a, 0..1, |_| 77);
    lab.rounds(8);
    assert_eq!(lab.world(|world| world.processes[a].reads), 22);
}

#[test]
fn calm_memory_is_looked_at_half_as_often() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    let scans = || lab.world(|world| [a, b].map(|guest| world.processes[guest].scans));
    lab.rounds(8);
    let before = scans();
    lab.rounds(20);
    assert_eq!(scans(), before.map(|scans| scans + 10));
    fill(&lab, a, 100..101, |_| 5);
    lab.rounds(2);
    let status = lab.status();
    assert_eq!((status.pages_sharing, status.pages_volatile), (15, 1));
    let before = scans();
    lab.rounds(2);
    assert_eq!(
        scans(),
        [before[0] + 2, before[1] + 1],
        "the other one rests"
    );
    assert_eq!(lab.status().pages_volatile, 0);
    // An engine that breaks everything leaves nothing out.
    lab.rounds(8);
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Unmerge)]);
    lab.round();
    assert_eq!(lab.status().pages_sharing, 0);
}

#[test]
fn a_page_written_in_every_period_is_left_alone() {
    let lab = Lab::new();
    let [a, _] = twins(&lab);
    for round in 0..6 {
        fill(&lab, a, 100..116, |_| 9000 + round);
        lab.round();
    }
    let status = lab.status();
    assert_eq!((status.pages_volatile, status.pages_unshared), (16, 16));
    assert_eq!(lab.world(|world| world.processes[a].reads), 0);
}

#[test]
fn what_fork_shares_is_not_read() {
    let lab = Lab::new();
    let [a, _] = twins(&lab);
    lab.world(|world| world.processes[a].forked.extend(100..116));
    lab.rounds(4);
    assert_eq!(lab.world(|world| world.processes[a].reads), 0);
    assert_eq!(lab.status().pages_sharing, 0);
    lab.world(|world| world.processes[a].forked.clear());
    lab.rounds(8);
    assert_eq!(lab.status().pages_sharing, 16, "the child has ended");
}

#[test]
fn twins_inside_one_chunk_share_too() {
    let lab = Lab::new();
    let a = lab.guest("d", 2);
    fill(&lab, a, 0..200, |page| 1 + page % 5);
    fill(&lab, a, 600..700, |page| 1 + page % 5);
    lab.rounds(4);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (5, 295));
    assert_eq!(lab.world(|world| world.frames("d")), 5);
}

#[test]
fn zero_pages_are_given_back_without_slots() {
    let lab = Lab::new();
    let a = lab.guest("d", 1);
    fill(&lab, a, 0..9, |_| 0);
    lab.rounds(3);
    let status = lab.status();
    assert_eq!((status.zero_pages, status.saved_bytes), (9, 9 * 4096));
    fill(&lab, a, 0..1, |_| 5);
    lab.round();
    assert_eq!(
        (lab.status().zero_pages, lab.status().pages_volatile),
        (8, 1)
    );
    let off = wire::Setting::UseZeroPages(false);
    lab.core.knobs.turn([off]);
    fill(&lab, a, 20..24, |_| 0);
    lab.rounds(4);
    let status = lab.status();
    assert_eq!(
        (status.zero_pages, status.pages_shared, status.pages_sharing),
        (8, 1, 3)
    );
}

#[test]
fn a_guest_that_rewrites_its_memory_goes_on_sharing() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(4);
    for generation in 1..=200 {
        let content = |page| generation * 1000 + page;
        fill(&lab, a, 100..116, content);
        fill(&lab, b, 100..116, content);
        lab.rounds(4);
        let status = lab.status();
        assert_eq!(
            (status.pages_shared, status.pages_sharing),
            (16, 16),
            "generation {generation}"
        );
        assert_eq!(status.pages_merged_again, 32 * generation);
        assert_eq!(lab.world(|world| world.frames("d")), 16, "nothing leaks");
    }
    fill(&lab, a, 100..116, |_| 0);
    lab.rounds(4);
    assert_eq!(lab.status().zero_pages, 16);
}

#[test]
fn a_huge_page_is_split_only_when_that_is_worth_it() {
    let lab = Lab::new();
    let guests = [lab.guest("d", 2), lab.guest("d", 2)];
    for guest in guests {
        lab.world(|world| world.processes[guest].huge = (0..2).collect());
        fill(&lab, guest, 0..1024, |page| match page {
            0..16 | 512..812 => page + 1,
            _ => 100_000 * (guest as u64 + 1) + page,
        });
    }
    let state = || {
        let status = lab.status();
        (status.pages_sharing, status.huge_pages_kept)
    };
    lab.core.knobs.turn([wire::Setting::Thp(wire::Thp::Keep)]);
    lab.rounds(5);
    assert_eq!(state(), (0, 4));
    lab.core.knobs.turn([wire::Setting::Thp(wire::Thp::Auto)]);
    lab.rounds(70);
    assert_eq!(
        state(),
        (300, 2),
        "the chunks with most pages saved are split"
    );
    lab.core.knobs.turn([wire::Setting::Thp(wire::Thp::Split)]);
    lab.rounds(70);
    assert_eq!(state(), (316, 0));
}

#[test]
fn no_slot_is_written_for_a_huge_page_that_stays_whole() {
    let lab = Lab::new();
    let guests = [lab.guest("d", 1), lab.guest("d", 1)];
    for guest in guests {
        lab.world(|world| world.processes[guest].huge = (0..1).collect());
        fill(&lab, guest, 0..512, |page| match page {
            0..16 | 32..40 => page % 32 + 1,
            _ => 100_000 * (guest as u64 + 1) + page,
        });
    }
    let spent = || {
        let domain = lab.core.domain("d").unwrap();
        let run = domain.slots.take_run(StoreId::default()).unwrap();
        let first = run.start;
        domain.slots.give_back(run);
        first
    };
    for thp in [wire::Thp::Keep, wire::Thp::Auto] {
        lab.core.knobs.turn([wire::Setting::Thp(thp)]);
        lab.rounds(20);
        assert_eq!(lab.status().pages_sharing, 0);
        assert_eq!(lab.status().huge_pages_kept, 2);
        assert_eq!(spent(), 0, "no number of a slot was given out");
    }
    lab.core.knobs.turn([wire::Setting::Thp(wire::Thp::Split)]);
    lab.rounds(70);
    let status = lab.status();
    assert_eq!(status.pages_shared + status.pages_sharing, 48);
}

#[test]
fn nothing_is_merged_again_while_something_may_be_pinned() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(4);
    lab.world(|world| world.pin(a, 300));
    for guest in [a, b] {
        fill(&lab, guest, 100..116, |page| 5000 + page);
    }
    lab.rounds(6);
    let status = lab.status();
    assert_eq!((status.pages_broken, status.pages_sharing), (16, 0));
    assert_eq!(status.guests[0].pins.as_deref(), Some("1 pages"));
    lab.world(|world| world.processes[a].pinned.clear());
    lab.rounds(6);
    let status = lab.status();
    assert_eq!((status.pages_broken, status.pages_sharing), (0, 16));
    let off = wire::Setting::MergeAgain(false);
    lab.core.knobs.turn([off]);
    fill(&lab, a, 100..108, |page| 7000 + page);
    lab.rounds(6);
    assert_eq!(lab.status().pages_broken, 8);
}

/// Pins come between the looks and the visits.
struct PinsBetween(Alone);

impl Crew for PinsBetween {
    fn look(&self, core: &Core, timing: &Timing) {
        self.0.look(core, timing);
        for guest in lock(&core.guests).iter() {
            guest.set_merges_again(false);
        }
    }

    fn work(&self, core: &Core, timing: &Timing) {
        self.0.work(core, timing);
    }
}

#[test]
fn broken_pages_that_are_not_to_be_merged_are_not_read() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(4);
    for guest in [a, b] {
        fill(&lab, guest, 100..116, |page| 5000 + page);
    }
    let read = || lab.world(|world| (world.processes[a].reads, world.processes[b].reads));
    let (before, written) = (read(), lab.world(|world| world.frames("d")));
    let pins = PinsBetween(Alone(Mutex::new(Scratch::new())));
    (0..6).for_each(|_| lab.round_by(&pins));
    assert_eq!(read(), before);
    assert!(
        lab.world(|world| world.frames("d")) <= written,
        "no slot is published"
    );
    lab.rounds(6);
    assert_eq!(lab.status().pages_sharing, 16, "the pins are gone");
}

#[test]
fn a_broken_page_releases_its_slot_when_no_child_is_left() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    lab.world(|world| world.fork(a));
    fill(&lab, a, 100..101, |_| 4444);
    fill(&lab, b, 100..101, |_| 5555);
    lab.rounds(6);
    let status = lab.status();
    assert_eq!((status.pages_unshared, status.pages_shared), (2, 15));
    assert_eq!(
        lab.world(|world| world.frames("d")),
        16,
        "the child still maps it"
    );
    lab.world(|world| world.end_child(a));
    lab.round();
    assert_eq!(lab.world(|world| world.frames("d")), 15);
    lab.world(|world| world.discard(a, 100));
    fill(&lab, a, 100..101, |_| 4445);
    lab.rounds(4);
    assert_eq!(
        (lab.status().pages_broken, lab.status().pages_unshared),
        (0, 2)
    );
}

#[test]
fn recycled_pages_are_counted_once_by_their_way() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    let recycled = || {
        let wire::Recycled {
            discarded,
            zeroed,
            told,
        } = lab.status().pages_recycled;
        (discarded, zeroed, told)
    };
    assert_eq!(recycled(), (0, 0, 0));
    // Merged pages, discarded and told of; and one that is used again at once.
    lab.world(|world| (100..105).for_each(|page| world.discard(a, page)));
    lab.world(|world| (105..108).for_each(|page| world.discard(b, page)));
    fill(&lab, a, 104..105, |_| 77);
    lab.world(|world| world.processes[b].told = 3);
    lab.rounds(2);
    assert_eq!(recycled(), (4, 0, 3));
    // Pages of their own, and pages filled with zeros, merged ones among them.
    fill(&lab, a, 300..310, |page| page);
    lab.rounds(4);
    lab.world(|world| (300..305).for_each(|page| world.discard(a, page)));
    fill(&lab, a, 305..312, |_| 0);
    fill(&lab, a, 110..112, |_| 0);
    lab.rounds(5);
    assert_eq!(recycled(), (9, 9, 3));
    // What is told of and was not there is no credit for what goes later.
    lab.world(|world| world.processes[a].told = 1000);
    lab.rounds(3);
    lab.world(|world| world.discard(a, 306));
    fill(&lab, a, 400..402, |page| page);
    lab.rounds(2);
    lab.world(|world| (400..402).for_each(|page| world.discard(a, page)));
    lab.rounds(2);
    assert_eq!(recycled(), (11, 9, 3), "a zero page has no frame");
    lab.world(|world| world.kill(a));
    lab.rounds(3);
    assert_eq!(recycled(), (11, 9, 3), "guests that have gone count on");
}

#[test]
fn a_guest_that_dies_leaves_nothing_behind() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    lab.world(|world| world.kill(b));
    lab.round();
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (16, 0));
    assert_eq!(status.guests.len(), 1);
    lab.world(|world| world.fork(a));
    lab.world(|world| world.kill(a));
    lab.rounds(3);
    assert_eq!(lab.world(|world| world.frames("d")), 16, "for the child");
    assert_eq!(lab.status().guests.len(), 0);
    lab.world(|world| world.end_child(a));
    lab.round();
    assert_eq!(lab.world(|world| world.frames("d")), 0);
    assert!(lock(&lab.core.domains).is_empty() && lock(&lab.core.guests).is_empty());
}

#[test]
fn a_lost_connection_is_no_evidence() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    lab.world(|world| world.processes[b].connection = 0);
    lab.rounds(5);
    assert_eq!(lab.world(|world| world.frames("d")), 16);
    assert_eq!(lab.status().guests.len(), 1);
    lab.connect(b);
    fill(&lab, b, 0..16, |page| page + 100);
    lab.world(|world| (100..116).for_each(|page| world.touch(b, page)));
    lab.rounds(4);
    let status = lab.status();
    assert_eq!(
        (status.pages_shared, status.pages_sharing),
        (16, 32),
        "new pages merge, and what was merged before is adopted"
    );
    assert_eq!(status.pages_skipped, 0);
    lab.world(|world| (100..116).for_each(|page| world.discard(b, page)));
    lab.world(|world| world.kill(a));
    lab.rounds(3);
    assert_eq!(lab.status().pages_shared, 16);
    lab.world(|world| world.kill(b));
    lab.rounds(2);
    assert_eq!(lab.world(|world| world.frames("d")), 0);
}

#[test]
fn a_late_answer_counts_when_it_comes() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(2);
    for late in [a, b] {
        lab.world(|world| world.processes[late].manners = Manners::Stalls);
    }
    lab.rounds(2);
    let status = lab.status();
    assert!(status.guests.iter().all(|guest| !guest.responsive));
    for late in [a, b] {
        lab.world(|world| world.processes[late].manners = Manners::Honest);
    }
    lab.rounds(3);
    assert_eq!(
        (lab.status().pages_shared, lab.status().pages_sharing),
        (16, 16)
    );
    // Late in the middle of a merge, and dead before it answers.
    fill(&lab, a, 300..310, |page| page);
    fill(&lab, b, 300..310, |page| page);
    lab.rounds(2);
    lab.world(|world| world.processes[b].manners = Manners::Honest);
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Stop)]);
    lab.round();
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    lab.world(|world| world.kill(b));
    lab.rounds(4);
    assert_eq!(lab.status().pages_unshared, 10);
}

#[test]
fn liars_lose_their_guest_and_nobody_else() {
    for manners in [Manners::Invents, Manners::Forgets, Manners::Confuses] {
        let lab = Lab::new();
        let [a, b] = twins(&lab);
        let liar = lab.guest("d", 1);
        fill(&lab, liar, 100..116, |page| page);
        lab.rounds(2);
        lab.world(|world| world.processes[liar].manners = manners);
        lab.rounds(3);
        let status = lab.status();
        assert_eq!(status.guests.len(), 2, "{manners:?}");
        assert_eq!(
            (status.pages_shared, status.pages_sharing),
            (16, 16),
            "{manners:?}"
        );
        lab.world(|world| [a, b, liar].map(|guest| world.kill(guest)));
        lab.rounds(2);
        assert_eq!(lab.world(|world| world.frames("d")), 0, "{manners:?}");
    }
}

#[test]
fn refused_pages_wait_longer_each_time() {
    for (outcome, pinned) in [
        (PageOutcome::Pinned, 16),
        (PageOutcome::Again, 0),
        (PageOutcome::NoRoom, 0),
    ] {
        let lab = Lab::new();
        let [a, b] = twins(&lab);
        lab.world(|world| world.processes[b].manners = Manners::Refuses(outcome));
        lab.rounds(130);
        let status = lab.status();
        assert_eq!((status.pages_pinned, status.pages_skipped), (pinned, 16));
        let reads = lab.world(|world| world.processes[b].reads) / 16;
        assert!(
            (5..=9).contains(&reads),
            "{outcome:?}: {reads} tries in 130 rounds"
        );
        lab.world(|world| world.processes[b].manners = Manners::Honest);
        lab.rounds(66);
        assert_eq!(lab.status().pages_sharing, 16);
        let _ = a;
    }
}

#[test]
fn unsupported_pages_are_tried_again_only_when_written() {
    let lab = Lab::new();
    let [_, b] = twins(&lab);
    lab.world(|world| world.processes[b].manners = Manners::Refuses(PageOutcome::Unsupported));
    lab.rounds(3);
    lab.world(|world| world.processes[b].manners = Manners::Honest);
    lab.rounds(200);
    assert_eq!(
        (
            lab.status().pages_skipped,
            lab.world(|world| world.processes[b].reads)
        ),
        (16, 16)
    );
    fill(&lab, b, 100..116, |page| page);
    lab.rounds(4);
    assert_eq!(lab.status().pages_sharing, 16);
}

#[test]
fn domains_share_nothing() {
    let lab = Lab::new();
    let (a, b) = (lab.guest("one", 1), lab.guest("two", 1));
    fill(&lab, a, 0..8, |page| page + 1);
    fill(&lab, b, 0..8, |page| page + 1);
    lab.rounds(5);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_unshared), (0, 16));
}

#[test]
fn stop_merges_nothing_and_unmerge_makes_all_private() {
    let lab = Lab::new();
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Stop)]);
    let [a, b] = twins(&lab);
    lab.rounds(5);
    assert_eq!(
        (lab.status().pages_volatile, lab.status().pages_shared),
        (32, 0)
    );
    lab.core.knobs.turn([wire::Setting::Run(RunMode::Run)]);
    lab.round();
    assert_eq!(lab.status().pages_sharing, 16);
    lab.world(|world| world.processes[a].manners = Manners::Stalls);
    lab.unmerge();
    assert_eq!(lab.status().pages_broken, 16);
    lab.world(|world| world.processes[a].manners = Manners::Honest);
    lab.unmerge();
    lab.unmerge();
    let status = lab.status();
    assert_eq!(
        (status.pages_broken, status.pages_shared, status.saved_bytes),
        (32, 0, 0)
    );
    lab.rounds(2);
    assert_eq!(lab.world(|world| world.frames("d")), 0);
    let _ = b;
}

#[test]
fn withdrawn_chunks_leave_the_index() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    fill(&lab, a, 200..210, |page| page);
    lab.rounds(4);
    assert_eq!(lab.status().pages_unshared, 10);
    lab.world(|world| world.offer(a, 0, false));
    lab.rounds(3);
    let status = lab.status();
    assert_eq!(
        (
            status.pages_unshared,
            status.pages_sharing,
            status.pages_shared
        ),
        (0, 0, 16)
    );
    let domain = lab.core.domain("d").unwrap();
    assert_eq!(domain.index(StoreId(0)).len(), 16);
    lab.world(|world| world.offer(a, 0, true));
    lab.rounds(4);
    assert_eq!(
        (lab.status().pages_sharing, lab.status().pages_unshared),
        (16, 10)
    );
    let _ = b;
}

#[test]
fn mappings_are_spent_on_long_runs() {
    let lab = Lab::new();
    let [a, b] = [lab.guest("d", 1), lab.guest("d", 1)];
    // Half of the budget of 49148 and a third of the rest: shorter runs than 16 are left out.
    for guest in [a, b] {
        lab.world(|world| world.processes[guest].vmas = 24574 + 8300);
    }
    lab.rounds(17); // mappings of quiet guests are counted now and then
    // Runs of 1, 2, 4 … 128 pages between private ones, more of them than are enclosed.
    let mut at = 0;
    for length in (0..8).map(|power| 1u64 << power) {
        for guest in [a, b] {
            fill(&lab, guest, at..at + length, |page| page + 1);
            fill(&lab, guest, at + length..at + length + 9, |page| {
                7000 + guest as u64 * 1000 + page
            });
        }
        at += length + 9;
    }
    lab.rounds(20);
    let status = lab.status();
    assert_eq!(
        (status.pages_shared, status.pages_skipped),
        (16 + 32 + 64 + 128, 15)
    );
    for guest in [a, b] {
        lab.world(|world| world.processes[guest].vmas = 10);
    }
    lab.rounds(90);
    assert_eq!(
        (lab.status().pages_shared, lab.status().pages_skipped),
        (255, 0)
    );
}

#[test]
fn many_workers_agree() {
    let options = crate::options::Options {
        knobs: wire::KnobValues {
            threads: 4,
            ..wire::KnobValues::default()
        },
        patience: Duration::from_millis(200),
        ..crate::options::Options::default()
    };
    let lab = Lab::with(options);
    let guests: Vec<_> = (0..6).map(|_| lab.guest("d", 3)).collect();
    for &guest in &guests {
        fill(&lab, guest, 0..1536, |page| match page % 4 {
            0 => 0,
            1 => page + 10_000 * guest as u64 + 10_000,
            _ => page,
        });
    }
    let crew = Workers::new(std::sync::Arc::clone(&lab.core), Duration::from_secs(60));
    // On a busy machine a round ends before all is done, and one that finds nothing to do is over before a thread
    // that was interrupted goes on.
    let rounds_while = |unfinished: &dyn Fn() -> bool| {
        let begin = std::time::Instant::now();
        while unfinished() && begin.elapsed() < Duration::from_secs(60) {
            lab.round_by(&crew);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    (0..4).for_each(|_| lab.round_by(&crew));
    rounds_while(&|| lab.status().pages_sharing < 768 * 5);
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (768, 768 * 5));
    assert_eq!(
        (status.zero_pages, status.pages_unshared),
        (384 * 6, 384 * 6)
    );
    // A guest without content stays, and with it the domain: one that ends takes frames along that still wait.
    lab.guest("d", 1);
    for &guest in &guests {
        lab.world(|world| world.kill(guest));
    }
    lab.round_by(&crew);
    rounds_while(&|| lab.world(|world| world.frames("d")) > 0);
    assert_eq!(lab.world(|world| world.frames("d")), 0);
    crew.stop();
}

/// Workers, and whether the grace was over each time when the looks were.
struct Timed(Workers, Mutex<Vec<bool>>);

impl Crew for Timed {
    fn look(&self, core: &Core, timing: &Timing) {
        self.0.look(core, timing);
        lock(&self.1).push(timing.grace_is_over());
    }

    fn work(&self, core: &Core, timing: &Timing) {
        self.0.work(core, timing);
    }
}

#[test]
fn work_waits_once_for_an_agent_that_was_prompt() {
    let options = crate::options::Options {
        patience: Duration::from_millis(1500),
        ..crate::options::Options::default()
    };
    let lab = Lab::with(options);
    let [late, _] = twins(&lab);
    let crew = Workers::new(std::sync::Arc::clone(&lab.core), Duration::from_secs(60));
    let crew = Timed(crew, Mutex::default());
    lab.rounds(2);
    lab.world(|world| world.processes[late].manners = Manners::Stalls);
    (0..2).for_each(|_| lab.round_by(&crew));
    assert_eq!(*lock(&crew.1), [true, false], "it was prompt, then late");
    crew.0.stop();
}

#[test]
fn a_guest_whose_memory_hangs_costs_a_thread_and_no_more() {
    let options = crate::options::Options {
        knobs: wire::KnobValues {
            threads: 1,
            ..wire::KnobValues::default()
        },
        ..crate::options::Options::default()
    };
    let lab = Lab::with(options);
    let [a, b] = twins(&lab);
    let hostile = lab.guest("d", 1);
    fill(&lab, hostile, 100..116, |page| page);
    let hang = std::sync::Arc::new((std::sync::Mutex::new(true), std::sync::Condvar::new()));
    lab.world(|world| world.processes[hostile].hangs = Some(hang.clone()));
    let crew = Workers::new(std::sync::Arc::clone(&lab.core), Duration::from_millis(300));
    (0..4).for_each(|_| lab.round_by(&crew));
    let merged = |lab: &Lab| (lab.status().pages_shared, lab.status().pages_sharing);
    assert_eq!(merged(&lab), (16, 16));
    // It may be honest, and slow: it rests, and is not read again.
    assert_eq!(lab.core.users.stuck_threads(), 1);
    assert_eq!(lab.status().guests.len(), 3);
    while lab.status().guests.len() > 2 {
        std::thread::sleep(Duration::from_millis(20));
        crew.watch();
        lab.round_by(&crew);
    }
    assert_eq!(
        (merged(&lab), lab.core.users.stuck_threads()),
        ((16, 16), 1)
    );
    lab.world(|world| {
        for guest in [a, b, hostile] {
            world.kill(guest);
        }
    });
    *lock(&hang.0) = false;
    hang.1.notify_all();
    // The thread given up still ends its job. It runs on idle CPUs only.
    let begin = std::time::Instant::now();
    while !lock(&lab.core.guests).is_empty() && begin.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
        lab.round_by(&crew);
    }
    assert!(lock(&lab.core.guests).is_empty() && lock(&lab.core.domains).is_empty());
    assert_eq!(lab.core.users.stuck_threads(), 0);
    crew.stop();
}
