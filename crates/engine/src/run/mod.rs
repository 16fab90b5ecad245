//! Run: rounds, their jobs, and the threads that do them.

pub(crate) mod core;
pub(crate) mod cpu_limit;
pub(crate) mod discards;
pub(crate) mod driver;
pub(crate) mod early;
pub(crate) mod glances;
pub(crate) mod knobs;
pub(crate) mod now;
pub(crate) mod order;
pub(crate) mod pace;
pub(crate) mod post;
pub(crate) mod queue;
pub(crate) mod quota;
pub(crate) mod switch;
pub(crate) mod waiting;
pub(crate) mod wishes;
pub(crate) mod workers;
