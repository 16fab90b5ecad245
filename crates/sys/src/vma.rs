//! The mappings of this process, asked of the kernel without allocation.
//!
//! It is asked of the calling thread: where the first one has ended, `/proc/self` tells of no memory.
//!
//! [`Maps::find`] asks for one mapping by address with `PROCMAP_QUERY` (Linux 6.11) and reads the
//! text of `/proc/PID/maps` where the kernel is older. [`attributes`] reads the flags that only
//! the text of `smaps` tells.
//!
//! Source: proc(5), `fs/proc/task_mmu.c`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general as raw;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use crate::fault::{self, Point};
use crate::mapping::{Access, Attributes, Order, Policy};
use crate::text::Passing;

const QUERY: Opcode = opcode::read_write::<raw::procmap_query>(b'f', 17);

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vma {
    /// First address.
    pub start: usize,
    /// The address after the last.
    pub end: usize,
    /// Whether it may be read.
    pub read: bool,
    /// Whether it may be written.
    pub write: bool,
    /// Whether it may be executed.
    pub execute: bool,
    /// Whether writes are shared with other mappings.
    pub shared: bool,
    /// Whether a file lies behind it, memfds included.
    pub file: bool,
    /// The file's device, and its number there; zeros where there is no file.
    pub id: FileId,
}

/// What tells one file from all others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileId {
    /// Major and minor number of the device.
    pub device: (u32, u32),
    /// The number on the device.
    pub inode: u64,
}

impl FileId {
    /// The file behind a descriptor.
    ///
    /// # Errors
    /// What fstat(2) gives.
    pub fn of(file: BorrowedFd<'_>) -> Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        let device = (
            rustix::fs::major(stat.st_dev),
            rustix::fs::minor(stat.st_dev),
        );
        let inode = stat.st_ino;
        Ok(Self { device, inode })
    }
}

impl Vma {
    /// What this mapping allows.
    #[must_use]
    pub fn access(&self) -> Access {
        match (self.read, self.write, self.execute) {
            (_, true, true) => Access::All,
            (_, true, false) => Access::ReadWrite,
            (true, false, true) => Access::ReadExecute,
            (false, false, true) => Access::Execute,
            (true, false, false) => Access::Read,
            (false, false, false) => Access::None,
        }
    }

    /// Whether it is private memory without a file.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        !self.shared && !self.file
    }

    /// How this mapping may be accessed, when its pages can be merged at all: private, anonymous,
    /// readable, not executable.
    #[must_use]
    pub fn mergeable(&self) -> Option<Access> {
        let plain = self.read && !self.execute && !self.shared && !self.file;
        plain.then_some(if self.write {
            Access::ReadWrite
        } else {
            Access::Read
        })
    }
}

/// The open list of this process's mappings: a descriptor that is its own, or another's.
#[derive(Debug)]
pub struct Maps<F: AsFd = OwnedFd>(F);

impl<'a> Maps<BorrowedFd<'a>> {
    /// The list that the caller has open.
    #[must_use]
    pub fn of(list: BorrowedFd<'a>) -> Self {
        Self(list)
    }
}

impl Maps {
    /// Opens the list.
    ///
    /// # Errors
    /// `NOENT` where /proc is not mounted.
    pub fn open() -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(c"/proc/thread-self/maps", flags, Mode::empty()).map(Self)
    }

    /// Its descriptor's number in the table of the thread that opened it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.as_raw_fd().unsigned_abs()
    }
}

