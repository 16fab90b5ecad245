//! One bucket: the free slots of one zone on one node, as buddies.
//!
//! A block of order k is 2^k slots that begin at a multiple of 2^k. Its buddy is the other half of the block of order
//! k + 1 around it; when both are free they are one. A free block has its bit in the set of its order, an allocated
//! one its order in the table of heads. That is 1¼ bytes a slot in all, and the lowest slots go first, so that slots
//! taken one after the other make runs.
//!
//! The last few single slots that came back wait in a magazine, unmerged: a slot that goes and comes at once would
//! split a chunk nine times and merge it nine times. They count as free blocks of order 0, the next single slots are
//! taken from there, and they merge as soon as a request finds no block otherwise.
//!
//! A span whose slots are all retired is only counted. An owner that never uses a number twice adds ranges and
//! retires blocks for as long as it runs, and needs memory for the ranges that still hold something.

use std::ops::Range;

use super::bits::BitSet;
use super::view::BucketStats;
use super::{Broken, ORDERS};

const CHUNK: u64 = 1 << (ORDERS - 1);
/// `heads` of a slot that begins no block.
const NO_HEAD: u8 = 0;
/// Added to the order in `heads` when the block will never come back.
const RETIRED: u8 = 0x80;
/// In `heads` for a slot in the magazine.
const WAITING: u8 = 0x7f;
/// The most slots that wait.
const MAGAZINE: usize = 32;

/// Consecutive slots of a bucket.
#[derive(Debug)]
struct Span {
    slots: Range<u64>,
    /// `slots.start`, rounded down to a whole chunk: where the bit sets begin.
    base: u64,
    free: [BitSet; ORDERS],
    blocks: [u64; ORDERS],
    /// 1 + order for each slot that begins an allocated block.
    heads: Vec<u8>,
    /// Slots in retired blocks.
    retired: u64,
}

/// The bucket's slots and counters.
#[derive(Debug, Default)]
pub(super) struct Buddies {
    spans: Vec<Span>,
    magazine: Vec<u64>,
    /// Slots of spans that were all retired.
    gone: u64,
    pub(super) slots: u64,
    pub(super) free: u64,
    pub(super) retired: u64,
    pub(super) stats: BucketStats,
}

impl Span {
    fn new(start: u64) -> Self {
        Self {
            slots: start..start,
            base: start / CHUNK * CHUNK,
            free: Default::default(),
            blocks: [0; ORDERS],
            heads: Vec::new(),
            retired: 0,
        }
    }

    // Positions fit usize: the table of heads has that many elements.
    #[allow(
        clippy::cast_possible_truncation,
        reason = "no span is longer than its table of heads"
    )]
    fn bit(&self, slot: u64, order: usize) -> usize {
        ((slot - self.base) >> order) as usize
    }

    #[allow(
        clippy::cast_possible_truncation,
        reason = "no span is longer than its table of heads"
    )]
    fn head(&mut self, slot: u64) -> &mut u8 {
        &mut self.heads[(slot - self.slots.start) as usize]
    }

    fn extend(&mut self, end: u64) {
        let start = self.slots.end;
        self.slots.end = end;
        for order in 0..ORDERS {
            let limit = self.bit(end, order) + 1;
            self.free[order].grow(limit);
        }
        let len = usize::try_from(end - self.slots.start).unwrap_or(usize::MAX);
        self.heads.resize(len, NO_HEAD);
        for (slot, order) in aligned_blocks(start..end) {
            self.insert(slot, order);
        }
    }

    /// Adds a free block, as one with its buddies where they are free.
    fn insert(&mut self, mut slot: u64, mut order: usize) {
        while order + 1 < ORDERS {
            let buddy = slot ^ (1 << order);
            if buddy < self.base || !self.free[order].contains(self.bit(buddy, order)) {
                break;
            }
            let bit = self.bit(buddy, order);
            self.free[order].remove(bit);
            self.blocks[order] -= 1;
            slot = slot.min(buddy);
            order += 1;
        }
        let bit = self.bit(slot, order);
        self.free[order].insert(bit);
        self.blocks[order] += 1;
    }

    /// Takes the lowest block of the smallest order that is enough, and gives the rest of it back.
    fn take(&mut self, order: usize) -> Option<u64> {
        let from = (order..ORDERS).find(|&order| self.blocks[order] > 0)?;
        let bit = self.free[from].first()?;
        self.free[from].remove(bit);
        self.blocks[from] -= 1;
        let slot = self.base + ((bit as u64) << from);
        for half in (order..from).rev() {
            let buddy = self.bit(slot + (1 << half), half);
            self.free[half].insert(buddy);
            self.blocks[half] += 1;
        }
        Some(slot)
    }
}

