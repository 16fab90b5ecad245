//! Shared by the tests and the benches: numbers that look random, and a thread's own clock.
#![allow(dead_code, unreachable_pub, unused_imports)] // each uses its part

pub use sdtree::measure::{key, mix};

/// How long this thread has been on a processor.
pub fn on_processor_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace()
        .next()
        .and_then(|first| first.parse().ok())
        .unwrap_or(0)
}
