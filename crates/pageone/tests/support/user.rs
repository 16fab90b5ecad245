//! Acting as another user, in this process.
#![allow(dead_code, reason = "each test binary uses a part of it")]

/// Does `act` on a thread with the rights of user and group `id` alone. Needs root.
pub(crate) fn as_user<T: Send>(id: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            become_user(id);
            act()
        });
        match acting.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Gives the calling thread, and no other, the rights of user and group `id`.
pub(crate) fn become_user(id: u32) {
    // SAFETY: the calls take numbers; those of the kernel, not of libc, count for one thread.
    let done = unsafe {
        [
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()),
            libc::syscall(libc::SYS_setresgid, id, id, id),
            libc::syscall(libc::SYS_setresuid, id, id, id),
        ]
    };
    assert_eq!(done, [0; 3], "no right to become user {id}");
}
