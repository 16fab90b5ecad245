//! Merge: which page maps which slot, and the request to the agent that makes it so.

pub(crate) mod lookup;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod publish;
pub(crate) mod read;
pub(crate) mod request;
pub(crate) mod rows;
pub(crate) mod span;
