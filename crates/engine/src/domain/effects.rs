//! Effects of changes of page states, beyond the pages themselves.

use crate::page::{Fingerprint, Site, Slot, StoreId};

/// The effects of changes of page states. Collected while a chunk is locked, carried out by
/// [`Domain::apply`](crate::domain::Domain::apply).
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    /// Candidates to remove from the index they are in.
    pub(crate) forget: Vec<(StoreId, Fingerprint, Site)>,
    /// Refs of slots that were never mapped: dropped at once.
    pub(crate) unref: Vec<Slot>,
    /// Merged pages that no longer map their slot: the ref waits for the lifeline.
    pub(crate) leave: Vec<Slot>,
    /// Asked pages whose fate is unknown: likewise.
    pub(crate) keep: Vec<Slot>,
}
