//! Messages between PageONE's agent, engine and command line.
#![forbid(unsafe_code)]
