//! The state of the agent's thread, and why none may run; see [`life`](crate::life) for how it starts and ends.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::thread::futex;
use sys::rights::Except;
use sys::thread::{self, Bell};

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
    /// The process has lived for long enough, as one to which the agent came later.
    pub(crate) has_lived: AtomicBool,
    /// The process whose memory is offered; 0 before the first offer.
    pub(crate) owner: AtomicU32,
    /// The process that has got this memory by a fork which a hook saw; 0 in any other.
    pub(crate) heir: AtomicU32,
    /// The thread's number. The kernel clears it when the thread ends, and wakes who waits.
    pub(crate) number: AtomicU32,
    /// Whether the thread shall end ([`END`]), and how many offers there were (times [`OFFER`]).
    pub(crate) orders: AtomicU32,
    /// The number of the last thread that was started. Changed under the lock, as are those below.
    pub(crate) last: AtomicU32,
    /// The number of the one before.
    pub(crate) before: AtomicU32,
    /// When it was started, in milliseconds.
    pub(crate) started_ms: AtomicU64,
    /// Whether that was soon after the one before.
    pub(crate) hasty: AtomicBool,
    /// Why it shall end, for the engine: a step and a number, see [`Why`].
    pub(crate) why: AtomicU32,
    /// Calls under way for which no agent may run.
    pub(crate) holds: AtomicU32,
    /// One of them is that the agent is about to be taken out.
    pub(crate) leaving: AtomicBool,
    /// The agent has left because no thread of the program has its rights any more: another one is to come.
    pub(crate) wanted: AtomicBool,
}

/// The name of the agent's thread.
pub(crate) const NAME: &CStr = wire::AGENT_THREAD;

impl Life {
    /// How many threads besides the caller's write to no memory of the program: the agent's, unless it is the caller.
    pub(crate) fn idle_threads(&self) -> u32 {
        u32::from(self.runs() && !self.is_callers())
    }

    /// Whether the caller is the agent's thread.
    pub(crate) fn is_callers(&self) -> bool {
        let own = rustix::thread::gettid().as_raw_pid().unsigned_abs();
        self.number.load(Ordering::Relaxed) == own
    }

    /// Whether the memory is another process's, with which the caller shares it: a child of vfork, or one of clone(2) with CLONE_VM. A fork
    /// child's begins with zeros here.
    pub(crate) fn is_anothers(&self) -> bool {
        let of = self.process();
        of != 0 && of != process_number()
    }

    /// Whether that process lives, or its agent does.
    pub(crate) fn has_other_owner(&self) -> bool {
        let owner = || rustix::process::Pid::from_raw(self.process().cast_signed());
        let lives = || {
            owner().is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
        };
        self.is_anothers() && (self.runs() || lives())
    }

    /// The process whose memory it is; 0 where that is not known.
    fn process(&self) -> u32 {
        let [owner, heir] =
            [&self.owner, &self.heir].map(|process| process.load(Ordering::Relaxed));
        if owner == 0 { heir } else { owner }
    }

    /// Whether the agent's thread runs.
    pub(crate) fn runs(&self) -> bool {
        self.number.load(Ordering::Relaxed) != 0
    }
}

pub(crate) const END: u32 = 1;
pub(crate) const OFFER: u32 = 2;

/// Whether a process was made that has this memory, too, and runs on beside its maker. Other threads may make it, with no lock held.
pub(crate) static SIBLINGS: AtomicBool = AtomicBool::new(false);

/// Whether there may be processes that write to this memory and are no threads of this one. A fork child inherits it.
pub(crate) fn has_siblings() -> bool {
    SIBLINGS.load(Ordering::Relaxed)
}

/// Whether a thread, or such a process, may have a descriptor table of its own. What it has open is not seen in the caller's.
pub(crate) static OWN_FILES: AtomicBool = AtomicBool::new(false);

pub(crate) fn note_own_files() {
    OWN_FILES.store(true, Ordering::Relaxed);
}

pub(crate) fn have_own_files() -> bool {
    OWN_FILES.load(Ordering::Relaxed)
}

/// By these flags clone(2) makes something that shares memory, while its maker goes on, if of each mask this one alone is set.
pub(crate) const SHARES: u32 = libc::CLONE_VM.cast_unsigned();
/// No thread.
pub(crate) const KIN_MASK: u32 =
    (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_THREAD).cast_unsigned();
/// With a descriptor table of its own.
pub(crate) const FILES_MASK: u32 =
    (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES).cast_unsigned();

/// Notes what a clone(2) with these flags makes.
pub(crate) fn note_clone(flags: u32) {
    if flags & KIN_MASK == SHARES {
        SIBLINGS.store(true, Ordering::Relaxed);
    }
    if flags & FILES_MASK == SHARES {
        note_own_files();
    }
}

