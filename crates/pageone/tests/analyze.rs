//! `pageone analyze`: right sums of real processes, and nothing of them changed.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{
    NO_FOLDER, Place, Running, Swap, alone, bench_guest, bench_process, count, daemon, install,
    json, machine, need_agent, output, pageone, text, wait_for,
};
use pageone::bench::{Content, Guest};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use sys::ksm::{Knobs, Ksm, Member, Tuning};

const PAGES: u64 = 8192;

fn content() -> Content {
    Content {
        seed: 1,
        dup: 0.7,
        run_pages: 16,
        zero_prefix: 0.0,
        pages: PAGES,
        shuffle: false,
    }
}

fn analyze(args: &[&str], pids: &[u32]) -> Value {
    let mut command = pageone();
    command
        .args(["analyze", "--look-again=300ms", "--json"])
        .args(args);
    command.args(pids.iter().map(u32::to_string));
    let output = output(&mut command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

/// What a look from outside might change of a process.
fn state(pid: u32) -> (BTreeMap<String, String>, String) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    // Pages of files come and go with what other processes do with these files.
    let told = [
        "VmSize", "RssAnon", "VmPTE", "VmSwap", "VmData", "VmStk", "VmLck",
    ];
    let lines = status.lines().filter_map(|line| line.split_once(':'));
    let values = lines
        .filter(|(name, _)| told.contains(name))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    (values.collect(), maps)
}

/// Of the processes of other users there is a line, and no row.
#[test]
fn processes_that_this_user_may_not_read_are_left_out() {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user");
    }
    let place = Place::new();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.path(), open).unwrap();
    let program = place.path().join("pageone");
    install(env!("CARGO_BIN_EXE_pageone"), &program);
    let mine = place.path().join("unreadable");
    install("/bin/sleep", &mine);
    let sleep = |uid: u32| {
        let mut command = Command::new(&mine);
        Running::start(command.arg("60").uid(uid).gid(uid))
    };
    let (_roots, own) = (sleep(0), sleep(61_001));
    let analyze = |words: &[&str]| {
        let mut command = Command::new(&program);
        command.uid(61_001).gid(61_001).current_dir("/");
        command.args(["analyze", "--look-again=10ms", "--comm=unreadable"]);
        output(
            command
                .args(words)
                .env("CONFIGURATION_DIRECTORY", NO_FOLDER),
        )
    };
    let table = analyze(&[]);
    let said = text(&table.stdout);
    assert!(table.status.success(), "{}", text(&table.stderr));
    let line = "1 process that this user may not read is left out: root may look at all";
    assert!(said.contains(line), "{said}");
    let report: Value = serde_json::from_slice(&analyze(&["--json"]).stdout).unwrap();
    let pids = report["processes"].as_array().unwrap().iter();
    let pids: Vec<_> = pids.map(|row| number(&row["pid"])).collect();
    assert_eq!(pids, [u64::from(own.0.id())]);
    assert_eq!(report["unreadable"], 1);
    drop(own);
    let none = analyze(&[]);
    assert!(!none.status.success());
    assert!(text(&none.stderr).contains(line), "{}", text(&none.stderr));
}

#[test]
fn without_a_thread_the_reason_is_told() {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user");
    }
    let place = Place::new();
    let program = place.path().join("pageone");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.path(), open).unwrap();
    install(env!("CARGO_BIN_EXE_pageone"), &program);
    let mut sleep = Command::new("sleep");
    let sleep = Running::start(sleep.arg("60").uid(61_002).gid(61_002));
    for most in 1..3 {
        let mut command = Command::new("prlimit");
        command.arg(format!("--nproc={most}:{most}"));
        command.args([
            "setpriv",
            "--reuid=61002",
            "--regid=61002",
            "--clear-groups",
        ]);
        command.arg(&program).args(["analyze", "--look-again=10ms"]);
        let done = output(command.arg(sleep.0.id().to_string()).current_dir("/"));
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{most}: {said}");
        assert!(said.contains("Resource temporarily unavailable"), "{said}");
    }
}

