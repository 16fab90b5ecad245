//! PageONE's agent: the merge window inside a guest, LD_PRELOAD hooks and the C API.
