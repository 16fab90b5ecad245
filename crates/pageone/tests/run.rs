//! `pageone run`: the command's end is ours, whichever way it comes.

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, waitpid};

use common::{Knob, Place, Running, child, daemon, install, need_agent, output, pageone, text};
use sys::signals::{SIGHUP, SIGINT, SIGTERM, SIGTTIN, SIGUSR1, SIGWINCH};

fn run(place: &Place, command: &[&str]) -> Output {
    run_with(place, &[], command)
}

fn run_with(place: &Place, flags: &[&str], command: &[&str]) -> Output {
    need_agent();
    let mut run = pageone();
    run.arg("run").arg("--socket").arg(place.socket());
    output(run.args(flags).arg("--").args(command))
}

#[test]
fn exit_codes_pass_through_with_and_without_a_daemon() {
    let place = Place::new();
    let alone = run(&place, &["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(alone.status.code(), Some(7));
    assert_eq!(text(&alone.stdout), "out\n");
    let said = text(&alone.stderr);
    assert!(
        said.contains("err") && said.contains("no daemon at"),
        "{said}"
    );
    if rustix::process::geteuid().is_root() {
        let told = said.lines().last().unwrap_or_default();
        assert!(
            told.starts_with("pageone: saved at most 0 B, 0 B at the end, "),
            "{said}"
        );
        assert!(
            told.contains("other runs share nothing with this one"),
            "{said}"
        );
    }

    let _daemon = daemon(&place, &[]);
    let served = run(&place, &["sh", "-c", "exit 9"]);
    assert_eq!(
        (served.status.code(), text(&served.stderr).as_str()),
        (Some(9), "")
    );
}

/// As while a daemon is restarted, which reads its stores before it serves.
#[test]
fn a_daemon_that_gives_no_answer_keeps_no_command_from_running() {
    let place = Place::new();
    let listener = sys::socket::listen(&place.socket()).unwrap();
    std::thread::spawn(move || {
        while let Ok(caller) = sys::socket::accept(&listener) {
            drop(caller);
        }
    });
    let done = run(&place, &["sh", "-c", "exit 7"]);
    let said = text(&done.stderr);
    assert_eq!(done.status.code(), Some(7), "{said}");
    assert!(said.contains("as soon as a daemon serves"), "{said}");
    let named = run_with(&place, &["--domain", "d"], &["true"]);
    assert_eq!(named.status.code(), Some(125), "{named:?}");
}

#[test]
fn a_full_disk_takes_the_words_and_not_the_command() {
    need_agent();
    let place = Place::new();
    let mut run = pageone();
    run.arg("run").arg("--socket").arg(place.socket());
    run.args(["--", "sh", "-c", "exit 7"]);
    let full = File::create("/dev/full").expect("a full disk");
    let status = run.stderr(full).status().expect("a command");
    assert_eq!(status.code(), Some(7));
}

#[test]
fn a_command_needs_no_dashes_before_it() {
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &[]);
    let mut run = pageone();
    run.args(["run", "--merge-period", "5s", "--socket"]);
    run.arg(place.socket());
    let ended = output(run.args(["sh", "-c", "echo $#; exit 3", "--any", "--", "-x"]));
    assert_eq!(ended.status.code(), Some(3));
    assert_eq!(text(&ended.stdout), "2\n");
    let said = text(&ended.stderr);
    assert!(said.contains("--merge-period turns nothing"), "{said}");
}

#[test]
fn a_command_that_a_signal_ends_ends_us_the_same_way() {
    use std::os::unix::process::ExitStatusExt;
    let place = Place::new();
    for signal in ["TERM", "KILL", "SEGV"] {
        let ended = run(&place, &["sh", "-c", &format!("kill -{signal} $$")]);
        let number = match signal {
            "TERM" => 15,
            "KILL" => 9,
            _ => 11,
        };
        assert_eq!(ended.status.signal(), Some(number), "{signal}");
    }
}

/// Rust's runtime puts /dev/null in the place of a closed descriptor: a command would take that for its input, and lose what it writes.
#[test]
fn closed_descriptors_are_closed_in_the_command() {
    need_agent();
    let place = Place::new();
    let run = |redirection: &str, command: &str| {
        let script = format!("\"$@\" {command} {redirection}");
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &script, "sh"])
            .arg(pageone().get_program());
        shell
            .args(["run", "--socket"])
            .arg(place.socket())
            .arg("--");
        output(&mut shell)
    };
    let check = || {
        let none = run("<&-", "cat");
        assert!(!none.status.success(), "{}", text(&none.stderr));
        let lost = run(">&-", "env printf x");
        assert!(!lost.status.success(), "{}", text(&lost.stderr));
        let silent = run("2>&-", "sh -c 'echo x >&2 || exit 7'");
        assert_eq!(silent.status.code(), Some(7));
    };
    check();
    let _daemon = daemon(&place, &[]);
    check();
}

