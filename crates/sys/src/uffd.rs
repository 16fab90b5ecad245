//! userfaultfd(2): tracking writes, taking pages out of reach, putting them back.
//!
//! One descriptor serves a whole guest. It is opened with `WP_ASYNC`, so a write to a
//! write-protected page is noted in its page-table entry and goes on at once: no thread ever waits
//! for it. And `PAGEMAP_SCAN` reads the notes. `MISSING` faults are never answered one by one.
//! Ranges are registered for them only while a merge window holds their pages out. A thread that
//! touches such a page sleeps in the kernel until [`Uffd::wake`].
//!
//! Source: `fs/userfaultfd.c`, `Documentation/admin-guide/mm/userfaultfd.rst`.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};

use crate::fault::{self, Point};

const TYPE: u8 = 0xAA;
const API: Opcode = opcode::read_write::<raw::uffdio_api>(TYPE, 0x3F);
const REGISTER: Opcode = opcode::read_write::<raw::uffdio_register>(TYPE, 0);
const UNREGISTER: Opcode = opcode::read::<raw::uffdio_range>(TYPE, 1);
const WAKE: Opcode = opcode::read::<raw::uffdio_range>(TYPE, 2);
const COPY: Opcode = opcode::read_write::<raw::uffdio_copy>(TYPE, 3);
const ZEROPAGE: Opcode = opcode::read_write::<raw::uffdio_zeropage>(TYPE, 4);
const MOVE: Opcode = opcode::read_write::<raw::uffdio_move>(TYPE, 5);
const WRITEPROTECT: Opcode = opcode::read_write::<raw::uffdio_writeprotect>(TYPE, 6);

/// Takes a copy of descriptor `fd` of the thread `tid` of this process, whose table is its own.
///
/// # Errors
/// `INVAL` before Linux 6.9, `MFILE` when there is no room for it, `BADF` or `SRCH` when it is gone.
pub(crate) fn borrow(tid: u32, fd: u32) -> Result<OwnedFd> {
    const THREAD: usize = libc::O_EXCL as usize; // PIDFD_THREAD
    const F_DUPFD_CLOEXEC: usize = libc::F_DUPFD_CLOEXEC as usize;
    let owned = |number: usize| {
        let number = i32::try_from(number).map_err(|_| Errno::BADF)?;
        // SAFETY: the kernel has just handed out this descriptor; it has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    };
    if tid == crate::process::thread_id() {
        // The caller's own takes no call into another's table, which a filter may refuse. Docker's default one does.
        let args = [fd as usize, F_DUPFD_CLOEXEC, 0, 0, 0, 0];
        // SAFETY: the call takes numbers only.
        let own = unsafe { crate::raw::call(libc::SYS_fcntl, args) }.and_then(owned);
        if own.is_ok() {
            return own;
        }
    }
    let args = [tid as usize, THREAD, 0, 0, 0, 0];
    // SAFETY: both calls take numbers only.
    let thread: OwnedFd =
        unsafe { crate::raw::call(libc::SYS_pidfd_open, args) }.and_then(owned)?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&thread).cast_unsigned() as usize;
    let args = [number, fd as usize, 0, 0, 0, 0];
    // SAFETY: as above.
    unsafe { crate::raw::call(libc::SYS_pidfd_getfd, args) }.and_then(owned)
}

/// Whether [`Uffd::move_pages`] may never return where one of the pages is pinned, or otherwise referred to, and is a part of a huge
/// page. The kernel splits that first, which fails for now (`AGAIN`), and tries again without an end, until the process is killed. Linux
/// 6.12.117 does so, 6.18.44 does not. Where the release cannot be read the kernel counts as one that does.
#[must_use]
pub fn move_waits_for_pins() -> bool {
    const MENDED: (u32, u32) = (6, 18);
    let mut text = [0u8; 64];
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    // Not by uname(2): a filter of the program's may refuse that.
    let told = rustix::fs::open(c"/proc/sys/kernel/osrelease", flags, Mode::empty())
        .and_then(|file| rustix::io::pread(&file, &mut text, 0));
    let mut numbers = [0u32; 2];
    let mut at = 0;
    for byte in text {
        match (byte, numbers.get_mut(at)) {
            (b'0'..=b'9', Some(number)) => {
                *number = number
                    .saturating_mul(10)
                    .saturating_add(u32::from(byte - b'0'));
            }
            (b'.', Some(_)) => at += 1,
            _ => break,
        }
    }
    told.is_err() || (numbers[0], numbers[1]) < MENDED
}

/// The features without which nothing works here; all are in Linux 6.8.
pub const FEATURES: u64 = (raw::UFFD_FEATURE_WP_ASYNC
    | raw::UFFD_FEATURE_WP_UNPOPULATED
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_MOVE) as u64;

