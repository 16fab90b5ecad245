//! `pageone doctor`: each check that can fail is made to.

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use common::{
    Knob, Place, Running, daemon, install, json, machine, need_agent, output, pageone, text,
    wait_for,
};
use serde_json::Value;
use wire::{
    GuestStatus, KnobValues, MAX_MESSAGE, Reply, Request, RunMode, Status, WhyNot, WhyNotCode,
};

/// A user that no system has.
const STRANGER: u32 = 61_001;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can bring processes into such states");
    }
    root
}

/// A daemon that looks often, where the test may have guests in any state.
fn served() -> Option<(Place, Running)> {
    need_agent();
    if !is_root() {
        return None;
    }
    let place = Place::new();
    let daemon = daemon(&place, &["--merge-period", "100ms"]);
    Some((place, daemon))
}

/// Has a program load the agent, and the agent come to the daemon at `place`.
fn equip(command: &mut Command, place: &Place) {
    command
        .env("LD_PRELOAD", support::agent())
        .env("PAGEONE_SOCKET", place.socket());
}

/// What a doctor said.
struct Said {
    code: i32,
    report: Value,
}

impl Said {
    fn by(command: &mut Command) -> Self {
        let output = output(command);
        let report = serde_json::from_slice(&output.stdout);
        Self {
            code: output.status.code().expect("an exit code"),
            report: report.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr))),
        }
    }

    fn find(&self, check: &str) -> Option<&Value> {
        let checks = self.report["checks"].as_array().expect("checks");
        checks.iter().find(|one| one["check"] == check)
    }

    /// The check ended so, says this, and names a command where it did not end well.
    #[track_caller]
    fn has(&self, check: &str, level: &str, what: &str) {
        let found = self
            .find(check)
            .unwrap_or_else(|| panic!("no {check} in {}", self.report));
        assert_eq!(found["level"], level, "{found}");
        assert!(
            found["what"].as_str().expect("a text").contains(what),
            "{found}"
        );
        for more in ["why", "fix"] {
            assert_eq!(found[more].is_string(), level != "ok", "{found}");
        }
        let least = (0..)
            .zip(["ok", "warn", "fail"])
            .find(|(_, one)| *one == level);
        let (least, _) = least.expect("a level");
        assert!(self.code >= least, "{}: {found}", self.code);
    }
}

fn doctor(place: &Place, words: &[&str]) -> Said {
    let mut command = pageone();
    command
        .args(["doctor", "--json", "--socket"])
        .arg(place.socket());
    Said::by(command.args(words))
}

/// The program that brings itself into states.
fn subject() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("subject", &[]).expect("a C compiler is installed"))
}

fn build(name: &str, flags: &[&str]) -> Option<PathBuf> {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Wextra", "-o"])
        .arg(&to)
        .args(flags);
    cc.arg(support::root().join("tests/guest/subject.c"));
    cc.status()
        .is_ok_and(|status| status.success())
        .then_some(to)
}

/// A process in a state; ended when this is dropped. None where the machine does not allow it.
fn in_state(program: &Path, words: &[&str], equip: impl FnOnce(&mut Command)) -> Option<Running> {
    let mut command = Command::new(program);
    command
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    equip(&mut command);
    let mut running = Running::start(&mut command);
    let mut line = String::new();
    let said = BufReader::new(running.0.stdout.take().expect("a pipe")).read_line(&mut line);
    said.expect("a line");
    if line != "up\n" {
        eprintln!("skipped: {words:?}: {line}");
    }
    (line == "up\n").then_some(running)
}

fn of_process(place: &Place, process: &Child) -> Said {
    doctor(place, &[&process.id().to_string()])
}

#[test]
fn a_machine_is_told_by_its_name() {
    let place = Place::new();
    let machine = machine(place.path(), "web\x1b[2J");
    let pid = machine.0.id();
    let said = doctor(&place, &[&pid.to_string()]);
    let known = format!(r"{pid} (`qemu-system-x86`, `web\u{{1b}}[2J`) has ");
    said.has("process", "ok", &known);
}

