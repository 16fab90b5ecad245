//! A daemon and its guests in containers: other roots, other namespaces, a socket in a folder that is mounted in each.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{
    PATIENCE, Place, Running, alone, child, filled, json, need_agent, output, pageone, paired,
    status, text, wait_for,
};
use pageone::bench::{Content, Guest};
use serde_json::Value;

const PAGES: usize = 1024;

/// A root directory of the host's programs, with `/run/pageone` of the folder `run` and `/opt/pageone` of what was built.
const ROOT: &str = r#"
set -e
for name in usr bin sbin lib lib32 lib64 libx32 sys; do
  if [ -L /$name ]; then ln -s "$(readlink /$name)" "$ROOT/$name"
  elif [ -d /$name ]; then mkdir "$ROOT/$name"; mount --rbind /$name "$ROOT/$name"
  fi
done
mkdir -p "$ROOT/dev" "$ROOT/proc" "$ROOT/tmp" "$ROOT/opt/pageone" "$ROOT/run/pageone"
mount --rbind /dev "$ROOT/dev"
mount --bind "$BUILT" "$ROOT/opt/pageone"
mount -o remount,bind,ro "$ROOT/opt/pageone"
mount --bind "$RUN" "$ROOT/run/pageone"
mount -o remount,bind,$RUN_IS "$ROOT/run/pageone"
mount -t proc proc "$ROOT/proc"
exec chroot "$ROOT" "$@"
"#;

/// `words` in a container: its own mounts and its own root, and `more` namespaces.
fn container(place: &Path, name: &str, more: &[&str], run_is: &str) -> Command {
    let root = place.join(name);
    fs::create_dir(&root).unwrap();
    let run = place.join("run");
    fs::create_dir_all(&run).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]);
    command.args(more).args(["sh", "-c", ROOT, "sh"]);
    let built = Path::new(env!("CARGO_BIN_EXE_pageone")).parent().unwrap();
    command.env("ROOT", &root).env("BUILT", built);
    command.env("RUN", run).env("RUN_IS", run_is);
    for name in ["PAGEONE_SOCKET", "PAGEONE_AGENT", "LD_PRELOAD"] {
        command.env_remove(name);
    }
    command
}

/// A container whose process is the first of its own, without a capability and without a way to one: a guest.
fn guest(place: &Path, number: u64, content: &Content) -> Guest {
    let more = ["--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child"];
    let mut command = container(place, &format!("guest-{number}"), &more, "ro");
    command.args(["setpriv", "--bounding-set=-all", "--inh-caps=-all"]);
    command.args(["--no-new-privs", "env"]);
    command.arg("LD_PRELOAD=/opt/pageone/libpageone_agent.so");
    command.arg("PAGEONE_SOCKET=/run/pageone/pageone.sock");
    command.arg("/opt/pageone/pageone");
    let mut guest = filled(command, number, content);
    guest.tell("offer").unwrap();
    guest.answer(PATIENCE).unwrap();
    guest
}

/// Whether this machine and user can make containers.
fn can_contain() -> bool {
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--mount",
        "--pid",
        "--net",
        "--fork",
        "setpriv",
        "--version",
    ]);
    let can = unshare.output().is_ok_and(|said| said.status.success());
    if !can || !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root, and unshare and setpriv of util-linux");
        return false;
    }
    true
}

#[test]
fn guests_in_containers_share_by_a_daemon_in_a_container() {
    let _turn = alone();
    if !can_contain() {
        return;
    }
    need_agent();
    let place = Place::new();
    // The socket of `place` is what `status` asks.
    std::os::unix::fs::symlink("run/pageone.sock", place.socket()).unwrap();
    let mut daemon = container(place.path(), "daemon", &[], "rw");
    daemon.args(["/opt/pageone/pageone", "daemon", "--merge-period", "100ms"]);
    daemon.args(["--socket", "/run/pageone/pageone.sock"]);
    daemon.env("CONFIGURATION_DIRECTORY", common::NO_FOLDER);
    let _daemon = Running::start(daemon.stdin(Stdio::null()).stderr(Stdio::null()));
    wait_for("the daemon", || {
        status(&place).status.success().then_some(())
    });
    let content = Content::equal(4, PAGES as u64);
    let mut guests = [0, 1].map(|number| guest(place.path(), number, &content));
    let shared = wait_for("the containers to share", || {
        let status = json(&place);
        paired(&status, PAGES).then_some(status)
    });
    // They are known by their numbers on the host, where `unshare` is the parent of each.
    let mut known: Vec<u32> = guests.iter().filter_map(|one| child(one.pid())).collect();
    known.sort_unstable();
    assert_eq!(known.len(), 2);
    let mut seen: Vec<u32> = (shared["guests"].as_array().unwrap().iter())
        .map(|guest| u32::try_from(guest["pid"].as_u64().unwrap()).unwrap())
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, known);
    for pid in known {
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
        assert_ne!(namespace(&pid.to_string()), namespace("self"));
    }
    for guest in &mut guests {
        guest.tell("verify").unwrap();
        let answer = guest.answer(PATIENCE).unwrap();
        assert_eq!(
            (answer.verified_bytes, answer.errors),
            (PAGES as u64 * 4096, 0)
        );
    }
}

