//! The header that all tables have, the walk over entries, and the quirks of a table.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::bytes::Bytes;
use super::{AcpiError, ProximityDomain};

const LENGTH_AT: usize = 4;
const REVISION_AT: usize = 8;
const CHECKSUM_AT: usize = 9;

/// How much firmware may stray from the specification; the module's head has the list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reading {
    /// Not at all.
    Strict,
    /// As far as machines in the field do.
    #[default]
    Field,
}

/// Something odd about a table that could be read all the same.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Quirk {
    /// An entry of length zero ended the table early.
    ZeroLength {
        /// Where.
        offset: usize,
        /// The bytes from there to the end.
        ignored: usize,
    },
    /// Bytes after the end were ignored.
    TrailingBytes {
        /// Where the table ends.
        offset: usize,
        /// How many follow.
        extra: usize,
    },
    /// The table is newer than this reader.
    NewerRevision {
        /// The table's revision.
        revision: u8,
        /// The one it was read as.
        read_as: u8,
    },
    /// An entry is longer than its type.
    LongEntry {
        /// Where it begins.
        offset: usize,
        /// The bytes ignored.
        extra: usize,
    },
    /// Two memory ranges of one domain overlap.
    SelfOverlap {
        /// The entry that begins inside the other.
        offset: usize,
        /// The other.
        other: usize,
        /// The domain of both.
        domain: ProximityDomain,
    },
    /// Memory of a domain lies between two ranges of another.
    InterleavedMemory {
        /// The entry with the later range of `domain`.
        offset: usize,
        /// The domain that is in several pieces.
        domain: ProximityDomain,
    },
    /// Distance 255.
    Unreachable {
        /// Where the distance is.
        offset: usize,
        /// The row.
        from: u32,
        /// The column.
        to: u32,
    },
}

/// The identity of a table, without the fields that follow from its content (length, checksum).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Header {
    /// The layout's revision.
    pub revision: u8,
    /// Who made the machine.
    pub oem_id: [u8; 6],
    /// The maker's name for the table.
    pub oem_table_id: [u8; 8],
    /// The maker's revision of it.
    pub oem_revision: u32,
    /// What tool made the table.
    pub creator_id: [u8; 4],
    /// The tool's revision.
    pub creator_revision: u32,
}

/// What a kind of table has in its header.
pub(super) struct Kind {
    pub(super) signature: [u8; 4],
    /// The common header and the fields before the first entry.
    pub(super) header_len: usize,
    pub(super) revisions: core::ops::RangeInclusive<u8>,
}

/// Checks signature, length, revision and checksum; returns the header and the table's own bytes.
pub(super) fn open<'a>(
    bytes: &'a [u8],
    kind: &Kind,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<(Header, Bytes<'a>), AcpiError> {
    let all = Bytes::new(bytes);
    let found = all.array(0)?;
    if found != kind.signature {
        return Err(AcpiError::Signature {
            offset: 0,
            expected: kind.signature,
            found,
        });
    }
    // A 32-bit length fits usize on every target that has std; elsewhere too long is too long.
    let length = usize::try_from(all.u32(LENGTH_AT)?).unwrap_or(usize::MAX);
    if length < kind.header_len {
        return Err(AcpiError::TableLength {
            offset: LENGTH_AT,
            length,
            header: kind.header_len,
        });
    }
    let table = all.part(0, length)?;
    if bytes.len() > length {
        let (offset, extra) = (length, bytes.len() - length);
        match reading {
            Reading::Strict => return Err(AcpiError::TrailingBytes { offset, extra }),
            Reading::Field => quirks.push(Quirk::TrailingBytes { offset, extra }),
        }
    }
    let sum = sum(table.bytes);
    if sum != 0 {
        return Err(AcpiError::Checksum {
            offset: CHECKSUM_AT,
            sum,
        });
    }
    let header = Header {
        revision: table.u8(REVISION_AT)?,
        oem_id: table.array(10)?,
        oem_table_id: table.array(16)?,
        oem_revision: table.u32(24)?,
        creator_id: table.array(28)?,
        creator_revision: table.u32(32)?,
    };
    check_revision(&header, kind, reading, quirks)?;
    Ok((header, table))
}

fn check_revision(
    header: &Header,
    kind: &Kind,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<(), AcpiError> {
    let (oldest, newest) = (*kind.revisions.start(), *kind.revisions.end());
    let revision = header.revision;
    if revision > newest && reading == Reading::Field {
        quirks.push(Quirk::NewerRevision {
            revision,
            read_as: newest,
        });
    } else if !kind.revisions.contains(&revision) {
        return Err(AcpiError::Revision {
            offset: REVISION_AT,
            revision,
            oldest,
            newest,
        });
    }
    Ok(())
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// What the next entry of a walk is.
pub(super) enum Step<'a> {
    Entry(Bytes<'a>),
    End,
}

/// Cuts the next entry off `rest`, whose length field says `length`; `minimum` is the size of type and length.
pub(super) fn next_entry<'a>(
    rest: &mut Bytes<'a>,
    length: usize,
    minimum: usize,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<Step<'a>, AcpiError> {
    let offset = rest.offset;
    if length == 0 {
        return match reading {
            Reading::Strict => Err(AcpiError::ZeroLength { offset }),
            Reading::Field => {
                quirks.push(Quirk::ZeroLength {
                    offset,
                    ignored: rest.len(),
                });
                Ok(Step::End)
            }
        };
    }
    if length < minimum {
        return Err(AcpiError::Truncated {
            offset,
            needed: minimum,
            have: length,
        });
    }
    if length > rest.len() {
        return Err(AcpiError::EntryOverrun {
            offset,
            length,
            left: rest.len(),
        });
    }
    let entry = rest.part(0, length)?;
    *rest = rest.rest(length);
    Ok(Step::Entry(entry))
}

/// Checks that an entry has the length of its type.
pub(super) fn expect_len(
    entry: Bytes<'_>,
    kind: u16,
    expected: usize,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<(), AcpiError> {
    let (offset, length) = (entry.offset, entry.len());
    if length < expected || (length > expected && reading == Reading::Strict) {
        return Err(AcpiError::EntryLength {
            offset,
            kind,
            length,
            expected,
        });
    }
    if length > expected {
        quirks.push(Quirk::LongEntry {
            offset,
            extra: length - expected,
        });
    }
    Ok(())
}
