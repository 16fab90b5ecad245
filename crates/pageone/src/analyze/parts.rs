//! The parts of a process's memory that are looked at, from its mappings and its page map.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use procfs::FromBufRead as _;
use procfs::process::{MMapPath, MemoryMap, MemoryMaps, VmFlags};
use serde::Serialize;
use sys::pagemap::{Categories, PageRun, Pagemap};

use super::dump;
use super::look::Looked;
use super::targets::Source;

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
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

/// Neighbouring pages of one kind in one process.
#[derive(Debug)]
pub(crate) struct Part {
    /// Index of the process.
    pub(crate) target: u32,
    pub(crate) kind: Kind,
    /// Whether KSM may merge them.
    pub(crate) mergeable: bool,
    pub(crate) start: u64,
    pub(crate) pages: u32,
    /// What was read: the page's place in the part, and its fingerprint.
    pub(crate) prints: Vec<(u32, u64)>,
}

/// The parts of a process, or of a dump.
pub(crate) fn list(
    target: u32,
    source: &Source,
    frames: &mut HashSet<u64>,
    seen: &mut Looked,
    parts: &mut Vec<Part>,
) -> Result<()> {
    match source {
        Source::Process(pid) => list_process(target, *pid, frames, seen, parts),
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
    frames: &mut HashSet<u64>,
    seen: &mut Looked,
    parts: &mut Vec<Part>,
) -> Result<()> {
    let smaps = mappings(pid).with_context(|| format!("the mappings of process {pid}"))?;
    let pagemap = Pagemap::open(pid).with_context(|| format!("the page map of process {pid}"))?;
    seen.mappings = smaps.len() as u64;
    let mut runs = vec![PageRun::default(); 4096];
    for mapping in smaps.iter().filter(|mapping| has_pages(mapping)) {
        let (mut at, end) = mapping.address;
        while at < end {
            let (filled, stopped) = pagemap.peek(at..end, &mut runs)?;
            for run in &runs[..filled] {
                let pages = (run.end - run.start) / PAGE;
                let is = |category| run.categories.has(category);
                if is(Categories::SWAPPED) {
                    seen.swapped += pages;
                } else if is(Categories::FILE) {
                    seen.files += pages;
                } else if is(Categories::PRESENT) && !is(Categories::ZERO) {
                    seen.pages += pages;
                    let shared = pagemap.shared_frames(run.start..run.end)?;
                    let like = Part {
                        target,
                        kind: kind(mapping, is(Categories::HUGE)),
                        mergeable: mapping.extension.vm_flags.contains(VmFlags::MG),
                        start: run.start,
                        pages: 0,
                        prints: vec![],
                    };
                    seen.shared_already += split(&like, &shared, frames, parts);
                    seen.shared_unknown +=
                        shared.iter().filter(|frame| **frame == Some(0)).count() as u64;
                }
            }
            at = stopped;
        }
    }
    Ok(())
}

/// What the kernel tells of a process's mappings.
fn mappings(pid: u32) -> Result<MemoryMaps> {
    let file = File::open(format!("/proc/{pid}/smaps"))?;
    let mut text = BufReader::new(file.take(MOST_TEXT));
    let found = MemoryMaps::from_buf_read(&mut text);
    // The last line may be cut, or may not.
    ensure!(
        text.get_ref().limit() > 0,
        "they are too many, or have too long names"
    );
    Ok(found?)
}

/// Cuts a run of pages into parts, without pages whose frame was counted before. Gives how many these are.
fn split(
    like: &Part,
    shared: &[Option<u64>],
    frames: &mut HashSet<u64>,
    parts: &mut Vec<Part>,
) -> u64 {
    let mut left_out = 0;
    let mut open: Option<Part> = None;
    for (page, frame) in (0..).zip(shared) {
        // A frame without a number: it cannot be told which other page has it.
        let counted = frame.is_some_and(|frame| frame == 0 || !frames.insert(frame));
        if counted {
            left_out += 1;
            parts.extend(open.take());
            continue;
        }
        let part = open.get_or_insert_with(|| Part {
            start: like.start + page * PAGE,
            prints: vec![],
            ..*like
        });
        part.pages += 1;
        if part.pages == PART {
            parts.extend(open.take());
        }
    }
    parts.extend(open);
    left_out
}

/// Whether pages behind a mapping are memory: the kernel's own pages in a process are not.
fn has_pages(mapping: &MemoryMap) -> bool {
    let kernels = matches!(
        mapping.pathname,
        MMapPath::Vdso | MMapPath::Vvar | MMapPath::Vsyscall
    );
    !kernels && !mapping.extension.vm_flags.contains(VmFlags::PF)
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

    fn part() -> Part {
        Part {
            target: 0,
            kind: Kind::Heap,
            mergeable: false,
            start: 0x1000,
            pages: 0,
            prints: vec![],
        }
    }

    #[test]
    fn a_frame_counts_once() {
        let (mut frames, mut parts) = (HashSet::new(), vec![]);
        let shared = [None, Some(7), Some(7), None, Some(0), Some(8)];
        assert_eq!(split(&part(), &shared, &mut frames, &mut parts), 2);
        let places: Vec<_> = parts.iter().map(|part| (part.start, part.pages)).collect();
        assert_eq!(places, [(0x1000, 2), (0x4000, 1), (0x6000, 1)]);
        parts.clear();
        // Another process that has the same frames.
        assert_eq!(
            split(&part(), &[Some(8), Some(7)], &mut frames, &mut parts),
            2
        );
        assert!(parts.is_empty());
    }

    #[test]
    fn parts_are_bounded() {
        let mut parts = vec![];
        let shared = vec![None; 2 * PART as usize + 1];
        split(&part(), &shared, &mut HashSet::new(), &mut parts);
        let pages: Vec<_> = parts.iter().map(|part| part.pages).collect();
        assert_eq!(pages, [PART, PART, 1]);
        assert_eq!(parts[1].start, 0x1000 + u64::from(PART) * PAGE);
    }
}
