//! Stores, in which canonical pages live.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use crate::page::{Slot, StoreId};
use crate::sync::lock;

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

    /// The number behind the last that was ever written.
    ///
    /// # Errors
    /// Whatever the file system gives.
    fn end(&self) -> std::io::Result<u64>;

    /// Shows every slot that holds a page, in ascending order.
    ///
    /// # Errors
    /// When pages cannot be read.
    fn each(&self, each: &mut dyn FnMut(Slot, &PageBytes)) -> std::io::Result<()>;

    /// The kernel's node for its frames; none where it may take them from any.
    fn node(&self) -> Option<u32>;

    /// The nodes of the frames of slots, ascending; `None` for one without a frame. The caller has a ref of each.
    ///
    /// # Errors
    /// What the kernel gives.
    fn nodes(&self, slots: &[Slot]) -> std::io::Result<Vec<Option<u32>>>;

    /// The number by which mappings of this store are known.
    fn number(&self) -> u64;

    /// A descriptor that can only read, for a guest.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    fn share(&self) -> std::io::Result<OwnedFd>;
}

/// A store in a memory file.
pub(crate) struct Memfd {
    file: sys::memfd::Store,
    /// Which of the domain's stores it is.
    id: StoreId,
    number: u64,
    /// The kernel's node for its pages, and up to which slot the kernel knows.
    node: Option<(u32, Mutex<u64>)>,
}

/// What stores are called.
const NAME: &str = "pageone-store";
/// How the kernel shows a mapping of one.
pub(crate) const PATH: &str = "/memfd:pageone-store";
/// Pages read at once: 1 MiB.
const BATCH: usize = 256;
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
    pub(crate) fn new(id: StoreId, node: Option<u32>) -> std::io::Result<Self> {
        Self::of(sys::memfd::Store::new(NAME)?, id, node)
    }

    /// A former engine's store, as the `id`th of its domain.
    ///
    /// # Errors
    /// When the descriptor is no such store.
    pub(crate) fn restore(file: OwnedFd, id: StoreId, node: Option<u32>) -> std::io::Result<Self> {
        let file = sys::memfd::Store::adopt(file, NAME).map_err(std::io::Error::other)?;
        Self::of(file, id, node)
    }

    fn of(file: sys::memfd::Store, id: StoreId, node: Option<u32>) -> std::io::Result<Self> {
        let number = sys::memfd::number(&file)?;
        let node = node.map(|node| (node, Mutex::new(0)));
        Ok(Self {
            file,
            id,
            number,
            node,
        })
    }

    /// The store's descriptor, for a keeper.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
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

    fn end(&self) -> std::io::Result<u64> {
        Ok(self.file.end()?)
    }

    fn each(&self, each: &mut dyn FnMut(Slot, &PageBytes)) -> std::io::Result<()> {
        let mut pages = vec![[0; wire::PAGE_BYTES]; BATCH];
        let mut at = 0;
        while let Some(run) = self.file.next_run(at)? {
            let mut rest = run.clone();
            while !rest.is_empty() {
                let len = usize::try_from(rest.end - rest.start).unwrap_or(BATCH);
                let part = pages.get_mut(..len.min(BATCH)).unwrap_or_default();
                self.file.read_pages(rest.start, part)?;
                let first = self.id.first_slot().0 + rest.start;
                (first..)
                    .zip(&*part)
                    .for_each(|(slot, page)| each(Slot(slot), page));
                rest.start += part.len() as u64;
            }
            at = run.end;
        }
        Ok(())
    }

    fn node(&self) -> Option<u32> {
        self.node.as_ref().map(|(node, _)| *node)
    }

    fn nodes(&self, slots: &[Slot]) -> std::io::Result<Vec<Option<u32>>> {
        let numbers: Vec<_> = slots.iter().map(|slot| slot.number()).collect();
        self.file.nodes(&numbers)
    }

    fn number(&self) -> u64 {
        self.number
    }

    fn share(&self) -> std::io::Result<OwnedFd> {
        Ok(self.file.share()?)
    }
}
