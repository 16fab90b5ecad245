//! The agent's thread has the rights its program has, after each call that changes them; and no page is wrong for it.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::time::{Duration, Instant};

use common::{Engine, count, ready};
use support::Guest;
use wire::PageOutcome;

/// What `/proc/PID/task/TID/status` says of a thread's rights, but for filters.
fn rights(pid: u32, thread: u32) -> Option<Vec<String>> {
    const NAMES: [&str; 8] = [
        "Uid:", "Gid:", "Groups:", "CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:",
    ];
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).ok()?;
    let lines = status.lines().map(str::trim_end);
    let told = lines.filter(|line| NAMES.iter().any(|name| line.starts_with(name)));
    Some(told.map(str::to_owned).collect())
}

fn number_of(pid: u32, thread: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().trim().parse().unwrap()
}

/// The agents' threads of a process.
fn agents(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let threads = tasks.map(|task| {
        task.unwrap()
            .file_name()
            .into_string()
            .unwrap()
            .parse()
            .unwrap()
    });
    let is_agent = |thread: &u32| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm"));
        comm.is_ok_and(|comm| comm.trim_end() == "pageone-agent")
    };
    threads.filter(is_agent).collect()
}

/// The agent's thread of a process that has one.
#[track_caller]
fn agent(pid: u32) -> u32 {
    // A thread has its program's name for a moment.
    wait_until("an agent", || !agents(pid).is_empty());
    let agents = agents(pid);
    let &[agent] = &agents[..] else {
        panic!("agents: {agents:?}")
    };
    agent
}

/// The agent is as its program's first thread, and serves.
#[track_caller]
fn same_rights(guest: &Guest, call: &str) {
    let agent = agent(guest.pid);
    assert_eq!(
        rights(guest.pid, agent),
        rights(guest.pid, guest.pid),
        "{call}"
    );
    for name in ["NoNewPrivs:", "Seccomp:", "Seccomp_filters:"] {
        let own = number_of(guest.pid, agent, name);
        assert!(
            own >= number_of(guest.pid, guest.pid, name),
            "{call}: {name}"
        );
    }
}

#[track_caller]
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What a program of root's does to be less, in an order in which each call still may.
const CALLS: &[&str] = &[
    "rights m:dumpable 1 0 0",
    "rights m:bounding 38 0 0",
    "rights m:securebits 16 0 0",
    "rights m:unshare 1024 0 0",
    "rights m:setns 0 0 0",
    "rights m:chroot 0 0 0",
    "rights m:initgroups 0 0 0",
    "rights m:setgroups 77 0 0",
    "rights m:setfsgid 78 0 0",
    "rights m:setegid 79 0 0",
    "rights m:setegid 0 0 0",
    "rights m:setregid 80 81 0",
    "rights m:setresgid 82 83 84",
    "rights m:setgid 85 0 0",
    "rights m:setfsuid 86 0 0",
    "rights m:seteuid 87 0 0",
    "rights m:seteuid 0 0 0",
    "rights m:setreuid 0 0 0",
    "rights m:capset 21 0 0",
    "rights m:nonewprivs 0 0 0",
    "rights m:landlock 0 0 0",
    "rights s:setreuid 0 0 0",
    "rights m:setresuid 1235 1235 0",
    "rights m:setuid 0 0 0",
];

#[test]
fn the_agent_has_the_rights_of_its_program_after_each_call() {
    let (mut engine, mut guest) = ready(5);
    open_to_all(&engine);
    let merged = engine.merge(guest.memory, 0, 200, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 200);
    for call in CALLS {
        let before = agent(guest.pid);
        guest.run(call);
        // The call has returned: the one with the old rights is gone.
        assert!(!agents(guest.pid).contains(&before), "{call}");
        guest.run("check");
        // A process that changed its user hides from it until it says otherwise, and then the agent fails.
        assert!(engine.try_accept().is_some(), "{call}: no agent came back");
        same_rights(&guest, call);
    }
    assert_eq!(number_of(guest.pid, guest.pid, "NoNewPrivs:"), 1);
    guest.run("rights m:dumpable 1");
    engine.accept();
    // All is known again, and merged.
    engine.sync();
    let merged = engine.merge(guest.memory, 200, 312, Some(1200));
    assert_eq!(count(&merged, PageOutcome::Merged), 312);
    guest.run("check");
}

#[test]
fn calls_in_other_threads_and_in_handlers_count_as_well() {
    let (mut engine, mut guest) = ready(6);
    open_to_all(&engine);
    guest.run("writers 4 0 0");
    engine.merge(guest.memory, 0, 512, Some(1000));
    for call in ["t:setgid 5", "s:setgid 6", "t:setuid 0", "s:setreuid 0 0"] {
        let before = agent(guest.pid);
        guest.run(&format!("rights {call}"));
        assert!(!agents(guest.pid).contains(&before), "{call}");
        assert!(engine.try_accept().is_some(), "{call}");
        same_rights(&guest, call);
    }
    guest.run("stop");
    guest.run("check");
}

#[test]
fn a_child_that_shares_memory_leaves_its_parents_agent_alone() {
    let (engine, mut guest) = ready(7);
    let before = agent(guest.pid);
    guest.run("rights v:setuid 1234");
    guest.run("rights v:nonewprivs");
    assert_eq!(agent(guest.pid), before);
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("check");
    // A child of its own has no agent, and nothing to wait for.
    guest.run("fork 0");
    guest.run("childcheck");
}

#[test]
fn a_call_does_not_wait_for_an_engine() {
    let (mut engine, mut guest) = ready(8);
    // This engine accepts, and says nothing.
    let silent = engine.link.take();
    guest.run("rights m:setgid 9");
    assert!(sys::process::wait_readable(&engine.listener, Duration::from_secs(30)).unwrap());
    let link = sys::socket::accept(&engine.listener).unwrap();
    let begun = Instant::now();
    guest.run("rights m:setgid 10");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(number_of(guest.pid, agent(guest.pid), "Threads:"), 2);
    drop((silent, link));
    guest.run("check");
}

#[test]
fn a_process_becomes_single_threaded_for_a_new_user_namespace() {
    let (_engine, mut guest) = ready(9);
    // CLONE_NEWUSER: the kernel refuses it to a process with other threads.
    guest.run("rights m:unshare 268435456");
    guest.run("check");
    same_rights(&guest, "unshare");
}

/// Guests of other users find the socket.
fn open_to_all(engine: &Engine) {
    use std::os::unix::fs::PermissionsExt;
    for path in [engine.folder.path(), &engine.socket()] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
}
