//! The steps by which an agent comes into a process.

use std::fmt;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use sys::elf;
use sys::fault::{self, Point};
use sys::seize::{self, Held, Remote, SeizeError, Standstill};
use sys::thread::{block_signals, restore_signals};

use super::board::{BOARD_BYTES, Board, Patch};
use super::elf::{Elf, Segment};
use super::filters::Judge;
use super::gates::{self, GATES, IOCTL};
use super::image::{ERRNO, Image, STACK_BYTES};
use super::moment::{Bodies, MOST_CODE, PAUSE, TRIES, WAIT};
use super::owner::Server;
use super::record::{FUNCTIONS, RECORD_BYTES, Record};
use super::site::JUMP;
use super::target::Target;
use crate::human;

/// The longest that a process is held until all its threads stand.
pub(super) const PATIENCE: Duration = Duration::from_millis(300);
/// How often that is tried.
pub(super) const STOPS: u32 = 10;
/// The longest wait for the first one, which harms no other.
pub(super) const FIRST: Duration = Duration::from_secs(5);

/// The longest time in which memory is offered: of many ranges each takes as long as the process likes.
const OFFERS: Duration = Duration::from_secs(60);

const MMAP: i64 = 9;
const MPROTECT: i64 = 10;
pub(super) const MUNMAP: i64 = 11;
const MADVISE: i64 = 28;
const READ: u64 = 1;
const WRITE: u64 = 2;
const EXECUTE: u64 = 4;
/// MAP_PRIVATE and MAP_ANONYMOUS.
const PRIVATE: u64 = 0x22;
const FIXED_NOREPLACE: u64 = 0x10_0000;
pub(super) const DONE: (u32, u64) = (wire::attach::DONE, wire::attach::DONE_MARK);
/// Advice by which memory is known as an agent's own (`sys::mapping::mark_own`).
const RANDOM: u64 = 1;

/// What the agent is told.
pub(super) struct Words {
    /// What the environment of a command would tell it.
    pub(super) environment: Vec<u8>,
    /// How it knows who serves it.
    pub(super) server: Server,
}

impl Words {
    /// Whether the agent is to offer all memory, and then also that of huge pages.
    fn offer_all(&self) -> Option<Any> {
        let has = |name: &[u8]| {
            let mut words = self.environment.split(|&byte| byte == 0);
            words.any(|word| word.starts_with(name))
        };
        let huge = has(b"PAGEONE_ANY_HUGE=");
        has(b"PAGEONE_ANY=").then_some(Any { huge })
    }
}

/// What the agent offers for the program.
#[derive(Clone, Copy)]
pub(super) struct Any {
    /// Also memory that is advised to be of huge pages.
    pub(super) huge: bool,
}

/// Not all: threads' stacks, locked memory and others are left out.
impl fmt::Display for Any {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.huge {
            true => "memory of the kinds that --any and --any-huge take",
            false => {
                "memory of the kinds that --any takes (none that is advised to be of huge pages, as numpy's: see --any-huge)"
            }
        })
    }
}

/// What was done.
pub(super) struct Done {
    hooks: usize,
    /// What is offered by the agent, for the program.
    any: Option<Any>,
    offered: u64,
    refused: Vec<String>,
    threads: usize,
    stood: Duration,
    held: Duration,
}

impl Done {
    /// Whether the agent has something for which it comes to the daemon at once.
    pub(super) fn offers(&self) -> bool {
        self.any.is_some() || self.offered > 0
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        write!(
            f,
            "attached: {} of libc's functions are seen, {}; {} stood still for {:.1} ms, the one that did the work for {:.1} ms",
            self.hooks,
            match (self.any, self.offered) {
                (Some(any), _) => format!("from now on it offers {any}"),
                (None, 0) => "it has offered no memory (--any offers all there is)".to_owned(),
                (None, offered) => format!("{} offered", human::size(offered)),
            },
            human::count(self.threads, "thread"),
            ms(self.stood),
            ms(self.held),
        )?;
        match self.refused.first() {
            None => Ok(()),
            Some(first) => {
                let ranges = human::count(self.refused.len(), "range");
                write!(f, "; {ranges} could not be offered: {first}")
            }
        }
    }
}

