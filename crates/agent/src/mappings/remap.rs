//! mremap(2) over chunks that are known, with the lock held.
//!
//! Memory that only becomes shorter stays as it is: the call is the kernel's. For every other call the
//! stored pages are made whole first ([`whole`](mod@whole)), so all attributes are the kernel's to carry. One
//! thing is left: windows cut one mapping into several. A range of several mappings that are alike in all that the kernel tells
//! is remapped mapping by mapping. The last of them grows, as the one mapping would. Mappings that differ the kernel moves one by
//! one: to a place of the same length, since 6.17, and none that are tracked. So such a range is tracked no longer, and moves row
//! by row: see [`move_rows`].
//!
//! Where the old mapping stays ([`DONTUNMAP`]) its pages have moved, also those that may be pinned. The kernel alone would show
//! zeros there, and a store's mapping shows the store's content. So anonymous memory is put in its place, right after the call
//! ([`empty_stored`]).
//!
//! **The limits**: between the two, a thread that reads the old place finds that content, and a write to such a page is lost. And
//! mappings that are alike, and that the kernel alone keeps apart for the history of their pages, are remapped too, where it alone
//! says EFAULT. So is a System V segment among other mappings, and a device's, if the device chooses its addresses.

use std::ops::Range;

use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};
use sys::fault::{self, Point};
use sys::mapping::{self, Access, Attributes, Source};
use sys::pagemap::Pagemap;
use sys::vma::{Row, Vma};
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use super::discard::{empty_stored, forget, unread};
use super::look::Look;
use super::stores::is_store;
use super::strays;
use super::whole::{self, Untracked, whole};
use crate::lock::Guard;
use crate::table::{ADDRESS_LIMIT, Chunk, pages_of, parts_by};
use crate::thread;

const MAYMOVE: i32 = libc::MREMAP_MAYMOVE;
const FIXED: i32 = libc::MREMAP_FIXED;
const DONTUNMAP: i32 = libc::MREMAP_DONTUNMAP;

/// Memory for the rows of a range, which the kernel tells.
struct Rows(usize);

/// A guest's call.
#[derive(Clone, Copy)]
pub(crate) struct Remap {
    pub(crate) old: usize,
    pub(crate) old_len: usize,
    pub(crate) new_len: usize,
    pub(crate) flags: i32,
    pub(crate) to: usize,
}

impl Remap {
    /// A call of libc's function. C leaves the register of the target as it was where there is none; libc clears it, for the kernel
    /// looks at it where memory has huge pages.
    pub(crate) fn by_libc(
        (old, old_len): (usize, usize),
        new_len: usize,
        flags: i32,
        to: usize,
    ) -> Self {
        let to = if flags & (FIXED | DONTUNMAP) != 0 {
            to
        } else {
            0
        };
        Self {
            old,
            old_len,
            new_len,
            flags,
            to,
        }
    }
}

/// Carries the call out and gives the new address.
///
/// # Errors
/// As mremap(2).
pub(crate) fn remap(guard: &mut Guard, call: Remap) -> Result<usize> {
    let bad = !call.old.is_multiple_of(PAGE_BYTES) || call.new_len == 0 || call.old_len == 0;
    let old_len = call.old_len.checked_next_multiple_of(PAGE_BYTES);
    let new_len = call.new_len.checked_next_multiple_of(PAGE_BYTES);
    let (Some(old_len), Some(new_len), false) = (old_len, new_len, bad) else {
        return pass(call);
    };
    let rounded = Remap {
        old_len,
        new_len,
        ..call
    };
    if is_refused(rounded) {
        return pass(call);
    }
    if flags_of_place(call) == 0 && new_len <= old_len {
        return shrink(guard, rounded);
    }
    if is_beyond(rounded) {
        whole(guard, call.old, old_len).map_err(|_| Errno::NOMEM)?;
        // What had to stay would be out of the table's reach there.
        if guard.table().may_be_stored(call.old, old_len) {
            return Err(Errno::NOMEM);
        }
        return pass(call).inspect(|&new| {
            // A wish may not have been granted.
            if new.saturating_add(new_len) <= ADDRESS_LIMIT {
                return arrive(guard, rounded, new);
            }
            forget(guard, call.to, ADDRESS_LIMIT.saturating_sub(call.to));
            forget(guard, call.old, old_len);
        });
    }
    // What goes need not be whole.
    whole(guard, call.old, old_len.min(new_len)).map_err(|_| Errno::NOMEM)?;
    // A call that fails may have unmapped the target, or not: what is known of it stays, and costs a look.
    match is_sound(rounded) {
        true if thread::may_look() => carry_out(guard, rounded),
        _ => pass(call).inspect(|&new| arrive(guard, rounded, new)),
    }
}

