//! Views: questions to a daemon and to the kernel, answered as a table or as JSON.

pub(crate) mod history;
mod numa;
pub(crate) mod set;
pub(crate) mod status;
pub(crate) mod top;

pub(crate) use numa::NumaCommand;