/// Something that was done to the process, and is undone when a later step fails.
enum Undo {
    Unmap(Range<u64>),
    Restore(Patch),
}

/// A process, one thread of which works for us.
struct Work {
    target: Target,
    remote: Remote,
    judge: Judge,
    /// Whether no memory has a policy, and no thread can give it one.
    without_policies: bool,
    /// All others, until the agent has begun.
    still: Option<Standstill>,
    undo: Vec<Undo>,
    /// Whether the thread may be in the image: that has to stay until the thread is back.
    is_inside: bool,
    /// A word of the agent that has begun, and waits for 0: hooks let no filter come that could meet the thread before it is back.
    outside: Option<u64>,
}

/// Puts the agent into a process.
///
/// # Errors
/// The reason why not; then the process is as it was, unless the reason says otherwise.
pub(super) fn attach(target: Target, image: Image, words: &Words) -> Result<Done> {
    // A signal that ended this process now would end the other as well.
    let mask = block_signals();
    let result = seize::apart(|| with_thread(target, image, words));
    restore_signals(mask);
    result.context("cannot start a thread")?
}

/// Where the image shall lie, apart from all that the kernel would choose for the program (`sys::apart`).
///
/// # Errors
/// The process has other memory in all places that were tried.
pub(super) fn place_of_image(target: &Target, image: &Image) -> Result<u64> {
    const TIB: u64 = 1 << 40;
    const TRIES: u64 = 16;
    let len = image.len() as u64;
    for _ in 0..TRIES {
        let random = u64::from_le_bytes(random()?);
        let place = 34 * TIB + ((random % (4 * TIB)) & !0xfff);
        if target.is_free(&(place..place + len)) {
            return Ok(place);
        }
    }
    bail!("where its agent would lie it has other memory, as of MemorySanitizer or ThreadSanitizer")
}

fn with_thread(mut target: Target, mut image: Image, words: &Words) -> Result<Done> {
    let (libc, base) = target.libc()?;
    image.relocate(0, 0)?;
    let bodies = Bodies::of(&libc, base, &image)?;
    let begun = Instant::now();
    let mut judge = Judge::default();
    let remote = hold(&mut target, &bodies)?;
    // All others have the same, as a rule: what is found out now takes no time while they stand.
    let judged = judge.one(&remote.filters()?)?;
    let mut work = Work {
        target,
        remote,
        judge,
        without_policies: false,
        still: None,
        undo: Vec::new(),
        is_inside: false,
        outside: None,
    };
    let looked = match judged.bar_nodes {
        true => work.look_for_policies(&bodies),
        false => Ok(()),
    };
    let mut result = looked.and_then(|()| work.all(image, (&libc, base), &bodies, words));
    if let Err(error) = result {
        result = Err(match work.undo_all() {
            Ok(()) => error,
            Err(left) => error.context(format!(
                "parts of the agent stay in the process and do nothing, for what was done could not be undone ({left:#})"
            )),
        });
    }
    let Work {
        target,
        remote,
        still,
        outside,
        ..
    } = work;
    remote.finish()?;
    drop(still);
    if let Some(word) = outside {
        // Of a process that is gone no thread waits.
        let _ = target.memory.write_all_at(&0_u32.to_ne_bytes(), word);
    }
    let mut done = result?;
    done.held = begun.elapsed();
    Ok(done)
}

/// Holds a thread of the process that is not about to make a call which has a hook.
fn hold(target: &mut Target, bodies: &Bodies) -> Result<Remote> {
    fault::check(Point::Attach)?;
    let begun = Instant::now();
    for left in (0..TRIES).rev() {
        for thread in seize::workers(target.pid, |_| false)? {
            let Some(held) = Held::stop(thread, FIRST)? else {
                continue;
            };
            let memory = target.memory_while_held()?;
            let remote = Remote::new(held, memory, target.entry()?)?;
            match bodies.busy(target, &[remote.place()])? {
                None => return Ok(remote),
                Some(busy) if left == 0 || begun.elapsed() > WAIT => return busy.refuse(),
                Some(_) => {}
            }
        }
        std::thread::sleep(PAUSE);
    }
    Err(SeizeError::Gone.into())
}

/// The address of a function of the image's.
fn function(image: &Image, name: &str) -> Result<u64> {
    image.address(&format!("pageone_attached_{name}"))
}

