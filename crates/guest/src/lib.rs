//! Offers memory of this program to PageONE, which merges pages of equal content: for VMMs, runtimes and allocators.
//!
//! ```text
//!   Offer::new(region) ──▶ pageone_register       by the agent's C API, found at run time
//!        │  merge()    ──▶ pageone_merge          now, and tells how many pages
//!        │  recycle(…) ──▶ pageone_recycle        the content no longer matters
//!        ▼
//!   drop, into_inner   ──▶ pageone_unregister     every page is private again
//! ```
//!
//! The agent is a library of its own: `pageone run` preloads it, or `LD_PRELOAD` does, or the program links it
//! (`-lpageone_agent`). It is looked for by name, so the same program runs with it and without. Without it
//! [`Offer::new`] gives [`Error::NoAgent`], and the region is the caller's again:
//!
//! ```
//! use pageone_guest::{Error, Offer};
//!
//! let mut memory = vec![7u8; 64 * 4096];
//! match Offer::new(&mut memory[..]) {
//!     Ok(offer) => println!("{} pages merged", offer.merge().unwrap_or(0)),
//!     Err((Error::NoAgent, _)) => println!("not under `pageone run`: nothing is merged"),
//!     Err((error, _)) => panic!("{error}"),
//! }
//! assert!(memory.iter().all(|&byte| byte == 7)); // merging changes no content
//! ```
//!
//! **Why it is safe.** Offered memory behaves as before in every way that a program can see, so to offer takes no more than that
//! the memory is mapped. An [`Offer`] owns its region, so the region cannot go before the offer is withdrawn. Only
//! [`Offer::recycle`] changes content; it needs the region for itself.

mod api;
mod region;
#[cfg(feature = "vm-memory")]
mod vm;

use std::ops::{Deref, Range};

pub use api::{is_served, sees_libc};
pub use region::Region;
#[cfg(feature = "vm-memory")]
pub use vm::recycle;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Why a call of the agent's did nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The agent's library is not in this process.
    #[error("PageONE's agent is not loaded: start the program with `pageone run`")]
    NoAgent,
    /// The agent refuses; `pageone.h` has the meaning of each number.
    #[error("{call}: {source}")]
    Refused {
        /// The function of the C API.
        call: &'static str,
        /// Its errno.
        source: std::io::Error,
    },
    /// The memory is a file's, or shared: to recycle it would bring the file's content back.
    #[error("the memory at {start:#x} is a file's or shared: punch a hole into the file instead")]
    Shared {
        /// The first byte, as an address.
        start: usize,
    },
    /// Some of what is named lies outside the offered region, or is not made of whole pages.
    #[error("{start:#x}..{end:#x} are not whole pages of the offered region")]
    Range {
        /// The first byte, as an address.
        start: usize,
        /// The byte behind the last.
        end: usize,
    },
}

/// A region that is offered for merging, until this is dropped.
#[derive(Debug)]
pub struct Offer<R: Region> {
    /// `None` only while it is taken out.
    region: Option<R>,
    ranges: Vec<Range<usize>>,
}

impl<R: Region> Offer<R> {
    /// Offers the whole pages of `region`.
    ///
    /// # Errors
    /// Why not, and the region; then nothing of it is offered.
    pub fn new(mut region: R) -> Result<Self, (Error, R)> {
        let ranges: Vec<_> = region.ranges().into_iter().filter_map(whole).collect();
        let mut offer = Self {
            region: None,
            ranges: Vec::with_capacity(ranges.len()),
        };
        for range in ranges {
            if let Err(error) = api::register(&range) {
                offer.withdraw();
                return Err((error, region));
            }
            offer.ranges.push(range);
        }
        offer.region = Some(region);
        Ok(offer)
    }

    /// Merges now what equals other memory of its domain: it need not have been quiet. Waits until that is done, and gives the
    /// number of pages that share a copy now and did not before. It may have merged a part: another call goes on, or says why
    /// there is no more.
    ///
    /// # Errors
    /// [`Error::Refused`] when no page was merged because no engine serves this process, or because the kernel may write to its
    /// memory in a way that the engine cannot see (`pageone.h`).
    pub fn merge(&self) -> Result<u64, Error> {
        let mut merged = 0;
        for range in &self.ranges {
            match api::merge(range) {
                Ok(pages) => merged += pages,
                Err(error) if merged == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(merged)
    }

    /// Says that the content of these bytes no longer matters, counted from the beginning of the region's only range: the pages
    /// go back to the host now, and read as zeros.
    ///
    /// # Errors
    /// [`Error::Range`] when these are no whole pages of it, or it has several ranges.
    pub fn recycle(&mut self, bytes: Range<usize>) -> Result<(), Error> {
        let all = self.region.as_mut().map(Region::ranges).unwrap_or_default();
        // Of a region of several ranges it is not said which one is meant.
        let [only] = all.as_slice() else {
            let (start, end) = (bytes.start, bytes.end);
            return Err(Error::Range { start, end });
        };
        let base = only.start;
        let (start, end) = (base.wrapping_add(bytes.start), base.wrapping_add(bytes.end));
        let inside = |range: &Range<usize>| range.start <= start && end <= range.end;
        let whole = start.is_multiple_of(PAGE_BYTES) && end.is_multiple_of(PAGE_BYTES);
        match start <= end && whole && self.ranges.iter().any(inside) {
            true => api::recycle(&(start..end)),
            false => Err(Error::Range { start, end }),
        }
    }

    /// Withdraws the offer, and gives the region back.
    #[must_use]
    pub fn into_inner(mut self) -> R {
        self.withdraw();
        match self.region.take() {
            Some(region) => region,
            None => unreachable!("an offer has its region until it ends"),
        }
    }

    /// What cannot be made private for want of memory stays merged, and right, until it is written.
    fn withdraw(&mut self) {
        for range in self.ranges.drain(..) {
            let _ = api::unregister(&range);
        }
    }
}

impl<R: Region> Deref for Offer<R> {
    type Target = R;

    fn deref(&self) -> &R {
        match &self.region {
            Some(region) => region,
            None => unreachable!("an offer has its region until it ends"),
        }
    }
}

impl<R: Region> Drop for Offer<R> {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// The whole pages of a range, if there are any.
fn whole(range: Range<usize>) -> Option<Range<usize>> {
    let start = range.start.checked_next_multiple_of(PAGE_BYTES)?;
    let end = range.end / PAGE_BYTES * PAGE_BYTES;
    (start < end).then_some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_pages_are_offered() {
        assert_eq!(whole(1..8191), None);
        assert_eq!(whole(1..8192), Some(4096..8192));
        assert_eq!(whole(4096..4096), None);
        assert_eq!(whole(usize::MAX - 5..usize::MAX), None);
    }

    #[test]
    fn without_an_agent_the_region_comes_back() {
        let mut memory = vec![1u8; 3 * PAGE_BYTES];
        let (error, region) = Offer::new(&mut memory[..]).unwrap_err();
        assert!(matches!(error, Error::NoAgent), "{error}");
        assert_eq!(region.len(), 3 * PAGE_BYTES);
        assert!(!is_served() && !sees_libc());
    }
}
