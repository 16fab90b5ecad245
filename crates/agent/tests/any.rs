//! Programs that offer nothing: all their memory is offered for them, but for memory that a rule leaves out.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::{Engine, count};
use support::{agent, root};
use wire::{CHUNK_BYTES, Change, PAGE_BYTES, PageBits, PageOutcome};

const LEN: usize = 4 << 20;

fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("any", &[]))
}

fn build(name: &str, flags: &[&str]) -> PathBuf {
    let name = format!("{name}-{}", std::process::id());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Wextra", "-pthread", "-o"])
        .arg(&program);
    cc.args(flags).arg(root().join("tests/guest/any.c"));
    assert!(cc.status().expect("a C compiler is installed").success());
    program
}

/// What the engine has heard of a guest: for each chunk the pages that are offered.
type Heard = BTreeMap<usize, PageBits>;

/// The program as a guest that offers nothing by itself.
struct Any {
    engine: Engine,
    process: Child,
    lines: BufReader<std::process::ChildStdout>,
    /// Where each kind of memory lies.
    places: BTreeMap<String, usize>,
    heard: Heard,
}

impl Drop for Any {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Any {
    fn start(variables: &[(&str, &str)]) -> Self {
        Self::start_of(program(), variables)
    }

    fn start_of(program: &Path, variables: &[(&str, &str)]) -> Self {
        let engine = Engine::new();
        let mut command = Command::new(program);
        command
            .env("LD_PRELOAD", agent())
            .env("PAGEONE_SOCKET", engine.socket())
            .env("PAGEONE_ANY", "100")
            .envs(variables.iter().copied());
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        engine.write(1000, 512, 5);
        let mut any = Self {
            engine,
            process,
            lines,
            places: BTreeMap::new(),
            heard: Heard::new(),
        };
        any.listen();
        any.engine.accept();
        any
    }

    /// Takes the program's lines up to the end of an answer.
    fn listen(&mut self) {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it has ended");
            let words: Vec<_> = line.split_whitespace().collect();
            let &["ok", kind, at, _] = &words[..] else {
                panic!("{line}");
            };
            if kind == "end" {
                return;
            }
            self.places.insert(kind.to_owned(), at.parse().unwrap());
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.process.stdin.as_ref().unwrap(), "{line}").unwrap();
        self.listen();
    }

    fn sync(&mut self) {
        for change in self.engine.sync() {
            match change {
                Change::Whole { chunk, chunks } => {
                    for number in 0..chunks as usize {
                        let at = usize::try_from(chunk).unwrap() + number * CHUNK_BYTES;
                        self.heard.insert(at, PageBits::FULL);
                    }
                }
                Change::Chunk { chunk, offered, .. } => {
                    self.heard.insert(usize::try_from(chunk).unwrap(), offered);
                }
                Change::Recycled { .. } => {}
            }
        }
    }

    /// How many of the bytes from `at` on are offered.
    fn offered(&self, at: usize, len: usize) -> usize {
        let is_offered = |page: &usize| {
            let chunk = page & !(CHUNK_BYTES - 1);
            let number = (page - chunk) / PAGE_BYTES;
            let heard = self.heard.get(&chunk);
            heard.is_some_and(|offered| offered.contains(number))
        };
        let pages = (at & !(PAGE_BYTES - 1)..at + len).step_by(PAGE_BYTES);
        pages.filter(is_offered).count() * PAGE_BYTES
    }

    fn of(&self, kind: &str) -> usize {
        self.offered(self.places[kind], LEN)
    }

    /// Merges the first pages of `plain`.
    fn merge_plain(&mut self, pages: u16) {
        self.until("plain", LEN);
        for page in 0..u64::from(pages) {
            let mut content = format!("page {page} of plain").into_bytes();
            content.resize(PAGE_BYTES, 0);
            let to = (1000 + page) * PAGE_BYTES as u64;
            self.engine.store.write_all_at(&content, to).unwrap();
        }
        let merged = self
            .engine
            .merge(self.places["plain"], 0, pages, Some(1000));
        let done = count(&merged, PageOutcome::Merged);
        assert_eq!(done, usize::from(pages), "{merged:?}");
    }

