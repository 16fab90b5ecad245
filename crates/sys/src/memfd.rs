//! Memory files: stores of canonical pages, and lifelines.
//!
//! A [`Store`] is written by its owner alone: others get a descriptor opened read-only, and mode
//! 0400 keeps them from opening it again for writing. It can grow but never shrink, so a page
//! once mapped never raises SIGBUS.
//!
//! A [`Lifeline`] tells whether any process still holds it. It has two descriptions (open(2)): one can
//! write, and goes to guests; one can only read, and stays. A process that maps the first one keeps it open;
//! fork inherits the mapping, exec and exit drop it. The kernel gives a read lease on a file
//! (`F_SETLEASE`) when no description of it can write. So a lease is refused with EAGAIN exactly as
//! long as one descendant is left that could have inherited the other mappings of that time.
//!
//! The tempting alternative is to seal the file against writing (`F_SEAL_WRITE`), which fails while it
//! is mapped. But that takes the inode's lock, and so does write(2) while it copies: a guest that
//! writes from memory with a fault that never ends would hold the caller in an uninterruptible sleep.
//! It also waits 0.16 s for pins. So this is the rule for all files whose descriptor a guest has: no
//! call on it takes the inode's lock. A lease takes spin locks only (`fs/locks.c`).
//!
//! A [`Note`] is a page of text for a successor, an [`Archive`] a file of fixed size.
//!
//! All can be had back from a descriptor that a former process made ([`Store::adopt`],
//! [`Lifeline::adopt`], [`Note::adopt`], [`Archive::adopt`]).

mod archive;

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

pub use archive::Archive;
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, fallocate, fchmod,
    fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create, open,
};
use rustix::io::{Errno, Result};

use crate::PAGE;
use crate::fault::{self, Point};
use crate::mapping::{Access, advise, share, unmap};
use crate::mempolicy::{self, Existing, NodeMask, mbind};
use crate::process::thread_time;

const PAGE_BYTES: u64 = PAGE as u64;
/// The most buffers one pwritev(2) takes.
const MAX_BUFFERS: usize = 1024;

/// A memory file's number: no two that exist have the same.
///
/// It comes from `/proc/self/fdinfo`: on some kernels (6.6.59, 6.11.6) fstat(2) takes the inode's lock.
///
/// # Errors
/// What reading `/proc` gives.
pub fn number(file: impl AsFd) -> Result<u64> {
    let path = format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd());
    let info = std::fs::read_to_string(path).map_err(|error| {
        let number = error.raw_os_error().map(Errno::from_raw_os_error);
        number.unwrap_or(Errno::IO)
    })?;
    let number = info.lines().find_map(|line| line.strip_prefix("ino:"));
    let number = number.and_then(|number| number.trim().parse().ok());
    number.ok_or(Errno::NOSYS)
}

/// The device that all memory files are on, as `/proc/PID/maps` shows it.
///
/// # Errors
/// What memfd_create(2) and fstat(2) give.
pub fn device() -> Result<(u32, u32)> {
    static DEVICE: OnceLock<(u32, u32)> = OnceLock::new();
    if let Some(&device) = DEVICE.get() {
        return Ok(device);
    }
    let device = rustix::fs::fstat(memfd_create("pageone-probe", MemfdFlags::CLOEXEC)?)?.st_dev;
    Ok(*DEVICE.get_or_init(|| (rustix::fs::major(device), rustix::fs::minor(device))))
}

/// Reads from byte `at` of a memory file on; gives how many bytes there were. A hole reads as zeros and stays one.
///
/// # Errors
/// What pread(2) gives.
pub fn read_at(file: impl AsFd, at: u64, bytes: &mut [u8]) -> Result<usize> {
    fault::check(Point::StoreRead)?;
    rustix::io::pread(file, bytes, at)
}

/// Fills `bytes` from `at` on.
fn read_all(file: &OwnedFd, mut at: u64, mut bytes: &mut [u8]) -> Result<()> {
    while !bytes.is_empty() {
        match read_at(file, at, bytes)? {
            // What is in the buffer is no page of the store.
            0 => return Err(Errno::NXIO),
            read => {
                at += read as u64;
                bytes = bytes.split_at_mut(read).1;
            }
        }
    }
    Ok(())
}

