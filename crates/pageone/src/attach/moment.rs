//! The moment at which jumps may be written: no thread is about to make a call that no hook would see.
//!
//! **The invariant**: when the agent begins, each thread is before a jump, or its call is done. What could break it is a thread that has
//! passed the place of the jump already. It would unmap memory, fork or change its rights unseen:
//!
//! ```text
//!   munmap:  mov $11,%eax      a thread stands here: it meets the jump
//!            syscall           here: not now
//!            cmp $-4095,%rax   here: its call is done
//! ```
//!
//! | a thread stands | so |
//! |---|---|
//! | at a function's first instruction, or outside all functions | well |
//! | behind a `syscall` instruction, its call done | well |
//! | the same, but the kernel will begin the call again | well if no hook would see that call; libc's `syscall` waits for a futex in this way |
//! | at a `syscall` instruction | the same |
//! | in a call of ioctl that began long ago, and that the kernel begins again | well: the one request that has a hook does not wait |
//! | elsewhere in a function, or in one that has several system calls | not now |
//! | in something that a function which sets users called | not now: other threads will be made to set theirs |
//!
//! The same holds for the places that signal handlers will come back to, so stacks are searched for the frames of signals. Where a
//! handler needs more than [`DEPTH`] bytes of stack, or came without libc's own way back, that frame is not found: **a limit**.
//!
//! These moments are short, so all threads go on for a moment and stop again. A process for which the moment does not come is
//! refused.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use sys::elf::number;
use sys::seize::Place;

use super::elf::Elf;
use super::gates::GATES;
use super::image::{Hook, Image};
use super::target::Target;

/// How much of a stack is searched.
const DEPTH: usize = 128 << 10;
/// The longest function that has a hook, and the most ways back from signal handlers: a stranger's libc is what he made of it.
pub(super) const MOST_CODE: usize = 64 << 10;
const MOST_RETURNS: usize = 16;
/// How much of it is searched for calls of functions that set users: libc's own way from there to the kernel is short.
const SHALLOW: usize = 2 << 10;
/// `syscall`.
const ENTER: [u8; 2] = [0x0f, 0x05];
/// How libc comes back from a signal handler: mov $15,%rax; syscall.
const RETURN: [u8; 9] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05];
/// ioctl(2).
const IOCTL: u64 = 16;

/// How often the moment is waited for, and how long threads go on between.
pub(super) const TRIES: u32 = 200;
pub(super) const PAUSE: Duration = Duration::from_millis(2);
/// The longest wait for it.
pub(super) const WAIT: Duration = Duration::from_secs(15);

/// A function of libc that has a hook.
#[derive(Debug)]
struct Body {
    name: String,
    range: Range<u64>,
    code: Vec<u8>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// It makes one system call.
    One,
    /// It makes several: which of them is next is not known.
    Several,
    /// It has other functions make them, for all threads.
    Deep,
}

/// The functions of a process's libc that have hooks.
#[derive(Debug)]
pub(super) struct Bodies {
    all: Vec<Body>,
    /// How signal handlers come back.
    returns: Vec<u64>,
    /// A bit for each call that a hook sees.
    numbers: Vec<u8>,
}

impl Bodies {
    /// Those of a libc that lies at `base`.
    ///
    /// # Errors
    /// The image is of another version.
    pub(super) fn of(libc: &Elf, base: u64, image: &Image) -> Result<Self> {
        let mut all = Vec::new();
        let hooks = image.hooks()?;
        let gates = match libc.is_musl() {
            true => &GATES[..],
            false => &[],
        };
        let gates = gates.iter();
        let gates = gates.filter(|(name, _)| !hooks.iter().any(|hook| hook.name == *name));
        let gates: Vec<_> = gates.map(|(name, _)| Hook::gate(name)).collect();
        for hook in hooks.into_iter().chain(gates) {
            // Variables have no code; some functions are not in every libc.
            let Some(range) = libc.extent(&hook.name).filter(|_| hook.hook.is_some()) else {
                continue;
            };
            if range.len() > MOST_CODE {
                bail!("its libc's {} is longer than any that is known", hook.name);
            }
            let code = libc.bytes.get(range.clone()).unwrap_or_default().to_vec();
            if code.is_empty() {
                bail!("its libc does not say how long {} is", hook.name);
            }
            all.push(Body {
                kind: kind(&hook, &code),
                name: hook.name,
                range: base + range.start as u64..base + range.end as u64,
                code,
            });
        }
        let returns = returns(libc, base)?;
        let numbers = image.numbers()?.to_vec();
        Ok(Self {
            all,
            returns,
            numbers,
        })
    }

