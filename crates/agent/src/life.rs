//! The life of the agent's thread: it never has rights that its program has given up.
//!
//! A thread keeps the credentials, filters and namespaces with which it was made. So before a call that changes
//! those of the program the agent's thread ends, and after it the calling thread makes a new one, which inherits
//! the rights that the call left:
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
//! thread any more. If it does so for 10 s ([`thread`](crate::thread)), the call fails with `EAGAIN`: to go on would leave a thread with
//! the old rights, of which the program asks to be rid.
//!
//! **No signals are blocked while the call is made**: libc's setuid signals all other threads and waits for them.
//! A signal handler that comes in between and makes such a call itself finds no agent; the outer call starts it.
//!
//! **A child that shares memory** (vfork) sees all this, but the agent is no thread of its own: it leaves it alone, and the memory, which
//! is its parent's, merged.
//!
//! The tempting alternative, to make the call in the agent's thread too, fails for all that can be done once
//! only, or by a thread that is alone. And it has to know every call's meaning.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::io::{Errno, Result};
use rustix::thread::futex;
use sys::rights::Rights;
use sys::thread::{self, Room};

use crate::config::config;
use crate::filter::trial;
use crate::lock::{self, Guard, PerProcess, lock};
use crate::mappings::private::{give_back_all, reachable, settle};
use crate::own;
use crate::passing;
use crate::session::serve;
use crate::thread::{
    END, HASTE, Life, OFFER, Why, bar, forget_own_tracer, is_barred, now, process_number,
};
use crate::window::staging;
#[cfg(target_arch = "x86_64")]
use crate::{
    lock::{ALONE, SEARCHING},
    mappings::lines,
    session::report,
    table,
    thread::swap_bar,
};

/// Filters that were read before they were installed, tried before all else, or read from outside, in this process or in those it was
/// forked from.
static READ: AtomicU32 = AtomicU32::new(0);

