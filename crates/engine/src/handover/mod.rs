//! Handover: how an engine takes over the legacy of the one before.

pub(crate) mod restore;
pub(crate) mod saved_knobs;
