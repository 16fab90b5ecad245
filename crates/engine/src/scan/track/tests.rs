use std::sync::Arc;

use crate::domain::chunk::Chunk;
use sys::pagemap::Categories;

use super::*;
use crate::guest::change::Effects;
use crate::page::{Fingerprint, Slot, StoreId};
use crate::sync::lock;
use crate::testing::fake::Lab;

const PRESENT: Categories = Categories::PRESENT;

fn written() -> Categories {
    PRESENT.and(Categories::WRITTEN)
}

/// A chunk of 4 offered pages with these states and a stored set.
fn chunk(states: &[(usize, Tag)]) -> Arc<Chunk> {
    let lab = Lab::new();
    lab.guest("d", 1);
    let guest = lock(&lab.core.guests)[0].clone();
    let chunk = guest
        .domain
        .chunks
        .create((guest.number, guest.user.uid), 0, 0, wire::PageBits::EMPTY)
        .unwrap();
    let mut pages = chunk.lock();
    pages.offered = PageBits::FULL;
    for &(page, tag) in states {
        match tag {
            Tag::Candidate => pages.set_candidate(page, Fingerprint(70 + page as u128), StoreId(0)),
            Tag::Merged => {
                pages.set_planned(page, Slot(90 + page as u64));
                pages.stored.insert(page);
                pages.set(page, tag);
            }
            _ => pages.set(page, tag),
        }
    }
    drop(pages);
    chunk
}

const NEVER_AGAIN: Ages = Ages {
    round: 1,
    allowed: false,
    aging: Aging::All,
};

fn look(chunk: &Arc<Chunk>, seen: &Seen) -> (bool, Effects) {
    look_again(chunk, seen, NEVER_AGAIN)
}