#[test]
fn the_sum_is_that_of_the_content_and_nothing_changes() {
    let guests: Vec<Guest> = (0..3)
        .map(|number| bench_process(number, &content()))
        .collect();
    let pids: Vec<_> = guests.iter().map(Guest::pid).collect();
    let before: Vec<_> = pids.iter().map(|&pid| state(pid)).collect();
    let place = tempfile::tempdir().unwrap();
    let drawing = place.path().join("savable.svg");
    let plot = format!("--plot={}", drawing.display());
    let report = analyze(&["--threads=2", &plot], &pids);
    let drawing = std::fs::read_to_string(drawing).unwrap();
    for part in ["one domain for all", "anonymous", "between processes"] {
        assert!(drawing.contains(part), "no {part}: {drawing}");
    }
    for (&pid, before) in pids.iter().zip(&before) {
        let after = state(pid);
        assert_eq!(after.0, before.0, "of {pid}");
        assert!(after.1 == before.1, "the mappings of {pid} changed");
    }
    let ideal = content().ideal_saved_bytes(3);
    let between = number(&report["savable"]["between"]);
    // Programs have a few equal pages besides what they were filled with.
    assert!(
        (ideal..=ideal + ideal / 100).contains(&between),
        "{between}, not {ideal}"
    );
    let pairs = report["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 3, "{report}");
    assert!(
        pairs.iter().all(|pair| number(&pair["bytes"]) >= ideal / 2),
        "{report}"
    );
    for row in report["processes"].as_array().unwrap() {
        assert!(number(&row["present"]) >= PAGES * 4096, "{row}");
        assert!(number(&row["runs"]) >= PAGES / 16 / 6, "{row}");
        // But for runs of zeros, of which programs have a few.
        let most = number(&row["mappings"]) + 2 * number(&row["runs"]);
        let needed = number(&row["mappings_needed"]);
        assert!((most * 9 / 10..=most).contains(&needed), "{row}");
        assert_eq!(row["error"], Value::Null);
    }
    let (nodes, sum) = by_node(&report);
    let read = report["processes"].as_array().unwrap().iter();
    let read: u64 = read.map(|row| number(&row["present"])).sum();
    assert_eq!(sum("bytes"), number(&report["savable"]["bytes"]));
    assert!(
        sum("read") <= read && sum("read") >= 3 * PAGES * 4096,
        "{nodes:?}"
    );
    // A sample by content: the truth lies within its bound (in 19 of 20 samples: so twice the bound).
    let sample = analyze(&["--sample-memory=1/8"], &pids);
    let (guess, bound) = (
        number(&sample["savable"]["bytes"]),
        number(&sample["error"]),
    );
    let truth = number(&report["savable"]["bytes"]);
    assert!(bound > 0 && bound < truth / 4, "{bound} of {truth}");
    assert!(
        guess.abs_diff(truth) <= 2 * bound,
        "{guess} ± {bound}, not {truth}"
    );
}

/// The rest between the looks is told on a terminal, and nowhere else.
#[test]
fn the_time_until_the_second_look_is_told() {
    let sleep = Running::start(Command::new("sleep").arg("60"));
    let pid = sleep.0.id().to_string();
    let program = pageone().get_program().to_owned();
    let words = ["analyze", "--look-again=2500ms", &pid];
    let command = format!("exec {} {}", program.display(), words.join(" "));
    // It gives the command a terminal.
    let mut script = Command::new("script");
    script.args([
        "-qfec",
        &format!("stty cols 80 rows 24; {command}"),
        "/dev/null",
    ]);
    script
        .env("TERM", "xterm")
        .env("CONFIGURATION_DIRECTORY", NO_FOLDER);
    let Ok(drawn) = script.stdin(Stdio::null()).output() else {
        return common::tools::lacks("script");
    };
    let drawn = text(&drawn.stdout);
    for left in ["in 3 s", "in 2 s", "in 1 s"] {
        assert!(
            drawn.contains(&format!("the second look comes {left} ")),
            "{drawn:?}"
        );
    }
    let quiet = output(pageone().args(["analyze", "--look-again=10ms", &pid]));
    assert_eq!(text(&quiet.stderr), "");
}

/// A program half of whose memory is in swap, as far as there is room. All its pages are equal.
const SWAPPED: &str = "
import mmap, os, sys
memory = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE)
memory[:] = os.urandom(4096) * 2048
memory.madvise(21, 0, 4 << 20) # MADV_PAGEOUT
print('ready', os.getpid(), flush=True)
sys.stdin.read()
";

