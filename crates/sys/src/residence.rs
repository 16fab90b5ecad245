//! What a process has in memory and where its threads run: /proc/PID/maps, PAGEMAP_SCAN, /proc/PID/task.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use linux_raw_sys::general::{
    PAGE_IS_FILE, PAGE_IS_PFNZERO, PAGE_IS_PRESENT, page_region, pm_scan_arg,
};
use rustix::process::Pid;

use crate::node::read_text;

const PAGE: u64 = 4096;
// _IOWR('f', 16, struct pm_scan_arg)
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
/// Runs that one PAGEMAP_SCAN call may return.
const RUNS: usize = 1024;
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

/// A run of pages that are present and alike.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PresentRun {
    /// The addresses, in bytes.
    pub range: Range<u64>,
    /// Whether the pages belong to a file or to shared memory.
    pub file: bool,
    /// Whether they are the kernel's one page of zeros, which is on no node that counts.
    pub zero: bool,
}

/// The mappings of a process.
///
/// # Errors
/// The process is gone or not ours to look at; `InvalidData` for a line that is no mapping.
pub fn mappings(pid: Pid) -> io::Result<Vec<Mapping>> {
    let path = format!("/proc/{}/maps", pid.as_raw_nonzero());
    read_text(Path::new(&path))?
        .lines()
        .map(|line| {
            parse_mapping(line).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{path}: line '{line}'"))
            })
        })
        .collect()
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

/// /proc/PID/pagemap of one process.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens it.
    ///
    /// # Errors
    /// The process is gone or not ours to look at.
    pub fn open(pid: Pid) -> io::Result<Self> {
        File::open(format!("/proc/{}/pagemap", pid.as_raw_nonzero())).map(Self)
    }

    /// Calls `visit` with each run of present pages in `range`, ascending. Holes cost next to nothing.
    ///
    /// # Errors
    /// ENOTTY before Linux 6.7.
    pub fn present_runs(
        &self,
        range: Range<u64>,
        mut visit: impl FnMut(PresentRun),
    ) -> io::Result<()> {
        let mut runs = [page_region {
            start: 0,
            end: 0,
            categories: 0,
        }; RUNS];
        let mut start = range.start;
        while start < range.end {
            let mut arg = pm_scan_arg {
                size: size_of::<pm_scan_arg>() as u64,
                flags: 0,
                start,
                end: range.end,
                walk_end: 0,
                vec: runs.as_mut_ptr() as u64,
                vec_len: RUNS as u64,
                max_pages: 0,
                category_inverted: 0,
                category_mask: u64::from(PAGE_IS_PRESENT),
                category_anyof_mask: 0,
                return_mask: u64::from(PAGE_IS_FILE | PAGE_IS_PFNZERO),
            };
            // SAFETY: the argument is a live value of the type the command takes, of the size it states, and
            // its `vec` points to `vec_len` writable elements. Without a write-protect flag the scan only reads.
            let found = unsafe { libc::ioctl(self.0.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
            let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
            for run in &runs[..found] {
                visit(PresentRun {
                    range: run.start..run.end,
                    file: run.categories & u64::from(PAGE_IS_FILE) != 0,
                    zero: run.categories & u64::from(PAGE_IS_PFNZERO) != 0,
                });
            }
            if arg.walk_end <= start {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "PAGEMAP_SCAN stands still",
                ));
            }
            start = arg.walk_end;
        }
        Ok(())
    }

    /// The frame number of each page of `range`, 0 where it is absent or where we may not know.
    ///
    /// # Errors
    /// The process is gone.
    pub fn frames(&self, range: Range<u64>) -> io::Result<Vec<u64>> {
        let pages = usize::try_from((range.end - range.start) / PAGE).unwrap_or(0);
        let mut bytes = vec![0; pages * 8];
        self.0.read_exact_at(&mut bytes, range.start / PAGE * 8)?;
        let frames = bytes.chunks_exact(8).map(|entry| {
            let mut word = [0; 8];
            word.copy_from_slice(entry);
            let word = u64::from_ne_bytes(word);
            if word >> 63 == 1 {
                word & ((1 << 55) - 1)
            } else {
                0
            }
        });
        Ok(frames.collect())
    }
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

/// Pages that KSM shares in the whole machine; 0 where there is no KSM.
pub fn ksm_pages_sharing() -> u64 {
    std::fs::read_to_string("/sys/kernel/mm/ksm/pages_sharing")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

/// Offers all anonymous memory of this process, and of what it starts, to the kernel's own page merging. Linux 6.4.
///
/// # Errors
/// EINVAL on an older kernel or one without KSM, EPERM without CAP_SYS_RESOURCE.
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

/// The CPU each thread of a process ran on last, by thread id.
///
/// # Errors
/// The process is gone. A thread that ends meanwhile is left out.
pub fn thread_cpus(pid: Pid) -> io::Result<Vec<(i32, u32)>> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()))? {
        let entry = entry?;
        let Some(thread) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some(cpu) = parse_stat_cpu(&stat) {
            threads.push((thread, cpu));
        }
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
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
            .and_then(Pid::from_raw);
        let Some(pid) = pid else { continue };
        let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.trim_end() == name {
            found.push(pid);
        }
    }
    found.sort_unstable_by_key(|pid| pid.as_raw_nonzero());
    Ok(found)
}

/// The name of a process, or nothing when it is gone.
pub fn name_of(pid: Pid) -> String {
    std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()))
        .map(|name| name.trim_end().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zeroed::ZeroedSlice;

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
    fn our_own_pages_are_found() {
        let mut table = ZeroedSlice::<u64>::new(512 * 64).unwrap();
        table.allow_huge_pages(false);
        let start = table.as_ptr() as u64;
        table[512 * 3] = 1;
        table[512 * 4] = 1;
        std::hint::black_box(table[512 * 9]);
        let pagemap = Pagemap::open(rustix::process::getpid()).unwrap();
        let mut runs = Vec::new();
        let end = start + table.len_bytes() as u64;
        match pagemap.present_runs(start..end, |run| runs.push(run)) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                println!("skipped: the kernel has no PAGEMAP_SCAN");
                return;
            }
            result => result.unwrap(),
        }
        let run = |first: u64, last: u64, zero| PresentRun {
            range: start + first * PAGE..start + last * PAGE,
            file: false,
            zero,
        };
        assert_eq!(runs, [run(3, 5, false), run(9, 10, true)]);
        assert_eq!(pagemap.frames(start..end).unwrap().len(), 64);
    }

    #[test]
    fn our_own_threads_are_found() {
        let pid = rustix::process::getpid();
        assert!(!thread_cpus(pid).unwrap().is_empty());
        assert!(processes_named(&name_of(pid)).unwrap().contains(&pid));
        assert!(
            mappings(pid)
                .unwrap()
                .iter()
                .any(|mapping| mapping.name == "[stack]")
        );
    }
}
