//! The `pageone` command, as a library: so its tests and the fuzz targets reach the parsers and the bench's guests.
//!
//! A folder a verb, each using only those below it:
//!
//! ```text
//! guest                       the processes that demo and bench start
//! demo                        live guests of this machine's files
//! dist                        the files of a package that come from the command line's table
//! bench                       PageONE and KSM on the same guests, and other measurements
//! ksm      status watch tune  KSM's state, and a goal for it; the guard of its knobs
//! doctor                      the obstacles to merging
//! view     status set numa    questions to a daemon, and tables
//! merge                       has a daemon merge the memory of processes now
//! serve    http metrics source    counters for a monitoring and a browser
//! run      tally              a command as a guest
//! analyze  targets look sums  the saving that merging would bring
//! daemon   server lane config …   the engine of a machine and its socket
//! attach   image board target   an agent for a process that runs
//! selector policy             which processes are meant, and which domains they may have
//! launch   program            a command that becomes a guest, and whether it can
//! client   node human paths   a question to a daemon, where a process goes, words for people, where things are
//! knobs    watchdog tidy      the knobs as flags; the process that puts a machine's settings back; the end by a signal
//! output   head journal       what is printed, how its JSON begins, what the journal shows
//! names    plot               what people know processes by; curves as SVG
//! ```
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage. `run` passes on its command's code, and has 125 for wrong usage and any other
//! failure of its own, 126 for a command that is not executable, 127 for one that is not found.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)] // they may panic: see `output`

mod analyze;
#[cfg(target_arch = "x86_64")]
mod attach;
pub mod bench;
mod client;
mod daemon;
mod demo;
mod dist;
mod doctor;
mod flock;
mod guest;
mod head;
mod human;
mod journal;
mod knobs;
mod ksm;
mod launch;
mod merge;
mod names;
mod node;
mod output;
mod paths;
mod plot;
pub mod policy;
mod program;
mod run;
mod selector;
mod serve;
mod tidy;
mod view;
mod watchdog;
mod within;

use std::ffi::OsString;
use std::panic::resume_unwind;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use rustix::process::{Resource, getrlimit};

use output::say;

pub use daemon::config;

/// Memory page deduplication for Linux hosts, in user space.
#[derive(Parser)]
#[command(name = "pageone", version = version(), arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Serves the guests of this machine until SIGTERM
    Daemon(daemon::Args),
    /// Runs a command as a guest: what it offers for merging is merged
    Run(run::Args),
    /// Makes running processes guests, without a restart
    #[cfg(target_arch = "x86_64")]
    Attach(attach::Args),
    /// Takes the agents out again that attach has put into processes
    #[cfg(target_arch = "x86_64")]
    Detach(attach::Detach),
    /// Shows the counters
    Status(view::status::Args),
    /// Shows the guests live, on the whole terminal
    Top(view::top::Args),
    /// Turns knobs of a running daemon; alone it lists them
    Set(view::set::Args),
    /// Shows what merging would save, and changes nothing
    ///
    /// What PageONE and KSM have merged already stands in a line of its own. It is no part of what is savable.
    Analyze(analyze::Args),
    /// Finds out what keeps memory from being merged, and says what to do about it
    Doctor(doctor::Args),
    /// Merges the memory of guests now, and tells what that saved
    Merge(merge::Args),
    /// Merges the memory of live guests on this machine and shows what came back
    Demo(demo::Args),
    /// Shows nodes, their memory, and what is on them
    #[command(subcommand)]
    Numa(view::NumaCommand),
    /// Looks after the kernel's KSM, on hosts that stay with it
    #[command(subcommand)]
    Ksm(ksm::KsmCommand),
    /// Serves metrics and a dashboard at an address of this machine
    Serve(serve::Args),
    /// Checks the daemon's configuration files
    #[command(subcommand)]
    Config(daemon::ConfigCommand),
    /// Measures and compares
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Writes manual pages, completions and the example of a configuration, for packages
    #[command(hide = true)]
    Dist(dist::Args),
    /// A guest of the demo or the bench
    #[command(hide = true, subcommand)]
    Guest(guest::Kind),
    /// Puts KSM's knobs back when the process dies that turned them
    #[command(hide = true)]
    KsmWatchdog { knobs: Vec<String> },
    /// Puts vm.max_map_count back when the process dies that raised it
    #[command(hide = true)]
    MappingsWatchdog { before: u64 },
}

/// The version; with the protocol that daemon, agents and command have to share, and the commit where `make build` told it.
fn version() -> String {
    version_of(option_env!("PAGEONE_COMMIT"))
}

fn version_of(commit: Option<&str>) -> String {
    let protocol = wire::VERSION;
    let commit = commit.filter(|commit| !commit.is_empty());
    let commit = commit.map_or(String::new(), |commit| format!(", commit {commit}"));
    format!(
        "{} (protocol {protocol}{commit})",
        env!("CARGO_PKG_VERSION")
    )
}

