//! Whether a program or library was built by the Go toolchain. Go's runtime discards memory by system calls of its own, past
//! libc.
//!
//! The linker of Go leaves a note of the owner `Go`, unless it is told to leave out the build's number. And it leaves a mark in the writable
//! data, at a multiple of 16: `go version` looks for it there, also in a program that is stripped.
//!
//! Source: elf(5); `cmd/link` and `debug/buildinfo` of Go.

use crate::elf::{self, Kind, Segment, Table, number};
use crate::mapping::OwnMemory;
use crate::vma::Maps;

const MARK: &[u8; 14] = b"\xff Go buildinf:";
const ALIGN: usize = 16;
/// Most segments that are looked at.
const MOST: u64 = 64;
/// Most bytes of notes that are looked at; linkers put them at the begin.
const NOTES: usize = 1024;
/// Most bytes of writable data that are looked through, in all segments: code of the usual model reaches no further. The mark lies
/// behind tables of pointers and all other data, which in large programs are tens of MiB.
const DATA: u64 = 2 << 30;

/// Whether the toolchain of Go built a file with these headers. `read` fills a buffer with what is in the file at an offset, or is
/// false.
#[must_use]
pub fn is_file(table: Table, mut read: impl FnMut(u64, &mut [u8]) -> bool) -> bool {
    is_built(table, &mut read, |segment, _| Some(segment.offset))
}

/// The same of what is mapped at `base` in this process.
fn is_image(memory: &OwnMemory, base: usize) -> bool {
    let at = |address: u64| usize::try_from(address).ok();
    let mut read = |address: u64, to: &mut [u8]| {
        let address = at(address).and_then(|offset| base.checked_add(offset));
        address.is_some_and(|address| memory.read(address, to).is_ok())
    };
    let Kind::Own(table) = Kind::of(&mut read) else {
        return false;
    };
    is_built(table, &mut read, |segment, first| {
        segment.address.checked_sub(first)
    })
}

/// Whether a program or library of Go is mapped in this process.
///
/// # Errors
/// What reading the mappings gives.
pub fn is_mapped(maps: &Maps, memory: &OwnMemory) -> rustix::io::Result<bool> {
    let mut at = 0;
    while let Some(vma) = maps.find(at)? {
        // The headers lie at the begin of a mapping that is not written.
        let may_begin = vma.file && vma.read && !vma.write && !vma.shared;
        if may_begin && is_image(memory, vma.start) {
            return Ok(true);
        }
        at = vma.end;
    }
    Ok(false)
}

/// `place` tells where a segment is, given the address of the first that is loaded.
fn is_built(
    table: Table,
    read: &mut impl FnMut(u64, &mut [u8]) -> bool,
    place: impl Fn(&Segment, u64) -> Option<u64>,
) -> bool {
    let (mut first, mut left) = (None, DATA);
    for index in 0..table.count().min(MOST) {
        let Some(segment) = table.segment(index, &mut *read) else {
            return false;
        };
        if segment.kind == elf::LOAD && first.is_none() {
            first = Some(segment.address & !(crate::PAGE as u64 - 1));
        }
        // A note may be told of before what is loaded, which then begins at the file's begin.
        let first = first.unwrap_or_else(|| segment.address.saturating_sub(segment.offset));
        let Some(at) = place(&segment, first) else {
            continue;
        };
        let found = match segment.kind {
            elf::NOTE => has_note(read, at, segment.file_len),
            elf::LOAD if segment.flags & elf::WRITE != 0 => has_mark(read, at, &segment, &mut left),
            _ => false,
        };
        if found {
            return true;
        }
    }
    false
}

/// Whether one of the notes has the owner `Go`.
fn has_note(read: &mut impl FnMut(u64, &mut [u8]) -> bool, at: u64, len: u64) -> bool {
    let mut notes = [0; NOTES];
    let len = usize::try_from(len).unwrap_or(NOTES).min(NOTES);
    let notes = &mut notes[..len];
    if !read(at, notes) {
        return false;
    }
    // The length of the owner's name with its zero, of the text, the kind; then the name.
    notes
        .windows(16)
        .step_by(4)
        .any(|note| number(note, 0, 4) == Some(4) && note[12..] == *b"Go\0\0")
}

