//! `pageone detach PID…`: the agent that `attach` put into a process is taken out again.
//!
//! ```text
//!   one thread held, outside the agent ─▶ it ends the agent: all memory is private, hooks do nothing of their own
//!                                          │
//!                                          ▼
//!   all threads held, none in the agent ─▶ libc's bytes written back ─▶ the agent's memory is unmapped ─▶ all go on
//! ```
//!
//! **What must hold**: no thread runs bytes that are half written, or comes back to memory that is gone; and no hook is gone while memory
//! is merged. Each write, and the interleaving that could break it:
//!
//! | write | what could break it | what stops it |
//! |---|---|---|
//! | the agent ends | a window is under way; a hook has the lock | the agent's own end waits for both; all threads but the held one run |
//! | | the held thread has the lock itself | it is outside the agent: its place, and those that signal handlers come back to, are looked at |
//! | | a page is pinned, and stays in a store's mapping | that is refused: the agent goes on |
//! | libc's bytes | a thread stands in a jump | a jump is one instruction, over one instruction |
//! | | another tool has changed the bytes | they are compared first: the agent goes on |
//! | | a seccomp filter refuses the held thread a call, as one that came since | its filters are read before it makes the first one, and again while all stand: only a thread whose filters allow all is chosen |
//! | unmapping | a thread is in the agent, or libc's function will come back there | none is when all stand still; with the jumps gone none comes |
//! | | a fork child | has memory of its own, with an agent that does nothing of its own |
//!
//! A failure before libc's bytes are back has the agent go on. After that the process is detached, whatever fails: memory of the agent
//! may stay, and nothing leads to it.

use std::fmt;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use sys::fault::{self, Point};
use sys::pins::Pin;
use sys::seize::{self, Held, Place, Remote, SeizeError, Standstill};
use sys::thread::{block_signals, restore_signals};

use super::filters::Judge;
use super::image::ERRNO;
use super::moment::{self, PAUSE, TRIES, WAIT};
use super::record::Record;
use super::site::JUMP;
use super::target::Target;
use super::work::{DONE, FIRST, MUNMAP, PATIENCE, STOPS};
use crate::human;

/// What was done.
pub(super) struct Done {
    threads: usize,
    stood: Duration,
    held: Duration,
    left: Option<anyhow::Error>,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        let (stood, held) = (ms(self.stood), ms(self.held));
        let threads = human::count(self.threads, "thread");
        write!(
            f,
            "detached: all its memory is its own; {threads} stood still for {stood:.1} ms, the one that did the work for {held:.1} ms"
        )?;
        match &self.left {
            None => Ok(()),
            Some(error) => write!(
                f,
                "; memory of the agent stays, to which nothing leads ({error:#})"
            ),
        }
    }
}

/// Takes the agent out of a process.
///
/// # Errors
/// The reason why not; then the agent is there as before.
pub(super) fn detach(target: Target, record: &Record) -> Result<Done> {
    // A signal that ended this process now would end the other as well.
    let mask = block_signals();
    let result = seize::apart(|| with_thread(target, record));
    restore_signals(mask);
    result.context("cannot start a thread")?
}

fn with_thread(target: Target, record: &Record) -> Result<Done> {
    let (libc, base) = target.libc()?;
    let code = target.code_of_libc();
    let inside = |patch: &super::board::Patch| {
        code.iter()
            .any(|range| range.start <= patch.at && patch.at + JUMP as u64 <= range.end)
    };
    if !record.patches.iter().all(inside) {
        bail!("what is noted of its agent is not true");
    }
    let errno = libc
        .extent(ERRNO)
        .filter(|range| !range.is_empty())
        .context("its libc does not say how long its function for `errno` is")?;
    let watch = Watch {
        returns: moment::returns(&libc, base)?,
        code: [record.image.clone(), record.board.clone()],
        errno: base + errno.start as u64..base + errno.end as u64,
    };
    let begun = Instant::now();
    let (mut target, mut judge) = (target, Judge::default());
    let remote = watch.hold(&mut target, &mut judge)?;
    let mut work = Work {
        target,
        remote,
        judge,
        record,
    };
    let result = work.all(&watch);
    work.remote.finish()?;
    let mut done = result?;
    done.held = begun.elapsed();
    Ok(done)
}

