//! The agent's thread and its talk with the engine.

mod alone;
mod domain;
mod link;
pub(crate) mod report;
pub(crate) mod serve;

pub(crate) use link::is_trusted;
#[cfg(target_arch = "x86_64")]
pub(crate) use link::trust_unmapped;
