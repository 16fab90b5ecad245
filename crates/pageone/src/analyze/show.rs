//! The answer as tables, or as JSON.

use std::fmt::Write as _;

use anyhow::Result;
use sys::foreign::{Foreign, ForeignName, plain_json};

use super::advice::{self, Here};
use super::merged::Merged;
use super::print::PAGE;
use super::savable::Savable;
use super::sums::{MOST_IN_PAIRS, Report, Row};
use super::targets::{Source, left_out};
use crate::human::{count, cut, size, wrapped};
use crate::output;

/// Rows of processes that are shown.
const ROWS: usize = 20;
/// Columns of a terminal.
const WIDTH: usize = 80;

/// Prints the answer, with the commands that help as things are here.
///
/// # Errors
/// Standard output fails.
pub(crate) fn print(report: &Report, json: bool, here: &Here) -> Result<()> {
    let text = match json {
        true => plain_json(&serde_json::to_string(report)?) + "\n",
        false => table(report, here)?,
    };
    output::print(&text)
}

fn table(report: &Report, here: &Here) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    let savable = &report.savable;
    writeln!(
        text,
        "savable {} of {} ({}), in {}",
        size(savable.bytes),
        size(report.present),
        share(savable.bytes, report.present),
        count(report.processes.len(), "process")
    )?;
    if report.sampled > 1 {
        let (part, error) = (report.sampled, size(report.error));
        writeln!(
            text,
            "  one content of {part} was counted: ± {error} with 95 % certainty"
        )?;
    }
    writeln!(text, "  zeros              {:>10}", size(savable.zeros))?;
    writeln!(text, "  within a process   {:>10}", size(savable.within))?;
    writeln!(text, "  between processes  {:>10}", size(savable.between))?;
    already(&report.merged, &mut text)?;
    writeln!(
        text,
        "not counted: {} of copies that changed between the looks, {} shared already",
        size(report.changed),
        size(report.shared_already)
    )?;
    if report.left_alone > report.present / 100 {
        writeln!(
            text,
            "  and {} left alone: locked, of files, executable, small mappings",
            size(report.left_alone)
        )?;
    }
    if report.shared_unknown > 0 {
        writeln!(
            text,
            "  {} of these may be savable: root is told with whom they are shared",
            size(report.shared_unknown)
        )?;
    }
    kinds(report, &mut text)?;
    domains(report, &mut text)?;
    nodes(report, &mut text)?;
    writeln!(text, "\n{:40} {:>10}", "ENGINE", "SAVES")?;
    for engine in &report.engines {
        writeln!(text, "{:40} {:>10}", engine.name, size(engine.bytes))?;
    }
    processes(report, &mut text)?;
    in_common(report, &mut text)?;
    commands(report, here, &mut text)?;
    Ok(text)
}

/// What is merged already, if anything is.
fn already(merged: &Merged, text: &mut String) -> std::fmt::Result {
    let pageone = (merged.pageone > 0).then(|| {
        let (saved, all, copies) = (merged.pageone_saved, merged.pageone, merged.pageone_copies);
        let [saved, all, copies] = [saved, all, copies].map(size);
        format!("PageONE saves {saved} ({all} as {copies})")
    });
    let ksm = (merged.ksm > 0).then(|| format!("KSM has {}", size(merged.ksm)));
    let both: Vec<_> = [pageone, ksm].into_iter().flatten().collect();
    match both.is_empty() {
        true => Ok(()),
        false => writeln!(text, "merged already: {}", both.join(", ")),
    }
}

/// A table of what is savable, by something.
fn parts<'a>(
    text: &mut String,
    by: &str,
    rows: impl Iterator<Item = (String, &'a Savable)>,
) -> std::fmt::Result {
    let heads = ["SAVABLE", "ZEROS", "WITHIN", "BETWEEN"].map(|head| format!("{head:>10}"));
    writeln!(text, "\n{by:32} {}", heads.join(" "))?;
    for (name, sum) in rows {
        let sums = [sum.bytes, sum.zeros, sum.within, sum.between];
        let sums = sums.map(|bytes| format!("{:>10}", size(bytes)));
        writeln!(text, "{name:32} {}", sums.join(" "))?;
    }
    Ok(())
}

/// By trust domain, where there are several, those that save most first.
fn domains(report: &Report, text: &mut String) -> std::fmt::Result {
    if report.domains.len() < 2 {
        return Ok(());
    }
    let mut rows: Vec<_> = report.domains.iter().collect();
    rows.sort_by_key(|(name, sum)| (std::cmp::Reverse(sum.bytes), *name));
    let rows = rows.into_iter().take(ROWS);
    parts(
        text,
        "DOMAIN",
        rows.map(|(name, sum)| (name.to_string(), sum)),
    )
}

