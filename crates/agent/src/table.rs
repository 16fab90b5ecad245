//! The agent's knowledge of each chunk.
//!
//! A radix of two levels over the address: 8192 leaves of 8192 chunks cover the 2⁴⁷ bytes of user
//! space. A leaf is reserved whole and costs memory only where chunks are used: 480 bytes for
//! 2 MiB. When nothing is known any more of the chunks whose entries lie on a page of it, the kernel gets that page back. Whether
//! anything in a range is known can be asked without the lock, so calls over memory that was never offered cost a few loads.

use std::marker::PhantomData;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use sys::mapping::{Attributes, Order, Policy};
use sys::vma::Told;
use wire::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES, PageBits};

use crate::rules;

/// `MADV_DONTNEED_LOCKED` (Linux 5.18): as `MADV_DONTNEED`, of locked memory too.
pub(crate) const DONTNEED_LOCKED: i32 = 24;

const LEAVES: usize = 8192;
const CHUNKS: usize = 8192;
const LEAF_SPAN: usize = CHUNKS * CHUNK_BYTES;
/// The address after the last that can be offered.
pub(crate) const ADDRESS_LIMIT: usize = LEAVES * LEAF_SPAN;

/// How far the attributes of a chunk are known. They are read from the kernel without the lock; a
/// call of the guest that changes them meanwhile sends the chunk back to the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reading {
    /// Known.
    #[default]
    Done,
    /// To be read before the chunk is reported.
    Wanted,
    /// Being read.
    Begun,
}

/// One chunk of address space. All of it is a hint: the kernel's mappings are the truth, and what is
/// wrong here costs a look at them, or a page that is not merged.
pub(crate) struct Chunk {
    /// Pages the guest offers.
    pub(crate) offered: PageBits,
    /// Pages that lie in mappings of a store, merged or broken; some may be withdrawn.
    pub(crate) stored: PageBits,
    /// Stored pages that were not merged where they lie: they were moved or found there. No ref is counted for them, and
    /// `attributes` says nothing of their mappings.
    pub(crate) noted: PageBits,
    /// Offered pages whose mapping is not registered yet for tracking. Nothing else is registered: a mapping that
    /// comes to such an address unseen is not tracked, and what is not tracked is not merged.
    pub(crate) fresh: PageBits,
    /// Offered pages whose mapping has exactly `attributes`, which no call has changed since.
    pub(crate) plain: PageBits,
    /// Pages that are offered only if the program says so itself: it took them back, or the kernel has words of its own
    /// there. See [`any`](crate::any).
    pub(crate) kept: PageBits,
    /// Pages where the kernel has had words of its own: they are never frozen. Only those that are stored count.
    pub(crate) words: PageBits,
    /// All that is offered was offered for the program, not by it.
    pub(crate) any: bool,
    /// What the kernel was told of the mappings of plain pages, and of stored ones when they were merged.
    pub(crate) attributes: Attributes,
    /// A stored page may lie in a mapping with attributes of its own, given to it where it lies. The kernel tells them.
    pub(crate) odd: bool,
    /// How far `plain` is known.
    pub(crate) reading: Reading,
    /// KSM may have it where no engine serves.
    pub(crate) to_ksm: bool,
    /// The offer was also passed to KSM.
    pub(crate) in_ksm: bool,
}

const _: () = assert!(size_of::<Chunk>() == 480, "the head of this file says it");
const _: () = assert!(
    Order::Normal as u8 == 0 && Reading::Done as u8 == 0 && offset_of!(Leaf, chunks) < PAGE_BYTES,
    "zeros are an empty chunk, and the bits of a leaf lie on its first page"
);

/// Zeros are an empty leaf: the kernel makes it, and takes pages of it back.
#[repr(C)]
struct Leaf {
    live: [AtomicU64; CHUNKS / 64],
    dirty: [AtomicU64; CHUNKS / 64],
    chunks: [Chunk; CHUNKS],
}

static TOP: [AtomicPtr<Leaf>; LEAVES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; LEAVES];
/// Bounds of everything ever offered: most calls of a process fall outside.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);
static KNOWN: AtomicUsize = AtomicUsize::new(0);
/// Whether a chunk may have attributes of locked memory. Changed under the lock.
static LOCKED: AtomicBool = AtomicBool::new(false);

