//! Scan: the changes of the pages of a guest since the last look.

pub(crate) mod claim;
pub(crate) mod look;
pub(crate) mod offers;
pub(crate) mod outcomes;
pub(crate) mod relocation;
pub(crate) mod terms;
pub(crate) mod track;
mod walk;
