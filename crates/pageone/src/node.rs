//! The node of a process that starts: for `run` and `daemon`.
//!
//! Starts take their memory later than they are placed. Without more, all that start at once would see the same free memory, and go to one
//! node. So each start notes its future need in a file beside the socket, and those after it count that as taken:
//!
//! ```text
//!   lock the file ─▶ free memory less what is noted ─▶ choose ─▶ note ─▶ unlock ─▶ exec
//! ```
//!
//! A note counts less by what its process has in memory by now; as a start it counts whole. After [`EXPIRY`] it does not count at all: a
//! guest that has not touched its memory by then may never do so. A process that forks and ends, as `qemu -daemonize` does,
//! cannot be followed: its note counts whole for [`UNFOLLOWED`]. The file is the user's own, of mode 0600: a writer changes
//! nothing but where his own starts go. What is not understood in it is dropped.
//!
//! A process that is attached is noted as well ([`note_attached`]), as if it had been placed where it runs when it began.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use numa::placement::{NodeRequest, Starts, Strictness};
use numa::{Choice, MemoryReport, NodeId, Topology};
use rustix::fs::OFlags;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::flock;
use crate::human;
use crate::output::say;
use crate::within::within;

/// How long a note counts at most.
const EXPIRY: Duration = Duration::from_secs(300);
/// How long one counts whose process has ended.
const UNFOLLOWED: Duration = Duration::from_secs(30);
/// How long the file's lock is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a command takes of which nothing is known: so much that others go elsewhere where nodes are alike.
const UNKNOWN: u64 = 64 << 20;
/// The longest file that is read, and the most notes in it.
const MOST_BYTES: u64 = 1 << 20;
const MOST_NOTES: usize = 4096;

/// What a start will need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Note {
    pid: u32,
    /// When the process began, in ticks since boot: its number may be another's later.
    began: u64,
    /// When this was noted, in seconds since boot.
    at: u64,
    claims: Vec<(NodeId, u64)>,
}

/// What there is to say of a process.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Process {
    Gone,
    /// It lives, and had so many bytes in memory.
    Lives(u64),
}

impl Note {
    fn process(&self) -> Process {
        let same = sys::usage::began(self.pid).is_ok_and(|began| began == self.began);
        // The most it had: what is merged, and not read since, is in no page table. An attached process may have given back more since.
        match sys::usage::most_resident_bytes(self.pid) {
            Ok(bytes) if same => Process::Lives(bytes),
            _ => Process::Gone,
        }
    }

    /// What it will still take, by node; `None` once it does not count any more.
    fn untaken(&self, now: u64, process: Process) -> Option<Vec<(NodeId, u64)>> {
        // One from before a reboot, or from a later time, is damaged.
        let age = Duration::from_secs(now.checked_sub(self.at)?);
        let (most, touched) = match process {
            Process::Gone => (UNFOLLOWED, 0),
            Process::Lives(bytes) => (EXPIRY, bytes),
        };
        let all = self
            .claims
            .iter()
            .try_fold(0_u64, |sum, (_, bytes)| sum.checked_add(*bytes))?;
        let left = all.saturating_sub(touched);
        (age < most && all > 0).then(|| {
            let part = |bytes: u64| u128::from(bytes) * u128::from(left) / u128::from(all);
            let rest = self.claims.iter();
            rest.map(|&(node, bytes)| (node, u64::try_from(part(bytes)).unwrap_or(0)))
                .collect()
        })
    }
}

/// The notes of starts, locked.
struct Notes {
    file: File,
    notes: Vec<Note>,
}

impl Notes {
    /// Opens and locks the file beside `socket`.
    fn lock(socket: &Path) -> Result<Self> {
        let path = path(socket);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600);
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let flags = i32::try_from(flags.bits()).context("flags of open(2)")?;
        let file = options.custom_flags(flags).open(&path);
        let mut file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let its = file.metadata()?;
        let own = rustix::process::geteuid().as_raw();
        if !its.is_file() || its.nlink() != 1 || its.uid() != own || its.mode() & 0o077 != 0 {
            bail!(
                "{} is not a file of user {own} alone: remove it, or name another place with --socket",
                path.display()
            );
        }
        flock::within(&file, PATIENCE)
            .with_context(|| format!("another start holds {}", path.display()))?;
        let mut text = String::new();
        // Other bytes than text are a damaged file: it begins afresh.
        if (&mut file)
            .take(MOST_BYTES)
            .read_to_string(&mut text)
            .is_err()
        {
            text.clear();
        }
        let lines = text.lines().take(MOST_NOTES);
        let notes = lines.filter_map(|line| serde_json::from_str(line).ok());
        Ok(Self {
            notes: notes.collect(),
            file,
        })
    }

    /// Drops notes that do not count any more; gives what the others were promised, and will still take.
    fn starts(&mut self, now: u64, process: impl Fn(&Note) -> Process) -> Starts {
        let mut starts = Starts::default();
        self.notes.retain(|note| {
            let untaken = note.untaken(now, process(note));
            if let Some(untaken) = &untaken {
                starts.add_running(&note.claims, untaken);
            }
            untaken.is_some()
        });
        starts
    }

    fn write(&mut self) -> Result<()> {
        let excess = self.notes.len().saturating_sub(MOST_NOTES);
        self.notes.drain(..excess);
        let mut text = String::new();
        for note in &self.notes {
            text += &serde_json::to_string(note)?;
            text.push('\n');
        }
        self.file.rewind()?;
        self.file.set_len(0)?;
        self.file.write_all(text.as_bytes())?;
        Ok(())
    }
}

