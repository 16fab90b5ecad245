//! The knobs: one table.
//!
//! A row of the table below is a knob. From the row come a field of [`KnobValues`], a message ([`Setting`]), and an
//! entry of [`KNOBS`]. From that entry come the daemon's flag, the key of its configuration file, the key of
//! `pageone set`, and their help. Status and saved knobs carry the values and the messages as they are.

use std::path::Path;

use serde::de::{DeserializeOwned, IntoDeserializer, value};
use serde::{Deserialize, Serialize};

/// Whether the engine merges. The numbers are KSM's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum RunMode {
    /// 0: nothing new is merged; what is merged stays merged.
    Stop,
    /// 1: merge.
    #[default]
    Run,
    /// 2: give every merged page a private copy again, and merge nothing.
    Unmerge,
}

impl From<RunMode> for u8 {
    fn from(mode: RunMode) -> Self {
        match mode {
            RunMode::Stop => 0,
            RunMode::Run => 1,
            RunMode::Unmerge => 2,
        }
    }
}

impl TryFrom<u8> for RunMode {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        match number {
            0 => Ok(Self::Stop),
            1 => Ok(Self::Run),
            2 => Ok(Self::Unmerge),
            other => Err(no_mode(other)),
        }
    }
}

fn no_mode(text: impl std::fmt::Display) -> String {
    format!("run is 0 (stop), 1 (run) or 2 (unmerge all), not {text}")
}

/// How the period between two looks is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// It is the merge period.
    #[default]
    Fixed,
    /// It is shorter while the host is short of memory, and longer while memory is ample.
    Auto,
}

/// What is done with chunks that are one huge page: merging any page of one splits it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Thp {
    /// They are left alone.
    Keep,
    /// They are split for any saving, as KSM does.
    #[default]
    Split,
    /// They are split when half of their pages are saved, or memory is short.
    Auto,
}

/// A knob, as flags, configuration, `set` and their help have it.
#[derive(Debug)]
pub struct Knob {
    /// Its name.
    pub key: &'static str,
    /// How its value is written, for a help text.
    pub form: &'static str,
    /// Its default, as it would be written.
    pub default: &'static str,
    /// One sentence on its meaning, without a full stop.
    pub about: &'static str,
    parse: fn(&str) -> Result<Setting, String>,
}

impl Knob {
    /// The knob with this key.
    #[must_use]
    pub fn named(key: &str) -> Option<&'static Self> {
        KNOBS.iter().find(|knob| knob.key == key)
    }

    /// The value that `text` names.
    ///
    /// # Errors
    /// It names none, or one that the knob does not take.
    pub fn parse(&self, text: &str) -> Result<Setting, String> {
        let setting = (self.parse)(text)?;
        setting.check().map_err(|error| error.to_string())?;
        Ok(setting)
    }
}

/// A knob does not take a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{knob} cannot be {value}: it takes {range}")]
pub struct OutOfRange {
    knob: &'static str,
    value: String,
    range: &'static str,
}

