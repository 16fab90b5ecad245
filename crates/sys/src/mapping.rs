//! Mappings of this process: the calls that put memory in place, and the raw ones behind hooks.
//!
//! Nothing here allocates or sets `errno`.

use std::ffi::CStr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::PAGE;
use crate::apart::{self, Use, map_apart};
use crate::fault::{self, Point};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, MlockFlags, MprotectFlags, MremapFlags, ProtFlags};

/// What a mapping allows. Writing implies reading, as on x86-64; so does executing, but where the processor has protection keys: the
/// kernel gives memory that may be executed only a key that is closed to all threads. Pages are merged only where they are not executable,
/// but their guest may make them so afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Nothing.
    #[default]
    None,
    /// Reads.
    Read,
    /// Reads and writes.
    ReadWrite,
    /// Executes.
    Execute,
    /// Reads and executes.
    ReadExecute,
    /// All.
    All,
}

impl Access {
    /// As mmap(2) wants it.
    #[must_use]
    pub fn prot(self) -> ProtFlags {
        match self {
            Self::None => ProtFlags::empty(),
            Self::Read => ProtFlags::READ,
            Self::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
            Self::Execute => ProtFlags::EXEC,
            Self::ReadExecute => ProtFlags::READ | ProtFlags::EXEC,
            Self::All => ProtFlags::READ | ProtFlags::WRITE | ProtFlags::EXEC,
        }
    }

    fn mprotect(self) -> MprotectFlags {
        MprotectFlags::from_bits_retain(self.prot().bits())
    }
}

/// What `madvise` and `mlock` told the kernel of a range: what a new mapping there must be told
/// again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// `MADV_DONTFORK`.
    pub dontfork: bool,
    /// `MADV_DONTDUMP`.
    pub dontdump: bool,
    /// `mlock`, in any of its forms.
    pub locked: bool,
    /// With `MLOCK_ONFAULT`: pages come as they are touched.
    pub on_fault: bool,
    /// `MAP_NORESERVE`.
    pub noreserve: bool,
    /// `MADV_HUGEPAGE`.
    pub huge: bool,
    /// `MADV_NOHUGEPAGE`.
    pub nohuge: bool,
    /// `MADV_SEQUENTIAL` or `MADV_RANDOM`.
    pub order: Order,
    /// mbind(2).
    pub policy: Policy,
}

/// The order in which the program says that it reads a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// It says nothing.
    #[default]
    Normal,
    /// `MADV_SEQUENTIAL`.
    Sequential,
    /// `MADV_RANDOM`.
    Random,
}

impl Order {
    const fn advice(self) -> Option<i32> {
        match self {
            Self::Normal => None,
            Self::Sequential => Some(libc::MADV_SEQUENTIAL),
            Self::Random => Some(libc::MADV_RANDOM),
        }
    }
}

/// On which of the first 64 nodes the pages of a range come to lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// `MPOL_DEFAULT` and so on, with the flags of the mode.
    mode: u32,
    nodes: u64,
}

impl Policy {
    /// As get_mempolicy(2) takes and fills them: 1024 nodes, the most a kernel can have.
    const WORDS: usize = 16;

    /// No policy of the range's own.
    pub const DEFAULT: Self = Self { mode: 0, nodes: 0 };

