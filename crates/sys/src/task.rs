//! Whether tasks still live: the holder of a lock, and the threads of this process.
//!
//! Nothing here allocates, sets `errno` or needs thread-local storage.
//!
//! Source: proc_pid_stat(5).

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::process::Pid;

use crate::mapping::OwnMemory;

/// Most locks of a thread's list that the kernel looks at (`ROBUST_LIST_LIMIT`).
const MOST_LOCKS: usize = 2048;

/// Which namespace the numbers of this process's threads belong to; `None` where /proc is not there.
#[must_use]
pub fn namespace() -> Option<u64> {
    let stat = rustix::fs::stat(c"/proc/self/ns/pid").ok()?;
    Some(stat.st_ino)
}

/// Whether the task with this number has ended. When in doubt it lives. The number must belong to the
/// caller's namespace.
#[must_use]
pub fn is_gone(number: u32) -> bool {
    // A thread group's first thread stays as a zombie while others live.
    is_unknown(number) || stat(number).is_some_and(|stat| stat.has_ended)
}

/// Whether the kernel knows no task of this number: by a call that needs no descriptor.
#[must_use]
pub fn is_unknown(number: u32) -> bool {
    let task = i32::try_from(number).ok().and_then(Pid::from_raw);
    task.is_none_or(|task| rustix::process::test_kill_process(task) == Err(Errno::SRCH))
}

/// Whether the task runs, or waits for nothing but a processor. When in doubt it does not.
#[must_use]
pub(crate) fn is_running(number: u32) -> bool {
    stat(number).is_some_and(|stat| stat.runs)
}

fn stat(number: u32) -> Option<Stat> {
    let mut path = *b"/proc/..........\0\0\0\0\0\0";
    write_path(&mut path, number);
    let file = open(std::ffi::CStr::from_bytes_until_nul(&path).ok()?).ok()?;
    Stat::read(&file).ok()
}

/// Where a thread of this process has its list of robust locks (get_robust_list(2)), if it has one. The C library keeps the word that the
/// kernel clears at the thread's end in the same line of the cache.
#[must_use]
pub fn robust_list(thread: u32) -> Option<usize> {
    let (mut head, mut len) = (0usize, 0usize);
    let (to, size) = (
        (&raw mut head).expose_provenance(),
        (&raw mut len).expose_provenance(),
    );
    let args = [thread as usize, to, size, 0, 0, 0];
    // SAFETY: the kernel writes an address and a length.
    unsafe { crate::raw::call(libc::SYS_get_robust_list, args) }.ok()?;
    (head != 0).then_some(head)
}

/// Calls `each` with the words of the robust locks that a thread has by its list at `head`: what the kernel reads and writes there
/// when the thread ends. The thread may change its list meanwhile. What cannot be read is left out, and ends the list.
///
/// Source: `exit_robust_list` in `kernel/futex/core.c`.
pub fn robust_locks(memory: &OwnMemory, head: usize, mut each: impl FnMut(usize)) {
    let mut words = [[0; 8]; 3];
    if memory.read(head, words.as_flattened_mut()).is_err() {
        return;
    }
    // The first lock, how far its word is from its place in the list, and the lock that is being taken or given back.
    let [first, offset, pending] = words.map(usize::from_ne_bytes);
    // The lowest bit says that the lock inherits priorities.
    let place = |entry: usize| entry & !1;
    let mut lock = |entry: usize| {
        each(place(entry));
        each(place(entry).wrapping_add(offset));
    };
    if place(pending) != 0 {
        lock(pending);
    }
    let mut entry = first;
    for _ in 0..MOST_LOCKS {
        if place(entry) == head || place(entry) == 0 {
            return;
        }
        lock(entry);
        let mut next = [0; 8];
        if memory.read(place(entry), &mut next).is_err() {
            return;
        }
        entry = usize::from_ne_bytes(next);
    }
}

/// How many threads this process has, an ended first one included. Asks nothing that takes rights, and opens no file,
/// on which a stranger may have locks: `/proc/self/task` has a link for each thread, and two more.
///
/// # Errors
/// Whatever stat(2) of `/proc/self/task` gives; `INVAL` where it counts no threads.
pub fn threads() -> Result<u32> {
    let links = rustix::fs::stat(c"/proc/self/task")?.st_nlink;
    let threads = u32::try_from(links)
        .ok()
        .and_then(|links| links.checked_sub(2));
    threads.filter(|threads| *threads > 0).ok_or(Errno::INVAL)
}

