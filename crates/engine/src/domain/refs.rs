//! Refs and sites of slots: guest pages that may map one, and those known to.
//!
//! Life of a slot: unused (refs 0) → published (refs 1 and content, before the index names it) →
//! refs rise and fall → refs 0 for good. [`View::try_ref`] never raises 0, so the last drop is
//! final: the thread that made it removes the index entry and punches the page (I5).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock, RwLockReadGuard};

use numa::heap::{Block, MAX_ORDER};

use crate::domain::copies::Chains;
use crate::page::{Fingerprint, Slot};
use crate::sync::{InOrder, OrderedRw, SEGMENTS};
use crate::users::Holdings;

/// Slots in a segment.
pub(super) const SEGMENT: u64 = 1 << MAX_ORDER;
pub(super) const SEGMENT_SLOTS: usize = 1 << MAX_ORDER;

/// A mark a slot. Numbers are used once, so a mark stays.
#[derive(Debug, Default)]
struct Marks([AtomicU64; SEGMENT_SLOTS / 64]);

impl Marks {
    /// Marks a slot; false if it had the mark.
    fn set(&self, at: usize) -> bool {
        let bit = 1 << (at % 64);
        self.0[at / 64].fetch_or(bit, Release) & bit == 0
    }

    fn has(&self, at: usize) -> bool {
        self.0[at / 64].load(Acquire) >> (at % 64) & 1 == 1
    }
}

#[derive(Debug)]
pub(crate) struct Segment {
    pub(super) block: Block,
    /// Guest pages that may map the slot.
    pub(super) refs: [AtomicU32; SEGMENT_SLOTS],
    /// Guest pages known to map the slot: at most refs.
    pub(super) sites: [AtomicU32; SEGMENT_SLOTS],
    pub(super) keys: [[AtomicU64; 2]; SEGMENT_SLOTS],
    /// Slots that are astray, see [`frames`](crate::domain::frames).
    astray: Marks,
    /// Slots that an index has named.
    named: Marks,
    /// Slots whose number is spent and whose refs are 0.
    pub(super) dead: AtomicU32,
}

impl Segment {
    pub(super) fn new(block: Block) -> Self {
        Self {
            block,
            refs: [const { AtomicU32::new(0) }; SEGMENT_SLOTS],
            sites: [const { AtomicU32::new(0) }; SEGMENT_SLOTS],
            keys: [const { [const { AtomicU64::new(0) }; 2] }; SEGMENT_SLOTS],
            astray: Marks::default(),
            named: Marks::default(),
            dead: AtomicU32::new(0),
        }
    }
}

/// Bytes of so many segments.
fn bytes(segments: usize) -> u64 {
    (segments * size_of::<Segment>()) as u64
}

/// Hashes one number by a multiplication.
#[derive(Default)]
pub(crate) struct Spread(u64);

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
        // 2^64 divided by the golden ratio. The rotation brings the high bits, and with them those
        // of the store, to where the map takes its buckets from.
        self.0 = word.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

pub(crate) type Segments = HashMap<u64, Box<Segment>, BuildHasherDefault<Spread>>;

/// What became of an attempt to take a ref.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The slot has one ref more.
    Won,
    /// It has as many as it may have.
    Full,
    /// It has none any more, and gets none.
    Dead,
}

/// The refs of a domain's slots.
#[derive(Debug)]
pub(crate) struct Refs {
    pub(super) segments: OrderedRw<Segments, SEGMENTS>,
    shared: AtomicU64,
    live: AtomicU64,
    /// Slots with refs that are astray.
    astray: AtomicU64,
    /// Dead slots whose frames are not given back yet.
    held: AtomicU64,
    /// Slots with frames, of all domains: those with refs, and held ones.
    everywhere: Arc<AtomicU64>,
    /// Those of the user to whom the domain belongs.
    his: OnceLock<Arc<Holdings>>,
    /// Copies of contents that one slot is not enough for.
    pub(crate) chains: Chains,
    /// Pages that may share a slot.
    limit: AtomicU32,
}

