//! Messages between PageONE's agent, engine and command line.
//!
//! All talk runs over one `SOCK_SEQPACKET` Unix socket: a packet is a message, at most
//! [`MAX_MESSAGE`] bytes, little-endian, a kind byte first. The first packet of a connection is a
//! [`Hello`] that names the caller:
//!
//! ```text
//!  agent                          engine              command line              engine
//!    │ Hello{Agent, domain} ────────▶│                     │ Hello{Control} ─────▶│
//!    │◀──────── Welcome + descriptors│ (or Refused)        │ JSON request ───────▶│
//!    │ Ready ───────────────────────▶│                     │◀── JSON reply, parts │
//!    │◀───────────────── Sync / Merge / Unmerge            (see `request`)
//!    │ Changes / Merged / Unmerged ─▶│
//! ```
//!
//! After the handshake only the engine asks, one question at a time, and the agent answers in
//! order. A guest never has to push, so no hook of a guest ever waits for a socket (I7).
//!
//! The agent's messages need no allocation and no `std`: the agent runs inside foreign processes.
//! Every decoder is total: any bytes give a message or a [`DecodeError`] (I8).
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "status"), no_std)]

/// The name of the agent's thread, by which tools tell its CPU time from the program's.
pub const AGENT_THREAD: &core::ffi::CStr = c"pageone-agent";

mod agent;
pub mod attach;
mod codec;
#[cfg(feature = "status")]
mod control;
#[cfg(feature = "status")]
mod history;
#[cfg(feature = "status")]
mod knobs;
mod now;
mod page;
#[cfg(feature = "status")]
mod request;
#[cfg(feature = "status")]
pub mod size;
#[cfg(feature = "status")]
mod status;
#[cfg(feature = "status")]
mod why;

pub use agent::{
    ANSWER_HEAD, Answer, Change, Changes, DomainMark, Hello, Journal, MAX_OPS, MAX_OUT, MAX_STORES,
    Merge, MergeOp, Merged, Name, Question, Ready, Reason, Reception, Role, STEP_DESCRIPTORS,
    STEP_DETACHED, STEP_ELSEWHERE, STEP_EXECUTABLE, STEP_FILTER, STEP_MEMORY, STEP_NARROW,
    STEP_RIGHTS, STEP_THREADS, STEP_USERFAULTFD, TALLY_BYTES, Tally, Target, Unmerge, Welcome,
};
pub use codec::{DecodeError, MAX_MESSAGE};
#[cfg(feature = "status")]
pub use control::{MAX_REPLY, ReplyError, ReplyReader, reply_parts};
#[cfg(feature = "status")]
pub use history::Sample;
#[cfg(feature = "status")]
pub use knobs::{KNOBS, Knob, KnobValues, OutOfRange, Pace, RunMode, Setting, Thp};
pub use now::{Now, get_merged_now, put_merge_now};
pub use page::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES, PageBits, PageOutcome};
#[cfg(feature = "status")]
pub use request::{Cause, DomainOf, LeftAlone, MergeNow, MergedNow, Reply, Request};
#[cfg(feature = "status")]
pub use status::{GuestStatus, Recycled, SCHEMA, Status, StoreNode, Unserved, Viewer};
#[cfg(feature = "status")]
pub use why::{WhyNot, WhyNotCode};

/// The version of this protocol; both sides must speak the same one.
pub const VERSION: u16 = 5;
