//! One lock orders the guest's calls over offered memory and the agent's windows.
//!
//! It lives in a page that fork gives to a child as zeros (`MADV_WIPEONFORK`): however a child was
//! made, it starts with a free lock and without an agent. A child that shares memory (vfork,
//! posix_spawn) shares the lock, as it must.
//!
//! The holder has all signals blocked, so no handler of the same thread can want it again. It is
//! held for one window or one system call at a time, and its holder waits for nothing but the kernel. Calls for which the kernel waits
//! for a thread of the program, which may want the lock, are made without it: populating, locking, and messages to a userfaultfd
//! of the program's.
//! So it comes after every other lock of the process, and no order of locks can hang on it.
//!
//! **Forks.** No thread holds the lock over a fork: libc takes malloc's locks on the way, and a thread
//! that has one of these may want this lock. A fork must only not fall into a window, for the pages that
//! are out would be missing in the child. So [`begin_fork`] waits for the window that is under way, and
//! until [`end_fork`] none begins. A hook of another thread may be half-way when the kernel forks; see
//! [`hooks`](crate::hooks).
//!
//! **Holders that vanish.** A fork child inherits nothing of the page. So it does not inherit that a thread,
//! which it does not have, was half-way. A thread may also be killed alone, by a seccomp filter. The lock's word
//! names its holder, so a thread that waits long takes it from a holder that is gone. [`HELD`] is
//! not wiped: the next holder finds it set and mistrusts the table (see [`Table::mistrust`]).
//!
//! Orderings: taking is Acquire, giving back is Release, and they are each other's partners:
//! everything in [`Table`] is written under the lock and read under it.

use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::thread::futex;
use sys::mapping::Access;
use sys::process::thread_id;
use sys::task;
use sys::thread::{SignalMask, block_signals, restore_signals};
use wire::PAGE_BYTES;

use crate::desk::{Desk, Place};
use crate::table::Table;
use crate::thread::{self, Life};

/// What a fork child must not inherit.
#[derive(Default)]
pub(crate) struct PerProcess {
    /// The number of the thread that holds the lock, and [`WANTED`]; 0 when it is free.
    word: AtomicU32,
    /// Forks that have begun and not ended.
    forking: AtomicU32,
    /// The namespace of the numbers in `word`; 0 when it is not known.
    namespace: AtomicU64,
    /// [`EXITED`] and the code with which a thread left by its own system call; 0 while none has.
    exit: AtomicU64,
    /// The agent's thread.
    pub(crate) life: Life,
    /// Whether an engine serves this process now: one of the constants below. Changed under the lock.
    pub(crate) serving: AtomicU32,
    /// Pages of which the program told that their content no longer matters, and the engine does not know yet.
    pub(crate) told: AtomicU64,
    /// The agent's thread and, one more than their numbers there, its descriptors: what tracks, what freezes, its list of
    /// mappings. Zeros where it has none. Changed under the lock.
    pub(crate) lent: [AtomicU32; 4],
    /// What a thread has frozen to make it whole: start and length, which is 0 for nothing. Changed under the lock.
    pub(crate) frozen: [AtomicUsize; 2],
    /// Where hooks ask that thread to do work that takes descriptors.
    pub(crate) desk: Desk,
    /// Where discards are counted: in the session's lifeline, or 0. Changed under the lock.
    pub(crate) tally: AtomicUsize,
    /// Whether this process has taken the lock before: the table of a fork child is its parent's. Changed under the lock.
    table_is_own: AtomicBool,
    /// Threads that are in functions of libc's, from where they come back to hooks.
    pub(crate) beyond: AtomicU32,
    /// Pages with journals of windows, each with a staging area behind it; zeros for none.
    pub(crate) journals: [AtomicUsize; JOURNALS],
}

/// A staging area goes with its session, unless a thread was killed. Beyond so many of these, areas stay until the process ends.
const JOURNALS: usize = 32;

/// A thread has left by itself.
const EXITED: u64 = 1 << 32;

/// A thread waits for the lock, or did.
const WANTED: u32 = 1 << 31;

/// The holder asks the agent's thread, which waits for the lock.
const KNOCKED: u32 = 1 << 30;

/// Whether the table is being changed. Unlike the lock, fork children inherit it.
static HELD: AtomicBool = AtomicBool::new(false);