    /// The policy of the mapping at `address`, without allocating.
    ///
    /// # Errors
    /// `FAULT` where nothing is mapped, `RANGE` for one with more than 64 nodes.
    pub fn at(address: usize) -> Result<Self> {
        const AT_ADDRESS: usize = 2; // MPOL_F_ADDR
        let (mut mode, mut nodes) = (0i32, [0u64; Self::WORDS]);
        let (to, mask) = (
            (&raw mut mode).expose_provenance(),
            nodes.as_mut_ptr().expose_provenance(),
        );
        let args = [to, mask, Self::WORDS * 64, address, AT_ADDRESS, 0];
        // SAFETY: the kernel writes an int, and at most so many bits.
        match unsafe { crate::raw::call(libc::SYS_get_mempolicy, args) } {
            // A kernel without nodes, or a filter by which the program can give none either.
            Err(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => return Ok(Self::default()),
            other => other?,
        };
        let [nodes, rest @ ..] = nodes;
        if rest.iter().any(|&word| word != 0) {
            return Err(Errno::RANGE);
        }
        let mode = mode.cast_unsigned();
        Ok(Self { mode, nodes })
    }

    /// Gives the policy to a mapping.
    ///
    /// # Errors
    /// What mbind(2) gives.
    fn set(self, start: usize, len: usize) -> Result<()> {
        if self == Self::DEFAULT {
            return Ok(());
        }
        let mask = (&raw const self.nodes).expose_provenance();
        let args = [start, len, self.mode as usize, mask, 65, 0];
        // SAFETY: the kernel reads 64 bits of the mask; pages that are there stay.
        unsafe { crate::raw::call(libc::SYS_mbind, args) }.map(drop)
    }
}

/// What is mapped.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Zero-filled memory.
    Anonymous,
    /// A private view of a store, from this byte offset on.
    Store(BorrowedFd<'a>, u64),
}

/// Maps `source` over `[start, start + len)`, replacing what is there in one step, with `access`
/// and `attributes`. `lock_future` says that the process locks new mappings (`MCL_FUTURE`).
///
/// # Errors
/// `NOMEM` when the map count or the locked-memory limit is exhausted. The second part of the
/// result tells whether the range was replaced nevertheless, though not all attributes fit.
///
/// # Safety
/// The caller must own the range: whatever is there is lost.
pub unsafe fn replace(
    start: usize,
    len: usize,
    source: Source<'_>,
    access: Access,
    attributes: Attributes,
    lock_future: bool,
) -> std::result::Result<(), (Errno, bool)> {
    let locks = attributes.locked || lock_future;
    if locks || attributes.dontdump || is_counted(source, access) {
        // SAFETY: the caller's promise.
        let placed = unsafe { replace_from_aside(start, len, source, access, attributes, locks) };
        // At a limit of address space there is no room aside. What is locked has no other way.
        if locks || placed != Err((Errno::NOMEM, false)) {
            return placed;
        }
    }
    // SAFETY: the range is the caller's.
    unsafe { replace_at_once(start, len, source, access, attributes) }.map_err(|errno| {
        let replaced = fill_gap(start, len, source, access, attributes, false);
        (errno, replaced)
    })?;
    // SAFETY: the range is now the mapping just made.
    unsafe { describe(start, len, source, attributes) }.map_err(|errno| (errno, true))
}

/// Whether the kernel promises no more memory than there is (`vm.overcommit_memory=2`).
static COUNTS_STRICTLY: AtomicBool = AtomicBool::new(false);

/// Finds out whether the kernel promises no more memory than there is, and notes it. Without allocating.
pub fn find_strict_counting() {
    COUNTS_STRICTLY.store(
        number_of(c"/proc/sys/vm/overcommit_memory") == Ok(2),
        Ordering::Relaxed,
    );
}

/// Whether memory has to be counted as promised, though it may not be written now: it could be, and the kernel goes on to count it then
/// (`VM_ACCOUNT`). So it may be made writable again, whatever others have taken. Such memory has an `anon_vma` of its own, and no neighbour
/// joins it; where nothing is refused for want of the count, that matters more. Of what may be executed the count cannot be kept:
/// no such right may come later under PR_SET_MDWE.
fn is_counted(source: Source<'_>, access: Access) -> bool {
    let may_lose =
        || matches!(source, Source::Anonymous) && matches!(access, Access::None | Access::Read);
    COUNTS_STRICTLY.load(Ordering::Relaxed) && may_lose()
}

/// Maps `source` in the place of what is there.
///
/// # Errors
/// As mmap(2). Then what was there may be gone: from Linux 6.12 on the kernel says so of a mapping for which it finds no memory.
///
/// # Safety
/// As [`replace`].
unsafe fn replace_at_once(
    start: usize,
    len: usize,
    source: Source<'_>,
    access: Access,
    attributes: Attributes,
) -> Result<()> {
    #[cfg(debug_assertions)]
    if let Err(errno) = fault::check(Point::ReplaceHalf) {
        // SAFETY: whatever is at `start` is lost, by contract.
        unsafe { unmap(start, len) }?;
        return Err(errno);
    }
    let flags = flags(attributes) | MapFlags::FIXED;
    // SAFETY: the caller's promise; MAP_FIXED replaces the range in one step.
    unsafe { map(pointer(start), len, source, access.prot(), flags) }.map(drop)
}

/// Replaces by way of a mapping made aside, which other threads never see unfinished. Nor does a core dump: one that begins before the
/// kernel is told so would hold what is not to be dumped. That costs some microseconds.
///
/// # Errors
/// As [`replace`].
///
/// # Safety
/// As [`replace`].
unsafe fn replace_from_aside(
    start: usize,
    len: usize,
    source: Source<'_>,
    access: Access,
    attributes: Attributes,
    locks: bool,
) -> std::result::Result<(), (Errno, bool)> {
    let made = aside(len, source, access, attributes, locks).map_err(|errno| (errno, false))?;
    // SAFETY: the range to replace is the caller's, the other was just made.
    unsafe { place(made, start, len) }.map_err(|errno| {
        // SAFETY: the mapping was made here and is still aside.
        let _ = unsafe { unmap(made, len) };
        let replaced = fill_gap(start, len, source, access, attributes, locks);
        (errno, replaced)
    })
}

/// Where the kernel unmapped what was there before it failed to replace it: maps `source` there after all. Tells whether it did.
fn fill_gap(
    start: usize,
    len: usize,
    source: Source<'_>,
    access: Access,
    attributes: Attributes,
    locks: bool,
) -> bool {
    let mended = mend(start, len, source, attributes, locks);
    // SAFETY: the range is the mapping just made, if one was.
    let filled = mended.and_then(|()| unsafe { protect(start, len, access) });
    filled.is_ok()
}

/// Maps `source` at a place apart (`sys::apart`), with `access` and `attributes`, to be finished
/// there and then [`place`]d. `locks` says that `attributes.locked` is to be set or cleared.
///
/// A mapping that is locked while it may be written would be filled by write faults at once, and
/// every page of it would be private. So it is made without access, locked on fault, and made
/// accessible then.
///
/// # Errors
/// `NOMEM` when the map count, or the locked-memory limit, is exhausted.
pub fn aside(
    len: usize,
    source: Source<'_>,
    access: Access,
    attributes: Attributes,
    locks: bool,
) -> Result<usize> {
    let flags = flags(attributes);
    let is_counted = is_counted(source, access);
    let first = if is_counted {
        Access::ReadWrite
    } else {
        access
    };
    let prot = match locks {
        true => ProtFlags::empty(),
        false => first.prot(),
    };
    // SAFETY: a fresh mapping where nothing is disturbs nothing.
    let fresh = |at| unsafe { map(at, len, source, prot, flags) };
    let made = map_apart(Use::Passing, len, fresh)?;
    let start = made.expose_provenance();
    // SAFETY: all is about the mapping just made.
    let done = unsafe {
        let locked = match (locks, attributes.locked) {
            (false, _) => Ok(()),
            (true, true) => rustix::mm::mlock_with(made, len, MlockFlags::ONFAULT),
            (true, false) => rustix::mm::munlock(made, len),
        };
        locked
            .and_then(|()| describe(start, len, source, attributes))
            .and_then(|()| match locks {
                true => rustix::mm::mprotect(made, len, first.mprotect()),
                false => Ok(()),
            })
            .and_then(|()| match is_counted {
                true => {
                    be_counted(start, len);
                    rustix::mm::mprotect(made, len, access.mprotect())
                }
                false => Ok(()),
            })
    };
    match done {
        Ok(()) => Ok(start),
        Err(errno) => {
            // SAFETY: the mapping was made here.
            let _ = unsafe { unmap(start, len) };
            Err(errno)
        }
    }
}

/// Has a new mapping, which may be written, counted for good. The kernel ends that with the right to write, if no page ever was there.
///
/// # Safety
/// The mapping must be the caller's, and empty.
unsafe fn be_counted(start: usize, len: usize) {
    const DONTNEED_LOCKED: i32 = 24;
    const POPULATE_WRITE: i32 = 23;
    // Without memory for a page it is counted no more.
    // SAFETY: a page of zeros comes and goes.
    unsafe {
        let _ = advise(start, PAGE, POPULATE_WRITE);
        // The page may be a huge one.
        let _ = advise(start, len, DONTNEED_LOCKED);
    }
}

/// Moves the mapping of `[from, from + len)` to `start`, replacing what is there in one step, with the private
/// pages it has. It is registered with no userfaultfd there.
///
/// # Errors
/// `NOMEM` when the map count is exhausted, or memory. Then what was at `start` may be gone: see [`mend`].
///
/// # Safety
/// The caller must own both ranges: whatever is at `start` is lost.
pub unsafe fn place(from: usize, start: usize, len: usize) -> Result<()> {
    fault::check(Point::Place)?;
    #[cfg(debug_assertions)]
    if let Err(errno) = fault::check(Point::PlaceHalf) {
        // As the kernel fails when it has unmapped the target and finds no memory for the rest.
        // SAFETY: whatever is at `start` is lost, by contract.
        unsafe { unmap(start, len) }?;
        return Err(errno);
    }
    let how = MremapFlags::MAYMOVE;
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mremap_fixed(pointer(from), len, len, how, pointer(start)) }.map(drop)
}

