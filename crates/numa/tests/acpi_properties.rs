//! Properties of the ACPI reader: nothing panics, and tables that the encoder writes read back the same.
#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use common::encode::{Encode, header};
use common::{seal, slit, srat};
use numa::acpi::{
    Affinity, DataType, DeviceHandle, Hmat, MemoryAttributes, MemorySideCache, ProximityDomain,
    Reading, Slit, Srat, SystemLocality,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn domain(limit: u32) -> impl Strategy<Value = ProximityDomain> {
    (0..limit).prop_map(ProximityDomain)
}

fn device() -> impl Strategy<Value = DeviceHandle> {
    prop_oneof![
        any::<([u8; 8], u32)>().prop_map(|(hid, uid)| DeviceHandle::Acpi { hid, uid }),
        any::<(u16, u16)>().prop_map(|(segment, bdf)| DeviceHandle::Pci { segment, bdf }),
        (2_u8.., any::<[u8; 16]>()).prop_map(|(kind, handle)| DeviceHandle::Other { kind, handle }),
    ]
}

/// Entries of all types; `slot` keeps memory ranges apart.
fn entry(limit: u32) -> impl Strategy<Value = Affinity> {
    let flags = any::<u32>;
    prop_oneof![
        (domain(limit), any::<(u8, u8, u32)>(), flags()).prop_map(
            |(domain, (apic_id, sapic_eid, clock), flags)| {
                Affinity::LocalApic {
                    domain,
                    apic_id,
                    sapic_eid,
                    flags,
                    clock_domain: clock,
                }
            }
        ),
        (domain(limit), flags()).prop_map(|(domain, flags)| Affinity::Memory {
            domain,
            base: 0,
            length: 0,
            flags
        }),
        (domain(limit), any::<(u32, u32)>(), flags()).prop_map(
            |(domain, (x2apic_id, clock_domain), flags)| {
                Affinity::X2Apic {
                    domain,
                    x2apic_id,
                    flags,
                    clock_domain,
                }
            }
        ),
        (domain(limit), any::<(u32, u32)>(), flags()).prop_map(
            |(domain, (processor_uid, clock_domain), flags)| {
                Affinity::Gicc {
                    domain,
                    processor_uid,
                    flags,
                    clock_domain,
                }
            }
        ),
        (domain(limit), any::<u32>()).prop_map(|(domain, its_id)| Affinity::Its { domain, its_id }),
        (domain(limit), device(), flags()).prop_map(|(domain, device, flags)| {
            Affinity::GenericInitiator {
                domain,
                device,
                flags,
            }
        }),
        (domain(limit), device(), flags()).prop_map(|(domain, device, flags)| {
            Affinity::GenericPort {
                domain,
                device,
                flags,
            }
        }),
        (domain(limit), any::<(u32, u32)>(), flags()).prop_map(
            |(domain, (processor_uid, clock_domain), flags)| {
                Affinity::Rintc {
                    domain,
                    processor_uid,
                    flags,
                    clock_domain,
                }
            }
        ),
        (8_u8.., vec(any::<u8>(), 0..60)).prop_map(|(kind, body)| Affinity::Unknown { kind, body }),
    ]
}

/// Gives the n-th memory entry the n-th gigabyte.
fn spread(mut entries: Vec<Affinity>) -> Vec<Affinity> {
    let mut next = 0;
    for entry in &mut entries {
        if let Affinity::Memory { base, length, .. } = entry {
            (*base, *length) = (next, 1 << 30);
            next += 1 << 30;
        }
    }
    entries
}

fn any_srat() -> impl Strategy<Value = Srat> {
    (1_u8..=3).prop_flat_map(|revision| {
        let limit = if revision == 1 { 256 } else { u32::MAX };
        vec(entry(limit), 0..40).prop_map(move |entries| srat(revision, spread(entries)))
    })
}

fn any_slit() -> impl Strategy<Value = Slit> {
    (0_usize..12).prop_flat_map(|localities| {
        vec(10_u8..255, localities * localities).prop_map(move |mut distances| {
            for index in 0..localities {
                distances[index * (localities + 1)] = 10;
            }
            slit(localities, &distances)
        })
    })
}

fn any_locality() -> impl Strategy<Value = SystemLocality> {
    let kinds = [
        DataType::AccessLatency,
        DataType::WriteBandwidth,
        DataType::ReadLatency,
    ];
    (0_usize..6, 0_usize..6).prop_flat_map(move |(rows, columns)| {
        let domains = |count| vec(domain(u32::MAX), count);
        let matrix = (
            domains(rows),
            domains(columns),
            vec(any::<u16>(), rows * columns),
        );
        (
            any::<(u8, u8, u64)>(),
            proptest::sample::select(kinds.to_vec()),
            matrix,
        )
            .prop_map(
                |((flags, min_transfer, base_unit), data_type, (initiators, targets, entries))| {
                    SystemLocality {
                        flags,
                        data_type,
                        min_transfer,
                        base_unit,
                        initiators,
                        targets,
                        entries,
                    }
                },
            )
    })
}

fn any_hmat() -> impl Strategy<Value = Hmat> {
    let attributes = (proptest::option::of(domain(u32::MAX)), domain(u32::MAX))
        .prop_map(|(initiator, memory)| MemoryAttributes { initiator, memory });
    let cache = (
        domain(u32::MAX),
        any::<(u64, u32)>(),
        vec(any::<u16>(), 0..5),
    )
        .prop_map(
            |(memory, (size_bytes, attributes), smbios_handles)| MemorySideCache {
                memory,
                size_bytes,
                attributes,
                smbios_handles,
            },
        );
    let parts = (
        vec(attributes, 0..5),
        vec(any_locality(), 0..4),
        vec(cache, 0..4),
    );
    (1_u8..=2, parts).prop_map(|(revision, (attributes, localities, caches))| Hmat {
        header: header(revision),
        attributes,
        localities,
        caches,
        unknown: 0,
        quirks: vec![],
    })
}

fn parse_all(bytes: &[u8]) {
    for reading in [Reading::Strict, Reading::Field] {
        let _ = Srat::parse(bytes, reading);
        let _ = Slit::parse(bytes, reading);
        let _ = Hmat::parse(bytes, reading);
    }
}

proptest! {
    #[test]
    fn srat_round_trip(table in any_srat()) {
        let bytes = table.encode().unwrap();
        let mut read = Srat::parse(&bytes, Reading::Strict).unwrap();
        read.quirks.clear(); // domains may be interleaved
        prop_assert_eq!(read, table);
    }

    #[test]
    fn slit_round_trip(table in any_slit()) {
        prop_assert_eq!(Slit::parse(&table.encode().unwrap(), Reading::Strict).unwrap(), table);
    }

    #[test]
    fn hmat_round_trip(table in any_hmat()) {
        prop_assert_eq!(Hmat::parse(&table.encode().unwrap(), Reading::Strict).unwrap(), table);
    }

    /// Good tables with a few bytes changed and the checksum made right again reach the deep checks.
    #[test]
    fn damage_never_panics(
        table in prop_oneof![
            any_srat().prop_map(|table| table.encode().unwrap()),
            any_slit().prop_map(|table| table.encode().unwrap()),
            any_hmat().prop_map(|table| table.encode().unwrap()),
        ],
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<proptest::sample::Index>(),
        keep_whole in any::<bool>(),
    ) {
        let mut bytes = table;
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if !keep_whole {
            bytes.truncate(36.max(cut.index(bytes.len())));
        }
        let len = u32::try_from(bytes.len()).unwrap();
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        seal(&mut bytes);
        parse_all(&bytes);
    }

    #[test]
    fn noise_never_panics(bytes in vec(any::<u8>(), 0..300)) {
        parse_all(&bytes);
    }
}
