//! The mappings of a process, where its threads run, and which of its frames KSM shares: /proc/PID/maps, /proc/PID/task,
//! /proc/kpageflags.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::process::Pid;

/// The most that is read of a process's mappings: a stranger may name a file so that each takes 17 KiB.
const MOST_TEXT: u64 = 128 << 20;
/// The most threads that are looked at.
const MOST_THREADS: usize = 1 << 16;
/// Bit of /proc/kpageflags: the frame is shared by the kernel's own page merging.
const KPF_KSM: u32 = 21;

/// One line of /proc/PID/maps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The addresses, in bytes.
    pub range: Range<u64>,
    /// The file, `[heap]` and the like, or nothing.
    pub name: String,
}

/// Tells of each mapping of a process.
///
/// # Errors
/// The process is gone or not ours to look at; `InvalidData` for a line that is no mapping, and where there are too many; what `each`
/// gives.
pub fn each_mapping(pid: Pid, mut each: impl FnMut(&Mapping) -> io::Result<()>) -> io::Result<()> {
    let path = format!("/proc/{}/maps", pid.as_raw_nonzero());
    let bad = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut text = BufReader::new(crate::text::open(&path)?.take(MOST_TEXT));
    let mut line = Vec::new();
    while text.read_until(b'\n', &mut line)? > 0 {
        let one = String::from_utf8_lossy(line.trim_ascii_end());
        match parse_mapping(&one) {
            // The last line may be cut, or may not.
            _ if text.get_ref().limit() == 0 => {
                return Err(bad(
                    "its mappings are too many, or have too long names".to_owned()
                ));
            }
            Some(mapping) => each(&mapping)?,
            None => return Err(bad(format!("{path}: line {one:?}"))),
        }
        line.clear();
    }
    Ok(())
}

fn parse_mapping(line: &str) -> Option<Mapping> {
    // start-end perms offset major:minor inode    name (which may hold spaces)
    let (addresses, rest) = line.split_once(' ')?;
    let (start, end) = addresses.split_once('-')?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let end = u64::from_str_radix(end, 16).ok()?;
    let mut name = rest;
    for _ in 0..4 {
        name = name
            .trim_start()
            .split_once(' ')
            .map_or("", |(_, rest)| rest);
    }
    (start < end).then(|| Mapping {
        range: start..end,
        name: name.trim_start().to_owned(),
    })
}

/// Tells frames that the kernel's own page merging shares from others.
#[derive(Debug)]
pub struct FrameFlags(File);

impl FrameFlags {
    /// Opens /proc/kpageflags, which is root's.
    ///
    /// # Errors
    /// EACCES for others.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/kpageflags").map(Self)
    }

    /// Whether KSM shares this frame.
    ///
    /// # Errors
    /// There is no such frame.
    pub fn is_ksm(&self, frame: u64) -> io::Result<bool> {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, frame * 8)?;
        Ok(u64::from_ne_bytes(word) >> KPF_KSM & 1 == 1)
    }
}

/// Offers all anonymous memory of this process, and of what it starts, to the kernel's own page merging. Linux 6.4.
///
/// # Errors
/// EINVAL on an older kernel or one without KSM.
pub fn offer_memory_to_ksm() -> io::Result<()> {
    const PR_SET_MEMORY_MERGE: libc::c_int = 67;
    // SAFETY: takes numbers only. Merging shares frames copy-on-write: no byte that a program can read changes.
    let result = unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 1_u64, 0_u64, 0_u64, 0_u64) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// The CPU each thread of a process ran on last, by thread id; of 65536 threads at most.
///
/// # Errors
/// The process is gone. A thread that ends meanwhile is left out.
pub fn thread_cpus(pid: Pid) -> io::Result<Vec<(u32, u32)>> {
    let folder = format!("/proc/{}/task", pid.as_raw_nonzero());
    let mut threads = Vec::new();
    for thread in crate::text::numbers(&folder, MOST_THREADS)? {
        let Ok(stat) = crate::text::about(format!("{folder}/{thread}/stat")) else {
            continue;
        };
        threads.extend(parse_stat_cpu(&stat).map(|cpu| (thread, cpu)));
    }
    threads.sort_unstable();
    Ok(threads)
}

fn parse_stat_cpu(stat: &str) -> Option<u32> {
    // The name in parentheses may hold anything; the fields after it are plain. Field 39 is the CPU.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(36)?.parse().ok()
}

/// The processes whose name (`/proc/PID/comm`) is `name`, ascending.
///
/// # Errors
/// /proc cannot be read.
pub fn processes_named(name: &str) -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for number in crate::text::numbers("/proc", usize::MAX)? {
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
        found.extend(pid.filter(|&pid| name_of(pid) == name));
    }
    found.sort_unstable_by_key(|pid| pid.as_raw_nonzero());
    Ok(found)
}

/// The name of a process, or nothing when it is gone.
pub fn name_of(pid: Pid) -> String {
    let name = crate::process::comm(pid.as_raw_nonzero().get().cast_unsigned());
    name.raw().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_lines() {
        let mapping =
            parse_mapping("7f00-8f00 r--p 0000 00:01 1234   /memfd:a b (deleted)").unwrap();
        assert_eq!(
            mapping,
            Mapping {
                range: 0x7f00..0x8f00,
                name: "/memfd:a b (deleted)".into()
            }
        );
        assert_eq!(
            parse_mapping("7f00-8f00 rw-p 0000 00:00 0 ").unwrap().name,
            ""
        );
        assert_eq!(parse_mapping("8f00-7f00 rw-p 0 00:00 0"), None);
        assert_eq!(parse_mapping("rubbish"), None);
    }

    #[test]
    fn the_cpu_of_a_stat_line() {
        let mut line = String::from("12 (a ) b) S");
        for field in 4..=52 {
            line += &format!(" {field}");
        }
        assert_eq!(parse_stat_cpu(&line), Some(39));
    }

    #[test]
    fn our_own_threads_are_found() {
        let pid = rustix::process::getpid();
        assert!(!thread_cpus(pid).unwrap().is_empty());
        assert!(processes_named(&name_of(pid)).unwrap().contains(&pid));
        let mut stacks = 0;
        let count = |mapping: &Mapping| {
            stacks += usize::from(mapping.name == "[stack]");
            Ok(())
        };
        each_mapping(pid, count).unwrap();
        assert_eq!(stacks, 1);
    }
}
