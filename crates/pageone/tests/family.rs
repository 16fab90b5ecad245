//! The bench family, tried by an engine of known saving, time, CPU time and memory: a wrong sum shows.

mod common;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::MutexGuard;

use common::{alone, need_agent, output, pageone, text};
use serde_json::Value;
use sys::ksm::Ksm;

/// `pageone bench run` of one case with the fake engine, which does `deeds`.
fn bench(deeds: &str, args: &[&str]) -> Command {
    let mut command = pageone();
    command.env("PAGEONE_BENCH_FAKE", deeds);
    command.args(["bench", "run", "merge", "--scale", "short"]);
    command.args(args);
    command
}

fn records(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("runs.jsonl")).expect("records");
    let lines = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    lines.collect()
}

fn figure(record: &Value, name: &str) -> f64 {
    let value = record["figures"][name].as_f64();
    value.unwrap_or_else(|| panic!("{name} in {record}"))
}

/// Checks `value`, and says which it was.
fn between(least: f64, value: f64, most: f64, what: &str) {
    assert!(
        (least..=most).contains(&value),
        "{what}: {value}, not {least} to {most}"
    );
}

/// The turn of a test: where KSM runs each bench stops it, which takes root and is for one at a time.
fn turn() -> Option<MutexGuard<'static, ()>> {
    let turn = alone();
    let ksm = Ksm::default();
    let runs = ksm.exists() && ksm.number("run").expect("KSM's state") != 0;
    if runs && !rustix::process::geteuid().is_root() {
        eprintln!("skipped: KSM runs here, and only root can stop it");
        return None;
    }
    Some(turn)
}

fn said(output: &Output) -> String {
    text(&output.stderr)
}

#[test]
fn a_known_saving_time_and_price_come_out_as_they_are() {
    let Some(_turn) = turn() else { return };
    let place = tempfile::tempdir().expect("a folder");
    let out = place.path().to_str().expect("a name");
    let deeds = "save_mib=40,after_ms=700,own_mib=16,cpu_ms=250";
    let run = output(&mut bench(
        deeds,
        &["--engines", "fake,none", "--limit", "10s", "--out", out],
    ));
    assert!(run.status.success(), "{}", said(&run));
    let records = records(place.path());
    let of = |engine: &str| {
        let found = records.iter().find(|record| record["engine"] == engine);
        found.unwrap_or_else(|| panic!("no {engine}: {records:?}"))
    };
    let (fake, none) = (of("fake"), of("none"));
    let mib = |record, name| figure(record, "ideal_mib") * figure(record, name) / 100.0;
    // Two guests of 16 MiB, of which seven tenths are the same.
    between(9.0, figure(fake, "ideal_mib"), 13.5, "what could be saved");
    between(
        79.5,
        mib(fake, "saved_percent"),
        80.5,
        "both guests' ballast",
    );
    // Slab is the whole machine's, and other programs run.
    let metadata = figure(fake, "metadata_mib");
    let own = metadata - figure(fake, "slab_mib");
    between(15.5, own, 24.0, "the engine's memory");
    let overhead = mib(fake, "saved_percent") - mib(fake, "net_percent");
    between(
        metadata - 8.0,
        overhead,
        metadata + 8.0,
        "what the net saving is less",
    );
    between(0.24, figure(fake, "cpu_s"), 0.32, "the engine's CPU time");
    // How soon a look comes is the machine's: the times are those of the looks.
    let samples = fake["samples"].as_array().expect("samples");
    for (time, part) in [("t50_s", 0.50), ("t95_s", 0.95)] {
        let there = |sample: &&Value| {
            let of = |name: &str| sample[name].as_f64().expect("a number");
            of("net_mib") > part * of("ideal_mib") + 0.01
        };
        let look = samples.iter().find(there).expect("a look after the goal");
        let look = look["at_s"].as_f64().expect("a time");
        between(0.7, figure(fake, time), look + 0.001, time);
    }
    between(-0.5, mib(none, "saved_percent"), 0.5, "of nothing");
    between(0.0, figure(none, "cpu_s"), 0.02, "for nothing");
    assert!(none["figures"].get("t95_s").is_none(), "{none}");
    for record in [fake, none] {
        assert_eq!(
            (&record["errors"], &record["verified_bytes"]),
            (&0.into(), &(32_u64 << 20).into())
        );
        let samples = record["samples"].as_array().expect("samples");
        assert!(
            (2..=60).contains(&samples.len()),
            "{} samples",
            samples.len()
        );
    }
}

#[test]
fn results_become_a_page_and_are_compared() {
    let Some(_turn) = turn() else { return };
    let place = tempfile::tempdir().expect("a folder");
    let out = |name: &str| place.path().join(name).to_str().expect("a name").to_owned();
    let (before, after) = (out("before"), out("after"));
    for (folder, deeds) in [(&before, "save_mib=8"), (&after, "save_mib=2")] {
        let args = [
            "--engines",
            "fake",
            "--repeats",
            "3",
            "--limit",
            "300ms",
            "--out",
            folder,
        ];
        let run = output(&mut bench(deeds, &args));
        assert!(run.status.success(), "{}", said(&run));
    }
    let mut command = pageone();
    let compared = output(command.args(["bench", "compare", &before, &after]));
    let text_of = text(&compared.stdout);
    let worse = |line: &&str| line.contains(", fake: saved_percent ") && line.ends_with(", worse");
    assert_eq!(text_of.lines().filter(worse).count(), 1, "{text_of}");
    let mut command = pageone();
    let same = output(command.args(["bench", "compare", &before, &before]));
    assert!(
        text(&same.stdout).contains(" 0 changed beyond noise"),
        "{}",
        text(&same.stdout)
    );
    let mut command = pageone();
    let report =
        output(command.args(["bench", "report", "--from", &before, "--out", &out("page")]));
    assert!(report.status.success(), "{}", said(&report));
    let page = std::fs::read_to_string(text(&report.stdout).trim()).expect("a page");
    assert!(
        page.matches("<svg").count() == 2 && page.contains("saved_percent"),
        "{page}"
    );
    for name in ["report.md", "runs.jsonl", "01-merge-saved.svg"] {
        assert!(place.path().join("page").join(name).exists(), "{name}");
    }
}

