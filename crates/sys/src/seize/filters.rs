//! The seccomp filters of threads that are held: they are read, never tried.
//!
//! The kernel shows a thread's filters to its tracer, which has to have `CAP_SYS_ADMIN` and no filter of its own
//! (`PTRACE_SECCOMP_GET_FILTER`). Another thread of the process may put a filter on a thread that is held
//! (`SECCOMP_FILTER_FLAG_TSYNC`). So the filters that were read hold for as long as all threads of the process stand.
//!
//! **A stop is a call as well.** It wakes a thread that sleeps in the kernel. When it goes on, it makes its call again, or
//! `restart_syscall(2)` in its place, and the filters judge that. A filter may refuse the call that let the thread sleep: it does
//! not know `restart_syscall`, or came from another thread meanwhile. Then the call begins again in another way:
//!
//! | the filters refuse | so |
//! |---|---|
//! | `restart_syscall`, not the call itself | the call begins anew: it may wait for longer, by what it had waited already |
//! | the call itself | it fails with EINTR, as after a signal |
//!
//! Source: `seccomp_get_filter()` in `kernel/seccomp.c`; ptrace(2); restart_syscall(2).

use std::fs::File;
use std::os::unix::fs::FileExt;

use libc::{sock_filter, user_regs_struct};
use rustix::io::Errno;

use super::{Place, Result, SeizeError, calls};
use crate::filter::{Answer, Sample, answer};

/// A filter's instructions, eight bytes each.
pub type Program = Vec<u64>;

/// What judges the calls of a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filters {
    /// Whether it has given up to gain rights by executing a program.
    pub no_new_privs: bool,
    /// Its filters, the oldest first.
    pub programs: Vec<Program>,
}

/// The instructions of a program.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // the parts of a word
pub fn instructions(program: &[u64]) -> Vec<sock_filter> {
    let instruction = |word: &u64| sock_filter {
        code: *word as u16,
        jt: (word >> 16) as u8,
        jf: (word >> 24) as u8,
        k: (word >> 32) as u32,
    };
    program.iter().map(instruction).collect()
}

/// What strict mode is for us: nearly everything ends the thread.
const STRICT: u64 = 0x06;

impl Filters {
    /// Those of a thread that is held.
    ///
    /// # Errors
    /// [`SeizeError::Unread`] when the kernel does not show them; it has ended.
    pub(super) fn of(status: &Status) -> Result<Self> {
        let thread = status.thread;
        let (mode, no_new_privs) = status.mode()?;
        let programs = match mode {
            Mode::None => Vec::new(),
            Mode::Strict => vec![vec![STRICT]],
            Mode::Filter => programs(thread)?,
        };
        Ok(Self {
            no_new_privs,
            programs,
        })
    }

    /// The worst that they do with a call.
    fn answer(&self, call: &Sample) -> Answer {
        let answers = self.programs.iter().map(|program| instructions(program));
        let answers = answers.map(|program| answer(&program, call));
        answers.max().unwrap_or(Answer::Allows)
    }
}

enum Mode {
    None,
    Strict,
    Filter,
}

/// What the kernel tells of a thread. To find its file takes longer than to read it, and other threads stand meanwhile.
#[derive(Debug)]
pub(super) struct Status {
    thread: u32,
    file: Option<File>,
}

impl Status {
    pub(super) fn of(thread: u32) -> Self {
        Self { thread, file: None }
    }

    /// The same, found beforehand. Where another thread has the number by now it is of that one only if the first executed.
    pub(super) fn found(thread: u32) -> Self {
        let file = crate::text::open(format!("/proc/{thread}/status")).ok();
        Self { thread, file }
    }