/// The command line. To a word that is no verb, and like none, the answer names the verbs.
fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| {
        let words: Vec<_> = std::env::args_os().skip(1).collect();
        let error = mended(without_hidden(error), &words);
        let is_unlike = error.get(ContextKind::SuggestedSubcommand).is_none();
        let _ = error.print();
        if error.kind() == ErrorKind::InvalidSubcommand && is_unlike {
            say(&verbs(std::env::args_os().skip(1)));
        }
        // Of `run` any other code is its command's.
        let runs = std::env::args_os().nth(1).is_some_and(|word| word == "run");
        std::process::exit(match error.use_stderr() && runs {
            true => run::OWN_FAILURE.into(),
            false => error.exit_code(),
        })
    })
}

/// Verbs that are in no list are this program's own, and not to be suggested.
fn without_hidden(mut error: clap::Error) -> clap::Error {
    let command = Cli::command();
    let is_hidden = |name: &String| {
        let verb = command.find_subcommand(name);
        verb.is_some_and(clap::Command::is_hide_set)
    };
    let suggested = error.get(ContextKind::SuggestedSubcommand);
    if matches!(suggested, Some(ContextValue::Strings(names)) if names.iter().any(is_hidden)) {
        error.remove(ContextKind::SuggestedSubcommand);
    }
    error
}

/// The error of a flag that there is not, with the tip that helps. The library's own would have the flag taken for a value, or for
/// another flag that begins alike: `set --merge-period` for `--unmerge`, which is of another kind.
fn mended(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let tips = error.remove(ContextKind::Suggested);
    let mut tips = match tips {
        Some(ContextValue::StyledStrs(tips)) => tips,
        _ => Vec::new(),
    };
    tips.retain(|tip| !tip.to_string().contains("as a value"));
    if let Some(tip) = pair_of(&error, words) {
        // The usage has that flag as well.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
        tips = vec![tip.into()];
    }
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

/// How `set` takes the knob that was written as a flag.
fn pair_of(error: &clap::Error, words: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let name = flag.strip_prefix("--").filter(|_| words[0] == "set")?;
    let knob = wire::Knob::named(name).or_else(|| wire::Knob::like(name))?;
    let word = |word: &OsString| word.to_str().map(str::to_owned);
    let joined = format!("{flag}=");
    let mut rest = words
        .iter()
        .filter_map(word)
        .skip_while(|word| *word != *flag && !word.starts_with(&joined));
    let value = match rest.next()?.strip_prefix(&joined) {
        Some(value) => Some(value.to_owned()),
        None => rest.next().filter(|next| !next.starts_with('-')),
    };
    let value = value.unwrap_or_else(|| knob.form.to_owned());
    Some(format!("write {}={value}", knob.key))
}

/// The verbs of the command that these words lead to.
fn verbs(words: impl Iterator<Item = OsString>) -> String {
    let mut command = Cli::command();
    for word in words.filter(|word| word != "help") {
        match command.find_subcommand(&word).cloned() {
            Some(next) => command = next,
            None => break,
        }
    }
    let seen = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    let names: Vec<_> = seen.map(clap::Command::get_name).collect();
    format!("The commands are: {}.", names.join(", "))
}

/// Does what takes much of the stack, on one that is large enough where this thread's may be small (`ulimit -s`): the parser of the command
/// line builds all verbs there. That thread ends with it, for some verbs take a process that has one.
fn with_stack<T: Send>(work: fn() -> T) -> T {
    const STACK: usize = 1 << 20;
    let limit = getrlimit(Resource::Stack).current;
    if limit.is_none_or(|limit| limit >= STACK as u64) {
        return work();
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK);
        match thread.spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            // It may be enough.
            Err(_) => work(),
        }
    })
}