/// Why a descriptor cannot be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// It is no memory file, or was made for something else.
    #[error("it is {found:?}, not a memory file named {wanted:?}")]
    Other {
        /// What was wanted.
        wanted: String,
        /// Where the descriptor leads.
        found: String,
    },
    /// It is sealed otherwise than its maker sealed it.
    #[error("its seals are {found:#x} instead of {wanted:#x}")]
    Seals {
        /// What its maker set.
        wanted: u32,
        /// What is set.
        found: u32,
    },
    /// It can be written and must not, or the other way round.
    #[error("it was opened otherwise than by its maker")]
    Access,
    /// The kernel refuses to tell.
    #[error("the kernel tells nothing of it: {0}")]
    System(#[from] Errno),
}

/// Seals that say nothing of the content: the kernel sets it with `MFD_NOEXEC_SEAL`.
const EXEC_SEAL: SealFlags = SealFlags::from_bits_retain(0x20);

fn seals(file: impl AsFd) -> Result<SealFlags> {
    Ok(fcntl_get_seals(file)?.difference(EXEC_SEAL))
}

fn check(
    file: &OwnedFd,
    name: &str,
    access: OFlags,
    wanted: SealFlags,
) -> std::result::Result<(), AdoptError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let found = rustix::fs::readlink(path, Vec::new())?;
    let found = found.to_string_lossy();
    if found.strip_suffix(" (deleted)") != Some(&format!("/memfd:{name}")) {
        let (wanted, found) = (name.to_owned(), found.into_owned());
        return Err(AdoptError::Other { wanted, found });
    }
    if rustix::fs::fcntl_getfl(file)? & OFlags::ACCMODE != access {
        return Err(AdoptError::Access);
    }
    match seals(file)? {
        found if found == wanted => Ok(()),
        found => Err(AdoptError::Seals {
            wanted: wanted.bits(),
            found: found.bits(),
        }),
    }
}

fn create(name: &str, mode: Mode) -> Result<OwnedFd> {
    fault::check(Point::Memfd)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(name, flags),
        other => other,
    }?;
    fchmod(&file, mode)?;
    Ok(file)
}

/// A sparse file of canonical pages.
#[derive(Debug)]
pub struct Store(OwnedFd);

impl Store {
    /// An empty store; `name` shows in `/proc/PID/maps` of its guests.
    ///
    /// # Errors
    /// What memfd_create(2), fchmod(2) and fcntl(2) give.
    pub fn new(name: &str) -> Result<Self> {
        let file = create(name, Mode::RUSR)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        Ok(Self(file))
    }

    /// The store of a former process that called it `name`.
    ///
    /// # Errors
    /// [`AdoptError`] tells what the descriptor is instead.
    pub fn adopt(file: OwnedFd, name: &str) -> std::result::Result<Self, AdoptError> {
        check(&file, name, OFlags::RDWR, SealFlags::SHRINK)?;
        Ok(Self(file))
    }

    /// The page behind the last that was ever written.
    ///
    /// # Errors
    /// What fstat(2) gives.
    pub fn end(&self) -> Result<u64> {
        fault::check(Point::StoreRead)?;
        let size = u64::try_from(rustix::fs::fstat(&self.0)?.st_size);
        Ok(size.unwrap_or(0).div_ceil(PAGE_BYTES))
    }

    /// The first run of pages at or behind `page` that hold a frame, or lie in swap.
    ///
    /// # Errors
    /// What lseek(2) gives.
    pub fn next_run(&self, page: u64) -> Result<Option<Range<u64>>> {
        fault::check(Point::StoreRead)?;
        let seek = |to| rustix::fs::seek(&self.0, to);
        let start = match seek(SeekFrom::Data(page * PAGE_BYTES)) {
            Err(Errno::NXIO) => return Ok(None),
            other => other? / PAGE_BYTES,
        };
        let end = seek(SeekFrom::Hole(start * PAGE_BYTES))?.div_ceil(PAGE_BYTES);
        Ok(Some(start..end))
    }

    /// Reads the pages from `first` on; zeros for holes (which stay holes).
    ///
    /// # Errors
    /// What pread(2) gives; `NXIO` for pages behind the end.
    pub fn read_pages(&self, first: u64, pages: &mut [[u8; PAGE]]) -> Result<()> {
        read_all(&self.0, first * PAGE_BYTES, pages.as_flattened_mut())
    }

