//! The properties of `props/wire.rs`, under libFuzzer.
#![no_main]

mod bound;
#[path = "../props/wire.rs"]
mod props;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| props::check(bytes));
