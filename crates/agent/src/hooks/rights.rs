//! Calls that change the rights of the program: the agent's thread ends before them, and a new one inherits the
//! rights that they left (see [`life`]).
//!
//! libc's functions that set users and groups make the call in every thread that libc knows. So these hooks go on
//! to libc's own functions, which are looked up at the start; all others enter the kernel themselves. Where libc calls
//! such a function's body itself, in the child of posix_spawn say, no agent is concerned.
//!
//! A call that narrows nothing costs a restart of the agent, and nothing else; so whatever may narrow counts.

use std::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{gid_t, uid_t};
use rustix::io::{Errno, Result};
use sys::filter::calls::{self, CALLS};

use super::call::{Bits, bits_of, call, is_readable};
#[cfg(target_arch = "x86_64")]
use super::entry::Hook;
use super::memory;
use crate::errno::fail;
use crate::life;
use crate::lock::{beyond, existing};
use crate::thread::{Why, has_siblings, is_barred, note_own_files, note_own_tracer};

/// Looks libc's own functions up.
pub(super) fn begin() {
    for (name, place) in LIBC {
        // SAFETY: the name is terminated; the result is only called with its own signature.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        place.store(next, Ordering::Relaxed);
    }
}

/// Makes libc's call while no agent runs, if it may change something. It sets `errno` itself.
fn by_libc(as_call: Option<AsCall>, call: impl FnOnce() -> c_int) -> c_int {
    match as_call {
        Some((number, args)) if changes_nothing(number, &args) => call(),
        _ => life::without_agent(Why::RIGHTS, call).unwrap_or_else(fail),
    }
}

/// The system call that a function of libc's makes.
type AsCall = (i64, [usize; 6]);

/// Whether no thread but the caller and the agent's uses the caller's descriptors.
fn is_alone() -> bool {
    let page = existing().filter(|page| page.life.is_ours());
    let agents = || page.map_or(0, |page| page.life.idle_threads());
    let before = agents();
    // An agent that ends meanwhile may have been counted, or not.
    !has_siblings() && sys::task::threads() == Ok(before + 1) && agents() == before
}

/// Whether a call changes nothing but namespaces that matter to no agent: it finds its engine by a path, and its memory in /proc. An agent
/// that stays in the old ones works on. Kinds for which a process must have one thread are not among them.
fn leaves_agents_be(number: i64, args: &[usize; 6]) -> bool {
    const KINDS: i32 =
        libc::CLONE_NEWNET | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC | libc::CLONE_NEWCGROUP;
    const GET_KIND: usize = 0xb703; // NS_GET_NSTYPE
    const KINDS_BITS: usize = KINDS.unsigned_abs() as usize;
    let kind = match number {
        libc::SYS_unshare => args[0],
        // The file tells by itself, where no filter may kill for the question.
        libc::SYS_setns if args[1] & SAME == 0 => match life::has_read_filters() {
            true => 0,
            false => call(libc::SYS_ioctl, [args[0], GET_KIND, 0, 0, 0, 0]).unwrap_or(0),
        },
        libc::SYS_setns => args[1],
        _ => 0,
    } & SAME;
    kind != 0 && kind & !KINDS_BITS == 0
}

/// Makes a system call while no agent runs, if one would be in its way.
fn without_agent(number: i64, args: [usize; 6]) -> Result<usize> {
    if is_barred() || leaves_agents_be(number, &args) {
        return call(number, args);
    }
    const NAMESPACES: usize = (libc::CLONE_NEWNS | libc::CLONE_NEWUSER).unsigned_abs() as usize;
    const FILES: usize = libc::CLONE_FILES.unsigned_abs() as usize;
    let why = match number {
        libc::SYS_chroot | libc::SYS_pivot_root | libc::SYS_setns => Why::ELSEWHERE,
        libc::SYS_unshare if args[0] & NAMESPACES != 0 => Why::ELSEWHERE,
        _ => Why::RIGHTS,
    };
    let unshares = number == libc::SYS_unshare && args[0] & FILES != 0;
    if unshares && !is_alone() {
        note_own_files();
    }
    life::without_agent(why, || call(number, args)).and_then(|result| result)
}

fn answer(result: Result<usize>) -> c_long {
    #[allow(clippy::cast_possible_wrap)] // the kernel's results are numbers of this kind
    result.map_or_else(|errno| fail(errno).into(), |value| value as c_long)
}