/// A read of a page in swap would bring it back: the process would have less in swap, and more in memory.
#[test]
fn pages_in_swap_stay_there() {
    let place = Place::new();
    let Some(_swap) = Swap::on(place.path().join("swap")) else {
        return;
    };
    let Some(program) = Program::start(SWAPPED) else {
        return;
    };
    let before = state(program.1);
    assert_ne!(before.0["VmSwap"], "0 kB", "nothing was swapped");
    let report = analyze(&[], &[program.1]);
    let after = state(program.1);
    assert_eq!(after.0, before.0);
    assert!(after.1 == before.1, "its mappings changed");
    let row = &report["processes"][0];
    assert!(number(&row["swapped"]) >= 1 << 20, "{row}");
    // Copies among what is in memory count.
    assert!(number(&report["savable"]["within"]) >= 3 << 20, "{report}");
}

/// The nodes that a report has, and what adds up one of their figures.
fn by_node(report: &Value) -> (Vec<u32>, impl Fn(&str) -> u64) {
    let nodes = report["nodes"].as_object().unwrap();
    let names = nodes.keys().map(|node| node.parse().unwrap()).collect();
    let sum = |name: &str| nodes.values().map(|node| number(&node[name])).sum();
    (names, sum)
}

#[test]
fn what_is_foretold_is_what_merging_saves() {
    need_agent();
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms"]);
    let mut guests: Vec<Guest> = (0..3)
        .map(|number| bench_guest(&place, number, &content()))
        .collect();
    let pids: Vec<_> = guests.iter().map(Guest::pid).collect();
    let foretold = number(&analyze(&[], &pids)["savable"]["bytes"]);
    for guest in &mut guests {
        guest.tell("offer").unwrap();
    }
    let saved =
        || (count(&json(&place), "pages_sharing") + count(&json(&place), "zero_pages")) * 4096;
    wait_for("what was foretold, within 5 %", || {
        (saved() >= foretold / 100 * 95).then_some(())
    });
    // And it stays so: nothing more comes.
    std::thread::sleep(Duration::from_millis(500));
    let saved = saved();
    assert!(saved <= foretold / 100 * 105, "{saved}, not {foretold}");
    // What is merged is said to be, and is not foretold once more.
    let report = analyze(&[], &pids);
    let merged = &report["merged"];
    let sharing = count(&json(&place), "pages_sharing") * 4096;
    let told = number(&merged["pageone_saved"]);
    assert!(
        told.abs_diff(sharing) <= sharing / 20,
        "{merged}, not {sharing}"
    );
    let copies = number(&merged["pageone"]) - number(&merged["pageone_copies"]);
    assert_eq!(copies, told, "{merged}");
    let left = number(&report["savable"]["bytes"]);
    assert!(left <= foretold / 20, "{left} of {foretold} once more");
    let mut command = pageone();
    command.args(["analyze", "--look-again=10ms"]);
    let table = output(command.args(pids.iter().map(u32::to_string)));
    let table = text(&table.stdout);
    assert!(table.contains("merged already: PageONE saves "), "{table}");
    assert!(table.contains("less than 1 % more"), "{table}");
}

/// What KSM has merged is said to be, and is no part of what is foretold.
#[test]
fn what_ksm_has_merged_counts_once() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root turns KSM");
    }
    let _alone = alone();
    let Some(_scanning) = Scanning::start() else {
        return;
    };
    let mut guests: Vec<Guest> = (0..2)
        .map(|number| bench_process(number, &content()))
        .collect();
    let pids: Vec<_> = guests.iter().map(Guest::pid).collect();
    for guest in &mut guests {
        guest.tell("offer").unwrap();
        guest.answer(Duration::from_secs(60)).unwrap();
    }
    let ideal = content().ideal_saved_bytes(2);
    wait_for("KSM to merge it", || {
        let merged = |pid: &u32| Member::of(*pid).map_or(0, |member| member.merging);
        let pages: u64 = pids.iter().map(merged).sum();
        // Both places of each page.
        (pages * 4096 >= 2 * ideal).then_some(())
    });
    let report = analyze(&[], &pids);
    let ksm = number(&report["merged"]["ksm"]);
    assert!(ksm >= 2 * ideal, "{ksm}, not {}", 2 * ideal);
    let left = number(&report["savable"]["bytes"]);
    assert!(left <= ideal / 10, "{left} of {ideal} once more: {report}");
    assert_eq!(number(&report["merged"]["pageone"]), 0, "{report}");
}

