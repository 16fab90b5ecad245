//! The whole way: a daemon, guests through `run`, merged memory, and every byte verified, through
//! the daemon's death and through unmerging.

mod common;

use std::process::Stdio;
use std::time::Duration;

use numa::HeapView;
use pageone::bench::{Content, Guest};
use sys::signals::SIGTERM;

use common::{
    Place, Running, bench_guest, classed_and_present, count, daemon, json, need_agent, output,
    pageone, text, wait_for,
};

const SIGKILL: i32 = 9;
const PATIENCE: Duration = Duration::from_secs(20);

/// 16 MiB a guest, half of it the same in all, in runs that lie elsewhere in each.
fn content() -> Content {
    Content {
        seed: 5,
        dup: 0.5,
        run_pages: 16,
        zero_prefix: 0.0,
        pages: 4096,
        shuffle: true,
    }
}

/// A guest that has offered its memory to the daemon at `place`.
fn guest(place: &Place, number: u64) -> Guest {
    let mut guest = bench_guest(place, number, &content());
    guest.tell("offer").expect("offer");
    guest.answer(PATIENCE).expect("offered");
    guest
}

fn verify(guests: &mut [Guest]) {
    for guest in guests {
        guest.tell("verify").expect("verify");
        assert_eq!(guest.answer(PATIENCE).expect("verified").errors, 0);
    }
}

/// A counter of the daemon's status; each status must hold the equation of the page classes.
fn counter(place: &Place, name: &str) -> u64 {
    let now = json(place);
    let (classed, present) = classed_and_present(&now);
    assert_eq!(classed, present, "{now}");
    count(&now, name)
}

#[test]
fn guests_are_merged_and_live_through_the_daemons_death_and_unmerging() {
    need_agent();
    let place = Place::new();
    let period = ["--merge-period", "100ms"];
    let mut first = daemon(&place, &period);
    let mut guests: Vec<_> = (0..3).map(|number| guest(&place, number)).collect();
    let ideal = content().ideal_saved_bytes(3);
    wait_for("the ideal saving", || {
        (counter(&place, "saved_bytes") == ideal).then_some(())
    });
    verify(&mut guests);

    first.signal(SIGKILL);
    first.end();
    verify(&mut guests);

    let _second = daemon(&place, &period);
    wait_for("the guests to come back", || {
        (json(&place)["guests"].as_array().map_or(0, Vec::len) == 3).then_some(())
    });
    guests.extend((3..5).map(|number| guest(&place, number)));
    let of_two = content().ideal_saved_bytes(2);
    wait_for("two new guests to share", || {
        (counter(&place, "saved_bytes") >= of_two).then_some(())
    });
    verify(&mut guests);

    let mut unmerge = pageone();
    let unmerge = output(
        unmerge
            .arg("set")
            .arg("--socket")
            .arg(place.socket())
            .arg("run=2"),
    );
    assert!(unmerge.status.success(), "{}", text(&unmerge.stderr));
    assert_eq!(
        (
            counter(&place, "pages_sharing"),
            counter(&place, "pages_shared")
        ),
        (0, 0)
    );
    verify(&mut guests);

    drop(guests);
    wait_for("the guests' end to be seen", || {
        json(&place)["guests"]
            .as_array()
            .is_some_and(Vec::is_empty)
            .then_some(())
    });
}

/// What `pageone numa heap` says, read as JSON.
fn heap(place: &Place) -> HeapView {
    let mut command = pageone();
    command.args(["numa", "heap", "--json", "--socket"]);
    let said = output(command.arg(place.socket()));
    assert!(said.status.success(), "{}", text(&said.stderr));
    serde_json::from_slice(&said.stdout).expect("a heap")
}

/// Slots in use and retired, each bucket's equations holding.
fn slots(view: &HeapView) -> (u64, u64) {
    let (mut allocated, mut retired) = (0, 0);
    for bucket in &view.buckets {
        let stats = bucket.stats;
        let used = bucket.allocated + bucket.retired;
        assert_eq!(bucket.slots, bucket.free + used, "{bucket:?}");
        assert_eq!(stats.hit + stats.miss, used + stats.freed, "{bucket:?}");
        assert_eq!(stats.local + stats.other, used + stats.freed, "{bucket:?}");
        allocated += bucket.allocated;
        retired += bucket.retired;
    }
    assert_eq!(view.failed, 0);
    (allocated, retired)
}

