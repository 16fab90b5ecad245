//! The processes that are meant, and the trust domain of each; or memory dumps in their place.

use std::fs::File;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::io::Errno;
use serde::Serialize;
use sys::foreign::ForeignName;
use sys::subject::Subject;

use super::rules::{Origin, Rules, Ruling};
use crate::policy::Pattern;
use crate::program;
use crate::selector::{self, Selector};
use crate::within::{LISTING, within};
use crate::{human, names};

/// The least time for a process to tell which program it runs, when others have used up all.
const LEAST_WAIT: Duration = Duration::from_millis(10);

#[derive(clap::Args)]
#[group(id = "targets", required = true, multiple = true)]
pub(crate) struct Args {
    /// Processes to look at
    #[arg(value_name = "PID", value_parser = human::process)]
    pids: Vec<u32>,
    /// All processes with this command name, as `ps -o comm` shows it
    #[arg(long, value_name = "NAME")]
    comm: Vec<String>,
    /// All processes in control groups that fit: `*` in a name, `**` for any number of names
    #[arg(long, value_name = "GLOB", value_parser = Pattern::parse)]
    cgroup: Vec<Pattern>,
    /// All processes for which these conditions hold, as command=redis-server,user=alice; the keys are command, executable, user, uid, group, gid, cgroup, unit
    #[arg(long = "match", value_name = "KEY=VALUE,...", value_parser = as_written)]
    selectors: Vec<(String, Selector)>,
    /// All processes of this machine, but those of PageONE
    #[arg(long)]
    all: bool,
    /// Memory dumps instead of processes: ELF (QEMU, libvirt, gcore), LiME, or plain
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["pids", "comm", "cgroup", "selectors", "all"])]
    dump: Vec<PathBuf>,
}

/// A selector, and the words of the person.
fn as_written(text: &str) -> Result<(String, Selector), String> {
    Ok((text.to_owned(), text.parse()?))
}

/// Where memory is read.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Process(u32),
    Dump(PathBuf, Arc<File>),
}

/// A process whose memory is counted, or a dump.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Target {
    #[serde(skip)]
    pub(crate) source: Source,
    /// The process, or the number of the dump, from 1.
    pub(crate) pid: u32,
    /// The command's name, or the file's.
    pub(crate) command: ForeignName,
    /// What people know it by, if that is another: a virtual machine, a container, a unit.
    pub(crate) name: Option<ForeignName>,
    /// The trust domain it would get.
    pub(crate) domain: Ruling,
}

impl Target {
    /// The name to show.
    pub(crate) fn shown(&self) -> &ForeignName {
        self.name.as_ref().unwrap_or(&self.command)
    }
}

/// What was asked for.
pub(crate) struct Found {
    pub(crate) targets: Vec<Target>,
    /// Processes that fit, and that this user may not read.
    pub(crate) unreadable: usize,
    /// By what their domains are.
    pub(crate) origin: Origin,
}

impl Args {
    /// The processes that are meant, each once. Their domains are by `rules`, else by those in force.
    ///
    /// # Errors
    /// A number that is no process, no process at all, a dump that cannot be opened, or a mistake in the rules in force.
    pub(crate) fn find(&self, rules: Option<Rules>) -> Result<Found> {
        if !self.dump.is_empty() {
            let targets = (1..)
                .zip(&self.dump)
                .map(|(number, path)| dump(number, path));
            let targets = targets.collect::<Result<_>>()?;
            let origin = Origin::Dumps;
            return Ok(Found {
                targets,
                unreadable: 0,
                origin,
            });
        }
        let (mut pids, mut unreadable) = (self.pids.clone(), 0);
        for &pid in &self.pids {
            selector::check(pid)?;
        }
        let lists = [self.comm.len(), self.cgroup.len(), self.selectors.len()];
        if self.all || lists.iter().any(|&len| len > 0) {
            // Commands of PageONE, the daemon for one: no guest can be made of them. A program may lie on a file system
            // that does not answer: all together have a minute, and its look is given up later.
            let begun = Instant::now();
            let is_ours = |pid| {
                let left = LISTING.saturating_sub(begun.elapsed()).max(LEAST_WAIT);
                within(left, move || program::is_pageone(pid)).is_ok_and(|is_ours| is_ours)
            };
            let fit = |&pid: &u32| self.fits(pid) && has_memory(pid) && !is_ours(pid);
            let (read, others): (Vec<_>, Vec<_>) = selector::numbers()?
                .filter(fit)
                .partition(|&pid| may_read(pid));
            pids.extend(read);
            unreadable = others.iter().filter(|pid| !pids.contains(pid)).count();
        }
        pids.sort_unstable();
        pids.dedup();
        let rules = rules.map_or_else(|| Rules::in_force(&pids), Ok)?;
        let mut targets: Vec<_> = pids.iter().filter_map(|&pid| target(pid, &rules)).collect();
        if targets.is_empty() && unreadable > 0 {
            bail!("nothing can be looked at: {}", left_out(unreadable));
        }
        if targets.is_empty() {
            bail!("no process fits: `ps -eo pid,comm,cgroup` shows names and control groups");
        }
        name(&mut targets);
        let origin = rules.origin();
        Ok(Found {
            targets,
            unreadable,
            origin,
        })
    }

