//! Closing descriptors that may take long to close, in threads that do nothing else.
//!
//! Two kinds of descriptors keep the thread that closes them:
//!
//! - the last reference to something that waits: a socket with `SO_LINGER` in the queue of a stranger's connection;
//! - **a file with locks on it.** The kernel lets a process take millions of POSIX locks (fcntl(2)) on a file that it may
//!   open to read. Each close(2) of that file, by any process, walks them under a spin lock, several times: 0.5 s for
//!   a million. A guest can do so on its own files in `/proc`, on its pidfd and on all that it was given.
//!
//! So whatever belongs to a guest is closed here ([`Late`]), its page map and its mappings too. Texts of `/proc` that are
//! read often stay open while there are locks: see [`text`](crate::text).
//!
//! The threads are bounded: by their number, and by one a user, so that a user whose descriptors do not close holds up
//! no other user's. One that is made rests when nothing is left, until there is more. For where memory is refused, a new thread
//! may end the process, for std panics in it without a stack for its signals. A thread that is done with one thing takes the next
//! of the user who waits longest. What waits is counted by user and by [`Kind`], for each kind has a limit of its own: guests
//! that end together take no connection's place.
//!
//! Source: `filp_flush()` in fs/open.c, `locks_remove_posix()` and `locks_remove_file()` in fs/locks.c.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::priority;

/// The most threads that close; each user has one at most.
const MOST_CLOSERS: usize = 32;
/// The most of them that close connections. A user with subordinate ids is many users before his guest is taken in, and what he
/// sends along may make each of them wait for ever.
const MOST_AT_CONNECTIONS: usize = MOST_CLOSERS / 2;

/// Stands for the users that have locks on files of no user in particular: no user has this number.
pub(crate) const NOBODY: u32 = u32::MAX;

/// What waits to be closed: each kind has a limit of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A connection.
    Connection,
    /// What a guest's session was made of.
    Session,
    /// A file of `/proc` that was read once.
    Text,
}

/// How many there are of each kind.
type Counts = [usize; 3];

/// What closes something when it is dropped.
type Burden = Box<dyn Send>;

/// What is one user's.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Kind, Burden)>,
    /// Of all that waits, and of what is being closed.
    counts: Counts,
    /// Whether a thread is closing something.
    closing: bool,
}

/// Users for whom no thread is closing anything, with their turns, in the order in which they came.
type Turns = VecDeque<(u64, u32)>;

/// What is to be closed, of all users.
struct Work {
    users: BTreeMap<u32, Queue>,
    /// Of those whose next thing is a connection, and of the others.
    turns: [Turns; 2],
    /// The turns given.
    given: u64,
    counts: Counts,
    /// Connections that are being closed.
    connections: usize,
    /// All threads, the one that rests too.
    threads: usize,
    /// Whether one of them rests. It takes this back itself when it is awake, so there is never a second one.
    rests: bool,
    /// Whether that one was called and is not awake yet. The next gift calls another thread.
    is_called: bool,
}

impl Work {
    const NONE: Self = Self {
        users: BTreeMap::new(),
        turns: [VecDeque::new(), VecDeque::new()],
        given: 0,
        counts: [0; 3],
        connections: 0,
        threads: 0,
        rests: false,
        is_called: false,
    };
}

/// The work of all closers.
struct Closers {
    work: Mutex<Work>,
    /// There is something for the one that rests.
    wakes: Condvar,
}

static CLOSERS: Closers = Closers::new();

/// Has a thread drop what belongs to user `uid`. Never waits.
pub(crate) fn give(uid: u32, kind: Kind, burden: impl Send + 'static) {
    CLOSERS.give(uid, kind, Box::new(burden));
}

/// How much of this kind waits to be closed: of user `uid`, and in all.
#[must_use]
pub fn unclosed(uid: u32, kind: Kind) -> (usize, usize) {
    let work = CLOSERS.lock();
    let his = work
        .users
        .get(&uid)
        .map_or(0, |queue| queue.counts[kind as usize]);
    (his, work.counts[kind as usize])
}

