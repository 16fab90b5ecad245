//! Keys as bit strings.
//!
//! The trie sees a key as a string of bits, bit 0 first and most significant, so that the order of the bit strings is the
//! order of the keys. It asks four things of a key, and nothing else: its first 32 bits (for the directory), one bit, the first
//! bit in which it differs from another key, and a 16-bit tag that leaf words carry.
//!
//! A byte string of any length up to [`MAX_KEY_BYTES`] reads as its bytes, then zeros up to that limit, then its length as a
//! 32-bit number:
//!
//! ```text
//!   bit 0                     8·len              8·MAX_KEY_BYTES        +32
//!   │ b0 │ b1 │ … │ b(len-1) │ 0 0 0 … 0 0 0 0 0 │ length, big-endian │
//! ```
//!
//! Nothing is ever stored that way: bits past the end are computed. Two keys have equal bit strings exactly when they are equal,
//! a key that is a prefix of another sorts before it, and the order is that of `<[u8] as Ord>`. The tempting alternative, a
//! presence bit before every byte, costs a ninth of the directory's bits and makes its slots unsplittable.

/// The longest byte string that can be a key: 1 MiB.
pub const MAX_KEY_BYTES: usize = 1 << 20;

/// The first of the bits that spell the length of a byte string.
const LENGTH_BITS: u32 = 8 << 20;

/// What the trie asks of a key.
pub(crate) trait Bits {
    /// The first 32 bits, as a number.
    fn lead(&self) -> u32;

    /// Bit `index`, 0 or 1.
    fn bit(&self, index: u32) -> usize;

    /// The index of the first bit in which the two keys differ; `None` if they are equal.
    fn first_difference(&self, other: &Self) -> Option<u32>;

    /// True if the keys are equal.
    fn same(&self, other: &Self) -> bool;

    /// 16 bits that equal keys share and different keys mostly do not; leaf words carry them.
    fn tag(&self) -> u16;
}

/// A key as a leaf holds it.
pub(crate) trait Stored: Send + Sync + 'static {
    /// The form in which callers ask for it.
    type Query: Bits + ?Sized;

    /// This key, as a query.
    fn query(&self) -> &Self::Query;
}

/// A 16-byte key; two words, so that a leaf with an 8-byte value takes 24 bytes (`u128` would align it to 32).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key16 {
    high: u64,
    low: u64,
}

impl Key16 {
    #[allow(clippy::cast_possible_truncation)]
    #[inline]
    pub(crate) fn new(key: u128) -> Self {
        Self {
            high: (key >> 64) as u64,
            low: key as u64,
        }
    }

    #[inline]
    pub(crate) fn get(self) -> u128 {
        u128::from(self.high) << 64 | u128::from(self.low)
    }
}

#[allow(clippy::cast_possible_truncation)]
impl Bits for Key16 {
    #[inline]
    fn lead(&self) -> u32 {
        (self.high >> 32) as u32
    }

    #[inline]
    fn bit(&self, index: u32) -> usize {
        let word = if index < 64 { self.high } else { self.low };
        (word >> (63 - (index & 63)) & 1) as usize
    }

    #[inline]
    fn first_difference(&self, other: &Self) -> Option<u32> {
        let high = self.high ^ other.high;
        let low = self.low ^ other.low;
        match (high, low) {
            (0, 0) => None,
            (0, low) => Some(64 + low.leading_zeros()),
            (high, _) => Some(high.leading_zeros()),
        }
    }

    #[inline]
    fn same(&self, other: &Self) -> bool {
        self == other
    }

    /// The last bits: the directory and the trie have used up the first ones.
    #[inline]
    fn tag(&self) -> u16 {
        self.low as u16
    }
}

impl Stored for Key16 {
    type Query = Self;

    #[inline]
    fn query(&self) -> &Self {
        self
    }
}

/// A byte string that its owner lends to the tree.
pub(crate) struct Lent<K>(pub(crate) K);

#[allow(clippy::cast_possible_truncation)]
impl Bits for [u8] {
    #[inline]
    fn lead(&self) -> u32 {
        let mut first = [0; 4];
        let len = self.len().min(4);
        first[..len].copy_from_slice(&self[..len]);
        u32::from_be_bytes(first)
    }

