//! Advice on memory, over merged pages.
//!
//! A merged page lies in a private mapping of a store. There the kernel's own `MADV_DONTNEED`
//! would bring the canonical content back where the guest expects zeros, and `MADV_FREE` and
//! `MADV_REMOVE` answer as for a file. So a call over a range in which something may be stored looks at each
//! mapping there, in the order of the kernel:
//!
//! | mapping | so |
//! |---|---|
//! | a store's | anonymous memory is put there, or the call is refused as for anonymous memory |
//! | any other | the call as it came, for just these mappings |
//!
//! A discard may take a mapping more than the guest has left, which the same call over anonymous memory
//! never does. Near that limit ([`scarce`]) the pages are filled with zeros where they are, and
//! stay mappings of the store.
//!
//! A discard of one merged page alone costs several times the kernel's own: most of this is the look, which another thread is
//! asked for, and the new mapping. Where discards follow each other the memory that comes next is made whole in good time: see
//! [`ahead`].
//!
//! Advice that changes the kind of a mapping finds it whole: see [`whole`](mod@whole).

use std::convert::Infallible;
use std::ops::Range;
use std::result;

use rustix::io::{Errno, Result};
use sys::mapping::{self, Access, OwnMemory, Source};
use sys::vma::Vma;
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use super::ahead;
use super::look::Look;
use super::scarce::scarce;
use super::stores::is_store;
use super::tally;
use super::whole::{Untracked, attributes_at, may_be_pinned, untrack, whole};
use crate::lock::Guard;
use crate::table::{ADDRESS_LIMIT, Chunk, DONTNEED_LOCKED, parts_by};
use crate::thread;

/// `MADV_GUARD_INSTALL` (Linux 6.13).
const GUARD_INSTALL: i32 = 102;
/// `MADV_GUARD_REMOVE` (Linux 6.13).
const GUARD_REMOVE: i32 = 103;

/// What advice asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    /// That pages go.
    Discard,
    /// Nothing that depends on what lies behind a private page, and nothing that lasts.
    Little,
    /// The same, and that pages come or go as they do by themselves. It may take long, or wait for a thread of the program that
    /// serves a userfaultfd.
    Presence,
    /// That the pages are of one kind or another.
    Pages,
    /// That the mapping is another from now on.
    Mapping,
}

fn asks(advice: i32) -> Asks {
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_REMOVE => Asks::Discard,
        DONTNEED_LOCKED | GUARD_INSTALL => Asks::Discard,
        libc::MADV_WILLNEED | libc::MADV_COLD | libc::MADV_PAGEOUT => Asks::Presence,
        libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => Asks::Presence,
        GUARD_REMOVE => Asks::Little,
        libc::MADV_COLLAPSE | libc::MADV_HWPOISON | libc::MADV_SOFT_OFFLINE => Asks::Pages,
        // Advice that is not known here may be of any kind.
        _ => Asks::Mapping,
    }
}

/// Whether advice takes no lock: a window lets who brings a page in sleep, as any other thread, and the kernel moves pages out as it
/// likes.
pub(crate) fn is_passed_on(advice: i32) -> bool {
    asks(advice) == Asks::Presence
}

/// Whether advice discards pages.
pub(crate) fn discards(advice: i32) -> bool {
    asks(advice) == Asks::Discard
}

/// madvise(2) over a range that touches known chunks, with the lock held.
///
/// # Errors
/// The kernel's own, as for anonymous memory.
pub(crate) fn madvise(guard: &mut Guard, start: usize, len: usize, advice: i32) -> Result<()> {
    let rounded = len.checked_next_multiple_of(PAGE_BYTES).unwrap_or(0);
    let has_end = start.checked_add(rounded).is_some();
    let refused = !start.is_multiple_of(PAGE_BYTES) || rounded == 0 || !has_end;
    // With no length the kernel tells only whether it knows the advice.
    let old = matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE);
    if refused || !old && tell(start, 0, advice).is_err() {
        return tell(start, len, advice);
    }
    let asks = asks(advice);
    let stored = guard.table().may_be_stored(start, rounded);
    let result = match asks {
        _ if !stored => tell_untracked(guard, start, len, advice),
        Asks::Little | Asks::Presence => tell(start, len, advice),
        Asks::Discard if !thread::may_look() => discard_unseen(guard, start, rounded, advice),
        Asks::Discard => discard(guard, start, rounded, advice),
        Asks::Pages | Asks::Mapping => whole(guard, start, rounded)
            .map_err(|_| Errno::NOMEM)
            .and_then(|()| tell_untracked(guard, start, len, advice)),
    };
    match asks {
        Asks::Mapping => unread(guard, start, rounded),
        Asks::Discard if result.is_ok() && thread::may_look() => {
            ahead::discarded(guard, start, rounded, stored)
        }
        _ => {}
    }
    result
}

