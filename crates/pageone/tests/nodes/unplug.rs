//! Memory that goes: the kernel moves what a block holds, canonical pages too, and does without it.
//!
//! The test guest `unplug` of `make test-numa` tries it, whose second node is a memory device. Elsewhere the memory is the machine's.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use sys::mempolicy::{self, Mode, NodeMask};

use super::common::{Knob, PATIENCE, Place, alone, json, wait_for};
use super::support::Guest;
use super::{
    APART, PAGES, counted, nodes, on_node, refill, set, set_unmerged, shared, start, two_nodes,
    wait_shared, wait_store_nodes,
};

/// Set in the test guest whose second node is a memory device.
fn may_unplug() -> bool {
    std::env::var_os("PAGEONE_TEST_UNPLUG").is_some()
}

/// The memory of a node, in blocks that the kernel can take away; it is all there again on drop.
struct Blocks {
    all: Vec<PathBuf>,
    block_bytes: u64,
}

impl Blocks {
    fn of(node: u32) -> Self {
        let size = std::fs::read_to_string("/sys/devices/system/memory/block_size_bytes").unwrap();
        let folder = std::fs::read_dir("/sys/devices/system/memory").unwrap();
        let paths = folder.map(|entry| entry.unwrap().path());
        Self {
            all: paths
                .filter(|path| path.join(format!("node{node}")).exists())
                .collect(),
            block_bytes: u64::from_str_radix(size.trim(), 16).unwrap(),
        }
    }

    /// Has the kernel move what a block holds, and do without the block. It gives up where a page is busy.
    fn take_away(&self, block: &Path) {
        let state = block.join("state");
        wait_for("a block to go offline", || {
            let is_offline = std::fs::read_to_string(&state).unwrap().trim() == "offline";
            (is_offline || std::fs::write(&state, "offline").is_ok()).then_some(())
        });
    }

    /// The block that a frame is in.
    fn with_frame(&self, frame: u64) -> &Path {
        let name = format!("memory{}", frame * 4096 / self.block_bytes);
        let mut blocks = self.all.iter();
        let block = blocks.find(|path| path.ends_with(&name));
        block.unwrap_or_else(|| panic!("{name} of {:?}", self.all))
    }
}

impl Blocks {
    fn bring_back(&self) {
        for block in &self.all {
            // What is online already says so.
            let _ = std::fs::write(block.join("state"), "online_movable");
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.bring_back();
    }
}

/// The only CPU of a node, which is offline until drop.
struct Cpu(PathBuf);

impl Cpu {
    fn take_away(node: u32) -> Self {
        let live = numa::Topology::live().unwrap();
        let its = &live.node(numa::NodeId(node)).unwrap().cpus;
        let [cpu] = its[..] else {
            panic!("node {node} has CPUs {its:?}");
        };
        let its = Self(format!("/sys/devices/system/cpu/cpu{cpu}/online").into());
        std::fs::write(&its.0, "0").unwrap();
        its
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.0, "1");
    }
}

/// A guest whose memory comes from a node while the node has some.
fn preferring(place: &Place, node: u32) -> Guest {
    let mask = NodeMask::from_nodes([node]).unwrap();
    // The child inherits the policy of this thread.
    mempolicy::set_mempolicy(Mode::Preferred, &mask).unwrap();
    let mut guest = Guest::start(&place.socket());
    mempolicy::set_mempolicy(Mode::Default, &NodeMask::EMPTY).unwrap();
    guest.map(PAGES);
    refill(&mut guest);
    guest
}

#[test]
fn a_node_whose_memory_is_taken_away_takes_no_page_along() {
    let _alone = alone();
    if !may_unplug() {
        println!("left to the guest with a memory device");
        return;
    }
    let [first, last] = two_nodes().expect("a node with memory of its own, and the device");
    let blocks = Blocks::of(last);
    let place = Place::new();
    let _daemon = start(&place, APART.0, APART.1);
    let mut guests = vec![preferring(&place, last), preferring(&place, last)];
    guests.push(on_node(&place, first));
    wait_shared(&place, (PAGES, PAGES));
    guests[0].run("check"); // every page is there again
    wait_store_nodes(&place, &[(last, PAGES, 0)]);

    let block = blocks.with_frame(guests[0].frame(7).unwrap());
    blocks.take_away(block);
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    blocks.all.iter().for_each(|block| blocks.take_away(block));
    let left = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap();
    assert_eq!(left.trim(), first.to_string());
    let here = vec![i32::try_from(first).unwrap(); PAGES];
    wait_for("all three to share on the node that is left", || {
        guests.iter_mut().for_each(|guest| drop(guest.run("check")));
        (shared(&json(&place)) == (PAGES as u64, 2 * PAGES as u64)).then_some(())
    });
    for guest in &mut guests {
        guest.run("check");
        assert_eq!(nodes(guest), here);
    }
    assert_eq!(guests[0].frame(7), guests[2].frame(7));
    wait_store_nodes(&place, &[(first, PAGES, 0)]);

    // Its CPU goes as well: the daemon serves, and a new guest shares.
    let cpu = Cpu::take_away(last);
    assert!(json(&place).is_object());
    guests.push(on_node(&place, first));
    wait_shared(&place, (PAGES, 3 * PAGES));
    guests.pop();
    drop(cpu);

    // The memory comes back, and with it guests that share there.
    drop(blocks);
    guests.extend([preferring(&place, last), preferring(&place, last)]);
    wait_shared(&place, (2 * PAGES, 3 * PAGES));
    let there = vec![i32::try_from(last).unwrap(); PAGES];
    for (number, guest) in guests.iter_mut().enumerate() {
        guest.run("check");
        let wanted = if number < 3 { &here } else { &there };
        assert_eq!(&nodes(guest), wanted, "guest {number}");
    }
}