/// The round that would merge them comes after 64 s.
#[test]
fn guests_that_have_just_come_are_merged_long_before_their_second_period() {
    need_agent();
    let place = Place::new();
    let daemon = daemon(&place, &["--merge-period", "32s"]);
    let mut guests: Vec<_> = (0..2).map(|number| guest(&place, number)).collect();
    let ideal = content().ideal_saved_bytes(2);
    wait_for("the ideal saving", || {
        (counter(&place, "saved_bytes") == ideal).then_some(())
    });
    assert_eq!(count(&json(&place), "full_scans"), 1);
    verify(&mut guests);
    drop(daemon);
    verify(&mut guests);
}

#[test]
fn the_heap_of_a_running_daemon_fits_its_status() {
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms", "--threads", "1"]);
    let empty = heap(&place);
    assert_eq!(slots(&empty), (0, 0));
    assert_eq!((empty.zones.len(), empty.buckets.is_empty()), (1, false));

    let mut guests: Vec<_> = (0..2).map(|number| guest(&place, number)).collect();
    // Of two guests, as many pages are shared as share; while a chunk is accounted, one may lag behind.
    let shared = content().ideal_saved_bytes(2) / 4096;
    wait_for("the ideal saving", || {
        let now = ["pages_shared", "pages_sharing"].map(|name| counter(&place, name));
        (now == [shared; 2]).then_some(())
    });
    let (allocated, retired) = slots(&heap(&place));
    // One worker has one run of numbers at a time, and idle guests break nothing.
    assert_eq!((allocated, retired), (shared.next_multiple_of(512), 0));

    let mut table = pageone();
    table.args(["numa", "heap", "--socket"]).arg(place.socket());
    let table = text(&output(&mut table).stdout);
    assert!(
        table.contains("store") && table.contains(&allocated.to_string()),
        "{table}"
    );

    let mut unmerge = pageone();
    unmerge
        .args(["set", "run=2", "--socket"])
        .arg(place.socket());
    assert!(output(&mut unmerge).status.success());
    wait_for("blocks of dead slots to be retired", || {
        let (in_use, retired) = slots(&heap(&place));
        assert_eq!(in_use + retired, allocated, "a number was given out");
        (retired == shared / 512 * 512).then_some(())
    });
    verify(&mut guests);
}

#[test]
fn an_engine_in_run_serves_its_command() {
    need_agent();
    let place = Place::new();
    let exe = env!("CARGO_BIN_EXE_pageone");
    let script = format!("{exe} status --json --socket $PAGEONE_SOCKET");
    let mut command = pageone();
    command.arg("run").arg("--socket").arg(place.socket());
    command.args([
        "--merge-period",
        "3s",
        "--threads",
        "1",
        "--",
        "sh",
        "-c",
        &script,
    ]);
    let output = output(&mut command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let now: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (&now["merge_period_ms"], &now["threads"]),
        (&3000.into(), &1.into())
    );
}

#[test]
fn the_demo_merges_and_loses_no_byte() {
    need_agent();
    let mut command = pageone();
    command.args([
        "demo",
        "--guests",
        "3",
        "--mib",
        "32",
        "--merge-period",
        "200ms",
    ]);
    let demo = output(&mut command);
    let said = text(&demo.stdout);
    assert!(demo.status.success(), "{said}{}", text(&demo.stderr));
    for row in [
        "before", "after", "saved", "time", "CPU", "verified", "errors",
    ] {
        assert!(
            said.lines().any(|line| line.starts_with(row)),
            "{row} is missing: {said}"
        );
    }
}

/// An interrupted command leaves no folder of its engine behind.
#[test]
fn an_interrupted_demo_leaves_nothing_behind() {
    let commands: [&[&str]; 2] = [&["demo", "--guests=2", "--mib=16"], &["bench", "timing"]];
    for words in commands {
        let place = Place::new();
        let folders = || std::fs::read_dir(place.path()).unwrap().count();
        let mut command = pageone();
        command.args(words).env("TMPDIR", place.path());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut running = Running::start(&mut command);
        let begun = wait_for("the engine's folder", || {
            let ended = running.0.try_wait().unwrap().is_some();
            (ended || folders() > 0).then_some(!ended)
        });
        if !begun {
            eprintln!("skipped: {}", running.stderr());
            continue;
        }
        // A guest tells that the engine is there.
        let pid = running.0.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        wait_for("a guest", || {
            let children = std::fs::read_to_string(&children).ok()?;
            (!children.trim().is_empty()).then_some(())
        });
        running.signal(SIGTERM);
        assert_ne!(running.end(), 0);
        assert_eq!(folders(), 0, "{words:?}");
    }
}
