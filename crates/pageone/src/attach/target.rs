//! A running process that is to get an agent: its properties, and the reasons against it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use rustix::io::Errno;
use sys::credentials::{self, Credentials};
use sys::foreign::ForeignName;
use sys::seize::SeizeError;

use super::board::{BOARD_BYTES, Function, jump_at_beginning};
use super::elf::Elf;
use super::gates::leads_away;
use super::record::{RECORD_BYTES, Record};
use super::site::SEEN;
use crate::human;
use crate::launch;
use crate::program::{self, Obstacle};

/// What /proc tells of a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) range: Range<u64>,
    executable: bool,
    readable: bool,
    offset: u64,
    path: String,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let rights = fields.next()?;
        let offset = hex(fields.next()?)?;
        Some(Self {
            range: hex(start)?..hex(end)?,
            executable: rights.contains('x'),
            readable: rights.contains('r'),
            offset,
            path: fields.nth(2).unwrap_or_default().trim_start().to_owned(),
        })
    }
}

impl Mapping {
    fn is_libc(&self) -> bool {
        let path = self.path.trim_end_matches(" (deleted)");
        path.ends_with("/libc.so.6")
            // musl's is the dynamic linker, too.
            || path.ends_with("/ld-musl-x86_64.so.1")
            || path.ends_with("/libc.musl-x86_64.so.1")
            || path.ends_with("-linux-musl/libc.so")
    }
}

/// What is said of a process without a libc whose functions could have hooks.
const NO_LIBC: &str = "it has no glibc (libc.so.6) or musl, or one that was renamed";

/// The process.
pub(super) struct Target {
    pub(super) pid: u32,
    pub(super) name: ForeignName,
    pub(super) memory: File,
    pub(super) user: u32,
    program: Program,
    mappings: Vec<Mapping>,
}

/// What tells a program that was executed from the next one in the same process.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    /// Device and inode of its file.
    file: (u64, u64),
    /// Its auxiliary vector: it has addresses that the kernel chose by chance.
    auxiliary: Vec<u8>,
}

impl Program {
    fn of(pid: u32) -> std::io::Result<Self> {
        Ok(Self {
            file: program::file_of(pid)?,
            auxiliary: sys::text::bytes(format!("/proc/{pid}/auxv"))?,
        })
    }
}

impl Target {
    /// The process with this number, if an agent can be put into it.
    ///
    /// # Errors
    /// The reason why not.
    pub(super) fn look(pid: u32, began: Option<u64>) -> Result<Self> {
        let target = Self::open(pid)?;
        target.began(began)?;
        // Before its threads are looked at: an agent's has a filter.
        target.has_none()?;
        fits(pid)?;
        is_of_one_user(pid)?;
        Ok(target)
    }

    /// The process with this number, and what was done to it when an agent was put into it.
    ///
    /// # Errors
    /// There is none that could be taken out.
    pub(super) fn look_for_agent(pid: u32, began: Option<u64>) -> Result<(Self, Record)> {
        let target = Self::open(pid)?;
        target.began(began)?;
        if target.has_agent() {
            bail!(NotAttached::OfItsStart);
        }
        if !target.leads_elsewhere() {
            bail!(NotAttached::None);
        }
        let status = sys::text::about(format!("/proc/{pid}/status")).map_err(no_right)?;
        if let Some(tracer) = tracer(&status) {
            bail!(tracer);
        }
        if status.lines().any(|line| line.starts_with("State:\tT")) {
            bail!("it is stopped, so its agent cannot end");
        }
        let record = target.record()?;
        let record = record
            .context("its libc was changed by another tool, or by an agent of another version")?;
        Ok((target, record))
    }

    /// Refuses a process that began at another time. The memory of this one is held: another process may have its number from now on, and
    /// does not count.
    fn began(&self, began: Option<u64>) -> Result<()> {
        match began.is_some_and(|began| sys::usage::began(self.pid).ok() != Some(began)) {
            true => bail!("the process is gone"),
            false => Ok(()),
        }
    }

