//! Trust domains, live: guests of several users and cgroups with equal memory, and what of it they
//! share under which policy. Frames are compared by number, memory files by device and inode.
//!
//! These tests need root: guests run as users of their own.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{
    Knob, Place, Running, alone, count, daemon, install, json, output, pageone, text, wait_for,
};
use serde_json::Value;
use support::Guest;

const PAGES: usize = 1024;
/// Users that no system has.
const USERS: [u32; 3] = [61_001, 61_002, 61_003];

/// Whether these tests can run; says so when not.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can run guests as several users");
    }
    root
}

/// A place that all users can reach, with copies of the programs.
struct Open {
    place: Place,
}

impl Open {
    fn new() -> Self {
        let place = Place::new();
        let open = Self { place };
        open.copy(&support::agent(), "libpageone_agent.so");
        open.copy(support::guest_program(false), "guest");
        open.copy(Path::new(env!("CARGO_BIN_EXE_pageone")), "pageone");
        fs::set_permissions(open.place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        open
    }

    fn copy(&self, from: &Path, name: &str) {
        install(from, self.place.path().join(name));
    }

    fn daemon(&self, policy: &str) -> Running {
        let file = self.place.file("policy.toml", policy);
        let file = file.to_str().unwrap();
        daemon(&self.place, &["--merge-period", "100ms", "--policy", file])
    }

    /// The same, and its log.
    fn daemon_that_says(&self, policy: &str) -> (Running, Said) {
        let mut daemon = self.daemon(policy);
        let said = Said::of(daemon.0.stderr.take().unwrap());
        (daemon, said)
    }

    /// A guest of user `uid` that asks for `domain`; it connects when it offers.
    fn guest(&self, uid: u32, domain: Option<&str>) -> Guest {
        let mut command = Command::new(self.place.path().join("guest"));
        command.uid(uid).gid(uid).current_dir("/");
        command.env("LD_PRELOAD", self.place.path().join("libpageone_agent.so"));
        command.env("PAGEONE_SOCKET", self.place.socket());
        match domain {
            Some(domain) => command.env("PAGEONE_DOMAIN", domain),
            None => command.env_remove("PAGEONE_DOMAIN"),
        };
        Guest::from(&mut command)
    }

    /// What `pageone WORDS` says to user `uid`.
    fn command(&self, uid: u32, words: &[&str]) -> Output {
        let mut command = Command::new(self.place.path().join("pageone"));
        command.uid(uid).gid(uid).current_dir("/");
        command
            .env("PAGEONE_SOCKET", "")
            .env_remove("PAGEONE_DOMAIN");
        let (verb, rest) = words.split_first().unwrap();
        command.arg(verb).arg("--socket").arg(self.place.socket());
        output(command.args(rest))
    }

    fn status_when(&self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, || {
            Some(json(&self.place)).filter(|status| done(status))
        })
    }
}

/// What a daemon says, as it comes.
struct Said(std::sync::Arc<std::sync::Mutex<String>>);

impl Said {
    fn of(stderr: std::process::ChildStderr) -> Self {
        use std::io::BufRead;
        let said = Self(std::sync::Arc::default());
        let all = std::sync::Arc::clone(&said.0);
        let lines = std::io::BufReader::new(stderr).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                all.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        said
    }

    fn wait_for(&self, words: &str) {
        wait_for(words, || {
            self.0.lock().unwrap().contains(words).then_some(())
        });
    }
}

/// Whether `copies` canonical pages have two sharers each.
fn paired(status: &Value, copies: usize) -> bool {
    ["pages_shared", "pages_sharing"].map(|name| count(status, name)) == [copies as u64; 2]
}

fn domain_of(status: &Value, guest: &Guest) -> Option<String> {
    let guests = status["guests"].as_array().unwrap();
    let one = guests.iter().find(|one| one["pid"] == guest.pid)?;
    Some(one["domain"].as_str().unwrap().to_owned())
}

