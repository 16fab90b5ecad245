//! `pageone dist FOLDER`: the files of a package that come from the tables of flags and of knobs.
//!
//! ```text
//! FOLDER/man/man1/pageone*.1                      a page a verb
//! FOLDER/bash-completion/completions/pageone      and so for zsh and fish, each where its shell looks
//! FOLDER/pageone.toml                             all keys, as comments, with their defaults
//! ```
//!
//! Help, manual pages and completions are made from the same table, so none of them is ever behind.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::{Shell, generate_to};
use wire::KNOBS;

/// Where each shell looks, below a prefix's `share`.
const SHELLS: [(Shell, &str, &str, &str); 3] = [
    (
        Shell::Bash,
        "bash-completion/completions",
        "pageone.bash",
        "pageone",
    ),
    (Shell::Zsh, "zsh/site-functions", "_pageone", "_pageone"),
    (
        Shell::Fish,
        "fish/vendor_completions.d",
        "pageone.fish",
        "pageone.fish",
    ),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to
    folder: PathBuf,
}

/// Writes all files for `command`.
pub(crate) fn main(args: &Args, mut command: Command) -> Result<()> {
    let mut write = || -> Result<()> {
        let pages = args.folder.join("man/man1");
        fs::create_dir_all(&pages)?;
        manual(&pages, command.clone())?;
        for (shell, place, made, name) in SHELLS {
            let place = args.folder.join(place);
            fs::create_dir_all(&place)?;
            generate_to(shell, &mut command, "pageone", &place)?;
            fs::rename(place.join(made), place.join(name))?;
        }
        Ok(fs::write(
            args.folder.join("pageone.toml"),
            configuration(),
        )?)
    };
    write().with_context(|| format!("cannot write to {}", args.folder.display()))
}

/// A page for each verb that the help shows.
fn manual(folder: &Path, command: Command) -> Result<()> {
    Ok(clap_mangen::generate_to(without_help(command), folder)?)
}

/// The verb `help` would have a page for each other verb once more.
fn without_help(command: Command) -> Command {
    let command = command.disable_help_subcommand(true);
    command.mut_subcommands(without_help)
}

/// The example of a configuration: it says nothing but the defaults.
fn configuration() -> String {
    let mut text = String::from(
        "# PageONE's configuration: see `man pageone-daemon`. `pageone config check` finds mistakes.\n\
         # Each key stands here with its default. A flag of the daemon wins over this file.\n\n\
         # Where to listen.\n#socket = \"/run/pageone.sock\"\n\n\
         # Who may be a guest, in which domain, and who may see and control.\n\
         #policy = \"/etc/pageone/policy.toml\"\n\n\
         # What to log: error, warn, info, debug, or by part, like \"info,engine=debug\".\n#log = \"info\"\n",
    );
    for knob in KNOBS {
        let (about, key) = (knob.about.trim(), knob.key);
        // A default in words is the machine's.
        let value = match knob.default.contains(' ') {
            true => format!("{key} = {:?}    # {}", knob.form, knob.default),
            false => format!("{key} = {:?}", knob.default),
        };
        let _ = write!(text, "\n# {about}: {}\n#{value}\n", knob.form);
    }
    text.push_str(
        "\n# Running processes that become guests: by command, executable, user, uid, group, gid, cgroup, unit.\n\
         # [[attach]]\n# unit = \"machine.slice\"\n# any = true\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::Config;

    #[test]
    fn the_example_says_the_defaults_and_is_a_configuration() {
        let example = configuration();
        assert_eq!(Config::parse(&example).unwrap(), Config::default());
        let key = |line: &&str| line.starts_with('#') && !line.starts_with("# ");
        let keys = example.lines().filter(key).map(|line| &line[1..]);
        let said: Vec<_> = keys.filter(|line| !line.contains("\"N\"")).collect();
        let config = Config::parse(&said.join("\n")).unwrap();
        assert_eq!(config.knobs, Config::default().knobs);
        assert_eq!(config.socket, Some("/run/pageone.sock".into()));
        assert!(said.len() >= KNOBS.len(), "{example}");
    }
}
