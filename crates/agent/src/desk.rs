//! The desk: work of hooks that takes descriptors is done by the agent's thread, which has a descriptor table of its own.
//!
//! ```text
//!   hook, with the lock   job ─▶ ASKED ─▶ rings or knocks ── sleeps ──────────────────▶ DONE ─▶ goes on
//!   the agent's thread    sleeps for the engine, or for the lock ─▶ TAKEN ─ does it ─┘
//! ```
//!
//! So the program's table never has a file of PageONE's: no `open` of another thread misses the lowest number, and no
//! `close_range`, `close` or `dup2` of another thread gives a hook a wrong file.
//!
//! **What must hold.**
//!
//! - D1. One hook asks at a time, with the lock held: until its job is done, or taken back, it does nothing else.
//! - D2. A job is done once: by the agent's thread if that took it ([`TAKEN`]), else by the hook. Both are one exchange of [`Desk::state`].
//! - D3. The agent's thread looks at the desk before each sleep, and is woken from it. It tells where it will sleep, and then looks;
//!   a hook asks, and then looks where it sleeps. So one of the two sees the other (both in the one order of `SeqCst`).
//! - D4. A job waits for nothing but the kernel, takes no lock, and leaves nothing frozen.
//! - D5. No hook waits for long for a thread that does not come. It takes a job back that was not taken within [`PATIENCE`]; within
//!   [`AGAIN`], if the thread did not sleep, or did not take the last one. From a thread that was killed alone it takes any job back.
//!   Then it does the job itself: jobs ask the kernel for what there is, so they may be begun anew.
//!
//! A hook whose thread stands on memory that is frozen by its own job sleeps meanwhile, like any other thread. What it wakes for it
//! finds thawed, or waits for it (D4).
//!
//! The tempting alternative, a descriptor at a high number, comes from a low one: only dup(2) can choose a number.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::thread::futex;
use sys::clock::monotonic as now;
use sys::thread::{Bell, is_gone};

/// What is asked of the agent's thread, and where that sleeps; a fork child starts with zeros.
#[derive(Default)]
pub(crate) struct Desk {
    /// [`FREE`], [`ASKED`], [`TAKEN`] or [`DONE`].
    state: AtomicU32,
    /// What the agent's thread sleeps for: a [`Place`].
    place: AtomicU32,
    /// How often hooks rang, and how often a ring was taken off the bell.
    rung: AtomicU32,
    heard: AtomicU32,
    job: AtomicPtr<()>,
    arg: AtomicUsize,
    /// Whether the last job was taken back.
    missed: AtomicBool,
}

/// What is done at the desk, with a number that it knows.
pub(crate) type Job = unsafe fn(usize);

const FREE: u32 = 0;
const ASKED: u32 = 1;
const TAKEN: u32 = 2;
const DONE: u32 = 3;

/// Where the agent's thread may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It does not sleep: it looks at the desk before it does.
    Awake,
    /// It waits for the engine, and for its bell.
    Bell,
    /// It waits for the lock.
    Lock,
}

/// So long a hook waits for the agent's thread to take its job: on a busy machine that has to wait for a CPU.
const PATIENCE: Duration = Duration::from_millis(200);
/// The same where it is at other work, or did not take the last one: it may be stopped.
const AGAIN: Duration = Duration::from_millis(10);
const MOMENT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

impl Desk {
    /// Has the agent's thread, which is `agent`, do a job; `knock` wakes it where it waits for the lock. Tells whether it is done.
    /// If not, no other thread does it.
    ///
    /// # Safety
    /// The job must be one for any thread, by the number `arg`, until this returns. The caller holds the lock.
    pub(crate) unsafe fn ask(&self, agent: u32, knock: impl Fn(), job: Job, arg: usize) -> bool {
        self.job.store(job as *mut (), Ordering::Relaxed);
        self.arg.store(arg, Ordering::Relaxed);
        // SeqCst: D3. As a Release it has the Acquire in `serve` for its partner.
        self.state.store(ASKED, Ordering::SeqCst);
        let place = self.place.load(Ordering::SeqCst);
        if place == Place::Bell as u32 {
            self.rung.fetch_add(1, Ordering::Relaxed);
            let _ = Bell::ring(agent);
        } else if place == Place::Lock as u32 {
            knock();
        }
        // Relaxed: the caller holds the lock.
        let is_busy = place == Place::Awake as u32 || self.missed.load(Ordering::Relaxed);
        self.wait(agent, if is_busy { AGAIN } else { PATIENCE })
    }

