//! An engine played by hand: it asks an agent the test's questions.
#![allow(dead_code)] // each test binary uses a part of it

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use sys::pagemap::{PageRun, Pagemap};
use sys::socket;
use wire::{
    Answer, Change, DomainMark, Hello, MAX_MESSAGE, Merge, Merged, PageOutcome, Question, Role,
    Target, Welcome,
};

use crate::support::Guest;

/// What the guest's `fill` writes.
pub(crate) fn pattern(seed: u64) -> Vec<u8> {
    let mix = |mut x: u64| {
        x ^= x >> 33;
        x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^= x >> 33;
        x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        x ^ (x >> 33)
    };
    (0..512)
        .flat_map(|i| mix(seed.wrapping_mul(1_000_003).wrapping_add(i)).to_le_bytes())
        .collect()
}

/// How often a page that would not move is asked for.
const TRIES: usize = 5;

/// An engine with one guest, that asks what the test says.
pub(crate) struct Engine {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) listener: OwnedFd,
    pub(crate) link: Option<OwnedFd>,
    pub(crate) store: File,
    pub(crate) lifeline: OwnedFd,
    pub(crate) tie: OwnedFd,
    /// What the next welcome says.
    pub(crate) domain: DomainMark,
}

impl Engine {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = socket::listen(&folder.path().join("socket")).unwrap();
        let store = File::from(memfd_create("store", MemfdFlags::CLOEXEC).unwrap());
        store.set_len(1 << 30).unwrap();
        Self {
            folder,
            listener,
            link: None,
            store,
            lifeline: new_lifeline(),
            tie: new_lifeline(),
            domain: DomainMark([1, 0]),
        }
    }

    pub(crate) fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) fn guest(&self) -> Guest {
        Guest::start(&self.socket())
    }

    /// Writes `pages` canonical pages from `slot` on, as `fill` with `seed` would.
    pub(crate) fn write(&self, slot: u64, pages: u64, seed: u64) {
        for page in 0..pages {
            self.store
                .write_all_at(&pattern(seed + page), (slot + page) * 4096)
                .unwrap();
        }
    }

    pub(crate) fn accept(&mut self) {
        let answer = self.try_accept();
        assert!(matches!(answer, Some(Answer::Ready(_))), "{answer:?}");
    }

    /// Accepts an agent and welcomes it; gives its answer, unless it is gone before.
    pub(crate) fn try_accept(&mut self) -> Option<Answer> {
        let patience = std::time::Duration::from_millis(2500);
        if !sys::process::wait_readable(&self.listener, patience).unwrap() {
            return None;
        }
        let link = socket::accept(&self.listener).unwrap();
        let mut buffer = [0; MAX_MESSAGE];
        let len = socket::recv(&link, &mut buffer).ok()?.len;
        if len == 0 {
            return None;
        }
        assert_eq!(Hello::decode(&buffer[..len]).unwrap().role, Role::Agent);
        let device = sys::uffd::Uffd::device().expect("this test needs /dev/userfaultfd and root");
        let len = Welcome {
            stores: 1,
            device: true,
            domain: self.domain,
        }
        .encode(&mut buffer);
        let lines = [self.lifeline.as_fd(), self.tie.as_fd()];
        let descriptors = [lines[0], lines[1], self.store.as_fd(), device.as_fd()];
        socket::send(&link, &buffer[..len], &descriptors).ok()?;
        let len = socket::recv(&link, &mut buffer).ok()?.len;
        self.link = Some(link);
        Answer::decode(&buffer[..len]).ok()
    }

    pub(crate) fn send(&self, question: &Question, lifeline: Option<&OwnedFd>) {
        let mut buffer = [0; MAX_MESSAGE];
        let len = question.encode(&mut buffer);
        let descriptors: Vec<_> = lifeline.iter().map(|fd| fd.as_fd()).collect();
        socket::send(self.link.as_ref().unwrap(), &buffer[..len], &descriptors).unwrap();
    }

    /// Puts a question and takes the last part of the answer; none when the agent is gone.
    pub(crate) fn try_ask(&self, question: &Question) -> Option<Answer> {
        let mut buffer = [0; MAX_MESSAGE];
        let link = self.link.as_ref()?;
        let len = question.encode(&mut buffer);
        socket::send(link, &buffer[..len], &[]).ok()?;
        loop {
            let len = socket::recv(link, &mut buffer).ok()?.len;
            match Answer::decode(buffer.get(..len)?) {
                Ok(Answer::Changes(part)) if part.more => {}
                answer => return answer.ok(),
            }
        }
    }

    pub(crate) fn receive(&self) -> Answer {
        let mut buffer = [0; MAX_MESSAGE];
        let len = socket::recv(self.link.as_ref().unwrap(), &mut buffer)
            .unwrap()
            .len;
        Answer::decode(&buffer[..len]).unwrap()
    }

    pub(crate) fn sync_with(&self, lifeline: Option<&OwnedFd>) -> Vec<Change> {
        self.sync_as(lifeline, false)
    }

    pub(crate) fn sync_as(&self, lifeline: Option<&OwnedFd>, adopted: bool) -> Vec<Change> {
        let question = Question::Sync {
            lifeline: lifeline.is_some(),
            adopted,
        };
        self.send(&question, lifeline);
        let mut all = Vec::new();
        loop {
            let Answer::Changes(part) = self.receive() else {
                panic!("not changes")
            };
            all.extend_from_slice(part.entries());
            if !part.more {
                return all;
            }
        }
    }

    pub(crate) fn sync(&self) -> Vec<Change> {
        self.sync_with(None)
    }

    /// Asks for pages `first..first + count` of the guest's first chunk to map slots from `slot`. A page that the
    /// kernel has in hand for a moment, to compact memory say, is asked for again, as an engine does in its next round.
    pub(crate) fn merge(&self, chunk: usize, first: u16, count: u16, slot: Option<u64>) -> Merged {
        let mut left: Vec<u16> = (first..first + count).collect();
        let mut all: Option<Merged> = None;
        for _ in 0..TRIES {
            let mut question = Merge::new(chunk as u64, 0);
            for &page in &left {
                assert!(question.push(page, slot.map(|slot| slot + u64::from(page - first))));
            }
            let answer = self.ask_merge(question);
            let merged = all.get_or_insert(answer);
            for &page in &left {
                merged.outcomes[usize::from(page)] = answer.outcomes[usize::from(page)];
            }
            let outcome = |page: &u16| merged.outcomes[usize::from(*page)];
            left.retain(|page| matches!(outcome(page), PageOutcome::Pinned | PageOutcome::Again));
            if left.is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        all.unwrap()
    }

    /// Asks for pages of the first chunk to map slots from `slot` on, with every third page from the second on private
    /// between them.
    pub(crate) fn merge_span(&self, chunk: usize, first: u16, count: u16, slot: u64) -> Merged {
        self.ask_merge(span(chunk, first, count, slot))
    }

    /// Arms the pages first, as an engine has done for all it asks for.
    pub(crate) fn ask_merge(&self, question: Merge) -> Merged {
        let pid = socket::peer(self.link.as_ref().unwrap()).unwrap().pid;
        arm(pid, question.chunk);
        self.ask_unarmed(question)
    }

    /// As [`Engine::merge`], but the pages are as the guest's last write left them.
    pub(crate) fn merge_unarmed(&self, chunk: usize, first: u16, count: u16, slot: u64) -> Merged {
        let mut question = Merge::new(chunk as u64, 0);
        for page in 0..count {
            assert!(question.push(first + page, Some(slot + u64::from(page))));
        }
        self.ask_unarmed(question)
    }

    pub(crate) fn ask_unarmed(&self, question: Merge) -> Merged {
        self.send(&Question::Merge(question), None);
        let Answer::Merged(merged) = self.receive() else {
            panic!("not merged")
        };
        merged
    }
}

