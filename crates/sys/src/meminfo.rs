//! The machine's memory at one moment: /proc/meminfo.

use std::io;

use crate::text;
use crate::usage::kilobytes;

/// The fields that tell where merged memory went, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemInfo {
    /// All memory.
    pub total: u64,
    /// What a new program could use without swapping.
    pub available: u64,
    /// Kernel objects that cannot be reclaimed: VMAs and KSM's items are among
    /// them.
    pub slab_unreclaimable: u64,
    /// Page tables.
    pub page_tables: u64,
}

impl MemInfo {
    /// Reads the present figures.
    ///
    /// # Errors
    /// Whatever reading gives; `InvalidData` when a field is missing.
    pub fn read() -> io::Result<Self> {
        Self::parse(&text::read("/proc/meminfo")?)
    }

    fn parse(text: &str) -> io::Result<Self> {
        let field = |name| {
            kilobytes(text, name).ok_or_else(|| {
                let why = format!("/proc/meminfo has no field {name}");
                io::Error::new(io::ErrorKind::InvalidData, why)
            })
        };
        Ok(Self {
            total: field("MemTotal:")?,
            available: field("MemAvailable:")?,
            slab_unreclaimable: field("SUnreclaim:")?,
            page_tables: field("PageTables:")?,
        })
    }

    /// Kernel memory spent on keeping track of mappings.
    #[must_use]
    pub fn bookkeeping(&self) -> u64 {
        self.slab_unreclaimable + self.page_tables
    }
}

/// All memory, in MiB.
///
/// # Errors
/// As [`MemInfo::read`].
pub fn total_mib() -> io::Result<u64> {
    MemInfo::read().map(|info| info.total >> 20)
}

/// Bytes of free memory that lie in the CPUs' own lists. After many pages were freed, a CPU may keep
/// more than a gibibyte for its next allocations and give it back over minutes, and
/// [`MemInfo::available`] does not count it: `pagesets` of `/proc/zoneinfo`.
///
/// # Errors
/// Whatever reading gives.
pub fn cpu_lists() -> io::Result<u64> {
    Ok(parse_cpu_lists(&text::read("/proc/zoneinfo")?))
}

fn parse_cpu_lists(text: &str) -> u64 {
    let counts = text.lines().filter_map(|line| {
        let number = line.trim_start().strip_prefix("count:")?;
        number.trim().parse::<u64>().ok()
    });
    counts.sum::<u64>() * rustix::param::page_size() as u64
}

/// Percent of the last ten seconds in which at least one task waited for memory: `some avg10` of
/// `/proc/pressure/memory`.
///
/// # Errors
/// Whatever reading gives (kernels may be built or started without it); `InvalidData` when the figure
/// is missing.
pub fn stall_percent() -> io::Result<f64> {
    parse_stall(&text::read("/proc/pressure/memory")?)
}

fn parse_stall(text: &str) -> io::Result<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "));
    let mut words = some.unwrap_or_default().split(' ');
    let number = words.find_map(|word| word.strip_prefix("avg10=")?.parse().ok());
    number.ok_or_else(|| {
        let why = "/proc/pressure/memory has no figure `some avg10`";
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory() {
        let info = MemInfo::read().unwrap();
        assert!(info.total > info.available && info.available > 0);
        assert!(info.bookkeeping() > 0 && info.bookkeeping() < info.total);
    }

    #[test]
    fn the_lists_of_all_cpus_and_zones_are_added() {
        let text = "Node 0, zone  DMA\n  pagesets\n    cpu: 0\n        count:    3\n        high:  9\n\
                    Node 0, zone  Normal\n    cpu: 0\n              count:    4\n              batch: 7\n";
        assert_eq!(parse_cpu_lists(text), 7 * rustix::param::page_size() as u64);
        assert!(cpu_lists().unwrap() < MemInfo::read().unwrap().total);
    }

    #[test]
    fn the_stall_of_some_tasks_is_read() {
        let text = "some avg10=12.34 avg60=1.00 avg300=0.00 total=5\nfull avg10=9.00 total=1\n";
        assert_eq!(parse_stall(text).unwrap(), 12.34);
        assert!(parse_stall("full avg10=9.00 total=1\n").is_err());
        assert!(parse_stall("some avg60=9.00 total=1\n").is_err());
    }

    #[test]
    fn a_missing_field_is_named() {
        let error = MemInfo::parse("MemTotal: 5 kB\n").unwrap_err();
        assert!(error.to_string().contains("MemAvailable"), "{error}");
    }
}
