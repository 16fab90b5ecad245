//! The filter of the agent's own thread: it can make the calls of its table, and no other.
//!
//! The thread shares its memory with the program, so code that takes the program over can have the thread do
//! anything. It has no rights that the program lacks ([`life`](crate::life)). This takes away the calls that the program can make
//! and the agent never does: to execute, to open a network socket, to make threads or memory that can be executed.
//!
//! ```text
//!   clone ─▶ close_range ─▶ its name, its rights ─▶ no_new_privs ─▶ this filter ─▶ socket, session, windows
//! ```
//!
//! **No thread of the program inherits it.** A filter and no_new_privs belong to one thread and to those that it makes;
//! this one makes none. A new agent is made by a thread of the program ([`life::without_agent`](crate::life::without_agent)).
//!
//! **What the program notices**: a filter that it installs for all threads at once (`SECCOMP_FILTER_FLAG_TSYNC`)
//! reaches only threads with filters that are older ones of the caller. Through libc the agent's thread has ended
//! by then. By an instruction of the program's own the kernel refuses it, and names the agent's thread. Without a filter here
//! it would be imposed on the agent in the middle of a window; if it kills for mmap, pages are lost. An error that
//! seccomp(2) documents is better than a lost byte.
//!
//! **A call that is not in the table fails** with `EPERM`, as if the program's own filter said so. In builds with assertions
//! it ends the process, so that a test finds the call that is missing in the table.
//!
//! The tempting alternative, a filter that kills the thread, would lose a window's pages for a call that the table lacks.
//!
//! Source: seccomp(2), `seccomp_can_sync_threads()` in `kernel/seccomp.c`.

use libc::sock_filter;
use rustix::io::Result;
use sys::filter::ARCHITECTURE;
use sys::filter::calls::{Arg, By, CALLS, Call};

/// What a call outside the table brings: `SECCOMP_RET_KILL_PROCESS`, or `EPERM`.
const REFUSED: u32 = match cfg!(debug_assertions) {
    true => 0x8000_0000,
    false => EPERM,
};
const EPERM: u32 = 0x0005_0001;
const ALLOWED: u32 = 0x7fff_0000;

const LOAD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// Offsets in what filters see.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const ARGS: u32 = 16;

/// The instructions of the filter; `refused` is the answer to what is not in the table.
const fn program<const LEN: usize>(refused: u32) -> [sock_filter; LEN] {
    let mut code = Code {
        all: [sock_filter {
            code: RETURN,
            jt: 0,
            jf: 0,
            k: refused,
        }; LEN],
        len: 0,
    };
    code = code.add(LOAD, 0, 0, ARCH);
    code = code.add(JUMP_IF_EQUAL, 1, 0, ARCHITECTURE);
    code = code.add(RETURN, 0, 0, refused);
    code = code.add(LOAD, 0, 0, NUMBER);
    let mut at = 0;
    while at < CALLS.len() {
        if is_made(&CALLS[at]) {
            code = code.add_call(&CALLS[at], refused);
        }
        at += 1;
    }
    code = code.add(RETURN, 0, 0, refused);
    assert!(code.len == LEN);
    code.all
}

/// Whether the thread makes a call once it has the filter.
const fn is_made(call: &Call) -> bool {
    matches!(call.by, By::Thread | By::All)
}

/// Instructions for a call, after the one that compares its number.
const fn block(call: &Call) -> usize {
    let (mut len, mut at) = (1, 0);
    while at < call.args.len() {
        if let Arg::In(values) = call.args[at] {
            len += 5 + values.len();
        }
        at += 1;
    }
    len
}

const LEN: usize = {
    let (mut len, mut at) = (5, 0);
    while at < CALLS.len() {
        if is_made(&CALLS[at]) {
            len += 1 + block(&CALLS[at]);
        }
        at += 1;
    }
    len
};

#[derive(Clone, Copy)]
struct Code<const LEN: usize> {
    all: [sock_filter; LEN],
    len: usize,
}

