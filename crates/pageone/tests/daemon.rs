//! The daemon: its socket, its configuration, its end, and callers that misbehave.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{Place, Running, daemon, json, output, pageone, status, text, wait_for};
use sys::signals::{SIGINT, SIGTERM};
use wire::MAX_MESSAGE;

const SIGKILL: i32 = 9;
const SIGCONT: i32 = 18;
const SIGSTOP: i32 = 19;

#[test]
fn an_ordinary_end_removes_the_socket() {
    for signal in [SIGTERM, SIGINT] {
        let place = Place::new();
        let mut daemon = daemon(&place, &[]);
        assert!(place.socket().exists());
        daemon.signal(signal);
        assert_eq!(daemon.end(), 0, "{}", daemon.stderr());
        assert!(!place.socket().exists(), "the socket is left behind");
    }
}

#[test]
fn an_ordinary_end_replaces_no_socket() {
    let place = Place::new();
    let mut command = pageone();
    command.args(["daemon", "--keep", "--socket"]);
    command.arg(place.socket()).stderr(Stdio::piped());
    let mut keeper = Running::start(&mut command);
    wait_for("the daemon", || {
        status(&place).status.success().then_some(())
    });
    keeper.signal(SIGTERM);
    assert_eq!(keeper.end(), 0);
    let said = keeper.stderr();
    assert!(
        said.contains("removing the socket") && !said.contains("replacing"),
        "{said}"
    );
}

/// Neither the daemon nor its keeper ends for a log that cannot be written.
#[test]
fn a_log_that_cannot_be_written_ends_no_daemon() {
    let full = || Stdio::from(std::fs::File::create("/dev/full").expect("a device"));
    let left = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    for keep in ["--no-keep", "--keep"] {
        for log in [full(), left()] {
            let place = Place::new();
            let mut command = pageone();
            command.args(["daemon", keep, "--socket"]);
            let mut daemon = Running::start(command.arg(place.socket()).stderr(log));
            let serves = || status(&place).status.success().then_some(());
            wait_for("the daemon", serves);
            if keep == "--keep" {
                let kept = common::child(daemon.0.id()).expect("the daemon");
                let kept_pid = rustix::process::Pid::from_raw(kept.cast_signed()).expect("a pid");
                rustix::process::kill_process(kept_pid, rustix::process::Signal::KILL)
                    .expect("killed");
                wait_for("its keeper to see it", || {
                    let next = common::child(daemon.0.id())?;
                    (next != kept).then_some(())
                });
                wait_for("the next daemon", serves);
            }
            daemon.signal(SIGTERM);
            assert_eq!(daemon.end(), 0, "{keep}");
        }
    }
}

#[test]
fn an_occupied_socket_is_refused_and_a_stale_one_replaced() {
    let place = Place::new();
    let mut first = daemon(&place, &[]);
    let mut command = pageone();
    command
        .args(["daemon", "--no-keep"])
        .arg("--socket")
        .arg(place.socket());
    let second = output(&mut command);
    assert_eq!(second.status.code(), Some(1));
    let said = text(&second.stderr);
    assert!(
        said.contains(&first.0.id().to_string()) && said.contains("in use"),
        "{said}"
    );

    first.signal(SIGKILL);
    first.end();
    assert!(place.socket().exists(), "a killed daemon cannot tidy up");
    let _third = daemon(&place, &[]);
    assert!(status(&place).status.success());
}

#[test]
fn a_refused_path_gets_no_file_and_its_reason_once() {
    let place = Place::new();
    let file = place.file("file", "precious");
    let long = place.path().join("x".repeat(200));
    for (path, reason) in [(&file, "is no socket"), (&long, "too long for a socket")] {
        for keep in ["--keep", "--no-keep"] {
            let mut command = pageone();
            command.args(["daemon", keep, "--socket"]).arg(path);
            let refused = output(&mut command);
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{said}");
            assert_eq!(said.matches(reason).count(), 1, "{said}");
            assert_eq!(said.matches("socket that").count(), 0, "{said}");
        }
    }
    let names = std::fs::read_dir(place.path()).expect("a folder");
    let names: Vec<_> = names.flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["file"], "a file is left behind");
}

