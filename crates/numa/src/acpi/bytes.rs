//! Little-endian fields at checked offsets.

use super::AcpiError;

/// A part of a table that knows where it begins, so that errors name offsets in the whole.
#[derive(Clone, Copy)]
pub(super) struct Bytes<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) offset: usize,
}

impl<'a> Bytes<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// `len` bytes from `at`.
    pub(super) fn part(&self, at: usize, len: usize) -> Result<Self, AcpiError> {
        let bytes = at.checked_add(len).and_then(|end| self.bytes.get(at..end));
        let bytes = bytes.ok_or_else(|| AcpiError::Truncated {
            offset: self.offset.saturating_add(at),
            needed: len,
            have: self.len().saturating_sub(at),
        })?;
        Ok(Self {
            bytes,
            offset: self.offset + at,
        })
    }

    /// What follows from `at` on; nothing when that is past the end.
    pub(super) fn rest(&self, at: usize) -> Self {
        let at = at.min(self.len());
        Self {
            bytes: &self.bytes[at..],
            offset: self.offset + at,
        }
    }

    pub(super) fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], AcpiError> {
        let part = self.part(at, N)?;
        let mut array = [0; N];
        array.copy_from_slice(part.bytes);
        Ok(array)
    }

    pub(super) fn u8(&self, at: usize) -> Result<u8, AcpiError> {
        self.array::<1>(at).map(|[byte]| byte)
    }

    pub(super) fn u16(&self, at: usize) -> Result<u16, AcpiError> {
        self.array(at).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&self, at: usize) -> Result<u32, AcpiError> {
        self.array(at).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&self, at: usize) -> Result<u64, AcpiError> {
        self.array(at).map(u64::from_le_bytes)
    }
}
