//! A report of a folder of results: one page that needs nothing else, and the same as Markdown with its plots beside.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::growth::Growth;
use super::record::{Folder, Record, Table};
use super::summary::{Group, Spread, cell};
use crate::output::print;
use crate::plot::{self, Line};

/// How it looks.
const STYLE: &str = "body{font:16px/1.5 sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}\
    table{border-collapse:collapse;font-size:14px;margin:1rem 0}td,th{padding:2px 10px;text-align:left;border-bottom:1px solid #ddd}\
    td:last-child{color:#666}svg{max-width:100%;height:auto}h2{margin-top:3rem}.bad{color:#b00}";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder of results; the report goes there
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Take the results from another folder, and copy them
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
}

/// `pageone bench report`.
pub(crate) fn main(args: &Args) -> Result<()> {
    let records = Folder::read(args.from.as_deref().unwrap_or(&args.out))?;
    if records.is_empty() {
        bail!("no run is finished yet in {}", args.out.display());
    }
    if args.from.is_some() {
        let folder = Folder::make(&args.out)?;
        let there = folder.records()?;
        let missing = records.iter().filter(|record| !there.contains(record));
        missing
            .into_iter()
            .try_for_each(|record| folder.add(record))?;
    }
    let write = |name: &str, text: &str| {
        let path = args.out.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    let mut plots = Vec::new();
    for group in Group::all(&records) {
        plots.push(plots_of(&group, plots.len())?);
    }
    for plot in plots.iter().flatten() {
        write(&plot.file, &plot.svg)?;
    }
    write("report.html", &html(&records, &plots))?;
    write("report.md", &markdown(&records, &plots))?;
    let report = Path::new(&args.out).join("report.html");
    print(&format!("{}\n", report.display()))
}

/// A picture, and the name of its file.
/// When the time of the plots begins.
const OFFER: &str = "the first offer";

struct Plot {
    file: String,
    svg: String,
}

fn plots_of(group: &Group<'_>, number: usize) -> Result<Vec<Plot>> {
    let mut plots = Vec::new();
    let mut add = |name: &str, svg: String| {
        let file = format!("{:02}-{}-{name}.svg", number + 1, group.first().case);
        plots.push(Plot { file, svg });
    };
    let title = group.title();
    if group
        .first()
        .samples
        .iter()
        .any(|sample| sample.ideal_mib > 0.0)
    {
        let lines = lines(group, |sample| (sample.at_s, sample.net_mib));
        add(
            "saved",
            plot::over_time(
                &format!("{title}: saved, net of its costs"),
                OFFER,
                "MiB",
                &lines,
            )?,
        );
    }
    if !group.first().samples.is_empty() {
        let cpu = lines(group, |sample| (sample.at_s, sample.cpu_s));
        let title = format!("{title}: CPU time of engine and agents");
        add("cpu", plot::over_time(&title, OFFER, "seconds", &cpu)?);
    }
    for (number, (of, unit)) in axes(group).into_iter().enumerate() {
        let title = format!("{title}: {unit} by {of}");
        let lines = growth(group, of, unit);
        add(
            &format!("growth{}", number + 1),
            plot::growth(&title, (of, unit), &lines)?,
        );
    }
    for kind in group.first().curves.keys() {
        let lines: Vec<Line> = group
            .rows
            .iter()
            .map(|row| curve(row.engine, &row.records, kind))
            .collect();
        let words = kind.replace('_', "s, ");
        add(kind, plot::by_rank(&format!("{title}: {words}"), &lines)?);
    }
    Ok(plots)
}

fn lines(group: &Group<'_>, point: impl Fn(&super::record::Sample) -> (f64, f64)) -> Vec<Line> {
    let runs = group
        .rows
        .iter()
        .flat_map(|row| row.records.iter().map(move |record| (row.engine, record)));
    runs.map(|(engine, record)| Line {
        name: engine.to_owned(),
        color: plot::color(engine),
        points: record.samples.iter().map(&point).collect(),
    })
    .collect()
}

/// What costs of a group depend on, with their units: a plot each.
fn axes<'a>(group: &Group<'a>) -> Vec<(&'a str, &'a str)> {
    let mut axes = Vec::new();
    for row in &group.rows {
        let all = row.records.iter().flat_map(|record| &record.growth);
        for growth in all {
            let pair = (growth.of.as_str(), growth.unit.as_str());
            if !axes.contains(&pair) {
                axes.push(pair);
            }
        }
    }
    axes
}

