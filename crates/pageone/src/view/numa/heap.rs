//! `pageone numa heap`: the slots of a running daemon, or of one whose view was saved.

use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use numa::HeapView;
use numa::heap::ORDERS;
use wire::{Reply, Request};

use super::{print_json, table};
use crate::{client, paths};

const PATIENCE: Duration = Duration::from_secs(30);

/// Shows the heap of slots by node and zone: free blocks of each order, and the counters
#[derive(Args)]
pub(crate) struct HeapViewer {
    /// The daemon's socket
    #[arg(long)]
    socket: Option<PathBuf>,
    /// What --json printed, instead of a daemon; '-' reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    from: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl HeapViewer {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let view = match &self.from {
            Some(file) => read(file)?,
            None => ask(&paths::served(self.socket.as_deref())?)?,
        };
        if self.json {
            return print_json(&view);
        }
        print!("{}", render(&view));
        Ok(())
    }
}

/// The heap of the daemon at `socket`.
///
/// # Errors
/// No daemon, or it refuses.
fn ask(socket: &Path) -> anyhow::Result<HeapView> {
    match client::ask(socket, &Request::Heap, PATIENCE)? {
        Reply::Heap(view) => {
            serde_json::from_value(view).context("the daemon's heap is not of this version")
        }
        Reply::Refused(why) => bail!("no heap: {why}"),
        _ => bail!("the daemon replied with something else"),
    }
}

fn read(path: &Path) -> anyhow::Result<HeapView> {
    let mut text = String::new();
    if path == Path::new("-") {
        stdin().read_to_string(&mut text)?;
    } else {
        text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
    }
    serde_json::from_str(&text).with_context(|| format!("{} is no heap's status", path.display()))
}

/// The heap as two tables: slots, and counters.
pub(crate) fn render(view: &HeapView) -> String {
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
        let view = read(file.path()).unwrap();
        assert_eq!(view, heap.view());
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
