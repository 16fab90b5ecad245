//! The ACPI tables: rejections and their offsets, tables that are read all the same, and real tables where there are any.
#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use common::encode::{Encode, EncodeError, header};
use common::{cpu, memory, real_tables, seal, slit, srat};
use numa::acpi::{
    AcpiError, Affinity, DataType, Hmat, MAX_DOMAINS, ProximityDomain, Quirk, Reading, Slit, Srat,
    SystemLocality,
};

const GIB: u64 = 1 << 30;
const BOTH: [Reading; 2] = [Reading::Strict, Reading::Field];

fn small() -> Vec<u8> {
    srat(3, vec![cpu(0, 0), memory(0, 0, GIB), memory(1, GIB, GIB)])
        .encode()
        .unwrap()
}

#[test]
fn a_wrong_header_is_named() {
    for reading in BOTH {
        let mut bytes = small();
        bytes[60] ^= 1;
        assert!(matches!(
            Srat::parse(&bytes, reading),
            Err(AcpiError::Checksum { offset: 9, .. })
        ));
        let found = *b"SRAT";
        assert_eq!(
            Slit::parse(&small(), reading),
            Err(AcpiError::Signature {
                offset: 0,
                expected: *b"SLIT",
                found
            })
        );
        let mut bytes = small();
        bytes[..4].copy_from_slice(b"a\x1b[J");
        let said = Srat::parse(&bytes, reading).unwrap_err().to_string();
        assert_eq!(
            said,
            r"offset 0: signature `a\x1b[J` where `SRAT` should be"
        );
        let mut bytes = small();
        bytes[4] = 47;
        assert_eq!(
            Srat::parse(&bytes, reading),
            Err(AcpiError::TableLength {
                offset: 4,
                length: 47,
                header: 48
            })
        );
        let mut bytes = small();
        bytes[8] = 0;
        seal(&mut bytes);
        let revision = AcpiError::Revision {
            offset: 8,
            revision: 0,
            oldest: 1,
            newest: 3,
        };
        assert_eq!(Srat::parse(&bytes, reading), Err(revision));
    }
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = small();
    for len in 0..bytes.len() {
        for reading in BOTH {
            assert!(
                matches!(
                    Srat::parse(&bytes[..len], reading),
                    Err(AcpiError::Truncated { .. })
                ),
                "{len} bytes"
            );
        }
    }
}

#[test]
fn entries_must_fit() {
    // The third entry begins at 48 + 16 + 40.
    let mut bytes = small();
    bytes[105] = 0;
    seal(&mut bytes);
    assert_eq!(
        Srat::parse(&bytes, Reading::Strict),
        Err(AcpiError::ZeroLength { offset: 104 })
    );
    let read = Srat::parse(&bytes, Reading::Field).unwrap();
    assert_eq!(read.entries.len(), 2);
    assert_eq!(
        read.quirks,
        [Quirk::ZeroLength {
            offset: 104,
            ignored: 40
        }]
    );

    for reading in BOTH {
        let mut bytes = small();
        bytes[105] = 41;
        seal(&mut bytes);
        let overrun = AcpiError::EntryOverrun {
            offset: 104,
            length: 41,
            left: 40,
        };
        assert_eq!(Srat::parse(&bytes, reading), Err(overrun));
        bytes[105] = 39;
        seal(&mut bytes);
        let short = AcpiError::EntryLength {
            offset: 104,
            kind: 1,
            length: 39,
            expected: 40,
        };
        assert_eq!(Srat::parse(&bytes, reading), Err(short));
        bytes[105] = 1;
        seal(&mut bytes);
        let cut = AcpiError::Truncated {
            offset: 104,
            needed: 2,
            have: 1,
        };
        assert_eq!(Srat::parse(&bytes, reading), Err(cut));
    }
}