impl<F: AsFd> Maps<F> {
    /// The mapping that holds `address`, or the next one above; `None` above the last.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub fn find(&self, address: usize) -> Result<Option<Vma>> {
        fault::check(Point::Maps)?;
        match self.query(address, false) {
            Err(Errno::NOTTY | Errno::INVAL) => self.read_text(address),
            answer => answer,
        }
    }

    /// Calls `each` with every mapping of a file in this process, in ascending order, until it says false.
    ///
    /// # Errors
    /// What reading /proc gives.
    pub fn each_file(&self, mut each: impl FnMut(Vma) -> bool) -> Result<()> {
        fault::check(Point::Maps)?;
        let mut at = 0;
        loop {
            match self.query(at, true) {
                Err(Errno::NOTTY | Errno::INVAL) if at == 0 => break,
                Ok(Some(vma)) if each(vma) => at = vma.end,
                done => return done.map(drop),
            }
        }
        // A file of its own: the place in a text is lost when another reader comes between.
        let text = Maps::open()?;
        let each = |line: &[u8]| parse(line).filter(|vma| vma.file).is_none_or(&mut each);
        each_line(&text.0, usize::MAX, each)
    }

    fn query(&self, address: usize, files_only: bool) -> Result<Option<Vma>> {
        let Some(arg) = query(&self.0, address as u64, files_only)? else {
            return Ok(None);
        };
        let has = |flag: raw::procmap_query_flags| arg.vma_flags & flag as u64 != 0;
        #[allow(clippy::cast_possible_truncation)] // addresses of this process
        Ok(Some(Vma {
            start: arg.vma_start as usize,
            end: arg.vma_end as usize,
            read: has(raw::procmap_query_flags::PROCMAP_QUERY_VMA_READABLE),
            write: has(raw::procmap_query_flags::PROCMAP_QUERY_VMA_WRITABLE),
            execute: has(raw::procmap_query_flags::PROCMAP_QUERY_VMA_EXECUTABLE),
            shared: has(raw::procmap_query_flags::PROCMAP_QUERY_VMA_SHARED),
            file: arg.inode != 0,
            id: FileId {
                device: (arg.dev_major, arg.dev_minor),
                inode: arg.inode,
            },
        }))
    }

    fn read_text(&self, address: usize) -> Result<Option<Vma>> {
        let mut found = None;
        each_line(&self.0, usize::MAX, |line| {
            let vma = parse(line).filter(|vma| vma.end > address);
            found = found.or(vma);
            found.is_none()
        })?;
        Ok(found)
    }
}

