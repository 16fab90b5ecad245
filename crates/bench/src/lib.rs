//! Comparisons of PageONE with KSM: the same guests, the same clock, the same measure.
//!
//! ```text
//!  content ──▶ guests (processes) ──offer──▶ a contender merges ──▶ samples ──▶ rows
//!  what is in     fill, offer, verify        KSM, or PageONE        every 50 ms   t50, t95, CPU,
//!  each page                                 behind one trait       /proc/meminfo  saved, metadata
//! ```
//!
//! Whatever a contender says of itself is not used: savings come from /proc/meminfo, CPU time from
//! /proc/PID/stat, so that both are measured by the same rule. The saving is by how much the guests'
//! proportional memory shrank; the net saving, which the times are taken from, is what MemAvailable
//! gained since just before the guests offered their memory, so that every overhead is in it.
#![forbid(unsafe_code)]

mod content;
mod curve;
mod error;
mod guests;
mod ksm;
mod merge;
mod report;
mod timing;

pub use content::Content;
pub use curve::{Curve, Sample};
pub use error::BenchError;
pub use guests::{Answer, Guest, serve_guest};
pub use ksm::{KsmContender, KsmGuard, watch_ksm};
pub use merge::{Contender, Plan, measure, memory_needed};
pub use report::{Machine, Report, Row};
pub use timing::{Access, Kind, Latency, Probe, Timing};
