//! Objects that an attacker has a name or a descriptor of: stores, lines, the socket's folder, the log, the agent's thread, a
//! cgroup of another tenant's, the path at which agents look for their daemon.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::arena::{ATTACKER, Arena, HONEST, PAGES};
use crate::attacker::Attacker;
use crate::common::{json, text, wait_for};
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
        let changes = |line: &&String| {
            let what = line.strip_prefix("went through: ").unwrap_or_default();
            let content = WRITTEN.iter().any(|way| what.starts_with(way));
            line.starts_with("went") && !content
        };
        let changed: Vec<_> = attacker.said.iter().filter(changes).collect();
        assert!(changed.is_empty(), "more than a page of bytes: {changed:?}");
        attacker
    });
}

/// What changes the bytes of a line only, which mean nothing.
const WRITTEN: [&str; 6] = [
    "write",
    "punch",
    "allocate",
    "copy into",
    "map shared and",
    "mprotect",
];

/// The daemon asks whether a line is free, while the kernel holds the line's lock for the attacker.
#[test]
fn a_write_into_its_lines_that_hangs() {
    if let Some(arena) = Arena::new() {
        arena.withstands(|arena| arena.attack("hung-write", &[]));
    }
}

#[test]
fn a_write_into_its_lines_that_hangs_over_a_restart() {
    if let Some(arena) = Arena::with(&["--keep"]) {
        arena.withstands(|arena| {
            let attacker = arena.attack("hung-write", &[]);
            arena.restart();
            attacker
        });
    }
}