/// Looks whether threads are in the agent.
struct Watch {
    returns: Vec<u64>,
    code: [Range<u64>; 2],
    /// libc's function that tells where `errno` is. It is the one that the agent calls and does not count.
    errno: Range<u64>,
}

impl Watch {
    /// Holds a thread that is not in the agent, and that may make all calls.
    fn hold(&self, target: &mut Target, judge: &mut Judge) -> Result<Remote> {
        fault::check(Point::Attach)?;
        let (mut inside, mut refused, begun) = (None, None, Instant::now());
        for _ in 0..TRIES {
            let pid = target.pid;
            for thread in seize::workers(pid, |thread| is_agent(pid, thread))? {
                let Some(held) = Held::stop(thread, FIRST)? else {
                    continue;
                };
                let memory = target.memory_while_held()?;
                let remote = Remote::new(held, memory, target.entry()?)?;
                inside = self.inside(target, &[remote.place()])?;
                match inside {
                    None => match judge.one(&remote.filters()?) {
                        Ok(_) => return Ok(remote),
                        Err(error) => refused = Some(error),
                    },
                    Some(thread) if begun.elapsed() > WAIT => return busy(thread),
                    Some(_) => {}
                }
            }
            // A thread never loses a filter.
            if begun.elapsed() > WAIT || (inside.is_none() && refused.is_some()) {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        match (inside, refused) {
            (Some(thread), _) => busy(thread),
            (None, Some(error)) => Err(error.context("its agent stays until it ends")),
            (None, None) => Err(SeizeError::Gone.into()),
        }
    }

    /// A thread that is in the agent, or comes back there: from `errno`'s function, or from a signal handler. Those that come back from
    /// libc's other functions are counted in the agent.
    fn inside(&self, target: &mut Target, places: &[Place]) -> Result<Option<u32>> {
        let look = moment::Look::begin();
        for place in places {
            look.goes_on()?;
            if self.is_inside(target, place) {
                return Ok(Some(place.thread));
            }
        }
        Ok(None)
    }

    fn is_inside(&self, target: &mut Target, place: &Place) -> bool {
        self.leads_inside(place, &moment::stack(target, place))
    }

    /// The word at the end of a stack is where its thread comes back to only in a function that keeps nothing there. Elsewhere it may be of a
    /// call of the agent's that was over long ago.
    fn leads_inside(&self, place: &Place, stack: &[u8]) -> bool {
        let is_in = |at: u64| self.code.iter().any(|range| range.contains(&at));
        let frames = (0..stack.len()).step_by(8);
        let frames = frames.filter_map(|at| moment::frame(&self.returns, stack, at));
        let interrupted = frames.map(|(_, place)| place);
        std::iter::once(*place).chain(interrupted).any(|at| {
            // The second one where the function has pushed the frame pointer.
            let comes_back = |word: usize| {
                let offset = at.stack.checked_sub(moment::bottom(place)?)?;
                sys::elf::number(stack, usize::try_from(offset).ok()? + word * 8, 8)
            };
            let in_errno = self.errno.contains(&at.at);
            is_in(at.at) || in_errno && [0, 1].into_iter().any(|n| comes_back(n).is_some_and(is_in))
        })
    }
}

fn is_agent(pid: u32, thread: u32) -> bool {
    let name = sys::text::bytes(format!("/proc/{pid}/task/{thread}/comm"));
    name.is_ok_and(|name| name.trim_ascii_end() == b"pageone-agent")
}

fn busy<T>(thread: u32) -> Result<T> {
    bail!(
        "thread {thread} is in the agent whenever it is stopped, or a signal handler has interrupted it there; try again"
    )
}

struct Work<'a> {
    target: Target,
    remote: Remote,
    judge: Judge,
    record: &'a Record,
}

impl Work<'_> {
    fn all(&mut self, watch: &Watch) -> Result<Done> {
        match self.run("end") {
            Ok(0) => {}
            Ok(result) => bail!(reason(result, self.target.pid)),
            Err(error) => {
                // It may be in the middle of it, with a lock: nothing else is run there.
                return Err(error.context("the agent could not be ended"));
            }
        }
        let (still, since) = match self.take_jumps_out(watch) {
            Ok(still) => still,
            Err(error) => {
                let may = self.remote.filters().map_err(anyhow::Error::from);
                let may = may.and_then(|filters| self.judge.one(&filters));
                let again = may.and_then(|_| self.run("again"));
                return Err(match again {
                    Ok(_) => error,
                    Err(left) => error.context(format!(
                        "its agent stays and does nothing, for it could not go on ({left:#})"
                    )),
                });
            }
        };
        let threads = still.count() + 1;
        let left = self.leave().err();
        drop(still);
        let stood = since.elapsed();
        Ok(Done {
            threads,
            stood,
            held: Duration::ZERO,
            left,
        })
    }