/// Where starts are noted.
fn path(socket: &Path) -> PathBuf {
    socket.with_extension("starts")
}

fn seconds_since_boot() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    u64::try_from(now.tv_sec).unwrap_or(0)
}

/// Puts this thread, and what it starts, on the CPUs and the memory of a node. With a `socket` the start is noted beside it, and notes of others
/// count. Where notes cannot be kept, that is said, and the node is chosen without.
///
/// # Errors
/// There is no such node, or the kernel refuses.
pub(crate) fn place(node: NodeRequest, need: u64, socket: Option<&Path>) -> Result<()> {
    let topology = Topology::live()?;
    let mut notes = socket.and_then(|socket| match Notes::lock(socket) {
        Ok(notes) => Some(notes),
        Err(error) => {
            say(&format!(
                "pageone: starts at the same time may share a node: {error:#}"
            ));
            None
        }
    });
    let now = seconds_since_boot();
    let starts = notes.as_mut().map(|notes| notes.starts(now, Note::process));
    let memory = MemoryReport::live()?;
    let choice = node.choose(&topology, &memory, &starts.unwrap_or_default(), need)?;
    choice.apply(&topology, Strictness::Preferred)?;
    if let Some(mut notes) = notes {
        let pid = std::process::id();
        notes.notes.push(Note {
            pid,
            began: sys::usage::began(pid)?,
            at: now,
            claims: choice.claims(),
        });
        if let Err(error) = notes.write() {
            say(&format!(
                "pageone: starts after this one may share its node: {error:#}"
            ));
        }
    }
    Ok(())
}

/// The process that this one has placed and started is the one that will take the memory.
pub(crate) fn hand_over(socket: &Path, child: u32) -> Result<()> {
    let mut notes = Notes::lock(socket)?;
    let own = std::process::id();
    let began = sys::usage::began(child)?;
    if let Some(note) = notes.notes.iter_mut().rev().find(|note| note.pid == own) {
        (note.pid, note.began) = (child, began);
        notes.write()?;
    }
    Ok(())
}

/// Notes a process that runs and was attached, on the node where it ran last: if it began lately, or its user says what it will need.
/// What it was started with tells that otherwise, as with [`need`]; of one that tells nothing, nothing is noted.
///
/// # Errors
/// The process is gone, the file is not this user's, or the firmware's tables are not understood.
pub(crate) fn note_attached(socket: &Path, pid: u32, need: Option<u64>) -> Result<()> {
    let topology = Topology::live()?;
    if topology.memory_nodes().nth(1).is_none() {
        return Ok(());
    }
    let (began, now) = (sys::usage::began(pid)?, seconds_since_boot());
    let at = need.map_or(sys::usage::seconds_since_boot(began), |_| now);
    let need = match need {
        None if now.saturating_sub(at) < EXPIRY.as_secs() => need_of(pid),
        said => said,
    };
    let its = Pid::from_raw(i32::try_from(pid)?).context("no process has the number 0")?;
    let cpu = sys::residence::thread_cpus(its)?.first().map(|two| two.1);
    let node = cpu.and_then(|cpu| topology.node_of_cpu(cpu));
    let Some((need, node)) = need.zip(node) else {
        return Ok(());
    };
    let mut notes = Notes::lock(socket)?;
    notes.starts(now, Note::process);
    let is_its = |note: &Note| note.pid == pid && note.began == began;
    // `run` has placed it.
    if !notes.notes.iter().any(is_its) {
        let free = MemoryReport::live()?.free_bytes();
        // It may be a stranger's word.
        let all = topology.memory_nodes().map(|node| node.memory_bytes).sum();
        let claims = Choice::at(&topology, node, &free, need.min(all))?.claims();
        notes.notes.push(Note {
            pid,
            began,
            at,
            claims,
        });
        notes.write()?;
    }
    Ok(())
}

/// What a process that runs was started to need. It may take as long as it likes to show its command line, and is waited for a moment.
fn need_of(pid: u32) -> Option<u64> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let line = within(PATIENCE, move || sys::title::command_line(pid));
    let line = line.ok()?.ok()?;
    let words = line.split(|&byte| byte == 0);
    let words: Vec<_> = words
        .map(|word| OsStr::from_bytes(word).to_owned())
        .collect();
    // A stranger says what he likes; more than its group allows it will not be.
    let (said, limit) = (said_of(&words), sys::process::cgroup_memory_limit(pid));
    said.zip(limit)
        .map(|(said, limit)| said.min(limit))
        .or(said)
        .or(limit)
}