    /// The note behind the board to which libc's munmap leads.
    fn record(&self) -> Result<Option<Record>> {
        let libc = self.libc()?;
        let Some(board) = self.leads_to(&libc)? else {
            return Ok(None);
        };
        let Some(end) = self.end_of_mapping(board) else {
            return Ok(None);
        };
        // It is behind the code, to some page of which the jump leads.
        let first = board & !4095;
        let last = first + BOARD_BYTES as u64;
        for at in (first..end.min(last + 1)).step_by(RECORD_BYTES) {
            let mut bytes = [0; RECORD_BYTES];
            self.memory.read_exact_at(&mut bytes, at)?;
            let found = Record::decode(&bytes).filter(|record| record.board.contains(&board));
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    fn open(pid: u32) -> Result<Self> {
        sys::process::check_proc().context(program::NO_PROC)?;
        let folder = format!("/proc/{pid}");
        let Ok(meta) = fs::metadata(&folder) else {
            bail!("there is no such process");
        };
        let user = meta.uid();
        if pid == 1 {
            let first = "it is the machine's first process, which must not fail";
            bail!(NotAttached::Unfit(first.to_owned()));
        }
        let subject = sys::subject::Subject::of(pid).map_err(no_right)?;
        if subject.is_kernels {
            bail!("it {}", crate::selector::OF_KERNEL);
        }
        let has_others = || sys::witness::threads(pid, 2).is_ok_and(|threads| threads.count() > 1);
        if subject.has_ended && has_others() {
            bail!("its first thread has ended: the kernel shows nothing of its memory any more");
        }
        let file = sys::text::open(format!("{folder}/exe")).map_err(no_right)?;
        let program = Program::of(pid).map_err(no_right)?;
        if program::is_pageone(pid) {
            bail!(NotAttached::Unfit(
                "it is a command of PageONE itself".to_owned()
            ));
        }
        let obstacle = program::elf_obstacle(&file);
        if let Some(obstacle) = obstacle.filter(Obstacle::bars_attaching) {
            bail!(NotAttached::Unfit(reason(&obstacle)));
        }
        let memory = sys::text::open_as(format!("{folder}/mem"), OFlags::RDWR);
        let mut target = Self {
            pid,
            name: sys::process::comm(pid),
            memory: memory.map_err(no_right)?,
            user,
            program,
            mappings: Vec::new(),
        };
        target.look_again()?;
        // Whatever was opened or read meanwhile is this program's.
        target.memory_while_held()?;
        Ok(target)
    }

    /// Its memory, for a caller that holds one of its threads. If the process executes another program from here on, that thread ends, or
    /// stops before the first instruction ([`sys::seize`]): it makes no call there at addresses of this one.
    ///
    /// # Errors
    /// It has done so before it was held.
    pub(super) fn memory_while_held(&self) -> Result<File> {
        match Program::of(self.pid).map_err(no_right)? == self.program {
            true => Ok(self.memory.try_clone()?),
            false => Err(SeizeError::Gone.into()),
        }
    }

    /// Reads the mappings anew.
    ///
    /// # Errors
    /// The process is gone.
    pub(super) fn look_again(&mut self) -> Result<()> {
        let mut mappings = Vec::new();
        each_line(self.pid, "maps", MOST_MAPS, |line| {
            mappings.extend(Mapping::parse(line));
        })?;
        self.mappings = mappings;
        Ok(())
    }

    /// Refuses a process for which another thing, or nothing, is where the daemon's socket is for us: it may have another
    /// root, or other mounts (a container).
    ///
    /// # Errors
    /// The reason.
    pub(super) fn sees(&self, socket: &Path) -> Result<()> {
        let root = format!("/proc/{}/root", self.pid);
        let there = Path::new(&root).join(socket.strip_prefix("/").unwrap_or(socket));
        let same = |one: &fs::Metadata, other: &fs::Metadata| {
            (one.dev(), one.ino()) == (other.dev(), other.ino())
        };
        match (fs::metadata(socket), fs::metadata(&there)) {
            // Without a daemon there is nothing to reach.
            (Err(_), _) => Ok(()),
            (Ok(own), Ok(its)) if same(&own, &its) => Ok(()),
            (Ok(_), Err(error)) if Errno::from_io_error(&error) == Some(Errno::ACCESS) => {
                Err(no_right(error))
            }
            _ => bail!(
                "the daemon's socket {} is not in its mounts (a container, another root): `pageone attach --mount` mounts it there",
                socket.display()
            ),
        }
    }

    /// Refuses a process in whose root there is no /proc, as after a chroot(2).
    ///
    /// # Errors
    /// The reason.
    pub(super) fn sees_itself(&self) -> Result<()> {
        const OF_PROC: u64 = 0x9fa0; // PROC_SUPER_MAGIC
        let there = format!("/proc/{}/root/proc", self.pid);
        let kind = rustix::fs::statfs(&there).map(|about| about.f_type.cast_unsigned());
        match kind {
            Ok(OF_PROC) => Ok(()),
            Err(Errno::ACCESS) => Err(no_right(Errno::ACCESS)),
            _ => bail!(
                "there is no /proc in its root (chroot), where its agent would look at its mappings: mount it there"
            ),
        }
    }

    /// Whether a thread of it has a seccomp filter, or it has more threads than are asked.
    pub(super) fn has_filters(&self) -> bool {
        let took_long = looking();
        let threads = sys::witness::threads(self.pid, usize::MAX);
        threads.into_iter().flatten().any(|thread| {
            if took_long() {
                return true;
            }
            let status = sys::text::about(format!("/proc/{}/task/{thread}/status", self.pid));
            status.is_ok_and(|status| status.contains("\nSeccomp:\t2\n"))
        })
    }

    /// Whether the agent's library was loaded.
    fn has_agent(&self) -> bool {
        let mut mappings = self.mappings.iter();
        mappings.any(|mapping| sys::subject::is_agent(&mapping.path))
    }

    fn has(&self, part: &str) -> bool {
        let mut mappings = self.mappings.iter();
        mappings.any(|mapping| mapping.path.contains(part))
    }

    fn has_none(&self) -> Result<()> {
        if self.has_agent() {
            bail!(HasAgent::OfItsStart);
        }
        if self.leads_elsewhere() {
            bail!(HasAgent::Attached(self.pid));
        }
        let is_shadow = |mapping: &Mapping| {
            usize::try_from(mapping.range.start).is_ok_and(sys::sanitizer::is_shadow)
        };
        let libraries = ["/libasan.so", "/libtsan.so", "/libhwasan.so", "/liblsan.so"];
        let has_library = libraries.iter().any(|library| self.has(library));
        if has_library || self.mappings.iter().any(is_shadow) {
            bail!("it has a sanitizer, which knows all its memory");
        }
        if self.has("/libpsx.so") {
            bail!(
                "it stops all its threads by a signal and waits for each (libpsx), and an agent's thread takes none"
            );
        }
        Ok(())
    }

    fn leads_elsewhere(&self) -> bool {
        self.libc().is_ok_and(|libc| self.has_hooks(&libc))
    }

    /// Whether the functions of a libc lead elsewhere.
    fn has_hooks(&self, libc: &(Elf, u64)) -> bool {
        matches!(self.leads_to(libc), Ok(Some(_)))
    }

    /// Where the munmap of a libc leads, if it leads elsewhere.
    fn leads_to(&self, (libc, base): &(Elf, u64)) -> Result<Option<u64>> {
        let munmap = libc.find("munmap").context("its libc has no munmap")?;
        let function = self.function(base + munmap)?;
        Ok(match libc.is_musl() {
            true => {
                let all = *base..base + libc.bytes.len() as u64;
                leads_away(&function.code, function.at, &all)
            }
            false => jump_at_beginning(&function),
        })
    }

    /// libc, as it lies in the process, and where.
    ///
    /// # Errors
    /// It has none, another one than glibc, or several (dlmopen(3)), none of which has hooks: the calls of one alone would be seen.
    pub(super) fn libc(&self) -> Result<(Elf, u64)> {
        const MOST: usize = 16;
        let images = self.images_of_libc();
        if let [image] = &images[..] {
            return self.libc_of(image);
        }
        if images.len() > MOST {
            bail!(
                "it has {} C libraries, and {MOST} are looked at",
                images.len()
            );
        }
        let read = images.iter().flat_map(|image| self.libc_of(image));
        match read.into_iter().find(|libc| self.has_hooks(libc)) {
            Some(libc) => Ok(libc),
            None if images.is_empty() => bail!("{NO_LIBC}"),
            None => bail!(
                "it has {} C libraries (dlmopen): the calls of one alone would be seen",
                images.len()
            ),
        }
    }

    fn libc_of(&self, parts: &[&Mapping]) -> Result<(Elf, u64)> {
        const MOST: u64 = 16 << 20;
        let ends = (parts.first(), parts.last());
        let (Some(first), Some(last)) = ends else {
            bail!("{NO_LIBC}");
        };
        let base = first.range.start;
        let len = last.range.end.saturating_sub(base).min(MOST);
        let mut bytes = vec![0; usize::try_from(len)?];
        for part in parts.iter().filter(|part| part.readable) {
            let start = usize::try_from(part.range.start.saturating_sub(base))?;
            let stop = usize::try_from(part.range.end.saturating_sub(base))?;
            if let Some(place) = bytes.get_mut(start..stop) {
                self.memory.read_exact_at(place, part.range.start)?;
            }
        }
        let elf = Elf::loaded(bytes, base).context("its libc cannot be read")?;
        Ok((elf, base))
    }

    /// The mappings of each libc that is executed. A program may have mapped the same file to read it, as debuggers do, and qemu-user
    /// has mapped the libc of its guest. Hooks there would see no call, and what the program discards would keep its old content.
    fn images_of_libc(&self) -> Vec<Vec<&Mapping>> {
        let mut images: Vec<Vec<&Mapping>> = Vec::new();
        for part in self.mappings.iter().filter(|part| part.is_libc()) {
            match images.last_mut() {
                Some(image) if part.offset != 0 => image.push(part),
                _ => images.push(vec![part]),
            }
        }
        // Its code may have been moved to huge pages, which have no file.
        let is_executed = |image: &Vec<&Mapping>| {
            let (start, end) = (image[0].range.start, image[image.len() - 1].range.end);
            let from = self
                .mappings
                .partition_point(|part| part.range.start < start);
            let inside = self.mappings.iter().skip(from);
            let mut inside = inside.take_while(|part| part.range.end <= end);
            inside.any(|part| part.executable)
        };
        images.retain(is_executed);
        images
    }

    /// Where its libc's code lies, and that of others which it has loaded since it was attached (dlmopen).
    pub(super) fn code_of_libc(&self) -> Vec<Range<u64>> {
        let parts = self.mappings.iter().filter(|part| part.executable);
        let parts = parts.filter(|part| part.is_libc());
        parts.map(|part| part.range.clone()).collect()
    }

    /// What its core dumps hold (core(5)).
    pub(super) fn dump(&self) -> Option<u32> {
        let text = sys::text::read(format!("/proc/{}/coredump_filter", self.pid)).ok()?;
        u32::from_str_radix(text.trim_end(), 16).ok()
    }

    /// Puts back what they held, where the agent alone has changed it.
    pub(super) fn set_dump(&self, before: Option<u32>) {
        const PRIVATE_FILES: u32 = 1 << 2;
        let Some(before) = before else { return };
        if before & PRIVATE_FILES == 0 && self.dump() == Some(before | PRIVATE_FILES) {
            // It changes nothing but dumps.
            let path = format!("/proc/{}/coredump_filter", self.pid);
            let _ = sys::text::open_as(path, OFlags::WRONLY)
                .and_then(|file| rustix::io::write(file, format!("{before:#x}").as_bytes()));
        }
    }

    /// How code begins in the process.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn function(&self, at: u64) -> Result<Function> {
        let mut code = [0; SEEN];
        self.memory.read_exact_at(&mut code, at)?;
        Ok(Function { at, code })
    }

    /// An instruction of the process by which it enters the kernel: in the kernel's own library.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn entry(&self) -> Result<u64> {
        const ENTERS: [u8; 2] = [0x0f, 0x05];
        let named = |name: &str| self.mappings.iter().find(|mapping| mapping.path == name);
        let library = named("[vdso]").context("it has no vdso")?;
        let len = library.range.end - library.range.start;
        let mut code = vec![0; usize::try_from(len.min(1 << 20))?];
        self.memory.read_exact_at(&mut code, library.range.start)?;
        let at = code.windows(2).position(|two| two == ENTERS);
        let at = at.context("its vdso has no system call")?;
        Ok(library.range.start + at as u64)
    }