/// Makes a mapping of `len` bytes at `start` `new_len` bytes long where it lies, with all that the kernel knows of it. Only in places
/// of our own: elsewhere it might take what the program has just left free, to map it anew.
///
/// # Errors
/// `NOMEM` where something lies behind it, at a limit, without memory, or in no place of ours; `AGAIN` where no more may be locked. It is
/// as it was then.
///
/// # Safety
/// The mapping must be the caller's.
pub unsafe fn grow(start: usize, len: usize, new_len: usize) -> Result<()> {
    fault::check(Point::Grow)?;
    if !apart::is_ours(start, new_len) {
        return Err(Errno::NOMEM);
    }
    let how = MremapFlags::empty();
    // SAFETY: the caller's promise; nothing is replaced.
    unsafe { rustix::mm::mremap(pointer(start), len, new_len, how) }.map(drop)
}

/// Maps `source` without access over `[start, start + len)` where nothing is mapped, after [`place`] or mmap(2) failed, with
/// what of `attributes` fits. The caller makes it accessible when it is as it has to be.
///
/// # Errors
/// `EXIST` when something is there; `NOMEM` when the map count is exhausted.
pub fn mend(
    start: usize,
    len: usize,
    source: Source<'_>,
    attributes: Attributes,
    locks: bool,
) -> Result<()> {
    let flags = flags(attributes) | MapFlags::FIXED_NOREPLACE;
    // SAFETY: only a place that is free is mapped, and what is told is about the mapping just made.
    unsafe {
        map(pointer(start), len, source, ProtFlags::empty(), flags)?;
        let _ = describe(start, len, source, attributes);
        if locks {
            let _ = set_locked(start, len, attributes.locked);
        }
    }
    Ok(())
}

