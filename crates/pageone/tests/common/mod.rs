//! The common parts of the command's tests: a daemon at a socket of its own, and the outcome of a run.
#![allow(dead_code, reason = "each test binary uses a part of it")]

#[path = "../../../../tests/support/tools.rs"]
pub(crate) mod tools;

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pageone::bench::{Content, Guest};

/// A C compiler, with its first arguments: `cc`, or as `PAGEONE_CC` says, for another libc (`make test-musl`).
pub(crate) fn compiler() -> Command {
    let words = std::env::var("PAGEONE_CC").unwrap_or_else(|_| "cc".to_owned());
    let mut words = words.split_ascii_whitespace();
    let mut compiler = Command::new(words.next().expect("a compiler"));
    compiler.args(words);
    compiler
}

/// The longest wait for anything here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// The folder of a daemon's files that no machine has: root's daemon would read /etc/pageone.
pub(crate) const NO_FOLDER: &str = "/dev/null";

/// The command under test, without what the caller's environment would tell it. PAGEONE_BIN names
/// it where it is not where it was built, as in a test guest.
pub(crate) fn pageone() -> Command {
    let built = env!("CARGO_BIN_EXE_pageone").to_owned();
    let mut command = Command::new(std::env::var("PAGEONE_BIN").unwrap_or(built));
    for name in [
        "PAGEONE_AGENT",
        "PAGEONE_SOCKET",
        "PAGEONE_DOMAIN",
        "PAGEONE_LOG",
        "LD_PRELOAD",
    ] {
        command.env_remove(name);
    }
    command.env("CONFIGURATION_DIRECTORY", NO_FOLDER);
    command.stdin(Stdio::null());
    command
}

/// Fails with what to do when the agent's library is not there: cargo does not build it for this
/// package's tests alone.
pub(crate) fn need_agent() {
    let exe = Path::new(env!("CARGO_BIN_EXE_pageone"));
    let agent = exe.with_file_name("libpageone_agent.so");
    assert!(
        agent.exists(),
        "run `cargo build --workspace` first: {} is missing",
        agent.display()
    );
}

/// A folder with room for a socket, and the socket's path.
pub(crate) struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("pageone.sock")
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Installs a copy of a program that all may execute. Another process does it: a child that another thread starts while this process
/// writes the copy would hold it open, and "Text file busy" would be the answer to who executes it.
pub(crate) fn install(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let mut install = Command::new("install");
    let done = output(install.arg("-m755").arg(from.as_ref()).arg(to.as_ref()));
    assert!(done.status.success(), "{}", text(&done.stderr));
}

/// A running child, ended on drop.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().expect("the command starts"))
    }

    pub(crate) fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.0.id()).expect("a pid");
        let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
        let signal = rustix::process::Signal::from_named_raw(signal).expect("a signal");
        rustix::process::kill_process(pid, signal).expect("the signal is sent");
    }

    /// Waits for the end; gives the exit code, or 128 and the signal.
    pub(crate) fn end(&mut self) -> i32 {
        let status = wait_for("the end of a process", || self.0.try_wait().expect("wait"));
        status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
    }

    pub(crate) fn stderr(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            stderr.read_to_string(&mut text).expect("stderr");
        }
        text
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that calls itself a machine of this name, as QEMU does; its files are in `folder`.
pub(crate) fn machine(folder: &Path, name: &str) -> Running {
    let program = folder.join("qemu-system-x86");
    if !program.exists() {
        install("/bin/sh", &program);
    }
    let mut command = Command::new(&program);
    let name = format!("guest={name},debug-threads=on");
    command.args(["-c", "read x", "sh", "-name", &name]);
    let running = Running::start(command.stdin(Stdio::piped()));
    // The command line is there a moment after the process has begun.
    let line = format!("/proc/{}/cmdline", running.0.id());
    wait_for("its command line", || {
        let line = std::fs::read(&line).ok()?;
        text(&line).contains(&name).then_some(())
    });
    running
}

/// A daemon that serves at `place`'s socket.
pub(crate) fn daemon(place: &Place, args: &[&str]) -> Running {
    let mut command = pageone();
    command
        .args(["daemon", "--no-keep"])
        .arg("--socket")
        .arg(place.socket())
        .args(args);
    let running = Running::start(command.stderr(Stdio::piped()));
    wait_for("the daemon", || {
        status(place).status.success().then_some(())
    });
    running
}

pub(crate) fn status(place: &Place) -> Output {
    output(
        pageone()
            .args(["status", "--json", "--socket"])
            .arg(place.socket()),
    )
}

