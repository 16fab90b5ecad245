//! What processes and kernel threads use: CPU time and memory, as /proc tells it.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::process::comm;

/// CPU time of process `pid`, all threads, user and system; ended threads included.
///
/// # Errors
/// `NOENT` when the process is gone; `InvalidData` when the kernel's file is not understood.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let ticks = ticks(&stat).ok_or(io::ErrorKind::InvalidData)?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_nanos(ticks * (1_000_000_000 / per_second)))
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
        // Kernel threads have no memory: their statm is all zeros, and nobody can fake that.
        if let Some(pid) = pid
            && comm(pid).raw() == name
            && fs::read_to_string(entry.path().join("statm")).is_ok_and(|s| s.starts_with("0 "))
        {
            return Ok(Some(pid));
        }
    }
    Ok(None)
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

/// The bytes of a `Name: 123 kB` line.
pub(crate) fn field(path: &Path, name: &str) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
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
    fn kernel_threads_are_told_from_processes() {
        assert_eq!(kernel_thread("kthreadd").unwrap().unwrap_or(2), 2);
        let own = comm(std::process::id());
        assert_eq!(kernel_thread(own.raw()).unwrap(), None);
    }
}
