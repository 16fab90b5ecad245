//! The rights of threads of this process, as the kernel tells them.
//!
//! Nothing here allocates, sets `errno` or needs thread-local storage.
//!
//! Source: proc_pid_status(5).

use std::cell::Cell;
use std::ffi::CStr;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};
use rustix::io::{Errno, Result};

use crate::closers;

/// The rights of a thread. Two that are equal have the same; landlock and namespaces the kernel does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Users, groups, capabilities.
    credentials: u64,
    /// no_new_privs, and how many filters there are.
    filters: u64,
    filter_count: u32,
}

/// How other threads differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// One has other filters, or more of them.
    Filters,
    /// One has other users, groups or capabilities; another has these.
    Credentials,
    /// All have other users, groups or capabilities.
    Alone,
}

/// A thread that is not compared: one that ends, and may still be counted.
#[derive(Clone, Copy, Debug)]
pub struct Except<'a> {
    /// Its number,
    pub number: u32,
    /// and its name, for numbers are used again.
    pub name: &'a CStr,
}

const CREDENTIALS: [&[u8]; 8] = [
    b"Uid:", b"Gid:", b"Groups:", b"CapInh:", b"CapPrm:", b"CapEff:", b"CapBnd:", b"CapAmb:",
];
const FILTERS: [&[u8]; 3] = [b"NoNewPrivs:", b"Seccomp:", b"Seccomp_filters:"];

impl Rights {
    /// The calling thread's.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub fn own() -> Result<Self> {
        let status = open(c"/proc/thread-self/status", OFlags::empty())?;
        Self::read(&status, c"").map(|(own, _)| own)
    }

    /// The rights of a thread, and whether it has this name.
    fn read(status: &OwnedFd, name: &CStr) -> Result<(Self, bool)> {
        let mut named = false;
        let (mut credentials, mut filters, mut filter_count) = (START, START, 0);
        crate::vma::each_line(status, usize::MAX, |line| {
            let is = |name: &&[u8]| line.starts_with(name);
            if CREDENTIALS.iter().any(is) {
                credentials = mix(credentials, line);
            } else if let Some(told) = line.strip_prefix(b"Name:\t") {
                named = told == name.to_bytes();
            } else if FILTERS.iter().any(is) {
                filters = mix(filters, line);
                if let Some(count) = line.strip_prefix(b"Seccomp_filters:") {
                    filter_count = count_of(count);
                }
            }
            true
        })?;
        let rights = Self {
            credentials,
            filters,
            filter_count,
        };
        Ok((rights, named))
    }

    /// How many seccomp filters look at the calls of this process's first thread, asked with nothing but calls that
    /// every loader makes: openat, read, close.
    ///
    /// # Errors
    /// What these give.
    pub fn filters_before_all() -> Result<u32> {
        let at = libc::AT_FDCWD.cast_unsigned() as usize;
        let path = c"/proc/self/status".as_ptr().expose_provenance();
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC).cast_unsigned() as usize;
        // SAFETY: the path is terminated.
        let fd = unsafe { crate::raw::call(libc::SYS_openat, [at, path, flags, 0, 0, 0]) }?;
        let read = |into: &mut [u8], _| {
            let to = into.as_mut_ptr().expose_provenance();
            // SAFETY: the kernel writes at most so many bytes.
            unsafe { crate::raw::call(libc::SYS_read, [fd, to, into.len(), 0, 0, 0]) }
        };
        let mut count = 0;
        let told = crate::vma::each_line_by(read, usize::MAX, |line| {
            if let Some(number) = line.strip_prefix(b"Seccomp_filters:") {
                count = count_of(number);
            }
            true
        });
        // SAFETY: the descriptor was made here, and nothing else knows it.
        let _ = unsafe { crate::raw::call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]) };
        told.map(|()| count)
    }

    /// How many seccomp filters look at the thread's calls.
    #[must_use]
    pub fn filter_count(&self) -> u32 {
        self.filter_count
    }
}

/// The most files of threads that are kept open.
const MOST_KEPT: usize = 64;

/// The status of a thread.
struct Kept {
    /// The thread's number; 0 once it has ended.
    number: i32,
    status: OwnedFd,
}

/// Files that were locked when they were last asked for it.
type AllKept = [Option<Kept>; MOST_KEPT];

/// The threads of this process, as they are compared again and again.
///
/// A stranger may have locks on these files of `/proc`, and to close one then takes as long as he likes
/// ([`closers`]). So the folder stays open. A file that is locked stays open, too, until it is not locked any more; there is room
/// for `MOST_KEPT` of them.
pub struct Threads {
    folder: OwnedFd,
    /// Taken out during a comparison.
    kept: Cell<AllKept>,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}