    /// A free place of so many bytes, as close to `near` as there is one.
    pub(super) fn hole(&self, near: u64, len: u64) -> Option<u64> {
        const LOWEST: u64 = 1 << 20;
        const GAP: u64 = 1 << 21;
        let starts = self.mappings.iter().map(|mapping| mapping.range.start);
        let ends = self.mappings.iter().map(|mapping| mapping.range.end);
        let holes = std::iter::once(LOWEST).chain(ends).zip(starts);
        // A stack grows into the hole below it.
        let holes = holes.filter(|(start, end)| end.saturating_sub(*start) >= len + GAP);
        let sides = holes.flat_map(|(start, end)| {
            let above = (end - len - GAP).max(start);
            [start.max(LOWEST), above & !4095]
        });
        sides.min_by_key(|place| place.abs_diff(near))
    }

    /// Where the mapping ends that holds an address.
    pub(super) fn end_of_mapping(&self, at: u64) -> Option<u64> {
        let mut mappings = self.mappings.iter();
        let found = mappings.find(|mapping| mapping.range.contains(&at));
        found.map(|mapping| mapping.range.end)
    }

    /// Whether nothing is mapped in a range.
    pub(super) fn is_free(&self, range: &Range<u64>) -> bool {
        let overlaps =
            |mapping: &Mapping| mapping.range.start < range.end && range.start < mapping.range.end;
        !self.mappings.iter().any(overlaps)
    }

