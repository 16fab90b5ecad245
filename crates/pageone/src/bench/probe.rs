//! What the time of an access tells a guest about its page: the side channel of all deduplication.
//!
//! A guest has pages of four kinds, and times its first accesses to each:
//!
//! ```text
//!  private   never offered                          nothing happens
//!  armed     offered, in no other guest             the first write tells the tracker: a fault
//!  merged    offered, another guest has the same    not in the page table: a fault to read;
//!                                                   copy-on-write: a fault and a copy to write
//!  zero      offered, all zeros                     maps the kernel's zero page: a fault to write
//! ```
//!
//! Pages are taken in blocks of 16, because the kernel maps up to 16 neighbours with a page that is
//! read (fault-around): in every other block only the first page is read, and written afterwards. In
//! the others all are written. The kinds alternate, so that the machine's other work hits all.

use std::fmt;
use std::hint::black_box;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sys::memory::Anonymous;

use super::content::Content;
use super::error::BenchError;
use super::guests::{Answer, Guest};

const PAGE_BYTES: usize = 4096;
/// The pages of `fault_around_bytes`, 64 KiB.
const BLOCK: usize = 16;
/// Buckets of a histogram: bucket `k` holds times from 2^k to 2^(k+1) - 1 nanoseconds.
const BUCKETS: usize = 32;

/// What a page is to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Never offered.
    Private,
    /// Offered, settled, and the only one of its content.
    Armed,
    /// Merged with another guest's page.
    Merged,
    /// Merged with the kernel's zero page.
    Zero,
}

impl Kind {
    /// All kinds, in the order of a report.
    pub(crate) const ALL: [Self; 4] = [Self::Private, Self::Armed, Self::Merged, Self::Zero];

    fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Armed => "armed",
            Self::Merged => "merged",
            Self::Zero => "zero",
        }
    }
}

/// What the guest does to a page that it has left alone until the engine was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Access {
    /// Its first access writes.
    Write,
    /// Its first access reads.
    Read,
    /// It has read the page just before.
    WriteAfterRead,
}

impl Access {
    const ALL: [Self; 3] = [Self::Write, Self::Read, Self::WriteAfterRead];

    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::WriteAfterRead => "write after read",
        }
    }
}

/// The times of one kind of access to one kind of page.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// What was accessed.
    pub kind: Kind,
    /// How.
    pub access: Access,
    /// How many pages.
    pub pages: u64,
    /// Half of the accesses took at most this long, in nanoseconds.
    pub p50_ns: u64,
    /// 99 of 100 took at most this long, in nanoseconds.
    pub p99_ns: u64,
    /// How many took from 2^k to 2^(k+1) - 1 nanoseconds, by k; ends with the last that is not 0.
    pub log2_ns: Vec<u64>,
}

impl Latency {
    fn new(kind: Kind, access: Access, mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        let rank = |percent: usize| (times.len() * percent).div_ceil(100).saturating_sub(1);
        let at = |percent| times.get(rank(percent)).copied().unwrap_or(0);
        let mut log2_ns = vec![0; BUCKETS];
        for time in &times {
            let bucket = time.checked_ilog2().unwrap_or(0) as usize;
            log2_ns[bucket.min(BUCKETS - 1)] += 1;
        }
        let used = log2_ns.iter().rposition(|&n| n > 0).map_or(0, |k| k + 1);
        log2_ns.truncate(used);
        Self {
            kind,
            access,
            pages: times.len() as u64,
            p50_ns: at(50),
            p99_ns: at(99),
            log2_ns,
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timing {
    /// The median time between two looks at the clock with nothing in between, in nanoseconds: it is
    /// in all times.
    pub clock_ns: u64,
    /// A row for each kind and access.
    pub rows: Vec<Latency>,
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<9}{:<18}{:>8}{:>10}{:>10}",
            "page", "access", "pages", "p50 ns", "p99 ns"
        )?;
        for row in &self.rows {
            let (kind, access) = (row.kind.name(), row.access.name());
            let Latency {
                pages,
                p50_ns,
                p99_ns,
                ..
            } = row;
            writeln!(f, "{kind:<9}{access:<18}{pages:>8}{p50_ns:>10}{p99_ns:>10}")?;
        }
        writeln!(
            f,
            "the clock alone: {} ns\n\nfirst writes of at least … ns",
            self.clock_ns
        )?;
        let writes = || self.rows.iter().filter(|row| row.access == Access::Write);
        let width = writes().map(|row| row.log2_ns.len()).max().unwrap_or(0);
        let first = writes().filter_map(|row| row.log2_ns.iter().position(|&n| n > 0));
        write!(f, "{:>9}", "")?;
        writes().try_for_each(|row| write!(f, "{:>9}", row.kind.name()))?;
        for bucket in first.min().unwrap_or(0)..width {
            write!(f, "\n{:>9}", 1_u64 << bucket)?;
            let count = |row: &Latency| row.log2_ns.get(bucket).copied().unwrap_or(0);
            writes().try_for_each(|row| write!(f, "{:>9}", count(row)))?;
        }
        writeln!(f)
    }
}

