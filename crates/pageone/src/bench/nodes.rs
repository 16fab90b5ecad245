//! `pageone bench nodes`: how evenly guests of several nodes reach their memory, with merging across nodes and inside them.
//!
//! After the table of the 2012 series on KSM's `merge_across_nodes`. Memory is really placed: on each node with CPUs and memory stand
//! guests of the same content, bound there, and PageONE merges them. Then the kernel says on which node each merged page is.
//!
//! The times are a model, because many machines that have nodes are virtual, and have one latency. A page on the guest's node takes
//! `--local-ns`, one on another node that much for each 10 of its distance, or `--remote-ns`. Caches and the load of links are not in it.
//! The deviation is that of the guests' mean times (of the population), in percent of their mean.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use numa::placement::Strictness;
use numa::{Choice, MemoryReport, NodeId, ProcessReport, Topology};
use rustix::process::Pid;
use serde::Serialize;
use sys::mempolicy::{self, Mode, NodeMask};
use wire::KnobValues;

use super::content::Content;
use super::guest::BenchGuest;
use super::guests::Guest;
use crate::daemon::host::Host;
use crate::head;
use crate::launch::Launch;
use crate::output::print;
use crate::{human, paths};

/// The longest wait for a guest or for the engine.
const PATIENCE: Duration = Duration::from_secs(240);
const LOCAL_DISTANCE: f64 = 10.0;

/// What an access takes: parameters of the model.
#[derive(Args, Clone, Copy, Serialize)]
pub(crate) struct Latency {
    /// Model: nanoseconds of an access to memory of the own node
    #[arg(long, value_name = "NS", default_value_t = 100.0, value_parser = time)]
    local_ns: f64,
    /// Model: nanoseconds of an access to any other node [default: by the distance, which is 10 for the own node]
    #[arg(long, value_name = "NS", value_parser = time)]
    remote_ns: Option<f64>,
}

impl Latency {
    pub(super) fn of(self, topology: &Topology, from: NodeId, to: NodeId) -> f64 {
        match (from == to, self.remote_ns) {
            (true, _) => self.local_ns,
            (false, Some(remote)) => remote,
            (false, None) => {
                let distance = topology.distance(from, to).unwrap_or(u8::MAX);
                self.local_ns * f64::from(distance) / LOCAL_DISTANCE
            }
        }
    }

    /// The mean time over pages, by node, of a guest on the node `from`.
    pub(super) fn mean(
        self,
        topology: &Topology,
        from: NodeId,
        pages: &BTreeMap<NodeId, u64>,
    ) -> f64 {
        let all: u64 = pages.values().sum();
        #[allow(clippy::cast_precision_loss, reason = "a mean")]
        let times = pages
            .iter()
            .map(|(&to, &count)| self.of(topology, from, to) * count as f64);
        #[allow(clippy::cast_precision_loss, reason = "a mean")]
        match all {
            0 => self.local_ns,
            all => times.sum::<f64>() / all as f64,
        }
    }
}

fn time(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ns) if (0.001..1e9).contains(&ns) => Ok(ns),
        _ => Err(format!("`{text}` is no time in nanoseconds")),
    }
}

/// Guests on all nodes, merged across and inside: where their pages are, and how evenly they reach them (a model)
#[derive(Args)]
pub(crate) struct Nodes {
    /// Memory of each guest: MiB, or with a unit, as 2G
    #[arg(long, value_name = "SIZE", default_value_t = 16, value_parser = human::mib::<{ 1 << 20 }>)]
    guest_mib: u64,
    /// Guests on each node
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..=1000))]
    guests: u64,
    #[command(flatten)]
    latency: Latency,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    merge_across_nodes: u8,
    nodes: usize,
    /// Canonical pages.
    pages_shared: u64,
    guests: Vec<Placed>,
    /// Of the merged pages of all guests, those on the guest's own node.
    local_percent: f64,
    mean_ns: f64,
    deviation_percent: f64,
}

#[derive(Serialize)]
struct Placed {
    node: NodeId,
    merged_pages: BTreeMap<NodeId, u64>,
    mean_ns: f64,
}

