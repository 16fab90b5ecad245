//! A guest is an address space, and one of its user: who is admitted, for how long, and what becomes of a guest that
//! is no longer what was admitted. Attacks of other users are in the hostile suite.
//!
//! The guests are this program again, in a role that the environment names: some speak the protocol themselves, some have
//! the agent.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Place, Running, alone, count, daemon, guests_of, install, json, pageone, wait_for};
use sys::socket;
use wire::{Answer, Changes, Hello, MAX_MESSAGE, Name, Question, Ready, Reception, Role};

const ROLE: &str = "PAGEONE_IDENTITY_ROLE";
const SOCKET: &str = "PAGEONE_IDENTITY_SOCKET";
/// A user that no system has.
const USER: u32 = 61_021;
const PAGES: usize = 1024;

/// This program in a role.
struct Actor {
    process: Running,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Actor {
    fn start(role: &str, socket: &Path, dress: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "plays_its_role", "--nocapture"]);
        command.env(ROLE, role).env(SOCKET, socket);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        dress(&mut command);
        let mut process = Running::start(&mut command);
        let to = process.0.stdin.take().unwrap();
        let from = BufReader::new(process.0.stdout.take().unwrap());
        Self { process, to, from }
    }

    /// The next thing it says.
    fn says(&mut self) -> String {
        let mut line = String::new();
        while self.from.read_line(&mut line).unwrap() > 0 {
            if let Some(said) = line.trim_end().strip_prefix("says ") {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("it has ended without a word");
    }

    fn tell(&mut self, word: &str) {
        writeln!(self.to, "{word}").unwrap();
    }
}

fn says(word: &str) {
    println!("\nsays {word}");
}

fn hears() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// What the engine says to a hello.
fn greet(engine: &Path) -> Result<(OwnedFd, OwnedFd), String> {
    let link = socket::connect(engine).unwrap();
    let mut packet = [0; MAX_MESSAGE];
    let role = Role::Agent;
    let domain = Name::EMPTY;
    let len = Hello { role, domain }.encode(&mut packet);
    socket::send(&link, &packet[..len], &[]).unwrap();
    let mut received = socket::recv(&link, &mut packet).unwrap();
    match Reception::decode(&packet[..received.len]).unwrap() {
        Reception::Welcome(_) => Ok((link, received.descriptors[0].take().unwrap())),
        Reception::Refused(why) => Err(why.as_str().to_owned()),
    }
}

/// A session of this process, ready.
fn join(engine: &Path) -> OwnedFd {
    let (link, line) = greet(engine).unwrap();
    let access = sys::mapping::Access::ReadWrite;
    let line = sys::mapping::share(line.as_fd(), 0, wire::PAGE_BYTES, access).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        tell.send(sys::process::thread_id()).unwrap();
        loop {
            std::thread::park();
        }
    });
    let thread = told.recv().unwrap();
    say(
        &link,
        &Answer::Ready(Ready {
            thread,
            line: line as u64,
            ..Ready::default()
        }),
    );
    link
}

fn say(link: &OwnedFd, answer: &Answer) {
    let mut packet = [0; MAX_MESSAGE];
    let len = answer.encode(&mut packet);
    socket::send(link, &packet[..len], &[]).unwrap();
}

/// Answers one question with nothing; false when the session is over.
fn serve(link: &OwnedFd) -> bool {
    let mut packet = [0; MAX_MESSAGE];
    let received = socket::recv(link, &mut packet).unwrap();
    if received.len == 0 {
        return false;
    }
    let question = Question::decode(&packet[..received.len]).unwrap();
    assert!(matches!(question, Question::Sync { .. }), "{question:?}");
    say(link, &Answer::Changes(Changes::new()));
    true
}

/// A second session, and then one after another.
fn comes_again(engine: &Path) {
    let first = join(engine);
    assert!(serve(&first));
    says(&greet(engine).unwrap_err());
    let mut link = first;
    let mut longest = Duration::ZERO;
    for _ in 0..5 {
        drop(link);
        let begin = Instant::now();
        link = join(engine);
        longest = longest.max(begin.elapsed());
        assert!(serve(&link));
    }
    assert!(longest < Duration::from_secs(1), "{longest:?}");
    says("admitted");
    hears();
}

/// Runs another program, with the connection still open.
fn runs_another(engine: &Path) {
    let link = join(engine);
    assert!(serve(&link));
    rustix::io::fcntl_setfd(&link, rustix::io::FdFlags::empty()).unwrap();
    says("admitted");
    hears();
    panic!("{}", Command::new("sleep").arg("1000").exec());
}

