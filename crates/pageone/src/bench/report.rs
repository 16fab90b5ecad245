//! The figures of a comparison, as JSON and as a table.

use std::fmt;
use std::fs;

use serde::{Deserialize, Serialize};
use sys::ksm::Ksm;
use sys::meminfo::MemInfo;

use super::mappings;

/// One run: one engine with one number of threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    /// `pageone` or `ksm`.
    pub engine: String,
    /// Worker threads.
    pub threads: u16,
    /// What a perfect merger without overhead gives back.
    pub ideal_saved_bytes: u64,
    /// By how much the guests' proportional memory shrank.
    pub saved_bytes: i64,
    /// By how much MemAvailable grew: the saving less every overhead.
    pub net_saved_bytes: i64,
    /// From the offer to the moment merging may start.
    pub observe_s: f64,
    /// From then on until half of the ideal saving was there, net; none if it never was.
    pub t50_s: Option<f64>,
    /// The same for 95 % of it.
    pub t95_s: Option<f64>,
    /// CPU time of engine, agents and ksmd from the offer until t95.
    pub cpu_s: Option<f64>,
    /// The same until the saving stopped growing.
    pub cpu_total_s: f64,
    /// Percent of one core used afterwards, nothing being written.
    pub steady_cpu_percent: f64,
    /// Growth of unreclaimable slab, page tables and the engine's own memory.
    pub metadata_bytes: i64,
    /// Bytes the guests compared afterwards with what they should be.
    pub verified_bytes: u64,
    /// Pages that were not.
    pub errors: u64,
    /// What kept the engine from merging more, by its own word.
    pub hindrance: Option<String>,
    /// Whether other processes moved so much memory that the times mean nothing.
    pub disturbed: bool,
}

/// The machine the figures belong to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// `/proc/sys/kernel/osrelease`.
    pub kernel: String,
    /// The processor's name.
    pub cpu: String,
    /// Processors this process may use.
    pub cpus: usize,
    /// MemTotal.
    pub memory_bytes: u64,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: String,
    /// The mappings that a process may have (`vm.max_map_count`), while it was measured.
    pub max_map_count: Option<u64>,
    /// KSM's `smart_scan`, which tuning leaves alone.
    pub ksm_smart_scan: Option<u64>,
    /// KSM's `max_page_sharing`, which tuning leaves alone.
    pub ksm_max_page_sharing: Option<u64>,
}

impl Row {
    /// The row, with its verdict on the machine's quiet.
    #[must_use]
    pub(crate) fn judged(mut self) -> Self {
        self.disturbed = self.is_disturbed();
        self
    }

    /// What the net saving has that the guests' saving and the metadata do not explain: what other
    /// processes took or gave back meanwhile.
    fn unexplained_bytes(&self) -> i64 {
        self.net_saved_bytes - (self.saved_bytes - self.metadata_bytes)
    }

    /// 5 % of the ideal saving is too much.
    fn is_disturbed(&self) -> bool {
        u128::from(self.unexplained_bytes().unsigned_abs()) * 20
            > u128::from(self.ideal_saved_bytes)
    }
}

impl Machine {
    /// This machine. What cannot be read is empty.
    #[must_use]
    pub(super) fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let model = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name"));
        let ksm = Ksm::default();
        let huge = Ksm::at("/sys/kernel/mm/transparent_hugepage").read("enabled");
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpu: model
                .unwrap_or_default()
                .trim_start_matches([' ', '\t', ':'])
                .to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, Into::into),
            memory_bytes: MemInfo::read().unwrap_or_default().total,
            huge_pages: huge.unwrap_or_default(),
            max_map_count: mappings::now(),
            ksm_smart_scan: ksm.number("smart_scan").ok(),
            ksm_max_page_sharing: ksm.number("max_page_sharing").ok(),
        }
    }
}

/// A whole comparison. `options` is what the caller was asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Report<O> {
    /// Where.
    pub machine: Machine,
    /// What was asked for.
    pub options: O,
    /// What came out.
    pub rows: Vec<Row>,
}

const MIB: f64 = 1024.0 * 1024.0;

