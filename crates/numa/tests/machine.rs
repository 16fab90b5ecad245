//! Our placement as the kernel carries it out, on the machine that this runs on.
//!
//! On a machine with one node most of this is trivial. `make test-numa` runs it in guests with several, and says by
//! PAGEONE_TEST_NODES how many nodes a guest must turn out to have, so that nothing is skipped there unnoticed.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{end, holder, in_guest, merged, report_of};
use numa::acpi::{Hmat, Reading, Slit, Srat};
use numa::placement::{Choice, Existing, NodeRequest, Policy, Starts, Strictness, place};
use numa::{Hashdist, InterleavedTable, MemoryReport, NodeId, Topology};
use sys::mempolicy::{self, Mode};
use sys::node::NODE_DIR;

const TABLES: &str = "/sys/firmware/acpi/tables";
const PAGES: usize = 2400;
const WORDS_PER_PAGE: usize = 512;

fn firmware() -> Option<Topology> {
    let read = |name: &str| fs::read(Path::new(TABLES).join(name)).ok();
    let srat = Srat::parse(&read("SRAT")?, Reading::Strict).unwrap();
    let slit = read("SLIT").map(|bytes| Slit::parse(&bytes, Reading::Strict).unwrap());
    let hmat = read("HMAT").map(|bytes| Hmat::parse(&bytes, Reading::Strict).unwrap());
    let apic_ids = sys::node::apic_ids(Path::new("/proc/cpuinfo")).unwrap();
    Some(
        Topology::from_acpi(&srat, slit.as_ref(), hmat.as_ref())
            .unwrap()
            .with_logical_cpus(&apic_ids),
    )
}

fn memory_nodes(topology: &Topology) -> Vec<NodeId> {
    topology.memory_nodes().map(|node| node.id).collect()
}

/// A table in small pages, none of them there yet, for tests to give policies of their own.
fn table(topology: &Topology) -> InterleavedTable<AtomicU64> {
    InterleavedTable::new(PAGES * WORDS_PER_PAGE, topology, Hashdist::Spread).unwrap()
}

fn range(table: &InterleavedTable<AtomicU64>) -> std::ops::Range<usize> {
    let start = table.as_ptr() as usize;
    start..start + table.len_bytes()
}

fn touch(table: &InterleavedTable<AtomicU64>) {
    table
        .iter()
        .step_by(WORDS_PER_PAGE)
        .for_each(|word| word.store(1, Ordering::Relaxed));
}

/// That each node has its share of the pages, to 2 %.
fn assert_even(pages: &BTreeMap<NodeId, u64>, nodes: &[NodeId], total: u64) {
    assert_eq!(pages.values().sum::<u64>(), total, "{pages:?}");
    for node in nodes {
        let expected = total / nodes.len() as u64;
        let pages = pages.get(node).copied().unwrap_or(0);
        assert!(
            pages.abs_diff(expected) * 50 <= expected,
            "node {node}: {pages} pages, {expected} expected"
        );
    }
}

#[test]
fn the_guest_has_the_nodes_it_was_given() {
    let topology = Topology::live().unwrap();
    match std::env::var("PAGEONE_TEST_NODES") {
        Ok(nodes) => assert_eq!(topology.nodes.len(), nodes.parse::<usize>().unwrap()),
        Err(_) => println!("skipped: no guest of known shape"),
    }
}

#[test]
fn sysfs_agrees_with_the_firmware() {
    let Some(firmware) = firmware() else {
        assert!(
            !in_guest() || std::env::var("PAGEONE_TEST_NODES").as_deref() == Ok("1"),
            "no SRAT in the guest"
        );
        println!("skipped: {TABLES}/SRAT cannot be read");
        return;
    };
    let live = Topology::live().unwrap();
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if let Some(fake) = cmdline
        .split_whitespace()
        .find_map(|word| word.strip_prefix("numa="))
    {
        // The kernel emulates too: same nodes and distances, sizes to a quarter; it rounds more coarsely.
        let ours = firmware.emulate(&fake.parse().unwrap()).unwrap();
        assert_eq!(ours.distances, live.distances);
        for (ours, theirs) in ours.nodes.iter().zip(&live.nodes) {
            let (ours, theirs) = (ours.memory_bytes, theirs.memory_bytes);
            assert!(
                ours.abs_diff(theirs) * 4 < ours,
                "{ours} and {theirs} bytes"
            );
        }
        return;
    }
    assert_eq!(live.differences(&firmware), [""; 0]);
    let block = sys::node::memory_block_bytes(Path::new(NODE_DIR)).unwrap();
    for (theirs, ours) in live.nodes.iter().zip(&firmware.nodes) {
        assert!(theirs.memory_bytes <= ours.memory_bytes);
        // The kernel shows whole blocks: the firmware's ranges, rounded outwards.
        let blocks = |start: u64, end: u64| start / block..end.div_ceil(block);
        let covered = |ranges: &[numa::topology::MemoryRange]| -> std::collections::BTreeSet<u64> {
            ranges
                .iter()
                .flat_map(|range| blocks(range.base, range.base + range.len_bytes))
                .collect()
        };
        assert_eq!(
            covered(&theirs.ranges),
            covered(&ours.ranges),
            "node {}",
            theirs.id
        );
        let access = |node: &numa::Node| {
            node.access
                .clone()
                .map(|access| (access.initiators, access.read_latency_ns))
        };
        if theirs.access.is_some() {
            assert_eq!(access(theirs), access(ours), "node {}", theirs.id);
        }
    }
}

