//! The knobs: one table.
//!
//! A row of the table below is a knob. From the row come a field of [`KnobValues`], a message ([`Setting`]), and an
//! entry of [`KNOBS`]. From that entry come the daemon's flag, the key of its configuration file, the key of
//! `pageone set`, and their help. Status and saved knobs carry the values and the messages as they are.

mod text;

use std::path::Path;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use text::{
    bare, limit_text, mib_text, mode, number, on_text, percent, size_mib, switch, time_ms,
    time_text, word, word_text,
};

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
    /// Its name in JSON, with the unit of its numbers.
    pub field: &'static str,
    /// How its value is written, for a help text.
    pub form: &'static str,
    /// Its default, as it would be written.
    pub default: &'static str,
    /// One sentence on its meaning, without a full stop.
    pub about: &'static str,
    parse: fn(&str) -> Result<Setting, String>,
    parse_json: fn(&str) -> Option<Setting>,
}

/// How alike two names have to be for one to be meant by the other.
const ALIKE: f64 = 0.7;

impl Knob {
    /// The knob with this key, also if it is written as a flag is: `merge-period`.
    #[must_use]
    pub fn named(key: &str) -> Option<&'static Self> {
        let key = key.replace('-', "_");
        KNOBS.iter().find(|knob| knob.key == key)
    }

    /// The setting that a name and a value mean: as people write them, or as the status has them in JSON (`merge_period_ms` and
    /// `5000`). None where there is no such knob.
    ///
    /// # Errors
    /// As [`Self::parse`].
    #[must_use]
    pub fn setting(name: &str, text: &str) -> Option<Result<Setting, String>> {
        if let Some(knob) = Self::named(name) {
            return Some(knob.parse(text));
        }
        let field = name.replace('-', "_");
        let knob = KNOBS.iter().find(|knob| knob.field == field)?;
        let setting = (knob.parse_json)(text);
        let setting = setting
            .ok_or_else(|| format!("`{text}` is no number; with a unit it is {}", knob.key))
            .and_then(Setting::checked);
        Some(setting)
    }

    /// The knob whose key is most like this name, if any is.
    #[must_use]
    pub fn like(name: &str) -> Option<&'static Self> {
        let name = name.replace('-', "_");
        let rated = KNOBS
            .iter()
            .map(|knob| (strsim::jaro(&name, knob.key), knob));
        let best = rated.max_by(|(one, _), (other, _)| one.total_cmp(other));
        best.filter(|(alike, _)| *alike > ALIKE)
            .map(|(_, knob)| knob)
    }

    /// The value that `text` names.
    ///
    /// # Errors
    /// It names none, or one that the knob does not take.
    pub fn parse(&self, text: &str) -> Result<Setting, String> {
        (self.parse)(text).and_then(Setting::checked)
    }
}

impl Setting {
    /// It, if its knob takes the value.
    fn checked(self) -> Result<Self, String> {
        self.check().map_err(|error| error.to_string())?;
        Ok(self)
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
/// the reader of a text, the writer, and the values it takes.
macro_rules! knobs {
    ($(
        $(#[doc = $about:literal])+
        $field:ident: $type:ty, $message:ident, $key:literal = $form:literal, [$text:literal] $default:expr, $parse:expr, $show:expr, $takes:expr;
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
                    $(Self::$message(value) => check::<$type>($key, value, $takes, $show),)+
                }
            }
        }

        /// The value as it would be written.
        impl std::fmt::Display for Setting {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$message(value) => f.pad(&$show(value)),)+
                }
            }
        }

        /// All knobs.
        pub static KNOBS: &[Knob] = &[$(Knob {
            key: $key,
            field: stringify!($field),
            form: $form,
            default: $text,
            about: concat!($($about),+),
            parse: |text| $parse(text).map(Setting::$message).map_err(|error| with_range::<$type>(error, $takes)),
            parse_json: |text| serde_json::from_str(text).map(Setting::$message).ok(),
        }),+];
    };
}

const MOST_THREADS: u16 = 1024;