/// Is refused.
fn knocks(engine: &Path) {
    says(&greet(engine).map_or_else(|why| why, |_| "admitted".to_owned()));
}

/// Has the agent; one of its threads becomes another user, and may end.
fn turns_its_coat() {
    let mut memory = sys::memory::Anonymous::new(PAGES * wire::PAGE_BYTES).unwrap();
    let byte = |at: usize| (at / 512 % 251 + at / wire::PAGE_BYTES % 7 + 1).to_le_bytes()[0];
    memory
        .iter_mut()
        .enumerate()
        .for_each(|(at, place)| *place = byte(at));
    memory.offer().unwrap();
    says("offered");
    let mut turned = None;
    loop {
        match hears().as_str() {
            "turn" => {
                turned = Some(other_user());
                says("turned");
            }
            "turn back" => {
                if let Some((end, thread)) = turned.take() {
                    drop(end);
                    thread.join().unwrap();
                }
                says("turned back");
            }
            "check" => {
                let mut bytes = memory.iter().enumerate();
                assert!(bytes.all(|(at, &found)| found == byte(at)));
                says("right");
            }
            _ => return drop(turned),
        }
    }
}

/// A thread of another user, until the sender is dropped.
fn other_user() -> (std::sync::mpsc::Sender<()>, std::thread::JoinHandle<()>) {
    let (end, ended) = std::sync::mpsc::channel();
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let user = rustix::process::Uid::from_raw(USER);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        tell.send(()).unwrap();
        let _ = ended.recv();
    });
    told.recv().unwrap();
    (end, thread)
}

/// What the actors do: in the test's own process nothing.
#[test]
fn plays_its_role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let engine = std::env::var(SOCKET).unwrap();
    let engine = Path::new(&engine);
    match role.as_str() {
        "comes again" => comes_again(engine),
        "runs another" => runs_another(engine),
        "knocks" => knocks(engine),
        "turns its coat" => turns_its_coat(),
        role => panic!("no such role: {role}"),
    }
    std::process::exit(0);
}

#[test]
fn a_process_has_one_session_and_the_next_begins_at_once() {
    let _alone = alone();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms"]);
    let mut actor = Actor::start("comes again", &place.socket(), |_| {});
    let refused = actor.says();
    assert!(refused.contains("has a session already"), "{refused}");
    assert_eq!(actor.says(), "admitted");
    wait_for("one session", || {
        (guests_of(&json(&place)) == 1).then_some(())
    });
    actor.tell("end");
    wait_for("no session", || {
        (guests_of(&json(&place)) == 0).then_some(())
    });
}

#[test]
fn a_program_that_is_run_in_its_place_is_no_guest() {
    let _alone = alone();
    let place = Place::new();
    let mut daemon = daemon(&place, &["--merge-period", "100ms"]);
    let mut actor = Actor::start("runs another", &place.socket(), |_| {});
    assert_eq!(actor.says(), "admitted");
    assert_eq!(guests_of(&json(&place)), 1);
    actor.tell("go on");
    wait_for("the guest to go", || {
        (guests_of(&json(&place)) == 0).then_some(())
    });
    assert!(actor.process.0.try_wait().unwrap().is_none(), "it lives");
    daemon.signal(15);
    assert_eq!(daemon.end(), 0);
}

#[test]
fn a_guest_that_changes_its_user_is_unmerged_leaves_and_may_come_back() {
    let _alone = alone();
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user");
    }
    let place = Place::new();
    let mut daemon = daemon(&place, &["--merge-period", "100ms"]);
    let (agent, path) = (support::agent(), place.socket());
    let dress = |command: &mut Command| {
        command
            .env("LD_PRELOAD", &agent)
            .env("PAGEONE_SOCKET", &path);
    };
    let mut actors = [(); 2].map(|()| Actor::start("turns its coat", &path, dress));
    for actor in &mut actors {
        assert_eq!(actor.says(), "offered");
    }
    let merged =
        |status: &serde_json::Value| count(status, "pages_shared") + count(status, "pages_sharing");
    let all = 2 * PAGES as u64;
    wait_for("pages to merge", || {
        (merged(&json(&place)) == all).then_some(())
    });
    let [turncoat, other] = &mut actors;
    turncoat.tell("turn");
    assert_eq!(turncoat.says(), "turned");
    wait_for("the turncoat to leave", || {
        let status = json(&place);
        (guests_of(&status) == 1 && merged(&status) == PAGES as u64).then_some(())
    });
    for actor in [&mut *turncoat, other] {
        actor.tell("check");
        assert_eq!(actor.says(), "right");
    }
    // Its agent may ask again: as long as the thread lives it is refused.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(guests_of(&json(&place)), 1);
    turncoat.tell("turn back");
    assert_eq!(turncoat.says(), "turned back");
    wait_for("the turncoat to come back and merge", || {
        let status = json(&place);
        (guests_of(&status) == 2 && merged(&status) == all).then_some(())
    });
    for actor in &mut actors {
        actor.tell("check");
        assert_eq!(actor.says(), "right");
    }
    drop(actors);
    daemon.signal(15);
    assert_eq!(daemon.end(), 0);
    let log = daemon.stderr();
    let told = log
        .lines()
        .filter(|line| line.contains("leaves its domain"));
    assert_eq!(told.count(), 1, "{log}");
    assert!(log.contains("user 61021"), "{log}");
}

