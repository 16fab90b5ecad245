//! Seccomp filters and the agent: whether one from before it lets it work, and the one of its own thread. How a filter is
//! read, and all calls that the agent makes, stand in [`sys::filter`].

pub(crate) mod narrow;
pub(crate) mod trial;
