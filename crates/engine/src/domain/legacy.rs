//! The word of a domain to the keepers of its stores, for the next engine.

use std::os::fd::OwnedFd;

/// What a domain leaves to the next engine.
pub(crate) trait Legacy: Send + Sync {
    /// The tie for a new guest.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    fn tie(&self) -> std::io::Result<OwnedFd>;

    /// Notes whose guest began the domain: its descriptors count as this user's.
    fn own(&self, uid: u32);

    /// Descriptors that the keeper holds.
    fn kept(&self) -> u64;

    /// Notes that a former engine's tie is free.
    fn untie(&self, number: u64);

    /// The domain ends: nothing of it is mapped any more.
    fn end(&self);
}
