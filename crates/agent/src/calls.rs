//! Every system call that the agent's thread makes, and that hooks make beside the program's own: one table.
//!
//! A filter that the program installs is read before it is installed: if it refuses one of these calls, no agent runs
//! under it ([`first_refused`]). docs/security.md shows the same table; a test compares them.

use libc::sock_filter;

use crate::filter::{Sample, allows};

/// What is known of an argument beforehand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    /// Nothing: an address, a length, a descriptor.
    Any,
    /// It is one of these.
    In(&'static [u64]),
}

use Arg::{Any, In};

/// A system call that is made.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "a test reads all of it"))]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) number: i64,
    pub(crate) args: [Arg; 6],
    /// What for.
    pub(crate) why: &'static str,
}

const fn call(name: &'static str, number: i64, args: [Arg; 6], why: &'static str) -> Call {
    Call {
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
pub(crate) const CALLS: &[Call] = &[
    call(
        "clone",
        libc::SYS_clone,
        first(&[0x3d_0f00]),
        "starts the thread, with libc's flags",
    ),
    call(
        "close_range",
        libc::SYS_close_range,
        [In(&[0]), In(&[0xffff_ffff]), In(&[2]), Any, Any, Any],
        "gives the thread a descriptor table of its own",
    ),
    call(
        "prctl",
        libc::SYS_prctl,
        first(&[15, 0x5961_6d61]),
        "names the thread; lets the engine read under Yama",
    ),
    call(
        "gettid",
        libc::SYS_gettid,
        ANY,
        "tells the engine which thread speaks; names the lock's holder",
    ),
    call(
        "getpid",
        libc::SYS_getpid,
        ANY,
        "tells a program from its vfork child",
    ),
    call(
        "geteuid",
        libc::SYS_geteuid,
        ANY,
        "is the server of the own user",
    ),
    call(
        "tgkill",
        libc::SYS_tgkill,
        ANY,
        "rings the thread's bell; is it gone",
    ),
    call(
        "kill",
        libc::SYS_kill,
        second(&[0]),
        "does the lock's holder live",
    ),
    call("exit", libc::SYS_exit, ANY, "ends the thread"),
    call(
        "socket",
        libc::SYS_socket,
        UNIX_SEQPACKET,
        "the connection to the engine",
    ),
    call("connect", libc::SYS_connect, ANY, "the same"),
    call(
        "getsockopt",
        libc::SYS_getsockopt,
        [Any, In(&[1]), In(&[17]), Any, Any, Any],
        "who serves there",
    ),
    call("sendmsg", libc::SYS_sendmsg, ANY, "answers the engine"),
    call(
        "recvmsg",
        libc::SYS_recvmsg,
        ANY,
        "takes its questions and descriptors",
    ),
    call(
        "ppoll",
        libc::SYS_ppoll,
        ANY,
        "waits for a question or the bell",
    ),
    call("signalfd4", libc::SYS_signalfd4, ANY, "the bell"),
    call(
        "futex",
        libc::SYS_futex,
        second(&[0, 1, 128, 129]),
        "the lock; waits between attempts",
    ),
    call(
        "rt_sigprocmask",
        libc::SYS_rt_sigprocmask,
        ANY,
        "no handler runs while the lock is held",
    ),
    call(
        "nanosleep",
        libc::SYS_nanosleep,
        ANY,
        "waits for the end of a thread, and for memory to send",
    ),
    call(
        "sched_yield",
        libc::SYS_sched_yield,
        ANY,
        "waits for the kernel to let go of a page",
    ),
    call(
        "clock_gettime",
        libc::SYS_clock_gettime,
        ANY,
        "how long a window took, and its CPU time",
    ),
    call(
        "open",
        libc::SYS_open,
        ANY,
        "the own maps, smaps, pagemap, status, mem; /dev/userfaultfd",
    ),
    call("read", libc::SYS_read, ANY, "reads them"),
    call(
        "pread64",
        libc::SYS_pread64,
        ANY,
        "reads them; canonical pages",
    ),
    call(
        "pwrite64",
        libc::SYS_pwrite64,
        ANY,
        "makes pages private that are read-only, through the own mem",
    ),
    call(
        "getdents64",
        libc::SYS_getdents64,
        ANY,
        "lists the program's threads",
    ),
    call("close", libc::SYS_close, ANY, "closes what was opened"),
    call(
        "fcntl",
        libc::SYS_fcntl,
        second(&[1]),
        "checks descriptors (builds with assertions)",
    ),
    call(
        "ioctl",
        libc::SYS_ioctl,
        second(IOCTLS),
        "the window: userfaultfd; looks at page map and mappings",
    ),
    call(
        "userfaultfd",
        libc::SYS_userfaultfd,
        ANY,
        "where the engine sends no device",
    ),
    call(
        "mmap",
        libc::SYS_mmap,
        [Any, Any, In(ACCESS), In(MAPPINGS), Any, Any],
        "puts store pages in place; the agent's own memory",
    ),
    call(
        "pidfd_open",
        libc::SYS_pidfd_open,
        ANY,
        "a hook borrows the userfaultfd to make memory whole",
    ),
    call(
        "pidfd_getfd",
        libc::SYS_pidfd_getfd,
        ANY,
        "the same, by its number",
    ),
    call("munmap", libc::SYS_munmap, ANY, "gives it back"),
    call(
        "mremap",
        libc::SYS_mremap,
        ANY,
        "puts finished spans in place",
    ),
    call(
        "mprotect",
        libc::SYS_mprotect,
        [Any, Any, In(ACCESS), Any, Any, Any],
        "protects what is put in place as before",
    ),
    call(
        "madvise",
        libc::SYS_madvise,
        ANY,
        "the attributes of what is put in place; drops pages",
    ),
    call("mlock2", libc::SYS_mlock2, ANY, "locks what was locked"),
    call("munlock", libc::SYS_munlock, ANY, "unlocks what was not"),
    call("msync", libc::SYS_msync, ANY, "is what is offered mapped"),
];

/// The number of the first call of the table that the filter refuses, in one way or another.
pub(crate) fn first_refused(filter: &[sock_filter]) -> Option<i64> {
    let refused = CALLS.iter().find(|call| !allows_all(filter, call));
    refused.map(|call| call.number)
}

/// Whether the filter allows a call with all values that its known arguments take.
fn allows_all(filter: &[sock_filter], call: &Call) -> bool {
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
        if !allows(filter, &Sample { number, args }) {
            return false;
        }
        if !next(&mut turn, &call.args) {
            return true;
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
    use super::*;

    fn code(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
        sock_filter { code, jt, jf, k }
    }

    #[test]
    fn each_call_can_be_the_refused_one() {
        for call in CALLS {
            let number = u32::try_from(call.number).unwrap();
            let filter = [
                code(0x20, 0, 0, 0),
                code(0x15, 0, 1, number),
                code(0x06, 0, 0, 0x0005_0001),
                code(0x06, 0, 0, 0x7fff_0000),
            ];
            assert_eq!(first_refused(&filter), Some(call.number), "{}", call.name);
        }
        assert_eq!(first_refused(&[code(0x06, 0, 0, 0x7fff_0000)]), None);
    }

    #[test]
    fn the_documentation_has_the_table() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/security.md");
        let docs = std::fs::read_to_string(docs).unwrap();
        for Call { name, why, .. } in CALLS {
            let (begin, end) = (format!("| `{name}` | "), format!(" | {why} |"));
            let mut lines = docs.lines();
            let is = |line: &str| line.starts_with(&begin) && line.ends_with(&end);
            assert!(lines.any(is), "{begin}…{end}");
        }
    }

    #[test]
    fn the_flags_and_numbers_are_the_kernels() {
        let flags = u64::from(sys::thread::CLONE_FLAGS.cast_unsigned());
        let In(clone) = CALLS[0].args[0] else {
            panic!()
        };
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
        assert_eq!(first_refused(&prot(libc::SYS_mmap)), None);
        assert_eq!(first_refused(&prot(libc::SYS_mprotect)), None);
        assert_eq!(
            first_refused(&prot(libc::SYS_munmap)),
            Some(libc::SYS_munmap)
        );
    }
}
