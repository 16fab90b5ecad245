//! The documents name files and sections that exist and each knob, the README stays short, and so do the sentences of
//! documents and comments.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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

#[test]
fn each_metric_has_its_row() {
    let source = root().join("crates/pageone/src/serve/metrics.rs");
    let source = fs::read_to_string(source).unwrap();
    let (source, _tests) = source.split_once("#[cfg(test)]").unwrap();
    let named = source.split("\"pageone_").skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_');
        format!("pageone_{}", &rest[..end.unwrap()])
    });
    let named: std::collections::BTreeSet<_> = named.collect();
    let manual = fs::read_to_string(root().join("docs/cli.md")).unwrap();
    let rows = manual.lines().filter_map(|line| {
        let name = line.strip_prefix("| `")?.split('`').next()?;
        name.starts_with("pageone_").then(|| name.to_owned())
    });
    assert_eq!(rows.collect::<std::collections::BTreeSet<_>>(), named);
}

/// What the first hour types is understood: verbs and flags that are not there are refused before the help is shown.
#[test]
fn the_commands_of_the_first_hour_are_understood() {
    let text = fs::read_to_string(root().join("docs/first-hour.md")).unwrap();
    let typed: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("$ pageone "))
        .collect();
    assert!(typed.len() > 8, "{typed:?}");
    for line in typed {
        let mut pageone = Command::new(env!("CARGO_BIN_EXE_pageone"));
        let words = line.split(' ').take_while(|word| *word != "--");
        let said = pageone.args(words).arg("--help").output().unwrap();
        let error = String::from_utf8_lossy(&said.stderr);
        assert!(
            line == "--version" || said.status.success(),
            "{line}: {error}"
        );
    }
}

/// Each directive that keeps a service from something has a row, and is of the services that the row names.
#[test]
fn each_directive_of_the_units_has_its_row() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (manual, trials) = (read("docs/operations.md"), read("packaging/deb/hardening"));
    let (_, table) = manual
        .split_once("\n## What the services may not do\n")
        .unwrap();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .take_while(|line| !line.starts_with("## "))
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    // How a service is started has no trial, and no row.
    let (_, others) = trials.split_once("others='").unwrap();
    let others = others.split('\'').next().unwrap();
    let mut found = 0;
    for (unit, letter) in [
        ("pageone.service", "d"),
        ("pageone-serve.service", "s"),
        ("pageone-attach@.service", "a"),
    ] {
        let text = read(&format!("packaging/{unit}"));
        let (_, service) = text.split_once("\n[Service]\n").unwrap();
        let service = service.split("\n[").next().unwrap();
        let lines = service.lines().filter(|line| !line.starts_with('#'));
        let names: Vec<_> = lines.filter_map(|line| line.split_once('=')).collect();
        let is_of = |row: &Vec<&str>| row[2].split(' ').any(|one| one == letter);
        let is_named = |row: &Vec<&str>, name: &str| row[1].contains(&format!("`{name}=`"));
        for (name, _) in &names {
            let has_row = rows.iter().any(|row| is_named(row, name) && is_of(row));
            let is_other = others.split_whitespace().any(|other| other == *name);
            assert!(has_row != is_other, "{unit}: {name}");
            found += usize::from(has_row);
        }
        for row in rows.iter().filter(|row| is_of(row)) {
            let is_there = names.iter().any(|(name, _)| is_named(row, name));
            assert!(is_there, "{unit} has no {}", row[1]);
        }
    }
    assert!(found > 40, "{found} directives");
}

/// Words that a sentence of a document or a comment may have.
const SENTENCE_WORDS: usize = 35;

/// All Rust files below `folder`.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false if path.extension().is_some_and(|ext| ext == "rs") => found.push(path),
            false => {}
        }
    }
}

/// What a line of code says in a comment.
fn comment(line: &str) -> Option<&str> {
    let comment = line.trim_start().strip_prefix("//")?;
    let comment = comment.trim_start_matches(['/', '!']);
    Some(comment.strip_prefix(' ').unwrap_or(comment))
}

