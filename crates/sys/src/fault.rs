//! Faults for tests: makes system calls of the window, of the stores and of the engine fail on command.
//!
//! Only builds with debug assertions can do it; in a release [`check`] is nothing. One point
//! at a time fails, as [`VARIABLE`] says: `POINT ERRNO FIRST EVERY [COUNT]`, for instance `move 12 3 1`:
//! from its third call on, every call of `UFFDIO_MOVE` fails with ENOMEM. With 0 for EVERY only the
//! FIRST one fails; with COUNT no more than so many. Needs no memory and no lock, so it works inside a
//! guest.
//!
//! An ERRNO of [`KILLED`] kills the process there, one of [`ENDED`] ends the thread alone.
//!
//! Where [`VARIABLE`] is a path, it names a [`Board`]: a page of a file that the process shares with
//! the test. The test changes the calls that fail while the process runs, and sees how often they did.

#[cfg(not(debug_assertions))]
use rustix::io::Result;

/// The environment variable that says what fails.
pub const VARIABLE: &std::ffi::CStr = c"PAGEONE_FAULT";

/// As an error number: the process is killed.
pub const KILLED: u32 = 1000;
/// As an error number: the thread ends.
pub const ENDED: u32 = 1001;

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
    /// The same, after the pages have moved.
    MoveUntold = "move-untold",
    /// `UFFDIO_ZEROPAGE`.
    Zero = "zero",
    /// `UFFDIO_COPY`.
    Copy = "copy",
    /// `UFFDIO_WRITEPROTECT`.
    Freeze = "freeze",
    /// mmap(2) of what replaces pages.
    Replace = "replace",
    /// The same, after the pages' own mapping is gone.
    ReplaceHalf = "replace-half",
    /// mremap(2) of what replaces pages, made aside.
    Place = "place",
    /// The same, after the pages' own mapping is gone.
    PlaceHalf = "place-half",
    /// mremap(2) by which memory made aside grows.
    Grow = "grow",
    /// mremap(2) of a program, or a step of it.
    Remap = "remap",
    /// madvise(2) that gives a new mapping its attributes.
    Describe = "describe",
    /// mmap(2) of a lifeline, or of what is shared otherwise.
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
    /// pread(2) and lseek(2) in a store.
    StoreRead = "store-read",
    /// mbind(2) of a store.
    StoreNode = "store-node",
    /// pwrite(2) to a note for the next engine.
    Note = "note",
    /// fcntl(2) that asks whether a lifeline is free.
    Seal = "seal",
    /// fcntl(2) that copies a descriptor.
    Duplicate = "duplicate",
    /// move_pages(2) that asks where pages are.
    Nodes = "nodes",
    /// Opening or reading what /proc says of another process.
    Proc = "proc",
    /// pidfd_open(2).
    Pidfd = "pidfd",
    /// Asking a pidfd for a thread's ids (Linux 6.13).
    PidfdInfo = "pidfd-info",
    /// `PROCMAP_QUERY` (Linux 6.11).
    MapsQuery = "maps-query",
    /// accept4(2).
    Accept = "accept",
    /// recvmsg(2).
    Receive = "receive",
    /// ppoll(2).
    Poll = "poll",
    /// Starting a thread.
    Thread = "thread",
    /// A step by which an agent is put into a running process.
    Attach = "attach",
    /// ptrace(2).
    Ptrace = "ptrace",
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
pub use armed::{Board, arm, check};

#[cfg(debug_assertions)]
mod armed {
    use std::fs::File;
    use std::path::Path;
    use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
    use std::sync::atomic::{AtomicPtr, AtomicU32};

    use rustix::io::{Errno, Result};
    use rustix::mm::{MapFlags, ProtFlags};

    use super::{ENDED, KILLED, POINTS, Point};

    /// The size of a board.
    const PAGE: usize = 4096;
    const NONE: u32 = u32::MAX;

    /// What fails, and how often it was called and did.
    #[repr(C)]
    struct State {
        point: AtomicU32,
        errno: AtomicU32,
        first: AtomicU32,
        every: AtomicU32,
        count: AtomicU32,
        calls: AtomicU32,
        failed: AtomicU32,
    }

    impl State {
        const fn new() -> Self {
            Self {
                point: AtomicU32::new(NONE),
                errno: AtomicU32::new(0),
                first: AtomicU32::new(0),
                every: AtomicU32::new(0),
                count: AtomicU32::new(0),
                calls: AtomicU32::new(0),
                failed: AtomicU32::new(0),
            }
        }

        /// False when `text` cannot be understood.
        fn set(&self, text: &str) -> bool {
            let mut words = text.split(' ');
            let named = words.next().unwrap_or_default();
            let Some(point) = POINTS.iter().find(|(_, name)| *name == named) else {
                return false;
            };
            let mut number = || words.next().map(str::parse::<u32>);
            let (Some(Ok(errno)), Some(Ok(first)), Some(Ok(every))) =
                (number(), number(), number())
            else {
                return false;
            };
            let Ok(count) = number().unwrap_or(Ok(u32::MAX)) else {
                return false;
            };
            self.point.store(NONE, Release);
            self.errno.store(errno, Relaxed);
            self.first.store(first, Relaxed);
            self.every.store(every, Relaxed);
            self.count.store(count, Relaxed);
            self.calls.store(0, Relaxed);
            self.failed.store(0, Relaxed);
            self.point.store(point.0 as u32, Release);
            true
        }

