//! `pageone attach`: an agent for processes that run already.
#![cfg(target_arch = "x86_64")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{
    Place, count, daemon, guests_of, install, json, need_agent, output, pageone, text, wait_for,
};
use sys::seize::Held;

/// `tests/guest/attached.c`, built.
fn program(place: &Place, flags: &[&str]) -> PathBuf {
    let program = built(place, "attached", flags);
    program.expect("a C compiler")
}

/// A program of `tests/guest`, built; `None` if the compiler does not know the flags.
fn built(place: &Place, name: &str, flags: &[&str]) -> Option<PathBuf> {
    need_agent();
    let program = place.path().join(name);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/guest");
    let mut cc = common::compiler();
    cc.args(["-O2", "-pthread", "-o"]).arg(&program);
    cc.arg(format!("{folder}/{name}.c")).args(flags);
    output(&mut cc).status.success().then_some(program)
}

/// A process that checks itself.
struct Checked(Child, BufReader<std::process::ChildStdout>);

impl Checked {
    fn start(program: &Path, args: &[&str]) -> Self {
        Self::by(Command::new(program).args(args), "ready")
    }

    /// A command that says a word when it is where it is to be.
    fn by(command: &mut Command, word: &str) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a program");
        let lines = BufReader::new(child.stdout.take().expect("stdout"));
        let mut checked = Self(child, lines);
        checked.says(word);
        checked
    }

    fn says(&mut self, word: &str) {
        let mut line = String::new();
        self.1.read_line(&mut line).expect("a line");
        assert_eq!(line.trim_end(), word);
    }

    /// Gives it a byte.
    fn tell(&mut self) {
        let mut input = self.0.stdin.as_ref().expect("its input");
        input.write_all(b"!").expect("a byte");
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// It has found nothing wrong, and lives.
    fn is_right(&mut self) {
        let ended = self.0.try_wait().expect("wait");
        let mut said = String::new();
        if ended.is_some() {
            let _ = self.1.read_line(&mut said);
        }
        assert_eq!(ended, None, "{said}");
    }

    /// How often its first thread has slept, all in all.
    fn slept(&self) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("status");
        let mut lines = status.lines();
        let line = lines.find(|line| line.starts_with("voluntary_ctxt_switches"));
        line.expect("a number").to_owned()
    }

    /// Its first thread goes round and round.
    fn goes_on(&mut self) {
        for _ in 0..3 {
            let before = self.slept();
            wait_for("the program to go on", || {
                self.is_right();
                (self.slept() != before).then_some(())
            });
        }
        self.is_right();
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn attach(place: &Place, flags: &[&str], pids: &[u32]) -> Output {
    output(&mut attach_command(place, flags, pids))
}

fn attach_command(place: &Place, flags: &[&str], pids: &[u32]) -> Command {
    let mut command = pageone();
    command.arg("attach").arg("--socket").arg(place.socket());
    command.args(flags).args(pids.iter().map(u32::to_string));
    command
}

/// A place for a test, if this user may trace others' and its own processes.
fn place_to_trace() -> Option<Place> {
    let place = Place::new();
    let mut sleep = Command::new("sleep").arg("60").spawn().expect("sleep");
    let told = attach(&place, &["--dry-run"], &[sleep.id()]);
    let can = told.status.success();
    if !can {
        eprintln!("skipped: {}", text(&told.stderr));
    }
    sleep.kill().expect("killed");
    sleep.wait().expect("ended");
    can.then_some(place)
}

fn attached(place: &Place, flags: &[&str], pids: &[u32]) -> String {
    let done = attach(place, flags, pids);
    let (told, failed) = (text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{told}{failed}");
    assert!(!told.contains("could not"), "{told}");
    told
}

/// MiB of a program's memory, and the pages of them that it does not rewrite.
const MIB: u64 = 8;
const STILL: u64 = MIB * 256 / 16 * 15;

/// It is known by its mark, whatever its file is called and wherever that lies.
#[test]
fn a_copy_of_this_program_is_not_attached() {
    let place = Place::new();
    let copy = place.path().join("another");
    install(env!("CARGO_BIN_EXE_pageone"), &copy);
    let mut command = Command::new(&copy);
    command.args(["daemon", "--no-keep", "--socket"]);
    let copied = common::Running::start(command.arg(place.socket()));
    wait_for("the daemon", || {
        common::status(&place).status.success().then_some(())
    });
    let pid = copied.0.id().to_string();
    let refused = attach(&place, &["--dry-run", &pid], &[]);
    let said = text(&refused.stderr);
    assert!(said.contains("a command of PageONE"), "{said}");
    let mut analyze = pageone();
    let analyze = output(analyze.args(["analyze", "--look-again=10ms", "--comm=another"]));
    assert!(!analyze.status.success());
    assert!(text(&analyze.stderr).contains("no process fits"));
}

#[test]
fn running_programs_become_guests_and_keep_their_answers() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mib = MIB.to_string();
    let mut both = [(); 2].map(|()| Checked::start(&program, &[&mib, "8", "offer,work"]));
    let pids: Vec<u32> = both.iter().map(Checked::pid).collect();
    let told = attached(&place, &[], &pids);
    assert!(told.contains(&format!("{MIB}.0 MiB offered")), "{told}");
    let started = common::equal_guests(&place, 16);
    wait_for("the marks of those that were attached", || {
        let status = json(&place);
        let guests = status["guests"].as_array().unwrap();
        let marked = |guest: &&serde_json::Value| guest["attached"] == true;
        let marked: Vec<_> = guests.iter().filter(marked).collect();
        let own = |guest: &&serde_json::Value| pids.iter().any(|&pid| guest["pid"] == pid);
        (guests.len() == 4 && marked.len() == 2 && marked.iter().all(own)).then_some(())
    });
    drop(started);
    wait_for("sharing", || {
        both.iter_mut().for_each(Checked::is_right);
        (count(&json(&place), "pages_sharing") >= STILL).then_some(())
    });
    both.iter_mut().for_each(Checked::goes_on);
    // There is one already.
    let again = attach(&place, &[], &pids[..1]);
    assert!(!again.status.success());
    assert!(
        text(&again.stderr).contains("agent already: it is a guest in the domain"),
        "{}",
        text(&again.stderr)
    );
    both.iter_mut().for_each(Checked::goes_on);
}

#[test]
fn a_program_that_offers_nothing_is_merged_with_any() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mib = MIB.to_string();
    let mut both = [(); 2].map(|()| Checked::start(&program, &[&mib, "4", "work"]));
    let pids: Vec<u32> = both.iter().map(Checked::pid).collect();
    attached(&place, &[], &pids[..1]);
    assert_eq!(guests_of(&json(&place)), 0, "it offers nothing");
    drop(std::mem::replace(
        &mut both[0],
        Checked::start(&program, &[&mib, "4", "work"]),
    ));
    let pids: Vec<u32> = both.iter().map(Checked::pid).collect();
    attached(&place, &["--any"], &pids);
    wait_for("sharing", || {
        both.iter_mut().for_each(Checked::is_right);
        (count(&json(&place), "pages_sharing") >= STILL).then_some(())
    });
    both.iter_mut().for_each(Checked::goes_on);
}

/// musl's calls of this kind have their jumps at other places than glibc's (`make test-musl`).
#[test]
fn detached_threads_clones_and_groups_go_on() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = built(&place, "leaving", &[]).expect("a C compiler");
    let _daemon = daemon(&place, &["--merge-period", "20ms"]);
    let mut one = Checked::start(&program, &[]);
    let pids = [one.pid()];
    // It is in those functions most of the time: then the command says so, and has changed nothing.
    let done = |order: &dyn Fn() -> Output| {
        wait_for("a moment between two calls", || {
            let told = order();
            let failed = text(&told.stderr);
            assert!(
                told.status.success() || failed.contains("try again"),
                "{failed}"
            );
            told.status.success().then_some(())
        });
    };
    for _ in 0..3 {
        done(&|| attach(&place, &["--any"], &pids));
        std::thread::sleep(Duration::from_millis(700));
        one.is_right();
        done(&|| detach(&[], &pids));
        one.is_right();
    }
}

/// Detaching leaves parts of a mapping side by side, which the kernel does not join: the ones that were merged, and the ones that were not.
#[test]
fn memory_that_was_divided_is_merged_again() {
    /// Half of `tests/guest/divided.c`'s pages, less its last run.
    const SHARED: u64 = 2048 - 12;
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = built(&place, "divided", &[]).expect("a C compiler");
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mut both = [(); 2].map(|()| Checked::start(&program, &[]));
    let pids: Vec<u32> = both.iter().map(Checked::pid).collect();
    for turn in 0..2 {
        attached(&place, &["--any"], &pids);
        wait_for(&format!("sharing, turn {turn}"), || {
            both.iter_mut().for_each(Checked::is_right);
            (count(&json(&place), "pages_sharing") >= SHARED).then_some(())
        });
        detached(&pids);
        both.iter_mut().for_each(Checked::is_right);
    }
}

