//! What the tests and the benches share: numbers that look random, and a thread's own clock.
#![allow(dead_code, unreachable_pub)] // each uses its part

/// A cheap generator (splitmix64): tests need spread, not secrecy.
pub fn mix(seed: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(0x632b_e59b_d9b4_e019);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of number `index`.
pub fn key(index: u64) -> u128 {
    u128::from(mix(index)) << 64 | u128::from(mix(!index))
}

/// How long this thread has been on a processor.
pub fn on_processor_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace()
        .next()
        .and_then(|first| first.parse().ok())
        .unwrap_or(0)
}
