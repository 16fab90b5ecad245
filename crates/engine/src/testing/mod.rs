//! Fake guests that die, lie and stall, and the stories that are told with them.

pub(crate) mod fake;
pub(crate) mod histories;
pub(crate) mod trials;
pub(crate) mod trials_adopt;
pub(crate) mod trials_copies;
pub(crate) mod trials_discards;
pub(crate) mod trials_early;
pub(crate) mod trials_guess;
pub(crate) mod trials_hostile;
pub(crate) mod trials_nodes;
pub(crate) mod trials_now;
pub(crate) mod trials_spans;
