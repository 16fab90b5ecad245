//! Other processes: reading their memory, noticing their end; and this one's cost.

use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, Result};
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};

use crate::fault::{self, Point};
use crate::foreign::ForeignName;
use crate::namespace::Namespace;
use crate::priority::without_yielding;

/// The most ranges one [`read_memory`] takes (`UIO_MAXIOV`).
pub const MAX_RANGES: usize = 1024;

/// A range of another process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address in that process.
    pub start: u64,
    /// Bytes.
    pub len: usize,
}

/// Reads ranges of `pid`'s memory one after another into `local`, which is filled in order.
/// Returns the bytes read: fewer than asked when a range cannot be read, whole ranges only.
///
/// # Errors
/// `FAULT` when the first range cannot be read, `SRCH` when the process is gone, `PERM` without
/// the right; `INVAL` for more than [`MAX_RANGES`] ranges or buffers.
pub fn read_memory(pid: u32, remote: &[Remote], local: &mut [IoSliceMut<'_>]) -> Result<usize> {
    fault::check(Point::Read)?;
    read(pid, remote, local)
}

/// Tries whether processes may call what [`read_memory`] calls, on none of its own memory.
///
/// # Errors
/// A filter refuses it, or the kernel lacks it.
pub fn try_to_read() -> Result<()> {
    read(std::process::id(), &[], &mut []).map(drop)
}

fn read(pid: u32, remote: &[Remote], local: &mut [IoSliceMut<'_>]) -> Result<usize> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| Errno::SRCH)?;
    if remote.len() > MAX_RANGES || local.len() > MAX_RANGES {
        return Err(Errno::INVAL);
    }
    let mut ranges = [const { std::mem::MaybeUninit::<libc::iovec>::uninit() }; MAX_RANGES];
    for (range, from) in ranges.iter_mut().zip(remote) {
        range.write(libc::iovec {
            iov_base: from.start as *mut libc::c_void,
            iov_len: from.len,
        });
    }
    // SAFETY: `IoSliceMut` has the layout of `iovec` and borrows its bytes exclusively; the first
    // `remote.len()` ranges were written above and are only addresses in the other process.
    let read = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_mut_ptr().cast(),
            local.len() as libc::c_ulong,
            ranges.as_ptr().cast(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(read).map_err(|_| last_error())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Whether the process behind `pidfd` has ended.
#[must_use]
pub fn has_exited(pidfd: &impl AsFd) -> bool {
    wait_readable(pidfd, Duration::ZERO).unwrap_or(false)
}

/// Waits at most `wait` until `fd` has something to read, or its other end is gone.
///
/// # Errors
/// Whatever ppoll(2) gives; an interruption counts as nothing to read.
pub fn wait_readable(fd: &impl AsFd, wait: Duration) -> Result<bool> {
    fault::check(Point::Poll)?;
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let wait = Timespec {
        tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: wait.subsec_nanos().into(),
    };
    match rustix::event::poll(&mut fds, Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Waits at most `wait` until one of `fds` has something to read or its other end is gone; tells which.
///
/// # Errors
/// As [`wait_readable`].
pub fn wait_some(fds: &[impl AsFd], wait: Duration) -> Result<Vec<bool>> {
    fault::check(Point::Poll)?;
    let mut polled: Vec<_> = fds
        .iter()
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let wait = Timespec {
        tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: wait.subsec_nanos().into(),
    };
    match rustix::event::poll(&mut polled, Some(&wait)) {
        Ok(_) | Err(Errno::INTR) => Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect()),
        Err(error) => Err(error),
    }
}

/// Whether the `/proc` that is mounted here has the numbers that this process sees: of another PID namespace it would tell of other
/// processes.
///
/// # Errors
/// `SRCH` where it is of another namespace; what reading it gives.
pub fn check_proc() -> std::io::Result<()> {
    let status = crate::text::read("/proc/self/status")?;
    match count_numbers(&status) {
        None | Some(1) => Ok(()),
        _ => Err(Errno::SRCH.into()),
    }
}

/// Whether process `pid` sees processes by the numbers that this one does, which means: has its PID namespace. The kernel gives the number 0
/// to a peer that has none here. `None` where it does not tell.
#[must_use]
pub fn shares_numbers(pid: u32) -> Option<bool> {
    if pid == 0 {
        return Some(false);
    }
    check_proc().ok()?;
    let namespace = |process: &str| Namespace::of(process, "pid");
    if let (Ok(its), Ok(own)) = (namespace(&pid.to_string()), namespace("self")) {
        return Some(its == own);
    }
    // The link is for those who may trace it, the numbers are for all.
    let status = crate::text::about(format!("/proc/{pid}/status")).ok()?;
    Some(count_numbers(&status)? == 1)
}

/// In how many namespaces a process has numbers, from that of the mount of /proc down to its own.
fn count_numbers(status: &str) -> Option<usize> {
    let numbers = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    Some(numbers.split_ascii_whitespace().count())
}

/// The command name of `pid`; empty when there is no such process.
#[must_use]
pub fn comm(pid: u32) -> ForeignName {
    let name = crate::text::bytes(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = String::from_utf8_lossy(&name);
    name.strip_suffix('\n').unwrap_or(&name).into()
}

/// The process that `pid` is a child of; `None` when there is no such process.
#[must_use]
pub fn parent(pid: u32) -> Option<u32> {
    let stat = crate::text::about(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in brackets and may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The processes that are children of `pid`, and their children, and so on.
///
/// # Errors
/// `NOENT` when there is no such process, or the kernel has no lists of children.
pub fn descendants(pid: u32) -> std::io::Result<Vec<u32>> {
    let (mut all, mut visited) = (Vec::new(), 0);
    let mut next = Some(pid);
    while let Some(pid) = next {
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let children = crate::text::read(thread?.path().join("children"))?;
            all.extend(
                children
                    .split_ascii_whitespace()
                    .filter_map(|child| child.parse::<u32>().ok()),
            );
        }
        next = all.get(visited).copied();
        visited += 1;
    }
    Ok(all)
}

/// A cgroup of version 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// Its number: that of its folder, and of no other ever, also not of one made at the same path later.
    pub id: u64,
    /// Its path, as seen from this process's cgroup namespace.
    pub path: ForeignName,
}

/// The cgroup of process `pid`.
///
/// The number alone does not tell who is meant: a caller that holds a descriptor of the process
/// ([`crate::socket::peer_pidfd`]) and finds it alive *after* this call has read the
/// right one.
///
/// # Errors
/// What open(2), read(2) and stat(2) give; `InvalidData` when the process has no cgroup of version 2, or one
/// whose path is not plain text. `NotFound` where no cgroups of version 2 are mounted; `WouldBlock` when it moves
/// about.
pub fn cgroup(pid: u32) -> std::io::Result<Cgroup> {
    use std::os::unix::fs::MetadataExt;
    const TRIES: usize = 3;
    let id = |path: &str| {
        let folder = cgroup_mount()?.join(path.trim_start_matches('/'));
        Ok::<_, std::io::Error>(std::fs::metadata(folder)?.ino())
    };
    let mut path = cgroup_path(pid)?;
    for _ in 0..TRIES {
        let (before, again, after) = (id(&path), cgroup_path(pid)?, id(&path));
        // A folder that had the number before and after had it when the process was found inside: cgroups are
        // not renamed, and their numbers not used again.
        match (before, after) {
            (Ok(before), Ok(after)) if before == after && again == path => {
                return Ok(Cgroup {
                    id: after,
                    path: path.into(),
                });
            }
            (_, Err(error)) if again == path => return Err(error),
            _ => path = again,
        }
    }
    Err(std::io::ErrorKind::WouldBlock.into())
}

/// The path of a process's cgroup of version 2, as seen from this process's cgroup namespace: by the number, and for no question of trust.
///
/// # Errors
/// As [`cgroup`], for want of a path.
pub fn cgroup_path(pid: u32) -> std::io::Result<String> {
    fault::check(Point::Proc)?;
    let text = crate::text::read(format!("/proc/{pid}/cgroup"))?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"));
    let is_plain = |path: &&str| {
        // One outside of this namespace has no folder here.
        let inside = !path.split('/').any(|part| part == "..");
        path.starts_with('/') && inside && !path.chars().any(char::is_control)
    };
    let bad = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    path.filter(is_plain).map(str::to_owned).ok_or_else(bad)
}

/// Where cgroups of version 2 are mounted, and no other mount lies above.
fn cgroup_mount() -> std::io::Result<PathBuf> {
    // The table of a process of root's is open to every user, and to locks.
    let table = crate::text::read("/proc/self/mountinfo")?;
    let is_seen = |(number, place): &(u64, PathBuf)| {
        crate::mounts::number_of(place).is_ok_and(|seen| seen == *number)
    };
    let place = crate::mounts::roots_of("cgroup2", &table).find(is_seen);
    let none = || std::io::Error::new(std::io::ErrorKind::NotFound, "no cgroup2 is mounted");
    place.map(|(_, place)| place).ok_or_else(none)
}

/// The least limit of a process's cgroup of version 2 and of those above it, in bytes; none without one.
#[must_use]
pub fn cgroup_memory_limit(pid: u32) -> Option<u64> {
    let (path, mount) = (cgroup_path(pid).ok()?, cgroup_mount().ok()?);
    let limit = |folder: &Path| -> Option<u64> {
        let text = crate::text::read(mount.join(folder).join("memory.max")).ok()?;
        text.trim().parse().ok()
    };
    let folders = Path::new(path.trim_start_matches('/')).ancestors();
    folders.filter_map(limit).min()
}

/// How many mappings `pid`, a process of user `uid`, has, about 0.5 µs each to count. The kernel is asked for no names: a path may
/// have two thousand folders and 16 KiB as text, and a process sixty thousand mappings of such a file.
///
/// # Errors
/// What open(2), ioctl(2) and read(2) give.
pub fn count_mappings(uid: u32, pid: u32) -> std::io::Result<u64> {
    /// Mappings counted before others may have this processor.
    const PIECE: usize = 256;
    /// A process that maps ahead of who counts is not followed for ever.
    const MOST: u64 = 1 << 20;
    fault::check(Point::Proc)?;
    let maps = crate::text::Passing::open(uid, format!("/proc/{pid}/maps"))?;
    let (mut count, mut next) = (0, Some(0));
    while let Some(from) = next.filter(|_| count < MOST) {
        let mut piece = 0;
        let one = |_: &_| {
            piece += 1;
            piece < PIECE
        };
        match without_yielding(|| crate::vma::walk(&maps, from, one)) {
            Err(Errno::NOTTY | Errno::INVAL) => return count_lines(maps),
            walked => next = walked?,
        }
        count += piece as u64;
    }
    Ok(count)
}

/// The same on Linux before 6.11, where there is only the text. Of one that is too long to be read it says as many as there may be.
fn count_lines(mut maps: crate::text::Passing) -> std::io::Result<u64> {
    use std::io::Read;
    let mut part = vec![0; 64 * 1024];
    let (mut lines, mut bytes) = (0, 0);
    loop {
        match without_yielding(|| maps.read(&mut part))? {
            0 => return Ok(lines),
            len => {
                lines += part.iter().take(len).filter(|&&b| b == b'\n').count() as u64;
                bytes += len;
            }
        }
        if bytes > crate::vma::MOST_TEXT {
            return max_map_count().map(|most| most.max(lines));
        }
    }
}

/// The kernel's limit of mappings for each process (`vm.max_map_count`).
///
/// # Errors
/// What reading the sysctl gives; `InvalidData` when it holds no number.
pub fn max_map_count() -> std::io::Result<u64> {
    let text = crate::text::read("/proc/sys/vm/max_map_count")?;
    let bad = |_| std::io::Error::from(std::io::ErrorKind::InvalidData);
    text.trim().parse().map_err(bad)
}

/// Bytes the machine could hand out without swapping (`MemAvailable`).
///
/// # Errors
/// What reading `/proc/meminfo` gives; `InvalidData` when the line is missing.
pub fn available_memory() -> std::io::Result<u64> {
    let text = crate::text::read("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let bad = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    kib.map(|kib| kib * 1024).ok_or_else(bad)
}

/// CPU time this process has used, all threads.
#[must_use]
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let secs = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(secs, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// CPU time of the calling thread.
#[must_use]
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Has all threads together allocate from at most so many heaps, where the allocator is glibc's. It would
/// start one a thread, and memory that is free in one is of no use to another. For before the threads start.
pub fn limit_heaps(heaps: u16) {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number in the allocator, under its lock. That it does not fit costs memory only.
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, heaps.into()) };
    #[cfg(not(target_env = "gnu"))]
    let _ = heaps;
}

/// Gives memory that this process has freed back to the system, where the allocator is glibc's: it keeps what lies between
/// memory in use. A few hundred milliseconds for a gigabyte.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointer is involved; the allocator takes its locks.
    let _ = unsafe { libc::malloc_trim(0) };
}

/// The calling thread's number.
#[must_use]
pub fn thread_id() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

/// How often the thread `tid` of this process has gone to sleep, if it sleeps now: as long as the
/// number stays, so does the sleep. `None` when it runs, or waits for nothing but a CPU.
#[must_use]
pub fn sleep_number(tid: u32) -> Option<u64> {
    let status = crate::text::about(format!("/proc/self/task/{tid}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let sleeps = field("State:")?.trim_start().starts_with(['S', 'D']);
    let number = field("voluntary_ctxt_switches:")?.trim().parse().ok()?;
    sleeps.then_some(number)
}

/// How many descriptors this process may have open at most.
#[must_use]
pub fn descriptor_limit() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.maximum.unwrap_or(u64::MAX)
}

/// Raises this process's limit of open descriptors to what it may have: a guest takes five.
///
/// # Errors
/// Whatever setrlimit(2) gives.
pub fn raise_descriptor_limit() -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, wanted)
}

const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// How much likelier than by its memory this process is killed when there is none: -1000 (never)
/// to 1000.
///
/// # Errors
/// What reading the file gives; `InvalidData` when it holds no number.
pub fn oom_score() -> std::io::Result<i32> {
    let bad = |_| std::io::Error::from(std::io::ErrorKind::InvalidData);
    std::fs::read_to_string(OOM_SCORE)?
        .trim()
        .parse()
        .map_err(bad)
}

/// Sets [`oom_score`], for children to come too.
///
/// # Errors
/// `PermissionDenied` for a score lower than any this process had, without the right to it.
pub fn set_oom_score(score: i32) -> std::io::Result<()> {
    std::fs::write(OOM_SCORE, score.to_string())
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Killed(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// How the child `pid` ended; `None` while it has not.
///
/// # Errors
/// `CHILD` when it is no child, or its end was told already.
pub fn end_of_child(pid: u32) -> Result<Option<End>> {
    use rustix::process::{WaitOptions, waitpid};
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let ended = waitpid(Some(pid.ok_or(Errno::CHILD)?), WaitOptions::NOHANG)?;
    Ok(ended.map(|(_, status)| match status.exit_status() {
        Some(code) => End::Exited(code),
        None => End::Killed(status.terminating_signal().unwrap_or(0)),
    }))
}

/// What became of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It has ended.
    Ended(std::process::ExitStatus),
    /// It was stopped by this signal.
    Stopped(i32),
}

/// What became of the child `pid` since it was last asked; `None` while it runs.
///
/// # Errors
/// `CHILD` when it is no child, or its end was told already.
pub fn change_of_child(pid: u32) -> Result<Option<Change>> {
    use rustix::process::{WaitOptions, waitpid};
    use std::os::unix::process::ExitStatusExt;
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
    let changed = waitpid(Some(pid.ok_or(Errno::CHILD)?), options)?;
    Ok(changed.map(|(_, status)| match status.stopping_signal() {
        Some(signal) => Change::Stopped(signal),
        None => Change::Ended(std::process::ExitStatus::from_raw(status.as_raw())),
    }))
}

/// Whether the child `pid` is in this process's group.
///
/// Groups and sessions whose leaders are outside this PID namespace have the number 0, which rustix takes for no answer of the kernel.
#[must_use]
pub fn is_of_own_group(pid: u32) -> bool {
    let Ok(pid) = libc::pid_t::try_from(pid) else {
        return false;
    };
    // SAFETY: both calls touch no memory.
    unsafe { libc::getpgid(pid) == libc::getpgid(0) }
}

/// Makes a child that does `act`, and ends with the code that this gives.
///
/// # Errors
/// `Deadlock` when this process has other threads: only one without may do anything in its child. What fork(2) gives.
pub(crate) fn fork(act: impl FnOnce() -> i32) -> std::io::Result<Pid> {
    let mut is_alone = false;
    // A thread that was joined is there for a moment more.
    for pause in [0, 1, 10, 50] {
        std::thread::sleep(Duration::from_millis(pause));
        is_alone = std::fs::read_dir("/proc/self/task")?.count() == 1;
        if is_alone {
            break;
        }
    }
    if !is_alone {
        let why = "this process has other threads, of a library that was preloaded";
        return Err(std::io::Error::new(std::io::ErrorKind::Deadlock, why));
    }
    // SAFETY: this process has one thread, so its child is a whole copy, in which anything may be
    // called: no lock is held there by a thread that is missing.
    match unsafe { libc::fork() } {
        0 => {
            let code = act();
            // SAFETY: ends the child without running what its parent wants run at its own end.
            unsafe { libc::_exit(code) }
        }
        child => made(child),
    }
}

/// The process that a fork made.
///
/// # Errors
/// It made none. The number -1 would be all processes for kill(2).
fn made(child: libc::pid_t) -> std::io::Result<Pid> {
    match child {
        1.. => Pid::from_raw(child).ok_or_else(|| std::io::ErrorKind::InvalidData.into()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Whether this process leads its session: it alone is told that the terminal is gone.
#[must_use]
pub fn leads_session() -> bool {
    // SAFETY: the call touches no memory. Its answer may be 0, as above.
    let session = unsafe { libc::getsid(0) };
    session == rustix::process::getpid().as_raw_pid()
}

/// Has this process, and its children, leave no core file.
pub fn leave_no_core() {
    let none = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
}

/// Takes away what is left of ended processes whose parents have gone, where this process is an init. No child whose end is
/// to be told may be there.
pub fn take_orphans_away() {
    use rustix::process::{WaitOptions, wait};
    while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
}

/// Sends `signal` to the child `pid`, whose end was not told yet.
///
/// # Errors
/// `INVAL` for what is no signal; whatever kill(2) gives.
pub fn signal_child(pid: u32, signal: i32) -> Result<()> {
    use rustix::process::{Signal, kill_process};
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let signal = Signal::from_named_raw(signal).ok_or(Errno::INVAL)?;
    kill_process(pid.ok_or(Errno::CHILD)?, signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_that_fails_makes_no_process() {
        assert!(made(-1).is_err() && made(0).is_err());
        assert!(made(7).is_ok());
    }

    #[test]
    fn memory_reads_stop_at_the_first_range_that_is_not_there() {
        let source = [7u8; 300];
        let (mut one, mut two) = ([0u8; 100], [0u8; 200]);
        let me = std::process::id();
        let at = |offset: usize, len| Remote {
            start: source.as_ptr() as u64 + offset as u64,
            len,
        };
        let mut local = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
        assert_eq!(
            read_memory(me, &[at(0, 150), at(150, 150)], &mut local),
            Ok(300)
        );
        let nowhere = Remote { start: 0, len: 10 };
        assert_eq!(
            read_memory(me, &[at(0, 50), nowhere, at(0, 9)], &mut local),
            Ok(50)
        );
        assert_eq!(read_memory(me, &[nowhere], &mut local), Err(Errno::FAULT));
        assert_eq!((one, two), ([7; 100], [7; 200]));
    }

    #[test]
    fn a_process_is_seen_to_end() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        let flags = rustix::process::PidfdFlags::empty();
        let pidfd = rustix::process::pidfd_open(pid, flags).unwrap();
        assert!(!has_exited(&pidfd));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_exited(&pidfd));
    }

    #[test]
    fn this_process_can_be_described() {
        let me = std::process::id();
        assert!(!comm(me).raw().is_empty());
        match cgroup_mount() {
            Ok(_) => {
                let own = cgroup(me).unwrap();
                assert!(own.path.raw().starts_with('/') && own.id > 0);
            }
            Err(error) => eprintln!("skipped: {error}"),
        }
        assert!(count_mappings(0, me).unwrap() > 5);
        assert!(max_map_count().unwrap() > 1000);
        assert!(available_memory().unwrap() > 1 << 20);
        assert!(cpu_time() > Duration::ZERO);
    }

    #[test]
    fn numbers_are_shared_in_a_namespace_alone() {
        assert_eq!(shares_numbers(std::process::id()), Some(true));
        assert_eq!(shares_numbers(0), Some(false));
        assert_eq!(shares_numbers(1 << 30), None, "there is none");
        assert_eq!(count_numbers("Pid:\t7\nNSpid:\t7\t1\n"), Some(2));
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "sleep", "60"]);
        let mut first = unshare.spawn().unwrap();
        let path = format!("/proc/{0}/task/{0}/children", first.id());
        let begun = std::time::Instant::now();
        let inside = loop {
            let children = std::fs::read_to_string(&path).unwrap_or_default();
            let child = children.trim().parse().ok();
            let ended = first.try_wait().unwrap().is_some();
            if child.is_some() || ended || begun.elapsed() > Duration::from_secs(60) {
                break child;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let shares = inside.map(shares_numbers);
        let _ = first.kill();
        first.wait().unwrap();
        match shares {
            Some(shares) => assert_eq!(shares, Some(false)),
            None => eprintln!("skipped: no PID namespace can be made"),
        }
    }

    #[test]
    fn a_cgroup_made_again_is_another() {
        let folder =
            cgroup_mount().map(|mount| mount.join(format!("pageone-{}", std::process::id())));
        let made = folder.and_then(|folder| std::fs::create_dir(&folder).map(|()| folder));
        let folder = match made {
            Ok(folder) => folder,
            Err(error) => return eprintln!("skipped: no cgroup can be made: {error}"),
        };
        let found = [(); 2].map(|()| {
            let mut child = std::process::Command::new("sleep");
            let mut child = child.arg("60").spawn().unwrap();
            let _ = std::fs::create_dir(&folder);
            std::fs::write(folder.join("cgroup.procs"), child.id().to_string()).unwrap();
            let found = cgroup(child.id());
            child.kill().unwrap();
            child.wait().unwrap();
            // The kernel lets go of the last process a moment after its end is told.
            while std::fs::remove_dir(&folder).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            found.unwrap()
        });
        assert_eq!(found[0].path, found[1].path);
        assert_ne!(found[0].id, found[1].id);
    }

    #[test]
    fn a_sleeping_thread_is_told_from_a_starved_one() {
        assert_eq!(sleep_number(thread_id()), None, "this one runs");
        let (send, sent) = std::sync::mpsc::channel();
        let (wake, sleep) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            send.send(thread_id()).unwrap();
            let _ = sleep.recv();
        });
        let tid = sent.recv().unwrap();
        let mut number = None;
        while number.is_none() {
            number = sleep_number(tid);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(sleep_number(tid) >= number);
        drop(wake);
        thread.join().unwrap();
        assert_eq!(sleep_number(tid), None, "it is gone");
    }
}
