//! What threads of this process may do, as the kernel tells it.
//!
//! Nothing here allocates, sets `errno` or needs thread-local storage.
//!
//! Source: proc_pid_status(5).

use std::ffi::CStr;
use std::mem::MaybeUninit;

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::{Errno, Result};

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
        Self::read(c"/proc/thread-self/status", c"").map(|(own, _)| own)
    }

    /// The rights of a thread, and whether it has this name.
    fn read(path: &CStr, name: &CStr) -> Result<(Self, bool)> {
        let mut named = false;
        let status = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (mut credentials, mut filters, mut filter_count) = (START, START, 0);
        crate::vma::each_line(&status, usize::MAX, |line| {
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

    /// How other threads of this process differ from these rights, the worse way if there are several. The
    /// calling thread is not looked at, nor is `except`.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub fn differ_elsewhere(&self, except: Option<Except<'_>>) -> Result<Option<Difference>> {
        let skipped = except.map_or(c"", |except| except.name);
        let is_skipped = |number: Option<i32>, named: bool| {
            let is_it = |except: Except<'_>| number.map(i32::unsigned_abs) == Some(except.number);
            named && except.is_some_and(is_it)
        };
        let own = rustix::thread::gettid().as_raw_pid();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let tasks = rustix::fs::open(c"/proc/self/task", flags, Mode::empty())?;
        let mut space = [MaybeUninit::uninit(); 2048];
        let mut entries = RawDir::new(&tasks, &mut space);
        let (mut differs, mut same) = (false, false);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            let number = std::str::from_utf8(name)
                .ok()
                .and_then(|name| name.parse().ok());
            if number.is_none() || number == Some(own) {
                continue;
            }
            match Self::read(&Path::of(name), skipped) {
                // The thread has ended.
                Err(Errno::NOENT | Errno::SRCH) => {}
                Err(errno) => return Err(errno),
                Ok((_, named)) if is_skipped(number, named) => {}
                Ok((other, _)) if other.filters != self.filters => {
                    return Ok(Some(Difference::Filters));
                }
                Ok((other, _)) if other == *self => same = true,
                Ok(_) => differs = true,
            }
        }
        Ok(match (differs, same) {
            (false, _) => None,
            (true, true) => Some(Difference::Credentials),
            (true, false) => Some(Difference::Alone),
        })
    }
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
    use super::*;

    #[test]
    fn a_thread_with_no_new_privs_differs_by_its_filters() {
        let before = Rights::own().unwrap();
        assert_eq!(Rights::own().unwrap(), before);
        std::thread::spawn(move || {
            assert_eq!(Rights::filters_before_all(), Ok(before.filter_count()));
            // Threads of other tests come and go, all with the same rights.
            assert_eq!(before.differ_elsewhere(None), Ok(None));
            // SAFETY: PR_SET_NO_NEW_PRIVS takes numbers, and is for this thread alone.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let narrow = Rights::own().unwrap();
            assert_ne!(narrow, before);
            assert_eq!(narrow.differ_elsewhere(None), Ok(Some(Difference::Filters)));
        })
        .join()
        .unwrap();
    }
}
