//! The parts of a process that a core dump holds.
//!
//! The kernel leaves a private mapping of a file out of a dump if nothing was ever written there (`vma_dump_size`):
//! the file has it. Memory that was merged looks like that, and its file is gone when the dump is read. So a process that
//! wants its private memory dumped gets the private pages of files dumped as well, libraries included. The tempting
//! alternative, to make each mapping look written, costs memory of the kernel's for each.
//!
//! Nothing here allocates, sets `errno` or needs thread-local storage.
//!
//! Source: core(5), `fs/coredump.c`.

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

/// Bits of `/proc/self/coredump_filter`.
const ANONYMOUS_PRIVATE: u32 = 1 << 0;
const MAPPED_PRIVATE: u32 = 1 << 2;

/// Has dumps of the caller's process hold private pages of files, if they hold its anonymous ones. Children inherit it.
///
/// # Errors
/// Whatever opening, reading and writing `/proc/self/coredump_filter` gives.
pub fn include_private_files() -> Result<()> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(c"/proc/self/coredump_filter", flags, Mode::empty())?;
    let mut text = [0u8; 16];
    let len = rustix::io::pread(&file, &mut text, 0)?;
    let filter = text.get(..len).and_then(parse).ok_or(Errno::INVAL)?;
    if filter & ANONYMOUS_PRIVATE == 0 || filter & MAPPED_PRIVATE != 0 {
        return Ok(());
    }
    rustix::io::pwrite(&file, &hex(filter | MAPPED_PRIVATE), 0).map(drop)
}

/// The number in a line of hexadecimal digits.
fn parse(line: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(line).ok()?.trim_end();
    u32::from_str_radix(digits, 16).ok()
}

/// The number as the kernel reads it.
fn hex(number: u32) -> [u8; 10] {
    let mut text = *b"0x00000000";
    for (place, digit) in text.iter_mut().skip(2).enumerate() {
        let nibble = number >> (28 - 4 * place) & 0xf;
        *digit = b"0123456789abcdef"[nibble as usize];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_read_and_written_as_the_kernel_does() {
        assert_eq!(parse(b"00000033\n"), Some(0x33));
        assert_eq!(parse(b"\n"), None);
        assert_eq!(&hex(0x37), b"0x00000037");
        assert_eq!(&hex(0xfedc_ba98), b"0xfedcba98");
    }

    #[test]
    fn a_process_that_dumps_its_memory_dumps_merged_memory() {
        let filter = || std::fs::read("/proc/self/coredump_filter").unwrap();
        let before = parse(&filter()).unwrap();
        include_private_files().unwrap();
        let wanted = match before & ANONYMOUS_PRIVATE {
            0 => before,
            _ => before | MAPPED_PRIVATE,
        };
        assert_eq!(parse(&filter()), Some(wanted));
    }
}
