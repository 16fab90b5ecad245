//! The bench: its refusals, and that KSM's knobs go back however it ends.

mod common;

use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Running, output, pageone, text, wait_for};
use sys::ksm::Ksm;
use sys::signals::SIGINT;

const SIGKILL: i32 = 9;

#[test]
fn too_much_memory_is_refused_with_numbers() {
    let mut command = pageone();
    command.args([
        "bench",
        "merge",
        "--guests",
        "1000",
        "--guest-mib",
        "1048576",
    ]);
    let refused = output(&mut command);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        said.contains("1000 guests of 1048576 MiB need") && said.contains("available"),
        "{said}"
    );
}

#[test]
fn flags_out_of_range_are_refused() {
    for (flag, value) in [
        ("--dup", "1.5"),
        ("--run-pages", "0"),
        ("--zero-prefix", "-1"),
        ("--engines", "pageone,xen"),
        ("--threads", "1,0"),
        ("--guests", "0"),
    ] {
        let mut command = pageone();
        command.args(["bench", "merge", &format!("{flag}={value}")]);
        let refused = output(&mut command);
        assert_eq!(refused.status.code(), Some(2), "{flag}={value}");
        assert!(
            text(&refused.stderr).contains(flag),
            "{}",
            text(&refused.stderr)
        );
    }
}

#[test]
fn the_time_of_a_write_tells_a_merged_page_from_others() {
    common::need_agent();
    let mut command = pageone();
    let measured = output(command.args(["bench", "timing", "--pages", "1024", "--json"]));
    assert!(measured.status.success(), "{}", text(&measured.stderr));
    let report: serde_json::Value = serde_json::from_slice(&measured.stdout).expect("JSON");
    common::assert_head(&report);
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(
        (rows.len(), &report["options"]["pages"]),
        (12, &1024.into())
    );
    let median = |kind: &str| {
        let row = rows
            .iter()
            .find(|row| row["kind"] == kind && row["access"] == "write")
            .unwrap_or_else(|| panic!("{kind} in {report}"));
        assert_eq!(row["pages"], 512, "{report}");
        row["p50_ns"].as_u64().expect("a time")
    };
    // A page that is not tracked takes no fault; all others do.
    for kind in ["armed", "merged", "zero"] {
        assert!(median(kind) > median("private"), "{report}");
    }
}

/// One test for all that turns this machine's KSM, so that no two do at a time.
#[test]
fn ksm_is_measured_and_its_knobs_go_back() {
    let ksm = Ksm::default();
    let root = rustix::process::geteuid().is_root();
    let sees = sys::usage::kernel_thread("ksmd").is_ok_and(|thread| thread.is_some());
    if !root || !sees || !ksm.exists() || ksm.number("run").is_ok_and(|run| run != 0) {
        eprintln!(
            "skipped: needs root, a kernel with KSM at rest, and its thread in this PID namespace"
        );
        return;
    }
    let before = ksm.save().expect("knobs");
    let report = output(&mut bench(&["--steady", "1s", "--limit", "15s", "--json"]));
    let said = text(&report.stderr);
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).expect(&said);
    common::assert_head(&report);
    let row = &report["rows"][0];
    assert_eq!((&row["engine"], &row["errors"]), (&"ksm".into(), &0.into()));
    assert_eq!(row["verified_bytes"], 128 << 20);
    let ideal = row["ideal_saved_bytes"].as_u64().expect("a number");
    assert!((40 << 20..50 << 20).contains(&ideal), "{ideal}");
    // The saving itself is the whole machine's, and other tests run beside this one.
    assert!(
        row["cpu_total_s"].as_f64().is_some_and(|s| s > 0.0),
        "{row}"
    );
    assert_eq!(ksm.save().expect("knobs"), before, "after an ordinary end");

    for signal in [SIGINT, SIGKILL] {
        let mut running = Running::start(bench(&["--steady", "60s"]).stderr(Stdio::null()));
        wait_for("KSM to be tuned and run", || {
            let busy = ksm.number("run").is_ok_and(|run| run == 1);
            let tuned = ksm.number("sleep_millisecs").is_ok_and(|ms| ms == 0);
            (busy && tuned).then_some(())
        });
        running.signal(signal);
        running.end();
        wait_for("the knobs to go back", || {
            (ksm.save().expect("knobs") == before).then_some(())
        });
    }
    kill_at_random(&ksm, &before);
}