    /// The pages of `plain` that lie in mappings of a store.
    fn stored_of_plain(&self) -> Vec<usize> {
        let plain = self.places["plain"];
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.process.id())).unwrap();
        let stores = maps.lines().filter(|line| line.contains("memfd:"));
        let ranges = stores.map(|line| {
            let (range, _) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            let number = |hex| usize::from_str_radix(hex, 16).unwrap();
            number(start)..number(end)
        });
        let inside = ranges.filter(|range| (plain..plain + LEN).contains(&range.start));
        let pages = inside.flat_map(|range| range.step_by(PAGE_BYTES));
        pages.map(|page| (page - plain) / PAGE_BYTES).collect()
    }

    /// Waits until a thread has the lock at an address.
    fn wait_for_lock(&self, at: usize) {
        let memory = std::fs::File::open(format!("/proc/{}/mem", self.process.id())).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut word = [0; 4];
        while word == [0; 4] {
            assert!(Instant::now() < deadline, "no thread takes the lock");
            std::thread::sleep(Duration::from_millis(5));
            memory.read_exact_at(&mut word, at as u64).unwrap();
        }
    }

    /// Asks until so much of a kind is offered.
    #[track_caller]
    fn until(&mut self, kind: &str, least: usize) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.of(kind) < least {
            assert!(Instant::now() < deadline, "{kind}: {}", self.of(kind));
            std::thread::sleep(Duration::from_millis(20));
            self.sync();
        }
    }
}

#[test]
fn all_memory_is_offered_but_for_what_a_rule_leaves_out() {
    let mut any = Any::start(&[]);
    any.until("plain", LEN);
    any.until("heap", LEN - PAGE_BYTES);
    // A second look, for all that was found meanwhile.
    any.tell("more");
    any.until("more", LEN);
    for kind in [
        "small", "shared", "stack", "read", "code", "huge", "wiped", "locked",
    ] {
        let len = if kind == "small" {
            15 * PAGE_BYTES
        } else {
            LEN
        };
        assert_eq!(any.offered(any.places[kind], len), 0, "{kind}");
    }
    any.tell("lock");
    any.sync();
    any.sync();
    assert_eq!(any.of("plain"), 0, "it is locked now");
}

/// What comes beside tracked memory has a mapping of its own for ever.
#[test]
fn a_heap_that_grows_slowly_has_few_mappings() {
    const STEPS: usize = 64;
    const STEP: usize = 128 << 10;
    let mut any = Any::start(&[]);
    any.until("heap", LEN - PAGE_BYTES);
    for _ in 0..STEPS {
        any.tell("grow");
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(20));
            any.sync();
        }
    }
    // On a loaded machine the agent looks rarely, and it may mistake what has come for what it left out before. New memory elsewhere
    // has it look at all.
    let (heap, end) = (any.places["heap"], any.places["top"] + STEP);
    let least = (end - heap) / 17 * 16 - STEP;
    let deadline = Instant::now() + Duration::from_secs(30);
    while any.offered(heap, end - heap) < least {
        let offered = any.offered(heap, end - heap);
        assert!(Instant::now() < deadline, "{offered}");
        any.tell("more");
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            any.sync();
        }
    }
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", any.process.id())).unwrap();
    let mappings = maps.lines().filter(|line| line.contains("[heap]")).count();
    // From 4 to 12 MiB by sixteenths.
    assert!(mappings <= 24, "{mappings} mappings:\n{maps}");
}

#[test]
fn memory_that_is_to_be_of_huge_pages_is_offered_if_that_is_wanted() {
    let mut any = Any::start(&[("PAGEONE_ANY_HUGE", "1")]);
    any.until("huge", LEN);
}

