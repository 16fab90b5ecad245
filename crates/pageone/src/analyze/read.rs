//! Pages are read, and each gets a fingerprint.

use std::io::IoSliceMut;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use sys::pagemap::{Categories, PageRun, Pagemap};
use sys::process::Remote;
use twox_hash::xxhash3_64;

use super::look::{Calls, Looker};
use super::parts::{PAGE, Part};
use super::targets::Source;

/// Pages read at once: they stay in the second-level cache between the copy and the hash.
const BATCH: usize = 64;
/// Bytes of a page, as a length.
const LEN: usize = 4096;
/// The fingerprint of a page of zeros; no other page has it.
pub(crate) const ZEROS: u64 = 0;

/// What became of the pages of a part.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) changed: u64,
    pub(crate) unread: u64,
}

/// Reads pages and fingerprints them.
pub(crate) struct Reader {
    seed: u64,
    one_of: NonZero<u64>,
    cpu_limit: Option<NonZero<u32>>,
    begin: Instant,
    used: Duration,
}

impl Reader {
    pub(crate) fn new(looker: &Looker) -> Self {
        Self {
            seed: looker.seed,
            one_of: looker.one_of,
            cpu_limit: looker.cpu_limit,
            begin: Instant::now(),
            used: sys::process::cpu_time(),
        }
    }

    /// The fingerprint of a page. By content alone, so that all copies of a content are kept, or none.
    fn print(&self, page: &[u8]) -> u64 {
        if page.iter().all(|&byte| byte == 0) {
            return ZEROS;
        }
        xxhash3_64::Hasher::oneshot_with_seed(self.seed, page).max(ZEROS + 1)
    }

    fn keeps(&self, print: u64) -> bool {
        print == ZEROS || print % self.one_of == 0
    }

    /// Sleeps for as long as the limit wants.
    pub(crate) fn pause(&self) {
        let Some(percent) = self.cpu_limit else {
            return;
        };
        let used = sys::process::cpu_time().saturating_sub(self.used);
        let wanted = used * 100 / percent.get();
        std::thread::sleep(wanted.saturating_sub(self.begin.elapsed()));
    }

    /// Reads pages by their places in a part and gives each to `each`: `None` for one that cannot be read. A page
    /// that went to swap since the part was listed is not read: that would bring it back.
    fn read(
        &self,
        calls: &Calls,
        source: &Source,
        part: &Part,
        places: &[u32],
        mut each: impl FnMut(u32, Option<u64>),
    ) {
        let present = calls.make(|| present(source, part));
        let is_there = |place: u32| present.iter().any(|range| range.contains(&place));
        let (places, gone): (Vec<_>, Vec<_>) = places.iter().partition(|&&place| is_there(place));
        gone.into_iter().for_each(|place| each(place, None));
        let mut room = vec![0; BATCH * LEN];
        for places in places.chunks(BATCH) {
            let mut rest = places;
            while !rest.is_empty() {
                let neighbours = rest.chunk_by(|a, b| a + 1 == *b);
                let remote = neighbours.map(|places| Remote {
                    start: part.start + u64::from(places[0]) * PAGE,
                    len: places.len() * LEN,
                });
                let remote: Vec<_> = remote.collect();
                let read = calls.make(|| copy(source, &remote, &mut room));
                let (seen, left) = rest.split_at(read / LEN);
                let pages = room.chunks_exact(LEN);
                for (&place, page) in seen.iter().zip(pages) {
                    each(place, Some(self.print(page)));
                }
                // The first of the others is in the way.
                rest = match left {
                    [first, others @ ..] => {
                        each(*first, None);
                        others
                    }
                    [] => &[],
                };
            }
        }
    }
}

/// Copies ranges one after another, and gives how many bytes: up to the first that cannot be read.
fn copy(source: &Source, ranges: &[Remote], room: &mut [u8]) -> usize {
    match source {
        Source::Process(pid) => {
            let mut local = [IoSliceMut::new(room)];
            sys::process::read_memory(*pid, ranges, &mut local).unwrap_or(0)
        }
        Source::Dump(_, file) => {
            let mut at = 0;
            for range in ranges {
                let room = &mut room[at..at + range.len];
                if file.read_exact_at(room, range.start).is_err() {
                    break;
                }
                at += range.len;
            }
            at
        }
    }
}

/// The places of a part that have a page now, in order.
fn present(source: &Source, part: &Part) -> Vec<Range<u32>> {
    let mut present = Vec::new();
    let &Source::Process(pid) = source else {
        return std::iter::once(0..part.pages).collect();
    };
    let Ok(pagemap) = Pagemap::open(pid) else {
        return present;
    };
    let end = part.start + u64::from(part.pages) * PAGE;
    let mut runs = [PageRun::default(); 512];
    let mut at = part.start;
    let place = |address: u64| u32::try_from((address - part.start) / PAGE).unwrap_or(u32::MAX);
    while at < end {
        let Ok((filled, stopped)) = pagemap.glance(at..end, &mut runs) else {
            break;
        };
        let here = |run: &&PageRun| run.categories.has(Categories::PRESENT);
        let runs = runs.iter().take(filled).filter(here);
        present.extend(runs.map(|run| place(run.start)..place(run.end)));
        at = stopped;
    }
    present
}

/// The first look at a part: fingerprints of all its pages.
pub(crate) fn read_all(reader: &Reader, calls: &Calls, source: &Source, part: &mut Part) -> Counts {
    let mut counts = Counts::default();
    let mut prints = Vec::new();
    let places: Vec<_> = (0..part.pages).collect();
    reader.read(calls, source, part, &places, |place, print| match print {
        Some(print) if reader.keeps(print) => prints.push((place, print)),
        Some(_) => {}
        None => counts.unread += 1,
    });
    prints.shrink_to_fit();
    part.prints = prints;
    counts
}

/// The second look: of what the first one kept, that stays which is the same.
pub(crate) fn read_again(
    reader: &Reader,
    calls: &Calls,
    source: &Source,
    part: &mut Part,
) -> Counts {
    let mut counts = Counts::default();
    let before = std::mem::take(&mut part.prints);
    let first = |place| {
        let at = before.binary_search_by_key(&place, |&(place, _)| place);
        at.ok().map(|at| before[at].1)
    };
    let places: Vec<_> = before.iter().map(|&(place, _)| place).collect();
    let mut same = Vec::with_capacity(before.len());
    reader.read(calls, source, part, &places, |place, print| {
        let first = first(place);
        match print {
            Some(print) if Some(print) == first => same.push((place, print)),
            // Each stands for those that were not kept.
            _ if first == Some(ZEROS) => counts.changed += 1,
            _ => counts.changed += reader.one_of.get(),
        }
    });
    part.prints = same;
    counts
}
