//! The example program, over files whose duplicates are known.

use std::path::{Path, PathBuf};
use std::process::Command;

/// `cargo test` builds examples beside the tests.
fn example() -> PathBuf {
    let this = std::env::current_exe().expect("this test");
    let target = this
        .parent()
        .and_then(Path::parent)
        .expect("the target directory");
    target.join("examples/dedup")
}

fn run(arguments: &[&str]) -> String {
    let output = Command::new(example())
        .args(arguments)
        .output()
        .expect("the example program");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

/// The first number in the line of this name.
fn figure(text: &str, name: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .expect("a line of that name");
    line.split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .expect("a number")
}

/// Bytes that do not repeat.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let step = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(step).take(len).collect()
}

#[test]
fn duplicate_blocks_are_counted_across_files_and_directories() {
    let directory = tempfile::tempdir().expect("a directory");
    let below = directory.path().join("below");
    std::fs::create_dir(&below).expect("a directory");
    let content = noise(3 * 4096 + 100);
    std::fs::write(directory.path().join("one"), &content).expect("a file");
    std::fs::write(below.join("two"), &content).expect("a file");
    std::fs::write(below.join("zeros"), vec![0; 3 * 4096]).expect("a file");
    let text = run(&[directory.path().to_str().expect("a path")]);
    let len = content.len() as u64;
    assert_eq!(figure(&text, "files"), 3);
    assert_eq!(figure(&text, "blocks"), 11);
    assert_eq!(figure(&text, "bytes"), 2 * len + 3 * 4096);
    assert_eq!(figure(&text, "duplicate bytes"), len + 2 * 4096);
}

#[test]
fn cutting_by_content_finds_shifted_duplicates() {
    let directory = tempfile::tempdir().expect("a directory");
    let content = noise(1 << 20);
    let shifted = [b"shift".as_slice(), &content].concat();
    std::fs::write(directory.path().join("one"), &content).expect("a file");
    std::fs::write(directory.path().join("two"), shifted).expect("a file");
    let path = directory.path().to_str().expect("a path");
    let duplicate = |arguments: &[&str]| figure(&run(arguments), "duplicate bytes");
    assert_eq!(duplicate(&[path]), 0);
    assert!(duplicate(&["--by-content", path]) > content.len() as u64 * 9 / 10);
}

#[test]
fn a_missing_file_is_an_error_that_names_it() {
    let output = Command::new(example())
        .arg("/nowhere/at/all")
        .output()
        .expect("the example program");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere/at/all"));
}
