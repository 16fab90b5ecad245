//! The pages of a question as items, which go through the window in batches.

use wire::{Merge, Target};

/// Pages out of reach at a time, and runs of them: both bound how long a guest's thread can wait. A page takes about
/// a microsecond, a run ten times as long.
pub(super) const BATCH_PAGES: usize = wire::MAX_OUT;
const BATCH_RUNS: usize = 32;

/// A page and its target: its place in the chunk, and what becomes of it.
pub(super) type Item = (usize, Target);

/// Room for so many items.
pub(super) struct Items<const ROOM: usize> {
    items: [Item; ROOM],
    len: usize,
}

impl<const ROOM: usize> Items<ROOM> {
    pub(super) fn new() -> Self {
        Self {
            items: [(0, Target::Zeros); ROOM],
            len: 0,
        }
    }

    /// Adds an item; false if there is no room for it.
    pub(super) fn push(&mut self, item: Item) -> bool {
        let place = self.items.get_mut(self.len);
        let fits = place.map(|place| *place = item).is_some();
        self.len += usize::from(fits);
        fits
    }

    fn all(&self) -> &[Item] {
        self.items.get(..self.len).unwrap_or_default()
    }

    /// The items; there are none then.
    pub(super) fn take(&mut self) -> &[Item] {
        let len = std::mem::take(&mut self.len);
        self.items.get(..len).unwrap_or_default()
    }
}

/// Items that go through the window together.
pub(super) struct Batch {
    items: Items<BATCH_PAGES>,
    runs: usize,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self {
            items: Items::new(),
            runs: 0,
        }
    }

    /// Adds an item; false if there is no room for it.
    pub(super) fn push(&mut self, item: Item) -> bool {
        let last = self.items.all().last();
        let goes_on = last.is_some_and(|&last| follows(last, item));
        let runs = self.runs + usize::from(!goes_on);
        let fits = runs <= BATCH_RUNS && self.items.push(item);
        if fits {
            self.runs = runs;
        }
        fits
    }

    /// The items; there are none then.
    pub(super) fn take(&mut self) -> &[Item] {
        self.runs = 0;
        self.items.take()
    }
}

/// The pages a question names, with their targets.
pub(super) fn pages(question: &Merge) -> impl Iterator<Item = Item> + '_ {
    let ops = question.ops().iter();
    ops.flat_map(|op| (0..op.pages).map(|n| (usize::from(op.first + n), op.target.nth(n))))
}

/// How many items from `at` on are neighbours in the chunk.
pub(super) fn adjacent(items: &[Item], at: usize) -> usize {
    let rest = items.get(at..).unwrap_or_default();
    1 + rest
        .windows(2)
        .take_while(|w| matches!(w, [a, b] if a.0 + 1 == b.0))
        .count()
}

/// Whether one call maps both: neighbours of one kind, with neighbouring slots if they have any.
fn follows(one: Item, next: Item) -> bool {
    one.0 + 1 == next.0 && one.1.nth(1) == next.1
}

/// How many items from `at` on are equal to their slots and can be mapped by one call.
pub(super) fn equal_run(items: &[Item], equal: &[bool], at: usize) -> usize {
    let mut run = 1;
    while let (Some(&last), Some(&next)) = (items.get(at + run - 1), items.get(at + run))
        && equal.get(at + run) == Some(&true)
        && follows(last, next)
    {
        run += 1;
    }
    run
}

/// Calls `each` with the place and the length of every run of neighbours.
pub(super) fn each_run(items: &[Item], mut each: impl FnMut(usize, usize)) {
    let mut at = 0;
    while at < items.len() {
        let run = adjacent(items, at);
        each(at, run);
        at += run;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths of the batches that these items make.
    fn batches(items: impl Iterator<Item = Item>) -> Vec<usize> {
        let (mut batch, mut all) = (Batch::new(), Vec::new());
        for item in items {
            if !batch.push(item) {
                all.push(batch.take().len());
                assert!(batch.push(item));
            }
        }
        all.push(batch.take().len());
        all
    }

    #[test]
    fn a_batch_is_bounded_in_pages_and_runs() {
        let slot = |page| Target::Slot(1000 + page as u64);
        let one_run = (0..300).map(|page| (page, slot(page)));
        assert_eq!(batches(one_run), [128, 128, 44]);
        let single_pages = (0..100).map(|page| (page, slot(2 * page)));
        assert_eq!(batches(single_pages), [32, 32, 32, 4]);
        let with_holes = (0..100).map(|page| (2 * page, Target::Zeros));
        assert_eq!(batches(with_holes), [32, 32, 32, 4]);
        let enclosed = |page: usize| page % 8 < 4;
        let spans = (0..512).map(|page| match enclosed(page) {
            true => (page, Target::Enclosed),
            false => (page, slot(page)),
        });
        assert_eq!(batches(spans), [128; 4]);
        assert_eq!(batches(std::iter::empty()), [0]);
    }
}
