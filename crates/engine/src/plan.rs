//! Plan: which page maps which slot.
//!
//! A job is one chunk. Its settled pages are read and fingerprinted, and each fingerprint is looked
//! up; what is found decides:
//!
//! ```text
//!   nothing           ─▶ enter the page as candidate
//!   a slot            ─▶ win a ref of it, plan the page for it
//!   a candidate       ─▶ its twin: take the next slot of the run, write the bytes just read,
//!                        publish (exchange the entry), plan the page, promote the candidate
//!   a slot that dies  ─▶ exchange the dead entry for the page as candidate
//! ```
//!
//! New slots are taken in the order of the pages, from one run of numbers, and written with one
//! call a batch *before* the index names them. So neighbours get neighbouring slots, and the same
//! run of pages in the next guest maps with one call. Several workers may find the same candidate:
//! the exchange decides, the loser gives its slot up (the number is spent) and takes the winner's.
//!
//! A candidate is promoted by whoever found its twin, in another chunk mostly. Two chunks are never
//! locked at once: the finder sets a bit and queues the chunk ([`Chunk::promote`]), and its next job
//! looks the fingerprint up again. It trusts nothing: the slot may have come and gone meanwhile.

use std::sync::Arc;

use wire::{CHUNK_PAGES, PageBits};

use crate::account::{Run, View};
use crate::chunk::{Chunk, Pages};
use crate::guest::{Fault, Guest};
use crate::page::{Entry, Fingerprint, Site, Slot, Tag};
use crate::read::{BATCH, Batch, Hasher};
use crate::realm::{Effects, Realm};
use crate::store::PageBytes;

/// Where promoted chunks are queued.
pub(crate) trait Promotions {
    /// Queues a chunk whose candidates were promoted.
    fn push(&self, chunk: Arc<Chunk>);
}

/// What a plan needs besides the chunk.
pub(crate) struct Context<'a> {
    pub(crate) hasher: &'a Hasher,
    pub(crate) use_zero_pages: bool,
    pub(crate) promotions: &'a dyn Promotions,
}

/// Buffers of a worker.
pub(crate) struct Desk {
    batch: Batch,
    settled: Vec<u16>,
    twins: Vec<Twin>,
    repeats: Vec<(usize, Fingerprint)>,
}

impl Desk {
    pub(crate) fn new() -> Self {
        Self {
            batch: Batch::new(),
            settled: Vec::with_capacity(CHUNK_PAGES),
            twins: Vec::with_capacity(BATCH),
            repeats: Vec::with_capacity(BATCH),
        }
    }
}

/// A page that equals a candidate, by fingerprint.
struct Twin {
    page: usize,
    /// Its place in the batch.
    at: usize,
    key: Fingerprint,
    candidate: Site,
}

/// What the index knows of a fingerprint.
enum Found {
    /// The page itself is the candidate now.
    Own,
    /// A slot, with a ref for the page.
    Canonical(Slot),
    /// Another page is the candidate.
    Twin(Site),
    /// Others were faster, several times: try in the next round.
    Lost,
}

/// How often a lookup starts over before it gives way to others.
const ATTEMPTS: usize = 16;

fn resolve(realm: &Realm, view: &View<'_>, key: Fingerprint, site: Site) -> Found {
    let own = Entry::Candidate(site);
    for _ in 0..ATTEMPTS {
        match realm.index.get_or_insert(key, own) {
            None => return Found::Own,
            Some(Entry::Candidate(other)) if other == site => return Found::Own,
            Some(Entry::Candidate(other)) => return Found::Twin(other),
            Some(Entry::Canonical(slot)) if view.try_ref(slot) => return Found::Canonical(slot),
            Some(dying) => {
                if realm.index.compare_exchange(key, dying, own).is_ok() {
                    return Found::Own;
                }
            }
        }
    }
    Found::Lost
}

