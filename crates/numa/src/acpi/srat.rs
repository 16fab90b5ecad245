//! SRAT: the System Resource Affinity Table. Which CPU, memory and device is in which proximity domain.
//!
//! ```text
//!   0 header   36 u32 = 1   40 reserved   48 entries: type u8, length u8, …
//! ```
//!
//! Revision 1 has eight bits for a domain, revisions 2 and 3 have 32; the upper bits are reserved, and not
//! always zero, in revision 1.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::bytes::Bytes;
use super::header::{self, Kind, Step};
use super::{AcpiError, Header, MAX_DOMAINS, ProximityDomain, Quirk, Reading};

const KIND: Kind = Kind {
    signature: *b"SRAT",
    header_len: 48,
    revisions: 1..=3,
};
const ENTRIES_AT: usize = 48;
const ENABLED: u32 = 1;

/// Flags of a memory entry.
pub mod memory_flags {
    /// The entry counts at all.
    pub const ENABLED: u32 = 1;
    /// The memory can come and go while the machine runs, and need not be there yet.
    pub const HOT_PLUGGABLE: u32 = 2;
    /// The memory keeps its content without power.
    pub const NON_VOLATILE: u32 = 4;
}

/// One entry of the table. Bit 0 of `flags` is "enabled".
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields bear the specification's names")]
pub enum Affinity {
    /// Type 0: a CPU by its local APIC id or, on Itanium, SAPIC id and EID.
    LocalApic {
        domain: ProximityDomain,
        apic_id: u8,
        sapic_eid: u8,
        flags: u32,
        clock_domain: u32,
    },
    /// Type 1: a range of physical memory, in bytes; flags are [`memory_flags`].
    Memory {
        domain: ProximityDomain,
        base: u64,
        length: u64,
        flags: u32,
    },
    /// Type 2: a CPU by its x2APIC id.
    X2Apic {
        domain: ProximityDomain,
        x2apic_id: u32,
        flags: u32,
        clock_domain: u32,
    },
    /// Type 3: an Arm CPU.
    Gicc {
        domain: ProximityDomain,
        processor_uid: u32,
        flags: u32,
        clock_domain: u32,
    },
    /// Type 4: an Arm interrupt translation service.
    Its {
        domain: ProximityDomain,
        its_id: u32,
    },
    /// Type 5: a device that initiates memory accesses.
    GenericInitiator {
        domain: ProximityDomain,
        device: DeviceHandle,
        flags: u32,
    },
    /// Type 6: where devices yet to come will be attached, such as a CXL host bridge.
    GenericPort {
        domain: ProximityDomain,
        device: DeviceHandle,
        flags: u32,
    },
    /// Type 7: a RISC-V CPU.
    Rintc {
        domain: ProximityDomain,
        processor_uid: u32,
        flags: u32,
        clock_domain: u32,
    },
    /// Another type: the bytes after type and length.
    Unknown { kind: u8, body: Vec<u8> },
}

/// Names a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields bear the specification's names")]
pub enum DeviceHandle {
    /// By its ACPI ids.
    Acpi { hid: [u8; 8], uid: u32 },
    /// By its place on a PCI bus.
    Pci { segment: u16, bdf: u16 },
    /// By other means.
    Other { kind: u8, handle: [u8; 16] },
}

impl Affinity {
    /// The domain that the entry names.
    pub fn domain(&self) -> Option<ProximityDomain> {
        match *self {
            Self::LocalApic { domain, .. }
            | Self::Memory { domain, .. }
            | Self::X2Apic { domain, .. }
            | Self::Gicc { domain, .. }
            | Self::Its { domain, .. }
            | Self::GenericInitiator { domain, .. }
            | Self::GenericPort { domain, .. }
            | Self::Rintc { domain, .. } => Some(domain),
            Self::Unknown { .. } => None,
        }
    }