/// After so long a waiting thread asks whether the holder lives.
const LONG: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// So long a window waits for forks to end.
const FORK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// So long those who waited for the lock may take to have it, when it is let go of for them.
const WAY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// [`PerProcess::serving`]: no engine has been looked for yet.
pub(crate) const SEARCHING: u32 = 0;
/// [`PerProcess::serving`]: an engine serves.
pub(crate) const SERVED: u32 = 1;
/// [`PerProcess::serving`]: no engine serves now.
pub(crate) const ALONE: u32 = 2;

static PAGE: AtomicPtr<PerProcess> = AtomicPtr::new(std::ptr::null_mut());

/// The page of this process; made at the first call. `None` when there is no memory for it.
pub(crate) fn per_process() -> Option<&'static PerProcess> {
    // Acquire pairs with the Release below: who sees the pointer sees the mapping's setup.
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        page = make_page()?;
    }
    // SAFETY: the page is never unmapped, and zeros are a valid `PerProcess`.
    Some(unsafe { &*page })
}

/// The page of this process, if there is one.
pub(crate) fn existing() -> Option<&'static PerProcess> {
    // Acquire: as in `per_process`.
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: as in `per_process`.
    (!page.is_null()).then(|| unsafe { &*page })
}

/// A function of libc's is called by a hook that it comes back to. In a child the page is zeros: `is_child` tells.
pub(crate) fn beyond<T>(call: impl FnOnce() -> T, is_child: impl FnOnce(&T) -> bool) -> T {
    let Some(page) = existing() else {
        return call();
    };
    page.beyond.fetch_add(1, Ordering::Relaxed);
    let result = call();
    if !is_child(&result) {
        page.beyond.fetch_sub(1, Ordering::Relaxed);
    }
    result
}

/// In front of the page: memory that cannot be touched, and a [`Guard`]'s stack for jobs.
const FENCE: usize = PAGE_BYTES;
const STACK: usize = 64 * 1024;
const AREA: usize = FENCE + STACK + PAGE_BYTES;

/// Unmaps the page of this process, and what is in front of it.
///
/// # Safety
/// No thread is in this image or comes into it, but the caller, which uses neither the lock nor the table any more.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn unmap_page() {
    let page = PAGE.swap(std::ptr::null_mut(), Ordering::Relaxed);
    if !page.is_null() {
        // SAFETY: `make_page` made it; the caller vouches that no thread uses it.
        let _ = unsafe { sys::mapping::unmap(page.expose_provenance() - STACK - FENCE, AREA) };
    }
}

fn make_page() -> Option<*mut PerProcess> {
    let area = sys::mapping::area(AREA).ok()?;
    let address = area + FENCE + STACK;
    // SAFETY: the area was just made here.
    let prepared = unsafe {
        sys::mapping::advise(address, PAGE_BYTES, libc::MADV_WIPEONFORK)
            .and_then(|()| sys::mapping::protect(area, FENCE, Access::None))
    };
    if prepared.is_err() {
        // SAFETY: no other thread knows it.
        let _ = unsafe { sys::mapping::unmap(area, AREA) };
        return None;
    }
    let made = std::ptr::with_exposed_provenance_mut::<PerProcess>(address);
    // SAFETY: zeros are a valid `PerProcess`, which no other thread knows yet.
    let life = unsafe { &(*made).life };
    // A child of vfork finds the number of another.
    life.heir.store(thread::process_number(), Ordering::Relaxed);
    // Release pairs with the Acquire in `per_process`; a thread that came first has won.
    let order = (Ordering::Release, Ordering::Acquire);
    match PAGE.compare_exchange(std::ptr::null_mut(), made, order.0, order.1) {
        Ok(_) => Some(made),
        Err(winner) => {
            // SAFETY: no other thread knows the area.
            let _ = unsafe { sys::mapping::unmap(area, AREA) };
            Some(winner)
        }
    }
}

/// The lock, held.
pub(crate) struct Guard {
    page: &'static PerProcess,
    mask: SignalMask,
}

/// Reads the stack where the work to come will reach, while a handler of the program's can still make it grow, or jump out of it (lazy
/// stacks of coroutines, libsigsegv). With signals blocked the kernel would end the process for the fault.
#[inline(always)]
fn reach() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a read of the thread's own stack, which changes nothing but flags.
    unsafe {
        std::arch::asm!(
            "testb $0, -4096(%rsp)",
            options(att_syntax, nostack, readonly)
        );
    }
}

