//! `pageone numa guests`: all guests by node, and the canonical pages that they share.

use std::path::PathBuf;

use clap::Args;
use numa::{NodeId, ProcessReport, Topology};
use rustix::process::Pid;
use serde::Serialize;
use sys::foreign::ForeignName;
use wire::{GuestStatus, Status, StoreNode};

use super::process::Looks;
use super::{print_json, table};
use crate::head::Headed;
use crate::output::print;
use crate::paths;
use crate::view::status;

/// Nodes side by side: the table is no wider than 80 columns.
const ABREAST: usize = 4;
/// Bytes of a name that are shown.
const NAME: usize = 8;

/// Shows all guests of a daemon by node, and their canonical pages by domain and node
#[derive(Args)]
pub(crate) struct GuestsView {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// All guests, and what they share.
#[derive(Debug, Serialize)]
struct Guests {
    nodes: Vec<NodeId>,
    guests: Vec<Guest>,
    /// Canonical pages by domain and node; empty with one node.
    store_nodes: Vec<StoreNode>,
}

#[derive(Debug, Serialize)]
struct Guest {
    pid: u32,
    comm: ForeignName,
    /// Of a virtual machine, container or unit.
    name: Option<ForeignName>,
    domain: ForeignName,
    /// None where the process is gone, or not ours to look at.
    pages: Option<ProcessReport>,
}

impl GuestsView {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let topology = Topology::live()?;
        let status = status::ask(&paths::served(self.socket.as_deref())?)?;
        let guests = Guests::read(&topology, status);
        if self.json {
            return print_json(&Headed::first(guests));
        }
        print(&guests.render())
    }
}

impl Guests {
    fn read(topology: &Topology, status: Status) -> Self {
        let looks = Looks::new(topology);
        let guest = |guest: GuestStatus| Guest {
            pages: i32::try_from(guest.pid)
                .ok()
                .and_then(Pid::from_raw)
                .and_then(|pid| looks.read(pid).ok()),
            pid: guest.pid,
            comm: guest.comm,
            name: guest.name,
            domain: guest.domain,
        };
        Self {
            nodes: topology.nodes.iter().map(|node| node.id).collect(),
            guests: status.guests.into_iter().map(guest).collect(),
            store_nodes: status.store_nodes,
        }
    }

    fn render(&self) -> String {
        if self.guests.is_empty() {
            return "no guests\n".to_owned();
        }
        let parts = self.nodes.chunks(ABREAST);
        let mut text =
            "Guests by node, private + merged; NEAR: the share on the nodes of their threads\n"
                .to_owned();
        text += &parts
            .clone()
            .map(|nodes| self.guest_table(nodes))
            .collect::<String>();
        if !self.store_nodes.is_empty() {
            text += "\nCanonical pages by domain and node; ASTRAY: those of another node's store\n";
            text += &parts
                .map(|nodes| self.domain_table(nodes))
                .collect::<String>();
        }
        text
    }

    fn guest_table(&self, nodes: &[NodeId]) -> String {
        let names = nodes.iter().map(|node| format!("N{node}"));
        let mut head = vec!["PID".to_owned(), "NAME".into(), "DOMAIN".into()];
        head.extend(names);
        head.push("NEAR".into());
        let rows = self.guests.iter().map(|guest| {
            let cell = |node: &NodeId| match &guest.pages {
                None => "?".to_owned(),
                Some(report) => {
                    let its = report.nodes.get(node).copied().unwrap_or_default();
                    format!("{}+{}", size(its.anonymous), size(its.merged))
                }
            };
            let near = |report: &ProcessReport| format!("{:.0}%", report.local_share * 100.0);
            let name = guest.name.as_ref().unwrap_or(&guest.comm);
            let (name, domain) = (short(name), short(&guest.domain));
            let mut row = vec![guest.pid.to_string(), name, domain];
            row.extend(nodes.iter().map(cell));
            row.push(guest.pages.as_ref().map_or("?".into(), near));
            row
        });
        let head: Vec<_> = head.iter().map(String::as_str).collect();
        table::render(&head, &rows.collect::<Vec<_>>(), &[1, 2])
    }

