//! Lifelines and ties this process maps: by them engines learn that it may map their slots.
//!
//! A session maps a lifeline, renewed from time to time, and its domain's tie. Pages merged in it stay
//! merged when it ends. So its lines stay mapped until a later session's engine has found and
//! counted all these pages by itself and says so ([`keep_only`]).
//!
//! A process may end before that, and a child that it made has its lines. Where such a chain has more lines than are listed, a session
//! begins with memory that is all the program's own ([`are_many`]).
//!
//! The list is inherited by fork, as the mappings are: a child that becomes a guest itself lets go of
//! its parent's lines in the same way. So an address is in the list only while the line is mapped:
//! written behind the mapping, cleared before the unmapping. A fork in between leaves the child a
//! line it does not know of and never unmaps, which is safe. The other way round it would one day
//! unmap other memory that it put there.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Result;
use sys::mapping::{self, Access};
use wire::PAGE_BYTES;

/// A lifeline, one that takes its place, and a tie.
const OF_SESSION: usize = 3;

/// Beyond it a line is not in the list, and stays until the process ends.
const MOST: usize = 64;

/// Addresses, 0 for none. Only the agent's thread uses it, so nothing is ordered by it.
static LINES: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];

/// Maps a line: while any process does, its engine knows that its slots may be mapped.
///
/// # Errors
/// What mmap(2) gives.
pub(crate) fn hold(line: &OwnedFd) -> Result<usize> {
    let address = mapping::share(line.as_fd(), 0, PAGE_BYTES, Access::ReadWrite)?;
    let free = |place: &&AtomicUsize| place.load(Ordering::Relaxed) == 0;
    if let Some(place) = LINES.iter().find(free) {
        place.store(address, Ordering::Relaxed);
    }
    Ok(address)
}

/// Whether this process holds any: else no page of it is merged.
pub(crate) fn any() -> bool {
    let mut lines = LINES.iter();
    lines.any(|place| place.load(Ordering::Relaxed) != 0)
}

/// Whether there is no room in the list for those of one more session. In a chain of forks each process may end its life before an engine has
/// counted its pages, and has the lines of all before it.
pub(crate) fn are_many() -> bool {
    let free = |place: &&AtomicUsize| place.load(Ordering::Relaxed) == 0;
    LINES.iter().filter(free).count() < OF_SESSION
}

/// Lets go of a line.
pub(crate) fn release(address: usize) {
    for place in &LINES {
        if place.load(Ordering::Relaxed) == address {
            drop_line(place);
        }
    }
}

/// Lets go of all lines but these.
pub(crate) fn keep_only(these: &[usize]) {
    for place in &LINES {
        if !these.contains(&place.load(Ordering::Relaxed)) {
            drop_line(place);
        }
    }
}

fn drop_line(place: &AtomicUsize) {
    let address = place.swap(0, Ordering::Relaxed);
    if address != 0 {
        // SAFETY: `hold` mapped the page, in this process or in the parent it inherited the list and the
        // mapping from; it is unmapped only here, once, and nothing reads it.
        let _ = unsafe { mapping::unmap(address, PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::memfd::Lifeline;

    fn line() -> (Lifeline, usize) {
        let (line, held) = Lifeline::new().unwrap();
        let address = hold(&held).unwrap();
        (line, address)
    }

    /// In one test: the list is the process's.
    #[test]
    fn lines_go_one_by_one_or_all_but_some() {
        let lines = [(); 5].map(|()| line());
        assert!(lines.iter().all(|(line, _)| !line.is_free()));
        release(lines[0].1);
        release(lines[0].1);
        assert!(lines[0].0.is_free());
        keep_only(&[lines[1].1, lines[4].1]);
        let free = lines.each_ref().map(|(line, _)| line.is_free());
        assert_eq!(free, [true, false, true, true, false]);
        assert!(!are_many());
        // More than the list holds: those are never let go of, which only keeps their pages longer.
        let many: Vec<_> = (0..MOST + 3).map(|_| line()).collect();
        assert!(are_many());
        keep_only(&[]);
        assert!(!are_many());
        assert!(lines.iter().all(|(line, _)| line.is_free()));
        assert_eq!(many.iter().filter(|(line, _)| !line.is_free()).count(), 5);
    }
}
