//! `pageone_merge`: a thread of the program asks the engine to merge memory now, and waits for the answer.
//!
//! It asks on a connection of its own, as the command `pageone merge` does. The agent's thread answers the engine's questions
//! meanwhile, so the caller must not hold the table's lock.
//!
//! The thread waits for the engine (I7's exception), because the program asked for that. It does so until a deadline, whatever
//! interrupts it: for a place in the queue of the engine's socket as well as for the answer.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};
use sys::socket;
use wire::{Hello, MAX_MESSAGE, Name, Now, Role};

use crate::config::config;
use crate::offer::whole_pages;
use crate::session::is_trusted;

/// The engine may be in a round, which takes some of its periods at most.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long to wait for a place in the queue of the engine's socket. It takes connections before all else.
const CONNECTING: Duration = Duration::from_secs(10);
/// Time between two looks whether there is one.
const PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// Has `[start, start + len)` merged now; gives the pages that share a copy now and did not before.
///
/// # Errors
/// If no page was merged:
/// - `INVAL`: the range is not made of pages.
/// - `NOTCONN`: no engine serves this process.
/// - `BUSY`: its memory may be written unseen.
/// - `AGAIN`: too much waits, or the agent was too slow.
/// - `PERM`: the engine is another user's.
/// - `PROTO`: it speaks another protocol.
/// - `TIMEDOUT`, or what connecting gives.
pub(crate) fn merge(start: usize, len: usize) -> Result<u64> {
    let len = whole_pages(start, len)?;
    let path = CStr::from_bytes_until_nul(&config().path).map_err(|_| Errno::NAMETOOLONG)?;
    let begin = Instant::now();
    let mut packet = [0; MAX_MESSAGE];
    let socket = connect(path, begin + CONNECTING)?;
    let hello = Hello {
        role: Role::Control,
        domain: Name::default(),
    };
    let size = hello.encode(&mut packet);
    socket::send(&socket, packet.get(..size).unwrap_or_default(), &[])?;
    let size = wire::put_merge_now(start as u64, (start + len) as u64, &mut packet);
    socket::send(&socket, packet.get(..size).unwrap_or_default(), &[])?;
    wait(&socket, begin + PATIENCE)?;
    let received = socket::recv(&socket, &mut packet)?;
    if received.len == 0 {
        return Err(Errno::NOTCONN); // it ended
    }
    match wire::get_merged_now(packet.get(..received.len).unwrap_or_default()) {
        Some(Now::Merged(pages)) => Ok(pages),
        Some(Now::Unseen) => Err(Errno::BUSY),
        Some(Now::Later) => Err(Errno::AGAIN),
        Some(Now::Refused) => Err(Errno::NOTCONN),
        None => Err(Errno::PROTO),
    }
}

fn connect(path: &CStr, deadline: Instant) -> Result<OwnedFd> {
    let socket = loop {
        match socket::connect_at_once(path) {
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Err(Errno::NOTCONN),
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                let _ = rustix::thread::nanosleep(&PAUSE);
            }
            Err(Errno::AGAIN) => return Err(Errno::TIMEDOUT),
            other => break other?,
        }
    };
    match is_trusted(&socket::peer(&socket)?) {
        true => Ok(socket),
        false => Err(Errno::PERM),
    }
}

fn wait(socket: &OwnedFd, deadline: Instant) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        let mut ready = [PollFd::new(socket, PollFlags::IN)];
        match poll(&mut ready, Some(&left)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    const SHORT: Duration = Duration::from_millis(200);

    extern "C" fn nothing(_: libc::c_int) {}

    #[test]
    fn signals_do_not_lengthen_the_wait() {
        // SAFETY: plain numbers, for which zero is valid: no flags, an empty set.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        // SAFETY: the handler does nothing, and nothing else here uses this signal.
        let set =
            unsafe { libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()) };
        assert_eq!(set, 0);
        let (ours, _theirs) = socket::pair().expect("sockets");
        // SAFETY: always allowed.
        let waiter = unsafe { libc::pthread_self() };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Without the deadline the wait would last as long as the signals.
                let begin = Instant::now();
                while !done.load(Relaxed) && begin.elapsed() < SHORT * 100 {
                    // SAFETY: the thread waits for this scope to end.
                    unsafe { libc::pthread_kill(waiter, libc::SIGUSR2) };
                    std::thread::sleep(SHORT / 20);
                }
                assert!(done.load(Relaxed), "it goes on waiting");
            });
            let waited = wait(&ours, Instant::now() + SHORT);
            done.store(true, Relaxed);
            assert_eq!(waited, Err(Errno::TIMEDOUT));
        });
    }

    #[test]
    fn nobody_waits_for_ever_for_a_place_in_the_queue() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let text = CString::new(path.as_os_str().as_bytes()).expect("a path");
        let deadline = || Instant::now() + SHORT;
        assert_eq!(connect(&text, deadline()).err(), Some(Errno::NOTCONN));
        let listener = socket::listen(&path).expect("a listener");
        // SAFETY: a call with plain numbers: room for one.
        let room = unsafe { libc::listen(listener.as_raw_fd(), 0) };
        assert_eq!(room, 0);
        let mut waiting = Vec::new();
        while let Ok(socket) = socket::connect_at_once(&path) {
            waiting.push(socket);
        }
        assert_eq!(connect(&text, deadline()).err(), Some(Errno::TIMEDOUT));
        drop(listener);
        assert_eq!(connect(&text, deadline()).err(), Some(Errno::NOTCONN));
    }
}
