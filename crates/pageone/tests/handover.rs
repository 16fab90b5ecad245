//! The daemon dies and the next one goes on: under `--keep`, and under a keeper that this test plays.
//!
//! These tests need root (page frame numbers) and a kernel with userfaultfd's WP_ASYNC and MOVE.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{
    Place, Running, alone, child, count, daemon, guests_of, held, json, output, pageone, status,
    text, wait_for,
};
use serde_json::Value;
use support::Guest;
use sys::keeper::{Inbox, Note};
use sys::signals::{SIGHUP, SIGTERM};

const SIGKILL: i32 = 9;
/// Pages of a guest: 8 MiB.
const PAGES: usize = 2048;

/// `pageone daemon --keep` at a place of its own.
struct Kept {
    place: Place,
    keeper: Running,
}

impl Kept {
    fn start() -> Self {
        Self::start_with(Place::new(), &[])
    }

    fn start_with(place: Place, args: &[&str]) -> Self {
        let args = [&["--keep", "--merge-period", "100ms"], args].concat();
        let keeper = daemon(&place, &args);
        Self { place, keeper }
    }

    /// The process id of the daemon itself, when there is one.
    fn child(&self) -> Option<u32> {
        child(self.keeper.0.id())
    }

    fn kill_child(&self, signal: i32) {
        let old = self.child().expect("a daemon");
        let pid = rustix::process::Pid::from_raw(i32::try_from(old).unwrap()).unwrap();
        let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        wait_for("the next daemon", || {
            self.child().filter(|&child| child != old)
        });
    }

    /// The counters, once they say `done`. While no daemon serves, callers wait for the next one.
    fn when(&self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, || {
            // A daemon may be killed while it answers.
            let said = status(&self.place);
            let status: Value = serde_json::from_slice(&said.stdout).ok()?;
            done(&status).then_some(status)
        })
    }

    /// What the keeper holds of the memory files with this name.
    fn held(&self, name: &str) -> Vec<PathBuf> {
        held(self.keeper.0.id(), name)
    }

    /// Pages in the only store.
    fn stored_pages(&self) -> u64 {
        let stores = self.held("store");
        assert_eq!(stores.len(), 1, "{stores:?}");
        std::fs::metadata(&stores[0]).unwrap().blocks() / 8
    }
}

/// Whether `guests` guests share all their pages.
fn shared_by(guests: u64) -> impl Fn(&Value) -> bool {
    move |status| {
        count(status, "pages_shared") == PAGES as u64
            && count(status, "pages_sharing") == (guests - 1) * PAGES as u64
    }
}

fn guest(kept: &Kept) -> Guest {
    let mut guest = Guest::start(&kept.place.socket());
    guest.offer(PAGES, 100);
    guest
}

#[test]
fn sharing_goes_on_over_the_daemons_deaths() {
    let _alone = alone();
    let kept = Kept::start();
    let mut guests = [guest(&kept), guest(&kept)];
    // In the middle of merging, wherever that may be.
    for pause in [120, 230, 260, 310] {
        std::thread::sleep(Duration::from_millis(pause));
        kept.kill_child(SIGKILL);
        guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    }
    kept.when("two equal guests to be merged", shared_by(2));
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    guests[0].run("fork");
    let places = [0, 1, 700, PAGES - 1];
    let frames = places.map(|page| guests[0].frame(page).unwrap());
    wait_for("what was never shared to be given back", || {
        (kept.stored_pages() == PAGES as u64).then_some(())
    });
    for signal in [SIGKILL, SIGTERM, SIGKILL] {
        kept.kill_child(signal);
        guests.iter_mut().for_each(|guest| drop(guest.run("check")));
        let status = kept.when("the saving to come back", shared_by(2));
        assert_eq!(count(&status, "window_max_us"), 0, "no page was moved");
        assert_eq!(count(&status, "pages_skipped"), 0, "{status}");
        assert_eq!(count(&status, "saved_bytes"), PAGES as u64 * 4096);
        assert_eq!(kept.stored_pages(), PAGES as u64);
        assert_eq!(places.map(|page| guests[0].frame(page).unwrap()), frames);
        assert_eq!(places.map(|page| guests[1].frame(page).unwrap()), frames);
    }
    // A guest that is new shares the old pages.
    let mut third = guest(&kept);
    kept.when("a third guest to share", shared_by(3));
    third.run("check");
    assert_eq!(places.map(|page| third.frame(page).unwrap()), frames);
    assert_eq!(kept.stored_pages(), PAGES as u64);
    // A child from before keeps what all others give up, in one way or another.
    guests[0].run(&format!("fill 0 {PAGES} 5000"));
    guests[1].run(&format!("advise 0 {PAGES} 4"));
    drop(third);
    kept.kill_child(SIGKILL);
    kept.when("nothing to be shared", |status| {
        guests_of(status) == 2
            && count(status, "pages_sharing") + count(status, "pages_shared") == 0
    });
    assert_eq!(guests[0].run("childcheck"), "0");
    assert_eq!(kept.stored_pages(), PAGES as u64, "the child maps them all");
    guests[0].run("childexit");
    wait_for("the old slots to be given back", || {
        (kept.stored_pages() == 0).then_some(())
    });
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    drop(guests);
    for name in ["store", "lifeline", "note"] {
        wait_for("the keeper to hold nothing", || {
            kept.held(name).is_empty().then_some(())
        });
    }
    end(kept);
}

