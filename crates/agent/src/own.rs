//! The memory that the agent's thread touches is never merged.
//!
//! It must not sleep on a page that it has taken out or frozen itself. Memory that it maps is marked when it is made
//! ([`sys::mapping::area`]); its stack is such memory too. Two other kinds lie in images:
//!
//! - its own variables. The initialised ones are in a mapping of a file, which is not merged; the others in
//!   anonymous memory behind it, which looks like the program's.
//! - the variables of libraries from which it calls functions: of none where it is a library itself (`build.rs`). An agent that
//!   is linked into a program copies memory by libc's functions, and there stands from which length on a copy goes past the
//!   cache.
//!
//! So both are marked as well, before the first thread starts: a program may offer every mapping that it finds, and
//! [`any`](crate::any) does.
//!
//! Where the agent is linked into a program, the program's own uninitialised variables lie there with the
//! agent's, and are not merged.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

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

/// Variables of other images, of each of [`find`]'s functions that is not the agent's own: first address and the one after the last; zeros for none.
static OTHERS: [[AtomicUsize; 2]; FUNCTIONS] =
    [const { [const { AtomicUsize::new(0) }; 2] }; FUNCTIONS];
const FUNCTIONS: usize = 7;

/// Finds the variables of the images whose functions the agent's thread calls. For the constructor: it takes the
/// loader's lock.
pub(crate) fn find() {
    let mut functions: [usize; FUNCTIONS] = [
        libc::memcpy as *const c_void,
        libc::memmove as *const c_void,
        libc::memset as *const c_void,
        libc::memcmp as *const c_void,
        libc::strlen as *const c_void,
        libc::close as *const c_void,
        libc::fcntl as *const c_void,
    ]
    .map(<*const c_void>::addr);
    // SAFETY: `each_image` keeps to what such a function may do, and takes the list for what it is.
    unsafe { libc::dl_iterate_phdr(Some(each_image), (&raw mut functions).cast()) };
}

/// Notes where the image has its uninitialised variables, for each of the functions that lies in it.
unsafe extern "C" fn each_image(
    image: *mut libc::dl_phdr_info,
    _size: usize,
    functions: *mut c_void,
) -> c_int {
    // SAFETY: the loader gives its list, and the second is what `find` gave; both outlive this call.
    let (image, functions) = unsafe { (&*image, &*functions.cast::<[usize; FUNCTIONS]>()) };
    #[allow(clippy::cast_possible_truncation)] // addresses of this process
    let base = image.dlpi_addr as usize;
    // SAFETY: so many headers lie there, in the image.
    let headers = unsafe { std::slice::from_raw_parts(image.dlpi_phdr, image.dlpi_phnum.into()) };
    let loaded = || {
        headers
            .iter()
            .filter(|header| header.p_type == libc::PT_LOAD)
    };
    let reaches = |header: &libc::Elf64_Phdr| span(base, header);
    let own = (&raw const __bss_start).addr();
    if loaded().any(|header| reaches(header).contains(&own)) {
        return 0; // `mark` knows it
    }
    for (function, other) in functions.iter().zip(&OTHERS) {
        if loaded().any(|header| reaches(header).contains(function)) {
            let mut variables = loaded().map(|header| anonymous(base, header));
            if let Some(range) = variables.rfind(|range| !range.is_empty()) {
                let [start, end] = other;
                start.store(range.start, Ordering::Relaxed);
                end.store(range.end, Ordering::Relaxed);
            }
        }
    }
    0
}

#[allow(clippy::cast_possible_truncation)] // addresses of this process
fn span(base: usize, header: &libc::Elf64_Phdr) -> Range<usize> {
    let start = base.wrapping_add(header.p_vaddr as usize);
    start..start.wrapping_add(header.p_memsz as usize)
}

/// The pages of a part of an image behind those of its file.
#[allow(clippy::cast_possible_truncation)] // addresses of this process
fn anonymous(base: usize, header: &libc::Elf64_Phdr) -> Range<usize> {
    let Range { start, end } = span(base, header);
    let filled = start.wrapping_add(header.p_filesz as usize);
    filled.next_multiple_of(PAGE_BYTES)..end.next_multiple_of(PAGE_BYTES)
}

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
    for [start, end] in &OTHERS {
        let (start, end) = (start.load(Ordering::Relaxed), end.load(Ordering::Relaxed));
        if start < end {
            // SAFETY: variables of an image that stays, for this one is bound to it; the mark changes nothing of them.
            unsafe { sys::mapping::mark_own(start, end - start) }?;
        }
    }
    MARKED.store(true, Ordering::Relaxed);
    Ok(())
}
