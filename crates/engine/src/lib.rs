//! PageONE's engine: track, read, index, plan, account.
#![forbid(unsafe_code)]

mod engine;

pub use engine::{Engine, EngineError, Options};
