//! Clients of the command line that stop, and a process that keeps root's command waiting.

use std::time::Duration;

use crate::arena::{Arena, a_second};
use crate::common::{output, pageone, text, wait_for};
use crate::figures::time;
use crate::floods::{Mounted, has_fuse};

/// Each of the command's own clients, stopped at some moment, and the protocol's stopped after each packet.
#[test]
fn clients_that_stop_in_the_middle() {
    if let Some(arena) = Arena::new() {
        let program = arena.file("pageone");
        let program = program.to_str().unwrap().to_owned();
        arena.withstands(|arena| {
            let attacker = arena.attack("stopping-clients", &[&program]);
            arena.answers_a_user_in_time();
            attacker
        });
    }
}

/// It has changed the function by which its agent ends.
#[test]
#[cfg(target_arch = "x86_64")]
fn an_agent_that_never_ends_keeps_root_waiting_for_seconds() {
    let Some(mut arena) = Arena::empty(&[], None) else {
        return;
    };
    let mut attacker = arena.attack("never-lets-go", &[]);
    let run = |verb: &str| {
        let mut command = pageone();
        command.env("PAGEONE_SOCKET", arena.place.socket());
        command.env("PAGEONE_AGENT", arena.file("libpageone_agent.so"));
        let done = output(command.arg(verb).arg(attacker.pid().to_string()));
        (
            done.status.success(),
            text(&done.stdout) + &text(&done.stderr),
        )
    };
    let (attached, told) = run("attach");
    assert!(attached, "{told}");
    attacker.tell("");
    attacker.wait_for("it never ends");
    arena.let_others_run();
    let run = |verb: &str| {
        let done = output(pageone().arg(verb).arg(attacker.pid().to_string()));
        (done.status.success(), text(&done.stderr))
    };
    let (took, (detached, told)) = time(|| run("detach"));
    assert!(!detached && told.contains("goes on waiting"), "{told}");
    assert!(took < Duration::from_secs(25) + 5 * a_second(), "{took:?}");
    let waits = told.split("Process ").nth(1).unwrap();
    let waits = waits.split_whitespace().next().unwrap();
    let stat = format!("/proc/{waits}/stat");
    let lives = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
    assert!(lives(), "{told}");
    drop(attacker);
    wait_for("its end", || (!lives()).then_some(()));
}

/// Its libc lies on a file system of its own, which answers no reads.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_libc_that_is_never_read_keeps_root_waiting_for_seconds() {
    let Some(mut arena) = Arena::empty(&[], None).filter(|_| has_fuse()) else {
        return;
    };
    let mounted = Mounted(arena.public_folder());
    let attacker = arena.attack("fuse-libc", &[mounted.0.to_str().unwrap()]);
    arena.let_others_run();
    let (socket, agent) = (arena.place.socket(), arena.file("libpageone_agent.so"));
    let pid = attacker.pid().to_string();
    let run = |verb: &str| {
        let mut command = pageone();
        command.env("PAGEONE_SOCKET", &socket);
        command.env("PAGEONE_AGENT", &agent);
        command.args([verb, &pid]);
        let (took, done) = time(|| output(&mut command));
        let told = text(&done.stderr);
        assert!(!done.status.success() && told.contains("waiting"), "{told}");
        assert!(took < Duration::from_secs(25) + 5 * a_second(), "{took:?}");
    };
    // Each waits for the same libc.
    std::thread::scope(|scope| {
        scope.spawn(|| run("attach"));
        scope.spawn(|| run("detach"));
    });
}