/// What a command will need, in bytes: what its `-m` says if it is QEMU, else the limit of the cgroup that it starts in, else little.
pub(crate) fn need(command: &[OsString]) -> u64 {
    said_of(command)
        .or_else(|| sys::process::cgroup_memory_limit(std::process::id()))
        .unwrap_or(UNKNOWN)
}

/// What a command says itself, if it is QEMU.
fn said_of(command: &[OsString]) -> Option<u64> {
    let (name, arguments) = command.split_first()?;
    let name = Path::new(name).file_name()?;
    let is_qemu = name.as_encoded_bytes().starts_with(b"qemu");
    is_qemu.then(|| memory_of_qemu(arguments)).flatten()
}

/// The last `-m` counts, as for QEMU: `-m 2G`, `-m 512` (MiB), `-m size=2G,slots=4`.
fn memory_of_qemu(arguments: &[OsString]) -> Option<u64> {
    let texts: Vec<_> = arguments
        .iter()
        .map(|text| text.to_str().unwrap_or_default())
        .collect();
    let said = texts
        .windows(2)
        .rev()
        .find(|two| matches!(two[0], "-m" | "--m"))?;
    let sizes = said[1]
        .split(',')
        .filter_map(|part| match part.split_once('=') {
            None => Some(part),
            Some(("size", size)) => Some(size),
            Some(_) => None,
        });
    let size = sizes.into_iter().next()?;
    match size.parse::<u64>() {
        Ok(mib) => mib.checked_mul(1 << 20),
        Err(_) => human::size_of(size).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn qemu_says_what_it_needs() {
        for (command, mib) in [
            ("/usr/bin/qemu-system-x86_64 -m 2G", 2048),
            ("qemu-kvm -smp 2 -m 512 -nographic", 512),
            ("qemu-kvm -m 64 -m size=1G,slots=2,maxmem=8G", 1024),
            ("qemu-kvm -m slots=2,size=96M", 96),
        ] {
            assert_eq!(need(&words(command)), mib << 20, "{command}");
        }
        assert_eq!(memory_of_qemu(&words("-m")), None);
        assert_eq!(memory_of_qemu(&words("-m much")), None);
        assert_eq!(need(&words("python3 -m http")), need(&[]), "not QEMU's");
    }

    fn note(pid: u32, at: u64) -> Note {
        let claims = vec![(NodeId(0), 600), (NodeId(1), 200)];
        Note {
            pid,
            began: 1,
            at,
            claims,
        }
    }

    #[test]
    fn a_note_counts_until_its_memory_is_touched_or_it_expires() {
        let rest = |now, process| note(1, 100).untaken(now, process);
        let whole = Some(vec![(NodeId(0), 600), (NodeId(1), 200)]);
        assert_eq!(rest(100, Process::Lives(0)), whole);
        let half = Some(vec![(NodeId(0), 300), (NodeId(1), 100)]);
        assert_eq!(rest(399, Process::Lives(400)), half);
        let taken = Some(vec![(NodeId(0), 0), (NodeId(1), 0)]);
        assert_eq!(rest(100, Process::Lives(800)), taken);
        assert_eq!(rest(400, Process::Lives(0)), None);
        assert_eq!(
            (rest(129, Process::Gone), rest(130, Process::Gone)),
            (whole, None)
        );
        assert_eq!(rest(99, Process::Lives(0)), None, "noted in the future");
        let huge = Note {
            claims: vec![(NodeId(0), u64::MAX), (NodeId(1), 1)],
            ..note(1, 1)
        };
        assert_eq!(huge.untaken(1, Process::Lives(0)), None, "damaged");
    }

    #[test]
    fn notes_outlive_damage_and_strangers_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("p.sock");
        let mut notes = Notes::lock(&socket).unwrap();
        notes.notes = vec![note(1, 100), note(2, 10)];
        notes.write().unwrap();
        drop(notes);
        let file = path(&socket);
        let text = std::fs::read_to_string(&file).unwrap() + "{\"pid\": }\n";
        std::fs::write(&file, text).unwrap();
        let mut notes = Notes::lock(&socket).unwrap();
        let starts = notes.starts(150, |_| Process::Lives(400));
        assert_eq!(notes.notes, [note(1, 100), note(2, 10)]);
        assert_eq!(
            starts.promised,
            [(NodeId(0), 1200), (NodeId(1), 400)].into()
        );
        assert_eq!(starts.untaken, [(NodeId(0), 600), (NodeId(1), 200)].into());
        let starts = notes.starts(350, |_| Process::Lives(0));
        assert_eq!(starts.untaken, [(NodeId(0), 600), (NodeId(1), 200)].into());
        drop(notes);
        std::fs::write(&file, [0xff; 9]).unwrap();
        assert!(Notes::lock(&socket).unwrap().notes.is_empty());
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &file).unwrap();
        assert!(Notes::lock(&socket).is_err(), "a link is not followed");
    }
}