/// The nodes with CPUs and memory.
///
/// # Errors
/// There are not two of them.
pub(super) fn nodes_to_compare(topology: &Topology) -> Result<Vec<NodeId>> {
    let nodes: Vec<_> = topology
        .memory_nodes()
        .filter(|node| !node.cpus.is_empty())
        .map(|node| node.id)
        .collect();
    if nodes.len() < 2 {
        bail!(
            "this machine has one node with CPUs and memory: there is nothing to compare (make bench-nodes makes guests that have several)"
        );
    }
    Ok(nodes)
}

impl Nodes {
    pub(crate) fn run(&self) -> Result<()> {
        let topology = Topology::live()?;
        let nodes = nodes_to_compare(&topology)?;
        let rows = [true, false].into_iter();
        let rows = rows.map(|across| self.measure(&topology, &nodes, across));
        let rows: Vec<_> = rows.collect::<Result<_>>()?;
        if self.json {
            let report = serde_json::json!({ "model": self.latency, "rows": rows });
            return print(&head::line(&report)?);
        }
        let mut text = format!(
            "Times are a model: {}; memory is where the kernel says.\n\n\
             merge_across_nodes  nodes  guests  copies  local  mean time  deviation\n",
            self.latency
        );
        for row in &rows {
            text += &format!(
                "{:>18} {:>6} {:>7} {:>7} {:>5.1}% {:>7.1} ns {:>9.2}%\n",
                row.merge_across_nodes,
                row.nodes,
                row.guests.len(),
                row.pages_shared,
                row.local_percent,
                row.mean_ns,
                row.deviation_percent
            );
        }
        print(&text)
    }

    fn measure(&self, topology: &Topology, nodes: &[NodeId], across: bool) -> Result<Row> {
        let host = Host::start_able(engine::Options {
            knobs: KnobValues {
                merge_period_ms: 200,
                merge_across_nodes: across,
                ..KnobValues::default()
            },
            ..engine::Options::default()
        })?;
        let pages = self.guest_mib * 256;
        let mut guests = Vec::new();
        // Node by node in turn, so that no node's guests are all first.
        for number in 0..self.guests {
            for &node in nodes {
                let choice = Choice::at(
                    topology,
                    node,
                    &MemoryReport::live()?.free_bytes(),
                    pages * 4096,
                )?;
                let guest = start(topology, Some(&choice), pages, number, Some(host.socket()))?;
                guests.push((node, guest));
            }
        }
        for (_, guest) in &mut guests {
            guest.answer(PATIENCE)?;
            guest.tell("offer")?;
            guest.answer(PATIENCE)?;
        }
        let copies = if across { 1 } else { nodes.len() as u64 };
        let all = guests.len() as u64;
        let wanted = (pages * copies, pages * (all - copies));
        wait_until_merged(&host, wanted)?;
        let mut placed = Vec::new();
        for (node, guest) in &mut guests {
            guest.tell("verify")?; // every page is mapped again
            let answer = guest.answer(PATIENCE)?;
            anyhow::ensure!(
                answer.errors == 0,
                "{} pages are not what they should be",
                answer.errors
            );
            let merged_pages = report(topology, guest)?
                .nodes
                .into_iter()
                .map(|(node, pages)| (node, pages.merged));
            let merged_pages: BTreeMap<_, _> =
                merged_pages.filter(|&(_, pages)| pages > 0).collect();
            let mean_ns = self.latency.mean(topology, *node, &merged_pages);
            placed.push(Placed {
                node: *node,
                merged_pages,
                mean_ns,
            });
        }
        let pages_shared = host.status().pages_shared;
        drop(guests);
        host.stop()?;
        let means: Vec<_> = placed.iter().map(|guest| guest.mean_ns).collect();
        let (mean_ns, deviation_percent) = deviation(&means);
        Ok(Row {
            merge_across_nodes: across.into(),
            nodes: nodes.len(),
            pages_shared,
            local_percent: local_percent(
                placed.iter().map(|guest| (guest.node, &guest.merged_pages)),
            ),
            guests: placed,
            mean_ns,
            deviation_percent,
        })
    }
}

