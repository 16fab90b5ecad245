//! Whether AddressSanitizer is in a program, as a library or linked in.
//!
//! Its allocator discards freed memory by system calls of its own, past libc, and finds in the headers of freed blocks what zeros say. With
//! canonical content there it reports blocks as lost that were freed, and the program ends with another code. Its other runtimes keep
//! such words elsewhere.
//!
//! A program need not export a symbol of it. But its shadow memory lies at one place, which the compiler has put into the program's code.
//!
//! Source: `asan_mapping.h` of compiler-rt and GCC.

use rustix::io::Result;

use crate::vma::Maps;

/// Where the shadow of stacks and libraries begins.
const SHADOW: Option<usize> = if cfg!(target_arch = "x86_64") {
    Some(0x0200_8fff_7000)
} else {
    None
};

/// Whether a mapping with this begin is the sanitizer's shadow memory.
#[must_use]
pub fn is_shadow(start: usize) -> bool {
    SHADOW == Some(start)
}

/// Whether the sanitizer has its shadow memory in this process.
///
/// # Errors
/// What reading the mappings gives.
pub fn is_mapped(maps: &Maps) -> Result<bool> {
    let Some(shadow) = SHADOW else {
        return Ok(false);
    };
    let found = maps.find(shadow)?;
    Ok(found.is_some_and(|vma| is_shadow(vma.start) && vma.is_anonymous()))
}