/// One test for all that raises this machine's limit of mappings.
#[test]
fn the_limit_of_mappings_is_raised_for_a_run_and_goes_back_however_it_ends() {
    let before = limit();
    let refused = output(&mut many_mappings(before - 1));
    let why = format!("vm.max_map_count is {before} now");
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains(&why),
        "{}",
        text(&refused.stderr)
    );
    if !rustix::process::geteuid().is_root() {
        let refused = output(&mut many_mappings(before + 1));
        let why = text(&refused.stderr);
        assert!(
            why.contains("to raise vm.max_map_count takes root"),
            "{why}"
        );
        eprintln!("skipped: to raise vm.max_map_count takes root");
        return;
    }
    if std::fs::File::options().write(true).open(LIMIT).is_err() {
        eprintln!("skipped: this container may not raise vm.max_map_count");
        return;
    }
    let place = tempfile::tempdir().expect("a folder");
    let run = output(many_mappings(before + 1).arg("--out").arg(place.path()));
    assert!(run.status.success(), "{}", text(&run.stderr));
    let record = std::fs::read_to_string(place.path().join("runs.jsonl")).expect("a record");
    let record: serde_json::Value = serde_json::from_str(&record).expect("JSON");
    for part in ["machine", "setting"] {
        assert_eq!(record[part]["max_map_count"], before + 1, "{record}");
    }
    assert_eq!(limit(), before, "after an ordinary end");
    for _ in 0..5 {
        kill_after(
            &mut many_mappings(before + 1),
            Duration::from_secs(1),
            &|| limit() == before,
        );
    }
}

/// Where the kernel has the limit of mappings.
const LIMIT: &str = "/proc/sys/vm/max_map_count";

fn limit() -> u64 {
    let text = std::fs::read_to_string(LIMIT).expect("a limit");
    text.trim().parse().expect("a number")
}

/// A short run with this limit of mappings, in which nothing is merged.
fn many_mappings(most: u64) -> Command {
    let mut command = pageone();
    command.args(["bench", "run", "merge", "--scale=short", "--limit=300ms"]);
    command.args(["--engines=none", &format!("--max-map-count={most}")]);
    command.stdout(Stdio::null());
    command
}

/// Kills what `command` starts at any point of its first `most`, and waits until all `is_back`.
fn kill_after(command: &mut Command, most: Duration, is_back: &dyn Fn() -> bool) {
    let number = std::fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a number");
    let number = u32::from_str_radix(&number[..4], 16).expect("a number");
    let life = most * number / 0xffff;
    let mut running = Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    std::thread::sleep(life);
    running.signal(SIGKILL);
    running.end();
    wait_for(&format!("all to be as before after {life:?}"), || {
        is_back().then_some(())
    });
}

/// Kills a comparison of KSM in its three forms at any point of its life: before a knob is turned, between two engines, in a run.
fn kill_at_random(ksm: &Ksm, before: &sys::ksm::Knobs) {
    for _ in 0..5 {
        let mut command = pageone();
        command.args(["bench", "run", "merge", "--scale=short", "--limit=300ms"]);
        command.arg("--engines=ksm-tuned,ksm-advisor,ksm");
        kill_after(&mut command, Duration::from_millis(1500), &|| {
            ksm.save().expect("knobs") == *before
        });
    }
}

fn bench(args: &[&str]) -> Command {
    let mut command = pageone();
    command.args([
        "bench",
        "merge",
        "--engines",
        "ksm",
        "--guests",
        "2",
        "--guest-mib",
        "64",
    ]);
    command.args(args);
    command
}