    /// Whether the entry counts. An ITS always does; an unknown entry never does.
    pub fn is_enabled(&self) -> bool {
        match *self {
            Self::LocalApic { flags, .. }
            | Self::Memory { flags, .. }
            | Self::X2Apic { flags, .. }
            | Self::Gicc { flags, .. }
            | Self::GenericInitiator { flags, .. }
            | Self::GenericPort { flags, .. }
            | Self::Rintc { flags, .. } => flags & ENABLED != 0,
            Self::Its { .. } => true,
            Self::Unknown { .. } => false,
        }
    }
}

/// The table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Srat {
    /// The table's identity.
    pub header: Header,
    /// The entries in the table's order, the disabled ones included.
    pub entries: Vec<Affinity>,
    /// What was odd.
    pub quirks: Vec<Quirk>,
}

impl Srat {
    /// Reads a table.
    ///
    /// # Errors
    /// [`AcpiError`], with the offset; see [`acpi`](super) for what each reading accepts.
    pub fn parse(bytes: &[u8], reading: Reading) -> Result<Self, AcpiError> {
        let mut quirks = Vec::new();
        let (header, table) = header::open(bytes, &KIND, reading, &mut quirks)?;
        let wide = header.revision >= 2;
        let mut rest = table.rest(ENTRIES_AT);
        let mut entries = Vec::with_capacity(rest.len() / 16);
        let mut offsets = Vec::with_capacity(rest.len() / 16);
        while rest.len() > 0 {
            let length = usize::from(rest.u8(1)?);
            match header::next_entry(&mut rest, length, 2, reading, &mut quirks)? {
                Step::End => break,
                Step::Entry(entry) => {
                    entries.push(parse_entry(entry, wide, reading, &mut quirks)?);
                    offsets.push(entry.offset);
                }
            }
        }
        check_domains(&entries, &offsets)?;
        check_memory(&entries, &offsets, reading, &mut quirks)?;
        Ok(Self {
            header,
            entries,
            quirks,
        })
    }
}

