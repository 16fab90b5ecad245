//! The daemon's configuration file, TOML. Keys are those of the flags; a flag wins over the file.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use numa::FakeSpec;
use serde::{Deserialize, Deserializer, de::Error as _};
use wire::{Pace, RunMode, Thp};

use crate::human;

/// What the file may say. A key that is not here is an error that names it and its line.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Path of the socket.
    pub socket: Option<PathBuf>,
    /// Worker threads.
    #[serde(default, deserialize_with = "threads")]
    pub threads: Option<u16>,
    /// Time between two looks at what was written, like `"20s"`.
    #[serde(default, deserialize_with = "period")]
    pub merge_period: Option<Duration>,
    /// Whether pages of zeros map the kernel's zero page.
    pub use_zero_pages: Option<bool>,
    /// Whether pages of different NUMA nodes may share: 0 or 1, as KSM has it, or true or false.
    #[serde(default, deserialize_with = "switch")]
    pub merge_across_nodes: Option<bool>,
    /// Pages that may share one copy.
    #[serde(default, deserialize_with = "sharing")]
    pub max_page_sharing: Option<u32>,
    /// Parts of memory to treat as nodes, like `"fake=4"`.
    #[serde(default, deserialize_with = "numa")]
    pub numa: Option<FakeSpec>,
    /// Whether pages are merged again that were written after they were merged.
    pub merge_again: Option<bool>,
    /// 0 stop, 1 run, 2 unmerge all.
    pub run: Option<RunMode>,
    /// The most CPU time to use, in percent of a core, like `25`; 0 (`"none"`) for no limit.
    #[serde(default, deserialize_with = "cpu_limit")]
    pub cpu_limit: Option<u32>,
    /// How the period is chosen: `"fixed"` or `"auto"`.
    pub pace: Option<Pace>,
    /// What is done with chunks that are one huge page: `"keep"`, `"split"` or `"auto"`.
    pub thp: Option<Thp>,
    /// The most canonical pages, like `"25%"`, `"16GiB"` or `4096` (MiB); 0 (`"none"`) for no limit.
    #[serde(default, deserialize_with = "store_limit")]
    pub store_limit: Option<u64>,
    /// What one process and one user may take.
    #[serde(default)]
    pub limits: Limits,
    /// The policy file.
    pub policy: Option<PathBuf>,
    /// What to log, like `"info"` or `"engine=debug"`.
    #[serde(default, deserialize_with = "log")]
    pub log: Option<String>,
}

/// What the table `limits` may say; what it leaves out is as [`engine::Limits::default`] has it.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    connections: Option<NonZeroU32>,
    connections_per_user: Option<NonZeroU32>,
    guests: Option<NonZeroU32>,
    guests_per_user: Option<NonZeroU32>,
    domains: Option<NonZeroU32>,
    domains_per_user: Option<NonZeroU32>,
    kept_descriptors: Option<NonZeroU32>,
    kept_descriptors_per_user: Option<NonZeroU32>,
    regions_per_process: Option<NonZeroU32>,
    chunks_per_process: Option<NonZeroU32>,
    table_mib_per_process: Option<NonZeroU32>,
    table_mib_per_user: Option<NonZeroU32>,
    stuck_threads_per_user: Option<NonZeroU32>,
    stuck_threads: Option<NonZeroU32>,
    descriptors_per_process: Option<NonZeroU32>,
}

impl Limits {
    /// The limits, with the defaults of this machine.
    #[must_use]
    pub fn over_defaults(&self) -> engine::Limits {
        let default = engine::Limits::default();
        let wide = |said: Option<NonZeroU32>, default| said.map_or(default, |n| u64::from(n.get()));
        let narrow = |said: Option<NonZeroU32>, default| said.map_or(default, NonZeroU32::get);
        let places = |said: Option<NonZeroU32>, default| said.map_or(default, |n| n.get() as usize);
        engine::Limits {
            connections: places(self.connections, default.connections),
            connections_per_user: places(self.connections_per_user, default.connections_per_user),
            guests: wide(self.guests, default.guests),
            guests_per_user: wide(self.guests_per_user, default.guests_per_user),
            domains: wide(self.domains, default.domains),
            domains_per_user: wide(self.domains_per_user, default.domains_per_user),
            kept_descriptors: wide(self.kept_descriptors, default.kept_descriptors),
            kept_descriptors_per_user: wide(
                self.kept_descriptors_per_user,
                default.kept_descriptors_per_user,
            ),
            regions_per_process: wide(self.regions_per_process, default.regions_per_process),
            chunks_per_process: wide(self.chunks_per_process, default.chunks_per_process),
            table_mib_per_process: wide(self.table_mib_per_process, default.table_mib_per_process),
            table_mib_per_user: wide(self.table_mib_per_user, default.table_mib_per_user),
            stuck_threads_per_user: narrow(
                self.stuck_threads_per_user,
                default.stuck_threads_per_user,
            ),
            stuck_threads: narrow(self.stuck_threads, default.stuck_threads),
            descriptors_per_process: narrow(
                self.descriptors_per_process,
                default.descriptors_per_process,
            ),
        }
    }
}

impl Config {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// It cannot be read, or says something that is not understood: where and what.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("in the configuration {}", path.display()))
    }

    /// Reads the file's text.
    ///
    /// # Errors
    /// It says something that is not understood: where and what.
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }
}

