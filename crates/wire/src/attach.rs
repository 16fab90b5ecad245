//! The words on which `pageone attach` and the image that it puts into a process agree.

/// The call by which a thread tells the process that holds it that its task is done: gettid(2), which changes nothing, and which
/// a seccomp filter allows where an agent is put. A number that no kernel knows would be for the filter to judge.
pub const DONE: u32 = 186;

/// What stands in the second argument then, which gettid(2) does not have.
pub const DONE_MARK: u64 = 0x50a6_e01d_50a6_e01d;

/// Room for the words that the environment holds for an agent that is preloaded.
pub const WORDS_BYTES: usize = 1024;

/// The number, as of a system call, by which the board tells the image that a thread is about to unmap its own stack and to end. The
/// kernel never sees it.
pub const LEAVES: i64 = 0x50a6_e01d;
