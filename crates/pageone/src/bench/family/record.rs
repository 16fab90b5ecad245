//! A run as a line of JSON, and the file of such lines.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::growth::Growth;
use crate::bench::report::Machine;

/// The file of a folder of results.
const FILE: &str = "runs.jsonl";
/// Samples that a record keeps.
const KEPT: usize = 60;

/// What was asked for: two runs with the same can be compared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Setting {
    /// Guests of a case.
    pub(super) guests: u64,
    /// Memory of each, in MiB.
    pub(super) guest_mib: u64,
    /// PageONE's period, in milliseconds.
    pub(super) merge_period_ms: u64,
    /// The longest time from the offer to a settled saving, in milliseconds.
    pub(super) limit_ms: u64,
    /// How long a phase of work lasts, in milliseconds.
    pub(super) phase_ms: u64,
    /// All content follows from it.
    pub(super) seed: u64,
    /// What `vm.max_map_count` was raised to for all runs; none: it stayed as it was, unless the variant is about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) max_map_count: Option<u64>,
}

/// One look during a run, as numbers that are small in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    /// Seconds since the first offer.
    pub(super) at_s: f64,
    /// MiB that a perfect engine would save now.
    pub(super) ideal_mib: f64,
    /// MiB saved.
    pub(super) saved_mib: f64,
    /// MiB saved, less every overhead.
    pub(super) net_mib: f64,
    /// CPU time of engine and agents since the first offer, in seconds.
    pub(super) cpu_s: f64,
}

/// Rows of cells; the first is the head.
pub(super) type Table = Vec<Vec<String>>;

/// One run of one engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) case: String,
    pub(super) variant: String,
    pub(super) engine: String,
    pub(super) repetition: u32,
    pub(super) setting: Setting,
    /// A word of the user's, say a commit.
    pub(super) note: String,
    /// Seconds since 1970 at the begin.
    pub(super) began: u64,
    pub(super) machine: Machine,
    /// By the names of the table of figures.
    pub(super) figures: BTreeMap<String, f64>,
    /// Percentiles of accesses by kind and phase: pairs of accesses in a million, and nanoseconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) curves: BTreeMap<String, Vec<(u64, u64)>>,
    pub(super) samples: Vec<Sample>,
    /// How costs grow with sizes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) growth: Vec<Growth>,
    /// What a case shows besides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) tables: Vec<Table>,
    /// Bytes compared at the end with what they should be.
    pub(super) verified_bytes: u64,
    /// Pages that were not.
    pub(super) errors: u64,
    /// What kept the engine from merging more, by its own word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) hindrance: Option<String>,
}

impl Record {
    /// Whether `other` is of the same task, the engine and the repetition aside.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        (&self.case, &self.variant, &self.setting) == (&other.case, &other.variant, &other.setting)
    }

    /// When and of what it was made, in words.
    pub(super) fn origin(&self) -> String {
        let began = UNIX_EPOCH + Duration::from_secs(self.began);
        let began = humantime::format_rfc3339_seconds(began);
        match self.note.as_str() {
            "" => format!("made {began}"),
            note => format!("made {began} of {note}"),
        }
    }
}

/// At most 60 of `samples`, evenly in their order, the first and the last among them; rounded.
pub(super) fn thinned(samples: &[Sample]) -> Vec<Sample> {
    let last = samples.len().saturating_sub(1);
    let count = samples.len().min(KEPT);
    let pick = |number| match count {
        0 | 1 => 0,
        _ => number * last / (count - 1),
    };
    (0..count)
        .map(|number| samples[pick(number)].rounded())
        .collect()
}

impl Sample {
    fn rounded(self) -> Self {
        let round = |value: f64| (value * 1000.0).round() / 1000.0;
        Self {
            at_s: round(self.at_s),
            ideal_mib: round(self.ideal_mib),
            saved_mib: round(self.saved_mib),
            net_mib: round(self.net_mib),
            cpu_s: round(self.cpu_s),
        }
    }
}