/// The paragraphs of what `words_of` finds in the lines of `text`; code, tables, pictures and headings left out.
fn paragraphs(text: &str, words_of: fn(&str) -> Option<&str>) -> Vec<String> {
    let (mut all, mut paragraph, mut picture) = (Vec::new(), String::new(), false);
    for line in text.lines() {
        let Some(words) = words_of(line) else {
            all.push(std::mem::take(&mut paragraph));
            picture = false;
            continue;
        };
        picture ^= words.starts_with("```");
        let is_item = ["- ", "* "].iter().any(|mark| words.starts_with(mark))
            || words
                .trim_start_matches(|c: char| c.is_ascii_digit())
                .starts_with(". ");
        let ends = picture
            || words.trim().is_empty()
            || ["```", "   ", "|", "#"]
                .iter()
                .any(|mark| words.starts_with(mark));
        if ends || is_item {
            all.push(std::mem::take(&mut paragraph));
        }
        if !ends {
            paragraph.push_str(words);
            paragraph.push(' ');
        }
    }
    all.push(paragraph);
    all
}

/// Sentences of more words than they may have.
fn long_sentences(paragraph: &str) -> Vec<String> {
    let (mut long, mut sentence) = (Vec::new(), Vec::new());
    let mut words = paragraph.split_whitespace().peekable();
    while let Some(word) = words.next() {
        sentence.push(word);
        let begins = |next: &&str| next.starts_with(|c: char| !c.is_lowercase());
        if words.peek().is_none()
            || word
                .trim_end_matches(['*', ')', '"'])
                .ends_with(['.', '!', '?'])
                && words.peek().is_some_and(begins)
        {
            if sentence.len() > SENTENCE_WORDS {
                long.push(sentence.join(" "));
            }
            sentence.clear();
        }
    }
    long
}

/// A file that gives a folder its name has a row of its own only where it does more than that.
#[test]
fn the_map_names_every_file_of_engine_and_agent() {
    let map = fs::read_to_string(root().join("docs/code.md")).unwrap();
    let mut missing = Vec::new();
    for folder in ["crates/engine/src", "crates/agent/src"] {
        let folder = root().join(folder);
        let mut found = Vec::new();
        sources(&folder, &mut found);
        for file in &found {
            let name = file.strip_prefix(&folder).unwrap();
            let gives_a_name = name.ends_with("mod.rs")
                || name.ends_with("lib.rs")
                || name.ends_with("tests.rs")
                || file.with_extension("").is_dir();
            let is_test = name.starts_with("testing");
            let named = |before: char| map.contains(&format!("{before}{}`", name.display()));
            if !gives_a_name && !is_test && !named('`') && !named('/') {
                missing.push(file.display().to_string());
            }
        }
        assert!(found.len() > 40, "the sources are not there");
    }
    assert_eq!(missing, Vec::<String>::new(), "not in docs/code.md");
}

/// Fails for texts with sentences of more words than they may have.
#[track_caller]
fn assert_short(texts: &[(PathBuf, String)], words_of: fn(&str) -> Option<&str>) {
    let mut long = Vec::new();
    for (file, text) in texts {
        let paragraphs = paragraphs(text, words_of);
        for sentence in paragraphs.iter().flat_map(|text| long_sentences(text)) {
            long.push(format!("{}: {sentence}", file.display()));
        }
    }
    assert!(
        long.is_empty(),
        "{} sentences are too long:\n{}",
        long.len(),
        long.join("\n")
    );
}

#[test]
fn the_sentences_of_comments_are_short() {
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    assert!(files.len() > 200, "{} files", files.len());
    let texts = files.into_iter().map(|file| {
        let text = fs::read_to_string(&file).unwrap();
        (file, text)
    });
    assert_short(&texts.collect::<Vec<_>>(), comment);
}

/// The changelog tells of what was; it has words of its own. Measurements have none.
#[test]
fn the_sentences_of_documents_are_short() {
    let mut documents = documents();
    documents.retain(|(path, _)| {
        path.extension() == Some("md".as_ref()) && !path.ends_with("CHANGELOG.md")
    });
    assert!(documents.len() > 15, "{} documents", documents.len());
    // What is indented belongs to an item of a list.
    assert_short(&documents, |line| Some(line.trim_start()));
}