/// Runs the verb of the command line.
#[must_use]
pub fn main() -> ExitCode {
    journal::head_panics();
    let result = match with_stack(parse).verb {
        Verb::Daemon(args) => daemon::main(&args),
        Verb::Run(args) => return run::main(&args),
        #[cfg(target_arch = "x86_64")]
        Verb::Attach(args) => attach::main(&args),
        #[cfg(target_arch = "x86_64")]
        Verb::Detach(args) => attach::detach(&args),
        Verb::Status(args) => view::status::main(&args),
        Verb::Top(args) => view::top::main(&args),
        Verb::Set(args) => view::set::main(&args),
        Verb::Analyze(args) => analyze::main(&args),
        Verb::Doctor(args) => return doctor::main(&args),
        Verb::Merge(args) => merge::main(&args),
        Verb::Demo(args) => demo::main(&args),
        Verb::Numa(command) => command.run(),
        Verb::Ksm(command) => command.run(),
        Verb::Serve(args) => serve::main(&args),
        Verb::Config(command) => command.run(),
        Verb::Bench(command) => command.run(),
        Verb::Dist(args) => dist::main(&args, with_stack(Cli::command)),
        Verb::Guest(kind) => guest::main(kind),
        Verb::KsmWatchdog { knobs } => ksm::watchdog(&knobs),
        Verb::MappingsWatchdog { before } => bench::mappings::watchdog(before),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            journal::tell_error(&format!("pageone: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_names_the_protocol_and_the_commit_if_there_is_one() {
        let protocol = format!("(protocol {}", wire::VERSION);
        let commit = version_of(Some("b0a7-dirty"));
        assert!(
            commit.ends_with(&format!(" {protocol}, commit b0a7-dirty)")),
            "{commit}"
        );
        for none in [None, Some("")] {
            assert!(version_of(none).ends_with(&format!(" {protocol})")));
        }
    }

    #[test]
    fn a_word_that_is_no_verb_is_answered_with_the_verbs() {
        let said = |words: &[&str]| verbs(words.iter().map(OsString::from));
        let all = said(&["frob"]);
        assert!(
            all.contains("daemon, run, ") && !all.contains("guest"),
            "{all}"
        );
        let of_bench = said(&["bench", "frob"]);
        assert!(of_bench.contains("merge, "), "{of_bench}");
        assert!(!of_bench.contains("daemon"), "{of_bench}");
        for asks_for_help in [["help", "bench", "frob"], ["bench", "help", "frob"]] {
            assert_eq!(said(&asks_for_help), of_bench);
        }
    }

    #[test]
    fn a_flag_that_there_is_not_is_answered_with_what_helps() {
        let said = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            let all = [OsString::from("pageone")].into_iter().chain(words.clone());
            let error = Cli::try_parse_from(all).err().expect("no such flag");
            mended(error, &words).to_string()
        };
        for words in [
            &["set", "--merge-period", "5s"][..],
            &["set", "--merge-period=5s"],
            &["set", "--merge_period", "5s"],
        ] {
            let said = said(words);
            assert!(said.contains("write merge_period=5s"), "{said}");
            assert!(!said.contains("--unmerge"), "{said}");
        }
        assert!(said(&["set", "--run"]).contains("write run=0|1|2"));
        for words in [
            ["detach", "--all"],
            ["merge", "--all"],
            ["doctor", "--fix"],
            ["set", "--all"],
        ] {
            let said = said(&words);
            assert!(said.contains(words[1]) && !said.contains("-- --"), "{said}");
        }
        let like = said(&["merge", "--wai"]);
        assert!(like.contains("'--wait'"), "{like}");
    }

    #[test]
    fn a_name_in_the_place_of_a_number_is_answered_with_the_way_to_the_number() {
        for verb in ["attach", "detach", "merge", "analyze", "doctor"] {
            let error = Cli::try_parse_from(["pageone", verb, "redis"]).err();
            let said = error.expect("no number").to_string();
            assert!(said.contains("'redis'") && said.contains("pgrep"), "{said}");
            assert!(
                Cli::try_parse_from(["pageone", verb, "12"]).is_ok(),
                "{verb}"
            );
        }
    }

    const MANUAL: &str = include_str!("../../../docs/cli.md");

    /// The section of the manual on a verb, or else on the one that it is part of.
    fn section<'a>(path: &[&str]) -> Option<&'a str> {
        let of_path = |section: &&str| {
            let heading = section.lines().next().unwrap_or_default();
            let words: Vec<_> = heading
                .split(|c: char| !c.is_ascii_alphanumeric())
                .filter(|word| !word.is_empty())
                .collect();
            words.first() == Some(&"pageone")
                && words.get(1) == path.first()
                && path.iter().all(|word| words.contains(word))
        };
        let found = MANUAL.split("\n## ").skip(1).find(of_path);
        match path {
            [] => None,
            [above @ .., _] => found.or_else(|| section(above)),
        }
    }

    /// Whether a text has the flag, and not one that only begins so.
    fn names(text: &str, flag: &str) -> bool {
        let goes_on = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let mut ends = text.split(flag).skip(1);
        ends.any(|rest| !rest.starts_with(goes_on))
    }

    /// The flags of a command that its section does not name, and those of the commands below it.
    fn missing(command: &clap::Command, path: &[&str], found: &mut Vec<String>) {
        let text = section(path).unwrap_or_default();
        let has_all_knobs = text.contains("[knobs](#pageone-daemon)");
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let Some(long) = arg
                .get_long()
                .filter(|long| !["help", "version"].contains(long))
            else {
                continue;
            };
            let flag = format!("--{long}");
            let is_knob = arg.get_help_heading() == Some("Knobs");
            // What the head of the manual says of sockets holds for all verbs.
            let elsewhere = long == "socket" || is_knob && has_all_knobs;
            if !elsewhere && !names(text, &flag) {
                found.push(format!("pageone {} {flag}", path.join(" ")));
            }
        }
        let verbs = command.get_subcommands();
        for verb in verbs.filter(|verb| !verb.is_hide_set() && verb.get_name() != "help") {
            missing(verb, &[path, &[verb.get_name()]].concat(), found);
        }
    }

    #[test]
    fn the_manual_has_each_flag_of_each_verb() {
        let mut found = Vec::new();
        missing(&Cli::command(), &[], &mut found);
        assert_eq!(found, Vec::<String>::new(), "not in docs/cli.md");
        let unknown = clap::Command::new("pageone")
            .subcommand(clap::Command::new("top").arg(clap::Arg::new("x").long("ever")));
        missing(&unknown, &[], &mut found);
        assert_eq!(found, ["pageone top --ever"], "`--every` is another one");
    }
}
