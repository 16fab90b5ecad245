//! One lock orders the guest's calls over offered memory and the agent's windows.
//!
//! It lives in a page that fork gives to a child as zeros (`MADV_WIPEONFORK`): however a child was
//! made, it starts with a free lock and without an agent, also when the fork fell into a window.
//! A child that shares memory (vfork, posix_spawn) shares the lock, as it must.
//!
//! The holder has all signals blocked, so no handler of the same thread can want it again. It is
//! held for one window or one system call at a time.
//!
//! Orderings: taking is Acquire, giving back is Release, and they are each other's partners:
//! everything in [`Table`] is written under the lock and read under it.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;
use sys::thread::{SignalMask, block_signals, restore_signals};

use crate::table::Table;

/// What a fork child must not inherit.
#[derive(Default)]
pub(crate) struct PerProcess {
    /// 0 free, 1 held, 2 held and wanted.
    word: AtomicU32,
    /// Whether the agent's thread runs in this process.
    pub(crate) started: AtomicU32,
    /// Whether an engine serves this process now: one of the constants below. Changed under the lock.
    pub(crate) serving: AtomicU32,
}

/// [`PerProcess::serving`]: nobody has been looked for yet.
pub(crate) const SEARCHING: u32 = 0;
/// [`PerProcess::serving`]: an engine serves.
pub(crate) const SERVED: u32 = 1;
/// [`PerProcess::serving`]: no engine serves now.
pub(crate) const ALONE: u32 = 2;

static PAGE: AtomicPtr<PerProcess> = AtomicPtr::new(std::ptr::null_mut());

/// The page of this process; made at the first call. `None` when there is no memory for it.
pub(crate) fn per_process() -> Option<&'static PerProcess> {
    // Acquire pairs with the Release below: who sees the pointer sees the mapping's setup.
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        page = make_page()?;
    }
    // SAFETY: the page is never unmapped, and zeros are a valid `PerProcess`.
    Some(unsafe { &*page })
}

fn make_page() -> Option<*mut PerProcess> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let none = std::ptr::null_mut();
    // SAFETY: a fresh mapping disturbs nothing.
    let made = unsafe { rustix::mm::mmap_anonymous(none, 4096, prot, MapFlags::PRIVATE) }.ok()?;
    let address = made.expose_provenance();
    // SAFETY: the page was just made here.
    unsafe { sys::mapping::advise(address, 4096, libc::MADV_WIPEONFORK) }.ok()?;
    let made = made.cast::<PerProcess>();
    // Release pairs with the Acquire in `per_process`; a thread that came first has won.
    let order = (Ordering::Release, Ordering::Acquire);
    match PAGE.compare_exchange(std::ptr::null_mut(), made, order.0, order.1) {
        Ok(_) => Some(made),
        Err(winner) => {
            // SAFETY: nobody else knows the page.
            let _ = unsafe { sys::mapping::unmap(address, 4096) };
            Some(winner)
        }
    }
}

/// The lock, held.
pub(crate) struct Guard {
    page: &'static PerProcess,
    mask: SignalMask,
}

/// Takes the lock; `None` when there is no memory for it, and then nothing was ever offered.
pub(crate) fn lock() -> Option<Guard> {
    let page = per_process()?;
    let mask = block_signals();
    let free = page
        .word
        .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
    if free.is_err() {
        while page.word.swap(2, Ordering::Acquire) != 0 {
            let _ = futex::wait(&page.word, futex::Flags::PRIVATE, 2, None);
        }
    }
    Some(Guard { page, mask })
}

impl Guard {
    /// What the lock protects.
    pub(crate) fn table(&mut self) -> Table<'_> {
        // SAFETY: this guard is the only one in the process, and it is borrowed mutably.
        unsafe { Table::under_lock() }
    }

    /// The state of this process beside the table.
    pub(crate) fn process(&self) -> &'static PerProcess {
        self.page
    }

    /// Keeps the lock held over a fork; [`Guard::resume`] takes it back, in the parent.
    pub(crate) fn suspend(self) -> SignalMask {
        let mask = self.mask;
        std::mem::forget(self);
        mask
    }

    /// # Safety
    /// The lock must be held through [`Guard::suspend`] by this thread.
    pub(crate) unsafe fn resume(mask: SignalMask) -> Option<Self> {
        per_process().map(|page| Self { page, mask })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.page.word.swap(0, Ordering::Release) == 2 {
            let _ = futex::wake(&self.page.word, futex::Flags::PRIVATE, 1);
        }
        restore_signals(self.mask);
    }
}
