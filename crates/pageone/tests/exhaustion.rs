//! Means that run out: the daemon's memory and descriptors, a guest's mappings, patience.
//! Guests must keep their bytes, and merging must go on where it can (docs/operations.md).
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
mod memcg;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{
    Place, Running, alone, classed_and_present, count, daemon, json, output, pageone, status, text,
    wait_for,
};
use memcg::Memcg;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{Guest, check};

const MIB_PAGES: usize = 256;

/// Waits until so many pages share another one.
fn sharing(place: &Place, pages: usize) {
    wait_for("pages to be merged", || {
        let status = status(place).stdout;
        let status: Value = serde_json::from_slice(&status).ok()?;
        (count(&status, "pages_sharing") >= pages as u64).then_some(())
    });
}

/// A daemon that the shell starts, after `setup`.
fn daemon_after(setup: &str, place: &Place) -> Running {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{setup}; exec \"$@\""), "sh"]);
    command.arg(pageone().get_program());
    command.args(["daemon", "--no-keep", "--merge-period", "50ms", "--socket"]);
    let command = command.arg(place.socket()).env("PAGEONE_LOG", "error");
    let running = Running::start(command.stdin(Stdio::null()));
    wait_for("the daemon", || {
        status(place).status.success().then_some(())
    });
    running
}

fn fast(place: &Place) -> Running {
    daemon(place, &["--merge-period", "50ms"])
}

/// Two guests with equal memory.
fn pair(place: &Place, pages: usize) -> [Guest; 2] {
    let mut guests = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    for guest in &mut guests {
        guest.offer(pages, 1);
    }
    guests
}

/// Other content, in memory that was never merged.
fn renew(guests: &mut [Guest], pages: usize, seed: u64) {
    for guest in guests {
        guest.renew(pages, seed);
    }
}

#[test]
fn a_daemon_killed_for_its_memory_costs_no_byte() {
    let _alone = alone();
    // Room for the daemon and a part of the canonical pages.
    let Some(memcg) = Memcg::new(32 << 20) else {
        return;
    };
    let place = Place::new();
    let mut daemon = daemon_after(&memcg.enter(), &place);
    let pages = 48 * MIB_PAGES;
    let mut guests = pair(&place, pages);
    assert_eq!(daemon.end(), 128 + 9, "killed for its memory");
    assert!(memcg.kills() > 0, "the kernel counts it");
    check(&mut guests);
    // What was merged is still held by the guests alone, and still copied on write.
    guests[0].run("fill 0 1000 77");
    check(&mut guests);
    let _next = fast(&place);
    renew(&mut guests, 1024, 9);
    sharing(&place, 1024);
    check(&mut guests);
    // The canonical pages of the dead daemon go with the last guest that maps them.
    drop(guests);
    wait_for("the group to be empty", || {
        (memcg.usage() < 1 << 20).then_some(())
    });
}

#[test]
fn guests_do_not_suffer_from_a_daemon_whose_calls_fail_for_want_of_memory() {
    let _alone = alone();
    let Some(memcg) = Memcg::new(32 << 20).filter(Memcg::fail_instead_of_kill) else {
        eprintln!("skipped: no memory group that kills no process when it is full");
        return;
    };
    let place = Place::new();
    let mut daemon = daemon_after(&memcg.enter(), &place);
    let pages = 48 * MIB_PAGES;
    let mut guests = pair(&place, pages);
    wait_for("calls to fail", || (memcg.failures() > 0).then_some(()));
    check(&mut guests);
    renew(&mut guests, 1024, 9);
    guests[1].run("advise 1024 500 4");
    guests[0].run("fork");
    guests[0].run("childcheck");
    guests[0].run("childexit");
    check(&mut guests);
    assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon lives");
    // With memory again it goes on.
    memcg.limit(512 << 20);
    renew(&mut guests, pages, 20_000);
    sharing(&place, pages);
    check(&mut guests);
}