#[test]
fn a_page_that_is_not_what_it_should_be_fails_the_bench() {
    let Some(_turn) = turn() else { return };
    let run = output(&mut bench("wrong=3", &["--engines", "fake"]));
    assert_eq!(run.status.code(), Some(1));
    assert!(said(&run).contains("6 pages were not"), "{}", said(&run));
}

#[test]
fn runs_that_are_there_are_not_made_again() {
    let Some(_turn) = turn() else { return };
    let place = tempfile::tempdir().expect("a folder");
    let out = place.path().to_str().expect("a name");
    let run = || output(&mut bench("", &["--engines", "none,fake", "--out", out]));
    let first = run();
    assert!(
        said(&first).contains("merge alike in place: none"),
        "{}",
        said(&first)
    );
    let file = place.path().join("runs.jsonl");
    let whole = std::fs::read_to_string(&file).expect("records");
    let again = run();
    let kept = |line: &str| line.contains(" of 1: kept, made ");
    assert!(said(&again).lines().all(kept), "{}", said(&again));
    assert_eq!(said(&again).lines().count(), 2, "{}", said(&again));
    assert_eq!(text(&again.stdout), text(&first.stdout));
    // Those of another commit are not mixed with them.
    let flags = ["--engines", "none,fake", "--out", out, "--note", "abc"];
    let other = output(&mut bench("", &flags));
    assert_eq!(other.status.code(), Some(1));
    assert!(
        said(&other).contains("these are of 'abc'"),
        "{}",
        said(&other)
    );
    // As a run leaves it that is killed while it writes.
    std::fs::write(&file, &whole[..whole.len() - 9]).expect("a file");
    let third = said(&run());
    assert!(
        third.contains(": fake, 1 of 1\n") && third.contains(": none, 1 of 1: kept, "),
        "{third}"
    );
    assert_eq!(records(place.path()).len(), 2);
    let other = said(&output(&mut bench(
        "",
        &["--engines", "none", "--out", out, "--seed", "2"],
    )));
    assert!(
        other.contains(": none, "),
        "another task is another run: {other}"
    );
}

#[test]
fn the_daemon_of_a_bench_does_not_read_the_configuration_of_the_machine() {
    need_agent();
    let Some(_turn) = turn() else { return };
    let place = tempfile::tempdir().expect("a folder");
    std::fs::write(place.path().join("pageone.toml"), "nonsense").expect("a file");
    let mut command = pageone();
    command.env("CONFIGURATION_DIRECTORY", place.path());
    let checked = output(command.args(["config", "check"]));
    assert!(!checked.status.success(), "{}", text(&checked.stdout));
    let mut command = bench("", &["--engines", "pageone-1", "--limit", "300ms"]);
    let run = output(command.env("CONFIGURATION_DIRECTORY", place.path()));
    assert!(run.status.success(), "{}", said(&run));
}

#[test]
fn programs_take_less_and_answer_the_same() {
    let Some(_turn) = turn() else { return };
    need_agent();
    let place = tempfile::tempdir().expect("a folder");
    let programs = |engines| {
        let mut command = pageone();
        command.args(["bench", "run", "programs", "--scale", "short"]);
        command.args([
            "--guests",
            "4",
            "--guest-mib",
            "64",
            "--limit",
            "60s",
            "--engines",
            engines,
            "--out",
        ]);
        command.arg(place.path());
        command
    };
    let absent = output(programs("none").env("PATH", place.path()));
    assert!(absent.status.success(), "{}", said(&absent));
    let why = "left out: there is no program `python3` here";
    assert!(said(&absent).contains(why), "{}", said(&absent));
    if !std::process::Command::new("python3")
        .arg("--version")
        .output()
        .is_ok_and(|had| had.status.success())
    {
        common::tools::lacks("python3");
        return;
    }
    let run = output(&mut programs("none,pageone-2"));
    assert!(run.status.success(), "{}", said(&run));
    let [none, merged] = &records(place.path())[..] else {
        panic!("two runs: {}", said(&run))
    };
    let used = |record| figure(record, "used_mib");
    // Each has 12 MiB or more, and what they share is most of it.
    assert!(used(none) > 40.0, "{none}");
    assert!(used(merged) < used(none) * 0.8, "{none} {merged}");
    assert!(
        figure(none, "cpu_s") < 0.005 && figure(merged, "cpu_s") > 0.0,
        "{none} {merged}"
    );
    assert_eq!((&none["errors"], &merged["errors"]), (&0.into(), &0.into()));
}

#[test]
fn unknown_cases_and_deeds_are_refused() {
    let Some(_turn) = turn() else { return };
    let mut command = pageone();
    let refused = output(command.args(["bench", "run", "equal", "dance"]));
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        said(&refused)
            .contains("invalid value 'dance' for '[CASE]...'\n  [possible values: merge, equal"),
        "{}",
        said(&refused)
    );
    let refused = output(&mut bench("dance=1", &["--engines", "fake"]));
    assert!(said(&refused).contains("dance=1"), "{}", said(&refused));
    let mut command = pageone();
    let refused = output(command.args(["bench", "run", "--guest-mib", "1048576"]));
    assert!(
        said(&refused).contains("are available"),
        "{}",
        said(&refused)
    );
}
