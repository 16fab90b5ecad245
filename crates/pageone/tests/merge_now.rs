//! `pageone merge`: memory written a moment ago is merged at once, and the answer tells the saving. The daemons here
//! begin a round an hour, so nothing else merges.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::{
    Place, alone, bench_guest, count, daemon, install, json, need_agent, output, pageone, text,
    wait_for,
};
use pageone::bench::{Content, Guest};

const PATIENCE: Duration = Duration::from_secs(60);
const SELDOM: [&str; 4] = ["--merge-period", "1h", "--threads", "2"];

/// 16 MiB a guest, half of it the same in all.
fn content() -> Content {
    Content {
        seed: 17,
        dup: 0.5,
        run_pages: 32,
        zero_prefix: 0.0,
        pages: 4096,
        shuffle: true,
    }
}

/// A guest that has offered its memory, and is known to the daemon.
fn guest(place: &Place, number: u64) -> Guest {
    guest_of(place, number, &content())
}

fn guest_of(place: &Place, number: u64, content: &Content) -> Guest {
    let mut guest = bench_guest(place, number, content);
    guest.tell("offer").unwrap();
    guest.answer(PATIENCE).unwrap();
    let pid = u64::from(guest.pid());
    wait_for("the guest to be served", || {
        let status = json(place);
        let guests = status["guests"].as_array().unwrap();
        guests
            .iter()
            .any(|guest| count(guest, "pid") == pid)
            .then_some(())
    });
    guest
}

fn merge(place: &Place, pids: &[u32], flags: &[&str]) -> Output {
    let mut command = pageone();
    command
        .arg("merge")
        .args(flags)
        .arg("--socket")
        .arg(place.socket());
    output(command.args(pids.iter().map(u32::to_string)))
}

fn merged(place: &Place, pids: &[u32]) -> serde_json::Value {
    merged_by(place, pids, &["--wait"])
}

fn merged_by(place: &Place, pids: &[u32], flags: &[&str]) -> serde_json::Value {
    let output = merge(place, pids, &[flags, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    common::assert_head(&answer);
    answer
}

fn verify(guests: &mut [Guest]) {
    for guest in guests {
        guest.tell("verify").unwrap();
        assert_eq!(guest.answer(PATIENCE).unwrap().errors, 0);
    }
}

#[test]
fn memory_is_merged_when_somebody_asks() {
    let _alone = alone();
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &SELDOM);
    let mut guests: Vec<_> = (0..2).map(|number| guest(&place, number)).collect();
    assert_eq!(
        count(&json(&place), "saved_bytes"),
        0,
        "no round has merged"
    );
    let pids: Vec<_> = guests.iter().map(Guest::pid).collect();
    let both = merged(&place, &pids);
    assert_eq!(both["finished"], true, "{both}");
    let ideal = content().ideal_saved_bytes(2);
    assert_eq!(
        (
            count(&both, "saved_bytes"),
            count(&json(&place), "saved_bytes")
        ),
        (ideal, ideal)
    );
    verify(&mut guests);

    // A third one finds its twins.
    guests.push(guest(&place, 2));
    let third = merge(&place, &[guests[2].pid()], &[]);
    let said = text(&third.stdout);
    let all = format!("{} pages merged, 7.4 MiB saved, in ", ideal / 4096);
    assert!(said.starts_with(&all), "{said}");
    assert_eq!(
        count(&json(&place), "saved_bytes"),
        content().ideal_saved_bytes(3)
    );
    verify(&mut guests);

    // Then there is nothing left, and it says so.
    let again = merge(&place, &[guests[2].pid()], &[]);
    let said = [&again.stdout, &again.stderr].map(|said| text(said));
    assert!(said[0].starts_with("0 pages merged"), "{said:?}");
    let why = format!("process {}: nothing more of it equals", guests[2].pid());
    assert!(said[1].contains(&why), "{said:?}");

    let machine = merged_by(&place, &[guests[2].pid()], &[]);
    assert_eq!(machine["reasons"], serde_json::json!([]), "{machine}");

    // What an operator has unmerged is ordinary memory again.
    set(&place, "run=2");
    verify(&mut guests);
    for guest in &guests {
        let maps = fs::read_to_string(format!("/proc/{}/maps", guest.pid())).unwrap();
        assert!(!maps.contains("memfd:pageone-store"), "{maps}");
    }
    set(&place, "run=1");
    let pids: Vec<_> = guests.iter().map(Guest::pid).collect();
    let anew = merged(&place, &pids);
    assert_eq!(
        count(&anew, "saved_bytes"),
        content().ideal_saved_bytes(3),
        "{anew}"
    );
    verify(&mut guests);
}

fn set(place: &Place, knob: &str) {
    let mut command = pageone();
    let done = output(command.args(["set", knob, "--socket"]).arg(place.socket()));
    assert!(done.status.success(), "{}", text(&done.stderr));
}

#[test]
fn processes_that_are_no_guests_are_named() {
    let _alone = alone();
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &SELDOM);
    let output = merge(&place, &[1], &[]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("not merged: process 1 is no guest of this daemon"),
        "{said}"
    );
}