    fn wait(&self, agent: u32, patience: Duration) -> bool {
        let end = now() + patience;
        loop {
            // Acquire pairs with the Release in `serve`: what the job wrote is there.
            let state = self.state.load(Ordering::Acquire);
            if state == DONE {
                self.state.store(FREE, Ordering::Relaxed);
                self.missed.store(false, Ordering::Relaxed);
                return true;
            }
            let waited = futex::wait(&self.state, futex::Flags::PRIVATE, state, Some(&MOMENT));
            if waited != Err(Errno::TIMEDOUT) {
                continue;
            }
            // A thread that is gone changes nothing any more.
            let late = state == ASKED && now() >= end || is_gone(agent);
            if late && self.swap(state, FREE) {
                self.missed.store(true, Ordering::Relaxed);
                return false;
            }
        }
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        let order = (Ordering::Acquire, Ordering::Relaxed);
        let swapped = self.state.compare_exchange(from, to, order.0, order.1);
        swapped.is_ok()
    }

    /// For the agent's thread: sleeps by `sleep`, unless there is a job, which it does. `None` if it did not sleep.
    pub(crate) fn sleep<T>(&self, place: Place, sleep: impl FnOnce() -> T) -> Option<T> {
        // SeqCst, both: D3.
        self.place.store(place as u32, Ordering::SeqCst);
        let asked = self.state.load(Ordering::SeqCst) == ASKED;
        let slept = (!asked).then(sleep);
        self.place.store(Place::Awake as u32, Ordering::Relaxed);
        self.serve();
        slept
    }

    fn serve(&self) {
        if !self.swap(ASKED, TAKEN) {
            return;
        }
        let job = self.job.load(Ordering::Relaxed);
        // SAFETY: `ask` has stored a `Job`, before the state that was found here.
        let job = unsafe { std::mem::transmute::<*mut (), Job>(job) };
        // SAFETY: who asked vouches for the job and its number, and waits.
        unsafe { job(self.arg.load(Ordering::Relaxed)) };
        self.state.store(DONE, Ordering::Release);
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, 1);
    }

    /// For the agent's thread, whose bell can be heard: whether that may be a hook's ring, which is then taken off by `hush`. Rings
    /// that came together are one, so there may be more to hear than there is.
    pub(crate) fn hear(&self, hush: impl FnOnce()) -> bool {
        let rang = self.rung.load(Ordering::Relaxed) != self.heard.load(Ordering::Relaxed);
        if rang {
            self.heard.fetch_add(1, Ordering::Relaxed);
            hush();
        }
        rang
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static DONE_JOBS: AtomicUsize = AtomicUsize::new(0);

    /// # Safety
    /// For any thread.
    unsafe fn count(by: usize) {
        DONE_JOBS.fetch_add(by, Ordering::Relaxed);
    }

    #[test]
    fn each_job_is_done_once_by_one_of_two_threads() {
        static DESK: Desk = Desk {
            state: AtomicU32::new(FREE),
            place: AtomicU32::new(0),
            rung: AtomicU32::new(0),
            heard: AtomicU32::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            arg: AtomicUsize::new(0),
            missed: AtomicBool::new(false),
        };
        static WORD: AtomicU32 = AtomicU32::new(0);
        static END: AtomicBool = AtomicBool::new(false);
        let (tell, told) = std::sync::mpsc::channel();
        let agent = std::thread::spawn(move || {
            tell.send(sys::process::thread_id()).unwrap();
            while !END.load(Ordering::Relaxed) {
                let seen = WORD.load(Ordering::Relaxed);
                let wait = || futex::wait(&WORD, futex::Flags::PRIVATE, seen, Some(&MOMENT));
                DESK.sleep(Place::Lock, wait);
            }
        });
        let thread = told.recv().unwrap();
        let knock = || {
            WORD.fetch_add(1, Ordering::Relaxed);
            let _ = futex::wake(&WORD, futex::Flags::PRIVATE, 1);
        };
        let mut served = 0;
        for _ in 0..20_000 {
            // SAFETY: the job is for any thread, and only this thread asks.
            let done = unsafe { DESK.ask(thread, knock, count, 1) };
            served += usize::from(done);
            DONE_JOBS.fetch_add(usize::from(!done), Ordering::Relaxed);
            assert_eq!(DESK.state.load(Ordering::Relaxed), FREE);
        }
        END.store(true, Ordering::Relaxed);
        agent.join().unwrap();
        assert_eq!(DONE_JOBS.load(Ordering::Relaxed), 20_000);
        assert!(served > 19_000, "{served} were done at the desk");
        // SAFETY: as above; no other thread is there to do it.
        assert!(!unsafe { DESK.ask(thread, knock, count, 1) });
    }

    #[test]
    fn no_more_rings_are_taken_than_there_were() {
        let desk = Desk::default();
        assert!(!desk.hear(|| unreachable!()));
        desk.rung.store(2, Ordering::Relaxed);
        assert!(desk.hear(|| {}) && desk.hear(|| {}) && !desk.hear(|| {}));
    }
}