/// Device, inode and name of each memory file that a process maps or has a descriptor of; the
/// agent's thread has a table of descriptors of its own.
fn memory_files(pid: u32) -> BTreeSet<(u64, u64, String)> {
    let mut files = BTreeSet::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        for entry in fs::read_dir(task.unwrap().path().join("fd")).unwrap() {
            let path = entry.unwrap().path();
            let (Ok(name), Ok(meta)) = (fs::read_link(&path), fs::metadata(&path)) else {
                continue; // closed meanwhile
            };
            let name = name.to_str().unwrap().to_owned();
            if name.starts_with("/memfd:") {
                files.insert((meta.dev(), meta.ino(), name));
            }
        }
    }
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    for line in maps.lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        if let [_, _, _, device, inode, name, rest @ ..] = &fields[..]
            && name.starts_with("/memfd:")
        {
            let (major, minor) = device.split_once(':').unwrap();
            let number = |hex: &str| u32::from_str_radix(hex, 16).unwrap();
            let device = rustix::fs::makedev(number(major), number(minor));
            let name = [&[*name], rest].concat().join(" ");
            files.insert((device, inode.parse().unwrap(), name));
        }
    }
    files
}

/// Lets guests compare all their bytes, which also makes every page present.
fn check(guests: &mut [Guest]) {
    for guest in guests {
        guest.run("check");
    }
}

/// Asserts that two guests, after [`check`], have no frame and no memory file in common.
fn assert_apart(one: &Guest, two: &Guest) {
    for page in 0..PAGES {
        assert_ne!(one.frame(page), two.frame(page), "page {page}");
    }
    let (ones, twos) = (memory_files(one.pid), memory_files(two.pid));
    let common: Vec<_> = ones.intersection(&twos).collect();
    assert!(common.is_empty(), "{common:?}");
}

/// Asserts that two guests, after [`check`], have all frames and exactly two memory files in common, the
/// store and the tie of their domain.
fn assert_together(one: &Guest, two: &Guest) {
    for page in 0..PAGES {
        assert!(one.frame(page).is_some());
        assert_eq!(one.frame(page), two.frame(page), "page {page}");
    }
    let (ones, twos) = (memory_files(one.pid), memory_files(two.pid));
    let common: Vec<_> = ones.intersection(&twos).collect();
    let named = |name| common.iter().filter(|file| file.2.contains(name)).count();
    let both = [named("pageone-store"), named("pageone-lifeline")];
    assert_eq!((common.len(), both), (2, [1, 1]), "{ones:?} {twos:?}");
}

#[test]
fn users_with_equal_memory_share_nothing_with_each_other() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let open = Open::new();
    let _daemon = open.daemon("default = 'uid'\n");
    let [a, b, _] = USERS;
    let mut guests = [a, b, a, b].map(|uid| open.guest(uid, None));
    // One of each first: equal pages of two users are not merged, however long they are looked at.
    let [first, second, ..] = &mut guests;
    first.offer(PAGES, 5);
    second.offer(PAGES, 5);
    let seen = open.status_when("both guests' pages to be read", |status| {
        count(status, "pages_unshared") == 2 * PAGES as u64
    });
    let later = open.status_when("three more rounds", |status| {
        count(status, "full_scans") >= count(&seen, "full_scans") + 3
    });
    assert_eq!(count(&later, "pages_sharing"), 0, "{later}");
    assert_apart(first, second);

    for guest in &mut guests[2..] {
        guest.offer(PAGES, 5);
    }
    let status = open.status_when("each user's two guests to be merged", |status| {
        paired(status, 2 * PAGES)
    });
    assert_eq!(domain_of(&status, &guests[0]), Some(format!("uid:{a}")));
    assert_eq!(domain_of(&status, &guests[1]), Some(format!("uid:{b}")));
    check(&mut guests);
    assert_together(&guests[0], &guests[2]);
    assert_together(&guests[1], &guests[3]);
    for (one, two) in [(0, 1), (0, 3), (2, 1), (2, 3)] {
        assert_apart(&guests[one], &guests[two]);
    }
}