/// Notes in the table that memory has moved to `new`.
fn arrive(guard: &mut Guard, call: Remap, new: usize) {
    if call.flags & FIXED != 0 {
        forget(guard, call.to, call.new_len);
    }
    follow(guard, call, new);
    if call.flags & DONTUNMAP != 0 {
        empty_stored(guard, call.old, call.old_len);
    }
}

/// What of the flags makes memory move whatever its length.
fn flags_of_place(call: Remap) -> i32 {
    call.flags & (FIXED | DONTUNMAP)
}

/// Memory that stays where it is and becomes no longer. The kernel unmaps the tail, whatever is mapped there and before it, and
/// touches nothing else. So what stays keeps its pages of a store, its numbers in the table, and its tracking.
fn shrink(guard: &mut Guard, call: Remap) -> Result<usize> {
    let at = pass(call)?;
    if call.new_len < call.old_len {
        forget(guard, at + call.new_len, call.old_len - call.new_len);
    }
    Ok(at)
}

/// Whether the kernel refuses the call for its form alone, before it looks at any mapping.
fn is_refused(call: Remap) -> bool {
    let Remap { flags, to, .. } = call;
    let unknown = flags & !(MAYMOVE | FIXED | DONTUNMAP) != 0;
    if flags_of_place(call) == 0 || unknown {
        return unknown;
    }
    let (end, target) = (
        call.old.saturating_add(call.old_len),
        to.saturating_add(call.new_len),
    );
    let resized = flags & DONTUNMAP != 0 && call.old_len != call.new_len;
    let overlaps = end > to && target > call.old;
    let misplaced = !to.is_multiple_of(PAGE_BYTES);
    flags & MAYMOVE == 0 || resized || overlaps || misplaced
}

/// Whether memory shall go where the table knows of none: there is such a place with five levels of page tables.
fn is_beyond(call: Remap) -> bool {
    // With DONTUNMAP alone the place is a wish, which the kernel grants where it can.
    call.flags & (FIXED | DONTUNMAP) != 0 && call.to.saturating_add(call.new_len) > ADDRESS_LIMIT
}

/// The call as it came.
pub(crate) fn pass(call: Remap) -> Result<usize> {
    fault::check(Point::Remap)?;
    let flags = call.flags.cast_unsigned() as usize;
    let args = [call.old, call.old_len, call.new_len, flags, call.to, 0];
    // SAFETY: the guest's own call.
    unsafe { sys::raw::call(libc::SYS_mremap, args) }
}

/// Whether the kernel would find no fault with the arguments as such. A call with others is passed on, for its answer.
fn is_sound(call: Remap) -> bool {
    let has = |flag| call.flags & flag != 0;
    let known = call.flags & !(MAYMOVE | FIXED | DONTUNMAP) == 0;
    let moves = !has(FIXED) && !has(DONTUNMAP) || has(MAYMOVE);
    let fits = !has(DONTUNMAP) || call.old_len == call.new_len;
    let behind = |a: usize, len: usize, b: usize| a.checked_add(len).is_some_and(|end| end <= b);
    let apart = behind(call.to, call.new_len, call.old) || behind(call.old, call.old_len, call.to);
    let lies = call.to.is_multiple_of(PAGE_BYTES) && behind(call.to, call.new_len, ADDRESS_LIMIT);
    let exists = behind(call.old, call.old_len, ADDRESS_LIMIT) && call.new_len <= ADDRESS_LIMIT;
    known && moves && fits && exists && (!has(FIXED) || lies && apart)
}