/// KSM that scans without a pause; as it was before when this is dropped.
struct Scanning(
    Ksm,
    Knobs,
    #[expect(dead_code, reason = "its lock is held")] std::fs::File,
);

impl Scanning {
    fn start() -> Option<Self> {
        let ksm = Ksm::default();
        if !ksm.exists() {
            eprintln!("skipped: the kernel has no KSM");
            return None;
        }
        // The lock of all who turn KSM.
        let mut lock = std::fs::File::options();
        lock.write(true).create(true).truncate(false).mode(0o600);
        let lock = lock
            .open("/run/pageone-sys-kernel-mm-ksm-run.lock")
            .unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let before = ksm.save().unwrap();
        let scanning = Self(ksm, before, lock);
        scanning.0.tune(Tuning::Fast).unwrap();
        scanning.0.write("run", "1").unwrap();
        Some(scanning)
    }
}

impl Drop for Scanning {
    fn drop(&mut self) {
        let _ = self.0.restore(&self.1);
    }
}

/// A program that forks: most of its pages are shared already.
const FORKS: &str = "
import os, sys
data = bytearray(os.urandom(1 << 20) * 16)
if os.fork() == 0:
    print('ready', os.getpid(), flush=True)
sys.stdin.read()
";
/// A program that writes one half of its memory again and again.
const CHANGES: &str = "
import os, sys, select
data = bytearray(os.urandom(4096) * 4096)
print('ready', os.getpid(), flush=True)
n = 0
while not select.select([sys.stdin], [], [], 0.001)[0]:
    n += 1
    for at in range(0, len(data) // 2, 4096):
        data[at:at + 4] = n.to_bytes(4, 'little')
";

/// A program whose equal pages `--any` leaves alone: 16 MiB written in a private mapping of a file, and 4 MiB that are locked.
const LEFT_ALONE: &str = "
import ctypes, mmap, os, sys, tempfile
file = tempfile.TemporaryFile()
file.truncate(16 << 20)
written = mmap.mmap(file.fileno(), 16 << 20, mmap.MAP_PRIVATE)
locked = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE)
page = os.urandom(4096)
for memory in written, locked:
    for at in range(0, len(memory), 4096):
        memory[at:at + 4096] = page
at = ctypes.addressof(ctypes.c_char.from_buffer(locked))
assert ctypes.CDLL(None).mlock(ctypes.c_void_p(at), ctypes.c_size_t(4 << 20)) == 0
print('ready', os.getpid(), flush=True)
sys.stdin.read()
";

/// A program in Python that has said that it is ready, and the process that said it.
struct Program(Child, u32);

impl Program {
    /// `None` where there is no Python.
    fn start(program: &str) -> Option<Self> {
        let mut command = Command::new("python3");
        command
            .args(["-c", program])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let Ok(mut child) = command.spawn() else {
            common::tools::lacks("python3");
            return None;
        };
        let mut line = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        lines.read_line(&mut line).unwrap();
        let pid = line.trim().strip_prefix("ready ").unwrap().parse().unwrap();
        Some(Self(child, pid))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Its input ends, and so it does.
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

#[test]
fn what_fork_shares_counts_once() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root is told which pages share a frame");
        return;
    }
    let Some(program) = Program::start(FORKS) else {
        return;
    };
    let pids = [program.0.id(), program.1];
    let frames = || {
        let of = |pid: &u32| sys::usage::proportional_anonymous_bytes(*pid).unwrap();
        pids.iter().map(of).sum::<u64>()
    };
    let before = frames();
    let report = analyze(&[], &pids);
    // A read by process_vm_readv would part what is shared.
    let after = frames();
    assert!(after <= before + (1 << 20), "{before} bytes, then {after}");
    // 16 copies of a MiB within the first process; what the second shares with it is saved already.
    let shared = number(&report["shared_already"]);
    assert!(shared >= 15 << 20, "{shared}");
    let within = number(&report["savable"]["within"]);
    assert!((14 << 20..18 << 20).contains(&within), "{within}");
}

