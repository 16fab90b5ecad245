//! Prediction: pages that are planned unread, because samples say which slots they equal.
//!
//! A prediction proposes pairs of a page and a slot. Samples of it are read. If they are as proposed, the pairs are
//! accepted; else the pages are read like all others. Pages without a pair are most likely private. They are put off until
//! all other chunks have been visited: pages that save memory come first. Three sources propose:
//!
//! ```text
//!   the pattern of the place      slots by page, as the chunk there of another guest was merged last
//!     pattern   70 71 72 73  ·  ·  90 91 92 93 94  ·
//!     chunk      ●  ?  ?  ?  ○  ○   ?  ●  ?  ?  ●  ○      ● sampled, equal   ? planned unread   ○ put off
//!
//!   groups of 16                  neighbours have neighbouring slots
//!     slot   70               85  86              101
//!     page   ●  ?  ?  ?  ?  ?  ●   ●  ?  ?  ?  ?  ?  ●   ○
//!
//!   zeros                         long runs of them, for which no slot is needed
//! ```
//!
//! **The pattern.** [`SAMPLES`] pages, spread over it, are read. If each equals its slot, all are planned for theirs.
//!
//! **Groups.** The first and the last page of a group of [`GROUP`] may equal slots that are as far apart as they are. Then
//! the pages between most likely equal the slots between. Of a run that some guest shares already this saves reading,
//! hashing and looking up at least seven pages of eight. Where at least half of a chunk's groups begin with a page that
//! equals a slot, its shared content is in slots by now. Then a group is put off if no other guest has its ends or its
//! middle. Shared and private pages may alternate in short runs: many groups that are neither shared nor new nor zeros show
//! that. Then nothing is put off, for all shared pages are to be mapped together.
//!
//! **Zeros.** Where three groups in a row begin with zeros, the pages between are most likely zeros: a guest's kernel clears memory in
//! long runs. In shorter ones the middle and the end are read, too. That needs neither slots nor nodes, so it is proposed where
//! nothing else is. There only one group in [`SPARSE`] is looked at first, so that memory without zeros costs little more.
//!
//! The agent compares every byte before it merges (I1), and each pair takes its ref before the agent is asked (I4). A wrong
//! one costs as much as any page that was written between the reading and the merge. From then on the page has a back-off
//! level, and such pages are read.

use wire::CHUNK_PAGES;

use crate::domain::patterns::LEAST;
use crate::domain::refs::Taken;
use crate::merge::plan::{Buffers, Plan};
use crate::merge::read::BATCH;
use crate::page::{Entry, Slot, StoreId, Tag};

/// Pages read of a chunk that may be like the pattern.
const SAMPLES: usize = 4;
/// Pages that are predicted together.
const GROUP: usize = 16;
/// One group in so many is looked at first where only zeros are looked for.
const SPARSE: usize = 4;
/// Nothing is put off where more than one in so many groups is neither shared nor new nor zeros, as far as was read.
const MIXED: usize = 4;

/// What pages of a chunk most likely are.
#[derive(Default)]
struct Prediction {
    /// Pages, and the slots that they equal.
    pairs: Vec<(usize, Slot)>,
    /// Pages of zeros.
    zeros: Vec<usize>,
    /// Pages that no other guest has.
    put_off: Vec<usize>,
}

/// What a probe found a page to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Probed {
    /// It equals this slot.
    Slot(Slot),
    /// No page is known to be like it.
    New,
    /// Zeros, which take no slot.
    Zeros,
    /// Like a candidate.
    Other,
}

/// What the pages of a chunk were found to be, by page.
struct Known([Option<Probed>; CHUNK_PAGES]);

impl Known {
    fn nothing() -> Self {
        Self([None; CHUNK_PAGES])
    }

    fn at(&self, page: usize) -> Option<Probed> {
        self.0.get(page).copied().flatten()
    }

    /// The slot that a page equals.
    fn slot(&self, page: usize) -> Option<Slot> {
        match self.at(page) {
            Some(Probed::Slot(slot)) => Some(slot),
            _ => None,
        }
    }

    /// Whether two pages equal slots that are as far apart as they are.
    fn fit(&self, first: usize, last: usize) -> bool {
        let (first_slot, last_slot) = (self.slot(first), self.slot(last));
        first_slot.is_some_and(|slot| last_slot == Some(slot.plus(last - first)))
    }

