//! The parts of a process's memory that are looked at, from its mappings and its page map.

use std::collections::BTreeMap;
use std::io::{BufReader, Read as _};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use procfs::FromBufRead as _;
use procfs::process::{MMapPath, MemoryMap, MemoryMaps, VmFlags};
use serde::{Serialize, Serializer};
use sys::ksm::Member;
use sys::pagemap::{Categories, Owner, PageRun, Pagemap};

use super::dump;
use super::merged::{self, Stores};
use super::print::{PAGE, Print};
use super::quick::QuickSet;
use super::targets::Source;

/// The most that is read of what the kernel tells of a process's mappings: a stranger may name a file so that each takes 17 KiB.
const MOST_TEXT: u64 = 128 << 20;
/// Pages of a part, the unit of work.
const PART: u32 = 2048;

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// The heap that brk(2) moves.
    Heap,
    /// Private anonymous mappings, and written pages of private files.
    Anonymous,
    /// The stack of the first thread.
    Stack,
    /// Huge pages, whatever they are part of.
    Huge,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Heap => "heap",
            Self::Anonymous => "anonymous",
            Self::Stack => "stack",
            Self::Huge => "huge pages",
        }
    }
}

/// What was seen of a process. Counted in pages; as JSON it is in bytes, as all sizes are, by the names that the sums have.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Looked {
    /// Present private anonymous pages.
    #[serde(rename = "present", serialize_with = "in_bytes")]
    pub(crate) pages: u64,
    /// Pages whose frame another page of these processes was counted with: shared by fork or KSM.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) shared_already: u64,
    /// Those among them of which it is not known with whom: that takes CAP_SYS_ADMIN.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) shared_unknown: u64,
    /// Copies that changed between the looks.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) changed: u64,
    /// Pages that could not be read.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) unread: u64,
    /// Pages that show a page of PageONE's stores: merged already.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) merged_pageone: u64,
    /// Pages that KSM has merged, its zeros too.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) merged_ksm: u64,
    /// Pages in memory that PageONE leaves alone: present, and not savable.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) left_alone: u64,
    /// Pages of files, in shared memory too: not counted. Those of PageONE's stores are not among them.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) files: u64,
    /// Pages in swap: not counted.
    #[serde(serialize_with = "in_bytes")]
    pub(crate) swapped: u64,
    /// Pages that were read, by the node they are on.
    #[serde(serialize_with = "each_in_bytes")]
    pub(crate) nodes: BTreeMap<u32, u64>,
    /// Mappings now.
    pub(crate) mappings: u64,
    /// The agent was loaded at its start: no other can be put into it.
    #[serde(skip)]
    pub(crate) has_agent: bool,
    /// Why there is nothing of it.
    pub(crate) error: Option<String>,
}

fn in_bytes<S: Serializer>(pages: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(pages * PAGE)
}

fn each_in_bytes<S: Serializer>(nodes: &BTreeMap<u32, u64>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(nodes.iter().map(|(node, pages)| (node, pages * PAGE)))
}

/// Neighbouring pages of one kind in one process.
#[derive(Debug)]
pub(crate) struct Part {
    /// Index of the process.
    pub(crate) target: u32,
    pub(crate) kind: Kind,
    /// Whether KSM may merge them.
    pub(crate) mergeable: bool,
    /// Whether `--any` leaves them out unless it is `--any-huge`.
    pub(crate) huge_advised: bool,
    /// Whether others have their frames too, by fork or KSM.
    pub(crate) shared: bool,
    pub(crate) start: u64,
    pub(crate) pages: u32,
    /// What was read.
    pub(crate) prints: Vec<Print>,
}

/// What the processes looked at before have, so that it counts once.
#[derive(Default)]
pub(crate) struct Before {
    /// Frames with more than one owner.
    pub(crate) frames: QuickSet<u64>,
    pub(crate) stores: Stores,
}

/// The parts of a process, or of a dump.
pub(crate) fn list(
    target: u32,
    source: &Source,
    before: &mut Before,
    seen: &mut Looked,
    parts: &mut Vec<Part>,
) -> Result<()> {
    match source {
        Source::Process(pid) => list_process(target, *pid, before, seen, parts),
        Source::Dump(path, _) => list_dump(target, path, seen, parts),
    }
}

/// A dump's parts: all its pages are alike.
fn list_dump(target: u32, path: &Path, seen: &mut Looked, parts: &mut Vec<Part>) -> Result<()> {
    let ranges = dump::ranges(path).with_context(|| format!("the dump {}", path.display()))?;
    for range in ranges {
        let pages = (range.end - range.start) / PAGE;
        seen.pages += pages;
        for first in (0..pages).step_by(PART as usize) {
            parts.push(Part {
                target,
                kind: Kind::Anonymous,
                mergeable: false,
                huge_advised: false,
                shared: false,
                start: range.start + first * PAGE,
                pages: u32::try_from(pages - first).unwrap_or(PART).min(PART),
                prints: vec![],
            });
        }
    }
    Ok(())
}

