//! The heir: a process that shares this one's descriptors, and is the last to let go of them.
//!
//! The end of a process closes all that it has open, and its parent hears of it only afterwards. That takes seconds where
//! a stranger has a million locks on some of the files ([`closers`](crate::closers)). So a child that shares the
//! table of descriptors outlives the process:
//!
//! ```text
//!  process   appoint() ─▶ exit: lets go of the table, closes nothing ─▶ its parent hears of the end
//!  heir          └─ sleeps ──────────────────────────────────────────────┴▶ exit: closes all, as long as it takes
//! ```
//!
//! The table goes with the last process that has it, so it does not matter which thread closes which descriptor meanwhile. The
//! child shares the memory too: no page table is copied. It lets go of the memory before it closes.
//!
//! The tempting alternatives: to close in a thread at the end waits all the same, for exit ends no thread inside the
//! kernel; to execute another program closes first.
//!
//! **The limit**: a close(2) that a thread of this process is in when it ends. And a process that ends without a word (SIGKILL)
//! has no heir.
//!
//! Source: `exit_files()` and `close_files()` in fs/file.c, `do_exit()` in kernel/exit.c.

use std::ffi::c_void;
use std::os::fd::IntoRawFd;

use rustix::io::{Errno, Result};
use rustix::process::PidfdFlags;

use crate::thread::{block_signals, leave, restore_signals};

const STACK_BYTES: usize = 64 * 1024;
/// Aligned as a stack must be.
#[repr(align(16))]
struct Stack([u8; STACK_BYTES]);

/// Has a child take over all descriptors when this process ends. To be called once, right before the end.
///
/// # Errors
/// What pidfd_open(2) and clone(2) give: then this process closes what it has open.
pub fn appoint() -> Result<()> {
    const FLAGS: i32 = libc::CLONE_VM | libc::CLONE_FILES;
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    let number = std::ptr::without_provenance_mut(own.into_raw_fd().cast_unsigned() as usize);
    let stack = Box::leak(Box::new(Stack([0; STACK_BYTES])));
    let top = stack.0.as_mut_ptr_range().end;
    let old = block_signals();
    // SAFETY: nothing else uses the stack, for good. The child shares memory with threads that run on, and touches
    // its own stack alone: no libc, no `errno`.
    let child = unsafe { libc::clone(outlive, top.cast(), FLAGS, number) };
    let error = std::io::Error::last_os_error();
    restore_signals(old);
    match child {
        -1 => Err(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)),
        _ => Ok(()),
    }
}

/// Sleeps until the process of this pidfd has ended, with all its threads, and ends.
extern "C" fn outlive(pidfd: *mut c_void) -> libc::c_int {
    #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)] // a descriptor's number
    let mut ended = libc::pollfd {
        fd: pidfd.addr() as libc::c_int,
        events: libc::POLLIN,
        revents: 0,
    };
    let args = [(&raw mut ended).expose_provenance(), 1, 0, 0, 0, 0];
    // SAFETY: the kernel reads and writes `ended`, which nothing else has.
    while unsafe { crate::raw::call(libc::SYS_ppoll, args) } == Err(Errno::INTR) {}
    leave(0)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    const NAME: &str = "heir::tests::the_descriptors_outlive_the_process";

    /// A child, this test again, appoints an heir, and the pipe that both have is open until the heir has ended too.
    #[test]
    fn the_descriptors_outlive_the_process() {
        if std::env::var_os("PAGEONE_TEST_HEIR").is_some() {
            appoint().unwrap();
            // The heir is stopped before it can see the end.
            let heir = std::fs::read_to_string("/proc/thread-self/children").unwrap();
            let heir = heir
                .trim()
                .parse()
                .ok()
                .and_then(rustix::process::Pid::from_raw);
            rustix::process::kill_process(heir.unwrap(), rustix::process::Signal::STOP).unwrap();
            eprintln!("heir {}", heir.unwrap().as_raw_nonzero());
            std::process::exit(0);
        }
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--nocapture"])
            .env("PAGEONE_TEST_HEIR", "1")
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = child.stderr.take().unwrap();
        assert!(child.wait().unwrap().success());
        let mut words = [0; 64];
        let len = said.read(&mut words).unwrap();
        let words = String::from_utf8_lossy(&words[..len]).into_owned();
        let heir = words.trim().strip_prefix("heir ").unwrap().parse().unwrap();
        // The pipe is still open: there is nothing to read, and no end.
        rustix::io::ioctl_fionbio(&said, true).unwrap();
        let open = said.read(&mut [0; 1]).unwrap_err();
        assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock);
        rustix::io::ioctl_fionbio(&said, false).unwrap();
        let heir = rustix::process::Pid::from_raw(heir).unwrap();
        rustix::process::kill_process(heir, rustix::process::Signal::CONT).unwrap();
        assert_eq!(said.read(&mut [0; 1]).unwrap(), 0);
    }
}
