//! Texts and folders of `/proc` and `/sys`, read without ever waiting for locks and leases that a stranger has on them.
//!
//! The owner of a file may have a lease on it (`F_SETLEASE`, fcntl(2)), `/proc/PID/stat` of his process included. To open it then
//! takes 45 s, and the owner may take the next lease. So such files are opened without waiting, and count as unreadable: [`open`].
//!
//! A file that every user may read, every user may lock: `/proc/PID/status` of another user's process, `/proc/meminfo`. To
//! close it then takes as long as the locks' owner likes ([`closers`]). Such a file is not closed but
//! kept open, and read again from its beginning the next time it is wanted. So a million locks cost the first reader a
//! look at the first of them, and later readers nothing.
//!
//! This is for files whose content the kernel makes for each reader anew, and which know their process. Of one that has
//! ended they say that it is gone, also when its number is another's by now. Then they are opened again. A file that is
//! bound to a namespace when it is opened (`mountinfo`) is kept under the namespace's name (`begin_of`). One that is bound
//! to a memory map (`maps`) a closer closes ([`Passing`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, RawDir};

use crate::closers::{self, Kind, NOBODY};
use crate::priority;

/// The most files that are kept open.
const MOST_PARKED: usize = 512;
/// The most files that wait for a closer; the next is closed by its reader.
const MOST_UNCLOSED: usize = 64;
/// How often a closer looks which parked files are locked no more.
const SWEEPS: Duration = Duration::from_secs(2);

/// Files that others have locks on, by their path.
static PARKED: Mutex<BTreeMap<PathBuf, File>> = Mutex::new(BTreeMap::new());
/// How many there are, so that readers need no lock as long as there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// When the next sweep is due.
static NEXT_SWEEP: Mutex<Option<Instant>> = Mutex::new(None);

fn parked<T>(act: impl FnOnce(&mut BTreeMap<PathBuf, File>) -> T) -> T {
    let mut files = priority::lock(&PARKED);
    let done = act(&mut files);
    COUNT.store(files.len(), Relaxed);
    done
}

/// Lets go of a file on which there may be locks.
fn let_go(file: impl AsFd + Send + 'static) {
    if closers::is_locked(&file) && closers::unclosed(NOBODY, Kind::Text).0 < MOST_UNCLOSED {
        closers::give(NOBODY, Kind::Text, file);
    }
}

/// Keeps a file that is locked. In its place goes another one if there are too many: most have few locks, for
/// many cost their owner memory.
fn park(path: &Path, file: File) {
    let left = parked(|files| {
        let former = files.insert(path.to_owned(), file);
        let one_too_many = files.len() > MOST_PARKED;
        former.or_else(|| {
            one_too_many
                .then(|| files.pop_first())
                .flatten()
                .map(|(_, file)| file)
        })
    });
    left.into_iter().for_each(let_go);
}

/// Takes the parked file at `path` out, and has a closer look after all of them now and then.
fn take(path: &Path) -> Option<File> {
    if COUNT.load(Relaxed) == 0 {
        return None;
    }
    let now = Instant::now();
    let mut next = priority::lock(&NEXT_SWEEP);
    if next.is_none_or(|next| next <= now) {
        *next = Some(now + SWEEPS);
        closers::give(NOBODY, Kind::Text, Sweep);
    }
    drop(next);
    parked(|files| files.remove(path))
}

/// A look at all parked files, by the closer that drops it.
struct Sweep;

impl Drop for Sweep {
    fn drop(&mut self) {
        let paths: Vec<_> = parked(|files| files.keys().cloned().collect());
        for path in paths {
            if let Some(file) = parked(|files| files.remove(&path))
                && closers::is_locked(&file)
            {
                park(&path, file);
            }
        }
    }
}

/// Opens a file that may be a stranger's, to read it. Files of `/proc` know no other use of `O_NONBLOCK`.
///
/// # Errors
/// What open(2) gives; `WouldBlock` where its owner has a lease on it.
pub fn open(path: impl rustix::path::Arg) -> rustix::io::Result<File> {
    open_as(path, OFlags::RDONLY)
}

/// The same, with the access to it that is wanted.
///
/// # Errors
/// As [`open`].
pub fn open_as(path: impl rustix::path::Arg, access: OFlags) -> rustix::io::Result<File> {
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from)
}

/// Has `look` read the file at `path` from its beginning. As long as it is locked, it is kept as `name`.
fn with<T>(name: &Path, path: &Path, look: impl Fn(&mut File) -> io::Result<T>) -> io::Result<T> {
    let look = |file: &mut File| file.rewind().and_then(|()| look(file));
    with_open(name, || Ok(open(path)?), look)
}

/// The same of what `open` opens, which knows its process.
pub(crate) fn with_open<T>(
    name: &Path,
    open: impl FnOnce() -> io::Result<File>,
    look: impl Fn(&mut File) -> io::Result<T>,
) -> io::Result<T> {
    if let Some(mut file) = take(name) {
        let seen = look(&mut file);
        if seen.is_ok() {
            park(name, file);
            return seen;
        }
        // Its process has ended.
        let_go(file);
    }
    let mut file = open()?;
    let seen = look(&mut file);
    if closers::is_locked(&file) {
        park(name, file);
    }
    seen
}

/// The bytes of a file.
///
/// # Errors
/// What open(2) and read(2) give.
pub fn bytes(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let path = path.as_ref();
    with(path, path, |file| {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map(|_| bytes)
    })
}

