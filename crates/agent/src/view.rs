//! Windows into a store through which canonical pages are read for comparison.
//!
//! A store may be larger than this process's address space should hold, and its slots come in
//! ascending numbers, so a few windows of 1 GiB, mapped read-only when first needed, see all that
//! a period compares. A window maps a page table entry for each slot read through it; the windows
//! are dropped when the agent has nothing to do.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Result;
use sys::mapping::{self, Access};
use wire::PAGE_BYTES;

const WINDOW_PAGES: u64 = 1 << 18;
const WINDOW_BYTES: usize = PAGE_BYTES << 18;
const WINDOWS: usize = 4;

/// A store's descriptor and the windows into it.
pub(crate) struct View {
    store: OwnedFd,
    windows: [Option<Window>; WINDOWS],
    next: usize,
}

#[derive(Clone, Copy)]
struct Window {
    index: u64,
    start: usize,
}

impl View {
    pub(crate) fn new(store: OwnedFd) -> Self {
        Self {
            store,
            windows: [None; WINDOWS],
            next: 0,
        }
    }

    pub(crate) fn store(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }

    /// The address of `slot`'s page. Reading it is sound once the engine named the slot: slots
    /// are written before they are named (I3), so the store reaches that far.
    ///
    /// # Errors
    /// `NOMEM` when no window can be mapped.
    pub(crate) fn page(&mut self, slot: u64) -> Result<usize> {
        let index = slot / WINDOW_PAGES;
        #[allow(clippy::cast_possible_truncation)] // below the window's size
        let inside = (slot % WINDOW_PAGES) as usize * PAGE_BYTES;
        let found = self
            .windows
            .iter()
            .flatten()
            .find(|window| window.index == index);
        if let Some(window) = found {
            return Ok(window.start + inside);
        }
        let offset = index * WINDOW_BYTES as u64;
        let start = mapping::share(self.store.as_fd(), offset, WINDOW_BYTES, Access::Read)?;
        let place = self.next % WINDOWS;
        self.next += 1;
        let window = Window { index, start };
        if let Some(old) = self
            .windows
            .get_mut(place)
            .and_then(|place| place.replace(window))
        {
            unmap(old);
        }
        Ok(start + inside)
    }

    /// Unmaps all windows.
    pub(crate) fn rest(&mut self) {
        self.windows
            .iter_mut()
            .filter_map(Option::take)
            .for_each(unmap);
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.rest();
    }
}

fn unmap(window: Window) {
    // SAFETY: the window was mapped here, and addresses in it are not kept beyond a comparison.
    let _ = unsafe { mapping::unmap(window.start, WINDOW_BYTES) };
}
