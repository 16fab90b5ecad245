//! The headers of ELF files and images (elf(5)), of 64 bits and little-endian. Nothing is allocated: the agent reads them, too.
//!
//! The caller gives a function that fills a buffer with the bytes at an offset, or is false. So the headers may lie in a file, or
//! in the memory of this process or another.

/// The kind of a segment that is loaded.
pub const LOAD: u32 = 1;
/// Of the one with the tables of the dynamic linker.
pub const DYNAMIC: u32 = 2;
/// Of the one with the dynamic linker's path.
pub const INTERP: u32 = 3;
/// Of one with notes.
pub(crate) const NOTE: u32 = 4;
/// The flag of a segment that may be executed.
pub const EXECUTE: u32 = 1;
/// Of one that may be written.
pub const WRITE: u32 = 2;
/// Of one that may be read.
pub const READ: u32 = 4;

const HEADER: usize = 64;
const ENTRY: usize = 56;
const SECTION: usize = 64;
/// Sections that are looked at: programs have some 30 to 50.
const MOST_SECTIONS: usize = 128;
/// The longest name of one, with the zero at its end.
const LONGEST_NAME: usize = 16;
/// Class, order of bytes, machine.
const X86_64: [u8; 4] = [2, 1, 62, 0];

/// A program header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Such as [`LOAD`].
    pub kind: u32,
    /// Such as [`WRITE`].
    pub flags: u32,
    /// Where it is in the file.
    pub offset: u64,
    /// Where it is in memory, from the place where the image is put.
    pub address: u64,
    /// Bytes of it in the file.
    pub file_len: u64,
    /// Bytes of it in memory.
    pub len: u64,
}

/// The table of program headers.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    at: u64,
    size: u64,
    count: u64,
}

/// What a file is.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// No ELF file.
    Other,
    /// For another kind of processor.
    Foreign,
    /// For this kind.
    Own(Table),
}

impl Kind {
    /// Of what `read` reads.
    pub fn of(mut read: impl FnMut(u64, &mut [u8]) -> bool) -> Self {
        let mut header = [0; HEADER];
        if !read(0, &mut header) || !header.starts_with(b"\x7fELF") {
            return Self::Other;
        }
        if [header[4], header[5], header[18], header[19]] != X86_64 {
            return Self::Foreign;
        }
        let field = |at, len| number(&header, at, len).unwrap_or(0);
        Self::Own(Table {
            at: field(32, 8),
            size: field(54, 2),
            count: field(56, 2),
        })
    }
}

impl Table {
    /// How many segments there are.
    #[must_use]
    pub fn count(self) -> u64 {
        self.count
    }