/// What a [`Freezer`] needs besides.
const FREEZER_FEATURES: u64 =
    (raw::UFFD_FEATURE_WP_UNPOPULATED | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM) as u64;

/// What a registered range reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Writes, asynchronously.
    Track,
    /// Writes as before; and touching an absent page sleeps until [`Uffd::wake`].
    TrackAndHold,
}

/// How far a move came, by what the kernel tells.
///
/// It may have moved more. This holds from Linux 6.18 on, until "userfaultfd: reset err to be 0 when move_pages_ptes
/// succeeded" (August 2026). A page that is locked for a moment, by a migration say, is moved all the same, with the
/// neighbours that go with it. None of them is counted: the move stops before them, with `EXIST` or `NOENT`. So a
/// caller that must not lose pages has to see that all it was not told of is back, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Bytes moved, from the start of the range.
    pub bytes: usize,
    /// Why the page at `bytes` did not move; `None` when all did.
    pub stopped: Option<Errno>,
}

/// An open userfaultfd of this process.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl Uffd {
    /// Opens the device that hands out userfaultfds; who holds it needs no capability.
    ///
    /// # Errors
    /// `NOENT` before Linux 6.1, `ACCESS` without the right to it.
    pub fn device() -> Result<OwnedFd> {
        rustix::fs::open(
            c"/dev/userfaultfd",
            OFlags::RDWR | OFlags::CLOEXEC,
            Mode::empty(),
        )
    }

    /// A userfaultfd for this process from an open device.
    ///
    /// # Errors
    /// `INVAL` when the kernel lacks one of [`FEATURES`]; what ioctl(2) gives.
    pub fn from_device(device: BorrowedFd<'_>) -> Result<Self> {
        // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and returns a new descriptor.
        let fd = unsafe { ioctl(device, New) }?;
        Self(fd).handshake(FEATURES)
    }

    /// A userfaultfd for this process: through the device where this process may open it, else
    /// by the system call.
    ///
    /// # Errors
    /// `PERM` without the right to either, `INVAL` when the kernel lacks one of [`FEATURES`].
    pub fn open() -> Result<Self> {
        if let Ok(device) = Self::device() {
            return Self::from_device(device.as_fd());
        }
        Self::from_system_call()?.handshake(FEATURES)
    }

    /// The userfaultfd that thread `tid` of this process has as descriptor `fd`.
    ///
    /// # Errors
    /// `INVAL` before Linux 6.9; `MFILE`, `BADF` or `SRCH`.
    pub fn of_thread(tid: u32, fd: u32) -> Result<Self> {
        borrow(tid, fd).map(Self)
    }

    fn from_system_call() -> Result<Self> {
        let flags = rustix::mm::UserfaultfdFlags::CLOEXEC | rustix::mm::UserfaultfdFlags::NONBLOCK;
        // SAFETY: creating a userfaultfd changes no memory.
        unsafe { rustix::mm::userfaultfd(flags) }.map(Self)
    }

    fn handshake(self, features: u64) -> Result<Self> {
        let mut api = raw::uffdio_api {
            api: raw::UFFD_API.into(),
            features,
            ioctls: 0,
        };
        // SAFETY: UFFDIO_API reads and fills the structure it is given.
        unsafe { ioctl(&self.0, Updater::<API, _>::new(&mut api)) }?;
        Ok(self)
    }

    /// The descriptor's number in the calling thread's table.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.as_raw_fd().unsigned_abs()
    }

    /// Registers `[start, start + len)` in `mode`. The kernel only ever adds to what a mapping
    /// reports: to hold no longer, [`Uffd::unregister`] first.
    ///
    /// # Errors
    /// `INVAL` for memory that cannot be tracked, `BUSY` when another userfaultfd has it,
    /// `NOMEM` when the map count is exhausted.
    pub fn register(&self, start: usize, len: usize, mode: Watch) -> Result<()> {
        fault::check(Point::Register)?;
        let bits = match mode {
            Watch::Track => raw::UFFDIO_REGISTER_MODE_WP,
            Watch::TrackAndHold => raw::UFFDIO_REGISTER_MODE_WP | raw::UFFDIO_REGISTER_MODE_MISSING,
        };
        let range = range(start, len);
        let mut register = raw::uffdio_register {
            range,
            mode: bits.into(),
            ioctls: 0,
        };
        // SAFETY: UFFDIO_REGISTER reads and fills the structure; registering loses no memory.
        unsafe { ioctl(&self.0, Updater::<REGISTER, _>::new(&mut register)) }
    }

    /// Stops tracking and holding `[start, start + len)`, forgets what was written there, and wakes
    /// who sleeps on it.
    ///
    /// # Errors
    /// `INVAL` for memory that was never registrable, `NOMEM` when the map count is exhausted.
    pub fn unregister(&self, start: usize, len: usize) -> Result<()> {
        fault::check(Point::Unregister)?;
        let mut arg = range(start, len);
        // SAFETY: UFFDIO_UNREGISTER reads a range; no memory is lost.
        unsafe { ioctl(&self.0, Updater::<UNREGISTER, _>::new(&mut arg)) }
    }

    /// Moves the pages of `[from, from + len)` to `[to, to + len)`, without waking sleepers, up
    /// to the first that will not move. `to` must be registered here and empty.
    ///
    /// The reasons a page stays: `BUSY` pinned or shared by fork; `NOENT` no page there; `AGAIN`
    /// try later; `INVAL` not anonymous memory, or unlike flags; `EXIST` `to` is not empty.
    ///
    /// # Safety
    /// The caller must be entitled to both ranges: after the call the memory at `from` is gone
    /// and the memory at `to` is what was there.
    #[must_use]
    pub unsafe fn move_pages(&self, to: usize, from: usize, len: usize) -> Moved {
        let mut moved = 0;
        while moved < len {
            let mut arg = raw::uffdio_move {
                dst: (to + moved) as u64,
                src: (from + moved) as u64,
                len: (len - moved) as u64,
                mode: 1, // UFFDIO_MOVE_MODE_DONTWAKE
                move_: 0,
            };
            // SAFETY: the structure is what UFFDIO_MOVE takes; the ranges are the caller's.
            let result = fault::check(Point::Move)
                .and_then(|()| unsafe { ioctl(&self.0, Updater::<MOVE, _>::new(&mut arg)) })
                .and_then(|()| fault::check(Point::MoveUntold).inspect_err(|_| arg.move_ = 0));
            // A move that stops half-way says AGAIN and how far it came; asking again for the
            // rest gives the true reason.
            let step = usize::try_from(arg.move_).unwrap_or(0);
            moved += step;
            match result {
                Err(reason) if step == 0 => {
                    return Moved {
                        bytes: moved,
                        stopped: Some(reason),
                    };
                }
                _ => {}
            }
        }
        Moved {
            bytes: moved,
            stopped: None,
        }
    }

    /// Maps the kernel's zero page over the empty range `[start, start + len)`, waking no thread. Gives how many bytes were
    /// filled from the start on, and why no more: `EXIST` where a page is, `AGAIN` while mappings change. Unlike MOVE's the
    /// number is exact (`mfill_atomic()` in mm/userfaultfd.c).
    ///
    /// # Safety
    /// The caller must be entitled to fill the range.
    pub unsafe fn zero(&self, start: usize, len: usize) -> (usize, Result<()>) {
        if let Err(errno) = fault::check(Point::Zero) {
            return (0, Err(errno));
        }
        let mut arg = raw::uffdio_zeropage {
            range: range(start, len),
            mode: raw::UFFDIO_ZEROPAGE_MODE_DONTWAKE.into(),
            zeropage: 0,
        };
        // SAFETY: the structure is what UFFDIO_ZEROPAGE takes; the range is the caller's.
        let filled = unsafe { ioctl(&self.0, Updater::<ZEROPAGE, _>::new(&mut arg)) };
        // A negative number is an error's.
        let bytes = usize::try_from(arg.zeropage).unwrap_or(0);
        (bytes.min(len), filled)
    }

    /// Fills the empty page at `to` with a copy of the page at `from`, waking no thread.
    ///
    /// # Errors
    /// As [`Uffd::zero`].
    ///
    /// # Safety
    /// `from` must be a readable page, and the caller entitled to fill `to`.
    pub unsafe fn copy_page(&self, to: usize, from: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_pages(to, from, 4096) }
    }

    /// Fills the empty pages of `[to, to + len)` with copies of those from `from` on, waking no thread. Over a private mapping
    /// of a file the copies are private, and the file is not touched.
    ///
    /// # Errors
    /// As [`Uffd::zero`], though `AGAIN` only after several attempts; some pages may be filled then.
    ///
    /// # Safety
    /// The pages from `from` on must be readable, and the caller entitled to fill those from `to` on.
    pub unsafe fn copy_pages(&self, to: usize, from: usize, len: usize) -> Result<()> {
        const PATIENCE: usize = 16;
        let (mut copied, mut tries) = (0, 0);
        while copied < len {
            fault::check(Point::Copy)?;
            let mut arg = raw::uffdio_copy {
                dst: (to + copied) as u64,
                src: (from + copied) as u64,
                len: (len - copied) as u64,
                mode: raw::UFFDIO_COPY_MODE_DONTWAKE.into(),
                copy: 0,
            };
            // SAFETY: the structure is what UFFDIO_COPY takes; the pages are the caller's.
            let result = unsafe { ioctl(&self.0, Updater::<COPY, _>::new(&mut arg)) };
            // A copy that stops half-way says AGAIN and how far it came.
            match (result, usize::try_from(arg.copy)) {
                (_, Ok(step)) if step > 0 => copied += step,
                (Err(Errno::AGAIN), _) if tries < PATIENCE => tries += 1,
                (Err(errno), _) => return Err(errno),
                (Ok(()), _) => return Err(Errno::AGAIN),
            }
        }
        Ok(())
    }

    /// Wakes every thread that sleeps on a page of `[start, start + len)`.
    ///
    /// # Errors
    /// `INVAL` for a range that is not made of pages.
    pub fn wake(&self, start: usize, len: usize) -> Result<()> {
        let mut arg = range(start, len);
        // SAFETY: UFFDIO_WAKE reads a range; waking changes no memory.
        unsafe { ioctl(&self.0, Updater::<WAKE, _>::new(&mut arg)) }
    }
}

