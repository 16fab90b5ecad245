//! Each call over memory as its hook makes it, by number.

use rustix::io::Result;

#[cfg(target_arch = "x86_64")]
use super::call::{Bits, bits_of};
use super::{ioctl, locks, memory};
use crate::mappings::remap::Remap;

/// Calls over memory that have a hook.
pub(super) const MEMORY: &[i64] = &[
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
pub(super) static MEMORY_BITS: Bits = bits_of(MEMORY);