/// The costs of each engine's last run, and in grey what was not measured.
fn growth(group: &Group<'_>, of: &str, unit: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let last = group
        .rows
        .iter()
        .filter_map(|row| Some((row.engine, row.records.last()?)));
    for (engine, record) in last {
        let of_both = |it: &&Growth| (it.of.as_str(), it.unit.as_str()) == (of, unit);
        for its in record.growth.iter().filter(of_both) {
            let number = lines.len();
            if let Some(beyond) = &its.beyond {
                let by = beyond.by.split(',').next().unwrap_or_default();
                lines.push(Line {
                    name: format!("{by}, not measured"),
                    color: plot::color("none"),
                    points: its
                        .points
                        .last()
                        .into_iter()
                        .chain(&beyond.points)
                        .copied()
                        .collect(),
                });
            }
            lines.push(Line {
                name: format!("{engine}, {}", its.name),
                color: plot::palette(number),
                points: its.points.clone(),
            });
        }
    }
    lines
}

/// The medians of an engine's runs, rank by rank.
#[expect(
    clippy::cast_precision_loss,
    reason = "a plot has a thousand dots a side"
)]
fn curve(engine: &str, records: &[&Record], kind: &str) -> Line {
    let all: Vec<&(u64, u64)> = records
        .iter()
        .filter_map(|record| record.curves.get(kind))
        .flatten()
        .collect();
    let mut ranks: Vec<u64> = all.iter().map(|point| point.0).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let median = |rank: u64| {
        let times = all
            .iter()
            .filter(|point| point.0 == rank)
            .map(|point| point.1 as f64);
        Spread::of(times.collect()).map(|spread| (rank as f64, spread.median))
    };
    let points = ranks.into_iter().filter_map(median).collect();
    Line {
        name: engine.to_owned(),
        color: plot::color(engine),
        points,
    }
}

/// Where, when and what was measured.
fn facts(records: &[Record]) -> Vec<String> {
    let first = &records[0];
    let machine = &first.machine;
    let mut notes: Vec<&str> = records.iter().map(|record| record.note.as_str()).collect();
    notes.dedup();
    let busy = Spread::of_figure(&records.iter().collect::<Vec<_>>(), "others_percent");
    vec![
        format!("{} runs of {}", records.len(), notes.join(", ")),
        format!(
            "Linux {}, {} × {}, {} MiB",
            machine.kernel,
            machine.cpus,
            machine.cpu,
            machine.memory_bytes >> 20
        ),
        format!("Huge pages: {}", machine.huge_pages),
        format!(
            "Others took {} % of the processors meanwhile (median, least and most)",
            cell(busy, 1)
        ),
    ]
}

fn setting(record: &Record) -> String {
    let it = &record.setting;
    let mut text = format!(
        "{} guests of {} MiB, PageONE's period {} ms, limit {} ms, phases of {} ms",
        it.guests, it.guest_mib, it.merge_period_ms, it.limit_ms, it.phase_ms
    );
    if let Some(most) = record.machine.max_map_count {
        let _ = write!(text, ", {most} mappings a process");
    }
    text
}

fn html(records: &[Record], plots: &[Vec<Plot>]) -> String {
    let mut text = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>PageONE: results</title><style>{STYLE}</style><h1>PageONE: results</h1><ul>"
    );
    for fact in facts(records) {
        let _ = write!(text, "<li>{}", escaped(&fact));
    }
    text.push_str("</ul><p>A cell has the median, and least and most in parentheses. The runs lie beside this page in runs.jsonl.</p>");
    for (group, plots) in Group::all(records).iter().zip(plots) {
        let _ = write!(
            text,
            "<h2>{}</h2><p>{}</p>",
            escaped(&group.title()),
            escaped(group.question())
        );
        let _ = write!(text, "<p>{}</p>", escaped(&setting(group.first())));
        if group.errors() > 0 {
            let _ = write!(
                text,
                "<p class=\"bad\">{} pages were not what they should be.</p>",
                group.errors()
            );
        }
        for why in group.hindrances() {
            let _ = write!(text, "<p>{}</p>", escaped(&why));
        }
        html_table(&mut text, &group.table());
        for (engine, table) in group.tables() {
            let _ = write!(text, "<p>{}</p>", escaped(engine));
            html_table(&mut text, &table);
        }
        plots.iter().for_each(|plot| text.push_str(&plot.svg));
    }
    text
}