#[test]
fn a_daemon_that_cannot_see_its_guests_says_so() {
    let _turn = alone();
    if !can_contain() {
        return;
    }
    need_agent();
    let place = Place::new();
    let more = ["--pid", "--fork", "--kill-child"];
    let mut daemon = container(place.path(), "daemon", &more, "rw");
    daemon.args(["/opt/pageone/pageone", "daemon", "--socket"]);
    daemon.arg("/run/pageone/pageone.sock");
    daemon.env("CONFIGURATION_DIRECTORY", common::NO_FOLDER);
    let log = place.file("log", "");
    daemon
        .stdin(Stdio::null())
        .stderr(fs::File::create(&log).unwrap());
    let _daemon = Running::start(&mut daemon);
    let socket = place.path().join("run/pageone.sock");
    wait_for("the daemon", || socket.exists().then_some(()));
    let content = Content::equal(4, 16);
    let mut guest = guest(place.path(), 0, &content);
    wait_for("the reason in the log", || {
        let said = fs::read_to_string(&log).unwrap();
        said.contains("the PID namespace of the host").then_some(())
    });
    guest.tell("verify").unwrap();
    assert_eq!(guest.answer(PATIENCE).unwrap().errors, 0);
}

#[test]
fn root_of_a_container_sees_no_other_users_guests_and_turns_nothing() {
    let _turn = alone();
    if !can_contain() {
        return;
    }
    let place = Place::new();
    fs::create_dir_all(place.path().join("run")).unwrap();
    std::os::unix::fs::symlink("run/pageone.sock", place.socket()).unwrap();
    let mut daemon = pageone();
    daemon.args(["daemon", "--no-keep", "--socket"]);
    daemon.arg(place.path().join("run/pageone.sock"));
    let policy = place.path().join("policy.toml");
    fs::write(&policy, "[monitor]\nuid = 4999\n").unwrap();
    daemon.arg("--policy").arg(&policy);
    let _daemon = Running::start(daemon.stderr(Stdio::null()));
    wait_for("the daemon", || {
        status(&place).status.success().then_some(())
    });
    let said = |name: &str, rights: &[&str], words: &[&str]| {
        let mut inside = container(place.path(), name, &[], "ro");
        inside.arg("setpriv").args(rights);
        inside.arg("/opt/pageone/pageone").args(words);
        output(inside.args(["--socket", "/run/pageone/pageone.sock"]))
    };
    let only_user = |said: &std::process::Output| {
        let status: Value = serde_json::from_slice(&said.stdout).expect("a status");
        status["only_user"].clone()
    };
    let least = ["--bounding-set=-sys_admin"];
    let seen = said("least-status", &least, &["status", "--json"]);
    assert_eq!(only_user(&seen), 0, "{}", text(&seen.stderr));
    for words in [&["set", "run=0"][..], &["numa", "heap"]] {
        let refused = said(words[0], &least, words);
        assert!(!refused.status.success(), "{words:?}");
        assert!(text(&refused.stderr).contains("may not"), "{refused:?}");
    }
    let named =
        "--no-new-privs unshare --pid --fork setpriv --reuid=4999 --regid=4999 --clear-groups";
    let named: Vec<_> = named.split(' ').collect();
    let seen = said("named-status", &named, &["status", "--json"]);
    assert_eq!(only_user(&seen), 4999, "{}", text(&seen.stderr));
    assert!(
        only_user(&status(&place)).is_null(),
        "root of the host sees all"
    );
    // A privileged container's root may do to the host whatever he likes.
    let all = said("all-status", &["--no-new-privs"], &["status", "--json"]);
    assert!(only_user(&all).is_null(), "{}", text(&all.stdout));
}

