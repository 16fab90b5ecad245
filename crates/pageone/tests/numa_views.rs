//! The views of `pageone numa` print what the machine's own files, and numactl where it is installed, say.
//!
//! PAGEONE_BIN names the command where it is not where it was built, as in a test guest.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const NODES: &str = "/sys/devices/system/node";

fn command(arguments: &[&str]) -> Command {
    let program =
        std::env::var("PAGEONE_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_pageone").to_owned());
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

fn pageone(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn text(arguments: &[&str]) -> String {
    let output = pageone(arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let answer = serde_json::from_str(&text(arguments)).unwrap();
    common::assert_head(&answer);
    answer
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// The online nodes and their distances, straight from the kernel's files.
fn kernel_distances() -> BTreeMap<u64, Vec<u64>> {
    let mut distances = BTreeMap::new();
    for entry in fs::read_dir(NODES).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if let Some(id) = name.strip_prefix("node").and_then(|id| id.parse().ok()) {
            let row = fs::read_to_string(entry.path().join("distance")).unwrap();
            distances.insert(
                id,
                words(&row)
                    .iter()
                    .map(|word| word.parse().unwrap())
                    .collect(),
            );
        }
    }
    distances
}

fn numbers(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|number| number.as_u64().unwrap())
        .collect()
}

#[test]
fn topology_is_that_of_the_kernel() {
    if !Path::new(NODES).exists() {
        println!("skipped: the kernel shows no nodes");
        return;
    }
    let model = json(&["numa", "topology", "--json"]);
    let distances = kernel_distances();
    let nodes = model["nodes"].as_array().unwrap();
    let ids: Vec<u64> = nodes
        .iter()
        .map(|node| node["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids, distances.keys().copied().collect::<Vec<_>>());
    let rows: Vec<Vec<u64>> = model["distances"]
        .as_array()
        .unwrap()
        .iter()
        .map(numbers)
        .collect();
    assert_eq!(rows, distances.values().cloned().collect::<Vec<_>>());
    for (node, id) in nodes.iter().zip(&ids) {
        let list = fs::read_to_string(format!("{NODES}/node{id}/cpulist")).unwrap();
        let cpus = sys::node::parse_list(&list).unwrap();
        assert_eq!(
            numbers(&node["cpus"]),
            cpus.iter().map(|&cpu| u64::from(cpu)).collect::<Vec<_>>()
        );
    }
    // The table shows the same numbers, a line a node.
    let table = text(&["numa", "topology"]);
    let shown: Vec<&str> = table
        .lines()
        .skip_while(|line| !line.starts_with("Distances"))
        .skip(2)
        .collect();
    assert!(shown.len() >= distances.len(), "{table}");
    for ((id, row), line) in distances.iter().zip(shown) {
        let expected: Vec<String> = [id].into_iter().chain(row).map(u64::to_string).collect();
        assert_eq!(words(line), expected);
    }
    let dot = text(&["numa", "topology", "--format", "dot"]);
    assert!(ids.iter().all(|id| dot.contains(&format!("n{id} [label="))));
    assert_eq!(
        text(&["numa", "topology", "--format", "svg"])
            .matches("<circle")
            .count(),
        ids.len()
    );
}

#[test]
fn topology_is_that_of_numactl() {
    let Ok(output) = Command::new("numactl").arg("--hardware").output() else {
        assert!(
            std::env::var_os("PAGEONE_TEST_NODES").is_none(),
            "the guest has numactl"
        );
        common::tools::lacks("numactl");
        return;
    };
    let oracle = String::from_utf8(output.stdout).unwrap();
    let model = json(&["numa", "topology", "--json"]);
    let nodes = model["nodes"].as_array().unwrap();
    assert!(
        oracle.contains(&format!("available: {} nodes", nodes.len())),
        "{oracle}"
    );
    for node in nodes {
        let id = node["id"].as_u64().unwrap();
        let after = |label: &str| {
            oracle
                .lines()
                .find_map(|line| line.strip_prefix(&format!("node {id} {label}:")))
        };
        let cpus: Vec<u64> = words(after("cpus").unwrap())
            .iter()
            .map(|cpu| cpu.parse().unwrap())
            .collect();
        assert_eq!(numbers(&node["cpus"]), cpus, "{oracle}");
        let size: u64 = words(after("size").unwrap())[0].parse().unwrap();
        assert_eq!(
            node["memory_bytes"].as_u64().unwrap() >> 20,
            size,
            "{oracle}"
        );
    }
    let matrix = oracle
        .lines()
        .skip_while(|line| !line.starts_with("node distances"))
        .skip(2);
    for (row, line) in model["distances"].as_array().unwrap().iter().zip(matrix) {
        let theirs: Vec<u64> = words(line)[1..]
            .iter()
            .map(|word| word.parse().unwrap())
            .collect();
        assert_eq!(numbers(row), theirs, "{oracle}");
    }
}

#[test]
fn memory_is_that_of_the_kernel() {
    let table = text(&["numa", "memory"]);
    let lines: Vec<Vec<&str>> = table.lines().map(words).collect();
    assert_eq!(lines[0][..4], ["Nid", "MemTotal", "MemFree", "MemUsed"]);
    let total_at = lines
        .iter()
        .position(|line| line.first() == Some(&"ToT"))
        .unwrap();
    let number = |word: &str| word.parse::<u64>().unwrap();
    let mut sums = [0; 3];
    for line in &lines[1..total_at] {
        let (total, free, used) = (number(line[1]), number(line[2]), number(line[3]));
        assert_eq!(total, free + used);
        sums = [sums[0] + total, sums[1] + free, sums[2] + used];
        if let Ok(meminfo) = fs::read_to_string(format!("{NODES}/node{}/meminfo", line[0])) {
            let kernel = meminfo
                .lines()
                .find(|line| line.contains("MemTotal"))
                .map(words)
                .unwrap();
            assert_eq!(total, number(kernel[3]));
        }
    }
    assert_eq!(
        lines[total_at][1..]
            .iter()
            .map(|word| number(word))
            .collect::<Vec<_>>(),
        sums
    );
    let model = json(&["numa", "memory", "--json"]);
    assert_eq!(model["nodes"].as_array().unwrap().len(), total_at - 1);
    let watched = text(&[
        "numa", "memory", "--watch", "10ms", "--count", "3", "--json",
    ]);
    let watched = watched.lines().map(serde_json::from_str);
    let watched: Vec<Value> = watched.collect::<Result<_, _>>().unwrap();
    watched.iter().for_each(common::assert_head);
    assert_eq!(watched.len(), 3);
    let once = text(&["numa", "memory", "--watch", "2min", "--count", "1"]);
    assert!(once.contains("MemTotal"), "{once}");
}

#[test]
fn a_process_has_the_pages_that_the_kernel_says() {
    let pid = std::process::id();
    // Other tests run in this process meanwhile: look before and after.
    let rss_pages = || -> u64 {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let rss = rollup
            .lines()
            .find_map(|line| line.strip_prefix("Rss:"))
            .unwrap()
            .to_owned();
        words(&rss)[0].parse::<u64>().unwrap() / 4
    };
    let before = rss_pages();
    let model = json(&["numa", "process", &pid.to_string(), "--json"]);
    let after = rss_pages();
    let count = |node: &Value| -> u64 {
        ["anonymous", "file", "merged"]
            .iter()
            .map(|kind| node[kind].as_u64().unwrap())
            .sum()
    };
    let pages: u64 = model["processes"][0]["nodes"]
        .as_object()
        .unwrap()
        .values()
        .map(count)
        .sum();
    let (least, most) = (before.min(after) * 9 / 10, before.max(after) * 11 / 10);
    assert!(
        (least..=most).contains(&pages),
        "{pages} pages, the kernel says {before}, then {after}"
    );
    let name = fs::read_to_string("/proc/self/comm").unwrap();
    let by_name = json(&["numa", "process", "--comm", name.trim_end(), "--json"]);
    assert!(
        by_name["processes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|it| it["pid"].as_u64() == Some(u64::from(pid)))
    );
    assert!(text(&["numa", "process", &pid.to_string()]).contains("local"));
}

#[test]
fn wrong_calls_fail() {
    for arguments in [
        &["numa", "process"][..],
        &["numa", "process", "0"],
        &["numa", "process", "--comm", "no such name"],
        &["numa", "topology", "--slit", "x"],
        &["numa", "topology", "--srat", "/nowhere"],
        &["numa", "topology", "--srat", "/proc/version"],
        &["numa", "topology", "--fake", "much"],
        &["numa", "memory", "--watch", "soon"],
        &["numa", "heap", "--from", "/proc/version"],
    ] {
        let output = pageone(arguments);
        assert!(
            !output.status.success() && !output.stderr.is_empty(),
            "{arguments:?}"
        );
    }
}

#[test]
fn emulation_and_firmware_tables_are_shown() {
    let emulated = json(&["numa", "topology", "--fake", "3U", "--json"]);
    assert!(emulated["nodes"].as_array().unwrap().len() >= 3);
    let firmware = "/sys/firmware/acpi/tables/SRAT";
    if fs::read(firmware).is_err() {
        println!("skipped: no SRAT");
        return;
    }
    let read = json(&["numa", "topology", "--srat", firmware, "--json"]);
    assert_eq!(read["source"], "acpi");
    assert!(
        read["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|node| node["memory_bytes"].as_u64() > Some(0))
    );
}

#[test]
fn hashdist_spreads_the_table() {
    let quick = [
        "--size-mib",
        "16",
        "--seconds",
        "1",
        "--rounds",
        "1",
        "--json",
    ];
    let report = json(&[&["bench", "hashdist"][..], &quick].concat());
    let results = &report["rows"];
    let pages = |index: usize| -> Vec<u64> {
        let by_node = results[index]["pages_by_node"].as_object().unwrap();
        by_node
            .values()
            .map(|pages| pages.as_u64().unwrap())
            .collect()
    };
    assert_eq!(pages(0), [4096]);
    let nodes = results[1]["before"]["nodes"].as_array().unwrap();
    let with_memory = nodes
        .iter()
        .filter(|node| node["total_kib"].as_u64() > Some(0))
        .count() as u64;
    assert_eq!(pages(1).len() as u64, with_memory);
    let share = 4096 / with_memory;
    assert!(
        pages(1)
            .iter()
            .all(|pages| pages.abs_diff(share) * 50 <= share),
        "{results}"
    );
    assert!((0..2).all(|index| results[index]["lookups_per_second"].as_u64() > Some(0)));
}

#[test]
fn a_reader_that_leaves_ends_a_view_and_a_full_disk_fails_it() {
    let own = std::process::id().to_string();
    let views: [&[&str]; 4] = [
        &["numa", "topology"],
        &["numa", "topology", "--json"],
        &["numa", "memory", "--watch", "10ms"],
        &["numa", "process", &own],
    ];
    for view in views {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let into = |out: Stdio| command(view).stdout(out).output().unwrap();
        let left = into(writer.into());
        assert!(left.status.success() && left.stderr.is_empty(), "{left:?}");
        let full = into(fs::File::create("/dev/full").unwrap().into());
        let said = String::from_utf8_lossy(&full.stderr);
        assert_eq!(full.status.code(), Some(1), "{view:?}: {said}");
        assert!(
            said.contains("cannot write to standard output: No space"),
            "{said}"
        );
    }
}
