//! `PAGEMAP_SCAN` on `/proc/PID/pagemap`: which pages are there, and which were written.
//!
//! One call looks at a range and arms it again: pages it reports as written are write-protected
//! anew (asynchronously, through the guest's own userfaultfd). So the next call tells the pages that
//! were written since. Ranges without such a userfaultfd are passed over silently.
//!
//! The descriptor belongs to the address space, not to the process id: after an exec or an exit
//! it sees nothing, however the number is used again.
//!
//! Source: `Documentation/admin-guide/mm/pagemap.rst`, `fs/proc/task_mmu.c`.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::OwnedFd;

use linux_raw_sys::general as raw;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

use crate::fault::{self, Point};

const SCAN: Opcode = opcode::read_write::<raw::pm_scan_arg>(b'f', 16);
const PAGE_BYTES: u64 = crate::PAGE as u64;

/// What the kernel says about a page. [`Categories::EMPTY`] stands for a hole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Categories(u64);

impl Categories {
    /// Nothing is known of the page.
    pub const EMPTY: Self = Self(0);
    /// A frame is mapped.
    pub const PRESENT: Self = Self(raw::PAGE_IS_PRESENT as u64);
    /// The entry refers to swap, or is a marker that has no frame.
    pub const SWAPPED: Self = Self(raw::PAGE_IS_SWAPPED as u64);
    /// Written since it was armed, or never armed.
    pub const WRITTEN: Self = Self(raw::PAGE_IS_WRITTEN as u64);
    /// The frame belongs to a file.
    pub const FILE: Self = Self(raw::PAGE_IS_FILE as u64);
    /// The page is a part of a huge page, mapped as one.
    pub const HUGE: Self = Self(raw::PAGE_IS_HUGE as u64);
    /// The frame is the kernel's page of zeros.
    pub const ZERO: Self = Self(raw::PAGE_IS_PFNZERO as u64);

    /// Whether all of `other` hold.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both together.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A run of neighbouring pages of the same categories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PageRun {
    /// Address of the first page.
    pub start: u64,
    /// Address behind the last page.
    pub end: u64,
    /// What holds for each page of the run.
    pub categories: Categories,
}

// The kernel fills a vector of `page_region`: the layouts must agree.
const _: () = assert!(size_of::<PageRun>() == size_of::<raw::page_region>());
const _: () = assert!(align_of::<PageRun>() == align_of::<raw::page_region>());

/// An open `/proc/PID/pagemap`.
#[derive(Debug)]
pub struct Pagemap(OwnedFd);

impl Pagemap {
    /// Opens the page map of `pid`.
    ///
    /// # Errors
    /// `NOENT` when there is no such process, `ACCESS` without the right to look into it.
    pub fn open(pid: u32) -> Result<Self> {
        fault::check(Point::Proc)?;
        let file = crate::text::open(format!("/proc/{pid}/pagemap"))?;
        Ok(Self(file.into()))
    }