/// Whether `[start, start + len)` touches a chunk that is known: offered or stored in some page.
/// Needs no lock. A chunk that another thread offers at the same time may be missed, as that
/// thread's call may come later.
pub(crate) fn touches(start: usize, len: usize) -> bool {
    let end = start.saturating_add(len);
    // Relaxed: the bounds only grow, and a thread sees its own offers; ordering between threads
    // that offer and use the same memory is theirs to make.
    if end <= LOWEST.load(Ordering::Relaxed) || start >= HIGHEST.load(Ordering::Relaxed) {
        return false;
    }
    first_of(start & !(CHUNK_BYTES - 1)..end, false).is_some()
}

/// The first chunk of a range, which begins with a chunk, that must be reported (`dirty`) or is known.
fn first_of(range: Range<usize>, dirty: bool) -> Option<usize> {
    let Range { start: mut at, end } = range;
    let end = end.min(ADDRESS_LIMIT);
    while at < end {
        let Some((leaf, index)) = leaf_of(at) else {
            at = (at / LEAF_SPAN + 1) * LEAF_SPAN;
            continue;
        };
        let words = if dirty { &leaf.dirty } else { &leaf.live };
        let word = words.get(index / 64)?.load(Ordering::Relaxed) >> (index % 64);
        if word != 0 {
            let found = at + word.trailing_zeros() as usize * CHUNK_BYTES;
            return Some(found).filter(|&found| found < end);
        }
        at += (64 - index % 64) * CHUNK_BYTES;
    }
    None
}

/// Unmaps the table.
///
/// # Safety
/// No thread is in this image or comes into it, but the caller, which does not use the table any more.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn unmap_all() {
    for place in &TOP {
        let leaf = place.swap(std::ptr::null_mut(), Ordering::Relaxed);
        if !leaf.is_null() {
            // SAFETY: `make` made it; the caller vouches that no thread uses it.
            let _ = unsafe { sys::mapping::unmap(leaf.expose_provenance(), size_of::<Leaf>()) };
        }
    }
}

fn leaf_of(address: usize) -> Option<(&'static Leaf, usize)> {
    // Acquire pairs with the Release in `Table::make`: who sees a leaf sees its mapping.
    let leaf = TOP.get(address / LEAF_SPAN)?.load(Ordering::Acquire);
    if leaf.is_null() {
        return None;
    }
    // SAFETY: leaves are never unmapped. Through this reference only the atomics are read; the
    // chunks are reached through the raw pointer, under the lock.
    Some((unsafe { &*leaf }, (address % LEAF_SPAN) / CHUNK_BYTES))
}

fn bit(words: &[AtomicU64], index: usize) -> bool {
    words
        .get(index / 64)
        .is_some_and(|w| w.load(Ordering::Relaxed) & (1 << (index % 64)) != 0)
}

fn set_bit(words: &[AtomicU64], index: usize, on: bool) {
    let Some(word) = words.get(index / 64) else {
        return;
    };
    let mask = 1u64 << (index % 64);
    if (word.load(Ordering::Relaxed) & mask != 0) == on {
        return;
    }
    if on {
        word.fetch_or(mask, Ordering::Relaxed);
    } else {
        word.fetch_and(!mask, Ordering::Relaxed);
    }
}

/// Gives the kernel the pages back that the entry of a chunk lies on, where no other chunk is known. It fills them with zeros when
/// they are wanted again.
fn give_back(leaf: &'static Leaf, index: usize) {
    let entry = size_of::<Chunk>();
    let place = |index: usize| offset_of!(Leaf, chunks) + index * entry;
    // The page with the bits stays.
    let pages = (place(index) / PAGE_BYTES).max(1)..(place(index) + entry).div_ceil(PAGE_BYTES);
    for start in pages.map(|page| page * PAGE_BYTES) {
        let first = (start - place(0)) / entry;
        let last = (start + PAGE_BYTES - place(0)).div_ceil(entry);
        if (first..last.min(CHUNKS)).any(|other| bit(&leaf.live, other)) {
            continue;
        }
        let at = std::ptr::from_ref(leaf).expose_provenance() + start;
        // SAFETY: all entries there are empty, as zeros are, and the lock is held. What fails costs memory only.
        let _ = unsafe { sys::mapping::advise(at, PAGE_BYTES, DONTNEED_LOCKED) };
    }
}

