//! HMAT: the Heterogeneous Memory Attribute Table. Latency and bandwidth between initiators and memory, and the
//! caches in front of memory.
//!
//! ```text
//!   0 header   36 reserved   40 structures: type u16, reserved u16, length u32, …
//! ```

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::bytes::Bytes;
use super::header::{self, Kind, Step};
use super::{AcpiError, Header, MAX_DOMAINS, ProximityDomain, Quirk, Reading};

const KIND: Kind = Kind {
    signature: *b"HMAT",
    header_len: 40,
    revisions: 1..=2,
};
const STRUCTURES_AT: usize = 40;
const ATTRIBUTES_LEN: usize = 40;
const LOCALITY_HEAD: usize = 32;
const CACHE_HEAD: usize = 32;
const INITIATOR_VALID: u16 = 1;

/// What a matrix of the table holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum DataType {
    AccessLatency,
    ReadLatency,
    WriteLatency,
    AccessBandwidth,
    ReadBandwidth,
    WriteBandwidth,
}

impl DataType {
    const ALL: [Self; 6] = [
        Self::AccessLatency,
        Self::ReadLatency,
        Self::WriteLatency,
        Self::AccessBandwidth,
        Self::ReadBandwidth,
        Self::WriteBandwidth,
    ];

    /// Whether values are latencies in ns; otherwise they are bandwidths in MB/s.
    pub fn is_latency(self) -> bool {
        matches!(
            self,
            Self::AccessLatency | Self::ReadLatency | Self::WriteLatency
        )
    }

    fn number(self) -> u8 {
        self as u8
    }
}

/// Type 0: which initiator a memory domain belongs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryAttributes {
    /// The initiator that memory is attached to, if the table says.
    pub initiator: Option<ProximityDomain>,
    /// The memory's domain.
    pub memory: ProximityDomain,
}

/// Type 1: a matrix of latencies or bandwidths.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SystemLocality {
    /// Bits 0 to 3: 0 memory, 1 to 3 a memory-side cache of that level; the upper bits qualify transfers.
    pub flags: u8,
    /// What the values are.
    pub data_type: DataType,
    /// The smallest transfer that reaches them, as a power of two of bytes; 0 when any does.
    pub min_transfer: u8,
    /// Multiplies every entry. In revision 2: picoseconds, or MB/s.
    pub base_unit: u64,
    /// The rows.
    pub initiators: Vec<ProximityDomain>,
    /// The columns.
    pub targets: Vec<ProximityDomain>,
    /// Row by row; 0 not given, 0xffff not reachable.
    pub entries: Vec<u16>,
}

/// Type 2: a cache between memory and all its users.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemorySideCache {
    /// The memory's domain.
    pub memory: ProximityDomain,
    /// The cache's size in bytes.
    pub size_bytes: u64,
    /// Bits 0–3 levels in all, 4–7 this level, 8–11 associativity, 12–15 write policy, 16–31 line size in bytes.
    pub attributes: u32,
    /// SMBIOS handles of the memory devices that make it up.
    pub smbios_handles: Vec<u16>,
}

/// The table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hmat {
    /// The table's identity.
    pub header: Header,
    /// Memory and the initiators it belongs to.
    pub attributes: Vec<MemoryAttributes>,
    /// Latency and bandwidth matrices.
    pub localities: Vec<SystemLocality>,
    /// Memory-side caches.
    pub caches: Vec<MemorySideCache>,
    /// Structures of types that are not known.
    pub unknown: usize,
    /// What was odd.
    pub quirks: Vec<Quirk>,
}

impl Hmat {
    /// Reads a table.
    ///
    /// # Errors
    /// [`AcpiError`], with the offset; see [`acpi`](super) for what each reading accepts.
    pub fn parse(bytes: &[u8], reading: Reading) -> Result<Self, AcpiError> {
        let mut quirks = Vec::new();
        let (header, table) = header::open(bytes, &KIND, reading, &mut quirks)?;
        let mut hmat = Self {
            header,
            attributes: Vec::new(),
            localities: Vec::new(),
            caches: Vec::new(),
            unknown: 0,
            quirks: Vec::new(),
        };
        let mut rest = table.rest(STRUCTURES_AT);
        while rest.len() > 0 {
            let length = usize::try_from(rest.u32(4)?).unwrap_or(usize::MAX);
            match header::next_entry(&mut rest, length, 8, reading, &mut quirks)? {
                Step::End => break,
                Step::Entry(entry) => hmat.add(entry, reading, &mut quirks)?,
            }
        }
        hmat.quirks = quirks;
        Ok(hmat)
    }

