//! `pageone serve` beside a daemon with two guests: metrics, the counters as JSON, the page; and bounds for strangers.

mod common;

use std::collections::{BTreeSet, VecDeque};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use common::{
    Place, alone, assert_head, count, daemon, equal_guests, need_agent, output, pageone, serve,
    text, wait_for, wait_for_sharing,
};

const PAGES: usize = 512;

/// Sends bytes, and gives all that comes back.
fn send(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .expect("set");
    // Who is refused early may not take it all.
    let _ = stream.write_all(bytes);
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    text(&said)
}

fn get(address: &str, path: &str) -> String {
    send(
        address,
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes(),
    )
}

/// The body of an answer that must be good.
fn body(answer: &str) -> &str {
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    answer.split_once("\r\n\r\n").expect("a head").1
}

fn metric(text: &str, name: &str) -> f64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = line.unwrap_or_else(|| panic!("{name} in {text}"));
    value.parse().expect("a number")
}

#[test]
fn it_shows_what_the_daemon_counts() {
    let _alone = alone();
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms"]);
    let _guests = equal_guests(&place, PAGES as u64);
    let status = wait_for_sharing(&place, PAGES, 0);
    let (_serve, address) = serve(&place);
    let metrics = get(&address, "/metrics");
    assert!(metrics.contains("text/plain; version=0.0.4"), "{metrics}");
    let metrics = body(&metrics);
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let saved = count(&status, "saved_bytes") as f64;
    assert_eq!(metric(metrics, "pageone_up"), 1.0);
    assert_eq!(metric(metrics, "pageone_saved_bytes"), saved);
    assert_eq!(metric(metrics, "pageone_guests"), 2.0);
    assert_eq!(metrics.matches("pageone_guest_saved_bytes{pid=").count(), 2);
    assert!(metric(metrics, "pageone_cpu_seconds_total") > 0.0);
    promtool(metrics);
    named_ones_exist(metrics);
    let status: serde_json::Value =
        serde_json::from_str(body(&get(&address, "/api/status"))).expect("JSON");
    let ksm = &status["ksm"]["run"];
    assert!(ksm.is_u64() || ksm.is_null(), "{ksm}");
    assert_eq!(
        count(&status["status"], "saved_bytes") as u64,
        PAGES as u64 * 4096
    );
    let first = &status["status"]["guests"][0];
    assert!(
        first["joined_as"]
            .as_str()
            .is_some_and(|name| !name.is_empty())
    );
    assert_eq!(first["joined_as"], first["comm"], "{first}");
    let history: serde_json::Value = wait_for("a sample", || {
        let said = get(&address, "/api/history?last=hour");
        let history: serde_json::Value = serde_json::from_str(body(&said)).expect("JSON");
        history["samples"][0].is_object().then_some(history)
    });
    assert_head(&history);
    let first = &history["samples"][0];
    assert!(count(first, "at") > 1_700_000_000, "{history}");
    let shown = output(
        pageone()
            .args(["status", "--since", "1h", "--socket"])
            .arg(place.socket()),
    );
    let shown = text(&shown.stdout);
    assert!(
        shown.contains("SAVED") && shown.lines().count() >= 2,
        "{shown}"
    );
    // Two samples, of which one is taken every 10 s.
    let plot = wait_for("a plot", || {
        let mut command = pageone();
        command.args(["status", "--since", "1h", "--plot", "--socket"]);
        let said = output(command.arg(place.socket()));
        assert!(said.status.success(), "{}", text(&said.stderr));
        let plot = text(&said.stdout);
        (!plot.contains("too short")).then_some(plot)
    });
    assert!(plot.starts_with("saved\n"), "{plot}");
    assert!(plot.contains(" ago") && plot.contains("2.0 MiB"), "{plot}");
    // Characters of two by four dots draw the line.
    let is_dot = |c: char| ('\u{2801}'..='\u{28ff}').contains(&c);
    assert!(plot.contains(is_dot), "{plot}");
    assert_eq!(plot.lines().count(), 19, "{plot}");
    let fits = |line: &str| line.chars().count() <= 80;
    assert!(plot.lines().all(fits), "{plot}");
    let top = output(pageone().args(["top", "--socket"]).arg(place.socket()));
    assert!(
        !top.status.success() && text(&top.stderr).contains("needs a terminal"),
        "{top:?}"
    );
    for (path, word) in [
        ("/", "<title>PageONE"),
        ("/page.css", "prefers-color-scheme"),
        ("/page.js", "fetch("),
    ] {
        assert!(body(&get(&address, path)).contains(word), "{path}");
    }
    let page = get(&address, "/");
    assert!(page.contains("default-src 'none'"), "{page}");
    assert!(
        !["http://", "https://"]
            .iter()
            .any(|word| body(&page).contains(word))
    );
}

