//! One list, run twice, and the two traces compared.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{NO_FOLDER, Place, Running, output, pageone, status, text, wait_for};
use crate::list::{self, Line};
use crate::support::{agent, brought, root};

/// The longest a list may take: a program that does not end by then hangs. On a busy machine a list takes minutes.
const PATIENCE: Duration = Duration::from_secs(600);

/// How often a list is tried anew without moves that the kernel refuses where an agent has gone.
const DIVIDED: usize = 4;

/// The daemon and the compiled program.
pub(crate) struct Stage {
    place: Place,
    program: PathBuf,
    next: AtomicUsize,
    unsteady: AtomicUsize,
    _daemon: Running,
}

/// The first line at which the traces are not the same.
pub(crate) struct Difference {
    alone: String,
    under: String,
}

impl Difference {
    /// The call, and the first lines that only one of the traces has.
    pub(crate) fn in_short(&self) -> String {
        let name = self.alone.lines().next().unwrap_or_default();
        let name = name.split(" =").next().unwrap_or_default();
        let only = |sign: char, of: &str, other: &str| -> String {
            let lines = of
                .lines()
                .filter(|line| !other.lines().any(|same| same == *line));
            lines
                .take(3)
                .map(|line| format!("\n  {sign} {line}"))
                .collect()
        };
        let (alone, under) = (&self.alone, &self.under);
        format!(
            "[{name}]{}{}",
            only('-', alone, under),
            only('+', under, alone)
        )
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "--- the kernel alone\n{}", self.alone)?;
        writeln!(f, "+++ under PageONE\n{}", self.under)?;
        writeln!(f, "in short: {}", self.in_short())
    }
}

impl Stage {
    pub(crate) fn new() -> Self {
        let place = Place::new();
        let program = build(&place);
        let running = daemon(&place);
        Self {
            place,
            program,
            next: AtomicUsize::new(0),
            unsteady: AtomicUsize::new(0),
            _daemon: running,
        }
    }

    /// Where the traces of a list differ; adds to `stored` how many pages were seen in a store.
    pub(crate) fn difference(&self, lines: &[Line], stored: &mut usize) -> Option<Difference> {
        let (mut lines, mut alone) = (lines.to_vec(), Vec::new());
        let mut under = Vec::new();
        for _ in 0..=DIVIDED {
            alone = blocks(&self.run(&lines, false));
            lines = leave_out(&lines, &mut alone);
            let trace = self.run(&lines, true);
            *stored += stored_pages(&trace);
            under = blocks(&trace);
            if alone == under {
                return None;
            }
            // So it is where an agent has gone, too: what it has put in place has a history of its own.
            let few = leave_out(&lines, &mut under);
            if few == lines || !lines.iter().any(Line::is_detach) {
                break;
            }
            lines = few;
        }
        let lines = &lines;
        let again = blocks(&self.run(lines, false));
        if alone == again {
            return Some(first_difference(&alone, &under));
        }
        // Then a difference says nothing.
        self.unsteady.fetch_add(1, Ordering::Relaxed);
        let found = first_difference(&alone, &again);
        println!("model: a list is not the same twice: {}", found.in_short());
        None
    }

    /// How many lists were not the same twice, each without PageONE.
    pub(crate) fn unsteady(&self) -> usize {
        self.unsteady.load(Ordering::Relaxed)
    }

    /// Puts the agent into a program, or takes it out; gives the answer to it.
    fn fulfil(&self, wish: &str, pid: u32) -> &'static [u8] {
        let mut command = pageone();
        command.arg(wish);
        if wish == "attach" {
            command.arg("--socket").arg(self.place.socket());
            command.args(any().then_some("--any"));
        }
        let done = output(command.arg(pid.to_string()));
        let (told, failed) = (text(&done.stdout), text(&done.stderr));
        if done.status.success() && !told.contains("could not") {
            return b"y";
        }
        println!("model: {wish}: {told}{failed}");
        b"n"
    }

    /// Keeps a list for later.
    pub(crate) fn keep(&self, name: &str, lines: &[Line]) -> PathBuf {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("model-{name}.list"));
        std::fs::write(&file, list::text(lines)).unwrap();
        file
    }

    /// Runs a list and gives the trace, with the program's end as its last line.
    fn run(&self, lines: &[Line], under: bool) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let folder = self.place.path().join(format!("run-{number}"));
        std::fs::create_dir(&folder).unwrap();
        let (list, trace) = (folder.join("list"), folder.join("trace"));
        std::fs::write(&list, list::text(lines)).unwrap();
        let mut command = Command::new("setarch");
        command.arg("-R").arg(&self.program);
        command.args([&list, &trace, &folder]);
        command.arg(if under { "0" } else { "1" });
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if under && !lines.iter().any(Line::is_attach) {
            command.env("LD_PRELOAD", agent());
            command.env("PAGEONE_SOCKET", self.place.socket());
            if any() {
                command.env("PAGEONE_ANY", "1");
            }
        }
        let mut running = Running::start(&mut command);
        let pid = running.0.id();
        let (to, from) = (running.0.stdin.take(), running.0.stdout.take());
        let end = std::thread::scope(|scope| {
            let (mut to, from) = (to.unwrap(), BufReader::new(from.unwrap()));
            scope.spawn(move || {
                for wish in from.lines() {
                    let _ = to.write_all(self.fulfil(&wish.unwrap(), pid));
                }
            });
            end_of(&mut running)
        });
        let trace = std::fs::read_to_string(&trace).unwrap_or_default();
        std::fs::remove_dir_all(&folder).unwrap();
        format!("{trace}\n0 ended: {end}\n")
    }
}