#[test]
fn what_is_left_alone_is_not_promised() {
    let Some(program) = Program::start(LEFT_ALONE) else {
        return;
    };
    let report = analyze(&[], &[program.0.id()]);
    let [alone, savable] = [&report["left_alone"], &report["savable"]["bytes"]].map(number);
    assert!(alone >= 20 << 20, "{alone} of 20 MiB");
    assert!(savable < 2 << 20, "{savable} are promised");
    assert!(number(&report["present"]) > alone);
}

#[test]
fn pages_that_change_do_not_count() {
    let Some(program) = Program::start(CHANGES) else {
        return;
    };
    let report = analyze(&[], &[program.1]);
    let (changed, within) = (
        number(&report["changed"]),
        number(&report["savable"]["within"]),
    );
    assert!(changed >= 7 << 20, "{changed}");
    assert!((7 << 20..10 << 20).contains(&within), "{within}");
}

#[test]
fn what_cannot_be_looked_at_is_named() {
    let gone = output(pageone().args(["analyze", "4194304"]));
    let error = text(&gone.stderr);
    assert!(
        !gone.status.success() && error.contains("there is no process 4194304"),
        "{error}"
    );
    let none = output(pageone().args(["analyze", "--comm=no such name"]));
    assert!(
        text(&none.stderr).contains("no process fits"),
        "{}",
        text(&none.stderr)
    );
    let place = tempfile::tempdir().unwrap();
    for (len, why) in [(0, "is empty"), (5000, "5000 bytes is not whole pages")] {
        let file = place.path().join(format!("of-{len}"));
        std::fs::write(&file, vec![1; len]).unwrap();
        let refused = output(pageone().args(["analyze", "--dump"]).arg(&file));
        let error = text(&refused.stderr);
        assert!(!refused.status.success(), "{error}");
        for part in [file.to_str().unwrap(), why, "ELF"] {
            assert!(error.contains(part), "no `{part}`: {error}");
        }
        assert!(!error.contains("root may"), "{error}");
    }
    if std::fs::read_to_string("/proc/2/comm").is_ok_and(|comm| comm == "kthreadd\n") {
        for verb in ["analyze", "attach"] {
            let mut command = pageone();
            command.args([verb, "2"]);
            if verb == "attach" {
                command.args(["--dry-run", "--socket", "/no/such/socket"]);
            }
            let error = text(&output(&mut command).stderr);
            let why = "is a kernel thread, which has no memory of its own";
            assert!(error.contains(why), "{error}");
        }
    }
    let nothing = output(pageone().arg("analyze"));
    assert_eq!(nothing.status.code(), Some(2));
}

/// The share of a core is kept over the whole: CPU time against the time that passes.
#[test]
fn a_limit_of_cpu_time_is_kept() {
    let _alone = alone();
    // Enough that reading it is most of the work.
    let content = Content {
        pages: 1 << 15,
        ..content()
    };
    let guests: Vec<Guest> = (0..2)
        .map(|number| bench_process(number, &content))
        .collect();
    let mut command = pageone();
    command.args(["analyze", "--look-again=10ms", "--cpu-limit=10", "--json"]);
    command.args(guests.iter().map(|guest| guest.pid().to_string()));
    let begun = Instant::now();
    let mut running = Running::start(command.stdout(Stdio::null()));
    let pid = running.0.id();
    // It stays until it is asked after, with the time that it has used.
    wait_for("its end", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.contains(") Z ").then_some(())
    });
    let took = begun.elapsed().as_secs_f64();
    let used = sys::usage::cpu_time(pid).unwrap().as_secs_f64();
    assert_eq!(running.end(), 0);
    // What is not reading is not limited: it starts, and sums up. Without a limit the share is a core or more.
    assert!(used > 0.0, "it has read all of it for nothing");
    assert!(used < took * 0.3, "{used} s of CPU time in {took} s");
}

#[test]
fn the_table_says_what_to_do() {
    let guests: Vec<Guest> = (0..2)
        .map(|number| bench_process(number, &content()))
        .collect();
    let mut command = pageone();
    command.args(["analyze", "--look-again=10ms", "--cpu-limit=100%"]);
    command.args(guests.iter().map(|guest| guest.pid().to_string()));
    let output = output(&mut command);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let start = match rustix::process::geteuid().is_root() {
        true => "to get it: `",
        false => "to get it: `sudo ",
    };
    for part in [
        "savable ",
        "between processes",
        "PageONE, a domain for each user",
        "RUNS",
        start,
    ] {
        assert!(table.contains(part), "no `{part}` in:\n{table}");
    }
    assert!(
        table.lines().all(|line| line.chars().count() <= 80),
        "{table}"
    );
}