/// By NUMA node, where there are several.
fn nodes(report: &Report, text: &mut String) -> std::fmt::Result {
    if report.nodes.len() < 2 {
        return Ok(());
    }
    let heads = ["READ", "SAVABLE", "ZEROS", "WITHIN", "BETWEEN", "INSIDE"];
    let heads = heads.map(|head| format!("{head:>10}"));
    writeln!(text, "\n{:10} {}", "NODE", heads.join(" "))?;
    for (node, sum) in &report.nodes {
        let all = &sum.savable;
        let sums = [
            sum.read,
            all.bytes,
            all.zeros,
            all.within,
            all.between,
            sum.inside,
        ];
        let sums = sums.map(|bytes| format!("{:>10}", size(bytes)));
        writeln!(text, "{node:<10} {}", sums.join(" "))?;
    }
    writeln!(text, "INSIDE: with merge_across_nodes=false")
}

fn kinds(report: &Report, text: &mut String) -> std::fmt::Result {
    let rows = report.kinds.iter();
    parts(
        text,
        "MEMORY",
        rows.map(|(kind, sum)| (kind.name().to_owned(), sum)),
    )?;
    let sum = |of: fn(&Row) -> u64| size(report.processes.iter().map(of).sum::<u64>() * PAGE);
    let files = sum(|row| row.looked.files);
    let swapped = sum(|row| row.looked.swapped);
    writeln!(
        text,
        "not counted: {files} of files and shared memory, {swapped} in swap"
    )
}

fn processes(report: &Report, text: &mut String) -> std::fmt::Result {
    writeln!(text, "\n{HEADS}")?;
    let mut rows: Vec<_> = report.processes.iter().collect();
    rows.sort_by_key(|row| (std::cmp::Reverse(row.shareable), row.target.pid));
    for one in rows.iter().take(ROWS) {
        writeln!(text, "{}", row(one))?;
    }
    if let Ok(most) = sys::process::max_map_count() {
        beyond(&rows, most, text)?;
    }
    if let Some(more) = rows.len().checked_sub(ROWS + 1) {
        writeln!(text, "{:>8} and {} more: see --json", "", more + 1)?;
    }
    if report.unreadable > 0 {
        writeln!(text, "{:>8} {}", "", left_out(report.unreadable))?;
    }
    for row in rows {
        if let Some(error) = &row.looked.error {
            let (name, error) = (row.target.shown(), Foreign(error));
            note(
                text,
                row.target.pid,
                &format!("{name} is left out: {error}"),
            )?;
        }
    }
    Ok(())
}

/// Of mappings a process HAS so many, and NEEDS so many when all runs are merged.
const HEADS: &str =
    "     PID NAME           DOMAIN        PRESENT SHAREABLE     RUNS     HAS   NEEDS";

/// A process, in a terminal's columns.
fn row(row: &Row) -> String {
    let domain = row.target.domain.to_string();
    let known = |number: Option<u64>| number.map_or("-".to_owned(), short);
    format!(
        "{:>8} {:14} {:11} {:>9} {:>9} {:>8} {:>7} {:>7}",
        row.target.pid,
        cut(&row.target.shown().to_string(), 14),
        cut(&domain, 11),
        size(row.looked.pages * PAGE),
        size(row.shareable),
        known(row.runs),
        short(row.looked.mappings),
        known(row.mappings_needed),
    )
}

/// A number in seven columns: from ten million on in millions.
fn short(number: u64) -> String {
    const MILLION: u64 = 1_000_000;
    match number < 10 * MILLION {
        true => number.to_string(),
        false => format!("{}M", number / MILLION),
    }
}

/// The process that needs most mappings, if it may need more than there are.
fn beyond(rows: &[&Row], most: u64, text: &mut String) -> std::fmt::Result {
    let budget = engine::mapping_budget(most);
    let needs = |row: &&&Row| row.mappings_needed > Some(budget);
    let needs = rows.iter().filter(needs);
    let Some(row) = needs.max_by_key(|row| row.mappings_needed) else {
        return Ok(());
    };
    let needed = row.mappings_needed.unwrap_or(0);
    let words = format!(
        "may need {needed} mappings, of {budget} (vm.max_map_count {most}, less a quarter): what does not fit stays private"
    );
    note(text, row.target.pid, &words)
}

/// Words on a process, in as many lines as they take.
fn note(text: &mut String, pid: u32, words: &str) -> std::fmt::Result {
    let mut head = pid.to_string();
    for line in wrapped(words, WIDTH - 9) {
        writeln!(text, "{head:>8} {line}")?;
        head.clear();
    }
    Ok(())
}

fn in_common(report: &Report, text: &mut String) -> std::fmt::Result {
    for (index, pair) in report.pairs.iter().enumerate() {
        if index == 0 {
            writeln!(text, "\nIN COMMON  PAIR")?;
        }
        members(text, pair.bytes, &pair.pids, &pair.names)?;
    }
    for (index, group) in report.groups.iter().enumerate() {
        if index == 0 {
            writeln!(text, "\n    SAVES  GROUP, with what no other process has")?;
        }
        members(text, group.bytes, &group.pids, &group.names)?;
    }
    if report.in_many_processes > 0 {
        let begin = if report.groups.is_empty() { "\n" } else { "" };
        let bytes = size(report.in_many_processes);
        let held = format!("that more than {MOST_IN_PAIRS} processes hold");
        writeln!(text, "{begin}and {bytes} in contents {held}")?;
    }
    Ok(())
}