/// Each says at once for what it waits, and at the end what to do.
#[test]
fn who_waits_for_a_daemon_that_hangs_is_told() {
    let place = Place::new();
    let daemon = daemon(&place, &[]);
    daemon.signal(SIGSTOP);
    let pid = daemon.0.id();
    let begun = Instant::now();
    let ask = |words: &[&str]| {
        let mut command = pageone();
        command.args(words).env("PAGEONE_SOCKET", place.socket());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::start(&mut command)
    };
    let asks: [&[&str]; 5] = [
        &["status"],
        &["status", "--since", "1h"],
        &["set", "threads=1"],
        &["merge", "1"],
        &["doctor"],
    ];
    let mut asking: Vec<_> = asks.iter().map(|words| (words, ask(words))).collect();
    let mut rests = Vec::new();
    for (words, running) in &mut asking {
        let mut stderr = BufReader::new(running.0.stderr.take().expect("a pipe"));
        let mut first = String::new();
        stderr.read_line(&mut first).expect("a line");
        let name = format!("the daemon at {}", place.socket().display());
        assert!(first.contains(&name), "{words:?}: {first}");
        let waits = "does not answer; waiting up to ";
        assert!(first.contains(waits), "{words:?}: {first}");
        rests.push(stderr);
    }
    let told = begun.elapsed();
    assert!(told < Duration::from_secs(20), "told after {told:?} only");
    for ((words, running), mut stderr) in asking.iter_mut().zip(rests) {
        let mut said = String::new();
        stderr.read_to_string(&mut said).expect("text");
        let mut stdout = running.0.stdout.take().expect("a pipe");
        stdout.read_to_string(&mut said).expect("text");
        assert_ne!(running.end(), 0, "{words:?}: {said}");
        // The doctor breaks its lines.
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        let remedy = format!("it is stopped; `kill -CONT {pid}` lets it go on");
        assert!(said.contains(&remedy), "{words:?}: {said}");
    }
}

#[test]
fn the_view_heeds_keys_while_the_daemon_hangs() {
    let place = Place::new();
    let daemon = daemon(&place, &[]);
    for (stopped_before, key) in [(true, "q"), (false, "\x03")] {
        daemon.signal(SIGCONT);
        if stopped_before {
            daemon.signal(SIGSTOP);
        }
        let Some(view) = Top::start(&place, (80, 24)) else {
            return;
        };
        if !stopped_before {
            wait_for("the view", || view.shows("PID").then_some(()));
            daemon.signal(SIGSTOP);
        }
        wait_for("a word on the daemon", || {
            view.shows("answer,").then_some(())
        });
        let pressed = Instant::now();
        view.end(key);
        let took = pressed.elapsed();
        assert!(took < Duration::from_secs(10), "{key:?} took {took:?}");
    }
}

#[test]
fn the_live_view_draws_a_part_of_a_terminal_that_says_it_is_immense() {
    let place = Place::new();
    let _daemon = daemon(&place, &[]);
    for size in [(65535, 24), (80, 65535), (65535, 65535)] {
        let Some(view) = Top::start(&place, size) else {
            return;
        };
        // The last line, as far below as it is.
        wait_for("the view", || view.shows("quit").then_some(()));
        assert_eq!(view.end("q"), 0, "{size:?}");
    }
}

/// `pageone top` on a terminal.
struct Top {
    running: Running,
    drawn: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Top {
    /// One that says it has so many columns and rows; none where there is no tool for that.
    fn start(place: &Place, (columns, rows): (u16, u16)) -> Option<Self> {
        let program = pageone().get_program().to_string_lossy().into_owned();
        let view = format!(
            "stty cols {columns} rows {rows}; exec {program} top --every 100ms --socket {}",
            place.socket().display()
        );
        // It gives the command a terminal, which has no size at first.
        let mut script = Command::new("script");
        script.args(["-qfec", &view, "/dev/null"]);
        script.stdin(Stdio::piped()).stdout(Stdio::piped());
        let Ok(child) = script.spawn() else {
            common::tools::lacks("script");
            return None;
        };
        let mut running = Running(child);
        let mut from = running.0.stdout.take().expect("a pipe");
        let drawn = Arc::new(Mutex::new(String::new()));
        let to = Arc::clone(&drawn);
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(got @ 1..) = from.read(&mut bytes) {
                to.lock()
                    .expect("it is whole")
                    .push_str(&text(&bytes[..got]));
            }
        });
        Some(Self {
            running,
            drawn,
            reader,
        })
    }

    fn shows(&self, what: &str) -> bool {
        self.drawn.lock().expect("it is whole").contains(what)
    }

    /// Presses a key that ends it, and gives its exit code.
    fn end(mut self, key: &str) -> i32 {
        let mut keys = self.running.0.stdin.take().expect("a pipe");
        keys.write_all(key.as_bytes()).expect("a key");
        keys.flush().expect("a key");
        let code = self.running.end();
        self.reader.join().expect("it ends");
        code
    }
}