    /// A function in which one of these threads is about to make a call.
    ///
    /// # Errors
    /// To look at them takes too long.
    pub(super) fn busy(&self, target: &mut Target, places: &[Place]) -> Result<Option<Busy<'_>>> {
        let look = Look::begin();
        for place in places {
            look.goes_on()?;
            let stack = stack(target, place);
            let function = self.stands_in(place, &stack);
            if let Some(function) = function {
                let thread = place.thread;
                return Ok(Some(Busy { thread, function }));
            }
        }
        Ok(None)
    }

    /// The function in which a thread is about to make a call, or one that its signal handlers will come back to.
    fn stands_in(&self, place: &Place, stack: &[u8]) -> Option<&str> {
        let interrupted = (0..stack.len().saturating_sub(FRAME))
            .step_by(8)
            .filter_map(|at| frame(&self.returns, stack, at));
        let here = [(0, *place)].into_iter();
        here.chain(interrupted).find_map(|(at, place)| {
            let behind = stack.get(at..).unwrap_or_default();
            let behind = behind.get(..SHALLOW).unwrap_or(behind);
            self.about_to_call(&place).or_else(|| self.deep_in(behind))
        })
    }

    fn about_to_call(&self, place: &Place) -> Option<&str> {
        let is_in = |body: &&Body| body.range.contains(&place.at);
        let body = self.all.iter().find(is_in)?;
        let at = usize::try_from(place.at - body.range.start).ok()?;
        let enters = |at: Option<usize>| {
            at.and_then(|at| body.code.get(at..))
                .is_some_and(|code| code.starts_with(&ENTER))
        };
        let well = match body.kind {
            _ if at == 0 => true,
            Kind::Several | Kind::Deep => false,
            Kind::One if enters(Some(at)) => !self.is_seen(place.rax),
            Kind::One if enters(at.checked_sub(ENTER.len())) => place
                .again
                .is_none_or(|number| number == IOCTL || !self.is_seen(number)),
            Kind::One => false,
        };
        (!well).then_some(body.name.as_str())
    }

    /// Whether a hook sees the call with this number.
    fn is_seen(&self, number: u64) -> bool {
        let byte = usize::try_from(number / 8).ok();
        let byte = byte.and_then(|at| self.numbers.get(at));
        byte.is_some_and(|byte| byte >> (number % 8) & 1 == 1)
    }

    /// A function that sets users, into which this part of a stack leads back.
    fn deep_in(&self, stack: &[u8]) -> Option<&str> {
        let deep = || self.all.iter().filter(|body| body.kind == Kind::Deep);
        let words = stack.chunks_exact(8).filter_map(|word| number(word, 0, 8));
        let mut leads = words.filter_map(|word| {
            deep().find(|body| body.range.start < word && body.range.contains(&word))
        });
        leads.next().map(|body| body.name.as_str())
    }
}

/// The frame of a signal, from the address of the way back on: a `struct ucontext`, with `struct sigcontext` behind 40 bytes.
const RAX: usize = 8 + 40 + 13 * 8;
pub(super) const RSP: usize = 8 + 40 + 15 * 8;
pub(super) const RIP: usize = 8 + 40 + 16 * 8;
const FRAME: usize = 8 + 40 + 32 * 8;

