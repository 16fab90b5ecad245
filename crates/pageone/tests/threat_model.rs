//! The threat model (docs/security.md) names a test in each row of its tables, and each of these tests exists. It
//! runs, or the model says at its end that it does not. So it is with the mistakes in docs/code.md, and with the tests that
//! docs/memory-calls.md names.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The heading of the last column of a table of attacks.
const COLUMN: &str = "the test";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn cells(line: &str) -> Vec<&str> {
    let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
    inner.split('|').map(str::trim).collect()
}

/// The rows of all tables whose last column names tests, by line.
fn rows(text: &str) -> Vec<&str> {
    let mut rows = Vec::new();
    let mut in_table = false;
    for line in text.lines() {
        let is_row = line.starts_with('|');
        match is_row {
            true if cells(line).last() == Some(&COLUMN) => in_table = true,
            true if in_table && !line.starts_with("|---") => rows.push(line),
            true => {}
            false => in_table = false,
        }
    }
    rows
}

/// The names in backquotes in the last cell of a row.
fn tests_of(row: &str) -> Vec<&str> {
    let cells = cells(row);
    let last = cells.last().unwrap();
    last.split('`').skip(1).step_by(2).collect()
}

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => sources(&path, into),
            false if path.extension().is_some_and(|kind| kind == "rs") => into.push(path),
            false => {}
        }
    }
}

/// The names of all tests, and whether they are run: functions under `#[test]`, and the lines
/// `name: "verb" ...;` of the attackers' macro.
fn all_tests() -> BTreeMap<String, bool> {
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    let mut names = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let mut attributes = Vec::new();
        for line in text.lines().map(str::trim) {
            if line.starts_with("#[") {
                attributes.push(line);
                continue;
            }
            let has = |begin: &str| attributes.iter().any(|line| line.starts_with(begin));
            let function = line.strip_prefix("fn ").filter(|_| has("#[test]"));
            let name = function.and_then(|rest| rest.split('(').next());
            let attack = line.split_once(": \"").filter(|_| line.ends_with(';'));
            let name = name.or(attack.map(|(name, _)| name));
            if let Some(name) = name {
                names.insert(name.to_owned(), !has("#[ignore"));
            }
            attributes.clear();
        }
    }
    names
}

/// Fails if a row of a document names no test, or one that is not there. One that does not run stands at its end.
#[track_caller]
fn assert_rows_name_tests(document: &str, end: &str, least: usize) {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let rows = rows(&text);
    assert!(rows.len() > least, "{} rows are read", rows.len());
    let tests = all_tests();
    let (_, left) = text.split_once(end).unwrap();
    for row in rows {
        let named = tests_of(row);
        assert!(!named.is_empty(), "no test in: {row}");
        for name in named {
            match tests.get(name) {
                Some(runs) => assert!(
                    *runs || left.contains(&format!("`{name}`")),
                    "the test `{name}` is not run, in: {row}"
                ),
                None => panic!("there is no test `{name}`, in: {row}"),
            }
        }
    }
}

#[test]
fn each_row_of_the_threat_model_names_a_test_that_runs() {
    assert_rows_name_tests("docs/security.md", "## What is left", 30);
}

#[test]
fn each_mistake_names_a_test_that_runs() {
    assert_rows_name_tests("docs/code.md", "## Written by hand", 20);
}

/// A name of so many parts is a test's: those of system calls have fewer, but for one.
const PARTS: usize = 4;
const CALL: &str = "set_mempolicy_home_node";

#[test]
fn each_test_that_the_memory_calls_name_runs() {
    let text = fs::read_to_string(root().join("docs/memory-calls.md")).unwrap();
    let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let names = text.split(|c| !is_of_name(c));
    let names = names.filter(|name| name.split('_').count() >= PARTS && *name != CALL);
    let (tests, mut found) = (all_tests(), 0);
    for name in names {
        assert_eq!(tests.get(name), Some(&true), "`{name}`");
        found += 1;
    }
    assert!(found > 40, "{found} names");
}