/// The table, under the lock.
pub(crate) struct Table<'a>(PhantomData<&'a mut ()>);

impl Table<'_> {
    /// # Safety
    /// The caller holds the lock and makes no second `Table` while this one lives.
    pub(crate) unsafe fn under_lock() -> Self {
        Self(PhantomData)
    }

    /// The chunk at `address`, when it is known.
    pub(crate) fn get(&mut self, address: usize) -> Option<&mut Chunk> {
        let (leaf, index) = leaf_of(address)?;
        bit(&leaf.live, index).then(|| self.cell(leaf, index))
    }

    fn cell(&mut self, leaf: &'static Leaf, index: usize) -> &mut Chunk {
        let chunks = (&raw const leaf.chunks).cast_mut().cast::<Chunk>();
        // SAFETY: `index` is below CHUNKS; the lock is held and `self` is borrowed mutably, so
        // this is the only reference to the cell. The memory is writable, mapped by `make`.
        unsafe { &mut *chunks.add(index) }
    }

    /// The chunk at `address`, made known when it was not; `None` without memory for it.
    pub(crate) fn make(&mut self, address: usize) -> Option<&mut Chunk> {
        let place = TOP.get(address / LEAF_SPAN)?;
        if place.load(Ordering::Relaxed).is_null() {
            let leaf = sys::mapping::area(size_of::<Leaf>()).ok()?;
            // The table must reach fork children: their merged pages are merged still.
            // SAFETY: the area was just made here.
            unsafe { sys::mapping::advise(leaf, size_of::<Leaf>(), libc::MADV_NOHUGEPAGE) }.ok();
            let leaf = std::ptr::with_exposed_provenance_mut::<Leaf>(leaf);
            // Release pairs with the Acquire in `leaf_of`.
            place.store(leaf, Ordering::Release);
        }
        let (leaf, index) = leaf_of(address)?;
        if !bit(&leaf.live, index) {
            set_bit(&leaf.live, index, true);
            KNOWN.fetch_add(1, Ordering::Relaxed);
            let chunk = address & !(CHUNK_BYTES - 1);
            LOWEST.fetch_min(chunk, Ordering::Relaxed);
            HIGHEST.fetch_max(chunk + CHUNK_BYTES, Ordering::Relaxed);
        }
        Some(self.cell(leaf, index))
    }

    /// Notes that the chunk at `address` must be reported.
    pub(crate) fn mark_dirty(&mut self, address: usize) {
        if let Some((leaf, index)) = leaf_of(address) {
            set_bit(&leaf.dirty, index, true);
        }
    }

    /// Notes that the chunk at `address` was reported; forgets it when nothing in it is known.
    pub(crate) fn mark_clean(&mut self, address: usize) {
        let Some((leaf, index)) = leaf_of(address) else {
            return;
        };
        set_bit(&leaf.dirty, index, false);
        if !bit(&leaf.live, index) {
            return;
        }
        let cell = self.cell(leaf, index);
        if cell.offered.is_empty() && cell.stored.is_empty() && cell.kept.is_empty() {
            *cell = Chunk::EMPTY;
            set_bit(&leaf.live, index, false);
            KNOWN.fetch_sub(1, Ordering::Relaxed);
            give_back(leaf, index);
        }
    }

    /// A fork child has its parent's table, and none of what is locked there.
    pub(crate) fn forget_locks(&mut self) {
        if !LOCKED.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut at = 0;
        while let Some(address) = self.next(at, false) {
            if let Some(chunk) = self.get(address)
                && chunk.attributes.locked
            {
                chunk.attributes.locked = false;
                chunk.attributes.on_fault = false;
            }
            at = address + CHUNK_BYTES;
        }
    }

    /// Whether any page lies in a mapping of a store.
    pub(crate) fn anything_stored(&mut self) -> bool {
        let mut at = 0;
        while let Some(address) = self.next(at, false) {
            if self
                .get(address)
                .is_some_and(|chunk| !chunk.stored.is_empty())
            {
                return true;
            }
            at = address + CHUNK_BYTES;
        }
        false
    }

    /// The first chunk at or above `from` that must be reported (`dirty`) or is known.
    pub(crate) fn next(&mut self, from: usize, dirty: bool) -> Option<usize> {
        first_of(from.next_multiple_of(CHUNK_BYTES)..ADDRESS_LIMIT, dirty)
    }

    /// Calls `each` with every known chunk of `[start, start + len)` and the pages of it that the
    /// range covers, and marks it dirty.
    pub(crate) fn each_known(
        &mut self,
        start: usize,
        len: usize,
        mut each: impl FnMut(usize, Range<usize>, &mut Chunk),
    ) {
        let end = start.saturating_add(len);
        let mut at = start & !(CHUNK_BYTES - 1);
        while let Some(chunk) = self.next(at, false).filter(|&chunk| chunk < end) {
            if let Some(known) = self.get(chunk) {
                each(chunk, pages_of(chunk, start, end), known);
            }
            self.mark_dirty(chunk);
            at = chunk + CHUNK_BYTES;
        }
    }

    /// What is offered of a range is not tracked any more, wherever it is by now.
    pub(crate) fn note_untracked(&mut self, start: usize, len: usize) {
        self.each_known(start, len, |_, pages, chunk| {
            chunk.fresh = chunk.fresh | PageBits::of(pages) & chunk.offered;
        });
    }

    /// A thread that was changing the table is gone, so it may say of memory that it is offered which was
    /// unmapped. Then nothing is offered any more: memory is left unmerged until it is offered again.
    /// What is known of stores stays, for there it is the kernel that is asked.
    pub(crate) fn mistrust(&mut self) {
        self.each_known(0, ADDRESS_LIMIT, |_, _, chunk| {
            chunk.offered = PageBits::EMPTY;
            chunk.fresh = PageBits::EMPTY;
            chunk.plain = PageBits::EMPTY;
        });
    }

    /// Whether a page of `[start, start + len)` may lie in a mapping of a store.
    pub(crate) fn may_be_stored(&mut self, start: usize, len: usize) -> bool {
        let end = start.saturating_add(len);
        let mut at = start & !(CHUNK_BYTES - 1);
        while let Some(chunk) = self.next(at, false).filter(|&chunk| chunk < end) {
            let pages = PageBits::of(pages_of(chunk, start, end));
            let stored = self.get(chunk).map(|known| known.stored & pages);
            if stored.is_some_and(|stored| !stored.is_empty()) {
                return true;
            }
            at = chunk + CHUNK_BYTES;
        }
        false
    }

    /// Whether a page of `[start, start + len)` is offered or may lie in a mapping of a store. With `any` also whether the next sync
    /// may offer one for the program: what it has taken back is not offered so.
    pub(crate) fn is_used(&mut self, start: usize, len: usize, any: bool) -> bool {
        let end = start.saturating_add(len).min(ADDRESS_LIMIT);
        let mut at = start & !(CHUNK_BYTES - 1);
        while at < end {
            let next = self.next(at, false).filter(|&chunk| chunk < end);
            if any && next != Some(at) {
                return true;
            }
            let Some(chunk) = next else { return false };
            let pages = PageBits::of(pages_of(chunk, start, end));
            let used = self.get(chunk).map(|known| {
                let free = if any { !known.kept } else { PageBits::EMPTY };
                (known.offered | known.stored | free) & pages
            });
            if used.is_some_and(|used| !used.is_empty()) {
                return true;
            }
            at = chunk + CHUNK_BYTES;
        }
        false
    }

    /// Bytes of memory the table holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        let pages = (KNOWN.load(Ordering::Relaxed) * size_of::<Chunk>()).div_ceil(PAGE_BYTES);
        let leaves = TOP
            .iter()
            .filter(|leaf| !leaf.load(Ordering::Relaxed).is_null())
            .count();
        (pages + leaves) * PAGE_BYTES + size_of_val(&TOP)
    }
}

