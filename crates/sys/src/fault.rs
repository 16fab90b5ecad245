//! Faults for tests: makes the system calls of the window and of the stores fail on command.
//!
//! Only builds with debug assertions can do it; in a release [`check`] is nothing. One call
//! site at a time fails, as [`VARIABLE`] says: `POINT ERRNO FIRST EVERY`, for instance `move 12 3 1`:
//! from its third call on, every call of `UFFDIO_MOVE` fails with ENOMEM. With 0 for EVERY only the
//! FIRST one fails. Needs no memory and no lock, so it works inside a guest.

#[cfg(not(debug_assertions))]
use rustix::io::Result;

/// The environment variable that says what fails.
pub const VARIABLE: &std::ffi::CStr = c"PAGEONE_FAULT";

macro_rules! points {
    ($($(#[$doc:meta])* $point:ident = $name:literal,)*) => {
        /// A system call that can be made to fail.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Point {
            $($(#[$doc])* $point,)*
        }

        /// All points, with the names by which they are chosen.
        pub const POINTS: &[(Point, &str)] = &[$((Point::$point, $name),)*];
    };
}

points! {
    /// `UFFDIO_REGISTER`.
    Register = "register",
    /// `UFFDIO_UNREGISTER`.
    Unregister = "unregister",
    /// `UFFDIO_MOVE`.
    Move = "move",
    /// `UFFDIO_ZEROPAGE`.
    Zero = "zero",
    /// `UFFDIO_COPY`.
    Copy = "copy",
    /// `UFFDIO_WRITEPROTECT`.
    Freeze = "freeze",
    /// mmap(2) of what replaces pages.
    Replace = "replace",
    /// madvise(2) that gives a new mapping its attributes.
    Describe = "describe",
    /// mmap(2) of a window into a store, or of a lifeline.
    Share = "share",
    /// madvise(2) on behalf of the agent.
    Advise = "advise",
    /// mprotect(2).
    Protect = "protect",
    /// mlock(2), munlock(2).
    Lock = "lock",
    /// `PAGEMAP_SCAN`.
    Scan = "scan",
    /// Looking a mapping up.
    Maps = "maps",
    /// pwritev(2) to a store.
    StoreWrite = "store-write",
    /// fallocate(2) that punches a store.
    StorePunch = "store-punch",
    /// A store's descriptor for a guest.
    StoreShare = "store-share",
    /// A store, or a lifeline.
    Memfd = "memfd",
    /// sendmsg(2).
    Send = "send",
    /// process_vm_readv(2).
    Read = "read",
}

/// Fails when it is this point's turn.
///
/// # Errors
/// The number that [`VARIABLE`] gives.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub const fn check(_point: Point) -> Result<()> {
    Ok(())
}

#[cfg(debug_assertions)]
pub use armed::{arm, check};

#[cfg(debug_assertions)]
mod armed {
    use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::Relaxed};

    use rustix::io::{Errno, Result};

    use super::{POINTS, Point};

    const NONE: u32 = u32::MAX;
    static POINT: AtomicU32 = AtomicU32::new(NONE);
    static ERRNO: AtomicI32 = AtomicI32::new(0);
    static FIRST: AtomicU32 = AtomicU32::new(0);
    static EVERY: AtomicU32 = AtomicU32::new(0);
    static CALLS: AtomicU32 = AtomicU32::new(0);

    /// Takes over what is to fail; false when `text` cannot be understood.
    pub fn arm(text: &str) -> bool {
        let mut words = text.split(' ');
        let named = words.next().unwrap_or_default();
        let Some(point) = POINTS.iter().find(|(_, name)| *name == named) else {
            return false;
        };
        let mut number = || words.next().and_then(|word| word.parse::<u32>().ok());
        let (Some(errno), Some(first), Some(every)) = (number(), number(), number()) else {
            return false;
        };
        ERRNO.store(errno.cast_signed(), Relaxed);
        FIRST.store(first, Relaxed);
        EVERY.store(every, Relaxed);
        POINT.store(point.0 as u32, Relaxed);
        true
    }

    /// Fails when it is this point's turn.
    ///
    /// # Errors
    /// The number that was given to [`arm`].
    pub fn check(point: Point) -> Result<()> {
        if POINT.load(Relaxed) != point as u32 {
            return Ok(());
        }
        let call = CALLS.fetch_add(1, Relaxed) + 1;
        let (first, every) = (FIRST.load(Relaxed), EVERY.load(Relaxed));
        let turn =
            call == first || every > 0 && call > first && (call - first).is_multiple_of(every);
        match turn {
            true => Err(Errno::from_raw_os_error(ERRNO.load(Relaxed))),
            false => Ok(()),
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_point_fails_in_its_turn() {
            assert!(!arm("nothing 1 1 1") && !arm("move") && !arm("move 1 2"));
            assert!(arm("zero 12 2 3"));
            let fails: Vec<_> = (0..6).map(|_| check(Point::Zero).err()).collect();
            let no = Some(Errno::NOMEM);
            assert_eq!(fails, [None, no, None, None, no, None]);
            assert_eq!(check(Point::Move), Ok(()));
        }
    }
}
