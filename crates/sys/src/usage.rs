//! CPU time and memory that processes and kernel threads use, as /proc tells it.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use crate::foreign::ForeignName;
use crate::process::comm;
use crate::text;

/// CPU time of process `pid`, all threads, user and system; ended threads included.
///
/// # Errors
/// `NOENT` when the process is gone; `InvalidData` when the kernel's file is not understood.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    time_of(&text::about(format!("/proc/{pid}/stat"))?)
}

/// CPU time of the living threads of process `pid` that are called `name`, user and system.
///
/// # Errors
/// As [`cpu_time`].
pub fn threads_cpu_time(pid: u32, name: &str) -> io::Result<Duration> {
    let mut sum = Duration::ZERO;
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ended meanwhile is left out.
        let Ok(stat) = text::about(entry?.path().join("stat")) else {
            continue;
        };
        if called(&stat, name) {
            sum += time_of(&stat)?;
        }
    }
    Ok(sum)
}

/// Whether the line of proc_pid_stat(5) is that of a thread called `name`.
fn called(stat: &str, name: &str) -> bool {
    let rest = stat.split_once('(').map_or("", |both| both.1);
    rest.rsplit_once(')').is_some_and(|both| both.0 == name)
}

fn time_of(stat: &str) -> io::Result<Duration> {
    let ticks = ticks(stat).ok_or(io::ErrorKind::InvalidData)?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_nanos(ticks * (1_000_000_000 / per_second)))
}