    /// The words by which `attach` means the same processes; none where it has no such words.
    pub(crate) fn words(&self) -> Option<String> {
        let others = self.pids.len() + self.comm.len() + self.cgroup.len();
        if self.all || others > 0 || self.selectors.is_empty() {
            return None;
        }
        let words = self.selectors.iter().map(|(text, _)| {
            let word = word(text)?;
            Some(format!("--match {word}"))
        });
        Some(words.collect::<Option<Vec<_>>>()?.join(" "))
    }

    /// Whether dumps are meant: their memory does not change.
    pub(crate) fn are_dumps(&self) -> bool {
        !self.dump.is_empty()
    }

    fn fits(&self, pid: u32) -> bool {
        let name = sys::process::comm(pid);
        let group = || sys::process::cgroup(pid);
        self.all
            || self.comm.iter().any(|comm| comm == name.raw())
            || self
                .selectors
                .iter()
                .any(|(_, selector)| selector.fits(pid))
            || !self.cgroup.is_empty()
                && group().is_ok_and(|group| {
                    let path = group.path.raw();
                    self.cgroup.iter().any(|pattern| pattern.matches(path))
                })
    }
}

/// Words on processes that are left out.
pub(super) fn left_out(unreadable: usize) -> String {
    let (processes, are) = match unreadable {
        1 => ("1 process".to_owned(), "is"),
        more => (format!("{more} processes"), "are"),
    };
    let root = match rustix::process::geteuid().is_root() {
        true => "",
        false => ": root may look at all",
    };
    format!("{processes} that this user may not read {are} left out{root}")
}

/// Whether a process has memory of its own: not one that has ended, and no thread of the kernel.
fn has_memory(pid: u32) -> bool {
    Subject::of(pid).is_ok_and(|subject| !subject.is_kernels && !subject.has_ended)
}

/// Whether this user may read its memory.
fn may_read(pid: u32) -> bool {
    let opened = sys::text::open(format!("/proc/{pid}/maps"));
    !matches!(opened, Err(Errno::ACCESS | Errno::PERM))
}

fn target(pid: u32, rules: &Rules) -> Option<Target> {
    has_memory(pid).then(|| Target {
        source: Source::Process(pid),
        pid,
        command: sys::process::comm(pid),
        name: None,
        domain: rules.domain(pid),
    })
}

/// Gives processes the names that people know.
fn name(targets: &mut [Target]) {
    let asked = targets.iter();
    let asked = asked.map(|target| (target.pid, names::user(target.pid), &target.command));
    let names = names::of(&asked.collect::<Vec<_>>());
    for (target, name) in targets.iter_mut().zip(names) {
        target.name = name;
    }
}

fn dump(number: u32, path: &PathBuf) -> Result<Target> {
    let kind = std::fs::metadata(path).map(|data| data.file_type());
    let kind = kind.with_context(|| format!("cannot open {}", path.display()))?;
    // To open a pipe would wait for its writer.
    if !kind.is_file() && !kind.is_block_device() {
        bail!("{} is neither a file nor a block device", path.display());
    }
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok(Target {
        source: Source::Dump(path.clone(), Arc::new(file)),
        pid: number,
        command: name.to_string_lossy().into_owned().into(),
        name: None,
        domain: Ruling::Domain("dumps".into()),
    })
}

/// `text` as one word of a shell; none where that takes more than quotes.
pub(super) fn word(text: &str) -> Option<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "=,.-_/:".contains(c);
    match text {
        _ if text.chars().all(plain) => Some(text.to_owned()),
        _ if text.contains(|c: char| c == '\'' || c.is_control()) => None,
        _ => Some(format!("'{text}'")),
    }
}
