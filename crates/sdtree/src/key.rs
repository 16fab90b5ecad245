//! Keys as bit strings.
//!
//! The trie sees a key as a string of bits, bit 0 first and most significant. It asks four things of a key, and nothing else.
//! These are its first 32 bits (for the directory), one bit, the first bit in which it differs from another key, and a 16-bit tag that
//! leaf words carry.
//!
//! A 16-byte key is its own bit string. A byte string of any length up to [`MAX_KEY_BYTES`] reads as a digest of it, then its
//! bytes, then zeros up to that limit, then its length as a 32-bit number:
//!
//! ```text
//!   bit 0    32                         32 + 8·len       32 + 8·MAX_KEY_BYTES   +32
//!   │ digest │ b0 │ b1 │ … │ b(len-1) │ 0 0 0 … 0 0 0 0 │ length, big-endian     │
//! ```
//!
//! Only the digest is stored; bits past the end are computed. Two keys have equal bit strings exactly when they are equal, also
//! if one is a prefix of the other: the digest decides nothing, it only spreads. It lets the directory do its work for pages
//! that begin alike. Without it, lookups of pages that differ after 128 zeros took 1.5 times as long as of pages that
//! differ at once (18 branches against none), with it the same. It needs no secret: a user that makes digests collide gets
//! the path-compressed trie on the bytes, whose paths are no longer than the key.

use xxhash_rust::xxh3::xxh3_64;

/// The longest byte string that can be a key: 1 MiB.
///
/// # Examples
///
/// ```
/// let tree = sdtree::ByteTree::<Vec<u8>, u32>::new();
/// let longest = vec![1; sdtree::MAX_KEY_BYTES];
/// assert!(tree.get_or_insert(longest, 1).is_ok());
/// ```
pub const MAX_KEY_BYTES: usize = 1 << 20;

/// The first of the bits that spell the bytes of a byte string.
const BYTE_BITS: u32 = 32;

/// The first of the bits that spell its length.
const LENGTH_BITS: u32 = BYTE_BITS + (8 << 20);

/// What the trie asks of a key.
pub(crate) trait Bits {
    /// The first 32 bits, as a number.
    fn lead(&self) -> u32;

    /// Bit `index`, 0 or 1.
    fn bit(&self, index: u32) -> usize;

    /// 16 bits that equal keys share and different keys mostly do not; leaf words carry them.
    fn tag(&self) -> u16;
}

/// A key as a leaf holds it.
pub(crate) trait Stored: Send + Sync + 'static {
    /// The form in which callers ask for it.
    type Query<'k>: Bits + Copy;

    /// This key, as a query.
    fn query(&self) -> Self::Query<'_>;

    /// True if the keys are equal.
    fn same(&self, key: Self::Query<'_>) -> bool;

    /// The index of the first bit in which the two keys differ; `None` if they are equal.
    fn first_difference(&self, key: Self::Query<'_>) -> Option<u32>;
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

    /// The last bits: the directory and the trie have used up the first ones.
    #[inline]
    fn tag(&self) -> u16 {
        self.low as u16
    }
}

impl Stored for Key16 {
    type Query<'k> = Self;

    #[inline]
    fn query(&self) -> Self {
        *self
    }

    #[inline]
    fn same(&self, key: Self) -> bool {
        *self == key
    }

    #[inline]
    fn first_difference(&self, other: Self) -> Option<u32> {
        let high = self.high ^ other.high;
        let low = self.low ^ other.low;
        match (high, low) {
            (0, 0) => None,
            (0, low) => Some(64 + low.leading_zeros()),
            (high, _) => Some(high.leading_zeros()),
        }
    }
}

/// A byte string that its owner lends to the tree, and its digest.
pub(crate) struct Lent<K> {
    digest: u32,
    pub(crate) key: K,
}

/// A byte string to search for, and its digest.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'k> {
    digest: u32,
    bytes: &'k [u8],
}

#[allow(clippy::cast_possible_truncation)]
impl<'k> Bytes<'k> {
    #[inline]
    pub(crate) fn new(bytes: &'k [u8]) -> Self {
        let digest = xxh3_64(bytes) as u32;
        Self { digest, bytes }
    }

    #[inline]
    fn same(self, other: Bytes<'_>) -> bool {
        self.digest == other.digest && self.bytes == other.bytes
    }

    fn first_difference(self, other: Bytes<'_>) -> Option<u32> {
        if self.digest != other.digest {
            return Some((self.digest ^ other.digest).leading_zeros());
        }
        let bit_of = |at: usize, difference: u8| {
            Some(BYTE_BITS + at as u32 * 8 + difference.leading_zeros())
        };
        let (left, right) = (self.bytes, other.bytes);
        let shared = left.len().min(right.len());
        if let Some(at) = first_unequal_byte(&left[..shared], &right[..shared]) {
            return bit_of(at, left[at] ^ right[at]);
        }
        let longer = if left.len() > shared { left } else { right };
        if let Some(at) = longer[shared..].iter().position(|&byte| byte != 0) {
            return bit_of(shared + at, longer[shared + at]);
        }
        match left.len() as u32 ^ right.len() as u32 {
            0 => None,
            lengths => Some(LENGTH_BITS + lengths.leading_zeros()),
        }
    }
}