    fn text(&self) -> std::io::Result<String> {
        // With all the groups that a thread may be in, which stand before what is asked for.
        const MOST: usize = 4 << 20;
        let Some(file) = &self.file else {
            return crate::text::about(format!("/proc/{}/status", self.thread));
        };
        let mut text = vec![0; 4096];
        while text.len() <= MOST {
            let len = file.read_at(&mut text, 0)?;
            if len < text.len() {
                text.truncate(len);
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
            text.resize(2 * len, 0);
        }
        Err(Errno::FBIG.into())
    }

    fn mode(&self) -> Result<(Mode, bool)> {
        let status = self
            .text()
            .map_err(|error| match Errno::from_io_error(&error) {
                Some(Errno::NOENT | Errno::SRCH) => SeizeError::Gone,
                errno => SeizeError::Call("reading its status", errno.unwrap_or(Errno::IO)),
            })?;
        let field = |name: &str| {
            let mut lines = status.lines();
            lines.find_map(|line| Some(line.strip_prefix(name)?.trim()))
        };
        let mode = match field("Seccomp:") {
            // A kernel without seccomp has no such line.
            None | Some("0") => Mode::None,
            Some("1") => Mode::Strict,
            Some(_) => Mode::Filter,
        };
        Ok((mode, field("NoNewPrivs:") == Some("1")))
    }
}

/// Filters of a thread that are read: a service in a container has a dozen. The kernel walks them all for each.
const MOST_FILTERS: usize = 64;

fn programs(thread: u32) -> Result<Vec<Program>> {
    const MOST: usize = 4096; // BPF_MAXINSNS
    let mut all = Vec::new();
    loop {
        if all.len() > MOST_FILTERS {
            return Err(SeizeError::Unread(Errno::TOOBIG));
        }
        let mut program = vec![0; MOST];
        match calls::filter(thread, all.len(), &mut program) {
            Ok(len) => {
                program.truncate(len);
                program.shrink_to_fit();
            }
            Err(Errno::NOENT) if !all.is_empty() => return Ok(all),
            Err(Errno::SRCH) => return Err(SeizeError::Gone),
            Err(errno) => return Err(SeizeError::Unread(errno)),
        }
        all.push(program);
    }
}

/// Why filters could not be read.
pub(super) fn unread(errno: Errno) -> &'static str {
    match errno {
        Errno::ACCESS | Errno::PERM => {
            "it has a seccomp filter, which the kernel shows to root alone (CAP_SYS_ADMIN), and to no process that has a filter itself"
        }
        Errno::INVAL | Errno::IO => {
            "it has a seccomp filter, which this kernel shows to no process (CONFIG_CHECKPOINT_RESTORE)"
        }
        Errno::TOOBIG => "it has more seccomp filters than are looked at (64)",
        _ => "it has a seccomp filter, which cannot be read",
    }
}

/// The kernel's own error numbers by which it notes how a call begins again (see [`Place`]), unless a handler of a signal comes first.
/// ERESTARTNOHAND: by the same call. ERESTART_RESTARTBLOCK: by `restart_syscall`.
const ANEW: i64 = -514;
const BY_RESTART: i64 = -516;

/// Sees to it that the call which a stop has interrupted can begin again under the thread's filters.
pub(super) fn let_begin_again(status: &Status) -> Result<()> {
    let thread = status.thread;
    let registers = calls::registers(thread)?;
    if Place::of(thread, &registers).again.is_none() {
        return Ok(());
    }
    let filters = match Filters::of(status) {
        Ok(filters) => Some(filters).filter(|filters| !filters.programs.is_empty()),
        // It was let through once.
        Err(SeizeError::Unread(_)) if registers.rax.cast_signed() == BY_RESTART => {
            return set_result(thread, registers, ANEW);
        }
        Err(SeizeError::Unread(_)) => None,
        Err(error) => return Err(error),
    };
    let Some(filters) = filters else {
        return Ok(());
    };
    let allows = |number: u64| {
        let args = [
            registers.rdi,
            registers.rsi,
            registers.rdx,
            registers.r10,
            registers.r8,
            registers.r9,
        ];
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let args = args.map(Some);
        filters.answer(&Sample { number, args }) == Answer::Allows
    };
    let by_restart = registers.rax.cast_signed() == BY_RESTART;
    let restart = libc::SYS_restart_syscall.cast_unsigned();
    match (by_restart, by_restart && allows(restart)) {
        (true, true) => Ok(()),
        (false, _) if allows(registers.orig_rax) => Ok(()),
        (true, false) if allows(registers.orig_rax) => set_result(thread, registers, ANEW),
        _ => set_result(thread, registers, -i64::from(Errno::INTR.raw_os_error())),
    }
}

fn set_result(thread: u32, registers: user_regs_struct, result: i64) -> Result<()> {
    let registers = user_regs_struct {
        rax: result.cast_unsigned(),
        ..registers
    };
    calls::set_registers(thread, &registers)
}
