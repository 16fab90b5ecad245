//! Where canonical pages live.

use std::os::fd::OwnedFd;
use std::sync::Mutex;

use crate::page::Slot;
use crate::realm::lock;

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
pub(crate) struct Memfd {
    file: sys::memfd::Store,
    /// The kernel's node for its pages, and up to which slot the kernel knows.
    node: Option<(u32, Mutex<u64>)>,
}

/// Slots the kernel is told the node of at a time: 1 TiB.
const PIECE: u64 = 1 << 28;

impl Memfd {
    /// An empty store whose pages come from `node`; without one, from where the kernel likes.
    ///
    /// Preferred, not bound: an allocation that is bound to a full node ends in the kernel killing
    /// processes for memory, which merging is there to save. So a full node's new canonical pages
    /// are on another one.
    ///
    /// # Errors
    /// When the memory file cannot be made.
    pub(crate) fn new(node: Option<u32>) -> std::io::Result<Self> {
        let file = sys::memfd::Store::new("pageone-store")?;
        let node = node.map(|node| (node, Mutex::new(0)));
        Ok(Self { file, node })
    }

    /// Makes sure that the kernel knows the node of the slots below `end`.
    fn place(&self, end: u64) {
        let Some((node, placed)) = &self.node else {
            return;
        };
        let mut placed = lock(placed);
        while *placed < end {
            if let Err(error) = self.file.prefer_node(*placed, PIECE, *node) {
                tracing::warn!(%error, node, "a store's pages cannot be kept on their node");
            }
            *placed += PIECE;
        }
    }
}

impl Store for Memfd {
    fn write(&self, first: Slot, pages: &[&PageBytes]) -> std::io::Result<()> {
        self.place(first.number() + pages.len() as u64);
        Ok(self.file.write(first.number(), pages)?)
    }

    fn punch(&self, first: Slot, count: u64) -> std::io::Result<()> {
        Ok(self.file.punch(first.number(), count)?)
    }

    fn share(&self) -> std::io::Result<OwnedFd> {
        Ok(self.file.share()?)
    }
}
