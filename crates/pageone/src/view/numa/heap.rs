//! `pageone numa heap`: the slots of a running daemon, or of one whose view was saved.

use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use numa::HeapView;
use numa::heap::ORDERS;
use serde::{Deserialize, Serialize};
use wire::{Reply, Request, StoreNode};

use super::{print_json, table};
use crate::head::Head;
use crate::output::print;
use crate::view::status;
use crate::{client, paths};

const PATIENCE: Duration = Duration::from_secs(30);

/// Shows the heap of slots by node and zone: free blocks of each order, and the counters
#[derive(Args)]
pub(crate) struct HeapViewer {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// What --json printed, instead of a daemon; '-' reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    from: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The heap, and where the frames of slots really are.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Slots {
    #[serde(flatten)]
    pub(crate) heap: HeapView,
    /// By domain and node; empty on a machine with one node.
    #[serde(default)]
    pub(crate) store_nodes: Vec<StoreNode>,
}

/// What `--json` prints.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    /// Views of older versions have none.
    #[serde(flatten)]
    head: Option<Head>,
    #[serde(flatten)]
    slots: Slots,
}

impl HeapViewer {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let view = match &self.from {
            Some(file) => read(file)?,
            None => Told {
                head: Some(Head::now(1)),
                slots: ask(&paths::served(self.socket.as_deref())?)?,
            },
        };
        if self.json {
            return print_json(&view);
        }
        print(&render(&view.slots))
    }
}

/// The heap of the daemon at `socket`.
///
/// # Errors
/// No daemon, or it refuses.
fn ask(socket: &Path) -> anyhow::Result<Slots> {
    let heap = match client::ask(socket, &Request::Heap, PATIENCE)? {
        Reply::Heap(view) => {
            serde_json::from_value(view).context("the daemon's heap is not of this version")?
        }
        Reply::Refused(why) => bail!("no heap: {why}"),
        _ => bail!(client::UNEXPECTED),
    };
    let store_nodes = status::ask(socket)?.store_nodes;
    Ok(Slots { heap, store_nodes })
}

/// What `--json` printed, with the head that it had then.
fn read(path: &Path) -> anyhow::Result<Told> {
    let mut text = String::new();
    if path == Path::new("-") {
        stdin().read_to_string(&mut text)?;
    } else {
        text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
    }
    serde_json::from_str(&text).with_context(|| format!("{} is no heap's status", path.display()))
}

/// Frames by the kernel's nodes: where canonical pages are, and how many of them belong to the store of another node.
fn frames(all: &[StoreNode]) -> String {
    let by_node = StoreNode::by_node(all);
    if by_node.is_empty() {
        return String::new();
    }
    let rows = by_node.iter();
    let rows: Vec<_> = rows
        .map(|(node, (pages, astray))| [u64::from(*node), *pages, *astray])
        .map(|row| row.map(|number| number.to_string()).to_vec())
        .collect();
    format!(
        "\nFrames, where the kernel has them\n{}",
        table::render(&["Nid", "Frames", "Of another node's store"], &rows, &[])
    )
}

/// The heap as tables: slots, counters, frames.
pub(crate) fn render(all: &Slots) -> String {
    let view = &all.heap;
    let orders: Vec<String> = (0..ORDERS).map(|order| format!("o{order}")).collect();
    let mut head = vec!["Nid", "Zone", "Slots", "Free", "In use", "Retired"];
    head.extend(orders.iter().map(String::as_str));
    let buckets = || {
        view.buckets
            .iter()
            .map(|bucket| (bucket, view.zone_name(bucket.zone)))
    };
    let slots: Vec<Vec<String>> = buckets()
        .map(|(bucket, zone)| {
            let numbers = [bucket.slots, bucket.free, bucket.allocated, bucket.retired];
            let numbers = numbers
                .iter()
                .chain(&bucket.free_blocks)
                .map(u64::to_string);
            [bucket.node.to_string(), zone]
                .into_iter()
                .chain(numbers)
                .collect()
        })
        .collect();
    let counters: Vec<Vec<String>> = buckets()
        .map(|(bucket, zone)| {
            let stat = &bucket.stats;
            let numbers = [
                stat.hit,
                stat.miss,
                stat.foreign,
                stat.interleave_hit,
                stat.local,
                stat.other,
                stat.zone_fallback,
                stat.freed,
            ];
            [bucket.node.to_string(), zone]
                .into_iter()
                .chain(numbers.iter().map(u64::to_string))
                .collect()
        })
        .collect();
    let counter_head = [
        "Nid",
        "Zone",
        "Hit",
        "Miss",
        "Foreign",
        "Interleave",
        "Local",
        "Other",
        "Other zone",
        "Freed",
    ];
    format!(
        "Free blocks by order (o3: 8 slots in a row)\n{}",
        table::render(&head, &slots, &[1])
    ) + &format!(
        "\nCounters, in slots\n{}",
        table::render(&counter_head, &counters, &[1])
    ) + &format!("\nRequests that nothing could meet: {}\n", view.failed)
        + &frames(&all.store_nodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use numa::heap::{Request, ZoneId};
    use numa::{Heap, NodeId, Topology};

    #[test]
    fn a_heap_reads_back_and_renders() {
        let topology = Topology::live()
            .unwrap()
            .emulate(&"2U".parse().unwrap())
            .unwrap();
        let heap = Heap::new(&topology, ["canonical"]);
        heap.grow(NodeId(1), ZoneId(0), 0..100).unwrap();
        let _ = heap
            .alloc(Request::new(NodeId(0), ZoneId(0)).order(2))
            .unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_string(&heap.view()).unwrap()).unwrap();
        let view = read(file.path()).unwrap().slots;
        assert_eq!(
            (&view.heap, view.store_nodes.len()),
            (&heap.view(), 0),
            "without frames: one node"
        );
        let lines: Vec<Vec<String>> = render(&view)
            .lines()
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect();
        let mut of_node_1 = lines
            .iter()
            .filter(|line| line.first().is_some_and(|word| word == "1"));
        assert_eq!(
            of_node_1.next().unwrap()[..6],
            ["1", "canonical", "100", "96", "4", "0"]
        );
        assert_eq!(
            of_node_1.next().unwrap()[..6],
            ["1", "canonical", "0", "4", "0", "0"]
        );
        assert!(read(Path::new("/proc/version")).is_err());
    }
}