#[test]
fn a_machine_without_a_daemon_is_well_but_for_that() {
    need_agent();
    let place = Place::new();
    let said = doctor(&place, &[]);
    for check in [
        "kernel",
        "page-map",
        "leases",
        "ptrace",
        "code-writes",
        "agent",
    ] {
        said.has(check, "ok", "");
    }
    said.has("daemon", "warn", "no daemon at");
    assert_eq!(said.report["schema"], 1);
    assert!(said.report["time"].as_u64() > Some(1_700_000_000));
    assert!(
        said.report["host"]
            .as_str()
            .is_some_and(|host| !host.is_empty())
    );
    if is_root() {
        said.has("userfaultfd", "ok", "");
        assert_eq!(said.code, 1, "{}", said.report);
    }
    drop(sys::socket::listen(&place.socket()).expect("a socket"));
    doctor(&place, &[]).has("daemon", "warn", "has ended");
    fs::remove_file(place.socket()).expect("removed");
    place.file("pageone.sock", "");
    doctor(&place, &[]).has("daemon", "fail", "is no socket");
    let mut human = pageone();
    human.args(["doctor", "--socket"]).arg(place.socket());
    let human = output(&mut human);
    assert_eq!(human.status.code(), Some(2));
    let shown = text(&human.stdout);
    assert!(
        shown.contains("FAIL  daemon") && shown.contains("why: ") && shown.contains("fix: "),
        "{shown}"
    );
}

/// The agent takes it for no wish, and has no way to say so.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_wish_that_is_no_number_is_told_of() {
    let place = Place::new();
    for (said, wanted) in [("2s", "2000"), ("soon", "2000"), ("500ms", "500")] {
        let mut sleep = Command::new("sleep");
        let sleep = Running::start(sleep.arg("60").env("PAGEONE_ANY", said));
        let told = of_process(&place, &sleep.0);
        told.has("any", "warn", "is no number of milliseconds");
        let fix = format!("start it with PAGEONE_ANY={wanted}");
        assert_eq!(told.find("any").expect("it")["fix"], fix);
    }
    let mut sleep = Command::new("sleep");
    let sleep = Running::start(sleep.arg("60").env("PAGEONE_ANY", "2000"));
    assert!(of_process(&place, &sleep.0).find("any").is_none());
}

#[test]
fn an_answer_that_cannot_be_given_has_a_code_of_its_own() {
    let full = fs::File::create("/dev/full").expect("a device");
    let mut doctor = pageone();
    let status = doctor.arg("doctor").stdout(full).status();
    assert_eq!(status.expect("it runs").code(), Some(3));
}

#[test]
fn what_the_kernel_and_the_limits_refuse_is_named() {
    let place = Place::new();
    let with = |name: &str, value: &str| {
        let mut command = pageone();
        command
            .args(["doctor", "--json", "--socket"])
            .arg(place.socket());
        Said::by(command.env(name, value))
    };
    let named = with("PAGEONE_AGENT", "/no/agent.so");
    named.has("agent", "fail", "/no/agent.so");
    let fix = named.find("agent").expect("it")["fix"].as_str();
    assert!(fix.is_some_and(|fix| fix.starts_with("unset PAGEONE_AGENT")));
    if cfg!(debug_assertions) {
        let fault = |fault| with("PAGEONE_FAULT", fault);
        fault("scan 25 1 1").has("page-map", "fail", "PAGEMAP_SCAN is missing");
        fault("scan 24 1 1").has("page-map", "fail", "no descriptors left");
        fault("memfd 12 1 1").has("leases", "fail", "memory is short");
        fault("memfd 38 1 1").has("leases", "fail", "fs.leases-enable");
    }
    // Three are taken. Those that make or a shell has handed on are closed. The loader and the readers of /proc do with one more.
    let mut limited = Command::new("sh");
    limited.args([
        "-c",
        "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; ulimit -n 4; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_pageone"),
        "doctor",
        "--json",
    ]);
    limited
        .arg("--socket")
        .arg(place.socket())
        .env_remove("LD_PRELOAD");
    let limited = Said::by(&mut limited);
    limited.has("leases", "fail", "no descriptors left");
    assert_eq!(
        limited.find("leases").expect("it")["fix"],
        "ulimit -n 65536"
    );
    if is_root()
        && let Some(_knob) = Knob::set("/proc/sys/vm/max_map_count", "65529")
    {
        doctor(&place, &[]).has("mappings", "warn", "65529");
    }
}