fn tell(start: usize, len: usize, advice: i32) -> Result<()> {
    let args = [start, len, advice.cast_unsigned() as usize, 0, 0, 0];
    // SAFETY: the guest's own call, or a part of it.
    unsafe { sys::raw::call(libc::SYS_madvise, args) }.map(drop)
}

/// Gives advice over a range in which nothing is stored. The kernel collapses no page that is armed, so what is to be collapsed is
/// tracked no longer. The next sync tracks it anew, and until then no window takes it.
fn tell_untracked(guard: &mut Guard, start: usize, len: usize, advice: i32) -> Result<()> {
    if advice == libc::MADV_COLLAPSE {
        // What is tracked still is collapsed no more than before.
        let _ = untrack(guard, start, len, Untracked::Anonymous);
        guard.table().note_untracked(start, len);
    }
    tell(start, len, advice)
}

/// The mappings of a range may have changed.
pub(crate) fn unread(guard: &mut Guard, start: usize, len: usize) {
    guard.table().each_known(start, len, |_, pages, chunk| {
        chunk.unread(PageBits::of(pages));
    });
}

/// Forgets `[start, start + len)`: the guest unmapped it or mapped something else there.
pub(crate) fn forget(guard: &mut Guard, start: usize, len: usize) {
    let mut stored = false;
    guard.table().each_known(start, len, |_, pages, chunk| {
        let pages = PageBits::of(pages);
        stored |= !(chunk.stored & pages).is_empty();
        chunk.forget(pages);
    });
    if stored {
        tally::note(guard);
    }
}

/// What was kept back of a range is so no more: something else was mapped there. What another thread has offered there since stays.
pub(crate) fn forget_kept(guard: &mut Guard, start: usize, len: usize) {
    guard.table().each_known(start, len, |_, pages, chunk| {
        chunk.release(PageBits::of(pages) & !(chunk.offered | chunk.stored));
    });
}

/// Advice that discards, over a range in which something may be stored.
fn discard(guard: &mut Guard, start: usize, len: usize, advice: i32) -> Result<()> {
    // Old content in the place of zeros would be worse than a page of zeros.
    let Ok(look) = Look::open(guard) else {
        return discard_unseen(guard, start, len, advice);
    };
    let (mut told, end) = (start, start + len);
    // As the kernel, which goes on behind a hole and says so at the end.
    let mut hole = Ok(());
    let mut tell_to = |told: usize, to: usize| match tell(told, to - told, advice) {
        Err(Errno::NOMEM) => {
            hole = Err(Errno::NOMEM);
            Ok(())
        }
        other => other,
    };
    let seen = each_stored(guard, &look, start..end, |guard, vma, part| {
        if told < part.start {
            tell_to(told, part.start)?;
        }
        if advice == libc::MADV_REMOVE
            || advice != DONTNEED_LOCKED && is_locked(part.start, libc::MADV_REMOVE)
        {
            return Err(Errno::INVAL); // as all anonymous memory, and all that is locked
        }
        match advice {
            libc::MADV_FREE => free_lazily(guard, vma, part.clone())?,
            // Behind a guard over a store's mapping its content would come back.
            GUARD_INSTALL => make_anonymous(guard, vma, part.clone(), Filled::Never)?,
            _ => make_anonymous(guard, vma, part.clone(), Filled::WhereScarce)?,
        }
        told = if advice == GUARD_INSTALL {
            part.start
        } else {
            part.end
        };
        Ok(())
    })?;
    if seen < end {
        return discard_unseen(guard, told, end - told, advice).and(hole);
    }
    if told < end {
        tell_to(told, end)?;
    }
    hole
}

/// Gives the parts of a range that lie in stores' mappings to `each`, and tells up to which address the mappings could be looked at.
/// What `each` does with one mapping must change no other.
fn each_stored<E>(
    guard: &mut Guard,
    look: &Look,
    range: Range<usize>,
    mut each: impl FnMut(&mut Guard, &Vma, Range<usize>) -> result::Result<(), E>,
) -> result::Result<usize, E> {
    let (mut at, end) = (range.start, range.end);
    while at < end {
        let Ok(found) = look.some(guard, at, end) else {
            return Ok(at);
        };
        let mut next = end;
        for vma in found.into_iter().flatten().filter(|vma| vma.start < end) {
            next = vma.end.min(end);
            if is_store(&vma) {
                each(guard, &vma, vma.start.max(at)..next)?;
            }
        }
        at = next;
    }
    Ok(end)
}