#[test]
fn a_daemon_without_descriptors_serves_whom_it_can_and_the_others_later() {
    let _alone = alone();
    let place = Place::new();
    let mut daemon = daemon_after("ulimit -n 128", &place);
    let mut guests: Vec<Guest> = (0..24).map(|_| Guest::start(&place.socket())).collect();
    for guest in &mut guests {
        guest.offer(64, 5);
    }
    let served = |guests: &mut [Guest]| {
        let served = guests
            .iter_mut()
            .filter_map(|guest| guest.ask("served").ok());
        served.filter(|served| served == "1").count()
    };
    wait_for("some to be served", || {
        (served(&mut guests) >= 2).then_some(())
    });
    // All ask to be served, not all can be, however long they ask.
    std::thread::sleep(Duration::from_secs(3));
    assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon lives");
    let first = served(&mut guests);
    println!("{first} of 24 guests are served with 128 descriptors");
    assert!((2..24).contains(&first), "{first} guests are served");
    check(&mut guests);
    // Those that go make room for those that wait.
    guests.drain(..18);
    wait_for("the others to be served", || {
        (served(&mut guests) == 6).then_some(())
    });
    renew(&mut guests, 64, 6);
    sharing(&place, 5 * 64);
    check(&mut guests);
}

#[test]
fn a_guest_without_mappings_to_spare_is_not_hurt() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    // Merged first, then out of mappings: discarding a part of a merged run wants one more.
    let mut guests = pair(&place, 1024);
    sharing(&place, 1024);
    guests[0].run("crowd 0");
    guests[0].run("advise 100 1 4");
    guests[0].run("advise 300 3 8");
    guests[0].run("fill 500 2 9");
    check(&mut guests);

    // Few mappings left, then much to merge: the guest keeps enough for itself.
    let mut guests = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    for (seed, guest) in (1..).zip(&mut guests) {
        guest.map(2048);
        // Every second page is shared, and would take two mappings.
        for page in 0..2048 {
            let seed = if page % 2 == 0 {
                50_000 + page
            } else {
                seed * 100_000 + page
            };
            guest.run(&format!("fill {page} 1 {seed}"));
        }
        guest.run("crowd 600");
        guest.run("advise 0 2048 12");
    }
    wait_for("all to be looked at", || {
        let status = json(&place);
        let rounds = count(&status, "full_scans");
        (rounds > 20).then_some(())
    });
    std::thread::sleep(Duration::from_secs(1));
    for guest in &mut guests {
        let left: usize = guest.run("crowd 0").parse().unwrap();
        println!("{left} of 600 mappings left");
        assert!(left >= 300, "the engine left {left} of 600 mappings");
    }
    check(&mut guests);
}

#[test]
fn a_stopped_guest_stops_nobody_else() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = fast(&place);
    let mut guests = pair(&place, 512);
    sharing(&place, 512);
    let pid = Pid::from_child(&guests[0].process);
    kill_process(pid, Signal::STOP).unwrap();
    let mut others = [Guest::start(&place.socket()), Guest::start(&place.socket())];
    for guest in &mut others {
        guest.offer(512, 4000);
    }
    sharing(&place, 1024);
    wait_for("the stopped guest to be told", || {
        let status = json(&place);
        let mut guests = status["guests"].as_array().unwrap().iter();
        guests
            .any(|guest| guest["responsive"] == false)
            .then_some(())
    });
    check(&mut others);
    is_named_where_nothing_shall_be_merged(&place, guests[0].process.id());
    kill_process(pid, Signal::CONT).unwrap();
    renew(&mut guests, 512, 8000);
    sharing(&place, 1024);
    wait_for("all to answer", || {
        let status = json(&place);
        let mut guests = status["guests"].as_array().unwrap().iter();
        guests
            .all(|guest| guest["responsive"] == true)
            .then_some(())
    });
    check(&mut guests);
}

