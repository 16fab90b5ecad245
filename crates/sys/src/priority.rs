//! The priority of threads: those that yield the CPU to everyone, and for how long they do not.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Result;

use crate::raw;

thread_local! {
    /// Whether the thread has stepped back behind all others.
    static YIELDS: Cell<bool> = const { Cell::new(false) };
}

/// Lets the calling thread run only on CPUs that nothing else wants (`SCHED_IDLE`), except in
/// [`without_yielding`].
///
/// # Errors
/// Whatever sched_setscheduler(2) gives.
pub fn yield_to_everyone() -> Result<()> {
    set_policy(libc::SCHED_IDLE)?;
    YIELDS.set(true);
    Ok(())
}

/// Does `act` at ordinary priority, whether the thread yields to everyone or not.
///
/// The kernel's locks know no priorities: a thread that holds another process's memory map and gets no
/// CPU, because all are busy, makes that process wait for as long, seconds even. So whatever takes
/// such a lock is done here, and it should be short.
///
/// Without the right to raise its priority again (root has it, and who has `RLIMIT_NICE` 20) a thread stays as
/// it is.
pub fn without_yielding<T>(act: impl FnOnce() -> T) -> T {
    /// Steps back again, after a panic too.
    struct Back;
    impl Drop for Back {
        fn drop(&mut self) {
            // It was allowed before, and takes no right.
            let _ = set_policy(libc::SCHED_IDLE);
        }
    }
    let _back = (YIELDS.get() && set_policy(libc::SCHED_OTHER).is_ok()).then(|| Back);
    act()
}

/// Whether threads yield to nobody any more.
static HURRIES: AtomicBool = AtomicBool::new(false);

/// From here on no thread of this process yields any more: the threads that `list` gives, and those that come later, have
/// ordinary priority. The mark comes first, so a thread that is not listed yet finds it.
pub(crate) fn yield_no_more<T: IntoIterator<Item = u32>>(list: impl FnOnce() -> T) {
    HURRIES.store(true, Ordering::Relaxed);
    for thread in list() {
        // A thread that has ended is no error, and without the right to it all stays slow.
        let _ = set_policy_of(thread.cast_signed(), libc::SCHED_OTHER);
    }
}

pub(crate) fn set_policy(policy: i32) -> Result<()> {
    match policy == libc::SCHED_IDLE && HURRIES.load(Ordering::Relaxed) {
        true => Ok(()),
        false => set_policy_of(0, policy),
    }
}

/// Sets the policy of a thread, 0 for the calling one.
fn set_policy_of(thread: i32, policy: i32) -> Result<()> {
    // The priority that both policies want.
    let none: libc::c_int = 0;
    let place = (&raw const none).expose_provenance();
    let [thread, policy] = [thread, policy].map(|number| number.cast_unsigned() as usize);
    let args = [thread, policy, place, 0, 0, 0];
    // SAFETY: the call reads a `sched_param`, which is one number, and changes nothing but when threads run.
    unsafe { raw::call(libc::SYS_sched_setscheduler, args) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_can_step_back() {
        // SAFETY: no pointer is involved; 0 names the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        assert_eq!(
            without_yielding(policy),
            before,
            "who does not yield is left alone"
        );
        let policies = std::thread::spawn(move || {
            yield_to_everyone().unwrap();
            let inside = without_yielding(policy);
            let fell = std::panic::catch_unwind(|| without_yielding(|| panic!("on purpose")));
            assert!(fell.is_err());
            (inside, policy())
        });
        assert_eq!(
            policies.join().unwrap(),
            (libc::SCHED_OTHER, libc::SCHED_IDLE)
        );
    }
}