impl<const LEN: usize> Code<LEN> {
    const fn add(mut self, code: u16, jt: usize, jf: usize, k: u32) -> Self {
        assert!(jt < 256 && jf < 256);
        #[allow(clippy::cast_possible_truncation)] // asserted
        let (jt, jf) = (jt as u8, jf as u8);
        self.all[self.len] = sock_filter { code, jt, jf, k };
        self.len += 1;
        self
    }

    const fn add_call(mut self, call: &Call, refused: u32) -> Self {
        #[allow(clippy::cast_possible_truncation)] // a small number
        let number = call.number as u32;
        self = self.add(JUMP_IF_EQUAL, 0, block(call), number);
        let (mut arg, mut place) = (0, ARGS);
        while arg < call.args.len() {
            if let Arg::In(values) = call.args[arg] {
                self = self.add_arg(place, values, refused);
            }
            (arg, place) = (arg + 1, place + 8);
        }
        self.add(RETURN, 0, 0, ALLOWED)
    }

    /// Goes on behind these instructions if the argument is one of the values.
    const fn add_arg(mut self, place: u32, values: &[u64], refused: u32) -> Self {
        self = self.add(LOAD, 0, 0, place + 4);
        self = self.add(JUMP_IF_EQUAL, 1, 0, 0);
        self = self.add(RETURN, 0, 0, refused);
        self = self.add(LOAD, 0, 0, place);
        let mut at = 0;
        while at < values.len() {
            assert!(values[at] <= u32::MAX as u64);
            #[allow(clippy::cast_possible_truncation)] // asserted
            let low = values[at] as u32;
            at += 1;
            self = self.add(JUMP_IF_EQUAL, values.len() - at + 1, 0, low);
        }
        self.add(RETURN, 0, 0, refused)
    }
}

static PROGRAM: [sock_filter; LEN] = program(REFUSED);

