//! Following: a chunk that is planned as the chunk at the same place of another guest was merged.
//!
//! ```text
//!   pattern   70 71 72 73  ·  ·  90 91 92 93 94  ·      slots, by page
//!   chunk      ●  ?  ?  ?  ○  ○   ?  ●  ?  ?  ●  ○      ● sampled, equal   ? planned unread   ○ left for later
//! ```
//!
//! [`SAMPLES`] pages, spread over the pattern, are read. If each equals its slot of the pattern, all are planned for
//! theirs. As with all guesses the agent compares every byte before it merges (I1), and refs are taken before it
//! is asked (I4). A page that was something else costs what a page costs that was written meanwhile. What the
//! pattern does not have is most likely private and waits until all other chunks have been visited.

use wire::CHUNK_PAGES;

use crate::domain::patterns::LEAST;
use crate::domain::refs::Taken;
use crate::merge::guess::Known;
use crate::merge::plan::{Desk, Plan};
use crate::page::Slot;

/// Pages read of a chunk that may be like the pattern.
const SAMPLES: usize = 4;

impl Plan<'_> {
    /// Plans the pages that are likely merged as the pattern says, if the chunk is like it. False if it is not.
    ///
    /// # Errors
    /// When the guest's memory cannot be read.
    pub(super) fn follow(&mut self, desk: &mut Desk) -> std::io::Result<bool> {
        let Some(pattern) = self.domain().patterns.get(self.chunk.place) else {
            return Ok(false);
        };
        let (mut alike, mut others) = (Vec::new(), Vec::new());
        for page in (0..CHUNK_PAGES).filter(|&page| self.is_fresh(page)) {
            match pattern.get(page) {
                Some(slot) => alike.push((page, slot)),
                None => others.push(page),
            }
        }
        if alike.len() < LEAST || !self.is_like(&alike, desk)? {
            return Ok(false);
        }
        let view = self.domain().slots.view();
        for (page, slot) in alike {
            if view.try_ref(slot) == Taken::Won {
                self.pages.set_planned(page, slot);
            }
        }
        others
            .into_iter()
            .for_each(|page| self.pages.later.insert(page));
        Ok(true)
    }

    /// Whether samples of these pages equal the slots beside them.
    fn is_like(&self, alike: &[(usize, Slot)], desk: &mut Desk) -> std::io::Result<bool> {
        let last = alike.len().saturating_sub(1);
        let samples = (0..SAMPLES).filter_map(|n| alike.get(n * last / (SAMPLES - 1)).copied());
        let samples: Vec<_> = samples.collect();
        let mut known = Known::nothing();
        self.probe(desk, samples.iter().map(|&(page, _)| page), &mut known)?;
        let equals = |&(page, slot): &(usize, Slot)| known.slot(page) == Some(slot);
        Ok(samples.iter().all(equals))
    }
}