/// A second userfaultfd, whose write faults sleep: `WP_ASYNC` holds for a whole userfaultfd, and a
/// mapping has one.
///
/// [`Freezer::freeze`] keeps every thread, vCPU and system call from writing a range that stays
/// where it is and can be read. It does not hold back who pinned a page before.
#[derive(Debug)]
pub struct Freezer(Uffd);

impl Freezer {
    /// A freezer for this process: from an open device, else as [`Uffd::open`].
    ///
    /// # Errors
    /// As [`Uffd::from_device`] and [`Uffd::open`].
    pub fn open(device: Option<BorrowedFd<'_>>) -> Result<Self> {
        let own = Uffd::device().ok();
        let uffd = match device.or(own.as_ref().map(AsFd::as_fd)) {
            // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and returns a new descriptor.
            Some(device) => Uffd(unsafe { ioctl(device, New) }?),
            None => Uffd::from_system_call()?,
        };
        uffd.handshake(FREEZER_FEATURES).map(Self)
    }

    /// The freezer that thread `tid` of this process has as descriptor `fd`.
    ///
    /// # Errors
    /// As [`Uffd::of_thread`].
    pub fn of_thread(tid: u32, fd: u32) -> Result<Self> {
        Uffd::of_thread(tid, fd).map(Self)
    }