knobs! {
    /// Whether the engine merges: 0 stop, 1 run, 2 unmerge all
    run: RunMode, Run, "run" = "0|1|2", ["1"] RunMode::Run, mode, |mode: &RunMode| u8::from(*mode).to_string(), None;
    /// The time between two looks at what was written
    merge_period_ms: u64, MergePeriodMs, "merge_period" = "TIME", ["20s"] 20_000, time_ms, time_text,
        Some((10, 86_400_000, "10 milliseconds to a day"));
    /// Workers at work at a time, at idle priority
    threads: u16, Threads, "threads" = "N", ["one a CPU"] own_cpus(), number, bare,
        Some((1, MOST_THREADS, "1 to 1024"));
    /// Whether pages of zeros map the kernel's zero page
    use_zero_pages: bool, UseZeroPages, "use_zero_pages" = "true|false", ["true"] true, switch, bare, None;
    /// Whether pages of different NUMA nodes may share; it cannot turn while pages are shared
    merge_across_nodes: bool, MergeAcrossNodes, "merge_across_nodes" = "true|false", ["true"] true, switch, bare, None;
    /// Whether the engine's big tables are spread over the nodes that use them, or are where the kernel puts them
    hashdist: bool, Hashdist, "hashdist" = "on|off", ["on"] true, switch, on_text, None;
    /// Pages that may share one copy; it cannot turn while pages are shared
    max_page_sharing: u32, MaxPageSharing, "max_page_sharing" = "N", ["256"] 256, number, bare,
        Some((2, 1_000_000, "2 to 1000000"));
    /// Whether pages are merged again that were written after they were merged
    merge_again: bool, MergeAgain, "merge_again" = "true|false", ["true"] true, switch, bare, None;
    /// The most CPU time to use, in percent of a core
    cpu_limit: u32, CpuLimit, "cpu_limit" = "PERCENT|none", ["none"] 0, percent, limit_text,
        Some((0, 100 * all_cpus(), "1 to 100 for each CPU, or none"));
    /// How the period is chosen: auto makes it shorter while memory is short, and longer while it is ample
    pace: Pace, Pace, "pace" = "fixed|auto", ["fixed"] Pace::Fixed, word, word_text, None;
    /// What is done with chunks that are one huge page: auto splits them for half of their pages, or when memory is short
    thp: Thp, Thp, "thp" = "keep|split|auto", ["split"] Thp::Split, word, word_text, None;
    /// The most canonical pages to hold: MiB, 16G, or 25% of the memory
    store_limit_mib: u64, StoreLimitMib, "store_limit" = "SIZE|none", ["none"] 0, size_mib, mib_text,
        Some((0, u64::MAX >> 20, "less than 16 EiB"));
}