/// Gives the calling thread, the agent's, its filter.
///
/// # Errors
/// What prctl(2) and seccomp(2) give: a kernel without filters, or a filter of the program's that refuses another.
pub(crate) fn narrow() -> Result<()> {
    sys::thread::narrow(&PROGRAM)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

    use rustix::io::Errno;
    use sys::filter::calls::first_refused;
    use sys::filter::{Sample, allows};
    use sys::thread::{self, Room};

    use super::*;

    /// The filter of a release.
    static MILD: [sock_filter; LEN] = program(EPERM);
    /// The bit of calls for x32 programs.
    const X32: u32 = 0x4000_0000;
    /// Numbers that are tried. Linux 6.18 has 470.
    const NUMBERS: u32 = 1024;

    fn is_in_table(number: u32) -> bool {
        let is_it = |call: &Call| call.number == i64::from(number) && is_made(call);
        CALLS.iter().any(is_it)
    }

    #[test]
    fn the_filter_allows_the_table_and_nothing_else() {
        let made = || CALLS.iter().filter(|call| is_made(call));
        assert!(first_refused(&MILD, made()).is_none());
        assert!(first_refused(&PROGRAM, made()).is_none());
        for number in 0..NUMBERS {
            // Any way that led to a call outside the table would be one of these.
            let args = [Some(0); 6];
            for number in [number, number | X32, u32::MAX - number] {
                if !is_in_table(number) {
                    assert!(!allows(&MILD, &Sample { number, args }), "{number}");
                }
            }
        }
    }

    #[test]
    fn an_argument_outside_the_table_is_refused() {
        let mut tried = 0;
        for call in CALLS.iter().filter(|call| is_made(call)) {
            let good = call.args.map(|arg| match arg {
                Arg::In(values) => Some(values[0]),
                Arg::Any => None,
            });
            let number = u32::try_from(call.number).unwrap();
            for (place, arg) in call.args.iter().enumerate() {
                let Arg::In(values) = arg else { continue };
                let others = (0..0x200).chain([1 << 32, (1 << 32) + values[0], u64::MAX]);
                for other in others.filter(|other| !values.contains(other)) {
                    let mut args = good;
                    args[place] = Some(other);
                    let sample = Sample { number, args };
                    assert!(!allows(&MILD, &sample), "{} {place} {other}", call.name);
                    tried += 1;
                }
            }
        }
        assert!(tried > 1000);
    }

    #[test]
    fn only_this_machines_calls_are_looked_at() {
        let [load, jump, answer, ..] = MILD;
        assert_eq!((load.code, load.k), (LOAD, ARCH));
        assert_eq!((jump.jt, jump.jf, jump.k), (1, 0, ARCHITECTURE));
        assert_eq!((answer.code, answer.k), (RETURN, EPERM));
    }

    /// uretprobe and uprobe: the kernel's own, which it lets past all filters. Any other code that makes them gets SIGILL.
    const UNFILTERED: [u32; 2] = [335, 336];

    static NUMBER: AtomicU32 = AtomicU32::new(0);
    /// The first call that the kernel let through, or one of the two below.
    static FOUND: AtomicI64 = AtomicI64::new(NOTHING);
    const NOTHING: i64 = -1;
    const ALL_REFUSED: i64 = -2;

    /// Tries every call outside the table, as the agent's thread is.
    extern "C" fn tries_all() -> ! {
        thread::leave_descriptors().unwrap();
        thread::narrow(&MILD).unwrap();
        let mut found = ALL_REFUSED;
        for number in (0..NUMBERS).flat_map(|number| [number, number | X32]) {
            if !is_in_table(number) && !UNFILTERED.contains(&number) {
                // SAFETY: the filter refuses it. One that the kernel makes all the same is this test's failure.
                let made = unsafe { sys::raw::call(i64::from(number), [usize::MAX; 6]) };
                if made != Err(Errno::PERM) {
                    found = number.into();
                    break;
                }
            }
        }
        #[cfg(target_arch = "x86_64")]
        if found == ALL_REFUSED && HAS_INT80.load(Ordering::Relaxed) {
            let made = (0..NUMBERS).find(|&number| int80(number) != -1);
            found = made.map_or(ALL_REFUSED, |number| i64::from(number) | 1 << 32);
        }
        FOUND.store(found, Ordering::Relaxed);
        thread::leave(0)
    }

    /// Whether the kernel takes calls in the manner of 32-bit programs; else the instruction is a SIGSEGV.
    #[cfg(target_arch = "x86_64")]
    static HAS_INT80: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

    /// A call in that manner, by numbers of its own: `munmap` is 91 there. Gives the negative error number.
    #[cfg(target_arch = "x86_64")]
    fn int80(number: u32) -> i32 {
        let result: i32;
        // SAFETY: with these arguments the kernel finds no memory that it could change; RBX, which is the compiler's, is
        // put back.
        unsafe {
            core::arch::asm!(
                "push rbx", "mov ebx, -1", "int 0x80", "pop rbx",
                inlateout("eax") number => result,
                in("ecx") -1, in("edx") -1, in("esi") -1, in("edi") -1,
                out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            );
        }
        result
    }

    /// Asks a child, for the answer may be a signal.
    #[cfg(target_arch = "x86_64")]
    fn look_for_int80() {
        const GETPID: u32 = 20;
        // SAFETY: the child makes two system calls and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let same = int80(GETPID).cast_unsigned() == std::process::id();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!same)) };
        }
        let mut status = 1;
        // SAFETY: the kernel writes the status.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        HAS_INT80.store(status == 0, Ordering::Relaxed);
    }

    #[test]
    fn the_kernel_refuses_the_thread_every_call_outside_the_table() {
        #[cfg(target_arch = "x86_64")]
        look_for_int80();
        // SAFETY: the thread keeps to a zeroed control block, and uses the room alone.
        unsafe { thread::spawn(Room::new().unwrap(), &NUMBER, tries_all) }.unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while NUMBER.load(Ordering::Acquire) != 0 {
            assert!(std::time::Instant::now() < deadline, "the thread runs");
            std::thread::yield_now();
        }
        assert_eq!(FOUND.load(Ordering::Relaxed), ALL_REFUSED);
    }
}