thread_local! {
    /// The last status that this thread asked for: a wait in vain shows it.
    static LAST: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn json(place: &Place) -> serde_json::Value {
    let output = status(place);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let status = serde_json::from_slice(&output.stdout).expect("JSON");
    LAST.set(output.stdout);
    status
}

/// A counter of a status, or of a guest in it.
pub(crate) fn count(status: &serde_json::Value, name: &str) -> u64 {
    status[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} in {status}"))
}

/// Whether `pages` canonical pages have two sharers each. Both counters are asked: a page may count
/// as merged a moment before its slot counts as shared.
pub(crate) fn paired(status: &serde_json::Value, pages: usize) -> bool {
    ["pages_shared", "pages_sharing"].map(|name| count(status, name)) == [pages as u64; 2]
}

/// Waits until two guests share `pages` pages, after `again` pages were merged again.
pub(crate) fn wait_for_sharing(place: &Place, pages: usize, again: u64) -> serde_json::Value {
    let wanted = [pages as u64, pages as u64];
    wait_for("all pages to be shared", || {
        let status = json(place);
        let shared = ["pages_shared", "pages_sharing"].map(|name| count(&status, name));
        let done = shared == wanted && count(&status, "pages_merged_again") >= again;
        done.then_some(status)
    })
}

/// How many guests a status tells of.
pub(crate) fn guests_of(status: &serde_json::Value) -> usize {
    status["guests"].as_array().map_or(0, Vec::len)
}

/// The only child of a process, if it has one.
pub(crate) fn child(pid: u32) -> Option<u32> {
    let children = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(children).ok()?;
    children.trim().parse().ok()
}

/// What the process `pid` holds of PageONE's memory files whose names begin so.
pub(crate) fn held(pid: u32, name: &str) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process");
    let links = folder.flatten().map(|entry| entry.path());
    let wanted = format!("/memfd:pageone-{name}");
    let is_wanted = |link: &PathBuf| {
        let target = std::fs::read_link(link).unwrap_or_default();
        target.to_string_lossy().starts_with(&wanted)
    };
    links.filter(is_wanted).collect()
}

/// Both sides of I9: the pages of all classes, and the pages present in all guests.
pub(crate) fn classed_and_present(status: &serde_json::Value) -> (u64, u64) {
    let classes = [
        "pages_shared",
        "pages_sharing",
        "pages_unshared",
        "pages_volatile",
        "zero_pages",
        "pages_skipped",
    ];
    let classed = classes.iter().map(|name| count(status, name)).sum();
    let guests = status["guests"].as_array().expect("guests");
    let present = guests.iter().map(|guest| count(guest, "pages")).sum();
    (classed, present)
}

/// Has the kernel move the pages of all processes about; false where it cannot, or this user must not.
pub(crate) fn compact_memory() -> bool {
    std::fs::write("/proc/sys/vm/compact_memory", "1").is_ok()
}

/// One test at a time: the engine works at idle priority, and the writers of one test would leave
/// nothing to the engine of another.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn output(command: &mut Command) -> Output {
    command.output().expect("the command runs")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asks again and again until there is an answer.
pub(crate) fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let asked = Instant::now();
        if let Some(answer) = ask() {
            return answer;
        }
        if Instant::now() >= deadline {
            let last = text(&LAST.take());
            panic!("waited {PATIENCE:?} for {what}; the last status: {last}");
        }
        // Workers run on idle processors: to ask takes half of the only one at most.
        std::thread::sleep(asked.elapsed().max(Duration::from_millis(10)));
    }
}

/// Where `tests/programs/prepare` unpacks programs.
pub(crate) fn programs() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("programs/usr")
}

/// A program that is installed, by its name; or one that `way` has fetched to this place in [`programs`], by its path. None where
/// there is neither.
pub(crate) fn fetched(name: &str, place: &str, way: &str) -> Option<PathBuf> {
    if Command::new(name).arg("--version").output().is_ok() {
        return Some(name.into());
    }
    let program = programs().join(place);
    if !program.exists() {
        tools::lacks(&format!("{name} (`{way}` fetches it)"));
        return None;
    }
    Some(program)
}

/// Measures up to so many times, until one is as it must be: other work on the machine spoils some.
///
/// # Errors
/// All that was measured, when none is.
pub(crate) fn once_in<T>(
    tries: usize,
    mut measure: impl FnMut() -> T,
    is_good: impl Fn(&T) -> bool,
) -> Result<(), Vec<T>> {
    let mut seen = Vec::new();
    for _ in 0..tries {
        let next = measure();
        if is_good(&next) {
            return Ok(());
        }
        seen.push(next);
    }
    Err(seen)
}

