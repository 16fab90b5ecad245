//! ioctl(2): a program that registers a userfaultfd of its own on offered memory gets it.
//!
//! A mapping has one userfaultfd. So PageONE lets go first: what is merged is made whole, the offer ends, and
//! what tracked it unregisters.

use rustix::io::Result;
use wire::PAGE_BYTES;

use super::call::call;
use crate::any;
use crate::lock::{existing, lock};
use crate::mappings::whole::{self, Untracked, whole};

/// `UFFDIO_REGISTER`.
pub(super) const REGISTER: usize = 0xc020_aa00;

/// ioctl(2): descriptor, request, argument.
pub(crate) fn ioctl(args: [usize; 6]) -> Result<usize> {
    if args[1] & 0xffff_ffff == REGISTER {
        let _ = let_go(args[2]);
    }
    call(libc::SYS_ioctl, args)
}

/// Lets go of the range in the structure at `register`, if the kernel can read one there.
#[cold]
fn let_go(register: usize) -> Result<()> {
    let mut range = [0usize; 2];
    super::memory::read_own(register, &mut range, 16)?;
    let [start, len] = range;
    // Memory that is offered no more may still be tracked.
    let Some(mut guard) = existing().and_then(|_| lock()) else {
        return Ok(());
    };
    if !start.is_multiple_of(PAGE_BYTES) || !len.is_multiple_of(PAGE_BYTES) {
        return Ok(()); // refused by the kernel
    }
    whole(&mut guard, start, len)?;
    any::keep(&mut guard, start, len);
    whole::untrack(&mut guard, start, len, Untracked::Anonymous)
}
