//! Who does the jobs: a queue, and threads that take from it at idle priority.
//!
//! As many workers as the knob says work at a time: they have turns. There are [`THREADS_A_TURN`] times as many
//! threads, because a worker that waits for an agent's answer gives its turn to another:
//!
//! ```text
//!   worker 0   plan ask ┄┄┄┄┄┄ take  plan ask ┄┄┄┄┄┄┄ take      ┄ waits, without a turn
//!   worker 1            plan  ask ┄┄┄┄┄ take  plan ask ┄┄┄
//! ```
//!
//! What is left to do when the answer is there is short, and done without a turn: so nobody who holds a
//! guest's connection ever waits for one.
//!
//! Reading a hostile guest's memory can block for as long as it likes (a page fault that only the
//! guest can answer). Such a worker is given up after [`STUCK`], with its guest, and replaced; its
//! thread ends when the guest does.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::chunk::Chunk;
use crate::guest::{Fault, Guest};
use crate::plan::Promotions;
use crate::realm::lock;
use crate::schedule::{Core, Scratch};

/// How long a job may sleep without a break before its worker counts as lost. Workers run on idle
/// CPUs only: waiting for one does not count, however long it takes.
pub(crate) const STUCK: Duration = Duration::from_secs(20);
/// Threads for each worker that may work at a time. With two, it happened that both waited.
const THREADS_A_TURN: usize = 3;
/// Heaps that the workers allocate from, if there are not more turns.
const LEAST_HEAPS: u16 = 2;

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
    fn try_take(&self) -> Option<Job> {
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
    fn end_turn(&self) {
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
        self.add([Job::Chunk(chunk, Visit::First)]);
    }
}

/// Who runs the jobs of a round.
pub(crate) trait Crew {
    /// Returns when the queue is idle, at `cut` at the latest (jobs begun are finished).
    fn run(&self, core: &Core, cut: Option<Instant>);
}

/// Runs all jobs on the calling thread.
#[cfg(test)]
pub(crate) struct Alone(pub(crate) Mutex<Scratch>);

#[cfg(test)]
impl Crew for Alone {
    fn run(&self, core: &Core, _cut: Option<Instant>) {
        let mut scratch = lock(&self.0);
        while let Some(job) = core.queue.try_take() {
            let post = Post::default();
            post.begin(&job);
            core.do_job(job, &mut scratch, &post);
            core.queue.done(post.take_turn());
        }
    }
}

/// Where a worker says what it is at.
#[derive(Default)]
pub(crate) struct Post(Mutex<PostState>);

#[derive(Default)]
struct PostState {
    thread: u32,
    has_turn: bool,
    /// The guest whose job is being done.
    guest: Option<Arc<Guest>>,
    asleep: Option<Sleep>,
    abandoned: bool,
}

/// A sleep in which a thread was seen again and again.
#[derive(Clone, Copy)]
struct Sleep {
    number: u64,
    /// When it was seen last.
    seen: Instant,
    /// How long it has lasted, as far as somebody looked.
    lasted: Duration,
}

/// Time between two looks at a sleep that counts. When more has passed, it was this process that stood
/// still: a frozen host is not a worker that is stuck.
const LOOKS: Duration = Duration::from_secs(2);

impl Sleep {
    /// The sleep `number`, seen at `now`, after `before`.
    fn go_on(number: u64, now: Instant, before: Option<Self>) -> Self {
        let same = before.filter(|before| before.number == number);
        let lasted = same.map_or(Duration::ZERO, |before| {
            before.lasted + now.saturating_duration_since(before.seen).min(LOOKS)
        });
        Self {
            number,
            seen: now,
            lasted,
        }
    }
}

impl Post {
    fn begin(&self, job: &Job) {
        let mut state = lock(&self.0);
        state.thread = sys::process::thread_id();
        state.has_turn = true;
        state.guest = match job {
            Job::Look(guest, _) => Some(Arc::clone(guest)),
            Job::Chunk(chunk, _) => chunk.guest.upgrade(),
        };
    }

    /// Whether the worker has its turn still; from now on it has none.
    fn take_turn(&self) -> bool {
        std::mem::take(&mut lock(&self.0).has_turn)
    }

    /// Lets another worker have this one's turn.
    pub(crate) fn step_aside(&self, queue: &Queue) {
        if self.take_turn() {
            queue.end_turn();
        }
    }

    /// Ends the job; false when the worker has been given up meanwhile.
    fn end(&self) -> bool {
        let mut state = lock(&self.0);
        state.guest = None;
        state.asleep = None;
        !state.abandoned
    }

    fn is_abandoned(&self) -> bool {
        lock(&self.0).abandoned
    }

    /// Gives the worker up if it has been in one sleep for longer than `limit`, and condemns its
    /// guest.
    fn give_up(&self, limit: Duration) -> bool {
        let mut state = lock(&self.0);
        let busy = state.guest.is_some() && !state.abandoned;
        let sleep = busy
            .then(|| sys::process::sleep_number(state.thread))
            .flatten();
        state.asleep = sleep.map(|number| Sleep::go_on(number, Instant::now(), state.asleep));
        let stuck = state.asleep.is_some_and(|sleep| sleep.lasted > limit);
        if stuck {
            state.abandoned = true;
            if let Some(guest) = state.guest.take() {
                guest.condemn(&Fault::Stuck);
            }
        }
        stuck
    }
}

struct Worker {
    post: Arc<Post>,
    thread: std::thread::JoinHandle<()>,
}

/// Worker threads.
pub(crate) struct Workers {
    core: Arc<Core>,
    list: Mutex<Vec<Worker>>,
    limit: Duration,
}

