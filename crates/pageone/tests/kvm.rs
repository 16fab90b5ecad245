//! Merging under KVM: virtual machines whose vCPUs read and write their memory meanwhile
//! (`examples/vmm.rs`), so that MMU notifiers, and faults from inside KVM, meet the merge window.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::process::Command;

use common::{Place, daemon, json, wait_for};
use support::{Guest, agent, built};

/// Pages of data in each machine; behind each lies the same.
const PAGES: usize = 256;

fn start(place: &Place) -> Guest {
    let program = built().join("examples/vmm");
    assert!(
        program.exists(),
        "run `cargo build -p pageone --examples` first"
    );
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", agent());
    let mut guest = Guest::from(command.env("PAGEONE_SOCKET", place.socket()));
    guest.memory = guest.run("address").parse().unwrap();
    guest
}

fn rounds(guest: &mut Guest) -> u64 {
    guest.run("rounds").parse().unwrap()
}

fn sharing(place: &Place) -> u64 {
    json(place)["pages_sharing"].as_u64().unwrap()
}

fn check(guest: &mut Guest) {
    guest.run("check");
}

/// Waits until the vCPU has gone over all its memory twice more.
fn go_on(guest: &mut Guest) {
    let before = rounds(guest);
    wait_for("the vCPU", || (rounds(guest) >= before + 2).then_some(()));
}

#[test]
fn a_running_machine_is_merged_breaks_what_it_writes_and_reads_no_wrong_byte() {
    if let Err(why) = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        eprintln!("skipped: /dev/kvm: {why}");
        return;
    }
    let place = Place::new();
    let mut first = daemon(&place, &["--merge-period", "50ms"]);
    let mut machines = [start(&place), start(&place)];
    wait_for("the machines to be merged", || {
        (sharing(&place) >= PAGES as u64).then_some(())
    });
    // The vCPUs have gone over their memory all the time, and go over it merged.
    machines.iter_mut().for_each(go_on);
    for page in [0, 6, 100, PAGES - 1] {
        assert_eq!(
            machines[0].frame(page),
            machines[1].frame(page),
            "page {page}"
        );
    }
    machines.iter_mut().for_each(check);

    let before = sharing(&place);
    // The vCPU of one writes: that page is its own again, its neighbours stay shared.
    machines[0].run("write 7");
    for page in (6..PAGES).step_by(7) {
        assert_ne!(
            machines[0].frame(page),
            machines[1].frame(page),
            "page {page}"
        );
        assert_eq!(machines[0].frame(page - 1), machines[1].frame(page - 1));
    }
    wait_for("the broken pages to be seen", || {
        (sharing(&place) + PAGES as u64 / 7 <= before).then_some(())
    });
    machines.iter_mut().for_each(go_on);
    machines.iter_mut().for_each(check);

    // Without a daemon, and with the next one.
    first.signal(9);
    first.end();
    machines[1].run("write 1");
    machines.iter_mut().for_each(go_on);
    let _next = daemon(&place, &["--merge-period", "50ms"]);
    machines[0].run("write 2");
    machines.iter_mut().for_each(go_on);
    machines.iter_mut().for_each(check);
}
