//! What of a process could write its pages past the page tables: memory pinned for long.
//!
//! Whoever pinned a page (direct I/O in flight, a registered buffer, a device) writes its frame
//! without a page fault. The kernel tells nobody which pages are pinned, so the question is asked
//! of the whole process, and the other way round: [`find`] knows the kinds of descriptors that
//! never pin, and names the first that is of another kind.
//!
//! Source: proc(5) (`VmPin`), `Documentation/core-api/pin_user_pages.rst`, `io_uring/fdinfo.c`.

use std::fmt;
use std::fs;
use std::io;

use rustix::fs::OFlags;

/// Something that may hold pages pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Pages pinned for long, as the kernel counts them, in KiB.
    Memory(u64),
    /// A descriptor: its number and what it is.
    Descriptor(u32, String),
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(kib) => write!(f, "{kib} KiB of its memory are pinned"),
            Self::Descriptor(fd, what) => {
                let what = crate::foreign::Foreign(what);
                write!(f, "its descriptor {fd} ({what}) can pin memory")
            }
        }
    }
}

/// Kinds of anonymous descriptors that never pin the memory of their process.
const ANONYMOUS: [&str; 12] = [
    "[eventpoll]",
    "[eventfd]",
    "[signalfd]",
    "[timerfd]",
    "[pidfd]",
    "[userfaultfd]",
    "[fanotify]",
    "inotify",
    "kvm-vm",
    "kvm-vcpu",
    "kvm-vm-stats",
    "kvm-vcpu-stats",
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
const FILE_SYSTEMS: [i64; 21] = [
    0xEF53,      // ext4
    0x5846_5342, // xfs
    0x9123_683E, // btrfs
    0xF2F5_2010, // f2fs
    0x2FC1_2FC1, // zfs
    0x4D44,      // vfat
    0x9660,      // iso9660
    0x7371_7368, // squashfs
    0xE0F5_E1E2, // erofs
    0x794C_7630, // overlayfs
    0x6969,      // nfs
    0x0102_1994, // tmpfs
    0x8584_58F6, // ramfs
    0x9584_58F6, // hugetlbfs
    0x9FA0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_E0EB, // cgroup
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x1CD1,      // devpts
];

/// The first thing found by which `pid`'s pages may be pinned; `None` when there is nothing.
///
/// # Errors
/// What reading `/proc/PID` gives, mostly that the process is gone.
pub fn find(pid: u32) -> io::Result<Option<Pin>> {
    crate::fault::check(crate::fault::Point::Proc)?;
    if let Some(kib) = pinned_kib(pid)? {
        return Ok(Some(Pin::Memory(kib)));
    }
    let mut tables = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let Some(task) = number(&task?) else {
            continue;
        };
        // Threads share one table of descriptors, as a rule.
        if tables.iter().any(|&known| share_files(known, task)) {
            continue;
        }
        tables.push(task);
        if let Some(pin) = find_in(pid, task)? {
            return Ok(Some(pin));
        }
    }
    Ok(None)
}

fn number(entry: &fs::DirEntry) -> Option<u32> {
    entry.file_name().to_str()?.parse().ok()
}

fn pinned_kib(pid: u32) -> io::Result<Option<u64>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
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

fn find_in(pid: u32, task: u32) -> io::Result<Option<Pin>> {
    let folder = format!("/proc/{pid}/task/{task}");
    let entries = match fs::read_dir(format!("{folder}/fd")) {
        Err(error) if is_gone(&error) => return Ok(None), // the thread has ended
        other => other?,
    };
    for entry in entries {
        let Some(fd) = number(&entry?) else {
            continue;
        };
        match harmless(&folder, fd) {
            Ok(None) => {}
            Ok(Some(what)) => return Ok(Some(Pin::Descriptor(fd, what))),
            Err(error) if is_gone(&error) => {} // closed meanwhile
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// `None` when the descriptor cannot pin memory, else what it is.
fn harmless(folder: &str, fd: u32) -> io::Result<Option<String>> {
    let path = format!("{folder}/fd/{fd}");
    let target = fs::read_link(&path)?;
    let target = target.to_string_lossy();
    if target.starts_with("socket:") || target.starts_with("pipe:") {
        return Ok(None);
    }
    if let Some(kind) = target.strip_prefix("anon_inode:") {
        return match kind {
            "[io_uring]" => ring(folder, fd),
            _ if ANONYMOUS.contains(&kind.split(':').next().unwrap_or(kind)) => Ok(None),
            _ => Ok(Some(target.into_owned())),
        };
    }
    if let Some(device) = target.strip_prefix("/dev/") {
        let known = |name: &&str| match name.strip_suffix('/') {
            Some(_) => device.starts_with(*name),
            None => device == *name,
        };
        return Ok((!DEVICES.iter().any(known)).then(|| target.into_owned()));
    }
    if flags(folder, fd)?.contains(OFlags::DIRECT) {
        return Ok(Some(format!("{target}, open with O_DIRECT")));
    }
    let kind = rustix::fs::statfs(path)?.f_type;
    let known = target.starts_with("/memfd:") || FILE_SYSTEMS.contains(&kind);
    Ok((!known).then(|| format!("{target}, on a file system of type {kind:#x}")))
}

/// A ring pins buffers that are registered with it, and keeps files that are.
fn ring(folder: &str, fd: u32) -> io::Result<Option<String>> {
    let info = fs::read_to_string(format!("{folder}/fdinfo/{fd}"))?;
    let none = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.trim().parse::<u64>().ok()) == Some(0)
    };
    let harmless = none("UserBufs:") && none("UserFiles:");
    Ok((!harmless).then(|| "an io_uring with registered buffers or files".to_owned()))
}

fn flags(folder: &str, fd: u32) -> io::Result<OFlags> {
    let info = fs::read_to_string(format!("{folder}/fdinfo/{fd}"))?;
    let line = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let bits = line.and_then(|line| u32::from_str_radix(line.trim(), 8).ok());
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    bits.map(OFlags::from_bits_retain).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::process::{Child, Command, Stdio};

    /// A process whose standard input is `input`, and nothing else of note.
    fn child(input: Stdio) -> Child {
        let mut sleep = Command::new("sleep");
        sleep.arg("60").stdin(input).stdout(Stdio::null());
        sleep.stderr(Stdio::null()).spawn().unwrap()
    }

    fn found(input: Stdio) -> Option<Pin> {
        let mut child = child(input);
        let found = find(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        found.unwrap()
    }

    #[test]
    fn plain_files_pipes_and_null_are_harmless() {
        assert_eq!(found(Stdio::null()), None);
        assert_eq!(found(Stdio::piped()), None);
        let file = tempfile::tempfile().unwrap();
        assert_eq!(found(file.into()), None);
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
        assert!(find(child.id()).is_err());
    }

    #[test]
    fn threads_share_their_files() {
        let own = std::process::id();
        std::thread::scope(|scope| {
            let other = scope.spawn(crate::process::thread_id).join().unwrap();
            assert!(!share_files(own, other), "it has ended");
        });
        assert!(share_files(own, own));
    }
}
