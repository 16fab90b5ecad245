//! An allocator that counts, so that a target can say how much memory an input may cost. It counts by thread: the test's runner
//! takes memory too.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    /// Bytes that this thread has taken and not given back; below zero where it gives back what others took.
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn grow(bytes: usize) {
    let live = LIVE.get() + bytes as i64;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: all is the system allocator's; the counters touch no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as i64);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Does `work` and fails if more than `limit` bytes of heap were in use for it at any time.
pub(crate) fn bounded<T>(limit: usize, work: impl FnOnce() -> T) -> T {
    let before = LIVE.get();
    PEAK.set(before);
    let done = work();
    let peak = PEAK.get() - before;
    assert!(
        peak <= limit as i64,
        "{peak} bytes of heap were in use, {limit} are allowed"
    );
    done
}