    /// Has the thread call a function of the agent's.
    fn run(&mut self, name: &str) -> Result<i64> {
        fault::check(Point::Attach)?;
        let call = self.record.function("call");
        let args = [self.record.function(name), 0, 0];
        let stack = self.record.image.end;
        Ok(self.remote.run(call, args, stack, DONE)?)
    }

    /// Stops all other threads while none is in the agent, and writes libc's bytes back.
    fn take_jumps_out(&mut self, watch: &Watch) -> Result<(Standstill, Instant)> {
        fault::check(Point::Attach)?;
        let own = [self.remote.thread()];
        let begun = Instant::now();
        let mut still = Standstill::of(self.target.pid, &own, PATIENCE, STOPS)?;
        for left in (0..TRIES).rev() {
            let inside = watch.inside(&mut self.target, &still.places()?)?;
            let is_last = left == 0 || begun.elapsed() > WAIT;
            let beyond = match inside {
                None => {
                    // They hold for as long as all stand.
                    self.judge.one(&self.remote.filters()?)?;
                    self.run("beyond")?
                }
                Some(_) => 0,
            };
            match inside {
                None if beyond == 0 => break,
                Some(thread) if is_last => return busy(thread),
                None if is_last => {
                    bail!("{beyond} of its threads fork or change users at this moment; try again")
                }
                _ => still.again(PAUSE, PATIENCE, STOPS)?,
            }
        }
        let since = still.since();
        let written = self.write_back();
        written.map(|()| (still, since))
    }

    fn write_back(&self) -> Result<()> {
        let memory = &self.target.memory;
        for patch in &self.record.patches {
            let mut now = [0; JUMP];
            memory.read_exact_at(&mut now, patch.at)?;
            if now != patch.after {
                bail!("its libc was changed meanwhile, by another tool");
            }
        }
        for (done, patch) in self.record.patches.iter().enumerate() {
            let written = fault::check(Point::Attach).map_err(std::io::Error::from);
            let written = written.and_then(|()| memory.write_all_at(&patch.before, patch.at));
            if let Err(error) = written {
                // All jumps are there again before a thread goes on.
                for patch in self.record.patches.iter().take(done + 1) {
                    let restored = memory.write_all_at(&patch.after, patch.at);
                    restored.context("its libc cannot be written: some of its calls are seen")?;
                }
                return Err(error).context("its libc cannot be written");
            }
        }
        Ok(())
    }

    /// Unmaps all of the agent, to which nothing leads any more.
    fn leave(&mut self) -> Result<()> {
        self.run("leave")?;
        self.target.set_dump(self.record.dump);
        for range in [&self.record.board, &self.record.image] {
            fault::check(Point::Attach)?;
            let args = [range.start, range.end - range.start, 0, 0, 0, 0];
            self.remote.call(MUNMAP, args)??;
        }
        Ok(())
    }
}