impl Work {
    fn add(&mut self, uid: u32, kind: Kind, burden: Burden) {
        let queue = self.users.entry(uid).or_default();
        let is_idle = queue.waiting.is_empty() && !queue.closing;
        queue.waiting.push_back((kind, burden));
        queue.counts[kind as usize] += 1;
        self.counts[kind as usize] += 1;
        if is_idle {
            self.give_turn(uid, kind);
        }
    }

    fn give_turn(&mut self, uid: u32, next: Kind) {
        self.given += 1;
        self.turns[usize::from(next != Kind::Connection)].push_back((self.given, uid));
    }

    /// Whose turn is next: of those that may have one it came first.
    fn turns(&mut self) -> Option<&mut Turns> {
        let full = self.connections == MOST_AT_CONNECTIONS;
        let [connections, others] = &mut self.turns;
        let came = |turns: &Turns| turns.front().map_or(u64::MAX, |turn| turn.0);
        let first = match full || came(others) < came(connections) {
            true => others,
            false => connections,
        };
        (!first.is_empty()).then_some(first)
    }

    /// What is closed next, by a thread that does nothing else until it tells that it is [`done`](Self::done).
    fn next(&mut self) -> Option<(u32, Kind, Burden)> {
        let (_, uid) = self.turns()?.pop_front()?;
        let queue = self.users.get_mut(&uid)?;
        let (kind, burden) = queue.waiting.pop_front()?;
        queue.closing = true;
        self.connections += usize::from(kind == Kind::Connection);
        Some((uid, kind, burden))
    }

    fn done(&mut self, uid: u32, kind: Kind) {
        self.counts[kind as usize] -= 1;
        self.connections -= usize::from(kind == Kind::Connection);
        let Some(queue) = self.users.get_mut(&uid) else {
            unreachable!("user {uid} has something that was closed");
        };
        queue.counts[kind as usize] -= 1;
        queue.closing = false;
        match queue.waiting.front().map(|next| next.0) {
            None => drop(self.users.remove(&uid)),
            Some(next) => self.give_turn(uid, next),
        }
    }
}

/// Whether a process has POSIX locks on the file; false where the kernel does not tell. Neither allocates nor sets `errno`.
pub(crate) fn is_locked(file: &impl AsFd) -> bool {
    // SAFETY: plain numbers, for which zero is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // Such a lock on the whole file is in conflict with any other one: the first ends the kernel's search.
    lock.l_type = libc::c_short::try_from(libc::F_WRLCK).unwrap_or(1);
    let number = file.as_fd().as_raw_fd().cast_unsigned() as usize;
    let command = libc::F_GETLK.cast_unsigned() as usize;
    let args = [
        number,
        command,
        (&raw mut lock).expose_provenance(),
        0,
        0,
        0,
    ];
    // SAFETY: the kernel reads and writes `lock`, which nothing else has.
    let told = unsafe { crate::raw::call(libc::SYS_fcntl, args) };
    told.is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
}

/// Something of a guest's that is closed late: dropping it hands it to a closer.
pub struct Late<T: Send + 'static> {
    uid: u32,
    kind: Kind,
    /// `None` only while it is dropped.
    value: Option<T>,
}

impl<T: Send> Late<T> {
    /// What belongs to a guest of user `uid`.
    pub fn new(uid: u32, value: T) -> Self {
        Self::of(Kind::Session, uid, value)
    }

    /// What belongs to user `uid`, and counts as of this kind.
    pub fn of(kind: Kind, uid: u32, value: T) -> Self {
        let value = Some(value);
        Self { uid, kind, value }
    }

    /// That it is another user's.
    pub(crate) fn belongs_to(&mut self, uid: u32) {
        self.uid = uid;
    }
}

impl<T: Send> Deref for Late<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is not dropped")
    }
}

impl<T: Send + fmt::Debug> fmt::Debug for Late<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

impl<T: Send> Drop for Late<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            give(self.uid, self.kind, value);
        }
    }
}

