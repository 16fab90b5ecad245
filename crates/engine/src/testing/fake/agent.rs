//! The agent of a fake guest: honest, slow or a liar.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use wire::{
    Answer, CHUNK_PAGES, Change, Changes, Merge, Merged, PageBits, PageOutcome, Question, Ready,
    Target,
};

use super::{BASE, FakeLine, Place, Process, Shared, Touch, World};
use crate::domain::lifelines::Lifeline;
use crate::guest::agent::{Fault, Link};
use crate::page::CHUNK;
use crate::sync::lock;

/// How an agent behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Manners {
    /// Does what it is asked.
    #[default]
    Honest,
    /// Takes questions, and deals with them only when it is honest again.
    Stalls,
    /// Merges what it is asked for once, and stalls after that.
    Tires,
    /// Refuses every page with this outcome.
    Refuses(PageOutcome),
    /// Claims that pages it was not asked for are merged.
    Invents,
    /// Claims that pages it was not asked for are enclosed.
    Oversteps,
    /// Leaves out pages it was asked for, though it merged them.
    Forgets,
    /// Sends an answer to another question.
    Confuses,
    /// Says it merged, and did not.
    Pretends,
}

/// Questions not dealt with, and answers not taken.
#[derive(Debug, Default)]
pub(crate) struct Mail {
    questions: VecDeque<(Question, Option<usize>)>,
    answers: VecDeque<Answer>,
}

impl Mail {
    /// The handshake's last message.
    pub(crate) fn greeting() -> Self {
        Self {
            questions: VecDeque::new(),
            answers: VecDeque::from([Answer::Ready(Ready::default())]),
        }
    }
}

/// The engine's end of a fake connection.
pub(crate) struct FakeLink {
    world: Shared,
    process: usize,
    connection: u64,
    line: Option<usize>,
}

impl FakeLink {
    pub(crate) fn new(world: &Shared, process: usize) -> Self {
        Self {
            world: Arc::clone(world),
            process,
            connection: lock(world).processes[process].connection,
            line: None,
        }
    }
}

impl Drop for FakeLink {
    fn drop(&mut self) {
        let mut world = lock(&self.world);
        let process = &mut world.processes[self.process];
        if process.connection == self.connection {
            process.connection = 0;
        }
    }
}

impl Link for FakeLink {
    fn lifeline(&mut self) -> std::io::Result<Box<dyn Lifeline>> {
        let line = lock(&self.world).new_line();
        self.line = Some(line);
        Ok(Box::new(FakeLine {
            world: Arc::clone(&self.world),
            line,
        }))
    }

    fn send(&mut self, question: &Question) -> Result<(), Fault> {
        let mut world = lock(&self.world);
        if let Question::Merge(merge) = question
            && world.bound
        {
            world.check_nodes(self.process, merge);
        }
        let process = &mut world.processes[self.process];
        if process.connection != self.connection {
            return Err(Fault::Closed);
        }
        assert!(process.mail.questions.is_empty(), "two questions at a time");
        let line = match question {
            Question::Sync { lifeline: true, .. } => self.line.take(),
            _ => None,
        };
        process.syncs += u64::from(matches!(question, Question::Sync { .. }));
        process.mail.questions.push_back((question.clone(), line));
        Ok(())
    }

    fn bell(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn has_answer(&self) -> bool {
        let mut world = lock(&self.world);
        let gone = world.processes[self.process].connection != self.connection;
        if !gone {
            world.deal_unless_stalled(self.process);
        }
        gone || !world.processes[self.process].mail.answers.is_empty()
    }

    fn receive(&mut self, _wait: Duration) -> Result<Option<Answer>, Fault> {
        let mut world = lock(&self.world);
        if world.processes[self.process].connection != self.connection {
            return Err(Fault::Closed);
        }
        world.deal_unless_stalled(self.process);
        Ok(world.processes[self.process].mail.answers.pop_front())
    }
}

impl World {
    fn deal_unless_stalled(&mut self, process: usize) {
        if self.processes[process].manners != Manners::Stalls {
            self.deal(process);
        }
    }

