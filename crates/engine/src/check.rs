//! The invariants, recomputed from the tables. Holds between rounds, when no worker is at work.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use wire::{CHUNK_PAGES, PageBits};

use crate::domain::Domain;
use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::guest::{Guest, Standing};
use crate::options::Rules;
use crate::page::{CLASSES, Entry, Slot, StoreId, Tag};
use crate::run::core::Core;
use crate::sync::lock;

/// What the page tables say of a slot: refs they hold, pages that map it.
#[derive(Default)]
struct Held {
    refs: u32,
    sites: u32,
}

/// Asserts I4, I5, I6 and I9 for all domains, and the invariants of their heaps of slots. Does nothing while a stuck worker holds a chunk.
///
/// # Panics
/// When an invariant does not hold.
pub(crate) fn check(core: &Core) {
    let domains: Vec<_> = lock(&core.domains).values().cloned().collect();
    let guests: Vec<_> = lock(&core.guests).clone();
    for domain in &domains {
        domain.slots.check();
        let view = domain.slots.view();
        domain.slots.chains.check(|slot| view.is_alive(slot));
        drop(view);
        let own: Vec<_> = guests
            .iter()
            .filter(|guest| Arc::ptr_eq(&guest.domain, domain))
            .collect();
        let mut held = HashMap::new();
        for &slot in lock(&domain.former).waiting() {
            held.entry(slot).or_insert_with(Held::default).refs += 1;
        }
        if own.iter().all(|guest| check_guest(guest, &mut held)) {
            check_slots(domain, &held, core.knobs.rules());
            domain
                .stores()
                .for_each(|home| check_index(domain, home, core.knobs.rules()));
        }
    }
    check_status(core);
}

/// I9, part one: the counters of a guest are those of its pages. False when a chunk is stuck.
fn check_guest(guest: &Guest, held: &mut HashMap<Slot, Held>) -> bool {
    if guest.is_stuck() {
        return false;
    }
    for slot in lock(&guest.ledger).waiting() {
        held.entry(slot).or_default().refs += 1;
    }
    let mut counts = [0u64; CLASSES];
    let mut stored = 0;
    for (&address, chunk) in &lock(&guest.offers).chunks {
        let Some(pages) = chunk.try_lock() else {
            return false;
        };
        assert_eq!(chunk.address, address);
        let known = guest.domain.chunks.get(chunk.id);
        let its_own = known.is_some_and(|known| Arc::ptr_eq(&known, chunk));
        assert!(its_own, "I6: chunk {} is not the domain's own", chunk.id);
        check_pages(chunk, &pages, &mut counts, held);
        stored += pages.stored.len() as u64;
        check_candidates(&guest.domain, chunk, &pages);
    }
    assert_eq!(guest.counters.stored(), stored, "stored of {}", guest.pid);
    let counted = guest.counters.classes();
    assert_eq!(counted, counts, "I9: the classes of {}", guest.pid);
    true
}

/// By words, for most hold pages of one kind only. A guest that offers one page of each of its chunks makes the
/// engine keep 512, and to check them is to take less time than a round.
fn check_pages(
    chunk: &Chunk,
    pages: &Pages,
    counts: &mut [u64; CLASSES],
    held: &mut HashMap<Slot, Held>,
) {
    let watched = pages.watched();
    for word in 0..CHUNK_PAGES / 64 {
        let mut check = |bits: u64, page: usize| {
            let tag = pages.tag(page);
            check_alike(chunk, pages, &watched, (word, bits, tag));
            if let Some(class) = pages.class(page) {
                counts[class as usize] += u64::from(bits.count_ones());
            }
            if tag.has_slot() {
                let ones = (0..64).filter(|bit| bits >> bit & 1 == 1);
                ones.for_each(|bit| hold(held, pages.slot(word * 64 + bit), tag));
            }
        };
        match pages.tag_of_word(word) {
            Some(_) => check(u64::MAX, word * 64),
            None => (0..64).for_each(|bit| check(1 << bit, word * 64 + bit)),
        }
    }
}

fn hold(held: &mut HashMap<Slot, Held>, slot: Slot, tag: Tag) {
    let held = held.entry(slot).or_default();
    held.refs += 1;
    held.sites += u32::from(tag == Tag::Merged);
}

/// The pages `bits` of a word, which are all of one kind, are in one set if they are there, and watched if they count.
fn check_alike(
    chunk: &Chunk,
    pages: &Pages,
    watched: &PageBits,
    (word, bits, tag): (usize, u64, Tag),
) {
    let sets = [&pages.busy, &pages.still, &pages.merged].map(|set| set.0[word] & bits);
    let in_one = sets[0] ^ sets[1] ^ sets[2];
    let in_all = sets[0] & sets[1] & sets[2];
    let wanted = if tag == Tag::Absent { 0 } else { bits };
    let in_any = sets[0] | sets[1] | sets[2];
    assert!(
        in_one == wanted && in_any == wanted && in_all == 0,
        "{tag:?} pages {bits:x} of word {word} of {} are in {sets:x?}",
        chunk.id
    );
    assert!(
        tag == Tag::Absent || watched.0[word] & bits == bits,
        "{tag:?} pages {bits:x} of word {word} of {} are not watched",
        chunk.id
    );
}

