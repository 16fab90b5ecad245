//! A guest's memory, as the engine may look at it.

use std::io;
use std::ops::Range;

use sys::foreign::ForeignName;
use sys::pagemap::PageRun;
use sys::process::Remote;
use wire::{PageBits, Ready};

use crate::domain::store::PageBytes;
use crate::error::Refusal;
use crate::page::{Slot, StoreId};

/// A guest's address space.
///
/// Nothing but [`Self::has_exited`], [`Self::has_left`] and [`Self::name`] may be asked before it is admitted (I10). Of its guard the answer
/// is then that there is none.
pub(crate) trait Memory: Send + Sync {
    /// Admits the address space in which the agent that is `ready` lives, once.
    ///
    /// # Errors
    /// Why it may not be a guest.
    fn admit(&self, ready: Ready) -> Result<(), Refusal>;

    /// Whether the process is still one that may be in its domain.
    ///
    /// # Errors
    /// Why not.
    fn compare(&self) -> Result<(), Refusal>;

    /// Looks at the pages of `range` and arms the written ones again, as
    /// [`sys::pagemap::Pagemap::scan`].
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)>;

    /// Looks at the pages of `range` without arming them, and tells which are a file's, as
    /// [`sys::pagemap::Pagemap::peek`].
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    fn peek(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)>;

    /// Reads ranges one after another into `pages`; returns how many pages it could read.
    ///
    /// # Errors
    /// When the guest is gone.
    fn read(&self, ranges: &[Remote], pages: &mut [&mut PageBytes]) -> std::io::Result<usize>;

    /// The pages of `range`, which begins with a chunk and is no longer, whose frames other page tables have too: by fork, or by
    /// KSM.
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    fn shared(&self, range: Range<u64>) -> std::io::Result<PageBits>;

    /// The store of the node that each of these pages of one chunk lies on, given by address in
    /// ascending order; `None` where the page is gone, or on a node without store.
    fn stores(&self, pages: &[usize]) -> Vec<Option<StoreId>>;

    /// What may hold pages of the process pinned for long, in words; `None` when nothing does. Looks at `most`
    /// descriptors.
    fn pins(&self, most: u32) -> Option<String>;

    /// What may write to a page of the process that MOVE takes: by a reference to its frame that is no pin, for longer than a
    /// call; in words. `None` when nothing does. Looks at `most` descriptors.
    fn borrows(&self, most: u32) -> Option<String>;

    /// Calls `each` with every part of the address space that maps one of the stores with these
    /// numbers privately. False when other stores are mapped too.
    ///
    /// # Errors
    /// When the guest cannot be looked at.
    fn mapped(&self, stores: &[u64], each: &mut dyn FnMut(Mapped)) -> std::io::Result<bool>;

    /// How many mappings the process has.
    fn mappings(&self) -> Option<u64>;

    /// Brings back the pages that a dead agent has left out of reach, and lets go of the guest's userfaultfd. Not
    /// while the agent's thread still ends, but the `last` time in any case. Gives how many pages came back.
    fn rescue(&self, last: bool) -> usize;

    /// Whether it holds the guest's userfaultfd. Never blocks.
    fn is_guarded(&self) -> bool;

    /// Whether the process has ended, or runs another program.
    fn has_exited(&self) -> bool;

    /// The same, or its agent has closed the connection.
    fn has_left(&self) -> bool;

    /// The command name.
    fn name(&self) -> ForeignName;

    /// The number of the process that it is a child of.
    fn parent(&self) -> Option<u32> {
        None
    }
}

/// Part of a guest's address space that maps a store privately.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    /// Addresses, of whole pages.
    pub(crate) range: Range<u64>,
    /// The slot at its start.
    pub(crate) first: Slot,
}

/// The worker has been given up while it looked at a guest's memory.
#[derive(Debug, thiserror::Error)]
#[error("the look took too long")]
pub(crate) struct GivenUp;

/// Whether an error says that the worker has been given up, and nothing of the guest.
pub(crate) fn is_given_up(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(<dyn std::error::Error + Send + Sync>::is::<GivenUp>)
}