    /// Opens this process's own page map, without allocating.
    ///
    /// # Errors
    /// `NOENT` where /proc is not mounted.
    pub fn own() -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(c"/proc/thread-self/pagemap", flags, Mode::empty()).map(Self)
    }

    /// Looks at the pages of `range`, arms the written ones again and fills `runs`, in ascending
    /// order; holes are left out. [`Categories::FILE`] is never told: the kernel would look at the
    /// frame's own record for it, a cache miss a page that makes the walk 7 times as slow. Returns how many runs it filled and the address where it
    /// stopped, the end of the range unless `runs` was full.
    ///
    /// # Errors
    /// `NOTTY` before Linux 6.7, and whatever ioctl(2) gives. Runs already armed are lost then.
    pub fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> Result<(usize, u64)> {
        self.walk(range, runs, raw::PM_SCAN_WP_MATCHING, 0)
    }

    /// As [`Self::scan`], but tells of files, arms nothing, and sees ranges without userfaultfd too.
    ///
    /// # Errors
    /// As for [`Self::scan`].
    pub fn peek(&self, range: Range<u64>, runs: &mut [PageRun]) -> Result<(usize, u64)> {
        self.walk(range, runs, 0, raw::PAGE_IS_FILE)
    }

    /// As [`Self::peek`], without a word of files, and so as fast as [`Self::scan`].
    ///
    /// # Errors
    /// As for [`Self::scan`].
    pub fn glance(&self, range: Range<u64>, runs: &mut [PageRun]) -> Result<(usize, u64)> {
        self.walk(range, runs, 0, 0)
    }

    /// Fills `runs` with pages of `range` that no userfaultfd tracks, in ascending order, and returns how many. Mappings
    /// that are tracked are passed over whole, holes too.
    ///
    /// # Errors
    /// As for [`Self::scan`].
    pub fn untracked(&self, range: Range<u64>, runs: &mut [PageRun]) -> Result<usize> {
        self.by_tracking(range, runs, raw::PAGE_IS_WPALLOWED)
    }

    /// Whether a userfaultfd tracks a mapping of `range`.
    ///
    /// # Errors
    /// As for [`Self::scan`].
    pub fn is_tracked(&self, range: Range<u64>) -> Result<bool> {
        let found = self.by_tracking(range, &mut [PageRun::default()], 0);
        found.map(|found| found > 0)
    }

    fn by_tracking(&self, range: Range<u64>, runs: &mut [PageRun], inverted: u32) -> Result<usize> {
        fault::check(Point::Scan)?;
        let mut arg = raw::pm_scan_arg {
            category_inverted: inverted.into(),
            category_mask: raw::PAGE_IS_WPALLOWED.into(),
            return_mask: raw::PAGE_IS_WPALLOWED.into(),
            ..asks(&range, runs)
        };
        // SAFETY: as in `walk`.
        unsafe { ioctl(&self.0, Walk(&mut arg)) }
    }

    fn walk(
        &self,
        range: Range<u64>,
        runs: &mut [PageRun],
        flags: u32,
        besides: u32,
    ) -> Result<(usize, u64)> {
        fault::check(Point::Scan)?;
        let interesting = raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED;
        let wanted = interesting | raw::PAGE_IS_WRITTEN | raw::PAGE_IS_PFNZERO;
        let wanted = wanted | raw::PAGE_IS_HUGE | besides;
        let mut arg = raw::pm_scan_arg {
            flags: flags.into(),
            category_anyof_mask: interesting.into(),
            return_mask: wanted.into(),
            ..asks(&range, runs)
        };
        // SAFETY: `arg` is the structure this request takes; `vec` and `vec_len` describe `runs`,
        // which stays exclusively borrowed over the call and whose element has the kernel's layout.
        let filled = unsafe { ioctl(&self.0, Walk(&mut arg)) }?;
        // The kernel collects 512 runs at a time and leaves `walk_end` where it last paused for
        // that, even when it went on to the end. So only a full vector means that there is more,
        // and that begins behind its last run.
        let filled = runs.get(..filled).unwrap_or(runs);
        let stopped = match filled.last() {
            Some(last) if filled.len() == runs.len() => arg.walk_end.max(last.end),
            _ => range.end,
        };
        Ok((filled.len(), stopped.min(range.end)))
    }

    /// Whether the address space still has a process.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let mut entry = [0; 8];
        matches!(rustix::io::pread(&self.0, &mut entry, 8), Ok(1..))
    }

    /// The frame number of each page of `range`: 0 where there is none, or without the right
    /// (`CAP_SYS_ADMIN`) to know.
    ///
    /// # Errors
    /// Whatever pread(2) gives.
    pub fn frames(&self, range: Range<u64>) -> Result<Vec<u64>> {
        let entries = self.entries(range)?;
        Ok(entries.map(|entry| frame(entry).unwrap_or(0)).collect())
    }

    /// Whose the frame of each page of `range` is. It looks at the frame's own record, a cache miss a page, as [`Self::peek`]
    /// does: so [`Self::glance`] and this call tell more for the same.
    ///
    /// # Errors
    /// Whatever pread(2) gives.
    pub fn owners(&self, range: Range<u64>) -> Result<impl Iterator<Item = Owner> + use<>> {
        Ok(self.entries(range)?.map(owner))
    }

    /// Of each page of `range` that other page tables have too, the frame number: 0 without the right
    /// (`CAP_SYS_ADMIN`) to know it.
    ///
    /// # Errors
    /// Whatever pread(2) gives.
    pub fn shared_frames(&self, range: Range<u64>) -> Result<Vec<Option<u64>>> {
        let shared = |owner| match owner {
            Owner::Several(frame) => Some(frame),
            Owner::File | Owner::This => None,
        };
        Ok(self.owners(range)?.map(shared).collect())
    }

    fn entries(&self, range: Range<u64>) -> Result<impl Iterator<Item = u64> + use<>> {
        let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
        let len = usize::try_from(pages.end.saturating_sub(pages.start));
        let mut entries = vec![[0; 8]; len.unwrap_or(0)];
        let (mut rest, mut at) = (entries.as_flattened_mut(), pages.start * 8);
        while !rest.is_empty() {
            match rustix::io::pread(&self.0, &mut *rest, at)? {
                0 => break, // behind the address space
                read => {
                    rest = rest.get_mut(read..).unwrap_or_default();
                    at += read as u64;
                }
            }
        }
        Ok(entries.into_iter().map(u64::from_ne_bytes))
    }
}

