//! Parts of a process that could write its pages past the page tables: memory pinned for long.
//!
//! The holder of a pin (direct I/O in flight, a registered buffer, a device) writes the page's frame
//! without a page fault. The kernel tells no process which pages are pinned, so the question is asked
//! of the whole process, and the other way round. [`find`] knows the kinds of descriptors that
//! never pin, and names the first that is of another kind.
//!
//! | a descriptor | is known by | harmless |
//! |---|---|---|
//! | anonymous | its name, `anon_inode:…` | `ANONYMOUS` |
//! | a socket | its protocol, an extended attribute of each socket | `SOCKETS` |
//! | a pipe | its name | always |
//! | a device | its path in `/dev` | `DEVICES` |
//! | a file, a folder | its flags, and the type of the file system that it is mounted from | without `O_DIRECT`, `FILE_SYSTEMS` |
//!
//! Among those that are not: io_uring (the kernel shows registered buffers and files, but neither rings of provided
//! buffers nor registered memory), `AF_XDP` (umem), RDMA (`/dev/infiniband`), VFIO and iommufd, SEV (`/dev/sev`), vhost-scsi.
//!
//! All of it comes from `/proc`, whatever hangs: the file system itself is not asked, because one that does not answer
//! would keep the caller. The tempting alternative, statfs(2) in a thread of its own with a deadline, loses a thread a
//! guest.
//!
//! **Borrowers.** A pin shows in the page's count, and UFFDIO_MOVE refuses such a page. A plain reference (FOLL_GET) does not
//! show. So [`find_borrower`] asks for less: what may write to pages without a pin. Direct I/O on file systems that go through
//! iomap or the block layer's helpers pins (`iov_iter_extract_pages`), that of others only refers. Before Linux 6.13 KVM, too,
//! only refers to pages of a machine that runs a machine itself.
//!
//! Source: proc(5) (`VmPin`), `Documentation/core-api/pin_user_pages.rst`, `io_uring/fdinfo.c`, `net/socket.c`
//! (`sockfs_xattr_get`).

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

use crate::foreign::ForeignName;
use crate::mounts::{self, Mounts};
use crate::{host, text};

/// Something that may hold pages pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Pages pinned for long, as the kernel counts them, in KiB.
    Memory(u64),
    /// A descriptor: its number and what it is.
    Descriptor(u32, ForeignName),
    /// More descriptors or threads than were looked at.
    Crowd(u32),
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(kib) => write!(f, "{kib} KiB of its memory are pinned"),
            Self::Descriptor(fd, what) => write!(f, "its descriptor {fd} ({what}) can pin memory"),
            Self::Crowd(most) => {
                write!(
                    f,
                    "it has more than {most} descriptors or threads to look at"
                )
            }
        }
    }
}

/// Kinds of anonymous descriptors that never pin the memory of their process.
const ANONYMOUS: [&str; 13] = [
    "[eventpoll]",
    "[eventfd]",
    "[signalfd]",
    "[timerfd]",
    "[pidfd]",
    "[userfaultfd]",
    "[fanotify]",
    "[landlock-ruleset]",
    "inotify",
    "kvm-vm",
    "kvm-vcpu",
    "kvm-vm-stats",
    "kvm-vcpu-stats",
];

/// Protocols whose sockets copy what they receive. What they send without a copy is read only.
const SOCKETS: [&str; 20] = [
    "UNIX",
    "UNIX-STREAM",
    "UNIX-DGRAM",
    "TCP",
    "TCPv6",
    "MPTCP",
    "MPTCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "RAW",
    "RAWv6",
    "PING",
    "PINGv6",
    "NETLINK",
    "PACKET",
    "AF_VSOCK",
    "SCTP",
    "SCTPv6",
];

/// Devices that never pin the memory of their process; names that end in `/` are folders.
const DEVICES: [&str; 14] = [
    "null",
    "zero",
    "full",
    "random",
    "urandom",
    "tty",
    "console",
    "ptmx",
    "pts/",
    "shm/",
    "kvm",
    "net/tun",
    "vhost-net",
    "userfaultfd",
];