macro_rules! libc_functions {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),*) is $as_call:expr;)*) => {
        /// Where libc's own functions are.
        #[allow(non_upper_case_globals)]
        mod own {
            use super::{AtomicPtr, c_void};
            $(pub(super) static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());)*
        }

        static LIBC: &[(&CStr, &AtomicPtr<c_void>)] = &[$((
            // SAFETY: the text ends with its only zero.
            unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
            &own::$name,
        ),)*];

        /// The same for a libc that knows nothing of these.
        #[cfg(target_arch = "x86_64")]
        pub(crate) const ATTACHED_BEFORE: &[Hook] = &[$(Hook::before(
            // SAFETY: the text ends with its only zero.
            unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
            $name as *const c_void,
            &own::$name,
        ),)*];

        $($(#[$doc])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $kind),*) -> c_int {
            let as_call: Option<AsCall> = $as_call;
            by_libc(as_call, || {
                let next = own::$name.load(Ordering::Relaxed);
                if next.is_null() {
                    // Before the lookup there is one thread.
                    let made = as_call.ok_or(Errno::NOSYS);
                    let made = made.and_then(|(number, args)| call(number, args));
                    return made.map_or_else(fail, |_| 0);
                }
                // SAFETY: the address is that of libc's function of this name, which has this signature.
                let next: extern "C" fn($($kind),*) -> c_int = unsafe { std::mem::transmute(next) };
                beyond(|| next($($arg),*), |_| false)
            })
        })*
    };
}

/// Leaves a number as it is.
const SAME: usize = u32::MAX as usize;

fn ids(number: i64, ids: [usize; 3]) -> Option<AsCall> {
    let [a, b, c] = ids;
    Some((number, [a, b, c, 0, 0, 0]))
}

libc_functions! {
    /// setuid(2).
    setuid(user: uid_t) is ids(libc::SYS_setuid, [user as usize, 0, 0]);
    /// setgid(2).
    setgid(group: gid_t) is ids(libc::SYS_setgid, [group as usize, 0, 0]);
    /// seteuid(2).
    seteuid(user: uid_t) is ids(libc::SYS_setresuid, [SAME, user as usize, SAME]);
    /// setegid(2).
    setegid(group: gid_t) is ids(libc::SYS_setresgid, [SAME, group as usize, SAME]);
    /// setreuid(2).
    setreuid(real: uid_t, effective: uid_t)
        is ids(libc::SYS_setreuid, [real as usize, effective as usize, 0]);
    /// setregid(2).
    setregid(real: gid_t, effective: gid_t)
        is ids(libc::SYS_setregid, [real as usize, effective as usize, 0]);
    /// setresuid(2).
    setresuid(real: uid_t, effective: uid_t, saved: uid_t)
        is ids(libc::SYS_setresuid, [real as usize, effective as usize, saved as usize]);
    /// setresgid(2).
    setresgid(real: gid_t, effective: gid_t, saved: gid_t)
        is ids(libc::SYS_setresgid, [real as usize, effective as usize, saved as usize]);
    /// setgroups(2).
    setgroups(count: usize, groups: *const gid_t)
        is ids(libc::SYS_setgroups, [count, groups.expose_provenance(), 0]);
    /// initgroups(3), which calls the body of setgroups.
    initgroups(user: *const c_char, group: gid_t) is { let _ = (user, group); None };
    /// setfsuid(2), for the calling thread alone. Gives the user before.
    setfsuid(user: uid_t) is ids(libc::SYS_setfsuid, [user as usize, 0, 0]);
    /// setfsgid(2), for the calling thread alone. Gives the group before.
    setfsgid(group: gid_t) is ids(libc::SYS_setfsgid, [group as usize, 0, 0]);
}

fn c_int_of(result: Result<usize>) -> c_int {
    #[allow(clippy::cast_possible_truncation)] // these calls give small numbers
    let small = answer(result) as c_int;
    small
}

/// capset(2).
#[unsafe(no_mangle)]
extern "C" fn capset(header: *mut c_void, data: *const c_void) -> c_int {
    let (header, data) = (header.expose_provenance(), data.expose_provenance());
    c_int_of(without_agent(libc::SYS_capset, [header, data, 0, 0, 0, 0]))
}

/// setns(2).
#[unsafe(no_mangle)]
extern "C" fn setns(fd: c_int, kind: c_int) -> c_int {
    let args = [
        fd.cast_unsigned() as usize,
        kind.cast_unsigned() as usize,
        0,
        0,
        0,
        0,
    ];
    c_int_of(without_agent(libc::SYS_setns, args))
}

