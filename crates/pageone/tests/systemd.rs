//! The daemon under a real systemd, with `packaging/pageone.service` as it is: merged pages stay merged
//! over kills and restarts, and what `systemctl stop` throws away is what the documents say.
//!
//! ```text
//!  timeout ── unshare ── systemd (1) ──┬── pageone.service ── pageone daemon
//!                                      │            │ /run/pageone.sock
//!  this test ── nsenter ───────────────┴── guests, systemctl, pageone status
//! ```
//!
//! systemd is the first process of namespaces of its own ([`Machine`]), so that killing it, or `timeout`, or
//! this test, kills all that runs there. Where there is no systemd, or no right to namespaces, the tests are skipped.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::{
    Place, Running, alone, child, count, guests_of, held, output, pageone, paired, text, wait_for,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{Guest, check};

/// Pages of a guest: 8 MiB.
const PAGES: usize = 2048;
/// Pages whose frames are looked at.
const LOOKED_AT: [usize; 4] = [0, 1, 700, PAGES - 1];
/// When all that runs there is killed, whatever it is doing, in seconds.
const LIFETIME: &str = "100";
const UNIT: &str = "pageone.service";
const SOCKET: &str = "pageone-attach.socket";
const ATTACH: &str = "pageone-attach@.service";
const SERVE: &str = "pageone-serve.service";
/// Memory files kept for two guests of one user, on a machine with one node: a store, a tie, and a note each on
/// the domain and on the knobs, and the history.
const KEPT: usize = 5;
/// The name of its control group, before the test's process id.
const GROUP: &str = "pageone-systemd-";
/// What systemd is run in.
const NAMESPACES: [&str; 8] = [
    "--fork",
    "--kill-child",
    "--pid",
    "--mount-proc",
    "--cgroup",
    "--uts",
    "--ipc",
    "--net",
];

/// A program of systemd's, where distributions put it.
fn program(name: &str) -> Option<PathBuf> {
    let folders = ["/usr/lib/systemd", "/lib/systemd", "/usr/bin", "/bin"];
    let programs = folders.map(|folder| Path::new(folder).join(name));
    programs.into_iter().find(|program| program.exists())
}

/// A folder of units: the services as they are packaged, drop-ins that say what is different here, and the
/// targets that every service needs.
fn units(place: &Place) -> PathBuf {
    let folder = place.path().join("units");
    for unit in [UNIT, SOCKET, ATTACH, SERVE] {
        fs::create_dir_all(folder.join(format!("{unit}.d"))).unwrap();
        let packaged = support::root().join("packaging").join(unit);
        fs::copy(packaged, folder.join(unit)).unwrap();
    }
    for target in ["sysinit", "basic", "sockets", "shutdown", "multi-user"] {
        let path = folder.join(format!("{target}.target"));
        fs::write(path, format!("[Unit]\nDescription={target}\n")).unwrap();
    }
    let daemon = pageone().get_program().to_owned();
    let config = place.file("config.toml", "threads = 2\n");
    let drop_in = format!(
        "[Service]\nExecStart=\nExecStart={} daemon --config {}\nStandardError=append:/run/log\n",
        Path::new(&daemon).display(),
        config.display(),
    );
    fs::write(folder.join(format!("{UNIT}.d/test.conf")), drop_in).unwrap();
    let drop_in = format!(
        "[Service]\nExecStart=\nExecStart={} attach --asked --socket /run/pageone.sock\n\
         StandardOutput=null\nStandardError=append:/run/log\n",
        Path::new(&daemon).display(),
    );
    fs::write(folder.join(format!("{ATTACH}.d/test.conf")), drop_in).unwrap();
    // systemd makes a folder in /tmp for PrivateTmp= and for PrivateDevices=, and the root is read-only. ProtectHome= would hide
    // a build in /root, and no machine knows `pageone`. `make test-deb` tries the unit as it is.
    let drop_in = format!(
        "[Service]\nExecStart=\nExecStart={} serve --socket /run/pageone.sock\nUser=daemon\n\
         PrivateTmp=no\nPrivateDevices=no\nProtectHome=no\nStandardError=append:/run/serve\n",
        Path::new(&daemon).display(),
    );
    fs::write(folder.join(format!("{SERVE}.d/test.conf")), drop_in).unwrap();
    folder
}