/// Ends the keeper: nothing is left.
fn end(mut kept: Kept) {
    let child = kept.child().unwrap();
    kept.keeper.signal(SIGTERM);
    assert_eq!(kept.keeper.end(), 0, "{}", kept.keeper.stderr());
    assert!(!kept.place.socket().exists(), "the socket is left behind");
    assert!(!PathBuf::from(format!("/proc/{child}")).exists());
}

#[test]
fn guests_that_end_while_no_daemon_lives_leave_nothing_behind() {
    let _alone = alone();
    let kept = Kept::start();
    let guests = [guest(&kept), guest(&kept)];
    kept.when("two equal guests to be merged", shared_by(2));
    let child = kept.child().unwrap();
    kept.keeper.signal(SIGHUP); // restarts the daemon
    drop(guests);
    wait_for("the next daemon", || {
        kept.child().filter(|&now| now != child)
    });
    wait_for("the keeper to hold nothing", || {
        (kept.held("store").is_empty() && kept.held("note").is_empty()).then_some(())
    });
    assert_eq!(guests_of(&json(&kept.place)), 0);
    end(kept);
}

#[test]
fn a_broken_page_comes_back_as_broken_and_a_discarded_one_not() {
    let _alone = alone();
    let kept = Kept::start();
    let mut guests = [guest(&kept), guest(&kept)];
    kept.when("two equal guests to be merged", shared_by(2));
    let daemon = kept.child().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(daemon).unwrap()).unwrap();
    // Unseen by the daemon that merged them.
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    guests[0].run("fill 10 5 777");
    guests[0].run("advise 100 50 4");
    kept.kill_child(SIGKILL);
    let rest = PAGES as u64 - 55;
    let status = kept.when("the rest to be shared", |status| {
        count(status, "pages_sharing") == rest && guests_of(status) == 2
    });
    assert_eq!(count(&status, "pages_shared"), PAGES as u64, "{status}");
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    // Pages that no guest maps are given back when both guests are adopted.
    guests[1].run("advise 100 50 4");
    wait_for("pages that no guest maps to be given back", || {
        (kept.stored_pages() == PAGES as u64 - 50).then_some(())
    });
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    // Adopted pages can be unmerged like any others.
    let mut unmerge = pageone();
    unmerge.args(["set", "run=2", "--socket"]);
    let said = output(unmerge.arg(kept.place.socket()));
    assert!(said.status.success(), "{}", text(&said.stderr));
    wait_for("all slots to be given back", || {
        (kept.stored_pages() == 0).then_some(())
    });
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    drop(guests);
    end(kept);
}

#[test]
fn writers_lose_nothing_while_daemons_die() {
    let _alone = alone();
    let kept = Kept::start();
    let mut guests = [guest(&kept), guest(&kept)];
    kept.when("two equal guests to be merged", shared_by(2));
    // They write, compare and discard; an engine at idle priority gets what they leave.
    guests[0].run("writers 1 1");
    let mut moment = RandomState::new().build_hasher().finish();
    let seed = moment;
    for _ in 0..6 {
        moment = moment
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        std::thread::sleep(Duration::from_millis(50 + (moment >> 33) % 500));
        kept.kill_child(SIGKILL);
    }
    println!("seed {seed}: {}", guests[0].run("stop"));
    kept.when("both guests to come back", |status| guests_of(status) == 2);
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    drop(guests);
    wait_for("the keeper to hold nothing", || {
        (kept.held("store").is_empty() && kept.held("lifeline").is_empty()).then_some(())
    });
    end(kept);
}

