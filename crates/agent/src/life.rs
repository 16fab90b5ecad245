//! The life of the agent's thread: it never has rights that its program has given up.
//!
//! A thread keeps the credentials, filters and namespaces with which it was made. So before a call that changes
//! those of the program the agent's thread ends, and after it the calling thread makes a new one, which inherits
//! what the call left:
//!
//! ```text
//!   program   ──▶ hook ──▶ end, wait ────────▶ setuid(…) ──▶ clone ──▶ returns
//!   agent     ── window ──▶ bye ──▶ exit                       └──▶ connects, hello, everything is news
//! ```
//!
//! A window under way is finished first, for it holds the lock that the hook takes to say that the agent shall
//! end. Merged pages stay merged meanwhile: they need no agent to be right.
//!
//! **Gone means gone.** Some calls want a process of one thread (a new user namespace), and a thread that is
//! about to end can still be made to do something. So the call waits until the kernel does not count the
//! thread any more. If it does so for [`PATIENCE`], the call fails with `EAGAIN`: to go on would leave a thread with
//! the old rights, which is what the program asks to be rid of.
//!
//! **No signals are blocked while the call is made**: libc's setuid signals all other threads and waits for them.
//! A signal handler that comes in between and makes such a call itself finds no agent; the outer call starts it.
//!
//! **A child that shares memory** (vfork) sees all this, but the agent is no thread of its own: it leaves it alone.
//!
//! The tempting alternative, to make the call in the agent's thread too, fails for all that can be done once
//! only, or by a thread that is alone; and it has to know every call's meaning.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::io::{Errno, Result};
use rustix::thread::futex;
use sys::rights::{Except, Rights};
use sys::thread::{self, Bell, Room};

use crate::alone::Alone;
use crate::lock::{self, Guard, PerProcess, lock};
use crate::offer;
use crate::own;
use crate::serve;
use crate::table::{ADDRESS_LIMIT, touches};
use crate::trial;
use crate::whole::whole;

/// The longest that a call waits for the agent's end. A window takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest that it waits for the kernel to forget a thread that has ended.
const LINGER: Duration = Duration::from_secs(1);
/// A thread that is started so soon after the one before waits as long before it connects: some programs change their
/// user to and fro.
pub(crate) const HASTE: Duration = Duration::from_secs(1);

/// What is known of the agent's thread; a fork child starts with zeros.
#[derive(Default)]
pub(crate) struct Life {
    /// The process whose memory is offered; 0 before the first offer.
    owner: AtomicU32,
    /// The thread's number. The kernel clears it when the thread ends, and wakes who waits.
    number: AtomicU32,
    /// Whether the thread shall end ([`END`]), and how many offers there were (times [`OFFER`]).
    orders: AtomicU32,
    /// The number of the last thread that was started. Changed under the lock, as are those below.
    last: AtomicU32,
    /// The number of the one before.
    before: AtomicU32,
    /// When it was started, in milliseconds.
    started_ms: AtomicU64,
    /// Whether that was soon after the one before.
    hasty: AtomicBool,
    /// Why it shall end, for the engine: a step and a number, see [`Why`].
    why: AtomicU32,
    /// Calls under way for which no agent may run.
    holds: AtomicU32,
    /// The agent has left because no thread of the program has its rights any more: another one is to come.
    wanted: AtomicBool,
}

/// The name of the agent's thread.
pub(crate) const NAME: &CStr = c"pageone-agent";

impl Life {
    /// How many threads besides the caller's write to no memory of the program: the agent's, unless it is the caller.
    pub(crate) fn idle_threads(&self) -> u32 {
        let number = self.number.load(Ordering::Relaxed);
        let own = rustix::thread::gettid().as_raw_pid().unsigned_abs();
        u32::from(number != 0 && number != own)
    }

    /// Whether the agent's thread runs.
    pub(crate) fn runs(&self) -> bool {
        self.number.load(Ordering::Relaxed) != 0
    }
}

const END: u32 = 1;
const OFFER: u32 = 2;

/// Why no agent runs in this process and its children any more; 0 while one may. A fork child inherits what bars it.
static BARRED: AtomicU32 = AtomicU32::new(0);

