//! A guest is an address space: attacks that would have the engine read another one, or serve a process that is not
//! what it seems.

use std::process::Command;

use crate::arena::{ATTACKER, Arena, LATE};
use crate::attacker::Attacker;
use crate::common::held;
use crate::stores;

/// Rounds in which whatever settles is read and planned.
const ROUNDS: u64 = 20;

/// Whether the machine lets users run setuid programs from the place of the tests; says so when not.
pub(crate) fn runs_setuid(arena: &Arena) -> bool {
    let folder = arena.place.path();
    let flags = Command::new("findmnt")
        .args(["-no", "OPTIONS", "-T"])
        .arg(folder)
        .output();
    let nosuid = flags.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).contains("nosuid"));
    if nosuid {
        eprintln!("skipped: {} is mounted nosuid", folder.display());
    }
    !nosuid
}

/// Withstands an attack that executes the setuid program. Two processes make it: what one session has is equal to nothing, and goes into
/// no store.
fn withstands_exec(verb: &str) {
    let Some(arena) = Arena::new() else { return };
    if !runs_setuid(&arena) {
        return;
    }
    let program = arena.file("setuid");
    let program = program.to_str().unwrap().to_owned();
    arena.withstands(|arena| {
        let mut attacker = arena.attack(verb, &[&program]);
        attacker.others.push(arena.attack(verb, &[&program]));
        arena.let_pass(ROUNDS);
        attacker
    });
}

#[test]
fn exec_of_a_setuid_program() {
    withstands_exec("deputy");
}

#[test]
fn exec_of_a_setuid_program_beside_a_dead_thread() {
    withstands_exec("zombie-deputy");
}

#[test]
fn exec_of_a_setuid_program_before_hello() {
    withstands_exec("early-deputy");
}

/// The thread that vouches for it sleeps in the kernel, and its memory lives on in children.
#[test]
fn exec_of_a_setuid_program_while_a_thread_waits_in_vfork() {
    withstands_exec("vfork-deputy");
}

/// The daemon sees its own /proc, whatever a guest has mounted over its.
#[test]
fn mounts_over_what_is_read_of_a_guest() {
    let Some(arena) = Arena::new() else { return };
    let folder = arena.public_folder();
    let folder = folder.to_str().unwrap().to_owned();
    arena.withstands(|arena| {
        let pid = arena.pair[0].pid.to_string();
        let attacker = arena.attack("mounts", &[&pid, &folder, "2000"]);
        let last = attacker.said.last().unwrap();
        assert!(!last.ends_with("refused"), "{:?}", attacker.said);
        arena.let_pass(ROUNDS);
        attacker
    });
}

/// Of a table of mounts a bounded part is read.
#[test]
fn mounts_with_long_names() {
    let Some(arena) = Arena::new() else { return };
    let folder = arena.public_folder();
    let folder = folder.to_str().unwrap().to_owned();
    arena.withstands(|arena| {
        let attacker = arena.attack("long-mounts", &[&folder, "12000"]);
        let last = attacker.said.last().unwrap();
        assert!(!last.ends_with("refused"), "{:?}", attacker.said);
        arena.takes_little(3);
        attacker
    });
}

/// The stack of a process: its first page in the last chunk, and how many pages follow.
fn stack(pid: u32) -> (u64, usize) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
    let [start, end] = [start, end].map(|hex| u64::from_str_radix(hex, 16).unwrap());
    let first = start.max((end - 1) / wire::CHUNK_BYTES as u64 * wire::CHUNK_BYTES as u64);
    (first, usize::try_from((end - first) / 4096).unwrap())
}

#[test]
fn exec_of_su() {
    let Some(arena) = Arena::new() else { return };
    if !std::path::Path::new("/bin/su").exists() {
        return eprintln!("skipped: there is no su");
    }
    let mut attacker = arena.attack("su-deputy", &["/bin/su", "-c", "true", "root"]);
    if attacker
        .said
        .last()
        .is_some_and(|line| line.contains("refused"))
    {
        return;
    }
    let name = || std::fs::read_to_string(format!("/proc/{}/comm", attacker.pid()));
    crate::common::wait_for("su", || (name().unwrap().trim() == "su").then_some(()));
    let (at, pages) = stack(attacker.pid());
    attacker.tell(&format!("{at:x} {pages:x}"));
    attacker.wait_for("offered");
    arena.let_pass(2 * ROUNDS);
    let foreign = stores::memory(attacker.pid(), at, pages);
    assert!(!foreign.is_empty(), "su has a stack");
    for store in held(arena.pid(), "store") {
        let leaked = stores::pages(&store)
            .into_iter()
            .filter(|page| foreign.contains(page));
        assert_eq!(
            leaked.count(),
            0,
            "pages of su's stack in {}",
            store.display()
        );
    }
}