/// Asks for the mapping that holds `address`, or the next one above; for one of a file if `files_only`.
fn query(maps: &impl AsFd, address: u64, files_only: bool) -> Result<Option<raw::procmap_query>> {
    fault::check(Point::MapsQuery)?;
    // SAFETY: all fields are integers, for which zero is a value.
    let mut arg: raw::procmap_query = unsafe { std::mem::zeroed() };
    arg.size = size_of::<raw::procmap_query>() as u64;
    arg.query_flags = raw::procmap_query_flags::PROCMAP_QUERY_COVERING_OR_NEXT_VMA as u64;
    if files_only {
        arg.query_flags |= raw::procmap_query_flags::PROCMAP_QUERY_FILE_BACKED_VMA as u64;
    }
    arg.query_addr = address;
    // SAFETY: the structure is what PROCMAP_QUERY takes; it asks for no strings.
    match unsafe { ioctl(maps.as_fd(), Updater::<QUERY, _>::new(&mut arg)) } {
        Ok(()) => Ok(Some(arg)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// How many mappings this process has, by the text of its list.
///
/// # Errors
/// What reading /proc gives.
pub fn count() -> Result<usize> {
    let mut lines = 0;
    each_line(&Maps::open()?.0, usize::MAX, |_| {
        lines += 1;
        true
    })?;
    Ok(lines)
}

/// What only `smaps` tells of a mapping that may be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// What a new mapping there must be told again.
    pub attributes: Attributes,
    /// Whether a userfaultfd tracks writes to it.
    pub tracked: bool,
}

/// Calls `each` with every mapping of `[start, end)`, in ascending order, and what must be told a new mapping
/// there. That is `None` where the mapping must not be merged: it has a flag beyond those known here, or a protection key. So it
/// is with advice on the order of reading, which marks the agent's own memory ([`mapping::mark_own`](crate::mapping::mark_own)).
///
/// # Errors
/// As [`given`].
pub fn attributes(start: usize, end: usize, mut each: impl FnMut(Vma, Option<Told>)) -> Result<()> {
    let is_program = |told: &Told| told.attributes.order == Order::Normal;
    given(start, end, |vma, told| each(vma, told.filter(is_program)))
}

/// As [`attributes`], of memory that is merged already: with the advice that it was given since.
///
/// Reading `smaps` walks all page tables of the process (15 ms/GiB): for once, not for every period.
///
/// # Errors
/// What reading /proc gives.
pub fn given(start: usize, end: usize, mut each: impl FnMut(Vma, Option<Told>)) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let smaps = rustix::fs::open(c"/proc/thread-self/smaps", flags, Mode::empty())?;
    let (mut current, mut keyed): (Option<Vma>, bool) = (None, false);
    each_line(&smaps, RECORD, |line| {
        if let Some(vma) = parse(line) {
            (current, keyed) = (Some(vma), false);
        }
        if let Some(key) = line.strip_prefix(b"ProtectionKey:") {
            keyed = key.trim_ascii() != b"0";
        }
        let Some(flags) = line.strip_prefix(b"VmFlags:") else {
            return current.is_none_or(|vma| vma.start < end);
        };
        let inside = |vma: &Vma| vma.start < end && vma.end > start;
        if let Some(vma) = current.filter(inside) {
            let told = flagged(flags).filter(|_| !keyed);
            // Where the mapping is gone by now the policy cannot be read, and nothing is merged.
            let policy = Policy::at(vma.start.max(start)).ok();
            each(
                vma,
                told.zip(policy).map(|(mut told, policy)| {
                    told.attributes.policy = policy;
                    told
                }),
            );
        }
        // The next mapping is not asked for if it can lie behind the range only.
        current.is_none_or(|vma| vma.end < end)
    })
}

/// Mappings side by side of which the kernel tells the same, but for what PageONE adds or loses: they may have been one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Where it begins, of the range that was asked for.
    pub start: usize,
    /// Where its last mapping begins, which may be `start`.
    pub last: usize,
    /// Where it ends, of that range.
    pub end: usize,
    /// Whether nothing of it may be moved, unmapped or replaced.
    pub sealed: bool,
    /// Whether a userfaultfd is registered for it.
    pub registered: bool,
}

/// Fills `rows` with the first rows of `[start, end)`, in ascending order, and tells how many. Only mappings that `may_join` makes a
/// row of several.
///
/// # Errors
/// What reading /proc gives.
pub fn rows(
    start: usize,
    end: usize,
    may_join: impl Fn(&Vma) -> bool,
    rows: &mut [Row],
) -> Result<usize> {
    /// Tracked, or held; locked on fault, as merged memory is; and what is no program's concern.
    const APART: &[&[u8]] = &[b"um", b"uw", b"ui", b"lf", b"mg", b"sd", b"ac", b"gu"];
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let smaps = rustix::fs::open(c"/proc/thread-self/smaps", flags, Mode::empty())?;
    let (mut current, mut key): (Option<Vma>, usize) = (None, 0);
    let (mut known, mut of_last) = (0, None);
    each_line(&smaps, RECORD, |line| {
        if let Some(vma) = parse(line) {
            (current, key) = (Some(vma), 0);
        }
        if let Some(digits) = line.strip_prefix(b"ProtectionKey:") {
            key = hex(digits.trim_ascii()).unwrap_or(usize::MAX);
        }
        let Some(vma) = current.filter(|vma| vma.end > start) else {
            return true;
        };
        let Some(flags) = line.strip_prefix(b"VmFlags:") else {
            return vma.start < end;
        };
        if vma.start >= end {
            return false;
        }
        let words = flags.split(u8::is_ascii_whitespace);
        let has = |flags: &[&[u8]]| words.clone().any(|word| flags.contains(&word));
        let (sealed, registered) = (has(&[b"sl"]), has(&[b"um", b"uw", b"ui"]));
        // The order is the kernel's, so equal lines give equal sums.
        let mixed = words.filter(|word| !APART.contains(word)).flatten();
        let mixed = mixed.fold(0u64, |sum, &letter| {
            (sum ^ u64::from(letter)).wrapping_mul(0x0100_0000_01b3)
        });
        let told = (mixed, key, Policy::at(vma.start.max(start)).ok());
        let told = may_join(&vma).then_some(told);
        let (from, to) = (vma.start.max(start), vma.end.min(end));
        let goes_on = told.is_some() && told == of_last;
        of_last = told;
        if let Some(row) = rows[..known]
            .last_mut()
            .filter(|row| goes_on && row.end == from)
        {
            (row.last, row.end) = (from, to);
            row.registered |= registered;
        } else if let Some(next) = rows.get_mut(known) {
            *next = Row {
                start: from,
                last: from,
                end: to,
                sealed,
                registered,
            };
            known += 1;
        } else {
            return false;
        }
        vma.end < end
    })?;
    Ok(known)
}