/// How signal handlers come back in a libc that lies at `base`.
///
/// # Errors
/// It is not known.
pub(super) fn returns(libc: &Elf, base: u64) -> Result<Vec<u64>> {
    let found = libc.bytes.windows(RETURN.len()).enumerate();
    let found = found.filter(|(_, code)| *code == RETURN);
    let found = found.map(|(at, _)| base + at as u64);
    let returns: Vec<u64> = found.take(MOST_RETURNS + 1).collect();
    match returns.is_empty() || returns.len() > MOST_RETURNS {
        true => bail!("its libc comes back from signal handlers in a way that is not known"),
        false => Ok(returns),
    }
}

/// A signal's frame at a place of a stack: where it ends, and where the thread will come back to.
pub(super) fn frame(returns: &[u64], stack: &[u8], at: usize) -> Option<(usize, Place)> {
    let word = |offset: usize| number(stack, at + offset, 8);
    if !returns.contains(&word(0)?) {
        return None;
    }
    let place = Place {
        thread: 0,
        at: word(RIP)?,
        stack: word(RSP)?,
        rax: word(RAX)?,
        // The kernel has set it back already.
        again: None,
    };
    Some((at + FRAME, place))
}

fn kind(hook: &Hook, code: &[u8]) -> Kind {
    // It reads files for long, and calls setgroups, which has a hook.
    const LONG: &str = "initgroups";
    const SHALLOW: [&str; 4] = ["_Fork", "clone", "syscall", "ioctl"];
    let goes_on = hook.next.is_some() && !SHALLOW.contains(&hook.name.as_str());
    match code
        .windows(ENTER.len())
        .filter(|two| *two == ENTER)
        .count()
    {
        _ if goes_on && hook.name != LONG => Kind::Deep,
        1 => Kind::One,
        _ => Kind::Several,
    }
}

/// The first word of a thread's stack. A thread may have any number in that register.
pub(super) fn bottom(place: &Place) -> Option<u64> {
    place.stack.checked_next_multiple_of(8)
}

/// A look at threads that stand still meanwhile. What stands on their stacks, and how many there are, is the process's own doing.
pub(super) struct Look(Instant);

impl Look {
    /// The longest that it may take.
    const MOST: Duration = Duration::from_secs(5);

    pub(super) fn begin() -> Self {
        Self(Instant::now())
    }

    /// Whether there is time for another thread.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn goes_on(&self) -> Result<()> {
        match self.0.elapsed() < Self::MOST {
            true => Ok(()),
            false => bail!("to look at its threads takes more than {:?}", Self::MOST),
        }
    }
}

/// The part of a thread's stack that is searched. One that cannot be read has no frames that could be come back to.
pub(super) fn stack(target: &mut Target, place: &Place) -> Vec<u8> {
    let Some(start) = bottom(place) else {
        return Vec::new();
    };
    let end = match target.end_of_mapping(start) {
        Some(end) => end,
        None if target.look_again().is_ok() => target.end_of_mapping(start).unwrap_or(start),
        None => start,
    };
    let len = usize::try_from(end - start).unwrap_or(usize::MAX);
    let mut bytes = vec![0; len.min(DEPTH)];
    let read = target.memory.read_at(&mut bytes, start).unwrap_or(0);
    bytes.truncate(read);
    bytes
}

/// A thread that is about to make a call.
pub(super) struct Busy<'a> {
    thread: u32,
    function: &'a str,
}