/// Executes a command that may not read others' memory by the system call for that.
const DENY: &str = "
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv) {
    struct sock_filter filter[] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, 0},
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_process_vm_readv},
        {BPF_RET, 0, 0, SECCOMP_RET_ERRNO | 1},
        {BPF_RET, 0, 0, SECCOMP_RET_ALLOW},
    };
    struct sock_fprog program = {4, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, 2, &program))
        return 99;
    execv(argv[1], argv + 1);
    return 98;
}
";

/// Without it nothing would be merged, and nothing would say why.
#[test]
fn a_filter_that_refuses_to_read_memory_is_named() {
    need_agent();
    let place = Place::new();
    let deny = place.path().join("deny");
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&deny).arg(place.file("deny.c", DENY));
    assert!(cc.status().expect("a C compiler").success());
    let denied = |words: &[&str]| {
        let mut command = Command::new(&deny);
        command.arg(env!("CARGO_BIN_EXE_pageone")).args(words);
        command.env_remove("LD_PRELOAD");
        command
    };
    let socket = place.socket();
    let socket = socket.to_str().expect("text");
    let said = Said::by(&mut denied(&["doctor", "--json", "--socket", socket]));
    said.has("reading", "fail", "process_vm_readv cannot be tried");
    let run = output(&mut denied(&["run", "--socket", socket, "--", "true"]));
    let told = text(&run.stderr);
    assert_eq!(run.status.code(), Some(0), "{told}");
    for part in ["could merge nothing", "process_vm_readv cannot be tried"] {
        assert!(told.contains(part), "no {part}: {told}");
    }
}

#[test]
fn a_user_without_rights_is_told_of_them() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let open =
        |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
    open(place.path());
    let program = place.path().join("pageone");
    install(env!("CARGO_BIN_EXE_pageone"), &program);
    install(support::agent(), place.path().join("libpageone_agent.so"));
    let stranger = || {
        let mut command = Command::new(&program);
        command.uid(STRANGER).gid(STRANGER).current_dir("/");
        command
            .args(["doctor", "--json", "--socket"])
            .arg(place.socket());
        Said::by(&mut command)
    };
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
        .is_ok_and(|on| on.trim() == "1");
    match allowed {
        true => eprintln!("skipped: users have a right to userfaultfd here"),
        false => stranger().has("userfaultfd", "fail", "no right"),
    }
    let policy = place.file("policy.toml", "default = \"refuse\"\n");
    {
        let daemon = daemon(&place, &["--policy", policy.to_str().expect("text")]);
        let refused = stranger();
        refused.has("domain", "fail", "no rule of the policy is for user 61001");
        let reload = format!(
            "sudoedit {} && sudo kill -HUP {}",
            policy.display(),
            daemon.0.id()
        );
        assert_eq!(refused.find("domain").expect("it")["fix"], reload);
        refused.has("userfaultfd", "ok", "");
        let mut mine = in_state(subject(), &["plain"], |_| {}).expect("it runs");
        let other = {
            let mut command = Command::new(&program);
            command.uid(STRANGER).gid(STRANGER).current_dir("/");
            command
                .args(["doctor", "--json", "--socket"])
                .arg(place.socket());
            Said::by(command.arg(mine.0.id().to_string()))
        };
        for check in ["program", "memory", "pins"] {
            other.has(check, "warn", "cannot be looked at");
        }
        other.has("session", "warn", "only of his own guests");
        assert!(other.find("attachable").is_none());
        let own = of_process(&place, &mine.0);
        let reload = reload.replace("sudo kill", "kill");
        for check in ["session", "attachable"] {
            assert_eq!(own.find(check).expect("it")["fix"], reload, "{check}");
        }
        let fix = &other.find("pins").expect("it")["fix"];
        let socket = place.socket();
        let again = format!(
            "sudo pageone doctor --socket {} {}",
            socket.display(),
            mine.0.id()
        );
        assert_eq!(*fix, again);
        mine.0.kill().expect("it ends");
    }
    // A daemon that is killed leaves its socket.
    fs::remove_file(place.socket()).expect("removed");
    let socket = sys::socket::listen(&place.socket()).expect("a socket");
    fs::set_permissions(place.socket(), fs::Permissions::from_mode(0o600)).expect("a mode");
    stranger().has("daemon", "fail", "may not talk");
    drop(socket);
}

