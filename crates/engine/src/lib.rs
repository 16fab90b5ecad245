//! PageONE's engine: track, read, index, plan, account.
#![forbid(unsafe_code)]
