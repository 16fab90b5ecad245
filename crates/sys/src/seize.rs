//! Threads of another process are held, and one of them makes calls for us, by ptrace(2).
//!
//! ```text
//!   seize, interrupt ─▶ stopped in get_signal() ─▶ registers, vector state, mask, rseq: noted
//!                         │
//!                         ├─ a call: at a `syscall` instruction of its own ─▶ entry ─▶ exit
//!                         ├─ a function: on a stack of ours ─▶ its calls ─▶ the call that says it is done
//!                         │
//!       interrupt again ─▶ stopped in get_signal() ─▶ all put back ─▶ detached
//! ```
//!
//! **Why the second interrupt.** A call that the first stop interrupted is begun again by the kernel, and it decides that
//! when the thread leaves `get_signal()` (`arch_do_signal_or_restart`). After our own calls the thread stands elsewhere, so it has to
//! come there once more. It never reaches its own code in between: the stop is pending before it may leave the kernel.
//!
//! **Why nothing of the thread is lost:**
//!
//! | what | how |
//! |---|---|
//! | a call that is to be begun again | as above; `restart_block` stays, for no call of ours sleeps with a time limit and is interrupted |
//! | signals | all are blocked meanwhile and wait; SIGSTOP goes on its way, and stops the process after we leave |
//! | the mask, also that of sigsuspend(2) | the kernel shows the one to be restored; the call sets its own again |
//! | a restartable sequence | the pointer to it is put back; the kernel then aborts it, as after every preemption |
//! | vector registers | put back with the others |
//! | a call that seccomp filters would not let begin again | it begins in another way (`seize/filters.rs`) |
//!
//! Everything is put back, whichever step failed. **The limit**: if this process is killed (SIGKILL) in these milliseconds, the
//! thread goes on from where we put it, and its process dies. So callers block signals.
//!
//! **Whose registers are written.** A thread that works for us may execute a program with more rights than it has (setuid). For its process
//! can change the code that it runs, in a thread or a child that is not held. So it stops at execve(2), and is not touched from there
//! on. And a number may become another thread's: of those that execute, the one that calls takes the number of the first, which ends.
//!
//! | a thread works for us that is | another one executes | so |
//! |---|---|---|
//! | not the first | it takes the first one's number | ours is gone, and no thread has its number |
//! | the first, the only one | there is none, or one that we do not trace | it cannot be told to do anything |
//! | the first of several | it has the number by which we speak to ours | **never**: [`workers`] gives no such thread, and [`Standstill`] takes none beside it |
//!
//! In a [`Standstill`] the first thread is held beside others. So its registers are written when all stand, and never before. (Beside
//! a worker nothing takes its number: the kernel finishes no exec while a thread that we hold is dead, and we have not waited for it.)
//!
//! **A thread that does not stop** cannot be let go of: the kernel takes that from a tracer for stopped ones only. At the end
//! of the thread that traces, it lets go of all. So these types stay in one thread, and [`apart`] makes one that ends.
//!
//! Source: ptrace(2); `kernel/signal.c`, `kernel/ptrace.c`, `kernel/rseq.c`, `arch/x86/kernel/signal.c`.

mod bounded;
mod calls;
mod filters;
mod place;
mod remote;

pub use filters::{Filters, Program, instructions};
pub use place::Place;
pub use remote::Remote;

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::witness;
use bounded::Bounded;
use calls::{Stop, wait};
use filters::Status;

