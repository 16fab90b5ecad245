//! Request: the questions to an agent about pages of a chunk.
//!
//! The refs of asked pages were taken before (I4). The states that an answer gives the pages
//! are told in [`outcomes`](crate::scan::outcomes).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use wire::{Merge, PageBits, Question, Target, Unmerge};

use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::guest::agent::{Pending, Talk};
use crate::merge::plan::{Plan, skip};
use crate::merge::span;
use crate::page::{Slot, StoreId, Tag};
use crate::scan::outcomes;
use crate::sync::{Guard, lock};

/// A stretch of pages that maps with one call: planned ones, and those enclosed between them.
struct Stretch {
    first: usize,
    end: usize,
    /// How many are planned.
    pages: usize,
    /// Whether it continues a merged neighbour, and so takes no new mapping.
    joins: bool,
    /// That of its first page, from which the others follow; none for zeros.
    slot: Option<Slot>,
}

impl Stretch {
    /// The slot that `page` has, or would have.
    fn slot(&self, page: usize) -> Option<Slot> {
        self.slot.map(|slot| slot.plus(page - self.first))
    }
}

impl<'a> Plan<'a> {
    /// Merges the planned pages, within the guest's budget of mappings. True while another worker talks to the guest: come again, and insist.
    pub(crate) fn merge(&mut self) -> bool {
        if !self.change.guest.merges_again() {
            self.leave_broken();
        }
        self.leave_huge();
        let mut stretches = stretches(&self.change, span::encloses(self.change.guest));
        let least = least_run(self.change.guest, self.context.max_mappings);
        stretches.retain(|stretch| {
            let fits = stretch.slot.is_none() || stretch.joins || stretch.pages >= least;
            if !fits {
                self.change.withdraw(stretch.first..stretch.end, skip);
            }
            fits
        });
        if stretches.is_empty() {
            return false;
        }
        let Some(mut talk) = self.take_talk() else {
            return true;
        };
        // A question for each store; one is the rule. What is not asked for stays planned.
        while self.change.guest.takes_jobs(self.context.patience) && talk.pending.is_none() {
            let store = |s: &Stretch| s.slot.map(Slot::store);
            // Zeros are of no store: where there is nothing else the question names the first.
            let first = stretches.iter().find_map(store).unwrap_or_default();
            let other = |s: &mut Stretch| store(s).is_some_and(|its| its != first);
            let later: Vec<_> = stretches.extract_if(.., other).collect();
            self.ask_store(&mut talk, first, &stretches);
            if later.is_empty() {
                break;
            }
            stretches = later;
        }
        false
    }

    /// Merges stretches of one store, and of zeros.
    fn ask_store(&mut self, talk: &mut Talk, store: StoreId, stretches: &[Stretch]) {
        let mut question = Merge::new(self.change.chunk.address, store.0.into());
        let (mut asked, mut enclosed) = (0, PageBits::EMPTY);
        let all = stretches
            .iter()
            .flat_map(|s| (s.first..s.end).map(|page| (page, s.slot(page))));
        for (page, slot) in all {
            let (target, tag) = match (self.change.tag(page), slot) {
                (Tag::Planned, Some(slot)) => (Target::Slot(slot.number()), Some(Tag::Asked)),
                (Tag::PlannedZero, _) => (Target::Zeros, Some(Tag::AskedZero)),
                _ => (Target::Enclosed, None),
            };
            if u16::try_from(page).is_ok_and(|page| question.push_as(page, target)) {
                asked += 1;
                match tag {
                    Some(tag) => self.change.set(page, tag),
                    None => enclosed.insert(page),
                }
            }
        }
        let is_new = |s: &&Stretch| s.slot.is_some() && !s.joins;
        let new = stretches.iter().filter(is_new).count() as u64;
        let counters = &self.change.guest.counters;
        counters.vmas_added.fetch_add(2 * new, Relaxed);
        let pending = Pending::Merged(Arc::clone(self.change.chunk), enclosed);
        self.exchange(talk, &Question::Merge(question), pending, asked);
    }

    /// Takes back the plans for a chunk that is one huge page, unless splitting it is worth it.
    fn leave_huge(&mut self) {
        let busy = self.change.busy;
        let is_planned = |page: &usize| self.change.tag(*page).is_planned();
        let worth = self.context.worth_splitting;
        self.change.kept = self.change.huge && busy.pages().filter(is_planned).count() < worth;
        if self.change.kept {
            self.change.withdraw(busy.pages(), skip);
        }
    }

