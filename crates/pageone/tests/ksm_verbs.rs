//! `pageone ksm` on this machine's KSM: a goal is reached, and the knobs go back however it ends.

mod common;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{Running, alone, bench_process, output, pageone, text, wait_for};
use pageone::bench::{Content, Guest};
use serde_json::Value;
use sys::ksm::{Knobs, Ksm, Member};
use sys::signals::SIGINT;

const SIGKILL: i32 = 9;
/// Pages of a guest.
const PAGES: u64 = 4096;

/// KSM of this machine and its knobs, if this user may turn it, and no one else does.
fn at_rest() -> Option<(Ksm, Knobs)> {
    let ksm = Ksm::default();
    let root = rustix::process::geteuid().is_root();
    if !root || !ksm.exists() || ksm.number("run").is_ok_and(|run| run != 0) {
        eprintln!("skipped: needs root, and a kernel with KSM at rest");
        return None;
    }
    let knobs = ksm.save().expect("knobs");
    Some((ksm, knobs))
}

/// Two processes that have offered equal memory to KSM.
fn guests() -> [Guest; 2] {
    let content = Content::equal(19, PAGES);
    [0, 1].map(|number| {
        let mut guest = bench_process(number, &content);
        guest.tell("offer").expect("offer");
        guest.answer(common::PATIENCE).expect("offered");
        guest
    })
}

fn ksm(args: &[&str]) -> Command {
    let mut command = pageone();
    command.arg("ksm").args(args);
    command
}

fn tune(args: &[&str], plot: &Path) -> Running {
    let mut command = ksm(&["tune", "--every", "200ms", "--plot"]);
    command.arg(plot).args(args);
    Running::start(command.stdout(Stdio::null()).stderr(Stdio::piped()))
}

/// Waits for KSM to share nearly all that is equal.
fn wait_for_saving(guests: &[Guest]) {
    wait_for("KSM to share the guests' memory", || {
        let merging = |guest: &Guest| Member::of(guest.pid()).expect("figures").merging;
        let merging: u64 = guests.iter().map(merging).sum();
        (merging >= 2 * PAGES * 9 / 10).then_some(())
    });
}

fn wait_for_knobs(ksm: &Ksm, before: &Knobs) {
    wait_for("the knobs to go back", || {
        (ksm.save().expect("knobs") == *before).then_some(())
    });
}

fn status() -> Value {
    let output = output(&mut ksm(&["status", "--sample", "50ms", "--json"]));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    common::assert_head(&answer);
    answer
}

/// The processes of a status that are `guests`.
fn rows<'a>(status: &'a Value, guests: &[Guest]) -> Vec<&'a Value> {
    let pids: Vec<u64> = guests.iter().map(|guest| guest.pid().into()).collect();
    let rows = status["processes"].as_array().expect("processes").iter();
    rows.filter(|row| row["pid"].as_u64().is_some_and(|pid| pids.contains(&pid)))
        .collect()
}

#[test]
fn a_time_to_saving_is_kept_and_the_knobs_go_back() {
    let _turn = alone();
    let Some((sysfs, before)) = at_rest() else {
        return;
    };
    let place = tempfile::tempdir().expect("a folder");
    let plot = place.path().join("saving.svg");
    for signal in [SIGINT, SIGKILL] {
        let guests = guests();
        let idle = status();
        let offered = rows(&idle, &guests);
        assert_eq!(offered.len(), 2, "{idle}");
        assert!(
            idle["reasons"].to_string().contains("\"stopped\""),
            "{idle}"
        );
        for row in offered {
            let bytes = row["offered_bytes"].as_u64().expect("bytes");
            assert!((PAGES * 4096..PAGES * 4096 * 2).contains(&bytes), "{row}");
        }
        let mut tune = tune(&["--time-to-saving", "3s"], &plot);
        let begin = std::time::Instant::now();
        wait_for_saving(&guests);
        let took = begin.elapsed();
        println!("a goal of 3 s: nine tenths were saved after {took:?}");
        let most = std::time::Duration::from_secs(6) * common::busy();
        assert!(took < most, "{took:?}");
        assert_ne!(sysfs.save().expect("knobs"), before);
        let busy = status();
        assert!(
            rows(&busy, &guests)
                .iter()
                .all(|row| { row["net_saved_bytes"].as_i64().is_some_and(|net| net > 0) }),
            "{busy}"
        );
        // Another one may not turn the knobs meanwhile.
        let second = output(&mut ksm(&["tune", "--cpu-share", "5%", "--for", "1s"]));
        assert!(
            text(&second.stderr).contains("wait for its end"),
            "{second:?}"
        );
        tune.signal(signal);
        let code = tune.end();
        wait_for_knobs(&sysfs, &before);
        if signal == SIGINT {
            let said = tune.stderr();
            assert_eq!(code, 0, "{said}");
            assert!(said.contains("the net saving went from"), "{said}");
            let svg = std::fs::read_to_string(&plot).expect("a drawing");
            assert!(svg.contains("Memory that KSM saves"), "{svg}");
        }
    }
}

