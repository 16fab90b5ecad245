//! Runs of one engine side by side: median, least and most of each figure, as a table.

use std::fmt::Write as _;

use super::cases;
use super::figures::{Better, FIGURES, Figure};
use super::growth::Growth;
use super::record::{Record, Table};

/// A figure over some runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) least: f64,
    pub(super) median: f64,
    pub(super) most: f64,
    /// Runs that have the figure.
    pub(super) runs: usize,
}

impl Spread {
    /// Of `values`; none of nothing.
    pub(super) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (&least, &most) = (values.first()?, values.last()?);
        let upper = values[values.len() / 2];
        let lower = values[(values.len() - 1) / 2];
        Some(Self {
            least,
            median: f64::midpoint(lower, upper),
            most,
            runs: values.len(),
        })
    }

    /// Of the figure `name` in `records`.
    pub(super) fn of_figure(records: &[&Record], name: &str) -> Option<Self> {
        Self::of(
            records
                .iter()
                .filter_map(|record| record.figures.get(name).copied())
                .collect(),
        )
    }
}

/// The runs of one engine at one task.
pub(super) struct Row<'a> {
    pub(super) engine: &'a str,
    pub(super) records: Vec<&'a Record>,
}

/// All runs of one task, side by side.
pub(super) struct Group<'a> {
    pub(super) rows: Vec<Row<'a>>,
}

impl<'a> Group<'a> {
    /// The groups of `records`, in the order in which they first appear.
    pub(super) fn all(records: &'a [Record]) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for record in records {
            let found = groups
                .iter_mut()
                .find(|group| group.first().is_beside(record));
            match found {
                Some(group) => group.add(record),
                None => groups.push(Self {
                    rows: vec![Row {
                        engine: &record.engine,
                        records: vec![record],
                    }],
                }),
            }
        }
        groups
    }

    fn add(&mut self, record: &'a Record) {
        match self.rows.iter_mut().find(|row| row.engine == record.engine) {
            Some(row) => row.records.push(record),
            None => self.rows.push(Row {
                engine: &record.engine,
                records: vec![record],
            }),
        }
    }

    /// The record that came first.
    pub(super) fn first(&self) -> &'a Record {
        self.rows[0].records[0]
    }

    /// The case and its variant.
    pub(super) fn title(&self) -> String {
        let first = self.first();
        match first.variant.as_str() {
            "" => first.case.clone(),
            variant => format!("{}, {variant}", first.case),
        }
    }

    /// What the case answers.
    pub(super) fn question(&self) -> &'static str {
        cases::named(&self.first().case).map_or("", |case| case.question)
    }

    /// The figures that at least one run has.
    pub(super) fn figures(&self) -> impl Iterator<Item = &'static Figure> {
        let records: Vec<&Record> = self
            .rows
            .iter()
            .flat_map(|row| row.records.clone())
            .collect();
        let has =
            move |figure: &&Figure| records.iter().any(|r| r.figures.contains_key(figure.name));
        FIGURES.iter().filter(has)
    }

    /// The figures, row by row: the names of the engines first, what each means last.
    pub(super) fn table(&self) -> Table {
        let mut head = vec![String::new()];
        head.extend(self.rows.iter().map(|row| row.engine.to_owned()));
        head.push(String::new());
        let line = |figure: &'static Figure| {
            let of = |row: &Row<'_>| Spread::of_figure(&row.records, figure.name);
            let cells = self.rows.iter().map(|row| cell(of(row), row.records.len()));
            let name = std::iter::once(figure.name.to_owned());
            name.chain(cells).chain([legend(figure)]).collect()
        };
        std::iter::once(head)
            .chain(self.figures().map(line))
            .collect()
    }

    /// The tables of each row's last run, with the name of its engine: what grows how first, then what the case shows besides.
    pub(super) fn tables(&self) -> Vec<(&'a str, Table)> {
        let of_row = |row: &Row<'a>| {
            let (engine, last) = (row.engine, row.records.last().copied());
            let growth = |run: &Record| run.growth.iter().flat_map(Growth::rows).collect::<Table>();
            let mut growth = last.map(growth).unwrap_or_default();
            if !growth.is_empty() {
                growth.insert(0, ["cost", "with", "is", "by"].map(str::to_owned).to_vec());
            }
            let besides = last.into_iter().flat_map(|run| run.tables.clone());
            let all = std::iter::once(growth).chain(besides);
            all.filter(|table| !table.is_empty())
                .map(move |table| (engine, table))
                .collect::<Vec<_>>()
        };
        self.rows.iter().flat_map(of_row).collect()
    }

    /// What kept engines from merging more, each with its engine, once.
    pub(super) fn hindrances(&self) -> Vec<String> {
        let of_row = |row: &Row<'_>| {
            let mut all = row.records.iter().filter_map(|run| run.hindrance.as_ref());
            all.next().map(|why| format!("{}: {why}", row.engine))
        };
        self.rows.iter().filter_map(of_row).collect()
    }

    /// The row's runs whose bytes were not what they should be.
    pub(super) fn errors(&self) -> u64 {
        self.rows
            .iter()
            .flat_map(|row| &row.records)
            .map(|record| record.errors)
            .sum()
    }
}

