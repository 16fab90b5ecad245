//! ONE, the Object Non-duplicate Engine: give it bytes, get a shared handle.
//!
//! ```text
//!   put("page A") ──▶ Handle ─┐
//!   put("page B") ──▶ Handle ─│─┐        one object per content, in a tree keyed by the content itself
//!   put("page A") ──▶ Handle ─┘ └─▶ "page B", 1 reference
//!                             └───▶ "page A", 2 references
//! ```
//!
//! - Objects are equal when all their bytes are; the tree's digest only finds the place to compare.
//! - No operation waits for another thread: the index is an [`sdtree::ByteTree`], the reference counts are atomic.
//! - The last reference takes the object away. A count that has reached zero stays there: a thread that finds the same
//!   bytes meanwhile removes the dead object from the index on behalf of the releasing thread, and puts a new one.
//!
//! # Examples
//!
//! ```
//! let store = one::Store::new();
//! let first = store.put(b"the same")?;
//! let second = store.put(b"the same")?;
//! assert_eq!(first, second);
//! assert_eq!(first.references(), 2);
//! assert_eq!(store.stats().objects, 1);
//! # Ok::<(), one::Error>(())
//! ```
#![forbid(unsafe_code)]

mod stats;
mod store;

pub use stats::Stats;
pub use store::{Error, Handle, MAX_OBJECT_BYTES, Store};
