//! Readers of /sys/devices/system/node and of other things that the kernel tells about nodes.
//!
//! Every reader takes the directory, so that a test or a stored copy of another machine can stand in for it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Where a live machine shows its nodes.
pub const NODE_DIR: &str = "/sys/devices/system/node";

/// The longest list that [`parse_list`] accepts: more CPUs and nodes than any kernel can have.
const MAX_LIST: u32 = 1 << 20;

fn invalid(path: &Path, what: impl std::fmt::Display) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{}: {what}", path.display()),
    )
}

/// Reads a small text file; the error names it.
///
/// # Errors
/// As `std::fs::read_to_string`.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    crate::text::read(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Parses a kernel list such as `0-3,8,10-11`; an empty line is the empty list.
///
/// # Errors
/// `InvalidData` naming the part that is neither a number nor an ascending range.
///
/// # Examples
/// ```
/// assert_eq!(sys::node::parse_list("0-2,5\n").unwrap(), [0, 1, 2, 5]);
/// assert!(sys::node::parse_list("3-1").is_err());
/// ```
pub fn parse_list(text: &str) -> io::Result<Vec<u32>> {
    let mut list = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("'{part}' in a list"));
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u32 = first.parse().map_err(|_| bad())?;
        let last: u32 = last.parse().map_err(|_| bad())?;
        if first > last || last >= MAX_LIST {
            return Err(bad());
        }
        list.extend(first..=last);
    }
    Ok(list)
}

/// Reads a file that holds one kernel list; a missing file is `None`.
///
/// # Errors
/// As [`parse_list`], with the file's name.
pub fn read_list(path: &Path) -> io::Result<Option<Vec<u32>>> {
    match crate::text::read(path) {
        Ok(text) => parse_list(&text)
            .map(Some)
            .map_err(|error| invalid(path, error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(invalid(path, error)),
    }
}

/// The directory of one node.
pub fn dir_of(root: &Path, node: u32) -> PathBuf {
    root.join(format!("node{node}"))
}

/// The distances of one node: one number for each online node, in ascending order of their numbers.
///
/// # Errors
/// The file is missing or holds something else than numbers.
pub fn distances(root: &Path, node: u32) -> io::Result<Vec<u32>> {
    let path = dir_of(root, node).join("distance");
    read_text(&path)?
        .split_ascii_whitespace()
        .map(|word| {
            word.parse()
                .map_err(|_| invalid(&path, format!("distance '{word}'")))
        })
        .collect()
}

/// Where the memory of one node is at this moment, in KiB.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Meminfo {
    /// Memory the kernel manages on the node: total = free + used.
    pub total_kib: u64,
    /// Free memory.
    pub free_kib: u64,
    /// The rest.
    pub used_kib: u64,
}

/// Reads `nodeN/meminfo`.
///
/// # Errors
/// The file is missing or lacks MemTotal or MemFree.
pub fn meminfo(root: &Path, node: u32) -> io::Result<Meminfo> {
    let path = dir_of(root, node).join("meminfo");
    parse_meminfo(&read_text(&path)?).ok_or_else(|| invalid(&path, "no MemTotal or no MemFree"))
}

/// Reads /proc/meminfo as that of a machine's only node, for kernels built without NUMA.
///
/// # Errors
/// The file lacks MemTotal or MemFree.
pub fn machine_meminfo() -> io::Result<Meminfo> {
    let path = Path::new("/proc/meminfo");
    parse_meminfo(&read_text(path)?).ok_or_else(|| invalid(path, "no MemTotal or no MemFree"))
}

fn parse_meminfo(text: &str) -> Option<Meminfo> {
    // "Node 0 MemTotal:  25165824 kB", or without the first two words in /proc/meminfo.
    let field = |name: &str| {
        text.lines().find_map(|line| {
            let (label, value) = line.split_once(':')?;
            if label.rsplit(' ').next()? != name {
                return None;
            }
            value.split_ascii_whitespace().next()?.parse::<u64>().ok()
        })
    };
    let (total_kib, free_kib) = (field("MemTotal")?, field("MemFree")?);
    Some(Meminfo {
        total_kib,
        free_kib,
        used_kib: total_kib.saturating_sub(free_kib),
    })
}

/// Reads `nodeN/numastat`, or another file of `name value` lines such as `nodeN/vmstat`.
///
/// # Errors
/// The file is missing or holds something else.
pub fn counters(path: &Path) -> io::Result<BTreeMap<String, u64>> {
    read_text(path)?
        .lines()
        .map(|line| {
            let (name, value) = line.split_once(' ').unwrap_or((line, ""));
            let value = value
                .trim()
                .parse()
                .map_err(|_| invalid(path, format!("line '{line}'")))?;
            Ok((name.to_owned(), value))
        })
        .collect()
}

/// Pages that the kernel has moved to other frames since boot, for whatever reason: by a call, by a cpuset, to balance nodes, to take memory
/// away, or to make room for huge pages.
///
/// # Errors
/// `/proc/vmstat` cannot be read; `NotFound` when this kernel moves no pages.
pub fn pages_moved() -> io::Result<u64> {
    let text = crate::text::read("/proc/vmstat")?;
    let mut lines = text.lines();
    let moved = lines.find_map(|line| line.strip_prefix("pgmigrate_success "));
    let moved = moved.and_then(|number| number.trim().parse().ok());
    moved.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The physical ranges of a node's memory blocks, merged, ascending; empty where the kernel has no memory
/// hot-plug and so shows no blocks.
///
/// # Errors
/// The directory or the block size cannot be read.
pub fn memory_ranges(root: &Path, node: u32) -> io::Result<Vec<(u64, u64)>> {
    let size_path = root.join("../memory/block_size_bytes");
    let Ok(text) = std::fs::read_to_string(&size_path) else {
        return Ok(Vec::new());
    };
    let size = u64::from_str_radix(text.trim(), 16)
        .ok()
        .filter(|&size| size > 0)
        .ok_or_else(|| invalid(&size_path, format!("'{}'", text.trim())))?;
    let mut blocks = Vec::new();
    for entry in std::fs::read_dir(dir_of(root, node))? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("memory"));
        if let Some(block) = number.and_then(|number| number.parse::<u64>().ok()) {
            blocks.push(block);
        }
    }
    blocks.sort_unstable();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for block in blocks {
        let start = block.saturating_mul(size);
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = start.saturating_add(size),
            _ => ranges.push((start, start.saturating_add(size))),
        }
    }
    Ok(ranges)
}