#[test]
fn a_share_of_a_cpu_is_not_exceeded() {
    let _turn = alone();
    let Some((sysfs, before)) = at_rest() else {
        return;
    };
    let _guests = guests();
    let followed = output(&mut ksm(&[
        "tune",
        "--cpu-share",
        "10%",
        "--for",
        "4s",
        "--every",
        "200ms",
        "--json",
    ]));
    assert!(followed.status.success(), "{}", text(&followed.stderr));
    let lines = text(&followed.stdout);
    let records: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    records.iter().for_each(common::assert_head);
    let (first, last) = (
        records.first().expect("a line"),
        records.last().expect("a line"),
    );
    let grown = |field: &str| {
        let at = |record: &Value| record["counters"][field].as_f64().expect("a number");
        at(last) - at(first)
    };
    assert!(grown("pages_scanned") > 0.0, "{lines}");
    let seconds =
        last["seconds"].as_f64().expect("a time") - first["seconds"].as_f64().expect("a time");
    let share = grown("cpu_seconds") / seconds;
    // At 100 % KSM would be at 1; ticks and the first steps, in which the cost of a page is learned, take their part.
    assert!(share < 0.3, "{share} of a CPU: {lines}");
    let turned = ["pages_to_scan", "sleep_millisecs"].map(|knob| last["knobs"][knob].to_string());
    let found = ["pages_to_scan", "sleep_millisecs"].map(|knob| before.get(knob).expect("a knob"));
    assert_ne!(turned, found, "{lines}");
    wait_for_knobs(&sysfs, &before);
}

#[test]
fn goals_that_are_none_are_refused() {
    for args in [
        &["tune"][..],
        &["tune", "--cpu-share", "0"],
        &["tune", "--cpu-share", "10%", "--time-to-saving", "60s"],
        &["tune", "--time-to-saving", "never"],
        &["watch", "--every", "soon"],
    ] {
        let refused: Output = output(&mut ksm(args));
        assert_eq!(refused.status.code(), Some(2), "{args:?}: {refused:?}");
    }
}

#[test]
fn the_state_is_told_as_a_table_too() {
    if !Ksm::default().exists() {
        eprintln!("skipped: this kernel has no KSM");
        return;
    }
    let shown = output(&mut ksm(&["status", "--sample", "50ms"]));
    let said = text(&shown.stdout);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    assert!(
        said.starts_with("KSM ") && said.contains("\nscan: "),
        "{said}"
    );
    let watched = output(&mut ksm(&["watch", "--every", "50ms", "--for", "200ms"]));
    let lines = text(&watched.stdout);
    assert!(
        watched.status.success() && lines.lines().count() >= 2,
        "{lines}"
    );
    let words = ["watch", "--every", "50ms", "--for", "100ms", "--json"];
    let watched = output(&mut ksm(&words));
    let lines = text(&watched.stdout);
    assert!(watched.status.success() && !lines.is_empty(), "{lines}");
    for line in lines.lines() {
        let step: Value = serde_json::from_str(line).expect("JSON");
        common::assert_head(&step);
        assert!(step["counters"]["pages_scanned"].is_u64(), "{line}");
    }
}