#[test]
fn memory_that_the_program_takes_back_stays_its_own_until_it_offers_it() {
    let mut any = Any::start(&[]);
    any.until("plain", LEN);
    any.tell("takeback");
    for _ in 0..20 {
        any.sync();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(any.of("plain"), LEN / 2);
    any.tell("offer");
    any.until("plain", LEN);
}

#[test]
fn the_agents_variables_are_marked() {
    let mut any = Any::start(&[]);
    any.until("plain", LEN);
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", any.process.id())).unwrap();
    let (mut behind, mut checked) = (String::new(), false);
    let mut wanted = false;
    for line in smaps.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        if words[0].contains('-') {
            // Variables without a value lie behind those with one.
            let is_anonymous = words.len() == 5 && words[1] == "rw-p";
            wanted = is_anonymous && behind.contains("pageone_agent");
            behind = words.last().unwrap().to_string();
        } else if words[0] == "VmFlags:" && wanted {
            assert!(words.contains(&"rr"), "{line}");
            checked = true;
        }
    }
    assert!(checked);
}

/// Go's runtime discards memory past libc, also in programs that use libc. So does AddressSanitizer's.
#[test]
fn nothing_is_offered_for_a_program_of_go_or_with_a_sanitizer() {
    for (name, flag) in [
        ("go-note", "-DGO_NOTE"),
        ("go-mark", "-DGO_MARK"),
        #[cfg(target_arch = "x86_64")]
        ("shadow", "-DSHADOW"),
    ] {
        let program = build(name, &[flag]);
        let mut any = Any::start_of(&program, &[]);
        let deadline = Instant::now() + Duration::from_secs(3);
        while Instant::now() < deadline {
            any.sync();
            assert_eq!(any.of("plain"), 0, "{flag}");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::fs::remove_file(program).unwrap();
    }
}

/// A sanitizer that is linked into a program has such functions. In the agent's thread they would read memory that has moved away.
#[test]
fn the_agents_thread_calls_no_function_of_the_program() {
    let flags = ["-DOWN_COPIES", "-rdynamic", "-fno-builtin"];
    let program = build("own-copies", &flags);
    let mut any = Any::start_of(&program, &[]);
    any.until("plain", LEN);
    let merged = any.engine.merge(any.places["plain"], 0, 8, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Differs), 8, "{merged:?}");
    any.tell("more");
    any.until("more", LEN);
    std::fs::remove_file(program).unwrap();
}

#[test]
fn what_is_taken_back_lies_in_no_store_any_more() {
    let mut any = Any::start(&[]);
    any.merge_plain(8);
    assert_eq!(any.stored_of_plain(), (0..8).collect::<Vec<_>>());
    any.tell("takeback");
    assert!(any.stored_of_plain().is_empty());
}

/// The kernel does not wait where the word of a thread that ends is frozen, and a join of that thread would wait for ever.
#[test]
fn a_page_with_the_word_of_a_thread_is_never_frozen() {
    let mut any = Any::start(&[]);
    any.merge_plain(16);
    any.tell("clone");
    any.sync();
    // Since the sync another thread has a robust lock there.
    any.tell("own");
    any.wait_for_lock(any.places["plain"] + 7 * PAGE_BYTES);
    any.tell("takeback");
    let stored = any.stored_of_plain();
    assert_eq!(stored, [7, 9], "they stay, with frames of their own");
}

#[test]
fn the_page_with_the_kernels_words_of_a_thread_stays_in_place() {
    let mut any = Any::start(&[]);
    any.until("own", LEN / 2);
    // The word at which libc joins a thread.
    let word = any.places["thread"] + 0x2d0;
    let (chunk, page) = (word & !(CHUNK_BYTES - 1), word % CHUNK_BYTES / PAGE_BYTES);
    assert!(
        any.offered(chunk, CHUNK_BYTES) > 0,
        "its neighbours are offered"
    );
    assert_eq!(any.offered(word, 1), 0);
    let page = u16::try_from(page).unwrap();
    let merged = any.engine.merge(chunk, page, 1, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Gone), 1);
    let merged = any.engine.merge(chunk, 0, 1, Some(1000));
    assert_eq!(
        count(&merged, PageOutcome::Differs),
        1,
        "and it is asked of these"
    );
    any.tell("join");
}

