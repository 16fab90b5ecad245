//! The mark by which a command of PageONE is known, whatever file it was copied to or is called.
//!
//! It is a section of the program's file. A program that does not call [`keep`] has none: the linker leaves it out, so the agent's
//! library does not mark the programs that it is linked into.

use crate::elf;

const NAME: &[u8] = b".pageone";

#[unsafe(link_section = ".pageone")]
static MARK: [u8; 8] = *b"PageONE\0";

/// Marks the program that calls this.
pub fn keep() {
    std::hint::black_box(&MARK);
}

/// Whether a program's file has the mark.
pub fn is_in(read: impl FnMut(u64, &mut [u8]) -> bool) -> bool {
    elf::has_section(NAME, read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_keeps_the_mark_has_it() {
        keep();
        let file = std::fs::read("/proc/self/exe").unwrap();
        assert!(is_in(elf::read_slice(&file)));
        let other = std::fs::read("/bin/sh").unwrap();
        assert!(!is_in(elf::read_slice(&other)));
    }
}
