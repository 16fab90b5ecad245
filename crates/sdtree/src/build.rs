//! How a tree is made: its first directory, how far that may grow, and where its memory comes from.

use crate::directory::{DirectoryMemory, GlobalMemory, MAX_DIRECTORY_BITS};
use crate::error::Error;
use crate::key::Stored;
use crate::tree::Tree;
use std::sync::Arc;

/// Makes trees.
///
/// # Examples
///
/// ```
/// let tree = sdtree::Builder::new().capacity(1_000).build::<u64>()?;
/// tree.get_or_insert(7, 70);
/// # Ok::<(), sdtree::Error>(())
/// ```
#[derive(Clone)]
pub struct Builder {
    capacity: usize,
    max_directory_bits: u32,
    memory: Arc<dyn DirectoryMemory>,
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    /// A small directory that grows as far as it can, from the global allocator.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::Builder::new().build::<u64>()?;
    /// assert!(tree.is_empty());
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    pub fn new() -> Self {
        Self {
            capacity: 0,
            max_directory_bits: MAX_DIRECTORY_BITS,
            memory: Arc::new(GlobalMemory),
        }
    }

    /// Sizes the first directory for so many keys, if their leading bits are uniform.
    ///
    /// # Examples
    ///
    /// ```
    /// let tree = sdtree::Builder::new().capacity(1_000).build::<u64>()?;
    /// assert_eq!(tree.stats().directory_slots, 2_048);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    #[must_use]
    pub fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys;
        self
    }

    /// Lets the directory use at most the first `bits` bits of the keys; 0 means a single trie.
    /// Values over [`MAX_DIRECTORY_BITS`] count as that.
    ///
    /// # Examples
    ///
    /// ```
    /// let trie = sdtree::Builder::new().max_directory_bits(0).build::<u64>()?;
    /// assert_eq!(trie.stats().directory_slots, 1);
    /// # Ok::<(), sdtree::Error>(())
    /// ```
    #[must_use]
    pub fn max_directory_bits(mut self, bits: u32) -> Self {
        self.max_directory_bits = bits.min(MAX_DIRECTORY_BITS);
        self
    }

    /// Takes the directory's memory from `memory`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// let builder = sdtree::Builder::new().memory(Arc::new(sdtree::GlobalMemory));
    /// assert!(builder.build::<u64>().is_ok());
    /// ```
    #[must_use]
    pub fn memory(mut self, memory: Arc<dyn DirectoryMemory>) -> Self {
        self.memory = memory;
        self
    }

    pub(crate) fn tree<K: Stored, V: Copy + Send + Sync + 'static>(
        self,
    ) -> Result<Tree<K, V>, Error> {
        let bits = directory_bits(self.capacity).min(self.max_directory_bits);
        Tree::new(bits, self.max_directory_bits, self.memory)
            .ok_or(Error::NoDirectoryMemory { slots: 1 << bits })
    }
}

/// So many bits that `keys` keys fill seven tenths of the slots at most, as after a growth.
fn directory_bits(keys: usize) -> u32 {
    let slots = keys.saturating_mul(10) / 7;
    let bits = slots
        .checked_next_power_of_two()
        .map_or(MAX_DIRECTORY_BITS, usize::ilog2);
    bits.min(MAX_DIRECTORY_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_filled_to_between_35_and_70_percent() {
        for keys in [3, 7, 100, 1_000, 4_000_000, 5_900_000] {
            let slots = 1_usize << directory_bits(keys);
            assert!(
                keys * 10 <= slots * 7 + 10 && keys * 20 >= slots * 7,
                "{keys} keys in {slots} slots"
            );
        }
        assert_eq!(directory_bits(0), 0);
        assert_eq!(directory_bits(usize::MAX), MAX_DIRECTORY_BITS);
    }
}