/// The pages of the chunk at `chunk` that `[start, end)` touches.
pub(crate) fn pages_of(chunk: usize, start: usize, end: usize) -> Range<usize> {
    let first = start.saturating_sub(chunk) / PAGE_BYTES;
    let last = end.saturating_sub(chunk).div_ceil(PAGE_BYTES);
    first.min(CHUNK_PAGES)..last.min(CHUNK_PAGES)
}

/// The parts of a range inside one chunk, by whether their pages are in the set.
pub(crate) fn parts_by(
    set: PageBits,
    range: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, bool)> {
    let inside = move |at: usize| set.contains(at % CHUNK_BYTES / PAGE_BYTES);
    let Range { mut start, end } = range;
    std::iter::from_fn(move || {
        let at = start;
        let is = (at < end).then(|| inside(at))?;
        let mut next = (at + PAGE_BYTES..end).step_by(PAGE_BYTES);
        start = next.find(|&next| inside(next) != is).unwrap_or(end);
        Some((at..start, is))
    })
}

impl Chunk {
    /// Nothing known.
    pub(crate) const EMPTY: Self = Self {
        offered: PageBits::EMPTY,
        stored: PageBits::EMPTY,
        noted: PageBits::EMPTY,
        fresh: PageBits::EMPTY,
        plain: PageBits::EMPTY,
        kept: PageBits::EMPTY,
        words: PageBits::EMPTY,
        any: false,
        attributes: Attributes {
            dontfork: false,
            dontdump: false,
            locked: false,
            on_fault: false,
            noreserve: false,
            huge: false,
            nohuge: false,
            order: Order::Normal,
            policy: Policy::DEFAULT,
        },
        odd: false,
        reading: Reading::Done,
        to_ksm: false,
        in_ksm: false,
    };