/// Nothing else holds what is merged here, so the daemon is kept by its parent, if it is not told otherwise.
#[test]
fn a_daemon_is_kept_where_nothing_else_does() {
    let _alone = alone();
    let place = Place::new();
    let mut command = pageone();
    command.args(["daemon", "--merge-period", "100ms", "--socket"]);
    let keeper = Running::start(command.arg(place.socket()).env_remove("NOTIFY_SOCKET"));
    let kept = Kept { place, keeper };
    kept.when("the daemon", |_| true);
    let mut guests = [guest(&kept), guest(&kept)];
    kept.when("two equal guests to be merged", shared_by(2));
    kept.kill_child(SIGKILL);
    kept.when("the saving to come back", shared_by(2));
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    drop(guests);
    end(kept);
    let place = Place::new();
    let alone = daemon(&place, &[]);
    assert_eq!(child(alone.0.id()), None);
}

/// The kernel tells of no end of a child then, and gives its number to another process.
#[test]
fn a_daemon_is_kept_where_its_starter_ignored_the_ends_of_children() {
    let _alone = alone();
    let place = Place::new();
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' CHLD; exec \"$@\"", "sh"]);
    command.arg(pageone().get_program());
    command.args(["daemon", "--keep", "--socket"]);
    let keeper = Running::start(command.arg(place.socket()));
    let kept = Kept { place, keeper };
    kept.when("the daemon", |_| true);
    let first = kept.child().unwrap();
    kept.kill_child(SIGKILL);
    wait_for("the next daemon", || {
        kept.child().filter(|&next| next != first)
    });
    kept.when("the next daemon", |_| true);
    end(kept);
}

#[test]
fn a_killed_keeper_takes_the_daemon_along_and_no_byte() {
    let _alone = alone();
    let place = Place::new();
    let mut command = pageone();
    command.args(["daemon", "--keep", "--merge-period", "100ms", "--socket"]);
    command.arg(place.socket()).env("TMPDIR", place.path());
    let keeper = Running::start(&mut command);
    let mut kept = Kept { place, keeper };
    kept.when("the daemon", |_| true);
    let mut guests = [guest(&kept), guest(&kept)];
    kept.when("two equal guests to be merged", shared_by(2));
    let child = kept.child().unwrap();
    kept.keeper.signal(SIGKILL);
    kept.keeper.end();
    wait_for("the daemon to end", || {
        (!PathBuf::from(format!("/proc/{child}")).exists()).then_some(())
    });
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
    let _next = daemon(&kept.place, &["--merge-period", "100ms"]);
    let status = kept.when("both guests to come back", |status| {
        guests_of(status) == 2 && count(status, "full_scans") > 2
    });
    assert_eq!(count(&status, "pages_sharing"), 0, "it starts afresh");
    guests.iter_mut().for_each(|guest| drop(guest.run("check")));
}

#[test]
fn a_daemon_that_cannot_serve_ends_its_keeper() {
    let place = Place::new();
    let _other = daemon(&place, &[]);
    let mut command = pageone();
    command.args(["daemon", "--keep", "--socket"]);
    let said = output(command.arg(place.socket()));
    assert_eq!(said.status.code(), Some(1));
    let said = text(&said.stderr);
    assert!(
        said.contains("in use") && said.contains("before it served: exit code 1"),
        "{said}"
    );
    assert!(status(&place).status.success(), "the other one serves on");
}

fn set(place: &Place, settings: &[&str]) {
    let mut command = pageone();
    command
        .arg("set")
        .args(settings)
        .arg("--socket")
        .arg(place.socket());
    let said = output(&mut command);
    assert!(said.status.success(), "{}", text(&said.stderr));
}

