//! The errors of a table.

use super::ProximityDomain;

/// Why bytes are not the table they should be. Offsets count from the table's first byte.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcpiError {
    /// The bytes end inside something.
    #[error("offset {offset}: {needed} bytes needed, {have} there")]
    Truncated {
        /// Where the unfinished thing begins.
        offset: usize,
        /// Its size.
        needed: usize,
        /// What is left.
        have: usize,
    },
    /// Another table than the one asked for.
    #[error("offset {offset}: signature `{}` where `{}` should be", found.escape_ascii(), expected.escape_ascii())]
    Signature {
        /// Always 0.
        offset: usize,
        /// The four bytes that should be there.
        expected: [u8; 4],
        /// Those that are.
        found: [u8; 4],
    },
    /// The header's length is less than the header itself.
    #[error("offset {offset}: table length {length} is shorter than its header of {header}")]
    TableLength {
        /// Where the length is.
        offset: usize,
        /// The length that the header states.
        length: usize,
        /// The size of this table's header.
        header: usize,
    },
    /// There are bytes after the end.
    #[error("offset {offset}: {extra} bytes after the end of the table")]
    TrailingBytes {
        /// Where the table ends.
        offset: usize,
        /// How many follow.
        extra: usize,
    },
    /// The bytes do not add up to zero.
    #[error("offset {offset}: checksum: the bytes add up to {sum:#04x}, not to 0")]
    Checksum {
        /// Where the checksum byte is.
        offset: usize,
        /// The sum of all bytes, modulo 256.
        sum: u8,
    },
    /// A revision that is not known.
    #[error("offset {offset}: revision {revision}, known are {oldest} to {newest}")]
    Revision {
        /// Where the revision is.
        offset: usize,
        /// The revision found.
        revision: u8,
        /// The oldest known.
        oldest: u8,
        /// The newest known.
        newest: u8,
    },
    /// An entry of length zero: a naive walk would stay there for ever.
    #[error("offset {offset}: entry of length 0")]
    ZeroLength {
        /// Where the entry begins.
        offset: usize,
    },
    /// An entry whose length is not its type's.
    #[error("offset {offset}: entry of type {kind} has length {length}, not {expected}")]
    EntryLength {
        /// Where the entry begins.
        offset: usize,
        /// Its type.
        kind: u16,
        /// The length that it states.
        length: usize,
        /// The length that its type has.
        expected: usize,
    },
    /// An entry that reaches past the end of the table.
    #[error("offset {offset}: entry of {length} bytes, but the table ends after {left}")]
    EntryOverrun {
        /// Where the entry begins.
        offset: usize,
        /// The length that it states.
        length: usize,
        /// What is left of the table.
        left: usize,
    },
    /// A memory range beyond 2^64.
    #[error(
        "offset {offset}: memory at {base:#x} of {length:#x} bytes passes the end of the address space"
    )]
    RangeOverflow {
        /// Where the entry begins.
        offset: usize,
        /// The range's first address.
        base: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// Two entries claim the same memory.
    #[error(
        "offset {offset}: memory of domain {domain} overlaps that of domain {other_domain} at offset {other}"
    )]
    OverlappingMemory {
        /// The entry that begins inside the other.
        offset: usize,
        /// Its domain.
        domain: ProximityDomain,
        /// The other entry.
        other: usize,
        /// Its domain.
        other_domain: ProximityDomain,
    },
    /// More domains than any machine has.
    #[error("offset {offset}: {found} proximity domains, at most {limit} are possible")]
    TooManyDomains {
        /// The entry or field that passes the limit.
        offset: usize,
        /// How many there are, as far as was counted.
        found: u64,
        /// [`MAX_DOMAINS`](super::MAX_DOMAINS).
        limit: usize,
    },
    /// The matrix and the table's length disagree.
    #[error("offset {offset}: {rows} × {columns} matrix needs {needed} bytes, {have} there")]
    MatrixSize {
        /// Where the table or entry with the matrix begins.
        offset: usize,
        /// The matrix's rows.
        rows: u64,
        /// The matrix's columns.
        columns: u64,
        /// Bytes needed, all told.
        needed: u64,
        /// Bytes there.
        have: usize,
    },
    /// The distance of a domain to itself is not 10.
    #[error("offset {offset}: distance of domain {domain} to itself is {distance}, not 10")]
    Diagonal {
        /// Where the distance is.
        offset: usize,
        /// The domain.
        domain: u32,
        /// The distance found.
        distance: u8,
    },
    /// A distance from 0 to 9, which are reserved.
    #[error("offset {offset}: distance {distance} from domain {from} to {to} is less than 10")]
    ReservedDistance {
        /// Where the distance is.
        offset: usize,
        /// The row.
        from: u32,
        /// The column.
        to: u32,
        /// The distance found.
        distance: u8,
    },
    /// Distance 255: no way from one domain to the other.
    #[error("offset {offset}: domain {to} cannot be reached from domain {from}")]
    Unreachable {
        /// Where the distance is.
        offset: usize,
        /// The row.
        from: u32,
        /// The column.
        to: u32,
    },
    /// HMAT data of an unknown kind.
    #[error("offset {offset}: unknown HMAT data type {kind}")]
    DataType {
        /// Where the type is.
        offset: usize,
        /// The type found.
        kind: u8,
    },
}
