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

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fchmod, fcntl_add_seals,
    ftruncate, memfd_create, open,
};
use rustix::io::{Errno, Result};

use crate::fault::{self, Point};
use crate::mapping::{Access, share, unmap};
use crate::mempolicy::{self, Existing, NodeMask, mbind};

const PAGE: usize = 4096;
const PAGE_BYTES: u64 = PAGE as u64;
/// The most buffers one pwritev(2) takes.
const MAX_BUFFERS: usize = 1024;

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
        rustix::io::pread(&self.0, page.as_mut_slice(), index * PAGE_BYTES).map(drop)
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

fn reopen(file: &OwnedFd, access: OFlags) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(path, access | OFlags::CLOEXEC, Mode::empty())
}

/// A page whose only purpose is to be mapped.
#[derive(Debug)]
pub struct Lifeline(OwnedFd);

impl Lifeline {
    /// A lifeline nobody maps yet.
    ///
    /// # Errors
    /// What memfd_create(2) and ftruncate(2) give.
    pub fn new() -> Result<Self> {
        let file = create("pageone-lifeline", Mode::RUSR | Mode::WUSR)?;
        ftruncate(&file, PAGE_BYTES)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Self(file))
    }

    /// Whether no process maps it. Once it was free it can never be mapped writable again.
    #[must_use]
    pub fn is_free(&self) -> bool {
        fcntl_add_seals(&self.0, SealFlags::WRITE).is_ok()
    }

    /// The descriptor to hand to a guest.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
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
