//! System-call wrappers and /proc and /sys readers of PageONE.
