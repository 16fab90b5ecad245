//! The last lines of the tables: the commands that get the saving, as things are now.

use std::path::Path;

use wire::KnobValues;

use super::sums::Row;
use super::targets::Source;
use crate::view::status;
use crate::{client, human, paths};

/// Columns of a terminal.
const WIDTH: usize = 80;
/// Processes that are named.
const MOST: usize = 10;
/// A process that shares less is not named.
const LEAST: u64 = 1 << 20;
const FIRST: &str = "to get it: ";

/// What there is already.
#[derive(Debug, Default)]
pub(crate) struct Here {
    /// A daemon listens at the socket.
    daemon: bool,
    /// Its guests, as far as this user may know them.
    guests: Vec<u32>,
    /// Those among them that were attached.
    attached: Vec<u32>,
    /// The knobs of the daemon, else those with which one begins.
    pub(super) knobs: KnobValues,
    /// How the processes were named, as words of `attach`; none: by their numbers.
    words: Option<String>,
}

impl Here {
    /// Asks the daemon that serves this user.
    pub(super) fn look(words: Option<String>) -> Self {
        let socket = paths::served(None).ok();
        let listens = |socket: &Path| sys::socket::connect(socket).is_ok();
        let daemon = socket.as_deref().is_some_and(listens);
        let shares_numbers = socket.as_deref().is_some_and(client::shares_numbers);
        let status = socket
            .filter(|_| daemon)
            .and_then(|socket| status::ask(&socket).ok());
        let status = status.unwrap_or_default();
        let guests = status.guests.iter().filter(|_| shares_numbers);
        let attached = guests.clone().filter(|guest| guest.attached);
        Self {
            daemon,
            attached: attached.map(|guest| guest.pid).collect(),
            guests: guests.map(|guest| guest.pid).collect(),
            knobs: status.knobs,
            words,
        }
    }
}

/// Whether so much of what is savable is advised to be of huge pages that `--any` alone does not get it.
fn takes_huge(row: &Row) -> bool {
    row.huge_advised > 0 && row.huge_advised >= row.shareable / 8
}

/// The commands and the reason for their flags, a line each: five at most, and none wider than a terminal.
pub(super) fn lines(rows: &[Row], here: &Here) -> Vec<String> {
    let daemon = (!here.daemon).then(|| format!("`{}`", paths::daemon_of_root()));
    let huge = rows.iter().filter(|row| takes_huge(row));
    let huge: u64 = huge.map(|row| row.huge_advised).sum();
    let any = any_flags(huge > 0);
    let later = format!("`pageone run {any} -- COMMAND` for later starts");
    let size = human::size(huge);
    let why = format!("--any-huge: {size} of it is to be of huge pages, which are split");
    let why = (huge > 0).then_some(why);
    let commands = [
        daemon,
        attach(rows, here),
        again(rows, here),
        Some(later),
        why,
    ];
    let heads = std::iter::once(FIRST).chain(std::iter::repeat(""));
    heads
        .zip(commands.into_iter().flatten())
        .map(|(head, command)| format!("{head:indent$}{command}", indent = FIRST.len()))
        .collect()
}

fn any_flags(huge: bool) -> &'static str {
    match huge {
        true => "--any --any-huge",
        false => "--any",
    }
}

/// The commands for the guest that was attached without `--any-huge`, and has most to share by it.
fn again(rows: &[Row], here: &Here) -> Option<String> {
    let rows = rows
        .iter()
        .filter(|row| takes_huge(row) && row.huge_advised >= LEAST);
    let rows = rows.filter(|row| here.attached.contains(&row.target.pid));
    let mut pids: Vec<_> = rows.map(|row| (row.huge_advised, row.target.pid)).collect();
    pids.sort_by_key(|&(bytes, pid)| (std::cmp::Reverse(bytes), pid));
    let (_, pid) = pids.first()?;
    let more = match pids.len() - 1 {
        0 => String::new(),
        more => format!("  # and {more} more"),
    };
    let line = |more: &str| {
        format!("`pageone detach {pid} && pageone attach --any --any-huge {pid}{more}`")
    };
    let lines = [line(&more), line("")];
    lines
        .into_iter()
        .find(|line| FIRST.len() + line.chars().count() <= WIDTH)
}

/// The command for what runs and is no guest yet, those with most to share first.
fn attach(rows: &[Row], here: &Here) -> Option<String> {
    let alive = |row: &&Row| matches!(row.target.source, Source::Process(_));
    let served = |row: &&Row| row.target.domain.domain().is_some() && row.looked.error.is_none();
    let mut rows: Vec<_> = rows.iter().filter(alive).filter(served).collect();
    rows.retain(|row| row.shareable > 0 && !here.guests.contains(&row.target.pid));
    // One that has an agent of its start gets no other: it has to be started anew.
    rows.retain(|row| !row.looked.has_agent);
    if rows.is_empty() || cfg!(not(target_arch = "x86_64")) {
        return None;
    }
    let any = any_flags(rows.iter().any(|row| takes_huge(row)));
    let command = |words: &str| format!("`pageone attach {any} {words}`");
    let fits = |words: &str| FIRST.len() + command(words).chars().count() <= WIDTH;
    if let Some(words) = here.words.as_deref().filter(|words| fits(words)) {
        return Some(command(words));
    }
    rows.retain(|row| row.shareable >= LEAST);
    rows.sort_by_key(|row| (std::cmp::Reverse(row.shareable), row.target.pid));
    let pids: Vec<_> = rows.iter().map(|row| row.target.pid.to_string()).collect();
    let named = |count: usize| match count == pids.len() {
        true => pids.join(" "),
        false => {
            let more = pids.len() - count;
            format!("{}  # and {more} more", pids[..count].join(" "))
        }
    };
    let most = pids.len().min(MOST);
    (1..=most)
        .rev()
        .map(named)
        .find(|words| fits(words))
        .map(|words| command(&words))
}

