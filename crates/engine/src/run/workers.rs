//! Workers: threads that take jobs from the [`queue`](crate::run::queue), at idle priority.
//!
//! As many workers as the knob says work at a time: they have turns. There are [`THREADS_A_TURN`] times as many
//! threads, because a worker that waits for an agent's answer gives its turn to another:
//!
//! ```text
//!   worker 0   plan ask ┄┄┄┄┄┄ take  plan ask ┄┄┄┄┄┄┄ take      ┄ waits, without a turn
//!   worker 1            plan  ask ┄┄┄┄┄ take  plan ask ┄┄┄
//! ```
//!
//! The rest of a job when the answer is there is short, and done without a turn. So no thread that
//! holds a guest's connection ever waits for a turn.
//!
//! Looks at a hostile guest's memory can block for as long as it likes. Such a worker is given up after [`STALL`], and
//! replaced: see [`post`](crate::run::post). Its guest rests until the thread is back, and is dropped after [`STUCK`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::run::core::{Core, Crew, Scratch};
use crate::run::post::Post;
use crate::run::queue::THREADS_A_TURN;
use crate::run::waiting::{GLIMPSE, Timing};
use crate::sync::lock;

/// How long a worker may sleep in a guest's memory before it is replaced.
pub(crate) const STALL: Duration = Duration::from_millis(100);
/// How long before its guest is dropped. A fork of a process of 1 TiB takes some seconds.
pub(crate) const STUCK: Duration = Duration::from_secs(20);
/// How often workers are looked at while they are at work.
const WATCH: Duration = Duration::from_millis(25);
/// Heaps that the workers allocate from, if there are not more turns.
const LEAST_HEAPS: u16 = 2;

/// Runs all jobs on the calling thread: in tests and simulations.
pub(crate) struct Alone(pub(crate) Mutex<Scratch>);

impl Alone {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Scratch::new()))
    }

    /// Does jobs while there are some, and `before` each what a worker does.
    pub(crate) fn run(&self, core: &Core, before: impl Fn()) {
        // No lock of the engine's: it is not counted.
        let mut scratch = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = || {
            before();
            core.queue.try_take()
        };
        while let Some(job) = next() {
            let post = Post::default();
            core.do_job(job, &mut scratch, &post);
            post.finish(&core.queue);
        }
    }
}

impl Crew for Alone {
    fn work(&self, core: &Core, _timing: &Timing) {
        self.run(core, || ());
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
    /// Posts of threads that were given up and are not back.
    lost: Mutex<Vec<Arc<Post>>>,
    limit: Duration,
}

impl Workers {
    /// Threads that wait for jobs. A guest that keeps one asleep for longer than `limit` is dropped.
    pub(crate) fn new(core: Arc<Core>, limit: Duration) -> Self {
        let turns = core.knobs.values().threads;
        sys::process::limit_heaps(turns.max(LEAST_HEAPS));
        let workers = Self {
            core,
            list: Mutex::default(),
            lost: Mutex::default(),
            limit,
        };
        workers.resize();
        workers
    }