/// As [`discard`], where the mappings cannot be looked at: for a filter, for want of a descriptor or of /proc. What is stored gets its
/// zeros where it lies, if it may be written, by no other call than madvise(2). Guards over it are refused: canonical content
/// would come from behind them. The table may be stale: a call that no hook saw may have put a shared mapping there, whose bytes are a
/// file's ([`is_shared`]). **The limits**: what may not be written gets canonical content. And behind a filter nothing tells
/// such a mapping apart.
fn discard_unseen(guard: &mut Guard, start: usize, len: usize, advice: i32) -> Result<()> {
    if !matches!(
        advice,
        libc::MADV_DONTNEED | DONTNEED_LOCKED | libc::MADV_FREE
    ) {
        let end = (start + len).min(ADDRESS_LIMIT);
        let mut pages = (start..end).step_by(PAGE_BYTES);
        return match pages.any(|page| is_stored(guard, page)) {
            true if advice == libc::MADV_REMOVE => Err(Errno::INVAL),
            true => Err(Errno::NOMEM),
            false => tell(start, len, advice),
        };
    }
    let (mut at, end) = (start, (start + len).min(ADDRESS_LIMIT));
    let mut hole = Ok(());
    let mut lies_in_a_store = |page| is_stored(guard, page) && !is_shared(page);
    while at < end {
        let stored = lies_in_a_store(at);
        let mut pages = (at..end).step_by(PAGE_BYTES);
        let stop = pages
            .find(|&page| lies_in_a_store(page) != stored)
            .unwrap_or(end);
        let in_place = stored && !(advice != DONTNEED_LOCKED && is_locked(at, libc::MADV_COLD));
        if !(in_place && zeros_where_it_lies(at, stop - at)) {
            match tell(at, stop - at, advice) {
                Err(Errno::NOMEM) => hole = Err(Errno::NOMEM),
                other => other?,
            }
        }
        at = stop;
    }
    hole
}

/// Empties what lies in stores' mappings of a range whose pages the kernel has moved away. The rest stays as it is: other threads may
/// have written there by now. **The limit**: what may not be written keeps canonical content where the mappings cannot be looked at.
pub(super) fn empty_stored(guard: &mut Guard, start: usize, len: usize) {
    if !guard.table().may_be_stored(start, len) {
        return;
    }
    let end = (start + len).min(ADDRESS_LIMIT);
    let look = thread::may_look().then(|| Look::open(guard));
    let Ok::<_, Infallible>(seen) = match look {
        Some(Ok(look)) => each_stored(guard, &look, start..end, |guard, vma, part| {
            // The kernel's call has succeeded: no error can be told any more.
            let _ = make_anonymous(guard, vma, part, Filled::WhereScarce);
            Ok(())
        }),
        _ => Ok(start),
    };
    // By the table, where the mappings cannot be looked at.
    for page in (seen..end).step_by(PAGE_BYTES) {
        if is_stored(guard, page) && !is_shared(page) {
            zeros_where_it_lies(page, PAGE_BYTES);
        }
    }
}

/// Whether the table says that a page lies in a store's mapping.
pub(crate) fn is_stored(guard: &mut Guard, at: usize) -> bool {
    let mut table = guard.table();
    let chunk = table.get(at & !(CHUNK_BYTES - 1));
    chunk.is_some_and(|chunk| chunk.stored.contains(at % CHUNK_BYTES / PAGE_BYTES))
}

/// Whether the mapping at `at` is locked: of such a one the kernel takes neither advice. Of a store's nothing is removed, for it is private;
/// of another's a page may become cold, and a file's page must not be removed.
fn is_locked(at: usize, advice: i32) -> bool {
    tell(at, PAGE_BYTES, advice) == Err(Errno::INVAL)
}

/// Whether a page lies in a mapping that is shared with others, as no store's is, or in none. Nothing is asked behind a filter, which may
/// end the program for it.
fn is_shared(at: usize) -> bool {
    if !thread::may_look() {
        return false;
    }
    // The kernel makes a second mapping of a shared one, and refuses to make one of a private one before all else but a seal. It says so
    // in its log, once.
    let args = [at, 0, PAGE_BYTES, libc::MREMAP_MAYMOVE as usize, 0, 0];
    // SAFETY: nothing changes where the mapping lies.
    match unsafe { sys::raw::call(libc::SYS_mremap, args) } {
        Ok(second) => {
            // SAFETY: it was made here.
            let _ = unsafe { mapping::unmap(second, PAGE_BYTES) };
            true
        }
        Err(errno) => !matches!(errno, Errno::INVAL | Errno::PERM),
    }
}