#[test]
fn bound_and_preferred_pages_are_where_they_should_be() {
    let topology = Topology::live().unwrap();
    for node in memory_nodes(&topology) {
        for policy in [Policy::Bind(vec![node]), Policy::Preferred(vec![node])] {
            let table = table(&topology);
            place(&topology, range(&table), &policy, Existing::Stay).unwrap();
            touch(&table);
            assert_eq!(
                table.pages_by_node().unwrap(),
                BTreeMap::from([(node, PAGES as u64)]),
                "{policy:?}"
            );
        }
    }
}

#[test]
fn interleaved_pages_are_even() {
    let topology = Topology::live().unwrap();
    let nodes = memory_nodes(&topology);
    let table = table(&topology);
    let applied = place(
        &topology,
        range(&table),
        &Policy::Interleave(nodes.clone()),
        Existing::Stay,
    )
    .unwrap();
    assert_eq!(applied.mode, Mode::Interleave);
    touch(&table);
    assert_even(&table.pages_by_node().unwrap(), &nodes, PAGES as u64);
}

#[test]
fn weighted_pages_are_as_heavy_as_they_should_be() {
    let topology = Topology::live().unwrap();
    let nodes = memory_nodes(&topology);
    let weight = |node: NodeId| format!("/sys/kernel/mm/mempolicy/weighted_interleave/node{node}");
    if !in_guest() || nodes.len() < 2 || fs::write(weight(nodes[0]), "3").is_err() {
        println!("skipped: needs a guest with two nodes with memory, and Linux 6.9");
        return;
    }
    nodes[1..]
        .iter()
        .for_each(|&node| fs::write(weight(node), "1").unwrap());
    let table = table(&topology);
    let policy = Policy::WeightedInterleave(nodes.clone());
    let applied = place(&topology, range(&table), &policy, Existing::Stay).unwrap();
    assert_eq!(applied.mode, Mode::WeightedInterleave);
    touch(&table);
    let pages = table.pages_by_node().unwrap();
    fs::write(weight(nodes[0]), "1").unwrap();
    let first = PAGES as u64 * 3 / (nodes.len() as u64 + 2);
    assert!(
        pages[&nodes[0]].abs_diff(first) * 50 <= first,
        "{pages:?}, {first} expected on the first"
    );
}

/// EBUSY.
const BUSY: i32 = 16;

fn eventually(mut done: impl FnMut() -> bool) {
    let tried = (0..200).any(|_| {
        let is_done = done();
        std::thread::yield_now();
        is_done
    });
    assert!(tried, "not after 200 tries");
}

#[test]
fn pages_move_when_told() {
    let topology = Topology::live().unwrap();
    let nodes = memory_nodes(&topology);
    let table = table(&topology);
    table[WORDS_PER_PAGE * 9].store(99, Ordering::Relaxed);
    touch(&table);
    table[WORDS_PER_PAGE * 9 + 1].store(98, Ordering::Relaxed);
    for &node in nodes.iter().chain(&nodes) {
        // By policy, and page by page. The kernel leaves out a page that is busy just now, such as one on its way
        // to the LRU lists; it moves at the next try.
        let all_on =
            |node| table.pages_by_node().unwrap() == BTreeMap::from([(node, PAGES as u64)]);
        eventually(|| {
            place(
                &topology,
                range(&table),
                &Policy::Bind(vec![node]),
                Existing::Move,
            )
            .unwrap();
            all_on(node)
        });
        let next = nodes[(nodes.iter().position(|&id| id == node).unwrap() + 1) % nodes.len()];
        let pages: Vec<usize> = range(&table).step_by(4096).collect();
        let target = i32::try_from(next.0).unwrap();
        eventually(|| {
            let mut after = vec![-1; pages.len()];
            let left =
                mempolicy::move_pages_to(None, &pages, &vec![target; pages.len()], &mut after)
                    .unwrap();
            assert!(
                after
                    .iter()
                    .all(|&node| node == target || node == -BUSY || left > 0),
                "neither moved nor busy"
            );
            all_on(next)
        });
        assert_eq!(table[WORDS_PER_PAGE * 9 + 1].load(Ordering::Relaxed), 98);
    }
}

#[test]
fn several_bound_nodes_have_a_home() {
    let topology = Topology::live().unwrap();
    let nodes = memory_nodes(&topology);
    if nodes.len() < 2 {
        println!("skipped: one node with memory");
        return;
    }
    for policy in [
        Policy::Bind(nodes[1..].iter().chain(&nodes[..1]).copied().collect()),
        Policy::Preferred(nodes[..2].to_vec()),
    ] {
        let table = table(&topology);
        let applied = place(&topology, range(&table), &policy, Existing::Stay).unwrap();
        assert!(applied.home, "{policy:?}: {applied:?}");
        touch(&table);
        let (Policy::Bind(list) | Policy::Preferred(list)) = &policy else {
            unreachable!()
        };
        assert_eq!(
            table.pages_by_node().unwrap(),
            BTreeMap::from([(list[0], PAGES as u64)]),
            "{policy:?}"
        );
    }
}

