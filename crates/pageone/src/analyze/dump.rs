//! Memory dumps in the place of processes: QEMU's and libvirt's (ELF), LiME's, and plain images.
//!
//! ```text
//! ELF     PT_LOAD segments: `dump-guest-memory FILE`, `virsh dump --memory-only`, gcore
//! LiME    per range a header (magic `EMiL`, version 1, first and last address, 8 bytes) and its bytes
//! plain   anything else whose length is whole pages
//! ```

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use object::elf::{FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, ReadCache};
use wire::PAGE_BYTES;

/// Bytes of a page.
const PAGE: u64 = PAGE_BYTES as u64;
/// ELF's word for 64 bits.
const CLASS_64: u8 = 2;
const LIME: [u8; 8] = *b"EMiL\x01\0\0\0";
/// What is read here, for messages.
const FIT: &str =
    "a dump is ELF (QEMU, libvirt, gcore), LiME, or a plain image of whole pages of 4096 bytes";
/// Ranges of a LiME dump at most: real machines have dozens.
const MOST_RANGES: usize = 65_536;

/// Files whose memory lies in them in another form: how they begin, and what to do.
const PACKED: [(&[u8], &str); 6] = [
    (
        b"KDUMP",
        "it is a compressed kdump file; `dump-guest-memory FILE` without a format writes ELF",
    ),
    (
        b"LibvirtQ",
        "it is a machine that libvirt has saved; use `virsh dump --memory-only`",
    ),
    (
        b"QEVM",
        "it is a migration of QEMU, as `virsh dump` writes it; use `virsh dump --memory-only` or `dump-guest-memory FILE`",
    ),
    (
        b"QFI\xfb",
        "it is a disk of QEMU (qcow2), and no memory; `dump-guest-memory FILE` writes ELF",
    ),
    (
        b"\x1f\x8b\x08",
        "it is compressed by gzip; unpack it with `gunzip`",
    ),
    (
        b"\x28\xb5\x2f\xfd",
        "it is compressed by zstd; unpack it with `unzstd`",
    ),
];

/// The places in a file where it has whole pages of memory.
///
/// # Errors
/// The file cannot be read, is damaged, or has no memory.
pub(crate) fn ranges(path: &Path) -> Result<Vec<Range<u64>>> {
    let mut file = File::open(path)?;
    let len = file.seek(SeekFrom::End(0))?;
    file.rewind()?;
    ensure!(len > 0, "it is empty; {FIT}");
    let mut head = [0; 8];
    if file.read_exact(&mut head).is_err() {
        bail!("it is shorter than a page; {FIT}");
    }
    if let Some(why) = packed(&head) {
        bail!("{why}");
    }
    let ranges = match head {
        LIME => lime(&mut file, len)?,
        [0x7f, b'E', b'L', b'F', CLASS_64, ..] => elf(file)?,
        [0x7f, b'E', b'L', b'F', ..] => bail!("it is an ELF file of another class than 64 bits"),
        _ if len.is_multiple_of(PAGE) => std::iter::once(0..len).collect(),
        _ => bail!(
            "it is neither ELF nor LiME, and its length of {len} bytes is not whole pages; {FIT}"
        ),
    };
    let inside = |range: &Range<u64>| range.start <= range.end && range.end <= len;
    if !ranges.iter().all(inside) {
        bail!("its headers name memory beyond its end: it is cut short");
    }
    let ranges = disjoint(ranges);
    let whole = |range: Range<u64>| range.start..range.end - (range.end - range.start) % PAGE;
    let ranges: Vec<_> = ranges.into_iter().map(whole).collect();
    match ranges.iter().all(Range::is_empty) {
        true => bail!("it has no memory: not one whole page; {FIT}"),
        false => Ok(ranges),
    }
}

/// Why a file that begins so cannot be read, if it is packed. As a plain image its pages would be counted, and be no memory's.
fn packed(head: &[u8]) -> Option<&'static str> {
    let found = PACKED.iter().find(|(magic, _)| head.starts_with(magic));
    found.map(|&(_, why)| why)
}

/// Ranges without what another one has too: segments may be names of the same memory.
fn disjoint(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut end = 0;
    for range in &mut ranges {
        range.start = range.start.max(end).min(range.end.max(end));
        range.end = range.end.max(range.start);
        end = range.end;
    }
    ranges
}

fn elf(file: File) -> Result<Vec<Range<u64>>> {
    let data = ReadCache::new(file);
    let header = FileHeader64::<Endianness>::parse(&data)?;
    let endian = header.endian()?;
    // A file with a hole may name four thousand million of them.
    let named = header.phnum(endian, &data)?;
    ensure!(
        usize::try_from(named)? <= MOST_RANGES,
        "it names {named} segments"
    );
    let segments = header.program_headers(endian, &data)?.iter();
    let memory = segments.filter(|segment| segment.p_type(endian) == PT_LOAD);
    let place = |segment: &object::elf::ProgramHeader64<Endianness>| {
        let start = segment.p_offset(endian);
        start..start.saturating_add(segment.p_filesz(endian))
    };
    Ok(memory.map(place).collect())
}