/// An agent that has just come reads the mappings twice, with pauses, before it offers them.
#[test]
fn memory_can_be_merged_as_soon_as_it_is_attached() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "1h"]);
    for pause in [0, 100, 400] {
        let mib = MIB.to_string();
        let mut both = [(); 2].map(|()| Checked::start(&program, &[&mib, "4", "work"]));
        both.iter_mut().for_each(Checked::goes_on);
        let pids: Vec<u32> = both.iter().map(Checked::pid).collect();
        attached(&place, &["--any"], &pids);
        std::thread::sleep(Duration::from_millis(pause));
        let mut merge = pageone();
        merge
            .args(["merge", "--json", "--socket"])
            .arg(place.socket());
        let told = output(merge.args(pids.iter().map(u32::to_string)));
        let told: serde_json::Value = serde_json::from_slice(&told.stdout).expect("JSON");
        assert!(count(&told, "pages") >= STILL, "after {pause} ms: {told}");
        both.iter_mut().for_each(Checked::goes_on);
    }
}

#[test]
fn a_hundred_threads_stand_still_for_a_moment() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &[]);
    let mut one = Checked::start(&program, &["4", "100", "offer,work,fork"]);
    let mut stood = || {
        let told = attached(&place, &[], &[one.pid()]);
        detached(&[one.pid()]);
        one.goes_on();
        stood_ms(&told)
    };
    // The aim is for a machine at rest. On a busy one each thread waits for a CPU before it stands.
    let aim = || match common::busy() {
        1 => 10.0,
        _ => 1000.0,
    };
    let median = || {
        let mut three = [(); 3].map(|()| stood());
        three.sort_by(f64::total_cmp);
        eprintln!("a hundred threads stood still for {three:?} ms");
        (three[1], aim())
    };
    let done = common::once_in(3, median, |(ms, most)| ms < most);
    assert!(done.is_ok(), "medians in ms, and the most: {done:?}");
}

/// How long the command says that threads stood still, in milliseconds.
fn stood_ms(told: &str) -> f64 {
    let words = told.split_once("threads stood still for ");
    let number = words.and_then(|(_, words)| words.split_once(" ms"));
    let number = number.and_then(|(number, _)| number.parse().ok());
    number.unwrap_or_else(|| panic!("{told}"))
}

/// What the programs do that are attached at any moment.
const BUSY: [&str; 4] = ["offer,work,fork", "offer,work,fork", "work,fork", "offer"];
/// How often the same processes are attached.
const LIFE: u64 = 50;

/// A short form; `PAGEONE_ATTACHES` is how often otherwise, all processes together.
#[test]
fn a_process_may_be_attached_at_any_moment() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "20ms"]);
    let times = std::env::var("PAGEONE_ATTACHES").ok();
    let times = times.map_or(24, |times| times.parse().expect("a number"));
    let turns = u64::div_ceil(times, BUSY.len() as u64);
    let begun = Instant::now();
    for first in (0..turns).step_by(usize::try_from(LIFE).expect("few")) {
        let mut all = BUSY.map(|words| Checked::start(&program, &["1", "8", words]));
        let pids = all.each_ref().map(Checked::pid);
        for turn in first..turns.min(first + LIFE) {
            let moment = |most: u64, salt: u64| {
                std::thread::sleep(Duration::from_micros((turn + salt) * 7919 % most));
            };
            moment(20_000, 0);
            let flags = if turn % 2 == 0 { &[][..] } else { &["--any"] };
            attached(&place, flags, &pids);
            all.iter_mut().for_each(Checked::is_right);
            // Mostly before much is merged, now and then after it.
            moment(if turn % 8 == 0 { 400_000 } else { 20_000 }, 1);
            detached(&pids);
            all.iter_mut().for_each(Checked::is_right);
        }
        all.iter_mut().for_each(Checked::goes_on);
    }
    let (done, took) = (turns * BUSY.len() as u64, begun.elapsed());
    eprintln!("{done} times attached and detached in {took:?}");
}

/// The mappings, and libc's code as it is in memory.
fn state(pid: u32) -> (String, Vec<u8>) {
    use std::os::unix::fs::FileExt;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
    let memory = fs::File::open(format!("/proc/{pid}/mem")).expect("memory");
    let code = maps
        .lines()
        .find(|line| line.contains("r-xp") && line.contains("/libc.so"));
    let range = code.and_then(|line| line.split_once(' ')?.0.split_once('-'));
    let (start, end) = range.expect("libc");
    let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).expect("an address"));
    let mut code = vec![0; usize::try_from(end - start).expect("its length")];
    memory.read_exact_at(&mut code, start).expect("libc's code");
    (maps, code)
}

/// Whether attaching fails when a step does; then the process is as it was.
fn fails(place: &Place, one: &mut Checked, before: &(String, Vec<u8>), what: &str) -> bool {
    let mut command = attach_command(place, &[], &[one.pid()]);
    let done = output(command.env("PAGEONE_FAULT", what));
    if done.status.success() {
        return false;
    }
    let after = state(one.pid());
    assert_eq!(before.0, after.0, "{what}: {}", text(&done.stderr));
    assert!(before.1 == after.1, "{what}");
    one.is_right();
    true
}

#[test]
fn whichever_call_of_ptrace_fails_nothing_is_left_behind() {
    if !cfg!(debug_assertions) {
        return;
    }
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &[]);
    // Enough of them to reach the agent's beginning; there are more after it.
    const CALLS: usize = 64;
    let mut failed = 0;
    for step in (1..CALLS).step_by(3) {
        let mut one = Checked::start(&program, &["1", "3", "quiet"]);
        one.goes_on();
        let before = state(one.pid());
        // Some are tried again.
        let what = format!("ptrace 12 {step} 0");
        failed += u32::from(fails(&place, &mut one, &before, &what));
        one.goes_on();
    }
    assert!(failed >= 3, "{failed}");
}

#[test]
fn whichever_step_fails_nothing_is_left_behind() {
    if !cfg!(debug_assertions) {
        return;
    }
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &[]);
    let mut one = Checked::start(&program, &["1", "3", "quiet"]);
    one.goes_on();
    let before = state(one.pid());
    const MOST: usize = 200;
    let failed = (1..MOST).take_while(|step| {
        let what = format!("attach 12 {step} 0");
        fails(&place, &mut one, &before, &what)
    });
    let failed = failed.count();
    assert!((40..MOST - 2).contains(&failed), "{failed}");
    let after = state(one.pid());
    assert!(before.0 != after.0 && before.1 != after.1);
    one.goes_on();
}

/// Mappings of one kind side by side as one: where the kernel cuts them changes nothing for the program.
fn joined(maps: &str) -> Vec<String> {
    let mut all: Vec<(String, String, String)> = Vec::new();
    for line in maps.lines() {
        let (range, rest) = line.split_once(' ').expect("a mapping");
        let (start, end) = range.split_once('-').expect("a range");
        let is_anonymous = rest.contains(" 00:00 0");
        match all.last_mut() {
            Some(last) if is_anonymous && last.1 == start && last.2 == rest => {
                end.clone_into(&mut last.1);
            }
            _ => all.push((start.to_owned(), end.to_owned(), rest.to_owned())),
        }
    }
    let line = |(start, end, rest): (String, String, String)| format!("{start}-{end} {rest}");
    all.into_iter().map(line).collect()
}

fn detach(flags: &[(&str, &str)], pids: &[u32]) -> Output {
    let mut command = pageone();
    command.arg("detach").args(pids.iter().map(u32::to_string));
    output(command.envs(flags.iter().copied()))
}

/// One after the other, each again if it must: on a busy machine the kernel may take a second to end a child of theirs, and stops no thread
/// meanwhile.
fn detached(pids: &[u32]) {
    const TRIES: usize = 20;
    for &pid in pids {
        let mut said = Vec::new();
        let is_done = |_| {
            let done = detach(&[], &[pid]);
            let (told, failed) = (text(&done.stdout), text(&done.stderr));
            assert!(!told.contains("memory of the agent stays"), "{told}");
            assert!(
                done.status.success() || failed.contains("does not stop"),
                "{failed}"
            );
            said.push(failed);
            done.status.success()
        };
        assert!((0..TRIES).any(is_done), "{said:?}");
    }
}

/// What core dumps of a process hold.
fn dump(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/coredump_filter")).expect("a filter")
}

/// Flags of the kernel's on any mapping of a process.
fn has_flag(pid: u32, flag: &str) -> bool {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("smaps");
    let mut lines = smaps.lines().filter(|line| line.starts_with("VmFlags:"));
    lines.any(|line| line.split(' ').any(|word| word == flag))
}