#[test]
fn a_user_asks_for_guests_of_his_own_only() {
    let _alone = alone();
    need_agent();
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can ask as another user");
    }
    let place = Place::new();
    let _daemon = daemon(&place, &SELDOM);
    let guest = guest(&place, 0);
    // Where the command was built others may not look.
    let copy = place.path().join("pageone");
    install(env!("CARGO_BIN_EXE_pageone"), &copy);
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(copy);
    command.uid(61_017).gid(61_017).current_dir("/");
    command.arg("merge").arg("--socket").arg(place.socket());
    let output = output(command.arg(guest.pid().to_string()));
    let said = text(&output.stderr);
    assert!(said.contains("another user's"), "{said}");
    assert_eq!(count(&json(&place), "pages_shared"), 0);
}

#[test]
fn an_engine_that_is_halted_says_so() {
    let _alone = alone();
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &[&SELDOM[..], &["--run", "0"]].concat());
    let guest = guest(&place, 0);
    let said = text(&merge(&place, &[guest.pid()], &[]).stderr);
    assert!(said.contains("run is 0"), "{said}");
}

#[test]
fn a_merge_keeps_to_a_limit_of_cpu_time() {
    let _alone = alone();
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &SELDOM);
    // More than a burst can do.
    let content = Content {
        pages: 1 << 17,
        ..content()
    };
    let mut guests: Vec<_> = (0..2)
        .map(|number| guest_of(&place, number, &content))
        .collect();
    let pids: Vec<_> = guests.iter().map(Guest::pid).collect();
    let used = || json(&place)["cpu_seconds"].as_f64().unwrap();
    let (before, begun) = (used(), Instant::now());
    let said = merged_by(&place, &pids, &["--cpu-limit", "20"]);
    let (used, took) = (used() - before, begun.elapsed().as_secs_f64());
    assert_eq!(count(&said, "saved_bytes"), content.ideal_saved_bytes(2));
    assert_eq!(said["finished"], true, "{said}");
    let told = count(&said, "took_us") + count(&said, "waited_us");
    let all = begun.elapsed().as_micros();
    // The pauses are most of it.
    let part = u128::from(told) * 100 / all;
    assert!((70..=100).contains(&part), "{part} % of {all}: {said}");
    // The last burst is not waited for. Without a limit it is a core or more.
    assert!(used < took / 2.0, "{used} s of CPU time in {took} s");
    // The pass says the same, without what else the daemon does: in a build with assertions it checks all tables afterwards.
    let its = Duration::from_micros(count(&said, "used_us")).as_secs_f64();
    assert!(its < used + 0.05 && its > used / 2.0, "{its} s, {used} s");
    verify(&mut guests);
    let wrong = merge(&place, &pids, &["--cpu-limit", "fast"]);
    assert_eq!(wrong.status.code(), Some(2));
}

/// How long a clone takes that waits: a gibibyte that equals what is merged already. Prints the figure. MERGE_NOW_MIB is another size. The
/// aim is for a build without assertions on a machine at rest.
#[test]
#[ignore = "takes 3 GiB, and a machine at rest: `make bench-merge-now`"]
fn a_clone_of_a_gibibyte_is_merged_at_once() {
    const AIM_OF_A_GIBIBYTE: Duration = Duration::from_millis(500);
    /// To ask, and to answer.
    const LEAST: Duration = Duration::from_millis(50);
    let _alone = alone();
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &SELDOM);
    let mib = std::env::var("MERGE_NOW_MIB").ok();
    let mib: u64 = mib.map_or(1024, |mib| mib.parse().expect("MiB"));
    let aim = (AIM_OF_A_GIBIBYTE * u32::try_from(mib).unwrap() / 1024).max(LEAST);
    let content = Content::equal(1, mib << 8);
    let clone = |number| {
        let mut guest = bench_guest(&place, number, &content);
        guest.tell("offer").unwrap();
        guest.answer(PATIENCE).unwrap();
        guest
    };
    let first = [clone(0), clone(1)];
    merged(&place, &first.each_ref().map(Guest::pid));
    // A single measurement that other work spoils says nothing of this.
    let measure = || {
        let clone = clone(2);
        let said = merged(&place, &[clone.pid()]);
        assert_eq!(count(&said, "pages"), mib << 8, "{said}");
        let took = Duration::from_micros(count(&said, "took_us"));
        println!("{mib} MiB of a clone: {} ms", took.as_millis());
        took
    };
    let is_measured = !cfg!(debug_assertions) && common::busy() == 1;
    let done = common::once_in(3, measure, |&took| !is_measured || took <= aim);
    if !is_measured {
        println!("not judged: a build with assertions, or a busy machine");
    }
    assert!(done.is_ok(), "at most {aim:?}: {done:?}");
}
