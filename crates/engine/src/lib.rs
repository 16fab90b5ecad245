//! PageONE's engine: finds pages with equal content in the memory of many guests and has each
//! guest's agent replace them by one canonical page.
//!
//! The engine runs in rounds, one every merge period. A page goes through it like this:
//!
//! ```text
//!            look (a job a guest)              chunk job (a job a chunk with settled pages)
//!  guest ──▶ sync: what is offered      ┌────▶ read: a batch, its fingerprints
//!            scan: what was written     │      index: candidate, twin or slot?
//!            track: ages of pages ──────┘      plan: slots in runs, refs first
//!                 ▲                            ask: merge ──▶ agent: MOVE, compare, map
//!                 │                            account: outcomes ◀──┘
//!                 └─ broken, discarded: release, wait for lifelines, punch
//! ```
//!
//! The [`helm`] begins the rounds, [`workers`] do their jobs, which stand in a [`queue`]. In a round:
//!
//! * [`track`]: a page not written during two whole periods is settled. One `PAGEMAP_SCAN` a round
//!   tells it, also for merged pages, and costs nearly nothing where nothing happens.
//! * [`read`]: settled pages are read once and fingerprinted; read again only after a write.
//! * [`index`]: a fingerprint seen for the first time becomes a candidate. Nothing is copied yet.
//! * [`plan`]: at the second sight a slot is written, and both pages are planned for it.
//! * [`ask`]: the agent merges a chunk in one window and answers what became of each page.
//! * [`account`]: refs end on evidence and when no fork child can be left; then the page is punched.
//!
//! Two structures matter. The *index* cannot be trusted: guests write while the engine reads, so
//! its entries may be stale the moment they are made. The *slots* can: only the engine writes them,
//! once, and a number is never used twice. The untrustworthy one is safe because nothing follows
//! from it but a question: the agent compares all 4096 bytes, where nobody can write, before it maps.
//!
//! What holds, by the numbers of the design; `check` asserts it after every round of debug builds:
//!
//! * I3 A slot's content never changes once its number leaves the engine: it is written before the
//!   index names it, and punched only when dead; a number is never used twice.
//! * I4 refs(slot) ≥ the guest pages that may map it, fork children included: see [`account`].
//! * I5 A slot is punched only at refs = 0.
//! * I6 A realm (indexes, stores, slots, chunks) belongs to one domain; nothing crosses. Inside it
//!   nothing crosses nodes unless the rules say so: see [`nodes`] and [`switch`].
//! * I7 No guest thread waits for the engine: the engine asks, only agents answer; what holds a lock of
//!   a guest's memory is short and done at ordinary priority: see [`space`].
//! * I8 Whatever an agent does costs the engine that guest: bounded answers, bounded patience, and
//!   a contradiction ends the service.
//! * I9 Every present page has exactly one tag, and a tag one class.
//! * I10 All that is read of a guest belonged at that moment to the address space that was admitted: see [`space`].
//!
//! All stages run behind traits ([`guest::Memory`], [`guest::Link`], [`store::Store`],
//! [`account::Lifeline`], [`index::Index`]), so the tests run them against fakes that die, lie and
//! stall, without root and without a clock.
#![forbid(unsafe_code)]
#![allow(rustdoc::private_intra_doc_links)] // the stages are private; their docs are for readers

mod account;
mod adopt;
mod ask;
mod bequest;
mod bodies;
mod calm;
mod check;
mod chunk;
mod engine;
mod error;
mod facilities;
#[cfg(test)]
mod fake;
mod govern;
mod guest;
mod helm;
#[cfg(test)]
mod histories;
mod index;
mod kin;
mod link;
mod look;
mod nodes;
mod offers;
mod options;
mod order;
mod pace;
mod page;
mod pages;
mod parting;
mod patterns;
mod plan;
mod post;
mod queue;
mod quota;
mod read;
mod realm;
mod refusals;
mod remember;
mod rescue;
#[cfg(test)]
mod scale;
mod schedule;
mod space;
mod span;
mod status;
mod store;
mod succeed;
mod switch;
mod track;
#[cfg(test)]
mod trials;
#[cfg(test)]
mod trials_adopt;
#[cfg(test)]
mod trials_copies;
#[cfg(test)]
mod trials_guess;
#[cfg(test)]
mod trials_hostile;
#[cfg(test)]
mod trials_nodes;
#[cfg(test)]
mod trials_spans;
mod users;
mod waiting;
mod workers;

pub use engine::{Engine, mark};
pub use error::{EngineError, Refusal};
pub use options::{Limits, Options};
pub use quota::OverQuota;
pub use refusals::Refusals;
