//! The command that is to become a guest: where it is, and whether it will load the agent.
//!
//! The dynamic linker loads the agent, so a command without one (static), or with one in secure
//! mode (setuid, setgid, capabilities; ld.so(8)), runs as it always does, but unmerged.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use sys::elf::{self, Kind, Segment, number};
use sys::foreign::ForeignName;
use sys::golang;

/// What is wrong where `sys::process::check_proc` fails.
pub(crate) const NO_PROC: &str =
    "the /proc of this PID namespace is not mounted here: `mount -t proc proc /proc`";

/// Why a command cannot be run, with the exit code shells have for it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FindError {
    #[error("`` is no command: it is empty")]
    Empty,
    #[error("{0}: command not found")]
    NotFound(String),
    #[error("{0}: not executable")]
    NotExecutable(String),
}

impl FindError {
    /// 127 for a command that is not there, 126 for one that cannot be executed.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Empty | Self::NotFound(_) => 127,
            Self::NotExecutable(_) => 126,
        }
    }
}

/// Why a command will not load the agent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Obstacle {
    #[error("is statically linked, so it ignores LD_PRELOAD")]
    Static,
    #[error(
        "runs with the rights of its file (setuid, setgid or capabilities), so the dynamic \
             linker ignores LD_PRELOAD"
    )]
    Secure,
    #[error("is linked for another C library ({0}), which cannot load the agent")]
    OtherLibc(ForeignName),
    #[error("is built for another kind of processor than the agent")]
    OtherMachine,
    #[error(
        "is written in Go, whose runtime discards memory past libc, where the agent cannot see it"
    )]
    Go,
    #[error(
        "is built with a sanitizer ({0}), which ends a program that another library is loaded before"
    )]
    Sanitizer(ForeignName),
    #[error(
        "runs the command on a processor that it imitates, and does not know the agent's system calls"
    )]
    Valgrind,
}

/// Device and inode of the file that a process executes.
///
/// # Errors
/// What stat(2) gives: the process is gone, or not ours to look at.
pub(crate) fn file_of(pid: u32) -> std::io::Result<(u64, u64)> {
    let file = std::fs::metadata(format!("/proc/{pid}/exe"))?;
    Ok((file.dev(), file.ino()))
}

/// Whether a process is a command of PageONE: of this program's own file, or of one with its mark, as a copy or an earlier version.
pub(crate) fn is_pageone(pid: u32) -> bool {
    let is_own = || Ok::<_, std::io::Error>(file_of(pid)? == file_of(std::process::id())?);
    let is_marked = || {
        let file = sys::text::open(format!("/proc/{pid}/exe"))?;
        let read = |at, to: &mut [u8]| file.read_exact_at(to, at).is_ok();
        Ok::<_, std::io::Error>(sys::mark::is_in(read))
    };
    is_own().unwrap_or(false) || is_marked().unwrap_or(false)
}

impl Obstacle {
    /// Whether it keeps an agent from being attached, too: one that is attached finds its way in musl.
    pub(crate) fn bars_attaching(&self) -> bool {
        !matches!(self, Self::OtherLibc(_))
    }

    /// Whether the command would fail with the agent preloaded, rather than ignore it.
    pub(crate) fn is_fatal(&self) -> bool {
        matches!(
            self,
            Self::OtherLibc(_) | Self::Sanitizer(_) | Self::Valgrind
        )
    }
}