/// Takes the lock; `None` when there is no memory for it, and then nothing was ever offered.
pub(crate) fn lock() -> Option<Guard> {
    let page = per_process()?;
    reach();
    let mask = block_signals();
    page.take(thread_id());
    let mut guard = Guard { page, mask };
    // Relaxed: the lock orders it, and a child is ordered by its fork.
    if HELD.swap(true, Ordering::Relaxed) {
        guard.table().mistrust();
    }
    if !page.table_is_own.swap(true, Ordering::Relaxed) {
        guard.table().forget_locks();
    }
    Some(guard)
}

/// Waits until a window that is under way has ended: for a thread whose signals are blocked, and whose stack has no room for work under
/// the lock.
pub(crate) fn outlast_window() {
    if let Some(page) = existing() {
        page.take(thread_id());
        page.free();
    }
}

/// Takes the lock for a window, which must not begin during a fork; `None` too when forks took long.
pub(crate) fn lock_between_forks() -> Option<Guard> {
    let page = per_process()?;
    loop {
        let guard = lock()?;
        let forking = page.forking.load(Ordering::Relaxed);
        if forking == 0 {
            return Some(guard);
        }
        drop(guard);
        let none = futex::Flags::PRIVATE;
        if futex::wait(&page.forking, none, forking, Some(&FORK)) == Err(Errno::TIMEDOUT) {
            return None;
        }
    }
}

/// Waits for the window under way; from here none begins in this process until [`end_fork`].
///
/// Each call counts, so that each [`end_fork`] takes its own count away, and no other thread's. Handlers of forks have nowhere to
/// note that theirs did not. **The limit**: a fork that begins where there is no page yet. No window comes before there is one, but
/// for memory that ran out in between.
pub(crate) fn begin_fork() {
    // Relaxed: `lock_between_forks` looks at it under the same lock.
    let count = |page: &PerProcess| _ = page.forking.fetch_add(1, Ordering::Relaxed);
    if no_window_comes() {
        // A filter may forbid the calls that the lock takes.
        existing().into_iter().for_each(count);
    } else if let Some(guard) = lock() {
        count(guard.page);
    }
}

/// Ends what [`begin_fork`] began, in the parent. In a child the page is zeros.
pub(crate) fn end_fork() {
    let Some(page) = existing() else { return };
    let less = |forking: u32| forking.checked_sub(1);
    let order = Ordering::Relaxed;
    if page.forking.fetch_update(order, order, less) == Ok(1) && !no_window_comes() {
        let _ = futex::wake(&page.forking, futex::Flags::PRIVATE, 1);
    }
}

/// Whether no agent runs in this process, and none begins.
fn no_window_comes() -> bool {
    thread::is_barred() && !existing().is_some_and(|page| page.life.runs())
}

/// Makes a call over all of the process's memory, the agent's own included, without the lock: no window is under way meanwhile. Signals
/// are blocked, so that no handler leaves this for good.
pub(crate) fn without_windows<T>(call: impl FnOnce() -> T) -> T {
    reach();
    let mask = block_signals();
    begin_fork();
    let result = call();
    end_fork();
    restore_signals(mask);
    result
}

impl PerProcess {
    /// Remembers which namespace thread numbers belong to.
    pub(crate) fn note_namespace(&self) {
        let namespace = task::namespace().unwrap_or(0);
        self.namespace.store(namespace, Ordering::Relaxed);
    }

    /// Remembers that the calling thread leaves with this code.
    pub(crate) fn note_exit(&self, code: i32) {
        let code = u64::from(code.cast_unsigned());
        self.exit.store(EXITED | code, Ordering::Relaxed);
    }

    /// The code of the last thread that said so.
    pub(crate) fn last_exit(&self) -> Option<i32> {
        let noted = self.exit.load(Ordering::Relaxed);
        #[allow(clippy::cast_possible_truncation)] // the upper half is the mark
        (noted & EXITED != 0).then_some((noted as u32).cast_signed())
    }

    fn take(&self, me: u32) {
        let mut word = self.swap(0, me);
        while let Err(now) = word {
            word = match now {
                // Others may wait as well.
                0 => self.swap(0, me | WANTED),
                _ if now & WANTED == 0 => match self.swap(now, now | WANTED) {
                    Ok(()) => Err(now | WANTED),
                    other => other,
                },
                _ => self.wait(now, me),
            };
        }
    }

