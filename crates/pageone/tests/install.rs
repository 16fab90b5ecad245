//! `make install` puts each file where it belongs, the installed command works from there, and `make uninstall` leaves nothing.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Place, need_agent, output, pageone, text, wait_for};

/// All that is installed below `/usr`, but the manual's pages.
const FILES: &str = "
bin/pageone
include/pageone.h
lib/pageone/installed
lib/pageone/libpageone_agent.a
lib/pageone/libpageone_agent.so
lib/systemd/system/pageone-attach.socket
lib/systemd/system/pageone-attach@.service
lib/systemd/system/pageone-serve.service
lib/systemd/system/pageone.service
lib/sysusers.d/pageone.conf
share/bash-completion/completions/pageone
share/doc/pageone/examples/alerts.yml
share/doc/pageone/examples/grafana.json
share/doc/pageone/examples/policy.toml
share/doc/pageone/examples/sysctl.conf
share/fish/vendor_completions.d/pageone.fish
share/pkgconfig/pageone.pc
share/zsh/site-functions/_pageone";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `make GOAL` with what this test was built with.
fn make(goal: &str, into: &Path, prefix: &str) -> String {
    let built = Path::new(env!("CARGO_BIN_EXE_pageone")).parent().unwrap();
    make_with(goal, into, &format!("PREFIX={prefix}"), built)
}

fn make_with(goal: &str, into: &Path, where_to: &str, built: &Path) -> String {
    let mut make = Command::new("make");
    for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL"] {
        make.env_remove(name);
    }
    make.arg(goal).args(where_to.split(' ')).current_dir(root());
    make.arg(format!("DESTDIR={}", into.display()));
    let said = output(make.arg(format!("BUILT={}", built.display())));
    assert!(said.status.success(), "{}", text(&said.stderr));
    text(&said.stdout)
}

/// The files below `folder`, named from there.
fn files(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    let name = path.strip_prefix(folder).unwrap();
                    found.insert(name.display().to_string());
                }
            }
        }
    }
    found
}

fn has_tools() -> bool {
    let has = |name: &str| Command::new(name).arg("--version").output().is_ok();
    let missing = ["make", "strip", "gzip"]
        .into_iter()
        .find(|name| !has(name));
    if let Some(missing) = missing {
        common::tools::lacks(missing);
    }
    missing.is_none()
}

#[test]
fn what_is_installed_works_and_goes_again() {
    if !has_tools() {
        return;
    }
    need_agent();
    let place = Place::new();
    make("install", place.path(), "/usr");
    let found = files(place.path());
    let usr = |name: &str| format!("usr/{name}");
    for name in FILES.split_whitespace().map(usr) {
        assert!(found.contains(&name), "{name} is missing: {found:#?}");
    }
    let is_known = |name: &&String| {
        let listed = name
            .strip_prefix("usr/")
            .is_some_and(|name| FILES.split_whitespace().any(|listed| listed == name));
        let page = name.starts_with("usr/share/man/man1/pageone") && name.ends_with(".1.gz");
        let doc = name.starts_with("usr/share/doc/pageone/") && name.ends_with(".md");
        listed || page || doc || name.starts_with("etc/pageone/")
    };
    let unknown: Vec<_> = found.iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    let verbs = ["", "-daemon", "-run", "-status", "-set", "-config-check"];
    for verb in verbs {
        let page = format!("usr/share/man/man1/pageone{verb}.1.gz");
        assert!(found.contains(&page), "{page} is missing: {found:#?}");
    }
    assert!(
        !found.iter().any(|name| name.contains("-help")),
        "{found:#?}"
    );
    the_command_works(place.path());
    the_interface_works(place.path());

    fs::write(place.path().join("etc/pageone/policy.toml"), "# mine\n").unwrap();
    make("install", place.path(), "/usr");
    // An uninstall needs no build.
    let said = make_with(
        "uninstall",
        place.path(),
        "PREFIX=/usr",
        Path::new("/dev/null"),
    );
    assert!(said.contains("policy.toml was edited and stays"), "{said}");
    let left: Vec<_> = files(place.path()).into_iter().collect();
    assert_eq!(left, ["etc/pageone/policy.toml"]);
    assert!(!place.path().join("usr/lib/pageone").exists());
}

