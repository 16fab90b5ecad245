//! A job for which the caller does not wait for ever: what is asked of a process may take as long as the process likes.

use std::io::{Error, ErrorKind, Result};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// So long may the lists of mappings and pages of a process take. Those of a TiB take some ten seconds.
pub(crate) const LISTING: Duration = Duration::from_secs(60);

/// What `job` gives, if it is done within `patience`, in a thread of its own. The thread of one that is not goes on until it is, or until
/// this process ends.
///
/// # Errors
/// `TimedOut`; what starting a thread gives.
pub(crate) fn within<T: Send + 'static>(
    patience: Duration,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (done, result) = channel();
    // After so long the caller listens no more.
    thread::Builder::new().spawn(move || done.send(job()))?;
    result.recv_timeout(patience).map_err(|error| match error {
        RecvTimeoutError::Timeout => Error::new(
            ErrorKind::TimedOut,
            format!("it takes more than {patience:?}"),
        ),
        RecvTimeoutError::Disconnected => Error::other("the look at it has failed"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_does_not_end_is_left_alone() {
        let (end, ended) = channel::<()>();
        assert_eq!(within(Duration::from_secs(60), || 7).unwrap(), 7);
        let job = move || ended.recv().is_err();
        let late = within(Duration::from_millis(20), job).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        drop(end);
    }
}
