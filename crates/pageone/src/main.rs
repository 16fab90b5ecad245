//! The `pageone` command.
#![forbid(unsafe_code)]
fn main() {}