/// A systemd that runs nothing else, and its namespaces; all of it ends on drop.
struct Machine {
    unshare: Running,
    group: Group,
    place: Place,
}

/// A control group of version 2; removed on drop.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut mounts = mounts.lines().map(|line| line.split(' '));
        let root = mounts.find_map(|mut fields| {
            let path = fields.nth(1)?;
            (fields.next() == Some("cgroup2")).then_some(path)
        });
        let root = Path::new(root.ok_or("no control groups of version 2")?);
        Self::sweep(root);
        let folder = root.join(format!("{GROUP}{}", std::process::id()));
        fs::create_dir(&folder).map_err(|why| format!("no control group of our own: {why}"))?;
        Ok(Self(folder))
    }

    /// Removes what tests left that were killed.
    fn sweep(root: &Path) {
        for entry in fs::read_dir(root).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let pid = name.strip_prefix(GROUP);
            if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                Self::remove(&entry.path());
            }
        }
    }

    /// A command whose process and children are in this group, and die with the thread that starts it.
    fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "timeout", "-s", "KILL", LIFETIME]);
        // `timeout` may be killed as well.
        command.args(["setpriv", "--pdeathsig", "KILL", "sh", "-c"]);
        command.arg(r#"echo $$ >"$0"/cgroup.procs && exec unshare "$@""#);
        command.arg(&self.0).args(NAMESPACES);
        command.stdin(Stdio::null());
        command
    }

    /// Removes the groups of `folder` and it; false while a process is in one.
    fn remove(folder: &Path) -> bool {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                Self::remove(&entry.path());
            }
        }
        fs::remove_dir(folder).is_ok() || !folder.exists()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Members are gone a moment after they were killed.
        for _ in 0..500 {
            if Self::remove(&self.0) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{} is left behind", self.0.display());
    }
}

impl Machine {
    /// Boots; none, with a word, where that cannot be.
    fn boot() -> Option<Self> {
        let Some(systemd) = program("systemd") else {
            common::tools::lacks("systemd");
            return None;
        };
        let group = match Group::new() {
            Ok(group) => group,
            Err(why) => {
                eprintln!("skipped: {why}");
                return None;
            }
        };
        // From here on what fails is a failure.
        let mut probe = group.command();
        let mounts = ["mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup"];
        let probed = output(probe.args(mounts));
        if !probed.status.success() {
            eprintln!("skipped: no namespaces: {}", text(&probed.stderr));
            return None;
        }
        let place = Place::new();
        let folder = units(&place);
        let mut command = group.command();
        command.arg(support::root().join("tests/systemd/boot"));
        command.arg(systemd).arg(folder);
        let said = place.file("boot.log", "");
        let unshare = Running::start(command.stderr(fs::File::create(&said).unwrap()));
        let mut machine = Self {
            unshare,
            group,
            place,
        };
        wait_for("systemd", || {
            let ended = machine.unshare.0.try_wait().unwrap();
            let said = fs::read_to_string(&said).unwrap();
            assert!(ended.is_none(), "systemd does not start: {said}");
            let state = output(machine.systemctl().arg("is-system-running"));
            (text(&state.stdout).trim() == "running").then_some(())
        });
        Some(machine)
    }

    /// One whose daemon has merged two equal guests.
    fn with_merged_guests() -> Option<(Self, [Guest; 2])> {
        let machine = Self::boot()?;
        machine.tell(&["start"]);
        machine.hurry();
        let guests = [machine.guest(), machine.guest()];
        machine.when("two equal guests to be merged", shared);
        Some((machine, guests))
    }

    /// The process id of systemd, seen from here.
    fn init(&self) -> Option<u32> {
        // What `timeout` starts becomes `unshare`, whose child becomes systemd.
        child(child(self.unshare.0.id())?)
    }

