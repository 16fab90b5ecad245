//! Memory files: stores of canonical pages, and lifelines.
//!
//! A [`Store`] is written by its owner alone: others get a descriptor opened read-only, and mode
//! 0400 keeps them from opening it again for writing. It can grow but never shrink, so a page
//! once mapped never raises SIGBUS.
//!
//! A [`Lifeline`] tells whether any process still maps it. Who maps it shared and writable keeps
//! the kernel from sealing it against writing; fork inherits the mapping, exec and exit drop it. So
//! `F_ADD_SEALS` fails with EBUSY exactly as long as one descendant is left that could have
//! inherited what else was mapped at that time.
//!
//! A [`Note`] is a page of text for a successor.
//!
//! All three can be had back from a descriptor that a former process made ([`Store::adopt`],
//! [`Lifeline::adopt`], [`Note::adopt`]). What was given to nobody but keepers is taken at its word; what
//! guests had in their hands is looked at: one that holds a lifeline's descriptor may seal it.

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use std::sync::OnceLock;

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, fallocate, fchmod,
    fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create, open,
};
use rustix::io::{Errno, Result};

use crate::fault::{self, Point};
use crate::mapping::{Access, PAGE, share, unmap};
use crate::mempolicy::{self, Existing, NodeMask, mbind};

const PAGE_BYTES: u64 = PAGE as u64;
/// The most buffers one pwritev(2) takes.
const MAX_BUFFERS: usize = 1024;