/// A folder of results: a line for each run that came to its end. One process at a time adds to it: it holds the folder's lock.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    /// The folder at `path`, made if it is missing.
    ///
    /// # Errors
    /// It cannot be made, or another process adds to it.
    pub(super) fn make(path: &Path) -> Result<Self> {
        let open = || {
            fs::create_dir_all(path)?;
            File::open(path)
        };
        let lock = open().with_context(|| format!("cannot make {}", path.display()))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => bail!(
                "another bench keeps its runs in {}: wait for its end, or give another --out",
                path.display()
            ),
            locked => locked.with_context(|| format!("cannot lock {}", path.display()))?,
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// All records of the folder, or of the file, at `path`. A last line that a killed run left unfinished is no record.
    ///
    /// # Errors
    /// There is none, or another line is no record.
    pub(super) fn read(path: &Path) -> Result<Vec<Record>> {
        let file = match path.is_dir() {
            true => path.join(FILE),
            false => path.to_owned(),
        };
        let text = fs::read(&file).with_context(|| format!("no results: {}", file.display()))?;
        let (whole, rest) = parted(&text);
        let whole = std::str::from_utf8(whole).with_context(|| file.display().to_string())?;
        let parse = |(number, line)| {
            let place = || format!("{}, line {}", file.display(), number + 1);
            serde_json::from_str(line).with_context(place)
        };
        let mut records: Vec<_> = whole
            .lines()
            .enumerate()
            .map(parse)
            .collect::<Result<_>>()?;
        records.extend(last(rest));
        Ok(records)
    }

    /// The records that are there so far.
    ///
    /// # Errors
    /// A line is no record.
    pub(super) fn records(&self) -> Result<Vec<Record>> {
        match self.path.join(FILE).exists() {
            true => Self::read(&self.path),
            false => Ok(Vec::new()),
        }
    }

    /// Adds a record, at the place of a line that was left unfinished.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn add(&self, record: &Record) -> Result<()> {
        let path = self.path.join(FILE);
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        let mut write = || {
            let mut file = File::options()
                .read(true)
                .append(true)
                .create(true)
                .open(&path)?;
            let mut old = Vec::new();
            file.read_to_end(&mut old)?;
            let (whole, rest) = parted(&old);
            match last(rest) {
                Some(_) => line.insert(0, b'\n'),
                None => file.set_len(whole.len() as u64)?,
            }
            file.write_all(&line)?;
            file.sync_data()
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}

/// The lines that have an end, and the rest.
fn parted(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().rposition(|&byte| byte == b'\n');
    text.split_at(end.map_or(0, |end| end + 1))
}

/// The record of a last line without an end, if the line is complete, as an editor may leave it.
fn last(rest: &[u8]) -> Option<Record> {
    serde_json::from_slice(rest).ok()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench::family) fn record(engine: &str, repetition: u32) -> Record {
        Record {
            case: "equal".to_owned(),
            variant: String::new(),
            engine: engine.to_owned(),
            repetition,
            setting: Setting {
                guests: 2,
                guest_mib: 16,
                merge_period_ms: 200,
                limit_ms: 4000,
                phase_ms: 500,
                seed: 1,
                max_map_count: None,
            },
            note: "abc".to_owned(),
            began: 1,
            machine: Machine::here(),
            figures: BTreeMap::new(),
            curves: BTreeMap::new(),
            samples: Vec::new(),
            growth: Vec::new(),
            tables: Vec::new(),
            verified_bytes: 0,
            errors: 0,
            hindrance: None,
        }
    }

    #[test]
    fn a_line_that_was_cut_off_is_no_record_and_the_next_takes_its_place() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::make(&place.path().join("new")).unwrap();
        assert_eq!(folder.records().unwrap(), []);
        folder.add(&record("none", 0)).unwrap();
        let file = place.path().join("new").join(FILE);
        let mut text = fs::read_to_string(&file).unwrap();
        text.push_str("{\"case\":\"eq");
        fs::write(&file, &text).unwrap();
        assert_eq!(folder.records().unwrap(), [record("none", 0)]);
        folder.add(&record("ksm", 1)).unwrap();
        assert_eq!(
            folder.records().unwrap(),
            [record("none", 0), record("ksm", 1)]
        );
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.trim_end()).unwrap();
        assert_eq!(folder.records().unwrap().len(), 2);
        folder.add(&record("none", 2)).unwrap();
        assert_eq!(
            folder.records().unwrap(),
            [record("none", 0), record("ksm", 1), record("none", 2)]
        );
        fs::write(&file, "nonsense\n").unwrap();
        let error = format!("{:#}", folder.records().unwrap_err());
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn a_file_that_cannot_be_read_stays_and_a_second_bench_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let folder = Folder::make(place.path()).unwrap();
        let refused = Folder::make(place.path()).unwrap_err().to_string();
        assert!(refused.contains("another bench"), "{refused}");
        // Root may read every file, so the file is none.
        fs::create_dir(place.path().join(FILE)).unwrap();
        assert!(folder.add(&record("none", 0)).is_err());
        drop(folder);
        Folder::make(place.path()).unwrap();
    }

    #[test]
    fn the_origin_names_time_and_note() {
        let mut record = record("none", 0);
        assert_eq!(record.origin(), "made 1970-01-01T00:00:01Z of abc");
        record.note.clear();
        assert_eq!(record.origin(), "made 1970-01-01T00:00:01Z");
    }

    #[test]
    fn samples_are_thinned_with_both_ends() {
        let sample = |at_s: f64| Sample {
            at_s,
            ..Sample::default()
        };
        let all: Vec<_> = (0..1000).map(|at| sample(f64::from(at))).collect();
        let kept = thinned(&all);
        assert_eq!((kept.len(), kept[0].at_s, kept[59].at_s), (60, 0.0, 999.0));
        assert_eq!(thinned(&all[..2]), all[..2]);
        assert_eq!(thinned(&all[..1]), all[..1]);
        assert_eq!(thinned(&[]), []);
    }
}
