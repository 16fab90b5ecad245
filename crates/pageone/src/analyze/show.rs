//! The answer as tables, or as JSON.

use std::fmt::Write as _;

use anyhow::Result;
use sys::foreign::{ForeignName, plain_json};

use super::advice::{self, Here};
use super::merged::Merged;
use super::print::PAGE;
use super::savable::Savable;
use super::sums::{MOST_IN_PAIRS, Report, Row};
use super::targets::Source;
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
    writeln!(
        text,
        "\n{:>8} {:16} {:14} {:>10} {:>10} {:>8} {:>8}",
        "PID", "NAME", "DOMAIN", "PRESENT", "SHAREABLE", "RUNS", "MAPPINGS"
    )?;
    let mut rows: Vec<_> = report.processes.iter().collect();
    rows.sort_by_key(|row| (std::cmp::Reverse(row.shareable), row.target.pid));
    for row in rows.iter().take(ROWS) {
        let domain = row.target.domain.as_ref();
        let domain = domain.map_or("refused".to_owned(), ToString::to_string);
        writeln!(
            text,
            "{:>8} {:16} {:14} {:>10} {:>10} {:>8} {:>8}",
            row.target.pid,
            cut(&row.target.shown().to_string(), 16),
            domain,
            size(row.looked.pages * PAGE),
            size(row.shareable),
            row.runs.map_or("-".to_owned(), |runs| runs.to_string()),
            row.looked.mappings
        )?;
    }
    if let Ok(most) = sys::process::max_map_count() {
        let budget = engine::mapping_budget(most);
        let needs = |row: &&&Row| row.mappings_needed > Some(budget);
        if let Some(row) = rows
            .iter()
            .filter(needs)
            .max_by_key(|row| row.mappings_needed)
        {
            let (pid, needed) = (row.target.pid, row.mappings_needed.unwrap_or(0));
            writeln!(
                text,
                "{pid:>8} may need {needed} mappings, of {budget} (vm.max_map_count {most}, less a quarter): what does not fit stays private"
            )?;
        }
    }
    if let Some(more) = rows.len().checked_sub(ROWS + 1) {
        writeln!(text, "{:>8} and {} more: see --json", "", more + 1)?;
    }
    for row in rows {
        if let Some(error) = &row.looked.error {
            let (pid, name) = (row.target.pid, row.target.shown());
            writeln!(text, "{pid:>8} {name} is left out: {error}")?;
        }
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
    use super::*;

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