#[test]
fn what_only_firmware_does() {
    let mut bytes = small();
    bytes.push(7);
    let extra = AcpiError::TrailingBytes {
        offset: 144,
        extra: 1,
    };
    assert_eq!(Srat::parse(&bytes, Reading::Strict), Err(extra));
    let read = Srat::parse(&bytes, Reading::Field).unwrap();
    assert_eq!(
        read.quirks,
        [Quirk::TrailingBytes {
            offset: 144,
            extra: 1
        }]
    );

    let mut bytes = small();
    bytes[8] = 9;
    seal(&mut bytes);
    assert!(matches!(
        Srat::parse(&bytes, Reading::Strict),
        Err(AcpiError::Revision { revision: 9, .. })
    ));
    let read = Srat::parse(&bytes, Reading::Field).unwrap();
    assert_eq!(
        read.quirks,
        [Quirk::NewerRevision {
            revision: 9,
            read_as: 3
        }]
    );

    // A CPU entry that is two bytes longer than it should be.
    let mut bytes = srat(3, vec![cpu(0, 0)]).encode().unwrap();
    bytes.extend([0; 2]);
    bytes[4] += 2;
    bytes[49] += 2;
    seal(&mut bytes);
    let long = AcpiError::EntryLength {
        offset: 48,
        kind: 0,
        length: 18,
        expected: 16,
    };
    assert_eq!(Srat::parse(&bytes, Reading::Strict), Err(long));
    let read = Srat::parse(&bytes, Reading::Field).unwrap();
    assert_eq!(
        (read.entries.len(), &read.quirks[..]),
        (
            1,
            &[Quirk::LongEntry {
                offset: 48,
                extra: 2
            }][..]
        )
    );
}

#[test]
fn memory_ranges_are_compared() {
    for reading in BOTH {
        let two = srat(3, vec![memory(0, 0, GIB), memory(1, GIB - 4096, GIB)])
            .encode()
            .unwrap();
        let overlap = AcpiError::OverlappingMemory {
            offset: 88,
            domain: ProximityDomain(1),
            other: 48,
            other_domain: ProximityDomain(0),
        };
        assert_eq!(Srat::parse(&two, reading), Err(overlap));
        // Hidden behind a range that ends first.
        let three = srat(
            3,
            vec![
                memory(0, 0, 8 * GIB),
                memory(0, GIB, GIB),
                memory(1, 4 * GIB, GIB),
            ],
        );
        assert!(matches!(
            Srat::parse(&three.encode().unwrap(), reading),
            Err(AcpiError::OverlappingMemory { .. })
        ));
        let past = srat(3, vec![memory(0, u64::MAX, 2)]).encode().unwrap();
        let overflow = AcpiError::RangeOverflow {
            offset: 48,
            base: u64::MAX,
            length: 2,
        };
        assert_eq!(Srat::parse(&past, reading), Err(overflow));
        let last = srat(3, vec![memory(0, u64::MAX, 1)]).encode().unwrap();
        assert!(Srat::parse(&last, reading).is_ok());
        let interleaved = srat(
            3,
            vec![
                memory(0, 0, GIB),
                memory(1, GIB, GIB),
                memory(0, 2 * GIB, GIB),
            ],
        );
        let read = Srat::parse(&interleaved.encode().unwrap(), reading).unwrap();
        assert_eq!(
            read.quirks,
            [Quirk::InterleavedMemory {
                offset: 128,
                domain: ProximityDomain(0)
            }]
        );
    }
    let itself = srat(3, vec![memory(5, 0, GIB), memory(5, 0, GIB)])
        .encode()
        .unwrap();
    assert!(matches!(
        Srat::parse(&itself, Reading::Strict),
        Err(AcpiError::OverlappingMemory { .. })
    ));
    let read = Srat::parse(&itself, Reading::Field).unwrap();
    assert_eq!(
        read.quirks,
        [Quirk::SelfOverlap {
            offset: 88,
            other: 48,
            domain: ProximityDomain(5)
        }]
    );
    // Disabled and empty entries claim nothing.
    let nothing = Affinity::Memory {
        domain: ProximityDomain(1),
        base: 0,
        length: GIB,
        flags: 0,
    };
    let idle = srat(3, vec![memory(0, 0, GIB), nothing, memory(2, 0, 0)])
        .encode()
        .unwrap();
    assert_eq!(Srat::parse(&idle, Reading::Strict).unwrap().quirks, []);
}

