//! Programs that offer nothing: all their memory is offered for them (`pageone run --any`).
//!
//! It is the memory that prctl(PR_SET_MEMORY_MERGE) gives to KSM, less the memory that one table below leaves out. The hooks know
//! only what passes libc, so it is the kernel that is asked, at each sync:
//!
//! ```text
//!   sync ─▶ walk: PROCMAP_QUERY, mapping by mapping ─▶ something that the table does not know, for the second time?
//!                                                        └─▶ read: smaps, with the flags ─▶ the rules ─▶ offers
//!                                                                                              │
//!              registered under the lock if it is anonymous still, read again, armed ◀─────────┘   (as every offer)
//! ```
//!
//! A walk costs 0.5 µs a mapping, smaps walks all page tables. Both are made so rarely that they take 2 % of the time at
//! most. Memory that comes and goes between two walks is never read about.
//!
//! **What this relies on.** An offer by the program says that its memory may be absent for a moment. Here no program says so:
//!
//! - A1 *The agent's thread touches no memory that it may have taken out*: it would sleep for ever. Its own memory, and the
//!   variables of the library whose string functions it calls, are marked ([`own`](crate::own)); marked memory
//!   has a flag that no rule admits, however it was offered. It has its own stack and thread-local storage, calls
//!   no allocator, and its library is bound when it is loaded.
//! - A2 *The kernel finds its own words of a thread that ends*. It clears the word at which others join a thread,
//!   reads the list of robust locks, and marks each lock in it, in a thread that is ending. And a thread that is ending does not sleep
//!   on an absent page, it goes on without. Then a join would never return, and no waiter would hear that a lock's owner is dead. libc
//!   keeps the word and the head of the list in one line of the cache. A lock lies where the program wants it. So the
//!   pages where threads have any of these are kept back at each sync ([`keep_words`]). A thread that is younger than the sync wrote
//!   its page when it was made, and its locks when it took them. Pages that were written since the engine looked are not taken
//!   out to be merged. A thread that is younger than that look at the page sleeps at its first instruction of libc, which is long
//!   before it ends. A thread that libc's clone(2) makes may have its word anywhere: that page is kept back before
//!   ([`keep_word_of_clone`]). **The limit**: nothing tells the agent of a word that goes to set_tid_address(2), or to clone(2)
//!   past libc's function.
//! - A3 *Memory that is offered by mistake is not merged.* Between the reading and the offer a mapping may be exchanged, by a
//!   call that no hook sees. Registering, reading again and arming are the same as for every other offer, and refuse memory of
//!   another kind; the rules are asked again with the second reading.
//! - A4 *A thread in a hook never waits for a page while the agent waits for its lock*. Windows hold the lock, so while a hook has
//!   it nothing is out. Ranges that a window could not let go of ([`held`](crate::window)) are let go of without the lock.
//! - A5 *Code that discards memory tells the hooks*. Go's runtime discards by system calls of its own, also in a program that
//!   uses libc: where zeros belong, canonical content would come back. So does AddressSanitizer's. So nothing more is offered
//!   once a program or library of Go is mapped ([`golang`]), or that sanitizer's shadow memory ([`sanitizer`]). **The limit**:
//!   other code that discards its own memory past libc.
//!
//! Stacks of signals, of coroutines, the heap, arenas and thread-local storage need nothing more: a thread that touches
//! them, in the kernel too, sleeps until the window ends.
//!
//! **Memory that grows beside tracked memory waits** until it is a sixteenth of what the table knows there without a gap, or
//! 16 MiB. A tracked mapping is of another kind than what comes beside it (brk, mmap, mprotect of an arena). So the kernel gives the newcomer a
//! mapping and an `anon_vma` of its own, and never joins the two. To track each step of the growth would leave a mapping for each, up to
//! vm.max_map_count. What waits grows as one mapping, and their number with the logarithm of the whole, then by one in 16 MiB.
//!
//! **Children of fork** get an agent of their own when they have lived for a while, as programs do. The thread is made in
//! the fork and sleeps. Pages that a child still shares by fork stay so: MOVE refuses such a page.

use std::ops::Range;
use std::time::Duration;

use rustix::io::Result;
use sys::golang;
use sys::mapping::OwnMemory;
use sys::rights::Threads;
use sys::sanitizer;
use sys::task;
use sys::vma::{Maps, Told, Vma};
use wire::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES, PageBits};