/// The shape of Chromium's sandbox: a user namespace, an empty root directory, no capability, and a filter for all threads.
/// A guest that confines itself in this way: its bytes stay right, its agent is gone, and no other guest has less.
fn confined(change: &str) {
    let _alone = alone();
    let place = Place::new();
    let mut daemon = daemon(&place, &["--merge-period", "100ms"]);
    let guest = || {
        let mut guest = support::Guest::start(&place.socket());
        guest.offer(PAGES, 5);
        guest
    };
    let merged =
        |status: &serde_json::Value| count(status, "pages_shared") + count(status, "pages_sharing");
    let (mut sandboxed, mut other) = (guest(), guest());
    wait_for("pages to merge", || {
        (merged(&json(&place)) == 2 * PAGES as u64).then_some(())
    });
    sandboxed.run(&format!("rights m:{change}"));
    for words in [
        "check",
        "fill 0 100 9",
        "advise 200 100 4",
        "mapover 400 50",
        "check",
    ] {
        sandboxed.run(words);
    }
    wait_for("the guest to leave", || {
        (guests_of(&json(&place)) == 1).then_some(())
    });
    let tasks = std::fs::read_dir(format!("/proc/{}/task", sandboxed.pid)).unwrap();
    assert_eq!(tasks.count(), 1, "an agent");
    // No other guest's saving is less for it.
    let mut third = guest();
    wait_for("pages to merge again", || {
        (merged(&json(&place)) == 2 * PAGES as u64).then_some(())
    });
    for guest in [&mut sandboxed, &mut other, &mut third] {
        guest.run("check");
    }
    drop((sandboxed, other, third));
    daemon.signal(15);
    assert_eq!(daemon.end(), 0);
    let log = daemon.stderr();
    assert!(log.contains("another root directory or namespace"), "{log}");
}

#[test]
fn a_sandbox_like_chromiums_leaves_every_byte_right() {
    confined("sandbox");
}

#[test]
fn a_root_directory_without_proc_leaves_every_byte_right() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can mount");
    }
    confined("pivot");
}

#[test]
fn an_engine_without_root_asks_the_same() {
    let _alone = alone();
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user");
    }
    let place = Place::new();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let copy = |from: &Path, name: &str| {
        let to = place.path().join(name);
        install(from, &to);
        to
    };
    let program = copy(Path::new(pageone().get_program()), "pageone");
    let itself = copy(&std::env::current_exe().unwrap(), "identity");
    let mut command = Command::new(&program);
    command.args(["daemon", "--no-keep", "--merge-period", "100ms", "--socket"]);
    command
        .arg(place.socket())
        .uid(USER)
        .gid(USER)
        .current_dir("/");
    let mut daemon = Running::start(command.stderr(Stdio::piped()));
    wait_for("the daemon", || place.socket().exists().then_some(()));
    let as_user = |command: &mut Command| {
        let mut own = Command::new(&itself);
        own.args(command.get_args());
        for (name, value) in command.get_envs() {
            own.env(name, value.unwrap());
        }
        own.uid(USER).gid(USER).current_dir("/");
        own.stdin(Stdio::piped()).stdout(Stdio::piped());
        *command = own;
    };
    let mut actor = Actor::start("runs another", &place.socket(), as_user);
    assert_eq!(actor.says(), "admitted");
    assert_eq!(guests_of(&json(&place)), 1);
    actor.tell("go on");
    wait_for("the guest to go", || {
        (guests_of(&json(&place)) == 0).then_some(())
    });
    // Who may not read a program may not see its memory, by the kernel's rules.
    std::fs::set_permissions(&itself, std::fs::Permissions::from_mode(0o711)).unwrap();
    let mut secret = Actor::start("knocks", &place.socket(), as_user);
    let why = secret.says();
    assert!(why.contains("is a secret"), "{why}");
    daemon.signal(15);
    assert_eq!(daemon.end(), 0);
}