    /// The domain that its agent is to ask for: what the one who attaches says, else its own wish, as of a program that loads the agent. That is
    /// in the environment with which it was started.
    ///
    /// # Errors
    /// Its wish is no domain: without it the agent would be in a wider one. The process is gone.
    pub(super) fn domain(&self, said: Option<&str>) -> Result<Option<String>> {
        if let Some(name) = said {
            return Ok(Some(name.to_owned()));
        }
        let wish = wish(BufReader::new(open_text(self.pid, "environ")?))?;
        if let Some(name) = &wish {
            launch::check_domain(name).context(ITS_WISH)?;
        }
        Ok(wish)
    }

    /// The memory that the program offers to the kernel's KSM (MADV_MERGEABLE).
    ///
    /// # Errors
    /// The process is gone.
    pub(super) fn offered(&self) -> Result<Vec<Range<u64>>> {
        let mut found = Mergeable::default();
        each_line(self.pid, "smaps", MOST_SMAPS, |line| found.take(line))?;
        Ok(found.ranges)
    }

    /// Refuses a process with memory that has a policy (mbind(2)), or whose first thread has one (set_mempolicy(2)): the kernel shows that
    /// one for all memory without its own.
    ///
    /// # Errors
    /// The policy; the process is gone.
    pub(super) fn has_no_policies(&self) -> Result<()> {
        // A kernel without nodes has no policies.
        if !Path::new("/proc/self/numa_maps").exists() {
            return Ok(());
        }
        let mut found = None;
        each_line(self.pid, "numa_maps", MOST_SMAPS, |line| {
            if found.is_none() {
                found = policy(line).map(|(at, policy)| (at.to_owned(), policy.to_owned()));
            }
        })?;
        let Some((at, policy)) = found else {
            return Ok(());
        };
        bail!(
            "its memory at {at} has the NUMA policy {policy}, and a seccomp filter of its refuses get_mempolicy(2) and mbind(2), by which its \
             agent would keep that: allow both calls in its sandbox, or leave the process to the kernel's KSM"
        );
    }
}