/// Whose the frame behind a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A file's, of shared memory too.
    File,
    /// No other page table has it; or there is none.
    This,
    /// Other page tables have it too. Its number, 0 without the right (`CAP_SYS_ADMIN`) to know it.
    Several(u64),
}

fn owner(entry: u64) -> Owner {
    const EXCLUSIVE: u64 = 1 << 56;
    const FILE: u64 = 1 << 61;
    match frame(entry) {
        Some(_) if entry & FILE != 0 => Owner::File,
        Some(frame) if entry & EXCLUSIVE == 0 => Owner::Several(frame),
        _ => Owner::This,
    }
}

/// The frame of an entry that is present.
fn frame(entry: u64) -> Option<u64> {
    const FRAME: u64 = (1 << 55) - 1;
    (entry >> 63 == 1).then_some(entry & FRAME)
}

struct Walk<'a>(&'a mut raw::pm_scan_arg);

// SAFETY: `SCAN` reads and writes one `pm_scan_arg`; the vector it names is the caller's contract.
unsafe impl Ioctl for Walk<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        SCAN
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(filled: IoctlOutput, _: *mut c_void) -> Result<usize> {
        usize::try_from(filled).map_err(|_| Errno::INVAL)
    }
}

/// Whether this kernel has `PAGEMAP_SCAN`, tried on this process.
///
/// # Errors
/// `NOTTY` when it has not; what open(2) gives.
pub fn probe() -> Result<()> {
    let here = Pagemap::open(std::process::id())?;
    here.peek(0..PAGE_BYTES, &mut [PageRun::default()])
        .map(drop)
}