/// Writes `/proc/NUMBER/stat` and a zero.
fn write_path(path: &mut [u8; 22], number: u32) {
    let mut digits = [0u8; 10];
    let (mut rest, mut first) = (number, digits.len());
    while first == digits.len() || rest > 0 {
        first -= 1;
        digits[first] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    let text = b"/proc/".iter().chain(&digits[first..]).chain(b"/stat\0");
    path.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
}

fn open(path: &std::ffi::CStr) -> Result<OwnedFd> {
    // These flags alone are those of the agent's filter.
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// What `/proc/PID/stat` says.
struct Stat {
    has_ended: bool,
    runs: bool,
    /// Threads of the process, an ended first one included while others live.
    threads: u32,
    /// With what the task ended, as wait(2) tells it.
    code: i32,
}

impl Stat {
    fn read(file: &OwnedFd) -> Result<Self> {
        let mut buffer = [0u8; 512];
        let len = rustix::io::pread(file, &mut buffer, 0)?;
        Self::parse(buffer.get(..len).unwrap_or_default()).ok_or(Errno::INVAL)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // The name, in parentheses, may hold anything.
        let name_ends = text.iter().rposition(|&byte| byte == b')')?;
        let mut fields = text.get(name_ends + 2..)?.split(|&byte| byte == b' ');
        let state = fields.next()?;
        let number =
            |field| -> Option<i32> { std::str::from_utf8(field).ok()?.trim_end().parse().ok() };
        Some(Self {
            has_ended: matches!(state, b"Z" | b"X" | b"x"),
            runs: state == b"R",
            threads: number(fields.nth(16)?)?.unsigned_abs(),
            code: number(fields.nth(31)?)?,
        })
    }
}

/// The first thread of this process, whose end the others can notice.
#[derive(Debug)]
pub struct Leader(OwnedFd);

impl Leader {
    /// The first thread of this process.
    ///
    /// # Errors
    /// Whatever opening `/proc/self/stat` gives.
    pub fn of_this_process() -> Result<Self> {
        open(c"/proc/self/stat").map(Self)
    }

    /// The code it ended with, if it has ended and one other thread is left: the caller.
    #[must_use]
    pub fn left_one(&self) -> Option<i32> {
        let stat = Stat::read(&self.0).ok();
        let last = stat.filter(|stat| stat.has_ended && stat.threads == 2);
        last.map(|stat| stat.code >> 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locks_of_a_list_are_found() {
        let memory = OwnMemory::open().unwrap();
        // A head, and two entries, the second of which inherits priorities; their words lie 24 bytes before them.
        let mut list = [0usize; 8];
        let at = |word: usize| (&raw const list[word]).addr();
        let (head, one, two) = (at(0), at(4), at(6));
        list[..3].copy_from_slice(&[one, 24_usize.wrapping_neg(), 0]);
        (list[4], list[6]) = (two | 1, head);
        let found = |list: &[usize; 8]| {
            let mut found = Vec::new();
            let head = std::hint::black_box(list).as_ptr().addr();
            robust_locks(&memory, head, |word| found.push(word));
            found
        };
        assert_eq!(found(&list), [one, one - 24, two, two - 24]);
        list[2] = two;
        assert_eq!(found(&list)[..2], [two, two - 24]);
        // A list without an end, one that leads nowhere, and none.
        list[6] = one;
        assert_eq!(found(&list).len(), 2 * (MOST_LOCKS + 1));
        list[4] = 8;
        assert_eq!(found(&list).len(), 6);
        robust_locks(&memory, 8, |word| panic!("{word:x}"));
    }

    #[test]
    fn a_line_is_read_whatever_the_name() {
        let stat = |text: &str| {
            let stat = Stat::parse(text.as_bytes()).unwrap();
            (stat.has_ended, stat.threads, stat.code)
        };
        let before = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16";
        let after = "0 ".repeat(31);
        let line = |name, threads| format!("77 ({name}) {before} {threads} {after}1792\n");
        assert_eq!(
            stat(&line("a) Z", 3).replace(") 1", ") S 1")),
            (false, 3, 1792)
        );
        assert_eq!(stat(&line("", 2).replace(") 1", ") Z 1")), (true, 2, 1792));
        assert!(Stat::parse(b"77 (cut) S 1 2").is_none());
        assert!(Stat::parse(b"").is_none());
    }

    #[test]
    fn a_path_has_the_number() {
        for (number, wanted) in [(0, "/proc/0/stat"), (u32::MAX, "/proc/4294967295/stat")] {
            let mut path = [b'.'; 22];
            write_path(&mut path, number);
            let path = std::ffi::CStr::from_bytes_until_nul(&path).unwrap();
            assert_eq!(path.to_str().unwrap(), wanted);
        }
    }

    #[test]
    fn an_ended_thread_is_gone_and_this_one_is_not() {
        assert!(!is_gone(crate::process::thread_id()) && is_gone(0) && is_gone(u32::MAX));
        let ended = std::thread::spawn(crate::process::thread_id)
            .join()
            .unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !is_gone(ended) {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        // A zombie has ended.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while !is_gone(child.id()) {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        child.wait().unwrap();
        let leader = Leader::of_this_process().unwrap();
        assert!(leader.left_one().is_none());
        assert!(namespace().is_some() && threads().unwrap() > 0);
    }
}
