//! What several test programs use.
#![allow(dead_code, reason = "each test program uses a part")]

use std::path::{Path, PathBuf};

use numa::acpi::{Affinity, Header, ProximityDomain, Slit, Srat};

/// Where real tables may be: the directory in PAGEONE_ACPI_TABLES, a folder beside the checkout, this machine.
pub(crate) fn table_dirs() -> Vec<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/acpi");
    let named = std::env::var_os("PAGEONE_ACPI_TABLES").map(PathBuf::from);
    named
        .into_iter()
        .chain([beside, PathBuf::from("/sys/firmware/acpi/tables")])
        .filter(|dir| dir.is_dir())
        .collect()
}

/// All readable tables with this signature, with their names.
pub(crate) fn real_tables(signature: &str) -> Vec<(String, Vec<u8>)> {
    let mut tables = Vec::new();
    for dir in table_dirs() {
        for entry in std::fs::read_dir(&dir).unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let wanted = name == signature || name.ends_with(&format!(".{signature}.bin"));
            if let Some(bytes) = wanted.then(|| std::fs::read(entry.path()).ok()).flatten() {
                tables.push((name, bytes));
            }
        }
    }
    tables.sort();
    tables
}

pub(crate) fn cpu(domain: u32, apic_id: u8) -> Affinity {
    Affinity::LocalApic {
        domain: ProximityDomain(domain),
        apic_id,
        sapic_eid: 0,
        flags: 1,
        clock_domain: 0,
    }
}

pub(crate) fn memory(domain: u32, base: u64, length: u64) -> Affinity {
    Affinity::Memory {
        domain: ProximityDomain(domain),
        base,
        length,
        flags: 1,
    }
}

pub(crate) fn srat(revision: u8, entries: Vec<Affinity>) -> Srat {
    Srat {
        header: Header::new(revision),
        entries,
        quirks: Vec::new(),
    }
}

pub(crate) fn slit(localities: usize, distances: &[u8]) -> Slit {
    Slit {
        header: Header::new(1),
        localities,
        distances: distances.to_vec(),
        quirks: Vec::new(),
    }
}

/// Makes the bytes of a table add up to zero again after they were changed.
pub(crate) fn seal(bytes: &mut [u8]) {
    bytes[9] = 0;
    let sum = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    bytes[9] = 0_u8.wrapping_sub(sum);
}