/// A number as a person reads it: three digits that matter.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A spread as a person reads it: the median, and the ends where there are several runs. `of` is the number of runs: a goal that some
/// of them never reached is said.
pub(super) fn cell(spread: Option<Spread>, of: usize) -> String {
    let Some(Spread {
        least,
        median,
        most,
        runs,
    }) = spread
    else {
        return "—".to_owned();
    };
    let mut text = number(median);
    if runs > 1 {
        let _ = write!(text, " ({}–{})", number(least), number(most));
    }
    if runs < of {
        let _ = write!(text, ", {runs} of {of}");
    }
    text
}

/// What a figure means, and which way is better.
pub(super) fn legend(figure: &Figure) -> String {
    let better = match figure.better {
        Better::Less => " (less is better)",
        Better::More => " (more is better)",
        Better::Neither => "",
    };
    format!("{}{better}", figure.about)
}

/// Rows with their columns below each other.
fn write_aligned(text: &mut String, table: &Table) {
    let mut widths: Vec<usize> = Vec::new();
    for row in table {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in table {
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(text, "{cell:<width$}  ");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
}

/// The tables of all groups, for a terminal.
pub(super) fn text(records: &[Record]) -> String {
    let mut text = String::new();
    for group in Group::all(records) {
        let _ = writeln!(text, "\n{}\n{}", group.title(), group.question());
        write_aligned(&mut text, &group.table());
        for (engine, table) in group.tables() {
            let _ = writeln!(text, "\n{engine}");
            write_aligned(&mut text, &table);
        }
        for why in group.hindrances() {
            let _ = writeln!(text, "{why}");
        }
        if group.errors() > 0 {
            let _ = writeln!(
                text,
                "{} pages were not what they should be",
                group.errors()
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between() {
        let spread = Spread::of(vec![4.0, 1.0, 2.0, 100.0]).unwrap();
        assert_eq!(
            (spread.least, spread.median, spread.most, spread.runs),
            (1.0, 3.0, 100.0, 4)
        );
        assert_eq!(Spread::of(vec![7.0]).unwrap().median, 7.0);
        assert_eq!(Spread::of(Vec::new()), None);
    }

    #[test]
    fn a_goal_that_a_run_missed_is_said() {
        let mut records = vec![record("ksm", 0), record("ksm", 1), record("none", 0)];
        records[0].figures.insert("t95_s".to_owned(), 2.5);
        let text = text(&records);
        assert!(text.contains("2.50, 1 of 2"), "{text}");
        assert!(text.contains('—'), "{text}");
        assert!(!text.contains("for want of"), "{text}");
        records[1].hindrance = Some("stopped for want of mappings".to_owned());
        let text = super::text(&records);
        let why = text.matches("\nksm: stopped for want of mappings\n");
        assert_eq!(why.count(), 1, "{text}");
        records[1].setting.guests += 1;
        assert_eq!(
            Group::all(&records).len(),
            2,
            "another task is another table"
        );
    }
}
