//! The jobs of a round, and the user whose turn it is.
//!
//! Each user has a lane, and the next job comes from the lane for which least was done in this round. So with any
//! number of guests, and whatever they make a job cost, one user makes another's round about twice as long at most:
//!
//! ```text
//!   uid 1000   look look chunk chunk                  done after twice its own time
//!   uid 6666   look ┄┄┄┄┄┄┄ look ┄┄┄┄┄┄ look ┄┄┄┄     goes on alone, until the round is cut
//! ```
//!
//! A round that is cut takes no jobs any more, also none that jobs under way bring: a look that goes on would never end
//! it. Inside a lane jobs keep their order. The tempting alternative, a share for each guest, would give most to the user
//! who starts most processes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar};
use std::time::Duration;

use crate::domain::chunk::Chunk;
use crate::guest::Guest;
use crate::scan::terms::Aim;
use crate::sync::{Ordered, QUEUE, lock};

/// Jobs before that of a chunk whose candidates were promoted. By then the worker that found their twins has found the others of
/// the chunk too, and the canonical pages are still in the cache.
const SOON: usize = 16;

/// A piece of work.
pub(crate) enum Job {
    /// A look at a guest, and what it is for.
    Look(Arc<Guest>, Aim),
    /// A visit of a chunk.
    Chunk(Arc<Chunk>, Visit),
}

impl Job {
    /// The user whom it is done for.
    pub(crate) fn uid(&self) -> u32 {
        match self {
            Self::Look(guest, _) => guest.user.uid,
            Self::Chunk(chunk, _) => chunk.uid,
        }
    }

    /// Notes that it stands in the queue no more.
    fn drop_unbegun(self) {
        if let Self::Chunk(chunk, visit) = self {
            chunk.start(visit.is_whole());
        }
    }
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

/// Threads for each worker that may work at a time. With two, it happened that both waited.
pub(crate) const THREADS_A_TURN: u16 = 3;

/// Jobs to do.
#[derive(Default)]
pub(crate) struct Queue {
    inner: Ordered<Inner, QUEUE>,
    /// There are jobs, or a worker shall end.
    work: Condvar,
    /// Nothing is left to do.
    idle: Condvar,
}

/// The jobs of one user's guests.
#[derive(Default)]
struct Lane {
    jobs: VecDeque<Job>,
    /// Whole visits, for when there are no other jobs.
    later: VecDeque<Job>,
    /// Jobs begun and not done.
    active: usize,
    /// How long workers had a turn for it in this round, and a part of the time for which they waited for its agents: no other job
    /// has their threads meanwhile.
    spent: Duration,
}

impl Lane {
    fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.later.is_empty()
    }

    fn is_busy(&self) -> bool {
        self.active > 0 || !self.is_empty()
    }

    fn next(&mut self) -> Option<Job> {
        let next = self.jobs.pop_front();
        next.or_else(|| self.later.pop_front())
    }
}

#[derive(Default)]
struct Inner {
    /// By user id.
    lanes: BTreeMap<u32, Lane>,
    /// Workers with this number or a higher one end.
    workers: usize,
    /// How many may work at a time.
    turns: usize,
    /// How many do.
    working: usize,
    /// Whether the round was cut: jobs that come are dropped.
    cut: bool,
    /// Whether any were.
    dropped: bool,
}

impl Inner {
    fn is_empty(&self) -> bool {
        self.lanes.values().all(Lane::is_empty)
    }

    /// Adds a job, with at most so many of its user's before it; none is added after a cut.
    fn add(&mut self, job: Job, before: usize) {
        if self.cut {
            self.dropped = true;
            return job.drop_unbegun();
        }
        let lane = self.lanes.entry(job.uid()).or_default();
        let list = match job {
            Job::Chunk(_, Visit::Whole) => &mut lane.later,
            _ => &mut lane.jobs,
        };
        list.insert(list.len().min(before), job);
    }

    fn is_idle(&self) -> bool {
        !self.lanes.values().any(Lane::is_busy)
    }

    /// The next job, and a turn to do it: of the user for whom least was done in this round.
    fn begin(&mut self) -> Option<Job> {
        let lanes = self.lanes.values_mut().filter(|lane| !lane.is_empty());
        let lane = lanes.min_by_key(|lane| lane.spent)?;
        let job = lane.next()?;
        lane.active += 1;
        self.working += 1;
        Some(job)
    }

    /// The lane of a job that was begun.
    fn lane_of(&mut self, uid: u32) -> &mut Lane {
        let lane = self.lanes.get_mut(&uid);
        lane.unwrap_or_else(|| panic!("a job of user {uid}, who has no lane"))
    }

