//! Where a worker says at which job it is, and how one is found that does not come back from a guest's memory.
//!
//! Reading memory can take as long as its owner likes. It may meet a page fault that only the guest's own handler answers, or a file
//! of a file system that hangs. Or a call of its own holds the lock of its memory map. No signal ends such a sleep. So each
//! look at a guest's memory goes through [`in_guest`], and a watch ([`Post::give_up_lost`]) gives a worker up that has slept in
//! one for [`STALL`](crate::run::workers::STALL):
//!
//! ```text
//!   worker   chunk ─▶ in_guest ┄┄┄ asleep ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄▶ back: Err(GivenUp), ends
//!   watch         .    .    .   lost: its turn and its place go to a new thread
//!   guest         served        rests: no worker looks at it ┄┄┄▶ served again, or dropped after STUCK
//! ```
//!
//! A fork of a great process or the memory of a host that swaps make honest guests slow in the same way. They lose the
//! time and nothing else: the thread comes back, and its guest is served again. The bytes that such a thread has
//! read never count, because its call fails whatever the kernel gave.
//!
//! The tempting alternative, to wait for longer before a worker is given up, makes all others wait as long.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sys::foreign::ForeignName;
use sys::pagemap::PageRun;
use sys::process::Remote;
use wire::{PageBits, Ready};

use crate::domain::store::PageBytes;
use crate::error::Refusal;
use crate::guest::Guest;
use crate::guest::memory::{GivenUp, Mapped, Memory};
use crate::page::StoreId;
use crate::run::queue::{Job, Queue};
use crate::sync::lock;

thread_local! {
    /// That of this thread, if it is a worker.
    static OWN: RefCell<Option<Arc<Post>>> = const { RefCell::new(None) };
}

/// Does `act`, which looks at a guest's memory and may sleep for as long as the guest likes.
///
/// # Errors
/// [`GivenUp`] when the worker was given up meanwhile or before.
fn in_guest<T>(act: impl FnOnce() -> T) -> io::Result<T> {
    let Some(post) = OWN.with_borrow(Clone::clone) else {
        return Ok(act()); // no worker: no other thread waits for it
    };
    let given_up = || io::Error::other(GivenUp);
    if !post.enter() {
        return Err(given_up());
    }
    let done = act();
    match post.leave() {
        true => Ok(done),
        false => Err(given_up()),
    }
}

/// Where a worker says what it is at.
#[derive(Default)]
pub(crate) struct Post(Mutex<State>);

#[derive(Default)]
struct State {
    thread: u32,
    /// Since when it does its job, or waits for an agent without a turn.
    since: Option<Instant>,
    /// False from when it gave its turn back.
    has_turn: bool,
    /// The user whose job is being done.
    uid: u32,
    /// The guest whose job is being done.
    guest: Option<Arc<Guest>>,
    /// Whether it looks at the guest's memory.
    inside: bool,
    asleep: Option<Sleep>,
    abandoned: bool,
}

/// A sleep in which a thread was seen again and again.
#[derive(Clone, Copy)]
struct Sleep {
    number: u64,
    /// When it was seen last.
    seen: Instant,
    /// How long it has lasted, as far as the watch looked.
    lasted: Duration,
}

impl Sleep {
    /// The sleep `number`, seen at `now`, after `before`. When more than `most` has passed between, it was this process
    /// that stood still: a frozen host is not a worker that is stuck.
    fn go_on(number: u64, now: Instant, before: Option<Self>, most: Duration) -> Self {
        let same = before.filter(|before| before.number == number);
        let lasted = same.map_or(Duration::ZERO, |before| {
            before.lasted + now.saturating_duration_since(before.seen).min(most)
        });
        Self {
            number,
            seen: now,
            lasted,
        }
    }
}

impl Post {
    /// The post of the calling thread from now on.
    pub(crate) fn take_up(self: &Arc<Self>) {
        lock(&self.0).thread = sys::process::thread_id();
        OWN.set(Some(Arc::clone(self)));
    }

    pub(crate) fn begin(&self, job: &Job, guest: Option<Arc<Guest>>) {
        let mut state = lock(&self.0);
        (state.since, state.has_turn) = (Some(Instant::now()), true);
        state.uid = job.uid();
        state.guest = guest;
    }