#[test]
fn tables_are_spread_unless_hashdist_is_0() {
    let topology = Topology::live().unwrap();
    let nodes = memory_nodes(&topology);
    for words in [PAGES * WORDS_PER_PAGE, 10_000 * WORDS_PER_PAGE] {
        let spread = InterleavedTable::<u64>::new(words, &topology, Hashdist::Spread).unwrap();
        spread.populate().unwrap();
        assert_even(
            &spread.pages_by_node().unwrap(),
            &nodes,
            (words / WORDS_PER_PAGE) as u64,
        );
        let single = InterleavedTable::<u64>::new(words, &topology, Hashdist::OneNode).unwrap();
        single.populate().unwrap();
        let pages = single.pages_by_node().unwrap();
        assert_eq!(
            pages,
            BTreeMap::from([(single.nodes()[0], (words / WORDS_PER_PAGE) as u64)])
        );
    }
}

#[test]
fn emulated_nodes_place_on_real_ones() {
    let live = Topology::live().unwrap();
    let fake = live.emulate(&"2U".parse().unwrap()).unwrap();
    for node in fake.memory_nodes() {
        let table = table(&live);
        place(
            &fake,
            range(&table),
            &Policy::Bind(vec![node.id]),
            Existing::Stay,
        )
        .unwrap();
        touch(&table);
        assert_eq!(
            table.pages_by_node().unwrap(),
            BTreeMap::from([(node.backing.unwrap(), PAGES as u64)])
        );
    }
}

#[test]
fn the_kernels_counters_add_up() {
    for node in MemoryReport::live().unwrap().nodes {
        let Some(stat) = node.numastat else { continue };
        // They are counted CPU by CPU and summed without a lock.
        let (taken, by_place) = (
            stat.numa_hit + stat.numa_miss,
            stat.local_node + stat.other_node,
        );
        assert!(taken.abs_diff(by_place) <= taken / 100 + 1000, "{stat:?}");
    }
}

/// Not a test of its own: the child of those below.
#[test]
fn hold_pages() {
    common::hold_pages();
}

#[test]
fn pages_of_a_store_count_as_merged() {
    // A program that is executed from a memfd maps it privately, as guests map stores.
    let start_from = |name: &str| {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::empty()).unwrap();
        let mut file = fs::File::from(file);
        std::io::copy(
            &mut fs::File::open(std::env::current_exe().unwrap()).unwrap(),
            &mut file,
        )
        .unwrap();
        // Read-only from here on: the kernel does not execute what is open for writing.
        let own = |file: &fs::File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let program = fs::File::open(own(&file)).unwrap();
        drop(file);
        let child = holder(Path::new(&own(&program)), 1);
        let report = report_of(&child);
        end(child);
        report
    };
    let store = start_from("pageone-store");
    assert!(merged(&store) > 100, "{store:?}");
    let other = start_from("something-else");
    assert_eq!(merged(&other), 0, "{other:?}");
}

#[test]
fn a_process_is_placed_and_found_there() {
    const HELD: u64 = 5000;
    let topology = Topology::live().unwrap();
    let memory = MemoryReport::live().unwrap();
    let nodes: Vec<NodeId> = topology.memory_nodes().map(|node| node.id).collect();
    let requests = nodes
        .iter()
        .map(|&node| NodeRequest::Node(node))
        .chain([NodeRequest::Auto]);
    for request in requests {
        let choice: Choice = request
            .choose(&topology, &memory, &Starts::default(), HELD * 4096)
            .unwrap();
        let child = {
            let (topology, choice) = (topology.clone(), choice.clone());
            // A child inherits from the thread that starts it.
            let start = move || {
                choice.apply(&topology, Strictness::Bind).unwrap();
                holder(&std::env::current_exe().unwrap(), HELD)
            };
            std::thread::spawn(start).join().unwrap()
        };
        let report = report_of(&child);
        end(child);
        let (wanted, _) = choice.memory[0];
        assert!(
            report.nodes[&wanted].anonymous >= HELD,
            "{request:?}: {report:?}"
        );
        let elsewhere: u64 = report
            .nodes
            .iter()
            .filter(|&(&node, _)| node != wanted)
            .map(|(_, pages)| pages.anonymous)
            .sum();
        assert!(elsewhere < 200, "{request:?}: {report:?}");
        // A kernel that emulates nodes shows a CPU in several of them.
        let emulated = fs::read_to_string("/proc/cmdline")
            .unwrap_or_default()
            .contains("numa=fake");
        if choice.node == wanted && !emulated {
            assert!(
                report.threads.keys().eq([&choice.node]),
                "{request:?}: {report:?}"
            );
            assert!(report.local_share > 0.6, "{request:?}: {report:?}");
        }
    }
}
