//! The agent's thread has the rights its program has, after each call that changes them; and no page is wrong for it.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::time::{Duration, Instant};

use common::{Engine, count, maps_store, ready};
use support::Guest;
use wire::{Answer, PageOutcome, Question};

/// What a filter has for a call: the process ends, or the call says EPERM.
const KILLED: u32 = 0x8000_0000;
const REFUSED: u32 = 0x5_0001;

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
    "rights m:bounding 38 0 0",
    "rights m:securebits 16 0 0",
    "rights m:unshare 1024 0 0",
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
    "rights m:setreuid 88 0 0",
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

/// What a program without /proc may still do with memory that was merged.
#[track_caller]
fn calls_over_memory_succeed(guest: &mut Guest) {
    for call in ["lock 0 8", "unlock 0 8", "remap 600 1", "advise 16 8 10"] {
        guest.run(call);
        guest.run("check");
    }
}

#[test]
fn a_call_that_changes_nothing_leaves_the_agent_alone() {
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    let before = agent(guest.pid);
    for call in [
        "setfsuid 4294967295",
        "setfsuid 0",
        "setfsgid 4294967295",
        "setuid 0",
        "setgid 0",
        "seteuid 0",
        "setegid 0",
        "setreuid 4294967295 0",
        "setregid 0 0",
        "setresuid 0 4294967295 0",
        "setresgid 0 0 0",
        "rawsetresuid 0 0 0",
        "dumpable 1",
        "securebits 0",
        "keepcaps 1",
        "keepcaps 0",
    ] {
        guest.run(&format!("rights m:{call}"));
        assert_eq!(agents(guest.pid), [before], "{call}");
    }
    // The saved user follows what is set.
    guest.run("rights m:setfsuid 7");
    assert_ne!(agent(guest.pid), before);
    let before = agent(guest.pid);
    guest.run("rights m:setuid 0");
    assert_ne!(agent(guest.pid), before, "the one for files is another");
    guest.run("check");
}

#[test]
fn structures_that_cannot_be_read_end_no_program() {
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("rights m:nonewprivs");
    guest.run("badstructures");
    guest.run("check");
}

/// The words of `/proc/PID/task/TID/stat` behind the name.
fn stat(pid: u32, thread: u32) -> Vec<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).unwrap();
    let (_, words) = stat.rsplit_once(')').unwrap();
    words.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn the_agent_is_an_ordinary_thread_whoever_makes_it() {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    guest.map(512);
    guest.run("fill 0 512 5");
    guest.run("offerodd 0 512");
    engine.accept();
    let agent = agent(guest.pid);
    let [nice, policy] = [16, 38].map(|at| stat(guest.pid, agent)[at].clone());
    assert_eq!((nice.as_str(), policy.as_str()), ("0", "0"));
    let cpus = |thread| {
        let status =
            std::fs::read_to_string(format!("/proc/{}/task/{thread}/status", guest.pid)).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("Cpus_allowed:"));
        line.unwrap().to_owned()
    };
    assert_eq!(cpus(agent), cpus(guest.pid));
}

#[test]
fn a_program_may_have_no_clock_in_user_space() {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    guest.map(512);
    guest.run("fill 0 512 5");
    guest.run("notsc");
    guest.run("advise 0 512 12");
    engine.write(1000, 512, 5);
    engine.accept();
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("rights m:setgid 5");
    guest.run("check");
}

#[test]
fn the_agents_memory_is_not_locked_with_the_programs() {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    guest.map(512);
    guest.run("fill 0 512 5");
    guest.run("lockfuture");
    guest.run("advise 0 512 12");
    engine.accept();
    let status = std::fs::read_to_string(format!("/proc/{}/status", guest.pid)).unwrap();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib: u64 = locked
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    assert!(kib < 100, "{kib} KiB");
}