/// Notes that a filter was installed that allows all calls of the agent's. One of a child that shares the memory is the child's alone.
pub(crate) fn note_read_filter() {
    if !is_anothers() {
        READ.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether the program has filters that let an agent work. They may forbid calls that no agent makes.
pub(crate) fn has_read_filters() -> bool {
    READ.load(Ordering::Relaxed) != 0
}

/// Whether the caller shares its memory with the process whose agent this is, as a child of vfork does. Its rights are its own: they change
/// nothing for that agent, which has /proc and all else as it had.
fn is_anothers() -> bool {
    lock::existing().is_some_and(|page| page.life.has_other_owner())
}

/// The number of this process while a held thread works for the one that attaches, which writes 0 when that thread is back. Another
/// thread of the program must not change rights meanwhile: a filter would judge calls which the program never made, or find an agent's
/// thread that just began. In a fork child it is another process's number.
#[unsafe(no_mangle)]
pub(crate) static PAGEONE_OUTSIDE: AtomicU32 = AtomicU32::new(0);

/// Waits until no thread works for another process. Not for ever: that process may have been killed.
fn wait_for_outside() {
    const LONGEST: Duration = Duration::from_secs(120);
    const MOMENT: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let end = now() + LONGEST;
    loop {
        let worked_in = PAGEONE_OUTSIDE.load(Ordering::Relaxed);
        if worked_in == 0 || worked_in != process_number() || now() >= end {
            return;
        }
        let private = futex::Flags::PRIVATE;
        let _ = futex::wait(&PAGEONE_OUTSIDE, private, worked_in, Some(&MOMENT));
    }
}

/// Notes that so many filters were read before the agent came into the process.
#[cfg(target_arch = "x86_64")]
pub(crate) fn note_filters_from_outside(count: u32) {
    READ.store(count, Ordering::Relaxed);
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

/// Where a thread of this process, or of the parent that it inherited this from, has run: memory that is used again.
static ROOM: AtomicUsize = AtomicUsize::new(0);

/// Sees to it that the agent runs: there is a new offer. If no agent can run any more, what was noted of it is of no use.
///
/// # Errors
/// What mmap(2) and clone(2) give.
pub(crate) fn begin(guard: &mut Guard) -> Result<()> {
    let life = &guard.process().life;
    let _ = life
        .owner
        .compare_exchange(0, process_number(), Ordering::Relaxed, Ordering::Relaxed);
    life.orders.fetch_add(OFFER, Ordering::Relaxed);
    let _ = futex::wake(&life.orders, futex::Flags::PRIVATE, 1);
    start(guard)
}

/// Starts the agent's thread, unless it runs or may not. That takes much stack.
fn start(guard: &mut Guard) -> Result<()> {
    guard.apart(|guard| start_here(guard))
}

fn start_here(guard: &Guard) -> Result<()> {
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
    // What an agent's thread has left that was killed.
    // SAFETY: no such thread runs, and only the holder of the lock starts one.
    unsafe { staging::unmap_all() };
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
    wait_for_outside();
    let Some(page) = lock::existing().filter(|page| page.life.is_ours()) else {
        if is_anothers() {
            return Ok(call());
        }
        // Perhaps a fork child with merged memory and no agent.
        settle(why)?;
        return Ok(reachable(call));
    };
    hold(&page.life, why);
    let result = match page.life.wait_for_end() {
        true => settle(why).map(|()| reachable(call)),
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
    wait_for_outside();
    let Some(page) = lock::existing().filter(|page| page.life.is_ours()) else {
        if is_anothers() {
            return call();
        }
        // Perhaps a fork child with merged memory and no agent.
        give_back_all();
        return call().inspect(|_| bar(why));
    };
    hold(&page.life, why);
    if !page.life.wait_for_end() {
        release(page);
        return Err(Errno::AGAIN);
    }
    // What the agent did not give back, or another thread has offered since.
    give_back_all();
    let result = call().inspect(|_| bar(why));
    if result.is_err() {
        release(page);
    }
    result
}

/// Whether the constructor has begun. A fork child inherits it.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// In a fork child: notes whose memory this is by now, and starts the agent's thread if all memory is to be offered.
pub(crate) fn begin_in_child() {
    forget_own_tracer();
    passing::forget();
    if let Some(page) = lock::existing() {
        page.life.heir.store(process_number(), Ordering::Relaxed);
    }
    begin_for_all_memory();
}

/// Starts the agent's thread in a process all of whose memory is to be offered: in the constructor, and in a fork child.
pub(crate) fn begin_for_all_memory() {
    if config().any.is_none() || is_barred() {
        return;
    }
    BEGUN.store(true, Ordering::Relaxed);
    if let Some(mut guard) = lock() {
        // What fails is tried again at the next hook.
        let _ = begin(&mut guard);
    }
}

/// The same for a child that was made in a way that runs no code of ours in it.
fn begin_late() {
    let is_new = |life: &Life| life.owner.load(Ordering::Relaxed) == 0;
    if BEGUN.load(Ordering::Relaxed) && lock::existing().is_some_and(|page| is_new(&page.life)) {
        begin_for_all_memory();
    }
}

/// Makes a new agent, by the calling thread and with its rights, if one is wanted. For hooks, with the lock free.
pub(crate) fn bring_back() {
    begin_late();
    let Some(page) = lock::existing() else { return };
    let life = &page.life;
    if !life.wanted.load(Ordering::Relaxed) || life.runs() {
        return;
    }
    if life.owner.load(Ordering::Relaxed) == process_number()
        && let Some(mut guard) = lock()
        && life.wanted.swap(false, Ordering::Relaxed)
    {
        // What fails is tried again at the next offer.
        let _ = start(&mut guard);
    }
}

/// How often the end of the agent's thread is waited for, when it is taken out.
#[cfg(target_arch = "x86_64")]
const WAITS: u32 = 30;

/// Ends the agent and makes all memory private, before it is taken out of the process: from here hooks do nothing of their own.
/// What the program offers to the kernel's KSM is there again.
///
/// # Errors
/// `AGAIN` when the agent's thread did not end, `NOMEM` when merged pages could not be made anonymous, `BUSY` when some may be pinned,
/// `FAULT` and `DEADLK` as of [`own_all`](crate::mappings::private::own_all). Then the agent goes on.
#[cfg(target_arch = "x86_64")]
pub(crate) fn end_for_detach() -> Result<()> {
    let page = lock::existing();
    let ours = page.filter(|page| page.life.is_ours());
    if let Some(page) = ours {
        hold(&page.life, Why::DETACHED);
    }
    // All its pages are made whole by the agent's thread: each wait is of seconds.
    let mut waits = 0..WAITS;
    let ended = ours.is_none_or(|page| waits.any(|_| page.life.wait_for_end()));
    let ended = if ended { Ok(()) } else { Err(Errno::AGAIN) };
    let private = ended.and_then(|()| settle(Why::DETACHED)).and_then(|()| {
        let mut guard = page.and_then(|_| lock());
        // A page that may be pinned has a frame of its own, in a store's mapping. A discard without a hook would bring
        // canonical content back there.
        let stored = guard
            .as_mut()
            .is_some_and(|guard| guard.table().anything_stored());
        match stored {
            true => Err(Errno::BUSY),
            false => Ok(()),
        }
    });
    if private.is_err() {
        ours.into_iter().for_each(release);
        return private;
    }
    if let Some(page) = ours {
        page.life.leaving.store(true, Ordering::Relaxed);
    }
    swap_bar(Why::DETACHED, true);
    if let Some(guard) = page.and_then(|_| lock()) {
        // Offers that are under way are passed on, as those from here are.
        guard.process().serving.store(ALONE, Ordering::Relaxed);
    }
    if page.is_some() {
        report::pass_on_to_ksm();
    }
    Ok(())
}

/// Takes [`end_for_detach`] back.
#[cfg(target_arch = "x86_64")]
pub(crate) fn go_on_after_all() {
    swap_bar(Why::DETACHED, false);
    if let Some(page) = lock::existing().filter(|page| page.life.is_ours()) {
        page.serving.store(SEARCHING, Ordering::Relaxed);
        // An offer under way may have made it ours since: then nothing was held, and this would release what another call holds.
        if page.life.leaving.swap(false, Ordering::Relaxed) {
            release(page);
        }
    }
}

/// Unmaps all that the agent has beside its image.
///
/// # Safety
/// [`end_for_detach`] was called, and no thread is in this image or comes into it, but the caller, which uses nothing of the agent after
/// this.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn leave_nothing() {
    lines::keep_only(&[]);
    let room = ROOM.swap(0, Ordering::Relaxed);
    // SAFETY: the agent's thread has ended, and the caller vouches for all others.
    unsafe {
        if room != 0 {
            Room::at(room).unmap();
        }
        staging::unmap_all();
        table::unmap_all();
        lock::unmap_page();
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
    if let Some(mut guard) = lock()
        && page.life.holds.fetch_sub(1, Ordering::Relaxed) == 1
    {
        // Without an agent merged memory stays right; the next offer tries again.
        let _ = start(&mut guard);
    }
}