    /// Notes an offer of pages, whose mapping is not tracked.
    pub(crate) fn offer(&mut self, pages: PageBits) {
        self.offered = self.offered | pages;
        self.fresh = self.fresh | pages;
        self.plain = self.plain & !pages;
    }

    /// The mapping of the pages is tracked from now on.
    pub(crate) fn is_tracked(&mut self, pages: PageBits) {
        self.fresh = self.fresh & !pages;
        if !(pages & self.offered & !(self.plain | self.stored)).is_empty() {
            self.reading = Reading::Wanted;
        }
    }

    /// The guest takes `pages` back: they are not merged any more, though they may be stored.
    pub(crate) fn withdraw(&mut self, pages: PageBits) {
        let others = !pages;
        self.offered = self.offered & others;
        self.fresh = self.fresh & others;
        self.plain = self.plain & others;
    }

    /// The mapping of `pages` is gone.
    pub(crate) fn forget(&mut self, pages: PageBits) {
        self.withdraw(pages);
        self.unstore(pages);
        self.release(pages);
    }

    /// `pages` are kept back no more: something else may be mapped there.
    pub(crate) fn release(&mut self, pages: PageBits) {
        self.kept = self.kept & !pages;
        self.words = self.words & !pages;
    }

    /// The guest takes `pages` back, and they are not offered for it again.
    pub(crate) fn keep(&mut self, pages: PageBits) {
        self.withdraw(pages);
        self.kept = self.kept | pages;
    }

    /// A call may have changed what the mapping of `pages` has.
    pub(crate) fn unread(&mut self, pages: PageBits) {
        self.plain = self.plain & !pages;
        self.odd |= !(self.stored & pages).is_empty();
        if !(self.offered & pages).is_empty() {
            self.reading = Reading::Wanted;
        }
    }

    /// `page` was merged where it lies, in a mapping with the chunk's attributes.
    pub(crate) fn store(&mut self, page: usize) {
        self.stored.insert(page);
        self.noted.remove(page);
    }

    /// `page` was moved or found in a mapping of a store, with attributes that only the kernel knows there.
    pub(crate) fn note(&mut self, page: usize) {
        self.stored.insert(page);
        self.noted.insert(page);
        self.odd = true;
    }

    /// `pages` lie in no mapping of a store any more.
    pub(crate) fn unstore(&mut self, pages: PageBits) {
        self.stored = self.stored & !pages;
        self.noted = self.noted & !pages;
    }

    /// A stored page has become anonymous, with the attributes it had: those of the chunk, or its own.
    pub(crate) fn is_anonymous(&mut self, page: usize) {
        let own = self.odd;
        self.unstore(PageBits::of(page..page + 1));
        self.odd &= !self.stored.is_empty();
        if !self.offered.contains(page) {
            return;
        }
        self.fresh.insert(page);
        if own {
            self.plain.remove(page);
            self.reading = Reading::Wanted;
        } else {
            self.plain.insert(page);
        }
    }

