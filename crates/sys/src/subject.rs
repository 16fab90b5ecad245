//! A process as a doctor sees it: what it is, and what its memory is made of.
//!
//! Everything here goes by number, and is for people to read.
//!
//! Source: proc_pid_status(5), proc_pid_smaps(5), proc_pid_auxv(5).

use std::io::{self, Read as _};

use crate::fault::{self, Point};
use crate::usage::kilobytes;

/// What `/proc/PID/status` tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// Whether it has ended, and its parent has not asked yet.
    pub has_ended: bool,
    /// Whether it is a thread of the kernel's.
    pub is_kernels: bool,
    /// The process that traces it; 0 for none.
    pub tracer: u32,
    /// 0 without seccomp, 1 strict, 2 with filters.
    pub seccomp: u32,
    /// How many filters look at its calls.
    pub filters: u32,
    /// Resident private anonymous memory, in bytes.
    pub anonymous_bytes: u64,
    /// All resident memory, in bytes.
    pub resident_bytes: u64,
}

impl Subject {
    /// What the kernel tells of process `pid`.
    ///
    /// # Errors
    /// `NotFound` when there is none, and what reading gives.
    pub fn of(pid: u32) -> io::Result<Self> {
        fault::check(Point::Proc)?;
        let text = crate::text::about(format!("/proc/{pid}/status"))?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        let number = |name| field(name).and_then(|value| value.trim().parse().ok());
        let has_ended = field("State:").is_some_and(|state| state.trim().starts_with(['Z', 'X']));
        Self {
            has_ended,
            is_kernels: !has_ended && field("VmSize:").is_none(),
            tracer: number("TracerPid:").unwrap_or(0),
            seccomp: number("Seccomp:").unwrap_or(0),
            filters: number("Seccomp_filters:").unwrap_or(0),
            anonymous_bytes: kilobytes(text, "RssAnon:").unwrap_or(0),
            resident_bytes: kilobytes(text, "VmRSS:").unwrap_or(0),
        }
    }
}

/// Whether the dynamic linker ran in secure mode: the program has the rights of its file (`AT_SECURE`, getauxval(3)).
///
/// # Errors
/// What reading gives: it is for the process's own user and root.
pub fn is_secure(pid: u32) -> io::Result<bool> {
    const AT_SECURE: u64 = 23;
    let vector = crate::text::bytes(format!("/proc/{pid}/auxv"))?;
    let (entries, _) = vector.as_chunks::<16>();
    Ok(entries.iter().any(|entry| {
        let (key, value) = entry.split_at(8);
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).unwrap_or(0);
        number(key) == AT_SECURE && number(value) != 0
    }))
}

/// Resident memory of a process by kind, in bytes; and what its mappings show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Makeup {
    /// Private and anonymous: what can be merged.
    pub anonymous: u64,
    /// Shared with others, or meant to be: `MAP_SHARED`, memory files, shared memory.
    pub shared: u64,
    /// Private mappings of files.
    pub files: u64,
    /// Of these, pages that were written: private, and no longer the file's. Programs and libraries are left out: each has such pages.
    pub written: u64,
    /// Of huge pages that were set aside (hugetlb).
    pub huge_tlb: u64,
    /// Locked, of the private anonymous memory and of what is mapped from PageONE's stores.
    pub locked: u64,
    /// Of that, where no userfaultfd tracks writes: a guest has not offered it.
    pub locked_apart: u64,
    /// Mapped from PageONE's stores, privately.
    pub stored: u64,
    /// Where a userfaultfd holds for missing pages or minor faults, of the private anonymous memory.
    pub held: u64,
    /// Where a userfaultfd tracks writes, of the private anonymous memory.
    pub tracked: u64,
    /// Of that memory, what is advised to be of huge pages (`MADV_HUGEPAGE`), and neither locked nor offered to the kernel or an engine:
    /// `--any` leaves it out.
    pub huge_advised: u64,
    /// Where the program itself asked for merging (`MADV_MERGEABLE`), and the kernel's KSM heard it.
    pub mergeable: u64,
    /// Of the private anonymous memory that was offered, to the kernel or to an engine that tracks it, what PageONE leaves alone.
    pub left_alone: LeftAlone,
    /// How many mappings there are.
    pub mappings: u64,
    /// Whether the agent's library is loaded.
    pub has_agent: bool,
    /// Whether AddressSanitizer has its shadow memory there.
    pub has_sanitizer: bool,
}

