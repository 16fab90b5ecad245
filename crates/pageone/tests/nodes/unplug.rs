//! Memory that goes: the kernel moves what a block holds, canonical pages too, and does without it.
//!
//! The test guest `unplug` of `make test-numa` tries it, whose second node is a memory device. Elsewhere the memory is the machine's.

use std::path::{Path, PathBuf};

use sys::mempolicy::{self, Mode, NodeMask};

use super::common::{Place, alone, json, wait_for};
use super::support::Guest;
use super::{
    APART, PAGES, nodes, on_node, refill, shared, start, two_nodes, wait_shared, wait_store_nodes,
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

impl Drop for Blocks {
    fn drop(&mut self) {
        for block in &self.all {
            // What is online already says so.
            let _ = std::fs::write(block.join("state"), "online_movable");
        }
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
