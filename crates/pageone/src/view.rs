//! Views: questions to a daemon and to the kernel, answered as a table or as JSON.

mod numa;
pub(crate) mod set;
pub(crate) mod status;

pub(crate) use numa::NumaCommand;
