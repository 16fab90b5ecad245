//! The machine's memory at one moment: /proc/meminfo.

use std::fs;
use std::io;

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
        Self::parse(&fs::read_to_string("/proc/meminfo")?)
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
    fn a_missing_field_is_named() {
        let error = MemInfo::parse("MemTotal: 5 kB\n").unwrap_err();
        assert!(error.to_string().contains("MemAvailable"), "{error}");
    }
}
