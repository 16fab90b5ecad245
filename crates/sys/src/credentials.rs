//! Whose process another one is: the ids of its threads, and whether its memory is a secret.
//!
//! Everything here goes by number; see [`crate::witness`] for how to know whose it was.
//!
//! Where the kernel knows `PIDFD_GET_INFO` (Linux 6.13), it is asked for the ids alone. Before, the only text with all of them is a
//! thread's status. It lists the groups, too, of which there may be 65536: the kernel takes 20 ms for these, of each thread and at each
//! look. So that text is read up to a bound, and a process beyond it is refused.
//!
//! Source: proc(5), credentials(7), `task_dump_owner()` in `fs/proc/base.c`, `pidfd_info()` in `fs/pidfs.c`.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::fault::{self, Point};

/// The ids of a thread: real, effective, saved and of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// User ids.
    pub users: [u32; 4],
    /// Group ids.
    pub groups: [u32; 4],
}

impl Credentials {
    /// Those of a thread all of whose ids are these.
    #[must_use]
    pub fn plain(user: u32, group: u32) -> Self {
        Self {
            users: [user; 4],
            groups: [group; 4],
        }
    }

    /// The user by whose rights it acts.
    #[must_use]
    pub fn effective_user(&self) -> u32 {
        self.users[1]
    }

    /// The group by whose rights it acts.
    #[must_use]
    pub fn effective_group(&self) -> u32 {
        self.groups[1]
    }

    /// Those of `thread` of process `pid`.
    ///
    /// # Errors
    /// What reading /proc gives, `NotFound` or `ESRCH` when the thread is gone; `InvalidData` for a text
    /// without the ids, or of a thread in too many groups.
    pub fn of(pid: u32, thread: u32) -> std::io::Result<Self> {
        fault::check(Point::Proc)?;
        static IS_OLD: AtomicBool = AtomicBool::new(false);
        if !IS_OLD.load(Relaxed) {
            match told(pid, thread) {
                Err(error) if is_unknown(&error) => IS_OLD.store(true, Relaxed),
                told => return told,
            }
        }
        let bad = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        Self::parse(&status(pid, thread)?).ok_or_else(bad)
    }

    fn parse(status: &str) -> Option<Self> {
        let ids = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let mut numbers = line.split_ascii_whitespace().map(str::parse);
            let mut next = || numbers.next()?.ok();
            Some([next()?, next()?, next()?, next()?])
        };
        Some(Self {
            users: ids("Uid:")?,
            groups: ids("Gid:")?,
        })
    }
}

/// `struct pidfd_info`, as long as it was at first.
#[repr(C)]
#[derive(Default)]
struct Info {
    mask: u64,
    cgroup: u64,
    thread: u32,
    process: u32,
    parent: u32,
    /// User and group, real first, then effective, saved and of the file system.
    ids: [[u32; 2]; 4],
    exit_code: i32,
}

/// What the kernel says of a thread's ids, without a text.
fn told(pid: u32, thread: u32) -> std::io::Result<Credentials> {
    let name = format!("/proc/{pid}/task/{thread}/pidfd");
    crate::text::with_open(Path::new(&name), || open(thread), |file| ask(file, pid))
}

fn open(thread: u32) -> std::io::Result<File> {
    fault::check(Point::PidfdInfo)?;
    // The flag has the bit of O_EXCL.
    let of_thread = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
    let thread = i32::try_from(thread).ok().and_then(Pid::from_raw);
    let pidfd: OwnedFd = rustix::process::pidfd_open(thread.ok_or(Errno::SRCH)?, of_thread)?;
    Ok(pidfd.into())
}

fn ask(pidfd: &File, pid: u32) -> std::io::Result<Credentials> {
    /// `PIDFD_GET_INFO`, for a structure of 64 bytes.
    const GET_INFO: usize = 0xc040_ff0b;
    const CREDENTIALS: u64 = 1 << 1;
    const { assert!(size_of::<Info>() == 64) };
    let mut info = Info {
        mask: CREDENTIALS,
        ..Info::default()
    };
    let fd = pidfd.as_raw_fd().cast_unsigned() as usize;
    let args = [fd, GET_INFO, (&raw mut info).expose_provenance(), 0, 0, 0];
    // SAFETY: the kernel reads and writes `info`, which nothing else has, and not more than the 64 bytes that the request names.
    unsafe { crate::raw::call(libc::SYS_ioctl, args) }?;
    if info.mask & CREDENTIALS == 0 {
        return Err(Errno::NOTTY.into());
    }
    // The number was another process's thread when it was opened.
    if info.process != pid {
        return Err(Errno::SRCH.into());
    }
    let [real, effective, saved, files] = info.ids;
    let of = |at: usize| [real[at], effective[at], saved[at], files[at]];
    Ok(Credentials {
        users: of(0),
        groups: of(1),
    })
}