/// The file that `command` names, found as execvp(3) does.
///
/// # Errors
/// There is none, or none that may be executed.
pub(crate) fn find(command: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, FindError> {
    let name = || command.to_string_lossy().into_owned();
    if command.is_empty() {
        return Err(FindError::Empty);
    }
    if command.as_bytes().contains(&b'/') {
        let file = PathBuf::from(command);
        return match (file.exists(), executable(&file)) {
            (_, true) => Ok(file),
            (true, false) => Err(FindError::NotExecutable(name())),
            (false, false) => Err(FindError::NotFound(name())),
        };
    }
    let path = path.unwrap_or(OsStr::new("/usr/local/bin:/usr/bin:/bin"));
    let found: Vec<PathBuf> = std::env::split_paths(path)
        .map(|folder| folder.join(command))
        .filter(|file| file.is_file())
        .collect();
    match found.iter().find(|file| executable(file)) {
        Some(file) => Ok(file.clone()),
        None if found.is_empty() => Err(FindError::NotFound(name())),
        None => Err(FindError::NotExecutable(name())),
    }
}

fn executable(file: &Path) -> bool {
    file.is_file() && rustix::fs::access(file, Access::EXEC_OK).is_ok()
}

/// What keeps the agent out of `file`, if anything. A script is judged by its interpreter.
pub(crate) fn obstacle(file: &Path) -> Option<Obstacle> {
    // Often a script that starts the one for the processor.
    let name = file.file_name().unwrap_or_default().as_bytes();
    if name == b"valgrind" || name.starts_with(b"valgrind.") {
        return Some(Obstacle::Valgrind);
    }
    // An interpreter may be a script in turn; the kernel follows four.
    let mut file = file.to_owned();
    for _ in 0..5 {
        match interpreter(&file) {
            Some(interpreter) => file = interpreter,
            None => break,
        }
    }
    if is_secure(&file) {
        return Some(Obstacle::Secure);
    }
    elf_obstacle(&File::open(&file).ok()?)
}

/// What keeps the agent out of a program as it was built, whichever user starts it.
///
/// # Errors
/// What opening it gives: whether anything does is not known then.
pub(crate) fn built(file: &Path) -> io::Result<Option<Obstacle>> {
    Ok(elf_obstacle(&File::open(file)?))
}

/// The program in a script's first line.
fn interpreter(file: &Path) -> Option<PathBuf> {
    let mut line = Vec::new();
    let start = BufReader::new(File::open(file).ok()?).take(256);
    BufRead::read_until(&mut { start }, b'\n', &mut line).ok()?;
    let words = line.strip_prefix(b"#!")?.trim_ascii();
    let program = words.split(|b| b.is_ascii_whitespace()).next()?;
    (!program.is_empty()).then(|| PathBuf::from(OsStr::from_bytes(program)))
}

/// Whether executing `file` changes the rights of the process: then it runs in secure mode.
fn is_secure(file: &Path) -> bool {
    let Ok(meta) = fs::metadata(file) else {
        return false;
    };
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let setuid = meta.mode() & 0o4000 != 0 && meta.uid() != uid.as_raw();
    let setgid = meta.mode() & 0o2010 == 0o2010 && meta.gid() != gid.as_raw();
    // Root has all capabilities anyway, so a file's bring nothing new.
    let mut value = [0_u8; 64];
    let capable = rustix::fs::getxattr(file, "security.capability", &mut value).is_ok();
    setuid || setgid || (capable && !uid.is_root())
}

/// Reads the headers of an ELF file (elf(5)); other files have none and no obstacle.
pub(crate) fn elf_obstacle(file: &File) -> Option<Obstacle> {
    let read = |at, to: &mut [u8]| file.read_exact_at(to, at).is_ok();
    let table = match Kind::of(read) {
        Kind::Other => return None,
        Kind::Foreign => return Some(Obstacle::OtherMachine),
        Kind::Own(table) => table,
    };
    let segments: Vec<_> = table.segments(read).collect::<Option<_>>()?;
    let linker = dynamic_linker(file, &segments)?;
    match linker {
        None if is_linker(file, &segments) => None,
        None => Some(Obstacle::Static),
        Some(linker) if linker.contains("ld-musl") => Some(Obstacle::OtherLibc(linker.into())),
        Some(_) if golang::is_file(table, read) => Some(Obstacle::Go),
        Some(_) => sanitizer(file, &segments).map(|name| Obstacle::Sanitizer(name.into())),
    }
}

/// The text in a file at an offset, up to a zero.
fn text(file: &File, offset: u64, most: u64) -> Option<String> {
    let mut text = vec![0; usize::try_from(most).ok()?];
    let len = file.read_at(&mut text, offset).ok()?;
    let text = text.get(..len)?.split(|&byte| byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

/// The shared runtime of a sanitizer that the program names first or later among its libraries, and that has to be the first of all that
/// are loaded: GCC's, or clang's.
fn sanitizer(file: &File, segments: &[Segment]) -> Option<String> {
    const NEEDED: u64 = 1;
    let runtimes = ["libasan.so", "libclang_rt.asan"];
    let is_runtime = |name: &String| runtimes.iter().any(|runtime| name.starts_with(runtime));
    names(file, segments, NEEDED).into_iter().find(is_runtime)
}

/// Whether the file is glibc's dynamic linker, started as a command: it loads the program that its arguments name, and the agent before it.
fn is_linker(file: &File, segments: &[Segment]) -> bool {
    const SONAME: u64 = 14;
    let own = names(file, segments, SONAME);
    own.iter().any(|name| name == "ld-linux-x86-64.so.2")
}

/// The names of one kind in the dynamic section: `DT_NEEDED` or `DT_SONAME`. None where they cannot be read.
fn names(file: &File, segments: &[Segment], kind: u64) -> Vec<String> {
    const STRINGS: u64 = 5;
    let read = || {
        let dynamic = segments.iter().find(|part| part.kind == elf::DYNAMIC)?;
        let mut table = vec![0; usize::try_from(dynamic.file_len.min(1 << 16)).ok()?];
        file.read_exact_at(&mut table, dynamic.offset).ok()?;
        let entries = || {
            table
                .chunks_exact(16)
                .filter_map(|entry| Some((number(entry, 0, 8)?, number(entry, 8, 8)?)))
        };
        let (_, strings) = entries().find(|entry| entry.0 == STRINGS)?;
        let holds = |part: &&Segment| {
            part.kind == elf::LOAD
                && (part.address..part.address.saturating_add(part.file_len)).contains(&strings)
        };
        let part = segments.iter().find(holds)?;
        let strings = (strings - part.address).checked_add(part.offset)?;
        let named = entries().filter(|entry| entry.0 == kind);
        let names = named.filter_map(|(_, name)| text(file, strings.checked_add(name)?, 256));
        Some(names.collect())
    };
    read().unwrap_or_default()
}

/// The path in the elf::INTERP header, `Some(None)` when there is no such header.
fn dynamic_linker(file: &File, segments: &[Segment]) -> Option<Option<String>> {
    let named = segments.iter().find(|part| part.kind == elf::INTERP);
    let Some(named) = named else {
        return Some(None);
    };
    let mut name = vec![0; usize::try_from(named.file_len.min(4096)).ok()?];
    file.read_exact_at(&mut name, named.offset).ok()?;
    let name = String::from_utf8_lossy(&name);
    Some(Some(name.trim_end_matches('\0').to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_name_in_a_program_is_shown_escaped() {
        let name = "/tmp/\x1b[2J\n/ld-musl-x86_64.so.1";
        let others = [
            Obstacle::OtherLibc(name.into()),
            Obstacle::Sanitizer(name.into()),
        ];
        for shown in others.map(|obstacle| obstacle.to_string()) {
            assert!(!shown.contains(char::is_control), "{shown:?}");
        }
    }

    fn script(folder: &Path, name: &str, text: &[u8], mode: u32) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    /// An ELF header and one program header of the given kind and text.
    fn elf(kind: u32, text: &str) -> Vec<u8> {
        let own = fs::read("/proc/self/exe").unwrap();
        let mut file = own[..64].to_vec();
        file[32..40].copy_from_slice(&64_u64.to_le_bytes());
        file[54..56].copy_from_slice(&56_u16.to_le_bytes());
        file[56..58].copy_from_slice(&1_u16.to_le_bytes());
        let mut entry = vec![0; 56];
        entry[..4].copy_from_slice(&kind.to_le_bytes());
        entry[8..16].copy_from_slice(&120_u64.to_le_bytes());
        entry[32..40].copy_from_slice(&(text.len() as u64).to_le_bytes());
        file.extend(entry);
        file.extend(text.bytes());
        file
    }

    #[test]
    fn commands_are_found_as_a_shell_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = Some(folder.path().as_os_str());
        script(folder.path(), "plain", b"", 0o644);
        let good = script(folder.path(), "good", b"#!/bin/sh\n", 0o755);
        assert_eq!(find(OsStr::new("good"), path), Ok(good.clone()));
        assert_eq!(find(good.as_os_str(), None), Ok(good));
        for (name, code) in [
            ("plain", 126),
            ("none", 127),
            ("/no/such", 127),
            ("", 127),
            ("/", 126),
        ] {
            assert_eq!(
                find(OsStr::new(name), path).unwrap_err().exit_code(),
                code,
                "{name}"
            );
        }
    }

    #[test]
    fn static_and_foreign_programs_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let glibc = script(
            folder,
            "a",
            &elf(elf::INTERP, "/lib64/ld-linux-x86-64.so.2\0"),
            0o755,
        );
        assert_eq!(obstacle(&glibc), None);
        let fixed = script(folder, "b", &elf(1, ""), 0o755);
        assert_eq!(obstacle(&fixed), Some(Obstacle::Static));
        let musl = script(
            folder,
            "c",
            &elf(elf::INTERP, "/lib/ld-musl-x86_64.so.1\0"),
            0o755,
        );
        assert!(obstacle(&musl).unwrap().is_fatal());
        let mut other = elf(1, "");
        other[18] ^= 0xff;
        let other = script(folder, "d", &other, 0o755);
        assert_eq!(obstacle(&other), Some(Obstacle::OtherMachine));
        let line = format!("#! {} -x\n", fixed.display());
        let by_static = script(folder, "e", line.as_bytes(), 0o755);
        assert_eq!(
            obstacle(&by_static),
            Some(Obstacle::Static),
            "a script of a static program"
        );
        assert_eq!(
            obstacle(Path::new("/proc/self/exe")),
            None,
            "this test is dynamic"
        );
        let cut = script(folder, "f", &elf(elf::INTERP, "/lib")[..70], 0o755);
        assert_eq!(obstacle(&cut), None, "too short to tell");
    }

    #[test]
    fn valgrind_is_known_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let wrapper = script(folder.path(), "valgrind", b"#!/bin/sh\n", 0o755);
        let found = obstacle(&wrapper);
        assert_eq!(found, Some(Obstacle::Valgrind));
        assert!(found.is_some_and(|found| found.is_fatal()));
    }

    #[test]
    fn the_dynamic_linker_as_a_command_loads_the_agent() {
        let linker = Path::new("/lib64/ld-linux-x86-64.so.2");
        assert_eq!(obstacle(linker), None);
    }

    #[test]
    fn clangs_shared_runtime_is_a_sanitizer_too() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        fs::write(folder.join("a.c"), "int f(void) { return 0; }\n").unwrap();
        let main = "int f(void); int main(void) { return f(); }\n";
        fs::write(folder.join("b.c"), main).unwrap();
        let runtime = "libclang_rt.asan-x86_64.so";
        let cc = |args: &[&str]| {
            let mut cc = std::process::Command::new("cc");
            assert!(
                cc.current_dir(folder)
                    .args(args)
                    .status()
                    .unwrap()
                    .success()
            );
        };
        cc(&["-shared", "-fPIC", "a.c", "-o", runtime]);
        cc(&["b.c", "-o", "b", "-L.", &format!("-l:{runtime}")]);
        let found = obstacle(&folder.join("b")).unwrap();
        assert!(matches!(&found, Obstacle::Sanitizer(name) if name.raw() == runtime));
    }

    #[test]
    fn a_program_with_a_sanitizer_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("a.c"), folder.path().join("a"));
        fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        let mut cc = std::process::Command::new("cc");
        cc.args(["-fsanitize=address", "-o"])
            .args([&program, &source]);
        // A compiler may lack the runtime, or link it statically.
        let dynamic = cc
            .stderr(std::process::Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
            && fs::read(&program)
                .unwrap()
                .windows(10)
                .any(|at| at == b"libasan.so");
        if !dynamic {
            eprintln!("skipped: no shared libasan");
            return;
        }
        let found = obstacle(&program).unwrap();
        assert!(
            matches!(&found, Obstacle::Sanitizer(name) if name.raw().starts_with("libasan.so"))
        );
        assert!(found.is_fatal());
    }

    #[test]
    fn rights_of_the_file_count_when_they_are_others() {
        let folder = tempfile::tempdir().unwrap();
        let own = script(folder.path(), "own", b"", 0o4755);
        assert_eq!(
            obstacle(&own),
            None,
            "setuid to the same user changes nothing"
        );
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&own, Some(12345), None).unwrap();
            fs::set_permissions(&own, fs::Permissions::from_mode(0o4755)).unwrap();
            assert_eq!(obstacle(&own), Some(Obstacle::Secure));
        }
    }
}
