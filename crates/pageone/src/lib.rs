//! What the `pageone` command reads from files: the daemon's configuration and its policy.
//!
//! A library, so that the fuzz targets reach the parsers; the command is in `main.rs`.
#![forbid(unsafe_code)]

pub mod config;
pub mod human;
pub mod policy;