    /// Lets the agent of `process` deal with its questions.
    pub(super) fn deal(&mut self, process: usize) {
        while let Some((question, line)) = self.processes[process].mail.questions.pop_front() {
            if let Some(line) = line {
                self.hold(line);
                let old = std::mem::replace(&mut self.processes[process].lines, vec![line]);
                self.let_go(&old);
            }
            let answers = match question {
                Question::Sync { adopted, .. } => {
                    if adopted {
                        let kept = std::mem::take(&mut self.processes[process].kept);
                        self.let_go(&kept);
                    }
                    sync(&mut self.processes[process])
                }
                Question::Merge(merge) => {
                    let answer = self.merge(process, &merge);
                    let manners = &mut self.processes[process].manners;
                    if *manners == Manners::Tires {
                        *manners = Manners::Stalls;
                    }
                    vec![answer]
                }
                Question::Unmerge(unmerge) => {
                    let chunk = (unmerge.chunk - BASE) / CHUNK;
                    vec![unmerge_pages(
                        &mut self.processes[process],
                        chunk,
                        &unmerge.pages,
                    )]
                }
            };
            self.processes[process].mail.answers.extend(answers);
        }
    }

    /// Asserts that a question asks no page to share with one of another node.
    fn check_nodes(&self, number: usize, merge: &Merge) {
        let chunk = (merge.chunk - BASE) / CHUNK;
        let nodes = &self.processes[number].nodes;
        for op in merge
            .ops()
            .iter()
            .filter(|op| matches!(op.target, Target::Slot(_)))
        {
            for page in (chunk * 512 + u64::from(op.first)..).take(op.pages.into()) {
                let node = nodes.get(&page).copied().unwrap_or(0);
                assert_eq!(u16::from(node), merge.store, "I6: page {page} across nodes");
            }
            let shelf = &self.shelves[&self.processes[number].domain];
            for step in 0..op.pages {
                if let Target::Slot(slot) = op.target.nth(step) {
                    let node = shelf.node((u64::from(merge.store) << 48) + slot);
                    assert_eq!(
                        u16::from(node),
                        merge.store,
                        "I6: slot {slot} is on another node"
                    );
                }
            }
        }
    }

    fn merge(&mut self, number: usize, merge: &Merge) -> Answer {
        let chunk = (merge.chunk - BASE) / CHUNK;
        let mut outcomes = [PageOutcome::NotAsked; CHUNK_PAGES];
        let manners = self.processes[number].manners;
        for op in merge.ops() {
            for step in 0..op.pages {
                let at = usize::from(op.first + step);
                let (first, page) = (u64::from(merge.store) << 48, chunk * 512 + at as u64);
                outcomes[at] = match op.target.nth(step) {
                    Target::Slot(slot) => self.merge_page(number, page, Some(first + slot)),
                    Target::Zeros => self.merge_page(number, page, None),
                    Target::Enclosed => self.enclose(number, page),
                };
            }
        }
        for (at, slot) in between(merge, &outcomes) {
            let process = &mut self.processes[number];
            process.beneath.insert(chunk * 512 + at, slot);
        }
        match manners {
            Manners::Invents => outcomes[511] = PageOutcome::Merged,
            Manners::Oversteps => outcomes[511] = PageOutcome::Enclosed,
            Manners::Forgets => outcomes = [PageOutcome::NotAsked; CHUNK_PAGES],
            Manners::Confuses => return Answer::Ready(Ready::default()),
            _ => {}
        }
        Answer::Merged(Merged {
            outcomes,
            cpu_ns: 1000,
            window_ns: 5000,
        })
    }

    /// Leaves a page private, inside a mapping of the store.
    fn enclose(&mut self, number: usize, page: u64) -> PageOutcome {
        let process = &mut self.processes[number];
        assert_eq!(
            process.nodes.get(&page),
            None,
            "a copy may be on another node"
        );
        let honest = !matches!(process.manners, Manners::Refuses(_) | Manners::Pretends);
        if !honest || process.pinned.contains(&page) {
            return PageOutcome::NotAsked;
        }
        match process.pages.get_mut(&page) {
            Some(Place::Frame {
                written, stored, ..
            }) if !*stored => {
                (*written, *stored) = (true, true);
                process.changed.insert(page / 512);
                process.huge.remove(&(page / 512));
                PageOutcome::Enclosed
            }
            _ => PageOutcome::NotAsked,
        }
    }

