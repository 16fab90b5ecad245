//! Every system call that the agent's thread makes, and that hooks make beside the program's own: one table.
//!
//! ```text
//!   the table ──▶ the agent's own filter: its thread can make no other call      (the agent's narrow)
//!             ├─▶ a filter of the program's is read: does it allow all of these?  (the agent's hooks)
//!             ├─▶ filters from before: a child tries all of these                 (the agent's trial)
//!             ├─▶ filters of a running process are read                           (pageone attach)
//!             └─▶ docs/security.md shows it; a test compares them
//! ```
//!
//! So a call that is missing here fails in the first test that makes it, and none is asked of a program's filter that
//! the agent does not make.

use libc::sock_filter;

use super::{Answer, Sample, answer};

/// What is known of an argument beforehand.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// Nothing: an address, a length, a descriptor.
    Any,
    /// It is one of these.
    In(&'static [u64]),
}

use Arg::{Any, In};

/// Which thread makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The program's threads, in a hook.
    Hooks,
    /// The agent's thread, before it has a filter of its own.
    Start,
    /// The agent's thread, under its own filter.
    Thread,
    /// Both.
    All,
    /// A thread of the program that `pageone attach` holds.
    Outside,
}

use By::{All, Hooks, Outside, Start, Thread};

/// A system call that is made.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The thread.
    pub by: By,
    /// The call's name.
    pub name: &'static str,
    /// Its number.
    pub number: i64,
    /// Its arguments.
    pub args: [Arg; 6],
    /// What for.
    pub why: &'static str,
}

impl Call {
    /// Whether the agent does less, and no worse, where this call fails.
    #[must_use]
    pub fn is_spared(&self) -> bool {
        const SPARED: [i64; 4] = [
            libc::SYS_getxattr,
            libc::SYS_userfaultfd,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_getfd,
        ];
        SPARED.contains(&self.number)
    }
}

const fn call(by: By, name: &'static str, number: i64, args: [Arg; 6], why: &'static str) -> Call {
    Call {
        by,
        name,
        number,
        args,
        why,
    }
}

const ANY: [Arg; 6] = [Any; 6];

const fn first(values: &'static [u64]) -> [Arg; 6] {
    [In(values), Any, Any, Any, Any, Any]
}

const fn second(values: &'static [u64]) -> [Arg; 6] {
    [Any, In(values), Any, Any, Any, Any]
}

const UNIX_SEQPACKET: [Arg; 6] = [In(&[1]), In(&[0x8_0805]), In(&[0]), Any, Any, Any];

/// Without access, to read, to read and write.
const ACCESS: &[u64] = &[0, 1, 3];

/// Private or shared; fixed, if so perhaps only where nothing is; of a file or anonymous; with or without a reserve.
const MAPPINGS: &[u64] = &[
    0x0001, 0x0002, 0x4002, 0x0022, 0x4022, 0x0012, 0x4012, 0x0032, 0x4032, 0x10_0002, 0x10_4002,
    0x10_0022, 0x10_4022,
];

/// `O_CLOEXEC` (and rustix's `O_LARGEFILE`) to read a file, to read a folder, to read and write.
const OPENS: &[u64] = &[0x8_8000, 0x9_8000, 0x8_8002];

/// None at all; tests let an agent kill its process.
const SIGNALS: &[u64] = if cfg!(debug_assertions) {
    &[0, 9]
} else {
    &[0]
};

/// `UFFDIO_*`, `USERFAULTFD_IOC_NEW`, `PAGEMAP_SCAN`, `PROCMAP_QUERY`.
const IOCTLS: &[u64] = &[
    0xc018_aa3f,
    0xc020_aa00,
    0x8010_aa01,
    0x8010_aa02,
    0xc028_aa03,
    0xc020_aa04,
    0xc028_aa05,
    0xc018_aa06,
    0x0000_aa00,
    0xc060_6610,
    0xc068_6611,
];