/// They are needed to remove a folder that has something in it.
#[test]
fn without_descriptors_no_folder_is_left_behind() {
    need_agent();
    let place = Place::new();
    for limit in 4..10 {
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={limit}:{limit}"));
        command
            .arg(pageone().get_program())
            .args(["run", "--socket"]);
        command.arg(place.socket()).args(["--", "true"]);
        output(
            command
                .env("TMPDIR", place.path())
                .env_remove("XDG_RUNTIME_DIR"),
        );
        let left = std::fs::read_dir(place.path()).expect("a folder");
        let left: Vec<_> = left.flatten().map(|entry| entry.path()).collect();
        assert!(left.is_empty(), "{limit}: {left:?}");
    }
}

#[test]
fn signals_reach_the_command() {
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGWINCH, SIGTTIN] {
        reaches_the_command(pageone(), signal, |run| run);
    }
}

/// As in a container that another process entered: session and group of its commands have no number there.
#[test]
fn signals_reach_a_command_whose_session_began_elsewhere() {
    let namespace = ["--pid", "--fork", "--kill-child", "--mount-proc"];
    let tried = Command::new("unshare").args(namespace).arg("true").output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        return common::tools::lacks("unshare with a PID namespace");
    }
    for signal in [SIGTERM, SIGHUP] {
        let mut command = Command::new("unshare");
        let run = pageone();
        command.args(namespace).arg(run.get_program());
        reaches_the_command(command, signal, |unshare| child(unshare).expect("a child"));
    }
}

/// Starts a command below `run`, which is the process that `find` finds from the one that `command` starts, and signals `run`.
fn reaches_the_command(mut command: Command, signal: i32, find: fn(u32) -> u32) {
    need_agent();
    let place = Place::new();
    // A shell that is left alone ends.
    let script = "trap 'exit 42' TERM INT HUP USR1 WINCH TTIN; echo up; \
        i=0; while [ $i -lt 2000 ]; do sleep 0.02; i=$((i + 1)); done";
    command.arg("run").arg("--socket").arg(place.socket());
    // A shell cannot trap signals that its starter has it ignore, as for a job in the background.
    command.args(["--", "env", "--default-signal", "sh", "-c", script]);
    let said = place.path().join("said");
    let stderr = File::create(&said).expect("a file");
    let mut running = Running::start(command.stdout(Stdio::piped()).stderr(stderr));
    let mut line = String::new();
    let stdout = running.0.stdout.take().expect("stdout");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    assert_eq!(line, "up\n");
    let run = i32::try_from(find(running.0.id())).expect("a pid");
    let named = Signal::from_named_raw(signal).expect("a signal");
    kill_process(Pid::from_raw(run).expect("a pid"), named).expect("it is sent");
    let (code, said) = (running.end(), std::fs::read_to_string(said));
    assert_eq!(code, 42, "signal {signal}: {said:?}");
}

