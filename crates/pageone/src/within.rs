//! A job for which the caller does not wait for ever: what is asked of a process may take as long as the process likes.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// So long may the lists of mappings and pages of a process take. Those of a TiB take some ten seconds.
pub(crate) const LISTING: Duration = Duration::from_secs(60);

/// What `job` gives, if it is done within `patience`, in a thread of its own. The thread of one that is not goes on until it is, or until
/// this process ends.
pub(crate) fn within<T: Send + 'static>(
    patience: Duration,
    job: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = channel();
    // After so long the caller listens no more. Without a thread for it the job is not done.
    let begun = thread::Builder::new().spawn(move || done.send(job()));
    begun.ok().and_then(|_| result.recv_timeout(patience).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_does_not_end_is_left_alone() {
        let (end, ended) = channel::<()>();
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
        let job = move || ended.recv().is_err();
        assert_eq!(within(Duration::from_millis(20), job), None);
        drop(end);
    }
}