/// The table.
pub const CALLS: &[Call] = &[
    call(
        Hooks,
        "wait4",
        libc::SYS_wait4,
        ANY,
        "takes away the child that tried these calls",
    ),
    call(
        Hooks,
        "clone",
        libc::SYS_clone,
        first(&[0x3d_0f00]),
        "starts the thread, with libc's flags",
    ),
    call(
        Start,
        "close_range",
        libc::SYS_close_range,
        [In(&[0]), In(&[0xffff_ffff]), In(&[2]), Any, Any, Any],
        "gives the thread a descriptor table of its own",
    ),
    call(
        Start,
        "prctl",
        libc::SYS_prctl,
        first(&[15, 38]),
        "names the thread; no_new_privs, for its filter",
    ),
    call(
        Start,
        "seccomp",
        libc::SYS_seccomp,
        [In(&[1]), In(&[4]), Any, Any, Any, Any],
        "gives the thread a filter of its own: this table",
    ),
    call(
        Thread,
        "prctl",
        libc::SYS_prctl,
        first(&[0x5961_6d61]),
        "lets the engine read under Yama",
    ),
    call(
        All,
        "gettid",
        libc::SYS_gettid,
        ANY,
        "tells the engine which thread speaks; names the lock's holder",
    ),
    call(
        All,
        "getpid",
        libc::SYS_getpid,
        ANY,
        "tells a program from its vfork child",
    ),
    call(
        Thread,
        "geteuid",
        libc::SYS_geteuid,
        ANY,
        "is the server of the own user",
    ),
    call(
        Hooks,
        "tgkill",
        libc::SYS_tgkill,
        [Any, Any, In(&[0, 16]), Any, Any, Any],
        "rings the thread's bell; is it gone",
    ),
    call(
        All,
        "kill",
        libc::SYS_kill,
        second(SIGNALS),
        "does the lock's holder live",
    ),
    call(Thread, "exit", libc::SYS_exit, ANY, "ends the thread"),
    call(
        Thread,
        "socket",
        libc::SYS_socket,
        UNIX_SEQPACKET,
        "the connection to the engine",
    ),
    call(Thread, "connect", libc::SYS_connect, ANY, "the same"),
    call(
        Thread,
        "getsockopt",
        libc::SYS_getsockopt,
        [Any, In(&[1]), In(&[17]), Any, Any, Any],
        "who serves there",
    ),
    call(
        Thread,
        "sendmsg",
        libc::SYS_sendmsg,
        ANY,
        "answers the engine",
    ),
    call(
        Thread,
        "recvmsg",
        libc::SYS_recvmsg,
        ANY,
        "takes its questions and descriptors",
    ),
    call(
        Thread,
        "ppoll",
        libc::SYS_ppoll,
        ANY,
        "waits for a question or the bell",
    ),
    call(Thread, "signalfd4", libc::SYS_signalfd4, ANY, "the bell"),
    call(
        Thread,
        "read",
        libc::SYS_read,
        ANY,
        "takes a ring of it off",
    ),
    call(
        All,
        "futex",
        libc::SYS_futex,
        second(&[0, 1, 128, 129]),
        "the lock; waits between attempts",
    ),
    call(
        All,
        "rt_sigprocmask",
        libc::SYS_rt_sigprocmask,
        ANY,
        "no handler runs while the lock is held",
    ),
    call(
        All,
        "nanosleep",
        libc::SYS_nanosleep,
        ANY,
        "waits for the end of a thread, and for memory to send",
    ),
    call(
        All,
        "restart_syscall",
        libc::SYS_restart_syscall,
        ANY,
        "goes on waiting when the program was stopped",
    ),
    call(
        All,
        "sched_yield",
        libc::SYS_sched_yield,
        ANY,
        "waits for the kernel to let go of a page",
    ),
    call(
        All,
        "clock_gettime",
        libc::SYS_clock_gettime,
        ANY,
        "how long a window took, and its CPU time",
    ),
    call(
        All,
        "open",
        libc::SYS_open,
        second(OPENS),
        "the own maps, smaps, pagemap, status, mem, coredump_filter; /dev/userfaultfd",
    ),
    call(
        All,
        "pread64",
        libc::SYS_pread64,
        ANY,
        "reads them; canonical pages",
    ),
    call(
        All,
        "pwrite64",
        libc::SYS_pwrite64,
        ANY,
        "makes pages private that are read-only, through the own mem; core dumps hold merged pages",
    ),
    call(
        All,
        "getdents64",
        libc::SYS_getdents64,
        ANY,
        "lists the program's threads and descriptors",
    ),
    call(
        All,
        "lseek",
        libc::SYS_lseek,
        [Any, In(&[0]), In(&[0]), Any, Any, Any],
        "lists the program's threads and descriptors again",
    ),
    call(
        All,
        "get_robust_list",
        libc::SYS_get_robust_list,
        ANY,
        "finds the kernel's words of a thread, which stay in place",
    ),
    call(All, "fstat", libc::SYS_fstat, ANY, "which file a store is"),
    call(
        All,
        "newfstatat",
        libc::SYS_newfstatat,
        ANY,
        "which namespace counts the threads",
    ),
    call(All, "close", libc::SYS_close, ANY, "closes what was opened"),
    call(
        All,
        "fcntl",
        libc::SYS_fcntl,
        second(&[1, 3, 5, 1030]),
        "checks descriptors (builds with assertions); copies the agent's own; may they pin memory; has a stranger locks on a file of /proc",
    ),
    call(
        All,
        "readlinkat",
        libc::SYS_readlinkat,
        ANY,
        "may the program's descriptors pin memory",
    ),
    call(
        All,
        "fgetxattr",
        libc::SYS_fgetxattr,
        ANY,
        "the same, of sockets",
    ),
    call(
        All,
        "getxattr",
        libc::SYS_getxattr,
        ANY,
        "the same, of sockets of another thread's table",
    ),
    call(
        All,
        "ioctl",
        libc::SYS_ioctl,
        second(IOCTLS),
        "the window: userfaultfd; looks at page map and mappings",
    ),
    call(
        All,
        "userfaultfd",
        libc::SYS_userfaultfd,
        ANY,
        "where the engine sends no device",
    ),
    call(
        All,
        "mmap",
        libc::SYS_mmap,
        [Any, Any, In(ACCESS), In(MAPPINGS), Any, Any],
        "puts store pages in place; the agent's own memory",
    ),
    call(
        All,
        "pidfd_open",
        libc::SYS_pidfd_open,
        ANY,
        "a hook borrows the userfaultfd to make memory whole",
    ),
    call(
        All,
        "pidfd_getfd",
        libc::SYS_pidfd_getfd,
        ANY,
        "the same, by its number",
    ),
    call(All, "munmap", libc::SYS_munmap, ANY, "gives it back"),
    call(
        All,
        "mremap",
        libc::SYS_mremap,
        ANY,
        "puts spans and runs in place that were made ready aside",
    ),
    call(
        All,
        "mprotect",
        libc::SYS_mprotect,
        [Any, Any, In(ACCESS), Any, Any, Any],
        "protects what is put in place as before",
    ),
    call(
        All,
        "madvise",
        libc::SYS_madvise,
        ANY,
        "the attributes of what is put in place; drops pages",
    ),
    call(
        All,
        "get_mempolicy",
        libc::SYS_get_mempolicy,
        ANY,
        "the nodes of what is put in place",
    ),
    call(All, "mbind", libc::SYS_mbind, ANY, "the same nodes again"),
    call(
        All,
        "mlock2",
        libc::SYS_mlock2,
        ANY,
        "locks what was locked",
    ),
    call(
        All,
        "munlock",
        libc::SYS_munlock,
        ANY,
        "unlocks what was not",
    ),
    call(
        Hooks,
        "msync",
        libc::SYS_msync,
        ANY,
        "is what is offered mapped",
    ),
];

