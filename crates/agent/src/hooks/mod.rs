//! What stands before libc's calls.
//!
//! ```text
//!   exports   the C functions that replace libc's: errno, pointers
//!      ▼
//!   memory, locks   each call as the kernel sees it: numbers in, `Result<usize>` out
//!      ▼
//!   discard, remap, offer   what a call means over merged memory
//! ```
//!
//! Each hook enters the kernel itself, so it needs no lookup of the function it replaces and can
//! run before libc is ready. Calls that do not touch known chunks go straight through. The others
//! take the lock, so that no merge window works on the range meanwhile, and then keep the table
//! in step with what the kernel did.

use rustix::io::Result;

use crate::life;
use crate::lock::{Guard, lock};
use crate::remap::Remap;
use crate::serve;
use crate::table::touches;

#[cfg(target_arch = "x86_64")]
mod by_number;
mod exports;
mod fork;
pub(crate) mod ioctl;
pub(crate) mod locks;
pub(crate) mod memory;
mod rights;

/// Runs before the program's `main`.
extern "C" fn begin() {
    // SAFETY: this is the constructor.
    unsafe { life::look_at_first_filters() };
    rights::begin();
    if life::is_barred() {
        return;
    }
    // SAFETY: the loader runs this while the process has one thread.
    unsafe { serve::configure() };
    // Made before anybody forks, it is there when a fork begins.
    let _ = crate::lock::per_process();
    fork::begin();
    // SAFETY: this is the constructor.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        crate::takeover::begin();
    };
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Takes the lock when the range touches known chunks.
fn guard(start: usize, len: usize) -> Option<Guard> {
    life::bring_back();
    touches(start, len).then(lock).flatten()
}

fn call(number: i64, args: [usize; 6]) -> Result<usize> {
    // SAFETY: the guest's own call, as it came.
    unsafe { sys::raw::call(number, args) }
}

/// Calls over memory that have a hook.
const MEMORY: &[i64] = &[
    libc::SYS_madvise,
    libc::SYS_munmap,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_brk,
    libc::SYS_mprotect,
    libc::SYS_pkey_mprotect,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mlockall,
    libc::SYS_munlockall,
    libc::SYS_mbind,
    libc::SYS_process_madvise,
    libc::SYS_ioctl,
    memory::SYS_MSEAL,
    memory::SYS_HOME_NODE,
];

/// One more than the highest number of a call that [`Bits`] can name.
const BITS: usize = 512;

/// A bit for each of some calls.
type Bits = [u64; BITS / 64];

const fn bits_of(numbers: &[i64]) -> Bits {
    let (mut bits, mut at) = ([0; BITS / 64], 0);
    while at < numbers.len() {
        #[allow(clippy::cast_possible_truncation)] // a small number
        let word = (numbers[at] / 64).unsigned_abs() as usize;
        bits[word] |= 1 << (numbers[at] % 64);
        at += 1;
    }
    bits
}

/// Makes a system call as its hook would; `None` for one that has no hook. For whatever else enters a call than
/// the C functions.
pub(crate) fn enter(number: i64, args: [usize; 6]) -> Option<Result<usize>> {
    #[allow(clippy::cast_possible_truncation)] // the kernel takes the low half of the register
    let low = |value: usize| value as u32 as i32;
    let [a, b, c, d, e, _] = args;
    Some(match number {
        libc::SYS_madvise => memory::madvise(a, b, low(c)),
        libc::SYS_munmap => memory::munmap(a, b),
        libc::SYS_mmap => memory::mmap(args),
        libc::SYS_mremap => memory::mremap(Remap {
            old: a,
            old_len: b,
            new_len: c,
            flags: low(d),
            to: e,
        }),
        libc::SYS_brk => memory::brk(a),
        libc::SYS_mprotect => memory::mprotect(a, b, c),
        libc::SYS_pkey_mprotect => memory::pkey_mprotect(a, b, c, d),
        libc::SYS_mlock => locks::mlock(a, b),
        libc::SYS_mlock2 => locks::mlock2(a, b, c),
        libc::SYS_munlock => locks::munlock(a, b),
        libc::SYS_mlockall => locks::mlockall(a),
        libc::SYS_munlockall => locks::munlockall(),
        libc::SYS_mbind => memory::mbind(args),
        libc::SYS_process_madvise => memory::process_madvise(args),
        libc::SYS_ioctl => ioctl::ioctl(args),
        memory::SYS_MSEAL => memory::mseal(a, b, c),
        memory::SYS_HOME_NODE => memory::set_mempolicy_home_node(args),
        _ => return None,
    })
}

/// A bit for each call of [`MEMORY`].
#[cfg(target_arch = "x86_64")]
static MEMORY_BITS: Bits = bits_of(MEMORY);

/// Makes a call over a range so that no window sees it half; `then` keeps the table in step with a
/// call that succeeded, before the lock is given back.
fn guarded(
    start: usize,
    len: usize,
    name: i64,
    args: [usize; 6],
    then: impl FnOnce(&mut Guard),
) -> Result<usize> {
    let mut held = guard(start, len);
    let result = call(name, args);
    if let (Some(guard), Ok(_)) = (&mut held, result) {
        then(guard);
    }
    result
}
