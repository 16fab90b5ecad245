//! `pageone serve` beside a daemon with two guests: metrics, the counters as JSON, the page; and bounds for strangers.

mod common;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use common::{
    Place, alone, count, daemon, equal_guests, need_agent, output, pageone, serve, text, wait_for,
    wait_for_sharing,
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
    let status: serde_json::Value =
        serde_json::from_str(body(&get(&address, "/api/status"))).expect("JSON");
    assert_eq!(
        count(&status["status"], "saved_bytes") as u64,
        PAGES as u64 * 4096
    );
    let history: serde_json::Value = wait_for("a sample", || {
        let said = get(&address, "/api/history?last=hour");
        let samples: serde_json::Value = serde_json::from_str(body(&said)).expect("JSON");
        samples.get(0).is_some().then_some(samples)
    });
    assert!(count(&history[0], "at") > 1_700_000_000, "{history}");
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

/// What Prometheus' own tool says of the metrics.
fn promtool(metrics: &str) {
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped());
    let Ok(mut tool) = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    else {
        return common::tools::lacks("promtool");
    };
    let mut input = tool.stdin.take().expect("stdin");
    input.write_all(metrics.as_bytes()).expect("written");
    drop(input);
    must_agree(&tool.wait_with_output().expect("ended"));
}

/// And what it says of the alerts that are packaged.
#[test]
fn the_alerts_are_rules() {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/alerts.yml");
    let mut command = Command::new("promtool");
    command.args(["check", "rules"]).arg(rules);
    match command.stdin(Stdio::null()).output() {
        Ok(said) => must_agree(&said),
        Err(_) => common::tools::lacks("promtool"),
    }
}

/// A machine that is to have all tools, and has lost one, is told of it.
#[test]
fn a_tool_that_is_missing_is_a_failure_where_that_is_asked_for() {
    for (strict, passes) in [("0", true), ("1", false)] {
        let mut again = Command::new(std::env::current_exe().expect("this test"));
        again.args(["the_alerts_are_rules", "--exact"]);
        again.env("PATH", "/nowhere");
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
    let answers = (0..20).map(|_| get(&address, "/page.css"));
    let good = answers.filter(|said| said.starts_with("HTTP/1.1 200 "));
    let good = good.count();
    end.store(true, Relaxed);
    flood.join().expect("it ends");
    assert!(good >= 15, "{good} of 20 requests were answered");
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
