//! Pages and their fingerprints.

/// Bytes of a page.
pub(crate) const PAGE: u64 = wire::PAGE_BYTES as u64;
/// The fingerprint of a page of zeros; no other page has it.
pub(crate) const ZEROS: u64 = 0;

/// A page that was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Print {
    /// Its place in the part.
    pub(crate) place: u32,
    /// The node it was on at the first look.
    pub(crate) node: u32,
    /// The fingerprint.
    pub(crate) print: u64,
}