/// What a thread of a running process is made to do from outside before the agent is there, beside calls of the table.
pub const ATTACH: &[Call] = &[call(
    Outside,
    "mmap",
    libc::SYS_mmap,
    [Any, Any, In(&[5]), In(&[0x10_0022]), Any, Any],
    "room for the agent's code in a running process",
)];

/// The first of the calls that the filter does not let be made, in one way or another.
#[must_use]
pub fn first_refused(
    filter: &[sock_filter],
    calls: impl IntoIterator<Item = &'static Call>,
) -> Option<&'static Call> {
    let mut calls = calls.into_iter();
    calls.find(|call| worst(filter, call) != Answer::Allows)
}

/// The same for a filter from before the agent: those that [it can do without](Call::is_spared) may fail.
#[must_use]
pub fn first_needed(
    filter: &[sock_filter],
    calls: impl IntoIterator<Item = &'static Call>,
) -> Option<&'static Call> {
    let mut calls = calls.into_iter();
    calls.find(|call| match worst(filter, call) {
        Answer::Allows => false,
        Answer::Fails => !call.is_spared(),
        Answer::Refuses => true,
    })
}

/// The worst that the filter does with a call, with all values that its known arguments take.
pub(super) fn worst(filter: &[sock_filter], call: &Call) -> Answer {
    let mut worst = Answer::Allows;
    let mut turn = [0usize; 6];
    loop {
        let mut args = [None; 6];
        for ((arg, &turn), known) in args.iter_mut().zip(&turn).zip(&call.args) {
            *arg = match known {
                Any => None,
                In(values) => values.get(turn).copied(),
            };
        }
        let number = u32::try_from(call.number).unwrap_or(u32::MAX);
        worst = worst.max(answer(filter, &Sample { number, args }));
        if worst == Answer::Refuses || !next(&mut turn, &call.args) {
            return worst;
        }
    }
}

