//! Others who have to do with a guest's memory: debuggers, dumps, swap, khugepaged, KSM, and rings whose buffers the kernel
//! holds unseen. Each finds what the guest wrote, and the guest finds it afterwards.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Knob, Place, Running, Swap, alone, count, daemon, json, need_agent, wait_for};
use rustix::process::{Resource, Rlimit, Signal};
use support::{Guest, agent, check, guest_program};

const PAGES: usize = 1024;
const PAGE: usize = 4096;

/// A daemon and two guests that share all their pages; `options` for the daemon.
fn merged(place: &Place, options: &[&str]) -> (Running, [Guest; 2]) {
    need_agent();
    let mut all = vec!["--merge-period", "50ms", "--broken-rest", "50ms"];
    all.extend(options);
    let running = daemon(place, &all);
    let mut guests = [(); 2].map(|()| {
        let mut command = Command::new(guest_program(false));
        command
            .env("LD_PRELOAD", agent())
            .env("PAGEONE_SOCKET", place.socket());
        // Where it would leave a core.
        Guest::from(command.current_dir(place.path()))
    });
    guests.iter_mut().for_each(|guest| guest.offer(PAGES, 5));
    wait_sharing(place, PAGES as u64);
    (running, guests)
}

#[track_caller]
fn wait_sharing(place: &Place, pages: u64) {
    wait_for("pages to share", || {
        (count(&json(place), "pages_sharing") >= pages).then_some(())
    });
}

/// Waits until the engine has looked at everything so many times more.
#[track_caller]
fn wait_rounds(place: &Place, more: u64) {
    let before = count(&json(place), "full_scans");
    wait_for("rounds", || {
        (count(&json(place), "full_scans") >= before + more).then_some(())
    });
}

/// A guest's memory, as the kernel reads it.
fn memory(guest: &Guest) -> Vec<u8> {
    let memory = File::open(format!("/proc/{}/mem", guest.pid)).unwrap();
    let mut bytes = vec![0; PAGES * PAGE];
    memory
        .read_exact_at(&mut bytes, guest.memory as u64)
        .unwrap();
    bytes
}

/// How many pages from `start` on a dump holds as they were: an ELF file, whose segments say where they lay.
fn found_in(dump: &Path, start: usize, bytes: &[u8]) -> usize {
    let dump = File::open(dump).unwrap();
    let number = |at: u64, len: usize| {
        let mut number = [0; 8];
        dump.read_exact_at(&mut number[..len], at).unwrap();
        u64::from_le_bytes(number)
    };
    let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    // Of each segment: where it is in the file, where it lay, how long it is in the file.
    let segments: Vec<_> = (0..count)
        .map(|at| table + at * size)
        .map(|at| [8, 16, 32].map(|field| number(at + field, 8)))
        .collect();
    let is_there = |(page, wanted): &(usize, &[u8])| {
        let address = (start + page * PAGE) as u64;
        let mut there = [0; PAGE];
        segments.iter().any(|&[offset, begin, len]| {
            (begin..begin + len).contains(&address)
                && dump
                    .read_exact_at(&mut there, offset + address - begin)
                    .is_ok()
                && there == **wanted
        })
    };
    bytes.chunks(PAGE).enumerate().filter(is_there).count()
}

fn lacks(program: &str, package: &str) -> bool {
    let found = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if found.is_err() {
        common::tools::lacks(&format!("{program} (Debian: {package})"));
    }
    found.is_err()
}

#[test]
fn a_core_holds_merged_memory() {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.starts_with(['|', '/']) {
        return eprintln!("skipped: cores go to {}", pattern.trim());
    }
    let _alone = alone();
    let place = Place::new();
    let (_daemon, [mut guest, mut other]) = merged(&place, &[]);
    let bytes = memory(&guest);
    let pid = rustix::process::Pid::from_raw(guest.pid.cast_signed()).unwrap();
    let limit = Rlimit {
        current: None,
        maximum: None,
    };
    rustix::process::prlimit(Some(pid), Resource::Core, limit).unwrap();
    rustix::process::kill_process(pid, Signal::ABORT).unwrap();
    guest.process.wait().unwrap();
    let core = fs::read_dir(place.path())
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let is_core = |path: &PathBuf| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("core")
    };
    let core = core
        .into_iter()
        .find(is_core)
        .expect("the kernel left a core");
    assert_eq!(found_in(&core, guest.memory, &bytes), PAGES);
    other.run("check");
}

#[test]
fn gcore_finds_merged_memory() {
    if lacks("gdb", "gdb") || lacks("gcore", "gdb") {
        return;
    }
    let _alone = alone();
    let place = Place::new();
    let (_daemon, mut guests) = merged(&place, &[]);
    let dump = place.path().join("dump");
    let pid = guests[0].pid.to_string();
    let mut gcore = Command::new("gcore");
    gcore
        .arg("-o")
        .arg(&dump)
        .arg(&pid)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    assert!(gcore.status().unwrap().success());
    let bytes = memory(&guests[0]);
    let dump = dump.with_extension(&pid);
    assert_eq!(found_in(&dump, guests[0].memory, &bytes), PAGES);
    check(&mut guests);
}