/// Resident memory that PageONE leaves alone for the kind of its mapping, in bytes; each byte once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftAlone {
    /// Executable.
    pub executable: u64,
    /// Given to a child as zeros (`MADV_WIPEONFORK`).
    pub wiped: u64,
    /// Sealed (mseal).
    pub sealed: u64,
    /// Read-only when it was offered.
    pub read_only: u64,
    /// Not even readable.
    pub no_access: u64,
}

impl LeftAlone {
    /// All of it.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.executable + self.wiped + self.sealed + self.unwritable()
    }

    /// What counts as offered with an engine, which waits until it may be written.
    #[must_use]
    pub fn unwritable(&self) -> u64 {
        self.read_only + self.no_access
    }

    /// Where memory of a mapping with such flags is counted.
    fn place(&mut self, has: impl Fn(&str) -> bool) -> Option<&mut u64> {
        Some(match () {
            () if has("ex") => &mut self.executable,
            () if has("wf") => &mut self.wiped,
            () if has("sl") => &mut self.sealed,
            () if has("wr") => return None,
            () if has("rd") => &mut self.read_only,
            () => &mut self.no_access,
        })
    }
}

/// The memory of process `pid`. The kernel walks its page tables: about 15 ms for each GiB.
///
/// # Errors
/// What reading gives: it is for the process's own user and root.
pub fn makeup(pid: u32) -> io::Result<Makeup> {
    fault::check(Point::Proc)?;
    let file = crate::text::open(format!("/proc/{pid}/smaps"))?;
    let mut text = Vec::new();
    file.take(MOST_TEXT).read_to_end(&mut text)?;
    if text.len() as u64 == MOST_TEXT {
        let why = "its mappings are too many, or have too long names";
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(parse_smaps(&String::from_utf8_lossy(&text)))
}

/// The most that is read of what the kernel tells of mappings: a stranger may name a file so that each takes 17 KiB.
const MOST_TEXT: u64 = 128 << 20;

/// Whether a mapping's path is that of the agent's library, whatever has become of the file.
#[must_use]
pub fn is_agent(path: &str) -> bool {
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    path.ends_with("/libpageone_agent.so")
}

fn parse_smaps(text: &str) -> Makeup {
    let mut makeup = Makeup::default();
    // Each record ends with its flags.
    let mut record = Record::default();
    // The file that was mapped as code last. The loader maps a program's or a library's data behind its code.
    let mut code = None;
    for line in text.lines() {
        let (key, rest) = line.split_once(' ').unwrap_or((line, ""));
        let kilobytes = || {
            rest.trim()
                .strip_suffix(" kB")
                .and_then(|kb| kb.parse().ok())
        };
        match key {
            "Rss:" => record.resident = kilobytes().unwrap_or(0) * 1024,
            "Anonymous:" => record.anonymous = kilobytes().unwrap_or(0) * 1024,
            "Shared_Hugetlb:" | "Private_Hugetlb:" => {
                record.huge_tlb += kilobytes().unwrap_or(0) * 1024
            }
            "VmFlags:" => {
                if rest.split_ascii_whitespace().any(|flag| flag == "ex") {
                    code = record.file;
                }
                let is_data = record.file.is_some() && record.file == code;
                record.count(rest, is_data, &mut makeup);
                record = Record::default();
            }
            _ if !key.ends_with(':') => {
                let start = key.split('-').next();
                let start = start.and_then(|start| usize::from_str_radix(start, 16).ok());
                makeup.has_sanitizer |= start.is_some_and(crate::sanitizer::is_shadow);
                record.begin(rest);
            }
            _ => {}
        }
    }
    makeup
}

/// One mapping, as far as it was read.
#[derive(Default)]
struct Record<'a> {
    file: Option<&'a str>,
    resident: u64,
    /// Of the resident memory, what is no page of a file.
    anonymous: u64,
    huge_tlb: u64,
}