/// All metrics that the packaged board and alerts name are among these. One may have no row, as canonical pages by node on a host of one.
fn named_ones_exist(metrics: &str) {
    for file in ["alerts.yml", "grafana.json"] {
        let text = std::fs::read_to_string(packaged(file)).expect("a file");
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let names: BTreeSet<_> = words.filter(|word| word.starts_with("pageone_")).collect();
        assert!(names.len() > 4, "{file}: {names:?}");
        let has = |name: &str| metrics.contains(&format!("\n# TYPE {name} "));
        let missing: Vec<_> = names.into_iter().filter(|name| !has(name)).collect();
        assert!(missing.is_empty(), "{file}: {missing:?} in {metrics}");
    }
}

fn packaged(file: &str) -> PathBuf {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    packaging.join(file)
}

/// Prometheus' own tool. None where there is no such.
fn tool() -> Option<Command> {
    let program = common::fetched("promtool", "bin/promtool", "make promtool")?;
    Some(Command::new(program))
}

/// What it says of the metrics.
fn promtool(metrics: &str) {
    let Some(mut command) = tool() else {
        return;
    };
    command.args(["check", "metrics"]).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tool = command.spawn().expect("it runs");
    let mut input = tool.stdin.take().expect("stdin");
    input.write_all(metrics.as_bytes()).expect("written");
    drop(input);
    must_agree(&tool.wait_with_output().expect("ended"));
}

/// And what it says of the alerts that are packaged, and of what the board asks for.
#[test]
fn the_alerts_are_rules() {
    let Some(tool) = tool() else {
        return;
    };
    let place = Place::new();
    let board = std::fs::read(packaged("grafana.json")).expect("a file");
    let board: serde_json::Value = serde_json::from_slice(&board).expect("JSON");
    let panels = board["panels"].as_array().expect("panels").iter();
    let asked = panels.filter_map(|panel| panel["targets"].as_array());
    let asked = asked.flatten().filter_map(|target| target["expr"].as_str());
    // JSON is YAML; Grafana knows the length of a step.
    let rules: Vec<_> = asked
        .enumerate()
        .map(|(n, expr)| {
            let expr = expr.replace("$__rate_interval", "5m");
            serde_json::json!({"record": format!("asked:{n}"), "expr": expr})
        })
        .collect();
    assert!(rules.len() > 4, "{rules:?}");
    let rules = serde_json::json!({"groups": [{"name": "board", "rules": rules}]});
    let board = place.file("board.yml", &rules.to_string());
    for file in [packaged("alerts.yml"), board] {
        let mut command = Command::new(tool.get_program());
        command.args(["check", "rules"]).arg(file);
        must_agree(&output(command.stdin(Stdio::null())));
    }
}

#[test]
#[ignore = "it is part of the next"]
fn without_a_tool() {
    common::tools::lacks("such tool");
}