#[test]
fn a_process_is_after_detaching_as_it_was_before_attaching() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mib = MIB.to_string();
    let mut both = [(); 2].map(|()| Checked::start(&program, &[&mib, "3", "offer"]));
    both.iter_mut().for_each(Checked::goes_on);
    let before = both
        .each_ref()
        .map(|one| (state(one.pid()), dump(one.pid())));
    let pids = both.each_ref().map(Checked::pid);
    let has_ksm = has_flag(pids[0], "mg");
    // Again and again: nothing piles up.
    for flags in [&[][..], &["--any"], &[]] {
        attached(&place, flags, &pids);
        wait_for("sharing", || {
            both.iter_mut().for_each(Checked::is_right);
            (count(&json(&place), "pages_sharing") >= MIB * 256 - 16).then_some(())
        });
        for ((pid, one), before) in pids.iter().zip(&mut both).zip(&before) {
            detached(&[*pid]);
            let after = state(*pid);
            assert_eq!(joined(&before.0.0), joined(&after.0));
            assert!(before.0.1 == after.1, "libc's code");
            assert_eq!(before.1, dump(*pid));
            let tracked = ["uw", "um"].map(|flag| has_flag(*pid, flag));
            assert_eq!(tracked, [false; 2], "a userfaultfd tracks its memory");
            assert_eq!(
                has_flag(*pid, "mg"),
                has_ksm,
                "it is offered to the kernel again"
            );
            one.goes_on();
        }
        wait_for("no guests", || {
            (guests_of(&json(&place)) == 0).then_some(())
        });
    }
    let again = detach(&[], &pids[..1]);
    let told = text(&again.stderr);
    assert!(
        !again.status.success() && told.contains("it has no agent"),
        "{told}"
    );
}

/// A program that merges, and another with the same memory, of which the first has lost or moved 2 MiB past libc.
fn without_libc(place: &Place, word: &str) -> [Checked; 2] {
    let program = program(place, &[]);
    let mib = MIB.to_string();
    let pair = [word, "offer"]
        .map(|words| Checked::start(&program, &[&mib, "0", &format!("offer,{words}")]));
    let [mut one, other] = pair;
    attached(place, &[], &[one.pid(), other.pid()]);
    wait_for("sharing", || {
        (count(&json(place), "pages_sharing") >= MIB * 256 + 512 - 16).then_some(())
    });
    one.tell();
    [one, other]
}

/// The agent's table says of such memory that it is merged, until the next sync.
#[test]
fn merged_memory_that_was_unmapped_past_libc_is_no_obstacle() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let _daemon = daemon(&place, &["--merge-period", "1s"]);
    let [mut one, _other] = without_libc(&place, "lose");
    one.says("gone");
    detached(&[one.pid()]);
    one.goes_on();
}

/// A mapping of the store that is left would show what the engine puts there next.
#[test]
fn merged_memory_that_was_moved_past_libc_is_the_programs_own_after_detaching() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let _daemon = daemon(&place, &["--merge-period", "1s"]);
    let [mut one, _other] = without_libc(&place, "stray");
    one.says("moved");
    detached(&[one.pid()]);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", one.pid())).unwrap();
    assert!(!maps.contains("pageone-store"), "{maps}");
    one.tell();
    one.says("same");
    one.goes_on();
}

#[test]
fn whichever_step_of_detaching_fails_the_process_goes_on() {
    if !cfg!(debug_assertions) {
        return;
    }
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "20ms"]);
    let mut one = Checked::start(&program, &["1", "3", "offer,work"]);
    let pid = one.pid();
    let before = state(pid).1;
    const MOST: usize = 200;
    let (mut attached_still, mut detached_all_the_same) = (0, 0);
    attached(&place, &[], &[pid]);
    for step in 1..MOST {
        let what = format!("attach 12 {step} 0");
        let done = detach(&[("PAGEONE_FAULT", &what)], &[pid]);
        one.goes_on();
        let is_detached = state(pid).1 == before;
        assert_eq!(
            done.status.success(),
            is_detached,
            "{what}: {}",
            text(&done.stderr)
        );
        if !is_detached {
            // It serves again.
            attached_still += 1;
            wait_for("a guest", || (guests_of(&json(&place)) == 1).then_some(()));
            continue;
        }
        if !text(&done.stdout).contains("memory of the agent stays") {
            break;
        }
        detached_all_the_same += 1;
        attached(&place, &[], &[pid]);
    }
    // Each jump is a step, and each of the last three leaves some memory.
    assert!(
        (40..MOST - 10).contains(&attached_still),
        "{attached_still}"
    );
    assert_eq!(detached_all_the_same, 3);
}

#[test]
fn an_agent_that_was_not_attached_is_not_detached() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &[]);
    let mut command = pageone();
    command.arg("run").arg("--socket").arg(place.socket());
    let one = Checked::by(command.arg("--").arg(&program).arg("1"), "ready");
    let refused = detach(&[], &[one.pid()]);
    let told = text(&refused.stderr);
    assert!(
        !refused.status.success() && told.contains("LD_PRELOAD"),
        "{told}"
    );
    let stopped = Checked::start(&program, &["1"]);
    attached(&place, &[], &[stopped.pid()]);
    let signal = |signal| {
        let pid = rustix::process::Pid::from_raw(stopped.pid().cast_signed());
        rustix::process::kill_process(pid.expect("a number"), signal).expect("a signal");
    };
    signal(rustix::process::Signal::STOP);
    wait_for("the stop", || {
        let status = fs::read_to_string(format!("/proc/{}/status", stopped.pid()));
        status
            .expect("status")
            .contains("T (stopped)")
            .then_some(())
    });
    let refused = detach(&[], &[stopped.pid()]);
    let told = text(&refused.stderr);
    assert!(
        !refused.status.success() && told.contains("it is stopped"),
        "{told}"
    );
    signal(rustix::process::Signal::CONT);
    detached(&[stopped.pid()]);
    let other = Checked::start(&program, &["1"]);
    let refused = detach(&[], &[other.pid(), u32::MAX]);
    let told = text(&refused.stderr);
    assert!(
        told.contains("it has no agent") && told.contains("no such process"),
        "{told}"
    );
    assert_eq!(told.lines().count(), 2, "a line each: {told}");
}

#[test]
fn what_cannot_be_attached_is_told_with_the_reason() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let refused = |pid: u32, reason: &str| {
        let done = attach(&place, &["--dry-run"], &[pid]);
        let told = text(&done.stderr);
        assert!(
            !done.status.success() && told.contains(reason) && told.lines().count() == 1,
            "{reason}: {told}"
        );
    };
    let fixed = program(&place, &["-static"]);
    let one = Checked::start(&fixed, &["1"]);
    refused(one.pid(), "statically");
    drop(one);
    let other = Checked::start(&program(&place, &[]), &["1"]);
    let held = Held::stop(other.pid(), Duration::from_secs(10));
    let held = held.expect("held").expect("it lives");
    refused(
        other.pid(),
        &format!(
            "process {} (`what_cannot_be_`) traces it",
            sys::process::thread_id()
        ),
    );
    drop(held);
    let told = attached(&place, &["--dry-run"], &[other.pid()]);
    assert!(
        told.contains("would be attached, in the domain uid:")
            && told.contains("it offers no memory yet"),
        "{told}"
    );
    refused(u32::MAX, "no such process");
    let done = attach(&place, &[], &[other.pid()]);
    assert!(!done.status.success(), "there is no daemon");
}

#[test]
fn a_thread_about_to_make_a_call_is_waited_for() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = built(&place, "midway", &[]).expect("a C compiler");
    let _daemon = daemon(&place, &[]);
    for how in [&[][..], &["thread"]] {
        let mut one = Checked::by(Command::new(&program).args(how), "midway");
        let before = state(one.pid());
        let refused = attach(&place, &[], &[one.pid()]);
        let told = text(&refused.stderr);
        assert!(
            !refused.status.success() && told.contains("libc's munmap"),
            "{told}"
        );
        assert!(before == state(one.pid()), "{told}");
        // It comes soon: then the agent does as well.
        let late = attach_command(&place, &[], &[one.pid()])
            .spawn()
            .expect("pageone");
        one.tell();
        one.says("done");
        let told = late.wait_with_output().expect("an end");
        assert!(told.status.success());
        assert!(before.1 != state(one.pid()).1, "libc leads to the agent");
        one.tell();
        assert!(one.0.wait().expect("an end").success());
    }
}

#[test]
fn processes_in_which_no_agent_could_work_are_refused() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let refused = |one: &Checked, reason: &str| {
        let done = attach(&place, &["--dry-run"], &[one.pid()]);
        let told = text(&done.stderr);
        let is_refused = !done.status.success() && told.contains(reason);
        assert!(is_refused, "{reason}: {told}");
    };
    let plain = program(&place, &[]);
    if rustix::process::geteuid().is_root() {
        fs::write(place.socket(), "").expect("a file in the socket's place");
        let hidden = "mount -t tmpfs none \"$1\"; exec \"$2\" 1";
        let kept = place.path().with_extension("kept");
        install(&plain, &kept);
        let mut elsewhere = Command::new("unshare");
        elsewhere.args(["--mount", "sh", "-c", hidden, "sh"]);
        elsewhere.arg(place.path()).arg(&kept);
        refused(&Checked::by(&mut elsewhere, "ready"), "not in its mounts");
        fs::remove_file(&kept).expect("removed");
        // Others may put a socket of theirs there.
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        let mut elsewhere = of_a_user_namespace(&plain, &["1"]);
        let one = Checked::by(&mut elsewhere, "ready");
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).expect("a mode");
        refused(&one, "in another user namespace");
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        let told = attached(&place, &["--dry-run"], &[one.pid()]);
        assert!(told.contains("would be attached"), "{told}");
    } else {
        eprintln!("skipped: another mount namespace takes root");
    }
    let mut left = Checked::start(&plain, &["1", "1", "leave"]);
    wait_for("its first thread to end", || {
        let status = sys::text::about(format!("/proc/{}/status", left.pid())).expect("status");
        status.contains("State:\tZ").then_some(())
    });
    refused(&left, "its first thread has ended");
    left.is_right();
    for flags in [
        &["-fsanitize=address"][..],
        &["-fsanitize=address", "-static-libasan"],
        &["-fsanitize=thread"],
    ] {
        match built(&place, "attached", flags) {
            Some(sanitized) => refused(&Checked::start(&sanitized, &["1"]), "sanitizer"),
            None => common::tools::lacks("sanitizer"),
        }
    }
}