/// The size of a memory block, in bytes: what [`memory_ranges`] is rounded to.
///
/// # Errors
/// The kernel has no memory hot-plug.
pub fn memory_block_bytes(root: &Path) -> io::Result<u64> {
    let path = root.join("../memory/block_size_bytes");
    let text = read_text(&path)?;
    u64::from_str_radix(text.trim(), 16).map_err(|_| invalid(&path, format!("'{}'", text.trim())))
}

/// The hardware number of each CPU as the firmware's tables name it: `apicid` of /proc/cpuinfo, by CPU number.
///
/// # Errors
/// The file cannot be read. An architecture without APICs gives an empty map.
pub fn apic_ids(cpuinfo: &Path) -> io::Result<BTreeMap<u32, u32>> {
    let mut map = BTreeMap::new();
    let mut cpu = None;
    for line in read_text(cpuinfo)?.lines() {
        let Some((label, value)) = line.split_once(':') else {
            continue;
        };
        match label.trim() {
            "processor" => cpu = value.trim().parse().ok(),
            "apicid" => {
                if let (Some(cpu), Ok(apic)) = (cpu, value.trim().parse()) {
                    map.insert(apic, cpu);
                }
            }
            _ => {}
        }
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_list("\n").unwrap(), [0; 0]);
        assert_eq!(parse_list("1,4-6").unwrap(), [1, 4, 5, 6]);
        for bad in ["a", "1-", "-1", "5-2", "0-99999999", "1;2"] {
            assert!(parse_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn meminfo_of_a_node_and_of_a_machine() {
        let text = "Node 3 MemTotal:  100 kB\nNode 3 MemFree:   40 kB\nNode 3 MemUsed: 60 kB\n";
        let expected = Meminfo {
            total_kib: 100,
            free_kib: 40,
            used_kib: 60,
        };
        assert_eq!(parse_meminfo(text), Some(expected));
        assert_eq!(
            parse_meminfo("MemTotal: 100 kB\nMemFree: 40 kB\nSwapTotal: 1 kB\n"),
            Some(expected)
        );
        assert_eq!(parse_meminfo("Node 3 MemFree: 1 kB"), None);
    }

    #[test]
    fn the_live_machine_reads() {
        // A kernel without migration has no such count.
        let moved = pages_moved();
        assert!(moved.is_ok() || moved.is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
        assert!(machine_meminfo().unwrap().total_kib > 0);
        let root = Path::new(NODE_DIR);
        let Some(online) = read_list(&root.join("online")).unwrap() else {
            println!("skipped: the kernel shows no nodes");
            return;
        };
        for &node in &online {
            assert_eq!(distances(root, node).unwrap().len(), online.len());
            let memory = meminfo(root, node).unwrap();
            assert_eq!(memory.total_kib, memory.free_kib + memory.used_kib);
            assert!(
                counters(&dir_of(root, node).join("numastat"))
                    .unwrap()
                    .contains_key("numa_hit")
            );
        }
    }
}
