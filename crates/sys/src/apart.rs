//! Where PageONE's own memory lies: apart from every place that the kernel gives a program.
//!
//! A program may unmap memory and map the same addresses again with MAP_FIXED: allocators align blocks that way, and
//! nothing else of the program comes there meanwhile. Memory of ours that the kernel put into that hole would be replaced with
//! all that is in it: pages that are out, the stack of the agent's thread. So nothing of ours is left to the kernel's choice:
//!
//! ```text
//!   0 … 1 TiB     programs at fixed addresses, and their heaps
//!   … 30 TiB      hints of some allocators
//!   34 … 42 TiB   ours, from a random place on │ areas 1 TiB │ lines 1 TiB │ passing │
//!   42 TiB … end  the kernel's choices: from here upwards, or from the end downwards; position-independent programs
//! ```
//!
//! **What must hold**: an address that the kernel ever chose for the program is never one of ours. The kernel looks for free
//! addresses from one end on, and comes here when all beyond is taken: 80 TiB. So nothing has to be reserved, and no address space
//! is counted (`RLIMIT_AS`) but the part in use. A place in use is asked for as a *hint*, which replaces nothing.
//!
//! The tempting alternative, one reservation without access in which all is placed, has an end: memory that is made aside may be
//! as large as the program's. In pieces it would stay in pieces after mremap, and mappings are few.
//!
//! **The limit**: where another has taken all places that are tried (a sanitizer guards such ranges), or the address space
//! is smaller (39 bits on some arm64), the kernel chooses as before. And a program that maps over a fixed number here, which
//! the kernel never gave it, replaces what is there.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Result;

const TIB: usize = 1 << 40;
const HUGE: usize = 2 << 20;
/// The lowest place, and how far from it the random one is at most.
const LOWEST: usize = 34 * TIB;
const SPREAD: usize = 4 * TIB;
/// So many TiB of places there are, from the random one on.
const PLACES: usize = 3;

/// What a place is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Memory that stays, for the most part: one place after the other.
    Area,
    /// Pages of lines: renewed from time to time.
    Line,
    /// What is finished aside and goes elsewhere, or away: the same places again and again.
    Passing,
}

/// Where the places begin; 0 before that is known. A fork child inherits all of these, as it does the mappings.
static START: AtomicUsize = AtomicUsize::new(0);
/// Bytes of places given out, of areas and of lines.
static AREAS: AtomicUsize = AtomicUsize::new(0);
static LINES: AtomicUsize = AtomicUsize::new(0);

/// Maps `len` bytes at a place of ours by `map`, which takes a hint.
///
/// # Errors
/// What `map` gives.
pub(crate) fn map_apart(
    wanted: Use,
    len: usize,
    map: impl Fn(*mut c_void) -> Result<*mut c_void>,
) -> Result<*mut c_void> {
    /// So many places are tried before the kernel's choice is taken.
    const TRIES: usize = 4;
    for attempt in 0..TRIES {
        let hint = hint(wanted, len, attempt);
        let made = map(std::ptr::with_exposed_provenance_mut(hint))?;
        if made.addr() == hint || attempt + 1 == TRIES {
            return Ok(made);
        }
        // SAFETY: mapped a moment ago, by this call, and no other thread knows of it.
        unsafe { rustix::mm::munmap(made, len) }?;
    }
    map(std::ptr::null_mut())
}

/// Whether a range lies in places of ours, not where the kernel or the program chose.
pub(crate) fn is_ours(at: usize, len: usize) -> bool {
    at >= start() && at.saturating_add(len) <= start() + PLACES * TIB
}

fn hint(wanted: Use, len: usize, attempt: usize) -> usize {
    let next = |given: &AtomicUsize| {
        let step = len.next_multiple_of(crate::PAGE);
        given.fetch_add(step, Ordering::Relaxed) % TIB
    };
    start()
        + match wanted {
            Use::Area => next(&AREAS),
            Use::Line => TIB + next(&LINES),
            Use::Passing => 2 * TIB + attempt * (TIB / 4),
        }
}

/// Drawn once: from where the loader and the kernel put this library and a stack, which says nothing of these in turn.
fn start() -> usize {
    // Relaxed: a number, the same for all.
    let known = START.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let local = 0_u8;
    let seen = (&raw const START).addr() ^ (&raw const local).addr().rotate_left(23);
    let mixed = (seen as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    #[allow(clippy::cast_possible_truncation)] // 24 bits
    let drawn = LOWEST + (mixed as usize * HUGE) % SPREAD;
    let order = Ordering::Relaxed;
    match START.compare_exchange(0, drawn, order, order) {
        Ok(_) => drawn,
        Err(first) => first,
    }
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;
    use crate::PAGE;

    fn make(wanted: Use, len: usize) -> usize {
        let (prot, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: a fresh mapping at a place where nothing is disturbs nothing.
        let map = |at| unsafe { mmap_anonymous(at, len, prot, flags) };
        map_apart(wanted, len, map).unwrap().addr()
    }

    fn unmap(at: usize, len: usize) {
        // SAFETY: mapped by the test, which uses it no more.
        unsafe { munmap(std::ptr::with_exposed_provenance_mut(at), len) }.unwrap();
    }

    #[test]
    fn nothing_lies_where_the_kernel_chooses() {
        const ALL: std::ops::Range<usize> = LOWEST..LOWEST + 2 * SPREAD;
        const _: () = assert!(ALL.end < 0x2aaa_aaaa_a000);
        let made =
            [(Use::Area, 3 * PAGE), (Use::Area, 5), (Use::Line, PAGE)].map(|(wanted, len)| {
                let at = make(wanted, len);
                assert!(
                    is_ours(at, len) && ALL.contains(&at) && at.is_multiple_of(PAGE),
                    "{at:#x}"
                );
                (at, len)
            });
        let by_the_kernel = (&raw const START).addr();
        assert!(!is_ours(by_the_kernel, PAGE));
        // What was unmapped is not taken again.
        unmap(made[0].0, made[0].1);
        assert_ne!(make(Use::Area, 3 * PAGE), made[0].0);
        let passing = [0; 6].map(|_| make(Use::Passing, 4 * HUGE));
        let ours = |at: &&usize| ALL.contains(at);
        assert_eq!(passing.iter().filter(ours).count(), 4, "{passing:x?}");
        passing.into_iter().for_each(|at| unmap(at, 4 * HUGE));
        assert_eq!(make(Use::Passing, PAGE), passing[0], "the same place again");
    }
}