/// Page faults of process `pid` that needed no disk.
///
/// # Errors
/// As [`cpu_time`].
pub fn minor_faults(pid: u32) -> io::Result<u64> {
    let stat = text::about(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').map_or("", |both| both.1);
    // Field 10; the first behind the name is the third.
    let faults = fields.split_ascii_whitespace().nth(7);
    let faults = faults.and_then(|faults| faults.parse().ok());
    faults.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Fields 14 and 15 of proc_pid_stat(5); the name in parentheses may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

/// The kernel thread called `name`, if there is one.
///
/// # Errors
/// Whatever reading /proc gives.
pub fn kernel_thread(name: &str) -> io::Result<Option<u32>> {
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let pid = entry.file_name().to_str().and_then(|pid| pid.parse().ok());
        // Kernel threads have no memory: their statm is all zeros, and no process can fake that.
        if let Some(pid) = pid
            && comm(pid).raw() == name
            && text::read(entry.path().join("statm")).is_ok_and(|s| s.starts_with("0 "))
        {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// When process `pid` began, in the kernel's ticks since boot: with the number it names one process for good.
///
/// # Errors
/// `NOENT` when the process is gone; `InvalidData` when the kernel's file is not understood.
pub fn began(pid: u32) -> io::Result<u64> {
    began_as(pid).map(|(began, _)| began)
}

/// What tells the program of a process from the one that it executes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The command's name, which it may change itself.
    pub name: ForeignName,
    /// Where the stack began, of which each exec chooses the place anew, unless that is off (`randomize_va_space`); 0 for one who may not know.
    pub stack: u64,
}

/// The same, and which program it executes, by one look.
///
/// # Errors
/// As [`began`].
pub fn began_as(pid: u32) -> io::Result<(u64, Program)> {
    // A name may be anything.
    let stat = crate::text::bytes(format!("/proc/{pid}/stat"))?;
    let stat = String::from_utf8_lossy(&stat);
    let (name, fields) = stat.rsplit_once(')').unwrap_or_default();
    let name = name.split_once('(').map_or("", |both| both.1);
    // The first behind the name is the third.
    let field = |number: usize| -> io::Result<u64> {
        let text = fields.split_ascii_whitespace().nth(number - 3);
        let number = text.and_then(|text| text.parse().ok());
        number.ok_or(io::ErrorKind::InvalidData.into())
    };
    let (began, stack) = (field(22)?, field(28)?);
    let name = name.into();
    Ok((began, Program { name, stack }))
}

/// How long after the machine's start a time of [`began`] is, in whole seconds.
#[must_use]
pub fn seconds_since_boot(began: u64) -> u64 {
    began / rustix::param::clock_ticks_per_second().max(1)
}

/// Memory of process `pid` that is resident, shared pages whole, in bytes.
///
/// # Errors
/// `NOENT` when the process is gone; `InvalidData` when the field is missing.
pub fn resident_bytes(pid: u32) -> io::Result<u64> {
    field(Path::new(&format!("/proc/{pid}/status")), "VmRSS:")
}

/// The most memory of process `pid` that was resident at a time, in bytes.
///
/// # Errors
/// As [`resident_bytes`].
pub fn most_resident_bytes(pid: u32) -> io::Result<u64> {
    field(Path::new(&format!("/proc/{pid}/status")), "VmHWM:")
}

/// Private anonymous memory of process `pid` that is resident, in bytes.
///
/// # Errors
/// `NOENT` when the process is gone; `InvalidData` when the field is missing.
pub fn anonymous_bytes(pid: u32) -> io::Result<u64> {
    field(Path::new(&format!("/proc/{pid}/status")), "RssAnon:")
}

/// Proportional memory of process `pid`, in bytes: a page that n processes map counts 1/n.
///
/// # Errors
/// `NOENT` when the process is gone; `PermissionDenied` for others' processes.
pub fn proportional_bytes(pid: u32) -> io::Result<u64> {
    field(Path::new(&format!("/proc/{pid}/smaps_rollup")), "Pss:")
}

/// The anonymous part of [`proportional_bytes`]: memory of files left out.
///
/// # Errors
/// As [`proportional_bytes`].
pub fn proportional_anonymous_bytes(pid: u32) -> io::Result<u64> {
    field(Path::new(&format!("/proc/{pid}/smaps_rollup")), "Pss_Anon:")
}

/// Anonymous memory of process `pid` that lies in huge pages, in bytes.
///
/// # Errors
/// As [`proportional_bytes`].
pub fn huge_bytes(pid: u32) -> io::Result<u64> {
    let rollup = format!("/proc/{pid}/smaps_rollup");
    field(Path::new(&rollup), "AnonHugePages:")
}

/// Page tables of process `pid`, in bytes.
///
/// # Errors
/// `NOENT` when the process is gone; `InvalidData` when the field is missing.
pub fn page_table_bytes(pid: u32) -> io::Result<u64> {
    field(Path::new(&format!("/proc/{pid}/status")), "VmPTE:")
}

/// The memory files (memfd_create(2)) that process `pid` has open: the number of each, and the bytes that have frames. Two
/// descriptors of one file give it twice.
///
/// # Errors
/// `NOENT` when the process is gone; `PermissionDenied` for others' processes.
pub fn memory_files(pid: u32) -> io::Result<Vec<(u64, u64)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let link = fs::read_link(&path).unwrap_or_default();
        // One that was closed meanwhile is left out.
        if link.as_os_str().as_bytes().starts_with(b"/memfd:")
            && let Ok(file) = fs::metadata(&path)
        {
            files.push((file.ino(), file.blocks() * 512));
        }
    }
    Ok(files)
}

/// The bytes of a `Name: 123 kB` line.
pub(crate) fn field(path: &Path, name: &str) -> io::Result<u64> {
    let text = text::about(path)?;
    kilobytes(&text, name).ok_or_else(|| {
        let why = format!("{} has no field {name}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

/// The bytes that the line `name 123 kB` of `text` tells.
pub(crate) fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_figures_are_there() {
        let pid = std::process::id();
        assert!(anonymous_bytes(pid).unwrap() > 0);
        assert!(proportional_bytes(pid).unwrap() > 0);
        let begin = cpu_time(pid).unwrap();
        while cpu_time(pid).unwrap() < begin + Duration::from_millis(20) {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "7 (a) R 1 (b) S 1 1 1 0 -1 4 0 0 0 0 12 30 0 0 20 0 1 0 5 0";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("7 (short) S 1"), None);
    }

    #[test]
    fn touched_pages_show_as_faults_and_as_anonymous_memory() {
        const LEN: usize = 64 * 4096;
        let pid = std::process::id();
        let (faults, memory) = (minor_faults(pid), proportional_anonymous_bytes(pid));
        let mut more = crate::memory::Anonymous::new(LEN).unwrap();
        more.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        assert!(minor_faults(pid).unwrap() > faults.unwrap());
        // Tests beside this one give memory back, not megabytes.
        assert!(proportional_anonymous_bytes(pid).unwrap() + (8 << 20) > memory.unwrap());
        assert!(page_table_bytes(pid).unwrap() > 0);
    }

    #[test]
    fn a_thread_is_found_by_its_name_alone() {
        const NAME: &str = "7 ) R 1 (odd)";
        let pid = std::process::id();
        let busy = move || {
            let time = || threads_cpu_time(pid, NAME).unwrap();
            while time() < Duration::from_millis(20) {
                std::hint::spin_loop();
            }
            time()
        };
        let thread = std::thread::Builder::new().name(NAME.to_owned());
        let time = thread.spawn(busy).unwrap().join().unwrap();
        assert!(time <= cpu_time(pid).unwrap());
        assert_eq!(threads_cpu_time(pid, "none").unwrap(), Duration::ZERO);
    }

    #[test]
    fn a_memory_file_is_counted_by_its_frames() {
        use std::io::{Seek, Write};
        let file = rustix::fs::memfd_create("counted", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = fs::File::from(file);
        file.set_len(1 << 20).unwrap();
        file.seek(io::SeekFrom::Start(8192)).unwrap();
        file.write_all(&[1; 8192]).unwrap();
        let number = file.metadata().unwrap().ino();
        let files = memory_files(std::process::id()).unwrap();
        let found = files.iter().find(|file| file.0 == number);
        assert_eq!(found, Some(&(number, 8192)));
    }

    #[test]
    fn kernel_threads_are_told_from_processes() {
        assert_eq!(kernel_thread("kthreadd").unwrap().unwrap_or(2), 2);
        let own = comm(std::process::id());
        assert_eq!(kernel_thread(own.raw()).unwrap(), None);
    }
}