/// A daemon that replies what it is told in JSON, at `place`'s socket, for as long as the test runs; none: it is silent.
fn pretend(place: &Place, reply: impl Fn(&Request) -> Option<String> + Send + 'static) {
    let listener = sys::socket::listen(&place.socket()).expect("a socket");
    std::thread::spawn(move || {
        let mut unanswered = Vec::new();
        while let Ok(caller) = sys::socket::accept(&listener) {
            let mut packet = vec![0; MAX_MESSAGE];
            let mut receive = || {
                let len = sys::socket::recv(&caller, &mut packet).map_or(0, |got| got.len);
                packet.get(..len).unwrap_or_default().to_vec()
            };
            let _hello = receive();
            let Ok(request) = serde_json::from_slice(&receive()) else {
                continue;
            };
            let Some(reply) = reply(&request) else {
                unanswered.push(caller);
                continue;
            };
            for part in wire::reply_parts(reply.as_bytes()) {
                let _ = sys::socket::send(&caller, &part, &[]);
            }
        }
    });
}

/// What a daemon says that gives every process this domain, and this answer to all other questions.
fn answers(other: String) -> impl Fn(&Request) -> Option<String> + Send + 'static {
    let domain = json_of(&Reply::Domain("uid:0".to_owned()));
    move |request| match request {
        Request::Domain(_) => Some(domain.clone()),
        _ => Some(other.clone()),
    }
}

fn json_of(reply: &Reply) -> String {
    serde_json::to_string(reply).expect("JSON")
}

/// What a doctor says of a daemon that replies so.
fn doctor_of(args: &[&str], reply: impl Fn(&Request) -> Option<String> + Send + 'static) -> Said {
    let place = Place::new();
    pretend(&place, reply);
    doctor(&place, args)
}

/// A daemon that does not tell its status says by how it does so which of three it is.
#[test]
fn a_daemon_that_hangs_refuses_or_is_another_is_told_apart() {
    let why = |said: &Said| said.find("daemon").expect("it")["why"].to_string();
    let hangs = doctor_of(&[], |_| None);
    hangs.has("daemon", "fail", "did not answer within");
    assert!(why(&hangs).contains("it hangs"), "{}", hangs.report);
    let own = std::process::id().to_string();
    let refused = Reply::Refused("user 7 may not look".to_owned());
    let refused = doctor_of(&[&own], answers(json_of(&refused)));
    refused.has("daemon", "warn", "refuses its status: user 7 may not look");
    assert!(why(&refused).contains("policy"), "{}", refused.report);
    assert!(!why(&refused).contains("version"), "{}", refused.report);
    refused.has("session", "warn", "the daemon tells others only");
    for other in [json_of(&Reply::Done), r#"{"of_tomorrow":7}"#.to_owned()] {
        let other = doctor_of(&[], answers(other));
        other.has("daemon", "fail", "");
        assert!(why(&other).contains("another version"), "{}", other.report);
    }
}

