//! Discards of merged pages are counted in the session's lifeline, where the engine sees it before its next round.
//!
//! The calling thread writes a word of memory, and waits for no other thread. A fork child has no session of its own yet, so it
//! writes nowhere: the place is wiped with the lock's page.
//!
//! The tempting alternative, to call the agent's thread, costs each discard a system call, and the program a signal.

use std::sync::atomic::Ordering;

use wire::{PAGE_BYTES, Tally};

use super::frames::populate;
use crate::lock::Guard;

/// Sees to it that the page of a lifeline is there; gives its address, or 0 where there is no memory for it.
///
/// A hook that wrote to a page that is not there could get a signal where the kernel promises no memory beyond what it has
/// (`vm.overcommit_memory=2`). This call gets an error.
pub(crate) fn prepare(line: usize) -> usize {
    populate(line, PAGE_BYTES).map_or(0, |()| line)
}

/// From here on discards are counted in the lifeline at `line`, which is [prepared](prepare); nowhere for 0. The line before may be unmapped once this
/// has returned, and not sooner.
pub(crate) fn count_in(guard: &Guard, line: usize) {
    guard.process().tally.store(line, Ordering::Relaxed);
}

/// Counts that merged pages were given up; called when the table says so.
pub(crate) fn note(guard: &Guard) {
    let line = guard.process().tally.load(Ordering::Relaxed);
    if line != 0 {
        let tally = std::ptr::with_exposed_provenance::<Tally>(line);
        // SAFETY: `line` is a page that is mapped shared and writable, by `lines::hold`. It stays so while it is named here,
        // for that changes under the lock only, which the guard is. Others change it by atomic operations too.
        unsafe { &*tally }.note();
    }
}