impl<O> fmt::Display for Report<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine {
            kernel,
            cpu,
            cpus,
            memory_bytes,
            ..
        } = &self.machine;
        writeln!(
            f,
            "Linux {kernel}, {cpus} × {cpu}, {} MiB",
            memory_bytes >> 20
        )?;
        writeln!(
            f,
            "{:<8} {:>7} {:>9} {:>9} {:>9} {:>6} {:>8} {:>7} {:>7} {:>7} {:>8} {:>9} {:>6}",
            "engine",
            "threads",
            "ideal MiB",
            "saved MiB",
            "net MiB",
            "net %",
            "observe",
            "t50 s",
            "t95 s",
            "cpu s",
            "steady %",
            "meta MiB",
            "errors"
        )?;
        self.rows.iter().try_for_each(|row| write_row(f, row))
    }
}

#[expect(clippy::cast_precision_loss, reason = "megabytes for a person")]
fn write_row(f: &mut fmt::Formatter<'_>, row: &Row) -> fmt::Result {
    let ideal = row.ideal_saved_bytes as f64;
    let seconds = |time: Option<f64>| time.map_or("never".to_owned(), |time| format!("{time:.2}"));
    writeln!(
        f,
        "{:<8} {:>7} {:>9.0} {:>9.0} {:>9.0} {:>6.1} {:>8.2} {:>7} {:>7} {:>7} {:>8.2} {:>9.1} {:>6}",
        row.engine,
        row.threads,
        ideal / MIB,
        row.saved_bytes as f64 / MIB,
        row.net_saved_bytes as f64 / MIB,
        100.0 * row.net_saved_bytes as f64 / ideal.max(1.0),
        row.observe_s,
        seconds(row.t50_s),
        seconds(row.t95_s),
        seconds(row.cpu_s),
        row.steady_cpu_percent,
        row.metadata_bytes as f64 / MIB,
        row.errors
    )?;
    if let Some(why) = &row.hindrance {
        writeln!(f, "         {why}")?;
    }
    if row.disturbed {
        let moved = row.unexplained_bytes() as f64 / MIB;
        writeln!(
            f,
            "         disturbed: others gave back {moved:.0} MiB meanwhile; measure again"
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            engine: "ksm".to_owned(),
            threads: 1,
            ideal_saved_bytes: 1000 << 20,
            saved_bytes: 990 << 20,
            net_saved_bytes: 960 << 20,
            observe_s: 0.0,
            t50_s: Some(12.25),
            t95_s: None,
            cpu_s: None,
            cpu_total_s: 25.0,
            steady_cpu_percent: 99.5,
            metadata_bytes: 30 << 20,
            verified_bytes: 0,
            errors: 0,
            hindrance: None,
            disturbed: false,
        }
    }

    #[test]
    fn the_json_has_the_documented_fields() {
        let json = serde_json::to_value(row()).unwrap();
        for field in [
            "engine",
            "threads",
            "ideal_saved_bytes",
            "saved_bytes",
            "net_saved_bytes",
            "observe_s",
            "t50_s",
            "t95_s",
            "cpu_s",
            "steady_cpu_percent",
            "metadata_bytes",
        ] {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert!(json["t95_s"].is_null());
    }

    #[test]
    fn a_row_that_others_disturbed_says_so() {
        assert!(!row().judged().disturbed, "nothing unexplained");
        let other = Row {
            net_saved_bytes: 900 << 20,
            ..row()
        };
        let other = other.judged();
        assert!(other.disturbed);
        assert_eq!(other.unexplained_bytes(), -60 << 20);
        let report = Report {
            machine: Machine::here(),
            options: (),
            rows: vec![other],
        };
        assert!(report.to_string().contains("gave back -60 MiB"), "{report}");
    }

    #[test]
    fn a_row_says_what_kept_the_engine_from_more() {
        let hindrance = Some("stopped for want of mappings".to_owned());
        let row = Row { hindrance, ..row() };
        let report = Report {
            machine: Machine::here(),
            options: (),
            rows: vec![row],
        };
        let text = report.to_string();
        assert!(
            text.ends_with("         stopped for want of mappings\n"),
            "{text}"
        );
    }

    #[test]
    fn the_table_says_never_where_a_goal_was_missed() {
        let report = Report {
            machine: Machine::here(),
            options: (),
            rows: vec![row()],
        };
        let text = report.to_string();
        let line = text.lines().last().unwrap();
        assert!(
            line.contains("12.25") && line.contains("never") && line.contains("96.0"),
            "{line}"
        );
        assert!(report.machine.memory_bytes > 0 && !report.machine.kernel.is_empty());
    }
}