use crate::config::config;
use crate::lock::{Guard, lock};
use crate::rules::{fits, looks_fit, touch};
use crate::table::{ADDRESS_LIMIT, Chunk, pages_of};
use crate::thread::{is_barred, now};

/// A look that took so long is followed by a pause so many times as long.
pub(crate) const SPARING: u32 = 50;
/// After so long everything is read again: flags change, and mappings are exchanged unseen.
const AGAIN: Duration = Duration::from_secs(64);
/// So much address space is looked at or offered while the lock is held.
const PART_BYTES: usize = 256 * CHUNK_BYTES;

/// The guest takes a range back, and it is not offered for it again.
pub(crate) fn keep(guard: &mut Guard, start: usize, len: usize) {
    let any = config().any.is_some();
    let take_back = |_: usize, pages: Range<usize>, chunk: &mut Chunk| match any {
        true => chunk.keep(PageBits::of(pages)),
        false => chunk.withdraw(PageBits::of(pages)),
    };
    guard.table().each_known(start, len, take_back);
    if !any {
        return;
    }
    // Of the rest there is something to remember where something is mapped. **The limit**: where no list of mappings can be had now, and
    // the agent has one later, it offers what it did not know.
    let end = start.saturating_add(len).min(ADDRESS_LIMIT);
    let _ = guard.at_desk(|guard| -> Result<()> {
        let (maps, mut at) = (Maps::open()?, start);
        while let Some(vma) = maps.find(at)?.filter(|vma| vma.start < end) {
            let mapped = vma.start.max(at)..vma.end.min(end);
            keep_mapped(guard, mapped);
            at = vma.end;
        }
        Ok(())
    });
}

/// The same for a range that is mapped.
fn keep_mapped(guard: &mut Guard, range: Range<usize>) {
    let mut table = guard.table();
    for address in (range.start & !(CHUNK_BYTES - 1)..range.end).step_by(CHUNK_BYTES) {
        if let Some(chunk) = table.make(address) {
            chunk.keep(PageBits::of(pages_of(address, range.start, range.end)));
            table.mark_dirty(address);
        }
    }
}

/// Keeps back the pages that hold the kernel's words of a thread (A2), whether the program or the agent offered them.
pub(crate) fn keep_words(threads: &Threads) {
    let memory = OwnMemory::open().ok();
    let kept = each_word(threads, memory.as_ref(), None, |word| {
        if crate::table::touches(word, 1)
            && let Some(mut guard) = lock()
        {
            keep_word(&mut guard, word);
        }
    });
    // Without the list of threads no window may begin; the session's next look at them fails too, and ends it.
    let _ = kept;
}

/// Where the kernel's words of threads are, for a call that freezes memory: since the last sync threads were made, and locks taken.
/// **The limit**: a thread that is made, or takes a lock, after this look, and ends while its page is frozen.
pub(crate) struct Words {
    threads: Threads,
    /// None where it may not be opened: then only the words that libc keeps are known, not the locks.
    memory: Option<OwnMemory>,
    caller: u32,
}

impl Words {
    /// For a call of thread `caller`, which does not end meanwhile.
    ///
    /// # Errors
    /// What opening files of /proc gives.
    pub(crate) fn open(caller: u32) -> Result<Self> {
        Ok(Self {
            threads: Threads::open()?,
            memory: OwnMemory::open().ok(),
            caller,
        })
    }

    /// Keeps these pages back, with the lock held.
    ///
    /// # Errors
    /// What reading the list of threads gives.
    pub(crate) fn keep(&self, guard: &mut Guard) -> Result<()> {
        let (memory, caller) = (self.memory.as_ref(), Some(self.caller));
        each_word(&self.threads, memory, caller, |word| keep_word(guard, word))
    }
}

/// Calls `each` with the kernel's words of all threads `but` one. The lists of locks are the program's, and change meanwhile. So they are read through
/// the file, which has an error for what is not there.
fn each_word(
    threads: &Threads,
    memory: Option<&OwnMemory>,
    but: Option<u32>,
    mut each: impl FnMut(usize),
) -> Result<()> {
    threads.each(|thread| {
        let head = task::robust_list(thread).filter(|_| but != Some(thread));
        let Some(head) = head else { return };
        each(head);
        if let Some(memory) = memory {
            task::robust_locks(memory, head, &mut each);
        }
    })
}