    /// Writes whole pages one after another, from page `first` on; the file grows as needed.
    ///
    /// # Errors
    /// `NOSPC` or `NOMEM` when memory is exhausted; what pwritev(2) gives.
    pub fn write(&self, first: u64, pages: &[&[u8; PAGE]]) -> Result<()> {
        fault::check(Point::StoreWrite)?;
        let mut at = first * PAGE_BYTES;
        for part in pages.chunks(MAX_BUFFERS) {
            let mut buffers = [IoSlice::new(&[]); MAX_BUFFERS];
            for (buffer, page) in buffers.iter_mut().zip(part) {
                *buffer = IoSlice::new(page.as_slice());
            }
            let mut rest = buffers.get_mut(..part.len()).unwrap_or_default();
            while !rest.is_empty() {
                let written = rustix::io::pwritev(&self.0, rest, at)?;
                if written == 0 {
                    return Err(Errno::NOSPC);
                }
                at += written as u64;
                IoSlice::advance_slices(&mut rest, written);
            }
        }
        Ok(())
    }

    /// Reads page `index`; zeros for a hole (which stays one).
    ///
    /// # Errors
    /// What pread(2) gives; `NXIO` for a page behind the end.
    pub fn read(&self, index: u64, page: &mut [u8; PAGE]) -> Result<()> {
        read_all(&self.0, index * PAGE_BYTES, page)
    }

    /// Gives the frames of `pages` pages from `first` on back.
    ///
    /// # Errors
    /// What fallocate(2) gives.
    pub fn punch(&self, first: u64, pages: u64) -> Result<()> {
        fault::check(Point::StorePunch)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.0, flags, first * PAGE_BYTES, pages * PAGE_BYTES)
    }

    /// Asks the kernel to take the frames of `pages` pages from `first` on from `node`, and from
    /// another one only when that is full. The wish belongs to the file: it holds for every
    /// process that fills a page, also when the page comes back from swap.
    ///
    /// # Errors
    /// What mmap(2) and mbind(2) give: `INVAL` for a node without memory, `NOSYS` on a kernel
    /// without NUMA.
    pub fn prefer_node(&self, first: u64, pages: u64, node: u32) -> std::io::Result<()> {
        fault::check(Point::StoreNode)?;
        let len = usize::try_from(pages).unwrap_or(usize::MAX) * PAGE;
        let nodes = NodeMask::from_nodes([node])?;
        // The kernel is told by way of a mapping, which need not stay.
        let at = share(self.0.as_fd(), first * PAGE_BYTES, len, Access::Read)?;
        let told = mbind(at, len, mempolicy::Mode::Preferred, &nodes, Existing::Stay);
        // SAFETY: the mapping was made above and nothing refers to it.
        unsafe { unmap(at, len) }?;
        told
    }

    /// The node of the frame of each of `pages`, ascending; `None` where the page has no frame in memory, in swap for one.
    ///
    /// **The caller keeps these pages from being punched meanwhile.** The kernel tells the node of mapped pages only, and to
    /// map a hole of a memory file fills it: a frame that no process would ever give back.
    ///
    /// # Errors
    /// What mmap(2), mincore(2), madvise(2) and move_pages(2) give.
    pub fn nodes(&self, pages: &[u64]) -> std::io::Result<Vec<Option<u32>>> {
        let mut all = Vec::with_capacity(pages.len());
        for part in pages.chunk_by(|a, b| a / WINDOW_PAGES as u64 == b / WINDOW_PAGES as u64) {
            let (Some(&first), Some(&last)) = (part.first(), part.last()) else {
                continue;
            };
            let len = usize::try_from(last + 1 - first).unwrap_or(0) * PAGE;
            let at = share(self.0.as_fd(), first * PAGE_BYTES, len, Access::Read)?;
            let asked = nodes_at(at, first, part);
            // SAFETY: the mapping was made above and nothing refers to it.
            unsafe { unmap(at, len) }?;
            all.append(&mut asked?);
        }
        Ok(all)
    }

    /// Pages that hold a frame.
    ///
    /// # Errors
    /// What fstat(2) gives.
    pub fn pages(&self) -> Result<u64> {
        let blocks = u64::try_from(rustix::fs::fstat(&self.0)?.st_blocks);
        Ok(blocks.unwrap_or(0) * 512 / PAGE_BYTES)
    }

    /// A descriptor that can only read.
    ///
    /// # Errors
    /// What open(2) gives; `/proc` must be mounted.
    pub fn share(&self) -> Result<OwnedFd> {
        fault::check(Point::StoreShare)?;
        reopen(&self.0, OFlags::RDONLY)
    }
}