/// Whether the program has said itself which process may trace it (PR_SET_PTRACER). Of a fork child nothing was said.
static OWN_TRACER: AtomicBool = AtomicBool::new(false);

pub(crate) fn note_own_tracer() {
    OWN_TRACER.store(true, Ordering::Relaxed);
}

pub(crate) fn forget_own_tracer() {
    OWN_TRACER.store(false, Ordering::Relaxed);
}

pub(crate) fn has_own_tracer() -> bool {
    OWN_TRACER.load(Ordering::Relaxed)
}

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
    const fn step(step: u8) -> Self {
        Self { step, number: 0 }
    }

    /// The program changes its rights.
    pub(crate) const RIGHTS: Self = Self::step(wire::STEP_RIGHTS);

    /// The program goes where the agent may find neither /proc nor an engine.
    pub(crate) const ELSEWHERE: Self = Self::step(wire::STEP_ELSEWHERE);

    /// The program's threads have different rights.
    pub(crate) const THREADS: Self = Self::step(wire::STEP_THREADS);

    /// A library of the program stops all threads by signals, and the agent's thread takes none. No agent begins, so the engine hears nothing
    /// of this.
    pub(crate) const SIGNALS: Self = Self::step(wire::STEP_THREADS);

    /// All memory is to be offered, and libc's own calls are not seen. The program had threads before the agent, say. No agent begins.
    pub(crate) const UNSEEN: Self = Self::step(wire::STEP_THREADS);

    /// The program has the kernel make all that it reads executable.
    pub(crate) const EXECUTABLE: Self = Self::step(wire::STEP_EXECUTABLE);

    /// The agent is taken out of the process.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const DETACHED: Self = Self {
        step: wire::STEP_DETACHED,
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

    /// Whether no agent comes after this one: all memory is the program's own from then on.
    pub(crate) fn is_for_good(self) -> bool {
        matches!(self.step, wire::STEP_FILTER | wire::STEP_EXECUTABLE)
    }

    pub(crate) fn bits(self) -> u32 {
        u32::from(self.step) << 16 | u32::from(self.number)
    }

    #[allow(clippy::cast_possible_truncation)] // as `bits` puts them together
    fn from_bits(bits: u32) -> Self {
        let (step, number) = ((bits >> 16) as u8, bits as u16);
        Self { step, number }
    }
}

/// Whether no agent may ever run again.
pub(crate) fn is_barred() -> bool {
    BARRED.load(Ordering::Relaxed) != 0
}

/// Whether all memory was given back to the program.
static GIVEN_BACK: AtomicBool = AtomicBool::new(false);

/// Everything was given back, but for what may be pinned, which the table still knows.
pub(crate) fn note_given_back() {
    GIVEN_BACK.store(true, Ordering::Relaxed);
}

/// Whether a hook may look at the mappings. Where no agent may run, a filter of the program's may refuse the calls that it
/// takes, or kill for them. Then the table has to do.
pub(crate) fn may_look() -> bool {
    !(is_barred() && GIVEN_BACK.load(Ordering::Relaxed))
}

/// From here no agent starts in this process.
pub(crate) fn bar(why: Why) {
    BARRED.store(why.bits(), Ordering::Relaxed);
}

/// Bars the agent for this reason alone, or no more.
#[cfg(target_arch = "x86_64")]
pub(crate) fn swap_bar(why: Why, is_barred: bool) {
    let (from, to) = if is_barred {
        (0, why.bits())
    } else {
        (why.bits(), 0)
    };
    // Another reason stays: it holds whether the agent is taken out or not.
    let _ = BARRED.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
}

pub(crate) fn process_number() -> u32 {
    rustix::process::getpid().as_raw_pid().unsigned_abs()
}

impl Life {
    /// Whether the agent, if there is one, belongs to the calling process.
    pub(crate) fn is_ours(&self) -> bool {
        let number = self.number.load(Ordering::Acquire);
        let ours = self.owner.load(Ordering::Relaxed) == process_number();
        // A child in a new namespace may have its parent's number. It has none of its threads.
        ours && (number == 0 || !thread::is_gone(number) || self.ended())
    }

    fn ended(&self) -> bool {
        self.number.load(Ordering::Acquire) == 0
    }

    /// Waits until the thread is gone, and tells whether it has ended.
    pub(crate) fn wait_for_end(&self) -> bool {
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
    /// shall end. Calls `each` every second, at least. Tells whether there were such offers.
    pub(crate) fn nap(&self, seen: u32, least: Duration, long: Duration, each: impl Fn()) -> bool {
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
            each();
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

pub(crate) use sys::clock::monotonic as now;