fn markdown(records: &[Record], plots: &[Vec<Plot>]) -> String {
    let mut text = "# PageONE: results\n\n".to_owned();
    for fact in facts(records) {
        let _ = writeln!(text, "- {fact}");
    }
    for (group, plots) in Group::all(records).iter().zip(plots) {
        let _ = write!(
            text,
            "\n## {}\n\n{}\n\n{}\n\n",
            group.title(),
            group.question(),
            setting(group.first())
        );
        if group.errors() > 0 {
            let _ = write!(
                text,
                "**{} pages were not what they should be.**\n\n",
                group.errors()
            );
        }
        for why in group.hindrances() {
            let _ = write!(text, "{why}\n\n");
        }
        markdown_table(&mut text, &group.table());
        for (engine, table) in group.tables() {
            let _ = write!(text, "\n{engine}:\n\n");
            markdown_table(&mut text, &table);
        }
        for plot in plots {
            let _ = write!(text, "\n![]({})\n", plot.file);
        }
    }
    text
}

fn html_table(text: &mut String, table: &Table) {
    text.push_str("<table>");
    for line in table {
        text.push_str("<tr>");
        for cell in line {
            let _ = write!(text, "<td>{}", escaped(cell));
        }
    }
    text.push_str("</table>");
}

fn markdown_table(text: &mut String, table: &Table) {
    for (number, line) in table.iter().enumerate() {
        let _ = writeln!(text, "| {} |", line.join(" | "));
        if number == 0 {
            let _ = writeln!(text, "|{}", "---|".repeat(line.len()));
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::record::{Sample, tests::record};
    use super::*;

    #[test]
    fn a_page_needs_nothing_else_and_text_stays_text() {
        let mut records = vec![record("ksm", 0), record("ksm", 1), record("<b>", 0)];
        for (record, saved) in records.iter_mut().zip([1.0, 3.0, 9.0]) {
            record.note = "<script>".to_owned();
            record.figures.insert("saved_percent".to_owned(), saved);
            record.samples = [0.0, saved]
                .map(|at_s| Sample {
                    at_s,
                    ideal_mib: 9.0,
                    net_mib: at_s,
                    ..Sample::default()
                })
                .to_vec();
            record
                .curves
                .insert("break".to_owned(), vec![(500_000, 1000), (1_000_000, 9000)]);
        }
        let groups = Group::all(&records);
        let plots = vec![plots_of(&groups[0], 0).unwrap()];
        let files: Vec<&str> = plots[0].iter().map(|plot| plot.file.as_str()).collect();
        assert_eq!(
            files,
            [
                "01-equal-saved.svg",
                "01-equal-cpu.svg",
                "01-equal-break.svg"
            ]
        );
        let page = html(&records, &plots);
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(
            page.contains("2.00 (1.00–3.00)") && page.contains("&lt;script&gt;"),
            "{page}"
        );
        let outside = ["<script", "<b>", "src=", "href=", "url("];
        assert!(outside.iter().all(|word| !page.contains(word)), "{page}");
        let text = markdown(&records, &plots);
        assert!(
            text.contains("| saved_percent | 2.00 (1.00–3.00) | 9.00 |"),
            "{text}"
        );
        assert!(text.contains("![](01-equal-break.svg)"), "{text}");
    }

    #[test]
    fn a_curve_is_the_median_of_the_runs() {
        let mut records = [record("ksm", 0), record("ksm", 1), record("ksm", 2)];
        for (record, ns) in records.iter_mut().zip([10, 500, 20]) {
            record
                .curves
                .insert("break".to_owned(), vec![(500_000, ns)]);
        }
        let records: Vec<&Record> = records.iter().collect();
        assert_eq!(curve("ksm", &records, "break").points, [(500_000.0, 20.0)]);
    }
}