    fn is_zeros(&self, page: usize) -> bool {
        self.at(page) == Some(Probed::Zeros)
    }

    /// Whether the beginnings of three groups in a row are zeros, this one's and its end's among them.
    fn in_a_long_run(&self, first: usize) -> bool {
        let before = first
            .checked_sub(GROUP)
            .is_some_and(|before| self.is_zeros(before));
        let begins = self.is_zeros(first) && self.is_zeros(first + GROUP);
        begins && (before || self.is_zeros(first + 2 * GROUP))
    }

    /// Whether a group is zeros, by its neighbours, or by its ends and its middle.
    fn all_zeros(&self, first: usize) -> bool {
        let ends = self.is_zeros(first + GROUP - 1) || self.is_zeros(first + GROUP);
        let whole = ends && self.is_zeros(first) && self.is_zeros(first + GROUP / 2);
        whole || self.in_a_long_run(first)
    }

    /// Whether no other guest has the ends and the middle of a group.
    fn is_new(&self, first: usize) -> bool {
        let new = |page| self.at(page) == Some(Probed::New);
        [0, GROUP / 2, GROUP - 1]
            .iter()
            .all(|place| new(first + place))
    }
}

impl Plan<'_> {
    /// Plans pages that can be planned unread; leaves in `settled` what is to be read.
    ///
    /// # Errors
    /// When the guest's memory cannot be read.
    pub(super) fn predict(
        &mut self,
        buffers: &mut Buffers,
        settled: &mut Vec<usize>,
    ) -> std::io::Result<()> {
        // A whole visit is for pages that were not predicted at the first.
        if self.whole {
            return Ok(());
        }
        // Pages that are bound to their nodes would have to be asked for these one by one.
        let prediction = match self.is_bound() || self.domain().slots.live() < GROUP as u64 {
            true => self.propose_zeros(buffers)?,
            false => match self.propose_pattern() {
                Some(pattern) if self.holds(&pattern, buffers)? => pattern,
                _ => self.propose_groups(buffers)?,
            },
        };
        self.accept(prediction);
        let later = self.change.later;
        settled.retain(|&page| self.change.tag(page) == Tag::Settled && !later.contains(page));
        Ok(())
    }

    /// Plans the pairs that win a ref, and leaves the rest for a later visit.
    fn accept(&mut self, prediction: Prediction) {
        let view = self.domain().slots.view();
        for (page, slot) in prediction.pairs {
            if view.try_guess(slot) == Taken::Won {
                self.change.set_planned(page, slot);
            }
        }
        for page in prediction.zeros {
            self.change.set(page, Tag::PlannedZero);
        }
        for page in prediction.put_off {
            self.change.later.insert(page);
        }
    }

    /// As the chunk at the same place was merged last.
    fn propose_pattern(&self) -> Option<Prediction> {
        let pattern = self.domain().patterns.get(self.change.chunk.place)?;
        let mut prediction = Prediction::default();
        for page in (0..CHUNK_PAGES).filter(|&page| self.is_fresh(page)) {
            match pattern.get(page) {
                Some(slot) => prediction.pairs.push((page, slot)),
                None => prediction.put_off.push(page),
            }
        }
        (prediction.pairs.len() >= LEAST).then_some(prediction)
    }

    /// Whether samples of the pairs are as proposed.
    fn holds(&self, prediction: &Prediction, buffers: &mut Buffers) -> std::io::Result<bool> {
        let pairs = &prediction.pairs;
        let last = pairs.len().saturating_sub(1);
        let samples = (0..SAMPLES).filter_map(|n| pairs.get(n * last / (SAMPLES - 1)).copied());
        let samples: Vec<_> = samples.collect();
        let mut known = Known::nothing();
        let pages: Vec<_> = samples.iter().map(|&(page, _)| page).collect();
        self.probe(buffers, &pages, &mut known)?;
        let equals = |&(page, slot): &(usize, Slot)| known.slot(page) == Some(slot);
        Ok(samples.iter().all(equals))
    }

    /// The groups of which nothing is known.
    fn groups(&self) -> Vec<usize> {
        let all = (0..CHUNK_PAGES).step_by(GROUP);
        all.filter(|&first| (first..first + GROUP).all(|page| self.is_fresh(page)))
            .collect()
    }

    /// The groups of zeros.
    fn propose_zeros(&self, buffers: &mut Buffers) -> std::io::Result<Prediction> {
        let groups = self.groups();
        let mut known = Known::nothing();
        if !self.context.knobs.use_zero_pages {
            return Ok(Prediction::default());
        }
        let sparse: Vec<_> = groups.iter().copied().step_by(SPARSE).collect();
        self.probe(buffers, &sparse, &mut known)?;
        if !groups.iter().any(|&first| known.is_zeros(first)) {
            return Ok(Prediction::default());
        }
        let others = groups.iter().filter(|&&first| known.at(first).is_none());
        let others: Vec<_> = others.copied().collect();
        self.probe(buffers, &others, &mut known)?;
        self.probe(buffers, &more_of_zeros(&groups, &known), &mut known)?;
        let zeros = groups.into_iter().filter(|&first| known.all_zeros(first));
        Ok(Prediction {
            zeros: zeros.flat_map(|first| first..first + GROUP).collect(),
            ..Prediction::default()
        })
    }

    /// The groups whose ends fit.
    fn propose_groups(&self, buffers: &mut Buffers) -> std::io::Result<Prediction> {
        let groups = self.groups();
        let mut known = Known::nothing();
        self.probe(buffers, &groups, &mut known)?;
        let begins = groups.iter().filter(|&&first| known.slot(first).is_some());
        let is_shared = 2 * begins.count() >= groups.len();
        // The start of the next group tells as much as the end of this one.
        let more = groups.iter().flat_map(|&first| {
            let (middle, last) = (first + GROUP / 2, first + GROUP - 1);
            match known.at(first) {
                Some(Probed::Slot(_)) if !known.fit(first, first + GROUP) => [None, Some(last)],
                Some(Probed::New) if is_shared => [Some(middle), Some(last)],
                _ => [None; 2],
            }
        });
        let mut more: Vec<usize> = more.flatten().collect();
        more.extend(more_of_zeros(&groups, &known));
        more.sort_unstable();
        self.probe(buffers, &more, &mut known)?;
        let fits = |first| known.fit(first, first + GROUP - 1) || known.fit(first, first + GROUP);
        let mixed = groups
            .iter()
            .filter(|&&first| !fits(first) && !known.is_new(first) && !known.all_zeros(first));
        let puts_off = is_shared && MIXED * mixed.count() <= groups.len();
        let mut prediction = Prediction::default();
        for first in groups {
            let group = first..first + GROUP;
            match known.slot(first).filter(|_| fits(first)) {
                Some(slot) => {
                    let pairs = group.map(|page| (page, slot.plus(page - first)));
                    prediction.pairs.extend(pairs);
                }
                None if known.all_zeros(first) => prediction.zeros.extend(group),
                None if puts_off && known.is_new(first) => prediction.put_off.extend(group),
                None => {}
            }
        }
        Ok(prediction)
    }

    /// Reads `pages`, in ascending order, and notes what they are.
    fn probe(
        &self,
        buffers: &mut Buffers,
        pages: &[usize],
        known: &mut Known,
    ) -> std::io::Result<()> {
        let memory = &*self.change.guest.memory;
        let index = self.domain().index(StoreId::default());
        for part in pages.chunks(BATCH) {
            let read = buffers
                .batch
                .fill(memory, self.change.chunk.address, part)?;
            let key = |at| self.key(buffers.batch.page(at));
            let keys: Vec<_> = (0..read).map(key).collect();
            let wanted: Vec<_> = keys.iter().copied().flatten().collect();
            index.expect(&wanted);
            for (&page, key) in part.iter().zip(keys) {
                known.0[page] = Some(match key.map(|key| index.get(key)) {
                    Some(Some(Entry::Canonical(slot))) => Probed::Slot(slot),
                    Some(None) => Probed::New,
                    None => Probed::Zeros,
                    Some(Some(Entry::Candidate(_))) => Probed::Other,
                });
            }
        }
        Ok(())
    }
}

/// What is to be read besides of groups that begin with zeros, outside of long runs: the middle, and the end if the next group
/// tells nothing of it.
fn more_of_zeros(groups: &[usize], known: &Known) -> Vec<usize> {
    let begin = groups.iter().filter(|&&first| known.is_zeros(first));
    let short = begin.filter(|&&first| !known.in_a_long_run(first));
    let more = short.flat_map(|&first| {
        let last = (!known.is_zeros(first + GROUP)).then_some(first + GROUP - 1);
        [Some(first + GROUP / 2), last]
    });
    more.flatten().collect()
}