/// The same as [`make_anonymous`], but for pages that may be pinned: the kernel frees none that is, and what is read or written through the
/// pin goes on in its frame.
fn free_lazily(guard: &mut Guard, vma: &Vma, part: Range<usize>) -> Result<()> {
    let mut at = part.start;
    while at < part.end {
        let end = ((at & !(CHUNK_BYTES - 1)) + CHUNK_BYTES).min(part.end);
        let pinned = may_be_pinned(guard, at, end - at);
        for (free, _) in parts_by(pinned, at..end).filter(|(_, pinned)| !pinned) {
            make_anonymous(guard, vma, free, Filled::WhereScarce)?;
        }
        at = end;
    }
    Ok(())
}

/// Whether zeros may be written where there is no mapping left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Filled {
    Never,
    WhereScarce,
}

/// Puts empty anonymous memory over a part of a store's mapping, or zeros where there is no mapping left for it.
///
/// # Errors
/// `NOMEM` when the map count is exhausted and no zeros may be written: some pages may be done, the others are untouched.
fn make_anonymous(guard: &mut Guard, vma: &Vma, part: Range<usize>, filled: Filled) -> Result<()> {
    let access = vma.access();
    let may_fill = filled == Filled::WhereScarce;
    let Range { start: mut at, end } = part;
    while at < end {
        let (stop, attributes) = alike(guard, at, end);
        let len = stop - at;
        let splits = (vma.start < at) as usize + (stop < vma.end) as usize;
        let zeros = may_fill && access == Access::ReadWrite;
        if zeros && len < LONG && splits > 0 && scarce(guard, splits) {
            fill_zeros(at, len);
            at = stop;
            continue;
        }
        let future = sys::mapping::locks_future();
        // SAFETY: the guest asked for this range to be discarded; the lock is held, so no window
        // and no other hook works on it.
        let replaced =
            unsafe { mapping::replace(at, len, Source::Anonymous, access, attributes, future) };
        match replaced {
            // Sealed, too, which keeps a mapping from being replaced and its owner from nothing else; and no more may be locked.
            Err((Errno::NOMEM | Errno::PERM | Errno::AGAIN, false)) if zeros => fill_zeros(at, len),
            // What the program may not write the kernel still does. No mapping may be writable and executable after PR_SET_MDWE.
            Err((Errno::NOMEM | Errno::AGAIN | Errno::ACCESS, false)) if may_fill => {
                // SAFETY: the guest asked for this range to be discarded.
                let clear = |_: &mut Guard| unsafe { OwnMemory::open()?.clear(at, len) };
                guard.at_desk(clear).map_err(|_| Errno::NOMEM)?;
            }
            Err((errno, false)) => return Err(errno),
            // Replaced, though perhaps not finished (a lock that no longer fits): the content is
            // as asked.
            Ok(()) | Err((_, true)) => {
                guard.table().each_known(at, len, |_, pages, chunk| {
                    pages.for_each(|page| Chunk::is_anonymous(chunk, page));
                });
                tally::note(guard);
            }
        }
        at = stop;
    }
    Ok(())
}

/// How far from `at` on the chunks have the same attributes, and these.
fn alike(guard: &mut Guard, at: usize, end: usize) -> (usize, mapping::Attributes) {
    let mut table = guard.table();
    let mut of = |chunk: usize| {
        let known = table.get(chunk);
        known.map(|chunk| (chunk.attributes, chunk.odd))
    };
    let mut chunk = at & !(CHUNK_BYTES - 1);
    let first = of(chunk);
    chunk += CHUNK_BYTES;
    while chunk < end && of(chunk) == first {
        chunk += CHUNK_BYTES;
    }
    (chunk.min(end), attributes_at(guard, at))
}

/// Gives a store's mapping zeros in private frames, and tells whether it may be written.
fn zeros_where_it_lies(at: usize, len: usize) -> bool {
    let _open = sys::keys::Open::new();
    let may = tell(at, len, libc::MADV_POPULATE_WRITE).is_ok();
    if may {
        fill_zeros(at, len);
    }
    may
}

fn fill_zeros(at: usize, len: usize) {
    let place = std::ptr::with_exposed_provenance_mut::<u8>(at);
    let _open = sys::keys::Open::new();
    // SAFETY: the guest asked for this range to be discarded, and may write it.
    unsafe { place.write_bytes(0, len) };
}

/// A run of pages so long is worth its mappings.
const LONG: usize = 64 * PAGE_BYTES;
