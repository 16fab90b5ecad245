//! Read: settled pages, some at a time, and the fingerprint of each.
//!
//! A batch of [`BATCH`] pages stays in the second-level cache between the copy, the hash and, for a
//! new canonical page, the copy into the store. The agent's word and the engine's reading race
//! with the guest: a page may change or vanish at any moment. That is fine, because the store
//! gets exactly the bytes that were hashed, and the agent compares before it merges (I1).
//!
//! The hash is XXH3 with 128 bits and a secret drawn at start, so that no guest can aim at
//! collisions (<https://github.com/Cyan4973/xxHash>). A collision would cost a failed merge anyway,
//! never a byte.

use sys::process::Remote;
use twox_hash::xxhash3_128;

use crate::domain::store::PageBytes;
use crate::guest::memory::Memory;
use crate::page::{Fingerprint, PAGE};

/// Pages read at once: 256 KiB.
pub(crate) const BATCH: usize = 64;
const SECRET_BYTES: usize = 192;

/// Fingerprints pages.
#[derive(Clone)]
pub(crate) struct Hasher {
    secret: [u8; SECRET_BYTES],
}

impl Hasher {
    /// A hasher whose fingerprints no other process can foresee.
    ///
    /// # Errors
    /// When the kernel has no random numbers.
    pub(crate) fn new() -> std::io::Result<Self> {
        let mut secret = [0; SECRET_BYTES];
        let flags = rustix::rand::GetRandomFlags::empty();
        let filled = rustix::rand::getrandom(&mut secret, flags)?;
        match filled == SECRET_BYTES {
            true => Ok(Self { secret }),
            false => Err(std::io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// The fingerprint of a page; `None` for a page of zeros.
    pub(crate) fn fingerprint(&self, page: &PageBytes) -> Option<Fingerprint> {
        (!is_zero(page)).then(|| self.fingerprint_any(page))
    }

    /// The fingerprint of a page, zeros too.
    pub(crate) fn fingerprint_any(&self, page: &PageBytes) -> Fingerprint {
        let hash = xxhash3_128::Hasher::oneshot_with_secret(&self.secret, page);
        Fingerprint(hash.expect("the secret is long enough"))
    }
}

fn is_zero(page: &PageBytes) -> bool {
    let zero = |part: &[u8]| part.iter().fold(0, |all, &byte| all | byte) == 0;
    page.chunks(64).take(1).all(zero) && page.chunks(512).all(zero)
}

/// Room for a batch, each page on its own cache lines.
#[derive(Clone)]
#[repr(align(4096))]
struct Room(PageBytes);

/// A batch of pages that were read.
pub(crate) struct Batch {
    room: Box<[Room]>,
    ranges: Vec<Remote>,
}

impl Batch {
    pub(crate) fn new() -> Self {
        Self {
            room: vec![Room([0; wire::PAGE_BYTES]); BATCH].into_boxed_slice(),
            ranges: Vec::with_capacity(BATCH),
        }
    }

    /// Reads `pages`, in ascending order and at most [`BATCH`], of the chunk at `address`. Returns
    /// how many could be read: the next one could not.
    ///
    /// # Errors
    /// When the guest is gone or its memory may not be read.
    pub(crate) fn fill(
        &mut self,
        memory: &dyn Memory,
        address: u64,
        pages: &[usize],
    ) -> std::io::Result<usize> {
        assert!(pages.len() <= BATCH, "{} pages for a batch", pages.len());
        self.ranges.clear();
        for &page in pages {
            let start = address + page as u64 * PAGE;
            match self.ranges.last_mut() {
                Some(last) if last.start + last.len as u64 == start => last.len += wire::PAGE_BYTES,
                _ => self.ranges.push(Remote {
                    start,
                    len: wire::PAGE_BYTES,
                }),
            }
        }
        let mut room: Vec<_> = self
            .room
            .iter_mut()
            .take(pages.len())
            .map(|room| &mut room.0)
            .collect();
        let read = memory.read(&self.ranges, &mut room)?;
        assert!(
            read <= pages.len(),
            "{read} pages of {} were read",
            pages.len()
        );
        Ok(read)
    }

    /// The `at`th page of the batch.
    pub(crate) fn page(&self, at: usize) -> &PageBytes {
        &self.room[at].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_zeros_have_no_fingerprint() {
        let hasher = Hasher::new().unwrap();
        let mut page = [0; wire::PAGE_BYTES];
        assert_eq!(hasher.fingerprint(&page), None);
        let mut seen = std::collections::HashSet::new();
        for at in [0, 63, 64, 511, 512, 4095] {
            page[at] = 1;
            assert!(seen.insert(hasher.fingerprint(&page).unwrap()), "byte {at}");
            page[at] = 0;
        }
    }

    /// Nanoseconds a page that `act` takes of a processor, at best.
    fn best(pages: usize, mut act: impl FnMut()) -> u128 {
        let once = |_| {
            let begin = sys::process::thread_time();
            act();
            (sys::process::thread_time() - begin).as_nanos() / pages as u128
        };
        (0..9).map(once).min().unwrap()
    }

    /// `cargo test --release -p engine --lib zeros_are_recognised -- --nocapture` prints the figures. In a long run it is
    /// less than 100 ns a page on a processor that is not shared; three times that is left for neighbours in its caches.
    #[test]
    fn what_it_takes_until_zeros_are_recognised() {
        const PAGES: usize = 16_384;
        const MOST_NS: u128 = 300;
        let hasher = Hasher::new().unwrap();
        let guest = vec![Room([1; wire::PAGE_BYTES]); PAGES];
        let mut guest = guest.into_boxed_slice();
        guest.iter_mut().for_each(|room| room.0.fill(0));
        let mut room = vec![Room([0; wire::PAGE_BYTES]); BATCH];
        // Pages that lie so far apart, with one call.
        let mut read = |at: usize, step: usize, count: usize| {
            let pages = (at..PAGES).step_by(step).take(count);
            let remote: Vec<_> = pages
                .map(|page| Remote {
                    start: std::ptr::from_ref(&guest[page]).expose_provenance() as u64,
                    len: wire::PAGE_BYTES,
                })
                .collect();
            let mut local: Vec<_> = room
                .iter_mut()
                .map(|room| std::io::IoSliceMut::new(&mut room.0))
                .collect();
            let read = sys::process::read_memory(std::process::id(), &remote, &mut local);
            assert_eq!(read.unwrap(), remote.len() * wire::PAGE_BYTES);
            assert!(room.iter().take(count).all(|room| is_zero(&room.0)));
        };
        let mut batches = |step: usize, count: usize| {
            let firsts = (0..PAGES).step_by(step * count);
            best(PAGES, || {
                firsts.clone().for_each(|at| read(at, step, count))
            })
        };
        // In a run that is predicted one page of a group of 16 is read. A lone page is the only one of its chunk that is.
        let (all, run, lone) = (batches(1, BATCH), batches(16, BATCH), batches(1, 1));
        let alone = best(PAGES, || {
            let zeros = guest
                .iter()
                .filter(|room| hasher.fingerprint(&room.0).is_none());
            assert_eq!(zeros.count(), PAGES);
        });
        println!(
            "read and recognised {all} ns a page, a lone page {lone} ns, recognised alone {alone} ns, in a long run {run} ns"
        );
        assert!(run < MOST_NS, "{run} ns a page of a long run");
    }

    #[test]
    fn two_hashers_do_not_agree() {
        let (a, b) = (Hasher::new().unwrap(), Hasher::new().unwrap());
        let page = [3; wire::PAGE_BYTES];
        assert_eq!(a.fingerprint(&page), a.fingerprint(&page));
        assert_ne!(a.fingerprint(&page), b.fingerprint(&page));
    }
}
