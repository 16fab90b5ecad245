//! Slots of a store: numbers given out once, refs counted, segments freed when all is dead.
//!
//! ```text
//!  number:  0 …… 511 │ 512 …… 1023 │ 1024 …
//!           segment 0│ segment 1   │          a worker takes a whole segment and gives its
//!           refs sites key                    numbers to neighbouring pages, one after another
//! ```
//!
//! Life of a slot: unused (refs 0) → published (refs 1 and content, before the index names it) →
//! refs rise and fall → refs 0 for good. [`View::try_ref`] never raises 0, so the last drop is
//! final: whoever made it removes the index entry and punches the page (I5).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

use crate::page::{Fingerprint, Slot};

/// Slots in a segment.
const SEGMENT: u64 = 512;
const SEGMENT_SLOTS: usize = 512;

/// Numbers a worker may give out.
pub(crate) type Run = Range<u64>;

#[derive(Debug)]
struct Segment {
    /// Guest pages that may map the slot.
    refs: [AtomicU32; SEGMENT_SLOTS],
    /// Guest pages known to map the slot: at most refs.
    sites: [AtomicU32; SEGMENT_SLOTS],
    keys: [[AtomicU64; 2]; SEGMENT_SLOTS],
    /// Slots whose number is spent and whose refs are 0.
    dead: AtomicU32,
}

impl Segment {
    fn new() -> Self {
        Self {
            refs: [const { AtomicU32::new(0) }; SEGMENT_SLOTS],
            sites: [const { AtomicU32::new(0) }; SEGMENT_SLOTS],
            keys: [const { [const { AtomicU64::new(0) }; 2] }; SEGMENT_SLOTS],
            dead: AtomicU32::new(0),
        }
    }
}

/// Hashes one number by a multiplication.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word.wrapping_mul(0x9E37_79B9_7F4A_7C15); // 2^64 divided by the golden ratio
    }
}

type Segments = HashMap<u64, Box<Segment>, BuildHasherDefault<Spread>>;

/// The slots of a store.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    segments: RwLock<Segments>,
    next: AtomicU64,
    spare: Mutex<Vec<Run>>,
    shared: AtomicU64,
    live: AtomicU64,
}

impl Slots {
    /// Numbers to give out, neighbours together.
    pub(crate) fn take_run(&self) -> Run {
        let spare = lock(&self.spare).pop();
        spare.unwrap_or_else(|| {
            let number = self.next.fetch_add(1, Relaxed);
            let mut segments = self
                .segments
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            segments.insert(number, Box::new(Segment::new()));
            number * SEGMENT..(number + 1) * SEGMENT
        })
    }

    /// Puts unused numbers of a run back.
    pub(crate) fn give_back(&self, run: Run) {
        if !run.is_empty() {
            lock(&self.spare).push(run);
        }
    }