#[test]
fn a_debugger_writes_to_one_guest_only() {
    if lacks("gdb", "gdb") {
        return;
    }
    let _alone = alone();
    let place = Place::new();
    let (_daemon, mut guests) = merged(&place, &[]);
    let mut gdb = Command::new("gdb");
    gdb.args(["-batch", "-nx", "-p", &guests[0].pid.to_string(), "-ex"]);
    let address = guests[0].memory + 9 * PAGE + 3;
    gdb.arg(format!(
        "set {{unsigned char}}{address} = {{unsigned char}}{address} ^ 255"
    ));
    assert!(
        gdb.stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap()
            .success()
    );
    let both = guests
        .each_mut()
        .map(|guest| guest.run("byte 9 3").parse::<u8>().unwrap());
    assert_eq!(both[0], !both[1], "the debugger wrote to one");
    guests[1].run("check");
    // The other thinks of what it wrote itself.
    guests[0].run("fill 9 1 77");
    guests[1].run("fill 9 1 77");
    wait_sharing(&place, PAGES as u64);
    check(&mut guests);
}

/// KiB of a guest that are swapped out, its pages in memory files not counted.
fn swapped_kib(guest: &Guest) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.pid)).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSwap:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn swapped_memory_comes_back_and_is_merged() {
    const MADV_PAGEOUT: i32 = 21;
    let _alone = alone();
    let place = Place::new();
    let Some(_swap) = Swap::on(place.path().join("swap")) else {
        return;
    };
    let (_daemon, mut guests) = merged(&place, &[]);
    // Merged pages, and private ones that were merged.
    for guest in &mut guests {
        guest.run("fill 0 256 91");
        guest.run(&format!("advise 0 {PAGES} {MADV_PAGEOUT}"));
    }
    if guests.iter().all(|guest| swapped_kib(guest) == 0) {
        wait_rounds(&place, 3);
        guests
            .iter_mut()
            .for_each(|guest| drop(guest.run("fill 0 256 92")));
        guests
            .iter_mut()
            .for_each(|guest| drop(guest.run(&format!("advise 0 {PAGES} {MADV_PAGEOUT}"))));
    }
    assert!(
        guests.iter().any(|guest| swapped_kib(guest) > 0),
        "nothing was swapped"
    );
    wait_rounds(&place, 10);
    check(&mut guests);
    wait_sharing(&place, PAGES as u64);
    check(&mut guests);
}

#[test]
fn khugepaged_leaves_merged_memory_right() {
    const KHUGEPAGED: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged";
    const MADV_HUGEPAGE: i32 = 14;
    let _alone = alone();
    let place = Place::new();
    let sleep = "/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs";
    let Some(_knob) = Knob::set(sleep, "10") else {
        return eprintln!("skipped: no khugepaged");
    };
    let (_daemon, mut guests) = merged(&place, &[]);
    let scans = || {
        fs::read_to_string(format!("{KHUGEPAGED}/full_scans"))
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
    };
    for round in 0..3 {
        let before = scans();
        for guest in &mut guests {
            guest.run(&format!("advise 0 {PAGES} {MADV_HUGEPAGE}"));
            guest.run(&format!("fill {} 300 {}", 64 * round, 40 + round));
            guest.run(&format!("advise 0 {PAGES} 12"));
        }
        wait_for("khugepaged", || (scans() >= before + 2).then_some(()));
        check(&mut guests);
        wait_sharing(&place, PAGES as u64 / 2);
    }
    check(&mut guests);
}

#[test]
fn ksm_on_the_same_memory_loses_nothing() {
    let _alone = alone();
    let place = Place::new();
    let (Some(_run), Some(_pages)) = (
        Knob::set("/sys/kernel/mm/ksm/run", "1"),
        Knob::set("/sys/kernel/mm/ksm/pages_to_scan", "5000"),
    ) else {
        return eprintln!("skipped: no KSM");
    };
    need_agent();
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mut guests = [(); 2].map(|()| Guest::start_with(&place.socket(), "PAGEONE_ALSO_KSM", "1"));
    guests.iter_mut().for_each(|guest| guest.offer(PAGES, 5));
    for round in 0..4 {
        // Each page is shared by the one that came first; the other leaves it alone.
        wait_for("pages to be shared by either", || {
            let status = json(&place);
            let [ours, others] = ["pages_sharing", "pages_pinned"].map(|key| count(&status, key));
            (2 * ours + others >= PAGES as u64).then_some(())
        });
        wait_rounds(&place, 5);
        check(&mut guests);
        guests
            .iter_mut()
            .for_each(|guest| drop(guest.run(&format!("fill {} 200 {}", 150 * round, 60 + round))));
    }
    check(&mut guests);
}

#[test]
fn a_ring_of_provided_buffers_keeps_its_page() {
    let _alone = alone();
    let place = Place::new();
    let (_daemon, mut guests) = merged(&place, &[]);
    let ring = &mut guests[0];
    match ring.ask("provide 20") {
        Ok(_) => {}
        Err(why) => return eprintln!("skipped: no ring of provided buffers: {why}"),
    }
    // The other guest has the same: were it not for the ring, the two pages would be merged.
    guests[1].run("zero 20 1");
    wait_rounds(&place, 30);
    assert_eq!(
        guests[0].run("take 20"),
        "8",
        "the kernel reads the page that the guest writes"
    );
    let status = json(&place);
    let pid = u64::from(guests[0].pid);
    let guest = status["guests"]
        .as_array()
        .unwrap()
        .iter()
        .find(|guest| guest["pid"] == pid)
        .unwrap();
    assert!(
        guest["pins"]
            .as_str()
            .unwrap_or_default()
            .contains("io_uring"),
        "{guest}"
    );
    guests[0].run("unpin");
    check(&mut guests);
}