/// Keeps back the page of the word that the kernel clears at the end of a thread which is about to be made. It does not tell
/// afterwards where that is.
pub(crate) fn keep_word_of_clone(word: usize) {
    let page = word & !(PAGE_BYTES - 1);
    let concerns = config().any.is_some() || crate::table::touches(page, 1);
    if concerns
        && !is_barred()
        && let Some(mut guard) = lock()
    {
        match config().any {
            Some(_) => keep_mapped(&mut guard, page..page.saturating_add(PAGE_BYTES)),
            None => keep(&mut guard, page, PAGE_BYTES),
        }
        if let Some(chunk) = guard.table().get(page & !(CHUNK_BYTES - 1)) {
            chunk.words.insert(page % CHUNK_BYTES / PAGE_BYTES);
        }
    }
}

/// Keeps back the page that has a word of the kernel's, if it is known.
fn keep_word(guard: &mut Guard, word: usize) {
    let (address, page) = (word & !(CHUNK_BYTES - 1), word % CHUNK_BYTES / PAGE_BYTES);
    let mut table = guard.table();
    if let Some(chunk) = table.get(address)
        && !(chunk.kept.contains(page) && chunk.words.contains(page))
    {
        chunk.keep(PageBits::of(page..page + 1));
        chunk.words.insert(page);
        table.mark_dirty(address);
    }
}

/// Some numbers, as a Bloom filter: of others, few seem to be in it while these are some hundreds.
#[derive(Clone, Copy, Debug)]
struct Numbers([u64; Self::BITS / 64]);

impl Numbers {
    const BITS: usize = 8192;

    fn bits(number: usize) -> [usize; 3] {
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        [25, 38, 51].map(|shift| (mixed >> shift) % Self::BITS)
    }

    fn insert(&mut self, number: usize) {
        for bit in Self::bits(number) {
            if let Some(word) = self.0.get_mut(bit / 64) {
                *word |= 1 << (bit % 64);
            }
        }
    }

    fn contains(&self, number: usize) -> bool {
        let has = |bit: usize| {
            self.0
                .get(bit / 64)
                .is_some_and(|word| word >> (bit % 64) & 1 == 1)
        };
        Self::bits(number).into_iter().all(has)
    }
}

impl Default for Numbers {
    fn default() -> Self {
        Self([0; Self::BITS / 64])
    }
}

/// What the agent's thread remembers of its walks.
#[derive(Debug, Default)]
pub(crate) struct Walks {
    /// Where unknown memory began in the last walk.
    seen: Numbers,
    /// Mappings that were unknown still after the last reading, by [`Self::number`].
    refused: Numbers,
    /// Earliest times.
    next_walk: Duration,
    next_reading: Duration,
    /// When `refused` is no longer believed.
    again: Duration,
    /// Nothing more is offered (A5).
    is_over: bool,
}

impl Walks {
    /// Another mapping may begin where one was refused.
    fn number(vma: &Vma) -> usize {
        vma.start ^ vma.end.rotate_left(24)
    }

    /// Offers what has come.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub(crate) fn offer_all(&mut self, maps: &Maps) -> Result<()> {
        let begun = now();
        if config().any.is_none() || self.is_over || begun < self.next_walk {
            return Ok(());
        }
        if begun >= self.again {
            self.refused = Numbers::default();
            self.again = begun + AGAIN;
        }
        let mut seen = Numbers::default();
        let mut ripe = false;
        each_unknown(maps, |vma, waits| {
            let is_refused = self.refused.contains(Self::number(vma));
            ripe |= !waits && self.seen.contains(vma.start) && !is_refused;
            seen.insert(vma.start);
        })?;
        self.seen = seen;
        let walked = now();
        self.next_walk = walked + (walked - begun) * SPARING;
        if !ripe || walked < self.next_reading {
            return Ok(());
        }
        let memory = OwnMemory::open()?;
        let done = read();
        // Behind the reading: what it found of theirs was made after they were mapped. It is not reported yet.
        let found = match sanitizer::is_mapped(maps) {
            Ok(false) => golang::is_mapped(maps, &memory),
            found => found,
        };
        match found {
            Ok(false) => done?,
            found => {
                self.is_over = found.is_ok();
                take_back();
                return found.map(drop);
            }
        }
        let mut refused = Numbers::default();
        each_unknown(maps, |vma, waits| {
            if !waits {
                refused.insert(Self::number(vma));
            }
        })?;
        self.refused = refused;
        let read = now();
        self.next_reading = read + (read - walked) * SPARING;
        Ok(())
    }
}

