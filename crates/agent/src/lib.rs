//! PageONE's agent: the part that runs inside a guest.
//!
//! ```text
//!  guest's threads                         the agent's thread (one, made by clone(2))
//!  ───────────────                         ─────────────────────────────────────────
//!  madvise(MERGEABLE) ─▶ hooks ─▶ table ──▶ serve: Sync ──▶ what changed ──▶ engine
//!  munmap, mremap, …  ─▶ hooks ─▶ table     serve: Merge ─▶ window ────────▶ outcome of each page
//!                          └── one lock ────────┘
//! ```
//!
//! Each line uses only those below it:
//!
//! | place | for |
//! |---|---|
//! | [`hooks`] | `include/pageone.h`; libc's calls keep their documented meaning over merged pages |
//! | [`offer`] | memory is offered, and taken back |
//! | [`any`], [`rules`] | all memory of a program that offers nothing is offered for it |
//! | [`life`] | the agent's thread starts and ends, with the rights of its program |
//! | [`now`] | the program asks for merging now |
//! | [`session`] | the thread: it answers the engine's questions |
//! | [`window`] | the protocol in which no byte can be lost (I1) |
//! | [`mappings`] | merged memory is discarded, moved, or made the program's own |
//! | [`lock`], [`desk`] | orders hooks and windows: a hook over offered memory waits for at most one window (I7); work that takes descriptors is done by the agent's thread |
//! | [`passing`] | calls that the kernel carries out without the lock |
//! | [`table`] | for each chunk, which pages are offered and which lie in mappings of a store |
//! | [`attached`] | the same in a process that runs already, without the loader |
//! | [`filter`], [`thread`], [`config`], [`own`] | the thread's calls, its state, its orders, its memory |
//!
//! **Where this code runs** is the difficulty: in any process, inside any call. So hooks never
//! allocate, never take a lock but [`lock`]'s, use no thread-local storage, and make no call that
//! another library could have replaced. The thread has its own descriptor table and is unknown to
//! libc (see `sys::thread`). Without an engine everything is passed on as it came.
//!
//! Calls that slip past: system calls made without libc's functions.

#![allow(rustdoc::private_intra_doc_links)] // all modules are private; their docs are for readers

mod any;
#[cfg(target_arch = "x86_64")]
mod attached;
mod config;
mod desk;
mod errno;
mod filter;
mod hooks;
mod life;
mod lock;
mod mappings;
mod now;
mod offer;
mod own;
mod passing;
mod rules;
mod session;
mod table;
mod thread;
mod window;