/// A word of a line, outside of code, in whose place a noun says more.
fn vague_word(line: &str) -> Option<&str> {
    const VAGUE: [&str; 4] = ["nobody", "whoever", "everybody", "somebody"];
    let prose = line.split('`').step_by(2);
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut words = prose.flat_map(move |part| part.split(move |c| !is_part(c)));
    words.find(|word| VAGUE.iter().any(|vague| word.eq_ignore_ascii_case(vague)))
}

#[test]
fn comments_and_documents_name_who_acts() {
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    let read = |file: PathBuf| {
        let text = fs::read_to_string(&file).unwrap();
        (file, text)
    };
    let mut found = Vec::new();
    let mut look = |(file, text): &(PathBuf, String), words_of: fn(&str) -> Option<&str>| {
        let lines = text.lines().filter_map(words_of).filter_map(vague_word);
        found.extend(lines.map(|word| format!("{}: {word}", file.display())));
    };
    let sources = files.into_iter().map(read);
    sources.for_each(|one| look(&one, comment));
    let documents = documents().into_iter();
    let texts = documents.filter(|(path, _)| path.extension() == Some("md".as_ref()));
    texts.for_each(|one| look(&one, |line| Some(line)));
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert_eq!(vague_word("for who is, or `nobody`, or a_nobody"), None);
    assert_eq!(vague_word("as nobody, does"), Some("nobody"));
}

/// The figures in cells of a table, or words of a line.
fn figures(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !c.is_ascii_digit() && c != '.');
    let words = words.map(|word| word.trim_matches('.'));
    words.filter(|word| !word.is_empty()).collect()
}

/// What the first run of the results has on an engine: the columns that the README shows, in its order.
fn measured<'a>(results: &'a str, engine: &str, threads: &str) -> Vec<&'a str> {
    const SHOWN: [&str; 5] = ["net MiB", "net %", "t95 s", "cpu s", "steady %"];
    let (_, section) = results.split_once("\n## Against KSM\n").unwrap();
    let mut lines = section
        .lines()
        .skip_while(|line| !line.starts_with("engine "));
    // Names of two words have their unit last; blanks of two and more stand between names.
    let heads = lines.next().unwrap();
    let units = ["MiB", "%", "s"];
    let mut names: Vec<String> = Vec::new();
    for word in heads.split_whitespace() {
        match names.last_mut() {
            Some(last) if units.contains(&word) => *last += &format!(" {word}"),
            _ => names.push(word.to_owned()),
        }
    }
    let rows = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut rows = rows.take_while(|row| row.len() == names.len());
    let row = rows.find(|row| row[..2] == [engine, threads]);
    let row = row.unwrap_or_else(|| panic!("no row of {engine}, {threads}"));
    let place = |shown: &str| names.iter().position(|name| name == shown).unwrap();
    SHOWN.map(|shown| row[place(shown)]).into()
}

/// docs/results.md is the one place of what was measured against KSM: the README's table has the figures of its first run, and
/// docs/ksm.md and docs/why-not-ksm.md have none.
#[test]
fn figures_against_ksm_are_those_of_the_results() {
    let read = |name: &str| fs::read_to_string(root().join(name)).unwrap();
    let (readme, results) = (read("README.md"), read("docs/results.md"));
    let ksm = read("docs/ksm.md") + &read("docs/why-not-ksm.md");
    for (name, engine, threads) in [
        ("PageONE, 2 threads", "pageone", "2"),
        ("PageONE, 1 thread", "pageone", "1"),
        ("KSM, tuned", "ksm", "1"),
    ] {
        let begin = format!("| {name} |");
        let row = readme.lines().find_map(|line| line.strip_prefix(&begin));
        let said = figures(row.unwrap_or_else(|| panic!("the README has no row of {name}")));
        let measured = measured(&results, engine, threads);
        assert_eq!(said, measured, "{name}: the README, then docs/results.md");
    }
    // A version of the kernel is no figure.
    let mut others = figures(&ksm);
    others.retain(|word| word.contains('.') && *word != "6.8");
    assert!(
        others.is_empty(),
        "docs/ksm.md or docs/why-not-ksm.md has figures of its own: {others:?}"
    );
}