#[allow(clippy::cast_possible_truncation)]
impl Bits for Bytes<'_> {
    #[inline]
    fn lead(&self) -> u32 {
        self.digest
    }

    #[inline]
    fn bit(&self, index: u32) -> usize {
        if index < BYTE_BITS {
            return (self.digest >> (31 - index) & 1) as usize;
        }
        if index >= LENGTH_BITS {
            return self.bytes.len() >> (31 - (index - LENGTH_BITS)) & 1;
        }
        let index = index - BYTE_BITS;
        let byte = self.bytes.get(index as usize / 8).copied().unwrap_or(0);
        usize::from(byte >> (7 - index % 8) & 1)
    }

    /// The last bits of the digest: the directory has used up the first ones.
    #[inline]
    fn tag(&self) -> u16 {
        self.digest as u16
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

#[cfg(test)]
impl<K: AsRef<[u8]>> Lent<K> {
    /// A key whose digest collides with all others' made here.
    pub(crate) fn colliding(key: K) -> Self {
        Self { digest: 7, key }
    }
}

impl<K: AsRef<[u8]>> Lent<K> {
    pub(crate) fn new(key: K) -> Self {
        let digest = Bytes::new(key.as_ref()).digest;
        Self { digest, key }
    }
}

impl<K: AsRef<[u8]> + Send + Sync + 'static> Stored for Lent<K> {
    type Query<'k> = Bytes<'k>;

    #[inline]
    fn query(&self) -> Bytes<'_> {
        Bytes {
            digest: self.digest,
            bytes: self.key.as_ref(),
        }
    }

    #[inline]
    fn same(&self, key: Bytes<'_>) -> bool {
        self.query().same(key)
    }

    #[inline]
    fn first_difference(&self, key: Bytes<'_>) -> Option<u32> {
        self.query().first_difference(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cmp::Ordering;

    /// The order that the bits alone imply.
    fn order_by_bits<B: Bits>(difference: Option<u32>, left: B, right: B) -> Ordering {
        match difference {
            None => Ordering::Equal,
            Some(bit) => {
                assert_ne!(left.bit(bit), right.bit(bit), "bit {bit} differs");
                assert!((bit.saturating_sub(40)..bit).all(|bit| left.bit(bit) == right.bit(bit)));
                left.bit(bit).cmp(&right.bit(bit))
            }
        }
    }

    fn byte_order(left: Bytes<'_>, right: Bytes<'_>) -> Ordering {
        let difference = left.first_difference(right);
        assert_eq!(left.same(right), difference.is_none());
        order_by_bits(difference, left, right)
    }

    /// A byte string whose digest collides with all others'.
    fn colliding(bytes: &[u8]) -> Bytes<'_> {
        Bytes { digest: 7, bytes }
    }

    #[test]
    fn prefixes_of_each_other_are_different_keys() {
        let keys: [&[u8]; 6] = [b"", b"\0", b"\0\0", b"a", b"a\0", b"a\0b"];
        for left in keys {
            for right in keys {
                assert_eq!(
                    byte_order(colliding(left), colliding(right)),
                    left.cmp(right)
                );
                assert_eq!(
                    byte_order(Bytes::new(left), Bytes::new(right)).is_eq(),
                    left == right
                );
            }
        }
    }

    #[test]
    fn the_longest_key_has_all_its_bits() {
        let zeros = vec![0; MAX_KEY_BYTES];
        let mut key = zeros.clone();
        key[MAX_KEY_BYTES - 1] = 1;
        assert_eq!(
            colliding(&key).first_difference(colliding(&zeros)),
            Some(LENGTH_BITS - 1)
        );
        assert_eq!(colliding(&key).bit(LENGTH_BITS - 1), 1);
        assert_eq!(
            colliding(&zeros).first_difference(colliding(&zeros[1..])),
            Some(LENGTH_BITS + 11)
        );
    }

    proptest! {
        #[test]
        fn byte_strings_keep_their_order(left in proptest::collection::vec(0u8..3, 0..90),
                                         right in proptest::collection::vec(0u8..3, 0..90)) {
            prop_assert_eq!(byte_order(colliding(&left), colliding(&right)), left.cmp(&right));
            prop_assert_eq!(byte_order(Bytes::new(&left), Bytes::new(&right)).is_eq(), left == right);
        }

        #[test]
        fn fixed_keys_keep_their_order(left: u128, flip in 0u32..128, other: u128) {
            let near = left ^ (1 << flip);
            for right in [near, other] {
                let (a, b) = (Key16::new(left), Key16::new(right));
                prop_assert_eq!(order_by_bits(a.first_difference(b), a, b), left.cmp(&right));
                prop_assert_eq!(a.same(b), left == right);
            }
            prop_assert_eq!(Key16::new(left).first_difference(Key16::new(near)), Some(127 - flip));
            prop_assert_eq!(Key16::new(left).get(), left);
            prop_assert_eq!(Key16::new(left).lead(), (left >> 96) as u32);
        }
    }
}
