//! The engine's knobs as flags, and as pairs of `set`: both come from [`wire::KNOBS`].

use std::ffi::OsStr;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, ArgMatches, Command, FromArgMatches};
use wire::{KNOBS, Knob, KnobValues, Setting};

/// The knobs that flags name.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnobFlags(Vec<Setting>);

impl KnobFlags {
    /// The values with which an engine starts: these flags win over `values`.
    pub(crate) fn over(&self, mut values: KnobValues) -> KnobValues {
        self.0.iter().for_each(|&setting| values.turn(setting));
        values
    }

    /// A flag that was given.
    pub(crate) fn first(&self) -> Option<String> {
        self.0.first().map(|knob| knob.key().replace('_', "-"))
    }
}

impl clap::Args for KnobFlags {
    fn augment_args(command: Command) -> Command {
        KNOBS.iter().fold(command, |command, knob| {
            let help = format!("{} [default: {}]", knob.about.trim(), knob.default);
            let long = knob.key.replace('_', "-");
            // As the configuration and `set` spell it.
            let alias = (long != knob.key).then_some(knob.key);
            let flag = Arg::new(knob.key)
                .long(long)
                .aliases(alias)
                .value_name(knob.form)
                .value_parser(|text: &str| knob.parse(text))
                .help(help)
                .help_heading("Knobs");
            command.arg(flag)
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KnobFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let named = |knob: &Knob| matches.get_one::<Setting>(knob.key).copied();
        Ok(Self(KNOBS.iter().filter_map(named).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// One `KEY=VALUE`.
///
/// # Errors
/// What is wrong with it, naming the key.
pub(crate) fn pair(text: &str) -> Result<Setting, String> {
    let Some((key, value)) = text.split_once('=') else {
        return Err(format!("write KEY=VALUE; the keys are {}", keys()));
    };
    match Knob::setting(key, value) {
        // Some reasons begin with the key.
        Some(setting) => setting.map_err(|why| match why.starts_with(&format!("{key} ")) {
            true => why,
            false => format!("{key}: {why}"),
        }),
        None => Err(format!(
            "there is no key `{key}`{}; the keys are {}",
            did_you_mean(key),
            keys()
        )),
    }
}

/// What to say of a knob that stands in a table of the daemon's file, where it is no key.
pub(crate) fn above_tables(key: &str) -> &'static str {
    match Knob::named(key) {
        Some(_) => " here (it is a knob, and knobs stand above the first [table])",
        None => "",
    }
}

/// [`pair`], which also tells completions how each pair begins.
#[derive(Clone)]
pub(crate) struct Pair;

impl TypedValueParser for Pair {
    type Value = Setting;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Setting, clap::Error> {
        pair.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let begin = |knob: &Knob| PossibleValue::new(format!("{}=", knob.key));
        Some(Box::new(KNOBS.iter().map(begin)))
    }
}

/// A limit of a verb's own, written as the knob's: in percent of a core, 0 for none.
///
/// # Errors
/// As the knob's.
pub(crate) fn cpu_limit(text: &str) -> Result<u32, String> {
    match Knob::setting("cpu_limit", text) {
        Some(Ok(Setting::CpuLimit(percent))) => Ok(percent),
        Some(Err(why)) => Err(why),
        _ => unreachable!("cpu_limit is a knob"),
    }
}

/// The keys of all knobs.
pub(crate) fn keys() -> String {
    let keys = KNOBS.iter().map(|knob| knob.key);
    keys.collect::<Vec<_>>().join(", ")
}

/// The key that is most like `name`, as a question; nothing where none is like it.
pub(crate) fn did_you_mean(name: &str) -> String {
    let meant = Knob::like(name).map(|knob| format!(" (did you mean `{}`?)", knob.key));
    meant.unwrap_or_default()
}

/// All pairs that [`pair`] takes, for a help text.
pub(crate) fn pairs() -> String {
    let pairs = KNOBS
        .iter()
        .map(|knob| format!("{}={}", knob.key, knob.form));
    format!("Knobs and values: {}", pairs.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args;
    use wire::RunMode;

    #[test]
    fn each_knob_has_a_flag_and_a_pair() {
        for knob in KNOBS {
            let value = if knob.form == "N" { "7" } else { knob.default };
            let setting = knob.parse(value).unwrap();
            let flag = format!("--{}", knob.key.replace('_', "-"));
            for spelled in [flag.clone(), format!("--{}", knob.key)] {
                let command = KnobFlags::augment_args(Command::new("x"));
                let matches = command.get_matches_from(["x", &spelled, value]);
                let flags = KnobFlags::from_arg_matches(&matches).unwrap();
                assert_eq!(flags.0, [setting]);
            }
            for spelled in [knob.key, flag.trim_start_matches('-')] {
                assert_eq!(pair(&format!("{spelled}={value}")), Ok(setting));
            }
        }
    }

    #[test]
    fn what_the_status_prints_can_be_set() {
        let mut other = KnobValues::default();
        for text in [
            "run=2",
            "merge_period=1s",
            "cpu_limit=7",
            "pace=auto",
            "store_limit=3M",
        ] {
            other.turn(pair(text).unwrap());
        }
        for knobs in [KnobValues::default(), other] {
            let status = wire::Status {
                knobs,
                ..wire::Status::default()
            };
            let status = serde_json::to_value(status).unwrap();
            for (knob, setting) in KNOBS.iter().zip(knobs.settings()) {
                let value = &status[knob.field];
                let value = value.as_str().map_or(value.to_string(), str::to_owned);
                let text = format!("{}={value}", knob.field);
                assert_eq!(pair(&text), Ok(setting), "{text}");
            }
        }
    }

    #[test]
    fn a_verbs_limit_is_written_as_the_knobs() {
        let read = ["none", "0", "25%", "25"].map(cpu_limit);
        assert_eq!(read, [Ok(0), Ok(0), Ok(25), Ok(25)]);
        for bad in ["fast", "-1", "25 %%", "4294967295"] {
            let error = cpu_limit(bad).unwrap_err();
            assert!(error.contains("none"), "{bad}: {error}");
        }
    }

    #[test]
    fn flags_win_over_values() {
        let flags = KnobFlags(vec![Setting::Threads(3)]);
        let values = KnobValues {
            threads: 9,
            run: RunMode::Stop,
            ..KnobValues::default()
        };
        assert_eq!(
            flags.over(values),
            KnobValues {
                threads: 3,
                ..values
            }
        );
    }

    #[test]
    fn a_wrong_pair_is_named_with_its_key() {
        for (bad, said) in [
            ("run", "KEY=VALUE"),
            ("xyzzy=1", "the keys are run, merge_period"),
            ("merge-priod=1s", "did you mean `merge_period`?"),
            ("threads=0", "threads cannot be 0"),
            ("merge_period=20", "merge_period: "),
            ("merge_period=1ns", "`1ns` is less than 1ms; it takes 10"),
        ] {
            let error = pair(bad).unwrap_err();
            assert!(error.contains(said), "{bad}: {error}");
            assert!(!error.contains("threads: threads"), "{error}");
        }
    }
}