fn carry_out(guard: &mut Guard, call: Remap) -> Result<usize> {
    let moved = match Look::open(guard) {
        Ok(look) => match last_of_row(guard, &look, call)? {
            Last::Alone => pass(call),
            Last::Of(last) => as_one(guard, &look, call, last),
            Last::Differs => return move_rows(guard, &look, call),
        },
        Err(_) if guard.table().may_be_stored(call.old, call.old_len) => Err(Errno::NOMEM),
        Err(_) => pass(call),
    };
    moved.inspect(|&new| arrive(guard, call, new))
}

/// What a range lies in that is to be remapped.
enum Last {
    /// In one mapping, or the kernel alone refuses it.
    Alone,
    /// In several that may have been one, of which the last begins here.
    Of(usize),
    /// In several that differ, or with holes. The kernel moves each.
    Differs,
}

fn last_of_row(guard: &mut Guard, look: &Look, call: Remap) -> Result<Last> {
    let first = look
        .find(guard, call.old)?
        .filter(|vma| vma.start <= call.old);
    if first.is_none_or(|vma| vma.end >= call.old + call.old_len) {
        return match first.is_some_and(|vma| is_store(&vma)) && call.new_len > call.old_len {
            // It would grow by other pages of the store.
            true => Err(Errno::NOMEM),
            false => Ok(Last::Alone),
        };
    }
    // As the kernel: what is left must be one mapping if there is a tail, which goes before anything asks whether the rest may move.
    let old_len = if is_to_target(call) {
        call.new_len
    } else {
        call.old_len
    };
    let Some(first) = first.filter(|vma| vma.end < call.old + old_len) else {
        return Ok(Last::Alone);
    };
    let last = cut(guard, look, first, call.old..call.old + old_len)?;
    Ok(match last {
        Some(last) => Last::Of(last),
        None if is_to_target(call) && call.new_len == call.old_len => Last::Differs,
        None => Last::Alone,
    })
}

/// Whether memory goes to a place of the guest's, and becomes no longer.
fn is_to_target(call: Remap) -> bool {
    call.flags & FIXED != 0 && call.new_len <= call.old_len
}

/// Remaps mappings that may have been one.
fn as_one(guard: &mut Guard, look: &Look, call: Remap, last: usize) -> Result<usize> {
    // What stays mapped does not tell how far a move came: one mapping by the other, if that may be.
    match is_to_target(call) && call.flags & DONTUNMAP == 0 {
        true => relocate(guard, look, call),
        false => piece_by_piece(guard, look, call, last),
    }
}

/// Moves mappings that differ, or that have holes between them, to a fixed target of the same length, and notes it. What lies where a hole
/// would go stays.
///
/// The kernel does it mapping by mapping, and so each target is unmapped or refused for itself. A row that may have been one mapping is
/// moved as one.
///
/// One call for all of it would not do besides. A signal that comes upon it at a mapping that KSM may merge has the kernel begin anew,
/// and it finds nothing at the start then.
fn move_rows(guard: &mut Guard, look: &Look, call: Remap) -> Result<usize> {
    if !mapping::moves_several() {
        return pass(call).inspect(|&new| arrive(guard, call, new));
    }
    if !is_let_go(guard, call) {
        // What is tracked would be refused when its turn comes, with a part moved.
        return Err(Errno::NOMEM);
    }
    let (mut at, end) = (call.old, call.old + call.old_len);
    let memory = Rows::new([call.to, call.old].map(|at| at..at + call.old_len));
    while at < end {
        let told = memory.as_ref().map_err(|&errno| errno);
        let Ok(rows) = told.and_then(|memory| memory.tell(guard, at..end)) else {
            // Where the kernel does not tell of rows each mapping moves for itself.
            let next = look.find(guard, at).map_err(|_| Errno::NOMEM)?;
            let Some(next) = next.filter(|vma| vma.start < end) else {
                break;
            };
            let part = part_of(call, next.start.max(at)..next.end.min(end));
            let new = pass(part)?;
            arrive(guard, part, new);
            at = next.end;
            continue;
        };
        for row in rows {
            // As the kernel: there are other mappings, or a hole.
            if row.registered {
                return Err(Errno::FAULT);
            }
            if row.sealed {
                return Err(Errno::PERM);
            }
            let part = part_of(call, row.start..row.end);
            let new = match row.last == row.start {
                true => pass(part)?,
                false => relocate(guard, look, part)?,
            };
            arrive(guard, part, new);
        }
        at = match rows {
            [.., last] if rows.len() == Rows::MOST => last.end,
            _ => end,
        };
    }
    Ok(call.to)
}

