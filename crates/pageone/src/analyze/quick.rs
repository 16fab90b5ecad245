//! Sets and maps of numbers that need no defence: fingerprints depend on a seed of this run, and frames are the kernel's to number.
//!
//! A multiplication a word in the place of SipHash: with a million pages the tables take a tenth of the time of the reading.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type QuickSet<T> = HashSet<T, BuildHasherDefault<Quick>>;
pub(crate) type QuickMap<K, V> = HashMap<K, V, BuildHasherDefault<Quick>>;

/// 2 to the power of 64 by the golden ratio, which spreads neighbours far apart.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Default)]
pub(crate) struct Quick(u64);

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(SPREAD);
    }

    /// A table takes the low bits, and a product has its best ones above.
    fn finish(&self) -> u64 {
        let mixed = (self.0 ^ self.0 >> 32).wrapping_mul(SPREAD);
        mixed.rotate_left(32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher as _, Hash};

    fn low_bits(of: impl Iterator<Item = impl Hash>) -> usize {
        let state = BuildHasherDefault::<Quick>::default();
        of.map(|one| state.hash_one(one) % 4096)
            .collect::<HashSet<_>>()
            .len()
    }

    #[test]
    fn alike_numbers_fall_on_different_places() {
        // 4096 that fall at random leave a third of the places empty.
        assert!(low_bits(0..4096_u64) > 2000);
        assert!(
            low_bits((0..4096_u64).map(|n| n << 12)) > 2000,
            "of a sample"
        );
        assert!(
            low_bits((0..4096_u64).map(|n| (3_u32, n << 40))) > 2000,
            "of a domain"
        );
        assert!(
            low_bits((0..4096_u32).map(|n| vec![n % 64, n / 64])) > 2000,
            "of groups"
        );
    }
}