#[test]
fn the_page_with_a_robust_lock_of_a_thread_stays_in_place() {
    let mut any = Any::start(&[]);
    any.until("plain", LEN);
    any.tell("own");
    let lock = any.places["plain"] + 7 * PAGE_BYTES;
    let deadline = Instant::now() + Duration::from_secs(30);
    while any.offered(lock, 1) > 0 {
        assert!(Instant::now() < deadline, "the page of the lock may go");
        std::thread::sleep(Duration::from_millis(20));
        any.sync();
    }
    assert_eq!(any.of("plain"), LEN - PAGE_BYTES, "its neighbours may go");
    any.tell("end");
    assert_eq!(any.places["lock"], libc::EOWNERDEAD.unsigned_abs() as usize);
}

/// Two that were registered apart are two for ever.
#[test]
fn pages_that_are_kept_back_do_not_cut_their_mapping() {
    let mut any = Any::start(&[]);
    any.until("plain", LEN);
    any.tell("robust");
    any.until("robust", LEN / 2 - 3 * PAGE_BYTES);
    let start = any.places["robust"];
    for page in [100, 200, 300] {
        assert_eq!(any.offered(start + page * PAGE_BYTES, 1), 0, "{page}");
    }
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", any.process.id())).unwrap();
    let head = format!("{start:x}-{:x} rw-p", start + LEN / 2);
    let found = smaps.split_once(&head).map(|(_, of)| of);
    let flags = found.and_then(|of| of.lines().find(|line| line.starts_with("VmFlags:")));
    let flags = flags.unwrap_or_else(|| panic!("{head} is not one mapping:\n{smaps}"));
    assert!(flags.contains(" uw"), "{flags}");
}

#[test]
fn the_page_with_the_word_of_a_thread_that_clone_makes_stays_in_place() {
    let mut any = Any::start(&[]);
    any.until("plain", LEN);
    any.tell("clone");
    any.sync();
    assert_eq!(any.offered(any.places["plain"] + 9 * PAGE_BYTES, 1), 0);
    assert_eq!(any.of("plain"), LEN - PAGE_BYTES, "its neighbours may go");
}

#[test]
fn a_fork_child_has_an_agent_of_its_own_after_a_while() {
    for way in ["fork", "forkbynumber"] {
        let mut any = Any::start(&[("PAGEONE_ANY", "1000")]);
        any.until("plain", LEN);
        let begun = Instant::now();
        any.tell(way);
        any.engine.accept();
        assert!(begun.elapsed() >= Duration::from_millis(900), "{way}");
        let child = sys::socket::peer(any.engine.link.as_ref().unwrap())
            .unwrap()
            .pid;
        assert_eq!(child, u32::try_from(any.places["child"]).unwrap());
        any.heard.clear();
        any.until("plain", LEN);
        // Its memory is shared by fork, and left so.
        let merged = any.engine.merge(any.places["plain"], 0, 8, Some(1000));
        assert_eq!(count(&merged, PageOutcome::Pinned), 8, "{merged:?}");
        let child = rustix::process::Pid::from_raw(child.cast_signed()).unwrap();
        rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    }
}

/// A library that starts a thread when it is loaded, before the agent.
fn hasty() -> PathBuf {
    let name = format!("hasty-{}.so", std::process::id());
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-shared", "-fPIC", "-pthread", "-o"]);
    cc.arg(&library).arg(root().join("tests/guest/hasty.c"));
    assert!(cc.status().expect("a C compiler is installed").success());
    library
}

/// libc's own calls cannot be taken over then: `free` would unmap memory that a window has.
#[test]
fn nothing_is_offered_where_a_thread_was_before_the_agent() {
    let alone = agent().display().to_string();
    let both = format!("{alone} {}", hasty().display());
    for (preload, comes) in [(alone, true), (both, false)] {
        let mut engine = Engine::new();
        let mut command = Command::new(program());
        command.env("LD_PRELOAD", preload).env("PAGEONE_ANY", "100");
        command.env("PAGEONE_SOCKET", engine.socket());
        let mut process = command.stdin(Stdio::piped()).spawn().unwrap();
        assert_eq!(engine.try_accept().is_some(), comes, "an agent");
        drop(process.stdin.take());
        process.wait().unwrap();
    }
}
