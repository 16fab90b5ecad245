//! A set of small numbers that finds its least in a few steps.
//!
//! ```text
//!  level 2                     1                 one word: which words of level 1 may hold something
//!  level 1        0001 ...  0000 ...             a bit for each word of level 0
//!  level 0  0000 0000 0100 ...                   a bit for each number
//! ```
//!
//! A set bit above may be stale: removing the last bit of a word leaves the levels above alone, and the search for
//! the least repairs the stale bits that it meets. A clear bit is never wrong. So a number that comes and goes, as
//! buddies do when one slot is taken and given back, costs one word each time; each repair pays for one removal.

/// The set.
#[derive(Debug, Default)]
pub(super) struct BitSet {
    levels: Vec<Vec<u64>>,
}

impl BitSet {
    /// Makes room for the numbers below `limit`.
    pub(super) fn grow(&mut self, limit: usize) {
        let mut words = limit.div_ceil(64);
        let mut level = 0;
        loop {
            match self.levels.get_mut(level) {
                Some(bits) => bits.resize(words.max(bits.len()), 0),
                None => {
                    // A new top: it has to know what is below it.
                    let mut bits = vec![0; words];
                    if let Some(below) = level
                        .checked_sub(1)
                        .and_then(|below| self.levels.get(below))
                    {
                        for (index, _) in below.iter().enumerate().filter(|&(_, &word)| word != 0) {
                            bits[index / 64] |= 1 << (index % 64);
                        }
                    }
                    self.levels.push(bits);
                }
            }
            if words <= 1 {
                return;
            }
            words = words.div_ceil(64);
            level += 1;
        }
    }

    pub(super) fn contains(&self, number: usize) -> bool {
        let word = self.levels.first().and_then(|bits| bits.get(number / 64));
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// `number` is below the limit given to [`grow`](Self::grow).
    pub(super) fn insert(&mut self, number: usize) {
        let mut index = number;
        for bits in &mut self.levels {
            let word = &mut bits[index / 64];
            let bit = 1 << (index % 64);
            let known = *word & bit != 0;
            *word |= bit;
            if known {
                return; // and so is every level above
            }
            index /= 64;
        }
    }

    /// `number` is in the set.
    pub(super) fn remove(&mut self, number: usize) {
        self.levels[0][number / 64] &= !(1 << (number % 64));
    }

    /// The least number of the set.
    pub(super) fn first(&mut self) -> Option<usize> {
        loop {
            let top = self.levels.len().checked_sub(1)?;
            let word = self.levels[top].first().copied()?;
            if word == 0 {
                return None;
            }
            if let Some(number) = self.descend(top, word.trailing_zeros() as usize) {
                return Some(number);
            }
        }
    }

    /// Follows the least bit down from bit `index` of `level`; repairs the first stale bit met, and finds nothing then.
    fn descend(&mut self, mut level: usize, mut index: usize) -> Option<usize> {
        while level > 0 {
            let word = self.levels[level - 1][index];
            if word == 0 {
                self.levels[level][index / 64] &= !(1 << (index % 64));
                // What is above may be stale now in turn; the next search sees to it.
                return None;
            }
            index = index * 64 + word.trailing_zeros() as usize;
            level -= 1;
        }
        Some(index)
    }

    /// Bytes of memory the set holds.
    pub(super) fn memory_bytes(&self) -> usize {
        self.levels.iter().map(|bits| bits.capacity() * 8).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let words = self.levels.first().into_iter().flatten().enumerate();
        words.flat_map(|(index, &word)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| index * 64 + bit)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(
            limit in 1_usize..9000,
            steps in proptest::collection::vec((any::<bool>(), any::<proptest::sample::Index>()), 0..400),
            more in 0_usize..300_000,
        ) {
            let (mut bits, mut oracle) = (BitSet::default(), BTreeSet::new());
            bits.grow(limit);
            for (step, (add, at)) in steps.iter().enumerate() {
                let limit = if step * 2 > steps.len() { limit + more } else { limit };
                bits.grow(limit);
                let number = at.index(limit);
                if *add {
                    bits.insert(number);
                    oracle.insert(number);
                } else if let Some(&number) = oracle.range(number..).next() {
                    bits.remove(number);
                    oracle.remove(&number);
                }
                prop_assert_eq!(bits.contains(number), oracle.contains(&number));
                prop_assert_eq!(bits.first(), oracle.first().copied());
            }
            prop_assert!(bits.iter().eq(oracle));
        }
    }
}