/// What the engine is told when the agent leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Why {
    /// One of the `STEP_` numbers.
    pub(crate) step: u8,
    /// A system call's number, or 0.
    pub(crate) number: u16,
}

impl Why {
    /// The program changes its rights.
    pub(crate) const RIGHTS: Self = Self {
        step: wire::STEP_RIGHTS,
        number: 0,
    };

    /// The program goes where the agent may find neither /proc nor an engine.
    pub(crate) const ELSEWHERE: Self = Self {
        step: wire::STEP_ELSEWHERE,
        number: 0,
    };

    /// The program's threads have different rights.
    pub(crate) const THREADS: Self = Self {
        step: wire::STEP_THREADS,
        number: 0,
    };

    /// A filter refuses a system call; 0 for one that is not known.
    pub(crate) fn filter(number: i64) -> Self {
        let number = u16::try_from(number).unwrap_or(0);
        Self {
            step: wire::STEP_FILTER,
            number,
        }
    }

    fn bits(self) -> u32 {
        u32::from(self.step) << 16 | u32::from(self.number)
    }

    #[allow(clippy::cast_possible_truncation)] // as `bits` puts them together
    fn from_bits(bits: u32) -> Self {
        let (step, number) = ((bits >> 16) as u8, bits as u16);
        Self { step, number }
    }
}

/// Filters that were read before they were installed, or tried before all else, in this process or in those it was forked from.
static READ: AtomicU32 = AtomicU32::new(0);

/// Notes that a filter was installed that allows all calls of the agent's.
pub(crate) fn note_read_filter() {
    READ.fetch_add(1, Ordering::Relaxed);
}

/// Looks whether the program runs under filters from its first instruction on, and whether they let the agent work. Bars it if
/// not, and makes no call then that the loader has not made.
///
/// # Safety
/// To be called before all else in the constructor.
pub(crate) unsafe fn look_at_first_filters() {
    // Without /proc there is no session either.
    let filters = Rights::filters_before_all().unwrap_or(u32::MAX);
    if filters == 0 {
        return;
    }
    // SAFETY: this is the constructor.
    match unsafe { trial::first_refused() } {
        Some(refused) => bar(Why::filter(refused)),
        None => READ.store(filters, Ordering::Relaxed),
    }
}

/// Whether no agent may ever run again.
pub(crate) fn is_barred() -> bool {
    BARRED.load(Ordering::Relaxed) != 0
}

/// From here no agent starts in this process.
pub(crate) fn bar(why: Why) {
    BARRED.store(why.bits(), Ordering::Relaxed);
}

/// Where a thread of this process, or of the parent that it inherited this from, has run: memory that is used again.
static ROOM: AtomicUsize = AtomicUsize::new(0);

/// Sees to it that the agent runs: there is a new offer. If no agent can run any more, what was noted of it is of no use.
///
/// # Errors
/// What mmap(2) and clone(2) give.
pub(crate) fn begin(guard: &Guard) -> Result<()> {
    let life = &guard.process().life;
    let _ = life
        .owner
        .compare_exchange(0, process_number(), Ordering::Relaxed, Ordering::Relaxed);
    life.orders.fetch_add(OFFER, Ordering::Relaxed);
    let _ = futex::wake(&life.orders, futex::Flags::PRIVATE, 1);
    start(guard)
}

fn process_number() -> u32 {
    rustix::process::getpid().as_raw_pid().unsigned_abs()
}