impl Rows {
    /// So many are told of at once: each telling walks the page tables of all memory below.
    const MOST: usize = 4096;

    /// Neither where memory is to go nor in a hole of where it is: where all places of ours are taken the kernel chooses.
    fn new(others: [Range<usize>; 2]) -> Result<Self> {
        let len = Self::MOST * size_of::<Row>();
        let attributes = Attributes {
            noreserve: true,
            ..Attributes::default()
        };
        let locks = mapping::locks_future();
        let made = mapping::aside(len, Source::Anonymous, Access::ReadWrite, attributes, locks)?;
        let rows = Self(made);
        let mut others = others.iter();
        let apart = others.all(|other| made + len <= other.start || other.end <= made);
        apart.then_some(rows).ok_or(Errno::NOMEM)
    }

    /// The first rows of a range.
    fn tell(&self, guard: &mut Guard, range: Range<usize>) -> Result<&[Row]> {
        let rows = std::ptr::with_exposed_provenance_mut::<Row>(self.0);
        let known = guard.at_desk(|_| {
            // SAFETY: memory of this call's own, of which zeros are valid; what was told before is no longer used.
            let rows = unsafe { std::slice::from_raw_parts_mut(rows, Self::MOST) };
            sys::vma::rows(range.start, range.end, may_join, rows)
        })?;
        // SAFETY: as above, and written there.
        Ok(unsafe { std::slice::from_raw_parts(rows, known) })
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and nothing refers to it any more.
        let _ = unsafe { mapping::unmap(self.0, Self::MOST * size_of::<Row>()) };
    }
}

/// A part of the old range, and its part of the target.
fn part_of(call: Remap, range: Range<usize>) -> Remap {
    Remap {
        old: range.start,
        old_len: range.len(),
        new_len: range.len(),
        flags: call.flags,
        to: call.to + (range.start - call.old),
    }
}

/// Anonymous memory, or what may be pinned of such memory, may lie in several mappings.
fn may_join(vma: &Vma) -> bool {
    vma.is_anonymous() || is_store(vma)
}

/// Ends the tracking of the old range, and tells whether nothing of it is tracked.
fn is_let_go(guard: &mut Guard, call: Remap) -> bool {
    let _ = whole::untrack(guard, call.old, call.old_len, Untracked::All);
    guard.table().note_untracked(call.old, call.old_len);
    !is_tracked(guard, call)
}

/// Whether something of the old range is tracked, or that cannot be told.
pub(crate) fn is_tracked(guard: &mut Guard, call: Remap) -> bool {
    let end = call.old.saturating_add(call.old_len);
    let range = call.old as u64..end as u64;
    // Where a hook may not look no agent is left that tracks.
    thread::may_look() && guard.at_desk(|_| Pagemap::own()?.is_tracked(range.clone())) != Ok(false)
}

/// Remaps a range that windows may have cut, whose last mapping begins at `last`.
fn piece_by_piece(guard: &mut Guard, look: &Look, call: Remap, last: usize) -> Result<usize> {
    let moves = flags_of_place(call) != 0;
    let end = call.old + call.old_len;
    // What may be pinned lies in a store's mapping, which would grow by other pages of the store.
    let islands = look.find(guard, last)?.is_some_and(|vma| is_store(&vma));
    if islands && call.new_len > call.old_len {
        return Err(Errno::NOMEM);
    }
    let grown = Remap {
        old: last,
        old_len: end - last,
        new_len: end - last + call.new_len.saturating_sub(call.old_len),
        flags: 0,
        to: 0,
    };
    if !moves && pass(grown).is_ok() {
        return Ok(call.old);
    }
    if call.flags & MAYMOVE == 0 {
        return Err(Errno::NOMEM);
    }
    relocate(guard, look, call)
}

