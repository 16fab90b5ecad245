//! The errors of a request.

/// What can be wrong with a request. A lost race or an absent key is no error.
///
/// # Examples
///
/// ```
/// let tree = sdtree::ByteTree::<Vec<u8>, u32>::new();
/// let (len, max) = (sdtree::MAX_KEY_BYTES + 1, sdtree::MAX_KEY_BYTES);
/// let refused = tree.get_or_insert(vec![0; len], 1);
/// assert_eq!(refused, Err(sdtree::Error::KeyTooLong { len, max }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A byte string is too long to be a key.
    #[error("a key of {len} bytes is over the limit of {max} bytes")]
    KeyTooLong {
        /// Its length, in bytes.
        len: usize,
        /// The limit, in bytes: [`MAX_KEY_BYTES`](crate::MAX_KEY_BYTES).
        max: usize,
    },
    /// The hook had no memory for the first directory.
    #[error("no memory for a directory of {slots} slots of 8 bytes")]
    NoDirectoryMemory {
        /// Slots asked for.
        slots: usize,
    },
}
