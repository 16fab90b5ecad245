//! Comparisons of PageONE with KSM.
#![forbid(unsafe_code)]