/// The question of [`Engine::merge_span`].
pub(crate) fn span(chunk: usize, first: u16, count: u16, slot: u64) -> Merge {
    let mut question = Merge::new(chunk as u64, 0);
    for page in 0..count {
        let target = match is_private(first + page) {
            true => Target::Enclosed,
            false => Target::Slot(slot + u64::from(page)),
        };
        assert!(question.push_as(first + page, target));
    }
    question
}

/// Whether a span leaves this page private.
pub(crate) fn is_private(page: u16) -> bool {
    page % 3 == 1
}

pub(crate) fn new_lifeline() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let lifeline = memfd_create("lifeline", flags).unwrap();
    rustix::fs::ftruncate(&lifeline, 4096).unwrap();
    lifeline
}

pub(crate) fn is_free(lifeline: &OwnedFd) -> bool {
    rustix::fs::fcntl_add_seals(lifeline, SealFlags::WRITE).is_ok()
}

pub(crate) fn count(merged: &Merged, outcome: PageOutcome) -> usize {
    merged.outcomes.iter().filter(|&&o| o == outcome).count()
}

/// Whether pages are merged in a process that has others pinned for long: before Linux 6.18 MOVE may wait for these without an end.
pub(crate) fn merges_beside_pins() -> bool {
    !sys::uffd::move_waits_for_pins()
}

/// A guest with one chunk filled from `seed`, offered and known, and the canonical pages to match.
pub(crate) fn ready(seed: u64) -> (Engine, Guest) {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    engine.write(1000, 512, seed);
    guest.offer(512, seed);
    engine.accept();
    let chunk = guest.memory as u64;
    assert_eq!(engine.sync(), [Change::Whole { chunk, chunks: 1 }]);
    (engine, guest)
}

/// Whether the guest has pages of a store.
pub(crate) fn maps_store(guest: &Guest) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    maps.contains("memfd:store")
}

/// Arms what was written: from here a write shows.
pub(crate) fn scan(guest: &Guest) {
    arm(guest.pid, guest.memory as u64);
}

fn arm(pid: u32, start: u64) {
    let pagemap = Pagemap::open(pid).unwrap();
    let mut runs = [PageRun::default(); 512];
    pagemap.scan(start..start + 512 * 4096, &mut runs).unwrap();
}

/// A guest whose `chunks` chunks are merged.
pub(crate) fn merged_chunks(chunks: usize) -> (Engine, Guest) {
    merged_chunks_of(chunks, Engine::guest)
}

/// The same of a guest that the caller starts.
pub(crate) fn merged_chunks_of(
    chunks: usize,
    start: impl FnOnce(&Engine) -> Guest,
) -> (Engine, Guest) {
    let mut engine = Engine::new();
    let mut guest = start(&engine);
    engine.write(1000, 512 * chunks as u64, 5);
    guest.offer(512 * chunks, 5);
    engine.accept();
    engine.sync();
    let mut merged = 0;
    for chunk in 0..chunks {
        let slot = 1000 + 512 * chunk as u64;
        let answer = engine.merge(guest.memory + chunk * (2 << 20), 0, 512, Some(slot));
        merged += count(&answer, PageOutcome::Merged);
    }
    assert_eq!(merged, 512 * chunks);
    (engine, guest)
}