/// A guest of the daemon at `place` that has filled its memory with `content` as the bench's guest of
/// that number does.
pub(crate) fn bench_guest(place: &Place, number: u64, content: &Content) -> Guest {
    let mut command = pageone();
    command.arg("run").arg("--socket").arg(place.socket());
    command.args(["--", env!("CARGO_BIN_EXE_pageone")]);
    filled(command, number, content)
}

/// Two guests of the daemon at `place` that have offered `pages` pages, the same in both.
pub(crate) fn equal_guests(place: &Place, pages: u64) -> [Guest; 2] {
    let content = Content::equal(1, pages);
    [0, 1].map(|number| {
        let mut guest = bench_guest(place, number, &content);
        guest.tell("offer").expect("offer");
        guest.answer(Duration::from_secs(60)).expect("offered");
        guest
    })
}

/// How many times as many tasks want the processors as there are: what idle time does takes so many times as long.
pub(crate) fn busy() -> u32 {
    let load = std::fs::read_to_string("/proc/loadavg").expect("a load");
    let (load, _) = load.split_once(' ').expect("several numbers");
    let load: f64 = load.parse().expect("a number");
    let cpus = std::thread::available_parallelism()
        .expect("processors")
        .get();
    // The mean of a minute lags, and one processor may be idle while the other is wanted twice.
    let times = (1..1000).find(|&times| f64::from(times) * cpus as f64 > load);
    times.unwrap_or(1000)
}

/// An answer begins with the fields that tell its form, the machine and the moment.
#[track_caller]
pub(crate) fn assert_head(answer: &serde_json::Value) {
    let has_head = answer["schema"] == 1 && answer["host"].is_string() && answer["time"].is_u64();
    assert!(has_head, "{answer}");
}

/// A server of metrics for the daemon at `place`, and its address.
pub(crate) fn serve(place: &Place) -> (Running, String) {
    let mut command = pageone();
    command.args(["serve", "--listen", "127.0.0.1:0", "--socket"]);
    let mut running = Running::start(command.arg(place.socket()).stderr(Stdio::piped()));
    let mut said = String::new();
    let stderr = running.0.stderr.take().expect("stderr");
    BufReader::new(stderr).read_line(&mut said).expect("a line");
    let address = said.trim().strip_prefix("pageone: serving at http://");
    let address = address.and_then(|address| address.strip_suffix('/'));
    let address = address.unwrap_or_else(|| panic!("{said}"));
    (running, address.to_owned())
}

/// The same process, without a daemon: it offers its memory to KSM only, should it be told to.
pub(crate) fn bench_process(number: u64, content: &Content) -> Guest {
    filled(pageone(), number, content)
}

/// A guest that `command` starts, whose last words the guest's are.
pub(crate) fn filled(mut command: Command, number: u64, content: &Content) -> Guest {
    command.args(["guest", "bench"]);
    command.arg(format!("--number={number}"));
    command.arg(format!("--pages={}", content.pages));
    command.arg(format!("--seed={}", content.seed));
    command.arg(format!("--dup={}", content.dup));
    command.arg(format!("--run-pages={}", content.run_pages));
    command.arg(format!("--zero-prefix={}", content.zero_prefix));
    command.args(content.shuffle.then_some("--shuffle"));
    let mut guest = Guest::start(&mut command).expect("a guest");
    guest.answer(Duration::from_secs(60)).expect("filled");
    guest
}

/// A file of the system that has its old content again when this is dropped.
pub(crate) struct Knob(&'static str, String);

impl Knob {
    pub(crate) fn set(path: &'static str, value: &str) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        // Of a choice the one in brackets.
        let old = text
            .split(['[', ']'])
            .nth(1)
            .unwrap_or(&text)
            .trim()
            .to_owned();
        let set = std::fs::write(path, value);
        if set.is_err() {
            eprintln!("skipped: {path} cannot be written");
        }
        set.ok().map(|()| Self(path, old))
    }
}

impl Drop for Knob {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0, &self.1);
    }
}

/// A swap file in use, until this is dropped.
pub(crate) struct Swap(PathBuf);

impl Swap {
    /// `None` where this user, or the file system, allows none.
    pub(crate) fn on(path: PathBuf) -> Option<Self> {
        let mut file = std::fs::File::create(&path).expect("a file");
        // No holes: the kernel wants the file's blocks.
        file.write_all(&vec![0; 32 << 20]).expect("room for it");
        file.sync_all().expect("a disk");
        let quiet = |program: &str| {
            let mut command = Command::new(program);
            command
                .arg(&path)
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        if quiet("mkswap") && quiet("swapon") {
            return Some(Self(path));
        }
        eprintln!(
            "skipped: no swap file at {}: needs root, and a file system that allows it",
            path.display()
        );
        None
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).status();
    }
}