/// How the guests of the measurement are filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    /// Pages of each kind.
    pub pages: usize,
    /// All content follows from it.
    pub seed: u64,
}

impl Probe {
    fn fill(self, dup: f64, number: u64, memory: &mut [u8]) {
        let content = Content {
            seed: self.seed,
            dup,
            run_pages: 1,
            zero_prefix: 0.0,
            pages: self.pages as u64,
            shuffle: false,
        };
        for (index, page) in (0..).zip(memory.chunks_exact_mut(PAGE_BYTES)) {
            content.fill(number, index, page);
        }
    }

    fn memory(self) -> io::Result<Anonymous> {
        Anonymous::new(self.pages * PAGE_BYTES)
    }

    /// The life of the guest whose pages are looked for: fills and offers them when it is told to.
    ///
    /// # Errors
    /// No memory, or the parent's pipes fail.
    pub(super) fn serve_owner(self) -> io::Result<()> {
        let mut memory = self.memory()?;
        self.fill(1.0, 0, &mut memory);
        writeln!(io::stdout(), "{}", Answer::default())?;
        for order in io::stdin().lines() {
            match order?.as_str() {
                "offer" => memory.offer()?,
                other => return Err(io::Error::other(format!("unknown order {other:?}"))),
            }
            writeln!(io::stdout(), "{}", Answer::default())?;
        }
        Ok(())
    }

    /// The life of the guest that times its accesses: offers when it is told to, and measures once.
    ///
    /// # Errors
    /// No memory, or the parent's pipes fail.
    pub(super) fn serve_prober(self) -> io::Result<()> {
        let mut regions = [
            self.memory()?,
            self.memory()?,
            self.memory()?,
            self.memory()?,
        ];
        let [private, armed, merged, zero] = &mut regions;
        self.fill(0.0, 1, private);
        self.fill(0.0, 2, armed);
        self.fill(1.0, 1, merged);
        // Written, so that it is there; the engine has to find the zeros.
        black_box(&mut **zero).fill(0);
        writeln!(io::stdout(), "{}", Answer::default())?;
        for order in io::stdin().lines() {
            match order?.as_str() {
                "offer" => regions[1..].iter().try_for_each(Anonymous::offer)?,
                "probe" => {
                    let timing = serde_json::to_string(&self.measure(&mut regions))?;
                    writeln!(io::stdout(), "{timing}")?;
                    continue;
                }
                other => return Err(io::Error::other(format!("unknown order {other:?}"))),
            }
            writeln!(io::stdout(), "{}", Answer::default())?;
        }
        Ok(())
    }