fn flags(attributes: Attributes) -> MapFlags {
    if attributes.noreserve {
        MapFlags::PRIVATE | MapFlags::NORESERVE
    } else {
        MapFlags::PRIVATE
    }
}

/// # Safety
/// As mmap(2): with `MAP_FIXED` what is there is lost.
unsafe fn map(
    at: *mut std::ffi::c_void,
    len: usize,
    source: Source<'_>,
    prot: ProtFlags,
    flags: MapFlags,
) -> Result<*mut std::ffi::c_void> {
    fault::check(Point::Replace)?;
    // SAFETY: the caller's promise.
    unsafe {
        match source {
            Source::Anonymous => rustix::mm::mmap_anonymous(at, len, prot, flags),
            Source::Store(store, offset) => rustix::mm::mmap(at, len, prot, flags, store, offset),
        }
    }
}

/// Tells the kernel what `madvise` told it of the range before.
///
/// # Safety
/// The range must be a mapping that the caller just made.
unsafe fn describe(
    start: usize,
    len: usize,
    source: Source<'_>,
    attributes: Attributes,
) -> Result<()> {
    fault::check(Point::Describe)?;
    if attributes.dontfork {
        // SAFETY: changes what fork does with the range, not its content.
        unsafe { advise(start, len, libc::MADV_DONTFORK) }?;
    }
    if attributes.dontdump {
        // SAFETY: as above, for core dumps.
        unsafe { advise(start, len, libc::MADV_DONTDUMP) }?;
    }
    if let Some(advice) = attributes.order.advice() {
        // SAFETY: as above, for the kernel's guess of the pages to come.
        unsafe { advise(start, len, advice) }?;
    }
    // The policy of a private mapping of a file would be the file's.
    if matches!(source, Source::Anonymous) {
        // SAFETY: as above, for huge pages.
        unsafe { describe_size(start, len, attributes) };
        attributes.policy.set(start, len)?;
    }
    Ok(())
}

/// Keeps a range out of fork children, and out of core dumps: it holds for a moment what the program may have excluded from both.
///
/// # Errors
/// As madvise(2).
///
/// # Safety
/// The range must be the caller's.
pub unsafe fn keep_apart(start: usize, len: usize) -> Result<()> {
    // SAFETY: no content changes.
    unsafe {
        advise(start, len, libc::MADV_DONTFORK)?;
        advise(start, len, libc::MADV_DONTDUMP)
    }
}

/// Tells the kernel what of `attributes` is about huge pages.
///
/// # Safety
/// The range must be the caller's.
pub unsafe fn describe_size(start: usize, len: usize, attributes: Attributes) {
    let advice = match (attributes.huge, attributes.nohuge) {
        (false, false) => return,
        (true, _) => libc::MADV_HUGEPAGE,
        (false, true) => libc::MADV_NOHUGEPAGE,
    };
    // A kernel built without huge pages refuses; nothing is lost then.
    // SAFETY: changes how the range is backed, not its content.
    let _ = unsafe { advise(start, len, advice) };
}