    /// From here, who writes to `[start, start + len)` sleeps. The range must have no other
    /// userfaultfd.
    ///
    /// # Errors
    /// As [`Uffd::register`]; some of it may be frozen then: [`Freezer::thaw`] it.
    pub fn freeze(&self, start: usize, len: usize) -> Result<()> {
        self.0.register(start, len, Watch::Track)?;
        let mut arg = raw::uffdio_writeprotect {
            range: range(start, len),
            mode: 1, // UFFDIO_WRITEPROTECT_MODE_WP
        };
        // SAFETY: the structure is what UFFDIO_WRITEPROTECT takes; no memory is lost.
        fault::check(Point::Freeze)
            .and_then(|()| unsafe { ioctl(&self.0.0, Updater::<WRITEPROTECT, _>::new(&mut arg)) })
    }

    /// Lets `[start, start + len)` be written again and wakes who slept on it.
    ///
    /// # Errors
    /// As [`Uffd::unregister`].
    pub fn thaw(&self, start: usize, len: usize) -> Result<()> {
        self.0.unregister(start, len)
    }

    /// Wakes who slept on `[start, start + len)`, after something else was mapped there.
    ///
    /// # Errors
    /// As [`Uffd::wake`].
    pub fn wake(&self, start: usize, len: usize) -> Result<()> {
        self.0.wake(start, len)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for Freezer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Fills the absent page at `home`, in the memory that `uffd` belongs to, with `page` of this process.
pub(crate) fn fill(uffd: BorrowedFd<'_>, home: u64, page: &[u8; 4096]) -> Result<()> {
    let mut arg = raw::uffdio_copy {
        dst: home,
        src: page.as_ptr().expose_provenance() as u64,
        len: page.len() as u64,
        mode: 0,
        copy: 0,
    };
    // SAFETY: the structure is what UFFDIO_COPY takes. It reads `page`, and writes no memory of this process unless
    // `uffd` is its own.
    unsafe { ioctl(uffd, Updater::<COPY, _>::new(&mut arg)) }
}

fn range(start: usize, len: usize) -> raw::uffdio_range {
    raw::uffdio_range {
        start: start as u64,
        len: len as u64,
    }
}

/// `USERFAULTFD_IOC_NEW`: flags by value in, a descriptor out.
struct New;

// SAFETY: the opcode takes an integer (O_CLOEXEC | O_NONBLOCK), not a pointer, writes no memory,
// and returns a descriptor that has no other owner.
unsafe impl Ioctl for New {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(TYPE, 0)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::without_provenance_mut((OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as usize)
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> Result<OwnedFd> {
        // SAFETY: the call succeeded, so `out` is a fresh descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}