#[test]
fn another_users_lock_of_the_folder_keeps_nobody_from_starting() {
    let place = Place::new();
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.path(), mode).expect("a mode");
    let mut flock = Command::new("flock");
    flock
        .arg(place.path())
        .args(["sh", "-c", "echo held; sleep 600"]);
    if rustix::process::geteuid().is_root() {
        flock.uid(61_001).gid(61_001);
    }
    // A group of its own, with the shell in it that has inherited the lock.
    let mut held = Running::start(flock.stdout(Stdio::piped()).process_group(0));
    let mut said = [0; 5];
    let mut from = held.0.stdout.take().expect("a pipe");
    std::io::Read::read_exact(&mut from, &mut said).expect("it is locked");
    let _daemon = daemon(&place, &[]);
    let group = i32::try_from(held.0.id()).ok();
    let group = group
        .and_then(rustix::process::Pid::from_raw)
        .expect("a group");
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).expect("killed");
    held.end();
}

#[test]
fn a_configuration_with_a_mistake_is_refused_with_key_and_line() {
    let place = Place::new();
    for (config, key, line) in [
        (
            "threads = 2\nmerge_perod = '20s'\n",
            "merge_perod",
            "line 2",
        ),
        ("\nmerge_period = 'often'\n", "merge_period", "line 2"),
        ("threads = -3\n", "threads", "line 1"),
    ] {
        let file = place.file("pageone.toml", config);
        let mut command = pageone();
        command
            .args(["daemon", "--no-keep"])
            .arg("--socket")
            .arg(place.socket());
        let output = output(command.arg("--config").arg(&file));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(key) && said.contains(line), "{said}");
        assert!(said.contains("pageone.toml") && !place.socket().exists());
    }
}

#[test]
fn the_configuration_counts_and_flags_win() {
    let place = Place::new();
    let config = "threads = 3\nmerge_period = '7s'\nrun = 0\nlog = 'warn'\n";
    let file = place.file("pageone.toml", config);
    let file = file.to_str().expect("text");
    let _daemon = daemon(&place, &["--config", file, "--threads", "1"]);
    let now = json(&place);
    assert_eq!(
        (&now["threads"], &now["merge_period_ms"]),
        (&1.into(), &7000.into())
    );
    assert_eq!(now["run"], 0);
}

#[test]
fn a_knob_that_is_named_twice_is_wrong_usage() {
    let place = Place::new();
    let mut set = pageone();
    set.args(["set", "threads=1", "threads=2", "--socket"]);
    let wrong = output(set.arg(place.socket()));
    let said = text(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(2), "{said}");
    assert!(said.starts_with("error: threads is named twice"), "{said}");
}