    /// Lets another worker have this one's turn.
    pub(crate) fn step_aside(&self, queue: &Queue) {
        let mut state = lock(&self.0);
        if let Some(since) = state.since.filter(|_| state.has_turn) {
            (state.since, state.has_turn) = (Some(Instant::now()), false);
            // Not given up in between: its lane is there as long as the job is.
            queue.end_turn(state.uid, since.elapsed());
        }
    }

    /// Tells the queue that the job is done, or given up.
    pub(crate) fn finish(&self, queue: &Queue) {
        let mut state = lock(&self.0);
        let (uid, has_turn) = (state.uid, state.has_turn);
        let since = state.since.take().expect("a job that was begun");
        drop(state);
        queue.done(uid, since.elapsed(), has_turn);
    }

    fn enter(&self) -> bool {
        let mut state = lock(&self.0);
        (state.inside, state.asleep) = (true, None);
        !state.abandoned
    }

    fn leave(&self) -> bool {
        let mut state = lock(&self.0);
        state.inside = false;
        !state.abandoned
    }

    /// Ends the job; false when the worker has been given up meanwhile.
    pub(crate) fn end(&self) -> bool {
        let mut state = lock(&self.0);
        let guest = state.guest.take();
        state.asleep = None;
        if let Some(guest) = guest.filter(|_| state.abandoned) {
            guest.regain_thread();
        }
        !state.abandoned
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        lock(&self.0).abandoned
    }

    /// Whether the thread has ended its last job.
    pub(crate) fn is_free(&self) -> bool {
        lock(&self.0).guest.is_none()
    }

    /// How long the worker has been in one sleep in its guest's memory; counts at most `most` since the last call.
    fn sleeps(&self, most: Duration) -> Option<Duration> {
        let mut state = lock(&self.0);
        let thread = state.inside.then_some(state.thread);
        let sleep = thread.and_then(sys::process::sleep_number);
        let now = Instant::now();
        state.asleep = sleep.map(|number| Sleep::go_on(number, now, state.asleep, most));
        state.asleep.map(|sleep| sleep.lasted)
    }

    /// Gives the worker up if it has slept in its guest's memory for longer than `limit`; tells whether it did.
    pub(crate) fn give_up_lost(&self, limit: Duration) -> bool {
        let slept = self.sleeps(limit / 2);
        let mut state = lock(&self.0);
        // It may have come back between the two.
        let lost = slept.is_some_and(|slept| slept >= limit) && state.inside && !state.abandoned;
        if lost {
            state.abandoned = true;
            state.guest.iter().for_each(|guest| guest.lose_thread());
        }
        lost
    }

    /// Condemns the guest of a worker given up that still sleeps after `limit`.
    pub(crate) fn end_patience(&self, limit: Duration) {
        let slept = self.sleeps(Duration::from_secs(2));
        if slept.is_some_and(|slept| slept > limit)
            && let Some(guest) = &lock(&self.0).guest
        {
            guest.condemn(&crate::guest::agent::Fault::Stuck);
        }
    }
}

/// A guest's memory, each look at which is watched.
pub(crate) struct Watched(pub(crate) Box<dyn Memory>);

/// Methods that are watched, each with what it answers for a worker that was given up.
macro_rules! watched {
    ($(fn $look:ident(&self $(, $with:ident: $type:ty)*) -> $answer:ty = $given_up:expr;)*) => {$(
        fn $look(&self, $($with: $type),*) -> $answer {
            in_guest(|| self.0.$look($($with),*)).unwrap_or_else($given_up)
        }
    )*};
}