    fn measure(self, regions: &mut [Anonymous; 4]) -> Timing {
        let mut times: [[Vec<u64>; 3]; 4] = Default::default();
        for block in scattered(self.pages / BLOCK) {
            for (region, times) in regions.iter_mut().zip(&mut times) {
                let start = block * BLOCK * PAGE_BYTES;
                let memory = &mut region[start..start + BLOCK * PAGE_BYTES];
                let [write, read, write_after_read] = times;
                if block % 2 == 0 {
                    read.push(timed(|| {
                        black_box(black_box(&*memory)[0]);
                    }));
                    write_after_read.push(timed(|| black_box(&mut *memory)[0] = black_box(7)));
                    continue;
                }
                for page in 0..BLOCK {
                    let at = page * PAGE_BYTES;
                    write.push(timed(|| black_box(&mut *memory)[at] = black_box(7)));
                }
            }
        }
        let clock = (0..1000).map(|_| timed(|| ())).collect();
        let rows = Kind::ALL.into_iter().zip(times).flat_map(|(kind, times)| {
            let each = Access::ALL.into_iter().zip(times);
            each.map(move |(access, times)| Latency::new(kind, access, times))
        });
        Timing {
            clock_ns: Latency::new(Kind::Private, Access::Read, clock).p50_ns,
            rows: rows.collect(),
        }
    }
}

/// The numbers below `count`, none next to its neighbours.
fn scattered(count: usize) -> impl Iterator<Item = usize> {
    // An odd step visits all numbers of a power of two once.
    let round = count.next_power_of_two();
    let step = (round / 2 + round / 8) | 1;
    (0..round)
        .map(move |n| n.wrapping_mul(step) % round)
        .filter(move |&n| n < count)
}

fn timed(what: impl FnOnce()) -> u64 {
    let start = Instant::now();
    what();
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Guest {
    /// Lets a guest of [`Probe::serve_prober`] measure.
    ///
    /// # Errors
    /// The guest has gone, does not answer within `patience`, or says something else.
    pub(crate) fn probe(&mut self, patience: Duration) -> Result<Timing, BenchError> {
        self.tell("probe")?;
        let line = self.line(patience)?;
        serde_json::from_str(&line).map_err(|_| self.failed(format!("answered {line:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_buckets_are_those_of_the_times() {
        let times = (1..=200).rev().collect();
        let row = Latency::new(Kind::Merged, Access::Write, times);
        assert_eq!((row.pages, row.p50_ns, row.p99_ns), (200, 100, 198));
        assert_eq!(row.log2_ns, [1, 2, 4, 8, 16, 32, 64, 73]);
        let none = Latency::new(Kind::Zero, Access::Read, vec![]);
        assert_eq!((none.p50_ns, none.log2_ns.len()), (0, 0));
        let odd = Latency::new(Kind::Zero, Access::Read, vec![0, u64::MAX]);
        assert_eq!((odd.log2_ns[0], odd.log2_ns[BUCKETS - 1]), (1, 1));
    }

    #[test]
    fn every_block_is_visited_once_and_neighbours_are_not_neighbours() {
        for count in [2, 7, 64, 100, 1024] {
            let order: Vec<usize> = scattered(count).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count));
            let far = order
                .windows(2)
                .filter(|pair| pair[0].abs_diff(pair[1]) > 1);
            assert!(count < 64 || far.count() == count - 1);
        }
    }

    #[test]
    fn a_measurement_has_every_row_and_prints_all_kinds() {
        let probe = Probe { pages: 64, seed: 1 };
        let mut regions = [(); 4].map(|()| probe.memory().unwrap());
        let timing = probe.measure(&mut regions);
        assert_eq!(timing.rows.len(), 12);
        for row in &timing.rows {
            let pages = match row.access {
                Access::Write => 32,
                _ => 2,
            };
            assert_eq!(
                (row.pages, row.log2_ns.iter().sum()),
                (pages, pages),
                "{row:?}"
            );
        }
        let said = timing.to_string();
        for word in [
            "private",
            "armed",
            "merged",
            "zero",
            "write after read",
            "p99",
        ] {
            assert!(said.contains(word), "{said}");
        }
    }
}