/// Whether the process locks all future mappings (`MCL_FUTURE`).
static LOCKS_FUTURE: AtomicBool = AtomicBool::new(false);

/// Notes whether the process locks all future mappings.
pub fn set_locks_future(on: bool) {
    LOCKS_FUTURE.store(on, Ordering::Relaxed);
}

/// Whether the process locks all future mappings, as far as that was noted.
#[must_use]
pub fn locks_future() -> bool {
    LOCKS_FUTURE.load(Ordering::Relaxed)
}

/// Finds out whether the process locks all future mappings, and notes it: for code that has not seen the process's calls.
///
/// # Errors
/// `NOMEM` when the address space or the map count is exhausted.
pub fn find_locks_future() -> Result<()> {
    let locks = match zeros(std::ptr::null_mut(), PAGE, true) {
        // Nothing more may be locked.
        Err(Errno::AGAIN) => true,
        made => {
            let start = made?.expose_provenance();
            // SAFETY: the page was just made, and nothing is in it. What is locked cannot be discarded.
            let discarded = unsafe { advise(start, PAGE, libc::MADV_DONTNEED) };
            // SAFETY: as above.
            unsafe { unmap(start, PAGE) }?;
            discarded == Err(Errno::INVAL)
        }
    };
    set_locks_future(locks);
    Ok(())
}

/// A new private area of zeros of `len` bytes, rounded up to whole pages, that costs nothing until touched. It is
/// PageONE's own, lies apart from the program's memory (`sys::apart`), and is marked so ([`mark_own`]). Where a process
/// locks all that it maps, the area counts as locked for a moment only.
///
/// # Errors
/// `NOMEM` when the address space or the map count is exhausted.
pub fn area(len: usize) -> Result<usize> {
    let len = len.checked_next_multiple_of(PAGE).ok_or(Errno::NOMEM)?;
    let locks = locks_future();
    let start = map_apart(Use::Area, len, |at| zeros(at, len, locks))?;
    own(start, len, locks)
}

/// The same at a place of the kernel's choice: near libraries that were just mapped. For what is made before the program runs.
///
/// # Errors
/// As [`area`].
pub(crate) fn area_near_libraries(len: usize) -> Result<usize> {
    let start = zeros(std::ptr::null_mut(), len, false)?;
    own(start, len, false)
}

/// With `locks` without access: what is locked is not filled then.
fn zeros(at: *mut std::ffi::c_void, len: usize, locks: bool) -> Result<*mut std::ffi::c_void> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let prot = match locks {
        true => ProtFlags::empty(),
        false => ProtFlags::READ | ProtFlags::WRITE,
    };
    // SAFETY: a fresh mapping where nothing is disturbs nothing.
    unsafe { rustix::mm::mmap_anonymous(at, len, prot, flags) }
}

fn own(start: *mut std::ffi::c_void, len: usize, locks: bool) -> Result<usize> {
    // SAFETY: the area was just made.
    unsafe {
        mark_own(start.expose_provenance(), len)?;
        if locks {
            rustix::mm::munlock(start, len)?;
            rustix::mm::mprotect(start, len, Access::ReadWrite.mprotect())?;
        }
    }
    Ok(start.expose_provenance())
}

/// Marks memory as PageONE's own: what has advice on how it is read is never merged, and where there is no file such
/// advice means nothing.
///
/// # Errors
/// `NOMEM` when some of it is not mapped, or the map count is exhausted.
///
/// # Safety
/// The memory must be the caller's.
pub unsafe fn mark_own(start: usize, len: usize) -> Result<()> {
    let args = [start, len, libc::MADV_RANDOM as usize, 0, 0, 0];
    // SAFETY: advice on how memory is read changes no content; the caller's promise.
    unsafe { crate::raw::call(libc::SYS_madvise, args) }.map(drop)
}

/// Takes a range from the kernel's KSM: no page of it is shared any more, and none will be, unless the process wishes again that all its
/// memory be. A kernel without KSM refuses.
///
/// # Errors
/// What madvise(2) gives.
///
/// # Safety
/// The range must be the caller's.
pub unsafe fn take_from_ksm(start: usize, len: usize) -> Result<()> {
    let args = [start, len, libc::MADV_UNMERGEABLE as usize, 0, 0, 0];
    // SAFETY: no content changes; the caller's promise.
    unsafe { crate::raw::call(libc::SYS_madvise, args) }.map(drop)
}

