//! The documents name files and sections that exist and each knob, and the README stays short.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::fs;
use std::path::{Path, PathBuf};

/// Words that the README may have, with its picture and its table.
const README_WORDS: usize = 700;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The documents, with their text.
fn documents() -> Vec<(PathBuf, String)> {
    let mut paths: Vec<_> = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
        .map(|name| root().join(name))
        .into();
    let docs = fs::read_dir(root().join("docs")).unwrap();
    paths.extend(docs.map(|entry| entry.unwrap().path()));
    let texts = paths.into_iter().map(|path| {
        let text = fs::read_to_string(&path).unwrap();
        (path, text)
    });
    texts.collect()
}

/// As a heading is named by links: small letters, digits, hyphens for blanks.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        _ => c.is_alphanumeric().then_some(c),
    });
    kept.collect()
}

fn has_section(text: &str, section: &str) -> bool {
    let mut code = false;
    text.lines().any(|line| {
        code ^= line.starts_with("```");
        !code && line.starts_with('#') && anchor(line) == section
    })
}

#[test]
fn links_lead_to_files_and_sections() {
    for (path, text) in documents() {
        for target in text.split("](").skip(1) {
            let target = target.split(')').next().unwrap();
            if target.starts_with("http") {
                continue;
            }
            let (file, section) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => path.clone(),
                file => path.parent().unwrap().join(file),
            };
            assert!(file.exists(), "{}: no {target}", path.display());
            let found = section.is_empty() || {
                let text = fs::read_to_string(&file).unwrap();
                has_section(&text, section)
            };
            assert!(found, "{}: no section {target}", path.display());
        }
    }
}

#[test]
fn files_that_the_documents_name_exist() {
    // In the map of the code the short names are of one of these.
    let crates = ["agent", "engine", "pageone"].map(|name| root().join("crates").join(name));
    for (path, text) in documents() {
        let map = path.ends_with("docs/code.md");
        // Every other piece between backticks is code; blocks of three leave the count even.
        for name in text
            .lines()
            .flat_map(|line| line.split('`').skip(1).step_by(2))
        {
            let is_path = name
                .chars()
                .all(|c| c.is_alphanumeric() || "/._-".contains(c));
            let whole = ["crates/", "docs/", "tests/", "fuzz/", "mk/", "packaging/"]
                .iter()
                .any(|folder| name.starts_with(folder));
            let place = path.display();
            if is_path && whole {
                assert!(root().join(name).exists(), "{place}: no {name}");
            } else if is_path && map && name.ends_with(".rs") {
                let mut sources = crates.iter().map(|folder| folder.join("src").join(name));
                assert!(sources.any(|file| file.exists()), "{place}: no {name}");
            }
        }
    }
}

#[test]
fn the_readme_is_short() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let words = readme.split_whitespace().count();
    assert!(words <= README_WORDS, "{words} words");
}

#[test]
fn each_knob_has_its_row() {
    let manual = fs::read_to_string(root().join("docs/cli.md")).unwrap();
    for knob in wire::KNOBS {
        let flag = format!("--{} {}", knob.key.replace('_', "-"), knob.form);
        let flag = flag.replace('|', "\\|");
        let default = match knob.default.contains(' ') {
            true => knob.default.to_owned(),
            false => format!("`{}`", knob.default),
        };
        let row = format!("| `{flag}` | `{}` | {default} | ", knob.key);
        assert!(manual.contains(&row), "no row: {row}");
    }
}
