//! Hostile processes of other users against root's daemon: programs in C (`tests/hostile/`) that attack for real,
//! and what must hold meanwhile.
//!
//! ```text
//!   attackers ── user 61004 ──▶┌────────┐◀── users 61001, 61002 ── honest guests: merge, compare, join
//!   (tests/hostile/)           │ daemon │
//!                              └────────┘◀── root ── status, set run=2, SIGTERM
//!                                  │ stores, descriptors, threads, memory: looked at from outside
//! ```
//!
//! Every attack is judged in the same way, by [`arena::Arena::withstands`]:
//!
//! - not one foreign byte is in a store that the attacker holds, and the secret of the setuid program in none;
//! - rounds come at least half as often as before, honest guests merge anew, and all their bytes are right;
//! - a new guest is served within a second; `status`, `set run=2` and SIGTERM answer within a second;
//! - the daemon's memory, threads and descriptors are bounded, and afterwards what they were.
//!
//! A second is longer where other work keeps the machine busy: see [`arena::a_second`].
//!
//! These tests need root: attackers and guests run as users of their own. Each ends all its processes, also when it
//! fails: they end with their standard input, and the harness kills their process groups.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod arena;
mod attacker;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod figures;
mod floods;
mod identity;
mod programs;
mod rights;
mod stores;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod traced;
mod young;