/// Where the last mapping of a range begins, if all of them may have been one. The `first` ends inside it.
///
/// # Errors
/// `PERM` if they are sealed: so the kernel answers for one mapping, before it touches the target.
fn cut(guard: &mut Guard, look: &Look, first: Vma, range: Range<usize>) -> Result<Option<usize>> {
    // Most calls are told apart without the long text.
    let next = look.find(guard, first.end)?;
    let joins = |next: Vma| first.end == next.start && may_join(&first) && may_join(&next);
    if !next.is_some_and(joins) {
        return Ok(None);
    }
    let row = guard.at_desk(|_| {
        let mut row = [Row::default()];
        let _ = sys::vma::rows(range.start, range.end, may_join, &mut row);
        row[0]
    });
    match Some(row).filter(|row| (row.start, row.end) == (range.start, range.end)) {
        Some(row) if row.sealed => Err(Errno::PERM),
        row => Ok(row.map(|row| row.last)),
    }
}

/// Moves the mappings of the old range one by one to a place that is kept for them. A tail is given back.
///
/// The kernel would unmap a fixed target for each mapping in turn, and one that it may not unmap, which is sealed or a part of a huge
/// page, ends the move in the middle. So the target is given up first, as a whole or not at all: where it may not be, nothing has
/// changed. And another thread finds no hole there.
fn relocate(guard: &mut Guard, look: &Look, call: Remap) -> Result<usize> {
    let fixed = call.flags & FIXED != 0;
    // Where the old mapping stays, the target is a wish.
    let (at, how) = match (fixed, call.flags & DONTUNMAP != 0) {
        (true, _) => (call.to, MapFlags::FIXED),
        (false, true) => (call.to, MapFlags::empty()),
        (false, false) => (0, MapFlags::empty()),
    };
    let new = keep(at, call.new_len, how)?;
    if fixed {
        forget(guard, new, call.new_len);
    }
    let kept = call.old_len.min(call.new_len);
    if call.old_len > kept {
        // SAFETY: the guest gives the tail back.
        if let Err(errno) = unsafe { mapping::unmap(call.old + kept, call.old_len - kept) } {
            undo(guard, look, call, new, 0);
            return Err(errno);
        }
        forget(guard, call.old + kept, call.old_len - kept);
    }
    let mut done = 0;
    while done < kept {
        let step = look.find(guard, call.old + done).ok().flatten();
        let end = step.map_or(call.old + kept, |vma| vma.end.min(call.old + kept));
        let len = end - (call.old + done);
        let last = done + len == kept;
        let moved = pass(Remap {
            old: call.old + done,
            old_len: len,
            new_len: if last { call.new_len - done } else { len },
            flags: MAYMOVE | FIXED | call.flags & DONTUNMAP,
            to: new + done,
        });
        if let Err(errno) = moved {
            undo(guard, look, call, new, done);
            return Err(errno);
        }
        done += len;
    }
    Ok(new)
}

/// Keeps a place: one of the kernel's choice, or, `FIXED`, the guest's target, which it gives up.
fn keep(at: usize, len: usize, how: MapFlags) -> Result<usize> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | how;
    let at = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: nothing is replaced but what the guest gives up.
    let made = unsafe { rustix::mm::mmap_anonymous(at, len, ProtFlags::empty(), flags) }?;
    Ok(made.expose_provenance())
}