/// A process's parts, from its mappings and its page map.
fn list_process(
    target: u32,
    pid: u32,
    before: &mut Before,
    seen: &mut Looked,
    parts: &mut Vec<Part>,
) -> Result<()> {
    let smaps = mappings(pid).with_context(|| format!("the mappings of process {pid}"))?;
    let pagemap = Pagemap::open(pid).with_context(|| format!("the page map of process {pid}"))?;
    seen.mappings = smaps.len() as u64;
    seen.has_agent = smaps.iter().any(is_of_agent);
    // A kernel without KSM says nothing, nor does it to strangers.
    let ksm = Member::of(pid).unwrap_or_default();
    seen.merged_ksm = ksm.merging + ksm.zeros;
    let mut runs = vec![PageRun::default(); 4096];
    for mapping in smaps.iter().filter(|mapping| has_pages(mapping)) {
        let of_files = seen.files;
        let store = merged::is_store(mapping);
        if store {
            seen.merged_pageone += before.stores.note(mapping, &pagemap)?;
        }
        let alone = is_left_alone(mapping);
        let (mut at, end) = mapping.address;
        while at < end {
            let (filled, stopped) = pagemap.glance(at..end, &mut runs)?;
            for run in &runs[..filled] {
                let is = |category| run.categories.has(category);
                if alone && is(Categories::PRESENT) && !is(Categories::FILE) {
                    let pages = (run.end - run.start) / PAGE;
                    seen.pages += pages;
                    seen.left_alone += pages;
                } else if is(Categories::SWAPPED) {
                    seen.swapped += (run.end - run.start) / PAGE;
                } else if is(Categories::PRESENT) && !is(Categories::ZERO) {
                    let like = Part {
                        target,
                        kind: kind(mapping, is(Categories::HUGE)),
                        mergeable: mapping.extension.vm_flags.contains(VmFlags::MG),
                        huge_advised: is_huge_advised(mapping),
                        shared: false,
                        start: run.start,
                        pages: 0,
                        prints: vec![],
                    };
                    for range in pieces(run.start..run.end) {
                        let start = range.start;
                        let owners = pagemap.owners(range)?;
                        split(
                            &Part {
                                start,
                                prints: vec![],
                                ..like
                            },
                            owners,
                            &mut before.frames,
                            seen,
                            parts,
                        );
                    }
                }
            }
            at = stopped;
        }
        if store {
            seen.files = of_files;
        }
    }
    Ok(())
}

/// What the kernel tells of a process's mappings.
fn mappings(pid: u32) -> Result<MemoryMaps> {
    let file = sys::text::open(format!("/proc/{pid}/smaps"))?;
    let mut text = BufReader::new(file.take(MOST_TEXT));
    let found = MemoryMaps::from_buf_read(&mut text);
    // The last line may be cut, or may not.
    ensure!(
        text.get_ref().limit() > 0,
        "they are too many, or have too long names"
    );
    Ok(found?)
}

/// Whether a mapping is of the agent's library.
fn is_of_agent(mapping: &MemoryMap) -> bool {
    matches!(&mapping.pathname, MMapPath::Path(path) if sys::subject::is_agent(&path.to_string_lossy()))
}

/// Ranges of [`PART`] pages.
fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let len = u64::from(PART) * PAGE;
    let starts = (0..).map(move |piece| range.start + piece * len);
    let starts = starts.take_while(move |&start| start < range.end);
    starts.map(move |start| start..range.end.min(start + len))
}

/// Cuts a run of pages into parts, without those of files and those whose frame was counted before.
fn split(
    like: &Part,
    owners: impl Iterator<Item = Owner>,
    frames: &mut QuickSet<u64>,
    seen: &mut Looked,
    parts: &mut Vec<Part>,
) {
    let mut open: Option<Part> = None;
    for (page, owner) in (0..).zip(owners) {
        seen.pages += u64::from(owner != Owner::File);
        seen.files += u64::from(owner == Owner::File);
        // A frame without a number: it cannot be told which other page has it.
        let unknown = owner == Owner::Several(0);
        let counted = matches!(owner, Owner::Several(frame) if unknown || !frames.insert(frame));
        seen.shared_unknown += u64::from(unknown);
        seen.shared_already += u64::from(counted);
        if counted || owner == Owner::File {
            parts.extend(open.take());
            continue;
        }
        // They are read in another way.
        let shared = matches!(owner, Owner::Several(_));
        if open.as_ref().is_some_and(|part| part.shared != shared) {
            parts.extend(open.take());
        }
        let part = open.get_or_insert_with(|| Part {
            start: like.start + page * PAGE,
            shared,
            prints: vec![],
            ..*like
        });
        part.pages += 1;
        if part.pages == PART {
            parts.extend(open.take());
        }
    }
    parts.extend(open);
}

