//! Pages are read, and each gets a fingerprint.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::IoSliceMut;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use sys::pagemap::{Categories, PageRun, Pagemap};
use sys::process::Remote;
use twox_hash::xxhash3_64;

use super::nodes::{NOWHERE, Nodes};
use super::parts::Part;
use super::print::{PAGE, Print, ZEROS};
use super::targets::Source;

/// Pages read at once, a megabyte: they stay in the caches between the copy and the hash, and a call costs little beside them.
const BATCH: usize = 256;
/// Bytes of a page, as a length.
const LEN: usize = 4096;

/// What became of the pages of a part.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) changed: u64,
    pub(crate) unread: u64,
    /// Pages that were read, by node.
    pub(crate) nodes: BTreeMap<u32, u64>,
}

/// Calls that may last for as long as another program likes.
pub(crate) trait Call {
    /// Does a call that takes locks of the process, at ordinary priority: a thread that held them and got no CPU would make the
    /// process wait.
    fn make<T>(&self, call: impl FnOnce() -> T) -> T;
}

/// Reads pages and fingerprints them.
pub(crate) struct Reader {
    seed: u64,
    one_of: NonZero<u64>,
    cpu_limit: Option<NonZero<u32>>,
    nodes: Nodes,
    begin: Instant,
    used: Duration,
}

impl Reader {
    pub(crate) fn new(seed: u64, one_of: NonZero<u64>, cpu_limit: Option<NonZero<u32>>) -> Self {
        Self {
            seed,
            one_of,
            cpu_limit,
            nodes: Nodes::here(),
            begin: Instant::now(),
            used: sys::process::cpu_time(),
        }
    }

    /// The fingerprint of a page. By content alone, so that all copies of a content are kept, or none.
    fn print(&self, page: &[u8]) -> u64 {
        if is_zero(page) {
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
        calls: &impl Call,
        room: &mut Room,
        (source, part): (&Source, &Part),
        places: &[u32],
        mut each: impl FnMut(u32, Option<u64>),
    ) {
        let present = calls.make(|| present(source, part));
        let places = there(places, &present, |place| each(place, None));
        let room = room.bytes();
        for places in places.chunks(BATCH) {
            let mut rest = places;
            while !rest.is_empty() {
                let neighbours = rest.chunk_by(|a, b| a + 1 == *b);
                let remote = neighbours.map(|places| Remote {
                    start: part.start + u64::from(places[0]) * PAGE,
                    len: places.len() * LEN,
                });
                let remote: Vec<_> = remote.collect();
                let read = calls.make(|| copy(source, part.shared, &remote, room));
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

/// The places at which a page is; the others are given to `gone`. Both lists are in order.
fn there(places: &[u32], present: &[Range<u32>], mut gone: impl FnMut(u32)) -> Vec<u32> {
    let mut ranges = present.iter().peekable();
    let mut there = Vec::with_capacity(places.len());
    for &place in places {
        while ranges.next_if(|range| range.end <= place).is_some() {}
        match ranges.peek() {
            Some(range) if range.contains(&place) => there.push(place),
            _ => gone(place),
        }
    }
    there
}

fn is_zero(page: &[u8]) -> bool {
    let zero = |part: &[u8]| part.iter().fold(0, |all, &byte| all | byte) == 0;
    page.chunks(64).take(1).all(zero) && page.chunks(512).all(zero)
}

/// Room for a batch, from a page's boundary on: to copy a page to another place takes a sixth longer.
pub(crate) struct Room(Vec<u8>);

impl Room {
    pub(crate) fn new() -> Self {
        Self(vec![0; (BATCH + 1) * LEN])
    }

    fn bytes(&mut self) -> &mut [u8] {
        let head = self.0.as_ptr().align_offset(LEN);
        &mut self.0[head..head + BATCH * LEN]
    }
}

/// Copies ranges one after another, and gives how many bytes: up to the first that cannot be read.
///
/// process_vm_readv(2) pins what it reads, and before that the kernel gives the process a copy of a frame that others have too:
/// what fork or KSM shares would be shared no more. /proc/PID/mem pins nothing, and copies each page once more.
fn copy(source: &Source, shared: bool, ranges: &[Remote], room: &mut [u8]) -> usize {
    match source {
        Source::Process(pid) if shared => sys::text::open(format!("/proc/{pid}/mem"))
            .map_or(0, |file| copy_file(&file, ranges, room)),
        Source::Process(pid) => {
            let mut local = [IoSliceMut::new(room)];
            sys::process::read_memory(*pid, ranges, &mut local).unwrap_or(0)
        }
        Source::Dump(_, file) => copy_file(file, ranges, room),
    }
}

/// The same, of a file.
fn copy_file(file: &File, ranges: &[Remote], room: &mut [u8]) -> usize {
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
pub(crate) fn read_all(
    reader: &Reader,
    calls: &impl Call,
    room: &mut Room,
    source: &Source,
    part: &mut Part,
) -> Counts {
    let mut counts = Counts::default();
    let mut prints = Vec::with_capacity(part.pages as usize);
    let places: Vec<_> = (0..part.pages).collect();
    let each = |place, print| match print {
        Some(print) => prints.push(Print {
            place,
            node: NOWHERE,
            print,
        }),
        None => counts.unread += 1,
    };
    reader.read(calls, room, (source, part), &places, each);
    if let &Source::Process(pid) = source {
        calls.make(|| reader.nodes.find(pid, part.start, &mut prints));
    }
    for print in &prints {
        *counts.nodes.entry(print.node).or_default() += 1;
    }
    prints.retain(|print| reader.keeps(print.print));
    prints.shrink_to_fit();
    part.prints = prints;
    counts
}

/// The second look: of what the first one kept, that stays which is the same.
pub(crate) fn read_again(
    reader: &Reader,
    calls: &impl Call,
    room: &mut Room,
    source: &Source,
    part: &mut Part,
) -> Counts {
    let mut counts = Counts::default();
    let before = std::mem::take(&mut part.prints);
    let places: Vec<_> = before.iter().map(|print| print.place).collect();
    let mut first = vec![None; part.pages as usize];
    for print in before {
        first[print.place as usize] = Some(print);
    }
    let mut same = Vec::with_capacity(places.len());
    let each = |place: u32, print| match (first[place as usize], print) {
        (Some(first), Some(print)) if first.print == print => same.push(first),
        // Each stands for those that were not kept.
        (Some(first), _) if first.print == ZEROS => counts.changed += 1,
        _ => counts.changed += reader.one_of.get(),
    };
    reader.read(calls, room, (source, part), &places, each);
    part.prints = same;
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_told_apart() {
        let mut gone = vec![];
        let present = [1..3, 3..4, 6..9];
        let found = there(&[0, 1, 3, 4, 5, 6, 8, 9], &present, |place| {
            gone.push(place)
        });
        assert_eq!((found, gone), (vec![1, 3, 6, 8], vec![0, 4, 5, 9]));
    }

    #[test]
    fn a_page_of_zeros_has_no_other_byte() {
        let mut page = vec![0; LEN];
        assert!(is_zero(&page));
        for at in [0, 63, 64, 511, 512, LEN - 1] {
            page[at] = 1;
            assert!(!is_zero(&page), "{at}");
            page[at] = 0;
        }
    }

    #[test]
    fn room_begins_at_a_page() {
        let mut room = Room::new();
        let bytes = room.bytes();
        assert_eq!(
            (bytes.as_ptr().align_offset(LEN), bytes.len()),
            (0, BATCH * LEN)
        );
    }
}
