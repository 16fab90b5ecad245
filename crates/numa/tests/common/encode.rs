//! ACPI tables as bytes: the reader is tried with them, and has to read them back.
//!
//! The benchmark and the fuzz target take this file by its path.

use numa::acpi::{
    Affinity, DeviceHandle, Header, Hmat, MemoryAttributes, MemorySideCache, ProximityDomain, Slit,
    Srat, SystemLocality,
};

/// A table that can be written.
pub(crate) trait Encode {
    /// Writes the table as bytes; unknown structures of an HMAT are not kept.
    fn encode(&self) -> Result<Vec<u8>, EncodeError>;
}

/// Why a table cannot be written as bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum EncodeError {
    /// Revision 1 has eight bits for a domain.
    WideDomain {
        /// The domain.
        domain: ProximityDomain,
    },
    /// Something is longer than its length field can say.
    TooLong {
        /// What it is.
        what: &'static str,
        /// Its length.
        length: usize,
    },
    /// A matrix without the right number of elements.
    MatrixSize {
        /// The matrix's rows.
        rows: usize,
        /// The matrix's columns.
        columns: usize,
        /// The elements given.
        have: usize,
    },
}

impl Encode for Srat {
    fn encode(&self) -> Result<Vec<u8>, EncodeError> {
        let mut bytes = begin(*b"SRAT", &self.header);
        bytes.extend_from_slice(&1_u32.to_le_bytes());
        bytes.extend_from_slice(&[0; 8]);
        for entry in &self.entries {
            encode_entry(entry, self.header.revision >= 2, &mut bytes)?;
        }
        finish(bytes)
    }
}

impl Encode for Slit {
    fn encode(&self) -> Result<Vec<u8>, EncodeError> {
        if self.localities.checked_mul(self.localities) != Some(self.distances.len()) {
            return Err(EncodeError::MatrixSize {
                rows: self.localities,
                columns: self.localities,
                have: self.distances.len(),
            });
        }
        let mut bytes = begin(*b"SLIT", &self.header);
        bytes.extend_from_slice(&(self.localities as u64).to_le_bytes());
        bytes.extend_from_slice(&self.distances);
        finish(bytes)
    }
}

impl Encode for Hmat {
    fn encode(&self) -> Result<Vec<u8>, EncodeError> {
        let mut bytes = begin(*b"HMAT", &self.header);
        bytes.extend_from_slice(&[0; 4]);
        for attributes in &self.attributes {
            encode_attributes(attributes, &mut bytes);
        }
        for locality in &self.localities {
            encode_locality(locality, &mut bytes)?;
        }
        for cache in &self.caches {
            encode_cache(cache, &mut bytes)?;
        }
        finish(bytes)
    }
}

/// The identity of a table made by this project.
pub(crate) fn header(revision: u8) -> Header {
    Header {
        revision,
        oem_id: *b"PGONE ",
        oem_table_id: *b"PAGEONE ",
        oem_revision: 1,
        creator_id: *b"PGON",
        creator_revision: 1,
    }
}

/// Begins a table: the common header with room for length and checksum.
fn begin(signature: [u8; 4], header: &Header) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(256);
    bytes.extend_from_slice(&signature);
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&[header.revision, 0]);
    bytes.extend_from_slice(&header.oem_id);
    bytes.extend_from_slice(&header.oem_table_id);
    bytes.extend_from_slice(&header.oem_revision.to_le_bytes());
    bytes.extend_from_slice(&header.creator_id);
    bytes.extend_from_slice(&header.creator_revision.to_le_bytes());
    bytes
}

/// Ends a table: fills in length and checksum.
fn finish(mut bytes: Vec<u8>) -> Result<Vec<u8>, EncodeError> {
    let length = u32::try_from(bytes.len()).map_err(|_| EncodeError::TooLong {
        what: "table",
        length: bytes.len(),
    })?;
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    let sum = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    bytes[9] = 0_u8.wrapping_sub(sum);
    Ok(bytes)
}