        fn check(&self, point: Point) -> Result<()> {
            if self.point.load(Acquire) != point as u32 {
                return Ok(());
            }
            let call = self.calls.fetch_add(1, Relaxed) + 1;
            let (first, every) = (self.first.load(Relaxed), self.every.load(Relaxed));
            let turn =
                call == first || every > 0 && call > first && (call - first).is_multiple_of(every);
            let count = self.count.load(Relaxed);
            let more = |failed: u32| (failed < count).then(|| failed + 1);
            match turn && self.failed.fetch_update(Relaxed, Relaxed, more).is_ok() {
                true => Err(fail(self.errno.load(Relaxed))),
                false => Ok(()),
            }
        }
    }

    const SIGKILL: usize = libc::SIGKILL as usize;

    /// The error with this number, unless it is the end of the process or the thread.
    fn fail(number: u32) -> Errno {
        let pid = std::process::id() as usize;
        let ends = match number {
            KILLED => Some((libc::SYS_kill, [pid, SIGKILL, 0, 0, 0, 0])),
            ENDED => Some((libc::SYS_exit, [0; 6])),
            _ => None,
        };
        if let Some((call, args)) = ends {
            // SAFETY: neither returns; a test wants them where nothing is put in order before.
            let _ = unsafe { crate::raw::call(call, args) };
        }
        Errno::from_raw_os_error(number.cast_signed())
    }

    static OWN: State = State::new();
    /// A board's state; null: [`OWN`].
    static BOARD: AtomicPtr<State> = AtomicPtr::new(std::ptr::null_mut());

    fn state() -> &'static State {
        // SAFETY: null, or what `attach` gave: a page that stays mapped until the process ends, whose
        // bytes are atomics, for which all values are valid.
        unsafe { BOARD.load(Acquire).as_ref() }.unwrap_or(&OWN)
    }

    /// Maps the page of a board for good.
    fn attach(file: &File) -> Result<*mut State> {
        let (none, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at a place of the kernel's choice disturbs nothing.
        let at = unsafe { rustix::mm::mmap(none, PAGE, access, MapFlags::SHARED, file, 0)? };
        Ok(at.cast())
    }

    /// Takes over what is to fail, or the board where that stands; false when `text` cannot be
    /// understood.
    pub fn arm(text: &str) -> bool {
        if !text.starts_with('/') {
            return OWN.set(text);
        }
        let file = File::options().read(true).write(true).open(text);
        let board = file.ok().and_then(|file| attach(&file).ok());
        board.is_some_and(|board| {
            BOARD.store(board, Release);
            true
        })
    }

    /// Fails when it is this point's turn.
    ///
    /// # Errors
    /// The number that was given to [`arm`], or stands on the board.
    pub fn check(point: Point) -> Result<()> {
        state().check(point)
    }

    /// A test's end of a board.
    #[derive(Debug)]
    pub struct Board(&'static State);

    impl std::fmt::Debug for State {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("State").finish_non_exhaustive()
        }
    }

    impl Board {
        /// A board at `path`, on which nothing fails.
        ///
        /// # Errors
        /// Where the file cannot be made or mapped.
        pub fn new(path: &Path) -> std::io::Result<Self> {
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).truncate(true);
            let file = file.open(path)?;
            file.set_len(PAGE as u64)?;
            let state = attach(&file)?;
            // SAFETY: mapped for good, as in `state`.
            let board = Self(unsafe { &*state });
            board.clear();
            Ok(board)
        }

        /// Makes a point fail from here on, as [`super::VARIABLE`] would; false when `text` cannot be
        /// understood.
        #[must_use]
        pub fn arm(&self, text: &str) -> bool {
            self.0.set(text)
        }

        /// Nothing fails any more.
        pub fn clear(&self) {
            self.0.point.store(NONE, Release);
        }

        /// How often the point failed since it was chosen.
        #[must_use]
        pub fn failed(&self) -> u32 {
            self.0.failed.load(Relaxed)
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_point_fails_in_its_turn() {
            let state = State::new();
            assert!(!state.set("nothing 1 1 1") && !state.set("move"));
            assert!(!state.set("move 1 2") && !state.set("move 1 2 3 x"));
            assert!(state.set("zero 12 2 3"));
            let fails = |calls: usize| -> Vec<_> {
                (0..calls).map(|_| state.check(Point::Zero).err()).collect()
            };
            let no = Some(Errno::NOMEM);
            assert_eq!(fails(6), [None, no, None, None, no, None]);
            assert_eq!(state.check(Point::Move), Ok(()));
            assert!(state.set("zero 12 1 1 2"));
            assert_eq!(fails(4), [no, no, None, None]);
        }

        #[test]
        fn a_board_is_shared() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("board");
            let board = Board::new(&path).unwrap();
            let other = File::options().read(true).write(true).open(&path).unwrap();
            // SAFETY: mapped for good, as in `state`.
            let theirs = unsafe { &*attach(&other).unwrap() };
            assert_eq!(theirs.check(Point::Move), Ok(()));
            assert!(board.arm("move 16 1 0"));
            assert_eq!(theirs.check(Point::Move), Err(Errno::BUSY));
            assert_eq!((theirs.check(Point::Move), board.failed()), (Ok(()), 1));
            assert!(board.arm("move 16 1 1"));
            board.clear();
            assert_eq!(theirs.check(Point::Move), Ok(()));
        }
    }
}