/// Set in the process that runs a test inside a PID namespace.
const INSIDE: &str = "PAGEONE_HOSTILE_INSIDE";
/// Runs a command in a PID namespace of its own.
const NAMESPACE: [&str; 5] = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];

/// Has an attacker reuse a number, which root forces in the namespace that `through` makes, or in this one.
fn reuses_a_number(through: &[&str], verb: &str) {
    let Some(arena) = Arena::new() else { return };
    let secret = arena.file("secret");
    let secret = secret.to_str().unwrap().to_owned();
    arena.withstands(|arena| {
        let attacker = arena.attack_through(through, verb, &[&secret]);
        arena.let_pass(ROUNDS);
        attacker
    });
}

/// The same in the daemon's own namespace: the test runs again in one, with daemon, guests and attacker.
fn reuses_a_number_inside(test: &str, verb: &str) {
    if std::env::var_os(INSIDE).is_some() {
        return reuses_a_number(&[], verb);
    }
    let _alone = crate::common::alone();
    let mut again = Command::new(NAMESPACE[0]);
    again
        .args(&NAMESPACE[1..])
        .arg(std::env::current_exe().unwrap());
    again
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1");
    let out = crate::common::output(&mut again);
    let said = crate::common::text(&out.stdout) + &crate::common::text(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
}

#[test]
fn a_number_reused_before_hello() {
    let name = "identity::a_number_reused_before_hello";
    reuses_a_number_inside(name, "reused-before");
}

#[test]
fn a_number_reused_before_hello_in_another_namespace() {
    reuses_a_number(&NAMESPACE, "reused-before");
}

#[test]
fn a_number_reused_after_hello() {
    let name = "identity::a_number_reused_after_hello";
    reuses_a_number_inside(name, "reused-after");
}

#[test]
fn a_number_reused_after_hello_in_another_namespace() {
    reuses_a_number(&NAMESPACE, "reused-after");
}

/// What an attacker says of its own service.
fn said_of(verb: &str) -> Option<(Arena, Attacker)> {
    let arena = Arena::empty(&[], None)?;
    let attacker = arena.attack(verb, &[]);
    Some((arena, attacker))
}

/// Asserts that such a process is not served, and that the log says why.
fn refuses(verb: &str, why: &str) {
    let Some((arena, attacker)) = said_of(verb) else {
        return;
    };
    let last = attacker.said.last().unwrap();
    assert!(last.ends_with("refused"), "{last}");
    crate::common::wait_for(why, || arena.log().contains(why).then_some(()));
    // His own status tells him why, and no other user's.
    let told = |uid| {
        let shown = arena.command(uid, &["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
        let unserved = status["unserved"].as_array().unwrap().clone();
        let mut reasons = unserved.iter().map(|one| one["why"].as_str().unwrap());
        reasons.any(|reason| reason.contains(why))
    };
    crate::common::wait_for("the reason in the status", || told(ATTACKER).then_some(()));
    assert!(told(0) && !told(LATE));
}

#[test]
fn a_process_has_one_session() {
    let Some((_arena, attacker)) = said_of("twice") else {
        return;
    };
    assert_eq!(attacker.said, ["ready, twice: 1"]);
}

#[test]
fn a_connection_that_was_passed_on() {
    refuses("passed", "by which its agent could be known");
}

#[test]
fn a_process_whose_user_ids_differ() {
    refuses("ids-differ", "saved 0");
}

#[test]
fn a_process_that_is_not_dumpable() {
    refuses("undumpable", "is a secret");
}

#[test]
fn a_process_that_is_not_dumpable_any_more() {
    refuses("turns-secret", "is a secret");
}

/// All threads were an ordinary user's when it joined.
#[test]
fn a_process_one_thread_of_which_is_root_again() {
    refuses("turns-root", "and all have to be of user");
}

#[test]
fn root_of_a_user_namespace_is_a_user_like_others() {
    let Some((arena, attacker)) = said_of("inside-userns") else {
        return;
    };
    let all = attacker.said.join("\n");
    if all.contains("no user namespaces") {
        return eprintln!("skipped: users may not make user namespaces here");
    }
    assert!(all.contains("may not control"), "{all}");
    let status = crate::common::json(&arena.place);
    let root = status["guests"].as_array().unwrap().iter();
    assert_eq!(
        root.filter(|guest| guest["domain"] == "uid:0").count(),
        0,
        "{status}"
    );
}