#[test]
fn commands_that_cannot_run_have_the_codes_of_a_shell() {
    let place = Place::new();
    let missing = run(&place, &["no-such-command-anywhere"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(text(&missing.stderr).contains("no-such-command-anywhere: command not found"));
    let plain = place.file("plain", "data");
    let plain = run(&place, &[plain.to_str().expect("text")]);
    assert_eq!(plain.status.code(), Some(126));
    assert!(text(&plain.stderr).contains("not executable"));
    for agent in ["/no/agent.so", "/etc/passwd"] {
        let mut bad = pageone();
        let none = output(bad.env("PAGEONE_AGENT", agent).args(["run", "--", "true"]));
        assert_eq!(none.status.code(), Some(125));
        assert!(text(&none.stderr).contains(agent), "{}", text(&none.stderr));
    }
    let alone = run_with(&place, &["--any-huge"], &["true"]);
    assert_eq!(alone.status.code(), Some(125));
    assert!(text(&alone.stderr).contains("--any-huge takes --any"));
}

/// Says its number; ends with 7 if KSM has all memory of it, else with 6.
const FIXED: &str = "
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(void) {
    printf(\"%d\\n\", (int)getpid());
    return prctl(68, 0, 0, 0, 0) == 1 ? 7 : 6;
}
";

/// A program that cannot load the agent, if the compiler links statically.
fn fixed(place: &Place) -> Option<PathBuf> {
    let source = place.file("fixed.c", FIXED);
    let fixed = place.path().join("fixed");
    let mut cc = Command::new("cc");
    cc.arg("-static").arg("-o").arg(&fixed).arg(&source);
    if !cc.output().is_ok_and(|cc| cc.status.success()) {
        common::tools::lacks("C compiler that links statically");
        return None;
    }
    Some(fixed)
}

#[test]
fn scripts_are_fine_and_static_commands_are_told() {
    let place = Place::new();
    let script = place.path().join("script");
    install(place.file("text", "#!/bin/sh\nexit 5\n"), &script);
    let script = run(&place, &[script.to_str().expect("text")]);
    assert_eq!(script.status.code(), Some(5));
    assert!(
        !text(&script.stderr).contains("static"),
        "{}",
        text(&script.stderr)
    );

    let Some(fixed) = fixed(&place) else {
        return;
    };
    let fixed = fixed.to_str().expect("text");
    let ran = run(&place, &[fixed]);
    assert_eq!(ran.status.code(), Some(6), "it runs all the same");
    let said = text(&ran.stderr);
    assert!(
        said.contains("statically linked") && said.contains("not merged"),
        "{said}"
    );

    let auto = run_with(&place, &["--backend", "auto"], &[fixed]);
    let said = text(&auto.stderr);
    match Path::new(KSM_OF_ITSELF).exists() {
        true => assert_eq!(auto.status.code(), Some(7), "KSM has its memory: {said}"),
        false => assert!(said.contains("Linux 6.4"), "{said}"),
    }
    // The policy comes first: KSM heeds none.
    let another = Place::new();
    let policy = another.file("policy.toml", "default = 'refuse'\n");
    let _daemon = daemon(&another, &["--policy", policy.to_str().expect("text")]);
    let refused = run_with(&another, &["--backend", "auto"], &[fixed]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(6), "{said}");
    assert!(said.contains("nor by KSM: the daemon's policy"), "{said}");
    let ours = run_with(&place, &["--backend", "auto"], &["cat", KSM_OF_ITSELF]);
    assert!(!text(&ours.stdout).contains("merge_any: yes"));
}

/// KSM knows no domains, so the command is merged by none; and `run` becomes it, without an engine that no program would use.
#[test]
fn a_static_command_of_a_domain_is_left_to_no_engine() {
    need_agent();
    let place = Place::new();
    let Some(fixed) = fixed(&place) else {
        return;
    };
    for (flags, variable) in [(&["--domain", "blue"][..], None), (&[], Some("blue"))] {
        let mut command = pageone();
        command.arg("run").arg("--socket").arg(place.socket());
        command
            .args(["--backend", "auto", "--threads", "1"])
            .args(flags);
        if let Some(domain) = variable {
            command.env("PAGEONE_DOMAIN", domain);
        }
        command.arg("--").arg(&fixed);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("it starts");
        let pid = child.id();
        let done = child.wait_with_output().expect("its end");
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(6), "KSM has it: {said}");
        let by = variable.map_or("--domain", |_| "PAGEONE_DOMAIN");
        let why = format!("not merged, nor by KSM: {by} asks for the domain `blue`");
        for part in [&why, "no engine is started", "--threads turns nothing"] {
            assert!(said.contains(part), "no {part}: {said}");
        }
        assert_eq!(text(&done.stdout), format!("{pid}\n"), "{said}");
    }
}

/// Agents without `run` heed the variable, and `run` does: what it starts is in no wider domain than was asked for.
#[test]
fn the_domain_of_the_environment_counts_as_the_flag_does() {
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &[]);
    let with = |domain: &str, flags: &[&str]| {
        let mut command = pageone();
        command.arg("run").arg("--socket").arg(place.socket());
        command
            .args(flags)
            .args(["--", "sh", "-c", "echo $PAGEONE_DOMAIN"]);
        output(command.env("PAGEONE_DOMAIN", domain))
    };
    for (domain, flags, heeded) in [
        ("blue", &[][..], "blue"),
        ("blue", &["--backend", "auto"], "blue"),
        ("blue", &["--domain", "red"], "red"),
        ("", &[], ""),
    ] {
        let done = with(domain, flags);
        assert_eq!(text(&done.stdout).trim(), heeded, "{}", text(&done.stderr));
    }
    for (domain, flags, why) in [
        ("x".repeat(64).as_str(), &[][..], "PAGEONE_DOMAIN: `x"),
        ("blue", &["--backend", "ksm"], "leave PAGEONE_DOMAIN out"),
    ] {
        let done = with(domain, flags);
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(125), "{said}");
        assert!(said.contains(why), "{said}");
    }
}