#[test]
fn processes_are_chosen_by_conditions() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let plain = program(&place, &[]);
    let [one, two] = ["chosen", "other"].map(|name| {
        let copy = place.path().join(name);
        install(&plain, &copy);
        Checked::start(&copy, &["1"])
    });
    let _daemon = daemon(&place, &[]);
    let chosen = format!("command=chos?n,executable={}/**", place.path().display());
    let matched = |more: &[&str]| attach(&place, &[more, &["--match", &chosen]].concat(), &[]);
    let dry = text(&matched(&["--dry-run"]).stdout);
    let user = rustix::process::geteuid().as_raw();
    let [line] = dry.lines().collect::<Vec<_>>()[..] else {
        panic!("{dry}");
    };
    assert!(line.starts_with(&one.pid().to_string()), "{line}");
    assert!(
        line.contains(&format!("in the domain uid:{user};")),
        "{line}"
    );
    let policy = place.file("policy.toml", "default = 'refuse'");
    let policy = policy.to_str().expect("a path");
    let refused = matched(&["--dry-run", "--policy", policy]);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("no rule of the policy is for"));
    let told = text(&matched(&[]).stdout);
    assert!(
        told.contains("attached: ") && told.lines().count() == 1,
        "{told}"
    );
    let again = matched(&[]);
    let told = text(&again.stdout);
    assert!(
        again.status.success() && told.contains("an agent already"),
        "{told}"
    );
    let unseen = state(two.pid());
    let none = attach(&place, &["--match", "command=no-such-one"], &[]);
    assert!(!none.status.success());
    assert!(
        text(&none.stderr).contains("no process fits"),
        "{}",
        text(&none.stderr)
    );
    let long = ["--domain", &"x".repeat(70)];
    assert_eq!(attach(&place, &long, &[one.pid()]).status.code(), Some(2));
    let wrong = attach(&place, &["--match", "comand=x"], &[]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("there is no key `comand`"));
    assert!(unseen == state(two.pid()), "the other one is as it was");
}

#[test]
fn agents_are_taken_out_by_conditions() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let plain = program(&place, &[]);
    let [mut one, mut two, three] = ["out-1", "out-2", "stays"].map(|name| {
        let copy = place.path().join(name);
        install(&plain, &copy);
        Checked::start(&copy, &["1"])
    });
    let _daemon = daemon(&place, &[]);
    let all = format!("executable={}/**", place.path().display());
    let matched = |rule: &str, more: &[&str]| {
        let mut command = pageone();
        output(command.args(["detach", "--match", rule]).args(more))
    };
    let none = matched(&all, &[]);
    assert_eq!(none.status.code(), Some(1));
    let none = text(&none.stderr);
    assert!(none.contains("none of the processes that fit"), "{none}");
    attached(&place, &[], &[one.pid()]);
    attached(&place, &[], &[three.pid()]);
    let dry = matched("command=out-?", &["--dry-run"]);
    let told = text(&dry.stdout);
    // The other one that fits has no agent.
    assert!(dry.status.success() && told.lines().count() == 1, "{told}");
    let begins = format!("{} (out-1): would be detached", one.pid());
    assert!(told.starts_with(&begins), "{told}");
    wait_for("the agent to be taken out", || {
        let done = matched("command=out-?", &[]);
        let (told, failed) = (text(&done.stdout), text(&done.stderr));
        assert!(
            done.status.success() || failed.contains("does not stop"),
            "{failed}"
        );
        done.status.success().then(|| {
            assert!(told.starts_with(&format!("{} ", one.pid())), "{told}");
            assert_eq!(told.lines().count(), 1, "{told}");
        })
    });
    let again = text(&detach(&[], &[one.pid()]).stderr);
    assert!(again.contains("it has no agent"), "{again}");
    let other = text(&attach(&place, &["--dry-run"], &[three.pid()]).stderr);
    assert!(other.contains("an agent already"), "{other}");
    let unfit = matched("command=no-such-one", &[]);
    assert!(text(&unfit.stderr).contains("no process fits"));
    one.goes_on();
    two.goes_on();
}

/// The daemon has a policy of its own: which domain that gives, it is asked.
#[test]
fn the_domain_is_the_one_that_the_daemon_gives() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let one = Checked::start(&program(&place, &[]), &["1"]);
    let told = attached(&place, &["--dry-run"], &[one.pid()]);
    let unasked = "no daemon could be asked)";
    assert!(told.contains(unasked), "{told}");
    let user = rustix::process::geteuid().as_raw();
    let rule = format!("[[rule]]\nuid = {user}\ndomain = \"ours\"\nnames = [\"blue\"]\n");
    let policy = place.file("policy.toml", &rule);
    let policy = policy.to_str().expect("a path");
    let _daemon = daemon(&place, &["--policy", policy]);
    for (flags, domain) in [
        (&["--dry-run"][..], "name:ours;"),
        (&["--dry-run", "--domain", "blue"], "name:blue;"),
    ] {
        let told = attached(&place, flags, &[one.pid()]);
        assert!(told.contains(&format!("in the domain {domain}")), "{told}");
    }
    let mut blue = attach_command(&place, &["--dry-run"], &[one.pid()]);
    let told = output(blue.env("PAGEONE_DOMAIN", "blue"));
    let told = text(&told.stdout);
    assert!(told.contains("in the domain name:blue;"), "{told}");
    let before = state(one.pid());
    for flags in [&["--dry-run", "--domain", "red"][..], &["--domain", "red"]] {
        let refused = attach(&place, flags, &[one.pid()]);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(
            said.contains("no rule of the policy gives the domain `red`"),
            "{said}"
        );
    }
    assert!(before == state(one.pid()), "it is as it was");
    let told = attached(&place, &[], &[one.pid()]);
    assert!(told.contains("; in the domain name:ours"), "{told}");
}

/// A process with a wish: the variable of the domain in the environment it was started with.
fn wishing(program: &Path, wish: Option<&std::ffi::OsStr>) -> Checked {
    let mut command = Command::new(program);
    command
        .args(["1", "2", "offer"])
        .env_remove("PAGEONE_DOMAIN");
    if let Some(wish) = wish {
        command.env("PAGEONE_DOMAIN", wish);
    }
    Checked::by(&mut command, "ready")
}

/// As for a program that loads the agent itself, the policy has to give the domain.
#[test]
fn a_process_may_wish_for_a_domain_as_it_was_started() {
    use std::os::unix::ffi::OsStrExt;
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let wishing = |wish: Option<&[u8]>| wishing(&program, wish.map(std::ffi::OsStr::from_bytes));
    let user = rustix::process::geteuid().as_raw();
    let rule =
        format!("[[rule]]\nuid = {user}\ndomain = \"ours\"\nnames = [\"blue\", \"green\"]\n");
    let policy = place.file("policy.toml", &rule);
    let _daemon = daemon(&place, &["--policy", policy.to_str().expect("a path")]);
    for (wish, flags, domain) in [
        (None, &[][..], "name:ours"),
        (Some(&b""[..]), &[], "name:ours"),
        (Some(b"blue"), &[], "name:blue"),
        // Who attaches it decides.
        (Some(b"red"), &["--domain", "green"], "name:green"),
    ] {
        let mut one = wishing(wish);
        let given = format!("in the domain {domain}");
        let told = attached(&place, &[flags, &["--dry-run"]].concat(), &[one.pid()]);
        assert!(told.contains(&format!("{given};")), "{told}");
        let told = attached(&place, flags, &[one.pid()]);
        assert!(told.trim_end().ends_with(&given), "{told}");
        wait_for("the guest in its domain", || {
            let status = json(&place);
            let guests = status["guests"].as_array().expect("guests");
            let own = guests.iter().find(|guest| guest["pid"] == one.pid());
            own.is_some_and(|own| own["domain"] == domain).then_some(())
        });
        one.goes_on();
    }
    for (wish, reason) in [
        (&b"red"[..], "no rule of the policy gives the domain `red`"),
        (b"\xff", "its PAGEONE_DOMAIN"),
        (&[b'x'; 64], "its PAGEONE_DOMAIN"),
    ] {
        let mut one = wishing(Some(wish));
        one.goes_on();
        let before = state(one.pid());
        let refused = attach(&place, &[], &[one.pid()]);
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains(reason), "{said}");
        assert!(before == state(one.pid()), "it is as it was: {said}");
        one.goes_on();
    }
}