/// Cuts a range into the largest blocks that fit it.
fn aligned_blocks(range: Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let left = range.end.checked_sub(at).filter(|&left| left > 0)?;
        let order = (at.trailing_zeros() as usize)
            .min(left.ilog2() as usize)
            .min(ORDERS - 1);
        let block = (at, order);
        at += 1 << order;
        Some(block)
    })
}

fn head_of(order: usize) -> u8 {
    // ORDERS is small.
    u8::try_from(order + 1).unwrap_or(u8::MAX)
}

impl Buddies {
    /// Adds free slots that no bucket has yet.
    pub(super) fn grow(&mut self, range: Range<u64>) {
        let len = range.end - range.start;
        let at = self
            .spans
            .partition_point(|span| span.slots.end <= range.start);
        let before = at.checked_sub(1).and_then(|at| self.spans.get_mut(at));
        // No block crosses a multiple of a chunk, so ranges that meet there gain nothing as one.
        let joins =
            |span: &&mut Span| span.slots.end == range.start && !range.start.is_multiple_of(CHUNK);
        match before.filter(joins) {
            Some(span) => span.extend(range.end),
            None => {
                let mut span = Span::new(range.start);
                span.extend(range.end);
                self.spans.insert(at, span);
            }
        }
        self.slots += len;
        self.free += len;
    }

    /// Takes a block.
    pub(super) fn take(&mut self, order: usize) -> Option<u64> {
        let waiting = if order == 0 {
            self.magazine.pop()
        } else {
            None
        };
        let slot = waiting.or_else(|| self.take_block(order)).or_else(|| {
            self.drain();
            self.take_block(order)
        })?;
        if let Some(span) = self.span_of(slot) {
            *span.head(slot) = head_of(order);
        }
        self.free -= 1 << order;
        Some(slot)
    }

    fn take_block(&mut self, order: usize) -> Option<u64> {
        self.spans.iter_mut().find_map(|span| span.take(order))
    }

    /// Merges what waits in the magazine.
    fn drain(&mut self) {
        for slot in std::mem::take(&mut self.magazine) {
            if let Some(span) = self.span_of(slot) {
                *span.head(slot) = NO_HEAD;
                span.insert(slot, 0);
            }
        }
    }

    fn span_of(&mut self, slot: u64) -> Option<&mut Span> {
        let at = self.spans.partition_point(|span| span.slots.end <= slot);
        self.spans
            .get_mut(at)
            .filter(|span| span.slots.contains(&slot))
    }

    /// Gives a block back; false when it is not allocated.
    pub(super) fn give(&mut self, slot: u64, order: usize) -> bool {
        let waits = order == 0 && self.magazine.len() < MAGAZINE;
        let Some(span) = self.span_of(slot) else {
            return false;
        };
        if *span.head(slot) != head_of(order) {
            return false;
        }
        if waits {
            *span.head(slot) = WAITING;
            self.magazine.push(slot);
        } else {
            *span.head(slot) = NO_HEAD;
            span.insert(slot, order);
        }
        self.free += 1 << order;
        true
    }

    /// Lets a block never be free again; false when it is not allocated.
    pub(super) fn retire(&mut self, slot: u64, order: usize) -> bool {
        let at = self.spans.partition_point(|span| span.slots.end <= slot);
        let Some(span) = self.spans.get_mut(at) else {
            return false;
        };
        if !span.slots.contains(&slot) || *span.head(slot) != head_of(order) {
            return false;
        }
        *span.head(slot) |= RETIRED;
        span.retired += 1 << order;
        self.retired += 1 << order;
        let len = span.slots.end - span.slots.start;
        if span.retired == len {
            self.gone += len;
            self.spans.remove(at);
        }
        true
    }