#[test]
fn a_name_is_for_those_whom_the_policy_gives_it() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let open = Open::new();
    let [a, b, c] = USERS;
    let mut daemon = open.daemon(&format!(
        "default = 'uid'\n[control]\nuid = {b}\n[[rule]]\nuid = [{a}, {b}]\nnames = ['team']\n"
    ));
    let mut guests = [a, b, c].map(|uid| open.guest(uid, Some("team")));
    let mut plain = open.guest(a, None);
    for guest in &mut guests {
        guest.offer(PAGES, 6);
    }
    plain.offer(PAGES, 6);
    let status = open.status_when("the team to be merged", |status| {
        paired(status, PAGES) && count(status, "pages_unshared") == PAGES as u64
    });
    assert_eq!(domain_of(&status, &guests[0]).as_deref(), Some("name:team"));
    assert_eq!(domain_of(&status, &guests[1]).as_deref(), Some("name:team"));
    assert_eq!(domain_of(&status, &guests[2]), None, "refused");
    assert_eq!(domain_of(&status, &plain), Some(format!("uid:{a}")));
    check(&mut guests);
    assert_together(&guests[0], &guests[1]);
    assert_apart(&guests[0], &guests[2]);
    assert_apart(&guests[0], &plain);
    assert_eq!(memory_files(guests[2].pid), BTreeSet::new());

    let refused = open.command(c, &["run", "--domain", "team", "--", "true"]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(125), "{said}");
    assert!(
        said.contains("`team`") && said.contains(&c.to_string()),
        "{said}"
    );
    let welcome = open.command(b, &["run", "--domain", "team", "--", "true"]);
    assert!(welcome.status.success(), "{}", text(&welcome.stderr));

    let turned = open.command(b, &["set", "threads=1"]);
    assert!(turned.status.success(), "the policy lets b control");
    let refused = open.command(a, &["set", "threads=2"]);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("may not control"));

    daemon.signal(15);
    assert_eq!(daemon.end(), 0);
    let log = daemon.stderr();
    let refusals = log.lines().filter(|line| line.contains("refused"));
    let refusals: Vec<_> = refusals.collect();
    assert_eq!(
        refusals.len(),
        1,
        "told once, though the agent asks each second: {log}"
    );
    assert!(refusals[0].contains("`team`") && refusals[0].contains(&c.to_string()));
}

#[test]
fn a_user_sees_his_own_guests_and_two_rights_are_two() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let open = Open::new();
    let [plain, monitor, control] = USERS;
    let policy = format!("[monitor]\nuid = {monitor}\n[control]\nuid = {control}\n");
    let _daemon = open.daemon(&policy);
    let mut guests = [plain, monitor].map(|uid| open.guest(uid, None));
    guests.iter_mut().for_each(|guest| guest.offer(PAGES, 8));
    open.status_when("both guests' pages", |status| {
        count(status, "pages_unshared") == 2 * PAGES as u64
    });
    let status = |uid| {
        let said = open.command(uid, &["status", "--json"]);
        serde_json::from_slice::<Value>(&said.stdout).unwrap()
    };
    let own = status(plain);
    let seen: Vec<_> = own["guests"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| &g["uid"])
        .collect();
    assert_eq!(
        (seen, &own["only_user"]),
        (vec![&Value::from(plain)], &Value::from(plain))
    );
    assert_eq!(count(&own, "pages_unshared"), PAGES as u64);
    for hidden in [
        "store_bytes",
        "metadata_bytes",
        "window_max_us",
        "pages_shared",
    ] {
        assert_eq!(count(&own, hidden), 0, "{hidden}");
    }
    let all = status(monitor);
    assert_eq!(
        (common::guests_of(&all), &all["only_user"]),
        (2, &Value::Null)
    );
    assert_eq!(
        common::guests_of(&status(control)),
        0,
        "to turn is no right to see"
    );

    for (uid, may_turn, may_see) in [
        (plain, false, false),
        (monitor, false, true),
        (control, true, false),
    ] {
        for (words, may, right) in [
            (&["set", "merge_period=70ms"][..], may_turn, "[control]"),
            (&["numa", "heap"], may_see, "[monitor]"),
        ] {
            let mut command = Command::new(open.place.path().join("pageone"));
            command.uid(uid).gid(uid).current_dir("/").args(words);
            let said = output(command.arg("--socket").arg(open.place.socket()));
            let why = text(&said.stderr);
            assert_eq!(said.status.success(), may, "{uid} {words:?}: {why}");
            assert!(may || why.contains(right), "{why}");
        }
    }
}