impl Workers {
    /// Threads that wait for jobs; those stuck longer than `limit` are replaced.
    pub(crate) fn new(core: Arc<Core>, limit: Duration) -> Self {
        let turns = core.knobs.threads.load(Relaxed);
        sys::process::limit_heaps(turns.max(LEAST_HEAPS));
        let workers = Self {
            core,
            list: Mutex::default(),
            limit,
        };
        workers.resize();
        workers
    }

    /// Starts or ends threads until there are as many as the knob says.
    pub(crate) fn resize(&self) {
        let turns = usize::from(self.core.knobs.threads.load(Relaxed)).max(1);
        let wanted = turns * THREADS_A_TURN;
        self.core.queue.set_workers(wanted, turns);
        let mut list = lock(&self.list);
        while list.len() > wanted {
            if let Some(worker) = list.pop() {
                let _ = worker.thread.join();
            }
        }
        while list.len() < wanted {
            match self.hire(list.len()) {
                Ok(worker) => list.push(worker),
                Err(error) => {
                    tracing::error!(%error, "cannot start a worker");
                    break;
                }
            }
        }
    }

    fn hire(&self, number: usize) -> std::io::Result<Worker> {
        sys::fault::check(sys::fault::Point::Thread)?;
        let (core, post) = (Arc::clone(&self.core), Arc::new(Post::default()));
        let its_post = Arc::clone(&post);
        let thread = std::thread::Builder::new()
            .name(format!("pageone-{number}"))
            .spawn(move || labour(&core, &its_post, number))?;
        Ok(Worker { post, thread })
    }

    fn replace_stuck(&self) {
        for (number, worker) in lock(&self.list).iter_mut().enumerate() {
            if worker.post.give_up(self.limit) {
                self.core.queue.done(worker.post.take_turn());
                self.core.queue.wake();
            }
            // Where no thread can be started, the next look tries again.
            if worker.post.is_abandoned()
                && let Ok(new) = self.hire(number)
            {
                *worker = new; // the old thread goes on alone until its guest ends
            }
        }
    }

    /// Ends all threads but stuck ones.
    pub(crate) fn stop(&self) {
        self.core.queue.clear();
        self.core.queue.set_workers(0, 0);
        while !self.core.queue.wait_idle(Duration::from_secs(1)) {
            self.core.queue.clear();
            self.replace_stuck();
        }
        for worker in lock(&self.list).drain(..) {
            let _ = worker.thread.join();
        }
    }
}

impl Crew for Workers {
    fn run(&self, core: &Core, cut: Option<Instant>) {
        loop {
            let left = cut.map_or(Duration::MAX, |cut| {
                cut.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                core.queue.clear();
            }
            let wait = left.clamp(Duration::from_millis(20), Duration::from_secs(1));
            if core.queue.wait_idle(wait) {
                return;
            }
            self.replace_stuck();
            // Where none could be started, nobody would ever do the jobs.
            if lock(&self.list).is_empty() {
                self.resize();
            }
        }
    }
}

fn labour(core: &Core, post: &Post, number: usize) {
    if let Err(error) = sys::process::yield_to_everyone() {
        tracing::warn!(%error, "a worker cannot step back behind other threads");
    }
    let mut scratch = Scratch::new();
    while let Some(job) = core.queue.take(number, || core.pause()) {
        post.begin(&job);
        core.do_job(job, &mut scratch, post);
        if !post.end() {
            return;
        }
        core.queue.done(post.take_turn());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Lab;
    use std::sync::atomic::AtomicUsize;

    fn one_guest() -> (Lab, Arc<Guest>) {
        let lab = Lab::new();
        lab.guest("d", 1);
        let guest = Arc::clone(&lock(&lab.core.guests)[0]);
        (lab, guest)
    }

    #[test]
    fn a_sleep_lasts_while_somebody_looks() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut sleep = Sleep::go_on(7, at(0), None);
        for ms in [900, 1800] {
            sleep = Sleep::go_on(7, at(ms), Some(sleep));
        }
        assert_eq!(sleep.lasted, Duration::from_millis(1800));
        // The host was suspended for an hour.
        sleep = Sleep::go_on(7, at(3_600_000), Some(sleep));
        assert_eq!(sleep.lasted, Duration::from_millis(1800) + LOOKS);
        sleep = Sleep::go_on(8, at(3_600_100), Some(sleep));
        assert_eq!(sleep.lasted, Duration::ZERO, "another sleep");
    }

    #[test]
    fn whole_visits_come_when_there_is_nothing_else() {
        let (_lab, guest) = one_guest();
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
    fn who_waits_for_a_guest_gives_its_turn_to_another() {
        let (_lab, guest) = one_guest();
        let queue = Queue::default();
        queue.set_workers(2, 1);
        queue.add([(); 2].map(|()| Job::Look(Arc::clone(&guest), false)));
        let post = Post::default();
        post.begin(&queue.take(0, || Duration::ZERO).expect("a job"));
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| tell.send(queue.take(1, || Duration::ZERO).is_some()));
            let early = told.recv_timeout(Duration::from_millis(50));
            assert!(early.is_err(), "one works at a time");
            post.step_aside(&queue);
            assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(true));
        });
        post.step_aside(&queue); // it has none to give
        assert!(!post.take_turn());
        queue.done(false);
        assert!(!queue.wait_idle(Duration::ZERO));
        queue.done(true);
        assert!(queue.wait_idle(Duration::ZERO));
    }

    #[test]
    fn a_worker_that_pauses_leaves_the_job_and_ends_when_told() {
        let (_lab, guest) = one_guest();
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
