//! A lock-free ordered index: a static directory over a dynamic path-compressed bit trie.
//!
//! ```text
//!            key bits 0…d-1                          bits d…
//!   static   ┌────┬────┬────┬────┬─ ─ ─┐
//!            │    │ ●  │    │ ●  │     │   2ᵈ slots, grows by doubling
//!            └────┴─│──┴────┴─│──┴─ ─ ─┘
//!   dynamic         ▼         ▼
//!                 leaf     branch 7
//!                           ╱    ╲          a branch tests one bit, in which two keys below it differ
//!                        leaf   branch 19
//!                                ╱   ╲
//!                             leaf   leaf   a leaf holds key and value, and never changes
//! ```
//!
//! - [`SdTree`]: 16-byte keys, inline. [`ByteTree`]: byte strings up to 1 MiB whose bytes the caller keeps.
//! - Every change is one compare-and-swap on one word. No operation waits for another thread; a thread that stops anywhere stops
//!   no other. (The allocator behind it may be of another opinion: it is asked for memory once in 128 new nodes of 24 bytes, and
//!   for each larger one.)
//! - A search tests each bit of its key once at most, and then compares the key once: long common prefixes cost nothing but that
//!   comparison.
//! - Removed memory is freed by epochs (crossbeam-epoch). A thread that stops in the middle of an operation holds up the
//!   freeing, for the whole process, until it goes on; never the operations.
//!
//! `docs/sdtree.md` has the proofs and the measurements.

mod build;
mod bytes;
mod canary;
mod check;
mod counters;
mod directory;
mod error;
mod fixed;
mod garbage;
mod iter;
mod key;
#[cfg(not(loom))]
pub mod measure;
mod node;
mod pool;
mod reclaim;
mod stats;
mod sync;
mod tree;

pub use build::Builder;
pub use bytes::{ByteIter, ByteTree};
pub use check::{Check, Violation, check};
pub use directory::{DirectoryMemory, GlobalMemory, MAX_DIRECTORY_BITS};
pub use error::Error;
pub use fixed::{Iter, Pinned, SdTree};
pub use key::MAX_KEY_BYTES;
pub use pool::set_home;
pub use stats::Stats;
pub use tree::Insert;