#[test]
fn pins_on_lines_over_a_restart() {
    if let Some(arena) = Arena::with(&["--keep"]) {
        arena.withstands(|arena| {
            let attacker = arena.attack("pinned-lines", &["40"]);
            arena.restart();
            attacker
        });
    }
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

/// Whether a character does something to a line.
fn acts(c: char) -> bool {
    c.is_control() || "\u{202e}\u{200b}\u{feff}".contains(c)
}

#[test]
fn names_that_write_lines_of_their_own() {
    let Some(arena) = Arena::new() else { return };
    let folder = arena.public_folder().join("names");
    let _attacker = arena.attack("forge", &[folder.to_str().unwrap()]);
    arena.let_pass(5);
    let forged = |line: &&str| {
        let begins = |word: &&str| line.trim_start().starts_with(*word);
        line.chars().any(acts) || ["2026-01-01T00", "forged"].iter().any(begins)
    };
    let clean = |what: &str, said: &str| {
        let lines: Vec<_> = said.lines().filter(forged).collect();
        assert!(lines.is_empty(), "{what}: {lines:?}");
    };
    for uid in [0, ATTACKER] {
        for words in [&["status"][..], &["status", "--json"]] {
            let shown = arena.command(uid, words);
            assert!(shown.status.success(), "{}", text(&shown.stderr));
            let shown = text(&shown.stdout);
            assert!(
                shown.contains("forged"),
                "its names are to be seen: {shown}"
            );
            clean("status", &shown);
        }
    }
    let log = arena.log();
    assert!(log.contains("forged"), "{log}");
    clean("the log", &log);
}

/// The same where a cgroup's path is part of the domain, and a request quotes what it does not understand.
#[test]
fn names_of_cgroups_and_requests() {
    const NAME: &str = "forged\u{202e}\u{200b}\u{feff}";
    let group = match Cgroup::new(NAME) {
        Ok(group) => group,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let policy = "default = 'refuse'\n[[rule]]\ncgroup = '/**'\nper = 'cgroup'\n";
    let Some(arena) = Arena::empty(&[], Some(policy)) else {
        return;
    };
    let mut guest = arena.guest(HONEST);
    group.put(guest.pid);
    guest.offer(64, 5);
    wait_for("it is served", || {
        (guest.run("served") == "1").then_some(())
    });
    // An asker of another cgroup is shown no guest here, root is shown all.
    let mut shown = String::new();
    for uid in [0, HONEST] {
        for words in [&["status"][..], &["status", "--json"]] {
            shown.push_str(&text(&arena.command(uid, words).stdout));
        }
    }
    let asked = arena.command(HONEST, &["run", "--domain", NAME, "--", "true"]);
    assert!(!asked.status.success());
    shown.push_str(&text(&asked.stderr));
    shown.push_str(&arena.log());
    assert!(shown.matches("forged").count() >= 4, "{shown}");
    let lines: Vec<_> = shown
        .lines()
        .filter(|line| line.chars().any(acts))
        .collect();
    assert!(lines.is_empty(), "{lines:?}");
}

/// A path of 4000 bytes, of which no text is made without care. What lies below it is removed on drop.
struct Deep {
    top: Cgroup,
    folders: Vec<PathBuf>,
}

impl Deep {
    fn new() -> Result<Self, String> {
        use std::os::unix::ffi::OsStrExt;
        let top = Cgroup::new("deep")?;
        let odd: Vec<u8> = (1..=255).filter(|byte| !b"\n/".contains(byte)).collect();
        let mut folders = vec![top.0.clone()];
        for level in 0..15 {
            let mut name = odd.clone();
            name.rotate_left(level * 16);
            let last = folders.last().expect("the top");
            let next = last.join(std::ffi::OsStr::from_bytes(&name));
            fs::create_dir(&next).map_err(|why| format!("an odd control group: {why}"))?;
            folders.push(next);
        }
        Ok(Self { top, folders })
    }
}

impl Drop for Deep {
    fn drop(&mut self) {
        for folder in self.folders.iter().rev() {
            for _ in 0..100 {
                if fs::remove_dir(folder).is_ok() || !folder.exists() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        assert!(!self.top.0.exists() || std::thread::panicking());
    }
}

/// The domain rests on such a group, and the daemon shows its path in status, log and refusals.
#[test]
fn a_cgroup_whose_path_is_long_and_odd() {
    let deep = match Deep::new() {
        Ok(deep) => deep,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let policy = "default = 'refuse'\n[[rule]]\ncgroup = '/**'\nper = 'cgroup'\n";
    let Some(mut arena) = Arena::with_policy(policy) else {
        return;
    };
    let mut guest = arena.guest(HONEST);
    let last = deep.folders.last().unwrap();
    fs::write(last.join("cgroup.procs"), guest.pid.to_string()).unwrap();
    guest.offer(64, 5);
    arena.let_pass(20);
    let mut shown = arena.log();
    for words in [&["status"][..], &["status", "--json"]] {
        let (took, answer) = crate::figures::time(|| arena.command(HONEST, words));
        assert!(answer.status.success(), "{}", text(&answer.stderr));
        assert!(took < 2 * crate::arena::a_second(), "{took:?}");
        shown.push_str(&text(&answer.stdout));
    }
    let lines: Vec<_> = shown
        .lines()
        .filter(|line| line.chars().any(acts))
        .collect();
    assert!(lines.is_empty(), "{lines:?}");
    // Whether it is a guest or has a reason: it is known, and by itself.
    let status = json(&arena.place);
    let served = |pid: u32| {
        let guests = status["guests"].as_array().unwrap().iter();
        let mut its = guests.filter(|guest| guest["pid"] == pid);
        its.next().map(|guest| guest["domain"].clone())
    };
    let is_told = shown.contains(&guest.pid.to_string());
    assert!(served(guest.pid).is_some() || is_told, "{shown}");
    assert_ne!(served(guest.pid), served(arena.pair[0].pid));
    guest.run("check");
    drop(guest);
    arena.renew();
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

/// Frames of the pages that a guest has offered.
fn frames(guest: &mut Guest) -> Vec<u64> {
    guest.run("check"); // so they are there
    let frame = |page| guest.frame(page).unwrap();
    (0..PAGES).map(frame).collect()
}

/// The numbers of the stores that a process maps.
fn mapped_stores(pid: u32) -> HashSet<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let stores = maps
        .lines()
        .filter(|line| line.contains("/memfd:pageone-store"));
    let number = |line: &str| line.split_whitespace().nth(4).unwrap().to_owned();
    stores.map(number).collect()
}

/// Waits until both guests have all their pages merged, in the domain.
fn merged(arena: &Arena, guests: [&Guest; 2], domain: &str) {
    wait_for(domain, || {
        let status = json(&arena.place);
        let its = |pid| {
            let guests = status["guests"].as_array().unwrap().iter();
            let mut its = guests.filter(|guest| guest["pid"] == pid && guest["domain"] == domain);
            its.next()
                .is_some_and(|guest| guest["pages_sharing"] == PAGES)
        };
        guests.iter().all(|guest| its(guest.pid)).then_some(())
    });
}

/// One that root started merges with root's, becomes an ordinary user, and merges with that user's. In between nothing
/// of it is shared with any guest.
#[test]
fn a_guest_that_changes_its_user() {
    let Some(arena) = Arena::empty(&[], None) else {
        return;
    };
    let [mut left, mut guest] = [0; 2].map(|uid| arena.guest(uid));
    left.offer(PAGES, 5);
    guest.offer(PAGES, 5);
    merged(&arena, [&left, &guest], "uid:0");
    assert_eq!(frames(&mut left), frames(&mut guest));
    let former = mapped_stores(guest.pid);
    assert_eq!(former.len(), 1);

    // It is a secret after this, and belongs nowhere.
    guest.run(&format!("rights m:setresgid {HONEST} {HONEST} {HONEST}"));
    guest.run(&format!("rights m:setresuid {HONEST} {HONEST} {HONEST}"));
    let kept: HashSet<_> = frames(&mut left).into_iter().collect();
    let mut shared = || {
        let own = frames(&mut guest).into_iter();
        own.filter(|frame| kept.contains(frame)).count()
    };
    wait_for("its own pages", || (shared() == 0).then_some(()));

    guest.run("rights m:dumpable 1");
    let mut other = arena.guest(HONEST);
    other.offer(PAGES, 5);
    let domain = format!("uid:{HONEST}");
    merged(&arena, [&guest, &other], &domain);
    assert_eq!(frames(&mut guest), frames(&mut other));
    let now = mapped_stores(guest.pid);
    assert!(
        now.len() == 1 && now.is_disjoint(&former),
        "{now:?} {former:?}"
    );
    assert!(frames(&mut guest).iter().all(|frame| !kept.contains(frame)));
    assert_eq!(mapped_stores(left.pid), former);
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
