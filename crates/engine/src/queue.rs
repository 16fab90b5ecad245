//! The jobs of a round, and whose turn it is.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::chunk::Chunk;
use crate::guest::Guest;
use crate::plan::Promotions;
use crate::realm::lock;

/// Jobs before that of a chunk whose candidates were promoted. By then whoever found their twins has found the others of the
/// chunk too, and the canonical pages are still in the cache.
const SOON: usize = 16;

/// A piece of work.
pub(crate) enum Job {
    /// A look at a guest; whether to scan it too.
    Look(Arc<Guest>, bool),
    /// A visit of a chunk.
    Chunk(Arc<Chunk>, Visit),
}

/// How a chunk is visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visit {
    /// What promises little may be left.
    First,
    /// As the first, but while another worker talks to the guest this one waits for it.
    Insisting,
    /// Everything is read that is to be read.
    Whole,
}

impl Visit {
    /// Whether nothing is left for another visit.
    pub(crate) fn is_whole(self) -> bool {
        self == Self::Whole
    }
}

/// Jobs to do.
#[derive(Default)]
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    /// There are jobs, or a worker shall end.
    work: Condvar,
    /// Nothing is left to do.
    idle: Condvar,
}

#[derive(Default)]
struct Inner {
    jobs: VecDeque<Job>,
    /// Chunks that get a whole visit when there are no other jobs.
    later: VecDeque<Arc<Chunk>>,
    active: usize,
    /// Workers with this number or a higher one end.
    workers: usize,
    /// How many may work at a time.
    turns: usize,
    /// How many do.
    working: usize,
}

impl Inner {
    fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.later.is_empty()
    }

    /// The next job, and a turn to do it.
    fn begin(&mut self) -> Option<Job> {
        let whole = |chunk| Job::Chunk(chunk, Visit::Whole);
        let next = self.jobs.pop_front();
        let job = next.or_else(|| self.later.pop_front().map(whole))?;
        self.active += 1;
        self.working += 1;
        Some(job)
    }
}

impl Queue {
    /// Adds jobs.
    pub(crate) fn add(&self, jobs: impl IntoIterator<Item = Job>) {
        lock(&self.inner).jobs.extend(jobs);
        self.work.notify_all();
    }

    /// Adds a chunk whose whole visit can wait.
    pub(crate) fn add_later(&self, chunk: Arc<Chunk>) {
        lock(&self.inner).later.push_back(chunk);
        self.work.notify_one();
    }

    /// The next job, if there is one.
    #[cfg(test)]
    pub(crate) fn try_take(&self) -> Option<Job> {
        lock(&self.inner).begin()
    }