    fn free(&self) {
        if self.word.swap(0, Ordering::Release) & WANTED != 0 {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// Waits until the word changes, and takes the lock from a holder that is gone.
    fn wait(&self, now: u32, me: u32) -> std::result::Result<(), u32> {
        let is_agent = self.lent[0].load(Ordering::Relaxed) == me;
        // With a knock the word is another, so that the agent does not fall asleep over it.
        let seen = if is_agent { now & !KNOCKED } else { now };
        let sleep = || futex::wait(&self.word, futex::Flags::PRIVATE, seen, Some(&LONG));
        let waited = match is_agent {
            true => self.desk.sleep(Place::Lock, sleep).unwrap_or(Ok(())),
            false => sleep(),
        };
        if waited == Err(Errno::TIMEDOUT) && self.is_gone(now & !(WANTED | KNOCKED)) {
            return self.swap(now, me | WANTED);
        }
        Err(self.word.load(Ordering::Relaxed))
    }

    /// Wakes the agent's thread where it waits for the lock.
    fn knock(&self) {
        self.word.fetch_or(KNOCKED, Ordering::Relaxed);
        // Others wait there, too, and look and wait again.
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
    }

    fn swap(&self, from: u32, to: u32) -> std::result::Result<(), u32> {
        let order = (Ordering::Acquire, Ordering::Relaxed);
        let swapped = self.word.compare_exchange(from, to, order.0, order.1);
        swapped.map(drop)
    }

    /// Whether a holder has ended. A thread that counts in another namespace cannot tell.
    fn is_gone(&self, holder: u32) -> bool {
        let known = self.namespace.load(Ordering::Relaxed);
        known != 0 && task::namespace() == Some(known) && task::is_gone(holder)
    }
}

impl Guard {
    /// What the lock protects.
    pub(crate) fn table(&mut self) -> Table<'_> {
        // SAFETY: this guard is the only one in the process, and it is borrowed mutably.
        unsafe { Table::under_lock() }
    }

    /// Lets the lock go. If a thread waits for it, time passes until it is taken: a thread that lets it go and
    /// takes it again at once is faster than any that has to wake first.
    pub(crate) fn give_way(self) {
        let page = self.page;
        // Relaxed: it is only whether to wait.
        let is_wanted = page.word.load(Ordering::Relaxed) & WANTED != 0;
        drop(self);
        if is_wanted {
            let _ = futex::wait(&page.word, futex::Flags::PRIVATE, 0, Some(&WAY));
        }
    }

    /// The agent's thread, if it serves an engine, has all tools, and is another one than the caller's: then work that takes
    /// descriptors is done there.
    fn served_by(&self) -> Option<u32> {
        let lent = self.page.lent.each_ref();
        let [agent, uffd, freezer, maps] = lent.map(|number| number.load(Ordering::Relaxed));
        let serves = agent != 0 && uffd != 0 && freezer != 0 && maps != 0;
        // A child of vfork has a table of its own.
        let ours = || self.page.life.owner.load(Ordering::Relaxed) == thread::process_number();
        (serves && agent != thread_id() && ours()).then_some(agent)
    }

    /// Whether [`Self::at_desk`] asks the agent's thread.
    pub(crate) fn is_served(&self) -> bool {
        self.served_by().is_some()
    }

    /// Does a job that takes descriptors, with the lock held: on the agent's thread, which has a table of its own, or on this one
    /// where no agent serves. Work that the agent began and did not finish is begun anew.
    pub(crate) fn at_desk<T>(&mut self, job: impl Fn(&mut Guard) -> T) -> T {
        struct Call<'a, J, T> {
            page: &'static PerProcess,
            job: &'a J,
            result: MaybeUninit<T>,
        }
        /// # Safety
        /// `call` is the address of a `Call` of these types, and its maker waits.
        unsafe fn run<J: Fn(&mut Guard) -> T, T>(call: usize) {
            let call = std::ptr::with_exposed_provenance_mut::<Call<'_, J, T>>(call);
            // SAFETY: the caller's promise.
            let call = unsafe { &mut *call };
            // The lock is held by the thread that waits, which gives it back.
            let (page, mask) = (call.page, SignalMask::default());
            let mut guard = ManuallyDrop::new(Guard { page, mask });
            call.result.write((call.job)(&mut guard));
        }
        fn runner<J: Fn(&mut Guard) -> T, T>(_: &J) -> crate::desk::Job {
            run::<J, T>
        }
        let Some(agent) = self.served_by() else {
            return self.apart(job);
        };
        let page = self.page;
        let (runner, result) = (runner(&job), MaybeUninit::uninit());
        let job = &job;
        let mut call = Call { page, job, result };
        let at = (&raw mut call).expose_provenance();
        // SAFETY: the call is there until this returns, and nothing of it is used meanwhile.
        let done = unsafe { page.desk.ask(agent, || page.knock(), runner, at) };
        page.word.fetch_and(!KNOCKED, Ordering::Relaxed);
        if !done && sys::thread::is_gone(agent) {
            // It was killed alone, and no hook needs to wait for it again.
            page.lent[0].store(0, Ordering::Relaxed);
        }
        match done {
            // SAFETY: the job was done, so its result was written.
            true => unsafe { call.result.assume_init() },
            false => self.apart(job),
        }
    }