/// One chunk being planned.
pub(crate) struct Plan<'a> {
    pub(crate) context: &'a Context<'a>,
    pub(crate) guest: &'a Guest,
    pub(crate) chunk: &'a Chunk,
    pub(crate) pages: &'a mut Pages,
    pub(crate) effects: &'a mut Effects,
    run: Run,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(
        context: &'a Context<'a>,
        guest: &'a Guest,
        chunk: &'a Chunk,
        pages: &'a mut Pages,
        effects: &'a mut Effects,
    ) -> Self {
        Self {
            context,
            guest,
            chunk,
            pages,
            effects,
            run: 0..0,
        }
    }

    fn realm(&self) -> &'a Realm {
        &self.guest.realm
    }

    /// Plans what can be planned: afterwards planned pages hold refs and wait to be asked for.
    pub(crate) fn make(mut self, desk: &mut Desk) {
        self.adopt_promoted();
        let mut settled = std::mem::take(&mut desk.settled);
        settled.clear();
        let is_settled =
            |page: usize| self.pages.tag(page) == Tag::Settled && self.pages.offered.contains(page);
        let busy = self
            .pages
            .busy
            .runs()
            .flat_map(|(first, count)| first..first + count);
        settled.extend(
            busy.filter(|&page| is_settled(page))
                .filter_map(|page| u16::try_from(page).ok()),
        );
        if let Err(error) = self.read(desk, &settled) {
            self.guest.condemn(&Fault::Unreadable(error));
        }
        desk.settled = settled;
        self.adopt_promoted();
        self.realm().slots.give_back(self.run);
    }

    /// Candidates that somebody found a twin of: each looks its fingerprint up again.
    fn adopt_promoted(&mut self) {
        let promoted: PageBits = self.chunk.take_promoted();
        if promoted.is_empty() {
            return;
        }
        let realm = self.realm();
        let view = realm.slots.view();
        for page in promoted
            .runs()
            .flat_map(|(first, count)| first..first + count)
        {
            if self.pages.tag(page) != Tag::Candidate {
                continue;
            }
            let key = self.pages.fingerprint(page);
            match resolve(realm, &view, key, self.chunk.site(page)) {
                Found::Own => {}
                Found::Canonical(slot) => self.pages.set_planned(page, slot),
                // Its entry is another's by now: to be a twin it needs its bytes again.
                Found::Twin(_) | Found::Lost => self.pages.set(page, Tag::Settled),
            }
        }
    }

    fn read(&mut self, desk: &mut Desk, settled: &[u16]) -> std::io::Result<()> {
        let mut rest = settled;
        while !rest.is_empty() {
            let part = rest.get(..BATCH).unwrap_or(rest);
            let memory = &*self.guest.memory;
            let read = desk
                .batch
                .fill(memory, self.chunk.address, part)?
                .min(part.len());
            self.look_up(desk, part.get(..read).unwrap_or_default());
            let mut done = read;
            if let Some(&unreadable) = part.get(read) {
                self.pages.back_off(unreadable.into(), Tag::Skipped);
                done += 1;
            }
            rest = rest.get(done..).unwrap_or_default();
        }
        Ok(())
    }

    fn look_up(&mut self, desk: &mut Desk, part: &[u16]) {
        let mut keys = [None; BATCH];
        for (at, key) in keys.iter_mut().enumerate().take(part.len()) {
            *key = desk.batch.page(at).and_then(|page| self.key(page));
        }
        desk.twins.clear();
        desk.repeats.clear();
        let realm = self.realm();
        let view = realm.slots.view();
        for ((at, &page), key) in part.iter().enumerate().zip(keys) {
            let page = usize::from(page);
            let Some(key) = key else {
                self.pages.set(page, Tag::PlannedZero);
                continue;
            };
            if desk.twins.iter().any(|twin| twin.key == key) {
                desk.repeats.push((page, key));
            } else if let Some(candidate) = self.enter(&view, page, key) {
                desk.twins.push(Twin {
                    page,
                    at,
                    key,
                    candidate,
                });
            }
        }
        drop(view);
        self.publish(&desk.batch, &desk.twins);
        let view = realm.slots.view();
        for &(page, key) in &desk.repeats {
            self.enter(&view, page, key);
        }
    }

    fn key(&self, page: &PageBytes) -> Option<Fingerprint> {
        let hasher = self.context.hasher;
        match hasher.fingerprint(page) {
            None if !self.context.use_zero_pages => Some(hasher.fingerprint_any(page)),
            other => other,
        }
    }

    /// Looks a settled page up and enters or plans it; gives the candidate it is a twin of.
    fn enter(&mut self, view: &View<'_>, page: usize, key: Fingerprint) -> Option<Site> {
        match resolve(self.realm(), view, key, self.chunk.site(page)) {
            Found::Own => self.pages.set_candidate(page, key),
            Found::Canonical(slot) => self.pages.set_planned(page, slot),
            Found::Twin(candidate) => return Some(candidate),
            Found::Lost => {}
        }
        None
    }

    /// Gives twins slots, as many neighbours at once as the run of numbers allows.
    fn publish(&mut self, batch: &Batch, twins: &[Twin]) {
        let mut rest = twins;
        while !rest.is_empty() {
            if self.run.is_empty() {
                match self.realm().slots.take_run() {
                    Ok(run) => self.run = run,
                    Err(error) => {
                        tracing::warn!(%error, "no slots for canonical pages");
                        return self.skip(rest);
                    }
                }
            }
            let room = usize::try_from(self.run.end - self.run.start).unwrap_or(rest.len());
            let (now, later) = rest.split_at(room.min(rest.len()));
            let first = Slot(self.run.start);
            self.run.start += now.len() as u64;
            self.publish_run(batch, now, first);
            rest = later;
        }
    }

    fn publish_run(&mut self, batch: &Batch, twins: &[Twin], first: Slot) {
        let slots = || (first.0..).map(Slot);
        let bytes: Vec<_> = twins
            .iter()
            .filter_map(|twin| batch.page(twin.at))
            .collect();
        if let Err(error) = self.realm().store.write(first, &bytes) {
            tracing::warn!(%error, "the store cannot take canonical pages");
            let spent: Vec<_> = slots().take(twins.len()).collect();
            self.realm().slots.bury(&spent);
            return self.skip(twins);
        }
        let realm = self.realm();
        let view = realm.slots.view();
        for (twin, slot) in twins.iter().zip(slots()) {
            view.publish(slot, twin.key);
            let (candidate, canonical) = (Entry::Candidate(twin.candidate), Entry::Canonical(slot));
            if realm
                .index
                .compare_exchange(twin.key, candidate, canonical)
                .is_ok()
            {
                self.pages.set_planned(twin.page, slot);
                self.promote(twin.candidate);
            } else {
                self.effects.unref.push(slot);
                self.enter(&view, twin.page, twin.key);
            }
        }
    }

    /// Leaves twins that got no slot alone for a while.
    fn skip(&mut self, twins: &[Twin]) {
        let pages = twins.iter().map(|twin| twin.page);
        pages.for_each(|page| self.pages.back_off(page, Tag::Skipped));
    }

    fn promote(&self, candidate: Site) {
        if candidate.chunk == self.chunk.id {
            self.chunk.promote(candidate.page); // adopted at the end of this job
        } else if let Some(chunk) = self.realm().chunks.get(candidate.chunk) {
            chunk.promote(candidate.page);
            if chunk.enqueue() {
                self.context.promotions.push(chunk);
            }
        }
    }
}

/// Takes plans back that nobody asked for: their pages are settled again.
pub(crate) fn withdraw(chunk: &Chunk, pages: &mut Pages, effects: &mut Effects) {
    for page in 0..CHUNK_PAGES {
        if matches!(pages.tag(page), Tag::Planned | Tag::PlannedZero) {
            effects.discard(pages, page, chunk.site(page));
            pages.set(page, Tag::Settled);
        }
    }
}
