//! Root attaches processes and takes agents out again, by ptrace(2): attacks on the tracer, and on the users that wait for it.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use crate::arena::{ATTACKER, Arena};
use crate::attacker::Attacker;
use crate::common::{Running, output, pageone, text};
use crate::figures::time;
use crate::identity::runs_setuid;
use crate::programs;

/// The longest that root waits for a process that wants him to.
const PATIENCE: Duration = Duration::from_secs(60);

/// Root's command on the attacker's process: what it says.
fn root_runs(arena: &Arena, verb: &str, attacker: &Attacker) -> String {
    let mut command = pageone();
    command.arg(verb);
    if verb == "attach" {
        command.arg("--socket").arg(arena.place.socket());
        command.env("PAGEONE_AGENT", arena.file("libpageone_agent.so"));
    }
    command.arg(attacker.pid().to_string());
    let mut running = Running::start(command.stderr(Stdio::piped()).stdout(Stdio::null()));
    let (took, _code) = time(|| running.end());
    let told = running.stderr();
    assert!(took < PATIENCE, "{took:?}: {told}");
    told
}

/// Has an attacker execute a setuid program while root's tracer has one of its threads in his hands. That program goes its own way.
fn executes_while_held(verb: &str, attack: &str) {
    let Some(arena) = Arena::empty(&[], None).filter(runs_setuid) else {
        return;
    };
    let (program, reached) = programs::install_fixed(arena.place.path());
    // On a busy machine the attacker may be too late.
    const TRIES: usize = 10;
    for tried in 1.. {
        let mut attacker = arena.attack(attack, &[program.to_str().unwrap()]);
        if attacker.listen().iter().any(|line| line.contains("sealed")) {
            return eprintln!("skipped: {:?}", attacker.said);
        }
        let told = root_runs(&arena, verb, &attacker);
        // A thread that was put elsewhere goes on there at once.
        std::thread::sleep(Duration::from_millis(500));
        assert!(
            !reached.exists(),
            "it runs code as the attacker likes: {told}"
        );
        if !told.contains("is not") && tried < TRIES {
            continue;
        }
        assert!(told.contains("is not"), "{told}");
        let runs = || std::fs::read_link(format!("/proc/{}/exe", attacker.pid())).ok();
        // A thread that is not held has no reason to execute.
        let executes = attack != "exec-when-traced";
        let is_there = || (!executes || runs() == Some(PathBuf::from(&program))).then_some(());
        return crate::common::wait_for("the setuid program", is_there);
    }
}

/// What the kernel says of these mappings is a gigabyte. Root's commands read a part of it, and say so.
#[test]
fn commands_of_roots_on_mappings_with_long_names() {
    let Some(arena) = Arena::empty(&[], None) else {
        return;
    };
    let folder = arena.public_folder();
    std::os::unix::fs::chown(&folder, Some(ATTACKER), Some(ATTACKER)).unwrap();
    let attacker = arena.attack("long-maps", &["1", "60000", folder.to_str().unwrap()]);
    let pids = attacker.pids();
    let pid = pids.iter().find(|&&pid| pid != attacker.pid()).unwrap();
    for words in [
        &["analyze", "--look-again", "1s"][..],
        &["doctor"],
        &["attach"],
    ] {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "ulimit -v 1000000; exec \"$@\"", "sh"]);
        command.arg(arena.file("pageone")).args(words);
        command.env("PAGEONE_SOCKET", arena.place.socket());
        command.env("PAGEONE_AGENT", arena.file("libpageone_agent.so"));
        let (took, done) = time(|| output(command.arg(pid.to_string())));
        let told = text(&done.stdout) + &text(&done.stderr);
        assert!(done.status.code().is_some(), "{words:?}: {told}");
        assert!(
            told.contains("too long") || told.contains("too many"),
            "{words:?}: {told}"
        );
        assert!(took < PATIENCE, "{words:?}: {took:?}");
    }
}

#[test]
fn a_note_that_lies_has_root_write_no_registers_of_a_setuid_program() {
    executes_while_held("detach", "lying-note");
}

#[test]
fn code_changed_under_a_held_thread_has_root_write_no_registers_of_a_setuid_program() {
    executes_while_held("attach", "false-entry");
}

#[test]
fn a_thread_that_takes_the_number_of_a_held_one_is_not_taken_for_it() {
    executes_while_held("attach", "exec-when-traced");
}

/// The kernel then lets no other thread be traced, until root lets go of the one that he holds.
#[test]
fn a_thread_that_executes_beside_a_held_one_keeps_root_waiting_for_seconds_only() {
    executes_while_held("attach", "exec-beside");
}