/// Why a process could not be held, or a thread of it did not do as it was told.
#[derive(Debug, thiserror::Error)]
pub enum SeizeError {
    /// There is no such process, or it has ended, or runs another program.
    #[error("the process is gone, or runs another program now")]
    Gone,
    /// The kernel refuses it: another tracer, or rights.
    #[error("the kernel does not let this user trace the process")]
    Refused,
    /// A thread executes a program, and that takes long.
    #[error(
        "a thread of the process executes a program, which has not begun for 2 s: its file cannot be read, or it waits for \
         another thread of the process; try again"
    )]
    Executes,
    /// A thread did not stop in time.
    #[error("thread {0} sleeps in the kernel and does not stop (vfork, or a device that hangs)")]
    Asleep(u32),
    /// The thread got a signal that nothing can block.
    #[error("a thread of the process got signal {0} while it worked for pageone")]
    Fault(i32),
    /// A process whose first thread is held has another thread, which could take its number.
    #[error("the process has started a thread meanwhile; try again")]
    Grown,
    /// It did not finish in time.
    #[error("a thread of the process did not finish its work for pageone in time")]
    Late,
    /// Its seccomp filters take too long.
    #[error("to look at the seccomp filters of its threads takes more than 2 s")]
    Filtered,
    /// The kernel does not show its seccomp filters.
    #[error("{}", filters::unread(*.0))]
    Unread(Errno),
    /// What the kernel says of a call.
    #[error("{0} failed: {1}")]
    Call(&'static str, Errno),
    /// A thread could not be put back where it was.
    #[error(
        "thread {0} could not be put back where it was ({1}): end the process, it does not go on as it should"
    )]
    Lost(u32, Box<SeizeError>),
}

pub(crate) type Result<T> = std::result::Result<T, SeizeError>;

/// Does some work in a thread of its own. However it ends, whatever it held goes on.
///
/// # Errors
/// There is no thread for it.
///
/// # Panics
/// If the work does.
pub fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> std::io::Result<T> {
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, work)?;
        Ok(thread.join())
    });
    done.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// The most threads that are looked at for one that may work for us.
const MOST_WORKERS: usize = 64;
/// The longest wait until threads beside the first have ended.
const ENDING: Duration = Duration::from_millis(300);

/// Another thread is no tracer of what this one holds.
type OneThread = PhantomData<*const ()>;

/// What ends a call that would wait for ever.
fn bounded() -> Result<Bounded> {
    Bounded::new().map_err(|error| SeizeError::Call("timer_create", error))
}

/// Makes this thread the tracer of another, which notices nothing. False when that has ended.
fn seize(thread: u32, bounded: &Bounded) -> Result<bool> {
    const TRIES: u32 = 100;
    for _ in 0..TRIES {
        match calls::seize(thread, bounded) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => return Err(SeizeError::Executes),
            Err(Errno::SRCH) => return Ok(false),
            // So it says of a thread that is just ending, too, and of a first one that has ended while others live.
            Err(Errno::PERM) if crate::task::is_gone(thread) => return Ok(false),
            Err(Errno::PERM) => std::thread::sleep(Duration::from_micros(20)),
            Err(error) => return Err(SeizeError::Call("PTRACE_SEIZE", error)),
        }
    }
    Err(SeizeError::Refused)
}

/// Asks a thread to stop. False when it has ended.
fn interrupt(thread: u32) -> Result<bool> {
    match calls::interrupt(thread) {
        Ok(()) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(error) => Err(SeizeError::Call("PTRACE_INTERRUPT", error)),
    }
}

/// Waits until a thread has stopped where nothing of it is lost. False when it has ended.
fn wait_for_stop(thread: u32, deadline: Instant) -> Result<bool> {
    loop {
        match wait(thread, deadline)? {
            Stop::Event => return Ok(true),
            Stop::Gone => return Ok(false),
            Stop::Exec => {
                calls::detach(thread)?;
                return Ok(false);
            }
            // On its way before ours.
            Stop::Signal(signal) => calls::go(thread, calls::CONT, signal)?,
            Stop::Call => calls::go(thread, calls::CONT, 0)?,
        }
    }
}