/// unshare(2).
#[unsafe(no_mangle)]
extern "C" fn unshare(what: c_int) -> c_int {
    let args = [what.cast_unsigned() as usize, 0, 0, 0, 0, 0];
    c_int_of(without_agent(libc::SYS_unshare, args))
}

/// personality(2).
#[unsafe(no_mangle)]
extern "C" fn personality(persona: c_ulong) -> c_int {
    #[allow(clippy::cast_possible_truncation)] // a number of 64 bits
    let args = [persona as usize, 0, 0, 0, 0, 0];
    c_int_of(system_call(libc::SYS_personality, args))
}

/// chroot(2).
#[unsafe(no_mangle)]
extern "C" fn chroot(path: *const c_char) -> c_int {
    let args = [path.expose_provenance(), 0, 0, 0, 0, 0];
    c_int_of(without_agent(libc::SYS_chroot, args))
}

/// prctl(2). C declares all but the option as variable arguments; they arrive in registers.
#[unsafe(no_mangle)]
extern "C" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    #[allow(clippy::cast_possible_truncation)] // numbers of 64 bits
    let args = [a as usize, b as usize, c as usize, d as usize];
    c_int_of(system_call(
        libc::SYS_prctl,
        [
            option.cast_unsigned() as usize,
            args[0],
            args[1],
            args[2],
            args[3],
            0,
        ],
    ))
}

/// Those of them that enter the kernel themselves.
#[cfg(target_arch = "x86_64")]
pub(crate) const ATTACHED: &[Hook] = &[
    Hook::alone(c"capset", capset as *const c_void),
    Hook::alone(c"setns", setns as *const c_void),
    Hook::alone(c"unshare", unshare as *const c_void),
    Hook::alone(c"personality", personality as *const c_void),
    Hook::alone(c"chroot", chroot as *const c_void),
    Hook::alone(c"prctl", prctl as *const c_void),
];

/// The options of prctl(2) by which a thread, or the process, gives something up.
const NARROWING: [c_int; 6] = [
    libc::PR_SET_DUMPABLE,
    libc::PR_SET_SECCOMP,
    libc::PR_CAPBSET_DROP,
    libc::PR_SET_SECUREBITS,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_CAP_AMBIENT,
];

/// Whether this call of prctl(2) asks whether a capability is ambient, and sets none.
fn asks_of_ambient(args: &[usize; 6]) -> bool {
    let option = libc::PR_CAP_AMBIENT.unsigned_abs() as usize;
    let asks = libc::PR_CAP_AMBIENT_IS_SET.unsigned_abs() as usize;
    [args[0] & SAME, args[1] & SAME] == [option, asks]
}

/// Whether this call of keyctl(2) changes which keys the caller has. All others ask, or are about keys alone.
fn changes_keys(args: &[usize; 6]) -> bool {
    const JOIN_SESSION_KEYRING: usize = 1;
    const SET_REQKEY_KEYRING: usize = 14;
    const ASSUME_AUTHORITY: usize = 16;
    const SESSION_TO_PARENT: usize = 18;
    matches!(
        args[0] & SAME,
        JOIN_SESSION_KEYRING | SET_REQKEY_KEYRING | ASSUME_AUTHORITY | SESSION_TO_PARENT
    )
}

/// Whether a system call may change what the program may do.
fn narrows(number: i64, args: &[usize; 6]) -> bool {
    match number {
        libc::SYS_prctl if asks_of_ambient(args) => false,
        libc::SYS_prctl => NARROWING
            .iter()
            .any(|&option| args[0] & SAME == option.unsigned_abs() as usize),
        libc::SYS_keyctl => changes_keys(args),
        // The agent's thread has a personality of its own: the next one has the caller's.
        libc::SYS_personality => args[0] & SAME != SAME,
        number => HOOKED.contains(&number),
    }
}

/// Whether the kernel makes all that the caller reads executable after this call: what PageONE maps or protects in a hook
/// would be so too. Such a program's memory is executable from its start as a rule, and never merged. Here it is given
/// back before. The tempting alternative, to drop the bit for each call of ours, takes a call that filters refuse.
fn implies_exec(number: i64, args: &[usize; 6]) -> bool {
    const READ_IMPLIES_EXEC: usize = 0x40_0000;
    let asks = args[0] & SAME == SAME;
    number == libc::SYS_personality && !asks && args[0] & READ_IMPLIES_EXEC != 0
}

