//! Calls of the program over merged memory, and merged memory made the program's own.

pub(crate) mod ahead;
pub(crate) mod discard;
pub(crate) mod frames;
pub(crate) mod lines;
pub(crate) mod look;
pub(crate) mod private;
pub(crate) mod remap;
pub(crate) mod scarce;
pub(crate) mod stores;
pub(crate) mod strays;
pub(crate) mod tally;
pub(crate) mod whole;