#[test]
fn guests_and_domains_of_a_user_are_bounded_and_the_limit_is_named() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let open = Open::new();
    let config = "log = 'info'\n[limits]\nguests_per_user = 2\ndomains_per_user = 1\n";
    let config = open.place.file("pageone.toml", config);
    let config = [
        "--merge-period",
        "100ms",
        "--config",
        config.to_str().unwrap(),
    ];
    let mut daemon = daemon(&open.place, &config);
    let said = Said::of(daemon.0.stderr.take().unwrap());
    let [a, b, _] = USERS;
    let join = |uid, domain| {
        let mut guest = open.guest(uid, domain);
        guest.offer(PAGES, 9);
        guest
    };
    let served = |pids: &[u32]| {
        open.status_when("these guests", |status| {
            let guests = status["guests"].as_array().unwrap();
            let there = |pid: &u32| guests.iter().any(|guest| guest["pid"] == *pid);
            guests.len() == pids.len() && pids.iter().all(there)
        });
    };
    let first = join(a, None);
    served(&[first.pid]);
    let split = join(a, Some("x"));
    said.wait_for("domains_per_user = 1");
    let second = join(a, None);
    served(&[first.pid, second.pid]);
    let third = join(a, None);
    said.wait_for("guests_per_user = 2");
    let other = join(b, None);
    served(&[first.pid, second.pid, other.pid]);
    check(&mut [first, split, second, third, other]);
    daemon.signal(sys::signals::SIGTERM);
    assert_eq!(daemon.end(), 0);
}

/// A user namespace that a user has made, with three users of its own outside the numbers of others. A thread of it sleeps.
struct Space {
    holder: Running,
}

impl Space {
    /// The first user outside who is in it.
    const FIRST: u32 = 61_101;

    /// Made by user `uid`; `None` where users may make none.
    fn of(uid: u32) -> Option<Self> {
        let mut command = Command::new("unshare");
        command.uid(uid).gid(uid).current_dir("/");
        let holder = Running::start(command.args(["--user", "sleep", "600"]));
        let space = Self { holder };
        let file = |name: &str| format!("/proc/{}/{name}", space.holder.0.id());
        let own = fs::read_link("/proc/self/ns/user").unwrap();
        let begun = std::time::Instant::now();
        while fs::read_link(file("ns/user")).ok()? == own {
            if begun.elapsed().as_secs() > 10 {
                return None;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        for map in ["uid_map", "gid_map"] {
            fs::write(file(map), format!("0 0 1\n1 {} 3\n", Self::FIRST)).unwrap();
        }
        Some(space)
    }

    /// A guest of its user `number`, from 1 on.
    fn guest(&self, open: &Open, number: u32) -> Guest {
        let mut command = Command::new("nsenter");
        command.arg(format!("--user=/proc/{}/ns/user", self.holder.0.id()));
        command.args(["--setuid", &number.to_string()]);
        command.args(["--setgid", &number.to_string(), "env"]);
        let agent = open.place.path().join("libpageone_agent.so");
        command.arg(format!("LD_PRELOAD={}", agent.display()));
        command.arg(format!("PAGEONE_SOCKET={}", open.place.socket().display()));
        command.arg(open.place.path().join("guest"));
        Guest::from(command.current_dir("/"))
    }
}

#[test]
fn a_user_with_subordinate_ids_has_one_share() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let [owner, other, _] = USERS;
    let Some(space) = Space::of(owner) else {
        return eprintln!("skipped: users may make no user namespaces");
    };
    let open = Open::new();
    let config = open.place.file(
        "pageone.toml",
        "log = 'info'\n[limits]\nguests_per_user = 2\n",
    );
    let config = ["--config", config.to_str().unwrap()];
    let mut daemon = daemon(&open.place, &config);
    let said = Said::of(daemon.0.stderr.take().unwrap());
    let offers = |mut guest: Guest| {
        guest.offer(PAGES, 9);
        guest
    };
    let served = |uids: &[u32]| {
        open.status_when("these guests", |status| {
            let guests = status["guests"].as_array().unwrap();
            let mut found: Vec<_> = guests.iter().map(|guest| guest["uid"].clone()).collect();
            found.sort_by_key(Value::as_u64);
            found == uids
        });
    };
    let mut guests = vec![offers(space.guest(&open, 1)), offers(space.guest(&open, 2))];
    let [first, second] = [Space::FIRST, Space::FIRST + 1];
    served(&[first, second]);
    guests.push(offers(space.guest(&open, 3)));
    said.wait_for("guests_per_user = 2");
    let his = offers(open.guest(owner, None));
    open.status_when("his own guest to be refused", |status| {
        let refused = status["unserved"].as_array().unwrap();
        refused.iter().any(|one| one["pid"] == his.pid)
    });
    guests.extend([his, offers(open.guest(other, None))]);
    served(&[other, first, second]);
    check(&mut guests);
    daemon.signal(sys::signals::SIGTERM);
    assert_eq!(daemon.end(), 0);
}

/// Cgroups for a test, below a folder of their own; removed on drop.
struct Cgroups {
    folder: PathBuf,
    /// Where version 2 was mounted for the test, because it was mounted nowhere.
    mounted: Option<tempfile::TempDir>,
}

impl Cgroups {
    /// Where version 2 is mounted or can be, and may be written, else why not.
    fn new() -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let fields = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>());
        let mut there = fields
            .filter(|mount| mount.get(2) == Some(&"cgroup2"))
            .map(|mount| PathBuf::from(mount[1]));
        let (root, mounted) = match there.next_back() {
            Some(root) => (root, None),
            None => {
                let place = tempfile::tempdir().unwrap();
                let mount = Command::new("mount")
                    .args(["-t", "cgroup2", "none"])
                    .arg(place.path())
                    .output();
                match mount {
                    Ok(said) if said.status.success() => (place.path().to_owned(), Some(place)),
                    said => {
                        return Err(format!("cgroups of version 2 cannot be mounted: {said:?}"));
                    }
                }
            }
        };
        let folder = root.join(format!("pageone-test-{}", std::process::id()));
        let made = fs::create_dir(&folder);
        let cgroups = Self { folder, mounted };
        made.map_err(|error| format!("{}: {error}", cgroups.folder.display()))?;
        Ok(cgroups)
    }

    fn name(&self) -> &str {
        self.folder.file_name().unwrap().to_str().unwrap()
    }

    fn put(&self, guest: &Guest, name: &str) {
        let folder = self.folder.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cgroup.procs"), guest.pid.to_string()).unwrap();
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        let inner = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for folder in inner.filter(|entry| entry.path().is_dir()) {
            let _ = fs::remove_dir(folder.path());
        }
        let _ = fs::remove_dir(&self.folder);
        if let Some(place) = self.mounted.take() {
            let unmounted = Command::new("umount").arg("-l").arg(place.path()).status();
            // What is mounted still must not be deleted with the folder.
            if !unmounted.is_ok_and(|status| status.success()) {
                let _ = place.keep();
            }
        }
    }
}