    /// Starts or ends threads until there are as many as the knob says.
    pub(crate) fn resize(&self) {
        let turns = usize::from(self.core.knobs.values().threads).max(1);
        let wanted = turns * usize::from(THREADS_A_TURN);
        self.core.queue.set_workers(wanted, turns);
        let mut list = lock(&self.list);
        // One too many ends after its job. It may sleep in a guest's memory, so no thread waits for it.
        while list.len() > wanted
            && list
                .last()
                .is_some_and(|worker| worker.thread.is_finished())
        {
            list.pop();
        }
        for (number, worker) in list.iter_mut().enumerate().take(wanted) {
            if worker.thread.is_finished()
                && let Ok(new) = self.hire(number)
            {
                *worker = new;
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

    /// Replaces workers that sleep in a guest's memory, and drops guests that keep one for too long.
    pub(crate) fn watch(&self) {
        for (number, worker) in lock(&self.list).iter_mut().enumerate() {
            if worker.post.give_up_lost(STALL) {
                worker.post.finish(&self.core.queue);
                self.core.queue.wake();
                lock(&self.lost).push(Arc::clone(&worker.post));
            }
            // Where no thread can be started, the next look tries again.
            if worker.post.is_abandoned()
                && let Ok(new) = self.hire(number)
            {
                *worker = new; // the old thread goes on alone until its guest lets it go
            }
        }
        lock(&self.lost).retain(|post| {
            post.end_patience(self.limit);
            !post.is_free()
        });
    }

    /// Ends all threads but stuck ones.
    pub(crate) fn stop(&self) {
        self.core.queue.cut();
        self.core.queue.set_workers(0, 0);
        while !self.core.queue.wait_idle(WATCH) {
            self.core.queue.cut();
            self.watch();
        }
        for worker in lock(&self.list).drain(..) {
            if !worker.post.is_abandoned() {
                let _ = worker.thread.join();
            }
        }
    }

    /// What the driver is to do now and then while workers are at work.
    pub(crate) fn attend(&self) {
        self.core.meter.count();
        self.watch();
        // Where none could be started, no thread would ever do the jobs.
        if lock(&self.list).is_empty() {
            self.resize();
        }
    }
}

impl Crew for Workers {
    fn look(&self, core: &Core, timing: &Timing) {
        let mut watched = Instant::now();
        loop {
            let awaits = || !timing.grace_is_over() && core.waiting.awaits();
            let wait = match awaits() {
                true => timing.left().min(GLIMPSE),
                false => WATCH,
            };
            let idle = core.queue.wait_idle(wait);
            // Asked anew: the looks that were under way have come to wait meanwhile.
            let awaits = awaits();
            if idle && !awaits || core.queue.is_left_to_the_greedy(timing.floor) {
                // Those whose answers came in the last moment have their looks with the chunks.
                return;
            }
            if awaits {
                core.take_answers(if idle {
                    timing.left().min(WATCH)
                } else {
                    Duration::ZERO
                });
            }
            if watched.elapsed() >= WATCH {
                core.keep_to_time();
                self.attend();
                watched = Instant::now();
            }
        }
    }

    fn work(&self, core: &Core, timing: &Timing) {
        let (fair, mut cut) = (timing.fair, timing.cut);
        let left_to = |end: Instant| end.saturating_duration_since(Instant::now());
        loop {
            if left_to(fair).is_zero() && core.queue.is_left_to_the_greedy(timing.floor) {
                cut = cut.min(fair);
            }
            let left = left_to(cut);
            if left.is_zero() {
                core.queue.cut();
            }
            let next = [left, left_to(fair)]
                .into_iter()
                .filter(|left| !left.is_zero());
            let watch = next.min().map_or(WATCH, |next| next.min(WATCH));
            let mut wait = Duration::ZERO;
            if core.queue.wait_idle(watch) {
                // The late ones have what is left of the grace when all else is done, and no more: without it a quick
                // round would never hear them.
                cut = cut.min(timing.grace);
                wait = left_to(cut);
                if wait.is_zero() || !core.waiting.is_any() {
                    return;
                }
            }
            core.take_answers(wait.min(WATCH));
            core.keep_to_time();
            self.attend();
        }
    }
}

fn labour(core: &Core, post: &Arc<Post>, number: usize) {
    if let Err(error) = sys::priority::yield_to_everyone() {
        tracing::warn!(%error, "a worker cannot step back behind other threads");
    }
    post.take_up();
    let mut scratch = Scratch::new();
    while let Some(job) = core.queue.take(number, || core.pause()) {
        sys::priority::step_back();
        core.do_job(job, &mut scratch, post);
        if !post.end() {
            return;
        }
        post.finish(&core.queue);
    }
}