/// The least value, the greatest, and both in words; none: the knob takes all.
type Takes<T> = Option<(T, T, &'static str)>;

fn check<T>(
    knob: &'static str,
    value: T,
    takes: Takes<T>,
    show: impl Fn(&T) -> String,
) -> Result<(), OutOfRange>
where
    T: Copy + PartialOrd,
{
    match takes {
        Some((least, most, range)) if !(least..=most).contains(&value) => Err(OutOfRange {
            knob,
            value: show(&value),
            range,
        }),
        _ => Ok(()),
    }
}

/// What is wrong with a text, and which values there are.
fn with_range<T>(error: String, takes: Takes<T>) -> String {
    match takes {
        Some((_, _, range)) => format!("{error}; it takes {range}"),
        None => error,
    }
}

/// The CPUs that this process might use when this was asked first. The answer takes files that every user may read and lock
/// (`/proc/PID/cgroup`, `cpu.max`), so that to close them may take long: they are read once.
fn own_cpus() -> u16 {
    static CPUS: OnceLock<u16> = OnceLock::new();
    *CPUS.get_or_init(|| {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        u16::try_from(cpus).unwrap_or(u16::MAX).min(MOST_THREADS)
    })
}

/// The machine's CPUs; where the kernel does not tell, those of this process.
fn all_cpus() -> u32 {
    let present = sys::node::read_list(Path::new("/sys/devices/system/cpu/present"));
    match present {
        Ok(Some(cpus)) => u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        _ => own_cpus().into(),
    }
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
    fn a_value_that_is_shown_can_be_written() {
        let mut values = KnobValues::default();
        for text in [
            "run=2",
            "merge_period=1s 500ms",
            "cpu_limit=30",
            "pace=auto",
            "store_limit=2T",
        ] {
            values.turn(read(text).unwrap());
        }
        for values in [values, KnobValues::default()] {
            for setting in values.settings() {
                assert_eq!(read(&format!("{}={setting}", setting.key())), Ok(setting));
            }
        }
        let shown = values
            .settings()
            .iter()
            .map(Setting::to_string)
            .collect::<Vec<_>>();
        assert!(
            shown.starts_with(&["2".to_owned(), "1s 500ms".to_owned()]),
            "{shown:?}"
        );
        assert!(
            shown.ends_with(&["auto".to_owned(), "split".to_owned(), "2TiB".to_owned()]),
            "{shown:?}"
        );
    }

    #[test]
    fn a_name_that_is_nearly_one_is_recognized() {
        let like = |name| Knob::like(name).map(|knob| knob.key);
        assert_eq!(like("merge-periods"), Some("merge_period"));
        assert_eq!(like("cpulimit"), Some("cpu_limit"));
        assert_eq!(like("xyzzy"), None);
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
            ("hashdist=off", Setting::Hashdist(false)),
            ("hashdist=1", Setting::Hashdist(true)),
            ("merge_again=true", Setting::MergeAgain(true)),
            ("cpu_limit=0", Setting::CpuLimit(0)),
            ("cpu_limit=30", Setting::CpuLimit(30)),
            ("cpu_limit=30%", Setting::CpuLimit(30)),
            ("pace=auto", Setting::Pace(Pace::Auto)),
            ("thp=keep", Setting::Thp(Thp::Keep)),
            ("store_limit=0", Setting::StoreLimitMib(0)),
            ("store_limit=512", Setting::StoreLimitMib(512)),
            ("store_limit=3MiB", Setting::StoreLimitMib(3)),
            ("store_limit=2GiB", Setting::StoreLimitMib(2048)),
            ("store_limit=2T", Setting::StoreLimitMib(2 << 20)),
            ("store-limit=1.5gb", Setting::StoreLimitMib(1536)),
            ("merge-period=20s", Setting::MergePeriodMs(20_000)),
        ] {
            assert_eq!(read(text), Ok(setting));
        }
        assert!(matches!(
            read("store_limit=25%"),
            Ok(Setting::StoreLimitMib(1..))
        ));
    }

    #[test]
    fn fields_of_the_status_are_read_with_bare_numbers() {
        let read = |name, text| Knob::setting(name, text).unwrap();
        for (name, text, setting) in [
            ("merge_period_ms", "5000", Setting::MergePeriodMs(5000)),
            ("merge-period-ms", "5000", Setting::MergePeriodMs(5000)),
            ("merge_period", "5s", Setting::MergePeriodMs(5000)),
            ("store_limit_mib", "0", Setting::StoreLimitMib(0)),
            ("store_limit_mib", "64", Setting::StoreLimitMib(64)),
        ] {
            assert_eq!(read(name, text), Ok(setting), "{name}={text}");
        }
        for (name, text, said) in [
            ("merge_period_ms", "5s", "with a unit it is merge_period"),
            ("merge_period_ms", "1", "10 milliseconds"),
            ("store_limit_mib", "none", "with a unit it is store_limit"),
        ] {
            let error = read(name, text).unwrap_err();
            assert!(error.contains(said), "{name}={text}: {error}");
        }
        assert!(Knob::setting("merge_period_s", "5").is_none());
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
            ("threads=70000", "it takes 1 to 1024"),
            ("cpu_limit=-1", "none"),
            ("cpu_limit=%", "none"),
            ("cpu_limit=4000000000", "1 to 100 for each CPU, or none"),
            ("pace=slow", "`fixed` or `auto`"),
            ("store_limit=0%", "no limit"),
            ("store_limit=101%", "no limit"),
            ("store_limit=1kb", "less than 1 MiB is not possible"),
            ("store_limit=0.9M", "less than 1 MiB is not possible"),
            ("store_limit=1XB", "16G"),
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