/// Starts the agent's thread, unless it runs or may not.
fn start(guard: &Guard) -> Result<()> {
    let life = &guard.process().life;
    // Acquire pairs with the kernel's clearing of the word: the room is free.
    let runs = life.number.load(Ordering::Acquire) != 0;
    if is_barred() {
        return Err(Errno::PERM);
    }
    let may = life.holds.load(Ordering::Relaxed) == 0;
    if runs || !may || life.owner.load(Ordering::Relaxed) != process_number() {
        return Ok(());
    }
    if Rights::own()?.filter_count() > READ.load(Ordering::Relaxed) {
        // SAFETY: the caller's guard is the lock.
        if let Some(refused) = unsafe { trial::first_refused() } {
            bar(Why::filter(refused));
            return Err(Errno::PERM);
        }
    }
    own::mark()?;
    let room = room()?;
    life.orders.fetch_and(!END, Ordering::Relaxed);
    let now_ms = u64::try_from(now().as_millis()).unwrap_or(u64::MAX);
    let before_ms = life.started_ms.swap(now_ms, Ordering::Relaxed);
    let hasty = before_ms != 0 && u128::from(now_ms.saturating_sub(before_ms)) < HASTE.as_millis();
    life.hasty.store(hasty, Ordering::Relaxed);
    guard.process().note_namespace();
    let before = life.last.load(Ordering::Relaxed);
    life.before.store(before, Ordering::Relaxed);
    // SAFETY: the thread's code keeps to what `sys::thread` allows; the room is free, and only the holder of
    // the lock gives it to a thread.
    let number = unsafe { thread::spawn(room, &life.number, serve::main) }?;
    life.last.store(number, Ordering::Relaxed);
    Ok(())
}

fn room() -> Result<Room> {
    match ROOM.load(Ordering::Relaxed) {
        0 => {
            let room = Room::new()?;
            ROOM.store(room.address(), Ordering::Relaxed);
            Ok(room)
        }
        // SAFETY: a room's address was stored, here or in the parent, and it is never unmapped.
        address => Ok(unsafe { Room::at(address) }),
    }
}

/// Makes a call that changes the program's rights, while no agent runs.
///
/// # Errors
/// `AGAIN` when the agent's thread did not end, and as [`settle`]: the call was not made.
pub(crate) fn without_agent<T>(why: Why, call: impl FnOnce() -> T) -> Result<T> {
    if is_barred() {
        return Ok(call());
    }
    let Some(page) = lock::existing().filter(|page| page.life.is_ours()) else {
        // Perhaps a fork child with merged memory and no agent.
        settle(why)?;
        return Ok(call());
    };
    hold(&page.life, why);
    let result = match page.life.wait_for_end() {
        true => settle(why).map(|()| call()),
        false => Err(Errno::AGAIN),
    };
    release(page);
    result
}

/// Makes a call after which no agent can work, if it succeeds: all merged memory is made private before it, and the
/// hooks have nothing left to do after it.
///
/// # Errors
/// As [`without_agent`], and the call's own.
pub(crate) fn without_agent_for_good<T>(why: Why, call: impl FnOnce() -> Result<T>) -> Result<T> {
    if is_barred() {
        return call();
    }
    let Some(page) = lock::existing().filter(|page| page.life.is_ours()) else {
        // Perhaps a fork child with merged memory and no agent.
        give_back();
        return call().inspect(|_| bar(why));
    };
    hold(&page.life, why);
    if !page.life.wait_for_end() {
        release(page);
        return Err(Errno::AGAIN);
    }
    // What the agent did not give back, or another thread has offered since.
    give_back();
    let result = call().inspect(|_| bar(why));
    if result.is_err() {
        release(page);
    }
    result
}

/// Makes all merged memory private before the program goes where hooks may find no /proc: no discard could tell a store's
/// mapping from others there. It stays offered.
///
/// # Errors
/// `NOMEM` when the copies do not fit, or nothing keeps other threads from writing.
pub(crate) fn settle(why: Why) -> Result<()> {
    if why.step == wire::STEP_ELSEWHERE
        && touches(0, ADDRESS_LIMIT)
        && let Some(mut guard) = lock()
    {
        whole(&mut guard, 0, ADDRESS_LIMIT).map_err(|_| Errno::NOMEM)?;
    }
    Ok(())
}

/// Gives the program all its memory back: private, and not offered any more.
pub(crate) fn give_back() {
    if touches(0, ADDRESS_LIMIT)
        && let Some(mut guard) = lock()
    {
        offer::give_back(&mut guard);
    }
}

/// Makes a new agent, by the calling thread and with its rights, if one is wanted. For hooks, with the lock free.
pub(crate) fn bring_back() {
    let Some(page) = lock::existing() else { return };
    let life = &page.life;
    if !life.wanted.load(Ordering::Relaxed) || life.runs() {
        return;
    }
    if life.owner.load(Ordering::Relaxed) == process_number()
        && let Some(guard) = lock()
        && life.wanted.swap(false, Ordering::Relaxed)
    {
        // What fails is tried again at the next offer.
        let _ = start(&guard);
    }
}