    /// The order of the allocated block that begins at `slot`.
    pub(super) fn order_at(&mut self, slot: u64) -> Option<u8> {
        let head = *self.span_of(slot)?.head(slot);
        (head != NO_HEAD && head != WAITING && head & RETIRED == 0).then(|| head - 1)
    }

    /// Free blocks of each order.
    pub(super) fn blocks(&self) -> [u64; ORDERS] {
        let mut blocks = [0; ORDERS];
        blocks[0] = self.magazine.len() as u64;
        for span in &self.spans {
            for (sum, more) in blocks.iter_mut().zip(span.blocks) {
                *sum += more;
            }
        }
        blocks
    }

    /// Bytes of memory the spans hold.
    pub(super) fn memory_bytes(&self) -> usize {
        let of_span = |span: &Span| {
            let sets: usize = span.free.iter().map(BitSet::memory_bytes).sum();
            size_of::<Span>() + span.heads.capacity() + sets
        };
        self.spans.iter().map(of_span).sum()
    }

    /// Asserts H1 to H4 of the heap's invariants.
    pub(super) fn check(&self) -> Result<(), Broken> {
        let (mut free, mut retired, mut slots) = (0, self.gone, self.gone);
        for span in &self.spans {
            let (span_free, span_retired) = check_span(span)?;
            free += span_free;
            retired += span_retired;
            slots += span.slots.end - span.slots.start;
        }
        free += self.magazine.len() as u64;
        if (free, retired, slots) != (self.free, self.retired, self.slots) {
            return Err(Broken::Totals {
                counted: (free, retired, slots),
                kept: (self.free, self.retired, self.slots),
            });
        }
        let allocated = slots - free;
        let stats = &self.stats;
        let taken = stats.hit + stats.miss;
        if taken != stats.local + stats.other
            || stats.interleave_hit > stats.hit
            || taken - stats.freed != allocated
        {
            return Err(Broken::Counters {
                stats: Box::new(*stats),
                allocated,
            });
        }
        Ok(())
    }
}

/// Walks a span block by block; returns its free and its retired slots.
fn check_span(span: &Span) -> Result<(u64, u64), Broken> {
    let (mut free, mut retired, mut blocks) = (0, 0, [0; ORDERS]);
    let mut slot = span.slots.start;
    while slot < span.slots.end {
        let sets = (0..ORDERS).filter(|&order| {
            slot.trailing_zeros() as usize >= order
                && span.free[order].contains(span.bit(slot, order))
        });
        let orders: Vec<usize> = sets.collect();
        let head = span.heads[span.bit(slot, 0) - span.bit(span.slots.start, 0)];
        let len = match (&orders[..], head) {
            (&[order], NO_HEAD) => {
                let buddy = slot ^ (1 << order);
                let whole = buddy >= span.base && span.free[order].contains(span.bit(buddy, order));
                if order + 1 < ORDERS && whole {
                    return Err(Broken::Apart { slot, buddy, order });
                }
                blocks[order] += 1;
                free += 1_u64 << order;
                1_u64 << order
            }
            (&[], WAITING) => 1, // counted with the magazine
            (&[], head) if head != NO_HEAD => {
                let len = 1_u64 << ((head & !RETIRED) - 1);
                retired += if head & RETIRED != 0 { len } else { 0 };
                len
            }
            _ => {
                return Err(Broken::Cover {
                    slot,
                    free_orders: orders,
                    head,
                });
            }
        };
        slot += len;
    }
    let counted: Vec<u64> = span
        .free
        .iter()
        .map(|set| set.iter().count() as u64)
        .collect();
    if slot != span.slots.end || blocks != span.blocks || counted != blocks {
        return Err(Broken::Blocks {
            walked: blocks.to_vec(),
            kept: span.blocks.to_vec(),
        });
    }
    Ok((free, retired))
}