/// The knob is turned, and the command says of whom pages are still merged.
fn is_named_where_nothing_shall_be_merged(place: &Place, pid: u32) {
    let turn = |knob: &str| {
        let socket = place.socket();
        output(pageone().arg("set").arg("--socket").arg(socket).arg(knob))
    };
    let done = turn("run=2");
    let (told, why) = (text(&done.stdout), text(&done.stderr));
    assert_eq!(done.status.code(), Some(1), "{why}");
    assert_eq!(told, "run: 1 → 2\n");
    let late = format!("pages are still merged: process {pid} does not answer in time");
    assert!(
        why.starts_with("pageone: run is 2, but ") && why.contains(&late),
        "{why}"
    );
    assert_eq!(json(place)["run"], 2);
    assert!(turn("run=1").status.success());
}

#[test]
fn stores_that_are_full_take_no_more_until_they_may() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(
        &place,
        &[
            "--merge-period",
            "50ms",
            "--threads",
            "2",
            "--store-limit",
            "1",
        ],
    );
    let pages = 4 * MIB_PAGES;
    let mut guests = pair(&place, pages);
    wait_for("the stores to be full", || {
        let status = json(&place);
        let is_full = count(&status, "store_bytes") >= 1 << 20;
        let is_shared = count(&status, "pages_sharing") > 0;
        (count(&status, "pages_over_limit") > 0 && is_full && is_shared).then_some(())
    });
    // And they stay so.
    std::thread::sleep(Duration::from_millis(500));
    let status = json(&place);
    let (shared, bytes) = (
        count(&status, "pages_sharing"),
        count(&status, "store_bytes"),
    );
    println!("{shared} of {pages} pages share, {bytes} bytes are stored");
    // Each of two workers may have looked before the other one's batch of 64.
    assert!(
        (1 << 20..=(1 << 20) + 64 * 4096).contains(&bytes),
        "{bytes}"
    );
    assert!(shared <= MIB_PAGES as u64 + 64 && shared > 0, "{status}");
    let (classed, present) = classed_and_present(&status);
    assert_eq!(classed, present, "{status}");
    check(&mut guests);
    // What is stored is still shared with those who come.
    let mut third = Guest::start(&place.socket());
    third.offer(pages, 1);
    wait_for("a third guest to share", || {
        (count(&json(&place), "pages_sharing") >= shared + MIB_PAGES as u64 / 2).then_some(())
    });
    assert!(count(&json(&place), "store_bytes") <= (1 << 20) + 64 * 4096);
    let mut set = pageone();
    set.args(["set", "store_limit=none", "--socket"])
        .arg(place.socket());
    assert!(output(&mut set).status.success());
    sharing(&place, 2 * pages);
    check(&mut guests);
    third.run("check");
}

/// Who floods: run by the next test in a process of another user's.
#[test]
#[ignore = "a part of the next test"]
fn flooder() {
    let Ok(socket) = std::env::var("FLOOD_SOCKET") else {
        return;
    };
    let mut held = Vec::new();
    loop {
        if let Ok(connection) = sys::socket::connect(socket.as_str()) {
            let packet = [u8::try_from(held.len() % 256).unwrap(); 200];
            if held.len() % 3 == 0 {
                let _ = sys::socket::send(&connection, &packet[..1 + held.len() % 199], &[]);
            }
            held.push(connection);
        }
        if held.len() >= 500 {
            held.drain(..250);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn guests_are_served_while_another_user_floods_the_socket() {
    let _alone = alone();
    let place = Place::new();
    std::fs::set_permissions(place.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let _daemon = fast(&place);
    const NOBODY: u32 = 65534;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "flooder", "--ignored"])
        .env("FLOOD_SOCKET", place.socket());
    let command = command.uid(NOBODY).gid(NOBODY).stdout(Stdio::null());
    let mut flooder = match command.spawn() {
        Ok(flooder) => Running(flooder),
        Err(why) => return eprintln!("skipped: no process of another user: {why}"),
    };
    std::thread::sleep(Duration::from_secs(1));
    let mut guests = pair(&place, 1024);
    sharing(&place, 1024);
    check(&mut guests);
    renew(&mut guests, 512, 99);
    sharing(&place, 1024);
    check(&mut guests);
    assert!(flooder.0.try_wait().unwrap().is_none(), "the flood went on");
}
