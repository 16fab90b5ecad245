//! ptrace(2) and wait4(2), for one thread.

use std::time::{Duration, Instant};

use libc::user_regs_struct;
use rustix::io::Errno;

use super::bounded::Bounded;
use super::{Result, SeizeError};
use crate::fault::{self, Point};
use crate::task;

pub(super) const CONT: i64 = 7;
pub(super) const SYSCALL: i64 = 24;
const DETACH: i64 = 17;
const SEIZE: usize = 0x4206;
const INTERRUPT: i64 = 0x4207;
const GETREGSET: i64 = 0x4204;
const SETREGSET: i64 = 0x4205;
const GETSIGMASK: i64 = 0x420a;
const SETSIGMASK: i64 = 0x420b;
const GET_FILTER: i64 = 0x420c;
const GET_RSEQ: i64 = 0x420f;

/// PTRACE_O_TRACESYSGOOD: stops at calls are told from signals. PTRACE_O_TRACEEXEC: a thread stops before the first instruction of
/// another program.
const OPTIONS: usize = 1 | 0x10;
const GENERAL: usize = 1; // NT_PRSTATUS
const VECTORS: usize = 0x202; // NT_X86_XSTATE
/// More than the processor's largest state.
const VECTORS_BYTES: usize = 16 * 1024;

fn ptrace(request: i64, thread: u32, address: usize, data: usize) -> rustix::io::Result<usize> {
    fault::check(Point::Ptrace)?;
    let number = usize::try_from(request).unwrap_or_default();
    let args = [number, thread as usize, address, data, 0, 0];
    // SAFETY: `data` is a number, or the address of what the callers below give the kernel to read or fill; what it does to the
    // other process is theirs to answer for.
    unsafe { crate::raw::call(libc::SYS_ptrace, args) }
}

pub(super) fn named(name: &'static str) -> impl Fn(Errno) -> SeizeError {
    move |error| match error {
        Errno::SRCH => SeizeError::Gone,
        error => SeizeError::Call(name, error),
    }
}

/// Waits for a thread of the process that executes a program, and not for ever: `INTR`.
pub(super) fn seize(thread: u32, bounded: &Bounded) -> rustix::io::Result<()> {
    fault::check(Point::Ptrace)?;
    bounded.ptrace(SEIZE, thread, OPTIONS)
}

pub(super) fn interrupt(thread: u32) -> rustix::io::Result<()> {
    ptrace(INTERRUPT, thread, 0, 0).map(drop)
}

pub(super) fn detach(thread: u32) -> Result<()> {
    surely(|| {
        ptrace(DETACH, thread, 0, 0)
            .map(drop)
            .map_err(named("PTRACE_DETACH"))
    })
}

/// Does what must not be left out: it is tried again, unless the thread has ended.
pub(super) fn surely<T>(mut step: impl FnMut() -> Result<T>) -> Result<T> {
    const AGAIN: u32 = 10;
    for _ in 0..AGAIN {
        match step() {
            Err(SeizeError::Call(..)) => {}
            done => return done,
        }
    }
    step()
}

/// Has a stopped thread go on, in the way named, with a signal or 0.
pub(super) fn go(thread: u32, way: i64, signal: i32) -> Result<()> {
    let signal = signal.unsigned_abs() as usize;
    ptrace(way, thread, 0, signal)
        .map(drop)
        .map_err(named("PTRACE_CONT"))
}

/// Where a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Between its instructions, because it was asked to, or its process is stopped.
    Event,
    /// At a system call, before or after it.
    Call,
    /// Before this signal reaches it.
    Signal(i32),
    /// It runs another program from here on, perhaps with more rights. Nothing of it may be written.
    Exec,
    /// It has ended.
    Gone,
}

