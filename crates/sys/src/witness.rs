//! A thread of another process that vouches for its address space.
//!
//! A process changes its address space by execve(2) alone. It then ends all its threads but the one that
//! calls, and that one becomes the first: it takes the process's number, and its own ends. So while a thread
//! that is *not* the first lives, its process lives, no other has its number, and its address space is
//! the one that it had when the thread was found:
//!
//! ```text
//!   thread found ─────── read by number, of whatever kind ─────── thread lives
//!        │◀──── one process, one address space, the number is theirs ────▶│
//! ```
//!
//! All that was read by number before the thread is seen to live was therefore read from that address
//! space. The order counts: to look first and to read then proves nothing.
//!
//! The tempting alternatives: a descriptor of the process (pidfd) is the same after execve. A page shared with
//! the process, with a challenge in it, is seen by all who have the page. They may hand its bytes to a
//! program with more rights than theirs. `/proc/PID/mem` held open is bound to the address space as well, but
//! copies each byte twice: a page costs a third more in runs, and twice as much alone.
//!
//! Source: `de_thread()` and `exec_mmap()` in `fs/exec.c`; clone(2): `CLONE_THREAD` needs `CLONE_VM`.

use std::os::fd::OwnedFd;

use rustix::io::{Errno, Result};

use crate::fault::{self, Point};

/// The most threads that are looked through for one.
const MOST_THREADS: usize = 4096;

/// `PF_IO_WORKER` and `PF_USER_WORKER`: threads that the kernel made. Before Linux 6.10 execve did not wait for
/// some of them.
const KERNEL_MADE: u64 = 0x10 | 0x4000;

/// A thread of a process, not its first.
#[derive(Debug)]
pub struct Witness {
    thread: u32,
    /// Its `comm`: can be read for as long as it lives.
    sign: OwnedFd,
}

impl Witness {
    /// The thread of process `pid` that calls itself `number`, in its own namespace. `None` when there is
    /// none, it is the first, or the kernel's own.
    ///
    /// The caller has to know that `pid` still is the process it means *after* this call.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub fn find(pid: u32, number: u32) -> std::io::Result<Option<Self>> {
        fault::check(Point::Proc)?;
        // Without a namespace of its own the number is the same. A text of the thread's would say so, too, and list its groups.
        let same = is_in_own_namespace(pid)
            || own_number(pid, number).is_ok_and(|own| own == Some(number));
        let thread = match same {
            true => Some(number),
            false => search(pid, number)?,
        };
        let Some(thread) = thread.filter(|&thread| thread != pid) else {
            return Ok(None);
        };
        let made_by_kernel = is_made_by_kernel(pid, thread);
        let path = format!("/proc/{pid}/task/{thread}/comm");
        let sign = match crate::text::open(path) {
            // The process has no such thread.
            Err(Errno::NOENT | Errno::SRCH) => return Ok(None),
            sign => sign?.into(),
        };
        Ok((!made_by_kernel).then_some(Self { thread, sign }))
    }

    /// Its number in this process's namespace.
    #[must_use]
    pub fn thread(&self) -> u32 {
        self.thread
    }

    /// Whether it lives.
    #[must_use]
    pub fn lives(&self) -> bool {
        matches!(rustix::io::pread(&self.sign, &mut [0; 1], 0), Ok(1))
    }

    /// What `look` gives, if all of it came from the witness's address space.
    ///
    /// # Errors
    /// `SRCH` when the process is gone, runs another program, or has lost this thread.
    pub fn vouch<T>(&self, look: impl FnOnce() -> T) -> Result<T> {
        let seen = look();
        match self.lives() {
            true => Ok(seen),
            false => Err(Errno::SRCH),
        }
    }
}

/// The numbers of a process's threads, of `most` at most.
///
/// # Errors
/// What reading /proc gives.
pub fn threads(pid: u32, most: usize) -> std::io::Result<impl Iterator<Item = u32>> {
    Ok(crate::text::numbers(format!("/proc/{pid}/task"), most)?.into_iter())
}

/// The same of the threads from place `skip` on.
///
/// # Errors
/// As [`threads`].
pub fn threads_from(pid: u32, skip: u64, most: usize) -> std::io::Result<Vec<u32>> {
    crate::text::numbers_from(format!("/proc/{pid}/task"), skip, most)
}

/// The thread of `pid` that has this number in its own namespace.
fn search(pid: u32, number: u32) -> std::io::Result<Option<u32>> {
    for thread in threads(pid, MOST_THREADS)? {
        match own_number(pid, thread) {
            Ok(own) if own == Some(number) => return Ok(Some(thread)),
            // Too long a text: the next ones would take as long.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => return Err(error),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(None)
}

/// Whether a process has this one's PID namespace; false where the kernel does not tell. The links are not opened: a stranger may have
/// locks on what they lead to.
fn is_in_own_namespace(pid: u32) -> bool {
    let link = |of: &dyn std::fmt::Display| std::fs::read_link(format!("/proc/{of}/ns/pid")).ok();
    let its = link(&pid);
    its.is_some() && its == link(&"self")
}

fn own_number(pid: u32, thread: u32) -> std::io::Result<Option<u32>> {
    let status = crate::credentials::status(pid, thread)?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("NSpid:"));
    let number = line.and_then(|line| line.split_ascii_whitespace().next_back());
    Ok(number.and_then(|number| number.parse().ok()))
}

/// Whether a thread never runs code of its process, as those of io_uring and vhost. One that has ended never does.
#[must_use]
pub(crate) fn is_made_by_kernel(pid: u32, thread: u32) -> bool {
    flags(pid, thread).is_none_or(|flags| flags & KERNEL_MADE != 0)
}

fn flags(pid: u32, thread: u32) -> Option<u64> {
    let stat = crate::text::about(format!("/proc/{pid}/task/{thread}/stat")).ok()?;
    // The name stands in brackets and may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(6)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::thread_id;

    #[test]
    fn a_thread_vouches_until_it_ends() {
        let own = std::process::id();
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send(thread_id()).unwrap();
            let _ = ended.recv();
        });
        let number = told.recv().unwrap();
        let witness = Witness::find(own, number).unwrap().expect("a witness");
        assert_eq!((witness.thread(), witness.lives()), (number, true));
        assert!(
            threads(own, MOST_THREADS)
                .unwrap()
                .any(|thread| thread == number)
        );
        assert_eq!(witness.vouch(|| 7), Ok(7));
        drop(end);
        thread.join().unwrap();
        // join returns a moment before the kernel lets go of the thread.
        while witness.lives() {
            std::thread::yield_now();
        }
        assert_eq!(witness.vouch(|| 7), Err(Errno::SRCH));
        assert!(Witness::find(own, number).unwrap().is_none());
    }

    #[test]
    fn the_first_thread_and_those_of_others_are_none() {
        let own = std::process::id();
        assert!(Witness::find(own, own).unwrap().is_none());
        let mut child = std::process::Command::new("sleep");
        let mut child = child.arg("60").spawn().unwrap();
        assert!(Witness::find(own, child.id()).unwrap().is_none());
        assert!(Witness::find(child.id(), child.id()).unwrap().is_none());
        assert!(Witness::find(child.id(), thread_id()).unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Witness::find(child.id(), child.id()).is_err());
    }
}
