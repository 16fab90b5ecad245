//! What an attacker has a name or a descriptor of: stores, lines, the socket's folder, the log, the agent's thread, a
//! cgroup of another tenant's, the path at which agents look for their daemon.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::arena::{ATTACKER, Arena, HONEST};
use crate::attacker::Attacker;
use crate::common::{json, text};
use crate::support::Guest;

#[test]
fn descriptors_of_a_session() {
    let Some(arena) = Arena::new() else { return };
    arena.withstands(|arena| {
        let attacker = arena.attack("tamper", &[]);
        assert_eq!(
            attacker.said.last().unwrap(),
            "ready, 0 of the store",
            "{:?}",
            attacker.said
        );
        attacker
    });
}

#[test]
fn a_lock_on_the_sockets_folder() {
    let Some(arena) = Arena::empty(&[], None) else {
        return;
    };
    let folder = arena.place.path().to_str().unwrap().to_owned();
    let _attacker = arena.attack("lock-folder", &[&folder]);
    arena.has_room_for_another();
}

#[test]
fn names_that_write_lines_of_their_own() {
    let Some(arena) = Arena::new() else { return };
    let folder = arena.public_folder().join("names");
    let _attacker = arena.attack("forge", &[folder.to_str().unwrap()]);
    arena.let_pass(5);
    let log = arena.log();
    let forged = |line: &str| {
        line.contains('\u{1b}') || line.starts_with("2026-01-01T00") || line.starts_with("forged")
    };
    let lines: Vec<_> = log.lines().filter(|line| forged(line)).collect();
    assert!(lines.is_empty(), "{lines:?}");
    let shown = arena.command(0, &["status"]);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    assert!(
        !text(&shown.stdout).contains('\u{1b}'),
        "{}",
        text(&shown.stdout)
    );
}

#[test]
fn a_client_without_rights() {
    let Some(arena) = Arena::new() else { return };
    for words in [
        &["set", "run=0"][..],
        &["set", "run=2"],
        &["set", "threads=1"],
    ] {
        let answer = arena.command(ATTACKER, words);
        assert!(!answer.status.success(), "{words:?}");
        assert!(
            text(&answer.stderr).contains("may not"),
            "{}",
            text(&answer.stderr)
        );
    }
    let seen = text(&arena.command(ATTACKER, &["status", "--json"]).stdout);
    for guest in &arena.pair {
        assert!(!seen.contains(&format!("\"pid\":{}", guest.pid)), "{seen}");
        assert!(!seen.contains(&format!("\"pid\": {}", guest.pid)), "{seen}");
    }
    assert_eq!(json(&arena.place)["run"], 1);
}

#[test]
fn a_server_of_another_user() {
    let Some(arena) = Arena::empty(&[], None) else {
        return;
    };
    let socket = arena.public_folder().join("pageone.sock");
    let mut command = Command::new(arena.file("hostile"));
    command
        .args([&ATTACKER.to_string(), "fake-server"])
        .arg(&socket);
    let mut server = Attacker::start(&mut command);
    server.wait_for("ready");
    let guest = Command::new(arena.file("guest"));
    let mut guest = Guest::from(&mut arena.under_agent(guest, &socket, HONEST));
    guest.offer(64, 5);
    server.wait_for("an agent connects");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(guest.run("served"), "0");
    guest.run("check");
    let said = server.listen();
    assert!(
        !said.iter().any(|line| line.contains("answers")),
        "{said:?}"
    );
}

/// What a program that gave its rights up says of its threads, and of what its own hostile code could do.
#[test]
fn the_agents_thread_of_a_program_that_drops_its_rights() {
    let Some(arena) = Arena::empty(&[], None) else {
        return;
    };
    let dropper = Command::new(arena.file("dropper"));
    let mut command = arena.under_agent(dropper, &arena.place.socket(), 0);
    command.arg(ATTACKER.to_string()).arg(arena.file("secret"));
    let mut dropper = Attacker::start(&mut command);
    let said = dropper.wait_for_or_end("ready").join("\n");
    assert!(said.contains("served as root"), "{said}");
    assert!(!said.contains("a thread has other rights"), "{said}");
    assert!(!said.contains("stolen"), "{said}");
}

/// A cgroup of version 2 for a test; removed on drop.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Where version 2 is mounted and may be written, else why not.
    fn new(name: &str) -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut roots = mounts.lines().filter_map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            (fields.get(2) == Some(&"cgroup2")).then(|| PathBuf::from(fields[1]))
        });
        let root = roots.next().ok_or("cgroups of version 2 are not mounted")?;
        let folder = root.join(format!("pageone-hostile-{name}-{}", std::process::id()));
        let made = fs::create_dir(&folder);
        made.map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self(folder))
    }

    fn put(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Removes the group, and makes one of the same name.
    fn make_again(&self) {
        fs::remove_dir(&self.0).unwrap();
        fs::create_dir(&self.0).unwrap();
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let folder = self.0.clone();
        let remove = || fs::remove_dir(&folder).is_ok() || !folder.exists();
        for _ in 0..100 {
            if remove() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn a_cgroup_made_again_by_another_tenant() {
    let (tenant, away) = match (Cgroup::new("tenant"), Cgroup::new("away")) {
        (Ok(tenant), Ok(away)) => (tenant, away),
        (Err(why), _) | (_, Err(why)) => return eprintln!("skipped: {why}"),
    };
    let policy = "default = 'refuse'\n[[rule]]\ncgroup = '/**'\nper = 'cgroup'\n";
    let Some(mut arena) = Arena::empty(&[], Some(policy)) else {
        return;
    };
    arena.pair = (0..2).map(|_| arena.guest(HONEST)).collect();
    arena.pair.iter().for_each(|guest| tenant.put(guest.pid));
    arena.renew();
    arena.pair.iter().for_each(|guest| away.put(guest.pid));
    tenant.make_again();
    let procs = tenant.0.join("cgroup.procs");
    let enter = format!("echo $$ > {}; exec \"$@\"", procs.display());
    let attacker = arena.attack_through(&["sh", "-c", &enter, "sh"], "sessions", &["1"]);
    assert_eq!(attacker.said.last().unwrap(), "ready, 1 sessions");
    arena.let_pass(3);
    assert!(
        !attacker.stores().is_empty(),
        "the attacker has a store to look at"
    );
    arena.gives_nothing_away(&attacker);
}