impl Refs {
    /// No refs yet; `everywhere` counts those of all domains.
    pub(super) fn new(everywhere: Arc<AtomicU64>) -> Self {
        Self {
            segments: OrderedRw::default(),
            shared: AtomicU64::new(0),
            live: AtomicU64::new(0),
            astray: AtomicU64::new(0),
            held: AtomicU64::new(0),
            everywhere,
            his: OnceLock::new(),
            chains: Chains::default(),
            limit: AtomicU32::new(u32::MAX),
        }
    }

    /// Sets how many pages may share a slot.
    pub(crate) fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Relaxed);
    }

    /// Access to refs, for a batch of operations.
    pub(crate) fn view(&self) -> View<'_> {
        View {
            refs: self,
            segments: self.segments.read(),
        }
    }

    /// Slots that at least one guest page is known to map.
    pub(crate) fn shared(&self) -> u64 {
        self.shared.load(Relaxed)
    }

    /// Dead slots whose frames are not given back yet.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    /// Slots with refs that are astray.
    pub(crate) fn astray(&self) -> u64 {
        self.astray.load(Relaxed)
    }

    /// Slots with refs.
    pub(crate) fn live(&self) -> u64 {
        self.live.load(Relaxed)
    }

    /// Counts slots with refs, and their segments, in `his`, too; the first one's only.
    pub(crate) fn charge(&self, his: &Arc<Holdings>) {
        // No other thread looks at refs now, so the numbers stay as they are.
        let segments = self.segments.write();
        if self.his.set(Arc::clone(his)).is_ok() {
            his.slots.fetch_add(self.live() + self.held(), Relaxed);
            his.segments.fetch_add(bytes(segments.len()), Relaxed);
        }
    }

    /// Adds a segment to `segments`, those of this domain.
    pub(super) fn add_segment(&self, segments: &mut Segments, number: u64, segment: Segment) {
        segments.insert(number, Box::new(segment));
        if let Some(his) = self.his.get() {
            his.segments.fetch_add(bytes(1), Relaxed);
        }
    }

    /// Takes a segment away again.
    pub(super) fn take_segment(&self, segments: &mut Segments, number: u64) -> Box<Segment> {
        if let Some(his) = self.his.get() {
            his.segments.fetch_sub(bytes(1), Relaxed);
        }
        let segment = segments.remove(&number);
        segment.unwrap_or_else(|| panic!("segment {number} was freed twice"))
    }

    /// Counts dead slots whose frames are not given back yet.
    pub(crate) fn hold(&self, slots: u64) {
        let _same = self.segments.read();
        self.add(&self.held, slots);
    }

    /// The frames of so many held slots are given back.
    pub(crate) fn let_go(&self, slots: u64) {
        let _same = self.segments.read();
        self.sub(&self.held, slots);
    }

    /// Counts `slots` more with frames in `own`, a count of this domain, and in each sum of which that is a part.
    fn add(&self, own: &AtomicU64, slots: u64) {
        for sum in self.sums(own) {
            sum.fetch_add(slots, Relaxed);
        }
    }

    /// Counts so many less.
    fn sub(&self, own: &AtomicU64, slots: u64) {
        for sum in self.sums(own) {
            sum.fetch_sub(slots, Relaxed);
        }
    }

    fn sums<'a>(&'a self, own: &'a AtomicU64) -> impl Iterator<Item = &'a AtomicU64> {
        let his = self.his.get().map(|his| &his.slots);
        [own, &*self.everywhere].into_iter().chain(his)
    }
}

impl Drop for Refs {
    fn drop(&mut self) {
        // Their stores go with them.
        self.sub(&self.live, self.live());
        self.sub(&self.held, self.held());
        if let Some(his) = self.his.get() {
            let segments = self.segments.read().len();
            his.segments.fetch_sub(bytes(segments), Relaxed);
        }
    }
}

/// Refs of slots. Drop it before [`Refs::segments`] is locked to write.
pub(crate) struct View<'a> {
    refs: &'a Refs,
    pub(super) segments: InOrder<RwLockReadGuard<'a, Segments>>,
}

