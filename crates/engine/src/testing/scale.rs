//! How cost grows: an engine with up to 10 000 guests and 100 million pages on 16 nodes, states only.
//!
//! Guests, agents, page maps and stores are simulated and hold nothing, so that what is measured is the
//! engine: its tables, its index, its rounds. The time of the kernel and of the agents is not in it. A
//! scan is answered at once, a page that is read has its number in it, and an agent merges all that it
//! is asked for. Fingerprints are real. Each round stands for a period; no clock is asked by the
//! engine.
//!
//! Seven of ten runs of 16 pages are the same in all guests of a node. Run it by `make scale`.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sdtree::SdTree;
use sys::pagemap::{Categories, PageRun};
use sys::process::Remote;
use wire::{
    Answer, CHUNK_BYTES, CHUNK_PAGES, Change, Changes, Merged, PAGE_BYTES, PageOutcome, Question,
    Ready, Target,
};

use crate::domain::lifelines::Lifeline;
use crate::domain::placement::Placement;
use crate::domain::store::{PageBytes, Store};
use crate::domain::{Domain, PerNode};
use crate::error::Refusal;
use crate::guest::Newcomer;
use crate::guest::agent::{Fault, Link};
use crate::guest::memory::Mapped;
use crate::guest::memory::Memory;
use crate::merge::read::Hasher;
use crate::page::{Slot, StoreId};
use crate::run::core::{Core, Scratch};
use crate::run::knobs::Knobs;
use crate::run::workers::Alone;

const BASE: u64 = 64 * CHUNK_BYTES as u64;
const NODES: u64 = 16;

/// A guest whose pages follow from its number.
struct Simulated {
    number: u64,
    looks: AtomicU64,
}

impl Simulated {
    /// The content of the page at `address`: never zeros.
    fn content(&self, address: u64) -> u64 {
        let page = (address - BASE) / PAGE_BYTES as u64;
        let mix = |x: u64| {
            (x ^ 0x5bd1_e995)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(29)
        };
        match mix(page / 16) % 10 < 7 {
            true => mix(page) | 1 << 63,
            false => (self.number << 32 | page) + 1,
        }
    }
}

impl Memory for Simulated {
    fn admit(&self, _ready: Ready) -> Result<(), Refusal> {
        Ok(())
    }

    fn compare(&self) -> Result<(), Refusal> {
        Ok(())
    }

    fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        let first = self.looks.fetch_add(1, Relaxed) == 0;
        let present = Categories::PRESENT;
        let categories = if first {
            present.and(Categories::WRITTEN)
        } else {
            present
        };
        let (start, end) = (range.start, range.end);
        runs[0] = PageRun {
            start,
            end,
            categories,
        };
        Ok((1, end))
    }

    fn peek(&self, range: Range<u64>, _runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        Ok((0, range.end))
    }

    fn read(&self, ranges: &[Remote], pages: &mut [&mut PageBytes]) -> std::io::Result<usize> {
        let starts = ranges
            .iter()
            .flat_map(|r| (r.start..r.start + r.len as u64).step_by(PAGE_BYTES));
        let mut read = 0;
        for (start, page) in starts.zip(pages) {
            page[..8].copy_from_slice(&self.content(start).to_le_bytes());
            read += 1;
        }
        Ok(read)
    }

    fn shared(&self, _range: Range<u64>) -> std::io::Result<wire::PageBits> {
        Ok(wire::PageBits::EMPTY)
    }

    fn stores(&self, pages: &[usize]) -> Vec<Option<StoreId>> {
        let node = u8::try_from(self.number % NODES).unwrap();
        vec![Some(StoreId(node)); pages.len()]
    }

    fn pins(&self, _most: u32) -> Option<String> {
        None
    }

    fn borrows(&self, _most: u32) -> Option<String> {
        None
    }

    fn mapped(&self, _stores: &[u64], _each: &mut dyn FnMut(Mapped)) -> std::io::Result<bool> {
        Ok(true)
    }

    fn mappings(&self) -> Option<u64> {
        Some(50)
    }

    fn rescue(&self, _last: bool) -> usize {
        0
    }

    fn is_guarded(&self) -> bool {
        false
    }

    fn has_exited(&self) -> bool {
        false
    }

    fn has_left(&self) -> bool {
        self.has_exited()
    }

    fn name(&self) -> sys::foreign::ForeignName {
        "simulated".into()
    }
}