/// Pages that are mapped at a time to ask for their nodes: 2 MiB.
const WINDOW_PAGES: usize = 512;

/// The nodes of `pages`, less than a window apart, of a store that is mapped at `at` from page `first` on.
fn nodes_at(at: usize, first: u64, pages: &[u64]) -> std::io::Result<Vec<Option<u32>>> {
    let place = |page: u64| usize::try_from(page - first).expect("a place in a window");
    let count = pages.last().map_or(0, |&last| place(last) + 1);
    let mut resident = [0_u8; WINDOW_PAGES];
    let resident = resident.get_mut(..count).unwrap_or_default();
    // SAFETY: the kernel writes a byte for each of `count` pages, and the slice has as many.
    if unsafe { libc::mincore(at as *mut libc::c_void, count * PAGE, resident.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let is_resident = |page: u64| resident.get(place(page)).is_some_and(|byte| byte & 1 == 1);
    let there: Vec<u64> = pages.iter().copied().filter(|&p| is_resident(p)).collect();
    for run in there.chunk_by(|a, b| a + 1 == *b) {
        let start = run.first().map_or(at, |&page| at + place(page) * PAGE);
        // SAFETY: the range lies in the caller's mapping; reading its pages in changes no byte of it.
        unsafe { advise(start, run.len() * PAGE, libc::MADV_POPULATE_READ) }?;
    }
    let addresses: Vec<usize> = pages.iter().map(|&page| at + place(page) * PAGE).collect();
    let mut nodes = vec![0; pages.len()];
    mempolicy::pages_to_nodes(None, &addresses, &mut nodes)?;
    // Of a page that is not there the kernel gives an error number.
    Ok(nodes.into_iter().map(|node| node.try_into().ok()).collect())
}

impl AsFd for Store {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Opens the file once more. It never waits for a lease of another process.
fn reopen(file: &OwnedFd, access: OFlags) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
    open(path, flags, Mode::empty())
}

const LIFELINE: &str = "pageone-lifeline";
/// No process may add another one: a file that is sealed against writing could not be held any more.
const LIFELINE_SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Sets the signal that tells of a lease that is to be broken; libc does not name it.
const F_SETSIG: libc::c_int = 10;

/// What a question whether a line is free takes of a processor at most, as a rule: a thousandth of this.
const QUICK: Duration = Duration::from_millis(5);
/// How many times as long a line rests that took longer.
const REST: u32 = 100;

/// A page that is there to be held. What its holders write to it is theirs.
#[derive(Debug)]
pub struct Lifeline {
    /// Can only read. It never leaves this process but for a keeper.
    file: OwnedFd,
    number: u64,
    /// Until when it is not asked, because the last time took long.
    rests_until: Mutex<Option<Instant>>,
}

impl Lifeline {
    /// A lifeline, and the description by which it is held: as long as a process has it open, or maps it.
    ///
    /// # Errors
    /// What memfd_create(2), ftruncate(2), open(2) and fcntl(2) give; `/proc` must be mounted.
    pub fn new() -> Result<(Self, OwnedFd)> {
        // The description that memfd_create(2) gives does not count as one that can write.
        let made = create(LIFELINE, Mode::RUSR | Mode::WUSR)?;
        ftruncate(&made, PAGE_BYTES)?;
        fcntl_add_seals(&made, LIFELINE_SEALS)?;
        let held = reopen(&made, OFlags::RDWR)?;
        Ok((Self::of(reopen(&made, OFlags::RDONLY)?)?, held))
    }

    /// The lifeline of a former process.
    ///
    /// # Errors
    /// [`AdoptError`] tells what the descriptor is instead.
    pub fn adopt(file: OwnedFd) -> std::result::Result<Self, AdoptError> {
        check(&file, LIFELINE, OFlags::RDONLY, LIFELINE_SEALS)?;
        Ok(Self::of(file)?)
    }

    fn of(file: OwnedFd) -> Result<Self> {
        // A process of this user may open the file to write in the moment of a lease. Then its holder
        // gets a signal. It is SIGIO, which ends a process, unless one is chosen that does nothing.
        fcntl(&file, F_SETSIG, libc::SIGURG)?;
        let line = Self {
            number: number(&file)?,
            file,
            rests_until: Mutex::default(),
        };
        // A file of another user never gives a lease.
        line.ask().map(|_| line)
    }

    /// Its number: see [`number`].
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether no process holds it. Once it was free it can never be held again: no process has a descriptor
    /// that can write, and no guest may open one.
    #[must_use]
    pub fn is_free(&self) -> bool {
        // Whatever keeps it from telling, `fs.leases-enable=0` for one: it is held.
        fault::check(Point::Seal).is_ok() && self.ask_if_quick().unwrap_or(false)
    }

    /// Asks, if the last time was quick. A lease takes the spin lock under which the kernel walks POSIX locks, and
    /// a guest may take millions of these on its line.
    fn ask_if_quick(&self) -> Result<bool> {
        let mut rests_until = self
            .rests_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if rests_until.is_some_and(|until| Instant::now() < until) {
            return Ok(false);
        }
        let begin = thread_time();
        let told = self.ask();
        let took = thread_time().saturating_sub(begin);
        *rests_until = (took > QUICK).then(|| Instant::now() + took * REST);
        told
    }

    /// The first `N` bytes, which its holders may write. Zeros where nothing was written, or the kernel refuses.
    ///
    /// Reading takes no lock of the inode (`shmem_file_read_iter()` in mm/shmem.c). The tempting alternative, to map the page,
    /// would end this process if the memory behind it fails, and waits where a holder punches holes.
    #[must_use]
    pub fn head<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        match rustix::io::pread(&self.file, &mut bytes, 0) {
            Ok(read) if read == N => bytes,
            _ => [0; N],
        }
    }

    /// As [`is_free`](Self::is_free), and why it cannot tell.
    ///
    /// # Errors
    /// What fcntl(2) gives: `INVAL` while `fs.leases-enable` is 0.
    pub fn ask(&self) -> Result<bool> {
        match fcntl(&self.file, libc::F_SETLEASE, libc::F_RDLCK) {
            Ok(()) => {
                // Another thread that asks may have given the lease back, for both.
                let _ = fcntl(&self.file, libc::F_SETLEASE, libc::F_UNLCK);
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Lifeline {
    /// The descriptor that asks, for a keeper.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn fcntl(file: &OwnedFd, command: libc::c_int, argument: libc::c_int) -> Result<()> {
    // SAFETY: the commands used here take a number and touch no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}

/// A page of text, for the process that comes after this one.
#[derive(Debug)]
pub struct Note(OwnedFd);

const NOTE: &str = "pageone-note";
const NOTE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

impl Note {
    /// An empty page.
    ///
    /// # Errors
    /// What memfd_create(2) and ftruncate(2) give.
    pub fn new() -> Result<Self> {
        let file = create(NOTE, Mode::RUSR | Mode::WUSR)?;
        ftruncate(&file, PAGE_BYTES)?;
        fcntl_add_seals(&file, NOTE_SEALS)?;
        Ok(Self(file))
    }

    /// Another handle of the same page.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        fault::check(Point::Duplicate)?;
        Ok(Self(self.0.try_clone()?))
    }

    /// A former process's page.
    ///
    /// # Errors
    /// [`AdoptError`] tells what the descriptor is instead.
    pub fn adopt(file: OwnedFd) -> std::result::Result<Self, AdoptError> {
        check(&file, NOTE, OFlags::RDWR, NOTE_SEALS)?;
        Ok(Self(file))
    }

    /// Replaces the text. A process killed meanwhile leaves the old one or the new one: the kernel
    /// copies a page without a break.
    ///
    /// # Errors
    /// `FBIG` for a text longer than a page; what pwrite(2) gives.
    pub fn write(&self, text: &str) -> Result<()> {
        fault::check(Point::Note)?;
        let mut page = [0; PAGE];
        let place = page.get_mut(..text.len()).ok_or(Errno::FBIG)?;
        place.copy_from_slice(text.as_bytes());
        match rustix::io::pwrite(&self.0, &page, 0)? {
            PAGE => Ok(()),
            _ => Err(Errno::NOSPC),
        }
    }

    /// The text.
    ///
    /// # Errors
    /// What pread(2) gives; `ILSEQ` when it is no text.
    pub fn read(&self) -> Result<String> {
        let mut page = vec![0; PAGE];
        let read = rustix::io::pread(&self.0, &mut page, 0)?;
        page.truncate(read);
        let text = String::from_utf8(page).map_err(|_| Errno::ILSEQ)?;
        Ok(text.trim_end_matches('\0').to_owned())
    }
}

impl AsFd for Note {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_keeps_pages_and_gives_frames_back() {
        let store = Store::new("pageone-test").unwrap();
        let (a, b) = ([1; 4096], [2; 4096]);
        let many = vec![&a; 1500];
        store.write(3, &[&a, &b]).unwrap();
        store.write(100, &many).unwrap();
        assert_eq!(store.pages().unwrap(), 1502);
        store.punch(100, 1500).unwrap();
        let mut page = [9; 4096];
        store.read(100, &mut page).unwrap();
        assert_eq!((page, store.pages().unwrap()), ([0; 4096], 2));
        store.read(4, &mut page).unwrap();
        assert_eq!(page, b);
    }

    /// In a guest with several nodes this shows that the pages are where they were wanted.
    #[test]
    fn a_store_takes_its_frames_from_the_node_it_is_given() {
        let nodes = crate::node::read_list(
            std::path::Path::new(crate::node::NODE_DIR)
                .join("has_memory")
                .as_path(),
        );
        let Ok(Some(nodes)) = nodes else {
            println!("skipped: the kernel shows no nodes");
            return;
        };
        for &node in &nodes {
            let store = Store::new("pageone-test").unwrap();
            let prefer = |first| store.prefer_node(first, 1 << 28, node);
            match prefer(0) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                    println!("skipped: the kernel has no memory policies");
                    return;
                }
                told => told.unwrap(),
            }
            prefer(1 << 28).unwrap();
            let pages = vec![&[7; PAGE]; 64];
            for first in [0, 1 << 20, (1 << 28) + 3] {
                store.write(first, &pages).unwrap();
                let at =
                    share(store.0.as_fd(), first * PAGE_BYTES, 64 * PAGE, Access::Read).unwrap();
                let addresses: Vec<usize> = (0..64).map(|page| at + page * PAGE).collect();
                for &address in &addresses {
                    // SAFETY: the page lies in the mapping made above, and the file is that long.
                    let byte =
                        unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() };
                    assert_eq!(byte, 7);
                }
                let mut found = [-1; 64];
                mempolicy::pages_to_nodes(None, &addresses, &mut found).unwrap();
                let wanted = i32::try_from(node).unwrap();
                assert_eq!(found, [wanted; 64], "slots from {first} on");
                // SAFETY: the mapping was made above and nothing refers to it.
                unsafe { unmap(at, 64 * PAGE) }.unwrap();
                let pages: Vec<u64> = (first..first + 64).collect();
                assert_eq!(store.nodes(&pages).unwrap(), [Some(node); 64]);
            }
        }
    }

    #[test]
    fn nodes_are_asked_of_frames_and_no_hole_is_filled() {
        let store = Store::new("pageone-test").unwrap();
        let many = vec![&[7; PAGE]; 3];
        [3, 510, 2000, 2010]
            .iter()
            .for_each(|&first| store.write(first, &many).unwrap());
        let held = [3, 5, 510, 511, 512, 2000, 2002, 2010];
        let nodes = match store.nodes(&held) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                println!("skipped: the kernel knows of no nodes");
                return;
            }
            nodes => nodes.unwrap(),
        };
        assert!(
            nodes.len() == held.len() && nodes.iter().all(Option::is_some),
            "{nodes:?}"
        );
        assert_eq!(store.pages().unwrap(), 12);
        // Against the contract, but the kernel says that nothing is there, so nothing is mapped.
        store.punch(5, 1).unwrap();
        let nodes = store.nodes(&[4, 5, 100]).unwrap();
        assert_eq!(nodes[1..], [None, None]);
        assert!(nodes[0].is_some() && store.nodes(&[]).unwrap().is_empty());
        assert_eq!(store.pages().unwrap(), 11);
    }

    #[test]
    fn a_shared_store_can_only_be_read() {
        let store = Store::new("pageone-test").unwrap();
        store.write(0, &[&[1; 4096]]).unwrap();
        let shared = store.share().unwrap();
        assert!(rustix::io::pwrite(&shared, b"x", 0).is_err());
        assert!(ftruncate(&shared, 0).is_err());
        assert!(ftruncate(&store.0, 0).is_err(), "not even the owner");
        let mut page = [0; 4096];
        assert_eq!(rustix::io::pread(&shared, &mut page, 0), Ok(4096));
    }

    /// What `sh -c SCRIPT` says as user `uid`, with a descriptor of `store` as its standard input.
    fn as_user(uid: u32, store: &Store, script: &str) -> bool {
        use std::os::unix::process::CommandExt;
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-c", script])
            .uid(uid)
            .gid(uid)
            .current_dir("/");
        shell.stdin(store.share().unwrap());
        shell.stderr(std::process::Stdio::null());
        shell.stdout(std::process::Stdio::null());
        shell.status().unwrap().success()
    }

    #[test]
    fn another_user_cannot_open_a_store_again_and_root_can() {
        const STRANGER: u32 = 61_004;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can be another user");
            return;
        }
        let store = Store::new("pageone-test").unwrap();
        store.write(0, &[&[1; 4096]]).unwrap();
        let (read, reopen, write, chmod) = (
            "head -c 1",
            "exec 3</proc/self/fd/0",
            "exec 3<>/proc/self/fd/0 && echo x >&3",
            "chmod 600 /proc/self/fd/0",
        );
        assert!(as_user(STRANGER, &store, read));
        for script in [reopen, write, chmod] {
            assert!(!as_user(STRANGER, &store, script), "{script}");
        }
        let mut page = [0; 4096];
        store.read(0, &mut page).unwrap();
        assert_eq!(page, [1; 4096]);
        // Root can, which is why guests of root's are trusted.
        assert!(as_user(0, &store, write));
        store.read(0, &mut page).unwrap();
        assert_eq!(page[0], b'x');
    }

    #[test]
    fn a_store_is_adopted_as_it_was_left() {
        let store = Store::new("pageone-test").unwrap();
        assert_eq!(
            (store.end().unwrap(), store.next_run(0).unwrap()),
            (0, None)
        );
        let pages = vec![&[3; 4096]; 10];
        store.write(5, &pages).unwrap();
        store.write(40, &pages[..1]).unwrap();
        store.punch(8, 2).unwrap();
        store.punch(40, 1).unwrap();
        let copy = || store.0.try_clone().unwrap();
        let other = Store::adopt(copy(), "another").unwrap_err().to_string();
        assert!(other.contains("pageone-test"), "{other}");
        let adopted = Store::adopt(copy(), "pageone-test").unwrap();
        assert_eq!(adopted.end().unwrap(), 41, "what was punched is spent");
        let runs = [0, 8, 11, 15].map(|page| adopted.next_run(page).unwrap());
        assert_eq!(runs, [Some(5..8), Some(10..15), Some(11..15), None]);
        let mut pages = [[9; 4096]; 3];
        adopted.read_pages(7, &mut pages).unwrap();
        assert_eq!(pages, [[3; 4096], [0; 4096], [0; 4096]]);
        // What was in the buffer before is no page.
        assert_eq!(adopted.read(41, &mut pages[0]), Err(Errno::NXIO));
        assert_eq!(adopted.read_pages(40, &mut pages), Err(Errno::NXIO));
        assert!(Store::adopt(store.share().unwrap(), "pageone-test").is_err());
        fcntl_add_seals(copy(), SealFlags::GROW).unwrap();
        let error = Store::adopt(copy(), "pageone-test").unwrap_err();
        assert!(matches!(error, AdoptError::Seals { .. }), "{error}");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Store::adopt(file.into(), "pageone-test").is_err());
    }

    #[test]
    fn a_lifeline_is_adopted_as_it_was_made() {
        let (line, held) = Lifeline::new().unwrap();
        let adopted = Lifeline::adopt(line.file.try_clone().unwrap()).unwrap();
        assert_eq!(adopted.number(), number(&held).unwrap());
        assert!(!adopted.is_free());
        let error = Lifeline::adopt(held.try_clone().unwrap()).unwrap_err();
        assert!(matches!(error, AdoptError::Access), "{error}");
        drop(held);
        assert!(adopted.is_free() && line.is_free());
        let error = Lifeline::adopt(Store::new("x").unwrap().share().unwrap()).unwrap_err();
        assert!(matches!(error, AdoptError::Other { .. }), "{error}");
        let former = create(LIFELINE, Mode::RUSR).unwrap();
        let error = Lifeline::adopt(reopen(&former, OFlags::RDONLY).unwrap()).unwrap_err();
        assert!(matches!(error, AdoptError::Seals { .. }), "{error}");
    }

    #[test]
    fn a_lifeline_cannot_be_tampered_with() {
        let (line, held) = Lifeline::new().unwrap();
        let seals = [SealFlags::WRITE, SealFlags::FUTURE_WRITE, SealFlags::SEAL];
        for seal in seals {
            assert_eq!(fcntl_add_seals(&held, seal), Err(Errno::PERM));
        }
        assert!(ftruncate(&held, 0).is_err() && ftruncate(&held, 2 * PAGE_BYTES).is_err());
        for access in [Access::ReadWrite, Access::Read] {
            let at = share(held.as_fd(), 0, PAGE, access).unwrap();
            // SAFETY: the mapping was made above and nothing refers to it.
            unsafe { unmap(at, PAGE) }.unwrap();
        }
        assert!(share(line.as_fd(), 0, PAGE, Access::ReadWrite).is_err());
    }

    #[test]
    fn leases_of_another_holder_do_no_harm() {
        let (line, held) = Lifeline::new().unwrap();
        let lease = |file: &OwnedFd, kind| fcntl(file, libc::F_SETLEASE, kind);
        assert_eq!(lease(&held, libc::F_WRLCK), Err(Errno::AGAIN));
        assert_eq!(lease(&held, libc::F_RDLCK), Err(Errno::AGAIN));
        let other = reopen(&line.file, OFlags::RDONLY).unwrap();
        drop(held);
        lease(&other, libc::F_RDLCK).unwrap();
        assert!(line.is_free());
        // It breaks the lease of `other`, to which the kernel gives time.
        fcntl(&other, F_SETSIG, libc::SIGURG).unwrap();
        assert_eq!(reopen(&line.file, OFlags::RDWR).unwrap_err(), Errno::AGAIN);
        assert!(!line.is_free(), "it may be opened to write");
        lease(&other, libc::F_UNLCK).unwrap();
        assert!(line.is_free());
    }

    #[test]
    fn a_lease_that_is_broken_ends_no_process() {
        let (line, held) = Lifeline::new().unwrap();
        drop(held);
        fcntl(&line.file, libc::F_SETLEASE, libc::F_RDLCK).unwrap();
        let opened = reopen(&line.file, OFlags::RDWR);
        assert_eq!(opened.unwrap_err(), Errno::AGAIN);
        fcntl(&line.file, libc::F_SETLEASE, libc::F_UNLCK).unwrap();
        let held = reopen(&line.file, OFlags::RDWR).unwrap();
        assert!(!line.is_free());
        drop(held);
    }

    #[test]
    fn a_note_holds_the_last_text() {
        let note = Note::new().unwrap();
        assert_eq!(note.read().unwrap(), "");
        note.write("a long text").unwrap();
        note.write("short").unwrap();
        let adopted = Note::adopt(note.0.try_clone().unwrap()).unwrap();
        assert_eq!(adopted.read().unwrap(), "short");
        assert_eq!(note.write(&"x".repeat(4097)), Err(Errno::FBIG));
        assert!(Note::adopt(Lifeline::new().unwrap().1).is_err());
    }

    #[test]
    fn a_lifeline_is_free_when_no_process_holds_it() {
        let (line, held) = Lifeline::new().unwrap();
        let (sent, received) = crate::socket::pair().unwrap();
        crate::socket::send(&sent, b"x", &[held.as_fd()]).unwrap();
        drop(held);
        assert!(!line.is_free(), "it is on its way");
        let mut bytes = [0; 1];
        let mut packet = crate::socket::recv(&received, &mut bytes).unwrap();
        let held = packet.descriptors[0].take().unwrap();
        let at = share(held.as_fd(), 0, PAGE, Access::ReadWrite).unwrap();
        drop(held);
        assert!(!line.is_free(), "it is mapped");
        // SAFETY: the mapping was made above and nothing refers to it.
        unsafe { unmap(at, PAGE) }.unwrap();
        assert!(line.is_free());
    }
}