    /// Takes back the plans for broken pages, which are not to be merged again now.
    fn leave_broken(&mut self) {
        let broken = self.change.busy & self.change.stored;
        self.change
            .withdraw(broken.pages(), |pages, page| pages.set(page, Tag::Broken));
    }

    /// Gives these merged pages private copies; true as in [`Self::merge`].
    pub(crate) fn unmerge(&mut self, wanted: PageBits) -> bool {
        if wanted.is_empty() {
            return false;
        }
        let Some(mut talk) = self.take_talk() else {
            return true;
        };
        if !self.change.guest.takes_jobs(self.context.patience) || talk.pending.is_some() {
            return false;
        }
        let question = Question::Unmerge(Unmerge {
            chunk: self.change.chunk.address,
            pages: wanted,
        });
        let pending = Pending::Unmerged(Arc::clone(self.change.chunk), wanted);
        self.exchange(&mut talk, &question, pending, wanted.len());
        false
    }

    fn take_talk(&self) -> Option<Guard<'a, Talk>> {
        // The thread that holds it lets go after the patience at the latest.
        self.change.guest.talk.try_lock().or_else(|| {
            self.context.insist.then(|| {
                (self.context.step_aside)();
                lock(&self.change.guest.talk)
            })
        })
    }

    /// Puts a question, waits for the answer and accounts it; a late one stays pending.
    fn exchange(&mut self, talk: &mut Talk, question: &Question, pending: Pending, asked: usize) {
        let Some(link) = talk.link.as_mut() else {
            return;
        };
        let begin = Instant::now();
        let answer = link.send(question).and_then(|()| {
            (self.context.step_aside)();
            link.receive(self.context.patience)
        });
        self.change.guest.note_time(begin.elapsed(), asked);
        let taken = answer.and_then(|answer| match answer {
            Some(answer) => outcomes::take(&mut self.change, &pending, &answer),
            None => {
                talk.pending = Some(pending);
                self.change.guest.set_late(true);
                Ok(())
            }
        });
        if let Err(fault) = taken {
            self.change.guest.condemn(&fault);
        }
    }
}

/// The planned pages as stretches, in ascending order. With `encloses` they reach over private pages where the slots allow
/// it.
fn stretches(pages: &Pages, encloses: bool) -> Vec<Stretch> {
    let slots = pages.slots();
    let slot_of = |page: usize| slots.get(page).copied().flatten();
    let mut all: Vec<Stretch> = Vec::new();
    for page in pages.busy.pages() {
        let slot = match pages.tag(page) {
            Tag::Planned => slot_of(page),
            Tag::PlannedZero => None,
            _ => continue,
        };
        let follows = |last: &&mut Stretch| {
            let next = page == last.end;
            let encloses = || encloses && span::can_enclose(pages, last.end, page);
            last.slot(page) == slot && (next || slot.is_some() && encloses())
        };
        match all.last_mut().filter(follows) {
            Some(last) => {
                last.pages += 1;
                last.end = page + 1;
            }
            None => all.push(Stretch {
                first: page,
                end: page + 1,
                pages: 1,
                joins: false,
                slot,
            }),
        }
    }
    let merged = |page: usize| slot_of(page).filter(|_| pages.merged.contains(page));
    for stretch in all.iter_mut().filter(|stretch| stretch.slot.is_some()) {
        let before = stretch.first.checked_sub(1).and_then(merged);
        let after = merged(stretch.end);
        stretch.joins = before.map(|slot| slot.plus(1)) == stretch.slot
            || after.is_some() && after == stretch.slot(stretch.end);
    }
    all
}

/// Whether `guest` may have new mappings at all.
pub(crate) fn may_map(guest: &Guest, max_mappings: u64) -> bool {
    least_run(guest, max_mappings) < usize::MAX
}

/// The mappings that a guest may have for merging to go on, by the kernel's limit: a quarter of that, at least 4096, is left to the
/// guest itself.
#[must_use]
pub fn mapping_budget(max_mappings: u64) -> u64 {
    max_mappings.saturating_sub((max_mappings / 4).max(4096))
}

/// The shortest run worth its two mappings: 1 while the guest has used less than half of its
/// budget, then doubling, 512 at the end, none beyond it.
fn least_run(guest: &Guest, max_mappings: u64) -> usize {
    let budget = mapping_budget(max_mappings);
    let counters = &guest.counters;
    let used = counters.vmas.load(Relaxed) + counters.vmas_added.load(Relaxed);
    let half = budget / 2;
    match used {
        _ if used >= budget => usize::MAX,
        _ if used < half => 1,
        _ => 2 << ((used - half) * 9 / (budget - half)).min(8),
    }
}