/// An agent that does whatever it is asked.
struct Agent {
    chunks: u32,
    answers: VecDeque<Answer>,
    told: bool,
    questions: Arc<AtomicU64>,
}

impl Agent {
    fn changes(&mut self) -> Changes {
        let mut changes = Changes::new();
        if !std::mem::replace(&mut self.told, true) {
            let (chunk, chunks) = (BASE, self.chunks);
            assert!(changes.push(Change::Whole { chunk, chunks }));
        }
        changes
    }
}

impl Link for Agent {
    fn lifeline(&mut self) -> std::io::Result<Box<dyn Lifeline>> {
        Ok(Box::new(Held))
    }

    fn send(&mut self, question: &Question) -> Result<(), Fault> {
        self.questions.fetch_add(1, Relaxed);
        let answer = match question {
            Question::Sync { .. } => Answer::Changes(self.changes()),
            Question::Merge(merge) => {
                let mut outcomes = [PageOutcome::NotAsked; CHUNK_PAGES];
                let asked = merge.ops().iter();
                for op in asked.filter(|op| op.target != Target::Enclosed) {
                    let first = usize::from(op.first);
                    outcomes[first..first + usize::from(op.pages)].fill(PageOutcome::Merged);
                }
                Answer::Merged(Merged {
                    outcomes,
                    cpu_ns: 0,
                    window_ns: 0,
                })
            }
            Question::Unmerge(_) => unreachable!("nothing is unmerged here"),
        };
        self.answers.push_back(answer);
        Ok(())
    }

    fn bell(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn has_answer(&self) -> bool {
        !self.answers.is_empty()
    }

    fn receive(&mut self, _wait: Duration) -> Result<Option<Answer>, Fault> {
        Ok(self.answers.pop_front())
    }
}

struct Held;

impl Lifeline for Held {
    fn is_free(&self) -> bool {
        false
    }

    fn discards(&self) -> u64 {
        0
    }
}

/// A store that forgets.
struct Nowhere;

impl Store for Nowhere {
    fn write(&self, _first: Slot, _pages: &[&PageBytes]) -> std::io::Result<()> {
        Ok(())
    }

