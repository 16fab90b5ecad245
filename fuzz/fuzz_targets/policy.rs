//! The properties of `props/policy.rs`, under libFuzzer.
#![no_main]

mod bound;
#[path = "../props/policy.rs"]
mod props;

libfuzzer_sys::fuzz_target!(|text: &str| props::check(text));