#[test]
fn knobs_turned_by_hand_stay_turned() {
    let _alone = alone();
    let kept = Kept::start();
    set(
        &kept.place,
        &["merge_period=70ms", "use_zero_pages=false", "threads=3"],
    );
    set(
        &kept.place,
        &["run=0", "store_limit=77", "merge_period=80ms"],
    );
    let knobs = ["merge_period_ms", "threads", "store_limit_mib", "run"];
    for signal in [SIGKILL, SIGTERM] {
        kept.kill_child(signal);
        let status = kept.when("the next daemon", |_| true);
        assert_eq!(
            knobs.map(|knob| count(&status, knob)),
            [80, 3, 77, 0],
            "{status}"
        );
        assert_eq!(status["use_zero_pages"], false);
        assert_eq!(kept.held("note").len(), 1);
    }
    // What is turned back to what the daemon starts with is as if it had never been turned.
    set(&kept.place, &["run=1", "merge_period=100ms"]);
    kept.kill_child(SIGKILL);
    let status = kept.when("the next daemon", |_| true);
    assert_eq!(
        knobs.map(|knob| count(&status, knob)),
        [100, 3, 77, 1],
        "{status}"
    );
    end(kept);
}

#[test]
fn a_new_configuration_wins_over_what_was_turned_by_hand() {
    let _alone = alone();
    let place = Place::new();
    let config = place.file(
        "config.toml",
        "threads = 2\nmax_page_sharing = 100\nstore_limit = 50\n",
    );
    let config = config.to_str().unwrap().to_owned();
    let kept = Kept::start_with(place, &["--config", &config]);
    set(
        &kept.place,
        &["threads=4", "max_page_sharing=200", "store_limit=60"],
    );
    kept.place
        .file("config.toml", "threads = 1\nmax_page_sharing = 100\n");
    kept.keeper.signal(SIGHUP);
    let knobs = ["threads", "max_page_sharing", "store_limit_mib"];
    let status = kept.when("the next daemon", |status| count(status, "threads") == 1);
    assert_eq!(
        knobs.map(|knob| count(&status, knob)),
        [1, 200, 0],
        "{status}"
    );
    end(kept);
}

/// A daemon that cannot start would lose what is kept.
#[test]
fn a_mistake_in_a_file_leaves_the_daemon_as_it_is() {
    let _alone = alone();
    let place = Place::new();
    let config = place.file("config.toml", "threads = 2\n");
    let config = config.to_str().unwrap().to_owned();
    let kept = Kept::start_with(place, &["--config", &config]);
    let child = kept.child();
    assert!(child.is_some());
    kept.place.file("config.toml", "threads = -1\n");
    kept.keeper.signal(SIGHUP);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(kept.child(), child);
    kept.place.file("config.toml", "threads = 1\n");
    kept.keeper.signal(SIGHUP);
    kept.when("the next daemon", |status| count(status, "threads") == 1);
    end(kept);
}

/// A keeper played by hand: takes notes until one fits.
fn note(inbox: &Inbox, what: &str, wanted: impl Fn(&Note) -> bool) {
    wait_for(what, || {
        let note = inbox.next().unwrap()?;
        assert!(wanted(&note), "waited for {what}, got {note:?}");
        Some(())
    });
}

fn keeps(prefix: &'static str) -> impl Fn(&Note) -> bool {
    move |note| matches!(note, Note::Keep(name, held) if name.starts_with(prefix) && held.len() == 1)
}

fn forgets(prefix: &'static str) -> impl Fn(&Note) -> bool {
    move |note| matches!(note, Note::Forget(name) if name.starts_with(prefix))
}

#[test]
fn a_keeper_is_told_what_to_keep_and_what_no_longer() {
    let _alone = alone();
    let place = Place::new();
    let address = place.path().join("notify");
    let inbox = Inbox::bind(&address).unwrap();
    let mut command = pageone();
    command.args(["daemon", "--no-keep", "--merge-period", "100ms", "--socket"]);
    command.arg(place.socket()).stderr(Stdio::piped());
    let mut daemon = Running::start(command.env("NOTIFY_SOCKET", &address));
    note(&inbox, "the socket", keeps("listener"));
    note(&inbox, "the history", keeps("history."));
    note(&inbox, "READY", |note| matches!(note, Note::Ready));
    let guest = Guest::start(&place.socket());
    let mut guest = guest;
    guest.offer(PAGES, 1);
    for kind in ["store.", "note.", "tie."] {
        note(&inbox, kind, keeps(kind));
    }
    drop(guest);
    for kind in ["store.", "tie.", "note."] {
        note(&inbox, kind, forgets(kind));
    }
    daemon.signal(SIGTERM);
    assert_eq!(daemon.end(), 0, "{}", daemon.stderr());
    assert!(place.socket().exists(), "it is the keeper's");
    assert!(
        inbox.next().unwrap().is_none(),
        "an ordinary end takes nothing back"
    );
}

