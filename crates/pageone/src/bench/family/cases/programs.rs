//! Programs that know nothing of merging: all their memory is offered for them.

use super::{Case, Variant};
use crate::bench::error::BenchError;
use crate::bench::family::session::{Session, is_installed, right_answers};

/// Turns of work that each program makes.
const TURNS: usize = 4;

pub(super) const CASE: Case = Case {
    name: "programs",
    question: "Programs as they are, with the same data each, all of whose memory may be merged: what do they take, what does it cost, and how fast do they work then?",
    variants: &[
        Variant::of("python", |session| run(session, &PYTHON)),
        Variant::of("forked python", |session| run(session, &FORKED)).full(),
        Variant::of("node", |session| run(session, &NODE)).full(),
    ],
};

/// A program that builds data, says `ready`, and answers each `work` with a digest and milliseconds.
struct Program {
    name: &'static str,
    /// What stands before the size of its data, in MiB.
    words: &'static [&'static str],
    /// What stands after it.
    more: &'static [&'static str],
    /// Whether one is started for each guest; else one that forks.
    many: bool,
}

const DATA_PY: &str = include_str!("../../../../../../tests/reach/data.py");
const DATA_JS: &str = include_str!("../../../../../../tests/reach/data.js");

const PYTHON: Program = Program {
    name: "python3",
    words: &["-c", DATA_PY],
    more: &["0"],
    many: true,
};

const FORKED: Program = Program {
    more: &["6"],
    many: false,
    ..PYTHON
};

const NODE: Program = Program {
    name: "node",
    // A name stands where a script's would.
    words: &["--max-old-space-size=4096", "-e", DATA_JS, "--", "data"],
    more: &[],
    many: true,
};

impl Program {
    fn words(&self, mib: u64) -> Vec<String> {
        let mut words = vec![self.name.to_owned()];
        words.extend(self.words.iter().map(ToString::to_string));
        words.push(mib.to_string());
        words.extend(self.more.iter().map(ToString::to_string));
        words
    }
}

fn run(session: &mut Session<'_>, program: &Program) -> Result<(), BenchError> {
    if !is_installed(program.name) {
        return Err(BenchError::NoProgram(program.name));
    }
    // Data of that size and what interprets it are about a guest's memory.
    let words = program.words((session.setting.guest_mib / 2).max(1));
    let right = right_answers(&words, TURNS)?;
    let count = if program.many {
        session.setting.guests
    } else {
        1
    };
    session.begin()?;
    session.launch(&words, count)?;
    session.rest("used_mib")?;
    session.turns(&right)?;
    session.part()
}