#[test]
fn process_numbers_of_another_namespace_are_refused() {
    let _turn = alone();
    if !can_contain() {
        return;
    }
    let place = Place::new();
    let run = place.path().join("run");
    fs::create_dir_all(&run).unwrap();
    let questions = [&["merge"][..], &["doctor"]];
    let refused = |command: &mut Command, words: &[&str], socket: &Path| {
        let said = output(command.args(words).arg("--socket").arg(socket).arg("1"));
        let all = text(&said.stdout) + &text(&said.stderr);
        assert!(!said.status.success(), "{words:?}: {all}");
        // The doctor breaks its lines.
        let all = all.split_whitespace().collect::<Vec<_>>().join(" ");
        let is_so = all.contains("another PID namespace");
        assert!(!is_so || all.contains("where it runs"), "{all}");
        is_so
    };
    let space = ["--pid", "--fork", "--kill-child"];
    // The daemon is outside, where who asks has a number, and inside, where it has none.
    for is_inside in [false, true] {
        let name = if is_inside { "in.sock" } else { "out.sock" };
        let (outside, inside) = (run.join(name), Path::new("/run/pageone").join(name));
        let mut daemon = match is_inside {
            true => container(place.path(), "daemon", &space, "rw"),
            false => pageone(),
        };
        let served = if is_inside { &inside } else { &outside };
        daemon.args(["/opt/pageone/pageone"].iter().filter(|_| is_inside));
        daemon.args(["daemon", "--no-keep", "--socket"]).arg(served);
        daemon.env("CONFIGURATION_DIRECTORY", common::NO_FOLDER);
        let _daemon = Running::start(daemon.stdin(Stdio::null()).stderr(Stdio::null()));
        wait_for("the daemon", || outside.exists().then_some(()));
        for words in questions {
            assert_eq!(refused(&mut pageone(), words, &outside), is_inside);
            for (kind, more) in [("mounts", &[][..]), ("numbers", &space[..])] {
                let name = format!("{}-{kind}-{is_inside}", words[0]);
                let mut other = container(place.path(), &name, more, "ro");
                other.arg("/opt/pageone/pageone");
                let is_other = refused(&mut other, words, &inside);
                assert_eq!(is_other, is_inside || kind == "numbers", "{name}");
            }
        }
    }
}

/// The documents of the manifest.
fn manifest() -> Option<Vec<Value>> {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/container/kubernetes.yaml");
    let script =
        "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))";
    let said = Command::new("python3")
        .args(["-c", script])
        .arg(file)
        .output();
    let said = said.ok().filter(|said| {
        let knows = !text(&said.stderr).contains("No module named");
        assert!(!knows || said.status.success(), "{}", text(&said.stderr));
        knows
    });
    if said.is_none() {
        common::tools::lacks("Python with yaml");
    }
    serde_json::from_slice(&said?.stdout).unwrap()
}

/// The names of the things in a list.
fn names(list: &Value) -> Vec<&str> {
    let all = list.as_array().into_iter().flatten();
    all.map(|one| one["name"].as_str().unwrap()).collect()
}

/// What a pod mounts is there, and its containers have images.
fn pod_is_whole(pod: &Value) {
    let volumes = names(&pod["volumes"]);
    let containers = ["initContainers", "containers"].map(|kind| &pod[kind]);
    for container in containers.into_iter().filter_map(Value::as_array).flatten() {
        assert!(container["image"].is_string(), "{container}");
        for volume in names(&container["volumeMounts"]) {
            assert!(volumes.contains(&volume), "no volume {volume}: {pod}");
        }
        let mounts = container["volumeMounts"].as_array().into_iter().flatten();
        let has_tmp = mounts.into_iter().any(|mount| mount["mountPath"] == "/tmp");
        let is_bare = container["securityContext"]["readOnlyRootFilesystem"] == true;
        assert!(!is_bare || has_tmp, "the keeper's socket has no place");
    }
}

#[test]
fn the_manifest_of_kubernetes_fits_together() {
    let Some(documents) = manifest() else { return };
    let [set, guest] = documents.as_slice() else {
        panic!("{} documents", documents.len())
    };
    assert_eq!(
        (&set["apiVersion"], &set["kind"]),
        (&"apps/v1".into(), &"DaemonSet".into())
    );
    assert_eq!(
        (&guest["apiVersion"], &guest["kind"]),
        (&"v1".into(), &"Pod".into())
    );
    let template = &set["spec"]["template"];
    assert_eq!(
        set["spec"]["selector"]["matchLabels"],
        template["metadata"]["labels"]
    );
    pod_is_whole(&template["spec"]);
    pod_is_whole(&guest["spec"]);
    // Guests find agent and socket where the daemon's pod puts them.
    let path = |pod: &Value, name: &str| {
        let volumes = pod["volumes"].as_array().unwrap();
        let volume = volumes
            .iter()
            .find(|volume| volume["name"] == name)
            .unwrap();
        PathBuf::from(volume["hostPath"]["path"].as_str().unwrap())
    };
    assert_eq!(
        path(&template["spec"], "agent"),
        path(&guest["spec"], "pageone")
    );
    assert_eq!(
        path(&template["spec"], "run"),
        path(&guest["spec"], "pageone-run")
    );
    let daemon = &template["spec"]["containers"][0];
    assert_eq!(daemon["securityContext"]["privileged"], true);
    assert_eq!(template["spec"]["hostPID"], true);
    // The daemon's words are words of the command.
    let words: Vec<_> = (daemon["args"].as_array().unwrap().iter())
        .map(|word| word.as_str().unwrap())
        .collect();
    let asked = output(pageone().args(&words).arg("--help"));
    assert!(asked.status.success(), "{}", text(&asked.stderr));
    let socket = words.last().unwrap();
    let env = guest["spec"]["containers"][0]["env"].as_array().unwrap();
    let named = env
        .iter()
        .find(|one| one["name"] == "PAGEONE_SOCKET")
        .unwrap();
    assert_eq!(named["value"], *socket);
}