/// File systems whose files copy what is read from them, unless opened with `O_DIRECT`. FUSE and
/// 9P are not among them: they may let the other side write into the reader's pages.
const FILE_SYSTEMS: [&str; 27] = [
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "zfs",
    "vfat",
    "iso9660",
    "squashfs",
    "erofs",
    "overlay",
    "nfs",
    "nfs4",
    "rootfs",
    "tmpfs",
    "devtmpfs",
    "ramfs",
    "hugetlbfs",
    "proc",
    "sysfs",
    "cgroup",
    "cgroup2",
    "debugfs",
    "tracefs",
    "securityfs",
    "devpts",
];

/// File systems whose direct I/O pins the pages it writes to.
const PINNING: [&str; 7] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "vfat"];

/// The most tables of descriptors of a process that are looked at.
const MOST_TABLES: usize = 16;

/// Opens what each search reads besides, so that later ones need no descriptor for it. What cannot be opened is tried again.
pub fn prepare() {
    let _ = mounts::hosts();
}

/// The first thing found by which `pid`'s pages may be pinned; `None` when there is nothing. Looks at `most`
/// descriptors and threads, and never waits for a file system.
///
/// # Errors
/// What reading `/proc/PID` gives, mostly that the process is gone.
pub fn find(pid: u32, most: u32) -> io::Result<Option<Pin>> {
    crate::fault::check(crate::fault::Point::Proc)?;
    match pinned_kib(pid)? {
        Some(kib) => Ok(Some(Pin::Memory(kib))),
        None => search(pid, most, false),
    }
}

/// As [`find`], but what is known to pin whatever it writes to counts as harmless: memory that is pinned, and direct I/O on some
/// file systems.
///
/// # Errors
/// As [`find`].
pub fn find_borrower(pid: u32, most: u32) -> io::Result<Option<Pin>> {
    crate::fault::check(crate::fault::Point::Proc)?;
    search(pid, most, true)
}

fn search(pid: u32, most: u32, may_pin: bool) -> io::Result<Option<Pin>> {
    let mut search = Search {
        mounts: Mounts::of(pid),
        most,
        left: most,
        may_pin,
    };
    let mut tables = Vec::new();
    let mut threads = 0;
    let one_too_many = most.saturating_add(1) as usize;
    for task in text::numbers(format!("/proc/{pid}/task"), one_too_many)? {
        threads += 1;
        if threads > most || tables.len() > MOST_TABLES {
            return Ok(Some(Pin::Crowd(most)));
        }
        // Threads share one table of descriptors, as a rule.
        if tables.iter().any(|&known| share_files(known, task)) {
            continue;
        }
        tables.push(task);
        if let Some(pin) = search.find_in(pid, task)? {
            return Ok(Some(pin));
        }
    }
    Ok(None)
}