/// What is installed elsewhere names no file that is not there.
#[test]
fn files_name_the_folder_they_are_in() {
    if !has_tools() {
        return;
    }
    need_agent();
    let place = Place::new();
    let where_to = "PREFIX=/usr/local SYSCONFDIR=/opt/etc";
    let built = Path::new(env!("CARGO_BIN_EXE_pageone")).parent().unwrap();
    make_with("install", place.path(), where_to, built);
    let example = "/usr/local/share/doc/pageone/examples/policy.toml";
    assert!(place.path().join(&example[1..]).exists());
    let policy = fs::read_to_string(place.path().join("opt/etc/pageone/policy.toml")).unwrap();
    assert!(
        policy.contains(&format!("# {example} has more")),
        "{policy}"
    );
    let unit = "usr/local/lib/systemd/system/pageone.service";
    let unit = fs::read_to_string(place.path().join(unit)).unwrap();
    assert!(
        unit.contains("file:///usr/local/share/doc/pageone/operations.md"),
        "{unit}"
    );
    assert!(
        unit.contains("ExecStart=/usr/local/bin/pageone daemon\n"),
        "{unit}"
    );
    assert!(
        unit.contains("\nEnvironment=CONFIGURATION_DIRECTORY=/opt/etc/pageone\n"),
        "{unit}"
    );
    make("uninstall", place.path(), "/usr/local");
    assert!(files(place.path()).is_empty());
}

/// It finds its agent and its files from where it was installed.
fn the_command_works(place: &Path) {
    let command = |words: &[&str]| {
        let mut command = Command::new(place.join("usr/bin/pageone"));
        command.args(words).env_remove("PAGEONE_AGENT");
        output(command.env("CONFIGURATION_DIRECTORY", place.join("etc/pageone")))
    };
    let said = text(&command(&["--version"]).stdout);
    let protocol = format!("(protocol {}", wire::VERSION);
    assert!(said.contains(&protocol), "{said}");
    let said = command(&["config", "check"]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    let said = text(&said.stdout);
    assert_eq!(said.matches(": no mistake").count(), 2, "{said}");
    let unit = fs::read_to_string(place.join("usr/lib/systemd/system/pageone.service")).unwrap();
    assert!(unit.contains("ExecStart=/usr/bin/pageone daemon\n"));
}

/// A C program is built with what `pageone.pc` says, and its calls work without an engine.
fn the_interface_works(place: &Path) {
    let said = fs::read_to_string(place.join("usr/share/pkgconfig/pageone.pc")).unwrap();
    assert!(said.contains("libdir=/usr/lib/pageone\n"), "{said}");
    assert!(!said.contains('@'), "{said}");
    if Command::new("cc").arg("--version").output().is_err() {
        return common::tools::lacks("C compiler");
    }
    let source = place.join("uses.c");
    let program = "#include <pageone.h>\nint main(void) { return pageone_served(); }\n";
    fs::write(&source, program).unwrap();
    let (lib, uses) = (place.join("usr/lib/pageone"), place.join("uses"));
    for (library, more) in [
        ("-lpageone_agent", ""),
        ("-l:libpageone_agent.a", "-ldl -lm -lpthread"),
    ] {
        let mut cc = Command::new("cc");
        cc.arg("-I").arg(place.join("usr/include")).arg(&source);
        cc.arg("-o").arg(&uses).arg("-L").arg(&lib);
        cc.arg(format!("-Wl,-rpath,{}", lib.display())).arg(library);
        let built = output(cc.args(more.split_whitespace()));
        assert!(built.status.success(), "{}", text(&built.stderr));
        let socket = place.join("none.sock");
        let ended = output(Command::new(&uses).env("PAGEONE_SOCKET", socket));
        assert_eq!(ended.status.code(), Some(0), "{library}");
    }
    fs::remove_file(source).unwrap();
    fs::remove_file(uses).unwrap();
}

#[test]
fn the_daemon_reads_its_files_by_default() {
    let place = Place::new();
    let folder = place.path();
    let check = || {
        let mut command = pageone();
        command.args(["config", "check"]);
        output(command.env("CONFIGURATION_DIRECTORY", folder))
    };
    let said = text(&check().stdout);
    assert!(said.contains("no file for the configuration"), "{said}");
    place.file("pageone.toml", "threads = 3\nmerge_period = '7s'\n");
    place.file("policy.toml", "default = 'refuse'\n");
    let mut command = pageone();
    command.args(["daemon", "--no-keep", "--threads", "2", "--socket"]);
    command
        .arg(place.socket())
        .env("CONFIGURATION_DIRECTORY", folder);
    let _daemon = common::Running::start(command.stderr(std::process::Stdio::null()));
    wait_for("the daemon", || {
        common::status(&place).status.success().then_some(())
    });
    let status = common::json(&place);
    let knobs = ["threads", "merge_period_ms"].map(|name| common::count(&status, name));
    assert_eq!(knobs, [2, 7000], "a flag wins over the file");
    place.file("policy.toml", "default = 'refuse'\nrules = 1\n");
    let said = check();
    assert_eq!(said.status.code(), Some(1));
    let said = text(&said.stderr);
    assert!(
        said.contains("policy.toml") && said.contains("rules"),
        "{said}"
    );
}