/// The first bytes, `most` at most, of the file at `path`, which shows something named `name` whatever the path leads
/// to later. A process that has locks on it has it open, too, so that to keep it open keeps nothing longer.
pub(crate) fn begin_of(name: &Path, path: &Path, most: u64) -> io::Result<Vec<u8>> {
    with(name, path, |file| {
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes).map(|_| bytes)
    })
}

/// The text of a file.
///
/// # Errors
/// What open(2) and read(2) give; `InvalidData` for what is no text.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let no_text = |_| io::Error::from(io::ErrorKind::InvalidData);
    String::from_utf8(bytes(path)?).map_err(no_text)
}

/// What the kernel tells of a process or thread. Its name stands there, which may be no text: the rest is read all the same.
///
/// # Errors
/// As [`bytes`].
pub fn about(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&bytes(path)?).into_owned())
}

/// The names in a folder that are numbers, `most` at most.
///
/// # Errors
/// What open(2) and getdents64(2) give.
pub fn numbers(path: impl AsRef<Path>, most: usize) -> io::Result<Vec<u32>> {
    numbers_from(path, 0, most)
}

/// The same of a folder of `/proc`, without those at its first `skip` places: the kernel passes over a thread in a hundredth of
/// the time that it takes to name it.
///
/// # Errors
/// As [`numbers`].
pub(crate) fn numbers_from(path: impl AsRef<Path>, skip: u64, most: usize) -> io::Result<Vec<u32>> {
    /// Room for an entry whose name is a number.
    const ENTRY: usize = 32;
    let path = path.as_ref();
    with(path, path, |folder| {
        if skip > 0 {
            // Two places are the folder's own and its parent's.
            folder.seek(io::SeekFrom::Start(skip + 2))?;
        }
        let mut room = [MaybeUninit::uninit(); 4096];
        // The kernel fills all that it is given.
        let len = most.saturating_mul(ENTRY).clamp(4 * ENTRY, room.len());
        let mut entries = RawDir::new(&*folder, room.get_mut(..len).unwrap_or_default());
        let mut numbers = Vec::new();
        while numbers.len() < most
            && let Some(entry) = entries.next()
        {
            let entry = entry?;
            let name = entry.file_name().to_str().ok();
            numbers.extend(name.and_then(|name| name.parse::<u32>().ok()));
        }
        Ok(numbers)
    })
}

/// A file in `/proc` of a user's process, that is read once and closed by his closer.
#[derive(Debug)]
pub struct Passing {
    uid: u32,
    /// `None` only while it is dropped.
    file: Option<OwnedFd>,
}

impl Passing {
    /// Opens the file, which is user `uid`'s, to read it.
    ///
    /// # Errors
    /// What open(2) gives.
    pub fn open(uid: u32, path: impl rustix::path::Arg) -> rustix::io::Result<Self> {
        let file = Some(open(path)?.into());
        Ok(Self { uid, file })
    }
}

impl AsFd for Passing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("it is not dropped").as_fd()
    }
}

impl Read for Passing {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&*self, bytes)?)
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            closers::give(self.uid, Kind::Text, file);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::closers::locked;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[track_caller]
    fn wait_for(mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < PATIENCE, "waited in vain");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_locked_file_stays_open_and_is_read_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let is_parked = || parked(|files| files.contains_key(&path));
        std::fs::write(&path, "one").unwrap();
        assert_eq!(read(&path).unwrap(), "one");
        assert!(!is_parked());
        let lock = locked(&path);
        for text in ["two", "3", "four"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read(&path).unwrap(), text);
            // A sweep may have it in its hands for a moment.
            wait_for(is_parked);
        }
        drop(lock);
        let begin = Instant::now();
        while is_parked() {
            assert!(begin.elapsed() < PATIENCE, "it stays open");
            assert_eq!(read(&path).unwrap(), "four");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[test]
    fn a_parked_file_of_a_process_that_has_ended_is_opened_again() {
        let mut child = std::process::Command::new("sleep");
        let mut child = child.arg("60").spawn().unwrap();
        let path = PathBuf::from(format!("/proc/{}/comm", child.id()));
        let _lock = locked(&path);
        // Between fork and exec it has another name.
        while read(&path).unwrap() != "sleep\n" {}
        wait_for(|| parked(|files| files.contains_key(&path)));
        child.kill().unwrap();
        child.wait().unwrap();
        let gone = read(&path).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn threads_are_passed_over() {
        let ends: Vec<_> = (0..20)
            .map(|_| {
                let (end, ended) = std::sync::mpsc::channel::<()>();
                std::thread::spawn(move || ended.recv());
                end
            })
            .collect();
        // Other tests have threads, too, which end meanwhile: but the first one does not.
        let first = numbers("/proc/self/task", 1).unwrap();
        assert_eq!(first, [std::process::id()]);
        let later = numbers_from("/proc/self/task", 1, 8).unwrap();
        assert_eq!((later.len(), later.contains(&first[0])), (8, false));
        assert!(
            numbers_from("/proc/self/task", 100_000, 8)
                .unwrap()
                .is_empty()
        );
        drop(ends);
    }

    #[test]
    fn numbers_are_found_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["7", "x", "12", "-1", "400"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let mut found = numbers(folder.path(), 10).unwrap();
        found.sort_unstable();
        assert_eq!(found, [7, 12, 400]);
        assert_eq!(numbers(folder.path(), 2).unwrap().len(), 2);
        assert!(
            numbers("/proc/self/task", 10)
                .unwrap()
                .contains(&crate::process::thread_id())
        );
    }
}