impl<'a> Record<'a> {
    /// Takes the rest of the head line: `perms offset device inode name`.
    fn begin(&mut self, rest: &'a str) {
        let mut words = rest.split_ascii_whitespace().skip(3);
        let is_file = words.next().is_some_and(|inode| inode != "0");
        let name = rest.find(['/', '[']).and_then(|at| rest.get(at..));
        self.file = is_file.then(|| name.unwrap_or_default());
    }

    /// `is_data`: it is a part of a program or a library.
    fn count(&self, flags: &str, is_data: bool, makeup: &mut Makeup) {
        let has = |flag: &str| flags.split_ascii_whitespace().any(|word| word == flag);
        let part = |is: bool| if is { self.resident } else { 0 };
        let lock = |makeup: &mut Makeup| {
            makeup.locked += part(has("lo"));
            makeup.locked_apart += part(has("lo") && !has("uw"));
        };
        let file = self.file.unwrap_or_default();
        makeup.has_agent |= is_agent(file);
        makeup.huge_tlb += self.huge_tlb;
        makeup.mappings += 1;
        let kind = match self.file {
            _ if has("ht") => return,
            _ if has("sh") => &mut makeup.shared,
            Some(_) if file.starts_with("/memfd:pageone-") => {
                lock(makeup);
                &mut makeup.stored
            }
            Some(_) => {
                makeup.written += if is_data { 0 } else { self.anonymous };
                &mut makeup.files
            }
            None => {
                lock(makeup);
                makeup.held += part(has("um") || has("ui"));
                makeup.tracked += part(has("uw"));
                makeup.mergeable += part(has("mg"));
                let is_offered = has("mg") || has("uw");
                makeup.huge_advised += part(has("hg") && !is_offered && !has("lo"));
                if is_offered && let Some(left) = makeup.left_alone.place(has) {
                    *left += self.resident;
                }
                &mut makeup.anonymous
            }
        };
        *kind += self.resident;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_read() {
        let own = Subject::of(std::process::id()).unwrap();
        assert!(own.anonymous_bytes > 0 && own.resident_bytes > own.anonymous_bytes);
        assert!(!own.has_ended && !own.is_kernels && !is_secure(std::process::id()).unwrap());
        let told =
            Subject::parse("State:\tZ (zombie)\nTracerPid:\t7\nSeccomp:\t2\nSeccomp_filters:\t3\n");
        assert_eq!(
            (told.has_ended, told.tracer, told.seccomp, told.filters),
            (true, 7, 2, 3)
        );
        assert!(Subject::parse("State:\tI (idle)\n").is_kernels);
    }

    #[test]
    fn a_name_that_is_no_text_hides_nothing() {
        use std::os::unix::ffi::OsStrExt as _;
        use std::os::unix::process::CommandExt as _;

        let folder = tempfile::tempdir().unwrap();
        let path = folder
            .path()
            .join(std::ffi::OsStr::from_bytes(b"\xff) \xfe"));
        std::os::unix::fs::symlink("/bin/sleep", &path).unwrap();
        let mut sleep = std::process::Command::new(path);
        let mut child = sleep.arg0("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let number = rustix::process::Pid::from_child(&child);
        let found = (
            Subject::of(pid).map(|subject| subject.is_kernels),
            crate::pins::find(pid, 64).map(|pin| pin.is_none()),
            crate::usage::cpu_time(pid).map(|_| ()),
            crate::usage::minor_faults(pid).map(|_| ()),
            crate::credentials::status(pid, pid).map(|_| ()),
            crate::process::parent(pid),
            crate::witness::is_made_by_kernel(pid, pid),
            crate::residence::thread_cpus(number).map(|threads| threads.len()),
        );
        child.kill().unwrap();
        child.wait().unwrap();
        let said = format!("{found:?}");
        let own = std::process::id();
        let expected =
            format!("(Ok(false), Ok(true), Ok(()), Ok(()), Ok(()), Some({own}), false, Ok(1))");
        assert_eq!(said, expected);
    }

    #[test]
    fn memory_under_advice_for_huge_pages_counts_until_it_is_offered() {
        let of = |flags: &str| {
            let record = format!("7f00-8f00 rw-p 0000 00:00 0 \nRss: 4 kB\nVmFlags: {flags} \n");
            parse_smaps(&record).huge_advised
        };
        assert_eq!(of("rd wr hg"), 4096);
        let others = ["rd wr", "rd wr hg uw", "rd wr hg mg", "rd wr hg lo"];
        assert_eq!(others.map(of), [0; 4]);
    }

    #[test]
    fn offered_memory_that_is_left_alone_is_told_apart() {
        let of = |flags: &str| {
            let record = format!("7f00-8f00 rw-p 0000 00:00 0 \nRss: 4 kB\nVmFlags: {flags} \n");
            let left = parse_smaps(&record).left_alone;
            let LeftAlone {
                executable,
                wiped,
                sealed,
                read_only,
                no_access,
            } = left;
            [executable, wiped, sealed, read_only, no_access].map(|bytes| bytes / 1024)
        };
        assert_eq!(of("rd wr mr mw me uw ac"), [0; 5]);
        assert_eq!(of("rd wr ex mr mw me uw ac sl"), [4, 0, 0, 0, 0]);
        assert_eq!(of("rd wr mr mw me mg ac wf"), [0, 4, 0, 0, 0]);
        assert_eq!(of("rd wr mr mw me uw ac sl"), [0, 0, 4, 0, 0]);
        assert_eq!(of("rd mr mw me uw ac"), [0, 0, 0, 4, 0]);
        assert_eq!(of("mr mw me uw ac"), [0, 0, 0, 0, 4]);
        assert_eq!(of("rd mr mw me ac"), [0; 5], "it was not offered");
    }

    #[test]
    fn memory_is_told_apart_by_kind() {
        let record = |head: &str, rss: u64, flags: &str| {
            format!(
                "7f00-8f00 {head}\nSize: 16 kB\nRss: {rss} kB\nAnonymous: {} kB\nTHPeligible: 0\nVmFlags: {flags} \n",
                rss / 2
            )
        };
        let text = [
            record("rw-p 0000 00:00 0 ", 4, "rd wr mr mw me ac sd"),
            record("rw-p 0000 00:00 0  [heap]", 8, "rd wr lo"),
            record("rw-p 0000 00:00 0 ", 16, "rd wr uw"),
            record("rw-p 0000 00:00 0 ", 32, "rd wr um mg"),
            record("rw-s 0000 00:01 7  /dev/zero (deleted)", 64, "rd wr sh"),
            record("r--p 0000 08:01 7  /usr/lib/libpageone_agent.so", 128, "rd mr"),
            record("r-xp 0000 08:01 8  /usr/lib/libc.so.6", 512, "rd ex mr"),
            record("rw-p 0000 08:01 8  /usr/lib/libc.so.6", 1024, "rd wr mr"),
            record("rw-p 0000 00:01 9  /memfd:pageone-store (deleted)", 256, "rd wr lo uw"),
            "8f00-9f00 rw-p 0000 00:0f 5  /anon_hugepage (deleted)\nRss: 0 kB\nPrivate_Hugetlb: 2048 kB\n\
             VmFlags: rd wr ht\n"
                .to_owned(),
        ];
        let kib = 1024;
        let expected = Makeup {
            anonymous: 60 * kib,
            shared: 64 * kib,
            files: (128 + 512 + 1024) * kib,
            written: 64 * kib,
            huge_tlb: 2048 * kib,
            locked: 264 * kib,
            locked_apart: 8 * kib,
            stored: 256 * kib,
            held: 32 * kib,
            tracked: 16 * kib,
            huge_advised: 0,
            mergeable: 32 * kib,
            left_alone: LeftAlone::default(),
            mappings: 10,
            has_agent: true,
            has_sanitizer: false,
        };
        assert_eq!(parse_smaps(&text.concat()), expected);
        assert!(makeup(std::process::id()).unwrap().anonymous > 0);
    }
}
