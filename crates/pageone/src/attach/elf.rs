//! As much of an ELF image as a loader reads (elf(5)): of the agent's file, and of libc in another process's memory.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, bail};
use sys::elf::{self, Kind, number};

const SYMBOL_BYTES: usize = 24;
/// An image in a stranger's memory is what he made of it: so much of it is read that it takes no time.
const MOST_SYMBOLS: usize = 1 << 16;
const MOST_NAME: usize = 256;
/// A libc has some thirty.
const MOST_ENTRIES: usize = 256;

/// A part of an image with rights of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) start: usize,
    pub(super) end: usize,
    /// As the header has them.
    pub(super) rights: u32,
}

/// An image as it lies in memory. All addresses are distances from where it begins.
#[derive(Debug)]
pub(super) struct Elf {
    pub(super) bytes: Vec<u8>,
    pub(super) segments: Vec<Segment>,
    /// Of its dynamic section, by tag; of several with one tag the first.
    dynamic: BTreeMap<u64, u64>,
}

/// A symbol of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Symbol<'a> {
    pub(super) name: &'a [u8],
    /// `None` for one that another image has.
    pub(super) value: Option<u64>,
    pub(super) is_weak: bool,
    len: usize,
    index: usize,
}

/// An entry of a table of relocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Relocation {
    pub(super) place: usize,
    pub(super) kind: u32,
    pub(super) symbol: usize,
    pub(super) addend: u64,
}

fn place(value: u64) -> Option<usize> {
    usize::try_from(value).ok().filter(|&at| at < 1 << 40)
}

impl Elf {
    /// A file, laid out as a loader would.
    ///
    /// # Errors
    /// It is not a library for this kind of processor, or cut.
    pub(super) fn lay_out(file: &[u8]) -> Result<Self> {
        let headers = headers(file).context("it is no library for this processor")?;
        let mut bytes = Vec::new();
        for header in headers.iter().filter(|header| header.kind == elf::LOAD) {
            let [at, offset, filled, len] = header.places;
            let end = at.checked_add(len).filter(|&end| end < 64 << 20);
            let end = end.context("it is too large")?;
            bytes.resize(end.next_multiple_of(4096).max(bytes.len()), 0);
            let from = file.get(offset..offset.saturating_add(filled));
            let to = bytes.get_mut(at..at.saturating_add(filled));
            let (from, to) = from.zip(to).context("it is cut")?;
            to.copy_from_slice(from);
        }
        Self::new(bytes, &headers, 0).context("it has no tables")
    }

    /// What lies in a process from `base` on, where a loader has put it.
    ///
    /// # Errors
    /// It is not such an image.
    pub(super) fn loaded(bytes: Vec<u8>, base: u64) -> Result<Self> {
        let headers = headers(&bytes).context("it is no library for this processor")?;
        Self::new(bytes, &headers, base).context("it has no tables")
    }

    fn new(bytes: Vec<u8>, headers: &[Header], base: u64) -> Option<Self> {
        let dynamic = headers.iter().find(|header| header.kind == elf::DYNAMIC)?;
        let [at, _, _, len] = dynamic.places;
        let entries = bytes.get(at..at.checked_add(len)?)?.chunks_exact(16);
        let entry = |entry: &[u8]| Some((number(entry, 0, 8)?, number(entry, 8, 8)?));
        // Loaders write addresses into some of them.
        let own = |(tag, value): (u64, u64)| (tag, value.checked_sub(base).unwrap_or(value));
        let mut dynamic = BTreeMap::new();
        for (tag, value) in entries.take(MOST_ENTRIES).filter_map(entry).map(own) {
            dynamic.entry(tag).or_insert(value);
        }
        let loads = headers.iter().filter(|header| header.kind == elf::LOAD);
        let segments = loads.map(Header::segment).collect();
        Some(Self {
            bytes,
            segments,
            dynamic,
        })
    }

    fn entry(&self, tag: u64) -> Option<usize> {
        place(*self.dynamic.get(&tag)?)
    }

    /// A name that ends with a zero, or what is read of it.
    pub(super) fn text(&self, at: usize) -> Option<&[u8]> {
        let rest = self.bytes.get(at..)?;
        let rest = rest.get(..MOST_NAME).unwrap_or(rest);
        rest.split(|&byte| byte == 0).next()
    }