/// The table: a field and its type, its message, its key, the form of its values, its default as text and as value,
/// the reader of a text, and the values it takes.
macro_rules! knobs {
    ($(
        $(#[doc = $about:literal])+
        $field:ident: $type:ty, $message:ident, $key:literal = $form:literal, [$text:literal] $default:expr, $parse:expr, $takes:expr;
    )+) => {
        /// The values of all knobs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct KnobValues {
            $($(#[doc = $about])+ pub $field: $type,)+
        }

        impl Default for KnobValues {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl KnobValues {
            /// A message for each knob.
            #[must_use]
            pub fn settings(&self) -> Vec<Setting> {
                let Self { $($field),+ } = *self;
                vec![$(Setting::$message($field)),+]
            }

            /// Turns one knob.
            pub fn turn(&mut self, setting: Setting) {
                match setting {
                    $(Setting::$message(value) => self.$field = value,)+
                }
            }
        }

        /// One knob and its new value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Setting {
            $($(#[doc = $about])+ $message($type),)+
        }

        impl Setting {
            /// The name of its knob.
            #[must_use]
            pub fn key(&self) -> &'static str {
                match self {
                    $(Self::$message(_) => $key,)+
                }
            }

            /// Whether the knob takes this value.
            ///
            /// # Errors
            /// It does not.
            pub fn check(&self) -> Result<(), OutOfRange> {
                match *self {
                    $(Self::$message(value) => check::<$type>($key, value, $takes),)+
                }
            }
        }

        /// All knobs.
        pub static KNOBS: &[Knob] = &[$(Knob {
            key: $key,
            form: $form,
            default: $text,
            about: concat!($($about),+),
            parse: |text| $parse(text).map(Setting::$message),
        }),+];
    };
}

const MOST_THREADS: u16 = 1024;

knobs! {
    /// Whether the engine merges: 0 stop, 1 run, 2 unmerge all
    run: RunMode, Run, "run" = "0|1|2", ["1"] RunMode::Run, mode, None;
    /// The time between two looks at what was written
    merge_period_ms: u64, MergePeriodMs, "merge_period" = "TIME", ["20s"] 20_000, time_ms,
        Some((10, 86_400_000, "10 milliseconds to a day"));
    /// Workers at work at a time, at idle priority
    threads: u16, Threads, "threads" = "N", ["one a CPU"] own_cpus(), number, Some((1, MOST_THREADS, "1 to 1024"));
    /// Whether pages of zeros map the kernel's zero page
    use_zero_pages: bool, UseZeroPages, "use_zero_pages" = "true|false", ["true"] true, switch, None;
    /// Whether pages of different NUMA nodes may share; it cannot turn while pages are shared
    merge_across_nodes: bool, MergeAcrossNodes, "merge_across_nodes" = "true|false", ["true"] true, switch, None;
    /// Pages that may share one copy; it cannot turn while pages are shared
    max_page_sharing: u32, MaxPageSharing, "max_page_sharing" = "N", ["256"] 256, number,
        Some((2, 1_000_000, "2 to 1000000"));
    /// Whether pages are merged again that were written after they were merged
    merge_again: bool, MergeAgain, "merge_again" = "true|false", ["true"] true, switch, None;
    /// The most CPU time to use, in percent of a core
    cpu_limit: u32, CpuLimit, "cpu_limit" = "PERCENT|none", ["none"] 0, percent,
        Some((0, 100 * all_cpus(), "1 to 100 for each CPU, or none"));
    /// How the period is chosen: auto makes it shorter while memory is short, and longer while it is ample
    pace: Pace, Pace, "pace" = "fixed|auto", ["fixed"] Pace::Fixed, word, None;
    /// What is done with chunks that are one huge page: auto splits them for half of their pages, or when memory is short
    thp: Thp, Thp, "thp" = "keep|split|auto", ["split"] Thp::Split, word, None;
    /// The most canonical pages to hold: MiB, 16GiB, or 25% of the memory
    store_limit_mib: u64, StoreLimitMib, "store_limit" = "SIZE|none", ["none"] 0, size_mib, None;
}

/// The least value, the greatest, and both in words; none: the knob takes all.
type Takes<T> = Option<(T, T, &'static str)>;

fn check<T>(knob: &'static str, value: T, takes: Takes<T>) -> Result<(), OutOfRange>
where
    T: Copy + PartialOrd + std::fmt::Debug,
{
    match takes {
        Some((least, most, range)) if !(least..=most).contains(&value) => Err(OutOfRange {
            knob,
            value: format!("{value:?}"),
            range,
        }),
        _ => Ok(()),
    }
}

/// The CPUs that this process may use.
fn own_cpus() -> u16 {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u16::try_from(cpus).unwrap_or(u16::MAX).min(MOST_THREADS)
}

/// The machine's CPUs; where the kernel does not tell, those of this process.
fn all_cpus() -> u32 {
    let present = sys::node::read_list(Path::new("/sys/devices/system/cpu/present"));
    match present {
        Ok(Some(cpus)) => u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        _ => own_cpus().into(),
    }
}

fn mode(text: &str) -> Result<RunMode, String> {
    let number: u8 = text.parse().map_err(|_| no_mode(text))?;
    RunMode::try_from(number)
}

fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let word = IntoDeserializer::<value::Error>::into_deserializer(text);
    T::deserialize(word).map_err(|error| error.to_string())
}

/// KSM writes 0 and 1.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(format!("`{text}` is neither true nor false")),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is no number for it"))
}

fn time_ms(text: &str) -> Result<u64, String> {
    let time = humantime::parse_duration(text)
        .map_err(|error| format!("`{text}` is no time ({error}); write it like 20s or 500ms"))?;
    Ok(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Percent of one core; 0 for none.
fn percent(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    match (text, number.parse()) {
        ("none", _) => Ok(0),
        (_, Ok(percent @ 1..)) => Ok(percent),
        _ => Err(format!(
            "`{text}` is no limit: write percent of a core, like 25, or none"
        )),
    }
}

/// MiB; 0 for none.
fn size_mib(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is no limit: write MiB, like 4096, or 16GiB, 25% or none");
    let number = |digits: &str| digits.parse::<u64>().ok().filter(|&number| number > 0);
    if text == "none" {
        return Ok(0);
    }
    if let Some(percent) = text.strip_suffix('%') {
        let percent = number(percent)
            .filter(|&percent| percent <= 100)
            .ok_or_else(bad)?;
        let memory = sys::meminfo::total_mib().map_err(|error| error.to_string())?;
        return Ok((memory * percent / 100).max(1));
    }
    let (digits, unit) = match text.strip_suffix("GiB") {
        Some(digits) => (digits, 1 << 10),
        None => (text.strip_suffix("MiB").unwrap_or(text), 1),
    };
    number(digits)
        .and_then(|mib| mib.checked_mul(unit))
        .ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Setting, String> {
        let (key, value) = text.split_once('=').unwrap();
        Knob::named(key).unwrap().parse(value)
    }

    #[test]
    fn each_default_is_as_its_text_says() {
        let values = KnobValues::default().settings();
        assert_eq!(values.len(), KNOBS.len());
        for (knob, value) in KNOBS.iter().zip(values) {
            assert_eq!((knob.key, Ok(())), (value.key(), value.check()));
            match knob.default {
                "one a CPU" => {}
                text => assert_eq!(knob.parse(text), Ok(value), "{}", knob.key),
            }
        }
    }

    #[test]
    fn values_are_read_as_people_write_them() {
        for (text, setting) in [
            ("run=2", Setting::Run(RunMode::Unmerge)),
            ("merge_period=1500ms", Setting::MergePeriodMs(1500)),
            ("merge_period=1s 500ms", Setting::MergePeriodMs(1500)),
            ("threads=3", Setting::Threads(3)),
            ("use_zero_pages=0", Setting::UseZeroPages(false)),
            ("max_page_sharing=2", Setting::MaxPageSharing(2)),
            ("merge_across_nodes=0", Setting::MergeAcrossNodes(false)),
            ("merge_again=true", Setting::MergeAgain(true)),
            ("cpu_limit=30", Setting::CpuLimit(30)),
            ("cpu_limit=30%", Setting::CpuLimit(30)),
            ("pace=auto", Setting::Pace(Pace::Auto)),
            ("thp=keep", Setting::Thp(Thp::Keep)),
            ("store_limit=512", Setting::StoreLimitMib(512)),
            ("store_limit=3MiB", Setting::StoreLimitMib(3)),
            ("store_limit=2GiB", Setting::StoreLimitMib(2048)),
        ] {
            assert_eq!(read(text), Ok(setting));
        }
        assert!(matches!(
            read("store_limit=25%"),
            Ok(Setting::StoreLimitMib(1..))
        ));
    }

    #[test]
    fn what_is_wrong_with_a_value_is_said() {
        for (bad, said) in [
            ("run=3", "run is 0"),
            ("run=yes", "yes"),
            ("merge_period=20", "write it like 20s"),
            ("merge_period=1ms", "10 milliseconds"),
            ("merge_period=2days", "a day"),
            ("threads=0", "1 to 1024"),
            ("threads=1025", "1 to 1024"),
            ("threads=70000", "no number"),
            ("cpu_limit=0", "none"),
            ("cpu_limit=-1", "none"),
            ("cpu_limit=%", "none"),
            ("cpu_limit=4000000000", "1 to 100 for each CPU, or none"),
            ("pace=slow", "`fixed` or `auto`"),
            ("store_limit=0", "no limit"),
            ("store_limit=101%", "no limit"),
            ("store_limit=1TB", "16GiB"),
            ("thp=maybe", "`keep`, `split`, `auto`"),
            ("use_zero_pages=maybe", "maybe"),
            ("merge_across_nodes=2", "neither"),
            ("max_page_sharing=1", "2 to 1000000"),
        ] {
            let error = read(bad).unwrap_err();
            assert!(error.contains(said), "{bad}: {error}");
        }
    }
}