#[test]
fn cgroups_are_domains_where_the_policy_says_so() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let cgroups = match Cgroups::new() {
        Ok(cgroups) => cgroups,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let open = Open::new();
    let name = cgroups.name();
    let mut daemon = open.daemon(&format!(
        "default = 'refuse'\n\
         [[rule]]\ncgroup = '/**/{name}/banned'\nrefuse = true\n\
         [[rule]]\nuid = '61001-61002'\ncgroup = '/**/{name}/vm-*'\nper = 'cgroup'\n"
    ));
    let [a, b, c] = USERS;
    // Two users in one cgroup share, for the rule names them; one user in two cgroups does not.
    let places = [
        (a, "vm-1"),
        (b, "vm-1"),
        (a, "vm-2"),
        (c, "banned"),
        (c, "other"),
    ];
    let mut guests = places.map(|(uid, cgroup)| {
        let guest = open.guest(uid, None);
        cgroups.put(&guest, cgroup);
        guest
    });
    for guest in &mut guests {
        guest.offer(PAGES, 7);
    }
    let status = open.status_when("the guests of one cgroup to be merged", |status| {
        paired(status, PAGES) && count(status, "pages_unshared") == PAGES as u64
    });
    let domains = guests.each_ref().map(|guest| domain_of(&status, guest));
    let [one, two, other, banned, outside] = &domains;
    assert!(
        one.as_ref().unwrap().ends_with(&format!("{name}/vm-1")),
        "{status}"
    );
    assert_eq!(one, two);
    assert!(other.as_ref().unwrap().ends_with("/vm-2"), "{status}");
    assert_eq!((banned, outside), (&None, &None));
    check(&mut guests);
    assert_together(&guests[0], &guests[1]);
    assert_apart(&guests[0], &guests[2]);
    drop(guests);
    daemon.signal(15);
    daemon.end();
    let log = daemon.stderr();
    assert!(
        log.contains("rule 1 of the policy refuses") && log.contains("no rule"),
        "{log}"
    );
}

