//! Guests that hold nothing: memory, agents, lifelines and stores that answer from formulas.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use sys::pagemap::{Categories, PageRun};
use sys::process::Remote;
use wire::{
    Answer, CHUNK_PAGES, Change, Changes, Merged, PAGE_BYTES, PageOutcome, Question, Ready, Target,
};

use crate::domain::lifelines::Lifeline;
use crate::domain::store::{PageBytes, Store};
use crate::error::Refusal;
use crate::guest::agent::{Fault, Link};
use crate::guest::memory::{Mapped, Memory};
use crate::page::{CHUNK, PAGE, Slot, StoreId};

const BASE: u64 = 64 * CHUNK;

/// A guest whose pages follow from its number.
pub(super) struct Simulated {
    number: u64,
    nodes: u64,
    looks: AtomicU64,
}

impl Simulated {
    /// The guest `number`, on one of so many nodes.
    pub(super) fn new(number: u64, nodes: u64) -> Self {
        Self {
            number,
            nodes,
            looks: AtomicU64::new(0),
        }
    }

    /// The content of the page at `address`: never zeros.
    fn content(&self, address: u64) -> u64 {
        let page = (address - BASE) / PAGE;
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
        let node = u8::try_from(self.number % self.nodes).expect("at most 255 nodes");
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
pub(super) struct Agent {
    chunks: u32,
    answers: VecDeque<Answer>,
    told: bool,
    questions: Arc<AtomicU64>,
}

impl Agent {
    /// The agent of a guest that offers so many chunks.
    pub(super) fn new(chunks: u32, questions: &Arc<AtomicU64>) -> Self {
        Self {
            chunks,
            answers: VecDeque::from([Answer::Ready(Ready::default())]),
            told: false,
            questions: Arc::clone(questions),
        }
    }

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

/// A guest that lives on.
pub(super) struct Held;

impl Lifeline for Held {
    fn is_free(&self) -> bool {
        false
    }

    fn discards(&self) -> u64 {
        0
    }
}

/// A store that forgets.
pub(super) struct Nowhere;

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