    /// Does a job on this thread, on the stack that is there for jobs. The thread's own may be small, as of a handler of
    /// signals, or lie in the very memory that the job is about. The lock is held, so the stack is free, unless this is part of
    /// another job. Signals are blocked.
    pub(crate) fn apart<T>(&mut self, job: impl FnOnce(&mut Guard) -> T) -> T {
        let top = std::ptr::from_ref(self.page).expose_provenance();
        let here = 0_u8;
        match (top - STACK..top).contains(&(&raw const here).addr()) {
            true => job(self),
            // SAFETY: `make_page` made it, and the lock keeps other threads off.
            false => unsafe { sys::stack::on(top, || job(self)) },
        }
    }

    /// As [`Self::at_desk`]; what the agent's thread may not do, a job that gives `PERM` there, is done on this one.
    pub(crate) fn at_desk_or_here<T>(
        &mut self,
        job: impl Fn(&mut Guard) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match self.at_desk(&job) {
            Err(Errno::PERM) => self.apart(job),
            done => done,
        }
    }

    /// The state of this process beside the table.
    pub(crate) fn process(&self) -> &'static PerProcess {
        self.page
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        HELD.store(false, Ordering::Relaxed);
        self.page.free();
        restore_signals(self.mask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For tests that count forks of this process.
    static FORKS: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn the_lock_of_a_thread_that_ended_is_taken() {
        let page = PerProcess::default();
        page.note_namespace();
        let ended = std::thread::spawn(thread_id).join().unwrap();
        page.word.store(ended, Ordering::Relaxed);
        let begun = std::time::Instant::now();
        page.take(thread_id());
        assert!(begun.elapsed().as_millis() >= 900, "not at once");
        assert_eq!(page.word.load(Ordering::Relaxed) & !WANTED, thread_id());
    }

    #[test]
    fn a_holder_of_another_namespace_is_not_judged() {
        let page = PerProcess::default();
        assert!(!page.is_gone(u32::MAX), "not known");
        page.namespace.store(1, Ordering::Relaxed);
        assert!(!page.is_gone(u32::MAX), "another");
        page.note_namespace();
        assert!(page.is_gone(u32::MAX));
        assert!(!page.is_gone(thread_id()));
    }

    #[test]
    fn the_end_of_a_fork_that_did_not_begin_is_nothing() {
        let _alone = FORKS.lock();
        end_fork();
        begin_fork();
        begin_fork();
        end_fork();
        assert!(lock_between_forks().is_none());
        end_fork();
        assert!(lock_between_forks().is_some());
    }

    /// The agent is about to be taken out, and stays after all.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn each_fork_takes_its_own_count_away() {
        let _alone = FORKS.lock();
        let during = |call: fn()| {
            thread::swap_bar(thread::Why::DETACHED, true);
            call();
            thread::swap_bar(thread::Why::DETACHED, false);
        };
        begin_fork();
        during(|| {
            begin_fork();
            end_fork();
        });
        assert!(lock_between_forks().is_none(), "the first fork goes on");
        end_fork();
        assert!(lock_between_forks().is_some());
        // Of one that begins so nothing is left, whenever it ends.
        during(begin_fork);
        assert!(lock_between_forks().is_none());
        end_fork();
        assert!(lock_between_forks().is_some());
    }
}
