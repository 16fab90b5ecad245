//! SLIT: the System Locality Distance Information Table.
//!
//! ```text
//!   0 header   36 localities: u64 = n   44 distances: n × n bytes, row = from, column = to
//! ```

use alloc::vec::Vec;

use super::bytes::Bytes;
use super::header::{self, Kind};
use super::{AcpiError, Header, MAX_DOMAINS, Quirk, Reading};

const KIND: Kind = Kind {
    signature: *b"SLIT",
    header_len: 44,
    revisions: 1..=1,
};
const LOCALITIES_AT: usize = 36;
const MATRIX_AT: usize = 44;

/// A domain's distance to itself.
pub(crate) const LOCAL: u8 = 10;
/// No way from one domain to the other.
pub(crate) const UNREACHABLE: u8 = 255;

/// Relative distances between proximity domains; domain d is row and column d.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slit {
    /// The table's identity.
    pub header: Header,
    /// Rows and columns of the matrix.
    pub localities: usize,
    /// `localities` × `localities` distances, row by row.
    pub distances: Vec<u8>,
    /// What was odd.
    pub quirks: Vec<Quirk>,
}

impl Slit {
    /// Reads a table.
    ///
    /// # Errors
    /// [`AcpiError`], with the offset; see [`acpi`](super) for what each reading accepts.
    pub fn parse(bytes: &[u8], reading: Reading) -> Result<Self, AcpiError> {
        let mut quirks = Vec::new();
        let (header, table) = header::open(bytes, &KIND, reading, &mut quirks)?;
        let localities = matrix_size(table, reading, &mut quirks)?;
        let distances = table
            .part(MATRIX_AT, localities * localities)?
            .bytes
            .to_vec();
        for (index, &distance) in distances.iter().enumerate() {
            let position = Position::new(index, localities);
            position.check(distance, reading, &mut quirks)?;
        }
        Ok(Self {
            header,
            localities,
            distances,
            quirks,
        })
    }

    /// The distance between two domains; `None` for one outside the matrix.
    pub fn distance(&self, from: u32, to: u32) -> Option<u8> {
        let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
        if from >= self.localities || to >= self.localities {
            return None;
        }
        self.distances.get(from * self.localities + to).copied()
    }
}

fn matrix_size(
    table: Bytes<'_>,
    reading: Reading,
    quirks: &mut Vec<Quirk>,
) -> Result<usize, AcpiError> {
    let found = table.u64(LOCALITIES_AT)?;
    let localities = usize::try_from(found)
        .ok()
        .filter(|&localities| localities <= MAX_DOMAINS)
        .ok_or(AcpiError::TooManyDomains {
            offset: LOCALITIES_AT,
            found,
            limit: MAX_DOMAINS,
        })?;
    let needed = MATRIX_AT + localities * localities;
    let have = table.len();
    if have < needed || (have > needed && reading == Reading::Strict) {
        let needed = needed as u64;
        return Err(AcpiError::MatrixSize {
            offset: LOCALITIES_AT,
            rows: found,
            columns: found,
            needed,
            have,
        });
    }
    if have > needed {
        quirks.push(Quirk::TrailingBytes {
            offset: needed,
            extra: have - needed,
        });
    }
    Ok(localities)
}

/// One element of the matrix.
struct Position {
    from: u32,
    to: u32,
    offset: usize,
}

impl Position {
    fn new(index: usize, localities: usize) -> Self {
        // Both are below MAX_DOMAINS.
        let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Self {
            from: small(index / localities),
            to: small(index % localities),
            offset: MATRIX_AT + index,
        }
    }

    fn check(
        &self,
        distance: u8,
        reading: Reading,
        quirks: &mut Vec<Quirk>,
    ) -> Result<(), AcpiError> {
        let &Self { from, to, offset } = self;
        if from == to && distance != LOCAL {
            return Err(AcpiError::Diagonal {
                offset,
                domain: from,
                distance,
            });
        }
        if distance < LOCAL {
            return Err(AcpiError::ReservedDistance {
                offset,
                from,
                to,
                distance,
            });
        }
        if distance == UNREACHABLE {
            match reading {
                Reading::Strict => return Err(AcpiError::Unreachable { offset, from, to }),
                Reading::Field => quirks.push(Quirk::Unreachable { offset, from, to }),
            }
        }
        Ok(())
    }
}
