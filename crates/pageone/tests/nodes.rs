//! Merging and NUMA nodes, end to end: real guests, a real daemon, pages where they should be.
//!
//! A machine with several nodes, such as a guest of `make test-numa`, tries its real nodes. Every
//! machine tries emulated ones, which are ranges of its memory. Needs root (frame numbers).
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "nodes/benches.rs"]
mod benches;
mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "nodes/unplug.rs"]
mod unplug;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::{
    Knob, PATIENCE, Place, Running, alone, count, daemon, json, once_in, output, pageone, text,
    wait_for,
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

/// `set --unmerge`. Guests on a slow machine may need more than one try: the daemon waits less than a second for them.
fn set_unmerged(place: &Place, knobs: &[&str]) {
    let arguments: Vec<_> = ["--unmerge"].iter().chain(knobs).copied().collect();
    wait_for("all to be unmerged", || set(place, &arguments).ok());
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

/// What `analyze` says of guests.
fn analyze(guests: &[Guest]) -> Value {
    let mut command = pageone();
    command.args(["analyze", "--look-again=50ms", "--json"]);
    command.args(guests.iter().map(|guest| guest.pid.to_string()));
    let output = output(&mut command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refill(guest: &mut Guest) {
    guest.run(&format!("fill 0 {PAGES} 5"));
    guest.run(&format!("advise 0 {PAGES} 12"));
}

#[test]
fn analyze_tells_where_memory_would_come_back() {
    let _alone = alone();
    let all = memory_nodes();
    let &[first, .., last] = &all[..] else {
        println!("skipped: one node");
        return;
    };
    let place = Place::new();
    let on = [first, last, last];
    let guests = on.map(|node| on_node(&place, node));
    let report = analyze(&guests);
    let pages = |bytes: &Value| bytes.as_u64().unwrap_or_else(|| panic!("{report}")) / 4096;
    for (node, row) in on.iter().zip(report["processes"].as_array().unwrap()) {
        let there = row["nodes"][node.to_string()].as_u64();
        assert!(there >= Some(PAGES as u64), "{row}");
    }
    let nodes = || report["nodes"].as_object().unwrap().values();
    let sum = |what: &str| nodes().map(|node| pages(&node[what])).sum::<u64>();
    assert_eq!(sum("bytes"), pages(&report["savable"]["bytes"]), "{report}");
    // Inside nodes a content keeps a copy on each node that it is on. A guest has a second copy of its pages, wherever its
    // thread runs; and a few equal pages of libraries.
    let lost = sum("bytes") - sum("inside");
    let (least, most) = (PAGES as u64, (all.len() as u64 - 1) * PAGES as u64);
    assert!((least..most + 64).contains(&lost), "{lost}: {report}");
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
    wait_store_nodes(&place, &[(last, PAGES, 0)]);
    let said = guests_by_node(&place);
    let copies = lines(&said).skip_while(|line| !line.starts_with("Canonical pages by domain"));
    let copies: Vec<_> = copies.skip(1).take(2).collect();
    // Those without memory, too.
    let shown: Vec<_> = Topology::live().unwrap().nodes;
    let of_nodes = |cell: &dyn Fn(u32) -> String| -> Vec<_> {
        shown.iter().map(|node| cell(node.id.0)).collect()
    };
    let size = |node| if node == last { "4M" } else { "0M" };
    let wanted = [
        format!(
            "DOMAIN {} ASTRAY",
            of_nodes(&|node| format!("N{node}")).join(" ")
        ),
        format!(
            "uid:{} {} 0M",
            rustix::process::geteuid().as_raw(),
            of_nodes(&|node| size(node).to_owned()).join(" ")
        ),
    ];
    assert_eq!(copies, wanted, "{said}");
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
    set_unmerged(&place, &["merge_across_nodes=1"]);
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

/// Canonical pages by node, and those of them that belong elsewhere, as the status has them.
fn store_nodes(status: &Value) -> Vec<(u64, u64, u64)> {
    let rows = status["store_nodes"].as_array().unwrap().iter();
    let row = |row: &Value| {
        (
            count(row, "node"),
            count(row, "pages"),
            count(row, "astray"),
        )
    };
    rows.map(row).collect()
}

/// Waits until the last walk over canonical pages found them so.
fn wait_store_nodes(place: &Place, wanted: &[(u32, usize, usize)]) {
    let wide =
        |&(node, pages, astray): &(u32, usize, usize)| (node.into(), pages as u64, astray as u64);
    let wanted: Vec<_> = wanted.iter().map(wide).collect();
    let mut last = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while last != wanted {
        assert!(Instant::now() < deadline, "waited for {wanted:?}: {last:?}");
        std::thread::sleep(Duration::from_millis(20));
        last = store_nodes(&json(place));
    }
}

/// Two nodes with memory, where there are several. Of the test guests those with two nodes try it.
fn two_nodes() -> Option<[u32; 2]> {
    if std::env::var("PAGEONE_TEST_NODES").is_ok_and(|nodes| nodes != "2") {
        println!("left to the guests with two nodes");
        return None;
    }
    match memory_nodes()[..] {
        [first, .., last] => Some([first, last]),
        _ => {
            println!("skipped: one node");
            None
        }
    }
}

/// The same, and a group whose memory is on the first.
fn cpuset_of_the_first() -> Option<([u32; 2], Cpuset)> {
    let nodes = two_nodes()?;
    Some((nodes, Cpuset::new(nodes[0])?))
}

/// Has the kernel move all pages of a guest, those that it shares too. It leaves out those that are busy at the moment. The daemon
/// rests: copies that it takes from pages moved before would be moved with the rest, and not come back.
fn move_all(place: &Place, guest: &mut Guest, from: u32, to: u32) {
    set(place, &["run=0"]).unwrap();
    let there = vec![i32::try_from(to).unwrap(); PAGES];
    wait_for("all pages to be moved", || {
        guest.run("check");
        guest.run(&format!("migrate {from} {to}"));
        (nodes(guest) == there).then_some(())
    });
    set(place, &["run=1"]).unwrap();
}

/// Pages by node of the daemon's own mappings that have this policy, as the kernel lists them.
fn tables(daemon: &Running, policy: &str) -> BTreeMap<u32, u64> {
    let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", daemon.0.id())).unwrap();
    let is_table = |line: &&str| {
        let mut words = line.split(' ').skip(1);
        let its = words.next().unwrap_or_default();
        its.starts_with(policy) && !words.any(|word| word.starts_with("file="))
    };
    let mut counts = BTreeMap::new();
    for word in maps
        .lines()
        .filter(is_table)
        .flat_map(|line| line.split(' '))
    {
        let numbers = word.strip_prefix('N').and_then(|word| word.split_once('='));
        if let Some((node, pages)) = numbers {
            let (node, pages): (u32, u64) = (node.parse().unwrap(), pages.parse().unwrap());
            *counts.entry(node).or_insert(0) += pages;
        }
    }
    counts
}

#[test]
fn an_index_lies_over_all_nodes_or_on_its_own() {
    const MANY: usize = 16 * PAGES;
    // A directory of as many slots at least, of 8 bytes each.
    const LEAST: u64 = MANY as u64 * 8 / 4096;
    let _alone = alone();
    let Some([first, last]) = two_nodes() else {
        return;
    };
    let place = Place::new();
    let daemon = start(&place, "", &[]);
    let mut guest = Guest::start(&place.socket());
    guest.map(MANY);
    guest.run(&format!("bind 0 {MANY} {last}"));
    guest.run(&format!("fill 0 {MANY} 5"));
    guest.run(&format!("advise 0 {MANY} 12"));
    wait_for("all pages to be in the index", || {
        (count(&json(&place), "pages_unshared") == MANY as u64).then_some(())
    });
    let spread = wait_for("the directory to be on both nodes", || {
        let spread = tables(&daemon, "interleave:");
        (spread.values().sum::<u64>() >= LEAST).then_some(spread)
    });
    let [here, there] = [first, last].map(|node| spread.get(&node).copied().unwrap_or(0));
    println!("with hashdist=on pages of the directory are on {spread:?}");
    assert!(here.abs_diff(there) * 10 <= here + there, "{spread:?}");

    set(&place, &["hashdist=off"]).unwrap();
    assert!(tables(&daemon, "interleave:").is_empty());
    let one = tables(&daemon, "prefer:");
    println!("with hashdist=off: {one:?}");
    assert!(
        one.len() == 1 && one.values().sum::<u64>() >= LEAST,
        "{one:?}"
    );

    set(&place, &["merge_across_nodes=0"]).unwrap();
    let own = wait_for("the index of the node to have the pages", || {
        let own = tables(&daemon, &format!("prefer:{last}"));
        (own.values().sum::<u64>() >= LEAST).then_some(own)
    });
    println!("with merge_across_nodes=0: {own:?}");
    assert_eq!(own.keys().collect::<Vec<_>>(), [&last]);
    let others = tables(&daemon, &format!("prefer:{first}"));
    assert!(others.keys().all(|&node| node == first), "{others:?}");
    guest.run("check");
}

/// Pages of the guests that fill the index of a node.
const MANY: usize = 32 * PAGES;

#[test]
fn what_a_node_adds_to_its_index_is_on_the_node() {
    // A directory of 256 KiB, 32 768 leaves of 24 bytes and as many branches; beside them what the engine knows of chunks.
    is_on_the_node(1, MANY as u64 * (8 + 24 + 24) / 4096);
}

#[test]
fn the_tables_of_a_nodes_slots_are_on_the_node() {
    // As above for half the pages, which two guests have. A slot has 24 bytes in the tables, beside its leaf and its branch.
    is_on_the_node(2, MANY as u64 / 2 * (8 + 24 + 24 + 24) / 4096);
}

/// Compares where a daemon grows by `least` pages at least when so many guests of the same content come.
fn is_on_the_node(guests: usize, least: u64) {
    let _alone = alone();
    let Some(nodes) = two_nodes() else {
        return;
    };
    let live = Topology::live().unwrap();
    if live.nodes.iter().any(|node| node.cpus.is_empty()) {
        println!("skipped: a node without CPUs, of whose index only the directory is on it");
        return;
    }
    let is_own = |grown: &[[u64; 2]; 2]| {
        let mut pairs = grown.iter().enumerate();
        pairs.all(|(at, grew)| {
            let [here, there] = [grew[at], grew[1 - at]];
            here + there >= least && here >= 4 * there
        })
    };
    // Whatever else a daemon takes the first time, the threads that answer for one, is of no node's index.
    let grown = once_in(3, || growth_by_node(nodes, guests), is_own);
    grown.unwrap_or_else(|seen| panic!("{seen:?}"));
}

/// Pages by which a new daemon grows on each of `nodes` when so many guests come on the first of them, and then on the other.
fn growth_by_node(nodes: [u32; 2], guests: usize) -> [[u64; 2]; 2] {
    let place = Place::new();
    let daemon = start(&place, "merge_across_nodes = 0", &[]);
    let serve = |pages: usize, node: u32| {
        let start = |_| {
            let mut guest = Guest::start(&place.socket());
            guest.map(pages);
            guest.run(&format!("bind 0 {pages} {node}"));
            guest.run(&format!("fill 0 {pages} 5"));
            guest.run(&format!("advise 0 {pages} 12"));
            guest
        };
        let started: Vec<_> = (0..guests).map(start).collect();
        if guests > 1 {
            wait_shared(&place, (pages, (guests - 1) * pages));
        } else {
            wait_for("all pages to be in the index", || {
                (count(&json(&place), "pages_unshared") == pages as u64).then_some(())
            });
        }
        started
    };
    // Until the daemon has seen a guest's end, its pages count as those of the next one.
    let end = |guests: Vec<Guest>| {
        drop(guests);
        wait_for("the daemon to see its end", || {
            let status = json(&place);
            let left = status["guests"].as_array().unwrap().len();
            let pages = count(&status, "pages_unshared") + count(&status, "pages_shared");
            (left == 0 && pages == 0).then_some(())
        });
    };
    // What the first guests of all take, stacks and the like, is of no node's index.
    for node in nodes {
        end(serve(PAGES, node));
    }
    nodes.map(|node| {
        let before = tables(&daemon, "");
        let served = serve(MANY / guests, node);
        let after = tables(&daemon, "");
        let of = |counts: &BTreeMap<u32, u64>, node| counts.get(&node).copied().unwrap_or(0);
        let grew = nodes.map(|node| of(&after, node).saturating_sub(of(&before, node)));
        println!("{guests} on node {node}: the daemon grew by {grew:?} pages");
        end(served);
        grew
    })
}

const APART: (&str, &[&str]) = ("merge_across_nodes = 0", &["--broken-rest", "100ms"]);

#[test]
fn copies_that_are_moved_to_another_node_are_left_by_all() {
    let _alone = alone();
    let Some([first, last]) = two_nodes() else {
        return;
    };
    let place = Place::new();
    let _daemon = start(&place, APART.0, APART.1);
    let mut guests = vec![on_node(&place, first), on_node(&place, first)];
    wait_shared(&place, (PAGES, PAGES));
    guests[0].run("check"); // every page is there again
    wait_store_nodes(&place, &[(first, PAGES, 0)]);
    let moved = sys::node::pages_moved().unwrap();
    move_all(&place, &mut guests[0], first, last);
    let moved = sys::node::pages_moved().unwrap() - moved;
    assert!(moved >= PAGES as u64, "the kernel counted {moved} pages");
    // A guest that is bound to the first node never has a page on the other.
    guests.push(on_node(&place, first));
    let here = i32::try_from(first).unwrap();
    wait_for("all three to share on their node", || {
        let its = nodes(&guests[2]);
        assert!(its.iter().all(|&node| node == here || node < 0), "{its:?}");
        guests[2].run("check");
        (shared(&json(&place)) == (PAGES as u64, 2 * PAGES as u64)).then_some(())
    });
    for guest in &mut guests {
        guest.run("check");
        assert_eq!(nodes(guest), vec![here; PAGES]);
    }
    assert_eq!(guests[0].frame(7), guests[2].frame(7));
    wait_store_nodes(&place, &[(first, PAGES, 0)]);
}

/// What `numa guests` says.
fn guests_by_node(place: &Place) -> String {
    let mut command = pageone();
    command.args(["numa", "guests", "--socket"]);
    text(&output(command.arg(place.socket())).stdout)
}

/// Lines of a table, their words one space apart.
fn lines(said: &str) -> impl Iterator<Item = String> {
    let join = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    said.lines().map(join)
}

#[test]
fn across_nodes_copies_that_are_moved_stay_shared_and_are_shown_where_they_are() {
    let _alone = alone();
    let Some([first, last]) = two_nodes() else {
        return;
    };
    let place = Place::new();
    let _daemon = start(&place, "", APART.1);
    let mut guests = [on_node(&place, first), on_node(&place, first)];
    wait_shared(&place, (PAGES, PAGES));
    guests[0].run("check");
    wait_store_nodes(&place, &[(first, PAGES, 0)]);
    move_all(&place, &mut guests[0], first, last);
    wait_store_nodes(&place, &[(last, PAGES, PAGES)]);
    wait_shared(&place, (PAGES, PAGES));
    let said = output(pageone().args(["status", "--socket"]).arg(place.socket()));
    let said = text(&said.stdout);
    let row = format!("node {last} 4.0 MiB {PAGES} pages, {PAGES} of them astray");
    let rows: Vec<_> = lines(&said).collect();
    assert!(rows.contains(&row), "{row}: {said}");
    assert!(
        rows.iter()
            .all(|row| !row.starts_with(&format!("node {first} ")))
    );
    let heap = output(
        pageone()
            .args(["numa", "heap", "--socket"])
            .arg(place.socket()),
    );
    let said = text(&heap.stdout);
    let row = format!("{last} {PAGES} {PAGES}");
    assert!(lines(&said).any(|line| line == row), "{row}: {said}");
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
}

/// A group whose members get their memory from one node; removed on drop.
struct Cpuset(std::path::PathBuf);

impl Cpuset {
    fn new(node: u32) -> Option<Self> {
        let root = std::path::Path::new("/sys/fs/cgroup");
        let on = std::fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
        if !on.split_whitespace().any(|name| name == "cpuset") {
            println!("skipped: no cpusets of cgroup version 2");
            return None;
        }
        let folder = root.join(format!("pageone-nodes-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let its = Self(folder);
        its.set(node);
        Some(its)
    }

    /// The kernel moves what members have.
    fn set(&self, node: u32) {
        std::fs::write(self.0.join("cpuset.mems"), node.to_string()).unwrap();
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        // Members are gone a moment after they were waited for.
        let gone = || std::fs::remove_dir(&self.0).is_ok();
        let _ = (0..100).any(|_| {
            gone() || {
                std::thread::sleep(Duration::from_millis(20));
                false
            }
        });
    }
}

#[test]
fn a_cpuset_that_changes_takes_its_guests_out_of_the_sharing() {
    let _alone = alone();
    let Some(([first, last], cpuset)) = cpuset_of_the_first() else {
        return;
    };
    let place = Place::new();
    let _daemon = start(&place, APART.0, APART.1);
    let enter =
        |guest: &Guest| std::fs::write(cpuset.0.join("cgroup.procs"), guest.pid.to_string());
    let mut guests: Vec<_> = (0..4)
        .map(|number| {
            let mut guest = Guest::start(&place.socket());
            match number {
                0 | 1 => enter(&guest).unwrap(),
                _ => return on_node(&place, first),
            }
            guest.map(PAGES);
            refill(&mut guest);
            guest
        })
        .collect();
    wait_shared(&place, (PAGES, 3 * PAGES));
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    cpuset.set(last);
    // Two of them share on each node afterwards.
    wait_shared(&place, (2 * PAGES, 2 * PAGES));
    let [here, there] = [first, last].map(|node| vec![i32::try_from(node).unwrap(); PAGES]);
    for (number, guest) in guests.iter_mut().enumerate() {
        guest.run("check");
        let wanted = if number < 2 { &there } else { &here };
        assert_eq!(&nodes(guest), wanted, "guest {number}");
    }
    wait_store_nodes(&place, &[(first, PAGES, 0), (last, PAGES, 0)]);
    drop(guests);
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
    is_right_while_nodes_are_balanced("");
}

/// Where sharing stays inside a node, what the kernel has moved off its node is left by all, and merged anew there.
#[test]
fn a_kernel_that_balances_nodes_leaves_memory_merged_on_its_node() {
    is_right_while_nodes_are_balanced("merge_across_nodes = 0");
}

fn is_right_while_nodes_are_balanced(config: &str) {
    let _alone = alone();
    let Some(_knob) = Knob::set("/proc/sys/kernel/numa_balancing", "1") else {
        println!("skipped: this kernel does not balance nodes");
        return;
    };
    let place = Place::new();
    let _daemon = start(&place, config, &["--broken-rest", "100ms"]);
    // More than nodes, so that of each page some guests have copies on one node, wherever they were started.
    let many = memory_nodes().len() + 2;
    let mut guests: Vec<_> = (0..many).map(|_| Guest::start(&place.socket())).collect();
    for guest in &mut guests {
        guest.map(PAGES);
        refill(guest);
    }
    for round in 0..2 {
        wait_for("pages to share", || {
            (count(&json(&place), "pages_sharing") >= PAGES as u64).then_some(())
        });
        let before = counted("numa_pte_updates");
        let moved = counted("numa_pages_migrated");
        guests[0].run("writers 2 1");
        wait_for("the kernel to take pages away", || {
            (counted("numa_pte_updates") >= before + 100).then_some(())
        });
        let said = guests[0].run("stop");
        assert!(said.ends_with(" 0 mismatches"), "round {round}: {said}");
        let moved = counted("numa_pages_migrated") - moved;
        println!("the kernel took pages away, and moved {moved} of them");
        guests.iter_mut().for_each(|guest| drop(guest.run("check")));
        refill(&mut guests[0]);
    }
    if config.is_empty() {
        return;
    }
    wait_for("all canonical pages to be on their node", || {
        let its = store_nodes(&json(&place));
        its.iter().all(|&(_, _, astray)| astray == 0).then_some(())
    });
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
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
/// between them, memory that no guest offers takes up place, an eighth of a node at a time. `None` if that
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
    set_unmerged(&place, &["merge_across_nodes=1"]);
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
    set_unmerged(&place, &["merge_across_nodes=0", "threads=1"]);
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
        .args(["daemon", "--no-keep", "--numa", "fake=100000", "--socket"])
        .arg(place.socket());
    let refused = output(&mut command);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("cannot emulate these nodes"), "{said}");
    let mut command = pageone();
    let refused = output(command.args(["daemon", "--no-keep", "--numa", "four"]));
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        text(&refused.stderr).contains("four"),
        "{}",
        text(&refused.stderr)
    );
}

/// The CPUs that a process may run on, as the kernel lists them.
fn cpus(pid: u32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}

/// Starts `count` guests at once, each of which says that it will need `need` and touches little.
fn burst(place: &Place, count: usize, need: &str) -> Vec<Guest> {
    let guest = |_| {
        let mut command = pageone();
        command.args(["run", "--node", "auto", "--need", need, "--socket"]);
        command
            .arg(place.socket())
            .arg("--")
            .arg(support::guest_program(false));
        command.env("PAGEONE_AGENT", support::agent());
        Guest::from(&mut command)
    };
    let mut guests: Vec<Guest> = (0..count).map(guest).collect();
    guests.iter_mut().for_each(|guest| guest.offer(16, 3));
    guests
}

/// The nodes that starts were noted on, and how many on each. Each process has its node's CPUs.
fn starts_by_node(place: &Place, live: &Topology) -> BTreeMap<NodeId, usize> {
    let notes = std::fs::read_to_string(place.socket().with_extension("starts")).unwrap();
    let notes = notes
        .lines()
        .map(|note| serde_json::from_str(note).unwrap());
    let mut counts = BTreeMap::<NodeId, usize>::new();
    for note in notes.collect::<Vec<Value>>() {
        let node = NodeId(note["claims"][0][0].as_u64().unwrap().try_into().unwrap());
        *counts.entry(node).or_default() += 1;
        let pid = count(&note, "pid").try_into().unwrap();
        let its: Vec<u32> = sys::node::parse_list(&cpus(pid)).unwrap();
        let wanted = &live.node(node).unwrap().cpus;
        let placed = wanted.is_empty() || its == *wanted;
        assert!(placed, "{note}: {its:?}, {wanted:?}");
    }
    counts
}

/// As the table of the Xen series: 4, 8, 12 and 16 where there are two nodes or four, else two for each node.
#[test]
fn guests_that_start_at_once_are_spread_over_the_nodes() {
    let _alone = alone();
    let live = Topology::live().unwrap();
    let usual = |node: &&numa::Node| !node.cpus.is_empty() && node.memory_bytes > 0;
    let nodes = live.nodes.iter().filter(usual).count();
    // Nodes with memory alone take guests, too.
    let uneven = nodes < live.nodes.len();
    let counts = match (nodes, uneven) {
        (2 | 4, false) => vec![4, 8, 12, 16],
        _ => vec![2 * nodes],
    };
    for starts in counts {
        let place = Place::new();
        let _daemon = start(&place, "", &[]);
        let free = numa::MemoryReport::live().unwrap().free_bytes();
        let free = live.nodes.iter().filter(usual).map(|node| free[&node.id]);
        let each = starts / nodes;
        // So little that each node keeps a quarter of its memory free: then it is what was promised that decides.
        let need = (free.min().unwrap() / 2 / (each as u64 + 1)) >> 20;
        let guests = burst(&place, starts, &format!("{need}M"));
        let counts = starts_by_node(&place, &live);
        println!("{starts} starts of {need} MiB: {counts:?}");
        assert_eq!(counts.values().sum::<usize>(), starts, "{counts:?}");
        let even = counts.values().all(|&count| count == each);
        assert!(uneven || even, "{counts:?}");
        let said = wait_for("all guests to be shown", || {
            let said = guests_by_node(&place);
            let shown = |guest: &Guest| {
                let pid = guest.pid.to_string();
                said.lines().any(|line| line.trim_start().starts_with(&pid))
            };
            guests.iter().all(shown).then_some(said)
        });
        assert!(
            said.lines().all(|line| line.chars().count() <= 80),
            "{said}"
        );
    }
}

/// A shell that enters a control group, and becomes the command.
fn pageone_in(group: &std::path::Path) -> std::process::Command {
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "echo $$ >$0/cgroup.procs && exec \"$@\""]);
    shell.arg(group).arg(pageone().get_program());
    shell
}

/// A start needs what the tightest of its groups allows.
#[test]
fn a_start_needs_what_the_least_limit_of_its_groups_allows() {
    let _alone = alone();
    if two_nodes().is_none() {
        return;
    }
    let root = std::path::Path::new("/sys/fs/cgroup");
    let on = std::fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
    if !on.split_whitespace().any(|name| name == "memory") {
        println!("skipped: no memory control groups of version 2");
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root makes control groups");
        return;
    }
    let outer = root.join(format!("pageone-need-{}", std::process::id()));
    let inner = outer.join("inner");
    std::fs::create_dir(&outer).unwrap();
    std::fs::write(outer.join("memory.max"), "150M").unwrap();
    std::fs::write(outer.join("cgroup.subtree_control"), "+memory").unwrap();
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(inner.join("memory.max"), "1G").unwrap();
    let place = Place::new();
    let _daemon = start(&place, "", &[]);
    let mut shell = pageone_in(&inner);
    shell.args(["run", "--node", "auto", "--socket"]);
    shell
        .arg(place.socket())
        .arg("--")
        .arg(support::guest_program(false));
    let mut guest = Guest::from(shell.env("PAGEONE_AGENT", support::agent()));
    guest.offer(16, 3);
    let notes = std::fs::read_to_string(place.socket().with_extension("starts")).unwrap();
    drop(guest);
    wait_for("the groups to go", || {
        let _ = std::fs::remove_dir(&inner);
        std::fs::remove_dir(&outer).ok()
    });
    let note: Value = serde_json::from_str(notes.trim()).unwrap();
    let claims = note["claims"].as_array().unwrap();
    let bytes = claims.iter().map(|claim| claim[1].as_u64().unwrap());
    assert_eq!(bytes.sum::<u64>(), 150 << 20, "{note}");
}

#[test]
fn what_an_attached_process_will_take_is_noted_where_it_runs() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = start(&place, "", &[]);
    let live = Topology::live().unwrap();
    let nodes = live.memory_nodes().count();
    // One without memory is served by its neighbour.
    let usual = live.cpu_nodes().filter(|node| node.memory_bytes > 0);
    let node = usual.last().unwrap();
    let mut bound = std::process::Command::new("taskset");
    bound.args(["-c", &numa::format_list(&node.cpus)]);
    let guest = Guest::from(bound.arg(support::guest_program(false)));
    let mut attach = pageone();
    attach.args(["attach", "--need", "100M", "--socket"]);
    attach.arg(place.socket()).arg(guest.pid.to_string());
    let done = output(attach.env("PAGEONE_AGENT", support::agent()));
    assert!(done.status.success(), "{}", text(&done.stderr));
    let notes = std::fs::read_to_string(place.socket().with_extension("starts"));
    if nodes == 1 {
        assert!(notes.is_err(), "there is no choice, and nothing to note");
        return;
    }
    let note: Value = serde_json::from_str(notes.unwrap().trim()).unwrap();
    assert_eq!(count(&note, "pid"), u64::from(guest.pid));
    let claims = note["claims"].as_array().unwrap();
    // Parts of the memory that the kernel calls nodes have the same CPUs: then it is the first of them.
    let its = live.node_of_cpu(node.cpus[0]).unwrap();
    assert_eq!(claims[0][0], its.0, "{note}");
    let bytes = claims.iter().map(|claim| claim[1].as_u64().unwrap());
    assert_eq!(bytes.sum::<u64>(), 100 << 20, "{note}");
}

#[test]
fn a_daemon_on_a_node_serves() {
    let _alone = alone();
    let place = Place::new();
    let live = Topology::live().unwrap();
    let node = live
        .nodes
        .iter()
        .rfind(|node| !node.cpus.is_empty())
        .unwrap();
    let daemon = start(&place, "", &["--node", &node.id.to_string()]);
    let wanted = numa::format_list(&node.cpus);
    assert_eq!(cpus(daemon.0.id()), wanted);
    let mut guests = pageone();
    guests.args(["numa", "guests", "--json", "--socket"]);
    let said = output(guests.arg(place.socket()));
    let answer: Value = serde_json::from_slice(&said.stdout).unwrap();
    common::assert_head(&answer);
    assert!(answer["guests"].is_array(), "{answer}");
    let mut command = pageone();
    let refused = output(
        command
            .args(["daemon", "--no-keep", "--node", "9999", "--socket"])
            .arg(place.socket()),
    );
    let said = text(&refused.stderr);
    assert!(
        refused.status.code() == Some(1) && said.contains("node 9999"),
        "{said}"
    );
}

/// A node that the cpuset of a start leaves out is refused by its name, with the way out.
#[test]
fn a_node_that_a_cpuset_leaves_out_is_refused() {
    let _alone = alone();
    let Some(([first, last], cpuset)) = cpuset_of_the_first() else {
        return;
    };
    let place = Place::new();
    let start = |verb: &str, node: u32| {
        let mut shell = pageone_in(&cpuset.0);
        shell.arg(verb);
        shell.args(["--node", &node.to_string(), "--socket"]);
        shell.arg(place.socket());
        match verb {
            "daemon" => shell.args(["--no-keep"]),
            _ => shell.args(["--", "true"]),
        };
        output(&mut shell)
    };
    for (verb, code) in [("run", 125), ("daemon", 1)] {
        let refused = start(verb, last);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(code), "{verb}: {said}");
        let words = [&format!("memory of node {last}"), "cpuset.mems"];
        assert!(
            words.iter().all(|word| said.contains(*word)),
            "{verb}: {said}"
        );
    }
    let done = start("run", first);
    assert!(done.status.success(), "{}", text(&done.stderr));
}

/// Nodes of the test guest `cpuless`: one has CPUs and no memory, the other memory and no CPUs. The daemon gets what its node lacks from the
/// nearest node that has it.
#[test]
fn a_daemon_on_a_node_that_lacks_something_has_it_from_the_nearest() {
    let _alone = alone();
    let live = Topology::live().unwrap();
    let lacks = |node: &&numa::Node| node.cpus.is_empty() || node.memory_bytes == 0;
    let lacking: Vec<_> = live.nodes.iter().filter(lacks).collect();
    if lacking.is_empty() {
        println!("skipped: all nodes have CPUs and memory");
        return;
    }
    for node in lacking {
        let place = Place::new();
        let daemon = start(&place, "", &["--node", &node.id.to_string()]);
        let near = live.by_distance(node.id);
        let first = |has: fn(&numa::Node) -> bool| {
            let mut nodes = near.iter().filter_map(|&id| live.node(id));
            nodes.find(|node| has(node)).unwrap()
        };
        let with_cpus = first(|node| !node.cpus.is_empty());
        let with_memory = first(|node| node.memory_bytes > 0);
        assert_eq!(
            cpus(daemon.0.id()),
            numa::format_list(&with_cpus.cpus),
            "node {}",
            node.id
        );
        let mut guests = [(); 2].map(|()| Guest::start(&place.socket()));
        guests.iter_mut().for_each(|guest| guest.offer(PAGES, 3));
        wait_shared(&place, (PAGES, PAGES));
        guests.iter_mut().for_each(|guest| drop(guest.run("check")));
        // Some pages of its program were written before it was placed.
        let its = tables(&daemon, &format!("prefer:{}", with_memory.id));
        let there = its.get(&with_memory.id.0).copied().unwrap_or(0);
        let all: u64 = its.values().sum();
        println!("a daemon on node {}: pages on {its:?}", node.id);
        assert!(all > 0 && there * 4 >= all * 3, "{its:?}");
    }
}
