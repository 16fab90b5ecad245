//! An offer under a daemon: merged when asked for, withdrawn when dropped. The program that offers is this one, started again
//! with the agent.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use pageone_guest::{Error, Offer, PAGE_BYTES, is_served};

const HALF: usize = 1024;
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the command and the agent were built.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join(name);
    let missing = path.display();
    assert!(
        path.exists(),
        "run `cargo build --workspace` first: {missing} is missing"
    );
    path
}

/// A child, ended on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for(what: &str, mut ask: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !ask() {
        assert!(Instant::now() < end, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn sharing(socket: &Path) -> Option<u64> {
    let mut status = Command::new(built("pageone"));
    let status = status
        .args(["status", "--json", "--socket"])
        .arg(socket)
        .output()
        .unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).ok()?;
    status["pages_sharing"].as_u64()
}

/// A daemon that begins a round as often as `period` says.
fn daemon(socket: &Path, period: &str) -> Running {
    let mut daemon = Command::new(built("pageone"));
    daemon
        .args([
            "daemon",
            "--no-keep",
            "--threads",
            "2",
            "--merge-period",
            period,
            "--socket",
        ])
        .arg(socket)
        // Root's daemon would read /etc/pageone.
        .env("CONFIGURATION_DIRECTORY", "/dev/null");
    let daemon = Running(daemon.stderr(Stdio::null()).spawn().unwrap());
    wait_for("the daemon", || sharing(socket).is_some());
    daemon
}

/// This program again, to do what the test of this name does as a child, with the agent.
fn child(socket: &Path, program: &mut Command) -> (Running, BufReader<ChildStdout>) {
    program
        .env("LD_PRELOAD", built("libpageone_agent.so"))
        .env("PAGEONE_SOCKET", socket);
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    (Running(child), said)
}

/// The number behind the first line that begins so.
fn told(said: &mut BufReader<ChildStdout>, name: &str) -> u64 {
    let mut lines = said.lines().map(Result::unwrap);
    let line = lines.find(|line| line.contains(name));
    let line = line.unwrap_or_else(|| panic!("the child ended before it said {name}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Two equal halves.
fn fill(memory: &mut [u8]) {
    for (number, page) in memory.chunks_exact_mut(PAGE_BYTES).enumerate() {
        let word = (number % HALF + 1) as u64;
        page.copy_from_slice(
            &word
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .to_le_bytes()
                .repeat(512),
        );
    }
}

fn is_filled(memory: &[u8], first: usize) -> bool {
    let mut expected = memory.to_vec();
    fill(&mut expected);
    expected[first * PAGE_BYTES..] == memory[first * PAGE_BYTES..]
}

/// Whether no file is mapped where `memory` is.
fn maps_no_store(memory: &[u8]) -> bool {
    let range = memory.as_ptr_range();
    let (from, to) = (range.start.addr(), range.end.addr());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut stores = maps.lines().filter(|line| line.contains("/memfd:pageone"));
    stores.all(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split_once(' ').unwrap().0;
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        number(end) <= from || to <= number(start)
    })
}

fn offering() {
    let mut space = vec![0; (2 * HALF + 1) * PAGE_BYTES];
    let skip = space.as_ptr().align_offset(PAGE_BYTES);
    let memory = &mut space[skip..skip + 2 * HALF * PAGE_BYTES];
    fill(memory);
    let mut offer = Offer::new(memory).unwrap();
    wait_for("an engine", is_served);
    println!("\nmerged {}", offer.merge().unwrap());
    assert!(is_filled(&offer, 0) && !maps_no_store(&offer));
    // The test looks at the counters before they change.
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let outside = offer.recycle(0..PAGE_BYTES + 1).unwrap_err();
    assert!(matches!(outside, Error::Range { .. }), "{outside}");
    offer.recycle(0..4 * PAGE_BYTES).unwrap();
    assert!(offer[..4 * PAGE_BYTES].iter().all(|&byte| byte == 0) && is_filled(&offer, 4));
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let memory = offer.into_inner();
    let private = is_filled(memory, 4) && maps_no_store(memory);
    println!("\nwithdrawn {}", u8::from(private));
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn an_offer_is_merged_when_asked_for_and_private_when_dropped() {
    if std::env::var_os("OFFERING").is_some() {
        return offering();
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    // Nothing is merged but when asked for.
    let seldom = daemon(&socket, "1h");
    let again = || {
        let mut again = Command::new(std::env::current_exe().unwrap());
        let name = "an_offer_is_merged_when_asked_for_and_private_when_dropped";
        again
            .args(["--exact", name, "--nocapture"])
            .env("OFFERING", "1");
        again
    };
    let (mut running, mut said) = child(&socket, &mut again());
    assert_eq!(told(&mut said, "merged "), 2 * HALF as u64);
    assert_eq!(sharing(&socket), Some(HALF as u64));
    let mut orders = running.0.stdin.take().unwrap();
    // To recycle, then to withdraw.
    writeln!(orders, "\n").unwrap();
    assert_eq!(told(&mut said, "withdrawn "), 1);
    drop((orders, running, seldom));
}

#[test]
fn the_example_runs() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let _daemon = daemon(&socket, "1h");
    let example = built("examples/offer_vm");
    let (mut running, mut said) = child(&socket, &mut Command::new(example));
    let mut lines = (&mut said).lines().map(Result::unwrap);
    let first = lines.next().unwrap();
    if first.starts_with("skipped") {
        return eprintln!("{first}");
    }
    // Of the first half the page of the program differs.
    assert_eq!(first, "merged 4094");
    assert_eq!(lines.next().as_deref(), Some("done"));
    assert!(running.0.wait().unwrap().success());
}