    fn add(
        &mut self,
        entry: Bytes<'_>,
        reading: Reading,
        quirks: &mut Vec<Quirk>,
    ) -> Result<(), AcpiError> {
        match entry.u16(0)? {
            0 => {
                header::expect_len(entry, 0, ATTRIBUTES_LEN, reading, quirks)?;
                let valid = entry.u16(8)? & INITIATOR_VALID != 0;
                let initiator = ProximityDomain(entry.u32(12)?);
                let memory = ProximityDomain(entry.u32(16)?);
                self.attributes.push(MemoryAttributes {
                    initiator: valid.then_some(initiator),
                    memory,
                });
            }
            1 => self
                .localities
                .push(parse_locality(entry, reading, quirks)?),
            2 => self.caches.push(parse_cache(entry, reading, quirks)?),
            _ => self.unknown += 1,
        }
        Ok(())
    }

    /// One value of a matrix, in ns or MB/s; `None` where there is none or no way.
    ///
    /// The arithmetic is that of Linux (`hmat_normalize` in `drivers/acpi/numa/hmat.c`), so that the figures are
    /// those in /sys.
    pub fn value(&self, locality: &SystemLocality, row: usize, column: usize) -> Option<u64> {
        if row >= locality.initiators.len() || column >= locality.targets.len() {
            return None;
        }
        let entry = *locality
            .entries
            .get(row * locality.targets.len() + column)?;
        if entry == 0 || entry == u16::MAX {
            return None;
        }
        let value = u64::from(entry).checked_mul(locality.base_unit)?;
        match (self.header.revision, locality.data_type.is_latency()) {
            (1, _) if value < 10 => None,
            (1, _) => Some(value.div_ceil(10)),
            (_, true) => Some(value.div_ceil(1000)),
            (_, false) => Some(value),
        }
    }
}

fn parse_locality(
    entry: Bytes<'_>,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<SystemLocality, AcpiError> {
    let offset = entry.offset;
    let kind = entry.u8(9)?;
    let data_type = DataType::ALL
        .into_iter()
        .find(|data_type| data_type.number() == kind);
    let data_type = data_type.ok_or(AcpiError::DataType {
        offset: offset + 9,
        kind,
    })?;
    let (rows, columns) = (count(entry, 12)?, count(entry, 16)?);
    let needed = LOCALITY_HEAD + 4 * (rows + columns) + 2 * rows * columns;
    let have = entry.len();
    if have < needed || (have > needed && reading == Reading::Strict) {
        let (rows, columns, needed) = (rows as u64, columns as u64, needed as u64);
        return Err(AcpiError::MatrixSize {
            offset,
            rows,
            columns,
            needed,
            have,
        });
    }
    if have > needed {
        quirks.push(Quirk::LongEntry {
            offset,
            extra: have - needed,
        });
    }
    let targets_at = LOCALITY_HEAD + 4 * rows;
    let entries_at = targets_at + 4 * columns;
    let domains = |at: usize, count: usize| -> Result<Vec<_>, AcpiError> {
        (0..count)
            .map(|index| entry.u32(at + 4 * index).map(ProximityDomain))
            .collect()
    };
    Ok(SystemLocality {
        flags: entry.u8(8)?,
        data_type,
        min_transfer: entry.u8(10)?,
        base_unit: entry.u64(24)?,
        initiators: domains(LOCALITY_HEAD, rows)?,
        targets: domains(targets_at, columns)?,
        entries: (0..rows * columns)
            .map(|index| entry.u16(entries_at + 2 * index))
            .collect::<Result<_, _>>()?,
    })
}

fn count(entry: Bytes<'_>, at: usize) -> Result<usize, AcpiError> {
    let found = u64::from(entry.u32(at)?);
    usize::try_from(found)
        .ok()
        .filter(|&count| count <= MAX_DOMAINS)
        .ok_or(AcpiError::TooManyDomains {
            offset: entry.offset + at,
            found,
            limit: MAX_DOMAINS,
        })
}

fn parse_cache(
    entry: Bytes<'_>,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<MemorySideCache, AcpiError> {
    let handles = usize::from(entry.u16(30)?);
    header::expect_len(entry, 2, CACHE_HEAD + 2 * handles, reading, quirks)?;
    Ok(MemorySideCache {
        memory: ProximityDomain(entry.u32(8)?),
        size_bytes: entry.u64(16)?,
        attributes: entry.u32(24)?,
        smbios_handles: (0..handles)
            .map(|index| entry.u16(CACHE_HEAD + 2 * index))
            .collect::<Result<_, _>>()?,
    })
}
