//! The memory of a guest of the family, and the operations on it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sys::memory::Anonymous;
use wire::PAGE_BYTES;

use super::fake::Ballast;
use super::fill::Fill;
use super::histogram::Histogram;

const CACHE_LINE: usize = 64;

/// The reply to an order: what was done since the lap before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Lap {
    /// Bytes compared with what they should be.
    pub(super) verified_bytes: u64,
    /// Pages that were not.
    pub(super) errors: u64,
    /// Accesses or pages of the job.
    pub(super) steps: u64,
    /// CPU time that they took, in nanoseconds.
    pub(super) cpu_ns: u64,
    /// The time of each read.
    pub(super) reads: Histogram,
    /// The time of each write.
    pub(super) writes: Histogram,
}

impl Lap {
    /// Adds the lap of another guest.
    pub(super) fn add(&mut self, other: &Self) {
        self.verified_bytes += other.verified_bytes;
        self.errors += other.errors;
        self.steps += other.steps;
        self.cpu_ns += other.cpu_ns;
        self.reads.add(&other.reads);
        self.writes.add(&other.writes);
    }
}

/// The memory of a guest, and what has been done to it.
pub(super) struct Memory {
    fill: Fill,
    number: u64,
    pub(super) bytes: Anonymous,
    pub(super) ballast: Ballast,
    pub(super) lap: Lap,
}

impl Memory {
    pub(super) fn new(fill: Fill, number: u64) -> Result<Self> {
        let pages = usize::try_from(fill.pages()).context("too many pages")?;
        let mut bytes = Anonymous::new(pages * PAGE_BYTES).context("no memory")?;
        for (index, page) in (0..).zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
            fill.page(number, index, page);
        }
        let ballast = Ballast::here()?;
        Ok(Self {
            fill,
            number,
            bytes,
            ballast,
            lap: Lap::default(),
        })
    }

    pub(super) fn pages(&self) -> usize {
        self.bytes.len() / PAGE_BYTES
    }

    /// Reads a word of page `index`, and takes the time.
    pub(super) fn read(&mut self, index: usize) {
        let begin = Instant::now();
        black_box(self.bytes[index * PAGE_BYTES + 64]);
        self.lap.reads.count(nanoseconds(begin.elapsed()));
        self.lap.steps += 1;
    }

    /// Writes the first bytes of page `index` as they were, without a look at them, and takes the time.
    pub(super) fn write(&mut self, index: usize) {
        let page = self.should_be(index);
        let begin = Instant::now();
        self.bytes[index * PAGE_BYTES..][..8].copy_from_slice(black_box(&page[..8]));
        self.lap.writes.count(nanoseconds(begin.elapsed()));
        self.lap.steps += 1;
    }

    /// Writes the whole page `index` as it was.
    pub(super) fn rewrite(&mut self, index: usize) {
        let page = self.should_be(index);
        self.bytes[index * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(black_box(&page));
        self.lap.steps += 1;
    }

    /// Reads a byte of page `index`, of another line of the cache than in the pages beside it.
    pub(super) fn step(&mut self, index: usize) -> u8 {
        self.lap.steps += 1;
        black_box(self.bytes[index * PAGE_BYTES + index * CACHE_LINE % PAGE_BYTES])
    }

    /// Adds up page `index`, and where `write` is set writes its first bytes as they were.
    pub(super) fn pass(&mut self, index: usize, write: bool) {
        let page = &mut self.bytes[index * PAGE_BYTES..][..PAGE_BYTES];
        let sum: u64 = page.iter().map(|&byte| u64::from(byte)).sum();
        black_box(sum);
        if write {
            page[0] = black_box(page[0]);
        }
        self.lap.steps += 1;
    }

    fn should_be(&self, index: usize) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        self.fill.page(self.number, index as u64, &mut page);
        page
    }

    pub(super) fn verify(&mut self) {
        for index in 0..self.pages() {
            let right = self.bytes[index * PAGE_BYTES..][..PAGE_BYTES] == self.should_be(index);
            self.lap.errors += u64::from(!right);
            self.lap.verified_bytes += PAGE_BYTES as u64;
        }
    }
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