/// A daemon that was started with a domain in its environment has said nothing by that: its rules and the wishes of processes count.
#[test]
fn a_domain_in_the_daemons_environment_is_nobodys_wish() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let program = program(&place, &[]);
    let user = rustix::process::geteuid().as_raw();
    let names = "domain = \"ours\"\nnames = [\"blue\", \"wide\"]";
    let policy = place.file("policy.toml", &format!("[[rule]]\nuid = {user}\n{names}\n"));
    let rule = format!(
        "[[attach]]\nexecutable = '{}'\nafter = '0s'",
        program.display()
    );
    let config = place.file("pageone.toml", &rule);
    let mut command = pageone();
    command.env("PAGEONE_DOMAIN", "wide");
    let policy = ["--policy", policy.to_str().expect("a path")];
    let (_daemon, _log) = logging_by(command, &place, &config, &policy);
    for (wish, domain) in [(Some("blue"), "name:blue"), (None, "name:ours")] {
        let mut one = wishing(&program, wish.map(std::ffi::OsStr::new));
        wait_for("the guest", || {
            let status = json(&place);
            let guests = status["guests"].as_array().expect("guests");
            let own = guests.iter().find(|guest| guest["pid"] == one.pid())?;
            assert_eq!(own["domain"], domain);
            Some(())
        });
        one.goes_on();
    }
}

/// What a daemon says, to a file.
fn logging(place: &Place, config: &Path) -> (common::Running, PathBuf) {
    logging_by(pageone(), place, config, &[])
}

/// The same of a command with an environment, and with more flags.
fn logging_by(
    mut command: Command,
    place: &Place,
    config: &Path,
    flags: &[&str],
) -> (common::Running, PathBuf) {
    let log = place.file("log", "");
    command.args(["daemon", "--no-keep", "--merge-period", "50ms", "--socket"]);
    command
        .arg(place.socket())
        .arg("--config")
        .arg(config)
        .args(flags);
    let running = common::Running::start(command.stderr(fs::File::create(&log).expect("a log")));
    wait_for("the daemon", || {
        common::status(place).status.success().then_some(())
    });
    (running, log)
}

/// Waits for a line with all these words.
fn wait_for_line(log: &Path, words: &[&str]) {
    wait_for("the log", || {
        let said = fs::read_to_string(log).expect("a log");
        let has = |line: &str| words.iter().all(|word| line.contains(word));
        said.lines().any(has).then_some(())
    });
}

/// Starts a copy of a program that has another name.
fn start_as(place: &Place, program: &Path, name: &str, args: &[&str]) -> Checked {
    let copy = place.path().join(name);
    if !copy.exists() {
        install(program, &copy);
    }
    Checked::start(&copy, args)
}

#[test]
fn a_daemon_attaches_the_processes_that_its_rules_name() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let plain = program(&place, &[]);
    let mib = MIB.to_string();
    let start = |name: &str, words: &str| start_as(&place, &plain, name, &[&mib, "4", words]);
    let folder = place.path().display().to_string();
    let rule = |name: &str, more: &str| {
        format!("[[attach]]\nexecutable = '{folder}/{name}'\nany = true\n{more}\n")
    };
    let config = place.file("pageone.toml", &rule("early-*", "after = '0s'"));
    // One that runs before the daemon does, one that cannot be attached, one that no rule names.
    let mut early = start("early-1", "work");
    let filtered = start("early-2", "lonely");
    let mut late = start("late", "work");
    let unseen = state(late.pid()).1;
    let (daemon, log) = logging(&place, &config);
    let said = |words: &[&str]| wait_for_line(&log, words);
    let pid = |one: &Checked| one.pid().to_string();
    said(&["by rule 1 of [[attach]]", &pid(&early), "attached: "]);
    said(&[
        &pid(&filtered),
        "is not attached",
        "seccomp filter",
        "tried again",
    ]);
    assert!(unseen == state(late.pid()).1, "no rule names it");
    // Another rule, and one that it hides; a mistake would leave the rules as they were.
    let reload = || {
        let pid = rustix::process::Pid::from_raw(daemon.0.id().cast_signed());
        rustix::process::kill_process(pid.expect("a pid"), rustix::process::Signal::HUP)
            .expect("SIGHUP");
    };
    fs::write(&config, "[[attach]]\n").expect("written");
    reload();
    said(&["stay as they were", "it means no process"]);
    fs::write(&config, rule("late", "after = '1s'") + &rule("*", "")).expect("written");
    reload();
    said(&["by rule 1 of [[attach]]", &pid(&late), "attached: "]);
    // One that starts now, and all that are equal are shared.
    let mut next = start("late", "work");
    said(&["by rule 1 of [[attach]]", &pid(&next), "attached: "]);
    wait_for("sharing", || {
        [&mut early, &mut late, &mut next]
            .into_iter()
            .for_each(Checked::is_right);
        (count(&json(&place), "pages_sharing") >= 2 * STILL).then_some(())
    });
    // No agent comes twice, also not by the next daemon.
    drop(daemon);
    let (_daemon, log) = logging(&place, &config);
    wait_for("the log", || {
        let said = fs::read_to_string(&log).expect("a log");
        said.contains("an agent already").then_some(())
    });
    [&mut early, &mut late, &mut next]
        .into_iter()
        .for_each(Checked::goes_on);
}

/// The words that the daemon's log has of a process that it has attached.
fn wait_for_attached(log: &Path, one: &Checked) {
    let pid = format!("]: {} (", one.pid());
    wait_for_line(log, &["of [[attach]", &pid, "attached: "]);
}

#[test]
fn a_rule_leaves_a_process_alone_until_it_has_lived_for_the_rules_time() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let plain = program(&place, &[]);
    let start = |name: &str| start_as(&place, &plain, name, &["1", "2", "offer"]);
    let folder = place.path().display();
    let rules = [("patient", "1h"), ("prompt", "0s")].map(|(name, after)| {
        format!("[[attach]]\nexecutable = '{folder}/{name}'\nafter = '{after}'\n")
    });
    let mut patient = start("patient");
    let before = state(patient.pid()).1;
    let (_daemon, log) = logging(&place, &place.file("pageone.toml", &rules.concat()));
    // Each begins when the one before is attached, so a later look finds it. At the third the daemon has looked twice before.
    let mut prompt = Vec::new();
    for _ in 0..3 {
        let one = start("prompt");
        wait_for_attached(&log, &one);
        prompt.push(one);
    }
    assert!(before == state(patient.pid()).1, "libc's code");
    wait_for("the guests", || {
        (guests_of(&json(&place)) == prompt.len()).then_some(())
    });
    let told = attached(&place, &["--dry-run"], &[patient.pid()]);
    assert!(told.contains("would be attached"), "{told}");
    prompt.iter_mut().for_each(Checked::goes_on);
    patient.goes_on();
}

#[test]
fn a_rule_offers_memory_that_is_to_be_of_huge_pages_if_it_says_so() {
    let Some(place) = place_to_trace() else {
        return;
    };
    if !Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        return eprintln!("skipped: this kernel has no huge pages");
    }
    let plain = program(&place, &[]);
    let mib = MIB.to_string();
    let start = |name: &str| start_as(&place, &plain, name, &[&mib, "0", "huge"]);
    let folder = place.path().display();
    let rules = [("narrow", ""), ("wide", "any_huge = true\n")].map(|(name, more)| {
        format!("[[attach]]\nexecutable = '{folder}/{name}'\nafter = '0s'\nany = true\n{more}")
    });
    let (_daemon, log) = logging(&place, &place.file("pageone.toml", &rules.concat()));
    let attached = |name: &str| {
        let both = [(); 2].map(|()| start(name));
        both.iter().for_each(|one| wait_for_attached(&log, one));
        both
    };
    // These are guests for longer, as far as they are.
    let (mut narrow, mut wide) = (attached("narrow"), attached("wide"));
    wait_for("sharing", || {
        (count(&json(&place), "pages_sharing") >= STILL).then_some(())
    });
    let status = json(&place);
    let guests = status["guests"].as_array().expect("guests");
    let pages = |one: &Checked| {
        let own = guests.iter().find(|guest| guest["pid"] == one.pid());
        own.map_or(0, |own| count(own, "pages"))
    };
    assert!(narrow.iter().all(|one| pages(one) < STILL), "{status}");
    assert!(wide.iter().all(|one| pages(one) >= STILL), "{status}");
    [&mut narrow, &mut wide]
        .into_iter()
        .flatten()
        .for_each(Checked::is_right);
}

/// How often a process is killed while a command works on it.
const KILLS: u64 = 24;

/// Kills processes while a command works on them, each at another moment. The command ends, and says why it failed if it did.
fn kill_meanwhile(place: &Place, prepare: impl Fn(u32), work: impl Fn(u32) -> Command) {
    let program = program(place, &[]);
    let (mut done, mut gone) = (0, 0);
    for time in 0..KILLS {
        let mut one = Checked::start(&program, &["2", "8", "offer,work"]);
        prepare(one.pid());
        let mut command = work(one.pid());
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = common::Running::start(command);
        // Up to 200 ms, with most of the moments early.
        std::thread::sleep(Duration::from_micros(time * time * 378));
        one.0.kill().expect("killed");
        // Of the others the parent takes no notice for now.
        if time % 2 == 0 {
            wait_for("the program to end", || one.0.try_wait().expect("wait"));
        }
        let code = running.end();
        let said = running.stderr();
        match code {
            0 => done += 1,
            1 if tells_of_an_end(&said) => gone += 1,
            _ => panic!("try {time}: {code}: {said}"),
        }
        assert_eq!(at_work_on(one.pid()), [""; 0], "try {time}");
    }
    eprintln!("{done} done before, {gone} gone meanwhile");
    // The first is killed at once.
    assert!(gone > 0);
    wait_for("the guests to be gone", || {
        (guests_of(&json(place)) == 0).then_some(())
    });
}

