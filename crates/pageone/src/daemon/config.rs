//! The daemon's configuration file, TOML. Keys are those of the flags; a flag wins over the file.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};
use numa::FakeSpec;
use numa::placement::NodeRequest;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use wire::{Knob, KnobValues};

use super::attacher::{self, AttachRule, Text};
use crate::knobs::{above_tables, did_you_mean, keys};

/// What the file may say. A key that is not here is an error that names it and its line.
#[derive(Debug, Default, PartialEq)]
pub struct Config {
    /// Path of the socket.
    pub socket: Option<PathBuf>,
    /// The knobs, with the defaults of those that it leaves out.
    pub knobs: KnobValues,
    /// Parts of memory to treat as nodes, like `"fake=4"`.
    pub numa: Option<FakeSpec>,
    /// The node for the daemon itself: a number, or `"auto"`.
    pub node: Option<NodeRequest>,
    /// What one process and one user may take.
    pub limits: Limits,
    /// The policy file.
    pub policy: Option<PathBuf>,
    /// What to log, like `"info"` or `"engine=debug"`.
    pub log: Option<String>,
    /// The running processes that become guests.
    pub(crate) attach: Vec<AttachRule>,
}

/// Makes the table `limits` of the names of [`engine::Limits`].
macro_rules! limits {
    ($($name:ident)*) => {
        /// What the table `limits` may say; what it leaves out is as [`engine::Limits::default`] has it.
        #[derive(Debug, Default, PartialEq)]
        pub struct Limits {
            $($name: Option<Count>,)*
        }

        impl<'de> Visitor<'de> for LimitKeys {
            type Value = Limits;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a table: [limits], and its keys below")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Limits, A::Error> {
                let mut limits = Limits::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        $(stringify!($name) => limits.$name = Some(map.next_value()?),)*
                        _ => map.next_value_seed(Unknown(no_limit(&key, &[$(stringify!($name)),*])))?,
                    }
                }
                Ok(limits)
            }
        }

        impl Limits {
            /// The limits, with the defaults of this machine.
            #[must_use]
            pub fn over_defaults(&self) -> engine::Limits {
                let default = engine::Limits::default();
                engine::Limits {
                    $($name: self.$name.map_or(default.$name, |n| n.0.get() as _),)*
                }
            }
        }
    };
}

/// Reads the keys of the table `limits`.
struct LimitKeys;

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(LimitKeys)
    }
}

limits! {
    connections connections_per_user
    guests guests_per_user
    domains domains_per_user
    kept_descriptors kept_descriptors_per_user
    unclosed_descriptors unclosed_descriptors_per_user
    unclosed_texts unclosed_texts_per_user
    regions_per_process chunks_per_process
    table_mib_per_process table_mib_per_user
    stuck_threads_per_user stuck_threads
    descriptors_per_process
}

/// A limit.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(from = "Written")]
struct Count(NonZeroU32);

#[derive(Deserialize)]
#[serde(untagged, expecting = "it takes a whole number from 1 to 4294967295")]
enum Written {
    Number(NonZeroU32),
}

impl From<Written> for Count {
    fn from(Written::Number(number): Written) -> Self {
        Self(number)
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

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Keys)
    }
}

/// Reads the keys of the file. Errors arise where a value is read, so that they have its line.
struct Keys;

impl<'de> Visitor<'de> for Keys {
    type Value = Config;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("keys and values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Config, A::Error> {
        let mut config = Config::default();
        while let Some(key) = map.next_key::<String>()? {
            match (key.as_str(), Knob::named(&key)) {
                ("socket", _) => config.socket = Some(map.next_value()?),
                ("policy", _) => config.policy = Some(map.next_value()?),
                ("attach", _) => config.attach = map.next_value_seed(attacher::Rules)?,
                ("limits", _) => config.limits = map.next_value()?,
                ("numa", _) => config.numa = Some(map.next_value_seed(Text(FakeSpec::from_str))?),
                ("node", _) => {
                    config.node = Some(map.next_value_seed(Text(NodeRequest::from_str))?);
                }
                ("log", _) => config.log = Some(map.next_value_seed(Text(log))?),
                (_, Some(knob)) => {
                    let setting = map.next_value_seed(Text(|text: &str| knob.parse(text)))?;
                    config.knobs.turn(setting);
                }
                (_, None) => map.next_value_seed(Unknown(unknown(&key)))?,
            }
        }
        Ok(config)
    }
}