impl Closers {
    const fn new() -> Self {
        Self {
            work: Mutex::new(Work::NONE),
            wakes: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        priority::lock(&self.work)
    }

    fn give(&'static self, uid: u32, kind: Kind, burden: Burden) {
        let mut work = self.lock();
        work.add(uid, kind, burden);
        self.have_done(&mut work);
    }

    /// Sees to it that a thread takes the next turn, if there is one: the one that rests, or a new one.
    fn have_done(&'static self, work: &mut Work) {
        if work.turns().is_none() {
            return;
        }
        if work.rests && !work.is_called {
            work.is_called = true;
            return self.wakes.notify_one();
        }
        if work.threads == MOST_CLOSERS {
            return;
        }
        work.threads += 1;
        let thread = std::thread::Builder::new().name("closer".to_owned());
        // A thread begins with the policy of the one that starts it, and one that yields would wait for an idle CPU to begin at all.
        if priority::without_yielding(|| thread.spawn(|| self.close())).is_err() {
            // Tried again with the next one.
            work.threads -= 1;
        }
    }

    /// Drops one thing after another, of each user in turn, while there is anything that no other thread's user has. Then it rests,
    /// unless another one does.
    fn close(&'static self) {
        let mut work = self.lock();
        loop {
            while let Some((uid, kind, burden)) = work.next() {
                // A connection that is done may leave another one its place.
                self.have_done(&mut work);
                drop(work);
                drop(burden);
                work = self.lock();
                work.done(uid, kind);
            }
            if work.rests {
                work.threads -= 1;
                return;
            }
            work.rests = true;
            // Another thread may have taken by then what it was called for.
            let awake = self.wakes.wait_while(work, |work| !work.is_called);
            work = awake.unwrap_or_else(PoisonError::into_inner);
            (work.rests, work.is_called) = (false, false);
        }
    }
}

/// Another description of a file, with a lock: as if another process had it.
#[cfg(test)]
pub(crate) fn locked(path: &std::path::Path) -> std::fs::File {
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: plain numbers, for which zero is valid: the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(libc::F_RDLCK).unwrap();
    // SAFETY: the kernel reads `lock`.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    assert_eq!(done, 0);
    file
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[track_caller]
    fn wait_for(mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < PATIENCE, "waited in vain");
            std::thread::yield_now();
        }
    }

    /// Ends when it is told to.
    struct Slow(std::sync::mpsc::Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    /// Tells when it ends.
    struct Quick(std::sync::mpsc::Sender<std::thread::ThreadId>);

    impl Drop for Quick {
        fn drop(&mut self) {
            let _ = self.0.send(std::thread::current().id());
        }
    }

    #[test]
    fn who_drops_does_not_wait_and_users_wait_for_themselves_only() {
        let (end, ended) = channel();
        let (tell, told) = channel();
        // Users that no other test has.
        drop(Late::new(4_000_000_001, Slow(ended)));
        drop(Late::new(4_000_000_001, Quick(tell.clone())));
        let of = |uid| unclosed(uid, Kind::Session).0;
        wait_for(|| of(4_000_000_001) == 2);
        assert_eq!(unclosed(4_000_000_001, Kind::Connection).0, 0);
        assert_eq!(unclosed(4_000_000_001, Kind::Text).0, 0);
        drop(Late::new(4_000_000_002, Quick(tell)));
        let thread = told.recv_timeout(PATIENCE).unwrap();
        assert_ne!(thread, std::thread::current().id());
        assert!(told.try_recv().is_err(), "it was before the slow one");
        drop(end);
        told.recv_timeout(PATIENCE).unwrap();
        wait_for(|| of(4_000_000_001) + of(4_000_000_002) == 0);
    }

    #[test]
    fn a_thread_that_has_closed_rests_and_closes_what_comes_next() {
        static OWN: Closers = Closers::new();
        let (tell, told) = channel();
        let close = |uid| OWN.give(uid, Kind::Session, Box::new(Quick(tell.clone())));
        let rests = || wait_for(|| OWN.lock().rests);
        let threads: Vec<_> = (0..3)
            .map(|uid| {
                close(uid);
                let thread = told.recv_timeout(PATIENCE).unwrap();
                rests();
                thread
            })
            .collect();
        assert_eq!(threads, [threads[0]; 3]);
        // Two gifts at once have two threads, and one of these rests.
        let (end, ended) = channel();
        OWN.give(1, Kind::Session, Box::new(Slow(ended)));
        close(2);
        told.recv_timeout(PATIENCE).unwrap();
        drop(end);
        rests();
        wait_for(|| OWN.lock().threads == 1);
        // However they meet.
        for uid in (0..5000).map(|round| round % 3) {
            close(uid);
        }
        assert!((0..5000).all(|_| told.recv_timeout(PATIENCE).is_ok()));
        wait_for(|| OWN.lock().threads == 1);
    }

    /// Tells when it ends, by the clock.
    struct Timed(std::sync::mpsc::Sender<Instant>);

    impl Drop for Timed {
        fn drop(&mut self) {
            let _ = self.0.send(Instant::now());
        }
    }

    /// One CPU is all that they have, and threads that do not yield keep it busy: one that yields waits for seconds.
    #[test]
    fn what_is_dropped_by_a_thread_that_yields_needs_no_idle_cpu() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
        let stop = AtomicBool::new(false);
        let busy = || {
            while !stop.load(Relaxed) {
                std::hint::spin_loop();
            }
        };
        static OWN: Closers = Closers::new();
        let (tell, told) = channel();
        std::thread::scope(|scope| {
            let yields = || {
                let may = sched_getaffinity(None).unwrap();
                let mut one = CpuSet::new();
                one.set((0..).find(|&cpu| may.is_set(cpu)).unwrap());
                sched_setaffinity(None, &one).unwrap();
                (0..8).for_each(|_| drop(scope.spawn(busy)));
                priority::yield_to_everyone().unwrap();
                OWN.give(1, Kind::Session, Box::new(Timed(tell)));
                // Later than that, if the CPU was lost meanwhile.
                Instant::now()
            };
            let (dropped, ended) = (scope.spawn(yields).join(), told.recv());
            stop.store(true, Relaxed);
            let took = ended.unwrap() - dropped.unwrap();
            assert!(took < Duration::from_millis(500), "{took:?}");
        });
    }

    #[test]
    fn users_take_turns_and_kinds_are_counted_apart() {
        let mut work = Work::NONE;
        let kinds = [Kind::Connection, Kind::Session, Kind::Text];
        for (uid, kind) in [(1, kinds[0]), (1, kinds[1]), (1, kinds[1]), (2, kinds[2])] {
            work.add(uid, kind, Box::new(()));
        }
        assert_eq!(work.counts, [1, 2, 1]);
        assert_eq!(work.users[&1].counts, [1, 2, 0]);
        let mut next = || work.next().map(|(uid, kind, _)| (uid, kind));
        assert_eq!(next(), Some((1, kinds[0])));
        assert_eq!(next(), Some((2, kinds[2])));
        assert_eq!(next(), None, "one thread a user");
        work.done(2, kinds[2]);
        work.done(1, kinds[0]);
        work.add(2, kinds[0], Box::new(()));
        let order: Vec<_> = std::iter::from_fn(|| {
            let (uid, kind, _) = work.next()?;
            work.done(uid, kind);
            Some(uid)
        })
        .collect();
        assert_eq!(order, [1, 2, 1]);
        assert_eq!((work.counts, work.users.len()), ([0; 3], 0));
    }

    #[test]
    fn connections_that_do_not_close_leave_threads_to_all_else() {
        let mut work = Work::NONE;
        let many = u32::try_from(MOST_AT_CONNECTIONS).unwrap() + 8;
        (0..many).for_each(|uid| work.add(uid, Kind::Connection, Box::new(())));
        let closing: Vec<_> = std::iter::from_fn(|| work.next()).collect();
        assert_eq!(closing.len(), MOST_AT_CONNECTIONS);
        work.add(many, Kind::Text, Box::new(()));
        work.add(3, Kind::Session, Box::new(()));
        let next = work.next().map(|(uid, kind, _)| (uid, kind));
        assert_eq!(next, Some((many, Kind::Text)));
        assert!(work.next().is_none());
        work.done(0, Kind::Connection);
        let next = work.next().map(|(uid, kind, _)| (uid, kind));
        assert_eq!(next, Some((many - 8, Kind::Connection)));
    }
}
