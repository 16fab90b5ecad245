//! Where canonical pages live.

use std::os::fd::OwnedFd;

use crate::page::Slot;

/// A page's bytes.
pub(crate) type PageBytes = [u8; wire::PAGE_BYTES];

/// A sparse file of canonical pages that only the engine writes (I2).
pub(crate) trait Store: Send + Sync {
    /// Writes pages into neighbouring slots from `first` on, before any agent hears of them (I3).
    ///
    /// # Errors
    /// When memory is exhausted.
    fn write(&self, first: Slot, pages: &[&PageBytes]) -> std::io::Result<()>;

    /// Gives the frames of `count` slots back; none of them has refs (I5).
    ///
    /// # Errors
    /// Whatever the file system gives.
    fn punch(&self, first: Slot, count: u64) -> std::io::Result<()>;

    /// A descriptor that can only read, for a guest.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    fn share(&self) -> std::io::Result<OwnedFd>;
}

/// A store in a memory file.
pub(crate) struct Memfd(sys::memfd::Store);

impl Memfd {
    /// An empty store.
    ///
    /// # Errors
    /// When the memory file cannot be made.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(sys::memfd::Store::new("pageone-store")?))
    }
}

impl Store for Memfd {
    fn write(&self, first: Slot, pages: &[&PageBytes]) -> std::io::Result<()> {
        Ok(self.0.write(first.0, pages)?)
    }

    fn punch(&self, first: Slot, count: u64) -> std::io::Result<()> {
        Ok(self.0.punch(first.0, count)?)
    }

    fn share(&self) -> std::io::Result<OwnedFd> {
        Ok(self.0.share()?)
    }
}