/// Whether the kernel has no such call, or no such request.
fn is_unknown(error: &std::io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOTTY | Errno::INVAL | Errno::NOSYS))
}

/// The most bytes of a thread's status.
const MOST_STATUS: u64 = 16 * 1024;

/// The status of a thread, which is not in more than about 1500 groups.
pub(crate) fn status(pid: u32, thread: u32) -> std::io::Result<String> {
    let path = format!("/proc/{pid}/task/{thread}/status");
    let bytes = crate::text::begin_of(path.as_ref(), path.as_ref(), MOST_STATUS)?;
    if bytes.len() as u64 == MOST_STATUS {
        let why = format!("the status of thread {thread} has more than {MOST_STATUS} bytes");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, why));
    }
    // A name may be no text. The kernel writes it on one line, whatever it holds.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl fmt::Display for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, ids: [u32; 4]| match ids {
            [id, others @ ..] if others == [id; 3] => write!(f, "{id}"),
            [real, effective, saved, files] => write!(
                f,
                "{effective} (real {real}, saved {saved}, for files {files})"
            ),
        };
        write!(f, "user ")?;
        list(f, self.users)?;
        write!(f, ", group ")?;
        list(f, self.groups)
    }
}

/// Whether process `pid`, whose effective user is `user`, is one whose memory others must not see
/// (`PR_SET_DUMPABLE`): the kernel gives its files in /proc to the super-user then. Of the super-user's own
/// processes it cannot be told, and this says no.
///
/// # Errors
/// What stat(2) gives.
pub fn is_secret(pid: u32, user: u32) -> std::io::Result<bool> {
    fault::check(Point::Proc)?;
    // Not the folder itself: that always belongs to the user.
    let owner = std::fs::metadata(format!("/proc/{pid}/maps"))?.uid();
    Ok(owner != user)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn ids_are_read_and_told() {
        let own = std::process::id();
        let user = rustix::process::geteuid().as_raw();
        let group = rustix::process::getegid().as_raw();
        let ids = Credentials::of(own, crate::process::thread_id()).unwrap();
        assert_eq!(ids, Credentials::plain(user, group));
        assert!(Credentials::of(own, u32::MAX).is_err());
        assert_eq!(ids.to_string(), format!("user {user}, group {group}"));
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t5\t5\t5\n";
        let ids = Credentials::parse(status).unwrap();
        assert_eq!((ids.users, ids.groups), ([1, 2, 3, 4], [5; 4]));
        let told = "user 2 (real 1, saved 3, for files 4), group 5";
        assert_eq!(ids.to_string(), told);
        assert_eq!(
            Credentials::parse("Uid:\t1\t2\t3\nGid:\t5\t5\t5\t5\n"),
            None
        );
    }

    #[test]
    fn the_kernel_tells_what_its_text_says() {
        let own = std::process::id();
        let thread = crate::process::thread_id();
        let text = Credentials::parse(&status(own, thread).unwrap()).unwrap();
        match told(own, thread) {
            Err(error) if is_unknown(&error) => eprintln!("skipped: before Linux 6.13"),
            told => assert_eq!(told.unwrap(), text),
        }
        // Of another process's thread nothing is told.
        assert!(told(own, 1).is_err() && told(1, thread).is_err());
        // Ids of four kinds, in their order.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let ids = "use POSIX; syscall(119, 11, 12, 13); syscall(117, 21, 22, 23); print \"\\n\"; sleep 60";
        let mut perl = Command::new("perl");
        perl.args(["-e", &format!("$| = 1; {ids}")]);
        let mut child = perl.stdout(std::process::Stdio::piped()).spawn().unwrap();
        std::io::Read::read_exact(&mut child.stdout.take().unwrap(), &mut [0; 1]).unwrap();
        let found = Credentials::of(child.id(), child.id());
        let text = Credentials::parse(&status(child.id(), child.id()).unwrap());
        end(child);
        let found = found.unwrap();
        assert_eq!(
            (found.users, found.groups),
            ([21, 22, 23, 22], [11, 12, 13, 12])
        );
        assert_eq!(Some(found), text);
    }

    #[test]
    fn a_secret_process_is_told() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can become another user");
            return;
        }
        for (secret, dumpable) in [(false, 1), (true, 0)] {
            let mut perl = Command::new("perl");
            let script = "syscall(157, 4, 0 + $ARGV[0], 0, 0, 0); print \"\\n\"; sleep 60";
            perl.args(["-e", &format!("$| = 1; {script}"), &dumpable.to_string()]);
            perl.uid(61_010).gid(61_010).current_dir("/");
            perl.stdout(std::process::Stdio::piped());
            let mut child = perl.spawn().unwrap();
            let mut line = [0; 1];
            std::io::Read::read_exact(&mut child.stdout.take().unwrap(), &mut line).unwrap();
            assert_eq!(is_secret(child.id(), 61_010).unwrap(), secret);
            end(child);
        }
    }
}