/// A scan of `range` into `runs`, of no category yet.
fn asks(range: &Range<u64>, runs: &mut [PageRun]) -> raw::pm_scan_arg {
    raw::pm_scan_arg {
        size: size_of::<raw::pm_scan_arg>() as u64,
        flags: 0,
        start: range.start,
        end: range.end,
        walk_end: range.start,
        vec: runs.as_mut_ptr() as u64,
        vec_len: runs.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: 0,
        category_anyof_mask: 0,
        return_mask: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uffd::{Uffd, Watch};

    const PAGES: usize = 16;
    const LEN: usize = PAGES * 4096;

    struct Area(usize);

    impl Area {
        fn new() -> Self {
            Self(crate::mapping::area(LEN).unwrap())
        }

        fn write(&self, page: usize) {
            // SAFETY: the page lies in this mapping, which is private to the test.
            unsafe { ((self.0 + page * 4096) as *mut u8).write_volatile(7) };
        }

        fn range(&self) -> Range<u64> {
            self.0 as u64..(self.0 + LEN) as u64
        }
    }

    impl Drop for Area {
        fn drop(&mut self) {
            // SAFETY: the mapping is this test's own.
            unsafe { crate::mapping::unmap(self.0, LEN) }.unwrap();
        }
    }

    fn pages(area: &Area, runs: &[PageRun]) -> Vec<(usize, bool)> {
        let page = |at: u64| usize::try_from(at).unwrap().abs_diff(area.0) / 4096;
        let each = runs.iter().flat_map(|run| {
            let written = run.categories.has(Categories::WRITTEN);
            (page(run.start)..page(run.end)).map(move |page| (page, written))
        });
        each.collect()
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn a_scan_tells_what_was_written_since_the_last() {
        let Ok(uffd) = Uffd::open() else {
            assert!(!is_root(), "root has userfaultfd");
            eprintln!("skipped: no right to userfaultfd");
            return;
        };
        let area = Area::new();
        let map = Pagemap::open(std::process::id()).unwrap();
        for page in [1, 2, 9] {
            area.write(page);
        }
        uffd.register(area.0, LEN, Watch::Track).unwrap();
        let mut runs = [PageRun::default(); 8];
        let (found, end) = map.scan(area.range(), &mut runs).unwrap();
        assert_eq!(
            pages(&area, &runs[..found]),
            [(1, true), (2, true), (9, true)]
        );
        assert_eq!(end, area.range().end);
        area.write(2);
        let (found, _) = map.scan(area.range(), &mut runs).unwrap();
        assert_eq!(
            pages(&area, &runs[..found]),
            [(1, false), (2, true), (9, false)]
        );
    }

    #[test]
    fn a_peek_tells_the_page_of_zeros_and_frames_are_numbered() {
        let area = Area::new();
        [3, 4].into_iter().for_each(|page| area.write(page));
        // SAFETY: the page lies in this mapping, which is private to the test.
        unsafe { ((area.0 + 9 * 4096) as *const u8).read_volatile() };
        let map = Pagemap::open(std::process::id()).unwrap();
        let mut runs = [PageRun::default(); 8];
        let (found, _) = map.peek(area.range(), &mut runs).unwrap();
        let seen = pages(&area, &runs[..found])
            .into_iter()
            .map(|(page, _)| page);
        assert_eq!(seen.collect::<Vec<_>>(), [3, 4, 9]);
        let zero = runs[..found]
            .iter()
            .map(|run| run.categories.has(Categories::ZERO));
        assert_eq!(zero.collect::<Vec<_>>(), [false, true]);
        assert!(!runs[0].categories.has(Categories::FILE));
        let frames = map.frames(area.range()).unwrap();
        let there = (0..PAGES).filter(|&page| frames[page] != 0);
        match is_root() {
            true => assert_eq!(there.collect::<Vec<_>>(), [3, 4, 9]),
            false => assert_eq!(frames.len(), PAGES),
        }
    }

    #[test]
    fn a_full_vector_stops_the_walk_where_it_can_go_on() {
        let area = Area::new();
        let map = Pagemap::open(std::process::id()).unwrap();
        for page in [0, 2, 4, 6] {
            area.write(page);
        }
        let mut runs = [PageRun::default(); 2];
        let (found, end) = map.peek(area.range(), &mut runs).unwrap();
        assert_eq!(found, 2);
        assert!(end < area.range().end);
        let (found, _) = map.peek(end..area.range().end, &mut runs).unwrap();
        assert_eq!(pages(&area, &runs[..found]), [(4, true), (6, true)]);
    }

    /// More runs than the kernel collects at a time, with room for all and for some.
    #[test]
    fn long_walks_see_every_page_once() {
        const MANY: usize = 5000;
        let at = crate::mapping::area(MANY * 4096).unwrap();
        // A huge page would make one run of many.
        // SAFETY: the mapping is this test's own, and empty.
        unsafe { crate::mapping::advise(at, MANY * 4096, libc::MADV_NOHUGEPAGE) }.ok();
        for page in (0..MANY).step_by(2) {
            // SAFETY: the page lies in the mapping above, which is private to the test.
            unsafe { ((at + page * 4096) as *mut u8).write_volatile(7) };
        }
        let map = Pagemap::open(std::process::id()).unwrap();
        for room in [1, 7, 511, 512, 513, 2499, 2500, 2501, 4096] {
            let mut runs = vec![PageRun::default(); room];
            let (mut next, end) = (at as u64, (at + MANY * 4096) as u64);
            let mut seen = Vec::new();
            while next < end {
                let (filled, stopped) = map.peek(next..end, &mut runs).unwrap();
                seen.extend(runs[..filled].iter().map(|run| (run.start, run.end)));
                assert!(stopped > next);
                next = stopped;
            }
            let page = |page: usize| (at + page * 4096) as u64;
            let wanted: Vec<_> = (0..MANY)
                .step_by(2)
                .map(|p| (page(p), page(p + 1)))
                .collect();
            assert_eq!(seen, wanted, "room for {room}");
        }
        // SAFETY: the mapping is this test's own.
        unsafe { crate::mapping::unmap(at, MANY * 4096) }.unwrap();
    }

    #[test]
    fn an_address_space_dies_with_its_process() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        // Spawning returns while the child still changes its address space for the program's.
        let open = || Pagemap::open(child.id()).ok().filter(Pagemap::is_alive);
        let map = (0..5000).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            open()
        });
        let map = map.expect("a live address space");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!map.is_alive());
    }
}