#[test]
fn what_a_daemon_tells_of_itself_and_of_a_guest_is_passed_on() {
    let place = Place::new();
    let codes = [
        (WhyNotCode::Leaves, "leaves", "fail"),
        (WhyNotCode::Stuck, "stuck", "fail"),
        (WhyNotCode::NoAnswer, "no-answer", "fail"),
        (WhyNotCode::NoOffer, "no-offer", "fail"),
        (WhyNotCode::Limit, "limit", "warn"),
        (WhyNotCode::Alone, "alone", "warn"),
        (WhyNotCode::Busy, "busy", "warn"),
        (WhyNotCode::Broken, "broken", "warn"),
        (WhyNotCode::Pinned, "pinned", "warn"),
        (WhyNotCode::Foreign, "foreign", "warn"),
        (WhyNotCode::Unfit, "unfit", "warn"),
        (WhyNotCode::PutOff, "put-off", "warn"),
        (WhyNotCode::Other, "other", "warn"),
    ];
    let unique = (WhyNotCode::Unique, "unique", "ok");
    let reason = |&(code, name, _): &(WhyNotCode, &str, &str)| WhyNot {
        code,
        pages: 3,
        why: format!("because of {name}"),
    };
    let guest = GuestStatus {
        pid: std::process::id(),
        pins: Some("a device".to_owned()),
        reasons: codes.iter().chain([&unique]).map(reason).collect(),
        ..GuestStatus::default()
    };
    let status = Status {
        version: "0.0.7".to_owned(),
        knobs: KnobValues {
            run: RunMode::Stop,
            ..KnobValues::default()
        },
        guests: vec![guest],
        ..Status::default()
    };
    // A newer daemon has a code that this program does not know.
    let status = json_of(&Reply::Status(Box::new(status)));
    let newer = status.replace(r#""code":"other""#, r#""code":"of_tomorrow""#);
    assert_ne!(status, newer);
    pretend(&place, answers(newer));
    let said = doctor(&place, &[&std::process::id().to_string()]);
    said.has("daemon", "warn", "0.0.7");
    said.has("run", "warn", "run=0");
    said.has("pins", "warn", "a device");
    said.has("offered", "warn", "it offers 0 B");
    said.has("unique", "ok", "because of unique: such content is its own");
    for (_, name, level) in codes {
        said.has(name, level, &format!("because of {name}"));
        let fix = said.find(name).expect("it")["fix"].as_str();
        assert!(fix.is_some_and(|fix| !fix.contains("PID")), "{fix:?}");
    }
}

#[test]
fn programs_that_do_not_load_the_agent_are_named() {
    let place = Place::new();
    let command = |program: &Path| doctor(&place, &["--", program.to_str().expect("text")]);
    command(subject()).has("program", "ok", "loads the agent");
    command(Path::new("/no/such/program")).has("program", "fail", "command not found");
    doctor(&place, &["4194305"]).has("process", "fail", "no process 4194305");
    if let Some(fixed) = build("fixed", &["-static"]) {
        command(&fixed).has("program", "fail", "statically linked");
        let running = in_state(&fixed, &["plain"], |_| {}).expect("it runs");
        let said = of_process(&place, &running.0);
        said.has("program", "fail", "statically linked");
        said.has("session", "fail", "cannot load the agent");
        // The only thing that merges it, at the socket that was named.
        let auto = format!(
            "pageone run --socket {} --backend auto -- CMD",
            place.socket().display()
        );
        for check in ["program", "session", "attachable"] {
            let Some(found) = said.find(check) else {
                continue;
            };
            let fix = found["fix"].as_str().expect("a command");
            assert!(fix.starts_with(&auto), "{check}: {fix}");
        }
        let mut by_ksm = pageone();
        by_ksm.args(["run", "--backend", "ksm", "--"]).arg(&fixed);
        by_ksm
            .arg("plain")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut running = Running::start(by_ksm.stderr(Stdio::null()));
        let mut line = String::new();
        let out = running.0.stdout.take().expect("a pipe");
        BufReader::new(out).read_line(&mut line).expect("a line");
        match line.as_str() {
            "up\n" => {
                let said = of_process(&place, &running.0);
                said.has("program", "ok", "statically linked");
                let (level, what) = match std::fs::read_to_string("/sys/kernel/mm/ksm/run")
                    .expect("KSM")
                    .trim()
                {
                    "1" => ("ok", "KSM has all its memory"),
                    _ => ("fail", "KSM has all its memory, and does not run"),
                };
                said.has("session", level, what);
            }
            _ => eprintln!("skipped: KSM takes no memory here"),
        }
    }
    // musl is known by its linker's name; this one is glibc's.
    let linker = place.path().join("ld-musl-x86_64.so.1");
    std::os::unix::fs::symlink("/lib64/ld-linux-x86-64.so.2", &linker).expect("a link");
    let flag = format!("-Wl,--dynamic-linker={}", linker.display());
    let musl = build("musl", &[&flag]).expect("a linker");
    command(&musl).has("program", "fail", "another C library");
    let running = in_state(&musl, &["plain"], |_| {}).expect("it runs");
    let said = of_process(&place, &running.0);
    said.has("program", "ok", "its agent is attached");
    let fix = said.find("session").expect("a check")["fix"].to_string();
    assert!(!fix.contains("backend"), "no KSM is needed: {fix}");
    let mut ended = Command::new("true").spawn().expect("it runs");
    wait_for("a process to end", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", ended.id())).ok()?;
        stat.contains(") Z ").then_some(())
    });
    of_process(&place, &ended).has("process", "fail", "has ended");
    ended.wait().expect("its end");
    if !is_root() {
        return;
    }
    // In a container it may be any process.
    match fs::read_to_string("/proc/2/comm") {
        Ok(comm) if comm == "kthreadd\n" => {
            doctor(&place, &["2"]).has(
                "process",
                "fail",
                "is a kernel thread, which has no memory",
            );
        }
        _ => eprintln!("skipped: process 2 is no thread of the kernel here"),
    }
    let secure = place.path().join("secure");
    install(subject(), &secure);
    std::os::unix::fs::chown(&secure, Some(STRANGER), None).expect("its owner");
    fs::set_permissions(&secure, fs::Permissions::from_mode(0o4755)).expect("a mode");
    command(&secure).has("program", "fail", "setuid");
    // Where file systems are mounted without setuid the program is as others are.
    if let Some(running) = in_state(&secure, &["plain"], |_| {}) {
        let said = of_process(&place, &running.0);
        match said.find("setuid") {
            Some(_) => said.has("setuid", "fail", "rights of its file"),
            None => eprintln!("skipped: setuid has no effect here"),
        }
    }
}