/// Starts a guest where `choice` says, or wherever the kernel puts it; without a `socket` it has no agent. All guests have the same
/// content.
pub(super) fn start(
    topology: &Topology,
    choice: Option<&Choice>,
    pages: u64,
    number: u64,
    socket: Option<&std::path::Path>,
) -> Result<Guest> {
    let content = Content::equal(1, pages);
    let exe = std::env::current_exe().context("cannot find out where this program is")?;
    let mut command = Command::new(exe);
    command.args(BenchGuest::words(&content, number));
    if let Some(socket) = socket {
        Launch::new(&paths::agent()?, socket).equip(&mut command);
    }
    // The child inherits CPUs and policy of this thread, which gets its CPUs and the default policy back. Not from another thread:
    // that one would take the guest along when it ends.
    let own = mempolicy::allowed_cpus()?;
    let placed = choice.map_or(Ok(()), |choice| {
        choice.apply(topology, Strictness::default())
    });
    let guest = placed
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(Guest::start(&mut command)?));
    if choice.is_some() {
        mempolicy::run_on_cpus(&own)?;
        mempolicy::set_mempolicy(Mode::Default, &NodeMask::EMPTY)?;
    }
    guest
}

pub(super) fn report(topology: &Topology, guest: &Guest) -> Result<ProcessReport> {
    let pid = i32::try_from(guest.pid()).ok().and_then(Pid::from_raw);
    let pid = pid.context("a guest without a number")?;
    ProcessReport::read(topology, pid).context("cannot read where the pages of a guest are")
}

/// Mean, and population standard deviation in percent of it.
#[allow(clippy::cast_precision_loss, reason = "as many as guests")]
pub(super) fn deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values
        .iter()
        .map(|value| (value - mean).powi(2))
        .sum::<f64>();
    let percent = 100.0 * (squares / count).sqrt() / mean;
    (mean, if percent.is_finite() { percent } else { 0.0 })
}

#[allow(clippy::cast_precision_loss, reason = "a share")]
pub(super) fn local_percent<'a>(
    guests: impl Iterator<Item = (NodeId, &'a BTreeMap<NodeId, u64>)>,
) -> f64 {
    let (mut local, mut all) = (0, 0);
    for (node, pages) in guests {
        local += pages.get(&node).copied().unwrap_or(0);
        all += pages.values().sum::<u64>();
    }
    100.0 * local as f64 / (all as f64).max(1.0)
}

fn wait_until_merged(host: &Host, wanted: (u64, u64)) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = host.status();
        if (now.pages_shared, now.pages_sharing) == wanted {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!(
                "after {PATIENCE:?} there are {} copies with {} more pages, not {} with {}: is the machine busy, or a node full?",
                now.pages_shared,
                now.pages_sharing,
                wanted.0,
                wanted.1
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl std::fmt::Display for Latency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ns on the own node, ", self.local_ns)?;
        match self.remote_ns {
            Some(ns) => write!(f, "{ns} ns elsewhere"),
            None => write!(f, "elsewhere by the distance"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_is_that_of_the_population() {
        assert_eq!(deviation(&[100.0, 100.0]), (100.0, 0.0));
        assert_eq!(deviation(&[90.0, 110.0]), (100.0, 10.0));
        assert_eq!(deviation(&[]).1, 0.0);
    }

    #[test]
    fn the_model_goes_by_distance_unless_told() {
        let live = Topology::live().unwrap();
        let two = live.emulate(&"2:10,21,21,10".parse().unwrap()).unwrap();
        let by_distance = Latency {
            local_ns: 100.0,
            remote_ns: None,
        };
        let told = Latency {
            remote_ns: Some(150.0),
            ..by_distance
        };
        let [here, there] = [NodeId(0), NodeId(1)];
        assert_eq!(by_distance.of(&two, here, here), 100.0);
        assert_eq!(by_distance.of(&two, here, there), 210.0);
        let pages = BTreeMap::from([(here, 1), (there, 3)]);
        assert_eq!(told.mean(&two, here, &pages), 137.5);
        assert_eq!(told.mean(&two, here, &BTreeMap::new()), 100.0);
        assert_eq!(
            local_percent([(here, &pages), (there, &pages)].into_iter()),
            50.0
        );
    }

    #[test]
    fn nonsense_is_no_time() {
        for bad in ["0", "-1", "x", "nan", "inf"] {
            assert!(time(bad).is_err(), "{bad}");
        }
        assert_eq!(time("85.5"), Ok(85.5));
    }
}
