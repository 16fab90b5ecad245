//! The primitives that a model checker replaces.
//!
//! Only what the algorithm synchronizes through comes from here: the edge words and the pointer to the directory. Counters stay
//! with `std`: no decision that must be right depends on them.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicUsize};
pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicUsize};