/// A mapping of a file, in some process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileMapping {
    /// First address and the one after the last.
    pub range: std::ops::Range<u64>,
    /// Bytes of the file before what is mapped.
    pub offset: u64,
    /// The file's device.
    pub device: (u32, u32),
    /// The file's number on it.
    pub inode: u64,
    /// What the kernel calls the file.
    pub path: String,
}

fn open_maps(uid: u32, pid: u32) -> Result<Passing> {
    fault::check(Point::Proc)?;
    Passing::open(uid, format!("/proc/{pid}/maps"))
}

/// The most of a list of mappings that is read as text: 500 bytes for each of the mappings that there may be by default.
pub(crate) const MOST_TEXT: usize = 32 << 20;

/// Calls `each` with every mapping from an address on, until it says false; gives where to go on.
pub(crate) fn walk(
    maps: &impl AsFd,
    from: u64,
    mut each: impl FnMut(&raw::procmap_query) -> bool,
) -> Result<Option<u64>> {
    let mut next = from;
    while let Some(vma) = query(maps, next, false)? {
        next = vma.vma_end;
        if !each(&vma) {
            return Ok(Some(next));
        }
    }
    Ok(None)
}

/// Calls `each` with every private mapping of a file in the process `pid` of user `uid`, in ascending order. The path is given of
/// files on `device` only, where paths are short: to find that of sixty thousand mappings takes the kernel minutes, if their file
/// lies below two thousand folders.
///
/// What is mapped all the time this takes is shown, though parts of it may be joined or split
/// meanwhile (`Documentation/filesystems/proc.rst`).
///
/// # Errors
/// What reading /proc gives; `FBIG` where there is only the text of the list, and it is too long.
pub fn private_files(
    uid: u32,
    pid: u32,
    device: (u32, u32),
    mut each: impl FnMut(FileMapping),
) -> Result<()> {
    let maps = open_maps(uid, pid)?;
    let shared = raw::procmap_query_flags::PROCMAP_QUERY_VMA_SHARED as u64;
    let mut failed = Ok(());
    let walked = walk(&maps, 0, |vma| {
        let its = (vma.dev_major, vma.dev_minor);
        if vma.inode == 0 || vma.vma_flags & shared != 0 {
            return true;
        }
        let path = match its == device {
            true => path_at(&maps, vma.vma_start),
            false => Ok(String::new()),
        };
        failed = path.map(|path| {
            each(FileMapping {
                range: vma.vma_start..vma.vma_end,
                offset: vma.vma_offset,
                device: its,
                inode: vma.inode,
                path,
            });
        });
        failed.is_ok()
    });
    failed?;
    match walked {
        Err(Errno::NOTTY | Errno::INVAL) => {}
        walked => return walked.map(drop),
    }
    each_line_by(bounded(&maps), usize::MAX, |line| {
        if let Some((found, false)) = parse_file(line) {
            each(found);
        }
        true
    })
}