impl Work {
    fn all(
        &mut self,
        mut image: Image,
        libc: (&Elf, u64),
        bodies: &Bodies,
        words: &Words,
    ) -> Result<Done> {
        self.target.look_again()?;
        let in_libc = |name: &str| libc.0.find(name).map(|at| libc.1 + at);
        let errno = in_libc(ERRNO).context("its libc has no errno")?;
        let base = place_of_image(&self.target, &image)?;
        image.relocate(base, errno)?;
        image.set_words(&words.environment)?;
        let near = self.place_of_board(libc.1)?;
        let (board, hooks) = plan(&self.target, &mut image, near, libc)?;
        let stack = base + image.len() as u64;
        let [call, end, again, beyond, leave] = FUNCTIONS.map(|name| function(&image, name));
        let call = call?;
        let record = Record {
            image: base..stack,
            board: near..near + (BOARD_BYTES + RECORD_BYTES) as u64,
            functions: [call, end?, again?, beyond?, leave?],
            dump: self.target.dump(),
            patches: board.patches.clone(),
        };
        let [begin, start, offer] = ["begin", "start", "offer"].map(|name| function(&image, name));
        let (begin, start, offer) = (begin?, start?, offer?);
        let outside = image.address("PAGEONE_OUTSIDE")?;

        let still = self.stand_still(bodies)?;
        let still = self.still.insert(still);
        let (threads, since) = (still.count() + 1, still.since());
        fault::check(Point::Attach)?;
        let filters = self.judge.all(&self.remote.filters()?, still.filters())?;
        if filters.bar_nodes && !self.without_policies {
            bail!("seccomp filters came meanwhile: try it again");
        }
        self.map_image(&image, base)?;
        self.map_board(&board, &record, near)?;
        self.patch(&board)?;
        self.is_inside = true;
        let begun = self.run(
            call,
            [
                begin,
                filters.count as u64,
                u64::from(words.server.is_unmapped()),
            ],
            stack,
        );
        // What is told of it is told after it has come back.
        self.is_inside = matches!(&begun, Err(error) if !error.is::<Errno>());
        begun.context("the agent does not begin")?;
        // From here the agent is at home: nothing is undone any more.
        self.undo.clear();
        self.outside = Some(outside);
        self.still = None;
        let stood = since.elapsed();
        let (offered, refused) = self.start_and_offer(call, [start, offer], stack)?;
        Ok(Done {
            hooks,
            any: words.offer_all(),
            offered,
            refused,
            threads,
            stood,
            held: Duration::ZERO,
        })
    }

    /// Refuses a process whose memory has policies, though none can be asked for. What is found holds: all threads have the filters
    /// before it is looked for, and then none can give memory a policy ([`sys::filter::nodes`]). All but one go on meanwhile, for
    /// the kernel walks all page tables.
    fn look_for_policies(&mut self, bodies: &Bodies) -> Result<()> {
        let still = self.stand_still(bodies)?;
        let judged = self.judge.all(&self.remote.filters()?, still.filters())?;
        drop(still);
        if judged.bar_nodes {
            self.target.has_no_policies()?;
        }
        self.without_policies = judged.bar_nodes;
        Ok(())
    }

    /// Has the agent's thread start, and offers what is marked for merging. Gives how many bytes were taken, and why others were not.
    fn start_and_offer(
        &mut self,
        call: u64,
        [start, offer]: [u64; 2],
        stack: u64,
    ) -> Result<(u64, Vec<String>)> {
        let (mut offered, mut refused) = (0, Vec::new());
        if let Err(error) = self.run(call, [start, 0, 0], stack) {
            refused.push(format!("the agent does not start: {error}"));
        }
        let offering = Instant::now();
        for range in self.target.offered()? {
            let len = range.end - range.start;
            if offering.elapsed() > OFFERS {
                refused.push("to offer its memory takes too long".to_owned());
                break;
            }
            match self.run(call, [offer, range.start, len], stack) {
                Ok(()) => offered += len,
                Err(error) => refused.push(error.to_string()),
            }
        }
        Ok((offered, refused))
    }

    /// A call in the process.
    fn call(&mut self, name: &str, number: i64, args: [u64; 6]) -> Result<u64> {
        fault::check(Point::Attach)?;
        let result = self.remote.call(number, args)?;
        result.with_context(|| format!("the process cannot make {name}"))
    }

