//! Locks on files that others hold for a moment.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, Result};

/// Locks a file for this process alone, and waits `patience` for others.
///
/// # Errors
/// `WOULDBLOCK` when another process has it still.
pub(crate) fn within(file: impl AsFd, patience: Duration) -> Result<()> {
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK | Errno::INTR) if begun.elapsed() < patience => {
                thread::sleep(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}