/// Whether a call leaves the calling thread as it is: then no agent has to end for it. In libc's other threads, too, libc makes the
/// same call, and one that differs becomes as this one is. The agent compares itself with all of them before its next window.
/// False under a filter of the program's, for what tells are calls that no agent makes: it may kill for them.
fn changes_nothing(number: i64, args: &[usize; 6]) -> bool {
    if is_barred() || life::has_read_filters() {
        return false;
    }
    #[allow(clippy::cast_possible_truncation)] // the kernel takes the low half of the register
    let low = |at: usize| args.get(at).map_or(0, |&arg| arg as u32);
    let option = |option: c_int| number == libc::SYS_prctl && low(0) == option.cast_unsigned();
    let told = |get: c_int, of: usize| {
        call(
            libc::SYS_prctl,
            [get.unsigned_abs() as usize, of, 0, 0, 0, 0],
        )
    };
    if option(libc::PR_SET_DUMPABLE) {
        return told(libc::PR_GET_DUMPABLE, 0) == Ok(args[1]);
    }
    if option(libc::PR_SET_NO_NEW_PRIVS) {
        return told(libc::PR_GET_NO_NEW_PRIVS, 0) == Ok(args[1]);
    }
    if option(libc::PR_SET_SECUREBITS) {
        return told(libc::PR_GET_SECUREBITS, 0) == Ok(args[1]);
    }
    if option(libc::PR_CAPBSET_DROP) {
        return told(libc::PR_CAPBSET_READ, args[1]) == Ok(0);
    }
    Ids::change(number, [low(0), low(1), low(2)]).is_some_and(|(ids, wanted)| ids.are(wanted))
}

/// The users or the groups of the calling thread.
#[derive(Clone, Copy)]
struct Ids {
    real: u32,
    effective: u32,
    saved: u32,
    /// For files.
    files: u32,
}

impl Ids {
    /// What a call that sets them finds, and what it leaves if it succeeds; `None` for other calls.
    fn change(number: i64, [a, b, c]: [u32; 3]) -> Option<(Self, Self)> {
        const SAME: u32 = u32::MAX;
        let (get, files, kind) = match number {
            libc::SYS_setuid => (libc::SYS_getresuid, libc::SYS_setfsuid, Sets::All),
            libc::SYS_setgid => (libc::SYS_getresgid, libc::SYS_setfsgid, Sets::All),
            libc::SYS_setresuid => (libc::SYS_getresuid, libc::SYS_setfsuid, Sets::Each),
            libc::SYS_setresgid => (libc::SYS_getresgid, libc::SYS_setfsgid, Sets::Each),
            libc::SYS_setreuid => (libc::SYS_getresuid, libc::SYS_setfsuid, Sets::Two),
            libc::SYS_setregid => (libc::SYS_getresgid, libc::SYS_setfsgid, Sets::Two),
            libc::SYS_setfsuid => (libc::SYS_getresuid, libc::SYS_setfsuid, Sets::Files),
            libc::SYS_setfsgid => (libc::SYS_getresgid, libc::SYS_setfsgid, Sets::Files),
            _ => return None,
        };
        let now = Self::read(get, files)?;
        let or = |wanted: u32, now: u32| if wanted == SAME { now } else { wanted };
        let wanted = match kind {
            Sets::All => Self {
                real: a,
                effective: a,
                saved: a,
                files: a,
            },
            Sets::Each => {
                let effective = or(b, now.effective);
                Self {
                    real: or(a, now.real),
                    effective,
                    saved: or(c, now.saved),
                    files: effective,
                }
            }
            // It may set the saved one to the effective one.
            Sets::Two => {
                let effective = or(b, now.effective);
                Self {
                    real: or(a, now.real),
                    effective,
                    saved: effective,
                    files: effective,
                }
            }
            Sets::Files => Self {
                files: or(a, now.files),
                ..now
            },
        };
        Some((now, wanted))
    }

    fn read(get: i64, set_files: i64) -> Option<Self> {
        let mut ids = [0u32; 3];
        let [real, effective, saved] = [0, 1, 2].map(|at| {
            (&raw mut ids)
                .cast::<u32>()
                .wrapping_add(at)
                .expose_provenance()
        });
        call(get, [real, effective, saved, 0, 0, 0]).ok()?;
        // It gives the one there was, and sets none to this.
        let files = call(set_files, [SAME, 0, 0, 0, 0, 0]).ok()?;
        let [real, effective, saved] = ids;
        Some(Self {
            real,
            effective,
            saved,
            files: u32::try_from(files).ok()?,
        })
    }

    fn are(self, other: Self) -> bool {
        let all = |ids: Self| [ids.real, ids.effective, ids.saved, ids.files];
        all(self) == all(other)
    }
}