#[test]
fn memory_is_whole_when_proc_goes_out_of_reach() {
    // A program that changes its user is not dumpable any more, and its /proc is root's.
    for (threads, call) in [
        ("", "setuid 65534"),
        ("writers 2 0 0", "setuid 65534"),
        ("", "noread"),
        ("writers 2 0 0", "noread"),
    ] {
        let (engine, mut guest) = ready(5);
        engine.merge(guest.memory, 0, 512, Some(1000));
        if !threads.is_empty() {
            guest.run(threads);
        }
        guest.run(&format!("rights m:{call}"));
        // Nothing keeps them from writing to memory that is made whole only now.
        guest.run("lock 100 8");
        guest.run("unlock 100 8");
        if !threads.is_empty() {
            guest.run("stop");
        }
        guest.run("check");
        guest.run("advise 40 4 4");
        guest.run("check");
        calls_over_memory_succeed(&mut guest);
    }
}

#[test]
fn a_program_that_is_not_dumpable_any_more_keeps_its_calls() {
    let (mut engine, mut guest) = ready(5);
    open_to_all(&engine);
    guest.run("rights m:setresuid 65534 65534 65534");
    guest.run("rights m:dumpable 1");
    engine.accept();
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("rights m:dumpable 0");
    calls_over_memory_succeed(&mut guest);
}