#[test]
fn knobs_turn_all_or_none() {
    let place = Place::new();
    let _daemon = daemon(&place, &["--threads", "1"]);
    let set = |words: &[&str]| {
        let mut command = pageone();
        output(
            command
                .arg("set")
                .arg("--socket")
                .arg(place.socket())
                .args(words),
        )
    };
    let done = set(&[
        "merge_period=1500ms",
        "threads=2",
        "use_zero_pages=false",
        "run=0",
    ]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let turned = text(&done.stdout);
    for line in ["merge_period: 20s → 1s 500ms\n", "threads: 1 → 2\n"] {
        assert!(turned.contains(line), "{turned}");
    }
    let now = json(&place);
    assert_eq!(
        (&now["threads"], &now["merge_period_ms"]),
        (&2.into(), &1500.into())
    );
    assert_eq!(
        (&now["use_zero_pages"], &now["run"]),
        (&false.into(), &0.into())
    );

    let refused = set(&["threads=1", "speed=9"]);
    let said = text(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("speed"),
        "{said}"
    );
    for key in ["run", "merge_period", "threads", "use_zero_pages"] {
        assert!(said.contains(key), "{key} is not listed: {said}");
    }
    assert_eq!(json(&place)["threads"], 2, "a part was set");
}

#[test]
fn a_daemon_that_is_not_there_is_named() {
    let place = Place::new();
    let absent = status(&place);
    assert_eq!(absent.status.code(), Some(1));
    let mut heap = pageone();
    let heap = output(heap.args(["numa", "heap", "--socket"]).arg(place.socket()));
    assert_eq!(heap.status.code(), Some(1));
    for output in [absent, heap] {
        let said = text(&output.stderr);
        let socket = place.socket();
        let named = format!("no daemon at {}", socket.display());
        assert!(said.contains(&named), "{said}");
    }
}

#[test]
fn a_saved_heap_reads_back() {
    let place = Place::new();
    let _daemon = daemon(&place, &[]);
    let heap = |words: &[&str]| {
        let mut command = pageone();
        output(command.args(["numa", "heap"]).args(words))
    };
    let socket = place.socket();
    let socket = socket.to_str().expect("text");
    let live = heap(&["--json", "--socket", socket]);
    assert!(live.status.success(), "{}", text(&live.stderr));
    let file = place.file("heap.json", &text(&live.stdout));
    let file = file.to_str().expect("text");
    assert_eq!(heap(&["--json", "--from", file]).stdout, live.stdout);
    let mut view: serde_json::Value = serde_json::from_slice(&live.stdout).expect("JSON");
    common::assert_head(&view);
    // Older versions wrote no head: their views are read, and no other one is made up.
    let fields = view.as_object_mut().expect("an object");
    fields.retain(|name, _| !["schema", "host", "time"].contains(&name.as_str()));
    let old = place.file("old.json", &view.to_string());
    let read = heap(&["--json", "--from", old.to_str().expect("text")]);
    let read: serde_json::Value = serde_json::from_slice(&read.stdout).expect("JSON");
    assert_eq!(read, view);
    let both = heap(&["--from", file, "--socket", socket]);
    assert_eq!(both.status.code(), Some(2), "two sources are wrong usage");
}

#[test]
fn garbage_silence_and_size_do_no_harm() {
    let place = Place::new();
    let mut daemon = daemon(&place, &[]);
    let connect = || sys::socket::connect(place.socket()).expect("a connection");
    let silent: Vec<_> = (0..40).map(|_| connect()).collect();
    for len in [1, 2, 67, 68, 69, 1000, MAX_MESSAGE] {
        for fill in [0, 1, 0xff] {
            let socket = connect();
            // The daemon may hang up at once; that is an answer, too.
            let _ = sys::socket::send(&socket, &vec![fill; len], &[]);
        }
    }
    let oversized = connect();
    let _ = sys::socket::send(&oversized, &vec![1; 4 * MAX_MESSAGE], &[]);
    assert!(status(&place).status.success());
    drop(silent);
    assert!(
        daemon.0.try_wait().expect("wait").is_none(),
        "the daemon died"
    );
}

#[test]
fn a_request_that_is_no_request_is_refused_with_a_reason() {
    let place = Place::new();
    let _daemon = daemon(&place, &[]);
    let socket = sys::socket::connect(place.socket()).expect("a connection");
    let hello = wire::Hello {
        role: wire::Role::Control,
        domain: wire::Name::default(),
    };
    let mut packet = [0; MAX_MESSAGE];
    let len = hello.encode(&mut packet);
    sys::socket::send(&socket, &packet[..len], &[]).expect("hello");
    sys::socket::send(&socket, b"{\"sett\": 1}", &[]).expect("request");
    let got = sys::socket::recv(&socket, &mut packet).expect("reply").len;
    let mut reader = wire::ReplyReader::default();
    let reply = reader
        .push(&packet[..got])
        .expect("a part")
        .expect("the whole");
    let reply: wire::Reply = serde_json::from_slice(&reply).expect("JSON");
    assert!(matches!(reply, wire::Reply::Refused(why) if why.contains("sett")));
}

#[test]
fn a_reader_that_has_enough_is_no_error() {
    let place = Place::new();
    let _daemon = daemon(&place, &[]);
    let mut command = pageone();
    command
        .args(["status", "--watch", "20ms", "--socket"])
        .arg(place.socket());
    let mut watching = Running::start(command.stdout(Stdio::piped()));
    drop(watching.0.stdout.take());
    assert_eq!(watching.end(), 0);
}

#[test]
fn knobs_are_listed_by_the_daemon_that_the_environment_names() {
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge_period", "3s", "--store-limit", "2g"]);
    let mut set = pageone();
    let listed = output(set.arg("set").env("PAGEONE_SOCKET", place.socket()));
    let listed = text(&listed.stdout);
    let row = |key: &str| {
        let row = listed.lines().find(|line| line.starts_with(key));
        row.unwrap_or_default()
            .split_whitespace()
            .collect::<Vec<_>>()
    };
    assert_eq!(
        row("merge_period"),
        ["merge_period", "3s", "20s", "TIME"],
        "{listed}"
    );
    assert_eq!(
        row("store_limit"),
        ["store_limit", "2GiB", "none", "SIZE|none"]
    );
    let mut wrong = pageone();
    let wrong = output(wrong.args(["set", "merge-priod=1s"]));
    assert_eq!(wrong.status.code(), Some(2));
    let said = text(&wrong.stderr);
    assert!(said.contains("did you mean `merge_period`?"), "{said}");
}
