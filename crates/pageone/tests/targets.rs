//! Every target of `make` that the README, the documents, the help or a comment names is one that `make test` makes, or
//! begins in a short form. What is never run breaks.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The targets that `make test` does not make: itself, and what undoes its work.
const NOT_TESTED: [&str; 3] = ["test", "help", "clean"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What make knows of each target: its prerequisites, and the targets that its recipe makes.
fn rules() -> BTreeMap<String, BTreeSet<String>> {
    let mut make = Command::new("make");
    for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL"] {
        make.env_remove(name);
    }
    // The goal has nothing to do: make prints the rules, and that is all.
    let output = make.args(["-rpn", "help"]).current_dir(root()).output();
    let text = String::from_utf8(output.expect("make is installed").stdout).unwrap();
    let mut rules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut target = None;
    for line in text.lines() {
        if let Some(recipe) = line.strip_prefix('\t') {
            let made = recipe.trim_start_matches(['@', '-', '+']);
            let goal = made
                .strip_prefix("$(MAKE) ")
                .and_then(|rest| rest.split(' ').next());
            if let (Some(target), Some(goal)) = (&target, goal) {
                rules
                    .entry(String::clone(target))
                    .or_default()
                    .insert(goal.to_owned());
            }
            continue;
        }
        let Some((name, needs)) = line.split_once(':').filter(|(name, _)| is_target(name)) else {
            continue;
        };
        // `target: VARIABLE := value` is no rule.
        if needs.contains('=') {
            continue;
        }
        target = Some(name.to_owned());
        let needs = needs.split_whitespace().filter(|need| is_target(need));
        rules
            .entry(name.to_owned())
            .or_default()
            .extend(needs.map(str::to_owned));
    }
    rules
}

fn is_target(word: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
    !word.is_empty() && word.bytes().all(plain)
}

/// The files in which a person looks for commands.
fn texts() -> Vec<PathBuf> {
    let root = root();
    let mut texts: Vec<_> = ["README.md", "CHANGELOG.md", "Makefile"]
        .map(|name| root.join(name))
        .into();
    for folder in [
        "docs",
        "mk",
        "packaging",
        "tests/vm",
        "tests/numa",
        "tests/programs",
        "tests/libvirt",
        "tests/reach",
    ] {
        for entry in fs::read_dir(root.join(folder))
            .into_iter()
            .flatten()
            .flatten()
        {
            texts.push(entry.path());
        }
    }
    texts.retain(|path| path.is_file());
    texts
}

/// The targets that a text names: behind `make` in backquotes or at the beginning of a line, and at the
/// beginning of a line with a help text.
fn named(text: &str, into: &mut BTreeSet<String>) {
    for line in text.lines() {
        let helped = line.contains(" ## ");
        if let Some((name, _)) = line
            .split_once(':')
            .filter(|(name, _)| helped && is_target(name))
        {
            into.insert(name.to_owned());
        }
        let quoted = line.split('`').skip(1).step_by(2);
        for command in quoted.chain([line]) {
            let Some(goals) = command.strip_prefix("make ") else {
                continue;
            };
            // The goals end where a variable, an argument or a comment begins.
            let goals = goals.split_whitespace().take_while(|word| is_target(word));
            into.extend(goals.map(str::to_owned));
        }
    }
}

#[test]
fn make_test_makes_every_target_that_is_named() {
    let mut wanted = BTreeSet::new();
    for path in texts() {
        named(&fs::read_to_string(path).unwrap_or_default(), &mut wanted);
    }
    for sure in ["demo", "torture", "scale", "fuzz-sdtree", "bench-hashdist"] {
        assert!(wanted.contains(sure), "the texts name {sure}: {wanted:?}");
    }
    let rules = rules();
    let mut made = BTreeSet::new();
    let mut next = vec!["test"];
    while let Some(target) = next.pop() {
        if made.insert(target) {
            next.extend(rules.get(target).into_iter().flatten().map(String::as_str));
        }
    }
    let unknown: Vec<_> = wanted
        .iter()
        .filter(|&name| !rules.contains_key(name))
        .collect();
    assert!(
        unknown.is_empty(),
        "named, and unknown to make: {unknown:?}"
    );
    let tested =
        |name: &&String| made.contains(name.as_str()) || NOT_TESTED.contains(&name.as_str());
    let left: Vec<_> = wanted.iter().filter(|name| !tested(name)).collect();
    assert!(
        left.is_empty(),
        "named, and not made by `make test`: {left:?}"
    );
}

/// The commit that `make build` tells the compiler; by a cargo that tells it us.
fn told_commit(profile: &str) -> Option<String> {
    let mut make = Command::new("make");
    for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PAGEONE_COMMIT"] {
        make.env_remove(name);
    }
    make.args(["-s", "build", &format!("PROFILE={profile}")]);
    // Before the arguments; what it prints has this form in no line of make's.
    make.arg("CARGO=env | sed -n 's/^PAGEONE_COMMIT=/told /p' #");
    let output = make.current_dir(root()).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    let told = said.lines().find_map(|line| line.strip_prefix("told "));
    told.map(str::to_owned)
}

/// `pageone --version` names it. The tests' build would be made anew at each commit.
#[test]
fn a_release_build_is_told_its_commit_and_the_tests_build_is_not() {
    let mut git = Command::new("git");
    let known = git.args(["describe", "--always", "--dirty"]);
    let known = known.current_dir(root()).output();
    let known = known.map_or(String::new(), |said| {
        String::from_utf8(said.stdout).unwrap()
    });
    assert_eq!(told_commit("release").as_deref(), Some(known.trim_end()));
    assert_eq!(told_commit("dev"), None);
}