fn threads<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    let number = i64::deserialize(from)?;
    human::threads(&number.to_string())
        .map(Some)
        .map_err(D::Error::custom)
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a number, or a text like \"none\"")]
enum Limit {
    Number(i64),
    Text(String),
}

impl Limit {
    fn text(self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text,
        }
    }
}

fn cpu_limit<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let text = Limit::deserialize(from)?.text();
    human::cpu_limit(&text).map(Some).map_err(D::Error::custom)
}

fn store_limit<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let text = Limit::deserialize(from)?.text();
    human::store_limit(&text)
        .map(Some)
        .map_err(D::Error::custom)
}

fn sharing<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let number = i64::deserialize(from)?;
    human::sharing(&number.to_string())
        .map(Some)
        .map_err(D::Error::custom)
}

fn period<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(from)?;
    human::period(&text).map(Some).map_err(D::Error::custom)
}

fn switch<'de, D: Deserializer<'de>>(from: D) -> Result<Option<bool>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "neither 0 or 1 nor true or false")]
    enum Switch {
        Word(bool),
        Number(u64),
    }
    match Switch::deserialize(from)? {
        Switch::Word(on) => Ok(Some(on)),
        Switch::Number(number @ 0..=1) => Ok(Some(number == 1)),
        Switch::Number(other) => Err(D::Error::custom(format!("{other} is neither 0 nor 1"))),
    }
}

fn numa<'de, D: Deserializer<'de>>(from: D) -> Result<Option<FakeSpec>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(D::Error::custom)
}

fn log<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    match tracing_subscriber::EnvFilter::try_new(&text) {
        Ok(_) => Ok(Some(text)),
        Err(error) => Err(D::Error::custom(format!(
            "`{text}` is no log filter: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("pageone.toml");
        std::fs::write(&path, text)?;
        Config::read(&path)
    }

    #[test]
    fn all_keys_are_read() {
        let text = "socket = '/x'\nthreads = 4\nmerge_period = '2s'\nuse_zero_pages = false\n\
                    merge_across_nodes = 0\nnuma = 'fake=4'\nmax_page_sharing = 2\n\
                    merge_again = false\nrun = 0\ncpu_limit = 25\npace = 'auto'\npolicy = '/p'\nstore_limit = '2GiB'\nthp = 'keep'\nlog = 'debug'\n[limits]\nguests_per_user = 7\n";
        let expected = Config {
            socket: Some("/x".into()),
            threads: Some(4),
            merge_period: Some(Duration::from_secs(2)),
            use_zero_pages: Some(false),
            merge_across_nodes: Some(false),
            max_page_sharing: Some(2),
            numa: Some("fake=4".parse().unwrap()),
            merge_again: Some(false),
            run: Some(RunMode::Stop),
            cpu_limit: Some(25),
            pace: Some(Pace::Auto),
            thp: Some(Thp::Keep),
            limits: Limits {
                guests_per_user: NonZeroU32::new(7),
                ..Limits::default()
            },
            policy: Some("/p".into()),
            store_limit: Some(2048),
            log: Some("debug".to_owned()),
        };
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(expected.limits.over_defaults().guests_per_user, 7);
        assert_eq!(Limits::default().over_defaults(), engine::Limits::default());
        assert_eq!(parse("").unwrap(), Config::default());
        assert_eq!(parse("cpu_limit = 'none'").unwrap().cpu_limit, Some(0));
    }

    proptest::proptest! {
        #[test]
        fn any_lines_are_read_or_refused(
            lines in proptest::collection::vec(
                "((socket|threads|merge_period|use_zero_pages|run|cpu_limit|pace|policy|log) = (-?[0-9]{1,20}|true|'[ -&(-~]{0,12}')|[ -~]{0,10})",
                0..6,
            ),
        ) {
            if let Ok(config) = Config::parse(&lines.join("\n")) {
                proptest::prop_assert!(config.threads.is_none_or(|n| (1..=1024).contains(&n)));
            }
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, key, line) in [
            ("threads = 2\nthread = 2\n", "thread", "line 2"),
            (
                "\n\nmerge_period = '20 parsecs'\n",
                "merge_period",
                "line 3",
            ),
            ("threads = 0\n", "threads", "line 1"),
            ("run = 7\n", "run", "line 1"),
            ("cpu_limit = 0\n", "cpu_limit", "line 1"),
            ("cpu_limit = true\n", "cpu_limit", "line 1"),
            ("store_limit = 0\n", "store_limit", "line 1"),
            ("pace = 'fast'\n", "pace", "line 1"),
            ("thp = 'never'\n", "thp", "line 1"),
            ("log = 'a=b=c'\n", "log", "line 1"),
            ("use_zero_pages = 'yes'\n", "use_zero_pages", "line 1"),
            ("merge_across_nodes = 2\n", "merge_across_nodes", "line 1"),
            ("\nnuma = 'real'\n", "numa", "line 2"),
            ("max_page_sharing = 1\n", "max_page_sharing", "line 1"),
            ("threads == 2\n", "threads", "line 1"),
            ("[limits]\nguest = 2\n", "guest", "line 2"),
            ("[limits]\nguests = 0\n", "guests", "line 2"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(
                error.contains(key) && error.contains(line),
                "{text}: {error}"
            );
        }
    }
}