impl Busy<'_> {
    /// The reason why a process is refused whose thread is never anywhere else.
    ///
    /// # Errors
    /// Always.
    pub(super) fn refuse<T>(&self) -> Result<T> {
        let Self { thread, function } = self;
        bail!(
            "thread {thread} is in the middle of libc's {function} whenever it is stopped, or a signal handler has interrupted it \
             there; try again"
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const BASE: u64 = 0x7f00_0000_0000;
    const BACK: u64 = BASE + 0x9000;

    /// munmap at 0x100, ioctl at 0x200, syscall at 0x300, _Fork at 0x400, setuid at 0x500.
    fn bodies() -> Bodies {
        let one = [0xb8, 11, 0, 0, 0, 0x0f, 5, 0x48, 0x3d, 0xc3];
        let two = [0xb8, 14, 0, 0, 0, 0x0f, 5, 0x90, 0x0f, 5, 0xc3];
        let body = |name: &str, at: u64, code: &[u8], next: Option<u64>| {
            let hook = Hook {
                name: name.to_owned(),
                hook: Some(1),
                next,
            };
            Body {
                kind: kind(&hook, code),
                name: hook.name,
                range: BASE + at..BASE + at + code.len() as u64,
                code: code.to_vec(),
            }
        };
        let mut numbers = vec![0; 64];
        for seen in [11_usize, 16, 56] {
            numbers[seen / 8] |= 1 << (seen % 8);
        }
        Bodies {
            all: vec![
                body("munmap", 0x100, &one, None),
                body("ioctl", 0x200, &one, None),
                body("syscall", 0x300, &one, None),
                body("_Fork", 0x400, &two, Some(1)),
                body("setuid", 0x500, &one, Some(1)),
                body("initgroups", 0x600, &one, Some(1)),
            ],
            returns: vec![BACK],
            numbers,
        }
    }

    fn at(distance: u64, rax: u64, again: Option<u64>) -> Place {
        Place {
            thread: 7,
            at: BASE + distance,
            stack: 0,
            rax,
            again,
        }
    }

    #[test]
    fn a_thread_about_to_call_is_found() {
        let cases = [
            // Before the jump, outside, and with the call done.
            (at(0x100, 0, None), None),
            (at(0xff, 0, None), None),
            (at(0x10a, 0, None), None),
            (at(0x107, 0, None), None),
            (at(0x105, 11, None), Some("munmap")),
            (at(0x107, 0, Some(11)), Some("munmap")),
            (at(0x109, 0, None), Some("munmap")),
            // An ioctl that waits is begun again.
            (at(0x207, 0, Some(16)), None),
            (at(0x205, 16, None), Some("ioctl")),
            // syscall(SYS_futex), and syscall(SYS_clone).
            (at(0x305, 202, None), None),
            (at(0x307, 0, Some(202)), None),
            (at(0x307, 0, Some(56)), Some("syscall")),
            (at(0x305, u64::MAX, None), None),
            (at(0x401, 0, None), Some("_Fork")),
            (at(0x407, 0, None), Some("_Fork")),
            (at(0x507, 0, None), Some("setuid")),
        ];
        let bodies = bodies();
        for (place, wanted) in cases {
            assert_eq!(bodies.stands_in(&place, &[]), wanted, "{place:x?}");
        }
    }

    /// A stack of these words.
    pub(in crate::attach) fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_place_that_a_signal_handler_comes_back_to_counts() {
        let bodies = bodies();
        for (back, rax, wanted) in [
            (0x105, 11, Some("munmap")),
            (0x100, 11, None),
            (0x305, 202, None),
        ] {
            let mut stack = vec![3; 200];
            stack[20] = BACK;
            stack[20 + RIP / 8] = BASE + back;
            stack[20 + RAX / 8] = rax;
            let found = bodies.stands_in(&at(0, 0, None), &words(&stack));
            assert_eq!(found, wanted, "{back:x}");
        }
    }

    #[test]
    fn what_a_function_that_sets_users_has_called_counts() {
        let bodies = bodies();
        let mut stack = vec![0; 1000];
        stack[30] = BASE + 0x505;
        let found = bodies.stands_in(&at(0, 0, None), &words(&stack));
        assert_eq!(found, Some("setuid"));
        // Not the entry, which programs keep as a pointer; nor what is far up, or in another function.
        stack[30] = BASE + 0x500;
        stack[31] = BASE + 0x605;
        stack[900] = BASE + 0x505;
        assert_eq!(bodies.stands_in(&at(0, 0, None), &words(&stack)), None);
    }
}
