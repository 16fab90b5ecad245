//! Helpers that several test programs use.
#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod encode;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use numa::acpi::{Affinity, ProximityDomain, Slit, Srat};
use numa::{ProcessReport, Topology};
use sys::zeroed::ZeroedSlice;

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
        header: encode::header(revision),
        entries,
        quirks: Vec::new(),
    }
}

pub(crate) fn slit(localities: usize, distances: &[u8]) -> Slit {
    Slit {
        header: encode::header(1),
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

/// Whether this runs in a test guest, which may be treated without care.
pub(crate) fn in_guest() -> bool {
    std::env::var_os("PAGEONE_TEST_NODES").is_some()
}

const HOLD: &str = "PAGEONE_TEST_HOLD_PAGES";
const WORDS_PER_PAGE: usize = 512;

/// In a child of [`holder`]: makes so many pages present, all alike, says so, and waits.
pub(crate) fn hold_pages() {
    let Ok(pages) = std::env::var(HOLD) else {
        return;
    };
    let table =
        ZeroedSlice::<AtomicU64>::new(pages.parse::<usize>().unwrap() * WORDS_PER_PAGE).unwrap();
    table.allow_huge_pages(false);
    table
        .iter()
        .step_by(WORDS_PER_PAGE)
        .for_each(|word| word.store(1, Ordering::Relaxed));
    println!("holding");
    let _ = std::io::stdin().read(&mut [0]);
}

/// Starts a child that holds so many pages of anonymous memory until its standard input ends.
pub(crate) fn holder(program: &Path, pages: u64) -> Child {
    let mut child = Command::new(program)
        .args(["--exact", "hold_pages", "--nocapture"])
        .env(HOLD, pages.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let holding = output
        .by_ref()
        .lines()
        .any(|line| line.unwrap().ends_with("holding"));
    assert!(holding, "the child ended early");
    child.stdout = Some(output.into_inner()); // open for the rest of what it prints
    child
}

pub(crate) fn report_of(child: &Child) -> ProcessReport {
    ProcessReport::read(
        &Topology::live().unwrap(),
        rustix::process::Pid::from_child(child),
    )
    .unwrap()
}

pub(crate) fn end(mut child: Child) {
    drop(child.stdin.take());
    child.wait().unwrap();
}

pub(crate) fn merged(report: &ProcessReport) -> u64 {
    report.nodes.values().map(|pages| pages.merged).sum()
}