/// Reads a list of mappings, not more of it than [`MOST_TEXT`].
fn bounded(maps: &impl AsFd) -> impl FnMut(&mut [u8], u64) -> Result<usize> + '_ {
    let mut bytes = 0;
    move |into, offset| match bytes > MOST_TEXT {
        true => Err(Errno::FBIG),
        false => rustix::io::pread(maps, into, offset).inspect(|len| bytes += len),
    }
}

/// What the kernel calls the file that is mapped at `address`; empty where nothing is mapped there any more.
fn path_at(maps: &impl AsFd, address: u64) -> Result<String> {
    let mut name = [0; 4096];
    // SAFETY: all fields are integers, for which zero is a value.
    let mut arg: raw::procmap_query = unsafe { std::mem::zeroed() };
    arg.size = size_of::<raw::procmap_query>() as u64;
    arg.query_addr = address;
    arg.vma_name_size = 4096;
    arg.vma_name_addr = name.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the structure is what PROCMAP_QUERY takes; its string goes into `name`, which has that size and outlives the call.
    match unsafe { ioctl(maps.as_fd(), Updater::<QUERY, _>::new(&mut arg)) } {
        Ok(()) => {
            let path = name.split(|&byte: &u8| byte == 0).next();
            Ok(String::from_utf8_lossy(path.unwrap_or_default()).into_owned())
        }
        Err(Errno::NOENT) => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Device and number of the file that the process `pid` of user `uid` maps shared at `address`, if it does.
///
/// # Errors
/// What reading /proc gives.
pub fn shared_file(uid: u32, pid: u32, address: u64) -> Result<Option<((u32, u32), u64)>> {
    let maps = open_maps(uid, pid)?;
    let shared = raw::procmap_query_flags::PROCMAP_QUERY_VMA_SHARED as u64;
    match query(&maps, address, false) {
        Err(Errno::NOTTY | Errno::INVAL) => {}
        answer => {
            let is_it = |vma: &raw::procmap_query| {
                vma.vma_start <= address && vma.vma_flags & shared != 0 && vma.inode != 0
            };
            let found = answer?.filter(is_it);
            return Ok(found.map(|vma| ((vma.dev_major, vma.dev_minor), vma.inode)));
        }
    }
    let mut found = None;
    each_line_by(bounded(&maps), usize::MAX, |line| {
        if let Some((file, true)) = parse_file(line)
            && file.range.contains(&address)
        {
            found = Some((file.device, file.inode));
        }
        found.is_none()
    })?;
    Ok(found)
}

/// The mapping of a file that a line tells of, and whether it is shared.
fn parse_file(line: &[u8]) -> Option<(FileMapping, bool)> {
    let mut words = line;
    let mut word = || {
        let end = words.iter().position(|&b| b == b' ')?;
        let (first, rest) = words.split_at(end);
        words = rest.trim_ascii_start();
        std::str::from_utf8(first).ok()
    };
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = word()?.split_once('-')?;
    let shared = word()?.ends_with('s');
    let offset = hex(word()?)?;
    let (major, minor) = word()?.split_once(':')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let inode = word()?.parse().ok()?;
    let path = String::from_utf8_lossy(words).into_owned();
    let found = FileMapping {
        range: hex(start)?..hex(end)?,
        offset,
        device: (number(major)?, number(minor)?),
        inode,
        path,
    };
    (inode != 0).then_some((found, shared))
}

/// The flags by which a mapping may be merged. What is not here is not known to survive a replacement.
/// `io pf mm de` and `ht` are other memory, `gd` grows, `wf` is wiped, `sl` must not be replaced, `dp` may
/// vanish, `ss` and `bt` are code's.
const FLAGS: &[&[u8]] = &[
    // What it allows, and may be made to allow: `PROCMAP_QUERY` tells, and every private mapping may.
    b"rd", b"wr", b"mr", b"mw", b"me",
    // Accounted: each mapping anew. Written softly: a hint to the tools that ask for it.
    b"ac", b"sd",
    // KSM: made to let go. Tracked, or held by a window: told again by registering.
    b"mg", b"um", b"uw", // What `Attributes` has.
    b"nr", b"dc", b"dd", b"hg", b"nh", b"lo", b"lf", b"rr", b"sr",
];

/// What the flags tell, if all of them are known.
fn flagged(flags: &[u8]) -> Option<Told> {
    let words = || {
        flags
            .split(u8::is_ascii_whitespace)
            .filter(|word| !word.is_empty())
    };
    let has = |name: &[u8]| words().any(|word| word == name);
    words().all(|word| FLAGS.contains(&word)).then(|| Told {
        attributes: Attributes {
            dontfork: has(b"dc"),
            dontdump: has(b"dd"),
            locked: has(b"lo"),
            on_fault: has(b"lf"),
            noreserve: has(b"nr"),
            huge: has(b"hg"),
            nohuge: has(b"nh"),
            order: match (has(b"rr"), has(b"sr")) {
                (false, false) => Order::Normal,
                (true, _) => Order::Random,
                (false, true) => Order::Sequential,
            },
            policy: Policy::default(),
        },
        tracked: has(b"uw"),
    })
}

/// Parses the head line of a mapping: `start-end perms offset dev inode path`.
fn parse(line: &[u8]) -> Option<Vma> {
    let mut words = line.split(|&b| b == b' ');
    let range = words.next()?;
    let dash = range.iter().position(|&b| b == b'-')?;
    let (start, end) = (hex(range.get(..dash)?)?, hex(range.get(dash + 1..)?)?);
    let &[r, w, x, s] = words.next()? else {
        return None;
    };
    let device = words.nth(1)?;
    let inode = words.next()?;
    let colon = device.iter().position(|&b| b == b':')?;
    let number = |digits: Option<&[u8]>| u32::try_from(hex(digits?)?).ok();
    let device = (
        number(device.get(..colon))?,
        number(device.get(colon + 1..))?,
    );
    let inode = std::str::from_utf8(inode).ok()?.parse().ok()?;
    Some(Vma {
        start,
        end,
        read: r == b'r',
        write: w == b'w',
        execute: x == b'x',
        shared: s == b's',
        file: inode != 0,
        id: FileId { device, inode },
    })
}

fn hex(digits: &[u8]) -> Option<usize> {
    std::str::from_utf8(digits)
        .ok()
        .and_then(|text| usize::from_str_radix(text, 16).ok())
}

/// What is read of `smaps` at a time: less than any record. A call that has room for several makes one more than
/// fit, drops it, and makes it again in the next call. Each time it walks the mapping's page tables.
const RECORD: usize = 512;

/// Calls `each` with every line of the file, of which at most `piece` bytes are read at a time, until it says false.
/// Lines longer than the buffer are cut; what is asked of them stands at their front.
pub(crate) fn each_line(
    file: &impl AsFd,
    piece: usize,
    each: impl FnMut(&[u8]) -> bool,
) -> Result<()> {
    let read = |into: &mut [u8], offset| rustix::io::pread(file, into, offset);
    each_line_by(read, piece, each)
}

/// The same of what `read` gives: as much as it likes, from an offset on.
pub(crate) fn each_line_by(
    mut read: impl FnMut(&mut [u8], u64) -> Result<usize>,
    piece: usize,
    mut each: impl FnMut(&[u8]) -> bool,
) -> Result<()> {
    const LONGEST: usize = 4096;
    let mut buffer = [0u8; 2 * LONGEST];
    let (mut filled, mut offset, mut cut) = (0, 0u64, false);
    loop {
        let space = buffer.get_mut(filled..).unwrap_or_default();
        let (space, _) = space.split_at_mut(piece.min(space.len()));
        let got = read(space, offset)?;
        if got == 0 {
            return Ok(());
        }
        offset += got as u64;
        filled += got;
        let mut used = 0;
        while let Some(rest) = buffer.get(used..filled)
            && let Some(end) = rest.iter().position(|&b| b == b'\n')
        {
            let line = rest.get(..end).unwrap_or_default();
            if !std::mem::take(&mut cut) && !each(line) {
                return Ok(());
            }
            used += end + 1;
        }
        if used == 0 && filled > LONGEST {
            if !cut && !each(buffer.get(..filled).unwrap_or_default()) {
                return Ok(());
            }
            (cut, used) = (true, filled);
        }
        buffer.copy_within(used..filled, 0);
        filled -= used;
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::mapping::{self, Source};

    /// Two pages of memory, the second of which is for the caller's changes.
    fn two_pages() -> usize {
        let start = mapping::area(8192).unwrap();
        // SAFETY: the area was just made here. It is to be as a guest's memory.
        unsafe { mapping::advise(start, 8192, libc::MADV_NORMAL) }.unwrap();
        start
    }

    #[test]
    fn private_mappings_of_a_file_are_found_with_their_place_in_it() {
        let store = crate::memfd::Store::new("pageone-test").unwrap();
        store.write(0, &[&[1; 4096]; 8]).unwrap();
        let start = mapping::area(8 * 4096).unwrap();
        let source = Source::Store(store.as_fd(), 3 * 4096);
        let attributes = Attributes::default();
        let access = Access::ReadWrite;
        // SAFETY: the area is this test's.
        unsafe { mapping::replace(start + 4096, 8192, source, access, attributes, false) }.unwrap();
        let shared = mapping::share(store.as_fd(), 0, 4096, Access::Read).unwrap() as u64;
        let number = crate::memfd::number(&store).unwrap();
        let own = std::process::id();
        let device = crate::memfd::device().unwrap();
        assert_eq!(shared_file(0, own, shared), Ok(Some((device, number))));
        for other in [shared + 4096, start as u64, start as u64 + 4096] {
            let found = shared_file(0, own, other).unwrap();
            assert!(found.is_none_or(|(_, inode)| inode != number));
        }
        let mut found = Vec::new();
        private_files(0, own, device, |file| found.push(file)).unwrap();
        found.retain(|file| file.inode == number);
        let [file] = &found[..] else {
            panic!("{found:?}")
        };
        let at = (start + 4096) as u64;
        assert_eq!((&file.range, file.offset), (&(at..at + 8192), 3 * 4096));
        assert_eq!(crate::memfd::device().unwrap(), file.device);
        assert_eq!(file.path, "/memfd:pageone-test (deleted)");
    }

    #[test]
    fn the_query_and_the_text_agree() {
        let start = two_pages();
        // SAFETY: the area is this test's.
        unsafe { mapping::protect(start + 4096, 4096, Access::Read) }.unwrap();
        let maps = Maps::open().unwrap();
        for address in [
            0,
            start,
            start + 4096,
            start + 5000,
            the_query_and_the_text_agree as *const () as usize,
        ] {
            let text = maps.read_text(address).unwrap();
            assert!(text.is_some());
            match maps.query(address, false) {
                Err(Errno::NOTTY) => println!("skipped: this kernel lacks PROCMAP_QUERY"),
                answer => assert_eq!(answer.unwrap(), text, "at {address:x}"),
            }
        }
        assert_eq!(
            maps.find(start).unwrap().unwrap().mergeable(),
            Some(Access::ReadWrite)
        );
        assert_eq!(
            maps.find(start + 4096).unwrap().unwrap().mergeable(),
            Some(Access::Read)
        );
        let code = maps
            .find(the_query_and_the_text_agree as *const () as usize)
            .unwrap()
            .unwrap();
        assert_eq!(code.mergeable(), None);
    }

    #[test]
    fn the_query_and_the_text_agree_on_files() {
        let maps = Maps::open().unwrap();
        let mut text = Vec::new();
        each_line(&maps.0, usize::MAX, |line| {
            text.extend(parse(line).filter(|vma| vma.file));
            true
        })
        .unwrap();
        let mut files = Vec::new();
        maps.each_file(|vma| {
            files.push(vma);
            true
        })
        .unwrap();
        assert!(files.is_sorted_by_key(|vma| vma.start));
        assert!(files.iter().all(|vma| vma.file));
        // Other tests map files meanwhile: the code of the program itself stays.
        let code = the_query_and_the_text_agree_on_files as *const () as usize;
        let [text, files] = [text, files].map(|list| {
            let mut list = list.into_iter();
            list.find(|vma| (vma.start..vma.end).contains(&code))
        });
        assert!(text.is_some_and(|vma| vma.execute));
        assert_eq!(files, text);
        let mut first = 0;
        maps.each_file(|_| {
            first += 1;
            false
        })
        .unwrap();
        assert_eq!(first, 1);
    }

    #[test]
    fn rows_are_of_mappings_side_by_side_of_which_the_same_is_told() {
        let start = mapping::area(6 * 4096).unwrap();
        let at = |page: usize| start + page * 4096;
        // SAFETY: the area is this test's.
        unsafe {
            mapping::protect(at(1), 4096, Access::Read).unwrap();
            mapping::advise(at(3), 4096, libc::MADV_MERGEABLE).unwrap();
            mapping::unmap(at(4), 4096).unwrap();
        }
        let row = |pages: [usize; 3]| {
            let [start, last, end] = pages.map(at);
            let (sealed, registered) = (false, false);
            Row {
                start,
                last,
                end,
                sealed,
                registered,
            }
        };
        let told = |pages: Range<usize>, joins: bool, most: usize| {
            let mut found = vec![Row::default(); most];
            let known = rows(at(pages.start), at(pages.end), |_| joins, &mut found).unwrap();
            found.truncate(known);
            found
        };
        let all = [[0, 0, 1], [1, 1, 2], [2, 3, 4], [5, 5, 6]].map(row);
        assert_eq!(told(0..6, true, 9), all);
        assert_eq!(told(0..6, true, 2), all[..2]);
        assert_eq!(told(3..5, true, 2), [row([3, 3, 4])]);
        assert_eq!(told(2..4, false, 3), [[2, 2, 3], [3, 3, 4]].map(row));
        // SAFETY: as above.
        unsafe { mapping::unmap(start, 6 * 4096) }.unwrap();
    }

    #[test]
    fn only_known_flags_are_told() {
        let text = b" rd wr mr mw me lo ac uw sd ";
        let told = flagged(text).unwrap();
        assert!(told.tracked && told.attributes.locked && !told.attributes.huge);
        for strange in ["gd", "wf", "sl", "ht", "??"] {
            assert_eq!(flagged(format!(" rd {strange} wr ").as_bytes()), None);
        }
        let order = |flag: &str| {
            flagged(format!(" rd {flag} wr ").as_bytes())
                .unwrap()
                .attributes
                .order
        };
        assert_eq!(
            (order("sr"), order("rr")),
            (Order::Sequential, Order::Random)
        );
        let start = mapping::area(4096).unwrap();
        let mut seen = None;
        attributes(start, start + 4096, |_, told| seen = Some(told)).unwrap();
        assert_eq!(seen, Some(None), "the agent's own memory is never merged");
    }

    #[test]
    fn attributes_survive_a_replacement() {
        let start = two_pages();
        let set = Attributes {
            dontfork: true,
            dontdump: true,
            locked: true,
            on_fault: true,
            ..Default::default()
        };
        let anonymous = Source::Anonymous;
        // SAFETY: the area is this test's.
        unsafe { mapping::replace(start, 4096, anonymous, Access::ReadWrite, set, false) }.unwrap();
        let mut seen = Vec::new();
        attributes(start, start + 8192, |vma, attributes| {
            seen.push((vma.start, attributes.unwrap().attributes))
        })
        .unwrap();
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[0], (start, set));
        assert!(!seen[1].1.locked);
        // SAFETY: the area is this test's.
        unsafe { *std::ptr::with_exposed_provenance_mut::<u8>(start) = 1 };
    }
}
