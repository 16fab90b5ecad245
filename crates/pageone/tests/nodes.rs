//! Merging and NUMA nodes, end to end: real guests, a real daemon, pages where they should be.
//!
//! A machine with several nodes, such as a guest of `make test-numa`, tries its real nodes. Every
//! machine tries emulated ones, which are ranges of its memory. Needs root (frame numbers).
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::{
    Knob, PATIENCE, Place, Running, alone, count, daemon, json, output, pageone, text, wait_for,
};
use numa::{FakeSpec, NodeId, Topology};
use serde_json::Value;
use support::Guest;

const PAGES: usize = 1024;

fn start(place: &Place, config: &str, flags: &[&str]) -> Running {
    let config = place.file("pageone.toml", config);
    let path = [
        "--config",
        config.to_str().unwrap(),
        "--merge-period",
        "100ms",
    ];
    daemon(place, &[&path[..], flags].concat())
}

fn set(place: &Place, arguments: &[&str]) -> Result<(), String> {
    let mut command = pageone();
    command
        .arg("set")
        .arg("--socket")
        .arg(place.socket())
        .args(arguments);
    let output = output(&mut command);
    match output.status.success() {
        true => Ok(()),
        false => Err(text(&output.stderr)),
    }
}

fn shared(status: &Value) -> (u64, u64) {
    (
        count(status, "pages_shared"),
        count(status, "pages_sharing"),
    )
}