impl Memory for Watched {
    watched! {
        fn admit(&self, ready: Ready) -> Result<(), Refusal> = |error| Err(Refusal::System(error));
        fn compare(&self) -> Result<(), Refusal> = |error| Err(Refusal::System(error));
        fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> io::Result<(usize, u64)> = Err;
        fn peek(&self, range: Range<u64>, runs: &mut [PageRun]) -> io::Result<(usize, u64)> = Err;
        fn shared(&self, range: Range<u64>) -> io::Result<PageBits> = Err;
        fn read(&self, ranges: &[Remote], pages: &mut [&mut PageBytes]) -> io::Result<usize> = Err;
        fn parent(&self) -> Option<u32> = |_| None;
        fn name(&self) -> ForeignName = |_| ForeignName::default();
        // No caller follows up on pages that are nowhere.
        fn stores(&self, pages: &[usize]) -> Vec<Option<StoreId>> = |_| vec![None; pages.len()];
        fn pins(&self, most: u32) -> Option<String> = |error| Some(error.to_string());
        fn borrows(&self, most: u32) -> Option<String> = |error| Some(error.to_string());
        fn mapped(&self, stores: &[u64], each: &mut dyn FnMut(Mapped)) -> io::Result<bool> = Err;
        fn mappings(&self) -> Option<u64> = |_| None;
        // Where it is given up, no other thread has the guard: what the thread does when it is back counts.
        fn rescue(&self, last: bool) -> usize = |_| 0;
    }

    fn has_left(&self) -> bool {
        self.0.has_left()
    }

    fn is_guarded(&self) -> bool {
        self.0.is_guarded()
    }

    fn has_exited(&self) -> bool {
        self.0.has_exited()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scan::terms::Aim;
    use crate::testing::fake::Lab;

    #[test]
    fn a_sleep_counts_only_while_somebody_looks() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let most = Duration::from_millis(50);
        let go_on = |number, ms, before| Sleep::go_on(number, at(ms), before, most);
        let mut sleep = go_on(7, 0, None);
        for ms in [30, 60] {
            sleep = go_on(7, ms, Some(sleep));
        }
        assert_eq!(sleep.lasted, Duration::from_millis(60));
        // The host was suspended for an hour.
        sleep = go_on(7, 3_600_000, Some(sleep));
        assert_eq!(sleep.lasted, Duration::from_millis(60) + most);
        sleep = go_on(8, 3_600_001, Some(sleep));
        assert_eq!(sleep.lasted, Duration::ZERO, "another sleep");
    }

    #[test]
    fn who_waits_for_a_guest_gives_its_turn_to_another() {
        let (_lab, guest) = Lab::with_guest();
        let queue = Queue::default();
        queue.set_workers(2, 1);
        queue.add([(); 2].map(|()| Job::Look(Arc::clone(&guest), Aim::Hear)));
        let post = Post::default();
        let job = queue.take(0, || Duration::ZERO).expect("a job");
        post.begin(&job, Some(guest));
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| tell.send(queue.take(1, || Duration::ZERO).is_some()));
            let early = told.recv_timeout(Duration::from_millis(50));
            assert!(early.is_err(), "one works at a time");
            post.step_aside(&queue);
            assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(true));
        });
        post.step_aside(&queue); // it has none to give
        assert!(!lock(&post.0).has_turn);
        let spent = || queue.spent()[0].1;
        let before = spent();
        post.finish(&queue);
        assert!(spent() > before, "who waits has a thread, too");
        assert!(!queue.wait_idle(Duration::ZERO));
        queue.done(0, Duration::ZERO, true);
        assert!(queue.wait_idle(Duration::ZERO));
    }

    #[test]
    fn what_a_thread_reads_that_was_given_up_does_not_count() {
        let (_lab, guest) = Lab::with_guest();
        std::thread::spawn(move || {
            let post = Arc::new(Post::default());
            post.take_up();
            post.begin(
                &Job::Look(Arc::clone(&guest), Aim::Hear),
                Some(Arc::clone(&guest)),
            );
            assert_eq!(in_guest(|| 1).expect("it counts"), 1);
            let late = in_guest(|| {
                lock(&post.0).abandoned = true;
                guest.lose_thread();
            });
            assert!(crate::guest::memory::is_given_up(
                &late.expect_err("it does not count")
            ));
            let asked = std::cell::Cell::new(false);
            let after = in_guest(|| asked.set(true));
            assert!(after.is_err() && !asked.get(), "nor is anything read later");
            assert!(guest.is_stuck());
            assert!(!post.end() && !guest.is_stuck());
        })
        .join()
        .expect("no panic");
    }
}
