//! ACPI's NUMA tables, read from untrusted bytes: SRAT (the domain of each part), SLIT (distances), HMAT (latency,
//! bandwidth, memory-side caches).
//!
//! ```text
//!  bytes ──▶ header: signature, length, checksum ──▶ entries, each with its own length ──▶ typed table
//! ```
//!
//! Nothing here panics, allocates more than the input's size warrants, or needs more than `core` and `alloc`.
//! Every error names the offset, from the table's first byte, at which it was found.
//!
//! # Two readings
//!
//! [`Reading::Strict`] takes what the specification allows. Firmware in the field strays from it, and a machine
//! has to be understood all the same. [`Reading::Field`] accepts the following, and reports each as a [`Quirk`]:
//!
//! | found | strict | field |
//! |---|---|---|
//! | entry of length zero (Dell Precision 5810) | error | ends the table; the rest is ignored |
//! | bytes after the stated length | error | ignored |
//! | SLIT longer than its matrix | error | the rest is ignored |
//! | revision newer than known | error | read as the newest known |
//! | entry longer than its type | error | the rest of the entry is ignored |
//! | memory ranges of *one* domain overlap | error | their union counts |
//! | SLIT distance 255, unreachable | error | kept; placement never goes there |
//!
//! Both readings accept entries of unknown type, as the specification asks, and memory of one domain that
//! surrounds memory of another ([`Quirk::InterleavedMemory`]): domains are sets of ranges, never one span. Both
//! reject a wrong checksum, memory claimed by two domains, a diagonal other than 10 and distances below 10.
//!
//! Sources: ACPI 6.5, sections 5.2.16, 5.2.17, 5.2.28; Linux `drivers/acpi/numa/{srat,hmat}.c`.

mod bytes;
mod error;
mod header;
mod hmat;
mod slit;
mod srat;

pub use error::AcpiError;
pub use header::{Header, Quirk, Reading};
pub use hmat::{DataType, Hmat, MemoryAttributes, MemorySideCache, SystemLocality};
pub use slit::Slit;
#[cfg(feature = "std")]
pub(crate) use slit::{LOCAL, UNREACHABLE};
pub use srat::{Affinity, DeviceHandle, Srat, memory_flags};

use serde::{Deserialize, Serialize};

/// The most proximity domains a table may name: as many as Linux can have nodes.
pub const MAX_DOMAINS: usize = 1024;

/// ACPI's name for what becomes a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProximityDomain(pub u32);

impl core::fmt::Display for ProximityDomain {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}