/// Returns the first `done` bytes, which a move that failed has taken to `new`, and gives the place up that was kept there. What
/// cannot be returned stays where it is, and what another thread has there by now is no business of this one's.
fn undo(guard: &mut Guard, look: &Look, call: Remap, new: usize, done: usize) {
    let returned = match call.flags & DONTUNMAP {
        0 => return_to_holes(guard, look, call, new, done),
        // The old mapping is there, and empty.
        _ => carry_back(guard, look, (call.old, new), done, false),
    };
    // What was tracked is so no more.
    guard
        .table()
        .note_untracked(call.old, call.old_len.min(call.new_len));
    match returned {
        Ok(()) => drop(give_up(guard, look, new, call.new_len)),
        Err(_) => note_islands(guard, new, done),
    }
}

/// Where nothing lies at the old place its memory has moved.
fn return_to_holes(
    guard: &mut Guard,
    look: &Look,
    call: Remap,
    new: usize,
    done: usize,
) -> Result<()> {
    let (mut at, end) = (call.old, call.old + done);
    let mut all = Ok(());
    while at < end {
        let vma = look.find(guard, at)?;
        let hole = vma.map_or(end, |vma| vma.start.clamp(at, end)) - at;
        let places = (at, new + (at - call.old));
        let back = carry_back(guard, look, places, hole, true);
        all = all.and(back);
        at = vma.map_or(end, |vma| vma.end);
    }
    all
}

/// Moves `len` bytes back from `new` to `old`, mapping by mapping; to a `hole` only if another thread has not been given it.
fn carry_back(
    guard: &mut Guard,
    look: &Look,
    (old, new): (usize, usize),
    len: usize,
    hole: bool,
) -> Result<()> {
    let mut at = 0;
    while at < len {
        let vma = look
            .find(guard, new + at)?
            .filter(|vma| vma.start <= new + at);
        let end = vma.ok_or(Errno::FAULT)?.end;
        let step = (end - new).min(len) - at;
        if hole {
            keep(old + at, step, MapFlags::FIXED_NOREPLACE)?;
        }
        let back = pass(Remap {
            old: new + at,
            old_len: step,
            new_len: step,
            flags: MAYMOVE | FIXED,
            to: old + at,
        });
        if back.is_err() && hole {
            let _ = give_up(guard, look, old + at, step);
        }
        back?;
        at += step;
    }
    Ok(())
}

/// Unmaps what [`keep`] has put into a range, as far as it is there.
fn give_up(guard: &mut Guard, look: &Look, start: usize, len: usize) -> Result<()> {
    let (mut at, end) = (start, start + len);
    while let Some(vma) = look.find(guard, at)?.filter(|vma| vma.start < end) {
        let range = vma.start.max(at)..vma.end.min(end);
        if vma.is_anonymous() && vma.access() == Access::None {
            // SAFETY: it was made here, and no thread may touch it.
            unsafe { mapping::unmap(range.start, range.len()) }?;
        }
        at = range.end;
    }
    Ok(())
}

/// Moves the offer along, as KSM's flag moves with a mapping.
fn follow(guard: &mut Guard, call: Remap, new: usize) {
    let (old, kept) = (call.old, call.old_len.min(call.new_len));
    let islands = guard.table().may_be_stored(old, kept);
    let last = is_offered(guard, old + call.old_len - PAGE_BYTES);
    if new != old {
        carry(guard, old..old + kept, new);
        if call.flags & DONTUNMAP == 0 {
            forget(guard, old, call.old_len);
        } else {
            unread(guard, old, call.old_len);
        }
    } else if call.old_len > kept {
        forget(guard, old + kept, call.old_len - kept);
    }
    put(guard, new + kept..new + call.new_len, last);
    // What has not moved is known, and was merged where it lies.
    if islands && new != old {
        note_islands(guard, new, kept);
    }
}

/// What may be pinned lies in a store's mapping still.
fn note_islands(guard: &mut Guard, start: usize, len: usize) {
    if thread::may_look() {
        // What is not noted here is found before a line goes.
        let _ = strays::note_all(guard, start, len);
    }
}

