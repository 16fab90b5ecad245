//! Who does the jobs: threads that take them from the [`queue`](crate::queue), at idle priority.
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

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::guest::{Fault, Guest};
use crate::queue::{Job, Queue};
use crate::realm::lock;
use crate::schedule::{Core, Scratch};

/// How long a job may sleep without a break before its worker counts as lost. Workers run on idle
/// CPUs only: waiting for one does not count, however long it takes.
pub(crate) const STUCK: Duration = Duration::from_secs(20);
/// Threads for each worker that may work at a time. With two, it happened that both waited.
const THREADS_A_TURN: usize = 3;
/// Heaps that the workers allocate from, if there are not more turns.
const LEAST_HEAPS: u16 = 2;

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
    fn who_waits_for_a_guest_gives_its_turn_to_another() {
        let (_lab, guest) = Lab::with_guest();
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
}