/// Machines have one program: their names tell them apart, and do nothing to a terminal.
#[test]
fn machines_are_shown_by_their_names() {
    let place = tempfile::tempdir().unwrap();
    let machines = ["web\x1b[2J", "db"].map(|name| machine(place.path(), name));
    let pids = machines.each_ref().map(|machine| machine.0.id());
    let drawing = place.path().join("drawing.svg");
    let report = analyze(&["--plot", drawing.to_str().unwrap()], &pids);
    for (pid, name) in pids.iter().zip(["web\x1b[2J", "db"]) {
        let rows = report["processes"].as_array().unwrap();
        let row = rows
            .iter()
            .find(|row| number(&row["pid"]) == u64::from(*pid));
        assert_eq!(row.unwrap()["name"], name, "{report}");
        assert_eq!(row.unwrap()["command"], "qemu-system-x86", "{report}");
    }
    let mut command = pageone();
    command.args(["analyze", "--look-again=10ms"]);
    let table = output(command.args(pids.map(|pid| pid.to_string())));
    let (table, drawing) = (
        text(&table.stdout),
        std::fs::read_to_string(drawing).unwrap(),
    );
    for told in [&table, &drawing] {
        for name in [r"web\u{1b}[2J", "db"] {
            assert!(told.contains(name), "no {name}: {told}");
        }
        assert!(!told.contains('\x1b'), "an escape sequence went through");
    }
}

#[test]
fn the_policy_tells_the_domains() {
    let guests: Vec<Guest> = (0..2)
        .map(|number| bench_process(number, &content()))
        .collect();
    let pids: Vec<_> = guests.iter().map(Guest::pid).collect();
    let place = Place::new();
    let own = rustix::process::geteuid().as_raw();
    let rule = format!("default = 'refuse'\n[[rule]]\nuid = {own}\ndomain = 'pool'\n");
    for (policy, domain) in [
        ("default = 'refuse'\n", None),
        (rule.as_str(), Some("name:pool")),
    ] {
        let policy = place.file("policy.toml", policy);
        let report = analyze(&["--policy", policy.to_str().unwrap()], &pids);
        assert_eq!(
            report["processes"][0]["domain"].as_str(),
            domain,
            "{report}"
        );
        let saves = number(&report["savable"]["bytes"]);
        assert_eq!(saves > 0, domain.is_some(), "{report}");
        let pool = &report["domains"]["name:pool"]["bytes"];
        assert_eq!(pool.as_u64(), domain.map(|_| saves), "{report}");
        // What no domains would save is the same for both.
        assert!(number(&report["engines"][1]["bytes"]) >= content().ideal_saved_bytes(2));
    }
}

/// Without a flag the daemon that serves here tells the domains; without one the file counts that it would read.
#[test]
fn the_rules_in_force_tell_the_domains() {
    let guests: Vec<Guest> = (0..2)
        .map(|number| bench_process(number, &content()))
        .collect();
    let own = rustix::process::geteuid().as_raw();
    let rule = |name: &str| format!("default = 'refuse'\n[[rule]]\nuid = {own}\n{name}\n");
    let (place, files) = (Place::new(), Place::new());
    let file = files.file("policy.toml", &rule("domain = 'of-file'"));
    let look = || {
        let mut command = pageone();
        command.args(["analyze", "--look-again=300ms", "--json"]);
        command.args(guests.iter().map(|guest| guest.pid().to_string()));
        command.env("PAGEONE_SOCKET", place.socket());
        let said = output(command.env("CONFIGURATION_DIRECTORY", files.path()));
        assert!(said.status.success(), "{}", text(&said.stderr));
        serde_json::from_slice::<Value>(&said.stdout).unwrap()
    };
    let is = |domain: Option<&str>, origin: Value, engine: &str| {
        let report = look();
        assert_eq!(
            report["processes"][0]["domain"].as_str(),
            domain,
            "{report}"
        );
        assert_eq!(report["policy"], origin, "{report}");
        assert_eq!(report["engines"][0]["name"], engine, "{report}");
        let saves = number(&report["engines"][0]["bytes"]);
        assert_eq!(saves > 0, domain.is_some(), "{report}");
    };
    for (name, domain) in [
        ("domain = 'pool'", Some("name:pool")),
        ("refuse = true", None),
    ] {
        let policy = place.file("policy.toml", &rule(name));
        let _daemon = daemon(&place, &["--policy", policy.to_str().unwrap()]);
        let origin = serde_json::json!({"from": "daemon", "path": place.socket()});
        is(domain, origin, "PageONE, the daemon's domains");
    }
    let origin = serde_json::json!({"from": "file", "path": file});
    let report = look();
    assert_eq!(report["policy"], origin, "{report}");
    assert_eq!(report["processes"][0]["domain"], "name:of-file", "{report}");
    std::fs::remove_file(&file).unwrap();
    let origin = serde_json::json!({"from": "users"});
    is(
        Some(&format!("uid:{own}")),
        origin,
        "PageONE, a domain for each user",
    );
}

