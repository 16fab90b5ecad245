//! `pageone bench domains`: 4, 8, 12 and 16 guests, placed on nodes as they start and left to the kernel.
//!
//! After the table of the 2005 patches that taught Xen of nodes. Guests start at once and take their memory afterwards, as virtual machines
//! do. Once each goes where `run --node auto` would put it, with what the others will still take counted as taken; once it is started
//! as any process. Then the kernel says where their pages are and where their threads ran last.
//!
//! The throughput is a model with the parameters of `bench nodes`: each guest makes an access after the other, each as long as the
//! distance says. Each has a CPU of its own there: a placement that puts many guests on few CPUs looks as good as any other. What shared
//! links and caches do comes on top of it on real machines, and is not in it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use numa::placement::Starts;
use numa::{Choice, MemoryReport, NodeId, Topology};
use serde::Serialize;

use super::guests::Guest;
use super::nodes::{Latency, local_percent, nodes_to_compare, report, start};
use crate::head;
use crate::human;
use crate::output::print;

const PATIENCE: Duration = Duration::from_secs(240);

/// 4 to 16 guests at once, placed on nodes and left to the kernel: where they are, and how fast they reach their memory (a model)
#[derive(Args)]
pub(crate) struct Domains {
    /// Numbers of guests, a row each
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "4,8,12,16", value_parser = clap::value_parser!(u64).range(1..=1000))]
    guests: Vec<u64>,
    /// Memory of each guest: MiB, or with a unit, as 2G
    #[arg(long, value_name = "SIZE", default_value_t = 16, value_parser = human::mib::<{ 1 << 20 }>)]
    guest_mib: u64,
    #[command(flatten)]
    latency: Latency,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    guests: u64,
    placed: bool,
    /// Guests by the node where most of their memory is.
    guests_by_node: BTreeMap<NodeId, u64>,
    /// Of the guests' pages, those on the node where the guest ran last.
    local_percent: f64,
    /// Of all guests together, in millions a second.
    accesses_per_us: f64,
}

impl Domains {
    pub(crate) fn run(&self) -> Result<()> {
        let topology = Topology::live()?;
        nodes_to_compare(&topology)?;
        let mut rows = Vec::new();
        for &guests in &self.guests {
            for placed in [false, true] {
                rows.push(self.measure(&topology, guests, placed)?);
            }
        }
        if self.json {
            let report = serde_json::json!({ "model": self.latency, "rows": rows });
            return print(&head::line(&report)?);
        }
        let mut text = format!(
            "Accesses are a model: {}; memory is where the kernel says.\n\
             In the model each guest has a CPU of its own: competition for CPUs is not in it.\n\n\
             guests  placed  guests by node                    local  accesses/µs\n",
            self.latency
        );
        for row in &rows {
            let by_node: Vec<_> = row
                .guests_by_node
                .iter()
                .map(|(node, count)| format!("N{node}: {count}"))
                .collect();
            text += &format!(
                "{:>6} {:>7}  {:<32} {:>5.1}% {:>12.2}\n",
                row.guests,
                if row.placed { "yes" } else { "no" },
                by_node.join("  "),
                row.local_percent,
                row.accesses_per_us
            );
        }
        print(&text)
    }

    fn measure(&self, topology: &Topology, count: u64, placed: bool) -> Result<Row> {
        let pages = self.guest_mib * 256;
        let need = pages.saturating_mul(4096);
        let free = MemoryReport::live()?.free_bytes();
        anyhow::ensure!(
            free.values().sum::<u64>() / 10 * 9 >= need.saturating_mul(count),
            "{count} guests of {} MiB do not fit the memory that is free: give less with --guest-mib",
            self.guest_mib
        );
        let (mut guests, mut starts) = (Vec::<Guest>::new(), Starts::default());
        for number in 0..count {
            let choice = match placed {
                true => Some(Choice::beside(topology, &free, &starts, need)?),
                false => None,
            };
            if let Some(choice) = &choice {
                starts.add(&choice.claims());
            }
            guests.push(start(topology, choice.as_ref(), pages, number, None)?);
        }
        let mut all = Vec::new();
        for guest in &mut guests {
            guest.answer(PATIENCE)?;
        }
        // They run once more, all at once: where a guest ran last is where it would go on.
        guests
            .iter_mut()
            .try_for_each(|guest| guest.tell("verify"))?;
        for guest in &mut guests {
            guest.answer(PATIENCE)?;
            let report = report(topology, guest)?;
            let pages: BTreeMap<_, _> = report
                .nodes
                .iter()
                .map(|(&node, pages)| (node, pages.anonymous))
                .collect();
            let most = pages
                .iter()
                .max_by_key(|(_, pages)| **pages)
                .map(|(&node, _)| node);
            let ran = report.threads.keys().next().copied();
            all.push((
                most.context("a guest without memory")?,
                ran.context("a guest without threads")?,
                pages,
            ));
        }
        let mut guests_by_node: BTreeMap<_, _> =
            topology.memory_nodes().map(|node| (node.id, 0)).collect();
        let mut accesses_per_us = 0.0;
        for (most, ran, pages) in &all {
            *guests_by_node.entry(*most).or_insert(0) += 1;
            accesses_per_us += 1000.0 / self.latency.mean(topology, *ran, pages);
        }
        Ok(Row {
            guests: count,
            placed,
            guests_by_node,
            local_percent: local_percent(all.iter().map(|(_, ran, pages)| (*ran, pages))),
            accesses_per_us,
        })
    }
}
