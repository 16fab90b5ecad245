//! The bench: what it refuses, and that KSM's knobs go back however it ends.

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
    // A page that nobody tracks takes no fault; all others do.
    for kind in ["armed", "merged", "zero"] {
        assert!(median(kind) > median("private"), "{report}");
    }
}

/// One test for all that turns this machine's KSM, so that no two do at a time.
#[test]
fn ksm_is_measured_and_its_knobs_go_back() {
    let ksm = Ksm::default();
    let root = rustix::process::geteuid().is_root();
    if !root || !ksm.exists() || ksm.number("run").is_ok_and(|run| run != 0) {
        eprintln!("skipped: needs root, and a kernel with KSM at rest");
        return;
    }
    let before = ksm.save().expect("knobs");
    let report =
        output(bench(&["--steady", "1s", "--limit", "15s", "--json"]).stderr(Stdio::null()));
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).expect("JSON");
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

/// Kills a comparison of KSM in its three forms at any point of its life: before a knob is turned, between two engines, in a run.
fn kill_at_random(ksm: &Ksm, before: &sys::ksm::Knobs) {
    for _ in 0..5 {
        let number = std::fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a number");
        let number = u64::from_str_radix(&number[..4], 16).expect("a number");
        let life = Duration::from_millis(number * 1500 / 0xffff);
        let mut command = pageone();
        command.args(["bench", "run", "merge", "--scale=short", "--limit=300ms"]);
        command.arg("--engines=ksm-tuned,ksm-advisor,ksm");
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut running = Running::start(&mut command);
        std::thread::sleep(life);
        running.signal(SIGKILL);
        running.end();
        wait_for(&format!("the knobs to go back after {life:?}"), || {
            (ksm.save().expect("knobs") == *before).then_some(())
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