    /// No mapping of a store is where `page` lies: another has come there, by a call that no hook saw.
    pub(crate) fn is_not_stored(&mut self, page: usize) {
        self.unstore(PageBits::of(page..page + 1));
        self.odd &= !self.stored.is_empty();
        if self.offered.contains(page) {
            self.reading = Reading::Wanted;
        }
    }

    /// The kernel says what a mapping of some offered pages has. The first decides for the chunk, unless
    /// others of it are plain, or something is stored in it. A page offered since the reading began may have
    /// another mapping: it is fresh.
    pub(crate) fn learn(&mut self, pages: Range<usize>, told: Option<Told>) {
        if self.reading != Reading::Begun {
            return;
        }
        let known = PageBits::of(pages) & self.offered & !self.fresh;
        self.plain = self.plain & !known;
        let fits = |told: &Told| told.tracked && (!self.any || rules::admits(&told.attributes));
        let Some(Told { attributes, .. }) = told.filter(fits) else {
            return;
        };
        if self.plain.is_empty() && self.stored.is_empty() {
            if attributes.locked {
                LOCKED.store(true, Ordering::Relaxed);
            }
            self.attributes = attributes;
        }
        // How memory was locked parts nothing: a discard locks on fault.
        let alike = Attributes {
            on_fault: self.attributes.on_fault,
            ..attributes
        };
        if self.attributes == alike {
            self.plain = self.plain | known;
        }
    }

    /// The offered pages that can be merged.
    pub(crate) fn mergeable(&self) -> PageBits {
        self.offered & (self.plain | self.stored)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::lock::lock;

    #[test]
    fn a_page_with_attributes_of_its_own_is_read_before_it_is_merged_again() {
        let (stored, told) = (PageBits::of(3..5), Attributes::default());
        let mut chunk = Chunk {
            offered: stored,
            stored,
            ..Chunk::EMPTY
        };
        chunk.is_anonymous(4);
        assert!(chunk.mergeable().contains(4));
        // The other stays in the store, and is given something there.
        chunk.unread(PageBits::of(3..4));
        chunk.is_anonymous(3);
        assert!(!chunk.mergeable().contains(3));
        chunk.is_tracked(PageBits::of(3..4));
        assert_eq!(chunk.reading, Reading::Wanted);
        chunk.reading = Reading::Begun;
        let dontfork = Attributes {
            dontfork: true,
            ..told
        };
        let told = |attributes| {
            Some(Told {
                attributes,
                tracked: true,
            })
        };
        chunk.learn(3..4, told(dontfork));
        assert!(!chunk.mergeable().contains(3) && chunk.mergeable().contains(4));
    }

    /// Numbers that look random, and are the same in each run (xorshift).
    pub(crate) fn randoms() -> impl FnMut() -> u64 {
        let mut state = 0x9e37_79b9_7f4a_7c15;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        }
    }

    #[test]
    fn calls_over_many_pages_do_what_they_do_page_by_page() {
        let mut random = randoms();
        let operations: [fn(&mut Chunk, PageBits); 5] = [
            Chunk::withdraw,
            Chunk::forget,
            Chunk::release,
            Chunk::keep,
            Chunk::unread,
        ];
        for turn in 0..4000 {
            let mut some = || match random() % 4 {
                0 => PageBits::EMPTY,
                1 => PageBits::FULL,
                _ => PageBits([(); CHUNK_PAGES / 64].map(|()| random() & random())),
            };
            let filled = Chunk {
                offered: some(),
                stored: some(),
                noted: some(),
                fresh: some(),
                plain: some(),
                kept: some(),
                words: some(),
                ..Chunk::EMPTY
            };
            let copy = |chunk: &Chunk| Chunk { ..*chunk };
            let mut below = |end: usize| usize::try_from(random()).unwrap() % end;
            let start = below(CHUNK_PAGES);
            let range = start..start + below(CHUNK_PAGES + 1 - start);
            for operation in operations {
                let (mut at_once, mut by_page) = (copy(&filled), copy(&filled));
                operation(&mut at_once, PageBits::of(range.clone()));
                for page in range.clone() {
                    operation(&mut by_page, PageBits::of(page..page + 1));
                }
                assert!(is_same(&at_once, &by_page), "turn {turn}, {range:?}");
            }
        }
    }