/// A machine that is to have all tools, and has lost one, is told of it.
#[test]
fn a_tool_that_is_missing_is_a_failure_where_that_is_asked_for() {
    for (strict, passes) in [("0", true), ("1", false)] {
        let mut again = Command::new(std::env::current_exe().expect("this test"));
        again.args(["without_a_tool", "--exact", "--ignored"]);
        let said = output(again.env("PAGEONE_TEST_STRICT", strict));
        assert_eq!(said.status.success(), passes, "{}", text(&said.stdout));
    }
}

fn must_agree(said: &Output) {
    assert!(
        said.status.success(),
        "{}{}",
        text(&said.stdout),
        text(&said.stderr)
    );
}

#[test]
fn strangers_get_an_answer_or_none_and_stop_nobody() {
    let place = Place::new();
    let (_serve, address) = serve(&place);
    // Without a daemon it serves all the same, and says so.
    assert_eq!(metric(body(&get(&address, "/metrics")), "pageone_up"), 0.0);
    let status = get(&address, "/api/status");
    assert!(
        status.starts_with("HTTP/1.1 503 ") && status.contains("no daemon at"),
        "{status}"
    );
    for path in [
        "/../../etc/passwd",
        "/%2e%2e/etc/passwd",
        "/etc/passwd",
        "/api/history?last=9999999999",
        "//",
        "/page.js/",
    ] {
        let said = get(&address, path);
        assert!(said.starts_with("HTTP/1.1 404 "), "{path}: {said}");
    }
    let rebound = b"GET /api/status HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    assert!(send(&address, rebound).starts_with("HTTP/1.1 403 "));
    let long = [b"GET / HTTP/1.1\r\nA: ".as_slice(), &[b'x'; 20_000]].concat();
    let said = send(&address, &long);
    assert!(
        said.is_empty() || said.starts_with("HTTP/1.1 431 "),
        "{said}"
    );
    // All places taken by those who say nothing: a moment later there is room again.
    let silent: Vec<_> = (0..64)
        .map(|_| TcpStream::connect(&address).expect("connected"))
        .collect();
    wait_for("an answer beside silent callers", || {
        let said = get(&address, "/page.css");
        said.starts_with("HTTP/1.1 200 ").then_some(())
    });
    drop(silent);
    // The same by those who ask and stop, before they have taken anything.
    let asks = format!("GET /page.js HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let stopped: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = TcpStream::connect(&address).expect("connected");
            let _ = stream.write_all(asks.as_bytes());
            stream
        })
        .collect();
    wait_for("an answer beside stopped callers", || {
        let said = get(&address, "/page.css");
        said.starts_with("HTTP/1.1 200 ").then_some(())
    });
    drop(stopped);
    // The same by one who takes each place again as soon as he has lost it.
    let end = Arc::new(AtomicBool::new(false));
    let flood = std::thread::spawn({
        let (address, end) = (address.clone(), Arc::clone(&end));
        move || {
            let mut held = VecDeque::new();
            while !end.load(Relaxed) {
                held.extend(TcpStream::connect(&address));
                if held.len() > 64 {
                    held.pop_front();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    });
    std::thread::sleep(Duration::from_millis(300));
    let good = || {
        let answers = (0..20).map(|_| get(&address, "/page.css"));
        let good = answers.filter(|said| said.starts_with("HTTP/1.1 200 "));
        good.count()
    };
    let answered = common::once_in(4, good, |good| *good >= 15);
    end.store(true, Relaxed);
    flood.join().expect("it ends");
    answered.unwrap_or_else(|seen| panic!("{seen:?} of 20 requests were answered"));
}

#[test]
fn it_listens_where_others_are_only_when_told() {
    let place = Place::new();
    let mut command = pageone();
    command.args(["serve", "--listen", "0.0.0.0:0", "--socket"]);
    let said = output(command.arg(place.socket()));
    assert_eq!(said.status.code(), Some(1));
    assert!(
        text(&said.stderr).contains("--public"),
        "{}",
        text(&said.stderr)
    );
}
