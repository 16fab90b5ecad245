//! The staging area: where a batch's pages are while no thread of the program can reach them.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Result;
use sys::mapping::{self, Access};
use sys::uffd::{Uffd, Watch};
use wire::{Journal, PAGE_BYTES};

use super::BATCH_PAGES;
use crate::lock::existing;
use crate::table::DONTNEED_LOCKED;

const BYTES: usize = BATCH_PAGES * PAGE_BYTES;

/// How often the program has locked or unlocked all of its memory, the areas included.
static ALL_LOCKINGS: AtomicUsize = AtomicUsize::new(0);

/// Notes that the program has locked or unlocked all of its memory.
pub(crate) fn note_all_locked() {
    ALL_LOCKINGS.fetch_add(1, Ordering::Relaxed);
}

/// Notes where a journal lies, for [`unmap_all`].
fn note(journal: usize) {
    let order = Ordering::Relaxed;
    if let Some(page) = existing() {
        let mut free = page.journals.iter();
        free.find(|place| place.compare_exchange(0, journal, order, order).is_ok());
    }
}

/// Unmaps all staging areas of this process but those in which pages are.
///
/// # Safety
/// There is no window: no agent's thread runs, and none begins meanwhile.
pub(crate) unsafe fn unmap_all() {
    let Some(page) = existing() else { return };
    for place in &page.journals {
        // SAFETY: who is in the list is mapped; the caller vouches that no window uses it.
        unsafe { unmap_if_clear(place) };
    }
}

/// Unmaps the area in a place of the list, if no page is out.
///
/// # Safety
/// The area's window, if there is one, does not use it any more.
unsafe fn unmap_if_clear(place: &AtomicUsize) {
    let at = place.load(Ordering::Relaxed);
    if at == 0 {
        return;
    }
    // SAFETY: `new` made it in this process, for the list is empty in a fork child; only this unmaps it, and takes it out of the list
    // before.
    let journal = unsafe { &*std::ptr::with_exposed_provenance::<Journal>(at) };
    if journal.is_clear() {
        place.store(0, Ordering::Relaxed);
        // SAFETY: as above; without pages that are out, nothing in it exists nowhere else.
        let _ = unsafe { mapping::unmap(at, PAGE_BYTES + BYTES) };
    }
}

/// Room for the pages of a batch, behind a page with the [`Journal`] of them. It goes with its window, unless pages are out: what was
/// moved here may exist nowhere else. The same holds where the agent's thread was killed: then the area stays at least until the next
/// thread begins.
pub(super) struct Staging {
    start: usize,
    access: Access,
    locked: bool,
    /// [`ALL_LOCKINGS`] when `locked` was true of the area.
    lockings: usize,
    /// Whether the last batch's pages could be dropped.
    is_empty: bool,
}

impl Staging {
    /// # Errors
    /// What mmap and userfaultfd give.
    pub(super) fn new(uffd: &Uffd) -> Result<Self> {
        let journal = mapping::area(PAGE_BYTES + BYTES)?;
        note(journal);
        let start = journal + PAGE_BYTES;
        // From here it is unmapped again if something fails.
        let made = Self {
            start,
            access: Access::ReadWrite,
            locked: false,
            lockings: ALL_LOCKINGS.load(Ordering::Relaxed),
            is_empty: true,
        };
        // SAFETY: the area was just made here.
        unsafe {
            mapping::keep_apart(journal, PAGE_BYTES + BYTES)?;
            mapping::advise(start, BYTES, libc::MADV_NOHUGEPAGE).ok();
            mapping::take_from_ksm(journal, PAGE_BYTES + BYTES).ok();
        }
        uffd.register(start, BYTES, Watch::Track)?;
        Ok(made)
    }

    /// The page before the area.
    pub(super) fn journal_at(&self) -> usize {
        self.start - PAGE_BYTES
    }

    /// Which pages are out.
    pub(super) fn journal(&self) -> &Journal {
        // SAFETY: the page was made with the area, which lives as long as this object; zeros are a journal
        // without pages, and all of it is atomic.
        unsafe { &*std::ptr::with_exposed_provenance(self.journal_at()) }
    }

    /// The address of place `at`.
    pub(super) fn place(&self, at: usize) -> usize {
        self.start + at * PAGE_BYTES
    }

    /// Makes the area like the pages that come, for MOVE wants both sides alike.
    ///
    /// # Errors
    /// It is not so, or the pages of the batch before could not be dropped: then nothing may come.
    pub(super) fn prepare(&mut self, access: Access, locked: bool) -> Result<()> {
        if !self.is_empty {
            // SAFETY: the caller of `empty` has vouched for them.
            unsafe { self.empty(BATCH_PAGES) }?;
        }
        // SAFETY: the area is this object's own, and empty.
        unsafe {
            let lockings = ALL_LOCKINGS.load(Ordering::Relaxed);
            if (self.locked, self.lockings) != (locked, lockings) {
                mapping::set_locked(self.start, BYTES, locked)?;
                (self.locked, self.lockings) = (locked, lockings);
            }
            if self.access != access {
                mapping::protect(self.start, BYTES, access)?;
                self.access = access;
            }
        }
        Ok(())
    }

    /// Ends what the kernel's KSM shares of the area, whatever it allows: no content changes.
    pub(super) fn unshare(&self) {
        // SAFETY: the area is this object's own.
        let _ = unsafe { mapping::take_from_ksm(self.start, BYTES) };
    }

    /// Drops the first `pages` pages.
    ///
    /// # Errors
    /// What madvise gives; the next [`Self::prepare`] tries again.
    ///
    /// # Safety
    /// Nothing is in the area that exists nowhere else.
    pub(super) unsafe fn empty(&mut self, pages: usize) -> Result<()> {
        // SAFETY: the area is this object's own; for its pages the caller vouches.
        let emptied = unsafe { mapping::advise(self.start, pages * PAGE_BYTES, DONTNEED_LOCKED) };
        self.is_empty = emptied.is_ok();
        emptied
    }
}

impl Drop for Staging {
    /// An engine looks at the area only after this thread has ended, and finds nothing then: there is nothing to bring back.
    fn drop(&mut self) {
        let journal = self.journal_at();
        let listed = existing().and_then(|page| {
            let mut places = page.journals.iter();
            places.find(|place| place.load(Ordering::Relaxed) == journal)
        });
        let unlisted = AtomicUsize::new(journal);
        // SAFETY: the window ends here.
        unsafe { unmap_if_clear(listed.unwrap_or(&unlisted)) };
    }
}
