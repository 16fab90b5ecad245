//! Plan: which page maps which slot.
//!
//! A job is one chunk. Its settled pages are read and fingerprinted. Each fingerprint is looked up,
//! and the result decides:
//!
//! ```text
//!   nothing           ─▶ enter the page as candidate
//!   a slot            ─▶ win a ref of it, plan the page for it
//!   a full slot       ─▶ one of its copies that has room again, else as for a candidate
//!   a candidate       ─▶ its twin: take the next slot of the run, write the bytes just read,
//!                        publish (exchange the entry), plan the page, promote the candidate
//!   a slot that dies  ─▶ exchange the dead entry for the page as candidate
//! ```
//!
//! [`lookup`](super::lookup) has the lookup of a fingerprint, [`publish`](super::publish) the slots of
//! twins, and [`rows`](super::rows) those of equal neighbours.
//!
//! Before anything is read, a prediction plans pages that very likely equal slots, and puts off those
//! that very likely are private: see [`predict`](super::predict).
//!
//! Where there are several nodes, a batch is asked for its nodes too, after it was read: see
//! [`relocation`](crate::scan::relocation).
//!
//! A candidate is promoted by the job that found its twin, in another chunk mostly. Two chunks are
//! never locked at once: the finder sets a bit and queues the chunk ([`Chunk::promote`]), and its next job
//! looks the fingerprint up again. It trusts nothing: the slot may have come and gone meanwhile.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use wire::{CHUNK_PAGES, KnobValues, PageBits};

use crate::domain::Domain;
use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::domain::refs::View;
use crate::domain::slots::Run;
use crate::domain::store::PageBytes;
use crate::guest::change::Change;
use crate::merge::read::{BATCH, Batch, Hasher};
use crate::merge::span::Layout;
use crate::page::{Entry, Fingerprint, PAGE, Slot, StoreId, Tag};

/// What a visit needs besides the chunk.
pub(crate) struct Context<'a> {
    pub(crate) hasher: &'a Hasher,
    pub(crate) knobs: KnobValues,
    /// Queues a chunk whose candidates were promoted.
    pub(crate) promote: &'a dyn Fn(Arc<Chunk>),
    /// How many pages of a huge page must be saved for it to be split.
    pub(crate) worth_splitting: usize,
    /// Mappings a guest may have, by `vm.max_map_count`.
    pub(crate) max_mappings: u64,
    /// Whether the guest may have new mappings, by its budget.
    pub(crate) may_map: bool,
    /// Pages that got no slot because of the stores' limit.
    pub(crate) over_limit: &'a AtomicU64,
    /// How long to wait for an answer.
    pub(crate) patience: Duration,
    /// Whether to wait while another worker talks to the guest.
    pub(crate) insist: bool,
    /// Called before a wait: another worker can go on meanwhile.
    pub(crate) step_aside: &'a dyn Fn(),
}

/// Buffers of a worker.
pub(crate) struct Buffers {
    pub(super) batch: Batch,
    pub(super) settled: Vec<usize>,
    pub(super) twins: Vec<Twin>,
    pub(super) repeats: Vec<Read>,
    /// The node where the worker runs; none: on all.
    near: Option<StoreId>,
}

/// A page that was read.
#[derive(Clone, Copy)]
pub(super) struct Read {
    pub(super) page: usize,
    /// Its place in the batch.
    pub(super) at: usize,
    pub(super) key: Fingerprint,
    /// The index it is looked up in.
    pub(super) home: StoreId,
    /// Whether it and the next ones are a row, looked up by their places.
    pub(super) begins_row: bool,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        Self {
            batch: Batch::new(),
            settled: Vec::with_capacity(CHUNK_PAGES),
            twins: Vec::with_capacity(BATCH),
            repeats: Vec::with_capacity(BATCH),
            near: None,
        }
    }
}

/// A page that equals a candidate or a full slot, by fingerprint.
pub(super) struct Twin {
    pub(super) read: Read,
    /// The store for its slot.
    pub(super) store: StoreId,
    /// What the index named when it was looked up.
    pub(super) current: Entry,
}

/// What the index knows of a fingerprint.
pub(super) enum Found {
    /// The page itself is the candidate now.
    Own,
    /// A slot, with a ref for the page.
    Canonical(Slot),
    /// Another page is the candidate, or a slot is full: this entry is to be replaced.
    Twin(Entry),
    /// Others were faster, several times: try in the next round.
    Lost,
}