/// The mapping of a line of `numa_maps`, and its policy, if that is not the kernel's own choice.
fn policy(line: &str) -> Option<(&str, &str)> {
    let (start, rest) = line.split_once(' ').unwrap_or((line, ""));
    let policy = rest.split(' ').next().unwrap_or_default();
    (policy != "default").then_some((start, policy))
}

/// The most of a list of mappings that is kept: 500 bytes for each of those that there may be by default. A stranger may name a file so
/// that each line has 16 KiB.
const MOST_MAPS: u64 = 32 << 20;
/// The most of what the kernel tells of them: it is not kept.
const MOST_SMAPS: u64 = 128 << 20;

/// The most of an environment that is read: more than the kernel takes at a start. A process may name any of its memory as its environment.
const MOST_ENVIRONMENT: u64 = 8 << 20;
/// What names the variable in messages.
const ITS_WISH: &str = "its PAGEONE_DOMAIN";

/// The domain that an environment asks for: the first variable counts, as for getenv(3), and an empty one is none.
///
/// # Errors
/// It is not UTF-8, or it cannot be read.
fn wish(environment: impl BufRead) -> Result<Option<String>> {
    let value = value_of(b"PAGEONE_DOMAIN=", environment)?.unwrap_or_default();
    let name = String::from_utf8(value).context(ITS_WISH)?;
    Ok(Some(name).filter(|name| !name.is_empty()))
}

/// The value of a variable in the environment with which a process was started; `name` ends with `=`.
///
/// # Errors
/// It cannot be read.
pub(crate) fn variable(pid: u32, name: &[u8]) -> Result<Option<Vec<u8>>> {
    value_of(name, BufReader::new(open_text(pid, "environ")?))
}

fn value_of(name: &[u8], environment: impl BufRead) -> Result<Option<Vec<u8>>> {
    let mut text = environment.take(MOST_ENVIRONMENT);
    let mut word = Vec::new();
    while text.read_until(0, &mut word).map_err(no_right)? > 0 {
        if let Some(value) = word.strip_prefix(name) {
            return Ok(Some(value.strip_suffix(&[0]).unwrap_or(value).to_owned()));
        }
        word.clear();
    }
    Ok(None)
}

/// A file in the folder of a process.
fn open_text(pid: u32, name: &str) -> Result<File> {
    sys::text::open(format!("/proc/{pid}/{name}")).map_err(no_right)
}

/// Reads a file in the folder of a process, `most` bytes at most.
///
/// # Errors
/// The process is gone, or the text is longer.
fn each_line(pid: u32, name: &str, most: u64, mut each: impl FnMut(&str)) -> Result<()> {
    let mut text = BufReader::new(open_text(pid, name)?.take(most + 1));
    let (mut line, mut bytes) = (Vec::new(), 0);
    while text.read_until(b'\n', &mut line).map_err(no_right)? > 0 {
        bytes += line.len() as u64;
        if bytes > most {
            bail!(
                "its list of mappings is too long: {name} has more than {}",
                human::size(most)
            );
        }
        each(String::from_utf8_lossy(&line).trim_end_matches('\n'));
        line.clear();
    }
    Ok(())
}

/// What a process offers, by the lines of its `smaps`.
#[derive(Default)]
struct Mergeable {
    ranges: Vec<Range<u64>>,
    last: Option<Range<u64>>,
}

impl Mergeable {
    fn take(&mut self, line: &str) {
        match line.strip_prefix("VmFlags:") {
            Some(flags) if flags.split(' ').any(|flag| flag == "mg") => {
                self.ranges.extend(self.last.take());
            }
            Some(_) => {}
            // Other lines have no such range at their beginning.
            None => {
                let next = Mapping::parse(line).map(|mapping| mapping.range);
                self.last = next.or(self.last.take());
            }
        }
    }
}

