//! The count of a guest where its engine sees it: discards of merged pages.

use core::sync::atomic::{AtomicU64, Ordering};

/// How often the program gave up merged pages. It lies at the beginning of the session's lifeline.
///
/// It is a hint, and says no more than that a sync would bring news: so the engine may ask sooner than in its next round. Every
/// process that maps the lifeline can write any number there.
#[derive(Debug)]
#[repr(C)]
pub struct Tally {
    discards: AtomicU64,
}

/// Bytes of a [`Tally`].
pub const TALLY_BYTES: usize = size_of::<Tally>();

impl Tally {
    /// Counts one more.
    pub fn note(&self) {
        // Relaxed: an engine that sees it asks the agent, which takes the lock under which all this is done.
        self.discards.fetch_add(1, Ordering::Relaxed);
    }

    /// What these bytes of a lifeline count.
    #[must_use]
    pub fn discards(bytes: [u8; TALLY_BYTES]) -> u64 {
        u64::from_ne_bytes(bytes)
    }
}
