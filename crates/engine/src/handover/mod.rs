//! Handover: the legacy of one engine, and how the next one takes it over.

pub(crate) mod manifest;
pub(crate) mod restore;
pub(crate) mod saved_knobs;