#[test]
fn a_policy_with_a_mistake_ends_the_daemon_with_rule_and_line() {
    let place = Place::new();
    let text_ = "default = 'uid'\n\n[[rule]]\nuid = 1\nper = 'user'\n";
    let policy = place.file("p.toml", text_);
    let config = format!("policy = '{}'\n", policy.display());
    let config = place.file("pageone.toml", &config);
    let mut command = pageone();
    command
        .args(["daemon", "--no-keep"])
        .arg("--socket")
        .arg(place.socket());
    let ended = output(command.arg("--config").arg(config));
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    for word in ["p.toml", "rule 1", "line 5", "user"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(!place.socket().exists());
}

#[test]
fn a_policy_is_read_again_and_a_mistake_changes_nothing() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let open = Open::new();
    let (mut daemon, said) =
        open.daemon_that_says("default = \"refuse\"\n\n[[rule]]\nuid = 61001\nper = \"uid\"\n");
    let mut first = open.guest(USERS[0], None);
    first.offer(PAGES, 1);
    open.status_when("the first guest", |status| {
        domain_of(status, &first).is_some()
    });
    let mut second = open.guest(USERS[1], None);
    second.offer(PAGES, 1);
    said.wait_for("no rule of the policy is for user 61002");

    let again = |policy: &str| {
        open.place.file("policy.toml", policy);
        daemon.signal(sys::signals::SIGHUP);
    };
    again("default = \"uid\"\nfallback = 3\n");
    said.wait_for("the policy stays as it was: in the policy");
    again("default = \"uid\"\n\n[[rule]]\nuid = 61001\ndomain = \"other\"\n");
    said.wait_for("is read again");
    let status = open.status_when("the second guest", |status| {
        domain_of(status, &second).is_some()
    });
    assert_eq!(domain_of(&status, &second).unwrap(), "uid:61002");
    assert_eq!(
        domain_of(&status, &first).unwrap(),
        "uid:61001",
        "it stays where it is"
    );
    let third = open.guest(USERS[0], None);
    let mut third = third;
    third.offer(PAGES, 1);
    let status = open.status_when("the third guest", |status| {
        domain_of(status, &third).is_some()
    });
    assert_eq!(domain_of(&status, &third).unwrap(), "name:other");
    check(&mut [first, second, third]);
    daemon.signal(sys::signals::SIGTERM);
    assert_eq!(daemon.end(), 0);
}

#[test]
fn a_policy_made_after_the_start_is_read_when_asked() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let open = Open::new();
    let mut command = pageone();
    command.env("CONFIGURATION_DIRECTORY", open.place.path());
    command.args(["daemon", "--no-keep", "--merge-period=100ms", "--socket"]);
    command.arg(open.place.socket()).stderr(Stdio::piped());
    let mut daemon = Running::start(&mut command);
    let said = Said::of(daemon.0.stderr.take().unwrap());
    let domain_of_next = || {
        let mut guest = open.guest(USERS[0], None);
        guest.offer(PAGES, 1);
        let status = open.status_when("the guest", |status| domain_of(status, &guest).is_some());
        domain_of(&status, &guest).unwrap()
    };
    wait_for("the daemon", || open.place.socket().exists().then_some(()));
    assert_eq!(domain_of_next(), "uid:61001");
    open.place
        .file("policy.toml", "[[rule]]\nuid = 61001\ndomain = \"lab\"\n");
    daemon.signal(sys::signals::SIGHUP);
    said.wait_for("is read again");
    assert_eq!(domain_of_next(), "name:lab");
    // One that is gone changes nothing: the last one that was read is in force.
    fs::remove_file(open.place.path().join("policy.toml")).unwrap();
    daemon.signal(sys::signals::SIGHUP);
    said.wait_for("the policy stays as it was");
    assert_eq!(domain_of_next(), "name:lab");
    daemon.signal(sys::signals::SIGTERM);
    assert_eq!(daemon.end(), 0);
}

/// A user may make no userfaultfd that freezes kernel writes too: the agent keeps the one from the daemon's device.
#[test]
fn calls_of_a_users_threads_go_on_when_the_daemon_is_gone() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let Some(_none) = Knob::set("/proc/sys/vm/unprivileged_userfaultfd", "0") else {
        return;
    };
    let open = Open::new();
    let daemon = open.daemon("");
    let mut guests = [open.guest(USERS[0], None), open.guest(USERS[0], None)];
    for guest in &mut guests {
        guest.run("idle");
        guest.offer(PAGES, 1);
    }
    open.status_when("them to share", |status| paired(status, PAGES));
    drop(daemon);
    let [guest, other] = &mut guests;
    wait_for("the agent to know", || {
        (guest.run("served") == "0").then_some(())
    });
    for call in ["lock 0 64", "unlock 0 64", "advise 64 64 10"] {
        guest.run(call);
        guest.run("check");
    }
    other.run("remap 2048 1");
    other.run("check");
}