/// A memory file's number: no two that exist have the same.
///
/// # Errors
/// What fstat(2) gives.
pub fn number(file: impl AsFd) -> Result<u64> {
    Ok(rustix::fs::fstat(file)?.st_ino)
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
    /// It cannot be written.
    #[error("it cannot be written")]
    ReadOnly,
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
    wanted: Option<SealFlags>,
) -> std::result::Result<(), AdoptError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let found = rustix::fs::readlink(path, Vec::new())?;
    let found = found.to_string_lossy();
    if found.strip_suffix(" (deleted)") != Some(&format!("/memfd:{name}")) {
        let (wanted, found) = (name.to_owned(), found.into_owned());
        return Err(AdoptError::Other { wanted, found });
    }
    if rustix::fs::fcntl_getfl(file)? & OFlags::ACCMODE != OFlags::RDWR {
        return Err(AdoptError::ReadOnly);
    }
    match (seals(file)?, wanted) {
        (found, Some(wanted)) if found != wanted => Err(AdoptError::Seals {
            wanted: wanted.bits(),
            found: found.bits(),
        }),
        _ => Ok(()),
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
        check(&file, name, Some(SealFlags::SHRINK))?;
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

    /// Reads the pages from `first` on; those behind the end are left as they are.
    ///
    /// # Errors
    /// What pread(2) gives.
    pub fn read_pages(&self, first: u64, pages: &mut [[u8; PAGE]]) -> Result<()> {
        let (mut rest, mut at) = (pages.as_flattened_mut(), first * PAGE_BYTES);
        while !rest.is_empty() {
            let read = read_at(&self.0, at, rest)?;
            if read == 0 {
                return Ok(());
            }
            at += read as u64;
            rest = rest.get_mut(read..).unwrap_or_default();
        }
        Ok(())
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
    /// What pread(2) gives.
    pub fn read(&self, index: u64, page: &mut [u8; PAGE]) -> Result<()> {
        read_at(&self.0, index * PAGE_BYTES, page).map(drop)
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
    /// another one only when that is full. The wish belongs to the file: it holds for whoever
    /// fills a page, also when it comes back from swap.
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

impl AsFd for Store {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn reopen(file: &OwnedFd, access: OFlags) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(path, access | OFlags::CLOEXEC, Mode::empty())
}

const LIFELINE: &str = "pageone-lifeline";
const LIFELINE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A page whose only purpose is to be mapped.
#[derive(Debug)]
pub struct Lifeline(OwnedFd);

impl Lifeline {
    /// A lifeline nobody maps yet.
    ///
    /// # Errors
    /// What memfd_create(2) and ftruncate(2) give.
    pub fn new() -> Result<Self> {
        let file = create(LIFELINE, Mode::RUSR | Mode::WUSR)?;
        ftruncate(&file, PAGE_BYTES)?;
        fcntl_add_seals(&file, LIFELINE_SEALS)?;
        Ok(Self(file))
    }

    /// The lifeline of a former process.
    ///
    /// # Errors
    /// [`AdoptError`] tells what the descriptor is instead. Its seals may be any: guests set them too.
    pub fn adopt(file: OwnedFd) -> std::result::Result<Self, AdoptError> {
        check(&file, LIFELINE, None)?;
        Ok(Self(file))
    }

    /// Whether a guest sealed it such that it can never tell whether it is free.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let lost =
            |found: SealFlags| found.contains(SealFlags::SEAL) && !found.contains(SealFlags::WRITE);
        seals(&self.0).is_ok_and(lost)
    }

    /// Whether a guest sealed it: then it may never tell whether it is free, or cannot be mapped by
    /// the next guest.
    #[must_use]
    pub fn is_tampered(&self) -> bool {
        seals(&self.0).is_ok_and(|found| found != LIFELINE_SEALS)
    }

    /// Whether no process maps it. Once it was free it can never be mapped writable again.
    #[must_use]
    pub fn is_free(&self) -> bool {
        if fault::check(Point::Seal).is_err() {
            return false; // whatever keeps it from telling
        }
        let sealed = |found: SealFlags| found.contains(SealFlags::WRITE);
        fcntl_add_seals(&self.0, SealFlags::WRITE).is_ok() || seals(&self.0).is_ok_and(sealed)
    }

    /// The descriptor to hand to a guest.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// A descriptor to hand to a guest later.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    pub fn share(&self) -> std::io::Result<OwnedFd> {
        fault::check(Point::Duplicate)?;
        self.0.try_clone()
    }
}

/// A page of text, for whoever comes after this process.
#[derive(Debug)]
pub struct Note(OwnedFd);

const NOTE: &str = "pageone-note";

impl Note {
    /// An empty page.
    ///
    /// # Errors
    /// What memfd_create(2) and ftruncate(2) give.
    pub fn new() -> Result<Self> {
        let file = create(NOTE, Mode::RUSR | Mode::WUSR)?;
        ftruncate(&file, PAGE_BYTES)?;
        fcntl_add_seals(&file, LIFELINE_SEALS)?;
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
        check(&file, NOTE, Some(LIFELINE_SEALS))?;
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
            }
        }
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
        assert!(Store::adopt(store.share().unwrap(), "pageone-test").is_err());
        fcntl_add_seals(copy(), SealFlags::GROW).unwrap();
        let error = Store::adopt(copy(), "pageone-test").unwrap_err();
        assert!(matches!(error, AdoptError::Seals { .. }), "{error}");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Store::adopt(file.into(), "pageone-test").is_err());
    }

    #[test]
    fn a_tampered_lifeline_is_seen() {
        let line = Lifeline::new().unwrap();
        let copy = || line.0.try_clone().unwrap();
        assert!(!line.is_tampered() && Lifeline::adopt(copy()).is_ok());
        fcntl_add_seals(copy(), SealFlags::SEAL).unwrap();
        let adopted = Lifeline::adopt(copy()).unwrap();
        assert!(adopted.is_tampered() && adopted.is_lost() && !adopted.is_free());
        let free = Lifeline::new().unwrap();
        assert!(free.is_free() && free.is_tampered() && !free.is_lost());
        fcntl_add_seals(&free.0, SealFlags::SEAL).unwrap();
        assert!(
            Lifeline::adopt(free.0).unwrap().is_free(),
            "as it was found before"
        );
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
        assert!(Note::adopt(Lifeline::new().unwrap().0).is_err());
    }

    #[test]
    fn a_lifeline_is_free_when_nobody_maps_it() {
        let line = Lifeline::new().unwrap();
        let at = share(line.as_fd(), 0, 4096, Access::ReadWrite).unwrap();
        assert!(!line.is_free());
        // SAFETY: the mapping was made two lines above and nothing refers to it.
        unsafe { unmap(at, 4096) }.unwrap();
        assert!(line.is_free());
        assert!(share(line.as_fd(), 0, 4096, Access::ReadWrite).is_err());
    }
}