    fn punch(&self, _first: Slot, _count: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn end(&self) -> std::io::Result<u64> {
        Ok(0)
    }

    fn each(&self, _each: &mut dyn FnMut(Slot, &PageBytes)) -> std::io::Result<()> {
        Ok(())
    }

    fn node(&self) -> Option<u32> {
        None
    }

    fn nodes(&self, slots: &[Slot]) -> std::io::Result<Vec<Option<u32>>> {
        Ok(vec![None; slots.len()])
    }

    fn number(&self) -> u64 {
        0
    }

    fn share(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

struct Plant {
    core: Core,
    alone: Alone,
    questions: Arc<AtomicU64>,
}

impl Plant {
    fn new(guests: u64, chunks: u32) -> Self {
        let spec = format!("fake={NODES}").parse().unwrap();
        let topology = numa::Topology::live().unwrap().emulate(&spec).unwrap();
        let placement = Placement::new(topology).unwrap();
        let new_domain = move |domain: &str| {
            Domain::new(domain, placement.clone(), |_| {
                Ok(PerNode {
                    index: Box::new(SdTree::<u64>::new()),
                    store: Box::new(Nowhere),
                })
            })
        };
        let options = crate::options::Options {
            patience: Duration::from_secs(1),
            knobs: wire::KnobValues {
                merge_across_nodes: false,
                ..wire::KnobValues::default()
            },
            ..crate::options::Options::default()
        };
        let knobs = Knobs::new(&options, 65530);
        let plant = Self {
            core: Core::new(
                knobs,
                options.limits,
                Hasher::new().unwrap(),
                Box::new(new_domain),
            ),
            alone: Alone(Mutex::new(Scratch::new())),
            questions: Arc::default(),
        };
        (0..guests).for_each(|number| plant.admit(number, chunks));
        plant
    }

    fn admit(&self, number: u64, chunks: u32) {
        let domain = self.core.domain("all").unwrap();
        let memory = Simulated {
            number,
            looks: AtomicU64::new(0),
        };
        let link = Agent {
            chunks,
            answers: VecDeque::from([Answer::Ready(Ready::default())]),
            told: false,
            questions: Arc::clone(&self.questions),
        };
        let pid = u32::try_from(number).unwrap();
        let peer = sys::socket::Peer {
            pid,
            uid: 0,
            gid: 0,
        };
        let newcomer = Newcomer {
            peer,
            domain,
            memory: Box::new(memory),
            link: Box::new(link),
            line: Box::new(Held),
        };
        self.core.admit(peer.uid, newcomer);
    }

    /// Rounds; gives how long one took, and how many questions it put.
    fn rounds(&self, count: u32) -> (Duration, u64) {
        let (begin, before) = (Instant::now(), self.questions.load(Relaxed));
        (0..count).for_each(|_| self.core.round(&self.alone, true));
        let asked = self.questions.load(Relaxed) - before;
        (begin.elapsed() / count, asked / u64::from(count))
    }
}

#[allow(clippy::cast_precision_loss)] // figures to look at
fn measure(guests: u64, chunks: u32) {
    let pages = guests * u64::from(chunks) * CHUNK_PAGES as u64;
    let plant = Plant::new(guests, chunks);
    plant.rounds(2);
    let (merging, asked) = plant.rounds(1);
    plant.rounds(2); // until idle blocks are left out every other time
    let (quiet, syncs) = plant.rounds(4);
    let status = crate::status::status(&plant.core);
    let merged = status.pages_shared + status.pages_sharing;
    assert!(
        merged * 10 > pages * 6,
        "{merged} of {pages} pages are merged"
    );
    assert_eq!(
        merged + status.pages_unshared,
        pages,
        "every page is settled"
    );
    let per_page = |time: Duration| time.as_nanos() / u128::from(pages);
    println!(
        "{guests:>7} {pages:>11} {:>9.1} {:>9} {asked:>10} {:>9} {:>8.2} {syncs:>9} {:>7.1}",
        merging.as_secs_f64(),
        per_page(merging),
        quiet.as_millis(),
        quiet.as_nanos() as f64 / pages as f64,
        status.metadata_bytes as f64 / pages as f64,
    );
}

fn head() {
    println!(
        "{:>7} {:>11} {:>9} {:>9} {:>10} {:>9} {:>8} {:>9} {:>7}",
        "guests",
        "pages",
        "merge s",
        "ns/page",
        "questions",
        "quiet ms",
        "ns/page",
        "questions",
        "B/page"
    );
}

#[test]
fn a_small_plant_merges_inside_its_nodes() {
    head();
    measure(48, 2);
}

#[test]
#[ignore = "takes minutes and gigabytes: make scale"]
fn cost_grows_with_pages_and_guests() {
    let most = std::env::var("SCALE_GUESTS").map_or(10_000, |text| text.parse().unwrap());
    head();
    for (guests, chunks) in [(100, 20), (100, 200), (1000, 20), (3000, 20), (10_000, 20)] {
        if guests * u64::from(chunks) <= most * 20 {
            measure(guests, chunks);
        }
    }
}
