//! The reports of `bench nodes` and `bench domains`, with fixed parameters, of a machine whose nodes have CPUs and memory.

use std::collections::BTreeSet;

use numa::{Node, Topology};
use serde_json::Value;

use super::common::{alone, count, output, pageone, text};
use super::support;

const MIB: u64 = 4;
/// Pages of a guest.
const PAGES: u64 = MIB * 256;

/// Nodes of which each has CPUs of its own, and memory, if all have and there are several.
fn whole_nodes() -> Option<u64> {
    let live = Topology::live().unwrap();
    let is_whole = |node: &Node| !node.cpus.is_empty() && node.memory_bytes > 0;
    let cpus: Vec<_> = live.nodes.iter().flat_map(|node| &node.cpus).collect();
    // Parts of memory that the kernel calls nodes have the same CPUs.
    let own = cpus.iter().collect::<BTreeSet<_>>().len() == cpus.len();
    let whole = live.nodes.iter().all(is_whole) && own && live.nodes.len() > 1;
    whole.then_some(live.nodes.len() as u64)
}

/// The rows that `bench` gives.
fn rows(arguments: &[&str]) -> Vec<Value> {
    let mut command = pageone();
    command.arg("bench").args(arguments);
    command.args(["--json", "--guest-mib", &MIB.to_string()]);
    let output = output(command.env("PAGEONE_AGENT", support::agent()));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    crate::common::assert_head(&report);
    let rows = report["rows"].as_array().unwrap().clone();
    rows.iter().for_each(|row| println!("{row}"));
    rows
}

fn number(row: &Value, name: &str) -> f64 {
    let number = row[name].as_f64();
    number.unwrap_or_else(|| panic!("{name} in {row}"))
}

#[test]
fn guests_reach_their_memory_as_evenly_inside_nodes_as_across_or_more_so() {
    let _alone = alone();
    let Some(nodes) = whole_nodes() else {
        println!("skipped: no two nodes that all have CPUs of their own, and memory");
        return;
    };
    let rows = rows(&["nodes", "--guests", "2"]);
    let [across, inside] = &rows[..] else {
        panic!("two rows: {rows:?}");
    };
    for (row, knob, copies) in [(across, 1, 1), (inside, 0, nodes)] {
        assert_eq!(count(row, "merge_across_nodes"), knob);
        assert_eq!(count(row, "nodes"), nodes);
        assert_eq!(count(row, "pages_shared"), copies * PAGES, "{row}");
        assert_eq!(row["guests"].as_array().unwrap().len() as u64, 2 * nodes);
    }
    let [far, near] = [across, inside].map(|row| number(row, "deviation_percent"));
    assert!(near <= far && near < 0.01, "{near} and {far}");
    let [far, near] = [across, inside].map(|row| number(row, "mean_ns"));
    assert!(near < far, "{near} and {far}");
    assert!(number(inside, "local_percent") > 99.99, "{inside}");
    // One copy, wherever it is, is near to the guests of one node.
    let share = 100.0 / f64::from(u32::try_from(nodes).unwrap());
    assert!(
        (number(across, "local_percent") - share).abs() < 0.1,
        "{across}"
    );
}

/// The table of the Xen series: as many guests on each node, their memory near, and so each as fast as if it were alone.
#[test]
fn guests_that_are_placed_are_spread_evenly_and_as_fast_as_one() {
    let _alone = alone();
    let Some(nodes) = whole_nodes() else {
        println!("skipped: no two nodes that all have CPUs of their own, and memory");
        return;
    };
    let numbers = [4, 8, 12, 16];
    let rows = rows(&["domains", "--guests", "4,8,12,16"]);
    assert_eq!(rows.len(), 2 * numbers.len());
    for (guests, pair) in numbers.into_iter().zip(rows.chunks(2)) {
        let [left, placed] = pair else {
            panic!("two rows: {pair:?}")
        };
        assert_eq!([&left["placed"], &placed["placed"]], [false, true]);
        let counts = placed["guests_by_node"].as_object().unwrap();
        let counts: Vec<_> = counts.values().filter_map(Value::as_u64).collect();
        assert_eq!(counts.len() as u64, nodes);
        assert_eq!(counts.iter().sum::<u64>(), guests);
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "{placed}");
        assert!(number(placed, "local_percent") > 99.9, "{placed}");
        let [slow, fast] = [left, placed].map(|row| number(row, "accesses_per_us"));
        // 10 in a microsecond is a guest whose memory is all near.
        let most = 10.0 * f64::from(u32::try_from(guests).unwrap());
        assert!(fast >= slow * 0.999 && fast >= 0.99 * most, "{pair:?}");
    }
}

#[test]
fn where_there_is_nothing_to_compare_the_benches_say_so() {
    let live = Topology::live().unwrap();
    let usable = |node: &&Node| !node.cpus.is_empty() && node.memory_bytes > 0;
    if live.nodes.iter().filter(usable).count() > 1 {
        println!("skipped: several nodes with CPUs and memory");
        return;
    }
    for bench in ["nodes", "domains"] {
        let refused = output(pageone().args(["bench", bench]));
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains("there is nothing to compare"), "{said}");
    }
}
