//! `pageone set KEY=VALUE…`: turns knobs of a running daemon, all or none.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use wire::{Reply, Request, RunMode, Setting};

use crate::{client, human, paths};

/// The knobs, as messages list them.
const KEYS: &str = "run (0 stop, 1 run, 2 unmerge all), merge_period (like 20s), threads, \
                    use_zero_pages, merge_again (true or false), merge_across_nodes (0 or 1), \
                    max_page_sharing (2 to 1000000), cpu_limit (percent of a core, or none), pace (fixed \
                    or auto), thp (keep, split or auto), store_limit (MiB, 16GiB, 25% or none)";
/// `run=2` copies every merged page: that takes as long as the memory is large.
const PATIENCE: Duration = Duration::from_secs(3600);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The daemon's socket
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Give all merged pages private copies first, and go on as before afterwards: what may be
    /// shared with what cannot change while pages are shared
    #[arg(long)]
    unmerge: bool,
    /// Knobs and values: run=0|1|2, merge_period=20s, threads=N, use_zero_pages=true|false,
    /// merge_again=true|false, merge_across_nodes=0|1, max_page_sharing=N, cpu_limit=PERCENT|none,
    /// pace=fixed|auto, thp=keep|split|auto, store_limit=MIB|GiB|%|none
    #[arg(required = true, value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<Setting>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let socket = paths::socket(args.socket.as_deref())?;
    let request = match args.unmerge {
        true => Request::SetUnmerged(args.settings.clone()),
        false => Request::Set(args.settings.clone()),
    };
    match client::ask(&socket, &request, PATIENCE)? {
        Reply::Done => Ok(()),
        Reply::Refused(why) => bail!("not set: {why}"),
        _ => bail!("the daemon replied with something else"),
    }
}

/// One `KEY=VALUE`.
///
/// # Errors
/// What is wrong with it, naming the key.
fn setting(text: &str) -> Result<Setting, String> {
    let Some((key, value)) = text.split_once('=') else {
        return Err(format!("write KEY=VALUE; the keys are {KEYS}"));
    };
    let named = |why: String| format!("{key}: {why}");
    match key {
        "run" => run_mode(value).map(Setting::Run).map_err(named),
        "merge_period" => {
            let time = human::period(value).map_err(named)?;
            let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            Ok(Setting::MergePeriodMs(ms))
        }
        "threads" => human::threads(value).map(Setting::Threads).map_err(named),
        "use_zero_pages" => switch(value).map(Setting::UseZeroPages).map_err(named),
        "max_page_sharing" => human::sharing(value)
            .map(Setting::MaxPageSharing)
            .map_err(named),
        "merge_across_nodes" => switch(value).map(Setting::MergeAcrossNodes).map_err(named),
        "merge_again" => switch(value).map(Setting::MergeAgain).map_err(named),
        "cpu_limit" => human::cpu_limit(value)
            .map(Setting::CpuLimit)
            .map_err(named),
        "pace" => human::pace(value).map(Setting::Pace).map_err(named),
        "store_limit" => human::store_limit(value)
            .map(Setting::StoreLimitMib)
            .map_err(named),
        "thp" => human::thp(value).map(Setting::Thp).map_err(named),
        _ => Err(format!("there is no key `{key}`; the keys are {KEYS}")),
    }
}

fn run_mode(value: &str) -> Result<RunMode, String> {
    match value.parse::<u8>() {
        Ok(number) => RunMode::try_from(number),
        Err(_) => Err(format!(
            "run is 0 (stop), 1 (run) or 2 (unmerge all), not {value}"
        )),
    }
}

fn switch(value: &str) -> Result<bool, String> {
    match value {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(format!("`{value}` is neither true nor false")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_knob_is_understood() {
        assert_eq!(setting("run=2"), Ok(Setting::Run(RunMode::Unmerge)));
        assert_eq!(
            setting("merge_period=1500ms"),
            Ok(Setting::MergePeriodMs(1500))
        );
        assert_eq!(setting("threads=3"), Ok(Setting::Threads(3)));
        assert_eq!(
            setting("use_zero_pages=0"),
            Ok(Setting::UseZeroPages(false))
        );
        assert_eq!(
            setting("max_page_sharing=2"),
            Ok(Setting::MaxPageSharing(2))
        );
        assert_eq!(
            setting("merge_across_nodes=0"),
            Ok(Setting::MergeAcrossNodes(false))
        );
        assert_eq!(setting("merge_again=true"), Ok(Setting::MergeAgain(true)));
        assert_eq!(setting("cpu_limit=30"), Ok(Setting::CpuLimit(30)));
        assert_eq!(setting("cpu_limit=none"), Ok(Setting::CpuLimit(0)));
        for (text, mib) in [("none", 0), ("512", 512), ("3MiB", 3), ("2GiB", 2048)] {
            let limit = setting(&format!("store_limit={text}"));
            assert_eq!(limit, Ok(Setting::StoreLimitMib(mib)));
        }
        assert!(matches!(
            setting("store_limit=25%"),
            Ok(Setting::StoreLimitMib(1..))
        ));
        assert_eq!(setting("pace=auto"), Ok(Setting::Pace(wire::Pace::Auto)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (bad, said) in [
            ("run", "KEY=VALUE"),
            ("runs=1", "merge_period"),
            ("run=3", "run is 0"),
            ("run=yes", "yes"),
            ("merge_period=20", "merge_period"),
            ("threads=0", "threads"),
            ("cpu_limit=0", "cpu_limit"),
            ("pace=slow", "pace"),
            ("store_limit=0", "store_limit"),
            ("store_limit=101%", "no limit"),
            ("store_limit=1TB", "16GiB"),
            ("thp=maybe", "keep, split, auto"),
            ("use_zero_pages=maybe", "maybe"),
            ("merge_across_nodes=2", "merge_across_nodes"),
            ("max_page_sharing=1", "2 to 1000000"),
            ("merge_again=2", "merge_again"),
        ] {
            let error = setting(bad).unwrap_err();
            assert!(error.contains(said), "{bad}: {error}");
        }
    }
}