/// Waits for the next stop. The kernel's wait has no time limit, and a signal at its end belongs to the whole process.
///
/// A thread that waits for nothing but a processor stops when it gets one. On a busy machine that may be later than the deadline.
pub(super) fn wait(thread: u32, deadline: Instant) -> Result<Stop> {
    const ALL: i32 = libc::__WALL | libc::WNOHANG;
    const CALL: i32 = libc::SIGTRAP | 0x80;
    const MOMENTS: u32 = 200;
    const SHORT: Duration = Duration::from_micros(50);
    const LONGEST: Duration = Duration::from_millis(5);
    const FOR_A_CPU: Duration = Duration::from_secs(1);
    let (mut tries, mut pause) = (0, SHORT);
    loop {
        let mut status = 0i32;
        let to = (&raw mut status).expose_provenance();
        let args = [thread as usize, to, ALL.unsigned_abs() as usize, 0, 0, 0];
        // SAFETY: the kernel fills the status.
        match unsafe { crate::raw::call(libc::SYS_wait4, args) } {
            Ok(0) if Instant::now() >= deadline => {
                if Instant::now() >= deadline + FOR_A_CPU || !task::is_running(thread) {
                    return Err(SeizeError::Asleep(thread));
                }
                std::thread::sleep(LONGEST);
            }
            Ok(0) if tries < MOMENTS => {
                std::thread::yield_now();
                tries += 1;
            }
            // Most stop at once. One that takes long may take as long as its process likes, and is not to cost much meanwhile.
            Ok(0) => {
                std::thread::sleep(pause);
                pause = (pause * 9 / 8).min(LONGEST);
            }
            Ok(_) if !libc::WIFSTOPPED(status) => return Ok(Stop::Gone),
            Ok(_) if status >> 16 == libc::PTRACE_EVENT_STOP => return Ok(Stop::Event),
            Ok(_) if status >> 16 == libc::PTRACE_EVENT_EXEC => return Ok(Stop::Exec),
            Ok(_) => {
                return Ok(match libc::WSTOPSIG(status) {
                    CALL => Stop::Call,
                    signal => Stop::Signal(signal),
                });
            }
            Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Ok(Stop::Gone),
            Err(error) => return Err(SeizeError::Call("wait4", error)),
        }
    }
}

/// Moves a set of registers; `at` is memory of ours.
fn register_set(request: i64, thread: u32, kind: usize, at: usize, len: usize) -> Result<usize> {
    let mut vector = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(at),
        iov_len: len,
    };
    ptrace(request, thread, kind, (&raw mut vector).expose_provenance())
        .map_err(named("ptrace of registers"))?;
    Ok(vector.iov_len)
}

pub(super) fn registers(thread: u32) -> Result<user_regs_struct> {
    // SAFETY: numbers, for which zeros will do.
    let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
    let at = (&raw mut registers).expose_provenance();
    register_set(GETREGSET, thread, GENERAL, at, size_of_val(&registers))?;
    Ok(registers)
}

pub(super) fn set_registers(thread: u32, registers: &user_regs_struct) -> Result<()> {
    let at = (&raw const *registers).expose_provenance();
    register_set(SETREGSET, thread, GENERAL, at, size_of_val(registers)).map(drop)
}

pub(super) fn vectors(thread: u32) -> Result<Vec<u8>> {
    let mut state = vec![0; VECTORS_BYTES];
    let at = state.as_mut_ptr().expose_provenance();
    let len = register_set(GETREGSET, thread, VECTORS, at, state.len())?;
    state.truncate(len);
    Ok(state)
}

pub(super) fn set_vectors(thread: u32, state: &[u8]) -> Result<()> {
    let at = state.as_ptr().expose_provenance();
    register_set(SETREGSET, thread, VECTORS, at, state.len()).map(drop)
}

pub(super) fn mask(thread: u32) -> Result<u64> {
    let mut mask = 0u64;
    ptrace(GETSIGMASK, thread, 8, (&raw mut mask).expose_provenance())
        .map_err(named("PTRACE_GETSIGMASK"))?;
    Ok(mask)
}

pub(super) fn set_mask(thread: u32, mask: u64) -> Result<()> {
    ptrace(SETSIGMASK, thread, 8, (&raw const mask).expose_provenance())
        .map(drop)
        .map_err(named("PTRACE_SETSIGMASK"))
}

/// Where the thread has its pointer to a restartable sequence, if it has registered one.
pub(super) fn sequence(thread: u32) -> Option<u64> {
    const POINTER: u64 = 8; // rseq_cs in struct rseq
    let mut told = [0u64; 3];
    let len = size_of_val(&told);
    ptrace(GET_RSEQ, thread, len, (&raw mut told).expose_provenance()).ok()?;
    (told[0] != 0).then(|| told[0] + POINTER)
}

/// Reads a thread's seccomp filter of this index, the oldest is 0, and gives its length. `into` has room for the longest.
pub(super) fn filter(thread: u32, index: usize, into: &mut [u64]) -> rustix::io::Result<usize> {
    debug_assert!(into.len() >= 4096);
    ptrace(
        GET_FILTER,
        thread,
        index,
        into.as_mut_ptr().expose_provenance(),
    )
}