impl Threads {
    /// Those of this process.
    ///
    /// # Errors
    /// What opening `/proc/self/task` gives.
    pub fn open() -> Result<Self> {
        let folder = open(c"/proc/self/task", OFlags::DIRECTORY)?;
        let kept = Cell::new([const { None }; MOST_KEPT]);
        Ok(Self { folder, kept })
    }

    /// How other threads than the calling one differ from its `rights`, the worse way if there are several. `except` is
    /// not looked at.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub fn differ_from(
        &self,
        rights: &Rights,
        except: Option<Except<'_>>,
    ) -> Result<Option<Difference>> {
        let mut kept = self.kept.replace([const { None }; MOST_KEPT]);
        let difference = self.compare(&mut kept, rights, except);
        for place in &mut kept {
            drop(place.take_if(|kept| !closers::is_locked(&kept.status)));
        }
        self.kept.set(kept);
        difference
    }

    fn compare(
        &self,
        kept: &mut AllKept,
        rights: &Rights,
        except: Option<Except<'_>>,
    ) -> Result<Option<Difference>> {
        let skipped = except.map_or(c"", |except| except.name);
        let is_skipped = |number: i32, named: bool| {
            named && except.is_some_and(|except| number.unsigned_abs() == except.number)
        };
        let own = rustix::thread::gettid().as_raw_pid();
        let (mut filtered, mut differs, mut same) = (false, false, false);
        self.walk(|number, digits| {
            if number == own {
                return Ok(true);
            }
            match read(kept, number, digits, skipped) {
                // The thread has ended.
                Err(Errno::NOENT | Errno::SRCH) => {}
                Err(errno) => return Err(errno),
                Ok((_, named)) if is_skipped(number, named) => {}
                Ok((other, _)) if other.filters != rights.filters => filtered = true,
                Ok((other, _)) if other == *rights => same = true,
                Ok(_) => differs = true,
            }
            Ok(!filtered)
        })?;
        Ok(match (filtered, differs, same) {
            (true, ..) => Some(Difference::Filters),
            (false, false, _) => None,
            (false, true, true) => Some(Difference::Credentials),
            (false, true, false) => Some(Difference::Alone),
        })
    }

    /// Calls `each` with the number of every thread.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub fn each(&self, mut each: impl FnMut(u32)) -> Result<()> {
        self.walk(|number, _| {
            each(number.unsigned_abs());
            Ok(true)
        })
    }

    /// The same, with the number's digits, as long as `each` wants more.
    fn walk(&self, mut each: impl FnMut(i32, &[u8]) -> Result<bool>) -> Result<()> {
        rustix::fs::seek(&self.folder, SeekFrom::Start(0))?;
        let mut space = [MaybeUninit::uninit(); 2048];
        let mut entries = RawDir::new(&self.folder, &mut space);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let digits = entry.file_name().to_bytes();
            let number = std::str::from_utf8(digits).ok();
            if let Some(number) = number.and_then(|digits| digits.parse().ok())
                && !each(number, digits)?
            {
                break;
            }
        }
        Ok(())
    }
}

/// The rights of a thread and whether it has this name, from its kept file if there is one. A file that is locked is kept.
fn read(kept: &mut AllKept, number: i32, digits: &[u8], name: &CStr) -> Result<(Rights, bool)> {
    if let Some(own) = kept.iter_mut().flatten().find(|own| own.number == number) {
        if let Ok(read) = Rights::read(&own.status, name) {
            return Ok(read);
        }
        // Its thread has ended, and another has its number.
        own.number = 0;
    }
    let status = open(&Path::of(digits), OFlags::empty())?;
    let read = Rights::read(&status, name);
    if closers::is_locked(&status)
        && let Some(free) = kept.iter_mut().find(|place| place.is_none())
    {
        *free = Some(Kept { number, status });
    }
    read
}

fn open(path: &CStr, kind: OFlags) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | kind;
    rustix::fs::open(path, flags, Mode::empty())
}

/// A number in a line; the greatest for what is none.
fn count_of(text: &[u8]) -> u32 {
    let text = std::str::from_utf8(text.trim_ascii()).ok();
    let count = text.and_then(|text| text.parse().ok());
    count.unwrap_or(u32::MAX)
}

/// `/proc/self/task/NUMBER/status`.
struct Path([u8; 48]);