/// Where a process finds whether KSM has all its memory.
const KSM_OF_ITSELF: &str = "/proc/self/ksm_stat";

#[test]
fn the_environment_tells_the_agent_and_keeps_other_preloads() {
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &[]);
    let mut command = pageone();
    command.arg("run").arg("--socket").arg(place.socket());
    command.args(["--domain", "blue", "--also-ksm", "--", "env"]);
    let other = "/usr/lib/x86_64-linux-gnu/libm.so.6";
    let env = text(&output(command.env("LD_PRELOAD", other)).stdout);
    let value = |name: &str| {
        env.lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or("")
    };
    let preloaded = value("LD_PRELOAD=").strip_prefix(other).unwrap_or("");
    assert!(
        preloaded.starts_with(':') && preloaded.ends_with("libpageone_agent.so"),
        "{env}"
    );
    assert_eq!(
        value("PAGEONE_SOCKET="),
        place.socket().to_str().expect("text")
    );
    assert_eq!(
        (value("PAGEONE_DOMAIN="), value("PAGEONE_ALSO_KSM=")),
        ("blue", "1")
    );
}

#[test]
fn a_domain_that_is_no_name_is_refused() {
    let place = Place::new();
    let mut command = pageone();
    command.arg("run").arg("--socket").arg(place.socket());
    let refused = output(command.args(["--domain", &"x".repeat(64), "--", "true"]));
    assert_eq!(refused.status.code(), Some(125));
    assert!(
        text(&refused.stderr).contains("domain"),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn a_node_is_chosen_and_one_that_is_not_there_is_named() {
    need_agent();
    let place = Place::new();
    let on = |node: &str| {
        let mut command = pageone();
        command.arg("run").arg("--socket").arg(place.socket());
        command.args(["--node", node, "--"]);
        output(command.args(["cat", "/proc/self/numa_maps", "/proc/self/status"]))
    };
    for node in ["auto", "0"] {
        let done = on(node);
        assert!(done.status.success(), "{}", text(&done.stderr));
        let told = text(&done.stdout);
        assert!(told.contains("prefer"), "memory prefers the node: {told}");
        assert!(told.contains("Cpus_allowed_list:"), "{told}");
    }
    let missing = on("999");
    assert_eq!(missing.status.code(), Some(125));
    assert!(
        text(&missing.stderr).contains("999"),
        "{}",
        text(&missing.stderr)
    );
    let nonsense = on("left");
    assert_eq!(nonsense.status.code(), Some(125));
}

/// Each names the thing, and what to do.
#[test]
fn wrong_words_are_told_with_a_way_out() {
    let place = Place::new();
    let socket = place.socket();
    let socket = socket.to_str().expect("text");
    for (words, what) in [
        (
            &["status", "--socket", socket][..],
            &format!("start one with `pageone daemon --socket {socket}`")[..],
        ),
        (
            &["set", "merge_period=1ms"],
            "merge_period cannot be 1ms: it takes 10 milliseconds to a day",
        ),
        (&["detach", "4194305"], "there is no such process\n"),
        (
            &["attach", "--dry-run", "--domain", "a\nb", "1"],
            "`a\\nb` is no domain",
        ),
        (
            &["run", "--node", "999", "--", "true"],
            "`pageone numa topology` shows",
        ),
    ] {
        let done = output(pageone().args(words));
        let said = text(&done.stderr);
        assert!(
            !done.status.success() && said.contains(what),
            "{words:?}: {said}"
        );
    }
}

/// The command and the agent, where all users can reach them.
fn for_all(place: &Place) -> PathBuf {
    let open = PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(place.path(), open).expect("a mode");
    let built = pageone().get_program().to_owned();
    let built = Path::new(&built);
    for file in ["pageone", "libpageone_agent.so"] {
        install(built.with_file_name(file), place.path().join(file));
    }
    place.path().join("pageone")
}

#[test]
fn a_user_without_the_right_is_told_and_the_command_runs() {
    const STRANGER: u32 = 61_018;
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user, and take a right from all");
    }
    need_agent();
    let Some(_knob) = Knob::set("/proc/sys/vm/unprivileged_userfaultfd", "0") else {
        return;
    };
    let place = Place::new();
    let mut command = Command::new(for_all(&place));
    command.uid(STRANGER).gid(STRANGER).current_dir("/");
    command
        .env_remove("LD_PRELOAD")
        .env_remove("XDG_RUNTIME_DIR");
    command.arg("run").arg("--socket").arg(place.socket());
    let done = output(command.args(["--", "sh", "-c", "echo out; exit 7"]));
    let said = text(&done.stderr);
    assert_eq!(done.status.code(), Some(7), "{said}");
    assert_eq!(text(&done.stdout), "out\n");
    for part in [
        "no right to userfaultfd, so the command runs, but its memory is not merged",
        "have root start a daemon (`sudo ",
        "`), or set vm.unprivileged_userfaultfd to 1",
        "an engine of this command's own could merge nothing",
    ] {
        assert!(said.contains(part), "no {part}: {said}");
    }
}

/// Says `up`, then a line for each SIGUSR1 until SIGTERM.
const COUNTS: &str = "
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static void one(int signal) { (void)!write(1, \"one\\n\", 4); }
static void end(int signal) { _exit(7); }
int main(void) {
    signal(SIGUSR1, one);
    signal(SIGTERM, end);
    (void)!write(1, \"up\\n\", 3);
    for (;;) pause();
}
";

/// A program made of `source`; none without a compiler.
fn made(place: &Place, source: &str, flags: &[&str]) -> Option<PathBuf> {
    let (source, program) = (place.file("made.c", source), place.path().join("made"));
    let mut cc = Command::new("cc");
    cc.args(flags).arg("-o").arg(&program).arg(source);
    if !cc.output().is_ok_and(|cc| cc.status.success()) {
        common::tools::lacks(&format!("C compiler that takes {flags:?}"));
        return None;
    }
    Some(program)
}

/// `run` in a group of its own, and the lines of its command, which has said `up`.
fn begun(place: &Place, command: &[&str]) -> (Running, Pid, Lines<BufReader<ChildStdout>>) {
    need_agent();
    let mut run = pageone();
    run.arg("run").arg("--socket").arg(place.socket());
    run.arg("--").args(command).process_group(0);
    run.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running::start(&mut run);
    let stdout = running.0.stdout.take().expect("stdout");
    let mut lines = BufReader::new(stdout).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "up");
    let pid = Pid::from_child(&running.0);
    (running, pid, lines)
}

#[test]
fn a_signal_of_the_whole_group_reaches_the_command_once() {
    let place = Place::new();
    let Some(counts) = made(&place, COUNTS, &[]) else {
        return;
    };
    let (mut running, group, mut lines) = begun(&place, &[counts.to_str().expect("text")]);
    let mut count = 0;
    for round in 0..20 {
        match round % 5 {
            0 => kill_process(group, Signal::USR1),
            _ => kill_process_group(group, Signal::USR1),
        }
        .expect("the signal is sent");
        assert_eq!(lines.next().expect("a line").expect("text"), "one");
        count += 1;
        // What is passed on late comes in this time.
        std::thread::sleep(Duration::from_millis(50));
    }
    kill_process_group(group, Signal::TERM).expect("the signal is sent");
    assert_eq!(running.end(), 7);
    assert_eq!(count + lines.count(), 20);
}

#[test]
fn a_command_that_has_left_the_group_is_told() {
    let place = Place::new();
    let Some(counts) = made(&place, COUNTS, &[]) else {
        return;
    };
    let counts = counts.to_str().expect("text");
    let (mut running, group, _lines) = begun(&place, &["setsid", counts]);
    kill_process_group(group, Signal::TERM).expect("the signal is sent");
    assert_eq!(running.end(), 7);
}

#[test]
fn a_command_that_stops_stops_us_and_goes_on_with_us() {
    let place = Place::new();
    for signal in [Signal::STOP, Signal::TSTP] {
        let script = format!("echo up; kill -{} $$; echo on; exit 7", signal.as_raw());
        let (mut running, pid, mut lines) = begun(&place, &["sh", "-c", &script]);
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("a child");
        let (_, status) = stopped.expect("a change");
        assert_eq!(status.stopping_signal(), Some(signal.as_raw()));
        kill_process(pid, Signal::CONT).expect("the signal is sent");
        assert_eq!(lines.next().expect("a line").expect("text"), "on");
        assert_eq!(running.end(), 7);
    }
}

/// Words by which a shell runs others, with dispositions, a mask and limits that are not the usual ones.
const GIVES: &str = "ulimit -S -n 300; ulimit -S -f 2048; exec env --default-signal \
    --ignore-signal=PIPE --ignore-signal=CHLD --ignore-signal=XFSZ --block-signal=USR1 \"$@\"";

#[test]
fn a_command_is_given_what_run_was_given() {
    const TELLS: [&str; 5] = [
        "grep",
        "-hE",
        "SigBlk|SigIgn|file size|open files",
        "/proc/self/status",
        "/proc/self/limits",
    ];
    need_agent();
    let place = Place::new();
    let given = |words: &[&str]| {
        let mut shell = Command::new("sh");
        shell.args(["-c", GIVES, "sh"]).args(words).args(TELLS);
        output(&mut shell)
    };
    // Without signals 32 and 33, which are the C library's own: it sets them when a thread starts.
    let told = |done: &Output| -> Vec<String> {
        let lines = text(&done.stdout);
        let lines = lines
            .lines()
            .map(|line| match line.strip_prefix("SigIgn:") {
                Some(set) => set.chars().rev().take(7).collect(),
                None => line.to_owned(),
            });
        lines.collect()
    };
    let wanted = told(&given(&[]));
    assert!(wanted.len() >= 4, "{wanted:?}");
    let program = pageone().get_program().to_owned();
    let program = program.to_str().expect("text");
    let socket = place.socket();
    let socket = socket.to_str().expect("text");
    let run = [program, "run", "--socket", socket, "--"];
    let alone = given(&run);
    assert_eq!(told(&alone), wanted, "{}", text(&alone.stderr));
    assert_eq!(alone.status.code(), Some(0), "{}", text(&alone.stderr));
    let _daemon = daemon(&place, &[]);
    let served = given(&run);
    assert_eq!(told(&served), wanted, "{}", text(&served.stderr));
}

#[test]
fn an_engine_that_cannot_be_leaves_the_command_unmerged() {
    need_agent();
    let place = Place::new();
    let program = pageone().get_program().to_owned();
    let ran = |before: &str| {
        let mut shell = Command::new("sh");
        let script = format!("{before}; exec \"$@\"");
        shell.args(["-c", &script, "sh"]).arg(&program);
        shell.args(["run", "--socket"]).arg(place.socket());
        let done = output(shell.args(["--", "sh", "-c", "exit 7"]));
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(7), "{before}: {said}");
        said
    };
    for (before, word) in [
        ("ulimit -f 0", "(ulimit -f)"),
        ("ulimit -n 6", "Too many open files"),
        ("ulimit -n 10", "Too many open files"),
        ("ulimit -n 12", "Too many open files"),
    ] {
        let said = ran(before);
        assert!(said.contains(word), "{before}: {said}");
        assert!(said.contains("but its memory is not merged"), "{said}");
    }
    if !rustix::process::geteuid().is_root() {
        return;
    }
    // These have an engine all the same.
    let long = place.path().join("long".repeat(40));
    std::fs::create_dir(&long).expect("a folder");
    let long = format!("export TMPDIR={}", long.display());
    for before in [
        "ulimit -S -f 0",
        "ulimit -t 1000",
        "export TMPDIR=/no/such/folder",
        &long,
    ] {
        let said = ran(before);
        assert!(said.contains("pageone: saved at most"), "{before}: {said}");
    }
}

/// The process with the engine of a `run`.
fn engine_of(run: Pid) -> Pid {
    let run = run.as_raw_pid();
    let children = format!("/proc/{run}/task/{run}/children");
    let children = std::fs::read_to_string(children).expect("its children");
    let engine = children.split_whitespace().find(|child| {
        let name = std::fs::read_to_string(format!("/proc/{child}/comm"));
        name.is_ok_and(|name| name == "pageone-engine\n")
    });
    let engine = engine.and_then(|pid| Pid::from_raw(pid.parse().ok()?));
    engine.expect("an engine")
}

#[test]
fn the_engine_stops_and_goes_on_with_run() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root is sure to have an engine");
    }
    let place = Place::new();
    let script = "echo up; echo $$; exec sleep 60";
    let (mut running, run, mut lines) = begun(&place, &["sh", "-c", script]);
    let command = lines.next().expect("a line").expect("text");
    let engine = engine_of(run).as_raw_pid().to_string();
    let is_stopped = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
        stat.contains(") T ")
    };
    let both = || [is_stopped(&command), is_stopped(&engine)];
    for signal in [Signal::STOP, Signal::TSTP] {
        kill_process_group(run, signal).expect("the signal is sent");
        let stop = || (both() == [true; 2]).then_some(());
        common::wait_for("the stop of the engine", stop);
        let stopped = waitpid(Some(run), WaitOptions::UNTRACED).expect("a child");
        assert!(stopped.is_some());
        kill_process(run, Signal::CONT).expect("the signal is sent");
        let goes_on = || (both() == [false; 2]).then_some(());
        common::wait_for("that it goes on", goes_on);
    }
    running.signal(SIGTERM);
    let (code, said) = (running.end(), running.stderr());
    assert_eq!(code, 128 + SIGTERM, "{said}");
    assert!(said.contains("pageone: saved at most"), "{said}");
}