/// `pageone status --since 1h` with more words.
fn since(place: &Place, words: &[&str]) -> String {
    let mut command = pageone();
    command.args(["status", "--since", "1h", "--socket"]);
    let said = output(command.arg(place.socket()).args(words));
    text(&said.stdout)
}

fn samples(place: &Place) -> Vec<Value> {
    let Ok(mut history) = serde_json::from_str::<Value>(&since(place, &["--json"])) else {
        return Vec::new();
    };
    common::assert_head(&history);
    match history["samples"].take() {
        Value::Array(samples) => samples,
        _ => panic!("no samples in {history}"),
    }
}

#[test]
fn a_history_goes_on_and_has_a_gap_while_no_daemon_ran() {
    let alone = alone();
    let kept = Kept::start();
    let guests = [guest(&kept), guest(&kept)];
    kept.when("two equal guests to be merged", shared_by(2));
    let saved = PAGES as u64 * 4096;
    let told = |what, wanted: &dyn Fn(&[Value]) -> bool| {
        wait_for(what, || {
            let samples = samples(&kept.place);
            wanted(&samples).then_some(samples)
        })
    };
    let all_saved = |samples: &[Value]| count(samples.last().unwrap(), "saved_bytes") == saved;
    let before = told("a sample of the saving", &|samples| {
        !samples.is_empty() && all_saved(samples)
    });
    // From here on there is little but waiting, beside other tests: this one is the first by its name.
    drop(alone);
    // A daemon that is stopped takes no samples, like one that is dead; it is killed only then, so that none runs meanwhile.
    let pid = i32::try_from(kept.child().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_secs(25)); // what a gap is
    kept.kill_child(SIGKILL);
    let after = told("the next daemon's sample", &|samples| {
        samples.len() > before.len()
    });
    let (old, new) = after.split_at(before.len());
    assert_eq!(old, before, "all samples of the daemon before");
    let passed = count(&new[0], "at") - count(old.last().unwrap(), "at");
    assert_eq!(count(&new[0], "unseen_seconds"), passed - 10, "{after:?}");
    assert!(new[0]["cpu_seconds"].as_f64() >= old.last().unwrap()["cpu_seconds"].as_f64());
    let table = since(&kept.place, &[]);
    assert!(table.contains("no daemon, or no time for it: "), "{table}");
    // Each daemon leaves it to the next one, and all to one file.
    kept.kill_child(SIGTERM);
    let last = told("one more daemon's", &|samples| samples.len() > after.len());
    assert_eq!(last[..after.len()], after);
    assert_eq!(kept.held("history").len(), 1);
    drop(guests);
    end(kept);
}

#[test]
fn a_damaged_history_is_refused_and_said_so() {
    let _alone = alone();
    let kept = Kept::start();
    wait_for("a sample", || {
        (!samples(&kept.place).is_empty()).then_some(())
    });
    let archive = kept.held("history").remove(0);
    let archive = std::fs::OpenOptions::new().write(true).open(archive);
    std::os::unix::fs::FileExt::write_all_at(&archive.unwrap(), b"!", 100).unwrap();
    let former = samples(&kept.place);
    let begun = std::time::SystemTime::now();
    kept.kill_child(SIGKILL);
    let now = wait_for("the next daemon's sample", || {
        Some(samples(&kept.place)).filter(|samples| !samples.is_empty())
    });
    let begun = begun
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    assert!(
        now.iter().all(|sample| count(sample, "at") >= begun),
        "{former:?} {now:?}"
    );
    wait_for("the keeper to hear of it", || {
        (kept.held("history").len() == 1).then_some(())
    });
    let mut kept = kept;
    kept.keeper.signal(SIGTERM);
    assert_eq!(kept.keeper.end(), 0);
    let log = kept.keeper.stderr();
    assert!(
        log.contains("history is not taken over: its sample 0 is damaged"),
        "{log}"
    );
}