impl Path {
    fn of(number: &[u8]) -> Self {
        let mut path = [0; 48];
        let parts = [b"/proc/self/task/", number, b"/status"];
        let text = parts.iter().flat_map(|part| part.iter());
        path.iter_mut()
            .take(47)
            .zip(text)
            .for_each(|(to, from)| *to = *from);
        Self(path)
    }
}

impl std::ops::Deref for Path {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }
}

const START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a.
fn mix(hash: u64, line: &[u8]) -> u64 {
    line.iter().fold(hash, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;

    /// Each test sees the threads of all: one at a time.
    fn alone() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn a_thread_with_no_new_privs_differs_by_its_filters() {
        let _turn = alone();
        let before = Rights::own().unwrap();
        assert_eq!(Rights::own().unwrap(), before);
        std::thread::spawn(move || {
            let threads = Threads::open().unwrap();
            assert_eq!(Rights::filters_before_all(), Ok(before.filter_count()));
            // Threads of other tests come and go, all with the same rights.
            assert_eq!(threads.differ_from(&before, None), Ok(None));
            // SAFETY: PR_SET_NO_NEW_PRIVS takes numbers, and is for this thread alone.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let narrow = Rights::own().unwrap();
            assert_ne!(narrow, before);
            let differs = threads.differ_from(&narrow, None);
            assert_eq!(differs, Ok(Some(Difference::Filters)));
        })
        .join()
        .unwrap();
    }

    /// A thread that waits until it is told to end.
    struct Waiter {
        number: u32,
        end: std::sync::mpsc::Sender<()>,
        thread: std::thread::JoinHandle<()>,
    }

    impl Waiter {
        fn new() -> Self {
            let (tell, number) = std::sync::mpsc::channel();
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let thread = std::thread::spawn(move || {
                tell.send(crate::process::thread_id()).unwrap();
                let _ = ended.recv();
            });
            let number = number.recv().unwrap();
            Self {
                number,
                end,
                thread,
            }
        }

        fn path(&self) -> String {
            format!("/proc/self/task/{}/status", self.number)
        }

        /// Has a process lock the file of its status.
        fn lock(&self) -> std::fs::File {
            closers::locked(std::path::Path::new(&self.path()))
        }

        /// Returns once the kernel has forgotten it.
        fn end(self) {
            let path = self.path();
            drop(self.end);
            self.thread.join().unwrap();
            while std::fs::exists(&path).unwrap() {
                std::thread::yield_now();
            }
        }
    }

    /// The numbers of the threads whose files are kept.
    fn kept(threads: &Threads) -> Vec<u32> {
        let all = threads.kept.replace([const { None }; MOST_KEPT]);
        let numbers = all.iter().flatten().map(|kept| kept.number.unsigned_abs());
        let numbers = numbers.collect();
        threads.kept.set(all);
        numbers
    }

    #[test]
    fn a_file_stays_open_as_long_as_it_is_locked() {
        let _turn = alone();
        let (rights, threads) = (Rights::own().unwrap(), Threads::open().unwrap());
        let same = || assert_eq!(threads.differ_from(&rights, None), Ok(None));
        let waiter = Waiter::new();
        same();
        assert_eq!(kept(&threads), []);
        let lock = waiter.lock();
        for _ in 0..3 {
            same();
            assert_eq!(kept(&threads), [waiter.number]);
        }
        drop(lock);
        same();
        assert_eq!(kept(&threads), [], "its thread lives");
        let lock = waiter.lock();
        same();
        waiter.end();
        same();
        assert_eq!(kept(&threads).len(), 1, "to close it takes long");
        drop(lock);
        same();
        assert_eq!(kept(&threads), []);
    }

    #[test]
    fn a_comparison_that_ends_early_closes_no_locked_file() {
        let _turn = alone();
        let (own, threads) = (Rights::own().unwrap(), Threads::open().unwrap());
        let waiters = [Waiter::new(), Waiter::new(), Waiter::new()];
        let locks = waiters.each_ref().map(Waiter::lock);
        assert_eq!(threads.differ_from(&own, None), Ok(None));
        let numbers = kept(&threads);
        assert_eq!(numbers.len(), waiters.len());
        let other = Rights {
            filters: !own.filters,
            ..own
        };
        // The first thread that is compared differs.
        let differs = threads.differ_from(&other, None);
        assert_eq!(differs, Ok(Some(Difference::Filters)));
        assert_eq!(kept(&threads), numbers);
        drop(locks);
        waiters.into_iter().for_each(Waiter::end);
    }
}