/// By a signal, as when the kernel is short of memory; or for want of address space.
#[test]
fn an_engine_that_ends_costs_the_command_its_merging_alone() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root is sure to have an engine");
    }
    let place = Place::new();
    let script = "trap 'exit 42' TERM; echo up; echo $PAGEONE_SOCKET; while :; do sleep 0.02; done";
    let (mut running, run, mut lines) = begun(&place, &["sh", "-c", script]);
    let socket = lines.next().expect("a line").expect("text");
    let folder = Path::new(&socket).parent().expect("a folder");
    assert!(folder.is_dir(), "{socket}");
    kill_process(engine_of(run), Signal::ABORT).expect("the signal is sent");
    // It is told when it happens, and the command's end is its own.
    std::thread::sleep(Duration::from_millis(100));
    running.signal(SIGTERM);
    let (code, said) = (running.end(), running.stderr());
    assert_eq!(code, 42, "{said}");
    assert!(said.contains("the engine has ended (signal: 6"), "{said}");
    assert!(!folder.exists(), "{socket} is left");

    for kilobytes in [24_000, 36_000, 40_960, 60_000] {
        let mut shell = Command::new("sh");
        let script = format!("ulimit -v {kilobytes}; ulimit -c unlimited; exec \"$@\"");
        let temporary = place.path().join(kilobytes.to_string());
        std::fs::create_dir(&temporary).expect("a folder");
        shell.current_dir(&temporary).env("TMPDIR", &temporary);
        shell.args(["-c", &script, "sh"]);
        shell.arg(pageone().get_program()).args(["run", "--socket"]);
        shell.arg(place.socket());
        let done = output(shell.args(["--", "sh", "-c", "sleep 0.5; exit 7"]));
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(7), "{kilobytes}: {said}");
        let left = std::fs::read_dir(&temporary).expect("a folder").count();
        assert_eq!(left, 0, "{kilobytes}: files are left");
    }
}