/// Whether the mark lies in a segment, at a multiple of 16 of its addresses. So much is looked through as is `left`.
fn has_mark(
    read: &mut impl FnMut(u64, &mut [u8]) -> bool,
    at: u64,
    segment: &Segment,
    left: &mut u64,
) -> bool {
    let align = ALIGN as u64;
    let skipped = segment.address.wrapping_neg() % align;
    let mut bytes = [0; crate::PAGE];
    let mut done = skipped;
    while done + align <= segment.file_len && *left > 0 {
        let len = (segment.file_len - done).min(bytes.len() as u64) / align * align;
        let part = &mut bytes[..usize::try_from(len).unwrap_or(0)];
        if !at.checked_add(done).is_some_and(|from| read(from, part)) {
            return false;
        }
        if part
            .chunks_exact(ALIGN)
            .any(|chunk| chunk.starts_with(MARK))
        {
            return true;
        }
        done += len;
        *left = left.saturating_sub(len);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: usize = 64;
    const SEGMENT: u16 = 56;

    /// A file with one segment of this kind, at an address of its own.
    fn file(kind: u32, flags: u32, address: u64, content: &[u8]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(HEADER, 0);
        file[18] = 62;
        file[32..40].copy_from_slice(&(HEADER as u64).to_le_bytes());
        file[54..56].copy_from_slice(&SEGMENT.to_le_bytes());
        file[56..58].copy_from_slice(&1_u16.to_le_bytes());
        let mut entry = [0; 56];
        entry[..4].copy_from_slice(&kind.to_le_bytes());
        entry[4..8].copy_from_slice(&flags.to_le_bytes());
        entry[8..16].copy_from_slice(&120_u64.to_le_bytes());
        entry[16..24].copy_from_slice(&address.to_le_bytes());
        entry[32..40].copy_from_slice(&(content.len() as u64).to_le_bytes());
        file.extend(entry);
        file.extend(content);
        file
    }

    fn is_go(file: &[u8]) -> bool {
        let read = elf::read_slice(file);
        matches!(Kind::of(read), Kind::Own(table) if is_file(table, read))
    }

    #[test]
    fn a_note_or_a_mark_tells() {
        let note = |owner: &[u8; 4]| {
            let mut note = [4_u32, 0, 4].map(u32::to_le_bytes).concat();
            note.extend(owner);
            let before = [4_u32, 0, 3, u32::from_le_bytes(*b"GNU\0")];
            [before.map(u32::to_le_bytes).concat(), note].concat()
        };
        assert!(is_go(&file(elf::NOTE, 4, 0x370, &note(b"Go\0\0"))));
        assert!(!is_go(&file(elf::NOTE, 4, 0x370, &note(b"GNU\0"))));
        let mark = |at: usize| {
            let mut data = vec![7; 3 * crate::PAGE];
            data[at..at + MARK.len()].copy_from_slice(MARK);
            data
        };
        // The segment begins 8 bytes behind a multiple of 16.
        assert!(is_go(&file(elf::LOAD, 6, 0x1008, &mark(8 + 5 * 1008))));
        assert!(!is_go(&file(elf::LOAD, 6, 0x1008, &mark(5 * 1008))));
        assert!(!is_go(&file(elf::LOAD, 4, 0x1008, &mark(8 + 5 * 1008))));
        let mut large = vec![7; 16 << 20];
        large.extend(mark(0));
        assert!(is_go(&file(elf::LOAD, 6, 0x1000, &large)));
        assert!(!is_go(b"#!/bin/sh\n"));
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert!(!is_go(&own), "a program of Rust's");
    }

    #[test]
    fn damage_is_no_sign_and_no_end() {
        for len in 0..HEADER + usize::from(SEGMENT) + 20 {
            let whole = file(elf::NOTE, 4, u64::MAX, &[4; 20]);
            assert!(!is_go(&whole[..len]));
        }
        let mut wild = file(elf::LOAD, 6, u64::MAX - 7, &[0; 40]);
        wild[HEADER + 32..HEADER + 40].fill(0xff);
        assert!(!is_go(&wild));
    }

    #[test]
    fn data_without_end_is_looked_through_in_part() {
        // As many segments as are looked at, which all claim half of all addresses.
        let mut file = file(elf::LOAD, 6, 0, &[]);
        file[56..58].copy_from_slice(&64_u16.to_le_bytes());
        file[HEADER + 32..HEADER + 40].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        let (header, entry) = file.split_at(HEADER);
        let mut looked = 0;
        let Kind::Own(table) = Kind::of(elf::read_slice(header)) else {
            panic!("it is a header");
        };
        let found = is_file(table, |_, to| {
            match to.len() {
                len if len == entry.len() => to.copy_from_slice(entry),
                len => looked += len as u64,
            }
            true
        });
        assert!(!found);
        assert_eq!(looked, DATA);
    }

    #[test]
    fn this_process_is_not_of_go() {
        let (maps, memory) = (Maps::open().unwrap(), OwnMemory::open().unwrap());
        assert!(!is_mapped(&maps, &memory).unwrap());
    }
}