#[test]
fn a_discard_leaves_zeros_where_proc_is_hidden() {
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("rights m:hideproc");
    guest.run("advise 40 4 4");
    guest.run("check");
    guest.run("advise 50 1 24");
    guest.run("check");
    // The agent has the list of mappings open since before.
    // Before Linux 6.13 there are no guards; with no length the kernel tells that alone.
    if guest.ask("advise 0 0 102").is_ok() {
        guest.run("advise 60 1 102");
        guest.run("advise 60 1 103");
    }
    guest.run("check");
    // Without it nothing tells where canonical content would come from behind the guard.
    drop(engine);
    while guest.run("served") != "0" {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    guest.run("advise 45 4 4");
    assert!(guest.ask("advise 61 1 102").is_err(), "a guard");
    guest.run("check");
}

#[test]
fn calls_in_other_threads_and_in_handlers_count_as_well() {
    let (mut engine, mut guest) = ready(6);
    open_to_all(&engine);
    guest.run("writers 4 0 0");
    engine.merge(guest.memory, 0, 512, Some(1000));
    for call in [
        "t:setgid 5",
        "s:setgid 6",
        "t:setresgid 7 7 7",
        "s:setregid 8 8",
    ] {
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
    // A child of its own has no agent, gets none, and has nothing to wait for.
    for call in ["setgid 9", "setgroups 77", "setuid 1234"] {
        guest.run(&format!("rights f:{call}"));
    }
    guest.run("fork 0");
    guest.run("childcheck");
}

/// What it gives up for good it gives up alone.
#[test]
fn a_child_that_shares_memory_bars_no_agent_of_its_parents() {
    const READ_IMPLIES_EXEC: u32 = 0x40_0000;
    let (engine, mut guest) = ready(7);
    let before = agent(guest.pid);
    for seed in [7, 8] {
        guest.run("rights v:nonewprivs");
        let by_number = 1;
        guest.run(&format!(
            "rights v:filter {} {REFUSED} {by_number}",
            libc::SYS_mmap
        ));
        guest.run(&format!("rights v:personality {READ_IMPLIES_EXEC}"));
        assert_eq!(agent(guest.pid), before);
        engine.write(3000, 512, seed);
        guest.run(&format!("fill 0 512 {seed}"));
        engine.sync();
        let merged = engine.merge(guest.memory, 0, 512, Some(3000));
        assert_eq!(count(&merged, PageOutcome::Merged), 512);
        guest.run("check");
    }
    // Its hooks work as before: what comes is zeros, and no slots.
    guest.run("remap 1024 1");
    guest.run("check");
}

#[test]
fn a_child_that_shares_memory_leaves_its_parents_merged_when_it_goes_elsewhere() {
    const NEWNS: u32 = 0x2_0000;
    let (engine, mut guest) = ready(9);
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run("rights v:chroot");
    guest.run(&format!("rights v:unshare {NEWNS}"));
    assert!(maps_store(&guest), "the parent's memory was made whole");
    guest.run("check");
    guest.run("rights m:chroot");
    assert!(!maps_store(&guest));
    guest.run("check");
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

/// Connections until no more can wait for the engine.
fn fill_the_queue(engine: &Engine) -> Vec<std::os::fd::OwnedFd> {
    let connect = || sys::socket::connect_at_once(engine.socket());
    std::iter::from_fn(|| connect().ok()).collect()
}

#[test]
fn an_agent_finds_the_next_free_place_in_the_engines_queue() {
    let took = std::iter::repeat_with(|| {
        let engine = Engine::new();
        let crowd = fill_the_queue(&engine);
        let mut guest = engine.guest();
        guest.offer(8, 3);
        agent(guest.pid);
        std::thread::sleep(Duration::from_millis(100));
        for _ in &crowd {
            drop(sys::socket::accept(&engine.listener).unwrap());
        }
        let freed = Instant::now();
        assert!(sys::process::wait_readable(&engine.listener, Duration::from_secs(30)).unwrap());
        freed.elapsed()
    });
    let took: Vec<_> = took.take(4).collect();
    // An agent that does not look again before its next second takes nine tenths of one.
    let is_short = |took: &Duration| *took < Duration::from_millis(400);
    assert!(took.iter().any(is_short), "{took:?}");
}

#[test]
fn a_call_does_not_wait_for_a_place_in_the_engines_queue() {
    let engine = Engine::new();
    let _crowd = fill_the_queue(&engine);
    let mut guest = engine.guest();
    guest.offer(8, 3);
    agent(guest.pid);
    let took = (9..13).map(|group| {
        let begun = Instant::now();
        guest.run(&format!("rights m:setgid {group}"));
        begun.elapsed()
    });
    let took: Vec<_> = took.collect();
    let is_short = |took: &Duration| *took < Duration::from_millis(400);
    assert!(took.iter().any(is_short), "{took:?}");
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

const SYNC: Question = Question::Sync {
    lifeline: false,
    adopted: false,
};

/// What a filter can do with a call: kill the process or the thread, SIGSYS, EPERM, ENOSYS.
const ACTIONS: [u32; 5] = [KILLED, 0, 0x3_0000, REFUSED, 0x5_0026];

/// The numbers of the calls in the agent's table, but for the one that this guest's own commands need.
fn calls() -> Vec<u16> {
    let calls = sys::filter::calls::CALLS.iter();
    let calls = calls.filter(|call| call.name != "read");
    let calls: Vec<u16> = calls
        .map(|call| u16::try_from(call.number).unwrap())
        .collect();
    assert!(calls.len() > 30);
    calls
}

#[test]
fn no_filter_costs_a_byte_or_a_life_whatever_it_refuses() {
    let mut how = 0;
    for call in calls() {
        for action in ACTIONS {
            let (engine, mut guest) = ready(5);
            engine.merge(guest.memory, 0, 512, Some(1000));
            guest.run("rights m:nonewprivs");
            how = (how + 1) % 3;
            let what = format!("rights m:filter {call} {action} {how}");
            guest.run(&what);
            assert_eq!(agents(guest.pid), [0; 0], "{what}");
            guest.run("check");
            guest.run("fill 0 40 9");
            guest.run("check");
            assert!(!has_agent_back(&engine), "{what}");
        }
    }
}

#[test]
fn what_may_be_pinned_is_discarded_under_a_filter_too() {
    // By open(2) the hooks look at mappings: a filter kills for it, or refuses it.
    for action in [KILLED, REFUSED] {
        let (engine, mut guest) = ready(5);
        engine.merge(guest.memory, 0, 512, Some(1000));
        // The pin makes these pages private, and they stay where they lie.
        guest.run("pin 10 4");
        guest.run("rights m:nonewprivs");
        guest.run(&format!("rights m:filter 2 {action} 0"));
        assert_eq!(agents(guest.pid), [0; 0]);
        guest.run("check");
        guest.run("advise 8 4 4");
        guest.run("check");
        guest.run("advise 12 1 24");
        guest.run("check");
        guest.run("fill 8 6 9");
        guest.run("advise 13 1 8");
        guest.run("advise 0 512 4");
        guest.run("check");
        // A mapping that comes in the place of such pages is the program's alone.
        guest.run("mapover 10 4");
        guest.run("fill 10 4 7");
        guest.run("advise 10 4 4");
        guest.run("check");
    }
}

#[test]
fn no_filter_from_before_costs_a_life_either() {
    for call in calls() {
        // What the program, its loader, and the first offer before the trial call themselves.
        let own = [
            2, 3, 9, 10, 11, 13, 14, 17, 26, 28, 39, 56, 60, 72, 186, 202, 262,
        ];
        for action in ACTIONS.iter().filter(|_| !own.contains(&call)) {
            let engine = Engine::new();
            let mut guest = engine.guest();
            // By an instruction of the guest's own, before its first offer.
            guest.run(&format!("rights m:filter {call} {action} 3"));
            guest.offer(512, 5);
            guest.run("check");
            let refused_by_nature = [62, 191, 323, 434, 438].contains(&call);
            assert!(
                refused_by_nature || agents(guest.pid).is_empty(),
                "{call} {action:x}"
            );
        }
    }
}

/// A guest that runs under a filter from its first instruction on, with the agent or without. What it says to each of
/// the things that a guest does; nothing where it has no more to say.
fn life_under(engine: &Engine, call: u16, action: u32, with_agent: bool) -> Vec<Option<String>> {
    let mut command = std::process::Command::new(support::guest_program(false));
    if with_agent {
        command.env("LD_PRELOAD", support::agent());
        command.env("PAGEONE_SOCKET", engine.socket());
    }
    command.stderr(std::process::Stdio::null());
    begins_under(&mut command, call, action);
    let Ok(mut guest) = Guest::try_from(&mut command) else {
        return Vec::new();
    };
    let lines = [
        "map 64",
        "fill 0 64 5",
        "advise 0 64 12",
        "check",
        "fill 0 40 9",
        "check",
        "advise 0 64 13",
        "check",
    ];
    let mut answers: Vec<_> = lines
        .iter()
        .map(|line| guest.ask_if_it_lives(line))
        .collect();
    // The address differs.
    answers[0] = answers[0].take().map(|_| String::new());
    answers
}

/// Makes a command begin under a filter.
fn begins_under(command: &mut std::process::Command, call: u16, action: u32) {
    use std::os::unix::process::CommandExt;
    let filter = move || match install(call, action) {
        true => Ok(()),
        false => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: between fork and exec one system call is made, and nothing is allocated.
    unsafe { command.pre_exec(filter) };
}

/// Puts the calling thread under a filter by which all calls go on but `call`, which has `action`.
fn install(call: u16, action: u32) -> bool {
    let code = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        code(0x20, 0, 0, 0),
        code(0x15, 0, 1, u32::from(call)),
        code(0x06, 0, 0, action),
        code(0x06, 0, 0, 0x7fff_0000),
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the kernel reads the program; root needs no more.
    unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        ) == 0
    }
}

#[test]
fn a_filter_from_before_the_program_costs_it_nothing() {
    let engine = Engine::new();
    let mut failed = Vec::new();
    for call in calls() {
        for action in ACTIONS {
            let without = life_under(&engine, call, action, false);
            if without.is_empty() || without.contains(&None) {
                continue; // the program itself does not live under it
            }
            let with = life_under(&engine, call, action, true);
            // A limit: whether a child may be made is not to be found out without one.
            let kills_for_clone = call == 56 && !(0x5_0000..=0x7fff_0000).contains(&action);
            if with != without && !kills_for_clone {
                failed.push(format!("{call} {action:x}: {with:?}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_filter_from_before_the_program_that_allows_its_calls_lets_the_agent_work() {
    // ptrace: EPERM.
    works_under(&[101]);
}

/// Docker's own profile has them refused without CAP_SYS_NICE.
#[test]
fn a_filter_that_refuses_all_calls_for_nodes_lets_the_agent_work() {
    let calls = [
        libc::SYS_get_mempolicy,
        libc::SYS_mbind,
        libc::SYS_set_mempolicy,
    ];
    works_under(&calls.map(|call| u16::try_from(call).unwrap()));
}

/// The agent merges, under filters from before the program that refuse these calls.
fn works_under(calls: &[u16]) {
    let mut engine = Engine::new();
    let mut command = std::process::Command::new(support::guest_program(false));
    command.env("LD_PRELOAD", support::agent());
    command.env("PAGEONE_SOCKET", engine.socket());
    for &call in calls {
        begins_under(&mut command, call, 0x5_0001);
    }
    let mut guest = Guest::from(&mut command);
    engine.write(1000, 512, 5);
    guest.offer(512, 5);
    engine.accept();
    assert_eq!(guest.run("seeslibc"), "1");
    engine.sync();
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    // It is no surprise before the next round either.
    engine.sync();
    guest.run("check");
}

/// Whether an agent that connects says hello again before it is asked anything.
fn has_agent_back(engine: &Engine) -> bool {
    let moment = Duration::from_millis(1);
    sys::process::wait_readable(&engine.listener, moment).unwrap() && {
        // It was there between the two calls, and has gone.
        let link = sys::socket::accept(&engine.listener).unwrap();
        let mut buffer = [0; wire::MAX_MESSAGE];
        while sys::socket::recv(&link, &mut buffer).is_ok_and(|packet| packet.len > 0) {}
        false
    }
}

#[test]
fn the_engine_hears_which_call_a_filter_refuses() {
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    // mremap, by seccomp(2), which root may without no_new_privs.
    guest.run("rights m:filter 25 327681 1");
    let step = wire::STEP_FILTER;
    assert_eq!(engine.receive(), Answer::Failed { errno: 25, step });
    guest.run("check");
    // Nothing is a store's any more.
    assert!(common::is_free(&engine.lifeline), "the lifeline is held");
}

#[test]
fn an_agent_comes_back_under_a_filter_that_leaves_its_calls_alone() {
    for how in 0..3 {
        let (mut engine, mut guest) = ready(5);
        engine.merge(guest.memory, 0, 100, Some(1000));
        // ptrace: EPERM.
        guest.run(&format!("rights m:filter 101 327681 {how}"));
        let step = wire::STEP_RIGHTS;
        assert_eq!(engine.receive(), Answer::Failed { errno: 0, step });
        engine.accept();
        same_rights(&guest, "filter");
        assert_eq!(number_of(guest.pid, agent(guest.pid), "Seccomp:"), 2);
        engine.sync();
        let merged = engine.merge(guest.memory, 100, 412, Some(1100));
        assert_eq!(count(&merged, PageOutcome::Merged), 412);
        guest.run("check");
    }
}

#[test]
fn a_filter_behind_the_agents_back_ends_it_before_the_next_round() {
    for action in ACTIONS {
        let (engine, mut guest) = ready(5);
        engine.merge(guest.memory, 0, 512, Some(1000));
        // mmap, by an instruction of the guest's own.
        guest.run(&format!("rights m:filter 9 {action} 3"));
        engine.send(&SYNC, None);
        let step = wire::STEP_FILTER;
        assert_eq!(engine.receive(), Answer::Failed { errno: 0, step });
        guest.run("check");
        wait_until("the agent's end", || agents(guest.pid).is_empty());
        assert!(common::is_free(&engine.lifeline), "the lifeline is held");
    }
}

/// libpsx signals each thread and waits for all of them, for ever. An agent's thread takes no signals.
#[test]
fn no_agent_begins_where_a_library_stops_all_threads() {
    let name = "/usr/lib/x86_64-linux-gnu/libpsx.so.2";
    if !std::path::Path::new(name).exists() {
        return eprintln!("skipped: no libpsx here");
    }
    let engine = Engine::new();
    let mut command = std::process::Command::new(support::guest_program(false));
    let both = format!("{} {name}", support::agent().display());
    command.env("LD_PRELOAD", both);
    let mut guest = Guest::from(command.env("PAGEONE_SOCKET", engine.socket()));
    guest.offer(512, 5);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(agents(guest.pid).len(), 0);
    assert_eq!(guest.run("served"), "0");
    guest.run("check");
}

/// libseccomp asks so whether there is seccomp(2), and clients of Kerberos which keys they have.
#[test]
fn questions_about_rights_leave_the_agent_and_its_offers() {
    let (engine, mut guest) = ready(5);
    let before = agent(guest.pid);
    guest.run("rights m:probestrict");
    guest.ask("rights m:askkeys").ok();
    assert_eq!(agents(guest.pid), [before]);
    let merged = engine.merge(guest.memory, 0, 512, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 512);
    guest.run("check");
}

/// Nothing was offered yet, so no agent is the parent's.
#[test]
fn a_child_of_vfork_bars_no_agent_that_is_to_come() {
    let mut engine = Engine::new();
    let mut guest = engine.guest();
    guest.run("rights v:nonewprivs");
    guest.run(&format!("rights v:filter {} {REFUSED} 1", libc::SYS_mmap));
    guest.offer(512, 5);
    engine.accept();
    guest.run("check");
}

/// HAProxy and FRR change to another network for each socket.
#[test]
fn a_change_to_another_network_leaves_the_agent_and_what_is_merged() {
    const NEWNET: u32 = 0x4000_0000;
    const NEWUTS: u32 = 0x0400_0000;
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    let before = agent(guest.pid);
    for _ in 0..20 {
        guest.run(&format!("rights m:unshare {}", NEWNET | NEWUTS));
        guest.run("rights m:setns");
    }
    assert_eq!(agents(guest.pid), [before]);
    assert!(maps_store(&guest), "it is merged still");
    guest.run("check");
}

#[test]
fn a_change_to_another_network_asks_nothing_where_no_agent_may_be() {
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    guest.run(&format!("rights m:filter {} {KILLED} 1", libc::SYS_ioctl));
    guest.run("rights m:setns");
    guest.run("check");
}

/// A filter that lets an agent work may kill for a call that no agent makes.
#[test]
fn a_change_of_user_makes_no_other_call_under_a_filter() {
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    let asks = [libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_getresuid];
    for call in asks {
        guest.run(&format!("rights m:filter {call} {KILLED} 1"));
    }
    guest.run("rights m:setuid 0");
    guest.run("rights m:rawsetresuid 0 0 0");
    guest.run("check");
}

#[test]
fn an_agent_waits_while_a_thread_has_other_rights() {
    let (mut engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 100, Some(1000));
    let before = agent(guest.pid);
    // One thread alone becomes another user, by an instruction of the guest's own.
    guest.run("rights o:inlinesetresuid 1234 1234 1234");
    engine.send(&SYNC, None);
    let step = wire::STEP_THREADS;
    assert_eq!(engine.receive(), Answer::Failed { errno: 0, step });
    // It has the rights of the first thread, serves no engine, and asks none meanwhile.
    std::thread::sleep(Duration::from_millis(2500));
    assert!(engine.try_accept().is_none());
    assert_eq!(agents(guest.pid), [before]);
    guest.run("rights e:end");
    engine.accept();
    engine.sync();
    let merged = engine.merge(guest.memory, 100, 412, Some(1100));
    assert_eq!(count(&merged, PageOutcome::Merged), 412);
    guest.run("check");
}

#[test]
fn an_agent_with_the_rights_of_one_thread_gives_way_to_one_of_the_others() {
    let (mut engine, mut guest) = ready(5);
    open_to_all(&engine);
    engine.merge(guest.memory, 0, 100, Some(1000));
    // The new agent is made by the thread that alone became another user.
    guest.run("rights o:rawsetresuid 1234 1234 1234");
    let step = wire::STEP_RIGHTS;
    assert_eq!(engine.receive(), Answer::Failed { errno: 0, step });
    assert!(engine.try_accept().is_none());
    guest.run("rights e:end");
    wait_until("the odd agent's end", || {
        // A call over memory of the first thread's makes another.
        guest.run("protect 0 1 3");
        agents(guest.pid).first().is_some_and(|&agent| {
            rights(guest.pid, agent)
                .is_some_and(|theirs| Some(theirs) == rights(guest.pid, guest.pid))
        })
    });
    engine.accept();
    same_rights(&guest, "a thread's end");
    engine.sync();
    let merged = engine.merge(guest.memory, 100, 412, Some(1100));
    assert_eq!(count(&merged, PageOutcome::Merged), 412);
    guest.run("check");
}

#[test]
fn an_agent_whose_rights_no_thread_has_any_more_ends() {
    let (engine, mut guest) = ready(5);
    engine.merge(guest.memory, 0, 512, Some(1000));
    // All threads of the program, which are one, become another user behind the agent's back.
    guest.run("rights m:inlinesetresuid 1234 1234 1234");
    engine.send(&SYNC, None);
    let step = wire::STEP_THREADS;
    assert_eq!(engine.receive(), Answer::Failed { errno: 0, step });
    wait_until("the agent's end", || agents(guest.pid).is_empty());
    guest.run("check");
}

/// Mappings of the guest's memory that may be executed.
fn executable(guest: &Guest) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
    let region = guest.memory..guest.memory + (2 << 20);
    let its = maps.lines().filter(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let start = usize::from_str_radix(start, 16).unwrap();
        region.contains(&start) && rest.split(' ').nth(1).unwrap().contains('x')
    });
    its.map(str::to_owned).collect()
}

/// From then on the kernel makes what can be read executable in each new mapping and each protection, ours included.
#[test]
fn where_what_is_read_can_be_executed_nothing_is_merged() {
    for call in ["personality", "rawpersonality"] {
        let (mut engine, mut guest) = ready(7);
        let merged = engine.merge(guest.memory, 0, 512, Some(1000));
        assert_eq!(count(&merged, PageOutcome::Merged), 512);
        // To ask changes nothing, and another bit (ADDR_NO_RANDOMIZE) little.
        let before = agent(guest.pid);
        guest.run(&format!("rights m:{call} 4294967295"));
        assert_eq!(agents(guest.pid), [before], "{call}");
        guest.run(&format!("rights m:{call} 262144"));
        engine.accept();
        guest.run(&format!("rights m:{call} 4194304"));
        assert!(agents(guest.pid).is_empty(), "{call}");
        guest.run("advise 10 5 4");
        guest.run("advise 40 4 10");
        guest.run("check");
        assert_eq!(executable(&guest), Vec::<String>::new(), "{call}");
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid)).unwrap();
        assert!(!maps.contains("memfd:store"), "{call}: {maps}");
    }
}

#[test]
fn the_agents_own_filter_is_its_own() {
    let (mut engine, mut guest) = ready(5);
    let filters = |thread| {
        let number = |name| number_of(guest.pid, thread, name);
        (number("Seccomp:"), number("NoNewPrivs:"))
    };
    let own = agent(guest.pid);
    assert_eq!(filters(own), (2, 1));
    assert_eq!(filters(guest.pid), (0, 0));
    // For all threads, by an instruction outside libc: the kernel names the thread that has another filter.
    let refused = guest.run("rights m:filter 101 327681 4");
    assert_eq!(refused, own.to_string());
    let merged = engine.merge(guest.memory, 0, 100, Some(1000));
    assert_eq!(count(&merged, PageOutcome::Merged), 100);
    // Through libc it has every thread, and the next agent's is the program's and its own.
    guest.run("rights m:filter 101 327681 2");
    let step = wire::STEP_RIGHTS;
    assert_eq!(engine.receive(), Answer::Failed { errno: 0, step });
    engine.accept();
    assert_eq!(number_of(guest.pid, guest.pid, "Seccomp_filters:"), 1);
    assert_eq!(
        number_of(guest.pid, agent(guest.pid), "Seccomp_filters:"),
        2
    );
    engine.sync();
    let merged = engine.merge(guest.memory, 100, 412, Some(1100));
    assert_eq!(count(&merged, PageOutcome::Merged), 412);
    guest.run("check");
}

/// Guests of other users find the socket.
fn open_to_all(engine: &Engine) {
    use std::os::unix::fs::PermissionsExt;
    for path in [engine.folder.path(), &engine.socket()] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
}