/// What some processes have in common, and the first of them with their names.
fn members(text: &mut String, bytes: u64, pids: &[u32], names: &[ForeignName]) -> std::fmt::Result {
    const INDENT: usize = 11;
    let member =
        |(pid, name): (&u32, &ForeignName)| format!("{pid} {}", cut(&name.to_string(), 20));
    let told: Vec<_> = pids.iter().zip(names).take(8).map(member).collect();
    let more = match pids.len() - told.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let mut head = format!("{:>9}", size(bytes));
    for line in wrapped(&(told.join(", ") + &more), WIDTH - INDENT) {
        writeln!(text, "{head:9}  {line}")?;
        head.clear();
    }
    Ok(())
}

fn commands(report: &Report, here: &Here, text: &mut String) -> std::fmt::Result {
    if report
        .processes
        .iter()
        .all(|row| matches!(row.target.source, Source::Dump(..)))
    {
        return Ok(());
    }
    let one = report.present / 100;
    if report.savable.bytes <= one {
        let more = match report.merged == Merged::default() {
            true => "less than 1 % would come back: it does not pay",
            false => "less than 1 % more would come back",
        };
        return writeln!(text, "\n{more}");
    }
    let lines = advice::lines(&report.processes, here);
    writeln!(text, "\n{}", lines.join("\n"))
}

#[expect(clippy::cast_precision_loss, reason = "a percentage")]
fn share(part: u64, whole: u64) -> String {
    match whole {
        0 => "nothing is present".to_owned(),
        _ => format!("{:.0} %", 100.0 * part as f64 / whole as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::super::parts::Looked;
    use super::super::rules::Ruling;
    use super::super::targets::Target;
    use super::*;

    fn process(runs: u64, mappings: u64) -> Row {
        Row {
            target: Target {
                source: Source::Process(4_194_304),
                pid: 4_194_304,
                command: "qemu-system-x86".into(),
                name: Some("a name that is longer than its place".into()),
                domain: Ruling::Domain("cgroup:1234/machine.slice".into()),
            },
            looked: Looked {
                pages: (1 << 20) - 1,
                mappings,
                ..Looked::default()
            },
            shareable: 1023 << 20,
            huge_advised: 0,
            runs: Some(runs),
            mappings_needed: Some(mappings + 2 * runs),
        }
    }

    #[test]
    fn the_mappings_that_are_needed_stand_beside_those_that_are_there() {
        let shown = row(&process(1234, 57));
        assert!(shown.ends_with("     1234      57    2525"), "{shown}");
        assert!(
            shown.starts_with(" 4194304 a name that i… cgroup:123… "),
            "{shown}"
        );
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(HEADS)[5..], ["RUNS", "HAS", "NEEDS"]);
        let great = row(&process(50_000_000, 9_999_999));
        assert!(great.ends_with(" 50M 9999999    109M"), "{great}");
        let widths = [HEADS, &shown, &great].map(|line| line.chars().count());
        assert_eq!(widths, [WIDTH; 3]);
        let sampled = Row {
            runs: None,
            mappings_needed: None,
            ..process(1, 57)
        };
        assert!(row(&sampled).ends_with("        -      57       -"));
    }

    #[test]
    fn who_needs_too_many_mappings_is_named_in_lines_that_fit() {
        let rows = [process(1234, 57), process(40_000, 57)];
        let rows = rows.each_ref();
        let mut text = String::new();
        beyond(&rows, 65_530, &mut text).unwrap();
        assert!(
            text.starts_with(" 4194304 may need 80057 mappings, of "),
            "{text}"
        );
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
        text.clear();
        beyond(&rows[..1], 65_530, &mut text).unwrap();
        assert_eq!(text, "");
    }

    #[test]
    fn members_have_names_that_do_nothing_and_fit_a_terminal() {
        let pids: Vec<u32> = (4_194_295..=4_194_304).collect();
        let long = "a name that is longer than its place".to_owned();
        let mut names = vec![ForeignName::from(long); pids.len()];
        names[1] = "web\x1b[2J".into();
        let mut text = String::new();
        members(&mut text, 5 << 20, &pids, &names).unwrap();
        let begin = "  5.0 MiB  4194295 a name that is long…, 4194296 web\\u{1b}[2J,";
        assert!(text.starts_with(begin), "{text}");
        assert!(text.ends_with(" and 2 more\n"), "{text}");
        let wide = text.lines().find(|line| line.chars().count() > WIDTH);
        assert_eq!(wide, None);
    }
}