fn pinned_kib(pid: u32) -> io::Result<Option<u64>> {
    let status = text::about(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    Ok(kib.filter(|&kib| kib > 0))
}

/// Whether two threads have one table of descriptors; false where the kernel does not tell.
fn share_files(one: u32, other: u32) -> bool {
    const KCMP_FILES: libc::c_long = 2;
    // SAFETY: kcmp compares two tasks and takes numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_FILES, 0, 0) == 0 }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// One search of a process.
struct Search {
    mounts: Mounts,
    most: u32,
    /// Descriptors that may still be looked at.
    left: u32,
    /// Whether a descriptor is harmless that pins whatever it writes to.
    may_pin: bool,
}

impl Search {
    fn find_in(&mut self, pid: u32, task: u32) -> io::Result<Option<Pin>> {
        let folder = format!("/proc/{pid}/task/{task}");
        let one_too_many = self.left.saturating_add(1) as usize;
        let numbers = match text::numbers(format!("{folder}/fd"), one_too_many) {
            Err(error) if is_gone(&error) => return Ok(None), // the thread has ended
            other => other?,
        };
        for fd in numbers {
            if self.left == 0 {
                return Ok(Some(Pin::Crowd(self.most)));
            }
            self.left -= 1;
            match self.harmless(&folder, fd) {
                Ok(None) => {}
                Ok(Some(what)) => return Ok(Some(Pin::Descriptor(fd, what.into()))),
                Err(error) if is_gone(&error) => {} // closed meanwhile
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// `None` when the descriptor cannot pin memory, else what it is.
    fn harmless(&mut self, folder: &str, fd: u32) -> io::Result<Option<String>> {
        let path = format!("{folder}/fd/{fd}");
        let target = fs::read_link(&path)?;
        let target = target.to_string_lossy();
        let unless = |harmless: bool| (!harmless).then(|| target.clone().into_owned());
        if target.starts_with("pipe:") {
            return Ok(None);
        }
        if target.starts_with("socket:") {
            return socket(&path);
        }
        if let Some(known) = is_known(&target) {
            let borrows = self.may_pin && is_machine(&target) && machines_borrow();
            return Ok(unless(known && !borrows));
        }
        let info = Info::read(folder, fd)?;
        let pins = |kind: &str| PINNING.contains(&kind);
        if info.flags.contains(OFlags::DIRECT)
            && !(self.may_pin && self.mounts.kind(info.mount).is_some_and(pins))
        {
            return Ok(Some(format!("{target}, open with O_DIRECT")));
        }
        if target.starts_with("/memfd:") {
            return Ok(None);
        }
        let kind = self.mounts.kind(info.mount);
        let known = kind.is_some_and(|kind| FILE_SYSTEMS.contains(&kind));
        let kind = kind.unwrap_or("unknown");
        Ok((!known).then(|| format!("{target}, on a file system of type {kind}")))
    }
}

fn is_machine(target: &str) -> bool {
    target.starts_with("anon_inode:kvm-vm") || target.starts_with("anon_inode:kvm-vcpu")
}

/// Whether a machine in a machine may have the processor write to pages that KVM only refers to: so before Linux 6.13.
fn machines_borrow() -> bool {
    let is_old = |(major, minor)| (major, minor) < (6, 13);
    let nested = |module| {
        let path = format!("/sys/module/{module}/parameters/nested");
        text::read(path).is_ok_and(|on| matches!(on.trim(), "Y" | "1"))
    };
    host::version_of(&host::kernel_release()).is_none_or(is_old)
        && ["kvm_intel", "kvm_amd"].into_iter().any(nested)
}

/// Whether something without a file system is known not to pin; `None` for a file.
fn is_known(target: &str) -> Option<bool> {
    if let Some(kind) = target.strip_prefix("anon_inode:") {
        let kind = kind.split(':').next().unwrap_or(kind);
        return Some(ANONYMOUS.contains(&kind));
    }
    // One that was removed, or whose /dev was unmounted, is what it was.
    let device = target.strip_prefix("/dev/")?.trim_end_matches(" (deleted)");
    let known = |name: &&str| match name.strip_suffix('/') {
        Some(_) => device.starts_with(*name),
        None => device == *name,
    };
    Some(DEVICES.iter().any(known))
}

/// The most descriptors of its own that a process looks at.
const MOST_OWN: usize = 4096;

/// Whether this process may have pinned memory: as [`find`], but without allocation, of the descriptors that `thread` has, and of
/// files it asks for `O_DIRECT` only. Yes where it cannot be told.
#[must_use]
pub fn own(thread: u32) -> bool {
    Own::open(thread).map_or(true, |own| own.may_pin())
}

/// Whether the kernel counts memory as pinned for long in the process of this status file, or that cannot be told.
fn counts_some(status: &OwnedFd) -> bool {
    const NONE: &[u8] = b"\nVmPin:\t       0 kB\n";
    let mut text = [0u8; 4096];
    let read = rustix::io::pread(status, &mut text, 0);
    let text = text.get(..read.unwrap_or(0)).unwrap_or_default();
    !text.windows(NONE.len()).any(|line| line == NONE)
}

/// How much of this process's memory the kernel counts as pinned for long, without allocation.
#[derive(Debug)]
pub struct Count(OwnedFd);

impl Count {
    /// # Errors
    /// `NOENT` where /proc is not mounted, `ACCESS` without the right to it, `MFILE` without free descriptors.
    pub fn open() -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(c"/proc/thread-self/status", flags, Mode::empty()).map(Self)
    }

    /// Whether it is some, or that cannot be told.
    #[must_use]
    pub fn is_some(&self) -> bool {
        counts_some(&self.0)
    }
}

/// Where this process looks for what pins: for who can open that now, and asks later.
#[derive(Debug)]
pub struct Own {
    status: OwnedFd,
    folder: OwnedFd,
    /// The thread in whose table the descriptors are, if that is not the caller's.
    other: Option<u32>,
}

impl Own {
    /// Opens it, for the descriptors of a thread of this process: each thread may have a table of its own.
    ///
    /// # Errors
    /// `NOENT` where /proc is not mounted or the thread has ended, `ACCESS` without the right to it, `MFILE` without free descriptors.
    pub fn open(thread: u32) -> Result<Self, Errno> {
        let open = |path: &CStr, flags| rustix::fs::open(path, flags, Mode::empty());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let mut buffer = [0; 48];
        let folder = crate::own::path(&mut buffer, thread, "/fd", None)?;
        Ok(Self {
            status: open(c"/proc/thread-self/status", flags)?,
            folder: open(folder, flags | OFlags::DIRECTORY)?,
            other: (thread != crate::process::thread_id()).then_some(thread),
        })
    }

    /// As [`own`].
    #[must_use]
    pub fn may_pin(&self) -> bool {
        let rewound = rustix::fs::seek(&self.folder, SeekFrom::Start(0));
        counts_some(&self.status) || rewound.is_err() || self.each() != Ok(())
    }

    /// Fails at the first descriptor by which memory may be pinned, and where there is none: a thread that has ended has none.
    fn each(&self) -> Result<(), ()> {
        let mut space = [MaybeUninit::uninit(); 2048];
        let (mut entries, mut left) = (RawDir::new(&self.folder, &mut space), MOST_OWN);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(drop)?;
            let name = entry.file_name();
            let number = name.to_str().ok().and_then(|name| name.parse().ok());
            left = left.checked_sub(1).ok_or(())?;
            match number.map(|number| self.is_harmless(name, number)) {
                None | Some(Ok(true) | Err(Errno::NOENT | Errno::BADF)) => {} // a dot, harmless, closed meanwhile
                Some(Ok(false) | Err(_)) => return Err(()),
            }
        }
        // The two dots are counted as well.
        if MOST_OWN - left > 2 { Ok(()) } else { Err(()) }
    }

    fn is_harmless(&self, name: &CStr, number: u32) -> Result<bool, Errno> {
        let mut space = [MaybeUninit::uninit(); 256];
        let (target, _) = rustix::fs::readlinkat_raw(&self.folder, name, &mut space)?;
        let target = std::str::from_utf8(target).unwrap_or("/");
        if target.starts_with("pipe:") {
            return Ok(true);
        }
        if let Some(known) = is_known(target) {
            return Ok(known);
        }
        if target.starts_with("socket:") {
            let mut name = [0; 64];
            let len = self.protocol(number, &mut name)?;
            let name = name.get(..len).unwrap_or_default();
            let name = std::str::from_utf8(name).unwrap_or_default();
            return Ok(SOCKETS.contains(&name.trim_end_matches('\0')));
        }
        Ok(!self.flags(number)?.contains(OFlags::DIRECT))
    }

    /// Puts down the protocol of a socket.
    fn protocol(&self, number: u32, name: &mut [u8; 64]) -> Result<usize, Errno> {
        const PROTOCOL: &CStr = c"system.sockprotoname";
        let Some(thread) = self.other else {
            return rustix::fs::fgetxattr(own_number(number), PROTOCOL, name);
        };
        let mut buffer = [0; 48];
        let path = crate::own::path(&mut buffer, thread, "/fd/", Some(number))?;
        rustix::fs::getxattr(path, PROTOCOL, name)
    }

    /// The flags of a descriptor. In the caller's table another thread's number names another file, or none. No copy of it is made there: to
    /// close that would flush the file, which asks the server of a file system (FUSE, NFS) and ends the notifications of a message queue.
    fn flags(&self, number: u32) -> Result<OFlags, Errno> {
        let Some(thread) = self.other else {
            return rustix::fs::fcntl_getfl(own_number(number));
        };
        let mut buffer = [0; 48];
        let path = crate::own::path(&mut buffer, thread, "/fdinfo/", Some(number))?;
        let info = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut text = [0; 256];
        let len = rustix::io::pread(&info, &mut text, 0)?;
        flags_in(text.get(..len).unwrap_or_default()).ok_or(Errno::INVAL)
    }
}

/// A descriptor of the program's in the caller's table.
fn own_number(number: u32) -> BorrowedFd<'static> {
    // SAFETY: looked at only; a number that was closed meanwhile is refused, or is another descriptor of this process.
    unsafe { BorrowedFd::borrow_raw(number.cast_signed()) }
}

/// The flags of a descriptor, of what its fdinfo begins with.
fn flags_in(info: &[u8]) -> Option<OFlags> {
    let mut lines = info.split(|&byte| byte == b'\n');
    let bits = lines.find_map(|line| line.strip_prefix(b"flags:"))?;
    let bits = std::str::from_utf8(bits.trim_ascii()).ok()?;
    let bits = u32::from_str_radix(bits, 8).ok()?;
    Some(OFlags::from_bits_retain(bits))
}

/// `None` for a socket of a known protocol, else what it is.
///
/// The number may be another file's at any moment. So what has it is held without being opened (`O_PATH`), which asks no server of a
/// file system (FUSE), and looked at once more.
fn socket(path: &str) -> io::Result<Option<String>> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let held = rustix::fs::open(path, flags, Mode::empty())?;
    let own = format!("/proc/self/fd/{}", held.as_raw_fd());
    let link = rustix::fs::readlink(&own, Vec::new())?;
    if !link.as_bytes().starts_with(b"socket:") {
        return Ok(Some("a descriptor that is exchanged".to_owned()));
    }
    let mut name = [0; 64];
    let len = rustix::fs::getxattr(&own, "system.sockprotoname", &mut name).unwrap_or(0);
    let name = name.get(..len).unwrap_or_default();
    let name = String::from_utf8_lossy(name);
    let name = name.trim_end_matches('\0');
    let known = SOCKETS.contains(&name);
    Ok((!known).then(|| format!("a socket of protocol {name:?}")))
}

/// What the kernel says of a descriptor.
struct Info {
    flags: OFlags,
    /// The mount that the file was opened in.
    mount: u64,
}

impl Info {
    fn read(folder: &str, fd: u32) -> io::Result<Self> {
        let info = text::about(format!("{folder}/fdinfo/{fd}"))?;
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let flags = flags_in(info.as_bytes());
        let mount = field("mnt_id:").and_then(|id| id.trim().parse().ok());
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        Ok(Self {
            flags: flags.ok_or_else(bad)?,
            mount: mount.ok_or_else(bad)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// A process whose standard input is `input`, and nothing else of note: what other tests have open and would hand
    /// on ends with the exec.
    fn child(input: Stdio) -> Child {
        use std::os::unix::process::CommandExt;
        let mut sleep = Command::new("sleep");
        sleep.arg("60").stdin(input).stdout(Stdio::null());
        let keep_three = || {
            let flags = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
            // SAFETY: marks descriptors of the child alone.
            match unsafe { libc::close_range(3, libc::c_uint::MAX, flags) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: it makes one system call, and nothing of the parent's.
        unsafe { sleep.pre_exec(keep_three) };
        sleep.stderr(Stdio::null()).spawn().unwrap()
    }

    /// A look at the link was before, and said that it is a socket.
    #[test]
    fn what_is_no_socket_any_more_is_not_asked() {
        let file = fs::File::open("/proc/self/exe").unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        assert!(socket(&path).unwrap().unwrap().contains("exchanged"));
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let path = format!("/proc/self/fd/{}", one.as_raw_fd());
        assert_eq!(socket(&path).unwrap(), None);
    }

    fn found(input: Stdio) -> Option<Pin> {
        let mut child = child(input);
        let found = find(child.id(), 1000);
        child.kill().unwrap();
        child.wait().unwrap();
        found.unwrap()
    }

    /// In a process of its own: other tests of this one have descriptors of all kinds.
    #[test]
    fn a_process_knows_its_own_pins() {
        if std::env::var_os("PINS_OWN").is_some() {
            let me = crate::process::thread_id();
            let before = (own(me), apart(me));
            let direct = direct();
            let then = (own(me), apart(me));
            let none = direct.is_none();
            drop(direct);
            println!("queue {:?}", is_queue_kept());
            let ring = ring();
            println!("direct {before:?} {then:?} {none}");
            return println!("pins {} {} {}", before.0, own(me), ring.is_none());
        }
        let name = "pins::tests::a_process_knows_its_own_pins";
        let mut again = Command::new(std::env::current_exe().unwrap());
        let again = again
            .args(["--exact", name, "--nocapture"])
            .env("PINS_OWN", "1");
        let said = again.stdin(Stdio::null()).output().unwrap().stdout;
        let said = String::from_utf8(said).unwrap();
        if !said.contains("direct (false, false) (false, false) true") {
            let right = "direct (false, false) (true, true) false";
            assert!(said.contains(right), "{said}");
        }
        // None where there are no queues.
        assert!(!said.contains("queue Some(false)"), "{said}");
        if said.contains("pins false false true") {
            return eprintln!("skipped: no io_uring here");
        }
        assert!(said.contains("pins false true false"), "{said}");
    }

    /// As asked by a thread that has a table of its own, with nothing of note in it.
    fn apart(thread: u32) -> bool {
        let ask = move || {
            // SAFETY: this thread alone gets another table, and it owns no descriptor.
            unsafe {
                assert_eq!(libc::unshare(libc::CLONE_FILES), 0);
                assert_eq!(libc::close_range(3, libc::c_uint::MAX, 0), 0);
            }
            own(thread)
        };
        std::thread::spawn(ask).join().unwrap()
    }

    /// Whether a message queue keeps its notification while a thread with a table of its own looks at it. To close any descriptor of
    /// the queue ends that.
    fn is_queue_kept() -> Option<bool> {
        let me = crate::process::thread_id();
        let (opened, begin) = std::sync::mpsc::channel::<()>();
        let (apart, is_apart) = std::sync::mpsc::channel();
        let look = std::thread::spawn(move || {
            // SAFETY: this thread alone gets another table.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            apart.send(()).unwrap();
            begin.recv().unwrap();
            own(me)
        });
        is_apart.recv().unwrap();
        let name = std::ffi::CString::new(format!("/pageone-{me}")).unwrap();
        let null = std::ptr::null_mut::<libc::mq_attr>();
        // SAFETY: the name is terminated; no attributes are given.
        let queue =
            unsafe { libc::mq_open(name.as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600, null) };
        // SAFETY: an event of zeros is a signal of number 0, which is never sent here.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_NONE;
        // SAFETY: the event is as it should be; a queue that could not be made is refused.
        let notify = || unsafe { libc::mq_notify(queue, &raw const event) };
        let registered = notify() == 0;
        opened.send(()).unwrap();
        assert!(!look.join().unwrap(), "a queue pins nothing");
        let kept = notify() != 0;
        // SAFETY: the name is terminated, and the queue is closed once.
        unsafe {
            libc::mq_unlink(name.as_ptr());
            libc::mq_close(queue);
        }
        registered.then_some(kept)
    }

    /// A file for direct I/O; `None` where the file system knows none.
    fn direct() -> Option<fs::File> {
        let file = tempfile::tempfile().unwrap();
        let flags = rustix::fs::fcntl_getfl(&file).unwrap() | OFlags::DIRECT;
        rustix::fs::fcntl_setfl(&file, flags).ok().map(|()| file)
    }

    fn ring() -> Option<OwnedFd> {
        use std::os::fd::FromRawFd;
        let mut params = [0u32; 30];
        // SAFETY: the structure has 120 bytes, and a descriptor that comes has no other owner.
        unsafe {
            let fd = libc::syscall(libc::SYS_io_uring_setup, 2, params.as_mut_ptr());
            let fd = i32::try_from(fd).unwrap();
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
        }
    }

    #[test]
    fn plain_files_pipes_and_null_are_harmless() {
        assert_eq!(found(Stdio::null()), None);
        assert_eq!(found(Stdio::piped()), None);
        let file = tempfile::tempfile().unwrap();
        assert_eq!(found(file.into()), None);
    }

    #[test]
    fn devices_that_were_removed_are_what_they_were() {
        for (name, known) in [("null", true), ("pts/3", true), ("nvme0", false)] {
            assert_eq!(is_known(&format!("/dev/{name} (deleted)")), Some(known));
        }
    }

    #[test]
    fn direct_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut options = fs::OpenOptions::new();
        let flags = OFlags::DIRECT.bits().cast_signed();
        options
            .create(true)
            .truncate(false)
            .write(true)
            .custom_flags(flags);
        let Ok(file) = options.open(folder.path().join("direct")) else {
            eprintln!("skipped: this file system knows no O_DIRECT");
            return;
        };
        let pin = found(file.into()).unwrap();
        assert!(matches!(pin, Pin::Descriptor(0, _)), "{pin}");
        assert!(pin.to_string().contains("O_DIRECT"), "{pin}");
    }

    #[test]
    fn unknown_devices_and_the_dead_are_not() {
        let Ok(memory) = fs::File::open("/dev/kmsg") else {
            eprintln!("skipped: /dev/kmsg cannot be opened");
            return;
        };
        assert!(memory.as_raw_fd() >= 0);
        let pin = found(memory.into()).unwrap();
        assert!(pin.to_string().contains("/dev/kmsg"), "{pin}");
        let mut child = child(Stdio::null());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(find(child.id(), 1000).is_err());
    }

    #[test]
    fn threads_share_their_files() {
        let own = std::process::id();
        std::thread::scope(|scope| {
            let other = scope.spawn(crate::process::thread_id).join().unwrap();
            // A thread can be joined some microseconds before the kernel takes its table.
            let task = format!("/proc/self/task/{other}");
            let end = Instant::now() + Duration::from_secs(10);
            while fs::exists(&task).unwrap() && Instant::now() < end {
                std::thread::yield_now();
            }
            assert!(!share_files(own, other), "it has ended");
        });
        assert!(share_files(own, own));
    }

    #[test]
    fn sockets_are_told_by_their_protocol() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(found(std::os::fd::OwnedFd::from(one).into()), None);
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(found(std::os::fd::OwnedFd::from(tcp).into()), None);
        // SAFETY: makes a descriptor, or fails.
        let xdp = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW, 0) };
        if xdp < 0 {
            eprintln!("skipped: no right to an AF_XDP socket");
            return;
        }
        // SAFETY: it was just made, and has no other owner.
        let xdp = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(xdp) };
        let pin = found(xdp.into()).unwrap();
        assert!(pin.to_string().contains("XDP"), "{pin}");
    }

    #[test]
    fn a_ring_can_pin_what_the_kernel_does_not_show() {
        let mut parameters = [0_u32; 30];
        // SAFETY: the kernel fills the parameters, which are 120 bytes.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, &raw mut parameters) };
        let Ok(ring) = i32::try_from(ring) else {
            return;
        };
        if ring < 0 {
            eprintln!("skipped: io_uring is disabled");
            return;
        }
        // SAFETY: it was just made, and has no other owner.
        let ring = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(ring) };
        let pin = found(ring.into()).unwrap();
        assert!(pin.to_string().contains("io_uring"), "{pin}");
    }

    #[test]
    fn a_crowd_is_not_looked_at_to_its_end() {
        let mut child = child(Stdio::null());
        let found = find(child.id(), 2);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.unwrap(), Some(Pin::Crowd(2)));
    }
}
