//! Handover: what one engine leaves to the next, and what the next makes of it.

pub(crate) mod manifest;
pub(crate) mod restore;
pub(crate) mod saved_knobs;