    /// Has the thread call a function of the image.
    fn run(&mut self, call: u64, args: [u64; 3], stack: u64) -> Result<()> {
        fault::check(Point::Attach)?;
        let result = self.remote.run(call, args, stack, DONE)?;
        match i32::try_from(-result) {
            Ok(0) => Ok(()),
            Ok(code) => Err(Errno::from_raw_os_error(code).into()),
            Err(_) => bail!("it gave {result}"),
        }
    }

    fn place_of_board(&self, near: u64) -> Result<u64> {
        let len = (BOARD_BYTES + RECORD_BYTES) as u64;
        let place = self.target.hole(near, len);
        place.context("there is no free place near its libc")
    }

    /// Maps memory at a place where nothing is. It can be read and executed from the first moment on, and is written from outside: where
    /// a program may make no written memory executable, this is allowed.
    fn map(&mut self, place: u64, len: u64) -> Result<()> {
        let args = [
            place,
            len,
            READ | EXECUTE,
            PRIVATE | FIXED_NOREPLACE,
            u64::MAX,
            0,
        ];
        let at = self.call("mmap", MMAP, args)?;
        self.undo.push(Undo::Unmap(at..at + len));
        if at != place {
            bail!("the kernel is older than Linux 4.17");
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        fault::check(Point::Attach)?;
        let written = self.target.memory.write_all_at(bytes, at);
        written.context("its memory cannot be written")
    }

    fn map_image(&mut self, image: &Image, base: u64) -> Result<()> {
        let len = image.len() as u64;
        self.map(base, len)?;
        self.call("madvise", MADVISE, [base, len, RANDOM, 0, 0, 0])?;
        self.write(image.bytes(), base)?;
        let stack = Segment {
            start: image.bytes().len(),
            end: image.len(),
            rights: elf::READ | elf::WRITE,
        };
        for segment in image.segments().iter().chain([&stack]) {
            let [execute, write, read] =
                [elf::EXECUTE, elf::WRITE, elf::READ].map(|bit| segment.rights & bit != 0);
            if execute {
                continue;
            }
            let rights = u64::from(read) * READ + u64::from(write) * WRITE;
            let (start, len) = (segment.start as u64, (segment.end - segment.start) as u64);
            let args = [base + start, len, rights, 0, 0, 0];
            self.call("mprotect", MPROTECT, args)?;
        }
        debug_assert!(image.len() == image.bytes().len() + STACK_BYTES);
        Ok(())
    }

    fn map_board(&mut self, board: &Board, record: &Record, at: u64) -> Result<()> {
        self.map(at, (BOARD_BYTES + RECORD_BYTES) as u64)?;
        self.write(&board.code, at)?;
        let page = record.encode().context("there are too many functions")?;
        self.write(&page, at + BOARD_BYTES as u64)
    }

    /// Stops all other threads, at a moment at which none is about to make a call that no hook would see.
    fn stand_still(&mut self, bodies: &Bodies) -> Result<Standstill> {
        fault::check(Point::Attach)?;
        let own = [self.remote.thread()];
        let begun = Instant::now();
        let mut still = Standstill::of(self.target.pid, &own, PATIENCE, STOPS)?;
        for left in (0..TRIES).rev() {
            match bodies.busy(&mut self.target, &still.places()?)? {
                None => break,
                Some(busy) if left == 0 || begun.elapsed() > WAIT => return busy.refuse(),
                Some(_) => still.again(PAUSE, PATIENCE, STOPS)?,
            }
        }
        Ok(still)
    }

    /// Writes the jumps, where nothing has changed since they were planned.
    fn patch(&mut self, board: &Board) -> Result<()> {
        for patch in &board.patches {
            let mut now = [0; JUMP];
            self.target.memory.read_exact_at(&mut now, patch.at)?;
            if now != patch.before {
                bail!("its libc was changed meanwhile, by another tool");
            }
        }
        for patch in &board.patches {
            self.undo.push(Undo::Restore(patch.clone()));
            self.write(&patch.after, patch.at)?;
        }
        Ok(())
    }

    /// Undoes all that was done, in reverse. What is left after one step that fails does nothing: a jump leads to an image that is
    /// there.
    fn undo_all(&mut self) -> Result<()> {
        while let Some(done) = self.undo.pop() {
            match done {
                Undo::Restore(patch) => {
                    let memory = &self.target.memory;
                    let restored = memory.write_all_at(&patch.before, patch.at);
                    restored.context("its libc cannot be written")?;
                }
                Undo::Unmap(range) => {
                    if self.is_inside {
                        self.remote.back()?;
                        self.is_inside = false;
                    }
                    let args = [range.start, range.end - range.start, 0, 0, 0, 0];
                    self.remote.call(MUNMAP, args)??;
                }
            }
        }
        Ok(())
    }
}

/// The board for all hooks of the image, which learns where libc's own functions are; and how many hooks there are.
///
/// # Errors
/// A function that cannot be hooked.
pub(super) fn plan(
    target: &Target,
    image: &mut Image,
    at: u64,
    (libc, base): (&Elf, u64),
) -> Result<(Board, usize)> {
    // Not in every libc that is known.
    const NEW: [&str; 4] = ["mseal", "process_madvise", "mlock2", "pkey_mprotect"];
    // musl's brk refuses, and its malloc only has the heap grow.
    const OF_GLIBC: [&str; 2] = ["brk", "__curbrk"];
    // Their hooks can do without libc's own.
    const ALONE_TOO: [&str; 2] = ["syscall", "ioctl"];
    let is_musl = libc.is_musl();
    let mut board = Board::new(at);
    let mut count = 0;
    for hook in image.hooks()? {
        let name = hook.name.as_str();
        if is_musl && (OF_GLIBC.contains(&name) || GATES.iter().any(|(gate, _)| *gate == name)) {
            continue;
        }
        let Some(function) = libc.find(name).map(|at| base + at) else {
            match name {
                new if NEW.contains(&new) => continue,
                _ if is_musl => bail!("its libc has no {name}: musl is known from 1.1.24 on"),
                _ => bail!("its libc has no {name}: it is older than glibc 2.34"),
            }
        };
        let next = match hook.hook {
            None => Some(function),
            Some(hooked) => {
                count += 1;
                let code = target.function(function)?;
                let own = board.hook(&code, hooked);
                own.with_context(|| format!("its libc's {name} cannot be hooked"))?
            }
        };
        match (hook.next, next) {
            (Some(place), Some(next)) => image.set(place, next)?,
            (Some(_), None) if !ALONE_TOO.contains(&name) => bail!("{name} has several ways"),
            _ => {}
        }
    }
    if is_musl {
        count += plan_gates(image, &mut board, (libc, base))?;
    }
    Ok((board, count))
}

/// The same for the system calls of musl's functions.
fn plan_gates(image: &Image, board: &mut Board, (libc, base): (&Elf, u64)) -> Result<usize> {
    let entered = image.address("pageone_entered")?;
    let requests = image.requests()?;
    // Before musl 1.2.2 fork makes the call itself.
    let is_there = |name: &str| libc.find(name).is_some();
    let elsewhere = match is_there("_Fork") {
        true => "fork",
        false => "_Fork",
    };
    let gates = GATES.iter().filter(|(name, _)| *name != elsewhere);
    let mut count = 0;
    for (name, number) in gates.filter(|(name, _)| is_there(name)) {
        let range = libc.extent(name).filter(|range| range.len() <= MOST_CODE);
        let start = range.as_ref().map_or(0, |range| range.start);
        let code = range
            .and_then(|range| libc.bytes.get(range))
            .unwrap_or_default();
        let only = match *number {
            IOCTL => &requests[..],
            _ => &[],
        };
        let found =
            gates::gate(code, *number).context("its code is not one of those that are known");
        found
            .and_then(|gate| board.gate((base + start as u64, code), gate, entered, only))
            .with_context(|| format!("its libc's {name} cannot be hooked"))?;
        count += 1;
    }
    let end = gates::end_of_thread(&libc.bytes);
    let end = end.context("its libc ends threads in a way that is not known")?;
    board.end_of_thread((base, &libc.bytes), end, entered)?;
    Ok(count)
}

fn random() -> Result<[u8; 8]> {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    rustix::rand::getrandom(&mut bytes, flags).context("cannot draw a random number")?;
    Ok(bytes)
}