/// Maps `len` bytes of `file` from `offset` on, shared, at a place apart (`sys::apart`).
///
/// # Errors
/// What mmap(2) gives.
pub fn share(file: BorrowedFd<'_>, offset: u64, len: usize, access: Access) -> Result<usize> {
    fault::check(Point::Share)?;
    // SAFETY: a fresh mapping where nothing is disturbs nothing.
    let fresh =
        |at| unsafe { rustix::mm::mmap(at, len, access.prot(), MapFlags::SHARED, file, offset) };
    map_apart(Use::Line, len, fresh).map(|start| start.expose_provenance())
}

/// This process's memory as a file: what is read-only, or not even that, can be written there too.
#[derive(Debug)]
pub struct OwnMemory(OwnedFd);

impl OwnMemory {
    /// Opens the file, without allocating.
    ///
    /// # Errors
    /// `NOENT` where /proc is not mounted.
    pub fn open() -> Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open(c"/proc/thread-self/mem", flags, Mode::empty()).map(Self)
    }

    /// Copies `[from, from + len)`, which need not be readable, to `to`, which need not be writable.
    ///
    /// # Errors
    /// `IO` where a part is not mapped, or the kernel has `proc_mem.force_override` against it.
    ///
    /// # Safety
    /// `[to, to + len)` must be the caller's.
    pub unsafe fn copy(&self, from: usize, to: usize, len: usize) -> Result<()> {
        let mut page = [0; PAGE];
        for at in (0..len).step_by(PAGE) {
            let whole = |bytes| {
                if bytes == PAGE {
                    Ok(())
                } else {
                    Err(Errno::IO)
                }
            };
            rustix::io::pread(&self.0, &mut page, (from + at) as u64).and_then(whole)?;
            rustix::io::pwrite(&self.0, &page, (to + at) as u64).and_then(whole)?;
        }
        Ok(())
    }

    /// Fills `[at, at + len)`, which need not be writable, with zeros.
    ///
    /// # Errors
    /// As [`Self::copy`].
    ///
    /// # Safety
    /// `[at, at + len)` must be the caller's.
    pub unsafe fn clear(&self, at: usize, len: usize) -> Result<()> {
        for page in (at..at + len).step_by(PAGE) {
            match rustix::io::pwrite(&self.0, &[0; PAGE], page as u64)? {
                PAGE => {}
                _ => return Err(Errno::IO),
            }
        }
        Ok(())
    }

    /// Gives each page of a range of private mappings a frame of its own, with the same content: a byte of
    /// it is written as it was read. The rights to read and write the range stay as they are. No other thread may
    /// be able to write to it meanwhile.
    ///
    /// # Errors
    /// `IO` for shared mappings, for want of memory, and where the kernel has `proc_mem.force_override`
    /// against it.
    pub fn make_private(&self, start: usize, len: usize) -> Result<()> {
        for page in (start..start + len).step_by(PAGE) {
            let mut byte = [0];
            let whole = |bytes| if bytes == 1 { Ok(()) } else { Err(Errno::IO) };
            rustix::io::pread(&self.0, &mut byte, page as u64).and_then(whole)?;
            rustix::io::pwrite(&self.0, &byte, page as u64).and_then(whole)?;
        }
        Ok(())
    }

    /// Fills `to` with what is at an address, which may be any.
    ///
    /// # Errors
    /// `IO` where a part is not mapped.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        let wanted = to.len();
        match rustix::io::pread(&self.0, to, at as u64)? {
            got if got == wanted => Ok(()),
            _ => Err(Errno::IO),
        }
    }

    /// Writes bytes whatever the mapping allows, if it is private: its file stays as it is.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        match rustix::io::pwrite(&self.0, bytes, at as u64)? {
            written if written == bytes.len() => Ok(()),
            _ => Err(Errno::IO),
        }
    }
}

/// Tries whether the kernel lets a process write memory that is read-only, as code is, by its file in /proc.
///
/// # Errors
/// `IO` where it was started with `proc_mem.force_override` of `never` or `ptrace`; what opening the file and mmap give.
pub fn try_to_force() -> Result<()> {
    let memory = OwnMemory::open()?;
    let (read, private) = (ProtFlags::READ, MapFlags::PRIVATE);
    // SAFETY: a fresh mapping where nothing is disturbs nothing.
    let page = unsafe { rustix::mm::mmap_anonymous(pointer(0), PAGE, read, private) }?;
    // SAFETY: the page was just made, for this alone.
    let written = unsafe { memory.clear(page.expose_provenance(), PAGE) };
    // SAFETY: as above; nothing points into it.
    let _ = unsafe { rustix::mm::munmap(page, PAGE) };
    written
}

