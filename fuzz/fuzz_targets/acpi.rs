//! ACPI tables from anywhere: no reader panics, and what one reads, its encoder writes back.
#![no_main]

#[allow(dead_code, reason = "what is read is written, and nothing made up")]
#[path = "../../crates/numa/tests/common/encode.rs"]
mod encode;

use encode::Encode;
use libfuzzer_sys::fuzz_target;
use numa::acpi::{Hmat, Reading, Slit, Srat};

fuzz_target!(|bytes: &[u8]| {
    read_all(bytes);
    // Most inputs end at the checksum; give each a way past it.
    let mut sealed = bytes.to_vec();
    if seal(&mut sealed).is_some() {
        read_all(&sealed);
    }
});

fn read_all(bytes: &[u8]) {
    let srat = Srat::parse(bytes, Reading::Field).ok();
    let slit = Slit::parse(bytes, Reading::Field).ok();
    let hmat = Hmat::parse(bytes, Reading::Field).ok();
    if let Some(bytes) = srat.as_ref().and_then(|table| table.encode().ok()) {
        let again = Srat::parse(&bytes, Reading::Field).expect("what was encoded reads");
        assert_eq!(again.entries, srat.expect("encoded").entries);
    }
    if let Some(bytes) = slit.as_ref().and_then(|table| table.encode().ok()) {
        let again = Slit::parse(&bytes, Reading::Field).expect("what was encoded reads");
        assert_eq!(again.distances, slit.expect("encoded").distances);
    }
    if let Some(bytes) = hmat.as_ref().and_then(|table| table.encode().ok()) {
        let again = Hmat::parse(&bytes, Reading::Field).expect("what was encoded reads");
        let table = hmat.expect("encoded");
        assert_eq!(
            (again.attributes, again.localities, again.caches),
            (table.attributes, table.localities, table.caches)
        );
    }
}

fn seal(bytes: &mut [u8]) -> Option<()> {
    let len = u32::try_from(bytes.len()).ok()?;
    bytes.get_mut(4..8)?.copy_from_slice(&len.to_le_bytes());
    *bytes.get_mut(9)? = 0;
    let sum = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    *bytes.get_mut(9)? = 0_u8.wrapping_sub(sum);
    Some(())
}
