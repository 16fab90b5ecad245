//! Children, and the end of processes, in every way there is: children have whole memory, nothing hangs, and
//! the agent keeps no process alive.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use common::{Engine, count, ready};
use support::{Guest, agent, brought, guest_program, root};
use wire::PageOutcome;

/// The library whose fork handlers are older than the agent's.
fn early() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(library) = brought("PAGEONE_EARLY") {
            return library;
        }
        let name = format!("early-{}.so", std::process::id());
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&library);
        cc.arg(root().join("tests/guest/early.c"));
        assert!(cc.status().expect("a C compiler is installed").success());
        library
    })
}

/// As [`ready`], with that library behind the agent.
fn ready_with_early(seed: u64) -> (Engine, Guest) {
    let mut engine = Engine::new();
    let mut preload = agent().into_os_string();
    preload.push(":");
    preload.push(early());
    let mut command = Command::new(guest_program(false));
    command.env("LD_PRELOAD", preload);
    let mut guest = Guest::from(command.env("PAGEONE_SOCKET", engine.socket()));
    engine.write(1000, 512, seed);
    guest.offer(512, seed);
    engine.accept();
    engine.sync();
    (engine, guest)
}

/// The exit code of a guest that must end within a while.
#[track_caller]
fn code(guest: &mut Guest) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(status) = guest.process.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < deadline, "the guest does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Gives a command, asks for merges until it is answered, and gives the answer and how
/// many pages windows took out.
/// A guest that hangs is killed after a while, so that the test fails.
#[track_caller]
fn meanwhile(guest: &mut Guest, engine: &Engine, command: &str) -> (String, usize) {
    let (chunk, pid) = (guest.memory, guest.pid);
    let (done, tried) = (AtomicBool::new(false), AtomicUsize::new(0));
    let answer = std::thread::scope(|scope| {
        scope.spawn(|| {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !done.load(Relaxed) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            if !done.load(Relaxed) {
                kill(pid);
            }
        });
        scope.spawn(|| {
            while !done.load(Relaxed) {
                // They all differ, so the next window takes them out again.
                let answer = engine.merge(chunk, 0, 512, Some(1001));
                tried.fetch_add(count(&answer, PageOutcome::Differs), Relaxed);
            }
        });
        guest.tell(command);
        let answer = guest.answer();
        done.store(true, Relaxed);
        answer
    });
    let answer = answer.unwrap_or_else(|why| panic!("`{command}`: {why}"));
    (answer, tried.into_inner())
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn children_of_every_kind_have_whole_memory_while_windows_open() {
    let (engine, mut guest) = ready(8);
    let mut all = 0;
    for _ in 0..10 {
        let (bad, tried) = meanwhile(&mut guest, &engine, "forks 60");
        assert_eq!(bad, "0", "children that missed something");
        all += tried;
    }
    assert!(all > 0);
    guest.run("check");
}

#[test]
fn no_order_of_handlers_locks_and_signals_hangs() {
    let (engine, mut guest) = ready_with_early(8);
    guest.run("cycle 511");
    let mut all = 0;
    for _ in 0..10 {
        let (bad, tried) = meanwhile(&mut guest, &engine, "forks 30");
        assert_eq!(bad, "0", "children that missed something");
        all += tried;
    }
    let (children, _) = meanwhile(&mut guest, &engine, "stopcycle");
    assert!(
        all > 0 && children.parse::<u32>().unwrap() > 0,
        "{children} {all}"
    );
    guest.run("check");
}

#[test]
fn a_process_ends_with_its_last_own_thread() {
    // While an engine serves, and while none does.
    for served in [true, false] {
        let (engine, mut guest) = ready(3);
        let engine = served.then_some(engine);
        guest.tell("rawexit 7 0");
        assert_eq!(code(&mut guest), Some(7));
        drop(engine);
    }
    // The last code counts.
    let (_engine, mut guest) = ready(3);
    guest.tell("rawexit 7 9");
    assert_eq!(code(&mut guest), Some(9));
}