#[test]
fn processes_are_found_by_name_and_condition() {
    let folder = tempfile::tempdir().unwrap();
    let name = format!("an-{}", std::process::id());
    let program = folder.path().join(&name);
    install("/bin/sleep", &program);
    let mut child = Command::new(&program).arg("60").spawn().unwrap();
    let condition = format!("command={name},executable={}", program.display());
    // The kernel lets the parent go on before the process has its new name.
    let comm = format!("/proc/{}/comm", child.id());
    wait_for("the process to have its name", || {
        (std::fs::read_to_string(&comm).unwrap().trim() == name).then_some(())
    });
    let found = |flags: [&str; 2]| {
        let report = analyze(&flags, &[]);
        let rows = report["processes"].as_array().unwrap();
        rows.iter()
            .map(|row| number(&row["pid"]))
            .collect::<Vec<_>>()
    };
    let all = [found(["--comm", &name]), found(["--match", &condition])];
    child.kill().unwrap();
    child.wait().unwrap();
    let pid = u64::from(child.id());
    assert_eq!(all, [vec![pid], vec![pid]]);
}

/// A control group of a test's own; removed on drop.
struct Group(std::path::PathBuf);

impl Group {
    fn new(word: &str) -> Option<Self> {
        let name = format!("pageone-analyze-{}-{word}", std::process::id());
        let folder = std::path::Path::new("/sys/fs/cgroup").join(name);
        let is_v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.procs").exists();
        let made = is_v2 && std::fs::create_dir(&folder).is_ok();
        if !made {
            eprintln!("skipped: no control group of version 2 can be made");
        }
        made.then_some(Self(folder))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A test that fails leaves processes in it.
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        let end = Instant::now() + Duration::from_secs(10);
        while std::fs::remove_dir(&self.0).is_err() && self.0.exists() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_group_goes_with_the_processes_in_it() {
    let Some(group) = Group::new("left") else {
        return;
    };
    let sleep = Running::start(Command::new("sleep").arg("60"));
    std::fs::write(group.0.join("cgroup.procs"), sleep.0.id().to_string()).unwrap();
    let folder = group.0.clone();
    drop(group);
    assert!(!folder.exists(), "{} is left behind", folder.display());
}

#[test]
fn processes_are_found_by_control_group() {
    let Some(group) = Group::new("found") else {
        return;
    };
    let children = [(); 3].map(|()| Running::start(Command::new("sleep").arg("60")));
    let [one, other, _] = [0, 1, 2].map(|index| u64::from(children[index].0.id()));
    for pid in [one, other] {
        std::fs::write(group.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
    let glob = format!("/pageone-analyze-{}-f*", std::process::id());
    let report = analyze(&["--cgroup", &glob], &[]);
    drop(children);
    let rows = report["processes"].as_array().unwrap();
    let mut found: Vec<_> = rows.iter().map(|row| number(&row["pid"])).collect();
    found.sort_unstable();
    let mut expected = [one, other];
    expected.sort_unstable();
    assert_eq!(found, expected, "{report}");
}

/// In a namespace of processes all are a few. Those of PageONE are no guests to be.
#[test]
fn all_processes_are_found() {
    // Until then its name is the shell's.
    let script = "\"$0\" ksm watch >/dev/null & until grep -q pageone /proc/$!/comm; do :; done
        sleep 60 & until grep -q sleep /proc/$!/comm; do :; done
        exec \"$0\" analyze --all --look-again=300ms --json";
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
    ]);
    let mut made = Command::new("unshare");
    made.args(["--pid", "--fork", "--mount-proc", "true"]);
    if !made.output().is_ok_and(|made| made.status.success()) {
        return eprintln!("skipped: no namespace of processes can be made");
    }
    let program = pageone().get_program().to_owned();
    let said = output(unshare.arg(script).arg(program));
    assert!(said.status.success(), "{}", text(&said.stderr));
    let report: Value = serde_json::from_slice(&said.stdout).unwrap();
    let rows = report["processes"].as_array().unwrap();
    let comms: Vec<_> = rows
        .iter()
        .filter_map(|row| row["command"].as_str())
        .collect();
    assert_eq!(comms, ["sleep"], "{report}");
}

#[test]
fn what_cannot_be_done_is_refused_before_the_looks() {
    for (flag, said) in [
        (
            "--plot=/no/such/folder/x.svg",
            "cannot write /no/such/folder/x.svg",
        ),
        ("--threads=99999999", "1..=1024"),
        ("--policy=/no/such/file", "the policy /no/such/file"),
    ] {
        let begin = Instant::now();
        let pid = std::process::id().to_string();
        let refused = output(pageone().args(["analyze", flag, "--look-again=60s", &pid]));
        let error = text(&refused.stderr);
        assert!(
            !refused.status.success() && error.contains(said),
            "{flag}: {error}"
        );
        assert!(begin.elapsed().as_secs() < 30, "{flag}");
    }
}

/// What the processes have is in bytes, as the sums of the same names are.
#[test]
fn rows_have_the_units_of_their_sums() {
    let Some(program) = Program::start(CHANGES) else {
        return;
    };
    let report = analyze(&[], &[program.1]);
    let row = &report["processes"][0];
    for name in [
        "present",
        "changed",
        "shared_already",
        "shared_unknown",
        "left_alone",
    ] {
        assert_eq!(
            number(&row[name]),
            number(&report[name]),
            "{name}: {report}"
        );
    }
    assert!(number(&row["changed"]) >= 7 << 20, "{row}");
    for (node, sum) in report["nodes"].as_object().unwrap() {
        assert_eq!(row["nodes"][node], sum["read"], "{report}");
    }
}

/// Pairs and groups of so many would be without number. What they save is told all the same.
#[test]
fn contents_that_too_many_hold_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let look = |count: u64, flags: &[&str]| {
        let mut command = pageone();
        command.arg("analyze").args(flags).arg("--dump");
        for number in 1..=count {
            let path = folder.path().join(number.to_string());
            std::fs::write(&path, vec![7; 4096]).unwrap();
            command.arg(path);
        }
        let said = output(&mut command);
        assert!(said.status.success(), "{}", text(&said.stderr));
        text(&said.stdout)
    };
    for (count, in_many, groups) in [(64, 0, 1), (65, 64 * 4096, 0)] {
        let report: Value = serde_json::from_str(&look(count, &["--json"])).unwrap();
        assert_eq!(number(&report["in_many_processes"]), in_many, "{report}");
        assert_eq!(report["groups"].as_array().map(Vec::len), Some(groups));
        let told = "\nand 256 KiB in contents that more than 64 processes hold\n";
        let table = look(count, &[]);
        assert_eq!(table.contains(told), in_many > 0, "{table}");
    }
}

#[test]
fn dumps_stand_for_guests() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [0, 1].map(|guest| {
        let mut memory = vec![0; 4096 * 256];
        for (index, page) in (0..).zip(memory.chunks_mut(4096)) {
            content().fill(guest, index, page);
        }
        let path = folder.path().join(format!("guest{guest}"));
        std::fs::write(&path, memory).unwrap();
        path
    });
    let content = Content {
        pages: 256,
        ..content()
    };
    let mut command = pageone();
    command.args(["analyze", "--json", "--dump"]).args(&paths);
    let output = output(&mut command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        number(&report["savable"]["between"]),
        content.ideal_saved_bytes(2)
    );
    assert_eq!(report["processes"][1]["command"], "guest1");
}
