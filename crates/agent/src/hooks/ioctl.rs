//! ioctl(2): a program that registers a userfaultfd of its own on offered memory gets it.
//!
//! A mapping has one userfaultfd. So PageONE lets go first: merged pages are made whole, the offer ends, and
//! so does its tracking.
//!
//! One that unregisters a range has the same answer as without PageONE: from Linux 6.15 on the kernel refuses to unregister a
//! range in which another userfaultfd has something. So PageONE lets go of all of it first, as for a registration. On older
//! kernels the call would end the tracking unseen.
//!
//! One that moves pages out of offered memory gets them: the kernel moves none of a store's, and would find a hole where a window
//! has a page out. So they are made whole, and the lock is held over the call, which moves those pages and waits for no thread.

use rustix::io::{Errno, Result};
use wire::PAGE_BYTES;

use super::call::{call, over};
use crate::any;
use crate::lock::{existing, lock};
use crate::mappings::whole::{self, Untracked, whole};
use crate::table::ADDRESS_LIMIT;

/// `UFFDIO_REGISTER`.
pub(super) const REGISTER: usize = 0xc020_aa00;

/// `UFFDIO_UNREGISTER`.
pub(super) const UNREGISTER: usize = 0x8010_aa01;

/// `UFFDIO_MOVE` (Linux 6.8).
pub(super) const MOVE: usize = 0xc028_aa05;

/// The requests that have a hook, for [`attached`](crate::attached): a call with another one is not seen.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::cast_possible_truncation)] // 32 bits each
#[unsafe(no_mangle)]
static PAGEONE_REQUESTS: [u32; 3] = [REGISTER as u32, UNREGISTER as u32, MOVE as u32];

/// ioctl(2): descriptor, request, argument.
pub(crate) fn ioctl(args: [usize; 6]) -> Result<usize> {
    match args[1] & 0xffff_ffff {
        REGISTER => {
            let _ = let_go(args[2], Untracked::Anonymous);
        }
        // What may be pinned is private there, and needs no tracking.
        UNREGISTER => {
            let _ = let_go(args[2], Untracked::All);
        }
        MOVE => return move_out(args),
        _ => {}
    }
    call(libc::SYS_ioctl, args)
}

/// Moves pages, which are whole.
#[cold]
fn move_out(args: [usize; 6]) -> Result<usize> {
    // The target, the source, their length.
    let mut words = [0usize; 3];
    let read = super::memory::read_own(args[2], &mut words, 24);
    let [_, source, len] = words;
    let sound = source.is_multiple_of(PAGE_BYTES) && len.is_multiple_of(PAGE_BYTES);
    if read.is_err() || !sound {
        return call(libc::SYS_ioctl, args); // refused by the kernel
    }
    over(source, len, |held| {
        if let Some(held) = held {
            whole(held, source, len).map_err(|_| Errno::NOMEM)?;
        }
        call(libc::SYS_ioctl, args)
    })
}

/// Lets go of the range in the structure at `argument`, if the kernel can read one there.
#[cold]
fn let_go(argument: usize, which: Untracked) -> Result<()> {
    let mut range = [0usize; 2];
    super::memory::read_own(argument, &mut range, 16)?;
    let [start, len] = range;
    // Memory that is offered no more may still be tracked.
    let Some(mut guard) = existing().and_then(|_| lock()) else {
        return Ok(());
    };
    let end = start.checked_add(len).filter(|&end| end <= ADDRESS_LIMIT);
    if !start.is_multiple_of(PAGE_BYTES) || !len.is_multiple_of(PAGE_BYTES) || end.is_none() {
        return Ok(()); // refused by the kernel
    }
    whole(&mut guard, start, len)?;
    any::keep(&mut guard, start, len);
    whole::untrack(&mut guard, start, len, which)
}
