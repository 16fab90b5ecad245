//! The priority of threads: those that yield the CPU to everyone, and for how long they do not.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

use rustix::io::Result;

use crate::raw;

thread_local! {
    /// Whether the thread has stepped back behind all others.
    static YIELDS: Cell<bool> = const { Cell::new(false) };
    /// How many hastes had begun when it last did.
    static SEEN: Cell<u32> = const { Cell::new(0) };
    /// Its place in the list of those that have, until it ends.
    static LISTED: Cell<Option<Listed>> = const { Cell::new(None) };
}

/// The threads that have. No thread holds it that yields just then.
static YIELDING: Mutex<Vec<i32>> = Mutex::new(Vec::new());
/// Whether there ever was one.
static ANY_YIELDS: AtomicBool = AtomicBool::new(false);
/// Hastes that last.
static LASTING: AtomicU32 = AtomicU32::new(0);
/// Hastes that have begun.
static BEGUN: AtomicU32 = AtomicU32::new(0);

/// Lets the calling thread run only on CPUs that nothing else wants (`SCHED_IDLE`), except in
/// [`without_yielding`].
///
/// # Errors
/// Whatever sched_setscheduler(2) gives.
pub fn yield_to_everyone() -> Result<()> {
    if !YIELDS.replace(true) {
        LISTED.set(Some(Listed::note()));
        ANY_YIELDS.store(true, SeqCst);
    }
    // A haste that began before the thread was listed is seen here.
    set_policy(libc::SCHED_IDLE)
}

/// A thread that is listed as one that yields.
struct Listed(i32);

impl Listed {
    fn note() -> Self {
        let thread = rustix::thread::gettid().as_raw_pid();
        yielding().push(thread);
        Self(thread)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        without_yielding(|| yielding().retain(|&thread| thread != self.0));
    }
}

fn yielding() -> MutexGuard<'static, Vec<i32>> {
    unpoisoned(YIELDING.lock())
}

/// Does `act` at ordinary priority, whether the thread yields to everyone or not.
///
/// The kernel's locks know no priorities: a thread that holds another process's memory map and gets no
/// CPU, because all are busy, makes that process wait for as long, seconds even. So whatever takes
/// such a lock is done here, and it should be short.
///
/// Without the right to raise its priority again (root has it, and who has `RLIMIT_NICE` 20) a thread stays as
/// it is.
pub fn without_yielding<T>(act: impl FnOnce() -> T) -> T {
    /// Steps back again, after a panic too.
    struct Back;
    impl Drop for Back {
        fn drop(&mut self) {
            // It was allowed before, and takes no right.
            let _ = set_policy(libc::SCHED_IDLE);
        }
    }
    let _back = (YIELDS.get() && set_policy(libc::SCHED_OTHER).is_ok()).then(|| Back);
    act()
}

/// A time in which no thread of this process yields: until this is dropped.
///
/// A thread that waits for threads that yield waits for an idle CPU, and any user can keep all of them busy.
#[derive(Debug)]
#[must_use]
pub struct Haste(());

/// From here on no thread of this process yields to others, until what this gives is dropped.
pub fn hurry() -> Haste {
    // The mark comes first, so a thread that is not listed yet finds it.
    LASTING.fetch_add(1, SeqCst);
    BEGUN.fetch_add(1, SeqCst);
    for &thread in yielding().iter() {
        // Without the right to it all stays slow.
        let _ = set_policy_of(thread, libc::SCHED_OTHER);
    }
    Haste(())
}

impl Drop for Haste {
    fn drop(&mut self) {
        // Threads step back by themselves: one may hold a lock of a guest's memory just now.
        LASTING.fetch_sub(1, SeqCst);
    }
}

/// Steps back again behind all others, if the calling thread yields, and a haste that was meanwhile is over.
pub fn step_back() {
    let begun = BEGUN.load(SeqCst);
    if YIELDS.get() && SEEN.get() != begun && LASTING.load(SeqCst) == 0 {
        SEEN.set(begun);
        let _ = set_policy(libc::SCHED_IDLE);
    }
}

/// Takes a lock that another thread has: `free` gives it once it is free, `wait` waits for it.
///
/// A thread that yields may have been put aside while it held the lock. So a thread that does not yield waits some
/// milliseconds, longer than a lock is held by a thread that runs; from then on there is a [`Haste`], until it has the lock.
///
/// Not for a lock that is held while a stranger is waited for: he could make the haste last.
pub fn wait<G>(mut free: impl FnMut() -> Option<G>, wait: impl FnOnce() -> G) -> G {
    const PAUSES: [u64; 5] = [50, 200, 800, 2000, 5000];
    if YIELDS.get() || !ANY_YIELDS.load(SeqCst) {
        return wait();
    }
    for micros in PAUSES {
        std::thread::sleep(Duration::from_micros(micros));
        if let Some(guard) = free() {
            return guard;
        }
    }
    let _haste = hurry();
    wait()
}