/// Whether the kernel shows others' seccomp filters to this process, as far as can be told before one is held.
fn sees_filters() -> bool {
    let Ok(status) = fs::read_to_string("/proc/self/status") else {
        return false;
    };
    let mut lines = status.lines();
    let mode = lines.find_map(|line| line.strip_prefix("Seccomp:"));
    sys::confined::has_sys_admin(&status) == Some(true)
        && mode.is_none_or(|mode| mode.trim() == "0")
}

/// A thread's tracer, in words, as its status has it.
fn tracer(status: &str) -> Option<String> {
    let mut lines = status.lines();
    let tracer = lines.find_map(|line| line.strip_prefix("TracerPid:"))?;
    let tracer = tracer.trim().parse().ok().filter(|&tracer| tracer != 0)?;
    let name = sys::process::comm(tracer);
    Some(format!(
        "process {tracer} (`{name}`) traces it already, and a process has one tracer"
    ))
}

/// What a thread's status says against an agent.
fn obstacle(status: &str) -> Option<String> {
    let field = |name: &str| {
        let mut lines = status.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
    };
    if let Some(tracer) = tracer(status) {
        return Some(tracer);
    }
    if field("Seccomp") == Some("1") {
        return Some(
            "it is in seccomp's strict mode, which ends it for nearly every call".to_owned(),
        );
    }
    if field("Seccomp") == Some("2") && !sees_filters() {
        return Some(SeizeError::Unread(Errno::ACCESS).to_string());
    }
    let has_shadow = field("x86_Thread_features").is_some_and(|has| has.contains("shstk"));
    has_shadow.then(|| "it has a shadow stack".to_owned())
}

/// How [`HasAgent`] begins.
pub(crate) const HAS_AGENT: &str = "it has an agent already";

/// It needs no other.
#[derive(Debug, thiserror::Error)]
pub(super) enum HasAgent {
    /// It stays until the process ends.
    #[error(
        "{HAS_AGENT}, loaded at its start (`pageone run`, LD_PRELOAD); where nothing was offered start it anew by \
         `pageone run --any -- CMD`"
    )]
    OfItsStart,
    /// As far as its libc tells.
    #[error(
        "{HAS_AGENT} that was attached, or another tool has changed its libc; where nothing was offered: \
         `pageone detach {0} && pageone attach --any {0}`"
    )]
    Attached(u32),
}

/// No agent was put into it.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotAttached {
    #[error("it has no agent")]
    None,
    #[error(
        "it was started by `pageone run` or with LD_PRELOAD, or is linked with the agent, which stays until the process ends; \
         `pageone set run=2` unmerges all guests"
    )]
    OfItsStart,
    /// None could be.
    #[error("{0}")]
    Unfit(String),
}

/// The most CPU time that a look at its threads may take. They are looked at again while they stand. The kernel lists all groups of a
/// thread, 65536 at most, in 10 ms and more.
const MOST_LOOKING: Duration = Duration::from_secs(1);

/// Tells whether a look that begins now has taken more.
fn looking() -> impl Fn() -> bool {
    let begun = sys::process::thread_time();
    move || sys::process::thread_time().saturating_sub(begun) > MOST_LOOKING
}

/// Refuses a process that cannot be held, or in which an agent could not work.
fn fits(pid: u32) -> Result<()> {
    let took_long = looking();
    for thread in sys::witness::threads(pid, usize::MAX).map_err(no_right)? {
        if took_long() {
            bail!(
                "it has so many threads, in so many groups, that to look at them takes more than {MOST_LOOKING:?}"
            );
        }
        let Ok(status) = sys::text::about(format!("/proc/{pid}/task/{thread}/status")) else {
            continue;
        };
        if let Some(obstacle) = obstacle(&status) {
            bail!(obstacle);
        }
    }
    Ok(())
}

/// Refuses a process that would be no guest, as the engine does.
fn is_of_one_user(pid: u32) -> Result<()> {
    let ids = Credentials::of(pid, pid).map_err(no_right)?;
    let user = ids.effective_user();
    if ids != Credentials::plain(user, ids.effective_group()) {
        bail!("it runs as {ids}: it may change its user, and a guest has one user and one group");
    }
    if credentials::is_secret(pid, user).map_err(no_right)? {
        bail!(
            "its memory is a secret (PR_SET_DUMPABLE): it has changed its user since it began, or asked for that. What its own user may not \
             read is shared with none of his processes; started as its user (User= of its unit), it is no secret"
        );
    }
    Ok(())
}

