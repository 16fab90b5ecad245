//! The properties of `props/config.rs`, under libFuzzer.
#![no_main]

mod bound;
#[path = "../props/config.rs"]
mod props;

libfuzzer_sys::fuzz_target!(|text: &str| props::check(text));