fn parse_entry(
    entry: Bytes<'_>,
    wide: bool,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<Affinity, AcpiError> {
    let kind = entry.u8(0)?;
    let Some(expected) = length_of(kind) else {
        return Ok(Affinity::Unknown {
            kind,
            body: entry.rest(2).bytes.to_vec(),
        });
    };
    header::expect_len(entry, u16::from(kind), expected, reading, quirks)?;
    let domain_at = |at| entry.u32(at).map(ProximityDomain);
    Ok(match kind {
        0 => Affinity::LocalApic {
            domain: local_apic_domain(entry, wide)?,
            apic_id: entry.u8(3)?,
            flags: entry.u32(4)?,
            sapic_eid: entry.u8(8)?,
            clock_domain: entry.u32(12)?,
        },
        1 => Affinity::Memory {
            domain: ProximityDomain(entry.u32(2)? & if wide { u32::MAX } else { 0xff }),
            base: entry.u64(8)?,
            length: entry.u64(16)?,
            flags: entry.u32(28)?,
        },
        2 => Affinity::X2Apic {
            domain: domain_at(4)?,
            x2apic_id: entry.u32(8)?,
            flags: entry.u32(12)?,
            clock_domain: entry.u32(16)?,
        },
        3 => Affinity::Gicc {
            domain: domain_at(2)?,
            processor_uid: entry.u32(6)?,
            flags: entry.u32(10)?,
            clock_domain: entry.u32(14)?,
        },
        4 => Affinity::Its {
            domain: domain_at(2)?,
            its_id: entry.u32(8)?,
        },
        5 => Affinity::GenericInitiator {
            domain: domain_at(4)?,
            device: device(entry)?,
            flags: entry.u32(24)?,
        },
        6 => Affinity::GenericPort {
            domain: domain_at(4)?,
            device: device(entry)?,
            flags: entry.u32(24)?,
        },
        _ => Affinity::Rintc {
            domain: domain_at(4)?,
            processor_uid: entry.u32(8)?,
            flags: entry.u32(12)?,
            clock_domain: entry.u32(16)?,
        },
    })
}

/// The length of the types that are known.
fn length_of(kind: u8) -> Option<usize> {
    [16, 40, 24, 18, 12, 32, 32, 20]
        .get(usize::from(kind))
        .copied()
}

fn local_apic_domain(entry: Bytes<'_>, wide: bool) -> Result<ProximityDomain, AcpiError> {
    let low = entry.u8(2)?;
    let [a, b, c] = if wide { entry.array(9)? } else { [0; 3] };
    Ok(ProximityDomain(u32::from_le_bytes([low, a, b, c])))
}

fn device(entry: Bytes<'_>) -> Result<DeviceHandle, AcpiError> {
    Ok(match entry.u8(3)? {
        0 => DeviceHandle::Acpi {
            hid: entry.array(8)?,
            uid: entry.u32(16)?,
        },
        1 => DeviceHandle::Pci {
            segment: entry.u16(8)?,
            bdf: entry.u16(10)?,
        },
        kind => DeviceHandle::Other {
            kind,
            handle: entry.array(8)?,
        },
    })
}

fn check_domains(entries: &[Affinity], offsets: &[usize]) -> Result<(), AcpiError> {
    let mut domains = BTreeSet::new();
    for (entry, &offset) in entries.iter().zip(offsets) {
        if let Some(domain) = entry.domain()
            && domains.insert(domain)
            && domains.len() > MAX_DOMAINS
        {
            let found = domains.len() as u64;
            return Err(AcpiError::TooManyDomains {
                offset,
                found,
                limit: MAX_DOMAINS,
            });
        }
    }
    Ok(())
}

/// One enabled, non-empty memory entry: `[base, end)`, with `end` wide enough for a range up to 2^64.
struct Range {
    base: u64,
    end: u128,
    offset: usize,
    domain: ProximityDomain,
}

fn check_memory(
    entries: &[Affinity],
    offsets: &[usize],
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<(), AcpiError> {
    let mut ranges = memory_ranges(entries, offsets)?;
    ranges.sort_by_key(|range| (range.base, range.offset));
    // The range that reaches furthest so far: whatever overlaps any earlier range overlaps this one too.
    let mut furthest: Option<&Range> = None;
    for range in &ranges {
        let (offset, domain) = (range.offset, range.domain);
        if let Some(before) = furthest.filter(|before| u128::from(range.base) < before.end) {
            let other = before.offset;
            if before.domain != domain || reading == Reading::Strict {
                let other_domain = before.domain;
                return Err(AcpiError::OverlappingMemory {
                    offset,
                    domain,
                    other,
                    other_domain,
                });
            }
            quirks.push(Quirk::SelfOverlap {
                offset,
                other,
                domain,
            });
        }
        if furthest.is_none_or(|before| range.end > before.end) {
            furthest = Some(range);
        }
    }
    note_interleaved(&ranges, quirks);
    Ok(())
}

fn memory_ranges(entries: &[Affinity], offsets: &[usize]) -> Result<Vec<Range>, AcpiError> {
    let mut ranges = Vec::new();
    for (entry, &offset) in entries.iter().zip(offsets) {
        let &Affinity::Memory {
            domain,
            base,
            length,
            ..
        } = entry
        else {
            continue;
        };
        if !entry.is_enabled() || length == 0 {
            continue;
        }
        let end = u128::from(base) + u128::from(length);
        if end > 1 << 64 {
            return Err(AcpiError::RangeOverflow {
                offset,
                base,
                length,
            });
        }
        ranges.push(Range {
            base,
            end,
            offset,
            domain,
        });
    }
    Ok(ranges)
}

/// Reports each range before which another domain's memory lies since the last range of its own domain.
fn note_interleaved(ranges: &[Range], quirks: &mut Vec<Quirk>) {
    let mut last = BTreeMap::new();
    for (index, range) in ranges.iter().enumerate() {
        let before = last.insert(range.domain, index);
        if before.is_some_and(|before| before + 1 != index) {
            quirks.push(Quirk::InterleavedMemory {
                offset: range.offset,
                domain: range.domain,
            });
        }
    }
}