    /// Whether a job waits, and a turn for it.
    fn has_work(&self) -> bool {
        !self.is_empty() && self.working < self.turns
    }

    fn give_turn_back(&mut self, uid: u32, took: Duration) {
        assert!(self.working > 0, "a turn came back that no worker had");
        self.working -= 1;
        self.lane_of(uid).spent += took;
    }
}

impl Queue {
    /// Begins a round: no user has had anything yet.
    pub(crate) fn begin_round(&self) {
        let mut inner = lock(&self.inner);
        (inner.cut, inner.dropped) = (false, false);
        inner.lanes.retain(|_, lane| lane.is_busy());
        let lanes = inner.lanes.values_mut();
        lanes.for_each(|lane| lane.spent = Duration::ZERO);
    }

    /// Adds jobs.
    pub(crate) fn add(&self, jobs: impl IntoIterator<Item = Job>) {
        let mut inner = lock(&self.inner);
        jobs.into_iter().for_each(|job| inner.add(job, usize::MAX));
        drop(inner);
        self.work.notify_all();
    }

    /// Adds a chunk whose whole visit can wait.
    pub(crate) fn add_later(&self, chunk: Arc<Chunk>) {
        lock(&self.inner).add(Job::Chunk(chunk, Visit::Whole), usize::MAX);
        self.work.notify_one();
    }

    /// The next job, if there is one.
    pub(crate) fn try_take(&self) -> Option<Job> {
        lock(&self.inner).begin()
    }

    /// The next job, with a turn to do it; waits for both, and before for as long as `pause` says: a worker
    /// that waits holds no chunk and no guest. `None`: the worker shall end.
    pub(crate) fn take(&self, worker: usize, pause: impl Fn() -> Duration) -> Option<Job> {
        loop {
            let inner = lock(&self.inner);
            if worker >= inner.workers {
                // Another worker may wait for the turn that this one gave back.
                self.work.notify_all();
                return None;
            }
            if !inner.has_work() {
                drop(inner.wait(&self.work));
                continue;
            }
            drop(inner); // the pause sums over all guests
            let pause = pause();
            let mut inner = lock(&self.inner);
            if inner.has_work() && worker < inner.workers {
                if pause.is_zero() {
                    return inner.begin();
                }
                // Woken early by new jobs and knobs, it asks again.
                drop(inner.wait_at_most(&self.work, pause));
            }
        }
    }

    /// Takes a worker's turn back, which it `took` for a job of user `uid`, before the job is done.
    pub(crate) fn end_turn(&self, uid: u32, took: Duration) {
        let mut inner = lock(&self.inner);
        inner.give_turn_back(uid, took);
        if !inner.is_empty() {
            self.work.notify_one();
        }
    }

    /// Notes that a job of user `uid` is done: by a worker that has its turn still and `took` so long, or that has given its turn back
    /// and waited for an agent since.
    pub(crate) fn done(&self, uid: u32, took: Duration, has_turn: bool) {
        let mut inner = lock(&self.inner);
        match has_turn {
            true => inner.give_turn_back(uid, took),
            // A thread is a part of a turn: at the full price, who waits for agents would have less than who burns turns.
            false => inner.lane_of(uid).spent += took / u32::from(THREADS_A_TURN),
        }
        let lane = inner.lane_of(uid);
        assert!(lane.active > 0, "a job of user {uid} was done twice");
        lane.active -= 1;
        if inner.is_idle() {
            self.idle.notify_all();
        }
    }

    /// How long workers had turns for each user in this round.
    pub(crate) fn spent(&self) -> Vec<(u32, Duration)> {
        let inner = lock(&self.inner);
        let lanes = inner.lanes.iter();
        lanes.map(|(&uid, lane)| (uid, lane.spent)).collect()
    }

    /// Whether jobs are left for such users only, for whom more was done in this round than for any other, and
    /// more than `floor`.
    pub(crate) fn is_left_to_the_greedy(&self, floor: Duration) -> bool {
        let inner = lock(&self.inner);
        let (busy, done): (Vec<_>, Vec<_>) = inner.lanes.values().partition(|lane| lane.is_busy());
        let most = done.iter().map(|lane| lane.spent).max();
        let greedy = |most: Duration| busy.iter().all(|lane| lane.spent > most.max(floor));
        !busy.is_empty() && most.is_some_and(greedy)
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
        let inner = inner.wait_at_most_while(&self.idle, wait, |inner| !inner.is_idle());
        inner.is_idle()
    }

