//! An agent that dies in a merge window: what lives on with its memory finds every byte.
//!
//! The agent dies at each system call of the window in turn (with its process, or alone), and the process is killed at
//! random moments.
#![cfg(debug_assertions)] // only such builds can make an agent die
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::{PATIENCE, Place, alone, count, daemon, json, wait_for};

/// 6 MiB and a bit: whole chunks and a part.
const PAGES: &str = "1700";
/// The system calls of a window.
const CALLS: &[&str] = &[
    "register",
    "unregister",
    "move",
    "move-untold",
    "zero",
    "copy",
    "replace",
    "place",
    "describe",
    "freeze",
];
/// The turns of each at which the agent dies.
const TURNS: &[u32] = &[1, 2, 9];

struct Victim {
    process: Child,
    lines: Receiver<String>,
    /// What was heard instead of its first word: the agent may die before.
    early: Option<String>,
}

impl Victim {
    fn start(place: &Place, program: &Path, lives_on: &str, fault: Option<&str>) -> Self {
        let mut command = Command::new(program);
        command
            .args([lives_on, PAGES])
            .env("LD_PRELOAD", support::agent());
        command
            .env("PAGEONE_SOCKET", place.socket())
            .stdout(Stdio::piped());
        if let Some(fault) = fault {
            command.env("PAGEONE_FAULT", fault);
        }
        let mut process = command.spawn().unwrap();
        let lines = follow(process.stdout.take().unwrap());
        let mut victim = Self {
            process,
            lines,
            early: None,
        };
        let first = victim.line();
        if first != format!("ready {PAGES}") {
            assert!(fault.is_some(), "{first}");
            victim.early = Some(first);
        }
        victim
    }

    fn line(&self) -> String {
        self.lines
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|why| format!("nothing: {why}"))
    }

    /// Kills the process unless it is dead, and hears what lives on.
    #[track_caller]
    fn end(mut self, what: &str) {
        let _ = self.process.kill();
        self.process.wait().unwrap();
        let said = self.early.take().unwrap_or_else(|| self.line());
        assert_eq!(said, format!("ok {PAGES}"), "{what}");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // What shares its memory ends by itself then.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn follow(from: ChildStdout) -> Receiver<String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let _ = tell.send(line);
        }
    });
    told
}

fn program(place: &Place) -> std::path::PathBuf {
    let program = place.socket().with_file_name("sibling");
    let source = support::root().join("tests/guest/sibling.c");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Wextra", "-o"])
        .arg(&program)
        .arg(source);
    assert!(cc.status().expect("a C compiler is installed").success());
    program
}

/// A daemon, and a guest with what all victims have: their windows merge.
fn scene() -> (Place, common::Running, std::path::PathBuf, Victim) {
    let place = Place::new();
    let daemon = daemon(&place, &["--merge-period", "10ms"]);
    let program = program(&place);
    let twin = Victim::start(&place, &program, "process", None);
    (place, daemon, program, twin)
}

/// Waits until the victim is dead, or has nothing more to merge: then its fault was not its turn.
fn dies(place: &Place, victim: &mut Victim) -> bool {
    let pid = u64::from(victim.process.id());
    let mut calm = 0;
    wait_for("the victim's death, or its rest", || {
        if victim.process.try_wait().unwrap().is_some() {
            return Some(true);
        }
        let status = json(place);
        let guests = status["guests"].as_array().unwrap();
        let own = guests.iter().find(|guest| guest["pid"] == pid);
        let rests = own.is_some_and(|guest| guest["pages_sharing"].as_u64() > Some(1000));
        calm = if rests { calm + 1 } else { 0 };
        (calm > 20).then_some(false)
    })
}

#[test]
fn a_process_that_shares_the_memory_finds_every_byte() {
    let _alone = alone();
    let (place, _daemon, program, twin) = scene();
    let mut deaths = 0;
    for call in CALLS {
        for turn in TURNS {
            let fault = format!("{call} {} {turn} 0", sys::fault::KILLED);
            let mut victim = Victim::start(&place, &program, "process", Some(&fault));
            deaths += u32::from(dies(&place, &mut victim));
            victim.end(&fault);
        }
    }
    assert!(deaths >= 20, "only {deaths} agents died in a window");
    twin.end("the twin");
}

#[test]
fn a_process_whose_agent_dies_alone_finds_every_byte_and_goes_on() {
    let _alone = alone();
    let (place, _daemon, program, twin) = scene();
    let mut deaths = 0;
    for call in CALLS {
        let fault = format!("{call} {} 2 0", sys::fault::ENDED);
        let mut victim = Victim::start(&place, &program, "thread", Some(&fault));
        // It ends when it has compared everything without its agent.
        if dies(&place, &mut victim) {
            victim.end(&fault);
            deaths += 1;
        }
    }
    assert!(deaths >= 5, "only {deaths} agents died in a window");
    twin.end("the twin");
}

#[test]
fn a_kill_at_any_moment_loses_no_byte_of_memory_that_is_shared() {
    let _alone = alone();
    let (place, _daemon, program, twin) = scene();
    for trial in 0..30 {
        let victim = Victim::start(&place, &program, "process", None);
        // Merging begins after two to three periods and lasts some.
        std::thread::sleep(Duration::from_micros(20_000 + trial * 2111));
        victim.end(&format!("trial {trial}"));
    }
    assert!(count(&json(&place), "full_scans") > 0);
    twin.end("the twin");
}