/// Whether pages behind a mapping are memory: the kernel's own pages in a process are not.
fn has_pages(mapping: &MemoryMap) -> bool {
    let kernels = matches!(
        mapping.pathname,
        MMapPath::Vdso | MMapPath::Vvar | MMapPath::Vsyscall
    );
    !kernels && !mapping.extension.vm_flags.contains(VmFlags::PF)
}

/// Whether `--any` leaves a mapping alone, which was not offered by its program either. The rules are the agent's
/// (crates/agent/src/rules.rs), but for stacks, which are told of by themselves. What is tracked has been offered.
fn is_left_alone(mapping: &MemoryMap) -> bool {
    const LEAST: u64 = 64 << 10;
    let has = |flag| mapping.extension.vm_flags.contains(flag);
    let of_file = matches!(mapping.pathname, MMapPath::Path(_)) && !merged::is_store(mapping);
    let is_stack = matches!(mapping.pathname, MMapPath::Stack);
    let strange = [VmFlags::LO, VmFlags::NH, VmFlags::EX];
    let is_strange = of_file || strange.into_iter().any(has);
    let writable = has(VmFlags::RD) && has(VmFlags::WR);
    let is_small = mapping.address.1 - mapping.address.0 < LEAST;
    let offered = has(VmFlags::MG) || has(VmFlags::UW);
    !offered && !is_stack && (is_strange || !writable || is_small)
}

/// Whether a mapping is advised to be of huge pages, and is not offered.
fn is_huge_advised(mapping: &MemoryMap) -> bool {
    let has = |flag| mapping.extension.vm_flags.contains(flag);
    has(VmFlags::HG) && !has(VmFlags::MG) && !has(VmFlags::UW)
}

fn kind(mapping: &MemoryMap, huge: bool) -> Kind {
    match mapping.pathname {
        _ if huge => Kind::Huge,
        MMapPath::Heap => Kind::Heap,
        MMapPath::Stack => Kind::Stack,
        _ => Kind::Anonymous,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_of_the_kind_that_the_kernel_names() {
        let text = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000021000 rw-p 00000000 00:00 0 \n\
7f1000000000-7f1000001000 rw-p 00001000 fe:00 7                          /usr/lib/a.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
";
        let maps = MemoryMaps::from_buf_read(text.as_bytes()).unwrap();
        let kinds: Vec<_> = maps.iter().map(|mapping| kind(mapping, false)).collect();
        use Kind::{Anonymous, Heap, Huge, Stack};
        assert_eq!(kinds, [Heap, Anonymous, Anonymous, Stack]);
        assert!(maps.iter().all(|mapping| kind(mapping, true) == Huge));
    }

    fn part() -> Part {
        Part {
            target: 0,
            kind: Kind::Heap,
            mergeable: false,
            huge_advised: false,
            shared: false,
            start: 0x1000,
            pages: 0,
            prints: vec![],
        }
    }

    /// The parts of some pages, as where they begin and how many they are, and what was seen.
    fn places(owners: &[Owner], frames: &mut QuickSet<u64>) -> (Vec<(u64, u32)>, Looked) {
        let (mut seen, mut parts) = (Looked::default(), vec![]);
        split(
            &part(),
            owners.iter().copied(),
            frames,
            &mut seen,
            &mut parts,
        );
        let places = parts.iter().map(|part| (part.start, part.pages));
        (places.collect(), seen)
    }

    #[test]
    fn a_frame_counts_once() {
        use Owner::{File, Several, This};
        let mut frames = QuickSet::default();
        let owners = [
            This,
            Several(7),
            Several(7),
            File,
            This,
            Several(0),
            Several(8),
        ];
        let (parts, seen) = places(&owners, &mut frames);
        assert_eq!(parts, [(0x1000, 1), (0x2000, 1), (0x5000, 1), (0x7000, 1)]);
        let counts = |seen: &Looked| {
            [
                seen.pages,
                seen.files,
                seen.shared_already,
                seen.shared_unknown,
            ]
        };
        assert_eq!(counts(&seen), [6, 1, 2, 1]);
        // Another process that has the same frames.
        let (parts, seen) = places(&[Several(8), Several(7)], &mut frames);
        assert_eq!((parts, counts(&seen)), (vec![], [2, 0, 2, 0]));
    }

    #[test]
    fn parts_are_bounded() {
        let owners = vec![Owner::This; 2 * PART as usize + 1];
        let (parts, _) = places(&owners, &mut QuickSet::default());
        let second = 0x1000 + u64::from(PART) * PAGE;
        let pages: Vec<_> = parts.iter().map(|&(_, pages)| pages).collect();
        assert_eq!((pages, parts[1].0), (vec![PART, PART, 1], second));
        let len = u64::from(PART) * PAGE;
        let pieces: Vec<_> = pieces(PAGE..PAGE + 2 * len + PAGE).collect();
        assert_eq!(
            pieces,
            [
                PAGE..PAGE + len,
                PAGE + len..PAGE + 2 * len,
                PAGE + 2 * len..2 * PAGE + 2 * len
            ]
        );
    }
}
