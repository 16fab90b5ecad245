//! PageONE's agent: what runs inside a guest.
//!
//! ```text
//!  guest's threads                         the agent's thread (one, made by clone(2))
//!  ───────────────                         ─────────────────────────────────────────
//!  madvise(MERGEABLE) ─▶ hooks ─▶ table ──▶ serve: Sync ──▶ what changed ──▶ engine
//!  munmap, mremap, …  ─▶ hooks ─▶ table     serve: Merge ─▶ window ────────▶ outcome of each page
//!                          └── one lock ────────┘
//! ```
//!
//! - [`table`] knows, for each chunk, which pages are offered and which lie in mappings of a store;
//! - [`lock`] orders hooks and windows: a hook over offered memory waits for at most one window (I7);
//! - [`hooks`] stand before libc's calls and keep their documented meaning over merged pages
//!   ([`discard`], [`remap`]);
//! - [`window`] is the protocol in which no byte can be lost (I1);
//! - [`serve`] answers the engine's questions; [`api`] is `include/pageone.h`.
//!
//! **Where this code runs** is the difficulty: in any process, inside any call. So hooks never
//! allocate, never take a lock but [`lock`]'s, use no thread-local storage, and make no call that
//! another library could have replaced. The thread has its own descriptor table and is unknown to
//! libc (see `sys::thread`). Without an engine everything is passed on as it came.
//!
//! - [`takeover`] makes the calls that libc makes for itself come through the hooks too.
//!
//! What slips past: system calls made without libc's functions.

#![allow(rustdoc::private_intra_doc_links)] // all modules are private; their docs are for readers

mod ahead;
mod alone;
mod api;
mod calls;
mod discard;
mod domain;
mod filter;
mod hooks;
mod life;
mod lines;
mod link;
mod lock;
mod narrow;
mod offer;
mod own;
mod remap;
mod report;
mod serve;
mod stores;
mod table;
#[cfg(target_arch = "x86_64")]
mod takeover;

mod trial;
mod whole;
mod window;
