//! The pages of a question as items, which go through the window in batches.

use wire::{Merge, Target};

/// Pages out of reach at a time: bounds how long a guest's thread can wait.
pub(super) const BATCH_PAGES: usize = 64;

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

    pub(super) fn is_full(&self) -> bool {
        self.len == ROOM
    }

    /// Adds an item where there is room.
    pub(super) fn push(&mut self, item: Item) {
        if let Some(place) = self.items.get_mut(self.len) {
            *place = item;
            self.len += 1;
        }
    }

    /// The items; there are none then.
    pub(super) fn take(&mut self) -> &[Item] {
        let len = std::mem::take(&mut self.len);
        self.items.get(..len).unwrap_or_default()
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

/// How many items from `at` on are equal to their slots and can be mapped by one call.
pub(super) fn equal_run(items: &[Item], equal: &[bool], at: usize) -> usize {
    let follows = |a: &Item, b: &Item| match (a.1, b.1) {
        (Target::Zeros, Target::Zeros) => a.0 + 1 == b.0,
        (Target::Slot(x), Target::Slot(y)) => a.0 + 1 == b.0 && x + 1 == y,
        _ => false,
    };
    let mut run = 1;
    while let (Some(a), Some(b)) = (items.get(at + run - 1), items.get(at + run))
        && equal.get(at + run) == Some(&true)
        && follows(a, b)
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