#[test]
fn domains_are_counted() {
    let count = u32::try_from(MAX_DOMAINS).unwrap();
    let full: Vec<_> = (0..count)
        .map(|domain| memory(domain, u64::from(domain) * GIB, GIB))
        .collect();
    let bytes = srat(3, full.clone()).encode().unwrap();
    assert!(Srat::parse(&bytes, Reading::Strict).is_ok());
    let over = full.into_iter().chain([memory(9999, 0, 0)]).collect();
    let bytes = srat(3, over).encode().unwrap();
    for reading in BOTH {
        let offset = 48 + 40 * MAX_DOMAINS;
        let many = AcpiError::TooManyDomains {
            offset,
            found: 1025,
            limit: MAX_DOMAINS,
        };
        assert_eq!(Srat::parse(&bytes, reading), Err(many));
        let mut bytes = slit(1, &[10]).encode().unwrap();
        bytes[36..44].fill(0xff);
        seal(&mut bytes);
        let many = AcpiError::TooManyDomains {
            offset: 36,
            found: u64::MAX,
            limit: MAX_DOMAINS,
        };
        assert_eq!(Slit::parse(&bytes, reading), Err(many));
    }
}

#[test]
fn domains_have_8_or_32_bits() {
    let wide = srat(2, vec![cpu(0x1_0203, 4), memory(0x1_0203, 0, GIB)]);
    let mut bytes = wide.encode().unwrap();
    assert_eq!(Srat::parse(&bytes, Reading::Strict).unwrap(), wide);
    bytes[8] = 1;
    seal(&mut bytes);
    let narrow = Srat::parse(&bytes, Reading::Strict).unwrap();
    assert!(
        narrow
            .entries
            .iter()
            .all(|entry| entry.domain() == Some(ProximityDomain(3)))
    );
    let domain = ProximityDomain(256);
    assert_eq!(
        srat(1, vec![cpu(256, 0)]).encode(),
        Err(EncodeError::WideDomain { domain })
    );
}

#[test]
fn distances_are_checked() {
    for reading in BOTH {
        let bytes = slit(2, &[10, 20, 20, 11]).encode().unwrap();
        let diagonal = AcpiError::Diagonal {
            offset: 47,
            domain: 1,
            distance: 11,
        };
        assert_eq!(Slit::parse(&bytes, reading), Err(diagonal));
        let bytes = slit(2, &[10, 9, 20, 10]).encode().unwrap();
        let reserved = AcpiError::ReservedDistance {
            offset: 45,
            from: 0,
            to: 1,
            distance: 9,
        };
        assert_eq!(Slit::parse(&bytes, reading), Err(reserved));
        let mut bytes = slit(2, &[10, 20, 20, 10]).encode().unwrap();
        bytes[36] = 3;
        seal(&mut bytes);
        let size = AcpiError::MatrixSize {
            offset: 36,
            rows: 3,
            columns: 3,
            needed: 53,
            have: 48,
        };
        assert_eq!(Slit::parse(&bytes, reading), Err(size));
    }
    let mut longer = slit(2, &[10, 20, 20, 10]).encode().unwrap();
    longer[36] = 1;
    seal(&mut longer);
    assert!(matches!(
        Slit::parse(&longer, Reading::Strict),
        Err(AcpiError::MatrixSize { .. })
    ));
    let read = Slit::parse(&longer, Reading::Field).unwrap();
    assert_eq!(
        read.quirks,
        [Quirk::TrailingBytes {
            offset: 45,
            extra: 3
        }]
    );
    let bytes = slit(2, &[10, 255, 20, 10]).encode().unwrap();
    let unreachable = AcpiError::Unreachable {
        offset: 45,
        from: 0,
        to: 1,
    };
    assert_eq!(Slit::parse(&bytes, Reading::Strict), Err(unreachable));
    let read = Slit::parse(&bytes, Reading::Field).unwrap();
    assert_eq!(read.distance(0, 1), Some(255));
    assert_eq!(
        (
            read.distance(1, 0),
            read.distance(2, 0),
            read.distance(0, 2)
        ),
        (Some(20), None, None)
    );
    assert!(matches!(
        slit(2, &[10]).encode(),
        Err(EncodeError::MatrixSize { .. })
    ));
}

fn matrix(data_type: DataType, base_unit: u64, entries: Vec<u16>) -> SystemLocality {
    SystemLocality {
        flags: 0,
        data_type,
        min_transfer: 0,
        base_unit,
        initiators: vec![ProximityDomain(0)],
        targets: vec![ProximityDomain(0), ProximityDomain(1)],
        entries,
    }
}

