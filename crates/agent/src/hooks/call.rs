//! A guest's own call, with the lock where it needs it.

use rustix::io::{Errno, Result};
use wire::PAGE_BYTES;

use crate::life;
use crate::lock::{Guard, lock};
use crate::passing;
use crate::table::touches;

/// Makes a call over a range as no window may see it half: with the lock, where something is known of the range, else with a note of it
/// ([`passing`]). A call that may wait for a thread of the program drops the lock first.
pub(super) fn over<T>(start: usize, len: usize, call: impl FnOnce(&mut Option<Guard>) -> T) -> T {
    let _noted = passing::note_if_any(start, len);
    call(&mut guard(start, len))
}

/// Takes the lock when the range touches known chunks. For what is behind a call; before it, see [`over`].
pub(super) fn guard(start: usize, len: usize) -> Option<Guard> {
    life::bring_back();
    touches(start, len).then(lock).flatten()
}

pub(super) fn call(number: i64, args: [usize; 6]) -> Result<usize> {
    // SAFETY: the guest's own call, as it came.
    unsafe { sys::raw::call(number, args) }
}

/// Whether the kernel can read all of a range for the program: what a hook reads there itself must not end it.
///
/// Asked by a call that takes 8 bytes and refuses to do anything with them. /proc may be out of reach, and msync(2)
/// tells of what is mapped without a right to it, too.
pub(super) fn is_readable(start: usize, len: usize) -> bool {
    const NO_SUCH_WAY: usize = 99;
    let Some(end) = start.checked_add(len) else {
        return false;
    };
    let first = start & !(PAGE_BYTES - 1);
    (first..end).step_by(PAGE_BYTES).all(|page| {
        let read = call(libc::SYS_rt_sigprocmask, [NO_SUCH_WAY, page, 0, 8, 0, 0]);
        read == Err(Errno::INVAL)
    })
}

/// One more than the highest number of a call that [`Bits`] can name.
pub(super) const BITS: usize = 512;

/// A bit for each of some calls.
pub(super) type Bits = [u64; BITS / 64];

pub(super) const fn bits_of(numbers: &[i64]) -> Bits {
    let (mut bits, mut at) = ([0; BITS / 64], 0);
    while at < numbers.len() {
        #[allow(clippy::cast_possible_truncation)] // a small number
        let word = (numbers[at] / 64).unsigned_abs() as usize;
        bits[word] |= 1 << (numbers[at] % 64);
        at += 1;
    }
    bits
}