    /// Access to refs, for a batch of operations.
    pub(crate) fn view(&self) -> View<'_> {
        View {
            slots: self,
            segments: self.segments.read().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Notes that the numbers of `dead` are spent; frees segments with nothing left.
    pub(crate) fn bury(&self, dead: &[Slot]) {
        let mut empty = Vec::new();
        let view = self.view();
        for slot in dead {
            let number = slot.0 / SEGMENT;
            if let Some(segment) = view.segments.get(&number)
                && u64::from(segment.dead.fetch_add(1, AcqRel)) + 1 == SEGMENT
            {
                empty.push(number);
            }
        }
        drop(view);
        if !empty.is_empty() {
            let mut segments = self
                .segments
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            segments.retain(|number, _| !empty.contains(number));
        }
    }

    /// Slots that at least one guest page is known to map.
    pub(crate) fn shared(&self) -> u64 {
        self.shared.load(Relaxed)
    }

    /// Slots with refs.
    pub(crate) fn live(&self) -> u64 {
        self.live.load(Relaxed)
    }

    /// Bytes of memory the slots hold.
    pub(crate) fn memory_bytes(&self) -> usize {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.len() * size_of::<Segment>() + segments.capacity() * 18
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Refs of slots. Drop it before [`Slots::take_run`] and [`Slots::bury`].
pub(crate) struct View<'a> {
    slots: &'a Slots,
    segments: RwLockReadGuard<'a, Segments>,
}

impl View<'_> {
    fn find(&self, slot: Slot) -> Option<(&Segment, usize)> {
        let segment = self.segments.get(&(slot.0 / SEGMENT))?;
        Some((segment, usize::try_from(slot.0 % SEGMENT).ok()?))
    }

    fn count(&self, slot: Slot, which: fn(&Segment) -> &[AtomicU32]) -> Option<&AtomicU32> {
        let (segment, at) = self.find(slot)?;
        which(segment).get(at)
    }

    fn refs(&self, slot: Slot) -> Option<&AtomicU32> {
        self.count(slot, |segment| &segment.refs)
    }

    fn sites(&self, slot: Slot) -> Option<&AtomicU32> {
        self.count(slot, |segment| &segment.sites)
    }

    /// Gives a fresh slot its key and its first ref. Its content is written, the index does not
    /// name it yet: the release store is seen by whoever wins a ref after finding the entry.
    #[allow(clippy::cast_possible_truncation)] // the two halves, on purpose
    pub(crate) fn publish(&self, slot: Slot, key: Fingerprint) {
        let Some((segment, at)) = self.find(slot) else {
            return;
        };
        if let (Some([low, high]), Some(refs)) = (segment.keys.get(at), segment.refs.get(at)) {
            low.store(key.0 as u64, Relaxed);
            high.store((key.0 >> 64) as u64, Relaxed);
            refs.store(1, Release);
            self.slots.live.fetch_add(1, Relaxed);
        }
    }

    /// Takes a ref unless the slot has none any more.
    pub(crate) fn try_ref(&self, slot: Slot) -> bool {
        let more = |refs: u32| (refs > 0).then(|| refs.checked_add(1)).flatten();
        self.refs(slot)
            .is_some_and(|refs| refs.fetch_update(AcqRel, Acquire, more).is_ok())
    }

    /// Drops a ref; gives the key when it was the last.
    pub(crate) fn unref(&self, slot: Slot) -> Option<Fingerprint> {
        let refs = self.refs(slot)?;
        let before = refs.fetch_sub(1, AcqRel);
        debug_assert!(before > 0, "{slot} lost a ref it did not have");
        if before != 1 {
            return None;
        }
        self.slots.live.fetch_sub(1, Relaxed);
        self.key(slot)
    }

    /// The key a slot was published with.
    pub(crate) fn key(&self, slot: Slot) -> Option<Fingerprint> {
        let (segment, at) = self.find(slot)?;
        let [low, high] = segment.keys.get(at)?;
        let (low, high) = (low.load(Relaxed), high.load(Relaxed));
        Some(Fingerprint(u128::from(high) << 64 | u128::from(low)))
    }

    /// Notes that one more page maps the slot.
    pub(crate) fn join(&self, slot: Slot) {
        if self
            .sites(slot)
            .is_some_and(|sites| sites.fetch_add(1, AcqRel) == 0)
        {
            self.slots.shared.fetch_add(1, Relaxed);
        }
    }

    /// Notes that one page less maps the slot.
    pub(crate) fn leave(&self, slot: Slot) {
        if self
            .sites(slot)
            .is_some_and(|sites| sites.fetch_sub(1, AcqRel) == 1)
        {
            self.slots.shared.fetch_sub(1, Relaxed);
        }
    }

    /// Refs and sites of a slot; zeros when its segment is gone.
    pub(crate) fn counts(&self, slot: Slot) -> (u32, u32) {
        let load = |count: Option<&AtomicU32>| count.map_or(0, |count| count.load(Acquire));
        (load(self.refs(slot)), load(self.sites(slot)))
    }

    /// Every slot with refs.
    pub(crate) fn live(&self) -> impl Iterator<Item = Slot> + '_ {
        let numbers = self.segments.keys().copied();
        let slots = numbers.flat_map(|number| number * SEGMENT..(number + 1) * SEGMENT);
        slots.map(Slot).filter(|&slot| self.counts(slot).0 > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_drop_is_final() {
        let slots = Slots::default();
        let mut run = slots.take_run();
        let slot = Slot(run.next().unwrap());
        slots.give_back(run);
        let view = slots.view();
        assert!(!view.try_ref(slot), "not published");
        view.publish(slot, Fingerprint(77));
        assert!(view.try_ref(slot));
        assert_eq!(view.unref(slot), None);
        assert_eq!(view.unref(slot), Some(Fingerprint(77)));
        assert!(!view.try_ref(slot), "dead for good");
        assert_eq!(slots.live(), 0);
    }

    #[test]
    fn numbers_are_given_once_and_dead_segments_freed() {
        let slots = Slots::default();
        let run = slots.take_run();
        slots.give_back(run.start + 2..run.end);
        assert_eq!(slots.take_run(), run.start + 2..run.end);
        assert_eq!(slots.take_run().start, run.end);
        let held = slots.memory_bytes();
        let dead: Vec<_> = run.map(Slot).collect();
        slots.bury(&dead[..511]);
        assert_eq!(slots.memory_bytes(), held);
        slots.bury(&dead[511..]);
        assert!(slots.memory_bytes() < held);
        assert_eq!(slots.view().counts(dead[0]), (0, 0));
    }

    #[test]
    fn a_slot_is_shared_from_its_first_site_to_its_last() {
        let slots = Slots::default();
        let slot = Slot(slots.take_run().start);
        let view = slots.view();
        view.join(slot);
        view.join(slot);
        assert_eq!(slots.shared(), 1);
        view.leave(slot);
        assert_eq!((slots.shared(), view.counts(slot)), (1, (0, 1)));
        view.leave(slot);
        assert_eq!(slots.shared(), 0);
    }
}
