//! The agent's own variables are never merged.
//!
//! Its thread must not sleep on a page that it has frozen itself. What it maps is marked when it is made
//! ([`sys::mapping::area`]); its stack is such memory too. Its variables lie in the image of the library: the
//! initialised ones in a mapping of a file, which is not merged; the others in anonymous memory behind it, which
//! looks like the program's. So that is marked as well, before the first thread starts: a program may offer every
//! mapping that it finds.
//!
//! Where the library is linked into a program, the program's own uninitialised variables lie there with the
//! agent's, and are not merged.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Result;
use wire::PAGE_BYTES;

// Hidden: another image's would be found instead.
std::arch::global_asm!(".hidden __bss_start", ".hidden _end");

unsafe extern "C" {
    /// Where the linker put the first variable without a value, and the end of the last.
    static __bss_start: u8;
    static _end: u8;
}

/// Whether the variables are marked. A fork child inherits both.
static MARKED: AtomicBool = AtomicBool::new(false);

/// Marks the variables. To be called before a thread of the agent's starts.
///
/// # Errors
/// `NOMEM` when the map count is exhausted.
pub(crate) fn mark() -> Result<()> {
    if MARKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let start = (&raw const __bss_start).addr() & !(PAGE_BYTES - 1);
    let end = (&raw const _end).addr().next_multiple_of(PAGE_BYTES);
    // SAFETY: all of it is part of this image, and the mark changes nothing of it.
    unsafe { sys::mapping::mark_own(start, end - start) }?;
    MARKED.store(true, Ordering::Relaxed);
    Ok(())
}