    #[inline]
    fn bit(&self, index: u32) -> usize {
        if index >= LENGTH_BITS {
            return self.len() >> (31 - (index - LENGTH_BITS)) & 1;
        }
        let byte = self.get(index as usize / 8).copied().unwrap_or(0);
        usize::from(byte >> (7 - index % 8) & 1)
    }

    fn first_difference(&self, other: &Self) -> Option<u32> {
        let shared = self.len().min(other.len());
        if let Some(at) = first_unequal_byte(&self[..shared], &other[..shared]) {
            let bit = (self[at] ^ other[at]).leading_zeros();
            return Some(at as u32 * 8 + bit);
        }
        let tail = if self.len() > shared {
            &self[shared..]
        } else {
            &other[shared..]
        };
        if let Some(at) = tail.iter().position(|&byte| byte != 0) {
            return Some((shared + at) as u32 * 8 + tail[at].leading_zeros());
        }
        match self.len() as u32 ^ other.len() as u32 {
            0 => None,
            lengths => Some(LENGTH_BITS + lengths.leading_zeros()),
        }
    }

    #[inline]
    fn same(&self, other: &Self) -> bool {
        self == other
    }

    /// None: a tag would cost every search a look at the end of the key.
    #[inline]
    fn tag(&self) -> u16 {
        0
    }
}

/// The index of the first byte in which two strings of one length differ.
fn first_unequal_byte(left: &[u8], right: &[u8]) -> Option<usize> {
    const BLOCK: usize = 64;
    let block = left
        .chunks(BLOCK)
        .zip(right.chunks(BLOCK))
        .position(|(left, right)| left != right)?;
    let start = block * BLOCK;
    let inside = left[start..]
        .iter()
        .zip(&right[start..])
        .position(|(left, right)| left != right)?;
    Some(start + inside)
}

impl<K: AsRef<[u8]> + Send + Sync + 'static> Stored for Lent<K> {
    type Query = [u8];

    #[inline]
    fn query(&self) -> &[u8] {
        self.0.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cmp::Ordering;

    /// The order that the bits alone imply.
    fn order_by_bits<B: Bits + ?Sized>(left: &B, right: &B) -> Ordering {
        match left.first_difference(right) {
            None => Ordering::Equal,
            Some(bit) => {
                assert_ne!(left.bit(bit), right.bit(bit), "bit {bit} differs");
                left.bit(bit).cmp(&right.bit(bit))
            }
        }
    }

    #[test]
    fn prefixes_of_each_other_are_different_keys() {
        let keys: [&[u8]; 6] = [b"", b"\0", b"\0\0", b"a", b"a\0", b"a\0b"];
        for left in keys {
            for right in keys {
                assert_eq!(order_by_bits(left, right), left.cmp(right));
            }
        }
    }

    #[test]
    fn the_longest_key_has_all_its_bits() {
        let mut key = vec![0; MAX_KEY_BYTES];
        let zeros = key.clone();
        key[MAX_KEY_BYTES - 1] = 1;
        assert_eq!(
            key.first_difference(zeros.as_slice()),
            Some(LENGTH_BITS - 1)
        );
        assert_eq!(key.bit(LENGTH_BITS - 1), 1);
        assert_eq!(zeros.first_difference(&zeros[1..]), Some(LENGTH_BITS + 11));
    }

    proptest! {
        #[test]
        fn byte_strings_keep_their_order(left in proptest::collection::vec(0u8..3, 0..90),
                                         right in proptest::collection::vec(0u8..3, 0..90)) {
            prop_assert_eq!(order_by_bits(left.as_slice(), &right), left.cmp(&right));
        }

        #[test]
        fn fixed_keys_keep_their_order(left: u128, flip in 0u32..128, other: u128) {
            let near = left ^ (1 << flip);
            for right in [near, other] {
                prop_assert_eq!(order_by_bits(&Key16::new(left), &Key16::new(right)), left.cmp(&right));
            }
            prop_assert_eq!(Key16::new(left).first_difference(&Key16::new(near)), Some(127 - flip));
            prop_assert_eq!(Key16::new(left).get(), left);
            prop_assert_eq!(Key16::new(left).lead(), (left >> 96) as u32);
        }
    }
}