    /// A command that runs `program` there.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        // 0 is of no process: the command fails.
        let init = self.init().unwrap_or(0).to_string();
        command.args(["--target", &init, "--pid", "--mount", "--"]);
        command.arg(program).stdin(Stdio::null());
        command
    }

    fn systemctl(&self) -> Command {
        self.command(Path::new("systemctl"))
    }

    /// `systemctl WORDS pageone.service`, which must succeed.
    fn tell(&self, words: &[&str]) {
        let said = output(self.systemctl().args(words).arg(UNIT));
        assert!(
            said.status.success(),
            "systemctl {words:?}: {}\n{}",
            text(&said.stderr),
            self.log()
        );
    }

    /// A property of the service.
    fn show(&self, property: &str) -> String {
        let mut command = self.systemctl();
        let said = output(command.args(["show", "--value", "-p", property, UNIT]));
        assert!(said.status.success(), "{}", text(&said.stderr));
        text(&said.stdout).trim().to_owned()
    }

    fn number(&self, property: &str) -> u64 {
        let said = self.show(property);
        said.parse()
            .unwrap_or_else(|_| panic!("{property}={said:?}"))
    }

    fn time(&self, property: &str) -> Duration {
        let said = self.show(property);
        humantime::parse_duration(&said).unwrap_or_else(|_| panic!("{property}={said:?}"))
    }

    /// The daemon's process id, seen from here.
    fn main_pid(&self) -> u32 {
        let inside = self.number("MainPID").to_string();
        let group = fs::read_to_string(
            self.group
                .0
                .join("system.slice/pageone.service/cgroup.procs"),
        );
        let pids = group.unwrap_or_default();
        let is_it = |pid: &&str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let numbers = status.lines().find(|line| line.starts_with("NSpid:"));
            numbers.is_some_and(|line| line.ends_with(&format!("\t{inside}")))
        };
        let pid = pids.lines().find(is_it);
        pid.and_then(|pid| pid.parse().ok())
            .expect("the daemon runs")
    }

    /// How many of PageONE's memory files systemd itself holds.
    fn held(&self) -> usize {
        held(self.init().unwrap(), "").len()
    }

    /// What the daemons said.
    fn log(&self) -> String {
        let log = format!("/proc/{}/root/run/log", self.init().unwrap_or(0));
        fs::read_to_string(log).unwrap_or_default()
    }

    /// `pageone WORDS`, run there.
    fn pageone(&self, words: &[&str]) -> Output {
        let program = pageone().get_program().to_owned();
        let mut command = self.command(Path::new(&program));
        output(command.args(words).env_remove("PAGEONE_SOCKET"))
    }

    /// The counters, once they say `done`.
    fn when(&self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, || {
            let said = self.pageone(&["status", "--json"]);
            let status: Value = serde_json::from_slice(&said.stdout).ok()?;
            done(&status).then_some(status)
        })
    }

    /// Merging in tenths of a second from now on, which the unit does not ask for.
    fn hurry(&self) {
        let said = self.pageone(&["set", "merge_period=100ms"]);
        assert!(said.status.success(), "{}", text(&said.stderr));
    }

    fn guest(&self) -> Guest {
        let preload = format!("LD_PRELOAD={}", support::agent().display());
        self.program(&[&preload, "PAGEONE_SOCKET=/run/pageone.sock"])
    }

    /// A program with memory to merge; a guest by what is in its environment.
    fn program(&self, variables: &[&str]) -> Guest {
        let mut command = self.command(Path::new("env"));
        command.args(variables);
        let mut guest = Guest::from(command.arg(support::guest_program(false)));
        guest.run("pid"); // it is there
        guest.pid = child(guest.pid).expect("what nsenter started");
        guest.offer(PAGES, 100);
        guest
    }

    /// Waits until another daemon than `old` serves.
    fn next_daemon(&self, old: u64) {
        wait_for("the next daemon", || {
            let serves = self.show("ActiveState") == "active";
            (serves && self.number("MainPID") != old).then_some(())
        });
    }

    /// Ends it, and guests with it; nothing is left.
    fn end(self, guests: [Guest; 2]) {
        let pids = guests.each_ref().map(|guest| guest.pid);
        let group = self.group.0.clone();
        let folder = self.place.path().to_owned();
        drop(self);
        assert!(!group.exists(), "a control group is left behind");
        assert!(!folder.exists(), "a folder is left behind");
        for pid in pids {
            let process = PathBuf::from(format!("/proc/{pid}"));
            wait_for("a guest to end", || (!process.exists()).then_some(()));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let init = self.init().and_then(|pid| i32::try_from(pid).ok());
        if let Some(init) = init.and_then(Pid::from_raw) {
            let _ = kill_process(init, Signal::KILL);
        }
        // `unshare`, which started it, ends with it; or is killed, should it not.
        for _ in 0..250 {
            if matches!(self.unshare.0.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether two guests share all their pages.
fn shared(status: &Value) -> bool {
    paired(status, PAGES)
}

/// The frames behind some pages; after a check, for a merged page is present only when it was touched.
fn frames(guests: &mut [Guest; 2]) -> [[Option<u64>; 4]; 2] {
    check(guests);
    guests
        .each_ref()
        .map(|guest| LOOKED_AT.map(|page| guest.frame(page)))
}

#[test]
fn systemd_understands_the_units() {
    let Some(analyze) = program("systemd-analyze") else {
        return common::tools::lacks("systemd");
    };
    let place = Place::new();
    let folder = units(&place);
    let verify = |unit| {
        let mut command = Command::new("timeout");
        command.arg("60").arg(&analyze).args(["--man=no", "verify"]);
        command.env("SYSTEMD_UNIT_PATH", &folder);
        output(command.arg(folder.join(unit)))
    };
    for unit in [UNIT, SERVE] {
        let said = verify(unit);
        assert!(said.status.success(), "{unit}: {}", text(&said.stderr));
        assert_eq!(text(&said.stderr), "", "{unit}");
    }
    // It would have said so.
    let more = "[Service]\nFileDescriptorStoreMost=1\n";
    fs::write(folder.join(format!("{UNIT}.d/more.conf")), more).unwrap();
    let said = text(&verify(UNIT).stderr);
    assert!(said.contains("FileDescriptorStoreMost"), "{said}");
}

/// As systemd names the journal to a service, for a file in its place.
#[test]
fn lines_for_the_journal_have_priorities() {
    let _alone = alone();
    let place = Place::new();
    let daemon = pageone().get_program().to_owned();
    let start = |words: &[&str], log: &Path| {
        let mut command = Command::new("sh");
        let named = r#"JOURNAL_STREAM=$(stat -L -c %d:%i /dev/fd/2) exec "$0" "$@""#;
        command.args(["-c", named]).arg(&daemon).args(words);
        command.stderr(fs::File::create(log).unwrap());
        Running::start(command.stdin(Stdio::null()))
    };
    let log = place.file("log", "");
    let socket = place.socket();
    let running = start(&["daemon", "--socket", socket.to_str().unwrap()], &log);
    let said = wait_for("the daemon", || {
        let said = fs::read_to_string(&log).unwrap();
        said.contains("serving at").then_some(said)
    });
    let serving = said.lines().find(|line| line.contains("serving at"));
    assert!(serving.unwrap().starts_with("<6> INFO "), "{said}");
    let mut heads = said.lines().map(|line| line.get(..3));
    assert!(heads.all(|head| matches!(head, Some("<3>" | "<4>" | "<6>"))));
    drop(running);
    let mut running = start(&["daemon", "--config", "/nowhere"], &log);
    assert!(!running.0.wait().unwrap().success());
    let said = fs::read_to_string(&log).unwrap();
    assert!(said.starts_with("<3>pageone: "), "{said}");
    // A mistake in a file is told in several lines.
    let config = place.file("pageone.toml", "threads = [\n");
    let mut running = start(&["daemon", "--config", config.to_str().unwrap()], &log);
    assert!(!running.0.wait().unwrap().success());
    let said = fs::read_to_string(&log).unwrap();
    assert!(said.lines().count() > 1, "{said}");
    assert!(said.lines().all(|line| line.starts_with("<3>")), "{said}");
}

#[test]
fn sharing_goes_on_over_kills_and_restarts() {
    let _alone = alone();
    let Some(machine) = Machine::boot() else {
        return;
    };
    machine.tell(&["start"]);
    // With Type=notify, not before the daemon said that it serves.
    assert_eq!(machine.show("SubState"), "running");
    assert!(machine.log().contains("serving at /run/pageone.sock"));
    machine.hurry();
    let mut guests = [machine.guest(), machine.guest()];
    // In the middle of merging, wherever that may be: what was sent last is in systemd's queue.
    for pause in [120, 230, 260] {
        std::thread::sleep(Duration::from_millis(pause));
        let old = machine.number("MainPID");
        machine.tell(&["kill", "-s", "KILL"]);
        machine.next_daemon(old);
        check(&mut guests);
    }
    machine.when("two equal guests to be merged", shared);
    let before = frames(&mut guests);
    assert_eq!(before[0], before[1]);
    assert!(before[0].iter().all(Option::is_some));
    let deaths: [&[&str]; 4] = [
        &["kill", "-s", "KILL"],
        &["restart"],
        &["kill", "-s", "TERM"],
        &["kill", "-s", "KILL"],
    ];
    for (number, death) in deaths.into_iter().enumerate() {
        if number == 3 {
            // systemd itself, as when its package is upgraded.
            let said = output(machine.systemctl().arg("daemon-reexec"));
            assert!(said.status.success(), "{}", text(&said.stderr));
        }
        let old = machine.number("MainPID");
        machine.tell(death);
        machine.next_daemon(old);
        check(&mut guests);
        let status = machine.when("the saving to come back", shared);
        assert_eq!(count(&status, "window_max_us"), 0, "{death:?} moved pages");
        assert_eq!(count(&status, "pages_skipped"), 0, "{status}");
        assert_eq!(count(&status, "saved_bytes"), PAGES as u64 * 4096);
        assert_eq!(count(&status, "store_bytes"), PAGES as u64 * 4096);
        assert_eq!(count(&status, "merge_period_ms"), 100, "the knob is turned");
        assert_eq!(frames(&mut guests), before);
    }
    wait_for("the ties of former daemons to be let go", || {
        (machine.held() == KEPT).then_some(())
    });
    // And the socket.
    assert_eq!(machine.number("NFileDescriptorStore"), KEPT as u64 + 1);
    machine.tell(&["reload"]);
    assert!(shared(&machine.when("the daemon", |_| true)));
    machine.end(guests);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn running_programs_are_attached_with_the_rights_that_the_unit_leaves() {
    let _turn = alone();
    let Some(machine) = Machine::boot() else {
        return;
    };
    machine.tell(&["start"]);
    machine.hurry();
    let mut guests = [machine.program(&[]), machine.program(&[])];
    assert_eq!(guests_of(&machine.when("an answer", |_| true)), 0);
    let program = support::guest_program(false);
    let rule = format!(
        "threads = 2\n[[attach]]\nexecutable = '{}'\nafter = '0s'\n",
        program.display()
    );
    machine.place.file("config.toml", &rule);
    machine.tell(&["reload"]);
    machine.when("two programs to be attached and merged", shared);
    check(&mut guests);
    let log = machine.log();
    assert_eq!(log.matches(": attached: ").count(), 2, "{log}");
    machine.end(guests);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn programs_of_a_unit_are_attached_by_its_name_and_others_are_not() {
    let _turn = alone();
    let Some(machine) = Machine::boot() else {
        return;
    };
    let unit = "[Service]\nExecStart=sleep 100\n";
    fs::write(machine.place.path().join("units/worker.service"), unit).unwrap();
    for words in [&["daemon-reload"][..], &["start", "worker"]] {
        let said = output(machine.systemctl().args(words));
        assert!(said.status.success(), "{words:?}: {}", text(&said.stderr));
    }
    let mut guests = [machine.program(&[]), machine.program(&[])];
    let mut other = machine.program(&[]);
    let group = machine.group.0.join("system.slice/worker.service");
    for guest in &guests {
        fs::write(group.join("cgroup.procs"), guest.pid.to_string()).unwrap();
    }
    let rule = "[[attach]]\nunit = 'worker.service'\nafter = '0s'\n";
    machine.place.file("config.toml", rule);
    machine.tell(&["start"]);
    machine.hurry();
    machine.when("two programs to be attached and merged", shared);
    let looks = |status: &Value| count(status, "full_scans");
    let begun = looks(&machine.when("an answer", |_| true));
    let status = machine.when("some looks more", |status| looks(status) > begun + 20);
    assert_eq!(guests_of(&status), 2, "{status}");
    check(&mut guests);
    other.run("check");
    drop(other);
    machine.end(guests);
}

/// The kernel shows filters to no process that has one, as the daemon's unit has: another unit of the package attaches them.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_machine_with_the_sandbox_of_libvirt_is_attached_by_rule() {
    const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let _turn = alone();
    let qemu = Path::new("/usr/bin/qemu-system-x86_64");
    if !qemu.exists() {
        return common::tools::lacks("QEMU");
    }
    let own = fs::read_to_string("/proc/self/status").unwrap();
    if !own.contains("Seccomp:\t0") {
        return eprintln!("skipped: filters are shown to no process that has one itself");
    }
    let Some(machine) = Machine::boot() else {
        return;
    };
    let rule = format!(
        "[[attach]]\nexecutable = '{}'\nafter = '0s'\n",
        qemu.display()
    );
    machine.place.file("config.toml", &rule);
    let mut command = machine.command(qemu);
    command.args([
        "-sandbox",
        SANDBOX,
        "-accel",
        "tcg,tb-size=8",
        "-m",
        "32",
        "-S",
    ]);
    command.args(["-nodefaults", "-display", "none"]);
    let vm = Running::start(&mut command);
    machine.tell(&["start"]);
    let mut stat = machine.command(Path::new("stat"));
    let stat = output(stat.args(["-c", "%a %u", "/run/pageone-attach.sock"]));
    assert_eq!(text(&stat.stdout), "600 0\n");
    let daemon = fs::read_to_string(format!("/proc/{}/status", machine.main_pid())).unwrap();
    assert!(daemon.contains("Seccomp:\t2"), "{daemon}");
    machine.when("the virtual machine to be a guest", |status| {
        let guests = status["guests"].as_array().unwrap();
        guests.iter().any(|guest| count(guest, "regions") > 0)
    });
    // The machine is a guest before its last thread is let go of.
    wait_for("the word in the log", || {
        let told = machine.log().contains("by rule 1 of [[attach]]");
        told.then_some(())
    });
    let qemu = child(vm.0.id()).expect("what nsenter started");
    let status = fs::read_to_string(format!("/proc/{qemu}/status")).unwrap();
    assert!(status.contains("Seccomp:\t2"), "{status}");
    drop(vm);
    // Without the service the daemon tries by itself, and says why it cannot.
    let said = output(machine.systemctl().args(["stop", SOCKET]));
    assert!(said.status.success(), "{}", text(&said.stderr));
    let vm = Running::start(&mut command);
    wait_for("the reason", || {
        let told = machine
            .log()
            .contains("no process that has a filter itself");
        told.then_some(())
    });
    drop(vm);
}

#[test]
fn metrics_are_served_by_another_user_under_the_unit() {
    const ASK: &str = r"exec 3<>/dev/tcp/127.0.0.1/9633 && printf 'GET /metrics HTTP/1.1\r\nHost: localhost:9633\r\n\r\n' >&3 && cat <&3";
    let _turn = alone();
    if !Path::new("/bin/bash").exists() {
        return eprintln!("skipped: there is no bash");
    }
    let Some(machine) = Machine::boot() else {
        return;
    };
    machine.tell(&["start"]);
    let said = output(machine.systemctl().args(["start", SERVE]));
    let mut show = machine.systemctl();
    // Of systemd's own codes, 217 is an unknown user and 226 a mount that fails: `man systemd.exec`.
    let state = output(show.args(["show", "-p", "Result,ExecMainStatus", SERVE]));
    assert!(said.status.success(), "{}", text(&state.stdout));
    let init = machine.init().unwrap().to_string();
    let said = wait_for("the metrics", || {
        let mut command = Command::new("nsenter");
        command.args(["--target", &init, "--net", "/bin/bash", "-c", ASK]);
        let said = output(command.stdin(Stdio::null()));
        said.status.success().then(|| text(&said.stdout))
    });
    assert!(said.contains("\npageone_saved_bytes 0\n"), "{said}");
    let group = machine.group.0.join("system.slice").join(SERVE);
    let pid = fs::read_to_string(group.join("cgroup.procs")).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap();
    // The drop-in's user. Its number is this machine's.
    let user = text(&output(Command::new("id").args(["-u", "daemon"])).stdout);
    let user = format!("\nUid:\t{}\t", user.trim());
    assert!(status.contains(&user), "{user:?} is not in {status}");
    assert!(status.contains("\nSeccomp:\t2\n"), "{status}");
}

#[test]
fn a_wrong_configuration_may_be_mended_within_a_minute() {
    let _alone = alone();
    let Some((machine, mut guests)) = Machine::with_merged_guests() else {
        return;
    };
    machine.place.file("config.toml", "threads = \"many\"\n");
    let said = output(machine.systemctl().args(["restart", UNIT]));
    assert!(!said.status.success(), "a wrong configuration is told");
    wait_for("systemd to try again", || {
        (machine.number("NRestarts") >= 4).then_some(())
    });
    assert!(machine.log().contains("config.toml"), "{}", machine.log());
    assert_eq!(machine.show("ActiveState"), "activating");
    assert_eq!(machine.held(), KEPT);
    check(&mut guests);
    // A unit that has failed has lost its descriptors.
    let tries = u32::try_from(machine.number("StartLimitBurst")).unwrap();
    let tried = machine.time("RestartUSec") * tries;
    assert!(tried >= Duration::from_secs(60), "only for {tried:?}");
    machine.place.file("config.toml", "threads = 1\n");
    let status = machine.when("the saving to come back", shared);
    assert_eq!(count(&status, "window_max_us"), 0, "{status}");
    assert_eq!(count(&status, "threads"), 1);
    check(&mut guests);
    machine.end(guests);
}

#[test]
fn a_stop_gives_up_what_was_kept_and_no_byte() {
    let _alone = alone();
    let Some((machine, mut guests)) = Machine::with_merged_guests() else {
        return;
    };
    let before = frames(&mut guests);
    assert_eq!(machine.held(), KEPT);
    machine.tell(&["stop"]);
    assert_eq!(machine.show("ActiveState"), "inactive");
    assert_eq!(machine.show("Result"), "success");
    assert_eq!(machine.number("NFileDescriptorStore"), 0);
    assert_eq!(machine.held(), 0);
    assert_eq!(frames(&mut guests), before, "guests share on");
    machine.tell(&["start"]);
    let status = machine.when("both guests to come back", |status| guests_of(status) == 2);
    assert_eq!(count(&status, "merge_period_ms"), 20_000, "{status}");
    machine.hurry();
    // A round ends without guests that are late.
    let status = machine.when("rounds with both guests", |status| {
        count(status, "full_scans") > 3 && count(status, "pages_skipped") == 2 * PAGES as u64
    });
    assert_eq!(count(&status, "store_bytes"), 0, "{status}");
    assert_eq!(frames(&mut guests), before);
    // What is mapped anew is merged as ever.
    for guest in &mut guests {
        guest.renew(PAGES, 200);
    }
    machine.when("new memory to be merged", shared);
    check(&mut guests);
    machine.end(guests);
}