/// What may pin memory of a process, and what to do about it.
fn pins(pid: u32) -> String {
    const MOST_DESCRIPTORS: u32 = 4096;
    match sys::pins::find(pid, MOST_DESCRIPTORS) {
        Ok(Some(pin @ Pin::Descriptor(..))) => {
            format!(
                "{pin}, perhaps some of its merged pages too: have it close that, then try again"
            )
        }
        Ok(Some(pin)) => format!("{pin}, perhaps some of its merged pages too; try again"),
        _ => "a device or file system may write to some of its merged pages (pins); try again"
            .to_owned(),
    }
}

/// What the answer of process `pid`'s agent means.
fn reason(result: i64, pid: u32) -> String {
    let errno = i32::try_from(-result).map(Errno::from_raw_os_error);
    match errno {
        Ok(Errno::AGAIN) => {
            "its agent's thread does not end (the process is stopped, or hangs); try again"
                .to_owned()
        }
        Ok(Errno::BUSY) => pins(pid),
        Ok(Errno::DEADLK) => {
            "a userfaultfd of its own watches merged memory that it moved past libc; try again when that has ended"
                .to_owned()
        }
        Ok(Errno::FAULT) => {
            "merged memory lies under a guard that it put there past libc, or, moved so, behind the end of its store"
                .to_owned()
        }
        Ok(Errno::NOMEM) => {
            "there is no memory for pages of its own, or they cannot be made so; try again"
                .to_owned()
        }
        Ok(errno) => format!("its agent says: {errno}"),
        Err(_) => format!("its agent gave {result}"),
    }
}

#[cfg(test)]
mod tests {
    use super::moment::tests::words;
    use super::*;

    const AGENT: u64 = 0x7f00_0000_0000;
    const LIBC: u64 = 0x7e00_0000_0000;
    const BACK: u64 = LIBC + 0x9000;
    const STACK: u64 = 0x7d00_0000_0000;

    fn watch() -> Watch {
        Watch {
            returns: vec![BACK],
            code: [AGENT..AGENT + 0x1000, 0..0],
            errno: LIBC + 0x100..LIBC + 0x110,
        }
    }

    fn at(at: u64) -> Place {
        let (thread, rax, again) = (7, 0, None);
        Place {
            thread,
            at,
            stack: STACK,
            rax,
            again,
        }
    }

    #[test]
    fn a_thread_is_inside_by_its_place_or_by_the_place_that_errnos_function_comes_back_to() {
        let watch = watch();
        let stack = words(&[AGENT + 0x20, 0, 0]);
        assert!(watch.leads_inside(&at(AGENT + 0x10), &[]));
        assert!(watch.leads_inside(&at(LIBC + 0x104), &stack));
        assert!(watch.leads_inside(&at(LIBC + 0x104), &words(&[STACK, AGENT + 0x20])));
        assert!(!watch.leads_inside(&at(LIBC + 0x104), &words(&[0])));
        // It waits in a function of libc, where a word of a call that is over lies.
        assert!(!watch.leads_inside(&at(LIBC + 0x200), &stack));
    }

    #[test]
    fn a_signal_handlers_frame_leads_inside_in_the_same_ways() {
        let watch = watch();
        let led = |to: u64, word: u64| {
            let mut stack = vec![0; 200];
            stack[20] = BACK;
            stack[20 + moment::RIP / 8] = to;
            stack[20 + moment::RSP / 8] = STACK + 100 * 8;
            stack[100] = word;
            watch.leads_inside(&at(LIBC + 0x200), &words(&stack))
        };
        assert!(led(AGENT + 0x10, 0));
        assert!(led(LIBC + 0x104, AGENT + 0x20));
        assert!(!led(LIBC + 0x104, 0));
        assert!(!led(LIBC + 0x200, AGENT + 0x20));
    }
}
