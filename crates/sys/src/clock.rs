//! Clocks, by a system call.
//!
//! libc and rustix read them through the vDSO. A program may have unmapped that, or forbidden its threads to read the
//! time-stamp counter (PR_SET_TSC), which the thread of the agent inherits: the vDSO ends it then.

use std::time::Duration;

/// Time since the machine started.
#[must_use]
pub fn monotonic() -> Duration {
    read(libc::CLOCK_MONOTONIC)
}

/// CPU time of the calling thread.
#[must_use]
pub fn of_thread() -> Duration {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = [0u64; 2];
    let to = (&raw mut time).expose_provenance();
    let clock = clock.unsigned_abs() as usize;
    // SAFETY: the kernel writes these 16 bytes.
    let _ = unsafe { crate::raw::call(libc::SYS_clock_gettime, [clock, to, 0, 0, 0, 0]) };
    let [secs, nanos] = time;
    Duration::new(secs, u32::try_from(nanos).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_the_kernels() {
        let known = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let passed = monotonic() - Duration::from_secs(known.tv_sec.unsigned_abs());
        assert!(passed < Duration::from_secs(10), "{passed:?}");
        let begun = of_thread();
        while of_thread() == begun {}
        assert!(of_thread() < monotonic());
    }
}