fn lime(file: &mut File, len: u64) -> Result<Vec<Range<u64>>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < len {
        let mut header = [0; 32];
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(&mut header)
            .context("its last header is cut short")?;
        let [magic, first, last, _] = *header.as_chunks::<8>().0 else {
            bail!("its last header is cut short");
        };
        let (first, last) = (u64::from_le_bytes(first), u64::from_le_bytes(last));
        let start = at + 32;
        let bytes = last
            .checked_sub(first)
            .and_then(|bytes| bytes.checked_add(1));
        match bytes.and_then(|bytes| start.checked_add(bytes)) {
            Some(end) if magic == LIME && ranges.len() < MOST_RANGES => {
                ranges.push(start..end);
                at = end;
            }
            _ => bail!("byte {at} should begin a range, and does not"),
        }
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Result<Vec<(u64, u64)>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let ranges = ranges(file.path()).map_err(|error| format!("{error:#}"))?;
        Ok(ranges
            .into_iter()
            .map(|range| (range.start, range.end))
            .collect())
    }

    fn lime(ranges: &[(u64, usize)]) -> Vec<u8> {
        let one = |&(first, bytes): &(u64, usize)| {
            let last = first + bytes as u64 - 1;
            let words = [u64::from_le_bytes(LIME), first, last, 0];
            let mut range = words.map(u64::to_le_bytes).concat();
            range.resize(range.len() + bytes, 7);
            range
        };
        ranges.iter().flat_map(one).collect()
    }

    /// A core file with one segment, like QEMU's.
    fn elf(offset: u64, bytes: u64, len: usize) -> Vec<u8> {
        let mut file = vec![0; len];
        file[..8].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0]);
        let mut put = |at: usize, value: u64, size: usize| {
            file[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        };
        put(16, 4, 2); // a core file
        put(18, 62, 2); // x86-64
        put(20, 1, 4);
        put(32, 64, 8); // program headers follow
        put(52, 64, 2);
        put(54, 56, 2);
        put(56, 1, 2); // one of them
        put(64, PT_LOAD.0.into(), 4);
        put(72, offset, 8);
        put(96, bytes, 8);
        put(104, bytes, 8);
        file
    }

    /// The same, with its number of segments in a section's header, and so many.
    fn endless() -> Vec<u8> {
        let mut file = elf(4096, 8192, 12_288);
        let mut put = |at: usize, value: u64, size: usize| {
            file[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        };
        put(40, 256, 8); // section headers
        put(56, 0xffff, 2);
        put(58, 64, 2);
        put(60, 1, 2);
        put(256 + 44, u64::from(u32::MAX), 4);
        file
    }

    /// A whole page that begins so: by its length it could be a plain image.
    fn page(begin: &[u8]) -> Vec<u8> {
        let mut page = begin.to_vec();
        page.resize(4096, 9);
        page
    }

    #[test]
    fn each_format_is_known() {
        assert_eq!(of(&vec![1; 8192]), Ok(vec![(0, 8192)]));
        // Two bytes of gzip's three.
        assert_eq!(of(&page(b"\x1f\x8b\x07")), Ok(vec![(0, 4096)]));
        assert_eq!(
            of(&lime(&[(0x1000, 8192), (0x10_0000, 5000)])),
            Ok(vec![(32, 8224), (8256, 12_352)])
        );
        assert_eq!(of(&elf(4096, 8192, 12_288)), Ok(vec![(4096, 12_288)]));
    }

    #[test]
    fn memory_with_two_names_counts_once() {
        let ranges = disjoint(vec![8192..16_384, 0..12_288, 4096..8192]);
        let places: Vec<_> = ranges
            .iter()
            .map(|range| (range.start, range.end))
            .collect();
        assert_eq!(places, [(0, 12_288), (12_288, 12_288), (12_288, 16_384)]);
    }

    #[test]
    fn damage_is_named() {
        for (bytes, why) in [
            (vec![], "it is empty; a dump is ELF"),
            (vec![1; 7], "shorter than a page; a dump is ELF"),
            (
                vec![1; 5000],
                "5000 bytes is not whole pages; a dump is ELF",
            ),
            (lime(&[(0, 8192)])[..8000].to_vec(), "cut short"),
            ([lime(&[(0, 4096)]), vec![9; 64]].concat(), "byte 4128"),
            (elf(4096, 8192, 8192), "cut short"),
            (elf(4096, u64::MAX, 8192), "cut short"),
            (elf(4096, 100, 8192), "no memory"),
            (endless(), "names 4294967295 segments"),
            (b"KDUMP   and more".to_vec(), "compressed kdump"),
            (page(b"LibvirtQemudSave"), "use `virsh dump --memory-only`"),
            (page(b"LibvirtQemudPart"), "use `virsh dump --memory-only`"),
            (page(b"QEVM\0\0\0\x03"), "a migration of QEMU"),
            (page(b"QFI\xfb\0\0\0\x03"), "a disk of QEMU"),
            (page(b"\x1f\x8b\x08\0"), "`gunzip`"),
            (page(b"\x28\xb5\x2f\xfd"), "`unzstd`"),
            (b"\x7fELF\x01 of 32 bits".to_vec(), "another class"),
        ] {
            let error = of(&bytes).unwrap_err();
            assert!(error.contains(why), "{error}, not {why}");
        }
    }
}