#[test]
fn a_program_that_becomes_another_users_is_a_guest_of_our_own_engine() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can become another user");
    }
    need_agent();
    let place = Place::new();
    let mut command = Command::new(for_all(&place));
    command.env_remove("LD_PRELOAD").current_dir("/");
    command.args(["run", "--any", "--any-after", "100ms", "--socket"]);
    command.arg(place.socket()).arg("--");
    command.args(["setpriv", "--reuid=61019", "--regid=61019"]);
    let done = output(command.args(["--clear-groups", "sleep", "3"]));
    let said = text(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(said.contains("pageone: saved at most"), "{said}");
    assert!(!said.contains("no process became a guest"), "{said}");
}

/// Lives for longer than `--any-after`, and loses no block.
const SANITIZED: &str = "
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    char *block = malloc(1 << 20);
    memset(block, 1, 1 << 20);
    sleep(1);
    int wrong = block[5] != 1;
    free(block);
    return wrong ? 1 : 9;
}
";

#[test]
fn programs_with_a_sanitizer_that_the_command_starts_run_unmerged() {
    let place = Place::new();
    let Some(sanitized) = made(&place, SANITIZED, &["-fsanitize=address"]) else {
        return;
    };
    let script = format!("{}; exit $?", sanitized.display());
    let done = run_with(
        &place,
        &["--any", "--any-after", "100ms"],
        &["sh", "-c", &script],
    );
    assert_eq!(done.status.code(), Some(9), "{}", text(&done.stderr));
}

#[test]
fn a_small_stack_is_enough() {
    need_agent();
    let place = Place::new();
    let program = pageone().get_program().to_owned();
    let said = |words: &[&str]| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -s 64; exec \"$@\"", "sh"]);
        shell.arg(&program).args(words);
        shell.env("PAGEONE_SOCKET", place.socket());
        output(&mut shell)
    };
    for (words, code) in [
        (&["--help"][..], 0),
        (&["status"], 1),
        (&["run", "--", "true"], 0),
        (&["run", "--", "false"], 1),
    ] {
        let done = said(words);
        let stderr = text(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{words:?}: {stderr}");
    }
}