    fn domain_table(&self, nodes: &[NodeId]) -> String {
        let mut domains: Vec<&ForeignName> =
            self.store_nodes.iter().map(|one| &one.domain).collect();
        domains.dedup();
        let mut head = vec!["DOMAIN".to_owned()];
        head.extend(nodes.iter().map(|node| format!("N{node}")));
        head.push("ASTRAY".into());
        let rows = domains.into_iter().map(|domain| {
            let all = self.store_nodes.iter().filter(|one| one.domain == *domain);
            let here: Vec<_> = all
                .filter(|one| nodes.contains(&NodeId(one.node)))
                .collect();
            let pages = |node: &NodeId| {
                let at = here.iter().find(|one| NodeId(one.node) == *node);
                size(at.map_or(0, |one| one.pages))
            };
            let mut row = vec![short(domain)];
            row.extend(nodes.iter().map(pages));
            row.push(size(here.iter().map(|one| one.astray).sum()));
            row
        });
        let head: Vec<_> = head.iter().map(String::as_str).collect();
        table::render(&head, &rows.collect::<Vec<_>>(), &[0])
    }
}

/// Pages as a size of four characters at most: `999M`, `1.5G`, `97G`. It is rounded up: what is there is never 0.
fn size(pages: u64) -> String {
    let mut value = pages.div_ceil(256);
    for unit in ["M", "G", "T"] {
        if value < 1000 {
            return format!("{value}{unit}");
        }
        let tenths = value.div_ceil(103); // a tenth of 1024, rounded up
        if tenths < 100 {
            let next = if unit == "M" { "G" } else { "T" };
            return format!("{}.{}{next}", tenths / 10, tenths % 10);
        }
        value = value.div_ceil(1024);
    }
    format!("{value}P")
}

/// The beginning of a name, as a terminal may show it.
fn short(name: &ForeignName) -> String {
    let shown = name.to_string();
    match shown.char_indices().nth(NAME) {
        None => shown,
        Some((end, _)) => format!("{}~", shown.get(..end).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use numa::residence::NodePages;

    fn guests(nodes: u32) -> Guests {
        let pages = |node| {
            let its = NodePages {
                anonymous: 99 << 18,
                file: 1,
                merged: 88 << 18,
            };
            (NodeId(node), its)
        };
        let report = ProcessReport {
            pid: 4_194_304,
            name: "a".into(),
            nodes: (0..nodes).map(pages).collect(),
            elsewhere: 0,
            threads: [(NodeId(0), 1)].into(),
            local_share: 1.0,
            mean_distance: 10.0,
        };
        let guest = |pages: Option<ProcessReport>| Guest {
            pid: 4_194_304,
            comm: "qemu-system-x86".into(),
            name: pages.is_none().then(|| "web\x1b[2J".into()),
            domain: "machine-qemu-1-of-many".into(),
            pages,
        };
        let store = |node| StoreNode {
            domain: "machine-qemu-1-of-many".into(),
            node,
            pages: 1 << 20,
            astray: u64::from(node),
        };
        Guests {
            nodes: (0..nodes).map(NodeId).collect(),
            guests: vec![guest(Some(report)), guest(None)],
            store_nodes: (0..nodes).map(store).collect(),
        }
    }

    #[test]
    fn sizes_have_four_characters() {
        let sizes = [
            0,
            1,
            999 << 8,
            1000 << 8,
            3 << 17,
            12 << 18,
            999 << 18,
            2000 << 18,
        ]
        .map(size);
        assert_eq!(
            sizes,
            ["0M", "1M", "999M", "1.0G", "1.5G", "12G", "999G", "2.0T"]
        );
    }

    #[test]
    fn a_screen_is_no_wider_than_80_columns_however_many_nodes_there_are() {
        for nodes in [1, 2, 4, 8] {
            let text = guests(nodes).render();
            let widest = text.lines().map(str::len).max().unwrap();
            assert!(widest <= 80, "{widest} columns:\n{text}");
            for node in 0..nodes {
                let heads = text
                    .lines()
                    .filter(|line| line.contains(&format!(" N{node}")));
                assert_eq!(heads.count(), 2, "{text}");
            }
            assert!(text.contains("99G+88G"), "{text}");
            assert!(
                text.contains(" qemu-sys~ ") && text.contains(" web"),
                "{text}"
            );
            assert!(!text.contains('\x1b') && text.contains('?'), "{text}");
        }
    }
}