/// Sees to it that a thread which stands can go on with the call that its stop has interrupted. False when it has ended.
fn let_begin_again(status: &Status) -> Result<bool> {
    match filters::let_begin_again(status) {
        Ok(()) => Ok(true),
        Err(SeizeError::Gone) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The threads of process `pid` of which one may work for us: all but the first, or the first if it is the only one. Those that the
/// kernel made, and those for which `is_left_out` holds, do not count.
///
/// # Errors
/// The process is gone.
pub fn workers(pid: u32, is_left_out: impl Fn(u32) -> bool) -> Result<Vec<u32>> {
    let threads = witness::threads(pid, usize::MAX).map_err(|_| SeizeError::Gone)?;
    let is_one = |&thread: &u32| {
        thread != pid && !is_left_out(thread) && !witness::is_made_by_kernel(pid, thread)
    };
    let mut others: Vec<u32> = threads.filter(is_one).take(MOST_WORKERS).collect();
    if others.is_empty() {
        others.push(pid);
    }
    Ok(others)
}

/// A thread that is stopped. On drop it goes on.
#[derive(Debug)]
pub struct Held {
    thread: u32,
    here: OneThread,
}

impl Held {
    /// Stops a thread; `None` when it has ended.
    ///
    /// # Errors
    /// See [`SeizeError`]. One that is [asleep](SeizeError::Asleep) stops when it wakes, and goes on when this thread ends.
    pub fn stop(thread: u32, patience: Duration) -> Result<Option<Self>> {
        let stops = seize(thread, &bounded()?)?
            && interrupt(thread)?
            && wait_for_stop(thread, Instant::now() + patience)?
            && let_begin_again(&Status::of(thread))?;
        Ok(stops.then_some(Self {
            thread,
            here: PhantomData,
        }))
    }

    /// Its number.
    #[must_use]
    pub fn thread(&self) -> u32 {
        self.thread
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // One that has ended meanwhile needs nothing.
        let _ = calls::detach(self.thread);
    }
}

/// Files of threads that are kept open at a time: descriptors are few.
const MOST_OPEN: usize = 256;

/// A thread whose tracer this process is.
#[derive(Debug)]
struct Seized {
    stands: bool,
    status: Status,
}

/// So many threads are asked to stop together.
const AT_ONCE: usize = 256;
/// The longest that filters of threads are looked at, and those of so many more.
const MOST_JUDGED: Duration = Duration::from_secs(2);

/// All threads of a process, stopped, but those that were left out. On drop they go on.
#[derive(Debug)]
pub struct Standstill {
    pid: u32,
    without: Vec<u32>,
    /// The threads whose tracer this process is.
    threads: BTreeMap<u32, Seized>,
    /// When the first of them was asked to stop, the last time.
    since: Instant,
    bounded: Bounded,
    here: OneThread,
}

impl Standstill {
    /// Stops all threads of process `pid` but those in `without`. If one of them does not stop within `patience`, all go on for as
    /// long, and then it is tried again, `tries` times in all.
    ///
    /// # Errors
    /// See [`SeizeError`]; then all go on.
    pub fn of(pid: u32, without: &[u32], patience: Duration, tries: u32) -> Result<Self> {
        let (without, threads) = (without.to_vec(), BTreeMap::new());
        let mut still = Self {
            pid,
            without,
            threads,
            since: Instant::now(),
            bounded: bounded()?,
            here: PhantomData,
        };
        // Known first, so that they stand for as short as can be.
        still.find()?;
        still.try_to_stop(patience, tries)?;
        Ok(still)
    }

    /// Lets all go on for a moment, and stops them anew as [`of`](Self::of) does.
    ///
    /// # Errors
    /// As `of`.
    pub fn again(&mut self, moment: Duration, patience: Duration, tries: u32) -> Result<()> {
        self.go_on()?;
        std::thread::sleep(moment);
        self.try_to_stop(patience, tries)
    }

    fn try_to_stop(&mut self, patience: Duration, tries: u32) -> Result<()> {
        for left in (0..tries).rev() {
            self.since = Instant::now();
            match self.stop(self.since + patience) {
                Err(SeizeError::Asleep(_) | SeizeError::Grown)
                    if left > 0 && !self.without.contains(&self.pid) =>
                {
                    self.go_on()?;
                    std::thread::sleep(patience);
                }
                stopped => return stopped,
            }
        }
        Err(SeizeError::Late)
    }

    /// Where they stand.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn places(&self) -> Result<Vec<Place>> {
        let mut all = Vec::new();
        for &thread in self.threads.keys() {
            match calls::registers(thread) {
                Ok(registers) => all.push(Place::of(thread, &registers)),
                // It was killed.
                Err(SeizeError::Gone) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    /// What judges the calls of each: it holds for as long as all stand. Read one after another, for a thread may have a quarter of a MiB.
    ///
    /// # Errors
    /// Of each: [`SeizeError::Unread`]; what the kernel says.
    pub fn filters(&self) -> impl Iterator<Item = Result<(u32, Filters)>> {
        self.threads.iter().filter_map(|(&thread, seized)| {
            match Filters::of(&seized.status) {
                // It was killed.
                Err(SeizeError::Gone) => None,
                filters => Some(filters.map(|filters| (thread, filters))),
            }
        })
    }

    /// Finds threads that are not known yet; tells whether there were any.
    fn find(&mut self) -> Result<bool> {
        if self.without.contains(&self.pid) {
            return self.is_alone().map(|()| false);
        }
        let threads = witness::threads(self.pid, usize::MAX).map_err(|_| SeizeError::Gone)?;
        let is_new =
            |thread: &u32| !self.threads.contains_key(thread) && !self.without.contains(thread);
        let new: Vec<u32> = threads.filter(is_new).collect();
        let mut found = false;
        for thread in new {
            let seized = match seize(thread, &self.bounded) {
                // No tracer holds those, and they run no code of the process.
                Err(SeizeError::Refused) if witness::is_made_by_kernel(self.pid, thread) => false,
                seized => seized?,
            };
            if seized {
                let is_kept = self.threads.len() < MOST_OPEN;
                let status = if is_kept {
                    Status::found(thread)
                } else {
                    Status::of(thread)
                };
                let stands = false;
                self.threads.insert(thread, Seized { stands, status });
                found = true;
            }
        }
        Ok(found)
    }

    /// Waits until the first thread is the only one. One that ends may have started another: so a list has to be without any.
    fn is_alone(&self) -> Result<()> {
        let deadline = Instant::now() + ENDING;
        loop {
            let mut threads =
                witness::threads(self.pid, usize::MAX).map_err(|_| SeizeError::Gone)?;
            let is_other = |thread: u32| {
                !self.without.contains(&thread)
                    && !witness::is_made_by_kernel(self.pid, thread)
                    && !crate::task::is_gone(thread)
            };
            if !threads.any(is_other) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(SeizeError::Grown);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Stops them, and those that they make meanwhile: until there is none that is not known.
    fn stop(&mut self, deadline: Instant) -> Result<()> {
        let (mut first, mut judged) = (false, Duration::ZERO);
        loop {
            let moving = self.threads.iter().filter(|(_, seized)| !seized.stands);
            let moving: Vec<u32> = moving.map(|(&thread, _)| thread).collect();
            // Each that was asked to stop has to be let begin again: no more are asked when that takes long.
            for some in moving.chunks(AT_ONCE) {
                if judged > MOST_JUDGED {
                    return Err(SeizeError::Filtered);
                }
                first |= self.stop_some(some, deadline, &mut judged)?;
            }
            match self.find()? {
                false => {
                    let its = self.threads.get(&self.pid).filter(|_| first);
                    let goes_on = its.map(|seized| let_begin_again(&seized.status));
                    return match goes_on.transpose()? {
                        Some(false) => Err(SeizeError::Gone),
                        _ => Ok(()),
                    };
                }
                // Each ends before it stops, and has started another.
                true if Instant::now() > deadline => return Err(SeizeError::Grown),
                true => {}
            }
        }
    }

    /// Stops some threads, and tells whether the first of all is among those that stand; `judged` grows by the time that their filters take.
    fn stop_some(
        &mut self,
        threads: &[u32],
        deadline: Instant,
        judged: &mut Duration,
    ) -> Result<bool> {
        for &thread in threads {
            interrupt(thread)?;
        }
        // Whichever does not stop, those that do are known to stand: they are let go of together.
        let (mut first, mut late) = (false, None);
        for &thread in threads {
            let Some(seized) = self.threads.get_mut(&thread) else {
                continue;
            };
            let stopped = wait_for_stop(thread, deadline).and_then(|stopped| {
                // Another thread that executes takes the first one's number: nothing is written by it before all stand.
                seized.stands = stopped;
                first |= stopped && thread == self.pid;
                let begun = Instant::now();
                let goes_on = stopped && (thread == self.pid || let_begin_again(&seized.status)?);
                *judged += begun.elapsed();
                Ok(goes_on)
            });
            match stopped {
                Ok(true) => {}
                Ok(false) => _ = self.threads.remove(&thread),
                Err(error) => late = late.or(Some(error)),
            }
        }
        late.map_or(Ok(first), Err)
    }

    /// Lets those go on that stand.
    fn go_on(&mut self) -> Result<()> {
        for (&thread, seized) in &mut self.threads {
            if std::mem::take(&mut seized.stands) {
                match calls::go(thread, calls::CONT, 0) {
                    Ok(()) | Err(SeizeError::Gone) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// When the first of them was asked to stop.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.threads.len()
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        // The end of this thread lets go of one that does not stand.
        for (&thread, _) in self.threads.iter().filter(|(_, seized)| seized.stands) {
            let _ = calls::detach(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::FileExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped());
        command.stdout(Stdio::piped()).spawn().unwrap()
    }

    fn line(from: &mut impl BufRead) -> String {
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        line
    }

    /// A `syscall` instruction in the kernel's library of a process.
    fn entry(pid: u32, memory: &File) -> u64 {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let vdso = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap();
        let start = u64::from_str_radix(vdso.split_once('-').unwrap().0, 16).unwrap();
        let mut code = [0; 4096];
        memory.read_exact_at(&mut code, start).unwrap();
        let at = code.windows(2).position(|two| two == [0x0f, 0x05]).unwrap();
        start + at as u64
    }

    #[test]
    fn a_call_that_was_interrupted_begins_again() {
        let mut child = shell("echo here; read word; echo $word; exit 7");
        let mut told = BufReader::new(child.stdout.take().unwrap());
        assert_eq!(line(&mut told), "here\n");
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        while !state().contains(") S ") {
            std::thread::yield_now();
        }
        for _ in 0..50 {
            let held = Held::stop(child.id(), PATIENCE).unwrap().unwrap();
            assert_eq!(held.thread(), child.id());
            let path = format!("/proc/{}/mem", child.id());
            let memory = File::options().read(true).write(true).open(path).unwrap();
            let entry = entry(child.id(), &memory);
            let before = calls::registers(child.id()).unwrap();
            let mut remote = Remote::new(held, memory, entry).unwrap();
            let own = remote.call(libc::SYS_getpid, [0; 6]).unwrap();
            assert_eq!(own, Ok(u64::from(child.id())));
            let refused = remote.call(libc::SYS_close, [u64::MAX, 0, 0, 0, 0, 0]);
            assert_eq!(refused.unwrap(), Err(Errno::BADF));
            drop(remote);
            let held = Held::stop(child.id(), PATIENCE).unwrap().unwrap();
            // In the same call, or on its way back to it.
            let after = calls::registers(held.thread()).unwrap();
            assert!(after.rip.abs_diff(before.rip) <= 2);
            assert_eq!((after.rsp, after.rbx), (before.rsp, before.rbx));
        }
        child.stdin.take().unwrap().write_all(b"word\n").unwrap();
        assert_eq!(line(&mut told), "word\n");
        assert_eq!(child.wait().unwrap().code(), Some(7));
    }

    #[test]
    fn a_process_that_has_ended_is_gone() {
        let mut child = shell("exit 0");
        drop(child.stdin.take());
        while !crate::task::is_gone(child.id()) {
            std::thread::yield_now();
        }
        assert!(Held::stop(child.id(), PATIENCE).unwrap().is_none());
        child.wait().unwrap();
        let still = Standstill::of(child.id(), &[], PATIENCE, 1);
        assert!(matches!(still, Err(SeizeError::Gone)));
    }

    #[test]
    fn a_process_has_one_tracer() {
        let mut child = shell("echo here; read word");
        // Before that it executes, and a thread that does so is let go of.
        let mut told = BufReader::new(child.stdout.take().unwrap());
        assert_eq!(line(&mut told), "here\n");
        let held = Held::stop(child.id(), PATIENCE).unwrap().unwrap();
        let other = std::thread::spawn({
            let id = child.id();
            move || Held::stop(id, PATIENCE).map(drop)
        });
        assert!(matches!(other.join().unwrap(), Err(SeizeError::Refused)));
        drop(held);
        let still = Standstill::of(child.id(), &[], PATIENCE, 1).unwrap();
        assert_eq!(still.count(), 1);
        drop(still);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A process that sleeps in vfork until its child has opened a pipe.
    struct Vforked {
        process: Child,
        pipe: std::path::PathBuf,
    }

    impl Drop for Vforked {
        fn drop(&mut self) {
            // Never waits, and lets the child go on.
            let _both = File::options().read(true).write(true).open(&self.pipe);
            let _ = self.process.kill();
            let _ = self.process.wait();
            let _ = std::fs::remove_file(&self.pipe);
        }
    }

    /// One that is about to; `None` where it cannot be made.
    fn vforked() -> Option<Vforked> {
        const PROGRAM: &str = "import os, sys
opens = [(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)]
print('here', flush=True)
os.posix_spawn('/bin/true', ['true'], {}, file_actions=opens)
print('on', flush=True)";
        let pipe = std::env::temp_dir().join(format!("pageone-seize-{}", std::process::id()));
        let made = Command::new("mkfifo").arg(&pipe).status();
        if !made.is_ok_and(|status| status.success()) {
            return None;
        }
        let mut python = Command::new("python3");
        python.args(["-c", PROGRAM]).arg(&pipe);
        let process = python.stdout(Stdio::piped()).spawn().ok()?;
        Some(Vforked { process, pipe })
    }

    #[test]
    fn a_thread_that_does_not_stop_is_let_go_of() {
        let Some(mut vforked) = vforked() else {
            eprintln!("skipped: there is no python3, or no mkfifo");
            return;
        };
        let id = vforked.process.id();
        let mut told = BufReader::new(vforked.process.stdout.take().unwrap());
        assert_eq!(line(&mut told), "here\n");
        let about = |file: &str| std::fs::read_to_string(format!("/proc/{id}/{file}")).unwrap();
        let children = format!("task/{id}/children");
        while about(&children).is_empty() || !about("stat").contains(") D ") {
            std::thread::sleep(Duration::from_millis(1));
        }
        let moment = Duration::from_millis(20);
        let stopped = apart(|| Held::stop(id, moment).map(drop)).unwrap();
        assert!(matches!(stopped, Err(SeizeError::Asleep(_))), "{stopped:?}");
        while !about("status").contains("TracerPid:\t0\n") {
            std::thread::yield_now();
        }
        let still = apart(|| Standstill::of(id, &[], moment, 2).map(drop)).unwrap();
        assert!(matches!(still, Err(SeizeError::Asleep(_))), "{still:?}");
        while !about("status").contains("TracerPid:\t0\n") {
            std::thread::yield_now();
        }
        drop(File::options().write(true).open(&vforked.pipe).unwrap());
        assert_eq!(line(&mut told), "on\n");
        assert!(vforked.process.wait().unwrap().success());
    }

    #[test]
    fn a_stopped_process_stays_stopped() {
        let mut child = shell("echo here; read word");
        let mut told = BufReader::new(child.stdout.take().unwrap());
        assert_eq!(line(&mut told), "here\n");
        crate::process::signal_child(child.id(), libc::SIGSTOP).unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        while !state().contains(") T ") {
            std::thread::yield_now();
        }
        drop(Held::stop(child.id(), PATIENCE).unwrap().unwrap());
        while !state().contains(") T ") {
            assert!(!state().contains(") S "), "it goes on");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
