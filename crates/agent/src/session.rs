//! The agent's thread and its talk with the engine.

mod alone;
mod domain;
mod lines;
mod link;
mod report;
pub(crate) mod serve;