#[test]
fn states_that_keep_memory_from_being_merged_are_named() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let file = place.file("data", &"x".repeat(4096));
    let file = file.to_str().expect("text");
    let _pages = Knob::set("/proc/sys/vm/nr_hugepages", "4");
    for (words, check, level, what) in [
        (&["plain"][..], "session", "fail", "no daemon tells of it"),
        (&["plain"], "memory", "ok", ""),
        (&["shared"], "shared-memory", "warn", "shared memory"),
        (&["huge"], "huge-pages", "warn", "hugetlb"),
        (&["locked"], "locked", "warn", "8.0 MiB of"),
        (&["written", file], "written-files", "warn", "8.0 MiB of 9"),
        (&["held"], "other-uffd", "warn", "another userfaultfd"),
        (&["direct", file], "pins", "warn", "can pin memory"),
        #[cfg(target_arch = "x86_64")]
        (&["shadow"], "sanitizer", "warn", "AddressSanitizer"),
        (&["filter"], "sandbox", "warn", "1 seccomp filter"),
        (&["strict"], "sandbox", "fail", "seccomp's strict mode"),
        (&["secret"], "identity", "fail", "a secret"),
        (&["ids"], "identity", "fail", "real 61001"),
    ] {
        let Some(running) = in_state(subject(), words, |_| {}) else {
            continue;
        };
        of_process(&place, &running.0).has(check, level, what);
    }
    let mut traced = in_state(subject(), &["plain"], |_| {}).expect("it runs");
    let pid = traced.0.id().cast_signed();
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: PTRACE_SEIZE takes numbers, and stops nothing. The tracer is this thread, until it ends.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, none, none) };
    assert_eq!(seized, 0, "{}", std::io::Error::last_os_error());
    of_process(&place, &traced.0).has("tracer", "warn", "traces it");
    traced.0.kill().expect("it ends");
}

/// What keeps a process from being attached is said by `attach --dry-run`, and by the doctor in the same words.
#[test]
#[cfg(target_arch = "x86_64")]
fn what_attach_would_do_and_the_doctor_are_of_one_mind() {
    if !is_root() {
        return;
    }
    need_agent();
    let place = Place::new();
    let mut seen = BTreeMap::new();
    let fixed = build("fixed", &["-static"]);
    let programs = ["plain", "filter"].map(|word| Some((subject(), word, word)));
    let fixed = fixed.as_deref().map(|program| (program, "plain", "static"));
    for (program, word, name) in programs.into_iter().chain([fixed]).flatten() {
        let Some(running) = in_state(program, &[word], |_| {}) else {
            continue;
        };
        let pid = running.0.id().to_string();
        let mut attach = pageone();
        attach.args(["attach", "--dry-run", &pid, "--socket"]);
        let told = output(attach.arg(place.socket()));
        let can = told.status.success();
        let said = of_process(&place, &running.0);
        let (level, words) = match can {
            true => ("ok", text(&told.stdout)),
            false => ("warn", text(&told.stderr)),
        };
        let line = words.lines().next().expect("a word");
        let reason = line
            .split_once("is not attached: ")
            .map_or(line, |(_, why)| why);
        said.has("attachable", level, reason);
        seen.insert(name, can);
    }
    assert_eq!(seen.get("plain"), Some(&true), "it can be attached");
    assert_ne!(seen.get("static"), Some(&true), "it has no libc to change");
}