/// What a call does to them.
enum Sets {
    /// All are the first argument. Without rights it sets fewer: one that changes them counts.
    All,
    /// The real, effective and saved one; that for files follows the effective one.
    Each,
    /// The real and the effective one.
    Two,
    /// The one for files alone.
    Files,
}

/// Makes a system call as libc's `syscall` does, if it is one of [`HOOKED`].
pub(super) fn system_call(number: i64, args: [usize; 6]) -> Result<usize> {
    if number == libc::SYS_prctl && args[0] & SAME == memory::SET_VMA {
        return memory::set_vma(args);
    }
    if is_barred() {
        return call(number, args);
    }
    if number == libc::SYS_prctl && args[0] & SAME == SET_PTRACER {
        note_own_tracer();
    }
    if implies_exec(number, &args) {
        return life::without_agent_for_good(Why::EXECUTABLE, || call(number, args));
    }
    match Filter::installed_by(number, &args) {
        Filter::Asks => call(number, args),
        Filter::None if !narrows(number, &args) || changes_nothing(number, &args) => {
            call(number, args)
        }
        Filter::None => without_agent(number, args),
        Filter::Good => {
            let install = || call(number, args).inspect(|_| life::note_read_filter());
            life::without_agent(Why::RIGHTS, install).and_then(|result| result)
        }
        Filter::Refuses(refused) => {
            let why = Why::filter(refused);
            life::without_agent_for_good(why, || call(number, args))
        }
    }
}

/// The option of prctl(2) by which a program names its tracer.
const SET_PTRACER: usize = libc::PR_SET_PTRACER.unsigned_abs() as usize;

/// What a call does with seccomp filters.
enum Filter {
    /// It has nothing to do with them.
    None,
    /// It only asks.
    Asks,
    /// The agent can work under this one.
    Good,
    /// This one refuses a call of the agent's.
    Refuses(i64),
}

impl Filter {
    fn installed_by(number: i64, args: &[usize; 6]) -> Self {
        const STRICT: usize = 1;
        const FILTER: usize = 2;
        let (mode, program) = match number {
            // The kernel refuses strict mode with anything besides: so libseccomp asks whether there is this call.
            libc::SYS_seccomp if args[0] & SAME == 0 && [args[1] & SAME, args[2]] != [0, 0] => {
                return Self::Asks;
            }
            libc::SYS_seccomp => ((args[0] & SAME) + 1, args[2]),
            libc::SYS_prctl if args[0] & SAME == libc::PR_SET_SECCOMP.unsigned_abs() as usize => {
                (args[1], args[2])
            }
            _ => return Self::None,
        };
        match mode {
            STRICT => Self::Refuses(libc::SYS_mmap),
            FILTER => Self::of(program),
            _ => Self::Asks,
        }
    }

    fn of(program: usize) -> Self {
        const MOST: u16 = 4096; // BPF_MAXINSNS
        // Not ours to judge: the kernel says what it says without us.
        if !is_readable(program, size_of::<libc::sock_fprog>()) {
            return Self::Asks;
        }
        // SAFETY: the program hands the kernel this structure, and it can be read.
        let libc::sock_fprog { len, filter } = unsafe {
            std::ptr::with_exposed_provenance::<libc::sock_fprog>(program).read_unaligned()
        };
        let bytes = usize::from(len) * size_of::<libc::sock_filter>();
        let refused = len == 0 || len > MOST || !filter.is_aligned();
        if refused || !is_readable(filter.expose_provenance(), bytes) {
            return Self::Asks;
        }
        // SAFETY: so many instructions can be read there, and a program that changes them meanwhile deceives itself.
        let filter = unsafe { std::slice::from_raw_parts(filter, usize::from(len)) };
        let refused = calls::first_refused(filter, CALLS);
        refused.map_or(Self::Good, |call| Self::Refuses(call.number))
    }
}

/// What syscall(2) does not leave to the kernel at once.
pub(super) const HOOKED: &[i64] = &[
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capset,
    libc::SYS_prctl,
    libc::SYS_seccomp,
    libc::SYS_landlock_restrict_self,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_keyctl,
    libc::SYS_personality,
];

/// A bit for each call of [`HOOKED`].
pub(super) static HOOKED_BITS: Bits = bits_of(HOOKED);

/// syscall(2) with one of [`HOOKED`].
pub(super) extern "C" fn by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    answer(system_call(number, [a, b, c, d, e, f]))
}
