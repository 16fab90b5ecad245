//! Whether a process locks all that it will map: a test alone in its process, for it holds for all of that.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use sys::mapping::{find_locks_future, locks_future};

#[test]
fn it_is_found_whether_all_that_will_be_mapped_is_locked() {
    find_locks_future().unwrap();
    assert!(!locks_future());
    // SAFETY: what is locked changes no content.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        return eprintln!("skipped: nothing may be locked here");
    }
    find_locks_future().unwrap();
    assert!(locks_future());
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlockall() }, 0);
    find_locks_future().unwrap();
    assert!(!locks_future());
}