/// Waits for so many shared and sharing pages, and that it stays at that for some rounds.
fn wait_shared(place: &Place, wanted: (usize, usize)) {
    let wanted = (wanted.0 as u64, wanted.1 as u64);
    let deadline = Instant::now() + PATIENCE;
    let mut since = None;
    loop {
        let status = json(place);
        let rounds = count(&status, "full_scans");
        match shared(&status) == wanted {
            true if since.is_some_and(|since| rounds >= since + 4) => return,
            true => since = since.or(Some(rounds)),
            false => since = None,
        }
        assert!(Instant::now() < deadline, "waited for {wanted:?}: {status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The node of each page of a guest, as the kernel has it; the pages must be there.
fn nodes(guest: &Guest) -> Vec<i32> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(guest.pid).unwrap());
    let pages: Vec<usize> = (0..PAGES).map(|page| guest.memory + page * 4096).collect();
    let mut nodes = vec![-1; PAGES];
    sys::mempolicy::pages_to_nodes(pid, &pages, &mut nodes).unwrap();
    nodes
}

fn memory_nodes() -> Vec<u32> {
    let live = Topology::live().unwrap();
    live.memory_nodes().map(|node| node.id.0).collect()
}

/// A guest with `PAGES` pages on a node, whose content depends on the seed alone.
fn on_node(place: &Place, node: u32) -> Guest {
    let mut guest = Guest::start(&place.socket());
    guest.map(PAGES);
    guest.run(&format!("bind 0 {PAGES} {node}"));
    refill(&mut guest);
    assert_eq!(nodes(&guest), vec![i32::try_from(node).unwrap(); PAGES]);
    guest
}

fn refill(guest: &mut Guest) {
    guest.run(&format!("fill 0 {PAGES} 5"));
    guest.run(&format!("advise 0 {PAGES} 12"));
}

#[test]
fn pages_of_two_nodes_meet_only_where_they_may() {
    let _alone = alone();
    let all = memory_nodes();
    let &[first, .., last] = &all[..] else {
        assert!(std::env::var("PAGEONE_TEST_NODES").is_ok_and(|n| n == "1") || all.len() == 1);
        println!("skipped: one node");
        return;
    };
    let place = Place::new();
    let _daemon = start(&place, "merge_across_nodes = 0", &[]);
    let mut guests = [first, last, last].map(|node| on_node(&place, node));
    wait_shared(&place, (PAGES, PAGES));
    assert_eq!(count(&json(&place), "pages_unshared"), PAGES as u64);
    guests.iter_mut().for_each(|guest| drop(guest.run("check"))); // every page is there again
    let [here, there] = [first, last].map(|node| vec![i32::try_from(node).unwrap(); PAGES]);
    assert_eq!(nodes(&guests[0]), here);
    for guest in &guests[1..] {
        assert_eq!(
            nodes(guest),
            there,
            "the copies are on the node of those that share them"
        );
    }
    for page in [0, 511, PAGES - 1] {
        assert_eq!(guests[1].frame(page), guests[2].frame(page));
        assert_ne!(guests[0].frame(page), guests[1].frame(page));
    }
    let refused = set(&place, &["merge_across_nodes=1"]).unwrap_err();
    assert!(
        refused.contains(&format!("{} pages are shared", 2 * PAGES)),
        "{refused}"
    );
    // Guests on a slow machine may need more than one try.
    wait_for("all to be unmerged", || {
        set(&place, &["--unmerge", "merge_across_nodes=1"]).ok()
    });
    assert_eq!(json(&place)["merge_across_nodes"], true);
    for guest in &mut guests {
        guest.run(&format!("mapover 0 {PAGES}"));
        refill(guest);
    }
    wait_shared(&place, (PAGES, 2 * PAGES));
    for guest in &mut guests {
        guest.run("check");
    }
    assert_eq!(guests[0].frame(7), guests[2].frame(7));
}

/// What the kernel has counted.
fn counted(name: &str) -> u64 {
    let all = std::fs::read_to_string("/proc/vmstat").unwrap();
    let mut lines = all.lines().filter_map(|line| line.split_once(' '));
    let line = lines.find(|line| line.0 == name).expect("a counter");
    line.1.parse().unwrap()
}

/// The kernel takes pages away for a moment, to see which node wants them, and moves them. On one node it only
/// takes them away.
#[test]
fn a_kernel_that_balances_nodes_leaves_merged_memory_right() {
    let _alone = alone();
    let Some(_knob) = Knob::set("/proc/sys/kernel/numa_balancing", "1") else {
        println!("skipped: this kernel does not balance nodes");
        return;
    };
    let place = Place::new();
    let _daemon = start(&place, "", &["--broken-rest", "100ms"]);
    let mut guests = [(); 3].map(|()| Guest::start(&place.socket()));
    for guest in &mut guests {
        guest.map(PAGES);
        refill(guest);
    }
    for round in 0..2 {
        wait_for("pages to share", || {
            (count(&json(&place), "pages_sharing") >= PAGES as u64).then_some(())
        });
        let before = counted("numa_pte_updates");
        guests[0].run("writers 2 1");
        wait_for("the kernel to take pages away", || {
            (counted("numa_pte_updates") >= before + 100).then_some(())
        });
        let said = guests[0].run("stop");
        assert!(said.ends_with(" 0 mismatches"), "round {round}: {said}");
        guests.iter_mut().for_each(|guest| drop(guest.run("check")));
        refill(&mut guests[0]);
    }
}

/// Which of the emulated nodes each page of a guest is on, by its frame.
fn emulated(topology: &Topology, guest: &Guest) -> Vec<NodeId> {
    let node_of = |frame: u64| {
        let at = frame * 4096;
        let holds = |node: &&numa::Node| {
            let mut ranges = node.ranges.iter();
            ranges.any(|range| (range.base..range.base + range.len_bytes).contains(&at))
        };
        topology.nodes.iter().find(holds).unwrap().id
    };
    let frames = (0..PAGES).map(|page| guest.frame(page).unwrap());
    frames.map(node_of).collect()
}

/// Guests with the same content, enough of them that they lie on several of the emulated nodes;
/// between them, memory that nobody offers takes up place, an eighth of a node at a time. `None` if that
/// does not help.
fn spread(place: &Place, topology: &Topology) -> Option<Vec<(Guest, Vec<NodeId>)>> {
    let mut all: Vec<(Guest, Vec<NodeId>)> = Vec::new();
    let node: u64 = topology.nodes[0].ranges.iter().map(|r| r.len_bytes).sum();
    let eighth = usize::try_from(node / 8).unwrap();
    let mut ballast = Vec::new();
    for _ in 0..12 {
        let mut guest = Guest::start(&place.socket());
        guest.map(PAGES);
        guest.run("advise 0 1024 15"); // MADV_NOHUGEPAGE: nothing collapses, and so moves
        refill(&mut guest);
        let nodes = emulated(topology, &guest);
        all.push((guest, nodes));
        let mut seen: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (_, nodes) in &all {
            *seen.entry(nodes[PAGES / 2]).or_default() += 1;
        }
        if seen.len() > 1 && seen.values().any(|&guests| guests > 1) {
            return Some(all);
        }
        ballast.push(vec![1u8; eighth]);
    }
    None
}

#[test]
fn emulated_nodes_are_kept_apart_by_frame() {
    let _alone = alone();
    let spec: FakeSpec = "fake=32".parse().unwrap();
    let emulation = Topology::live().and_then(|live| live.emulate(&spec));
    let Ok(topology) = emulation else {
        println!("skipped: too little memory for {spec}");
        return;
    };
    if topology.nodes.iter().any(|node| node.ranges.is_empty()) {
        println!("skipped: the kernel does not say where its memory is");
        return;
    }
    let place = Place::new();
    let flags = ["--numa", "fake=32"];
    let _daemon = start(&place, "merge_across_nodes = 0\nrun = 0", &flags);
    let Some(mut all) = spread(&place, &topology) else {
        println!("skipped: this machine's free memory lies on one of {spec}");
        return;
    };
    // Each group of equal pages on one node shares one copy.
    let (mut copies, mut sharing) = (0, 0);
    for page in 0..PAGES {
        let mut groups: BTreeMap<NodeId, usize> = BTreeMap::new();
        all.iter()
            .for_each(|(_, nodes)| *groups.entry(nodes[page]).or_default() += 1);
        let groups = groups.values().filter(|&&guests| guests > 1);
        groups.for_each(|guests| (copies, sharing) = (copies + 1, sharing + guests - 1));
    }
    set(&place, &["run=1"]).unwrap();
    wait_shared(&place, (copies, sharing));
    assert!(copies > 0 && sharing < (all.len() - 1) * PAGES);
    for (guest, _) in &mut all {
        guest.run("check");
    }
    let (one, its) = &all[0];
    for (other, nodes) in &all[1..] {
        for page in 0..PAGES {
            let same = one.frame(page) == other.frame(page);
            assert_eq!(same, its[page] == nodes[page], "page {page}");
        }
    }
    // Across nodes all of them meet.
    set(&place, &["--unmerge", "merge_across_nodes=1"]).unwrap();
    assert_eq!(json(&place)["run"], 1);
    for (guest, _) in &mut all {
        guest.run(&format!("mapover 0 {PAGES}"));
        refill(guest);
    }
    wait_shared(&place, (PAGES, (all.len() - 1) * PAGES));
    all.iter_mut()
        .for_each(|(guest, _)| drop(guest.run("check")));
}

#[test]
fn the_knob_turns_only_under_nothing_shared() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = start(&place, "", &[]);
    let mut guests = [(); 2].map(|()| Guest::start(&place.socket()));
    guests.iter_mut().for_each(|guest| guest.offer(PAGES, 3));
    wait_shared(&place, (PAGES, PAGES));
    set(&place, &["merge_across_nodes=1"]).unwrap(); // as it is already
    let refused = set(&place, &["merge_across_nodes=0", "threads=1"]).unwrap_err();
    let wanted = [
        &format!("{} pages", 2 * PAGES),
        "set --unmerge merge_across_nodes=…",
    ];
    assert!(
        wanted.iter().all(|words| refused.contains(*words)),
        "{refused}"
    );
    let status = json(&place);
    assert_eq!(status["merge_across_nodes"], true);
    set(&place, &["run=0"]).unwrap();
    set(&place, &["--unmerge", "merge_across_nodes=0", "threads=1"]).unwrap();
    let status = json(&place);
    assert_eq!(shared(&status), (0, 0));
    assert_eq!(
        (&status["merge_across_nodes"], &status["threads"]),
        (&Value::from(false), &Value::from(1))
    );
    assert_eq!(status["run"], 0, "as before");
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
}

#[test]
fn emulation_that_cannot_be_is_refused_with_the_reason() {
    let place = Place::new();
    let mut command = pageone();
    command
        .args(["daemon", "--numa", "fake=100000", "--socket"])
        .arg(place.socket());
    let refused = output(&mut command);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("cannot emulate these nodes"), "{said}");
    let mut command = pageone();
    let refused = output(command.args(["daemon", "--numa", "four"]));
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        text(&refused.stderr).contains("four"),
        "{}",
        text(&refused.stderr)
    );
}
