//! Notes that an agent makes before it takes pages out, for an engine that finds it dead.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::page::PAGE_BYTES;

/// The most pages that are out at a time.
pub const MAX_OUT: usize = 128;

/// The pages that are out: place `n` of the staging area holds the page whose home is the `n`-th.
///
/// It lies at the start of a page of the guest's memory, and the staging area begins with the next page. The agent writes
/// it; the engine reads a copy of that page, and only after the agent's thread has ended.
#[derive(Debug)]
#[repr(C)]
pub struct Journal {
    count: AtomicU64,
    homes: [AtomicU64; MAX_OUT],
}

const _: () = assert!(size_of::<Journal>() <= PAGE_BYTES);

impl Journal {
    /// Notes the homes of the pages that may be out from here on; those beyond [`MAX_OUT`] are ignored.
    pub fn note(&self, homes: impl Iterator<Item = usize>) {
        let mut count = 0;
        for (place, home) in self.homes.iter().zip(homes) {
            place.store(home as u64, Ordering::Relaxed);
            count += 1;
        }
        // Release: the homes come before their number, wherever the thread is stopped.
        self.count.store(count, Ordering::Release);
    }

    /// Notes that no page is out.
    pub fn clear(&self) {
        self.count.store(0, Ordering::Release);
    }

    /// Whether no page is out.
    pub fn is_clear(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// The homes that a copy of the page names, in the order of their places.
    pub fn homes(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = u64> {
        let (words, _) = page.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let count = usize::try_from(words.next().unwrap_or(0)).unwrap_or(usize::MAX);
        words.take(count.min(MAX_OUT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(words: &[u64]) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        let places = page.as_chunks_mut::<8>().0.iter_mut();
        places
            .zip(words)
            .for_each(|(place, word)| *place = word.to_le_bytes());
        page
    }

    fn copy(journal: &Journal) -> [u8; PAGE_BYTES] {
        let homes = journal
            .homes
            .iter()
            .map(|home| home.load(Ordering::Relaxed));
        let words: Vec<_> = [journal.count.load(Ordering::Relaxed)]
            .into_iter()
            .chain(homes)
            .collect();
        page(&words)
    }

    #[test]
    fn what_is_noted_is_read() {
        let journal = Journal {
            count: AtomicU64::new(0),
            homes: [const { AtomicU64::new(0) }; MAX_OUT],
        };
        journal.note([0x1000, 0x7000].into_iter());
        assert_eq!(
            Journal::homes(&copy(&journal)).collect::<Vec<_>>(),
            [0x1000, 0x7000]
        );
        journal.clear();
        assert_eq!(Journal::homes(&copy(&journal)).count(), 0);
        journal.note(1..1000);
        assert_eq!(Journal::homes(&copy(&journal)).count(), MAX_OUT);
    }

    #[test]
    fn any_page_is_read() {
        assert_eq!(Journal::homes(&page(&[u64::MAX, 3])).count(), MAX_OUT);
        assert_eq!(Journal::homes(&[0xFF; PAGE_BYTES]).count(), MAX_OUT);
    }
}