/// Whether all memory of programs is offered.
fn any() -> bool {
    std::env::var_os("ANY").is_some_and(|any| !any.is_empty())
}

/// Huge pages of the machine's for as long as this lives, if it has none and they may be had: a list that maps them tests nothing
/// without.
pub(crate) struct HugePages(bool);

impl HugePages {
    const PATH: &str = "/proc/sys/vm/nr_hugepages";
    /// For the mappings of several programs and their children.
    const COUNT: &str = "96";

    pub(crate) fn reserve() -> Self {
        let none = std::fs::read_to_string(Self::PATH).is_ok_and(|count| count.trim() == "0");
        Self(none && std::fs::write(Self::PATH, Self::COUNT).is_ok())
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if self.0 {
            let _ = std::fs::write(Self::PATH, "0");
        }
    }
}

/// A daemon in a session of its own: its threads are of idle priority, and the kernel shares the processors
/// out by sessions.
fn daemon(place: &Place) -> Running {
    let mut command = Command::new("setsid");
    let plain = pageone();
    command
        .arg(plain.get_program())
        .args(["daemon", "--no-keep"]);
    command.args(["--merge-period", "20ms", "--broken-rest", "20ms"]);
    command.arg("--socket").arg(place.socket());
    let running = Running::start(
        command
            .stdin(Stdio::null())
            .env_remove("LD_PRELOAD")
            .env("CONFIGURATION_DIRECTORY", NO_FOLDER),
    );
    wait_for("the daemon", || {
        status(place).status.success().then_some(())
    });
    running
}

fn build(place: &Place) -> PathBuf {
    if let Some(program) = brought("PAGEONE_MODEL") {
        return program;
    }
    let sources = std::fs::read_dir(root().join("tests/model")).unwrap();
    let sources = sources.map(|entry| entry.unwrap().path());
    let program = place.path().join("model");
    let mut cc = crate::common::compiler();
    // Its own data lies below the arena, so that the heap may lie there.
    cc.args(["-O2", "-g", "-Wall", "-Wextra", "-pthread", "-no-pie", "-o"])
        .arg(&program)
        .args(sources.filter(|path| path.extension().is_some_and(|kind| kind == "c")));
    assert!(cc.status().expect("a C compiler is installed").success());
    program
}

fn end_of(running: &mut Running) -> String {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = running.0.try_wait().unwrap() {
            return status.to_string();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = running.0.kill();
    format!("not at all, in {PATIENCE:?}")
}

/// The trace by lines of the list; a line's text may have several of its own, which begin with spaces.
fn blocks(trace: &str) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    for line in trace.lines().filter(|line| !line.trim().is_empty()) {
        let kept = line.split(" stored=").next().unwrap_or(line);
        match blocks.last_mut().filter(|_| line.starts_with(' ')) {
            Some(block) => *block = format!("{block}\n{kept}"),
            None => blocks.push(kept.to_owned()),
        }
    }
    blocks
}

/// The list without the moves that the kernel refuses for a division that nothing tells of: it keeps mappings apart whose
/// pages have another history, though all it says of them is the same. PageONE moves them.
fn leave_out(lines: &[Line], alone: &mut [String]) -> Vec<Line> {
    let mut lines = lines.to_vec();
    for (line, block) in lines.iter_mut().zip(alone) {
        if block.ends_with(" EFAULT divided") {
            *line = line.named("divided");
            *block = block.replace(" mremap ", " divided ");
        }
    }
    lines
}

fn first_difference(alone: &[String], under: &[String]) -> Difference {
    let longest = alone.len().max(under.len());
    let at = (0..longest).find(|&at| alone.get(at) != under.get(at));
    let text = |blocks: &[String]| {
        let block = at.and_then(|at| blocks.get(at));
        block.cloned().unwrap_or_else(|| "(nothing)".to_owned())
    };
    Difference {
        alone: text(alone),
        under: text(under),
    }
}

fn stored_pages(trace: &str) -> usize {
    let counts = trace.lines().filter_map(|line| line.split_once(" stored="));
    counts
        .filter_map(|(_, count)| count.parse::<usize>().ok())
        .sum()
}