    /// The next job, with a turn to do it; waits for both, and before for as long as `pause` says: a worker
    /// that waits holds no chunk and no guest. `None`: the worker shall end.
    pub(crate) fn take(&self, worker: usize, pause: impl Fn() -> Duration) -> Option<Job> {
        let mut inner = lock(&self.inner);
        loop {
            if worker >= inner.workers {
                // Somebody may wait for the turn that this worker gave back.
                self.work.notify_all();
                return None;
            }
            if inner.is_empty() || inner.working >= inner.turns {
                inner = self
                    .work
                    .wait(inner)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let pause = pause();
            if pause.is_zero() {
                return inner.begin();
            }
            // Woken early by new jobs and knobs, it asks again.
            let waited = self.work.wait_timeout(inner, pause);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes a worker's turn back before its job is done.
    pub(crate) fn end_turn(&self) {
        let mut inner = lock(&self.inner);
        inner.working -= 1;
        if !inner.is_empty() {
            self.work.notify_one();
        }
    }

    /// Notes that a job is done, by a worker that still `has_turn` or does not.
    pub(crate) fn done(&self, has_turn: bool) {
        let mut inner = lock(&self.inner);
        inner.active -= 1;
        inner.working -= usize::from(has_turn);
        if inner.active == 0 && inner.is_empty() {
            self.idle.notify_all();
        }
    }

    /// Sets how many workers there shall be, and how many of them may work at a time.
    pub(crate) fn set_workers(&self, workers: usize, turns: usize) {
        let mut inner = lock(&self.inner);
        (inner.workers, inner.turns) = (workers, turns);
        self.work.notify_all();
    }

    /// Lets workers that wait look again at why.
    pub(crate) fn wake(&self) {
        self.work.notify_all();
    }

    /// Waits at most `wait` until nothing is left to do.
    pub(crate) fn wait_idle(&self, wait: Duration) -> bool {
        let inner = lock(&self.inner);
        let busy = |inner: &mut Inner| inner.active > 0 || !inner.is_empty();
        let (_inner, timeout) = self
            .idle
            .wait_timeout_while(inner, wait, busy)
            .unwrap_or_else(PoisonError::into_inner);
        !timeout.timed_out()
    }

    /// Drops the jobs not begun.
    pub(crate) fn clear(&self) {
        let mut inner = lock(&self.inner);
        // They stand in the queue no more.
        for job in std::mem::take(&mut inner.jobs) {
            if let Job::Chunk(chunk, visit) = job {
                chunk.start(visit.is_whole());
            }
        }
        let later = std::mem::take(&mut inner.later);
        later.into_iter().for_each(|chunk| chunk.start(true));
        self.idle.notify_all();
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.inner).is_empty()
    }
}

impl Promotions for Queue {
    fn push(&self, chunk: Arc<Chunk>) {
        let mut inner = lock(&self.inner);
        let at = inner.jobs.len().min(SOON);
        inner.jobs.insert(at, Job::Chunk(chunk, Visit::First));
        self.work.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::fake::Lab;

    #[test]
    fn promoted_chunks_come_soon_but_not_at_once() {
        let (_lab, guest) = Lab::with_guest();
        let chunk = guest.realm.chunks.create(&guest, 0, 0).expect("a chunk");
        for (jobs, place) in [(0, 0), (3, 3), (100, SOON)] {
            let queue = Queue::default();
            queue.add((0..jobs).map(|_| Job::Look(Arc::clone(&guest), false)));
            queue.push(Arc::clone(&chunk));
            let all: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
            let is_chunk = |job: &Job| matches!(job, Job::Chunk(..));
            assert_eq!(
                (all.len(), all.iter().position(is_chunk)),
                (jobs + 1, Some(place))
            );
        }
    }

    #[test]
    fn whole_visits_come_when_there_is_nothing_else() {
        let (_lab, guest) = Lab::with_guest();
        let chunk = guest.realm.chunks.create(&guest, 0, 0).expect("a chunk");
        let queue = Queue::default();
        assert!(chunk.enqueue_whole() && !chunk.enqueue_whole());
        queue.add_later(Arc::clone(&chunk));
        queue.add([Job::Look(guest, false)]);
        assert!(matches!(queue.try_take(), Some(Job::Look(..))));
        let whole = |job| matches!(job, Some(Job::Chunk(_, Visit::Whole)));
        assert!(!queue.is_empty() && whole(queue.try_take()) && queue.is_empty());
        queue.add_later(Arc::clone(&chunk));
        queue.clear();
        assert!(
            queue.is_empty() && chunk.enqueue_whole(),
            "it stands there no more"
        );
    }

    #[test]
    fn a_worker_that_pauses_leaves_the_job_and_ends_when_told() {
        let (_lab, guest) = Lab::with_guest();
        let queue = Queue::default();
        queue.set_workers(1, 1);
        queue.add([Job::Look(guest, false)]);
        let asked = AtomicUsize::new(0);
        let pause = || {
            asked.fetch_add(1, Relaxed);
            Duration::from_secs(3600)
        };
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| queue.take(0, pause).is_some());
            while asked.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            assert!(!queue.is_empty(), "the job waits as well");
            assert!(!queue.wait_idle(Duration::ZERO));
            queue.set_workers(0, 0);
            assert!(!worker.join().expect("no panic"), "it ends without the job");
        });
        queue.set_workers(1, 1);
        assert!(queue.take(0, || Duration::ZERO).is_some());
    }
}