/// How many mappings a process may have (`vm.max_map_count`), without allocating.
///
/// # Errors
/// What reading /proc gives; `INVAL` for a text that is no number.
pub fn limit() -> Result<usize> {
    number_of(c"/proc/sys/vm/max_map_count")
}

fn number_of(path: &CStr) -> Result<usize> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let mut text = [0; 20];
    let len = rustix::io::pread(&file, &mut text, 0)?;
    let text = std::str::from_utf8(text.get(..len).unwrap_or_default());
    let number = text.ok().and_then(|text| text.trim().parse().ok());
    number.ok_or(Errno::INVAL)
}

/// Whether mremap(2) moves several mappings at once, to a target of the same length (Linux 6.17).
#[must_use]
pub fn moves_several() -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let len = 2 * PAGE;
    // SAFETY: it replaces nothing.
    let made = unsafe { rustix::mm::mmap_anonymous(pointer(0), 2 * len, ProtFlags::READ, flags) };
    let Ok(made) = made.map(<*mut _>::expose_provenance) else {
        return false;
    };
    let (from, to) = (pointer(made), pointer(made + len));
    // SAFETY: all of it was made here, and goes at the end. There is no hole before, which other threads could be given.
    unsafe {
        let divided = rustix::mm::mprotect(from, PAGE, MprotectFlags::empty());
        let stays = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
        let moved = rustix::mm::mremap_fixed(from, len, len, stays, to);
        let _ = unmap(made, 2 * len);
        divided.is_ok() && moved.is_ok()
    }
}

/// Removes the mappings of `[start, start + len)`.
///
/// # Errors
/// What munmap(2) gives.
///
/// # Safety
/// The range must be the caller's, and nothing may use it any more.
pub unsafe fn unmap(start: usize, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::munmap(pointer(start), len) }
}

