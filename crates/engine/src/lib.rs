//! PageONE's engine: it finds pages with equal content in the memory of many guests, and has each
//! guest's agent replace them by one canonical page.
//!
//! # The problem
//!
//! Pages of many processes are equal, and they change while the engine looks at them. The engine reads them
//! at idle priority, without stopping a guest. So each fact about a page may be false the moment it is known.
//!
//! # The two structures
//!
//! The *index* maps fingerprints to candidates and slots. It cannot be trusted: guests write while the engine
//! reads, so an entry may be stale the moment it is made. The *slots* hold the canonical pages. They can be
//! trusted: only the engine writes them, once, and a slot number is never used twice.
//!
//! The index is safe all the same, because nothing follows from an entry but a request. The agent compares
//! all 4096 bytes at a moment when no thread can write them, and only then maps the slot.
//!
//! # The way of a page
//!
//! The engine runs in rounds, one every merge period. A page goes through a round like this:
//!
//! ```text
//!            look (a job a guest)              visit (a job a chunk with settled pages)
//!  guest ──▶ sync: offered regions      ┌────▶ read: a batch, its fingerprints
//!            scan: written pages        │      index: candidate, twin or slot?
//!            track: ages of pages ──────┘      plan: slots in runs, refs first
//!                 ▲                            request: merge ──▶ agent: MOVE, compare, map
//!                 │                            outcomes ◀──────────┘
//!                 └─ broken, discarded: release, wait for lifelines, punch
//! ```
//!
//! * [`track`](scan::track): a page that was not written during two whole periods is settled. One `PAGEMAP_SCAN` a
//!   round tells it, also for merged pages, and costs nearly nothing where nothing happens.
//! * [`read`](merge::read): settled pages are read once and fingerprinted; read again only after a write.
//! * [`index`](domain::index): a fingerprint seen for the first time becomes a candidate. Nothing is copied yet.
//! * [`plan`](merge::plan): at the second sight a slot is written, and both pages are planned for it.
//! * [`request`](merge::request): the agent merges the planned pages of a chunk, in windows, and answers with the
//!   outcome of each.
//! * [`lifelines`](domain::lifelines): refs end on evidence and when no fork child can be left; then the page is punched.
//!
//! # The folders
//!
//! Each uses only those above it:
//!
//! ```text
//!  error options page sync   words, knobs, the locks and their order
//!  users/      the limits of all guests of one user; why processes are not served
//!  domain/     shared by the guests of a domain: index, stores, slots, refs, lifelines, chunks with their pages, handover
//!  guest/      a process: its memory, its agent, the regions it offers, the counters
//!  scan/       a look at a guest: the agent's news, and the page map
//!  merge/      a visit of a chunk: read, look up, plan, request
//!  run/        rounds, their jobs, the workers, the driver
//!  handover/   a former engine's domains, restored, and its knobs
//!  status check facilities engine   the counters, the invariants, the facilities of the machine, the API
//!  scale/      simulated guests, for the bench: how cost grows, and the locks that workers meet at
//! ```
//!
//! # The invariants
//!
//! By the numbers of the design; [`check`] asserts I4, I5, I6 and I9 after rounds of debug builds:
//!
//! * I3 A slot's content never changes once its number leaves the engine: it is written before the
//!   index names it, and punched only when dead; a number is never used twice.
//! * I4 refs(slot) ≥ the guest pages that may map it, fork children included: see [`lifelines`](domain::lifelines).
//! * I5 A slot is punched only at refs = 0.
//! * I6 Indexes, stores, slots and chunks belong to one domain; nothing crosses. Inside it nothing crosses
//!   nodes unless the rules say so: see [`relocation`](scan::relocation) and [`switch`](run::switch).
//! * I7 No guest thread waits for the engine: the engine asks, only agents answer; work that holds a lock of
//!   a guest's memory is short and done at ordinary priority: see [`process`](guest::process).
//! * I8 Whatever an agent does costs the engine that guest: bounded answers, bounded patience, and
//!   a contradiction ends the service.
//! * I9 Every present page has exactly one tag, and a tag one class.
//! * I10 All that is read of a guest belonged at that moment to the address space that was admitted: see
//!   [`process`](guest::process).
//!
//! Memory, connection, store and lifeline of a guest are traits, so the tests run the engine against
//! fakes that die, lie and stall, without root and without a clock.
#![forbid(unsafe_code)]
#![allow(rustdoc::private_intra_doc_links)] // the stages are private; their docs are for readers

#[cfg(any(test, debug_assertions))]
mod check;
mod domain;
mod engine;
mod error;
mod facilities;
mod guest;
mod handover;
mod merge;
mod options;
mod page;
mod run;
pub mod scale;
mod scan;
mod status;
mod sync;
#[cfg(test)]
mod testing;
mod users;

pub use engine::{Engine, mark};
pub use error::{EngineError, OverQuota, Refusal};
pub use facilities::Facilities;
pub use merge::request::mapping_budget;
pub use options::{Limits, Options};
pub use users::refusals::Refusals;