/// New mappings have come to `new`, whose pages are what those of the old range are in the table.
fn carry(guard: &mut Guard, old: Range<usize>, new: usize) {
    let unseen = !thread::may_look();
    let place = |at: usize| new + (at - old.start);
    let mut done = old.start;
    while done < old.end {
        let chunk = done & !(CHUNK_BYTES - 1);
        let Some(chunk) = guard.table().next(chunk, false).filter(|&at| at < old.end) else {
            break;
        };
        // Of what lies before it nothing is known.
        put(guard, place(done)..place(chunk.max(done)), false);
        let part = chunk.max(done)..old.end.min(chunk + CHUNK_BYTES);
        let mut table = guard.table();
        let known = table.get(chunk);
        let known = known.map(|known| (known.offered, known.stored));
        let (offered, stored) = known.unwrap_or_default();
        for (pages, is) in parts_by(offered, part.clone()) {
            put(guard, place(pages.start)..place(pages.end), is);
        }
        let stored = parts_by(stored, part.clone()).filter(|(_, is)| unseen && *is);
        for page in stored.flat_map(|(pages, _)| pages.step_by(PAGE_BYTES)) {
            let _ = strays::note(guard, place(page));
        }
        done = part.end;
    }
    put(guard, place(done)..place(old.end), false);
}

fn is_offered(guard: &mut Guard, at: usize) -> bool {
    let (chunk, page) = (at & !(CHUNK_BYTES - 1), at % CHUNK_BYTES / PAGE_BYTES);
    let mut table = guard.table();
    table
        .get(chunk)
        .is_some_and(|chunk| chunk.offered.contains(page))
}

/// A new mapping has come to a range.
fn put(guard: &mut Guard, range: Range<usize>, offered: bool) {
    if range.is_empty() {
        return;
    }
    let mut table = guard.table();
    if !offered {
        let forget = |_: usize, pages, chunk: &mut Chunk| chunk.forget(PageBits::of(pages));
        return table.each_known(range.start, range.len(), forget);
    }
    for chunk in (range.start & !(CHUNK_BYTES - 1)..range.end).step_by(CHUNK_BYTES) {
        if let Some(known) = table.make(chunk) {
            let pages = PageBits::of(pages_of(chunk, range.start, range.end));
            known.forget(pages);
            known.offer(pages);
            table.mark_dirty(chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use wire::CHUNK_PAGES;

    use super::*;
    use crate::lock::lock;
    use crate::table::tests::randoms;

    /// Page by page it is plain, and slow for terabytes.
    #[test]
    fn what_moves_is_offered_as_it_was_and_nothing_else() {
        const CHUNKS: usize = 5;
        let bases = [0x7ae0_0000_0000_usize, 0x7ae4_0000_0000];
        let mut random = randoms();
        let pages =
            |base: usize| (0..CHUNKS * CHUNK_PAGES).map(move |page| base + page * PAGE_BYTES);
        for turn in 0..40 {
            let mut guard = lock().unwrap();
            for base in bases {
                for chunk in (0..CHUNKS).map(|chunk| base + chunk * CHUNK_BYTES) {
                    // Of some chunks nothing is known.
                    if !random().is_multiple_of(4) {
                        let some = PageBits([(); CHUNK_PAGES / 64].map(|()| random()));
                        guard.table().make(chunk).unwrap().offer(some);
                    }
                }
            }
            let mut below = |end: usize| usize::try_from(random()).unwrap() % end;
            let len = (1 + below(3 * CHUNK_PAGES)) * PAGE_BYTES;
            let [from, to] = bases.map(|base| base + below(2 * CHUNK_PAGES) * PAGE_BYTES);
            let mut wanted = Vec::new();
            for at in pages(bases[1]) {
                let source = match (to..to + len).contains(&at) {
                    true => from + (at - to),
                    false => at,
                };
                wanted.push(is_offered(&mut guard, source));
            }
            carry(&mut guard, from..from + len, to);
            let found: Vec<_> = pages(bases[1])
                .map(|at| is_offered(&mut guard, at))
                .collect();
            assert!(
                found == wanted,
                "turn {turn}: {from:x} to {to:x}, {len:x} bytes"
            );
            for base in bases {
                forget(&mut guard, base, CHUNKS * CHUNK_BYTES);
                (0..CHUNKS).for_each(|chunk| guard.table().mark_clean(base + chunk * CHUNK_BYTES));
            }
        }
    }
}