/// One chunk being planned.
pub(crate) struct Plan<'a> {
    pub(crate) context: &'a Context<'a>,
    pub(crate) change: Change<'a>,
    /// Slots to give out, by store.
    pub(super) runs: Vec<Run>,
    pub(super) layout: Layout,
    /// Whether nothing is left for a later visit.
    pub(super) whole: bool,
    /// Whether broken pages are merged again. Else they are not read; the next look finds them broken.
    merges_again: bool,
    /// Whether twins get slots. Else they are put down in `unpublished`.
    pub(super) publishes: bool,
    /// Pages that equal a candidate or a full slot and got no slot.
    pub(super) unpublished: PageBits,
    /// Candidates of this chunk that some of these equal.
    pub(super) partners: PageBits,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(context: &'a Context<'a>, change: Change<'a>, whole: bool) -> Self {
        let guest = change.guest;
        Self {
            context,
            change,
            runs: Vec::new(),
            layout: Layout::new(guest),
            whole,
            merges_again: guest.merges_again(),
            publishes: true,
            unpublished: PageBits::EMPTY,
            partners: PageBits::EMPTY,
        }
    }

    pub(super) fn domain(&self) -> &'a Domain {
        &self.change.guest.domain
    }

    /// Plans what can be planned: afterwards planned pages hold refs and wait to be asked for. Tells whether
    /// pages are left for a whole visit.
    pub(crate) fn make(&mut self, buffers: &mut Buffers) -> bool {
        if self.whole {
            self.change.later = PageBits::EMPTY;
        }
        self.plan_promoted();
        let mut settled = std::mem::take(&mut buffers.settled);
        settled.clear();
        let busy = self.change.busy.pages();
        settled.extend(busy.filter(|&page| self.is_settled(page)));
        let reserved = self.change.huge && self.context.worth_splitting > 0;
        self.publishes = !reserved && self.context.may_map;
        let read = self
            .leave_shared(&mut settled)
            .and_then(|()| self.predict(buffers, &mut settled))
            .and_then(|()| self.read(buffers, &settled))
            .and_then(|()| self.weigh(buffers, &mut settled));
        if let Err(error) = read {
            self.change.guest.fail(error);
        }
        buffers.settled = settled;
        self.plan_promoted();
        self.leave_astray();
        let slots = &self.domain().slots;
        let runs = std::mem::take(&mut self.runs);
        runs.into_iter().for_each(|run| slots.give_back(run));
        self.change.later.pages().any(|page| self.is_settled(page))
    }

    /// Leaves settled pages alone whose frames others have too: fork or KSM shares them already. MOVE would refuse them, and a read
    /// would part them: it pins, and the kernel gives the guest a copy before that.
    fn leave_shared(&mut self, settled: &mut Vec<usize>) -> std::io::Result<()> {
        let Some(&last) = settled.last() else {
            return Ok(());
        };
        let start = self.change.chunk.address;
        let end = start + (last as u64 + 1) * PAGE;
        let shared = self.change.guest.memory.shared(start..end)?;
        for page in settled.extract_if(.., |page| shared.contains(*page)) {
            self.change.back_off(page, Tag::Pinned);
        }
        Ok(())
    }

    /// Decides about the twins that got no slot: those of a huge page that is worth splitting get one now, for which
    /// they are read again. The others are left alone for a while. So no slot is written that no page will map.
    fn weigh(&mut self, buffers: &mut Buffers, settled: &mut Vec<usize>) -> std::io::Result<()> {
        let twins = std::mem::take(&mut self.unpublished);
        if twins.is_empty() {
            return Ok(());
        }
        let partners = self.partners.pages();
        let partners = partners.filter(|&page| self.change.tag(page) == Tag::Candidate);
        let busy = self.change.busy.pages();
        let planned = busy.filter(|&page| self.change.tag(page).is_planned());
        let saved = twins.len() + partners.count() + planned.count();
        let worth = !self.change.huge || saved >= self.context.worth_splitting;
        if !worth || !self.context.may_map {
            let skip = |page| self.change.back_off(page, Tag::Skipped);
            twins.pages().for_each(skip);
            return Ok(());
        }
        self.publishes = true;
        settled.clear();
        settled.extend(twins.pages());
        self.read(buffers, settled)
    }

    /// Whether `page` waits to be read.
    pub(super) fn is_settled(&self, page: usize) -> bool {
        let is_left = !self.merges_again && self.change.stored.contains(page);
        self.change.tag(page) == Tag::Settled && self.change.offered.contains(page) && !is_left
    }

    /// Whether `page` may be predicted: nothing is known against it.
    pub(super) fn is_fresh(&self, page: usize) -> bool {
        let fresh = self.is_settled(page) && self.change.level(page) == 0;
        fresh && !self.change.later.contains(page)
    }

    /// Whether pages of two nodes must not share.
    pub(super) fn is_bound(&self) -> bool {
        !self.context.knobs.merge_across_nodes && self.domain().has_nodes()
    }

    /// The indexes that pages belong in: all in the first, or each as its node has it; `None` when that has none, or the page is gone.
    fn homes(&self, pages: impl ExactSizeIterator<Item = usize>) -> Vec<Option<StoreId>> {
        match self.is_bound() {
            true => self.ask_nodes(pages),
            false => vec![Some(StoreId::default()); pages.len()],
        }
    }

    fn ask_nodes(&self, pages: impl Iterator<Item = usize>) -> Vec<Option<StoreId>> {
        let addresses = self.change.chunk.addresses(pages);
        self.change.guest.memory.stores(&addresses)
    }

    /// Candidates of which a job found a twin: each looks its fingerprint up again.
    fn plan_promoted(&mut self) {
        let promoted: PageBits = self.change.chunk.take_promoted();
        if promoted.is_empty() {
            return;
        }
        let promoted: Vec<_> = promoted
            .pages()
            .filter(|&page| self.change.tag(page) == Tag::Candidate)
            .collect();
        let homes = self.homes(promoted.iter().copied());
        let domain = self.domain();
        let view = domain.slots.view();
        for (page, home) in promoted.into_iter().zip(homes) {
            let (key, site) = (self.change.fingerprint(page), self.change.site(page));
            let entered = self.change.home(page);
            if home != Some(entered) {
                // It has moved to another node, or the rules have changed.
                let index = domain.index(entered);
                index.remove_if(key, Entry::Candidate(site));
                self.change.set(page, Tag::Settled);
                continue;
            }
            match self.resolve(&view, entered, key, site) {
                Found::Own => {}
                Found::Canonical(slot) => self.change.set_planned(page, slot),
                // Its entry is another's by now: to be a twin it needs its bytes again.
                Found::Twin(_) | Found::Lost => self.change.set(page, Tag::Settled),
            }
        }
    }

    /// Takes plans back whose slots are off their nodes, before an agent hears of them (I6). Those found again may be new ones, because
    /// their node is full: so the pages are left alone for a while, and longer each time.
    fn leave_astray(&mut self) {
        if !self.is_bound() {
            return;
        }
        let mut slots: Vec<_> = self.change.planned().map(|p| self.change.slot(p)).collect();
        let found = self.domain().find_astray(&mut slots);
        let off: HashSet<_> = match found {
            Ok(off) => off.into_iter().collect(),
            Err(error) => {
                tracing::debug!(%error, "the nodes of canonical pages are not known");
                slots.into_iter().collect()
            }
        };
        if off.is_empty() {
            return;
        }
        let planned = self.change.planned();
        let wrong: Vec<_> = planned
            .filter(|&page| off.contains(&self.change.slot(page)))
            .collect();
        self.change.withdraw(wrong, skip);
    }

    fn read(&mut self, buffers: &mut Buffers, settled: &[usize]) -> std::io::Result<()> {
        let mut rest = settled;
        while !rest.is_empty() {
            let part = rest.get(..BATCH).unwrap_or(rest);
            let (memory, start) = (&*self.change.guest.memory, self.change.chunk.address);
            let read = buffers.batch.fill(memory, start, part)?;
            self.look_up(buffers, &part[..read]);
            let mut done = read;
            if let Some(&unreadable) = part.get(read) {
                self.change.back_off(unreadable, Tag::Skipped);
                done += 1;
            }
            rest = &rest[done..];
        }
        Ok(())
    }

    fn look_up(&mut self, buffers: &mut Buffers, part: &[usize]) {
        let mut keys = [None; BATCH];
        for (at, key) in keys.iter_mut().enumerate().take(part.len()) {
            *key = self.key(buffers.batch.page(at));
        }
        let homes = self.homes(part.iter().copied());
        self.go_near(buffers, homes.first().copied().flatten());
        let mut reads = std::mem::take(&mut buffers.repeats);
        reads.clear();
        for (at, ((&page, key), home)) in part.iter().zip(keys).zip(homes).enumerate() {
            match (key, home) {
                (None, _) => self.change.set(page, Tag::PlannedZero),
                (_, None) => self.change.back_off(page, Tag::Skipped),
                (Some(key), Some(home)) => reads.push(Read {
                    page,
                    at,
                    key,
                    home,
                    begins_row: false,
                }),
            }
        }
        self.spread_rows(&mut reads);
        self.expect(&reads);
        // Each time the first page of every content is dealt with, so this ends.
        while !reads.is_empty() {
            self.look_up_once(buffers, &reads);
            std::mem::swap(&mut reads, &mut buffers.repeats);
            buffers.repeats.clear();
        }
        buffers.repeats = reads;
    }

    /// Has the worker go on where these pages are, while merging stays inside nodes. Those of a chunk are mostly on one node, so the
    /// first one's decides.
    fn go_near(&self, buffers: &mut Buffers, home: Option<StoreId>) {
        let near = home.or(buffers.near).filter(|_| self.is_bound());
        if near != buffers.near {
            self.domain().slots.placement.work_near(near);
            buffers.near = near;
        }
    }

    /// Tells the indexes which pages are looked up next.
    fn expect(&self, reads: &[Read]) {
        for part in reads.chunk_by(|one, next| one.home == next.home) {
            let mut keys = [Fingerprint(0); BATCH];
            for (key, read) in keys.iter_mut().zip(part) {
                *key = read.key;
            }
            if let (Some(read), Some(keys)) = (part.first(), keys.get(..part.len())) {
                self.domain().index(read.home).expect(keys);
            }
        }
    }

    /// Looks pages up and publishes twins; pages that equal one of these are left in `repeats`.
    fn look_up_once(&mut self, buffers: &mut Buffers, reads: &[Read]) {
        buffers.twins.clear();
        let domain = self.domain();
        let view = domain.slots.view();
        let mut rest = reads;
        while let Some(&read) = rest.first() {
            let (now, later) = Self::split_row(rest);
            rest = later;
            let same = |twin: &Twin| (twin.read.key, twin.read.home) == (read.key, read.home);
            if buffers.twins.iter().any(same) {
                buffers.repeats.extend(now);
                continue;
            }
            let renewed = self.find_full_row(&view, now);
            for (at, &read) in now.iter().enumerate() {
                let current = match &renewed {
                    Some(entries) => entries.get(at).copied(),
                    None => self.enter(&view, read),
                };
                buffers.twins.extend(current.map(|current| Twin {
                    read,
                    store: read.home,
                    current,
                }));
            }
        }
        drop(view);
        self.choose_stores(&mut buffers.twins);
        self.publish(&buffers.batch, &buffers.twins);
    }

    /// A canonical page goes to the node of the page it is made from, the first one if that has no
    /// store.
    fn choose_stores(&self, twins: &mut [Twin]) {
        if self.is_bound() || !self.domain().has_nodes() || twins.is_empty() {
            return;
        }
        let stores = self.ask_nodes(twins.iter().map(|twin| twin.read.page));
        for (twin, store) in twins.iter_mut().zip(stores) {
            twin.store = store.unwrap_or_default();
        }
    }

    pub(super) fn key(&self, page: &PageBytes) -> Option<Fingerprint> {
        let hasher = self.context.hasher;
        match hasher.fingerprint(page) {
            None if !self.context.knobs.use_zero_pages => Some(hasher.fingerprint_any(page)),
            other => other,
        }
    }

    /// Looks a settled page up and enters or plans it; gives the entry it is a twin of.
    pub(super) fn enter(&mut self, view: &View<'_>, read: Read) -> Option<Entry> {
        let Read {
            page, key, home, ..
        } = read;
        match self.resolve(view, home, key, self.change.site(page)) {
            Found::Own => self.change.set_candidate(page, key, home),
            Found::Canonical(slot) => self.change.set_planned(page, slot),
            Found::Twin(current) => return Some(current),
            Found::Lost => {}
        }
        None
    }
}

/// What becomes of a page whose plan is tried again when its back-off ends.
pub(super) fn skip(pages: &mut Pages, page: usize) {
    pages.back_off(page, Tag::Skipped);
}