/// Whether a command says of a process, in one line, that there is none any more.
fn tells_of_an_end(said: &str) -> bool {
    let words = ["no such process", "the process is gone"];
    said.lines().count() == 1 && words.iter().any(|word| said.contains(word))
}

/// The command lines of those that attach or detach a process.
fn at_work_on(pid: u32) -> Vec<String> {
    let pid = pid.to_string();
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| text(&line).replace('\0', " "));
    let is_at_work = |line: &String| {
        let mut words = line.split_whitespace();
        let verb = words.nth(1);
        matches!(verb, Some("attach" | "detach")) && words.any(|word| word == pid)
    };
    lines.filter(is_at_work).collect()
}

#[test]
fn a_process_that_is_killed_while_it_is_attached_is_told_as_gone() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let _daemon = daemon(&place, &["--merge-period", "20ms"]);
    kill_meanwhile(&place, |_| {}, |pid| attach_command(&place, &[], &[pid]));
}

#[test]
fn a_process_that_is_killed_while_it_is_detached_is_told_as_gone() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let _daemon = daemon(&place, &["--merge-period", "20ms"]);
    let prepare = |pid| drop(attached(&place, &[], &[pid]));
    let work = |pid: u32| {
        let mut command = pageone();
        command.arg("detach").arg(pid.to_string());
        command
    };
    kill_meanwhile(&place, prepare, work);
}

#[test]
fn another_process_with_the_number_is_not_attached() {
    let Some(place) = place_to_trace() else {
        return;
    };
    let one = Checked::start(&program(&place, &[]), &["1"]);
    let _daemon = daemon(&place, &[]);
    let before = state(one.pid());
    let began = sys::usage::began(one.pid()).expect("a time");
    let refused = attach(&place, &["--began", &(began - 1).to_string()], &[one.pid()]);
    let told = text(&refused.stderr);
    assert!(
        !refused.status.success() && told.contains("is gone"),
        "{told}"
    );
    assert!(before == state(one.pid()), "it is as it was");
    attached(&place, &["--began", &began.to_string()], &[one.pid()]);
}

#[test]
fn a_process_in_a_container_is_attached() {
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: a container takes root");
    };
    let plain = program(&place, &[]);
    let mib = MIB.to_string();
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mut outside = Checked::start(&plain, &[&mib, "4", "work"]);
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--mount",
        "--pid",
        "--ipc",
        "--uts",
        "--net",
        "--fork",
        "--kill-child",
    ]);
    unshare.args(["sh", "-c", "mount -t proc proc /proc; exec \"$@\"", "sh"]);
    unshare.arg(&plain).args([&mib, "4", "work"]);
    let mut inside = Checked::by(&mut unshare, "ready");
    let first = common::child(inside.pid()).expect("the first process of the container");
    attached(&place, &["--any"], &[outside.pid(), first]);
    wait_for("sharing", || {
        [&mut outside, &mut inside]
            .into_iter()
            .for_each(Checked::is_right);
        (count(&json(&place), "pages_sharing") >= STILL).then_some(())
    });
    outside.goes_on();
    let detached = detach(&[], &[first]);
    assert!(detached.status.success(), "{}", text(&detached.stderr));
    [&mut outside, &mut inside]
        .into_iter()
        .for_each(Checked::is_right);
}

/// Has a root of its own, as containers have: folders of the host's programs, and nothing of the daemon's.
const CONTAINER: &str = r#"
set -e
mount -t tmpfs none "$ROOT"
for name in usr lib lib64 bin; do
  if [ -L /$name ]; then ln -s "$(readlink /$name)" "$ROOT/$name"
  elif [ -d /$name ]; then mkdir "$ROOT/$name"; mount --rbind /$name "$ROOT/$name"
  fi
done
mkdir "$ROOT/proc" "$ROOT/run" "$ROOT/host"
cp "$PROGRAM" "$ROOT/contained"
mount -t proc proc "$ROOT/proc"
cd "$ROOT"
pivot_root . host
umount -l /host
exec /contained "$@"
"#;

/// The program in a container, and the number of that one's first process.
fn contained(place: &Place, words: &[&str]) -> (Checked, u32) {
    contained_in(place, &[], words)
}

/// The same, with more namespaces.
fn contained_in(place: &Place, more: &[&str], words: &[&str]) -> (Checked, u32) {
    let root = place.path().join("root");
    fs::create_dir_all(&root).expect("a folder");
    let mut unshare = Command::new("unshare");
    unshare.args(more);
    unshare.args(["--mount", "--propagation", "private", "--pid", "--ipc"]);
    unshare.args(["--uts", "--net", "--fork", "--kill-child", "sh", "-c"]);
    unshare.args([CONTAINER, "sh"]).args(words);
    unshare
        .env("ROOT", &root)
        .env("PROGRAM", program(place, &[]));
    let inside = Checked::by(&mut unshare, "ready");
    let first = common::child(inside.pid()).expect("the first process of the container");
    (inside, first)
}

#[test]
fn a_container_with_nothing_of_ours_is_attached() {
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: a container takes root");
    };
    let mib = MIB.to_string();
    let daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mut outside = Checked::start(&program(&place, &[]), &[&mib, "4", "work"]);
    let (mut inside, first) = contained(&place, &[&mib, "4", "work"]);
    let refused = attach(&place, &["--any"], &[first]);
    let why = text(&refused.stderr);
    assert!(
        !refused.status.success() && why.contains("--mount"),
        "{why}"
    );
    let there = format!("/proc/{first}/root{}", place.socket().display());
    let would = attached(&place, &["--any", "--mount", "--dry-run"], &[first]);
    assert!(
        would.contains("would be mounted") && fs::metadata(&there).is_err(),
        "{would}"
    );
    let told = attached(&place, &["--any", "--mount"], &[outside.pid(), first]);
    // Other things lie in that folder: they are not the container's.
    let folder = Path::new(&there).parent().expect("a folder");
    assert_eq!(fs::read_dir(folder).expect("entries").count(), 1, "{told}");
    assert_eq!(told.matches("is mounted").count(), 1, "{told}");
    wait_for("sharing", || {
        [&mut outside, &mut inside]
            .into_iter()
            .for_each(Checked::is_right);
        (count(&json(&place), "pages_sharing") >= STILL).then_some(())
    });
    detached(&[first]);
    outside.goes_on();
    inside.is_right();
    drop(daemon);
}

#[test]
fn root_makes_nothing_in_mounts_that_a_user_may_have_made() {
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: a container takes root");
    };
    let _daemon = daemon(&place, &[]);
    let (mut inside, first) =
        contained_in(&place, &["--user", "--map-root-user"], &["8", "4", "work"]);
    let mounts = || fs::read_to_string(format!("/proc/{first}/mountinfo")).expect("mounts");
    let before = mounts();
    let refused = attach(&place, &["--any", "--mount"], &[first]);
    let why = text(&refused.stderr);
    assert!(
        !refused.status.success() && why.contains("a user namespace"),
        "{why}"
    );
    let made = format!("/proc/{first}/root{}", place.path().display());
    assert!(fs::metadata(&made).is_err(), "{made}");
    assert_eq!(mounts(), before);
    inside.is_right();
}

#[test]
fn a_rule_attaches_containers_which_find_the_next_daemon() {
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: a container takes root");
    };
    let mib = MIB.to_string();
    let (mut inside, first) = contained(&place, &[&mib, "4", "work"]);
    // Its folder has nothing but the socket and its lock.
    let service = Place::new();
    let rule = "[[attach]]\ncommand = 'contained'\nany = true\nmount = true\nafter = '0s'\n";
    let config = place.file("pageone.toml", rule);
    let start = || {
        daemon(
            &service,
            &[
                "--merge-period",
                "50ms",
                "--config",
                &config.display().to_string(),
            ],
        )
    };
    let is_guest = |inside: &mut Checked| {
        wait_for("the guest", || {
            inside.is_right();
            let status = json(&service);
            let guests = status["guests"].as_array().expect("guests");
            guests
                .iter()
                .any(|guest| guest["pid"] == first)
                .then_some(())
        });
    };
    let first_daemon = start();
    is_guest(&mut inside);
    let folder = format!("/proc/{first}/root{}", service.path().display());
    let written = fs::write(format!("{folder}/x"), "");
    assert!(written.is_err_and(|error| error.raw_os_error() == Some(libc::EROFS)));
    drop(first_daemon);
    let _next = start();
    is_guest(&mut inside);
}

/// The first process of a user namespace of a user without rights: root has no number there.
fn of_a_user_namespace(program: &Path, args: &[&str]) -> Command {
    const STRANGER: &str = "61004";
    let mut command = Command::new("setpriv");
    command.args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"]);
    command.args(["unshare", "--user", "--map-root-user"]);
    command.arg(program).args(args);
    command
}