/// madvise(2) with a number, so that advice this crate does not know passes too.
///
/// # Errors
/// What madvise(2) gives.
///
/// # Safety
/// Some advice discards memory: the caller must be entitled to it.
pub unsafe fn advise(start: usize, len: usize, advice: i32) -> Result<()> {
    fault::check(Point::Advise)?;
    // SAFETY: the caller's promise.
    unsafe { crate::raw::call(libc::SYS_madvise, [start, len, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Sets what `[start, start + len)` allows.
///
/// # Errors
/// What mprotect(2) gives.
///
/// # Safety
/// Who relies on the old protection must be the caller.
pub unsafe fn protect(start: usize, len: usize, access: Access) -> Result<()> {
    fault::check(Point::Protect)?;
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mprotect(pointer(start), len, access.mprotect()) }
}

/// Locks (pages stay once touched) or unlocks `[start, start + len)`.
///
/// # Errors
/// `NOMEM` or `PERM` when the limit of locked memory is reached.
///
/// # Safety
/// The range must be the caller's.
pub unsafe fn set_locked(start: usize, len: usize, locked: bool) -> Result<()> {
    fault::check(Point::Lock)?;
    // SAFETY: the caller's promise.
    unsafe {
        if locked {
            rustix::mm::mlock_with(pointer(start), len, MlockFlags::ONFAULT)
        } else {
            rustix::mm::munlock(pointer(start), len)
        }
    }
}

/// Locks `[start, start + len)`, which is locked on fault, as plain mlock(2) does: pages that are not there come.
///
/// # Errors
/// What mlock2(2) gives.
///
/// # Safety
/// The range must be the caller's.
pub unsafe fn lock_plainly(start: usize, len: usize) -> Result<()> {
    fault::check(Point::Lock)?;
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mlock_with(pointer(start), len, MlockFlags::empty()) }
}

fn pointer(address: usize) -> *mut std::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::memfd::Store;
    use crate::pagemap::{Categories, PageRun, Pagemap};
    use crate::vma::Maps;

    /// Pages of a range that are a file's.
    fn shared(start: usize, len: usize) -> u64 {
        let mut runs = [PageRun::default(); 8];
        let map = Pagemap::own().unwrap();
        let (filled, _) = map
            .peek(start as u64..(start + len) as u64, &mut runs)
            .unwrap();
        let files = runs[..filled]
            .iter()
            .filter(|run| run.categories.has(Categories::FILE));
        files.map(|run| (run.end - run.start) / PAGE as u64).sum()
    }

    #[test]
    fn kernels_since_6_17_move_several_mappings_at_once() {
        let release = crate::host::version_of(&crate::host::kernel_release());
        assert_eq!(moves_several(), release.unwrap() >= (6, 17));
    }

    #[test]
    fn pages_become_private_while_nobody_may_write_them() {
        let store = Store::new("pageone-test").unwrap();
        let pages = [[1; PAGE], [2; PAGE], [3; PAGE]];
        store.write(0, &pages.each_ref()).unwrap();
        let file = store.share().unwrap();
        for access in [Access::Read, Access::None] {
            let (at, flags) = (std::ptr::null_mut(), MapFlags::PRIVATE);
            let (len, read) = (3 * PAGE, ProtFlags::READ);
            // SAFETY: a fresh mapping at a place of the kernel's choice disturbs nothing.
            let start = unsafe { rustix::mm::mmap(at, len, read, flags, file.as_fd(), 0) };
            let start = start.unwrap().expose_provenance();
            // SAFETY: mapped above, and no thread writes to it.
            let bytes = || unsafe { std::slice::from_raw_parts(pointer(start).cast::<u8>(), len) };
            assert_eq!(bytes(), pages.as_flattened());
            assert_eq!(shared(start, len), 3);
            // SAFETY: the mapping is this test's; `bytes` is not called meanwhile.
            unsafe { protect(start, len, access) }.unwrap();
            let memory = OwnMemory::open().unwrap();
            if let Err(error) = memory.make_private(start, 2 * PAGE) {
                return eprintln!("skipped: the kernel forbids it: {error}");
            }
            assert_eq!(shared(start, len), 1, "two of three pages are private");
            let vma = Maps::open().unwrap().find(start).unwrap().unwrap();
            assert_eq!((vma.start, vma.access()), (start, access));
            // SAFETY: as above.
            unsafe { protect(start, len, Access::Read) }.unwrap();
            assert_eq!(bytes(), pages.as_flattened());
            // SAFETY: nothing refers to it any more.
            unsafe { unmap(start, len) }.unwrap();
        }
    }

    #[test]
    fn where_the_kernel_counts_strictly_what_may_not_be_written_is_counted() {
        let flags = |at: usize| {
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut inside = false;
            let mut flags = smaps.lines().filter(|line| {
                let range = line
                    .split_once(' ')
                    .and_then(|(word, _)| word.split_once('-'));
                if let Some((start, end)) = range {
                    let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16));
                    inside = start.is_ok_and(|start| start <= at) && end.is_ok_and(|end| at < end);
                }
                inside && line.starts_with("VmFlags:")
            });
            flags.next().unwrap().to_owned()
        };
        for locked in [false, true] {
            let attributes = Attributes {
                locked,
                on_fault: locked,
                ..Attributes::default()
            };
            for access in [Access::Read, Access::None] {
                COUNTS_STRICTLY.store(true, Ordering::Relaxed);
                let made = aside(4 * PAGE, Source::Anonymous, access, attributes, locked);
                COUNTS_STRICTLY.store(false, Ordering::Relaxed);
                let start = made.unwrap();
                let told = flags(start);
                assert!(told.contains(" ac") && !told.contains(" wr"), "{told}");
                // SAFETY: nothing refers to it.
                unsafe { unmap(start, 4 * PAGE) }.unwrap();
            }
        }
    }

    /// A core dump that begins in between would hold what is not to be dumped.
    #[test]
    fn what_is_not_to_be_dumped_is_never_mapped_without_that() {
        const PAGES: usize = 64;
        let store = Store::new("pageone-test").unwrap();
        store.write(0, &[&[1; PAGE]; PAGES]).unwrap();
        let file = store.share().unwrap();
        let attributes = Attributes {
            dontdump: true,
            ..Attributes::default()
        };
        let len = PAGES * PAGE;
        let start = aside(len, Source::Anonymous, Access::ReadWrite, attributes, false).unwrap();
        std::thread::scope(|scope| {
            let replacing = scope.spawn(|| {
                for n in 0..4000 {
                    let at = start + n % PAGES * PAGE;
                    let source = match n / PAGES % 2 {
                        0 => Source::Store(file.as_fd(), 0),
                        _ => Source::Anonymous,
                    };
                    // SAFETY: memory of this test's, which it does not touch.
                    unsafe { replace(at, PAGE, source, Access::ReadWrite, attributes, false) }
                        .unwrap();
                }
            });
            let mut looks = 0;
            while !replacing.is_finished() || looks == 0 {
                let each = |vma, told: Option<crate::vma::Told>| {
                    assert!(told.unwrap().attributes.dontdump, "{vma:?}");
                };
                crate::vma::given(start, start + len, each).unwrap();
                looks += 1;
            }
        });
        // SAFETY: nothing refers to it any more.
        unsafe { unmap(start, len) }.unwrap();
    }
}