    /// The segment with this number, as far as it can be read.
    pub fn segment(
        self,
        index: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Option<Segment> {
        let mut entry = [0; ENTRY];
        let at = self.at.checked_add(index.checked_mul(self.size)?)?;
        if self.size < ENTRY as u64 || index >= self.count || !read(at, &mut entry) {
            return None;
        }
        let short = |at| number(&entry, at, 4).and_then(|field| u32::try_from(field).ok());
        let long = |at| number(&entry, at, 8);
        Some(Segment {
            kind: short(0)?,
            flags: short(4)?,
            offset: long(8)?,
            address: long(16)?,
            file_len: long(32)?,
            len: long(40)?,
        })
    }

    /// All segments in their order; `None` for one that cannot be read.
    pub fn segments(
        self,
        mut read: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> impl Iterator<Item = Option<Segment>> {
        (0..self.count).map(move |index| self.segment(index, &mut read))
    }
}

/// Whether the file has a section of this name, which is short. At most `MOST_SECTIONS` are looked at: the file may be a stranger's.
pub fn has_section(name: &[u8], mut read: impl FnMut(u64, &mut [u8]) -> bool) -> bool {
    let mut header = [0; HEADER];
    if !matches!(Kind::of(&mut read), Kind::Own(_)) || !read(0, &mut header) {
        return false;
    }
    let field = |at, len| number(&header, at, len).unwrap_or(0);
    let (table, size, count) = (field(40, 8), field(58, 2), field(60, 2));
    let mut section = |index: u64| {
        let mut entry = [0; SECTION];
        let at = table.checked_add(index * size)?;
        (size >= SECTION as u64 && index < count && read(at, &mut entry)).then_some(entry)
    };
    let Some(names) = section(field(62, 2)).and_then(|entry| number(&entry, 24, 8)) else {
        return false;
    };
    let all: [_; MOST_SECTIONS] = core::array::from_fn(|index| {
        let entry = section(index as u64)?;
        names.checked_add(number(&entry, 0, 4)?)
    });
    let mut found = [0; LONGEST_NAME];
    let end = name.len().min(LONGEST_NAME - 1);
    let mut is_it =
        |at: u64| read(at, &mut found[..=end]) && found[..end] == *name && found[end] == 0;
    all.into_iter().flatten().any(&mut is_it)
}

/// The little-endian number of `len` bytes at `at`.
#[must_use]
pub fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(len)?)?;
    let digits = field.iter().rev();
    Some(digits.fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

/// What is at an offset of `bytes`, as [`Kind::of`] and [`Table::segments`] ask for it.
pub fn read_slice(bytes: &[u8]) -> impl Fn(u64, &mut [u8]) -> bool + Copy + '_ {
    move |at, to| {
        let from = usize::try_from(at)
            .ok()
            .and_then(|at| bytes.get(at..at.checked_add(to.len())?));
        from.inspect(|from| to.copy_from_slice(from)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn own() -> Vec<u8> {
        let mut head = vec![0; 4096];
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        file.read_exact_at(&mut head, 0).unwrap();
        head
    }

    #[test]
    fn the_segments_of_this_program_are_read() {
        let head = own();
        let Kind::Own(table) = Kind::of(read_slice(&head)) else {
            panic!("it runs here");
        };
        let all: Option<Vec<_>> = table.segments(read_slice(&head)).collect();
        let all = all.unwrap();
        for kind in [LOAD, DYNAMIC, INTERP, NOTE] {
            assert!(all.iter().any(|segment| segment.kind == kind), "{kind}");
        }
        let may = |flags| all.iter().any(|at| at.kind == LOAD && at.flags == flags);
        assert!(may(READ | EXECUTE) && may(READ | WRITE) && !may(WRITE | EXECUTE));
        assert!(
            all.iter()
                .all(|at| at.kind != LOAD || at.len >= at.file_len)
        );
    }

    #[test]
    fn sections_are_found_by_their_whole_names() {
        let file = std::fs::read("/proc/self/exe").unwrap();
        let has = |name: &[u8]| has_section(name, read_slice(&file));
        assert!(has(b".text") && has(b".rodata"));
        assert!(!has(b".tex") && !has(b".none") && !has(b".text and much more of it"));
        assert!(!has_section(b".text", read_slice(&file[..4096])));
    }

    #[test]
    fn damage_gives_no_segments() {
        let head = own();
        for len in 0..HEADER {
            let kind = Kind::of(read_slice(&head[..len]));
            assert!(matches!(kind, Kind::Other), "{len}");
        }
        let damaged = |at: usize, bytes: &[u8]| {
            let mut head = head.clone();
            head[at..at + bytes.len()].copy_from_slice(bytes);
            match Kind::of(read_slice(&head)) {
                Kind::Own(table) => table.segments(read_slice(&head)).next().flatten(),
                _ => None,
            }
        };
        assert!(damaged(16, &[]).is_some());
        // The class, the machine, the place of the table, the size of its entries, their number.
        for (at, bytes) in [
            (4, &[1][..]),
            (18, &[3]),
            (32, &[0xff; 8]),
            (54, &[0, 0]),
            (56, &[0, 0]),
        ] {
            assert_eq!(damaged(at, bytes), None, "{at}");
        }
    }
}