fn reason(obstacle: &Obstacle) -> String {
    match obstacle {
        Obstacle::Static => "it is linked statically: its calls cannot be seen".to_owned(),
        Obstacle::Go => "it is written in Go: its calls cannot be seen".to_owned(),
        Obstacle::OtherLibc(linker) => format!("it is linked for another C library ({linker})"),
        Obstacle::OtherMachine => "it is built for another kind of processor".to_owned(),
        Obstacle::Sanitizer(name) => format!("it is built with a sanitizer ({name})"),
        Obstacle::Secure => "it has rights of its file".to_owned(),
        Obstacle::Valgrind => "it runs under valgrind".to_owned(),
    }
}

/// The reason for an error of /proc.
#[allow(clippy::needless_pass_by_value)] // for map_err
pub(super) fn no_right(error: impl Into<std::io::Error>) -> anyhow::Error {
    let error = error.into();
    match Errno::from_io_error(&error) {
        Some(Errno::ACCESS | Errno::PERM) => anyhow::anyhow!(
            "the kernel does not let this user trace it: that takes the process's own user (and 0 in \
             /proc/sys/kernel/yama/ptrace_scope), or root"
        ),
        Some(Errno::SRCH | Errno::NOENT) => anyhow::anyhow!("the process is gone"),
        Some(Errno::AGAIN) => anyhow::anyhow!(
            "its user has a lease on a file of it in /proc (fcntl(2), F_SETLEASE): end that first"
        ),
        _ => anyhow::Error::new(error).context("cannot look at the process"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n\
Rss:                   4 kB\n\
VmFlags: rd wr mr mw me ac mg sd \n\
7f0000002000-7f0000004000 rw-p 00000000 00:00 0                          [heap]\n\
VmFlags: rd wr mr mw me ac sd \n";

    #[test]
    fn what_speaks_against_a_thread_is_found() {
        let well = "Name:\ta\nTracerPid:\t0\nSeccomp:\t0\nx86_Thread_features:\t\n";
        assert_eq!(obstacle(well), None);
        assert_eq!(obstacle(""), None);
        for (line, reason) in [
            ("TracerPid:\t7\nSeccomp:\t2", "traces it already"),
            ("Seccomp:\t1", "strict"),
            ("x86_Thread_features:\tshstk wrss ", "shadow stack"),
        ] {
            let told = obstacle(line).unwrap();
            assert!(told.contains(reason), "{told}");
        }
        // Filters are read when it is held, by one who may.
        let filtered = obstacle("TracerPid:\t0\nSeccomp:\t2");
        assert_eq!(filtered.is_none(), sees_filters(), "{filtered:?}");
    }

    #[test]
    fn another_program_in_the_same_process_is_known_also_one_of_the_same_file() {
        use std::io::{BufRead, BufReader, Write};
        use std::process::{Command, Stdio};
        const WAITS: &str = "echo a; read line; echo b";
        for (next, name) in [
            ("sleep 60", "another file"),
            ("sh -c 'echo a; read line'", "the same"),
        ] {
            let mut child = Command::new("sh");
            child.args(["-c", &format!("{WAITS}; exec {next}")]);
            let mut child = child
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
            assert_eq!(said.next().unwrap().unwrap(), "a");
            let target = Target::open(child.id()).unwrap();
            target.memory_while_held().unwrap();
            writeln!(child.stdin.as_ref().unwrap(), "go").unwrap();
            assert_eq!(said.next().unwrap().unwrap(), "b");
            // It executes the next program now.
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
            let known = loop {
                let same = target.memory_while_held().is_ok();
                if !same || std::time::Instant::now() > deadline {
                    break !same;
                }
            };
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(known, "{name}");
        }
    }

    #[test]
    fn the_wish_is_the_first_of_the_environment() {
        let wish = |text: &[u8]| super::wish(text);
        let name = |text| wish(text).unwrap();
        assert_eq!(
            name(b"A=1\0PAGEONE_DOMAIN=blue\0PAGEONE_DOMAIN=red\0").as_deref(),
            Some("blue")
        );
        assert_eq!(name(b"PAGEONE_DOMAIN=blue").as_deref(), Some("blue"));
        for none in [
            &b""[..],
            b"\0\0",
            b"PAGEONE_DOMAIN=\0",
            b"XPAGEONE_DOMAIN=x\0PAGEONE_DOMAINS=x\0",
        ] {
            assert_eq!(name(none), None);
        }
        let told = format!("{:#}", wish(b"PAGEONE_DOMAIN=\xff\0").unwrap_err());
        assert!(told.contains(ITS_WISH), "{told}");
        // What is behind the bound is not read.
        let long = std::io::repeat(b'x').take(MOST_ENVIRONMENT);
        let long = long.chain(&b"\0PAGEONE_DOMAIN=blue\0"[..]);
        assert_eq!(super::wish(BufReader::new(long)).unwrap(), None);
    }

    #[test]
    fn offered_memory_is_found() {
        let mut found = Mergeable::default();
        SMAPS.lines().for_each(|line| found.take(line));
        assert_eq!(found.ranges, vec![0x7f00_0000_0000..0x7f00_0000_1000; 1]);
    }

    #[test]
    fn a_policy_is_found() {
        for line in [
            "556374da2000 default file=/usr/bin/head mapped=2 N0=2 kernelpagesize_kB=4",
            "7ffe5b6f9000 default",
        ] {
            assert_eq!(policy(line), None);
        }
        for (line, found) in [
            ("7f00 bind:0 anon=1", ("7f00", "bind:0")),
            (
                "7f00 prefer=static:0 file=/a\\040default",
                ("7f00", "prefer=static:0"),
            ),
            ("7f00 local", ("7f00", "local")),
            ("", ("", "")),
        ] {
            assert_eq!(policy(line), Some(found));
        }
    }

    #[test]
    fn a_mapping_is_read() {
        let line = "7f0a1000-7f0a3000 r-xp 00026000 fe:00 1234     /usr/lib/a b/libc.so.6";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!(mapping.range, 0x7f0a_1000..0x7f0a_3000);
        assert!(mapping.executable && mapping.readable);
        assert_eq!(
            (mapping.offset, mapping.path.as_str()),
            (0x26000, "/usr/lib/a b/libc.so.6")
        );
        assert!(Mapping::parse("Rss:   4 kB").is_none());
    }

    /// A process with these mappings.
    fn with_mappings(maps: &str) -> Target {
        Target {
            pid: 0,
            name: sys::process::comm(std::process::id()),
            memory: File::open("/proc/self/mem").unwrap(),
            user: 0,
            program: Program::of(std::process::id()).unwrap(),
            mappings: maps.lines().filter_map(Mapping::parse).collect(),
        }
    }

    #[test]
    fn the_libc_that_is_executed_is_the_one() {
        let line = |at: u64, access: &str, offset: u64| {
            format!(
                "{at:x}-{:x} {access} {offset:08x} fe:00 9 /lib/libc.so.6\n",
                at + 0x1000
            )
        };
        let image = |at| {
            line(at, "r--p", 0)
                + &line(at + 0x1000, "r-xp", 0x1000)
                + &line(at + 0x2000, "rw-p", 0x2000)
        };
        // Mapped to be read below it and above it.
        let guests = line(0x1_0000, "r--p", 0) + &line(0x1_1000, "rw-p", 0x2000);
        let twice = guests + &image(0x7_0000) + &line(0x9_0000, "r--p", 0);
        let twice = with_mappings(&twice);
        let code = twice.code_of_libc();
        assert_eq!(code.first(), Some(&(0x7_1000..0x7_2000)));
        assert_eq!(code.len(), 1);
        assert_eq!(twice.images_of_libc()[0][0].range.start, 0x7_0000);
        let anonymous = format!("{:x}-{:x} r-xp 00000000 00:00 0\n", 0x7_1000, 0x7_2000);
        let moved = image(0x7_0000).replace(&line(0x7_1000, "r-xp", 0x1000), &anonymous);
        let moved = with_mappings(&moved);
        assert_eq!(moved.images_of_libc()[0][0].range.start, 0x7_0000);
        let two = with_mappings(&(image(0x3_0000) + &image(0x7_0000)));
        let told = two.libc().err().unwrap().to_string();
        assert!(told.contains("2 C libraries"), "{told}");
        let read = with_mappings(&line(0x1_0000, "r--p", 0));
        assert_eq!(read.libc().err().unwrap().to_string(), NO_LIBC);
    }

    #[test]
    fn a_hole_is_the_closest_one() {
        let maps = "100000000-200000000 r 0 0 0\n200400000-300000000 r 0 0 0";
        let target = with_mappings(maps);
        assert_eq!(target.hole(0x2_0000_1000, 0x2000), Some(0x2_0000_0000));
        assert_eq!(target.hole(0x2_003f_0000, 0x2000), Some(0x2_001f_e000));
        assert!(target.is_free(&(0x2_0000_0000..0x2_0000_2000)));
        assert!(!target.is_free(&(0x2_003f_f000..0x2_0040_1000)));
    }

    #[test]
    fn an_agent_of_the_start_and_one_that_was_attached_have_each_its_way_out() {
        let start = HasAgent::OfItsStart.to_string();
        let attached = HasAgent::Attached(7).to_string();
        for said in [&start, &attached] {
            assert!(said.starts_with(HAS_AGENT), "{said}");
        }
        assert!(start.ends_with("`pageone run --any -- CMD`") && !start.contains("detach"));
        assert!(attached.ends_with("`pageone detach 7 && pageone attach --any 7`"));
    }
}
