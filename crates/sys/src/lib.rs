//! System-call wrappers and /proc and /sys readers of PageONE.
pub mod mempolicy;
pub mod node;
pub mod residence;
pub mod zeroed;