#[test]
fn a_process_in_another_user_namespace_is_attached_where_root_alone_can_serve_it() {
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: another user's namespace takes root");
    };
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let plain = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mib = MIB.to_string();
    let start = || {
        Checked::by(
            &mut of_a_user_namespace(&plain, &[&mib, "4", "work"]),
            "ready",
        )
    };
    let mut both = [start(), start()];
    let pids = both.each_ref().map(Checked::pid);
    let before = state(pids[0]).1;
    attached(&place, &["--any"], &pids);
    wait_for("sharing", || {
        both.iter_mut().for_each(Checked::is_right);
        (count(&json(&place), "pages_sharing") >= STILL).then_some(())
    });
    let status = json(&place);
    assert_eq!(status["guests"][0]["domain"].as_str(), Some("uid:61004"));
    detached(&pids);
    both.iter_mut().for_each(Checked::goes_on);
    assert!(before == state(pids[0]).1, "libc's code");
}

/// Whether the kernel shows filters here; if not, says so.
fn sees_filters() -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let sees = rustix::process::geteuid().is_root() && status.contains("\nSeccomp:\t0\n");
    if !sees {
        eprintln!("skipped: others' filters are shown to root without a filter");
    }
    sees
}

const KILL: u32 = 0x8000_0000;
const TRAP: u32 = 0x0003_0000;
const FAIL: u32 = 0x0005_0001;

#[test]
fn a_process_whose_filters_allow_all_is_attached() {
    let Some(place) = place_to_trace().filter(|_| sees_filters()) else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mib = MIB.to_string();
    // The second kills for a call that no thread makes here.
    let (uselib, kill) = (libc::SYS_uselib.to_string(), KILL.to_string());
    let start = |words: &str| Checked::start(&program, &[&mib, "4", words, &uselib, &kill]);
    let mut both = [start("offer,work,filter"), start("offer,work,fork,filter")];
    let pids = both.each_ref().map(Checked::pid);
    let before = pids.map(state);
    let told = attached(&place, &["--dry-run"], &pids);
    assert!(told.contains("seccomp filters allow"), "{told}");
    for _ in 0..2 {
        attached(&place, &[], &pids);
        wait_for("sharing", || {
            both.iter_mut().for_each(Checked::is_right);
            (count(&json(&place), "pages_sharing") >= STILL).then_some(())
        });
        both.iter_mut().for_each(Checked::goes_on);
        for (pid, before) in pids.into_iter().zip(&before) {
            detached(&[pid]);
            assert!(before.1 == state(pid).1, "libc's code");
        }
        both.iter_mut().for_each(Checked::goes_on);
    }
}

/// Docker's default profile has no call for memory's nodes without CAP_SYS_NICE: no memory that had none before can get any.
#[test]
fn a_process_under_dockers_profile_is_attached_if_its_memory_has_no_nodes() {
    let Some(place) = place_to_trace().filter(|_| sees_filters()) else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mib = MIB.to_string();
    let start = |words: &str| Checked::start(&program, &[&mib, "4", words]);
    let mut both = [start("work,docker"), start("work,fork,docker")];
    let pids = both.each_ref().map(Checked::pid);
    attached(&place, &["--any"], &pids);
    wait_for("sharing", || {
        both.iter_mut().for_each(Checked::is_right);
        (count(&json(&place), "pages_sharing") >= STILL).then_some(())
    });
    both.iter_mut().for_each(Checked::goes_on);
    detached(&pids);
    both.iter_mut().for_each(Checked::goes_on);
    if !Path::new("/proc/self/numa_maps").exists() {
        return eprintln!("skipped: a kernel without nodes");
    }
    for words in ["docker,policy", "docker,mine"] {
        let mut one = start(words);
        one.goes_on();
        let before = state(one.pid());
        let done = attach(&place, &["--any"], &[one.pid()]);
        let told = text(&done.stderr);
        let is_refused = !done.status.success() && told.contains("has the NUMA policy bind:0");
        assert!(is_refused, "{words}: {told}");
        assert!(before == state(one.pid()), "{words}: it is as it was");
        one.goes_on();
    }
}

/// Each of them in turn kills, or fails, in a process that makes none of these itself; to hold it may have it go on by
/// restart_syscall.
#[test]
fn a_filter_that_refuses_a_call_of_the_agents_is_never_tried() {
    use sys::filter::calls::{ATTACH, CALLS, Call};
    let Some(place) = place_to_trace().filter(|_| sees_filters()) else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let actions = [KILL, TRAP, FAIL].into_iter().cycle();
    // The program's own threads wait in read.
    let numbers: std::collections::BTreeMap<i64, &Call> = CALLS
        .iter()
        .chain(ATTACH)
        .filter(|call| call.name != "read")
        .map(|call| (call.number, call))
        .collect();
    let restart = libc::SYS_restart_syscall;
    let more = [
        (restart, KILL),
        (restart, FAIL),
        (libc::SYS_userfaultfd, FAIL),
    ];
    let each = numbers.keys().copied().zip(actions).chain(more);
    for (number, action) in each {
        let name = numbers[&number].name;
        let spared = numbers[&number].is_spared() && action == FAIL;
        let words = [number.to_string(), action.to_string()];
        let when = match number == restart {
            true => "filter,nap",
            false => "filter",
        };
        let mut one = Checked::start(&program, &["1", "3", when, &words[0], &words[1]]);
        one.goes_on();
        let before = state(one.pid());
        let done = attach(&place, &["--any"], &[one.pid()]);
        let told = text(&done.stderr);
        assert_eq!(done.status.success(), spared, "{name}: {told}");
        if spared {
            detached(&[one.pid()]);
        } else {
            assert!(told.contains(&format!("let {name}(2) be made")), "{told}");
            assert_eq!(before.0, state(one.pid()).0, "{name}");
        }
        assert!(before.1 == state(one.pid()).1, "{name}: libc's code");
        one.goes_on();
    }
}

#[test]
fn a_thread_with_a_filter_of_its_own_is_found() {
    let Some(place) = place_to_trace().filter(|_| sees_filters()) else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &[]);
    let (number, kill) = (libc::SYS_mremap.to_string(), KILL.to_string());
    for (more, reason) in [
        (&[][..], "has other seccomp filters"),
        (&[&number, &kill], "let mremap(2) be made"),
    ] {
        let args = [
            &["1", "2", "lonely"],
            &more.iter().map(|word| word.as_str()).collect::<Vec<_>>()[..],
        ]
        .concat();
        let mut one = Checked::start(&program, &args);
        one.goes_on();
        let before = state(one.pid());
        let done = attach(&place, &["--any"], &[one.pid()]);
        let told = text(&done.stderr);
        assert!(!done.status.success() && told.contains(reason), "{told}");
        assert!(before == state(one.pid()), "it is as it was");
        one.goes_on();
    }
}

/// A filter that another thread puts on all of them, while the agent comes: it is found, or seen by a hook.
#[test]
fn a_filter_that_comes_meanwhile_costs_no_life() {
    let Some(place) = place_to_trace().filter(|_| sees_filters()) else {
        return;
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "20ms"]);
    let (mut found, mut seen) = (0, 0);
    // What the attacher asks for before anything else, and last.
    for time in 0..24_u64 {
        let number = [libc::SYS_mmap, libc::SYS_mprotect][usize::from(time % 2 == 0)];
        let words = [number.to_string(), KILL.to_string()];
        let mut one = Checked::start(&program, &["1", "2", "offer,later", &words[0], &words[1]]);
        let late = attach_command(&place, &[], &[one.pid()])
            .spawn()
            .expect("pageone");
        // Microseconds. It takes some milliseconds until the process is held, and a second on a busy machine.
        let delay = time * 40_000;
        writeln!(one.0.stdin.as_ref().expect("its input"), "{delay}").expect("a line");
        let told = late.wait_with_output().expect("an end");
        one.says("installed");
        match told.status.success() {
            true => seen += 1,
            false => found += 1,
        }
        one.goes_on();
    }
    eprintln!("{found} found, {seen} seen by a hook");
}

/// It is a guest of this user's whose pages are shared, and goes on, also when it is detached.
fn serves_as(place: &Place, one: &mut Checked, user: u32) {
    wait_for("a guest with merged pages", || {
        one.is_right();
        let status = json(place);
        let guests = status["guests"].as_array().expect("guests");
        let own = guests.iter().find(|guest| guest["pid"] == one.pid());
        let is_its = own.is_some_and(|own| own["uid"] == user);
        (is_its && count(&status, "pages_sharing") >= STILL).then_some(())
    });
    one.goes_on();
    detached(&[one.pid()]);
    one.goes_on();
}

