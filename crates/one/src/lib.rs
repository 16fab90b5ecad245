//! ONE, the Object Non-duplicate Engine: give it bytes, get a shared handle.
#![forbid(unsafe_code)]