/// A candidate is in the index, or has been told that its entry went to a slot.
fn check_candidates(domain: &Domain, chunk: &Chunk, pages: &Pages) {
    let still = pages.still.pages();
    for page in still.filter(|&page| pages.tag(page) == Tag::Candidate) {
        let entry = domain.index(pages.home(page)).get(pages.fingerprint(page));
        let own = entry == Some(Entry::Candidate(pages.site(page)));
        assert!(
            own || chunk.has_promoted(),
            "candidate {page} of {} is lost: {entry:?}",
            chunk.id
        );
    }
}

/// I4 and I5: refs are exactly what the tables hold, nothing dead is held, nothing held is dead.
fn check_slots(domain: &Domain, held: &HashMap<Slot, Held>, rules: Rules) {
    let claims = domain.has_claims.load(Relaxed);
    let view = domain.slots.view();
    let mut shared = 0;
    for (&slot, held) in held {
        assert_eq!(
            view.counts(slot),
            (held.refs, held.sites),
            "I4: refs and sites of {slot}"
        );
        assert!(held.refs > 0, "I5: {slot} is held but dead");
        shared += u64::from(held.sites > 0);
        assert!(
            held.sites == 0 || view.is_named(slot) || claims,
            "{slot} is mapped, and no index names it"
        );
        assert!(
            held.sites <= rules.max_sharing || claims,
            "{slot} has {} sharers",
            held.sites
        );
    }
    for slot in view.live() {
        assert!(
            held.contains_key(&slot),
            "I4: {slot} has refs that no table holds"
        );
    }
    if !rules.across_nodes {
        let mapped = held.iter().filter(|(_, held)| held.sites > 0);
        let mut mapped: Vec<_> = mapped.map(|(&slot, _)| slot).collect();
        domain.check_frames(&view, &mut mapped);
    }
    assert_eq!(domain.slots.live(), held.len() as u64, "live slots");
    let astray = view.live().filter(|&slot| view.is_astray(slot)).count();
    assert_eq!(domain.slots.astray(), astray as u64, "slots astray");
    assert_eq!(domain.slots.shared(), shared, "I9: slots with a site");
}

/// Entries name live slots under their own key, and pages that are candidates under it. A slot that
/// is where the rules want none is from before a change, and no page is known to map it (I6).
fn check_index(domain: &Domain, home: StoreId, rules: Rules) {
    let claims = domain.has_claims.load(Relaxed);
    let view = domain.slots.view();
    let entries = domain.index(home).entries();
    entries.for_each(|(key, entry)| match entry {
        Entry::Canonical(slot) => {
            let wanted = match rules.across_nodes {
                true => home == StoreId::default(),
                false => home == slot.store(),
            };
            let sites = view.counts(slot).1;
            assert!(
                wanted || sites == 0 || claims,
                "I6: {slot} in index {}",
                home.0
            );
            assert!(
                view.counts(slot).0 > 0,
                "I5: the index names {slot}, which is dead"
            );
            assert_eq!(
                view.key(slot),
                Some(key),
                "{slot} is entered under another key"
            );
        }
        Entry::Candidate(site) => {
            let chunk = domain.chunks.get(site.chunk);
            let chunk = chunk.unwrap_or_else(|| panic!("{site:?} is in the index, its chunk gone"));
            if let Some(pages) = chunk.try_lock() {
                let page = usize::from(site.page);
                assert_eq!(pages.tag(page), Tag::Candidate, "{site:?} in the index");
                assert_eq!(pages.fingerprint(page), key, "{site:?} in the index");
                assert_eq!(pages.home(page), home, "{site:?} in the index");
            }
        }
    });
}

/// I9, part two: the classes of the status add up to the pages present.
fn check_status(core: &Core) {
    let status = crate::status::status(core);
    let sum = status.pages_shared
        + status.pages_sharing
        + status.pages_unshared
        + status.pages_volatile
        + status.zero_pages
        + status.pages_skipped;
    let present: u64 = lock(&core.guests)
        .iter()
        .filter(|guest| guest.standing() != Standing::Ghost)
        .flat_map(|guest| guest.counters.classes())
        .sum();
    assert_eq!(
        sum, present,
        "I9: the classes do not add up to the pages present"
    );
    let parts: u64 = status.guests.iter().map(|guest| guest.saved_bytes).sum();
    assert_eq!(
        parts, status.saved_bytes,
        "the guests' savings add up to the whole"
    );
}
