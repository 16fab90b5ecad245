//! The ground of the calling thread: memory that it writes whatever it does, and that the kernel writes for it.
//!
//! ```text
//!   stack      … │ REACH │ stack pointer │ REACH │ …
//!   threads    … │ REACH: thread-local storage │ thread pointer │ ABOVE: control block │ …
//! ```
//!
//! A call that keeps all threads from writing some memory must leave this out, or its own thread sleeps too, and
//! no thread is left to wake it. It writes frames around the stack pointer; the kernel writes the area of restartable sequences,
//! which libc has beside the thread pointer, each time that the thread was preempted.

use std::ops::Range;

/// So far around the stack pointer a call of this project has frames, and so far below its thread pointer a thread has its
/// static thread-local storage.
const REACH: usize = 64 * 1024;
/// So far above the thread pointer libc's control block goes.
const ABOVE: usize = 8192;
const PAGE: usize = crate::PAGE;

/// The memory a thread stands on, in whole pages.
#[derive(Clone, Debug)]
pub struct Footing([Range<usize>; 2]);

impl Footing {
    /// The calling thread's, as long as the caller has not returned.
    #[must_use]
    pub fn here() -> Self {
        let [stack, thread] = points();
        Self([around(stack, REACH, REACH), around(thread, REACH, ABOVE)])
    }

    /// Whether the page at `at` belongs to it, and up to where those behind it, `end` at most, do as well, or do not.
    #[must_use]
    pub fn part(&self, at: usize, end: usize) -> (bool, usize) {
        let Self(ranges) = self;
        let holds = ranges.iter().find(|range| range.contains(&at));
        let stop = match holds {
            Some(range) => range.end,
            None => {
                let starts = ranges.iter().map(|range| range.start);
                starts.filter(|&start| at < start).min().unwrap_or(end)
            }
        };
        (holds.is_some(), stop.min(end))
    }
}

/// Whether `[start, start + len)` has the very frame of the caller, or the calling thread's control block.
#[must_use]
pub fn stands_on(start: usize, len: usize) -> bool {
    let mut points = points().into_iter();
    points.any(|point| point.wrapping_sub(start) < len)
}

/// The stack pointer, more or less, and the thread pointer.
#[inline(always)]
fn points() -> [usize; 2] {
    let here = 0_u8;
    [(&raw const here).addr(), thread_pointer()]
}

fn around(point: usize, below: usize, above: usize) -> Range<usize> {
    let end = point.saturating_add(above).next_multiple_of(PAGE);
    point.saturating_sub(below) & !(PAGE - 1)..end
}

#[cfg(target_arch = "x86_64")]
fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: the ABI wants the first word of the control block to point to itself.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    pointer
}

#[cfg(target_arch = "aarch64")]
fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads a register.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stands_on_its_stack_and_its_control_block() {
        let local = 0_u8;
        let at = (&raw const local).addr();
        // SAFETY: libc's errno of this thread.
        let errno = unsafe { libc::__errno_location() }.addr();
        for point in [at, errno, thread_pointer()] {
            assert!(Footing::here().part(point, usize::MAX).0);
        }
        assert!(stands_on(at & !0xffff, 0x20000) && stands_on(thread_pointer(), 1));
        let other = std::thread::spawn(move || Footing::here().part(at, at + 1).0);
        assert!(!other.join().unwrap());
    }

    #[test]
    fn a_range_falls_into_parts() {
        let footing = Footing([
            around(0x50_0800, REACH, REACH),
            around(0x51_5000, REACH, ABOVE),
        ]);
        assert_eq!(footing.part(0x1000, 0x2000), (false, 0x2000));
        assert_eq!(footing.part(0x1000, 0x90_0000), (false, 0x4f_0000));
        assert_eq!(footing.part(0x4f_0000, 0x90_0000), (true, 0x51_1000));
        assert_eq!(footing.part(0x51_1000, 0x90_0000), (true, 0x51_7000));
        assert_eq!(footing.part(0x51_7000, 0x90_0000), (false, 0x90_0000));
        assert_eq!(footing.part(0x50_0000, 0x50_1000), (true, 0x50_1000));
    }
}