/// The next combination of values; none after the last.
fn next(turn: &mut [usize; 6], args: &[Arg; 6]) -> bool {
    for (turn, arg) in turn.iter_mut().zip(args) {
        *turn += 1;
        match arg {
            In(values) if *turn < values.len() => return true,
            _ => *turn = 0,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::tests::code;
    use super::*;

    #[test]
    fn each_call_can_be_the_refused_one() {
        for call in CALLS {
            let number = u32::try_from(call.number).unwrap();
            let mut filter = [
                code(0x20, 0, 0, 0),
                code(0x15, 0, 1, number),
                code(0x06, 0, 0, 0x0005_0001),
                code(0x06, 0, 0, 0x7fff_0000),
            ];
            let numbers = |filter: &[sock_filter]| {
                let found = [first_refused(filter, CALLS), first_needed(filter, CALLS)];
                found.map(|found| found.map(|call| call.number))
            };
            let (refused, spared) = (Some(call.number), call.is_spared());
            let needed = refused.filter(|_| !spared);
            assert_eq!(numbers(&filter), [refused, needed], "{}", call.name);
            // Those that may fail may not kill.
            filter[2].k = 0;
            assert_eq!(numbers(&filter), [refused, refused], "{}", call.name);
        }
        assert!(first_refused(&[code(0x06, 0, 0, 0x7fff_0000)], CALLS).is_none());
    }

    #[test]
    fn the_documentation_has_the_table() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/security.md");
        let docs = std::fs::read_to_string(docs).unwrap();
        let is_row = |line: &&str| line.starts_with("| `") && line.matches(" | ").count() == 3;
        let rows: Vec<_> = docs
            .split("\n## ")
            .filter(|part| part.starts_with("The agent inside a program"))
            .flat_map(|part| part.lines().filter(is_row))
            .collect();
        let all = || CALLS.iter().chain(ATTACH);
        assert_eq!(rows.len(), all().count());
        for (Call { name, by, why, .. }, row) in all().zip(rows) {
            let by = match by {
                Hooks => "hooks",
                Start => "start",
                Thread => "thread",
                All => "both",
                Outside => "attach",
            };
            let (begin, end) = (format!("| `{name}` | {by} | "), format!(" | {why} |"));
            assert!(
                row.starts_with(&begin) && row.ends_with(&end),
                "{begin}…{end}\n{row}"
            );
        }
    }

    #[test]
    fn the_flags_and_numbers_are_the_kernels() {
        let flags = u64::from(crate::thread::CLONE_FLAGS.cast_unsigned());
        let clone = CALLS.iter().find(|call| call.name == "clone").unwrap();
        let In(clone) = clone.args[0] else { panic!() };
        assert_eq!(clone, [flags]);
        let seqpacket = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let In(kind) = UNIX_SEQPACKET[1] else {
            panic!()
        };
        assert_eq!(kind, [u64::from(seqpacket.cast_unsigned())]);
    }

    /// A filter against memory that is written and executed, as systemd's, does not concern the agent.
    #[test]
    fn a_filter_of_other_arguments_is_none() {
        let prot = |number: i64| {
            [
                code(0x20, 0, 0, 0),
                code(0x15, 0, 3, u32::try_from(number).unwrap()),
                code(0x20, 0, 0, 32),
                code(0x45, 0, 1, 4),
                code(0x06, 0, 0, 0),
                code(0x06, 0, 0, 0x7fff_0000),
            ]
        };
        let refused = |number| first_refused(&prot(number), CALLS).map(|call| call.number);
        assert_eq!(refused(libc::SYS_mmap), None);
        assert_eq!(refused(libc::SYS_mprotect), None);
        assert_eq!(refused(libc::SYS_munmap), Some(libc::SYS_munmap));
    }
}
