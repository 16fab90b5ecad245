//! Copies of canonical pages, for staged pages to be compared with.
//!
//! The content of a slot never changes (I3), so a copy is as good as the page itself. To map the store for a look
//! would take as much time: a fault for every few pages, an entry in the page table for each, and taking both
//! away again. And reading never allocates where nothing was written.

use std::os::fd::BorrowedFd;

use rustix::io::Result;
use sys::{mapping, memfd};
use wire::PAGE_BYTES;

use super::{BATCH_PAGES, Item, Target};

const BYTES: usize = BATCH_PAGES * PAGE_BYTES;
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Room for the canonical pages of a batch.
pub(super) struct Copies {
    start: usize,
}

impl Copies {
    /// # Errors
    /// What mmap gives.
    pub(super) fn new() -> Result<Self> {
        let start = mapping::area(BYTES)?;
        // SAFETY: the area was just made here.
        unsafe { mapping::keep_apart(start, BYTES)? };
        Ok(Self { start })
    }

    /// Copies the canonical pages of a batch; tells which items have one.
    pub(super) fn fill(&mut self, store: BorrowedFd<'_>, items: &[Item]) -> [bool; BATCH_PAGES] {
        let mut have = [false; BATCH_PAGES];
        let mut at = 0;
        while let Some(&(_, target)) = items.get(at) {
            let mut run = 1;
            match target {
                Target::Slot(slot) => {
                    run = neighbours(items, at, slot);
                    let read = self.read(store, at..at + run, slot);
                    let have = have.iter_mut().skip(at).take(read);
                    have.zip(items.iter().skip(at))
                        .for_each(|(have, item)| *have = item.1 != Target::Enclosed);
                }
                Target::Zeros => have.get_mut(at).into_iter().for_each(|have| *have = true),
                Target::Enclosed => {}
            }
            at += run;
        }
        have
    }

    /// Reads the pages from `slot` on to some places; gives how many came.
    fn read(&mut self, store: BorrowedFd<'_>, places: std::ops::Range<usize>, slot: u64) -> usize {
        let bytes = self.bytes_mut();
        let bytes = bytes.get_mut(places.start * PAGE_BYTES..places.end * PAGE_BYTES);
        let read = memfd::read_at(store, slot * PAGE_BYTES as u64, bytes.unwrap_or_default());
        read.unwrap_or(0) / PAGE_BYTES
    }

    /// Whether `page` equals the canonical page of the `at`th item, which has one.
    pub(super) fn equal(&self, page: &[u8; PAGE_BYTES], at: usize, target: Target) -> bool {
        match target {
            Target::Slot(_) => self.bytes().chunks_exact(PAGE_BYTES).nth(at) == Some(page),
            Target::Zeros => *page == ZEROS,
            Target::Enclosed => false,
        }
    }

    /// Gives the memory back until the next batch.
    pub(super) fn rest(&mut self) {
        // SAFETY: the area is this object's own, and nothing of it is borrowed.
        let _ = unsafe { mapping::advise(self.start, BYTES, libc::MADV_DONTNEED) };
    }

    fn bytes(&self) -> &[u8] {
        let start = std::ptr::with_exposed_provenance(self.start);
        // SAFETY: the area has so many bytes, lives as long as `self`, and only `bytes_mut` gives a way to write.
        unsafe { std::slice::from_raw_parts(start, BYTES) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(start, BYTES) }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // SAFETY: the area was made by `new`, and nothing of it is borrowed.
        let _ = unsafe { mapping::unmap(self.start, BYTES) };
    }
}

/// How many items from `at` on one call reads: their slots are neighbours, or as far apart as they are with
/// private pages between.
fn neighbours(items: &[Item], at: usize, slot: u64) -> usize {
    let mut run = 1;
    for (n, item) in items.iter().enumerate().skip(at) {
        match item.1 {
            Target::Slot(next) if next == slot + (n - at) as u64 => run = n - at + 1,
            Target::Enclosed => {}
            _ => break,
        }
    }
    run
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use sys::memfd::Store;

    #[test]
    fn a_batch_has_the_pages_of_its_slots() {
        let store = Store::new("pageone-test").unwrap();
        let pages: Vec<[u8; PAGE_BYTES]> = (1..=5).map(|byte| [byte; PAGE_BYTES]).collect();
        store.write(0, &pages.iter().collect::<Vec<_>>()).unwrap();
        let file = store.share().unwrap();
        let targets = [
            Target::Slot(0),
            Target::Enclosed,
            Target::Slot(2),
            Target::Zeros,
            Target::Slot(4),
            Target::Slot(5), // behind the end
            Target::Slot(3),
            Target::Enclosed,
        ];
        let items: Vec<Item> = (40..).zip(targets).collect();
        let mut copies = Copies::new().unwrap();
        for _ in 0..2 {
            let have = copies.fill(file.as_fd(), &items);
            let wanted = [true, false, true, true, true, false, true, false];
            assert_eq!(have[..targets.len()], wanted);
            for (at, byte) in [(0, 1), (2, 3), (3, 0), (4, 5), (6, 4)] {
                let mut page = [byte; PAGE_BYTES];
                assert!(copies.equal(&page, at, targets[at]), "place {at}");
                page[PAGE_BYTES - 1] ^= 1;
                assert!(!copies.equal(&page, at, targets[at]), "place {at}");
            }
            copies.rest();
        }
        assert!(!copies.fill(file.as_fd(), &[])[0]);
    }

    #[test]
    fn one_call_reads_what_lies_together() {
        let run = |targets: &[Target]| {
            let items: Vec<Item> = (0..).zip(targets.iter().copied()).collect();
            neighbours(&items, 0, 7)
        };
        let (slot, enclosed) = (Target::Slot, Target::Enclosed);
        assert_eq!(run(&[slot(7), slot(8), slot(9), slot(11)]), 3);
        assert_eq!(run(&[slot(7), enclosed, enclosed, slot(10), enclosed]), 4);
        assert_eq!(run(&[slot(7), enclosed, slot(8)]), 1);
        assert_eq!(run(&[slot(7), Target::Zeros, slot(9)]), 1);
    }
}