/// Calls `each` with each mapping that looks fit and of which the table does not know all, and whether it
/// [`waits`].
fn each_unknown(maps: &Maps, mut each: impl FnMut(&Vma, bool)) -> Result<()> {
    let mut next = maps.find(0)?;
    let mut beside = false;
    while let Some(vma) = next.filter(|vma| vma.start < ADDRESS_LIMIT) {
        next = maps.find(vma.end)?;
        let touches = next.is_some_and(|next| touch(&vma, &next));
        if looks_fit(&vma, beside || touches) && is_unknown(&vma) {
            each(&vma, waits(&vma));
        }
        beside = touches;
    }
    Ok(())
}

/// A mapping beside known memory is offered when it is so large a part of that.
const PART: usize = 16;

/// One of so many bytes in any case: 65530 mappings of this size are a TiB.
const LARGE: usize = 16 << 20;

/// Whether a mapping has come beside known memory, is small against it, and nothing of it is offered. Between two of them it cannot
/// grow any more, and is one mapping for good.
fn waits(vma: &Vma) -> bool {
    let len = vma.end - vma.start;
    if len >= LARGE {
        return false;
    }
    let beyond = |most| {
        let below = vma.start.checked_sub(PAGE_BYTES);
        let below = below.is_some_and(|page| known_beyond(page, Side::Below, most));
        (below, known_beyond(vma.end, Side::Above, most))
    };
    match beyond(0) {
        (true, true) | (false, false) => false,
        _ => {
            let (below, above) = beyond(len / PAGE_BYTES * PART);
            (below || above) && !is_offered(vma)
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Below,
    Above,
}

/// Whether `page` is offered and tracked, and so are more than `most` pages without a gap from there on, to one side. What is not
/// tracked yet is no reason that its neighbour has a mapping of its own.
fn known_beyond(page: usize, side: Side, most: usize) -> bool {
    let (mut at, mut known) = (page, 0);
    while let Some(mut guard) = lock() {
        for _ in 0..PART_BYTES / CHUNK_BYTES {
            if at >= ADDRESS_LIMIT {
                return false;
            }
            let (chunk, place) = (at & !(CHUNK_BYTES - 1), at % CHUNK_BYTES / PAGE_BYTES);
            let mut table = guard.table();
            let pages = table.get(chunk).map(|chunk| {
                let tracked = chunk.offered | chunk.stored;
                match at == page {
                    true if chunk.fresh.contains(place) || !tracked.contains(place) => {
                        PageBits::EMPTY
                    }
                    _ => tracked | chunk.kept & chunk.words,
                }
            });
            let run = |pages: PageBits| {
                let mut runs = pages.runs().map(|(first, len)| first..first + len);
                runs.find(|run| run.contains(&place))
            };
            let Some(run) = pages.and_then(run) else {
                return false;
            };
            let (pages, end, next) = match side {
                Side::Below => (place + 1 - run.start, 0, chunk.checked_sub(PAGE_BYTES)),
                Side::Above => (run.end - place, CHUNK_PAGES, Some(chunk + CHUNK_BYTES)),
            };
            known += pages;
            let goes_on = run.start == end || run.end == end;
            match next {
                _ if known > most => return true,
                Some(next) if goes_on => at = next,
                _ => return false,
            }
        }
        guard.give_way();
    }
    false
}

/// Whether a page of a mapping is offered.
fn is_offered(vma: &Vma) -> bool {
    any_chunk(vma, |pages, chunk| {
        chunk.is_some_and(|chunk| !(pages & chunk.offered).is_empty())
    })
}

/// What was offered for the program and is not merged is offered no more.
fn take_back() {
    let Some(mut guard) = lock() else { return };
    guard
        .table()
        .each_known(0, ADDRESS_LIMIT, |_, pages, chunk| {
            let offered = PageBits::of(pages) & chunk.offered & !chunk.stored;
            // In a chunk of the program's own offers what was read lately may be either's.
            let taken = match chunk.any {
                true => offered,
                false => offered & chunk.fresh,
            };
            chunk.keep(taken);
        });
}

fn is_unknown(vma: &Vma) -> bool {
    any_chunk(vma, |pages, chunk| {
        chunk.is_none_or(|chunk| !(pages & !(chunk.offered | chunk.kept)).is_empty())
    })
}

/// Whether it is so of any chunk of a mapping: of its pages there, and of what the table has of the chunk.
fn any_chunk(vma: &Vma, mut is: impl FnMut(PageBits, Option<&mut Chunk>) -> bool) -> bool {
    let mut found = false;
    by_parts(vma, |guard, part| {
        let mut table = guard.table();
        found = chunks(part).any(|address| {
            let pages = PageBits::of(pages_of(address, part.start, part.end));
            is(pages, table.get(address))
        });
        !found
    });
    found
}

/// Does something under the lock with one part of a mapping after another, until it says that it is done. No hook waits for more than a
/// part: all of a great mapping may take seconds.
fn by_parts(vma: &Vma, mut each: impl FnMut(&mut Guard, &Vma) -> bool) {
    let parts = (vma.start & !(PART_BYTES - 1)..vma.end.min(ADDRESS_LIMIT)).step_by(PART_BYTES);
    for at in parts {
        let part = Vma {
            start: at.max(vma.start),
            end: vma.end.min(at + PART_BYTES),
            ..*vma
        };
        let Some(mut guard) = lock() else { return };
        if !each(&mut guard, &part) {
            return;
        }
        guard.give_way();
    }
}

fn chunks(vma: &Vma) -> impl Iterator<Item = usize> {
    (vma.start & !(CHUNK_BYTES - 1)..vma.end.min(ADDRESS_LIMIT)).step_by(CHUNK_BYTES)
}

/// Reads the flags of all mappings, and offers what no rule leaves out.
fn read() -> Result<()> {
    let offer = |vma: Vma, beside: bool, told: Option<Told>| {
        let tracked = told.is_some_and(|told| told.tracked);
        if fits(&vma, beside, told.as_ref()) && (tracked || !waits(&vma)) {
            note(&vma, tracked);
        }
    };
    // One mapping behind, for what comes next to it.
    let mut last: Option<(Vma, bool, Option<Told>)> = None;
    sys::vma::attributes(0, ADDRESS_LIMIT, |vma, told| {
        let touches = last.is_some_and(|(last, ..)| touch(&last, &vma));
        if let Some((last, beside, told)) = last.replace((vma, touches, told)) {
            offer(last, beside || touches, told);
        }
    })?;
    if let Some((last, beside, told)) = last {
        offer(last, beside, told);
    }
    Ok(())
}

/// Notes the offer of a mapping.
fn note(vma: &Vma, tracked: bool) {
    by_parts(vma, |guard, part| note_part(guard, part, tracked).is_some());
}

/// What is offered already and tracked stays as it is. `None` where the table has no memory for more.
fn note_part(guard: &mut Guard, part: &Vma, tracked: bool) -> Option<()> {
    let mut table = guard.table();
    for address in chunks(part) {
        let chunk = table.make(address)?;
        let known = match tracked {
            true => chunk.offered,
            false => chunk.offered & chunk.fresh,
        };
        let pages = PageBits::of(pages_of(address, part.start, part.end));
        let new = pages & !(known | chunk.kept);
        chunk.any |= chunk.offered.is_empty();
        chunk.offer(new);
        if !new.is_empty() {
            table.mark_dirty(address);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use super::*;

    #[test]
    fn memory_that_was_taken_back_is_not_offered_again() {
        let base = 0x7ab0_0000_0000_usize;
        let vma = crate::rules::tests::anonymous(base + PAGE_BYTES..base + 2 * CHUNK_BYTES);
        note(&vma, false);
        let mut guard = lock().unwrap();
        let mut table = guard.table();
        let chunk = table.get(base).unwrap();
        assert!(!chunk.offered.contains(0) && chunk.offered.contains(1) && chunk.any);
        chunk.keep(PageBits::of(5..6));
        note_part(&mut guard, &vma, false).unwrap();
        let mut table = guard.table();
        let chunk = table.get(base).unwrap();
        assert!(!chunk.offered.contains(5) && chunk.kept.contains(5));
        // Tracked, all is known; what another mapping took the place of is offered anew.
        chunk.fresh = wire::PageBits::EMPTY;
        note_part(&mut guard, &vma, true).unwrap();
        assert!(guard.table().get(base).unwrap().fresh.is_empty());
        note_part(&mut guard, &vma, false).unwrap();
        assert!(guard.table().get(base).unwrap().fresh.contains(1));
        // What is gone is forgotten; then the place is as any other.
        for at in [base, base + CHUNK_BYTES] {
            let mut table = guard.table();
            let chunk = table.get(at).unwrap();
            chunk.forget(PageBits::FULL);
            table.mark_clean(at);
            assert!(table.get(at).is_none());
        }
    }

    #[test]
    fn a_hook_need_not_wait_for_all_of_a_great_mapping() {
        let vma = crate::rules::tests::anonymous(0..ADDRESS_LIMIT);
        let (asks, had) = (AtomicBool::new(false), AtomicBool::new(false));
        let begun = Instant::now();
        let mut had_between = false;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !asks.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                let _guard = lock();
                had.store(true, Ordering::Relaxed);
            });
            by_parts(&vma, |_, _| {
                had_between = had.load(Ordering::Relaxed);
                asks.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
                !had_between && begun.elapsed() < Duration::from_secs(60)
            });
        });
        assert!(had_between);
    }

    #[test]
    fn memory_beside_known_memory_waits_until_it_is_a_sixteenth_of_it() {
        let base = 0x7ad0_0000_0000_usize + 64 * CHUNK_BYTES;
        let of = |from: usize, to: usize| crate::rules::tests::anonymous(from..to);
        let track = |vma: &Vma| {
            let mut guard = lock().unwrap();
            let mut table = guard.table();
            for at in chunks(vma) {
                table.get(at).unwrap().fresh = PageBits::EMPTY;
            }
        };
        let known = of(base, base + 32 * CHUNK_BYTES);
        note(&known, false);
        let small = 2 * CHUNK_BYTES - PAGE_BYTES;
        let (below, above) = (of(base - small, base), of(known.end, known.end + small));
        assert!(!waits(&below), "the known memory is not tracked yet");
        track(&known);
        assert!(waits(&below) && waits(&above));
        for fits in [
            of(base - small - PAGE_BYTES, base),
            of(known.end, known.end + small + PAGE_BYTES),
            of(known.end + PAGE_BYTES, known.end + PAGE_BYTES + small),
            known,
        ] {
            assert!(!waits(&fits), "{fits:?}");
        }
        // What fills a gap does not grow.
        let second = of(above.end, base + 160 * CHUNK_BYTES);
        note(&second, false);
        track(&second);
        assert!(!waits(&above));
        note(&above, false);
        track(&above);
        // Of more than 256 MiB a sixteenth is more than is waited for.
        let large = of(base - LARGE, base);
        assert!(waits(&of(large.start + PAGE_BYTES, base)) && !waits(&large));
        // Of what is offered in a part the rest is offered, too.
        note(&of(below.start, below.start + PAGE_BYTES), false);
        assert!(!waits(&below));
        let mut guard = lock().unwrap();
        let mut table = guard.table();
        for at in chunks(&of(below.start, second.end)) {
            if let Some(chunk) = table.get(at) {
                *chunk = Chunk::EMPTY;
                table.mark_clean(at);
            }
        }
    }

    #[test]
    fn few_mappings_are_taken_for_others() {
        let number = |at: usize, pages: usize| {
            let start = 0x7ad0_0000_0000 + at * 3 * PAGE_BYTES;
            Walks::number(&crate::rules::tests::anonymous(
                start..start + pages * PAGE_BYTES,
            ))
        };
        let mut some = Numbers::default();
        (0..300).for_each(|at| some.insert(number(at, 1)));
        assert!((0..300).all(|at| some.contains(number(at, 1))));
        let longer = (0..300).filter(|&at| some.contains(number(at, 2)));
        let elsewhere = (300..10_000).filter(|&at| some.contains(number(at, 1)));
        let mistaken = longer.chain(elsewhere).count();
        assert!(mistaken < 50, "{mistaken}");
    }

    #[test]
    fn a_great_mapping_is_offered_in_all_its_parts() {
        let first = 0x7ac0_0000_0000_usize;
        let vma = crate::rules::tests::anonymous(first..first + 3 * PART_BYTES + CHUNK_BYTES);
        assert!(is_unknown(&vma));
        note(&vma, false);
        assert!(!is_unknown(&vma), "all of it is offered");
        let mut guard = lock().unwrap();
        let mut table = guard.table();
        for at in chunks(&vma) {
            *table.get(at).unwrap() = Chunk::EMPTY;
            table.mark_clean(at);
        }
        drop(guard);
        assert!(is_unknown(&vma));
    }
}
