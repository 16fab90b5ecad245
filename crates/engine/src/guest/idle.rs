//! Idle blocks: memory in which nothing happens is looked at half as often.
//!
//! A look costs the kernel a walk of the page tables, and on a host at rest these walks are all that is left to
//! pay. So a guest's memory is watched in blocks. Of a block that was found as it had been twice in a row,
//! every other look is left out:
//!
//! ```text
//!   look       1   2   3   4   5   6   7   8   9  10
//!   found      w   .   .   -   .   -   .   -   w   .      w written, . as it was, - left out
//! ```
//!
//! A write to such a block is noticed a period later than elsewhere. Nothing is lost by that: whatever is true of
//! a page that was left out is true of one that settled later.

use std::collections::BTreeMap;
use std::ops::Range;

/// The size of a block, and the most that is scanned with one call. The kernel holds the guest's memory map all along:
/// about 0.3 ms where every sixteenth page begins a mapping.
const BLOCK: u64 = 64 << 20;
/// Looks in a row that must find nothing.
const QUIET: u8 = 2;

/// The parts of a range by block.
pub(crate) fn blocks(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let start = at;
        at = (start / BLOCK + 1).saturating_mul(BLOCK).min(range.end);
        (start < at).then_some(start..at)
    })
}

/// Whether two addresses lie in different blocks.
pub(crate) fn are_apart(one: u64, other: u64) -> bool {
    one / BLOCK != other / BLOCK
}

/// What is known of a guest's blocks.
#[derive(Debug, Default)]
pub(crate) struct IdleBlocks(BTreeMap<u64, Block>);

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// Looks in a row that found nothing.
    quiet: u8,
    /// Whether this look is left out.
    left_out: bool,
}

impl Block {
    /// The block `number` in the next look. Half of them begin one later, so that not all are due together.
    fn next(self, number: u64) -> Self {
        let odd = u8::from(!number.is_multiple_of(2));
        match !self.left_out && self.quiet >= QUIET + odd {
            true => Self {
                left_out: true,
                ..self
            },
            false => Self {
                quiet: self.quiet.saturating_add(1),
                left_out: false,
            },
        }
    }
}

impl IdleBlocks {
    /// Begins a look; with `all` nothing is left out.
    pub(crate) fn begin(&mut self, all: bool) -> Look<'_> {
        if all {
            self.0.clear();
        }
        Look {
            before: &mut self.0,
            now: BTreeMap::new(),
        }
    }
}

/// One look at a guest.
#[derive(Debug)]
pub(crate) struct Look<'a> {
    before: &'a mut BTreeMap<u64, Block>,
    now: BTreeMap<u64, Block>,
}

impl Look<'_> {
    /// Whether the block of `address` is left out.
    pub(crate) fn leaves_out(&mut self, address: u64) -> bool {
        let number = address / BLOCK;
        let before = self.before.get(&number).copied();
        let next = || before.unwrap_or_default().next(number);
        self.now.entry(number).or_insert_with(next).left_out
    }

    /// Whether this look has not come to the block of `address` yet.
    pub(crate) fn begins_block(&self, address: u64) -> bool {
        !self.now.contains_key(&(address / BLOCK))
    }

    /// Ends the look at the blocks from that of address `from` up to that of `next`, or at all behind, which found something
    /// at these addresses.
    pub(crate) fn end(mut self, stirred: &[u64], from: u64, next: Option<u64>) {
        for address in stirred {
            if let Some(block) = self.now.get_mut(&(address / BLOCK)) {
                block.quiet = 0;
            }
        }
        let seen = from / BLOCK..next.map_or(u64::MAX, |next| next / BLOCK);
        self.before.retain(|block, _| !seen.contains(block));
        self.before.append(&mut self.now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(idle: &mut IdleBlocks, blocks: &[u64], stirred: &[u64]) -> Vec<bool> {
        let mut look = idle.begin(false);
        let all = blocks.iter().map(|block| look.leaves_out(block * BLOCK));
        let all = all.collect();
        look.end(stirred, 0, None);
        all
    }

    #[test]
    fn a_quiet_block_is_looked_at_every_other_time_until_it_is_written() {
        let mut idle = IdleBlocks::default();
        let mut left_out = |stirred: &[u64]| look(&mut idle, &[0], stirred) == [true];
        let looks: Vec<_> = (0..7).map(|_| left_out(&[])).collect();
        let expected = [false, false, true, false, true, false, true];
        assert_eq!(looks, expected);
        assert!(!left_out(&[BLOCK - 1]), "it is written");
        let looks: Vec<_> = (0..3).map(|_| left_out(&[])).collect();
        assert_eq!(looks, [false, false, true]);
    }

    #[test]
    fn blocks_take_turns_and_are_told_apart() {
        let mut idle = IdleBlocks::default();
        (0..8).for_each(|_| drop(look(&mut idle, &[0, 1, 2], &[2 * BLOCK])));
        let next = look(&mut idle, &[0, 1, 2], &[]);
        assert_ne!(next[0], next[1]);
        assert!(!next[2]);
    }

    #[test]
    fn what_is_no_longer_offered_is_forgotten() {
        let mut idle = IdleBlocks::default();
        (0..8).for_each(|_| drop(look(&mut idle, &[0, 7], &[])));
        look(&mut idle, &[0], &[]);
        assert_eq!(idle.0.len(), 1);
        assert_eq!(look(&mut idle, &[7], &[]), [false]);
        idle.begin(true).end(&[], 0, None);
        assert!(idle.0.is_empty());
    }
}
