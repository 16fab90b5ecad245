//! Merged memory becomes the program's own: for good, for a move to another domain, or where it can no longer be kept.

use rustix::io::{Errno, Result};
use sys::vma::Maps;
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use super::frames::{make_pages_private, make_private};
use super::lines;
use super::strays::bring_home;
use super::whole::{Tools, Untracked, untrack, whole, whole_if_ample, whole_if_out_of_reach};
use crate::lock::{Guard, lock};
use crate::table::{ADDRESS_LIMIT, touches};
use crate::thread::{self, Why};

/// Gives the program frames of its own for all merged pages, a chunk at a time; what it offers stays offered. Where a page cannot be
/// made anonymous it gets its frame where it lies.
///
/// # Errors
/// `NOMEM` when the frames do not fit, `CANCELED` when `must_end` says so; what reading /proc gives. `FAULT` where a guard lies that came
/// unseen, or the store ends; `DEADLK` where the program watches what it moved.
pub(crate) fn own_all(must_end: impl Fn() -> bool) -> Result<()> {
    find_strays()?;
    let mut at = 0;
    loop {
        // The program's own calls have their turn between two chunks.
        let mut guard = lock().ok_or(Errno::NOMEM)?;
        let mut table = guard.table();
        let Some(address) = table.next(at, false) else {
            break;
        };
        at = address + CHUNK_BYTES;
        if stored_in(&mut guard, address).is_empty() {
            continue;
        }
        if must_end() {
            return Err(Errno::CANCELED);
        }
        guard.table().mark_dirty(address);
        // Whatever that leaves in a store's mapping.
        let _ = whole_if_ample(&mut guard, address, CHUNK_BYTES);
        let left = stored_in(&mut guard, address);
        make_pages_private(&mut guard, address, left)?;
    }
    // What was moved past libc while this went on.
    find_strays()
}

/// Finds what was moved past libc, if a line is held: else nothing is merged.
///
/// # Errors
/// As [`bring_home`], and what opening the list of mappings gives.
pub(crate) fn find_strays() -> Result<()> {
    match lines::any() {
        true => bring_home(&Maps::open()?),
        false => Ok(()),
    }
}

/// Which pages of a chunk lie in a store's mapping.
fn stored_in(guard: &mut Guard, chunk: usize) -> PageBits {
    let mut table = guard.table();
    let chunk = table.get(chunk);
    chunk.map_or(PageBits::EMPTY, |chunk| chunk.stored)
}

/// Takes everything back. What may be pinned stays in a store's mapping, private, and known: without that a discard
/// would bring canonical content back there. All other memory is forgotten, and the hooks pass calls over it on.
pub(crate) fn give_back(guard: &mut Guard) {
    // What cannot be made anonymous becomes private where it lies; without memory for it the pages stay merged.
    let _ = whole(guard, 0, ADDRESS_LIMIT);
    guard
        .table()
        .each_known(0, ADDRESS_LIMIT, |_, pages, chunk| {
            chunk.withdraw(PageBits::of(pages));
        });
    let mut at = 0;
    while let Some(address) = guard.table().next(at, false) {
        for (first, count) in stored_in(guard, address).runs() {
            let (start, len) = (address + first * PAGE_BYTES, count * PAGE_BYTES);
            let _ = make_private(guard, start, len);
        }
        guard.table().mark_clean(address);
        at = address + CHUNK_BYTES;
    }
    thread::note_given_back();
}

/// Makes all merged memory private before the program goes where hooks may find no /proc: no discard could tell a store's mapping
/// from others there. The same before there are no hooks at all. It stays offered.
///
/// # Errors
/// `NOMEM` when the copies do not fit, or nothing keeps other threads from writing.
pub(crate) fn settle(why: Why) -> Result<()> {
    if why.step == wire::STEP_DETACHED {
        // It may be much: the program's own calls have their turn.
        own_all(|| false)?;
        return untrack_all();
    }
    if why.step == wire::STEP_ELSEWHERE
        && touches(0, ADDRESS_LIMIT)
        && let Some(mut guard) = lock()
    {
        whole(&mut guard, 0, ADDRESS_LIMIT).map_err(|_| Errno::NOMEM)?;
    }
    Ok(())
}

/// Stops tracking all memory. The engine has the userfaultfd too, and closes it when it finds that the guest has left: until then a
/// program could register none of its own.
fn untrack_all() -> Result<()> {
    let mut at = 0;
    loop {
        let mut guard = lock().ok_or(Errno::NOMEM)?;
        let Some(address) = guard.table().next(at, false) else {
            return Ok(());
        };
        untrack(&mut guard, address, CHUNK_BYTES, Untracked::Anonymous)?;
        at = address + CHUNK_BYTES;
    }
}

/// Makes a call of the program's, while no agent runs. Where /proc is out of reach after it, as for a program that is not dumpable
/// any more, all merged memory is made private: it stays offered.
pub(crate) fn reachable<T>(call: impl FnOnce() -> T) -> T {
    let known = touches(0, ADDRESS_LIMIT);
    let tools = known
        .then(lock)
        .flatten()
        .and_then(|mut guard| Tools::before_a_call(&mut guard));
    let result = call();
    if let Some(tools) = tools
        && let Some(mut guard) = lock()
    {
        whole_if_out_of_reach(&mut guard, tools);
    }
    result
}

/// Gives the program all its memory back: private, and not offered any more.
pub(crate) fn give_back_all() {
    if touches(0, ADDRESS_LIMIT)
        && let Some(mut guard) = lock()
    {
        give_back(&mut guard);
    }
}