impl View<'_> {
    /// The segment of a slot; none when all its slots are dead. Index, patterns and guests name such slots, so looking
    /// one up is no error; the holder of a ref of one has broken I4.
    fn find(&self, slot: Slot) -> Option<(&Segment, usize)> {
        let segment = self.segments.get(&(slot.0 / SEGMENT))?;
        Some((segment, usize::try_from(slot.0 % SEGMENT).ok()?))
    }

    /// The same of a slot of which something tells that not all beside it are dead.
    fn get(&self, slot: Slot, why: &str) -> (&Segment, usize) {
        let found = self.find(slot);
        found.unwrap_or_else(|| panic!("{slot} {why} and has no segment"))
    }

    fn refs(&self, slot: Slot) -> Option<&AtomicU32> {
        self.find(slot).map(|(segment, at)| &segment.refs[at])
    }

    /// Gives a fresh slot its key and its first ref. Its content is written, the index does not
    /// name it yet: the release store is seen by the thread that wins a ref after finding the entry.
    #[allow(clippy::cast_possible_truncation)] // the two halves, on purpose
    pub(crate) fn publish(&self, slot: Slot, key: Fingerprint) {
        let (segment, at) = self.get(slot, "is new");
        let [low, high] = &segment.keys[at];
        low.store(key.0 as u64, Relaxed);
        high.store((key.0 >> 64) as u64, Relaxed);
        let before = segment.refs[at].swap(1, Release);
        assert_eq!(before, 0, "{slot} is published twice");
        self.refs.add(&self.refs.live, 1);
    }

    /// Takes a ref unless the slot has none any more, or too many, or is astray: that is dead for the caller.
    pub(crate) fn try_ref(&self, slot: Slot) -> Taken {
        let limit = self.refs.limit.load(Relaxed);
        let more = |refs: u32| (refs > 0 && refs < limit).then(|| refs + 1);
        let found = self.find(slot);
        let Some((segment, at)) = found.filter(|(segment, at)| !segment.astray.has(*at)) else {
            return Taken::Dead;
        };
        match segment.refs[at].fetch_update(AcqRel, Acquire, more) {
            Ok(_) => Taken::Won,
            Err(0) => Taken::Dead,
            Err(_) => Taken::Full,
        }
    }

    /// The same for a predicted slot. An index has to name it: a twin that lost the exchange has a slot, too, until its job ends, and no other
    /// page would ever come to that one.
    pub(crate) fn try_guess(&self, slot: Slot) -> Taken {
        match self.is_named(slot) {
            true => self.try_ref(slot),
            false => Taken::Dead,
        }
    }

    /// Notes that an index names the slot, of which the caller has a ref.
    pub(crate) fn set_named(&self, slot: Slot) {
        let (segment, at) = self.get(slot, "is named");
        segment.named.set(at);
    }

    /// Whether an index has ever named the slot.
    pub(crate) fn is_named(&self, slot: Slot) -> bool {
        let found = self.find(slot);
        found.is_some_and(|(segment, at)| segment.named.has(at))
    }

    /// Whether the slot has as many refs as it may have.
    pub(crate) fn is_full(&self, slot: Slot) -> bool {
        let limit = self.refs.limit.load(Relaxed);
        self.refs(slot)
            .is_some_and(|refs| refs.load(Acquire) >= limit)
    }

    /// Takes a ref for a page that maps the slot already, however many share it; false for a dead one.
    pub(crate) fn claim(&self, slot: Slot) -> bool {
        let more = |refs: u32| (refs > 0).then(|| refs.checked_add(1)).flatten();
        self.refs(slot)
            .is_some_and(|refs| refs.fetch_update(AcqRel, Acquire, more).is_ok())
    }

    /// Notes that the frame of a slot, of which the caller has a ref, is off its node.
    pub(crate) fn set_astray(&self, slot: Slot) {
        let (segment, at) = self.get(slot, "is asked for");
        if segment.astray.set(at) {
            self.refs.astray.fetch_add(1, Relaxed);
        }
    }

    /// Whether the frame of a slot was found off its node.
    pub(crate) fn is_astray(&self, slot: Slot) -> bool {
        let found = self.find(slot);
        found.is_some_and(|(segment, at)| segment.astray.has(at))
    }

    /// Whether the slot has refs.
    pub(crate) fn is_alive(&self, slot: Slot) -> bool {
        self.refs(slot).is_some_and(|refs| refs.load(Acquire) > 0)
    }

    /// Drops a ref; gives the key when it was the last.
    pub(crate) fn unref(&self, slot: Slot) -> Option<Fingerprint> {
        let (segment, at) = self.get(slot, "loses a ref");
        let before = segment.refs[at].fetch_sub(1, AcqRel);
        assert!(before > 0, "{slot} lost a ref it did not have");
        if before == self.refs.limit.load(Relaxed) / 2 + 1
            && self.refs.chains.count() > 0
            && let Some(key) = self.key(slot)
        {
            self.refs.chains.note_room(key, slot);
        }
        if before != 1 {
            return None;
        }
        self.refs.sub(&self.refs.live, 1);
        if segment.astray.has(at) {
            self.refs.astray.fetch_sub(1, Relaxed);
        }
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
        let (segment, at) = self.get(slot, "is mapped");
        if segment.sites[at].fetch_add(1, AcqRel) == 0 {
            self.refs.shared.fetch_add(1, Relaxed);
        }
    }

    /// Notes that one page less maps the slot.
    pub(crate) fn leave(&self, slot: Slot) {
        let (segment, at) = self.get(slot, "was mapped");
        let before = segment.sites[at].fetch_sub(1, AcqRel);
        assert!(before > 0, "{slot} lost a page it did not have");
        if before == 1 {
            self.refs.shared.fetch_sub(1, Relaxed);
        }
    }

    /// Refs and sites of a slot; zeros when its segment is gone.
    pub(crate) fn counts(&self, slot: Slot) -> (u32, u32) {
        self.find(slot).map_or((0, 0), |(segment, at)| {
            let load = |counts: &[AtomicU32]| counts[at].load(Acquire);
            (load(&segment.refs), load(&segment.sites))
        })
    }

    /// Every slot with refs.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn live(&self) -> impl Iterator<Item = Slot> + '_ {
        let numbers = self.segments.keys().copied();
        let slots = numbers.flat_map(|number| number * SEGMENT..(number + 1) * SEGMENT);
        slots.map(Slot).filter(|&slot| self.counts(slot).0 > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::slots::tests::{FIRST, slots};

    #[test]
    fn the_last_drop_is_final() {
        let slots = slots();
        let mut run = slots.take_run(FIRST).unwrap();
        let slot = Slot(run.next().unwrap());
        slots.give_back(run);
        let view = slots.view();
        assert_eq!(view.try_ref(slot), Taken::Dead, "not published");
        view.publish(slot, Fingerprint(77));
        slots.set_limit(2);
        assert_eq!(view.try_ref(slot), Taken::Won);
        assert_eq!(view.try_ref(slot), Taken::Full);
        assert_eq!(view.unref(slot), None);
        assert_eq!(view.unref(slot), Some(Fingerprint(77)));
        assert_eq!(view.try_ref(slot), Taken::Dead, "for good");
        assert_eq!(slots.live(), 0);
    }

    #[test]
    fn a_slot_that_no_index_named_is_not_guessed() {
        let slots = slots();
        let slot = Slot(slots.take_run(FIRST).unwrap().start);
        let view = slots.view();
        view.publish(slot, Fingerprint(77));
        assert_eq!(view.try_guess(slot), Taken::Dead);
        view.set_named(slot);
        assert_eq!(view.try_guess(slot), Taken::Won);
        assert_eq!(view.counts(slot).0, 2);
    }

    #[test]
    fn a_slot_is_shared_from_its_first_site_to_its_last() {
        let slots = slots();
        let slot = Slot(slots.take_run(FIRST).unwrap().start);
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