    /// The symbol with a number.
    pub(super) fn symbol(&self, index: usize) -> Option<Symbol<'_>> {
        const STRINGS: u64 = 5;
        const SYMBOLS: u64 = 6;
        let at = self.entry(SYMBOLS)?.checked_add(index * SYMBOL_BYTES)?;
        let name = self.entry(STRINGS)? + place(number(&self.bytes, at, 4)?)?;
        let kind = number(&self.bytes, at + 4, 1)?;
        let section = number(&self.bytes, at + 6, 2)?;
        let value = number(&self.bytes, at + 8, 8)?;
        let len = place(number(&self.bytes, at + 16, 8)?)?;
        Some(Symbol {
            name: self.text(name)?,
            value: (section != 0).then_some(value),
            is_weak: kind >> 4 == 2,
            len,
            index,
        })
    }

    /// How many symbols there are, by the table through which loaders find them.
    fn symbols(&self) -> Option<usize> {
        const HASHES: u64 = 0x6fff_fef5;
        let at = self.entry(HASHES)?;
        let word = |at: usize| place(number(&self.bytes, at, 4)?);
        let (buckets, first, bloom) = (word(at)?, word(at + 4)?, word(at + 8)?);
        let table = at + 16 + bloom.checked_mul(8)?;
        let chains = table.checked_add(buckets.checked_mul(4)?)?;
        let starts = (0..buckets.min(MOST_SYMBOLS)).map(|bucket| word(table + bucket * 4));
        let last = starts.max().flatten()?;
        if last < first {
            return Some(first);
        }
        let ends =
            |&symbol: &usize| word(chains + (symbol - first) * 4).is_none_or(|hash| hash & 1 == 1);
        let last = (last..MOST_SYMBOLS).find(ends)?;
        Some(last + 1)
    }

    /// Where the image has what it calls `name`, in the version that programs are linked with.
    pub(super) fn find(&self, name: &str) -> Option<u64> {
        // Behind all that an image may have, a stranger's symbol leads nowhere.
        self.named(name)?.value.filter(|&at| place(at).is_some())
    }

    /// Whether this is musl, as a libc: glibc tells its version.
    pub(super) fn is_musl(&self) -> bool {
        self.find("gnu_get_libc_version").is_none()
    }

    /// From where to where a function reaches.
    pub(super) fn extent(&self, name: &str) -> Option<Range<usize>> {
        let symbol = self.named(name)?;
        let start = place(symbol.value?)?;
        Some(start..start.checked_add(symbol.len)?)
    }

    fn named(&self, name: &str) -> Option<Symbol<'_>> {
        const VERSIONS: u64 = 0x6fff_fff0;
        const HIDDEN: u64 = 0x8000;
        let versions = self.entry(VERSIONS);
        let is_hidden = |index: usize| {
            let version = versions.and_then(|at| number(&self.bytes, at + index * 2, 2));
            version.is_some_and(|version| version & HIDDEN != 0)
        };
        let all = (0..self.symbols()?).filter_map(|index| self.symbol(index));
        let mut named = all.filter(|symbol| symbol.name == name.as_bytes());
        named.find(|symbol| !is_hidden(symbol.index))
    }

    /// All relocations.
    ///
    /// # Errors
    /// The tables are of a kind that is not known.
    pub(super) fn relocations(&self) -> Result<Vec<Relocation>> {
        const TABLES: [(u64, u64); 2] = [(7, 8), (23, 2)];
        const OTHER: [u64; 2] = [17, 36];
        if OTHER.iter().any(|&tag| self.entry(tag).is_some()) {
            bail!("its relocations are of a kind that is not known");
        }
        let mut all = Vec::new();
        for (start, len) in TABLES {
            let Some((start, len)) = self.entry(start).zip(self.entry(len)) else {
                continue;
            };
            let table = self.bytes.get(start..start.saturating_add(len));
            for entry in table.context("it is cut")?.chunks_exact(24) {
                let field = |at, len| number(entry, at, len).and_then(place);
                all.push(Relocation {
                    place: field(0, 8).context("a place is far away")?,
                    kind: u32::try_from(number(entry, 8, 4).unwrap_or(0))?,
                    symbol: field(12, 4).context("a symbol is far away")?,
                    addend: number(entry, 16, 8).unwrap_or(0),
                });
            }
        }
        Ok(all)
    }
}

/// A program header.
struct Header {
    kind: u32,
    rights: u32,
    /// Where it lies in memory and in the file, and how long it is there and in memory.
    places: [usize; 4],
}

impl Header {
    fn segment(&self) -> Segment {
        let [at, _, _, len] = self.places;
        Segment {
            start: at & !4095,
            end: (at + len).next_multiple_of(4096),
            rights: self.rights,
        }
    }
}

fn headers(bytes: &[u8]) -> Option<Vec<Header>> {
    let read = elf::read_slice(bytes);
    let Kind::Own(table) = Kind::of(read) else {
        return None;
    };
    let header = |segment: Option<elf::Segment>| {
        let segment = segment?;
        Some(Header {
            kind: segment.kind,
            rights: segment.flags,
            places: [
                place(segment.address)?,
                place(segment.offset)?,
                place(segment.file_len)?,
                place(segment.len)?,
            ],
        })
    };
    table.segments(read).map(header).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stranger's table of tables may be as long as his image.
    #[test]
    fn few_entries_are_read_of_however_many() {
        let bytes: Vec<u8> = (0..1_u64 << 21).flat_map(u64::to_le_bytes).collect();
        let dynamic = Header {
            kind: elf::DYNAMIC,
            rights: 0,
            places: [0, 0, bytes.len(), bytes.len()],
        };
        let elf = Elf::new(bytes, &[dynamic], 0).unwrap();
        assert_eq!(elf.dynamic.len(), MOST_ENTRIES);
        assert_eq!((elf.symbols(), elf.find("munmap")), (None, None));
    }

    #[test]
    fn what_is_no_image_is_refused() {
        for bytes in [&b""[..], b"\x7fELF", &[0; 4096]] {
            assert!(Elf::lay_out(bytes).is_err());
        }
        let mut file = std::fs::read("/bin/sh").unwrap();
        assert!(Elf::lay_out(&file).is_ok());
        // Whatever is changed in its headers, it is read or refused.
        for at in (0..1024).step_by(3) {
            let byte = std::mem::replace(&mut file[at], 0xff);
            let _ = Elf::lay_out(&file).map(|elf| elf.find("main"));
            file[at] = byte;
        }
        file.truncate(5000);
        assert!(Elf::lay_out(&file).is_err());
    }
}