/// nginx and its like: root at the start, and another user when they work.
#[test]
fn a_process_that_gave_up_its_rights_is_served_or_is_as_it_was() {
    let Some(place) = place_to_trace().filter(|_| sees_filters()) else {
        return;
    };
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let mib = MIB.to_string();
    let start_with = |threads: &str, words: &str| {
        let words = format!("offer,{words}");
        let mut one = Checked::start(&program, &[&mib, threads, &words]);
        one.goes_on();
        one
    };
    // Of no_new_privs each thread has its own.
    let start = |words: &str| start_with(if words.contains("bound") { "0" } else { "3" }, words);
    for (words, user) in [
        ("bound", 0),
        // Of root's own processes it cannot be told, and no other user's may see it.
        ("secret", 0),
        ("user,open", 61004),
        ("user,bound,open", 61004),
        ("user,bound,open,filter", 61004),
    ] {
        let (mut one, mut other) = (start(words), start(words));
        let pids = [one.pid(), other.pid()];
        let before = pids.map(|pid| state(pid).1);
        attached(&place, &[], &pids);
        serves_as(&place, &mut one, user);
        detached(&pids[1..]);
        other.goes_on();
        assert!(
            before == pids.map(|pid| state(pid).1),
            "{words}: libc's code"
        );
    }
    const DRY: &[&[&str]] = &[&["--dry-run"], &[]];
    let refused = |mut one: Checked, all: &[&[&str]], reason: &str| {
        let before = state(one.pid());
        for flags in all {
            let done = attach(&place, flags, &[one.pid()]);
            let said = text(&done.stderr);
            let is_refused = !done.status.success() && said.contains(reason);
            assert!(is_refused, "{reason}: {said}");
            assert!(before == state(one.pid()), "it is as it was: {said}");
        }
        one.goes_on();
    };
    refused(start("user"), DRY, "its memory is a secret");
    refused(start("user,bound"), DRY, "its memory is a secret");
    refused(start("jail"), DRY, "the daemon's socket");
    refused(start("jail,user,bound,open"), DRY, "the daemon's socket");
    // What is found out when it is held. The filter names the first call that its list lacks, and would end it for that.
    refused(start("user,open,tight"), &[&[]], "does not let");
    refused(start_with("3", "bound"), &[&[]], "no_new_privs");
}

/// The kernel lists the groups of each thread, of which there may be 65536: hundreds of such threads would keep root's command for minutes,
/// and stand still meanwhile.
#[test]
fn threads_in_sixty_thousand_groups_keep_root_waiting_for_seconds_only() {
    const GROUPS: u32 = 65_536;
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: to be in many groups takes root");
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &[]);
    let in_groups = || {
        let groups: Vec<_> = (1..=GROUPS).map(rustix::process::Gid::from_raw).collect();
        rustix::thread::set_thread_groups(&groups).expect("groups");
        Checked::start(&program, &["1", "600", ""])
    };
    let mut one = std::thread::scope(|scope| scope.spawn(in_groups).join().expect("a thread"));
    let before = state(one.pid()).1;
    for flags in [&["--dry-run"][..], &[]] {
        let done = attach(&place, flags, &[one.pid()]);
        let said = text(&done.stderr);
        assert!(
            !done.status.success() && said.contains("in so many groups"),
            "{said}"
        );
    }
    assert!(before == state(one.pid()).1, "it is as it was");
    one.is_right();
}

/// A root directory in which there is the daemon's socket, and nothing of the kernel's.
#[test]
fn a_process_in_a_root_without_proc_is_refused_and_as_it_was() {
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: another root takes root");
    };
    let program = program(&place, &[]);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    // The socket at the same path: by another name of it (link(2)).
    let pit = place.path().join("pit");
    let there = pit.join(place.path().strip_prefix("/").expect("an absolute path"));
    fs::create_dir_all(&there).expect("a folder");
    let socket = there.join(place.socket().file_name().expect("a name"));
    fs::hard_link(place.socket(), &socket).expect("the socket's other name");
    let mut one = Checked::start(
        &program,
        &["1", "3", "offer,pit", pit.to_str().expect("a path")],
    );
    one.goes_on();
    let before = state(one.pid());
    let done = attach(&place, &[], &[one.pid()]);
    let said = text(&done.stderr);
    assert!(!done.status.success() && said.contains("/proc"), "{said}");
    assert!(before == state(one.pid()), "it is as it was: {said}");
    one.goes_on();
}

#[test]
fn strangers_whom_a_rule_names_hold_up_no_others_and_share_with_none() {
    use std::os::unix::process::CommandExt;
    const STRANGER: u32 = 61004;
    const HONEST: u32 = 61001;
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: processes of other users take root");
    };
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let plain = program(&place, &[]);
    let mib = MIB.to_string();
    let start = |user: u32, words: &str| {
        let mut command = Command::new(&plain);
        command.args([&mib, "0", words]).uid(user).gid(user);
        Checked::by(&mut command, "ready")
    };
    // To find out that a thread does not stop takes 5 s, for each of these.
    let waiting = [(); 6].map(|()| start(STRANGER, "vfork"));
    let folder = place.path().display();
    let rule = format!("[[attach]]\nexecutable = '{folder}/*'\nany = true\nafter = '0s'");
    let (_daemon, log) = logging(&place, &place.file("pageone.toml", &rule));
    let said = || fs::read_to_string(&log).expect("a log");
    wait_for("a stranger's process to be tried", || {
        said().contains("does not stop").then_some(())
    });
    let mut equal = [start(HONEST, ""), start(STRANGER, "")];
    let line = |one: &Checked, word: &str| {
        let pid = one.pid().to_string();
        let has = |line: &&str| line.contains(&pid) && line.contains(word);
        said().lines().any(|line| has(&line))
    };
    wait_for("the honest process to be attached", || {
        line(&equal[0], "attached: ").then_some(())
    });
    let tried = waiting.iter().filter(|one| line(one, "does not stop"));
    assert!(tried.count() <= 2, "{}", said());
    drop(waiting);
    wait_for("the stranger's turn", || {
        line(&equal[1], "attached: ").then_some(())
    });
    wait_for("their memory to be in the index", || {
        let status = json(&place);
        (guests_of(&status) == 2 && count(&status, "pages_unshared") >= 2 * STILL).then_some(())
    });
    let status = json(&place);
    assert_eq!(count(&status, "pages_sharing"), 0, "{status}");
    let guests = status["guests"].as_array().expect("guests").iter();
    let domains: Vec<_> = guests.map(|guest| guest["domain"].as_str()).collect();
    assert!(domains.contains(&Some("uid:61001")), "{domains:?}");
    assert!(domains.contains(&Some("uid:61004")), "{domains:?}");
    equal.iter_mut().for_each(Checked::is_right);
}

/// Does something as a user: in a thread of its own, whose ids alone are changed.
fn as_user<T: Send>(user: u32, act: impl FnOnce() -> T + Send) -> T {
    let changed = || {
        let user = rustix::process::Uid::from_raw(user);
        rustix::thread::set_thread_res_uid(user, user, user).expect("a user");
        act()
    };
    std::thread::scope(|scope| scope.spawn(changed).join().expect("a thread"))
}

#[test]
fn the_service_that_attaches_is_the_daemons_users_and_serves_him_alone() {
    const STRANGER: u32 = 61004;
    let Some(place) = place_to_trace().filter(|_| rustix::process::geteuid().is_root()) else {
        return eprintln!("skipped: connections of other users take root");
    };
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).expect("a mode");
    let plain = program(&place, &[]);
    let start = || Checked::start(&plain, &[&MIB.to_string(), "0", "offer"]);
    let mut one = start();
    let folder = place.path().display();
    let rule = format!("[[attach]]\nexecutable = '{folder}/*'\nafter = '1s'");
    let service = place.socket().with_file_name("pageone-attach.sock");
    assert_eq!(place.socket().file_name().expect("a name"), "pageone.sock");

    // A stranger where the service is to listen: the daemon asks him for nothing.
    let listener = as_user(STRANGER, || {
        sys::socket::listen(&service).expect("a socket")
    });
    let (_daemon, log) = logging(&place, &place.file("pageone.toml", &rule));
    let said = || fs::read_to_string(&log).expect("a log");
    wait_for("the stranger to be found out", || {
        said().contains("is not asked").then_some(())
    });
    assert!(
        said().contains("user 61004 is at the other end"),
        "{}",
        said()
    );
    assert!(guests_of(&json(&place)) == 0, "{}", said());
    drop(listener);
    fs::remove_file(&service).expect("a socket");

    // A stranger who asks the service.
    let listener = sys::socket::listen(&service).expect("a socket");
    fs::set_permissions(&service, fs::Permissions::from_mode(0o666)).expect("a mode");
    let wish = format!(
        r#"{{"pid":{},"began":{},"domain":null,"any":true}}"#,
        one.pid(),
        sys::usage::began(one.pid()).expect("it lives")
    );
    let asked = |user: u32| {
        let asks = as_user(user, || {
            sys::socket::connect(&service).expect("a connection")
        });
        let _ = sys::socket::send(&asks, wish.as_bytes(), &[]);
        let taken = sys::socket::accept(&listener).expect("a connection");
        let mut command = pageone();
        command
            .args(["attach", "--asked", "--socket"])
            .arg(place.socket());
        command.stdin(Stdio::from(taken));
        output(&mut command)
    };
    let refused = asked(STRANGER);
    let why = text(&refused.stderr);
    assert!(
        !refused.status.success() && why.contains("user 61004"),
        "{why}"
    );
    assert_eq!(guests_of(&json(&place)), 0);
    let served = asked(0);
    assert!(served.status.success(), "{}", text(&served.stderr));
    wait_for("a guest", || (guests_of(&json(&place)) == 1).then_some(()));
    one.is_right();
}