fn each(guests: &mut [Guest], command: &str) {
    guests.iter_mut().for_each(|guest| drop(guest.run(command)));
}

/// Each of it has a test of its own; here it all happens at once, while every guest writes by fits and starts.
#[test]
fn a_node_whose_memory_comes_and_goes_while_the_knob_turns_and_nodes_are_balanced() {
    const TIMES: u32 = 2;
    let _alone = alone();
    if !may_unplug() {
        println!("left to the guest with a memory device");
        return;
    }
    let [first, last] = two_nodes().expect("a node with memory of its own, and the device");
    let blocks = Blocks::of(last);
    let _balancing =
        Knob::set("/proc/sys/kernel/numa_balancing", "1").expect("a kernel that balances");
    let place = Place::new();
    let _daemon = start(&place, APART.0, APART.1);
    let mut guests = vec![preferring(&place, last), preferring(&place, last)];
    guests.extend([on_node(&place, first), on_node(&place, first)]);
    wait_shared(&place, (2 * PAGES, 2 * PAGES));
    let before = counted("numa_pte_updates");

    let (turned, taken, over) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
    let deadline = Instant::now() + PATIENCE;
    let is_over = || over.load(Relaxed) || Instant::now() > deadline;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over() {
                let across = 1 - turned.load(Relaxed) % 2;
                // Where a guest merges again before the knob turns, the turn is refused, and tried again.
                let knob = format!("merge_across_nodes={across}");
                match set(&place, &["--unmerge", &knob]) {
                    Ok(()) => drop(turned.fetch_add(1, Relaxed)),
                    Err(why) => println!("not turned: {}", why.trim()),
                }
                std::thread::sleep(Duration::from_millis(300));
            }
        });
        scope.spawn(|| {
            while !is_over() {
                let all = blocks.all.iter().map(|block| block.join("state"));
                // A block with a busy page stays for now.
                let gone = all.filter(|state| std::fs::write(state, "offline").is_ok());
                taken.fetch_add(gone.count().try_into().unwrap(), Relaxed);
                std::thread::sleep(Duration::from_millis(200));
                blocks.bring_back();
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        // There and back, at least.
        let enough = || {
            let balanced = counted("numa_pte_updates") >= before + 100;
            balanced && turned.load(Relaxed) >= TIMES && taken.load(Relaxed) >= TIMES
        };
        while !enough() && !is_over() {
            // In between, the engine's workers have a processor: they run on idle ones.
            each(&mut guests, "writers 1 1");
            std::thread::sleep(Duration::from_millis(200));
            for guest in &mut guests {
                let said = guest.run("stop");
                assert!(said.ends_with(" 0 mismatches"), "{said}");
            }
            // It answers all the while.
            json(&place);
            std::thread::sleep(Duration::from_millis(400));
        }
        over.store(true, Relaxed);
    });
    let (turned, taken) = (turned.into_inner(), taken.into_inner());
    let updates = counted("numa_pte_updates") - before;
    println!(
        "the knob turned {turned} times, {taken} blocks went, {updates} pages were taken away"
    );
    each(&mut guests, "check");
    assert!(turned >= TIMES && taken >= TIMES && updates >= 100);

    // All that is over, and everything shares where it may.
    blocks.bring_back();
    set_unmerged(&place, &["merge_across_nodes=1"]);
    for guest in &mut guests {
        guest.run(&format!("mapover 0 {PAGES}"));
        refill(guest);
    }
    wait_shared(&place, (PAGES, 3 * PAGES));
    each(&mut guests, "check");
}