    /// Drops the jobs not begun, and all that come before the next round begins.
    pub(crate) fn cut(&self) {
        let mut inner = lock(&self.inner);
        inner.cut = true;
        inner.dropped |= !inner.is_empty();
        for lane in inner.lanes.values_mut() {
            let jobs = lane.jobs.drain(..).chain(lane.later.drain(..));
            jobs.for_each(Job::drop_unbegun);
        }
        self.idle.notify_all();
    }

    /// Whether jobs of this round were dropped.
    pub(crate) fn has_dropped(&self) -> bool {
        lock(&self.inner).dropped
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.inner).is_empty()
    }

    /// Queues a chunk whose candidates were promoted.
    pub(crate) fn push(&self, chunk: Arc<Chunk>) {
        lock(&self.inner).add(Job::Chunk(chunk, Visit::First), SOON);
        self.work.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::testing::fake::Lab;

    #[test]
    fn promoted_chunks_come_soon_but_not_at_once() {
        let (_lab, guest) = Lab::with_guest();
        let chunk = guest
            .domain
            .chunks
            .create((guest.number, guest.user.uid), 0, 0, wire::PageBits::EMPTY)
            .expect("a chunk");
        for (jobs, place) in [(0, 0), (3, 3), (100, SOON)] {
            let queue = Queue::default();
            queue.add((0..jobs).map(|_| Job::Look(Arc::clone(&guest), Aim::Hear)));
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
        let chunk = guest
            .domain
            .chunks
            .create((guest.number, guest.user.uid), 0, 0, wire::PageBits::EMPTY)
            .expect("a chunk");
        let queue = Queue::default();
        assert!(chunk.enqueue(true) && !chunk.enqueue(true));
        queue.add_later(Arc::clone(&chunk));
        queue.add([Job::Look(guest, Aim::Hear)]);
        assert!(matches!(queue.try_take(), Some(Job::Look(..))));
        let whole = |job| matches!(job, Some(Job::Chunk(_, Visit::Whole)));
        assert!(!queue.is_empty() && whole(queue.try_take()) && queue.is_empty());
        queue.add_later(Arc::clone(&chunk));
        queue.cut();
        assert!(
            queue.is_empty() && chunk.enqueue(true),
            "it stands there no more"
        );
        chunk.start(true);
    }

    #[test]
    fn a_cut_round_takes_no_jobs_before_the_next() {
        let (_lab, guest) = Lab::with_guest();
        let chunk = guest
            .domain
            .chunks
            .create((0, 0), 0, 0, wire::PageBits::FULL)
            .expect("a chunk");
        let queue = Queue::default();
        let bring = || {
            assert!(
                chunk.enqueue(false) && chunk.enqueue(true),
                "it stands nowhere"
            );
            queue.add([Job::Look(Arc::clone(&guest), Aim::Round)]);
            queue.push(Arc::clone(&chunk));
            queue.add_later(Arc::clone(&chunk));
        };
        queue.cut();
        (0..2).for_each(|_| bring());
        assert!(queue.is_empty());
        queue.begin_round();
        bring();
        let jobs = std::iter::from_fn(|| queue.try_take());
        assert_eq!(jobs.count(), 3);
    }

    #[test]
    fn jobs_are_left_to_the_greedy_only_while_there_are_some() {
        let lab = Lab::new();
        let queue = Queue::default();
        let guests = [1000, 1001].map(|uid| {
            let at = lab.guest_of("d", 1, uid);
            Arc::clone(&lock(&lab.core.guests)[at])
        });
        let [prompt, greedy] = guests.each_ref().map(|guest| guest.user.uid);
        let spend = |uid, seconds| {
            let mut inner = lock(&queue.inner);
            inner.lanes.entry(uid).or_default().spent = Duration::from_secs(seconds);
        };
        let [_, last] = guests;
        queue.set_workers(1, 2);
        spend(prompt, 1);
        spend(greedy, 3);
        // All is done: a round that waits for answers goes on waiting.
        assert!(!queue.is_left_to_the_greedy(Duration::ZERO));
        queue.add([Job::Look(last, Aim::Hear)]);
        assert!(queue.is_left_to_the_greedy(Duration::ZERO));
        assert!(!queue.is_left_to_the_greedy(Duration::from_secs(4)));
    }

    #[test]
    fn a_worker_that_pauses_leaves_the_job_and_ends_when_told() {
        let (_lab, guest) = Lab::with_guest();
        let queue = Queue::default();
        queue.set_workers(1, 1);
        queue.add([Job::Look(guest, Aim::Hear)]);
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