/// An agent was attached to a process that offers nothing: the advice gets its memory offered.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_process_attached_in_vain_has_a_way_out() {
    let Some((place, _daemon)) = served() else {
        return;
    };
    let bare = in_state(subject(), &["plain"], |_| {}).expect("it runs");
    let process = &bare.0;
    let pageone_of = |words: &[&str]| {
        let mut command = pageone();
        command.args(words).env("PAGEONE_SOCKET", place.socket());
        output(command.arg(process.id().to_string()))
    };
    let told = text(&pageone_of(&["attach"]).stdout);
    assert!(told.contains("it has offered no memory (--any"), "{told}");
    let said = of_process(&place, process);
    said.has("session", "fail", "an agent was attached to it");
    let fix = said.report["checks"].as_array().and_then(|checks| {
        let session = checks.iter().find(|check| check["check"] == "session")?;
        session["fix"].as_str()
    });
    let pid = process.id();
    let socket = place.socket();
    let socket = socket.display();
    let again = format!("pageone detach {pid} && pageone attach --socket {socket} --any {pid}");
    assert_eq!(fix, Some(again.as_str()));
    for words in [&["detach"][..], &["attach", "--any"]] {
        let output = pageone_of(words);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

#[test]
fn a_guest_and_the_status_have_the_same_reasons() {
    let Some((place, _daemon)) = served() else {
        return;
    };
    let equip = |command: &mut Command| equip(command, &place);
    let idle = in_state(subject(), &["plain"], equip).expect("it runs");
    let said = of_process(&place, &idle.0);
    said.has("session", "fail", "the agent is loaded");
    let fix = |said: &Said| {
        let session = said.find("session").expect("it");
        session["fix"].as_str().expect("a remedy").to_owned()
    };
    assert!(fix(&said).contains("--any -- CMD"), "{}", said.report);
    // Where no daemon has it, the way to the one that it was told.
    let elsewhere = of_process(&Place::new(), &idle.0);
    let there = format!(
        "pageone doctor --socket {} {}",
        place.socket().display(),
        idle.0.id()
    );
    assert_eq!(fix(&elsewhere), there);
    let bare = in_state(subject(), &["plain"], |_| {}).expect("it runs");
    of_process(&place, &bare.0).has("session", "fail", "the agent is not loaded");
    let guest = in_state(subject(), &["offers"], equip).expect("it runs");
    // As long as it is observed it has no other reason.
    let status = wait_for("a guest that has been looked at", || {
        let status = json(&place);
        let pages = status["guests"][0]["pages_unshared"].as_u64();
        let zeros = status["guests"][0]["pages_sharing"].as_u64();
        let reasons = status["guests"][0]["reasons"].as_array()?.clone();
        let is_alone = reasons.iter().any(|reason| reason["code"] == "alone");
        (is_alone && (pages > Some(0) || zeros > Some(0))).then_some(status)
    });
    assert_eq!(
        (&status["schema"], status["host"].is_string()),
        (&1.into(), true)
    );
    let said = of_process(&place, &guest.0);
    said.has("alone", "warn", "no other guest is in its domain");
    said.has("session", "ok", "a guest in the domain `uid:0`");
    said.has("offered", "ok", "it offers 8.0 MiB");
    said.has("daemon", "ok", "version");
    said.has("domain", "ok", "uid:0");
    let mut shown = pageone();
    let shown = output(shown.args(["status", "--socket"]).arg(place.socket()));
    assert!(
        text(&shown.stdout).contains("no other guest is in its domain"),
        "{}",
        text(&shown.stdout)
    );
}

/// Locked memory is merged where it was offered, and nowhere else.
#[test]
fn locked_memory_of_a_guest_is_told_of() {
    let Some((place, _daemon)) = served() else {
        return;
    };
    for (state, level, what) in [
        ("offers-and-locks", "warn", "is locked (mlock)"),
        ("offers-locked", "ok", "is locked (mlock), and offered"),
    ] {
        let guest = in_state(subject(), &[state], |command| equip(command, &place));
        let guest = guest.expect("it runs");
        // The engine tracks what is offered from its first look on.
        let said = wait_for("memory that is tracked", || {
            let said = of_process(&place, &guest.0);
            let is_as = |found: &Value| found["level"] == level;
            said.find("locked").is_some_and(is_as).then_some(said)
        });
        said.has("session", "ok", "a guest");
        said.has("locked", level, "8.0 MiB of ");
        said.has("locked", level, what);
    }
}

#[test]
fn offered_memory_that_is_left_alone_is_told_of() {
    let Some((place, _daemon)) = served() else {
        return;
    };
    for kind in [
        "executable",
        "wiped-on-fork",
        "sealed",
        "read-only",
        "no-access",
    ] {
        let equip = |command: &mut Command| equip(command, &place);
        let Some(guest) = in_state(subject(), &["offers-apart", kind], equip) else {
            continue; // a kernel without mseal
        };
        let said = wait_for("the daemon has counted it", || {
            let said = of_process(&place, &guest.0);
            let is_counted = |check: &Value| check["level"] == "ok";
            let is_told = said.find(kind).is_some();
            (is_told && said.find("offered").is_some_and(is_counted)).then_some(said)
        });
        said.has(kind, "warn", "8.0 MiB of ");
        said.has("offered", "ok", "it offers 8.0 MiB of ");
        assert!(said.find("memory").is_none(), "{}", said.report);
        let advised = said.report.to_string();
        assert!(!advised.contains("--any"), "{advised}");
        assert!(!advised.contains("max_map_count="), "{advised}");
    }
}

#[test]
fn a_guest_of_an_engine_of_its_own_is_known_as_one() {
    need_agent();
    if !is_root() {
        return;
    }
    let place = Place::new();
    let mut run = pageone();
    run.args(["run", "--merge-period", "100ms", "--socket"])
        .arg(place.socket())
        .arg("--")
        .arg(subject())
        .arg("offers")
        .env("PAGEONE_AGENT", support::agent())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut run = Running::start(&mut run);
    let mut line = String::new();
    let said = BufReader::new(run.0.stdout.take().expect("a pipe")).read_line(&mut line);
    said.expect("a line");
    assert_eq!(line, "up\n");
    let children = format!("/proc/{0}/task/{0}/children", run.0.id());
    let children = fs::read_to_string(children).expect("children");
    // Its bystander was started before the command.
    let child = children.split_whitespace().last().expect("the command");
    let said = wait_for("its engine to hold memory", || {
        let said = doctor(&place, &[child]);
        let session = said.find("session").expect("it")["level"] == "warn";
        session.then_some(said)
    });
    said.has("session", "warn", "an engine of its own");
    assert!(said.find("other-uffd").is_none(), "{}", said.report);
    // The program ends with its input, and its engine after it.
    drop(run.0.stdin.take());
    run.0.wait().expect("its end");
}

/// Agents trust root's daemon, or their own user's: a listener of another user is no daemon for them.
#[test]
fn a_daemon_of_another_user_is_none() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root starts programs of other users");
        return;
    }
    let perl = Command::new("perl")
        .args(["-MIO::Socket::UNIX", "-e1"])
        .output();
    if !perl.is_ok_and(|perl| perl.status.success()) {
        println!("skipped: there is no perl with IO::Socket::UNIX");
        return;
    }
    let place = Place::new();
    let folder = place.socket().parent().expect("a folder").to_owned();
    let all = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(&folder, all).expect("a folder for all");
    let mut listener = Command::new("perl");
    listener.args(["-MIO::Socket::UNIX", "-e"]);
    listener
        .arg("my $s = IO::Socket::UNIX->new(Type => 5, Local => $ARGV[0], Listen => 1) or die; sleep 600");
    listener.arg(place.socket()).uid(NOBODY);
    let _listener = Running::start(&mut listener);
    wait_for("the listener", || place.socket().exists().then_some(()));
    let said = doctor(&place, &[]);
    said.has("daemon", "fail", &format!("is of user {NOBODY}"));
    assert_eq!(said.code, 2);
}
