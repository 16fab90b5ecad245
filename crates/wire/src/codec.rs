//! Little-endian fields in a bounded packet, without allocation.

/// The largest packet either side sends, in bytes.
pub const MAX_MESSAGE: usize = 16 * 1024;

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The packet ends inside a field.
    #[error("the message ends at byte {at}, inside a field of {want} bytes")]
    Truncated {
        /// Offset of the field in the packet.
        at: usize,
        /// Size of the field.
        want: usize,
    },
    /// The packet goes on after the message.
    #[error("{extra} bytes follow the message")]
    Trailing {
        /// How many bytes too many.
        extra: usize,
    },
    /// No message has this kind.
    #[error("no message has kind {0}")]
    Kind(u8),
    /// A field holds a value outside its range.
    #[error("field `{field}` holds {value}, which is out of range")]
    Range {
        /// The field's name.
        field: &'static str,
        /// The value found.
        value: u64,
    },
    /// The other side speaks another version.
    #[error("the peer speaks protocol version {0}, this side {ours}", ours = crate::VERSION)]
    Version(u16),
}

/// Reads fields off the front of a packet.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn take(&mut self, want: usize) -> Result<&'a [u8], DecodeError> {
        let end = self.at.checked_add(want);
        let field = end.and_then(|end| self.bytes.get(self.at..end));
        let field = field.ok_or(DecodeError::Truncated { at: self.at, want })?;
        self.at += want;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn finish(self) -> Result<(), DecodeError> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }
}

/// Appends fields to a packet. What does not fit is dropped: the callers' counts are bounded so
/// that everything fits [`MAX_MESSAGE`], and a test proves it for the largest messages.
pub(crate) struct Writer<'a> {
    bytes: &'a mut [u8; MAX_MESSAGE],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(bytes: &'a mut [u8; MAX_MESSAGE]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn put(&mut self, field: &[u8]) -> &mut Self {
        let end = self.at + field.len();
        debug_assert!(end <= MAX_MESSAGE, "a message outgrew MAX_MESSAGE");
        if let Some(room) = self.bytes.get_mut(self.at..end) {
            room.copy_from_slice(field);
            self.at = end;
        }
        self
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    pub(crate) fn len(&self) -> usize {
        self.at
    }
}