/// Locks a mutex that threads which yield lock, too: see [`wait`].
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    let free = || free(mutex.try_lock());
    free().unwrap_or_else(|| wait(free, || unpoisoned(mutex.lock())))
}

/// What a lock gives; a thread that panicked while it held one has ended the whole process.
pub fn unpoisoned<G>(taken: LockResult<G>) -> G {
    taken.unwrap_or_else(PoisonError::into_inner)
}

/// The same of a lock that was only tried: nothing if another thread has it.
pub fn free<G>(tried: TryLockResult<G>) -> Option<G> {
    match tried {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Sets the policy of the calling thread. No thread yields while there is a haste, nor where one begins at the same moment and
/// has listed the thread before.
fn set_policy(policy: i32) -> Result<()> {
    let hurries = || policy == libc::SCHED_IDLE && LASTING.load(SeqCst) != 0;
    if !hurries() {
        set_policy_of(0, policy)?;
    }
    match hurries() {
        true => set_policy_of(0, libc::SCHED_OTHER),
        false => Ok(()),
    }
}

/// Sets the policy of a thread, 0 for the calling one.
fn set_policy_of(thread: i32, policy: i32) -> Result<()> {
    // The priority that both policies want.
    let none: libc::c_int = 0;
    let place = (&raw const none).expose_provenance();
    let [thread, policy] = [thread, policy].map(|number| number.cast_unsigned() as usize);
    let args = [thread, policy, place, 0, 0, 0];
    // SAFETY: the call reads a `sched_param`, which is one number, and changes nothing but when threads run.
    unsafe { raw::call(libc::SYS_sched_setscheduler, args) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A haste is of the whole process.
    static ONE_TEST: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn a_thread_can_step_back() {
        let _one = ONE_TEST.lock();
        // SAFETY: no pointer is involved; 0 names the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        assert_eq!(
            without_yielding(policy),
            before,
            "who does not yield is left alone"
        );
        let policies = std::thread::spawn(move || {
            yield_to_everyone().unwrap();
            let inside = without_yielding(policy);
            let fell = std::panic::catch_unwind(|| without_yielding(|| panic!("on purpose")));
            assert!(fell.is_err());
            (inside, policy())
        });
        assert_eq!(
            policies.join().unwrap(),
            (libc::SCHED_OTHER, libc::SCHED_IDLE)
        );
    }

    /// The test's worker never gets to give the lock up while it yields: it holds it for as long as that lasts.
    #[test]
    fn nobody_waits_for_a_lock_of_one_that_yields() {
        let _one = ONE_TEST.lock();
        // SAFETY: no pointer is involved; 0 names the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let shared = Mutex::new(0);
        let (has, had) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                yield_to_everyone().unwrap();
                let mut held = shared.lock().unwrap();
                has.send(()).unwrap();
                let begin = std::time::Instant::now();
                while policy() == libc::SCHED_IDLE && begin.elapsed() < Duration::from_secs(20) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                *held = policy();
            });
            had.recv().unwrap();
            assert_eq!(*lock(&shared), libc::SCHED_OTHER);
        });
        assert_eq!(LASTING.load(SeqCst), 0, "the haste is over with the wait");
    }

    #[test]
    fn nothing_yields_while_there_is_haste() {
        use std::sync::mpsc;
        let _one = ONE_TEST.lock();
        // SAFETY: no pointer is involved; 0 names the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let (ask, asked) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let worker = std::thread::spawn(move || {
            yield_to_everyone().unwrap();
            tell.send((policy(), policy())).unwrap();
            while asked.recv().is_ok() {
                step_back();
                let after = policy();
                without_yielding(|| ());
                tell.send((after, policy())).unwrap();
            }
        });
        let next = || {
            ask.send(()).unwrap();
            told.recv().unwrap()
        };
        let (idle, ordinary) = (libc::SCHED_IDLE, libc::SCHED_OTHER);
        assert_eq!(told.recv(), Ok((idle, idle)));
        assert_eq!(next(), (idle, idle));
        let haste = hurry();
        let inner = hurry();
        assert_eq!(next(), (ordinary, ordinary));
        drop(inner);
        assert_eq!(next(), (ordinary, ordinary), "one is left");
        drop(haste);
        assert_eq!(next(), (idle, idle));
        drop(ask);
        worker.join().unwrap();
        assert!(
            yielding().is_empty(),
            "a thread that ended is listed no more"
        );
    }
}