    /// Whether the sets of two chunks, and what calls change beside them, are the same.
    fn is_same(one: &Chunk, other: &Chunk) -> bool {
        let all = |chunk: &Chunk| {
            let sets = [
                (chunk.offered, chunk.stored),
                (chunk.noted, chunk.fresh),
                (chunk.plain, chunk.kept),
            ];
            let known = (chunk.odd, chunk.reading, chunk.any);
            let ksm = (chunk.to_ksm, chunk.in_ksm);
            (sets, chunk.words, known, ksm, chunk.attributes)
        };
        all(one) == all(other)
    }

    #[test]
    fn zeros_are_an_empty_chunk() {
        // SAFETY: zeros are valid in all fields: sets, numbers, `false`, and the first variants.
        let zeros = unsafe { std::mem::zeroed::<Chunk>() };
        assert!(is_same(&zeros, &Chunk::EMPTY));
    }

    #[test]
    fn pages_of_the_table_go_back_when_no_chunk_of_them_is_known() {
        let base = 0x7ab8_0000_0000_usize & !(LEAF_SPAN - 1);
        let in_core = |index: usize| {
            let (leaf, _) = leaf_of(base).unwrap();
            let place = offset_of!(Leaf, chunks) + index * size_of::<Chunk>();
            let page = (std::ptr::from_ref(leaf).addr() + place) & !(PAGE_BYTES - 1);
            let mut told = 0u8;
            // SAFETY: the kernel writes a byte for the one page.
            let result = unsafe { libc::mincore(page as *mut _, PAGE_BYTES, &raw mut told) };
            assert_eq!(result, 0);
            told & 1 != 0
        };
        let mut guard = lock().unwrap();
        let mut table = guard.table();
        // Two pages of entries and more: one lies on both.
        for index in 20..40 {
            let at = base + index * CHUNK_BYTES;
            table.make(at).unwrap().offered = PageBits::of(index..index + 1);
        }
        assert!(in_core(20) && in_core(30));
        for index in (20..40).filter(|index| *index != 30) {
            let at = base + index * CHUNK_BYTES;
            table.get(at).unwrap().forget(PageBits::FULL);
            table.mark_clean(at);
            assert!(table.get(at).is_none());
        }
        assert!(in_core(30) && !in_core(20) && !in_core(39));
        let at = base + 30 * CHUNK_BYTES;
        assert_eq!(table.get(at).unwrap().offered, PageBits::of(30..31));
        table.get(at).unwrap().forget(PageBits::FULL);
        table.mark_clean(at);
        assert!(!in_core(30));
        let again = table.make(at).unwrap();
        assert!(is_same(again, &Chunk::EMPTY));
        table.mark_clean(at);
    }

    #[test]
    fn chunks_come_and_go() {
        let base = 0x7abc_0000_0000_usize & !(CHUNK_BYTES - 1);
        let mut guard = lock().unwrap();
        let mut table = guard.table();
        assert!(table.get(base).is_none());
        assert!(!touches(base, 4096));
        for chunk in [base, base + CHUNK_BYTES, base + LEAF_SPAN] {
            table.make(chunk).unwrap().offered = PageBits::FULL;
            table.mark_dirty(chunk);
        }
        assert!(touches(base + 8192, 1) && !touches(base + 2 * CHUNK_BYTES, 4096));
        assert!(touches(base - 1, 2) && !touches(base - 2, 2));
        assert_eq!(table.next(base, true), Some(base));
        let mut seen = Vec::new();
        table.each_known(base + 4096, LEAF_SPAN - 8192, |chunk, pages, known| {
            seen.push((chunk, pages));
            known.offered = PageBits::EMPTY;
        });
        assert_eq!(seen, [(base, 1..512), (base + CHUNK_BYTES, 0..512)]);
        table.mark_clean(base);
        table.mark_clean(base + CHUNK_BYTES);
        assert_eq!(table.next(base, false), Some(base + LEAF_SPAN));
        table.get(base + LEAF_SPAN).unwrap().offered = PageBits::EMPTY;
        table.mark_clean(base + LEAF_SPAN);
        // Other tests have chunks of their own in the table, elsewhere.
        let next = table.next(base, false);
        assert!(next.is_none_or(|next| next > base + LEAF_SPAN), "{next:x?}");
    }
}
