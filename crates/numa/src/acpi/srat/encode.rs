//! The entries of an SRAT as bytes.

use alloc::vec::Vec;

use super::{Affinity, DeviceHandle};
use crate::acpi::{EncodeError, ProximityDomain};

/// Appends one entry.
pub(super) fn encode_entry(
    entry: &Affinity,
    wide: bool,
    bytes: &mut Vec<u8>,
) -> Result<(), EncodeError> {
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