    fn merge_page(&mut self, number: usize, page: u64, slot: Option<u64>) -> PageOutcome {
        let domain = self.processes[number].domain.clone();
        let wanted = slot.map_or(0, |slot| self.content(&domain, slot));
        let process = &mut self.processes[number];
        match process.manners {
            Manners::Refuses(outcome) => return outcome,
            Manners::Pretends => {
                process.tainted = true;
                return if slot.is_some() {
                    PageOutcome::Merged
                } else {
                    PageOutcome::Zeroed
                };
            }
            _ => {} // even what a liar conceals stays protected: it was asked for
        }
        match process.pages.get(&page) {
            None => PageOutcome::Gone,
            Some(Place::Slot { .. }) => PageOutcome::Unsupported,
            Some(Place::Frame {
                stored: true,
                written: true,
                ..
            }) => PageOutcome::Differs,
            Some(Place::Frame { stored: true, .. }) => {
                // Nothing tells the agent of pins here: the engine must not ask.
                let pinned = process.pinned.contains(&page);
                assert!(!pinned, "I1: page {page} is pinned and to be merged again");
                process.merge(page, slot, wanted)
            }
            Some(_) if process.pinned.contains(&page) => PageOutcome::Pinned,
            Some(_) => process.merge(page, slot, wanted),
        }
    }
}

/// The enclosed pages of an answer, with the numbers beneath them. Each lies behind a page with a slot.
fn between(merge: &Merge, outcomes: &[PageOutcome; CHUNK_PAGES]) -> Vec<(u64, u64)> {
    let (mut all, mut last) = (Vec::new(), None::<(u64, u64)>);
    for op in merge.ops() {
        for step in 0..op.pages {
            let page = u64::from(op.first + step);
            match (op.target.nth(step), last) {
                (Target::Slot(slot), _) => last = Some((page, slot)),
                (Target::Enclosed, Some((behind, slot))) => {
                    if outcomes[usize::from(op.first + step)] == PageOutcome::Enclosed {
                        let first = u64::from(merge.store) << 48;
                        all.push((page, first + slot + page - behind));
                    }
                }
                (Target::Enclosed, None) => panic!("page {page} is to be enclosed by nothing"),
                (Target::Zeros, _) => last = None,
            }
        }
    }
    all
}

impl Process {
    /// Puts a slot or the zero page in the place of a page of equal content.
    fn merge(&mut self, page: u64, slot: Option<u64>, wanted: u64) -> PageOutcome {
        if self.shadow[&page] != wanted {
            return PageOutcome::Differs;
        }
        let touch = Touch::Never;
        let (place, outcome) = match slot {
            Some(slot) => (Place::Slot { slot, touch }, PageOutcome::Merged),
            None => (Place::Zero, PageOutcome::Zeroed),
        };
        self.pages.insert(page, place);
        self.beneath.extend(slot.map(|slot| (page, slot)));
        self.changed.insert(page / 512);
        self.huge.remove(&(page / 512)); // the kernel splits it
        outcome
    }
}

fn stored(process: &Process, chunk: u64) -> PageBits {
    let mut bits = PageBits::EMPTY;
    for (page, place) in process.pages.range(chunk * 512..(chunk + 1) * 512) {
        if let Place::Slot { .. } | Place::Frame { stored: true, .. } = place {
            bits.insert(usize::try_from(page % 512).unwrap());
        }
    }
    bits
}

fn sync(process: &mut Process) -> Vec<Answer> {
    if process.manners == Manners::Confuses {
        return vec![Answer::Ready(Ready::default())];
    }
    let told = std::mem::take(&mut process.told);
    let changes = std::mem::take(&mut process.changed)
        .into_iter()
        .map(|chunk| {
            let (offered, stored) = (process.offered.contains(&chunk), stored(process, chunk));
            let address = BASE + chunk * CHUNK;
            match offered && stored.is_empty() {
                true => Change::Whole {
                    chunk: address,
                    chunks: 1,
                },
                false => Change::Chunk {
                    chunk: address,
                    offered: if offered {
                        PageBits::FULL
                    } else {
                        PageBits::EMPTY
                    },
                    stored,
                },
            }
        });
    let told = (told > 0).then_some(Change::Recycled { pages: told });
    let changes = told.into_iter().chain(changes).collect::<Vec<_>>();
    // In parts of two, so that parts are tried too.
    let parts = changes.len().div_ceil(2).max(1);
    let part = |at: usize| {
        let mut part = Changes::new();
        part.more = at + 1 < parts;
        for change in changes.iter().skip(at * 2).take(2) {
            assert!(part.push(*change));
        }
        Answer::Changes(part)
    };
    (0..parts).map(part).collect()
}

fn unmerge_pages(process: &mut Process, chunk: u64, wanted: &PageBits) -> Answer {
    let mut private = PageBits::EMPTY;
    for (&page, place) in process.pages.range_mut(chunk * 512..(chunk + 1) * 512) {
        let at = usize::try_from(page % 512).unwrap();
        if wanted.contains(at) && matches!(place, Place::Slot { .. }) {
            *place = Place::Frame {
                content: process.shadow[&page],
                written: true,
                stored: true,
            };
        }
        if wanted.contains(at) && matches!(place, Place::Frame { .. }) {
            private.insert(at);
        }
    }
    Answer::Unmerged {
        cpu_ns: 2000,
        pages: private,
    }
}