/// The value of a key that is none, of whatever kind it is, with what to say.
struct Unknown(String);

impl<'de> DeserializeSeed<'de> for Unknown {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, _: D) -> Result<(), D::Error> {
        Err(D::Error::custom(self.0))
    }
}

fn no_limit(key: &str, limits: &[&str]) -> String {
    let of_file = above_tables(key);
    format!(
        "there is no key `{key}`{of_file}: the keys are {}",
        limits.join(", ")
    )
}

fn unknown(key: &str) -> String {
    format!(
        "there is no key `{key}`{}; the keys are socket, policy, numa, node, log, limits, attach and the knobs {}",
        did_you_mean(key),
        keys()
    )
}

fn log(text: &str) -> Result<String, String> {
    log_filter(text).map(|_| text.to_owned())
}

/// What to log.
///
/// # Errors
/// It is no filter, or has a word alone that is no level. The library takes that for a part of the program, and all else would be silent.
pub(crate) fn log_filter(text: &str) -> Result<EnvFilter, String> {
    let is_level = |word: &&str| LevelFilter::from_str(word).is_ok();
    let mut alone = text.split(',').map(str::trim);
    let odd = alone.find(|word| !word.contains(['=', '[']) && !is_level(word));
    match (odd, EnvFilter::try_new(text)) {
        (None, Ok(filter)) => Ok(filter),
        (Some(word), _) => Err(format!(
            "`{text}` is no log filter: `{word}` is no level; levels are error, warn, info, debug, trace and off, \
             of a part engine=debug"
        )),
        (None, Err(error)) => Err(format!("`{text}` is no log filter: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::{Pace, RunMode, Thp};

    fn parse(text: &str) -> Result<Config> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("pageone.toml");
        std::fs::write(&path, text)?;
        Config::read(&path)
    }

    #[test]
    fn all_keys_are_read() {
        let text = "socket = '/x'\nthreads = 4\nmerge_period = '2s'\nuse_zero_pages = false\n\
                    merge_across_nodes = 0\nhashdist = 'off'\nnuma = 'fake=4'\nnode = 1\nmax_page_sharing = 2\n\
                    merge_again = false\nrun = 0\ncpu_limit = 25\npace = 'auto'\npolicy = '/p'\nstore_limit = '2GiB'\nthp = 'keep'\nlog = 'debug'\n[limits]\nguests_per_user = 7\n";
        let expected = Config {
            socket: Some("/x".into()),
            knobs: KnobValues {
                run: RunMode::Stop,
                merge_period_ms: 2000,
                threads: 4,
                use_zero_pages: false,
                merge_across_nodes: false,
                hashdist: false,
                max_page_sharing: 2,
                merge_again: false,
                cpu_limit: 25,
                pace: Pace::Auto,
                thp: Thp::Keep,
                store_limit_mib: 2048,
            },
            numa: Some("fake=4".parse().unwrap()),
            node: Some("1".parse().unwrap()),
            limits: Limits {
                guests_per_user: NonZeroU32::new(7).map(Count),
                ..Limits::default()
            },
            policy: Some("/p".into()),
            log: Some("debug".to_owned()),
            attach: Vec::new(),
        };
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(expected.limits.over_defaults().guests_per_user, 7);
        assert_eq!(Limits::default().over_defaults(), engine::Limits::default());
        assert_eq!(parse("").unwrap(), Config::default());
        assert_eq!(parse("cpu_limit = 'none'").unwrap().knobs.cpu_limit, 0);
    }

    #[test]
    fn rules_of_attach_are_read() {
        let text = "[[attach]]\ncommand = ['redis-*', 'valkey']\nuid = '100-199'\nany = true\n\
                    [[attach]]\nunit = 'machine.slice'\ndomain = 'vms'\nafter = '1m'\n";
        let config = parse(text).unwrap();
        assert_eq!(config.attach.len(), 2);
        assert_eq!(config.attach, parse(text).unwrap().attach);
        assert_ne!(config.attach[0], config.attach[1]);
        let huge = text.replace("any = true", "any = true\nany_huge = true");
        assert_ne!(config.attach, parse(&huge).unwrap().attach);
        let need = text.replace("after", "need = '2G'\nafter");
        assert_ne!(config.attach, parse(&need).unwrap().attach);
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
                proptest::prop_assert!(config.knobs.settings().iter().all(|knob| knob.check().is_ok()));
            }
        }
    }

    #[test]
    fn a_knob_below_a_table_is_told_where_knobs_stand() {
        let above = "here (it is a knob, and knobs stand above the first [table]): the keys are ";
        for (text, said) in [
            ("[[attach]]\nuid = 1\ncpu_limit = 5\n", "`cpu_limit` "),
            (
                "[limits]\nguests = 2\nmerge_period = '5s'\n",
                "`merge_period` ",
            ),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(&format!("{said}{above}")), "{text}: {error}");
            assert!(error.contains("line 3"), "{text}: {error}");
            assert!(parse("cpu_limit = 5\n[limits]\nguests = 2\n").is_ok());
            let other = text.replace("cpu_limit", "x").replace("merge_period", "x");
            let error = format!("{:#}", parse(&other).unwrap_err());
            assert!(error.contains("no key `x`: the keys are "), "{error}");
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
            ("cpu_limit = -1\n", "cpu_limit", "line 1"),
            ("cpu_limit = true\n", "cpu_limit", "line 1"),
            ("store_limit = '1kb'\n", "less than 1 MiB", "line 1"),
            ("pace = 'fast'\n", "pace", "line 1"),
            ("thp = 'never'\n", "thp", "line 1"),
            ("log = 'a=b=c'\n", "log", "line 1"),
            ("log = 'warning'\n", "`warning` is no level", "line 1"),
            ("log = 'info,engine'\n", "`engine` is no level", "line 1"),
            ("use_zero_pages = 'yes'\n", "use_zero_pages", "line 1"),
            ("merge_across_nodes = 2\n", "merge_across_nodes", "line 1"),
            ("\nnuma = 'real'\n", "numa", "line 2"),
            ("node = 'best'\n", "node", "line 1"),
            ("max_page_sharing = 1\n", "max_page_sharing", "line 1"),
            ("threads == 2\n", "threads", "line 1"),
            ("[limits]\nguest = 2\n", "guest", "line 2"),
            (
                "[limits]\nguests = 'many'\n",
                "whole number from 1",
                "line 2",
            ),
            ("limits = 3\n", "a table: [limits]", "line 1"),
            ("\n[limit]\nguests = 2\n", "no key `limit`", "line 2"),
            ("threads = 2.5\n", "a whole number", "line 1"),
            ("threads = -1\n", "1 to 1024", "line 1"),
            (
                "[[attach]]\ncommand = 'a-name-of-20-letters'\n",
                "15 bytes",
                "line 2",
            ),
            ("[limits]\nguests = 0\n", "guests", "line 2"),
            ("threads = 1\n[[attach]]\n", "no process", "line 2"),
            ("[[attach]]\nany = true\n", "no process", "line 1"),
            ("[[attach]]\nname = 'x'\n", "`name`", "line 2"),
            (
                "[[attach]]\nname = 'x'\n",
                "domain, any, any_huge, mount, need and after",
                "line 2",
            ),
            ("[[attach]]\ncommand = []\n", "`command` is empty", "line 2"),
            ("[[attach]]\ncgroup = 'x'\n", "begin with `/`", "line 2"),
            ("[[attach]]\nuid = 'x-y'\n", "`x-y`", "line 2"),
            (
                "[[attach]]\nuid = 1\nafter = '3 parsecs'\n",
                "parsecs",
                "line 3",
            ),
            (
                "[[attach]]\nuid = 1\nafter = 5\n",
                "write it like 20s or 500ms",
                "line 3",
            ),
            (
                "[[attach]]\nuid = 1\nneed = 'much'\n",
                "`need = \"much\"`",
                "line 3",
            ),
            ("[[attach]]\nuid = 1\ndomain = ''\n", "no domain", "line 3"),
            (
                "[[attach]]\nuid = 1\nany_huge = true\n",
                "any_huge takes",
                "line 1",
            ),
            (
                "[[attach]]\nuid = 1\n[[attach]]\nany = true\nuid = [1]\n",
                "rule 1 decides all that it would",
                "line 3",
            ),
            ("[attach]\nuid = 1\n", "attach", "line 1"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(
                error.contains(key) && error.contains(line),
                "{text}: {error}"
            );
            let of_keys = error.contains("need and after");
            assert_eq!(of_keys, text.contains("name = "), "{text}: {error}");
        }
    }
}