fn hmat(revision: u8, locality: SystemLocality) -> Hmat {
    Hmat {
        header: header(revision),
        attributes: vec![],
        localities: vec![locality],
        caches: vec![],
        unknown: 0,
        quirks: vec![],
    }
}

#[test]
fn hmat_values_are_those_of_linux() {
    let latency = hmat(2, matrix(DataType::ReadLatency, 100, vec![105, 0xffff]));
    assert_eq!(latency.value(&latency.localities[0], 0, 0), Some(11));
    assert_eq!(latency.value(&latency.localities[0], 0, 1), None);
    assert_eq!(latency.value(&latency.localities[0], 1, 0), None);
    let bandwidth = hmat(2, matrix(DataType::ReadBandwidth, 4, vec![50, 0]));
    assert_eq!(bandwidth.value(&bandwidth.localities[0], 0, 0), Some(200));
    assert_eq!(bandwidth.value(&bandwidth.localities[0], 0, 1), None);
    let old = hmat(1, matrix(DataType::AccessLatency, 1, vec![9, 11]));
    assert_eq!(old.value(&old.localities[0], 0, 0), None);
    assert_eq!(old.value(&old.localities[0], 0, 1), Some(2));
    let huge = hmat(2, matrix(DataType::ReadLatency, u64::MAX, vec![2, 1]));
    assert_eq!(huge.value(&huge.localities[0], 0, 0), None);
}

#[test]
fn hmat_matrices_must_fit() {
    let good = hmat(2, matrix(DataType::ReadLatency, 100, vec![1, 2]))
        .encode()
        .unwrap();
    for reading in BOTH {
        let mut bytes = good.clone();
        bytes[40 + 16] = 3;
        seal(&mut bytes);
        assert_eq!(
            Hmat::parse(&bytes, reading),
            Err(AcpiError::MatrixSize {
                offset: 40,
                rows: 1,
                columns: 3,
                needed: 54,
                have: 48
            })
        );
        let mut bytes = good.clone();
        bytes[40 + 12..40 + 16].fill(0xff);
        seal(&mut bytes);
        assert!(matches!(
            Hmat::parse(&bytes, reading),
            Err(AcpiError::TooManyDomains { offset: 52, .. })
        ));
        let mut bytes = good.clone();
        bytes[40 + 9] = 6;
        seal(&mut bytes);
        assert_eq!(
            Hmat::parse(&bytes, reading),
            Err(AcpiError::DataType {
                offset: 49,
                kind: 6
            })
        );
        let mut bytes = good.clone();
        bytes[44..48].fill(0xff);
        seal(&mut bytes);
        assert!(matches!(
            Hmat::parse(&bytes, reading),
            Err(AcpiError::EntryOverrun { offset: 40, .. })
        ));
    }
}

#[test]
fn real_tables_read_and_survive_the_encoder() {
    let srats = real_tables("SRAT");
    if srats.is_empty() {
        println!("skipped: no real ACPI tables here; PAGEONE_ACPI_TABLES can name a directory");
    }
    for (name, bytes) in srats {
        let table =
            Srat::parse(&bytes, Reading::Field).unwrap_or_else(|error| panic!("{name}: {error}"));
        let zero = table
            .quirks
            .iter()
            .any(|quirk| matches!(quirk, Quirk::ZeroLength { .. }));
        assert_eq!(
            zero,
            name.contains("Precision_Tower_5810"),
            "{name}: {:?}",
            table.quirks
        );
        assert_eq!(
            Srat::parse(&bytes, Reading::Strict).is_err(),
            zero,
            "{name}"
        );
        let again = Srat::parse(&table.encode().unwrap(), Reading::Strict).unwrap();
        assert_eq!(again.entries, table.entries, "{name}");
    }
    for (name, bytes) in real_tables("SLIT") {
        let table =
            Slit::parse(&bytes, Reading::Strict).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(table.encode().unwrap(), bytes, "{name}");
    }
    for (name, bytes) in real_tables("HMAT") {
        let table =
            Hmat::parse(&bytes, Reading::Strict).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(table.encode().unwrap(), bytes, "{name}");
    }
}