#[cfg(test)]
mod tests {
    use super::super::parts::Looked;
    use super::super::rules::Ruling;
    use super::super::targets::{Target, word};
    use super::*;

    fn rows(count: u32) -> Vec<Row> {
        let row = |number: u32| Row {
            target: Target {
                source: Source::Process(number),
                pid: number,
                command: "x".into(),
                name: None,
                domain: Ruling::Domain("uid:1".into()),
            },
            looked: Looked::default(),
            shareable: u64::from(10_000_000 - number),
            huge_advised: 0,
            runs: None,
            mappings_needed: None,
        };
        (0..count).map(|at| row(4_000_000 + at)).collect()
    }

    #[test]
    fn the_commands_are_those_that_help() {
        let nothing = Here::default();
        let said = lines(&rows(2), &nothing).join("\n");
        assert_eq!(
            said,
            format!(
                "to get it: `{}`\n           \
                 `pageone attach --any 4000000 4000001`\n           \
                 `pageone run --any -- COMMAND` for later starts",
                paths::daemon_of_root()
            )
        );
        let mut here = Here {
            daemon: true,
            guests: vec![4_000_000],
            ..Here::default()
        };
        let said = lines(&rows(2), &here);
        assert_eq!(said[0], "to get it: `pageone attach --any 4000001`");
        assert_eq!(said.len(), 2);
        here.words = word("command=redis*").map(|word| format!("--match {word}"));
        let said = lines(&rows(2), &here);
        assert_eq!(
            said[0],
            "to get it: `pageone attach --any --match 'command=redis*'`"
        );
        let said = lines(&rows(1), &here);
        assert_eq!(
            said,
            ["to get it: `pageone run --any -- COMMAND` for later starts"]
        );
        for (of, row) in rows(4).into_iter().enumerate() {
            let mut row = row;
            match of {
                3 => row.looked.has_agent = true,
                0 => row.target.domain = Ruling::Refused,
                1 => row.looked.error = Some("x".into()),
                _ => row.shareable = 0,
            }
            assert_eq!(attach(&[row], &nothing), None);
        }
    }

    #[test]
    fn memory_that_is_to_be_of_huge_pages_takes_a_flag_more() {
        let mut rows = rows(4);
        for row in &mut rows[..3] {
            row.shareable = 16 << 20;
            row.huge_advised = 15 << 20;
        }
        let mut here = Here {
            daemon: true,
            ..Here::default()
        };
        let said = lines(&rows, &here);
        assert_eq!(
            said[0],
            "to get it: `pageone attach --any --any-huge 4000000 4000001 4000002 4000003`"
        );
        let rest = [
            "           `pageone run --any --any-huge -- COMMAND` for later starts",
            "           --any-huge: 45.0 MiB of it is to be of huge pages, which are split",
        ];
        assert_eq!(said[1..], rest);
        here.guests = (4_000_000..4_000_004).collect();
        here.attached = vec![4_000_001, 4_000_002, 4_000_003];
        let said = lines(&rows, &here);
        assert_eq!(
            said[0],
            "to get it: `pageone detach 4000001 && pageone attach --any --any-huge 4000001`"
        );
        assert_eq!(said[1..], rest);
        assert!(said.iter().all(|line| line.len() <= WIDTH), "{said:?}");
        rows.iter_mut()
            .for_each(|row| row.huge_advised = row.shareable / 8 - 1);
        assert!(!lines(&rows, &here).join("").contains("huge"));
    }

    #[test]
    fn lines_fit_a_terminal_and_name_ten_processes_at_most() {
        let mut here = Here::default();
        for long in [false, true] {
            here.words = long.then(|| format!("--match command={}", "x".repeat(60)));
            let mut rows = rows(30);
            let said = attach(&rows, &here).unwrap();
            assert!(said.ends_with(" 4000003  # and 26 more`"), "{said}");
            assert!(said.len() + FIRST.len() <= WIDTH, "{said}");
            for (row, pid) in rows.iter_mut().zip(1..) {
                (row.target.pid, row.shareable) = (pid, LEAST);
            }
            let said = attach(&rows, &here).unwrap();
            assert!(
                said.ends_with(" 1 2 3 4 5 6 7 8 9 10  # and 20 more`"),
                "{said}"
            );
        }
        assert_eq!(word("it's"), None);
        let mut rows = rows(2);
        rows[1].shareable = LEAST - 1;
        let said = attach(&rows, &Here::default());
        assert_eq!(said.as_deref(), Some("`pageone attach --any 4000000`"));
        rows.remove(0);
        assert_eq!(attach(&rows, &Here::default()), None);
    }
}