/// Changes a chunk; gives the effects, which are not carried out.
fn change<T>(chunk: &Arc<Chunk>, act: impl FnOnce(&mut Change<'_>) -> T) -> (T, Effects) {
    let (_lab, guest) = Lab::with_guest();
    let mut change = guest.change(chunk).expect("nothing else is at work");
    let done = act(&mut change);
    (done, std::mem::take(&mut change.effects))
}

fn look_again(chunk: &Arc<Chunk>, seen: &Seen, ages: Ages) -> (bool, Effects) {
    change(chunk, |pages| observe(pages, seen, ages).waits)
}

fn seen(parts: &[(usize, usize, Categories)]) -> Seen {
    let mut seen = Seen::default();
    parts
        .iter()
        .for_each(|&(first, end, categories)| seen.add(first, end, categories));
    seen
}

fn tags<const N: usize>(chunk: &Chunk) -> [Tag; N] {
    std::array::from_fn(|page| chunk.lock().tag(page))
}

#[test]
fn a_page_settles_after_two_quiet_scans() {
    let chunk = chunk(&[]);
    assert!(!look(&chunk, &seen(&[(0, 2, written())])).0);
    assert!(!look(&chunk, &seen(&[(0, 2, PRESENT)])).0);
    assert_eq!(tags(&chunk), [Tag::Resting, Tag::Resting]);
    let (waits, _) = look(&chunk, &seen(&[(0, 1, PRESENT), (1, 2, written())]));
    assert!(waits);
    assert_eq!(tags(&chunk), [Tag::Settled, Tag::Written]);
    assert!(!look(&chunk, &seen(&[])).0);
    assert_eq!(tags(&chunk), [Tag::Absent, Tag::Absent]);
}

#[test]
fn a_word_in_step_goes_the_way_of_its_pages() {
    let (zero, swapped) = (Categories::ZERO, Categories::SWAPPED);
    let sights = [
        PRESENT,
        written(),
        PRESENT.and(zero),
        written().and(swapped),
    ];
    let tags = [
        Tag::Absent,
        Tag::Written,
        Tag::Resting,
        Tag::Settled,
        Tag::Candidate,
    ];
    for (before, sight) in tags
        .iter()
        .flat_map(|tag| sights.map(|sight| (*tag, sight)))
    {
        let states: Vec<_> = (0..128).map(|page| (page, before)).collect();
        // The first word is seen whole; of the second one page is gone, so its pages go one by one.
        let chunk = chunk(&states);
        let (_lab, guest) = Lab::with_guest();
        let mut change = guest.change(&chunk).expect("nothing else is at work");
        observe(&mut change, &seen(&[(0, 127, sight)]), NEVER_AGAIN);
        let effects = std::mem::take(&mut change.effects);
        drop(change);
        let pages = chunk.lock();
        let after = pages.tag(0);
        assert!(
            (0..127).all(|page| pages.tag(page) == after),
            "{before:?} {sight:?}"
        );
        for bits in [pages.busy, pages.still, pages.merged] {
            assert_eq!(bits.0[0] & u64::MAX >> 1, bits.0[1], "{before:?} {sight:?}");
            assert!(bits.0[0] == 0 || bits.0[0] == u64::MAX);
        }
        let counts = guest.counters.classes();
        assert_eq!(counts.iter().sum::<u64>(), 127);
        assert_eq!(
            pages.class(0).map(|class| counts[class as usize]),
            Some(127)
        );
        let forgotten = if before == Tag::Candidate && after != before {
            128
        } else {
            0
        };
        let gone = if before == Tag::Candidate { 1 } else { 0 };
        assert_eq!(effects.forget.len(), forgotten.max(gone));
    }
}

#[test]
fn a_written_or_vanished_candidate_leaves_the_index() {
    let chunk = chunk(&[
        (0, Tag::Candidate),
        (1, Tag::Candidate),
        (2, Tag::Candidate),
    ]);
    let (_, effects) = look(&chunk, &seen(&[(0, 1, PRESENT), (1, 2, written())]));
    assert_eq!(tags(&chunk), [Tag::Candidate, Tag::Written, Tag::Absent]);
    let gone = [1, 2].map(|page| {
        let key = Fingerprint(70 + page as u128);
        (StoreId(0), key, chunk.lock().site(page))
    });
    assert_eq!(effects.forget, gone);
}

#[test]
fn a_merged_page_breaks_only_when_a_second_look_says_so() {
    let merged = [0, 1, 2, 3, 4].map(|page| (page, Tag::Merged));
    let chunk = chunk(&merged);
    // Untouched, touched before, touched lately, written, a marker of reclaim.
    let marker = Categories::SWAPPED;
    let mut seen = seen(&[(1, 2, PRESENT), (2, 4, written()), (4, 5, marker)]);
    assert!(needs_second_look(&chunk.lock(), &seen));
    seen.add_file(1..3);
    let (_, effects) = look(&chunk, &seen);
    let still = Tag::Merged;
    assert_eq!(tags(&chunk), [still, still, still, Tag::Broken, still]);
    assert_eq!(effects.leave, [Slot(93)]);
}

#[test]
fn a_broken_page_settles_anew_where_that_is_safe() {
    let chunk = chunk(&[(0, Tag::Merged), (1, Tag::Merged)]);
    let again = |allowed, all| Ages {
        round: 1,
        allowed,
        aging: if all { Aging::All } else { Aging::Anonymous },
    };
    let states = |show: Categories, ages: Ages| {
        let (_, effects) = look_again(&chunk, &seen(&[(0, 2, show)]), ages);
        (tags(&chunk), effects.leave.len())
    };
    chunk.lock().offered.remove(1);
    let withdrawn = Tag::Broken;
    let is = |tag: Tag| ([tag, withdrawn], 0);
    let broken = states(written(), again(true, false));
    assert_eq!(broken, ([Tag::Written, withdrawn], 2));
    assert_eq!(states(PRESENT, again(true, false)), is(Tag::Written));
    assert_eq!(states(PRESENT, again(true, true)), is(Tag::Resting));
    assert_eq!(states(PRESENT, again(true, true)), is(Tag::Settled));
    assert_eq!(states(PRESENT, again(false, true)), is(Tag::Broken));
    assert_eq!(states(PRESENT, again(false, true)), is(Tag::Broken));
    assert_eq!(states(PRESENT, again(true, true)), is(Tag::Written));
    assert_eq!(states(PRESENT, again(true, true)), is(Tag::Resting));
    assert_eq!(states(written(), again(true, false)), is(Tag::Written));
}

const AT_ONCE: Ages = Ages {
    round: 1,
    allowed: true,
    aging: Aging::AtOnce,
};

#[test]
fn anonymous_pages_settle_at_once_where_that_is_asked_for() {
    let tags_before = [Tag::Absent, Tag::Written, Tag::Resting, Tag::Candidate];
    let states: Vec<_> = (0..64)
        .map(|page| (page, tags_before[page / 16]))
        .chain([(64, Tag::Pinned), (65, Tag::Skipped), (66, Tag::Resting)])
        .collect();
    let chunk = chunk(&states);
    chunk.lock().give_up(65);
    // What is written has just been armed: a borrower from before is looked for after that only.
    let (waits, _) = look_again(
        &chunk,
        &seen(&[(0, 48, written()), (48, 67, PRESENT)]),
        AT_ONCE,
    );
    let found: [Tag; 67] = tags(&chunk);
    assert!(
        waits && found[..48].iter().all(|tag| *tag == Tag::Written),
        "{found:?}"
    );
    let (waits, effects) = look_again(&chunk, &seen(&[(0, 66, PRESENT)]), AT_ONCE);
    assert!(waits && effects == Effects::default());
    let found: [Tag; 67] = tags(&chunk);
    assert!(
        found[..48].iter().all(|tag| *tag == Tag::Settled),
        "{found:?}"
    );
    assert!(
        found[48..64].iter().all(|tag| *tag == Tag::Candidate),
        "{found:?}"
    );
    assert_eq!(found[64..], [Tag::Settled, Tag::Skipped, Tag::Absent]);
    let (_, effects) = look_again(&chunk, &seen(&[(0, 66, written())]), AT_ONCE);
    assert_eq!(effects.forget.len(), 16, "what was written is read again");
    let swapped = written().and(Categories::SWAPPED);
    look_again(
        &chunk,
        &seen(&[(0, 64, swapped), (64, 66, written())]),
        AT_ONCE,
    );
    assert_eq!(tags::<1>(&chunk), [Tag::Written], "and not read back in");
}

#[test]
fn a_whole_word_settles_at_once_as_its_pages_do() {
    let chunk = chunk(&[]);
    look_again(&chunk, &seen(&[(0, 128, written())]), AT_ONCE);
    assert!(tags::<128>(&chunk).iter().all(|tag| *tag == Tag::Written));
    look_again(&chunk, &seen(&[(0, 128, PRESENT)]), AT_ONCE);
    assert!(tags::<128>(&chunk).iter().all(|tag| *tag == Tag::Settled));
}

/// No look sees their pins, so they take their two periods, whatever is asked for.
#[test]
fn pages_in_a_mapping_of_a_store_never_settle_at_once() {
    let chunk = chunk(&[
        (0, Tag::Merged),
        (1, Tag::Broken),
        (2, Tag::Written),
        (3, Tag::Resting),
        (4, Tag::Pinned),
        (5, Tag::Absent),
    ]);
    (0..6).for_each(|page| chunk.lock().stored.insert(page));
    chunk.lock().back_off(4, Tag::Pinned);
    for show in [written(), PRESENT, PRESENT, PRESENT] {
        look_again(&chunk, &seen(&[(0, 6, show)]), AT_ONCE);
        let found: [Tag; 6] = tags(&chunk);
        assert!(!found.contains(&Tag::Settled), "{found:?}");
    }
}

#[test]
fn pages_of_a_former_engine_are_foreign_until_they_are_written() {
    let chunk = chunk(&[]);
    chunk.lock().stored = PageBits::FULL;
    let again = Ages {
        round: 1,
        allowed: true,
        aging: Aging::All,
    };
    look_again(&chunk, &seen(&[(0, 2, PRESENT)]), again);
    assert_eq!(tags(&chunk), [Tag::Foreign, Tag::Foreign]);
    let mut seen = seen(&[(0, 2, written())]);
    seen.add_file(1..2);
    look_again(&chunk, &seen, again);
    assert_eq!(tags(&chunk), [Tag::Written, Tag::Foreign]);
}

#[test]
fn quiet_merged_pages_need_no_second_look() {
    let chunk = chunk(&[(0, Tag::Merged), (1, Tag::Written)]);
    assert!(!needs_second_look(
        &chunk.lock(),
        &seen(&[(0, 1, PRESENT), (1, 2, written())])
    ));
}

#[test]
fn swapped_pages_are_not_read_back_in() {
    let chunk = chunk(&[(0, Tag::Resting), (1, Tag::Candidate)]);
    let (waits, _) = look(&chunk, &seen(&[(0, 2, Categories::SWAPPED)]));
    assert!(!waits);
    assert_eq!(tags(&chunk), [Tag::Written, Tag::Candidate]);
}

#[test]
fn what_the_agent_takes_away_is_given_up() {
    let chunk = chunk(&[
        (0, Tag::Merged),
        (1, Tag::Merged),
        (2, Tag::Candidate),
        (3, Tag::Zero),
    ]);
    let (mut offered, mut stored) = (PageBits::EMPTY, PageBits::EMPTY);
    offered.insert(0);
    stored.insert(1);
    let ((), effects) = change(&chunk, |pages| set_bits(pages, offered, stored));
    assert_eq!(
        tags(&chunk),
        [Tag::Written, Tag::Merged, Tag::Absent, Tag::Absent],
        "of what is offered still the scan tells whether it is there"
    );
    assert_eq!((effects.leave, effects.forget.len()), (vec![Slot(90)], 1));
}
