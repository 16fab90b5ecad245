//! What `pageone attach` and the image that it puts into a process agree on.

/// The number of a call that no kernel knows: a thread that makes it has done what it was put to.
pub const DONE: i32 = 0x50a_6e01;

/// Room for the words that the environment holds for an agent that is preloaded.
pub const WORDS_BYTES: usize = 1024;