/// Appends one entry of an SRAT.
fn encode_entry(entry: &Affinity, wide: bool, bytes: &mut Vec<u8>) -> Result<(), EncodeError> {
    let start = bytes.len();
    let head = |bytes: &mut Vec<u8>, kind: u8, length: u8| bytes.extend_from_slice(&[kind, length]);
    let words = |bytes: &mut Vec<u8>, words: &[u32]| {
        for word in words {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    };
    match *entry {
        Affinity::LocalApic {
            domain,
            apic_id,
            sapic_eid,
            flags,
            clock_domain,
        } => {
            let [low, high @ ..] = narrow(domain, wide)?.to_le_bytes();
            head(bytes, 0, 16);
            bytes.extend_from_slice(&[low, apic_id]);
            words(bytes, &[flags]);
            bytes.push(sapic_eid);
            bytes.extend_from_slice(&high);
            words(bytes, &[clock_domain]);
        }
        Affinity::Memory {
            domain,
            base,
            length,
            flags,
        } => {
            head(bytes, 1, 40);
            words(bytes, &[narrow(domain, wide)?]);
            bytes.extend_from_slice(&[0; 2]);
            bytes.extend_from_slice(&base.to_le_bytes());
            bytes.extend_from_slice(&length.to_le_bytes());
            words(bytes, &[0, flags, 0, 0]);
        }
        Affinity::X2Apic {
            domain,
            x2apic_id,
            flags,
            clock_domain,
        } => {
            head(bytes, 2, 24);
            bytes.extend_from_slice(&[0; 2]);
            words(bytes, &[domain.0, x2apic_id, flags, clock_domain, 0]);
        }
        Affinity::Gicc {
            domain,
            processor_uid,
            flags,
            clock_domain,
        } => {
            head(bytes, 3, 18);
            words(bytes, &[domain.0, processor_uid, flags, clock_domain]);
        }
        Affinity::Its { domain, its_id } => {
            head(bytes, 4, 12);
            words(bytes, &[domain.0]);
            bytes.extend_from_slice(&[0; 2]);
            words(bytes, &[its_id]);
        }
        Affinity::GenericInitiator {
            domain,
            device,
            flags,
        } => {
            head(bytes, 5, 32);
            encode_device(domain, device, flags, bytes);
        }
        Affinity::GenericPort {
            domain,
            device,
            flags,
        } => {
            head(bytes, 6, 32);
            encode_device(domain, device, flags, bytes);
        }
        Affinity::Rintc {
            domain,
            processor_uid,
            flags,
            clock_domain,
        } => {
            head(bytes, 7, 20);
            bytes.extend_from_slice(&[0; 2]);
            words(bytes, &[domain.0, processor_uid, flags, clock_domain]);
        }
        Affinity::Unknown { kind, ref body } => {
            let length = u8::try_from(body.len() + 2).map_err(|_| EncodeError::TooLong {
                what: "entry",
                length: body.len(),
            })?;
            head(bytes, kind, length);
            bytes.extend_from_slice(body);
        }
    }
    debug_assert_eq!(
        bytes.len() - start,
        usize::from(bytes[start + 1]),
        "{entry:?}"
    );
    Ok(())
}

fn narrow(domain: ProximityDomain, wide: bool) -> Result<u32, EncodeError> {
    if wide || domain.0 <= 0xff {
        Ok(domain.0)
    } else {
        Err(EncodeError::WideDomain { domain })
    }
}

fn encode_device(domain: ProximityDomain, device: DeviceHandle, flags: u32, bytes: &mut Vec<u8>) {
    let mut handle = [0; 16];
    let kind = match device {
        DeviceHandle::Acpi { hid, uid } => {
            handle[..8].copy_from_slice(&hid);
            handle[8..12].copy_from_slice(&uid.to_le_bytes());
            0
        }
        DeviceHandle::Pci { segment, bdf } => {
            handle[..2].copy_from_slice(&segment.to_le_bytes());
            handle[2..4].copy_from_slice(&bdf.to_le_bytes());
            1
        }
        DeviceHandle::Other {
            kind,
            handle: other,
        } => {
            handle = other;
            kind
        }
    };
    bytes.extend_from_slice(&[0, kind]);
    bytes.extend_from_slice(&domain.0.to_le_bytes());
    bytes.extend_from_slice(&handle);
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
}

fn encode_head(kind: u8, length: usize, bytes: &mut Vec<u8>) -> Result<(), EncodeError> {
    let length = u32::try_from(length).map_err(|_| EncodeError::TooLong {
        what: "structure",
        length,
    })?;
    bytes.extend_from_slice(&[kind, 0, 0, 0]);
    bytes.extend_from_slice(&length.to_le_bytes());
    Ok(())
}

fn encode_attributes(attributes: &MemoryAttributes, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&[0, 0, 0, 0, 40, 0, 0, 0]);
    let valid = if attributes.initiator.is_some() {
        1_u16
    } else {
        0
    };
    bytes.extend_from_slice(&valid.to_le_bytes());
    bytes.extend_from_slice(&[0; 2]);
    let initiator = attributes.initiator.map_or(0, |domain| domain.0);
    bytes.extend_from_slice(&initiator.to_le_bytes());
    bytes.extend_from_slice(&attributes.memory.0.to_le_bytes());
    bytes.extend_from_slice(&[0; 20]);
}

fn encode_locality(locality: &SystemLocality, bytes: &mut Vec<u8>) -> Result<(), EncodeError> {
    let (rows, columns) = (locality.initiators.len(), locality.targets.len());
    if rows.checked_mul(columns) != Some(locality.entries.len()) {
        return Err(EncodeError::MatrixSize {
            rows,
            columns,
            have: locality.entries.len(),
        });
    }
    let number = |count: usize| {
        u32::try_from(count).map_err(|_| EncodeError::TooLong {
            what: "matrix side",
            length: count,
        })
    };
    encode_head(1, 32 + 4 * (rows + columns) + 2 * rows * columns, bytes)?;
    bytes.extend_from_slice(&[
        locality.flags,
        locality.data_type as u8,
        locality.min_transfer,
        0,
    ]);
    bytes.extend_from_slice(&number(rows)?.to_le_bytes());
    bytes.extend_from_slice(&number(columns)?.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&locality.base_unit.to_le_bytes());
    for domain in locality.initiators.iter().chain(&locality.targets) {
        bytes.extend_from_slice(&domain.0.to_le_bytes());
    }
    for entry in &locality.entries {
        bytes.extend_from_slice(&entry.to_le_bytes());
    }
    Ok(())
}

fn encode_cache(cache: &MemorySideCache, bytes: &mut Vec<u8>) -> Result<(), EncodeError> {
    let length = cache.smbios_handles.len();
    let handles = u16::try_from(length).map_err(|_| EncodeError::TooLong {
        what: "SMBIOS handles",
        length,
    })?;
    encode_head(2, 32 + 2 * length, bytes)?;
    bytes.extend_from_slice(&cache.memory.0.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&cache.size_bytes.to_le_bytes());
    bytes.extend_from_slice(&cache.attributes.to_le_bytes());
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&handles.to_le_bytes());
    for handle in &cache.smbios_handles {
        bytes.extend_from_slice(&handle.to_le_bytes());
    }
    Ok(())
}
