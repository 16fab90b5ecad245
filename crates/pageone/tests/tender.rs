//! The daemon's restraint, live: its limit of CPU time, and the pace that follows the host's memory.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::time::{Duration, Instant};

use common::{
    Place, bench_guest, count, daemon, json, need_agent, output, pageone, text, wait_for,
};
use pageone::bench::Content;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
/// Percent of a core.
const LIMIT: u32 = 10;
/// How long the daemon works under the limit.
const UNDER_LIMIT: Duration = Duration::from_secs(2);

/// 256 MiB a guest, all the same in all.
fn content() -> Content {
    Content {
        seed: 9,
        dup: 1.0,
        run_pages: 512,
        zero_prefix: 0.0,
        pages: 65_536,
        shuffle: false,
    }
}

fn set(place: &Place, setting: &str) {
    let mut command = pageone();
    let done = output(
        command
            .args(["set", setting, "--socket"])
            .arg(place.socket()),
    );
    assert!(done.status.success(), "{}", text(&done.stderr));
}

fn cpu(status: &Value) -> Duration {
    Duration::from_secs_f64(status["cpu_seconds"].as_f64().unwrap())
}

#[test]
fn the_limit_of_cpu_time_is_kept_and_lifted() {
    need_agent();
    let place = Place::new();
    let limit = LIMIT.to_string();
    let _daemon = daemon(&place, &["--merge-period", "500ms", "--cpu-limit", &limit]);
    assert_eq!(count(&json(&place), "cpu_limit"), u64::from(LIMIT));
    let mut guests: Vec<_> = (0..3)
        .map(|number| bench_guest(&place, number, &content()))
        .collect();
    for guest in &mut guests {
        guest.tell("offer").unwrap();
        guest.answer(PATIENCE).unwrap();
    }
    let read = |status: &Value| count(status, "pages_shared") + count(status, "pages_unshared");
    let begin = wait_for("the work to begin", || {
        Some(json(&place)).filter(|status| read(status) > 0)
    });
    let since = Instant::now();
    std::thread::sleep(UNDER_LIMIT);
    let (end, took) = (json(&place), since.elapsed());
    let used = cpu(&end) - cpu(&begin);
    let allowed = took.mul_f64(f64::from(LIMIT) / 100.0);
    // A burst, a job, and the questions of this test are on top.
    let bound = allowed.mul_f64(1.5) + Duration::from_millis(150);
    assert!(used <= bound, "{used:?} of CPU in {took:?}");

    set(&place, "cpu_limit=none");
    let ideal = content().ideal_saved_bytes(3);
    let done = wait_for("all to be merged", || {
        Some(json(&place)).filter(|status| count(status, "saved_bytes") == ideal)
    });
    let all = cpu(&done) - cpu(&begin);
    println!("{used:?} of CPU in {took:?} at {LIMIT} %; {all:?} for all the work");
    // Else the limit had nothing to hold back, and the first half of this test would prove nothing.
    assert!(
        all > bound,
        "the work took {all:?}, within the bound of {bound:?}"
    );
    for guest in &mut guests {
        guest.tell("verify").unwrap();
        assert_eq!(guest.answer(PATIENCE).unwrap().errors, 0);
    }
}

#[test]
fn the_pace_follows_the_memory_of_this_machine() {
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "400ms", "--pace", "auto"]);
    let (least, most) = (100, 1600);
    let within = |status: &Value| {
        let period = count(status, "effective_period_ms");
        assert!((least..=most).contains(&period), "{status}");
        assert_eq!(count(status, "merge_period_ms"), 400);
        period
    };
    assert_eq!(json(&place)["pace"], "auto");
    let memory = sys::meminfo::MemInfo::read().unwrap();
    let stall = sys::meminfo::stall_percent().unwrap_or(0.0);
    if memory.available * 10 < memory.total * 6 || stall > 0.5 {
        eprintln!("skipped: memory is not ample here, so the pace may stay");
        within(&json(&place));
    } else {
        wait_for("a longer period", || {
            (within(&json(&place)) > 400).then_some(())
        });
    }
    set(&place, "pace=fixed");
    wait_for("the knob's period", || {
        (within(&json(&place)) == 400).then_some(())
    });
}