fn hold(life: &Life, why: Why) {
    let guard = lock();
    life.holds.fetch_add(1, Ordering::Relaxed);
    life.why.store(why.bits(), Ordering::Relaxed);
    life.orders.fetch_or(END, Ordering::Relaxed);
    drop(guard);
}

fn release(page: &PerProcess) {
    if let Some(guard) = lock()
        && page.life.holds.fetch_sub(1, Ordering::Relaxed) == 1
    {
        // Without an agent merged memory stays right; the next offer tries again.
        let _ = start(&guard);
    }
}

impl Life {
    /// Whether the agent, if there is one, belongs to the calling process.
    fn is_ours(&self) -> bool {
        let number = self.number.load(Ordering::Acquire);
        let ours = self.owner.load(Ordering::Relaxed) == process_number();
        // A child in a new namespace may have its parent's number. It has none of its threads.
        ours && (number == 0 || !thread::is_gone(number) || self.ended())
    }

    fn ended(&self) -> bool {
        self.number.load(Ordering::Acquire) == 0
    }

    /// Waits until the thread is gone, and tells whether it has ended.
    fn wait_for_end(&self) -> bool {
        let number = self.last.load(Ordering::Relaxed);
        let _ = futex::wake(&self.orders, futex::Flags::PRIVATE, 1);
        if !self.ended() {
            let _ = Bell::ring(number);
        }
        let end = now() + PATIENCE;
        while !self.ended() && now() < end {
            // The kernel wakes one of those who wait, so each looks by itself too. It wakes as for shared memory.
            let _ = futex::wait(&self.number, futex::Flags::empty(), number, Some(&LOOK));
        }
        // It runs no more. A number that stays may be another thread's by now.
        let end = now() + LINGER;
        while number != 0 && !thread::is_gone(number) && now() < end {
            let _ = rustix::thread::nanosleep(&MOMENT);
        }
        self.ended()
    }

    /// For the agent's thread, before it leaves: a thread of the program shall make another in its next hook.
    pub(crate) fn want_another(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    /// The thread before, which has left: the kernel may count it for a moment, with the rights it had.
    pub(crate) fn thread_before(&self) -> Except<'static> {
        Except {
            number: self.before.load(Ordering::Relaxed),
            name: NAME,
        }
    }

    /// Why the thread shall end.
    pub(crate) fn why(&self) -> Why {
        Why::from_bits(self.why.load(Ordering::Relaxed))
    }

    /// Whether the agent's thread shall end.
    pub(crate) fn must_end(&self) -> bool {
        self.orders.load(Ordering::Relaxed) & END != 0
    }

    /// How many offers there were, more or less.
    pub(crate) fn offers(&self) -> u32 {
        self.orders.load(Ordering::Relaxed) / OFFER
    }

    /// Sleeps for `long`; less long, but `least`, when there are more offers than `seen`. Wakes when the thread
    /// shall end. Tells whether there were such offers.
    pub(crate) fn nap(&self, seen: u32, least: Duration, long: Duration, alone: &Alone) -> bool {
        let began = now();
        loop {
            let (orders, past) = (
                self.orders.load(Ordering::Relaxed),
                now().saturating_sub(began),
            );
            let more = orders / OFFER != seen;
            let left = if more { least } else { long }.saturating_sub(past);
            if orders & END != 0 || left.is_zero() {
                return more;
            }
            let time = Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            };
            let time = if left < Duration::from_secs(1) {
                &time
            } else {
                &SECOND
            };
            let _ = futex::wait(&self.orders, futex::Flags::PRIVATE, orders, Some(time));
            alone.leave_if_last();
        }
    }

    /// Whether the thread was started soon after the one before.
    pub(crate) fn is_hasty(&self) -> bool {
        self.hasty.load(Ordering::Relaxed)
    }
}

/// How often a thread that sleeps looks whether it is the last one.
const SECOND: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
const MOMENT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000,
};

fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}
