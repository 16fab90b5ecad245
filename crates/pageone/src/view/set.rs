//! `pageone set KEY=VALUE…`: turns knobs of a running daemon, all or none. Alone it lists them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::error::ErrorKind;
use wire::{KNOBS, KnobValues, Reply, Request, Setting};

use super::status;
use crate::output::print;
use crate::{client, knobs, paths};

/// `run=2` copies every merged page: that takes as long as the memory is large.
const PATIENCE: Duration = Duration::from_secs(3600);

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// First give every merged page a private copy, then turn the knobs, then go on as before. merge_across_nodes and max_page_sharing need
    /// this while pages are shared
    #[arg(long, requires = "settings")]
    unmerge: bool,
    #[arg(value_name = "KEY=VALUE", value_parser = knobs::Pair, hide_possible_values = true, help = knobs::pairs())]
    settings: Vec<Setting>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    if let Some(key) = twice(&args.settings) {
        let why = format!("{key} is named twice\n");
        clap::Command::new("pageone set")
            .error(ErrorKind::ArgumentConflict, why)
            .exit();
    }
    let socket = paths::served(args.socket.as_deref())?;
    if args.settings.is_empty() {
        return print(&table(&status::ask(&socket)?.knobs));
    }
    // The knobs alone are of interest: a user who may turn them may see them.
    let before = match client::ask(&socket, &Request::Status, status::PATIENCE)? {
        Reply::Status(status) => Some(status.knobs),
        _ => None,
    };
    let late = turn(&socket, args)?;
    let lines = args.settings.iter().map(|new| change(before, new));
    print(&lines.collect::<String>())?;
    match late {
        None => Ok(()),
        Some(why) => bail!("run is 2, but {why}. A page becomes private when its process answers"),
    }
}

/// A knob that stands more than once.
fn twice(settings: &[Setting]) -> Option<&'static str> {
    let keys: Vec<_> = settings.iter().map(Setting::key).collect();
    let is_again = |&at: &usize| keys[..at].contains(&keys[at]);
    (0..keys.len()).find(is_again).map(|at| keys[at])
}

/// Turns the knobs; gives why not all is yet as they say.
fn turn(socket: &Path, args: &Args) -> Result<Option<String>> {
    let request = match args.unmerge {
        true => Request::SetUnmerged(args.settings.clone()),
        false => Request::Set(args.settings.clone()),
    };
    match client::ask_quietly(socket, &request, PATIENCE)? {
        Reply::Done => Ok(None),
        Reply::Turned(why) => Ok(Some(why)),
        Reply::Refused(why) => bail!("not set: {why}"),
        _ => bail!(client::UNEXPECTED),
    }
}

/// The line that tells of one knob that was turned.
fn change(before: Option<KnobValues>, new: &Setting) -> String {
    let all = before.map_or_else(Vec::new, |values| values.settings());
    let old = all.iter().find(|old| old.key() == new.key());
    match old {
        Some(old) => format!("{}: {old} → {new}\n", new.key()),
        None => format!("{}: {new}\n", new.key()),
    }
}

/// All knobs: their values, their defaults, their meaning.
fn table(values: &KnobValues) -> String {
    let mut text = format!("{:<19} {:<10} {:<10} VALUES\n", "KNOB", "VALUE", "DEFAULT");
    for (knob, value) in KNOBS.iter().zip(values.settings()) {
        let (key, default, form) = (knob.key, knob.default, knob.form);
        let _ = writeln!(text, "{key:<19} {value:<10} {default:<10} {form}");
        for line in crate::human::wrapped(knob.about.trim(), 74) {
            let _ = writeln!(text, "      {line}");
        }
    }
    text.push_str("\nTurn one with `pageone set KEY=VALUE`.\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_each_knob_and_fits() {
        let mut values = KnobValues::default();
        values.turn(Setting::MergePeriodMs(1500));
        let text = table(&values);
        for knob in KNOBS {
            assert!(text.contains(&format!("\n{} ", knob.key)), "{text}");
        }
        assert!(text.contains("1s 500ms   20s        TIME"), "{text}");
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{text}");
    }

    #[test]
    fn a_change_names_both_values() {
        let new = Setting::StoreLimitMib(1024);
        assert_eq!(
            change(Some(KnobValues::default()), &new),
            "store_limit: none → 1GiB\n"
        );
        assert_eq!(change(None, &new), "store_limit: 1GiB\n");
    }
}
